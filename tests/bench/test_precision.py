"""`benchmarks/precision.py` on a tiny scene: what it writes and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fine_samples
from fine_samples import StepTimer
from nerfturbo.bench.tune import TRIAL_STEPS
from nerfturbo.training.trainer import Trainer

from ..cli.conftest import Nerfturbo
from ..data.folders import write_transforms
from ..tiny import TINY_FLAGS
from .conftest import Study

FLAGS = [word for word in TINY_FLAGS if word not in ("--turntable", "0", "--backend", "reference")]


@pytest.fixture(autouse=True)
def _cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NERFTURBO_BACKEND", "cpu")


def test_precisions_are_compared_with_fp32(study: Study, scene: Path, tmp_path: Path) -> None:
    output = tmp_path / "precision.json"
    flags = ["--steps", 4, "--only", "fp32", "fp16", "--device", "cpu", "--output", output, "--seeds", 2, 1]
    done = study("precision", scene, *FLAGS, *flags)
    assert done.code == 0, done.err
    values = json.loads(output.read_text())["values"]
    assert [line["kind"] for line in values["same_batch"]] == ["fp32", "fp16"]
    assert abs(values["same_batch"][1]["psnr_difference"]) < 0.1
    parts = [(run["part"], run["kind"], run["seed"]) for run in values["runs"]]
    assert parts[:4] == [("same_batch", kind, seed) for seed in (2, 1) for kind in ("fp32", "fp16")]
    # And in the memory that fp32 takes: its own training counts there too; plain torch needs more for tiny halves.
    assert parts[4:] == [("same_memory", "fp32", 2)] and values["runs"][4]["points"] == values["runs"][0]["points"]
    assert all(50_000 < run["peak_bytes"] < values["memory_budget_bytes"] * 2 for run in values["runs"])
    assert values["memory_budget"] == "fp32" and values["largest_batch"] == {"fp32": 512, "fp16": None}
    whole = f" MB of {values['memory_budget_bytes'] / 1e6:.0f} MB"
    assert values["no_batch_fits"]["fp16"].startswith("not even 512 samples a step fit the budget: took ")
    assert values["no_batch_fits"]["fp16"].endswith(whole) and values["memory_budget_bytes"] > 100_000
    assert [point["step"] for point in values["runs"][0]["points"]] == [1, 2, 3, 4]
    page = output.with_suffix(".html").read_text()
    assert "|fp16 - fp32|" in page and "http" not in page.replace("http://www.w3.org", "")
    assert "rays/s" in page and "SSIM" in page
    assert all((tmp_path / f"precision-{name}_over_step.svg").is_file() for name in ("psnr", "ssim"))
    assert study("precision", scene, *FLAGS, "--device", "cpu", "--only", "fp8").code == 2


def test_each_precision_trains_the_largest_batch_of_one_budget(
    study: Study, scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, advance, tried = {"fp32": 1024, "fp16": 2048, "bf16": 512}, Trainer.advance, []

    def limited(trainer: Trainer) -> object:
        train = trainer.config.train
        tried.append((train.precision, train.batch_samples))
        other = train.precision == "bf16" and train.steps == TRIAL_STEPS  # others have taken the memory meanwhile
        if train.batch_samples > most[train.precision] or other:
            torch.empty(1 << 55)  # no machine has this much
        return advance(trainer)

    monkeypatch.setattr(Trainer, "advance", limited)
    output = tmp_path / "precision.json"
    flags = ["--steps", 2, "--eval-views", 1, "--memory-budget", 100, "--device", "cpu", "--output", output]
    command = ["precision", scene, *FLAGS, *flags, "--only", "fp32", "fp16"]
    done = study(*command, "bf16")
    assert done.code == 0, done.err
    values = json.loads(output.read_text())["values"]
    assert values["largest_batch"] == {"fp32": 1024, "fp16": 2048, "bf16": None} and values["unfinished"] == []
    assert [(line["kind"], line["batch_samples"]) for line in values["same_memory"]] == [("fp32", 1024), ("fp16", 2048)]
    assert [run["batch_samples"] for run in values["runs"]] == [512, 512, 512, 1024, 2048]
    assert values["same_memory"][1]["psnr_difference"] is not None
    sentence = "bf16: not even 512 samples a step fit the budget: out of memory: "
    assert values["in_words"][0].startswith(sentence) and sentence in " ".join(done.out.split())
    page = output.with_suffix(".html").read_text()
    assert sentence in page and page.count("<td>2048</td>") == 1
    curves = (tmp_path / "precision-same_memory_psnr_over_seconds.svg").read_text()
    assert "fp16" in curves and "bf16" not in curves and curves in page
    tried.clear()
    assert study(*command, "bf16").code == 0 and not tried  # that nothing fits is an answer, not a gap
    assert all(study(*command[:-3], "--memory-budget", bad).code == 2 for bad in (0, -1, "inf", "half"))


TWO_PASSES = ["--sampler", "hierarchy", "--sampler.coarse-samples", 4, "--sampler.n-samples", 4]


@pytest.fixture
def _half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are made for real; what they take is told by their samples, so that every machine finds the same."""

    def seconds(timer: StepTimer) -> float:
        timer._run(1)
        speed = {"fp32": 1.0, "fp16": 0.5, "bf16": 3.0}[timer.kind.name]
        return 1e-3 * timer.trainer.config.train.batch_samples * speed

    monkeypatch.setattr(fine_samples, "MORE_BLOCKS", 1)
    monkeypatch.setattr(fine_samples, "_tidy", lambda device: None)
    monkeypatch.setattr(fine_samples, "PASS_STEPS", 1)
    monkeypatch.setattr(StepTimer, "seconds", seconds)


@pytest.mark.usefixtures("_half_of_the_time")
def test_saved_time_buys_fine_samples(study: Study, scene: Path, tmp_path: Path) -> None:
    output = tmp_path / "precision.json"
    flags = ["--steps", 4, "--device", "cpu", "--output", output, "--equal-time", "steps", "--eval-views", 1]
    done = study("precision", scene, *FLAGS, *TWO_PASSES, *flags, "--memory-budget", "none")
    assert done.code == 0, done.err
    values = json.loads(output.read_text())["values"]
    searches = {search["kind"]: search for search in values["fine_samples"]}
    assert [searches[kind]["fine_samples"] for kind in ("fp32", "fp16", "bf16")] == [4, 12, 4]  # 2 * (4 + 4) - 4
    assert [trial["fine_samples"] for trial in searches["fp16"]["trials"]] == [4, 8, 16, 12, 14, 13]
    assert all(min(search["passes"].values()) > 0.0 for search in searches.values())
    fp32, fp16, bf16 = values["same_time"]
    assert (fp32["kind"], fp16["kind"], bf16["kind"]) == ("fp32", "fp16", "bf16")
    assert fp16["fine_samples"] == 12 and fp16["batch_samples"] == 64 * (4 + 12) and fp16["steps"] == 4
    assert fp16["psnr_difference"] == pytest.approx(fp16["psnr"] - fp32["psnr"]) and 0.0 < fp16["ssim"] <= 1.0
    runs = {(run["part"], run["kind"]): run for run in values["runs"]}
    assert runs["same_time", "fp32"] | {"part": ""} == runs["same_batch", "fp32"] | {"part": ""}  # not trained again
    assert runs["same_time", "fp16"]["points"] != runs["same_batch", "fp16"]["points"]
    assert "buys 12 fine samples per ray for 4" in " ".join(done.out.split())
    assert "bf16: a step takes 3.00 times fp32's: no time is saved" in values["in_words"][1]
    page = output.with_suffix(".html").read_text()
    assert "Saved time spent on fine samples" in page and "|fp16 with 12 fine samples - fp32|" in page
    assert (tmp_path / "precision-step_over_fine_samples.svg").is_file()
    assert (tmp_path / "precision-equal_time.svg").is_file()
    script = Path(__file__).parents[2] / "scripts" / "bench_table.py"
    printed = subprocess.run([sys.executable, script, output], capture_output=True, text=True, check=True).stdout
    assert "| fine samples to train with |" in printed and "\n| fp16 | 12 | 4 |" in printed


def test_equal_time_refuses_what_it_cannot_do(study: Study, scene: Path) -> None:
    command = ["precision", scene, *FLAGS, "--device", "cpu", "--max-fine"]
    refused = study(*command, 64)
    assert refused.code == 2 and "--max-fine" in refused.err and "--sampler grid" in refused.err
    less = study(*command, 3, *TWO_PASSES)
    assert less.code == 2 and "at least the 4 fine samples" in less.err
    assert study(*command, 64, *TWO_PASSES, "--equal-time", "none").code == 2


@pytest.mark.parametrize("asked", ["auto", "ngp-cpu"])
def test_what_is_measured_is_what_training_would_take(
    nerfturbo: Nerfturbo, study: Study, tmp_path: Path, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NERFTURBO_BACKEND")  # the kernels are faster, and no number of the reference is asked for
    folder, taken = write_transforms(tmp_path / "capture", aabb_scale=4), {"auto": "proposal-cpu", "ngp-cpu": "ngp-cpu"}
    few = [*FLAGS, "--device", "cpu", "--preset", asked, "--steps", 2]
    commands = {
        "profile": ["profile", folder, *few, "--warm-steps", 1],
        "ablation": ["ablation", folder, *few, "--only", "white", "--eval-views", 1],
        "precision": ["precision", folder, *few, "--only", "fp32", "--eval-views", 1, "--equal-time", "none"],
    }
    for name, command in commands.items():
        output = tmp_path / f"{name}.json"
        done = (nerfturbo if name == "profile" else study)(*command, "--output", output)
        assert done.code == 0, done.err
        assert json.loads(output.read_text())["values"]["preset"] == taken[asked], name
        assert ("preset proposal-cpu, because the scene is unbounded" in done.err) == (asked == "auto")


@pytest.mark.parametrize("script", ["ablation", "precision"])
def test_results_that_could_not_be_written_are_refused_before_the_work(study: Study, scene: Path, script: str) -> None:
    Path("there.json").mkdir()
    folder, plot = (study(script, scene, "--output", name) for name in ("there.json", "plot.svg"))
    assert folder.code == plot.code == 2
    assert "there.json: expected a file, got a folder of that name" in folder.err
    assert "--output: expected a file ending in .json, got plot.svg" in plot.err
    assert [path.name for path in Path.cwd().iterdir()] == ["there.json"]


def test_every_preset_has_its_file_and_bars(study: Study, scene: Path, tmp_path: Path) -> None:
    output = tmp_path / "bars.json"
    both = [*FLAGS[:2], *FLAGS[FLAGS.index("--field.width") :]]  # what both fields have
    flags = ["--steps", 2, "--eval-views", 1, "--memory-budget", "none", "--device", "cpu", "--output", output]
    done = study("precision", scene, *both, *flags, "--only", "fp32", "fp16", "--presets", "ngp-cpu", "vanilla")
    assert done.code == 0, done.err
    found = json.loads(output.read_text())
    assert [found[name]["file"] for name in found] == ["bars_ngp-cpu.json", "bars_vanilla.json"]
    kept = {name: json.loads((tmp_path / found[name]["file"]).read_text())["values"] for name in found}
    assert all(values["preset"] == name and values["unfinished"] == [] for name, values in kept.items())
    assert list(found["ngp-cpu"]["bars"]) == ["fp16 within 0.1 dB of fp32"] and len(found["vanilla"]["bars"]) == 4
    assert found["vanilla"]["bars"]["fp16 at least 1.5 times TF32"] is None  # a CPU has no such units
    assert "vanilla: fp16 at least 1.5 times TF32: not measured" in done.out
