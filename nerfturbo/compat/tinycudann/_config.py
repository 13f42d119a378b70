"""Reading tiny-cuda-nn's JSON-style configurations: names in any case, values checked, unknown ones named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import InputError


class Config:
    """One component's settings, and where they stand in the whole configuration."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        if not isinstance(values, Mapping):
            raise InputError(where, "a dictionary of settings", type(values).__name__)
        self.values, self.where = values, where

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def kind(self, default: str) -> str:
        return str(self.values.get("otype", default)).lower()

    def integer(self, name: str, default: int, least: int = 1) -> int:
        value = self.values.get(name, default)
        if isinstance(value, bool) or int(value) != value or value < least:
            raise InputError(f"{self.where}.{name}", f"a whole number, at least {least}", repr(value))
        return int(value)

    def number(self, name: str, default: float) -> float:
        return float(self.values.get(name, default))

    def choice(self, name: str, default: str, choices: dict[str, Any]) -> Any:
        value = str(self.values.get(name, default)).lower()
        if value not in choices:
            raise InputError(f"{self.where}.{name}", "one of " + ", ".join(choices), repr(self.values.get(name)))
        return choices[value]
