"""Samples placed where a pass before saw light: by proposal densities, or by a coarse field."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..config import MAX_PROPOSALS
from ..errors import InputError, refuse
from ..ops.intervals import Space, importance_sample, interval_weights
from ..ops.packed import mean_over_rays
from ..types import PackedSamples, Rays
from .histograms import PADDING, Histogram, RaySpan, annealing, interlevel_loss
from .sampler import Draw, UnitDensity
from .uniform import ProposedSamples, UniformEstimator, even_edges

LEARN_EVERY = 8  # after the annealing, proposals are trained at one in so many steps
PROPOSAL_BYTES = 96  # per sample of a density that does not say: place, position, encoding, density, weight
HISTOGRAM_BYTES = 12  # of those, what outlives its stage


class ProposalEstimator(UniformEstimator):
    """Mip-NeRF 360's proposal sampling: each density says where the next one looks, the last where the field does.
    `densities` are modules (or functions) of positions (n, 3) to density (n,), one per entry of `coarse_samples`;
    `nerfturbo.HashDensity` is made for it. Add `loss(samples, weights)` to your own loss to train them.

    >>> wall = lambda positions: 200.0 * (positions[:, 2] > 4.0).float()  # dense beyond z = 4
    >>> estimator = ProposalEstimator([wall], n_samples=4, coarse_samples=(64,), span=RaySpan(near=0.0, far=8.0))
    >>> rays = Rays(torch.zeros(1, 3), torch.tensor([[0.0, 0.0, 1.0]]))
    >>> bool(((estimator.sample(rays).midpoints() - 4.0).abs() < 0.5).float().mean() >= 0.5)
    True
    """

    rests = False  # whether this step only asks the densities where to look

    def __init__(
        self,
        densities: Sequence[nn.Module | Callable[[Tensor], Tensor]],
        *,
        n_samples: int,
        coarse_samples: Sequence[int],
        span: RaySpan,
        anneal_steps: int = 1000,
        padding: float = PADDING,
        blur: float = 0.0,
    ) -> None:
        super().__init__(n_samples, span)
        self.coarse_samples, self.anneal_steps = tuple(coarse_samples), anneal_steps
        self.padding, self.blur = padding, blur
        if not 1 <= len(densities) <= MAX_PROPOSALS or len(densities) != len(self.coarse_samples):
            got = f"{len(densities)} and {len(self.coarse_samples)}"
            raise InputError("densities and coarse_samples", f"the same number, 1 to {MAX_PROPOSALS}", got)
        refuse(min(self.coarse_samples) < 1, "coarse_samples", "at least 1 each", self.coarse_samples)
        self.fields = nn.ModuleList(one for one in densities if isinstance(one, nn.Module))
        self.densities: list[Callable[[Tensor], Tensor]] = list(densities)

    @property
    def evaluations_per_ray(self) -> int:
        return sum(self.coarse_samples)

    def bytes_per_ray(self, sample_bytes: int, place_bytes: int) -> int:
        """One stage after the other, and then the field."""
        stages = zip(self.coarse_samples, self.densities, strict=True)
        most = max(n * getattr(density, "bytes_per_sample", PROPOSAL_BYTES) for n, density in stages)
        return max(most, self.n_samples * sample_bytes) + self.evaluations_per_ray * HISTOGRAM_BYTES

    def _place(self, rays: Rays, draw: Draw, limits: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Histogram, ...]]:
        power = 1.0 if draw.step is None else annealing(draw.step, self.anneal_steps)
        jitter = draw.jitter(rays, len(self.densities) + 1)
        edges = even_edges(len(rays), self.coarse_samples[0], jitter[0], rays.device)
        stages: list[Histogram] = []
        for index, density in enumerate(self.densities):
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.rests):
                weights = self._weights(density, edges, rays, limits)
            stages.append(Histogram(edges, weights))
            following = (*self.coarse_samples, self.n_samples)[index + 1]
            options = {"jitter": jitter[index + 1], "padding": self.padding, "blur": self.padding < PADDING}
            edges = importance_sample(edges, weights.detach().clamp(min=0.0).pow(power), following, **options)
        return edges, tuple(stages)

    def _weights(self, density: Any, edges: Tensor, rays: Rays, limits: tuple[Tensor, Tensor]) -> Tensor:
        # A density that knows its own space takes positions in it: they are made in one launch.
        known = isinstance(density, UnitDensity)
        space = Space(density.aabb, density.contraction) if known else None
        distances, positions = self.span.intervals(edges, rays, limits, space)
        found = density.unit_density(positions) if known else density(positions)
        if found.numel() != edges.shape[0] * (edges.shape[1] - 1):
            raise InputError("density", "one value per position", str(tuple(found.shape)))
        return interval_weights(found.view(edges.shape[0], -1).float(), distances)

    def learns(self, step: int) -> bool:
        """Whether a training step trains the densities: at first all do, from `anneal_steps` on one in
        `LEARN_EVERY`.

        >>> estimator = ProposalEstimator([len], n_samples=4, coarse_samples=(8,), span=RaySpan(0.0, 1.0))
        >>> [step for step in (0, 1, 142, 143, 144, 1000, 1001, 1008) if estimator.learns(step)]
        [0, 1, 142, 144, 1000, 1008]
        """
        return step % (1 + int((LEARN_EVERY - 1) * min(1.0, step / max(1, self.anneal_steps)))) == 0

    def loss(self, samples: PackedSamples, weights: Tensor) -> Tensor:
        """() mean over the rays of every proposal's `interlevel_loss`; the weights themselves get no gradient."""
        if not isinstance(samples, ProposedSamples):
            raise InputError("samples", "those of this estimator's own `sample`", type(samples).__name__)
        own = samples.per_ray(weights)
        stages = enumerate(samples.stages)
        per_ray = sum(interlevel_loss(samples.edges, own, stage, blur=self.blur * 0.1**i) for i, stage in stages)
        return mean_over_rays(torch.as_tensor(per_ray, device=weights.device), samples)


class HierarchyEstimator(UniformEstimator):
    """The original NeRF's two passes: a coarse field is rendered evenly, its weights place `n_samples` more samples,
    and the field behind sees all of them together.

    `coarse` is a field as `nerfturbo.fields.field` has it. It learns from its own colours, which `sample` leaves in
    the stage: the training loss compares them with the images.
    """

    def __init__(self, coarse: Any, *, n_samples: int, coarse_samples: int, span: RaySpan) -> None:
        super().__init__(n_samples, span)
        refuse(coarse_samples < 1, "coarse_samples", "at least 1", coarse_samples)
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
        each = rays[torch.arange(len(rays), device=rays.device).repeat_interleave(n)]
        rgb = None
        if torch.is_grad_enabled():
            rgb, density = self.coarse(positions, each.directions, each.times, each.camera_indices)
        else:
            density = self.coarse.density(positions, each.times)
        weights = interval_weights(density.view(-1, n).float(), distances)
        color = None if rgb is None else (weights[..., None] * rgb.view(len(rays), n, -1)).sum(1)
        more = importance_sample(edges, weights.detach(), max(1, self.n_samples - 1), jitter=jitter[1], padding=PADDING)
        union = torch.sort(torch.cat([edges, more[:, : self.n_samples]], dim=-1), dim=-1).values
        return union, (Histogram(edges, weights, color),)
