"""Any nn.Module with `density` and `forward` gets the whole machine, any object with `sample` places its samples."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nerfturbo.config import CustomFieldConfig, HierarchySamplerConfig, ProposalSamplerConfig
from nerfturbo.errors import InputError
from nerfturbo.fields.custom import make_object, source_of
from nerfturbo.training.distributed import Team
from nerfturbo.training.trainer import Trainer, load_model
from nerfturbo.types import Aabb

from ..tiny import ball_scene, tiny_config
from .own_field import BoxedField, EverySecond, OwnField
from .workers import QUIET, alone, config_for, together

BOX = Aabb.cube(1.5)


def make(**options: Any) -> Trainer:
    steps = options.pop("steps", 12)
    config = options.pop("config", None) or tiny_config(steps=steps)
    torch.manual_seed(0)
    return Trainer(config, ball_scene(), field=options.pop("field", None) or OwnField(), **options)


def losses_of(trainer: Trainer) -> list[float]:
    found: list[float] = []
    trainer.callbacks.append(lambda _, record: found.append(record.loss))
    trainer.fit()
    return found


PROPOSALS = ProposalSamplerConfig(
    n_samples=8, coarse_samples=(16,), levels=2, log2_entries=8, resolutions=(16,), anneal_steps=4
)


@pytest.mark.parametrize("sampler", [None, PROPOSALS], ids=["grid", "proposals"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_trains_with_a_grid_and_with_proposals(sampler: Any, precision: str) -> None:
    config = tiny_config(steps=40)
    config = replace(config, train=replace(config.train, precision=precision))
    config = config if sampler is None else replace(config, sampler=sampler)
    trainer = make(config=config)
    found = losses_of(trainer)
    assert sum(found[-5:]) < 0.7 * sum(found[:5])
    assert trainer.model.field.compute_dtype == (torch.bfloat16 if precision == "bf16" else None)
    seen = {p.dtype for p in trainer.model.field.parameters()}
    assert seen == {torch.float32}, "the masters stay fp32"
    assert trainer.model.render_image(ball_scene("test").cameras, 0).rgb.isfinite().all()


def test_half_precision_changes_the_products_and_nothing_else() -> None:
    exact, half = (
        make(steps=3),
        make(config=replace(tiny_config(3), train=replace(tiny_config(3).train, precision="bf16"))),
    )
    first, second = losses_of(exact), losses_of(half)
    assert first != second
    assert first == pytest.approx(second, rel=0.05)


def test_learning_rates_of_its_own_hold_and_unknown_names_are_refused() -> None:
    field = OwnField()
    name = next(iter(dict(field.named_parameters())))
    field.learning_rates = {name: 0.0}  # type: ignore[assignment]
    before = {key: value.detach().clone() for key, value in field.named_parameters()}
    trainer = make(field=field)
    trainer.fit()
    after = dict(trainer.model.field.module.named_parameters())
    assert {key for key, value in after.items() if torch.equal(value, before[key])} == {name}
    field.learning_rates = {"planes": 1e-2}  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"OwnField.learning_rates.*names of its parameters.*planes"):
        make(field=field)


def test_saves_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = make(steps=20)
    expected = losses_of(whole)
    half = make(steps=20)
    half.callbacks.append(lambda trainer, record: trainer.stop() if record.step == 9 else None)
    half.fit()
    folder = half.save(tmp_path)
    again = make(steps=20, field=OwnField())
    again.resume(folder)
    assert losses_of(again) == expected[9:]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_a_checkpoint_says_where_its_field_came_from(tmp_path: Path) -> None:
    trainer = make(steps=2, field=BoxedField(BOX))
    trainer.fit()
    folder = trainer.save(tmp_path)
    assert isinstance(trainer.config.field, CustomFieldConfig)
    assert trainer.config.field.source == "tests.training.own_field:BoxedField"
    model = load_model(folder)
    points = torch.rand(7, 3)
    assert torch.equal(model.field.density(points), trainer.model.field.density(points))
    handed = load_model(folder, field=BoxedField(BOX))
    assert torch.equal(handed.field.density(points), trainer.model.field.density(points))


def test_a_field_whose_class_is_gone_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text((Path(__file__).parent / "own_field.py").read_text())
    from nerfturbo.fields.custom import make_object

    config = replace(tiny_config(2), field=CustomFieldConfig(f"{file}:OwnField"))
    trainer = Trainer(config, ball_scene())
    trainer.fit()
    folder = trainer.save(tmp_path)
    load_model(folder)
    file.unlink()
    with pytest.raises(InputError, match=rf"{file}.*no such file.*OwnField"):
        load_model(folder)
    with pytest.raises(InputError, match=r"no required argument.*width"):
        make_object("tests.training.own_field:needs_width", BOX)


def test_several_samplers_and_one_of_ones_own() -> None:
    for sampler in (HierarchySamplerConfig(n_samples=8, coarse_samples=8), None):
        config = tiny_config(steps=3)
        config = (
            config
            if sampler is None
            else replace(config, sampler=sampler, field=CustomFieldConfig(source_of(OwnField())))
        )
        own = None if sampler is not None else EverySecond()
        trainer = Trainer(config, ball_scene(), field=None if sampler else OwnField(), sampler=own)
        assert all(loss == loss for loss in losses_of(trainer))
        image = trainer.model.render_image(ball_scene("test").cameras, 0)
        assert image.rgb.shape == (16, 16, 3)


def _ranks(team: Team, folder: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    trainer = Trainer(config_for(team.world, steps=6), ball_scene(), field=OwnField(), team=team)
    trainer.fit()
    return trainer.model.state_dict()


def test_two_ranks_are_one(tmp_path: Path) -> None:
    one, two = alone(_ranks, tmp_path / "alone"), together(2, _ranks, tmp_path / "both")
    for name, value in one.items():
        assert torch.equal(two[0][name], two[1][name]), name
        torch.testing.assert_close(two[0][name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("captured", [False, True])
def test_under_lightning(captured: bool) -> None:
    pl = pytest.importorskip("lightning.pytorch", reason="lightning is an extra and not installed")
    from nerfturbo.training.lightning import NerfData, NerfModule

    config = tiny_config(steps=6)
    torch.manual_seed(0)
    module = NerfModule(config, field=OwnField(), captured=captured)
    data = NerfData(config, (ball_scene(), ball_scene("test")))
    pl.Trainer(max_steps=6, accelerator="cpu", **QUIET).fit(module, data)
    native = make(steps=6)
    native.fit()
    for name, value in native.model.field.state_dict().items():
        torch.testing.assert_close(module.model.field.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)


def wrong(**parts: Any) -> nn.Module:
    return type("Wrong", (OwnField,), parts)()


CASES = {
    "not a module": (lambda: object(), r"field: expected a torch.nn.Module, got object"),
    "no density": (lambda: nn.Linear(3, 4), r"field Linear: expected a method density\(positions, times=None\)"),
    "no forward": (
        lambda: type("F", (nn.Module,), {"density": OwnField.density})(),
        r"field F: expected a method forward\(positions, directions",
    ),
    "no parameters": (
        lambda: type("F", (nn.Module,), {"density": OwnField.density, "forward": OwnField.forward})(),
        r"field F: expected parameters that require a gradient",
    ),
    "half parameters": (
        lambda: OwnField().half(),
        r"parameter hidden.weight: expected torch.float32, got torch.float16",
    ),
    "signature": (
        lambda: wrong(density=lambda self, positions: positions[:, 0]),
        r"Wrong.density: expected density\(positions, times=None\), got density\(positions\)",
    ),
    "one column too many": (
        lambda: wrong(density=lambda self, p, t=None: OwnField.density(self, p)[:, None]),
        r"Wrong.density: expected shape \(1024,\).*got \(1024, 1\); squeeze",
    ),
    "negative density": (
        lambda: wrong(density=lambda self, p, t=None: OwnField.density(self, p) - 9.0),
        r"Wrong.density: expected numbers >= 0, got -",
    ),
    "negative in one part of the box": (
        lambda: wrong(density=lambda self, p, t=None: torch.where((p > 0.6).all(-1), -1.0, 1.0)),
        r"Wrong.density: expected numbers >= 0, got -1 to 1",
    ),
    "a mistake in its code": (
        lambda: wrong(density=lambda self, p, t=None: self.nonsense(p)),
        r"Wrong.density: expected to take points on cpu, got AttributeError: .*nonsense",
    ),
    "NaN": (
        lambda: wrong(density=lambda self, p, t=None: OwnField.density(self, p) * torch.nan),
        r"Wrong.density: expected finite numbers, got NaN",
    ),
    "colours past one": (
        lambda: wrong(forward=lambda self, p, d, t=None, c=None: (p * 0.0 + 7.0, OwnField.density(self, p))),
        r"Wrong.forward: rgb: expected numbers from 0 to 1, got 7",
    ),
    "density alone": (
        lambda: wrong(forward=lambda self, p, d, t=None, c=None: OwnField.density(self, p)),
        r"Wrong.forward: expected a tuple \(rgb, density\), got Tensor",
    ),
    "no values": (lambda: OwnField().to("meta"), r"parameter hidden.weight: expected .* got no values \(device meta\)"),
    "state that is no tensor": (
        lambda: wrong(get_extra_state=lambda self: {"a": 1}, set_extra_state=lambda self, state: None),
        r"state_dict\(\)\['_extra_state'\]: expected a tensor, got dict.*nothing is ever unpickled",
    ),
    "a tensor of another device": (
        lambda: wrong(density=lambda self, p, t=None: p[:, 0] + torch.zeros(1, device="meta")),
        r"Wrong.density: expected ",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_field_is_named(case: str) -> None:
    build, said = CASES[case]
    with pytest.raises(InputError, match=said):
        Trainer(tiny_config(1), ball_scene(), field=build())


def test_a_wrong_sampler_is_named() -> None:
    with pytest.raises(InputError, match=r"sampler: expected an object with sample"):
        Trainer(tiny_config(1), ball_scene(), sampler=object())
    bad = type("S", (), {"sample": lambda self, rays, draw=None: 3})()
    with pytest.raises(InputError, match=r"sampler.sample: expected PackedSamples, got int"):
        Trainer(tiny_config(1), ball_scene(), sampler=bad)
    bad = type("S", (), {"sample": lambda self, rays, draw=None: rays.nonsense})()
    with pytest.raises(InputError, match=r"sampler.sample: expected sample\(.*got AttributeError: .*nonsense"):
        Trainer(tiny_config(1), ball_scene(), sampler=bad)


def test_a_field_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    def __init__(self):\n        raise KeyError('planes')\n")
    with pytest.raises(InputError, match=r"field .*mine.py:Mine: expected a class that can be made, got KeyError: 'pl"):
        make_object(f"{file}:Mine", Aabb.cube(1.0))


def test_a_script_that_opens_its_own_field_is_not_run_again(tmp_path: Path) -> None:
    script = """
from nerfturbo.fields.custom import make_object, source_of
from nerfturbo.types import Aabb

class Mine:
    pass

print("once", type(make_object(source_of(Mine()), Aabb.cube(1.0))) is Mine)
"""
    (tmp_path / "program.py").write_text(script)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["once", "True"]


def test_optional_methods_are_found_through_the_plug() -> None:
    class Regular(OwnField):
        bytes_per_sample = 64

        def regularization(self, step: Any) -> torch.Tensor:
            return 1e3 * self.head.bias.square().sum()

    plain, regular = make(steps=1), make(steps=1, field=Regular())
    assert regular.model.field.bytes_per_sample == 64
    assert losses_of(regular)[0] > losses_of(plain)[0] + 1e-3


@pytest.mark.gpu
def test_captured_where_it_can_be(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        trainer = make(steps=40, device="cuda")
        found = losses_of(trainer)
    assert trainer.stepper.capture and not caplog.records
    assert sum(found[-2:]) < sum(found[:2])


@pytest.mark.gpu
def test_what_cannot_be_captured_runs_eagerly_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    class Reads(OwnField):
        def density(self, positions: torch.Tensor, times: Any = None) -> torch.Tensor:
            assert bool(torch.isfinite(positions).all())  # asks the device
            return super().density(positions + 0.0 * torch.rand_like(positions))

    with caplog.at_level(logging.WARNING):
        trainer = make(steps=40, field=Reads(), device="cuda")
        found = losses_of(trainer)
    said = [record.getMessage() for record in caplog.records if "not captured" in record.getMessage()]
    assert len(said) == 1 and "isfinite" in said[0]
    assert not trainer.stepper.capture and sum(found[-2:]) < sum(found[:2])
