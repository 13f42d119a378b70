"""Pixels that are means of several rays: the loss compares a pixel's area with its colour, not one line through it.

A picture's pixel is the mean of what lies behind its whole area. Training single rays, wherever in the pixel they pass,
teaches each of them the mean: too smooth. Training the mean of a few leaves the field as sharp as the pictures allow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..data.batches import PixelBatch
from ..fields.activations import truncated_exp
from ..fields.field import RayField
from ..ops.composite import composite
from ..ops.composite_loss import ray_losses
from ..ops.packed import packed_sum
from ..rendering.losses import color_loss, ray_loss_rule, weigh_gradient, weights_loss
from ..rendering.model import NerfModel
from ..rendering.render import field_functions
from ..types import PackedSamples
from .proposed import gradient_weights


def compare_pixels(
    model: NerfModel, batch: PixelBatch, samples: PackedSamples, background: Tensor, loss_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The loss of the pixels whose rays were all kept, differentiable, and their mean squared error."""
    kind, offsets = model.config.train.loss, pixel_offsets(batch)
    rule, extra = ray_loss_rule(model.config.loss, model.bounds.aabb.diagonal), None
    if isinstance(model.field, RayField):
        raw = model.field.sample_logits(batch.rays, samples)
        raw = raw if model.photos is None else model.photos.expose(raw, batch.rays, samples)
        near = gradient_weights(model, samples)
        raw = raw if near is None else weigh_gradient(raw, near)
        rgb, density = torch.sigmoid(raw[:, :3]), truncated_exp(raw[:, 3])
    else:
        raw, (_, rgb_sigma_fn) = None, field_functions(model.field, batch.rays)
        if model.photos is not None:
            rgb_sigma_fn = model.photos.exposed(rgb_sigma_fn, batch.rays)
        rgb, density = rgb_sigma_fn(samples.t_starts, samples.t_ends, samples.ray_indices)
    out = composite(density, rgb, samples)
    if rule is not None and raw is not None:
        extra = ray_losses(raw, samples, rule, gradient_scale=loss_scale)
    elif rule is not None:
        thickness = density * (samples.t_ends - samples.t_starts)
        extra = weights_loss(out.weights, out.opacity, thickness, samples, rule)

    counts = (offsets[1:] - offsets[:-1])[:, None]
    alpha = batch.rgba[:, 3:]
    target = batch.rgba if batch.rgba.shape[1] == 3 else batch.rgba[:, :3] * alpha + background * (1.0 - alpha)
    seen = packed_sum(out.rgb + (1.0 - out.opacity)[:, None] * background, offsets) / counts
    wanted = packed_sum(target, offsets) / counts
    kept = None
    if samples.n_rays_kept is not None:  # of the last pixel some rays may be missing
        kept = (offsets[1:] <= samples.n_rays_kept).sum(dtype=torch.int32)
    weights = None if batch.weights is None else batch.weights[offsets[:-1].long()]
    loss = color_loss(seen, wanted, kind=kind, n_rays_kept=kept, weights=weights)
    mse = color_loss(seen.detach(), wanted, kind="mse", n_rays_kept=kept, weights=weights)
    if batch.weights is not None:
        errors = (seen.detach() - wanted).abs().mean(-1)
        pixel = torch.searchsorted(offsets[1:], torch.arange(len(batch.rays), device=offsets.device), right=True)
        batch.add_errors(errors[pixel], samples.n_rays_kept)
    return loss if extra is None else loss + extra, mse


def pixel_offsets(batch: PixelBatch) -> Tensor:
    """(n_pixels + 1,) int32: the first ray of each pixel of the batch; the first and the last may have fewer."""
    n, size = len(batch.rays), batch.rays_per_pixel
    missing = batch.first % size  # rays of the first pixel that another process draws
    n_pixels = -(-(missing + n) // size)
    edges = torch.arange(n_pixels + 1, dtype=torch.int32, device=batch.rays.device) * size - missing
    return edges.clamp(0, n)
