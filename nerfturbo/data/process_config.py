"""How the poses of photos and videos are found: what `nerfturbo process` can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CameraChoice = Literal[
    "auto", "SIMPLE_PINHOLE", "PINHOLE", "SIMPLE_RADIAL", "RADIAL", "OPENCV", "FULL_OPENCV", "OPENCV_FISHEYE"
]


@dataclass(frozen=True)
class ProcessConfig:
    """How the poses of photos and videos are found (`nerfturbo process`); the defaults fit phones and cameras."""

    frames: int | None = None
    """Frames to take from a video: the sharpest of as many equal windows. Three a second, 30 to 200, unless given."""
    matcher: Literal["auto", "exhaustive", "sequential"] = "auto"
    """Which pictures are compared: all pairs, or neighbours in the order of names; auto decides by their number."""
    camera_model: CameraChoice = "auto"
    """COLMAP's lens model: auto takes OPENCV for 20 or more pictures of one camera, else SIMPLE_RADIAL."""
    max_size: int = 1600
    """Features are looked for in pictures of at most this many pixels a side."""
    max_features: int | None = None
    """Features per picture; 4096 on a CPU and 8192 on a GPU unless given."""
    tool: Literal["auto", "colmap", "pycolmap"] = "auto"
    """The program colmap or the package pycolmap; auto takes the first that is installed."""
