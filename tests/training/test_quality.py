"""The switches of quality: each changes what its name says, none costs anything while it is off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ablation import QUALITY, ablation_cases
from nerfturbo.config import Config, LossConfig, VanillaConfig
from nerfturbo.errors import InputError
from nerfturbo.evaluation.evaluate import evaluate
from nerfturbo.export.onnx import _plain_copy
from nerfturbo.fields import AntiAliasedNGP, InstantNGP, ngp
from nerfturbo.ops import composite, use_backend, visibility
from nerfturbo.ops.composite_loss import RayLossRule, ray_losses
from nerfturbo.ops.positions import fold
from nerfturbo.presets import preset
from nerfturbo.rendering.frame import FrameRenderer
from nerfturbo.rendering.model import NerfModel
from nerfturbo.rendering.render import field_functions, ray_marching, volume_rendering
from nerfturbo.training import Trainer
from nerfturbo.training import loss as chain
from nerfturbo.training.optim import level_decays, table_levels
from nerfturbo.types import PackedSamples, Rays

from ..tiny import ball_scene, tiny_config


@pytest.fixture(autouse=True)
def _kernels() -> object:
    with use_backend("auto"):
        yield


def changed(config: Config, stage: str, **values: object) -> Config:
    return replace(config, **{stage: replace(getattr(config, stage), **values)})


def coarse(config: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    """With a field that so few rays teach in 50 steps."""
    monkeypatch.setattr(ngp, "BASE_RESOLUTION", 4)
    return changed(config, "field", max_resolution=16)


def one_loss(config: Config) -> tuple[Trainer, chain.StepResult]:
    made = Trainer(config, ball_scene())
    made.model.grid.update(0, made.model.field.density, all_cells=True)
    batch = made.pixels.draw(0, 64)
    background = chain.draw_background(config, 0, 64, made.device)
    return made, chain.compute_loss(made.model, batch, background, step=0)


def test_without_weights_no_regulariser_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a regulariser without weight was computed")

    monkeypatch.setattr(chain, "ray_losses", never)
    monkeypatch.setattr(chain, "weights_loss", never)
    one_loss(tiny_config())
    with pytest.raises(AssertionError, match="without weight"):
        one_loss(replace(tiny_config(), loss=LossConfig(distortion=1.0)))


def test_regularisers_add_their_own_value(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    rules: list[tuple[RayLossRule, float]] = []

    def watched(raw, samples, rule, **options):
        value = ray_losses(raw, samples, rule, **options)
        rules.append((rule, float(value.detach())))
        return value

    monkeypatch.setattr(chain, "ray_losses", watched)
    _, plain = one_loss(config)
    made, more = one_loss(replace(config, loss=LossConfig(distortion=0.1, opacity=0.2)))
    rule, value = rules[0]
    assert rule == RayLossRule(0.1, 0.2, made.model.bounds.aabb.diagonal) and value > 0.0
    assert float(more.loss.detach()) == pytest.approx(float(plain.loss.detach()) + value, rel=1e-5)
    assert float(more.mse) == pytest.approx(float(plain.mse), rel=1e-5)


def test_any_field_is_regularised() -> None:
    field = VanillaConfig(width=16, depth=2)
    config = replace(tiny_config(steps=2), field=field)
    _, plain = one_loss(config)
    made, more = one_loss(replace(config, loss=LossConfig(distortion=0.1, opacity=0.1)))
    assert more.loss > plain.loss
    more.loss.backward()
    assert all(parameter.grad is not None for parameter in made.model.parameters())


def test_opacity_entropy_makes_rays_decide() -> None:
    """Trained on nothing else, rays end nearer to 0 or 1 than they began."""
    doubt = []
    for weight in (0.0, 1.0):
        made = Trainer(replace(tiny_config(steps=25), loss=LossConfig(opacity=weight)), ball_scene())
        made.fit()
        opacity = made.model.render_rays(made.pixels.draw(0, 256).rays).opacity
        doubt.append((opacity * (1.0 - opacity)).mean().item())
    assert doubt[1] < 0.7 * doubt[0]


def test_table_decay_is_the_gradient_of_the_mean_square_of_levels() -> None:
    config = changed(tiny_config(), "optim", table_decay=0.1)
    made = Trainer(config, ball_scene())
    (buffer,) = [buffer for buffer in made.optimizer.buffers if buffer.names[0].endswith("table")]
    layout = made.model.field.encoding.layout
    table = made.model.field.encoding.table.detach().clone().requires_grad_()
    loss = sum(table[level.offset : level.offset + level.size].square().mean() for level in layout.levels)
    (wanted,) = torch.autograd.grad(0.1 * loss, table)
    decayed = torch.cat([decay * buffer.values[first:last] for first, last, decay in buffer.rule.decays])
    assert torch.allclose(decayed.view_as(table), wanted, rtol=1e-5, atol=0.0)
    assert level_decays(table_levels(made.model, buffer.parameters), 0.0) == ()
    made.fit()
    plain = Trainer(tiny_config(), ball_scene())
    plain.fit()
    assert made.model.field.encoding.table.square().mean() < 0.9 * plain.model.field.encoding.table.square().mean()


def test_levels_of_one_size_share_a_launch() -> None:
    config = tiny_config()
    config = replace(config, field=replace(config.field, n_levels=6, max_resolution=64, log2_entries=13))
    made = Trainer(changed(config, "optim", table_decay=1.0), ball_scene())
    decays = made.optimizer.buffers[1].rule.decays
    sizes = [level.size * config.field.n_features for level in made.model.field.encoding.layout.levels]
    assert [last - first for first, last, _ in decays] == [sizes[0], sum(sizes[1:])]
    assert [decay for _, _, decay in decays] == [2.0 / sizes[0], 2.0 / sizes[1]]


def test_table_decay_leaves_a_thin_start_alone() -> None:
    """Where no ray passes, the feature that makes the field thin would decay to zero, and its fog come back."""
    config = changed(tiny_config(steps=20), "optim", table_decay=0.1)
    config = changed(config, "field", initial_density=0.25, log2_entries=13)  # the coarsest level is dense
    made = Trainer(config, ball_scene())
    coarsest, *finer = made.optimizer.buffers[1].rule.decays
    assert coarsest == (0, made.model.field.encoding.layout.levels[0].size * config.field.n_features, 0.0)
    assert all(decay > 0.0 for _, _, decay in finer)
    field = made.model.field
    begun = field.encoding.table[:, 0].clone()
    made.fit()
    untouched = made.optimizer.buffers[1].state.second.view_as(field.encoding.table)[:, 0] == 0.0
    untouched[field.encoding.layout.levels[0].size :] = False
    assert bool(untouched.any())
    assert torch.equal(field.encoding.table[untouched, 0], begun[untouched])


def test_thinning_trains_fewer_samples_of_the_same_rays() -> None:
    config = tiny_config()
    _, plain = one_loss(config)
    _, thinned = one_loss(changed(config, "sampler", merge_weak_samples=0.3))
    assert int(thinned.n_marched) == int(plain.n_marched)
    assert int(thinned.n_rays) == int(plain.n_rays)
    assert 0 < int(thinned.n_samples) < 0.6 * int(plain.n_samples)
    vanilla = replace(config, field=VanillaConfig(width=16, depth=2))
    assert int(one_loss(changed(vanilla, "sampler", merge_weak_samples=0.3))[1].n_samples) < 0.6 * int(plain.n_samples)


def test_thinned_training_still_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    config = coarse(tiny_config(steps=50), monkeypatch)
    made = Trainer(changed(config, "sampler", merge_weak_samples=0.05), ball_scene())
    losses: list[float] = []
    made.callbacks.append(lambda _, record: losses.append(record.mse))
    made.fit()
    assert sum(losses[-5:]) < 0.4 * sum(losses[:5])


def test_pictures_in_finer_steps_and_with_more_rays() -> None:
    scene, config = ball_scene("test"), tiny_config(steps=25)
    made = Trainer(config, ball_scene())
    made.fit()
    model = made.model.eval()
    plain = model.render_image(scene.cameras, 0)
    growing = changed(changed(config, "render", eval_refine=4), "sampler", cone_angle=0.1)
    other = NerfModel(growing, model.bounds)
    assert other.settings.render_step_size == pytest.approx(other.grid.step_size / 4)
    assert other.settings.cone_angle == pytest.approx(0.1 / 4)
    assert other.sampler.settings.cone_angle == 0.1 and other.sampler.settings.render_step_size is None
    model.config = changed(config, "render", eval_refine=4)
    fine = model.render_image(scene.cameras, 0)
    finer = model.config = changed(config, "render", eval_refine=16)
    limit = model.render_image(scene.cameras, 0)
    assert (fine.rgb - limit.rgb).abs().mean() < 0.5 * (plain.rgb - limit.rgb).abs().mean()
    model.config = changed(finer, "render", eval_refine=1, eval_rays=2)
    parts = [
        model.render_rays(scene.cameras.looking_past((x, y)).image_rays(0), torch.ones(3))
        for y in (-0.25, 0.25)
        for x in (-0.25, 0.25)
    ]
    image = model.render_image(scene.cameras, 0)
    assert torch.allclose(image.rgb.view(-1, 3), sum(part.rgb for part in parts) / 4, atol=1e-4)
    assert torch.allclose(image.opacity.view(-1), sum(part.opacity for part in parts) / 4, atol=1e-4)
    with pytest.raises(InputError, match=r"render.eval_rays: expected a whole number from 1"):
        changed(config, "render", eval_rays=0)


@pytest.mark.parametrize("points", [1, 6])
def test_anti_aliased_fields_see_wide_pixels_as_smoother(points: int) -> None:
    config = changed(tiny_config(steps=20), "field", anti_alias=points)
    made = Trainer(config, ball_scene())
    field = made.model.field
    assert isinstance(field, AntiAliasedNGP)
    batch = made.pixels.draw(0, 64)
    plain = made.scene.cameras.rays(batch.rays.camera_indices, *torch.full((2, 64), 8.0))  # through the middle
    assert batch.rays.pixel_radii is not None and plain.pixel_radii is not None
    ratio = batch.rays.pixel_radii / plain.pixel_radii
    assert ratio.min() > 0.8 and ratio.max() <= 1.001  # a pixel at the border is a little further from the eye
    distance = float(made.scene.cameras.positions[0].norm())
    typical = float(plain.pixel_radii[0]) * distance * 0.5 / (sum(field.aabb.size) / 3.0)
    assert float(field.footprint) == pytest.approx(typical, rel=0.02)
    before = evaluate(made.model, ball_scene("test"), with_ssim=False).psnr
    made.fit()
    assert evaluate(made.model.eval(), ball_scene("test"), with_ssim=False).psnr > before + 1.0
    wide = replace(batch.rays, pixel_radii=batch.rays.pixel_radii * 1e6)
    samples = chain.place_samples(made.model, batch.rays, step=0)[0]
    assert [tuple(value.shape[1:]) for value in field.regions(batch.rays, samples)] == [(points, 3), (points,)]
    spread = [field.sample_logits(rays, samples)[:, 3].std().item() for rays in (batch.rays, wide)]
    assert spread[1] < 0.05 * spread[0]  # all levels gone: the same everywhere


@pytest.mark.parametrize("points", [1, 6])
def test_anti_aliased_pictures_are_those_of_its_samples(points: int) -> None:
    made = Trainer(changed(tiny_config(steps=20), "field", anti_alias=points), ball_scene())
    made.fit()
    model, cameras = made.model.eval(), ball_scene("test").cameras
    settings, rays = model.settings, cameras.image_rays(0)
    samples = ray_marching(rays, model.grid, near_plane=settings.near_plane, far_plane=settings.far_plane)
    keep = model.field.sample_visibility(rays, samples, early_stop_eps=settings.early_stop_eps, alpha_thre=0.0)
    assert torch.equal(keep, visibility(model.field.sample_density(rays, samples), samples, early_stop_eps=1e-4))
    logits = model.field.sample_logits(rays, samples)
    out = composite(torch.exp(logits[:, 3]), torch.sigmoid(logits[:, :3]), samples, early_stop_eps=1e-4)
    expected = out.rgb + 1.0 - out.opacity[:, None]
    image = model.render_image(cameras, 0)
    assert torch.allclose(image.rgb.view(-1, 3), expected, atol=2e-3)
    positions, directions = torch.rand(50, 3) - 0.5, torch.nn.functional.normalize(torch.randn(50, 3), dim=-1)
    with torch.no_grad():  # what reads the encoding as it is: the grid's densities, the exported graph
        wanted, density = model.field(positions, directions)
        assert torch.allclose(model.field.density(positions), density, rtol=1e-4)
        assert torch.allclose(_plain_copy(model.field)(positions, directions)[0], wanted, atol=1e-4)
    assert torch.allclose(model.field.density(positions.requires_grad_()), density, rtol=1e-4)
    frames = FrameRenderer(model.field, model.grid, width=16, height=16, settings=settings, background=torch.ones(3))
    frame = frames.render(cameras.camera_to_world[0], cameras.focal[0], cameras.center[0])
    assert torch.allclose(frame.rgb, image.rgb, atol=2e-3)


@pytest.mark.parametrize("kind", ["ngp", "vanilla"])
def test_the_loss_is_that_of_the_rays_that_were_kept(kind: str) -> None:
    config = changed(tiny_config(), "loss", kind="mse")
    if kind == "vanilla":
        config = replace(config, field=VanillaConfig(width=16, depth=2))
    made = Trainer(config, ball_scene())
    batch, background = made.pixels.draw(0, 64), torch.rand(64, 3)
    samples = replace(
        chain.place_samples(made.model, batch.rays, step=0)[0], n_rays_kept=torch.tensor(42, dtype=torch.int32)
    )
    loss, mse = chain.render_and_compare(made.model, batch, samples, background, None)
    rgb = volume_rendering(field_functions(made.model.field, batch.rays)[1], samples, background=background).rgb
    target = chain.target_over(batch, background)
    error = (rgb - target)[:42]
    assert float(loss) == pytest.approx(float(error.square().mean()), rel=1e-4)
    assert float(mse) == pytest.approx(float(loss), rel=1e-6)
    loss.backward()
    assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in made.model.parameters())


def test_training_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    config = coarse(tiny_config(steps=50), monkeypatch)
    made = Trainer(config, ball_scene())
    losses: list[float] = []
    made.callbacks.append(lambda _, record: losses.append(record.mse))
    made.fit()
    assert sum(losses[-5:]) < 0.4 * sum(losses[:5])


def test_every_switch_has_its_row() -> None:
    config, cpu = preset("quality"), torch.device("cpu")
    rows = {case.name: case.config for case in ablation_cases(config, cpu)}
    assert rows["no finer steps in pictures"].render.eval_refine == 1
    assert rows["no decay of hash levels"].optim.table_decay == 0.0
    assert rows["no four rays a pixel in pictures"].render.eval_rays == 1
    for name, stage, values in QUALITY:
        if name not in ("finer steps in pictures", "decay of hash levels", "four rays a pixel in pictures"):
            assert {key: getattr(getattr(rows[f"+ {name}"], stage), key) for key in values} == values
            assert replace(rows[f"+ {name}"], **{stage: getattr(config, stage)}) == config  # and nothing else changed
    proposed = {case.name for case in ablation_cases(preset("proposal"), cpu)}
    assert {
        "no decay of hash levels",
        "+ opacity entropy",
        "density of 1 at the start",
    } <= proposed and "+ thinned samples" not in proposed


def test_anti_aliased_fields_cover_contracted_space() -> None:
    """Far away a pixel's cone is wide, but space is folded as much: levels fade by what is left of it."""
    contracted = changed(changed(tiny_config(), "field", anti_alias=1), "grid", contraction="cube")
    field = Trainer(contracted, ball_scene()).model.field
    ray = Rays(torch.zeros(1, 3), torch.tensor([[0.0, 0.0, 1.0]]), pixel_radii=torch.tensor([0.01]))
    half = field.aabb.size[2] / 2.0
    for away in (0.5, 1.0, 3.0, 100.0):  # half boxes from the middle
        step = torch.tensor([away * half])
        sample = PackedSamples.from_counts(torch.tensor([1]), step, step)
        found = float(field.regions(ray, sample)[1])
        place = torch.tensor([0.5, 0.5, 0.5 + 0.5 * away], dtype=torch.float64)
        determinant = torch.autograd.functional.jacobian(lambda x: fold(x, "cube"), place).det()
        assert found == pytest.approx(
            0.015 * away * half / sum(field.aabb.size) * float(determinant) ** (1 / 3), rel=1e-4
        )
    field.footprint.fill_(1e-9)
    positions, directions = torch.rand(9, 3) * 40.0 - 20.0, torch.nn.functional.normalize(torch.randn(9, 3), dim=-1)
    plain = InstantNGP(field.aabb, replace(field.config, anti_alias=0))
    plain.load_state_dict({name: value for name, value in field.state_dict().items() if name != "footprint"})
    plain.contraction = "cube"
    for one, other in zip(field(positions, directions), plain(positions, directions), strict=True):
        assert torch.allclose(one, other, atol=1e-5)  # where no pixel is wide, nothing fades
