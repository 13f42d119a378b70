"""The flags that every measurement of a training has."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import tyro

from .settings import Settings


@dataclass(frozen=True)
class TrainingArgs:
    """A scene, a config, a device."""

    scene: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")] = "builtin:toybox"
    """A scene folder, or a built-in scene by name."""
    preset: str = "auto"
    """Where the values below come from; auto chooses by device."""
    downscale: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Divide the width and height of every picture by this."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU where there is one."""
    json: bool = False
    """Print the result on stdout instead of the table."""
    settings: Annotated[Settings, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Settings)
