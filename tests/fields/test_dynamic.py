"""Fields that follow a scene that moves: time matters, time 0 is the scene's own place, gradients are right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nerfturbo.config import DynamicNgpConfig, FieldConfig, VanillaConfig
from nerfturbo.errors import InputError
from nerfturbo.fields import DeformedNeRF, DynamicNGP, Field, TimeNeRF, build_field, ngp_time
from nerfturbo.fields.field import offers
from nerfturbo.fields.vanilla import from_the_start
from nerfturbo.ops import use_backend
from nerfturbo.ops.composite import visibility, visible_codes
from nerfturbo.types import Aabb, PackedSamples, Rays

BOX = Aabb.cube(1.5)
DEEP = {"width": 32, "depth": 6}
HASH = {"n_levels": 4, "n_features": 2, "log2_entries": 10, "max_resolution": 64, "width": 16}
NGP_TIME = DynamicNgpConfig(motion_log2_entries=9, motion_resolution=32, **HASH)
KINDS: dict[str, FieldConfig] = {
    "tnerf": VanillaConfig(motion="time", **DEEP),
    "dnerf": VanillaConfig(motion="deform", **DEEP),
    "ngp-time": NGP_TIME,
}


@pytest.fixture(autouse=True)
def _few_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngp_time, "TIME_RESOLUTION", 8)


def inputs(n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(n, 3, generator=draw), dim=-1)
    return torch.rand(n, 3, generator=draw) * 2.8 - 1.4, directions, torch.rand(n, generator=draw)


def awake(kind: str, config: FieldConfig | None = None) -> TimeNeRF | DeformedNeRF | DynamicNGP:
    """A field as training leaves it: features of size 1 and displacements that move points."""
    field = build_field(config or KINDS[kind], BOX)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in field.named_parameters():
            if name.endswith("table"):
                parameter.uniform_(-0.5, 0.5, generator=draw)
            elif name.startswith("deform_head"):
                parameter.uniform_(-0.1, 0.1, generator=draw)
    assert isinstance(field, TimeNeRF | DeformedNeRF | DynamicNGP)
    return field


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [0, 1, 33])
def test_shapes_and_ranges(kind: str, n: int) -> None:
    field = build_field(KINDS[kind], BOX)
    positions, directions, times = inputs(n)
    assert isinstance(field, Field)
    rgb, density = field(positions, directions, times)
    assert rgb.shape == (n, 3) and density.shape == (n,)
    assert ((rgb >= 0) & (rgb <= 1)).all() and (density >= 0).all()
    assert torch.allclose(field.density(positions, times), density, rtol=1e-5)
    assert n == 0 or density.min() > 0.05, "a field that starts empty empties its grid"


@pytest.mark.parametrize("kind", KINDS)
def test_time_matters_and_its_absence_is_the_beginning(kind: str) -> None:
    field = awake(kind)
    positions, directions, times = inputs(64)
    now, later = field(positions, directions, times), field(positions, directions, (times + 0.4) % 1.0)
    assert not torch.allclose(now[0], later[0]) and not torch.allclose(now[1], later[1])
    start, none = field(positions, directions, torch.zeros(64)), field(positions, directions)
    assert torch.equal(start[0], none[0]) and torch.equal(start[1], none[1])
    close = field(positions, directions, times + 1e-5)
    assert (close[0] - now[0]).abs().max() < 0.05, "a moment later it looks almost the same"


def test_the_deformation_begins_as_the_identity() -> None:
    """At time 0 exactly, for any weights; at first almost nothing moves at any time."""
    for field, bound in ((awake("dnerf"), None), (build_field(KINDS["dnerf"], BOX), 0.02)):
        assert isinstance(field, DeformedNeRF)
        places, _, times = inputs(64)
        assert field.displacement(places * 0.3 + 0.5, torch.zeros(64)).abs().max() == 0.0
        moved = field.displacement(places * 0.3 + 0.5, times).norm(dim=-1)
        assert moved.max() < bound if bound is not None else moved.mean() > 1e-3
    assert from_the_start(torch.tensor([0.0, 0.1, 1.0])).tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_against_double_precision(kind: str) -> None:
    """Every parameter gets a gradient, and in fp32 it is that of plain torch in float64; that one is the slope."""
    field = awake(kind)
    exact = awake(kind).double()
    positions, directions, times = inputs(200)
    weigh = torch.randn(200, 4, generator=torch.Generator().manual_seed(2))
    for made, cast in ((field, torch.float32), (exact, torch.float64)):
        with use_backend("reference") if cast == torch.float64 else use_backend("auto"):
            rgb, density = made(positions.to(cast), directions.to(cast), times.to(cast))
            out = torch.cat([rgb, density.clamp(max=50.0)[:, None]], dim=-1)
            (out * weigh.to(out.dtype)).sum().backward()
    for (name, parameter), other in zip(field.named_parameters(), exact.parameters(), strict=True):
        assert parameter.grad is not None and other.grad is not None and parameter.grad.abs().sum() > 0, name
        difference = (parameter.grad.double() - other.grad.double()).norm() / other.grad.double().norm()
        # Rounding of a displacement is a thousand times as large in the finest sines, and ReLUs flip.
        assert difference < (0.1 if kind == "dnerf" else 5e-3), (name, float(difference))
    if kind != "dnerf":
        _slopes_are_gradients(awake(kind).double(), positions, times)


def _slopes_are_gradients(field: Field, positions: torch.Tensor, times: torch.Tensor) -> None:
    """Along a random way of all parameters, in float64: the difference of densities over its length."""
    assert isinstance(field, torch.nn.Module)
    draw, parameters = torch.Generator().manual_seed(3), dict(field.named_parameters())
    way = {name: torch.randn(p.shape, generator=draw, dtype=torch.float64) for name, p in parameters.items()}

    def density(length: float) -> torch.Tensor:
        moved = {name: p.detach() + length * way[name] for name, p in parameters.items()}
        return torch.func.functional_call(field, moved, (positions.double(), positions.double(), times.double()))[1]

    with use_backend("reference"):
        made = field.density(positions.double(), times.double()).log().sum()
        slope = (density(1e-9).log().sum() - density(-1e-9).log().sum()) / 2e-9
    used = {name: p for name, p in parameters.items() if not name.startswith(("color", "feature"))}
    grads = torch.autograd.grad(made, list(used.values()))
    expected = sum((way[name] * grad).sum() for name, grad in zip(used, grads, strict=True))
    assert torch.allclose(slope, torch.as_tensor(expected), rtol=1e-3), (float(slope), float(expected))


def test_the_prior_is_that_things_stand_still() -> None:
    """Features that differ between times cost, those that do not are free; the draw belongs to the step."""
    field = awake("ngp-time")
    assert isinstance(field, DynamicNGP) and offers(field, "regularization")
    cost, again, other = (field.regularization(step) for step in (3, torch.tensor(3), 4))
    assert cost > 0.0 and torch.equal(cost, again) and not torch.equal(cost, other)
    cost.backward()
    assert all(grid.table.grad is not None and grid.table.grad.abs().sum() > 0 for grid in field.motion_grids)
    assert field.encoding.table.grad is None
    with torch.no_grad():
        for grid in field.motion_grids:
            grid.table.fill_(0.3)
    assert field.regularization(3) < 1e-6


def test_samples_of_rays_are_what_single_points_are() -> None:
    """The packed way, with unused capacity behind, gives what `forward` gives; visibility is that of density."""
    field = awake("ngp-time")
    assert isinstance(field, DynamicNGP) and offers(field, "sample_density", "sample_logits")
    _, directions, times = inputs(5)
    rays = Rays(-2.0 * directions, directions, times)
    counts = torch.tensor([3, 0, 4, 2, 1])
    starts = torch.linspace(1.0, 2.5, 10)
    exact = PackedSamples.from_counts(counts, starts, starts + 0.1)
    pad = torch.zeros(6)
    samples = PackedSamples(
        torch.cat([exact.t_starts, pad]),
        torch.cat([exact.t_ends, pad]),
        torch.cat([exact.ray_indices, pad.int()]),
        exact.offsets,
    )
    index = exact.ray_indices.long()
    rgb, density = field(exact.positions(rays), directions[index], times[index])
    logits = field.sample_logits(rays, samples)
    assert logits.shape == (16, 4) and (logits[10:] == 0.0).all()
    assert torch.allclose(torch.sigmoid(logits[:10, :3]), rgb, atol=1e-5)
    assert torch.allclose(field.sample_density(rays, samples)[:10], density, rtol=1e-4)
    limits = {"early_stop_eps": 1e-2, "alpha_thre": 0.0, "thinning": None}
    seen = visible_codes(field.sample_density(rays, samples), samples, **limits)
    assert torch.equal(seen[:10], visibility(density.detach(), exact, early_stop_eps=1e-2))
    assert not seen[10:].any()


def test_sizes_that_no_kernel_runs_are_refused() -> None:
    with pytest.raises(InputError, match=r"field\.n_levels"):
        replace(NGP_TIME, n_levels=0)
    with pytest.raises(InputError, match=r"field\.motion_resolution"):
        replace(NGP_TIME, motion_resolution=4)


@pytest.mark.parametrize(("space", "time"), [(16, 8), (16, 40), (8, 6), (8, 12)])
def test_time_runs_to_its_end_in_cells_of_one_size(space: int, time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As fast in the last cell as in the first and in between, also with more cells along time than along space:
    beyond the side of a grid its coordinates would stand still."""
    monkeypatch.setattr(ngp_time, "TIME_RESOLUTION", time)
    field = awake("ngp-time", replace(NGP_TIME, motion_resolution=space))
    assert isinstance(field, DynamicNGP)
    moments = torch.linspace(0.0, 1.0, 16 * time + 1)
    place = torch.rand(64, 3, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        seen = torch.stack([field._over_time(place, moment.expand(64), None) for moment in moments])
    speed = (seen[1:] - seen[:-1])[..., -2:].abs().mean((1, 2)) * (16 * time)  # of the finest level of the last grid
    ends = torch.stack([speed[:8].mean(), speed[-8:].mean()])  # half a cell at either end, as half a cell lies there
    assert bool((ends > 0.5 * speed.mean()).all()) and bool((ends < 2.0 * speed.mean()).all()), (ends, speed.mean())
    turns = (speed[1:] - speed[:-1]).abs() > 1e-3 * speed.mean()  # slopes change at the nodes of the grid alone
    assert int(turns.sum()) == time
