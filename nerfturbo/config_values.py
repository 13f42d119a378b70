"""Dataclasses to plain JSON values and back, every value checked against its type hint."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal

from .errors import InputError


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain JSON values."""
    return dataclasses.asdict(config)


def from_dict(kind: type[Any], values: dict[str, Any], path: str = "config") -> Any:
    """The inverse of `to_dict`; unknown names and wrong types are named. Missing names take their default."""
    if not isinstance(values, dict):
        raise InputError(path, "an object", type(values).__name__)
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise InputError(f"{path}.{unknown[0]}", "one of " + ", ".join(sorted(hints)), repr(unknown[0]))
    arguments = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]):
            arguments[name] = from_dict(typing.cast(type, hints[name]), value, f"{path}.{name}")
        else:
            arguments[name] = _checked(hints[name], value, f"{path}.{name}")
    return kind(**arguments)


def _checked(hint: Any, value: Any, path: str) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for option in options:
        if typing.get_origin(option) is Literal and value in typing.get_args(option):
            return value
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if option is type(None) and value is None:
            return value
        if isinstance(option, type) and type(value) is option:
            return value
        if typing.get_origin(option) is tuple and isinstance(value, list | tuple):  # JSON knows lists alone
            return tuple(_checked(typing.get_args(option)[0], item, path) for item in value)
    raise InputError(path, " or ".join(map(_in_words, options)), repr(value))


def _in_words(option: Any) -> str:
    """What a value of this type is called.

    >>> _in_words(int), _in_words(Literal["warn", "stop"]), _in_words(tuple[float, ...])
    ('a whole number', "'warn' or 'stop'", 'a list, each a number')
    """
    if typing.get_origin(option) is Literal:
        return " or ".join(map(repr, typing.get_args(option)))
    if typing.get_origin(option) is tuple:
        return f"a list, each {_in_words(typing.get_args(option)[0])}"
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(option, str(option))
