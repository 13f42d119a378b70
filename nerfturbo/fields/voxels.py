"""Sparse voxels: density and spherical-harmonic colour at the corners of voxels, pruned and subdivided while training.

No network: log-density and colour logits are trilinear in space, and the activations come after the interpolation, so
that a surface may lie anywhere inside a voxel. docs/voxels.md has the measurements.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..config import FieldConfig, VoxelConfig
from ..errors import InputError
from ..ops import GradientSink
from ..ops.composite import visibility
from ..ops.positions import sample_positions
from ..ops.random import Stream, random_bits
from ..ops.spherical_harmonics import spherical_harmonics
from ..ops.voxels import (
    MAX_RESOLUTION,
    VoxelIndex,
    VoxelTables,
    color_width,
    voxel_density,
    voxel_lookup,
    voxel_variation,
)
from ..types import Aabb, PackedSamples, Rays
from .activations import activated, truncated_exp
from .field import Carry, field_part
from .voxel_structure import (
    VoxelStructure,
    corner_rows,
    dense_structure,
    kept_voxels,
    node_positions,
    split_nodes,
    subdivided,
)

LOG = logging.getLogger("nerfturbo")
EMPTY = -12.0  # log-density where nothing is stored: e^-12 per unit of length is nothing to see
RUN = 32  # consecutive nodes that the total variation draws together
THIN = 0.25  # of the mean weight: voxels below are pruned even while everything is thin
COARSER = 0.9  # how much coarser a stage is tried that does not fit
# How fast the bands of the spherical harmonics learn, for a constant of 1: what depends on the view comes second.
BANDS = (1.0, 0.5, 0.5, 0.5)
STRUCTURE = ("nodes", "blocks", "rows", "ticks", "history")


class VoxelGrid(nn.Module):
    """Trilinear log-density and spherical-harmonic colour logits over the box; only some voxels are stored.

    `density_table` (n_nodes,) times `density_speed` is the log-density, `color_table` (n_nodes, width) holds the
    coefficients; the buffers say where the nodes lie. For mixed precision a trainer hands in `half_table`, a half copy
    of the colour table, and `table_sink`, two buffers that take the gradients.

    >>> field = VoxelGrid(Aabb.cube(1.0), FieldConfig(kind="voxels", sh_degree=2), VoxelConfig((4, 8), (0.5,)))
    >>> rgb, density = field(torch.zeros(5, 3), torch.tensor([[0.0, 0.0, 1.0]]).repeat(5, 1))
    >>> rgb.shape, round(density[0].item(), 3), field.n_nodes
    (torch.Size([5, 3]), 0.1, 125)
    """

    half_table: Tensor | None = None
    table_sink: GradientSink | None = None
    nodes: Tensor  # (n_nodes,) int32: where each row lies
    blocks: Tensor  # (g, g, g) int32 and
    rows: Tensor  # (n_blocks, 512) int32: the way back; see `nerfturbo.ops.voxels`
    ticks: Tensor  # (resolution + 1,): where the nodes lie along an axis of the unit cube
    scales: Tensor  # (n_basis,): what each basis function is multiplied by
    history: Tensor  # (stages,) int64: nodes at the start of each stage so far

    def __init__(
        self, aabb: Aabb, config: FieldConfig | None = None, voxels: VoxelConfig | None = None, *, seed: int = 0
    ) -> None:
        super().__init__()
        self.aabb, self.config = aabb, config or FieldConfig(kind="voxels", sh_degree=3)
        self.voxels = voxels or VoxelConfig()
        _check(self.voxels)
        if not 1 <= self.config.sh_degree <= 4:
            raise InputError("field.sh_degree", "1 to 4", str(self.config.sh_degree))
        self.seed, self.n_basis = seed, self.config.sh_degree**2
        scales = [
            BANDS[band] / 0.28209479177387814 for band in range(self.config.sh_degree) for _ in range(2 * band + 1)
        ]
        self.register_buffer("scales", torch.tensor(scales), persistent=False)
        start = dense_structure(self.voxels.resolutions[0])
        n = start.nodes.shape[0]
        self._store(start, torch.tensor([n]))
        density = math.log(self.voxels.initial_density) / self.voxels.density_speed
        # The colours first: an optimizer lays one table behind the other, and wide loads want rows that are aligned.
        self.color_table = nn.Parameter(torch.zeros(n, color_width(self.n_basis)))
        self.density_table = nn.Parameter(torch.full((n,), density))

    def _store(self, structure: VoxelStructure, history: Tensor) -> None:
        """Take over a structure; the tables follow."""
        ticks = torch.linspace(0.0, 1.0, structure.resolution + 1, device=structure.nodes.device)
        tensors = (structure.nodes, structure.blocks, structure.rows, ticks, history)
        for name, value in zip(STRUCTURE, tensors, strict=True):
            self.register_buffer(name, value)

    def _replicate_for_data_parallel(self) -> VoxelGrid:
        """For `nn.DataParallel`: the half copy and the gradient buffers are on the device of the original."""
        replica = super()._replicate_for_data_parallel()
        replica.half_table = replica.table_sink = None
        return replica

    @property
    def resolution(self) -> int:
        """Voxels per axis of the box."""
        return self.ticks.shape[0] - 1

    @property
    def stage(self) -> int:
        return self.history.shape[0] - 1

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
        return VoxelIndex(self.blocks, self.rows, self.resolution, EMPTY / self.voxels.density_speed)

    def n_voxels(self) -> int:
        """Voxels whose eight corners are all stored."""
        x, y, z = split_nodes(self.nodes, self.resolution)
        inside = (x < self.resolution) & (y < self.resolution) & (z < self.resolution)
        middle = (torch.stack([x, y, z], dim=-1)[inside] + 0.5) / self.resolution
        whole = torch.ones(middle.shape[0], dtype=torch.bool, device=middle.device)
        for corner in range(8):
            whole &= corner_rows(self.structure, middle, corner) >= 0
        return int(whole.sum())

    # --- looking up --------------------------------------------------------------------------------------------------

    def basis(self, directions: Tensor) -> Tensor:
        """(n, n_basis): what the coefficients of a colour are multiplied by along unit directions (n, 3)."""
        return spherical_harmonics(directions, self.config.sh_degree) * self.scales.to(directions.dtype)

    def logits(
        self, unit_positions: Tensor, basis: Tensor, ray_indices: Tensor, n_used: Tensor | None = None
    ) -> Tensor:
        """(n, 4): rgb = sigmoid of the first three, density = truncated exp of the last."""
        out = voxel_lookup(
            unit_positions,
            basis,
            ray_indices,
            VoxelTables(self.density_table, self.color_table),
            self.index,
            half=self.half_table,
            sink=self.table_sink,
            n_used=n_used,
        )
        return out * self._speeds(out)

    def _speeds(self, like: Tensor) -> Tensor:
        """(4,): 1 for the colours, density_speed for the density; made without a copy from the host."""
        return (torch.arange(4, device=like.device) == 3).to(like.dtype) * (self.voxels.density_speed - 1.0) + 1.0

    def density_logits(self, unit_positions: Tensor, n_used: Tensor | None = None) -> Tensor:
        return voxel_density(unit_positions, self.density_table, self.index, n_used=n_used) * self.voxels.density_speed

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        unit = self.aabb.normalize(positions)
        if not torch.is_grad_enabled():
            return truncated_exp(self.density_logits(unit))
        rays = torch.zeros(positions.shape[0], dtype=torch.int32, device=positions.device)
        basis = torch.zeros(1, self.n_basis, dtype=unit.dtype, device=positions.device)
        return truncated_exp(self.logits(unit, basis, rays)[:, 3])

    def forward(
        self,
        positions: Tensor,
        directions: Tensor,
        times: Tensor | None = None,
        camera_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        rays = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
        logits = self.logits(self.aabb.normalize(positions), self.basis(directions), rays)
        return activated(logits)

    @torch.no_grad()
    def sample_density(self, rays: Rays, samples: PackedSamples) -> Tensor:
        positions = sample_positions(rays.origins, rays.directions, samples, aabb=self.aabb)
        return truncated_exp(self.density_logits(positions, samples.n_samples))

    def sample_visibility(
        self, rays: Rays, samples: PackedSamples, *, early_stop_eps: float, alpha_thre: float | Tensor
    ) -> Tensor:
        density = self.sample_density(rays, samples)
        return visibility(density, samples, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre)

    def sample_logits(self, rays: Rays, samples: PackedSamples) -> Tensor:
        positions = sample_positions(rays.origins, rays.directions, samples, aabb=self.aabb)
        return self.logits(positions, self.basis(rays.directions), samples.ray_indices, samples.n_samples)

    # --- the prior ---------------------------------------------------------------------------------------------------

    def regularization(self, step: int | Tensor) -> Tensor:
        """() weighted total variation over a share of the nodes, drawn anew at each step."""
        voxels = self.voxels
        if voxels.tv_density == 0.0 and voxels.tv_color == 0.0:
            return torch.zeros((), device=self.nodes.device)
        variation = voxel_variation(
            VoxelTables(self.density_table, self.color_table),
            self.index,
            self.nodes,
            self._drawn_nodes(step),
            n_basis=self.n_basis,
            sink=self.table_sink,
        )
        return voxels.tv_density * variation[0] + voxels.tv_color * variation[1]

    def _drawn_nodes(self, step: int | Tensor) -> Tensor:
        """(m,) int64 rows in runs of neighbours."""
        n, device = self.n_nodes, self.nodes.device
        n_runs = max(1, math.ceil(self.voxels.tv_share * n / RUN))
        words = random_bits(n_runs, seed=self.seed, stream=Stream.VARIATION, step=step, device=device)
        first = ((words[:, 0].long() & 0xFFFFFFFF) * n) >> 32
        return ((first[:, None] + torch.arange(RUN, device=device)) % n).reshape(-1)

    # --- pruning and subdivision -------------------------------------------------------------------------------------

    def refinement_due(self, progress: float, step: int) -> bool:
        stage, shares = self.stage, self.voxels.subdivide_at
        return stage < len(shares) and progress >= shares[stage] and step >= (stage + 1) * self.voxels.min_steps

    def new_marks(self) -> Tensor:
        """(n_nodes,) zeros: the largest weight that a sample in a voxel around the node had in a pixel."""
        return torch.zeros(self.n_nodes, device=self.nodes.device)

    def mark(self, marks: Tensor, positions: Tensor, weights: Tensor) -> None:
        unit, weights = self.aabb.normalize(positions), weights.to(marks.dtype)
        for corner in range(8):
            row = corner_rows(self.structure, unit, corner)
            marks.scatter_reduce_(0, row.clamp(min=0), torch.where(row >= 0, weights, 0.0), "amax")

    @torch.no_grad()
    def refine(self, marks: Tensor) -> Carry:
        """Keep the voxels that were seen, divide them; values inside them are what they were."""
        seen = marks > 0.0
        mean = marks.sum() / seen.sum().clamp(min=1)
        kept = seen & (marks >= torch.clamp(THIN * mean, max=self.voxels.prune_weight))
        target = self.voxels.resolutions[self.stage + 1]
        if not bool(seen.any()):
            LOG.warning("no voxel is seen: all of them stay, and none is divided")
            kept, target = torch.ones_like(kept), self.resolution
        voxels, old = kept_voxels(self.structure, kept), self.structure
        new = subdivided(voxels, old.resolution, target)
        while new.nodes.shape[0] > self.voxels.max_nodes and target > old.resolution:
            target = max(old.resolution, int(target * COARSER))
            new = subdivided(voxels, old.resolution, target)
        carry = _Interpolation(old, new, self.index.empty)
        density, color = carry("density_table", self.density_table), carry("color_table", self.color_table)
        before = self.n_nodes
        self._store(new, torch.cat([self.history, self.history.new_tensor([new.nodes.shape[0]])]))
        self._replace(density, color)
        LOG.info("voxels: %d^3 -> %d^3, %d corners -> %d", old.resolution, target, before, self.n_nodes)
        return carry

    def _replace(self, density: Tensor, color: Tensor) -> None:
        self.half_table = self.table_sink = None  # they belong to the old tables
        self.density_table, self.color_table = nn.Parameter(density), nn.Parameter(color)

    # --- saved states ------------------------------------------------------------------------------------------------

    def match_shapes(self, state: Mapping[str, Tensor]) -> bool:
        own = self.state_dict()
        fits = set(own) <= set(state) and all(state[name].dim() == value.dim() for name, value in own.items())
        same = fits and all(state[name].shape == value.shape for name, value in own.items())
        if not fits or same or state["color_table"].shape[1:] != self.color_table.shape[1:]:
            return False
        device = self.nodes.device
        for name in STRUCTURE:
            self.register_buffer(name, torch.zeros(state[name].shape, dtype=own[name].dtype, device=device))
        dtype = self.color_table.dtype
        self._replace(
            *(torch.zeros(state[n].shape, dtype=dtype, device=device) for n in ("density_table", "color_table"))
        )
        return True

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.match_shapes(field_part(state_dict, prefix))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class _Interpolation:
    """Tensors with a row per node of the old structure, at the nodes of the new one.

    Where nothing was stored, densities are empty; everything else, moments above all, is zero.
    """

    def __init__(self, old: VoxelStructure, new: VoxelStructure, empty: float) -> None:
        self.old, self.new, self.empty = old, new, empty

    @torch.no_grad()
    def __call__(self, name: str, values: Tensor) -> Tensor:
        if values.shape[:1] != self.old.nodes.shape:
            return values
        places = node_positions(self.new.nodes, self.new.resolution)
        flat = values if values.dim() == 2 else values[:, None]
        out = torch.empty(places.shape[0], flat.shape[1], dtype=flat.dtype, device=flat.device)
        index = self.old.index(self.empty if name in ("density_table", "density_table.average") else 0.0)
        for column in range(flat.shape[1]):
            out[:, column] = voxel_density(places.to(flat.dtype), flat[:, column].contiguous(), index)
        return out.view(-1, *values.shape[1:])


def _check(voxels: VoxelConfig) -> None:
    sizes, shares = voxels.resolutions, voxels.subdivide_at
    if not sizes or not all(2 <= size <= MAX_RESOLUTION for size in sizes) or list(sizes) != sorted(set(sizes)):
        raise InputError("voxels.resolutions", f"growing numbers from 2 to {MAX_RESOLUTION}", str(sizes))
    if len(shares) != len(sizes) - 1 or list(shares) != sorted(shares) or not all(0.0 < s < 1.0 for s in shares):
        expected = f"{len(sizes) - 1} growing shares of the run between 0 and 1, one per subdivision"
        raise InputError("voxels.subdivide_at", expected, str(shares))
    for name in ("max_nodes", "prune_rays", "initial_density", "density_speed"):
        if not getattr(voxels, name) > 0:
            raise InputError(f"voxels.{name}", "a number > 0", str(getattr(voxels, name)))
    for name in ("min_steps", "prune_weight", "tv_density", "tv_color", "tv_share"):
        if not 0.0 <= getattr(voxels, name) < math.inf:
            raise InputError(f"voxels.{name}", "a number >= 0", str(getattr(voxels, name)))
