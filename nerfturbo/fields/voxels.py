"""Sparse voxels: density and spherical-harmonic colour at the corners of voxels, pruned and subdivided while training.
No network: log-density and colour logits are trilinear in space, and the activations come after the interpolation, so
that a surface may lie anywhere inside a voxel. docs/voxels.md has the measurements."""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config import VoxelConfig
from ..ops import GradientSink, voxels
from ..ops._dispatch import autocast
from ..ops.frame import NextSamples
from ..ops.positions import sample_positions
from ..ops.spherical_harmonics import spherical_harmonics
from ..ops.voxels import SIDE, VoxelIndex, VoxelTables, blocks_per_axis, color_width
from ..ops.voxels.reference import corners
from ..types import Aabb, PackedSamples, Rays
from .field import Buffers, Carry, Connected, Staged
from .parts import activated, truncated_exp

LOG = logging.getLogger("nerfturbo")
EMPTY = -12.0  # log-density where nothing is stored: e^-12 per unit of length is nothing to see
THIN = 0.25  # of the mean weight: voxels below are pruned even while everything is thin
COARSER = 0.9  # how much coarser a stage is tried that does not fit
# How fast the bands of the spherical harmonics learn, for a constant of 1: what depends on the view comes second.
BANDS = (1.0, 0.5, 0.5, 0.5)
INITIAL_DENSITY = 0.1  # per unit of world length
DENSITY_SPEED = 10.0  # how much faster than optim.lr the logarithm of the density moves
PRUNE_WEIGHT = 0.01  # a voxel stays where it, or a neighbour, gives a training ray at least this share of its colour
STRUCTURE = ("nodes", "blocks", "rows", "ticks", "history")


class VoxelGrid(Staged, Connected):
    """Trilinear log-density and spherical-harmonic colour logits over the box; only some voxels are stored.
    `density_table` (n_nodes,) times `DENSITY_SPEED` is the log-density, `color_table` (n_nodes, width) holds the
    coefficients; the buffers say where the nodes lie. `half_table` is a half copy of the colour table and `table_sink`
    takes the gradients of both, where a trainer connects them.

    >>> field = VoxelGrid(Aabb.cube(1.0), VoxelConfig((4, 8), (0.5,), sh_degree=2))
    >>> rgb, density = field(torch.zeros(5, 3), torch.tensor([[0.0, 0.0, 1.0]]).repeat(5, 1))
    >>> rgb.shape, round(density[0].item(), 3), field.n_nodes
    (torch.Size([5, 3]), 0.1, 125)
    """

    few_launches = captures_ahead = True
    bytes_per_sample = 256  # of rendering, an estimate
    skip_untouched = True  # rows without a gradient keep their value and moments
    taken = ("half_table", "table_sink")
    reshaped = dict.fromkeys((*STRUCTURE, "density_table"), slice(0)) | {"color_table": slice(1, None)}
    half_table: Tensor | None = None
    table_sink: GradientSink | None = None
    nodes: Tensor  # (n_nodes,) int32: where each row lies
    blocks: Tensor  # (g, g, g) int32 and
    rows: Tensor  # (n_blocks, 512) int32: the way back; see `nerfturbo.ops.voxels`
    ticks: Tensor  # (resolution + 1,): where the nodes lie along an axis of the unit cube
    scales: Tensor  # (n_basis,): what each basis function is multiplied by

    def __init__(self, aabb: Aabb, config: VoxelConfig | None = None, *, seed: int = 0) -> None:
        super().__init__()
        self.aabb, self.config = aabb, config or VoxelConfig()
        self.seed, self.n_basis, self.shares = seed, self.config.sh_degree**2, self.config.subdivide_at
        bands = range(self.config.sh_degree)
        scales = [BANDS[band] / 0.28209479177387814 for band in bands for _ in range(2 * band + 1)]
        self.register_buffer("scales", torch.tensor(scales), persistent=False)
        start = dense_structure(self.config.resolutions[0])
        n = start.nodes.shape[0]
        self._store(start, torch.tensor([n]))  # the history is of numbers of nodes
        density = math.log(INITIAL_DENSITY) / DENSITY_SPEED
        # The colours first: an optimizer lays one table behind the other, and wide loads want rows that are aligned.
        self.color_table = nn.Parameter(torch.zeros(n, color_width(self.n_basis)))
        self.density_table = nn.Parameter(torch.full((n,), density))

    def _store(self, structure: VoxelStructure, history: Tensor) -> None:
        """Take over a structure; the tables follow."""
        ticks = torch.linspace(0.0, 1.0, structure.resolution + 1, device=structure.nodes.device)
        tensors = (structure.nodes, structure.blocks, structure.rows, ticks, history)
        for name, value in zip(STRUCTURE, tensors, strict=True):
            self.register_buffer(name, value)

    @property
    def tables(self) -> tuple[nn.Parameter, ...]:
        return self.color_table, self.density_table

    def connect(self, buffers: Buffers) -> None:
        self.half_table = buffers.half(self.color_table)
        self.table_sink = buffers.sink(self.density_table, self.color_table)

    @property
    def resolution(self) -> int:
        """Voxels per axis of the box."""
        return self.ticks.shape[0] - 1

    @property
    def n_nodes(self) -> int:
        return self.nodes.shape[0]

    @property
    def memory_bytes(self) -> int:
        """Parameters and structure; training holds moments, gradients and a half copy besides."""
        return sum(value.numel() * value.element_size() for value in self.state_dict().values())

    @property
    def structure(self) -> VoxelStructure:
        return VoxelStructure(self.resolution, self.nodes, self.blocks, self.rows)

    @property
    def index(self) -> VoxelIndex:
        return VoxelIndex(self.blocks, self.rows, self.resolution, EMPTY / DENSITY_SPEED)

    def basis(self, directions: Tensor) -> Tensor:
        """(n, n_basis): what the coefficients of a colour are multiplied by along unit directions (n, 3)."""
        return spherical_harmonics(directions, self.config.sh_degree) * self.scales.to(directions.dtype)

    def logits(
        self, unit_positions: Tensor, basis: Tensor, ray_indices: Tensor, n_used: Tensor | None = None
    ) -> Tensor:
        """(n, 4): rgb = sigmoid of the first three, density = truncated exp of the last."""
        half = autocast(self.color_table.detach()) if self.half_table is None else self.half_table
        half = None if half.dtype == self.color_table.dtype else half
        tables = VoxelTables(self.density_table, self.color_table)
        options = {"half": half, "sink": self.table_sink, "n_used": n_used}
        out = voxels.voxel_lookup(unit_positions, basis, ray_indices, tables, self.index, **options)
        is_density = (torch.arange(4, device=out.device) == 3).to(out.dtype)  # made without a copy from the host
        return out * (is_density * (DENSITY_SPEED - 1.0) + 1.0)

    def density_logits(self, unit_positions: Tensor, n_used: Tensor | None = None) -> Tensor:
        return voxels.voxel_density(unit_positions, self.density_table, self.index, n_used=n_used) * DENSITY_SPEED

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        unit = self.aabb.normalize(positions)
        if not torch.is_grad_enabled():
            return truncated_exp(self.density_logits(unit))
        rays = torch.zeros(positions.shape[0], dtype=torch.int32, device=positions.device)
        basis = torch.zeros(1, self.n_basis, dtype=unit.dtype, device=positions.device)
        return truncated_exp(self.logits(unit, basis, rays)[:, 3])

    def forward(
        self, positions: Tensor, directions: Tensor, times: Tensor | None = None, camera_indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        rays = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
        return activated(self.logits(self.aabb.normalize(positions), self.basis(directions), rays))

    @torch.no_grad()
    def sample_density(self, rays: Rays, samples: PackedSamples) -> Tensor:
        positions = sample_positions(rays.origins, rays.directions, samples, aabb=self.aabb)
        return truncated_exp(self.density_logits(positions, samples.n_samples))

    def sample_logits(self, rays: Rays, samples: PackedSamples) -> Tensor:
        positions = sample_positions(rays.origins, rays.directions, samples, aabb=self.aabb)
        return self.logits(positions, self.basis(rays.directions), samples.ray_indices, samples.n_samples)

    def evaluator(self, rays: Rays, *, half: bool = False) -> VoxelEvaluator | None:
        """How rendering asks this field over some rays; the tables are read as they are."""
        return VoxelEvaluator(self, rays) if len(rays) else None

    def new_marks(self) -> Tensor:
        """(n_nodes,) zeros: the largest weight that a sample in a voxel around the node had in a pixel."""
        return torch.zeros(self.n_nodes, device=self.nodes.device)

    def mark(self, marks: Tensor, positions: Tensor, weights: Tensor) -> None:
        unit, weights = self.aabb.normalize(positions), weights.to(marks.dtype)
        for _, row in corners(unit, self.index, torch.float32):
            marks.scatter_reduce_(0, row.clamp(min=0), torch.where(row >= 0, weights, 0.0), "amax")

    @torch.no_grad()
    def refine(self, marks: Tensor) -> Carry:
        """Keep the voxels that were seen, divide them; values inside them are what they were."""
        seen = marks > 0.0
        mean = marks.sum() / seen.sum().clamp(min=1)
        kept = seen & (marks >= torch.clamp(THIN * mean, max=PRUNE_WEIGHT))
        target = self.config.resolutions[self.stage + 1]
        if not bool(seen.any()):
            LOG.warning("no voxel is seen: all of them stay, and none is divided")
            kept, target = torch.ones_like(kept), self.resolution
        stay, old = kept_voxels(self.structure, kept), self.structure
        new = subdivided(stay, old.resolution, target)
        while new.nodes.shape[0] > self.config.max_nodes and target > old.resolution:
            target = max(old.resolution, int(target * COARSER))
            new = subdivided(stay, old.resolution, target)
        carry = _interpolation(old, new, self.index.empty)
        density, color = carry("density_table", self.density_table), carry("color_table", self.color_table)
        before = self.n_nodes
        self._store(new, torch.cat([self.history, self.history.new_tensor([new.nodes.shape[0]])]))
        self.half_table = self.table_sink = None  # they belong to the old tables
        self.density_table, self.color_table = nn.Parameter(density), nn.Parameter(color)
        LOG.info("voxels: %d^3 -> %d^3, %d corners -> %d", old.resolution, target, before, self.n_nodes)
        return carry


class VoxelEvaluator:
    """Sparse voxels in rendering: directions become basis functions once per ray, and nothing is read back."""

    logits, channels, recordable = True, 3, False

    def __init__(self, field: VoxelGrid, rays: Rays) -> None:
        self.rays, self.aabb = rays, field.aabb
        self._look_up, self._basis = field.logits, field.basis(rays.directions)

    def __call__(self, samples: NextSamples) -> tuple[Tensor, Tensor]:
        logits = self._look_up(samples.positions, self._basis, samples.ray_indices, samples.n_used)
        return logits[:, 3], logits[:, :3]


def _interpolation(old: VoxelStructure, new: VoxelStructure, empty: float) -> Carry:
    """Tensors with a row per node of the old structure, at the nodes of the new one. Where nothing was stored,
    densities are empty; everything else, moments above all, is zero."""

    @torch.no_grad()
    def carry(name: str, values: Tensor) -> Tensor:
        if values.shape[:1] != old.nodes.shape:
            return values
        places = torch.stack(split_nodes(new.nodes, new.resolution), dim=-1).float() / new.resolution
        flat = values if values.dim() == 2 else values[:, None]
        out = torch.empty(places.shape[0], flat.shape[1], dtype=flat.dtype, device=flat.device)
        index = old.index(empty if name in ("density_table", "density_table.average") else 0.0)
        for column in range(flat.shape[1]):
            out[:, column] = voxels.voxel_density(places.to(flat.dtype), flat[:, column].contiguous(), index)
        return out.view(-1, *values.shape[1:])

    return carry


# --- which nodes are stored -------------------------------------------------------------------------------------------
# Nodes are numbered (x * (r + 1) + y) * (r + 1) + z. Rows follow the blocks of the index, so that what lies together in
# space lies together in memory. Everything here works on lists of nodes; no array has the size of the box.


@dataclass(frozen=True)
class VoxelStructure:
    """The stored nodes of one resolution."""

    resolution: int
    nodes: Tensor  # (n_nodes,) int32, in the order of the rows
    blocks: Tensor  # (g, g, g) int32
    rows: Tensor  # (n_blocks, 512) int32

    def index(self, empty: float) -> VoxelIndex:
        return VoxelIndex(self.blocks, self.rows, self.resolution, empty)


def split_nodes(nodes: Tensor, resolution: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and z (int64) of numbered nodes."""
    along, place = resolution + 1, nodes.long()
    return place // (along * along), place // along % along, place % along


def node_keys(x: Tensor, y: Tensor, z: Tensor, resolution: int) -> Tensor:
    """(n,) int64, growing with the block and then with the place in it: the order of the rows."""
    side = blocks_per_axis(resolution)
    block = ((x // SIDE) * side + y // SIDE) * side + z // SIDE
    return block * SIDE**3 + ((x % SIDE) * SIDE + y % SIDE) * SIDE + z % SIDE


def build_structure(keys: Tensor, resolution: int) -> VoxelStructure:
    """The structure of nodes given by their keys, in any order, with repeats."""
    side, along, device = blocks_per_axis(resolution), resolution + 1, keys.device
    keys = torch.unique(keys)
    block, local = keys // SIDE**3, keys % SIDE**3
    used, number = torch.unique_consecutive(block, return_inverse=True)
    blocks = torch.full((side**3,), -1, dtype=torch.int32, device=device)
    blocks[used] = torch.arange(used.shape[0], dtype=torch.int32, device=device)
    rows = torch.full((used.shape[0], SIDE**3), -1, dtype=torch.int32, device=device)
    rows[number, local] = torch.arange(keys.shape[0], dtype=torch.int32, device=device)
    x = block // (side * side) * SIDE + local // (SIDE * SIDE)
    y = block // side % side * SIDE + local // SIDE % SIDE
    z = block % side * SIDE + local % SIDE
    nodes = ((x * along + y) * along + z).to(torch.int32)
    return VoxelStructure(resolution, nodes, blocks.view(side, side, side), rows)


def dense_structure(resolution: int) -> VoxelStructure:
    """All nodes of the box."""
    places = torch.arange((resolution + 1) ** 3)
    return build_structure(node_keys(*split_nodes(places, resolution), resolution), resolution)


def kept_voxels(structure: VoxelStructure, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Low corners of the voxels that have at least one of the kept nodes (n_nodes,) bool among their corners. A sample
    marks all corners of its voxel, so that the voxel and its 26 neighbours stay."""
    x, y, z = split_nodes(structure.nodes[kept], structure.resolution)
    last, along, found = structure.resolution - 1, structure.resolution + 1, []
    for corner in range(8):
        i, j, k = x - (corner & 1), y - ((corner >> 1) & 1), z - (corner >> 2)
        inside = (i >= 0) & (j >= 0) & (k >= 0) & (i <= last) & (j <= last) & (k <= last)
        found.append(((i * along + j) * along + k)[inside])
    return split_nodes(torch.unique(torch.cat(found)), structure.resolution)


def subdivided(voxels: tuple[Tensor, Tensor, Tensor], old: int, new: int) -> VoxelStructure:
    """The nodes of resolution `new` that lie in the given voxels of resolution `old`, their faces included."""
    # Along each axis the nodes k with low / old <= k / new <= (low + 1) / old.
    firsts = [torch.div(low * new + old - 1, old, rounding_mode="floor") for low in voxels]
    lasts = [torch.div((low + 1) * new, old, rounding_mode="floor") for low in voxels]
    steps, keys = range(-(-new // old) + 1), []
    for offset in itertools.product(steps, steps, steps):
        place = [first + step for first, step in zip(firsts, offset, strict=True)]
        inside = (place[0] <= lasts[0]) & (place[1] <= lasts[1]) & (place[2] <= lasts[2])
        keys.append(node_keys(*(axis[inside] for axis in place), resolution=new))
    return build_structure(torch.cat(keys), new)
