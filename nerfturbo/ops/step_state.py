"""The counters of a training run that live on the device, advanced once a step without reading anything back.

A captured step cannot ask the host how many rays to draw next or where to log: it keeps both here. `record_step` writes
one row of the ring and chooses the next number of rays so that the sample budget stays full.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._checks import check_device
from ._dispatch import implementation

COLUMNS = ("loss", "mse", "n_rays", "n_samples", "n_marched", "found_inf", "loss_scale", "n_active")
MIN_RAYS = 64
MAX_GROWTH = 2.0  # the number of rays at most doubles from one step to the next


@dataclass(frozen=True)
class StepState:
    """Counters on the device. `ring` row step % length holds what COLUMNS names, of that step."""

    step: Tensor  # () int64, steps done
    n_active: Tensor  # () int32, rays the next step draws
    totals: Tensor  # (2,) int64, rays and samples trained so far
    ring: Tensor  # (length, len(COLUMNS)) fp32

    @classmethod
    def create(cls, *, step: int, n_active: int, length: int, device: torch.device | str) -> StepState:
        return cls(
            torch.tensor(step, dtype=torch.int64, device=device),
            torch.tensor(n_active, dtype=torch.int32, device=device),
            torch.zeros(2, dtype=torch.int64, device=device),
            torch.zeros(length, len(COLUMNS), device=device),
        )


@dataclass(frozen=True)
class RayBudget:
    """What a step may use: trained samples, samples marched before pruning, rays."""

    samples: int
    marched: int
    max_rays: int


def record_step(state: StepState, values: dict[str, Tensor], budget: RayBudget) -> None:
    """In place: log `values`, count, adapt n_active, advance the step.

    `values` holds () tensors: loss, mse, found_inf and loss_scale in fp32, n_rays, n_samples and n_marched in int32.
    The next number of rays is n_active * min(samples / n_samples, marched / n_marched, 2), between 64 and max_rays.
    """
    check_device(step=state.step, ring=state.ring, **values)
    implementation("step_state", "record_step", state.ring)(state, values, budget)
