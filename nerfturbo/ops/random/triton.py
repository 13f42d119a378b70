"""Philox-4x32-10 on the GPU: one program draws BLOCK consecutive indices. The step may be a () int64 tensor, read on
the device, so that a captured graph draws anew at each replay."""

import triton
import triton.language as tl
from torch import Tensor

from .._triton import cdiv, launchable, signed_word

BLOCK = 512


@triton.jit
def philox(index, step, stream, seed_low, seed_high):
    """Four uint32 words for int64 counters `index`; step, stream and the seed's halves are 32-bit words."""
    key = (seed_high.to(tl.uint32).to(tl.uint64) << 32) | seed_low.to(tl.uint32).to(tl.uint64)
    zero = index.to(tl.uint32) * 0
    return tl.philox(
        key, index.to(tl.uint32), (index >> 32).to(tl.uint32), zero + step.to(tl.uint32), zero + stream.to(tl.uint32)
    )


@triton.jit
def unit_float(word):
    """The top 24 bits as a float in [0, 1)."""
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08


@launchable(do_not_specialize=["n", "first", "step", "stream", "seed_low", "seed_high"])
def _random_kernel(
    p_out, p_step, n, first, step, stream, seed_low, seed_high,
    COLUMNS: tl.constexpr, UNIFORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if p_step is not None:
        step = tl.load(p_step)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    words = philox(i + first, step, stream, seed_low, seed_high)
    for c in tl.static_range(COLUMNS):
        if UNIFORM:
            tl.store(p_out + i * COLUMNS + c, unit_float(words[c]), mask=m)
        else:
            tl.store(p_out + i * COLUMNS + c, words[c].to(tl.int32, bitcast=True), mask=m)


def counter_words(seed: int, stream: int, step: int | Tensor) -> tuple[Tensor | None, tuple[int, ...]]:
    """Of `philox`: the step on the device or None, and step, stream and both words of the seed."""
    on_device = isinstance(step, Tensor)
    words = (0 if on_device else int(step), stream, seed, seed >> 32)
    return step if on_device else None, tuple(signed_word(word) for word in words)


def draw(out: Tensor, *, seed: int, stream: int, step: int | Tensor, first: int) -> Tensor:
    n, columns = out.shape
    if n:
        p_step, words = counter_words(seed, stream, step)
        _random_kernel[(cdiv(n, BLOCK),)](
            out, p_step, n, first, *words, COLUMNS=columns, UNIFORM=out.is_floating_point(), BLOCK=BLOCK
        )
    return out
