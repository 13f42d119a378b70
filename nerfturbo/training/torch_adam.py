"""The fused Adam as a `torch.optim.Optimizer`, for loops that are not ours: Lightning, Fabric, your own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..config import OptimConfig
from ..fields.field import Carry
from ..ops.adam import AdamState, adam_update, check_gradients, finish_step
from .groups import level_decays, parameter_groups


class FieldAdam(torch.optim.Optimizer):
    """Adam over the parameters of a model with the rules of the native trainer: weight decay for networks alone, a
    decay of their own for the levels of hash tables, hash entries without a gradient left as they are where the config
    says so, no step from a gradient that is not finite.

    Gradient scalers, schedulers and clipping work as with any other optimizer.
    """

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        groups = parameter_groups(model, config)
        self.names = {parameter: name for group in groups for name, parameter in group.named}
        self._rules = [group.rule for group in groups]
        own = [{"params": [parameter for _, parameter in group.named], "lr": group.rate} for group in groups]
        super().__init__(own, {"lr": config.lr})
        self._table_decay = config.table_decay
        self._tables = {name for group in groups if group.is_table for name, _ in group.named}
        self._decays = self._level_decays(model)

    def _level_decays(self, model: nn.Module) -> dict[Tensor, tuple[tuple[int, int, float], ...]]:
        """First and last value and decay of the parts of each hash table that decay alike."""
        tables = [parameter for parameter, name in self.names.items() if name in self._tables]
        return {table: level_decays(model, [table], self._table_decay) for table in tables}

    @torch.no_grad()
    def rebuild(self, model: nn.Module, carry: Carry | None = None) -> None:
        """Take the model's parameters after some were replaced by others of other shapes; see `Optimizer.rebuild`."""
        old = {name: (parameter, self.state.pop(parameter, {})) for parameter, name in self.names.items()}
        new = {name: parameter for name, parameter in model.named_parameters() if name in old}
        for group in self.param_groups:
            group["params"] = [new[self.names[parameter]] for parameter in group["params"]]
        self.names = {parameter: name for name, parameter in new.items()}
        for name, parameter in new.items():
            state = dict(old[name][1])
            for kind in ("first", "second"):
                if kind in state and state[kind].shape != parameter.shape:
                    moved = None if carry is None else carry(f"{name}.{kind}".removeprefix("field."), state[kind])
                    state[kind] = torch.zeros_like(parameter) if moved is None else moved
            self.state[parameter] = state
        self._decays = self._level_decays(model)

    def _shared(self, device: torch.device) -> dict[str, Any]:
        """Counters of the whole optimizer; they live in the state of its first parameter."""
        state = self.state[self.param_groups[0]["params"][0]]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.int64, device=device)
            state["skipped"] = torch.zeros((), dtype=torch.int64, device=device)
        return state

    def _moments(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if "first" not in state:
            state["first"], state["second"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update from the gradients, unless one is not finite; nothing is read back."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        device = self.param_groups[0]["params"][0].device
        shared, found_inf = self._shared(device), torch.zeros((), device=device)
        groups = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        if not any(groups):
            return loss
        check_gradients([parameter.grad for touched in groups for parameter in touched], found_inf)
        for group, touched, rule in zip(self.param_groups, groups, self._rules, strict=True):
            rate = torch.tensor(float(group["lr"]), device=device)
            for parameter in touched:
                moments, grad = self._moments(parameter), parameter.grad.contiguous()
                flat = [one.view(-1) for one in (parameter.data, grad, moments["first"], moments["second"])]
                for first, last, decay in self._decays.get(parameter) or [(0, grad.numel(), rule.weight_decay)]:
                    values, grads, mean, square = (one[first:last] for one in flat)
                    state, own = AdamState(mean, square, shared["step"]), replace(rule, weight_decay=decay)
                    adam_update(values, grads, state, rate, rule=own, found_inf=found_inf)
        finish_step(shared["step"], found_inf, skipped=shared["skipped"])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, which however turns counters into the parameters' type."""
        super().load_state_dict(state_dict)
        shared = self._shared(self.param_groups[0]["params"][0].device)
        shared["skipped"] = shared["skipped"].to(torch.int64)

    @property
    def skipped(self) -> int:
        """Steps that were not made because a gradient was not finite; reading it waits for the device."""
        return int(self._shared(self.param_groups[0]["params"][0].device)["skipped"])

    def state_tensors(self) -> dict[str, Tensor]:
        """The state as a native checkpoint holds it, by parameter name."""
        device = self.param_groups[0]["params"][0].device
        shared = self._shared(device)
        tensors = {"step_count": shared["step"], "skipped": shared["skipped"]}
        tensors |= {"scale": torch.ones((), device=device)}
        tensors |= {"good_steps": torch.zeros((), dtype=torch.int32, device=device)}
        for parameter, name in self.names.items():
            moments = self._moments(parameter)
            tensors |= {f"{name}.first": moments["first"], f"{name}.second": moments["second"]}
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state_tensors`, for a native checkpoint too."""
        shared = self._shared(self.param_groups[0]["params"][0].device)
        shared["step"].copy_(tensors["step_count"])
        shared["skipped"].copy_(tensors["skipped"])
        for parameter, name in self.names.items():
            moments = self._moments(parameter)
            moments["first"].copy_(tensors[f"{name}.first"])
            moments["second"].copy_(tensors[f"{name}.second"])
