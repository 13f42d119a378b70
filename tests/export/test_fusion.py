"""Meshes of unbounded scenes: the surface that cameras see, where it is known exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nerfturbo.config import GridConfig
from nerfturbo.data.cameras import Cameras, look_at
from nerfturbo.errors import InputError
from nerfturbo.export.fusion import BLOCK, MAX_CAMERAS, TRUNCATION, few_and_small, fuse, median_depths, whole_cells
from nerfturbo.export.mesh import Mesh, MeshSettings, extract_mesh, voxel_size
from nerfturbo.export.texture import see
from nerfturbo.ops import use_backend
from nerfturbo.ops.march import pack_bits
from nerfturbo.rendering.image import rendering_within
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.types import Aabb

from ..tiny import tiny_config
from .test_exports import Toybox

RESOLUTION, STEP = 32, 0.04  # the fog of a slab begins somewhere in a step
BALL, WALL = 0.45, 1.2
BOX = Aabb.cube(1.5)


class Room(Toybox):
    """A ball in a room."""

    def distance(self, positions: Tensor) -> Tensor:
        return torch.minimum(positions.norm(dim=-1) - BALL, WALL - positions.abs().amax(-1))


class Slab(Toybox):
    """Half a space of fog."""

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        return 4.0 * (positions[:, 0] > 0.5).float()


def unbounded(field: Toybox, *, levels: int = 2) -> NerfModel:
    config = replace(tiny_config(), grid=GridConfig(resolution=8, levels=levels))
    made = NerfModel(config, SceneBounds(BOX, 0.0, 8.0))
    made.field = field
    made.grid.step_size = STEP
    made.grid.bits.copy_(pack_bits(torch.ones(made.grid.n_cells, dtype=torch.bool)))
    return made


def ring(n: int, *, radius: float = 0.9, inwards: bool = True, size: int = 26) -> Cameras:
    """Cameras around the ball that look at it, or away from it at the walls."""
    angles = torch.arange(n) * 2.4
    height = torch.linspace(-0.5, 0.5, n)
    across = (radius**2 - height**2).sqrt()
    eyes = torch.stack([across * angles.cos(), across * angles.sin(), height], dim=-1)
    poses = torch.cat([look_at(eyes[i : i + 1], eyes[i] * (0.0 if inwards else 2.0)) for i in range(n)])
    return Cameras.pinhole(poses, width=size, height=size, field_of_view_x=1.6)


def cameras_in_the_room() -> Cameras:
    inwards, outwards = ring(16), ring(16, radius=0.7, inwards=False)
    return replace(inwards, **{
        name: torch.cat([getattr(one, name) for one in (inwards, outwards)])
        for name in ("camera_to_world", "focal", "center", "size")
    })  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def in_large_parts() -> Iterator[None]:
    with use_backend("reference"), rendering_within(1 << 29):
        yield


@pytest.fixture(scope="module")
def model() -> NerfModel:
    return unbounded(Room())


@pytest.fixture(scope="module")
def mesh(model: NerfModel) -> Mesh:
    return extract_mesh(model, BOX, MeshSettings(RESOLUTION), cameras=cameras_in_the_room())


def test_the_mesh_lies_on_the_surface_that_cameras_see(model: NerfModel, mesh: Mesh) -> None:
    voxel, room = voxel_size(model, RESOLUTION), Room()
    middles = mesh.vertices[mesh.faces].mean(1)
    off = room.distance(torch.cat([mesh.vertices, middles])).abs() / voxel
    assert float(off.mean()) < 0.5 and float(off.quantile(0.99)) < 1.0
    corners = mesh.vertices[mesh.faces].double()
    outward = torch.linalg.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    ahead = room.distance(middles + 0.5 * voxel * torch.nn.functional.normalize(outward, dim=-1).float())
    assert float((ahead > room.distance(middles)).float().mean()) > 0.99


def test_a_camera_in_the_room_sees_ball_and_walls_without_holes(mesh: Mesh) -> None:
    for index, camera in enumerate([*ring(3, radius=0.8, size=60), *ring(3, radius=0.65, inwards=False, size=60)]):
        found, _ = see(mesh.vertices, mesh.faces, camera)
        assert float((found.face >= 0).float().mean()) > 0.995, index
        seen = found.face >= 0
        points = (mesh.vertices[mesh.faces[found.face[seen]]] * found.weights[seen][..., None]).sum(1)
        assert float(Room().distance(points).abs().mean()) < 0.5 * 3.0 / RESOLUTION, index


def test_depths_are_where_light_is_halved() -> None:
    model = unbounded(Slab())
    for ahead in (1.0, -1.0):
        pose = look_at(torch.zeros(1, 3), torch.tensor([ahead, 0.0, 0.0]))
        camera = Cameras.pinhole(pose, width=12, height=9, field_of_view_x=1.0)
        depths, rays = median_depths(model, camera), camera.image_rays(0)
        if ahead > 0.0:
            assert float((depths - 0.5 / rays.directions[:, 0] - math.log(2.0) / 4.0).abs().max()) < 0.6 * STEP
        else:
            assert depths.shape == (108,) and not bool(depths.isfinite().any())


def test_where_no_camera_looks_there_is_nothing(model: NerfModel) -> None:
    eyes = torch.tensor([[0.7, 0.0, 0.0]])
    one = Cameras.pinhole(look_at(eyes, torch.tensor([2.0, 0.0, 0.0])), width=40, height=40, field_of_view_x=1.0)
    made = extract_mesh(model, BOX, MeshSettings(RESOLUTION), cameras=one)
    assert float((made.vertices[:, 0] - WALL).abs().max()) < 0.06
    edge = (WALL - 0.7) * math.tan(0.5)
    assert edge - 0.15 < float(made.vertices[:, 1:].abs().max()) < edge + 0.07


def test_distances_are_those_to_the_surface_and_unknown_where_nobody_sees(model: NerfModel) -> None:
    voxel, shares = voxel_size(model, RESOLUTION), []
    behind = fuse(model, cameras_in_the_room(), BOX, voxel, progress=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0
    places = torch.cartesian_prod(*[torch.arange(RESOLUTION + 1) * voxel - 1.5] * 3)
    assert behind.shape == (RESOLUTION + 1,) * 3
    distance, known = Room().distance(places) / voxel, behind.isfinite().view(-1)
    assert bool(known[(distance.abs() < 1.5) & (places.abs().amax(-1) < WALL - 0.1)].all())
    assert not bool(known[distance < -BLOCK - TRUNCATION].any())  # in the ball's middle
    near = known & (distance.abs() < 1.5)
    error = (behind.view(-1)[near] * TRUNCATION + distance[near]).abs()
    assert float(error.mean()) < 1.0
    brute = behind.isfinite().unfold(0, 2, 1).unfold(1, 2, 1).unfold(2, 2, 1).flatten(3).all(-1)
    assert torch.equal(whole_cells(behind)[1:, 1:, 1:], brute) and not bool(whole_cells(behind)[0].any())


def test_scenes_that_move_are_looked_at_as_they_are_exported() -> None:
    moving = replace(ring(100, size=12), times=torch.linspace(0.0, 1.0, 100))
    few = few_and_small(moving, torch.device("cpu"))
    assert len(few) == MAX_CAMERAS and few.times is not None and not bool(few.times.any())


def test_objects_given_densities_and_hidden_surfaces_have_a_level(
    model: NerfModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nerfturbo.export.mesh.fuse", lambda *_, **__: pytest.fail("fused"))
    cameras = ring(4, size=12)
    for made, density, looking in ((unbounded(Room(), levels=1), None, cameras), (model, 50.0, cameras)):
        assert len(extract_mesh(made, BOX, MeshSettings(16, density), cameras=looking).faces)
    assert len(extract_mesh(model, BOX, MeshSettings(16), cameras=None).faces)


def test_what_cannot_be_fused_is_refused(model: NerfModel, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Aabb.cube(0.2)
    with pytest.raises(InputError, match="no camera of training sees the surface there"):
        extract_mesh(model, small, MeshSettings(16), cameras=ring(4, size=12))  # inside the ball
    cameras, points = cameras_in_the_room(), 17**3
    for free, said in ((8 * points - 1, "--resolution: expected what fits"), (8 * points, "--resolution: expected")):
        monkeypatch.setattr("nerfturbo.data.pool_file.available_memory", lambda free=free: free)
        with pytest.raises(InputError, match=said):
            extract_mesh(model, BOX, MeshSettings(16), cameras=cameras)
    monkeypatch.setattr("nerfturbo.export.fusion.few_and_small", lambda *_: pytest.fail("rendered"))
    with pytest.raises(InputError, match="--resolution: expected at most"):
        extract_mesh(model, BOX, MeshSettings(2048), cameras=cameras)
