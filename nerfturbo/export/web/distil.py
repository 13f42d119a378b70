"""First values of a baked scene: the field asked at every vertex, from a few of the directions it was trained on."""

from __future__ import annotations

import torch
from torch import Tensor

from ...data.cameras import Cameras
from ...evaluation.evaluate import choose_views
from ...fields.field import Field
from .density import encode_density
from .lattice import SparseBlocks
from .shading import FEATURE_SCALE, N_BASE, N_FEATURES

N_DIRECTIONS = 6
CHUNK = 1 << 17


@torch.no_grad()
def first_values(
    field: Field, cameras: Cameras, blocks: SparseBlocks, *, time: float | None = None, features: bool = True
) -> Tensor:
    """(n_vertices + 1, 4 or 8) in [0, 1]: red, green, blue, density code, features; the last row is empty.

    The base colour is the mean over the directions; features are the main components of how it differs from that.
    """
    eyes = cameras.positions.to(blocks.vertices.device)[torch.tensor(choose_views(len(cameras), N_DIRECTIONS))]
    lattice = blocks.lattice
    n_channels = N_BASE + (N_FEATURES if features else 0)
    values = torch.zeros(blocks.n_vertices + 1, n_channels, device=blocks.vertices.device)
    residuals = []
    for first in range(0, blocks.n_vertices, CHUNK):
        keys = blocks.vertices[first : first + CHUNK]
        positions = lattice.vertex_positions(keys)
        size = lattice.voxel * torch.pow(2.0, lattice.level_of(positions).clamp(max=lattice.levels - 1).float())
        times = None if time is None else torch.full_like(positions[:, 0], time)
        colors = []
        for eye in eyes:
            directions = torch.nn.functional.normalize(positions - eye, dim=-1)
            rgb, density = field(positions, directions, times, None)
            colors.append(rgb[:, :3].float())
        seen = torch.stack(colors, dim=1)  # (n, directions, 3)
        part = values[first : first + keys.shape[0]]
        part[:, :3] = seen.mean(1).clamp(0.0, 1.0)
        part[:, 3] = encode_density(density.float(), size)  # type: ignore[possibly-undefined]
        if features:
            residuals.append((seen - seen.mean(1, keepdim=True)).flatten(1).half())
    if features:
        values[:-1, N_BASE:] = _components(residuals)
    return values


def _components(residuals: list[Tensor]) -> Tensor:
    """(n, 4) in [0, 1]: the main components, scaled so that two deviations fill the range."""
    some = torch.cat([part[:: max(1, part.shape[0] // 4096)] for part in residuals]).float()
    if float(some.abs().max()) < 1e-6:
        return torch.full((sum(part.shape[0] for part in residuals), N_FEATURES), 0.5, device=some.device)
    covariance = (some.T @ some / some.shape[0]).double().cpu()
    axes = torch.linalg.eigh(covariance).eigenvectors[:, -N_FEATURES:].flip(-1).float().to(some.device)
    scale = (some @ axes).std(0).clamp_min(1e-6) * 2.0
    return torch.cat([(part.float() @ axes / scale / FEATURE_SCALE + 0.5).clamp(0.0, 1.0) for part in residuals])
