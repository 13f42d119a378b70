"""The trainable multiresolution hash grid."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops import GradientSink
from ..ops.hash_encode import HashLayout, hash_encode
from .mlp import draw_uniform


class HashGrid(nn.Module):
    """A table of features per level; see `nerfturbo.ops.hash_encode` for the formula.

    `half` is a half copy that is read in place of the table and `sink` takes its gradient, where a trainer sets them.
    So many coarse levels as `kept_levels` hold what the field begins as, which a decay of the table leaves alone.
    """

    half: Tensor | None = None
    sink: GradientSink | None = None
    kept_levels: int = 0

    def __init__(self, layout: HashLayout, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.layout = layout
        table = draw_uniform(layout.n_entries, layout.n_features, bound=1e-4, generator=generator)
        self.table = nn.Parameter(table)

    def forward(self, positions: Tensor, n_used: Tensor | None = None) -> Tensor:
        """(n, n_levels * n_features) for positions (n, 3) in [0, 1]^3."""
        return hash_encode(positions, self.table, self.layout, half=self.half, sink=self.sink, n_used=n_used)
