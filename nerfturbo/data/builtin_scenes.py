"""What the built-in scenes show: solids and materials, all inside [-1.5, 1.5]^3 with +z up."""

from __future__ import annotations

from .builtin_tables import (
    CHECKER,
    GLYPHS,
    GORES,
    STRIPES,
    WOOD,
    Light,
    Material,
    Solid,
    along,
    box,
    capsule,
    frustum,
    sphere,
    torus,
    turn_z,
)

CREAM, INK, CORAL, MUSTARD, TEAL, SAGE = "#f3e6cf", "#1d2a44", "#dd4b32", "#e8a628", "#17747c", "#8fae8b"


def toybox() -> tuple[list[Solid], Light]:
    """The default: toys on a round play table; letters, stripes and squares, one very glossy ball."""
    table = Material(INK, highlight=0.25, shininess=40.0, reflection=0.5)
    mat = Material(CREAM, SAGE, INK, CHECKER, (0.19, 0.0), highlight=0.05)
    floor = -0.62
    solids = [
        frustum((0.0, 0.0, floor - 0.13), (1.24, 1.24), 0.11, table, rounding=0.05),
        frustum((0.0, 0.0, floor - 0.02), (1.14, 1.14), 0.02, mat, rounding=0.01),
    ]
    solids += _ring_stack((-0.40, 0.36, floor))
    solids += _blocks(floor)
    ball = Material(CORAL, highlight=0.9, shininess=90.0, reflection=1.0)
    beach = Material(CREAM, TEAL, MUSTARD, GORES, (12.0, 0.93), highlight=0.35, shininess=50.0, reflection=0.5)
    solids += [
        sphere((0.02, -0.50, floor + 0.33), 0.33, ball),
        sphere((-0.68, -0.36, floor + 0.25), 0.25, beach, rotation=along((0.5, -0.4, 0.75))),
    ]
    cone = Material(CREAM, CORAL, pattern=STRIPES, parameters=(0.13, 1.0), highlight=0.2)
    solids += [
        frustum((0.72, -0.42, floor + 0.30), (0.21, 0.035), 0.30, cone, rounding=0.03),
    ]
    return solids, Light()


def _ring_stack(base: tuple[float, float, float]) -> list[Solid]:
    x, y, z = base
    wood = Material("#c58a52", "#8a5a30", pattern=WOOD, parameters=(0.07, 0.0), highlight=0.1)
    solids = [
        frustum((x, y, z + 0.05), (0.42, 0.42), 0.05, wood, rounding=0.03),
        capsule((x, y, z), (x, y, z + 1.12), 0.06, wood),
    ]
    height = z + 0.10
    for color, ring, tube in ((TEAL, 0.27, 0.125), (MUSTARD, 0.225, 0.115), (CORAL, 0.185, 0.105), (SAGE, 0.15, 0.09)):
        material = Material(color, highlight=0.45, shininess=45.0, reflection=0.6)
        solids.append(torus((x, y, height + tube), ring, tube, material))
        height += 2.0 * tube - 0.02
    solids.append(sphere((x, y, height + 0.12), 0.13, Material(INK, highlight=0.8, shininess=80.0, reflection=0.9)))
    return solids


def _blocks(floor: float) -> list[Solid]:
    def block(
        center: tuple[float, float, float], half: float, turn: float, colors: tuple[str, str, str], letter: int
    ) -> Solid:
        look = Material(*colors, pattern=GLYPHS, parameters=(float(letter), 0.0), highlight=0.12)
        return box(center, (half, half, half), look, rounding=0.035, rotation=turn_z(turn))

    return [
        block((0.48, 0.34, floor + 0.26), 0.26, 18.0, (CREAM, INK, TEAL), 0),
        block((0.46, 0.38, floor + 0.74), 0.22, -14.0, (MUSTARD, CREAM, INK), 3),
    ]


SCENES = {"toybox": toybox}
