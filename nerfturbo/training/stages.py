"""The stages of a step, each a plain function: which pixels, where along their rays, how they are compared.

`Stages` names them: pass another function for any of them and everything around it stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..config import Config
from ..data.batches import PixelBatch, PixelSampler
from ..fields.field import RayField, RegularizedField
from ..fields.ngp import InstantNGP
from ..ops.composite import Thinning, visible_codes
from ..ops.composite_loss import LossRule, composite_loss, ray_losses
from ..ops.packed import compact
from ..ops.random import Stream, random_bits, random_uniform
from ..rendering.losses import color_loss, ray_loss_rule, weigh_gradient, weights_loss
from ..rendering.model import NerfModel
from ..rendering.near import scale_near_gradients
from ..rendering.render import field_functions, ray_marching, volume_rendering
from ..sampling.contracted_grid import ContractedGrid
from ..sampling.proposals import Draw, ProposedSamples
from ..types import PackedSamples, Rays
from .distributed import RayShare, RaySplit, Team, split_evenly
from .keypoint_loss import keypoint_loss
from .pixels import compare_pixels
from .proposed import compare_proposed, gradient_weights, near_distance, propose_samples


@dataclass(frozen=True)
class StepResult:
    """What one step saw, on the device: reading a value waits for it."""

    loss: Tensor  # () differentiable
    mse: Tensor  # () mean squared colour error
    n_rays: Tensor  # () int32, rays that were trained
    n_samples: Tensor  # () int32, samples that were trained
    n_marched: Tensor  # () int32, samples in occupied cells before the visibility pass


@dataclass(frozen=True)
class Capacity:
    """Fixed shapes for a captured step: samples marched, samples trained, and the rays in use on the device."""

    marched: int
    trained: int
    n_active: Tensor


def draw_background(config: Config, step: int | Tensor, n_rays: int, device: torch.device, first: int = 0) -> Tensor:
    """(n_rays, 3): random per ray, or constant."""
    if config.train.background == "random":
        return random_uniform(
            n_rays,
            columns=3,
            seed=config.train.seed,
            stream=Stream.BACKGROUND,
            step=step,
            first=first,
            device=device,
        )
    return torch.full((n_rays, 3), 1.0 if config.train.background == "white" else 0.0, device=device)


def draw_thinning(
    config: Config, step: int | Tensor, n_rays: int, device: torch.device, first: int = 0
) -> Thinning | None:
    """Where along each ray samples that add little are left out; None where all of them are trained."""
    if config.render.thin == 0.0:
        return None
    options = {"seed": config.train.seed, "stream": Stream.THINNING, "step": step, "first": first, "device": device}
    return Thinning(config.render.thin, random_bits(n_rays, **options)[:, 0])


def target_over(batch: PixelBatch, background: Tensor) -> Tensor:
    """(n_rays, 3): what the picture shows with the background behind its transparent part."""
    if batch.rgba.shape[1] == 3:
        return batch.rgba
    alpha = batch.rgba[:, 3:]
    return batch.rgba[:, :3] * alpha + background * (1.0 - alpha)


def draw_batch(sampler: PixelSampler, step: int | Tensor, share: RayShare) -> PixelBatch:
    """Random pixels: rays `share` of the batch of this step."""
    return sampler.draw(step, share.count, first=share.first)


def update_grid(
    model: NerfModel, step: int | Tensor, *, all_cells: bool | None = None, team: Team | None = None
) -> None:
    """Learn from the field which cells hold anything."""
    model.grid.update(step, model.field.density, all_cells=all_cells, team=team)
    if isinstance(model.proposer, ContractedGrid):
        model.proposer.update(step, model.field.density, all_cells=all_cells, team=team)


def place_samples(
    model: NerfModel, rays: Rays, *, step: int | Tensor, capacity: Capacity | None = None, first: int = 0
) -> tuple[PackedSamples, Tensor]:
    """The samples to train on, and how many were marched to find them; `first` is the index of the first ray."""
    config, settings = model.config, model.training_settings
    active = None if capacity is None else capacity.n_active
    most = None if capacity is None else (capacity.marched if config.render.prune else capacity.trained)
    grid = model.grid
    if isinstance(model.proposer, ContractedGrid):
        draw = Draw(stratified=True, seed=config.train.seed, step=step, first_ray=first)
        marched, grid = model.proposer.sample(rays, draw=draw, n_active=active, capacity=most), model.proposer.cells
    elif model.proposer is not None:
        return propose_samples(model, rays, step=step, n_active=active, first=first)
    else:
        marched = ray_marching(
            rays,
            grid,
            near_plane=settings.near_plane,
            far_plane=settings.far_plane,
            cone_angle=settings.cone_angle,
            stratified=True,
            seed=config.train.seed,
            step=step,
            capacity=most,
            n_active=active,
            first_ray=first,
        )
    if not config.render.prune:
        return marched, marched.n_samples
    with torch.no_grad():
        threshold = grid.alpha_threshold(settings.alpha_thre)
        limits = {"early_stop_eps": settings.early_stop_eps, "alpha_thre": threshold}
        thinning = draw_thinning(config, step, len(rays), rays.device, first)
        if isinstance(model.field, InstantNGP) and thinning is not None:
            keep = model.field.sample_visibility(rays, marched, **limits, thinning=thinning)
        elif isinstance(model.field, RayField) and thinning is None:
            keep = model.field.sample_visibility(rays, marched, **limits)
        else:
            sigma_fn, _ = field_functions(model.field, rays)
            density = sigma_fn(marched.t_starts, marched.t_ends, marched.ray_indices)
            keep = visible_codes(density, marched, **limits, thinning=thinning)
        kept = compact(marched, keep, capacity=None if capacity is None else capacity.trained)
    return kept, marched.n_samples


def render_and_compare(
    model: NerfModel, batch: PixelBatch, samples: PackedSamples, background: Tensor, loss_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The loss of the rays that were kept, differentiable, and their mean squared error."""
    kind, weights, kept = model.config.train.loss, batch.weights, samples.n_rays_kept
    if isinstance(samples, ProposedSamples):
        return compare_proposed(model, batch, samples, background, target_over(batch, background))
    if batch.rays_per_pixel > 1:
        return compare_pixels(model, batch, samples, background, loss_scale)
    near = gradient_weights(model, samples)
    rule, extra = ray_loss_rule(model.config.loss, model.bounds.aabb.diagonal), None
    if isinstance(model.field, RayField):
        raw = model.field.sample_logits(batch.rays, samples)
        raw = raw if model.photos is None else model.photos.expose(raw, batch.rays, samples)
        if near is not None:
            raw = weigh_gradient(raw, near)
        if weights is not None:
            raw = weigh_gradient(raw, weights[samples.ray_indices])
        out = composite_loss(raw, samples, background, batch.rgba, rule=LossRule(kind), gradient_scale=loss_scale)
        if rule is not None:
            extra = ray_losses(raw, samples, rule, gradient_scale=loss_scale)
        if weights is None:
            return out.loss if extra is None else out.loss + extra, out.mse
        loss, rgb, target = out.loss, out.rgb, target_over(batch, background)
    else:
        _, rgb_sigma_fn = field_functions(model.field, batch.rays)
        if model.photos is not None:
            rgb_sigma_fn = model.photos.exposed(rgb_sigma_fn, batch.rays)
        if near is not None:
            rgb_sigma_fn = scale_near_gradients(rgb_sigma_fn, near_distance(model))
        seen = rgb_sigma_fn(samples.t_starts, samples.t_ends, samples.ray_indices)
        rendered = volume_rendering(lambda *_: seen, samples, background=background)
        rgb = rendered.rgb
        if rule is not None:
            thickness = seen[1] * (samples.t_ends - samples.t_starts)
            extra = weights_loss(rendered.weights, rendered.opacity, thickness, samples, rule)
        target = target_over(batch, background)
        loss = color_loss(rgb, target, kind=kind, n_rays_kept=kept, weights=weights)
    mse = color_loss(rgb.detach(), target, kind="mse", n_rays_kept=kept, weights=weights)
    if weights is not None:  # what is reported is the mean over all pixels too, not over those that were drawn
        value = color_loss(rgb.detach(), target, kind=kind, n_rays_kept=kept, weights=weights)
        loss = loss + (value - loss.detach())
        batch.add_errors((rgb.detach() - target).abs().mean(-1), kept)
    return loss if extra is None else loss + extra, mse


@dataclass(frozen=True)
class Stages:
    """The parts of a step. Each is a plain function: what is passed here takes the place of the one named below.

    On a GPU the step is recorded once, so that a replacement must not read values back to the host, and `split` is
    asked for step 0 alone.
    """

    split: RaySplit = split_evenly  # which rays a process takes
    draw: Callable[[PixelSampler, int | Tensor, RayShare], PixelBatch] = draw_batch  # which pixels, in which order
    place: Callable[..., tuple[PackedSamples, Tensor]] = place_samples  # where along the rays
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
    """March, render and compare one batch. With `capacity` all shapes are fixed and nothing is read back."""
    stages = stages or Stages()
    if model.photos is not None:
        batch = replace(batch, rays=model.photos.rays(batch.rays))
    samples, n_marched = stages.place(model, batch.rays, step=step, capacity=capacity, first=first)
    kept = samples.n_rays_kept
    if capacity is not None and kept is not None:
        kept = torch.minimum(kept, capacity.n_active)  # rays past the active ones hold nothing and count for nothing
        samples = replace(samples, n_rays_kept=kept)
    loss, mse = stages.compare(model, batch, samples, background, loss_scale)
    if model.keypoints is not None:
        loss = loss + keypoint_loss(model, step=step, fixed=capacity is not None, first=first, place=stages.place)
    if isinstance(model.field, RegularizedField):
        loss = loss + model.field.regularization(step)
    n_rays = torch.tensor(len(batch.rays), dtype=torch.int32) if kept is None else kept
    return StepResult(loss, mse.detach(), n_rays, samples.n_samples, n_marched)
