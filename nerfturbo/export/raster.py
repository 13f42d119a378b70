"""Triangles to pixels: which triangle each pixel shows, and where inside it. Plain torch, on any device."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 1 << 22  # pixels of the triangles' bounding boxes that are looked at in one go
FREE = torch.iinfo(torch.int64).max


class Fragments(NamedTuple):
    """Of each pixel, row after row; weights of pixels without a triangle are zero."""

    face: Tensor  # (pixels,) int64, -1 for none
    weights: Tensor  # (pixels, 3) of the triangle's corners; they sum to 1


def rasterize(points: Tensor, depths: Tensor, faces: Tensor, size: tuple[int, int]) -> Fragments:
    """What pixels (width, height) show of triangles (m, 3) with corners at pixel positions (n, 2), where the centre of
    pixel (column, row) is (column + 0.5, row + 0.5). The nearest counts; depths (n,) are those along the viewing axis,
    and what is not wholly before the camera is left out. Perspective is in the weights."""
    nearest = torch.full((size[0] * size[1],), FREE, device=points.device)
    for face, pixel, flat in covered(points, depths, faces, size):
        inverse = (flat / depths[faces[face]]).sum(-1)
        order = inverse.reciprocal().float().view(torch.int32).long()  # bits of floats > 0 sort as the floats do
        nearest.scatter_reduce_(0, pixel, (order << 32) + face, "amin")
    found = nearest != FREE
    face = torch.where(found, nearest & 0xFFFFFFFF, -1)
    pixel = found.nonzero()[:, 0]
    weights = points.new_zeros(face.shape[0], 3)
    flat = _barycentric(points[faces[face[pixel]]], pixel, size[0]) / depths[faces[face[pixel]]]
    weights[pixel] = flat / flat.sum(-1, keepdim=True)
    return Fragments(face, weights)


def covered(
    points: Tensor, depths: Tensor, faces: Tensor, size: tuple[int, int]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Part after part: triangles, pixels whose centres lie inside them, and the corners' weights there (k, 3)."""
    corners, limit = points[faces], torch.tensor(size, device=points.device)
    usable = torch.isfinite(corners).flatten(1).all(1) & (depths[faces] > 0.0).all(1)
    corners = corners.nan_to_num().clamp(-1e6, 1e6)
    low = (corners.amin(1) - 0.5).ceil().long().clamp_min(0)
    high = torch.minimum((corners.amax(1) - 0.5).floor().long(), limit - 1)
    sides = (high - low + 1).clamp_min(0) * usable[:, None]
    counts = sides.prod(1)
    ends = counts.cumsum(0)
    first = 0
    while first < faces.shape[0]:
        done = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(torch.searchsorted(ends, done + CHUNK, right=True)))
        face = torch.arange(first, last, device=points.device).repeat_interleave(counts[first:last])
        place = torch.arange(face.shape[0], device=points.device) + done - (ends - counts)[face]
        width = sides[face, 0]
        pixel = (low[face, 1] + place // width) * size[0] + low[face, 0] + place % width
        weights = _barycentric(corners[face], pixel, size[0])
        inside = (weights >= 0.0).all(-1).nonzero()[:, 0]  # nowhere where the area is zero: NaN
        yield face[inside], pixel[inside], weights[inside]
        first = last


def _barycentric(corners: Tensor, pixel: Tensor, width: int) -> Tensor:
    """(k, 3): weights of corners (k, 3, 2) whose mean is the pixel's centre."""
    centre = torch.stack([pixel % width, pixel // width], dim=-1) + 0.5
    x, y = (corners - centre[:, None]).unbind(-1)  # (k, 3) each
    areas = x.roll(-1, 1) * y.roll(-2, 1) - x.roll(-2, 1) * y.roll(-1, 1)
    return areas / areas.sum(-1, keepdim=True)
