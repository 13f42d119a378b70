"""Time every op on every backend of a device against the reference: first the gate, then the clock."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..errors import refuse
from ..ops._dispatch import Backend, available, use_backend
from .op_cases import CALLS, Inputs, OpCase, op_cases
from .plot import make_table
from .record import Record, machine

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
    cases = list(op_cases(device, seed=seed, quick=quick))
    known = sorted({case.op for case in cases})
    for op in ops or ():
        refuse(op not in known, "ops", "names among " + ", ".join(known), repr(op))
    chosen = [case for case in cases if not ops or case.op in ops]
    return [timing for case in chosen for timing in _run_case(case, device, quick)]


def backends(device: torch.device) -> list[Backend]:
    """The reference first, then what is fast on this device."""
    fast: dict[str, tuple[Backend, str]] = {"cpu": ("cpu", "numba"), "cuda": ("triton", "triton")}
    name, module = fast.get(device.type, ("reference", "torch"))
    return ["reference", name] if name != "reference" and available(module) else ["reference"]


def _run_case(case: OpCase, device: torch.device, quick: bool) -> list[OpTiming]:
    gates: dict[Backend, str] = {b: "passed" if b == "reference" else gate(case, b) for b in backends(device)}
    passed: list[Backend] = [name for name, found in gates.items() if found == "passed"]
    forward = _time({name: _runner(case, name, ()) for name in passed}, device, quick)
    total = forward
    if case.wanted:
        total = _time({name: _runner(case, name, case.wanted) for name in passed}, device, quick)
    results = []
    for name, found in gates.items():
        own = [times.get(name) for times in (forward, total)]
        ratios = [times["reference"] / times[name] if name in times else None for times in (forward, total)]
        results.append(OpTiming(case.op, case.size, name, *own, *ratios, gate=found))
    return results


def _runner(case: OpCase, backend: Backend, wanted: Sequence[str]) -> Callable[[], Any]:
    """A call of the op, with its backward where gradients are wanted; cotangents are drawn once."""
    leaves = {n: t.detach().clone().requires_grad_(n in wanted) for n, t in case.inputs.items()}
    cotangents: list[Tensor] = []

    def call() -> tuple[list[Tensor], Sequence[Tensor]]:
        with use_backend(backend), torch.set_grad_enabled(bool(wanted)):
            result = CALLS[case.op](Inputs(leaves))
            outputs = [result] if isinstance(result, Tensor) else list(result)
            if not wanted:
                return outputs, []
            roots = [out for out in outputs if out.requires_grad]
            if not cotangents:
                draw = torch.Generator().manual_seed(0)
                cotangents.extend(torch.randn(out.shape, generator=draw).to(out) for out in roots)
            return outputs, torch.autograd.grad(roots, [leaves[name] for name in wanted], cotangents)

    return call


def gate(case: OpCase, backend: Backend) -> str:
    """ "passed", or the first value or gradient that differs from the reference."""
    try:
        got, got_grads = _runner(case, backend, case.wanted)()
        want, want_grads = _runner(case, "reference", case.wanted)()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    pairs = [(f"result {i}", g, w) for i, (g, w) in enumerate(zip(got, want, strict=True))]
    pairs += [(f"gradient to {n}", g, w) for n, g, w in zip(case.wanted, got_grads, want_grads, strict=True)]
    for name, g, w in pairs:
        if g.shape != w.shape or g.dtype != w.dtype:
            return f"{name}: {tuple(g.shape)} {g.dtype}, expected {tuple(w.shape)} {w.dtype}"
        if w.numel() == 0:
            continue
        g, w = g.detach().double(), w.detach().double()
        # Written so that a NaN counts as wrong.
        wrong = ~((g - w).abs() <= case.tolerance * w.abs().max().clamp(min=1e-6))
        if wrong.double().mean().item() > case.outliers:
            return f"{name}: {int(wrong.sum())} of {w.numel()} values are off by up to {(g - w).abs().max().item():.3g}"
    return "passed"


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


def measure_ms(call: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Milliseconds of one call by CUDA events and by the wall clock; on a CPU both by the wall clock."""
    if device.type != "cuda":
        begun = time.perf_counter()
        call()
        milliseconds = (time.perf_counter() - begun) * 1e3
        return milliseconds, milliseconds
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last), (time.perf_counter() - begun) * 1e3


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
