"""The training step, written once: pixels -> samples -> colours -> loss -> gradients -> update.

The native trainer, Lightning and the captured graph all run these functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import Config
from ..data.batches import PixelBatch, PixelSampler
from ..fields.field import RayField
from ..ops.composite import visibility
from ..ops.composite_loss import LossRule, composite_loss
from ..ops.packed import compact
from ..ops.random import Stream, random_uniform
from ..ops.step_state import RayBudget, StepState, record_step
from ..rendering.losses import color_loss
from ..rendering.model import NerfModel
from ..rendering.render import field_functions, ray_marching, volume_rendering
from ..types import PackedSamples, Rays
from .optim import Optimizer


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


def target_over(batch: PixelBatch, background: Tensor) -> Tensor:
    """(n_rays, 3): what the picture shows with the background behind its transparent part."""
    if batch.rgba.shape[1] == 3:
        return batch.rgba
    alpha = batch.rgba[:, 3:]
    return batch.rgba[:, :3] * alpha + background * (1.0 - alpha)


def place_samples(
    model: NerfModel, rays: Rays, *, step: int | Tensor, capacity: Capacity | None = None
) -> tuple[PackedSamples, Tensor]:
    """The samples to train on, and how many were marched to find them."""
    config, settings = model.config, model.settings
    marched = ray_marching(
        rays,
        model.grid,
        near_plane=settings.near_plane,
        far_plane=settings.far_plane,
        cone_angle=settings.cone_angle,
        stratified=True,
        seed=config.train.seed,
        step=step,
        capacity=None if capacity is None else (capacity.marched if config.render.prune else capacity.trained),
        n_active=None if capacity is None else capacity.n_active,
    )
    if not config.render.prune:
        return marched, marched.n_samples
    with torch.no_grad():
        threshold = model.grid.alpha_threshold(settings.alpha_thre)
        if isinstance(model.field, RayField):
            keep = model.field.sample_visibility(
                rays, marched, early_stop_eps=settings.early_stop_eps, alpha_thre=threshold
            )
        else:
            sigma_fn, _ = field_functions(model.field, rays)
            density = sigma_fn(marched.t_starts, marched.t_ends, marched.ray_indices)
            keep = visibility(density, marched, early_stop_eps=settings.early_stop_eps, alpha_thre=threshold)
        kept = compact(marched, keep, capacity=None if capacity is None else capacity.trained)
    return kept, marched.n_samples


def compute_loss(
    model: NerfModel,
    batch: PixelBatch,
    background: Tensor,
    *,
    step: int | Tensor,
    capacity: Capacity | None = None,
    loss_scale: Tensor | None = None,
) -> StepResult:
    """March, render and compare one batch. With `capacity` all shapes are fixed and nothing is read back."""
    samples, n_marched = place_samples(model, batch.rays, step=step, capacity=capacity)
    kept = samples.n_rays_kept
    if capacity is not None and kept is not None:
        kept = torch.minimum(kept, capacity.n_active)  # rays past the active ones hold nothing and count for nothing
        samples = PackedSamples(samples.t_starts, samples.t_ends, samples.ray_indices, samples.offsets, kept)
    kind = model.config.train.loss
    if isinstance(model.field, RayField):
        raw = model.field.sample_logits(batch.rays, samples)
        out = composite_loss(raw, samples, background, batch.rgba, rule=LossRule(kind), gradient_scale=loss_scale)
        loss, mse = out.loss, out.mse
    else:
        _, rgb_sigma_fn = field_functions(model.field, batch.rays)
        rgb = volume_rendering(rgb_sigma_fn, samples, background=background).rgb
        target = target_over(batch, background)
        loss = color_loss(rgb, target, kind=kind, n_rays_kept=kept)
        mse = color_loss(rgb.detach(), target, kind="mse", n_rays_kept=kept)
    n_rays = torch.tensor(len(batch.rays), dtype=torch.int32) if kept is None else kept
    return StepResult(loss, mse.detach(), n_rays, samples.n_samples, n_marched)


def gradient_scale(optimizer: Optimizer, accumulate: int = 1) -> Tensor | None:
    """() what arrives at the loss of one of `accumulate` batches in the backward; None for 1."""
    scale = optimizer.loss_scale
    if accumulate == 1:
        return scale
    return (optimizer.scale if scale is None else scale) / accumulate  # without scaling the scale is 1


def backward(loss: Tensor, scale: Tensor | None) -> None:
    """Scale and differentiate; a loss without gradient (no samples at all) adds none."""
    if loss.requires_grad:
        loss.backward(scale if scale is None else scale.to(loss.dtype))


def backward_and_update(loss: Tensor, optimizer: Optimizer) -> None:
    """Scale, differentiate, update. A loss without gradient (no samples at all) still closes the step."""
    backward(loss, gradient_scale(optimizer))
    optimizer.step()


def mean_result(results: list[StepResult]) -> StepResult:
    """Several batches of one step as one: mean losses, sums of what was trained."""
    if len(results) == 1:
        return results[0]

    def stacked(name: str) -> Tensor:
        return torch.stack([getattr(result, name).detach().reshape(()) for result in results])

    means = {name: stacked(name).mean() for name in ("loss", "mse")}
    sums = {name: stacked(name).sum(dtype=torch.int32) for name in ("n_rays", "n_samples", "n_marched")}
    return StepResult(**means, **sums)


def run_step(
    model: NerfModel, sampler: PixelSampler, optimizer: Optimizer, state: StepState, budget: RayBudget
) -> None:
    """One whole step with fixed shapes and no read-back: what a CUDA graph records."""
    capacity = Capacity(budget.marched, budget.samples, state.n_active)
    parts = model.config.train.accumulate
    scale, results = gradient_scale(optimizer, parts), []
    for first in range(0, parts * budget.max_rays, budget.max_rays):
        batch = sampler.draw(state.step, budget.max_rays, first=first)
        background = draw_background(model.config, state.step, budget.max_rays, sampler.device, first)
        result = compute_loss(model, batch, background, step=state.step, capacity=capacity, loss_scale=scale)
        backward(result.loss, scale)
        results.append(result)
    result = mean_result(results)
    optimizer.step()
    values = {
        "loss": result.loss.detach(),
        "mse": result.mse,
        "n_rays": result.n_rays,
        "n_samples": result.n_samples,
        "n_marched": result.n_marched,
        "found_inf": optimizer.found_inf,
        "loss_scale": optimizer.scale,
    }
    record_step(state, values, RayBudget(parts * budget.samples, parts * budget.marched, budget.max_rays))
    optimizer.finish_step()


@dataclass(frozen=True)
class StepRecord:
    """What the host knows after one or more steps: the last step's values, and sums over all of them."""

    step: int  # steps done since the start of training
    loss: float
    mse: float
    n_rays: int
    n_samples: int
    n_marched: int
    total_rays: int
    total_samples: int
    skipped: int = 0  # of these steps, those without an update because a gradient was not finite
    loss_scale: float = 1.0


class TrainingStep:
    """One optimizer step per call, eagerly. Keeps the number of rays such that the sample budget stays full."""

    def __init__(self, model: NerfModel, sampler: PixelSampler, optimizer: Optimizer) -> None:
        self.model, self.sampler, self.optimizer = model, sampler, optimizer
        self.n_rays = model.config.train.initial_rays

    def set_learning_rate(self, value: float) -> None:
        self.optimizer.set_learning_rate(value)

    def advance(self, step: int, limit: int) -> StepRecord:
        """Run at least one step and at most `limit`, the first of them numbered `step`."""
        grid = self.model.grid
        if grid.config.enabled and step % grid.config.update_every == 0:
            grid.update(step, self.model.field.density)
        result = self._accumulate(step)
        self.optimizer.step()
        skipped, scale = int(self.optimizer.found_inf), float(self.optimizer.scale)
        self.optimizer.finish_step()
        n_rays, n_samples, n_marched = int(result.n_rays), int(result.n_samples), int(result.n_marched)
        parts = self.model.config.train.accumulate
        self.adapt(n_samples // parts, n_marched // parts)
        return StepRecord(
            step=step + 1,
            loss=float(result.loss.detach()),
            mse=float(result.mse),
            n_rays=n_rays,
            n_samples=n_samples,
            n_marched=n_marched,
            total_rays=n_rays,
            total_samples=n_samples,
            skipped=skipped,
            loss_scale=scale,
        )

    def _accumulate(self, step: int) -> StepResult:
        """The gradients of one step, of one batch or the mean of several."""
        parts = self.model.config.train.accumulate
        scale, results = gradient_scale(self.optimizer, parts), []
        for first in range(0, parts * self.n_rays, self.n_rays):
            batch = self.sampler.draw(step, self.n_rays, first=first)
            background = draw_background(self.model.config, step, self.n_rays, self.sampler.device, first)
            result = compute_loss(self.model, batch, background, step=step, loss_scale=scale)
            backward(result.loss, scale)
            results.append(result)
        return mean_result(results)

    def adapt(self, n_samples: int, n_marched: int) -> None:
        """Choose the next number of rays from what the last ones needed."""
        train = self.model.config.train
        fill = train.batch_samples / max(n_samples, 1)
        march = train.batch_samples * train.marched_per_trained / max(n_marched, 1)
        wanted = int(self.n_rays * min(fill, march, 2.0))
        self.n_rays = max(64, min(wanted, train.max_rays))

    def prepare(self) -> None:
        """Nothing to record: kernels compile when they first run."""

    def finish(self) -> None:
        """Nothing is ever queued here."""
