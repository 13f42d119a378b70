"""What only the marching kernels have: the summary that skips empty space, strides, capture; and real sizes."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nerfturbo.ops import OccupancyBits, StepRule, march, use_backend
from nerfturbo.ops.march import pack_bits, unpack_bits
from nerfturbo.types import Aabb

from ..ops.cases import assert_same_samples, generator, grid_to, make_grid, make_rays, samples_to

kernels = pytest.importorskip("nerfturbo.ops.march.triton", reason="triton is not installed")
ON_GPU = torch.cuda.is_available()
LEVELS = [1, 3] if ON_GPU else [1]


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's segments are long and never skipped: take the GPU's."""
    module = importlib.import_module("nerfturbo.ops.march.triton")
    monkeypatch.setattr(module, "STEPS", 32)
    monkeypatch.setattr(module, "SKIP_EMPTY", True)


def _march(device: torch.device, origins: Tensor, directions: Tensor, grid: OccupancyBits, rule: StepRule, **options):
    with use_backend("triton"):
        return march(origins.to(device), directions.to(device), grid_to(grid, str(device)), rule, **options)


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize(
    ("step", "cone"), [(0.007, 0.0), (0.006, 1 / 16), (0.02, 0.0), (0.006, 1 / 64)][: None if ON_GPU else 2]
)
def test_skipping_changes_nothing(
    kernel_device: torch.device, small_segments: None, monkeypatch, levels: int, step: float, cone: float
):
    cells = torch.zeros(levels, 32, 32, 32, dtype=torch.bool)  # occupied in one place, where the rays lead
    cells[:, 8:16, 12:20, 16:24] = True
    grid = replace(make_grid(32, levels), bits=pack_bits(cells.flatten()))
    rule = StepRule(step_size=step, near=0.1, cone_angle=cone)
    origins, aside = make_rays(2000 if ON_GPU else 6, radius=3.0 if levels == 1 else 1.5)
    low, high = grid.aabb.tensor()
    place = low + (high - low) * torch.tensor([12.0, 16.0, 20.0]) / 32.0
    directions = torch.nn.functional.normalize(place + 0.3 * aside - origins, dim=-1)
    assert kernels._parts(grid, rule) > 0
    skipped = _march(kernel_device, origins, directions, grid, rule)
    monkeypatch.setattr(kernels, "SKIP_EMPTY", False)
    tested = _march(kernel_device, origins, directions, grid, rule)
    assert skipped.capacity > 0
    assert_same_samples(skipped, tested, rule, exact=True)


def test_what_counting_found_is_what_writing_would_find(kernel_device: torch.device, small_segments: None, monkeypatch):
    """Rays with more steps than there is room for: what lies beyond is looked at again. With room it is read."""
    origins, directions = torch.tensor([[-3.0, 0.1, 0.2], [0.3, 0.4, 9.0]]), torch.tensor([[1.0, 0, 0], [0, 0, -1.0]])
    grid, rule = make_grid(32, fraction=0.3), StepRule(step_size=0.0015, near=0.1)
    assert kernels._room(2, grid, rule) % 32 == 0 < kernels._room(2, grid, rule)
    results = []
    for room in (32, 64):
        monkeypatch.setattr(kernels, "_room", lambda *_, room=room: room)
        results.append(_march(kernel_device, origins, directions, grid, rule))
    assert_same_samples(*results, rule, exact=True)
    with use_backend("reference"):
        wanted = march(origins, directions, grid, rule)
    assert_same_samples(samples_to(results[0], "cpu"), wanted, rule, exact=False)
    starts, first = results[0].t_starts, results[0].offsets[:-1].long()
    steps = (starts - starts[first][results[0].ray_indices.long()]) / rule.step_size
    assert (steps > 1024).any() and (steps < 1000).any()


def test_segments_longer_than_the_margin_are_not_skipped(small_segments: None):
    grid = make_grid(32)
    assert [kernels._parts(grid, StepRule(step_size=s)) for s in (0.01, 0.02, 0.04, 0.2)] == [1, 2, 4, 0]
    assert kernels._parts(grid, StepRule(step_size=0.01, cone_angle=0.01)) == 4
    assert kernels._parts(make_grid(20), StepRule(step_size=0.01)) == 0  # words across rows of cells


@pytest.mark.parametrize("resolution", [32, 96] if ON_GPU else [32])
@pytest.mark.parametrize("levels", LEVELS if ON_GPU else [2])  # the outer of two has all that a single one has
def test_summary_covers_the_neighbourhood(kernel_device: torch.device, levels: int, resolution: int):
    """Occupied blocks and their neighbours, plus the borders between levels, and no other block."""
    grid = grid_to(make_grid(resolution, levels, fraction=0.01), str(kernel_device))
    rays = [t.to(kernel_device) for t in make_rays(1)]
    _, got = kernels._prepare(*rays, grid, StepRule(step_size=0.01), jitter=None, limits=None, n_active=None, parts=1)
    blocks = resolution // 4
    cells = unpack_bits(grid.bits.cpu()).view(levels, 1, resolution, resolution, resolution).float()
    near = torch.nn.functional.max_pool3d(torch.nn.functional.max_pool3d(cells, 4), 3, 1, 1).bool()[:, 0]
    place = torch.arange(blocks)
    edge, inner = (place == 0) | (place == blocks - 1), (place >= blocks // 4 - 1) & (place <= blocks * 3 // 4)
    any_edge = edge[:, None, None] | edge[None, :, None] | edge[None, None, :]
    all_inner = inner[:, None, None] & inner[None, :, None] & inner[None, None, :]
    for level in range(levels):
        near[level] |= any_edge & (level < levels - 1) | all_inner & (level > 0)
    assert torch.equal(got.cpu().bool(), near)


def test_strided_rays(kernel_device: torch.device):
    """Feature-major rays, (3, n) in memory, are read in place."""
    origins, directions = make_rays(9)
    grid, rule = make_grid(16), StepRule(step_size=0.05)
    plain = _march(kernel_device, origins, directions, grid, rule)
    turned = _march(kernel_device, origins.t().contiguous().t(), directions.t().contiguous().t(), grid, rule)
    assert_same_samples(turned, plain, rule, exact=True)


def _scene(n_rays: int) -> tuple[Tensor, Tensor, OccupancyBits, StepRule]:
    """A shell of about 6% of 128^3 cells seen from a sphere around it, as in the training of an object."""
    axis = (torch.arange(128) + 0.5) / 128 * 3.0 - 1.5
    x, y, z = torch.meshgrid(axis, axis, axis, indexing="ij")
    shell = ((x * x + y * y + z * z).sqrt() - 0.9 - 0.1 * torch.sin(5 * x) * torch.cos(4 * y)).abs() < 0.06
    grid = OccupancyBits(pack_bits(shell.flatten()), Aabb.cube(1.5), 128)
    return *make_rays(n_rays, radius=4.0), grid, StepRule(step_size=3.0**0.5 * 3.0 / 1024)


@pytest.mark.gpu
@pytest.mark.parametrize("n_rays", [8192, 65536])
def test_real_size_matches_reference(n_rays: int, poisoned_empty: None):
    origins, directions, grid, rule = _scene(n_rays)
    jitter = torch.rand(n_rays, generator=generator())
    grid = grid_to(grid, "cuda")
    arguments = (origins.cuda(), directions.cuda(), grid, rule)
    with use_backend("reference"):
        want = march(*arguments, jitter=jitter.cuda())
    with use_backend("triton"):
        got = march(*arguments, jitter=jitter.cuda())
        fixed = march(*arguments, jitter=jitter.cuda(), capacity=1 << 22)
    assert_same_samples(got, want, rule, exact=False)
    used = int(fixed.offsets[-1])
    assert used == got.capacity
    assert torch.equal(fixed.t_starts[:used], got.t_starts)
    assert not fixed.t_ends[used:].any()
    assert not fixed.ray_indices[used:].any()


@pytest.mark.gpu
def test_captured_march_follows_its_inputs():
    """Recorded once; replayed with other rays, bits and active counts without a read-back."""
    origins, directions, grid, rule = _scene(4096)
    origins, directions, grid = origins.cuda(), directions.cuda(), grid_to(grid, "cuda")
    active = torch.tensor(4096, dtype=torch.int32, device="cuda")
    options = {"capacity": 1 << 17, "n_active": active}
    with use_backend("triton"):
        march(origins, directions, grid, rule, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = march(origins, directions, grid, rule, **options)
        for count in (4096, 100, 0, 3000):
            active.fill_(count)
            origins.copy_(origins.roll(1, 0))
            directions.copy_(directions.roll(1, 0))
            grid.bits.copy_(grid.bits.roll(64))
            graph.replay()
            assert_same_samples(recorded, march(origins, directions, grid, rule, **options), rule, exact=True)
