"""Step functions along rays: a launch each for distances and positions, weights, their gradient; two to draw. Placing:
one program = BLOCK intervals of any rays; each computes both its ends, which costs less than to fetch one. Weights: a
program walks along a tile of rays, STEPS intervals at a time; the gradient, as in `cpu`, walks back. Drawing: a program
scans the bins of a tile of rays; then one program = BLOCK new edges of any rays, each found by halving its interval.
Inputs fp16/bf16/fp32, fp32 inside. No atomics."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _triton as gpu
from .._sink import Node
from .._triton import INTERPRETED, cdiv, check_kernel_float, launchable
from ..positions import unit_box
from ..positions.triton import FOLDS, store_positions
from . import LEAST, LEAST_REST, SPACINGS

BLOCK = 256
RAYS, STEPS = (32, 8) if INTERPRETED else (1, 32)
NEAREST, FARTHEST = tl.constexpr(LEAST), tl.constexpr(LEAST_REST)


@triton.jit
def _warp(t, SPACING: tl.constexpr):
    if SPACING == 0:
        return t
    elif SPACING == 1:
        return 1.0 / tl.maximum(t, NEAREST)
    else:
        return tl.where(t < 1.0, 0.5 * t, 1.0 - 0.5 / tl.maximum(t, 1.0))


@triton.jit
def _unwarp(g, SPACING: tl.constexpr):
    if SPACING == 0:
        return g
    elif SPACING == 1:
        return 1.0 / g
    else:
        return tl.where(g < 0.5, 2.0 * g, 0.5 / tl.maximum(1.0 - g, FARTHEST))


@launchable(do_not_specialize=["n_total", "n"])
def _place_kernel(
    p_places, p_origins, p_directions, p_near, p_far, p_distances, p_positions, n_total, n, unit, box,
    SPACING: tl.constexpr, FOLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """box: low, then 1 / size of each axis."""
    i, m = gpu.own_block(n_total, BLOCK)
    i_ray = i // n
    i_place = i + i_ray  # a ray has one place more than intervals
    low = _warp(tl.load(p_near + i_ray, mask=m, other=0.0) / unit, SPACING)
    span = _warp(tl.load(p_far + i_ray, mask=m, other=1.0) / unit, SPACING) - low
    t0 = _unwarp(low + span * tl.load(p_places + i_place, mask=m, other=0.0), SPACING) * unit
    t1 = _unwarp(low + span * tl.load(p_places + i_place + 1, mask=m, other=0.0), SPACING) * unit
    tl.store(p_distances + i_place, t0, mask=m)
    tl.store(p_distances + i_place + 1, t1, mask=m & (i - i_ray * n == n - 1))
    store_positions(p_positions, p_origins, p_directions, i, i_ray, m, (t0 + t1) * 0.5, n_total, box, FOLD)


@triton.jit
def _lengths(p_distances, i_ray, i_bin, m, n):
    p = p_distances + i_ray * (n + 1) + i_bin
    return tl.load(p + 1, mask=m, other=0.0) - tl.load(p, mask=m, other=0.0)


@launchable(do_not_specialize=["n_rays", "n"])
def _weights_kernel(p_density, p_distances, p_weights, p_passed, n_rays, n, RAYS: tl.constexpr, STEPS: tl.constexpr):
    i_ray = (tl.program_id(0) * RAYS + tl.arange(0, RAYS)).to(tl.int64)[:, None]
    before = tl.zeros([RAYS, STEPS], tl.float32)
    for k in range(0, n, STEPS):
        i_bin = k + tl.arange(0, STEPS)[None, :]
        m = (i_ray < n_rays) & (i_bin < n)
        length = _lengths(p_distances, i_ray, i_bin, m, n)
        optical = tl.load(p_density + i_ray * n + i_bin, mask=m, other=0.0).to(tl.float32) * length
        inside = tl.cumsum(optical, 1)
        # Shifted, not subtracted: a dense interval would leave nothing of the digits before it.
        depth = before + gpu.shift_right(inside, 0.0, RAYS, STEPS)
        tl.store(p_weights + i_ray * n + i_bin, tl.exp(-depth) * gpu.one_minus_exp(optical), mask=m)
        if p_passed is not None:
            tl.store(p_passed + i_ray * n + i_bin, tl.exp(-(before + inside)), mask=m)
        before += gpu.spread_last(inside, RAYS, STEPS)


@launchable(do_not_specialize=["n_rays", "n"])
def _gradient_kernel(
    p_distances, p_weights, p_passed, p_arrived, p_grad, n_rays, n, stride_ray, stride_bin,
    RAYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The strides are those of p_arrived."""
    i_ray = (tl.program_id(0) * RAYS + tl.arange(0, RAYS)).to(tl.int64)[:, None]
    behind = tl.zeros([RAYS], tl.float32)
    for step in range(0, tl.cdiv(n, STEPS)):
        i_bin = (tl.cdiv(n, STEPS) - 1 - step) * STEPS + tl.arange(0, STEPS)[None, :]
        m = (i_ray < n_rays) & (i_bin < n)
        length = _lengths(p_distances, i_ray, i_bin, m, n)
        g = tl.load(p_arrived + i_ray * stride_ray + i_bin * stride_bin, mask=m, other=0.0).to(tl.float32)
        weighed = g * tl.load(p_weights + i_ray * n + i_bin, mask=m, other=0.0)
        passed = tl.load(p_passed + i_ray * n + i_bin, mask=m, other=0.0)
        later = behind[:, None] + gpu.sum_after(weighed, RAYS, STEPS)
        tl.store(p_grad + i_ray * n + i_bin, length * (passed * g - later), mask=m)
        behind += tl.sum(weighed, 1)


def place_intervals(places, origins, directions, *, near, far, spacing, unit, space) -> tuple[Tensor, Tensor]:
    named = {"places": places, "origins": origins, "directions": directions, "near": near, "far": far}
    check_kernel_float(**named)
    n_rays, n = places.shape[0], places.shape[1] - 1
    total, device = n_rays * n, places.device
    distances = torch.empty(n_rays, n + 1, dtype=torch.float32, device=device)
    positions = torch.empty(3, total, dtype=torch.float32, device=device)
    box = unit_box(space.aabb)
    if total:
        _place_kernel[(cdiv(total, BLOCK),)](
            *(value.detach().float().contiguous() for value in named.values()), distances, positions, total, n,
            float(unit), box, SPACING=SPACINGS.index(spacing), FOLD=FOLDS[space.contraction], BLOCK=BLOCK,
        )  # fmt: skip
    return distances, positions.t()


class _IntervalWeights(Node):
    @staticmethod
    def forward(ctx: Any, density: Tensor, distances: Tensor) -> Tensor:
        (n_rays, n), device = density.shape, density.device
        weights = torch.empty(n_rays, n, dtype=torch.float32, device=device)
        passed = torch.empty_like(weights) if ctx.needs_input_grad[0] else None
        distances = distances.float().contiguous()
        if weights.numel():
            _weights_kernel[(cdiv(n_rays, RAYS),)](
                density.contiguous(), distances, weights, passed, n_rays, n, RAYS=RAYS, STEPS=STEPS, num_warps=1
            )
        ctx.save_for_backward(distances, weights, passed)
        ctx.dtype = density.dtype
        return weights

    @staticmethod
    def backward(ctx: Any, arrived: Tensor) -> tuple[Tensor | None, ...]:
        distances, weights, passed = ctx.saved_tensors
        n_rays, n = weights.shape
        grad = torch.empty(n_rays, n, dtype=torch.float32, device=weights.device)
        if grad.numel():
            _gradient_kernel[(cdiv(n_rays, RAYS),)](
                distances, weights, passed, arrived, grad, n_rays, n, *arrived.stride(), RAYS=RAYS, STEPS=STEPS,
                num_warps=1,
            )  # fmt: skip
        return (grad.to(ctx.dtype),)


def interval_weights(density: Tensor, distances: Tensor) -> Tensor:
    check_kernel_float(density=density, distances=distances)
    return _IntervalWeights.apply(density, distances)  # type: ignore[no-any-return]


DRAW_BLOCK = 256


@triton.jit
def _drawn_weight(p_ray, i_bin, m, n_bins, stride, padding, BLUR: tl.constexpr):
    """What the bins of a ray are drawn by; 0 where `m` is not set."""
    weight = tl.load(p_ray + i_bin * stride, mask=m, other=0.0).to(tl.float32)
    if BLUR:
        before = tl.load(p_ray + tl.maximum(i_bin - 1, 0) * stride, mask=m, other=0.0).to(tl.float32)
        behind = tl.load(p_ray + tl.minimum(i_bin + 1, n_bins - 1) * stride, mask=m, other=0.0).to(tl.float32)
        weight = 0.5 * (tl.maximum(before, weight) + tl.maximum(weight, behind))
    return tl.where(m, weight + padding, 0.0)


@launchable(do_not_specialize=["n_rays", "n_bins"])
def _cumulate_kernel(
    p_edges, p_weights, p_cdf, n_rays, n_bins, padding, strides,
    BLUR: tl.constexpr, RAYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    i_ray = (tl.program_id(0) * RAYS + tl.arange(0, RAYS)).to(tl.int64)[:, None]
    m_ray = i_ray < n_rays
    total = tl.zeros([RAYS, STEPS], tl.float32)
    for k in range(0, n_bins, STEPS):
        i_bin = k + tl.arange(0, STEPS)[None, :]
        m = m_ray & (i_bin < n_bins)
        total += _drawn_weight(p_weights + i_ray * strides[2], i_bin, m, n_bins, strides[3], padding, BLUR)
    use_weights = tl.sum(total, 1)[:, None] > 0.0
    p_cdf += i_ray * (n_bins + 1)
    tl.store(p_cdf, tl.zeros([RAYS, 1], tl.float32), mask=m_ray)
    before = tl.zeros([RAYS, STEPS], tl.float32)
    for k in range(0, n_bins, STEPS):
        i_bin = k + tl.arange(0, STEPS)[None, :]
        m = m_ray & (i_bin < n_bins)
        p_edge = p_edges + i_ray * strides[0] + i_bin * strides[1]
        low = tl.load(p_edge, mask=m, other=0.0).to(tl.float32)
        high = tl.load(p_edge + strides[1], mask=m, other=0.0).to(tl.float32)
        weight = _drawn_weight(p_weights + i_ray * strides[2], i_bin, m, n_bins, strides[3], padding, BLUR)
        running = before + tl.cumsum(tl.where(use_weights, weight, high - low), 1)
        tl.store(p_cdf + 1 + i_bin, running, mask=m)
        before = gpu.spread_last(running, RAYS, STEPS)


@launchable(do_not_specialize=["n_total", "n_bins", "n_edges", "search"])
def _invert_kernel(p_edges, p_cdf, p_jitter, p_out, n_total, n_bins, n_edges, search, strides, BLOCK: tl.constexpr):
    i_out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = i_out < n_total
    i_ray = i_out // n_edges
    i_edge = i_out % n_edges
    shift = 0.5
    if p_jitter is not None:
        shift = tl.load(p_jitter + i_ray * strides[2] + i_edge * strides[3], mask=m, other=0.5).to(tl.float32)
    p_cdf += i_ray * (n_bins + 1)
    target = (i_edge.to(tl.float32) + shift) / n_edges * tl.load(p_cdf + n_bins, mask=m, other=0.0)
    low = tl.zeros([BLOCK], tl.int32)  # cdf[low] <= target, and the bin is low ... low + 1
    high = tl.zeros([BLOCK], tl.int32) + n_bins
    for _ in range(search):
        middle = (low + high) // 2
        below = tl.load(p_cdf + middle, mask=m, other=0.0) <= target
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    low = tl.minimum(low, n_bins - 1)
    cdf0 = tl.load(p_cdf + low, mask=m, other=0.0)
    span = tl.load(p_cdf + low + 1, mask=m, other=0.0) - cdf0
    p_edge = p_edges + i_ray * strides[0] + low * strides[1]
    edge0 = tl.load(p_edge, mask=m, other=0.0).to(tl.float32)
    edge1 = tl.load(p_edge + strides[1], mask=m, other=0.0).to(tl.float32)
    inside = tl.where(span > 0.0, (target - cdf0) / tl.maximum(span, 1.1754943508222875e-38), 0.0)
    inside = tl.minimum(tl.maximum(inside, 0.0), 1.0)
    tl.store(p_out + i_out, tl.minimum(edge0 + inside * (edge1 - edge0), edge1), mask=m)


@torch.no_grad()
def importance_sample(edges, weights, n_samples, *, jitter, padding, blur) -> Tensor:
    check_kernel_float(edges=edges, weights=weights, jitter=jitter)
    n_rays, n_bins = weights.shape
    out = torch.empty(n_rays, n_samples + 1, dtype=torch.float32, device=edges.device)
    if n_rays == 0:
        return out
    cdf = torch.empty(n_rays, n_bins + 1, dtype=torch.float32, device=edges.device)
    rays = 32 if INTERPRETED else 1
    _cumulate_kernel[(cdiv(n_rays, rays),)](
        edges, weights, cdf, n_rays, n_bins, padding, (*edges.stride(), *weights.stride()), BLUR=blur, RAYS=rays,
        STEPS=32, num_warps=1,
    )  # fmt: skip
    jitter_strides = (0, 0) if jitter is None else jitter.expand(n_rays, n_samples + 1).stride()
    _invert_kernel[(cdiv(out.numel(), DRAW_BLOCK),)](
        edges, cdf, jitter, out, out.numel(), n_bins, n_samples + 1, n_bins.bit_length(),
        (*edges.stride(), *jitter_strides), BLOCK=DRAW_BLOCK,
    )  # fmt: skip
    return out
