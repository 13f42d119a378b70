"""Cameras as one batch of tensors, and pixels to rays. The one place for axes, pixel centres and poses; its prose twin
is `docs/conventions.md`.

World      right-handed, +z up (as in Blender files); `placement.py` turns captures that have another up.
Camera     OpenGL axes, as in Blender files: +x right, +y up, -z forward.
Pose       camera_to_world, (3, 4): columns are the camera's right, up, backward axes in the world, then its position.
Pixels     (x, y) with x to the right and y down; pixel (column, row) covers [column, column + 1) x [row, row + 1),
           so that its centre is at (column + 0.5, row + 0.5) and a principal point in the middle is (w / 2, h / 2).
Colour     sRGB values as stored in the file, mapped to [0, 1]; never linearised for training or for scores.
Alpha      straight (not premultiplied), coverage in [0, 1]; `composite_over` puts an image on a background.
Time       in [0, 1] over a recording.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import InputError, refuse
from ..types import Rays
from .lenses import LENS_MODELS, PIXEL_CENTER, CameraModel, LensModel

if TYPE_CHECKING:
    from .placement import Ndc

WORLD_UP = (0.0, 0.0, 1.0)
# A disc of this radius has the variance of a unit square about its centre: the cone of a pixel one unit wide.
PIXEL_RADIUS = 1.0 / math.sqrt(3.0)


@dataclass(frozen=True)
class Cameras:
    """n cameras, possibly of different sizes and focal lengths, of one model. Values are checked on construction when
    they are on the CPU; on a GPU the check would wait for the device. Indexing gives Cameras again.

    >>> pose = torch.eye(4)[None, :3]  # at the origin, looking along -z
    >>> camera = Cameras.pinhole(pose, width=4, height=4, field_of_view_x=1.0)
    >>> camera.rays(torch.tensor([0]), torch.tensor([2.0]), torch.tensor([2.0])).directions.abs().tolist()
    [[0.0, 0.0, 1.0]]
    """

    camera_to_world: Tensor  # (n, 3, 4) float32, OpenGL axes
    focal: Tensor  # (n, 2) float32, fx and fy in pixels
    center: Tensor  # (n, 2) float32, principal point in pixels
    size: Tensor  # (n, 2) int64, width and height
    times: Tensor | None = None  # (n,) float32 in [0, 1]
    model: CameraModel = "pinhole"
    distortion: Tensor | None = None  # (n, 8 or 12) float32, in the order of `lenses.py`, zeros behind; pinhole: None
    ndc: Ndc | None = None  # the box that rays are bent into (`placement.py`); None: plain space

    def __post_init__(self) -> None:
        hint = "undistort the images first"
        refuse(self.model not in LENS_MODELS, "model", "one of " + ", ".join(LENS_MODELS), repr(self.model), hint)
        _check_shapes(self)
        expected = "None for pinhole cameras, coefficients for the others"
        got = f"{'none' if self.distortion is None else 'some'} for {self.model}"
        refuse((self.distortion is None) != (self.model == "pinhole"), "distortion", expected, got)
        if self.camera_to_world.device.type == "cpu":
            _check_values(self)

    @classmethod
    def pinhole(cls, camera_to_world: Tensor, *, width: int, height: int, field_of_view_x: float) -> Cameras:
        """Cameras of one size with a centred principal point and square pixels; the angle is in radians."""
        n = camera_to_world.shape[0]
        focal = 0.5 * width / half_tangent(field_of_view_x, "field_of_view_x")
        size = torch.tensor([[width, height]]).expand(n, 2).contiguous()
        return cls(camera_to_world.float(), torch.full((n, 2), focal), size.float() * 0.5, size)

    def __len__(self) -> int:
        return self.camera_to_world.shape[0]

    def __getitem__(self, index: int | slice | Tensor) -> Cameras:
        if isinstance(index, int):
            position = index + len(self) if index < 0 else index
            if not 0 <= position < len(self):
                raise IndexError(f"camera {index} of {len(self)}")
            index = slice(position, position + 1)
        return self._map(operator.itemgetter(index))

    @property
    def device(self) -> torch.device:
        return self.camera_to_world.device

    @property
    def positions(self) -> Tensor:
        """(n, 3): where the cameras stand."""
        return self.camera_to_world[:, :, 3]

    @property
    def forward(self) -> Tensor:
        """(n, 3): unit viewing directions."""
        return -self.camera_to_world[:, :, 2]

    def to(self, device: torch.device | str) -> Cameras:
        moved = self._map(lambda value: value.to(device))
        return moved if self.ndc is None else replace(moved, ndc=self.ndc.to(device))

    def rays(self, camera_indices: Tensor, x: Tensor, y: Tensor) -> Rays:
        """Rays through continuous pixel positions: the centre of pixel (column, row) is (column + 0.5, row + 0.5). It
        never waits for the device, so that a CUDA graph can hold it. Differentiable to the poses and the intrinsics."""
        return self.rays_along(camera_indices, self.local_directions(camera_indices, x, y))

    def looking_past(self, shift: tuple[float, float]) -> Cameras:
        """The same cameras, each ray through a point `shift` pixels to the right of and below the one asked for."""
        return replace(self, center=self.center - torch.tensor(shift, dtype=self.center.dtype, device=self.device))

    def local_directions(self, camera_indices: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """(m, 3): what continuous pixel positions look along in the camera's own axes; not of unit length."""
        right, down, ahead = self._lens.unproject(*self._plane(camera_indices, x, y)).unbind(-1)  # OpenCV's axes
        return torch.stack([right, -down, -ahead], dim=-1)

    def rays_along(self, camera_indices: Tensor, local: Tensor) -> Rays:
        """Rays along directions (m, 3) in the cameras' own axes, as `local_directions` gives them."""
        poses = self.camera_to_world[camera_indices]  # (m, 3, 4)
        directions = (poses[:, :, :3] * local[:, None, :]).sum(-1)
        lengths = torch.linalg.vector_norm(directions, dim=-1)
        times = None if self.times is None else self.times[camera_indices]
        radii = PIXEL_RADIUS / (lengths * self.focal[camera_indices].prod(-1).sqrt())
        rays = Rays(poses[:, :, 3], directions / lengths[:, None], times, camera_indices, radii)
        return rays if self.ndc is None else self.ndc.bend_rays(rays)

    def is_valid(self, camera_indices: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """(m,) bool: whether a ray leads to the pixel position. Most lens models end where they fold over."""
        limits = None if self._limits is None else self._limits[camera_indices]
        return self._lens.is_valid(*self._plane(camera_indices, x, y), limits)

    @property
    def _lens(self) -> LensModel:
        return LENS_MODELS[self.model]

    @functools.cached_property
    def _limits(self) -> Tensor | None:
        """(n,): where each lens folds over; None for models that know by a formula."""
        if self.distortion is None or self._lens.limit is None:
            return None
        lenses, lens_of = torch.unique(self.distortion.detach(), dim=0, return_inverse=True)
        return self._lens.limit(lenses)[lens_of]

    def _plane(self, camera_indices: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """Points on the image plane at depth 1, still distorted, and their coefficients."""
        points = (torch.stack([x, y], dim=-1) - self.center[camera_indices]) / self.focal[camera_indices]
        return points, None if self.distortion is None else self.distortion[camera_indices]

    def image_rays(self, index: int) -> Rays:
        """One ray through the centre of each pixel of a picture, row after row."""
        if not 0 <= index < len(self):
            raise IndexError(f"camera {index} of {len(self)}")
        pixels = torch.arange(int(self.size[index].prod()), device=self.device)
        return self.pixel_rays(torch.full_like(pixels, index), pixels)

    def pixel_rays(self, camera_indices: Tensor, pixels: Tensor) -> Rays:
        """Rays through the centres of pixels (m,), counted row after row."""
        width = self.size[camera_indices, 0]
        return self.rays(camera_indices, pixels % width + PIXEL_CENTER, pixels // width + PIXEL_CENTER)

    def rays_through(self, places: Sequence[tuple[float, float]]) -> Rays:
        """Of each camera the rays through `places`, as shares of width and height."""
        index = torch.arange(len(self), device=self.device).repeat_interleave(len(places))
        x, y = (torch.tensor(places, device=self.device).repeat(len(self), 1) * self.size[index]).unbind(-1)
        return self.rays(index, x, y)

    def project(self, camera_indices: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        """World points (m, 3), in the box where there is one, to pixel positions (m, 2) and depths (m,) ahead, of
        cameras (m,) or of one for all (1,). Depths <= 0 are behind the camera, where pixel positions mean nothing but
        for fisheye lenses, which may look behind."""
        points = points if self.ndc is None else self.ndc.unbend(points)
        poses = world_to_camera(self.camera_to_world[camera_indices])
        if len(camera_indices) == 1 and points.dtype == poses.dtype:  # one product for all points is much faster
            local = torch.addmm(poses[:, :, 3], points, poses[0, :, :3].T)
        else:
            local = (poses[:, :, :3] * points[:, None, :]).sum(-1) + poses[:, :, 3]
        depths = -local[:, 2]
        axes = torch.stack([local[:, 0], -local[:, 1], depths], dim=-1)  # OpenCV's: y down, z forward
        plane = self._lens.project(axes, None if self.distortion is None else self.distortion[camera_indices])
        return plane * self.focal[camera_indices] + self.center[camera_indices], depths

    def borders(self) -> tuple[Tensor, Tensor, Tensor]:
        """Camera, x and y of 33 positions along each side of each image, corners among them."""
        steps = torch.linspace(0.0, 1.0, 33, device=self.device)
        low, high = torch.zeros_like(steps), torch.ones_like(steps)
        u, v = torch.cat([steps, steps, low, high]), torch.cat([low, high, steps, steps])
        index = torch.arange(len(self), device=self.device).repeat_interleave(u.shape[0])
        x, y = ((self.size[:, i : i + 1] * border).reshape(-1) for i, border in enumerate((u, v)))
        return index, x, y

    def enclosing_pinholes(self) -> Cameras | None:
        """Pinhole cameras that see all that these see; None where there are none (a very wide lens, a bent box)."""
        if self.ndc is not None:
            return None
        if self.model == "pinhole":
            return self
        border = self.borders()
        local = self.local_directions(*border)
        wide = -local[:, 2] < 0.2 * local.norm(dim=-1)
        if bool((wide | ~self.is_valid(*border)).any()):
            return None
        plane = (local[:, :2] / -local[:, 2:]).view(len(self), -1, 2) * torch.tensor([1.0, -1.0], device=self.device)
        lowest, highest = plane.amin(1), plane.amax(1)
        size = ((highest - lowest) * self.focal).ceil()
        return replace(self, center=-lowest * self.focal, size=size.long(), model="pinhole", distortion=None)

    def resized(self, size: Tensor) -> Cameras:
        """The same views with pictures of `size` (n, 2) pixels: the field of view does not change."""
        ratio = size.to(self.focal.dtype) / self.size.to(self.focal.dtype)
        return replace(self, focal=self.focal * ratio, center=self.center * ratio, size=size)

    def scaled(self, factor: float) -> Cameras:
        """Pictures `factor` times as large, rounded to whole pixels; the field of view does not change."""
        refuse(not 0.0 < factor < math.inf, "factor", "a finite number > 0", factor)
        return self.resized((self.size.double() * factor).round().long().clamp_min(1))

    def _tensors(self) -> dict[str, Tensor]:
        """One row per camera each; those that are None are left out."""
        names = ("camera_to_world", "focal", "center", "size", "times", "distortion")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def _map(self, function: Callable[[Tensor], Tensor]) -> Cameras:
        return replace(self, **{name: function(value) for name, value in self._tensors().items()})


def opengl_to_opencv(camera_to_world: Tensor) -> Tensor:
    """Poses (..., 3 or 4, 4) with OpenGL camera axes to OpenCV ones (+x right, +y down, +z forward)."""
    return camera_to_world * camera_to_world.new_tensor([1.0, -1.0, -1.0, 1.0])


def opencv_to_opengl(camera_to_world: Tensor) -> Tensor:
    """The inverse of `opengl_to_opencv`, which is its own inverse; two names so that callers say what they mean."""
    return opengl_to_opencv(camera_to_world)


def half_tangent(angle: float, what: str) -> float:
    """Half the width of the image plane at depth 1, of a field of view in radians that errors call `what`."""
    refuse(not 0.0 < angle < math.pi, what, "an angle between 0 and pi radians", angle)
    return math.tan(0.5 * angle)


def look_at(eye: Tensor, target: Tensor, up: Tensor | None = None) -> Tensor:
    """Poses (n, 3, 4) of cameras at `eye` (n, 3) that look at `target` (n, 3) or (3,), with `up` towards the top.

    >>> look_at(torch.tensor([[0.0, -4.0, 0.0]]), torch.zeros(3))[0, :, 2]  # backward = from target to eye
    tensor([ 0., -1.,  0.])
    """
    up = eye.new_tensor(WORLD_UP) if up is None else up
    backward = torch.nn.functional.normalize(eye - target, dim=-1)
    right = torch.linalg.cross(up.expand_as(backward), backward)
    length = right.norm(dim=-1, keepdim=True)
    if bool((length < 1e-6).any()):
        raise InputError("eye", "a view not along the up axis", "one that is", "move the eye or give another `up`")
    right = right / length
    return torch.stack([right, torch.linalg.cross(backward, right), backward, eye], dim=-1)


def world_to_camera(camera_to_world: Tensor) -> Tensor:
    """The inverse of rigid poses (n, 3, 4)."""
    rotation = camera_to_world[..., :3].transpose(-1, -2)
    return torch.cat([rotation, -rotation @ camera_to_world[..., 3:]], dim=-1)


def turn_between(source: Tensor, target: Tensor) -> Tensor:
    """(3, 3) the smallest rotation of a unit vector (3,) to another; to its opposite, a half turn."""
    cosine = float(source @ target)
    if cosine < -1.0 + 1e-9:
        axis = source.new_tensor([1.0, 0.0, 0.0] if abs(float(source[0])) < 0.9 else [0.0, 1.0, 0.0])
        axis = torch.nn.functional.normalize(axis - source * (axis @ source), dim=0)
        return 2.0 * axis[:, None] * axis - torch.eye(3, dtype=source.dtype)
    x, y, z = torch.linalg.cross(source, target).tolist()
    skew = source.new_tensor([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    return torch.eye(3, dtype=source.dtype) + skew + skew @ skew / (1.0 + cosine)


def rotations(quaternion: Tensor) -> Tensor:
    """(..., 3, 3) from unit quaternions (..., 4), w x y z."""
    w, x, y, z = quaternion.unbind(-1)
    rows = [
        [1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y - w * z), 2.0 * (x * z + w * y)],
        [2.0 * (x * y + w * z), 1.0 - 2.0 * (x * x + z * z), 2.0 * (y * z - w * x)],
        [2.0 * (x * z - w * y), 2.0 * (y * z + w * x), 1.0 - 2.0 * (x * x + y * y)],
    ]
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def turned(axis: int, degrees: float) -> Tensor:
    """(3, 3) float64: the rotation about x, y or z."""
    half = math.radians(degrees) / 2.0
    values = [math.cos(half), *(math.sin(half) * (axis == one) for one in range(3))]
    return rotations(torch.tensor(values, dtype=torch.float64))


def similarity_scale(matrix: Tensor) -> float:
    """By how much a rotation with a scale and a shift (4, 4) enlarges."""
    return float(torch.linalg.det(matrix[:3, :3]).abs() ** (1.0 / 3.0))


def transform_poses(poses: Tensor, similarity: Tensor | None) -> Tensor:
    """Poses (n, 3, 4) moved by a rotation with a scale and a shift (4, 4): axes turn, positions move."""
    if similarity is None:
        return poses
    matrix = similarity.to(poses.dtype)
    turned = (matrix[:3, :3] / similarity_scale(matrix)) @ poses[..., :3]
    moved = poses[..., 3] @ matrix[:3, :3].T + matrix[:3, 3]
    return torch.cat([turned, moved[..., None]], dim=-1)


def transform_points(points: Tensor, similarity: Tensor | None) -> Tensor:
    """Points (n, 3) moved by a matrix (4, 4), in the points' dtype."""
    if similarity is None:
        return points
    matrix = similarity.to(points.device)
    return (points.double() @ matrix[:3, :3].T + matrix[:3, 3]).to(points.dtype)


def _check_shapes(cameras: Cameras) -> None:
    n = cameras.camera_to_world.shape[0]
    expected = {"camera_to_world": (n, 3, 4), "focal": (n, 2), "center": (n, 2), "size": (n, 2)}
    expected |= {"times": (n,), "distortion": (n, LENS_MODELS[cameras.model].n_coefficients)}
    for name, value in cameras._tensors().items():
        refuse(tuple(value.shape) != expected[name], name, f"shape {expected[name]}", tuple(value.shape))
        if value.is_floating_point() == (name == "size"):
            raise InputError(name, "integers" if name == "size" else "a floating dtype", str(value.dtype))
        refuse(value.device != cameras.device, name, f"device {cameras.device}", value.device)


def _check_values(cameras: Cameras) -> None:
    poses = cameras.camera_to_world.detach()
    finite = torch.isfinite(poses).all(-1).all(-1)
    if not bool(finite.all()):
        bad = int((~finite).nonzero()[0])
        raise InputError("camera_to_world", "finite numbers", f"NaN or infinity in the pose of camera {bad}")
    rotation = poses[:, :, :3]
    skew = (rotation.transpose(1, 2) @ rotation - torch.eye(3, dtype=poses.dtype)).abs().amax((1, 2))
    if bool((skew > 1e-2).any()):
        bad = int((skew > 1e-2).nonzero()[0])
        hint = "divide the scale out of the rotation"
        raise InputError("camera_to_world", "a rotation in the first three columns", f"none in camera {bad}", hint)
    focal = cameras.focal.detach()
    if not bool((torch.isfinite(focal) & (focal > 0)).all()):
        raise InputError("focal", "finite numbers > 0", str(focal.min().item()))
    if not bool((cameras.size > 0).all()):
        raise InputError("size", "at least one pixel", str(int(cameras.size.min())))
    for name, value in cameras._tensors().items():
        refuse(not bool(torch.isfinite(value.detach()).all()), name, "finite numbers", "NaN or infinity")
