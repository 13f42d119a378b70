"""Multiresolution hash encoding: trilinear look-up of learned features at many resolutions.

Level l has the scale s_l = base_resolution * b^l, growing to max_resolution at the last. A position x in [0, 1]^3
lands at p = x * s_l + 0.5, so that the nodes of different levels do not coincide; its cell is floor(p), its eight
corner nodes are looked up and blended by the fraction p - floor(p). A level whose nodes fit the table is stored
densely (x fastest); a finer one is hashed: (x * 1) xor (y * 2654435761) xor (z * 805459861), modulo the table's size.

A sample may stand for a region (Zip-NeRF): several points of it, each with a footprint. A level then gives the mean of
its features at the points, and counts less for a point whose footprint is wider than the level's cells,

    weight_l = erf(1 / (sqrt(8) * footprint * s_l))

with `footprint` the standard deviation of what a point stands for, in the unit of positions.
"""

import functools
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .._checks import check_device, check_tensor, refuse
from .._dispatch import implementation
from .._sink import GradientSink, check_count, check_sink

PRIMES = (1, 2654435761, 805459861)
GROUP = 128  # consecutive samples whose gradients are compared where small ones are thinned out


@dataclass(frozen=True)
class HashLevel:
    """One resolution level: `size` table rows from `offset` on, `nodes` per axis."""

    scale: float
    nodes: int
    offset: int
    size: int
    hashed: bool


@dataclass(frozen=True)
class HashLayout:
    """Where each level lives in the one table. Every level's size is a multiple of 8 rows.

    >>> layout = HashLayout(n_levels=2, n_features=2, log2_entries=12, base_resolution=4, max_resolution=64)
    >>> [(level.nodes, level.size, level.hashed) for level in layout.levels], layout.n_entries
    ([(6, 216, False), (66, 4096, True)], 4312)
    """

    n_levels: int = 16
    n_features: int = 2
    log2_entries: int = 19
    base_resolution: int = 16
    max_resolution: int = 2048

    def __post_init__(self) -> None:
        refuse(self.n_features not in (1, 2, 4, 8), "n_features", "1, 2, 4 or 8", self.n_features)
        refuse(not 1 <= self.n_levels <= 32, "n_levels", "1 to 32", self.n_levels)
        refuse(not 3 <= self.log2_entries <= 28, "log2_entries", "3 to 28", self.log2_entries)
        least, bad = self.base_resolution, not 1 <= self.base_resolution <= self.max_resolution
        refuse(bad, "max_resolution", f"at least base_resolution = {least}", self.max_resolution)

    @cached_property
    def levels(self) -> tuple[HashLevel, ...]:
        growth = 0.0
        if self.n_levels > 1:
            growth = math.log(self.max_resolution / self.base_resolution) / (self.n_levels - 1)
        result, offset = [], 0
        for index in range(self.n_levels):
            # Rounded to float32's grid so that every backend computes the same cell from the same number.
            scale = float(round(self.base_resolution * math.exp(index * growth) * 1024) / 1024)
            nodes = math.floor(scale + 0.5) + 2
            dense = (nodes**3 + 7) // 8 * 8
            size = min(dense, 1 << self.log2_entries)
            result.append(HashLevel(scale, nodes, offset, size, dense > size))
            offset += size
        return tuple(result)

    @property
    def n_entries(self) -> int:
        return self.levels[-1].offset + self.levels[-1].size

    def levels_of(self, first: int, last: int) -> tuple[int, int]:
        """First level, and the one after the last, of rows first ... last - 1, which must be those of whole levels."""
        own = [index for index, level in enumerate(self.levels) if first <= level.offset < last]
        return own[0], own[-1] + 1

    @property
    def n_outputs(self) -> int:
        return self.n_levels * self.n_features


def hash_encode(
    positions: Tensor,
    table: Tensor,
    layout: HashLayout,
    *,
    footprints: Tensor | None = None,
    half: Tensor | None = None,
    sink: GradientSink | None = None,
    n_used: Tensor | None = None,
) -> Tensor:
    """(n, n_levels * n_features) in the table's dtype: level after level, each with its features.

    Differentiable to `table` (n_entries, n_features) and to `positions` (n, 3), which are clamped to [0, 1] (no
    gradient past the border). Positions stay fp32; weights and sums are fp32 also for a half table. With `footprints`
    (n, points) >= 0, positions are (n, points, 3): the mean over each row's points, of levels that fade.

    For mixed precision, `table` is the fp32 master and `half` its copy in half precision: the copy is read and sets
    the result's dtype, the gradient goes to the master. A `sink` with one buffer takes the table's gradient in place of
    autograd; where it thins, Triton leaves small gradients of fine levels out (`reference.thin_out`). `n_used`, a count
    on the device, says how many rows count: the others come out as zero and receive no gradient, whatever they hold.

    Under `torch.use_deterministic_algorithms(True)` the table's gradient is the same, bit for bit, in every run.

    >>> import torch
    >>> layout = HashLayout(n_levels=2, n_features=2, log2_entries=12, base_resolution=4, max_resolution=64)
    >>> hash_encode(torch.rand(5, 3), torch.ones(layout.n_entries, 2), layout).mean().round(decimals=4)
    tensor(1.)
    """
    check_tensor("positions", positions, ("n", 3) if footprints is None else ("n", "points", 3))
    check_tensor("table", table, (layout.n_entries, layout.n_features))
    check_device(positions=positions, table=table, half=half, footprints=footprints)
    check_count(n_used, positions.device)
    if half is not None:
        check_tensor("half", half, tuple(table.shape))
    check_sink(sink, ["table"], [table])
    options = {"half": half, "sink": sink, "n_used": n_used}
    if footprints is None:
        return implementation("hash_encode", "hash_encode", positions)(positions, table, layout, **options)
    check_tensor("footprints", footprints, tuple(positions.shape[:2]))
    refuse(positions.shape[1] == 0, "positions", "one point or more in each row", 0)
    encode = implementation("hash_encode", "encode_regions", positions)
    return encode(positions, footprints.detach(), table, layout, **options)


def level_weights(footprints: Tensor, layout: HashLayout) -> Tensor:
    """(n, n_levels): what each level counts at footprints (n,); 1 at footprint 0, where the argument is infinite."""
    wide = footprints if footprints.dtype == torch.float64 else footprints.float()
    return torch.erf(1.0 / (math.sqrt(8.0) * wide[:, None] * _scales(layout, wide.device).to(wide.dtype)))


@functools.lru_cache(maxsize=16)
def _scales(layout: HashLayout, device: torch.device) -> Tensor:
    """Made once: numbers of the host must not be copied while a CUDA graph is recorded."""
    return torch.tensor([level.scale for level in layout.levels], dtype=torch.float64, device=device)
