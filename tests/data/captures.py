"""Made-up captures as people leave them: a striped ball on a table in a park, photographed or rendered, from a ring, an
arc, side by side or along a walk, in any coordinates, as COLMAP, Blender or transforms folders."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image

from nerfturbo.data.cameras import look_at, opengl_to_opencv, world_to_camera

Backdrop = Literal["park", "white", "none"]
WIDTH, HEIGHT, FOCAL = 64, 48, 60.0
UP = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)


def ring(count: int = 16, *, span: float = 360.0, pitch: float = 25.0, radius: float = 3.0) -> torch.Tensor:
    """(n, 3, 4) float64: cameras on an arc of `span` degrees that look `pitch` degrees down at the ball."""
    angle = torch.deg2rad(torch.arange(count, dtype=torch.float64) * (span / (count if span == 360.0 else count - 1)))
    down = torch.deg2rad(torch.tensor(pitch, dtype=torch.float64))
    flat = torch.stack([angle.cos(), angle.sin(), torch.zeros_like(angle)], -1)
    return look_at(radius * (flat * down.cos() + UP * down.sin()), torch.zeros(3, dtype=torch.float64))


def side_by_side(count: int = 16) -> torch.Tensor:
    """Cameras that all look along +y."""
    x = torch.linspace(-0.6, 0.6, count, dtype=torch.float64)
    eyes = torch.stack([x, torch.full_like(x, -3.0), 0.2 * (4.0 * x).sin()], -1)
    return look_at(eyes, eyes + torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))


def walk(count: int = 24) -> torch.Tensor:
    """Cameras that look outwards from the middle of things."""
    angle = torch.arange(count, dtype=torch.float64) * (6.28 / count)
    eyes = torch.stack([0.8 * angle.cos(), 0.8 * angle.sin(), 0.1 * (3.0 * angle).sin()], -1)
    return look_at(eyes, eyes * torch.tensor([3.0, 3.0, 0.0], dtype=torch.float64))


def sideways(poses: torch.Tensor, turns: int = 1) -> torch.Tensor:
    """The cameras of images stored after so many quarter turns counter-clockwise: phones held upright write 1."""
    for _ in range(turns):
        right, up, backward, position = poses.unbind(-1)
        poses = torch.stack([-up, right, backward, position], -1)
    return poses


def anywhere(poses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The poses in coordinates as structure from motion gives them, and their up."""
    draw = torch.Generator().manual_seed(4)
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, generator=draw, dtype=torch.float64))
    rotation = rotation * torch.linalg.det(rotation)
    shift = torch.tensor([10.0, -5.0, 3.0], dtype=torch.float64)
    moved = torch.cat([rotation @ poses[:, :, :3], (poses[:, :, 3] @ rotation.T * 7.0 + shift)[:, :, None]], -1)
    return moved, rotation @ UP


def picture(pose: torch.Tensor, backdrop: Backdrop = "park") -> np.ndarray:
    """(HEIGHT, WIDTH, 4) uint8: the ball; a table that ends, and a park at infinity, unless the backdrop is another."""
    matrix = pose.numpy()
    x, y = np.meshgrid(np.arange(WIDTH) + 0.5 - WIDTH / 2, np.arange(HEIGHT) + 0.5 - HEIGHT / 2)
    rays = np.stack([x / FOCAL, -y / FOCAL, -np.ones_like(x)], -1) @ matrix[:, :3].T
    rays /= np.linalg.norm(rays, axis=-1, keepdims=True)
    eye = matrix[:, 3]
    image = np.zeros((HEIGHT, WIDTH, 4))
    image[..., :3], image[..., 3] = 255.0, 0.0 if backdrop == "none" else 255.0
    if backdrop == "park":
        image[..., :3] = _stripes(rays * 6.0)
        t = (-0.5 - eye[2]) / np.where(np.abs(rays[..., 2]) < 1e-9, 1e-9, rays[..., 2])
        hit = eye + t[..., None] * rays
        table = (t > 0.0) & (np.abs(hit[..., :2]).max(-1) < 1.2)
        image[table, :3] = 0.5 * _stripes(hit[table] * 4.0)
    b = rays @ eye
    root = b * b - (eye @ eye - 0.25)
    seen = root > 0.0
    hit = eye + (-b - np.sqrt(np.maximum(root, 0.0)))[..., None] * rays
    image[seen, :3], image[seen, 3] = _stripes(hit[seen] * 9.0), 255.0
    return image.astype(np.uint8)


def _stripes(p: np.ndarray) -> np.ndarray:
    waves = [np.sin(p[..., 0] + 2.0 * p[..., 1]), np.sin(p[..., 1] - p[..., 2]), np.sin(p[..., 2] * 1.5 + p[..., 0])]
    return 128.0 + 100.0 * np.stack(waves, -1)


def points(spread: float = 0.5, count: int = 400) -> torch.Tensor:
    """(n, 3) float64 about the ball."""
    draw = torch.Generator().manual_seed(0)
    return (torch.rand(count, 3, generator=draw, dtype=torch.float64) * 2.0 - 1.0) * spread


def write_images(folder: Path, poses: torch.Tensor, backdrop: Backdrop = "park", *, turns: int = 0) -> list[str]:
    """Of upright cameras; stored after so many quarter turns counter-clockwise."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{index:03d}.png" for index in range(len(poses))]
    for name, pose in zip(names, poses, strict=True):
        image = Image.fromarray(np.rot90(picture(pose, backdrop), turns))
        (image if backdrop == "none" else image.convert("RGB")).save(folder / name)
    return names


def write_transforms(
    folder: Path,
    poses: torch.Tensor,
    *,
    stated: torch.Tensor | None = None,
    backdrop: Backdrop = "park",
    turns: int = 0,
) -> Path:
    """transforms.json; `stated` are the poses it states, where they are not those of the images."""
    names = write_images(folder / "images", poses, backdrop, turns=turns)
    size = (HEIGHT, WIDTH) if turns % 2 else (WIDTH, HEIGHT)
    lens = {"fl_x": FOCAL, "fl_y": FOCAL, "w": size[0], "h": size[1]}
    frames = _frames([f"images/{name}" for name in names], poses if stated is None else stated)
    (folder / "transforms.json").write_text(json.dumps({**lens, "frames": frames}))
    return folder


def write_blender(folder: Path, poses: torch.Tensor, backdrop: Backdrop = "park", *, test: int = 4) -> Path:
    """transforms_train.json and transforms_test.json with camera_angle_x alone."""
    for split, some in (("train", poses[test:]), ("test", poses[:test])):
        names = write_images(folder / split, some, backdrop)
        frames = _frames([f"./{split}/{Path(name).stem}" for name in names], some)
        document = {"camera_angle_x": 2.0 * float(np.arctan(0.5 * WIDTH / FOCAL)), "frames": frames}
        (folder / f"transforms_{split}.json").write_text(json.dumps(document))
    return folder


def _frames(names: list[str], poses: torch.Tensor) -> list[dict]:
    rows = torch.cat([poses, torch.tensor([[[0.0, 0.0, 0.0, 1.0]]], dtype=torch.float64).expand(len(poses), 1, 4)], 1)
    return [{"file_path": n, "transform_matrix": m} for n, m in zip(names, rows.tolist(), strict=True)]


def write_colmap(
    folder: Path, poses: torch.Tensor, cloud: torch.Tensor, *, backdrop: Backdrop = "park", model: str = "sparse/0"
) -> Path:
    """A binary reconstruction by one pinhole camera."""
    names = write_images(folder / "images", poses, backdrop)
    write_model(folder / model, names, poses, cloud)
    return folder


def write_model(sparse: Path, names: list[str], poses: torch.Tensor, cloud: torch.Tensor) -> None:
    sparse.mkdir(parents=True)
    lens = struct.pack("<4d", FOCAL, FOCAL, WIDTH / 2, HEIGHT / 2)
    (sparse / "cameras.bin").write_bytes(struct.pack("<QiiQQ", 1, 1, 1, WIDTH, HEIGHT) + lens)
    data = struct.pack("<Q", len(names))
    for index, (name, matrix) in enumerate(zip(names, world_to_camera(opengl_to_opencv(poses)), strict=True)):
        pose = (*_quaternion(matrix[:, :3].numpy()), *matrix[:, 3].tolist())
        data += struct.pack("<i7di", index + 1, *pose, 1) + name.encode() + b"\0" + struct.pack("<Q", 0)
    (sparse / "images.bin").write_bytes(data)
    data = struct.pack("<Q", len(cloud))
    for index, point in enumerate(cloud.tolist()):
        data += struct.pack("<Q3d3Bd", index, *point, 1, 2, 3, 0.5) + struct.pack("<Qii", 1, 1, 0)
    (sparse / "points3D.bin").write_bytes(data)


def _quaternion(r: np.ndarray) -> list[float]:
    """w x y z of a rotation: the eigenvector of 1 of the matrix that a unit quaternion makes of it."""
    k = np.array(
        [
            [r[0, 0] - r[1, 1] - r[2, 2], r[0, 1] + r[1, 0], r[0, 2] + r[2, 0], r[2, 1] - r[1, 2]],
            [r[0, 1] + r[1, 0], r[1, 1] - r[0, 0] - r[2, 2], r[1, 2] + r[2, 1], r[0, 2] - r[2, 0]],
            [r[0, 2] + r[2, 0], r[1, 2] + r[2, 1], r[2, 2] - r[0, 0] - r[1, 1], r[1, 0] - r[0, 1]],
            [r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1], np.trace(r)],
        ]
    )
    x, y, z, w = np.linalg.eigh(k)[1][:, -1]
    return [float(w), float(x), float(y), float(z)]
