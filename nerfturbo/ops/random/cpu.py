"""Philox-4x32-10, a task = a chunk of counters; 32-bit words are held in uint64, where a product keeps all its bits."""

import numpy as np
from torch import Tensor

from .._cpu import jit, launch
from .reference import KEY_STEPS, MASK, MULTIPLIERS

CHUNK = 16384
_MASK, _SHIFT = np.uint64(MASK), np.uint64(32)
_MULTIPLY_0, _MULTIPLY_1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_STEP_0, _STEP_1 = np.uint64(KEY_STEPS[0]), np.uint64(KEY_STEPS[1])


@jit(exact=True)
def _words(first, last, base, step, stream, key0, key1, columns, uniform, bits, floats):
    """Rows first ... last - 1 of `floats` if `uniform`, else of `bits`; row i belongs to the counter base + i."""
    for i in range(first, last):
        index = base + np.uint64(i)
        a, b, c, d = index & _MASK, index >> _SHIFT, step, stream
        k0, k1 = key0, key1
        for _ in range(10):
            product0, product1 = a * _MULTIPLY_0, c * _MULTIPLY_1
            a, b = (product1 >> _SHIFT) ^ b ^ k0, product1 & _MASK
            c, d = (product0 >> _SHIFT) ^ d ^ k1, product0 & _MASK
            k0, k1 = (k0 + _STEP_0) & _MASK, (k1 + _STEP_1) & _MASK
        for column in range(columns):
            word = (a, b, c, d)[column]
            if uniform:
                floats[i, column] = np.float32(word >> np.uint64(8)) * np.float32(2.0**-24)
            else:
                bits[i, column] = np.uint32(word)


def draw(out: Tensor, *, seed: int, stream: int, step: int | Tensor, first: int) -> Tensor:
    uniform = out.is_floating_point()
    bits = np.empty((0, 0), np.uint32) if uniform else out.numpy().view(np.uint32)
    floats = out.numpy() if uniform else np.empty((0, 0), np.float32)
    words = (first & (1 << 64) - 1, int(step) & MASK, stream & MASK, seed & MASK, (seed >> 32) & MASK)
    n, columns = out.shape
    launch(_words, n, CHUNK, *(np.uint64(word) for word in words), columns, uniform, bits, floats)
    return out
