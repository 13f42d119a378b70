"""A wide MLP: products by the vendor's library, everything between them in as few passes as possible.

At 256 columns a product already runs near the memory's speed, and fusing layers would only save what training has to
write for the backward anyway. So the forward is one library call per layer with bias and ReLU in its epilogue. In the
backward, one kernel per layer masks the gradient where the ReLU was off and sums it into the bias's gradient; apart
these are three passes. Columns are padded with zeros to multiples of 8, which fast half products ask for. Weight
gradients in fp32 without TF32 are summed in slices (`_library.py`).

`_mask_kernel`: one program = COLS columns of ROWS-row blocks, strided over the rows; column sums stay in registers and
are added atomically (in deterministic mode: stored per program and added in order). Half or fp32, fp32 sums.
Derivation: docs/ops/mlp.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._common import CompileCase, check_kernel_float, processors
from ._launch import cdiv, launchable
from ._library import sum_of_products

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


def _aligned(width: int) -> int:
    return -(-width // ALIGN) * ALIGN


def _product(a: Tensor, b: Tensor) -> Tensor:
    """aᵀ b with an fp32 result, which a sum over all samples needs."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return sum_of_products(a.float(), b.float())
    return torch.mm(a.t(), b, out_dtype=torch.float32)


def _layers(
    inputs: Tensor,
    parameters: Sequence[Tensor],
    skip: int | None,
    relu_last: bool,
    kept: list[tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """All layers; `kept` takes the input and the padded weight of each, which a backward needs and nobody else."""
    depth = len(parameters) // 2
    weights, biases = parameters[:depth], parameters[depth:]
    hidden = x = _pad(inputs, _aligned(inputs.shape[1]), inputs.dtype)
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


class _WideMlp(torch.autograd.Function):
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
    @once_differentiable
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


def wide_mlp(
    inputs: Tensor, weights: list[Tensor], biases: list[Tensor], *, skip: int | None, relu_last: bool
) -> Tensor:
    check_kernel_float(inputs=inputs, **{f"weights[{k}]": w for k, w in enumerate(weights)})
    check_kernel_float(**{f"biases[{k}]": b for k, b in enumerate(biases)})
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind):  # some products would follow it and others not: all of them do, as a layer
        with torch.autocast(kind, enabled=False):
            half = inputs.to(torch.get_autocast_dtype(kind))
            return wide_mlp(half, weights, biases, skip=skip, relu_last=relu_last)
    if not torch.is_grad_enabled():  # the grid asks for many points at once, and eight layers of them are a gigabyte
        return _layers(inputs, [*weights, *biases], skip, relu_last)
    return _WideMlp.apply(inputs, skip, relu_last, *weights, *biases)


def _case(dtype: str, mask: bool) -> CompileCase:
    signature = {"p_grad": f"*{dtype}", "p_bias": "*fp32", "n": "i32"}
    constexprs = {"WIDTH": 256, "ROWS": ROWS, "COLS": COLS, "MASK": mask, "PARTIAL": False}
    constexprs |= {"stride_g": 256, "stride_h": 256, "stride_o": 256}
    if mask:
        signature |= {"p_hidden": f"*{dtype}", "p_out": f"*{dtype}"}
    else:
        constexprs |= {"p_hidden": None, "p_out": None}
    return CompileCase(_mask_kernel, signature, constexprs, WARPS, name=f"mask-{dtype}-{mask}")


COMPILE_CASES = [_case(dtype, mask) for dtype in ("fp16", "bf16", "fp32") for mask in (True, False)]
