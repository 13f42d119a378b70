"""Camera paths: along and around the cameras of a scene, smooth between key poses, and as files. The files are
nerfstudio's: what its viewer, its Blender add-on and our viewer write. Poses have OpenGL axes, as here, and stand in
the coordinates of the scene's own file: `Scene.to_original` leads there. `fov` is the vertical angle in degrees. A crop
is a box given by its centre, its size and a turn (roll, pitch, yaw)."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.cameras import Cameras, look_at, rotations, similarity_scale, transform_points, transform_poses, turned
from ..data.json_checks import number, read_json, rigid, shown
from ..data.scene import Scene
from ..errors import InputError, refuse
from ..rendering.model import NerfModel
from ..types import Aabb
from .run_folder import write_json

PARSER_FILE = "dataparser_transforms.json"
MAX_SIDE = 16384
MAX_FRAMES = 100_000
FACING = 0.8  # the mean of unit viewing directions is longer than this where all cameras look one way
STEEPEST = 0.966  # sine of 75 degrees: an orbit never looks straight down
ATTENTION = 0.8  # mean cosine between viewing directions and the way to one point, where cameras look at that
RING_GAP = math.radians(100.0)  # between neighbours: with more, nobody stood on one side
BANDWIDTH = math.radians(25.0)  # an orbit takes height and distance from cameras about this near
ARC_REACH = 0.6  # of the angles at which cameras stand
MARGIN, SPECKS = 0.04, 0.001  # of a frame, around an object; of its pixels, that may be left out
LOOKS, LOOK_PIXELS, LOOK_WIDER = 8, 64, 1.5  # frames that find it, their longer side, and how much wider they are
FRAMES_A_KEY = 6  # of a walk: with more keys a short video would rush


def capture_path(cameras: Cameras, center: tuple[float, float, float], n_frames: int) -> tuple[Cameras, str]:
    """A path where images were taken, and its kind: an orbit where cameras stand all around what they look at, an arc
    and back where they stand on one side, a walk through them where they look at no common point."""
    _check_frames(n_frames)
    positions, forward = cameras.positions.double().cpu(), cameras.forward.double().cpu()
    target = _focus(positions, forward, center)
    offsets = positions - target
    distances = offsets.norm(dim=-1).clamp_min(1e-9)
    if len(cameras) > 1 and float(-(offsets / distances[:, None] * forward).sum(-1).mean()) < ATTENTION:
        poses = cameras.camera_to_world.cpu()
        n_keys = min(len(poses), max(2, n_frames // FRAMES_A_KEY))
        keys = poses[_walk_order(poses)[torch.linspace(0, len(poses) - 1, n_keys).round().long()]]
        return _pinholes(cameras, interpolate_poses(keys, n_frames, spread_of(poses[..., 3]))), "walk"
    around, turn = torch.atan2(offsets[:, 1], offsets[:, 0]), torch.arange(n_frames) * (2.0 * math.pi / n_frames)
    raised = (offsets[:, 2] / distances).clamp(-STEEPEST, STEEPEST).asin()
    sides = around.sort().values
    gaps = torch.cat([sides[1:] - sides[:-1], sides[:1] + 2.0 * math.pi - sides[-1:]])
    angles, sway, kind = around[0] + turn, torch.zeros_like(turn), "orbit"
    if float(gaps.max()) > RING_GAP:
        middle = sides[gaps.argmax()] + 0.5 * gaps.max() + math.pi  # opposite to where nobody stood
        angles = middle + ARC_REACH * _angles_from(around, middle).abs().quantile(0.9) * turn.sin()
        sway, kind = ARC_REACH * (raised - raised.mean()).abs().mean() * turn.cos(), "arc"
    weights = torch.softmax(-0.5 * (_angles_from(around, angles[:, None]) / BANDWIDTH) ** 2, dim=-1)  # (frames, n)
    elevation, distance = weights @ raised + sway, (weights @ distances.log()).exp()
    return _pinholes(cameras, _around(target, angles, elevation.sin() * distance, elevation.cos() * distance)), kind


def _around(target: Tensor, angles: Tensor, heights: Tensor, radii: Tensor) -> Tensor:
    """Poses (n, 3, 4) about the vertical axis through a target that they look at."""
    eyes = torch.stack([radii * angles.cos(), radii * angles.sin(), heights], dim=-1) + target
    return look_at(eyes.float(), target.float())


def _focus(positions: Tensor, forward: Tensor, center: tuple[float, float, float]) -> Tensor:
    """(3,) the point nearest to all viewing axes; where they are parallel, ahead of them, as far as `center` is."""
    across = torch.eye(3, dtype=torch.float64) - forward[:, :, None] * forward[:, None, :]  # (n, 3, 3) projectors
    middle, prior = positions.mean(0), torch.tensor(center, dtype=torch.float64)
    ahead, spread = forward.mean(0), float((positions - positions.mean(0)).norm(dim=-1).max())
    if float(ahead.norm()) > FACING and float((prior - middle) @ ahead) < spread:
        prior = middle + ahead * max(10.0 * spread, 1e-3)
    pull = 1e-3 * torch.eye(3, dtype=torch.float64)
    return torch.linalg.solve(across.mean(0) + pull, (across @ positions[:, :, None]).mean(0)[:, 0] + pull @ prior)


def _angles_from(angles: Tensor, origin: Tensor) -> Tensor:  # the short way: -pi to pi
    return torch.remainder(angles - origin + math.pi, 2.0 * math.pi) - math.pi


def orbit_path(cameras: Cameras, center: tuple[float, float, float], n_frames: int) -> Cameras:
    """One turn about the vertical axis through `center`, at the mean height and distance of `cameras`. Size and field
    of view are those of the first camera. The path closes: frame n would be frame 0 again."""
    _check_frames(n_frames)
    offsets = cameras.positions.cpu() - torch.tensor(center)  # (n, 3)
    sine = offsets[:, 2].mean() / offsets.norm(dim=-1).mean().clamp_min(1e-6)
    return _turns(cameras, center, sine.clamp(-STEEPEST, STEEPEST).asin().expand(n_frames), 1)


def spiral_path(cameras: Cameras, center: tuple[float, float, float], n_frames: int) -> Cameras:
    """Where all cameras look one way, a circle before the scene; else two turns about `center` that rise from the
    lowest camera to the highest. Size and field of view are those of the first camera."""
    _check_frames(n_frames)
    if float(cameras.forward.cpu().mean(0).norm()) > FACING:
        return capture_path(cameras, center, n_frames)[0]
    offsets = cameras.positions.cpu() - torch.tensor(center)
    raised = (offsets[:, 2] / offsets.norm(dim=-1).clamp_min(1e-6)).clamp(-STEEPEST, STEEPEST).asin()
    return _turns(cameras, center, torch.lerp(raised.min(), raised.max(), torch.arange(n_frames) / n_frames), 2)


def _turns(cameras: Cameras, center: tuple[float, float, float], elevation: Tensor, turns: int) -> Cameras:
    """About the vertical axis through `center` at the mean distance of `cameras`, one frame for each elevation (n,).
    Begins where the first camera stands, so that the video opens on a view the images show."""
    target, n = torch.tensor(center), len(elevation)
    offsets = cameras.positions.cpu() - target
    distance = offsets.norm(dim=-1).mean().clamp_min(1e-6)
    angles = torch.arange(n) * (2.0 * math.pi * turns / n) + torch.atan2(offsets[0, 1], offsets[0, 0])
    return _pinholes(cameras, _around(target, angles, elevation.sin() * distance, elevation.cos() * distance))


def around_object(path: Cameras, model: NerfModel, scene: Scene) -> Cameras:
    """The path with all of an object that was cut out (its images have alpha) inside of every frame: tilted and
    widened, in all frames alike, where it would be cut. A few small and wide frames are looked at for that."""
    if not scene.has_alpha:
        return path
    small = path[torch.linspace(0, len(path) - 1, min(len(path), LOOKS)).round().long()]
    small = small.scaled(min(1.0, LOOK_PIXELS / int(path.size[0].max())))
    small = replace(small, focal=small.focal / LOOK_WIDER)
    small, slopes = small if scene.cameras.times is None else with_times(small, None), []
    for index in range(len(small)):
        row, column = (model.render_image(small, index).opacity.cpu().squeeze(-1) > 0.5).nonzero().double().T
        places = torch.stack([column + 0.5, row + 0.5], dim=-1) - small.center[index]
        slopes.append(places / small.focal[index] * torch.tensor([1.0, -1.0]))
    seen = torch.cat(slopes)  # (n, 2) right and up over ahead
    if not len(seen):
        return path
    (left, low), (right, high) = (seen.sort(0, last).values[int(SPECKS * len(seen))].tolist() for last in (False, True))
    tilt = 0.5 * (math.atan(low) + math.atan(high))
    half = (0.5 * (1.0 - MARGIN) * path.size[0] / path.focal[0]).tolist()  # slopes that a frame shows
    if max(-left, right) <= half[0] and max(-low, high) <= half[1]:
        return path
    # A turn about the axis to the right brings a slope (x, y) to x and tan(atan(y) - tilt), x as far as it is small.
    wider = max(-left / half[0], right / half[0], math.tan(math.atan(high) - tilt) / half[1], 1.0)
    axes, eyes = path.camera_to_world.split([3, 1], dim=-1)
    axes = axes @ turned(0, math.degrees(tilt)).to(axes)
    return replace(path, camera_to_world=torch.cat([axes, eyes], dim=-1), focal=path.focal / wider)


def interpolated_path(cameras: Cameras, n_frames: int) -> Cameras:
    """A smooth path through all cameras: in their order where that is a walk (a video, a row of photographs), else
    from each to its nearest neighbour. Size and field of view are those of the first camera."""
    _check_frames(n_frames)
    poses = cameras.camera_to_world.cpu()
    refuse(poses.shape[0] < 2, "cameras", "at least 2, to fly from one to another", poses.shape[0])
    return _pinholes(cameras, interpolate_poses(poses[_walk_order(poses)], n_frames, spread_of(poses[..., 3])))


def spread_of(positions: Tensor) -> float:
    """The mean distance of positions (n, 3) from their middle; 1 where all are one."""
    return float((positions - positions.mean(0)).norm(dim=-1).mean()) or 1.0


def _walk_order(poses: Tensor) -> Tensor:
    """(n,) the poses' own order where that is a walk, else one that goes from each to the nearest not visited yet."""
    scale, given, tour = spread_of(poses[..., 3]), torch.arange(poses.shape[0]), [0]
    apart = pose_distances(poses[:, None], poses[None], scale)
    for _ in given[1:]:
        apart[:, tour[-1]] = torch.inf
        tour.append(int(apart[tour[-1]].argmin()))
    ordered, toured = (float(pose_distances(way[:-1], way[1:], scale).sum()) for way in [poses, poses[tour]])
    return given if ordered < 1.5 * toured else torch.tensor(tour)


def still_path(cameras: Cameras, index: int, n_frames: int) -> Cameras:
    """One camera again and again, for dynamic scenes; its lens included."""
    _check_frames(n_frames)
    return replace(cameras[torch.full((n_frames,), index)], times=None)


def with_times(path: Cameras, time: float | None) -> Cameras:
    """The path through a dynamic scene: at one time, or sweeping over all of it."""
    n = len(path)
    return replace(path, times=torch.linspace(0.0, 1.0, n) if time is None else torch.full((n,), time))


def _check_frames(n_frames: int) -> None:
    refuse(n_frames < 1, "n_frames", "at least 1", n_frames)


def _pinholes(cameras: Cameras, poses: Tensor) -> Cameras:
    """The first camera's size and field of view, at other poses."""
    width, height = (int(side) for side in cameras.size[0])
    view = 2.0 * math.atan(0.5 * width / float(cameras.focal[0, 0]))
    return replace(Cameras.pinhole(poses, width=width, height=height, field_of_view_x=view), ndc=cameras.ndc)


def quaternions(rotations: Tensor) -> Tensor:
    """(n, 4) unit quaternions w, x, y, z of rotation matrices (n, 3, 3), the nearest if they are rotations only nearly;
    the sign is arbitrary. The largest eigenvector of Bar-Itzhack's symmetric matrix: stable for every rotation."""
    a, b, c, d, e, f, g, h, i = rotations.double().flatten(-2).unbind(-1)
    rows = [a - e - i, b + d, c + g, h - f], [b + d, e - a - i, f + h, c - g]
    rows += [c + g, f + h, i - a - e, d - b], [h - f, c - g, d - b, a + e + i]
    matrix = torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2) / 3.0
    return torch.linalg.eigh(matrix).eigenvectors[..., [3, 0, 1, 2], -1]  # of x, y, z, w


def pose_distances(poses: Tensor, others: Tensor, scale: float) -> Tensor:
    """(n,) how far apart poses (n, 3, 4) are: distance over `scale` plus the angle between their axes in radians."""
    trace = (poses[..., :3] * others[..., :3]).sum((-1, -2))
    return (poses[..., 3] - others[..., 3]).norm(dim=-1) / scale + ((trace - 1.0) * 0.5).clamp(-1.0, 1.0).acos()


def interpolate_poses(keys: Tensor, n_frames: int, scale: float) -> Tensor:
    """(n_frames, 3, 4) from the first key pose (n, 3, 4) to the last, at an even pace. Positions follow a Catmull-Rom
    curve, which passes through every key; rotations turn about one axis from key to key."""
    refuse(keys.shape[0] < 2, "keys", "at least 2 poses", keys.shape[0])
    lengths = pose_distances(keys[:-1], keys[1:], scale).clamp_min(1e-6).double()
    marks = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    place = torch.linspace(0.0, 1.0, n_frames, dtype=torch.float64) * marks[-1]
    index = (torch.searchsorted(marks, place, right=True) - 1).clamp(0, keys.shape[0] - 2)
    share = ((place - marks[index]) / lengths[index]).clamp(0.0, 1.0)[:, None]
    turned, t = rotations(_slerp(quaternions(keys[:, :, :3]), index, share)), share
    p0, p1, p2, p3 = (keys[(index + shift).clamp(0, keys.shape[0] - 1), :, 3].double() for shift in (-1, 0, 1, 2))
    tangents = (t**3 - 2 * t**2 + t) * 0.5 * (p2 - p0) + (t**3 - t**2) * 0.5 * (p3 - p1)
    moved = (2 * t**3 - 3 * t**2 + 1) * p1 + (3 * t**2 - 2 * t**3) * p2 + tangents
    return torch.cat([turned, moved[..., None]], dim=-1).float()


def _slerp(keys: Tensor, index: Tensor, share: Tensor) -> Tensor:
    """Unit quaternions between keys[index] and the next one, the short way."""
    first, second = keys[index], keys[index + 1]
    dots = (first * second).sum(-1, keepdim=True)
    second = torch.where(dots < 0.0, -second, second)
    angle = torch.acos(dots.abs().clamp(max=1.0))
    mixed = ((1.0 - share) * angle).sin() * first + (share * angle).sin() * second
    mixed = torch.where(angle.sin() < 1e-6, torch.lerp(first, second, share), mixed)
    return mixed / mixed.norm(dim=-1, keepdim=True)


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
    refuse(kind not in ("perspective", "pinhole"), f"{file}: camera_type", "perspective", shown(kind))
    sides = {name: number(document.get(name), f"{file}: {name}") for name in ("render_width", "render_height")}
    for name, side in sides.items():
        wrong = not 1 <= side <= MAX_SIDE or side != int(side)
        refuse(wrong, f"{file}: {name}", f"a whole number from 1 to {MAX_SIDE}", shown(document[name]))
    width, height = map(int, sides.values())
    frames = document.get("camera_path")
    if not isinstance(frames, list) or not 0 < len(frames) <= MAX_FRAMES:
        raise InputError(f"{file}: camera_path", f"a list of 1 to {MAX_FRAMES} cameras", shown(frames))
    poses, focals, times = [], [], []
    for index, frame in enumerate(frames):
        where = f"{file}: camera_path[{index}]"
        if not isinstance(frame, dict):
            raise InputError(where, "an object with camera_to_world and fov", shown(frame))
        poses.append(_pose(frame.get("camera_to_world"), f"{where}: camera_to_world"))
        angle = number(frame.get("fov"), f"{where}: fov")
        refuse(not 0.0 < angle < 180.0, f"{where}: fov", "degrees between 0 and 180", shown(frame.get("fov")))
        focals.append(0.5 * height / math.tan(math.radians(angle) * 0.5))
        if frame.get("render_time") is not None:
            times.append(min(1.0, max(0.0, number(frame["render_time"], f"{where}: render_time"))))
    fps = number(document.get("fps", 24), f"{file}: fps")
    refuse(not 0.0 < fps <= 1000.0, f"{file}: fps", "a number from 0 to 1000", shown(document.get("fps")))
    n, back = len(poses), None if to_original is None else torch.linalg.inv(to_original)
    cameras = Cameras(
        camera_to_world=transform_poses(torch.stack(poses), back).float(),
        focal=torch.tensor(focals)[:, None].expand(n, 2).contiguous(),
        center=torch.tensor([[width * 0.5, height * 0.5]]).expand(n, 2).contiguous(),
        size=torch.tensor([[width, height]]).expand(n, 2).contiguous(),
        times=torch.tensor(times) if len(times) == n else None,
    )
    return CameraPath(cameras, fps, _read_crop(document.get("crop"), f"{file}: crop", back))


def through_parser(file: Path, to_original: Tensor | None) -> Tensor:
    """(4, 4) float64 on through a nerfstudio run's dataparser_transforms.json: to the coordinates of its viewer."""
    document, matrix = read_json(file, f"nerfstudio's {PARSER_FILE}"), torch.eye(4, dtype=torch.float64)
    matrix[:3] = _pose(document.get("transform"), f"{file}: transform")
    scale = number(document.get("scale"), f"{file}: scale")
    refuse(not 0.0 < scale < math.inf, f"{file}: scale", "a number > 0", shown(document["scale"]))
    matrix[:3] *= scale
    return matrix if to_original is None else matrix @ to_original.double()


def write_camera_path(
    file: Path, path: CameraPath, to_original: Tensor | None = None, *, keyframes: Cameras | None = None
) -> None:
    """Write a path so that `read_camera_path` and nerfstudio's tools read it; whole or not at all."""
    width, height = (int(side) for side in path.cameras.size[0])
    shape = {"camera_type": "perspective", "render_width": width, "render_height": height}
    pace = {"fps": path.fps, "seconds": len(path.cameras) / path.fps, "is_cycle": False, "smoothness_value": 0.0}
    crop = None if path.crop is None else _crop_document(path.crop, to_original)
    frames = _camera_documents(path.cameras, to_original, "camera_to_world")
    keys = [] if keyframes is None else _camera_documents(keyframes, to_original, "matrix")
    write_json(file, shape | pace | {"crop": crop, "camera_path": frames, "keyframes": keys})


def _pose(value: object, what: str) -> Tensor:
    """(3, 4) float64 from 16 numbers, row after row, or from four rows."""
    flat = value if isinstance(value, list) else []
    if len(flat) in (3, 4) and all(isinstance(row, list) for row in flat):
        flat = [entry for row in flat for entry in row]
    refuse(len(flat) not in (12, 16), what, "16 numbers, a 4x4 matrix row after row", shown(value))
    return rigid(torch.tensor([number(entry, what) for entry in flat[:12]], dtype=torch.float64).view(3, 4), what)


def _camera_documents(cameras: Cameras, to_original: Tensor | None, name: str) -> list[dict[str, Any]]:
    result = []
    for index, pose in enumerate(transform_poses(cameras.camera_to_world.double().cpu(), to_original)):
        width, height = (int(side) for side in cameras.size[index])
        angle = 2.0 * math.degrees(math.atan(0.5 * height / float(cameras.focal[index, 1])))
        entry = {name: [*pose.reshape(-1).tolist(), 0.0, 0.0, 0.0, 1.0], "fov": angle, "aspect": width / height}
        if cameras.times is not None:
            entry["render_time"] = float(cameras.times[index])
        result.append(entry)
    return result


def _angles(turn: Tensor) -> list[float]:
    """Roll, pitch and yaw of a rotation: about x, then y, then z."""
    pitch = math.asin(max(-1.0, min(1.0, -float(turn[2, 0]))))
    if abs(math.cos(pitch)) < 1e-9:
        return [0.0, pitch, math.atan2(-float(turn[0, 1]), float(turn[1, 1]))]
    return [math.atan2(float(turn[2, 1]), float(turn[2, 2])), pitch, math.atan2(float(turn[1, 0]), float(turn[0, 0]))]


def _crop_document(crop: Aabb, to_original: Tensor | None) -> dict[str, Any]:
    matrix = torch.eye(4, dtype=torch.float64) if to_original is None else to_original.double()
    scale = similarity_scale(matrix)
    return {
        "crop_center": transform_points(torch.tensor([crop.center], dtype=torch.float64), matrix)[0].tolist(),
        "crop_scale": [size * scale for size in crop.size],
        "crop_rot": _angles(matrix[:3, :3] / scale),
        "crop_bg_color": {"r": 255, "g": 255, "b": 255},
    }


def _read_crop(value: object, what: str, back: Tensor | None) -> Aabb | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InputError(what, "an object with crop_center and crop_scale", shown(value))
    given: dict[str, Any] = {"crop_center": None, "crop_scale": None, "crop_rot": [0.0, 0.0, 0.0]} | value
    center, size, angles = (_triple(given[f"crop_{key}"], f"{what}.crop_{key}") for key in ("center", "scale", "rot"))
    matrix = torch.eye(4, dtype=torch.float64) if back is None else back
    scale = similarity_scale(matrix)
    x, y, z = (turned(axis, math.degrees(angle)) for axis, angle in enumerate(angles))
    turn = (matrix[:3, :3] / scale) @ z @ y @ x
    if float((turn.abs().amax(0) - 1.0).abs().max()) > 1e-3:
        hint = "give the box by --crop in the coordinates of training instead"
        raise InputError(f"{what}.crop_rot", "a box along the axes of training", str(angles), hint)
    half = (turn.abs() @ torch.tensor(size, dtype=torch.float64)) * (0.5 * scale)
    middle = transform_points(torch.tensor([center], dtype=torch.float64), matrix)[0]
    return Aabb(tuple((middle - half).tolist()), tuple((middle + half).tolist()))


def _triple(value: object, what: str) -> tuple[float, float, float]:
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise InputError(what, "three numbers", shown(value))
    x, y, z = (number(entry, what) for entry in value)
    return x, y, z
