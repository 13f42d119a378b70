"""Each technique can be switched by itself, and does what its name says and nothing else."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nerfturbo.config import (
    Config,
    CustomFieldConfig,
    DynamicNgpConfig,
    FactorConfig,
    HierarchySamplerConfig,
    NgpConfig,
    VanillaConfig,
    VoxelConfig,
)
from nerfturbo.data.scene import downscaled
from nerfturbo.errors import InputError
from nerfturbo.fields import DeformedNeRF, FactorField, TimeNeRF, VanillaNeRF, vanilla
from nerfturbo.fields.custom import plug_in
from nerfturbo.fields.parts import SMALLEST_PIECE
from nerfturbo.ops import use_backend
from nerfturbo.ops.march import unpack_bits
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.training import Trainer
from nerfturbo.types import Aabb

from ..peak import PeakBytes
from ..tiny import ball_scene, tiny_config
from .own_field import OwnField
from .workers import QUIET

OWN = Path(__file__).with_name("own_field.py")


@pytest.fixture(autouse=True)
def _reference() -> object:
    with use_backend("reference"):
        yield


def with_train(config: Config, **values: object) -> Config:
    return replace(config, train=replace(config.train, **values))


def test_without_the_grid_nothing_is_learned_about_space_and_nothing_is_given_up() -> None:
    for enabled in (True, False):
        config = tiny_config(steps=2)
        made = Trainer(replace(config, grid=replace(config.grid, enabled=enabled)), ball_scene())
        made.fit()
        assert bool((made.model.grid.thickness != 0.0).any()) == enabled
    assert bool(unpack_bits(made.model.grid.bits).all())


def test_shrunken_pictures_are_means_of_what_is_visible() -> None:
    scene = ball_scene(size=16)
    small = downscaled(scene, 4)
    assert small.images.sizes.tolist() == [[4, 4]] * 4 and small.cameras.size.tolist() == [[4, 4]] * 4
    image, whole = small.images.image(0), scene.images.image(0)
    alpha = whole[..., 3].reshape(4, 4, 4, 4).mean(dim=(1, 3))
    assert torch.allclose(image[..., 3], alpha, atol=0.003)
    visible = image[..., 3] > 0.0
    assert torch.allclose(image[visible][:, 0], torch.tensor(220 / 255), atol=0.003)
    assert downscaled(scene, 1) is scene
    view = torch.zeros(1, dtype=torch.int64)
    middles = [made.cameras.rays(view, *(made.cameras.size[:1] / 2.0).T).directions for made in (scene, small)]
    assert torch.allclose(*middles, atol=1e-6)


def test_coarse_pictures_come_first_and_resuming_finds_the_right_ones(tmp_path) -> None:
    config = with_train(tiny_config(steps=10), coarse_fraction=0.4)
    sizes: list[int] = []
    made = Trainer(config, ball_scene(), callbacks=[lambda t, _: sizes.append(int(t.pixels.scene.cameras.size[0, 0]))])
    made.fit()
    assert sizes == [4] * 4 + [16] * 6
    first = Trainer(config, ball_scene(), callbacks=[lambda t, record: t.stop() if record.step == 6 else None])
    first.fit()
    resumed = Trainer(config, ball_scene())
    resumed.resume(first.save(tmp_path))
    resumed.fit()
    for one, two in zip(made.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, two)


class Dropping(OwnField):
    """Draws torch's random numbers, which must be the same ones in the backward."""

    def __init__(self) -> None:
        super().__init__(width=32)
        self.dropout = torch.nn.Dropout(0.5)

    def _logits(self, positions: torch.Tensor) -> torch.Tensor:
        return super()._logits(self.dropout(positions))


def checkpointed(kind: str, on: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    box, deep = Aabb.cube(1.5), VanillaConfig(width=32, depth=8)
    makers = {
        "vanilla": lambda: VanillaNeRF(box, deep),
        "tnerf": lambda: TimeNeRF(box, deep),
        "dnerf": lambda: DeformedNeRF(box, deep),
        "factor": lambda: FactorField(box, FactorConfig((8, 16), (0.5,))),
        "own": lambda: plug_in(OwnField(width=32), box),
        "own, with dropout": lambda: plug_in(Dropping(), box),
    }
    field: Any = makers[kind]()
    field.checkpointing = on
    return field


@pytest.mark.parametrize("kind", ["vanilla", "tnerf", "dnerf", "factor", "own", "own, with dropout"])
def test_checkpointing_changes_no_gradient_and_keeps_less(kind: str) -> None:
    kept, gradients = {}, {}
    positions, directions = torch.rand(256, 3), torch.nn.functional.normalize(torch.randn(256, 3), dim=-1)
    for checkpointing in (False, True):
        field, n_bytes = checkpointed(kind, checkpointing), 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal n_bytes
            n_bytes += tensor.numel() * tensor.element_size()
            return tensor

        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            rgb, density = field(positions, directions, torch.linspace(0.0, 1.0, 256))
        kept[checkpointing] = n_bytes
        torch.manual_seed(2)  # whoever draws between forward and backward
        (rgb.sum() + density.sum()).backward()
        gradients[checkpointing] = [parameter.grad for parameter in field.parameters()]
    for one, two in zip(gradients[False], gradients[True], strict=True):
        assert one is not None and two is not None and torch.equal(one, two)
    assert kept[True] < 0.5 * kept[False]


def test_training_with_checkpointing_is_training_without_it_in_both_trainers() -> None:
    fields = {
        "vanilla": VanillaConfig(width=16, depth=2),
        "factor": FactorConfig((6, 12), (0.3,), (2, 2), 16),
        "custom": CustomFieldConfig(f"{OWN}:OwnField"),
    }
    for kind, field in fields.items():
        models: list[Any] = []
        for on in (False, True):
            config = replace(with_train(tiny_config(steps=4), checkpointing=on), field=field)
            native = Trainer(config, ball_scene())
            native.fit()
            models += [native.model, lightning_model(config)]
        assert [model.field.checkpointing for model in models] == [False, False, True, True]
        for model in models[1:]:
            for (name, one), two in zip(models[0].named_parameters(), model.parameters(), strict=True):
                assert torch.equal(one, two), (kind, name)


def lightning_model(config: Config) -> torch.nn.Module:
    pl = pytest.importorskip("lightning.pytorch", reason="lightning is an extra and not installed")
    from nerfturbo.training.lightning import NerfData, NerfModule

    module = NerfModule(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.Trainer(**QUIET, accelerator="cpu", limit_val_batches=0).fit(module, NerfData(config, (ball_scene(),) * 2))
    assert module.model is not None
    return module.model


class Fused(OwnField):
    def sample_logits(self, rays: object, samples: object) -> torch.Tensor:
        raise NotImplementedError


def test_fields_that_cannot_checkpoint_refuse_it_by_name() -> None:
    """Their kernels keep no layers that could be computed again."""
    box = SceneBounds.of(ball_scene())
    fields = {
        "InstantNGP": NgpConfig(2, 2, 8, 32, 16),
        "DynamicNGP": DynamicNgpConfig(2, 2, 8, 32, 16),
        "VoxelGrid": VoxelConfig((6, 12), (0.3,), sh_degree=1),
        "Fused": Fused(),
    }
    for name, field in fields.items():
        own = field if isinstance(field, torch.nn.Module) else None
        config = tiny_config() if isinstance(field, torch.nn.Module) else replace(tiny_config(), field=field)
        NerfModel(config, box, field=own)
        with pytest.raises(InputError, match=f"train.checkpointing: expected off .* got on, for {name}"):
            NerfModel(with_train(config, checkpointing=True), box, field=own)


def test_both_fields_of_a_hierarchy_are_checkpointed() -> None:
    config = replace(with_train(tiny_config(), checkpointing=True), field=VanillaConfig(width=16, depth=2))
    model = NerfModel(replace(config, sampler=HierarchySamplerConfig(8, 8)), SceneBounds.of(ball_scene()))
    assert model.field.checkpointing and model.sampler.coarse.checkpointing


def test_checkpointing_holds_one_piece_of_the_layers_at_a_time() -> None:
    peaks, gradients = {}, {}
    positions = torch.rand(8 * SMALLEST_PIECE, 3)
    directions = torch.nn.functional.normalize(torch.randn(len(positions), 3), dim=-1)
    for checkpointing in (False, True):
        field = VanillaNeRF(Aabb.cube(1.5), VanillaConfig(width=64, depth=8))
        field.checkpointing = checkpointing
        with PeakBytes() as peak:
            rgb, density = field(positions, directions)
            (rgb.mean() + density.mean()).backward()
        peaks[checkpointing] = peak.n_bytes
        gradients[checkpointing] = [parameter.grad for parameter in field.parameters()]
    for one, two in zip(gradients[False], gradients[True], strict=True):
        assert one is not None and two is not None
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6 * float(one.abs().max()))
    assert peaks[True] < 0.25 * peaks[False]


def test_the_grid_asks_the_original_field_for_few_points_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells at once took more memory than training did, with checkpointing or without."""
    field = VanillaNeRF(Aabb.cube(1.5), VanillaConfig(width=64, depth=8))
    positions, peaks, found = torch.rand(8000, 3), [], []
    for largest in (1 << 15, 1000):
        monkeypatch.setattr(vanilla, "LARGEST_PIECE", largest)
        with torch.no_grad(), PeakBytes() as peak:
            found.append(field.density(positions))
        peaks.append(peak.n_bytes)
    assert field.density(positions[:0]).shape == (0,)
    torch.testing.assert_close(found[1], found[0])
    assert peaks[1] < 0.2 * peaks[0]
