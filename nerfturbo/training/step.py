"""The training step, written once: pixels -> samples -> colours -> loss -> gradients -> update. The native trainer,
Lightning and the captured graph all run these functions; what they are made of is in `loss`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.batches import PixelSampler
from ..fields.field import offers
from ..ops.adam import RayBudget, StepState, record_step
from ..rendering.model import NerfModel
from .distributed import RayShare, Team, Wait
from .loss import Capacity, Stages, StepResult, compute_loss, draw_background, first_rays, ray_budget
from .optim import Optimizer


def gradient_scale(optimizer: Optimizer, accumulate: int = 1) -> Tensor | None:
    """() what arrives at the loss of one of `accumulate` batches in the backward; None for 1."""
    scale = optimizer.loss_scale
    if accumulate == 1:
        return scale
    return (optimizer.scale if scale is None else scale) / accumulate  # without scaling the scale is 1


def backward(loss: Tensor, scale: Tensor | None) -> None:
    """Scale and differentiate; a loss without gradient (no samples at all) adds none. A product instead of
    `backward(scale)`: to compare two shapes that imports all of sympy, for seconds."""
    if loss.requires_grad:
        (loss if scale is None else loss * scale.to(loss.dtype)).backward()


def set_rest(model: NerfModel, optimizer: Optimizer, rests: bool) -> None:
    """A sampler that rests learns nothing, and not even momentum moves its parameters. Cameras rest with it: to
    learn where they stand makes a step a third longer."""
    if offers(model.sampler, "learns"):
        model.sampler.rests = optimizer.rests = rests
        if model.photos is not None:
            model.photos.rests = rests


def mean_result(results: list[StepResult]) -> StepResult:
    """Several batches of one step as one: mean losses, sums of what was trained."""
    if len(results) == 1:
        return results[0]

    def stacked(name: str) -> Tensor:
        return torch.stack([getattr(result, name).detach().reshape(()) for result in results])

    means = {name: stacked(name).mean() for name in ("loss", "mse")}
    sums = {name: stacked(name).sum(dtype=torch.int32) for name in ("n_rays", "n_samples", "n_marched")}
    return StepResult(**means, **sums)


def start_totals(result: StepResult, team: Team) -> tuple[Tensor, Wait]:
    """Begin to sum what all ranks saw, beside the backward: (loss, mse, rays, samples, marched), losses times rays."""
    counts = [value.to(device=result.loss.device, dtype=torch.float64) for value in _counts(result)]
    own = torch.stack([result.loss.detach().double() * counts[0], result.mse.double() * counts[0], *counts])
    return own, team.start_sum(own)


def _counts(result: StepResult) -> tuple[Tensor, Tensor, Tensor]:
    return result.n_rays.reshape(()), result.n_samples.reshape(()), result.n_marched.reshape(())


def totals_of(sums: Tensor, result: StepResult) -> tuple[StepResult, Tensor]:
    """What the whole team saw, as the result of one step; and this rank's share of the rays, its gradients' weight."""
    n_rays = sums[2].clamp(min=1.0)
    losses, counts = (sums[:2] / n_rays).float(), sums[2:].to(torch.int32)
    weight = result.n_rays.to(sums.device).double().reshape(()) / n_rays
    return StepResult(losses[0], losses[1], counts[0], counts[1], counts[2]), weight


def step_gradients(
    model: NerfModel,
    pixels: PixelSampler,
    optimizer: Optimizer,
    state: StepState,
    budget: RayBudget,
    *,
    stages: Stages | None = None,
    team: Team | None = None,
    seen: Callable[[StepResult], None] | None = None,  # is told the result before the last backward
) -> StepResult:
    """One step up to the gradients, of this rank's rays alone; fixed shapes and no read-back, for a CUDA graph."""
    stages, team = stages or Stages(), team or Team()
    all_rays, parts = budget.max_rays * team.world, model.config.train.accumulate
    share = stages.split(0, team.rank, team.world, all_rays)
    n_active, step = state.n_active, state.step
    if share.count != budget.max_rays:  # an uneven split: every rank uses the same part of what it may draw
        n_active = (n_active.double() * (share.count / budget.max_rays)).to(torch.int32)
    capacity = Capacity(budget.marched, budget.samples, n_active)
    scale, results = gradient_scale(optimizer, parts), []
    for part in range(parts):
        own = RayShare(share.first + part * all_rays, share.count)
        batch = stages.draw(pixels, step, own)
        background = draw_background(model.config, step, own.count, pixels.device, own.first)
        options = {"capacity": capacity, "loss_scale": scale, "stages": stages}
        result = compute_loss(model, batch, background, step=step, first=own.first, **options)
        results.append(result)
        if part + 1 == parts:
            optimizer.held.on = not team.alone
            if seen is not None:
                seen(mean_result(results))
        backward(result.loss, scale)
    return mean_result(results)


def step_update(
    result: StepResult, optimizer: Optimizer, state: StepState, budget: RayBudget, *, parts: int = 1
) -> None:
    """The rest of it: the update, and the counters; `parts` batches (of all ranks) made the result."""
    optimizer.step()
    values = vars(result) | {"loss": result.loss.detach()}
    values |= {"found_inf": optimizer.found_inf, "loss_scale": optimizer.scale}
    record_step(state, values, RayBudget(parts * budget.samples, parts * budget.marched, budget.max_rays, parts))
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
    """One optimizer step per call, eagerly. Draws batch after batch and compares them with the pictures; keeps the
    number of rays such that the sample budget stays full. In a `team`, `n_rays`, the budget and the values of a record
    are those of all ranks together."""

    def __init__(
        self,
        model: NerfModel,
        pixels: PixelSampler,
        optimizer: Optimizer,
        *,
        stages: Stages | None = None,
        team: Team | None = None,
    ) -> None:
        self.model, self.pixels, self.optimizer = model, pixels, optimizer
        self.stages, self.team = stages or Stages(), team or Team()
        self.n_rays = first_rays(model) * self.team.world
        self._last = (0.0, 0.0)

    def loss(self, step: int, part: int = 0, scale: Tensor | None = None) -> StepResult:
        """Draw this rank's rays of a batch and compare them with the pictures; differentiable."""
        share = self.stages.split(step, self.team.rank, self.team.world, self.n_rays)
        share = RayShare(share.first + part * self.n_rays, share.count)
        batch = self.stages.draw(self.pixels, step, share)
        background = draw_background(self.model.config, step, len(batch.rays), self.pixels.device, share.first)
        options = {"loss_scale": scale, "first": share.first, "stages": self.stages}
        return compute_loss(self.model, batch, background, step=step, **options)

    def adapt(self, n_samples: int, n_marched: int) -> None:
        """Choose the next number of rays from what the last ones needed."""
        budget, world = ray_budget(self.model), self.team.world
        fill, march = world * budget.samples / max(n_samples, 1), world * budget.marched / max(n_marched, 1)
        self.n_rays = max(64, min(int(self.n_rays * min(fill, march, 2.0)), budget.max_rays * world))

    def set_learning_rate(self, value: float) -> None:
        self.optimizer.set_learning_rate(value)

    def set_progress(self, share: float) -> None:
        """Of the run, for what follows it: levels that are faded in."""
        self.model.set_progress(share)

    def set_pixels(self, pixels: PixelSampler) -> None:
        """Train on other images from now on."""
        self.pixels = pixels

    def restart(self, n_rays: int) -> None:
        """Begin again from a checkpoint, with so many rays."""
        self.n_rays = n_rays

    def advance(self, step: int, limit: int) -> StepRecord:
        """Run at least one step and at most `limit`, the first of them numbered `step`."""
        self.refresh(step)
        return self.record(step, self._accumulate(step), *self.update(step), self.model.config.train.accumulate)

    def refresh(self, step: int) -> None:
        """Before a step: let the grid see what was learned; let a sampler rest."""
        if offers(self.model.sampler, "learns"):
            set_rest(self.model, self.optimizer, not self.model.sampler.learns(step))
        grid = self.model.grid.config
        if grid.enabled and step % grid.update_every == 0:
            self.stages.update_grid(self.model, step, team=self.team)

    def record(self, step: int, result: StepResult, skipped: Tensor, scale: Tensor, parts: int) -> StepRecord:
        """After a step made of `parts` batches: choose the number of rays of the next, and say what was done. A GPU is
        waited for once: all values are read together."""
        values = (result.loss.detach(), result.mse, skipped, scale, *_counts(result))
        like = self.optimizer.scale.double()
        loss, mse, skips, scaled, *counts = torch.stack([value.to(like) for value in values]).tolist()
        n_rays, n_samples, n_marched = map(int, counts)
        self.adapt(n_samples // parts, n_marched // parts)
        self._last = loss, mse
        seen = {"n_rays": n_rays, "n_samples": n_samples, "n_marched": n_marched}
        seen |= {"total_rays": n_rays, "total_samples": n_samples, "skipped": int(skips)}
        return StepRecord(step + 1, loss, mse, **seen, loss_scale=scaled)

    def newest(self) -> tuple[float, float]:
        """Loss and squared error of the last step."""
        return self._last

    def update(self, step: int) -> tuple[Tensor, Tensor]:
        """Change the parameters by the gradients; whether that was skipped, and the loss scale that they had."""
        self.optimizer.step()
        skipped, scale = self.optimizer.found_inf.clone(), self.optimizer.scale.clone()
        self.optimizer.finish_step()
        self.average(step)
        return skipped, scale

    def average(self, step: int) -> None:
        """Let the running mean of the weights see them, where it is due."""
        if self.optimizer.averages_due(step + 1):
            self.optimizer.update_averages(self.optimizer.step_count)

    def differentiate(self, loss: Tensor, scale: Tensor | None) -> None:
        """Add the gradients of one batch; a profile puts its clock around it."""
        backward(loss, scale)

    def _accumulate(self, step: int) -> StepResult:
        """The gradients of one step, of one batch or the mean of several; what all ranks saw."""
        parts, team = self.model.config.train.accumulate, self.team
        scale, results = gradient_scale(self.optimizer, parts), []
        for part in range(parts):
            results.append(self.loss(step, part, scale))
            if part + 1 < parts:
                self.differentiate(results[-1].loss, scale)
        result = mean_result(results)
        if team.alone:
            self.differentiate(results[-1].loss, scale)
            return result
        sums, wait = start_totals(result, team)  # travels while the gradients are computed
        self.optimizer.held.on = True
        self.differentiate(results[-1].loss, scale)
        wait()
        return self.share(sums, result)

    def share(self, sums: Tensor, result: StepResult) -> StepResult:
        """Take the mean of all ranks' gradients; what all of them saw, from their `start_totals`."""
        totals, weight = totals_of(sums, result)
        self.team.reduce_gradients(self.optimizer.exchanged(), weight, self.optimizer.found_inf)
        return totals

    def finish(self) -> None:
        """Nothing is queued or recorded, and numba's kernels compile when they first run (`nerfturbo warmup`)."""

    compile = prepare = forget = finish
