"""The cameras of a run as a `transforms.json` in the coordinates of the scene's file, learned where they were."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..data.cameras import Cameras, transform_points, transform_poses, turn_between
from ..data.formats.transforms import COEFFICIENTS
from ..data.images import image_size, save_image
from ..data.json_checks import read_json
from ..data.scene import Scene
from ..errors import InputError
from ..evaluation.camera_path import PARSER_FILE, CameraPath, through_parser, write_camera_path
from ..evaluation.run_folder import write_json

MODELS = {"pinhole": "PINHOLE", "opencv": "OPENCV", "fisheye": "OPENCV_FISHEYE"}
KEPT = ("aabb_scale", "scale", "offset")  # of instant-ngp's files: without them its box would be lost


def write_cameras(path: Path, scenes: Sequence[Scene]) -> int:
    """Write the views of all splits, each listed as the one it belongs to; whole or not at all. Returns their number.
    File paths are relative to the folder of the file."""
    frames: list[dict[str, Any]] = []
    lists: dict[str, list[str]] = {}
    for scene in scenes:
        if scene.cameras.model not in (*MODELS, "mixed"):
            hint = "undistort the images first"
            raise InputError("cameras", "lenses of the kinds " + ", ".join(MODELS), scene.cameras.model, hint)
        for frame in _frames(scene, path.resolve().parent):
            frames.append(frame)
            lists.setdefault(f"{scene.split}_filenames", []).append(frame["file_path"])
    original = Path(scenes[0].source) / "transforms.json"
    kept = read_json(original, "a transforms file") if original.is_file() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {name: kept[name] for name in KEPT if name in kept} | lists | {"frames": frames})
    return len(frames)


def write_nerfstudio(folder: Path, scenes: Sequence[Scene], path: Cameras) -> int:
    """Write transforms.json, images that are no files yet, and a camera path in the coordinates that nerfstudio's data
    parser makes of it unless told otherwise; dataparser_transforms.json leads there. Returns the number of cameras."""
    written = write_cameras(folder / "transforms.json", scenes)
    for scene in (one for one in scenes if not one.files):
        (folder / scene.split).mkdir(exist_ok=True)
        for index in range(len(scene)):
            save_image(folder / scene.split / f"r_{index}.png", scene.images.image_bytes(index))
    document = read_json(folder / "transforms.json", "a transforms file")
    write_json(folder / "transforms.json", document | {"val_filenames": document.get("test_filenames", [])})
    poses = torch.tensor([frame["transform_matrix"] for frame in document["frames"]], dtype=torch.float64)
    transform, up = torch.eye(4, dtype=torch.float64), torch.nn.functional.normalize(poses[:, :3, 1].mean(0), dim=0)
    transform[:3, :3] = turn_between(up, torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))
    transform[:3, 3] = -transform[:3, :3] @ poses[:, :3, 3].mean(0)
    scale = 1.0 / max(1e-9, float(transform_points(poses[:, :3, 3], transform).abs().max()))
    write_json(folder / PARSER_FILE, {"transform": transform[:3].tolist(), "scale": scale})
    to_parser = through_parser(folder / PARSER_FILE, scenes[0].to_original)
    write_camera_path(folder / "camera_path.json", CameraPath(path), to_parser)
    return written


def _frames(scene: Scene, folder: Path) -> list[dict[str, Any]]:
    cameras = scene.cameras.to("cpu")
    if scene.files:  # as large as they are; sides in the camera's order, whatever EXIF says of them
        pairs = [(Path(file), size) for file, size in zip(scene.files, cameras.size.tolist(), strict=True)]
        sizes = [sorted(image_size(file), reverse=w > h) if file.is_file() else [w, h] for file, (w, h) in pairs]
        cameras = cameras.resized(torch.tensor(sizes))
    result = []
    for index, pose in enumerate(transform_poses(cameras.camera_to_world.double(), scene.to_original)):
        name = f"./{scene.split}/r_{index}.png"  # as `nerfturbo scene write` names them
        if scene.files:
            name = Path(os.path.relpath(Path(scene.files[index]).resolve(), folder)).as_posix()
        (fx, fy), (cx, cy) = cameras.focal[index].tolist(), cameras.center[index].tolist()
        width, height = cameras.size[index].tolist()
        values = [] if cameras.distortion is None else cameras.distortion[index].tolist()
        model = ("fisheye" if values[8] else "opencv") if cameras.model == "mixed" else cameras.model
        frame: dict[str, Any] = {"file_path": name, "camera_model": MODELS[model], "w": width, "h": height}
        frame |= {"fl_x": fx, "fl_y": fy, "cx": cx, "cy": cy}
        frame |= dict(zip(COEFFICIENTS[model], values, strict=False))
        if cameras.times is not None:
            frame["time"] = float(cameras.times[index])
        result.append(frame | {"transform_matrix": [*pose.tolist(), [0.0, 0.0, 0.0, 1.0]]})
    return result
