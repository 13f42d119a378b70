"""Adam on a CPU: one parallel pass over memory instead of torch's dozen, for fp32; the rest takes the reference."""

from __future__ import annotations

import math

import numba
import torch
from torch import Tensor

from ..adam import AdamRule, AdamState
from ..reference import adam as reference
from ..reference.adam import check_gradients, finish_step

__all__ = ["adam_update", "check_gradients", "finish_step"]


@numba.njit(parallel=True, cache=True, nogil=True, fastmath=False)
def _adam(
    params, grad, first, second, scale, rate1, rate2, lr, beta1, beta2, rest1, rest2, eps, decay, decoupled, skip
):
    """rate1 = 1 / (1 - beta1^t), rate2 likewise; every number fp32."""
    for i in numba.prange(params.size):
        raw = grad[i]
        grad[i] = numba.float32(0.0)
        if skip and raw == 0.0:
            continue
        p = params[i]
        g = raw * scale
        if not decoupled:
            g += decay * p
        m = beta1 * first[i] + rest1 * g
        v = beta2 * second[i] + rest2 * g * g
        first[i] = m
        second[i] = v
        change = lr * (m * rate1) / (numba.float32(math.sqrt(v * rate2)) + eps)
        if decoupled:
            change += lr * decay * p
        params[i] = p - change


def adam_update(
    params: Tensor,
    grad: Tensor,
    state: AdamState,
    lr: Tensor,
    *,
    rule: AdamRule,
    half: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    if any(t.dtype != torch.float32 for t in (grad, state.first, state.second)):
        reference.adam_update(params, grad, state, lr, rule=rule, half=half, grad_scale=grad_scale, found_inf=found_inf)
        return
    if found_inf is not None and found_inf.item() != 0:  # on a CPU reading a number costs nothing
        grad.zero_()
        return
    time = state.step.item() + 1
    numbers = [
        1.0 if grad_scale is None else 1.0 / grad_scale.item(),
        1.0 / (1.0 - rule.betas[0] ** time),
        1.0 / (1.0 - rule.betas[1] ** time),
        lr.item(),
        *rule.betas,
        1.0 - rule.betas[0],
        1.0 - rule.betas[1],
        rule.eps,
        rule.weight_decay,
    ]
    arrays = [t.detach().view(-1).numpy() for t in (params, grad, state.first, state.second)]
    arguments = [*arrays, *(numba.float32(x) for x in numbers), rule.decoupled, rule.skip_untouched]
    _adam(*arguments)
    if half is not None:
        half.copy_(params)
