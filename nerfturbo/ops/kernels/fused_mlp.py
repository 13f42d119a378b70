"""A small MLP in one kernel: weights stay in the multiprocessor, hidden layers in registers.

Persistent programs: each loads all weights once, then walks over blocks of BLOCK samples. Inputs and outputs are
[BLOCK, columns] tiles in any strides; what is allocated here is feature-major (an (outputs, n) buffer, transposed),
which coalesces for the encoder before and the field after. The backward recomputes the hidden layers (cheaper than
storing them), keeps weight gradients in registers over the whole walk and adds them once per program. Where they do
not all fit, several launches each take some layers.

dtypes: fp16 and bf16 inputs multiply in that type and accumulate in fp32; fp32 inputs multiply as torch's matmul does
(TF32 only when allowed). Weights of any float type are rounded to the input's type. Weight gradients are atomic sums
of per-program sums; in deterministic mode per-program sums are stored and added in order. Derivation:
docs/ops/mlp.md.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...errors import InputError
from .._sink import GradientSink, redirect_all, zero_tail
from ._common import CompileCase, check_kernel_float, processors
from ._grid import used_rows
from ._launch import cdiv, for_any_count, launchable
from ._library import library_mlp
from ._mlp import (
    add_products,
    add_weight,
    feature_major,
    fits,
    is_capacity,
    keep_rows,
    load_tile,
    load_weight,
    operands,
    padded,
    relu_backward,
    relu_layer,
    store_tile,
    zero_blocks,
    zero_sum,
)

MAX_LAYERS, MAX_WIDTH = 4, 128
MAX_LOGIT = tl.constexpr(15.0)
BLOCK, STAGES = 64, 3
FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 4, 2  # per multiprocessor
SUMS_IN_REGISTERS = 8192  # numbers of weight gradient that one backward launch accumulates


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
    result: dict[str, Any] = {"HIDDEN": hidden}
    names = ["D0", "D1", "D2", "D3"]
    for index, name in enumerate(names):
        result[name] = widths[index] if index <= hidden else 1
    result |= {"DL": widths[hidden], "DY": widths[-1]}
    return result | {"P" + name[1:]: padded(width) for name, width in result.items() if name.startswith("D")}


def _pointers(weights: list[Tensor], names: tuple[str, str, str, str]) -> dict[str, Tensor | None]:
    *hidden, last = weights
    first, second, third = (*hidden, None, None, None)[:3]
    return {names[0]: first, names[1]: second, names[2]: third, names[3]: last}


def _tile(even: bool, shape: dict[str, Any]) -> dict[str, Any]:
    widest = max(shape["P0"], shape["P1"], shape["P2"], shape["P3"], shape["PL"], shape["PY"])
    return {"BLOCK": BLOCK, "EVEN": even, "num_warps": 4 if widest <= 64 else 8, "num_stages": STAGES}


def forward(
    x: Tensor, weights: list[Tensor], n_used: Tensor | None, *, dtype: torch.dtype | None = None,
    exponential: bool = False,
) -> Tensor:  # fmt: skip
    """(n, outputs) in the type of x, or in another: sums are fp32 whatever it is. `exponential`: exp(min(y, 15))."""
    n = x.shape[0]
    y = feature_major(n, weights[-1].shape[0], dtype or x.dtype, x.device)
    if n == 0:
        return y
    shape, fixed = _shape(x, weights), is_capacity(n, n_used)
    tile = _tile(fixed and n % BLOCK == 0, shape)
    programs = min(cdiv(n, tile["BLOCK"]), FORWARD_PROGRAMS * processors(x.device))
    kernel = _forward_kernel if fixed else _any_forward_kernel
    kernel[(programs,)](
        p_x=x, **_pointers(weights, ("p_w0", "p_w1", "p_w2", "p_last")), p_y=y, p_used=n_used, n=n,
        stride_xn=x.stride(0), stride_xc=x.stride(1), stride_yn=y.stride(0), stride_yc=y.stride(1),
        **shape, **tile, EXPONENTIAL=exponential,
    )  # fmt: skip
    return y


@functools.lru_cache(maxsize=64)
def _groups(shapes: tuple[tuple[int, int], ...], wanted: tuple[bool, ...]) -> list[list[int]]:
    """Layers whose weight gradients share a launch: as many as fit into registers, from the last layer down."""
    groups: list[list[int]] = [[]]
    room = SUMS_IN_REGISTERS
    for index in reversed(range(len(shapes))):
        if not wanted[index]:
            continue
        size = padded(shapes[index][0]) * padded(shapes[index][1])
        if groups[-1] and size > room:
            groups.append([])
            room = SUMS_IN_REGISTERS
        groups[-1].append(index)
        room -= size
    return groups


def backward(
    x: Tensor, weights: list[Tensor], dy: Tensor, n_used: Tensor | None, *, needs_x: bool, sums: list[Tensor | None],
    found_inf: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Gradient of x, and the weights' gradients added to `sums` (None: not wanted)."""
    n = x.shape[0]
    dx = feature_major(n, x.shape[1], x.dtype, x.device) if needs_x else None
    if n == 0:
        return dx
    shape, fixed = _shape(x, weights), is_capacity(n, n_used)
    tile = _tile(fixed and n % BLOCK == 0, shape)
    programs = min(cdiv(n, tile["BLOCK"]), BACKWARD_PROGRAMS * processors(x.device))
    partial = torch.are_deterministic_algorithms_enabled()
    groups = _groups(tuple(w.shape for w in weights), tuple(s is not None for s in sums))
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


class _FusedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sink: GradientSink | None, n_used: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, n_used, *weights)
        ctx.sink = sink
        return forward(x, list(weights), n_used)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, n_used, *weights = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        if ctx.sink is not None:
            sums = [b if want else None for b, want in zip(ctx.sink.buffers, wanted, strict=True)]
        else:
            sums = [
                torch.zeros(w.shape, dtype=torch.float32, device=w.device) if want else None
                for w, want in zip(weights, wanted, strict=True)
            ]
        found_inf = None if ctx.sink is None else ctx.sink.found_inf
        dx = backward(x, weights, dy, n_used, needs_x=ctx.needs_input_grad[0], sums=sums, found_inf=found_inf)
        grads = [None] * len(weights)
        if ctx.sink is None:
            grads = [None if s is None else s.to(w.dtype) for s, w in zip(sums, weights, strict=True)]
        return dx, None, None, *grads  # x, sink, n_used, weights


def fused_mlp(
    inputs: Tensor, weights: list[Tensor], *, sink: GradientSink | None = None, n_used: Tensor | None = None
) -> Tensor:
    check_kernel_float(inputs=inputs, **{f"weights[{k}]": w for k, w in enumerate(weights)})
    widths = [inputs.shape[1], *(w.shape[0] for w in weights)]
    if len(weights) > MAX_LAYERS or max(widths) > MAX_WIDTH:
        got = f"{len(weights)} layers, widths {widths}"
        wanted = f"at most {MAX_LAYERS} layers, {MAX_WIDTH} wide, on the Triton backend"
        raise InputError("weights", wanted, got, "use ops.wide_mlp or torch.nn.Linear for larger networks")
    if not fits(weights, inputs.dtype, inputs.device):
        return zero_tail(library_mlp(zero_tail(inputs, n_used), redirect_all(weights, sink)), n_used)
    return _FusedMlp.apply(inputs, sink, n_used, *(w.contiguous() for w in weights))


def _cases(dtype: str, operand: Any, widths: tuple[int, ...], **tile: Any) -> list[CompileCase]:
    weights = [torch.empty(b, a, device="meta") for a, b in itertools.pairwise(widths)]
    shape = _shape(torch.empty(1, widths[0], device="meta"), weights) | {"T": operand, "PRECISION": "tf32"}
    hidden = shape["HIDDEN"]
    absent = {f"p_{kind}{k}": None for kind in "wg" for k in range(hidden, 3)}
    pointers = {f"p_{kind}{k}": "*fp32" for kind in "wg" for k in range(hidden)} | {"p_last": "*fp32", "p_gl": "*fp32"}
    signature = {"p_x": f"*{dtype}", "p_y": f"*{dtype}", "p_dy": f"*{dtype}", "p_dx": f"*{dtype}", "p_used": "*i32"}
    signature |= {"p_found_inf": "*fp32", "n": "i32", **pointers}
    constexprs = {**shape, **absent, "BLOCK": 64, "EVEN": True, "PARTIAL": False, "EXPONENTIAL": False}
    constexprs |= {f"stride_{name}{axis}": step for name in "xyd" for axis, step in (("n", 1), ("c", 1 << 18))}
    name = f"{dtype}-{'-'.join(map(str, widths))}"
    result = []
    for kind, kernel in (("forward", _forward_kernel), ("backward", _backward_kernel)):
        has = set(kernel.arg_names)
        result.append(
            CompileCase(
                kernel,
                {k: v for k, v in signature.items() if k in has},
                {k: v for k, v in constexprs.items() if k in has},
                num_warps=tile.get("num_warps", 4),
                num_stages=3,
                name=f"{kind}-{name}",
            )
        )
    return result


TENSOR_CORE_CASES = [
    *_cases("fp16", tl.float16, (32, 64, 16)),
    *_cases("bf16", tl.bfloat16, (32, 64, 64, 16)),
]
