"""Adam in one pass over memory, and the step's counters in one launch of one program. One program = BLOCK numbers of a
flat buffer, in rows of four so that loads and stores are 16 bytes wide. With `skip_untouched`, rows of four without
gradient read and write nothing else. The non-finite flag is read before the first write, so a skipped step is skipped
everywhere. fp32 master and arithmetic; moments, gradient and copy of any float type."""

import math

import torch
import triton.language as tl
from torch import Tensor

from .._triton import cdiv, check_kernel_float, launchable
from . import COLUMNS, MAX_GROWTH, MIN_RAYS, RayBudget, StepState

BLOCK, WARPS = 1024, 8
CHECK_BLOCK, CHECK_PROGRAMS = 4096, 512


@launchable(do_not_specialize=["n"])
def _adam_kernel(
    p_params, p_half, p_first, p_second, p_grad, p_step, p_lr, p_grad_scale, p_found_inf, n,
    log2_beta1, log2_beta2, beta1, beta2, rest1, rest2, eps, weight_decay, starts, decays,
    DECAY: tl.constexpr, SKIP: tl.constexpr, ROWS_OF_4: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """DECAY: 0 none, 1 into the gradient, 2 decoupled; of PARTS parts, each from its `starts` on. rest = 1 - beta."""
    i_row = tl.program_id(0) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    i = i_row.to(tl.int64)[:, None] * 4 + tl.arange(0, 4)[None, :]
    at = i
    if ROWS_OF_4:
        at = i_row.to(tl.int64)[:, None] * 4  # one mask per row of four keeps loads 16 bytes wide
    m = at < n
    skipped = False
    if p_found_inf is not None:
        skipped = tl.load(p_found_inf) != 0.0
    if skipped:
        tl.store(p_grad + i, tl.zeros([BLOCK // 4, 4], p_grad.dtype.element_ty), mask=m)
    else:
        time = (tl.load(p_step) + 1).to(tl.float32)
        lr = tl.load(p_lr)
        correct1 = 1.0 - tl.exp2(time * log2_beta1)
        correct2 = 1.0 - tl.exp2(time * log2_beta2)
        raw = tl.load(p_grad + i, mask=m, other=0.0).to(tl.float32)
        if SKIP:
            m = m & (tl.max((raw != 0.0).to(tl.int32), 1) != 0)[:, None]
        if p_grad.dtype.element_ty == tl.float16:  # sums that overflowed; false for NaN
            raw = tl.where(raw == raw, tl.minimum(tl.maximum(raw, -65504.0), 65504.0), 0.0)
        params = tl.load(p_params + i, mask=m, other=0.0)
        first = tl.load(p_first + i, mask=m, other=0.0).to(tl.float32)
        second = tl.load(p_second + i, mask=m, other=0.0).to(tl.float32)
        grad = raw
        if p_grad_scale is not None:
            grad = raw * (1.0 / tl.load(p_grad_scale))
        decay = tl.full(at.shape, 0.0, tl.float32) + weight_decay
        for part in tl.static_range(PARTS):
            decay = tl.where(at >= starts[part], decays[part], decay)
        if DECAY == 1:
            grad += decay * params
        new_first = beta1 * first + rest1 * grad
        new_second = beta2 * second + rest2 * grad * grad
        change = lr * (new_first / correct1) / (tl.sqrt(new_second / correct2) + eps)
        if DECAY == 2:
            change += lr * decay * params
        new_params = params - change
        if SKIP:
            touched = raw != 0.0
            new_first = tl.where(touched, new_first, first)
            new_second = tl.where(touched, new_second, second)
            new_params = tl.where(touched, new_params, params)
        tl.store(p_params + i, new_params, mask=m)
        tl.store(p_first + i, new_first.to(p_first.dtype.element_ty), mask=m)
        tl.store(p_second + i, new_second.to(p_second.dtype.element_ty), mask=m)
        if p_half is not None:
            tl.store(p_half + i, new_params.to(p_half.dtype.element_ty), mask=m)
        tl.store(p_grad + i, tl.zeros([BLOCK // 4, 4], p_grad.dtype.element_ty), mask=m)


@launchable(do_not_specialize=["n"])
def _norm_kernel(p_grad, p_sums, n, BLOCK: tl.constexpr):
    """Sum of squares of every num_programs-th block: one number per program."""
    b_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        grad = tl.load(p_grad + i, mask=i < n, other=0.0).to(tl.float32)
        b_sum += grad * grad
    tl.store(p_sums + tl.program_id(0), tl.sum(b_sum, 0))


@launchable
def _norm_finish_kernel(p_sums, p_norm, p_found_inf, n_sums, BLOCK: tl.constexpr):
    b_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_sums, BLOCK):
        i = start + tl.arange(0, BLOCK)
        b_sum += tl.load(p_sums + i, mask=i < n_sums, other=0.0)
    norm = tl.sqrt(tl.sum(b_sum, 0))
    tl.store(p_norm, norm)
    if (norm < float("inf")) == 0:  # NaN is not below infinity either
        tl.store(p_found_inf, 1.0)


@launchable
def _finish_kernel(p_step, p_found_inf, p_scale, p_good, p_skipped, growth, backoff, interval, lowest, highest):
    bad = tl.load(p_found_inf) != 0.0
    tl.store(p_step, tl.load(p_step) + tl.where(bad, 0, 1))
    if p_skipped is not None:
        tl.store(p_skipped, tl.load(p_skipped) + tl.where(bad, 1, 0))
    if p_scale is not None:
        good = tl.where(bad, 0, tl.load(p_good) + 1)
        grow = good >= interval
        scale = tl.load(p_scale) * tl.where(bad, backoff, tl.where(grow, growth, 1.0))
        tl.store(p_scale, tl.minimum(tl.maximum(scale, lowest), highest))
        tl.store(p_good, tl.where(grow, 0, good))
    tl.store(p_found_inf, 0.0)


def adam_update(params, grad, state, lr, *, rule, half, grad_scale, found_inf) -> None:
    check_kernel_float(grad=grad, first=state.first, second=state.second, half=half)
    n = params.numel()
    if n == 0:
        return
    decay = 0 if not (rule.weight_decay or rule.decays) else 2 if rule.decoupled else 1
    starts = tuple(first for first, _, _ in rule.decays)
    _adam_kernel[(cdiv(n, BLOCK),)](
        p_params=params, p_half=half, p_first=state.first, p_second=state.second, p_grad=grad, p_step=state.step,
        p_lr=lr, p_grad_scale=grad_scale, p_found_inf=found_inf, n=n,
        log2_beta1=_log2(rule.betas[0]), log2_beta2=_log2(rule.betas[1]), beta1=rule.betas[0], beta2=rule.betas[1],
        rest1=1.0 - rule.betas[0], rest2=1.0 - rule.betas[1], eps=rule.eps, weight_decay=rule.weight_decay,
        starts=starts or None, decays=tuple(float(value) for _, _, value in rule.decays) or None, DECAY=decay,
        SKIP=rule.skip_untouched, ROWS_OF_4=not any(number % 4 for number in (n, *starts)), PARTS=len(starts),
        BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def _log2(beta: float) -> float:
    return math.log2(beta) if beta > 0 else -1e30


def check_gradients(grads: list[Tensor], found_inf: Tensor) -> Tensor:
    check_kernel_float(**{f"grads[{index}]": grad for index, grad in enumerate(grads)})
    flat = [grad.contiguous() for grad in grads if grad.numel()]
    counts = [min(cdiv(grad.numel(), CHECK_BLOCK), CHECK_PROGRAMS) for grad in flat]
    sums = torch.empty(sum(counts), dtype=torch.float32, device=found_inf.device)
    norm = torch.empty((), dtype=torch.float32, device=found_inf.device)
    first = 0
    for grad, count in zip(flat, counts, strict=True):
        _norm_kernel[(count,)](p_grad=grad, p_sums=sums[first:], n=grad.numel(), BLOCK=CHECK_BLOCK, num_warps=8)
        first += count
    _norm_finish_kernel[(1,)](p_sums=sums, p_norm=norm, p_found_inf=found_inf, n_sums=first, BLOCK=512, num_warps=4)
    return norm


def finish_step(step, found_inf, *, scale, good_steps, skipped, rule) -> None:
    _finish_kernel[(1,)](
        p_step=step, p_found_inf=found_inf, p_scale=scale, p_good=good_steps, p_skipped=skipped,
        growth=rule.growth, backoff=rule.backoff, interval=rule.growth_interval, lowest=rule.lowest,
        highest=rule.highest, num_warps=1,
    )  # fmt: skip


@launchable(do_not_specialize=["samples", "marched", "max_rays", "parts", "length"])
def _record_kernel(
    p_step, p_active, p_totals, p_ring,
    p_loss, p_mse, p_rays, p_samples, p_marched, p_found_inf, p_scale,
    samples, marched, max_rays, parts, length,
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
    kept = tl.minimum(active.to(tl.float32), tl.div_rn(n_rays.to(tl.float32), parts.to(tl.float32)))
    wanted = tl.floor(kept * growth)
    wanted = tl.minimum(tl.maximum(wanted, MIN_RAYS), max_rays.to(tl.float32))
    tl.store(p_active, wanted.to(tl.int32))
    tl.store(p_step, step + 1)


def record_step(state: StepState, values: dict[str, Tensor], budget: RayBudget) -> None:
    counters = (state.step, state.n_active, state.totals, state.ring)
    sizes = (budget.samples, budget.marched, budget.max_rays, budget.parts, state.ring.shape[0])
    constants = {"COLUMNS": len(COLUMNS), "MIN_RAYS": MIN_RAYS, "MAX_GROWTH": MAX_GROWTH}
    _record_kernel[(1,)](*counters, *(values[name] for name in COLUMNS[:-1]), *sizes, **constants, num_warps=1)
