"""`raster.composite` on a GPU. A program = a tile, splat after splat, each over all pixels of the tile, until none of
them has light left; backward from the last splat to the first. Values lie in the order of the walk. Each pair of tile
and splat has a row of gradients of its own, which one program writes; sorted by splat, they are summed in a fixed
order. fp32; deterministic."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops._triton import launchable
from .raster import LAST_LIGHT, LEAST_ALPHA, MOST_ALPHA

TILE, WARPS = 16, (4, 1)  # warps forward and backward
GROUP = 16  # splats between two looks at whether all pixels are dark
LEAST, MOST, LAST = tl.constexpr(LEAST_ALPHA), tl.constexpr(MOST_ALPHA), tl.constexpr(LAST_LIGHT)


@triton.jit
def _tile(p_ends, width, height, TILE: tl.constexpr):
    """Centres of this program's pixels, where these lie in the picture and whether; its first splat and their count."""
    tile, i, across = tl.program_id(0), tl.arange(0, TILE * TILE), tl.cdiv(width, TILE)
    column, row = tile % across * TILE + i % TILE, tile // across * TILE + i // TILE
    first = tl.load(p_ends + tile)
    count = (tl.load(p_ends + tile + 1) - first).to(tl.int32)
    pixel, m = row.to(tl.int64) * width + column, (column < width) & (row < height)
    return column + 0.5, row + 0.5, pixel, m, first, count


@triton.jit
def _alpha(p_value, x, y):
    """Alpha before its upper limit, zero below the lower one, and the pixels' places about the middle."""
    dx, dy = x - tl.load(p_value), y - tl.load(p_value + 1)
    power = -0.5 * (tl.load(p_value + 2) * dx * dx + tl.load(p_value + 4) * dy * dy)
    alpha = tl.load(p_value + 5) * tl.exp(power - tl.load(p_value + 3) * dx * dy)
    return tl.where(alpha >= LEAST, alpha, 0.0), dx, dy


@launchable(do_not_specialize=["width", "height"])
def _forward_kernel(p_values, p_ends, p_out, p_stops, width, height, TILE: tl.constexpr, GROUP: tl.constexpr):
    """p_out (height, width, 4), whose last channel holds the light that is left; p_stops: the entry each ends at."""
    x, y, pixel, m, first, count = _tile(p_ends, width, height, TILE)
    red, light = tl.zeros([TILE * TILE], tl.float32), tl.full([TILE * TILE], 1.0, tl.float32)
    green, blue, stop = red, red, tl.where(m, count, 0)
    start = count * 0
    while start < count:
        end = tl.minimum(start + GROUP, count)
        for k in range(start, end):
            p_value = p_values + (first + k) * 9
            alpha, _, _ = _alpha(p_value, x, y)
            alpha = tl.minimum(alpha, MOST)
            after = light * (1.0 - alpha)
            stop = tl.where((stop == count) & (after < LAST), k, stop)
            weight = tl.where(stop == count, alpha * light, 0.0)
            red += weight * tl.load(p_value + 6)
            green += weight * tl.load(p_value + 7)
            blue += weight * tl.load(p_value + 8)
            light = tl.where(stop == count, after, light)
        start = tl.where(tl.max(stop, 0) == count, end, count)
    tl.store(p_stops + pixel, first + stop, mask=m)
    tl.store(p_out + pixel * 4, red, mask=m)
    tl.store(p_out + pixel * 4 + 1, green, mask=m)
    tl.store(p_out + pixel * 4 + 2, blue, mask=m)
    tl.store(p_out + pixel * 4 + 3, light, mask=m)


@launchable(do_not_specialize=["width", "height"])
def _backward_kernel(p_values, p_ends, p_stops, p_light, p_grad, p_rows, width, height, TILE: tl.constexpr):
    """p_rows (m, 9), zero: the gradient of each entry. `light` goes back from what was left behind all to 1; `behind`
    sums w_j g_j over the splats behind."""
    x, y, pixel, m, first, _count = _tile(p_ends, width, height, TILE)
    stop = (tl.load(p_stops + pixel, mask=m, other=first) - first).to(tl.int32)
    light, behind = tl.load(p_light + pixel, mask=m, other=1.0), tl.zeros([TILE * TILE], tl.float32)
    g_red = tl.load(p_grad + pixel * 4, mask=m, other=0.0)
    g_green = tl.load(p_grad + pixel * 4 + 1, mask=m, other=0.0)
    g_blue = tl.load(p_grad + pixel * 4 + 2, mask=m, other=0.0)
    g_opacity = tl.load(p_grad + pixel * 4 + 3, mask=m, other=0.0)
    last = tl.max(stop, 0)
    for step in range(last):
        k = last - 1 - step
        p_value, p_row = p_values + (first + k) * 9, p_rows + (first + k) * 9
        whole, dx, dy = _alpha(p_value, x, y)
        whole = tl.where(k < stop, whole, 0.0)
        alpha = tl.minimum(whole, MOST)
        light = light / (1.0 - alpha)
        weight = alpha * light
        g = g_opacity + g_red * tl.load(p_value + 6) + g_green * tl.load(p_value + 7) + g_blue * tl.load(p_value + 8)
        power = tl.where(whole > MOST, 0.0, weight * g - alpha * behind / (1.0 - alpha))
        behind += weight * g
        a, b, c, opacity = tl.load(p_value + 2), tl.load(p_value + 3), tl.load(p_value + 4), tl.load(p_value + 5)
        tl.store(p_row, tl.sum((a * dx + b * dy) * power, 0))
        tl.store(p_row + 1, tl.sum((c * dy + b * dx) * power, 0))
        tl.store(p_row + 2, tl.sum(-0.5 * dx * dx * power, 0))
        tl.store(p_row + 3, tl.sum(-dx * dy * power, 0))
        tl.store(p_row + 4, tl.sum(-0.5 * dy * dy * power, 0))
        tl.store(p_row + 5, tl.sum(power, 0) / opacity)
        tl.store(p_row + 6, tl.sum(weight * g_red, 0))
        tl.store(p_row + 7, tl.sum(weight * g_green, 0))
        tl.store(p_row + 8, tl.sum(weight * g_blue, 0))


def forward(values, ids, ends, boxes, out, stops) -> None:
    height, width = stops.shape
    options = {"TILE": TILE, "GROUP": GROUP, "num_warps": WARPS[0]}
    _forward_kernel[(len(ends) - 1,)](values[ids], ends, out, stops, width, height, **options)


def backward(values, ids, ends, boxes, stops, light, grad) -> Tensor:
    (height, width), rows = stops.shape, torch.zeros(len(ids), 9, device=ids.device)
    pixels = (stops, light, grad.contiguous())
    _backward_kernel[(len(ends) - 1,)](values[ids], ends, *pixels, rows, width, height, TILE=TILE, num_warps=WARPS[1])
    return torch.zeros_like(values).index_put_((ids,), rows, accumulate=True)
