"""A baked scene: bytes at the vertices of sparse blocks, what they mean, and how they are packed for a page.

Density in one byte is its logarithm: filtered texels give sharp surfaces, one step of the byte is 4% of the density.

    density * voxel = exp(LOW + code * (HIGH - LOW)) - exp(LOW),   code = byte / 255

Along a ray, weights w_i = T_i (1 - exp(-density_i dt)) sum up base colour c = sum w_i c_i, features f = sum w_i f_i and
opacity a = sum w_i. A small network sees [c, f, basis(direction), 1], once per pixel (deferred), and its three outputs,
times the opacity, are added to c.

Chunk "blocks" says where blocks lie and which of their texels are kept: per block x, y, z, level as 16-bit numbers and
64 bytes, one bit per texel, x fastest; all positions first, then all bits. Chunks "base" and "features" hold the
vertices of a range of blocks, each vertex once, in the first block that holds it. A value is stored as its difference
from the mean of the texels before it along x, y and z that are kept (rounded down; 0 without any), modulo 256; channel
after channel: density, green, red - green, blue - green; the features. Base chunks come before all features, so that
the whole scene is there, without its reflections, in about half the time.
"""

import math
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .lattice import BLOCK, TEXELS, SparseBlocks

VERSION = 1
BLOCKS_PER_CHUNK = 2048
# How a ray of the page walks:
STEP = 0.5  # of a cell, between two samples
NUDGE = 0.01  # of a cell: how far a leap ends behind the border
MAX_STEPS = 4096
LAST_LIGHT = 1.0 / 256.0  # a ray ends where less than this passes
# What a vertex holds:
N_BASE = 4  # red, green, blue, density
DENSITY = 3  # its place among them
N_FEATURES = 4
FEATURE_SCALE = 4.0  # stored in [0, 1], meant in [-2, 2]
LOW, HIGH = -6.0, 4.0  # of the density's logarithm
_NOTHING = math.exp(LOW)
WIDTH = 16  # inputs and hidden neurons of the network


@dataclass(frozen=True)
class Baked:
    """`values` are bytes: red, green, blue, density code, and features where there is a network for them."""

    blocks: SparseBlocks
    values: Tensor  # (n_vertices, 4 or 8) uint8
    network: "DeferredNetwork | None"
    near: float  # nothing nearer to the eye is drawn

    @classmethod
    def of(cls, blocks: SparseBlocks, values: Tensor, network: "DeferredNetwork | None", near: float) -> "Baked":
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


def decode_density(code: Tensor, voxel: float | Tensor) -> Tensor:
    """Density per unit of length of codes in [0, 1], after filtering.

    >>> [round(value, 3) for value in decode_density(torch.tensor([0.0, 0.6]), 0.5).tolist()]
    [0.0, 1.995]
    """
    return (torch.exp(LOW + code * (HIGH - LOW)) - _NOTHING) / voxel


def encode_density(density: Tensor, voxel: float | Tensor) -> Tensor:
    """The inverse, clamped to [0, 1]."""
    return ((torch.log(density * voxel + _NOTHING) - LOW) / (HIGH - LOW)).clamp(0.0, 1.0)


class DeferredNetwork(nn.Module):
    """Sixteen inputs, two hidden layers with ReLU, three outputs; no biases, for one input is always 1."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        wide = math.sqrt(6.0 / WIDTH)
        self.weights = nn.ParameterList(
            nn.Parameter((torch.rand(rows, WIDTH, generator=generator) * 2.0 - 1.0) * bound)
            for rows, bound in ((WIDTH, wide), (WIDTH, wide), (3, 1e-2))
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """(n, 3) for inputs (n, 16)."""
        hidden = inputs
        for weight in self.weights[:-1]:
            hidden = torch.relu(hidden @ weight.T)
        return hidden @ self.weights[-1].T


def shade(summed: Tensor, opacity: Tensor, directions: Tensor, network: DeferredNetwork | None) -> Tensor:
    """(n, 3) colours before the background, of summed base colours (n, 3), or (n, 7) with features as meant."""
    if network is None:
        return summed[:, :3]
    x, y, z = directions.unbind(-1)  # and the spherical harmonics of degree 1 and 2 but for their constants
    basis = torch.stack([x, y, z, 2.0 * x * y, 2.0 * y * z, 2.0 * x * z, x * x - y * y, 1.5 * z * z - 0.5], dim=-1)
    inputs = torch.cat([summed, basis, torch.ones_like(opacity)[:, None]], dim=-1)
    return summed[:, :3] + opacity[:, None] * network(inputs)


def meant_features(stored: Tensor) -> Tensor:
    """[0, 1] to [-2, 2]."""
    return (stored - 0.5) * FEATURE_SCALE


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
        place = {"kind": self.kind, "first": self.first, "last": self.last}
        return place | {"raw": self.raw_bytes, "bytes": len(self.content)}


def pack(baked: Baked) -> list[Chunk]:
    """All chunks of a scene, deflated: what was learned is the smallest where only runs are looked for, not repeats."""
    blocks = baked.blocks

    def chunk(kind: str, first: int, last: int, content: bytes) -> Chunk:
        streams = [zlib.compressobj(4, strategy=strategy) for strategy in (zlib.Z_RLE, zlib.Z_DEFAULT_STRATEGY)]
        smallest = min((stream.compress(content) + stream.flush() for stream in streams), key=len)
        return Chunk(kind, first, last, len(content), smallest)

    kept = np.packbits((blocks.texels < blocks.n_vertices).cpu().numpy(), axis=1, bitorder="little")
    structure = blocks.blocks.cpu().numpy().astype("<u2").tobytes() + kept.tobytes()
    chunks, residuals = [chunk("blocks", 0, blocks.n_blocks, structure)], _residuals(blocks, baked.values)
    starts = np.searchsorted(blocks.owners.cpu().numpy(), np.arange(0, blocks.n_blocks + 1) * TEXELS)
    base, features = ("base", residuals[:, :N_BASE]), ("features", residuals[:, N_BASE:])
    for kind, values in (base, features) if baked.n_features else (base,):
        for first in range(0, blocks.n_blocks, BLOCKS_PER_CHUNK):
            last = min(first + BLOCKS_PER_CHUNK, blocks.n_blocks)
            part = values[starts[first] : starts[last]]
            chunks.append(chunk(kind, first, last, np.ascontiguousarray(part.T).tobytes()))
    return chunks


def header(baked: Baked) -> dict[str, Any]:
    """What the page's shader and loader must know, as plain values."""
    lattice = baked.blocks.lattice
    layers = () if baked.network is None else baked.network.weights
    network = [[round(value, 6) for value in layer.detach().float().flatten().tolist()] for layer in layers]
    place = {"center": list(lattice.center), "voxel": lattice.voxel, "blocks": list(lattice.blocks)}
    place |= {"levels": lattice.levels, "nBlocks": baked.blocks.n_blocks, "nVertices": baked.blocks.n_vertices}
    values = {"nFeatures": baked.n_features, "featureScale": FEATURE_SCALE, "density": [LOW, HIGH]}
    walk = {"step": STEP, "nudge": NUDGE, "maxSteps": MAX_STEPS, "lastLight": LAST_LIGHT, "near": baked.near}
    return {"version": VERSION, **place, **values, **walk, "network": network or None}


def _residuals(blocks: SparseBlocks, values: Tensor) -> np.ndarray:
    """(n_vertices, channels) uint8: density, green, red - green, blue - green, features, each less its prediction."""
    rows = torch.cat([values.int(), values.new_zeros(1, values.shape[1]).int()])
    block, texel = blocks.owners // TEXELS, blocks.owners % TEXELS
    total, count = torch.zeros_like(rows[:-1]), torch.zeros_like(rows[:-1, :1])
    for stride in (1, BLOCK, BLOCK * BLOCK):
        before = blocks.texels[block, (texel - stride).clamp_min(0)].long()
        before = torch.where(texel // stride % BLOCK > 0, before, blocks.n_vertices)
        total += rows[before]
        count += (before < blocks.n_vertices)[:, None].int()
    left = values.int() - total // count.clamp_min(1)
    red, green, blue, density = left[:, :N_BASE].unbind(-1)
    ordered = torch.stack([density, green, red - green, blue - green], dim=-1)
    return (torch.cat([ordered, left[:, N_BASE:]], dim=1) % 256).to(torch.uint8).cpu().numpy()
