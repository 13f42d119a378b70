"""Front-to-back rounds: together they take march's samples and give composite's pixels, on every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nerfturbo.errors import InputError
from nerfturbo.ops import OccupancyBits, StepRule, composite, march, use_backend
from nerfturbo.ops.frame import (
    STEP,
    TAKEN,
    FinishedRays,
    LiveRays,
    NextSamples,
    RoundLimits,
    absorb_samples,
    finish_rays,
    next_samples,
    start_rays,
)
from nerfturbo.types import Aabb, PackedSamples

from .cases import Target, assert_close, assert_same_samples, generator, grid_to, make_grid, make_rays, require

ROWS = 8192
RULES = {
    "plain": StepRule(step_size=0.05),
    "near-far": StepRule(step_size=0.06, near=2.3, far=3.4),
    "cone": StepRule(step_size=0.04, near=0.1, cone_angle=1 / 64),
    "coarse": StepRule(step_size=0.3),
}


def field(positions: Tensor, channels: int = 3) -> tuple[Tensor, Tensor]:
    """Smooth density and colours."""
    density = 6.0 * (positions * 3.0).sin().prod(-1).abs()
    phases = torch.arange(channels, device=positions.device)
    return density, 0.5 + 0.5 * torch.sin(positions.sum(-1, keepdim=True) * 2.0 + phases)


def rounds(live: LiveRays, *, rows: int = ROWS, limits: RoundLimits | None = None, channels: int = 3, **options):
    """Run to the end; the finished rays and every round's samples as (t_start, t_end, ray) of used rows."""
    seen = []
    while int(live.n_live):
        samples = next_samples(live, rows=rows, limits=limits)
        n = min(int(samples.n_used), samples.t_starts.shape[0])
        seen.append(taken(samples, live))
        density, rgb = field(samples.positions[:n], channels)
        live = absorb_samples(live, samples, density, rgb, **options)
        assert len(seen) < 500, "no progress"
    return live, seen


def taken(samples: NextSamples, live: LiveRays) -> tuple[Tensor, Tensor, Tensor]:
    n_live = int(live.n_live)
    first, count = samples.spans[:, :n_live].long()
    ranks = torch.arange(int(count.sum()), device=count.device) - torch.repeat_interleave(
        count.cumsum(0) - count, count
    )
    rows = torch.repeat_interleave(first, count) + ranks
    rays = samples.ray_indices[rows]
    assert torch.equal(rays, torch.repeat_interleave(live.places[live.side, :n_live], count))
    return samples.t_starts[rows], samples.t_ends[rows], rays


def packed(parts: list[tuple[Tensor, Tensor, Tensor]], n_rays: int) -> PackedSamples:
    """All rounds together in ray order."""
    t0, t1, rays = (torch.cat(column) for column in zip(*parts, strict=True))
    order = torch.argsort(rays.double() * 1e6 + t0.double())
    counts = torch.bincount(rays.long(), minlength=n_rays)
    return PackedSamples.from_counts(counts, t0[order], t1[order])


def setup(target: Target, n: int, *, resolution: int = 16, levels: int = 1, fraction: float = 0.2, name: str = "plain"):
    origins, directions = make_rays(n, radius=3.0 if levels == 1 else 2.0)
    grid = grid_to(make_grid(resolution, levels, fraction=fraction), target.device)
    rule = RULES[name]
    if target.interpreted:  # every lattice step costs milliseconds there
        rule = replace(rule, step_size=rule.step_size * 3.0)
    return origins.to(target.device), directions.to(target.device), grid, rule


def test_the_reference_runs_the_same_rounds():
    target = Target("reference", "cpu", ())
    scene = setup(target, 100, levels=2)
    _, parts, out = run(target, scene, early_stop_eps=0.01)
    check(out, expected(scene, early_stop_eps=0.01)[1])
    assert len(parts) > 2
    live, parts, _ = run(target, scene)
    assert int(live.state[:, TAKEN].sum()) == sum(part[0].shape[0] for part in parts)
    scene = setup(target, 600, fraction=1.1)  # for which there is no room in one round
    _, parts, out = run(target, scene, limits=RoundLimits(32, 32))
    check(out, expected(scene)[1])
    assert max(part[0].shape[0] for part in parts) <= ROWS


def run(target: Target, scene: tuple[Tensor, Tensor, OccupancyBits, StepRule], background=None, channels=3, **options):
    order = torch.randperm(scene[0].shape[0], generator=generator(3)).int().to(target.device)
    with use_backend(target.backend):  # type: ignore[arg-type]
        live = start_rays(*scene, order=order, channels=channels)
        live, parts = rounds(live, channels=channels, **options)
        return live, parts, finish_rays(live, background)


def expected(scene: tuple[Tensor, Tensor, OccupancyBits, StepRule], background: Tensor | None = None, channels=3, **kw):
    with use_backend("reference"):
        samples = march(*scene)
        middle = samples.midpoints()[:, None]
        index = samples.ray_indices.long()
        density, rgb = field(scene[0][index] + scene[1][index] * middle, channels)
        out = composite(density, rgb, samples, **kw)
    colour = out.rgb if background is None else out.rgb + (1.0 - out.opacity)[:, None] * background
    return samples, FinishedRays(colour.clamp(0.0, 1.0), out.opacity, out.depth / out.opacity.clamp(min=1e-6))


def check(got: FinishedRays, want: FinishedRays, exact: bool = True) -> None:
    """Up to rounding; where cells are decided by other roundings, all but a few rays."""
    for name in ("rgb", "opacity", "depth"):
        g, w = getattr(got, name), getattr(want, name)
        assert g.shape == w.shape and bool(torch.isfinite(g).all())
        far = (g - w).abs() > 2e-4 * w.abs().max().clamp(min=1.0)
        allowed = 0 if exact else max(2, far.numel() // 50)
        assert int(far.sum()) <= allowed, f"{name}: {int(far.sum())} of {far.numel()} differ"


@pytest.mark.parametrize(("name", "levels"), [*((name, 1) for name in RULES), ("plain", 3), ("cone", 3)])
def test_rounds_take_the_samples_of_march(target: Target, name: str, levels: int, poisoned_empty: None):
    require(target)
    n = target.pick(300, 40)
    scene = setup(target, n, levels=levels, name=name)
    live, parts, out = run(target, scene)
    samples, want = expected(scene)
    assert_same_samples(packed(parts, n), samples, scene[3], exact=target.backend == "cpu" and name != "cone")
    check(out, want, exact=target.backend == "cpu" and name != "cone")
    assert torch.equal(live.state[:, STEP] < 0, torch.ones(n, dtype=torch.bool, device=live.state.device))
    assert int(live.state[:, TAKEN].sum()) == sum(part[0].shape[0] for part in parts)


@pytest.mark.parametrize("fraction", [0.0, 0.02, 1.1])
def test_empty_sparse_and_full_grids(target: Target, fraction: float):
    require(target)
    scene = setup(target, target.pick(300, 30), resolution=32, fraction=fraction, name="coarse")
    scene = (*scene[:3], replace(scene[3], step_size=0.05 if not target.interpreted else 0.2))
    background = torch.tensor([0.2, 0.4, 0.9], device=target.device)
    _, parts, out = run(target, scene, background)
    check(out, expected(scene, background)[1], exact=target.backend == "cpu")
    if fraction == 0.0:
        assert len(parts) == 1 and torch.equal(out.rgb, background.expand_as(out.rgb)) and out.opacity.sum() == 0


def test_early_stop_and_threshold(target: Target):
    require(target)
    scene = setup(target, target.pick(300, 40), fraction=0.6)
    kinds = {"early_stop_eps": 0.3, "alpha_thre": torch.tensor(0.02, device=target.device)}
    live, _, out = run(target, scene, **kinds)
    samples, want = expected(scene, **kinds)
    check(out, want, exact=target.backend == "cpu")
    assert float(live.state[:, TAKEN].sum()) < 0.9 * samples.capacity  # opaque rays left early


@pytest.mark.parametrize("channels", [1, 3, 7])
def test_any_number_of_channels(target: Target, channels: int):
    require(target)
    scene = setup(target, target.pick(200, 30))
    background = torch.rand(scene[0].shape[0], channels, generator=generator(2)).to(target.device)
    _, _, out = run(target, scene, background, channels)
    check(out, expected(scene, background, channels)[1], exact=target.backend == "cpu")


@pytest.mark.parametrize("n", [1, 63, 257])
def test_any_number_of_rays(target: Target, n: int):
    require(target)
    scene = setup(target, n, fraction=0.1, name="coarse")
    check(run(target, scene)[2], expected(scene)[1], exact=target.backend == "cpu")


@pytest.mark.parametrize("limits", [RoundLimits(1, 1), RoundLimits(32, 32), RoundLimits(2, 8, 1.0)], ids=str)
def test_limits_do_not_show(target: Target, limits: RoundLimits):
    require(target)
    scene = setup(target, target.pick(300, 40), fraction=0.05)
    _, parts, out = run(target, scene, limits=limits)
    check(out, expected(scene)[1], exact=target.backend == "cpu")
    most = [torch.bincount(rays.long()).max().item() for _, _, rays in parts if rays.numel()]
    assert max(most, default=0) <= limits.most


def test_rays_wait_where_there_is_no_room(target: Target):
    require(target)
    scene = setup(target, target.pick(3000, 600), fraction=1.1)
    limits = RoundLimits(32, 32)
    _, parts, out = run(target, scene, limits=limits, rows=ROWS)
    check(out, expected(scene)[1], exact=target.backend == "cpu")
    sizes = [part[0].shape[0] for part in parts]
    assert max(sizes) <= ROWS and sizes[0] > ROWS // 2


def test_logits_and_unit_positions(target: Target):
    require(target)
    scene = setup(target, target.pick(200, 30))
    box = Aabb((-1.0, -2.0, -3.0), (3.0, 2.0, 1.0))
    raw = torch.randn(ROWS, 4, generator=generator(5)).to(target.device)
    results = []
    for logits in (True, False):
        with use_backend(target.backend):  # type: ignore[arg-type]
            live = start_rays(*scene)
            samples = next_samples(live, rows=ROWS, aabb=box)
            n = int(samples.n_used)
            positions = samples.positions[:n]
            values = raw[:n] if logits else torch.cat([raw[:n, :3].sigmoid(), raw[:n, 3:].exp()], -1)
            results.append(finish_rays(absorb_samples(live, samples, values[:, 3], values[:, :3], logits=logits)))
    if target.backend == "cpu":  # the order of rows is the same in each call
        assert_close("rgb", results[0].rgb, results[1].rgb, 1e-5)
    index, middle = samples.ray_indices[:n].long(), (samples.t_starts + samples.t_ends)[:n, None] * 0.5
    assert_close("positions", positions, box.normalize(scene[0][index] + scene[1][index] * middle), 1e-5)


def test_no_rays_and_rays_that_are_not_numbers(target: Target):
    require(target)
    none = setup(target, 8)
    empty = (torch.zeros(0, 3, device=target.device), torch.zeros(0, 3, device=target.device), *none[2:])
    assert run(target, empty)[2].rgb.shape == (0, 3)
    origins, directions = none[0].clone(), none[1].clone()
    origins[0, 1], directions[1, 2], directions[2] = float("nan"), float("nan"), 0.0
    with use_backend(target.backend):  # type: ignore[arg-type]
        live, _ = rounds(start_rays(origins, directions, *none[2:]))
        out = finish_rays(live)
    assert not out.opacity[:2].any() and bool(torch.isfinite(out.rgb).all())


def test_inside_the_box_with_steps_that_grow(target: Target):
    require(target)
    scene = setup(target, target.pick(300, 40), levels=3)
    rule = replace(RULES["cone"], near=0.05, cone_angle=0.1)
    scene = (scene[0] * 0.1, scene[1], scene[2], rule)
    _, _, out = run(target, scene)
    check(out, expected(scene)[1], exact=False)


def test_wrong_arguments_are_named(target: Target):
    require(target)
    scene = setup(target, 8)
    with pytest.raises(InputError, match="rows: expected at least 8192"):
        next_samples(start_rays(*scene), rows=100)
    with pytest.raises(InputError, match="limits: expected 1 <= least <= most <= 32, got 5 and 40"):
        RoundLimits(5, 40)
    with pytest.raises(InputError, match=r"order: expected torch\.int32, got torch\.int64"):
        start_rays(*scene, order=torch.arange(8, device=target.device))
    with pytest.raises(InputError, match=r"background: expected shape \(3,\) or \(8, 3\), got \(4,\)"):
        finish_rays(start_rays(*scene), torch.zeros(4, device=target.device))
