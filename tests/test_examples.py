"""The examples are a short course over public names; each runs, and its image or file shows what it says."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import nerfturbo
from nerfturbo.cli.main import main
from nerfturbo.compat import uninstall

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def load(number: int) -> ModuleType:
    path = EXAMPLES[number - 1]
    spec = importlib.util.spec_from_file_location(f"example_{path.stem[:2]}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def halves(path: Path) -> tuple[float, np.ndarray]:
    """Of an image with the truth on its left: the PSNR of its right half against the left one, and that half."""
    image = np.asarray(Image.open(path), dtype=float) / 255.0
    truth, found = np.split(image, 2, axis=1)
    assert truth.std() > 0.05 and found.std() > 0.02, "flat"
    return -10.0 * np.log10(np.square(found - truth).mean()), found


def test_the_course_is_short_and_numbered():
    assert len(EXAMPLES) <= 8 and [int(path.name[:2]) for path in EXAMPLES] == list(range(1, len(EXAMPLES) + 1))
    for path in EXAMPLES:
        text = path.read_text()
        assert 30 <= len(text.splitlines()) <= 80, path.name
        assert "You see `" in ast.get_docstring(ast.parse(text)), f"{path.name} does not say what one sees"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_names_are_public(path: Path):
    pages = "\n".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    documented = {
        name for line in re.findall(r"from nerfturbo\S* import .*", pages) for name in re.findall(r"\w+", line)
    }
    documented |= set(re.findall(r"^::: nerfturbo\S*\.(\w+)", pages, re.MULTILINE))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nerfturbo"):
            for alias in node.names:
                assert alias.name in documented, f"{node.module}.{alias.name} stands on no page"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                known = not alias.name.startswith("nerfturbo.") or f"import {alias.name}" in pages
                assert known, f"{alias.name} stands on no page"
        elif isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_") or node.attr == "__init__", node.attr
            if isinstance(node.value, ast.Name) and node.value.id == "nt":
                assert node.attr in nerfturbo.__all__, node.attr


def test_1_a_ring_is_rendered_and_the_grid_saves_most_samples(tmp_path: Path):
    whole, occupied, seen = load(1).main(tmp_path / "ring.png", 64).values()
    assert occupied < 0.15 * whole and seen < 0.5 * occupied
    image = np.asarray(Image.open(tmp_path / "ring.png")) / 255.0
    covered = (image < 0.99).any(-1)
    assert 0.2 < covered.mean() < 0.35 and not covered[32, 32] and covered[50, 32]
    assert image[covered][:, 0].std() > 0.1  # coloured by place


def test_2_five_lines_make_the_difference(tmp_path: Path):
    source = EXAMPLES[1].read_text()
    assert re.findall(r"  # (\d)\b", source) == ["1", "2", "3", "4", "5"]
    example, found = load(2), {}
    for plain, steps in ((True, 20), (False, 60)):
        torch.manual_seed(0)
        seconds, found[plain] = example.main(steps, tmp_path / "nerf.png", plain=plain, n_rays=256)[-1]
        shown, _ = halves(tmp_path / "nerf.png")
        assert seconds > 0.0 and shown == pytest.approx(found[plain], abs=0.3)
    assert found[True] > 9.5 and found[False] > 13.5


def test_3_a_field_of_ones_own_is_trained_rendered_and_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def in_this_process(words: list[str], *, check: bool) -> None:  # the commands it starts, without three starts
        assert words[:3] == [sys.executable, "-m", "nerfturbo"] and check and main(words[3:]) == 0

    example, run = load(3), tmp_path / "run"
    monkeypatch.setattr(example, "subprocess", SimpleNamespace(run=in_this_process))
    train, *others = example.COMMANDS  # the same with less to do
    small = "--train.batch-samples 4096 --grid.resolution 32 --turntable 0"
    example.COMMANDS = (f"{train} {small} --eval-views 4", *others)
    example.main("seesaw", 80, 8, run)
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["psnr"] > metrics["baselines"]["constant_psnr"] + 2.0, metrics
    with Image.open(run / "orbit.gif") as video:
        first = np.asarray(video.convert("RGB"), dtype=float)
        video.seek(5)
        assert video.n_frames == 12 and np.abs(first - np.asarray(video.convert("RGB"))).mean() > 2.0
    assert first.std() > 5 and first.mean() > 60
    assert 0.0 < np.load(run / "grid.npz")["occupied"].mean() < 0.9


def test_4_proposals_and_mixed_precision_serve_a_field_of_ones_own(tmp_path: Path):
    example, image = load(4), tmp_path / "sky.png"
    psnr = example.main(100, image, n_rays=128, size=40)
    assert psnr > 14.5 and halves(image)[0] == pytest.approx(psnr, abs=0.3)
    exact, half = (example.main(3, image, precision, 64, 16) for precision in ("fp32", "bf16"))
    assert exact != half and abs(exact - half) < 0.1


def test_5_cameras_are_put_right(tmp_path: Path):
    before, after = load(5).main(60, tmp_path / "cameras.png")
    assert after < 0.4 * before
    true, wrong, found = np.split(np.asarray(Image.open(tmp_path / "cameras.png"), dtype=float), 3, axis=1)
    assert true.std() > 10.0 and np.abs(found - true).mean() < 0.5 * np.abs(wrong - true).mean()


def test_6_a_distance_is_learned_from_its_surface(tmp_path: Path):
    assert load(6).main(40, tmp_path / "torus.png", n_points=200, size=48) < 0.02
    image = np.asarray(Image.open(tmp_path / "torus.png"))
    covered = (image < 250).any(-1)
    assert covered[24, 10] and covered[24, 38] and covered[34, 24] and not covered[24, 24], "a ring with a free hole"


def test_7_code_written_for_nerfacc_runs_as_it_is(tmp_path: Path):
    try:
        psnr = load(7).main(60, tmp_path / "ball.png", 48)
    finally:
        uninstall()
    assert psnr > 15.0 and halves(tmp_path / "ball.png")[0] == pytest.approx(psnr, abs=0.3)


def test_8_two_processes_do_what_one_does(tmp_path: Path):
    pytest.importorskip("lightning", reason="lightning is an extra and not installed")
    alone = load(8).main(20, tmp_path / "alone.png", n_rays=1024)
    assert alone[-1] < 0.5 * alone[0] and halves(tmp_path / "alone.png")[0] > 13.0
    command = [sys.executable, EXAMPLES[7], "--steps", "20", "--devices", "2", "--output", tmp_path / "two.png"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    together = float(re.search(r"loss (\S+) over 2 processes", done.stdout)[1])
    assert together == pytest.approx(alone[-1], rel=1e-2)
    assert halves(tmp_path / "two.png")[0] == pytest.approx(halves(tmp_path / "alone.png")[0], abs=0.2)
