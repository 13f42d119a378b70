"""Splats to pixels, as 3D Gaussian Splatting draws them, differentiable to every value of a splat.

A Gaussian is projected by the derivative of the perspective at its middle, and widened by 0.3 pixels. Its alpha at a
pixel's centre is its opacity times the Gaussian there, at most 0.99 and nothing below 1/255. Pixels are composited from
near to far until less than 0.0001 of the light is left. Tiles only say who draws what: they change no value.

`composite` here is plain torch, which float64 can check; `cpu.py` and `triton.py` have the same as kernels.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...data.cameras import Cameras, opengl_to_opencv, rotations
from ...ops._dispatch import resolve
from ...ops._sink import Node
from ...ops.spherical_harmonics import spherical_harmonics
from . import WIDTHS

NEAR = 0.01  # what is nearer to the camera's plane is not drawn
LOW_PASS = 0.3  # pixels squared that are added to the variance on the picture
LEAST_ALPHA, MOST_ALPHA = 1.0 / 255.0, 0.99
LAST_LIGHT = 1e-4
BEYOND = 0.15  # focal lengths outside the picture, from where splats are not drawn: large ones would veil all of it
TILE = 16


def render(splats: Tensor, camera: Cameras) -> Tensor:
    """(height, width, 4): red, green, blue without a background, and opacity, of splats (n, 59) in a pinhole camera."""
    width, height = camera.size[0].tolist()
    values, depths = project(splats, camera)
    if (backend := resolve(values)) == "reference":
        return composite(values, depths, (width, height))
    return _Composite.apply(values, depths, (width, height), import_module(f".{backend}", __package__))


class _Composite(Node):
    """`composite` by the kernels of a module."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, depths: Tensor, size: tuple[int, int], kernels: Any) -> Tensor:
        ctx.kernels, lists = kernels, (values, *tile_lists(values, depths, size, kernels.TILE))
        out, stops = values.new_empty(size[1], size[0], 4), lists[1].new_empty(size[1], size[0])
        kernels.forward(*lists, out, stops)
        ctx.save_for_backward(*lists, stops, out[..., 3].clone())
        out[..., 3] = 1.0 - out[..., 3]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
        return (ctx.kernels.backward(*ctx.saved_tensors, grad),)


def project(splats: Tensor, camera: Cameras) -> tuple[Tensor, Tensor]:
    """(n, 9): middle on the picture 2, inverse covariance (xx, xy, yy) there 3, opacity, colour 3; and depths (n,). Of
    splats that are not ahead of the camera, or beside its picture, the opacity is zero."""
    points, base, rest, opacity, scales, turns = splats.split(WIDTHS, dim=-1)
    focal, center, size = (value[0].to(splats.dtype) for value in (camera.focal, camera.center, camera.size))
    pose = opengl_to_opencv(camera.camera_to_world)[0].to(splats.dtype)
    axes, eye = pose[:, :3].T, pose[:, 3]
    local = (points - eye) @ axes.T
    aside = (local[:, :2] - (0.5 * size - center) / focal * local[:, 2:]).abs() - 0.5 * size / focal * local[:, 2:]
    drawn = (local[:, 2:] > NEAR) & (aside < BEYOND * local[:, 2:]).all(-1, keepdim=True)
    local = torch.where(drawn, local, local.new_tensor([0.0, 0.0, 1.0]))
    plane = local[:, :2] / local[:, 2:]
    slopes = (focal / local[:, 2:])[..., None] * (axes[:2] - plane[..., None] * axes[2])  # (n, 2, 3), by the world
    spread = rotations(torch.nn.functional.normalize(turns, dim=-1)) * scales.exp()[:, None]
    across, down = ((slopes[:, row, :, None] * spread).sum(1) for row in (0, 1))  # (n, 3), by its axes
    xx, xy, yy = ((one * other).sum(-1) for one, other in ((across, across), (across, down), (down, down)))
    inverse = torch.stack([yy + LOW_PASS, -xy, xx + LOW_PASS], dim=-1)
    inverse = inverse / ((xx + LOW_PASS) * (yy + LOW_PASS) - xy * xy)[:, None]
    basis = spherical_harmonics(torch.nn.functional.normalize(points - eye, dim=-1), 4)[:, None]
    colors = (rest.view(-1, 3, 15) * basis[..., 1:]).sum(-1) + base * basis[..., 0] + 0.5
    values = [plane * focal + center, inverse, opacity.sigmoid() * drawn, colors.clamp_min(0.0)]
    return torch.cat(values, dim=-1), local[:, 2]


@torch.no_grad()
def tile_lists(values: Tensor, depths: Tensor, size: tuple[int, int], tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """Splats (m,) tile after tile, from near to far in each; where each tile's begin and the last one's end; and the
    pixels (n, 4) that each of these may reach: first column and row, last column and row."""
    a, b, c, opacity = values[:, 2:6].unbind(-1)
    reach = 2.0 * (opacity / LEAST_ALPHA).log() / (a * c - b * b)
    half = torch.stack([reach * c, reach * a], dim=-1).sqrt() + 0.01  # NaN for those too faint
    limit = depths.new_tensor(size)
    low = (values[:, :2] - half - 0.5).ceil().clamp_min(0.0)
    high = torch.minimum((values[:, :2] + half - 0.5).floor(), limit - 1.0)
    drawn = (low <= high).all(-1).nonzero()[:, 0]
    drawn = drawn[depths[drawn].argsort(stable=True)]
    boxes = torch.cat([low, high], dim=-1).nan_to_num(0.0).clamp(-1.0, 1e9).long()
    first = boxes[drawn, :2] // tile
    sides = boxes[drawn, 2:] // tile - first + 1
    counts = sides.prod(-1)
    row = torch.arange(len(drawn), device=values.device).repeat_interleave(counts)
    place, across = torch.arange(len(row), device=values.device) - (counts.cumsum(0) - counts)[row], sides[row, 0]
    columns, rows = (-(-side // tile) for side in size)
    tiles = (first[row, 1] + place // across) * columns + first[row, 0] + place % across
    tiles, by_tile = tiles.sort(stable=True)
    return drawn[row[by_tile]], torch.searchsorted(tiles, torch.arange(rows * columns + 1, device=values.device)), boxes


def composite(values: Tensor, depths: Tensor, size: tuple[int, int]) -> Tensor:
    """(height, width, 4) of projected splats (n, 9), nearest first; differentiable to `values`."""
    ids, ends, _ = tile_lists(values, depths, size, TILE)
    bounds, (columns, rows), tiles = ends.tolist(), (-(-side // TILE) for side in size), []
    place = torch.arange(TILE * TILE, device=values.device)
    y, x = place // TILE + 0.5, place % TILE + 0.5
    for index in range(rows * columns):
        mine = values[ids[bounds[index] : bounds[index + 1]]]
        tiles.append(_tile(mine, y + index // columns * TILE, x + index % columns * TILE))
    whole = torch.stack(tiles).view(rows, columns, TILE, TILE, 4).transpose(1, 2)
    return whole.reshape(rows * TILE, columns * TILE, 4)[: size[1], : size[0]]


def _tile(values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """(p, 4) of pixels whose centres have these coordinates (p,)."""
    x, y, a, b, c, opacity = values[:, :6].unbind(-1)
    dx, dy = columns[:, None] - x, rows[:, None] - y
    alpha = (opacity * torch.exp(-0.5 * (a * dx * dx + c * dy * dy) - b * dx * dy)).clamp(max=MOST_ALPHA)
    alpha = torch.where(alpha >= LEAST_ALPHA, alpha, torch.zeros_like(alpha))
    after = torch.cumprod(1.0 - alpha, dim=1)
    before = torch.cat([torch.ones_like(after[:, :1]), after], dim=1)[:, :-1]
    weights = torch.where(after >= LAST_LIGHT, alpha * before, torch.zeros_like(alpha))
    return weights @ torch.cat([values[:, 6:], torch.ones_like(values[:, :1])], dim=-1)
