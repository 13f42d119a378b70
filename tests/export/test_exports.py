"""Exports of a known surface: where it is, how it is coloured, what the files hold, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nerfturbo.config import GridConfig
from nerfturbo.data.cameras import similarity_scale
from nerfturbo.errors import InputError
from nerfturbo.export.grid import write_grid
from nerfturbo.export.mesh import (
    Mesh,
    MeshSettings,
    Up,
    check_mesh_path,
    density_volume,
    export_box,
    extract_mesh,
    seen_by,
    voxel_size,
    write_mesh,
)
from nerfturbo.export.onnx import compare, write_onnx
from nerfturbo.export.points import extract_points, write_points
from nerfturbo.ops import use_backend
from nerfturbo.ops.march import pack_bits
from nerfturbo.ops.march.reference import is_occupied
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.sampling.grid import level_occupancy
from nerfturbo.types import Aabb
from scene_distance import signed_distance
from surface import score_surface, surface_points

from ..evaluation.test_camera_path import similarity
from ..tiny import ball_scene, tiny_config

RESOLUTION = 36
HALF = 200.0  # half the density inside: exactly at the surface
LID = 0.9  # of the ball


class Toybox(torch.nn.Module):
    """The built-in scene itself as a field: opaque inside its exact surface, red on the left and blue on the right."""

    def distance(self, positions: torch.Tensor) -> torch.Tensor:
        return signed_distance("toybox", positions)

    def density(self, positions: torch.Tensor, times: torch.Tensor | None = None) -> torch.Tensor:
        return 400.0 * torch.sigmoid(-self.distance(positions) * 100.0)

    def forward(self, positions, directions, times=None, camera_indices=None):
        left = (positions[:, :1] < 0.0).float()
        return torch.cat([left, torch.zeros_like(left), 1.0 - left], dim=-1), self.density(positions)


class HollowBall(Toybox):
    """A shell: cameras outside never see its inner surface."""

    def distance(self, positions: torch.Tensor) -> torch.Tensor:
        radius = positions.norm(dim=-1)
        return torch.maximum(radius - LID, 0.5 - radius)


def make_model(field: Toybox) -> NerfModel:
    made = NerfModel(tiny_config(), SceneBounds(Aabb.cube(1.5), 0.0, 8.0))
    made.field = field
    made.grid.step_size = 0.03
    centers = made.grid.cell_positions(torch.arange(made.grid.n_cells))
    made.grid.bits.copy_(pack_bits(field.distance(centers).abs() < 0.4))
    return made


@pytest.fixture(scope="module")
def toybox() -> NerfModel:
    return make_model(Toybox())


@pytest.fixture(scope="module")
def model() -> NerfModel:
    return make_model(HollowBall())


@pytest.fixture(scope="module")
def mesh(model: NerfModel) -> Mesh:
    with use_backend("reference"):
        return extract_mesh(
            model, export_box(model, None), MeshSettings(32, HALF), cameras=ball_scene(n_views=6, size=24).cameras
        )


def test_the_mesh_of_a_built_in_scene_is_its_exact_surface_both_ways(toybox: NerfModel) -> None:
    voxel = voxel_size(toybox, RESOLUTION)
    truth = surface_points("toybox", 2000)
    assert float(signed_distance("toybox", truth).abs().max()) < 1e-3
    with use_backend("reference"):
        made = extract_mesh(toybox, export_box(toybox, None), MeshSettings(RESOLUTION, HALF))
    score = score_surface(made, "toybox", torch.ones(2000, dtype=torch.bool), truth, voxel=voxel)
    assert score.accuracy < 0.75 and score.completeness < 0.75, score


@pytest.mark.parametrize(
    ("name", "up", "axis"),
    [("a.glb", None, 1), ("a.glb", "z", 2), ("a.ply", "y", 1), ("a.obj", None, 1), ("a.obj", "z", 2)],
)
def test_a_mesh_stands_upright(tmp_path: Path, name: str, up: Up | None, axis: int) -> None:
    """A pole along training's z, which the scene's own file has in some other direction."""
    import trimesh

    pole = torch.tensor([[0.0, 0.0, 0.0], [0.1, 0.0, 0.0], [0.0, 0.0, 3.0]])
    made = Mesh(pole, torch.tensor([[0, 1, 2]]), torch.tensor([[0.0, -1.0, 0.0]] * 3), torch.full((3, 3), 0.5))
    write_mesh(tmp_path / name, made, similarity(), up=up)
    found = trimesh.load(tmp_path / name, force="mesh", process=False).vertices
    along = found[found[:, axis].argmax()] - found[found[:, axis].argmin()]
    assert along[axis] > 0.99 * np.linalg.norm(along)
    assert np.linalg.norm(along) == pytest.approx(3.0 * float(similarity_scale(similarity())), rel=0.01)


def test_what_no_camera_sees_is_left_out(model: NerfModel, mesh: Mesh) -> None:
    radius = mesh.vertices.norm(dim=-1)
    assert float(radius.min()) > 0.7 and float((radius - LID).abs().mean()) < 0.03  # the inner surface is at 0.5
    assert float(mesh.vertices[:, 2].min()) > -0.85  # the cameras stand above: the lowest part is hidden
    points = torch.tensor([[0.0, 0.0, LID], [0.0, 0.0, 0.5], [0.0, 0.0, -LID], [0.0, 0.0, 1.05]])
    with use_backend("reference"):
        seen = seen_by(model, ball_scene(n_views=6, size=24).cameras, points, 0.1)
    assert seen.tolist() == [True, False, False, True]


def test_faces_and_normals_look_outwards_and_colors_are_those_of_the_surface(mesh: Mesh) -> None:
    corners = mesh.vertices[mesh.faces]
    crossed = torch.linalg.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    assert float(((crossed * corners.mean(1)).sum(-1) > 0.0).float().mean()) > 0.99
    assert float((mesh.normals * torch.nn.functional.normalize(mesh.vertices, dim=-1)).sum(-1).mean()) > 0.95
    for side, channel in ((mesh.vertices[:, 0] < -0.2, 0), (mesh.vertices[:, 0] > 0.2, 2)):
        assert float(mesh.colors[side, channel].min()) > 0.95


@pytest.mark.parametrize("ending", [".glb", ".ply", ".obj"])
def test_files_hold_the_mesh_in_original_coordinates(mesh: Mesh, tmp_path: Path, ending: str) -> None:
    import trimesh

    back = similarity()
    write_mesh(tmp_path / f"a{ending}", mesh, back, up=None if ending == ".ply" else "file")
    read = next(iter(trimesh.load_scene(tmp_path / f"a{ending}", process=False).geometry.values()))
    moved = mesh.vertices.double() @ back[:3, :3].T + back[:3, 3]
    turned = torch.nn.functional.normalize(mesh.normals.double() @ back[:3, :3].T, dim=-1)
    assert len(read.faces) == mesh.faces.shape[0]
    corners = mesh.faces.reshape(-1) if ending == ".glb" else slice(None)  # of each triangle, for its texture
    assert np.abs(np.sort(read.vertices, axis=0) - np.sort(moved[corners].numpy(), axis=0)).max() < 1e-4
    if ending != ".obj":
        assert np.abs(read.vertex_normals - turned[corners].numpy()).max() < 1e-3
        colors = read.visual.to_color() if ending == ".glb" else read.visual
        assert np.abs(colors.vertex_colors[:, :3] / 255.0 - mesh.colors[corners].numpy()).max() < 0.01
    if ending == ".glb":
        content = (tmp_path / "a.glb").read_bytes()
        tree = json.loads(content[20 : 20 + struct.unpack("<I", content[12:16])[0]])
        part = tree["meshes"][0]["primitives"][0]
        assert "KHR_materials_unlit" in tree["materials"][0]["extensions"] and part["material"] == 0
        assert {"TEXCOORD_0", "NORMAL", "POSITION"} == set(part["attributes"])  # COLOR_0 would dim the texture
        assert tree["samplers"][tree["textures"][0]["sampler"]]["minFilter"] == 9729  # a mipmap would mix triangles
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_mesh_is_decimated_and_what_is_hidden_can_be_kept(model: NerfModel, mesh: Mesh) -> None:
    box = Aabb((-0.8, -0.8, -0.9), (0.3, 0.8, 0.9))
    with use_backend("reference"):
        small = extract_mesh(model, box, MeshSettings(24, n_faces=300), cameras=None)
        whole = extract_mesh(model, box, MeshSettings(24), cameras=None)
    assert small.faces.shape[0] <= 301 < whole.faces.shape[0]
    low, high = box.tensor()
    assert bool((whole.vertices >= low).all()) and bool((whole.vertices <= high).all())


def test_the_volume_asks_only_in_occupied_cells(model: NerfModel, monkeypatch: pytest.MonkeyPatch) -> None:
    box, asked, field_density = export_box(model, None), [], model.field.density
    monkeypatch.setattr(model.field, "density", lambda x: (asked.append(x), field_density(x))[1])
    voxel = voxel_size(model, 24)
    density = density_volume(model, box, voxel)
    assert 0 < sum(len(part) for part in asked) < density.numel()
    place = (density.nonzero() - 1) * voxel + torch.tensor(box.low)
    assert place.shape[0] > 0 and bool(is_occupied(model.grid.occupancy, torch.cat([place, *asked])).all())
    faces = (density[0], density[-1], density[:, 0], density[..., -1])
    assert all(float(face.abs().max()) == 0.0 for face in faces)


def test_an_empty_box_fails_before_the_field_is_asked(model: NerfModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.field, "density", lambda *_: pytest.fail("asked"))
    with pytest.raises(InputError, match=r"--box: .*what is occupied lies in \(-1.125, -1.125, -1.125\) to"):
        export_box(model, Aabb((1.2, 1.2, 1.2), (1.4, 1.4, 1.4)))
    with pytest.raises(InputError, match="resolution"):
        voxel_size(model, 2)
    kept = model.grid.bits.clone()
    model.grid.bits.zero_()
    with pytest.raises(InputError, match="occupancy grid that is empty"):
        export_box(model, None)
    model.grid.bits.copy_(kept)


def test_points_lie_on_the_surface(model: NerfModel, tmp_path: Path) -> None:
    import trimesh

    with use_backend("reference"):
        cloud = extract_points(model, ball_scene(n_views=4, size=24).cameras, export_box(model, None), 300)
    assert 200 < cloud.positions.shape[0] <= 300
    assert float((cloud.positions.norm(dim=-1) - LID).abs().mean()) < 0.04
    assert float((cloud.normals * torch.nn.functional.normalize(cloud.positions, dim=-1)).sum(-1).mean()) > 0.9
    write_points(tmp_path / "a.ply", cloud, similarity())
    read = trimesh.load(tmp_path / "a.ply")
    moved = cloud.positions.double() @ similarity()[:3, :3].T + similarity()[:3, 3]
    assert np.abs(read.vertices - moved.numpy()).max() < 1e-4
    assert np.abs(read.colors[:, :3] / 255.0 - cloud.colors.numpy()).max() < 0.01


class Fog(Toybox):
    """The same density everywhere in the scene's box: what a field begins as."""

    def __init__(self, thickness: float) -> None:
        super().__init__()
        self.thickness = thickness

    def distance(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(positions[:, 0])  # all of it is occupied

    def density(self, positions: torch.Tensor, times: torch.Tensor | None = None) -> torch.Tensor:
        return torch.full_like(positions[:, 0], self.thickness)


def test_more_points_than_fit_the_memory_are_refused(model: NerfModel, monkeypatch: pytest.MonkeyPatch) -> None:
    cameras, box = ball_scene(n_views=2, size=12).cameras, export_box(model, None)
    for free, says in ((12_799, "--points: expected what fits the 0 MB of free memory"), (12_800, "none")):
        monkeypatch.setattr("nerfturbo.data.pool_file.available_memory", lambda free=free: free)
        with use_backend("reference"), pytest.raises(InputError, match=says):
            extract_points(make_model(Fog(0.05)), cameras, box, 100)


def test_where_there_are_no_points_the_error_says_why(model: NerfModel) -> None:
    cameras = ball_scene(n_views=2, size=12).cameras
    with use_backend("reference"):
        for thickness, got in (
            (0.05, r"no pixel .* is more than \d+% opaque"),
            (0.4, r"\d+ opaque pixels .* thin fog"),
        ):
            fog = make_model(Fog(thickness))
            with pytest.raises(InputError, match=got + ".*; train it longer") as error:
                extract_points(fog, cameras, export_box(fog, None), 100)
            assert "--box" not in str(error.value)
        inside = Aabb((-0.3, -0.3, -0.3), (0.3, 0.3, 0.3))  # of the hollow ball, which no camera sees
        with pytest.raises(
            InputError, match=r"none in \(-0\.3, .*; choose another --box: what they see lies in"
        ) as error:
            extract_points(model, cameras, inside, 100)
    numbers = [float(word) for word in re.findall(r"-?\d\.\d+", str(error.value).split("lies in")[1])]
    assert len(numbers) >= 4 and 0.7 < max(map(abs, numbers)) <= 1.0  # the ball, 0.9 from its centre


def test_the_grid_comes_back(model: NerfModel, tmp_path: Path) -> None:
    write_grid(tmp_path / "g.npz", model.grid, None)
    found = np.load(tmp_path / "g.npz")
    assert np.array_equal(found["occupied"], level_occupancy(model.grid).numpy())
    assert found["low"].tolist() == [[-1.5] * 3] and np.array_equal(found["to_original"], np.eye(4))


@pytest.mark.parametrize("contraction", ["none", "sphere"])
def test_onnx_answers_as_torch_does(tmp_path: Path, contraction: Any) -> None:
    config = replace(tiny_config(), grid=GridConfig(resolution=8, levels=3, contraction=contraction))
    model = NerfModel(config, SceneBounds.of(ball_scene()))
    with torch.no_grad():
        model.field.encoding.table.uniform_(-1.0, 1.0, generator=torch.Generator().manual_seed(0))
    with use_backend("reference"):
        check = write_onnx(tmp_path / "a.onnx", model)
        assert check.color_error < 1e-5 and check.density_error < 1e-4
        assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]
        with torch.no_grad():
            model.field.density_net.weights[0].mul_(1.5)  # another field: the check must notice
        assert compare(tmp_path / "a.onnx", model).density_error > 1e-2
    import onnxruntime

    session = onnxruntime.InferenceSession(str(tmp_path / "a.onnx"))
    inputs = {"positions": np.zeros((3, 3), np.float32), "directions": np.ones((3, 3), np.float32)}
    assert [value.shape for value in session.run(None, inputs)] == [(3, 3), (3,)]  # another number of points


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'nerfturbo\[mesh\]'"):
        check_mesh_path(Path("a.glb"), MeshSettings())
