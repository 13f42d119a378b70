"""`nerfturbo eval RUN`, `inspect RUN`, `compare RUN RUN ...`: scores again, one ray in detail, runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from ..errors import InputError, refuse, require_run
from ..export import check_ending
from ..files import remove_abandoned
from .common import OpenRun, PictureArgs, RunArgs, backend_on, check_new, opened_for_pictures, opened_run, print_json
from .flags import EvalViews, Number, check_positive, check_within, parse
from .progress import Display, duration, in_words, quantity
from .settings import resolve_device

if TYPE_CHECKING:
    from ..data.scene import Scene
    from ..evaluation.metrics import Perceptual
    from ..evaluation.run_folder import RunFolder


@dataclass(frozen=True)
class EvalArgs(PictureArgs):
    """Score a run's newest checkpoint on its test views; renews metrics.json, images/ and report.html."""

    eval_views: EvalViews = None
    align_poses: Annotated[int, arg(metavar="STEPS")] = 0
    """Fit the poses of the test views to the trained scene first, by so many steps (200, say): scores the scene, not
    the poses. 0 takes the poses as they are."""
    fit_looks: Annotated[int, arg(metavar="STEPS")] = 0
    """Also fit exposure and look of each test view to its left half, by so many steps (100, say), and score the right
    halves (NeRF in the Wild): for runs with photo.exposure or photo.appearance."""
    lpips: bool = False  # Measure LPIPS too, where the package lpips is installed.
    table: Number = 10  # Print this many views, the worst first.
    json: bool = False  # Print metrics.json on stdout.


def score(argv: Sequence[str]) -> int:
    args = parse(EvalArgs, argv, "eval")
    check_within("--table", args.table, 0)
    for flag, steps in (("--align-poses", args.align_poses), ("--fit-looks", args.fit_looks)):
        check_within(flag, steps, 0, what="a number of steps >= 0")
    check_positive({"--eval-views": args.eval_views})
    with opened_for_pictures(args) as (opened, display):
        _score(args, opened, display)
    return 0


def _score(args: EvalArgs, opened: OpenRun, display: Display) -> None:
    from ..evaluation.report import write_report
    from .finish import print_result, score_run

    run, model, device = opened.run, opened.model, resolve_device(args.device)
    remove_abandoned(run.path)
    perceptual = _perceptual(device, display) if args.lpips else None
    _, scene = opened.views(display)
    if args.align_poses:
        scene = opened.align(scene, args.align_poses, display)
    photo = opened.config.photo
    if args.fit_looks and not (photo.exposure or photo.appearance):
        raise InputError("--fit-looks", "a run with --photo.exposure or --photo.appearance", f"{run.path} with neither")
    scores = score_run(run, model, scene, opened.config, limit=args.eval_views, display=display, perceptual=perceptual)
    state = {name: getattr(opened.state, name) for name in ("step", "train_seconds")}
    metrics = {**run.read_metrics(), "scene": scene.name, "steps": state.pop("step"), **state, **scores}
    metrics |= {"poses_aligned": args.align_poses, "evaluated_on": {"device": device, "backend": backend_on(device)}}
    metrics["right_halves"] = _right_halves(opened, scene, metrics, args.fit_looks, display) if args.fit_looks else None
    run.write_metrics(metrics)
    write_report(run)
    display.close()
    print_result(run, metrics, as_json=args.json)
    if not args.json:
        if halves := metrics["right_halves"]:
            found = f"{halves['psnr']:.2f} dB, SSIM {_cell(halves['ssim'], '6.4f')}"
            print(f"  right halves, looks fitted to the left ones: {found}")
        facts = {name: value for name, value in metrics["protocol"].items() if name not in ("seeds", "time_includes")}
        print("  " + "; ".join(f"{name.replace('_', ' ')}: {in_words(value)}" for name, value in facts.items()))
        _print_views(run, metrics, args.table)


def _right_halves(run: OpenRun, scene: Scene, metrics: dict[str, Any], steps: int, display: Display) -> dict[str, Any]:
    """The scores of the right halves, beside those of whole views."""
    from ..evaluation.align import right_halves

    display.phase("fitting the looks of the test views to their left halves")
    views = [view["index"] for view in metrics["per_view"]]
    found = right_halves(run.model, scene, steps=steps, views=views, report=display.update)
    per_view = [{"index": view.index, "psnr": view.psnr, "ssim": view.ssim} for view in found.views]
    return {"steps": steps, "psnr": found.psnr, "ssim": found.ssim, "per_view": per_view}


def _perceptual(device: str, display: Display) -> Perceptual | None:
    """LPIPS, or a word on what it lacks; the other scores do not wait for that."""
    from ..evaluation.metrics import MissingWeightsError, Perceptual

    display.phase("opening LPIPS, whose weights are fetched at its first use")
    try:
        return Perceptual(device)
    except MissingWeightsError as error:
        display.note(f"{error}; going on without LPIPS")
        return None


def _print_views(run: RunFolder, metrics: dict[str, Any], most: int) -> None:
    """The test views as a table, worst first, with the picture that shows where each errs."""
    views = sorted(metrics["per_view"], key=lambda view: view["psnr"])
    with_lpips = any(view.get("lpips") is not None for view in views)
    print(f"  view  PSNR, dB    SSIM {'  LPIPS' if with_lpips else ''}   truth, render and error")
    for view in views[:most]:
        columns = [f"{view['index']:6d}", f"{view['psnr']:8.2f}", _cell(view.get("ssim"), "6.4f")]
        columns += [f"{view['lpips']:6.4f}"] if with_lpips else []
        print("  ".join([*columns, str(run.view_file(view["index"]))]))
    if len(views) > most:
        print(f"  and {len(views) - most} better ones in {run.metrics_file}; --table {len(views)} shows all")


def _cell(value: float | None, form: str) -> str:
    """A number of a table, or as wide a dash."""
    return f"{'-':>{form[0]}}" if value is None else f"{value:{form}}"


@dataclass(frozen=True)
class InspectArgs(RunArgs):
    """Draw density, transmittance, weights and cells along the ray of one pixel, and write them as JSON."""

    view: int = 0  # Which image.
    pixel: Annotated[str, arg(metavar="X,Y")] = ""  # Column and row, from the top left; the middle unless given.
    split: Literal["train", "test"] = "test"  # Whose images.
    output: Annotated[Path | None, arg(metavar="FILE")] = None
    """A .png; the .json lies beside it. RUN/inspect_VIEW_X_Y.png unless given."""
    json: bool = False  # Print the JSON on stdout too.


def inspect(argv: Sequence[str]) -> int:
    args = parse(InspectArgs, argv, "inspect")
    if args.output is not None:
        check_ending(args.output, ".png", flag="--output")
    parts = args.pixel.split(",") if args.pixel else []
    if len(parts) not in (0, 2) or not all(part.strip().isdecimal() for part in parts):
        raise InputError("--pixel", "two whole numbers, X,Y", repr(args.pixel))
    from ..evaluation.evaluate import truth_image
    from ..evaluation.inspect import draw_report, inspect_ray
    from ..evaluation.run_folder import check_writable, write_json

    check_writable(args.output or Path(args.run))
    with opened_run(args) as (opened, display):
        scene = opened.views(display)[0 if args.split == "train" else 1]
        check_within("--view", args.view, 0, len(scene) - 1)
        column, row = map(int, parts) if parts else (int(side) // 2 for side in scene.cameras.size[args.view])
        report = inspect_ray(opened.model, scene.cameras, args.view, column, row)
    output = args.output or opened.run.path / f"inspect_{args.view}_{column}_{row}.png"
    output.parent.mkdir(parents=True, exist_ok=True)
    name = f"{scene.name}, {args.split} view {args.view}, pixel {column},{row}, step {opened.state.step}"
    truth = truth_image(scene, args.view)[row, column].tolist()
    document = {"version": 1, "view": args.view, "split": args.split, "pixel": [column, row], "truth": truth}
    document |= vars(report)
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


@dataclass(frozen=True)
class CompareArgs:
    """Compare runs: scores, costs, the settings in which they differ, and their curves on one page."""

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN")]  # Run folders, at least two.
    output: Annotated[Path | None, arg(metavar="FILE")] = None  # The page to write; compare.html here unless given.
    overwrite: bool = False  # Replace a page that is there.
    json: bool = False  # Print everything as one JSON object on stdout; no page then, unless --output is given.


def compare(argv: Sequence[str]) -> int:
    args = parse(CompareArgs, argv, "compare")
    refuse(len(args.runs) < 2, "RUN", "at least two run folders", len(args.runs))
    runs = [require_run(run) for run in args.runs]  # before torch is imported
    output = args.output or (None if args.json else Path("compare.html"))
    from ..evaluation.report import compare_runs, write_page
    from ..evaluation.run_folder import open_run

    if output is not None:
        check_ending(output, ".html", flag="--output")
        check_new(output, overwrite=args.overwrite)
    found = compare_runs([open_run(run) for run in runs])
    if output is not None:
        write_page(output, found, "compare_page")
    if args.json:
        print_json(found)
        return 0
    width = max(len(run["name"]) for run in found["runs"])
    print(f"  {'run':<{width}}  PSNR, dB    SSIM     steps   training    rays/s  scored on")
    for run in found["runs"]:
        seconds, rate = run["train_seconds"], run["rays_per_second"]
        columns = [f"{run['name']:<{width}}", _cell(run["psnr"], "8.2f"), _cell(run["ssim"], "6.4f")]
        columns += [_cell(run["steps"], "8d"), f"{'-' if seconds is None else duration(seconds):>9}"]
        columns += [f"{'-' if rate is None else quantity(rate):>8}", run["protocol"]]
        print("  " + "  ".join(columns))
    for row in found["settings"]:
        print(f"  {row['name']}: {', '.join(str(value) for value in row['values'])}")
    print(f"  {output}")
    return 0
