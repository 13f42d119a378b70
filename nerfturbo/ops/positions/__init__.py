"""Where samples lie: rays and boxes, positions along rays and in pixels' cones, and unbounded space contracted into a
ball of radius 2. Inside the unit ball nothing moves; outside, x goes to (2 - 1 / |x|) x / |x|. Distances far away
shrink as 1 / |x|^2, as the pixels that see them do."""

import functools
import math
from typing import Literal

import torch
from torch import Tensor

from ...errors import InputError
from ...types import Aabb, PackedSamples
from .._checks import check_device, check_shape, check_tensor, refuse
from .._dispatch import implementation

Norm = Literal["euclidean", "max"]
Contraction = Literal["none", "sphere", "cube"]
_NORMS: dict[str, Norm] = {"sphere": "euclidean", "cube": "max"}


def contract(positions: Tensor, *, norm: Norm = "euclidean") -> Tensor:
    """(..., 3) positions into the ball of radius 2, or, with the "max" norm, into the cube [-2, 2]^3. Differentiable
    and, across |x| = 1, continuous with its first derivative along x. Put the scene's centre of interest into the unit
    ball first; divide the result by 4 and add 0.5 for encodings of [0, 1]^3.

    >>> contract(torch.tensor([[0.5, 0.0, 0.0], [0.0, 4.0, 0.0]])).tolist()
    [[0.5, 0.0, 0.0], [0.0, 1.75, 0.0]]
    """
    size = _size(positions, norm)
    return torch.where(size > 1.0, (2.0 - 1.0 / size) / size * positions, positions)


def uncontract(contracted: Tensor, *, norm: Norm = "euclidean") -> Tensor:
    """The inverse of `contract`, for |x| < 2. Differentiable.

    >>> uncontract(torch.tensor([[0.5, 0.0, 0.0], [0.0, 1.75, 0.0]])).tolist()
    [[0.5, 0.0, 0.0], [0.0, 4.0, 0.0]]
    """
    size = _size(contracted, norm)
    return torch.where(size > 1.0, contracted / (size * (2.0 - size)), contracted)


def fold(unit: Tensor, contraction: Contraction) -> Tensor:
    """Positions (..., 3) in units of a box, [0, 1]^3 inside it and any value outside, into [0, 1]^3: the box itself
    comes to lie in its middle, at half its size ("none": nothing moves).

    >>> fold(torch.tensor([[0.5, 0.5, 1.0], [0.5, 0.5, 2.5]]), "cube").tolist()  # a face of the box, four boxes away
    [[0.5, 0.5, 0.75], [0.5, 0.5, 0.9375]]
    """
    return unit if contraction == "none" else contract(unit * 2.0 - 1.0, norm=_norm(contraction)) * 0.25 + 0.5


def fold_scale(folded: Tensor, contraction: Contraction) -> Tensor:
    """(...,) how much longer `fold` made lengths around the positions (..., 3) that it gave: the cube root of its
    Jacobian's determinant, as in Zip-NeRF.

    >>> fold_scale(torch.tensor([[0.5, 0.5, 0.6], [0.5, 0.5, 0.875]]), "cube")  # inside, and half a box away
    tensor([0.5000, 0.2600])
    """
    if contraction == "none":
        return torch.ones_like(folded[..., 0])
    inverse = (2.0 - _size(folded * 4.0 - 2.0, _norm(contraction))[..., 0]).clamp(0.0, 1.0)  # 1 / |x|, 1 inside
    return 0.5 * (inverse.square() * (2.0 - inverse)) ** (2.0 / 3.0)


def unfold(folded: Tensor, contraction: Contraction) -> Tensor:
    """The inverse of `fold`; what lies at the end of space or beyond it comes out infinitely far, or as NaN."""
    return folded if contraction == "none" else uncontract(folded * 4.0 - 2.0, norm=_norm(contraction)) * 0.5 + 0.5


def unit_positions(positions: Tensor, aabb: Aabb, contraction: Contraction = "none") -> Tensor:
    """World positions (..., 3) in [0, 1]^3: the box, or with a contraction about it all of space. On a GPU it is one
    multiply-add, whose rounding may leave a point of a face just outside."""
    if contraction == "none" and positions.is_cuda and positions.dtype == torch.float32:
        shift, scale = _shift_and_scale(aabb, positions.device)
        return torch.addcmul(shift, positions, scale)
    return fold(aabb.normalize(positions), contraction)


def unit_box(aabb: Aabb | None) -> tuple[float, ...]:
    """Low and 1 / size of the box that becomes [0, 1]^3."""
    return (0.0, 0.0, 0.0, 1.0, 1.0, 1.0) if aabb is None else (*aabb.low, *(1.0 / size for size in aabb.size))


@functools.lru_cache(maxsize=256)
def _shift_and_scale(aabb: Aabb, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        low, high = torch.tensor([aabb.low, aabb.high], dtype=torch.float64)
        return (-low / (high - low)).float().to(device), (1.0 / (high - low)).float().to(device)


def _norm(contraction: str) -> Norm:
    refuse(contraction not in _NORMS, "contraction", '"none", "sphere" or "cube"', repr(contraction))
    return _NORMS[contraction]


def _size(positions: Tensor, norm: str) -> Tensor:
    """(..., 1) at least 1: no gradient may come through a division by zero."""
    refuse(positions.shape[-1:] != (3,), "positions", "shape (..., 3)", tuple(positions.shape))
    if norm == "euclidean":
        square = positions.square().sum(-1, keepdim=True)
        return torch.where(square > 1.0, square, torch.ones_like(square)).sqrt()
    if norm == "max":
        return positions.abs().amax(-1, keepdim=True).clamp(min=1.0)
    raise InputError("norm", '"euclidean" or "max"', repr(norm))


def ray_aabb(
    origins: Tensor, directions: Tensor, aabb: Aabb, *, near: float = 0.0, far: float = float("inf")
) -> tuple[Tensor, Tensor]:
    """t_min, t_max (n_rays,): the part of each ray inside the box and between near and far. A ray that misses gets
    t_min = t_max = near. A ray parallel to a face and outside it misses; one that starts inside begins at near. Not
    differentiable.

    >>> import torch
    >>> origins = torch.tensor([[0.0, 0.0, -3.0], [5.0, 0.0, -3.0]])
    >>> directions = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    >>> [t.tolist() for t in ray_aabb(origins, directions, Aabb.cube(1.0))]
    [[2.0, 0.0], [4.0, 0.0]]
    """
    check_tensor("origins", origins, ("n_rays", 3))
    check_shape("directions", directions, (origins.shape[0], 3))
    check_device(origins=origins, directions=directions)
    return implementation("positions", "ray_aabb", origins)(origins, directions, aabb, near=near, far=far)


def sample_positions(
    origins: Tensor,
    directions: Tensor,
    samples: PackedSamples,
    *,
    aabb: Aabb | None = None,
    contraction: Contraction = "none",
) -> Tensor:
    """(capacity, 3): origin + t_mid * direction of each sample's ray; with `aabb`, mapped so that the box is [0, 1]^3,
    and with a `contraction` about the box so that all of space is (`contraction.fold`).

    Differentiable to origins and directions (n_rays, 3), not to t. The tail gets the origin of ray 0.

    >>> import torch
    >>> samples = PackedSamples.from_counts(torch.tensor([1]), torch.tensor([1.0]), torch.tensor([3.0]))
    >>> sample_positions(torch.zeros(1, 3), torch.tensor([[0.0, 0.0, 1.0]]), samples).tolist()
    [[0.0, 0.0, 2.0]]
    """
    check_tensor("origins", origins, (samples.n_rays, 3))
    check_shape("directions", directions, (samples.n_rays, 3))
    check_device(origins=origins, directions=directions, t_starts=samples.t_starts)
    refuse(aabb is None and contraction != "none", "aabb", "a box to contract space about", "None")
    place = implementation("positions", "sample_positions", origins)
    if contraction != "none" and torch.is_grad_enabled() and (origins.requires_grad or directions.requires_grad):
        return fold(place(origins, directions, samples, aabb=aabb, contraction="none"), contraction)
    return place(origins, directions, samples, aabb=aabb, contraction=contraction)


# Of Zip-NeRF's points in a cone, the i-th on its turn: where between the ends, in units of the formula's root, and
# cosine and sine of its angle. The deviation of what a point stands for, in radii of the cone: one stands for a disc.
_TURNS = ((i, turn * math.pi / 3.0) for i, turn in enumerate((0, 2, 4, 3, 5, 1)))
CONE = tuple((3.0 / math.sqrt(7.0) * (0.4 * i - 1.0), math.cos(angle), math.sin(angle)) for i, angle in _TURNS)
CONE_WIDTH = {1: 0.5, 6: 0.25}


def cone_positions(
    origins: Tensor,
    directions: Tensor,
    radii: Tensor,
    samples: PackedSamples,
    *,
    points: int,
    aabb: Aabb,
    contraction: Contraction = "none",
) -> tuple[Tensor, Tensor]:
    """(capacity, points, 3) positions and (capacity, points) footprints, both in units of the box (`sample_positions`):
    what the part of a pixel's cone between t_start and t_end is asked at. The cone is `radii` (n_rays,) * t wide;
    directions have unit length. One point is the middle of the ray. Six are those of Zip-NeRF: their mean and their
    covariance are nearly those of the cone, turned and mirrored about the ray by bits of its direction and t_start.
    The footprint is the standard deviation of what a point stands for, over the mean side of the box.

    Not differentiable. The tail holds finite values.

    >>> import torch
    >>> samples = PackedSamples.from_counts(torch.tensor([1]), torch.tensor([1.0]), torch.tensor([3.0]))
    >>> ray = (torch.zeros(1, 3), torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([0.1]))
    >>> [value.tolist() for value in cone_positions(*ray, samples, points=1, aabb=Aabb((-4.0,) * 3, (4.0,) * 3))]
    [[[[0.5, 0.5, 0.75]]], [[0.012500000186264515]]]
    """
    check_tensor("origins", origins, (samples.n_rays, 3))
    check_shape("directions", directions, (samples.n_rays, 3))
    check_shape("radii", radii, (samples.n_rays,))
    check_device(origins=origins, directions=directions, radii=radii, t_starts=samples.t_starts)
    refuse(points not in CONE_WIDTH, "points", "1 or 6", points)
    place = implementation("positions", "cone_positions", origins)
    rays = (origins.detach(), directions.detach(), radii.detach())
    return place(*rays, samples, points=points, aabb=aabb, contraction=contraction)
