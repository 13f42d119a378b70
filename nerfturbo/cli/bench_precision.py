"""`nerfturbo bench precision`: the same training in fp32, fp16 and bf16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ..errors import InputError
from .bench import _config, _show, _table
from .bench_args import TrainingArgs
from .common import parse
from .measure import prepare, say_plan, written_when_cut_short
from .settings import Settings, check_positive, resolve_device, starting_config

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from ..bench.fine_samples import FineSearch, FineTrial
    from ..bench.memory import BatchTrial
    from ..bench.precision import PrecisionPlan, PrecisionResult, PrecisionRun
    from ..bench.record import Record
    from ..config import Config
    from ..data.scene import Scene
    from .progress import Display


@dataclass(frozen=True)
class PrecisionArgs(TrainingArgs):
    """Train a scene in fp32, fp16 and bf16: speed, memory, quality and stability, at one batch and at one budget."""

    steps: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Steps of every training; the preset's unless given."""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N")] = (0,)
    """One training each; medians count."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = ()
    """Only these of fp32, tf32, fp16 and bf16; all that the device has units for unless given."""
    memory_budget: Annotated[float | Literal["fp32", "none"], tyro.conf.arg(metavar="GB|fp32|none")] = "fp32"
    """Also train each precision with the largest batch that fits this much memory: what fp32 takes, or so many GB."""
    equal_time: Literal["seconds", "steps", "none"] = "seconds"
    """With a coarse and a fine pass (presets hierarchy, proposal): also spend the time that a precision saves on more
    fine samples per ray, and train for fp32's seconds, or for as many steps."""
    max_fine: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """At most so many fine samples per ray; eight times the config's unless given."""
    eval_views: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Score only this many test views, evenly spaced; all of them unless given."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("bench-precision.json")
    """Where the result is written, training by training; a page lies beside it, as .html, and plots, as -NAME.svg. A
    file of the same settings is gone on with."""
    fresh: bool = False
    """Measure everything again, also what the output holds already."""


def main(argv: Sequence[str]) -> int:
    """Train every precision, print the tables, write JSON, page and plots."""
    start = starting_config(argv)
    args = parse(PrecisionArgs, argv, "bench precision", default=PrecisionArgs(settings=Settings.of(start)))
    positive = {"--steps": args.steps, "--eval-views": args.eval_views}
    positive |= {} if isinstance(args.memory_budget, str) else {"--memory-budget": args.memory_budget}
    check_positive(positive | {"--downscale": args.downscale, "--max-fine": args.max_fine})
    if not args.seeds:
        raise InputError("--seeds", "at least one", "none")
    from ..evaluation.run_folder import check_result
    from .progress import showing

    check_result(args.output)
    device, config = resolve_device(args.device), _config(args.settings, start, args.scene, args.downscale)
    plan = _plan(args, config, device)
    with showing() as display:
        scenes, config = prepare(config, device, display, auto=start if args.preset == "auto" else None)
        plan = _plan(args, config, device)  # the scene may have two passes where the preset had one
        writer = _Writer(args, config, scenes, plan, device, display)
        writer.run()
    _show(_tables(writer.result, writer.title), args.output, as_json=args.json)
    return 0


def _plan(args: PrecisionArgs, config: Config, device: str) -> PrecisionPlan:
    import torch

    from ..bench.fine_samples import MOST_TIMES, has_two_passes
    from ..bench.precision import EqualTime, PrecisionPlan, kinds_for

    kinds = kinds_for(torch.device(device))
    for name in args.only:
        if name not in {kind.name for kind in kinds}:
            raise InputError("--only", "some of " + ", ".join(kind.name for kind in kinds), repr(name))
    chosen = tuple(kind for kind in kinds if not args.only or kind.name in args.only)
    gigabytes = args.memory_budget
    budget = int(gigabytes * 1e9) if not isinstance(gigabytes, str) else "fp32" if gigabytes == "fp32" else None
    fine, rule = config.sampling.n_samples, None
    if has_two_passes(config) and args.equal_time != "none":
        most = args.max_fine or MOST_TIMES * fine
        if most < fine:
            raise InputError("--max-fine", f"at least the {fine} fine samples of the config", str(most))
        rule = EqualTime(args.equal_time, most)
    elif args.max_fine is not None:
        found = "--equal-time none" if has_two_passes(config) else f"sampling.kind {config.sampling.kind}"
        raise InputError("--max-fine", "a coarse and a fine pass, compared at equal time", found, "leave it out")
    return PrecisionPlan(chosen, args.seeds, args.steps or config.train.steps, args.eval_views, budget, rule)


class _Writer:
    """Runs the comparison; whatever is measured is in the file at once."""

    def __init__(
        self,
        args: PrecisionArgs,
        config: Config,
        scenes: tuple[Scene, Scene],
        plan: PrecisionPlan,
        device: str,
        display: Display,
    ) -> None:
        from ..bench.precision import PrecisionResult

        self.args, self.config, self.scenes, self.plan = args, config, scenes, plan
        self.device, self.display, self.result = device, display, PrecisionResult()
        self.title = f"{scenes[1].name}, {config.preset}: precisions side by side, {plan.steps} steps"

    def record(self, *, finished: bool = False) -> Record:
        from ..bench.precision_record import precision_record

        options = {"device": self.device, "finished": finished}
        return precision_record(self.result, self.config, self.scenes[1], self.plan, **options)

    def trained(self, run: PrecisionRun, so_far: PrecisionResult) -> None:
        fine = "" if run.fine_samples is None else f", {run.fine_samples} fine samples"
        score = f"{run.steps} steps in {run.seconds:.1f} s, {run.psnr:.2f} dB, {run.skipped} skipped"
        self.display.note(f"{run.kind}, seed {run.seed}{fine}: {score}")
        self.keep(so_far)

    def searched(self, search: FineSearch, so_far: PrecisionResult) -> None:
        step = "-" if search.step_ms is None else f"{search.step_ms:.1f} ms"
        apart = f"coarse pass {search.passes.coarse:.1f}, fine pass {search.passes.fine:.1f}"
        self.display.note(f"{search.kind}: a step {step}, {apart}; {search.fine_samples} fine samples to train with")
        self.keep(so_far)

    def tried(self, kind: str, trial: FineTrial) -> None:
        times = trial.why if trial.ratio is None else f"{trial.ratio:.2f} times fp32's step"
        self.display.phase(f"{kind}, {trial.fine_samples} fine samples: {times}")

    def fitted(self, kind: str, trial: BatchTrial) -> None:
        took = "" if trial.n_bytes is None else f" ({trial.n_bytes / 1e6:.0f} MB)"
        self.display.phase(f"{kind}, {trial.batch_samples} samples a step: {trial.why or 'fits' + took}")

    def keep(self, so_far: PrecisionResult) -> None:
        from ..bench.continued import write_renders
        from ..bench.record import write_json

        self.result = so_far
        write_json(self.args.output, self.record())
        write_renders(self.args.output, so_far.images)

    def run(self) -> None:
        import torch

        from ..bench.continued import held_values, read_renders, renders_file
        from ..bench.precision import FP32, Reports, compare_precisions
        from ..bench.precision_record import SETTINGS, recorded_result
        from ..bench.record import write_json

        output, plan = self.args.output, self.plan
        held = None if self.args.fresh else held_values(output, self.record(), SETTINGS)
        if held is not None:
            self.result = recorded_result(held, read_renders(output))
        say_plan(self.display, output, self.result.n_runs, len(self.result.missing(plan)))
        if (
            plan.equal_time is not None
            and FP32 not in plan.kinds
            and self.result.run_of("same_batch", FP32.name) is None
        ):
            self.display.note("fp32 is not among --only: there is no time of it to train for")
        options = {"reports": Reports(self.trained, self.searched, self.tried, self.fitted), "held": self.result}
        with written_when_cut_short(self.display, output, lambda: self.result.n_runs):
            try:
                self.result = compare_precisions(
                    self.config, self.scenes, plan, device=torch.device(self.device), **options
                )
            finally:
                if self.result.same_batch:
                    _write_pages(self.result, output, self.title)
        write_json(output, self.record(finished=True))
        renders_file(output).unlink(missing_ok=True)


def _write_pages(result: PrecisionResult, output: Path, title: str) -> None:
    from ..bench.precision_page import plots, precision_page, time_plots
    from ..files import write_atomically

    write_atomically(output.with_suffix(".html"), precision_page(result, title))
    for name, text in (plots(result) | time_plots(result)).items():
        write_atomically(output.with_name(f"{output.stem}-{name}.svg"), text)


def _tables(result: PrecisionResult, title: str) -> Group:
    from rich.console import Group

    from ..bench.precision_record import in_words

    parts: list[Table | str] = [_batch_table(result.same_batch, title)]
    if result.same_memory:
        parts.append(_batch_table(result.same_memory, f"the largest batches of {(result.budget or 0) / 1e6:.0f} MB"))
    if result.searches:
        parts.append(_step_table(result))
    if result.same_time:
        parts.append(_time_table(result))
    return Group(*parts, *in_words(result))


def _batch_table(runs: Sequence[PrecisionRun], title: str) -> Table:
    from ..bench.precision_record import summarise
    from .progress import quantity

    table = _table(title, "", "batch", "samples/s", "x fp32", "MB", "x fp32", "dB", "more", "skipped")
    for line in summarise(runs):
        forms = {"samples_per_second_ratio": ".2f", "peak_bytes": ".0f", "peak_bytes_ratio": ".2f"}
        cells = _cells(line, forms | {"psnr": ".2f", "psnr_difference": "+.2f"})
        speed = quantity(line["samples_per_second"])
        table.add_row(line["kind"], str(line["batch_samples"]), speed, *cells, str(line["skipped"]))
    return table


def _step_table(result: PrecisionResult) -> Table:
    from ..bench.precision_page import step_lines

    headers = ("precision", "coarse pass", "fine pass", "rest", "step", "times fp32's", "fine")
    table = _table("milliseconds, and the fine samples per ray to train with", *headers)
    forms = dict.fromkeys(("coarse", "fine", "rest", "step_ms"), ".2f") | {"ratio": ".2f", "fine_samples": "d"}
    for line in step_lines(result):
        table.add_row(line["kind"], *_cells(line, forms))
    return table


def _time_table(result: PrecisionResult) -> Table:
    from ..bench.precision_record import summarise
    from .progress import quantity

    headers = ("precision", "fine", "rays/s", "samples/s", "MB", "dB", "dB more", "SSIM")
    table = _table("the time saved spent on fine samples", *headers)
    for line in summarise(result.same_time):
        speeds = [quantity(line[name]) for name in ("rays_per_second", "samples_per_second")]
        scores = _cells(line, {"peak_bytes": ".0f", "psnr": ".2f", "psnr_difference": "+.2f", "ssim": ".3f"})
        table.add_row(line["kind"], *_cells(line, {"fine_samples": "d"}), *speeds, *scores)
    return table


def _cells(line: dict[str, Any], forms: dict[str, str]) -> list[str]:
    """Values of a line as text; bytes in MB."""
    values = line | {"peak_bytes": None if line.get("peak_bytes") is None else line["peak_bytes"] / 1e6}
    return ["-" if values[name] is None else format(values[name], form) for name, form in forms.items()]
