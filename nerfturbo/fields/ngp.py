"""Instant-NGP: a hash grid, a small density network and a small colour network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import FieldConfig
from ..ops.hash_encode import HashLayout
from ..ops.spherical_harmonics import spherical_harmonics
from ..types import Aabb
from .activations import truncated_exp
from .hash_grid import HashGrid
from .mlp import FusedMlp


class InstantNGP(nn.Module):
    """hash(x) -> density network -> density = exp(h_0), features h; [sh(d), h] -> colour network -> sigmoid -> rgb."""

    def __init__(self, aabb: Aabb, config: FieldConfig | None = None, *, seed: int = 0) -> None:
        super().__init__()
        config = config or FieldConfig()
        generator = torch.Generator().manual_seed(seed)
        self.aabb, self.config = aabb, config
        layout = HashLayout(
            config.n_levels, config.n_features, config.log2_entries, config.base_resolution, config.max_resolution
        )
        self.encoding = HashGrid(layout, generator=generator)
        self.density_net = FusedMlp(
            layout.n_outputs, config.geo_features, width=config.width, depth=config.depth, generator=generator
        )
        self.color_net = FusedMlp(
            config.sh_degree**2 + config.geo_features,
            3,
            width=config.width,
            depth=config.color_depth,
            generator=generator,
        )

    def _geometry(self, positions: Tensor) -> Tensor:
        return self.density_net(self.encoding(self.aabb.normalize(positions)))

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        return truncated_exp(self._geometry(positions)[:, 0])

    def forward(
        self,
        positions: Tensor,
        directions: Tensor,
        times: Tensor | None = None,
        camera_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        geometry = self._geometry(positions)
        angular = spherical_harmonics(directions, self.config.sh_degree).to(geometry.dtype)
        logits = self.color_net(torch.cat([angular, geometry], dim=-1))
        return torch.sigmoid(logits.float()), truncated_exp(geometry[:, 0])
