"""Instant-NGP's two networks, a block of points at a time; and density and visibility in rounds.

Networks: a task = a chunk of blocks; a block reads its encodings (feature-major or point-major), looks up its rays'
directions and runs all five layers of `mlp`. The backward writes each gradient over the activation it belongs to; it
finds the activations where the forward kept them, or computes them again where that would be too much memory. Every
chunk sums its own weight gradients; the chunks are added in order: deterministic, whatever the number of threads.

Visibility: a round takes FIRST samples of each ray that still lets light through, the next one twice as many, and so
on. Within a round all samples pass level by level through the encoder and then through the network.

fp32 inside; half encodings are widened once. Rows past `n_used`, and rows that no ray owns, are not read.
"""

import math
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._cpu import array, as_float32, jit, launch, release_scratch, scratch
from .._sink import Node
from ..composite.cpu import merge_weak_samples
from ..hash_encode import HashLayout
from ..hash_encode.cpu import encode
from ..mlp import cpu as mlp
from . import MAX_LOGIT

CHUNK = 8  # blocks
SLICE = 1 << 15  # points whose density is looked up at a time
MAX_KEPT = 1 << 28  # bytes of activations; more are computed again in the backward
ZERO = np.float32(0.0)
L0, L1, L2, L3, L4 = (np.int64(k) for k in range(5))  # not literals, see `jit`


@jit(inner=True)
def _forward_block(layers, rows, encoding, point_major, directions, rays, start, n, acts):
    """All activations of points start ... start + n - 1, at the rows that `rows` gives for each layer's input."""
    mlp.read_block(encoding, point_major, start, n, acts, rows[0])
    mlp.forward_layer(layers, L0, acts, rows[0], rows[1], mlp.RELU)
    features = rows[2] + directions.shape[1]
    mlp.forward_layer(layers, L1, acts, rows[1], features, mlp.LINEAR)
    for f in range(directions.shape[1]):
        line = acts[rows[2] + f]
        for k in range(n):
            line[k] = directions[rays[start + k], f]
        line[n:] = ZERO
    for row in range(features + layers.outputs[1], rows[3]):
        acts[row, :] = ZERO
    mlp.forward_layer(layers, L2, acts, rows[2], rows[3], mlp.RELU)
    mlp.forward_layer(layers, L3, acts, rows[3], rows[4], mlp.RELU)
    mlp.forward_layer(layers, L4, acts, rows[4], rows[5], mlp.LINEAR)


@jit()
def _forward(first, last, n_used, layers, rows, encoding, point_major, directions, rays, kept, out):
    """Blocks first ... last - 1; out (4, n). Activations stay in kept (blocks, rows, POINTS), unless that is empty."""
    acts = np.empty((rows[6], mlp.POINTS), np.float32)
    for block in range(first, last):
        start = block * mlp.POINTS
        n = min(mlp.POINTS, n_used - start)
        if kept.shape[0] > 0:
            acts = kept[block]
        _forward_block(layers, rows, encoding, point_major, directions, rays, start, n, acts)
        mlp.write_block(acts, rows[5], L3, start, n, out)
        mlp.write_block(acts, rows[2] + directions.shape[1], L1, start, n, out[3:])


@jit()
def _backward(
    first, last, n_used, layers, rows, encoding, point_major, directions, rays, kept, grad, sums, to_encoding,
    to_directions,
):  # fmt: skip
    """Chunks first ... last - 1. sums (chunks, weights); to_encoding (e, n) and to_directions (d, n), or empty."""
    acts = np.empty((rows[6], mlp.POINTS), np.float32)
    features = rows[2] + directions.shape[1]
    unwanted = L0 if to_directions.shape[0] > 0 else directions.shape[1] // 4 * 4  # rows nobody asks the gradient of
    for chunk in range(first, last):
        own = sums[chunk]
        own[:] = ZERO
        for start in range(chunk * CHUNK * mlp.POINTS, min((chunk + 1) * CHUNK * mlp.POINTS, n_used), mlp.POINTS):
            n = min(mlp.POINTS, n_used - start)
            if kept.shape[0] > 0:
                acts = kept[start // mlp.POINTS]
            else:
                _forward_block(layers, rows, encoding, point_major, directions, rays, start, n, acts)
            mlp.read_block(grad[:3], point_major != point_major, start, n, acts, rows[5])
            for layer in range(4, 2, -1):
                mlp.weight_gradient(layers, layer, acts, rows[layer + 1], rows[layer], own)
                mlp.backward_layer(layers, layer, acts, rows[layer + 1], rows[layer], mlp.ALL, mlp.MASKED)
            mlp.weight_gradient(layers, L2, acts, rows[3], rows[2], own)
            mlp.backward_layer(layers, L2, acts, rows[3], rows[2], unwanted, mlp.LINEAR)
            mlp.write_block(acts, rows[2], to_directions.shape[0], start, n, to_directions)
            for k in range(n):
                acts[features, k] += grad[3, start + k]
            mlp.weight_gradient(layers, L1, acts, features, rows[1], own)
            mlp.backward_layer(layers, L1, acts, features, rows[1], mlp.ALL, mlp.MASKED)
            mlp.weight_gradient(layers, L0, acts, rows[1], rows[0], own)
            if to_encoding.shape[0] > 0:
                mlp.backward_layer(layers, L0, acts, rows[1], rows[0], mlp.ALL, mlp.LINEAR)
                mlp.write_block(acts, rows[0], to_encoding.shape[0], start, n, to_encoding)


def _rows(layers: mlp.Layers, n_directions: int) -> np.ndarray:
    """The row at which each layer's input begins, then the outputs and their end. Features follow the directions."""
    colour = max(int(layers.inputs[2]), n_directions + int(layers.outputs[1]))
    sizes = [layers.inputs[0], layers.inputs[1], colour, layers.inputs[3], layers.inputs[4], layers.outputs[4]]
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(sizes, np.int64))])


_free: deque[Tensor] = deque(maxlen=2)  # activations of finished steps, for the next one to write over


def _take(n: int) -> Tensor:
    """At least n numbers of uninitialised memory, used before if possible: fresh pages cost milliseconds."""
    try:
        memory = _free.pop()
    except IndexError:
        memory = torch.empty(0)
    return memory if memory.numel() >= n else torch.empty(n + n // 4)


def release() -> None:
    """Give back the memory that is kept for the next step: who measures memory must not find the last one's."""
    _free.clear()
    release_scratch()


class _NgpField(Node):
    @staticmethod
    def forward(ctx, encoding, directions, rays, n_used, sink, differentiable, *weights) -> Tensor:
        layers = mlp.pack_layers(weights)
        out = torch.empty(4, encoding.shape[0])
        out[:, n_used:] = 0.0
        source = (*mlp.by_features(as_float32("encoding", encoding)), as_float32("directions", directions), rays)
        rows, n_blocks = _rows(layers, directions.shape[1]), -(-n_used // mlp.POINTS)
        keep = differentiable and n_blocks * rows[6] * mlp.POINTS * 4 <= MAX_KEPT
        shape = (n_blocks if keep else 0, int(rows[6]), mlp.POINTS)
        ctx.memory = _take(math.prod(shape)) if keep else torch.empty(0)
        kept = ctx.memory[: math.prod(shape)].view(shape)
        launch(_forward, n_blocks, CHUNK, n_used, layers, rows, *source, kept, out)
        ctx.save_for_backward(encoding, directions, rays, *weights)
        ctx.layers, ctx.rows, ctx.n_used, ctx.sink, ctx.kept = layers, rows, n_used, sink, kept
        return out.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        encoding, directions, rays, *weights = ctx.saved_tensors
        n, n_used, layers, kept = encoding.shape[0], ctx.n_used, ctx.layers, ctx.kept
        g_encoding = torch.empty(encoding.shape[1] if ctx.needs_input_grad[0] else 0, n)
        g_directions = torch.empty(directions.shape[1] if ctx.needs_input_grad[1] else 0, n)
        for tail in (g_encoding[:, n_used:], g_directions[:, n_used:]):
            tail.zero_()
        n_chunks = -(-n_used // (CHUNK * mlp.POINTS))
        sums = np.empty((n_chunks, layers.starts[-1]), np.float32)
        source = (*mlp.by_features(encoding.float()), directions.float(), rays, kept, grad.t())
        launch(_backward, n_chunks, 1, n_used, layers, ctx.rows, *source, sums, g_encoding, g_directions)
        # Gradients lie where the activations were: a second backward would have to compute those again.
        if ctx.kept.shape[0]:
            _free.append(ctx.memory)
            ctx.kept, ctx.memory = kept[:0].clone(), None
        own = mlp.weight_gradients(sums.sum(axis=0), layers, weights, ctx.sink)
        to_encoding = g_encoding.t().to(encoding.dtype) if ctx.needs_input_grad[0] else None
        to_directions = None
        if ctx.needs_input_grad[1]:
            to_directions = torch.zeros(directions.shape[0], directions.shape[1])
            to_directions.index_add_(0, rays[:n_used].long(), g_directions[:, :n_used].t())
            to_directions = to_directions.to(directions.dtype)
        return to_encoding, to_directions, None, None, None, None, *own


def ngp_field(encoding, directions, ray_indices, weights, *, sink=None, n_used=None) -> Tensor:
    if ray_indices is None:
        ray_indices = torch.arange(encoding.shape[0], dtype=torch.int32)
    used = encoding.shape[0] if n_used is None else min(int(n_used), encoding.shape[0])
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in (encoding, directions, *weights))
    return _NgpField.apply(encoding, directions, ray_indices, used, sink, differentiable, *weights)


@jit()
def _density(first, last, n_used, layers, encoding, point_major, out):
    """Blocks first ... last - 1 of out (1, n) through the density network alone."""
    hidden = layers.inputs[0]
    logits = hidden + layers.outputs[0]
    acts = np.empty((logits + layers.outputs[1], mlp.POINTS), np.float32)
    for block in range(first, last):
        start = block * mlp.POINTS
        n = min(mlp.POINTS, n_used - start)
        mlp.read_block(encoding, point_major, start, n, acts, L0)
        mlp.forward_layer(layers, L0, acts, L0, hidden, mlp.RELU)
        mlp.forward_layer(layers, L1, acts, hidden, logits, mlp.LINEAR)
        mlp.write_block(acts, logits, L1, start, n, out)


def _density_logits(positions: Tensor, table: Tensor, layout: HashLayout, layers: mlp.Layers, out: Tensor) -> None:
    """out (n,) for positions (n, 3), both fp32; `layers` as `pack_layers([density_in, density_out[:1]])` packs them.
    Goes through the points in slices, whose encoding stays in cache between encoder and network."""
    n = positions.shape[0]
    for start in range(0, n, SLICE):
        part = positions[start : start + SLICE]
        unit, encoding = scratch("unit", 3, part.shape[0]), scratch("encoding", layout.n_outputs, part.shape[0])
        encode(part, table, layout, unit, encoding)
        n_blocks, own = -(-part.shape[0] // mlp.POINTS), out[start : start + SLICE][None]
        launch(_density, n_blocks, CHUNK, part.shape[0], layers, encoding, False, own)


def density_at(field, positions, *, n_used, logits) -> Tensor:
    used = positions.shape[0] if n_used is None else min(int(n_used), positions.shape[0])
    out = torch.empty(positions.shape[0])
    out[used:] = 0.0
    layers = mlp.pack_layers([field.weights[0], field.weights[1][:1]])
    points, table = as_float32("positions", positions)[:used], as_float32("table", field.table)
    _density_logits(points, table, field.layout, layers, out[:used])
    return out if logits else out.clamp_(max=MAX_LOGIT).exp_()


FIRST = 8  # samples of a ray in the first round
RAY_CHUNK = 256  # rays per task
TOP = np.float32(MAX_LOGIT)


@jit()
def _place(first, last, live, begin, starts, ends, origins, directions, low, size, slots, positions):
    """positions[slots[k] ...] of the next samples of ray live[k], with the box at [0, 1]."""
    for k in range(first, last):
        ray, count = live[k], slots[k + 1] - slots[k]
        for j in range(count):
            i = begin[ray] + j
            middle = (starts[i] + ends[i]) * np.float32(0.5)
            for axis in range(3):
                x = origins[ray, axis] + middle * directions[ray, axis]
                positions[slots[k] + j, axis] = (x - low[axis]) / size[axis]


@jit()
def _advance(first, last, live, begin, through, starts, ends, logits, slots, eps, threshold, keep, optical):
    """Flags of this round's samples, where rays go on with how much light; `optical` gets their thickness."""
    for k in range(first, last):
        ray, light = live[k], through[live[k]]
        for j in range(slots[k + 1] - slots[k]):
            if light < eps:
                break
            i, logit = begin[ray] + j, logits[slots[k] + j]
            thickness = np.float32(math.exp(TOP if logit > TOP else logit)) * (ends[i] - starts[i])
            decay = np.float32(math.expm1(-thickness))  # -alpha
            if -decay >= threshold:  # false for NaN
                keep[i] = 1
                if optical.shape[0]:
                    optical[i] = thickness
                light += decay * light
        begin[ray] += slots[k + 1] - slots[k]
        through[ray] = light


def visibility(field, origins, directions, samples, *, early_stop_eps, alpha_thre, thinning) -> Tensor:
    keep = torch.zeros(samples.capacity, dtype=torch.uint8)
    table, layers = as_float32("table", field.table), mlp.pack_layers([field.weights[0], field.weights[1][:1]])
    rays = (as_float32("origins", origins), as_float32("directions", directions))
    intervals = (samples.t_starts, samples.t_ends)
    box = (np.array(field.aabb.low, np.float32), np.array(field.aabb.size, np.float32))
    limits = (np.float32(early_stop_eps), np.float32(alpha_thre))
    begin, end = array(samples.offsets[:-1].clone()), array(samples.offsets[1:])
    optical = torch.zeros(0 if thinning is None else samples.capacity)
    through = np.ones(samples.n_rays, np.float32)
    live, steps = np.flatnonzero(end > begin), FIRST
    while live.size:
        slots = np.zeros(live.size + 1, np.int64)
        np.cumsum(np.minimum(end[live] - begin[live], steps), out=slots[1:])
        positions = torch.empty(int(slots[-1]), 3)
        launch(_place, live.size, RAY_CHUNK, live, begin, *intervals, *rays, *box, slots, positions)
        logits = torch.empty(positions.shape[0])
        _density_logits(positions, table, field.layout, layers, logits)
        rays_state = (live, begin, through, *intervals, logits, slots, *limits)
        launch(_advance, live.size, RAY_CHUNK, *rays_state, keep, optical)
        live = live[(begin[live] < end[live]) & ~(through[live] < limits[0])]
        steps *= 2
    return keep.view(torch.bool) if thinning is None else merge_weak_samples(optical, samples, thinning)
