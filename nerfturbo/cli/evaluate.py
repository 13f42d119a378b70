"""`nerfturbo eval RUN`: score a run again and renew metrics.json, images and report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ..errors import InputError
from .parse import parse

if TYPE_CHECKING:
    from ..evaluation.metrics import Perceptual
    from .progress import Display


@dataclass(frozen=True)
class EvalArgs:
    """Score a run's newest checkpoint on its test views; renews metrics.json, images/ and report.html."""

    run: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """A run folder."""
    eval_views: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Score only this many test views, evenly spaced; all of them unless given."""
    data: Annotated[str | None, tyro.conf.arg(metavar="DATA")] = None
    """The scene folder, where it is not the one of training any more."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    backend: Literal["auto", "reference", "cpu", "triton"] = "auto"
    """Who runs the operations: numba (cpu), triton, or plain torch (reference)."""
    align_poses: Annotated[int, tyro.conf.arg(metavar="STEPS")] = 0
    """Fit the poses of the test views to the trained scene first, by so many steps (200, say): scores the scene, not
    the poses. 0 takes the poses as they are."""
    refine: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Render in steps this many times shorter than those of training; what the run was made with unless given."""
    rays: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Render with N x N rays per pixel; what the run was made with unless given."""
    max_memory: Annotated[float | None, tyro.conf.arg(metavar="MB")] = None
    """Megabytes that rendering may take beside the picture: less makes more and smaller parts of the same pixels. 256
    on a GPU and 64 on a CPU unless given, up to 4000 on a GPU where no grid places the samples."""
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
    if args.eval_views is not None and args.eval_views < 1:
        raise InputError("--eval-views", "a number > 0", str(args.eval_views))
    from .common import chosen_backend, rendering_memory
    from .progress import showing

    with rendering_memory(args.max_memory), showing() as display, chosen_backend(args.backend):
        _evaluate(args, display)
    return 0


def _perceptual(device: str, display: Display) -> Perceptual | None:
    """LPIPS, or a word on what it lacks; the other scores do not wait for that."""
    from ..evaluation.metrics import MissingWeightsError, Perceptual

    display.phase("opening LPIPS, whose weights are fetched at its first use")
    try:
        return Perceptual(device)
    except MissingWeightsError as error:
        display.note(f"{error}; going on without LPIPS")
        return None


def _evaluate(args: EvalArgs, display: Display) -> None:
    import torch

    from ..evaluation.report import write_report
    from ..ops._dispatch import resolve
    from .common import load_run, open_test_scene, with_data, with_pictures
    from .finish import print_protocol, print_result, print_views, score_run
    from .settings import resolve_device

    device = resolve_device(args.device)
    perceptual = _perceptual(device, display) if args.lpips else None
    opened = with_pictures(load_run(args.run, device), args.refine, args.rays)
    config = with_data(opened.config, args.data)
    display.phase(f"opening {config.data.source}")
    scene = open_test_scene(config)
    if args.align_poses:
        from ..evaluation.align import aligned_to

        display.phase("fitting the poses of the test views")
        scene = aligned_to(opened.model, scene, steps=args.align_poses, report=display.update)
    scores = score_run(
        opened.run, opened.model, scene, config, limit=args.eval_views, display=display, perceptual=perceptual
    )
    metrics = {
        **opened.run.read_metrics(),
        "scene": scene.name,
        "steps": opened.state.step,
        "train_seconds": opened.state.train_seconds,
        **scores,
        "poses_aligned": args.align_poses,
        "evaluated_on": {"device": device, "backend": resolve(torch.empty(0, device=device))},
    }
    opened.run.write_metrics(metrics)
    write_report(opened.run)
    display.close()
    print_result(opened.run, metrics, as_json=args.json)
    if not args.json:
        print_protocol(metrics)
        print_views(opened.run, metrics, args.table)
