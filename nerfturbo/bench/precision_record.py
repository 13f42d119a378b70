"""The comparison of precisions as a file: a line per precision, what equal time bought in words, and all runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from ..config import Config
from ..data.scene import Scene
from ..evaluation.evaluate import choose_views
from ..evaluation.results import protocol
from .fine_samples import FineSearch
from .precision import FP32, PARTS, Part, Point, PrecisionPlan, PrecisionResult, PrecisionRun
from .record import Record, machine

# What the runs of a file share.
SETTINGS = ("scene", "preset", "config", "steps", "memory_budget", "equal_time", "protocol")
EQUAL_TIME = (
    "the time that a precision saves is spent on fine samples: the most per ray with which a step takes no longer than "
    "fp32's with the config's, blocks of both timed in turn, found by doubling and bisection to a sixteenth; with "
    "those each precision trains as many {by} as fp32 of the same seed did at one batch, fp32 itself too; "
    "coarse, fine and rest are eager steps, each part waited for; a step is one as training runs it"
)


def summarise(runs: Sequence[PrecisionRun]) -> list[dict[str, Any]]:
    """One line per kind, medians over the seeds, compared with fp32."""
    lines = []
    base = [run for run in runs if run.kind == "fp32"]
    for kind in dict.fromkeys(run.kind for run in runs):
        own = [run for run in runs if run.kind == kind]

        def ratio(name: str, own: Sequence[PrecisionRun] = own) -> float | None:
            mine, theirs = ([getattr(run, name) for run in group] for group in (own, base))
            if not theirs or None in mine or None in theirs:
                return None
            return statistics.median(mine) / max(statistics.median(theirs), 1e-9)

        scores = [statistics.median(run.psnr for run in group) for group in (own, base) if group]
        lines.append(
            {
                "kind": kind,
                "batch_samples": own[0].batch_samples,
                "fine_samples": own[0].fine_samples,
                "steps": statistics.median(run.steps for run in own),
                "seconds": statistics.median(run.seconds for run in own),
                "rays_per_second": statistics.median(run.rays_per_second for run in own),
                "samples_per_second": statistics.median(run.samples_per_second for run in own),
                "samples_per_second_ratio": ratio("samples_per_second"),
                "peak_bytes": None if own[0].peak_bytes is None else max(run.peak_bytes or 0 for run in own),
                "peak_bytes_ratio": ratio("peak_bytes"),
                "ssim": None if own[0].ssim is None else statistics.median(run.ssim or 0.0 for run in own),
                "psnr": scores[0],
                "psnr_difference": None if not base else scores[0] - scores[1],
                "skipped": sum(run.skipped for run in own),
            }
        )
    return lines


def in_words(result: PrecisionResult) -> list[str]:
    """A sentence for each precision that no batch of the budget fits, and for each beside fp32 what its time bought,
    also where that is nothing."""
    lines = {line["kind"]: line for line in summarise(result.same_time)}
    base, found = lines.get(FP32.name), [f"{kind}: {why}" for kind, why in result.misfits.items()]
    for kind, search in result.searches.items():
        if kind == FP32.name:
            continue
        text, line = f"{kind}: {_bought(search)}", lines.get(kind)
        if line is not None and base is not None:
            made = [f"{one['steps']:.0f} steps in {one['seconds']:.1f} s" for one in (line, base)]
            text += f"; {made[0]}, fp32 {made[1]}: {line['psnr_difference']:+.2f} dB"
        found.append(text)
    return found


def _bought(search: FineSearch) -> str:
    first, refused = search.trials[0], [trial for trial in search.trials if not trial.fits]
    if search.ratio is None:
        return f"a step cannot be timed ({first.why}), so that no fine samples are bought"
    if not search.saves:
        return f"a step takes {search.ratio:.2f} times fp32's: no time is saved, and no fine samples are bought"
    took = f"a step takes {search.ratio:.2f} times fp32's"
    if search.fine_samples == first.fine_samples:
        return f"{took}, which is not enough for more than the {first.fine_samples} fine samples per ray there are"
    text = f"{took}, which buys {search.fine_samples} fine samples per ray for {first.fine_samples}"
    if not refused:
        return f"{text}, the most that were tried"
    out = any(trial.milliseconds is None for trial in refused)
    return f"{text}, memory runs out above" if out else text


def precision_record(
    result: PrecisionResult,
    config: Config,
    scene: Scene,
    plan: PrecisionPlan,
    *,
    device: str,
    finished: bool = False,
) -> Record:
    """The runs as a benchmark file; it names what the plan still misses, unless nothing more is to come: `finished`."""
    views = choose_views(len(scene), plan.eval_views)
    seeds = list(dict.fromkeys((*plan.seeds, *(run.seed for run in result.same_batch))))
    values = {
        "scene": scene.name,
        "preset": config.preset,
        "config": asdict(config) | {"data": {"scene": scene.name, "downscale": config.data.downscale}},
        "steps": plan.steps,
        "protocol": protocol(config, scene, len(views)) | {"seeds": seeds},
        "memory_budget": plan.budget,
        "memory_budget_bytes": result.budget,
        "equal_time": None if plan.equal_time is None else asdict(plan.equal_time),
        "unfinished": [] if finished else result.missing(plan),
        "largest_batch": result.largest | dict.fromkeys(result.misfits),
        "no_batch_fits": result.misfits,
        "same_batch": summarise(result.same_batch),
        "same_memory": summarise(result.same_memory),
        "same_time": summarise(result.same_time),
        "fine_samples": [asdict(search) for search in result.searches.values()],
        "in_words": in_words(result),
        "runs": [asdict(run) | {"part": part} for part in PARTS for run in getattr(result, part)],
    }
    text = (
        "every precision trains the same steps on the same draws, kernels compiled before; then each with the largest "
        "batch that fits the budget, pictures included (fp32: what it takes at the config's batch); test views scored "
        "with the clock stopped; peak memory is that of a training step beside the pictures; medians over the seeds"
    )
    if plan.equal_time is not None:
        text += "; " + EQUAL_TIME.format(by=plan.equal_time.by)
    return Record(f"{scene.name}: precisions side by side", text, plan.seeds[0], values, machine=machine(device))


def recorded_result(values: dict[str, Any], images: dict[str, Tensor]) -> PrecisionResult:
    """What a file holds, and pictures that were kept beside it."""
    parts: dict[Part, list[PrecisionRun]] = {part: [] for part in PARTS}
    for saved in values["runs"]:
        run = {key: value for key, value in saved.items() if key != "part"}
        run["points"] = tuple(Point(**point) for point in run["points"])
        run["loss_scales"] = tuple((step, scale) for step, scale in run["loss_scales"])
        parts[saved["part"]].append(PrecisionRun(**run))
    searches = {search["kind"]: FineSearch.of(search) for search in values.get("fine_samples", ())}
    runs = {part: tuple(own) for part, own in parts.items()}
    largest = {kind: batch for kind, batch in values["largest_batch"].items() if batch is not None}
    found = {"largest": largest, "misfits": values.get("no_batch_fits", {}), "searches": searches}
    found["budget"] = values["memory_budget_bytes"]
    return PrecisionResult(**runs, **found, images=images)
