"""fp32, fp16 and bf16 side by side: speed, memory, quality and stability at one batch, and at one memory budget."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..config import Config
from ..data.scene import Scene
from ..evaluation.evaluate import choose_views, evaluate
from ..evaluation.results import protocol
from ..training.precision import matmul_precision
from ..training.step import StepRecord
from ..training.trainer import Trainer
from .continued import fit_whole
from .memory import best_trial, largest_batch, peak_memory, with_batch
from .record import Record, machine

MARKS = (0.1, 0.25, 0.5, 1.0)  # shares of the run at which test views are scored
Report = Callable[["PrecisionRun", "PrecisionResult"], None]  # what was done now, and all there is so far
SETTINGS = ("scene", "preset", "config", "steps", "memory_budget_bytes", "protocol")  # of a record: what its runs share


@dataclass(frozen=True)
class Kind:
    """A precision, and for fp32 how its products run on a GPU."""

    name: str
    precision: Literal["fp32", "fp16", "bf16"]
    matmul: Literal["ieee", "tf32"]


def kinds_for(device: torch.device) -> list[Kind]:
    """fp32 twice on GPUs with TF32 units, fp16, and bf16 where there are units for it."""
    fp32, fp16, bf16 = Kind("fp32", "fp32", "ieee"), Kind("fp16", "fp16", "ieee"), Kind("bf16", "bf16", "ieee")
    if device.type != "cuda":
        return [fp32, fp16, bf16]
    modern = torch.cuda.get_device_capability(device) >= (8, 0)
    return [fp32, Kind("tf32", "fp32", "tf32"), fp16, bf16] if modern else [fp32, fp16]


@dataclass(frozen=True)
class Point:
    """A score on the way."""

    step: int
    seconds: float
    psnr: float
    ssim: float | None


@dataclass(frozen=True)
class PrecisionRun:
    """One training: `batch_samples` is that of the config, or the largest that fits the budget."""

    kind: str
    seed: int
    batch_samples: int
    steps: int
    seconds: float
    rays_per_second: float
    samples_per_second: float
    peak_bytes: int | None  # of a training step, beside the pictures
    points: tuple[Point, ...]
    skipped: int
    loss_scales: tuple[tuple[int, float], ...]  # (step, scale) whenever it moved

    @property
    def psnr(self) -> float:
        return self.points[-1].psnr


def run_precision(
    config: Config,
    scenes: tuple[Scene, Scene],
    kind: Kind,
    *,
    device: torch.device,
    steps: int,
    views: Sequence[int],
    on_image: Callable[[Tensor], None] | None = None,
) -> PrecisionRun:
    """Train in one precision and score the views at marks, the clock stopped."""
    train = replace(config.train, steps=steps, time_limit=None, precision=kind.precision)
    config = replace(config, train=train)
    points: list[Point] = []
    scales: list[tuple[int, float]] = []
    due = [max(1, round(steps * share)) for share in MARKS]

    def score(trainer: Trainer) -> None:
        with trainer.optimizer.averaged():
            found = evaluate(trainer.model, scenes[1], views=list(views))
        points.append(Point(trainer.step, trainer.train_seconds, found.psnr, found.ssim))

    def follow(trainer: Trainer, record: StepRecord) -> None:
        if not scales or scales[-1][1] != record.loss_scale:
            scales.append((record.step, record.loss_scale))
        if len(points) < len(due) - 1 and record.step >= due[len(points)]:
            with trainer.clock_stopped():
                score(trainer)

    with matmul_precision(kind.matmul):
        with peak_memory(device) as peak:  # of a step alone, without scoring; compiled and warm before the clock runs
            warm = Trainer(config, scenes[0], device=device)
            warm.stepper.advance(0, 1)
        pictures = 0 if warm.sampler.on_host else warm.sampler.scene.images.pixels.nbytes
        del warm
        trainer = Trainer(config, scenes[0], device=device, callbacks=[follow])
        summary = fit_whole(trainer)
        score(trainer)
        if on_image is not None:
            on_image(trainer.model.render_image(scenes[1].to(device).cameras, views[0]).rgb.cpu())
    return PrecisionRun(
        kind=kind.name,
        seed=config.train.seed,
        batch_samples=config.train.batch_samples,
        steps=summary.steps,
        seconds=summary.train_seconds,
        rays_per_second=summary.rays / max(summary.train_seconds, 1e-9),
        samples_per_second=summary.samples / max(summary.train_seconds, 1e-9),
        peak_bytes=None if peak.n_bytes is None else peak.n_bytes - pictures,
        points=tuple(points),
        skipped=trainer.skipped,
        loss_scales=tuple(scales),
    )


@dataclass(frozen=True)
class PrecisionPlan:
    """What to measure."""

    kinds: tuple[Kind, ...]
    seeds: tuple[int, ...]
    steps: int
    eval_views: int | None = None
    budget: int | None = None  # bytes: each precision also with the largest batch that fits


@dataclass(frozen=True)
class PrecisionResult:
    """Runs at the config's batch, runs at the largest batch of the budget, and a render of each kind."""

    same_batch: tuple[PrecisionRun, ...] = ()
    same_memory: tuple[PrecisionRun, ...] = ()
    largest: dict[str, int] = field(default_factory=dict)
    images: dict[str, Tensor] = field(default_factory=dict)  # the first test view; "truth" among them

    def missing(self, plan: PrecisionPlan) -> list[str]:
        """What the plan asks for and is not here."""
        done, large = {(run.kind, run.seed) for run in self.same_batch}, {run.kind for run in self.same_memory}
        names = [f"{k.name}, seed {seed}" for seed in plan.seeds for k in plan.kinds if (k.name, seed) not in done]
        if plan.budget is not None:
            names += [f"{k.name}, largest batch" for k in plan.kinds if k.name not in large]
        return names


def compare_precisions(
    config: Config,
    scenes: tuple[Scene, Scene],
    plan: PrecisionPlan,
    *,
    device: torch.device,
    report: Report,
    held: PrecisionResult | None = None,
) -> PrecisionResult:
    """Every kind with every seed at one batch; then, within a budget, each at its own largest batch.

    What `held` has is not trained again.
    """
    from ..evaluation.evaluate import truth_image

    result = held or PrecisionResult()
    views = choose_views(len(scenes[1]), plan.eval_views)
    images = {"truth": truth_image(scenes[1], views[0]).cpu()} | result.images
    result = replace(result, images=images)

    def run(kind: Kind, changed: Config, part: Literal["same_batch", "same_memory"], largest: dict[str, int]) -> None:
        nonlocal result

        def take(image: Tensor) -> None:
            if part == "same_batch":
                images.setdefault(kind.name, image)

        done = run_precision(changed, scenes, kind, device=device, steps=plan.steps, views=views, on_image=take)
        result = replace(result, largest=result.largest | largest, **{part: (*getattr(result, part), done)})
        report(done, result)

    for seed in plan.seeds:
        seeded = replace(config, train=replace(config.train, seed=seed))
        for kind in plan.kinds:
            if not any((r.kind, r.seed) == (kind.name, seed) for r in result.same_batch):
                run(kind, seeded, "same_batch", {})
    for kind in plan.kinds if plan.budget is not None else ():
        if any(r.kind == kind.name for r in result.same_memory):
            continue
        own = replace(config, train=replace(config.train, precision=kind.precision))
        with matmul_precision(kind.matmul):
            trials = largest_batch(own, scenes[0], device=device, budget=plan.budget or 0)
        best = best_trial(trials)
        if best is not None:
            run(kind, with_batch(config, best.batch_samples), "same_memory", {kind.name: best.batch_samples})
    return result


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
                "seconds": statistics.median(run.seconds for run in own),
                "rays_per_second": statistics.median(run.rays_per_second for run in own),
                "samples_per_second": statistics.median(run.samples_per_second for run in own),
                "samples_per_second_ratio": ratio("samples_per_second"),
                "peak_bytes": None if own[0].peak_bytes is None else max(run.peak_bytes or 0 for run in own),
                "peak_bytes_ratio": ratio("peak_bytes"),
                "psnr": scores[0],
                "psnr_difference": None if not base else scores[0] - scores[1],
                "skipped": sum(run.skipped for run in own),
            }
        )
    return lines


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
    parts = (("same_batch", result.same_batch), ("same_memory", result.same_memory))
    values = {
        "scene": scene.name,
        "preset": config.preset,
        "config": asdict(config) | {"data": {"scene": scene.name, "downscale": config.data.downscale}},
        "steps": plan.steps,
        "protocol": protocol(config, scene, len(views)) | {"seeds": seeds},
        "memory_budget_bytes": plan.budget,
        "unfinished": [] if finished else result.missing(plan),
        "largest_batch": result.largest,
        "same_batch": summarise(result.same_batch),
        "same_memory": summarise(result.same_memory),
        "runs": [asdict(run) | {"part": part} for part, runs in parts for run in runs],
    }
    text = (
        "every precision trains the same steps on the same draws, kernels compiled before; then each with the largest "
        "batch that fits the budget; test views scored with the clock stopped; peak memory is that of a training step "
        "beside the pictures; medians over the seeds"
    )
    return Record(f"{scene.name}: precisions side by side", text, plan.seeds[0], values, machine=machine(device))


def recorded_result(values: dict[str, Any], images: dict[str, Tensor]) -> PrecisionResult:
    """The runs of a file, and pictures that were kept beside it."""
    parts: dict[str, list[PrecisionRun]] = {"same_batch": [], "same_memory": []}
    for saved in values["runs"]:
        run = {key: value for key, value in saved.items() if key != "part"}
        run["points"] = tuple(Point(**point) for point in run["points"])
        run["loss_scales"] = tuple((step, scale) for step, scale in run["loss_scales"])
        parts[saved["part"]].append(PrecisionRun(**run))
    return PrecisionResult(tuple(parts["same_batch"]), tuple(parts["same_memory"]), values["largest_batch"], images)
