"""The step's counters in one launch of one program. No atomics; everything is fp32 or integer."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from ..step_state import COLUMNS, MAX_GROWTH, MIN_RAYS, RayBudget, StepState
from ._common import CompileCase
from ._launch import launchable


@launchable(do_not_specialize=["samples", "marched", "max_rays", "length"])
def _record_kernel(
    p_step, p_active, p_totals, p_ring,
    p_loss, p_mse, p_rays, p_samples, p_marched, p_found_inf, p_scale,
    samples, marched, max_rays, length,
    COLUMNS: tl.constexpr, MIN_RAYS: tl.constexpr, MAX_GROWTH: tl.constexpr,
):  # fmt: skip
    step = tl.load(p_step)
    active = tl.load(p_active)
    n_rays, n_samples, n_marched = tl.load(p_rays), tl.load(p_samples), tl.load(p_marched)
    p_row = p_ring + (step % length) * COLUMNS
    tl.store(p_row, tl.load(p_loss))
    tl.store(p_row + 1, tl.load(p_mse))
    tl.store(p_row + 2, n_rays.to(tl.float32))
    tl.store(p_row + 3, n_samples.to(tl.float32))
    tl.store(p_row + 4, n_marched.to(tl.float32))
    tl.store(p_row + 5, tl.load(p_found_inf))
    tl.store(p_row + 6, tl.load(p_scale))
    tl.store(p_row + 7, active.to(tl.float32))
    tl.store(p_totals, tl.load(p_totals) + n_rays)
    tl.store(p_totals + 1, tl.load(p_totals + 1) + n_samples)
    fill = samples.to(tl.float32) / tl.maximum(n_samples.to(tl.float32), 1.0)
    march = marched.to(tl.float32) / tl.maximum(n_marched.to(tl.float32), 1.0)
    growth = tl.minimum(tl.minimum(fill, march), MAX_GROWTH)
    wanted = tl.floor(active.to(tl.float32) * growth)
    wanted = tl.minimum(tl.maximum(wanted, MIN_RAYS), max_rays.to(tl.float32))
    tl.store(p_active, wanted.to(tl.int32))
    tl.store(p_step, step + 1)


def record_step(state: StepState, values: dict[str, Tensor], budget: RayBudget) -> None:
    _record_kernel[(1,)](
        state.step,
        state.n_active,
        state.totals,
        state.ring,
        *(values[name] for name in COLUMNS[:-1]),
        budget.samples,
        budget.marched,
        budget.max_rays,
        state.ring.shape[0],
        COLUMNS=len(COLUMNS),
        MIN_RAYS=MIN_RAYS,
        MAX_GROWTH=MAX_GROWTH,
        num_warps=1,
    )


COMPILE_CASES = [
    CompileCase(
        _record_kernel,
        {
            "p_step": "*i64",
            "p_active": "*i32",
            "p_totals": "*i64",
            "p_ring": "*fp32",
            "p_loss": "*fp32",
            "p_mse": "*fp32",
            "p_rays": "*i32",
            "p_samples": "*i32",
            "p_marched": "*i32",
            "p_found_inf": "*fp32",
            "p_scale": "*fp32",
            **dict.fromkeys(("samples", "marched", "max_rays", "length"), "i32"),
        },
        {"COLUMNS": len(COLUMNS), "MIN_RAYS": MIN_RAYS, "MAX_GROWTH": MAX_GROWTH},
    )
]
