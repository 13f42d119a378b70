"""Splats as files of other programs: .ply as 3D Gaussian Splatting writes it, and .splat, 32 bytes a splat."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...data.cameras import rotations, transform_points
from ...evaluation.camera_path import quaternions
from ...files import write_atomically
from ...ops.spherical_harmonics import spherical_harmonics
from ..points import write_ply
from . import BASE, OPACITY, POINT, SCALES, TURN

FIELDS = ["x", "y", "z", "nx", "ny", "nz", *(f"f_dc_{k}" for k in range(3)), *(f"f_rest_{k}" for k in range(45))]
FIELDS += ["opacity", *(f"scale_{k}" for k in range(3)), *(f"rot_{k}" for k in range(4))]
CONSTANT = 0.28209479177387814  # the first harmonic


def write_splats(path: Path, splats: Tensor, to_original: Tensor | None = None) -> None:
    """Write splats (n, 59), those that count most first, in the coordinates of the scene's own file; whole or not at
    all. A .splat has one colour for all directions."""
    splats = placed(splats, to_original)
    if path.suffix.lower() == ".splat":
        write_atomically(path, splat_bytes(splats))
        return
    rows = _ordered(splats)
    rows = torch.cat([rows[:, POINT], torch.zeros(len(rows), 3), rows[:, 3:]], dim=-1)
    write_ply(path, dict(zip(FIELDS, rows.numpy().T, strict=True)))


def splat_bytes(splats: Tensor) -> bytes:
    """32 a splat: position and scales as floats, then red, green, blue, opacity and the quaternion as bytes."""
    splats = _ordered(splats)
    floats = torch.cat([splats[:, POINT], splats[:, SCALES].exp()], dim=-1)
    colors = torch.cat([splats[:, BASE] * CONSTANT + 0.5, splats[:, OPACITY].sigmoid()], dim=-1) * 255.0
    numbers = torch.cat([colors, splats[:, TURN] * 128.0 + 128.0], dim=-1).round().clamp(0.0, 255.0)
    parts = floats.numpy().astype("<f4").view(np.uint8), numbers.numpy().astype(np.uint8)
    return np.concatenate(parts, axis=1).tobytes()


def _ordered(splats: Tensor) -> Tensor:
    """On the CPU, the largest and most opaque first, with unit quaternions."""
    splats = splats.detach().cpu().float()
    splats = torch.cat([splats[:, :55], F.normalize(splats[:, TURN], dim=-1)], dim=-1)
    weights = splats[:, SCALES].sum(-1).exp() * splats[:, OPACITY].sigmoid()[:, 0]
    return splats[weights.argsort(descending=True, stable=True)]


def placed(splats: Tensor, similarity: Tensor | None) -> Tensor:
    """Splats moved by a rotation with a scale and a shift (4, 4): points, sizes, turns, and the harmonics with them."""
    splats = splats.detach().cpu().float().clone()
    if similarity is None:
        return splats
    scale = similarity[:3, :3].det().pow(1.0 / 3.0)
    rotation = (similarity[:3, :3] / scale).double()
    splats[:, POINT] = transform_points(splats[:, POINT], similarity)
    splats[:, SCALES] += float(scale.log())
    splats[:, TURN] = quaternions(rotation @ rotations(F.normalize(splats[:, TURN].double(), dim=-1))).float()
    some = F.normalize(torch.randn(64, 3, generator=torch.Generator().manual_seed(0)).double(), dim=-1)
    before, after = (spherical_harmonics(ways, 4)[:, 1:] for ways in (some, some @ rotation.T))
    mixed = torch.linalg.lstsq(after, before).solution.float()  # (15, 15): what turned harmonics are of the others
    splats[:, 6:51] = (splats[:, 6:51].view(-1, 3, 15) @ mixed.T).flatten(1)
    return splats
