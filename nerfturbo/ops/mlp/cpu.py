"""Small networks, a block of points at a time: hidden layers stay in cache, ReLU costs no pass of its own.

A block holds POINTS points; an activation is (features, POINTS) with the points contiguous, so that no product needs a
reduction. Feature counts are padded to multiples of 4 with zeros. Weights are packed four outputs at a time (forward)
and four inputs at a time (backward), in the order in which the inner loops read them; these keep sixteen 4-lane
registers of sums, about 90% of a core's peak.

A task = a chunk of blocks. The backward computes the hidden layers again and writes each gradient over the activation
it belongs to; every chunk sums its own weight gradients and the chunks are added in order: deterministic. fp32; wide
layers, where blocks no longer fit a core's cache, and halves are left to torch's products.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._cpu import array, as_float32, jit, launch
from .._cpu.vector import gated, load_at, load_span, multiply_add, multiply_add_lane, relu, store_span, total, zeros
from .._sink import GradientSink, Node
from . import reference

POINTS = 128
FOUR, SIXTEEN = (0,) * 4, (0,) * 16
ZERO = np.float32(0.0)
ALL = np.int64(0)
LINEAR, RELU, MASKED = np.int64(0), np.int64(1), np.int64(2)  # what happens to a product before it is stored


class Layers(NamedTuple):
    """The matrices of a network. Layer k has inputs[k] inputs and outputs[k] outputs, padded."""

    inputs: np.ndarray  # int64
    outputs: np.ndarray  # int64
    starts: np.ndarray  # int64, where a layer's numbers begin in the three flat arrays of weights and gradients
    forward: np.ndarray  # float32; of layer k: (outputs / 4, inputs, 4)
    backward: np.ndarray  # float32; of layer k: (inputs / 4, outputs, 4)


def padded(n: int) -> int:
    return -(-n // 4) * 4


def pack_layers(weights: Sequence[Tensor]) -> Layers:
    """From matrices (outputs, inputs)."""
    inputs = np.array([padded(w.shape[1]) for w in weights], np.int64)
    outputs = np.array([padded(w.shape[0]) for w in weights], np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(inputs * outputs)])
    layers = Layers(inputs, outputs, starts, *(np.zeros(starts[-1], np.float32) for _ in range(2)))
    for index, weight in enumerate(weights):
        _pack(array(as_float32("weights", weight)), layers, index)
    return layers


@jit()
def _pack(weight, layers, layer):
    start, n_in, n_out = layers.starts[layer], layers.inputs[layer], layers.outputs[layer]
    for o in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            layers.forward[start + (o // 4 * n_in + i) * 4 + o % 4] = weight[o, i]
            layers.backward[start + (i // 4 * n_out + o) * 4 + i % 4] = weight[o, i]


def by_features(tensor: Tensor) -> tuple[np.ndarray, bool]:
    """The memory of an (n, features) tensor without a copy where possible, and whether points come first in it."""
    if tensor.t().is_contiguous():
        return tensor.detach().t().numpy(), False
    return array(tensor), True


def weight_gradients(flat, layers, weights, sink) -> list[Tensor | None]:
    """One gradient per matrix for autograd; with a sink they are added to its buffers instead."""
    grads = []
    for k, (n_out, n_in) in enumerate(weight.shape for weight in weights):
        whole = flat[layers.starts[k] : layers.starts[k + 1]].reshape(layers.outputs[k], layers.inputs[k])
        grads.append(torch.from_numpy(whole[:n_out, :n_in]))
    if sink is None:
        return [grad.to(weight.dtype) for grad, weight in zip(grads, weights, strict=True)]
    sink.take(grads, finite=bool(np.isfinite(flat).all()))
    return [None] * len(grads)


@jit(inner=True)
def _multiply(packed, start, n_in, first_out, n_out, acts, source, target, mode):
    """acts[target + o] = sum over i of w[o, i] acts[source + i], for a whole block and o from first_out to n_out - 1.
    MASKED: zero where the target, which holds the layer's activation, is not positive."""
    for o in range(first_out, n_out, 4):
        row = target + o
        for p in range(0, POINTS, 16):
            a, b, c, d = zeros(SIXTEEN), zeros(SIXTEEN), zeros(SIXTEEN), zeros(SIXTEEN)
            for i in range(n_in):
                v, w = load_span(acts, source + i, p, SIXTEEN), load_at(packed, start + o * n_in + 4 * i, FOUR)
                a, b = multiply_add_lane(a, v, w, 0), multiply_add_lane(b, v, w, 1)
                c, d = multiply_add_lane(c, v, w, 2), multiply_add_lane(d, v, w, 3)
            if mode == RELU:
                a, b, c, d = relu(a), relu(b), relu(c), relu(d)
            elif mode == MASKED:
                a = gated(a, load_span(acts, row, p, SIXTEEN))
                b = gated(b, load_span(acts, row + 1, p, SIXTEEN))
                c = gated(c, load_span(acts, row + 2, p, SIXTEEN))
                d = gated(d, load_span(acts, row + 3, p, SIXTEEN))
            store_span(acts, row, p, a)
            store_span(acts, row + 1, p, b)
            store_span(acts, row + 2, p, c)
            store_span(acts, row + 3, p, d)


@jit(inner=True)
def forward_layer(layers, layer, acts, source, target, mode):
    """acts[target ...] = W acts[source ...], with ReLU or LINEAR."""
    n_in, n_out = layers.inputs[layer], layers.outputs[layer]
    _multiply(layers.forward, layers.starts[layer], n_in, ALL, n_out, acts, source, target, mode)


@jit(inner=True)
def backward_layer(layers, layer, acts, source, target, first, mode):
    """acts[target + i] = (W^T acts[source ...])_i for the inputs i >= first, a multiple of 4; ALL is 0. MASKED: the
    target holds the layer's inputs, and where they are not positive the gradient is zero. The gradient takes the place
    of the activation, which must not be needed any more."""
    n_in, n_out = layers.inputs[layer], layers.outputs[layer]
    _multiply(layers.backward, layers.starts[layer], n_out, first, n_in, acts, source, target, mode)


@jit(inline=True)
def _add_products(a, b, c, d, g, x0, x1, x2, x3):
    return multiply_add(a, g, x0), multiply_add(b, g, x1), multiply_add(c, g, x2), multiply_add(d, g, x3)


@jit(inline=True)
def _add_row(out, i, a, b, c, d):
    out[i] += total(a)
    out[i + 1] += total(b)
    out[i + 2] += total(c)
    out[i + 3] += total(d)


@jit(inner=True)
def weight_gradient(layers, layer, acts, g_row, x_row, out):
    """out (flat, fp32) += acts[g_row + o] . acts[x_row + i] over the block's points, for every weight of the layer."""
    n_in, n_out = layers.inputs[layer], layers.outputs[layer]
    start = layers.starts[layer]
    for o in range(0, n_out, 4):
        for i in range(0, n_in, 4):
            s00, s01, s02, s03 = zeros(FOUR), zeros(FOUR), zeros(FOUR), zeros(FOUR)
            s10, s11, s12, s13 = zeros(FOUR), zeros(FOUR), zeros(FOUR), zeros(FOUR)
            s20, s21, s22, s23 = zeros(FOUR), zeros(FOUR), zeros(FOUR), zeros(FOUR)
            s30, s31, s32, s33 = zeros(FOUR), zeros(FOUR), zeros(FOUR), zeros(FOUR)
            for p in range(0, POINTS, 4):
                g0, g1 = load_span(acts, g_row + o, p, FOUR), load_span(acts, g_row + o + 1, p, FOUR)
                g2, g3 = load_span(acts, g_row + o + 2, p, FOUR), load_span(acts, g_row + o + 3, p, FOUR)
                x0, x1 = load_span(acts, x_row + i, p, FOUR), load_span(acts, x_row + i + 1, p, FOUR)
                x2, x3 = load_span(acts, x_row + i + 2, p, FOUR), load_span(acts, x_row + i + 3, p, FOUR)
                s00, s01, s02, s03 = _add_products(s00, s01, s02, s03, g0, x0, x1, x2, x3)
                s10, s11, s12, s13 = _add_products(s10, s11, s12, s13, g1, x0, x1, x2, x3)
                s20, s21, s22, s23 = _add_products(s20, s21, s22, s23, g2, x0, x1, x2, x3)
                s30, s31, s32, s33 = _add_products(s30, s31, s32, s33, g3, x0, x1, x2, x3)
            _add_row(out, start + (o + 0) * n_in + i, s00, s01, s02, s03)
            _add_row(out, start + (o + 1) * n_in + i, s10, s11, s12, s13)
            _add_row(out, start + (o + 2) * n_in + i, s20, s21, s22, s23)
            _add_row(out, start + (o + 3) * n_in + i, s30, s31, s32, s33)


@jit(inner=True)
def read_block(source, point_major, start, n, target, row):
    """target[row + f, k] = feature f of point start + k; zero past the n points and in the rows that pad."""
    features = source.shape[1] if point_major else source.shape[0]
    for f in range((features + 3) // 4 * 4):
        if f >= features or point_major or n < POINTS:
            for p in range(0, POINTS, 16):
                store_span(target, row + f, p, zeros(SIXTEEN))
        elif not point_major:
            for p in range(0, POINTS, 16):
                store_span(target, row + f, p, load_span(source, f, start + p, SIXTEEN))
    if point_major:
        for k in range(n):
            for f in range(features):
                target[row + f, k] = source[start + k, f]
    elif n < POINTS:
        for f in range(features):
            for k in range(n):
                target[row + f, k] = source[f, start + k]


@jit(inner=True)
def write_block(source, row, features, start, n, target):
    """target[f, start + k] = source[row + f, k] for the n points of a block."""
    for f in range(features):
        if n == POINTS:
            for p in range(0, POINTS, 16):
                store_span(target, f, start + p, load_span(source, row + f, p, SIXTEEN))
        else:
            for k in range(n):
                target[f, start + k] = source[row + f, k]


CHUNK = 8  # blocks
WIDEST = 128


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
                    mode = MASKED if layer > 0 else LINEAR
                    backward_layer(layers, layer, acts, rows[layer + 1], rows[layer], ALL, mode)
            write_block(acts, rows[0], to_inputs.shape[0], start, n, to_inputs)


def _rows(layers: Layers) -> np.ndarray:
    """The row at which each layer's input begins, then the outputs and their end."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(layers.inputs), layers.inputs.sum() + layers.outputs[-1:]])


class _FusedMlp(Node):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, n_used: int, sink: GradientSink | None, *weights: Tensor) -> Tensor:
        layers = pack_layers(weights)
        rows, out = _rows(layers), torch.empty(weights[-1].shape[0], inputs.shape[0])
        out[:, n_used:] = 0.0
        launch(_forward, -(-n_used // POINTS), CHUNK, n_used, layers, rows, *by_features(inputs), out)
        ctx.save_for_backward(inputs, *weights)
        ctx.layers, ctx.rows, ctx.n_used, ctx.sink = layers, rows, n_used, sink
        return out.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, *weights = ctx.saved_tensors
        n_used, layers = ctx.n_used, ctx.layers
        to_inputs = torch.empty(inputs.shape[1] if ctx.needs_input_grad[0] else 0, inputs.shape[0])
        to_inputs[:, n_used:] = 0.0
        n_chunks = -(-n_used // (CHUNK * POINTS))
        sums = np.empty((n_chunks, layers.starts[-1]), np.float32)
        launch(_backward, n_chunks, 1, n_used, layers, ctx.rows, *by_features(inputs), grad.t(), sums, to_inputs)
        own = weight_gradients(sums.sum(axis=0), layers, weights, ctx.sink)
        return to_inputs.t() if ctx.needs_input_grad[0] else None, None, None, *own


def fused_mlp(inputs, weights, *, sink=None, n_used=None) -> Tensor:
    widest = max(max(weight.shape) for weight in weights)
    if inputs.dtype != torch.float32 or widest > WIDEST:
        return reference.fused_mlp(inputs, weights, sink=sink, n_used=n_used)
    used = inputs.shape[0] if n_used is None else min(int(n_used), inputs.shape[0])
    return _FusedMlp.apply(inputs, used, sink, *weights)
