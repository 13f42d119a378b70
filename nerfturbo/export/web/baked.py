"""A baked scene: bytes at the vertices of sparse blocks, and the numbers that a page needs to draw them."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .lattice import BLOCK, TEXELS, SparseBlocks

# How a ray of the page walks:
STEP = 0.5  # of a cell, between two samples
NUDGE = 0.01  # of a cell: how far a leap ends behind the border
MAX_STEPS = 4096
LAST_LIGHT = 1.0 / 256.0  # a ray ends where less than this passes


@dataclass(frozen=True)
class Baked:
    """`values` are bytes: red, green, blue, density code, and features where there is a network for them."""

    blocks: SparseBlocks
    values: Tensor  # (n_vertices, 4 or 8) uint8
    network: DeferredNetwork | None
    near: float  # nothing nearer to the eye is drawn

    @classmethod
    def of(cls, blocks: SparseBlocks, values: Tensor, network: DeferredNetwork | None, near: float) -> Baked:
        """From values (n_vertices + 1, 4 or 8) in [0, 1]."""
        return cls(blocks, (values[:-1] * 255.0).round().clamp(0, 255).to(torch.uint8), network, near)

    @property
    def n_features(self) -> int:
        return self.values.shape[1] - N_BASE

    @cached_property
    def atlas(self) -> Tensor:
        """(n_blocks, 8, 8, 8, channels) uint8, z first: every block with all its texels, as in the page's texture."""
        rows = torch.cat([self.values, self.values.new_zeros(1, self.values.shape[1])])
        return rows[self.blocks.texels.long()].view(-1, BLOCK, BLOCK, BLOCK, rows.shape[1])

    @cached_property
    def skips(self) -> Tensor:
        return self.blocks.skips()


LOW, HIGH = -6.0, 4.0
_NOTHING = math.exp(LOW)


def decode_density(code: Tensor, voxel: float | Tensor) -> Tensor:
    """Density per unit of length of codes in [0, 1], after filtering.

    >>> [round(value, 3) for value in decode_density(torch.tensor([0.0, 0.6]), 0.5).tolist()]
    [0.0, 1.995]
    """
    return (torch.exp(LOW + code * (HIGH - LOW)) - _NOTHING) / voxel


def encode_density(density: Tensor, voxel: float | Tensor) -> Tensor:
    """The inverse, clamped to [0, 1]."""
    return ((torch.log(density * voxel + _NOTHING) - LOW) / (HIGH - LOW)).clamp(0.0, 1.0)


N_BASE = 4  # red, green, blue, density
DENSITY = 3  # its place among them
N_FEATURES = 4
N_DIRECTION = 8
WIDTH = 16  # inputs and hidden neurons
FEATURE_SCALE = 4.0  # stored in [0, 1], meant in [-2, 2]


def direction_basis(directions: Tensor) -> Tensor:
    """(n, 8): the spherical harmonics of degree 1 and 2 but for their constants, of unit directions (n, 3)."""
    x, y, z = directions.unbind(-1)
    return torch.stack([x, y, z, 2.0 * x * y, 2.0 * y * z, 2.0 * x * z, x * x - y * y, 1.5 * z * z - 0.5], dim=-1)


class DeferredNetwork(nn.Module):
    """Sixteen inputs, two hidden layers with ReLU, three outputs; no biases, for one input is always 1."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        shapes = ((WIDTH, WIDTH), (WIDTH, WIDTH), (3, WIDTH))
        bounds = (math.sqrt(6.0 / WIDTH), math.sqrt(6.0 / WIDTH), 1e-2)
        made = [
            (torch.rand(shape, generator=generator) * 2.0 - 1.0) * b for shape, b in zip(shapes, bounds, strict=True)
        ]
        self.weights = nn.ParameterList([nn.Parameter(value) for value in made])

    def forward(self, inputs: Tensor) -> Tensor:
        """(n, 3) for inputs (n, 16)."""
        hidden = inputs
        for weight in self.weights[:-1]:
            hidden = torch.relu(hidden @ weight.T)
        return hidden @ self.weights[-1].T


def shade(summed: Tensor, opacity: Tensor, directions: Tensor, network: DeferredNetwork | None) -> Tensor:
    """(n, 3) colours before the background, of what rays summed up: (n, 3) base colour or (n, 7) with features in
    their meant range."""
    base = summed[:, :3]
    if network is None:
        return base
    basis = direction_basis(directions)
    inputs = torch.cat([summed, basis, torch.ones_like(opacity)[:, None]], dim=-1)
    return base + opacity[:, None] * network(inputs)


def meant_features(stored: Tensor) -> Tensor:
    """[0, 1] to [-2, 2]."""
    return (stored - 0.5) * FEATURE_SCALE


VERSION = 1
BLOCKS_PER_CHUNK = 2048
LEVEL = 9  # of deflate


@dataclass(frozen=True)
class Chunk:
    """One piece of a page's data."""

    kind: str  # blocks, base or features
    first: int  # block
    last: int
    raw_bytes: int
    content: bytes  # deflated (zlib)

    def describe(self) -> dict[str, Any]:
        """What the page must know before it comes; zlib's own checksum tells a broken one."""
        return {"kind": self.kind, "first": self.first, "last": self.last, "raw": self.raw_bytes} | {
            "bytes": len(self.content)
        }


def pack(baked: Baked, *, level: int = LEVEL) -> list[Chunk]:
    """All chunks of a scene."""
    blocks = baked.blocks
    residuals = _residuals(blocks, baked.values)
    chunks = [_chunk("blocks", 0, blocks.n_blocks, _structure(blocks), level)]
    starts = np.searchsorted(blocks.owners.cpu().numpy(), np.arange(0, blocks.n_blocks + 1) * TEXELS)
    for kind, channels in (("base", slice(0, N_BASE)), ("features", slice(N_BASE, None))):
        if kind == "features" and baked.n_features == 0:
            continue
        for first in range(0, blocks.n_blocks, BLOCKS_PER_CHUNK):
            last = min(first + BLOCKS_PER_CHUNK, blocks.n_blocks)
            part = residuals[starts[first] : starts[last], channels]
            chunks.append(_chunk(kind, first, last, np.ascontiguousarray(part.T).tobytes(), level))
    return chunks


def header(baked: Baked) -> dict[str, Any]:
    """What the page's shader and loader must know, as plain values."""
    lattice = baked.blocks.lattice
    network = None
    if baked.network is not None:
        network = [
            [round(v, 6) for v in weight.detach().float().cpu().flatten().tolist()] for weight in baked.network.weights
        ]
    return {
        "version": VERSION,
        "center": list(lattice.center),
        "voxel": lattice.voxel,
        "blocks": list(lattice.blocks),
        "levels": lattice.levels,
        "nBlocks": baked.blocks.n_blocks,
        "nVertices": baked.blocks.n_vertices,
        "nFeatures": baked.n_features,
        "featureScale": FEATURE_SCALE,
        "density": [LOW, HIGH],
        "step": STEP,
        "nudge": NUDGE,
        "maxSteps": MAX_STEPS,
        "lastLight": LAST_LIGHT,
        "near": baked.near,
        "network": network,
    }


def _chunk(kind: str, first: int, last: int, content: bytes, level: int) -> Chunk:
    return Chunk(kind, first, last, len(content), zlib.compress(content, level))


def _structure(blocks: SparseBlocks) -> bytes:
    kept = (blocks.texels < blocks.n_vertices).cpu().numpy()
    return blocks.blocks.cpu().numpy().astype("<u2").tobytes() + np.packbits(kept, axis=1, bitorder="little").tobytes()


def _residuals(blocks: SparseBlocks, values: Tensor) -> np.ndarray:
    """(n_vertices, channels) uint8: density, green, red - green, blue - green, features, each less its prediction."""
    rows = torch.cat([values.int(), values.new_zeros(1, values.shape[1]).int()])
    texel = blocks.owners % TEXELS
    block = blocks.owners // TEXELS
    total = torch.zeros(values.shape, dtype=torch.int32, device=values.device)
    count = torch.zeros(values.shape[0], dtype=torch.int32, device=values.device)
    for axis in range(3):
        stride = BLOCK**axis
        inside = texel // stride % BLOCK > 0
        before = blocks.texels[block, (texel - stride).clamp_min(0)].long()
        before = torch.where(inside, before, blocks.n_vertices)
        total += rows[before]
        count += (before < blocks.n_vertices).int()
    predicted = torch.div(total, count.clamp_min(1)[:, None], rounding_mode="floor")
    left = values.int() - predicted
    red, green, blue, density = left[:, :N_BASE].unbind(-1)
    ordered = torch.stack([density, green, red - green, blue - green], dim=-1)
    return (torch.cat([ordered, left[:, N_BASE:]], dim=1) % 256).to(torch.uint8).cpu().numpy()
