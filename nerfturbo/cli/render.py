"""`nerfturbo render RUN`: an orbit or the test views as GIF, MP4 or PNG files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ..errors import InputError
from .parse import parse

if TYPE_CHECKING:
    from torch import Tensor

    from ..data.cameras import Cameras
    from .common import OpenRun
    from .progress import Display

BACKGROUNDS = {"white": 1.0, "black": 0.0}


@dataclass(frozen=True)
class RenderArgs:
    """Render a camera path of a trained run."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """A run folder."""
    path: Literal["orbit", "test"] = "orbit"
    """A full turn about the scene, or the test views."""
    frames: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of frames: 60 for an orbit, all test views unless given."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A .gif, a .mp4, or a folder for PNG files; RUN/orbit.gif or RUN/test.gif unless given."""
    scale: float = 1.0
    """Size of the frames relative to the pictures of the scene."""
    fps: int = 24
    """Frames a second."""
    background: Literal["white", "black"] = "white"
    """What is behind the scene."""
    data: Annotated[str | None, tyro.conf.arg(metavar="DATA")] = None
    """The scene folder, where it is not the one of training any more."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    backend: Literal["auto", "reference", "cpu", "triton"] = "auto"
    """Who runs the operations: numba (cpu), triton, or plain torch (reference)."""


def main(argv: Sequence[str]) -> int:
    """Parse, check the output, render frame by frame."""
    args = parse(RenderArgs, argv, "render")
    for flag, value in (("--frames", args.frames), ("--fps", args.fps), ("--scale", args.scale)):
        if value is not None and not value > 0:
            raise InputError(flag, "a number > 0", str(value))
    from ..evaluation.run_folder import check_writable, open_run
    from ..export.video import check_video_path, write_video
    from .common import chosen_backend, load_run
    from .progress import showing
    from .settings import resolve_device

    output = args.output or open_run(args.run).path / f"{args.path}.gif"
    check_video_path(output)
    check_writable(output)
    with showing() as display, chosen_backend(args.backend):
        opened = load_run(args.run, resolve_device(args.device))
        cameras = _cameras(args, opened, display)
        display.phase(f"rendering {len(cameras)} frames")
        write_video(output, _frames(args, opened, cameras, display), fps=args.fps)
    print(output)
    return 0


def _cameras(args: RenderArgs, opened: OpenRun, display: Display) -> Cameras:
    from ..evaluation.evaluate import choose_views
    from ..evaluation.paths import orbit_path
    from .common import open_test_scene, with_data

    config = with_data(opened.config, args.data)
    display.phase(f"opening {config.data.source}")
    cameras = open_test_scene(config).cameras
    if args.path == "orbit":
        cameras = orbit_path(cameras, opened.model.bounds.aabb.center, args.frames or 60)
    else:
        import torch

        cameras = cameras[torch.tensor(choose_views(len(cameras), args.frames))]
    return cameras if args.scale == 1.0 else cameras.scaled(args.scale)


def _frames(args: RenderArgs, opened: OpenRun, cameras: Cameras, display: Display) -> Iterator[Tensor]:
    import torch

    background = torch.full((3,), BACKGROUNDS[args.background], device=opened.model.device)
    for index in range(len(cameras)):
        image = opened.model.render_image(cameras, index, background)
        display.update((index + 1) / len(cameras))
        yield (image.rgb * 255.0 + 0.5).to(torch.uint8).cpu()
