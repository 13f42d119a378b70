"""A baked scene: bytes at the vertices of sparse blocks, and the numbers that a page needs to draw them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .lattice import BLOCK, SparseBlocks
from .shading import N_BASE, DeferredNetwork


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
