"""Samplers that place the same number of samples on every ray; here evenly, the baseline and what the others are made
of. They need no grid and no box, so that unbounded scenes are theirs. All shapes are fixed and nothing is read back."""

import copy
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from ..ops._checks import refuse
from ..types import Aabb, PackedSamples, Rays
from .histograms import Histogram, RaySpan
from .sampler import Draw

NO_EDGES = torch.empty(0, 1)


@dataclass(frozen=True)
class ProposedSamples(PackedSamples):
    """Packed samples, `n_per_ray` of each ray that was kept, with the stages that led to them; the rest is the tail."""

    edges: Tensor = NO_EDGES  # (n_rays, n_per_ray + 1) places in [0, 1]
    stages: tuple[Histogram, ...] = ()

    @property
    def n_per_ray(self) -> int:
        return self.edges.shape[1] - 1

    def per_ray(self, values: Tensor) -> Tensor:
        """(n_rays, n_per_ray) of values (capacity,)."""
        return values.view(self.n_rays, self.n_per_ray)

    def normalized(self) -> PackedSamples:
        """The same samples with places in [0, 1] for distances."""
        starts, ends = (side.reshape(-1) for side in (self.edges[:, :-1], self.edges[:, 1:]))
        return PackedSamples(starts, ends, self.ray_indices, self.offsets, self.n_rays_kept)


class UniformEstimator(nn.Module):
    """`n_samples` on every ray, evenly over the span.

    >>> rays = Rays(torch.zeros(2, 3), torch.tensor([[0.0, 0.0, 1.0]]).repeat(2, 1))
    >>> samples = UniformEstimator(4, RaySpan(near=0.0, far=8.0)).sample(rays)
    >>> samples.t_starts.tolist(), samples.offsets.tolist()
    ([0.0, 2.0, 4.0, 6.0, 0.0, 2.0, 4.0, 6.0], [0, 4, 8])
    """

    def __init__(self, n_samples: int, span: RaySpan) -> None:
        super().__init__()
        refuse(n_samples < 1, "n_samples", "at least 1", n_samples)
        self.n_samples, self.span = n_samples, span

    @property
    def samples_per_ray(self) -> int | None:
        """Samples that the field sees on every ray."""
        return self.n_samples

    @property
    def evaluations_per_ray(self) -> int:
        """Samples that are looked at on every ray before those."""
        return 0

    def max_rays(self, batch_samples: int) -> int:
        """Rays of a training step that hold so many samples."""
        return max(1, batch_samples // max(1, self.samples_per_ray or 1))

    def bytes_per_ray(self, sample_bytes: int, place_bytes: int) -> int:
        """Of rendering: `sample_bytes` for each sample that the field sees, `place_bytes` for each before those."""
        return self.evaluations_per_ray * place_bytes + (self.samples_per_ray or self.n_samples) * sample_bytes

    def cropped(self, box: Aabb) -> Self:
        """The same sampler inside a box alone; it shares its networks with this one."""
        other = copy.copy(self)
        other.span = self.span.inside(box)
        return other

    def sample(
        self, rays: Rays, *, draw: Draw | None = None, n_active: Tensor | None = None, capacity: int | None = None
    ) -> PackedSamples:
        """The samples of each ray (`ProposedSamples`); with gradients enabled the stages keep their graph. Not
        differentiable to the rays. `capacity` is not needed: the number of samples is fixed."""
        rays = replace(rays, origins=rays.origins.detach(), directions=rays.directions.detach())
        limits = self.span.limits(rays)
        edges, stages = self._place(rays, draw or Draw(), limits)
        return packed(edges.detach(), self.span.distances(edges.detach(), rays, limits), stages, n_active)

    def _place(self, rays: Rays, draw: Draw, limits: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Histogram, ...]]:
        """Edges (n_rays, n + 1) of the final samples, and the stages before them."""
        return even_edges(len(rays), self.n_samples, draw.jitter(rays, 1)[0], rays.device), ()


def even_edges(n_rays: int, n: int, jitter: Tensor | None, device: torch.device) -> Tensor:
    """(n_rays, n + 1) even places from 0 to 1; `jitter` (n_rays, 1) moves all inner edges of a ray together."""
    if jitter is None:
        return (torch.arange(n + 1, device=device, dtype=torch.float32) / n).repeat(n_rays, 1)
    inner = torch.arange(1, n, device=device, dtype=torch.float32).expand(n_rays, -1) + (jitter - 0.5)
    ends = torch.arange(2, device=device, dtype=torch.float32).expand(n_rays, 2)
    return torch.cat([ends[:, :1], inner / n, ends[:, 1:]], dim=1)


def packed(edges: Tensor, distances: Tensor, stages: tuple[Histogram, ...], n_active: Tensor | None) -> ProposedSamples:
    """The intervals between distances (n_rays, n + 1) as samples; `edges` are their places."""
    n_rays, n = edges.shape[0], edges.shape[1] - 1
    numbers = torch.arange(n_rays + 1, device=edges.device, dtype=torch.int32)
    starts, ends = (side.reshape(-1) for side in (distances[:, :-1], distances[:, 1:]))
    rays = numbers[:-1, None].expand(n_rays, n).reshape(-1)
    if n_active is None:
        return ProposedSamples(starts, ends, rays, numbers * n, None, edges, stages)
    active = n_active.to(torch.int32)
    used = rays < active
    starts, ends = (torch.where(used, side, torch.zeros_like(side)) for side in (starts, ends))
    rays = torch.where(used, rays, torch.zeros_like(rays))
    return ProposedSamples(starts, ends, rays, torch.minimum(numbers, active) * n, active, edges, stages)
