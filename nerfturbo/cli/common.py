"""What several verbs share: opening a scene, opening a run with its model (without torch until then), results."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from ..config import Config, DataConfig
from ..errors import InputError, refuse, require_run
from .flags import Backend, BackendName, Count, Device, RunPath, check_positive
from .progress import Display, showing
from .settings import resolve_device

if TYPE_CHECKING:
    from ..data.options import Progress
    from ..data.scene import Scene
    from ..evaluation.run_folder import RunFolder
    from ..rendering.model import NerfModel
    from ..training.checkpoint import CheckpointState
    from ..types import Aabb


@dataclass(frozen=True, kw_only=True)
class RunArgs:
    """What every verb over a trained run asks for."""

    run: RunPath = field(kw_only=False)
    data: Annotated[str | None, arg(metavar="DATA")] = None  # New location of the scene, if it was moved.
    device: Device = "auto"
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        require_run(self.run)  # before torch is imported


@dataclass(frozen=True, kw_only=True)
class PictureArgs(RunArgs):
    """And what those that render whole pictures ask for."""

    refine: Count = None  # Render in steps this many times shorter than training's; as the run was made unless given.
    rays: Count = None  # Render with N x N rays per pixel; as the run was made unless given.
    max_memory: Annotated[float | None, arg(metavar="MB")] = None
    """Render memory budget in MB; lower means smaller chunks, same image. 256 on a GPU and 64 on a CPU unless given, up
    to 4000 on a GPU where no grid places the samples."""


@dataclass(frozen=True)
class OpenRun:
    """A run folder with its newest checkpoint loaded."""

    run: RunFolder
    config: Config
    state: CheckpointState
    model: NerfModel

    def views(self, display: Display) -> tuple[Scene, Scene]:
        """The views of training, with the cameras that were learned, and those the run is scored on."""
        display.phase(f"opening {self.config.data.source}")
        return open_views(self.config, self.model)

    def align(self, test: Scene, steps: int, display: Display) -> Scene:
        """The test views with their poses fitted to the trained scene."""
        from ..evaluation.align import aligned_to

        display.phase("fitting the poses of the test views")
        return aligned_to(self.model, test, steps=steps, report=display.update)


@contextlib.contextmanager
def opened_run(args: RunArgs) -> Iterator[tuple[OpenRun, Display]]:
    """The run that the flags name, on their device and backend, and a display for the time it is open."""
    with showing() as display, chosen_backend(args.backend):
        yield load_run(args.run, resolve_device(args.device), args.data), display


@contextlib.contextmanager
def opened_for_pictures(args: PictureArgs) -> Iterator[tuple[OpenRun, Display]]:
    """The same, for rendering in the steps, with the rays and within the memory that the flags ask for."""
    from ..rendering.image import rendering_within

    check_positive({"--refine": args.refine, "--rays": args.rays})
    megabytes = args.max_memory
    if megabytes is not None and not 0.0 < megabytes < float("inf"):
        raise InputError("--max-memory", "megabytes > 0", f"{megabytes:g}")
    memory = rendering_within(None if megabytes is None else max(1, int(megabytes * 1e6)))
    with memory, opened_run(args) as (opened, display):
        given = {"eval_refine": args.refine, "eval_rays": args.rays}
        render = replace(opened.config.render, **{name: value for name, value in given.items() if value is not None})
        opened.model.config = replace(opened.model.config, render=render)
        yield replace(opened, config=replace(opened.config, render=render)), display


def load_run(path: str, device: str, data: str | None = None) -> OpenRun:
    """Open a run folder, whose pictures may have moved to `data`, and load its newest checkpoint."""
    from ..evaluation.run_folder import open_run
    from ..training.checkpoint import latest_checkpoint, read_state
    from ..training.trainer import load_model

    run = open_run(path)
    config = run.read_config()
    config = config if data is None else replace(config, data=replace(config.data, source=data))
    checkpoint = latest_checkpoint(run.path)
    return OpenRun(run, config, read_state(checkpoint), load_model(checkpoint, device))


def open_views(config: Config, model: NerfModel | None = None) -> tuple[Scene, Scene]:
    """The views a run was trained on, and those it is scored on; with the model, its cameras as it learned them."""
    try:
        train, test = open_data(config.data)
    except InputError as error:
        if error.got != "no such folder":
            raise
        raise InputError(error.what, error.expected, error.got, "name the folder by --data") from None
    return train if model is None else learned_cameras(model, train), test


def learned_cameras(model: NerfModel, train: Scene) -> Scene:
    """The training views with the cameras that were learned, where any were."""
    return train if model.photos is None else replace(train, cameras=model.photos.refined(train.cameras))


def open_data(data: DataConfig, on_progress: Progress | None = None) -> tuple[Scene, Scene]:
    """(training views, test views) of the scene that a config names."""
    from ..data.options import LoadOptions
    from ..data.scene import open_scenes

    return open_scenes(data.source, LoadOptions.of(data, on_progress))


def chosen_backend(name: BackendName) -> contextlib.AbstractContextManager[None]:
    """`auto` leaves the environment variable in force."""
    from ..ops import use_backend

    return contextlib.nullcontext() if name == "auto" else use_backend(name)


def backend_on(device: str) -> str:
    """The backend that runs on a device."""
    import torch

    from ..ops._dispatch import resolve

    return resolve(torch.empty(0, device=device))


def box_of(corners: Sequence[float], flag: str) -> Aabb:
    """The box of six numbers behind a flag: its low corner, its high one."""
    from ..types import Aabb

    try:
        return Aabb(tuple(corners[:3]), tuple(corners[3:]))  # type: ignore[arg-type]
    except InputError as error:
        found = " ".join(f"{number:g}" for number in corners)
        raise InputError(flag, "three finite numbers and three larger ones", found) from error


def check_new(path: Path, *, overwrite: bool, folder: bool = False, room: int = 0) -> None:
    """Refuse, before any work is done, a file (or folder) that cannot be made, has no room, or must not be replaced."""
    from ..evaluation.run_folder import check_writable

    check_writable(path, room)
    wanted, other = ("a folder", "a file") if folder else ("a file", "a folder")
    refuse(path.exists() and path.is_dir() != folder, str(path), wanted, f"{other} of that name")
    if path.exists() and not overwrite:
        raise InputError(str(path), "a new file", "one that is there", "replace it by --overwrite, or name another")


def print_json(document: dict[str, Any]) -> None:
    """A result as one JSON object on stdout; NaN and infinity become null."""
    from ..evaluation.run_folder import finite

    print(json.dumps(finite(document), allow_nan=False))
