"""Networks on a GPU: small ones fused in one kernel, wide ones by the vendor's matrix library. See docs/ops/mlp.md.

Fused: persistent programs load all weights once, then walk over blocks of BLOCK samples; hidden layers stay in
registers. What is allocated here is feature-major. A weight (outputs, inputs) is loaded as the right operand [inputs,
outputs]; widths are padded with zeros to powers of two from 16 on. The backward keeps weight gradients in registers
over the whole walk; where they do not all fit, several launches each take some layers. Library: where no fused kernel
is the right way (`fits`). Wide: one library call per layer, and in the backward one kernel per layer that masks the
gradient and sums it into the bias's; columns are padded to multiples of 8.

dtypes: half inputs multiply in their type and accumulate in fp32; fp32 inputs multiply as torch's matmul does. Weight
and bias gradients are atomic sums of per-program sums; in deterministic mode those are stored and added in order.
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...errors import InputError
from .._sink import GradientSink, Node, redirect_all, zero_tail
from .._triton import cdiv, check_kernel_float, feature_major, for_any_count, launchable, processors, used_rows

ROUND = 4096
_OPERANDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def padded(width: int) -> int:
    """The smallest width a tensor core takes that holds `width` columns."""
    return max(16, 1 << (width - 1).bit_length())


@functools.lru_cache(maxsize=16)
def _capability(device: torch.device) -> tuple[int, int]:
    """Generation and bytes of shared memory that a program may use; without a GPU, more than any kernel takes."""
    if device.type != "cuda":
        return 9, 1 << 30
    found = torch.cuda.get_device_properties(device)
    generation = 9 if torch.version.hip is not None else found.major
    if generation in (10, 11):  # Triton fails to compile backward kernels for the tensor cores that are new there
        os.environ.setdefault("DISABLE_MMA_V5", "1")
    return generation, getattr(found, "shared_memory_per_block_optin", 64 * 1024)


def fits(weights: Sequence[Tensor], dtype: torch.dtype, device: torch.device, *, beside: int = 0) -> bool:
    """Whether a fused kernel is the right way to run a network with these weights on operands of this type. It is not
    on Turing, where Triton multiplies without tensor cores while cuBLAS has them, nor for fp32 without TF32, nor where
    weights and tiles, `beside` columns more, exceed the shared memory. Then the library's products run, by layers."""
    if max(max(w.shape) for w in weights) > MAX_WIDTH:
        return False
    exact = device.type == "cuda" and dtype == torch.float32 and fp32_precision() == "ieee"
    return not exact and _fits(tuple(w.shape for w in weights), dtype, *_capability(device), BLOCK, beside)


# Copies in shared memory, elsewhere and on Hopper, of weights and, in each row of a tile, of columns that come in or go
# out and of hidden ones: no fewer than the kernels of hundreds of networks hold, compiled.
_HALF_COPIES, _FLOAT_COPIES = ((1.85, 3.05, 1.1), (1.0, 4.0, 1.05)), ((1.25, 4.05, 1.35), (1.45, 3.9, 1.2))


@functools.lru_cache(maxsize=64)
def _fits(shapes, dtype: torch.dtype, generation: int, shared: int, block: int, beside: int = 0) -> bool:
    of_weights, of_ends, of_hidden = (_HALF_COPIES if dtype.itemsize == 2 else _FLOAT_COPIES)[generation == 9]
    size = sum(padded(outputs) * padded(inputs) for outputs, inputs in shapes)
    first, *hidden, last = padded(shapes[0][1]), *(padded(outputs) for outputs, _ in shapes)
    columns = of_ends * (first + last + beside) + of_hidden * sum(hidden)
    return generation >= 8 and (of_weights * size + block * columns) * dtype.itemsize <= shared


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
    Others are a user's samples, another number in every step: for them there is one binary, `for_any_count`."""
    return n_used is not None or n % ROUND == 0


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
    """Sum of a weight's gradient: [inputs, outputs] or, where there are more outputs, its transpose. The longer side
    comes first, since that is where the widest tensor-core instructions ask for 64 rows."""
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
    What is not finite in a gradient ends up in these sums, so this is where it is looked for."""
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


SLICE = 1024  # samples a partial sum
LARGEST_PARTIAL = 1 << 23  # numbers in all partial sums together: 32 MB


def sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ b of (n, p) and (n, q): (p, q)."""
    n = a.shape[0]
    most = LARGEST_PARTIAL // max(1, a.shape[1] * b.shape[1])
    slices = min(n // SLICE, most) if a.dtype == torch.float32 and fp32_precision() == "ieee" else 1
    if slices < 2:
        return a.t() @ b
    rows = n // slices
    whole = slices * rows
    parts = [value[:whole].unflatten(0, (slices, rows)) for value in (a, b)]
    total = torch.bmm(parts[0].transpose(1, 2), parts[1]).sum(0)
    return total if whole == n else torch.addmm(total, a[whole:].t(), b[whole:])


class _Linear(torch.autograd.Function):
    """x Wᵀ, with the weight's gradient as above."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        return grad @ weight if needs_x else None, sum_of_products(grad, x) if needs_weight else None


def library_mlp(inputs: Tensor, weights: list[Tensor]) -> Tensor:
    """`fused_mlp`, layer by layer."""
    hidden = inputs
    for weight in weights[:-1]:
        hidden = torch.relu(_Linear.apply(hidden, weight.to(hidden.dtype)))
    return _Linear.apply(hidden, weights[-1].to(hidden.dtype))


MAX_LAYERS, MAX_WIDTH = 4, 128
MAX_LOGIT = tl.constexpr(15.0)
BLOCK, STAGES = 64, 3
FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 4, 2  # per multiprocessor
SUMS_IN_REGISTERS = {4: 8192, 8: 20480}  # numbers of weight gradient that one backward launch adds up, by its warps


@launchable(do_not_specialize=["n"])
def _forward_kernel(
    p_x, p_w0, p_w1, p_w2, p_last, p_y, p_used, n, stride_xn, stride_xc, stride_yn, stride_yc,
    HIDDEN: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr, DL: tl.constexpr,
    DY: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr, PL: tl.constexpr,
    PY: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    EXPONENTIAL: tl.constexpr,
):  # fmt: skip
    n_used = used_rows(p_used, n)
    ALL: tl.constexpr = EVEN and p_used is None
    if HIDDEN > 0:
        W0 = load_weight(p_w0, P0, P1, D0, D1, D0, T)
    if HIDDEN > 1:
        W1 = load_weight(p_w1, P1, P2, D1, D2, D1, T)
    if HIDDEN > 2:
        W2 = load_weight(p_w2, P2, P3, D2, D3, D2, T)
    WL = load_weight(p_last, PL, PY, DL, DY, DL, T)
    for block in range(tl.program_id(0), tl.cdiv(n_used, BLOCK), tl.num_programs(0)):
        i = block * BLOCK + tl.arange(0, BLOCK)
        b = load_tile(p_x, i, n, stride_xn, stride_xc, D0, P0, EVEN, T)
        if HIDDEN > 0:
            b = relu_layer(b, W0, T, PRECISION)
        if HIDDEN > 1:
            b = relu_layer(b, W1, T, PRECISION)
        if HIDDEN > 2:
            b = relu_layer(b, W2, T, PRECISION)
        b_y = tl.dot(b, WL, input_precision=PRECISION)
        if EXPONENTIAL:
            b_y = tl.exp(tl.where(b_y > MAX_LOGIT, MAX_LOGIT, b_y))
        b_y = keep_rows(b_y, i < n_used, ALL)
        store_tile(p_y, b_y, i, n, stride_yn, stride_yc, DY, PY, EVEN)
    zero_blocks(p_y, n_used, n, stride_yn, stride_yc, DY, PY, BLOCK, EVEN)


@launchable(do_not_specialize=["n"])
def _backward_kernel(
    p_x, p_w0, p_w1, p_w2, p_last, p_dy, p_dx, p_g0, p_g1, p_g2, p_gl, p_used, p_found_inf, n,
    stride_xn, stride_xc, stride_yn, stride_yc, stride_dn, stride_dc,
    HIDDEN: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr, DL: tl.constexpr,
    DY: tl.constexpr, P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr, PL: tl.constexpr,
    PY: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    PARTIAL: tl.constexpr,
):  # fmt: skip
    """A pointer of None leaves that gradient out; the compiler drops what only it needed."""
    n_used = used_rows(p_used, n)
    ALL: tl.constexpr = EVEN and p_used is None
    WL = load_weight(p_last, PL, PY, DL, DY, DL, T)
    if HIDDEN > 0:
        W0 = load_weight(p_w0, P0, P1, D0, D1, D0, T)
    if HIDDEN > 1:
        W1 = load_weight(p_w1, P1, P2, D1, D2, D1, T)
    if HIDDEN > 2:
        W2 = load_weight(p_w2, P2, P3, D2, D3, D2, T)
    G0 = zero_sum(P0, P1)
    G1 = zero_sum(P1, P2)
    G2 = zero_sum(P2, P3)
    GL = zero_sum(PL, PY)
    for block in range(tl.program_id(0), tl.cdiv(n_used, BLOCK), tl.num_programs(0)):
        i = block * BLOCK + tl.arange(0, BLOCK)
        m = i < n_used
        b_x = keep_rows(load_tile(p_x, i, n, stride_xn, stride_xc, D0, P0, EVEN, T), m, ALL)
        b_d = keep_rows(load_tile(p_dy, i, n, stride_yn, stride_yc, DY, PY, EVEN, T), m, ALL)
        h = b_x
        if HIDDEN > 0:
            h1 = relu_layer(b_x, W0, T, PRECISION)
            h = h1
        if HIDDEN > 1:
            h2 = relu_layer(h1, W1, T, PRECISION)
            h = h2
        if HIDDEN > 2:
            h3 = relu_layer(h2, W2, T, PRECISION)
            h = h3
        if p_gl is not None:
            GL = add_products(GL, h, b_d, PL, PY, PRECISION)
        if HIDDEN > 0:
            b_d = relu_backward(h, b_d, WL, T, PRECISION)
        if HIDDEN > 2:
            if p_g2 is not None:
                G2 = add_products(G2, h2, b_d, P2, P3, PRECISION)
            b_d = relu_backward(h2, b_d, W2, T, PRECISION)
        if HIDDEN > 1:
            if p_g1 is not None:
                G1 = add_products(G1, h1, b_d, P1, P2, PRECISION)
            b_d = relu_backward(h1, b_d, W1, T, PRECISION)
        if HIDDEN > 0 and p_g0 is not None:
            G0 = add_products(G0, b_x, b_d, P0, P1, PRECISION)
        if p_dx is not None:
            b_dx = tl.dot(b_d, tl.trans(W0 if HIDDEN > 0 else WL), input_precision=PRECISION)
            store_tile(p_dx, b_dx, i, n, stride_dn, stride_dc, D0, P0, EVEN)
    if p_dx is not None:
        zero_blocks(p_dx, n_used, n, stride_dn, stride_dc, D0, P0, BLOCK, EVEN)
    add_weight(p_g0, G0, P0, P1, D0, D1, D0, PARTIAL, D0 * D1, p_found_inf)
    add_weight(p_g1, G1, P1, P2, D1, D2, D1, PARTIAL, D1 * D2, p_found_inf)
    add_weight(p_g2, G2, P2, P3, D2, D3, D2, PARTIAL, D2 * D3, p_found_inf)
    add_weight(p_gl, GL, PL, PY, DL, DY, DL, PARTIAL, DL * DY, p_found_inf)


_any_forward_kernel = for_any_count(_forward_kernel, "stride_xc", "stride_yc")
_any_backward_kernel = for_any_count(_backward_kernel, "stride_xc", "stride_yc", "stride_dc")


def _shape(x: Tensor, weights: list[Tensor]) -> dict[str, Any]:
    """Constexprs of both kernels: HIDDEN layers, the widths D and their padded P."""
    return _widths((x.shape[1], *(w.shape[0] for w in weights))) | operands(x.dtype, x.device)


@functools.lru_cache(maxsize=64)
def _widths(widths: tuple[int, ...]) -> dict[str, Any]:
    hidden = len(widths) - 2
    result = dict(zip(("D0", "D1", "D2", "D3"), (*widths[:-1], 1, 1, 1), strict=False))
    result |= {"HIDDEN": hidden, "DL": widths[hidden], "DY": widths[-1]}
    return result | {"P" + name[1:]: padded(width) for name, width in result.items() if name.startswith("D")}


def _pointers(weights: list[Tensor], names: tuple[str, str, str, str]) -> dict[str, Tensor | None]:
    *hidden, last = weights
    first, second, third = (*hidden, None, None, None)[:3]
    return {names[0]: first, names[1]: second, names[2]: third, names[3]: last}


def _tile(x: Tensor, weights: list[Tensor], fixed: bool) -> dict[str, Any]:
    """Wide networks take twice the rows and warps, where that fits."""
    shapes = tuple(w.shape for w in weights)
    wide = max(map(max, shapes)) > 64 and _fits(shapes, x.dtype, *_capability(x.device), 2 * BLOCK)
    block, warps = (2 * BLOCK, 8) if wide else (BLOCK, 4)
    return {"BLOCK": block, "EVEN": fixed and x.shape[0] % block == 0, "num_warps": warps, "num_stages": STAGES}


def mlp_forward(x, weights, n_used, *, dtype=None, exponential=False) -> Tensor:
    """(n, outputs) in the type of x, or in another: sums are fp32 whatever it is. `exponential`: exp(min(y, 15))."""
    n = x.shape[0]
    y = feature_major(n, weights[-1].shape[0], dtype or x.dtype, x.device)
    if n == 0:
        return y
    shape, fixed = _shape(x, weights), is_capacity(n, n_used)
    tile = _tile(x, weights, fixed)
    programs = min(cdiv(n, tile["BLOCK"]), FORWARD_PROGRAMS * processors(x.device))
    kernel = _forward_kernel if fixed else _any_forward_kernel
    kernel[(programs,)](
        p_x=x, **_pointers(weights, ("p_w0", "p_w1", "p_w2", "p_last")), p_y=y, p_used=n_used, n=n,
        stride_xn=x.stride(0), stride_xc=x.stride(1), stride_yn=y.stride(0), stride_yc=y.stride(1),
        **shape, **tile, EXPONENTIAL=exponential,
    )  # fmt: skip
    return y


@functools.lru_cache(maxsize=64)
def _groups(shapes: tuple[tuple[int, int], ...], wanted: tuple[bool, ...], most: int) -> list[list[int]]:
    """Layers whose weight gradients share a launch: as many as fit into registers, from the last layer down."""
    groups: list[list[int]] = [[]]
    room = most
    for index in reversed(range(len(shapes))):
        if not wanted[index]:
            continue
        size = padded(shapes[index][0]) * padded(shapes[index][1])
        if groups[-1] and size > room:
            groups.append([])
            room = most
        groups[-1].append(index)
        room -= size
    return groups


def mlp_backward(x, weights, dy, n_used, *, needs_x, sums, found_inf=None) -> Tensor | None:
    """Gradient of x, and the weights' gradients added to `sums` (None: not wanted)."""
    n = x.shape[0]
    dx = feature_major(n, x.shape[1], x.dtype, x.device) if needs_x else None
    if n == 0:
        return dx
    shape, fixed = _shape(x, weights), is_capacity(n, n_used)
    tile = _tile(x, weights, fixed)
    programs = min(cdiv(n, tile["BLOCK"]), BACKWARD_PROGRAMS * processors(x.device))
    partial = torch.are_deterministic_algorithms_enabled()
    most = SUMS_IN_REGISTERS[tile["num_warps"]]
    groups = _groups(tuple(w.shape for w in weights), tuple(s is not None for s in sums), most)
    kernel = _backward_kernel if fixed else _any_backward_kernel
    for group in groups:
        last = group is groups[-1]  # the launch that goes down to the first layer also gives dx
        targets = [
            None if k not in group else torch.empty(programs, *s.shape, device=s.device) if partial else s
            for k, s in enumerate(sums)
        ]
        out = dx if last else None
        kernel[(programs,)](
            p_x=x, **_pointers(weights, ("p_w0", "p_w1", "p_w2", "p_last")), p_dy=dy, p_dx=out,
            **_pointers(targets, ("p_g0", "p_g1", "p_g2", "p_gl")), p_used=n_used, p_found_inf=found_inf, n=n,
            stride_xn=x.stride(0), stride_xc=x.stride(1), stride_yn=dy.stride(0), stride_yc=dy.stride(1),
            stride_dn=1 if out is None else out.stride(0), stride_dc=1 if out is None else out.stride(1),
            **shape, **tile, PARTIAL=partial,
        )  # fmt: skip
        if partial:
            for k in group:
                sums[k].add_(targets[k].sum(0))
    return dx


def zero_sums(weights: Sequence[Tensor]) -> list[Tensor]:
    """fp32 zeros of the matrices' shapes by one fill, each from an aligned address on."""
    begins = [0]
    for weight in weights:
        begins.append(begins[-1] + cdiv(weight.numel(), 32) * 32)
    zeros = torch.zeros(begins[-1], dtype=torch.float32, device=weights[0].device)
    return [zeros.as_strided(w.shape, (w.shape[1], 1), at) for w, at in zip(weights, begins[:-1], strict=True)]


def in_types_of(weights: Sequence[Tensor], sums: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [s if s is None or s.dtype == w.dtype else s.to(w.dtype) for s, w in zip(sums, weights, strict=True)]


class _FusedMlp(Node):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sink: GradientSink | None, n_used: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, n_used, *weights)
        ctx.sink = sink
        return mlp_forward(x, list(weights), n_used)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, n_used, *weights = ctx.saved_tensors
        buffers = zero_sums(weights) if ctx.sink is None else ctx.sink.buffers
        sums = [b if want else None for b, want in zip(buffers, ctx.needs_input_grad[3:], strict=True)]
        found_inf = None if ctx.sink is None else ctx.sink.found_inf
        dx = mlp_backward(x, weights, dy, n_used, needs_x=ctx.needs_input_grad[0], sums=sums, found_inf=found_inf)
        grads = [None] * len(weights) if ctx.sink is not None else in_types_of(weights, sums)
        return dx, None, None, *grads  # x, sink, n_used, weights


def fused_mlp(inputs, weights, *, sink=None, n_used=None) -> Tensor:
    check_kernel_float(inputs=inputs, **{f"weights[{k}]": w for k, w in enumerate(weights)})
    widths = [inputs.shape[1], *(w.shape[0] for w in weights)]
    if len(weights) > MAX_LAYERS or max(widths) > MAX_WIDTH:
        got = f"{len(weights)} layers, widths {widths}"
        wanted = f"at most {MAX_LAYERS} layers, {MAX_WIDTH} wide, on the Triton backend"
        raise InputError("weights", wanted, got, "use ops.wide_mlp or torch.nn.Linear for larger networks")
    if not fits(weights, inputs.dtype, inputs.device):
        return zero_tail(library_mlp(zero_tail(inputs, n_used), redirect_all(weights, sink)), n_used)
    return _FusedMlp.apply(inputs, sink, n_used, *(w.contiguous() for w in weights))


ROWS, COLS, WARPS = 32, 128, 4
ALIGN = 8


@launchable(do_not_specialize=["n"])
def _mask_kernel(
    p_grad, p_hidden, p_out, p_bias, n, stride_g, stride_h, stride_o,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, MASK: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """out = grad where hidden > 0, else 0 (MASK), and bias += column sums of out; rows are contiguous."""
    c = tl.program_id(1) * COLS + tl.arange(0, COLS)
    b_sum = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(tl.program_id(0) * ROWS, n, tl.num_programs(0) * ROWS):
        i = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        if WIDTH % COLS == 0:
            m = i < n
        else:
            m = (i < n) & (c < WIDTH)[None, :]
        b_grad = tl.load(p_grad + i * stride_g + c[None, :], mask=m, other=0.0)
        if MASK:
            b_hidden = tl.load(p_hidden + i * stride_h + c[None, :], mask=m, other=0.0)
            b_grad = tl.where(b_hidden > 0.0, b_grad, tl.zeros_like(b_grad))
            tl.store(p_out + i * stride_o + c[None, :], b_grad, mask=m)
        b_sum += b_grad.to(tl.float32)
    total = tl.sum(b_sum, 0)
    if PARTIAL:
        tl.store(p_bias + tl.program_id(0) * WIDTH + c, total, mask=c < WIDTH)
    else:
        tl.atomic_add(p_bias + c, total, mask=c < WIDTH, sem="relaxed")


def mask_and_sum(grad: Tensor, hidden: Tensor | None, bias: Tensor) -> Tensor:
    """The gradient before the ReLU that gave `hidden` (None: there was none); its column sums added to `bias`."""
    n, width = grad.shape
    out = grad if hidden is None else torch.empty_like(grad, memory_format=torch.contiguous_format)
    if n == 0:
        return out
    programs = min(cdiv(n, ROWS), 4 * processors(grad.device))
    partial = torch.are_deterministic_algorithms_enabled()
    target = torch.empty(programs, width, device=bias.device) if partial else bias
    _mask_kernel[(programs, cdiv(width, COLS))](
        p_grad=grad, p_hidden=hidden, p_out=None if hidden is None else out, p_bias=target, n=n,
        stride_g=grad.stride(0), stride_h=1 if hidden is None else hidden.stride(0), stride_o=out.stride(0),
        WIDTH=width, ROWS=ROWS, COLS=COLS, MASK=hidden is not None, PARTIAL=partial, num_warps=WARPS,
    )  # fmt: skip
    if partial:
        bias.add_(target.sum(0))
    return out


def _pad(matrix: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """In the given type, with zero columns up to `columns`."""
    missing = columns - matrix.shape[1]
    matrix = matrix.to(dtype)
    return torch.nn.functional.pad(matrix, (0, missing)) if missing else matrix


def _product(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ b with an fp32 result, which a sum over all samples needs."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return sum_of_products(a.float(), b.float())
    return torch.mm(a.t(), b, out_dtype=torch.float32)


def _layers(inputs, parameters, skip, relu_last, kept=None) -> Tensor:
    """All layers; `kept` takes the input and the padded weight of each, which a backward needs and nobody else."""
    depth = len(parameters) // 2
    weights, biases = parameters[:depth], parameters[depth:]
    hidden = x = _pad(inputs, cdiv(inputs.shape[1], ALIGN) * ALIGN, inputs.dtype)
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if index == skip:
            hidden = torch.cat([hidden, x], dim=-1)
        half = _pad(weight, hidden.shape[1], x.dtype)
        if kept is not None:
            kept.append((hidden, half))
        if relu_last or index + 1 < depth:
            hidden = torch._addmm_activation(bias.to(x.dtype), hidden, half.t())
        else:
            hidden = torch.addmm(bias.to(x.dtype), hidden, half.t())
    return hidden


class _WideMlp(Node):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, skip: int | None, relu_last: bool, *parameters: Tensor) -> Tensor:
        weights, kept = parameters[: len(parameters) // 2], []
        hidden = _layers(inputs, parameters, skip, relu_last, kept)
        seen, halves = zip(*kept, strict=True)
        ctx.save_for_backward(*seen, hidden if relu_last else None, *halves)
        ctx.skip, ctx.dtypes = skip, [p.dtype for p in parameters]
        ctx.widths = [inputs.shape[1], *(w.shape[1] for w in weights)]
        return hidden

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        depth = len(ctx.dtypes) // 2
        saved = ctx.saved_tensors
        seen, out, halves = saved[:depth], saved[depth], saved[depth + 1 :]
        sizes = [half.shape[0] for half in halves]
        sums = torch.zeros(sum(sizes), dtype=torch.float32, device=grad.device).split(sizes)
        grads_w: list[Tensor | None] = [None] * depth
        through_skip = grad_inputs = None
        if grad.stride(1) != 1 or not grad.is_floating_point():
            grad = grad.contiguous()
        for index in reversed(range(depth)):
            # The ReLU of layer `index` gave the input of the next layer, or the head of it where the skip joins.
            hidden = out if index + 1 == depth else seen[index + 1][:, : sizes[index]]
            grad = mask_and_sum(grad, hidden, sums[index])
            if ctx.needs_input_grad[3 + index]:
                grads_w[index] = _product(grad, seen[index])[:, : ctx.widths[1 + index]].to(ctx.dtypes[index])
            if index == 0 and not ctx.needs_input_grad[0]:
                break
            grad = grad @ halves[index]
            if index == ctx.skip:
                width = seen[0].shape[1]
                grad, through_skip = grad[:, :-width], grad[:, -width:]
        if ctx.needs_input_grad[0]:
            grad_inputs = (grad if through_skip is None else grad + through_skip)[:, : ctx.widths[0]]
        grads_b = [s.to(dtype) for s, dtype in zip(sums, ctx.dtypes[depth:], strict=True)]
        return grad_inputs, None, None, *grads_w, *grads_b  # inputs, skip, relu_last, weights, biases


def wide_mlp(inputs, weights, biases, *, skip, relu_last) -> Tensor:
    check_kernel_float(inputs=inputs, **{f"weights[{k}]": w for k, w in enumerate(weights)})
    check_kernel_float(**{f"biases[{k}]": b for k, b in enumerate(biases)})
    if not torch.is_grad_enabled():  # the grid asks for many points at once, and eight layers of them are a gigabyte
        return _layers(inputs, [*weights, *biases], skip, relu_last)
    return _WideMlp.apply(inputs, skip, relu_last, *weights, *biases)
