"""The training step, written once: pixels -> samples -> colours -> loss -> gradients -> update.

The native trainer, Lightning and the captured graph all run these functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import Config
from ..data.batches import PixelBatch, PixelSampler
from ..ops.random import Stream, random_uniform
from ..rendering.losses import color_loss
from ..rendering.model import NerfModel
from ..rendering.render import field_functions, ray_marching, volume_rendering


@dataclass(frozen=True)
class StepResult:
    """What one step saw, on the device: reading a value waits for it."""

    loss: Tensor  # () differentiable
    mse: Tensor  # () mean squared colour error
    n_rays: Tensor  # () int32, rays that were trained
    n_samples: Tensor  # () int32, samples that were trained
    n_marched: Tensor  # () int32, samples in occupied cells before the visibility pass


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


def compute_loss(
    model: NerfModel, batch: PixelBatch, background: Tensor, *, step: int | Tensor, capacity: int | None = None
) -> StepResult:
    """March, render and compare one batch. With `capacity` all shapes are fixed and nothing is read back."""
    config, rays, settings = model.config, batch.rays, model.settings
    sigma_fn, rgb_sigma_fn = field_functions(model.field, rays)
    marched: list[Tensor] = []

    def counting_sigma_fn(t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor) -> Tensor:
        marched.append(torch.tensor(t_starts.shape[0], dtype=torch.int32))
        return sigma_fn(t_starts, t_ends, ray_indices)

    samples = ray_marching(
        rays,
        model.grid,
        sigma_fn=counting_sigma_fn if config.render.prune else None,
        near_plane=settings.near_plane,
        far_plane=settings.far_plane,
        cone_angle=settings.cone_angle,
        early_stop_eps=settings.early_stop_eps,
        alpha_thre=settings.alpha_thre,
        stratified=True,
        seed=config.train.seed,
        step=step,
        capacity=capacity,
    )
    out = volume_rendering(rgb_sigma_fn, samples, background=background)
    target = target_over(batch, background)
    loss = color_loss(out.rgb, target, kind=config.train.loss, n_rays_kept=samples.n_rays_kept)
    mse = color_loss(out.rgb.detach(), target, kind="mse", n_rays_kept=samples.n_rays_kept)
    n_rays = torch.tensor(len(rays), dtype=torch.int32) if samples.n_rays_kept is None else samples.n_rays_kept
    return StepResult(loss, mse, n_rays, samples.n_samples, marched[0] if marched else samples.n_samples)


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


class TrainingStep:
    """One optimizer step per call, eagerly. Keeps the number of rays such that the sample budget stays full."""

    MARCHED_PER_TRAINED = 8  # the visibility pass may look at this many times the budget

    def __init__(self, model: NerfModel, sampler: PixelSampler, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.sampler, self.optimizer = model, sampler, optimizer
        self.n_rays = model.config.train.initial_rays

    def advance(self, step: int, limit: int) -> StepRecord:
        """Run at least one step and at most `limit`, the first of them numbered `step`."""
        self.update_grid(step)
        result = self.forward_backward(step)
        n_rays, n_samples, n_marched = int(result.n_rays), int(result.n_samples), int(result.n_marched)
        self.adapt(n_samples, n_marched)
        return StepRecord(
            step + 1, float(result.loss.detach()), float(result.mse), n_rays, n_samples, n_marched, n_rays, n_samples
        )

    def forward_backward(self, step: int) -> StepResult:
        config = self.model.config
        batch = self.sampler.draw(step, self.n_rays)
        background = draw_background(config, step, self.n_rays, self.sampler.device)
        result = compute_loss(self.model, batch, background, step=step)
        self.optimizer.zero_grad(set_to_none=True)
        if result.loss.requires_grad:
            result.loss.backward()
            self.optimizer.step()
        return result

    def adapt(self, n_samples: int, n_marched: int) -> None:
        """Choose the next number of rays from what the last ones needed."""
        train = self.model.config.train
        fill = train.batch_samples / max(n_samples, 1)
        march = train.batch_samples * self.MARCHED_PER_TRAINED / max(n_marched, 1)
        wanted = int(self.n_rays * min(fill, march, 2.0))
        self.n_rays = max(64, min(wanted, train.max_rays))

    def update_grid(self, step: int) -> None:
        grid = self.model.grid
        if step % grid.config.update_every == 0:
            grid.update(step, self.model.field.density)
