"""Time every op on every backend of a device against the reference: first the gate, then the clock.

python benchmarks/ops.py --output ops.json
python benchmarks/ops.py --ops hash_encode march --quick
"""

from __future__ import annotations

from charts import Bars, bar_chart
from common import run_study

# isort: split
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.table import Table
from tyro.conf import arg

from nerfturbo.bench.gate import OpCase, backends, gate, measure_ms, runner
from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.cli.bench import Json, Output, show_result
from nerfturbo.cli.flags import Device, parse
from nerfturbo.cli.progress import make_table
from nerfturbo.cli.settings import resolve_device
from nerfturbo.errors import refuse
from nerfturbo.evaluation.run_folder import check_result
from nerfturbo.ops._dispatch import Backend
from op_cases import op_cases

PROTOCOL = (
    "gate: values and every gradient against the reference on the same random inputs; then {warmup} warm-up calls and "
    "the median of {repeats} calls each, backends taking turns, compilation outside the time; forward and backward "
    "from the op's inputs to their gradients"
)
BUDGET = {False: (20, 2.0), True: (5, 0.3)}  # quick: most repeats, seconds after which no further repeat begins
WARMUP = 2


@dataclass(frozen=True)
class OpTiming:
    """One op at one size on one backend. Times are None where the gate failed."""

    op: str
    size: str
    backend: str
    forward_ms: float | None
    total_ms: float | None  # forward and backward; equal to forward_ms where nothing is differentiable
    forward_ratio: float | None  # reference's time / this backend's time
    total_ratio: float | None
    gate: str  # "passed", or what was wrong


def run_ops_benchmark(
    device: torch.device | str = "cpu", ops: Sequence[str] | None = None, *, quick: bool = False, seed: int = 0
) -> list[OpTiming]:
    """Gate and time the ops (None: all) on each backend that runs on the device, the reference included."""
    device = torch.device(device)
    cases = list(op_cases(seed=seed, quick=quick))
    known = sorted({case.op for case in cases})
    for op in ops or ():
        refuse(op not in known, "ops", "names among " + ", ".join(known), repr(op))
    chosen = [case for case in cases if not ops or case.op in ops]
    return [timing for case in chosen for timing in _run_case(case, device, quick)]


def _run_case(case: OpCase, device: torch.device, quick: bool) -> list[OpTiming]:
    gates: dict[Backend, str] = {b: "passed" if b == "reference" else gate(case, b, device) for b in backends(device)}
    passed: list[Backend] = [name for name, found in gates.items() if found == "passed"]
    forward = _time({name: runner(case, name, device, ()) for name in passed}, device, quick)
    total = forward
    if case.wanted:
        total = _time({name: runner(case, name, device, case.wanted) for name in passed}, device, quick)
    results = []
    for name, found in gates.items():
        own = [times.get(name) for times in (forward, total)]
        ratios = [times["reference"] / times[name] if name in times else None for times in (forward, total)]
        results.append(OpTiming(case.op, case.size, name, *own, *ratios, gate=found))
    return results


def _time(calls: dict[Backend, Callable[[], Any]], device: torch.device, quick: bool) -> dict[Backend, float]:
    """Median milliseconds of each call; the calls take turns, so that a busy moment hits all of them."""
    most, seconds = BUDGET[quick]
    for call in calls.values():
        for _ in range(WARMUP):
            call()
    times: dict[Backend, list[float]] = {name: [] for name in calls}
    begun = time.perf_counter()
    while len(next(iter(times.values()))) < most:
        for name, call in calls.items():
            times[name].append(measure_ms(call, device)[0])
        if time.perf_counter() - begun > seconds and len(times["reference"]) >= 3:
            break
    return {name: statistics.median(values) for name, values in times.items()}


def render_table(timings: Sequence[OpTiming]) -> Table:
    """One row per op, size and backend, with the ratio to the reference."""
    headers = ("op", "size", "backend", "forward", "", "forward + backward", "")
    table = make_table("ops: milliseconds, and how many times faster than the reference", *headers, left=3)
    for t in timings:
        if t.gate != "passed":
            table.add_row(t.op, t.size, t.backend, f"[red]wrong, not timed: {t.gate}[/red]")
            continue
        own, both = t.backend != "reference", t.total_ms != t.forward_ms
        row = ["" if own else t.op, "" if own else t.size, t.backend, f"{t.forward_ms:.3f}"]
        row += [f"{t.forward_ratio:.1f}x" if own else "", f"{t.total_ms:.3f}" if both else ""]
        table.add_row(*row, f"{t.total_ratio:.1f}x" if own and both else "", end_section=own)
    return table


def ops_record(timings: Sequence[OpTiming], *, device: torch.device | str, seed: int) -> Record:
    """The timings as a benchmark file."""
    protocol = PROTOCOL.format(warmup=WARMUP, repeats=f"at most {BUDGET[False][0]}")
    values = [asdict(timing) for timing in timings]
    return Record("every op against its reference", protocol, seed, values, machine=machine(device))


@dataclass(frozen=True)
class OpsArgs:
    """Time every operation on the fast backend of a device against the reference."""

    ops: Annotated[tuple[str, ...], arg(metavar="NAME")] = ()  # Only these operations; all of them unless given.
    device: Device = "auto"
    quick: bool = False  # Fewer repeats and smaller sizes.
    seed: int = 0  # Of the random inputs.
    output: Output = Path("bench-ops.json")
    json: Json = False


def main(argv: Sequence[str]) -> int:
    args = parse(OpsArgs, argv, "python benchmarks/ops.py")
    check_result(args.output)
    device = resolve_device(args.device)
    timings = run_ops_benchmark(device, args.ops or None, quick=args.quick, seed=args.seed)
    write_json(args.output, ops_record(timings, device=device, seed=args.seed))
    fast = [timing for timing in timings if timing.backend != "reference"]
    panel = Bars("times faster than the reference, gradients included", [timing.total_ratio for timing in fast])
    plot = bar_chart("operations", [timing.op for timing in fast], [panel])
    args.output.with_suffix(".svg").write_text(plot, encoding="utf-8")
    show_result(render_table(timings), args.output, as_json=args.json)
    return 0 if all(timing.gate == "passed" for timing in timings) else 1


if __name__ == "__main__":
    sys.exit(run_study(main))
