"""Estimators that place the same number of samples on every ray: evenly, by a coarse field, by proposal networks.

They need no grid and no box, so that scenes without an end are theirs. All shapes are fixed and nothing is read back.
What they learn, they learn by gradients: `sample` keeps the histograms of its stages with the samples it returns, and
`loss` compares them with what the field says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..ops.intervals import Space
from ..ops.random import Stream, random_uniform
from ..types import Aabb, PackedSamples, Rays
from .estimator import DensityFn, SigmaFn, UnitDensity
from .histograms import Histogram, annealing, density_weights, interlevel_loss, resample
from .spans import RaySpan

NO_EDGES = torch.empty(0, 1)
MAX_STAGES = 3  # one draw of four random numbers serves them and the final samples


@dataclass(frozen=True)
class ProposedSamples(PackedSamples):
    """Packed samples, `n_per_ray` of each ray, with the stages that led to them.

    Rays from `n_rays_kept` on have none, and their part of the arrays is the tail.
    """

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


@dataclass(frozen=True)
class Draw:
    """Which random numbers a call takes: none without `stratified`; those of (seed, step, ray) with it."""

    stratified: bool = False
    seed: int = 0
    step: int | Tensor | None = None  # also decides the annealing; None: the proposals as they are
    first_ray: int = 0

    def jitter(self, rays: Rays, columns: int) -> list[Tensor | None]:
        """`columns` times (n_rays, 1) in [0, 1)."""
        if not self.stratified:
            return [None] * columns
        numbers = random_uniform(
            len(rays),
            columns=columns,
            seed=self.seed,
            stream=Stream.IMPORTANCE,
            step=0 if self.step is None else self.step,
            first=self.first_ray,
            device=rays.device,
        )
        return list(numbers.split(1, dim=1))


class RayEstimator(nn.Module):
    """`n_samples` on every ray, evenly over the span: the baseline, and what the others are made of.

    >>> rays = Rays(torch.zeros(2, 3), torch.tensor([[0.0, 0.0, 1.0]]).repeat(2, 1))
    >>> samples = RayEstimator(4, RaySpan(near=0.0, far=8.0)).sample(rays)
    >>> samples.t_starts.tolist(), samples.offsets.tolist()
    ([0.0, 2.0, 4.0, 6.0, 0.0, 2.0, 4.0, 6.0], [0, 4, 8])
    """

    n_stages = 0

    def __init__(self, n_samples: int, span: RaySpan) -> None:
        super().__init__()
        if n_samples < 1:
            raise InputError("n_samples", "at least 1", str(n_samples))
        self.n_samples, self.span = n_samples, span

    @property
    def samples_per_ray(self) -> int:
        """Samples that the field sees on every ray."""
        return self.n_samples

    @property
    def evaluations_per_ray(self) -> int:
        """Samples that are looked at on every ray before those."""
        return 0

    def max_rays(self, batch_samples: int) -> int:
        """Rays of a training step that hold so many samples."""
        return max(1, batch_samples // self.samples_per_ray)

    def cropped(self, box: Aabb) -> RayEstimator:
        """The same estimator inside a box alone; it shares its networks with this one."""
        other = copy.copy(self)
        other.span = self.span.inside(box)
        return other

    def sample(
        self, rays: Rays, sigma_fn: SigmaFn | None = None, *, draw: Draw | None = None, n_active: Tensor | None = None
    ) -> PackedSamples:
        """The samples of each ray (`ProposedSamples`); rays from `n_active` (a count on the device) on get none.

        `sigma_fn` is not asked: these estimators have densities of their own. With gradients enabled the stages keep
        their graph. Not differentiable to the rays.
        """
        rays = Rays(rays.origins.detach(), rays.directions.detach(), rays.times, rays.camera_indices, rays.pixel_radii)
        limits = self.span.limits(rays)
        edges, stages = self._place(rays, draw or Draw(), limits)
        return packed(edges.detach(), self.span.distances(edges.detach(), rays, limits), stages, n_active)

    def _place(self, rays: Rays, draw: Draw, limits: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Histogram, ...]]:
        """Edges (n_rays, n + 1) of the final samples, and the stages before them."""
        return even_edges(len(rays), self.n_samples, draw.jitter(rays, 1)[0], rays.device), ()

    def update(self, step: int | Tensor, density_fn: DensityFn) -> None:
        """Nothing: what is learned here is learned by gradients."""

    def loss(self, samples: PackedSamples, weights: Tensor) -> Tensor:
        """() the stages' loss against the weights (capacity,) that rendering gave the samples."""
        return weights.new_zeros(())


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


class ProposalEstimator(RayEstimator):
    """Mip-NeRF 360's proposal sampling: each density says where the next one looks, the last where the field does.

    `densities` are modules (or functions) of positions (n, 3) to density (n,), one per entry of `coarse_samples`;
    `nerfturbo.HashDensity` is made for it. Add `loss(samples, weights)` to your own loss to train them.

    >>> wall = lambda positions: 200.0 * (positions[:, 2] > 4.0).float()  # dense beyond z = 4
    >>> estimator = ProposalEstimator([wall], n_samples=4, coarse_samples=(64,), span=RaySpan(near=0.0, far=8.0))
    >>> rays = Rays(torch.zeros(1, 3), torch.tensor([[0.0, 0.0, 1.0]]))
    >>> bool(((estimator.sample(rays).midpoints() - 4.0).abs() < 0.5).float().mean() >= 0.5)
    True
    """

    def __init__(
        self,
        densities: Sequence[nn.Module | Callable[[Tensor], Tensor]],
        *,
        n_samples: int,
        coarse_samples: Sequence[int],
        span: RaySpan,
        anneal_steps: int = 1000,
    ) -> None:
        super().__init__(n_samples, span)
        self.coarse_samples, self.anneal_steps = tuple(coarse_samples), anneal_steps
        if not 1 <= len(densities) <= MAX_STAGES or len(densities) != len(self.coarse_samples):
            got = f"{len(densities)} and {len(self.coarse_samples)}"
            raise InputError("densities and coarse_samples", f"the same number, 1 to {MAX_STAGES}", got)
        if min(self.coarse_samples) < 1:
            raise InputError("coarse_samples", "at least 1 each", str(self.coarse_samples))
        self.fields = nn.ModuleList(one for one in densities if isinstance(one, nn.Module))
        self.densities: list[Callable[[Tensor], Tensor]] = list(densities)
        self.n_stages = len(densities)

    @property
    def evaluations_per_ray(self) -> int:
        return sum(self.coarse_samples)

    def _place(self, rays: Rays, draw: Draw, limits: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Histogram, ...]]:
        power = 1.0 if draw.step is None else annealing(draw.step, self.anneal_steps)
        jitter = draw.jitter(rays, self.n_stages + 1)
        edges = even_edges(len(rays), self.coarse_samples[0], jitter[0], rays.device)
        stages: list[Histogram] = []
        for index, density in enumerate(self.densities):
            # A density that knows its own space takes positions in it: they are made in one launch.
            known = isinstance(density, UnitDensity)
            space = Space(density.aabb, density.contraction) if known else Space()
            distances, positions = self.span.intervals(edges, rays, limits, space)
            found = density.unit_density(positions) if known else density(positions)
            if found.numel() != edges.shape[0] * (edges.shape[1] - 1):
                raise InputError("density", "one value per position", str(tuple(found.shape)))
            weights = density_weights(found.view(edges.shape[0], -1).float(), distances)
            stages.append(Histogram(edges, weights))
            following = (*self.coarse_samples, self.n_samples)[index + 1]
            edges = resample(edges, weights.detach(), following, power=power, jitter=jitter[index + 1])
        return edges, tuple(stages)

    def loss(self, samples: PackedSamples, weights: Tensor) -> Tensor:
        """() mean over the rays of every proposal's `interlevel_loss`; the weights themselves get no gradient."""
        if not isinstance(samples, ProposedSamples):
            raise InputError("samples", "those of this estimator's own `sample`", type(samples).__name__)
        own = samples.per_ray(weights)
        per_ray = sum(interlevel_loss(samples.edges, own, stage) for stage in samples.stages)
        return mean_over_rays(torch.as_tensor(per_ray, device=weights.device), samples)


def mean_over_rays(values: Tensor, samples: PackedSamples) -> Tensor:
    """() mean of values (n_rays,) over the rays that were kept."""
    kept = samples.n_rays_kept
    if kept is None:
        return values.mean()
    counted = torch.arange(values.shape[0], device=values.device) < kept
    return torch.where(counted, values, torch.zeros_like(values)).sum() / kept.clamp(min=1)


ColorFn = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]


class HierarchyEstimator(RayEstimator):
    """The original NeRF's two passes: a coarse field is rendered evenly, its weights place `n_samples` more samples,
    and the field behind sees all of them together.

    `coarse` is a field as `nerfturbo.fields.field` has it. It learns from its own colours, which `sample` leaves in
    the stage: compare them with the pictures, as `nerfturbo.training` does.
    """

    n_stages = 1

    def __init__(self, coarse: nn.Module, *, n_samples: int, coarse_samples: int, span: RaySpan) -> None:
        super().__init__(n_samples, span)
        if coarse_samples < 1:
            raise InputError("coarse_samples", "at least 1", str(coarse_samples))
        self.coarse, self.coarse_samples = coarse, coarse_samples

    @property
    def samples_per_ray(self) -> int:
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
            weights = density_weights(density.view(-1, n).float(), distances)
            color = (weights[..., None] * rgb.view(len(rays), n, -1)).sum(1)
        else:
            weights = density_weights(self.coarse.density(positions, times).view(-1, n).float(), distances)  # type: ignore[operator]
        more = resample(edges, weights.detach(), max(1, self.n_samples - 1), jitter=jitter[1])
        union = torch.sort(torch.cat([edges, more[:, : self.n_samples]], dim=-1), dim=-1).values
        return union, (Histogram(edges, weights, color),)


def _repeated(values: Tensor | None, n: int) -> Tensor | None:
    return None if values is None else values.repeat_interleave(n, 0)
