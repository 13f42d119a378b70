"""Grids of trainable features: hashed, dense and tiled, in one to seven dimensions.

Level l has the scale s_l = base_resolution * per_level_scale^l - 1 and the nodes of tiny-cuda-nn. Three dimensions
with linear blending, hashed or dense, are what `nerfturbo.ops.hash_encode` computes, by kernels; the rest is plain
torch. The kernels' table has one more node per axis of a dense level than tiny-cuda-nn's, which lets the last nodes
wrap around to the first ones instead; `from_original` copies its parameters to where they belong.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...errors import InputError
from ...ops import hash_encode
from ...ops.hash_encode import HashLayout, HashLevel
from ._config import Config

PRIMES = (1, 2654435761, 805459861, 3674653429, 2097192037, 1434869437, 2165219737)
MOST_ROWS = 1 << 28


@dataclass(frozen=True)
class GridSpec:
    """What a grid's configuration says."""

    kind: str  # hash, dense or tiled
    dims: int
    n_levels: int
    features: int
    log2_size: int
    base: int
    growth: float
    blend: str  # linear, smoothstep or nearest

    def scale(self, level: int) -> float:
        """Rounded to float32, so that every backend computes the same cell from the same number."""
        exact = 2.0 ** (level * math.log2(self.growth)) * self.base - 1.0
        return float(torch.tensor(exact, dtype=torch.float32))

    def nodes(self, level: int) -> int:
        """tiny-cuda-nn's nodes per axis."""
        return math.ceil(self.scale(level)) + 1

    def rows(self, level: int) -> int:
        """tiny-cuda-nn's rows of a level."""
        dense = (self.nodes(level) ** self.dims + 7) // 8 * 8
        if self.kind == "hash":
            return min(dense, 1 << self.log2_size)
        return min(dense, self.base**self.dims) if self.kind == "tiled" else dense

    @property
    def original_rows(self) -> int:
        return sum(self.rows(level) for level in range(self.n_levels))


@dataclass(frozen=True)
class NodeLayout(HashLayout):
    """tiny-cuda-nn's levels for the hash-encoding kernels."""

    spec: GridSpec | None = None

    @cached_property
    def levels(self) -> tuple[HashLevel, ...]:
        assert self.spec is not None
        result, offset = [], 0
        for index in range(self.n_levels):
            scale = self.spec.scale(index)
            nodes = math.floor(scale + 0.5) + 2
            hashed = self.spec.kind == "hash" and self.spec.nodes(index) ** 3 > 1 << self.log2_entries
            size = 1 << self.log2_entries if hashed else (nodes**3 + 7) // 8 * 8
            result.append(HashLevel(scale, nodes, offset, size, hashed))
            offset += size
        return tuple(result)


def grid_spec(config: Config, dims: int, kind: str) -> GridSpec:
    """Read a grid's configuration; `kind` is what its name says."""
    kinds = {"hash": "hash", "dense": "dense", "tiled": "tiled", "tile": "tiled"}
    blends = {"linear": "linear", "smoothstep": "smoothstep", "nearest": "nearest"}
    if not 1 <= dims <= len(PRIMES):
        raise InputError(config.where, f"1 to {len(PRIMES)} dimensions", str(dims))
    features = config.integer("n_features_per_level", 2)
    n_levels = config.integer("n_levels", 16)
    if "n_features" in config:
        n_levels = config.integer("n_features", 32) // features
    if features not in (1, 2, 4, 8) or n_levels > 32:
        got = f"{features} features on {n_levels} levels"
        raise InputError(config.where, "1, 2, 4 or 8 features per level on at most 32 levels", got)
    if config.values.get("stochastic_interpolation", False):
        raise InputError(f"{config.where}.stochastic_interpolation", "false", "true", "blending here is exact")
    spec = GridSpec(
        config.choice("type", kind, kinds),
        dims,
        n_levels,
        features,
        config.integer("log2_hashmap_size", 19),
        config.integer("base_resolution", 16),
        config.number("per_level_scale", 2.0),
        config.choice("interpolation", "Linear", blends),
    )
    if spec.growth <= 0.0 or spec.original_rows > MOST_ROWS:
        got = f"{spec.original_rows} rows" if spec.growth > 0.0 else f"per_level_scale = {spec.growth}"
        raise InputError(config.where, f"a table of at most {MOST_ROWS} rows", got, "make the grid coarser")
    return spec


class Grid:
    """An encoding of positions in [0, 1]^dims into n_levels * features numbers."""

    pad_value = 0.0

    def __init__(self, spec: GridSpec) -> None:
        self.spec, self.alignment = spec, spec.features
        self.n_inputs, self.n_outputs = spec.dims, spec.n_levels * spec.features
        self.layout: NodeLayout | None = None
        if spec.dims == 3 and spec.kind != "tiled" and spec.blend == "linear" and 3 <= spec.log2_size <= 28:
            finest = max(spec.base, math.ceil(spec.scale(spec.n_levels - 1)) + 1)
            self.layout = NodeLayout(spec.n_levels, spec.features, spec.log2_size, spec.base, finest, spec)
        rows = spec.original_rows if self.layout is None else self.layout.n_entries
        self.n_params = rows * spec.features
        self.n_original_params = spec.original_rows * spec.features

    def initial(self, generator: torch.Generator) -> Tensor:
        return torch.empty(self.n_params).uniform_(-1e-4, 1e-4, generator=generator)

    def __call__(self, x: Tensor, params: Tensor, half: Tensor | None) -> Tensor:
        table = params.view(-1, self.spec.features)
        if self.layout is not None:
            copy = None if half is None else half.view(-1, self.spec.features)
            return hash_encode(x, table, self.layout, half=copy)
        result = self._encode(x, table)
        return result if half is None else result.to(half.dtype)

    def _encode(self, x: Tensor, table: Tensor) -> Tensor:
        parts, offset = [], 0
        for level in range(self.spec.n_levels):
            p = x.clamp(0.0, 1.0) * self.spec.scale(level) + 0.5
            cell = p.detach().floor()
            fraction = p - cell
            if self.spec.blend == "smoothstep":
                fraction = fraction * fraction * (3.0 - 2.0 * fraction)
            elif self.spec.blend == "nearest":
                fraction = torch.zeros_like(fraction)
            value = torch.zeros(x.shape[0], self.spec.features, dtype=x.dtype, device=x.device)
            corners = itertools.product((0, 1), repeat=self.spec.dims)
            for corner in corners if self.spec.blend != "nearest" else [(0,) * self.spec.dims]:
                shift = torch.tensor(corner, device=x.device)
                weight = torch.where(shift.bool(), fraction, 1.0 - fraction).prod(-1)
                value = value + weight[:, None] * table[offset + self._row(level, cell.long() + shift)].to(x.dtype)
            parts.append(value)
            offset += self.spec.rows(level)
        return torch.cat(parts, dim=-1)

    def _row(self, level: int, node: Tensor) -> Tensor:
        """tiny-cuda-nn's row of a node: strides while they fit the table, else the hash; always modulo its size."""
        size, nodes, stride = self.spec.rows(level), self.spec.nodes(level), 1
        index = torch.zeros_like(node[:, 0])
        for axis in range(self.spec.dims):
            if stride > size:
                break
            index = index + node[:, axis] * stride
            stride *= nodes
        if self.spec.kind == "hash" and size < stride:
            index = torch.zeros_like(index)
            for axis in range(self.spec.dims):
                index = index ^ ((node[:, axis] * PRIMES[axis]) & 0xFFFFFFFF)
        return index % size

    def from_original(self, params: Tensor) -> Tensor:
        """tiny-cuda-nn's parameters of the same grid, in this one's order: the same function of position."""
        if self.layout is None:
            return params
        source, offset, parts = params.view(-1, self.spec.features), 0, []
        for index, level in enumerate(self.layout.levels):
            rows = torch.arange(level.size, device=params.device)
            if not level.hashed:
                node = torch.stack([rows // level.nodes**axis % level.nodes for axis in range(3)], dim=-1)
                rows = self._row(index, node)
            parts.append(source[offset + rows])
            offset += self.spec.rows(index)
        return torch.cat(parts).reshape(-1)
