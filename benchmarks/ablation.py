"""What each technique buys: the same training with one of them changed at a time, time, memory and dB side by side.

    python benchmarks/ablation.py DATA --steps 2000 --output ablation.json
    python benchmarks/ablation.py DATA --only grid visibility

When it is cut short, what was trained stays, and the same command goes on with the rest.
"""

from __future__ import annotations

from charts import Bars, bar_chart
from common import held_values, parse_study, run_study, say_plan, written_when_cut_short

# isort: split
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.table import Table

from camera_errors import has_keypoints
from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.bench.scene import fit_whole
from nerfturbo.bench.tune import peak_memory
from nerfturbo.cli.bench import TrainingArgs, prepare, show_result
from nerfturbo.cli.flags import check_positive
from nerfturbo.cli.progress import Display, make_table, showing
from nerfturbo.cli.settings import resolve_device
from nerfturbo.config import KINDS, Config, to_dict
from nerfturbo.data.scene import Scene
from nerfturbo.data.scene_defaults import fitted_config
from nerfturbo.errors import InputError
from nerfturbo.evaluation.evaluate import choose_views, evaluate
from nerfturbo.evaluation.results import protocol
from nerfturbo.evaluation.run_folder import check_result
from nerfturbo.files import write_atomically
from nerfturbo.training.precision import resolve_precision
from nerfturbo.training.step import StepRecord
from nerfturbo.training.trainer import Trainer
from nerfturbo.training.warm_start import KEEP, ZOO_PREFIX, check_source
from precision_runs import kinds_for

BASELINE = "as configured"
WARM_STEPS = 32
DEPTH_WEIGHT = 0.05
# What `docs/quality.md` describes: taken out where the config has it, put in where it does not.
QUALITY: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("distortion loss", "loss", {"distortion": 1e-3}),
    ("opacity entropy", "loss", {"opacity": 1e-4}),
    ("decay of hash levels", "optim", {"table_decay": 0.1}),
    ("scale-aware features", "field", {"anti_alias": 1}),
    ("thinned samples", "sampler", {"merge_weak_samples": 0.05}),
    ("finer steps in pictures", "render", {"eval_refine": 2}),
    ("four rays a pixel in pictures", "render", {"eval_rays": 2}),
)
# A view is scored evenly through the run, or as often in its first eighth as in all that follows.
VALIDATION: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("+ a view scored 16 times, evenly", tuple(k / 16 for k in range(1, 17))),
    ("+ a view scored 8 times, early more often", (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)),
)
OF_GRIDS = ("anti_alias", "eval_refine")  # steps along a grid; not under a contraction
Report = Callable[["AblationRow"], None]
SETTINGS = ("scene", "preset", "config", "steps", "init_from", "protocol")  # of a record: what its rows share


@dataclass(frozen=True)
class Case:
    """A config, and what is different about it."""

    name: str
    config: Config
    init_from: str | None = None
    init_parts: tuple[str, ...] = ()
    validate: tuple[float, ...] = ()  # shares of the run after which a test view is scored, the clock running


@dataclass(frozen=True)
class AblationPlan:
    """What every case has in common."""

    steps: int
    eval_views: int | None = None
    init_from: str | None = None


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
    others = {kind: name for kind, name in kinds.items() if kind != config.sampler.kind}
    return [
        Case(f"{name} (sampling)", replace(config, sampler=KINDS["sampler"][kind]())) for kind, name in others.items()
    ]


def _folding_cases(config: Config) -> list[Case]:
    """What belongs to proposals and to folded space, where a config has them."""
    cases = []
    if config.sampler.kind == "proposal":
        cases.append(Case("no annealing", _changed(config, "sampler", anneal_steps=0)))
    if config.grid.contraction != "none":
        other = "sphere" if config.grid.contraction == "cube" else "cube"
        cases.append(Case(f"contraction to a {other}", _changed(config, "grid", contraction=other)))
    if config.loss.near_gradient > 0.0:
        cases.append(Case("near gradients as they are", _changed(config, "loss", near_gradient=0.0)))
    if config.field.kind == "ngp":
        cases.append(Case("density of 1 at the start", _changed(config, "field", initial_density=1.0)))
    return cases


def ablation_cases(config: Config, device: torch.device, init_from: str | None = None) -> list[Case]:
    """The baseline, each technique off that is on, each on that is off, and the combinations worth knowing.

    Pretrained initialisation begins from `init_from`: a run, a safetensors file or zoo:NAME; unless given, from the
    entry of the zoo that fits the preset, where there is one.
    """
    groups = (_sampling_cases, _march_cases, _data_cases, _optim_cases, _folding_cases, _photo_cases, _quality_cases)
    cases = [Case(BASELINE, config)]
    cases += [case for group in groups for case in group(config) if case.config != config]
    cases += [case for case in _device_cases(config, device) if case.config != config]
    cases += _start_cases(config, init_from)
    cases += [Case(name, config, validate=shares) for name, shares in VALIDATION]
    return cases + [case for case in _combinations(config) if case.config != config]


def _march_cases(config: Config) -> list[Case]:
    """What decides where along a ray the field is asked."""
    no_grid = _changed(config, "grid", enabled=False)
    cases = [
        Case("no occupancy grid", no_grid),
        Case("no early stop", _changed(config, "render", early_stop_eps=0.0)),
    ]
    if config.sampler.kind != "grid":
        return cases
    is_on = config.sampler.alpha_thre > 0.0
    name = "no alpha threshold" if is_on else "+ alpha threshold 0.01"
    return [
        cases[0],
        Case("no visibility pass", _changed(config, "sampler", prune=False)),
        Case("no grid, no visibility pass", _changed(no_grid, "sampler", prune=False)),
        cases[1],
        Case(name, _changed(config, "sampler", alpha_thre=0.0 if is_on else 0.01)),
    ]


def _data_cases(config: Config) -> list[Case]:
    """Which pixels a step sees, how they come to it, and in what portions."""
    train = config.train
    background = "white" if train.background == "random" else "random"
    coarse = ("no coarse pictures", 0.0) if train.coarse_fraction > 0.0 else ("+ coarse pictures first (20%)", 0.2)
    half = {"batch_samples": train.batch_samples // 2, "max_rays": train.max_rays // 2}
    return [
        Case(f"{background} background", _changed(config, "train", background=background)),
        Case("pixels fetched from host memory", _changed(config, "data", pixels="host")),
        Case(coarse[0], _changed(config, "train", coarse_fraction=coarse[1])),
        Case("+ accumulation, 2 half batches", _changed(config, "train", accumulate=2 * train.accumulate, **half)),
    ]


def _optim_cases(config: Config) -> list[Case]:
    """Schedules, means and clipping; recomputed activations, where the field has them."""
    mean = ("no running mean", 0.0) if config.optim.ema_decay > 0.0 else ("+ running mean 0.95", 0.95)
    cases = [
        Case("no warm-up", _changed(config, "optim", warmup_steps=0)),
        Case("constant learning rate", _changed(config, "optim", schedule="constant")),
        Case("cosine schedule", _changed(config, "optim", schedule="cosine")),
        Case("multistep schedule", _changed(config, "optim", schedule="multistep")),
        Case(mean[0], _changed(config, "optim", ema_decay=mean[1])),
        Case("+ clipping at 1", _changed(config, "optim", clip_norm=1.0)),
    ]
    if config.field.kind == "vanilla":
        cases.append(Case("+ gradient checkpointing", _changed(config, "train", checkpointing=True)))
    return cases


def _device_cases(config: Config, device: torch.device) -> list[Case]:
    """Precisions other than the config's, and the step without its graph."""
    own = resolve_precision(config.train.precision, device)
    names = dict.fromkeys(kind.precision for kind in kinds_for(device))
    cases = [Case(name, _changed(config, "train", precision=name)) for name in names if name != own]
    return [*cases, Case("no CUDA graph", _changed(config, "train", capture=False))] if device.type == "cuda" else cases


def _photo_cases(config: Config) -> list[Case]:
    """What is learned about the pictures themselves."""
    cases = [
        Case("+ poses refined", _changed(config, "cameras", refine=True)),
        Case("+ poses and focal length refined", _changed(config, "cameras", refine=True, focal=True)),
        Case("+ exposure per photo", _changed(config, "photo", exposure=True)),
    ]
    if config.field.kind == "ngp":
        cases.append(Case("+ appearance, 8 numbers per photo", _changed(config, "photo", appearance=8)))
    if has_keypoints(config.data.source):
        cases.append(Case("+ depth of COLMAP's points", _changed(config, "loss", depth=DEPTH_WEIGHT)))
    return cases


def _quality_cases(config: Config) -> list[Case]:
    cases = []
    for name, stage, values in QUALITY:
        current, plain = getattr(config, stage), getattr(Config(), stage)
        without_grid = config.sampler.kind != "grid" and not values.keys().isdisjoint(OF_GRIDS)
        if without_grid or not all(hasattr(current, key) for key in values):
            continue
        is_on = any(getattr(current, key) != getattr(plain, key) for key in values)
        off = {key: getattr(plain, key) for key in values}
        cases.append(
            Case(f"no {name}" if is_on else f"+ {name}", _changed(config, stage, **(off if is_on else values)))
        )
    return cases


def _start_cases(config: Config, init_from: str | None) -> list[Case]:
    """Begun from a trained field, whole and by its networks alone."""
    source = f"{ZOO_PREFIX}toybox-cpu" if init_from is None and config.preset == "ngp-cpu" else init_from
    if source is None:
        return []
    shown = _shown(source)
    cases = [Case(f"+ begun from {shown}", config, init_from=source)]
    if config.field.kind == "ngp":
        networks = ("density_net", "color_net")
        cases.append(Case(f"+ begun from the networks of {shown}", config, init_from=source, init_parts=networks))
    return cases


def _shown(source: str) -> str:
    """Without the folders it lies in."""
    return source if source.startswith(ZOO_PREFIX) else Path(source).name


def _combinations(config: Config) -> list[Case]:
    """Several things at once, where they may add up."""
    plain = _changed(config, "grid", enabled=False)
    plain = _changed(plain, "render", early_stop_eps=0.0)
    if config.sampler.kind == "grid":
        plain = _changed(plain, "sampler", prune=False, alpha_thre=0.0)
    plain = _changed(plain, "optim", warmup_steps=0, schedule="constant", ema_decay=0.0)
    cases = [
        Case("plain: nothing skipped, one rate", _changed(plain, "train", background="white")),
    ]
    if config.sampler.kind == "grid":
        finer = _changed(config, "render", eval_refine=2, eval_rays=2)
        cases.append(Case("+ finer steps and four rays a pixel in pictures", finer))
    return cases


def run_ablation(
    cases: Sequence[Case],
    scenes: tuple[Scene, Scene],
    *,
    device: torch.device,
    plan: AblationPlan,
    report: Report | None = None,
) -> list[AblationRow]:
    """Train every case for the same number of steps from the same seed, and score it on the test views."""
    rows, steps = [], plan.steps
    if not cases:
        return rows
    warm = _changed(cases[0].config, "train", steps=min(steps, WARM_STEPS), time_limit=None)
    fit_whole(Trainer(warm, scenes[0], device=device))  # the first training of a process is slower than the others
    views = choose_views(len(scenes[1]), plan.eval_views)
    for case in cases:
        timed = replace(case, config=_changed(case.config, "train", steps=steps, time_limit=None))
        try:
            row = _row(timed, scenes, views, device)
        except (RuntimeError, MemoryError, InputError) as error:  # the other cases are still worth knowing
            if case.name == BASELINE:
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            row = AblationRow(case.name, None, None, None, None, None, None, 0, error=reason)
        rows.append(row)
        if report is not None:
            report(row)
    return rows


def _row(case: Case, scenes: tuple[Scene, Scene], views: list[int], device: torch.device) -> AblationRow:
    config, name = case.config, case.name
    if device.type == "cpu":  # a GPU's kernels compile before its clock starts
        fit_whole(Trainer(_changed(config, "train", steps=min(2, config.train.steps)), scenes[0], device=device))
    with peak_memory(device) as peak:
        trainer = Trainer(config, scenes[0], device=device)
        if case.init_from is not None:
            trainer.warm_start(case.init_from, case.init_parts, keep=KEEP)
        if case.validate:
            trainer.callbacks.append(_Validation(scenes[1], config.train.steps, case.validate))
        summary = fit_whole(trainer)
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


class _Validation:
    """Scores one test view at shares of the run, while the clock of training runs on."""

    def __init__(self, scene: Scene, steps: int, shares: Sequence[float]) -> None:
        self._scene, self._due = scene, [max(1, round(share * steps)) for share in shares]

    def __call__(self, trainer: Trainer, record: StepRecord) -> None:
        if not self._due or trainer.step < self._due[0]:
            return
        while self._due and self._due[0] <= trainer.step:  # a GPU makes many steps at once
            self._due.pop(0)
        with trainer.optimizer.averaged():
            evaluate(trainer.model, self._scene, views=[len(self._scene) // 2], with_ssim=False)


def ablation_record(
    rows: Sequence[AblationRow],
    config: Config,
    scene: Scene,
    plan: AblationPlan,
    *,
    device: str,
    unfinished: Sequence[str] = (),
) -> Record:
    """The rows as a benchmark file; `unfinished` names the cases that are still to be trained."""
    views = choose_views(len(scene), plan.eval_views)
    values = {
        "scene": scene.name,
        "preset": config.preset,
        "config": to_dict(config) | {"data": {"scene": scene.name, "downscale": config.data.downscale}},
        "steps": plan.steps,
        "init_from": plan.init_from and _shown(plan.init_from),
        "protocol": protocol(config, scene, len(views)),
        "unfinished": list(unfinished),
        "rows": [asdict(row) for row in rows],
    }
    text = (
        "every case trains the same number of steps from the same seed; one thing differs from the first row; seconds "
        "are of training alone, with the views scored on the way where a row says so; memory is the peak of the "
        "device, on GPUs alone"
    )
    return Record(f"{scene.name}: what each technique buys", text, config.train.seed, values, machine=machine(device))


def ablation_plot(rows: Sequence[AblationRow], title: str) -> str:
    """An SVG: seconds and dB of every case."""
    seconds = Bars("seconds of training", [row.seconds for row in rows])
    scores = Bars("PSNR, dB", [row.psnr for row in rows], from_zero=False)
    return bar_chart(title, [row.name for row in rows], [seconds, scores])


def ablation_table(rows: Sequence[AblationRow], title: str) -> Table:
    table = make_table(title, "technique", "s", "times as long", "MB", "PSNR, dB", "dB more")
    base_seconds, base_psnr = rows[0].seconds or 1e-9, rows[0].psnr or 0.0
    for row in rows:
        if row.seconds is None or row.psnr is None:
            table.add_row(row.name, *["-"] * 3, row.error[:60], "-")
            continue
        size = "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f}"
        numbers = (f"{row.seconds:.1f}", f"{row.seconds / base_seconds:.2f}", size)
        table.add_row(row.name, *numbers, f"{row.psnr:.2f}", f"{row.psnr - base_psnr:+.2f}")
    return table


@dataclass(frozen=True)
class AblationArgs(TrainingArgs):
    """Train a scene again and again with one technique changed at a time: time, memory and dB of each."""

    steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Steps of every training; the preset's unless given."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="WORD")] = ()
    """Only the techniques whose name has one of these words in it, beside the baseline."""
    eval_views: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Score only this many test views, evenly spaced; all of them unless given."""
    init_from: Annotated[str | None, tyro.conf.arg(metavar="RUN")] = None
    """Where pretrained initialisation begins: a run, a safetensors file, zoo:NAME; the zoo's field that fits unless
    given."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("bench-ablation.json")
    """Where the result is written, training by training; a plot lies beside it, as .svg. A file of the same settings is
    gone on with."""
    fresh: bool = False
    """Measure everything again, also what the output holds already."""


def main(argv: Sequence[str]) -> int:
    """Train every case, print the table, write JSON and plot."""
    args, start = parse_study(AblationArgs, argv, "ablation")
    check_positive({"--steps": args.steps, "--eval-views": args.eval_views, "--downscale": args.downscale})
    check_result(args.output)
    if args.init_from is not None:
        check_source(args.init_from)  # now, not after an hour of other cases
    device = resolve_device(args.device)
    with showing() as display:
        scenes, config = prepare(args, start, device, display)
        study = Study(args, config, scenes, device, display)
        study.run()
    show_result(ablation_table(study.rows(), study.title), args.output, as_json=args.json)
    return 0


class Study:
    """Trains the chosen cases; whatever is measured is in the file at once."""

    def __init__(
        self, args: AblationArgs, config: Config, scenes: tuple[Scene, Scene], device: str, display: Display
    ) -> None:
        self.args, self.config, self.scenes, self.device, self.display = args, config, scenes, device, display
        self.plan = AblationPlan(args.steps or config.train.steps, args.eval_views, args.init_from)
        self.title = f"{scenes[1].name}, {self.plan.steps} steps"
        self.every = ablation_cases(config, torch.device(device), args.init_from)
        words = args.only or ("",)
        self.cases = [c for c in self.every if c.name == BASELINE or any(word in c.name for word in words)]
        if len(self.cases) == 1:
            raise InputError("--only", "words of the techniques' names", " ".join(args.only), "leave it out to see all")
        self.done: dict[str, AblationRow] = {}

    def rows(self) -> list[AblationRow]:
        return [self.done[case.name] for case in self.every if case.name in self.done]

    def record(self) -> Record:
        left = [case.name for case in self.cases if case.name not in self.done]
        options = {"device": self.device, "unfinished": left}
        return ablation_record(self.rows(), self.config, self.scenes[1], self.plan, **options)

    def report(self, row: AblationRow) -> None:
        failed = row.seconds is None or row.psnr is None
        self.display.note(f"{row.name}: " + (row.error if failed else f"{row.seconds:.1f} s, {row.psnr:.2f} dB"))
        self.done[row.name] = row
        write_json(self.args.output, self.record())

    def run(self) -> None:
        output, device = self.args.output, torch.device(self.device)
        held = None if self.args.fresh else held_values(output, self.record(), SETTINGS)
        self.done.update({row["name"]: AblationRow(**row) for row in (held or {}).get("rows", [])})
        left = [case for case in self.cases if case.name not in self.done]
        left = [replace(case, config=fitted_config(case.config, self.scenes[0])[0]) for case in left]
        say_plan(self.display, output, len(self.done), len(left))
        with written_when_cut_short(self.display, output, lambda: len(self.done)):
            try:
                run_ablation(left, self.scenes, device=device, plan=self.plan, report=self.report)
            finally:
                if self.done:
                    write_json(output, self.record())
                    write_atomically(output.with_suffix(".svg"), ablation_plot(self.rows(), self.title))


if __name__ == "__main__":
    sys.exit(run_study(main))
