"""What the kernel files share: small jit helpers, allocation rules, and how a kernel is listed for compile checks.

Layout of a ray kernel: a program owns a tile of `RAYS` rays and walks along them `STEPS` samples at a time, so that a
warp serves four rays of few samples or one ray of many. Programs past the rays write the unused tail.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...errors import InputError

KERNEL_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED = triton.knobs.runtime.interpret  # on a CPU, for tests: a program costs a millisecond, so take few
TAIL_BLOCK = 1024  # places of the unused tail that one program writes


@dataclass(frozen=True)
class CompileCase:
    """One specialisation of a kernel, compiled by the tests for every supported GPU without owning one.

    `signature` gives a Triton type per argument ("*fp32", "i32", "fp32"; 
    a tuple of them for a tuple); arguments it leaves out are constexpr and must be in `constexprs`, None included.
    """

    kernel: Any  # a triton.jit function
    signature: dict[str, str | tuple[str, ...]]
    constexprs: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 1
    num_stages: int = 1
    max_spills: int = 0  # bytes of local memory per thread
    name: str = ""  # tells two cases of one kernel apart


def tile_for(n_rows: int, n_rays: int) -> dict[str, int]:
    """RAYS and STEPS of a one-warp tile: eight lanes a ray where rays hold few samples, a whole warp otherwise."""
    if INTERPRETED:
        return {"RAYS": 32, "STEPS": 8}
    few = n_rows <= 12 * n_rays
    return {"RAYS": 4, "STEPS": 8} if few else {"RAYS": 1, "STEPS": 32}


def tail_programs(n_rows: int) -> int:
    return triton.cdiv(n_rows, TAIL_BLOCK)


def empty_in_layout_of(tensor: Tensor) -> Tensor:
    """Fresh memory with the same shape, dtype and, where it has no gaps or repeats, strides."""
    return torch.empty_like(tensor, memory_format=torch.preserve_format)


def check_kernel_float(**tensors: Tensor | None) -> None:
    """The kernels accumulate in fp32: float64 belongs to the reference."""
    for name, value in tensors.items():
        if value is not None and value.dtype not in KERNEL_FLOATS:
            raise InputError(
                name, "float16, bfloat16 or float32 on the Triton backend", str(value.dtype), "use the reference"
            )


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
def ray_tile(p_offsets, n_rays, RAYS: tl.constexpr):
    """Rays of this program (RAYS,), their first sample and their number of samples; none for rays past the last."""
    i_ray = tl.program_id(0) * RAYS + tl.arange(0, RAYS)
    m_ray = i_ray < n_rays
    start = tl.load(p_offsets + i_ray, mask=m_ray, other=0)
    end = tl.load(p_offsets + i_ray + 1, mask=m_ray, other=0)
    return i_ray, m_ray, start, end - start


@triton.jit
def tail_rows(first_program, n_used, n_rows, BLOCK: tl.constexpr):
    """Rows (BLOCK,) and mask of the unused tail that program `first_program + k` writes."""
    i_row = (tl.program_id(0) - first_program) * BLOCK + tl.arange(0, BLOCK)
    return i_row, (i_row >= n_used) & (i_row < n_rows)
