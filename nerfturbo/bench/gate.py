"""The gate before the clock: calls of ops whose values and gradients are compared with the reference."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..ops._dispatch import Backend, available, use_backend
from ..ops.composite import composite
from ..ops.hash_encode import HashLayout, hash_encode
from ..ops.intervals import importance_sample
from ..ops.march import OccupancyBits, StepRule, march, pack_bits
from ..ops.spherical_harmonics import spherical_harmonics
from ..types import Aabb, PackedSamples

BOX, LAYOUT = Aabb.cube(1.0), HashLayout(log2_entries=17)


@dataclass(frozen=True)
class OpCase:
    """One call of `CALLS` to check and to time. `inputs` are its tensors; those in `wanted` also get gradients."""

    op: str
    size: str  # in words
    inputs: dict[str, Tensor]
    wanted: tuple[str, ...] = ()
    tolerance: float = 1e-4  # of the largest value, for values and gradients
    outliers: float = 0.0  # share of values that may differ: those that rounding moves across a border


class Draw:
    """Random inputs of one seed, of sizes divided by `small`."""

    def __init__(self, seed: int, small: int) -> None:
        self._generator, self.small = torch.Generator().manual_seed(seed), small

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator)

    def units(self, n: int) -> Tensor:
        return torch.nn.functional.normalize(self.normal(n, 3), dim=-1)

    def rays_at_the_box(self, n: int) -> dict[str, Tensor]:
        origins = 3.0 * self.units(n)
        return {"origins": origins, "directions": torch.nn.functional.normalize(0.7 * self.normal(n, 3) - origins)}

    def samples(self, n_rays: int, n: int) -> tuple[dict[str, Tensor], int, int]:
        """About n samples on n_rays rays, then how many of each there are."""
        n_rays, n = n_rays // self.small, n // self.small
        counts = self.integers(0, 2 * n // n_rays + 1, n_rays)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        rays = torch.repeat_interleave(torch.arange(n_rays), counts)
        starts = (torch.arange(rays.shape[0]) - offsets[rays]).float() * 0.01
        found = {"t_starts": starts, "t_ends": starts + 0.01, "ray_indices": rays.int(), "offsets": offsets.int()}
        return found, rays.shape[0], n_rays


def samples_of(x: SimpleNamespace) -> PackedSamples:
    return PackedSamples(x.t_starts, x.t_ends, x.ray_indices, x.offsets)


def _march(x: SimpleNamespace) -> tuple[Tensor, ...]:
    grid, rule = OccupancyBits(x.bits, BOX, 128), StepRule(step_size=3.0**0.5 * 2 / 1024)
    out = march(x.origins, x.directions, grid, rule, jitter=x.jitter)
    return out.offsets.float(), out.t_starts.sum(), out.t_ends.sum()


# What a case calls, by its op; takes the inputs by name, returns a tensor or several. Benchmarks add theirs.
CALLS: dict[str, Callable[[SimpleNamespace], Any]] = {
    "march": _march,
    "composite": lambda x: composite(x.density, x.rgb, samples_of(x), early_stop_eps=1e-4),
    "importance": lambda x: importance_sample(x.edges, x.weights, 64),
    "hash_encode": lambda x: hash_encode(x.positions, x.table, LAYOUT),
    "spherical_harmonics": lambda x: spherical_harmonics(x.directions),
}


def basic_cases(draw: Draw) -> Iterator[OpCase]:
    """The ops that `doctor` tries, at their size in a training step."""
    n, resolution = 4096 // draw.small, 128
    axis = (torch.arange(resolution) + 0.5) / resolution * 2.0 - 1.0
    x, y, z = torch.meshgrid(axis, axis, axis, indexing="ij")
    shell = ((x**2 + y**2 + z**2).sqrt() - 0.6).abs() < 0.05
    cells = (shell | (draw.uniform(*shell.shape) < 0.002)).flatten()
    rays = draw.rays_at_the_box(n) | {"bits": pack_bits(cells), "jitter": draw.uniform(n)}
    yield OpCase("march", f"{n:,} rays, {resolution}^3 cells, {cells.float().mean().item():.1%} occupied", rays)

    samples, n_samples, n_rays = draw.samples(8192, 131072)
    field = samples | {"density": 60.0 * draw.uniform(n_samples) ** 4, "rgb": draw.uniform(n_samples, 3)}
    yield OpCase("composite", f"{n_samples:,} samples, {n_rays:,} rays", field, ("density", "rgb"))

    histogram = {"edges": draw.uniform(n, 65).cumsum(-1), "weights": draw.uniform(n, 64) ** 3}
    yield OpCase("importance", f"{n:,} rays, 64 bins to 64", histogram, outliers=1e-4)

    n = 65536 // draw.small
    points = {"positions": draw.uniform(n, 3), "table": draw.normal(LAYOUT.n_entries, LAYOUT.n_features)}
    # At a scale of 2048 a position's rounding is 1e-4 of a cell.
    yield OpCase("hash_encode", f"{n:,} points, 16 levels, 2^17 entries", points, ("table",), tolerance=1e-3)
    yield OpCase("spherical_harmonics", f"{n:,} directions", {"directions": draw.units(n)}, ("directions",))


def backends(device: torch.device) -> list[Backend]:
    """The reference first, then what is fast on this device."""
    fast: dict[str, tuple[Backend, str]] = {"cpu": ("cpu", "numba"), "cuda": ("triton", "triton")}
    name, module = fast.get(device.type, ("reference", "torch"))
    return ["reference", name] if name != "reference" and available(module) else ["reference"]


def runner(
    case: OpCase, backend: Backend, device: torch.device, wanted: Sequence[str]
) -> Callable[[], tuple[list[Tensor], Sequence[Tensor]]]:
    """A call of the op, with its backward where gradients are wanted; cotangents are drawn once."""
    leaves = {n: t.detach().to(device, copy=True).requires_grad_(n in wanted) for n, t in case.inputs.items()}
    cotangents: list[Tensor] = []

    def call() -> tuple[list[Tensor], Sequence[Tensor]]:
        with use_backend(backend), torch.set_grad_enabled(bool(wanted)):
            result = CALLS[case.op](SimpleNamespace(**leaves))
            outputs = [result] if isinstance(result, Tensor) else list(result)
            if not wanted:
                return outputs, []
            roots = [out for out in outputs if out.requires_grad]
            if not cotangents:
                draw = torch.Generator().manual_seed(0)
                cotangents.extend(torch.randn(out.shape, generator=draw).to(out) for out in roots)
            return outputs, torch.autograd.grad(roots, [leaves[name] for name in wanted], cotangents)

    return call


def gate(case: OpCase, backend: Backend, device: torch.device) -> str:
    """ "passed", or the first value or gradient that differs from the reference."""
    try:
        got, got_grads = runner(case, backend, device, case.wanted)()
        want, want_grads = runner(case, "reference", device, case.wanted)()
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
