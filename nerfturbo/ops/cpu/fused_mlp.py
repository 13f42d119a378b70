"""Small networks, a block of points at a time (`_layers`): hidden layers stay in cache, ReLU costs no pass of its own.

Decomposition: a task = a chunk of blocks. The backward computes the hidden layers again and writes each gradient over
the activation it belongs to; every chunk sums its own weight gradients and the chunks are added in order:
deterministic. fp32; wide layers, where blocks no longer fit a core's cache, and halves are left to torch's products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._sink import GradientSink, redirect_all, zero_tail
from ..reference import fused_mlp as reference
from ._launch import array, jit, launch
from ._layers import (
    ALL,
    LINEAR,
    MASKED,
    POINTS,
    RELU,
    Layers,
    backward_layer,
    by_features,
    forward_layer,
    pack_layers,
    read_block,
    weight_gradient,
    weight_gradients,
    write_block,
)

CHUNK = 8  # blocks
WIDEST = 128
ZERO = np.float32(0.0)


@jit(inner=True)
def _forward_block(layers, rows, inputs, point_major, start, n, acts):
    read_block(inputs, point_major, start, n, acts, rows[0])
    n_layers = layers.inputs.shape[0]
    for layer in range(n_layers):
        forward_layer(layers, layer, acts, rows[layer], rows[layer + 1], RELU if layer + 1 < n_layers else LINEAR)


@jit()
def _forward(first, last, n_used, layers, rows, inputs, point_major, out):
    """Blocks first ... last - 1; out (outputs, n)."""
    acts = np.empty((rows[-1], POINTS), np.float32)
    for block in range(first, last):
        start = block * POINTS
        n = min(POINTS, n_used - start)
        _forward_block(layers, rows, inputs, point_major, start, n, acts)
        write_block(acts, rows[-2], out.shape[0], start, n, out)


@jit()
def _backward(first, last, n_used, layers, rows, inputs, point_major, grad, sums, to_inputs):
    """Chunks first ... last - 1. sums (chunks, weights); to_inputs (inputs, n), or empty."""
    acts = np.empty((rows[-1], POINTS), np.float32)
    n_layers = layers.inputs.shape[0]
    for chunk in range(first, last):
        sums[chunk, :] = ZERO
        for start in range(chunk * CHUNK * POINTS, min((chunk + 1) * CHUNK * POINTS, n_used), POINTS):
            n = min(POINTS, n_used - start)
            _forward_block(layers, rows, inputs, point_major, start, n, acts)
            read_block(grad, point_major != point_major, start, n, acts, rows[n_layers])
            for layer in range(n_layers - 1, -1, -1):
                weight_gradient(layers, layer, acts, rows[layer + 1], rows[layer], sums[chunk])
                if layer > 0 or to_inputs.shape[0] > 0:
                    backward_layer(
                        layers, layer, acts, rows[layer + 1], rows[layer], ALL, MASKED if layer > 0 else LINEAR
                    )
            write_block(acts, rows[0], to_inputs.shape[0], start, n, to_inputs)


def _rows(layers: Layers) -> np.ndarray:
    """The row at which each layer's input begins, then the outputs and their end."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(layers.inputs), layers.inputs.sum() + layers.outputs[-1:]])


class _FusedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, n_used: int, sink: GradientSink | None, *weights: Tensor) -> Tensor:
        layers = pack_layers(weights)
        rows, out = _rows(layers), torch.empty(weights[-1].shape[0], inputs.shape[0])
        out[:, n_used:] = 0.0
        launch(_forward, -(-n_used // POINTS), CHUNK, n_used, layers, rows, *by_features(inputs), out.numpy())
        ctx.save_for_backward(inputs, *weights)
        ctx.layers, ctx.rows, ctx.n_used, ctx.sink = layers, rows, n_used, sink
        return out.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, *weights = ctx.saved_tensors
        n_used, layers = ctx.n_used, ctx.layers
        to_inputs = torch.empty(inputs.shape[1] if ctx.needs_input_grad[0] else 0, inputs.shape[0])
        to_inputs[:, n_used:] = 0.0
        n_chunks = -(-n_used // (CHUNK * POINTS))
        sums = np.empty((n_chunks, layers.starts[-1]), np.float32)
        data = (*by_features(inputs), array(grad.t()), sums, to_inputs.numpy())
        launch(_backward, n_chunks, 1, n_used, layers, ctx.rows, *data)
        own = weight_gradients(sums.sum(axis=0), layers, weights, ctx.sink)
        # inputs, n_used, sink, each of the weights
        return to_inputs.t() if ctx.needs_input_grad[0] else None, None, None, *own


def fused_mlp(
    inputs: Tensor, weights: list[Tensor], *, sink: GradientSink | None = None, n_used: Tensor | None = None
) -> Tensor:
    widest = max(max(weight.shape) for weight in weights)
    if inputs.dtype != torch.float32 or widest > WIDEST:
        return zero_tail(reference.fused_mlp(zero_tail(inputs, n_used), redirect_all(weights, sink)), n_used)
    used = inputs.shape[0] if n_used is None else min(int(n_used), inputs.shape[0])
    return _FusedMlp.apply(inputs, used, sink, *weights)
