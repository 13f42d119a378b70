"""Time the visibility pass: density of every marched sample, then the test; and both in one walk along the rays.

    python benchmarks/visibility.py                 on a GPU: CUDA-graph replays, variants of the tile
    python benchmarks/visibility.py --device cpu    on a CPU, at the shapes of a step there

The scene is a sphere with an opaque surface in a shell of occupied cells, as a trained grid looks: 3.5% of the cells,
half of the rays empty. The walk is checked against the composition first; what fails is not timed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from nerfturbo.ops import HashLayout, OccupancyBits, StepRule, march, visibility  # noqa: E402
from nerfturbo.ops.march import pack_bits  # noqa: E402
from nerfturbo.ops.ngp import NgpDensity  # noqa: E402
from nerfturbo.ops.positions import sample_positions  # noqa: E402
from nerfturbo.types import Aabb, PackedSamples  # noqa: E402

BOX = Aabb.cube(1.5)
RADIUS, SHELL = 0.31, 0.0145  # of the sphere and half of the shell's thickness, in box units
EPS = 1e-4
GPU_LAYOUTS = {"16x2": HashLayout(16, 2), "8x4": HashLayout(8, 4)}
CPU_LAYOUTS = {"8x4": HashLayout(8, 4, log2_entries=15, max_resolution=512)}
NAMES = ("SLOTS", "STEPS", "VISIBILITY_WARPS", "VISIBILITY_PROGRAMS", "LONG")  # programs are per multiprocessor
TILES = [
    (4, 8, 4, 5, 48), (4, 8, 4, 8, 48), (4, 8, 4, 4, 1), (4, 8, 4, 4, 24), (4, 8, 4, 4, 96), (8, 4, 4, 4, 48),
    (2, 16, 4, 4, 48), (16, 2, 4, 4, 48), (8, 8, 4, 4, 48), (8, 8, 8, 2, 48), (16, 4, 8, 2, 48), (4, 8, 2, 7, 48),
    (4, 8, 8, 3, 48), (2, 8, 2, 7, 48),
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    origins: Tensor
    directions: Tensor
    samples: PackedSamples
    field: NgpDensity

    def walk(self) -> Tensor:
        return self.field.visibility(self.origins, self.directions, self.samples, early_stop_eps=EPS)

    def density(self) -> Tensor:
        positions = sample_positions(self.origins, self.directions, self.samples, aabb=BOX)
        return self.field.at(positions, n_used=self.samples.n_samples)

    def composition(self) -> Tensor:
        return visibility(self.density(), self.samples, early_stop_eps=EPS)


def make_rays(n_rays: int) -> tuple[Tensor, Tensor]:
    """From a sphere of cameras towards points around the middle."""
    draw = torch.Generator().manual_seed(0)
    origins = torch.nn.functional.normalize(torch.randn(n_rays, 3, generator=draw), dim=-1) * 4.0
    aim = torch.randn(n_rays, 3, generator=draw) * 0.88
    return origins, torch.nn.functional.normalize(aim - origins, dim=-1)


def make_grid(resolution: int, device: str) -> OccupancyBits:
    axis = (torch.arange(resolution) + 0.5) / resolution - 0.5
    x, y, z = torch.meshgrid(axis, axis, axis, indexing="ij")
    occupied = ((x * x + y * y + z * z).sqrt() - RADIUS).abs() < max(SHELL, 0.5 / resolution)
    return OccupancyBits(pack_bits(occupied.flatten()).to(device), BOX, resolution)


def make_field(layout: HashLayout, width: int, device: str, *, opaque: bool = True) -> NgpDensity:
    """density = exp(9 - k |distance to the sphere|): the distance stands in the finest level that is not hashed."""
    draw = torch.Generator().manual_seed(1)
    table = torch.randn(layout.n_entries, layout.n_features, generator=draw) * 0.1
    index = max(i for i, level in enumerate(layout.levels) if not level.hashed)
    level, column = layout.levels[index], index * layout.n_features
    axis = (torch.arange(level.nodes) - 0.5) / level.scale - 0.5
    z, y, x = torch.meshgrid(axis, axis, axis, indexing="ij")
    distance = (x * x + y * y + z * z).sqrt().flatten() - RADIUS
    rows = slice(level.offset, level.offset + distance.shape[0])
    table[rows, 0], table[rows, 1] = distance * 8.0, 1.0
    density_in = torch.randn(width, layout.n_outputs, generator=draw) * 0.1
    density_out = torch.randn(16, width, generator=draw) * 0.1
    density_in[:3] = 0.0
    density_in[0, column], density_in[1, column], density_in[2, column + 1] = 1.0, -1.0, 1.0
    slope = 8.0 / SHELL / 8.0 if opaque else 0.0
    density_out[0, :3] = torch.tensor([-slope, -slope, 9.0 if opaque else -3.0])
    dtype = torch.float32 if device == "cpu" else torch.float16
    return NgpDensity(BOX, table.to(device, dtype), layout, (density_in.to(device), density_out.to(device)))


def make_cases(device: str) -> list[Case]:
    cpu = device == "cpu"
    n_rays, resolution, width, steps = (4096, 64, 32, 512) if cpu else (53_248, 128, 64, 1024)
    origins, directions = (value.to(device) for value in make_rays(n_rays))
    rule = StepRule(BOX.diagonal / steps)
    capacity = None if cpu else 1 << 21
    samples = march(origins, directions, make_grid(resolution, device), rule, capacity=capacity)
    layouts = CPU_LAYOUTS if cpu else GPU_LAYOUTS
    cases = [Case(name, origins, directions, samples, make_field(lt, width, device)) for name, lt in layouts.items()]
    name, layout = list(layouts.items())[-1]
    clear = make_field(layout, width, device, opaque=False)
    return [*cases, Case(f"{name}, nothing opaque", origins, directions, samples, clear)]


def describe(case: Case) -> None:
    counts = case.samples.packed_info[:, 1]
    n, kept = int(case.samples.n_samples), int(case.composition().sum())
    print(
        f"{case.name}: {counts.shape[0]} rays, {float((counts == 0).float().mean()):.0%} empty, {n} samples "
        f"({n / counts.shape[0]:.1f} a ray, at most {int(counts.max())}), {kept} visible", flush=True,
    )  # fmt: skip


def gate(case: Case) -> bool:
    """Flags may differ from the composition's only where a ray's last light is decided by rounding."""
    got, want = case.walk(), case.composition()
    differ, kept = int((got != want).sum()), int(want.sum())
    good = differ <= 5e-3 * kept and not bool(got[int(case.samples.n_samples) :].any())
    print(f"{'ok ' if good else 'BAD'} {case.name}: {differ} flags of {kept} visible differ", flush=True)
    return good


def on_gpu(run: Callable[[], object], repeats: int = 5) -> float:
    """Milliseconds: median of graph replays."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    for _ in range(2):
        graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(9)]
    for event in events:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)) / repeats


def on_cpu(run: Callable[[], object]) -> float:
    times = []
    for _ in range(12):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


@contextmanager
def tile(setting: tuple[int, ...]) -> Iterator[None]:
    from nerfturbo.ops.ngp import triton as kernels

    before = [getattr(kernels, name) for name in NAMES]
    for name, value in zip(NAMES, setting, strict=True):
        setattr(kernels, name, value)
    try:
        yield
    finally:
        for name, value in zip(NAMES, before, strict=True):
            setattr(kernels, name, value)


def warm(share: int, shares: int) -> None:
    """Compile one share of the variants, so that several processes fill the cache together."""
    jobs = list(itertools.product(make_cases("cuda")[:2], TILES))
    for case, setting in jobs[share::shares]:
        try:
            with tile(setting):
                case.walk()
        except Exception as error:  # the timing run reports it
            print(f"warm-up of {setting}: {str(error)[:120]}", file=sys.stderr)


def time_gpu(cases: list[Case]) -> list[tuple[float, str]]:
    rows = []
    for case in cases:
        rows.append((on_gpu(case.composition), f"{case.name}: composition"))
        density, shipped = case.density(), case.walk()
        rows.append(
            (on_gpu(lambda d=density, c=case: visibility(d, c.samples, early_stop_eps=EPS)), "  its test alone")
        )
        rows.append((on_gpu(case.walk), f"{case.name}: walk as shipped"))
        for setting in TILES:
            label = " ".join(f"{name.lower()} {value}" for name, value in zip(NAMES, setting, strict=True))
            try:
                with tile(setting):
                    same = torch.equal(case.walk(), shipped)
                    rows.append((on_gpu(case.walk), f"  {label}{'' if same else '  DIFFERS'}"))
            except Exception as error:
                print(f"FAILED {label}: {str(error)[:200]}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--processes", type=int, default=12, help="how many processes compile")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.warm:
        share, shares = map(int, options.warm.split("/"))
        return warm(share, shares)
    if options.device == "cuda":
        command = [sys.executable, __file__, "--warm"]
        workers = [subprocess.Popen([*command, f"{k}/{options.processes}"]) for k in range(options.processes)]
        for worker in workers:
            worker.wait()
    cases = make_cases(options.device)
    for case in cases:
        describe(case)
    cases = [case for case in cases if gate(case)]
    if options.device == "cuda":
        rows = time_gpu(cases)
    else:
        rows = [(on_cpu(getattr(c, how)), f"{c.name}: {how}") for c in cases for how in ("composition", "walk")]
    print(f"\n{'us':>9}  piece")
    for milliseconds, name in rows:
        print(f"{milliseconds * 1e3:9.1f}  {name}")


if __name__ == "__main__":
    main()
