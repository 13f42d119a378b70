"""The occupancy grid's running maximum and bits.

`decay_and_max`: cells may repeat, so every thread owns a range of the grid and picks its cells out of the whole list;
reading the list once per thread is cheaper than sorting it or locking. `threshold_bits`: a task = a chunk of words.
fp32, the mean summed in fp64 in a fixed order: deterministic.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...errors import InputError
from ._launch import array, as_float32, jit, launch

CHUNK = 2048  # words of 32 cells


@jit(exact=True)
def _decay(first, last, width, density, cells, fresh, decay):
    """Ranges first ... last - 1 of `width` cells. First decay, then the maximum, so that repeats decay once."""
    low, high = first * width, last * width
    old = np.empty(cells.shape[0], np.float32)
    own = np.empty(cells.shape[0], np.int64)
    n = 0
    for i in range(cells.shape[0]):
        if low <= cells[i] < high:
            own[n] = i
            old[n] = density[cells[i]]
            n += 1
    for k in range(n):
        if old[k] >= 0.0:
            density[cells[own[k]]] = old[k] * decay
    for k in range(n):
        value = fresh[own[k]]
        if old[k] >= 0.0 and value > density[cells[own[k]]] and value < np.inf:
            density[cells[own[k]]] = value


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
    n_ranges = torch.get_num_threads()
    width = -(-density.shape[0] // n_ranges)
    values = array(as_float32("fresh", fresh))
    launch(_decay, n_ranges, 1, width, density.numpy(), array(cells), values, np.float32(decay))


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
