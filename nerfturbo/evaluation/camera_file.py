"""Camera paths as files, in nerfstudio's format: what its viewer, its Blender add-on and our live page write.

Poses have OpenGL axes, as here, and stand in the coordinates of the scene's own file: `Scene.to_original` leads there.
`fov` is the vertical angle in degrees. A crop is a box given by its centre, its size and a turn (roll, pitch, yaw).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.cameras import Cameras
from ..data.documents import number, read_json, rigid, shown
from ..errors import InputError
from ..types import Aabb
from .run_folder import write_json

MAX_SIDE = 16384
MAX_FRAMES = 100_000
PERSPECTIVE = ("perspective", "pinhole")


@dataclass(frozen=True)
class CameraPath:
    """Cameras in the coordinates of training, frames a second, and a crop where the file has one."""

    cameras: Cameras
    fps: float = 24.0
    crop: Aabb | None = None


def read_camera_path(file: Path, to_original: Tensor | None = None) -> CameraPath:
    """Read a path; every fault names the file and the place in it."""
    document = read_json(file, "a camera path in nerfstudio's format")
    kind = document.get("camera_type", "perspective")
    if kind not in PERSPECTIVE:
        raise InputError(f"{file}: camera_type", "perspective", shown(kind))
    width, height = (_side(document, name, file) for name in ("render_width", "render_height"))
    frames = document.get("camera_path")
    if not isinstance(frames, list) or not 0 < len(frames) <= MAX_FRAMES:
        raise InputError(f"{file}: camera_path", f"a list of 1 to {MAX_FRAMES} cameras", shown(frames))
    poses, focals, times = [], [], []
    for index, frame in enumerate(frames):
        where = f"{file}: camera_path[{index}]"
        if not isinstance(frame, dict):
            raise InputError(where, "an object with camera_to_world and fov", shown(frame))
        poses.append(_pose(frame.get("camera_to_world"), where))
        angle = number(frame.get("fov"), f"{where}: fov")
        if not 0.0 < angle < 180.0:
            raise InputError(f"{where}: fov", "degrees between 0 and 180", shown(frame.get("fov")))
        focals.append(0.5 * height / math.tan(math.radians(angle) * 0.5))
        if frame.get("render_time") is not None:
            times.append(min(1.0, max(0.0, number(frame["render_time"], f"{where}: render_time"))))
    fps = number(document.get("fps", 24), f"{file}: fps")
    if not 0.0 < fps <= 1000.0:
        raise InputError(f"{file}: fps", "a number from 0 to 1000", shown(document.get("fps")))
    n = len(poses)
    cameras = Cameras(
        camera_to_world=transform_poses(torch.stack(poses), _inverse(to_original)).float(),
        focal=torch.tensor(focals)[:, None].expand(n, 2).contiguous(),
        center=torch.tensor([[width * 0.5, height * 0.5]]).expand(n, 2).contiguous(),
        size=torch.tensor([[width, height]]).expand(n, 2).contiguous(),
        times=torch.tensor(times) if len(times) == n else None,
    )
    return CameraPath(cameras, fps, _read_crop(document.get("crop"), file, to_original))


def write_camera_path(
    file: Path, path: CameraPath, to_original: Tensor | None = None, *, keyframes: Cameras | None = None
) -> None:
    """Write a path so that `read_camera_path` and nerfstudio's tools read it; whole or not at all."""
    cameras = path.cameras
    width, height = (int(side) for side in cameras.size[0])
    document: dict[str, Any] = {
        "camera_type": "perspective",
        "render_width": width,
        "render_height": height,
        "fps": path.fps,
        "seconds": len(cameras) / path.fps,
        "is_cycle": False,
        "smoothness_value": 0.0,
        "crop": None if path.crop is None else _crop_document(path.crop, to_original),
        "camera_path": _camera_documents(cameras, to_original, "camera_to_world"),
        "keyframes": [] if keyframes is None else _camera_documents(keyframes, to_original, "matrix"),
    }
    write_json(file, document)


def transform_poses(poses: Tensor, similarity: Tensor | None) -> Tensor:
    """Poses (n, 3, 4) moved by a rotation with a scale and a shift (4, 4): axes turn, positions move."""
    if similarity is None:
        return poses
    matrix = similarity.to(poses.dtype)
    scale = torch.linalg.det(matrix[:3, :3]).abs() ** (1.0 / 3.0)
    turned = (matrix[:3, :3] / scale) @ poses[..., :3]
    moved = poses[..., 3] @ matrix[:3, :3].T + matrix[:3, 3]
    return torch.cat([turned, moved[..., None]], dim=-1)


def transform_points(points: Tensor, similarity: Tensor | None) -> Tensor:
    """Points (n, 3) moved by a matrix (4, 4), in the points' dtype."""
    if similarity is None:
        return points
    matrix = similarity.to(points.device)
    moved = points.double() @ matrix[:3, :3].T + matrix[:3, 3]
    return moved.to(points.dtype)


def _inverse(matrix: Tensor | None) -> Tensor | None:
    return None if matrix is None else torch.linalg.inv(matrix)


def _side(document: dict[str, Any], name: str, file: Path) -> int:
    value = number(document.get(name), f"{file}: {name}")
    if not 1 <= value <= MAX_SIDE or value != int(value):
        raise InputError(f"{file}: {name}", f"a whole number from 1 to {MAX_SIDE}", shown(document.get(name)))
    return int(value)


def _pose(value: object, where: str) -> Tensor:
    """(3, 4) float64 from 16 numbers, row after row, or from four rows."""
    what = f"{where}: camera_to_world"
    flat = value if isinstance(value, list) else []
    if len(flat) in (3, 4) and all(isinstance(row, list) for row in flat):
        flat = [entry for row in flat for entry in row]
    if len(flat) not in (12, 16):
        raise InputError(what, "16 numbers, a 4x4 matrix row after row", shown(value))
    numbers = torch.tensor([number(entry, what) for entry in flat[:12]], dtype=torch.float64)
    return rigid(numbers.view(3, 4), what)


def _camera_documents(cameras: Cameras, to_original: Tensor | None, name: str) -> list[dict[str, Any]]:
    poses = transform_poses(cameras.camera_to_world.double().cpu(), to_original)
    bottom = torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    result = []
    for index, pose in enumerate(poses):
        width, height = (int(side) for side in cameras.size[index])
        angle = 2.0 * math.degrees(math.atan(0.5 * height / float(cameras.focal[index, 1])))
        entry = {name: torch.cat([pose, bottom]).reshape(-1).tolist(), "fov": angle, "aspect": width / height}
        if cameras.times is not None:
            entry["render_time"] = float(cameras.times[index])
        result.append(entry)
    return result


def _turn(roll: float, pitch: float, yaw: float) -> Tensor:
    def about(axis: int, angle: float) -> Tensor:
        matrix = torch.eye(3, dtype=torch.float64)
        i, j = (axis + 1) % 3, (axis + 2) % 3
        matrix[i, i] = matrix[j, j] = math.cos(angle)
        matrix[j, i], matrix[i, j] = math.sin(angle), -math.sin(angle)
        return matrix

    return about(2, yaw) @ about(1, pitch) @ about(0, roll)


def _angles(turn: Tensor) -> list[float]:
    """Roll, pitch and yaw of a rotation: the inverse of `_turn`."""
    pitch = math.asin(max(-1.0, min(1.0, -float(turn[2, 0]))))
    if abs(math.cos(pitch)) < 1e-9:
        return [0.0, pitch, math.atan2(-float(turn[0, 1]), float(turn[1, 1]))]
    return [math.atan2(float(turn[2, 1]), float(turn[2, 2])), pitch, math.atan2(float(turn[1, 0]), float(turn[0, 0]))]


def _crop_document(crop: Aabb, to_original: Tensor | None) -> dict[str, Any]:
    matrix = torch.eye(4, dtype=torch.float64) if to_original is None else to_original.double()
    scale = float(torch.linalg.det(matrix[:3, :3]).abs() ** (1.0 / 3.0))
    center = transform_points(torch.tensor([crop.center], dtype=torch.float64), matrix)[0]
    return {
        "crop_center": center.tolist(),
        "crop_scale": [size * scale for size in crop.size],
        "crop_rot": _angles(matrix[:3, :3] / scale),
        "crop_bg_color": {"r": 255, "g": 255, "b": 255},
    }


def _read_crop(value: object, file: Path, to_original: Tensor | None) -> Aabb | None:
    if value is None:
        return None
    what = f"{file}: crop"
    if not isinstance(value, dict):
        raise InputError(what, "an object with crop_center and crop_scale", shown(value))
    center, size, angles = (
        _triple(value.get(name, default), f"{what}.{name}")
        for name, default in (("crop_center", None), ("crop_scale", None), ("crop_rot", [0.0, 0.0, 0.0]))
    )
    back = _inverse(to_original)
    matrix = torch.eye(4, dtype=torch.float64) if back is None else back
    scale = float(torch.linalg.det(matrix[:3, :3]).abs() ** (1.0 / 3.0))
    turn = (matrix[:3, :3] / scale) @ _turn(*angles)
    if float((turn.abs().amax(0) - 1.0).abs().max()) > 1e-3:
        hint = "give the box by --crop in the coordinates of training instead"
        raise InputError(f"{what}.crop_rot", "a box along the axes of training", str(angles), hint)
    half = (turn.abs() @ torch.tensor(size, dtype=torch.float64)) * (0.5 * scale)
    middle = transform_points(torch.tensor([center], dtype=torch.float64), matrix)[0]
    low, high = (middle - half).tolist(), (middle + half).tolist()
    return Aabb(tuple(low), tuple(high))


def _triple(value: object, what: str) -> tuple[float, float, float]:
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise InputError(what, "three numbers", shown(value))
    x, y, z = (number(entry, what) for entry in value)
    return x, y, z
