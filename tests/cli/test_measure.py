"""`bench ablation`, `bench precision`, `tune` and `profile` on a tiny scene: what they write and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nerfturbo.bench import fine_samples
from nerfturbo.bench.ablation import ablation_cases
from nerfturbo.bench.fine_samples import StepTimer
from nerfturbo.bench.memory import TRIAL_STEPS, try_batch
from nerfturbo.bench.record import KEYS
from nerfturbo.presets import preset
from nerfturbo.training.trainer import Trainer

from ..data.folders import write_transforms
from ..tiny import TINY_FLAGS, ball_scene, tiny_config
from .conftest import Nerfturbo

FLAGS = [word for word in TINY_FLAGS if word not in ("--turntable", "0", "--backend", "reference")]


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NERFTURBO_BACKEND", "reference")


def test_ablation_changes_one_thing_at_a_time(nerfturbo: Nerfturbo, scene: Path, tmp_path: Path) -> None:
    output = tmp_path / "ablation.json"
    flags = ["--steps", 3, "--only", "grid", "white", "--device", "cpu", "--output", output]
    done = nerfturbo("bench", "ablation", scene, *FLAGS, *flags)
    assert done.code == 0 and "no occupancy grid" in done.out
    record = json.loads(output.read_text())
    assert set(record) == set(KEYS)
    names = [row["name"] for row in record["values"]["rows"]]
    assert names == ["as configured", "no occupancy grid", "no grid, no visibility pass", "white background"]
    assert all(row["psnr"] > 0.0 and row["seconds"] > 0.0 for row in record["values"]["rows"])
    assert output.with_suffix(".svg").read_text().startswith("<svg")
    assert nerfturbo("bench", "ablation", scene, *FLAGS, "--only", "magic").code == 2


def test_every_technique_has_its_row() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for name, device in (("ngp-cpu", cpu), ("vanilla", cpu), ("ngp", gpu), ("proposal-cpu", cpu)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
            cases = ablation_cases(preset(name), device)
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)
        assert all(case.config != cases[0].config or case.init_from or case.validate for case in cases[1:])
        words = [
            "occupancy grid",
            "early stop",
            "alpha threshold",
            "coarse and fine",
            "coarse pictures",
            "accumulation",
        ]
        words += ["background", "host memory", "warm-up", "cosine", "multistep", "constant", "early more often"]
        words += ["bf16"]
        words += ["begun from zoo:"] if name == "ngp-cpu" else []
        words += ["gradient checkpointing"] if name == "vanilla" else []
        words += ["no CUDA graph", "fp32"] if device == gpu else ["fp16"]
        assert [word for word in words if not any(word in found for found in names)] == []


def test_ablation_begins_from_a_run_and_scores_on_the_way(
    nerfturbo: Nerfturbo, scene: Path, run_folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "ablation.json"
    flags = ["--steps", 3, "--only", "begun", "early more", "--init-from", run_folder, "--device", "cpu"]
    done = nerfturbo("bench", "ablation", scene, *FLAGS, *flags, "--output", output)
    assert done.code == 0, done.err
    rows = {row["name"]: row for row in json.loads(output.read_text())["values"]["rows"]}
    first, *others = rows
    assert others == [
        f"+ begun from {run_folder.name}",
        f"+ begun from the networks of {run_folder.name}",
        "+ a view scored 8 times, early more often",
    ]
    assert all(row["error"] == "" for row in rows.values())
    scores = [rows[name]["psnr"] for name in (first, *others[:2])]
    assert len({round(score, 3) for score in scores}) == 3  # it mattered where they began
    assert rows[others[2]]["psnr"] == pytest.approx(rows[first]["psnr"], abs=1e-6)  # looking changes nothing
    missing = nerfturbo(
        "bench", "ablation", scene, *FLAGS, "--init-from", tmp_path / "none", "--output", tmp_path / "b.json"
    )
    assert missing.code == 2 and "no such file" in missing.err and not (tmp_path / "b.json").exists()


def test_precisions_are_compared_with_fp32(nerfturbo: Nerfturbo, scene: Path, tmp_path: Path) -> None:
    output = tmp_path / "precision.json"
    flags = ["--steps", 4, "--only", "fp32", "fp16", "--device", "cpu", "--output", output, "--seeds", 2, 1]
    done = nerfturbo("bench", "precision", scene, *FLAGS, *flags)
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
    assert nerfturbo("bench", "precision", scene, *FLAGS, "--device", "cpu", "--only", "fp8").code == 2


def test_each_precision_trains_the_largest_batch_of_one_budget(
    nerfturbo: Nerfturbo, scene: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, advance, tried = {"fp32": 2048, "fp16": 4096, "bf16": 512}, Trainer.advance, []

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
    command = ["bench", "precision", scene, *FLAGS, *flags, "--only", "fp32", "fp16"]
    done = nerfturbo(*command, "bf16")
    assert done.code == 0, done.err
    values = json.loads(output.read_text())["values"]
    assert values["largest_batch"] == {"fp32": 2048, "fp16": 4096, "bf16": None} and values["unfinished"] == []
    assert [(line["kind"], line["batch_samples"]) for line in values["same_memory"]] == [("fp32", 2048), ("fp16", 4096)]
    assert [run["batch_samples"] for run in values["runs"]] == [512, 512, 512, 2048, 4096]
    assert values["same_memory"][1]["psnr_difference"] is not None
    sentence = "bf16: not even 512 samples a step fit the budget: out of memory: "
    assert values["in_words"][0].startswith(sentence) and sentence in " ".join(done.out.split())
    page = output.with_suffix(".html").read_text()
    assert sentence in page and page.count("<td>4096</td>") == 1
    curves = (tmp_path / "precision-same_memory_psnr_over_seconds.svg").read_text()
    assert "fp16" in curves and "bf16" not in curves and curves in page
    tried.clear()
    assert nerfturbo(*command, "bf16").code == 0 and not tried  # that nothing fits is an answer, not a gap
    assert all(nerfturbo(*command[:-3], "--memory-budget", bad).code == 2 for bad in (0, -1, "inf", "half"))


def test_tune_writes_a_config_that_train_takes(nerfturbo: Nerfturbo, scene: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "tuned.json"
    flags = ["--steps", 6, "--device", "cpu", "--output", output]  # on a CPU at most 4 x the config's 512 samples
    done = nerfturbo("tune", scene, *FLAGS, *flags, "--json")
    assert done.code == 0, done.err
    found = done.json
    assert found["batch_samples"] == 2048 and [trial["fits"] for trial in found["batches"]] == [True, True]
    assert found["lr"] in [candidate["learning_rate"] for candidate in found["candidates"]]
    assert found["lr"] == min(found["candidates"], key=lambda candidate: candidate["mse"])["learning_rate"]
    trained = nerfturbo("train", "--config", output, "--steps", 2, "--turntable", 0, "--output", tmp_path / "run")
    assert trained.code == 0, trained.err
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert (config["train"]["batch_samples"], config["optim"]["lr"]) == (2048, found["lr"])
    assert config["field"]["width"] == 16
    few = nerfturbo("tune", scene, *FLAGS, *flags, "--max-batch", 100)
    assert few.code == 2 and "--max-batch: expected at least 1024 samples, got 100" in few.err
    assert nerfturbo("train", "--config", output, "--preset", "ngp").code == 2
    assert nerfturbo("train", "--config", tmp_path / "missing.json").code == 2
    (tmp_path / "other.json").write_text("{}")
    assert nerfturbo("train", "--config", tmp_path / "other.json").code == 2


def test_a_batch_that_does_not_fit_is_survived(scene: Path, tmp_path: Path) -> None:
    # In a process of its own: one that ran other tests reuses what they freed and need not grow.
    flags = ["--steps", 2, "--device", "cpu", "--output", tmp_path / "tuned.json", "--memory", 1e-3, "--json"]
    command = [str(word) for word in (sys.executable, "-m", "nerfturbo", "tune", scene, *FLAGS, *flags)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["batch_samples"] == 512  # the config's own
    first = found["batches"][0]
    assert first["fits"] is False and first["n_bytes"] > 1e6 and first["why"].startswith("took")


@pytest.mark.parametrize("kind", ["ngp", "vanilla"])
def test_profile_names_every_stage_and_writes_a_trace(
    nerfturbo: Nerfturbo, scene: Path, tmp_path: Path, kind: str
) -> None:
    output = tmp_path / "new" / "profile.json"
    flags = ["--steps", 3, "--warm-steps", 2, "--device", "cpu", "--output", output, "--field.kind", kind]
    done = nerfturbo("profile", scene, *FLAGS, *flags)
    assert done.code == 0, done.err
    values = json.loads(output.read_text())["values"]
    costs = {cost["stage"]: cost["milliseconds"] for cost in values["stages"]}
    assert set(costs) == {"rays", "march", "field", "composite", "backward", "optimizer", "grid", "host"}
    assert sum(costs.values()) == pytest.approx(values["step_ms"], rel=0.02)
    assert min(costs[name] for name in ("rays", "march", "field", "composite", "backward", "optimizer")) > 0.0
    peaks = {cost["stage"]: cost["peak_bytes"] for cost in values["stages"]}
    n_rays, bytes_of_a_ray = 64, 4 * (3 + 3)  # origins and directions at least
    assert peaks["rays"] >= n_rays * bytes_of_a_ray and peaks["backward"] > 0
    assert peaks["field"] < 64 << 20  # of a tiny batch, not of all that was ever allocated
    names = {event.get("name") for event in json.loads(output.with_suffix(".trace.json").read_text())["traceEvents"]}
    assert "nerfturbo: backward" in names and str(output.with_suffix(".trace.json")) in done.out


@pytest.mark.parametrize("asked", ["auto", "ngp-cpu"])
def test_what_is_measured_is_what_training_would_take(nerfturbo: Nerfturbo, tmp_path: Path, asked: str) -> None:
    folder, taken = write_transforms(tmp_path / "capture", aabb_scale=4), {"auto": "proposal-cpu", "ngp-cpu": "ngp-cpu"}
    few = [*FLAGS, "--device", "cpu", "--preset", asked, "--steps", 2]
    commands = {
        "profile": ["profile", folder, *few, "--warm-steps", 1],
        "ablation": ["bench", "ablation", folder, *few, "--only", "white", "--eval-views", 1],
        "precision": ["bench", "precision", folder, *few, "--only", "fp32", "--eval-views", 1, "--equal-time", "none"],
    }
    for name, command in commands.items():
        output = tmp_path / f"{name}.json"
        done = nerfturbo(*command, "--output", output)
        assert done.code == 0, done.err
        assert json.loads(output.read_text())["values"]["preset"] == taken[asked], name
        assert ("preset proposal-cpu, because the scene has no end" in done.err) == (asked == "auto")


def test_a_batch_that_the_machine_refuses_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(trainer: Trainer) -> None:
        torch.empty(1 << 55)  # no machine has this much

    monkeypatch.setattr(Trainer, "advance", hungry)
    trial = try_batch(tiny_config(), ball_scene(), 1024, device=torch.device("cpu"), budget=1 << 40)
    assert trial.fits is False and trial.why.startswith("out of memory: ")


TWO_PASSES = ["--sampling.kind", "hierarchy", "--sampling.coarse-samples", 4, "--sampling.n-samples", 4]


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
def test_saved_time_buys_fine_samples(nerfturbo: Nerfturbo, scene: Path, tmp_path: Path) -> None:
    output = tmp_path / "precision.json"
    flags = ["--steps", 4, "--device", "cpu", "--output", output, "--equal-time", "steps", "--eval-views", 1]
    done = nerfturbo("bench", "precision", scene, *FLAGS, *TWO_PASSES, *flags, "--memory-budget", "none")
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


def test_equal_time_refuses_what_it_cannot_do(nerfturbo: Nerfturbo, scene: Path) -> None:
    command = ["bench", "precision", scene, *FLAGS, "--device", "cpu", "--max-fine"]
    refused = nerfturbo(*command, 64)
    assert refused.code == 2 and "--max-fine" in refused.err and "sampling.kind grid" in refused.err
    less = nerfturbo(*command, 3, *TWO_PASSES)
    assert less.code == 2 and "at least the 4 fine samples" in less.err
    assert nerfturbo(*command, 64, *TWO_PASSES, "--equal-time", "none").code == 2
