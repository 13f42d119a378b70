"""The original NeRF: a deep network over frequency-encoded positions and directions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import FieldConfig
from ..types import Aabb
from .encodings import frequency_encode

POSITION_FREQUENCIES = 10
DIRECTION_FREQUENCIES = 4


class VanillaNeRF(nn.Module):
    """`depth` layers of `width` with the input fed in again half-way, a density head, and one colour layer.

    Positions are scaled so that the box becomes [-1, 1]^3. Density is softplus(h - 1), which starts non-empty.
    """

    def __init__(self, aabb: Aabb, config: FieldConfig | None = None, *, seed: int = 0) -> None:
        super().__init__()
        config = config or FieldConfig(kind="vanilla", width=256, depth=8)
        self.aabb, self.config = aabb, config
        n_position = 3 * (2 * POSITION_FREQUENCIES + 1)
        n_direction = 3 * (2 * DIRECTION_FREQUENCIES + 1)
        width = config.width
        self.skip = config.depth // 2 if config.depth > 4 else -1
        self.trunk = nn.ModuleList()
        for index in range(config.depth):
            inputs = n_position if index == 0 else width
            self.trunk.append(nn.Linear(inputs + (n_position if index == self.skip else 0), width))
        self.density_head = nn.Linear(width, 1)
        self.feature_head = nn.Linear(width, width)
        self.color_hidden = nn.Linear(width + n_direction, width // 2)
        self.color_head = nn.Linear(width // 2, 3)
        self._initialise(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                bound = (6.0 / (module.in_features + module.out_features)) ** 0.5
                module.weight.uniform_(-bound, bound, generator=generator)
                module.bias.zero_()

    def _trunk(self, positions: Tensor) -> Tensor:
        encoded = frequency_encode(self.aabb.normalize(positions) * 2.0 - 1.0, POSITION_FREQUENCIES)
        hidden = encoded
        for index, layer in enumerate(self.trunk):
            if index == self.skip:
                hidden = torch.cat([hidden, encoded.to(hidden.dtype)], dim=-1)
            hidden = torch.relu(layer(hidden))
        return hidden

    def _density(self, hidden: Tensor) -> Tensor:
        logits = self.density_head(hidden)[:, 0]
        return torch.nn.functional.softplus((logits if logits.dtype == torch.float64 else logits.float()) - 1.0)

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        return self._density(self._trunk(positions))

    def forward(
        self,
        positions: Tensor,
        directions: Tensor,
        times: Tensor | None = None,
        camera_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        hidden = self._trunk(positions)
        encoded = frequency_encode(directions, DIRECTION_FREQUENCIES).to(hidden.dtype)
        color = torch.relu(self.color_hidden(torch.cat([self.feature_head(hidden), encoded], dim=-1)))
        logits = self.color_head(color)
        return torch.sigmoid(logits if logits.dtype == torch.float64 else logits.float()), self._density(hidden)
