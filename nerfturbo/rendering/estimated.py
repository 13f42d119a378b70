"""Rendering by estimators that know no boxes: part after part of the picture, every ray to its end."""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import Config
from ..fields import HashDensity, build_field
from ..fields.activations import truncated_exp
from ..fields.field import Field, RayField
from ..ops.composite import composite
from ..ops.frame import FinishedRays
from ..ops.hash_encode import HashLayout
from ..sampling.contracted_grid import ContractedGrid
from ..sampling.occupancy_grid import OccupancyGrid
from ..sampling.proposals import HierarchyEstimator, ProposalEstimator, RayEstimator
from ..sampling.spans import RaySpan
from ..types import Aabb, PackedSamples, Rays, RenderOutput
from .losses import weigh_gradient
from .photos import PhotoCorrections
from .render import field_functions
from .rounds import default_memory, given_memory

Places = OccupancyGrid | RayEstimator  # what places samples
PROPOSAL_BYTES = 96  # per sample of a proposal that does not say: place, position, encoding, density, weight
HISTOGRAM_BYTES = 12  # of those, what outlives its stage
PART_BYTES, PART_SHARE = (1 << 30, 4 << 30), 1 / 32  # of a GPU: at least, at most, and of its memory
PROPOSAL_SEEDS = 7919  # apart from those of the field


def half_box(aabb: Aabb) -> float:
    """The unit of lengths in `SamplingConfig`."""
    return 0.5 * max(aabb.size)


def build_span(config: Config, aabb: Aabb, *, near: float, far: float) -> RaySpan:
    """The part of a ray that a config samples: inside the box, or with a contraction far beyond it."""
    sampling, unit = config.sampling, half_box(aabb)
    if sampling.contraction != "none":
        return RaySpan(near, max(far, sampling.far * unit), sampling.spacing, unit)
    return RaySpan(near, far, sampling.spacing, unit, aabb.scaled(2.0 ** (config.grid.levels - 1)))


def build_estimator(config: Config, aabb: Aabb, *, near: float, far: float) -> RayEstimator | None:
    """The estimator that a config describes over the scene's inner box; None for the grid of boxes."""
    sampling, seed = config.sampling, config.train.seed + PROPOSAL_SEEDS
    if sampling.kind == "grid" and sampling.contraction == "none":
        return None
    span = build_span(config, aabb, near=near, far=far)
    if sampling.kind == "grid":
        folded = {"contraction": sampling.contraction, "seed": config.train.seed}
        return ContractedGrid(aabb, config.grid, steps=sampling.steps, span=span, **folded)
    if sampling.kind == "uniform":
        return RayEstimator(sampling.n_samples, span)
    space = aabb if sampling.contraction != "none" else aabb.scaled(2.0 ** (config.grid.levels - 1))
    if sampling.kind == "hierarchy":
        coarse = build_field(config.field, space, seed=seed, contraction=sampling.contraction)
        return HierarchyEstimator(
            coarse, n_samples=sampling.n_samples, coarse_samples=sampling.coarse_samples[0], span=span
        )
    densities = []
    for index in range(len(sampling.coarse_samples)):
        finest = sampling.proposal_resolutions[min(index, len(sampling.proposal_resolutions) - 1)]
        base = min(config.field.base_resolution, finest)
        layout = HashLayout(sampling.proposal_levels, 2, sampling.proposal_log2_entries, base, finest)
        densities.append(
            HashDensity(
                space, layout, width=sampling.proposal_width, contraction=sampling.contraction, seed=seed + index
            )
        )
    return ProposalEstimator(
        densities,
        n_samples=sampling.n_samples,
        coarse_samples=sampling.coarse_samples,
        span=span,
        anneal_steps=sampling.anneal_steps,
    )


def evaluate_rays(
    field: Field,
    rays: Rays,
    samples: PackedSamples,
    *,
    gradient_weights: Tensor | None = None,
    photos: PhotoCorrections | None = None,
) -> tuple[Tensor, Tensor]:
    """Density (capacity,) and rgb (capacity, channels) of a field over the samples of rays, differentiable: gradients
    weighed sample by sample, colours as the photos expose them."""
    if isinstance(field, RayField):
        raw = field.sample_logits(rays, samples)
        raw = raw if photos is None else photos.expose(raw, rays, samples)
        if gradient_weights is not None:
            raw = weigh_gradient(raw, gradient_weights)
        return truncated_exp(raw[:, 3]), torch.sigmoid(raw[:, :3])
    _, rgb_sigma_fn = field_functions(field, rays)
    if photos is not None:
        rgb_sigma_fn = photos.exposed(rgb_sigma_fn, rays)
    rgb, density = rgb_sigma_fn(samples.t_starts, samples.t_ends, samples.ray_indices)
    if gradient_weights is not None:
        rgb, density = weigh_gradient(rgb, gradient_weights), weigh_gradient(density[:, None], gradient_weights)[:, 0]
    return density, rgb


def render_estimated(
    field: Field, rays: Rays, estimator: RayEstimator, *, background: Tensor | None = None
) -> RenderOutput:
    """All samples of the rays at once, differentiable to the field."""
    samples = estimator.sample(rays)
    density, rgb = evaluate_rays(field, rays, samples)
    out = composite(density, rgb, samples)
    color = out.rgb if background is None else out.rgb + (1.0 - out.opacity)[:, None] * background
    return RenderOutput(color, out.opacity, out.depth / out.opacity.clamp(min=1e-6), out.weights, samples)


def rays_at_once(estimator: RayEstimator, memory: int, sample_bytes: int) -> int:
    """Rays whose samples fit the memory."""
    looked_at, samples = estimator.evaluations_per_ray, estimator.samples_per_ray * (sample_bytes + 64)
    if isinstance(estimator, ProposalEstimator):  # one stage after the other, and then the field
        stages = zip(estimator.coarse_samples, estimator.densities, strict=True)
        most = max(n * getattr(density, "bytes_per_sample", PROPOSAL_BYTES) for n, density in stages)
        bytes_per_ray = max(most, samples) + looked_at * HISTOGRAM_BYTES
    else:
        bytes_per_ray = looked_at * PROPOSAL_BYTES + samples
    return max(64, memory // max(bytes_per_ray, 1))


def part_memory(device: torch.device) -> int:
    """Bytes that a part of a picture may take unless told otherwise: a part is some hundred launches whatever its
    size, so that a large GPU is given large ones."""
    if device.type != "cuda" or given_memory() is not None:
        return default_memory(device, many_launches=True)
    least, most = PART_BYTES
    return min(most, max(least, int(PART_SHARE * torch.cuda.get_device_properties(device).total_memory)))


@torch.no_grad()
def finish_part(field: Field, rays: Rays, estimator: RayEstimator, background: Tensor | None) -> FinishedRays:
    """One part of a picture."""
    out = render_estimated(field, rays, estimator, background=background)
    return FinishedRays(out.rgb.clamp(0.0, 1.0), out.opacity, out.depth)
