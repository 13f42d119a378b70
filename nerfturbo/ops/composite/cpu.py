"""Compositing along rays, forward and analytic backward, the visibility test, and runs of weak samples. A task = a
chunk of rays, each walked from its first sample to its last (backward: from the last to the first;
docs/ops/composite.md). The forward keeps T_i (1 - alpha_i) for the backward, -1 where a threshold took the weight away.
fp32 whatever comes in; gradients in the inputs' dtypes; deterministic. Rows that no ray owns are never read."""

import math

import numpy as np
import torch
from torch import Tensor

from ...types import PackedSamples
from .._cpu import as_float32, jit, launch
from .._sink import Node
from . import GOLDEN, LAST_CODE, LONGEST, MIX, OPAQUE, PER_OCTAVE, Thinning

CHUNK = 256  # rays


@jit()
def _forward(first, last, offsets, starts, ends, density, rgb, eps, threshold, out_rgb, out_ray, weights, passed):
    """out_ray (2, n_rays) receives opacity and depth."""
    for ray in range(first, last):
        through, opacity, depth = np.float32(1.0), np.float32(0.0), np.float32(0.0)
        for channel in range(rgb.shape[1]):
            out_rgb[ray, channel] = np.float32(0.0)
        for i in range(offsets[ray], offsets[ray + 1]):
            decay = np.float32(math.expm1(-density[i] * (ends[i] - starts[i])))  # -alpha
            if not -decay >= threshold or through < eps:
                weights[i], passed[i] = np.float32(0.0), np.float32(-1.0)
                continue
            weight = -decay * through
            through += decay * through
            weights[i], passed[i] = weight, through
            opacity += weight
            depth += weight * ((starts[i] + ends[i]) * np.float32(0.5))
            for channel in range(rgb.shape[1]):
                out_rgb[ray, channel] += weight * rgb[i, channel]
        out_ray[0, ray], out_ray[1, ray] = opacity, depth


@jit()
def _backward(
    first, last, offsets, starts, ends, rgb, weights, passed, g_rgb, g_ray, g_weights, grad_density, grad_rgb
):
    for ray in range(first, last):
        behind = np.float32(0.0)  # sum of w_j g_j over the samples behind
        for k in range(offsets[ray + 1] - offsets[ray]):
            i = offsets[ray + 1] - 1 - k
            if passed[i] < np.float32(0.0):
                grad_density[i] = np.float32(0.0)
                for channel in range(rgb.shape[1]):
                    grad_rgb[i, channel] = np.float32(0.0)
                continue
            weight = weights[i]
            g = g_weights[i] + g_ray[0, ray] + g_ray[1, ray] * ((starts[i] + ends[i]) * np.float32(0.5))
            for channel in range(rgb.shape[1]):
                g += g_rgb[ray, channel] * rgb[i, channel]
                grad_rgb[i, channel] = weight * g_rgb[ray, channel]
            grad_density[i] = (ends[i] - starts[i]) * (passed[i] * g - behind)
            behind += weight * g


@jit()
def _visible(first, last, offsets, starts, ends, density, eps, threshold, out):
    for ray in range(first, last):
        through = np.float32(1.0)
        for i in range(offsets[ray], offsets[ray + 1]):
            if through < eps:
                out[i] = False
                continue
            decay = np.float32(math.expm1(-density[i] * (ends[i] - starts[i])))
            out[i] = -decay >= threshold
            if out[i]:
                through += decay * through


def _intervals(samples: PackedSamples) -> tuple[Tensor, Tensor, Tensor]:
    return samples.offsets, as_float32("t_starts", samples.t_starts), as_float32("t_ends", samples.t_ends)


class _Composite(Node):
    @staticmethod
    def forward(ctx, density, rgb, samples, eps, threshold) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        n_rays, used = samples.n_rays, int(samples.offsets[-1])
        out_rgb, out_ray = torch.empty(n_rays, rgb.shape[1]), torch.empty(2, n_rays)
        weights, passed = torch.empty(samples.capacity), torch.empty(samples.capacity)
        weights[used:] = 0.0
        field = (as_float32("density", density), as_float32("rgb", rgb), np.float32(eps), np.float32(threshold))
        launch(_forward, n_rays, CHUNK, *_intervals(samples), *field, out_rgb, out_ray, weights, passed)
        ctx.save_for_backward(rgb, weights, passed)
        ctx.samples, ctx.dtype = samples, density.dtype
        return out_rgb, out_ray[0], out_ray[1], weights

    @staticmethod
    def backward(ctx, g_rgb, g_opacity, g_depth, g_weights) -> tuple[Tensor | None, ...]:
        rgb, weights, passed = ctx.saved_tensors
        samples, used = ctx.samples, int(ctx.samples.offsets[-1])
        grad_density, grad_rgb = torch.empty(samples.capacity), torch.empty(rgb.shape)
        grad_density[used:] = 0.0
        grad_rgb[used:] = 0.0
        incoming, saved = (g_rgb, torch.stack([g_opacity, g_depth]), g_weights), (rgb.float(), weights, passed)
        launch(_backward, samples.n_rays, CHUNK, *_intervals(samples), *saved, *incoming, grad_density, grad_rgb)
        return grad_density.to(ctx.dtype), grad_rgb.to(rgb.dtype)


def composite(density, rgb, samples, *, early_stop_eps, alpha_thre) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _Composite.apply(density, rgb, samples, early_stop_eps, float(alpha_thre))


@torch.no_grad()
def visibility(density: Tensor, samples: PackedSamples, *, early_stop_eps: float, alpha_thre: float | Tensor) -> Tensor:
    out = torch.empty(samples.capacity, dtype=torch.bool)
    out[int(samples.offsets[-1]) :] = False
    limits = (np.float32(early_stop_eps), np.float32(alpha_thre))
    launch(_visible, samples.n_rays, CHUNK, *_intervals(samples), as_float32("density", density), *limits, out)
    return out


MERGE_CHUNK = 1024  # rays
WORD, FIRST, SECOND = 0xFFFFFFFF, MIX[0], MIX[1]
UNIT, ONE, NONE = np.float32(2.0**-24), np.float32(1.0), np.int64(-1)
OCTAVE, TOP, THICK = np.float32(PER_OCTAVE), np.float32(LAST_CODE), np.float32(OPAQUE)


@jit(inner=True)
def _chance(phase, place):
    """A random number in [0, 1) for this place along the ray."""
    word = (np.int64(phase) + place * GOLDEN) & WORD
    word = ((word ^ (word >> 16)) * FIRST) & WORD
    word = ((word ^ (word >> 15)) * SECOND) & WORD
    return np.float32((word ^ (word >> 16)) >> 8) * UNIT


@jit(inner=True)
def _code(stretch):
    return np.uint8(min(TOP, ONE + np.float32(np.rint(OCTAVE * np.float32(math.log2(max(stretch, ONE)))))))


@jit()
def _merge(first, last, offsets, optical, phases, limit, codes):
    for ray in range(first, last):
        depth = weight = thickness = np.float32(0.0)
        own, chosen, members = ONE, NONE, 0
        for i in range(offsets[ray], offsets[ray + 1]):
            tau = optical[i]
            if not tau > 0.0:
                continue
            tau = min(tau, THICK)
            added = np.float32(math.exp(-depth)) * -np.float32(math.expm1(-tau))
            if weight + added > limit or members == LONGEST:
                if chosen >= 0:
                    codes[chosen] = _code(thickness / own)
                weight = thickness = np.float32(0.0)
                chosen, members = NONE, 0
            weight += added
            thickness += tau
            members += 1
            if chosen < 0 or _chance(phases[ray], np.int64(i - offsets[ray])) * weight < added:
                chosen, own = np.int64(i), tau
            depth += tau
        if chosen >= 0:
            codes[chosen] = _code(thickness / own)


def merge_weak_samples(optical: Tensor, samples: PackedSamples, thinning: Thinning) -> Tensor:
    codes = torch.zeros(samples.capacity, dtype=torch.uint8)
    rays = (samples.offsets, as_float32("optical", optical), thinning.phases, np.float32(thinning.weight))
    launch(_merge, samples.n_rays, MERGE_CHUNK, *rays, codes)
    return codes
