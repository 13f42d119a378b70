"""Pictures of the built-in scenes: shading, coverage, antialiasing. Numba; imported only to render.

Every pixel is the mean over its square: sixteen samples where anything changes from pixel to pixel, one where nothing
does. Alpha is the covered fraction and the colour is the mean over the covered samples (straight alpha). Means are
taken of display (sRGB) values, because that is the space a radiance field is composited in.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .builtin_geometry import cached_jit, first_hit, jit, light_visibility, normal, openness, to_local
from .builtin_patterns import blend
from .builtin_tables import Tables

_SAMPLES = 16
# One sample in each row and each column of a 16 x 16 grid; the corners come first.
_ROOKS_X = np.array([0, 14, 1, 15, 2, 9, 6, 11, 4, 13, 7, 10, 3, 8, 5, 12])
_ROOKS_Y = np.array([1, 0, 15, 14, 7, 10, 13, 5, 4, 3, 2, 12, 11, 6, 9, 8])
_TILE = 8
_BENT = 0.02  # display values; a colour that bends less than this across a pixel is its own mean
_HARD_SHADOW = 0.2  # light that changes more than this across a pixel is sampled like everything else


@jit
def _display(value):
    """Linear light to display values: a soft shoulder, so that highlights roll off instead of clipping, then gamma 2.

    Gamma 2 is close to sRGB's curve and several times cheaper.
    """
    value = max(value, 0.0)
    return min(math.sqrt(value * (1.0 + 0.12 * value) / (1.0 + 0.42 * value)), 1.0)


@jit
def _smoothstep(low, high, value):
    t = min(max((value - low) / (high - low), 0.0), 1.0)
    return t * t * (3.0 - 2.0 * t)


@jit
def _lighting(solids, light, i, point, direction, free):
    """(part of the key light seen, openness) at a surface point with normal `direction`."""
    x, y, z = point
    seen = 0.0
    if direction[0] * light[0] + direction[1] * light[1] + direction[2] * light[2] > 0.0:
        seen = light_visibility(solids, i, (x, y, z, light[0], light[1], light[2]), light[3])
    return seen, openness(solids, i, point, direction, free)


@jit
def _shade(solids, material, light, i, eye, local, direction, lighting):
    """Display colour of solid i at a point in its own axes, with a normal, seen along `eye`."""
    dx, dy, dz = eye
    nx, ny, nz = direction
    seen, open_ = lighting
    weight_b, weight_c = blend(material, solids, i, local[0], local[1], local[2])
    weight_a = 1.0 - weight_b - weight_c
    kx, ky, kz = light[0], light[1], light[2]
    key = max(nx * kx + ny * ky + nz * kz, 0.0) * seen
    fill = max(nx * light[4] + ny * light[5] + nz * light[6], 0.0) * (0.4 + 0.6 * open_)
    # Blinn-Phong: the half vector between the light and the eye
    hx, hy, hz = kx - dx, ky - dy, kz - dz
    scale = 1.0 / max(math.sqrt(hx * hx + hy * hy + hz * hz), 1e-9)
    half = (nx * hx + ny * hy + nz * hz) * scale
    gloss = half ** material[15] * material[14] * seen if half > 0.5 else 0.0
    towards = max(-(nx * dx + ny * dy + nz * dz), 0.0)
    away = 1.0 - towards
    fresnel = material[16] * (0.06 + 0.94 * away * away * away * away * away)
    rx, ry, rz = dx + 2.0 * towards * nx, dy + 2.0 * towards * ny, dz + 2.0 * towards * nz
    panel = _smoothstep(0.62, 0.82, rx * light[4] + ry * light[5] + rz * light[6])
    mirror = 1.6 * fresnel * open_ * (0.25 + 0.55 * _smoothstep(-0.2, 0.9, rz) + 1.6 * panel)
    up, down = (0.5 + 0.5 * nz) * open_, (0.5 - 0.5 * nz) * open_
    red = green = blue = 0.0
    for channel in range(3):
        albedo = weight_a * material[1 + channel] + weight_b * material[4 + channel] + weight_c * material[7 + channel]
        warm, cool, sky, floor = light[7 + channel], light[10 + channel], light[13 + channel], light[16 + channel]
        lit = albedo * (sky * up + floor * down + warm * key + cool * fill)
        red, green, blue = green, blue, _display(lit + warm * gloss + sky * mirror)
    return red, green, blue


@jit
def _direction(camera, px, py):
    u, v = (px - camera[13]) / camera[12], (py - camera[14]) / camera[12]
    dx = camera[0] * u - camera[1] * v - camera[2]
    dy = camera[4] * u - camera[5] * v - camera[6]
    dz = camera[8] * u - camera[9] * v - camera[10]
    scale = 1.0 / math.sqrt(dx * dx + dy * dy + dz * dz)
    return dx * scale, dy * scale, dz * scale


@jit
def _cull(world, scratch, row, column):
    """List the solids that a tile of pixels can see; returns how many."""
    solids, camera, active = world[0], world[3], scratch[0]
    ax, ay, az = _direction(camera, column + 0.5 * _TILE, row + 0.5 * _TILE)
    opening = 0.0
    for corner in range(4):
        bx, by, bz = _direction(camera, column + 1.0 * _TILE * (corner & 1), row + 1.0 * _TILE * (corner >> 1))
        opening = max(opening, math.acos(min(ax * bx + ay * by + az * bz, 1.0)))
    n_active = 0
    for i in range(solids.shape[0]):
        cx, cy, cz = solids[i, 1] - camera[3], solids[i, 2] - camera[7], solids[i, 3] - camera[11]
        length = math.sqrt(cx * cx + cy * cy + cz * cz)
        if length > solids[i, 17]:
            angle = math.acos(min(max((cx * ax + cy * ay + cz * az) / length, -1.0), 1.0))
            if angle > opening + math.asin(solids[i, 17] / length) + 1e-6:
                continue
        active[n_active] = i
        n_active += 1
    return n_active


@jit
def _sample(world, scratch, n_active, px, py):
    """(r, g, b, solid) at a pixel position, solid -1 where there is none; reuses light that `known` vouches for."""
    solids, materials, light, camera = world
    active, known, kept, free = scratch
    eye = _direction(camera, px, py)
    t, i = first_hit(solids, active, n_active, (camera[3], camera[7], camera[11], eye[0], eye[1], eye[2]))
    if i < 0:
        return 0.0, 0.0, 0.0, i
    point = (camera[3] + t * eye[0], camera[7] + t * eye[1], camera[11] + t * eye[2])
    local = to_local(solids, i, point[0] - solids[i, 1], point[1] - solids[i, 2], point[2] - solids[i, 3])
    facing = normal(solids, i, local[0], local[1], local[2])
    if not known[i]:
        kept[i, 0], kept[i, 1] = _lighting(solids, light, i, point, facing, free)
        known[i] = True
    material = materials[int(solids[i, 18])]
    r, g, b = _shade(solids, material, light, i, eye, local, facing, (kept[i, 0], kept[i, 1]))
    return r, g, b, i


@jit
def _changes(values, owners, row, column):
    """0 where one sample says it all, 1 where more are needed, 2 where they need their own shadows too."""
    height, width = owners.shape
    if row == 0 or column == 0 or row == height - 1 or column == width - 1:
        return 1
    owner, answer = owners[row, column], 0
    for y in range(row - 1, row + 2):
        for x in range(column - 1, column + 2):
            if owners[y, x] != owner:
                answer = max(answer, 1)
            elif owner >= 0 and abs(values[y, x, 3] - values[row, column, 3]) > _HARD_SHADOW:
                answer = 2
    for channel in range(3 if answer == 0 else 0):
        middle = 2.0 * values[row, column, channel]
        for k in range(4):  # along the row, the column and both diagonals
            dy, dx = (0 if k == 0 else 1), (0 if k == 1 else 1 if k != 3 else -1)
            ends = values[row + dy, column + dx, channel] + values[row - dy, column - dx, channel]
            if abs(ends - middle) > 2.0 * _BENT:
                return 1
    return answer


@jit
def _pixel(world, scratch, n_active, row, column, middle, change):
    """(r, g, b, alpha, solid) over a pixel's square: one sample in the middle if nothing changes there.

    Otherwise sixteen, the first four of them in the corners: if those agree with the middle (its solid and r + g + b),
    the others need not be asked.
    """
    known = scratch[1]
    owner, darkest, brightest = middle[0], middle[1], middle[1]
    red = green = blue = covered = 0.0
    same, taken, i = True, 0, -1
    for k in range(_SAMPLES if change > 0 else 1):
        px, py = column + 0.5, row + 0.5
        if change > 0:
            px, py = column + (_ROOKS_X[k] + 0.5) / _SAMPLES, row + (_ROOKS_Y[k] + 0.5) / _SAMPLES
        if change == 2 and k % 4 == 0:
            for solid in range(known.shape[0]):
                known[solid] = False
        r, g, b, i = _sample(world, scratch, n_active, px, py)
        taken += 1
        same = same and i == owner
        if i >= 0:
            red, green, blue, covered = red + r, green + g, blue + b, covered + 1.0
            darkest, brightest = min(darkest, r + g + b), max(brightest, r + g + b)
        if k == 3 and change == 1 and same and (covered == 0.0 or brightest - darkest < 3.0 * _BENT):
            break
    scale = 1.0 / max(covered, 1.0)
    return red * scale, green * scale, blue * scale, covered / taken, i


@cached_jit
def _pass(world, scratch, values, owners, everywhere, out):
    """One picture, twice over: first (everywhere < 0) a sample per pixel, then more of them where these differ."""
    height, width = owners.shape
    known, kept = scratch[1], scratch[2]
    for tile in range(-(-height // _TILE) * -(-width // _TILE)):
        tile_row, tile_column = tile // -(-width // _TILE) * _TILE, tile % -(-width // _TILE) * _TILE
        n_active = _cull(world, scratch, tile_row, tile_column)
        for pixel in range(_TILE * _TILE if n_active > 0 else 0):
            row, column = tile_row + pixel // _TILE, tile_column + pixel % _TILE
            if row >= height or column >= width:
                continue
            owner, change = owners[row, column], 0
            if everywhere >= 0:
                change = max(_changes(values, owners, row, column), everywhere)
                if change == 0:
                    continue
            middle = values[row, column, 0] + values[row, column, 1] + values[row, column, 2]
            for solid in range(known.shape[0]):
                known[solid] = False
            if owner >= 0:  # the light at the pixel's middle serves all samples of the same solid
                kept[owner, 0], kept[owner, 1] = values[row, column, 3], values[row, column, 4]
                known[owner] = True
            r, g, b, alpha, i = _pixel(world, scratch, n_active, row, column, (owner, middle), change)
            if everywhere < 0 and i >= 0:
                owners[row, column] = i
                values[row, column, 0], values[row, column, 1], values[row, column, 2] = r, g, b
                values[row, column, 3], values[row, column, 4] = kept[i, 0], kept[i, 1]
            out[row, column, 0], out[row, column, 1] = r * 255.0 + 0.5, g * 255.0 + 0.5
            out[row, column, 2], out[row, column, 3] = b * 255.0 + 0.5, alpha * 255.0 + 0.5


def render_view(tables: Tables, pose: np.ndarray, focal: float, out: np.ndarray, *, samples_everywhere: bool) -> None:
    """One picture into out (height, width, 4) uint8; the principal point is in the middle."""
    height, width = out.shape[:2]
    n_solids = tables[0].shape[0]
    camera = np.concatenate([np.asarray(pose, np.float64).reshape(-1), [focal, 0.5 * width, 0.5 * height]])
    scratch = (np.empty(n_solids, np.int64), np.zeros(n_solids, np.bool_), np.empty((n_solids, 2)), np.empty(8))
    values = np.zeros((height, width, 5))  # r, g, b, part of the light seen, openness
    owners = np.full((height, width), -1, np.int64)
    _pass((*tables, camera), scratch, values, owners, -1, out)
    _pass((*tables, camera), scratch, values, owners, 2 if samples_everywhere else 0, out)


def render_views(tables: Tables, poses: np.ndarray, focal: float, size: int) -> np.ndarray:
    """Square pictures (n, size, size, 4) uint8 of a packed scene from poses (n, 3, 4); one thread per picture."""
    out = np.zeros((poses.shape[0], size, size, 4), np.uint8)
    few_pixels = size < 150  # something thin could hide between their centres

    def render(index: int) -> None:
        render_view(tables, poses[index], focal, out[index], samples_everywhere=few_pixels)

    # The kernels release the GIL; threads of our own need no parallel region, which would cost seconds to compile.
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads:
        list(threads.map(render, range(poses.shape[0])))
    return out
