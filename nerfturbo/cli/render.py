"""`nerfturbo render RUN`: a camera path as GIF, MP4 or PNG files."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ..errors import InputError
from .parse import parse

if TYPE_CHECKING:
    from torch import Tensor

    from ..evaluation.camera_path import CameraPath
    from ..evaluation.images import Channel
    from ..export.frames import FrameMaker, FrameSequence
    from .common import OpenRun
    from .progress import Display

BACKGROUNDS = {"white": 1.0, "black": 0.0}
PATHS = ("orbit", "spiral", "interpolate", "still", "train", "test")


@dataclass(frozen=True)
class RenderArgs:
    """Render a camera path of a trained run.

    A folder of PNG files that was begun by the same command is gone on with.
    """

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """A run folder."""
    path: Annotated[str, tyro.conf.arg(metavar="PATH")] = "orbit"
    """orbit (a turn about the scene), spiral, interpolate (a flight through the training cameras), still (the camera of
    one test view, while time moves), train or test (the pictures' own cameras), or a camera path in nerfstudio's
    format, FILE.json."""
    view: Annotated[int, tyro.conf.arg(metavar="I")] = 0
    """Which test view's camera stands still."""
    frames: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of frames: 60, or all there are of train, test and FILE.json, unless given."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="I|I-J")] = ()
    """Render only these frames of the path: numbers and ranges, 0 7 20-30."""
    show: tuple[Literal["color", "depth", "opacity", "normal"], ...] = ("color",)
    """What frames show; each thing goes to a file of its own."""
    output: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE")] = ()
    """A .gif, a .mp4, a folder for PNG files, or several of these; RUN/PATH.mp4 (.gif without imageio-ffmpeg)
    unless given."""
    overwrite: bool = False
    """Replace PNG files of another rendering."""
    scale: float = 1.0
    """Size of the frames relative to the pictures of the scene, or to the path's file."""
    refine: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Render in steps this many times shorter than those of training; what the run was made with unless given."""
    rays: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Render with N x N rays per pixel; what the run was made with unless given."""
    max_memory: Annotated[float | None, tyro.conf.arg(metavar="MB")] = None
    """Megabytes that rendering may take beside the picture: less makes more and smaller parts of the same pixels. 256
    on a GPU and 64 on a CPU unless given, up to 4000 on a GPU where no grid places the samples."""
    fps: float | None = None
    """Frames a second: 24, or what FILE.json says, unless given."""
    background: Literal["white", "black"] = "white"
    """What is behind the scene."""
    crop: Annotated[tuple[float, float, float, float, float, float] | None, tyro.conf.arg(metavar="X Y Z X Y Z")] = None
    """Show only what lies inside this box: its low and its high corner, in the coordinates of training."""
    time: Annotated[float | None, tyro.conf.arg(metavar="T")] = None
    """For scenes that move: the moment to show, 0 to 1, while only the camera moves; without it time runs from 0 to 1
    along the path, and train and test show their pictures' own moments."""
    photo: Annotated[int | None, tyro.conf.arg(metavar="I")] = None
    """For runs with --photo.appearance: the training picture whose look frames have; the mean of all unless given."""
    data: Annotated[str | None, tyro.conf.arg(metavar="DATA")] = None
    """The scene folder, where it is not the one of training any more."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    backend: Literal["auto", "reference", "cpu", "triton"] = "auto"
    """Who runs the operations: numba (cpu), triton, or plain torch (reference)."""


def main(argv: Sequence[str]) -> int:
    """Parse, check the outputs, render frame by frame."""
    args = parse(RenderArgs, argv, "render")
    _check(args)
    from ..evaluation.run_folder import open_run
    from .common import chosen_backend, load_run, rendering_memory, with_pictures
    from .progress import showing
    from .settings import resolve_device

    outputs = _outputs(args, open_run(args.run).path)
    with rendering_memory(args.max_memory), showing() as display, chosen_backend(args.backend):
        opened = with_pictures(load_run(args.run, resolve_device(args.device)), args.refine, args.rays)
        _choose_look(args, opened)
        _render(args, opened, _camera_path(args, opened, display), outputs, display)
    print("\n".join(str(output) for output in outputs))
    return 0


def _check(args: RenderArgs) -> None:
    for flag, value in (("--frames", args.frames), ("--fps", args.fps), ("--scale", args.scale)):
        if value is not None and not 0 < value < float("inf"):
            raise InputError(flag, "a number > 0", str(value))
    if args.path not in PATHS and not args.path.lower().endswith(".json"):
        raise InputError("--path", "one of " + ", ".join(PATHS) + ", or a file ending in .json", repr(args.path))
    if args.path not in PATHS and not Path(args.path).is_file():
        raise InputError("--path", "a camera path", f"no such file {args.path}")
    if not args.show or len(set(args.show)) != len(args.show):
        raise InputError("--show", "different things to show", " ".join(args.show) or "none")
    if args.time is not None and not 0.0 <= args.time <= 1.0:
        raise InputError("--time", "a number from 0 to 1", str(args.time))


def _choose_look(args: RenderArgs, opened: OpenRun) -> None:
    photos = opened.model.photos
    if args.photo is None:
        return
    if photos is None or not opened.config.photo.appearance:
        hint = "train with --photo.appearance 8"
        raise InputError("--photo", "a run that learned the look of its photos", str(args.photo), hint)
    if not 0 <= args.photo < photos.n_photos:
        raise InputError("--photo", f"a training picture from 0 to {photos.n_photos - 1}", str(args.photo))
    photos.shown = args.photo


def _outputs(args: RenderArgs, run: Path) -> tuple[Path, ...]:
    from ..evaluation.run_folder import check_writable
    from ..export.video import can_write_mp4, check_video_path

    stem = Path(args.path).stem
    outputs = args.output or (run / f"{stem}.{'mp4' if can_write_mp4() else 'gif'}",)
    if sum(not output.suffix for output in outputs) > 1:
        raise InputError("--output", "at most one folder", " ".join(map(str, outputs)))
    for output in outputs:
        check_video_path(output)
        check_writable(output)
    return outputs


def _camera_path(args: RenderArgs, opened: OpenRun, display: Display) -> CameraPath:
    """The cameras of the chosen path, at the size asked for."""
    from dataclasses import replace

    import torch

    from ..evaluation.camera_path import (
        CameraPath,
        interpolated_path,
        orbit_path,
        read_camera_path,
        spiral_path,
        still_path,
        with_times,
    )
    from ..evaluation.evaluate import choose_views
    from .common import open_views, with_data

    config = with_data(opened.config, args.data)
    display.phase(f"opening {config.data.source}")
    train, test = open_views(config, opened.model)
    center, n_frames = opened.model.bounds.aabb.center, args.frames or 60
    moves = _check_motion(args, opened, len(test))
    if args.path in ("train", "test"):
        cameras = (train if args.path == "train" else test).cameras
        path = CameraPath(cameras[torch.tensor(choose_views(len(cameras), args.frames))])
    elif args.path in PATHS:
        make = {
            "orbit": lambda: orbit_path(test.cameras, center, n_frames),
            "spiral": lambda: spiral_path(train.cameras, center, n_frames),
            "interpolate": lambda: interpolated_path(train.cameras, n_frames),
            "still": lambda: still_path(test.cameras, args.view, n_frames),
        }
        path = CameraPath(make[args.path]())
    else:
        path = read_camera_path(Path(args.path), train.to_original)
        chosen = choose_views(len(path.cameras), args.frames)
        path = replace(path, cameras=replace(path.cameras[torch.tensor(chosen)], ndc=train.cameras.ndc))
    if moves and (args.time is not None or path.cameras.times is None):
        path = replace(path, cameras=with_times(path.cameras, args.time))
    return _at_scale(path, args.scale)


def _at_scale(path: CameraPath, scale: float) -> CameraPath:
    from dataclasses import replace

    from ..evaluation.camera_path import MAX_SIDE

    if scale == 1.0:
        return path
    if float(path.cameras.size.double().max()) * scale > MAX_SIDE:
        raise InputError("--scale", f"frames of at most {MAX_SIDE} pixels a side", f"{scale:g}")
    return replace(path, cameras=path.cameras.scaled(scale))


def _check_motion(args: RenderArgs, opened: OpenRun, n_views: int) -> bool:
    """Whether the run's field sees time; flags that only then mean something are refused elsewhere."""
    from ..data.fitting import FOLLOW_TIME

    moves = opened.config.field.kind in FOLLOW_TIME
    for flag, given in (("--time", args.time is not None), ("--path still", args.path == "still")):
        if given and not moves:
            hint = "train with --preset auto on pictures with times"
            raise InputError(flag, "a run of a scene that moves", f"field.kind {opened.config.field.kind}", hint)
    if not 0 <= args.view < n_views:
        raise InputError("--view", f"a test view from 0 to {n_views - 1}", str(args.view))
    return moves


def parse_ranges(words: Sequence[str], n: int) -> list[int]:
    """
    >>> parse_ranges(["0", "3-5"], 10), parse_ranges([], 3)
    ([0, 3, 4, 5], [0, 1, 2])
    """
    if not words:
        return list(range(n))
    chosen: set[int] = set()
    for word in words:
        first, _, last = word.partition("-")
        if not first.isdecimal() or not (last.isdecimal() or "-" not in word):
            raise InputError("--only", "numbers and ranges like 0 7 20-30", repr(word))
        low, high = int(first), int(last or first)
        if not low <= high < n:
            raise InputError("--only", f"frames from 0 to {n - 1}", repr(word))
        chosen |= set(range(low, high + 1))
    return sorted(chosen)


def _render(args: RenderArgs, opened: OpenRun, path: CameraPath, outputs: tuple[Path, ...], display: Display) -> None:
    from ..export.frames import FrameMaker, FrameSequence, Look, digest
    from .common import box_of

    chosen = parse_ranges(args.only, len(path.cameras))
    crop = path.crop if args.crop is None else box_of(args.crop, "--crop")
    grey = BACKGROUNDS[args.background]
    look = Look(channels=tuple(args.show), background=(grey, grey, grey), crop=crop)
    maker = FrameMaker(opened.model, path.cameras, look)
    checkpoint = f"step {opened.state.step} after {opened.state.train_seconds} s of {opened.run.path.resolve()}"
    folder = next((output for output in outputs if not output.suffix), None)
    with contextlib.ExitStack() as stack:
        sequence = None
        if folder is not None:
            key = digest(checkpoint, path.cameras, look)
            sequence = stack.enter_context(FrameSequence(folder, key, overwrite=args.overwrite))
        fps = args.fps or path.fps
        videos = {
            channel: [stack.enter_context(_video(file, channel, args, fps)) for file in outputs if file.suffix]
            for channel in look.channels
        }
        if sequence is not None and (done := sum(sequence.has(look.channels, index) for index in chosen)):
            display.note(f"{done} of {len(chosen)} frames are there already")
        display.phase(f"rendering {len(chosen)} frames")
        for channel, index, frame, new in _frames(maker, sequence, chosen, display):
            if sequence is not None and new:
                sequence.save(channel, index, frame)
            for add in videos[channel]:
                add(frame)


def _video(
    file: Path, channel: Channel, args: RenderArgs, fps: float
) -> contextlib.AbstractContextManager[Callable[[Tensor], None]]:
    """A video of one channel; beside the first of several, the others carry their name."""
    from ..export.video import video_writer

    named = file if channel == args.show[0] else file.with_name(f"{file.stem}_{channel}{file.suffix}")
    return video_writer(named, fps=fps)


def _frames(
    maker: FrameMaker, sequence: FrameSequence | None, chosen: list[int], display: Display
) -> Iterator[tuple[Channel, int, Tensor, bool]]:
    """(channel, index, picture, whether it is new) of every chosen frame; files that are there are not rendered."""
    started, rendered = time.perf_counter(), 0
    for place, index in enumerate(chosen):
        if sequence is not None and sequence.has(maker.look.channels, index):
            for channel in maker.look.channels:
                yield channel, index, sequence.load(channel, index), False
        else:
            for channel, frame in maker.frame(index).items():
                yield channel, index, frame, True
            rendered += 1
        left = len(chosen) - place - 1
        each = (time.perf_counter() - started) / rendered if rendered else None
        display.update((place + 1) / len(chosen), eta=None if each is None else each * left)
