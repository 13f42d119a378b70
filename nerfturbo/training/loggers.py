"""Where log entries go: plain functions of one entry, a dictionary with `kind`, `step`, `seconds` and numbers.

`MetricsLog` makes the entries from steps and previews and hands each to its loggers. Your own is any function:

    log = MetricsLog(loggers=[jsonl_logger(Path("log.jsonl")), lambda entry: queue.put(entry)])

TensorBoard and Weights & Biases are imported when their logger is made, never before.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import InputError

Logger = Callable[[dict[str, Any]], None]
LOG = logging.getLogger("nerfturbo")
NOT_SCALARS = ("kind", "step", "image")


def jsonl_logger(path: Path) -> Logger:
    """One JSON line per entry. A full disk is said once and does not end training: the entries stay in memory."""
    failed = False

    def write(entry: dict[str, Any]) -> None:
        nonlocal failed
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, default=str) + "\n")
        except OSError as error:
            if not failed:
                LOG.warning("%s: cannot be written (%s); training goes on", path, error.strerror or error)
            failed = True

    return write


def console_logger(print_line: Callable[[str], None] = LOG.info) -> Logger:
    """One line of text per entry, through a function that takes it."""

    def write(entry: dict[str, Any]) -> None:
        numbers = ", ".join(f"{name} {value:.5g}" for name, value in _scalars(entry).items())
        print_line(f"step {entry['step']}: {numbers}")

    return write


def tensorboard_logger(folder: Path) -> Logger:
    """Curves and pictures for `tensorboard --logdir FOLDER`; a resumed run goes on in the same curves."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise _missing("tensorboard", "tensorboard", error) from None
    writer = SummaryWriter(str(folder), flush_secs=10)

    def write(entry: dict[str, Any]) -> None:
        for name, value in _scalars(entry).items():
            writer.add_scalar(f"{entry['kind']}/{name}", value, entry["step"])
        if (picture := _picture(entry)) is not None:
            writer.add_image(entry["kind"], picture, entry["step"], dataformats="HWC")
        writer.flush()

    return write


def wandb_logger(name: str, config: dict[str, Any] | None = None, project: str = "nerfturbo") -> Logger:
    """Curves and pictures in a Weights & Biases run, in the mode its environment variables ask for."""
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _missing("wandb", "wandb", error) from None
    run = wandb.init(project=project, name=name, config=config)

    def write(entry: dict[str, Any]) -> None:
        values: dict[str, Any] = {f"{entry['kind']}/{key}": value for key, value in _scalars(entry).items()}
        if (picture := _picture(entry)) is not None:
            values[entry["kind"]] = wandb.Image(picture)
        run.log(values, step=entry["step"])

    return write


def _scalars(entry: dict[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in entry.items()
        if name not in NOT_SCALARS and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _picture(entry: dict[str, Any]) -> Any:
    """(height, width, 3) uint8 of the picture an entry names, or None."""
    path = entry.get("image")
    if path is None or not Path(path).is_file():
        return None
    import numpy
    from PIL import Image

    with Image.open(path) as image:
        return numpy.asarray(image.convert("RGB"))


def _missing(logger: str, package: str, error: ImportError) -> InputError:
    return InputError(f"logger {logger}", f"the package {package}", str(error), f"pip install {package}")
