"""What the page's shader computes, in torch, step by step: `page/shader.glsl.js` with rows for pixels.

A ray takes a filtered sample every half cell of a block that exists; else it leaps over the cube of blocks that are
known to be empty, but not into another level.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...data.cameras import Cameras
from .baked import DENSITY, LAST_LIGHT, MAX_STEPS, N_BASE, NUDGE, STEP, Baked, decode_density, meant_features, shade
from .lattice import CELLS, Lattice, texels_around
from .teacher import pixel_rays

CHUNK = {"cpu": 1 << 15, "cuda": 1 << 20}


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
    sums, depth = torch.zeros(n, 3 + baked.n_features, device=device), torch.zeros(n, device=device)
    light = torch.ones(n, device=device)
    steps, fetches = (torch.zeros(n, dtype=torch.int32, device=device) for _ in range(2))
    safe = torch.where(directions.abs() < 1e-8, torch.full_like(directions, 1e-8), directions)
    t, end = box_span(origins, safe, lattice, 2.0 ** (lattice.levels - 1))
    t = t.clamp_min(baked.near)
    live = (t < end).nonzero()[:, 0]
    state, atlas = _Blocks(n, device), baked.atlas.view(-1, baked.atlas.shape[-1])
    for _ in range(MAX_STEPS):
        if live.shape[0] == 0:
            break
        steps[live] += 1
        fresh = live[t[live] >= state.end[live]]
        fetches[fresh] += 1
        leaps = state.enter(baked, origins, directions, safe, t, fresh)
        t[fresh] = torch.where(leaps > 0.0, leaps, t[fresh])
        rays = live[state.slot[live] >= 0]
        scale = torch.pow(2.0, state.level[rays].float())
        place = lattice.coordinates(origins[rays] + directions[rays] * t[rays][:, None], state.level[rays])
        index, weights = texels_around(state.slot[rays], place - state.block[rays] * CELLS)
        found = torch.zeros(rays.shape[0], atlas.shape[1], device=device)
        for k in range(8):  # texels, filtered trilinearly
            found += weights[:, k : k + 1] * atlas[index[:, k]]
        found /= 255.0
        thickness = decode_density(found[:, DENSITY], 1.0) * STEP
        weight = light[rays] * (1.0 - torch.exp(-thickness))
        carried = torch.cat([found[:, :3], meant_features(found[:, N_BASE:])], dim=1)
        sums[rays] += weight[:, None] * carried
        depth[rays] += weight * t[rays]
        light[rays] -= weight
        fetches[rays] += 1 + ((thickness > 0.0) & (baked.n_features > 0)).int()
        t[rays] += STEP * lattice.voxel * scale
        live = live[(t[live] < end[live]) & (light[live] >= LAST_LIGHT)]
    opacity = 1.0 - light
    color = shade(sums, opacity, directions, baked.network) + light[:, None] * background
    return color.clamp(0.0, 1.0), opacity, depth / opacity.clamp_min(1e-6), steps, fetches


def box_span(origins: Tensor, directions: Tensor, lattice: Lattice, scale: float | Tensor) -> tuple[Tensor, Tensor]:
    """(n,) and (n,): where rays enter and leave the lattice's box, scaled; enter > leave for those that miss it."""
    half = origins.new_tensor(lattice.half) * scale
    offset = origins.new_tensor(lattice.center) - origins
    first, second = (offset - half) / directions, (offset + half) / directions
    return torch.minimum(first, second).amax(-1), torch.maximum(first, second).amin(-1)


class _Blocks:
    """In which block each ray is; slot -1 where there is none, end: where the ray leaves it."""

    def __init__(self, n: int, device: torch.device) -> None:
        self.end = torch.full((n,), -1.0, device=device)
        self.slot, self.level = (torch.full((n,), fill, dtype=torch.int64, device=device) for fill in (-1, 0))
        self.block = torch.zeros(n, 3, dtype=torch.int64, device=device)

    def enter(self, baked: Baked, origins: Tensor, directions: Tensor, safe: Tensor, t: Tensor, rays: Tensor) -> Tensor:
        """Note the blocks in which `rays` are; (m,) where those in empty space go on, -1 for the others."""
        lattice, now, d = baked.blocks.lattice, t[rays], safe[rays]
        level, place, block, slot = baked.blocks.locate(origins[rays] + directions[rays] * now[:, None])
        level = level.clamp(max=lattice.levels - 1)
        scale = torch.pow(2.0, level.float())
        skip = baked.blocks.skips[level, block[:, 2], block[:, 1], block[:, 0]].float().clamp_min(1.0)
        ahead, behind = block + skip[:, None], block - skip[:, None] + 1.0
        # What is known to be empty is so within this level: a leap ends where a coarser one begins.
        border = torch.where(d > 0.0, torch.minimum(ahead, ahead.new_tensor(lattice.blocks)), behind.clamp_min(0.0))
        border *= CELLS
        end = now + ((border - place) * lattice.voxel * scale[:, None] / d).amin(-1).clamp_min(0.0)
        if lattice.levels > 1:
            enter, leave = box_span(origins[rays], d, lattice, (scale * 0.5)[:, None])
            ahead = (level > 0) & (enter < leave) & (enter > now)
            end = torch.where(ahead, torch.minimum(end, enter), end)
        full = slot >= 0
        self.slot[rays], self.level[rays], self.block[rays] = slot, level, block
        self.end[rays] = torch.where(full, end, -1.0)
        return torch.where(full, -1.0, end + NUDGE * lattice.voxel * scale)
