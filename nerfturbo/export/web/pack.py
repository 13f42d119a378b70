"""A baked scene as bytes: a header, the blocks, and chunks of deflated texels, in the order in which a page wants them.

Chunk "blocks" says where blocks lie and which of their texels are kept: per block x, y, z, level as 16-bit numbers and
64 bytes, one bit per texel, x fastest; all positions first, then all bits. Chunks "base" and "features" hold the
vertices of a range of blocks, each vertex once, in the first block that holds it. A value is stored as its difference
from the mean of the texels before it along x, y and z that are kept (rounded down; 0 without any), modulo 256; channel
after channel: density, green, red - green, blue - green; the features. Base chunks come before all features, so that
the whole scene is there, without its reflections, in about half the time.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import density as density_code
from .baked import Baked
from .lattice import BLOCK, TEXELS, SparseBlocks
from .reference import MAX_STEPS, NUDGE
from .shading import FEATURE_SCALE, N_BASE
from .tune import LAST_LIGHT, STEP

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
        "density": [density_code.LOW, density_code.HIGH],
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
