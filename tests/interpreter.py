"""Triton's interpreter does the same work in half the time.

At every call of a device function, `tl.sum` and `tl.zeros` among them, it walks all of `triton.language` for what it
has to patch, for each number it builds a table of types, and it scans and reduces element by element. Here a launch
patches once, and an associative function joins whole rows, in a tree as on a GPU. What a kernel computes stays the
same. Another version of Triton may have other insides: then everything stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np


@cache
def hasten() -> None:
    """Call it once, after `TRITON_INTERPRET` is set and before the first kernel runs."""
    import triton.language as tl
    from triton.runtime import interpreter

    needed = ("_patch_lang", "_LangPatchScope", "_get_np_dtype", "ReduceOps", "ScanOps")
    if all(hasattr(interpreter, name) for name in needed):
        interpreter._patch_lang = _once_per_launch(interpreter._patch_lang, interpreter._LangPatchScope, tl)
        interpreter._get_np_dtype = _from_table(interpreter._get_np_dtype, tl)
        interpreter.ScanOps.generic_scan = _scan
        interpreter.ReduceOps.generic_reduce = _reduce


def _once_per_launch(patch: Callable[[Any], Any], scope_type: type, tl: Any) -> Callable[[Any], Any]:
    replacements: dict[tuple[int, ...], list[tuple[object, str, object]]] = {}
    patched: set[int] = set()  # the modules that the running launch has patched
    launch: list[Any] = []  # its scope, which is the first to be asked for and the only one that Triton restores

    class Scope(scope_type):
        def restore(self) -> None:
            super().restore()
            launch.clear()
            patched.clear()

    @cache
    def languages(fn: Any) -> tuple[int, ...]:
        return tuple({id(module): module for module in fn.__globals__.values() if module is tl or module is tl.core})

    def patch_lang(fn: Any) -> Any:
        needed = languages(fn)
        if not launch:
            launch.append(Scope())
        if not needed or not patched.issuperset(needed):
            if needed not in replacements:
                changes = patch(fn)._changes
                replacements[needed] = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
                launch[0]._changes += changes
            else:
                for change in replacements[needed]:
                    launch[0].set_attr(*change)
            patched.update(needed)
        return launch[0]

    return patch_lang


def _from_table(np_dtype: Callable[[Any], Any], tl: Any) -> Callable[[Any], Any]:
    table: dict[str, Any] = {}

    def lookup(dtype: Any) -> Any:
        name = "pointer" if isinstance(dtype.scalar, tl.pointer_type) else dtype.scalar.name
        if name not in table:
            table[name] = np_dtype(dtype)
        return table[name]

    return lookup


def _joined(operation: Any, inputs: Any, first: list[np.ndarray], second: list[np.ndarray]) -> list[np.ndarray]:
    """The rows `first` and those that come after them, joined by the function of a scan or a reduction."""
    tensors = [[operation.to_tensor(r, i.dtype) for r, i in zip(rows, inputs, strict=True)] for rows in (first, second)]
    found = operation.combine_fn.fn(*tensors[0], *tensors[1])
    found = found if isinstance(found, tuple) else (found,)
    return [one.handle.data.astype(rows.dtype) for one, rows in zip(found, first, strict=True)]


def _scan(operation: Any, inputs: Any) -> list[Any]:
    rows = [np.moveaxis(one.handle.data, operation.axis, 0) for one in inputs]
    step = 1
    while step < len(rows[0]):  # blocks stay whole: their sizes are powers of two
        earlier = [np.concatenate([one[:step], one[:-step]]) for one in rows]
        joined = _joined(operation, inputs, earlier, rows)
        rows = [np.concatenate([one[:step], new[step:]]) for one, new in zip(rows, joined, strict=True)]
        step *= 2
    rows = [np.moveaxis(one, 0, operation.axis) for one in rows]
    return [operation.to_tensor(one, given.dtype) for one, given in zip(rows, inputs, strict=True)]


def _reduce(operation: Any, inputs: Any) -> list[Any]:
    flat, axis = operation.unravel(inputs, operation.axis)
    rows = [np.moveaxis(one.handle.data, axis, 0) for one in flat]
    while len(rows[0]) > 1:
        rows = _joined(operation, flat, [one[0::2] for one in rows], [one[1::2] for one in rows])
    found = [one[0] for one in rows]
    if operation.keep_dims:
        n_dims = inputs[0].handle.data.ndim if operation.axis is None else 1
        found = [np.expand_dims(one, tuple(range(n_dims)) if operation.axis is None else axis) for one in found]
    return [operation.to_tensor(one, given.dtype) for one, given in zip(found, flat, strict=True)]
