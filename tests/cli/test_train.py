"""`nerfturbo train`: the run folder, the flags, resuming."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from nerfturbo.cli.main import VERBS
from nerfturbo.cli.settings import Settings
from nerfturbo.cli.train import default_output
from nerfturbo.config import Config
from nerfturbo.presets import preset
from nerfturbo.training.checkpoint import latest_checkpoint, read_state

from ..tiny import TINY_FLAGS
from .conftest import Nerfturbo


def tensors(run: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(latest_checkpoint(run) / "tensors.safetensors")


def test_the_run_folder_holds_everything(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    assert {
        "config.json",
        "metrics.json",
        "log.jsonl",
        "checkpoints",
        "images",
        "report.html",
    } <= names
    assert names & {"turntable.gif", "turntable.mp4"}
    assert {path.name for path in (trained / "images").iterdir()} >= {"test_000.png", "test_001.png"}
    assert not [path for path in trained.rglob("*") if path.name.startswith(".")]
    assert latest_checkpoint(trained).name == "step_00000012"


def test_metrics_have_every_promised_name(trained: Path) -> None:
    metrics = json.loads((trained / "metrics.json").read_text())
    for name in (
        *("psnr", "ssim", "steps", "train_seconds", "total_seconds", "rays_per_second", "samples_per_second"),
        *("samples_skipped_fraction", "peak_memory_bytes", "peak_gpu_memory_bytes", "device", "backend", "protocol"),
        *("baselines", "per_view", "versions", "machine"),
    ):
        assert name in metrics, name
    assert metrics["steps"] == 12 and metrics["backend"] == "reference" and metrics["device"] == "cpu"
    assert 0.0 < metrics["train_seconds"] < metrics["total_seconds"]
    assert 1e7 < metrics["peak_memory_bytes"] < 1e11 and metrics["peak_gpu_memory_bytes"] is None
    assert 0.0 <= metrics["samples_skipped_fraction"] < 1.0
    assert metrics["protocol"]["n_views"] == len(metrics["per_view"]) == 2
    assert set(metrics["baselines"]) == {"constant_psnr", "blurred_psnr"}
    (use,) = metrics["ranks"]
    assert 0.0 < use["data_share"] <= 1.0 and use["step_ms"] > 0.0 and use["gpu_utilisation"] is None


def test_json_goes_to_stdout_alone_and_progress_to_stderr(nerfturbo: Nerfturbo, scene: Path) -> None:
    result = nerfturbo("train", scene, *TINY_FLAGS, "--steps", 2, "--eval-views", 1, "--json", "--output", "out")
    assert result.code == 0
    assert result.json["steps"] == 2 and result.json["run"] == "out"
    assert result.json["protocol"]["views"] == "1 of 2, evenly spaced"
    assert "training" in result.err and "opening" in result.err
    assert re.search(r"preset ngp-cpu; box of 3 x 3 x 3, near 0, far \d.*, 1 grid level; background: rand", result.err)


def test_without_json_the_result_names_its_files(nerfturbo: Nerfturbo, scene: Path) -> None:
    result = nerfturbo("train", scene, *TINY_FLAGS, "--steps", 1)
    assert result.code == 0
    assert re.search(r"PSNR \d+\.\d\d dB, SSIM", result.out) and "constant colour" in result.out
    report = re.search(r"^\s*(runs/ball-\d{8}-\d{6}/report.html)$", result.out, re.MULTILINE)
    assert report is not None and Path(report.group(1)).is_file()


def test_nested_flags_and_shortcuts_reach_the_config(nerfturbo: Nerfturbo, scene: Path) -> None:
    flags = ["--steps", 1, "--seed", 7, "--downscale", 2, "--grid.decay", 0.9, "--output", "out"]
    assert nerfturbo("train", scene, *TINY_FLAGS, *flags, "--on-instability", "lower-lr").code == 0
    config = json.loads(Path("out/config.json").read_text())["config"]
    assert config["train"] == config["train"] | {"seed": 7, "on_instability": "lower-lr"}
    assert config["grid"] == config["grid"] | {"decay": 0.9, "resolution": 8}
    assert config["data"] == config["data"] | {"source": str(scene.resolve()), "downscale": 2}
    assert json.loads(Path("out/metrics.json").read_text())["protocol"]["resolution"] == [8, 8]


def test_the_flags_cover_every_stage_of_the_config() -> None:
    stages = {field.name for field in dataclasses.fields(Config)} - {"preset", "data"}
    assert stages == {field.name for field in dataclasses.fields(Settings.of(Config()))}


def test_a_preset_gives_the_defaults_of_the_nested_flags(nerfturbo: Nerfturbo) -> None:
    for name, width in (("vanilla", "256"), ("ngp-cpu", "32")):
        shown = re.search(
            r"--field.width INT.*?\(default:\s+(\d+)\)",
            nerfturbo("train", "--preset", name, "--help-all").out.replace("│", " "),
            re.DOTALL,
        )
        assert shown is not None and shown.group(1) == width


@pytest.mark.parametrize("verb", ["train", "tune", "profile", "bench step", "bench scene"])
def test_help_shows_what_a_person_sets_and_says_where_the_rest_is(
    nerfturbo: Nerfturbo, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "114")  # help is as wide as the terminal, up to this

    def flags(text: str) -> set[str]:
        return set(re.findall(r"^\W (--[\w.-]+)", text, re.MULTILINE))

    short = nerfturbo(*verb.split(), "--preset", "voxels-cpu", "--grid.levels", 2, "--help")
    assert short.code == 0 and short.out.splitlines()[-1] == "--help-all lists every value of preset voxels-cpu"
    assert {"--preset", "--field", "--sampler", "--device"} <= flags(short.out) and len(flags(short.out)) <= 22
    assert not [flag for flag in flags(short.out) if "." in flag]
    groups = re.findall(r"^(\w+):$", short.out, re.MULTILINE)
    assert groups == ["scene", "training", "results", "machine"]
    assert max(map(len, short.out.splitlines())) <= 114 and len(short.out.splitlines()) <= 60
    lines = [line for line in short.out.splitlines() if line.startswith("  --")]
    assert lines and all(re.match(r"  --[\w-]+( \S+)? {2,}\w", line) for line in lines), "a flag without words"
    wrapped = [line for line in short.out.splitlines() if line.startswith(" " * 8)]
    assert len(wrapped) <= 4, "a line each, but for the list of presets"
    full = nerfturbo(*verb.split(), "--preset", "voxels-cpu", "--help-all")
    assert full.code == 0 and flags(short.out) < flags(full.out) and "--help-all" not in full.out
    config = preset("voxels-cpu")
    for section in ("field", "sampler", "grid", "render", "loss", "optim", "train", "cameras", "photo"):
        for value in dataclasses.fields(getattr(config, section)):
            name = f"--{section}.{value.name.replace('_', '-')}"
            assert {name, name.replace(".", ".no-", 1)} & flags(full.out), name


def test_flags_that_are_on_can_be_said_both_ways(nerfturbo: Nerfturbo) -> None:
    """Beside --x, --no-x a text says what x does; beside --no-x alone it would say the opposite."""
    full = nerfturbo("train", "--preset", "ngp", "--help-all").out
    for flag in ("sampler.prune", "grid.enabled", "grid.cull-unseen", "train.capture"):
        assert f"--{flag}, --{flag.replace('.', '.no-')}" in full, flag
    assert not re.findall(r"^\W --[\w.]*no-[\w-]+", full, re.MULTILINE)


@pytest.mark.parametrize("verb", list(VERBS))
def test_every_help_is_short(nerfturbo: Nerfturbo, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = nerfturbo(*verb.split(), "--help")
    assert shown.code == 0 and 5 <= len(shown.out.splitlines()) <= 80
    assert max(len(line) for line in shown.out.splitlines() if "{" not in line) <= 80
    assert not re.search(r"None|default: \)|default: (False|True|'')|\(required\)|[│╭]", shown.out)
    flags = re.findall(r"^  --([\w-]+)", shown.out, re.MULTILINE)
    assert flags and len(set(flags)) == len(flags)
    for alone in re.findall(r"^\W (--no-[\w-]+)", shown.out, re.MULTILINE):  # then its text must name it
        assert shown.out.count(alone) == 2, alone


def test_a_field_and_a_sampler_are_chosen_by_name(nerfturbo: Nerfturbo, scene: Path) -> None:
    small = ["--grid.resolution", 8, "--train.batch-samples", 512, "--train.max-rays", 64, "--backend", "reference"]
    chosen = [
        "--field",
        "vanilla",
        "--field.width",
        16,
        "--field.depth",
        2,
        "--sampler=uniform",
        "--sampler.n-samples",
        6,
    ]
    done = nerfturbo("train", scene, *small, *chosen, "--steps", 2, "--turntable", 0, "--output", "out")
    assert done.code == 0, done.err
    config = json.loads(Path("out/config.json").read_text())["config"]
    assert config["field"] == {"kind": "vanilla", "width": 16, "depth": 2, "motion": "none"}
    assert config["sampler"] == {"kind": "uniform", "n_samples": 6}


def test_resuming_equals_never_stopping(nerfturbo: Nerfturbo, scene: Path) -> None:
    base = ["train", scene, *TINY_FLAGS, "--save-every", 1000]
    assert nerfturbo(*base, "--steps", 14, "--output", "whole").code == 0
    # The schedule looks at the number of steps, so the first part must know the whole: stop it by its checkpoint.
    assert nerfturbo(*base, "--steps", 14, "--output", "parts", "--save-every", 1e-9).code == 0
    kept = sorted(Path("parts/checkpoints").iterdir())
    assert [path.name for path in kept] == ["step_00000013", "step_00000014"]
    for file in kept[1].iterdir():
        file.unlink()
    kept[1].rmdir()
    assert nerfturbo("train", "--resume", "parts", "--backend", "reference", "--turntable", 0).code == 0
    whole, parts = tensors(Path("whole")), tensors(Path("parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    steps = [json.loads(line)["step"] for line in Path("parts/log.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_resuming_trains_longer_and_keeps_the_settings(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    common = ["--backend", "reference", "--turntable", 0, "--json"]
    result = nerfturbo("train", "--resume", run_folder, "--steps", 15, *common)
    assert result.code == 0 and result.json["steps"] == 15
    assert read_state(latest_checkpoint(run_folder)).config["grid"]["resolution"] == 8
    assert json.loads((run_folder / "config.json").read_text())["config"]["train"]["steps"] == 15


def test_default_outputs_do_not_collide(nerfturbo: Nerfturbo) -> None:
    first = default_output("ball")
    first.mkdir(parents=True)
    assert default_output("ball") != first


def test_a_scene_without_test_views_holds_some_out(nerfturbo: Nerfturbo, scene: Path) -> None:
    (scene / "transforms_test.json").unlink()
    result = nerfturbo("train", scene, *TINY_FLAGS, "--steps", 1, "--json")
    assert result.code == 0 and result.json["protocol"]["n_views"] == 1
    assert "3 training views, 1 test view (" in result.err


def test_lightning_trains_what_the_native_trainer_trains(nerfturbo: Nerfturbo, scene: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is an extra and not installed")
    base = ["train", scene, *TINY_FLAGS, "--steps", 9, "--json"]
    native = nerfturbo(*base, "--output", "native")
    other = nerfturbo(*base, "--output", "lightning", "--trainer", "lightning")
    assert (native.code, other.code) == (0, 0), other.err
    assert other.json["psnr"] == native.json["psnr"] and other.json["stopped_by"] == "steps"
    assert [len(run.json["ranks"]) for run in (native, other)] == [1, 1]
    one, two = tensors(Path("native")), tensors(Path("lightning"))
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_lightning_that_is_not_installed_is_said_before_anything_is_done(
    nerfturbo: Nerfturbo, scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = nerfturbo("train", scene, *TINY_FLAGS, "--trainer", "lightning", "--output", "out")
    assert result.code == 2 and "pip install 'nerfturbo[lightning]'" in result.err
    assert not Path("out").exists()
