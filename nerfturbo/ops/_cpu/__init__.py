"""How the numba kernels of this package are compiled and run on several threads.

A kernel is a plain serial function `kernel(first, last, *arrays)` over a range of items, compiled without the GIL;
`launch` cuts the range into chunks and lets a few Python threads take them in turn. Compared with numba's own
`parallel=True` it compiles several times faster; any number of threads may launch at a time; it works in a forked
child, where an OpenMP pool hangs; and an uneven kernel costs little, since chunks are taken as threads come free. A
launch costs about 20 us more than a call; ranges of one chunk run in the calling thread.

The number of threads is torch's (`torch.set_num_threads`), read at each launch. Which thread takes which chunk must not
change results: kernels write disjoint parts.
"""

import functools
import itertools
import math
import os
import threading
import warnings
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from ...errors import refuse

# "contract" alone (fused multiply-add) is safe: NaN and infinity keep their meaning. Kernels whose decisions must equal
# the reference's to the bit are compiled without it.
CONTRACT = frozenset({"contract"})


def jit(*, exact: bool = False, inner: bool = False, inline: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Compile lazily, once per argument types; division by zero gives infinity as in numpy. Kernels are cached on disk.
    `inner` functions are called by kernels only: they become part of those, without an entry from Python and a cache
    file of their own, which would double the time to compile. `inline` ones are pasted in. Numbers written at a call
    are part of an inner function's type: np.int64(0) in place of 0 keeps numba from compiling it once per number."""
    inner = inner or inline
    compiler: Any = numba.njit  # its stubs do not know all options
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False if exact else set(CONTRACT)}
    options |= {"forceinline": inline, "no_cpython_wrapper": inner, "no_cfunc_wrapper": True}

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return compiler(cache=not inner, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            _warn_uncached()
            return compiler(cache=False, **options)(function)

    return decorate


@functools.cache
def _warn_uncached() -> None:
    message = "compiled kernels cannot be kept, so that every start compiles them: set NUMBA_CACHE_DIR to a folder"
    warnings.warn(f"{message} that can be written", RuntimeWarning, stacklevel=3)


class _Job:
    """One launch: chunks to take, and a gate that the caller waits at until the last helper is through."""

    __slots__ = ("_active", "_chunks", "_closed", "_done", "_lock", "arguments", "error", "grain", "kernel", "n")

    def __init__(self, kernel: Callable[..., None], n: int, grain: int, arguments: tuple[Any, ...]) -> None:
        self.kernel, self.n, self.grain, self.arguments = kernel, n, grain, arguments
        self.error: BaseException | None = None
        self._chunks = itertools.count()
        self._lock, self._done = threading.Lock(), threading.Lock()
        self._active, self._closed = 0, False

    def work(self) -> None:
        while True:
            first = next(self._chunks) * self.grain
            if first >= self.n:
                return
            self.kernel(first, min(first + self.grain, self.n), *self.arguments)

    def help(self) -> None:
        """Called by a helper; one that comes too late finds the gate closed and does nothing."""
        with self._lock:
            if self._closed:
                return
            self._active += 1
        try:
            self.work()
        except BaseException as error:  # handed to the caller, who raises it
            self.error = error
        finally:
            with self._lock:
                self._active -= 1
                if self._closed and self._active == 0:
                    self._done.release()

    def run(self) -> None:
        self._done.acquire()
        try:
            self.work()
        finally:
            with self._lock:
                self._closed = True
                busy = self._active > 0
            if busy:
                self._done.acquire()
            self.arguments = ()  # a helper that comes late would free tensors, which aborts a process that is ending
        if self.error is not None:
            raise self.error


class _Helpers:
    """Threads that sleep until a job comes; they never end, and a forked child starts its own."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._lock = threading.Lock()
        self._count = 0

    def call(self, job: _Job, n: int) -> None:
        if self._count < n:
            with self._lock:
                while self._count < n:
                    threading.Thread(target=self._serve, args=(self._jobs,), name="nerfturbo", daemon=True).start()
                    self._count += 1
        for _ in range(n):
            self._jobs.put(job)

    @staticmethod
    def _serve(jobs: SimpleQueue[_Job]) -> None:
        while True:
            jobs.get().help()


_helpers = _Helpers()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.reset)


def launch(kernel: Callable[..., None], n: int, grain: int, *arguments: Any) -> None:
    """kernel(first, last, *arguments) over range(n), at most `grain` items a call, on torch's number of threads. It
    gets the memory of tensors as arrays (`array`): those it writes must have their elements in order."""
    if n <= 0:
        return
    arguments = tuple(array(value) if isinstance(value, Tensor) else value for value in arguments)
    helpers = min(torch.get_num_threads(), -(-n // grain)) - 1
    if helpers < 1:
        kernel(0, n, *arguments)
        return
    job = _Job(kernel, n, grain, arguments)
    _helpers.call(job, helpers)
    job.run()


_local = threading.local()


def scratch(name: str, *shape: int) -> Tensor:
    """Uninitialised float32 memory of this thread, valid until its next call with the same name. For what never leaves
    an op: fresh memory costs a page fault every 4 KiB, a reused buffer nothing."""
    buffers: dict[str, Tensor] = _local.__dict__
    n = math.prod(shape)
    if name not in buffers or buffers[name].numel() < n:
        buffers[name] = torch.empty(n)
    return buffers[name][:n].view(shape)


def release_scratch() -> None:
    """Give back the memory of this thread's `scratch`; it must not be in use."""
    _local.__dict__.clear()


def array(tensor: Tensor) -> np.ndarray:
    """The tensor's memory as a numpy array, without a copy unless its elements do not lie in order."""
    return tensor.detach().contiguous().numpy()


def as_float32(name: str, tensor: Tensor) -> Tensor:
    """Half precision is widened; float64 belongs to the reference."""
    double, hint = tensor.dtype == torch.float64, "use_backend('reference') carries float64"
    refuse(double, name, "float16, bfloat16 or float32 for backend 'cpu'", "torch.float64", hint)
    return tensor.float()
