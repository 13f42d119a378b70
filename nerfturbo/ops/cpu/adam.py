"""Adam on a CPU: one pass over memory instead of torch's dozen, for fp32; the rest takes the reference.

Decomposition: a task = a chunk of parameters. The norm of the gradients sums chunks in fp64, in order: deterministic.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..adam import AdamRule, AdamState
from ..reference import adam as reference
from ..reference.adam import finish_step
from ._launch import array, as_float32, jit, launch

__all__ = ["adam_update", "check_gradients", "finish_step"]

CHUNK = 1 << 16


@jit(exact=True)
def _update(
    first, last, params, grad, moment1, moment2, scale, rate1, rate2, lr, beta1, beta2, rest1, rest2, eps, decay,
    decoupled, skip,
):  # fmt: skip
    """rate1 = 1 / (1 - beta1^t), rest1 = 1 - beta1, both rounded once to fp32; rate2 and rest2 likewise."""
    for i in range(first, last):
        raw = grad[i]
        if skip and raw == 0.0:
            continue
        grad[i] = np.float32(0.0)
        p, g = params[i], raw * scale
        if not decoupled:
            g += decay * p
        m = beta1 * moment1[i] + rest1 * g
        v = beta2 * moment2[i] + rest2 * g * g
        moment1[i], moment2[i] = m, v
        change = lr * (m * rate1) / (np.float32(math.sqrt(v * rate2)) + eps)
        if decoupled:
            change += lr * decay * p
        params[i] = p - change


@jit(exact=True)
def _square_sums(first, last, values, sums):
    """sums[chunk] of the squares in chunks first ... last - 1, eight at a time: they can be added side by side."""
    for chunk in range(first, last):
        part = values[chunk * CHUNK : (chunk + 1) * CHUNK]
        lanes = np.zeros(8, np.float64)
        for i in range(part.shape[0]):
            lanes[i & 7] += np.float64(part[i]) * part[i]
        sums[chunk] = lanes.sum()


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
    flags = (rule.decoupled, rule.skip_untouched)
    launch(_update, params.numel(), CHUNK, *arrays, *(np.float32(x) for x in numbers), *flags)
    if half is not None:
        half.copy_(params)


def check_gradients(grads: list[Tensor], found_inf: Tensor) -> Tensor:
    square = 0.0
    for grad in grads:
        sums = np.empty(-(-grad.numel() // CHUNK))
        launch(_square_sums, sums.shape[0], 1, array(as_float32("grads", grad)).reshape(-1), sums)
        square += float(sums.sum())
    norm = torch.tensor(square, dtype=torch.float32).sqrt()
    if not torch.isfinite(norm):
        found_inf.fill_(1.0)
    return norm
