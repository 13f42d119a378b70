"""The examples run and do what they say."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from nerfturbo.compat import uninstall

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name[:2]}", EXAMPLES / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_sphere_is_rendered(tmp_path: Path):
    covered = load("01_render_a_sphere.py").main(tmp_path / "sphere.png", 48)
    assert 0.25 < covered < 0.45
    assert (tmp_path / "sphere.png").stat().st_size > 500


def test_the_grid_saves_most_samples():
    counts = list(load("02_skip_empty_space.py").main(500).values())
    assert counts[1] < 0.15 * counts[0] and counts[2] < 0.5 * counts[1]


def test_a_plain_field_learns():
    first, last = load("03_train_your_own_field.py").main(60)
    assert last > first + 4.0


def test_a_model_of_ones_own_learns_in_half_precision_as_in_fp32():
    example = load("06_mixed_precision.py")
    assert example.main(60, 16, "fp32") > 20.0
    exact, half = (example.main(3, 8, precision) for precision in ("fp32", "fp16"))
    assert abs(half - exact) < 0.05


def test_five_lines_make_the_difference():
    plain, faster = (Path(EXAMPLES / name).read_text() for name in ("04_plain_nerf.py", "05_five_lines_faster.py"))
    marked = [line for line in faster.splitlines() if line.endswith("  #")]
    assert len(marked) == 5
    same = faster[faster.index("def main") :].replace("\n".join(marked), "")
    new = [line for line in same.splitlines() if line not in plain.splitlines() and not line.endswith("  #")]
    assert len(new) == 1 and "unseen.rays" in new[0]  # the marked way to render, once more for the unseen pixels
    for name in ("04_plain_nerf.py", "05_five_lines_faster.py"):
        curve = load(name).main(20, n_rays=128)
        assert len(curve) == 1 and curve[0][0] > 0.0 and curve[0][1] > 8.0


def test_a_distance_is_learned_from_its_surface():
    before, after = load("07_sdf_with_eikonal_loss.py").main(40, n_points=256)
    assert after < 0.5 * before


def test_code_written_for_nerfacc_runs_as_it_is():
    try:
        before, after = load("08_code_written_for_nerfacc.py").main(40)
    finally:
        uninstall()
    assert after > before + 2.0


def test_fabric_trains_what_the_native_trainer_trains():
    pytest.importorskip("lightning", reason="lightning is an extra and not installed")
    from nerfturbo.ops import use_backend
    from nerfturbo.training.trainer import Trainer

    from .tiny import ball_scene, tiny_config

    losses, config = [], tiny_config(steps=12)
    with use_backend("reference"):
        Trainer(config, ball_scene(), callbacks=[lambda _, record: losses.append(record.loss)]).fit()
        found = load("09_lightning_fabric.py").main(config, ball_scene())
    assert found == pytest.approx(losses, rel=1e-5)


def test_cameras_are_put_right():
    before, after = load("10_camera_refinement.py").main(50)
    assert after < 0.5 * before


def test_a_moving_scene_is_learned():
    before, after = load("11_dynamic_scene.py").main(100)
    assert after > before + 4.0


def test_proposals_serve_a_field_of_ones_own():
    before, after = load("13_proposal_networks.py").main(60, n_rays=128)
    assert after > before + 3.0


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_examples_are_short_and_introduced(path: Path):
    text = path.read_text()
    assert text.startswith('"""') and len(text.splitlines()) <= 120


def test_two_processes_do_what_one_does():
    command = [sys.executable, EXAMPLES / "12_several_processes.py", "--steps", "2", "--rays", "64"]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    difference = float(re.search(r"relative difference (\S+);", done.stdout)[1])
    assert difference < 1e-5 and "the processes agree: True" in done.stdout


def test_k_planes_learn_as_a_field_of_ones_own():
    before, after = load("14_k_planes.py").main(40, downscale=16)
    assert after > before + 1.0
