"""`torchrun ... -m nerfturbo train`: several processes, several machines, and what happens when one of them dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nerfturbo.config import Config, from_dict
from nerfturbo.data.scene import load_scene
from nerfturbo.ops import use_backend
from nerfturbo.training.checkpoint import latest_checkpoint, list_checkpoints, load_tensors, read_state, read_tensors
from nerfturbo.training.trainer import Trainer, load_model

from ..tiny import TINY_FLAGS

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes through /proc")
STEPS = 60


def torchrun(options: list[object], scene: Path, run: Path, *flags: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "nerfturbo", "train", scene, *TINY_FLAGS]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.Popen(
        [str(word) for word in (*command, "--steps", STEPS, "--output", run, *flags)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def worker(rank: int, run: Path) -> int:
    """The process id of one rank of the job that writes `run`."""
    for folder in Path("/proc").iterdir():
        try:
            names = (folder / "environ").read_bytes().split(b"\0") if folder.name.isdigit() else []
            words = (folder / "cmdline").read_bytes().split(b"\0") if names else []
        except OSError:
            continue
        if f"RANK={rank}".encode() in names and str(run).encode() in words and b"torch.distributed.run" not in words:
            return int(folder.name)
    pytest.fail(f"rank {rank} is not running")


def kill_rank_1_after_a_checkpoint(process: subprocess.Popen[str], run: Path) -> Path:
    deadline = time.monotonic() + 120.0
    while not list_checkpoints(run / "checkpoints"):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"no checkpoint: {process.communicate()}")
        time.sleep(0.02)
    os.kill(worker(1, run), signal.SIGKILL)
    return latest_checkpoint(run)


def assert_trained_as_one_process_would(scene: Path, run: Path) -> None:
    """The same as one process with twice the rays, whatever happened on the way."""
    saved = read_state(latest_checkpoint(run))
    config = from_dict(Config, saved.config)
    grown = {name: 2 * getattr(config.train, name) for name in ("batch_samples", "max_rays")}
    with use_backend("reference"):
        trainer = Trainer(replace(config, train=replace(config.train, **grown)), load_scene(str(scene)))
        trainer.fit()
    assert (saved.step, saved.n_rays) == (STEPS, trainer.stepper.n_rays)
    own = {f"model.{name}": value for name, value in trainer.model.state_dict().items()}
    own |= {f"optimizer.{name}": value for name, value in trainer.optimizer.state_tensors().items()}
    found = read_tensors(latest_checkpoint(run) / "tensors.safetensors")
    assert own.keys() == found.keys()  # weights beside weights, their means beside their means
    for name, value in own.items():
        assert torch.allclose(value.double(), found[name].double(), rtol=1e-3, atol=1e-4), name


def test_torchrun_restarts_and_training_goes_on_to_the_same_end(scene: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["--nproc-per-node", 2, "--max-restarts", 1, "--monitor-interval", 0.1]
    process = torchrun(options, scene, run, "--save-every", 0.05, "--keep", 1000, "--json")
    saved = kill_rank_1_after_a_checkpoint(process, run)
    load_tensors(saved, load_model(saved))
    written = saved.stat().st_mtime_ns
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    result = json.loads(out)  # nothing was written by those that were cut short
    assert (result["run"], result["steps"]) == (str(run), STEPS)
    assert err.count("2 processes train together") == 2
    assert "error: rank 0 of 2 lost contact with rank 1 (" in err and f"{run}/checkpoints/step_" in err
    assert saved.stat().st_mtime_ns == written  # what was there was gone on from, not begun again
    assert_trained_as_one_process_would(scene, run)


def test_a_job_that_may_restart_needs_a_folder_to_find_again(
    nerfturbo, scene: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "1"}.items():
        monkeypatch.setenv(name, value)
    result = nerfturbo("train", scene, *TINY_FLAGS)
    assert result.code == 2 and "--output: expected a folder, because a restarted job" in result.err


def test_a_killed_rank_ends_the_job_with_its_checkpoint_intact(scene: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = torchrun(["--nproc-per-node", 2], scene, run, "--save-every", 0.05, "--steps", 100_000)
    step = read_state(kill_rank_1_after_a_checkpoint(process, run)).step
    out, err = process.communicate(timeout=120)
    assert process.returncode != 0 and out == ""
    assert "error: rank 0 of 2 lost contact with rank 1 (" in err and f"{run}/checkpoints/step_" in err
    checkpoint = latest_checkpoint(run)
    assert read_state(checkpoint).step >= step
    load_tensors(checkpoint, load_model(checkpoint))
