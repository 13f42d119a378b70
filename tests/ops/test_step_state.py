"""Device counters: every backend logs, counts and adapts alike."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.ops import use_backend
from nerfturbo.ops.adam import COLUMNS, RayBudget, StepState, record_step

from .cases import Target, assert_close, require

BUDGET = RayBudget(samples=1000, marched=4000, max_rays=512)


def values(device: str, n_samples: int, n_marched: int) -> dict[str, torch.Tensor]:
    numbers = {"loss": 0.5, "mse": 0.25, "found_inf": 0.0, "loss_scale": 128.0}
    counts = {"n_rays": 90, "n_samples": n_samples, "n_marched": n_marched}
    result = {name: torch.tensor(value, device=device) for name, value in numbers.items()}
    return result | {name: torch.tensor(value, dtype=torch.int32, device=device) for name, value in counts.items()}


@pytest.mark.parametrize(
    ("n_samples", "n_marched", "wanted"),
    [(500, 500, 180), (2000, 2000, 64), (1000, 8000, 64), (800, 800, 112), (0, 0, 180), (1000, 4000, 90)],
)
def test_adapts_to_the_budget(target: Target, n_samples: int, n_marched: int, wanted: int):
    require(target)
    state = StepState.create(step=7, n_active=100, length=4, device=target.device)
    with use_backend(target.backend):  # type: ignore[arg-type]
        record_step(state, values(target.device, n_samples, n_marched), BUDGET)
    assert int(state.n_active) == wanted
    assert int(state.step) == 8
    assert state.totals.tolist() == [90, n_samples]
    row = dict(zip(COLUMNS, state.ring[3].tolist(), strict=True))
    assert row == {
        "loss": 0.5, "mse": 0.25, "n_rays": 90, "n_samples": n_samples, "n_marched": n_marched,
        "found_inf": 0.0, "loss_scale": 128.0, "n_active": 100,
    }  # fmt: skip


@pytest.mark.parametrize("count", [0, 1])
def test_no_sample_counts_as_one(target: Target, count: int):
    require(target)
    state = StepState.create(step=0, n_active=100, length=4, device=target.device)
    with use_backend(target.backend):  # type: ignore[arg-type]
        record_step(state, values(target.device, count, count), RayBudget(samples=1, marched=1, max_rays=512))
    assert int(state.n_active) == 90


@pytest.mark.parametrize("parts", [1, 3])
def test_rays_that_suddenly_get_longer_become_fewer(target: Target, parts: int):
    """A count never exceeds its capacity, so only the rays that found room tell that there were too many."""
    require(target)
    state = StepState.create(step=0, n_active=100, length=4, device=target.device)
    budget = RayBudget(1000 * parts, 4000 * parts, 512, parts)
    asked = []
    for per_ray in [10] * 6 + [40] * 3:
        active = int(state.n_active)
        kept = parts * min(active, 1000 // per_ray)
        found = values(target.device, per_ray * kept, parts * min(4 * per_ray * active, 4000))
        found["n_rays"] = torch.tensor(kept, dtype=torch.int32, device=target.device)
        with use_backend(target.backend):  # type: ignore[arg-type]
            record_step(state, found, budget)
        asked.append(int(state.n_active))
    assert asked[5] == 100 and asked[6] == 64  # 25 find room; fewer than 64 are never asked for


def test_many_steps_match_the_reference(target: Target):
    require(target)
    states = []
    for backend in (target.backend, "reference"):
        state = StepState.create(step=0, n_active=300, length=8, device=target.device)
        with use_backend(backend):  # type: ignore[arg-type]
            for i in range(12):
                record_step(state, values(target.device, 700 + 97 * i, 3000 + 311 * i), BUDGET)
        states.append(state)
    for name in ("step", "n_active", "totals", "ring"):
        assert_close(name, getattr(states[0], name), getattr(states[1], name))
    assert int(states[0].n_active) <= BUDGET.max_rays
