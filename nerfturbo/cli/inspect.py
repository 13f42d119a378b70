"""`nerfturbo inspect RUN --view I --pixel X,Y`: one ray, sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ..errors import InputError
from .common import RunArgs, opened_run, parse, print_json


@dataclass(frozen=True)
class InspectArgs(RunArgs):
    """Draw density, transmittance, weights and cells along the ray of one pixel, and write them as JSON."""

    view: int = 0
    """Which picture."""
    pixel: Annotated[str, tyro.conf.arg(metavar="X,Y")] = ""
    """Column and row, from the top left; the middle unless given."""
    split: Literal["train", "test"] = "test"
    """Whose pictures."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A .png; the .json lies beside it. RUN/inspect_VIEW_X_Y.png unless given."""
    json: bool = False
    """Print the JSON on stdout too."""


def main(argv: Sequence[str]) -> int:
    """Parse, march, draw."""
    args = parse(InspectArgs, argv, "inspect")
    if args.output is not None and args.output.suffix.lower() != ".png":
        raise InputError("--output", "a file ending in .png", str(args.output))
    pixel = _pixel(args.pixel)
    from ..evaluation.evaluate import truth_image
    from ..evaluation.inspect import draw_report, inspect_ray
    from ..evaluation.run_folder import check_writable, write_json

    with opened_run(args) as (opened, display):
        scene = opened.views(display)[0 if args.split == "train" else 1]
        if not 0 <= args.view < len(scene):
            raise InputError("--view", f"0 to {len(scene) - 1}", str(args.view))
        width, height = (int(side) for side in scene.cameras.size[args.view])
        column, row = pixel or (width // 2, height // 2)
        report = inspect_ray(opened.model, scene.cameras, args.view, column, row)
    output = args.output or opened.run.path / f"inspect_{args.view}_{column}_{row}.png"
    check_writable(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    name = f"{scene.name}, {args.split} view {args.view}, pixel {column},{row}, step {opened.state.step}"
    truth = truth_image(scene, args.view)[row, column].tolist()
    document = {"version": 1, "view": args.view, "split": args.split, "pixel": [column, row], "truth": truth}
    document |= report.to_dict()
    draw_report(report, output, name)
    write_json(output.with_suffix(".json"), document)
    if args.json:
        print_json(document)
        return 0
    steps = f"{sum(report.occupied)} of {len(report.t)} steps in occupied cells, {sum(report.used)} before opaque"
    shown = ", ".join(f"{value:.3f}" for value in report.color)
    print(f"{name}: {steps}")
    print(f"  colour {shown} at opacity {report.opacity:.4f}, depth {report.depth:.4f}")
    print(f"  opacity that empty cells hide: {report.missed_opacity:.4f}")
    print(f"  {output}\n  {output.with_suffix('.json')}")
    return 0


def _pixel(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise InputError("--pixel", "two whole numbers, X,Y", repr(text))
    return int(parts[0]), int(parts[1])
