"""Fields: shapes, ranges, reproducible starts, gradients everywhere, double precision."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from nerfturbo import use_backend
from nerfturbo.config import NgpConfig, VanillaConfig
from nerfturbo.errors import InputError
from nerfturbo.fields import Field, InstantNGP, VanillaNeRF, build_field, parts
from nerfturbo.fields.parts import activated, frequency_encode, truncated_exp
from nerfturbo.ops.positions import Contraction
from nerfturbo.types import Aabb

BOX = Aabb.cube(1.5)
SMALL_NGP = NgpConfig(n_levels=4, n_features=2, log2_entries=10, max_resolution=64, width=16)
SMALL_VANILLA = VanillaConfig(width=32, depth=6)


@pytest.fixture(params=["ngp", "vanilla"])
def field(request: pytest.FixtureRequest) -> InstantNGP | VanillaNeRF:
    return InstantNGP(BOX, SMALL_NGP) if request.param == "ngp" else VanillaNeRF(BOX, SMALL_VANILLA)


def inputs(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(n, 3, generator=draw), dim=-1)
    return torch.rand(n, 3, generator=draw) * 3.0 - 1.5, directions


@pytest.mark.parametrize("n", [0, 1, 33])
def test_shapes_and_ranges(field: InstantNGP | VanillaNeRF, n: int):
    assert isinstance(field, Field)
    rgb, density = field(*inputs(n))
    assert rgb.shape == (n, 3) and density.shape == (n,)
    assert ((rgb >= 0) & (rgb <= 1)).all() and (density >= 0).all()
    assert torch.equal(field.density(inputs(n)[0]), density)


def test_starts_non_empty(field: InstantNGP | VanillaNeRF):
    """A field that starts at zero density would empty its grid at the first update."""
    assert field.density(inputs(100)[0]).min() > 0.05


@pytest.mark.parametrize("density", [0.02, 3.0])
@pytest.mark.parametrize("contraction", ["none", "cube"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_starts_with_the_density_asked_for(density: float, contraction: Contraction, backend: str):
    field = InstantNGP(BOX, replace(SMALL_NGP, initial_density=density))
    field.contraction = contraction
    positions, directions = inputs(200)
    with use_backend(backend):
        _, found = field(4.0 * positions, directions)
        assert torch.allclose(found, torch.full_like(found, density), rtol=0.01)
        assert torch.allclose(field.density(4.0 * positions), found, rtol=1e-5)
        found.mean().backward()
    assert all(part.grad is not None and part.grad.abs().sum() > 0 for part in field.density_net.parameters())
    assert field.encoding.table.grad is not None and field.encoding.table.grad.abs().sum() > 0


def test_a_thin_start_learns_to_be_dense_where_it_must():
    field = InstantNGP(BOX, replace(SMALL_NGP, initial_density=0.02))
    positions, directions = inputs(400)
    optimizer = torch.optim.Adam(field.parameters(), lr=1e-2, eps=1e-15)
    dense = positions[:, 0] > 0.0
    for _ in range(60):
        optimizer.zero_grad()
        log = field(positions, directions)[1].log()
        torch.where(dense, (log - 3.0).square(), (log + 5.0).square()).mean().backward()
        optimizer.step()
    found = field.density(positions)
    assert found[dense].median() > 5.0 and found[~dense].median() < 0.03


@pytest.mark.parametrize("density", [0.0, -1.0, math.inf, math.nan])
def test_a_start_without_density_is_refused(density: float):
    with pytest.raises(InputError, match="initial_density"):
        InstantNGP(BOX, replace(SMALL_NGP, initial_density=density))


def test_every_parameter_gets_a_gradient(field: InstantNGP | VanillaNeRF):
    rgb, density = field(*inputs(200))
    (rgb.sum() + density.sum()).backward()
    for name, parameter in field.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_same_seed_same_start():
    first, second, other = (InstantNGP(BOX, SMALL_NGP, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.encoding.table, second.encoding.table)
    assert not torch.equal(first.encoding.table, other.encoding.table)


def test_double_precision(field: InstantNGP | VanillaNeRF):
    positions, directions = (value.double() for value in inputs(5))
    rgb, density = field.double()(positions, directions)
    assert density.dtype == torch.float64
    assert rgb.dtype == (torch.float64 if isinstance(field, VanillaNeRF) else rgb.dtype)


def test_colour_depends_on_direction_density_does_not(field: InstantNGP | VanillaNeRF):
    positions, directions = inputs(50)
    first, second = field(positions, directions), field(positions, -directions)
    assert not torch.allclose(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("by_column", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_activated_logits_are_sigmoid_and_truncated_exp(dtype: torch.dtype, by_column: bool):
    logits = torch.randn(7, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[0, 3] = 30.0  # saturated
    logits = logits.t().contiguous().t() if by_column else logits
    plain, fused = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    want = torch.sigmoid(plain[:, :3]), truncated_exp(plain[:, 3])
    got = activated(fused)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)
    for values in (want, got):
        (values[0].float().square().sum() + values[1].sum()).backward()
    assert plain.grad is not None and fused.grad is not None
    torch.testing.assert_close(fused.grad, plain.grad, rtol=1e-6, atol=0.0)
    with torch.no_grad():
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(activated(logits), want, strict=True))


def test_activated_logits_have_second_derivatives_and_may_go_unused():
    logits = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(activated, (logits,)) and torch.autograd.gradgradcheck(activated, (logits,))
    activated(logits)[1].sum().backward()
    assert logits.grad is not None and (logits.grad[:, :3] == 0.0).all() and (logits.grad[:, 3] > 0.0).all()


def test_truncated_exp_saturates_but_still_learns():
    logits = torch.tensor([0.0, 14.0, 50.0], requires_grad=True)
    values = truncated_exp(logits)
    values.sum().backward()
    assert torch.isfinite(values).all()
    assert logits.grad is not None and (logits.grad > 0).all() and torch.isfinite(logits.grad).all()
    small = torch.randn(8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(truncated_exp, (small,))


def test_frequency_encoding_is_exact_in_half_input():
    """Arguments are widened first: sin(2^9 pi x) of a half-precision product would be noise."""
    values = torch.linspace(-1, 1, 65)[:, None]
    wide = frequency_encode(values, 10)
    half = frequency_encode(values.half(), 10)
    assert half.dtype == torch.float32
    assert torch.allclose(wide, half, atol=1e-3)  # these values are exact in half precision


@pytest.mark.parametrize("config", [NgpConfig(n_levels=2, log2_entries=8, width=16), VanillaConfig(width=16, depth=1)])
def test_a_field_is_made_where_a_device_context_asks(config: NgpConfig | VanillaConfig):
    """Its random numbers are still those of its seed, drawn on the CPU: Fabric's init_module is such a context."""
    with torch.device("meta"):
        field = build_field(config, Aabb.cube(1.0))
    assert {parameter.device.type for parameter in field.parameters()} == {"meta"}


def test_large_tables_are_drawn_in_parts_that_follow_the_seed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "CHUNK", 64)

    def drawn(seed: int) -> torch.Tensor:
        return parts.draw_uniform(75, 4, bound=0.5, generator=torch.Generator().manual_seed(seed)).reshape(-1)

    first, other = drawn(1), drawn(2)
    assert torch.equal(first, drawn(1)) and not torch.isin(first, other).any()
    assert len(first.unique()) == 300, "no part repeats another"
    assert -0.5 <= float(first.min()) < -0.45 and 0.45 < float(first.max()) <= 0.5
    assert float(first.mean()) == pytest.approx(0.0, abs=0.06)
