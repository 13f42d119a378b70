"""What is learned per photo: the laws of the corrections, and that a known perturbation is found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nerfturbo.config import CameraConfig, Config, PhotoConfig, VanillaConfig
from nerfturbo.data.cameras import Cameras
from nerfturbo.data.images import ImagePool
from nerfturbo.errors import InputError
from nerfturbo.fields import ngp
from nerfturbo.rendering import photos
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.rendering.photos import PhotoCorrections, gauge_directions, lenses_of, rotation_matrices
from nerfturbo.training.trainer import Trainer, load_model
from nerfturbo.types import Aabb, PackedSamples, Rays
from tests.tiny import ball_scene, tiny_config

ALL = (CameraConfig(refine=True, focal=True), PhotoConfig(exposure=True, appearance=4))


def photos_of(cameras: Cameras, **settings: object) -> PhotoCorrections:
    config = replace(Config(), cameras=CameraConfig(refine=True, **settings))  # type: ignore[arg-type]
    made = PhotoCorrections(config, len(cameras), len(lenses_of(cameras)[0]))
    made.observe(cameras, Aabb.cube(1.5))
    return made


def test_turns_are_rotations_by_the_length_of_their_vector_and_smooth_at_zero() -> None:
    vectors = torch.tensor([[0.0, 0.0, 0.0], [1e-5, 0.0, 0.0], [0.3, -0.2, 0.5], [0.0, 3.0, 0.0]], dtype=torch.float64)
    turns = rotation_matrices(vectors)
    assert torch.allclose(turns @ turns.transpose(1, 2), torch.eye(3, dtype=torch.float64), atol=1e-9)
    cosine = (turns.diagonal(dim1=1, dim2=2).sum(-1) - 1.0) / 2.0
    assert torch.allclose(cosine, vectors.norm(dim=-1).cos(), atol=1e-9)
    assert torch.autograd.gradcheck(rotation_matrices, vectors.requires_grad_())


def test_corrected_rays_are_those_of_the_corrected_cameras() -> None:
    cameras = ball_scene(n_views=5).cameras
    lens = torch.tensor([0.05, -0.02, 1e-3, -2e-3, 0.01, 0.0, 0.0, 0.0]).expand(5, 8).contiguous()
    for lenses in (cameras, replace(cameras, model="opencv", distortion=lens)):
        photos = photos_of(lenses, focal=True)
        with torch.no_grad():
            photos.pose.normal_(std=0.05, generator=torch.Generator().manual_seed(0))
            photos.focal.fill_(0.07)
            if lenses.model == "pinhole":
                photos.focal[:, 1] = -0.03
        index = torch.arange(40) % 5
        x, y = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)) * 16.0
        found, wanted = photos.rays(lenses.rays(index, x, y)), photos.refined(lenses).rays(index, x, y)
        assert torch.allclose(found.origins, wanted.origins, atol=1e-6)
        assert torch.allclose(found.directions, wanted.directions, atol=2e-6)


def test_the_gauge_is_what_moves_all_cameras_as_one() -> None:
    cameras = ball_scene(n_views=6).cameras
    photos, positions = photos_of(cameras), cameras.positions
    turn = torch.tensor([0.2, -0.1, 0.3])  # about the centre, all of them
    moved = 0.15 + 0.02 * (positions - positions.mean(0))
    with torch.no_grad():
        photos.pose.copy_(torch.cat([turn.expand(6, 3), moved / photos.unit], dim=-1))
    refined = photos.refined(cameras)
    assert torch.allclose(refined.camera_to_world, cameras.camera_to_world, atol=1e-6)
    assert not gauge_directions(positions[:1], 1.0).isnan().any()  # one camera has no scale


def test_exposures_multiply_the_odds_and_have_no_mean() -> None:
    config = replace(tiny_config(), photo=PhotoConfig(exposure=True))
    photos = NerfModel(config, SceneBounds.of(ball_scene())).photos
    assert photos is not None
    with torch.no_grad():
        photos.exposure.copy_(torch.arange(-6.0, 6.0).view(4, 3) * 0.1)
    gains = torch.tensor([[-0.42, -0.3, -0.2], [-0.12, -0.06, -0.02], [0.0, 0.02, 0.06], [0.12, 0.2, 0.3]])
    assert torch.allclose(photos.log_gains(), gains - gains.mean(0), atol=1e-6)
    samples = PackedSamples.from_counts(torch.tensor([2, 0, 1]), torch.zeros(3), torch.ones(3))
    rays = Rays(torch.zeros(3, 3), torch.eye(3), camera_indices=torch.tensor([3, 1, 0]))
    raw = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    out = photos.expose(raw, rays, samples)
    rgb, density = photos.exposed(lambda *_: (raw[:, :3].sigmoid(), raw[:, 3]), rays)(
        samples.t_starts, samples.t_ends, samples.ray_indices
    )
    assert torch.allclose(out[:, :3].sigmoid(), rgb, atol=1e-6) and torch.equal(out[:, 3], density)
    weights = torch.rand(3, 3, generator=torch.Generator().manual_seed(1))
    (fused,) = torch.autograd.grad((out[:, :3].sigmoid() * weights).sum(), photos.exposure)
    (plain,) = torch.autograd.grad((rgb * weights).sum(), photos.exposure)
    assert torch.allclose(fused, plain, atol=1e-6) and float(fused.abs().max()) > 1e-3


def test_levels_fade_in_from_coarse_to_fine_and_reading_agrees_with_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photos, "FADE_IN", 0.5)
    monkeypatch.setattr(photos, "FIRST_LEVELS", 1)
    config = replace(tiny_config(), cameras=CameraConfig(refine=True, coarse=True))
    model = NerfModel(replace(config, field=replace(config.field, n_levels=4)), SceneBounds.of(ball_scene()))
    assert model.photos is not None
    for progress, expected in ((0.0, [1.0, 0.0, 0.0, 0.0]), (0.25, [1.0, 1.0, 0.5, 0.0]), (0.6, [1.0] * 4)):
        model.set_progress(progress)
        assert torch.allclose(model.photos.level_weights(), torch.tensor(expected), atol=1e-6)
        points = torch.rand(50, 3, generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
        with torch.no_grad():
            model.field.encoding.table.uniform_(-1.0, 1.0, generator=torch.Generator().manual_seed(2))  # type: ignore[union-attr]
            read = model.field.density(points)
        assert torch.allclose(read, model.field.density(points).detach(), rtol=1e-4)


def test_cameras_learn_late_unless_they_are_coarse_and_then_their_lenses_after_all_levels() -> None:
    cameras, rays = ball_scene(n_views=3).cameras, ball_scene(n_views=3).cameras.image_rays(1)
    rates = {}
    for coarse, learns in ((False, (("", 0.29), ("pose focal", 0.3))), (True, (("pose", 0.39), ("pose focal", 0.4)))):
        made = photos_of(cameras, coarse=coarse, focal=True)
        for names, progress in learns:
            made.progress.fill_(progress)
            found = torch.autograd.grad(made.rays(rays).directions[:, 0].sum(), [made.pose, made.focal])
            moving = zip(("pose", "focal"), found, strict=True)
            assert " ".join(name for name, value in moving if value.any()) == names
        model = NerfModel(replace(tiny_config(), cameras=made.config.cameras), SceneBounds.of(ball_scene(n_views=3)))
        assert (model.field.level_weights is not None) == coarse  # type: ignore[union-attr]
        rates[coarse] = made.learning_rates
    pixel = 1.0 / float(cameras.focal.median())
    assert rates[False] == pytest.approx({"pose": photos.POSE_PIXELS * pixel, "focal": photos.LENS_PIXELS * pixel})
    assert rates[True] == pytest.approx({"pose": photos.COARSE_PIXELS * pixel, "focal": photos.LENS_PIXELS * pixel})
    with pytest.raises(InputError, match=r"add --cameras\.refine"):
        CameraConfig(coarse=True)


def test_rendering_has_the_mean_look_or_that_of_a_photo() -> None:
    config = replace(tiny_config(), photo=PhotoConfig(appearance=3))
    model = NerfModel(config, SceneBounds.of(ball_scene()))
    assert model.photos is not None
    with torch.no_grad():
        model.photos.appearance.normal_(generator=torch.Generator().manual_seed(0))
    here, ahead = torch.zeros(4, 3), torch.tensor([[0.0, 0.0, 1.0]]).expand(4, 3)
    own = model.field(here, ahead, None, torch.arange(4))[0].detach()
    with torch.no_grad():
        mean = model.field(here, ahead, None, torch.arange(4))[0]  # another set of cameras' numbers, say
        model.photos.shown = 2
        shown = model.field(here, ahead)[0]
    assert torch.equal(mean, mean[:1].expand_as(mean)) and not torch.allclose(own[1], own[2])
    assert torch.allclose(shown[0], own[2])
    assert torch.allclose(own[0], mean[0])  # of four rays in training one has the look of new views


def test_new_views_have_the_look_that_rays_of_training_had() -> None:
    made = photos.PhotoCorrections(replace(tiny_config(), photo=PhotoConfig(appearance=3)), 5, 1)
    with torch.no_grad():
        made.appearance.normal_().add_(7.0)
        zero = made.look(None, 2)
    assert torch.equal(zero, torch.zeros(2, 3))
    rows = made.look(torch.arange(5).repeat(4), 20)
    mean = torch.arange(20) % photos.MEAN_EVERY == 0
    assert torch.equal(rows[mean], torch.zeros(5, 3)) and float(rows[~mean].abs().min()) > 0.0
    rows.sum().backward()
    assert made.appearance.grad is not None and float(made.appearance.grad.sum().abs()) < 1e-5  # the mean stays


def test_fields_that_cannot_do_it_say_so() -> None:
    bounds, fisheye = SceneBounds.of(ball_scene()), ball_scene().cameras
    vanilla = replace(tiny_config(), photo=PhotoConfig(appearance=2))
    with pytest.raises(InputError, match=r"photo\.appearance: expected a field with `read_rays`"):
        NerfModel(replace(vanilla, field=VanillaConfig(width=16, depth=2)), bounds)
    with pytest.raises(InputError, match="training photos"):
        NerfModel(vanilla, SceneBounds(Aabb.cube(1.0), 0.0, 4.0))
    fisheye = replace(fisheye, model="fisheye", distortion=torch.zeros(4, 8))
    with pytest.raises(InputError, match=r"cameras\.focal: expected lenses of the kinds pinhole, opencv"):
        photos_of(fisheye, focal=True)
    with pytest.raises(InputError, match="the 4 cameras of training"):
        photos_of(ball_scene().cameras).refined(ball_scene(n_views=3).cameras)


def test_a_checkpoint_keeps_them_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    config = replace(tiny_config(steps=8), cameras=ALL[0], photo=ALL[1])
    whole, first, second = (Trainer(config, ball_scene()) for _ in range(3))
    whole.fit()
    for _ in range(3):
        first.advance(1)
    second.resume(first.save(tmp_path))
    second.fit()
    for name, value in whole.model.state_dict().items():
        assert torch.allclose(value.float(), second.model.state_dict()[name].float(), atol=1e-6), name
    loaded = load_model(second.save(tmp_path))
    assert loaded.photos is not None and float(loaded.photos.pose.detach().abs().max()) > 0.0
    cameras = whole.scene.cameras
    assert torch.equal(loaded.photos.refined(cameras).focal, second.model.photos.refined(cameras).focal)  # type: ignore[union-attr]


def test_a_checkpoint_with_one_focal_factor_a_lens_still_opens(tmp_path: Path) -> None:
    config = replace(tiny_config(steps=8), cameras=ALL[0], photo=ALL[1])
    trainer, again = (Trainer(config, ball_scene()) for _ in range(2))
    trainer.advance(1)
    with torch.no_grad():
        trainer.model.photos.focal.fill_(0.02)  # type: ignore[union-attr]
    folder = trainer.save(tmp_path)
    tensors = load_file(folder / "tensors.safetensors")
    for name in [name for name in tensors if "photos.focal" in name]:
        tensors[name] = tensors[name][:, 0].clone()
    for name in ("axes", "intrinsics"):
        del tensors[f"model.photos.{name}"]
    tensors["model.photos.forwards"] = torch.zeros(4, 3)
    save_file(tensors, folder / "tensors.safetensors")
    again.resume(folder)
    assert again.model.photos is not None
    assert torch.allclose(again.model.photos.focal, torch.full((1, 2), 0.02))
    assert torch.equal(again.model.photos.axes, trainer.model.photos.axes)  # type: ignore[union-attr]
    again.advance(1)
    assert load_model(folder).photos is not None


def test_switched_off_there_is_nothing() -> None:
    trainer = Trainer(tiny_config(steps=1), ball_scene())
    assert trainer.model.photos is None and trainer.model.keypoints is None
    assert not any("photos" in name for name in trainer.model.state_dict())
    assert len(trainer.optimizer.buffers) == 2 and trainer.model.field.level_weights is None  # type: ignore[union-attr]


def test_known_exposures_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pictures of a ball, each brightened or darkened by a known amount per channel: direction and amount of all
    of them come back, as near as 12 small pictures tell exposure from the colour of the ball."""
    n = 12
    monkeypatch.setattr(photos, "PHOTO_LR", 5e-2)
    monkeypatch.setattr(ngp, "BASE_RESOLUTION", 4)  # so coarse that it cannot learn each photo on its own
    scene, signs = ball_scene(n_views=n), torch.tensor([1.0, -1.0] * (n // 2))  # neighbours disagree
    gains = 0.5 * signs[:, None] * torch.tensor([1.0, -0.5, 0.25])
    pictures = torch.stack([scene.images.image(index) for index in range(n)])
    odds = pictures[..., :3] * gains.exp()[:, None, None]
    pictures[..., :3] = odds / (1.0 - pictures[..., :3] + odds)
    pool = ImagePool.from_images((pictures * 255.0 + 0.5).to(torch.uint8))
    config = replace(tiny_config(steps=250), photo=PhotoConfig(exposure=True))
    config = replace(config, field=replace(config.field, max_resolution=16))
    trainer = Trainer(config, replace(scene, images=pool))
    trainer.fit()
    assert trainer.model.photos is not None
    found = trainer.model.photos.log_gains().detach()
    assert float((found * gains).sum() / (gains * gains).sum()) == pytest.approx(1.0, abs=0.2)  # how much of them
    assert float((found - gains).square().mean().sqrt()) < 0.45 * float(gains.square().mean().sqrt()), (found, gains)
    assert float(found.mean(0).abs().max()) < 1e-5  # the mean is the scene's own brightness
