"""Pieces of the MLP kernels: weights and tiles of samples, loaded and stored in any strides.

A weight (outputs, inputs) is loaded as the right operand [inputs, outputs]; a tile is [BLOCK samples, columns]. Widths
that are not a power of two, or below 16, are padded with zeros, which change no sum and no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROUND = 4096
_OPERANDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def padded(width: int) -> int:
    """The smallest width a tensor core takes that holds `width` columns."""
    return max(16, 1 << (width - 1).bit_length())


@functools.lru_cache(maxsize=16)
def _capability(device: torch.device) -> tuple[int, int]:
    """Generation and bytes of shared memory that a program may use."""
    found = torch.cuda.get_device_properties(device)
    generation = 9 if torch.version.hip is not None else found.major
    return generation, getattr(found, "shared_memory_per_block_optin", 64 * 1024)


def fits(weights: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a fused kernel is the right way to run a network with these weights on operands of this type.

    It is not on Turing, where Triton multiplies without tensor cores while cuBLAS has them, nor for fp32 without TF32,
    nor where weights and tiles exceed the shared memory. Then the library's products run, layer by layer. The factors
    were read off compiled backward kernels: weights are kept once on Hopper, in two orders before it.
    """
    if device.type != "cuda":
        return True
    exact = dtype == torch.float32 and fp32_precision() == "ieee"
    return not exact and _fits(tuple(w.shape for w in weights), dtype, *_capability(device))


@functools.lru_cache(maxsize=64)
def _fits(shapes: tuple[tuple[int, int], ...], dtype: torch.dtype, generation: int, shared: int) -> bool:
    if generation < 8:
        return False
    size = sum(padded(outputs) * padded(inputs) for outputs, inputs in shapes) * dtype.itemsize
    factor = 1.7 if generation >= 9 and dtype != torch.float32 else 3.0
    return factor * size + 24 * 1024 <= shared


def operand_type(dtype: torch.dtype, device: torch.device) -> tl.dtype:
    """What tensor cores multiply. The interpreter cannot multiply bf16, so there it is fp32."""
    return tl.float32 if device.type != "cuda" and dtype == torch.bfloat16 else _OPERANDS[dtype]


def fp32_precision() -> str:
    """How fp32 operands are multiplied: as torch's own matmul would."""
    # `allow_tf32`, the older name, raises once somebody has used this one.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def operands(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """T and PRECISION of a kernel that multiplies this type; only fp32 has a choice, and asking torch for it costs."""
    precision = fp32_precision() if dtype == torch.float32 or device.type != "cuda" else "tf32"
    return {"T": operand_type(dtype, device), "PRECISION": precision}


def is_capacity(n: int, n_used: Tensor | None) -> bool:
    """Whether n is a size to compile for: one whose used rows are counted apart, or a round number of cells or rays.

    Others are a user's samples, another number in every step: for them there is one binary, `for_any_count`.
    """
    return n_used is not None or n % ROUND == 0


def feature_major(n: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Fresh (n, columns) whose memory is (columns, n); of one row, with gaps: no stride between columns may be 1."""
    return torch.empty_strided((n, columns), (1, n if n > 1 else 16), dtype=dtype, device=device)


@triton.jit
def load_weight(
    p, ROWS: tl.constexpr, COLS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, LD: tl.constexpr, T: tl.constexpr
):
    """[ROWS, COLS] = transpose of the (OUT, IN) block at p of a row-major matrix with LD columns, zero-padded."""
    k = tl.arange(0, ROWS)[:, None]
    o = tl.arange(0, COLS)[None, :]
    if ROWS == IN and COLS == OUT:
        b_weight = tl.load(p + o * LD + k)
    else:
        b_weight = tl.load(p + o * LD + k, mask=(k < IN) & (o < OUT), other=0.0)
    return b_weight.to(T)


@triton.jit
def load_tile(
    p, i, n, stride_n, stride_c, WIDTH: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr, T: tl.constexpr
):
    """[BLOCK, COLS] of an (n, WIDTH) tensor. Masks cost vector loads, so there are none where all rows exist."""
    c = tl.arange(0, COLS)
    p += i.to(tl.int64)[:, None] * stride_n + c.to(tl.int64)[None, :] * stride_c
    if EVEN and COLS == WIDTH:
        b_tile = tl.load(p)
    elif EVEN:
        b_tile = tl.load(p, mask=(c < WIDTH)[None, :], other=0.0)
    else:
        b_tile = tl.load(p, mask=(i < n)[:, None] & (c < WIDTH)[None, :], other=0.0)
    return b_tile.to(T)


@triton.jit
def store_tile(p, b_tile, i, n, stride_n, stride_c, WIDTH: tl.constexpr, COLS: tl.constexpr, EVEN: tl.constexpr):
    c = tl.arange(0, COLS)
    p += i.to(tl.int64)[:, None] * stride_n + c.to(tl.int64)[None, :] * stride_c
    b_tile = b_tile.to(p.dtype.element_ty)
    if EVEN and COLS == WIDTH:
        tl.store(p, b_tile)
    elif EVEN:
        tl.store(p, b_tile, mask=(c < WIDTH)[None, :])
    else:
        tl.store(p, b_tile, mask=(i < n)[:, None] & (c < WIDTH)[None, :])


@triton.jit
def zero_blocks(
    p, n_used, n, stride_n, stride_c, WIDTH: tl.constexpr, COLS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr
):
    """Zero the rows of the blocks that hold no used row; each program takes its share."""
    for block in range(tl.cdiv(n_used, BLOCK) + tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        i = block * BLOCK + tl.arange(0, BLOCK)
        store_tile(p, tl.zeros([BLOCK, COLS], tl.float32), i, n, stride_n, stride_c, WIDTH, COLS, EVEN)


@triton.jit
def keep_rows(b_tile, m, ALL: tl.constexpr):
    """Rows that do not count become zero, also where they hold NaN."""
    if ALL:
        return b_tile
    else:
        return tl.where(m[:, None], b_tile, tl.zeros_like(b_tile))


@triton.jit
def relu_layer(b_input, b_weight, T: tl.constexpr, PRECISION: tl.constexpr):
    return tl.maximum(tl.dot(b_input, b_weight, input_precision=PRECISION), 0.0).to(T)


@triton.jit
def relu_backward(b_hidden, b_grad, b_weight, T: tl.constexpr, PRECISION: tl.constexpr):
    """Gradient before the ReLU that gave `b_hidden`, from the gradient after the next weight."""
    b_back = tl.dot(b_grad, tl.trans(b_weight), input_precision=PRECISION)
    return tl.where(b_hidden > 0.0, b_back, 0.0).to(T)


@triton.jit
def zero_sum(ROWS: tl.constexpr, COLS: tl.constexpr):
    """Sum of a weight's gradient: [inputs, outputs] or, where there are more outputs, its transpose.

    The longer side comes first, since that is where the widest tensor-core instructions ask for 64 rows.
    """
    if COLS > ROWS:
        return tl.zeros([COLS, ROWS], tl.float32)
    else:
        return tl.zeros([ROWS, COLS], tl.float32)


@triton.jit
def add_products(b_sum, b_input, b_grad, ROWS: tl.constexpr, COLS: tl.constexpr, PRECISION: tl.constexpr):
    """b_sum += input^T grad, or its transpose."""
    if COLS > ROWS:
        return tl.dot(tl.trans(b_grad), b_input, b_sum, input_precision=PRECISION)
    else:
        return tl.dot(tl.trans(b_input), b_grad, b_sum, input_precision=PRECISION)


@triton.jit
def add_weight(
    p, b_sum, ROWS: tl.constexpr, COLS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, LD: tl.constexpr,
    PARTIAL: tl.constexpr, SIZE: tl.constexpr, p_found_inf,
):  # fmt: skip
    """Add the sum of this program to the (OUT, IN) block at p (None: nowhere); PARTIAL: to this program's own copy.

    What is not finite in a gradient ends up in these sums, so this is where it is looked for.
    """
    if p is not None:
        if COLS > ROWS:
            k = tl.arange(0, ROWS)[None, :]
            o = tl.arange(0, COLS)[:, None]
        else:
            k = tl.arange(0, ROWS)[:, None]
            o = tl.arange(0, COLS)[None, :]
        m = (k < IN) & (o < OUT)
        if p_found_inf is not None:
            bad = ((tl.abs(b_sum) < float("inf")) == 0).to(tl.int32)  # NaN is not below infinity either
            tl.store(p_found_inf, 1.0, mask=tl.max(tl.max(bad, 1), 0) != 0)
        if PARTIAL:
            tl.store(p + tl.program_id(0) * SIZE + o * LD + k, b_sum, mask=m)
        else:
            tl.atomic_add(p + o * LD + k, b_sum, mask=m, sem="relaxed")
