"""Compile without running: launches inside the block only hand their kernels to a pool of compiling threads. Triton
compiles a kernel when it is first launched, half a minute for a training step. Since a step reads nothing back, its
Python code can run once with every launch left out; then all kernels compile side by side. Memory that the launches
would have written is zero meanwhile, so that whatever torch does with it, an index above all, stays in bounds."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

MAX_THREADS = 16
# What hands out memory as it is. A dispatch mode would see more, but using one imports torch's compiler, for seconds.
_EMPTY = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"))


@contextmanager
def zeroed_memory() -> Iterator[None]:
    """Inside, fresh memory is zero."""

    def zeroing(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def fresh(*args: Any, **kwargs: Any) -> torch.Tensor:
            memory = original(*args, **kwargs)
            with torch.no_grad():  # one that wants a gradient, as torch's checkpoints make it, may be zeroed too
                return memory.zero_()

        return fresh

    with ExitStack() as stack:
        for owner, name in _EMPTY:
            original = getattr(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, zeroing(original))
        yield


@contextmanager
def compile_only() -> Iterator[None]:
    """Inside, launches compile and do not run; at the end of the outermost block everything is compiled."""
    if _async_compile.active_mode.get() is not None:
        yield
        return
    launch = JITFunction.run
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool, _async_compile.AsyncCompileMode(pool) as mode:

        def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            token = _async_compile.active_mode.set(mode)  # backward runs in a thread of its own
            try:
                return launch(self, *args, grid=grid, warmup=True, **kwargs)
            finally:
                _async_compile.active_mode.reset(token)

        JITFunction.run = run  # type: ignore[method-assign]
        try:
            with zeroed_memory():
                yield
        finally:
            JITFunction.run = launch  # type: ignore[method-assign]
