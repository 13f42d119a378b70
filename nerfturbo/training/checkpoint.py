"""Checkpoints: a folder with `tensors.safetensors` and `state.json`, made whole or not at all.

Nothing is ever unpickled. A checkpoint is written into a temporary folder, flushed to disk and renamed, so that a kill
or a full disk at any moment leaves the previous one intact. The random state is the step: draws are counter-based.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import CheckpointError
from .optim import Optimizer

VERSION = 1
PREFIX = "step_"


@dataclass(frozen=True)
class CheckpointState:
    """The part of a checkpoint that is not tensors."""

    step: int
    train_seconds: float
    n_rays: int
    config: dict[str, Any]
    bounds: dict[str, Any]


def _collect(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    if optimizer is not None:
        tensors |= {f"optimizer.{name}": value for name, value in optimizer.state_tensors().items()}
    return {name: value.detach().contiguous().cpu() for name, value in tensors.items()}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_checkpoint(
    folder: Path, state: CheckpointState, model: nn.Module, optimizer: Optimizer | None, *, keep: int = 2
) -> Path:
    """Write `folder/step_00001234/` atomically and remove all but the newest `keep`."""
    from safetensors.torch import save_file

    final = folder / f"{PREFIX}{state.step:08d}"
    temporary = folder / f".{final.name}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        save_file(_collect(model, optimizer), temporary / "tensors.safetensors")
        text = json.dumps({"version": VERSION, **vars(state)}, indent=1)
        (temporary / "state.json").write_text(text)
        for path in (temporary / "tensors.safetensors", temporary / "state.json", temporary):
            _fsync(path)
        if final.exists():
            shutil.rmtree(final)
        os.replace(temporary, final)
        _fsync(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{final}: could not be saved ({error.strerror or error}); earlier checkpoints are intact"
        ) from error
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.startswith(PREFIX) and (path / "state.json").is_file())


def latest_checkpoint(run: Path) -> Path:
    """The newest checkpoint of a run folder (or the checkpoint folder itself)."""
    if (run / "state.json").is_file():
        return run
    found = list_checkpoints(run / "checkpoints")
    if not found:
        raise CheckpointError(f"{run}: expected a run folder with checkpoints/{PREFIX}*, found none; train one first")
    return found[-1]


def read_state(checkpoint: Path) -> CheckpointState:
    """Read and check `state.json`."""
    path = checkpoint / "state.json"
    try:
        values = json.loads(path.read_text())
        version = values.pop("version")
        if version > VERSION:
            raise CheckpointError(f"{path}: written by a newer nerfturbo (version {version}); upgrade to read it")
        return CheckpointState(**values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a readable checkpoint state ({error})") from error


def load_tensors(checkpoint: Path, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Load weights, grid and optimizer state in place; a mismatch names the first tensor that does not fit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = checkpoint / "tensors.safetensors"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from error
    own = model.state_dict()
    for name, value in own.items():
        saved = tensors.get(f"model.{name}")
        found = "no such tensor" if saved is None else f"shape {tuple(saved.shape)}"
        if saved is None or saved.shape != value.shape:
            raise CheckpointError(
                f"{path}: {name}: expected shape {tuple(value.shape)}, found {found}; it belongs to another model"
            )
    model.load_state_dict({name: tensors[f"model.{name}"] for name in own})
    if optimizer is not None:
        prefix = "optimizer."
        state = {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
        missing = sorted(set(optimizer.state_tensors()) - set(state))
        if missing:
            raise CheckpointError(f"{path}: {prefix}{missing[0]} is missing; training cannot go on from it")
        optimizer.load_state_tensors(state)
