"""What the page's shader computes, in torch, step by step: `page/shader.glsl.js` with rows for pixels.

A ray takes a filtered sample every half cell of a block that exists; else it leaps over the cube of blocks that are
known to be empty, but not into another level.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from ...data.cameras import Cameras
from .baked import DENSITY, LAST_LIGHT, MAX_STEPS, N_BASE, NUDGE, STEP, Baked, decode_density, meant_features, shade
from .lattice import CELLS, Lattice, texels_around
from .teacher import pixel_rays

CHUNK = {"cpu": 1 << 15, "cuda": 1 << 20}
KEPT = 0.9  # of the rays: where fewer are on their way, the others are left behind


@dataclass(frozen=True)
class PageImage:
    """What the page shows of one camera, before rounding, and what it cost."""

    rgb: Tensor  # (height, width, 3) over the background
    opacity: Tensor  # (height, width)
    depth: Tensor  # (height, width) mean distance, divided by the opacity
    steps: Tensor  # (height, width) int32: times round the loop
    fetches: Tensor  # (height, width) int32: texture reads


@torch.no_grad()
def render_page(baked: Baked, cameras: Cameras, index: int) -> PageImage:
    """Picture `index` of the cameras, over white."""
    device = baked.values.device
    cameras = cameras.to(device)
    width, height = (int(side) for side in cameras.size[index])
    chunk, parts = CHUNK.get(device.type, CHUNK["cuda"]), []
    for first in range(0, width * height, chunk):
        pixels = torch.arange(first, min(first + chunk, width * height), device=device)
        rays = pixel_rays(cameras, torch.full_like(pixels, index), pixels, None)
        parts.append(trace(baked, rays.origins, rays.directions, torch.ones(3, device=device)))
    rgb, *others = (torch.cat(column) for column in zip(*parts, strict=True))
    return PageImage(rgb.view(height, width, 3), *(value.view(height, width) for value in others))


def trace(baked: Baked, origins: Tensor, directions: Tensor, background: Tensor) -> tuple[Tensor, ...]:
    """rgb (n, 3), opacity, depth, steps, fetches (n,) of rays."""
    n, device, lattice = origins.shape[0], origins.device, baked.blocks.lattice
    texels = baked.atlas.view(-1, baked.atlas.shape[-1]).float()
    result = torch.zeros(n, texels.shape[1] + 3, device=device)  # colours and features; depth, light, steps, fetches
    result[:, -3] = 1.0
    safe = torch.where(directions.abs() < 1e-8, torch.full_like(directions, 1e-8), directions)
    t, end = box_span(origins, safe, lattice, 2.0 ** (lattice.levels - 1))
    # Rays that are on their way, and where each is: the block (-1: none), where it ends, the place in it at t = 0.
    walk = SimpleNamespace(rays=torch.arange(n, device=device), origins=origins, directions=directions, safe=safe)
    walk.t, walk.end, walk.sums, walk.step = t.clamp_min(baked.near), end, result.clone(), torch.zeros_like(t)
    walk.leave, walk.slot = torch.full_like(t, -1.0), torch.full_like(t, -1, dtype=torch.int64)
    walk.place, walk.slope = torch.zeros(2, n, 3, device=device)
    for _ in range(MAX_STEPS):
        going = (walk.t < walk.end) & (walk.sums[:, -3] >= LAST_LIGHT)
        left = going.count_nonzero()
        if left < KEPT * going.shape[0]:
            result[walk.rays] = walk.sums
            walk = SimpleNamespace(**{name: value[going] for name, value in vars(walk).items()})
            going = going[going]
        if left == 0:
            break
        fresh = (going & (walk.t >= walk.leave)).nonzero()[:, 0]
        _enter(baked, walk, fresh)
        inside = going & (walk.slot >= 0)
        index, weights = texels_around(walk.slot.clamp_min(0), walk.place + walk.slope * walk.t[:, None])
        found = torch.nn.functional.embedding_bag(index, texels, per_sample_weights=weights, mode="sum") / 255.0
        thickness = decode_density(found[:, DENSITY], 1.0) * STEP
        weight = walk.sums[:, -3] * (1.0 - torch.exp(-thickness)) * inside
        carried = [found[:, :3], meant_features(found[:, N_BASE:]), torch.stack([walk.t, -torch.ones_like(weight)], 1)]
        walk.sums[:, :-2].addcmul_(weight[:, None], torch.cat(carried, dim=1))
        walk.sums[:, -2] += going
        walk.sums[:, -1] += inside * (1.0 + ((thickness > 0.0) & (baked.n_features > 0)))
        walk.sums[fresh, -1] += 1.0
        walk.t += walk.step * inside
    result[walk.rays] = walk.sums
    sums, (depth, light), counts = result[:, :-4], result[:, -4:-2].unbind(-1), result[:, -2:].int().unbind(-1)
    opacity = 1.0 - light
    color = shade(sums, opacity, directions, baked.network) + light[:, None] * background
    return color.clamp(0.0, 1.0), opacity, depth / opacity.clamp_min(1e-6), *counts


def box_span(origins: Tensor, directions: Tensor, lattice: Lattice, scale: float | Tensor) -> tuple[Tensor, Tensor]:
    """(n,) and (n,): where rays enter and leave the lattice's box, scaled; enter > leave for those that miss it."""
    half = origins.new_tensor(lattice.half) * scale
    offset = origins.new_tensor(lattice.center) - origins
    first, second = (offset - half) / directions, (offset + half) / directions
    return torch.minimum(first, second).amax(-1), torch.maximum(first, second).amin(-1)


def _enter(baked: Baked, walk: SimpleNamespace, rays: Tensor) -> None:
    """Note the blocks in which `rays` of the walk are; those in empty space leap."""
    blocks, lattice, now, d = baked.blocks, baked.blocks.lattice, walk.t[rays], walk.safe[rays]
    origins, directions = walk.origins[rays], walk.directions[rays]
    level, place, block, slot = blocks.locate(origins + directions * now[:, None])
    level = level.clamp(max=lattice.levels - 1)
    scale = torch.pow(2.0, level.float())
    skip = blocks.skips[level, block[:, 2], block[:, 1], block[:, 0]].float().clamp_min(1.0)
    ahead, behind = block + skip[:, None], block - skip[:, None] + 1.0
    # What is known to be empty is so within this level: a leap ends where a coarser one begins.
    border = torch.where(d > 0.0, torch.minimum(ahead, ahead.new_tensor(lattice.blocks)), behind.clamp_min(0.0))
    border *= CELLS
    end = now + ((border - place) * lattice.voxel * scale[:, None] / d).amin(-1).clamp_min(0.0)
    if lattice.levels > 1:
        enter, leave = box_span(origins, d, lattice, (scale * 0.5)[:, None])
        ahead = (level > 0) & (enter < leave) & (enter > now)
        end = torch.where(ahead, torch.minimum(end, enter), end)
    full, step = slot >= 0, lattice.voxel * scale
    walk.slot[rays], walk.step[rays], walk.slope[rays] = slot, STEP * step, directions / step[:, None]
    walk.place[rays] = lattice.coordinates(origins, level) - block * CELLS
    walk.leave[rays] = torch.where(full, end, -1.0)
    walk.t[rays] = torch.where(full, now, end + NUDGE * step)
