"""Compositing along rays, forward and backward, and the visibility test. Tiles of rays as in `_triton`. A program holds
the running transmittance of its rays and walks along them; a scan inside the tile gives the product of (1 - alpha)
before each sample. The second axis of the forward's grid takes further groups of channels, which repeat the scan. The
backward recomputes what the forward knew (docs/ops/composite.md). A background b adds (1 - opacity) * b to a ray's
colour, so that each colour counts as rgb - b. Inputs fp16/bf16/fp32 with any strides, fp32 inside; gradients in the
inputs' dtype and layout, zero in the tail. Weak samples: one lane a ray; a run is written when it ends. No atomics."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import PackedSamples
from .. import _triton as gpu
from .._sink import Node
from .._triton import INTERPRETED, TAIL_BLOCK, cdiv, check_kernel_float, launchable, next_power_of_2
from ..random.triton import unit_float
from . import GOLDEN, LAST_CODE, LONGEST, MIX, OPAQUE, PER_OCTAVE, Thinning

CHANNELS = 4  # composited by one forward program
LEAST_OPACITY = tl.constexpr(torch.finfo(torch.float32).eps)  # that a mean depth is divided by


# Rays begin at any row, so that no load is wide: alignment helps none, and columns of feature-major tensors are aligned
# for some numbers of samples and not for others.
COUNTS = ["n_rays", "n_rows", "ray_programs"]
SAMPLES = ["p_density", "p_starts", "p_ends", "stride"]
COLOURS = [*SAMPLES[:3], "p_rgb", "stride_rgb"]
GRADIENTS = ["p_grad_rgb", "p_grad_opacity", "p_grad_depth", "p_grad_weights"]


@triton.jit
def tile_weights(optical, m, through, early_stop_eps, alpha_thre, RAYS: tl.constexpr, STEPS: tl.constexpr):
    """1 - alpha, T, w and who has weight, for a tile (RAYS, STEPS); `through` is T before it, and after it."""
    alpha = gpu.one_minus_exp(optical)
    counted = m & (alpha >= alpha_thre)  # false for NaN
    passed = tl.where(counted, tl.exp(-optical), 1.0)
    product = tl.cumprod(passed, 1)
    before = through * gpu.shift_right(product, 1.0, RAYS, STEPS)
    lit = counted & (before >= early_stop_eps)
    weight = tl.where(lit, before * alpha, 0.0)
    return passed, before, weight, lit, through * gpu.spread_last(product, RAYS, STEPS)


@triton.jit
def _load_weights(
    p_density, p_starts, p_ends, start, count, k, stride, through, limits,
    RAYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Rows, t0, t1 and `tile_weights` of the samples of a tile."""
    row, m = gpu.tile_rows(start, count, k, STEPS)
    t0 = tl.load(p_starts + row, mask=m, other=0.0)
    t1 = tl.load(p_ends + row, mask=m, other=0.0)
    density = tl.load(p_density + row.to(tl.int64) * stride, mask=m, other=0.0).to(tl.float32)
    optical = density * (t1 - t0)
    passed, before, weight, lit, through = tile_weights(optical, m, through, limits[0], limits[1], RAYS, STEPS)
    return row, m, t0, t1, passed, before, weight, lit, through


@triton.jit
def _threshold(alpha_thre, p_alpha_thre):
    if p_alpha_thre is not None:
        alpha_thre = tl.load(p_alpha_thre)
    return alpha_thre


@launchable(do_not_specialize=COUNTS, do_not_specialize_on_alignment=COLOURS)
def _forward_kernel(
    p_density, p_rgb, p_starts, p_ends, p_offsets, p_alpha_thre, p_background,
    p_out_rgb, p_out_opacity, p_out_depth, p_out_weights,
    n_rays, n_rows, ray_programs, n_channels, stride_rgb, strides, early_stop_eps, alpha_thre,
    CHANNELS: tl.constexpr, RAYS: tl.constexpr, STEPS: tl.constexpr, TAIL: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    is_first = tl.program_id(1) == 0
    if tl.program_id(0) < ray_programs:
        limits = (early_stop_eps, _threshold(alpha_thre, p_alpha_thre))
        i_channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        for tile in range(tl.program_id(0), tl.cdiv(n_rays, RAYS), ray_programs):
            i_ray, m_ray, start, count = gpu.ray_tile(p_offsets, tile, n_rays, RAYS)
            rgb = tl.zeros([RAYS, CHANNELS], tl.float32)
            b_opacity = tl.zeros([RAYS, STEPS], tl.float32)
            b_depth = tl.zeros([RAYS, STEPS], tl.float32)
            through = tl.full([RAYS, STEPS], 1.0, tl.float32)
            for k in range(0, tl.max(count, 0), STEPS):
                row, m, t0, t1, passed, before, weight, lit, through = _load_weights(
                    p_density, p_starts, p_ends, start, count, k, strides[0], through, limits, RAYS, STEPS
                )
                b_opacity += weight
                b_depth += weight * (t0 + t1) * 0.5
                tl.store(p_out_weights + row, weight, mask=m & is_first)
                for c in tl.static_range(CHANNELS):
                    channel = tl.program_id(1) * CHANNELS + c
                    p_channel = p_rgb + row.to(tl.int64) * strides[1] + channel * stride_rgb
                    value = tl.load(p_channel, mask=lit & (channel < n_channels), other=0.0).to(tl.float32)
                    part = tl.sum(weight * value, 1)
                    rgb += tl.where(i_channel[None, :] == channel, part[:, None], 0.0)
            opacity = tl.sum(b_opacity, 1)
            depth = tl.sum(b_depth, 1)
            if MEAN:
                depth = depth / tl.maximum(opacity, LEAST_OPACITY)
            tl.store(p_out_opacity + i_ray, opacity, mask=m_ray & is_first)
            tl.store(p_out_depth + i_ray, depth, mask=m_ray & is_first)
            m_out = m_ray[:, None] & (i_channel[None, :] < n_channels)
            if p_background is not None:
                p_behind = p_background + i_ray.to(tl.int64)[:, None] * strides[2] + i_channel[None, :] * strides[3]
                rgb += (1.0 - opacity)[:, None] * tl.load(p_behind, mask=m_out, other=0.0).to(tl.float32)
            tl.store(p_out_rgb + i_ray.to(tl.int64)[:, None] * n_channels + i_channel[None, :], rgb, mask=m_out)
    elif is_first:
        gpu.zero_tail(p_out_weights, 1, ray_programs, tl.load(p_offsets + n_rays), n_rows, TAIL)


@triton.jit
def _weight_gradient(
    p_rgb, p_background, p_grad_rgb, p_grad_opacity, p_grad_depth, p_grad_weights, p_out, i_ray, m_ray, row, m, lit,
    weight, middle, stride_rgb, stride_out, strides, N_CHANNELS: tl.constexpr,
):  # fmt: skip
    """dL/dw of a tile; with `p_out`, also writes the gradient of the colours, channel after channel."""
    g = tl.zeros_like(weight)
    if p_grad_rgb is not None:
        for c in range(N_CHANNELS):
            p_ray = p_grad_rgb + i_ray.to(tl.int64) * strides[2] + c * strides[3]
            grad = tl.load(p_ray, mask=m_ray, other=0.0).to(tl.float32)[:, None]
            p_channel = p_rgb + row.to(tl.int64) * strides[1] + c * stride_rgb
            value = tl.load(p_channel, mask=lit, other=0.0).to(tl.float32)
            if p_background is not None:
                p_behind = p_background + i_ray.to(tl.int64) * strides[9] + c * strides[10]
                value -= tl.load(p_behind, mask=m_ray, other=0.0).to(tl.float32)[:, None]
            g += grad * value
            if p_out is not None:
                tl.store(p_out + row.to(tl.int64) * strides[7] + c * stride_out, weight * grad, mask=m)
    if p_grad_opacity is not None:
        g += tl.load(p_grad_opacity + i_ray * strides[4], mask=m_ray, other=0.0)[:, None]
    if p_grad_depth is not None:
        g += tl.load(p_grad_depth + i_ray * strides[5], mask=m_ray, other=0.0)[:, None] * middle
    if p_grad_weights is not None:
        g += tl.load(p_grad_weights + row * strides[6], mask=m, other=0.0)
    return g


@triton.jit
def _ray_total(
    p_density, p_rgb, p_starts, p_ends, p_background, p_grad_rgb, p_grad_opacity, p_grad_depth, p_grad_weights,
    i_ray, m_ray, start, count, longest, stride_rgb, strides, limits,
    N_CHANNELS: tl.constexpr, RAYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Sum of w dL/dw along each ray of a tile."""
    total = tl.zeros([RAYS], tl.float32)
    through = tl.full([RAYS, STEPS], 1.0, tl.float32)
    for k in range(0, longest, STEPS):
        row, m, t0, t1, passed, before, weight, lit, through = _load_weights(
            p_density, p_starts, p_ends, start, count, k, strides[0], through, limits, RAYS, STEPS
        )
        g = _weight_gradient(
            p_rgb, p_background, p_grad_rgb, p_grad_opacity, p_grad_depth, p_grad_weights, None, i_ray, m_ray, row, m,
            lit, weight, (t0 + t1) * 0.5, stride_rgb, stride_rgb, strides, N_CHANNELS,
        )  # fmt: skip
        total += tl.sum(weight * g, 1)
    return total


@launchable(do_not_specialize=COUNTS, do_not_specialize_on_alignment=[*COLOURS, *GRADIENTS, "stride_out"])
def _backward_kernel(
    p_density, p_rgb, p_starts, p_ends, p_offsets, p_alpha_thre, p_background,
    p_grad_rgb, p_grad_opacity, p_grad_depth, p_grad_weights, p_out_density, p_out_rgb,
    n_rays, n_rows, ray_programs, stride_rgb, stride_out, strides, early_stop_eps, alpha_thre,
    N_CHANNELS: tl.constexpr, RAYS: tl.constexpr, STEPS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) < ray_programs:
        limits = (early_stop_eps, _threshold(alpha_thre, p_alpha_thre))
        for tile in range(tl.program_id(0), tl.cdiv(n_rays, RAYS), ray_programs):
            i_ray, m_ray, start, count = gpu.ray_tile(p_offsets, tile, n_rays, RAYS)
            longest = tl.max(count, 0)
            total = tl.zeros([RAYS], tl.float32)  # a ray of one tile does not need it
            if longest > STEPS:
                total = _ray_total(
                    p_density, p_rgb, p_starts, p_ends, p_background,
                    p_grad_rgb, p_grad_opacity, p_grad_depth, p_grad_weights,
                    i_ray, m_ray, start, count, longest, stride_rgb, strides, limits, N_CHANNELS, RAYS, STEPS,
                )  # fmt: skip
            seen = tl.zeros([RAYS], tl.float32)  # added up like the total, so that nothing is left behind the last tile
            through = tl.full([RAYS, STEPS], 1.0, tl.float32)
            for k in range(0, longest, STEPS):
                row, m, t0, t1, passed, before, weight, lit, through = _load_weights(
                    p_density, p_starts, p_ends, start, count, k, strides[0], through, limits, RAYS, STEPS
                )
                g = _weight_gradient(
                    p_rgb, p_background, p_grad_rgb, p_grad_opacity, p_grad_depth, p_grad_weights, p_out_rgb,
                    i_ray, m_ray, row, m, lit, weight, (t0 + t1) * 0.5, stride_rgb, stride_out, strides, N_CHANNELS,
                )  # fmt: skip
                if p_out_density is not None:
                    b_wg = weight * g
                    seen += tl.sum(b_wg, 1)
                    behind = tl.where(longest > STEPS, total - seen, 0.0)
                    later = behind[:, None] + gpu.sum_after(b_wg, RAYS, STEPS)
                    grad = (t1 - t0) * tl.where(lit, before * passed * g - later, 0.0)
                    tl.store(p_out_density + row.to(tl.int64) * strides[8], grad, mask=m)
    else:
        n_used = tl.load(p_offsets + n_rays)
        if p_out_density is not None:
            gpu.zero_tail(p_out_density, strides[8], ray_programs, n_used, n_rows, TAIL)
        if p_out_rgb is not None:
            for c in range(N_CHANNELS):
                gpu.zero_tail(p_out_rgb + c * stride_out, strides[7], ray_programs, n_used, n_rows, TAIL)


@launchable(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SAMPLES)
def _visibility_kernel(
    p_density, p_starts, p_ends, p_offsets, p_alpha_thre, p_out, n_rays, n_rows, ray_programs, stride,
    early_stop_eps, alpha_thre, RAYS: tl.constexpr, STEPS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) < ray_programs:
        limits = (early_stop_eps, _threshold(alpha_thre, p_alpha_thre))
        for tile in range(tl.program_id(0), tl.cdiv(n_rays, RAYS), ray_programs):
            i_ray, m_ray, start, count = gpu.ray_tile(p_offsets, tile, n_rays, RAYS)
            through = tl.full([RAYS, STEPS], 1.0, tl.float32)
            for k in range(0, tl.max(count, 0), STEPS):
                row, m, t0, t1, passed, before, weight, lit, through = _load_weights(
                    p_density, p_starts, p_ends, start, count, k, stride, through, limits, RAYS, STEPS
                )
                tl.store(p_out + row, lit.to(tl.uint8), mask=m)
    else:
        gpu.zero_tail(p_out, 1, ray_programs, tl.load(p_offsets + n_rays), n_rows, TAIL)


class _Composite(Node):
    @staticmethod
    def forward(
        ctx, density, rgb, t_starts, t_ends, offsets, early_stop_eps, alpha_thre, background, mean
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        n_rays, (n_rows, n_channels) = offsets.shape[0] - 1, rgb.shape
        out_rgb = torch.empty(n_rays, n_channels, dtype=torch.float32, device=rgb.device)
        opacity = torch.empty(n_rays, dtype=torch.float32, device=rgb.device)
        depth = torch.empty_like(opacity)
        weights = torch.empty(n_rows, dtype=torch.float32, device=rgb.device)
        number, pointer = gpu.scalar_or_pointer(alpha_thre, rgb.device)
        tile, programs = gpu.ray_grid(n_rows, n_rays, rgb.device)
        channels = min(CHANNELS, next_power_of_2(max(n_channels, 1)))
        if n_rays or n_rows:
            grid = (programs + gpu.tail_programs(n_rows), max(1, cdiv(n_channels, channels)))
            _forward_kernel[grid](
                density, rgb, t_starts, t_ends, offsets, pointer, background, out_rgb, opacity, depth, weights,
                n_rays, n_rows, programs, n_channels, rgb.stride(1),
                (density.stride(0), rgb.stride(0), *gpu.ray_strides(background)), early_stop_eps, number,
                CHANNELS=channels, **tile, TAIL=TAIL_BLOCK, MEAN=mean, num_warps=1,
            )  # fmt: skip
        results = (opacity, depth) if mean else (opacity, None)
        ctx.save_for_backward(density, rgb, t_starts, t_ends, offsets, pointer, background, *results)
        ctx.thresholds = (early_stop_eps, number)
        ctx.set_materialize_grads(False)
        return out_rgb, opacity, depth, weights

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        density, rgb, t_starts, t_ends, offsets, pointer, background, opacity, mean_depth = ctx.saved_tensors
        n_rays, (n_rows, n_channels) = offsets.shape[0] - 1, rgb.shape
        if mean_depth is not None and grads[2] is not None:
            grads = _through_mean(grads, opacity, mean_depth)
        wants_density, wants_rgb = ctx.needs_input_grad[0], ctx.needs_input_grad[1] and grads[0] is not None
        grad_density = gpu.empty_in_layout_of(density) if wants_density else None
        grad_rgb = gpu.empty_in_layout_of(rgb) if wants_rgb else None
        if n_rows and (wants_density or wants_rgb):
            tile, programs = gpu.ray_grid(n_rows, n_rays, rgb.device)
            own_rgb = gpu.strides_of(grad_rgb, 2)
            incoming = [s for grad, n in zip(grads, (2, 1, 1, 1), strict=True) for s in gpu.strides_of(grad, n)]
            outgoing = (own_rgb[0], *gpu.strides_of(grad_density, 1))
            strides = (density.stride(0), rgb.stride(0), *incoming, *outgoing, *gpu.ray_strides(background))
            _backward_kernel[(programs + gpu.tail_programs(n_rows),)](
                density, rgb, t_starts, t_ends, offsets, pointer, background, *grads, grad_density, grad_rgb, n_rays,
                n_rows, programs, rgb.stride(1), own_rgb[1], strides, *ctx.thresholds, N_CHANNELS=n_channels, **tile,
                TAIL=TAIL_BLOCK, num_warps=1,
            )  # fmt: skip
        grad_background = None
        if ctx.needs_input_grad[7] and grads[0] is not None:
            grad_background = grads[0] * (1.0 - opacity)[:, None]
            grad_background = grad_background.sum(0) if background.dim() == 1 else grad_background
        return grad_density, grad_rgb, None, None, None, None, None, grad_background


def _through_mean(grads: Sequence[Tensor | None], opacity: Tensor, mean: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of opacity and sum from that of their quotient, the mean depth."""
    grad_rgb, grad_opacity, grad_mean, grad_weights = grads
    assert grad_mean is not None
    grad_sum = grad_mean / opacity.clamp_min(LEAST_OPACITY.value)
    extra = torch.where(opacity > LEAST_OPACITY.value, -grad_sum * mean, torch.zeros_like(mean))
    return grad_rgb, extra if grad_opacity is None else grad_opacity + extra, grad_sum, grad_weights


def composite_pixels(density, rgb, samples, background) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_kernel_float(density=density, rgb=rgb, background=background)
    return _Composite.apply(density, rgb, *intervals(samples), 0.0, 0.0, background, True)


def composite(density, rgb, samples, *, early_stop_eps, alpha_thre) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_kernel_float(density=density, rgb=rgb)
    return _Composite.apply(density, rgb, *intervals(samples), float(early_stop_eps), alpha_thre, None, False)


def intervals(samples: PackedSamples) -> tuple[Tensor, Tensor, Tensor]:
    starts, ends = samples.t_starts, samples.t_ends
    if starts.requires_grad or ends.requires_grad:
        starts, ends = starts.detach(), ends.detach()
    return starts.contiguous(), ends.contiguous(), samples.offsets


def visibility(density: Tensor, samples: PackedSamples, *, early_stop_eps: float, alpha_thre: float | Tensor) -> Tensor:
    check_kernel_float(density=density)
    n_rays, n_rows = samples.n_rays, samples.capacity
    out = torch.empty(n_rows, dtype=torch.uint8, device=density.device)
    if n_rows:
        number, pointer = gpu.scalar_or_pointer(alpha_thre, density.device)
        tile, programs = gpu.ray_grid(n_rows, n_rays, density.device)
        _visibility_kernel[(programs + gpu.tail_programs(n_rows),)](
            density, *intervals(samples), pointer, out, n_rays, n_rows, programs, density.stride(0),
            float(early_stop_eps), number, **tile, TAIL=TAIL_BLOCK, num_warps=1,
        )  # fmt: skip
    return out.view(torch.bool)


RAYS = 512 if INTERPRETED else 32
STEP, FIRST, SECOND = (tl.constexpr(gpu.signed_word(word)) for word in (GOLDEN, *MIX))
MEMBERS = tl.constexpr(LONGEST)
OCTAVE, LAST, THICK = tl.constexpr(float(PER_OCTAVE)), tl.constexpr(LAST_CODE), tl.constexpr(OPAQUE)


@triton.jit
def _chance(phase, place):
    """A random number in [0, 1) for this place along each ray."""
    word = (phase + place * STEP).to(tl.uint32, bitcast=True)
    word = ((word ^ (word >> 16)).to(tl.int32, bitcast=True) * FIRST).to(tl.uint32, bitcast=True)
    word = ((word ^ (word >> 15)).to(tl.int32, bitcast=True) * SECOND).to(tl.uint32, bitcast=True)
    return unit_float(word ^ (word >> 16))


@triton.jit
def _close(p_codes, chosen, stretch, done):
    """The code of the runs that are done, at the rows drawn from them."""
    code = (tl.log2(tl.maximum(stretch, 1.0)) * OCTAVE + 1.5).to(tl.int32)
    tl.store(p_codes + chosen, tl.minimum(code, LAST).to(tl.uint8), mask=done & (chosen >= 0))


@launchable(do_not_specialize=["n_rays"])
def _merge_kernel(p_optical, p_offsets, p_phases, p_codes, n_rays, limit, RAYS: tl.constexpr):
    """p_codes must hold zeros: only rows that are kept are written."""
    i_ray, m_ray, start, count = gpu.ray_tile(p_offsets, tl.program_id(0), n_rays, RAYS)
    phase = tl.load(p_phases + i_ray, mask=m_ray, other=0)
    depth = tl.zeros([RAYS], tl.float32)
    weight, thickness, own = depth, depth, depth + 1.0  # of the run that is under way, and of the row drawn from it
    chosen, members = tl.full([RAYS], -1, tl.int32), tl.zeros([RAYS], tl.int32)
    for place in range(0, tl.max(count, 0)):
        row = start + place
        tau = tl.load(p_optical + row, mask=place < count, other=0.0).to(tl.float32)
        counts = tau > 0.0  # false for NaN
        tau = tl.where(counts, tl.minimum(tau, THICK), 0.0)
        added = tl.exp(-depth) * gpu.one_minus_exp(tau)
        fresh = counts & ((weight + added > limit) | (members == MEMBERS))
        _close(p_codes, chosen, thickness / own, fresh)
        weight = tl.where(fresh, 0.0, weight) + added
        thickness = tl.where(fresh, 0.0, thickness) + tau
        members = tl.where(fresh, 0, members) + counts.to(tl.int32)
        chosen = tl.where(fresh, -1, chosen)
        taken = counts & ((chosen < 0) | (_chance(phase, row - start) * weight < added))
        chosen = tl.where(taken, row, chosen)
        own = tl.where(taken, tau, own)
        depth += tau
    _close(p_codes, chosen, thickness / own, m_ray)


def merge_weak_samples(optical: Tensor, samples: PackedSamples, thinning: Thinning) -> Tensor:
    check_kernel_float(optical=optical)
    codes = torch.zeros(samples.capacity, dtype=torch.uint8, device=optical.device)
    if samples.capacity and samples.n_rays:
        _merge_kernel[(cdiv(samples.n_rays, RAYS),)](
            p_optical=optical.contiguous(), p_offsets=samples.offsets, p_phases=thinning.phases.contiguous(),
            p_codes=codes, n_rays=samples.n_rays, limit=float(thinning.weight), RAYS=RAYS, num_warps=1,
        )  # fmt: skip
    return codes
