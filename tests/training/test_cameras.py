"""Cameras that are wrong by a known amount are found again; alone, by two ranks and under Lightning."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch

from nerfturbo.config import CameraConfig, Config, FieldConfig, GridConfig, OptimConfig, RenderConfig, TrainConfig
from nerfturbo.data.builtin import builtin_scene
from nerfturbo.data.cameras import Cameras
from nerfturbo.data.scene import Scene
from nerfturbo.evaluation.align import CameraErrors, camera_errors
from nerfturbo.evaluation.camera_file import transform_poses
from nerfturbo.evaluation.evaluate import evaluate
from nerfturbo.rendering.photos import rotation_matrices
from nerfturbo.training.trainer import Trainer

AWAY = 4.0  # of the built-in scenes' cameras
DEGREES, SHIFT = 2.0, 0.1


def perturbed(cameras: Cameras, degrees: float, shift: float, seed: int = 3) -> Cameras:
    """Every camera turned and moved by as much, in random directions."""
    generator = torch.Generator().manual_seed(seed)
    axes, moves = (
        torch.nn.functional.normalize(torch.randn(len(cameras), 3, generator=generator), dim=-1) for _ in range(2)
    )
    poses = cameras.camera_to_world
    turned = rotation_matrices(axes * math.radians(degrees)) @ poses[:, :, :3]
    return replace(cameras, camera_to_world=torch.cat([turned, poses[:, :, 3:] + shift * moves[:, :, None]], dim=-1))


@cache
def views(split: str) -> Scene:
    return builtin_scene("toybox", split, resolution=64, n_views=20 if split == "train" else 3)  # type: ignore[arg-type]


def small_config(refine: bool, focal: bool = False) -> Config:
    return Config(
        grid=GridConfig(resolution=32, warmup_steps=64, decay=0.8),
        field=FieldConfig(n_levels=8, n_features=4, log2_entries=13, base_resolution=16, max_resolution=128, width=16),
        render=RenderConfig(steps_per_diagonal=128, alpha_thre=0.01),
        optim=OptimConfig(lr=2e-2, weight_decay=0.0, skip_untouched=False),
        train=TrainConfig(steps=320, batch_samples=1 << 13, max_rays=2048, initial_rays=128),
        cameras=CameraConfig(refine=refine, focal=focal, lr=4e-3, fade_in=0.5, first_levels=2),
    )


def trained(config: Config, scene: Scene) -> tuple[Trainer, CameraErrors, float]:
    """The trainer, how far its cameras are from the true ones, and dB on test views in the frame of its cameras."""
    trainer = Trainer(config, scene)
    trainer.fit()
    photos = trainer.model.photos
    found = scene.cameras if photos is None else photos.refined(scene.cameras)
    errors, test = camera_errors(found, views("train").cameras, AWAY), views("test")
    poses = transform_poses(test.cameras.camera_to_world.double(), torch.linalg.inv(errors.similarity)).float()
    moved = replace(test, cameras=replace(test.cameras, camera_to_world=poses))
    return trainer, errors, evaluate(trainer.model, moved, with_ssim=False).psnr


def test_a_known_perturbation_is_recovered_and_the_scene_is_sharp_again() -> None:
    wrong = replace(views("train"), cameras=perturbed(views("train").cameras, DEGREES, SHIFT))
    before = camera_errors(wrong.cameras, views("train").cameras, AWAY)
    _, _, blurred = trained(small_config(refine=False), wrong)
    _, after, sharp = trained(small_config(refine=True), wrong)
    assert before.degrees > 1.8 and before.seen > 0.1
    assert after.seen < before.seen / 3.0, (before, after)
    assert after.degrees < before.degrees / 2.0, (before, after)
    assert sharp > blurred + 4.0, (blurred, sharp)
