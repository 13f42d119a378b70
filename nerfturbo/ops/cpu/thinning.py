"""Runs of samples, each ray walked from first to last. fp32; a task is a chunk of rays; deterministic."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ...types import PackedSamples
from ..thinning import GOLDEN, LAST_CODE, LONGEST, MIX, OPAQUE, PER_OCTAVE, Thinning
from ._launch import array, as_float32, jit, launch

CHUNK = 1024  # rays
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
def _thin(first, last, offsets, optical, phases, limit, codes):
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


def thin_codes(optical: Tensor, samples: PackedSamples, thinning: Thinning) -> Tensor:
    codes = torch.zeros(samples.capacity, dtype=torch.uint8)
    values, limit = array(as_float32("optical", optical)), np.float32(thinning.weight)
    rays = (array(samples.offsets), values, array(thinning.phases), limit)
    launch(_thin, samples.n_rays, CHUNK, *rays, codes.numpy())
    return codes
