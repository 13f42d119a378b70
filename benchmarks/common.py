"""What studies share: flags, errors said in one line, and results that an interrupted study goes on with.

Import it before torch, whose libraries read variables of the environment when they are loaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from nerfturbo.cli.main import run_command  # sets them

# isort: split
import torch

from nerfturbo.bench.record import Record
from nerfturbo.cli.bench import TrainingArgs
from nerfturbo.cli.progress import Display
from nerfturbo.cli.settings import parse_settings
from nerfturbo.config import Config
from nerfturbo.errors import InputError

MACHINE = ("processor", "gpu", "versions")  # of a machine, what decides whether times may stand side by side
T = TypeVar("T", bound=TrainingArgs)


def run_study(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """The exit code of a study: 0 done, 2 bad input or bad flags, 130 interrupted."""
    return run_command(lambda: main(sys.argv[1:] if argv is None else argv))


def parse_study(kind: type[T], argv: Sequence[str], script: str) -> tuple[T, Config]:
    """The flags, and the config that the preset among them begins with."""
    return parse_settings(kind, argv, f"python benchmarks/{script}.py")


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


def say_plan(display: Display, output: Path, n_held: int, n_left: int) -> None:
    if n_held and not n_left:
        display.note(f"{output} holds all of it already; --fresh measures it again")
    elif n_held:
        display.note(f"going on with {output}, which holds {n_held} trainings of these settings")
    display.phase(f"{n_left} measurements to make")


@contextmanager
def written_when_cut_short(display: Display, output: Path, count: Callable[[], int]) -> Iterator[None]:
    """Say what an interrupt leaves behind, and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if count():
            display.note(f"{count()} finished trainings are in {output}; the same command goes on with the others")
        raise


@contextmanager
def matmul_precision(name: Literal["ieee", "tf32"]) -> Iterator[None]:
    """How fp32 matrix products run on a GPU inside this block: exactly, or with ten bits of mantissa."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if name == "ieee" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
