"""Checkpoints: a folder with `tensors.safetensors` and `state.json`, made whole or not at all. Nothing is ever
unpickled. A checkpoint is written into a temporary folder, flushed to disk and renamed, so that a kill or a full disk
at any moment leaves the previous one intact. The random state is the step: draws are counter-based. docs/checkpoints.md
says what is kept, and how older versions are read."""

import contextlib
import errno
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..fields.field import field_part
from ..files import remove_abandoned, replacing
from .optim import Optimizer
from .refine import match_shapes

VERSION = 2
PREFIX = "step_"
ASIDE = "~"  # behind the name of a checkpoint that is being replaced by another one of the same step
KEEP = 2
OTHERS = "optimizer."  # before the names of tensors that are not the model's
LIGHTNING_KEY = "nerfturbo"  # under which a `NerfModule` puts what a checkpoint of ours holds into Lightning's file
_RENAMED = (("model.proposer.", "model.sampler."), ("optimizer.proposer.", "optimizer.sampler."))  # since version 0.1


@dataclass(frozen=True)
class CheckpointState:
    """The part of a checkpoint that is not tensors; what has a default is not in files of version 1."""

    step: int
    train_seconds: float
    n_rays: int
    config: dict[str, Any]
    bounds: dict[str, Any]
    score: float | None = None  # PSNR of a held-out view at this step; the best one is kept
    lr_factor: float = 1.0  # what `--on-instability lower-lr` has multiplied the learning rate by


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_checkpoint(
    folder: Path, state: CheckpointState, model: nn.Module, others: dict[str, Tensor] | None, *, keep: int = KEEP
) -> Path:
    """Write `folder/step_00001234/` atomically; the newest `keep` and the one with the best score stay."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    tensors |= {f"{OTHERS}{name}": value for name, value in (others or {}).items()}
    collected, places = {}, set()
    for name, value in tensors.items():
        kept = value.detach().contiguous().cpu()
        if kept.numel() and kept.data_ptr() in places:  # two names of one parameter
            kept = kept.clone()
        places.add(kept.data_ptr())
        collected[name] = kept
    return write_tensors(folder, state, collected, keep=keep)


def write_tensors(folder: Path, state: CheckpointState, tensors: dict[str, Tensor], *, keep: int = KEEP) -> Path:
    """What `save_checkpoint` does, of tensors on the CPU named as in the file."""
    final, aside = (folder / f"{PREFIX}{state.step:08d}{ending}" for ending in ("", ASIDE))
    try:
        remove_abandoned(folder)
        with replacing(final) as temporary:
            temporary.mkdir()
            _write(temporary, state, tensors)
            if final.exists():  # one of the same step: one of the two is whole at every moment
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(final, aside)
        _fsync(folder)
    except OSError as error:
        needed = sum(value.numel() * value.element_size() for value in tensors.values())
        why = f"{error.strerror or error}; it takes {needed / 1e6:.1f} MB"
        with contextlib.suppress(OSError):
            why += f", {shutil.disk_usage(folder).free / 1e6:.1f} MB are free"
        raise CheckpointError(f"{final}: could not be saved ({why}); earlier checkpoints are intact") from error
    shutil.rmtree(aside, ignore_errors=True)
    best = best_checkpoint(folder)
    for old in list_checkpoints(folder)[: -max(1, keep)]:
        if old != best:
            shutil.rmtree(old, ignore_errors=True)
    return final


def _write(folder: Path, state: CheckpointState, tensors: dict[str, Tensor]) -> None:
    """Both files, flushed to disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, folder / "tensors.safetensors")
    except SafetensorError as error:  # what the library makes of an error of the disk
        number = re.search(r"os error (\d+)", str(error))
        text = str(error) if number is None else os.strerror(int(number[1]))
        raise OSError(errno.EIO if number is None else int(number[1]), text) from error
    (folder / "state.json").write_text(json.dumps({"version": VERSION, **vars(state)}, indent=1))
    for path in (folder / "tensors.safetensors", folder / "state.json", folder):
        _fsync(path)


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    names = {path.name: path for path in folder.iterdir() if path.name.startswith(PREFIX)}
    whole = {name: path for name, path in names.items() if (path / "state.json").is_file()}
    return [path for name, path in sorted(whole.items()) if not (name.endswith(ASIDE) and name[:-1] in whole)]


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the highest score, the newer of two equals; None where none has one."""
    scored: list[tuple[float, Path]] = []
    for path in list_checkpoints(folder):
        with contextlib.suppress(CheckpointError):
            if (score := read_state(path).score) is not None and not math.isnan(score):
                scored.append((score, path))
    return max(scored)[1] if scored else None


def latest_checkpoint(run: Path) -> Path:
    """The newest checkpoint of a run folder, or the one folder of a checkpoint itself."""
    if (run / "state.json").is_file():
        return run
    if not (found := list_checkpoints(run / "checkpoints")):
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
        if version < 1:
            raise ValueError(f"version {version}")
        state = CheckpointState(**values)
        counts = (state.step, state.train_seconds, state.n_rays, state.lr_factor)
        if not all(isinstance(one, int | float) and 0 <= one < 1 << 60 for one in counts) or state.step % 1:
            raise ValueError("a count that is none")
        return replace(state, step=int(state.step), score=None if state.score is None else float(state.score))
    except (OSError, ValueError, OverflowError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a readable checkpoint state ({error})") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """What a safetensors file holds, by the names that the tensors have now."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from error
    for old, new in _RENAMED:
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: v for name, v in tensors.items()}
    for name in [name for name, value in tensors.items() if "photos.focal" in name and value.dim() == 1]:
        tensors[name] = tensors[name][:, None].repeat(1, 2)  # one factor for both axes, in version 0.1
    return tensors


def load_tensors(
    checkpoint: Path, model: nn.Module, optimizer: Optimizer | None = None, *, averaged: bool = False
) -> dict[str, Tensor]:
    """Load weights, grid and optimizer state in place; a mismatch names the first tensor that does not fit. Gives all
    tensors that are not the model's.

    `averaged` takes the running mean of the weights in place of the weights, where the checkpoint has one.
    """
    path = checkpoint / "tensors.safetensors"
    tensors = read_tensors(path)
    if match_shapes(model, tensors) and optimizer is not None:
        optimizer.rebuild(model)
    own = model.state_dict()
    if "model.photos.forwards" in tensors:  # of version 0.1; a trainer has seen the cameras
        tensors |= {f"model.{name}": own[name] for name in ("photos.axes", "photos.intrinsics")}
    for name, value in own.items():
        saved = tensors.get(f"model.{name}")
        found = "no such tensor" if saved is None else f"shape {tuple(saved.shape)}"
        if saved is None or saved.shape != value.shape:
            differs = f"expected shape {tuple(value.shape)}, found {found}"
            raise CheckpointError(f"{path}: {name}: {differs}; it belongs to another model")
    means = {name: tensors.get(f"optimizer.{name}.average") for name in own} if averaged else {}
    model.load_state_dict({n: tensors[f"model.{n}"] if (mean := means.get(n)) is None else mean for n in own})
    others = field_part(tensors, OTHERS)
    if optimizer is not None:
        missing = sorted(name for name in set(optimizer.state_tensors()) - set(others) if not name.endswith(".average"))
        if missing:
            raise CheckpointError(f"{path}: {OTHERS}{missing[0]} is missing; training cannot go on from it")
        optimizer.load_state_tensors(others)
    return others


def native_from_lightning(path: Path, folder: Path) -> Path:
    """Write Lightning's checkpoint file as `folder/step_00001234/`, which every command reads."""
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        own = saved[LIGHTNING_KEY]
        state = CheckpointState(**own["state"])
        weights: dict[str, Tensor] = dict(saved["state_dict"])
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, AttributeError, EOFError) as error:
        raise CheckpointError(f"{path}: not a checkpoint of a NerfModule ({error or type(error).__name__})") from error
    except Exception as error:  # what unpickling refuses has its own type
        raise CheckpointError(f"{path}: holds more than tensors and plain values ({error})") from error
    tensors = {name: value for name, value in weights.items() if name.startswith("model.")}
    tensors |= {f"{OTHERS}{name}": value for name, value in own["optimizer"].items()}
    return write_tensors(folder, state, tensors)


@contextlib.contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Lightning's file as a checkpoint folder, for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as folder:
        yield native_from_lightning(path, Path(folder))
