"""Cameras that are wrong by a known amount are found again; alone, by two ranks and under Lightning."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from camera_errors import CameraErrors, camera_errors
from nerfturbo.config import (
    CameraConfig,
    Config,
    GridConfig,
    GridSamplerConfig,
    NgpConfig,
    OptimConfig,
    PhotoConfig,
    ProposalSamplerConfig,
    RenderConfig,
    TrainConfig,
)
from nerfturbo.data.builtin import builtin_scene
from nerfturbo.data.cameras import Cameras
from nerfturbo.data.scene import Scene
from nerfturbo.evaluation.camera_path import transform_poses
from nerfturbo.evaluation.evaluate import evaluate
from nerfturbo.ops import use_backend
from nerfturbo.rendering import photos
from nerfturbo.rendering.photos import rotation_matrices
from nerfturbo.training.distributed import Team
from nerfturbo.training.step import StepRecord
from nerfturbo.training.trainer import Trainer

from ..tiny import ball_scene, tiny_config
from .workers import alone, config_for, together

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


def small_config(cameras: CameraConfig) -> Config:
    return Config(
        grid=GridConfig(resolution=32, decay=0.8),
        field=NgpConfig(n_levels=8, n_features=4, log2_entries=13, max_resolution=128, width=16),
        sampler=GridSamplerConfig(alpha_thre=0.01),
        render=RenderConfig(steps_per_diagonal=128),
        optim=OptimConfig(lr=2e-2),
        train=TrainConfig(steps=320, batch_samples=1 << 13, max_rays=2048),
        cameras=cameras,
    )


def trained(config: Config, scene: Scene) -> tuple[Trainer, CameraErrors, float]:
    """The trainer, how far its cameras are from the true ones, and dB on test views in the frame of its cameras."""
    trainer = Trainer(config, scene)
    trainer.fit()
    learned = trainer.model.photos
    found = scene.cameras if learned is None else learned.refined(scene.cameras)
    errors, test = camera_errors(found, views("train").cameras, AWAY), views("test")
    poses = transform_poses(test.cameras.camera_to_world.double(), torch.linalg.inv(errors.similarity)).float()
    moved = replace(test, cameras=replace(test.cameras, camera_to_world=poses))
    return trainer, errors, evaluate(trainer.model, moved, with_ssim=False).psnr


def test_a_known_perturbation_is_recovered_and_the_scene_is_sharp_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COARSE_PIXELS": 0.35, "FADE_IN": 0.5, "FIRST_LEVELS": 2}.items():  # for a run of 320 steps
        monkeypatch.setattr(photos, name, value)
    wrong = replace(views("train"), cameras=perturbed(views("train").cameras, DEGREES, SHIFT))
    before = camera_errors(wrong.cameras, views("train").cameras, AWAY)
    _, _, blurred = trained(small_config(CameraConfig()), wrong)
    _, after, sharp = trained(small_config(CameraConfig(refine=True, coarse=True)), wrong)
    assert before.degrees > 1.8 and before.seen > 0.1
    assert after.seen < before.seen / 3.0, (before, after)
    assert after.degrees < before.degrees / 2.0, (before, after)
    assert sharp > blurred + 4.0, (blurred, sharp)


def test_a_focal_length_that_is_wrong_on_one_axis_is_found_and_test_views_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"POSE_PIXELS": 0.1, "LENS_PIXELS": 0.1, "CAMERAS_FROM": 0.1}.items():  # for a run of 320 steps
        monkeypatch.setattr(photos, name, value)

    def stretched(scene: Scene) -> Scene:
        return replace(scene, cameras=replace(scene.cameras, focal=scene.cameras.focal * torch.tensor([0.97, 1.0])))

    config = small_config(CameraConfig(refine=True, focal=True))
    trainer = Trainer(config, stretched(views("train")))
    trainer.fit()
    assert trainer.model.photos is not None
    across, up = trainer.model.photos.focal.detach()[0].tolist()
    assert across - up == pytest.approx(-math.log(0.97), abs=0.012)
    test = stretched(views("test"))
    seen = trainer.model.photos.new_views(test.cameras)
    assert torch.allclose(seen.focal, test.cameras.focal * torch.tensor([across, up]).exp())
    other = replace(test.cameras, focal=test.cameras.focal * 1.2)  # a lens that training did not have
    assert torch.equal(trainer.model.photos.new_views(other).focal, other.focal)
    monkeypatch.setattr(photos.PhotoCorrections, "new_views", lambda self, cameras: cameras)
    without = evaluate(trainer.model, test, with_ssim=False).psnr
    monkeypatch.undo()
    assert evaluate(trainer.model, test, with_ssim=False).psnr > without + 0.3


def lens(scene: Scene, *coefficients: float) -> Scene:
    """The scene as if an OpenCV lens had taken its pictures."""
    distortion = torch.tensor([*coefficients, *[0.0] * (8 - len(coefficients))]).expand(len(scene), 8)
    return replace(scene, cameras=replace(scene.cameras, model="opencv", distortion=distortion))


@pytest.mark.parametrize(
    ("given", "off"), [((), 5e-6), ((0.08, -0.03, 0.0, 0.0, 0.01, 0.02, 0.01), 5e-6), ((-0.3, 0.12), 1e-5)]
)
def test_learned_lenses_are_the_rays_of_training(given: tuple[float, ...], off: float) -> None:
    scene = lens(views("train"), *given) if given else views("train")
    config = small_config(CameraConfig(refine=True, focal=True, distortion=True))
    learned = Trainer(config, scene).model.photos
    assert learned is not None
    with torch.no_grad():
        learned.pose.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(0))
        learned.focal.copy_(torch.tensor([[0.02, 0.02]]))
        learned.radial.copy_(torch.tensor([[0.03, -0.01]]))
        trained = learned.rays(scene.cameras.image_rays(3))
        seen = learned.refined(scene.cameras).image_rays(3)
    assert float((scene.cameras.image_rays(3).directions - seen.directions).norm(dim=-1).max()) > 0.01
    assert torch.allclose(trained.directions, seen.directions, atol=off)
    assert torch.allclose(trained.origins, seen.origins, atol=1e-5)


def test_a_distortion_that_is_wrong_is_found_and_test_views_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"POSE_PIXELS": 0.1, "LENS_PIXELS": 0.1, "CAMERAS_FROM": 0.1}.items():  # for a run of 320 steps
        monkeypatch.setattr(photos, name, value)
    scene, test = lens(views("train"), 0.1), lens(views("test"), 0.1)  # pictures of a pinhole
    trainer = Trainer(small_config(CameraConfig(distortion=True)), scene)
    trainer.fit()
    assert trainer.model.photos is not None
    found = trainer.model.photos.new_views(test.cameras)
    left, before = (cameras.image_rays(0).directions for cameras in (found, test.cameras))
    true = views("test").cameras.image_rays(0).directions
    assert float((left - true).norm(dim=-1).mean()) < 0.6 * float((before - true).norm(dim=-1).mean())
    monkeypatch.setattr(photos.PhotoCorrections, "new_views", lambda self, cameras: cameras)
    without = evaluate(trainer.model, test, with_ssim=False).psnr
    monkeypatch.undo()
    assert evaluate(trainer.model, test, with_ssim=False).psnr > without + 0.3


def test_cameras_rest_while_proposals_do() -> None:
    sampler = ProposalSamplerConfig(n_samples=8, coarse_samples=(16,), anneal_steps=1, levels=3, resolutions=(32,))
    config = replace(tiny_config(steps=18), sampler=sampler, cameras=CameraConfig(True, False, True, True))
    poses: list[torch.Tensor] = []
    trainer = Trainer(config, ball_scene())
    learned = trainer.model.photos
    assert learned is not None
    trainer.callbacks.append(lambda *_: poses.append(learned.pose.detach().clone()))
    with use_backend("reference"):
        trainer.fit()
    moved = [step for step in range(1, 18) if not torch.equal(poses[step], poses[step - 1])]
    assert moved == [step for step in range(1, 18) if trainer.model.sampler.learns(step)] == [8, 16]
    rays = ball_scene().cameras.image_rays(0)
    assert learned.rays(rays).directions.requires_grad is not learned.rests
    learned.rests = not learned.rests
    assert learned.rays(rays).directions.requires_grad is not learned.rests


def train_together(team: Team, folder: str) -> dict[str, Any]:
    """A few steps with everything that is learned per photo; the gradients of the first, and where it ended."""
    config = config_for(team.world, steps=6)
    config = replace(
        config, cameras=CameraConfig(refine=True, focal=True), photo=PhotoConfig(exposure=True, appearance=2)
    )
    first: list[torch.Tensor] = []

    def look(trainer: Trainer, record: StepRecord) -> None:
        if record.step == 1:
            first.append(torch.cat([buffer.state.first for buffer in trainer.optimizer.buffers]).clone())

    trainer = Trainer(config, ball_scene(), callbacks=[look], team=team)
    trainer.fit()
    return {"first": first[0], "state": trainer.model.state_dict()}


def test_two_ranks_learn_what_one_with_twice_the_rays_does(tmp_path: Path) -> None:
    one, two = alone(train_together, tmp_path), together(2, train_together, tmp_path / "two")
    for rank in two:
        assert (rank["first"] - one["first"]).norm() < 1e-5 * one["first"].norm()
    for name, value in two[0]["state"].items():
        assert torch.equal(value, two[1]["state"][name]), name
    assert float(two[0]["state"]["photos.pose"].abs().max()) > 0.0


def test_lightning_learns_what_the_native_trainer_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photos, "FIRST_LEVELS", 1)
    pl = pytest.importorskip("lightning.pytorch")
    from nerfturbo.training.lightning import NerfData, NerfModule

    from .workers import QUIET

    cameras = CameraConfig(refine=True, focal=True)
    config = replace(tiny_config(steps=8), cameras=cameras, photo=PhotoConfig(exposure=True, appearance=2))
    with use_backend("reference"):
        native = Trainer(config, ball_scene())
        native.fit()
        module = NerfModule(config)
        pl.Trainer(max_steps=8, accelerator="cpu", **QUIET).fit(module, NerfData(config, (ball_scene(), ball_scene())))
    assert module.model is not None
    found = module.model.state_dict()
    for name, value in native.model.state_dict().items():
        assert torch.allclose(value.double(), found[name].double(), rtol=1e-5, atol=1e-6), name
