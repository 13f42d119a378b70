"""Surface colours of the built-in scenes: patterns in a solid's own coordinates. Numba; imported only to render.

A material is one row of a float64 table (see `builtin_tables.pack`), colours in linear light:
    0 pattern, 1:4 colour a, 4:7 colour b, 7:10 colour c, 10:14 parameters, 14 highlight, 15 shininess, 16 reflection.
Patterns and parameters:
    SOLID     a
    CHECKER   a and b in squares of side p0 on top (z > p1), c elsewhere
    GORES     a, b and c in p0 meridian fields, a at the poles (beyond p1 of the way up)
    STRIPES   a and b in bands p0 high along z, rising by p1 bands in a turn
    GLYPHS    a letter in b with a frame in c on each face of a box; the first face shows letter p0
    WOOD      a to b along wavy rings p0 apart, stretched along z
    GLOBE     land b in a sea a, with a grid c every p0 degrees
"""

from __future__ import annotations

import math

import numpy as np

from .builtin_geometry import jit
from .builtin_tables import CHECKER, GLYPHS, GORES, SOLID, STRIPES, WOOD

_LETTERS = "NERFTUBO"
_STROKES = {  # polylines in [-1, 1]^2
    "N": [(-0.55, -0.75, -0.55, 0.75), (-0.55, 0.75, 0.55, -0.75), (0.55, -0.75, 0.55, 0.75)],
    "E": [(-0.5, -0.75, -0.5, 0.75), (-0.5, 0.75, 0.5, 0.75), (-0.5, 0.0, 0.35, 0.0), (-0.5, -0.75, 0.5, -0.75)],
    "R": [(-0.5, -0.75, -0.5, 0.75), (-0.5, 0.75, 0.2, 0.75), (0.2, 0.75, 0.5, 0.38), (0.5, 0.38, 0.2, 0.0)]
    + [(0.2, 0.0, -0.5, 0.0), (0.0, 0.0, 0.5, -0.75)],
    "F": [(-0.45, -0.75, -0.45, 0.75), (-0.45, 0.75, 0.55, 0.75), (-0.45, 0.05, 0.35, 0.05)],
    "T": [(0.0, -0.75, 0.0, 0.75), (-0.6, 0.75, 0.6, 0.75)],
    "U": [(-0.55, 0.75, -0.55, -0.35), (-0.55, -0.35, -0.25, -0.75), (-0.25, -0.75, 0.25, -0.75)]
    + [(0.25, -0.75, 0.55, -0.35), (0.55, -0.35, 0.55, 0.75)],
    "B": [(-0.5, -0.75, -0.5, 0.75), (-0.5, 0.75, 0.2, 0.75), (0.2, 0.75, 0.45, 0.4), (0.45, 0.4, 0.2, 0.05)]
    + [(0.2, 0.05, -0.5, 0.05), (0.2, 0.05, 0.55, -0.35), (0.55, -0.35, 0.25, -0.75), (0.25, -0.75, -0.5, -0.75)],
    "O": [(-0.55, -0.3, -0.55, 0.3), (-0.55, 0.3, -0.2, 0.75), (-0.2, 0.75, 0.2, 0.75), (0.2, 0.75, 0.55, 0.3)]
    + [(0.55, 0.3, 0.55, -0.3), (0.55, -0.3, 0.2, -0.75), (0.2, -0.75, -0.2, -0.75), (-0.2, -0.75, -0.55, -0.3)],
}
N_LETTERS = len(_LETTERS)
_SEGMENTS = np.array([stroke for letter in _LETTERS for stroke in _STROKES[letter]])
_FIRST = np.cumsum([0] + [len(_STROKES[letter]) for letter in _LETTERS])
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
