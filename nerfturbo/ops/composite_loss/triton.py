"""Logits to loss and back in one launch: activations, compositing, loss and the gradient to the logits, over tiles of
rays as in `_triton`. Each program leaves its part of the loss in memory and one last program adds the parts in order:
deterministic. The backward multiplies the gradient by what arrives at the loss, read on the device. The regularisers
walk along their rays twice. Derivations: docs/ops/composite.md, docs/ops/ray_losses.md. Logits fp16/bf16/fp32 in any
layout, fp32 inside; the gradient has the logits' dtype and layout, zero in the tail."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _triton as gpu
from .._sink import Node
from .._triton import TAIL_BLOCK, cdiv, check_kernel_float, launchable
from ..composite.triton import intervals, tile_weights
from . import SURE

SUM_BLOCK = 1024
SCALE_BLOCK = 1024


@triton.jit
def _activate(p_raw, p_starts, p_ends, row, m, strides):
    """Length and density of a tile's samples, and their three colours."""
    length = tl.load(p_ends + row, mask=m, other=0.0) - tl.load(p_starts + row, mask=m, other=0.0)
    p = p_raw + row.to(tl.int64) * strides[0]
    red = tl.sigmoid(tl.load(p, mask=m, other=0.0).to(tl.float32))
    green = tl.sigmoid(tl.load(p + strides[1], mask=m, other=0.0).to(tl.float32))
    blue = tl.sigmoid(tl.load(p + 2 * strides[1], mask=m, other=0.0).to(tl.float32))
    logit = tl.load(p + 3 * strides[1], mask=m, other=0.0).to(tl.float32)
    return length, tl.exp(tl.minimum(logit, 15.0, propagate_nan=tl.PropagateNan.ALL)), red, green, blue


@triton.jit
def _channel_loss(
    colour, opacity, p_background, p_target, p_rgb, i_ray, m_ray, trained, strides, delta, C: tl.constexpr,
    HUBER: tl.constexpr, ALPHA: tl.constexpr,
):  # fmt: skip
    """Background, loss, squared error and the loss's derivative of channel C of each ray; writes the ray's colour."""
    background = tl.load(p_background + i_ray * strides[2] + C * strides[3], mask=m_ray, other=0.0).to(tl.float32)
    target = tl.load(p_target + i_ray * strides[4] + C * strides[5], mask=m_ray, other=0.0).to(tl.float32)
    if ALPHA:
        alpha = tl.load(p_target + i_ray * strides[4] + 3 * strides[5], mask=m_ray, other=1.0).to(tl.float32)
        target = target * alpha + background * (1.0 - alpha)
    rgb = colour + background * (1.0 - opacity)
    tl.store(p_rgb + i_ray * 3 + C, rgb, mask=m_ray)
    error = tl.where(trained, rgb - target, 0.0)
    square = error * error
    if HUBER:
        size = tl.abs(error)
        loss = tl.where(size <= delta, square / (2.0 * delta), size - 0.5 * delta)
        slope = tl.where(size <= delta, error / delta, tl.where(error > 0.0, 1.0, -1.0))
    else:
        loss = square
        slope = 2.0 * error
    return background, loss, square, slope


@triton.jit
def _store_gradient(
    p_grad, row, m, length, density, red, green, blue, passed, before, weight, lit, slopes, background, behind, strides,
    RAYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Gradient to the four logits of a tile's samples, given the sum of w dL/dw behind the tile."""
    g = slopes[0][:, None] * red + slopes[1][:, None] * green + slopes[2][:, None] * blue - background[:, None]
    b_wg = weight * g
    later = behind + gpu.sum_after(b_wg, RAYS, STEPS)
    grad = length * tl.where(lit, before * passed * g - later, 0.0) * tl.where(lit, density, 0.0)
    p = p_grad + row.to(tl.int64) * strides[6]
    tl.store(p, weight * slopes[0][:, None] * red * (1.0 - red), mask=m)
    tl.store(p + strides[7], weight * slopes[1][:, None] * green * (1.0 - green), mask=m)
    tl.store(p + 2 * strides[7], weight * slopes[2][:, None] * blue * (1.0 - blue), mask=m)
    tl.store(p + 3 * strides[7], grad, mask=m)


@triton.jit
def _write_gradient(
    p_raw, p_starts, p_ends, p_grad, start, count, longest, last, slopes, total, largest, background, strides,
    RAYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The second walk, over all tiles of the rays but the last, which the first walk left in registers."""
    seen = tl.zeros([RAYS], tl.float32)
    through = tl.full([RAYS, STEPS], 1.0, tl.float32)
    k = 0
    while k + STEPS < longest:
        row, m = gpu.tile_rows(start, count, k, STEPS)
        length, density, red, green, blue = _activate(p_raw, p_starts, p_ends, row, m, strides)
        passed, before, weight, lit, through = tile_weights(density * length, m, through, 0.0, 0.0, RAYS, STEPS)
        g = slopes[0][:, None] * red + slopes[1][:, None] * green + slopes[2][:, None] * blue - background[:, None]
        seen += tl.sum(weight * g, 1)
        # What lies behind the tile is a difference of sums; a dense sample would multiply its rounding, but then
        # little light is left, and the weights behind add up to no more than that.
        bound = through * largest[:, None]
        behind = tl.minimum(tl.maximum((total - seen)[:, None], -bound), bound)
        _store_gradient(
            p_grad, row, m, length, density, red, green, blue, passed, before, weight, lit, slopes, background, behind,
            strides, RAYS, STEPS,
        )  # fmt: skip
        k += STEPS
    row, m = gpu.tile_rows(start, count, k, STEPS)
    _store_gradient(
        p_grad, row, m, last[0], last[1], last[2], last[3], last[4], last[5], last[6], last[7], m & (last[8] != 0),
        slopes, background, tl.zeros([RAYS, STEPS], tl.float32), strides, RAYS, STEPS,
    )  # fmt: skip


@triton.jit
def _colours(
    p_raw, p_starts, p_ends, start, count, longest, strides,
    RAYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The first walk: colour without background and opacity of the rays of a tile, and all of its last samples."""
    zero = tl.zeros([RAYS, STEPS], tl.float32)
    b_red, b_green, b_blue, b_opacity = zero, zero, zero, zero
    length, density, red, green, blue, passed, before, weight = zero, zero, zero, zero, zero, zero, zero, zero
    shines = tl.zeros([RAYS, STEPS], tl.int32)
    through = zero + 1.0
    for k in range(0, longest, STEPS):
        row, m = gpu.tile_rows(start, count, k, STEPS)
        length, density, red, green, blue = _activate(p_raw, p_starts, p_ends, row, m, strides)
        passed, before, weight, lit, through = tile_weights(density * length, m, through, 0.0, 0.0, RAYS, STEPS)
        shines = lit.to(tl.int32)
        b_red += tl.where(lit, weight * red, 0.0)
        b_green += tl.where(lit, weight * green, 0.0)
        b_blue += tl.where(lit, weight * blue, 0.0)
        b_opacity += weight
    last = (length, density, red, green, blue, passed, before, weight, shines)
    return tl.sum(b_red, 1), tl.sum(b_green, 1), tl.sum(b_blue, 1), tl.sum(b_opacity, 1), last


@launchable(do_not_specialize=["n_rays", "n_rows", "ray_programs"])
def _loss_kernel(
    p_raw, p_starts, p_ends, p_offsets, p_background, p_target, p_kept, p_scale, p_rgb, p_parts, p_grad,
    n_rays, n_rows, ray_programs, strides, delta,
    HUBER: tl.constexpr, ALPHA: tl.constexpr, RAYS: tl.constexpr, STEPS: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) < ray_programs:
        n_trained = gpu.used_rows(p_kept, n_rays)
        share = 1.0 / (3.0 * tl.maximum(n_trained, 1).to(tl.float32))
        b_loss = tl.zeros([RAYS], tl.float32)
        b_square = tl.zeros([RAYS], tl.float32)
        for tile in range(tl.program_id(0), tl.cdiv(n_rays, RAYS), ray_programs):
            i_ray, m_ray, start, count = gpu.ray_tile(p_offsets, tile, n_rays, RAYS)
            longest = tl.max(count, 0)
            red, green, blue, opacity, last = _colours(
                p_raw, p_starts, p_ends, start, count, longest, strides, RAYS, STEPS
            )
            loss, square = _finish_rays(
                p_raw, p_starts, p_ends, p_background, p_target, p_scale, p_rgb, p_grad, n_trained, share, i_ray, m_ray,
                start, count, longest, last, red, green, blue, opacity, strides, delta,
                HUBER, ALPHA, RAYS, STEPS,
            )  # fmt: skip
            b_loss += loss
            b_square += square
        tl.store(p_parts + tl.program_id(0), tl.sum(b_loss, 0) * share)
        tl.store(p_parts + ray_programs + tl.program_id(0), tl.sum(b_square, 0) * share)
    elif p_grad is not None:
        n_used = tl.load(p_offsets + n_rays)
        for c in range(4):
            gpu.zero_tail(p_grad + c * strides[7], strides[6], ray_programs, n_used, n_rows, TAIL)


@triton.jit
def _finish_rays(
    p_raw, p_starts, p_ends, p_background, p_target, p_scale, p_rgb, p_grad, n_trained, share, i_ray, m_ray,
    start, count, longest, last, red, green, blue, opacity, strides, delta,
    HUBER: tl.constexpr, ALPHA: tl.constexpr, RAYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """From the tile's colours to each ray's loss and squared error, and to the gradient."""
    trained = m_ray & (i_ray < n_trained)
    back0, loss0, square0, slope0 = _channel_loss(
        red, opacity, p_background, p_target, p_rgb, i_ray, m_ray, trained, strides, delta, 0, HUBER, ALPHA
    )
    back1, loss1, square1, slope1 = _channel_loss(
        green, opacity, p_background, p_target, p_rgb, i_ray, m_ray, trained, strides, delta, 1, HUBER, ALPHA
    )
    back2, loss2, square2, slope2 = _channel_loss(
        blue, opacity, p_background, p_target, p_rgb, i_ray, m_ray, trained, strides, delta, 2, HUBER, ALPHA
    )
    if p_grad is not None:
        if p_scale is not None:
            share *= tl.load(p_scale)
        slopes = (slope0 * share, slope1 * share, slope2 * share)
        behind = slopes[0] * back0 + slopes[1] * back1 + slopes[2] * back2  # what the background loses to opacity
        total = slopes[0] * red + slopes[1] * green + slopes[2] * blue - behind * opacity
        largest = tl.abs(slopes[0]) * (1.0 + tl.abs(back0)) + tl.abs(slopes[1]) * (1.0 + tl.abs(back1))
        largest += tl.abs(slopes[2]) * (1.0 + tl.abs(back2))  # no |dL/dw| exceeds this
        _write_gradient(
            p_raw, p_starts, p_ends, p_grad, start, count, longest, last, slopes, total, largest, behind, strides,
            RAYS, STEPS,
        )  # fmt: skip
    return loss0 + loss1 + loss2, square0 + square1 + square2


@launchable(do_not_specialize=["n_parts"])
def _sum_kernel(p_parts, p_loss, p_mse, n_parts, BLOCK: tl.constexpr):
    b_loss = tl.zeros([BLOCK], tl.float32)
    b_mse = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n_parts, BLOCK):
        i = first + tl.arange(0, BLOCK)
        b_loss += tl.load(p_parts + i, mask=i < n_parts, other=0.0)
        if p_mse is not None:
            b_mse += tl.load(p_parts + n_parts + i, mask=i < n_parts, other=0.0)
    tl.store(p_loss, tl.sum(b_loss, 0))
    if p_mse is not None:
        tl.store(p_mse, tl.sum(b_mse, 0))


@launchable
def _scale_kernel(p_grad, p_arrived, p_scale, p_out, n, BLOCK: tl.constexpr):
    factor = tl.load(p_arrived).to(tl.float32)
    if p_scale is not None:
        factor = tl.div_rn(factor, tl.load(p_scale))
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(p_grad + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(p_out + i, value * factor, mask=i < n)


def _scale_gradient(ctx: Any, arrived: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient that the forward left, times what arrives at the loss over the scale it was kept at."""
    grad, scale = ctx.saved_tensors
    out, n = torch.empty_like(grad), grad.numel()
    if n:
        _scale_kernel[(cdiv(n, SCALE_BLOCK),)](grad, arrived, scale, out, n, BLOCK=SCALE_BLOCK)
    return (out,)


class _CompositeLoss(Node):
    @staticmethod
    def forward(ctx, raw, samples, background, target, rule, scale) -> tuple[Tensor, Tensor, Tensor]:
        n_rays, n_rows, device = samples.n_rays, raw.shape[0], raw.device
        tile, programs = gpu.ray_grid(n_rows, n_rays, device)
        grad = gpu.empty_in_layout_of(raw) if ctx.needs_input_grad[0] else None
        rgb = torch.empty(n_rays, 3, dtype=torch.float32, device=device)
        parts = torch.empty(2 * programs, dtype=torch.float32, device=device)
        loss, mse = (torch.empty((), dtype=torch.float32, device=device) for _ in range(2))
        grad_strides = (0, 0) if grad is None else grad.stride()
        if n_rays or n_rows:
            _loss_kernel[(programs + (0 if grad is None else gpu.tail_programs(n_rows)),)](
                raw, *intervals(samples), background, target, samples.n_rays_kept, scale, rgb, parts, grad,
                n_rays, n_rows, programs, (*raw.stride(), *background.stride(), *target.stride(), *grad_strides),
                rule.delta, HUBER=rule.kind == "huber", ALPHA=target.shape[1] == 4, **tile, TAIL=TAIL_BLOCK,
                num_warps=1,
            )  # fmt: skip
        _sum_kernel[(1,)](parts, loss, mse, programs, BLOCK=SUM_BLOCK, num_warps=8)
        ctx.save_for_backward(grad, scale)
        ctx.mark_non_differentiable(mse, rgb)
        return loss, mse, rgb

    backward = staticmethod(_scale_gradient)


def composite_loss(raw, samples, background, target, *, rule, gradient_scale) -> tuple[Tensor, Tensor, Tensor]:
    check_kernel_float(raw=raw, background=background, target=target)
    scale = None if gradient_scale is None else gradient_scale.detach().float()
    return _CompositeLoss.apply(raw, samples, background.detach(), target.detach(), rule, scale)


LOW, HIGH = tl.constexpr(SURE), tl.constexpr(1.0 - SURE)


@triton.jit
def _load_tile(p_logits, edges, row, m, origin, stride):
    """Length, distance of the middle from the ray's first one, both between the second pair of `edges`, and optical
    thickness of a tile's samples."""
    t0 = tl.load(edges[0] + row, mask=m, other=0.0)
    t1 = tl.load(edges[1] + row, mask=m, other=0.0)
    s0 = tl.load(edges[2] + row, mask=m, other=0.0)
    s1 = tl.load(edges[3] + row, mask=m, other=0.0)
    logit = tl.load(p_logits + row.to(tl.int64) * stride, mask=m, other=0.0).to(tl.float32)
    density = tl.exp(tl.minimum(logit, 15.0, propagate_nan=tl.PropagateNan.ALL))
    return s1 - s0, tl.where(m, 0.5 * (s0 + s1) - origin[:, None], 0.0), density * (t1 - t0)


@triton.jit
def _ray_sums(
    p_logits, edges, start, count, longest, origin, stride,
    RAYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Sums along each ray of a tile: weights, weights times distance, distortion; the greatest distance and length."""
    total = tl.zeros([RAYS], tl.float32)
    moment, spread, reach = total, total, total
    through = tl.full([RAYS, STEPS], 1.0, tl.float32)
    for k in range(0, longest, STEPS):
        row, m = gpu.tile_rows(start, count, k, STEPS)
        length, middle, optical = _load_tile(p_logits, edges, row, m, origin, stride)
        passed, before, weight, lit, through = tile_weights(optical, m, through, 0.0, 0.0, RAYS, STEPS)
        b_total = total[:, None] + tl.cumsum(weight, 1)
        b_moment = moment[:, None] + tl.cumsum(weight * middle, 1)
        spread += tl.sum(2.0 * weight * (middle * b_total - b_moment) + weight * weight * length * (1.0 / 3.0), 1)
        reach = tl.maximum(reach, tl.max(middle + length, 1))
        total += tl.sum(weight, 1)
        moment += tl.sum(weight * middle, 1)
    return total, moment, spread, reach


@triton.jit
def _write_density_gradient(
    p_logits, edges, p_grad, start, count, longest, origin, total, moment, whole, largest, rise, near,
    strides, RAYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The second walk. `near` and `rise` are what each ray's distortion and opacity count, `whole`
    the sum of w dL/dw along it and `largest` a bound of |dL/dw|."""
    a_seen = tl.zeros([RAYS], tl.float32)
    b_seen, seen = a_seen, a_seen
    through = tl.full([RAYS, STEPS], 1.0, tl.float32)
    for k in range(0, longest, STEPS):
        row, m = gpu.tile_rows(start, count, k, STEPS)
        length, middle, optical = _load_tile(p_logits, edges, row, m, origin, strides[0])
        passed, before, weight, lit, through = tile_weights(optical, m, through, 0.0, 0.0, RAYS, STEPS)
        a = a_seen[:, None] + tl.cumsum(weight, 1)
        b = b_seen[:, None] + tl.cumsum(weight * middle, 1)
        far = middle * a - b + (moment[:, None] - b) - middle * (total[:, None] - a)
        g = 2.0 * near[:, None] * (far + weight * length * (1.0 / 3.0)) + rise[:, None]
        seen += tl.sum(weight * g, 1)
        bound = through * largest[:, None]  # what lies behind is a difference of sums: see composite_loss
        behind = tl.minimum(tl.maximum((whole - seen)[:, None], -bound), bound)
        later = behind + gpu.sum_after(weight * g, RAYS, STEPS)
        slope = before * passed * g - later
        tl.store(p_grad + row.to(tl.int64) * strides[1], tl.where(lit, optical * slope, 0.0), mask=m)
        a_seen += tl.sum(weight, 1)
        b_seen += tl.sum(weight * middle, 1)


@launchable(do_not_specialize=["n_rays", "ray_programs"])
def _rays_kernel(
    p_logits, p_starts, p_ends, p_left, p_right, p_offsets, p_kept, p_scale, p_parts, p_grad, n_rays, ray_programs,
    strides, weights, RAYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The distortion counts in the places from p_left to p_right. `weights` of distortion over unit and
    opacity; p_parts (programs,): of the loss."""
    edges = (p_starts, p_ends, p_left, p_right)
    n_trained = gpu.used_rows(p_kept, n_rays)
    share = 1.0 / tl.maximum(n_trained, 1).to(tl.float32)
    scale = share
    if p_scale is not None:
        scale *= tl.load(p_scale)
    b_loss = tl.zeros([RAYS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_rays, RAYS), ray_programs):
        i_ray, m_ray, start, count = gpu.ray_tile(p_offsets, tile, n_rays, RAYS)
        longest = tl.max(count, 0)
        m_first = count > 0
        origin = tl.load(p_left + start, mask=m_first, other=0.0) + tl.load(p_right + start, mask=m_first, other=0.0)
        origin *= 0.5
        total, moment, spread, reach = _ray_sums(
            p_logits, edges, start, count, longest, origin, strides[0], RAYS, STEPS
        )
        trained = m_ray & (i_ray < n_trained)
        opacity = tl.minimum(tl.maximum(total, LOW), HIGH)
        solid, rest = tl.log(opacity), tl.log(1.0 - opacity)
        entropy = -opacity * solid - (1.0 - opacity) * rest
        b_loss += tl.where(trained, weights[0] * spread + weights[1] * entropy, 0.0)
        if p_grad is not None:
            counted = tl.where(trained, scale, 0.0)
            near = counted * weights[0]
            rise = tl.where((total > LOW) & (total < HIGH), counted * weights[1] * (rest - solid), 0.0)
            whole = 2.0 * near * spread + rise * total
            _write_density_gradient(
                p_logits, edges, p_grad, start, count, longest, origin, total, moment, whole,
                2.0 * near * reach + tl.abs(rise), rise, near, strides, RAYS, STEPS,
            )  # fmt: skip
    tl.store(p_parts + tl.program_id(0), tl.sum(b_loss, 0) * share)


class _RayLosses(Node):
    @staticmethod
    def forward(ctx, raw, samples, places, rule, scale) -> Tensor:
        n_rays, device = samples.n_rays, raw.device
        tile, programs = gpu.ray_grid(raw.shape[0], n_rays, device)
        grad = torch.zeros_like(raw) if ctx.needs_input_grad[0] else None
        parts = torch.empty(programs, dtype=torch.float32, device=device)
        loss = torch.empty((), dtype=torch.float32, device=device)
        if n_rays:
            _rays_kernel[(programs,)](
                p_logits=raw[:, 3], p_starts=samples.t_starts, p_ends=samples.t_ends, p_left=places.t_starts,
                p_right=places.t_ends, p_offsets=samples.offsets,
                p_kept=samples.n_rays_kept, p_scale=scale, p_parts=parts, p_grad=None if grad is None else grad[:, 3],
                n_rays=n_rays, ray_programs=programs, strides=(raw.stride(0), 0 if grad is None else grad.stride(0)),
                weights=(rule.distortion / rule.unit, rule.opacity), **tile, num_warps=1,
            )  # fmt: skip
        _sum_kernel[(1,)](parts, loss, None, programs, BLOCK=SUM_BLOCK, num_warps=8)
        ctx.save_for_backward(grad, scale)
        return loss

    backward = staticmethod(_scale_gradient)


def ray_losses(raw, samples, places, *, rule, gradient_scale) -> Tensor:
    check_kernel_float(raw=raw)
    scale = None if gradient_scale is None else gradient_scale.detach().float()
    return _RayLosses.apply(raw, samples, places, rule, scale)
