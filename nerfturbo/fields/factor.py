"""A factorised field: volumes as sums of products of a plane and a line (vector-matrix decomposition), and a small net.

    density logit(x, y, z) = sum over c of  A_c(x, y) a_c(z) + B_c(x, z) b_c(y) + C_c(y, z) c_c(x)
    colour features likewise, not summed but put side by side; [features, sh(d)] -> network -> sigmoid -> rgb.

Memory grows with the square of the resolution. docs/voxels.md says how it compares with the hash grid.
"""

import logging
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import FactorConfig
from ..ops.spherical_harmonics import spherical_harmonics
from ..types import Aabb
from .field import Buffers, Carry, Staged
from .parts import FusedMlp, recomputed, truncated_exp, widen

LOG = logging.getLogger("nerfturbo")
PLANES, LINES = ((0, 1), (0, 2), (1, 2)), (2, 1, 0)  # axes of each plane, and the one that is left
GRIDS = ("density_planes", "density_lines", "color_planes", "color_lines")
START = 0.1  # standard deviation of the components at the start
INITIAL_DENSITY = 0.1  # per unit of world length
NET_LR = 2e-3  # peak learning rate of the colour network; optim.lr is that of planes and lines
SH_DEGREE, COLOR_DEPTH = 4, 2  # of the view direction; hidden layers


class FactorField(Staged):
    """Three planes and three lines of components for the density, three and three for the colour's features. In mixed
    precision the network multiplies in `compute_dtype`.

    >>> field = FactorField(Aabb.cube(1.0), FactorConfig((8, 16), (0.5,)))
    >>> rgb, density = field(torch.zeros(5, 3), torch.tensor([[0.0, 0.0, 1.0]]).repeat(5, 1))
    >>> rgb.shape, density.shape, field.resolution
    (torch.Size([5, 3]), torch.Size([5]), 8)
    """

    checkpointing = False
    reshaped = dict.fromkeys(GRIDS, slice(2)) | {"history": slice(0)}
    compute_dtype: torch.dtype | None = None

    def __init__(self, aabb: Aabb, config: FactorConfig | None = None, *, seed: int = 0) -> None:
        super().__init__()
        self.aabb, self.config = aabb, config or FactorConfig()
        self.shares = self.config.refine_at
        generator, side = torch.Generator().manual_seed(seed), self.config.resolutions[0]
        for name, count in zip(("density", "color"), self.config.components, strict=True):
            for kind, width in (("planes", side), ("lines", 1)):
                values = START * torch.randn(3, count, side, width, generator=generator)
                self.register_parameter(f"{name}_{kind}", nn.Parameter(values))
        inputs = 3 * self.config.components[1] + SH_DEGREE**2
        self.color_net = FusedMlp(inputs, 3, width=self.config.width, depth=COLOR_DEPTH, generator=generator)
        # The network learns slower than the components, which see few of the samples each.
        self.learning_rates = {f"color_net.weights.{i}": NET_LR for i in range(COLOR_DEPTH + 1)}
        self.register_buffer("history", torch.tensor([side]))  # resolutions

    def connect(self, buffers: Buffers) -> None:
        self.compute_dtype = buffers.dtype

    @property
    def resolution(self) -> int:
        return self.get_parameter("density_planes").shape[-1]

    def _components(self, name: str, unit: Tensor) -> Tensor:
        """(3, components, n): products of planes and lines at unit positions (n, 3)."""
        planes, lines = self.get_parameter(f"{name}_planes"), self.get_parameter(f"{name}_lines")
        places = (unit.to(planes.dtype) * 2.0 - 1.0).clamp(-1.0, 1.0)
        # grid_sample names the last axis of a plane first.
        flat = torch.stack([torch.stack([places[:, b], places[:, a]], dim=-1) for a, b in PLANES])[:, None]
        along = torch.stack([torch.stack([places[:, a] * 0.0, places[:, a]], dim=-1) for a in LINES])[:, None]
        first = F.grid_sample(planes, flat, align_corners=True, padding_mode="border")
        second = F.grid_sample(lines, along, align_corners=True, padding_mode="border")
        return (first * second)[:, :, 0]

    def _density(self, unit: Tensor) -> Tensor:
        return truncated_exp(self._components("density", unit).sum((0, 1)) + math.log(INITIAL_DENSITY))

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        return self._density(self.aabb.normalize(positions))

    def forward(
        self, positions: Tensor, directions: Tensor, times: Tensor | None = None, camera_indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return recomputed(self._evaluate, positions, directions, on=self.checkpointing)

    def _evaluate(self, positions: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        unit = self.aabb.normalize(positions)
        features = self._components("color", unit).flatten(0, 1).t()
        inputs = torch.cat([features, spherical_harmonics(directions, SH_DEGREE).to(features.dtype)], dim=-1)
        logits = self.color_net(inputs if self.compute_dtype is None else inputs.to(self.compute_dtype))
        return torch.sigmoid(widen(logits)), self._density(unit)

    def new_marks(self) -> Tensor:
        """Empty: nothing of it is pruned."""
        return torch.zeros(0, device=self.history.device)

    def mark(self, marks: Tensor, positions: Tensor, weights: Tensor) -> None:
        """Nothing to note."""

    @torch.no_grad()
    def refine(self, marks: Tensor) -> Carry:
        """Interpolate planes and lines to the next resolution: the field stays what it is but for rounding corners."""
        side = self.config.resolutions[self.stage + 1]

        def carry(name: str, values: Tensor) -> Tensor:
            if name.split(".")[0] not in GRIDS:
                return values
            size = (side, 1 if values.shape[-1] == 1 else side)
            return F.interpolate(values, size=size, mode="bilinear", align_corners=True)

        for name in GRIDS:
            setattr(self, name, nn.Parameter(carry(name, self.get_parameter(name).detach())))
        self.register_buffer("history", torch.cat([self.history, self.history.new_tensor([side])]))
        LOG.info("planes: %d^2 -> %d^2", int(self.history[-2]), side)
        return carry
