"""Images of the built-in scenes: distances and ray hits, patterns, shading, antialiasing. Numba; imported to render.

A solid is one row of a float64 table (see `scenes.pack`):
    0 kind, 1:4 centre, 4:13 rotation (local to world, row-major), 13:17 parameters, 17 bounding radius, 18 material.
Kinds and parameters, in local coordinates; each is a core grown by a radius, so that it has a normal everywhere:
    SPHERE   radius                                                    a point
    CAPSULE  radius, half length along z                               a segment
    BOX      half extents x, y, z, edge rounding                       a smaller box
    FRUSTUM  radii at the bottom and on top, half height, rounding     a smaller frustum (equal radii: a cylinder)
    TORUS    ring radius, tube radius, about z                         a circle
All but the torus are convex, so that along a ray their signed distance is a convex function of t: the chord through
two points before the hit never steps past it, and the search for a hit converges like the secant method, safely.

A material is one row of a float64 table, colours in linear light:
    0 pattern, 1:4 colour a, 4:7 colour b, 7:10 colour c, 10:14 parameters, 14 highlight, 15 shininess, 16 reflection.
Patterns in a solid's own coordinates, and their parameters:
    SOLID     a
    CHECKER   a and b in squares of side p0 on top (z > p1), c elsewhere
    GORES     a, b and c in p0 meridian fields, a at the poles (beyond p1 of the way up)
    STRIPES   a and b in bands p0 high along z, rising by p1 bands in a turn
    GLYPHS    a letter in b with a frame in c on each face of a box; the first face shows letter p0
    WOOD      a to b along wavy rings p0 apart, stretched along z
    GLOBE     land b in a sea a, with a grid c every p0 degrees

Every pixel is the mean over its square, of display (sRGB) values: a dozen samples where anything changes from pixel to
pixel, one elsewhere. Alpha is the covered fraction, the colour the mean over the covered samples (straight alpha).
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numba import njit

from .scenes import BOX, CAPSULE, CHECKER, GLYPHS, GORES, SOLID, SPHERE, STRIPES, TORUS, WOOD, Tables

FAR = 1e30
_TOLERANCE = 1e-6
_GOLDEN = 0.6180339887498949
_TAPS = 4  # heights at which `openness` looks around

_OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": {"nsz", "arcp", "contract", "afn"}}
jit = njit(**_OPTIONS)


def cached_jit(function: Callable[..., None]) -> Callable[..., None]:
    """For the entry alone: its file holds all it calls, and thirty small files would take longer to read."""
    try:
        return njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # no folder to keep it in
        return jit(function)


@jit
def to_local(solids, i, x, y, z):
    """Turn a direction into the solid's axes (for a point: subtract the centre first)."""
    return (
        solids[i, 4] * x + solids[i, 7] * y + solids[i, 10] * z,
        solids[i, 5] * x + solids[i, 8] * y + solids[i, 11] * z,
        solids[i, 6] * x + solids[i, 9] * y + solids[i, 12] * z,
    )


@jit
def _frustum_offsets(radial, z, bottom, top, half):
    """In the (radius, height) half-plane: from the nearest cap and from the slanted side to a point."""
    cap_r = radial - min(radial, bottom if z < 0.0 else top)
    cap_z = abs(z) - half
    side_r, side_z = top - bottom, 2.0 * half
    back = ((top - radial) * side_r + (half - z) * side_z) / (side_r * side_r + side_z * side_z)
    back = min(max(back, 0.0), 1.0)
    return cap_r, cap_z, radial - top + side_r * back, z - half + side_z * back


@jit
def distance(solids, i, x, y, z):
    """Signed distance to solid i from a point in its own axes, negative inside; exact everywhere."""
    kind = int(solids[i, 0])
    a, b, c, rounding = solids[i, 13], solids[i, 14], solids[i, 15], solids[i, 16]
    if kind == BOX:
        qx, qy, qz = abs(x) - (a - rounding), abs(y) - (b - rounding), abs(z) - (c - rounding)
        ox, oy, oz = max(qx, 0.0), max(qy, 0.0), max(qz, 0.0)
        return math.sqrt(ox * ox + oy * oy + oz * oz) + min(max(qx, max(qy, qz)), 0.0) - rounding
    flat = x * x + y * y
    if kind == SPHERE:
        return math.sqrt(flat + z * z) - a
    if kind == CAPSULE:
        over = max(abs(z) - b, 0.0)
        return math.sqrt(flat + over * over) - a
    radial = math.sqrt(flat)
    if kind == TORUS:
        return math.sqrt((radial - a) * (radial - a) + z * z) - b
    cap_r, cap_z, side_r, side_z = _frustum_offsets(radial, z, a - rounding, b - rounding, c - rounding)
    nearest = math.sqrt(min(cap_r * cap_r + cap_z * cap_z, side_r * side_r + side_z * side_z))
    return (-nearest if side_r < 0.0 and cap_z < 0.0 else nearest) - rounding


@jit
def normal(solids, i, x, y, z):
    """Outward unit normal, in the world, at a surface point given in the solid's axes: away from the core."""
    kind = int(solids[i, 0])
    a, b, c, rounding = solids[i, 13], solids[i, 14], solids[i, 15], solids[i, 16]
    if kind == CAPSULE:
        z -= min(max(z, -b), b)
    elif kind == BOX:
        a, b, c = a - rounding, b - rounding, c - rounding
        x, y, z = x - min(max(x, -a), a), y - min(max(y, -b), b), z - min(max(z, -c), c)
    elif kind != SPHERE:
        radial = max(math.sqrt(x * x + y * y), 1e-12)
        out = radial - a
        if kind != TORUS:
            cap_r, cap_z, out, side_z = _frustum_offsets(radial, z, a - rounding, b - rounding, c - rounding)
            if cap_r * cap_r + cap_z * cap_z < out * out + side_z * side_z:
                out, z = cap_r, cap_z if z > 0.0 else -cap_z
            else:
                z = side_z
        x, y = x * out / radial, y * out / radial
    scale = 1.0 / max(math.sqrt(x * x + y * y + z * z), 1e-30)
    return (
        (solids[i, 4] * x + solids[i, 5] * y + solids[i, 6] * z) * scale,
        (solids[i, 7] * x + solids[i, 8] * y + solids[i, 9] * z) * scale,
        (solids[i, 10] * x + solids[i, 11] * y + solids[i, 12] * z) * scale,
    )


@jit
def _slab(origin, slope, half, t, stop):
    """The part of [t, stop] where |origin + t slope| <= half."""
    inverse = 1.0 / (slope if abs(slope) > 1e-12 else 1e-12)
    middle, reach = -origin * inverse, half * abs(inverse)
    return max(t, middle - reach), min(stop, middle + reach)


@jit
def _clip(solids, i, ray, t, stop):
    """The part of [t, stop] inside the solid's own bounding box: on a flat face it starts at the hit."""
    kind = int(solids[i, 0])
    a, b, c = solids[i, 13], solids[i, 14], solids[i, 15]
    if kind == CAPSULE:
        b, c = a, a + b
    elif kind == TORUS:
        a, b, c = a + b, a + b, b
    elif kind != BOX:
        a = b = max(a, b)
    t, stop = _slab(ray[2], ray[5], c, t, stop)
    if t > stop:
        return t, stop
    t, stop = _slab(ray[0], ray[3], a, t, stop)
    return _slab(ray[1], ray[4], b, t, stop)


@jit
def _hit(solids, i, ray, t, stop):
    """First hit in [t, stop] of a ray in the solid's axes, or FAR."""
    t, stop = _clip(solids, i, ray, t, stop)
    if t > stop:
        return FAR
    ox, oy, oz, dx, dy, dz = ray
    convex = int(solids[i, 0]) != TORUS
    if not convex:
        hole = solids[i, 13] - solids[i, 14]
        ax, ay, bx, by = ox + t * dx, oy + t * dy, ox + stop * dx, oy + stop * dy
        if max(ax * ax + ay * ay, bx * bx + by * by) < hole * hole:  # straight through the hole
            return FAR
    before, step = FAR, 0.0
    for _ in range(256):
        t += step
        if t > stop:
            return FAR
        now = distance(solids, i, ox + t * dx, oy + t * dy, oz + t * dz)
        if now < _TOLERANCE:
            return t
        if convex and before < FAR:
            if now >= before:  # convex and no longer falling: it never comes back to zero
                return FAR
            step = max(now, step * now / (before - now))
        else:
            step = now
        before = now
    return t if before < 1e-4 else FAR


@jit
def first_hit(solids, active, ray):
    """(distance along the ray, solid) of the nearest hit among the active solids (a list ended by -1), or (FAR, -1)."""
    ox, oy, oz, dx, dy, dz = ray
    best, which = FAR, -1
    for i in active:
        if i < 0:
            break
        cx, cy, cz = ox - solids[i, 1], oy - solids[i, 2], oz - solids[i, 3]
        middle = -(cx * dx + cy * dy + cz * dz)
        under = solids[i, 17] * solids[i, 17] - (cx * cx + cy * cy + cz * cz - middle * middle)
        if under <= 0.0:
            continue
        half = math.sqrt(under)
        start, stop = max(middle - half, 0.0), min(middle + half, best)
        if start >= stop:
            continue
        t = start
        if int(solids[i, 0]) != SPHERE:
            lx, ly, lz = to_local(solids, i, cx, cy, cz)
            ux, uy, uz = to_local(solids, i, dx, dy, dz)
            t = _hit(solids, i, (lx, ly, lz, ux, uy, uz), start, stop)
        if t < best:
            best, which = t, i
    return best, which


@jit
def _narrowest(solids, i, ray, start, stop):
    """Smallest distance / t over the interval: how far, as a tangent, the ray passes the solid (negative: inside).
    distance - c t is convex for a convex solid, so distance / t has one valley and golden-section search finds it."""
    ox, oy, oz, dx, dy, dz = ray
    coarse = 12 if int(solids[i, 0]) == TORUS else 0  # two valleys, one on each side of the hole: find the deeper
    t1 = t2 = v1 = v2 = 0.0
    width = (stop - start) / 12.0
    best, at, first = FAR, start, start
    for k in range(coarse + 12):
        if k < coarse:
            t = first + (k + 0.5) * width
        else:
            if k == coarse:
                if coarse:
                    start, stop = max(start, at - width), min(stop, at + width)
                t1 = t = stop - _GOLDEN * (stop - start)
            elif k == coarse + 1:
                t2 = t = start + _GOLDEN * (stop - start)
            elif v1 < v2:
                stop, t2, v2 = t2, t1, v1
                t1 = t = stop - _GOLDEN * (stop - start)
            else:
                start, t1, v1 = t1, t2, v2
                t2 = t = start + _GOLDEN * (stop - start)
        value = distance(solids, i, ox + t * dx, oy + t * dy, oz + t * dz) / t
        if k >= coarse and t == t1:
            v1 = value
        elif k >= coarse:
            v2 = value
        if value < best:
            best, at = value, t
    return best


@jit
def light_visibility(solids, skip, ray, spread):
    """How much of a round light of angular radius atan(spread) a point sees along `ray`, in [0, 1]. Each solid covers
    the part of the disc that a straight edge at its angular distance cuts off; parts add up. The point's own solid is
    skipped: its shading already turns away from the light."""
    ox, oy, oz, dx, dy, dz = ray
    visible = 1.0
    for i in range(solids.shape[0]):
        cx, cy, cz = ox - solids[i, 1], oy - solids[i, 2], oz - solids[i, 3]
        middle = -(cx * dx + cy * dy + cz * dz)
        radius = solids[i, 17]
        beyond = middle + radius
        grown = radius + spread * beyond  # no further from the axis than this can it cover any of the light
        under = grown * grown - (cx * cx + cy * cy + cz * cz - middle * middle)
        if i == skip or beyond <= 0.0 or under <= 0.0:
            continue
        half = min(math.sqrt(under), radius)
        start = max(middle - half, 1e-4)
        lx, ly, lz = to_local(solids, i, cx, cy, cz)
        ux, uy, uz = to_local(solids, i, dx, dy, dz)
        if int(solids[i, 0]) != TORUS:  # convex: distance / t never falls below its slope here, if outside
            here = distance(solids, i, lx, ly, lz)
            later = distance(solids, i, lx + 1e-3 * ux, ly + 1e-3 * uy, lz + 1e-3 * uz)
            if here > -1e-6 and later - here > 1e-3 * spread:
                continue
        s = _narrowest(solids, i, (lx, ly, lz, ux, uy, uz), start, max(middle + half, 2e-4)) / spread
        if s <= -1.0:
            return 0.0
        if s < 1.0:
            visible -= 0.5 - (s * math.sqrt(1.0 - s * s) + math.asin(s)) / math.pi
            if visible <= 0.0:
                return 0.0
    return visible


@jit
def openness(solids, skip, point, direction, free):
    """How open the surroundings are, 0 (in a crevice) to 1: the free height above a surface, at growing steps. `free`
    is scratch space for _TAPS numbers. The point's own solid is skipped: it never rises above its own normal."""
    height, reach = 0.02, 0.02 * 2.4 ** (_TAPS - 1)
    for k in range(_TAPS):
        free[k] = 1.0
    for i in range(solids.shape[0]):
        cx, cy, cz = point[0] - solids[i, 1], point[1] - solids[i, 2], point[2] - solids[i, 3]
        near = 2.0 * reach + solids[i, 17]
        if i == skip or cx * cx + cy * cy + cz * cz > near * near:
            continue
        lx, ly, lz = to_local(solids, i, cx, cy, cz)
        ux, uy, uz = to_local(solids, i, direction[0], direction[1], direction[2])
        height = 0.02
        for k in range(_TAPS):
            away = distance(solids, i, lx + height * ux, ly + height * uy, lz + height * uz)
            free[k] = min(free[k], away / height)
            height *= 2.4
    closed, weight, total = 0.0, 1.0, 0.0
    for k in range(_TAPS):
        closed += weight * (1.0 - min(free[k], 1.0))
        total += weight
        weight *= 0.7
    return max(0.0, 1.0 - closed / total)


_LETTERS = {  # of polylines in [-1, 1]^2: x and y of one point after the other
    "N": [(-0.55, -0.75, -0.55, 0.75, 0.55, -0.75, 0.55, 0.75)],
    "E": [(-0.5, -0.75, -0.5, 0.75, 0.5, 0.75), (-0.5, 0.0, 0.35, 0.0), (-0.5, -0.75, 0.5, -0.75)],
    "R": [(-0.5, -0.75, -0.5, 0.75, 0.2, 0.75, 0.5, 0.38, 0.2, 0.0, -0.5, 0.0), (0.0, 0.0, 0.5, -0.75)],
    "F": [(-0.45, -0.75, -0.45, 0.75, 0.55, 0.75), (-0.45, 0.05, 0.35, 0.05)],
    "T": [(0.0, -0.75, 0.0, 0.75), (-0.6, 0.75, 0.6, 0.75)],
    "U": [(-0.55, 0.75, -0.55, -0.35, -0.25, -0.75, 0.25, -0.75, 0.55, -0.35, 0.55, 0.75)],
    "B": [(-0.5, -0.75, -0.5, 0.75, 0.2, 0.75, 0.45, 0.4, 0.2, 0.05, -0.5, 0.05)]
    + [(0.2, 0.05, 0.55, -0.35, 0.25, -0.75, -0.5, -0.75)],
    "O": [(-0.55, -0.3, -0.55, 0.3, -0.2, 0.75, 0.2, 0.75, 0.55, 0.3, 0.55, -0.3)]
    + [(0.55, -0.3, 0.2, -0.75, -0.2, -0.75, -0.55, -0.3)],
}
_STROKES = [[line[k : k + 4] for line in lines for k in range(0, len(line) - 2, 2)] for lines in _LETTERS.values()]
N_LETTERS = len(_STROKES)
_SEGMENTS = np.concatenate(_STROKES)
_FIRST = np.cumsum([0, *map(len, _STROKES)])
_STROKE_HALF_WIDTH = 0.17


@jit
def _hash(x, y, z):
    h = (x * 374761393 + y * 668265263 + z * 1440662683) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 1274126177) & 0xFFFFFFFF
    return ((h ^ (h >> 16)) & 0xFFFF) / 65535.0


@jit
def _noise(x, y, z):
    """Smooth value noise in [0, 1] with features one unit wide."""
    ix, iy, iz = math.floor(x), math.floor(y), math.floor(z)
    fx, fy, fz = x - ix, y - iy, z - iz
    fx, fy, fz = fx * fx * (3.0 - 2.0 * fx), fy * fy * (3.0 - 2.0 * fy), fz * fz * (3.0 - 2.0 * fz)
    total = 0.0
    for corner in range(8):
        cx, cy, cz = corner & 1, (corner >> 1) & 1, corner >> 2
        weight = (fx if cx else 1.0 - fx) * (fy if cy else 1.0 - fy) * (fz if cz else 1.0 - fz)
        total += weight * _hash(int(ix) + cx, int(iy) + cy, int(iz) + cz)
    return total


@jit
def _fractal(x, y, z):
    total, weight = 0.0, 0.5
    for _ in range(4):
        total += weight * _noise(x, y, z)
        x, y, z, weight = 2.03 * x + 11.3, 2.03 * y + 5.7, 2.03 * z + 3.1, 0.5 * weight
    return total


@jit
def _on_letter(letter, u, v):
    for k in range(_FIRST[letter], _FIRST[letter + 1]):
        ax, ay = _SEGMENTS[k, 0], _SEGMENTS[k, 1]
        bx, by = _SEGMENTS[k, 2] - ax, _SEGMENTS[k, 3] - ay
        along = min(max(((u - ax) * bx + (v - ay) * by) / (bx * bx + by * by), 0.0), 1.0)
        dx, dy = u - ax - along * bx, v - ay - along * by
        if dx * dx + dy * dy < _STROKE_HALF_WIDTH * _STROKE_HALF_WIDTH:
            return True
    return False


@jit
def _glyph_choice(first, x, y, z):
    """Which colour a box's face shows at a point given in units of the half extents: 0 face, 1 letter, 2 frame."""
    ax, ay, az = abs(x), abs(y), abs(z)
    if az >= ax and az >= ay:
        face, u, v = (0 if z > 0.0 else 1), x, (y if z > 0.0 else -y)
    elif ax >= ay:
        face, u, v = (2 if x > 0.0 else 3), (y if x > 0.0 else -y), z
    else:
        face, u, v = (4 if y > 0.0 else 5), (-x if y > 0.0 else x), z
    if max(abs(u), abs(v)) > 0.8:
        return 2
    return 1 if _on_letter((first + face) % N_LETTERS, u * 1.45, v * 1.45) else 0


@jit
def _globe_choice(grid, x, y, z):
    """0 sea, 1 land, 2 grid line."""
    latitude = math.degrees(math.asin(min(max(z, -1.0), 1.0))) / grid
    longitude = math.degrees(math.atan2(y, x)) / grid
    thin = 0.05
    if abs(latitude - round(latitude)) < thin:
        return 2
    if abs(longitude - round(longitude)) * math.sqrt(max(1.0 - z * z, 0.0)) < thin:
        return 2
    return 1 if _fractal(2.3 * x + 4.2, 2.3 * y + 1.7, 2.3 * z + 7.9) > 0.505 else 0


@jit
def blend(material, solids, i, x, y, z):
    """(weight of b, weight of c) at a point in local coordinates; a has the rest."""
    pattern = int(material[0])
    p0, p1 = material[10], material[11]
    if pattern == SOLID:
        return 0.0, 0.0
    if pattern == CHECKER:
        choice = (int(math.floor(x / p0)) + int(math.floor(y / p0))) & 1 if z > p1 else 2
    elif pattern == STRIPES:
        choice = int(math.floor(z / p0 + p1 * math.atan2(y, x) / (2.0 * math.pi))) & 1
    elif pattern == GLYPHS:
        choice = _glyph_choice(int(p0), x / solids[i, 13], y / solids[i, 14], z / solids[i, 15])
    elif pattern == WOOD:
        wobble = _fractal(3.0 * x, 3.0 * y, 0.8 * z)
        ring = math.sqrt(x * x + y * y) / p0 + 3.0 * wobble
        grain = 0.5 + 0.5 * math.sin(2.0 * math.pi * ring)
        return 0.75 * grain * grain + 0.25 * wobble, 0.0
    else:
        radius = max(math.sqrt(x * x + y * y + z * z), 1e-9)
        x, y, z = x / radius, y / radius, z / radius
        turn = math.atan2(y, x) / (2.0 * math.pi) + 0.5
        if pattern == GORES:
            choice = 0 if abs(z) > p1 else int(turn * p0) % 3
        else:
            choice = _globe_choice(p0, x, y, z)
    return (1.0 if choice == 1 else 0.0), (1.0 if choice == 2 else 0.0)


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
    """Linear light to display values: a soft shoulder, so that highlights roll off instead of clipping, then gamma 2,
    which is close to sRGB's curve and several times cheaper."""
    value = max(value, 0.0)
    return min(math.sqrt(value * (1.0 + 0.12 * value) / (1.0 + 0.42 * value)), 1.0)


@jit
def _smoothstep(low, high, value):
    t = min(max((value - low) / (high - low), 0.0), 1.0)
    return t * t * (3.0 - 2.0 * t)


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
        stamps[i], kept[i, 0], kept[i, 1] = stamp, 0.0, openness(solids, i, point, facing, free)
        if facing[0] * light[0] + facing[1] * light[1] + facing[2] * light[2] > 0.0:
            kept[i, 0] = light_visibility(solids, i, (*point, light[0], light[1], light[2]), light[3])
    r, g, b = _shade(solids, materials[int(solids[i, 18])], light, i, eye, local, facing, (kept[i, 0], kept[i, 1]))
    return r, g, b, i


@cached_jit
def _render(world, scratch, active, changes, values, owners, out):
    """Pixels (n,) of one picture into out (n, 4), by their `changes`: 0 leaves them as they are. 1 takes one sample in
    the middle and keeps it, with its light, in values (n, 5) and owners (n,). 2 takes twelve, which share the light of
    the middle on the same solid; the first four are in the corners, and if these agree with the middle, the others need
    not be asked. 3 takes twelve with fresh light for each four."""
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


def render_views(tables: Sequence[Tables], poses: np.ndarray, focal: float, size: int) -> np.ndarray:
    """Square pictures (n, size, size, 4) uint8 from poses (n, 3, 4), of one packed scene or of one for each."""
    out = np.zeros((poses.shape[0], size, size, 4), np.uint8)
    few_pixels = size < 150  # something thin could hide between their centres

    def render(index: int) -> None:
        own = tables[index % len(tables)]
        render_view(own, poses[index], focal, out[index], samples_everywhere=few_pixels)

    # The kernels release the GIL; threads of our own need no parallel region, which would cost seconds to compile.
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as threads:
        list(threads.map(render, range(poses.shape[0])))
    return out
