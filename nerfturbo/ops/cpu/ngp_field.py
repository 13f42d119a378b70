"""Instant-NGP's two networks, a block of points at a time: hidden layers never leave the cache.

Decomposition: a task = a chunk of blocks; a block reads its encodings (feature-major or point-major), looks up its
rays' directions and runs all five layers (`_layers`). The backward computes the hidden layers again, which is cheaper
than writing and reading them, and then writes each gradient over the activation it belongs to. Every chunk sums its
own weight gradients; the chunks are added in order: deterministic, whatever the number of threads.

fp32 inside; half encodings are widened once. Rows past `n_used` are not computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._sink import GradientSink
from ..hash_encode import HashLayout
from ..ngp_field import NgpWeights
from ._launch import array, as_float32, jit, launch
from ._layers import (
    POINTS,
    Layers,
    backward_layer,
    forward_layer,
    pack_layers,
    padded,
    read_block,
    unpack_gradient,
    weight_gradient,
)
from .hash_encode import hash_encode

CHUNK = 8  # blocks
ZERO = np.float32(0.0)


@jit()
def _forward_block(layers, rows, encoding, point_major, directions, rays, start, n, acts):
    """All activations of points start ... start + n - 1, at the rows that `rows` gives for each layer's input."""
    read_block(encoding, point_major, start, n, acts, rows[0])
    forward_layer(layers, 0, acts, rows[0], acts, rows[1], True)
    features = rows[2] + directions.shape[1]
    forward_layer(layers, 1, acts, rows[1], acts, features, False)
    for f in range(directions.shape[1]):
        line = acts[rows[2] + f]
        for k in range(n):
            line[k] = directions[rays[start + k], f]
        line[n:] = ZERO
    for row in range(features + layers.outputs[1], rows[3]):
        acts[row, :] = ZERO
    forward_layer(layers, 2, acts, rows[2], acts, rows[3], True)
    forward_layer(layers, 3, acts, rows[3], acts, rows[4], True)
    forward_layer(layers, 4, acts, rows[4], acts, rows[5], False)


@jit()
def _forward(first, last, n_used, layers, rows, encoding, point_major, directions, rays, out):
    """Blocks first ... last - 1; out (4, n)."""
    acts = np.empty((rows[6], POINTS), np.float32)
    for block in range(first, last):
        start = block * POINTS
        n = min(POINTS, n_used - start)
        _forward_block(layers, rows, encoding, point_major, directions, rays, start, n, acts)
        for channel in range(3):
            out[channel, start : start + n] = acts[rows[5] + channel, :n]
        out[3, start : start + n] = acts[rows[2] + directions.shape[1], :n]


@jit()
def _backward(
    first, last, n_used, layers, rows, encoding, point_major, directions, rays, grad, sums, g_encoding, g_directions
):
    """Chunks first ... last - 1. sums (chunks, weights); g_encoding like encoding, g_directions (d, n), or empty."""
    acts = np.empty((rows[6], POINTS), np.float32)
    n_directions = directions.shape[1]
    for chunk in range(first, last):
        sums[chunk, :] = ZERO
        for start in range(chunk * CHUNK * POINTS, min((chunk + 1) * CHUNK * POINTS, n_used), POINTS):
            n = min(POINTS, n_used - start)
            _forward_block(layers, rows, encoding, point_major, directions, rays, start, n, acts)
            read_block(grad[:3], False, start, n, acts, rows[5])
            for layer in range(4, 2, -1):
                weight_gradient(layers, layer, acts, rows[layer + 1], acts, rows[layer], sums[chunk])
                backward_layer(layers, layer, acts, rows[layer + 1], acts, rows[layer], True)
            weight_gradient(layers, 2, acts, rows[3], acts, rows[2], sums[chunk])
            backward_layer(layers, 2, acts, rows[3], acts, rows[2], False)
            for f in range(n_directions if g_directions.shape[0] > 0 else 0):
                g_directions[f, start : start + n] = acts[rows[2] + f, :n]
            features = rows[2] + n_directions
            for k in range(n):
                acts[features, k] += grad[3, start + k]
            weight_gradient(layers, 1, acts, features, acts, rows[1], sums[chunk])
            backward_layer(layers, 1, acts, features, acts, rows[1], True)
            weight_gradient(layers, 0, acts, rows[1], acts, rows[0], sums[chunk])
            if g_encoding.shape[0] > 0:
                backward_layer(layers, 0, acts, rows[1], acts, rows[0], False)
                for f in range(g_encoding.shape[0]):
                    g_encoding[f, start : start + n] = acts[rows[0] + f, :n]
