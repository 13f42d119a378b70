"""Coarse and fine: the original NeRF's two passes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..ops.intervals import interval_weights
from ..types import Rays
from .histograms import Histogram, RaySpan, resample
from .sampler import Draw
from .uniform import UniformEstimator, even_edges


class HierarchyEstimator(UniformEstimator):
    """A coarse field is rendered evenly, its weights place `n_samples` more samples, and the field behind sees all of
    them together.

    `coarse` is a field as `nerfturbo.fields.field` has it. It learns from its own colours, which `sample` leaves in
    the stage: the training loss compares them with the images.
    """

    def __init__(self, coarse: nn.Module, *, n_samples: int, coarse_samples: int, span: RaySpan) -> None:
        super().__init__(n_samples, span)
        if coarse_samples < 1:
            raise InputError("coarse_samples", "at least 1", str(coarse_samples))
        self.coarse, self.coarse_samples = coarse, coarse_samples

    @property
    def samples_per_ray(self) -> int | None:
        return self.coarse_samples + self.n_samples

    @property
    def evaluations_per_ray(self) -> int:
        return self.coarse_samples

    def _place(self, rays: Rays, draw: Draw, limits: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Histogram, ...]]:
        n = self.coarse_samples
        jitter = draw.jitter(rays, 2)
        edges = even_edges(len(rays), n, jitter[0], rays.device)
        distances, positions = self.span.intervals(edges, rays, limits)
        color = None
        times, cameras = (_repeated(value, n) for value in (rays.times, rays.camera_indices))
        if torch.is_grad_enabled():
            rgb, density = self.coarse(positions, rays.directions.repeat_interleave(n, 0), times, cameras)
            weights = interval_weights(density.view(-1, n).float(), distances)
            color = (weights[..., None] * rgb.view(len(rays), n, -1)).sum(1)
        else:
            weights = interval_weights(self.coarse.density(positions, times).view(-1, n).float(), distances)  # type: ignore[operator]
        more = resample(edges, weights.detach(), max(1, self.n_samples - 1), jitter=jitter[1])
        union = torch.sort(torch.cat([edges, more[:, : self.n_samples]], dim=-1), dim=-1).values
        return union, (Histogram(edges, weights, color),)


def _repeated(values: Tensor | None, n: int) -> Tensor | None:
    return None if values is None else values.repeat_interleave(n, 0)
