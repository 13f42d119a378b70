"""A built-in scene that moves: what it shows at a time from 0 to 1, inside [-1.5, 1.5]^3 with +z up."""

from __future__ import annotations

import math
from collections.abc import Callable

from .builtin_tables import (
    CHECKER,
    GLYPHS,
    GORES,
    STRIPES,
    WOOD,
    Light,
    Material,
    Matrix,
    Solid,
    Vector,
    box,
    capsule,
    frustum,
    sphere,
)

CREAM, INK, CORAL, MUSTARD, TEAL, SAGE = "#f0e2ca", "#1d2a44", "#dd4b32", "#e8a628", "#17747c", "#8fae8b"
OAK = Material("#c58a52", "#8a5a30", pattern=WOOD, parameters=(0.07, 0.0), highlight=0.1)


def seesaw(time: float) -> tuple[list[Solid], Light]:
    """A seesaw tips over, a ball rolls past it, and a crane turns its arm: some parts stand, some move."""
    floor = -0.62
    table = Material(INK, highlight=0.25, shininess=40.0, reflection=0.5)
    mat = Material(CREAM, SAGE, CREAM, CHECKER, (0.23, 0.012), highlight=0.05)
    return [
        frustum((0.0, 0.0, floor - 0.13), (1.28, 1.28), 0.11, table, rounding=0.05),
        frustum((0.0, 0.0, floor - 0.02), (1.2, 1.2), 0.02, mat, rounding=0.01),
        *_seesaw((0.0, 0.42, floor), 17.0 * math.cos(math.pi * time)),
        *_rolling((0.0, -0.55, floor), time),
        *_crane((0.78, -0.35, floor), 205.0 - 85.0 * time),
    ], Light()


def _seesaw(base: Vector, degrees: float) -> list[Solid]:
    """A plank on a wedge, with a ball on one end and a block on the other, turned about the wedge."""
    x, y, z = base
    plank = Material(CORAL, CREAM, pattern=STRIPES, parameters=(0.2, 0.0), highlight=0.2)
    block = Material(MUSTARD, INK, CREAM, GLYPHS, (3.0, 0.0), highlight=0.12)
    ball = Material(CREAM, TEAL, MUSTARD, GORES, (8.0, 0.93), highlight=0.3)
    turn = _about_y(degrees)

    def on_plank(along: float, up: float) -> Vector:
        return (x + turn[0][0] * along + turn[0][2] * up, y, z + 0.4 + turn[2][0] * along + turn[2][2] * up)

    return [
        frustum((x, y, z + 0.17), (0.26, 0.06), 0.17, OAK, rounding=0.03),
        box(on_plank(0.0, 0.0), (0.95, 0.2, 0.04), plank, rounding=0.03, rotation=turn),
        sphere(on_plank(-0.72, 0.26), 0.22, ball, rotation=turn),
        box(on_plank(0.72, 0.24), (0.2, 0.2, 0.2), block, rounding=0.03, rotation=turn),
    ]


def _rolling(base: Vector, time: float) -> list[Solid]:
    """A ball that rolls along x without slipping."""
    x, y, z = base
    radius, way = 0.24, -0.75 + 1.0 * time
    look = Material(CORAL, CREAM, INK, GORES, (6.0, 0.9), highlight=0.5, shininess=60.0, reflection=0.5)
    return [sphere((x + way, y, z + radius), radius, look, rotation=_about_y(math.degrees(way / radius)))]


def _crane(base: Vector, degrees: float) -> list[Solid]:
    """A post, and an arm with a weight at its end that turns about it."""
    x, y, z = base
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    top, reach = z + 0.95, 0.5
    steel = Material(TEAL, highlight=0.4, shininess=40.0)
    return [
        frustum((x, y, z + 0.06), (0.17, 0.12), 0.06, OAK, rounding=0.02),
        capsule((x, y, z), (x, y, top), 0.05, steel),
        capsule((x - 0.2 * c, y - 0.2 * s, top), (x + reach * c, y + reach * s, top), 0.04, steel),
        capsule((x + reach * c, y + reach * s, top), (x + reach * c, y + reach * s, top - 0.2), 0.018, steel),
        sphere((x + reach * c, y + reach * s, top - 0.3), 0.12, Material(MUSTARD, highlight=0.6, shininess=70.0)),
    ]


def _about_y(degrees: float) -> Matrix:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return ((c, 0.0, s), (0.0, 1.0, 0.0), (-s, 0.0, c))


MOVING: dict[str, Callable[[float], tuple[list[Solid], Light]]] = {"seesaw": seesaw}
