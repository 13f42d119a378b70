"""How pictures are read: where the pool lives and who hears about progress. One choice for all loaders.

A ContextVar, as the choice of a backend is: every loader reads pictures, and none of them cares where they go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import InputError

Cache = Literal["auto", "memory", "disk"]
Progress = Callable[[int, int], None]  # (pictures read, pictures in all)


@dataclass(frozen=True)
class LoadOptions:
    """`cache`: the pool in memory, or in a memory-mapped file; auto takes the file where memory would not do."""

    cache: Cache = "auto"
    on_progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.cache not in get_args(Cache):
            raise InputError("cache", "one of " + ", ".join(get_args(Cache)), repr(self.cache))


_options: ContextVar[LoadOptions] = ContextVar("nerfturbo_load_options", default=LoadOptions())  # noqa: B039 - frozen


def load_options() -> LoadOptions:
    """The options in force here."""
    return _options.get()


@contextmanager
def loading(options: LoadOptions) -> Iterator[None]:
    """Read the pictures of every scene that is opened inside the block with these options."""
    token = _options.set(options)
    try:
        yield
    finally:
        _options.reset(token)
