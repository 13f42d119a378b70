"""Every `nerfturbo` command in the blocks of the readme and the docs has flags that exist, and does its work on a small
scene."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nerfturbo.cli import main as command
from nerfturbo.cli.flags import parse

from .conftest import Nerfturbo

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS_A_FILE = ("--resume", "--config", ".py:")  # read before the flags are

# What the small scene cannot show, and the tests that do.
ELSEWHERE = {
    "nerfturbo process": "test_photos.py",
    "photos/": "test_photos.py",
    "walk.mp4": "test_photos.py",
    "nerfturbo batch": "test_batch.py",
    "nerfturbo view": "test_viewer.py",
    "--viewer": "test_viewer.py",
    "--ndc": "test_real_formats.py",
    "--loss.depth": "../training/test_depth_loss.py",
    "nerfturbo doctor": "test_doctor.py",
    "nerfturbo bench": "../bench",
}
SCENES = ["scenes/lego", "lego", "scenes/garden", "captures/garden", "captures/fox", "new_scene", "elsewhere/lego"]
RUNS = ["RUN", "runs/lego", "runs/lego-a", "runs/lego-b", "runs/garden", "runs/photos", "runs/old", "runs/NAME"]
SMALLER = {  # the same command with less to do
    r"--(steps|train-views|frames) \d+": r"--\1 2",
    r"--time-limit \d+": "--time-limit 0.1",
    r"--resolution \d+": "--resolution 16",
    r"--faces \d+": "--faces 100",
    r"--texture$": "--texture --texture-size 64 --faces 100",
    r"--only 0 20-30": "--only 0",
    r"--pixel 400,320": "--pixel 8,8",
    r"--view 3": "--view 1",
    r"--downscale \d+": "--downscale 2",
    r"(builtin:\w+) --downscale \d+": r"\1 --downscale 8",
    r"--preset voxels": "--preset voxels --field.resolutions 4 8 12 16",
    r"--field.resolutions [\d ]+": "--field.resolutions 4 8 12 16 ",
    r" --lpips": "",
    r"--sampler.n-samples \d+": "--sampler.n-samples 8",
}
SMALL = ["--train.batch-samples", "256", "--train.max-rays", "16", "--grid.resolution", "8"]
SMALL += ["--render.steps-per-diagonal", "32"]
SMALL_FIELD = ["--field.n-levels", "2", "--field.log2-entries", "10", "--field.max-resolution", "32"]
SMALL_FIELD += ["--field.width", "16"]  # of the presets that have a hash grid


class ParsedError(Exception):
    """The flags were read: nothing else is to happen."""


def commands(*, with_files: bool = False) -> dict[str, str]:
    """Each command once, and the page that has it; of those that differ in values alone, the first."""
    found: dict[str, str] = {}
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            for part in (part.strip() for line in lines for part in line.split("  #")[0].split("&&")):
                if part.startswith("nerfturbo ") and (with_files or not any(flag in part for flag in NEEDS_A_FILE)):
                    found.setdefault(part, page.name)
    kinds = {" ".join(re.findall(r"^nerfturbo \w+(?: \w+)?|--[\w.-]+", text)): text for text in reversed(found)}
    return {text: found[text] for text in reversed(kinds.values())}


def test_documented_commands_parse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def parse_only(kind: type, argv: Sequence[str], prog: str, *, default: Any = None) -> None:
        parse(kind, argv, prog, default=default)
        raise ParsedError

    monkeypatch.setattr("nerfturbo.cli.settings.parse", parse_only)
    monkeypatch.setattr("nerfturbo.cli.settings.check_source", lambda source: None)  # the pages' scenes are not here
    for module in ("common", "flags"):
        monkeypatch.setattr(f"nerfturbo.cli.{module}.require_run", Path)  # nor their runs
    for module, _, _ in command.VERBS.values():
        monkeypatch.setattr(importlib.import_module(f"nerfturbo.cli.{module}"), "parse", parse_only, raising=False)
    wrong, n_parsed = [], 0
    for text, page in commands().items():
        words = shlex.split(text)[1:]
        verb = next(verb for verb in sorted(command.VERBS, key=len, reverse=True) if text[10:].startswith(verb))
        module, function, _ = command.VERBS[verb]
        try:
            getattr(importlib.import_module(f"nerfturbo.cli.{module}"), function)(words[len(verb.split()) :])
        except ParsedError:
            n_parsed += 1
        except SystemExit:
            wrong.append(f"{page}: {text}\n{capsys.readouterr().err[-600:]}")
    assert not wrong, "\n".join(wrong)
    assert n_parsed > 40


def trained_on(scene: Path, run: Path, steps: int) -> Path:
    flags = [*SMALL, *SMALL_FIELD, "--steps", str(steps), "--turntable", "0", "--output", str(run)]
    assert command.main(["train", str(scene), *flags]) == 0
    return run


@pytest.fixture(scope="module")
def solid(scene_on_disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is no fog any more."""
    return trained_on(scene_on_disk, tmp_path_factory.mktemp("solid") / "run", 200)


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a dynamic scene, and the scene beside it."""
    folder = tmp_path_factory.mktemp("moving")
    small = ["--resolution", "16", "--train-views", "4", "--test-views", "2"]
    assert command.main(["scene", "write", "seesaw", str(folder / "scene"), *small]) == 0
    trained_on(folder / "scene", folder / "run", 2)
    return folder


def smaller(text: str) -> list[str]:
    """The words of a command with less to do; what it writes may be there already."""
    for long, short in SMALLER.items():
        text = re.sub(long, short, text)
    words = shlex.split(text)[1:]
    match words[0]:
        case "train" if "--resume" in words:
            n_steps = json.loads(Path(words[words.index("--resume") + 1], "metrics.json").read_text())["steps"]
            words[words.index("--steps") + 1] = str(n_steps + 2)
        case "train":
            words = [
                "runs/again" if word in RUNS and words[i - 1] == "--output" else word for i, word in enumerate(words)
            ]
            words += [*SMALL, "--turntable", "0", "--eval-views", "1", "--overwrite"]
            words += [] if {"voxels", "my_field.py:MyField"} & set(words) else SMALL_FIELD
            words += [] if {"--steps", "--time-limit"} & set(words) else ["--steps", "2"]
            words += ["--downscale", "8"] if text in ("nerfturbo train", "nerfturbo train seesaw") else []
        case "render":
            words += ["--overwrite"] + ([] if {"--frames", "--only"} & set(words) else ["--frames", "2"])
        case "export" | "compare":
            words += ["--overwrite"]
            words += ["--tune-steps", "1", "--eval-views", "1"] if words[1] == "web" else []
            words += ["--tune-seconds", "0.1", "--eval-views", "1"] if words[1] == "splats" else []
            words += ["--resolution", "16"] if words[1] == "mesh" and "--resolution" not in words else []
        case "tune":
            words += [*SMALL, *SMALL_FIELD, "--steps", "2", "--max-batch", "1024"]
        case "profile":
            words += [*SMALL, *SMALL_FIELD, "--warm-steps", "2"]
    return words


@pytest.mark.slow
def test_documented_commands_run(nerfturbo: Nerfturbo, scene_on_disk: Path, solid: Path, moving: Path) -> None:
    here = Path.cwd()
    for name in SCENES:
        shutil.copytree(scene_on_disk, here / name)
    for name in RUNS:
        shutil.copytree(solid, here / name)
    shutil.copytree(moving / "scene", here / "scenes/jumping")
    field = re.search(r"```python\n(# my_field.py.*?)```", (ROOT / "docs/own_field.md").read_text(), re.DOTALL)
    assert field is not None
    (here / "my_field.py").write_text(field[1])
    path = [{"camera_to_world": [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 4, 0, 0, 0, 1], "fov": 40, "aspect": 1}] * 2
    (here / "mine.json").write_text(json.dumps({"render_width": 8, "render_height": 8, "fps": 2, "camera_path": path}))
    wrong, n_run = [], 0
    for text, page in commands(with_files=True).items():
        if any(part in text for part in ELSEWHERE):
            continue
        if page == "dynamic.md":
            shutil.rmtree(here / "RUN")
            shutil.copytree(moving / "run", here / "RUN")
        words = smaller(text)
        result = nerfturbo(*words)
        n_run += 1
        if result.code != 0:
            wrong.append(f"{page}: {text}\n{' '.join(words)}\n{result.err[-600:]}")
    assert not wrong, "\n".join(wrong)
    assert n_run > 50
