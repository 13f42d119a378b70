"""The surface that cameras see of a soft scene: their depth images as one signed distance (Curless and Levoy, 1996)."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..data.cameras import Cameras
from ..data.pool_file import check_memory
from ..errors import InputError
from ..evaluation.evaluate import choose_views
from ..evaluation.images import pixels_of
from ..ops.packed import packed_cumsum, packed_sum
from ..rendering.image import bytes_per_sample, part_memory, rays_at_once
from ..rendering.model import NerfModel
from ..types import Aabb
from . import Progress, quiet

MAX_POINTS = 1 << 31
MAX_CAMERAS = 64  # that look where surfaces are
MAX_PIXELS = 400  # of the longer side of what they see
TRUNCATION = 2.0  # voxels that distances are cut to: larger loses what is thin
HIDDEN = 4.0  # voxels behind what a camera sees from which it says nothing: less leaves holes where views disagree
BLOCK = 8  # voxels a side of what is looked at together
CPU_POINTS, GPU_POINTS = 1 << 14, 1 << 20  # in one go; on a CPU they stay in its caches
RENDERING = 0.7  # of the time


def points_along(box: Aabb, voxel: float) -> list[int]:
    """The number of points on each axis, a voxel apart, from one side of the box to the other or just beyond. Refuses
    what would take more than the machine has."""
    counts = [math.ceil(size / voxel - 1e-6) + 1 for size in box.size]
    if math.prod(counts) > MAX_POINTS:
        got = f"{counts[0]} x {counts[1]} x {counts[2]}"
        raise InputError("--resolution", f"at most {MAX_POINTS} points in the box", got, "use a smaller one, or --box")
    check_memory("--resolution", 8 * math.prod(counts), "use a smaller one, or --box")  # and a copy for the triangles
    return counts


def few_and_small(cameras: Cameras, device: torch.device) -> Cameras:
    """Cameras, evenly chosen and made small, that show where surfaces are; of scenes that move, at time 0."""
    few = cameras[torch.tensor(choose_views(len(cameras), MAX_CAMERAS))]
    few = few if few.times is None else replace(few, times=torch.zeros_like(few.times))
    return few.scaled(min(1.0, MAX_PIXELS / int(few.size.max()))).to(device)


@torch.no_grad()
def median_depths(model: NerfModel, camera: Cameras) -> Tensor:
    """(height * width,) how far along its ray half of a pixel's light is from; infinite where the field is thinner. A
    mean would lie between what is before and what is behind, where nothing is."""
    rays, found = camera.image_rays(0), []
    n = rays_at_once(model.estimator, part_memory(model.device), bytes_per_sample(model.field))
    for first in range(0, len(rays), n):
        out = model.render_rays(rays[first : first + n])
        assert out.samples is not None
        samples, offsets = out.samples, out.samples.offsets.long()
        passed = packed_cumsum(out.weights, samples.offsets)
        before = packed_sum(((passed < 0.5) & samples.used).float(), samples.offsets)
        index = offsets[:-1] + before.long()
        columns = (samples.t_starts, samples.t_ends, out.weights, passed)
        start, end, weight, passed = (torch.nn.functional.pad(column, (0, 1))[index] for column in columns)
        depth = start + (0.5 - passed + weight) / weight.clamp_min(1e-9) * (end - start)
        found.append(torch.where(index < offsets[1:], depth, torch.inf))
    return torch.cat(found)


@torch.no_grad()
def fuse(model: NerfModel, cameras: Cameras, box: Aabb, voxel: float, *, progress: Progress = quiet) -> Tensor:
    """(nx, ny, nz) float32 on the CPU: how far box.low + (i, j, k) * voxel lies behind what cameras see, over
    TRUNCATION and cut to -1 ... 1: the mean over the cameras that see the point, or a surface less than HIDDEN before
    it. NaN where there are none."""
    counts, device, reach = points_along(box, voxel), model.device, TRUNCATION * voxel
    low, sides = torch.tensor(box.low, device=device), [math.ceil(count / BLOCK) for count in counts]
    near, depths = torch.zeros(sides, dtype=torch.bool, device=device), []
    few, ends = few_and_small(cameras, device), torch.tensor([-reach, reach], device=device)
    shifts = torch.cartesian_prod(ends, ends, ends)
    for index in range(len(few)):
        depths.append(median_depths(model, few[index]))
        rays, solid = few[index].image_rays(0), depths[-1].isfinite()
        points = rays.origins[solid] + rays.directions[solid] * depths[-1][solid, None]
        for shift in shifts:
            block = ((points - low + shift) / (BLOCK * voxel)).floor().long()
            near[tuple(block[((block >= 0) & (block < near.new_tensor(sides, dtype=torch.int64))).all(-1)].T)] = True
        progress(RENDERING * (index + 1) / len(few))
    blocks = near.nonzero()
    check_memory("--resolution", 8 * math.prod(counts) + 16 * BLOCK**3 * len(blocks), "use a smaller one, or --box")
    sums = torch.zeros(2, len(blocks), BLOCK**3, device=device)  # of distances, and how many they are
    steps, ends = (torch.arange(0, BLOCK, step, device=device) for step in (1, BLOCK - 1))
    inner, corners = (torch.cartesian_prod(one, one, one) for one in (steps, ends))
    at_once = (CPU_POINTS if device.type == "cpu" else GPU_POINTS) // BLOCK**3
    for index, depth in enumerate(depths):
        camera, width = few[index], int(few.size[index, 0])
        outline = (low + (blocks[:, None] * BLOCK + corners) * voxel).reshape(-1, 3)
        shown = pixels_of(camera, outline)[2].view(len(blocks), -1).any(1).nonzero()[:, 0]
        for part in shown.split(at_once):
            points = (low + (blocks[part, None] * BLOCK + inner) * voxel).reshape(-1, 3)
            row, column, inside = pixels_of(camera, points)
            surface = depth[row * width + column]
            behind = ((points - camera.positions[0]).norm(dim=-1) - surface) / reach
            seen = inside & (behind < HIDDEN / TRUNCATION)
            found = torch.stack([torch.where(seen, behind.clamp(-1.0, 1.0), 0.0), seen.float()])
            sums[:, part] += found.view(2, -1, BLOCK**3)
        progress(RENDERING + (1.0 - RENDERING) * (index + 1) / len(few))
    whole = torch.full([side * BLOCK for side in sides], torch.nan)
    x, y, z = blocks.cpu().T
    parts = whole.view(sides[0], BLOCK, sides[1], BLOCK, sides[2], BLOCK)
    parts[x, :, y, :, z, :] = (sums[0] / sums[1]).cpu().view(-1, BLOCK, BLOCK, BLOCK)  # 0 / 0 is NaN
    return whole[: counts[0], : counts[1], : counts[2]].contiguous()


def whole_cells(volume: Tensor) -> Tensor:
    """(nx, ny, nz) bool: whether the cell that ends at a point has a number at all of its corners."""
    unknown = torch.nn.functional.pad(volume.isnan().float()[None], (1, 0) * 3, value=1.0)
    return torch.nn.functional.max_pool3d(unknown, 2, stride=1)[0] == 0.0
