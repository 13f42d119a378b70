"""A point cloud of what the cameras of training see, with colours and normals."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data.cameras import Cameras, transform_points
from ..data.images import to_bytes
from ..data.pool_file import check_memory
from ..errors import InputError
from ..files import write_atomically
from ..rendering.model import NerfModel
from ..rendering.render import surface_normals
from ..sampling.grid import describe_box
from ..types import Aabb
from . import Progress, quiet
from .mesh import rotate_normals

FILE_BYTES, POINT_BYTES = 27, 128  # of a point in the file; and in memory while it is written
SOLID = 0.5
RIM = 0.02  # optical thickness of one step from which a place counts as part of something


@dataclass(frozen=True)
class PointCloud:
    """Coordinates are those of training."""

    positions: Tensor  # (n, 3) float32
    normals: Tensor  # (n, 3) unit length, or zero where the surface is unclear
    colors: Tensor  # (n, 3) in [0, 1], sRGB


def _no_points(box: Aabb, opacity: float, opaque: Tensor, n_inside: int) -> InputError:
    """Why there are none: nothing opaque, all of it elsewhere, or fog. `opacity` is the largest of all pixels, `opaque`
    (n, 3) spans the places of those that are opaque, of which `n_inside` lie in the box."""
    expected = "at least one that a camera sees in the box"
    young = "train it longer: the field is still fog, without surfaces"
    if opaque.shape[0] == 0:
        got = f"none: no pixel of the training cameras is more than {100.0 * opacity:.0f}% opaque"
        return InputError("points", f"{expected}, {100.0 * SOLID:.0f}% opaque or more", got, young)
    if n_inside == 0:
        low, high = ("(" + ", ".join(f"{x:.4g}" for x in corner) + ")" for corner in (opaque.amin(0), opaque.amax(0)))
        hint = f"choose another --box: what they see lies in {low} to {high}"
        return InputError("points", expected, f"none in {describe_box(box)}", hint)
    got = f"{n_inside} opaque pixels whose depth is a mean over thin fog, where no surface is"
    return InputError("points", expected, got, young)


@torch.no_grad()
def surface_pixels(
    model: NerfModel, cameras: Cameras, box: Aabb | None, wanted: float, *, rim: float = RIM, progress: Progress = quiet
) -> tuple[Tensor, Tensor, Tensor]:
    """About `wanted` pixels of the cameras, moved to their depth, those inside the box and solid, `rim` thick a step:
    positions (m, 3), colours (m, 3), and the radii (m,) of the cameras' own pixels there."""
    scale = min(1.0, math.sqrt(wanted / float(cameras.size.prod(-1).sum())))
    small = cameras if scale == 1.0 else cameras.scaled(max(scale, 16.0 / int(cameras.size.max())))
    low, high = (torch.full((3,), sign * math.inf) for sign in (-1, 1)) if box is None else box.tensor(model.device)
    found, corners, opacity, n_inside = [], [torch.zeros(0, 3, device=model.device)], 0.0, 0
    for index in range(len(small)):
        image = model.render_image(small, index)
        rays, depth = small[index].to(model.device).image_rays(0), image.depth.reshape(-1)
        points = rays.origins + rays.directions * depth[:, None]
        opaque = image.opacity.reshape(-1) > SOLID
        keep = opaque & (points >= low.to(points)).all(-1) & (points <= high.to(points)).all(-1)
        opacity, n_inside = max(opacity, float(image.opacity.max())), n_inside + int(keep.sum())
        if bool(opaque.any()):
            corners += [points[opaque].amin(0, keepdim=True), points[opaque].amax(0, keepdim=True)]
        assert rays.pixel_radii is not None  # held by Cameras
        radii = rays.pixel_radii * depth * float(small.size[index, 0] / cameras.size[index, 0])
        parts = [part[keep] for part in (points, image.rgb.reshape(-1, 3), radii)]
        # At the rim of things the mean depth lies between what is before and what is behind, where nothing is.
        solid = model.field.density(parts[0]) * model.grid.step_size >= rim if bool(keep.any()) else keep[:0]
        found.append([part[solid] for part in parts])
        progress((index + 1) / len(small))
    points, rgb, radii = (torch.cat(column) for column in zip(*found, strict=True))
    if points.shape[0] == 0:
        raise _no_points(box or model.bounds.aabb, opacity, torch.cat(corners), n_inside)
    return points, rgb, radii


@torch.no_grad()
def extract_points(
    model: NerfModel, cameras: Cameras, box: Aabb, n_points: int, *, progress: Progress = quiet
) -> PointCloud:
    """About `n_points` points: pixels of the cameras, moved to their depth, those solid and inside the box."""
    pixels = float(cameras.size.prod(-1).sum())
    check_memory("--points", int(POINT_BYTES * min(n_points, pixels)), "ask for fewer")
    # Three times as many pixels as points, because many rays leave the scene.
    found, rgb, _ = surface_pixels(model, cameras, box, 3.0 * n_points, progress=lambda share: progress(0.8 * share))
    if found.shape[0] > n_points:
        order = torch.randperm(found.shape[0], generator=torch.Generator().manual_seed(0))[:n_points]
        found, rgb = found[order.to(found.device)], rgb[order.to(found.device)]
    return PointCloud(found.cpu(), surface_normals(model.field, model.grid, found).cpu(), rgb.clamp(0.0, 1.0).cpu())


def write_points(path: Path, cloud: PointCloud, to_original: Tensor | None = None) -> None:
    """Write a binary PLY in the coordinates of the scene's own file; whole or not at all."""
    place = transform_points(cloud.positions, to_original), rotate_normals(cloud.normals, to_original)
    columns = [*torch.cat(place, dim=1).T.numpy(), *to_bytes(cloud.colors).T.numpy()]
    write_ply(path, dict(zip(["x", "y", "z", "nx", "ny", "nz", "red", "green", "blue"], columns, strict=True)))


def write_ply(path: Path, columns: dict[str, np.ndarray]) -> None:
    """A binary PLY of points, by the names of their properties: bytes (n,), else numbers as 32-bit floats."""
    kinds = {name: "u1" if column.dtype == np.uint8 else "<f4" for name, column in columns.items()}
    rows = np.rec.fromarrays(list(columns.values()), dtype=list(kinds.items()))
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {len(rows)}"]
    header += [f"property {'uchar' if kind == 'u1' else 'float'} {name}" for name, kind in kinds.items()]
    write_atomically(path, "\n".join([*header, "end_header", ""]).encode("ascii") + rows.tobytes())
