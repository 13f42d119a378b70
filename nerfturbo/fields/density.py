"""A density without colour: what proposal networks are made of."""

import math

import torch
from torch import Tensor, nn

from ..ops.hash_encode import HashLayout
from ..ops.ngp import NgpDensity
from ..ops.positions import Contraction, unit_positions
from ..types import Aabb
from .parts import FusedMlp, HashGrid, truncated_exp

DENSITY_BIAS = -1.0  # a young proposal is thin, so that all of a ray is looked at


class HashDensity(nn.Module):
    """hash(x) -> one hidden layer -> density = exp(h - 1), over a box or, with a contraction about it, all of space.

    >>> density = HashDensity(Aabb.cube(1.0), HashLayout(n_levels=2, log2_entries=8, max_resolution=32))
    >>> density(torch.zeros(5, 3)).shape
    torch.Size([5])
    """

    def __init__(
        self,
        aabb: Aabb,
        layout: HashLayout | None = None,
        *,
        width: int = 16,
        contraction: Contraction = "none",
        seed: int = 0,
    ) -> None:
        super().__init__()
        layout = layout or HashLayout(n_levels=5, n_features=2, log2_entries=17, max_resolution=128)
        generator = torch.Generator().manual_seed(seed)
        self.aabb = aabb
        self.contraction: Contraction = contraction
        self.encoding = HashGrid(layout, generator=generator)
        self.density_net = FusedMlp(layout.n_outputs, 1, width=width, depth=1, generator=generator)

    @property
    def bytes_per_sample(self) -> int:
        """Of rendering, an estimate: a place, a position and the density on its way to a weight; on a GPU the encoding,
        which a CPU never holds whole."""
        values = self.encoding.values
        return 40 + self.encoding.layout.n_outputs * values.element_size() * values.is_cuda

    def forward(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        """(n,) >= 0 for world positions (n, 3)."""
        return self.unit_density(unit_positions(positions, self.aabb, self.contraction))

    def unit_density(self, positions: Tensor) -> Tensor:
        """(n,) >= 0 for positions (n, 3) in [0, 1]^3: the box, or with a contraction all of space."""
        if not torch.is_grad_enabled() and positions.dtype != torch.float64:
            inner, outer = self.density_net.matrices
            ahead = NgpDensity(self.aabb, self.encoding.values, self.encoding.layout, (inner, outer))
            return ahead.at(positions) * math.exp(DENSITY_BIAS)
        logits = self.density_net(self.encoding(positions))[:, 0]
        return truncated_exp(logits.float() + DENSITY_BIAS if logits.dtype != torch.float64 else logits + DENSITY_BIAS)

    density = forward
