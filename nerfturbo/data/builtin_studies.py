"""Two more built-in scenes: chess (many rounded pieces) and armillary (hard: thin rings, fine texture)."""

from __future__ import annotations

import math
from collections.abc import Callable

from .builtin_tables import (
    CHECKER,
    GLOBE,
    WOOD,
    Light,
    Material,
    Solid,
    Vector,
    box,
    capsule,
    frustum,
    moved,
    sphere,
    torus,
)

Square = tuple[int, int]

BRASS = Material("#c99a3f", highlight=0.9, shininess=60.0, reflection=1.0)


def chess() -> tuple[list[Solid], Light]:
    """The end of a game on a six by six board: turned pieces in ivory and ebony."""
    top, square = -0.28, 0.31
    walnut = Material("#7a4a2b", "#4f2d19", pattern=WOOD, parameters=(0.11, 0.0), highlight=0.15)
    field = Material("#e9d8b4", "#7d4b32", "#5b3420", CHECKER, (square, 0.022), highlight=0.12, shininess=40.0)
    ivory = Material("#efe3c8", highlight=0.5, shininess=60.0, reflection=0.6)
    ebony = Material("#2b2a31", highlight=0.7, shininess=70.0, reflection=0.9)

    def at(place: Square) -> Vector:
        return ((place[0] - 2.5) * square, (place[1] - 2.5) * square, top)

    return [
        box((0.0, 0.0, top - 0.12), (1.03, 1.03, 0.08), walnut, rounding=0.04),
        box((0.0, 0.0, top - 0.03), (3 * square, 3 * square, 0.03), field, rounding=0.01),
        *_set(at, ivory, king=(1, 0), rook=(4, 0), bishop=(4, 3), pawns=((1, 2), (3, 1))),
        *_set(at, ebony, king=(4, 5), rook=(0, 5), bishop=(2, 3), pawns=((5, 4), (3, 4), (0, 3))),
    ], Light(key=(-0.55, -0.40, 0.73), fill=(0.75, -0.35, 0.42))


def _set(
    at: Callable[[Square], Vector],
    look: Material,
    *,
    king: Square,
    rook: Square,
    bishop: Square,
    pawns: tuple[Square, ...],
) -> list[Solid]:
    """One side's pieces, scaled about their squares so that they fit them."""
    pieces = [(_king, king), (_rook, rook), (_bishop, bishop), *((_pawn, pawn) for pawn in pawns)]
    return [moved(solid, 0.83, at(square)) for piece, square in pieces for solid in piece(look)]


def _foot(look: Material, height: float, waist: float) -> list[Solid]:
    """What all pieces stand on: a foot, a ring and a body that narrows to the waist."""
    return [
        frustum((0.0, 0.0, 0.04), (0.155, 0.145), 0.04, look, rounding=0.02),
        torus((0.0, 0.0, 0.095), 0.105, 0.028, look),
        frustum((0.0, 0.0, 0.5 * (0.08 + height)), (0.105, waist), 0.5 * (height - 0.08), look, rounding=0.015),
        torus((0.0, 0.0, height), waist, 0.03, look),
    ]


def _pawn(look: Material) -> list[Solid]:
    return [*_foot(look, 0.30, 0.06), sphere((0.0, 0.0, 0.39), 0.095, look)]


def _bishop(look: Material) -> list[Solid]:
    return [
        *_foot(look, 0.42, 0.065),
        capsule((0.0, 0.0, 0.51), (0.0, 0.0, 0.555), 0.085, look),
        frustum((0.0, 0.0, 0.62), (0.075, 0.03), 0.06, look, rounding=0.02),
        sphere((0.0, 0.0, 0.70), 0.035, look),
    ]


def _rook(look: Material) -> list[Solid]:
    merlons = []
    for k in range(6):
        c, s = math.cos(k * math.pi / 3.0), math.sin(k * math.pi / 3.0)
        rotation = ((c, -s, 0.0), (s, c, 0.0), (0.0, 0.0, 1.0))
        center = (0.095 * c, 0.095 * s, 0.53)
        merlons.append(box(center, (0.022, 0.034, 0.035), look, rounding=0.008, rotation=rotation))
    return [
        *_foot(look, 0.40, 0.085),
        frustum((0.0, 0.0, 0.46), (0.095, 0.12), 0.05, look, rounding=0.012),
        *merlons,
    ]


def _king(look: Material) -> list[Solid]:
    return [
        *_foot(look, 0.58, 0.075),
        frustum((0.0, 0.0, 0.69), (0.07, 0.115), 0.09, look, rounding=0.015),
        sphere((0.0, 0.0, 0.785), 0.075, look),
        capsule((0.0, 0.0, 0.84), (0.0, 0.0, 0.98), 0.022, look),
        capsule((-0.05, 0.0, 0.93), (0.05, 0.0, 0.93), 0.022, look),
    ]


def armillary() -> tuple[list[Solid], Light]:
    """The hard one: a finely drawn globe inside thin brass rings, over a floor of small tiles."""
    center: Vector = (0.0, 0.0, 0.33)
    globe = Material(
        "#2f5d7c", "#c9b27c", "#efe6d0", GLOBE, (15.0, 0.0), highlight=0.35, shininess=50.0, reflection=0.5
    )
    tiles = Material("#e8dcc4", "#33415c", "#6d4326", CHECKER, (0.075, 0.015), highlight=0.08)
    plinth = Material("#7a4a2b", "#4f2d19", pattern=WOOD, parameters=(0.09, 0.0), highlight=0.15)
    tilt = math.radians(23.4)
    pole: Vector = (math.sin(tilt), 0.0, math.cos(tilt))
    solids = [
        frustum((0.0, 0.0, -0.79), (1.02, 0.95), 0.07, plinth, rounding=0.03),
        frustum((0.0, 0.0, -0.71), (0.89, 0.89), 0.02, tiles, rounding=0.006),
        frustum((0.0, 0.0, -0.65), (0.22, 0.10), 0.05, BRASS, rounding=0.02),
        capsule((0.0, 0.0, -0.66), (0.0, 0.0, -0.50), 0.035, BRASS),
        sphere(center, 0.52, globe, rotation=_frame(pole)),
        torus(center, 0.98, 0.024, BRASS),
        torus(center, 0.84, 0.022, BRASS, axis=(0.0, 1.0, 0.0)),
    ]
    for offset in (-0.42, 0.0, 0.42):  # tropics and equator, about the tilted pole
        ring = math.sqrt(0.80**2 - offset**2)
        x, y, z = (c + offset * p for c, p in zip(center, pole, strict=True))
        solids.append(torus((x, y, z), ring, 0.013, BRASS, axis=pole))
    for k in range(6):  # meridians through the pole
        angle = k * math.pi / 6.0
        c, s = math.cos(angle), math.sin(angle)
        solids.append(torus(center, 0.80, 0.011, BRASS, axis=(c * math.cos(tilt), s, -c * math.sin(tilt))))
    ends = [tuple(c + k * p for c, p in zip(center, pole, strict=True)) for k in (-0.92, 0.92)]
    solids.append(capsule((ends[0][0], 0.0, ends[0][2]), (ends[1][0], 0.0, ends[1][2]), 0.013, BRASS))
    for k in range(4):  # posts that carry the horizon
        angle = (k + 0.5) * math.pi / 2.0
        c, s = math.cos(angle), math.sin(angle)
        solids.append(capsule((0.74 * c, 0.74 * s, -0.69), (0.98 * c, 0.98 * s, center[2]), 0.014, BRASS))
        solids.append(sphere((0.98 * c, 0.98 * s, center[2] + 0.045), 0.04, BRASS))
    return solids, Light()


def _frame(pole: Vector) -> tuple[Vector, Vector, Vector]:
    """Axes with z along a pole in the x-z plane, as columns."""
    s, _, c = pole
    return ((c, 0.0, s), (0.0, 1.0, 0.0), (-s, 0.0, c))
