"""Checkpoints, initialisation and loggers by the command line."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from nerfturbo.training import refine
from nerfturbo.training.checkpoint import best_checkpoint, latest_checkpoint, list_checkpoints, read_state
from nerfturbo.training.trainer import load_model

from ..tiny import TINY_FLAGS
from .conftest import Nerfturbo


def test_saves_by_steps_keep_the_newest_and_the_best(nerfturbo: Nerfturbo, scene: Path, tmp_path: Path) -> None:
    flags = ["--save-every", "3steps", "--keep", 1, "--steps", 8, "--output", tmp_path / "run", "--log", "tensorboard"]
    assert nerfturbo("train", scene, *TINY_FLAGS, *flags).code == 0
    states = [read_state(path) for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert states[-1].step == 8 and len(states) <= 2 and all(state.score is not None for state in states)
    best = best_checkpoint(tmp_path / "run" / "checkpoints")
    scores = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    saved = {
        entry["step"]: entry["psnr"] for entry in scores if entry["kind"] == "preview" and entry["step"] in (3, 6, 8)
    }
    assert best is not None and read_state(best).score == pytest.approx(max(saved.values()), abs=1e-3)
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


def test_the_last_checkpoint_has_what_was_culled_at_the_end(nerfturbo: Nerfturbo, scene: Path) -> None:
    """A save that falls on the last step comes before it: the checkpoint is written once more."""
    grids = []
    for due in ("60steps", "1000s"):
        flags = ["--steps", 60, "--eval-views", 1, "--save-every", due, "--output", due]
        assert nerfturbo("train", scene, *TINY_FLAGS, *flags).code == 0
        grids.append(load_model(latest_checkpoint(Path(due))).grid)
    assert torch.equal(grids[0].bits, grids[1].bits)
    learned = grids[0].occupied_fraction()
    grids[0].recall()
    assert learned < grids[0].occupied_fraction()


def test_no_checkpoint_of_the_last_step_is_written_before_cells_are_culled(
    nerfturbo: Nerfturbo, scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill in between would leave a run that counts as trained to its end and still has the cells."""
    seen: list[str] = []
    cull = refine.cull_unseen

    def look(*args: Any) -> float:
        seen.extend(path.name for path in list_checkpoints(Path("run/checkpoints")))
        return cull(*args)

    monkeypatch.setattr(refine, "cull_unseen", look)
    flags = ["--steps", 8, "--save-every", "4steps", "--keep", 9, "--output", "run"]
    assert nerfturbo("train", scene, *TINY_FLAGS, *flags).code == 0
    assert set(seen) == {"step_00000004"} and read_state(latest_checkpoint(Path("run"))).step == 8


@pytest.mark.parametrize("text", ["0", "-3s", "2.5steps", "soon", "steps", "nan"])
def test_save_every_that_means_nothing_is_refused(nerfturbo: Nerfturbo, scene: Path, text: str) -> None:
    done = nerfturbo("train", scene, *TINY_FLAGS, f"--save-every={text}", "--steps", 1)
    assert done.code == 2 and "error: --save-every: expected seconds > 0 (30s) or whole steps" in done.err


def test_training_begins_from_another_run(nerfturbo: Nerfturbo, scene: Path, run_folder: Path, tmp_path: Path) -> None:
    flags = [*TINY_FLAGS, "--steps", 1, "--output", tmp_path / "new"]
    done = nerfturbo("train", scene, *flags, "--init-from", run_folder, "--init-parts", "encoding", "grid")
    assert done.code == 0 and f"begins from {run_folder}" in done.err and "encoding, grid (" in done.err


def test_what_cannot_begin_leaves_no_folder(
    nerfturbo: Nerfturbo, scene: Path, run_folder: Path, tmp_path: Path
) -> None:
    flags = [*TINY_FLAGS, "--steps", 1, "--output", tmp_path / "new"]
    wrong = nerfturbo("train", scene, *flags, "--field.width", 32, "--init-from", run_folder)
    assert wrong.code == 2 and "expected shape" in wrong.err and "--init-parts" in wrong.err
    assert nerfturbo("train", scene, *flags, "--init-from", tmp_path / "missing").code == 2
    assert nerfturbo("train", scene, *flags, "--init-parts", "grid").code == 2
    alone = nerfturbo("train", scene, *flags, "--init-keep", 0.5)
    assert alone.code == 2 and "--init-keep: expected --init-from beside it" in alone.err
    wrong = nerfturbo("train", scene, *flags, "--init-from", run_folder, "--init-parts", "nonsense")
    assert wrong.code == 2 and "--init-parts: expected some of" in wrong.err and "'nonsense'" in wrong.err
    keep = nerfturbo("train", scene, *flags, "--init-from", run_folder, "--init-keep", 2)
    assert keep.code == 2 and "--init-keep: expected a number above 0, at most 1, got 2" in keep.err
    beside = nerfturbo("train", "--resume", run_folder, "--steps", 30, "--init-from", run_folder)
    assert beside.code == 2 and "--init-from: expected nothing beside --resume" in beside.err
    assert not (tmp_path / "new").exists()


def test_a_full_disk_is_said_and_the_run_can_go_on(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    before = list_checkpoints(run_folder / "checkpoints")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, hard))  # the system itself refuses to write more
    try:
        done = nerfturbo(
            "train", "--resume", run_folder, "--steps", 14, "--save-every", "1steps", "--backend", "reference"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.code == 2 and "Traceback" not in done.err
    assert "File too large" in done.err and "training goes on" in done.err
    assert f"go on from step 12 by --resume {run_folder}" in done.err
    assert list_checkpoints(run_folder / "checkpoints") == before
    again = nerfturbo("train", "--resume", run_folder, "--steps", 14, "--turntable", 0, "--backend", "reference")
    assert again.code == 0 and read_state(list_checkpoints(run_folder / "checkpoints")[-1]).step == 14


def test_training_ends_at_a_target(nerfturbo: Nerfturbo, scene: Path, tmp_path: Path) -> None:
    flags = [*TINY_FLAGS, "--steps", 1000, "--output", tmp_path / "run", "--train.target-psnr", 1.0, "--json"]
    done = nerfturbo("train", scene, *flags, "--save-every", "2steps")
    assert done.code == 0 and done.json["stopped_by"] == "target psnr" and done.json["steps"] < 1000
