"""fp32, fp16 and bf16 side by side: speed, memory, quality and stability at one batch, at one memory budget, and, where
a coarse pass places fine samples, at one training time."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fine_samples import (
    FineSearch,
    FineTrial,
    StepTimer,
    has_two_passes,
    matmul_precision,
    measure_base,
    search_fine,
    with_fine,
)
from nerfturbo.bench.record import Record, machine
from nerfturbo.bench.scene import fit_whole
from nerfturbo.bench.tune import BatchTrial, best_trial, largest_batch, peak_memory, try_batch, with_batch
from nerfturbo.config import NO_STEP_LIMIT, Config, to_dict
from nerfturbo.data.scene import Scene
from nerfturbo.evaluation.evaluate import choose_views, evaluate, truth_image
from nerfturbo.evaluation.results import protocol
from nerfturbo.training.step import StepRecord
from nerfturbo.training.trainer import Trainer, TrainSummary

QUEUED_STEPS = 4  # where the clock ends a training
MARKS = (0.1, 0.25, 0.5, 1.0)  # shares of the run at which test views are scored
Part = Literal["same_batch", "same_memory", "same_time"]
PARTS: tuple[Part, ...] = ("same_batch", "same_memory", "same_time")
# What the runs of a file share.
SETTINGS = ("scene", "preset", "config", "steps", "memory_budget", "equal_time", "protocol")
EQUAL_TIME = (
    "the time that a precision saves is spent on fine samples: the most per ray with which a step takes no longer than "
    "fp32's with the config's, blocks of both timed in turn, found by doubling and bisection to a sixteenth; with "
    "those each precision trains as many {by} as fp32 of the same seed did at one batch, fp32 itself too; "
    "coarse, fine and rest are eager steps, each part waited for; a step is one as training runs it"
)


@dataclass(frozen=True)
class Kind:
    """A precision, and for fp32 how its products run on a GPU."""

    name: str
    precision: Literal["fp32", "fp16", "bf16"]
    matmul: Literal["ieee", "tf32"]


FP32 = Kind("fp32", "fp32", "ieee")  # the measure of the others


def kinds_for(device: torch.device) -> list[Kind]:
    """fp32 twice on GPUs with TF32 units, fp16, and bf16 where there are units for it."""
    fp32, fp16, bf16 = FP32, Kind("fp16", "fp16", "ieee"), Kind("bf16", "bf16", "ieee")
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
    fine_samples: int | None = None  # per ray, where a coarse pass places them

    @property
    def psnr(self) -> float:
        return self.points[-1].psnr

    @property
    def ssim(self) -> float | None:
        return self.points[-1].ssim


def step_bytes(config: Config, scene: Scene, device: torch.device) -> int | None:
    """What a step takes at its peak, without scoring and beside the pictures, which a CPU had before."""
    with peak_memory(device, count=True) as peak:
        trainer = Trainer(config, scene, device=device)
        trainer.stepper.advance(0, 1)
    there = device.type != "cuda" or trainer.pixels.on_host
    pictures = 0 if there else trainer.pixels.scene.images.pixels.nbytes
    return None if peak.n_bytes is None else peak.n_bytes - pictures


def fit_to_the_second(trainer: Trainer) -> TrainSummary:
    """Train until the time limit, a few steps at a time: `fit` on a GPU may go on for half a second after it."""
    trainer.begin()
    while not trainer.is_over:
        trainer.advance(QUEUED_STEPS)
    return trainer.end("time limit")


def run_precision(
    config: Config,
    scenes: tuple[Scene, Scene],
    kind: Kind,
    *,
    device: torch.device,
    steps: int,
    views: Sequence[int],
    time_limit: float | None = None,
    on_image: Callable[[Tensor], None] | None = None,
) -> PrecisionRun:
    """Train in one precision, so many steps or so many seconds, and score the views at marks, the clock stopped."""
    steps = steps if time_limit is None else NO_STEP_LIMIT
    train = replace(config.train, steps=steps, time_limit=time_limit, precision=kind.precision)
    config = replace(config, train=train)
    points, scales = list[Point](), list[tuple[int, float]]()
    due = [max(1, round(steps * share)) for share in MARKS]

    def score(trainer: Trainer) -> None:
        with trainer.optimizer.averaged():
            found = evaluate(trainer.model, scenes[1], views=list(views))
        points.append(Point(trainer.step, trainer.train_seconds, found.psnr, found.ssim))

    def reached(trainer: Trainer, record: StepRecord) -> bool:
        mark = len(points)
        return record.step >= due[mark] if time_limit is None else trainer.progress >= MARKS[mark]

    def follow(trainer: Trainer, record: StepRecord) -> None:
        if not scales or scales[-1][1] != record.loss_scale:
            scales.append((record.step, record.loss_scale))
        if len(points) < len(due) - 1 and reached(trainer, record):
            with trainer.clock_stopped():
                score(trainer)

    with matmul_precision(kind.matmul):
        peak_bytes = step_bytes(config, scenes[0], device)  # compiled and warm before the clock runs
        trainer = Trainer(config, scenes[0], device=device, callbacks=[follow])
        summary = fit_whole(trainer) if time_limit is None else fit_to_the_second(trainer)
        score(trainer)
        with trainer.optimizer.averaged():  # as it was scored
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
        peak_bytes=peak_bytes,
        points=tuple(points),
        skipped=trainer.skipped,
        loss_scales=tuple(scales),
        fine_samples=config.sampler.n_samples if has_two_passes(config) else None,
    )


@dataclass(frozen=True)
class EqualTime:
    """The time that a precision saves is spent on fine samples; then all train as long as fp32 did."""

    by: Literal["seconds", "steps"] = "seconds"  # of fp32's training at one batch; steps repeat exactly on a CPU
    most_fine: int = 1024  # fine samples per ray at which the search ends


@dataclass(frozen=True)
class PrecisionPlan:
    """What to measure."""

    kinds: tuple[Kind, ...]
    seeds: tuple[int, ...]
    steps: int
    eval_views: int | None = None
    budget: int | Literal["fp32"] | None = None  # bytes, or those of fp32: each also with the largest batch that fits
    equal_time: EqualTime | None = None  # for configs with a coarse and a fine pass


@dataclass(frozen=True)
class PrecisionResult:
    """Runs at the config's batch, at the largest batch of the budget, in fp32's time; and a render of each kind."""

    same_batch: tuple[PrecisionRun, ...] = ()
    same_memory: tuple[PrecisionRun, ...] = ()
    same_time: tuple[PrecisionRun, ...] = ()
    largest: dict[str, int] = field(default_factory=dict)  # by kind: the batch of same_memory
    misfits: dict[str, str] = field(default_factory=dict)  # kinds for which no batch fits the budget, and why
    budget: int | None = None  # bytes: what was given, or what fp32 took
    searches: dict[str, FineSearch] = field(default_factory=dict)  # by kind: the fine samples of same_time
    images: dict[str, Tensor] = field(default_factory=dict)  # the first test view; "truth" among them

    def run_of(self, part: Part, kind: str, seed: int | None = None) -> PrecisionRun | None:
        """The first of this kind (and seed)."""
        runs: tuple[PrecisionRun, ...] = getattr(self, part)
        return next((run for run in runs if run.kind == kind and seed in (None, run.seed)), None)

    @property
    def n_runs(self) -> int:
        """Trainings, not counting those that stand in two parts."""
        later = (*self.same_memory, *self.same_time)
        return len(self.same_batch) + sum(run not in self.same_batch for run in later)

    def missing(self, plan: PrecisionPlan) -> list[str]:
        """What the plan asks for and is not here."""
        both = [(kind.name, seed) for seed in plan.seeds for kind in plan.kinds]
        names = [f"{kind}, seed {seed}" for kind, seed in both if self.run_of("same_batch", kind, seed) is None]
        if plan.budget is not None:
            left = [k.name for k in plan.kinds if k.name not in self.misfits]
            names += [f"{name}, largest batch" for name in left if self.run_of("same_memory", name) is None]
        if plan.equal_time is not None:
            names += [f"{k.name}, fine samples in fp32's time" for k in plan.kinds if k.name not in self.searches]
            without = [(kind, seed) for kind, seed in both if self.run_of("same_time", kind, seed) is None]
            names += [f"{kind}, seed {seed}, in fp32's time" for kind, seed in without]
        return names


@dataclass(frozen=True)
class Reports:
    """Whom to tell. `trained` and `searched` get what was done now and all there is so far."""

    trained: Callable[[PrecisionRun, PrecisionResult], None]
    searched: Callable[[FineSearch, PrecisionResult], None]
    tried: Callable[[str, FineTrial], None]  # a kind, and one step of its search
    fitted: Callable[[str, BatchTrial], None]  # a kind, and one batch held against the budget


def compare_precisions(
    config: Config,
    scenes: tuple[Scene, Scene],
    plan: PrecisionPlan,
    *,
    device: torch.device,
    reports: Reports,
    held: PrecisionResult | None = None,
) -> PrecisionResult:
    """Every kind with every seed at one batch; within a budget, each at its own largest batch (the first seed); with
    a coarse and a fine pass, each with the fine samples that it affords in fp32's time.

    What `held` has is not measured again.
    """
    comparison = _Comparison(config, scenes, plan, device, reports, held or PrecisionResult())
    comparison.at_one_batch()
    if plan.budget is not None:
        comparison.at_one_budget(plan.budget)
    if plan.equal_time is not None:
        comparison.search(plan.equal_time)
        comparison.in_one_time(plan.equal_time)
    return comparison.result


class _Comparison:
    """Part after part; `result` is what there is so far."""

    def __init__(
        self,
        config: Config,
        scenes: tuple[Scene, Scene],
        plan: PrecisionPlan,
        device: torch.device,
        reports: Reports,
        held: PrecisionResult,
    ) -> None:
        self.config, self.scenes, self.plan, self.device, self.reports = config, scenes, plan, device, reports
        self.views = choose_views(len(scenes[1]), plan.eval_views)
        self.images = {"truth": truth_image(scenes[1], self.views[0]).cpu()} | held.images
        self.result = replace(held, images=self.images)

    def at_one_batch(self) -> None:
        for seed in self.plan.seeds:
            for kind in self.plan.kinds:
                if self.result.run_of("same_batch", kind.name, seed) is None:
                    self._train(kind, self._seeded(self.config, seed), "same_batch", picture=kind.name)

    def at_one_budget(self, given: int | Literal["fp32"]) -> None:
        if self.result.budget is None:
            self.result = replace(self.result, budget=self._taken_by_fp32() if given == "fp32" else given)
        seed = self.plan.seeds[0]
        for kind in self.plan.kinds:
            if self.result.run_of("same_memory", kind.name) is not None or kind.name in self.result.misfits:
                continue
            first = self.result.run_of("same_batch", kind.name, seed)
            if kind == FP32 and given == "fp32" and first is not None:  # that very training was made already
                largest = self.result.largest | {kind.name: first.batch_samples}
                self.result = replace(self.result, largest=largest, same_memory=(*self.result.same_memory, first))
                continue
            if kind.name not in self.result.largest:
                self._fit(kind)
            if kind.name in self.result.largest:
                config = with_batch(self.config, self.result.largest[kind.name])
                self._train(kind, self._seeded(config, seed), "same_memory")

    def _taken_by_fp32(self) -> int | None:
        """At the config's batch."""
        own = replace(self.config, train=replace(self.config.train, precision=FP32.precision))
        with matmul_precision(FP32.matmul):
            trial = try_batch(own, self.scenes[0], own.train.batch_samples, device=self.device, budget=1 << 62)
        self.reports.fitted(FP32.name, trial)
        return trial.n_bytes if trial.fits else None

    def _fit(self, kind: Kind) -> None:
        """The largest batch of this kind, or why there is none."""
        budget, own = self.result.budget, replace(self.config.train, precision=kind.precision)
        if budget is None:
            why = "fp32 does not fit this machine, so that there is no budget: give --memory-budget GB"
            self.result = replace(self.result, misfits=self.result.misfits | {kind.name: why})
            return
        tell = functools.partial(self.reports.fitted, kind.name)
        options = {"device": self.device, "start": own.batch_samples, "report": tell}
        with matmul_precision(kind.matmul):
            trials = largest_batch(replace(self.config, train=own), self.scenes[0], budget=budget, **options)
        best = best_trial(trials)
        if best is not None:
            self.result = replace(self.result, largest=self.result.largest | {kind.name: best.batch_samples})
        else:
            why = f"not even {trials[-1].batch_samples} samples a step fit the budget: {trials[-1].why}"
            self.result = replace(self.result, misfits=self.result.misfits | {kind.name: why})

    def search(self, rule: EqualTime) -> None:
        """What each kind affords; fp32's steps run beside all of them."""
        left = [kind for kind in self.plan.kinds if kind.name not in self.result.searches]
        if not left:
            return
        config, scene, device = with_fine(self.config, self.config.sampler.n_samples), self.scenes[0], self.device
        base = StepTimer(config, scene, FP32, device=device)
        for kind in left:
            if kind == FP32:
                found = measure_base(config, scene, kind, device=device, base=base)
            else:
                tried = functools.partial(self.reports.tried, kind.name)
                options = {"device": device, "base": base, "most": rule.most_fine, "report": tried}
                found = search_fine(config, scene, kind, **options)
            self.result = replace(self.result, searches=self.result.searches | {kind.name: found})
            self.reports.searched(found, self.result)

    def in_one_time(self, rule: EqualTime) -> None:
        for seed in self.plan.seeds:
            measure = self.result.run_of("same_batch", FP32.name, seed)
            if measure is None and rule.by == "seconds":
                continue  # without fp32 there is no time to hold to
            for kind in self.plan.kinds:
                if self.result.run_of("same_time", kind.name, seed) is not None:
                    continue
                found, first = self.result.searches[kind.name], self.result.run_of("same_batch", kind.name, seed)
                bought = found.fine_samples != self.config.sampler.n_samples
                if first is not None and not bought and rule.by == "steps":  # that very training was made already
                    self.result = replace(self.result, same_time=(*self.result.same_time, first))
                    continue
                config = self._seeded(with_fine(self.config, found.fine_samples), seed)
                limit = measure.seconds if measure is not None and rule.by == "seconds" else None
                picture = f"{kind.name} with {found.fine_samples} fine samples" if bought else None
                self._train(kind, config, "same_time", time_limit=limit, picture=picture)

    def _seeded(self, config: Config, seed: int) -> Config:
        return replace(config, train=replace(config.train, seed=seed))

    def _train(
        self, kind: Kind, config: Config, part: Part, *, time_limit: float | None = None, picture: str | None = None
    ) -> None:
        def take(image: Tensor) -> None:
            if picture is not None:
                self.images.setdefault(picture, image)

        options = {"device": self.device, "steps": self.plan.steps, "views": self.views, "time_limit": time_limit}
        done = run_precision(config, self.scenes, kind, **options, on_image=take)
        self.result = replace(self.result, **{part: (*getattr(self.result, part), done)})
        self.reports.trained(done, self.result)


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
        "config": to_dict(config) | {"data": {"scene": scene.name, "downscale": config.data.downscale}},
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
