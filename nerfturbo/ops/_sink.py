"""What the ops share of autograd: their nodes, gradients that stay out of it, and rows past a device count."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import InputError, refuse


class Node(torch.autograd.Function):
    """Differentiable once; its backward returns the gradients of its first inputs, the others have none."""

    def __init_subclass__(cls) -> None:
        own: Any = cls.backward

        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            found = own(ctx, *grads)
            return (*found, *(None,) * (len(ctx.needs_input_grad) - len(found)))

        whole: Any = staticmethod(once_differentiable(backward))
        cls.backward = whole


class _Linear(Node):
    @staticmethod
    def forward(ctx: Any, values: Tensor, run: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back, ctx.dtype = back, values.dtype
        return run(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (ctx.back(grad).to(ctx.dtype),)


def linear(values: Tensor, run: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """run(values), a linear function; `back`, its transpose, makes the gradient of the values from the result's."""
    return _Linear.apply(values, run, back)


@dataclass
class Held:
    """While it is `on`, backwards of tables wait here: a buffer, and what adds to its rows first ... last - 1."""

    on: bool = False
    waiting: list[tuple[Tensor, Callable[[int, int], None]]] = field(default_factory=list)

    def release(self) -> list[tuple[Tensor, Callable[[int, int], None]]]:
        """What waited, in the order in which it came; the next backward runs at once."""
        waiting, self.waiting, self.on = self.waiting, [], False
        return waiting


@dataclass(frozen=True)
class GradientSink:
    """Where a backward adds the gradients of parameters, instead of handing new tensors to autograd. A hash table of 12
    M numbers makes that worth it: no allocation, no zero fill and no addition per step. Usually the buffers are the
    parameters' own `.grad`, allocated once and zeroed by `adam_update`; gradients add up over several backwards until
    then, as they do in autograd. For a parameter with a buffer autograd sees no gradient at all: `torch.autograd.grad`
    on it finds none and its hooks do not run, so data-parallel wrappers must reduce the buffers. `found_inf`, a () or
    (1,) fp32 tensor, is set to 1 when a non-finite gradient comes in; nothing here clears it. With `thin` > 0 a
    backward may leave small gradients out at random and enlarge others, so that the mean stays."""

    buffers: tuple[Tensor, ...]  # one per parameter, of its shape, contiguous: fp32, or fp16 for a hash table
    found_inf: Tensor | None = None
    thin: float = 0.0
    held: Held | None = None  # of a hash table

    def add(self, to_rows: Callable[[int, int], None]) -> None:
        """Add to all rows of the one buffer: now, or later where it is held."""
        if self.held is not None and self.held.on:
            self.held.waiting.append((self.buffers[0], to_rows))
        else:
            to_rows(0, self.buffers[0].shape[0])

    def take(self, parts: Sequence[Tensor], *, finite: bool) -> None:
        """Add gradients that were summed beside the buffers, and raise the flag where one was not finite."""
        for buffer, part in zip(self.buffers, parts, strict=False):
            buffer.add_(part)
        if self.found_inf is not None and not finite:
            self.found_inf.fill_(1.0)


def check_sink(sink: GradientSink | None, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
    """That a sink, if there is one, has a buffer for each parameter."""
    if sink is None:
        return
    if len(sink.buffers) != len(parameters):
        raise InputError("sink.buffers", f"{len(parameters)} tensors, one per parameter", str(len(sink.buffers)))
    for name, buffer, parameter in zip(names, sink.buffers, parameters, strict=True):
        same = buffer.shape == parameter.shape and buffer.device == parameter.device
        if not same or not buffer.is_contiguous() or not buffer.is_floating_point():
            got = f"{tuple(buffer.shape)} {buffer.dtype} on {buffer.device}"
            wanted = f"a contiguous floating tensor {tuple(parameter.shape)} on {parameter.device}"
            raise InputError(f"sink buffer of {name}", wanted, got)
        refuse(buffer.requires_grad, f"sink buffer of {name}", "a tensor without gradient", "requires_grad=True")


class _Redirect(torch.autograd.Function):
    """The value to read, with gradient to the parameter: by autograd, or added to the one buffer of a sink."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: Tensor | None, sink: GradientSink | None) -> Tensor:
        ctx.dtype, ctx.sink = parameter.dtype, sink
        return (parameter if value is None else value).view_as(parameter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sink is None:
            return grad.to(ctx.dtype), None, None  # parameter, value, sink
        buffer, found_inf = ctx.sink.buffers[0], ctx.sink.found_inf
        if found_inf is not None:
            found_inf.copy_(torch.where(torch.isfinite(grad).all(), found_inf, torch.ones_like(found_inf)))
        ctx.sink.add(lambda first, last: buffer[first:last].add_(grad[first:last]))
        return None, None, None


def redirect(parameter: Tensor, value: Tensor | None = None, sink: GradientSink | None = None) -> Tensor:
    """`value` (None: the parameter itself) with a straight-through gradient to `parameter` or the sink's one buffer."""
    return parameter if value is None and sink is None else _Redirect.apply(parameter, value, sink)


def redirect_all(parameters: Sequence[Tensor], sink: GradientSink | None) -> list[Tensor]:
    if sink is None:
        return list(parameters)
    return [redirect(p, sink=GradientSink((b,), sink.found_inf)) for p, b in zip(parameters, sink.buffers, strict=True)]


def zero_tail(value: Tensor, n_used: Tensor | None) -> Tensor:
    """Rows from the device count `n_used` on become zero, and so does the gradient they receive and pass on."""
    if n_used is None:
        return value
    used = torch.arange(value.shape[0], device=value.device) < n_used
    return torch.where(used.view(-1, *[1] * (value.dim() - 1)), value, value.new_zeros(()))


def check_count(n_used: Tensor | None, device: torch.device) -> None:
    if n_used is None:
        return
    if n_used.numel() != 1 or n_used.dtype != torch.int32 or n_used.device != device:
        got = f"{tuple(n_used.shape)} {n_used.dtype} on {n_used.device}"
        raise InputError("n_used", f"one int32 on {device}", got, "pass samples.n_samples")
