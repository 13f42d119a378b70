"""`eval`, `render`, `scene`, and the command itself."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import pytest
import torch

import nerfturbo as package
from nerfturbo.cli.main import VERBS
from nerfturbo.presets import preset

from .conftest import Nerfturbo

REFERENCE = ["--backend", "reference"]


def test_eval_repeats_the_score_of_training(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    before = json.loads((run_folder / "metrics.json").read_text())
    (run_folder / "report.html").unlink()
    result = nerfturbo("eval", run_folder, *REFERENCE, "--json")
    assert result.code == 0
    after = json.loads((run_folder / "metrics.json").read_text())
    assert after["psnr"] == pytest.approx(before["psnr"], abs=1e-6)
    assert after["rays_per_second"] == before["rays_per_second"]
    assert result.json["psnr"] == after["psnr"]
    assert (run_folder / "report.html").is_file()


def test_eval_shows_the_worst_views_first_and_its_protocol(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    result = nerfturbo("eval", run_folder, *REFERENCE, "--table", 1)
    views = json.loads((run_folder / "metrics.json").read_text())["per_view"]
    worst = min(views, key=lambda view: view["psnr"])
    rows = [line.split() for line in result.out.splitlines() if line.endswith(".png")]
    assert len(rows) == 1 and rows[0][0] == str(worst["index"]) and float(rows[0][1]) == round(worst["psnr"], 2)
    assert "background: white" in result.out and "1 better ones" in result.out
    assert nerfturbo("eval", run_folder, "--table", -1).code == 2


def test_eval_in_finer_steps_and_with_more_rays_says_so(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    before = json.loads((run_folder / "metrics.json").read_text())
    assert before["protocol"]["rays_per_pixel"] == 1
    result = nerfturbo("eval", run_folder, *REFERENCE, "--eval-views", 1, "--refine", 3, "--rays", 2, "--json")
    assert result.code == 0 and result.json["psnr"] != before["psnr"]
    protocol = result.json["protocol"]
    assert protocol["rays_per_pixel"] == 4
    assert protocol["steps_per_diagonal"] == 3 * before["protocol"]["steps_per_diagonal"]
    for verb in ("eval", "render"):
        result = nerfturbo(verb, run_folder, "--refine", 0)
        assert result.code == 2 and "--refine: expected a number > 0" in result.err


def test_lpips_that_is_not_installed_is_said_before_scoring(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    if importlib.util.find_spec("lpips") is not None:
        pytest.skip("lpips is installed here")
    result = nerfturbo("eval", run_folder, "--lpips")
    assert result.code == 2 and "pip install lpips" in result.err and "scoring" not in result.err


def test_lpips_without_weights_is_said_and_left_out(
    nerfturbo: Nerfturbo, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(net: str, verbose: bool) -> None:
        raise URLError("Temporary failure in name resolution")

    monkeypatch.setitem(sys.modules, "lpips", SimpleNamespace(LPIPS=offline))
    result = nerfturbo("eval", run_folder, *REFERENCE, "--eval-views", 1, "--lpips", "--json")
    assert result.code == 0 and result.json["psnr"] > 0.0 and result.json["lpips"] is None
    assert "name resolution" in result.err and "alexnet-owt-7be5be79.pth" in result.err
    assert "going on without LPIPS" in result.err and "Traceback" not in result.err


def test_eval_of_fewer_views_leaves_no_old_pictures(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    assert nerfturbo("eval", run_folder, *REFERENCE, "--eval-views", 1).code == 0
    assert sorted(path.name for path in (run_folder / "images").glob("test_*")) == ["test_000.jpg", "test_000.png"]


def test_eval_of_an_interrupted_run(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    (run_folder / "metrics.json").unlink()
    result = nerfturbo("eval", run_folder, *REFERENCE)
    assert result.code == 0 and "12 steps" in result.out
    assert (run_folder / "report.html").is_file()


@pytest.mark.parametrize(("flags", "size"), [([], (16, 16)), (["--scale", "0.5"], (8, 8))])
def test_render_an_orbit(nerfturbo: Nerfturbo, run_folder: Path, flags: list[str], size: tuple[int, int]) -> None:
    from PIL import Image

    result = nerfturbo("render", run_folder, "--frames", 2, "--output", "orbit.gif", *flags, *REFERENCE)
    assert result.code == 0 and result.out.strip() == "orbit.gif"
    with Image.open("orbit.gif") as image:
        assert image.n_frames == 2 and image.size == size  # type: ignore[attr-defined]


def test_render_the_test_views_as_files(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    words = ["render", run_folder, "--path", "test", "--output", "frames", "--background", "black", *REFERENCE]
    assert nerfturbo(*words).code == 0
    assert sorted(path.name for path in Path("frames").glob("*.png")) == ["frame_0000.png", "frame_0001.png"]


def test_render_refuses_before_it_renders(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    Path("file").write_text("x")
    for output in ("a.avi", "file/a.gif"):
        result = nerfturbo("render", run_folder, "--output", output)
        assert result.code == 2 and "rendering" not in result.err


def test_scene_info(nerfturbo: Nerfturbo, scene: Path) -> None:
    found = nerfturbo("scene", "info", scene, "--json").json
    assert found["format"] == "Blender" and found["name"] == "ball"
    assert found["splits"]["train"] | {"views": 4, "sizes": [[16, 16]], "has_alpha": True} == found["splits"]["train"]
    assert found["splits"]["val"] is None and found["splits"]["test"]["views"] == 2
    assert found["bounds"]["low"] == [-1.5, -1.5, -1.5]
    shown = nerfturbo("scene", "info", scene)
    assert shown.code == 0 and "4 views, 16 x 16, with alpha" in shown.out
    auto = preset("auto", "cuda" if torch.cuda.is_available() else "cpu").preset
    assert found["preset"] == auto and f"preset  {auto}, which `nerfturbo train` takes" in shown.out


def test_scene_write_can_be_read_again(nerfturbo: Nerfturbo) -> None:
    flags = ["--resolution", 12, "--train-views", 3, "--test-views", 1]
    assert nerfturbo("scene", "write", "toybox", "here", *flags).code == 0
    assert nerfturbo("scene", "info", "here", "--json").json["splits"]["train"]["views"] == 3
    again = nerfturbo("scene", "write", "toybox", "here", *flags)
    assert again.code == 2 and "new or empty folder" in again.err
    assert nerfturbo("scene", "write", "toybus", "there").code == 2 and not Path("there").exists()


def test_the_overview_names_every_command(nerfturbo: Nerfturbo) -> None:
    for words in ([], ["--help"], ["-h"]):
        result = nerfturbo(*words)
        assert result.code == 0 and all(verb in result.out for verb in VERBS)
    assert nerfturbo("--version").out.strip() == f"nerfturbo {package.__version__}"
    rows = [line for line in nerfturbo().out.splitlines() if line.startswith("  ")]
    assert len({len(re.match(r"  \S+( \S+)?  +", line)[0]) for line in rows}) == 1  # type: ignore[index]
    bench = nerfturbo("bench", "--help")
    assert bench.code == 0 and "bench step" in bench.out and "doctor" not in bench.out


@pytest.mark.parametrize("words", ["mesh", "mesh --texture", "points", "splats", "grid", "cameras", "onnx", "web"])
def test_the_overview_names_every_file_that_an_export_writes(
    nerfturbo: Nerfturbo, run_folder: Path, words: str
) -> None:
    kind, *flags = words.split()
    result = nerfturbo("export", kind, run_folder, "a.txt", *flags)
    assert result.code == 2
    _, found, endings = result.err.partition("a file ending in ")
    assert found and set(re.findall(r"\.[a-z]+\b", endings.partition(", got")[0])) <= set(
        re.findall(r"\.[a-z]+\b", VERBS[f"export {kind}"][2])
    )


@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize("words", ["--help", "bench --help", "render --help"])
def test_a_reader_that_leaves_is_no_error(words: str, buffered: str) -> None:
    command = subprocess.Popen(
        [sys.executable, "-m", "nerfturbo.cli.main", *words.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": buffered},
    )
    assert command.stdout is not None and command.stderr is not None
    command.stdout.close()  # as `| true` does; `| head -2` a moment later
    assert (command.stderr.read(), command.wait()) == (b"", 0)


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_explains_itself(nerfturbo: Nerfturbo, verb: str) -> None:
    result = nerfturbo(*verb.split(), "--help")
    assert result.code == 0 and f"nerfturbo {verb}" in result.out


MISTAKES = {
    "trian": "did you mean train?",
    "help trian": "did you mean train?",
    "export": "expected one that `nerfturbo --help` lists, got 'export'",
    "export mehs": "did you mean export mesh?",
    "export glb run x.glb": "did you mean export mesh?",
    "export html run": "did you mean export web?",
    "bench train toybox": "did you mean bench scene?",
    "mesh run": "did you mean export mesh?",
    "exprot run": "did you mean export?",
    "train toybax": "did you mean toybox?",
    "train builtin:toybax --steps 3": "did you mean toybox?",
    "train no/such/folder": "no/such/folder: expected a folder with a scene, got no such folder",
    "profile no/such/folder": "no/such/folder: expected a folder with a scene, got no such folder",
    "render no/such/run": "no/such/run: expected a run folder, got no such folder",
    "compare no/such/run no/other": "no/such/run: expected a run folder, got no such folder",
    "bench render no/such/run": "no/such/run: expected a run folder, got no such folder",
    "export mesh no/such/run x.glb": "no/such/run: expected a run folder, got no such folder",
    "scene info toybax": "did you mean toybox?",
    "scene info --json no/such/folder": "no/such/folder: expected a folder with a scene, got no such folder",
    "scene write toybax out": "did you mean toybox?",
    "warmup toybax": "did you mean toybox?",
    "train --preset ngp no/such/folder": "no/such/folder: expected a folder with a scene, got no such folder",
    "process no/such/photos out": "no/such/photos: expected photos or a video, got no such file or folder",
    "train toybox --preset ngb": "did you mean ngp?",
    "train toybox --device cpu -o runs/x": "-o: did you mean --output?",
    "train toybox --device cpu --iters=5": "--iters: did you mean --steps?",
    "train toybox --device cpu --grid.resoluton 64": "--grid.resoluton: did you mean --grid.resolution?",
    "process . out --max-feature 9": "--max-feature: did you mean --max-features?",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistyped_word_is_answered_with_the_one_that_was_meant(words: str) -> None:
    run = _without_torch(words.split())
    assert run.returncode == 2 and MISTAKES[words] in run.stderr, run.stderr


@pytest.mark.parametrize("verb", ["eval", "render", "export mesh", "export web", "bench render"])
def test_a_mistyped_run_is_found_before_the_flags_are_parsed(
    nerfturbo: Nerfturbo, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr("nerfturbo.cli.flags.tyro.cli", lambda *_, **__: pytest.fail("the parser was built"))
    result = nerfturbo(*verb.split(), "no/such/run")
    assert result.code == 2 and "no/such/run: expected a run folder, got no such folder" in result.err


def test_a_mistyped_folder_is_answered_with_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "fox").mkdir()
    run = _without_torch(["train", str(tmp_path / "fxo")])
    assert run.returncode == 2 and "got no such folder; did you mean fox?" in run.stderr, run.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_a_mistyped_flag_of_every_verb_is_answered_in_one_line(verb: str) -> None:
    run = _without_torch([*verb.split(), "--zzz", "3"])
    assert run.returncode == 2, run.stderr
    assert re.fullmatch(rf"error: unrecognized flag --zzz: `nerfturbo {verb} --help(-all)?` lists all\n", run.stderr)


@pytest.mark.parametrize("words", [["--help"], ["help", "train"], ["train", "--help"]])
def test_help_is_quick_because_torch_is_not_imported(words: list[str]) -> None:
    start = time.perf_counter()
    run = _without_torch(words)
    assert run.returncode == 0 and "usage: nerfturbo" in run.stdout, run.stderr
    assert time.perf_counter() - start < 5.0  # 0.4 s on an idle machine


def _without_torch(words: list[str]) -> subprocess.CompletedProcess[str]:
    """One command in a process of its own, whose exit code is 99 if it has imported what takes seconds."""
    program = "import sys\nfrom nerfturbo.cli.main import main\ntry:\n  code = main(sys.argv[1:])\n"
    program += "except SystemExit as end:\n  code = end.code\n"
    program += "sys.exit(99 if {'torch', 'numba', 'triton'} & set(sys.modules) else code)"
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
