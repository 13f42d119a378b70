"""`raster.composite` on a CPU, as numba kernels. A task = a tile, splat after splat, each over the pixels it reaches;
backward from the last splat to the first. Each pair of tile and splat has a row of gradients of its own, so that tasks
write disjoint memory, summed in a fixed order. fp32; deterministic."""

import math

import numpy as np
import torch
from torch import Tensor

from ...ops._cpu import jit, launch
from .raster import LAST_LIGHT, LEAST_ALPHA, MOST_ALPHA

TILE = 32
LEAST, MOST, LAST = np.float32(LEAST_ALPHA), np.float32(MOST_ALPHA), np.float32(LAST_LIGHT)
ZERO, ONE, HALF = np.float32(0.0), np.float32(1.0), np.float32(0.5)
LOWEST = np.float32(math.log(LEAST_ALPHA) - 1e-3)  # below, not even opaque splats are seen


@jit(inner=True)
def _alpha(value, row, column):
    """Alpha before its upper limit, zero below the lower one, and the pixel's place about the middle."""
    dx, dy = np.float32(column) + HALF - value[0], np.float32(row) + HALF - value[1]
    power = -HALF * (value[2] * dx * dx + value[4] * dy * dy) - value[3] * dx * dy
    alpha = value[5] * np.float32(math.exp(power)) if power > LOWEST else ZERO
    return (alpha if alpha >= LEAST else ZERO), dx, dy


@jit(inner=True)
def _bounds(tile, shape):
    """The pixels of a tile: from top and left to before bottom and right."""
    across = (shape[1] + TILE - 1) // TILE
    top, left = tile // across * TILE, tile % across * TILE
    return top, left, min(top + TILE, shape[0]), min(left + TILE, shape[1])


@jit()
def _forward(first, last, values, ids, ends, boxes, out, stops):
    """out (height, width, 4), whose last channel holds the light that is left; stops: the entry each pixel ends at."""
    for tile in range(first, last):
        top, left, bottom, right = _bounds(tile, stops.shape)
        out[top:bottom, left:right, :3], out[top:bottom, left:right, 3] = ZERO, ONE
        stops[top:bottom, left:right], live = ends[tile + 1], (bottom - top) * (right - left)
        for entry in range(ends[tile], ends[tile + 1]):
            if live == 0:
                break
            i = ids[entry]
            for row in range(max(top, boxes[i, 1]), min(bottom, boxes[i, 3] + 1)):
                for column in range(max(left, boxes[i, 0]), min(right, boxes[i, 2] + 1)):
                    if stops[row, column] <= entry:
                        continue
                    alpha, _, _ = _alpha(values[i], row, column)
                    alpha, light = min(alpha, MOST), out[row, column, 3]
                    if light * (ONE - alpha) < LAST:
                        stops[row, column] = entry
                        live -= 1
                    elif alpha > ZERO:
                        for channel in range(3):
                            out[row, column, channel] += light * alpha * values[i, 6 + channel]
                        out[row, column, 3] = light * (ONE - alpha)


@jit()
def _backward(first, last, values, ids, ends, boxes, stops, g_out, light, behind, grads):
    """grads (m, 9), of each entry. `light` (height, width) is what was left behind all, and goes back to 1; `behind`
    sums w_j g_j over the splats behind."""
    for tile in range(first, last):
        top, left, bottom, right = _bounds(tile, stops.shape)
        for k in range(ends[tile + 1] - ends[tile]):
            entry = ends[tile + 1] - 1 - k
            i, grad = ids[entry], grads[entry]
            value = values[i]
            grad[:] = ZERO
            for row in range(max(top, boxes[i, 1]), min(bottom, boxes[i, 3] + 1)):
                for column in range(max(left, boxes[i, 0]), min(right, boxes[i, 2] + 1)):
                    if stops[row, column] <= entry:
                        continue
                    whole, dx, dy = _alpha(value, row, column)
                    if whole == ZERO:
                        continue
                    alpha, g = min(whole, MOST), g_out[row, column, 3]
                    before = light[row, column] / (ONE - alpha)
                    for channel in range(3):
                        g += g_out[row, column, channel] * value[6 + channel]
                        grad[6 + channel] += alpha * before * g_out[row, column, channel]
                    power = alpha * (before * g - behind[row, column] / (ONE - alpha))
                    light[row, column] = before
                    behind[row, column] += alpha * before * g
                    if whole > MOST:
                        continue
                    grad[0] += (value[2] * dx + value[3] * dy) * power
                    grad[1] += (value[4] * dy + value[3] * dx) * power
                    grad[2] -= HALF * dx * dx * power
                    grad[3] -= dx * dy * power
                    grad[4] -= HALF * dy * dy * power
                    grad[5] += power / value[5]


def forward(values, ids, ends, boxes, out, stops) -> None:
    launch(_forward, len(ends) - 1, 1, values, ids, ends, boxes, out, stops)


def backward(values, ids, ends, boxes, stops, light, grad) -> Tensor:
    pixels, rows = (stops, grad, light.clone(), torch.zeros_like(light)), torch.empty(len(ids), 9)
    launch(_backward, len(ends) - 1, 1, values, ids, ends, boxes, *pixels, rows)
    return torch.zeros_like(values).index_add_(0, ids, rows)
