"""The one chain from rays to the loss: place samples, evaluate the field, expose, composite, compare. Every variant
goes through it: proposals, coarse and fine, depth, exposure, near gradients,
regularisers, fields of one's own. `Stages` names the parts that can be replaced by a function."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..data.batches import PixelBatch, PixelSampler
from ..data.images import composite_over
from ..fields.field import offers
from ..fields.parts import truncated_exp
from ..ops.adam import RayBudget
from ..ops.composite import Thinning, composite, visible_codes
from ..ops.composite_loss import LossRule, RayLossRule, composite_loss, ray_losses
from ..ops.packed import compact
from ..ops.random import Stream, random_bits, random_uniform
from ..rendering.losses import color_loss, near_weights, ray_loss_rule, weigh_gradient, weights_loss
from ..rendering.model import NerfModel, half_box
from ..rendering.render import field_functions
from ..sampling.sampler import Draw
from ..types import PackedSamples, Rays
from .distributed import RayShare, RaySplit, Team, split_evenly

MARCHED_PER_TRAINED = 6  # the visibility pass may look at this many times the trained samples
FIRST_RAYS, SAMPLES_PER_FIRST_RAY = 256, 64  # rays of the first step: at least, and by the batch
DEPTH_RAYS = 256  # with known depth, in each step
DEPTH_SHARE = 8  # of the samples of a step, at most, for these rays
Placing = Callable[..., tuple[PackedSamples, Tensor]]  # of samples, as `place_samples` does
FARTHEST = 1.0  # where |log(t / z)| of the depth loss is cut off, and what light that never ends costs


@dataclass(frozen=True)
class StepResult:
    """What one step saw, on the device: reading a value waits for it."""

    loss: Tensor  # () differentiable
    mse: Tensor  # () mean squared colour error
    n_rays: Tensor  # () int32, rays that were trained
    n_samples: Tensor  # () int32, samples that were trained
    n_marched: Tensor  # () int32, samples before the visibility pass


@dataclass(frozen=True)
class Capacity:
    """Fixed shapes for a captured step: samples marched, samples trained, and the rays in use on the device."""

    marched: int
    trained: int
    n_active: Tensor


def ray_budget(model: NerfModel) -> RayBudget:
    """What a step may use; of the most rays a sampler may know how many fill the batch."""
    train, own = model.config.train, getattr(model.sampler, "max_rays", None)
    most = train.max_rays if own is None else min(train.max_rays, own(train.batch_samples))
    return RayBudget(train.batch_samples, train.batch_samples * MARCHED_PER_TRAINED, most)


def first_rays(model: NerfModel) -> int:
    """Rays of the first step; later ones follow the samples that they needed."""
    most = ray_budget(model).max_rays
    if getattr(model.sampler, "samples_per_ray", None) is not None:
        return most
    return min(most, max(FIRST_RAYS, model.config.train.batch_samples // SAMPLES_PER_FIRST_RAY))


def draw_batch(pixels: PixelSampler, step: int | Tensor, share: RayShare) -> PixelBatch:
    """Random pixels: rays `share` of the batch of this step."""
    return pixels.draw(step, share.count, first=share.first, late=True)


def draw_background(config: Config, step: int | Tensor, n_rays: int, device: torch.device, first: int = 0) -> Tensor:
    """(n_rays, 3): random per ray, or constant."""
    if config.train.background == "random":
        options = {"seed": config.train.seed, "stream": Stream.BACKGROUND, "step": step, "first": first}
        return random_uniform(n_rays, columns=3, device=device, **options)
    return torch.full((n_rays, 3), 1.0 if config.train.background == "white" else 0.0, device=device)


def target_over(batch: PixelBatch, background: Tensor) -> Tensor:
    """(n_rays, 3): what the image shows with the background behind its transparent part."""
    return composite_over(batch.rgba, background)


def update_grid(
    model: NerfModel, step: int | Tensor, *, all_cells: bool | None = None, team: Team | None = None
) -> None:
    """Let the grid, and a sampler that learns so too, see where the field holds anything."""
    for learner in (model.grid, model.sampler):
        if offers(learner, "update"):
            learner.update(step, model.field.density, all_cells=all_cells, team=team)


def place_samples(
    model: NerfModel, rays: Rays, *, step: int | Tensor, capacity: Capacity | None = None, first: int = 0
) -> tuple[PackedSamples, Tensor]:
    """The samples to train on, and how many were looked at to find them; `first` is the index of the first ray."""
    sampler, pruning = model.sampler, getattr(model.sampler, "pruning", None)
    draw = Draw(stratified=True, seed=model.config.train.seed, step=step, first_ray=first)
    options = {}
    if capacity is not None:
        options = {"n_active": capacity.n_active, "capacity": capacity.trained if pruning is None else capacity.marched}
    marched = sampler.sample(rays, draw=draw, **options)
    if pruning is None:
        return marched, marched.n_samples
    with torch.no_grad():
        limits = {"early_stop_eps": pruning.early_stop_eps, "alpha_thre": sampler.alpha_threshold(pruning.alpha_thre)}
        limits["thinning"] = draw_thinning(pruning.merge_weak_samples, draw, rays)
        if offers(model.field, "sample_visibility"):
            keep = model.field.sample_visibility(rays, marched, **limits)
        else:
            keep = visible_codes(sample_density(model.field, rays, marched), marched, **limits)
        kept = compact(marched, keep, capacity=None if capacity is None else capacity.trained)
    return kept, marched.n_samples


def sample_density(field: Any, rays: Rays, samples: PackedSamples) -> Tensor:
    """(capacity,) the field's density at packed samples."""
    if offers(field, "sample_density"):
        return field.sample_density(rays, samples)
    return field_functions(field, rays)[0](samples.t_starts, samples.t_ends, samples.ray_indices)


def draw_thinning(share: float, draw: Draw, rays: Rays) -> Thinning | None:
    """Where along each ray weak samples are merged; None where all of them are trained."""
    if share == 0.0:
        return None
    options = {"seed": draw.seed, "stream": Stream.THINNING, "step": draw.step, "first": draw.first_ray}
    return Thinning(share, random_bits(len(rays), device=rays.device, **options)[:, 0])


@dataclass(frozen=True)
class Evaluated:
    """What a field says of the samples, as exposed by their photos, gradients weighed: logits where it gives them."""

    logits: Tensor | None  # (capacity, 4)
    values: tuple[Tensor, Tensor] | None = None  # density (capacity,), rgb (capacity, channels)

    def density_and_color(self) -> tuple[Tensor, Tensor]:
        if self.values is not None:
            return self.values
        assert self.logits is not None
        return truncated_exp(self.logits[:, 3]), torch.sigmoid(self.logits[:, :3])


def evaluate(model: NerfModel, rays: Rays, samples: PackedSamples, weights: Tensor | None = None) -> Evaluated:
    """The field over the samples, differentiable. Gradients are multiplied by `weights` (capacity,), where given."""
    photos = model.photos
    if offers(model.field, "sample_logits"):
        raw = model.field.sample_logits(rays, samples)
        raw = raw if photos is None else photos.expose(raw, rays, samples)
        return Evaluated(raw if weights is None else weigh_gradient(raw, weights))
    _, rgb_sigma_fn = field_functions(model.field, rays)
    rgb_sigma_fn = rgb_sigma_fn if photos is None else photos.exposed(rgb_sigma_fn, rays)
    rgb, density = rgb_sigma_fn(samples.t_starts, samples.t_ends, samples.ray_indices)
    if weights is not None:
        rgb, density = weigh_gradient(rgb, weights), weigh_gradient(density[:, None], weights)[:, 0]
    return Evaluated(None, (density, rgb))


def near_gradients(model: NerfModel, samples: PackedSamples) -> Tensor | None:
    """(capacity,) how much of its gradient a sample near the cameras gets; None where nothing is scaled."""
    distance = model.config.loss.near_gradient * half_box(model.bounds.aabb)
    return near_weights(samples.t_starts, samples.t_ends, distance) if distance > 0.0 else None


def render_and_compare(
    model: NerfModel, batch: PixelBatch, samples: PackedSamples, background: Tensor, loss_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The loss of the rays that were kept, differentiable, and their mean squared error."""
    seen = evaluate(model, batch.rays, samples, near_gradients(model, samples))
    learns = offers(model.sampler, "loss") and not getattr(model.sampler, "rests", False)  # from its samples' weights
    stages = [stage for stage in getattr(samples, "stages", ()) if stage.color is not None]  # of a coarse field
    (rule, places), kind, kept = _ray_rule(model, samples), model.config.loss.kind, samples.n_rays_kept
    if seen.logits is not None and not learns and not stages:  # activations, compositing and loss are one op
        options = {"rule": LossRule(kind), "gradient_scale": loss_scale}
        loss, mse, _ = composite_loss(seen.logits, samples, background, batch.rgba, **options)
    else:
        out = composite(*seen.density_and_color(), samples)
        target = target_over(batch, background)
        color = out.rgb + (1.0 - out.opacity)[:, None] * background
        loss = color_loss(color, target, kind=kind, n_rays_kept=kept)
        mse = color_loss(color.detach(), target, kind="mse", n_rays_kept=kept)
        for stage in stages:
            coarse = stage.color + (1.0 - stage.weights.sum(-1, keepdim=True)) * background
            loss = loss + color_loss(coarse, target, kind=kind, n_rays_kept=kept)
        if learns:
            loss = loss + model.sampler.loss(samples, out.weights)
        if rule is not None and seen.logits is None:
            loss = loss + weights_loss(out.weights, out.opacity, places, rule)
    if rule is not None and seen.logits is not None:
        loss = loss + ray_losses(seen.logits, samples, rule, places=places, gradient_scale=loss_scale)
    return loss, mse


def _ray_rule(model: NerfModel, samples: PackedSamples) -> tuple[RayLossRule | None, PackedSamples]:
    """The regularisers of rays, and the samples in the distances that the distortion counts in: those of the scene, or
    with a sampler that learns by gradients those of its normalised rays."""
    rule = ray_loss_rule(model.config.loss, model.bounds.aabb.diagonal)
    if rule is None or not offers(model.sampler, "loss") or not offers(samples, "normalized"):
        return rule, samples
    return replace(rule, unit=1.0), samples.normalized()  # type: ignore[attr-defined]


def depth_loss(model: NerfModel, *, step: int | Tensor, fixed: bool, first: int, place: Placing) -> Tensor:
    """() the weighted loss of this step's points of known depth; with `fixed` shapes for a captured step."""
    config, n = model.config, DEPTH_RAYS
    assert model.keypoints is not None
    drawn = model.keypoints.draw(n, seed=config.train.seed, step=step, first=first)
    rays = drawn.rays if model.photos is None else model.photos.rays(drawn.rays)
    capacity = None
    if fixed:
        trained = max(n, config.train.batch_samples // DEPTH_SHARE)
        active = torch.full((), n, dtype=torch.int32, device=rays.device)  # no copy, which no graph could record
        capacity = Capacity(trained * MARCHED_PER_TRAINED, trained, active)
    samples, _ = place(model, rays, step=step, capacity=capacity, first=first)
    density, _ = evaluate(model, rays, samples, near_gradients(model, samples)).density_and_color()
    values = depth_errors(density, samples, drawn.distances)
    weights = drawn.weights
    if samples.n_rays_kept is not None:
        weights = weights * (torch.arange(n, device=values.device) < samples.n_rays_kept)
    return config.loss.depth * (values * weights).sum() / weights.sum().clamp(min=1e-6)


def depth_errors(density: Tensor, samples: PackedSamples, distances: Tensor) -> Tensor:
    """(n_rays,): how far from its point, at `distances` z (n_rays,), the light of each ray ends in the mean,

        sum_i w_i min(|log(t_i / z)|, 1) + (1 - sum_i w_i).

    Relative, because a pixel's error of depth grows with it. The mean of the distances, not the distance of the mean:
    fog before a point and light that passes it would cancel. Differentiable to density (capacity,).

    >>> samples = PackedSamples.from_counts(torch.tensor([2]), torch.tensor([0.9, 1.9]), torch.tensor([1.1, 2.1]))
    >>> half = torch.tensor([0.6931 / 0.2, 1e9])  # one half of the light ends at 1, the other at 2
    >>> round(depth_errors(half, samples, torch.tensor([1.0])).item(), 3)  # log(2) / 2
    0.347
    """
    away = torch.log(samples.midpoints().clamp(min=1e-6) / distances[samples.ray_indices.long()])
    out = composite(density, away.abs().clamp(max=FARTHEST)[:, None], samples)
    return out.rgb[:, 0] + (1.0 - out.opacity) * FARTHEST


@dataclass(frozen=True)
class Stages:
    """The parts of a step: a function that is passed here takes the place of the one named below. On a GPU the step is
    recorded once: a replacement must not read values back, and `split` is asked for step 0 alone."""

    split: RaySplit = split_evenly  # which rays a process takes
    draw: Callable[[PixelSampler, int | Tensor, RayShare], PixelBatch] = draw_batch  # which pixels, in which order
    place: Placing = place_samples  # where along the rays
    compare: Callable[..., tuple[Tensor, Tensor]] = render_and_compare  # the rendering maths and the loss
    update_grid: Callable[..., None] = update_grid  # the occupancy logic


def compute_loss(
    model: NerfModel,
    batch: PixelBatch,
    background: Tensor,
    *,
    step: int | Tensor,
    capacity: Capacity | None = None,
    loss_scale: Tensor | None = None,
    first: int = 0,
    stages: Stages | None = None,
) -> StepResult:
    """Place, render and compare one batch. With `capacity` all shapes are fixed and nothing is read back."""
    stages = stages or Stages()
    if model.photos is not None:
        batch = replace(batch, rays=model.photos.rays(batch.rays))
    samples, n_marched = stages.place(model, batch.rays, step=step, capacity=capacity, first=first)
    kept = samples.n_rays_kept
    if capacity is not None and kept is not None:
        kept = torch.minimum(kept, capacity.n_active)  # rays past the active ones hold nothing and count for nothing
        samples = replace(samples, n_rays_kept=kept)
    loss, mse = stages.compare(model, batch.arrived(), samples, background, loss_scale)
    if model.keypoints is not None:
        loss = loss + depth_loss(model, step=step, fixed=capacity is not None, first=first, place=stages.place)
    if offers(model.field, "regularization"):
        loss = loss + model.field.regularization(step)
    n_rays = torch.tensor(len(batch.rays), dtype=torch.int32) if kept is None else kept
    return StepResult(loss, mse.detach(), n_rays, samples.n_samples, n_marched)
