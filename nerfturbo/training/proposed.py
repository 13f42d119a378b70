"""The stages of a step where an estimator, not the grid, places the samples."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..data.batches import PixelBatch
from ..ops.composite import composite
from ..ops.packed import packed_sum
from ..rendering.estimated import evaluate_rays, half_box
from ..rendering.losses import color_loss, distortion_loss, ray_loss_rule, weights_loss
from ..rendering.model import NerfModel
from ..rendering.near import near_weights
from ..sampling.proposals import Draw, ProposedSamples, mean_over_rays
from ..types import PackedSamples, Rays


def propose_samples(
    model: NerfModel, rays: Rays, *, step: int | Tensor, n_active: Tensor | None = None, first: int = 0
) -> tuple[ProposedSamples, Tensor]:
    """The samples to train on, stratified, and how many they are."""
    assert model.proposer is not None
    draw = Draw(stratified=True, seed=model.config.train.seed, step=step, first_ray=first)
    samples = model.proposer.sample(rays, draw=draw, n_active=n_active)
    assert isinstance(samples, ProposedSamples)
    return samples, samples.n_samples


def near_distance(model: NerfModel) -> float:
    """Below this distance gradients shrink; 0: nowhere."""
    return model.config.sampling.near_gradient * half_box(model.bounds.aabb)


def gradient_weights(model: NerfModel, samples: PackedSamples) -> Tensor | None:
    """(capacity,) how much of its gradient a sample near the cameras gets; None where nothing is scaled."""
    distance = near_distance(model)
    return near_weights(samples.t_starts, samples.t_ends, distance) if distance > 0.0 else None


def compare_proposed(
    model: NerfModel, batch: PixelBatch, samples: ProposedSamples, background: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of the rays that were kept, differentiable, and their mean squared error."""
    near = gradient_weights(model, samples)
    seen = evaluate_rays(model.field, batch.rays, samples, gradient_weights=near, photos=model.photos)
    return proposed_loss(model, batch, samples, seen, background, target)


def proposed_loss(
    model: NerfModel,
    batch: PixelBatch,
    samples: ProposedSamples,
    seen: tuple[Tensor, Tensor],
    background: Tensor,
    target: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same from the density and colour that the field has `seen` at the samples.

    Besides the colour: that of a coarse field, the proposals' distance from the weights, and the weights' spread.
    """
    estimator, config, (density, rgb) = model.proposer, model.config, seen
    assert estimator is not None
    out = composite(density, rgb, samples)
    color = out.rgb + (1.0 - out.opacity)[:, None] * background
    loss, mse = _compare_colors(color, target, batch, samples, config.train.loss)
    for stage in samples.stages:
        if stage.color is not None:
            coarse = stage.color + (1.0 - stage.weights.sum(-1, keepdim=True)) * background
            loss = loss + _compare_colors(coarse, target, batch, samples, config.train.loss)[0]
    sampling, rule = config.sampling, ray_loss_rule(config.loss, model.bounds.aabb.diagonal)
    if sampling.kind == "proposal" and sampling.interlevel > 0.0:
        loss = loss + sampling.interlevel * estimator.loss(samples, out.weights)
    if sampling.kind == "proposal" and sampling.distortion > 0.0:
        spread = distortion_loss(out.weights, samples.normalized())
        loss = loss + sampling.distortion * mean_over_rays(spread, samples)
    if rule is not None:
        thickness = density * (samples.t_ends - samples.t_starts)
        loss = loss + weights_loss(out.weights, out.opacity, thickness, samples, rule)
    if batch.weights is not None:
        batch.add_errors((color.detach() - target).abs().mean(-1), samples.n_rays_kept)
    return loss, mse


def _compare_colors(
    color: Tensor, target: Tensor, batch: PixelBatch, samples: ProposedSamples, kind: Literal["huber", "mse"]
) -> tuple[Tensor, Tensor]:
    """The colour loss of rays, or of pixels that are means of several, and their mean squared error."""
    kept, weights = samples.n_rays_kept, batch.weights
    if batch.rays_per_pixel > 1:
        from .pixels import pixel_offsets  # which imports this file

        offsets = pixel_offsets(batch)
        counts = (offsets[1:] - offsets[:-1])[:, None]
        color, target = (packed_sum(values, offsets) / counts for values in (color, target))
        weights = None if weights is None else weights[offsets[:-1].long()]
        kept = None if kept is None else (offsets[1:] <= kept).sum(dtype=torch.int32)
    loss = color_loss(color, target, kind=kind, n_rays_kept=kept, weights=weights)
    return loss, color_loss(color.detach(), target, kind="mse", n_rays_kept=kept, weights=weights)


def rays_per_step(model: NerfModel) -> int:
    """At most so many rays: an estimator's samples per ray are known, so that shapes need not exceed the batch."""
    train = model.config.train
    if model.proposer is None:
        return train.max_rays
    return min(train.max_rays, model.proposer.max_rays(train.batch_samples))
