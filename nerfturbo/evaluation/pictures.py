"""Pictures for people: a render beside the truth and beside where it errs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..data.images import save_image, to_bytes

ERROR_AT_FULL = 0.25  # a mean absolute colour error of this much gets the ramp's last colour
# Dark to light, so that it reads in grey too: black, violet, red-orange, yellow, near white.
_RAMP = ((0.0, 0.0, 0.02), (0.32, 0.07, 0.48), (0.85, 0.28, 0.32), (0.99, 0.68, 0.25), (0.99, 0.99, 0.80))


def error_colors(render: Tensor, truth: Tensor) -> Tensor:
    """(height, width, 3): the mean absolute error over the channels as a colour."""
    return ramp_colors((render - truth).abs().mean(-1) / ERROR_AT_FULL)


def ramp_colors(values: Tensor) -> Tensor:
    """(..., 3): numbers from 0 (dark) to 1 (light) as colours."""
    places = values.clamp(0.0, 1.0) * (len(_RAMP) - 1)
    ramp = torch.tensor(_RAMP, device=values.device)
    low = places.floor().long().clamp(max=len(_RAMP) - 2)
    part = (places - low)[..., None]
    return ramp[low] * (1.0 - part) + ramp[low + 1] * part


def comparison(render: Tensor, truth: Tensor) -> Tensor:
    """(height, 3 width, 3) uint8 on the CPU: truth, render and error side by side, for `save_image`."""
    return to_bytes(torch.cat([truth, render, error_colors(render, truth)], dim=1)).cpu()


def save_comparison(path: Path, render: Tensor, truth: Tensor) -> None:
    """Write truth, render and error side by side, each a third of the width."""
    save_image(path, comparison(render, truth))


def load_comparison(path: Path) -> tuple[bytes, bytes, bytes]:
    """The three pictures of a comparison as small files for a page: WebP, at most 480 pixels wide."""
    import io

    from PIL import Image

    parts = []
    with Image.open(path) as image:
        width, height = image.width // 3, image.height
        for third in range(3):
            part = image.convert("RGB").crop((third * width, 0, (third + 1) * width, height))
            part.thumbnail((480, 480), Image.Resampling.LANCZOS)
            buffer = io.BytesIO()
            part.save(buffer, "WEBP", quality=90, method=4)
            parts.append(buffer.getvalue())
    return parts[0], parts[1], parts[2]
