"""Time the learned kernels on a GPU: hash encoding, networks, Adam, at the shapes of a training step.

    python benchmarks/kernels.py --out benchmarks/results/h200/kernels.json

Each kernel is first checked against the reference; what fails is not timed. Times are medians of CUDA-graph replays.
Positions are consecutive samples of rays; 226,000 of 2^18 rows are in use, as in a training step. Variants of tile
sizes stand beside the shipped ones (marked *), so that one run shows whether those are still the best.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from kernel_pieces import CAPACITY, DEVICE, GROUPS, LAYOUTS, USED, Inputs, Piece
from nerfturbo.ops import hash_encode, use_backend
from nerfturbo.ops.ngp import NgpDensity, NgpWeights, ngp_field
from nerfturbo.types import Aabb


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()


def gate(inputs: Inputs) -> dict[str, float]:
    """Relative errors against the reference, on a part of the rows."""
    n = min(1 << 14, CAPACITY)
    errors: dict[str, float] = {}
    count = torch.tensor(n - 100, dtype=torch.int32, device=DEVICE)
    positions = inputs.positions[:n]
    for name, layout in LAYOUTS.items():
        grads, outs = {}, {}
        grad = inputs.grad_encoding[:n]
        for backend in ("triton", "reference"):
            table = inputs.masters[name].clone().requires_grad_()
            with use_backend(backend):
                outs[backend] = hash_encode(positions, table, layout, n_used=count)
                outs[backend].backward(grad.float())
            grads[backend] = table.grad
        errors[f"hash forward {name}"] = relative(outs["triton"], outs["reference"])
        errors[f"hash backward {name}"] = relative(grads["triton"], grads["reference"])
        logits = {}
        for backend in ("triton", "reference"):
            with use_backend(backend):
                field = NgpDensity(Aabb.cube(1.0), inputs.halves[name], layout, inputs.weights[:2])
                logits[backend] = field.at(positions, logits=True)
        errors[f"density {name}"] = relative(logits["triton"], logits["reference"])
    results = {}
    for backend in ("triton", "reference"):
        leaves = [t.detach().clone().requires_grad_() for t in (inputs.encoding[:n], *inputs.weights)]
        with use_backend(backend):
            raw = ngp_field(leaves[0], inputs.directions, inputs.rays[:n], NgpWeights(*leaves[1:]), n_used=count)
            raw.backward(inputs.grad_raw[:n])
        results[backend] = [raw.detach(), *(leaf.grad for leaf in leaves)]
    for name, a, b in zip(("raw", "encoding", *NgpWeights._fields), *results.values(), strict=True):
        errors[f"field {name}"] = relative(a, b)
    return errors


def milliseconds(piece: Piece) -> float:
    with piece.in_force():
        for _ in range(2):
            piece.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(piece.repeats):
                piece.run()
    for _ in range(2):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(9)]
    for event in events:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / piece.repeats


def all_pieces(inputs: Inputs, only: str) -> list[Piece]:
    return [piece for group in GROUPS for piece in group(inputs) if only in piece.name]


def warm(share: int, shares: int, only: str) -> None:
    """Compile one share of the variants, so that several processes fill the cache together."""
    for piece in all_pieces(Inputs(), only)[share::shares]:
        try:
            with piece.in_force():
                piece.run()
        except Exception as error:  # the timing run reports it
            print(f"warm-up of {piece.name}: {str(error)[:120]}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--only", default="", help="time pieces whose name contains this")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, default=12, help="how many processes compile")
    options = parser.parse_args()
    if options.warm:
        share, shares = map(int, options.warm.split("/"))
        return warm(share, shares, options.only)
    start = time.time()
    command = [sys.executable, __file__, "--only", options.only, "--warm"]
    workers = [subprocess.Popen([*command, f"{k}/{options.processes}"]) for k in range(options.processes)]
    for worker in workers:
        worker.wait()
    print(f"compiled in {time.time() - start:.0f} s", flush=True)
    inputs = Inputs()
    errors = gate(inputs)
    for name, error in errors.items():
        print(f"{'ok ' if error < 0.05 else 'BAD'} {error:9.2e}  {name}", flush=True)
    times: dict[str, float] = {}
    for piece in all_pieces(inputs, options.only):
        try:
            times[piece.name] = milliseconds(piece)
        except Exception as error:
            print(f"FAILED {piece.name}: {str(error)[:300]}", flush=True)
    print(f"\n{'us':>9}  piece   (* as shipped; {torch.cuda.get_device_name()}, torch {torch.__version__})")
    for name, value in times.items():
        print(f"{value * 1e3:9.1f}  {name}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        values = {"errors": errors, "milliseconds": times}
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        protocol = {"capacity": CAPACITY, "used": USED, "seed": 0, "timing": "median of 8 CUDA graph replays"}
        record = {"what": "learned kernels", "command": " ".join(sys.argv), "machine": machine, "protocol": protocol}
        options.out.write_text(json.dumps(record | {"values": values}, indent=1))


if __name__ == "__main__":
    main()
