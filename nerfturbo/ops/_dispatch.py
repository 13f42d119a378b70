"""THE dispatch point: which backend runs an op. Nothing else in the package decides that. `auto` picks Triton for CUDA
tensors, numba for CPU tensors, and the reference where neither is there. An explicit choice is obeyed or raises; it
never falls back in silence. The choice is a ContextVar, so that a viewer thread may render with one backend while
training runs with another."""

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..errors import BackendError, refuse

Backend = Literal["auto", "reference", "cpu", "triton"]
# (backend, op, function) for which plain torch is as fast as a kernel would be: the reference's function runs. Nothing
# else falls back to it: a kernel that is missing is an error.
_ON_A_CPU = "adam.check_gradients adam.finish_step adam.record_step composite.composite_pixels frame.finish_rays "
_ON_A_CPU += "hash_encode.encode_regions intervals.interval_weights march.decay_and_max mlp.wide_mlp ngp.ngp_query "
_ON_A_CPU += "ngp.skips_unused pixels.camera_rays pixels.read_pixels positions.cone_positions"
_PLAIN_TORCH = {("cpu", *name.split(".")) for name in _ON_A_CPU.split()}
_choice: ContextVar[str | None] = ContextVar("nerfturbo_backend", default=None)


def _check(name: str, origin: str) -> str:
    refuse(name not in get_args(Backend), origin, "one of " + ", ".join(get_args(Backend)), repr(name))
    return name


def current_backend() -> str:
    """The choice in force here: `use_backend`, else NERFTURBO_BACKEND, else "auto"."""
    chosen = _choice.get()
    if chosen is not None:
        return chosen
    # Most often nothing is set, and asking for what is not there costs more than looking whether it is.
    return _check(os.environ["NERFTURBO_BACKEND"], "NERFTURBO_BACKEND") if "NERFTURBO_BACKEND" in os.environ else "auto"


@contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Run every op inside the block on one backend.

    >>> with use_backend("reference"):
    ...     current_backend()
    'reference'
    """
    token = _choice.set(_check(name, "backend"))
    try:
        yield
    finally:
        _choice.reset(token)


@functools.cache
def available(module: str) -> bool:
    """Whether numba or triton can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


@functools.cache
def _warn_reference(device: str) -> None:
    missing = {"cpu": "numba", "cuda": "triton"}.get(device)
    reason = f"{missing} is not installed" if missing else f"there are no kernels for {device!r} tensors"
    warnings.warn(f"nerfturbo runs plain torch ops, many times slower: {reason}", RuntimeWarning, stacklevel=4)


def resolve(tensor: Tensor) -> str:
    """The backend that runs for this tensor: "reference", "cpu" or "triton"."""
    choice, device = current_backend(), tensor.device.type
    if choice == "auto":
        if tensor.dtype.itemsize == 8 and tensor.is_floating_point():
            return "reference"  # float64 is for checking; only the reference carries it
        if device == "cuda" and available("triton"):
            return "triton"
        if device == "cpu" and available("numba"):
            return "cpu"
        _warn_reference(device)
        return "reference"
    if choice == "cpu" and device != "cpu":
        raise BackendError(f"backend 'cpu' needs CPU tensors, got one on {tensor.device}; use 'auto' or 'triton'")
    if choice == "cpu" and not available("numba"):
        raise BackendError("backend 'cpu' needs numba, which is not installed; pip install numba")
    if choice == "triton" and not available("triton"):
        raise BackendError("backend 'triton' needs triton, which is not installed; pip install triton")
    if choice == "triton" and device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise BackendError(
            f"backend 'triton' needs CUDA tensors, got one on {tensor.device}; "
            "set TRITON_INTERPRET=1 before the first import to run the kernels on a CPU, slowly"
        )
    return choice


def implementation(op: str, function: str, tensor: Tensor) -> Callable[..., Any]:
    """The backend's function for `ops/<op>`: same name, same signature, same result in every backend. It computes in
    the types it is given: torch.autocast is off inside, and only `autocast` inputs follow it."""
    found = _load(resolve(tensor), op, function)
    return torch.autocast(tensor.device.type, enabled=False)(found) if _in_autocast(tensor) else found


def _in_autocast(tensor: Tensor) -> bool:
    kind = tensor.device.type
    return kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


def autocast(tensor: Tensor) -> Tensor:
    """A tensor as the layers of torch would read it here: fp32 in autocast's type inside of it, else as it is."""
    if tensor.dtype != torch.float32 or not _in_autocast(tensor):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


@functools.cache
def _load(backend: str, op: str, function: str) -> Callable[..., Any]:
    module = "reference" if (backend, op, function) in _PLAIN_TORCH else backend
    return getattr(importlib.import_module(f".{op}.{module}", package=__package__), function)


@contextmanager
def compile_only(device: torch.device | str) -> Iterator[bool]:
    """Inside, Triton kernels compile side by side and do not run; elsewhere it yields False and changes nothing. For
    code that reads nothing back from the device: what it computes inside is meaningless, and memory that kernels would
    have written is zero. Where this release of Triton cannot do it, kernels compile later, one by one."""
    if torch.device(device).type != "cuda" or resolve(torch.empty(0, device=device)) != "triton":
        yield False
        return
    try:
        module = importlib.import_module("._triton.precompile", __package__)
    except ImportError:  # the parts of Triton and torch it leans on are not public
        yield False
        return
    with module.compile_only():
        yield True
