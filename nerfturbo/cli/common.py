"""What several verbs share: opening a run with its model and its test views, and choosing where things run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..config import Config
from ..data.scene import Scene
from ..errors import InputError
from ..evaluation.run_folder import RunFolder, open_run
from ..ops import use_backend
from ..rendering.model import NerfModel
from ..rendering.rounds import rendering_within
from ..training.checkpoint import CheckpointState, latest_checkpoint, read_state
from ..training.trainer import load_model
from ..types import Aabb
from .scenes import open_scenes

BackendName = Literal["auto", "reference", "cpu", "triton"]


@dataclass(frozen=True)
class OpenRun:
    """A run folder with its newest checkpoint loaded."""

    run: RunFolder
    config: Config
    state: CheckpointState
    model: NerfModel


def with_pictures(opened: OpenRun, refine: int | None, rays: int | None) -> OpenRun:
    """The same run, its pictures rendered in steps `refine` times finer and with rays x rays rays per pixel."""
    for flag, value in (("--refine", refine), ("--rays", rays)):
        if value is not None and value < 1:
            raise InputError(flag, "a number > 0", str(value))
    given = {"eval_refine": refine, "eval_rays": rays}
    render = replace(opened.config.render, **{name: value for name, value in given.items() if value is not None})
    opened.model.config = replace(opened.model.config, render=render)
    return replace(opened, config=replace(opened.config, render=render))


def rendering_memory(megabytes: float | None) -> contextlib.AbstractContextManager[None]:
    """`--max-memory`: inside, pictures are rendered within so many megabytes."""
    if megabytes is not None and not 0.0 < megabytes < float("inf"):
        raise InputError("--max-memory", "megabytes > 0", f"{megabytes:g}")
    return rendering_within(None if megabytes is None else max(1, int(megabytes * 1e6)))


def load_run(path: str, device: str) -> OpenRun:
    """Open a run folder and load its newest checkpoint."""
    run = open_run(path)
    config = run.read_config()
    checkpoint = latest_checkpoint(run.path)
    return OpenRun(run, config, read_state(checkpoint), load_model(checkpoint, device))


def with_data(config: Config, data: str | None) -> Config:
    """The same config over another scene folder, for runs whose pictures have moved."""
    return config if data is None else replace(config, data=replace(config.data, source=data))


def open_test_scene(config: Config) -> Scene:
    """The views a run is scored on."""
    return open_views(config)[1]


def open_views(config: Config, model: NerfModel | None = None) -> tuple[Scene, Scene]:
    """The views a run was trained on, and those it is scored on; with the model, its training cameras as it learned
    them."""
    try:
        data = config.data
        train, test = open_scenes(
            data.source, data.downscale, allow_outside=data.allow_outside, bounds=data.bounds, ndc=data.ndc
        )
        return train if model is None else learned_cameras(model, train), test
    except InputError as error:
        if error.got != "no such folder":
            raise
        raise InputError(error.what, error.expected, error.got, "name the folder by --data") from None


def learned_cameras(model: NerfModel, train: Scene) -> Scene:
    """The training views with the cameras that were learned, where any were."""
    return train if model.photos is None else replace(train, cameras=model.photos.refined(train.cameras))


def chosen_backend(name: BackendName) -> contextlib.AbstractContextManager[None]:
    """`auto` leaves the environment variable in force."""
    return contextlib.nullcontext() if name == "auto" else use_backend(name)


def box_of(corners: Sequence[float], flag: str) -> Aabb:
    """The box of six numbers behind a flag: its low corner, its high one."""
    try:
        return Aabb(tuple(corners[:3]), tuple(corners[3:]))  # type: ignore[arg-type]
    except InputError as error:
        found = " ".join(f"{number:g}" for number in corners)
        raise InputError(flag, "three finite numbers and three larger ones", found) from error
