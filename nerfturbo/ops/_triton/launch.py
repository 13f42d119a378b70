"""Launching kernels at little cost to the host: `launchable` in place of `triton.jit` for kernels that Python calls.

Triton binds, specialises and looks up every launch anew: 30 to 100 us, where a training step that is not captured makes
twenty of them. Here a launch makes a key out of what Triton specialises on (types, alignment of pointers, integers that
are 1 or divisible by 16, constants) and of the tensors' devices, and hands a kernel known by it straight to its
launcher, pointers as numbers: nothing on that way looks at them again, so a key becomes known only to tensors of the
device that the kernel runs on. Everything else goes Triton's way: the first launch of each key, hooks, callable grids,
other backends than CUDA, and compiling without running.

Triton's parts that this leans on are not public. Where one is missing, `launchable` is `triton.jit`.
"""

import functools
from collections.abc import Callable
from typing import Any

import triton
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ...errors import BackendError

try:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend
    from triton.compiler import CompiledKernel
except ImportError:  # a release of Triton that is built otherwise
    native_specialize_impl = BaseBackend = CompiledKernel = None

_RUN = JITFunction.run  # whoever replaces it, as `precompile` does, wants to see launches


def cdiv(a: int, b: int) -> int:
    """The quotient, rounded up. `triton.cdiv` is made for kernels: calling it costs microseconds."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()


def launchable(function: Any = None, **options: Any) -> Any:
    """`triton.jit` for a kernel that is launched from Python as `kernel[grid](...)`; pointers are named `p_...`."""
    if function is None:
        return functools.partial(launchable, **options)
    if native_specialize_impl is None or knobs.runtime.interpret:
        return triton.jit(function, **options)
    return Kernel(function, **options)


def for_any_count(kernel: Any, *strides: str) -> Any:
    """The same kernel for numbers of rows that change from launch to launch: one binary for all of them. `strides`
    count rows where a tensor is feature-major. Triton compiles anew for those divisible by 16, which is right for
    capacities and wrong for a user's own samples, sixteen steps out of which it would stop one to compile."""
    return launchable(kernel.fn, do_not_specialize=["n"], do_not_specialize_on_alignment=list(strides))


class Kernel(JITFunction):
    """A kernel that remembers, by key, how to launch what has been compiled for it."""

    def __init__(self, function: Any, **options: Any) -> None:
        super().__init__(function, **options)
        self._launchers: dict[int, Callable[..., Any]] = {}  # by device

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        device = driver.active.get_current_device()
        launch = self._launchers.get(device)
        if launch is None:
            launch = self._launchers[device] = self._make_launcher(device)
        return functools.partial(launch, grid)

    def _make_launcher(self, device: int) -> Callable[..., Any]:
        backend = next(part for part in self.device_caches[device] if isinstance(part, BaseBackend))
        if type(backend).get_tensor_specialization is not BaseBackend.get_tensor_specialization:
            return lambda grid, *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)
        stream_of = driver.active.get_current_stream
        return _write_launcher(self, backend, device, lambda: stream_of(device))


def is_unobserved(kernel: Kernel) -> bool:
    """Whether nobody wants to see launches, so that one may go past Triton's own way of launching."""
    runtime = knobs.runtime
    hooks = kernel.pre_run_hooks or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
    return JITFunction.run is _RUN and not hooks


def check_pointers(kernel: str, device: int, pointers: dict[str, Any]) -> None:
    """Every tensor must be on the GPU that the kernel runs on; what is no tensor is left to Triton."""
    for name, value in pointers.items():
        if hasattr(value, "get_device") and value.get_device() != device:
            found = value.device
            raise BackendError(
                f"kernel {kernel} runs on cuda:{device}, but {name[2:]} is on {found}; "
                + ("move it there" if found.type == "cpu" else f"move it there, or use torch.cuda.device('{found}')")
            )


def settings() -> tuple[Any, ...]:
    """What else decides how Triton compiles."""
    runtime = knobs.runtime
    return runtime.debug, runtime.add_stages_inspection_hook, knobs.compilation.instrumentation_mode


def key_source(kernel: Kernel) -> str:
    """Code that makes the key of a launch from arguments of the parameters' names. A pointer's part also leaves its
    address in `at_...`; all else is asked of Triton's own function `_specialize`."""
    parts = []
    for parameter in kernel.params:
        name, aligned = parameter.name, not parameter.do_not_specialize_on_alignment
        if parameter.is_constexpr:
            parts.append(name)
        elif name.startswith("p_"):
            place = f"(at_{name} := {name}.data_ptr()) % {16 if aligned else 1} == 0"
            there = f"({name}.dtype, {name}.get_device(), {place})"
            parts.append(f"(at_{name} := None) if {name} is None else {there}")
        else:
            parts.append(f"_specialize(_backend, {name}, False, {not parameter.do_not_specialize}, {aligned})")
    return "(" + ", ".join(parts) + ", tuple(_options.items()), _settings())"


def _write_launcher(kernel: Kernel, backend: Any, device: int, stream: Callable[[], int]) -> Callable[..., Any]:
    """A function of the kernel's parameters, behind the grid: written out, for Python to bind them."""
    defaults = {p.name: p.default for p in kernel.signature.parameters.values() if p.default is not p.empty}
    names = [p.name for p in kernel.params]
    heads = [f"{name}=default_{name}" if name in defaults else name for name in names]
    pointers = [p.name for p in kernel.params if p.name.startswith("p_") and not p.is_constexpr]
    values = [f"at_{name}" if name in pointers else name for name in names]
    source = f"""
def launch(_grid, {", ".join(heads)}, **_options):
    _key = _compiled = None
    if not callable(_grid) and _is_unobserved(_kernel):
        try:
            _key = {key_source(kernel)}
            _compiled = _known.get(_key)
        except (AttributeError, TypeError):  # a pointer that is no tensor, a constant that is no key
            _key = None
    if _compiled is None:
        _check_pointers(_name, _device, {{{", ".join(f"{name!r}: {name}" for name in pointers)}}})
        _result = _kernel.run({", ".join(names)}, grid=_grid, warmup=False, **_options)
        if _key is not None and isinstance(_result, _CompiledKernel):
            _known[_key] = _result.run, _result.function, _result.packed_metadata, _result
        return _result
    _run, _function, _metadata, _result = _compiled
    _axes = len(_grid)
    _run(
        _grid[0], _grid[1] if _axes > 1 else 1, _grid[2] if _axes > 2 else 1, _stream(), _function, _metadata,
        None, None, None, {", ".join(values)},
    )
    return _result
"""
    namespace: dict[str, Any] = {f"default_{name}": value for name, value in defaults.items()}
    namespace |= {"_kernel": kernel, "_backend": backend, "_stream": stream, "_known": {}, "_settings": settings}
    namespace |= {"_is_unobserved": is_unobserved, "_specialize": native_specialize_impl}
    namespace |= {"_CompiledKernel": CompiledKernel, "_check_pointers": check_pointers}
    namespace |= {"_name": kernel.__name__, "_device": device}
    exec(source, namespace)
    return namespace["launch"]
