"""Compile all kernels of a piece of code at once, before it runs for real."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ._dispatch import resolve


@contextmanager
def compile_only(device: torch.device | str) -> Iterator[bool]:
    """Inside, Triton kernels compile side by side and do not run; elsewhere it yields False and changes nothing.

    For code that reads nothing back from the device: what it computes inside is meaningless, and memory that kernels
    would have written is zero. Where this release of Triton cannot do it, kernels compile later, one by one.
    """
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
