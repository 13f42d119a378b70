"""`nerfturbo render RUN` and `view RUN`: a camera path as GIF, MP4 or PNG files, and a live page."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from ..errors import InputError, counted, did_you_mean, refuse
from ..export import require_package
from .common import PictureArgs, RunArgs, box_of, opened_for_pictures, opened_run
from .flags import Box, Count, check_positive, check_within, parse
from .progress import Display

if TYPE_CHECKING:
    from torch import Tensor

    from ..data.scene import Scene
    from ..evaluation.camera_path import CameraPath
    from ..evaluation.images import Channel
    from ..evaluation.run_folder import RunFolder
    from ..export.frames import FrameMaker, FrameSequence
    from ..rendering.model import NerfModel
    from ..viewer.page import LivePage
    from .common import OpenRun

BACKGROUNDS = {"white": 1.0, "black": 0.0}
PATHS = ("auto", "orbit", "spiral", "interpolate", "still", "train", "test")


@dataclass(frozen=True)
class RenderArgs(PictureArgs):
    """Render a camera path of a trained run. A folder of PNG files that the same command began is resumed."""

    path: Annotated[str, arg(metavar="PATH")] = "auto"
    """auto (an orbit, an arc or a walk, as the images were taken), orbit (a turn about the scene), spiral, interpolate
    (through the training cameras), still (the camera of one test view, while time moves), train or test (the images'
    own cameras), or a camera path in nerfstudio's format, FILE.json."""
    dataparser: Annotated[Path | None, arg(metavar="FILE")] = None
    """The dataparser_transforms.json of the nerfstudio run whose viewer wrote FILE.json; the one beside it unless
    given."""
    view: Annotated[int, arg(metavar="I")] = 0  # Which test view's camera stands still.
    frames: Count = None  # Number of frames: 60, or all there are of train, test and FILE.json, unless given.
    only: Annotated[tuple[str, ...], arg(metavar="I|I-J")] = ()
    """Render only these frames: numbers and ranges, 0 7 20-30."""
    show: tuple[Literal["color", "depth", "opacity", "normal"], ...] = ("color",)
    """What frames show; each thing goes to a file of its own."""
    output: Annotated[tuple[Path, ...], arg(metavar="FILE")] = ()
    """A .gif, a .mp4, a folder for PNG files, or several; RUN/PATH.mp4 (video.mp4 for
    auto; .gif without imageio-ffmpeg) unless given."""
    overwrite: bool = False  # Replace PNG files of another rendering.
    scale: float = 1.0  # Size of the frames relative to the images of the scene, or to the path's file.
    fps: float | None = None  # Frames a second: 24, or what FILE.json says, unless given.
    background: Literal["white", "black"] = "white"  # What is behind the scene.
    crop: Box = None  # Show only what is inside this box: its low and its high corner, in the coordinates of training.
    time: Annotated[float | None, arg(metavar="T")] = None
    """For scenes that move: the moment to show, 0 to 1, while only the camera moves; without it time runs from 0 to 1
    along the path, and train and test show their images' own moments."""
    photo: Annotated[int | None, arg(metavar="I")] = None
    """For runs with --photo.appearance: the training image whose look frames have; the mean of all unless given."""


def render(argv: Sequence[str]) -> int:
    args = parse(RenderArgs, argv, "render")
    _check(args)
    from ..evaluation.report import renew_links
    from ..evaluation.run_folder import open_run

    outputs = _outputs(args, open_run(args.run).path)
    with opened_for_pictures(args) as (opened, display):
        _choose_look(args, opened)
        _render(args, opened, _camera_path(args, opened, display), outputs, display)
    renew_links(opened.run, outputs)
    print("\n".join(str(output) for output in outputs))
    return 0


def _check(args: RenderArgs) -> None:
    check_positive({"--frames": args.frames, "--fps": args.fps, "--scale": args.scale})
    if args.path not in PATHS and not args.path.lower().endswith(".json"):
        expected = "one of " + ", ".join(PATHS) + ", or a file ending in .json"
        raise InputError("--path", expected, repr(args.path), did_you_mean(args.path, PATHS))
    if args.path not in PATHS and not Path(args.path).is_file():
        raise InputError("--path", "a camera path", f"no such file {args.path}")
    refuse(args.dataparser is not None and args.path in PATHS, "--dataparser", "a --path FILE.json", repr(args.path))
    if not args.show or len(set(args.show)) != len(args.show):
        raise InputError("--show", "different things to show", " ".join(args.show) or "none")
    check_within("--time", args.time, 0, 1, what="a number from 0 to 1")


def _choose_look(args: RenderArgs, opened: OpenRun) -> None:
    photos = opened.model.photos
    if args.photo is None:
        return
    if photos is None or not opened.config.photo.appearance:
        hint = "train with --photo.appearance 8"
        raise InputError("--photo", "a run that learned the look of its photos", str(args.photo), hint)
    last = photos.n_photos - 1
    check_within("--photo", args.photo, 0, last, what=f"a training image from 0 to {last}")
    photos.shown = args.photo


def _outputs(args: RenderArgs, run: Path) -> tuple[Path, ...]:
    from ..evaluation.run_folder import check_writable
    from ..export.video import can_write_mp4, check_video_path

    stem = "video" if args.path == "auto" else Path(args.path).stem
    outputs = args.output or (run / f"{stem}.{'mp4' if can_write_mp4() else 'gif'}",)
    if sum(not output.suffix for output in outputs) > 1:
        raise InputError("--output", "at most one folder", " ".join(map(str, outputs)))
    for output in outputs:
        check_video_path(output)
        check_writable(output)
    return outputs


def _camera_path(args: RenderArgs, opened: OpenRun, display: Display) -> CameraPath:
    """The cameras of the chosen path, at the size asked for."""
    import torch

    from ..evaluation import camera_path as paths
    from ..evaluation.evaluate import choose_views

    train, test = opened.views(display)
    center, n_frames = opened.model.bounds.aabb.center, args.frames or 60
    moves = _check_motion(args, opened, len(test))
    if args.path in ("train", "test"):
        cameras = (train if args.path == "train" else test).cameras
        path = paths.CameraPath(cameras[torch.tensor(choose_views(len(cameras), args.frames))])
    elif args.path in PATHS:
        make = {
            "auto": lambda: paths.capture_path(train.cameras, center, n_frames)[0],
            "orbit": lambda: paths.orbit_path(test.cameras, center, n_frames),
            "spiral": lambda: paths.spiral_path(train.cameras, center, n_frames),
            "interpolate": lambda: paths.interpolated_path(train.cameras, n_frames),
            "still": lambda: paths.still_path(test.cameras, args.view, n_frames),
        }
        cameras = make[args.path]()
        turns = args.path in ("auto", "orbit", "spiral")
        path = paths.CameraPath(paths.around_object(cameras, opened.model, train) if turns else cameras)
    else:
        to_file, parser = train.to_original, args.dataparser or Path(args.path).parent / paths.PARSER_FILE
        if args.dataparser is not None or parser.is_file():
            display.note(f"the path is in the coordinates of {parser}")
            to_file = paths.through_parser(parser, to_file)
        path = paths.read_camera_path(Path(args.path), to_file)
        chosen = choose_views(len(path.cameras), args.frames)
        path = replace(path, cameras=replace(path.cameras[torch.tensor(chosen)], ndc=train.cameras.ndc))
    if moves and (args.time is not None or path.cameras.times is None):
        path = replace(path, cameras=paths.with_times(path.cameras, args.time))
    if args.scale == 1.0:
        return path
    if float(path.cameras.size.double().max()) * args.scale > paths.MAX_SIDE:
        raise InputError("--scale", f"frames of at most {paths.MAX_SIDE} pixels a side", f"{args.scale:g}")
    return replace(path, cameras=path.cameras.scaled(args.scale))


def _check_motion(args: RenderArgs, opened: OpenRun, n_views: int) -> bool:
    """Whether the run's field sees time; flags that only then mean something are refused elsewhere."""
    moves = opened.config.follows_time
    for flag, given in (("--time", args.time is not None), ("--path still", args.path == "still")):
        hint = "train with --preset auto on images with times"
        refuse(given and not moves, flag, "a run of a scene that moves", f"field.kind {opened.config.field.kind}", hint)
    check_within("--view", args.view, 0, n_views - 1, what=f"a test view from 0 to {n_views - 1}")
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
        refuse(not low <= high < n, "--only", f"frames from 0 to {n - 1}", repr(word))
        chosen |= set(range(low, high + 1))
    return sorted(chosen)


def _render(args: RenderArgs, opened: OpenRun, path: CameraPath, outputs: tuple[Path, ...], display: Display) -> None:
    from ..export.frames import FrameMaker, FrameSequence, Look, digest
    from ..export.video import video_writer

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
        videos: dict[Channel, list[Callable[[Tensor], None]]] = {channel: [] for channel in look.channels}
        for file in outputs:
            for channel, writers in videos.items() if file.suffix else ():
                # beside the first of several channels, the others carry their name
                named = file if channel == args.show[0] else file.with_name(f"{file.stem}_{channel}{file.suffix}")
                writers.append(stack.enter_context(video_writer(named, fps=fps)))
        if sequence is not None and (done := sum(sequence.has(look.channels, index) for index in chosen)):
            display.note(f"{done} of {len(chosen)} frames are there already")
        display.phase(f"rendering {counted(len(chosen), 'frame')}")
        for channel, index, frame, new in _frames(maker, sequence, chosen, display):
            if sequence is not None and new:
                sequence.save(channel, index, frame)
            for add in videos[channel]:
                add(frame)


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


@dataclass(frozen=True)
class ViewArgs(RunArgs):
    """Open a run in the viewer, in the browser; Ctrl-C ends it."""

    host: str = "127.0.0.1"  # Where to listen; beyond the loopback a token is asked for, part of the address printed.
    port: int = 7007  # Port to listen on; 0 takes any that is free.


def view(argv: Sequence[str]) -> int:
    args = parse(ViewArgs, argv, "view")
    check_within("--port", args.port, 0, 65535)
    check_viewer(args.host, args.port)
    with opened_run(args) as (opened, display):
        page = open_page(opened.run, opened.model, opened.views(display), host=args.host, port=args.port, trains=False)
        display.close()
        print(f"{page.url}  (Ctrl-C ends it)", flush=True)
        with contextlib.closing(page), contextlib.suppress(KeyboardInterrupt):
            page.serve(opened.model, opened.state.step, opened.run.read_log())
    return 0


def check_viewer(host: str, port: int) -> None:
    """Refuse, before any work is done, a live page that could not be served."""
    from ..viewer.auth_proxy import check_address

    require_package("viser", "viser", "the live page", "viewer")
    check_address(host, port)


def open_page(
    run: RunFolder, model: NerfModel, scenes: tuple[Scene, Scene], *, host: str, port: int, trains: bool
) -> LivePage:
    """The page of a run; its camera paths, their videos and the crop go into the run's folder."""
    from ..export.video import can_write_mp4, video_writer
    from ..viewer.page import LivePage
    from ..viewer.panel import SceneFacts

    train, test = scenes
    video, suffix = (lambda file, fps: video_writer(file, fps=fps)), ".mp4" if can_write_mp4() else ".gif"
    facts = SceneFacts(train.name, train, test, model.grid.aabb, run, trains, video, suffix)
    return LivePage(facts, host=host, port=port)
