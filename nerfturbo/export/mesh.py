"""A triangle mesh of the surface, by marching cubes: of an object where its density has a level, without what no camera
saw; of an unbounded scene, whose density is soft, where cameras see it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..data.cameras import Cameras, transform_points, turn_between
from ..data.images import to_bytes
from ..errors import InputError, refuse
from ..evaluation.images import seen_in
from ..files import replacing, write_atomically
from ..ops.march.reference import is_occupied
from ..rendering.image import render_image
from ..rendering.model import NerfModel
from ..sampling.grid import occupied_box
from ..types import Aabb, Rays
from . import Progress, check_ending, quiet, require_package
from .fusion import few_and_small, fuse, points_along, whole_cells

THICKNESS = 0.1  # the surface is where one marching step is this thick, unless a density is given
VISIBLE_MARGIN = 1.0  # in voxels
COLOR_REACH = 3.0  # in voxels
COLOR_CHUNK = 1 << 16  # vertices
CHUNK = 1 << 20  # points looked at in one go
Up = Literal["y", "z", "file"]  # the axis that points up; of the file: as the scene has it


@dataclass(frozen=True)
class Mesh:
    """Triangles with a normal and a colour at each vertex; coordinates are those of training."""

    vertices: Tensor  # (n, 3) float32
    faces: Tensor  # (m, 3) int64, counter-clockwise seen from outside
    normals: Tensor  # (n, 3) unit length
    colors: Tensor  # (n, 3) in [0, 1], sRGB


@dataclass(frozen=True)
class MeshSettings:
    """How to make a mesh."""

    resolution: int = 256  # voxels along the longest side of the scene's box
    density: float | None = None  # of the surface; None: a step's optical thickness is 0.1; unbounded: what cameras see
    n_faces: int | None = None  # decimate to about this many


def check_mesh_path(path: Path, settings: MeshSettings, *, textured: bool = False) -> None:
    """Refuse what could not be written, before any work is done."""
    refuse(path.suffix.lower() == ".usdz" and not textured, str(path), "a texture in a .usdz", "none", "add --texture")
    check_ending(path, ".glb", ".ply", ".obj", *([".usdz"] if textured else []))
    require_package("skimage", "scikit-image", "meshes", "mesh")
    require_package("trimesh", "trimesh", "meshes", "mesh")
    if settings.n_faces is not None:
        require_package("fast_simplification", "fast-simplification", "decimation", "mesh")
        refuse(settings.n_faces < 4, "--faces", "at least 4", settings.n_faces)
    if settings.density is not None and not 0.0 < settings.density < float("inf"):
        raise InputError("--density", "a number > 0", str(settings.density))


@torch.no_grad()
def extract_mesh(
    model: NerfModel, box: Aabb, settings: MeshSettings, *, cameras: Cameras | None = None, progress: Progress = quiet
) -> Mesh:
    """The surface inside `box`; with `cameras`, only what one of them sees."""
    voxel = voxel_size(model, settings.resolution)
    if cameras is not None and settings.density is None and model.grid.config.levels > 1:
        behind = fuse(model, cameras, box, voxel, progress=lambda share: progress(0.9 * share))
        cells = whole_cells(behind)
        vertices, faces = _triangles(behind.nan_to_num_(-1.0), 0.0, voxel, box.low, cells)
        inside = ((vertices >= box.tensor()[0]) & (vertices <= box.tensor()[1])).all(-1)  # the last points are beyond
        faces = faces[inside[faces].all(1)]
        return _finish(model, vertices, faces, settings.n_faces, COLOR_REACH * voxel)
    first = 0.15 if cameras else 0.9  # of the time; to look from every camera takes the most of it
    density = density_volume(model, box, voxel, progress=lambda share: progress(first * share))
    level = THICKNESS / model.grid.step_size if settings.density is None else settings.density
    peak = float(density.max())
    hint = "give a lower --density, or train longer"
    refuse(not level < peak, "--density", f"less than the densest point of the box, {peak:.4g}", f"{level:.4g}", hint)
    vertices, faces = _triangles(density, level, voxel, [value - voxel for value in box.low])
    vertices = torch.minimum(torch.maximum(vertices, box.tensor()[0]), box.tensor()[1])  # what is cut ends at the box
    if cameras is not None:
        places, margin = vertices.to(model.device), VISIBLE_MARGIN * voxel
        seen = seen_by(model, cameras, places, margin, progress=lambda share: progress(first + 0.75 * share)).cpu()
        faces = faces[seen[faces].all(dim=1)]
    return _finish(model, vertices, faces, settings.n_faces, COLOR_REACH * voxel)


def _triangles(
    volume: Tensor, level: float, voxel: float, low: Sequence[float], cells: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Vertices and triangles of `cells`, counter-clockwise seen from below the level; None: it is not reached."""
    from skimage.measure import marching_cubes

    options: dict[str, Any] = {"spacing": (voxel,) * 3, "gradient_direction": "ascent"}
    mask = None if cells is None else cells.numpy()
    try:
        corners, triangles, *_ = marching_cubes(volume.numpy(), level, mask=mask, **options)
    except (RuntimeError, ValueError):
        return torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.int64)
    vertices = torch.from_numpy(np.ascontiguousarray(corners)).float() + torch.tensor(low)
    return vertices, torch.from_numpy(triangles.astype(np.int64))


def _finish(model: NerfModel, vertices: Tensor, faces: Tensor, n_faces: int | None, reach: float) -> Mesh:
    """Decimate, drop vertices no triangle uses, and ask the field for the colours of the rest."""
    import trimesh

    hint = "no camera of training sees the surface there; --keep-hidden keeps what they do not see"
    refuse(faces.shape[0] == 0, "mesh", "at least one triangle", "none", hint)
    body = trimesh.Trimesh(vertices.numpy(), faces.numpy(), process=False)
    if n_faces is not None and n_faces < faces.shape[0]:
        body = body.simplify_quadric_decimation(face_count=n_faces)
    body.remove_unreferenced_vertices()
    positions, normals = (torch.tensor(np.array(v), dtype=torch.float32) for v in (body.vertices, body.vertex_normals))
    colors = colors_from_outside(model, positions, normals, reach)
    return Mesh(positions, torch.tensor(np.array(body.faces)), normals, colors)


@torch.no_grad()
def colors_from_outside(
    model: NerfModel, positions: Tensor, normals: Tensor, reach: float, *, progress: Progress = quiet
) -> Tensor:
    """(n, 3): what a viewer straight above each point sees, from `reach` before it to as far behind it; on the CPU. A
    short ray is rendered, because the colour of a single point of a soft surface was never trained alone."""
    settings = replace(model.settings, near_plane=0.0, far_plane=2.0 * reach, cone_angle=0.0, alpha_thre=0.0)
    colors = torch.zeros(positions.shape[0], 3)
    for start in range(0, positions.shape[0], COLOR_CHUNK):
        points, outward = (v[start : start + COLOR_CHUNK].to(model.device) for v in (positions, normals))
        outward = torch.nn.functional.normalize(outward, dim=-1)
        # A vertex without a normal (its triangles cancel out) is looked at from above.
        outward = torch.where(outward.abs().sum(-1, keepdim=True) > 0.0, outward, outward.new_tensor([0.0, 0.0, 1.0]))
        rays = Rays(points + outward * reach, -outward)
        image = render_image(model.field, model.grid, rays, height=1, width=len(rays), settings=settings)
        opacity, (alone, _) = image.opacity[0, :, None], model.field(points, -outward)
        found = torch.where(opacity > 0.05, image.rgb[0] / opacity.clamp_min(0.05), alone.float())
        colors[start : start + COLOR_CHUNK] = found.cpu()
        progress(min(1.0, (start + COLOR_CHUNK) / len(positions)))
    return colors.clamp(0.0, 1.0)


def write_mesh(path: Path, mesh: Mesh, to_original: Tensor | None = None, *, up: Up | None = None) -> None:
    """Write .glb, .ply or .obj; whole or not at all. In the coordinates of the scene's own file, turned so that `up`
    points up; unless given, the file's own axes in a .ply and y in the others, as programs that open them expect."""
    import trimesh

    extra: dict[str, dict[str, Any]] = {
        ".ply": {"vertex_normal": True},
        ".obj": {"include_normals": True, "include_color": True, "header": "nerfturbo"},
    }
    ending = path.suffix.lower()
    place = upright(to_original, up or ("file" if ending == ".ply" else "y"))
    points, normals = transform_points(mesh.vertices.double(), place), rotate_normals(mesh.normals, place)
    colors = to_bytes(mesh.colors)
    if ending == ".glb":
        corners = mesh.faces.reshape(-1)
        image, places = _corner_texture(colors[mesh.faces])
        faces = torch.arange(corners.shape[0]).view(-1, 3)
        write_atomically(path, glb_bytes(points[corners], faces, normals[corners], places=places, image=image))
        return
    shown = torch.nn.functional.pad(colors, (0, 1), value=255).numpy()
    options: dict[str, Any] = {"vertex_normals": normals.numpy(), "vertex_colors": shown, "process": False}
    body = trimesh.Trimesh(points.numpy(), mesh.faces.numpy(), **options)
    with replacing(path) as temporary:
        body.export(temporary, **extra[ending])


def upright(to_original: Tensor | None, up: Up) -> Tensor | None:
    """(4, 4) from training, where z is up, to the scene's own file, turned the short way to where `up` is up."""
    if up == "file":
        return to_original
    place = torch.eye(4, dtype=torch.float64) if to_original is None else to_original.double()
    target = torch.tensor([0.0, 1.0, 0.0] if up == "y" else [0.0, 0.0, 1.0], dtype=torch.float64)
    turn = torch.eye(4, dtype=torch.float64)
    turn[:3, :3] = turn_between(torch.nn.functional.normalize(place[:3, 2], dim=0), target)
    return turn @ place


def _corner_texture(colors: Tensor) -> tuple[Image.Image, Tensor]:
    """Colours (n, 3, 3) uint8 of triangles' corners as a texture of 2 x 2 texels each, corners in the middle of three
    of them, and their places (3 n, 2). Every program shows a texture as it is; colours of vertices trimesh drops beside
    a material, Blender leaves unconnected, and three.js takes for linear light."""
    n, side = colors.shape[0], math.ceil(colors.shape[0] ** 0.5)
    first, second, third = colors.long().unbind(1)
    fourth = (second + third - first).clamp(0, 255)  # makes bilinear filtering linear over the triangle
    texels = torch.zeros(side * side, 2, 2, 3, dtype=torch.uint8)
    texels[:n] = torch.stack([first, second, third, fourth], dim=1).view(n, 2, 2, 3).to(torch.uint8)
    image = texels.view(side, side, 2, 2, 3).transpose(1, 2).reshape(2 * side, 2 * side, 3)
    index = torch.arange(n)
    cell = torch.stack([index % side, index // side], dim=-1)[:, None] * 2  # (n, 1, 2): column, row
    places = (cell + torch.tensor([[0, 0], [1, 0], [0, 1]]) + 0.5).double() / (2 * side)
    places[..., 1] = 1.0 - places[..., 1]
    return Image.fromarray(image.numpy()), places.view(-1, 2)


def glb_bytes(
    points: Tensor, faces: Tensor, normals: Tensor, *, places: Tensor, image: Image.Image, mipmaps: bool = False
) -> bytes:
    """A glTF file of triangles with a texture; `places` (n, 2) in it count from its lower left corner."""
    import trimesh
    from trimesh.visual import TextureVisuals
    from trimesh.visual.material import PBRMaterial

    def unlit(tree: dict[str, Any]) -> None:  # the light is in the colours already
        name, linear, mixed, clamp = "KHR_materials_unlit", 9729, 9987, 33071
        tree["extensionsUsed"] = sorted({*tree.get("extensionsUsed", []), name})
        tree["materials"][0]["extensions"] = {name: {}}
        far = mixed if mipmaps else linear  # a mipmap would mix triangles that have texels of their own
        tree["samplers"] = [{"magFilter": linear, "minFilter": far, "wrapS": clamp, "wrapT": clamp}]
        tree["textures"][0]["sampler"] = 0

    material = PBRMaterial(baseColorTexture=image, metallicFactor=0.0, roughnessFactor=1.0, doubleSided=True)
    visual = TextureVisuals(uv=places.numpy(), material=material)
    options: dict[str, Any] = {"vertex_normals": normals.numpy(), "visual": visual, "process": False}
    body = trimesh.Trimesh(points.numpy(), faces.numpy(), **options)
    return bytes(body.export(file_type="glb", include_normals=True, tree_postprocessor=unlit))  # type: ignore[arg-type]


def rotate_normals(normals: Tensor, similarity: Tensor | None) -> Tensor:
    """Unit vectors turned by a rotation with a scale and a shift."""
    if similarity is None:
        return normals
    return torch.nn.functional.normalize(normals.double() @ similarity[:3, :3].T, dim=-1).to(normals.dtype)


def export_box(model: NerfModel, box: Aabb | None, what: str = "--box") -> Aabb:
    """What there is to export: the occupied part of the scene, of `box` where one is given. Fails at once, before
    anything is evaluated, where that is empty, and names the occupied box; `what` is where the given one is from."""
    if (occupied := occupied_box(model.grid)) is None:
        hint = "train it longer"
        raise InputError("the run", "an occupied part of the scene", "an occupancy grid that is empty", hint)
    if box is None:
        return occupied
    inside = occupied_box(model.grid.cropped(box, what=what))
    assert inside is not None  # the crop refuses a box without anything
    return inside.intersection(box) or inside


def voxel_size(model: NerfModel, resolution: int) -> float:
    """The longest side of the scene's box over the resolution: a number of voxels means one size in every export."""
    refuse(not 8 <= resolution <= 4096, "--resolution", "8 to 4096 voxels along the scene's box", resolution)
    return max(model.bounds.aabb.size) / resolution


@torch.no_grad()
def density_volume(model: NerfModel, box: Aabb, voxel: float, *, progress: Progress = quiet) -> Tensor:
    """(nx, ny, nz) float32 on the CPU: the density at box.low + (i - 1, j - 1, k - 1) * voxel, asked of the field in
    occupied cells only; zero elsewhere, and all around the box, so that every surface closes."""
    counts = points_along(box, voxel)
    density = torch.zeros(*(n + 2 for n in counts))  # one empty layer all around
    low = torch.tensor(box.low, device=model.device)
    outer_low, outer_high = model.grid.outer_aabb.tensor(model.device)
    x, y, z = (torch.arange(n, device=model.device) * voxel + low[axis] for axis, n in enumerate(counts))
    slabs = max(1, CHUNK // (counts[1] * counts[2]))
    for first in range(0, counts[0], slabs):
        points = torch.cartesian_prod(x[first : first + slabs], y, z)
        inside = ((points >= outer_low) & (points <= outer_high)).all(-1)
        chosen = (inside & is_occupied(model.grid.occupancy, points)).nonzero()[:, 0]
        values = torch.zeros(points.shape[0], device=model.device)
        if chosen.shape[0]:
            values[chosen] = model.field.density(points[chosen]).float()
        part = values.view(-1, counts[1], counts[2])
        density[first + 1 : first + 1 + part.shape[0], 1:-1, 1:-1] = part.cpu()
        progress(min(1.0, (first + slabs) / counts[0]))
    return density


@torch.no_grad()
def seen_by(model: NerfModel, cameras: Cameras, points: Tensor, margin: float, *, progress: Progress = quiet) -> Tensor:
    """(n,) bool: whether points (n, 3) lie before, or less than `margin` behind, what some camera sees there. What the
    cameras of training never saw, the field was free to fill with anything. Some of them look, evenly chosen, small."""
    seen = torch.zeros(points.shape[0], dtype=torch.bool, device=points.device)
    small = few_and_small(cameras, model.device)
    for index in range(len(small)):
        image = model.render_image(small, index)
        for part, found in zip(points.split(CHUNK), seen.split(CHUNK), strict=True):
            found |= seen_in(image, small[index], part, margin)
        progress((index + 1) / len(small))
    return seen
