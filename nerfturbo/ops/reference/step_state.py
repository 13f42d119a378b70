"""Counters by scalar tensor arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from ..step_state import COLUMNS, MAX_GROWTH, MIN_RAYS, RayBudget, StepState


@torch.no_grad()
def record_step(state: StepState, values: dict[str, Tensor], budget: RayBudget) -> None:
    row = torch.stack([*(values[name].reshape(()).float() for name in COLUMNS[:-1]), state.n_active.float()])
    state.ring[(state.step % state.ring.shape[0]).reshape(1)] = row
    state.totals.add_(torch.stack([values["n_rays"].reshape(()), values["n_samples"].reshape(())]))
    fill = budget.samples / values["n_samples"].reshape(()).float().clamp(min=1.0)
    march = budget.marched / values["n_marched"].reshape(()).float().clamp(min=1.0)
    growth = torch.minimum(fill, march).clamp(max=MAX_GROWTH)
    state.n_active.copy_((state.n_active.float() * growth).floor().clamp(MIN_RAYS, budget.max_rays))
    state.step.add_(1)
