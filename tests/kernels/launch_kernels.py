"""Launches by a driver that runs nothing, compared with Triton's own; a script, since interpreted kernels have none.

Prints the name of each check that holds.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nerfturbo.errors import BackendError
from nerfturbo.ops._triton import launch as _launch
from nerfturbo.ops._triton.launch import Kernel, launchable

launched: list[tuple[Any, ...]] = []  # grid, stream, function, and what follows the hooks
compiling: list[str] = []  # launches that went through Triton


class Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = source.fn.__name__

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any) -> None:
        launched.append(((x, y, z), stream, function, packed, rest[3:]))


class Binaries:
    loaded = itertools.count(1)

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        return 1, next(self.loaded), 0, 0, 1024  # module, function, registers, spills, most threads

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 17}


class Driver:
    utils, launcher_cls, stream = Binaries(), Launcher, 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return self.stream


@launchable(do_not_specialize=["n"], do_not_specialize_on_alignment=["m", "p_loose"])
def _some_kernel(p_in, p_loose, p_out, n, m, strides, factor, BLOCK: tl.constexpr, KIND: tl.constexpr = None):
    i = tl.arange(0, BLOCK)
    value = tl.load(p_in + i * strides[0], mask=i < n, other=0.0) * factor
    if p_loose is not None:
        value += tl.load(p_loose + i)
    tl.store(p_out + i * strides[1], value, mask=i < m)


MEMORY = torch.zeros(256)
PLAIN = {
    "p_in": MEMORY, "p_loose": MEMORY, "p_out": MEMORY, "n": 48, "m": 48, "strides": (1, 2), "factor": 0.5, "BLOCK": 64,
}  # fmt: skip
# What each argument may be instead: some of these Triton compiles for, some it does not.
OTHERS = {
    "p_in": [MEMORY[1:], MEMORY[4:], MEMORY.half(), MEMORY.int(), MEMORY.bool(), torch.zeros(0)],
    "p_loose": [None, MEMORY[1:], MEMORY.half()],
    "p_out": [MEMORY[2:], torch.nn.Parameter(MEMORY), MEMORY.to(torch.bfloat16)],
    "n": [1, 16, 17, 1 << 40, 0],
    "m": [1, 16, 17, 1 << 40, 0],
    "strides": [(1, 1), (2, 2), (16, 2), (32, 2), (1 << 40, 2), (0, 2)],
    "factor": [0.0, 1.0, 1],
    "BLOCK": [32],
    "KIND": [tl.float16, "text"],
    "num_warps": [1, 2],
}


def key_of(kernel: Kernel, arguments: dict[str, Any]) -> Any:
    names = {p.name for p in kernel.params}
    backend = kernel.device_caches[0][3]
    space = {"_specialize": _launch.native_specialize_impl, "_backend": backend, "_settings": _launch.settings}
    space |= {"KIND": None} | {k: v for k, v in arguments.items() if k in names}
    return eval(
        _launch.key_source(kernel), space | {"_options": {k: v for k, v in arguments.items() if k not in names}}
    )


def tritons_key(kernel: Kernel, arguments: dict[str, Any]) -> Any:
    _, specialization, options = kernel.device_caches[0][-1](**arguments)
    return repr(specialization), repr(options)


def keys_tell_apart_what_triton_tells_apart() -> None:
    every = [PLAIN] + [PLAIN | {name: value} for name, values in OTHERS.items() for value in values]
    own, theirs = [key_of(_some_kernel, one) for one in every], [tritons_key(_some_kernel, one) for one in every]
    same = 0
    for a, b in itertools.combinations(range(len(every)), 2):
        assert (own[a] == own[b]) == (theirs[a] == theirs[b]), (every[a], every[b])
        same += own[a] == own[b]
    assert same > 5 and len(set(own)) > 15


def a_known_kernel_is_launched_as_triton_launches_it() -> None:
    for arguments in (PLAIN, PLAIN | {"p_in": MEMORY[1:]}, PLAIN | {"p_loose": None}, PLAIN | {"m": 1, "num_warps": 1}):
        del launched[:], compiling[:]
        for grid in ((3,), (3, 2), (3, 2, 5)):
            results = {_some_kernel[grid](**arguments) for _ in range(3)}
            assert len(results) == 1
        assert compiling == ["_some_kernel"], compiling  # the first time
        _some_kernel.run(**arguments, grid=(3,), warmup=False)
        reference = launched.pop()
        assert len(launched) == 9 and [one[0] for one in launched[::3]] == [(3, 1, 1), (3, 2, 1), (3, 2, 5)]
        for one in launched[1:3]:
            assert one[:4] == reference[:4]
            for mine, theirs in zip(one[4], reference[4], strict=True):
                assert mine == (theirs.data_ptr() if isinstance(theirs, torch.Tensor) else theirs)


def launches_go_to_the_stream_of_the_moment() -> None:
    for Driver.stream in (8, 9):
        _some_kernel[(1,)](**PLAIN)
        assert launched[-1][1] == Driver.stream


def who_watches_launches_sees_them() -> None:
    def through_triton() -> bool:
        del compiling[:]
        _some_kernel[(1,)](**PLAIN)
        return compiling == ["_some_kernel"]

    assert not through_triton()
    for hooks in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hooks.add(seen := [].append)
        assert through_triton()
        hooks.remove(seen)
    _some_kernel.add_pre_run_hook(lambda *args, **kwargs: None)
    assert through_triton()
    _some_kernel.pre_run_hooks.clear()
    run, JITFunction.run = JITFunction.run, lambda self, *args, **kwargs: compiling.append("replaced")
    _some_kernel[(1,)](**PLAIN)
    assert compiling[-1] == "replaced"
    JITFunction.run = run
    assert not through_triton()


def callable_grids_and_wrong_arguments_are_tritons() -> None:
    _some_kernel[lambda meta: (meta["BLOCK"],)](**PLAIN)
    assert launched[-1][0] == (64, 1, 1)
    for wrong in (PLAIN | {"unknown": 1}, {"n": 3}):
        try:
            _some_kernel[(1,)](**wrong)
        except (KeyError, TypeError):
            continue
        raise AssertionError("wrong arguments launched a kernel")


def a_tensor_of_elsewhere_is_refused() -> None:
    """By name; and a device is part of the key, so that what is known for one is not for another."""
    refuse("some", 0, {"p_in": Elsewhere(0), "p_out": None})
    for found, hint in ((Elsewhere(-1), "move it there"), (Elsewhere(1), "torch.cuda.device('cuda:1')")):
        try:
            refuse("some", 0, {"p_in": Elsewhere(0), "p_out": found})
        except BackendError as error:
            assert f"cuda:0, but out is on {found.device}; " in str(error) and str(error).endswith(hint)
        else:
            raise AssertionError("a tensor of elsewhere passed")
    checked: list[dict[str, Any]] = []
    own = Kernel(_some_kernel.fn)
    own[(1,)]  # writes the launcher
    own._launchers[0].__globals__["_check_pointers"] = lambda kernel, device, pointers: checked.append(pointers)
    for there in (0, 0, 1, 1):
        own[(1,)](**PLAIN | {"p_in": Moved(MEMORY, there)})
    assert [one["p_in"].there for one in checked] == [0, 1]  # each device once: its key is another
    assert list(checked[0]) == ["p_in", "p_loose", "p_out"]


class Elsewhere:
    def __init__(self, index: int) -> None:
        self.index, self.device = index, torch.device("cpu") if index < 0 else torch.device("cuda", index)

    def get_device(self) -> int:
        return self.index


class Moved:
    """A tensor that says it is on another device."""

    def __init__(self, tensor: torch.Tensor, there: int) -> None:
        self.tensor, self.there, self.dtype = tensor, there, tensor.dtype

    def data_ptr(self) -> int:
        return self.tensor.data_ptr()

    def get_device(self) -> int:
        return self.there


def watch_triton() -> None:
    run = JITFunction.run

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiling.append(self.__name__)
        return run(self, *args, **kwargs)

    JITFunction.run = _launch._RUN = watched


CHECKS: list[Callable[[], None]] = [
    keys_tell_apart_what_triton_tells_apart,
    a_known_kernel_is_launched_as_triton_launches_it,
    launches_go_to_the_stream_of_the_moment,
    who_watches_launches_sees_them,
    callable_grids_and_wrong_arguments_are_tritons,
    a_tensor_of_elsewhere_is_refused,
]

if __name__ == "__main__":
    driver.set_active(Driver())
    refuse, _launch.check_pointers = _launch.check_pointers, lambda *_: None  # these tensors are the CPU's
    watch_triton()
    for check in CHECKS:
        check()
        print(check.__name__)
