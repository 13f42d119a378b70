"""Checkpoints of either trainer for the other one: what Lightning saved as a folder of our own.

`NerfModule` puts into Lightning's file what a checkpoint of ours holds besides the weights, under `nerfturbo`. Nothing
but tensors and plain values is ever unpickled.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .checkpoint import CheckpointState, write_tensors

KEY = "nerfturbo"
PREFIX = "model."  # of the weights in the state of a `NerfModule`


def native_from_lightning(path: Path, folder: Path) -> Path:
    """Write Lightning's checkpoint file as `folder/step_00001234/`, which every command reads."""
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        own = saved[KEY]
        state = CheckpointState(**own["state"])
        weights: dict[str, Tensor] = dict(saved["state_dict"])
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, AttributeError, EOFError) as error:
        raise CheckpointError(f"{path}: not a checkpoint of a NerfModule ({error or type(error).__name__})") from error
    except Exception as error:  # what unpickling refuses has its own type
        raise CheckpointError(f"{path}: holds more than tensors and plain values ({error})") from error
    tensors = {name: value for name, value in weights.items() if name.startswith(PREFIX)}
    tensors |= {f"optimizer.{name}": value for name, value in own["optimizer"].items()}
    return write_tensors(folder, state, tensors)


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Lightning's file as a checkpoint folder, for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as folder:
        yield native_from_lightning(path, Path(folder))
