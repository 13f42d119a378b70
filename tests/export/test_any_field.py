"""Exports of a field of somebody else's: a module with `density` and `forward`, and nothing more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nerfturbo.errors import InputError
from nerfturbo.evaluation.images import CHANNELS
from nerfturbo.export.frames import FrameMaker, Look
from nerfturbo.export.mesh import MeshSettings, colors_from_outside, export_box, extract_mesh, write_mesh
from nerfturbo.export.onnx import write_onnx
from nerfturbo.export.points import extract_points, write_points
from nerfturbo.export.web.bake import BakeSettings, bake, score
from nerfturbo.export.web.page import PageFacts, write_page
from nerfturbo.ops import use_backend
from nerfturbo.ops.march import pack_bits
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.types import Aabb, PackedSamples

from ..tiny import BALL, ball_scene, tiny_config


class TwoLayers(nn.Module):
    """Two linear layers over |x|: a ball, dense inside, whose colour depends on the place and a little on the view."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(7, 8), nn.Linear(8, 4)
        with torch.no_grad():
            self.hidden.weight.copy_(torch.eye(8, 7))
            self.hidden.bias.copy_(torch.tensor([2.0] * 6 + [0.0, 0.0]))
            self.out.weight.zero_()
            self.out.weight[:3, :3] = torch.eye(3)  # colours by place
            self.out.weight[2, 5] = 0.2  # and blue by direction
            self.out.bias.copy_(torch.tensor([-2.0, -2.0, -2.0, 800.0 * BALL]))
            self.out.weight[3, 6] = -800.0

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        return self(positions, torch.zeros_like(positions))[1]

    def forward(self, positions, directions, times=None, camera_indices=None):
        inputs = torch.cat([positions, directions, positions.norm(dim=-1, keepdim=True)], dim=-1)
        found = self.out(torch.relu(self.hidden(inputs)))
        return torch.sigmoid(found[:, :3]), nn.functional.softplus(found[:, 3])


class Untraceable(TwoLayers):
    """The same with an operation that ONNX does not have."""

    def forward(self, positions, directions, times=None, camera_indices=None):
        rgb, density = super().forward(positions, directions)
        return rgb, density + torch.special.bessel_j1(0.0 * density)


class WithTwin(Untraceable):
    def for_export(self) -> nn.Module:
        twin = TwoLayers()
        twin.load_state_dict(self.state_dict())
        return twin


def model_of(field: nn.Module) -> NerfModel:
    made = NerfModel(tiny_config(), SceneBounds(Aabb.cube(1.5), 0.0, 8.0), field=field)
    made.grid.step_size = 0.03
    centers = made.grid.cell_positions(torch.arange(made.grid.n_cells))
    made.grid.bits.copy_(pack_bits(centers.norm(dim=-1) < BALL + 0.4))
    return made


@pytest.fixture(scope="module")
def model() -> NerfModel:
    return model_of(TwoLayers())


def test_mesh_and_points_lie_on_its_surface(model: NerfModel, tmp_path: Path) -> None:
    cameras, box = ball_scene(n_views=6, size=24).cameras, export_box(model, None)
    with use_backend("reference"):
        mesh = extract_mesh(model, box, MeshSettings(24), cameras=cameras)
        cloud = extract_points(model, cameras, box, 200)
    for places, colors in ((mesh.vertices, mesh.colors), (cloud.positions, cloud.colors)):
        assert float((places.norm(dim=-1) - BALL).abs().mean()) < 0.08
        assert float((colors[:, 0] - torch.sigmoid(places[:, 0])).abs().mean()) < 0.03
    write_mesh(tmp_path / "a.ply", mesh)
    write_points(tmp_path / "b.ply", cloud)
    assert {path.name for path in tmp_path.iterdir()} == {"a.ply", "b.ply"}


def test_every_channel_of_a_frame_is_made(model: NerfModel) -> None:
    with use_backend("reference"):
        frame = FrameMaker(model, ball_scene(size=12).cameras, Look(channels=CHANNELS)).frame(0)
    assert [image.shape for image in frame.values()] == [(12, 12, 3)] * len(CHANNELS)


def test_it_is_baked_into_a_page(model: NerfModel, tmp_path: Path) -> None:
    scene = ball_scene(n_views=4, size=24)
    result = bake(model, scene.cameras, BakeSettings(60_000.0, tune_steps=5, n_rays=2048))
    found = score(model, result.baked, scene, views=1)
    assert found.against_field > 20.0
    size = write_page(tmp_path / "a.html", result, scene.cameras, PageFacts("ball", found, 1.0))
    assert (tmp_path / "a.html").stat().st_size == size


@pytest.mark.parametrize("field", [TwoLayers, WithTwin])
def test_onnx_answers_as_it_does(tmp_path: Path, field: type[nn.Module]) -> None:
    check = write_onnx(tmp_path / "a.onnx", model_of(field()))
    assert check.color_error < 1e-5 and check.density_error < 1e-4


def test_an_operation_that_onnx_does_not_have_is_named_with_the_field(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"field Untraceable: .*bessel_j1.*for_export"):
        write_onnx(tmp_path / "a.onnx", model_of(Untraceable()))
    assert not list(tmp_path.iterdir())


class LooksFurtherOn:
    """A sampler of one's own: four samples a ray, none nearer than half a unit, whatever the ray is asked for."""

    samples_per_ray, evaluations_per_ray = 4, 0

    def sample(self, rays, *, draw=None, n_active=None, capacity=None) -> PackedSamples:
        starts = (0.5 + 0.5 * torch.arange(4, device=rays.device)).repeat(len(rays))
        return PackedSamples.from_counts(torch.full((len(rays),), 4), starts, starts + 0.5)


def test_colors_of_a_surface_are_not_those_of_what_a_sampler_sees_behind_it() -> None:
    """Proposals begin at the scene's near plane: from a surface on, that is deep inside or behind it."""
    plain = model_of(TwoLayers())
    other = NerfModel(tiny_config(), plain.bounds, field=plain.field, sampler=LooksFurtherOn())
    other.grid = plain.grid
    outward = torch.nn.functional.normalize(torch.randn(50, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    with use_backend("reference"):
        first, second = (colors_from_outside(made, BALL * outward, outward, 0.2) for made in (plain, other))
    logits = BALL * outward
    logits[:, 2] += 0.2 * (2.0 - outward[:, 2])
    assert torch.equal(first, second) and float((first - torch.sigmoid(logits)).abs().max()) < 0.05
