"""Adam over flat buffers with a loss scale, and the learning-rate schedule. Parameters and their gradients become views
of a few flat fp32 buffers. One fused pass per buffer unscales, updates the master, writes the half copy that the field
reads, and zeroes the gradient. Learning rate, scale and counters are device tensors, for steps that are captured."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..config import OptimConfig
from ..errors import refuse
from ..fields.field import Buffers, Carry, connect, table_parameters
from ..ops._sink import Held
from ..ops.adam import AdamRule, AdamState, adam_update, check_gradients, finish_step
from .distributed import GradientPiece
from .precision import INITIAL_SCALE, carried_scale

BETA1 = 0.9
EPS = {"tables": 1e-15, "networks": 1e-8}  # tiny where there are tables: rarely touched entries move at full speed
INVERSE_STEPS = 1500  # after which the inverse schedule has halved the rate
MILESTONES, MILESTONE_FACTOR = (0.5, 0.75, 0.9), 0.33  # of the multistep schedule: shares of the run, and the factor
SAMPLER = "sampler."  # what the names of its parameters begin with
RESTING = (SAMPLER, "photos.pose", "photos.focal", "photos.radial")
THIN = 1.0  # gradients of tables below so many times their neighbours' mean are left out at random
EMA_EVERY = 16  # steps between two updates of the running mean, which costs a pass over all weights
SWAPPED = 1 << 20  # values that change places at a time
PIECE = 1 << 22  # values of a table, about, whose gradients travel to other ranks while those of the next are computed


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters under one rule and one learning rate."""

    named: list[tuple[str, nn.Parameter]]
    rule: AdamRule
    rate: float  # the peak of the schedule
    is_table: bool = False  # read as a half copy in mixed precision


def own_rates(model: nn.Module) -> dict[str, float]:
    """Peak learning rates by parameter name, of modules that name them: `learning_rates = {"pose": 1e-3}`."""
    rates: dict[str, float] = {}
    for prefix, module in model.named_modules():
        if isinstance(own := getattr(module, "learning_rates", None), dict):
            lost = ", ".join(sorted(own.keys() - dict(module.named_parameters())))
            refuse(lost != "", f"{type(module).__name__}.learning_rates", "names of its parameters", lost)
            rates |= {f"{prefix}.{name}" if prefix else name: float(rate) for name, rate in own.items()}
    return rates


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[ParameterGroup]:
    """All parameters that learn: networks and tables of the field, the sampler's, those with rates of their own."""
    own, tables = own_rates(model), set(table_parameters(model))
    rule = AdamRule((BETA1, config.beta2), EPS["tables" if tables else "networks"])
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    skips = any(getattr(module, "skip_untouched", False) for module in model.modules())
    groups = []
    for of_sampler in (False, True):  # whose groups may rest
        common = [pair for pair in named if pair[0] not in own and pair[0].startswith(SAMPLER) == of_sampler]
        of_tables = [pair for pair in common if pair[1] in tables]
        groups.append(ParameterGroup([pair for pair in common if pair[1] not in tables], rule, config.lr))
        groups.append(ParameterGroup(of_tables, replace(rule, skip_untouched=skips), config.lr, True))
    for rate in sorted({own[name] for name, _ in named if name in own}):
        alike = [(name, parameter) for name, parameter in named if own.get(name) == rate]
        groups.append(ParameterGroup(alike, rule, rate))
    return [group for group in groups if group.named]


def table_levels(model: nn.Module, tables: Sequence[nn.Parameter]) -> list[tuple[int, bool]]:
    """Values of each level of tables laid end to end, and whether it holds a field's beginning (`kept_levels`)."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "level_sizes")]
    grids = {module.tables[0]: module for module in modules}
    of_tables = [
        (g.level_sizes, g.kept_levels) if (g := grids.get(table)) else ([table.numel()], 0) for table in tables
    ]
    return [(size, index < kept) for sizes, kept in of_tables for index, size in enumerate(sizes)]


def level_decays(levels: Sequence[tuple[int, bool]], weight: float) -> tuple[tuple[int, int, float], ...]:
    """First and last value and decay of parts of equal decay, of `table_levels`: the gradient of `weight` times the
    mean square of each level is 2 weight / (values of the level) times the value; 0 for levels that are kept."""
    if weight == 0.0:
        return ()
    decays = [(size, 0.0 if kept else 2.0 * weight / size) for size, kept in levels]
    groups = itertools.groupby(decays, key=lambda pair: pair[1])
    runs = [(sum(size for size, _ in run), decay) for decay, run in groups]
    ends = itertools.accumulate(run for run, _ in runs)
    return tuple((end - run, end, decay) for end, (run, decay) in zip(ends, runs, strict=True))


def cut_levels(sizes: Sequence[int], piece: int) -> list[slice]:
    """Runs of whole levels of about `piece` values each. The finest come first: they are soonest computed.

    >>> cut_levels([10, 20, 100, 100, 100], 100), cut_levels([10, 20], 100)
    ([slice(230, 330, None), slice(130, 230, None), slice(0, 130, None)], [slice(0, 30, None)])
    """
    ends = list(itertools.accumulate(sizes))
    count = max(1, round(ends[-1] / piece))
    cuts = {min(ends, key=lambda end: abs(end - ends[-1] * k / count)) for k in range(1, count + 1)}
    return [slice(*pair) for pair in itertools.pairwise(sorted({0, *cuts}))][::-1]


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
    grad_views: tuple[Tensor, ...]  # the parameters' gradients, views of `grads`
    lr: Tensor  # () of the next step
    rate: float  # peak learning rate
    pieces: tuple[Tensor, ...] = ()  # of `grads`, in the order in which ranks exchange them

    def views(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor cut into the parameters' shapes."""
        parts = flat.split([parameter.numel() for parameter in self.parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]


def _flatten(group: ParameterGroup, step: Tensor, half_dtype: torch.dtype | None, narrow: bool) -> FlatBuffer:
    """`narrow`: of tables, gradients are summed in fp16 and moments kept in bf16: fewer bytes to read and write."""
    names, parameters = zip(*group.named, strict=True)
    values = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    half = None if half_dtype is None or not group.is_table else values.to(half_dtype)
    narrow = narrow and group.is_table and not group.rule.skip_untouched  # voxels stay wide
    grads = torch.zeros_like(values, dtype=torch.float16 if narrow else None)
    state = AdamState.of(values, step, torch.bfloat16 if narrow else None)
    lr = torch.tensor(group.rate, device=values.device)
    buffer = FlatBuffer(names, parameters, values, grads, state, group.rule, half, (), lr, group.rate)
    buffer = replace(buffer, grad_views=tuple(buffer.views(grads)))
    for parameter, value, grad in zip(parameters, buffer.views(values), buffer.grad_views, strict=True):
        if parameter.grad is not None:  # of a loop that began without this optimizer
            grad.copy_(parameter.grad)
        parameter.data, parameter.grad = value, None if narrow else grad
    return buffer


class Optimizer:
    """Steps a model's parameters. With `half_dtype` the hash table is read as a half copy and the loss is scaled.
    `connected` lets modules write gradients straight into the buffers, past autograd and the hooks of others."""

    def __init__(
        self, model: nn.Module, config: OptimConfig, *, half_dtype: torch.dtype | None = None, connected: bool = True
    ) -> None:
        self.config, self.half_dtype, self._connected = config, half_dtype, connected
        self.scaled = half_dtype == torch.float16  # by this optimizer; False where a GradScaler does it
        device = next(model.parameters()).device
        self._narrow = self.scaled and connected and device.type == "cuda"
        self.step_count, self.skipped = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self.lr = torch.tensor(config.lr, device=device)
        self.found_inf = torch.zeros((), device=device)
        self.scale = torch.tensor(INITIAL_SCALE if self.scaled else 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.gradient_norm = torch.zeros((), device=device)  # of the last step, times the loss scale
        self.buffers: list[FlatBuffer] = []
        self.held = Held()  # of tables, for `exchanged`
        self.rests = False  # whether the parameters of sampler and cameras stay as they are
        self.averages: list[Tensor] = []
        self._gather(model)

    def _gather(self, model: nn.Module) -> None:
        """Lay the model's parameters into flat buffers, with zero moments."""
        config, self.buffers = self.config, []
        for group in parameter_groups(model, config):
            buffer = _flatten(group, self.step_count, self.half_dtype, self._narrow)
            levels = table_levels(model, buffer.parameters) if group.is_table else [(buffer.values.numel(), False)]
            decays = level_decays(levels, config.table_decay) if group.is_table else ()
            pieces = tuple(buffer.grads[cut] for cut in cut_levels([size for size, _ in levels], PIECE))
            self.buffers.append(replace(buffer, rule=replace(buffer.rule, decays=decays), pieces=pieces))
        self.averages = [buffer.values.clone() for buffer in self.buffers] if config.ema_decay > 0.0 else []
        if self._connected:
            self._connect(model)
            self._watch_tables()

    @torch.no_grad()
    def rebuild(self, model: nn.Module, carry: Carry | None = None) -> None:
        """Gather the parameters anew after some were replaced by others of other shapes. Counters, learning rate and
        loss scale stay. Moments and running means go along: as they are where the shape is the same, through `carry`
        where it is not; without it those begin anew."""
        kept = self._per_parameter()
        self.buffers, self.averages = [], []  # the old values, gradients and half copies are free before the new come
        self._gather(model)
        for name, view in self._per_parameter().items():
            old = kept.pop(name, view)
            if carry is not None and old.shape != view.shape:
                old = carry(name.removeprefix("field."), old)
            if old.shape == view.shape:
                view.copy_(old)
        self.refresh_halves()

    def _per_parameter(self) -> dict[str, Tensor]:
        """Moments and running means, by the parameter's name and `.first`, `.second` or `.average`."""
        first, second = ([getattr(buffer.state, kind) for buffer in self.buffers] for kind in ("first", "second"))
        tensors: dict[str, Tensor] = {}
        for kind, flats in (("first", first), ("second", second), ("average", self.averages)):
            for buffer, flat in zip(self.buffers, flats, strict=False):
                tensors |= {f"{name}.{kind}": v for name, v in zip(buffer.names, buffer.views(flat), strict=True)}
        return tensors

    def _connect(self, model: nn.Module) -> None:
        """Let modules that can do so read the half copies and write gradients straight into the buffers."""
        halves, grads = {}, {}
        for buffer in self.buffers:
            grads |= dict(zip(buffer.parameters, buffer.views(buffer.grads), strict=True))
            if buffer.half is not None:
                halves |= dict(zip(buffer.parameters, buffer.views(buffer.half), strict=True))
        thin = THIN if self._narrow else 0.0
        connect(model, Buffers(self.half_dtype, halves, grads, self.found_inf, thin, self.held))

    def _watch_tables(self) -> None:
        """`step` leaves tables with half copies unchecked, because their backward looks for what is not finite; what
        autograd adds to one, from a term of somebody's own, is looked at here."""

        found_inf = self.found_inf  # not self: a parameter that holds its optimizer would never be freed

        def check(grad: Tensor | None) -> None:
            if grad is not None:  # a backward that has written into the buffer itself hands on none
                check_gradients([grad.contiguous()], found_inf)

        for buffer in self.buffers:
            for parameter in buffer.parameters if buffer.half is not None else ():
                parameter.register_hook(check)

    @property
    def learning(self) -> list[FlatBuffer]:
        """The buffers that this step updates."""
        return [buffer for buffer in self.buffers if not (self.rests and buffer.names[0].startswith(RESTING))]

    def exchanged(self) -> list[GradientPiece]:
        """The gradients of this step in the pieces in which ranks exchange them, the same on all of them: first those
        of networks, then tables, whose backward waits where `held` was on."""
        self.attach_gradients()
        waiting, buffers = self.held.release(), sorted(self.learning, key=lambda buffer: len(buffer.pieces))
        pieces = [piece for buffer in buffers for piece in buffer.pieces]
        return [([run for held in waiting if (run := _rows_within(piece, *held))], piece) for piece in pieces]

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
        return self.scale if self.scaled else None

    @torch.no_grad()
    def attach_gradients(self) -> None:
        """Let the parameters have their gradients in the buffers again, where a loop of others has dropped them (a
        `zero_grad` does), so that autograd adds to what `step` reads."""
        for buffer in self.buffers:
            for parameter, view in zip(buffer.parameters, buffer.grad_views, strict=True):
                if parameter.grad is not view:
                    if parameter.grad is not None:
                        view.add_(parameter.grad)
                    parameter.grad = view if view.dtype == parameter.dtype else None

    def step(self, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Update from the gradients, unless one is not finite; zero them either way. Nothing is read back. A GradScaler
        gives its own scale and what it found."""
        self.attach_gradients()
        if grad_scale is not None:
            self.scale.copy_(grad_scale)
        if found_inf is not None:
            self.found_inf.copy_(torch.maximum(self.found_inf, found_inf.to(self.found_inf)))
        clip = self.config.clip_norm
        checked = [buffer.grads for buffer in self.learning if buffer.half is None or clip > 0.0]
        if not checked:  # tables alone, whose backward looks for what is not finite: the norm is that of the last one
            checked = [self.buffers[0].views(self.buffers[0].grads)[-1]]
        self.gradient_norm = check_gradients(checked, self.found_inf)
        divisor = self.loss_scale if grad_scale is None else self.scale
        if clip > 0.0:
            divisor = self.scale * (self.gradient_norm / (clip * self.scale)).clamp(min=1.0)
        for buffer in self.learning:
            options = {"rule": buffer.rule, "half": buffer.half, "grad_scale": divisor, "found_inf": self.found_inf}
            adam_update(buffer.values, buffer.grads, buffer.state, buffer.lr, **options)

    def drop_gradients(self) -> None:
        """Of a step that was never finished, and whether they were finite."""
        self.held.release()
        self.found_inf.zero_()
        for buffer in self.buffers:
            buffer.grads.zero_()

    def averages_due(self, step: int) -> bool:
        """Whether `update_averages` is to be called after so many steps."""
        return bool(self.averages) and step % EMA_EVERY == 0

    @torch.no_grad()
    def update_averages(self, made: Tensor) -> None:
        """After `made` steps. The first update takes the weights as they are; the memory grows with the updates."""
        if not self.averages:
            return
        updates = made.float() / EMA_EVERY
        share = 1.0 - ((1.0 + updates) / (10.0 + updates)).clamp(max=self.config.ema_decay**EMA_EVERY)
        share = torch.where(made + self.skipped <= EMA_EVERY, torch.ones_like(share), share)
        for average, buffer in zip(self.averages, self.buffers, strict=True):
            average.lerp_(buffer.values, share)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside this block the model has the running mean of its weights, where one is kept."""
        self._follow_while_young()
        self._swap_averages()
        try:
            yield
        finally:
            self._swap_averages()

    def _follow_while_young(self) -> None:
        """Before its first update the mean is the weights themselves, not the random start."""
        if self.averages and int(self.step_count + self.skipped) < EMA_EVERY:
            self.adopt_values()

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
        good_steps = self.good_steps if self.scaled else None
        finish_step(self.step_count, self.found_inf, scale=self.loss_scale, good_steps=good_steps, skipped=self.skipped)

    def _scalars(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("step_count", "scale", "good_steps", "skipped")}

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs, by parameter name."""
        self._follow_while_young()
        return self._scalars() | self._per_parameter()

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state_tensors`, after the model's own tensors were loaded in place."""
        for name, value in self._scalars().items():
            value.copy_(tensors[name])
        if (scale := carried_scale(float(self.scale), scaled=self.loss_scale is not None)) != float(self.scale):
            self.scale.fill_(scale)  # saved in another precision
            self.good_steps.zero_()
        self.adopt_values()
        self.drop_gradients()
        for name, view in self._per_parameter().items():
            # A run that kept no mean before begins with what it has.
            view.copy_(tensors.get(name, view) if name.endswith(".average") else tensors[name])

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


def _rows_within(piece: Tensor, table: Tensor, add: Callable[[int, int], None]) -> Callable[[], None] | None:
    """What adds the gradient of those rows of `table` that lie in a piece of the memory that holds it."""
    ahead, row = table.data_ptr() - piece.data_ptr(), table[0].nbytes
    first, last = max(0, -ahead), min(table.nbytes, piece.nbytes - ahead)
    return partial(add, first // row, last // row) if first < last else None


def learning_rate(config: OptimConfig, step: int, progress: float) -> float:
    """Linear warm-up over the first steps, then held, then the schedule's way to the end. `step` counts the steps made,
    without the skipped ones; `progress` in [0, 1] is the share of the run that is over, by steps or by the clock.

    >>> config = OptimConfig(lr=1.0, warmup_steps=10, hold_fraction=0.5, final_lr_fraction=0.01)
    >>> [round(learning_rate(config, s, p), 3) for s, p in ((0, 0.0), (10, 0.1), (500, 0.75), (999, 1.0))]
    [0.1, 1.0, 0.1, 0.01]
    """
    rate, last = config.lr * min(1.0, (step + 1) / max(1, config.warmup_steps)), config.final_lr_fraction
    if config.schedule == "constant":
        return rate
    if config.schedule == "multistep":
        return rate * MILESTONE_FACTOR ** sum(progress >= milestone for milestone in MILESTONES)
    way = min(1.0, max(0.0, progress - config.hold_fraction) / max(1e-9, 1.0 - config.hold_fraction))
    if config.schedule == "cosine":
        return rate * (last + (1.0 - last) * 0.5 * (1.0 + math.cos(math.pi * way)))
    if config.schedule == "inverse":
        rate /= 1.0 + step / INVERSE_STEPS
    return rate * math.exp(math.log(last) * way)


class FieldAdam(torch.optim.Optimizer):
    """The same Adam as a `torch.optim.Optimizer`, for loops that are not ours: Lightning, Fabric, your own. Gradient
    scalers, schedulers and clipping work as with any other optimizer.

    `native` is an optimizer that is already there; without it one is made at the first step, where the model then is.
    """

    _step_supports_amp_scaling = True  # torch's GradScaler hands its scale and its non-finite flag to `step`

    def __init__(self, model: nn.Module, config: OptimConfig, *, native: Optimizer | None = None) -> None:
        self._model, self._config, self._native, self._seen = model, config, native, None
        groups = parameter_groups(model, config)
        own = [{"params": [parameter for _, parameter in group.named], "lr": group.rate} for group in groups]
        super().__init__(own, {"lr": config.lr})

    @property
    def native(self) -> Optimizer:
        if self._native is None:
            self._native = Optimizer(self._model, self._config, connected=False)
        self.follow()
        return self._native

    def follow(self) -> None:
        """Take over parameters that the native optimizer has gathered anew."""
        if self._native is not None and self._seen is not self._native.buffers:
            self._seen = self._native.buffers
            for group, buffer in zip(self.param_groups, self._seen, strict=True):
                group["params"] = list(buffer.parameters)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update from the gradients, unless one is not finite; nothing is read back."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        native = self.native
        for group, buffer in zip(self.param_groups, native.buffers, strict=True):
            buffer.lr.fill_(group["lr"])
        native.lr.fill_(self.param_groups[0]["lr"])
        native.step(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        native.finish_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The native step has zeroed what it used; what is left is of a loop that made no step."""
        if self._native is None:
            return super().zero_grad(set_to_none)
        self._native.drop_gradients()

    def state_dict(self) -> dict[str, Any]:
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]
        return {"tensors": self.native.state_tensors(), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.native.load_state_tensors(state_dict["tensors"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group |= saved
