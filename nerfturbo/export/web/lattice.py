"""Where the texels of a baked scene lie: nested lattices of cells, cut into blocks of which only some exist.

Level l covers the box scaled by 2^l about its centre with cells of size voxel * 2^l; a point belongs to the finest
level that holds it, as in the occupancy grid. A block has 8 texels and 7 cells a side: neighbours share a layer, so
that hardware filters never look outside a block. A scene without an end has several levels, an object one.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...sampling.geometry import dilate
from ...types import Aabb

BLOCK = 8  # texels along a side of a block
CELLS = BLOCK - 1
TEXELS = BLOCK**3
MAX_SKIP = 255  # blocks


@dataclass(frozen=True)
class Lattice:
    """`blocks` per axis and level; the same for every level.

    >>> lattice = Lattice((0.0, 0.0, 0.0), 0.5, (1, 1, 1), levels=2)
    >>> lattice.half, lattice.level_of(torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 2.0], [9.0, 0.0, 0.0]])).tolist()
    ((1.75, 1.75, 1.75), [0, 1, 2])
    """

    center: tuple[float, float, float]
    voxel: float  # size of a cell of level 0
    blocks: tuple[int, int, int]  # x, y, z
    levels: int = 1

    @classmethod
    def around(cls, box: Aabb, voxel: float, levels: int = 1) -> "Lattice":
        """The smallest whole number of blocks over the box."""
        x, y, z = (max(1, math.ceil(size / (voxel * CELLS) - 1e-6)) for size in box.size)
        return cls(box.center, voxel, (x, y, z), levels)

    @property
    def half(self) -> tuple[float, float, float]:
        """Half the extent of level 0."""
        x, y, z = (n * CELLS * self.voxel * 0.5 for n in self.blocks)
        return x, y, z

    @property
    def cells(self) -> tuple[int, int, int]:
        x, y, z = (n * CELLS for n in self.blocks)
        return x, y, z

    @property
    def box(self) -> Aabb:
        """Of level 0."""
        low, high = (tuple(c + side * h for c, h in zip(self.center, self.half, strict=True)) for side in (-1, 1))
        return Aabb(low, high)  # type: ignore[arg-type]

    def level_of(self, positions: Tensor) -> Tensor:
        """(n,) int64 for positions (n, 3); `levels` where they lie outside."""
        size = ((positions - positions.new_tensor(self.center)) / positions.new_tensor(self.half)).abs().amax(-1)
        level = torch.log2(size.clamp_min(1.0)).ceil().long()
        return torch.where(level < self.levels, level, self.levels)

    def coordinates(self, positions: Tensor, level: Tensor) -> Tensor:
        """(n, 3): positions in cells of their level, from its low corner."""
        scale = torch.pow(2.0, level.to(positions.dtype))[:, None]
        half = positions.new_tensor(self.half)
        return ((positions - positions.new_tensor(self.center)) / scale + half) / self.voxel

    def cell_size(self, positions: Tensor) -> Tensor | float:
        """Of the cells in which positions (n, 3) lie: (n,), or one number where there is one level."""
        level = self.level_of(positions).clamp(max=self.levels - 1)
        return self.voxel if self.levels == 1 else self.voxel * torch.pow(2.0, level.float())

    def cell_keys(self, positions: Tensor) -> Tensor:
        """(n,) int64: the cells in which positions (n, 3) lie; -1 for those outside."""
        level = self.level_of(positions)
        cell = self.coordinates(positions, level.clamp(max=self.levels - 1)).long()
        cell = torch.minimum(cell.clamp_min(0), cell.new_tensor(self.cells) - 1)
        return torch.where(level < self.levels, _joined(level, cell, self.cells), -1)

    def cell_centers(self, keys: Tensor) -> Tensor:
        """(n, 3) float32 in the world."""
        level, cell = _split(keys, self.cells)
        return self._positions(level, cell + 0.5)

    def vertex_keys(self, level: Tensor, vertex: Tensor) -> Tensor:
        """(n,) int64 of vertices (n, 3): corners of cells, one more per axis than there are cells."""
        return _joined(level, vertex, self._vertices)

    def vertex_positions(self, keys: Tensor) -> Tensor:
        """(n, 3) float32 in the world."""
        return self._positions(*_split(keys, self._vertices))

    def _positions(self, level: Tensor, place: Tensor) -> Tensor:
        half, center = (torch.tensor(values, device=place.device) for values in (self.half, self.center))
        return center + (place * self.voxel - half) * torch.pow(2.0, level.float())[:, None]

    @property
    def _vertices(self) -> tuple[int, int, int]:
        x, y, z = self.cells
        return x + 1, y + 1, z + 1


def _joined(level: Tensor, place: Tensor, counts: tuple[int, int, int]) -> Tensor:
    """(n,) int64 keys of places (n, 3) on levels (n,) with so many places along each axis."""
    nx, ny, nz = counts
    return ((level * nz + place[:, 2]) * ny + place[:, 1]) * nx + place[:, 0]


def _split(keys: Tensor, counts: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """The levels and places of keys."""
    nx, ny, nz = counts
    return keys // (nx * ny * nz), torch.stack([keys % nx, keys // nx % ny, keys // (nx * ny) % nz], dim=-1)


@dataclass(frozen=True)
class SparseBlocks:
    """The blocks that exist, in the order in which a page loads them, and the vertices they hold. A vertex is stored
    once, by the first block that holds it, and vertices are numbered in the order of that block and of their texel in
    it. Vertex `n_vertices` stands for all that are not kept: empty."""

    lattice: Lattice
    blocks: Tensor  # (n_blocks, 4) int64: x, y, z, level
    texels: Tensor  # (n_blocks, 512) int32: the vertex of each texel, x fastest
    vertices: Tensor  # (n_vertices,) int64 keys
    owners: Tensor  # (n_vertices,) int64: block * 512 + texel where the vertex is stored
    slots: Tensor  # (levels, z, y, x) int32: number of the block, -1 where there is none

    @property
    def n_blocks(self) -> int:
        return self.blocks.shape[0]

    @property
    def n_vertices(self) -> int:
        return self.vertices.shape[0]

    @classmethod
    def of_cells(cls, lattice: Lattice, cells: Tensor, importance: Tensor | None = None) -> "SparseBlocks":
        """Of cells (n,) with these keys, each once; blocks whose cells (n,) sum up to more importance come first."""
        level, cell = _split(cells, lattice.cells)
        nx, ny, nz = lattice.blocks
        found, member = torch.unique(_joined(level, cell // CELLS, lattice.blocks), return_inverse=True)
        weight = torch.ones_like(cells, dtype=torch.float32) if importance is None else importance
        total = torch.zeros(found.shape[0], device=cells.device).index_add_(0, member, weight)
        found = found[torch.argsort(total, descending=True, stable=True)]
        slots = torch.full((lattice.levels * nz * ny * nx,), -1, dtype=torch.int32, device=cells.device)
        slots[found] = torch.arange(found.shape[0], dtype=torch.int32, device=cells.device)
        level_of_block, place = _split(found, lattice.blocks)
        blocks = torch.cat([place, level_of_block[:, None]], dim=1)
        corners = torch.tensor(_CORNERS, device=cells.device)
        kept = torch.cat([lattice.vertex_keys(level, cell + offset) for offset in corners]).unique()
        owners, texels = _owners(lattice, blocks, kept)
        order = torch.argsort(owners)
        renumber = torch.empty(kept.shape[0] + 1, dtype=torch.int32, device=cells.device)
        renumber[order] = torch.arange(kept.shape[0], dtype=torch.int32, device=cells.device)
        renumber[-1] = kept.shape[0]
        slots = slots.view(lattice.levels, nz, ny, nx)
        return cls(lattice, blocks, renumber[texels.long()], kept[order], owners[order], slots)

    def every(self, n: int, cells: Tensor) -> "SparseBlocks":
        """Only each n-th block, counted by importance, of the same cells (m,): a sample of them all."""
        level, cell = _split(cells, self.lattice.cells)
        slot = self.slots[level, cell[:, 2] // CELLS, cell[:, 1] // CELLS, cell[:, 0] // CELLS]
        return SparseBlocks.of_cells(self.lattice, cells[slot % n == 0])

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of positions (n, 3): the level (n,), the place in its cells (n, 3), the block (n, 3) and its number (n,), -1
        where it does not exist. Outside, the level is `levels` and the rest that of the nearest border."""
        lattice = self.lattice
        level = lattice.level_of(positions)
        nearest = level.clamp(max=lattice.levels - 1)
        place = lattice.coordinates(positions, nearest)
        block = (place / CELLS).long().clamp_min(0)
        block = torch.minimum(block, block.new_tensor(lattice.blocks) - 1)
        return level, place, block, self.slots[nearest, block[:, 2], block[:, 1], block[:, 0]].long()

    def gather(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(n, 8) int64 vertices around positions (n, 3) and their trilinear weights; empty outside of the blocks."""
        level, place, block, slot = self.locate(positions)
        inside = (level < self.lattice.levels) & (slot >= 0)
        index, weights = texels_around(slot.clamp_min(0), place - block * CELLS)
        return torch.where(inside[:, None], self.texels.view(-1)[index].long(), self.n_vertices), weights

    @cached_property
    def skips(self) -> Tensor:
        """(levels, z, y, x) uint8: 0 for a block that exists, else d: no block of this level exists nearer than d along
        any axis, so that a ray may leap to the border of that cube. It must not leap into another level."""
        return torch.stack([_distances(full) for full in self.slots >= 0])


_CORNERS = tuple((dx, dy, dz) for dz in (0, 1) for dy in (0, 1) for dx in (0, 1))


def texels_around(slot: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
    """(n, 8) texels of all blocks around places `local` (n, 3) in [0, 7] of blocks `slot` (n,), and their weights."""
    local = local.clamp(0.0, float(CELLS))
    cell = local.long().clamp(max=CELLS - 1)
    part = local - cell
    x, y, z = ((1.0 - part[:, axis], part[:, axis]) for axis in range(3))
    first = slot * TEXELS + (cell[:, 2] * BLOCK + cell[:, 1]) * BLOCK + cell[:, 0]
    index = [first + ((dz * BLOCK + dy) * BLOCK + dx) for dx, dy, dz in _CORNERS]
    return torch.stack(index, dim=1), torch.stack([x[dx] * y[dy] * z[dz] for dx, dy, dz in _CORNERS], dim=1)


def _owners(lattice: Lattice, blocks: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """For sorted vertex keys: block * 512 + texel of the first block that holds each; and (n_blocks, 512) positions in
    `kept` of every texel, its length where a texel is not kept."""
    local = torch.cartesian_prod(*[torch.arange(BLOCK, device=blocks.device)] * 3).flip(-1)
    n = kept.shape[0]
    texels = torch.full((blocks.shape[0], TEXELS), n, dtype=torch.int32, device=blocks.device)
    owners = torch.full((n,), blocks.shape[0] * TEXELS, dtype=torch.int64, device=blocks.device)
    chunk = 4096
    for first in range(0, blocks.shape[0], chunk):
        part = blocks[first : first + chunk]
        vertex = part[:, None, :3] * CELLS + local
        keys = lattice.vertex_keys(part[:, None, 3].expand(-1, TEXELS).reshape(-1), vertex.view(-1, 3))
        found = torch.searchsorted(kept, keys).clamp(max=n - 1)
        here = kept[found] == keys
        texels[first : first + chunk] = torch.where(here, found, n).to(torch.int32).view(-1, TEXELS)
        place = torch.arange(first * TEXELS, first * TEXELS + keys.shape[0], device=blocks.device)
        owners.scatter_reduce_(0, found[here], place[here], "amin")
    return owners, texels


def _distances(full: Tensor) -> Tensor:
    """uint8 (z, y, x): Chebyshev distance to the nearest full block, at most 255, which also says: none at all."""
    if not bool(full.any()):
        return torch.full_like(full, MAX_SKIP, dtype=torch.uint8)
    distance, reached = torch.zeros_like(full, dtype=torch.uint8), full
    while not bool(reached.all()) and int(distance.max()) < MAX_SKIP:
        distance += ~reached
        reached = dilate(reached[None], 1)[0]
    return distance
