"""Planes and lines: what the sum of products is, and what stays when they become finer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nerfturbo.config import FactorConfig
from nerfturbo.errors import InputError
from nerfturbo.fields import FactorField
from nerfturbo.fields.field import is_adaptive
from nerfturbo.ops import use_backend
from nerfturbo.types import Aabb

from ..ops.cases import generator


@pytest.fixture(autouse=True)
def _reference() -> object:
    with use_backend("reference"):
        yield


def make_field(sizes: tuple[int, ...] = (5, 9)) -> FactorField:
    config = FactorConfig(sizes, (0.5,) * (len(sizes) - 1), components=(3, 2), width=16)
    return FactorField(Aabb.cube(1.0), config)


def points(n: int) -> Tensor:
    return torch.rand(n, 3, generator=generator(1)) * 2.0 - 1.0


def test_the_density_is_the_sum_of_products_at_nodes() -> None:
    field = make_field((5,))
    planes, lines = field.get_parameter("density_planes"), field.get_parameter("density_lines")[..., 0]
    x, y, z = 3, 1, 4
    total = (planes[0, :, x, y] * lines[0, :, z]).sum() + (planes[1, :, x, z] * lines[1, :, y]).sum()
    total = total + (planes[2, :, y, z] * lines[2, :, x]).sum()
    place = torch.tensor([[x, y, z]]) / 4.0 * 2.0 - 1.0
    assert field.density(place).log().item() == pytest.approx(float(total) + torch.tensor(0.1).log().item(), abs=1e-4)


def test_every_parameter_gets_a_gradient() -> None:
    field = make_field()
    rgb, density = field(points(200), nn.functional.normalize(torch.ones(200, 3), dim=-1))
    (rgb.sum() + density.sum()).backward()
    for name, parameter in field.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.any()), name


def test_nodes_stay_where_the_finer_ones_meet_them() -> None:
    field = make_field()
    assert is_adaptive(field) and not field.refinement_due(0.5, 199) and field.refinement_due(0.5, 200)
    steps = torch.arange(5) / 2.0 - 1.0
    nodes = torch.cartesian_prod(steps, steps, steps)
    before = field.density(nodes).detach()
    carry = field.refine(field.new_marks())
    assert (field.resolution, field.stage) == (9, 1)
    assert torch.allclose(field.density(nodes), before, rtol=1e-4)
    moved = carry("color_lines.second", torch.ones(3, 2, 5, 1))
    assert moved.shape == (3, 2, 9, 1) and bool((moved == 1.0).all())
    assert carry("color_net.weights.0.first", torch.ones(2)).shape == (2,)
    other = make_field()
    other.load_state_dict(field.state_dict())
    assert torch.equal(other.density(nodes), field.density(nodes))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"resolutions": (9, 5), "refine_at": (0.5,)}, "field.resolutions: expected growing"),
        ({"resolutions": (5, 9), "refine_at": ()}, "field.refine_at: expected 1 growing"),
        ({"components": (8, 0)}, "field.components: expected a whole number from 1"),
        ({"components": (8,)}, "field.components: expected two numbers"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FactorConfig(**values)  # type: ignore[arg-type]
