"""Instant-NGP's density and colour networks fused: one forward kernel, two backward kernels.

Persistent programs load the weights once and walk over blocks of BLOCK samples; hidden layers never leave the
multiprocessor. Encoding, features and their gradients are feature-major, raw is stored (4, n); the direction's
encoding is gathered per ray, and instead of concatenating it with the density features, two products share one
accumulator.

The forward keeps the density network's 16 outputs per sample. With them the backward splits into a colour and a
density kernel: one backward of all five layers needs more registers than there are. Weight gradients stay in
registers over the walk and are added atomically once per program (in deterministic mode: stored per program and added
in order).

dtypes: products in the encoding's type, fp32 sums; weights of any float type; raw and its gradient fp32. Derivation:
docs/ops/mlp.md.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...errors import InputError
from .._sink import GradientSink, redirect_all, zero_tail
from ..ngp_field import MAX_LOGIT as _MAX_LOGIT
from ..ngp_field import NgpWeights
from . import fused_mlp
from ._common import CompileCase, check_kernel_float, processors
from ._grid import used_rows
from ._launch import cdiv, for_any_count, launchable
from ._library import library_field
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
from ._ngp_density import ngp_densities, ngp_density

__all__ = ["ngp_densities", "ngp_density", "ngp_field"]

BLOCK, WARPS, STAGES = 64, 4, 3
MAX_LOGIT = tl.constexpr(_MAX_LOGIT)
FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 4, 2  # per multiprocessor


@triton.jit
def _load_directions(
    p_directions, p_rays, i, n, DS: tl.constexpr, PS: tl.constexpr, EVEN: tl.constexpr, T: tl.constexpr
):
    """[BLOCK, PS]: the direction's encoding of each sample's ray; without rays, of the sample."""
    if p_rays is None:
        ray = tl.minimum(i, n - 1)
    elif EVEN:
        ray = tl.load(p_rays + i)
    else:
        ray = tl.load(p_rays + i, mask=i < n, other=0)
    c = tl.arange(0, PS)
    p = p_directions + ray.to(tl.int64)[:, None] * DS + c[None, :]
    if DS == PS:
        return ray, tl.load(p).to(T)
    else:
        return ray, tl.load(p, mask=(c < DS)[None, :], other=0.0).to(T)


@triton.jit
def _colour_hidden(b_s, b_y, W3a, W3b, W4, T: tl.constexpr, PRECISION: tl.constexpr):
    """The two hidden layers of the colour network."""
    b_pre = tl.dot(b_s, W3a, tl.dot(b_y, W3b, input_precision=PRECISION), input_precision=PRECISION)
    h1 = tl.maximum(b_pre, 0.0).to(T)
    return h1, relu_layer(h1, W4, T, PRECISION)


@launchable(do_not_specialize=["n"])
def _forward_kernel(
    p_x, p_directions, p_rays, p_w1, p_w2, p_w3, p_w4, p_w5, p_features, p_raw, p_used, n,
    stride_xn, stride_xc, stride_c,
    DE: tl.constexpr, DS: tl.constexpr, DF: tl.constexpr, DH: tl.constexpr,
    PE: tl.constexpr, PS: tl.constexpr, PF: tl.constexpr, PH: tl.constexpr,
    T: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, ACTIVATED: tl.constexpr,
):  # fmt: skip
    n_used = used_rows(p_used, n)
    ALL: tl.constexpr = EVEN and p_used is None
    W1 = load_weight(p_w1, PE, PH, DE, DH, DE, T)
    W2 = load_weight(p_w2, PH, PF, DH, DF, DH, T)
    W3a = load_weight(p_w3, PS, PH, DS, DH, DS + DF, T)
    W3b = load_weight(p_w3 + DS, PF, PH, DF, DH, DS + DF, T)
    W4 = load_weight(p_w4, PH, PH, DH, DH, DH, T)
    W5 = load_weight(p_w5, PH, 16, DH, 3, DH, T)
    for block in range(tl.program_id(0), tl.cdiv(n_used, BLOCK), tl.num_programs(0)):
        i = block * BLOCK + tl.arange(0, BLOCK)
        m = i < n_used
        b_x = load_tile(p_x, i, n, stride_xn, stride_xc, DE, PE, EVEN, T)
        _ray, b_s = _load_directions(p_directions, p_rays, i, n, DS, PS, EVEN, T)
        b_y = tl.dot(relu_layer(b_x, W1, T, PRECISION), W2, input_precision=PRECISION)
        b_y = keep_rows(b_y, m, ALL)
        _h1, h2 = _colour_hidden(b_s, b_y.to(T), W3a, W3b, W4, T, PRECISION)
        b_c = keep_rows(tl.dot(h2, W5, input_precision=PRECISION), m, ALL)
        if p_features is not None:
            store_tile(p_features, b_y, i, n, 1, stride_c, DF, PF, EVEN)
        logit = tl.sum(tl.where((tl.arange(0, PF) == 0)[None, :], b_y, 0.0), 1)
        if ACTIVATED:
            b_c = 1.0 / (1.0 + tl.exp(-b_c))
            logit = tl.exp(tl.where(logit > MAX_LOGIT, MAX_LOGIT, logit))
        store_tile(p_raw, b_c, i, n, 1, stride_c, 3, 16, EVEN)
        tl.store(p_raw + 3 * tl.cast(stride_c, tl.int64) + i, logit, mask=i < n)
    zero_blocks(p_raw, n_used, n, 1, stride_c, 4, 4, BLOCK, EVEN)


@launchable(do_not_specialize=["n"])
def _colour_backward_kernel(
    p_directions, p_rays, p_features, p_draw, p_dlogit, p_values, p_w3, p_w4, p_w5, p_dfeatures, p_ddirections,
    p_g3, p_g4, p_g5, p_used, p_found_inf, n, stride_c, stride_rn, stride_rc, stride_ln,
    DS: tl.constexpr, DF: tl.constexpr, DH: tl.constexpr, PS: tl.constexpr, PF: tl.constexpr, PH: tl.constexpr,
    T: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    n_used = used_rows(p_used, n)
    ALL: tl.constexpr = EVEN and p_used is None
    W3a = load_weight(p_w3, PS, PH, DS, DH, DS + DF, T)
    W3b = load_weight(p_w3 + DS, PF, PH, DF, DH, DS + DF, T)
    W4 = load_weight(p_w4, PH, PH, DH, DH, DH, T)
    W5 = load_weight(p_w5, PH, 16, DH, 3, DH, T)
    G3a = zero_sum(PS, PH)
    G3b = zero_sum(PF, PH)
    G4 = zero_sum(PH, PH)
    G5 = zero_sum(PH, 16)
    for block in range(tl.program_id(0), tl.cdiv(n_used, BLOCK), tl.num_programs(0)):
        i = block * BLOCK + tl.arange(0, BLOCK)
        m = i < n_used
        ray, b_s = _load_directions(p_directions, p_rays, i, n, DS, PS, EVEN, T)
        b_y = keep_rows(load_tile(p_features, i, n, 1, stride_c, DF, PF, EVEN, T), m, ALL)
        dlogit = tl.load(p_dlogit + i.to(tl.int64) * stride_ln, mask=m, other=0.0).to(tl.float32)
        if p_values is None:
            b_d = keep_rows(load_tile(p_draw, i, n, stride_rn, stride_rc, 3, 16, EVEN, T), m, ALL)
        else:  # gradients of colours and densities, which were stored
            b_rgb = load_tile(p_values, i, n, 1, stride_c, 3, 16, EVEN, tl.float32)
            b_d = load_tile(p_draw, i, n, stride_rn, stride_rc, 3, 16, EVEN, tl.float32)
            b_d = keep_rows((b_d * b_rgb * (1.0 - b_rgb)).to(T), m, ALL)
            dlogit *= tl.load(p_values + 3 * tl.cast(stride_c, tl.int64) + i, mask=m, other=0.0)
        h1, h2 = _colour_hidden(b_s, b_y, W3a, W3b, W4, T, PRECISION)
        G5 = add_products(G5, h2, b_d, PH, 16, PRECISION)
        b_d = relu_backward(h2, b_d, W5, T, PRECISION)
        G4 = add_products(G4, h1, b_d, PH, PH, PRECISION)
        b_d = relu_backward(h1, b_d, W4, T, PRECISION)
        G3a = add_products(G3a, b_s, b_d, PS, PH, PRECISION)
        G3b = add_products(G3b, b_y, b_d, PF, PH, PRECISION)
        b_dy = tl.dot(b_d, tl.trans(W3b), input_precision=PRECISION)
        b_dy += tl.where((tl.arange(0, PF) == 0)[None, :], dlogit[:, None], 0.0)
        store_tile(p_dfeatures, b_dy, i, n, 1, stride_c, DF, PF, EVEN)
        if p_ddirections is not None:
            b_ds = tl.dot(b_d, tl.trans(W3a), input_precision=PRECISION)
            c = tl.arange(0, PS)
            row = i if PARTIAL else ray  # deterministic mode keeps samples apart
            p = p_ddirections + row.to(tl.int64)[:, None] * DS + c[None, :]
            tl.atomic_add(p, b_ds, mask=m[:, None] & (c < DS)[None, :], sem="relaxed")
    add_weight(p_g3, G3a, PS, PH, DS, DH, DS + DF, PARTIAL, DH * (DS + DF), p_found_inf)
    add_weight(p_g3 + DS, G3b, PF, PH, DF, DH, DS + DF, PARTIAL, DH * (DS + DF), p_found_inf)
    add_weight(p_g4, G4, PH, PH, DH, DH, DH, PARTIAL, DH * DH, p_found_inf)
    add_weight(p_g5, G5, PH, 16, DH, 3, DH, PARTIAL, 3 * DH, p_found_inf)


_any_forward_kernel = for_any_count(_forward_kernel, "stride_xc", "stride_c")
_any_colour_backward_kernel = for_any_count(_colour_backward_kernel, "stride_c", "stride_rc")


@functools.lru_cache(maxsize=64)
def _widths(encoding: int, directions: int, features: int, hidden: int) -> dict[str, int]:
    widths = {"DE": encoding, "DS": directions, "DF": features, "DH": hidden}
    return widths | {"P" + name[1:]: padded(width) for name, width in widths.items()}


def _shape(x: Tensor, directions: Tensor, weights: NgpWeights, fixed: bool) -> dict[str, Any]:
    widths = _widths(x.shape[1], directions.shape[1], weights.density_out.shape[0], weights.density_in.shape[0])
    return widths | operands(x.dtype, x.device) | {"BLOCK": BLOCK, "EVEN": fixed and x.shape[0] % BLOCK == 0}


def _programs(n: int, per_processor: int, device: torch.device) -> int:
    return min(cdiv(n, BLOCK), per_processor * processors(device))


def forward(
    x: Tensor, directions: Tensor, rays: Tensor | None, weights: NgpWeights, n_used: Tensor | None, keep: bool,
    *, activated: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """raw (n, 4), or colours and densities, and, if kept, the density network's output (n, features)."""
    n = x.shape[0]
    raw = feature_major(n, 4, torch.float32, x.device)
    features = feature_major(n, weights.density_out.shape[0], x.dtype, x.device) if keep else None
    if n:
        w1, w2, w3, w4, w5 = weights
        fixed = is_capacity(n, n_used)
        kernel = _forward_kernel if fixed else _any_forward_kernel
        kernel[(_programs(n, FORWARD_PROGRAMS, x.device),)](
            p_x=x, p_directions=directions, p_rays=rays, p_w1=w1, p_w2=w2, p_w3=w3, p_w4=w4, p_w5=w5,
            p_features=features, p_raw=raw, p_used=n_used, n=n,
            stride_xn=x.stride(0), stride_xc=x.stride(1), stride_c=raw.stride(1),
            **_shape(x, directions, weights, fixed), ACTIVATED=activated, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return raw, features


def colour_backward(
    x: Tensor, directions: Tensor, rays: Tensor | None, weights: NgpWeights, features: Tensor, draw: Tensor,
    n_used: Tensor | None, sums: list[Tensor], ddirections: Tensor | None, found_inf: Tensor | None = None,
    *, dlogit: Tensor | None = None, values: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gradient of the density network's output; weight gradients added to the last three of `sums`.

    `draw` is the gradient of raw; with the activated `values`, that of the colours, and `dlogit` that of the densities.
    """
    dlogit = draw[:, 3] if dlogit is None else dlogit
    n = features.shape[0]
    dfeatures = torch.empty_strided(features.shape, features.stride(), dtype=features.dtype, device=features.device)
    programs = _programs(n, BACKWARD_PROGRAMS, features.device)
    partial = torch.are_deterministic_algorithms_enabled()
    targets = [torch.empty(programs, *s.shape, device=s.device) if partial else s for s in sums[2:]]
    fixed = is_capacity(n, n_used)
    shape = _shape(x, directions, weights, fixed)
    del shape["DE"], shape["PE"]
    kernel = _colour_backward_kernel if fixed else _any_colour_backward_kernel
    kernel[(programs,)](
        p_directions=directions, p_rays=rays, p_features=features, p_draw=draw, p_dlogit=dlogit, p_values=values,
        p_w3=weights.colour_in, p_w4=weights.colour_mid, p_w5=weights.colour_out,
        p_dfeatures=dfeatures, p_ddirections=ddirections, p_g3=targets[0], p_g4=targets[1], p_g5=targets[2],
        p_used=n_used, p_found_inf=found_inf, n=n, stride_c=features.stride(1),
        stride_rn=draw.stride(0), stride_rc=draw.stride(1), stride_ln=dlogit.stride(0),
        **shape, PARTIAL=partial, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if partial:
        for total, part in zip(sums[2:], targets, strict=True):
            total.add_(part.sum(0))
    return dfeatures


def _directions_gradient(directions: Tensor, rays: Tensor | None) -> Tensor:
    rows = directions.shape[0]
    if rays is not None and torch.are_deterministic_algorithms_enabled():
        rows = rays.shape[0]
    return torch.zeros(rows, directions.shape[1], dtype=torch.float32, device=directions.device)


def zero_sums(weights: Sequence[Tensor]) -> list[Tensor]:
    """fp32 zeros of the matrices' shapes by one fill, each from an aligned address on."""
    begins = [0]
    for weight in weights:
        begins.append(begins[-1] + cdiv(weight.numel(), 32) * 32)
    zeros = torch.zeros(begins[-1], dtype=torch.float32, device=weights[0].device)
    return [zeros.as_strided(w.shape, (w.shape[1], 1), at) for w, at in zip(weights, begins[:-1], strict=True)]


def in_types_of(weights: Sequence[Tensor], sums: Sequence[Tensor]) -> list[Tensor]:
    return [s if s.dtype == w.dtype else s.to(w.dtype) for s, w in zip(sums, weights, strict=True)]


class _NgpField(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        directions: Tensor,
        rays: Tensor | None,
        sink: GradientSink | None,
        n_used: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        raw, features = forward(x, directions, rays, NgpWeights(*weights), n_used, any(ctx.needs_input_grad))
        ctx.save_for_backward(x, directions, rays, features, n_used, *weights)
        ctx.sink = sink
        return raw

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, draw: Tensor) -> tuple[Tensor | None, ...]:
        x, directions, rays, features, n_used, *weights = ctx.saved_tensors
        sums = zero_sums(weights) if ctx.sink is None else list(ctx.sink.buffers)
        found_inf = None if ctx.sink is None else ctx.sink.found_inf
        dx = torch.zeros_like(x) if x.shape[0] == 0 else None
        ddirections = _directions_gradient(directions, rays) if ctx.needs_input_grad[1] else None
        if x.shape[0]:
            dfeatures = colour_backward(
                x, directions, rays, NgpWeights(*weights), features, draw, n_used, sums, ddirections, found_inf
            )
            dx = fused_mlp.backward(
                x, weights[:2], dfeatures, n_used, needs_x=ctx.needs_input_grad[0], sums=sums[:2], found_inf=found_inf
            )
        if ddirections is not None:
            if rays is not None and torch.are_deterministic_algorithms_enabled():
                total = torch.zeros(directions.shape, dtype=torch.float32, device=directions.device)
                ddirections = total.index_add_(0, rays.long(), ddirections)
            ddirections = ddirections.to(directions.dtype)
        grads = [None] * 5 if ctx.sink is not None else in_types_of(weights, sums)
        return dx, ddirections, None, None, None, *grads  # x, directions, rays, sink, n_used, weights


def check_widths(encoding: int, directions: int, weights: NgpWeights) -> None:
    widest = max(encoding, directions, weights.density_out.shape[0], weights.density_in.shape[0])
    if widest > 64:
        raise InputError("weights", "widths up to 64 on the Triton backend", str(widest), "use ops.fused_mlp")


def ngp_field(
    encoding: Tensor,
    directions: Tensor,
    ray_indices: Tensor | None,
    weights: NgpWeights,
    *,
    sink: GradientSink | None = None,
    n_used: Tensor | None = None,
) -> Tensor:
    check_kernel_float(encoding=encoding, directions=directions, **weights._asdict())
    check_widths(encoding.shape[1], directions.shape[1], weights)
    if not fits(weights, encoding.dtype, encoding.device):
        own = NgpWeights(*redirect_all(weights, sink))
        return zero_tail(library_field(zero_tail(encoding, n_used), directions, ray_indices, own), n_used)
    rays = None if ray_indices is None else ray_indices.contiguous()
    return _NgpField.apply(encoding, directions.contiguous(), rays, sink, n_used, *(w.contiguous() for w in weights))


def _cases(dtype: str, operand: Any, *, rays: bool = True) -> list[CompileCase]:
    pointers = {"p_x": dtype, "p_directions": "fp32", "p_features": dtype, "p_raw": "fp32", "p_used": "i32"}
    pointers |= {"p_rays": "i32"} if rays else {"p_values": "fp32"}
    pointers |= {
        "p_found_inf": "fp32",
        "p_draw": "fp32",
        "p_dlogit": "fp32",
        "p_dfeatures": dtype,
        **{f"p_{k}{j}": "fp32" for k in "wg" for j in range(1, 6)},
    }
    signature = {name: f"*{kind}" for name, kind in pointers.items()}
    signature["n"] = "i32"
    widths = {"DE": 32, "DS": 16, "DF": 16, "DH": 64, "PE": 32, "PS": 16, "PF": 16, "PH": 64}
    constexprs = widths | {"T": operand, "PRECISION": "tf32", "BLOCK": BLOCK, "EVEN": True, "PARTIAL": False}
    constexprs |= {"stride_xn": 1, "stride_rn": 1, "stride_ln": 1, "p_ddirections": None, "ACTIVATED": not rays}
    constexprs |= {"p_values": None} if rays else {"p_rays": None}
    constexprs |= dict.fromkeys(["stride_xc", "stride_c", "stride_rc"], 1 << 18)
    result, own = [], "" if rays else "-own"
    for kind, kernel in (("forward", _forward_kernel), ("colour-backward", _colour_backward_kernel)):
        has = set(kernel.arg_names)
        chosen = {k: v for k, v in signature.items() if k in has}
        constant = {k: v for k, v in constexprs.items() if k in has}
        result.append(CompileCase(kernel, chosen, constant, WARPS, STAGES, 64, f"{kind}-{dtype}{own}"))
    return result


TENSOR_CORE_CASES = [
    *_cases("fp16", tl.float16),
    *_cases("fp16", tl.float16, rays=False),
    *_cases("bf16", tl.bfloat16),
]
