"""Box intervals, sample positions and points of cones: one program = BLOCK rays or samples, fp32 inside; a sample
gathers its ray. Positions are stored (3, capacity), those of cones (3, points, capacity). The backward to rays, for
camera refinement, is a sum over each ray's samples."""

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Aabb
from .._sink import Node
from .._triton import cdiv, check_kernel_float, launchable, load_point, own_block
from ..packed.triton import packed_sum
from . import CONE, CONE_WIDTH, unit_box

FOLDS = {"none": 0, "sphere": 1, "cube": 2}


@triton.jit
def _size(x, y, z, FOLD: tl.constexpr):
    return tl.maximum(tl.maximum(tl.abs(x), tl.abs(y)), tl.abs(z)) if FOLD == 2 else tl.sqrt(x * x + y * y + z * z)


@triton.jit
def fold_unit(x, y, z, FOLD: tl.constexpr):
    """Coordinates of the box [0, 1]^3 into [0, 1]^3, all of space: `fold`."""
    if FOLD == 0:
        return x, y, z
    else:
        x, y, z = 2.0 * x - 1.0, 2.0 * y - 1.0, 2.0 * z - 1.0
        size = _size(x, y, z, FOLD)
        safe = tl.where(size > 1.0, size, 1.0)
        factor = 0.25 * (2.0 - 1.0 / safe) / safe  # a quarter where nothing moves
        return x * factor + 0.5, y * factor + 0.5, z * factor + 0.5


@triton.jit
def fold_scale(x, y, z, FOLD: tl.constexpr):
    """How much longer lengths became that `fold_unit` brought here."""
    if FOLD == 0:
        return x * 0.0 + 1.0
    else:
        x, y, z = 4.0 * x - 2.0, 4.0 * y - 2.0, 4.0 * z - 2.0
        size = _size(x, y, z, FOLD)
        inverse = tl.minimum(tl.maximum(2.0 - size, 0.0), 1.0)
        return 0.5 * tl.exp2(tl.log2(inverse * inverse * (2.0 - inverse)) * (2.0 / 3.0))


BOX_BLOCK = 256


@triton.jit
def slab(origin, direction, low, high):
    """t where a ray enters and leaves the space between two parallel faces."""
    tiny = 1.1754943508222875e-38
    safe = tl.where(tl.abs(direction) < tiny, tiny, direction)  # 0 * inf = NaN on the face itself
    first = tl.div_rn(low - origin, safe)
    second = tl.div_rn(high - origin, safe)
    return tl.minimum(first, second), tl.maximum(first, second)


@triton.jit
def box_interval(ox, oy, oz, dx, dy, dz, box, near, far):
    """t_min, t_max inside the box (low, then high of each axis), near and far; both near where rays miss or are NaN."""
    x0, x1 = slab(ox, dx, box[0], box[3])
    y0, y1 = slab(oy, dy, box[1], box[4])
    z0, z1 = slab(oz, dz, box[2], box[5])
    t_min = tl.minimum(tl.maximum(tl.maximum(tl.maximum(x0, y0), z0), near), far)
    t_max = tl.minimum(tl.maximum(tl.minimum(tl.minimum(x1, y1), z1), near), far)
    total = ox + oy + oz + dx + dy + dz  # tl.minimum drops NaN
    hit = (t_max > t_min) & (total == total)
    return tl.where(hit, t_min, near), tl.where(hit, t_max, near)


@launchable(do_not_specialize=["n_rays"])
def _aabb_kernel(
    p_origins, p_directions, p_t_min, p_t_max, n_rays, stride_origins, stride_origins_axis, stride_directions,
    stride_directions_axis, box, near, far, BLOCK: tl.constexpr,
):  # fmt: skip
    i, m = own_block(n_rays, BLOCK)
    ox, oy, oz = load_point(p_origins, i, m, stride_origins, stride_origins_axis)
    dx, dy, dz = load_point(p_directions, i, m, stride_directions, stride_directions_axis)
    t_min, t_max = box_interval(ox, oy, oz, dx, dy, dz, box, near, far)
    tl.store(p_t_min + i, t_min, mask=m)
    tl.store(p_t_max + i, t_max, mask=m)


def ray_aabb(origins: Tensor, directions: Tensor, aabb: Aabb, *, near: float, far: float) -> tuple[Tensor, Tensor]:
    check_kernel_float(origins=origins, directions=directions)
    n_rays = origins.shape[0]
    t_min = torch.empty(n_rays, dtype=origins.dtype, device=origins.device)
    t_max = torch.empty_like(t_min)
    if n_rays:
        _aabb_kernel[(cdiv(n_rays, BOX_BLOCK),)](
            origins.detach(), directions.detach(), t_min, t_max, n_rays, *origins.stride(), *directions.stride(),
            (*aabb.low, *aabb.high), near, far, BLOCK=BOX_BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
    return t_min, t_max


BLOCK = 512


@triton.jit
def store_positions(p_positions, p_origins, p_directions, i, i_ray, m, middle, n, box, FOLD: tl.constexpr):
    """Into (3, n): the points at `middle` along rays, mapped by the box (`unit_box`) and folded."""
    p_o, p_d = p_origins + i_ray * 3, p_directions + i_ray * 3
    x = (tl.load(p_o, mask=m, other=0.0) + tl.load(p_d, mask=m, other=0.0) * middle - box[0]) * box[3]
    y = (tl.load(p_o + 1, mask=m, other=0.0) + tl.load(p_d + 1, mask=m, other=0.0) * middle - box[1]) * box[4]
    z = (tl.load(p_o + 2, mask=m, other=0.0) + tl.load(p_d + 2, mask=m, other=0.0) * middle - box[2]) * box[5]
    x, y, z = fold_unit(x, y, z, FOLD)
    p = p_positions + i
    tl.store(p, x, mask=m)
    tl.store(p + n.to(tl.int64), y, mask=m)
    tl.store(p + 2 * n.to(tl.int64), z, mask=m)


@launchable(do_not_specialize=["capacity"])
def _positions_kernel(
    p_origins, p_directions, p_starts, p_ends, p_rays, p_positions, capacity, box,
    FOLD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, m = own_block(capacity, BLOCK)
    middle = 0.5 * (tl.load(p_starts + i, mask=m, other=0.0) + tl.load(p_ends + i, mask=m, other=0.0))
    i_ray = tl.load(p_rays + i, mask=m, other=0)
    store_positions(p_positions, p_origins, p_directions, i, i_ray, m, middle, capacity, box, FOLD)


class _SamplePositions(Node):
    @staticmethod
    def forward(ctx, origins, directions, samples, box, contraction) -> Tensor:
        ctx.samples, ctx.box, capacity = samples, box, samples.capacity
        positions = torch.empty((3, capacity), device=origins.device, dtype=torch.float32)
        if capacity:
            _positions_kernel[(cdiv(capacity, BLOCK),)](
                origins.contiguous(), directions.contiguous(), samples.t_starts, samples.t_ends, samples.ray_indices,
                positions, capacity, box, FOLD=FOLDS[contraction], BLOCK=BLOCK,
            )  # fmt: skip
        return positions.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        samples = ctx.samples
        per_sample = torch.stack([grad[:, axis].float() * ctx.box[3 + axis] for axis in range(3)], dim=-1)
        along = per_sample * samples.midpoints()[:, None]
        grads = (packed_sum(value.contiguous(), samples.offsets) for value in (per_sample, along))
        return tuple(grads)  # there is no contraction where they are asked for


def sample_positions(origins, directions, samples, *, aabb, contraction="none") -> Tensor:
    if samples.n_rays == 0:
        return origins.new_zeros(samples.capacity, 3)
    return _SamplePositions.apply(origins.float(), directions.float(), samples, unit_box(aabb), contraction)


CONE_BLOCK = 128
_CONE = tuple(itertools.chain(*CONE))


@launchable(do_not_specialize=["capacity"])
def _cone_kernel(
    p_origins, p_directions, p_radii, p_starts, p_ends, p_rays, p_positions, p_footprints, capacity, box, width, cone,
    FOLD: tl.constexpr, POINTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i, m = own_block(capacity, BLOCK)
    start, end = tl.load(p_starts + i, mask=m, other=0.0), tl.load(p_ends + i, mask=m, other=0.0)
    i_ray = tl.load(p_rays + i, mask=m, other=0)
    ox, oy, oz = load_point(p_origins, i_ray, m, 3, 1)
    dx, dy, dz = load_point(p_directions, i_ray, m, 3, 1)
    radius = tl.load(p_radii + i_ray, mask=m, other=0.0)
    middle, half = (end + start) * 0.5, (end - start) * 0.5
    share = half / tl.maximum(middle, 1e-12)
    root = tl.sqrt((share * share - 1.0) * (share * share - 1.0) + 4.0)
    sign = tl.where(dz < 0.0, -1.0, 1.0)
    a = -1.0 / (sign + dz)
    bits = dx.to(tl.int32, bitcast=True) ^ (dy.to(tl.int32, bitcast=True) * -1640531535)
    bits = bits ^ (dz.to(tl.int32, bitcast=True) * 805459861) ^ (start.to(tl.int32, bitcast=True) * 374761393)
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -2048144789
    bits = (bits ^ ((bits >> 13) & 0x7FFFF)) * -1028477379
    q = ((bits >> 8) & 0xFFFFFF).to(tl.float32) * 1.1920928955078125e-07 - 1.0
    mirror, turn = 1.0 - 2.0 * (bits & 1).to(tl.float32), (1.0 - (bits & 2).to(tl.float32)) / (1.0 + q * q)
    cos, sin = (1.0 - q * q) * turn, 2.0 * q * turn
    for k in tl.static_range(POINTS):
        t, x, y, z = middle, ox, oy, oz
        if POINTS > 1:
            t = start + half * ((1.0 + share) * (1.0 + share) + 2.0 + root * cone[3 * k]) / (share * share + 3.0)
            reach, own_sin = radius * t * 0.70710678, cone[3 * k + 2] * mirror
            u, v = reach * (cos * cone[3 * k + 1] - sin * own_sin), reach * (sin * cone[3 * k + 1] + cos * own_sin)
            x += u * (1.0 + sign * dx * dx * a) + v * dx * dy * a
            y += u * sign * dx * dy * a + v * (sign + dy * dy * a)
            z -= u * sign * dx + v * dy
        x, y, z = (x + dx * t - box[0]) * box[3], (y + dy * t - box[1]) * box[4], (z + dz * t - box[2]) * box[5]
        x, y, z = fold_unit(x, y, z, FOLD)
        p = p_positions + (k * capacity + i)
        stride = POINTS * capacity.to(tl.int64)
        tl.store(p, x, mask=m)
        tl.store(p + stride, y, mask=m)
        tl.store(p + 2 * stride, z, mask=m)
        tl.store(p_footprints + (k * capacity + i), radius * tl.abs(t) * width * fold_scale(x, y, z, FOLD), mask=m)


def cone_positions(origins, directions, radii, samples, *, points, aabb, contraction) -> tuple[Tensor, Tensor]:
    capacity, own = samples.capacity, {"device": origins.device, "dtype": torch.float32}
    positions, footprints = torch.empty((3, points, capacity), **own), torch.empty((points, capacity), **own)
    if samples.n_rays == 0:
        return origins.new_zeros(capacity, points, 3), origins.new_zeros(capacity, points)
    if capacity:
        rays = [value.float().contiguous() for value in (origins, directions, radii)]
        _cone_kernel[(cdiv(capacity, CONE_BLOCK),)](
            *rays, samples.t_starts, samples.t_ends, samples.ray_indices, positions, footprints, capacity,
            unit_box(aabb), CONE_WIDTH[points] * 3.0 / sum(aabb.size), _CONE,
            FOLD=FOLDS[contraction], POINTS=points, BLOCK=CONE_BLOCK,
        )  # fmt: skip
    return positions.permute(2, 1, 0), footprints.t()
