"""A scene and a config so small that a training step costs milliseconds: a ball, seen from a ring of cameras."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from nerfturbo.config import Config, GridConfig, NgpConfig, RenderConfig, TrainConfig
from nerfturbo.data.cameras import Cameras, look_at
from nerfturbo.data.images import ImagePool
from nerfturbo.data.keypoints import Keypoints
from nerfturbo.data.scene import Scene
from nerfturbo.export.video import video_writer
from nerfturbo.types import Aabb

FIELD_OF_VIEW = 0.7
BALL = 0.9

# The same values as `tiny_config`, for the command line.
TINY_FLAGS = [
    *("--grid.resolution", "8", "--field.n-levels", "2", "--field.log2-entries", "8"),
    *("--field.max-resolution", "32", "--field.width", "16"),
    *("--render.steps-per-diagonal", "24", "--train.batch-samples", "512"),
    *("--train.max-rays", "64", "--backend", "reference", "--turntable", "0"),
]


def tiny_config(steps: int = 20, seed: int = 0) -> Config:
    config = Config(
        preset="ngp-cpu",
        grid=GridConfig(resolution=8),
        field=NgpConfig(n_levels=2, log2_entries=8, max_resolution=32, width=16),
        render=RenderConfig(steps_per_diagonal=24),
        train=TrainConfig(steps=steps, batch_samples=512, max_rays=64, seed=seed),
    )
    return replace(config, optim=replace(config.optim, warmup_steps=2, lr=3e-2))


def ball_scene(split: str = "train", *, n_views: int = 4, size: int = 16) -> Scene:
    """A ball at the origin: seen from anywhere it is a disc, coloured by height, transparent around it."""
    turn = 0.3 if split == "train" else 1.1
    angles = torch.arange(n_views) * (2.0 * math.pi / n_views) + turn
    eyes = torch.stack([3.2 * angles.cos(), 3.2 * angles.sin(), torch.full_like(angles, 2.0)], dim=-1)
    poses = look_at(eyes, torch.zeros(3))
    cameras = Cameras.pinhole(poses, width=size, height=size, field_of_view_x=FIELD_OF_VIEW)
    row, column = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centre, focal = (size - 1) / 2.0, 0.5 * size / math.tan(0.5 * FIELD_OF_VIEW)
    disc = ((row - centre) ** 2 + (column - centre) ** 2).sqrt() < BALL / float(eyes[0].norm()) * focal
    picture = torch.zeros(size, size, 4, dtype=torch.uint8)
    picture[..., 0] = 220
    picture[..., 1] = (row * 255 // size).to(torch.uint8)
    picture[..., 2] = 60
    picture[..., 3] = disc.to(torch.uint8) * 255
    picture = picture * disc[..., None].to(torch.uint8)
    images = ImagePool.from_images(picture.expand(n_views, -1, -1, -1).contiguous())
    return Scene(
        name="ball",
        cameras=cameras,
        images=images,
        aabb=Aabb.cube(1.5),
        near=0.0,
        far=8.0,
        split=split,
        source="builtin:ball",
    )


def open_scene(split: str = "train", *, n_views: int = 16, size: int = 16) -> Scene:
    """A ball under an open sky: no alpha and no end, as photos have them. The sky is coloured by direction."""
    turn = 0.3 if split == "train" else 0.8
    angles = torch.arange(n_views) * (2.0 * math.pi / n_views) + turn
    eyes = torch.stack([0.9 * angles.cos(), 0.9 * angles.sin(), torch.full_like(angles, 0.3)], dim=-1)
    cameras = Cameras.pinhole(look_at(eyes, torch.zeros(3)), width=size, height=size, field_of_view_x=1.0)
    pictures = []
    for index in range(n_views):
        rays = cameras.image_rays(index)
        along = -(rays.origins * rays.directions).sum(-1)
        hits = (rays.origins + rays.directions * along[:, None]).norm(dim=-1) < 0.3
        sky = 0.5 + 0.4 * torch.sin(rays.directions * 3.0)
        colors = torch.where(hits[:, None], torch.tensor([0.9, 0.2, 0.1]), sky)
        pictures.append((colors * 255.0).round().to(torch.uint8).view(size, size, 3))
    return Scene(
        name="open",
        cameras=cameras,
        images=ImagePool.from_images(torch.stack(pictures)),
        aabb=Aabb.cube(1.0),
        near=0.05,
        far=30.0,
        split=split,
        source="builtin:open",
        grid_levels=5,
    )


def moving_ball_scene(split: str = "train", *, n_views: int = 80, size: int = 16) -> Scene:
    """A ball that crosses the box, traced exactly; each view is of another moment."""
    angles = torch.arange(n_views) * 2.4 + (0.0 if split == "train" else 1.1)  # the golden angle
    heights = 0.3 + 2.2 * (torch.arange(n_views) * 0.7549).frac()
    eyes = torch.stack([3.2 * angles.cos(), 3.2 * angles.sin(), heights], dim=-1)
    cameras = Cameras.pinhole(look_at(eyes, torch.zeros(3)), width=size, height=size, field_of_view_x=0.6)
    times = (torch.arange(n_views) * 0.5698 + (0.0 if split == "train" else 0.05)).frac()
    cameras = replace(cameras, times=times)
    return Scene(
        name="moving-ball",
        cameras=cameras,
        images=ImagePool.from_images(moving_ball_pictures(cameras)),
        aabb=Aabb.cube(1.5),
        near=0.0,
        far=8.0,
        split=split,
        source="builtin:moving-ball",
    )


def moving_ball_pictures(cameras: Cameras) -> torch.Tensor:
    """(n, H, W, 4) uint8: what the cameras see at their times."""
    pictures = []
    for index in range(len(cameras)):
        rays, width = cameras.image_rays(index), int(cameras.size[index, 0])
        assert rays.times is not None
        time = rays.times
        center = torch.stack([1.0 * time - 0.5, 0.4 - 0.8 * time, torch.zeros_like(time)], dim=-1)
        miss = torch.linalg.cross(rays.origins - center, rays.directions).norm(dim=-1)
        rgb = torch.tensor([0.9, 0.2, 0.1]).expand(len(rays), 3)
        rgba = torch.cat([rgb, torch.ones_like(time)[:, None]], dim=-1) * (miss < 0.8)[:, None]
        pictures.append((rgba * 255.0).to(torch.uint8).view(-1, width, 4))
    return torch.stack(pictures)


def write_video(path: Path, frames: Iterable[torch.Tensor], *, fps: float = 24) -> None:
    """Frames, taken one at a time, to a .gif or .mp4."""
    with video_writer(path, fps=fps) as add:
        for frame in frames:
            add(frame)


def ball_keypoints(scene: Scene) -> Keypoints:
    """The pixels in the middle of each picture of a ball, whose near side is known."""
    index = torch.arange(len(scene))
    rays = scene.cameras.rays(index, *(scene.cameras.size / 2.0).unbind(-1))
    return Keypoints(rays, rays.origins.norm(dim=-1) - 0.9, torch.ones(len(scene)))
