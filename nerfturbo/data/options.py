"""How a scene is opened: one choice, handed from `load_scene` down to every loader."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast, get_args

from ..config import DataConfig
from ..errors import InputError, refuse

Bounds = Literal["auto", "bounded", "unbounded", "ndc"]
Up = Literal["auto", "x", "y", "z", "-x", "-y", "-z", "mean"]
Cache = Literal["auto", "memory", "disk"]
Progress = Callable[[int, int], None]  # (images read, images in all)


@dataclass(frozen=True)
class LoadOptions:
    """What `load_scene` can be told; the command line's `data.*` values and a few flags."""

    downscale: int = 1  # divides width and height of the images; each new pixel is the mean of the old ones
    bounds: Bounds = "auto"
    """bounded (object), unbounded (outdoor, 360), or ndc (forward-facing, in normalised device coordinates); auto
    decides from alpha and the borders of the images, the file's own box, its cameras and its points."""
    allow_outside: bool = False  # whether files may name images outside the folder: where you trust their author
    cache: Cache = "auto"  # pixels in memory, or in a file that later loads find again; auto: where memory is short
    on_progress: Progress | None = None  # hears how many images have been read
    up: Up = "auto"  # the file's axis that becomes +z; mean: bounds and up by the points and the mean up axis alone

    def __post_init__(self) -> None:
        if isinstance(self.downscale, bool) or not isinstance(self.downscale, int) or self.downscale < 1:
            raise InputError("downscale", "an integer >= 1", repr(self.downscale))
        for name, allowed in (("bounds", get_args(Bounds)), ("cache", get_args(Cache)), ("up", get_args(Up))):
            refuse(getattr(self, name) not in allowed, name, "one of " + ", ".join(allowed), repr(getattr(self, name)))

    @classmethod
    def of(cls, data: DataConfig, on_progress: Progress | None = None) -> "LoadOptions":
        """What a config asks for."""
        extent, up = cast(tuple[Bounds, Up], data.placing)
        return cls(data.downscale, extent, data.allow_outside, data.cache, on_progress, up)


DEFAULTS = LoadOptions()
