"""Checks that every backend of an op must pass, written once: each takes a `Target` and compares it with the reference.

A target is a backend, the device its tensors live on and the sizes it can afford: Triton's interpreter costs about a
millisecond a program, so there the shapes are tiny. The test files run these checks under the `target` and `sized`
fixtures of `conftest.py`; a new backend is one more entry in `TARGETS`.

Gradients are compared by name, under random cotangents for every output, so that a message says which one is wrong.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from nerfturbo.ops import HashLayout, OccupancyBits, StepRule, use_backend
from nerfturbo.ops.march import pack_bits
from nerfturbo.ops.march.reference import inverse_lattice
from nerfturbo.types import Aabb, PackedSamples

HAS_CUDA = torch.cuda.is_available()

# Largest error allowed, relative to the largest value of the tensor it is in.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Target:
    """A backend on a device, and how much of it a test may ask for."""

    backend: str
    device: str
    sizes: tuple[int, ...]

    @property
    def interpreted(self) -> bool:
        return self.backend == "triton" and self.device == "cpu"

    def __str__(self) -> str:
        return f"{self.backend}-interpreted" if self.interpreted else self.backend

    def pick(self, full: int, tiny: int) -> int:
        """`full` where kernels run at speed, `tiny` under the interpreter."""
        return tiny if self.interpreted else full


TARGETS = (
    Target("cpu", "cpu", (1, 63, 1000)),
    Target("triton", "cuda", (1, 63, 1000, 20_011)) if HAS_CUDA else Target("triton", "cpu", (1, 63)),
)
SIZED = tuple((target, n) for target in TARGETS for n in target.sizes)


def require(target: Target) -> None:
    """Skip where the backend cannot run at all: no numba, no triton."""
    needs = {"cpu": "numba", "triton": "triton"}[target.backend]
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")


def spare_interpreter(target: Target, *, unless: bool) -> None:
    """Skip a combination under Triton's interpreter, which takes seconds for what a machine does in microseconds."""
    if target.interpreted and not unless:
        pytest.skip("one of many combinations: too slow for the interpreter")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_close(name: str, got: Tensor, want: Tensor, tolerance: float | None = None) -> None:
    """Same shape, dtype and device; finite where it should be; error within `tolerance` of the largest wanted value."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{name}: {got.dtype}, expected {want.dtype}"
    assert got.device.type == want.device.type, f"{name}: on {got.device}, expected {want.device}"
    if want.numel() == 0:
        return
    if not want.is_floating_point():
        assert torch.equal(got, want), f"{name}: {(got != want).sum().item()} of {want.numel()} values differ"
        return
    tolerance = TOLERANCE[want.dtype] if tolerance is None else tolerance
    bad = torch.isfinite(got) != torch.isfinite(want)
    assert not bad.any(), f"{name}: {bad.sum().item()} values are finite in one backend only, e.g. row {_first(bad)}"
    got, want = torch.nan_to_num(got.double()), torch.nan_to_num(want.double())
    error, largest = (got - want).abs(), want.abs().max().item()
    worst = int(error.argmax())
    assert error.max().item() <= tolerance * max(largest, 1e-6), (
        f"{name}: error {error.max().item():.3g} at flat index {worst} (got {got.flatten()[worst].item():.8g}, "
        f"expected {want.flatten()[worst].item():.8g}), allowed {tolerance:g} of the largest value {largest:.4g}"
    )


def _first(mask: Tensor) -> int:
    return int(mask.flatten().nonzero()[0])


def _relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def assert_within(got: dict[str, Tensor], truth: dict[str, Tensor], bound: float) -> None:
    """By name: the norm of the error within `bound` of the truth's."""
    for name, value in truth.items():
        assert value.norm() > 0.0, f"{name}: the truth is zero, and says nothing"
        error = _relative(got[name], value)
        assert error < bound, f"{name} is off by {error:.3g}, allowed {bound:g}"


def assert_as_good_as_torch(got: dict[str, Tensor], half: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """By name: as near to the fp32 truth as torch's own network of the same half precision is, within a tenth. How near
    that is depends on the ReLUs whose input is near zero: rounded, they flip, in whoever's network."""
    for name, value in truth.items():
        error, torchs = _relative(got[name], value), _relative(half[name], value)
        assert error < 1.1 * torchs + 1e-4, f"{name} is off by {error:.3g}, torch's own by {torchs:.3g}"


def steady_rows(before: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """(n,) bool: the rows in which no ReLU flips when everything is rounded to `dtype`, given the inputs (n, width) of
    all ReLUs. There the network is linear, and a gradient is off by the rounding alone; elsewhere it jumps."""
    margin = 8.0 * torch.finfo(dtype).eps
    steady = [(value.abs() > margin * value.square().mean().sqrt()).all(-1) for value in before]
    rows = torch.stack(steady).all(0)
    assert rows.sum() >= 16, f"only {int(rows.sum())} of {len(rows)} rows are steady"
    return rows


def assert_grads_match(
    names: Sequence[str], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float | None = None
) -> None:
    """Every gradient, by the name of the argument it belongs to."""
    assert len(names) == len(got) == len(want), f"gradients of {list(names)}: got {len(got)}, expected {len(want)}"
    for name, g, w in zip(names, got, want, strict=True):
        assert_close(f"gradient to {name}", g, w, tolerance)


def run(
    backend: str, function: Callable[..., object], inputs: dict[str, Tensor], wanted: Sequence[str], seed: int = 7
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of function(**inputs) on one backend, and gradients to the `wanted` inputs under random cotangents."""
    leaves = {name: t.detach().clone().requires_grad_(name in wanted) for name, t in inputs.items()}
    with use_backend(backend):  # type: ignore[arg-type]
        result = function(**leaves)
        outputs = [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]
        if not wanted:
            return outputs, []
        draw = generator(seed)
        seeds = [torch.randn(o.shape, generator=draw).to(o) for o in outputs]
        pairs = [(o, s) for o, s in zip(outputs, seeds, strict=True) if o.requires_grad]
        grads = torch.autograd.grad([o for o, _ in pairs], [leaves[n] for n in wanted], [s for _, s in pairs])
    return [o.detach() for o in outputs], list(grads)


def compare(
    target: Target,
    function: Callable[..., object],
    inputs: dict[str, Tensor],
    wanted: Sequence[str] = (),
    *,
    names: Sequence[str] = ("result",),
    tolerance: float | None = None,
) -> None:
    """The target's values and gradients against the reference's, both on the target's device."""
    inputs = {name: t.to(target.device) for name, t in inputs.items()}
    got, got_grads = run(target.backend, function, inputs, wanted)
    want, want_grads = run("reference", function, inputs, wanted)
    assert len(got) == len(want) == len(names)
    for name, g, w in zip(names, got, want, strict=True):
        assert_close(name, g, w, tolerance)
    assert_grads_match(wanted, got_grads, want_grads, tolerance)


def make_samples(
    n_rays: int, mean: int = 12, *, tail: int = 0, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PackedSamples:
    """Random packed samples with many empty rays, intervals in order along each ray, and `tail` unused places."""
    draw = generator(seed)
    counts = torch.randint(0, 2 * mean + 1, (n_rays,), generator=draw)
    counts = torch.where(torch.rand(n_rays, generator=draw) < 0.2, torch.zeros_like(counts), counts)
    n = int(counts.sum())
    rays = torch.repeat_interleave(torch.arange(n_rays), counts)
    first = torch.cumsum(counts, 0) - counts
    position = torch.arange(n) - first[rays]
    step = 0.05 + 0.05 * torch.rand(n, generator=draw, dtype=dtype)
    starts = 0.5 + 0.11 * position.to(dtype)
    samples = PackedSamples.from_counts(counts, starts, starts + step)
    return with_tail(samples, tail)


def with_tail(samples: PackedSamples, tail: int) -> PackedSamples:
    """The same samples with `tail` more unused places, clean as every op leaves them."""

    def pad(values: Tensor) -> Tensor:
        return torch.cat([values, values.new_zeros(tail)])

    return replace(
        samples,
        t_starts=pad(samples.t_starts),
        t_ends=pad(samples.t_ends),
        ray_indices=pad(samples.ray_indices),
    )


def samples_to(samples: PackedSamples, device: str) -> PackedSamples:
    kept = samples.n_rays_kept
    return PackedSamples(
        samples.t_starts.to(device),
        samples.t_ends.to(device),
        samples.ray_indices.to(device),
        samples.offsets.to(device),
        None if kept is None else kept.to(device),
    )


def poison_tail(values: Tensor, offsets: Tensor) -> Tensor:
    """NaN in every row that belongs to no ray: it must not reach results or gradients."""
    values = values.clone()
    values[int(offsets[-1]) :] = float("nan")
    return values


def make_rays(n_rays: int, *, seed: int = 0, radius: float = 3.0) -> tuple[Tensor, Tensor]:
    """Rays from a sphere of the given radius towards the middle, some past it, plus a few that run along an axis."""
    draw = generator(seed)
    origins = torch.nn.functional.normalize(torch.randn(n_rays, 3, generator=draw), dim=-1) * radius
    aim = torch.randn(n_rays, 3, generator=draw) * 0.7
    directions = torch.nn.functional.normalize(aim - origins, dim=-1)
    axes = torch.eye(3)[torch.arange(n_rays) % 3]
    along = torch.arange(n_rays) % 7 == 3
    directions = torch.where(along[:, None], axes, directions)
    origins = torch.where(along[:, None], aim * 0.5 - radius * axes, origins)
    return origins, directions


def make_grid(
    resolution: int = 32, levels: int = 1, *, fraction: float = 0.2, seed: int = 0, aabb: Aabb | None = None
) -> OccupancyBits:
    """Blobs of occupied cells over about `fraction` of each level."""
    draw = generator(seed)
    coarse = torch.rand(levels, 1, *[resolution // 4] * 3, generator=draw)
    blocks = torch.nn.functional.interpolate(coarse, scale_factor=4, mode="nearest").flatten() < fraction
    loose = torch.rand(levels * resolution**3, generator=draw) < 0.1 * fraction
    return OccupancyBits(
        pack_bits(blocks | loose), aabb or Aabb((-1.0, -0.8, -1.2), (1.0, 1.1, 0.9)), resolution, levels
    )


def grid_to(grid: OccupancyBits, device: str) -> OccupancyBits:
    return replace(grid, bits=grid.bits.to(device))


def assert_packed(samples: PackedSamples) -> None:
    """The invariants of the type: offsets, ray indices, ordered intervals, and a tail of zeros."""
    offsets = samples.offsets
    assert samples.t_starts.shape == samples.t_ends.shape == samples.ray_indices.shape
    assert offsets.dtype == samples.ray_indices.dtype == torch.int32
    assert offsets[0] == 0
    assert bool((offsets[1:] >= offsets[:-1]).all())
    n = int(offsets[-1])
    assert n <= samples.capacity
    counts = (offsets[1:] - offsets[:-1]).long()
    rays = torch.repeat_interleave(torch.arange(samples.n_rays, device=offsets.device), counts)
    assert torch.equal(samples.ray_indices[:n].long(), rays)
    assert bool((samples.t_ends[:n] > samples.t_starts[:n]).all())
    for name in ("t_starts", "t_ends", "ray_indices"):
        assert not getattr(samples, name)[n:].any(), f"{name}: the unused tail must be zero"


def assert_same_samples(got: PackedSamples, want: PackedSamples, rule: StepRule, *, exact: bool) -> None:
    """The same samples; `exact` to the bit, otherwise up to rounding at the border of cells (1 in 500 samples)."""
    assert_packed(got)
    assert got.n_rays == want.n_rays
    assert (got.n_rays_kept is None) == (want.n_rays_kept is None)
    if exact:
        for name in ("offsets", "ray_indices", "t_starts", "t_ends"):
            g, w = getattr(got, name), getattr(want, name)
            assert g.dtype == w.dtype and torch.equal(g, w), f"{name} differs from the reference"
        if want.n_rays_kept is not None and got.n_rays_kept is not None:
            assert_close("n_rays_kept", got.n_rays_kept, want.n_rays_kept)
        return
    keys, values = zip(*(_lattice_keys(samples, rule) for samples in (got, want)), strict=True)
    shared = torch.isin(keys[0], keys[1])
    differing = int((~shared).sum()) + int((~torch.isin(keys[1], keys[0])).sum())
    assert differing <= 2 + keys[1].numel() // 500, f"{differing} of {keys[1].numel()} samples differ"
    assert_close("t", values[0][shared], values[1][torch.isin(keys[1], keys[0])], 1e-5)


def _lattice_keys(samples: PackedSamples, rule: StepRule) -> tuple[Tensor, Tensor]:
    """One integer per sample: its ray and its place on the lattice (in 16ths of a step, so jitter does not matter)."""
    n = int(samples.offsets[-1])
    middle = samples.midpoints()[:n].double()
    place = (inverse_lattice(rule, middle) * 4.0).round().long()
    return samples.ray_indices[:n].long() * (1 << 32) + place, torch.stack(
        [samples.t_starts[:n], samples.t_ends[:n]], -1
    )


SMALL_LAYOUT = HashLayout(n_levels=4, n_features=2, log2_entries=9, base_resolution=4, max_resolution=37)


def make_table(layout: HashLayout, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(layout.n_entries, layout.n_features, generator=generator(seed)).to(dtype)


def make_positions(n: int, *, seed: int = 0, border: bool = True) -> Tensor:
    """Positions in [0, 1]^3, with the first ones outside, on the border and in corners."""
    positions = torch.rand(n, 3, generator=generator(seed))
    special = torch.tensor([[-0.3, 0.5, 1.2], [0.0, 1.0, 0.25], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    if border and n > len(special):
        positions[: len(special)] = special
    return positions
