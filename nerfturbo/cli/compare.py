"""`nerfturbo compare RUN RUN ...`: several runs in one table and on one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..errors import InputError
from .common import check_new, parse, print_json


@dataclass(frozen=True)
class CompareArgs:
    """Compare runs: scores, costs, the settings in which they differ, and their curves on one page."""

    runs: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUN")]
    """Run folders, at least two."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The page to write, .html; compare.html here unless given."""
    overwrite: bool = False
    """Replace a page that is there."""
    json: bool = False
    """Print everything, curves included, as one JSON object on stdout, and write no page unless --output is given."""


def main(argv: Sequence[str]) -> int:
    """Read, print, write."""
    args = parse(CompareArgs, argv, "compare")
    if len(args.runs) < 2:
        raise InputError("RUN", "at least two run folders", str(len(args.runs)))
    output = args.output or (None if args.json else Path("compare.html"))
    if output is not None and output.suffix.lower() != ".html":
        raise InputError("--output", "a file ending in .html", str(output))
    from ..evaluation.report import compare_runs, write_comparison
    from ..evaluation.run_folder import open_run

    if output is not None:
        check_new(output, overwrite=args.overwrite)
    found = compare_runs([open_run(run) for run in args.runs])
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_comparison(output, found)
    if args.json:
        print_json(found)
    else:
        _print(found)
        print(f"  {output}")
    return 0


def _print(found: dict[str, Any]) -> None:
    from .progress import duration, quantity

    width = max(len(run["name"]) for run in found["runs"])
    print(f"  {'run':<{width}}  PSNR, dB    SSIM     steps   training    rays/s  scored on")
    for run in found["runs"]:
        columns = [
            f"{run['name']:<{width}}",
            "       -" if run["psnr"] is None else f"{run['psnr']:8.2f}",
            "     -" if run["ssim"] is None else f"{run['ssim']:6.4f}",
            "       -" if run["steps"] is None else f"{run['steps']:8d}",
            f"{'-' if run['train_seconds'] is None else duration(run['train_seconds']):>9}",
            f"{'-' if run['rays_per_second'] is None else quantity(run['rays_per_second']):>8}",
            run["protocol"],
        ]
        print("  " + "  ".join(columns))
    for row in found["settings"]:
        print(f"  {row['name']}: {', '.join(str(value) for value in row['values'])}")
