"""Meshes with textures: pixels of triangles, charts that do not overlap, colours, files, and the score."""

from __future__ import annotations

import importlib
import json
import re
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from nerfturbo.data.cameras import Cameras, look_at, transform_points
from nerfturbo.data.images import ImagePool, to_bytes
from nerfturbo.errors import InputError
from nerfturbo.evaluation.metrics import psnr
from nerfturbo.export.mesh import Mesh, MeshSettings, export_box, extract_mesh, upright
from nerfturbo.export.raster import covered, rasterize
from nerfturbo.export.texture import (
    PADDING,
    TexturedMesh,
    bake_texture,
    check_texture_path,
    picture,
    score_texture,
    spread,
    unwrap,
    write_textured,
)
from nerfturbo.ops import use_backend
from nerfturbo.rendering.model import NerfModel

from ..evaluation.test_camera_path import similarity
from ..tiny import ball_scene
from .test_exports import HALF, HollowBall, make_model

SIZE = 256


def own_corners(places: Tensor) -> tuple[Tensor, Tensor]:
    """Corners of each triangle for itself: points (3 m, 2) and triangles (m, 3)."""
    return places.reshape(-1, 2).float(), torch.arange(3 * places.shape[0]).view(-1, 3)


def helix(turns: int = 3, steps: int = 40) -> tuple[Tensor, Tensor]:
    """A spiral ramp: connected, all of it facing up, and above itself."""
    angle = torch.arange(turns * steps + 1) * (2.0 * torch.pi / steps)
    rings = [torch.stack([r * angle.cos(), r * angle.sin(), 0.05 * angle], dim=-1) for r in (0.3, 1.0)]
    inner = torch.arange(turns * steps)
    outer = inner + len(angle)
    faces = torch.cat([torch.stack([inner, outer, outer + 1], 1), torch.stack([inner, outer + 1, inner + 1], 1)])
    return torch.cat(rings), faces


@pytest.fixture(scope="module")
def model() -> NerfModel:
    return make_model(HollowBall())


@pytest.fixture(scope="module")
def mesh(model: NerfModel) -> Mesh:
    with use_backend("reference"):
        settings = MeshSettings(32, HALF, n_faces=2000)
        return extract_mesh(model, export_box(model, None), settings, cameras=ball_scene(n_views=6, size=24).cameras)


@pytest.fixture(scope="module")
def textured(model: NerfModel, mesh: Mesh) -> TexturedMesh:
    with use_backend("reference"):
        return bake_texture(model, mesh, ball_scene(n_views=6, size=48).cameras, size=SIZE, reach=0.2)


def test_pixels_show_the_nearest_triangle_as_brute_force_finds_it() -> None:
    torch.manual_seed(3)
    points, depths = torch.rand(60, 2).double() * 36.0 - 2.0, torch.rand(60).double() + 0.5
    depths[7] = -1.0  # behind the camera
    faces, (width, height) = torch.randint(0, 60, (40, 3)), (31, 17)
    found = rasterize(points, depths, faces, (width, height))
    assert found.face.shape == (width * height,)
    for pixel in range(0, width * height, 3):
        centre = points.new_tensor([pixel % width + 0.5, pixel // width + 0.5])
        best, expected = torch.inf, -1
        for face, corners in enumerate(faces.tolist()):
            if 7 in corners or len(set(corners)) < 3:
                continue
            a, b, c = points[corners]
            u, v = torch.linalg.solve(torch.stack([b - a, c - a], 1), centre - a).tolist()
            if min(u, v, 1.0 - u - v) >= 0.0:
                depth = 1.0 / float((torch.tensor([1.0 - u - v, u, v]) / depths[corners]).sum())
                best, expected = (depth, face) if depth < best else (best, expected)
        assert int(found.face[pixel]) == expected
    shown = found.face >= 0
    assert bool((found.weights[shown].sum(-1) - 1.0).abs().max() < 1e-6) and not found.weights[~shown].any()


def test_weights_are_those_of_points_in_space_not_on_the_picture() -> None:
    corners = torch.tensor([[-2.0, 0.0, -1.0], [2.0, 0.0, -1.0], [0.0, 9.0, -1.0]])  # a floor that runs away
    camera = Cameras.pinhole(
        look_at(torch.tensor([[0.0, -3.0, 1.0]]), torch.zeros(3)), width=60, height=40, field_of_view_x=1.2
    )
    pixels, ahead = camera.project(torch.zeros(3, dtype=torch.int64), corners)
    found = rasterize(pixels, ahead, torch.tensor([[0, 1, 2]]), (60, 40))
    shown = (found.face == 0).nonzero()[:, 0]
    rays = camera.image_rays(0)
    t = (-1.0 - rays.origins[shown, 2]) / rays.directions[shown, 2]
    hit = rays.origins[shown] + rays.directions[shown] * t[:, None]
    assert len(shown) > 200 and float((found.weights[shown] @ corners - hit).abs().max()) < 1e-3


@pytest.mark.parametrize("shape", ["ball", "rough ball", "helix"])
def test_charts_lie_inside_the_texture_and_nothing_lies_over_another(mesh: Mesh, shape: str) -> None:
    vertices, faces = helix() if shape == "helix" else (mesh.vertices, mesh.faces)
    if shape == "rough ball":
        vertices = vertices + 0.03 * torch.randn(vertices.shape, generator=torch.Generator().manual_seed(1))
    places = unwrap(vertices, faces, SIZE)
    assert float(places.min()) >= PADDING and float(places.max()) <= SIZE - PADDING
    points, own = own_corners(places)
    seen = torch.full((SIZE * SIZE,), -1)
    for face, texel, weights in covered(points, torch.ones(len(points)), own, (SIZE, SIZE)):
        strictly = weights.amin(-1) > 1e-3
        assert texel[strictly].unique().numel() == int(strictly.sum())
        seen[texel[strictly]] = face[strictly]
    assert float((seen >= 0).float().mean()) > 0.05  # of the texture is used
    corners = vertices[faces]
    area = torch.linalg.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]).norm(dim=-1)
    a, b = (places[:, 1] - places[:, 0]).T, (places[:, 2] - places[:, 0]).T
    ratio = ((a[0] * b[1] - a[1] * b[0]).abs() / area)[area > 1e-4]
    assert float(ratio.max() / ratio.min()) < 2.6  # no triangle is stretched beyond 1 / 0.4


def test_colors_go_on_over_a_seam_as_they_end_there() -> None:
    colors = torch.zeros(64, 64, 4)
    colors[:, :21] = torch.tensor([0.0, 0.5, 0.5, 1.0])
    colors[:, :21, 0] = torch.linspace(0.0, 1.0, 64)[:, None]
    whole = spread(colors)
    assert torch.equal(whole[:, :21], colors[:, :21, :3])
    assert float((whole[1:-1, 21:23] - whole[1:-1, 20:21]).abs().max()) < 5e-3  # of a gradient of 0.016 a texel
    assert float((whole - torch.tensor([0.5, 0.5, 0.5])).abs().max()) <= 0.5 and float(whole[..., 1].min()) > 0.49


def test_texels_have_the_colors_of_the_surface_up_to_the_seams(textured: TexturedMesh) -> None:
    assert float(textured.texture.min()) >= 0.0 and not bool(torch.isnan(textured.texture).any())
    far = textured.vertices[:, 0].abs() > 0.15
    columns, rows = (textured.places[far] * SIZE).unbind(-1)
    for shift in (-1.0, 0.0, 1.0):  # corners lie on seams: a texel further out belongs to nobody
        x, y = ((side + shift - 0.5).round().long().clamp(0, SIZE - 1) for side in (columns, rows))
        found = textured.texture[y, x]
        assert float((found[:, 0] > 0.5).eq(textured.vertices[far, 0] < 0.0).float().mean()) > 0.98


@pytest.mark.parametrize("has_alpha", [True, False])
def test_pictures_are_the_field_s_and_the_score_says_so(
    model: NerfModel, textured: TexturedMesh, has_alpha: bool
) -> None:
    scene = ball_scene(n_views=3, size=40)
    with use_backend("reference"):
        renders = [model.render_image(scene.cameras, index) for index in range(3)]
    solid = [torch.ones_like(one.opacity) if not has_alpha else one.opacity for one in renders]
    own = [one.rgb - (1.0 - one.opacity[..., None]) if has_alpha else one.rgb for one in renders]  # without the white
    photos = [to_bytes(torch.cat([rgb, alpha[..., None]], dim=-1)) for rgb, alpha in zip(own, solid, strict=True)]
    scene = replace(scene, images=ImagePool.from_images(photos if has_alpha else [one[..., :3] for one in photos]))
    scores, shares = [], []
    for index in range(3):
        image, shown = picture(textured, scene.cameras[index], torch.ones(3))
        scores.append(psnr(image, renders[index].rgb, None if has_alpha else shown == 1.0))
        shares.append(float(shown.mean()))
    with use_backend("reference"):
        found, covered = score_texture(model, textured, scene)
        inverted, _ = score_texture(model, replace(textured, texture=1.0 - textured.texture), scene)
    assert found.views == 3 and covered == pytest.approx(sum(shares) / 3)
    assert found.against_photos is not None and inverted.against_photos is not None
    assert found.against_photos == pytest.approx(sum(scores) / 3, abs=0.3)
    assert found.against_field == pytest.approx(found.against_photos, abs=0.3)
    assert found.field_against_photos is not None and found.field_against_photos > 30.0
    assert found.against_photos > (14.5 if has_alpha else 21.0)  # no camera of training saw the ball's underside
    assert inverted.against_photos < 8.0


@pytest.mark.parametrize("up", [None, "file"])
def test_both_files_open_with_their_texture(textured: TexturedMesh, tmp_path: Path, up: str | None) -> None:
    import trimesh

    back = similarity()
    write_textured(tmp_path / "a.glb", textured, back, up=up)  # type: ignore[arg-type]
    assert {path.name for path in tmp_path.iterdir()} == {"a.glb", "a.obj", "a.mtl", "a.png"}
    moved = transform_points(textured.vertices.double(), back if up else upright(back, "y"))
    for name in ("a.glb", "a.obj"):
        read = next(iter(trimesh.load_scene(tmp_path / name, process=False).geometry.values()))
        assert len(read.faces) == len(textured.faces)
        visual, middle = read.visual, read.vertices[read.faces].mean(1)
        expected = moved[textured.faces].mean(1).numpy()
        assert np.abs(middle - expected).max() < 1e-4
        image = np.asarray(getattr(visual.material, "baseColorTexture", None) or visual.material.image)[..., :3]
        uv = visual.uv[read.faces].mean(1)  # the middles of triangles, from the bottom
        found = image[((1.0 - uv[:, 1]) * SIZE).astype(int), (uv[:, 0] * SIZE).astype(int)]
        x = textured.vertices[textured.faces].mean(1)[:, 0].numpy()
        assert ((found[:, 0] > 127) == (x < 0.0))[np.abs(x) > 0.15].mean() > 0.98
    content = (tmp_path / "a.glb").read_bytes()
    tree = json.loads(content[20 : 20 + struct.unpack("<I", content[12:16])[0]])
    assert "KHR_materials_unlit" in tree["materials"][0]["extensions"]
    assert tree["samplers"][0]["minFilter"] == 9987  # mipmaps: texels are shared by neighbours


@pytest.mark.parametrize("up", [None, "z"])
def test_a_usdz_holds_the_mesh_and_its_texture_where_phones_look_for_them(
    textured: TexturedMesh, tmp_path: Path, up: str | None
) -> None:
    file, axis = tmp_path / "a.usdz", "Z" if up else "Y"
    write_textured(file, textured, None, up=up)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["a.usdz"]
    content = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None and archive.namelist() == ["scene.usda", "texture.png"]
        for entry in archive.infolist():
            name, extra = struct.unpack("<HH", content[entry.header_offset + 26 : entry.header_offset + 30])
            assert entry.compress_type == zipfile.ZIP_STORED and (entry.header_offset + 30 + name + extra) % 64 == 0
        text = archive.read("scene.usda").decode()
        assert np.array_equal(np.asarray(Image.open(archive.open("texture.png"))), to_bytes(textured.texture))

    def numbers(name: str) -> np.ndarray:
        found = re.search(rf" {name} = \[(.*?)\]", text)
        assert found is not None
        return np.array([float(value) for value in re.findall(r"[-+.e\d]+", found[1])])

    points = transform_points(textured.vertices.double(), upright(None, "z" if up else "y")).numpy()
    assert f'upAxis = "{axis}"' in text and np.abs(numbers("points").reshape(-1, 3) - points).max() < 1e-5
    assert np.array_equal(numbers("faceVertexIndices"), textured.faces.reshape(-1).numpy())
    assert np.array_equal(numbers("faceVertexCounts"), np.full(len(textured.faces), 3))
    assert np.allclose(numbers("extent"), [*points.min(0), *points.max(0)], atol=1e-5)
    assert np.abs(np.linalg.norm(numbers("normals").reshape(-1, 3), axis=1) - 1.0).max() < 1e-4
    places = numbers("primvars:st").reshape(-1, 2)  # from the bottom
    assert np.abs(places * [1, -1] + [0, 1] - textured.places.numpy()).max() < 1e-5


def test_a_usdz_opens_in_pixar_s_library(textured: TexturedMesh, tmp_path: Path) -> None:
    pytest.importorskip("pxr", reason="usd-core is not installed: pip install usd-core")
    usd, geometry, shade, validation = (
        importlib.import_module(f"pxr.{name}") for name in ("Usd", "UsdGeom", "UsdShade", "UsdValidation")
    )
    write_textured(tmp_path / "a.usdz", textured)
    stage = usd.Stage.Open(str(tmp_path / "a.usdz"))
    rules = validation.ValidationRegistry().GetOrLoadAllValidators()  # of the package's bytes too
    assert rules and not [found.GetMessage() for found in validation.ValidationContext(rules).Validate(stage)]
    body = geometry.Mesh(stage.GetPrimAtPath("/scene/mesh"))
    assert len(body.GetPointsAttr().Get()) == len(textured.vertices)
    assert geometry.Mesh.ValidateTopology(
        body.GetFaceVertexIndicesAttr().Get(), body.GetFaceVertexCountsAttr().Get(), len(textured.vertices)
    )[0]
    material, _ = shade.MaterialBindingAPI(body.GetPrim()).ComputeBoundMaterial()
    source = material.ComputeSurfaceSource()[0].GetInput("emissiveColor").GetConnectedSource()[0]
    picture = shade.Shader(source.GetPrim()).GetInput("file").Get().resolvedPath
    assert picture.endswith("a.usdz[texture.png]")


def test_baking_says_how_far_it_is(model: NerfModel, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking the field for the colours of the texels takes most of the time: it said nothing."""
    monkeypatch.setattr("nerfturbo.export.mesh.COLOR_CHUNK", 1000)
    shares: list[float] = []
    with use_backend("reference"):
        bake_texture(model, mesh, ball_scene(n_views=2, size=24).cameras, size=128, reach=0.2, progress=shares.append)
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0)
    assert len([share for share in shares if 0.11 < share < 0.99]) > 2


def test_what_cannot_be_written_is_refused(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"--texture: expected a file ending in \.glb, \.obj, \.usdz, got a\.ply"):
        check_texture_path(Path("a.ply"), 512)
    with pytest.raises(InputError, match="--texture-size: expected 64 to 16384"):
        check_texture_path(Path("a.glb"), 8)
    with pytest.raises(InputError, match=r"--texture-size: expected room for \d+ charts, got 8"):
        unwrap(mesh.vertices, mesh.faces, 8)
    monkeypatch.setattr("nerfturbo.data.pool_file.available_memory", lambda: 30_000_000_000)
    check_texture_path(Path("a.glb"), 8192)
    with pytest.raises(InputError, match="--texture-size: expected what fits the 30000 MB"):
        check_texture_path(Path("a.glb"), 16384)
