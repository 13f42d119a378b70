"""Training where an estimator places the samples: every preset of that kind, everywhere that the grid's train."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nerfturbo.bench.profile import StageClock, step_timed
from nerfturbo.config import (
    Config,
    GridConfig,
    HierarchySamplerConfig,
    ProposalSamplerConfig,
    UniformSamplerConfig,
    VanillaConfig,
    from_dict,
    to_dict,
)
from nerfturbo.data.batches import PixelSampler
from nerfturbo.data.scene_defaults import MANY_PHOTOS, UNBOUNDED_PRESETS, fitted_config
from nerfturbo.errors import InputError
from nerfturbo.evaluation import align
from nerfturbo.evaluation.align import aligned_to
from nerfturbo.evaluation.evaluate import evaluate
from nerfturbo.evaluation.metrics import constant_baseline_psnr
from nerfturbo.export.frames import FrameMaker, Look
from nerfturbo.ops import composite, use_backend
from nerfturbo.presets import preset
from nerfturbo.rendering import model as model_module
from nerfturbo.rendering.losses import color_loss, distortion_loss, near_weights, scale_near_gradients
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.rendering.render import volume_rendering
from nerfturbo.sampling import (
    ContractedGrid,
    OccupancyGrid,
    ProposalEstimator,
    ProposedSamples,
    RaySpan,
    UniformEstimator,
    proposals,
)
from nerfturbo.training.distributed import RayShare
from nerfturbo.training.loss import Stages, draw_batch, near_gradients, place_samples, render_and_compare
from nerfturbo.training.loss import evaluate as evaluate_field
from nerfturbo.training.trainer import Trainer, load_model
from nerfturbo.types import Aabb, PackedSamples, Rays

from ..tiny import ball_scene, open_scene
from .workers import QUIET, together

NAMES = ["proposal", "proposal-cpu", "hierarchy", "uniform", "contracted"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "LATTICE", 48)
    monkeypatch.setattr(OccupancyGrid, "warmup_steps", 16)


def tiny(name: str, steps: int = 60, **train: Any) -> Config:
    """A preset with everything but its methods made small; "uniform" and "contracted" are kinds without a preset."""
    config = preset(name if name in ("proposal", "proposal-cpu", "hierarchy") else "ngp-cpu")
    sampler = config.sampler
    if isinstance(sampler, ProposalSamplerConfig):
        sizes = {"n_samples": 12, "coarse_samples": (16,) * len(sampler.coarse_samples), "anneal_steps": 10}
        sampler = replace(sampler, **sizes, levels=3, log2_entries=10, resolutions=(8, 16))
    elif name == "hierarchy":
        sampler = HierarchySamplerConfig(n_samples=12, coarse_samples=16)
    elif name == "uniform":
        sampler = UniformSamplerConfig(n_samples=32)
    field: dict[str, Any] = {"n_levels": 4, "n_features": 2, "log2_entries": 11, "max_resolution": 32, "width": 16}
    optim: dict[str, Any] = {"warmup_steps": 2, "lr": 3e-2}
    if isinstance(config.field, VanillaConfig):
        field, optim = {"width": 32, "depth": 2}, optim | {"lr": 1e-2}
    return replace(
        config,
        grid=GridConfig(resolution=8, contraction="cube" if name == "contracted" else "none"),
        field=replace(config.field, **field),
        render=replace(config.render, steps_per_diagonal=32),
        sampler=sampler,
        optim=replace(config.optim, **optim),
        train=replace(config.train, steps=steps, batch_samples=128 * 12, max_rays=128, **train),
    )


def trained(config: Config, scene: Any = None) -> Trainer:
    scene = scene or open_scene()
    trainer = Trainer(fitted_config(config, scene)[0], scene)
    trainer.fit()
    return trainer


@pytest.mark.parametrize("name", NAMES)
def test_every_way_learns_a_scene_without_an_end(name):
    trainer, test = trained(tiny(name, steps=150 if name == "hierarchy" else 100)), open_scene("test", n_views=2)
    assert trainer.model.config.grid.contraction != "none"
    assert isinstance(trainer.model.estimator, UniformEstimator)
    score = evaluate(trainer.model, test, with_ssim=False).psnr
    assert score > constant_baseline_psnr(test) + 6.0


@pytest.mark.parametrize("name", ["proposal", "hierarchy"])
def test_a_bounded_scene_is_not_folded(name):
    trainer = trained(tiny(name, steps=4), ball_scene())
    assert trainer.model.config.grid.contraction == "none"
    assert trainer.model.sampler.span.aabb == ball_scene().aabb


def test_all_parameters_get_gradients_in_half_precision_too():
    for precision in ("fp32", "fp16"):
        with use_backend("reference" if precision == "fp16" else "auto"):
            trainer = trained(tiny("proposal", steps=8, precision=precision))
        moments = {
            name: float(view.abs().max())
            for buffer in trainer.optimizer.buffers
            for name, view in zip(buffer.names, buffer.views(buffer.state.first), strict=True)
        }
        assert any(name.startswith("sampler.fields.1") for name in moments)
        assert all(value > 0.0 for value in moments.values()), moments
        assert trainer.skipped == 0


@pytest.mark.parametrize("rests", [True, False])
def test_the_loss_of_proposals_is_the_one_that_is_written_down(rests: bool) -> None:
    """Resting or not: colours, the distortion in normalised distances, and what proposals learn from."""
    trainer = trained(replace(config := tiny("proposal", steps=8), loss=replace(config.loss, distortion=0.5)))
    model, scene, white = NerfModel(trainer.model.config, trainer.model.bounds), open_scene(), torch.ones(64, 3)
    model.load_state_dict(trainer.model.state_dict())
    model.sampler.rests = rests
    batch = draw_batch(PixelSampler(scene, "cpu", seed=1), 3, RayShare(0, 64))
    samples, _ = place_samples(model, batch.rays, step=3)
    loss, mse = render_and_compare(model, batch, samples, white, None)
    density, rgb = evaluate_field(model, batch.rays, samples, near_gradients(model, samples)).density_and_color()
    out = composite(density, rgb, samples)
    color = out.rgb + (1.0 - out.opacity)[:, None] * white
    expected = color_loss(color, batch.rgba[:, :3], kind=model.config.loss.kind)
    expected = expected + 0.5 * distortion_loss(out.weights, samples.normalized()).mean()
    expected = expected if rests else expected + model.sampler.loss(samples, out.weights)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert float(mse) == pytest.approx(float((color - batch.rgba[:, :3]).square().mean()), rel=1e-4)
    weights = list(model.field.density_net.weights)
    found, wanted = (torch.autograd.grad(value, weights) for value in (loss, expected))
    for own, true in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, true, rtol=1e-3, atol=1e-6)


def test_a_run_goes_on_where_it_stopped_and_renders_the_same(tmp_path: Path):
    config = tiny("proposal", steps=16)
    whole = trained(config)
    half = Trainer(whole.config, open_scene())
    half.begin()
    while half.step < 8:
        half.advance(1)
    half.end()
    folder = half.save(tmp_path)
    again = Trainer(whole.config, open_scene())
    again.resume(folder)
    again.fit()
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)
    loaded, test = load_model(again.save(tmp_path)), open_scene("test")
    with again.optimizer.averaged():
        expected = again.model.render_image(test.cameras, 0).rgb
    torch.testing.assert_close(loaded.render_image(test.cameras, 0).rgb, expected)
    other = Trainer(whole.config, open_scene())
    other.warm_start(tmp_path / folder.name)  # the field with its proposals
    for name, value in half.model.sampler.named_parameters():
        assert torch.equal(dict(other.model.sampler.named_parameters())[name], value)
    tight = loaded.render_image(test.cameras, 0, max_memory=1)  # part by part
    torch.testing.assert_close(tight.rgb, expected)
    rays = test.cameras.image_rays(0)
    torch.testing.assert_close(loaded.render_rays(rays, torch.ones(3)).rgb.clamp(0, 1).view(16, 16, 3), expected)


def test_poses_are_fitted_through_the_proposals():
    model, test = trained(tiny("proposal", steps=100)).model, open_scene("test", n_views=2)
    poses = test.cameras.camera_to_world.clone()
    poses[:, :, 3] += torch.tensor([0.06, -0.05, 0.04])
    moved = replace(test, cameras=replace(test.cameras, camera_to_world=poses))
    found = aligned_to(model, moved, steps=40, n_rays=256)
    true, before, after = (evaluate(model, scene, with_ssim=False).psnr for scene in (test, moved, found))
    assert true > before + 1.0 and after > before + 0.5 * (true - before)


def test_fitted_poses_are_never_worse_than_those_given(monkeypatch: pytest.MonkeyPatch):
    model, test = trained(tiny("proposal", steps=100)).model, open_scene("test", n_views=3)
    monkeypatch.setattr(align, "ALIGN_RATE", 0.5)  # throws every camera out of the scene
    found = aligned_to(model, test, steps=8, n_rays=64)
    before, after = (evaluate(model, scene, with_ssim=False).views for scene in (test, found))
    assert all(new.psnr > old.psnr - 0.1 for old, new in zip(before, after, strict=True))
    assert all(parameter.requires_grad for parameter in model.field.parameters())


def test_frames_and_crops(tmp_path: Path):
    model = trained(tiny("proposal")).model
    cameras = open_scene("test", n_views=2).cameras
    frames = FrameMaker(model, cameras, Look(channels=("color", "depth", "normal")))
    assert set(frames.frame(0)) == {"color", "depth", "normal"}
    whole = frames.image(0)
    cropped = FrameMaker(model, cameras, Look(crop=Aabb.cube(0.2))).image(0)
    assert float(whole.opacity.mean()) > 0.9 > float(cropped.opacity.mean())
    assert float(cropped.opacity[0, 0]) == 0.0  # the corner's ray misses the box: white


def test_auto_takes_proposals_for_scenes_without_an_end():
    auto, scene = preset("ngp"), open_scene()
    given = replace(auto, train=replace(auto.train, steps=77), optim=replace(auto.optim, lr=1e-3))
    config, notes = fitted_config(given, scene, auto=auto)
    assert config.preset == UNBOUNDED_PRESETS["ngp"] == "proposal" and "is unbounded" in notes[0]
    assert (config.train.steps, config.optim.lr) == (77, 1e-3)  # chosen by hand
    assert config.train.batch_samples == preset("proposal").train.batch_samples
    assert config.grid.contraction == "cube" and config.grid.levels == scene.grid_levels
    assert fitted_config(config, scene, auto=auto) == (config, ())  # fitted already
    assert fitted_config(given, ball_scene(), auto=auto) == (given, ())  # one box will do
    assert fitted_config(given, scene)[0].sampler.kind == "grid"  # a preset that was named stays
    chosen = replace(given, grid=replace(given.grid, contraction="sphere"))
    kept = fitted_config(chosen, scene, auto=auto)[0]
    assert kept.grid.contraction == "sphere" and kept.sampler == chosen.sampler


def test_auto_takes_large_tables_for_many_photos(monkeypatch: pytest.MonkeyPatch):
    auto, few = preset("ngp"), open_scene()
    many = few.select([index % len(few) for index in range(MANY_PHOTOS)])
    large = preset("proposal-large")
    config, notes = fitted_config(auto, many, auto=auto)
    assert config.preset == "proposal-large" and config.field == large.field and f"{MANY_PHOTOS} photos" in notes[0]
    assert fitted_config(auto, few, auto=auto)[0].preset == "proposal"
    by_hand = replace(auto, field=replace(auto.field, log2_entries=20))
    assert fitted_config(by_hand, many, auto=auto)[0].field == replace(large.field, log2_entries=20)
    hurried, patient = (replace(auto, train=replace(auto.train, time_limit=limit)) for limit in (60.0, 180.0))
    assert fitted_config(hurried, many, auto=auto)[0].sampler == large.sampler
    exact = replace(patient, train=replace(patient.train, precision="fp32"))
    by_hand = replace(patient, field=replace(auto.field, log2_entries=20))
    gpus = [SimpleNamespace(shared_memory_per_block_optin=227 << 10) for _ in range(2)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    wide = replace(large.field, log2_entries=23, width=128)
    chosen = [(patient, wide), (exact, large.field), (by_hand, replace(large.field, log2_entries=20))]
    for given, field in chosen:
        config, notes = fitted_config(given, many, auto=auto)
        said = "2^23 entries, decayed by 0.08, and networks 128 wide" in notes[0]
        assert config.field == field and (config.optim.table_decay == 0.08) == said == (field == wide)
    gpus[1].shared_memory_per_block_optin = 99 << 10
    assert fitted_config(patient, many, auto=auto)[0].field == large.field
    monkeypatch.undo()
    config, notes = fitted_config(patient, many, auto=auto)
    assert config.sampler == replace(large.sampler, n_samples=64) and "180 s are enough for 64 samples" in notes[0]
    assert config.train.batch_samples == 64 * config.train.max_rays == 64 * large.train.max_rays
    patient = replace(patient, train=replace(patient.train, batch_samples=1 << 20))
    assert fitted_config(patient, many, auto=auto)[0].train.batch_samples == 1 << 20  # chosen by hand
    cpu = preset("ngp-cpu")
    assert fitted_config(cpu, many, auto=cpu)[0].preset == "proposal-cpu"


def test_each_proposal_has_its_own_grid_and_one_number_serves_all():
    scene = open_scene()
    sampler = ProposalSamplerConfig(
        coarse_samples=(8, 8, 8), levels=(2, 3), log2_entries=(6, 9), resolutions=(8, 16), padding=0.5
    )
    config = replace(preset("proposal-cpu"), sampler=sampler)
    made = NerfModel(config, SceneBounds.of(scene)).sampler
    layouts = [density.encoding.layout for density in made.densities]
    assert [(one.n_levels, one.log2_entries, one.max_resolution) for one in layouts] == [
        (2, 6, 8),
        (3, 9, 16),
        (3, 9, 16),
    ]
    assert made.padding == 0.5
    older = to_dict(config)
    older["sampler"] |= {"levels": 2, "log2_entries": 6}
    assert from_dict(Config, older).sampler == replace(sampler, levels=(2,), log2_entries=(6,))
    with pytest.raises(InputError, match=r"sampler\.levels: expected 1 to \d+ numbers"):
        replace(sampler, levels=())


def test_less_padding_draws_closer_to_the_surface():
    wall = lambda positions: 200.0 * ((positions[:, 2] - 4.0).abs() < 0.2).float()  # noqa: E731
    rays = Rays(torch.zeros(1, 3), torch.tensor([[0.0, 0.0, 1.0]]))
    near: list[float] = []
    for padding in (0.1, 0.001):
        found = ProposalEstimator(
            [wall], n_samples=32, coarse_samples=(32,), span=RaySpan(near=0.0, far=8.0), padding=padding
        ).sample(rays)
        near.append(float(((found.midpoints() - 4.0).abs() < 0.6).float().mean()))
    assert near[0] < 0.6 < 0.9 < near[1]


def test_near_gradients_shrink_and_values_stay():
    samples = PackedSamples.from_counts(
        torch.tensor([3]), torch.tensor([0.05, 0.5, 2.0]), torch.tensor([0.15, 0.7, 2.2])
    )
    density = torch.tensor([0.5, 0.5, 0.5], requires_grad=True)
    rgb = torch.rand(3, 3, requires_grad=True)

    def field(t_starts: torch.Tensor, t_ends: torch.Tensor, _: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return rgb, density * (t_ends - t_starts) / 0.1

    plain = volume_rendering(field, samples)
    expected = torch.autograd.grad(plain.rgb.sum(), (rgb, density))
    scaled = volume_rendering(scale_near_gradients(field, 1.0), samples)
    assert torch.equal(plain.rgb, scaled.rgb)
    weights = near_weights(samples.t_starts, samples.t_ends, 1.0)
    torch.testing.assert_close(weights, torch.tensor([0.1**2, 0.6**2, 1.0]))
    found = torch.autograd.grad(scaled.rgb.sum(), (rgb, density))
    torch.testing.assert_close(found[0], expected[0] * weights[:, None])
    torch.testing.assert_close(found[1], expected[1] * weights)


def test_the_other_losses_go_along():
    config = tiny("proposal", steps=25)
    plain = trained(config)
    sure = replace(config, loss=replace(config.loss, opacity=0.5))
    test = open_scene("test", n_views=1)
    found = (t.model.render_image(test.cameras, 0).opacity for t in (trained(sure), plain))
    decided, open_ = (float((opacity * (1.0 - opacity)).mean()) for opacity in found)
    assert decided < open_  # a strong loss on rays that are neither free nor blocked shows


def test_a_stage_of_ones_own_sees_the_proposals():
    seen: list[ProposedSamples] = []

    def look(model: NerfModel, *args: Any, **options: Any) -> Any:
        samples, n = place_samples(model, *args, **options)
        seen.append(samples)  # type: ignore[arg-type]
        return samples, n

    config = fitted_config(tiny("proposal", steps=3), open_scene())[0]
    Trainer(config, open_scene(), stages=Stages(place=look, compare=render_and_compare)).fit()
    assert len(seen) == 3 and seen[0].n_per_ray == 12 and len(seen[0].stages) == 2


def _losses(team: Any, folder: str) -> list[float]:
    losses: list[float] = []
    config = tiny("proposal", steps=10)
    share = replace(config.train, batch_samples=128 * 12 // team.world, max_rays=128 // team.world)
    config = fitted_config(replace(config, train=share), open_scene())[0]
    trainer = Trainer(config, open_scene(), team=team, callbacks=[lambda _, record: losses.append(record.loss)])
    trainer.fit()
    return losses


def test_two_ranks_are_one_with_twice_the_rays(tmp_path: Path):
    from nerfturbo.training.distributed import Team

    both = together(2, _losses, tmp_path)
    assert both[0] == both[1]
    assert both[0] == pytest.approx(_losses(Team(), ""), rel=1e-3)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["proposal", "contracted"])
def test_lightning_has_the_same_curve(name):
    pl = pytest.importorskip("lightning.pytorch", reason="lightning is an extra and not installed")
    from nerfturbo.training.lightning import NerfData, NerfModule

    config = fitted_config(tiny(name, steps=6), open_scene())[0]
    losses: list[float] = []
    Trainer(config, open_scene(), callbacks=[lambda _, record: losses.append(record.loss)]).fit()
    module, found = NerfModule(config), []

    class Losses(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            found.append(float(module.last.loss))

    scenes = (open_scene(), open_scene("test", n_views=2))
    pl.Trainer(**QUIET, accelerator="cpu", max_steps=6, callbacks=[Losses()]).fit(module, NerfData(config, scenes))
    assert found == pytest.approx(losses, rel=1e-4)
    assert isinstance(module.model, NerfModel)
    assert isinstance(module.model.sampler, UniformEstimator)
    assert isinstance(module.model.sampler, ContractedGrid) == (name == "contracted")


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def bits(config: Config, device: str = "cpu") -> dict[str, torch.Tensor]:
    trainer = Trainer(fitted_config(config, open_scene())[0], open_scene(), device=device)
    trainer.fit()
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


@pytest.mark.parametrize("name", ["proposal", "hierarchy", "uniform", "contracted"])
def test_deterministic_mode_repeats_itself(name: str, deterministic: None):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first, second = (bits(tiny(name, steps=12)) for _ in range(2))
    finally:
        torch.set_num_threads(before)
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["proposal", "contracted"])  # cuBLAS of the hierarchy's networks has no such mode
def test_on_a_gpu_deterministic_steps_are_equal_to_the_bit(name: str, deterministic: None):
    recorded, again, eager = (bits(tiny(name, steps=64, capture=c), "cuda") for c in (True, True, False))
    for key, value in recorded.items():
        assert torch.equal(value, again[key]), key
        assert torch.equal(value, eager[key]), key


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["proposal", "hierarchy", "contracted"])
def test_on_a_gpu_the_recorded_step_is_the_eager_one_and_learns(name):
    config, test = fitted_config(tiny(name, steps=256), open_scene())[0], open_scene("test", n_views=2)
    moments = []
    for capture in (True, False):
        one = replace(config, train=replace(config.train, steps=1, capture=capture))
        trainer = Trainer(one, open_scene(), device="cuda")
        trainer.fit()
        moments.append(torch.cat([buffer.state.first for buffer in trainer.optimizer.buffers]))
    assert float((moments[0] - moments[1]).norm()) < 1e-2 * float(moments[1].norm())
    trainer = Trainer(config, open_scene(), device="cuda")
    trainer.fit()
    assert evaluate(trainer.model, test, with_ssim=False).psnr > constant_baseline_psnr(test) + 6.0


@pytest.mark.parametrize("name", ["proposal-cpu", "hierarchy"])
def test_a_profiled_step_is_the_step_of_training(name: str):
    config, states = tiny(name, steps=1), []
    for profiled in (False, True):
        trainer = Trainer(config, ball_scene())
        if profiled:
            step_timed(trainer, StageClock(torch.device("cpu")), 1)
        else:
            trainer.fit()
        states.append({name: value.clone() for name, value in trainer.model.named_parameters()})
    before = dict(Trainer(config, ball_scene()).model.named_parameters())
    moved = [name for name, value in before.items() if not torch.equal(value, states[0][name])]
    assert any(name.startswith("sampler.") for name in moved) and any(name.startswith("field.") for name in moved)
    for name in moved:
        torch.testing.assert_close(states[1][name], states[0][name], msg=name)


@pytest.mark.parametrize("captured", [False, True])
def test_proposals_that_rest_stay_as_they_are(captured: bool, monkeypatch: pytest.MonkeyPatch):
    """Not even momentum moves them, while the field goes on learning."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if captured and device == "cpu":
        pytest.skip("needs a CUDA device, and torch sees none")
    monkeypatch.setattr(proposals, "LEARN_EVERY", 3)
    config = tiny("proposal-cpu", 9, capture=captured)
    trainer = Trainer(replace(config, sampler=replace(config.sampler, anneal_steps=1)), open_scene(), device=device)
    trainer.begin()
    moved, learned = [], []
    for _ in range(9):
        before = {name: value.clone() for name, value in trainer.model.named_parameters()}
        trainer.advance(1)
        trainer.stepper.finish()
        changed = {n for n, v in trainer.model.named_parameters() if not torch.equal(v, before[n])}
        moved.append(any(name.startswith("sampler.") for name in changed))
        learned.append(any(name.startswith("field.") for name in changed))
    assert moved == [True, False, False] * 3
    assert all(learned)
