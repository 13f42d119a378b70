"""The parts a built-in scene is made of, and their numeric tables for the renderer. Plain numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

SPHERE, CAPSULE, BOX, FRUSTUM, TORUS = range(5)  # kinds of solids, see builtin_geometry
SOLID, CHECKER, GORES, STRIPES, GLYPHS, WOOD, GLOBE = range(7)  # patterns, see builtin_patterns

Vector = tuple[float, float, float]
Matrix = tuple[Vector, Vector, Vector]
Tables = tuple[np.ndarray, np.ndarray, np.ndarray]
IDENTITY: Matrix = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))


@dataclass(frozen=True)
class Material:
    """Colours are written as in a picture editor ("#e4572e") and used in linear light."""

    a: str
    b: str = "#000000"
    c: str = "#000000"
    pattern: int = SOLID
    parameters: tuple[float, float] = (0.0, 0.0)
    highlight: float = 0.15
    shininess: float = 24.0
    reflection: float = 0.25


@dataclass(frozen=True)
class Solid:
    """One solid; `rotation` has its axes as columns. Built by the functions below."""

    kind: int
    center: Vector
    parameters: tuple[float, float, float, float]
    bound: float  # radius of a sphere about the centre that holds it
    material: Material
    rotation: Matrix = IDENTITY


@dataclass(frozen=True)
class Light:
    """A round key light that casts shadows, a fill panel that does not, and a sky over a floor."""

    key: Vector = (0.42, -0.50, 0.76)
    spread: float = 0.10
    fill: Vector = (-0.80, -0.25, 0.45)
    key_color: Vector = (1.42, 1.33, 1.18)
    fill_color: Vector = (0.22, 0.27, 0.36)
    sky_color: Vector = (0.42, 0.46, 0.54)
    floor_color: Vector = (0.26, 0.22, 0.19)


def turn_z(degrees: float) -> Matrix:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return ((c, -s, 0.0), (s, c, 0.0), (0.0, 0.0, 1.0))


def along(axis: Vector) -> Matrix:
    """A rotation that takes z to the axis."""
    z = np.asarray(axis) / np.linalg.norm(axis)
    x = np.cross((0.0, 1.0, 0.0) if abs(z[1]) < 0.9 else (1.0, 0.0, 0.0), z)
    x /= np.linalg.norm(x)
    rows = np.stack([x, np.cross(z, x), z], axis=1).tolist()
    return (tuple(rows[0]), tuple(rows[1]), tuple(rows[2]))


def sphere(center: Vector, radius: float, material: Material, *, rotation: Matrix = IDENTITY) -> Solid:
    return Solid(SPHERE, center, (radius, 0.0, 0.0, 0.0), radius, material, rotation)


def box(
    center: Vector, half: Vector, material: Material, *, rounding: float = 0.03, rotation: Matrix = IDENTITY
) -> Solid:
    return Solid(BOX, center, (*half, rounding), math.hypot(*half), material, rotation)


def frustum(
    center: Vector,
    radii: tuple[float, float],
    half: float,
    material: Material,
    *,
    rounding: float = 0.02,
    rotation: Matrix = IDENTITY,
) -> Solid:
    """A cone cut off on top: radius at the bottom, radius at the top, half its height."""
    return Solid(FRUSTUM, center, (*radii, half, rounding), math.hypot(max(radii), half), material, rotation)


def torus(center: Vector, ring: float, tube: float, material: Material, *, axis: Vector = (0.0, 0.0, 1.0)) -> Solid:
    return Solid(TORUS, center, (ring, tube, 0.0, 0.0), ring + tube, material, along(axis))


def capsule(start: Vector, end: Vector, radius: float, material: Material) -> Solid:
    """A rod with round ends between two points."""
    a, b = np.asarray(start), np.asarray(end)
    half = float(np.linalg.norm(b - a)) * 0.5
    x, y, z = ((a + b) * 0.5).tolist()
    direction = (b - a).tolist()
    rotation = along((direction[0], direction[1], direction[2]))
    return Solid(CAPSULE, (x, y, z), (radius, half, 0.0, 0.0), half + radius, material, rotation)


def moved(solid: Solid, scale: float, origin: Vector) -> Solid:
    """A solid of one colour, scaled about the origin and then moved there."""
    x, y, z = (o + scale * c for o, c in zip(origin, solid.center, strict=True))
    a, b, c, rounding = (scale * value for value in solid.parameters)
    return replace(solid, center=(x, y, z), parameters=(a, b, c, rounding), bound=scale * solid.bound)


def linear(color: str) -> list[float]:
    """ "#rrggbb" in linear light, by the renderer's gamma of 2."""
    return [(int(color[k : k + 2], 16) / 255.0) ** 2 for k in (1, 3, 5)]


def pack(solids: Sequence[Solid], light: Light) -> Tables:
    """(solids (n, 19), materials (m, 17), light (19,)), float64; the columns are listed in the kernels' files."""
    materials = list(dict.fromkeys(solid.material for solid in solids))
    rows = [
        [s.kind, *s.center, *np.asarray(s.rotation).reshape(-1), *s.parameters, s.bound, materials.index(s.material)]
        for s in solids
    ]
    looks = [
        [m.pattern, *linear(m.a), *linear(m.b), *linear(m.c), *m.parameters, 0.0, 0.0]
        + [m.highlight, m.shininess, m.reflection]
        for m in materials
    ]
    key, fill = (np.asarray(v) / np.linalg.norm(v) for v in (light.key, light.fill))
    colors = (*light.key_color, *light.fill_color, *light.sky_color, *light.floor_color)
    return np.array(rows, float), np.array(looks, float), np.array([*key, light.spread, *fill, *colors], float)
