"""The regularisers of rays and their gradient in one launch. Tiles of rays as in `_common`.

A program walks along its rays twice: once for their weights and sums, once for the gradient, which needs the sums of
the whole ray. With g_i = dL/dw_i, sum_i w_i g_i needs no walk of its own: the distortion is homogeneous in the weights,
of degree two, so its part is twice the distortion, and the opacity's part is O times its slope. The derivation of the
rest is in docs/ops/ray_losses.md. Sums over samples include the sample itself: its distance to itself is zero.

Logits fp16/bf16/fp32 in any layout, of which the density's column is read; fp32 inside; the gradient has the logits'
dtype and layout, zero in the other columns and in the tail. One last program adds up the programs' parts in
order: no atomics, deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...types import PackedSamples
from ..ray_losses import SURE, RayLossRule
from ._common import CompileCase, check_kernel_float, ray_programs, ray_tile, sum_after, tile_for
from ._launch import cdiv, launchable
from .composite import tile_weights
from .composite_loss import SCALE_BLOCK, SUM_BLOCK, _scale_kernel, _tile_rows

LOW, HIGH = tl.constexpr(SURE), tl.constexpr(1.0 - SURE)


@triton.jit
def _load_tile(p_logits, p_starts, p_ends, row, m, origin, stride, density_bias):
    """Length, distance of the middle from the ray's first one, and optical thickness of a tile's samples."""
    t0 = tl.load(p_starts + row, mask=m, other=0.0)
    t1 = tl.load(p_ends + row, mask=m, other=0.0)
    logit = tl.load(p_logits + row.to(tl.int64) * stride, mask=m, other=0.0).to(tl.float32) + density_bias
    density = tl.exp(tl.minimum(logit, 15.0, propagate_nan=tl.PropagateNan.ALL))
    return t1 - t0, tl.where(m, 0.5 * (t0 + t1) - origin[:, None], 0.0), density * (t1 - t0)


@triton.jit
def _ray_sums(
    p_logits, p_starts, p_ends, start, count, longest, origin, stride, density_bias,
    RAYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Sums along each ray of a tile: weights, weights times distance, distortion, sparsity; and the greatest distance
    and length."""
    total = tl.zeros([RAYS], tl.float32)
    moment, spread, fog, reach = total, total, total, total
    through = tl.full([RAYS, STEPS], 1.0, tl.float32)
    for k in range(0, longest, STEPS):
        row, m = _tile_rows(start, count, k, STEPS)
        length, middle, optical = _load_tile(p_logits, p_starts, p_ends, row, m, origin, stride, density_bias)
        passed, before, weight, lit, through = tile_weights(optical, m, through, 0.0, 0.0, RAYS, STEPS)
        b_total = total[:, None] + tl.cumsum(weight, 1)
        b_moment = moment[:, None] + tl.cumsum(weight * middle, 1)
        spread += tl.sum(2.0 * weight * (middle * b_total - b_moment) + weight * weight * length * (1.0 / 3.0), 1)
        fog += tl.sum(tl.log(1.0 + 2.0 * tl.where(lit, optical * optical, 0.0)), 1)
        reach = tl.maximum(reach, tl.max(middle + length, 1))
        total += tl.sum(weight, 1)
        moment += tl.sum(weight * middle, 1)
    return total, moment, spread, fog, reach


@triton.jit
def _write_gradient(
    p_logits, p_starts, p_ends, p_grad, start, count, longest, origin, total, moment, whole, largest, rise, near, thin,
    strides, density_bias, RAYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The second walk. `near`, `rise` and `thin` are what each ray's distortion, opacity and sparsity count, `whole`
    the sum of w dL/dw along it and `largest` a bound of |dL/dw|."""
    a_seen = tl.zeros([RAYS], tl.float32)
    b_seen, seen = a_seen, a_seen
    through = tl.full([RAYS, STEPS], 1.0, tl.float32)
    for k in range(0, longest, STEPS):
        row, m = _tile_rows(start, count, k, STEPS)
        length, middle, optical = _load_tile(p_logits, p_starts, p_ends, row, m, origin, strides[0], density_bias)
        passed, before, weight, lit, through = tile_weights(optical, m, through, 0.0, 0.0, RAYS, STEPS)
        a = a_seen[:, None] + tl.cumsum(weight, 1)
        b = b_seen[:, None] + tl.cumsum(weight * middle, 1)
        far = middle * a - b + (moment[:, None] - b) - middle * (total[:, None] - a)
        g = 2.0 * near[:, None] * (far + weight * length * (1.0 / 3.0)) + rise[:, None]
        seen += tl.sum(weight * g, 1)
        bound = through * largest[:, None]  # what lies behind is a difference of sums: see composite_loss
        behind = tl.minimum(tl.maximum((whole - seen)[:, None], -bound), bound)
        later = behind + sum_after(weight * g, RAYS, STEPS)
        fog = 4.0 * thin[:, None] * optical / (1.0 + 2.0 * optical * optical)
        slope = before * passed * g - later + fog
        tl.store(p_grad + row.to(tl.int64) * strides[1], tl.where(lit, optical * slope, 0.0), mask=m)
        a_seen += tl.sum(weight, 1)
        b_seen += tl.sum(weight * middle, 1)


@launchable(do_not_specialize=["n_rays", "ray_programs"])
def _rays_kernel(
    p_logits, p_starts, p_ends, p_offsets, p_kept, p_scale, p_parts, p_grad, n_rays, ray_programs, strides, weights,
    density_bias, RAYS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """`weights` of distortion over unit, opacity and sparsity; p_parts (programs,): of the loss."""
    n_trained = n_rays
    if p_kept is not None:
        n_trained = tl.minimum(tl.load(p_kept), n_rays)
    share = 1.0 / tl.maximum(n_trained, 1).to(tl.float32)
    scale = share
    if p_scale is not None:
        scale *= tl.load(p_scale)
    b_loss = tl.zeros([RAYS], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(n_rays, RAYS), ray_programs):
        i_ray, m_ray, start, count = ray_tile(p_offsets, tile, n_rays, RAYS)
        longest = tl.max(count, 0)
        m_first = count > 0
        origin = tl.load(p_starts + start, mask=m_first, other=0.0) + tl.load(p_ends + start, mask=m_first, other=0.0)
        origin *= 0.5
        total, moment, spread, fog, reach = _ray_sums(
            p_logits, p_starts, p_ends, start, count, longest, origin, strides[0], density_bias, RAYS, STEPS
        )
        trained = m_ray & (i_ray < n_trained)
        opacity = tl.minimum(tl.maximum(total, LOW), HIGH)
        solid, rest = tl.log(opacity), tl.log(1.0 - opacity)
        entropy = -opacity * solid - (1.0 - opacity) * rest
        b_loss += tl.where(trained, weights[0] * spread + weights[1] * entropy + weights[2] * fog, 0.0)
        if p_grad is not None:
            counted = tl.where(trained, scale, 0.0)
            near, thin = counted * weights[0], counted * weights[2]
            rise = tl.where((total > LOW) & (total < HIGH), counted * weights[1] * (rest - solid), 0.0)
            whole = 2.0 * near * spread + rise * total
            _write_gradient(
                p_logits, p_starts, p_ends, p_grad, start, count, longest, origin, total, moment, whole,
                2.0 * near * reach + tl.abs(rise), rise, near, thin, strides, density_bias, RAYS, STEPS,
            )  # fmt: skip
    tl.store(p_parts + tl.program_id(0), tl.sum(b_loss, 0) * share)


@launchable(do_not_specialize=["n_parts"])
def _sum_kernel(p_parts, p_loss, n_parts, BLOCK: tl.constexpr):
    b_loss = tl.zeros([BLOCK], tl.float32)
    for first in range(0, n_parts, BLOCK):
        i = first + tl.arange(0, BLOCK)
        b_loss += tl.load(p_parts + i, mask=i < n_parts, other=0.0)
    tl.store(p_loss, tl.sum(b_loss, 0))


class _RayLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, raw: Tensor, samples: PackedSamples, rule: RayLossRule, density_bias: float, scale: Tensor | None
    ) -> Tensor:
        n_rays, device = samples.n_rays, raw.device
        tile = tile_for(raw.shape[0], n_rays)
        programs = ray_programs(cdiv(n_rays, tile["RAYS"]), device)
        grad = torch.zeros_like(raw) if ctx.needs_input_grad[0] else None
        parts = torch.empty(programs, dtype=torch.float32, device=device)
        loss = torch.empty((), dtype=torch.float32, device=device)
        if n_rays:
            _rays_kernel[(programs,)](
                p_logits=raw[:, 3], p_starts=samples.t_starts, p_ends=samples.t_ends, p_offsets=samples.offsets,
                p_kept=samples.n_rays_kept, p_scale=scale, p_parts=parts, p_grad=None if grad is None else grad[:, 3],
                n_rays=n_rays, ray_programs=programs, strides=(raw.stride(0), 0 if grad is None else grad.stride(0)),
                weights=(rule.distortion / rule.unit, rule.opacity, rule.sparsity), density_bias=density_bias, **tile,
                num_warps=1,
            )  # fmt: skip
        _sum_kernel[(1,)](parts, loss, programs, BLOCK=SUM_BLOCK, num_warps=8)
        ctx.save_for_backward(grad, scale)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, arrived: Tensor) -> tuple[Tensor | None, ...]:
        grad, scale = ctx.saved_tensors
        out = torch.empty_like(grad)
        if grad.numel():
            _scale_kernel[(cdiv(grad.numel(), SCALE_BLOCK),)](
                grad, arrived, scale, out, grad.numel(), BLOCK=SCALE_BLOCK
            )
        return out, None, None, None, None  # raw, samples, rule, density_bias, scale


def ray_losses(
    raw: Tensor,
    samples: PackedSamples,
    *,
    rule: RayLossRule,
    density_bias: float,
    gradient_scale: Tensor | None,
) -> Tensor:
    check_kernel_float(raw=raw)
    scale = None if gradient_scale is None else gradient_scale.detach().float()
    return _RayLosses.apply(raw, samples, rule, density_bias, scale)


def _cases() -> list[CompileCase]:
    kernel: dict[str, str | tuple[str, ...]] = dict.fromkeys(("p_logits", "p_starts", "p_ends", "p_scale"), "*fp32")
    kernel |= {"p_offsets": "*i32", "p_kept": "*i32", "p_parts": "*fp32", "p_grad": "*fp32", "n_rays": "i32"}
    kernel |= {"ray_programs": "i32", "strides": ("i32",) * 2, "weights": ("fp32",) * 3, "density_bias": "fp32"}
    cases = [
        CompileCase(_rays_kernel, kernel, {"RAYS": rays, "STEPS": steps}, name=f"{rays}x{steps}")
        for rays, steps in ((4, 8), (1, 32))
    ]
    sums = {"p_parts": "*fp32", "p_loss": "*fp32", "n_parts": "i32"}
    cases.append(CompileCase(_sum_kernel, sums, {"BLOCK": SUM_BLOCK}, num_warps=8))
    return cases


COMPILE_CASES = _cases()
