"""Sparse voxels as a field: continuous, unchanged by subdivision where kept, as large as what is occupied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nerfturbo.config import VoxelConfig
from nerfturbo.errors import InputError
from nerfturbo.fields import VoxelGrid
from nerfturbo.fields.field import is_adaptive, offers
from nerfturbo.fields.voxels import dense_structure, split_nodes
from nerfturbo.ops import use_backend
from nerfturbo.types import Aabb

from ..ops.cases import generator

BOX = Aabb((-1.0, -2.0, 0.0), (1.0, 1.0, 1.5))


@pytest.fixture(autouse=True)
def _reference() -> object:
    with use_backend("reference"):
        yield


def make_field(resolutions: tuple[int, ...] = (6, 12, 24), *, degree: int = 2, max_nodes: int = 10**6) -> VoxelGrid:
    """Random values, of moderate densities."""
    shares = tuple((i + 1.0) / (len(resolutions) + 1.0) for i in range(len(resolutions) - 1))
    config = VoxelConfig(resolutions=resolutions, subdivide_at=shares, max_nodes=max_nodes, sh_degree=degree)
    field = VoxelGrid(BOX, config)
    with torch.no_grad():
        field.density_table.normal_(0.0, 0.1, generator=generator(1))
        field.color_table.normal_(generator=generator(2))
    return field


def points(n: int, seed: int = 3) -> Tensor:
    low, high = BOX.tensor()
    return low + (high - low) * torch.rand(n, 3, generator=generator(seed))


def directions(n: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(n, 3, generator=generator(4)), dim=-1)


def ball_marks(field: VoxelGrid, radius: float = 0.5, n: int = 4000) -> tuple[Tensor, Tensor]:
    """Marks of samples in a ball around the middle of the box, and those samples."""
    middle = torch.tensor(BOX.center)
    samples = middle + radius * directions(n) * torch.rand(n, 1, generator=generator(5))
    marks = field.new_marks()
    field.mark(marks, samples, torch.full((n,), 0.5))
    return marks, samples


def test_it_is_what_rendering_and_training_look_for() -> None:
    field = make_field()
    assert is_adaptive(field)
    assert offers(field, "sample_density", "sample_logits")
    assert torch.allclose(field.density(points(20)), field(points(20), directions(20))[1])
    with torch.no_grad():
        assert torch.allclose(field.density(points(20)), field(points(20), directions(20))[1], rtol=1e-5)


def test_dividing_by_two_changes_nothing_where_something_was_seen() -> None:
    """Values in kept voxels are the same to rounding, through both subdivisions: colour, density and its gradient."""
    field, where = make_field(), directions(4000)
    marks, samples = ball_marks(field)
    with torch.no_grad():
        before = field(samples, where)
        for stage in (1, 2):
            field.refine(marks)
            assert (field.stage, field.resolution) == (stage, 6 << stage)
            for old, new in zip(before, field(samples, where), strict=True):
                assert torch.allclose(old, new, rtol=1e-4, atol=1e-5)
            marks, _ = ball_marks(field)
    outside = points(4000)
    far = (outside - torch.tensor(BOX.center)).norm(dim=-1) > 1.2
    assert float(field.density(outside[far]).detach().max()) < 1e-4  # and nothing is left where nothing was seen


def test_what_is_seen_stays_whole_and_its_neighbours_too() -> None:
    """The voxel of every sample above the threshold and the 26 around it are stored after pruning."""
    field = make_field((8, 16))
    samples = points(12, seed=9)
    weights = torch.cat([torch.linspace(0.0, 0.009, 4), torch.linspace(0.01, 0.9, 8)])
    marks = field.new_marks()
    field.mark(marks, samples, weights)
    field.refine(marks)
    stored = set(field.nodes.tolist())
    cells = (BOX.normalize(samples) * 8).floor().long()
    for cell, weight in zip(cells.tolist(), weights.tolist(), strict=True):
        if weight < 0.01:
            continue
        low, high = [max(0, 2 * (c - 1)) for c in cell], [min(16, 2 * (c + 2)) for c in cell]
        for x in range(low[0], high[0] + 1):
            for y in range(low[1], high[1] + 1):
                for z in range(low[2], high[2] + 1):
                    assert (x * 17 + y) * 17 + z in stored


def test_no_seams_after_pruning() -> None:
    """Across every face, between stored and missing voxels too, values before and behind are the same."""
    field = make_field((8, 16))
    field.refine(ball_marks(field)[0])
    r, n = field.resolution, 3000
    unit = torch.rand(n, 3, generator=generator(6))
    axis, face = torch.arange(n) % 3, torch.randint(1, r, (n,), generator=generator(7)) / r
    low, high = BOX.tensor()
    found = []
    for side in (-1e-6, 1e-6):
        unit[torch.arange(n), axis] = face + side
        with torch.no_grad():
            rgb, density = field(low + (high - low) * unit, directions(n))
        found.append((rgb, density.log()))
    for before, behind in zip(*found, strict=True):
        assert (before - behind).abs().max() < 2e-3
    inside = found[0][1] > -5.0
    assert 0.1 < inside.float().mean() < 0.9  # both sides of the border of what is stored were tried


def test_memory_follows_what_is_occupied() -> None:
    """A thin shell costs about as much as its area, in voxels; the empty rest nothing."""
    sizes = {}
    for resolution in (16, 32, 48):
        field = make_field((resolution // 2, resolution))
        shell = torch.tensor(BOX.center) + 0.6 * directions(9_000)
        marks = field.new_marks()
        field.mark(marks, shell, torch.ones(9_000))
        field.refine(marks)
        sizes[resolution] = (field.n_nodes, field.memory_bytes)
    dense = dense_structure(48).nodes.shape[0]
    assert sizes[48][0] < 0.3 * dense
    for number in (0, 1):  # nodes and bytes: an area grows by 4 and by 2.25 here, a volume by 8 and by 3.4
        assert sizes[32][number] / sizes[16][number] < 6.0 and sizes[48][number] / sizes[32][number] < 2.8
    per_node = sizes[48][1] / sizes[48][0]
    assert per_node < 1.5 * 4 * (1 + 12 + 1)  # 13 numbers and where they lie; the blocks cost less than half of it


def test_a_stage_that_does_not_fit_becomes_coarser_not_emptier() -> None:
    field = make_field((8, 32), max_nodes=2500)
    marks, samples = ball_marks(field)
    field.refine(marks)
    assert field.n_nodes <= 2500 and 8 < field.resolution < 32 and field.stage == 1
    assert float(field.density(samples).detach().min()) > 1e-3  # everything that was seen is still there
    assert not field.refinement_due(1.0, 10**6)


def test_a_thin_fog_is_not_pruned() -> None:
    """Early on no sample weighs much, yet together they are the picture: the threshold falls with the mean."""
    field = make_field((6, 12))
    marks = field.new_marks()
    field.mark(marks, points(3000), 1e-3 + 1e-4 * torch.rand(3000, generator=generator(8)))
    field.refine(marks)
    assert field.n_nodes == 13**3


def test_when_a_stage_ends() -> None:
    field = make_field((6, 12))
    cases = [(0.3, 10**4), (0.6, 199), (0.6, 200)]
    assert [field.refinement_due(*case) for case in cases] == [False, False, True]


def test_nothing_seen_removes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    field = make_field((4, 8))
    field.refine(field.new_marks())
    assert (field.n_nodes, field.resolution, field.stage) == (125, 4, 1)
    assert "no voxel is seen" in caplog.text


def test_carried_tensors_are_interpolated_and_moments_of_new_places_are_zero() -> None:
    field = make_field((4, 8))
    x, _, _ = split_nodes(field.nodes, 4)
    ramp = x.float()[:, None].repeat(1, 12)
    carry = field.refine(ball_marks(field, 0.9)[0])
    moved, (x, _, _) = carry("color_table.first", ramp), split_nodes(field.nodes, 8)
    assert torch.allclose(moved, x.float()[:, None].repeat(1, 12) * 0.5, atol=1e-5)
    assert carry("density_table.second", ramp[:, 0].contiguous()).shape == field.density_table.shape
    assert torch.equal(carry("other", torch.ones(3)), torch.ones(3))


def test_a_state_of_other_shapes_is_taken_whole() -> None:
    field, other = make_field(), make_field()
    field.refine(ball_marks(field)[0])
    other.load_state_dict(field.state_dict())
    assert (other.resolution, other.stage, other.n_nodes) == (field.resolution, field.stage, field.n_nodes)
    assert torch.equal(other.density(points(50)), field.density(points(50)))
    with pytest.raises(RuntimeError, match="color_table"):
        make_field(degree=3).load_state_dict(field.state_dict())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"resolutions": (8, 8), "subdivide_at": (0.5,)}, "field.resolutions: expected growing numbers"),
        ({"resolutions": (8, 16)}, "field.subdivide_at: expected 1 growing shares"),
        ({"resolutions": (8, 4096), "subdivide_at": (0.5,)}, "from 2 to 1023"),
        ({"max_nodes": 0}, "field.max_nodes: expected a whole number from"),
        ({"sh_degree": 5}, "field.sh_degree: expected"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        VoxelConfig(**values)  # type: ignore[arg-type]
