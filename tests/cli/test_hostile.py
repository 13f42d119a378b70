"""Files from strangers: nothing in a run, a checkpoint or a scene is run, and no name becomes a script."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nerfturbo.data.scene import load_scene
from nerfturbo.errors import CheckpointError, InputError
from nerfturbo.training.checkpoint import latest_checkpoint, native_from_lightning

from ..data import exporters, folders
from ..tiny import TINY_FLAGS
from .conftest import Nerfturbo

CODE = "import pathlib\npathlib.Path('ran').write_text('')\nclass Mine: pass\n"


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


SOURCES = ["{run}/mine.py:Mine", "run/mine.py:Mine", "mine.py:Mine", "run.mine:Mine", "mine:Mine"]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("part", ["field", "sampler"])
def test_a_run_brings_no_code_along(
    nerfturbo: Nerfturbo, run_folder: Path, source: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run_folder, "run")
    for place in ("", "run"):  # as `python -m` does where it is called
        monkeypatch.syspath_prepend(place)
    for place in ("mine.py", "run/mine.py"):
        Path(place).write_text(CODE)
    own = {"kind": "custom", "source": source.format(run=Path("run").resolve())}
    files = [Path("run/config.json"), latest_checkpoint(Path("run")) / "state.json"]
    kept = [file.read_text() for file in files]
    for damaged in files:
        for file, text in zip(files, kept, strict=True):
            document = json.loads(text)
            if file == damaged:
                document["config"][part] = own
            file.write_text(json.dumps(document))
        for words in ("eval run", "export cameras run out.json", "train --resume run --steps 99 --turntable 0"):
            done = nerfturbo(*words.split())
            if damaged.name == "config.json" or "--resume" not in words:  # which reads the state for its counts alone
                assert done.code == 2 and f"{part}.source" in done.err, done.err
            assert not Path("ran").exists()


@pytest.mark.parametrize("value", [[10**400], 10**400, "x"])
def test_values_that_are_no_numbers_are_named(nerfturbo: Nerfturbo, run_folder: Path, value: Any) -> None:
    shutil.copytree(run_folder, "run")
    for file, place, words in (
        (Path("run/metrics.json"), (), ["compare", "run", "run"]),
        (Path("run/config.json"), ("config", "optim"), ["export", "cameras", "run", "out.json"]),
        (latest_checkpoint(Path("run")) / "state.json", ("bounds",), ["export", "cameras", "run", "out.json"]),
    ):
        text = file.read_text()
        for name in {
            "metrics.json": ("train_seconds", "rays_per_second", "machine", "psnr"),
            "config.json": ("lr",),
        }.get(file.name, ("far",)):
            document = json.loads(text)
            inner = document
            for key in place:
                inner = inner[key]
            inner[name] = value
            file.write_text(json.dumps(document))
            done = nerfturbo(*words)
            assert done.code == 2 and (name in done.err or file.name in done.err or "bounds" in done.err), done.err
        file.write_text(text)


@pytest.mark.parametrize("part", ["field", "sampler"])
def test_a_run_calls_no_function_that_is_installed(
    nerfturbo: Nerfturbo, run_folder: Path, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Say "http.server:test", which shows the folder to everybody."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "helpful.py").write_text("def serve():\n    open('ran', 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    shutil.copytree(run_folder, "run")
    for file in (Path("run/config.json"), latest_checkpoint(Path("run")) / "state.json"):
        document = json.loads(file.read_text())
        document["config"][part] = {"kind": "custom", "source": "helpful:serve"}
        file.write_text(json.dumps(document))
    done = nerfturbo("eval", "run")
    assert done.code == 2 and f"{part} helpful:serve: expected a class with" in done.err, done.err
    assert not Path("ran").exists()


def test_pickles_and_boastful_headers_are_refused(nerfturbo: Nerfturbo, scene: Path, tmp_path: Path) -> None:
    torch.save({"nerfturbo": Bomb(), "state_dict": {}}, "bomb.ckpt")
    with pytest.raises(CheckpointError, match=r"bomb\.ckpt"):
        native_from_lightning(Path("bomb.ckpt"), tmp_path / "made")
    for length in (1 << 60, (1 << 64) - 1, 100 << 20):
        Path("large.safetensors").write_bytes(struct.pack("<Q", length) + b'{"a":{"dtype":"F32"}}')
        done = nerfturbo("train", scene, *TINY_FLAGS, "--steps", 1, "--init-from", "large.safetensors", "--output", "x")
        assert done.code == 2 and "large.safetensors" in done.err
    folders.write_llff(tmp_path / "llff")
    np.save(tmp_path / "llff/poses_bounds.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    exporters.write_neus(tmp_path / "neus")
    np.savez(tmp_path / "neus/cameras_sphere.npz", world_mat_0=np.array([Bomb()], dtype=object))
    folders.write_llff(tmp_path / "bare")
    (tmp_path / "bare/poses_bounds.npy").write_bytes(pickle.dumps(Bomb()))  # without a header of numpy's
    for name, file in (("llff", "poses_bounds.npy"), ("bare", "poses_bounds.npy"), ("neus", "cameras_sphere.npz")):
        with pytest.raises(InputError, match=file):
            load_scene(tmp_path / name)
    assert not Path("ran").exists()


def test_a_scene_named_like_a_script_is_harmless(nerfturbo: Nerfturbo, scene: Path) -> None:
    name = "<script>alert(1)<x onerror=alert(2)>"
    shutil.copytree(scene, name)
    assert nerfturbo("train", name, *TINY_FLAGS, "--steps", 2, "--output", "run").code == 0
    assert nerfturbo("compare", "run", "run", "--output", "both.html").code == 0
    for page in ("run/report.html", "both.html"):
        text = Path(page).read_text()
        assert "<script>alert" not in text and "<x onerror" not in text and "alert(1)" in text
        assert not re.search(r"<script[^>]+src=|<link[^>]+href=.https?:|<iframe", text)
