"""A triangle mesh of the surface: marching cubes over the occupied box, without what no camera saw."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..data.cameras import Cameras
from ..errors import InputError
from ..evaluation.camera_file import transform_points
from ..files import replacing
from ..rendering.image import render_image
from ..rendering.model import NerfModel
from ..types import Aabb, Rays
from .needs import need
from .seen import SeenDepths
from .volume import Progress, density_volume, voxel_size

if TYPE_CHECKING:
    import trimesh

FORMATS = (".glb", ".ply", ".obj")
THICKNESS = 0.1  # the surface is where one marching step is this thick, unless a density is given
SEEN_MARGIN = 1.0  # in voxels
COLOR_REACH = 3.0  # in voxels
CHUNK = 1 << 16


@dataclass(frozen=True)
class Mesh:
    """Triangles with a normal and a colour at each corner; coordinates are those of training."""

    vertices: Tensor  # (n, 3) float32
    faces: Tensor  # (m, 3) int64, counter-clockwise seen from outside
    normals: Tensor  # (n, 3) unit length
    colors: Tensor  # (n, 3) in [0, 1], sRGB


@dataclass(frozen=True)
class MeshSettings:
    """How to make a mesh."""

    resolution: int = 256  # voxels along the longest side of the scene's box
    density: float | None = None  # of the surface; None: where a marching step has optical thickness 0.1
    n_faces: int | None = None  # decimate to about this many


def check_mesh_path(path: Path, settings: MeshSettings) -> None:
    """Refuse what could not be written, before any work is done."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(str(path), "a file ending in " + ", ".join(FORMATS), repr(path.suffix))
    need("skimage", "scikit-image", "meshes", "mesh")
    need("trimesh", "trimesh", "meshes", "mesh")
    if settings.n_faces is not None:
        need("fast_simplification", "fast-simplification", "decimation", "mesh")
        if settings.n_faces < 4:
            raise InputError("--faces", "at least 4", str(settings.n_faces))
    if settings.density is not None and not 0.0 < settings.density < float("inf"):
        raise InputError("--density", "a number > 0", str(settings.density))


@torch.no_grad()
def extract_mesh(
    model: NerfModel,
    box: Aabb,
    settings: MeshSettings,
    *,
    cameras: Cameras | None = None,
    progress: Progress | None = None,
) -> Mesh:
    """The surface inside `box`; with `cameras`, only what one of them sees."""
    from skimage.measure import marching_cubes

    voxel = voxel_size(model, settings.resolution)
    volume = density_volume(model, box, voxel, progress=None if progress is None else lambda x: progress(0.5 * x))
    level = THICKNESS / model.grid.step_size if settings.density is None else settings.density
    peak = float(volume.density.max())
    if not level < peak:
        hint = "give a lower --density, or train longer"
        raise InputError("--density", f"less than the densest point of the box, {peak:.4g}", f"{level:.4g}", hint)
    # "ascent" turns triangles so that they are counter-clockwise seen from where the density is low.
    corners, triangles, _, _ = marching_cubes(
        volume.density.numpy(), level, spacing=(voxel,) * 3, gradient_direction="ascent"
    )
    vertices = torch.from_numpy(np.ascontiguousarray(corners)).float() + torch.tensor(volume.low)
    vertices = torch.minimum(torch.maximum(vertices, box.tensor()[0]), box.tensor()[1])  # what is cut ends at the box
    faces = torch.from_numpy(triangles.astype(np.int64))
    if cameras is not None:
        seen = SeenDepths.render(model, cameras, None if progress is None else lambda x: progress(0.5 + 0.4 * x))
        visible = seen.sees(vertices.to(model.device), SEEN_MARGIN * voxel).cpu()
        faces = faces[visible[faces].all(dim=1)]
    return _finish(model, vertices, faces, settings.n_faces, COLOR_REACH * voxel)


def _finish(model: NerfModel, vertices: Tensor, faces: Tensor, n_faces: int | None, reach: float) -> Mesh:
    """Decimate, drop corners no triangle uses, and ask the field for the colours of the rest."""
    import trimesh

    if faces.shape[0] == 0:
        hint = "no camera of training sees the surface there; --keep-hidden keeps what they do not see"
        raise InputError("mesh", "at least one triangle", "none", hint)
    body = trimesh.Trimesh(vertices.numpy(), faces.numpy(), process=False)
    if n_faces is not None and n_faces < faces.shape[0]:
        body = body.simplify_quadric_decimation(face_count=n_faces)
    body.remove_unreferenced_vertices()
    positions = torch.tensor(np.array(body.vertices), dtype=torch.float32)
    normals = torch.tensor(np.array(body.vertex_normals), dtype=torch.float32)
    colors = colors_from_outside(model, positions, normals, reach)
    return Mesh(positions, torch.tensor(np.array(body.faces)), normals, colors)


@torch.no_grad()
def colors_from_outside(model: NerfModel, positions: Tensor, normals: Tensor, reach: float) -> Tensor:
    """(n, 3): what a viewer straight above each point sees, from `reach` before it to as far behind it; on the CPU.

    A short ray is rendered, because the colour of a single point of a soft surface was never trained alone.
    """
    settings = replace(model.settings, near_plane=0.0, far_plane=2.0 * reach, cone_angle=0.0, alpha_thre=0.0)
    parts = []
    for start in range(0, positions.shape[0], CHUNK):
        points, outward = (values[start : start + CHUNK].to(model.device) for values in (positions, normals))
        outward = torch.nn.functional.normalize(outward, dim=-1)
        # A corner without a normal (its triangles cancel out) is looked at from above.
        outward = torch.where(outward.abs().sum(-1, keepdim=True) > 0.0, outward, outward.new_tensor([0.0, 0.0, 1.0]))
        rays = Rays(points + outward * reach, -outward)
        image = render_image(model.field, model.estimator, rays, height=1, width=len(rays), settings=settings)
        seen, opacity = image.rgb[0], image.opacity[0, :, None]
        alone, _ = model.field(points, -outward)
        parts.append(torch.where(opacity > 0.05, seen / opacity.clamp_min(0.05), alone.float()).clamp(0.0, 1.0).cpu())
    return torch.cat(parts) if parts else torch.zeros(0, 3)


def write_mesh(path: Path, mesh: Mesh, to_original: Tensor | None = None) -> None:
    """Write .glb, .ply or .obj in the coordinates of the scene's own file; whole or not at all."""
    body = as_trimesh(mesh, to_original)
    extra: dict[str, dict[str, Any]] = {
        ".glb": {"include_normals": True, "tree_postprocessor": _unlit},
        ".ply": {"vertex_normal": True},
        ".obj": {"include_normals": True, "include_color": True, "header": "nerfturbo"},
    }
    with replacing(path) as temporary:
        body.export(temporary, **extra[path.suffix.lower()])


def as_trimesh(mesh: Mesh, to_original: Tensor | None = None) -> trimesh.Trimesh:
    """The mesh for trimesh, moved to the coordinates of the scene's own file."""
    import trimesh

    colors = (mesh.colors * 255.0 + 0.5).to(torch.uint8)
    opaque = torch.full((colors.shape[0], 1), 255, dtype=torch.uint8)
    return trimesh.Trimesh(
        vertices=transform_points(mesh.vertices.double(), to_original).numpy(),
        faces=mesh.faces.numpy(),
        vertex_normals=rotate_normals(mesh.normals, to_original).numpy(),
        vertex_colors=torch.cat([colors, opaque], dim=1).numpy(),
        process=False,
    )


def rotate_normals(normals: Tensor, similarity: Tensor | None) -> Tensor:
    """Unit vectors turned by a rotation with a scale and a shift."""
    if similarity is None:
        return normals
    turned = normals.double() @ similarity[:3, :3].T
    return torch.nn.functional.normalize(turned, dim=-1).to(normals.dtype)


def _unlit(tree: dict[str, Any]) -> None:
    """A material for glTF: the light is in the colours already, and without one viewers assume bare metal."""
    name = "KHR_materials_unlit"
    plain = {"baseColorFactor": [1.0, 1.0, 1.0, 1.0], "metallicFactor": 0.0, "roughnessFactor": 1.0}
    tree["materials"] = [{"pbrMetallicRoughness": plain, "doubleSided": True, "extensions": {name: {}}}]
    tree["extensionsUsed"] = sorted({*tree.get("extensionsUsed", []), name})
    for body in tree["meshes"]:
        for primitive in body["primitives"]:
            primitive["material"] = 0
