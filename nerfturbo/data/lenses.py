"""Lens models on the image plane at depth 1 (x right, y down), both ways; and tables of what pixels look along.

Directions have OpenCV's axes (z forward) and need not have unit length; t is the angle to the optical axis and (a, b)
that angle along the azimuth. With r^2 = x^2 + y^2 of the undistorted point:

opencv          k1 k2 p1 p2 k3 k4 k5 k6
    R = (1 + k1 r^2 + k2 r^4 + k3 r^6) / (1 + k4 r^2 + k5 r^4 + k6 r^6)
    x_d = x R + 2 p1 x y + p2 (r^2 + 2 x^2),    y_d = y R + p1 (r^2 + 2 y^2) + 2 p2 x y
fisheye         k1 k2 k3 k4
    r_d = t (1 + k1 t^2 + k2 t^4 + k3 t^6 + k4 t^8)
fov             w (Devernay and Faugeras)
    r_d = atan(2 r tan(w / 2)) / w
thin_prism      k1 k2 p1 p2 k3 k4 s1 s2
    R = 1 + k1 t^2 + k2 t^4 + k3 t^6 + k4 t^8
    x_d = a R + 2 p1 a b + p2 (t^2 + 2 a^2) + s1 t^2,    y_d = b R + p1 (t^2 + 2 b^2) + 2 p2 a b + s2 t^2
rad_tan_prism   k0 to k5, p0 p1, s0 to s3; with x = a R, y = b R, R = 1 + k0 t^2 + k1 t^4 + ... + k5 t^12
    x_d = x + p0 (r^2 + 2 x^2) + 2 p1 x y + s0 r^2 + s1 r^4,    y_d = y + 2 p0 x y + p1 (r^2 + 2 y^2) + s2 r^2 + s3 r^4
division        k; of a distorted point (x, y):  direction = (x, y, 1 + k r^2)
eucm            alpha beta (Khomutenko, Garcia and Martinet); of a distorted point:  direction = (x, y, m),
    m = (1 - alpha^2 beta r^2) / (alpha sqrt(1 - (2 alpha - 1) beta r^2) + 1 - alpha)
mixed           opencv's or fisheye's coefficients, eight, then 1 for a fisheye lens, else 0
equirectangular x is the azimuth, y the angle below the horizon: the focal lengths of a whole sphere are width / (2 pi)
    and height / pi

Without a formula for the way back, Newton's method takes a fixed number of steps: nothing waits for the device. Most
models fold over at some radius, beyond which a pixel belongs to no ray: `is_valid` tells.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .cameras import Cameras

CameraModel = Literal[
    "pinhole", "opencv", "fisheye", "fov", "thin_prism", "rad_tan_prism", "division", "eucm", "equirectangular", "mixed"
]
PIXEL_CENTER = 0.5
NEWTON_STEPS = 12
_SEARCH_RADIUS = 16.0  # 86 degrees off the axis: the plane model of a lens ends before
_SEARCH_STEPS = 4096
_RESIDUAL = 1e-5  # on the plane at depth 1: a hundredth of a pixel at a focal length of 1000
_TINY = 1e-12
_FLAT = 1e-4  # an angle w below which the FOV model is a pinhole
_SMALL = 1e-6  # what a denominator or a root is kept above, where a pixel has no ray

_Jacobian = tuple[Tensor, Tensor, Tensor, Tensor]  # xx xy yx yy
_Formula = Callable[[Tensor, Tensor], tuple[Tensor, _Jacobian]]  # undistorted (m, 2), coefficients (m, n)


@dataclass(frozen=True)
class LensModel:
    """Both ways of a lens, for m points with coefficients (m, n). Where not `is_valid`, `unproject` is only finite."""

    project: Callable[[Tensor, Any], Tensor]  # directions (m, 3) -> image-plane points (m, 2)
    unproject: Callable[[Tensor, Any], Tensor]  # image-plane points (m, 2) -> directions (m, 3)
    is_valid: Callable[[Tensor, Any, Any], Tensor]  # points (m, 2), coefficients, limits (m,) -> (m,) bool
    limit: Callable[[Tensor], Tensor] | None = None  # coefficients (n_lenses, n) -> (n_lenses,): where each folds over
    n_coefficients: int = 8


def _at_depth_1(points: Tensor) -> Tensor:
    return torch.cat([points, torch.ones_like(points[:, :1])], dim=-1)


def _on_plane(directions: Tensor) -> Tensor:
    return directions[:, :2] / directions[:, 2:]


def _along_azimuth(directions: Tensor, across: Tensor, radius: Tensor) -> Tensor:
    """(m, 2): as far from the axis as `radius` (m,) says; `across` (m,) is the length of x and y."""
    factor = torch.where(across < _TINY, 1.0 / directions[:, 2], radius / across.clamp_min(_TINY))
    return directions[:, :2] * factor[:, None]


def _to_angles(directions: Tensor) -> Tensor:
    """(m, 2): the angle to the axis, taken along the azimuth."""
    across = torch.linalg.vector_norm(directions[:, :2], dim=-1)
    return _along_azimuth(directions, across, torch.atan2(across, directions[:, 2]))


def _from_angles(points: Tensor) -> Tensor:
    """(m, 3): as far from the axis as points (m, 2) say, along their azimuth."""
    angle = torch.linalg.vector_norm(points, dim=-1)
    across = torch.where(angle < _TINY, torch.ones_like(angle), torch.sin(angle) / angle.clamp_min(_TINY))
    return torch.cat([points * across[:, None], torch.cos(angle)[:, None]], dim=-1)


def _away_from_zero(values: Tensor, least: float) -> Tensor:
    return torch.where(values.abs() < least, torch.full_like(values, least), values)


def _solve(formula: _Formula, points: Tensor, coefficients: Tensor, reach: float) -> Tensor:
    """The undistorted points, none of them farther than `reach` along either axis."""
    current, enough = points, 0.1 * torch.finfo(points.dtype).eps ** 0.5
    for _ in range(NEWTON_STEPS):
        value, (xx, xy, yx, yy) = formula(current, coefficients)
        error_x, error_y = (value - points).unbind(-1)
        # Beyond the fold there is no root: keep the steps finite there and let the validity test say so.
        determinant = _away_from_zero(xx * yy - xy * yx, 1e-4)
        step = torch.stack([yy * error_x - xy * error_y, xx * error_y - yx * error_x], dim=-1) / determinant[:, None]
        current = (current - step.clamp(-0.5, 0.5)).clamp(-reach, reach)
        # Each step is about the square of the one before. A GPU would have to be waited for.
        if step.device.type == "cpu" and (not step.numel() or float(step.detach().abs().amax()) < enough):
            break
    return current


def _first_fold(values: Tensor, growing: Tensor, dtype: torch.dtype) -> Tensor:
    """(n,): the first of `values` (s,) at which `growing` (n, s) says no, else the last."""
    first = torch.cat([growing, torch.zeros_like(growing[:, :1])], dim=1).int().argmin(dim=1)
    return values[first.clamp(max=len(values) - 1)].to(dtype)


def _angle_limit(coefficients: Tensor, radial: Sequence[int]) -> Tensor:
    """The angle at which the radial part of lenses stops growing; pi where it never does. `radial`: where its k stand.
    A search for each row: meant for cameras, not for rays."""
    angle = torch.linspace(0.0, math.pi, _SEARCH_STEPS + 1, dtype=torch.float64, device=coefficients.device)
    rows = coefficients.detach().double()
    t2, slope = (angle * angle)[None, :], torch.zeros_like(angle)[None, :]
    for power, column in reversed(list(enumerate(radial, 1))):
        slope = t2 * (slope + (2.0 * power + 1.0) * rows[:, column : column + 1])
    return _first_fold(angle, 1.0 + slope > 0.0, coefficients.dtype)  # d (t R(t^2)) / dt


def _by_newton(
    formula: _Formula, limit: Callable[[Tensor], Tensor], *, angles: bool = True, n_coefficients: int = 8
) -> LensModel:
    """A model of the plane at depth 1, or of angles along the azimuth."""
    to_plane, from_plane, reach = (_to_angles, _from_angles, math.pi) if angles else (_on_plane, _at_depth_1, math.inf)

    def project(directions: Tensor, coefficients: Tensor) -> Tensor:
        return formula(to_plane(directions), coefficients)[0]

    def unproject(points: Tensor, coefficients: Tensor) -> Tensor:
        return from_plane(_solve(formula, points, coefficients, reach))

    def is_valid(points: Tensor, coefficients: Tensor, limits: Tensor) -> Tensor:
        plane = _solve(formula, points, coefficients, reach)
        again, (xx, xy, yx, yy) = formula(plane, coefficients)
        residual = (again - points).abs().amax(-1)
        unfolded = torch.linalg.vector_norm(plane, dim=-1) < limits
        return (residual < _RESIDUAL * (1.0 + points.abs().amax(-1))) & (xx * yy - xy * yx > 0.0) & unfolded

    return LensModel(project, unproject, is_valid, limit, n_coefficients)


def _tangential(x: Tensor, y: Tensor, scale: Tensor, slope: Tensor, p1: Tensor, p2: Tensor) -> tuple[Tensor, ...]:
    """x_d, y_d, xx, xy, yy of a radial part `scale`, with its derivative to r^2, and p1 p2."""
    r2 = x * x + y * y
    x_d = scale * x + 2.0 * p1 * x * y + p2 * (r2 + 2.0 * x * x)
    y_d = scale * y + p1 * (r2 + 2.0 * y * y) + 2.0 * p2 * x * y
    xx = scale + 2.0 * slope * x * x + 2.0 * p1 * y + 6.0 * p2 * x
    xy = 2.0 * slope * x * y + 2.0 * p1 * x + 2.0 * p2 * y
    yy = scale + 2.0 * slope * y * y + 6.0 * p1 * y + 2.0 * p2 * x
    return x_d, y_d, xx, xy, yy


def _opencv_scale(r2: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """R and dR / d(r^2)."""
    k1, k2, _, _, k3, k4, k5, k6 = coefficients.unbind(-1)
    (above, d_above), (below, d_below) = _radial(r2, (k1, k2, k3)), _radial(r2, (k4, k5, k6))
    below = _away_from_zero(below, 1e-6)
    return above / below, (d_above * below - above * d_below) / (below * below)


def opencv_points(points: Tensor, coefficients: Tensor) -> tuple[Tensor, _Jacobian]:
    x, y = points.unbind(-1)
    scale, slope = _opencv_scale(x * x + y * y, coefficients)
    x_d, y_d, xx, xy, yy = _tangential(x, y, scale, slope, coefficients[..., 2], coefficients[..., 3])
    return torch.stack([x_d, y_d], dim=-1), (xx, xy, xy, yy)


def _opencv_limit(coefficients: Tensor) -> Tensor:
    """The undistorted radius at which the radial part stops growing; 16 (86 degrees) where it never does."""
    radius = torch.linspace(0.0, _SEARCH_RADIUS, _SEARCH_STEPS + 1, dtype=torch.float64, device=coefficients.device)
    r2 = (radius * radius)[None, :]
    scale, slope = _opencv_scale(r2, coefficients.detach().double()[:, None, :])
    return _first_fold(radius, scale + 2.0 * slope * r2 > 0.0, coefficients.dtype)  # d (r R(r^2)) / dr


def _radial(t2: Tensor, coefficients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """1 + k1 t^2 + k2 t^4 + ... and its derivative to t^2, both by Horner."""
    scale, slope = torch.zeros_like(t2), torch.zeros_like(t2)
    for k in reversed(coefficients):
        slope = slope * t2 + scale
        scale = scale * t2 + k
    return 1.0 + t2 * scale, scale + t2 * slope


def _fisheye(plane: Tensor, coefficients: Tensor, n: int = 4) -> tuple[Tensor, _Jacobian]:
    a, b = plane.unbind(-1)
    scale, slope = _radial(a * a + b * b, coefficients[..., :n].unbind(-1))
    xx, xy, yy = scale + 2.0 * slope * a * a, 2.0 * slope * a * b, scale + 2.0 * slope * b * b
    return plane * scale[..., None], (xx, xy, xy, yy)


def _thin_prism(plane: Tensor, coefficients: Tensor) -> tuple[Tensor, _Jacobian]:
    a, b = plane.unbind(-1)
    k1, k2, p1, p2, k3, k4, s1, s2 = coefficients.unbind(-1)
    t2 = a * a + b * b
    x, y, xx, xy, yy = _tangential(a, b, *_radial(t2, (k1, k2, k3, k4)), p1, p2)
    jacobian = (xx + 2.0 * s1 * a, xy + 2.0 * s1 * b, xy + 2.0 * s2 * a, yy + 2.0 * s2 * b)
    return torch.stack([x + s1 * t2, y + s2 * t2], dim=-1), jacobian


def _rad_tan_prism(plane: Tensor, coefficients: Tensor) -> tuple[Tensor, _Jacobian]:
    p0, p1, s0, s1, s2, s3 = coefficients[..., 6:].unbind(-1)
    plane, (aa, ab, _, bb) = _fisheye(plane, coefficients, 6)
    x, y = plane.unbind(-1)
    r2 = x * x + y * y
    x_d, y_d, xx, xy, yy = _tangential(x, y, torch.ones_like(x), torch.zeros_like(x), p1, p0)
    points = torch.stack([x_d + (s0 + s1 * r2) * r2, y_d + (s2 + s3 * r2) * r2], dim=-1)
    in_x, in_y = 2.0 * (s0 + 2.0 * s1 * r2), 2.0 * (s2 + 2.0 * s3 * r2)
    xx, xy, yx, yy = xx + in_x * x, xy + in_x * y, xy + in_y * x, yy + in_y * y
    return points, (xx * aa + xy * ab, xx * ab + xy * bb, yx * aa + yy * ab, yx * ab + yy * bb)


def _project_fov(directions: Tensor, coefficients: Tensor) -> Tensor:
    angle = coefficients[..., 0]
    across = torch.linalg.vector_norm(directions[:, :2], dim=-1)
    radius = torch.atan2(2.0 * across * torch.tan(0.5 * angle), directions[:, 2]) / angle.clamp_min(_FLAT)
    return torch.where((angle < _FLAT)[:, None], _on_plane(directions), _along_azimuth(directions, across, radius))


def _unproject_fov(points: Tensor, coefficients: Tensor) -> Tensor:
    angle = coefficients[..., 0]
    radius = torch.linalg.vector_norm(points, dim=-1)
    turn = radius * angle
    along = 2.0 * torch.tan(0.5 * angle) * torch.cos(turn)
    across = torch.where(radius < _TINY, angle, torch.sin(turn) / radius.clamp_min(_TINY))
    flat = angle < _FLAT
    across, along = torch.where(flat, 1.0, across), torch.where(flat, 1.0, along)
    return torch.cat([points * across[:, None], along[:, None]], dim=-1)


def _project_division(directions: Tensor, coefficients: Tensor) -> Tensor:
    """The smaller root, which the centre of the image is on."""
    across2 = directions[:, :2].square().sum(-1)
    root = (directions[:, 2].square() - 4.0 * coefficients[..., 0] * across2).clamp_min(0.0).sqrt()
    return directions[:, :2] * (2.0 / (directions[:, 2] + root))[:, None]


def _project_eucm(directions: Tensor, coefficients: Tensor) -> Tensor:
    alpha, beta = coefficients[..., 0], coefficients[..., 1]
    length = (beta * directions[:, :2].square().sum(-1) + directions[:, 2].square()).clamp_min(0.0).sqrt()
    along = alpha * length + (1.0 - alpha) * directions[:, 2]
    return directions[:, :2] / _away_from_zero(along, _SMALL)[:, None]


def _unproject_eucm(points: Tensor, coefficients: Tensor) -> Tensor:
    alpha, beta = coefficients[..., 0], coefficients[..., 1]
    r2 = points.square().sum(-1)
    root = (1.0 - (2.0 * alpha - 1.0) * beta * r2).clamp_min(_SMALL).sqrt()
    below = (alpha * root + 1.0 - alpha).clamp_min(_SMALL)
    return torch.cat([points, ((1.0 - alpha.square() * beta * r2) / below)[:, None]], dim=-1)


def _project_sphere(directions: Tensor, coefficients: Tensor) -> Tensor:
    u, v, w = directions.unbind(-1)
    return torch.stack([torch.atan2(u, w), torch.atan2(v, (u * u + w * w).sqrt())], dim=-1)


def _unproject_sphere(points: Tensor, coefficients: Tensor) -> Tensor:
    azimuth, below = points.unbind(-1)
    level = torch.cos(below)
    return torch.stack([level * torch.sin(azimuth), torch.sin(below), level * torch.cos(azimuth)], dim=-1)


def _mixed(plane: LensModel, angles: LensModel) -> LensModel:
    """Lenses of two models in one batch: a ninth coefficient of 1 chooses the second; both are computed."""

    def choose(coefficients: Tensor, first: Tensor, second: Tensor) -> Tensor:
        second_kind = coefficients[:, 8] > 0.5
        return torch.where(second_kind if first.dim() == 1 else second_kind[:, None], second, first)

    def both(name: str) -> Callable[..., Tensor]:
        one, other = getattr(plane, name), getattr(angles, name)
        return lambda points, c, *limits: choose(c, one(points, c[:, :8], *limits), other(points, c[:, :8], *limits))

    def limit(coefficients: Tensor) -> Tensor:
        assert plane.limit is not None and angles.limit is not None
        return choose(coefficients, plane.limit(coefficients[:, :8]), angles.limit(coefficients[:, :8]))

    return LensModel(both("project"), both("unproject"), both("is_valid"), limit, n_coefficients=9)


LENS_MODELS: dict[CameraModel, LensModel] = {
    "pinhole": LensModel(
        project=lambda directions, _: _on_plane(directions),
        unproject=lambda points, _: _at_depth_1(points),
        is_valid=lambda points, _, limits: torch.ones_like(points[:, 0], dtype=torch.bool),
    ),
    "opencv": _by_newton(opencv_points, _opencv_limit, angles=False),
    "fisheye": _by_newton(_fisheye, functools.partial(_angle_limit, radial=range(4))),
    "fov": LensModel(
        _project_fov, _unproject_fov, lambda points, c, _: points.norm(dim=-1) * c[..., 0] < 0.5 * math.pi - 1e-4
    ),
    "thin_prism": _by_newton(_thin_prism, functools.partial(_angle_limit, radial=(0, 1, 4, 5))),
    "rad_tan_prism": _by_newton(_rad_tan_prism, functools.partial(_angle_limit, radial=range(6)), n_coefficients=12),
    "division": LensModel(
        _project_division,
        lambda points, c: torch.cat([points, 1.0 + c[..., :1] * points.square().sum(-1, keepdim=True)], dim=-1),
        lambda points, c, _: (c[..., 0] * points.square().sum(-1)).abs() < 1.0 - _SMALL,
    ),
    "eucm": LensModel(
        _project_eucm,
        _unproject_eucm,
        lambda points, c, _: (
            ((2.0 * c[..., 0] - 1.0) * c[..., 1] * points.square().sum(-1) < 1.0 - _SMALL) & (c[..., 1] > 0.0)
        ),
    ),
    "equirectangular": LensModel(
        _project_sphere,
        _unproject_sphere,
        lambda points, _, limits: torch.maximum(points[:, 0].abs(), 2.0 * points[:, 1].abs()) <= math.pi * (1.0 + 1e-5),
    ),
}
LENS_MODELS["mixed"] = _mixed(LENS_MODELS["opencv"], LENS_MODELS["fisheye"])


# Tables. A lens without a formula for its inverse costs twelve Newton steps a ray. Images by one camera share a table;
# where each has a lens of its own, and they are many or large, the lens is inverted for the drawn pixels alone.

CPU_BYTES = 64 << 20  # of a table: small beside what a run takes anyway
CUDA_BYTES, CUDA_SHARE = 2 << 30, 0.125  # at most, and of the free memory
_PARTS = {"cpu": 1 << 18, "cuda": 1 << 21}  # pixels at a time: bounds memory, and on a GPU the number of launches
_BYTES_PER_PIXEL = 12
_REMEMBERED, _REMEMBERED_PIXELS = 4, 1 << 21  # lenses of images, for as many rays a pixel; and their size
_Key = tuple[CameraModel, int, int, tuple[float, ...]]  # of one lens: width, height, focal, center, distortion


@dataclass(frozen=True)
class LensTable:
    """What pixels look along in their camera's own axes, as `Cameras.local_directions` gives it."""

    directions: Tensor  # (n, 3) float32, one lens after the other, row by row
    shifts: Tensor  # (n_images,) int64: pixel p of the pool, in image i, is entry p + shifts[i]

    def look_up(self, image: Tensor, pixel: Tensor) -> Tensor:
        """(m, 3): the directions of pixels (m,) of the pool, which lie in images (m,)."""
        return self.directions[pixel + self.shifts[image]]


def make_lens_table(cameras: Cameras, offsets: Tensor, *, limit: int | None = None) -> LensTable | None:
    """On the cameras' device; `offsets` (n + 1,) are those of their images. None for pinholes, which need none, and
    where it would take more than `limit` bytes."""
    if cameras.model == "pinhole":
        return None
    if limit is None and cameras.device.type == "cuda":
        limit = min(CUDA_BYTES, int(CUDA_SHARE * torch.cuda.mem_get_info(cameras.device)[0]))
    images, lens_of = distinct_lenses(cameras)
    sizes = cameras.size.cpu()[images].prod(-1)
    if int(sizes.sum()) * _BYTES_PER_PIXEL > (CPU_BYTES if limit is None else limit):
        return None
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)[:-1]])
    directions = _directions_of(cameras[images.to(cameras.device)])
    return LensTable(directions, (starts[lens_of] - offsets[:-1].cpu()).to(cameras.device))


def distinct_lenses(cameras: Cameras) -> tuple[Tensor, Tensor]:
    """One image through each lens, (n_lenses,), and the lens of each image, (n,); on the CPU."""
    parts = [cameras.focal, cameras.center, cameras.size.float()]
    parts += [] if cameras.distortion is None else [cameras.distortion]
    lenses, lens_of = torch.unique(torch.cat(parts, dim=-1).detach().cpu(), dim=0, return_inverse=True)
    images = torch.full((len(lenses),), len(cameras))
    return images.scatter_reduce(0, lens_of, torch.arange(len(cameras)), "amin"), lens_of


def pixel_parts(cameras: Cameras) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Image, x and y of every pixel of every image, so many at a time: whole words of a mask."""
    widths, sizes = cameras.size[:, 0].contiguous(), cameras.size.prod(-1)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    total, part = int(offsets[-1]), _PARTS.get(cameras.device.type, _PARTS["cuda"])
    for first in range(0, total, part):
        yield pixel_centers(offsets, widths, torch.arange(first, min(first + part, total), device=cameras.device))


def pixel_centers(offsets: Tensor, widths: Tensor, pixel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Image, x and y of pixels (m,) of images stored one after the other, row by row."""
    image = torch.searchsorted(offsets, pixel, right=True) - 1
    local, width = pixel - offsets[image], widths[image]
    row = torch.div(local, width, rounding_mode="floor")
    return image, (local - row * width).float() + PIXEL_CENTER, row.float() + PIXEL_CENTER


def _directions_of(cameras: Cameras) -> Tensor:
    """(n, 3) on the cameras' device: what every pixel of every image looks along, image after image."""
    directions = torch.empty((int(cameras.size.prod(-1).sum()), 3), dtype=torch.float32, device=cameras.device)
    first = 0  # into one table, part by part: never held twice
    for image, x, y in pixel_parts(cameras):
        directions[first : first + len(x)] = cameras.local_directions(image, x, y)
        first += len(x)
    return directions


def all_valid(cameras: Cameras) -> bool:
    """Whether a ray leads to every pixel of every image. Lenses are valid from the centre outwards: borders decide."""
    if cameras.model == "pinhole":
        return True
    cameras = cameras[distinct_lenses(cameras)[0].to(cameras.device)]
    return bool(cameras.is_valid(*cameras.borders()).all())


def valid_pixels(cameras: Cameras, index: int, device: torch.device) -> Tensor | None:
    """(height, width) bool on a device: to which pixels of image `index` a ray leads; None where to all of them."""
    return None if cameras.model == "pinhole" else _valid(_key(cameras, index), device)


def picture_directions(cameras: Cameras, index: int, device: torch.device) -> Tensor | None:
    """(height * width, 3) on a device: what the pixels of image `index` look along in the camera's own axes; those of
    the last few lenses are remembered. None for pinholes, which need no table, and for images too large to keep one."""
    if cameras.model == "pinhole" or int(cameras.size[index].prod()) > _REMEMBERED_PIXELS:
        return None
    return _directions(_key(cameras, index), device)


def _key(cameras: Cameras, index: int) -> _Key:
    """All that says which pixel looks where, as what can be remembered by."""
    assert cameras.distortion is not None  # of a pinhole nobody asks
    width, height = (int(side) for side in cameras.size[index])
    numbers = torch.cat([cameras.focal[index], cameras.center[index], cameras.distortion[index]])
    return cameras.model, width, height, tuple(numbers.tolist())


def _camera_of(key: _Key) -> Cameras:
    from .cameras import Cameras  # imports this file

    model, width, height, numbers = key
    focal, center, distortion = torch.tensor([numbers]).split([2, 2, len(numbers) - 4], dim=1)
    size = torch.tensor([[width, height]])
    return Cameras(torch.eye(3, 4)[None], focal, center, size, model=model, distortion=distortion)


@functools.lru_cache(maxsize=_REMEMBERED)
@torch.no_grad()
def _valid(key: _Key, device: torch.device) -> Tensor | None:
    if all_valid(camera := _camera_of(key)):
        return None
    camera = camera.to(device)
    valid = torch.cat([camera.is_valid(*part) for part in pixel_parts(camera)])
    return None if bool(valid.all()) else valid.view(key[2], key[1])


@functools.lru_cache(maxsize=_REMEMBERED)
@torch.no_grad()
def _directions(key: _Key, device: torch.device) -> Tensor:
    return _directions_of(_camera_of(key).to(device))
