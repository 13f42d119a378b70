"""Beginning from a trained field: whole or by part, from a run or a file, and what does not fit is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nerfturbo.cli.train import TrainArgs
from nerfturbo.config import Config
from nerfturbo.data.builtin import builtin_scene
from nerfturbo.errors import CheckpointError, InputError
from nerfturbo.evaluation.evaluate import evaluate
from nerfturbo.ops import use_backend
from nerfturbo.ops.march import unpack_bits
from nerfturbo.presets import preset
from nerfturbo.training import Trainer
from nerfturbo.training.warm_start import KEEP, ZOO, part_names, save_field, zoo_names

from ..tiny import ball_scene, tiny_config


@pytest.fixture(autouse=True)
def _reference() -> object:
    with use_backend("reference"):
        yield


@pytest.fixture(scope="module")
def trained() -> Trainer:
    with use_backend("reference"):
        trainer = Trainer(tiny_config(steps=40), ball_scene())
        trainer.fit()
        return trainer


def fresh(config: Config | None = None) -> Trainer:
    return Trainer(config or tiny_config(steps=4, seed=9), ball_scene())


def test_the_whole_field_begins_where_the_other_ended(trained: Trainer, tmp_path: Path) -> None:
    trained.save(tmp_path / "checkpoints")
    other = fresh()
    taken = other.warm_start(tmp_path)
    assert taken.parts == ("encoding", "density_net", "color_net", "grid") and taken.grid
    for (name, one), two in zip(trained.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two), name
    assert torch.equal(trained.model.grid.bits, other.model.grid.bits)
    assert (other.step, int(other.optimizer.step_count)) == (0, 0)
    camera = ball_scene("test").cameras
    assert torch.equal(trained.model.render_image(camera, 0).rgb, other.model.render_image(camera, 0).rgb)


def test_a_part_changes_nothing_else(trained: Trainer, tmp_path: Path) -> None:
    checkpoint = trained.save(tmp_path)
    other, untouched = fresh(), fresh()
    taken = other.warm_start(checkpoint, ("encoding",))
    assert (taken.parts, taken.grid) == (("encoding",), False)
    assert torch.equal(other.model.field.encoding.table, trained.model.field.encoding.table)
    assert torch.equal(other.model.grid.bits, untouched.model.grid.bits)
    for one, two in zip(
        other.model.field.color_net.parameters(), untouched.model.field.color_net.parameters(), strict=True
    ):
        assert torch.equal(one, two)


def test_features_are_scaled_and_nothing_else(trained: Trainer, tmp_path: Path) -> None:
    checkpoint, other, whole = trained.save(tmp_path), fresh(), fresh()
    other.warm_start(checkpoint, keep=0.5)
    whole.warm_start(checkpoint)
    for (name, one), two in zip(whole.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        assert torch.equal(two, 0.5 * one if name == "field.encoding.table" else one), name
    before = other.model.field.encoding.table.clone()
    for keep in (0.0, 1.5):
        with pytest.raises(InputError, match="keep: expected a number above 0"):
            other.warm_start(checkpoint, keep=keep)
    assert torch.equal(other.model.field.encoding.table, before)
    assert TrainArgs.init_keep is None and f"{KEEP:g}" == "0.6"  # what its help says


def test_one_file_holds_field_and_grid_in_half_precision(trained: Trainer, tmp_path: Path) -> None:
    path = save_field(trained.model, tmp_path / "ball.safetensors")
    other = fresh()
    assert other.warm_start(path).grid
    for one, two in zip(trained.model.parameters(), other.model.parameters(), strict=True):
        assert two.dtype == torch.float32 and torch.allclose(one, two, atol=1e-3)


def test_cells_this_scene_does_not_see_stay_given_up_and_new_ones_start_full(trained: Trainer, tmp_path: Path) -> None:
    grid = trained.model.grid
    kept = grid.thickness.clone()
    grid.thickness[:64] = -1.0  # not seen there
    checkpoint = trained.save(tmp_path)
    grid.thickness.copy_(kept)
    other = fresh()
    other.model.grid.thickness[32:96] = -1.0  # not seen here
    other.warm_start(checkpoint)
    occupied = unpack_bits(other.model.grid.bits)
    assert bool(occupied[:32].all()) and not bool(occupied[32:96].any())
    assert bool((other.model.grid.thickness[32:96] == -1.0).all())


def test_what_does_not_fit_is_named_and_changes_nothing(trained: Trainer, tmp_path: Path) -> None:
    checkpoint = trained.save(tmp_path)
    config = tiny_config(steps=4)
    wide = fresh(replace(config, field=replace(config.field, width=32)))
    before = {name: value.clone() for name, value in wide.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"field\.density_net.*expected shape .*found shape.*--init-parts"):
        wide.warm_start(checkpoint)
    assert all(torch.equal(value, before[name]) for name, value in wide.model.state_dict().items())
    wide.warm_start(checkpoint, ("encoding", "grid"))
    other_grid = fresh(replace(config, grid=replace(config.grid, resolution=16)))
    assert not other_grid.warm_start(checkpoint).grid
    with pytest.raises(CheckpointError, match="grid: expected 4096 cells, found 512 cells"):
        other_grid.warm_start(checkpoint, ("grid",))


def test_wrong_sources_and_parts_are_named(trained: Trainer, tmp_path: Path) -> None:
    other = fresh()
    assert part_names(other.model) == ["encoding", "density_net", "color_net", "grid"]
    with pytest.raises(InputError, match="no such file"):
        other.warm_start(tmp_path / "missing.safetensors")
    with pytest.raises(CheckpointError, match="found none; train one first"):
        other.warm_start(tmp_path)
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        other.warm_start(tmp_path / "broken.safetensors")
    with pytest.raises(InputError, match=r"parts: expected some of encoding.*got 'colour'"):
        other.warm_start(trained.save(tmp_path / "saved"), ("colour",))


def test_an_entry_of_the_zoo_fits_its_preset_and_knows_its_scene() -> None:
    assert zoo_names() == ["toybox-cpu"]
    path = ZOO / "toybox-cpu.safetensors"
    assert path.stat().st_size < 5_000_000
    test = builtin_scene("toybox", "test", resolution=40, n_views=1)
    with use_backend("auto"):
        trainer = Trainer(preset("ngp-cpu"), builtin_scene("toybox", resolution=40, n_views=2))
        taken = trainer.warm_start("zoo:toybox-cpu")
        assert taken.grid and set(taken.parts) == set(part_names(trainer.model))
        assert evaluate(trainer.model, test, with_ssim=False).psnr > 20.0  # a random start has 10; 40 pixels alias


def test_the_zoo_names_its_entries_and_their_preset() -> None:
    with pytest.raises(InputError, match="an entry of the zoo: toybox-cpu"):
        fresh().warm_start("zoo:teapot")
    with pytest.raises(CheckpointError, match="train with --preset ngp-cpu"):
        fresh().warm_start("zoo:toybox-cpu")
