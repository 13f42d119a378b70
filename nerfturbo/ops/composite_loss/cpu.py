"""Compositing, colour loss and their gradient, ray by ray.

A task = a chunk of rays. A ray is walked to its end for its colour and, once its error is known, back to its start for
the gradient of the loss to the logits; the backward only multiplies by what arrives. With g_i = sum over channels of
dL/dcolour * (rgb_i - background), the gradient that reaches weight i,

    dL/dlogit_3 = density_i * length_i * (T_i e_i g_i - sum_{j > i} w_j g_j)
    dL/dlogit_c = w_i * dL/dcolour_c * rgb_ic * (1 - rgb_ic).

The regularisers walk rays likewise (docs/ops/ray_losses.md), lengths measured from the ray's first sample. Logits are
read feature-major, (4, n). fp32; sums over rays in fp64 in a fixed order: deterministic. Rows that no ray owns are
never read.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...types import PackedSamples
from .._cpu import as_float32, jit, launch
from .._sink import Node
from ..composite.cpu import _intervals
from ..ngp import MAX_LOGIT
from . import SURE, RayLossRule

CHUNK = 64  # rays
ZERO, ONE, HALF = np.float32(0.0), np.float32(1.0), np.float32(0.5)
_HIGHEST = np.float32(MAX_LOGIT)


@jit(inline=True)
def _density(logit):
    return np.float32(math.exp(min(logit, _HIGHEST)))


@jit(inner=True)
def _march_ray(begin, end, starts, ends, raw, colour, weights, passed, rgb):
    """Colour of one ray into `colour`; returns its opacity. Sample k of it leaves its weight, T_i e_i (-1: no weight)
    and colour in the scratch arrays."""
    through, opacity = ONE, ZERO
    for k in range(end - begin):
        i = begin + k
        decay = np.float32(math.expm1(-_density(raw[3, i]) * (ends[i] - starts[i])))  # -alpha
        if not -decay >= ZERO:
            passed[k] = -ONE
            continue
        weight = -decay * through
        through += decay * through
        weights[k], passed[k] = weight, through
        opacity += weight
        for channel in range(3):
            value = ONE / (ONE + np.float32(math.exp(-raw[channel, i])))
            rgb[channel, k] = value
            colour[channel] += weight * value
    return opacity


@jit(inline=True)
def _value_and_slope(error, huber, delta):
    size = abs(error)
    if not huber:
        return error * error, error + error
    if size <= delta:
        return error * error / (delta + delta), error / delta
    return size - HALF * delta, math.copysign(ONE, error)


@jit()
def _forward(
    first, last, offsets, starts, ends, raw, background, target, n_kept, huber, delta, share, losses, out, grad
):
    """losses (n_rays, 2): sums over channels of value and squared error. share: of one value in the mean. grad (4, n)
    receives the gradient of the loss, unless it is empty."""
    longest = 0
    for ray in range(first, last):
        longest = max(longest, offsets[ray + 1] - offsets[ray])
    weights, passed = np.empty(longest, np.float32), np.empty(longest, np.float32)
    rgb, colour, slope = np.empty((3, longest), np.float32), np.empty(3, np.float32), np.empty(3, np.float32)
    for ray in range(first, last):
        begin, end = offsets[ray], offsets[ray + 1]
        colour[:] = ZERO
        opacity = _march_ray(begin, end, starts, ends, raw, colour, weights, passed, rgb)
        losses[ray, 0], losses[ray, 1] = 0.0, 0.0
        for channel in range(3):
            behind = background[ray, channel]
            goal = target[ray, channel]
            if target.shape[1] == 4:
                goal = goal * target[ray, 3] + behind * (ONE - target[ray, 3])
            out[ray, channel] = colour[channel] + behind * (ONE - opacity)
            error = out[ray, channel] - goal
            value, rise = _value_and_slope(error, huber, delta)
            slope[channel] = rise * share if ray < n_kept else ZERO
            if ray < n_kept:
                losses[ray, 0] += value
                losses[ray, 1] += error * error
        if grad.shape[0] == 0:
            continue
        later = ZERO  # sum of w_j g_j over the samples behind
        for k in range(end - begin - 1, -1, -1):
            i = begin + k
            if passed[k] < ZERO:
                grad[0, i], grad[1, i], grad[2, i], grad[3, i] = ZERO, ZERO, ZERO, ZERO
                continue
            g = ZERO
            for channel in range(3):
                value = rgb[channel, k]
                g += slope[channel] * (value - background[ray, channel])
                grad[channel, i] = weights[k] * slope[channel] * value * (ONE - value)
            grad[3, i] = _density(raw[3, i]) * (ends[i] - starts[i]) * (passed[k] * g - later)
            later += weights[k] * g


def _counts(samples: PackedSamples) -> tuple[int, int, int]:
    """Rays, samples in use, rays that are trained."""
    n_rays, kept = samples.n_rays, samples.n_rays_kept
    return n_rays, int(samples.offsets[-1]), n_rays if kept is None else min(int(kept), n_rays)


def _scale_gradient(ctx: Any, arrived: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient (4, n) that the forward left, times what arrives at the loss."""
    (grad,), scale = ctx.saved_tensors, float(arrived)
    return ((grad if scale == 1.0 else grad * scale).t().to(ctx.dtype),)


class _CompositeLoss(Node):
    @staticmethod
    def forward(ctx, raw, samples, background, target, rule) -> tuple[Tensor, Tensor, Tensor]:
        n_rays, used, kept = _counts(samples)
        share = 1.0 / (3 * max(kept, 1))
        grad = torch.empty(4 if ctx.needs_input_grad[0] else 0, samples.capacity)
        grad[:, used:] = 0.0
        losses, rgb = np.empty((n_rays, 2)), torch.empty(n_rays, 3)
        inputs = (as_float32("raw", raw).t(), background.float(), target.float())
        settings = (kept, rule.kind == "huber", np.float32(rule.delta), np.float32(share))
        launch(_forward, n_rays, CHUNK, *_intervals(samples), *inputs, *settings, losses, rgb, grad)
        loss, mse = (torch.tensor(total * share, dtype=torch.float32) for total in losses.sum(axis=0))
        ctx.save_for_backward(grad)
        ctx.dtype = raw.dtype
        ctx.mark_non_differentiable(mse, rgb)
        return loss, mse, rgb

    backward = staticmethod(_scale_gradient)


def composite_loss(raw, samples, background, target, *, rule, gradient_scale) -> tuple[Tensor, Tensor, Tensor]:
    return _CompositeLoss.apply(raw, samples, background.detach(), target.detach(), rule)


TWO, THIRD = np.float32(2.0), np.float32(1.0 / 3.0)
LOW, HIGH = np.float32(SURE), np.float32(1.0 - SURE)


@jit(inner=True)
def _walk(begin, end, starts, ends, left, right, logits, scratch):
    """Weight, T (1 - alpha) (-1: no weight), tau, middle between `left` and `right`, and the sums of w and w m before
    sample k, as rows of `scratch`; returns the ray's sums: w, distortion times unit."""
    through, total, moment, spread = ONE, ZERO, ZERO, ZERO
    for k in range(end - begin):
        i = begin + k
        tau = _density(logits[i]) * (ends[i] - starts[i])
        decay = np.float32(math.expm1(-tau))  # -alpha
        middle = (left[i] + right[i]) * HALF - (left[begin] + right[begin]) * HALF
        if not -decay >= ZERO:
            scratch[1, k] = -ONE
            continue
        weight = -decay * through
        through += decay * through
        scratch[0, k], scratch[1, k], scratch[2, k], scratch[3, k] = weight, through, tau, middle
        scratch[4, k], scratch[5, k] = total, moment
        spread += TWO * weight * (middle * total - moment) + weight * weight * (right[i] - left[i]) * THIRD
        total += weight
        moment += weight * middle
    return total, spread


@jit()
def _losses_forward(first, last, offsets, starts, ends, left, right, logits, n_kept, weights, share, losses, grad):
    """weights: of distortion over unit, opacity. grad (4, n), zero before, gets its last row, unless it is empty."""
    distortion, entropy = weights[0], weights[1]
    longest = 0
    for ray in range(first, last):
        longest = max(longest, offsets[ray + 1] - offsets[ray])
    scratch = np.empty((6, longest), np.float32)
    for ray in range(first, last):
        begin, end = offsets[ray], offsets[ray + 1]
        losses[ray] = 0.0
        if ray >= n_kept:
            continue
        total, spread = _walk(begin, end, starts, ends, left, right, logits, scratch)
        opacity = min(max(total, LOW), HIGH)
        rest = np.float32(math.log1p(-opacity))
        solid = np.float32(math.log(opacity))
        losses[ray] = distortion * spread - entropy * (opacity * solid + (ONE - opacity) * rest)
        if grad.shape[0] == 0:
            continue
        rise = entropy * (rest - solid) if LOW < total < HIGH else ZERO
        later, after, after_moment = ZERO, ZERO, ZERO  # sums behind the sample: w g, w, w m
        for k in range(end - begin - 1, -1, -1):
            i = begin + k
            if scratch[1, k] < ZERO:
                continue
            weight, tau, middle = scratch[0, k], scratch[2, k], scratch[3, k]
            far = middle * scratch[4, k] - scratch[5, k] + after_moment - middle * after
            g = TWO * distortion * (far + weight * (right[i] - left[i]) * THIRD) + rise
            grad[3, i] = share * tau * (scratch[1, k] * g - later)
            later += weight * g
            after += weight
            after_moment += weight * middle


class _RayLosses(Node):
    @staticmethod
    def forward(ctx: Any, raw: Tensor, samples: PackedSamples, places: PackedSamples, rule: RayLossRule) -> Tensor:
        n_rays, _, kept = _counts(samples)
        share = 1.0 / max(kept, 1)
        grad = torch.zeros(4 if ctx.needs_input_grad[0] else 0, samples.capacity)
        losses = np.empty(n_rays)
        weights = np.array([rule.distortion / rule.unit, rule.opacity], np.float32)
        settings = (as_float32("raw", raw[:, 3]), kept, weights, np.float32(share))
        intervals = (*_intervals(samples), *_intervals(places)[1:])
        launch(_losses_forward, n_rays, CHUNK, *intervals, *settings, losses, grad)
        ctx.save_for_backward(grad)
        ctx.dtype = raw.dtype
        return torch.tensor(float(losses.sum()) * share, dtype=torch.float32)

    backward = staticmethod(_scale_gradient)


def ray_losses(raw, samples, places, *, rule, gradient_scale) -> Tensor:
    return _RayLosses.apply(raw, samples, places, rule)
