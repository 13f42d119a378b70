"""The occupancy grid's running maximum and bits.

Decomposition: a task = a chunk of cells or of words of 32. Cells may repeat: all old values are read before any decays,
and the maximum is atomic. fp32, the mean summed in fp64 in a fixed order: deterministic.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...errors import InputError
from ._atomic import atomic_max
from ._launch import array, as_float32, jit, launch, scratch

CHUNK = 2048  # words of 32 cells
CELLS = 32768


@jit(exact=True)
def _gather(first, last, density, cells, old):
    for i in range(first, last):
        old[i] = density[cells[i]]


@jit(exact=True)
def _decay(first, last, density, cells, old, decay):
    """Repeats of a cell all write the same number."""
    for i in range(first, last):
        if old[i] >= np.float32(0.0):
            density[cells[i]] = old[i] * decay


@jit(exact=True)
def _raise(first, last, bits, cells, old, fresh, fresh_bits):
    """`bits` is the density's memory; NaN, infinity and negative values are left out."""
    for i in range(first, last):
        if old[i] >= np.float32(0.0) and fresh[i] > np.float32(0.0) and fresh[i] < np.inf:
            atomic_max(bits, cells[i], fresh_bits[i])


@jit(exact=True)
def _sum_seen(first, last, density, sums, counts):
    """sums and counts of the cells >= 0 in chunks first ... last - 1."""
    for chunk in range(first, last):
        total, count = np.float64(0.0), 0
        for i in range(chunk * CHUNK * 32, min((chunk + 1) * CHUNK * 32, density.shape[0])):
            if density[i] >= 0.0:
                total += density[i]
                count += 1
        sums[chunk], counts[chunk] = total, count


@jit(exact=True)
def _pack(first, last, density, threshold, bits):
    for word in range(first, last):
        packed = np.uint32(0)
        for bit in range(32):
            packed |= np.uint32(np.uint32(density[word * 32 + bit] > threshold) << np.uint32(bit))
        bits[word] = packed


@torch.no_grad()
def decay_and_max(density: Tensor, cells: Tensor, fresh: Tensor, decay: float) -> None:
    _check_in_place("density", density)
    values, index, n = array(as_float32("fresh", fresh)), array(cells), cells.shape[0]
    thickness, old = density.numpy(), scratch("old density", n).numpy()
    launch(_gather, n, CELLS, thickness, index, old)
    launch(_decay, n, CELLS, thickness, index, old, np.float32(decay))
    launch(_raise, n, CELLS, thickness.view(np.int32), index, old, values, values.view(np.int32))


@torch.no_grad()
def threshold_bits(density: Tensor, bits: Tensor, threshold: float) -> Tensor:
    _check_in_place("bits", bits)
    values = array(as_float32("density", density))
    n_chunks = -(-bits.shape[0] // CHUNK)
    sums, counts = np.empty(n_chunks, np.float64), np.empty(n_chunks, np.int64)
    launch(_sum_seen, n_chunks, 1, values, sums, counts)
    mean = np.float32(sums.sum() / max(counts.sum(), 1))
    launch(_pack, bits.shape[0], CHUNK, values, np.float32(min(mean, threshold)), bits.numpy().view(np.uint32))
    return torch.tensor(mean)


def _check_in_place(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise InputError(name, "a contiguous tensor, it is written in place", f"strides {tensor.stride()}")
    if name == "density" and tensor.dtype != torch.float32:
        raise InputError(name, "torch.float32", str(tensor.dtype))
