"""Mixed precision that is right: what runs in half, how the loss is scaled, when a step is skipped. Half precision
serves the hash table's copy and the networks' products. Positions, t values, frequency arguments, interpolation
weights, density activation, transmittance, reductions, the loss, the masters and the grid stay fp32. fp16 has a loss
scale that moves by itself; bf16 and fp32 need none. docs/precision.md has the measurements. `MixedPrecision` does the
same for a model and an optimizer of your own, in your own loop."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..config import Config
from ..errors import InputError, refuse
from ..ops.adam import ScaleRule, finish_step

PrecisionName = Literal["auto", "fp32", "fp16", "bf16"]
INITIAL_SCALE = 1024.0
HALF_CAPABILITY = (7, 0)  # the first GPUs with half-precision matrix units
_DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def resolve_precision(name: str, device: torch.device | str) -> Literal["fp32", "fp16", "bf16"]:
    """What a precision setting means on a device: `auto` is fp16 on GPUs with matrix units for it, fp32 elsewhere. bf16
    is never chosen by itself: on CPUs without bf16 units it is far slower than fp32, and on GPUs fp16 has three more
    bits for the same time.

    >>> resolve_precision("auto", "cpu"), resolve_precision("bf16", "cpu")
    ('fp32', 'bf16')
    """
    refuse(name not in get_args(PrecisionName), "precision", "one of " + ", ".join(get_args(PrecisionName)), repr(name))
    if name != "auto":
        return name  # type: ignore[return-value]
    where = torch.device(device)
    fast = where.type == "cuda" and torch.cuda.get_device_capability(where) >= HALF_CAPABILITY
    return "fp16" if fast else "fp32"


def half_dtype(config: Config, device: torch.device) -> torch.dtype | None:
    """The type of half copies and products under a config on a device; None for fp32."""
    return _DTYPES[resolve_precision(config.train.precision, device)]


def carried_scale(saved: float, *, scaled: bool, rule: ScaleRule | None = None) -> float:
    """The loss scale to go on with from a saved one: 1 where none is used, the initial one where none was."""
    if not scaled:
        return 1.0
    return saved if saved >= (rule or ScaleRule()).lowest else INITIAL_SCALE


@dataclass(frozen=True)
class PrecisionReport:
    """What happened to one step."""

    skipped: bool
    bad_tensor: str | None  # the first tensor that was not finite: "loss", or a parameter's name for its gradient
    loss_scale: float
    gradient_norm: float  # unscaled, before clipping


class MixedPrecision:
    """Mixed precision for any model in any eager loop, with the rules of the built-in trainer.

    >>> model = nn.Linear(4, 1)
    >>> amp = MixedPrecision(model, torch.optim.Adam(model.parameters()), precision="fp32", clip_norm=1.0)
    >>> with amp.autocast():
    ...     loss = model(torch.ones(2, 4)).square().mean()
    >>> amp.step(loss).skipped
    False

    The model's parameters stay fp32: they are the masters, and autocast rounds them where they are multiplied. `step`
    scales the loss, differentiates, unscales, clips, and lets the optimizer step only if the loss and every gradient of
    its parameters are finite; otherwise the step is skipped and counted, and the scale falls, never under its floor. A
    `scheduler` advances with the steps that are made and not with those that are skipped. Gradients are zeroed either
    way. Parameters may be frozen and unfrozen, and the optimizer may hold more than the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        precision: PrecisionName = "auto",
        clip_norm: float | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        rule: ScaleRule | None = None,
    ) -> None:
        _check_optimizer(optimizer, scheduler)
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        refuse(not named, "model", "parameters that require a gradient", "none")
        refuse(clip_norm is not None and not clip_norm > 0.0, "clip_norm", "a number > 0 or None", clip_norm)
        self.model, self.optimizer, self.scheduler, self.clip_norm = model, optimizer, scheduler, clip_norm
        for name, parameter in (*named, *self._stepped().items()):
            if parameter.dtype != torch.float32:
                hint = "keep the model in fp32, autocast rounds where it pays"
                raise InputError(f"parameter {name}", "torch.float32, it is the master", str(parameter.dtype), hint)
        self.device = named[0][1].device
        self.precision = resolve_precision(precision, self.device)
        self.rule = rule or ScaleRule()
        self._scale = torch.tensor(INITIAL_SCALE if self.precision == "fp16" else 1.0, device=self.device)
        self._good = torch.zeros((), dtype=torch.int32, device=self.device)
        self._steps, self._skipped = (torch.zeros((), dtype=torch.int64, device=self.device) for _ in range(2))
        self._bad_loss = torch.zeros((), dtype=torch.bool, device=self.device)  # since the last step

    def _stepped(self) -> dict[str, Tensor]:
        """What the optimizer steps now, by the model's names, or by its own for what is not of the model."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        groups = enumerate(self.optimizer.param_groups)
        own = ((f"param_groups[{i}][{j}]", p) for i, group in groups for j, p in enumerate(group["params"]))
        return {names.get(parameter, name): parameter for name, parameter in own}

    @property
    def loss_scale(self) -> float:
        return float(self._scale)

    @property
    def steps_made(self) -> int:
        return int(self._steps)

    @property
    def steps_skipped(self) -> int:
        return int(self._skipped)

    def autocast(self) -> AbstractContextManager[object]:
        """Around the forward pass: products in half precision, what must be exact in fp32."""
        dtype = _DTYPES[self.precision]
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)

    def backward(self, loss: Tensor) -> None:
        """Scale and differentiate only: call it several times before one `step()` to accumulate gradients."""
        bad = ~torch.isfinite(loss.detach()).all()
        self._bad_loss |= bad
        # Of a loss that is not finite no gradient may be, so that all ranks of a team skip the step with this one.
        (loss.float() * torch.where(bad, torch.nan, self._scale)).backward()

    @torch.no_grad()
    def step(self, loss: Tensor | None = None) -> PrecisionReport:
        """Differentiate `loss` (where given), then unscale, check, clip, step, schedule and zero the gradients."""
        if loss is not None:
            with torch.enable_grad():
                self.backward(loss)
        scale, scaled = self._scale.clone(), self.precision == "fp16"
        gradients = {name: _values(p) for name, p in self._stepped().items() if p.grad is not None}
        values = list(gradients.values())
        if scaled:
            for value in values:
                value.div_(scale)
        norm = torch.nn.utils.get_total_norm(values) if values else torch.zeros(())
        bad = "loss" if bool(self._bad_loss) else None
        if bad is None and not bool(torch.isfinite(norm)):
            bad = next((n for n, value in gradients.items() if not bool(torch.isfinite(value).all())), "gradient norm")
        if bad is None:
            if self.clip_norm is not None:
                share = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
                for value in values:
                    value.mul_(share.to(value.device))
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._bad_loss.zero_()
        flag = torch.tensor(0.0 if bad is None else 1.0, device=self.device)
        moving = {"scale": self._scale, "good_steps": self._good} if scaled else {}
        finish_step(self._steps, flag, **moving, skipped=self._skipped, rule=self.rule)
        return PrecisionReport(bad is not None, bad, float(scale), float(norm))

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint must hold besides the model's and the optimizer's own."""
        return {name: float(value) for name, value in self._counters().items()}

    def _counters(self) -> dict[str, Tensor]:
        return {"scale": self._scale, "good_steps": self._good, "steps": self._steps, "skipped": self._skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """The inverse of `state_dict`; one that was saved in another precision will do."""
        own = self._counters()
        if missing := [name for name in own if name not in state]:
            raise InputError("state", "what `state_dict` gave: " + ", ".join(own), f"no {missing[0]}")
        scale = carried_scale(state["scale"], scaled=self.precision == "fp16", rule=self.rule)
        state = state | {"scale": scale, "good_steps": state["good_steps"] if scale == state["scale"] else 0.0}
        for name, tensor in own.items():
            tensor.fill_(state[name])


def _check_optimizer(optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler | None) -> None:
    hint = ""
    if not hasattr(optimizer, "param_groups"):
        hint = "one optimizer with several parameter groups: a skipped step skips all of them"
    elif isinstance(optimizer, torch.optim.LBFGS):
        hint = "it evaluates the loss several times a step; use it in fp32 without this helper"
    refuse(hint != "", "optimizer", "an optimizer whose step() takes no closure", type(optimizer).__name__, hint)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        hint = "step it yourself with your metric, where report.skipped is False"
        raise InputError("scheduler", "one whose step() takes no argument", type(scheduler).__name__, hint)


def _values(parameter: Tensor) -> Tensor:
    """The gradient's numbers, to be changed in place; of a sparse one those that are there, each once."""
    assert parameter.grad is not None
    if parameter.grad.is_sparse:
        parameter.grad = parameter.grad.coalesce()
        return parameter.grad._values()
    return parameter.grad
