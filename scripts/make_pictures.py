"""Draw the pictures of the documentation: docs/images/scenes.png, four views of each built-in scene.

python scripts/make_pictures.py [--output docs/images] [--size 220]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from PIL import Image

from nerfturbo.config import BUILTIN_SCENES
from nerfturbo.data.builtin import CAMERA_DISTANCE, FIELD_OF_VIEW, _render
from nerfturbo.data.cameras import Cameras, look_at
from nerfturbo.data.images import composite_over

AZIMUTHS = {"toybox": (-125.0, -55.0, 35.0, 130.0)}
ELEVATIONS = (22.0, 34.0, 16.0, 48.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    parser.add_argument("--size", type=int, default=220, help="pixels of one view")
    args = parser.parse_args()
    rows = [torch.cat(list(views(name, args.size)), dim=1) for name in BUILTIN_SCENES]
    sheet = (torch.cat(rows, dim=0) * 255.0 + 0.5).to(torch.uint8)
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "scenes.png"
    # 256 colours of its own, dithered: a third of the size, and the eye sees no difference.
    Image.fromarray(sheet.numpy()).quantize(256, method=Image.Quantize.MEDIANCUT).save(path, optimize=True)
    print(f"{path}: {sheet.shape[1]}x{sheet.shape[0]}, {path.stat().st_size / 1024:.0f} KB")


def views(name: str, size: int) -> torch.Tensor:
    """(n, size, size, 3): the scene on white, from chosen places; rendered twice as large and averaged."""
    azimuths = AZIMUTHS.get(name, (-60.0, 30.0, 120.0, 200.0))
    eyes = [
        (math.cos(a) * math.cos(e), math.sin(a) * math.cos(e), math.sin(e))
        for a, e in zip(map(math.radians, azimuths), map(math.radians, ELEVATIONS), strict=True)
    ]
    poses = look_at(CAMERA_DISTANCE * torch.tensor(eyes), torch.zeros(3))
    cameras = Cameras.pinhole(poses, width=2 * size, height=2 * size, field_of_view_x=FIELD_OF_VIEW)
    pictures = composite_over(torch.from_numpy(_render(name, cameras)).float() / 255.0, 1.0)
    return pictures.reshape(-1, size, 2, size, 2, 3).mean((2, 4))


if __name__ == "__main__":
    main()
