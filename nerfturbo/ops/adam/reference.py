"""Adam and the step's counters in plain torch; a skipped step is a selection, not a branch: nothing is read back."""

import torch
from torch import Tensor

from . import COLUMNS, MAX_GROWTH, MIN_RAYS, RayBudget, StepState


def adam_update(params, grad, state, lr, *, rule, half, grad_scale, found_inf) -> None:
    beta1, beta2 = rule.betas
    time = (state.step + 1).to(torch.float32)
    wide = params.dtype  # fp32; float64 for checking
    decay: float | Tensor = rule.weight_decay
    if rule.decays:
        decay = torch.cat([params.new_full((last - first,), value) for first, last, value in rule.decays])
        decay = decay.view(params.shape)
    if grad.dtype == torch.float16:
        grad.nan_to_num_(0.0)  # sums that overflowed
    g = grad.to(wide) if grad_scale is None else grad.to(wide) / grad_scale
    keep = grad == 0 if rule.skip_untouched else torch.zeros_like(params, dtype=torch.bool)
    if found_inf is not None:
        keep = keep | (found_inf != 0)
    if not rule.decoupled:
        g = g + decay * params
    first = beta1 * state.first.to(wide) + (1.0 - beta1) * g
    second = beta2 * state.second.to(wide) + (1.0 - beta2) * g * g
    change = lr * (first / (1.0 - beta1**time)) / ((second / (1.0 - beta2**time)).sqrt() + rule.eps)
    if rule.decoupled:
        change = change + lr * decay * params
    state.first.copy_(torch.where(keep, state.first.to(wide), first))
    state.second.copy_(torch.where(keep, state.second.to(wide), second))
    params.copy_(torch.where(keep, params, params - change))
    if half is not None:
        half.copy_(params)
    grad.zero_()


def check_gradients(grads: list[Tensor], found_inf: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad.float()) for grad in grads]))
    found_inf.copy_(torch.where(torch.isfinite(norm), found_inf, torch.ones_like(found_inf)))
    return norm


def finish_step(step, found_inf, *, scale, good_steps, skipped, rule) -> None:
    bad = found_inf != 0
    step.add_((~bad).to(step.dtype).view(step.shape))
    if skipped is not None:
        skipped.add_(bad.to(skipped.dtype).view(skipped.shape))
    if scale is not None and good_steps is not None:
        good = torch.where(bad, torch.zeros_like(good_steps), good_steps + 1)
        grow = good >= rule.growth_interval
        factor = torch.where(bad, rule.backoff, torch.where(grow, rule.growth, 1.0))
        scale.copy_((scale * factor).clamp(rule.lowest, rule.highest))
        good_steps.copy_(torch.where(grow, torch.zeros_like(good), good))
    found_inf.zero_()


@torch.no_grad()
def record_step(state: StepState, values: dict[str, Tensor], budget: RayBudget) -> None:
    row = torch.stack([*(values[name].reshape(()).float() for name in COLUMNS[:-1]), state.n_active.float()])
    state.ring[(state.step % state.ring.shape[0]).reshape(1)] = row
    state.totals.add_(torch.stack([values["n_rays"].reshape(()), values["n_samples"].reshape(())]))
    fill = budget.samples / values["n_samples"].reshape(()).float().clamp(min=1.0)
    march = budget.marched / values["n_marched"].reshape(()).float().clamp(min=1.0)
    growth = torch.minimum(fill, march).clamp(max=MAX_GROWTH)
    kept = torch.minimum(state.n_active.float(), values["n_rays"].reshape(()).float() / budget.parts)
    state.n_active.copy_((kept * growth).floor().clamp(MIN_RAYS, budget.max_rays))
    state.step.add_(1)
