"""`nerfturbo eval RUN`: score a run again and renew metrics.json, images and report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ..errors import InputError
from .common import OpenRun, PictureArgs, backend_on, opened_for_pictures, parse
from .settings import check_positive, resolve_device

if TYPE_CHECKING:
    from ..evaluation.metrics import Perceptual
    from ..evaluation.run_folder import RunFolder
    from .progress import Display


@dataclass(frozen=True)
class EvalArgs(PictureArgs):
    """Score a run's newest checkpoint on its test views; renews metrics.json, images/ and report.html."""

    eval_views: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Score only this many test views, evenly spaced; all of them unless given."""
    align_poses: Annotated[int, tyro.conf.arg(metavar="STEPS")] = 0
    """Fit the poses of the test views to the trained scene first, by so many steps (200, say): scores the scene, not
    the poses. 0 takes the poses as they are."""
    lpips: bool = False
    """Measure LPIPS too, where the package lpips is installed."""
    table: Annotated[int, tyro.conf.arg(metavar="N")] = 10
    """Print this many views, the worst first."""
    json: bool = False
    """Print metrics.json on stdout."""


def main(argv: Sequence[str]) -> int:
    """Parse, score, write."""
    args = parse(EvalArgs, argv, "eval")
    if args.table < 0:
        raise InputError("--table", "a number >= 0", str(args.table))
    if args.align_poses < 0:
        raise InputError("--align-poses", "a number of steps >= 0", str(args.align_poses))
    check_positive({"--eval-views": args.eval_views})
    with opened_for_pictures(args) as (opened, display):
        _evaluate(args, opened, display)
    return 0


def _evaluate(args: EvalArgs, opened: OpenRun, display: Display) -> None:
    from ..evaluation.report import write_report
    from .finish import print_result, score_run

    run, model, device = opened.run, opened.model, resolve_device(args.device)
    perceptual = _perceptual(device, display) if args.lpips else None
    _, scene = opened.views(display)
    if args.align_poses:
        scene = opened.align(scene, args.align_poses, display)
    scores = score_run(run, model, scene, opened.config, limit=args.eval_views, display=display, perceptual=perceptual)
    metrics = {
        **run.read_metrics(),
        "scene": scene.name,
        "steps": opened.state.step,
        "train_seconds": opened.state.train_seconds,
        **scores,
        "poses_aligned": args.align_poses,
        "evaluated_on": {"device": device, "backend": backend_on(device)},
    }
    run.write_metrics(metrics)
    write_report(run)
    display.close()
    print_result(run, metrics, as_json=args.json)
    if not args.json:
        _print_protocol(metrics)
        _print_views(run, metrics, args.table)


def _perceptual(device: str, display: Display) -> Perceptual | None:
    """LPIPS, or a word on what it lacks; the other scores do not wait for that."""
    from ..evaluation.metrics import MissingWeightsError, Perceptual

    display.phase("opening LPIPS, whose weights are fetched at its first use")
    try:
        return Perceptual(device)
    except MissingWeightsError as error:
        display.note(f"{error}; going on without LPIPS")
        return None


def _print_protocol(metrics: dict[str, Any]) -> None:
    """How the scores were measured."""

    def words(value: Any) -> str:
        return " x ".join(map(words, value)) if isinstance(value, list) else str(value)

    facts = {name: value for name, value in metrics["protocol"].items() if name not in ("seeds", "time_includes")}
    print("  " + "; ".join(f"{name.replace('_', ' ')}: {words(value)}" for name, value in facts.items()))


def _print_views(run: RunFolder, metrics: dict[str, Any], most: int) -> None:
    """The test views as a table, worst first, with the picture that shows where each errs."""
    views = sorted(metrics["per_view"], key=lambda view: view["psnr"])
    with_lpips = any(view.get("lpips") is not None for view in views)
    print(f"  view  PSNR, dB    SSIM {'  LPIPS' if with_lpips else ''}   truth, render and error")
    for view in views[:most]:
        columns = [f"{view['index']:6d}", f"{view['psnr']:8.2f}"]
        columns += ["     -" if view.get("ssim") is None else f"{view['ssim']:6.4f}"]
        columns += [f"{view['lpips']:6.4f}"] if with_lpips else []
        print("  ".join([*columns, str(run.view_file(view["index"]))]))
    if len(views) > most:
        print(f"  and {len(views) - most} better ones in {run.metrics_file}; --table {len(views)} shows all")
