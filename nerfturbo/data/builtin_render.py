"""Pictures of the built-in scenes: shading, coverage, antialiasing. Numba; imported only to render.

Every pixel is the mean over its square: a dozen samples where anything changes from pixel to pixel, one where nothing
does. Alpha is the covered fraction and the colour is the mean over the covered samples (straight alpha). Means are
taken of display (sRGB) values, because that is the space a radiance field is composited in.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from .builtin_geometry import cached_jit, first_hit, jit, light_visibility, normal, openness, to_local
from .builtin_patterns import blend
from .builtin_tables import Tables

_SAMPLES = 12
# One sample in each row and each column of a 12 x 12 grid, placed by search so that the part of the pixel behind a
# random straight edge is counted best (0.039 off on average); those nearest to the corners come first.
_ROOKS_X = np.array([0, 2, 9, 10, 1, 3, 4, 5, 6, 7, 8, 11])
_ROOKS_Y = np.array([2, 10, 1, 9, 7, 5, 0, 8, 3, 11, 6, 4])
_TILE = 8
_BENT = 0.03  # display values; a colour that bends less than this across a pixel is its own mean
_HARD_SHADOW = 0.3  # light that changes more than this across a pixel is sampled like everything else


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
    gloss = half ** material[15] * material[14] * seen if half > 0.75 else 0.0
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
def _sample(world, scratch, active, eye, stamp):
    """(r, g, b, solid) along a ray from the eye, solid -1 where there is none; reuses light with the same stamp."""
    solids, materials, light, camera = world
    stamps, kept, free = scratch
    t, i = first_hit(solids, active, (camera[3], camera[7], camera[11], eye[0], eye[1], eye[2]))
    if i < 0:
        return 0.0, 0.0, 0.0, i
    point = (camera[3] + t * eye[0], camera[7] + t * eye[1], camera[11] + t * eye[2])
    local = to_local(solids, i, point[0] - solids[i, 1], point[1] - solids[i, 2], point[2] - solids[i, 3])
    facing = normal(solids, i, local[0], local[1], local[2])
    if stamps[i] != stamp:
        kept[i, 0], kept[i, 1] = _lighting(solids, light, i, point, facing, free)
        stamps[i] = stamp
    r, g, b = _shade(solids, materials[int(solids[i, 18])], light, i, eye, local, facing, (kept[i, 0], kept[i, 1]))
    return r, g, b, i


@cached_jit
def _render(world, scratch, active, changes, values, owners, out):
    """Pixels (n,) of one picture into out (n, 4), by their `changes`: 0 leaves them as they are.

    1 takes one sample in the middle and keeps it, with its light, in values (n, 5) and owners (n,). 2 takes twelve,
    which share the light of the middle on the same solid; the first four are in the corners, and if these agree with
    the middle, the others need not be asked. 3 takes twelve with fresh light for each four.
    """
    camera = world[3]
    stamps, kept = scratch[0], scratch[1]
    width = int(2.0 * camera[13])
    for pixel in range(changes.shape[0]):
        change, owner, stamp = changes[pixel], owners[pixel], 4 * pixel
        if change == 0:
            continue
        row, column = pixel // width, pixel % width
        if change > 1 and owner >= 0:
            stamps[owner], kept[owner, 0], kept[owner, 1] = stamp, values[pixel, 3], values[pixel, 4]
        red = green = blue = covered = 0.0
        darkest = brightest = values[pixel, 0] + values[pixel, 1] + values[pixel, 2]
        same, taken, i = True, 0, -1
        for k in range(1 if change == 1 else _SAMPLES):
            dx, dy = 0.5, 0.5
            if change > 1:
                dx, dy = (_ROOKS_X[k] + 0.5) / _SAMPLES, (_ROOKS_Y[k] + 0.5) / _SAMPLES
            if change == 3:
                stamp = 4 * pixel + k // 4
            eye = _direction(camera, column + dx, row + dy)
            r, g, b, i = _sample(world, scratch, active[row // _TILE, column // _TILE], eye, stamp)
            taken += 1
            same = same and i == owner
            if i >= 0:
                red, green, blue, covered = red + r, green + g, blue + b, covered + 1.0
                darkest, brightest = min(darkest, r + g + b), max(brightest, r + g + b)
            if k == 3 and change == 2 and same and (covered == 0.0 or brightest - darkest < 3.0 * _BENT):
                break
        scale = 1.0 / max(covered, 1.0)
        if change == 1 and i >= 0:
            owners[pixel] = i
            values[pixel, 0], values[pixel, 1], values[pixel, 2] = red, green, blue
            values[pixel, 3], values[pixel, 4] = kept[i, 0], kept[i, 1]
        out[pixel, 0], out[pixel, 1] = red * scale * 255.0 + 0.5, green * scale * 255.0 + 0.5
        out[pixel, 2], out[pixel, 3] = blue * scale * 255.0 + 0.5, covered / taken * 255.0 + 0.5


def _visible(solids: np.ndarray, camera: np.ndarray, height: int, width: int) -> np.ndarray:
    """(tile rows, tile columns, n_solids + 1) int64: the solids each tile of pixels can see, then -1."""
    y, x = np.mgrid[0 : height + _TILE : _TILE, 0 : width + _TILE : _TILE]
    plane = np.stack([(x - camera[13]) / camera[12], (camera[14] - y) / camera[12], -np.ones(x.shape)], axis=-1)
    corners = plane @ camera[:12].reshape(3, 4)[:, :3].T
    corners /= np.linalg.norm(corners, axis=-1, keepdims=True)
    quads = np.stack([corners[:-1, :-1], corners[:-1, 1:], corners[1:, :-1], corners[1:, 1:]])
    middles = quads.sum(0)
    middles /= np.linalg.norm(middles, axis=-1, keepdims=True)
    openings = np.arccos(np.clip((quads * middles).sum(-1).min(0), -1.0, 1.0))  # a cone about each tile
    offsets = solids[:, 1:4] - camera[[3, 7, 11]]
    distances = np.linalg.norm(offsets, axis=-1)
    angles = np.arccos(np.clip(middles @ (offsets / distances[:, None]).T, -1.0, 1.0))
    reach = np.where(distances > solids[:, 17], np.arcsin(np.minimum(solids[:, 17] / distances, 1.0)), np.pi)
    seen = angles <= openings[..., None] + reach + 1e-6
    order = np.argsort(np.where(seen, distances, np.inf), axis=-1)  # near ones first: they hide others
    listed = np.where(np.take_along_axis(seen, order, -1), order, -1)
    return np.concatenate([listed, np.full((*listed.shape[:2], 1), -1)], axis=-1)


def _changes(values: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """(H, W): 0 where one sample says it all, 2 where more are needed, 3 where they need their own light too."""
    height, width = owners.shape
    planes = np.pad(values[..., :4].transpose(2, 0, 1), ((0, 0), (1, 1), (1, 1)), "edge")  # r, g, b, light
    owners = np.pad(owners, 1, constant_values=-2)
    here = slice(1, -1)
    owner, double = owners[here, here], 2.0 * planes[:3, here, here]
    more, light = np.zeros((height, width), bool), np.zeros((height, width), bool)
    for dy, dx in ((0, 1), (1, 0), (1, 1), (1, -1)):
        one = (slice(1 + dy, 1 + dy + height), slice(1 + dx, 1 + dx + width))
        two = (slice(1 - dy, 1 - dy + height), slice(1 - dx, 1 - dx + width))
        bends = planes[:3][:, *one] + planes[:3][:, *two]
        bends -= double
        more |= (np.abs(bends, out=bends) > 2.0 * _BENT).any(0)
        for side in (one, two):
            same = owners[side] == owner
            more |= ~same
            light |= same & (np.abs(planes[3][side] - planes[3, here, here]) > _HARD_SHADOW)
    return np.where(light & (owner >= 0), 3, np.where(more, 2, 0))


def render_view(tables: Tables, pose: np.ndarray, focal: float, out: np.ndarray, *, samples_everywhere: bool) -> None:
    """One picture into out (height, width, 4) uint8; the principal point is in the middle."""
    height, width = out.shape[:2]
    n_solids = tables[0].shape[0]
    camera = np.concatenate([np.asarray(pose, np.float64).reshape(-1), [focal, 0.5 * width, 0.5 * height]])
    active = _visible(tables[0], camera, height, width)
    values = np.zeros((height * width, 5))  # r, g, b, part of the light seen, openness
    owners = np.full(height * width, -1, np.int64)
    world, flat = (*tables, camera), out.reshape(-1, 4)
    changes = np.repeat(np.repeat(active[..., 0] >= 0, _TILE, 0), _TILE, 1)[:height, :width].astype(np.int64)
    for _ in range(2):
        scratch = (np.full(n_solids, -1, np.int64), np.empty((n_solids, 2)), np.empty(8))
        _render(world, scratch, active, changes.reshape(-1), values, owners, flat)
        found = _changes(values.reshape(height, width, 5), owners.reshape(height, width))
        changes = np.where(changes > 0, np.full_like(found, 3) if samples_everywhere else found, 0)


def render_views(tables: Tables, poses: np.ndarray, focal: float, size: int) -> np.ndarray:
    """Square pictures (n, size, size, 4) uint8 of a packed scene from poses (n, 3, 4); one thread per picture."""
    out = np.zeros((poses.shape[0], size, size, 4), np.uint8)
    few_pixels = size < 150  # something thin could hide between their centres

    def render(index: int) -> None:
        render_view(tables, poses[index], focal, out[index], samples_everywhere=few_pixels)

    # The kernels release the GIL; threads of our own need no parallel region, which would cost seconds to compile.
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as threads:
        list(threads.map(render, range(poses.shape[0])))
    return out
