"""Runs of samples: one lane a ray, from its first sample to its last. fp32; no atomics, deterministic.

A lane reads neighbouring places one after the other, so that all but each 32nd read finds its line in the cache. A
run is written when it ends, one byte at the row that was drawn from it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import PackedSamples
from ..thinning import GOLDEN, LAST_CODE, LONGEST, MIX, OPAQUE, PER_OCTAVE, Thinning
from ._common import INTERPRETED, CompileCase, check_kernel_float, one_minus_exp, ray_tile, signed_word
from ._launch import cdiv, launchable
from .random import unit_float

RAYS = 512 if INTERPRETED else 32
STEP, FIRST, SECOND = (tl.constexpr(signed_word(word)) for word in (GOLDEN, *MIX))
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
def _thin_kernel(p_optical, p_offsets, p_phases, p_codes, n_rays, limit, RAYS: tl.constexpr):
    """p_codes must hold zeros: only rows that are kept are written."""
    i_ray, m_ray, start, count = ray_tile(p_offsets, tl.program_id(0), n_rays, RAYS)
    phase = tl.load(p_phases + i_ray, mask=m_ray, other=0)
    depth = tl.zeros([RAYS], tl.float32)
    weight, thickness, own = depth, depth, depth + 1.0  # of the run that is under way, and of the row drawn from it
    chosen, members = tl.full([RAYS], -1, tl.int32), tl.zeros([RAYS], tl.int32)
    for place in range(0, tl.max(count, 0)):
        row = start + place
        tau = tl.load(p_optical + row, mask=place < count, other=0.0).to(tl.float32)
        counts = tau > 0.0  # false for NaN
        tau = tl.where(counts, tl.minimum(tau, THICK), 0.0)
        added = tl.exp(-depth) * one_minus_exp(tau)
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


def thin_codes(optical: Tensor, samples: PackedSamples, thinning: Thinning) -> Tensor:
    check_kernel_float(optical=optical)
    codes = torch.zeros(samples.capacity, dtype=torch.uint8, device=optical.device)
    if samples.capacity and samples.n_rays:
        _thin_kernel[(cdiv(samples.n_rays, RAYS),)](
            p_optical=optical.contiguous(), p_offsets=samples.offsets, p_phases=thinning.phases.contiguous(),
            p_codes=codes, n_rays=samples.n_rays, limit=float(thinning.weight), RAYS=RAYS, num_warps=1,
        )  # fmt: skip
    return codes


_TYPES = {"p_optical": "*fp32", "p_offsets": "*i32", "p_phases": "*i32", "p_codes": "*u8", "n_rays": "i32"}
COMPILE_CASES = [CompileCase(_thin_kernel, _TYPES | {"limit": "fp32"}, {"RAYS": 32})]
