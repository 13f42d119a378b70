"""What the built-in scenes show: solids and materials, all inside [-1.5, 1.5]^3 with +z up."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import InputError
from .builtin_moving import MOVING
from .builtin_studies import armillary, chess
from .builtin_tables import (
    CHECKER,
    GLYPHS,
    GORES,
    STRIPES,
    WOOD,
    Light,
    Material,
    Solid,
    Vector,
    along,
    box,
    capsule,
    frustum,
    sphere,
    torus,
    turn_z,
)

CREAM, INK, CORAL, MUSTARD, TEAL, SAGE = "#f0e2ca", "#1d2a44", "#dd4b32", "#e8a628", "#17747c", "#8fae8b"
BRASS = Material("#c99a3f", highlight=0.9, shininess=60.0, reflection=1.0)
OAK = Material("#c58a52", "#8a5a30", pattern=WOOD, parameters=(0.07, 0.0), highlight=0.1)


def toybox() -> tuple[list[Solid], Light]:
    """The default: toys on a round play table; letters, stripes and squares, one very glossy ball."""
    floor = -0.34
    table = Material(INK, highlight=0.25, shininess=40.0, reflection=0.5)
    mat = Material(CREAM, SAGE, CREAM, CHECKER, (0.19, 0.012), highlight=0.05)
    ball = Material(CORAL, highlight=0.9, shininess=90.0, reflection=1.0)
    beach = Material(CREAM, TEAL, MUSTARD, GORES, (12.0, 0.93), highlight=0.35, shininess=50.0, reflection=0.5)
    cone = Material(CREAM, CORAL, pattern=STRIPES, parameters=(0.13, 1.0), highlight=0.2)
    return [
        frustum((0.0, 0.0, floor - 0.13), (1.22, 1.22), 0.11, table, rounding=0.05),
        torus((0.0, 0.0, floor - 0.02), 1.15, 0.022, BRASS),
        frustum((0.0, 0.0, floor - 0.02), (1.14, 1.14), 0.02, mat, rounding=0.01),
        sphere((0.02, -0.50, floor + 0.33), 0.33, ball),
        sphere((-0.70, -0.34, floor + 0.25), 0.25, beach, rotation=along((0.5, -0.4, 0.75))),
        frustum((0.74, -0.40, floor + 0.30), (0.21, 0.035), 0.30, cone, rounding=0.03),
        *_ring_stack((-0.38, 0.38, floor)),
        *_blocks(floor),
        *_crayon((0.22, 0.86, floor), 200.0, TEAL),
        *_crayon((0.02, 0.97, floor), 188.0, CORAL),
        *_crayon((-0.50, -0.86, floor), -20.0, MUSTARD),
    ], Light()


def _ring_stack(base: Vector) -> list[Solid]:
    x, y, z = base
    height = z + 0.10
    solids = [frustum((x, y, z + 0.05), (0.42, 0.42), 0.05, OAK, rounding=0.03)]
    for color, ring, tube in ((TEAL, 0.27, 0.125), (MUSTARD, 0.225, 0.115), (CORAL, 0.185, 0.105), (SAGE, 0.15, 0.09)):
        material = Material(color, highlight=0.45, shininess=45.0, reflection=0.6)
        solids.append(torus((x, y, height + tube), ring, tube, material))
        height += 2.0 * tube - 0.02
    solids.append(capsule((x, y, z), (x, y, height + 0.06), 0.055, OAK))
    solids.append(sphere((x, y, height + 0.13), 0.135, Material(INK, highlight=0.8, shininess=80.0, reflection=0.9)))
    return solids


def _blocks(floor: float) -> list[Solid]:
    def block(center: Vector, half: float, turn: float, colors: tuple[str, str, str], letter: int) -> Solid:
        look = Material(*colors, pattern=GLYPHS, parameters=(float(letter), 0.0), highlight=0.12)
        return box(center, (half, half, half), look, rounding=0.035, rotation=turn_z(turn))

    return [
        block((0.50, 0.30, floor + 0.26), 0.26, 18.0, (CREAM, INK, TEAL), 0),
        block((0.48, 0.34, floor + 0.74), 0.22, -14.0, (MUSTARD, CREAM, INK), 3),
    ]


def _crayon(tip: Vector, turn: float, color: str) -> list[Solid]:
    """A crayon lying on the floor: a paper sleeve with stripes, and the tip of its wax."""
    x, y, z = tip
    (c, _, _), (s, _, _), _ = turn_z(turn)
    axis, radius = (c, s, 0.0), 0.045
    paper = Material(color, CREAM, pattern=STRIPES, parameters=(0.1, 0.0), highlight=0.15)
    wax = Material(color, highlight=0.3)
    return [
        frustum(
            (x - 0.30 * c, y - 0.30 * s, z + radius), (radius, radius), 0.2, paper, rounding=0.008, rotation=along(axis)
        ),
        frustum(
            (x - 0.06 * c, y - 0.06 * s, z + radius), (0.035, 0.014), 0.06, wax, rounding=0.01, rotation=along(axis)
        ),
    ]


SCENES: dict[str, Callable[[], tuple[list[Solid], Light]]] = {"toybox": toybox, "chess": chess, "armillary": armillary}
NAMES = (*SCENES, *MOVING)
PREFIX = "builtin:"


def check_name(name: str) -> str:
    """The name without its prefix, if there is such a scene."""
    name = name.removeprefix(PREFIX)
    if name not in NAMES:
        raise InputError("scene", "one of the built-in scenes: " + ", ".join(NAMES), repr(name))
    return name


def scene_at(name: str, time: float = 0.0) -> tuple[list[Solid], Light]:
    """What a scene shows at a time from 0 to 1; most stand still."""
    return MOVING[name](time) if name in MOVING else SCENES[name]()
