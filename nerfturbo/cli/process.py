"""`nerfturbo process`: photos or a video to a scene folder with poses; and the same on the way to training."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ..data.capture.process import ProcessConfig
from .common import parse, print_json

if TYPE_CHECKING:
    from ..data.capture.sfm import Verdict
    from .progress import Display


@dataclass(frozen=True)
class ProcessArgs:
    """Find where photos, or the frames of a video, were taken from, and write a scene folder that trains.

    Structure from motion by COLMAP. Run the same command again after an interrupt: what is finished is kept.
    """

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="INPUT")]
    """A folder of photos (JPEG, PNG, WebP, TIFF), or a video file."""
    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUTPUT")]
    """The scene folder to write: images/ and sparse/0/."""
    settings: Annotated[ProcessConfig, tyro.conf.arg(name="")] = dataclasses.field(default_factory=ProcessConfig)
    json: bool = False
    """Print the verdict as one JSON object on stdout."""


def main(argv: Sequence[str]) -> int:
    """Run the stages that are not done yet and say what came of them."""
    args = parse(ProcessArgs, argv, "process")
    from .progress import showing

    source, output = args.source.expanduser(), args.output.expanduser()
    with showing() as display:
        verdict = run_process(source, output, args.settings, display)
    if args.json:
        print_json(asdict(verdict) | {"output": str(output)})
    else:
        print(f"{verdict.text}\n{output}")
    print(f"train it with: {shlex.join(['nerfturbo', 'train', str(output)])}", file=sys.stderr)
    return 0


def find_poses(source: str, display: Display, *, wait: bool = False) -> None:
    """Before training: photos or a video get their poses, unless they have them already.

    `wait`: another process of the same training finds them.
    """
    from ..data.capture.process import has_poses, poses_folder
    from ..data.scene import UNPOSED, is_builtin, recognise

    path = Path(source).expanduser()
    if is_builtin(source):
        return
    found = recognise(path)
    if found is None or found.name != UNPOSED or has_poses(path):
        return
    if wait:
        while not has_poses(path):
            time.sleep(1.0)
        return
    folder = poses_folder(path)
    display.note(f"{path} has no poses: finding them by COLMAP, once, into {folder}")
    run_process(path, folder, ProcessConfig(), display)


def run_process(source: Path, output: Path, settings: ProcessConfig, display: Display) -> Verdict:
    """Process with everything shown, the verdict's advice included."""
    from ..data.capture.process import process

    try:
        verdict = process(source, output, settings, report=display)
    except KeyboardInterrupt:
        display.note(f"interrupted; finished stages are kept in {output}: run the same command again to go on")
        raise
    display.note(verdict.text)
    for line in verdict.advice:
        display.note(f"warning: {line}")
    return verdict
