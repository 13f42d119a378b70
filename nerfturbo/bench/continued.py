"""Benchmarks of many trainings that may be cut short: what a file already holds, and whether one may go on with it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import InputError
from ..files import replacing
from ..training.trainer import Trainer, TrainSummary
from .record import Record

QUEUED_STEPS = 4  # where the clock ends a training
MACHINE = ("processor", "gpu", "versions")  # of a machine, what decides whether times may stand side by side


def fit_whole(trainer: Trainer) -> TrainSummary:
    """Train to the end. `fit` returns on Ctrl-C, and half a training must not pass for a measurement."""
    summary = trainer.fit()
    if summary.stopped_by == "interrupted":
        raise KeyboardInterrupt
    return summary


def fit_to_the_second(trainer: Trainer) -> TrainSummary:
    """Train until the time limit, a few steps at a time: `fit` on a GPU may go on for half a second after it."""
    trainer.begin()
    while not trainer.is_over:
        trainer.advance(QUEUED_STEPS)
    return trainer.end("time limit")


def held_values(path: Path, record: Record, settings: Sequence[str]) -> dict[str, Any] | None:
    """The values in a file of the same settings, code and machine as `record`; None where there are none to go on with.

    A finished file of other settings may be replaced, as any older result; an unfinished one holds what somebody meant
    to go on with, so that it is refused.
    """
    try:
        old = json.loads(path.read_text())
        values = old["values"]
        machine, commit, done = old["machine"], old["commit"], not values["unfinished"]
    except (OSError, ValueError, LookupError, TypeError):
        return None  # no file, or not one of these
    wanted = json.loads(json.dumps(record.values))
    other = [name for name in settings if _plain(values.get(name)) != _plain(wanted[name])]
    other += [name for name in MACHINE if machine.get(name) != record.machine.get(name)]
    other += ["commit"] if commit != record.commit else []
    if not other:
        return values
    if done:
        return None
    found = f"{path}, unfinished and with another {', '.join(other)}"
    raise InputError("--output", "a file of these settings, or none", found, "choose another one, or measure --fresh")


def _plain(value: Any) -> Any:
    """A protocol without its seeds: more of them may be added."""
    return {key: item for key, item in value.items() if key != "seeds"} if isinstance(value, dict) else value


def renders_file(output: Path) -> Path:
    """Where the pictures of an unfinished comparison wait for its page."""
    return output.with_name(f".{output.stem}-renders.safetensors")


def write_renders(output: Path, images: dict[str, Tensor]) -> None:
    """Whole or not at all."""
    from safetensors.torch import save_file

    with replacing(renders_file(output)) as temporary:
        save_file({name: image.contiguous() for name, image in images.items()}, temporary)


def read_renders(output: Path) -> dict[str, Tensor]:
    """Those that were written; none where the file is missing or broken, since they can be done without."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with contextlib.suppress(OSError, SafetensorError):
        return load_file(renders_file(output))
    return {}
