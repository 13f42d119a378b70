"""A field and a sampler written as a stranger would: two methods, nothing of the package."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nerfturbo.types import PackedSamples, Rays


class OwnField(nn.Module):
    """Sines of the position, two layers; knows neither a box nor any optional method."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.hidden = nn.Linear(21, width)
        self.head = nn.Linear(width, 4)

    def _logits(self, positions: Tensor) -> Tensor:
        waves = [positions] + [f(positions * 2.0**k) for k in range(3) for f in (torch.sin, torch.cos)]
        return self.head(torch.relu(self.hidden(torch.cat(waves, dim=-1))))

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        return nn.functional.softplus(self._logits(positions)[:, 3])

    def forward(self, positions, directions, times=None, camera_indices=None):
        logits = self._logits(positions)
        return torch.sigmoid(logits[:, :3]), nn.functional.softplus(logits[:, 3])


class BoxedField(OwnField):
    """Takes the scene's box."""

    def __init__(self, aabb) -> None:
        super().__init__()
        self.register_buffer("center", torch.tensor(aabb.center))

    def _logits(self, positions: Tensor) -> Tensor:
        return super()._logits(positions - self.center)


class EverySecond:
    """Twelve even samples from near to far, whatever the scene."""

    def sample(self, rays: Rays, *, draw=None) -> PackedSamples:
        edges = torch.linspace(1.0, 6.0, 13, device=rays.device)
        counts = torch.full((len(rays),), 12, device=rays.device)
        return PackedSamples.from_counts(counts, edges[:-1].repeat(len(rays)), edges[1:].repeat(len(rays)))


def needs_width(width: int) -> OwnField:
    return OwnField(width)
