"""Adam on a CPU, fp32, in one pass over memory, not a dozen; else the reference. A task = a chunk of parameters."""

import math

import numpy as np
import torch

from .._cpu import jit, launch
from . import reference

CHUNK = 1 << 16
ZERO = np.float32(0.0)


@jit(exact=True)
def _update(
    first, last, params, grad, moment1, moment2, scale, rate1, rate2, lr, beta1, beta2, rest1, rest2, eps, decay,
    decoupled, skip,
):  # fmt: skip
    """rate1 = 1 / (1 - beta1^t), rest1 = 1 - beta1, both rounded once to fp32; rate2 and rest2 likewise. Every entry is
    computed and the untouched ones selected away: so it compiles to vectors, four times as fast."""
    l2 = ZERO if decoupled else decay
    shrink = lr * decay if decoupled else ZERO
    own, slope, mean, square = params[first:last], grad[first:last], moment1[first:last], moment2[first:last]
    for i in range(own.shape[0]):
        raw, p, m, v = slope[i], own[i], mean[i], square[i]
        keep = skip and raw == ZERO
        g = raw * scale + l2 * p
        new_m, new_v = beta1 * m + rest1 * g, beta2 * v + rest2 * g * g
        change = lr * (new_m * rate1) / (np.float32(math.sqrt(new_v * rate2)) + eps) + shrink * p
        mean[i] = m if keep else new_m
        square[i] = v if keep else new_v
        own[i] = p if keep else p - change
        slope[i] = ZERO


def adam_update(params, grad, state, lr, *, rule, half, grad_scale, found_inf) -> None:
    if any(t.dtype != torch.float32 for t in (grad, state.first, state.second)):
        reference.adam_update(params, grad, state, lr, rule=rule, half=half, grad_scale=grad_scale, found_inf=found_inf)
        return
    if found_inf is not None and found_inf.item() != 0:  # on a CPU reading a number costs nothing
        grad.zero_()
        return
    time, scale = state.step.item() + 1, 1.0 if grad_scale is None else 1.0 / grad_scale.item()
    corrections, rests = [1.0 / (1.0 - beta**time) for beta in rule.betas], [1.0 - beta for beta in rule.betas]
    numbers = [np.float32(x) for x in (scale, *corrections, lr.item(), *rule.betas, *rests, rule.eps)]
    arrays = [t.detach().view(-1).numpy() for t in (params, grad, state.first, state.second)]
    for first, last, decay in rule.decays or ((0, params.numel(), rule.weight_decay),):
        part = [values[first:last] for values in arrays]
        launch(_update, last - first, CHUNK, *part, *numbers, np.float32(decay), rule.decoupled, rule.skip_untouched)
    if half is not None:
        half.copy_(params)
