"""What each technique buys: the same training with one of them changed at a time, time, memory and dB side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..config import Config, SamplingConfig
from ..data.keypoints import has_keypoints
from ..data.scene import Scene
from ..errors import InputError
from ..evaluation.evaluate import choose_views, evaluate
from ..evaluation.results import protocol
from ..training.trainer import Trainer
from .memory import peak_memory
from .plot import Bars, bar_chart
from .record import Record, machine

BASELINE = "as configured"
WARM_STEPS = 32
DEPTH_WEIGHT = 0.05
# What `docs/quality.md` describes: taken out where the config has it, put in where it does not.
QUALITY: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("distortion loss", "loss", {"distortion": 1e-3}),
    ("opacity entropy", "loss", {"opacity": 1e-4}),
    ("sparsity", "loss", {"sparsity": 1e-5}),
    ("decay of hash levels", "optim", {"table_decay": 0.1}),
    ("scale-aware features", "field", {"anti_alias": True}),
    ("thinned samples", "render", {"thin": 0.02}),
    ("rays all over the pixel", "train", {"pixel_spread": 1.0}),
    ("pixels of four rays", "train", {"rays_per_pixel": 4}),
    ("finer steps in pictures", "render", {"eval_refine": 2}),
    ("four rays a pixel in pictures", "render", {"eval_rays": 2}),
)
OF_GRIDS = ("anti_alias", "thin", "eval_refine")  # steps along a grid; not under a contraction
Report = Callable[["AblationRow"], None]


@dataclass(frozen=True)
class Case:
    """A config, and what is different about it."""

    name: str
    config: Config


@dataclass(frozen=True)
class AblationRow:
    """One case. Numbers are None where it did not run, and `error` says why: memory may be too small for it."""

    name: str
    seconds: float | None
    rays_per_second: float | None
    samples_per_second: float | None
    peak_bytes: int | None
    psnr: float | None
    ssim: float | None
    skipped: int
    error: str = ""


def _changed(config: Config, stage: str, **values: Any) -> Config:
    return replace(config, **{stage: replace(getattr(config, stage), **values)})


def _sampling_cases(config: Config) -> list[Case]:
    """The other ways to place samples along a ray."""
    kinds = {"grid": "occupancy grid", "uniform": "even samples", "hierarchy": "coarse and fine field"}
    kinds |= {"proposal": "proposal networks"}
    others = [kind for kind in kinds if kind != config.sampling.kind]
    return [Case(f"{kinds[kind]} (sampling)", _changed(config, "sampling", kind=kind)) for kind in others]


def _folding_cases(sampling: SamplingConfig) -> list[tuple[str, dict[str, Any]]]:
    """What belongs to proposals and to folded space, where a config has them."""
    cases: list[tuple[str, dict[str, Any]]] = []
    if sampling.kind == "proposal":
        cases += [("no distortion of proposals", {"distortion": 0.0}), ("no annealing", {"anneal_steps": 0})]
    if sampling.contraction != "none":
        other = "sphere" if sampling.contraction == "cube" else "cube"
        cases.append((f"contraction to a {other}", {"contraction": other}))
    if sampling.near_gradient > 0.0:
        cases.append(("near gradients as they are", {"near_gradient": 0.0}))
    return cases


def ablation_cases(config: Config, device: torch.device) -> list[Case]:
    """The baseline, each technique off that is on, each on that is off, and the combinations worth knowing."""
    train, optim, render, field = config.train, config.optim, config.render, config.field
    cases = [Case(BASELINE, config)]

    def add(name: str, changed: Config) -> None:
        if changed != config:
            cases.append(Case(name, changed))

    cases += _sampling_cases(config)
    no_grid = _changed(config, "grid", enabled=False)
    add("no occupancy grid", no_grid)
    add("no visibility pass", _changed(config, "render", prune=False))
    add("no grid, no visibility pass", _changed(no_grid, "render", prune=False))
    add("no early stop", _changed(config, "render", early_stop_eps=0.0))
    if render.alpha_thre > 0.0:
        add("no alpha threshold", _changed(config, "render", alpha_thre=0.0))
    else:
        add("+ alpha threshold 0.01", _changed(config, "render", alpha_thre=0.01))
    other_draw = "error" if train.draw == "uniform" else "uniform"
    background = "white" if train.background == "random" else "random"
    add(f"{background} background", _changed(config, "train", background=background))
    add(
        "error-guided draws" if train.draw == "uniform" else "uniform draws", _changed(config, "train", draw=other_draw)
    )
    add("pixels fetched from host memory", _changed(config, "data", pixels="host"))
    add("no warm-up", _changed(config, "optim", warmup_steps=0))
    add("constant learning rate", _changed(config, "optim", schedule="constant"))
    add("cosine schedule", _changed(config, "optim", schedule="cosine"))
    if device.type == "cuda":
        add("fp32", _changed(config, "train", precision="fp32"))
        add("no CUDA graph", _changed(config, "train", capture=False))
    for name, values in _folding_cases(config.sampling):
        add(name, _changed(config, "sampling", **values))
    if field.kind == "vanilla":
        add("+ gradient checkpointing", _changed(config, "field", checkpointing=True))
    coarse = _changed(config, "train", coarse_fraction=0.0 if train.coarse_fraction > 0.0 else 0.2)
    add("no coarse pictures" if train.coarse_fraction > 0.0 else "+ coarse pictures first (20%)", coarse)
    half = {"batch_samples": train.batch_samples // 2, "max_rays": train.max_rays // 2}
    add("+ accumulation, 2 half batches", _changed(config, "train", accumulate=2 * train.accumulate, **half))
    mean = _changed(config, "optim", ema_decay=0.0 if optim.ema_decay > 0.0 else 0.95)
    add("no running mean" if optim.ema_decay > 0.0 else "+ running mean 0.95", mean)
    add("+ clipping at 1", _changed(config, "optim", clip_norm=1.0))
    add("+ poses refined", _changed(config, "cameras", refine=True))
    add("+ poses and focal length refined", _changed(config, "cameras", refine=True, focal=True))
    add("+ exposure per photo", _changed(config, "photo", exposure=True))
    if field.kind == "ngp":
        add("+ appearance, 8 numbers per photo", _changed(config, "photo", appearance=8))
    if has_keypoints(config.data.source):
        add("+ depth of COLMAP's points", _changed(config, "photo", depth_weight=DEPTH_WEIGHT))
    for name, stage, values in QUALITY:
        if ("anti_alias" in values and field.kind != "ngp") or (
            config.sampling.kind != "grid" and not values.keys().isdisjoint(OF_GRIDS)
        ):
            continue
        current, plain = getattr(config, stage), getattr(Config(), stage)
        is_on = any(getattr(current, key) != getattr(plain, key) for key in values)
        off = {key: getattr(plain, key) for key in values}
        add(f"no {name}" if is_on else f"+ {name}", _changed(config, stage, **(off if is_on else values)))
    return cases


def run_ablation(
    cases: Sequence[Case],
    scenes: tuple[Scene, Scene],
    *,
    device: torch.device,
    steps: int,
    eval_views: int | None = None,
    report: Report | None = None,
) -> list[AblationRow]:
    """Train every case for the same number of steps from the same seed, and score it on the test views."""
    rows = []
    warm = _changed(cases[0].config, "train", steps=min(steps, WARM_STEPS), time_limit=None)
    Trainer(warm, scenes[0], device=device).fit()  # the first training of a process is slower than the others
    views = choose_views(len(scenes[1]), eval_views)
    for case in cases:
        config = _changed(case.config, "train", steps=steps, time_limit=None)
        try:
            row = _row(case.name, config, scenes, device, views)
        except (RuntimeError, MemoryError, InputError) as error:  # the other cases are still worth knowing
            if case is cases[0]:
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            row = AblationRow(case.name, None, None, None, None, None, None, 0, error=reason)
        rows.append(row)
        if report is not None:
            report(row)
    return rows


def _row(name: str, config: Config, scenes: tuple[Scene, Scene], device: torch.device, views: list[int]) -> AblationRow:
    if device.type == "cpu":  # a GPU's kernels compile before its clock starts
        Trainer(_changed(config, "train", steps=min(2, config.train.steps)), scenes[0], device=device).fit()
    with peak_memory(device) as peak:
        trainer = Trainer(config, scenes[0], device=device)
        summary = trainer.fit()
    with trainer.optimizer.averaged():
        score = evaluate(trainer.model.eval(), scenes[1], views=views)
    seconds = max(summary.train_seconds, 1e-9)
    return AblationRow(
        name=name,
        seconds=summary.train_seconds,
        rays_per_second=summary.rays / seconds,
        samples_per_second=summary.samples / seconds,
        peak_bytes=peak.n_bytes,
        psnr=score.psnr,
        ssim=score.ssim,
        skipped=trainer.skipped,
    )


def ablation_record(
    rows: Sequence[AblationRow], config: Config, scene: Scene, *, device: str, eval_views: int | None
) -> Record:
    """The rows as a benchmark file."""
    views = choose_views(len(scene), eval_views)
    values = {
        "scene": scene.name,
        "preset": config.preset,
        "config": asdict(config) | {"data": {"scene": scene.name, "downscale": config.data.downscale}},
        "protocol": protocol(config, scene, len(views)),
        "rows": [asdict(row) for row in rows],
    }
    text = (
        "every case trains the same number of steps from the same seed; one thing differs from the first row; seconds "
        "are of training alone; memory is the peak of the device, on GPUs alone"
    )
    return Record(f"{scene.name}: what each technique buys", text, config.train.seed, values, machine=machine(device))


def ablation_plot(rows: Sequence[AblationRow], title: str) -> str:
    """An SVG: seconds and dB of every case."""
    names = [row.name for row in rows]
    return bar_chart(
        title,
        names,
        [
            Bars("seconds of training", [row.seconds for row in rows]),
            Bars("PSNR, dB", [row.psnr for row in rows], from_zero=False),
        ],
    )
