"""The captured step: equal to the eager one, trains any field that can be captured, says why one cannot."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from nerfturbo.config import (
    CameraConfig,
    Config,
    GridConfig,
    HierarchySamplerConfig,
    NgpConfig,
    PhotoConfig,
    RenderConfig,
    TrainConfig,
    VanillaConfig,
)
from nerfturbo.data.batches import PixelSampler
from nerfturbo.data.builtin import builtin_scene
from nerfturbo.data.scene import Scene
from nerfturbo.presets import preset
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.sampling import OccupancyGrid
from nerfturbo.training import optim
from nerfturbo.training.distributed import BACKEND_VARIABLE, Team, join_team
from nerfturbo.training.graph import DeviceStep
from nerfturbo.training.optim import Optimizer
from nerfturbo.training.trainer import Trainer, half_dtype

from .workers import free_port

pytestmark = pytest.mark.gpu

SMALL = Config(
    grid=GridConfig(resolution=64),
    field=NgpConfig(n_levels=8, n_features=4, log2_entries=15, max_resolution=512),
    render=RenderConfig(steps_per_diagonal=256),
    train=TrainConfig(steps=200, batch_samples=1 << 15, max_rays=4096),
)


@pytest.fixture(autouse=True)
def soon_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of updates of the grid happen in a short run."""
    monkeypatch.setattr(OccupancyGrid, "warmup_steps", 32)


@pytest.fixture(scope="module")
def scene() -> Scene:
    return builtin_scene("toybox", "train", resolution=100, n_views=12)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make_step(scene: Scene, config: Config, *, capture: bool, team: Team | None = None) -> DeviceStep:
    model = NerfModel(config, SceneBounds.of(scene)).to("cuda")
    if model.photos is not None:  # as the trainer has it once all levels are there
        model.photos.observe(scene.cameras, scene.aabb)
        model.photos.progress.fill_(1.0)
    optimizer = Optimizer(model, config.optim, half_dtype=half_dtype(config, model.device))
    pixels = PixelSampler(scene, "cuda", config.train.seed)
    return DeviceStep(model, pixels, optimizer, capture=capture, team=team)


def run(step: DeviceStep, n_steps: int) -> dict[str, Tensor]:
    done = 0
    while done < n_steps:
        done = step.advance(done, n_steps - done).step
    step.finish()
    return {name: value.clone() for name, value in step.model.state_dict().items()}


def test_captured_equals_eager_bit_for_bit(scene: Scene, deterministic: None):
    captured, eager = (run(make_step(scene, SMALL, capture=capture), 64) for capture in (True, False))
    for name, value in captured.items():
        assert torch.equal(value, eager[name]), name


def test_captured_equals_eager_with_everything_that_is_learned_per_photo(scene: Scene, deterministic: None):
    config = replace(
        SMALL,
        cameras=CameraConfig(True, coarse=True, focal=True, distortion=True),
        photo=PhotoConfig(exposure=True, appearance=8),
    )
    captured, eager = (run(make_step(scene, config, capture=capture), 48) for capture in (True, False))
    for name, value in captured.items():
        assert torch.equal(value, eager[name]), name
    for name in ("pose", "focal", "radial", "exposure", "appearance"):
        assert float(captured[f"photos.{name}"].abs().max()) > 0.0, name


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_team_of_one_is_a_process_alone(
    scene: Scene, deterministic: None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured and eager: its table travels in pieces, recorded with the collectives or replayed beside them."""
    own = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in (own | {BACKEND_VARIABLE: backend}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(optim, "PIECE", 1 << 17)
    alone = run(make_step(scene, SMALL, capture=True), 64)
    team = join_team("cuda")
    try:
        for capture in (True, False):
            step = make_step(scene, SMALL, capture=capture, team=team)
            found = run(step, 64)
            assert step.capture == capture and [len(buffer.pieces) > 3 for buffer in step.optimizer.buffers][1]
            assert not step.optimizer.held.waiting and not step.optimizer.held.on
            for name, value in alone.items():
                assert torch.equal(value, found[name]), (name, capture)
            del step
            gc.collect()  # recorded collectives must not outlive their team
    finally:
        team.close()


def test_deterministic_mode_repeats_itself(scene: Scene, deterministic: None):
    first, second = (run(make_step(scene, SMALL, capture=True), 100) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_without_determinism_the_first_gradients_agree(scene: Scene):
    steps = [make_step(scene, SMALL, capture=capture) for capture in (True, False)]
    moments = []
    for step in steps:
        run(step, 1)
        moments.append(torch.cat([buffer.state.first for buffer in step.optimizer.buffers]))
    assert (moments[0] - moments[1]).norm() < 1e-3 * moments[1].norm()


def test_preparing_leaves_no_trace(scene: Scene):
    step = make_step(scene, SMALL, capture=True)
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    step.prepare()
    for name, value in step.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert int(step.state.step) == 0 and float(step.optimizer.found_inf) == 0.0 and int(step.optimizer.skipped) == 0
    assert all(float(buffer.state.first.abs().sum()) == 0.0 for buffer in step.optimizer.buffers)


def test_budget_stays_full(scene: Scene):
    step = make_step(scene, SMALL, capture=True)
    run(step, 192)
    samples = step.state.ring[100:190, 3]
    assert samples.max() <= SMALL.train.batch_samples
    assert samples.mean() > 0.85 * SMALL.train.batch_samples or int(step.state.n_active) == SMALL.train.max_rays


@pytest.mark.parametrize("kind", ["ngp", "vanilla"])
@pytest.mark.parametrize("prune", [True, False])
def test_trains(scene: Scene, kind: str, prune: bool):
    field = SMALL.field if kind == "ngp" else VanillaConfig(width=64, depth=4)
    config = replace(SMALL, field=field, sampler=replace(SMALL.sampler, prune=prune))
    if kind == "vanilla":
        config = replace(config, optim=replace(config.optim, lr=2e-3), train=replace(config.train, steps=600))
    trainer = Trainer(config, scene, device="cuda")
    losses: list[float] = []
    trainer.callbacks.append(lambda _, record: losses.append(record.mse))
    trainer.fit()
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]


class ReadsBack(nn.Module):
    """A field that asks the host: it cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        return self.weight[3].exp().expand(positions.shape[0]) + 0.0 * positions[:, 0]

    def forward(
        self, positions: Tensor, directions: Tensor, times: Tensor | None = None, camera_indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        brightness = float(self.weight.detach().sum())  # waits for the device
        rgb = torch.sigmoid(self.weight[:3] * brightness).expand(positions.shape[0], 3)
        return rgb, self.density(positions)


def test_the_rate_warms_up_where_no_grid_is_updated(scene: Scene):
    config = preset("hierarchy")
    train = replace(config.train, steps=320, batch_samples=1 << 15, max_rays=512)
    sampler = HierarchySamplerConfig(n_samples=32, coarse_samples=32)
    trainer = Trainer(replace(config, train=train, sampler=sampler), scene, device="cuda")
    assert config.grid.update_every > 16 and config.optim.warmup_steps > 100
    seen: list[tuple[int, float]] = []
    trainer.callbacks.append(lambda _, record: seen.append((record.step, record.mse)))
    trainer.fit()
    steps = [0, *(step for step, _ in seen)]
    assert max(after - before for before, after in itertools.pairwise(steps)) <= 16
    losses = [mse for _, mse in seen]
    assert sum(losses[-5:]) / 5 < 0.5 * losses[0]  # without a warm-up the deep networks die


def test_a_field_that_reads_back_trains_eagerly_with_a_reason(scene: Scene, caplog: pytest.LogCaptureFixture):
    trainer = Trainer(SMALL, scene, field=ReadsBack(), device="cuda")
    before = {name: value.clone() for name, value in trainer.model.field.state_dict().items()}
    losses: list[float] = []
    trainer.callbacks.append(lambda _, record: losses.append(record.mse))
    trainer.fit()
    said = [record.getMessage() for record in caplog.records if "not captured" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("the training step is not captured as a CUDA graph: ")
    assert "brightness = float" in said[0] and ".item()" in said[0]
    assert isinstance(trainer.stepper, DeviceStep) and not trainer.stepper.capture
    assert trainer.step == SMALL.train.steps and sum(losses[-5:]) / 5 < losses[0]
    assert all(not torch.equal(value, before[name]) for name, value in trainer.model.field.state_dict().items())
