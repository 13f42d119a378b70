"""Instant-NGP's networks fused: one forward kernel, a backward kernel for each; density and visibility in one walk.

Networks, as in `mlp` (docs/ops/mlp.md): encoding, features and their gradients are feature-major, raw is stored (4, n);
directions are gathered per ray. Above 64 wide the colour's backward is launched twice. Encoding and network are two
launches: one kernel for both took three times as long on an H200, with few gathers in flight.

Visibility: one launch lists the rays that have samples, long ones first. Then persistent programs, each with SLOTS
slots: a slot holds one ray, takes its next STEPS samples in each round, and takes another ray from the list, by an
atomic counter, once its own has ended or is opaque: every round works on a full tile, whatever the rays' lengths. Which
slot takes which ray depends on timing, the result does not.

dtypes: products in the table's type; weights of any float type; sums, raw and its gradient fp32.
"""

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import _triton as gpu
from .._sink import Node, redirect_all, zero_tail
from .._triton import INTERPRETED, cdiv, check_kernel_float, for_any_count, launchable
from ..composite import OPAQUE, visible_codes
from ..composite.triton import merge_weak_samples
from ..hash_encode import HashLayout
from ..hash_encode import triton as hashing
from ..mlp import triton as mlp
from ..mlp.reference import fused_mlp
from ..positions import unit_box
from ..positions.triton import sample_positions
from . import MAX_LOGIT, NgpWeights, activate


def density_at(field, positions, *, n_used, logits) -> Tensor:
    density_in, density_out = (w.contiguous() for w in field.weights)
    check_kernel_float(positions=positions, table=field.table, density_in=density_in, density_out=density_out)
    encoding = hashing.hash_encode(positions, field.table, field.layout, n_used=n_used)
    own = [density_in, density_out[:1]]
    if not mlp.fits(field.weights, field.table.dtype, positions.device):
        values = fused_mlp(encoding, own)[:, 0].float()
        return values if logits else values.clamp(max=MAX_LOGIT).exp()
    return mlp.mlp_forward(encoding, own, n_used, dtype=torch.float32, exponential=not logits)[:, 0]


BLOCK, WARPS, STAGES = mlp.BLOCK, 4, 3
LARGEST = tl.constexpr(MAX_LOGIT)
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
    return h1, mlp.relu_layer(h1, W4, T, PRECISION)


@launchable(do_not_specialize=["n"])
def _forward_kernel(
    p_x, p_directions, p_rays, p_w1, p_w2, p_w3, p_w4, p_w5, p_features, p_raw, p_used, n,
    stride_xn, stride_xc, stride_c,
    DE: tl.constexpr, DS: tl.constexpr, DF: tl.constexpr, DH: tl.constexpr,
    PE: tl.constexpr, PS: tl.constexpr, PF: tl.constexpr, PH: tl.constexpr,
    T: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, ACTIVATED: tl.constexpr,
    LOOSE: tl.constexpr,
):  # fmt: skip
    """LOOSE: rows past the used ones may hold anything before, rays too, and after; otherwise they become zero."""
    n_used = gpu.used_rows(p_used, n)
    ALL: tl.constexpr = LOOSE or (EVEN and p_used is None)
    W1 = mlp.load_weight(p_w1, PE, PH, DE, DH, DE, T)
    W2 = mlp.load_weight(p_w2, PH, PF, DH, DF, DH, T)
    W3a = mlp.load_weight(p_w3, PS, PH, DS, DH, DS + DF, T)
    W3b = mlp.load_weight(p_w3 + DS, PF, PH, DF, DH, DS + DF, T)
    W4 = mlp.load_weight(p_w4, PH, PH, DH, DH, DH, T)
    W5 = mlp.load_weight(p_w5, PH, 16, DH, 3, DH, T)
    for block in range(tl.program_id(0), tl.cdiv(n_used, BLOCK), tl.num_programs(0)):
        i = block * BLOCK + tl.arange(0, BLOCK)
        m = i < n_used
        b_x = mlp.load_tile(p_x, i, n, stride_xn, stride_xc, DE, PE, EVEN, T)
        if LOOSE:
            _ray, b_s = _load_directions(p_directions, p_rays, i, n_used, DS, PS, False, T)
        else:
            _ray, b_s = _load_directions(p_directions, p_rays, i, n, DS, PS, EVEN, T)
        b_y = tl.dot(mlp.relu_layer(b_x, W1, T, PRECISION), W2, input_precision=PRECISION)
        b_y = mlp.keep_rows(b_y, m, ALL)
        _h1, h2 = _colour_hidden(b_s, b_y.to(T), W3a, W3b, W4, T, PRECISION)
        b_c = mlp.keep_rows(tl.dot(h2, W5, input_precision=PRECISION), m, ALL)
        if p_features is not None:
            mlp.store_tile(p_features, b_y, i, n, 1, stride_c, DF, PF, EVEN)
        logit = tl.sum(tl.where((tl.arange(0, PF) == 0)[None, :], b_y, 0.0), 1)
        if ACTIVATED:
            b_c = 1.0 / (1.0 + tl.exp(-b_c))
            logit = tl.exp(tl.where(logit > LARGEST, LARGEST, logit))
        mlp.store_tile(p_raw, b_c, i, n, 1, stride_c, 3, 16, EVEN)
        tl.store(p_raw + 3 * tl.cast(stride_c, tl.int64) + i, logit, mask=i < n)
    if not LOOSE:
        mlp.zero_blocks(p_raw, n_used, n, 1, stride_c, 4, 4, BLOCK, EVEN)


@launchable(do_not_specialize=["n"])
def _colour_backward_kernel(
    p_directions, p_rays, p_features, p_draw, p_dlogit, p_values, p_w3, p_w4, p_w5, p_dfeatures, p_ddirections,
    p_g3, p_g4, p_g5, p_used, p_found_inf, n, stride_c, stride_rn, stride_rc, stride_ln,
    DS: tl.constexpr, DF: tl.constexpr, DH: tl.constexpr, PS: tl.constexpr, PF: tl.constexpr, PH: tl.constexpr,
    T: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Without p_g5 or p_g4 that gradient is left out, without p_g3 the features' and directions' too."""
    n_used = gpu.used_rows(p_used, n)
    ALL: tl.constexpr = EVEN and p_used is None
    W3a = mlp.load_weight(p_w3, PS, PH, DS, DH, DS + DF, T)
    W3b = mlp.load_weight(p_w3 + DS, PF, PH, DF, DH, DS + DF, T)
    W4 = mlp.load_weight(p_w4, PH, PH, DH, DH, DH, T)
    W5 = mlp.load_weight(p_w5, PH, 16, DH, 3, DH, T)
    G3a = mlp.zero_sum(PS, PH)
    G3b = mlp.zero_sum(PF, PH)
    G4 = mlp.zero_sum(PH, PH)
    G5 = mlp.zero_sum(PH, 16)
    for block in range(tl.program_id(0), tl.cdiv(n_used, BLOCK), tl.num_programs(0)):
        i = block * BLOCK + tl.arange(0, BLOCK)
        m = i < n_used
        ray, b_s = _load_directions(p_directions, p_rays, i, n, DS, PS, EVEN, T)
        b_y = mlp.keep_rows(mlp.load_tile(p_features, i, n, 1, stride_c, DF, PF, EVEN, T), m, ALL)
        dlogit = tl.load(p_dlogit + i.to(tl.int64) * stride_ln, mask=m, other=0.0).to(tl.float32)
        if p_values is None:
            b_d = mlp.keep_rows(mlp.load_tile(p_draw, i, n, stride_rn, stride_rc, 3, 16, EVEN, T), m, ALL)
        else:  # gradients of colours and densities, which were stored
            b_rgb = mlp.load_tile(p_values, i, n, 1, stride_c, 3, 16, EVEN, tl.float32)
            b_d = mlp.load_tile(p_draw, i, n, stride_rn, stride_rc, 3, 16, EVEN, tl.float32)
            b_d = mlp.keep_rows((b_d * b_rgb * (1.0 - b_rgb)).to(T), m, ALL)
            dlogit *= tl.load(p_values + 3 * tl.cast(stride_c, tl.int64) + i, mask=m, other=0.0)
        h1, h2 = _colour_hidden(b_s, b_y, W3a, W3b, W4, T, PRECISION)
        if p_g5 is not None:
            G5 = mlp.add_products(G5, h2, b_d, PH, 16, PRECISION)
        b_d = mlp.relu_backward(h2, b_d, W5, T, PRECISION)
        if p_g4 is not None:
            G4 = mlp.add_products(G4, h1, b_d, PH, PH, PRECISION)
        b_d = mlp.relu_backward(h1, b_d, W4, T, PRECISION)
        if p_g3 is not None:
            G3a = mlp.add_products(G3a, b_s, b_d, PS, PH, PRECISION)
            G3b = mlp.add_products(G3b, b_y, b_d, PF, PH, PRECISION)
            b_dy = tl.dot(b_d, tl.trans(W3b), input_precision=PRECISION)
            b_dy += tl.where((tl.arange(0, PF) == 0)[None, :], dlogit[:, None], 0.0)
            mlp.store_tile(p_dfeatures, b_dy, i, n, 1, stride_c, DF, PF, EVEN)
        if p_ddirections is not None:
            b_ds = tl.dot(b_d, tl.trans(W3a), input_precision=PRECISION)
            c = tl.arange(0, PS)
            row = i if PARTIAL else ray  # deterministic mode keeps samples apart
            p = p_ddirections + row.to(tl.int64)[:, None] * DS + c[None, :]
            tl.atomic_add(p, b_ds, mask=m[:, None] & (c < DS)[None, :], sem="relaxed")
    if p_g3 is not None:
        mlp.add_weight(p_g3, G3a, PS, PH, DS, DH, DS + DF, PARTIAL, DH * (DS + DF), p_found_inf)
        mlp.add_weight(p_g3 + DS, G3b, PF, PH, DF, DH, DS + DF, PARTIAL, DH * (DS + DF), p_found_inf)
    mlp.add_weight(p_g4, G4, PH, PH, DH, DH, DH, PARTIAL, DH * DH, p_found_inf)
    mlp.add_weight(p_g5, G5, PH, 16, DH, 3, DH, PARTIAL, 3 * DH, p_found_inf)


_any_forward_kernel = for_any_count(_forward_kernel, "stride_xc", "stride_c")
# A lone row's gradient has strides of its own, so this one asks nothing of them.
_any_colour_backward_kernel = launchable(
    _colour_backward_kernel.fn,
    do_not_specialize=["n", "stride_rn", "stride_rc", "stride_ln"],
    do_not_specialize_on_alignment=["stride_c"],
)


@functools.lru_cache(maxsize=64)
def _widths(encoding: int, directions: int, features: int, hidden: int) -> dict[str, int]:
    widths = {"DE": encoding, "DS": directions, "DF": features, "DH": hidden}
    return widths | {"P" + name[1:]: mlp.padded(width) for name, width in widths.items()}


def _shape(x: Tensor, directions: Tensor, weights: NgpWeights, fixed: bool) -> dict[str, Any]:
    widths = _widths(x.shape[1], directions.shape[1], weights.density_out.shape[0], weights.density_in.shape[0])
    return widths | mlp.operands(x.dtype, x.device) | {"BLOCK": BLOCK, "EVEN": fixed and x.shape[0] % BLOCK == 0}


def _programs(n: int, per_processor: int, device: torch.device) -> int:
    return min(cdiv(n, BLOCK), per_processor * gpu.processors(device))


def forward(
    x, directions, rays, weights, n_used, keep, *, activated=False, loose=False
) -> tuple[Tensor, Tensor | None]:
    """raw (n, 4), or colours and densities, and, if kept, the density network's output (n, features)."""
    n = x.shape[0]
    raw = gpu.feature_major(n, 4, torch.float32, x.device)
    features = gpu.feature_major(n, weights.density_out.shape[0], x.dtype, x.device) if keep else None
    if n:
        w1, w2, w3, w4, w5 = weights
        fixed = mlp.is_capacity(n, n_used)
        kernel = _forward_kernel if fixed else _any_forward_kernel
        kernel[(_programs(n, FORWARD_PROGRAMS, x.device),)](
            p_x=x, p_directions=directions, p_rays=rays, p_w1=w1, p_w2=w2, p_w3=w3, p_w4=w4, p_w5=w5,
            p_features=features, p_raw=raw, p_used=n_used, n=n,
            stride_xn=x.stride(0), stride_xc=x.stride(1), stride_c=raw.stride(1),
            **_shape(x, directions, weights, fixed), ACTIVATED=activated, LOOSE=loose,
            num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return raw, features


def colour_backward(
    x, directions, rays, weights, features, draw, n_used, sums, ddirections, found_inf=None, *, dlogit=None, values=None
) -> Tensor:
    """Gradient of the density network's output; weight gradients added to the last three of `sums`. `draw` is the
    gradient of raw; with the activated `values`, that of the colours, and `dlogit` that of the densities."""
    dlogit = draw[:, 3] if dlogit is None else dlogit
    n = features.shape[0]
    dfeatures = torch.empty_strided(features.shape, features.stride(), dtype=features.dtype, device=features.device)
    programs = _programs(n, BACKWARD_PROGRAMS, features.device)
    partial = torch.are_deterministic_algorithms_enabled()
    targets = [torch.empty(programs, *s.shape, device=s.device) if partial else s for s in sums[2:]]
    fixed = mlp.is_capacity(n, n_used)
    shape = _shape(x, directions, weights, fixed)
    del shape["DE"], shape["PE"]
    kernel = _colour_backward_kernel if fixed else _any_colour_backward_kernel
    for group in ("345",) if shape["PH"] <= 64 else ("45", "3"):  # whose sums fit into registers together
        last = "3" in group
        kernel[(programs,)](
            p_directions=directions, p_rays=rays, p_features=features, p_draw=draw, p_dlogit=dlogit, p_values=values,
            p_w3=weights.colour_in, p_w4=weights.colour_mid, p_w5=weights.colour_out,
            p_dfeatures=dfeatures if last else None, p_ddirections=ddirections if last else None,
            **{f"p_g{k}": sum_ if k in group else None for k, sum_ in zip("345", targets, strict=True)},
            p_used=n_used, p_found_inf=found_inf, n=n, stride_c=features.stride(1),
            stride_rn=draw.stride(0), stride_rc=draw.stride(1), stride_ln=dlogit.stride(0),
            **shape, PARTIAL=partial, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    if partial:
        for total, part in zip(sums[2:], targets, strict=True):
            total.add_(part.sum(0))
    return dfeatures


class _NgpField(Node):
    @staticmethod
    def forward(ctx, x, directions, rays, sink, n_used, *weights) -> Tensor:
        raw, features = forward(x, directions, rays, NgpWeights(*weights), n_used, any(ctx.needs_input_grad))
        ctx.save_for_backward(x, directions, rays, features, n_used, *weights)
        ctx.sink = sink
        return raw

    @staticmethod
    def backward(ctx: Any, draw: Tensor) -> tuple[Tensor | None, ...]:
        x, directions, rays, features, n_used, *weights = ctx.saved_tensors
        sums = mlp.zero_sums(weights) if ctx.sink is None else list(ctx.sink.buffers)
        found_inf = None if ctx.sink is None else ctx.sink.found_inf
        dx = torch.zeros_like(x) if x.shape[0] == 0 else None
        apart = rays if torch.are_deterministic_algorithms_enabled() else None  # a row per sample, summed in order
        ddirections = None
        if ctx.needs_input_grad[1]:
            shape = (len(directions if apart is None else apart), directions.shape[1])
            ddirections = torch.zeros(shape, dtype=torch.float32, device=x.device)
        if x.shape[0]:
            dfeatures = colour_backward(
                x, directions, rays, NgpWeights(*weights), features, draw, n_used, sums, ddirections, found_inf
            )
            dx = mlp.mlp_backward(
                x, weights[:2], dfeatures, n_used, needs_x=ctx.needs_input_grad[0], sums=sums[:2], found_inf=found_inf
            )
        if ddirections is not None:
            if apart is not None:
                total = torch.zeros_like(directions, dtype=torch.float32)
                ddirections = total.index_add_(0, apart.long(), ddirections)
            ddirections = ddirections.to(directions.dtype)
        grads = [None] * 5 if ctx.sink is not None else mlp.in_types_of(weights, sums)
        return dx, ddirections, None, None, None, *grads  # x, directions, rays, sink, n_used, weights


def _apart(encoding, directions, ray_indices, weights, sink, n_used) -> Tensor:
    """The two networks one after the other; layer by layer in fp32 where one does not fit by itself either."""
    if all(mlp.fits(part, encoding.dtype, encoding.device) for part in (weights[:2], weights[2:])):
        run = functools.partial(mlp.fused_mlp, n_used=n_used)
    else:
        run, encoding, directions = mlp.library_mlp, zero_tail(encoding, n_used).float(), directions.float()
        weights = [w.float() for w in weights]
    matrices = redirect_all(weights, sink)
    features = run(encoding, matrices[:2])
    own = directions if ray_indices is None else directions[ray_indices.long()]
    colour = run(torch.cat([own.to(features.dtype), features], dim=-1), matrices[2:])
    return zero_tail(torch.cat([colour, features[:, :1]], dim=-1).float(), n_used)


def ngp_field(encoding, directions, ray_indices, weights, *, sink=None, n_used=None) -> Tensor:
    check_kernel_float(encoding=encoding, directions=directions, **weights._asdict())
    if not skips_unused(encoding, weights):
        return _apart(encoding, directions, ray_indices, weights, sink, n_used)
    rays = None if ray_indices is None else ray_indices.contiguous()
    return _NgpField.apply(encoding, directions.contiguous(), rays, sink, n_used, *(w.contiguous() for w in weights))


ENCODE_BLOCK, ENCODE_WARPS, ENCODE_PROGRAMS = 128, 4, 12


@launchable(do_not_specialize=["n"])
def _encode_kernel(
    p_positions, p_table, p_out, p_levels, p_scales, p_used, n, stride_xn, stride_xc,
    LEVELS: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`hash_encode` of the rows in use, by persistent programs; the others are not written."""
    n_used = gpu.used_rows(p_used, n)
    for task in range(tl.program_id(0), tl.cdiv(n_used, BLOCK) * LEVELS, tl.num_programs(0)):
        i_level = task % LEVELS
        i = (task // LEVELS) * BLOCK + tl.arange(0, BLOCK)
        b_pair, b_lone = hashing.encode_level(
            p_positions, p_table, p_levels, p_scales, i, i < n_used, i_level, stride_xn, stride_xc, F, BLOCK
        )
        hashing.store_level(p_out, b_pair, b_lone, i, i < n_used, i_level, n, F)


def _encode_used(positions: Tensor, table: Tensor, layout: HashLayout, n_used: Tensor | None) -> Tensor:
    n, device = positions.shape[0], table.device
    encoding = torch.empty(layout.n_outputs, n, dtype=table.dtype, device=device)
    levels, scales = hashing.level_constants(layout, device)
    tasks = cdiv(n, ENCODE_BLOCK) * layout.n_levels
    # An odd number, so that every program meets all levels: fine ones take several times as long as coarse ones.
    _encode_kernel[(min(tasks, ENCODE_PROGRAMS * gpu.processors(device) - 1 | 1),)](
        p_positions=positions, p_table=table, p_out=encoding, p_levels=levels, p_scales=scales, p_used=n_used, n=n,
        stride_xn=positions.stride(0), stride_xc=positions.stride(1), LEVELS=layout.n_levels, F=layout.n_features,
        BLOCK=ENCODE_BLOCK, num_warps=ENCODE_WARPS,
    )  # fmt: skip
    return encoding.t()


def skips_unused(table: Tensor, weights: NgpWeights) -> bool:
    """Whether the fused kernels run: both networks fit, the colour's beside the encoding, its inputs padded apart."""
    encoding, features, inputs = weights.density_in.shape[1], weights.density_out.shape[0], weights.colour_in.shape[1]
    apart = mlp.padded(inputs - features) + mlp.padded(features) - mlp.padded(inputs)
    beside, like = max(32, mlp.padded(encoding)) + 2 * max(0, apart), (table.dtype, table.device)
    return mlp.fits(weights[:2], *like) and mlp.fits(weights[2:], *like, beside=beside)


class _NgpQuery(Node):
    @staticmethod
    def forward(ctx, positions, directions, table, half, layout, *weights) -> tuple[Tensor, Tensor]:
        source = table if half is None else half
        x = hashing.encode_forward(positions, source, layout, None)
        own, keep = NgpWeights(*weights), any(ctx.needs_input_grad)
        values, features = forward(x, directions, None, own, None, keep, activated=True)
        read = source if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(positions, directions, read, x, features, values, *weights)
        ctx.layout, ctx.shape = layout, table.shape
        return values[:, :3], values[:, 3]

    @staticmethod
    def backward(ctx: Any, grad_rgb: Tensor, grad_density: Tensor) -> tuple[Tensor | None, ...]:
        positions, directions, source, x, features, values, *weights = ctx.saved_tensors
        sums = mlp.zero_sums(weights)
        to_positions = to_directions = to_table = None
        if ctx.needs_input_grad[1]:
            to_directions = torch.zeros(directions.shape, dtype=torch.float32, device=x.device)
        if ctx.needs_input_grad[2]:
            to_table = torch.zeros(ctx.shape, dtype=torch.float32, device=x.device)
        if x.shape[0]:
            dfeatures = colour_backward(
                x, directions, None, NgpWeights(*weights), features, grad_rgb, None, sums, to_directions,
                dlogit=grad_density, values=values,
            )  # fmt: skip
            needs_x = ctx.needs_input_grad[0] or to_table is not None
            dx = mlp.mlp_backward(x, weights[:2], dfeatures, None, needs_x=needs_x, sums=sums[:2])
            if dx is not None and to_table is not None:
                hashing.table_gradient(to_table, positions, dx, ctx.layout, None, None)(0, to_table.shape[0])
            if dx is not None and ctx.needs_input_grad[0]:
                to_positions = hashing.positions_gradient(positions, source, dx, ctx.layout, None)
        elif ctx.needs_input_grad[0]:
            to_positions = torch.zeros_like(positions)
        return to_positions, to_directions, to_table, None, None, *mlp.in_types_of(weights, sums)


def ngp_query(positions, directions, ray_indices, grid, weights, *, n_used, logits) -> tuple[Tensor, Tensor]:
    table, half, layout = grid.table, grid.half, grid.layout
    source = table if half is None else half
    check_kernel_float(positions=positions, directions=directions, table=table, half=half, **weights._asdict())
    positions, directions = positions.float(), directions.contiguous()
    own = NgpWeights(*(w.contiguous() for w in weights))
    rays = None if ray_indices is None else ray_indices.contiguous()
    if not torch.is_grad_enabled() and rays is not None and skips_unused(source, own):
        if positions.shape[0] == 0:
            return positions.new_empty(0, 3), positions.new_empty(0)
        x = _encode_used(positions, source.contiguous(), layout, n_used)
        raw, _ = forward(x, directions, rays, own, n_used, False, activated=not logits, loose=True)
        return raw[:, :3], raw[:, 3]
    if rays is None and n_used is None and not logits and skips_unused(source, own):
        half = None if half is None else half.detach().contiguous()
        return _NgpQuery.apply(positions, directions, table.contiguous(), half, layout, *own)
    if rays is not None and n_used is not None:  # those past the used ones may hold anything
        rays = torch.where(torch.arange(positions.shape[0], device=rays.device) < n_used, rays, 0)
    encoding = hashing.hash_encode(positions, table, layout, half=half, n_used=n_used)
    raw = ngp_field(encoding, directions, rays, own, n_used=n_used)
    return (raw[:, :3], raw[:, 3]) if logits else activate(raw)


SLOTS, STEPS = (16, 8) if INTERPRETED else (2, 16)
VISIBILITY_WARPS, VISIBILITY_PROGRAMS = 4, 4
LIST_BLOCK = 512
LONG = 48  # samples of a ray that is begun early
THICK = tl.constexpr(OPAQUE)  # more would only cost digits in sums
HEADER = 16  # bytes before the flags, zeroed with them: the counters n_long, n_short, n_taken


@triton.jit
def _rows(ix, iy, iz, nodes, hash_mask):
    hashed = (ix ^ (iy * -1640531535) ^ (iz * 805459861)) & hash_mask
    return tl.where(hash_mask >= 0, hashed, ix + nodes * (iy + nodes * iz))


@launchable(do_not_specialize=["n_rays"])
def _list_kernel(p_offsets, p_counters, p_list, n_rays, LONG: tl.constexpr, BLOCK: tl.constexpr):
    """p_list (n_rays, 4) int32: ray, first sample and end of the rays that have any."""
    i_ray = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(p_offsets + i_ray, mask=i_ray < n_rays, other=0)
    end = tl.load(p_offsets + i_ray + 1, mask=i_ray < n_rays, other=0)
    is_long = (end - start >= LONG).to(tl.int32)
    is_short = (end > start).to(tl.int32) - is_long
    first_long = tl.atomic_add(p_counters, tl.sum(is_long, 0), sem="relaxed")
    first_short = tl.atomic_add(p_counters + 1, tl.sum(is_short, 0), sem="relaxed")
    from_front = first_long + tl.cumsum(is_long, 0) - 1
    from_back = n_rays - first_short - tl.cumsum(is_short, 0)
    p = p_list + tl.where(is_long > 0, from_front, from_back) * 4
    m = end > start
    tl.store(p, i_ray, mask=m)
    tl.store(p + 1, start, mask=m)
    tl.store(p + 2, end, mask=m)


@triton.jit
def _refill(p_counters, p_list, slots, n_rays):
    """Hand rays to the slots whose own is done, while any are left; `taken` is the place last read in the list."""
    ray, place, end, depth, taken = slots
    n_long = tl.load(p_counters)
    n_listed = n_long + tl.load(p_counters + 1)
    done = place >= end
    n_done = tl.sum(done.to(tl.int32), 0)
    if (n_done > 0) & (taken < n_listed):
        taken = tl.atomic_add(p_counters + 2, n_done, sem="relaxed")
        index = taken + tl.cumsum(done.to(tl.int32), 0) - 1
        m = done & (index < n_listed)
        p = p_list + tl.where(index < n_long, index, n_rays - 1 - (index - n_long)) * 4
        ray = tl.where(m, tl.load(p, mask=m, other=0), ray)
        place = tl.where(m, tl.load(p + 1, mask=m, other=0), place)
        end = tl.where(m, tl.load(p + 2, mask=m, other=0), end)
        depth = tl.where(m, 0.0, depth)
    return ray, place, end, depth, taken


@triton.jit
def _coordinate(p_origins, p_directions, ray, middle, low, scale, AXIS: tl.constexpr):
    """(SLOTS * STEPS,): one coordinate of the samples, with the box at [0, 1]."""
    origin = tl.load(p_origins + ray * 3 + AXIS)[:, None]
    direction = tl.load(p_directions + ray * 3 + AXIS)[:, None]
    return tl.reshape((origin + middle * direction - low) * scale, [middle.numel])


@triton.jit
def _blend_pairs(p_level, row0, row1, fx, weight, m, F: tl.constexpr):
    """The two corners along x times `weight`, as [ROWS, BLOCK, 2 F] whose two halves are yet to be added. Rows are read
    as aligned pairs, the second one only where it is another pair than the first: both loads have one layout of
    threads, so that the arithmetic of rows and weights is not done once for each of two."""
    i_pair = tl.arange(0, 2 * F)[None, None, :]
    paired = (row0 >> 1) == (row1 >> 1)
    b_first = tl.load(p_level + ((row0 >> 1) * (2 * F))[:, :, None] + i_pair, mask=m, other=0.0)
    m_second = m & (paired == 0)[:, :, None]
    b_second = tl.load(p_level + ((row1 >> 1) * (2 * F))[:, :, None] + i_pair, mask=m_second, other=0.0)
    near, far = weight * (1.0 - fx), weight * fx
    is_near = (i_pair // F) == (row0 & 1)[:, :, None]
    is_far = (i_pair // F) == (row1 & 1)[:, :, None]
    b_near = tl.where(is_near, near[:, :, None], tl.where(paired, far, 0.0)[:, :, None]) * b_first.to(tl.float32)
    return b_near + tl.where(is_far, far[:, :, None], 0.0) * b_second.to(tl.float32)


@triton.jit
def _encode_points(
    p_table, p_levels, p_scales, x, y, z, m,
    LEVELS: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[BLOCK, ROWS * F]: the encoding of BLOCK points; levels from LEVELS to ROWS are zero."""
    i_level = tl.arange(0, ROWS)
    m_level = i_level < LEVELS
    p = p_levels + i_level * 4
    offset = tl.load(p, mask=m_level, other=0).to(tl.int64) * (8 * F)
    nodes = tl.load(p + 1, mask=m_level, other=0)[:, None]
    hash_mask = tl.load(p + 2, mask=m_level, other=0)[:, None]
    scale = tl.load(p_scales + i_level, mask=m_level, other=0.0)
    ix, fx = hashing.cell_of(x[None, :], scale[:, None])
    iy, fy = hashing.cell_of(y[None, :], scale[:, None])
    iz, fz = hashing.cell_of(z[None, :], scale[:, None])
    m_entry = (m_level[:, None] & m[None, :])[:, :, None]
    p_level = p_table + offset[:, None, None]
    b_pair = tl.zeros([ROWS, BLOCK, 2 * F], tl.float32)
    for c in tl.static_range(4):
        weight = (fy if c & 1 else 1.0 - fy) * (fz if c & 2 else 1.0 - fz)
        row0 = _rows(ix, iy + (c & 1), iz + (c >> 1), nodes, hash_mask)
        row1 = _rows(ix + 1, iy + (c & 1), iz + (c >> 1), nodes, hash_mask)
        b_pair += _blend_pairs(p_level, row0, row1, fx, weight, m_entry, F)
    b_sum = tl.sum(tl.reshape(b_pair, [ROWS, BLOCK, 2, F]), 2)
    return tl.reshape(tl.permute(b_sum, (1, 0, 2)), [BLOCK, ROWS * F])


@launchable(do_not_specialize=["n_rays"])
def _visible_kernel(
    p_origins, p_directions, p_starts, p_ends, p_counters, p_list, p_table, p_levels, p_scales, p_w1, p_w2,
    p_alpha_thre, p_keep, p_optical, n_rays, box, limit, alpha_thre, MAX_LOGIT: tl.constexpr,
    LEVELS: tl.constexpr, ROWS: tl.constexpr, F: tl.constexpr, DH: tl.constexpr, PH: tl.constexpr,
    T: tl.constexpr, PRECISION: tl.constexpr, SLOTS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """p_keep must hold zeros: only samples that are visible are written. `limit` is the optical depth of the end.
    With `p_optical`, their thickness is written there instead."""
    if p_alpha_thre is not None:
        alpha_thre = tl.load(p_alpha_thre)
    W1 = mlp.load_weight(p_w1, ROWS * F, PH, LEVELS * F, DH, LEVELS * F, T)
    i_hidden = tl.arange(0, PH)
    w2 = tl.load(p_w2 + i_hidden, mask=i_hidden < DH, other=0.0).to(T).to(tl.float32)
    nothing = tl.zeros([SLOTS], tl.int32)
    slots = (nothing, nothing, nothing, tl.zeros([SLOTS], tl.float32), tl.full((), 0, tl.int32))
    ray, place, end, depth, taken = _refill(p_counters, p_list, slots, n_rays)
    while tl.max((place < end).to(tl.int32), 0) > 0:
        row = place[:, None] + tl.arange(0, STEPS)[None, :]
        m = row < end[:, None]
        t0 = tl.load(p_starts + row, mask=m, other=0.0)
        t1 = tl.load(p_ends + row, mask=m, other=0.0)
        middle = 0.5 * (t0 + t1)
        x = _coordinate(p_origins, p_directions, ray, middle, box[0], box[3], 0)
        y = _coordinate(p_origins, p_directions, ray, middle, box[1], box[4], 1)
        z = _coordinate(p_origins, p_directions, ray, middle, box[2], box[5], 2)
        b_x = _encode_points(
            p_table, p_levels, p_scales, x, y, z, tl.reshape(m, [SLOTS * STEPS]),
            LEVELS=LEVELS, ROWS=ROWS, F=F, BLOCK=SLOTS * STEPS,
        )  # fmt: skip
        h = mlp.relu_layer(b_x.to(T), W1, T, PRECISION)
        logit = tl.sum(h.to(tl.float32) * w2[None, :], 1)
        # This gather keeps the order, but ends the product's layout, in which each thread would hold four samples.
        logit = tl.reshape(tl.gather(logit, tl.arange(0, SLOTS * STEPS), 0), [SLOTS, STEPS])
        optical = tl.exp(tl.where(logit > MAX_LOGIT, MAX_LOGIT, logit)) * (t1 - t0)
        counted = m & (gpu.one_minus_exp(optical) >= alpha_thre)  # false for NaN
        optical = tl.where(counted, tl.minimum(optical, THICK), 0.0)
        before = depth[:, None] + (tl.cumsum(optical, 1) - optical)
        if p_optical is not None:
            tl.store(p_optical + row, optical, mask=counted & (before <= limit))
        else:
            tl.store(p_keep + row, tl.full([SLOTS, STEPS], 1, tl.uint8), mask=counted & (before <= limit))
        depth += tl.sum(optical, 1)
        place = tl.where(depth <= limit, place + STEPS, end)
        ray, place, end, depth, taken = _refill(p_counters, p_list, (ray, place, end, depth, taken), n_rays)


def _launch_visibility(origins, directions, samples, field, limit, alpha_thre, thinning) -> Tensor:
    table, layout = field.table.detach().contiguous(), field.layout
    density_in, density_out = (w.detach().contiguous() for w in field.weights)
    check_kernel_float(table=table, density_in=density_in, density_out=density_out)
    device, n_rays, features, hidden = table.device, samples.n_rays, layout.n_features, density_in.shape[0]
    # What is written, flags or thickness, lies behind the counters: one memory, zeroed at once.
    dtype = torch.uint8 if thinning is None else torch.float32
    zeros = torch.zeros(HEADER // dtype.itemsize + samples.capacity, dtype=dtype, device=device)
    counters, seen = zeros[: HEADER // dtype.itemsize].view(torch.int32), zeros[HEADER // dtype.itemsize :]
    rays = torch.empty(n_rays, 4, dtype=torch.int32, device=device)
    _list_kernel[(cdiv(n_rays, LIST_BLOCK),)](
        p_offsets=samples.offsets, p_counters=counters, p_list=rays, n_rays=n_rays, LONG=LONG, BLOCK=LIST_BLOCK,
        num_warps=4,
    )  # fmt: skip
    number, pointer = gpu.scalar_or_pointer(alpha_thre, device)
    levels, scales = hashing.level_constants(layout, device)
    rows = max(16 // features, gpu.next_power_of_2(layout.n_levels))  # a tensor core multiplies 16 columns or more
    _visible_kernel[(min(cdiv(n_rays, SLOTS), VISIBILITY_PROGRAMS * gpu.processors(device)),)](
        p_origins=origins, p_directions=directions, p_starts=samples.t_starts.contiguous(),
        p_ends=samples.t_ends.contiguous(), p_counters=counters, p_list=rays, p_table=table, p_levels=levels,
        p_scales=scales, p_w1=density_in, p_w2=density_out, p_alpha_thre=pointer,
        p_keep=seen if thinning is None else None, p_optical=None if thinning is None else seen, n_rays=n_rays,
        box=unit_box(field.aabb), limit=limit, alpha_thre=number,
        MAX_LOGIT=MAX_LOGIT, LEVELS=layout.n_levels, ROWS=rows, F=features, DH=hidden, PH=mlp.padded(hidden),
        T=mlp.operand_type(table.dtype, device), PRECISION=mlp.fp32_precision(), SLOTS=SLOTS, STEPS=STEPS,
        num_warps=VISIBILITY_WARPS,
    )  # fmt: skip
    return seen.view(torch.bool) if thinning is None else merge_weak_samples(seen, samples, thinning)


def visibility(field, origins, directions, samples, *, early_stop_eps, alpha_thre, thinning) -> Tensor:
    if samples.capacity == 0 or samples.n_rays == 0:
        dtype = torch.bool if thinning is None else torch.uint8
        return torch.zeros(samples.capacity, dtype=dtype, device=origins.device)
    check_kernel_float(origins=origins, directions=directions)
    origins, directions = origins.detach().float().contiguous(), directions.detach().float().contiguous()
    if not mlp.fits(field.weights, field.table.dtype, origins.device):
        positions = sample_positions(origins, directions, samples, aabb=field.aabb)
        density = density_at(field, positions, n_used=samples.n_samples, logits=False)
        return visible_codes(density, samples, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre, thinning=thinning)
    limit = math.inf if early_stop_eps <= 0.0 else -math.log(early_stop_eps)  # T >= eps is depth <= -log(eps)
    return _launch_visibility(origins, directions, samples, field, limit, alpha_thre, thinning)
