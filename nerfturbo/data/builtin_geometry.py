"""Solids of the built-in scenes: exact signed distances, ray hits, soft shadows. Numba; imported only to render.

A solid is one row of a float64 table (see `builtin_tables.pack`):
    0 kind, 1:4 centre, 4:13 rotation (local to world, row-major), 13:17 parameters, 17 bounding radius, 18 material.
Kinds and parameters, in local coordinates; each is a core grown by a radius, so that its surface has a normal
everywhere:
    SPHERE   radius                                                    a point
    CAPSULE  radius, half length along z                               a segment
    BOX      half extents x, y, z, edge rounding                       a smaller box
    FRUSTUM  radii at the bottom and on top, half height, rounding     a smaller frustum (equal radii: a cylinder)
    TORUS    ring radius, tube radius, about z                         a circle
All but the torus are convex, so that along a ray their signed distance is a convex function of t: the chord through
two points before the hit never steps past it, and the search for a hit converges like the secant method, safely.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from numba import njit

from .builtin_tables import BOX, CAPSULE, SPHERE, TORUS

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

    distance - c t is convex for a convex solid, so distance / t has one valley and golden-section search finds it.
    """
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
    """How much of a round light of angular radius atan(spread) a point sees along `ray`, in [0, 1].

    Each solid covers the part of the disc that a straight edge at its angular distance cuts off; parts add up.
    The point's own solid is skipped: its shading already turns away from the light.
    """
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
    """How open the surroundings are, 0 (in a crevice) to 1: the free height above a surface, at growing steps.

    `free` is scratch space for _TAPS numbers. The point's own solid is skipped: it never rises above its own normal.
    """
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
