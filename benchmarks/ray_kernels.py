"""Time the ray kernels on a GPU: marching, pruning, compositing and loss, at the shapes of a training step.

    python benchmarks/ray_kernels.py --out benchmarks/results/h200/ray_kernels.json
    python benchmarks/ray_kernels.py --only march --profile         time per kernel inside each piece

Two kinds of step: 65,536 rays of which a visibility pass leaves about 3.5 samples each, and 8,192 rays of 28 samples.
Marching is checked against the reference first. Times are medians of CUDA-graph replays; variants of tile sizes stand
beside the shipped ones (marked *), so that one run shows whether those are still the best.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from kernel_pieces import Piece, variants
from kernels import milliseconds
from nerfturbo.ops import (
    OccupancyBits,
    StepRule,
    compact,
    composite,
    importance_sample,
    march,
    random_uniform,
    ray_aabb,
    spherical_harmonics,
    use_backend,
    visibility,
)
from nerfturbo.ops.composite_loss import composite_loss
from nerfturbo.ops.march import decay_and_max, pack_bits, threshold_bits
from nerfturbo.types import Aabb, PackedSamples

BOX, RESOLUTION = Aabb.cube(1.5), 128
RULE = StepRule(step_size=BOX.diagonal / 1024)
march_module = importlib.import_module("nerfturbo.ops.march.triton")
common = importlib.import_module("nerfturbo.ops._triton")
offsets_module = importlib.import_module("nerfturbo.ops.packed.triton")


def scene(n_rays: int) -> tuple[Tensor, Tensor, OccupancyBits, Tensor]:
    """Rays at a wavy shell that fills 6% of the cells: origins, directions, grid, jitter."""
    draw = torch.Generator().manual_seed(0)
    axis = (torch.arange(RESOLUTION) + 0.5) / RESOLUTION * 3.0 - 1.5
    x, y, z = torch.meshgrid(axis, axis, axis, indexing="ij")
    distance = ((x * x + y * y + z * z).sqrt() - 0.95 - 0.1 * torch.sin(5 * x) * torch.cos(4 * y)).abs().flatten()
    occupied = distance <= distance.kthvalue(int(0.06 * distance.numel())).values
    origins = 4.0 * torch.nn.functional.normalize(torch.randn(n_rays, 3, generator=draw), dim=-1)
    aim = (torch.rand(n_rays, 3, generator=draw) * 2.0 - 1.0) * 1.3
    directions = torch.nn.functional.normalize(aim - origins, dim=-1)
    grid = OccupancyBits(pack_bits(occupied).cuda(), BOX, RESOLUTION)
    return origins.cuda(), directions.cuda(), grid, torch.rand(n_rays, generator=draw).cuda()


def marching(n_rays: int, capacity: int) -> Iterator[Piece]:
    origins, directions, grid, jitter = scene(n_rays)
    active = torch.tensor(n_rays, dtype=torch.int32, device="cuda")

    def run() -> PackedSamples:
        return march(origins, directions, grid, RULE, jitter=jitter, capacity=capacity, n_active=active)

    name = f"march {n_rays:,} rays, {int(run().offsets[-1]):,} samples"
    options = [{"STEPS": s, "SKIP_EMPTY": k} for s in (32, 64, 128) for k in (True, False)]
    yield from variants(name, run, march_module, options)
    yield from variants(name, run, common, [{"PROGRAMS": p} for p in (16, 24, 48, 64, 10_000)])[1:]


def pruning() -> Iterator[Piece]:
    origins, directions, grid, jitter = scene(65536)
    samples = march(origins, directions, grid, RULE, jitter=jitter, capacity=1 << 21)
    density = torch.rand(1 << 21, device="cuda") ** 4 * 600.0
    keep = visibility(density, samples, early_stop_eps=1e-4)
    sums = torch.randint(0, 30, (2, 1 << 16), dtype=torch.int32, device="cuda")
    left = int((keep & samples.used).sum())
    tiles = [{"MANY": tile} for tile in ((1, 32), (2, 32), (2, 16), (4, 8))]
    name = f"65,536 rays, {int(samples.offsets[-1]):,} samples"
    yield from variants(f"visibility {name}", lambda: visibility(density, samples, early_stop_eps=1e-4), common, tiles)
    yield from variants(f"compact to {left:,}, {name}", lambda: compact(samples, keep, capacity=1 << 18), common, tiles)
    yield Piece("fit offsets, 65,536 rays *", lambda: offsets_module.fit_offsets(sums[0], sums[1, : 1 << 14], 1 << 21))
    yield Piece(
        "fit offsets, 65,536 rays, overflow *", lambda: offsets_module.fit_offsets(sums[0], sums[1, : 1 << 14], 1 << 18)
    )


def packed(n_rays: int, per_ray: float) -> PackedSamples:
    """Lengths as after pruning, with many short rays, in 2^18 places."""
    draw = torch.Generator().manual_seed(1)
    counts = torch.empty(n_rays).exponential_(1.0 / per_ray, generator=draw).long()
    n = int(counts.sum())
    assert n <= 1 << 18
    t = 2.0 + torch.rand(n, generator=draw)
    used = PackedSamples.from_counts(counts, t, t + 0.005)
    pad = torch.zeros((1 << 18) - n)
    parts = (used.t_starts, pad), (used.t_ends, pad), (used.ray_indices, pad.int())
    return PackedSamples(*(torch.cat(p).cuda() for p in parts), used.offsets.cuda(), torch.tensor(n_rays).int().cuda())


def compositing(n_rays: int, per_ray: float) -> Iterator[Piece]:
    samples, n = packed(n_rays, per_ray), 1 << 18
    density = (torch.rand(n, device="cuda") ** 4 * 600.0).requires_grad_()
    rgb = torch.rand(3, n, device="cuda").t().requires_grad_()
    raw = torch.randn(4, n, device="cuda").t().requires_grad_()
    background, target = torch.rand(n_rays, 3, device="cuda"), torch.rand(n_rays, 4, device="cuda")
    scale = torch.tensor(128.0, device="cuda")

    def both() -> object:
        out = composite(density, rgb, samples, early_stop_eps=1e-4)
        return torch.autograd.grad((out.rgb, out.opacity), (density, rgb), (background, background[:, 0]))

    def loss() -> object:
        out = composite_loss(raw, samples, background, target, gradient_scale=scale)
        return torch.autograd.grad(out.loss, raw, scale)

    name = f"{n_rays:,} rays, {int(samples.offsets[-1]):,} samples"
    tiles = [{"FEW": tile, "MANY": tile} for tile in ((1, 32), (2, 16), (4, 8), (8, 4), (8, 8), (2, 32), (16, 2))]
    forward = torch.no_grad()(lambda: composite(density, rgb, samples, early_stop_eps=1e-4))
    yield from variants(f"composite forward, {name}", forward, common, tiles)
    yield from variants(f"composite forward and backward, {name}", both, common, tiles)
    yield from variants(f"composite_loss forward and backward, {name}", loss, common, tiles)
    yield from variants(
        f"composite_loss forward and backward, {name}", loss, common, [{"PROGRAMS": 16}, {"PROGRAMS": 10_000}]
    )[1:]


def small() -> Iterator[Piece]:
    origins, directions, _, _ = scene(65536)
    edges, weights = torch.rand(8192, 97, device="cuda").cumsum(-1), torch.rand(8192, 96, device="cuda")
    density = torch.rand(RESOLUTION**3, device="cuda")
    cells, fresh = torch.randint(0, RESOLUTION**3, (1 << 20,), device="cuda"), torch.rand(1 << 20, device="cuda")
    bits = torch.zeros(RESOLUTION**3 // 32, dtype=torch.int32, device="cuda")
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    yield Piece(
        "random 65,536 x 3 *", lambda: random_uniform(65536, columns=3, seed=0, stream=0, step=step, device="cuda")
    )
    yield Piece("aabb 65,536 *", lambda: ray_aabb(origins, directions, BOX))
    yield Piece("spherical harmonics 65,536, degree 4 *", lambda: spherical_harmonics(directions, 4))
    yield Piece("importance 8,192 rays, 96 bins to 48 *", lambda: importance_sample(edges, weights, 48))
    yield Piece("decay_and_max, 2^20 of 128^3 cells *", lambda: decay_and_max(density, cells, fresh, 0.95))
    yield Piece("threshold_bits, 128^3 cells *", lambda: threshold_bits(density, bits, 0.01))


def gate() -> str:
    """What share of marched samples the reference does not have, or lacks."""
    origins, directions, grid, jitter = scene(8192)
    found = []
    for backend in ("triton", "reference"):
        with use_backend(backend):
            samples = march(origins, directions, grid, RULE, jitter=jitter)
        found.append(samples.ray_indices.long() * (1 << 20) + (samples.t_starts / RULE.step_size).round().long())
    differing = int((~torch.isin(*found)).sum() + (~torch.isin(*found[::-1])).sum())
    assert differing <= 2 + found[1].numel() // 500, f"{differing} of {found[1].numel()} samples differ"
    return f"{differing} of {found[1].numel()} marched samples differ from the reference's"


def profile(run: Callable[[], object]) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(10):
            run()
        torch.cuda.synchronize()
    rows = [(e.device_time_total / 10, e.count // 10, e.key) for e in trace.key_averages()]
    return "\n".join(f"{t:18.1f} us x{c}  {key[:60]}" for t, c, key in sorted(rows, reverse=True)[:8])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--only", default="", help="time pieces whose name contains this")
    parser.add_argument("--shipped", action="store_true", help="leave the variants out")
    parser.add_argument("--profile", action="store_true", help="list the kernels of the shipped pieces")
    options = parser.parse_args()
    print(gate(), flush=True)
    groups = (
        marching(65536, 1 << 21),
        marching(8192, 1 << 18),
        pruning(),
        compositing(65536, 3.5),
        compositing(8192, 28.0),
        small(),
    )
    times: dict[str, float] = {}
    print(f"{'us':>9}  piece   (* as shipped; {torch.cuda.get_device_name()}, torch {torch.__version__})")
    for piece in (piece for group in groups for piece in group):
        if options.only not in piece.name or (options.shipped and not piece.name.endswith("*")):
            continue
        try:
            times[piece.name] = milliseconds(piece)
            print(f"{times[piece.name] * 1e3:9.1f}  {piece.name}", flush=True)
        except Exception as error:
            print(f"FAILED {piece.name}: {str(error)[:300]}", flush=True)
        if options.profile and piece.name.endswith("*"):
            print(profile(piece.run), flush=True)
    if options.out:
        machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        protocol = {"seed": 0, "timing": "median of 8 CUDA graph replays of 10 runs"}
        record = {"what": "ray kernels", "command": " ".join(sys.argv), "machine": machine, "protocol": protocol}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record | {"values": {"milliseconds": times}}, indent=1))


if __name__ == "__main__":
    main()
