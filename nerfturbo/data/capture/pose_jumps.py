"""Cameras that jump: between two neighbours of a smooth walk the direction of view turns around.

Frames of a video turn by a few degrees from one to the next. Where a thing looks the same from several sides (a label
that is printed twice, a chair, a tower), structure from motion may take one side for the other: pictures of both then
get places on one side, every feature of the thing fits, and what lies behind it does not. No error of reprojection
tells, but the walk does: at the seam it jumps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

LEAST_PICTURES = 20
SMOOTH = 15.0  # degrees between neighbours, in the median: otherwise there is no walk to speak of
LARGE = 60.0  # degrees
TIMES = 8.0  # the median
MOST = 0.1  # of all steps: a walk with more is not smooth


class Jump(NamedTuple):
    """Between pictures `index` and `index + 1`."""

    index: int
    degrees: float


def camera_jumps(poses: Tensor) -> tuple[list[Jump], float]:
    """Jumps of a walk that is smooth elsewhere, and its median step in degrees; `poses` (n, 3 or 4, 4), in its order.

    >>> import torch
    >>> angle = torch.tensor([0.1 * k + (2.5 if k >= 12 else 0.0) for k in range(24)])
    >>> poses = torch.eye(4).repeat(24, 1, 1)
    >>> poses[:, 0, 2], poses[:, 2, 2] = angle.sin(), angle.cos()
    >>> jumps, step = camera_jumps(poses)
    >>> [(jump.index, round(jump.degrees)) for jump in jumps], round(step)
    ([(11, 149)], 6)
    """
    if poses.shape[0] < LEAST_PICTURES:
        return [], 0.0
    forward = torch.nn.functional.normalize(poses[:, :3, 2].double(), dim=-1)
    steps = (forward[1:] * forward[:-1]).sum(-1).clamp(-1.0, 1.0).arccos().rad2deg()
    median = float(steps.median())
    found = [
        Jump(index, float(steps[index])) for index in (steps > max(LARGE, TIMES * median)).nonzero()[:, 0].tolist()
    ]
    return ([] if median > SMOOTH or len(found) > MOST * steps.shape[0] else found), median


def jump_notes(poses: Tensor, files: Sequence[Path]) -> tuple[str, ...]:
    """What to say about pictures whose cameras jump, each folder in the order of its names."""
    found: list[tuple[Jump, list[int], float]] = []
    for folder in sorted({file.parent for file in files}):
        order = sorted(
            (index for index, file in enumerate(files) if file.parent == folder), key=lambda i: files[i].name
        )
        jumps, median = camera_jumps(poses[order])
        found += [(jump, order, median) for jump in jumps]
    if not found:
        return ()
    jump, order, median = max(found, key=lambda one: one[0].degrees)
    first, second = (files[order[jump.index + k]].name for k in (0, 1))
    more = f" (and at {len(found) - 1} more places)" if len(found) > 1 else ""
    return (
        f"warning: the camera turns by {jump.degrees:.0f} degrees between {first} and {second}{more}, "
        f"elsewhere by {median:.0f}: where these are frames of one video, two sides of something were taken for one, "
        "and what lies behind it will not fit (nerfturbo process VIDEO then places frames by their neighbours alone)",
    )
