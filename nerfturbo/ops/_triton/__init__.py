"""What the kernel files share: small jit helpers and allocation rules. Layout of a ray kernel: a tile is `RAYS` rays,
walked along `STEPS` samples at a time by one warp. Programs take tiles in turn, about as many programs as the device
holds. Programs behind those of the rays write the unused tail."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...errors import InputError
from .launch import cdiv, for_any_count, launchable, next_power_of_2  # noqa: F401 - for the kernel files

KERNEL_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED = triton.knobs.runtime.interpret  # on a CPU, for tests: a program costs a millisecond, so take few
TAIL_BLOCK = 128  # places of the unused tail written at a time: few, for they cost the whole kernel registers
TAIL_PROGRAMS = 256
FEW, MANY = (32, 8) if INTERPRETED else (4, 8), (32, 8) if INTERPRETED else (1, 32)  # tiles: RAYS, STEPS
FEW_SAMPLES = 12  # places per ray up to which rays count as short
PROGRAMS = 32  # one-warp programs that a multiprocessor runs at a time


def ray_grid(n_rows: int, n_rays: int, device: torch.device) -> tuple[dict[str, int], int]:
    """`tile_for` rays that hold so many rows together, and the programs that share the tiles."""
    tile = tile_for(n_rows, n_rays)
    return tile, ray_programs(cdiv(n_rays, tile["RAYS"]), device)


def tile_for(n_rows: int, n_rays: int) -> dict[str, int]:
    """RAYS and STEPS of a one-warp tile: eight lanes a ray where rays hold few samples, a whole warp otherwise."""
    rays, steps = FEW if n_rows <= FEW_SAMPLES * n_rays else MANY
    return {"RAYS": rays, "STEPS": steps}


def ray_programs(n_tiles: int, device: torch.device) -> int:
    """How many programs share the tiles: those that the device holds; a few for the interpreter."""
    return min(n_tiles, PROGRAMS * processors(device) if device.type == "cuda" else 2)


@functools.lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """Multiprocessors of the GPU; a few programs for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def tail_programs(n_rows: int) -> int:
    """Programs behind those of the rays, which share the tail."""
    return min(cdiv(n_rows, TAIL_BLOCK), 1 if INTERPRETED else TAIL_PROGRAMS)


def empty_in_layout_of(tensor: Tensor) -> Tensor:
    """Fresh memory with the same shape, dtype and, where it has no gaps or repeats, strides; one row may have gaps."""
    if tensor.dim() == 2 and tensor.stride(0) == 1 and tensor.stride(1) >= tensor.shape[0]:
        return feature_major(*tensor.shape, tensor.dtype, tensor.device)
    return torch.empty_like(tensor, memory_format=torch.preserve_format)


def strides_of(tensor: Tensor | None, n: int) -> tuple[int, ...]:
    """n strides, zero for a tensor that is not there."""
    return (0,) * n if tensor is None else tensor.stride()


def ray_strides(background: Tensor | None) -> tuple[int, ...]:
    """From ray to ray and from channel to channel, for one background or one per ray."""
    if background is None:
        return 0, 0
    return background.stride() if background.dim() == 2 else (0, background.stride(0))


def check_kernel_float(**tensors: Tensor | None) -> None:
    """The kernels accumulate in fp32: float64 belongs to the reference."""
    for name, value in tensors.items():
        if value is not None and value.dtype not in KERNEL_FLOATS:
            expected = "float16, bfloat16 or float32 on the Triton backend"
            raise InputError(name, expected, str(value.dtype), "use the reference")


def signed_word(value: int) -> int:
    """The low 32 bits as a signed number, so that every value has the same kernel argument type."""
    return ((value + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


def scalar_or_pointer(value: float | Tensor, device: torch.device) -> tuple[float, Tensor | None]:
    """A number as (number, None), a () tensor as (0, pointer to fp32)."""
    if isinstance(value, Tensor):
        return 0.0, value.detach().to(device=device, dtype=torch.float32)
    return float(value), None


@triton.jit
def one_minus_exp(x):
    """1 - exp(-x) without cancellation for small x; never more than one."""
    series = x * (1.0 - x * (0.5 - x * (0.16666667 - x * 0.041666667)))
    return tl.where(tl.abs(x) < 0.05, series, 1.0 - tl.exp(-x))


@triton.jit
def ray_tile(p_offsets, tile, n_rays, RAYS: tl.constexpr):
    """Rays of a tile (RAYS,), their first sample and their number of samples; none for rays past the last."""
    i_ray = tile * RAYS + tl.arange(0, RAYS)
    m_ray = i_ray < n_rays
    start = tl.load(p_offsets + i_ray, mask=m_ray, other=0)
    end = tl.load(p_offsets + i_ray + 1, mask=m_ray, other=0)
    return i_ray, m_ray, start, end - start


@triton.jit
def zero_tail(p, stride, first_program, n_used, n_rows, TAIL: tl.constexpr):
    """Zero in the rows from n_used on, shared among the programs from `first_program` on."""
    share = tl.program_id(0) - first_program
    for first in range(n_used + share * TAIL, n_rows, (tl.num_programs(0) - first_program) * TAIL):
        i_row = first + tl.arange(0, TAIL)
        tl.store(p + i_row.to(tl.int64) * stride, tl.zeros([TAIL], p.dtype.element_ty), mask=i_row < n_rows)


@triton.jit
def shift_right(value, fill, RAYS: tl.constexpr, STEPS: tl.constexpr):
    """value[:, j - 1] at j, `fill` at 0: turns an inclusive scan of a (RAYS, STEPS) tile into an exclusive one."""
    i = tl.arange(0, STEPS)[None, :] + tl.zeros([RAYS, STEPS], tl.int32)
    return tl.where(i == 0, fill, tl.gather(value, tl.maximum(i - 1, 0), 1))


@triton.jit
def sum_after(value, RAYS: tl.constexpr, STEPS: tl.constexpr):
    """Sum of value[:, k] over k > j: shifted, not subtracted, so that zeros behind j give exactly zero."""
    i = tl.arange(0, STEPS)[None, :] + tl.zeros([RAYS, STEPS], tl.int32)
    running = tl.cumsum(value, 1, reverse=True)
    return tl.where(i == STEPS - 1, 0.0, tl.gather(running, tl.minimum(i + 1, STEPS - 1), 1))


@triton.jit
def spread_last(value, RAYS: tl.constexpr, STEPS: tl.constexpr):
    """value[:, STEPS - 1] everywhere: the total of an inclusive scan, cheaper than a second reduction."""
    return tl.gather(value, tl.full([RAYS, STEPS], STEPS - 1, tl.int32), 1)


def feature_major(n: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Fresh (n, columns) whose memory is (columns, n); of one row, with gaps: no stride between columns may be 1."""
    return torch.empty_strided((n, columns), (1, n if n > 1 else 16), dtype=dtype, device=device)


@triton.jit
def clamp_unit(x):
    """x in [0, 1]; NaN becomes 0, so that addresses stay inside the table."""
    return tl.where(x > 0.0, tl.where(x < 1.0, x, 1.0), 0.0)


@triton.jit
def own_block(n, BLOCK: tl.constexpr):
    """The BLOCK items of this program, and which of them are below n."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return i, i < n


@triton.jit
def tile_rows(start, count, k, STEPS: tl.constexpr):
    """Rows (RAYS, STEPS) of the samples of a tile's rays from the k-th on, and which of them there are."""
    step = k + tl.arange(0, STEPS)
    return start[:, None] + step[None, :], step[None, :] < count[:, None]


@triton.jit
def load_point(p_positions, i, m, stride_n, stride_c):
    """x, y, z of the rows `i`: fp32 blocks of i's shape."""
    p = p_positions + i.to(tl.int64) * stride_n
    x = tl.load(p, mask=m, other=0.0).to(tl.float32)
    y = tl.load(p + stride_c, mask=m, other=0.0).to(tl.float32)
    z = tl.load(p + 2 * stride_c, mask=m, other=0.0).to(tl.float32)
    return x, y, z


@triton.jit
def add_slopes(gx, gy, gz, value, fx, fy, fz, C: tl.constexpr):
    """The blend's derivatives along x, y and z with what `value` at corner C of a cell adds to them."""
    wx = fx if C & 1 else 1.0 - fx
    wy = fy if C & 2 else 1.0 - fy
    wz = fz if C & 4 else 1.0 - fz
    gx += (value if C & 1 else -value) * wy * wz
    gy += (value if C & 2 else -value) * wx * wz
    return gx, gy, gz + (value if C & 4 else -value) * wx * wy


@triton.jit
def store_slopes(p, i, n, m, x, y, z, gx, gy, gz):
    """Into (3, n): the gradient to positions, zero past the borders of [0, 1] and where `m` is not set."""
    p += i
    tl.store(p, tl.where(m & (x >= 0.0) & (x <= 1.0), gx, 0.0), mask=i < n)
    tl.store(p + n, tl.where(m & (y >= 0.0) & (y <= 1.0), gy, 0.0), mask=i < n)
    tl.store(p + 2 * n.to(tl.int64), tl.where(m & (z >= 0.0) & (z <= 1.0), gz, 0.0), mask=i < n)


@triton.jit
def used_rows(p_used, n):
    """min(n, device count), or n where there is no count."""
    if p_used is not None:
        n = tl.minimum(tl.load(p_used), n)
    return n
