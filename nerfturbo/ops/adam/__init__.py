"""Adam on flat buffers and the counters of a captured step: in place, without a host read.

    g = gradient / grad_scale                      (+ weight_decay * p, unless decoupled)
    m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
    p = p - lr * (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)      (decoupled: and p -= lr * weight_decay * p)

One pass over memory does all of it: unscale, update the fp32 master, write its half copy, zero the gradient. A step
that `found_inf` marks as non-finite changes nothing but the gradient, which is zeroed all the same. `record_step` logs
a step in a ring on the device and chooses the next number of rays so that the sample budget stays full.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from .._checks import check_device, check_dtype, check_positive, check_shape, refuse
from .._dispatch import implementation


@dataclass(frozen=True)
class AdamRule:
    """The constants of Adam. `skip_untouched`: entries without gradient keep value and moments, as hash grids want.
    `decays` (first, last, weight decay) cut a flat buffer from end to end into parts with decays of their own."""

    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-15
    weight_decay: float = 0.0
    decoupled: bool = False
    skip_untouched: bool = False
    decays: tuple[tuple[int, int, float], ...] = ()

    def __post_init__(self) -> None:
        refuse(not all(0.0 <= beta < 1.0 for beta in self.betas), "betas", "two numbers in [0, 1)", self.betas)
        check_positive("eps", self.eps, zero=True)
        check_positive("weight_decay", self.weight_decay, zero=True)


class AdamState(NamedTuple):
    """Moments of one buffer, and the number of updates done so far, which `finish_step` counts up."""

    first: Tensor  # like the parameters; fp32 (fp16 and bf16 work too)
    second: Tensor
    step: Tensor  # () int64 on the device, shared by all buffers of a step

    @classmethod
    def of(cls, params: Tensor, step: Tensor | None = None, dtype: torch.dtype | None = None) -> "AdamState":
        """Zero moments in `dtype` (None: the parameters'); `step` is shared where given."""
        fresh = torch.zeros((), dtype=torch.int64, device=params.device) if step is None else step
        first, second = (torch.zeros_like(params, dtype=dtype) for _ in range(2))
        return cls(first, second, fresh)


@torch.no_grad()
def adam_update(
    params: Tensor,
    grad: Tensor,
    state: AdamState,
    lr: Tensor,
    *,
    rule: AdamRule | None = None,
    half: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """One update of `params` (fp32, contiguous, any shape) in place; `grad` (fp32 or half) is zeroed. The reference
    takes float64 too, for checking. `lr`, `grad_scale` and `found_inf` are () fp32 tensors on the device; `half`, where
    given, receives the rounded parameters. Uses t = state.step + 1 and leaves the count to `finish_step`, so that
    several buffers share it. In an fp16 gradient, sums that overflowed count as the largest number, and NaN, their
    difference, as none.

    >>> p = torch.tensor([1.0]); g = torch.tensor([0.5]); lr = torch.tensor(0.1)
    >>> adam_update(p, g, AdamState.of(p), lr)
    >>> round(p.item(), 4), g.item()
    (0.9, 0.0)
    """
    like = {"grad": grad, "first": state.first, "second": state.second, "half": half}
    if params.dtype not in (torch.float32, torch.float64) or not params.is_contiguous():
        raise InputError("params", "a contiguous fp32 tensor", f"{params.dtype}, strides {params.stride()}")
    for name, value in like.items():
        if value is None:
            continue
        check_shape(name, value, tuple(params.shape))
        check_dtype(name, value)
        refuse(not value.is_contiguous(), name, "a contiguous tensor", f"strides {value.stride()}")
    scalars = {"lr": lr, "grad_scale": grad_scale, "found_inf": found_inf, "step": state.step}
    _check_scalars(**scalars)
    check_device(params=params, **like, **scalars)
    options = {"rule": rule or AdamRule(), "half": half, "grad_scale": grad_scale, "found_inf": found_inf}
    implementation("adam", "adam_update", params)(params, grad, state, lr, **options)


@torch.no_grad()
def check_gradients(grads: Sequence[Tensor], found_inf: Tensor) -> Tensor:
    """The 2-norm of all gradients together, a () fp32 tensor; sets `found_inf` to 1 where the norm is not finite.
    Nothing clears `found_inf` here. The order of addition is fixed: the same gradients give the same bits. To clip,
    enlarge the scale that `adam_update` divides by: grad_scale * max(1, norm / (max_norm * grad_scale)).

    >>> flag = torch.zeros(())
    >>> check_gradients([torch.tensor([3.0]), torch.tensor([4.0])], flag).item(), flag.item()
    (5.0, 0.0)
    """
    refuse(not grads, "grads", "at least one tensor", "none")
    for index, grad in enumerate(grads):
        check_dtype(f"grads[{index}]", grad)
        check_device(found_inf=found_inf, **{f"grads_{index}": grad})
    _check_scalars(found_inf=found_inf)
    return implementation("adam", "check_gradients", found_inf)(list(grads), found_inf)


@dataclass(frozen=True)
class ScaleRule:
    """How the loss scale moves: halved on a non-finite step, doubled after `growth_interval` good ones in a row."""

    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 200
    lowest: float = 128.0
    highest: float = 65536.0

    def __post_init__(self) -> None:
        if not (self.growth >= 1.0 and 0.0 < self.backoff < 1.0):
            raise InputError("growth, backoff", "growth >= 1 > backoff > 0", f"{self.growth:g}, {self.backoff:g}")
        refuse(self.growth_interval < 1, "growth_interval", "at least 1 step", self.growth_interval)
        if not 0.0 < self.lowest <= self.highest:
            raise InputError("lowest, highest", "0 < lowest <= highest", f"{self.lowest:g}, {self.highest:g}")


@torch.no_grad()
def finish_step(
    step: Tensor,
    found_inf: Tensor,
    *,
    scale: Tensor | None = None,
    good_steps: Tensor | None = None,
    skipped: Tensor | None = None,
    rule: ScaleRule | None = None,
) -> None:
    """Close a step, in place: count it if it was finite, move the loss scale, clear `found_inf`. `step` () int64 counts
    updates; `scale` () fp32 is the loss scale and `good_steps` () int32 the finite steps since it last moved (both or
    none); `skipped` () int64 counts the steps that were not finite.

    >>> step, flag = torch.tensor(4), torch.tensor(1.0)
    >>> finish_step(step, flag)
    >>> step.item(), flag.item()
    (4, 0.0)
    """
    refuse((scale is None) != (good_steps is None), "scale and good_steps", "both or neither", "one of them")
    scalars = {"scale": scale, "good_steps": good_steps, "skipped": skipped}
    _check_scalars(step=step, found_inf=found_inf, **scalars)
    check_device(step=step, found_inf=found_inf, **scalars)
    implementation("adam", "finish_step", found_inf)(step, found_inf, **scalars, rule=rule or ScaleRule())


_SCALARS = {"step": torch.int64, "skipped": torch.int64, "good_steps": torch.int32}


def _check_scalars(**scalars: Tensor | None) -> None:
    for name, value in scalars.items():
        dtype = _SCALARS.get(name, torch.float32)
        if value is not None and (value.numel() != 1 or value.dtype != dtype):
            raise InputError(name, f"one number of {dtype}", f"{tuple(value.shape)} {value.dtype}")


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
    def create(cls, *, step: int, n_active: int, length: int, device: torch.device | str) -> "StepState":
        done, active = torch.tensor(step, device=device), torch.tensor(n_active, dtype=torch.int32, device=device)
        totals = torch.zeros(2, dtype=torch.int64, device=device)
        return cls(done, active, totals, torch.zeros(length, len(COLUMNS), device=device))


@dataclass(frozen=True)
class RayBudget:
    """What a step may use: trained samples, samples marched before pruning, rays."""

    samples: int
    marched: int
    max_rays: int
    parts: int = 1  # batches, of all ranks, that the counts of a step are sums of; n_active is that of one


def record_step(state: StepState, values: dict[str, Tensor], budget: RayBudget) -> None:
    """In place: log `values`, count, adapt n_active, advance the step. `values` holds () tensors: loss, mse, found_inf
    and loss_scale in fp32, n_rays, n_samples and n_marched in int32. The next number of rays is that of the kept ones *
    min(samples / n_samples, marched / n_marched, 2), between 64 and max_rays. Counts are cut to their capacity, so that
    these ratios are never below 1: rays that found no room tell."""
    check_device(step=state.step, ring=state.ring, **values)
    implementation("adam", "record_step", state.ring)(state, values, budget)
