"""The same training in fp32, TF32, fp16 and bf16: speed, memory, quality and stability, at one batch and at one budget.

    python benchmarks/precision.py DATA --preset vanilla --steps 10000 --seeds 0 1 2
    python benchmarks/precision.py DATA --presets ngp vanilla --seeds 0 1 2 --output precision.json

With `--presets` (or `--presets all`) every preset has a file of its own, OUTPUT_PRESET.json, and the output says which
bars hold: mixed within 0.1 dB of fp32; for the original NeRF fp16 at least 3 times the samples/s of IEEE fp32 and 1.5
times those of TF32, in at most 60% of the memory. When it is cut short, what was measured stays, and the same command
goes on with the rest.
"""

from __future__ import annotations

from common import held_values, parse_study, run_study, say_plan, written_when_cut_short

# isort: split
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Group
from rich.table import Table

from fine_samples import MOST_TIMES, FineSearch, FineTrial, has_two_passes
from nerfturbo.bench.record import Record, write_json
from nerfturbo.bench.tune import BatchTrial
from nerfturbo.cli.bench import TrainingArgs, prepare, show_result
from nerfturbo.cli.flags import check_positive
from nerfturbo.cli.progress import Display, make_table, quantity, showing
from nerfturbo.cli.settings import resolve_device
from nerfturbo.config import Config
from nerfturbo.data.scene import Scene
from nerfturbo.errors import InputError
from nerfturbo.evaluation.run_folder import check_result
from nerfturbo.files import write_atomically
from nerfturbo.presets import preset_names
from precision_page import plots, precision_page, read_renders, renders_file, step_lines, time_plots, write_renders
from precision_runs import (
    FP32,
    SETTINGS,
    EqualTime,
    PrecisionPlan,
    PrecisionResult,
    PrecisionRun,
    Reports,
    compare_precisions,
    in_words,
    kinds_for,
    precision_record,
    recorded_result,
    summarise,
)


@dataclass(frozen=True)
class PrecisionArgs(TrainingArgs):
    """Train a scene in fp32, fp16 and bf16: speed, memory, quality and stability, at one batch and at one budget."""

    presets: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = ()
    """Instead of one preset: each of these, or all, into files of their own; the output says which bars hold."""
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
    """Compare the precisions of one preset, or of several."""
    args, start = parse_study(PrecisionArgs, argv, "precision")
    return compare_presets(args, argv) if args.presets else compare_one(args, start)


def compare_one(args: PrecisionArgs, start: Config) -> int:
    """Train every precision, print the tables, write JSON, page and plots."""
    positive = {"--steps": args.steps, "--eval-views": args.eval_views}
    positive |= {} if isinstance(args.memory_budget, str) else {"--memory-budget": args.memory_budget}
    check_positive(positive | {"--downscale": args.downscale, "--max-fine": args.max_fine})
    if not args.seeds:
        raise InputError("--seeds", "at least one", "none")
    check_result(args.output)
    device = resolve_device(args.device)
    make_plan(args, args.config(start), device)  # what is wrong with it is said before the scene is opened
    with showing() as display:
        scenes, config = prepare(args, start, device, display)
        plan = make_plan(args, config, device)  # the scene may have two passes where the preset had one
        study = Study(args, config, scenes, plan, device, display)
        study.run()
    show_result(tables(study.result, study.title), args.output, as_json=args.json)
    return 0


def compare_presets(args: PrecisionArgs, argv: Sequence[str]) -> int:
    """One preset after the other; the output says which bars hold, also when the last one was cut short."""
    check_result(args.output)
    names = preset_names() if args.presets == ("all",) else args.presets
    paths = {name: args.output.with_name(f"{args.output.stem}_{name}.json") for name in names}
    words = {name: [*argv, "--preset", name, "--output", str(path)] for name, path in paths.items()}
    asked = {name: parse_study(PrecisionArgs, own, "precision") for name, own in words.items()}
    result: dict[str, dict[str, Any]] = {}
    for name, path in paths.items():
        try:
            compare_one(*asked[name])
        finally:
            if path.is_file():
                record = json.loads(path.read_text())
                lines = {line["kind"]: line for line in record["values"]["same_batch"]}
                result[name] = {"bars": bars(name, lines), "file": path.name, "machine": record["machine"]}
                result[name]["unfinished"] = record["values"]["unfinished"]
                write_json(args.output, result)
        for bar, holds in result[name]["bars"].items():
            print(f"{name}: {bar}: {'not measured' if holds is None else 'yes' if holds else 'NO'}", flush=True)
    return 0


def bars(preset: str, lines: dict[str, dict[str, Any]]) -> dict[str, bool | None]:
    """Whether each bar holds; None where there is nothing to compare."""

    def ratio(name: str, other: str) -> float | None:
        values = [lines.get(kind, {}).get(name) for kind in ("fp16", other)]
        return None if None in values else values[0] / max(values[1], 1e-9)

    differences = {kind: lines[kind]["psnr_difference"] for kind in ("fp16", "bf16") if kind in lines}
    found: dict[str, bool | None] = {
        f"{kind} within 0.1 dB of fp32": None if d is None else abs(d) <= 0.1 for kind, d in differences.items()
    }
    if preset == "vanilla":
        ieee, tf32 = (ratio("samples_per_second", kind) for kind in ("fp32", "tf32"))
        memory = ratio("peak_bytes", "fp32")
        found["fp16 at least 3 times IEEE fp32"] = None if ieee is None else ieee >= 3.0
        found["fp16 at least 1.5 times TF32"] = None if tf32 is None else tf32 >= 1.5
        found["fp16 in at most 60% of the memory"] = None if memory is None else memory <= 0.6
    return found


def make_plan(args: PrecisionArgs, config: Config, device: str) -> PrecisionPlan:
    kinds = kinds_for(torch.device(device))
    for name in args.only:
        if name not in {kind.name for kind in kinds}:
            raise InputError("--only", "some of " + ", ".join(kind.name for kind in kinds), repr(name))
    chosen = tuple(kind for kind in kinds if not args.only or kind.name in args.only)
    gigabytes = args.memory_budget
    budget = int(gigabytes * 1e9) if not isinstance(gigabytes, str) else "fp32" if gigabytes == "fp32" else None
    rule = None
    if has_two_passes(config) and args.equal_time != "none":
        fine = config.sampler.n_samples
        most = args.max_fine or MOST_TIMES * fine
        if most < fine:
            raise InputError("--max-fine", f"at least the {fine} fine samples of the config", str(most))
        rule = EqualTime(args.equal_time, most)
    elif args.max_fine is not None:
        found = "--equal-time none" if has_two_passes(config) else f"--sampler {config.sampler.kind}"
        raise InputError("--max-fine", "a coarse and a fine pass, compared at equal time", found, "leave it out")
    return PrecisionPlan(chosen, args.seeds, args.steps or config.train.steps, args.eval_views, budget, rule)


class Study:
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
        self.args, self.config, self.scenes, self.plan = args, config, scenes, plan
        self.device, self.display, self.result = device, display, PrecisionResult()
        self.title = f"{scenes[1].name}, {config.preset}: precisions side by side, {plan.steps} steps"

    def record(self, *, finished: bool = False) -> Record:
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
        self.result = so_far
        write_json(self.args.output, self.record())
        write_renders(self.args.output, so_far.images)

    def run(self) -> None:
        output, plan = self.args.output, self.plan
        held = None if self.args.fresh else held_values(output, self.record(), SETTINGS)
        if held is not None:
            self.result = recorded_result(held, read_renders(output))
        say_plan(self.display, output, self.result.n_runs, len(self.result.missing(plan)))
        without_fp32 = FP32 not in plan.kinds and self.result.run_of("same_batch", FP32.name) is None
        if plan.equal_time is not None and without_fp32:
            self.display.note("fp32 is not among --only: there is no time of it to train for")
        options = {"reports": Reports(self.trained, self.searched, self.tried, self.fitted), "held": self.result}
        with written_when_cut_short(self.display, output, lambda: self.result.n_runs):
            try:
                device = torch.device(self.device)
                self.result = compare_precisions(self.config, self.scenes, plan, device=device, **options)
            finally:
                if self.result.same_batch:
                    write_pages(self.result, output, self.title)
        write_json(output, self.record(finished=True))
        renders_file(output).unlink(missing_ok=True)


def write_pages(result: PrecisionResult, output: Path, title: str) -> None:
    write_atomically(output.with_suffix(".html"), precision_page(result, title))
    for name, text in (plots(result) | time_plots(result)).items():
        write_atomically(output.with_name(f"{output.stem}-{name}.svg"), text)


def tables(result: PrecisionResult, title: str) -> Group:
    parts: list[Table | str] = [batch_table(result.same_batch, title)]
    if result.same_memory:
        parts.append(batch_table(result.same_memory, f"the largest batches of {(result.budget or 0) / 1e6:.0f} MB"))
    if result.searches:
        parts.append(step_table(result))
    if result.same_time:
        parts.append(time_table(result))
    return Group(*parts, *in_words(result))


def batch_table(runs: Sequence[PrecisionRun], title: str) -> Table:
    table = make_table(title, "", "batch", "samples/s", "x fp32", "MB", "x fp32", "dB", "more", "skipped")
    for line in summarise(runs):
        forms = {"samples_per_second_ratio": ".2f", "peak_bytes": ".0f", "peak_bytes_ratio": ".2f"}
        cells = _cells(line, forms | {"psnr": ".2f", "psnr_difference": "+.2f"})
        speed = quantity(line["samples_per_second"])
        table.add_row(line["kind"], str(line["batch_samples"]), speed, *cells, str(line["skipped"]))
    return table


def step_table(result: PrecisionResult) -> Table:
    headers = ("precision", "coarse pass", "fine pass", "rest", "step", "times fp32's", "fine")
    table = make_table("milliseconds, and the fine samples per ray to train with", *headers)
    forms = dict.fromkeys(("coarse", "fine", "rest", "step_ms"), ".2f") | {"ratio": ".2f", "fine_samples": "d"}
    for line in step_lines(result):
        table.add_row(line["kind"], *_cells(line, forms))
    return table


def time_table(result: PrecisionResult) -> Table:
    headers = ("precision", "fine", "rays/s", "samples/s", "MB", "dB", "dB more", "SSIM")
    table = make_table("the time saved spent on fine samples", *headers)
    for line in summarise(result.same_time):
        speeds = [quantity(line[name]) for name in ("rays_per_second", "samples_per_second")]
        scores = _cells(line, {"peak_bytes": ".0f", "psnr": ".2f", "psnr_difference": "+.2f", "ssim": ".3f"})
        table.add_row(line["kind"], *_cells(line, {"fine_samples": "d"}), *speeds, *scores)
    return table


def _cells(line: dict[str, Any], forms: dict[str, str]) -> list[str]:
    """Values of a line as text; bytes in MB."""
    values = line | {"peak_bytes": None if line.get("peak_bytes") is None else line["peak_bytes"] / 1e6}
    return ["-" if values[name] is None else format(values[name], form) for name, form in forms.items()]


if __name__ == "__main__":
    sys.exit(run_study(main))
