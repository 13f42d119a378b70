"""Adam over flat buffers with a loss scale, and the learning-rate schedule.

Parameters are gathered into a few flat fp32 buffers, networks, hash tables and what has a learning rate of its own
(groups.py), and become views of them; so do their gradients. One fused pass per buffer then unscales, updates the
master, writes the half copy that the field reads, and zeroes the gradient. Learning rate, scale and counters are device
tensors: a captured step can hold all of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..config import OptimConfig
from ..fields.density import HashDensity
from ..fields.factor import FactorField
from ..fields.field import Carry, Connected
from ..fields.ngp import InstantNGP
from ..fields.vanilla import VanillaNeRF
from ..fields.voxels import VoxelGrid
from ..ops import GradientSink
from ..ops.adam import AdamRule, AdamState, ScaleRule, adam_update, check_gradients, finish_step
from .groups import ParameterGroup, level_decays, parameter_groups
from .precision import INITIAL_SCALE, carried_scale

SWAPPED = 1 << 20  # values that change places at a time


@dataclass(frozen=True)
class FlatBuffer:
    """Some parameters as one: their values and gradients are views of `values` and `grads`."""

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    values: Tensor
    grads: Tensor
    state: AdamState
    rule: AdamRule
    half: Tensor | None
    lr: Tensor  # () of the next step
    rate: float  # peak learning rate
    decays: tuple[tuple[int, int, float], ...] = ()  # first and last value and decay of parts that have their own

    def parts(self) -> list[tuple[Tensor, Tensor, AdamState, AdamRule, Tensor | None]]:
        """Values, gradients, moments, rule and half copy of each part with a rule of its own; all of it, usually."""
        if not self.decays:
            return [(self.values, self.grads, self.state, self.rule, self.half)]
        found = []
        for first, last, decay in self.decays:
            state = AdamState(self.state.first[first:last], self.state.second[first:last], self.state.step)
            half = None if self.half is None else self.half[first:last]
            rule = replace(self.rule, weight_decay=decay)
            found.append((self.values[first:last], self.grads[first:last], state, rule, half))
        return found

    def views(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor cut into the parameters' shapes."""
        parts = flat.split([parameter.numel() for parameter in self.parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]


def _flatten(group: ParameterGroup, step: Tensor, half_dtype: torch.dtype | None) -> FlatBuffer:
    names, parameters = zip(*group.named, strict=True)
    values = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    half = None if half_dtype is None or not group.is_table else values.to(half_dtype)
    grads, state = torch.zeros_like(values), AdamState.of(values, step)
    lr = torch.tensor(group.rate, device=values.device)
    buffer = FlatBuffer(names, parameters, values, grads, state, group.rule, half, lr, group.rate)
    for parameter, value, grad in zip(parameters, buffer.views(values), buffer.views(buffer.grads), strict=True):
        parameter.data, parameter.grad = value, grad
    return buffer


class Optimizer:
    """Steps a model's parameters. With `half_dtype` the hash table is read as a half copy and the loss is scaled."""

    def __init__(self, model: nn.Module, config: OptimConfig, *, half_dtype: torch.dtype | None = None) -> None:
        self.config, self.half_dtype = config, half_dtype
        device = next(model.parameters()).device
        self.step_count = torch.zeros((), dtype=torch.int64, device=device)
        self.lr = torch.tensor(config.lr, device=device)
        self.found_inf = torch.zeros((), device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        scale = INITIAL_SCALE if half_dtype == torch.float16 else 1.0
        self.scale = torch.tensor(scale, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.gradient_norm = torch.zeros((), device=device)  # of the last step, times the loss scale
        self.buffers: list[FlatBuffer] = []
        self.averages: list[Tensor] = []
        self._gather(model)

    def _gather(self, model: nn.Module) -> None:
        """Lay the model's parameters into flat buffers, with zero moments."""
        config, self.buffers = self.config, []
        for group in parameter_groups(model, config):
            buffer = _flatten(group, self.step_count, self.half_dtype)
            decays = level_decays(model, buffer.parameters, config.table_decay) if group.is_table else ()
            self.buffers.append(replace(buffer, decays=decays))
        self.averages = [buffer.values.clone() for buffer in self.buffers] if config.ema_decay > 0.0 else []
        self._connect(model)

    @torch.no_grad()
    def rebuild(self, model: nn.Module, carry: Carry | None = None) -> None:
        """Gather the parameters anew after some were replaced by others of other shapes.

        Counters, learning rate and loss scale stay. Moments and running means go along: as they are where the shape is
        the same, through `carry` where it is not; without it those begin anew.
        """
        kept = self._per_parameter()
        self.buffers, self.averages = [], []  # the old values, gradients and half copies are free before the new come
        self._gather(model)
        for name, view in self._per_parameter().items():
            old = kept.pop(name, None)
            if old is None:
                continue
            if carry is not None and old.shape != view.shape:
                old = carry(name.removeprefix("field."), old)
            if old.shape == view.shape:
                view.copy_(old)
        self.refresh_halves()

    def _per_parameter(self) -> dict[str, Tensor]:
        """Moments and running means, by the parameter's name and `.first`, `.second` or `.average`."""
        tensors: dict[str, Tensor] = {}
        for buffer in self.buffers:
            for kind, flat in (("first", buffer.state.first), ("second", buffer.state.second)):
                tensors |= {f"{name}.{kind}": v for name, v in zip(buffer.names, buffer.views(flat), strict=True)}
        return tensors | dict(self._average_views())

    def _connect(self, model: nn.Module) -> None:
        """Let a field that can do so read the half copies and write gradients straight into the buffers."""
        halves, grads = {}, {}
        for buffer in self.buffers:
            grads |= dict(zip(buffer.parameters, buffer.views(buffer.grads), strict=True))
            if buffer.half is not None:
                halves |= dict(zip(buffer.parameters, buffer.views(buffer.half), strict=True))
        for module in model.modules():
            if isinstance(module, InstantNGP | HashDensity):
                table = module.encoding.table
                module.half_table = halves.get(table)
                module.table_sink = GradientSink((grads[table],), self.found_inf)
                module.weight_sink = GradientSink(tuple(grads[weight] for weight in module.weights), self.found_inf)
            elif isinstance(module, VoxelGrid):
                module.half_table = halves.get(module.color_table)
                both = (grads[module.density_table], grads[module.color_table])
                module.table_sink = GradientSink(both, self.found_inf)
            elif isinstance(module, VanillaNeRF | FactorField):
                module.compute_dtype = self.half_dtype
            elif isinstance(module, Connected):
                module.connect(halves, grads, self.found_inf)

    @property
    def learning_rate(self) -> float:
        return float(self.lr)

    def set_learning_rate(self, value: float) -> None:
        """Of the field; what has a rate of its own follows it in proportion."""
        self.lr.fill_(value)
        for buffer in self.buffers:
            buffer.lr.fill_(value * buffer.rate / self.config.lr)

    @property
    def loss_scale(self) -> Tensor | None:
        """() what to multiply the loss by before the backward; None for no scaling."""
        return self.scale if self.half_dtype == torch.float16 else None

    def step(self) -> None:
        """Update from the gradients, unless one is not finite; zero them either way. Nothing is read back."""
        clip = self.config.clip_norm
        checked = [buffer.grads for buffer in self.buffers if buffer.half is None or clip > 0.0]
        if not checked:  # tables alone, whose backward looks for what is not finite: the norm is that of the last one
            checked = [self.buffers[0].views(self.buffers[0].grads)[-1]]
        self.gradient_norm = check_gradients(checked, self.found_inf)
        divisor = self.loss_scale
        if clip > 0.0:
            divisor = self.scale * (self.gradient_norm / (clip * self.scale)).clamp(min=1.0)
        for buffer in self.buffers:
            for values, grads, state, rule, half in buffer.parts():
                options = {"grad_scale": divisor, "found_inf": self.found_inf}
                adam_update(values, grads, state, buffer.lr, rule=rule, half=half, **options)
        if self.config.ema_every == 1:
            self.update_averages(self.step_count + 1)

    def averages_due(self, step: int) -> bool:
        """Whether `update_averages` is to be called after so many steps; with ema_every 1 `step` has done it."""
        return bool(self.averages) and self.config.ema_every > 1 and step % self.config.ema_every == 0

    @torch.no_grad()
    def update_averages(self, made: Tensor) -> None:
        """After `made` steps. The memory grows with the updates, so that the random start is soon forgotten."""
        if not self.averages:
            return
        updates = made.float() / self.config.ema_every
        share = 1.0 - ((1.0 + updates) / (10.0 + updates)).clamp(max=self.config.ema_decay**self.config.ema_every)
        for average, buffer in zip(self.averages, self.buffers, strict=True):
            average.lerp_(buffer.values, share)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside this block the model has the running mean of its weights, where one is kept."""
        self._swap_averages()
        try:
            yield
        finally:
            self._swap_averages()

    @torch.no_grad()
    def _swap_averages(self) -> None:
        """Weights and means change places, piece by piece: a copy of all of them would be the peak of memory."""
        for average, buffer in zip(self.averages, self.buffers, strict=False):
            for one, other in zip(average.split(SWAPPED), buffer.values.split(SWAPPED), strict=True):
                kept = other.clone()
                other.copy_(one)
                one.copy_(kept)
        if self.averages:
            self.refresh_halves()

    def finish_step(self) -> None:
        """Count the step, move the loss scale, clear the non-finite flag."""
        scaled = self.loss_scale is not None
        finish_step(
            self.step_count,
            self.found_inf,
            scale=self.scale if scaled else None,
            good_steps=self.good_steps if scaled else None,
            skipped=self.skipped,
            rule=ScaleRule() if scaled else None,
        )

    def _scalars(self) -> dict[str, Tensor]:
        return {
            "step_count": self.step_count,
            "scale": self.scale,
            "good_steps": self.good_steps,
            "skipped": self.skipped,
        }

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs, by parameter name."""
        return self._scalars() | self._per_parameter()

    def _average_views(self) -> list[tuple[str, Tensor]]:
        pairs = zip(self.buffers, self.averages, strict=False)
        return [(f"{n}.average", v) for b, flat in pairs for n, v in zip(b.names, b.views(flat), strict=True)]

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state_tensors`, after the model's own tensors were loaded in place."""
        for name, value in self._scalars().items():
            value.copy_(tensors[name])
        if (scale := carried_scale(float(self.scale), scaled=self.loss_scale is not None)) != float(self.scale):
            self.scale.fill_(scale)  # saved in another precision
            self.good_steps.zero_()
        for buffer in self.buffers:
            for kind, flat in (("first", buffer.state.first), ("second", buffer.state.second)):
                for name, view in zip(buffer.names, buffer.views(flat), strict=True):
                    view.copy_(tensors[f"{name}.{kind}"])
        self.adopt_values()
        for name, view in self._average_views():
            view.copy_(tensors.get(name, view))  # a run that kept no mean before begins with what it has

    @torch.no_grad()
    def adopt_values(self) -> None:
        """Half copies and running means follow the parameters, which were changed from outside."""
        for average, buffer in zip(self.averages, self.buffers, strict=False):
            average.copy_(buffer.values)
        self.refresh_halves()

    @torch.no_grad()
    def refresh_halves(self) -> None:
        """Round the masters anew; needed after parameters were changed from outside."""
        for buffer in self.buffers:
            if buffer.half is not None:
                buffer.half.copy_(buffer.values)
        if self.scale.is_cuda:  # a recorded step runs on a stream of its own and must find all of this done
            torch.cuda.current_stream(self.scale.device).synchronize()


def learning_rate(config: OptimConfig, step: int, progress: float) -> float:
    """Linear warm-up over the first steps, then held, then the schedule's way to the end.

    `step` counts the steps made, without the skipped ones; `progress` in [0, 1] is the share of the run that is over,
    by steps or by the clock.

    >>> config = OptimConfig(lr=1.0, warmup_steps=10, hold_fraction=0.5, final_lr_fraction=0.01)
    >>> [round(learning_rate(config, s, p), 3) for s, p in ((0, 0.0), (10, 0.1), (500, 0.75), (999, 1.0))]
    [0.1, 1.0, 0.1, 0.01]
    """
    warmup = min(1.0, (step + 1) / max(1, config.warmup_steps))
    return config.lr * warmup * _decay(config, progress)


def _decay(config: OptimConfig, progress: float) -> float:
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "multistep":
        return config.milestone_factor ** sum(progress >= milestone for milestone in config.milestones)
    way = min(1.0, max(0.0, progress - config.hold_fraction) / max(1e-9, 1.0 - config.hold_fraction))
    if config.schedule == "cosine":
        return config.final_lr_fraction + (1.0 - config.final_lr_fraction) * 0.5 * (1.0 + math.cos(math.pi * way))
    return math.exp(math.log(config.final_lr_fraction) * way)
