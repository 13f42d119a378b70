"""What the built-in scenes show: solids and materials, all inside [-1.5, 1.5]^3 with +z up. Plain numpy."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import did_you_mean, refuse
from ..scene import BUILTIN_PREFIX

SPHERE, CAPSULE, BOX, FRUSTUM, TORUS = range(5)  # kinds of solids, see render.py
SOLID, CHECKER, GORES, STRIPES, GLYPHS, WOOD, GLOBE = range(7)  # patterns, see render.py

Pair = tuple[float, float]
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
    parameters: Pair = (0.0, 0.0)
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


# A round key light that casts shadows, a fill panel that does not, and a sky over a floor: where the first two stand,
# and red, green and blue of all four.
KEY_LIGHT, KEY_SPREAD, FILL_LIGHT = (0.42, -0.50, 0.76), 0.10, (-0.80, -0.25, 0.45)
LIGHT_COLORS = (1.42, 1.33, 1.18, 0.22, 0.27, 0.36, 0.42, 0.46, 0.54, 0.26, 0.22, 0.19)


def turn_z(degrees: float) -> Matrix:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return ((c, -s, 0.0), (s, c, 0.0), (0.0, 0.0, 1.0))


def turn_y(degrees: float) -> Matrix:
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return ((c, 0.0, s), (0.0, 1.0, 0.0), (-s, 0.0, c))


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
    center: Vector, radii: Pair, half: float, material: Material, *, rounding: float = 0.02, rotation: Matrix = IDENTITY
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
    return Solid(CAPSULE, (x, y, z), (radius, half, 0.0, 0.0), half + radius, material, along(tuple((b - a).tolist())))


def linear(color: str) -> list[float]:
    """ "#rrggbb" in linear light, by the renderer's gamma of 2."""
    return [(int(color[k : k + 2], 16) / 255.0) ** 2 for k in (1, 3, 5)]


def pack(solids: Sequence[Solid]) -> Tables:
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
    key, fill = (np.asarray(v) / np.linalg.norm(v) for v in (KEY_LIGHT, FILL_LIGHT))
    return np.array(rows, float), np.array(looks, float), np.array([*key, KEY_SPREAD, *fill, *LIGHT_COLORS], float)


CREAM, INK, CORAL, MUSTARD, TEAL, SAGE = "#f0e2ca", "#1d2a44", "#dd4b32", "#e8a628", "#17747c", "#8fae8b"
BRASS = Material("#c99a3f", highlight=0.9, shininess=60.0, reflection=1.0)
OAK = Material("#c58a52", "#8a5a30", pattern=WOOD, parameters=(0.07, 0.0), highlight=0.1)


def seesaw(time: float) -> list[Solid]:
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
    ]


def _seesaw(base: Vector, degrees: float) -> list[Solid]:
    """A plank on a wedge, with a ball on one end and a block on the other, turned about the wedge."""
    x, y, z = base
    plank = Material(CORAL, CREAM, pattern=STRIPES, parameters=(0.2, 0.0), highlight=0.2)
    block = Material(MUSTARD, INK, CREAM, GLYPHS, (3.0, 0.0), highlight=0.12)
    ball = Material(CREAM, TEAL, MUSTARD, GORES, (8.0, 0.93), highlight=0.3)
    turn = turn_y(degrees)

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
    return [sphere((x + way, y, z + radius), radius, look, rotation=turn_y(math.degrees(way / radius)))]


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


def armillary() -> list[Solid]:
    """The hard one: a finely drawn globe inside thin brass rings, over a floor of small tiles."""
    center: Vector = (0.0, 0.0, 0.33)
    colors = ("#2f5d7c", "#c9b27c", "#efe6d0")
    globe = Material(*colors, GLOBE, (15.0, 0.0), highlight=0.35, shininess=50.0, reflection=0.5)
    tiles = Material("#e8dcc4", "#33415c", "#6d4326", CHECKER, (0.075, 0.015), highlight=0.08)
    plinth = Material("#7a4a2b", "#4f2d19", pattern=WOOD, parameters=(0.09, 0.0), highlight=0.15)
    tilt = math.radians(23.4)
    pole: Vector = (math.sin(tilt), 0.0, math.cos(tilt))
    solids = [
        frustum((0.0, 0.0, -0.79), (1.02, 0.95), 0.07, plinth, rounding=0.03),
        frustum((0.0, 0.0, -0.71), (0.89, 0.89), 0.02, tiles, rounding=0.006),
        frustum((0.0, 0.0, -0.65), (0.22, 0.10), 0.05, BRASS, rounding=0.02),
        capsule((0.0, 0.0, -0.66), (0.0, 0.0, -0.50), 0.035, BRASS),
        sphere(center, 0.52, globe, rotation=turn_y(23.4)),
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
    return solids


def toybox() -> list[Solid]:
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
        _block((0.50, 0.30, floor + 0.26), 0.26, 18.0, (CREAM, INK, TEAL), 0.0),
        _block((0.48, 0.34, floor + 0.74), 0.22, -14.0, (MUSTARD, CREAM, INK), 3.0),
        *_crayon((0.22, 0.86, floor), 200.0, TEAL),
        *_crayon((0.02, 0.97, floor), 188.0, CORAL),
        *_crayon((-0.50, -0.86, floor), -20.0, MUSTARD),
    ]


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


def _block(center: Vector, half: float, turn: float, colors: tuple[str, str, str], letter: float) -> Solid:
    look = Material(*colors, pattern=GLYPHS, parameters=(letter, 0.0), highlight=0.12)
    return box(center, (half, half, half), look, rounding=0.035, rotation=turn_z(turn))


def _crayon(tip: Vector, turn: float, color: str) -> list[Solid]:
    """A crayon lying on the floor: a paper sleeve with stripes, and the tip of its wax."""
    x, y, z = tip
    (c, _, _), (s, _, _), _ = turn_z(turn)
    lying, radius = along((c, s, 0.0)), 0.045
    paper = Material(color, CREAM, pattern=STRIPES, parameters=(0.1, 0.0), highlight=0.15)
    wax = Material(color, highlight=0.3)
    return [
        frustum((x - 0.30 * c, y - 0.30 * s, z + radius), (radius, radius), 0.2, paper, rounding=0.008, rotation=lying),
        frustum((x - 0.06 * c, y - 0.06 * s, z + radius), (0.035, 0.014), 0.06, wax, rounding=0.01, rotation=lying),
    ]


STILL: dict[str, Callable[[], list[Solid]]] = {"toybox": toybox, "armillary": armillary}
MOVING: dict[str, Callable[[float], list[Solid]]] = {"seesaw": seesaw}
NAMES = (*STILL, *MOVING)


def check_name(name: str) -> str:
    """The name without its prefix, if there is such a scene."""
    name = name.removeprefix(BUILTIN_PREFIX)
    expected = "one of the built-in scenes: " + ", ".join(NAMES)
    refuse(name not in NAMES, "scene", expected, repr(name), did_you_mean(name, NAMES))
    return name


def scene_at(name: str, time: float = 0.0) -> list[Solid]:
    """What a scene shows at a time from 0 to 1; most stand still."""
    return MOVING[name](time) if name in MOVING else STILL[name]()
