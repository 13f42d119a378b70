"""The inputs on which every op is checked and timed: the sizes of a training step, drawn anew for each seed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nerfturbo.bench.gate import BOX, CALLS, LAYOUT, Draw, OpCase, basic_cases, samples_of
from nerfturbo.fields.voxels import build_structure, node_keys, split_nodes
from nerfturbo.ops.adam import (
    COLUMNS,
    AdamState,
    RayBudget,
    StepState,
    adam_update,
    check_gradients,
    finish_step,
    record_step,
)
from nerfturbo.ops.composite import Thinning, composite_pixels, merge_weak_samples, visibility
from nerfturbo.ops.composite_loss import RayLossRule, composite_loss, ray_losses
from nerfturbo.ops.frame import absorb_samples, finish_rays, next_samples, start_rays
from nerfturbo.ops.hash_encode import hash_encode
from nerfturbo.ops.intervals import Space, interval_weights, place_intervals
from nerfturbo.ops.march import OccupancyBits, StepRule, decay_and_max, pack_bits, threshold_bits
from nerfturbo.ops.mlp import fused_mlp, wide_mlp
from nerfturbo.ops.ngp import NgpDensity, NgpGrid, NgpWeights, ngp_field, ngp_query, skips_unused
from nerfturbo.ops.packed import compact, packed_cumsum, packed_sum
from nerfturbo.ops.pixels import PixelMask, PixelPool, camera_rays, choose_pixels, draw_pixels, pack_words, read_pixels
from nerfturbo.ops.positions import cone_positions, ray_aabb, sample_positions
from nerfturbo.ops.random import Stream, random_bits, random_uniform
from nerfturbo.ops.voxels import VoxelIndex, VoxelTables, color_width, voxel_density, voxel_lookup

RULE = RayLossRule(distortion=0.01, opacity=0.001)
RESOLUTION, N_BASIS, ROUNDS, EMPTY = 64, 9, 6, -3.0
SHAPES = ((64, 32), (16, 64), (64, 32), (64, 64), (3, 64))
WEIGHTS = dict(zip(NgpWeights._fields, SHAPES, strict=True))
KEY: dict[str, Any] = {"seed": 1, "step": 2}
USER: dict[str, Any] = KEY | {"stream": Stream.USER}
CUBE: dict[str, Any] = {"aabb": BOX, "contraction": "cube"}
MIXED: dict[str, Any] = {"spacing": "mixed", "space": Space(BOX, "cube")}
LIMITS: dict[str, Any] = {"early_stop_eps": 1e-3, "alpha_thre": 1e-3}


def starting(x: SimpleNamespace, prefix: str) -> list[Tensor]:
    return [tensor for name, tensor in vars(x).items() if name.startswith(prefix)]


def ngp_weights(x: SimpleNamespace) -> NgpWeights:
    return NgpWeights(*(getattr(x, name) for name in WEIGHTS))


def voxels(x: SimpleNamespace) -> tuple[VoxelTables, VoxelIndex]:
    return VoxelTables(x.density, x.color), VoxelIndex(x.blocks, x.rows, RESOLUTION, EMPTY)


def _compact(x: SimpleNamespace) -> tuple[Tensor, ...]:
    out = compact(samples_of(x), x.keep)
    return out.t_starts, out.t_ends, out.ray_indices, out.offsets


def _ngp_logits(x: SimpleNamespace) -> tuple[Tensor, Tensor]:
    skips_unused(x.table, ngp_weights(x))
    with torch.no_grad():
        return ngp_query(x.positions, x.directions, x.rays, NgpGrid(x.table, LAYOUT), ngp_weights(x), logits=True)


def _ngp_density(x: SimpleNamespace) -> NgpDensity:
    return NgpDensity(BOX, x.table, LAYOUT, ngp_weights(x)[:2])


def _ngp_visibility(x: SimpleNamespace) -> tuple[Tensor, ...]:
    field, thinning = _ngp_density(x), Thinning(0.05, x.phases)
    flags = field.visibility(x.origins, x.directions, samples_of(x), **LIMITS)
    codes = field.visibility(x.origins, x.directions, samples_of(x), thinning=thinning, **LIMITS)
    return flags.float(), (codes != 0).float()


def _camera_rays(x: SimpleNamespace) -> tuple[Tensor, Tensor]:
    return camera_rays(x.camera, width=x.pixels.shape[1], height=x.pixels.shape[0])


def _frame(x: SimpleNamespace) -> tuple[Tensor, ...]:
    """A few rounds through fog whose colour is the place."""
    live = start_rays(*_camera_rays(x), OccupancyBits(x.bits, BOX, RESOLUTION), StepRule(0.01))
    for _ in range(ROUNDS):
        samples = next_samples(live, rows=16 * x.pixels.numel(), aabb=BOX)
        unit = samples.positions.nan_to_num(0.0).clamp(0.0, 1.0)
        live = absorb_samples(live, samples, 20.0 * unit[:, 0], unit, early_stop_eps=1e-4)
    return finish_rays(live)


def _decay_and_max(x: SimpleNamespace) -> Tensor:
    density = x.density.clone()
    decay_and_max(density, x.cells, x.fresh, 0.95)
    return density


def _threshold_bits(x: SimpleNamespace) -> tuple[Tensor, Tensor]:
    bits = torch.empty(x.density.shape[0] // 32, dtype=torch.int32, device=x.density.device)
    return threshold_bits(x.density, bits, 0.01), bits


def _adam(x: SimpleNamespace) -> tuple[Tensor, ...]:
    """On the same tensors again and again: the first call, from which the gate compares, changes them."""
    step, lr = torch.zeros((), dtype=torch.int64, device=x.grad.device), torch.tensor(0.01, device=x.grad.device)
    adam_update(x.params, x.grad, AdamState(x.first, x.second, step), lr)
    return x.params, x.first, x.second


def _check_gradients(x: SimpleNamespace) -> tuple[Tensor, Tensor]:
    flag = torch.zeros((), device=x.grad.device)
    return check_gradients([x.grad], flag), flag


def _finish_step(x: SimpleNamespace) -> tuple[Tensor, ...]:
    mine = [value.clone() for value in (x.step, x.flag, x.scale, x.good)]
    finish_step(mine[0], mine[1], scale=mine[2], good_steps=mine[3])
    return tuple(mine)


def _record_step(x: SimpleNamespace) -> tuple[Tensor, ...]:
    state = StepState.create(step=5, n_active=1000, length=8, device=x.floats.device)
    names = ("loss", "mse", "found_inf", "loss_scale", "n_rays", "n_samples", "n_marched")
    record_step(state, dict(zip(names, (*x.floats, *x.counts), strict=True)), RayBudget(1 << 18, 1 << 20, 1 << 16))
    return state.ring, state.n_active, state.totals


CALLS |= {
    "random": lambda x: random_uniform(x.like.shape[0], columns=3, device=x.like.device, **USER),
    "random_bits": lambda x: random_bits(x.like.shape[0], device=x.like.device, **USER),
    "aabb": lambda x: ray_aabb(x.origins, x.directions, BOX),
    "packed_sum": lambda x: packed_sum(x.values, x.offsets),
    "packed_cumsum": lambda x: packed_cumsum(x.values, x.offsets),
    "composite_pixels": lambda x: composite_pixels(x.density, x.rgb, samples_of(x), x.background),
    "visibility": lambda x: visibility(x.density, samples_of(x), early_stop_eps=1e-3).float(),
    "composite_loss": lambda x: composite_loss(x.raw, samples_of(x), x.background, x.target).loss,
    "ray_losses": lambda x: ray_losses(x.raw, samples_of(x), RULE),
    "merge_weak_samples": lambda x: merge_weak_samples(x.optical, samples_of(x), Thinning(0.05, x.phases)).float(),
    "sample_positions": lambda x: sample_positions(x.origins, x.directions, samples_of(x), aabb=BOX),
    "cone_positions": lambda x: cone_positions(x.origins, x.directions, x.radii, samples_of(x), points=6, **CUBE),
    "contracted_positions": lambda x: sample_positions(x.origins, x.directions, samples_of(x), **CUBE),
    "place_intervals": lambda x: place_intervals(x.places, x.origins, x.directions, near=x.near, far=x.far, **MIXED),
    "interval_weights": lambda x: interval_weights(x.density, x.distances),
    "encode_regions": lambda x: hash_encode(x.positions, x.table, LAYOUT, footprints=x.footprints),
    "fused_mlp": lambda x: fused_mlp(x.inputs, starting(x, "weight")),
    "wide_mlp": lambda x: wide_mlp(x.inputs, starting(x, "weight"), starting(x, "bias"), skip=2, relu_last=True),
    "ngp_field": lambda x: ngp_field(x.encoding, x.directions, x.rays, ngp_weights(x)),
    "ngp_density_logits": lambda x: _ngp_density(x).at(x.positions, logits=True),
    "ngp_densities": lambda x: _ngp_density(x).at(x.positions),
    "ngp_query": lambda x: ngp_query(x.positions, x.directions, None, NgpGrid(x.table, LAYOUT), ngp_weights(x)),
    "voxel_lookup": lambda x: voxel_lookup(x.positions, x.basis, x.rays, *voxels(x)),
    "voxel_density": lambda x: voxel_density(x.positions, x.density, voxels(x)[1]),
    "draw_pixels": lambda x: draw_pixels(PixelPool(*starting(x, "pool_")), x.like.shape[0], **KEY),
    "read_pixels": lambda x: read_pixels(x.pool_colors, x.chosen),
    "choose_pixels": lambda x: choose_pixels(x.pool_offsets, x.like.shape[0], mask=PixelMask.of_words(x.words), **KEY),
}
ALONE = (_compact, _ngp_logits, _ngp_visibility, _camera_rays, _frame, _decay_and_max, _threshold_bits)
ALONE += (_adam, _check_gradients, _finish_step, _record_step)
CALLS |= {function.__name__.removeprefix("_"): function for function in ALONE}


class MoreDraw(Draw):
    """And what these ops take."""

    def rays(self, n_rays: int) -> dict[str, Tensor]:
        return {"origins": self.normal(n_rays, 3), "directions": self.units(n_rays)}

    def phases(self, n_rays: int) -> dict[str, Tensor]:
        return {"phases": self.integers(-(1 << 31), 1 << 31, n_rays).int()}

    def sorted_rays(self, n_rays: int, n: int) -> Tensor:
        return torch.sort(self.integers(0, n_rays, n)).values.int()

    def ngp(self) -> dict[str, Tensor]:
        table = {"table": self.normal(LAYOUT.n_entries, LAYOUT.n_features)}
        return table | {name: self.normal(*shape) / shape[1] ** 0.5 for name, shape in WEIGHTS.items()}


def op_cases(*, seed: int, quick: bool) -> Iterator[OpCase]:
    """Every op at its size in a training step; a sixteenth of it for a quick look."""
    draw = MoreDraw(seed, 16 if quick else 1)
    yield from basic_cases(draw)
    for make in (_of_rays, _of_samples, _of_intervals, _of_networks, _of_ngp, _of_voxels, _of_pixels, _of_steps):
        yield from make(draw)


def _of_rays(draw: MoreDraw) -> Iterator[OpCase]:
    n = 4096 // draw.small
    yield OpCase("aabb", f"{n:,} rays", draw.rays_at_the_box(n))

    n = 128**3 // draw.small
    density = {"density": draw.uniform(n)}
    fresh = {"cells": draw.integers(0, n, n // 2), "fresh": draw.uniform(n // 2)}
    yield OpCase("decay_and_max", f"{n // 2:,} of {n:,} cells", density | fresh)
    yield OpCase("threshold_bits", f"{n:,} cells", density)


def _of_samples(draw: MoreDraw) -> Iterator[OpCase]:
    samples, n, n_rays = draw.samples(8192, 131072)
    size, values = f"{n:,} samples, {n_rays:,} rays", samples | {"values": draw.normal(n)}
    yield OpCase("packed_sum", size, values, ("values",))
    yield OpCase("packed_cumsum", size, values, ("values",))
    yield OpCase("compact", size, samples | {"keep": draw.uniform(n) < 0.3}, tolerance=0.0)

    field = samples | {"density": 60.0 * draw.uniform(n) ** 4, "rgb": draw.uniform(n, 3)}
    shown, colors = field | {"background": draw.uniform(3)}, ("density", "rgb")
    yield OpCase("composite_pixels", size, shown, colors, tolerance=1e-3)
    yield OpCase("visibility", size, field, outliers=1e-4)

    raw = samples | {"raw": draw.normal(4, n).t() * 2.0}
    pictures = {"background": draw.uniform(n_rays, 3), "target": draw.uniform(n_rays, 4)}
    yield OpCase("composite_loss", size, raw | pictures, ("raw",))
    yield OpCase("ray_losses", size, raw, ("raw",), tolerance=1e-3)

    rays = samples | draw.rays(n_rays)
    yield OpCase("sample_positions", size, rays, ("origins", "directions"), tolerance=1e-3)
    yield OpCase("cone_positions", size, rays | {"radii": 0.01 * draw.uniform(n_rays)}, tolerance=1e-4)
    yield OpCase("contracted_positions", size, rays)

    samples, n, n_rays = draw.samples(4096, 65536)
    fog = samples | {"optical": draw.uniform(n) ** 8} | draw.phases(n_rays)
    yield OpCase("merge_weak_samples", f"{n:,} samples, {n_rays:,} rays", fog, outliers=2e-3)


def _of_intervals(draw: MoreDraw) -> Iterator[OpCase]:
    n_rays, n = 8192 // draw.small, 96
    size, places = f"{n_rays:,} rays, {n} intervals", torch.sort(draw.uniform(n_rays, n + 1), dim=-1).values
    rays = draw.rays(n_rays) | {"near": torch.full((n_rays, 1), 0.05), "far": torch.full((n_rays, 1), 50.0)}
    # Far away the distance is the inverse of a difference: few digits are left of it.
    yield OpCase("place_intervals", size, rays | {"places": places}, tolerance=1e-3)
    weights = {"density": 20.0 * draw.uniform(n_rays, n) ** 4, "distances": 8.0 * places}
    yield OpCase("interval_weights", size, weights, ("density",))


def _of_networks(draw: MoreDraw) -> Iterator[OpCase]:
    def network(op: str, n: int, widths: tuple[int, ...], skip: int | None = None) -> OpCase:
        inputs = {"inputs": draw.normal(n, widths[0])}
        for k in range(len(widths) - 1):
            columns = widths[k] + (widths[0] if k == skip else 0)
            inputs[f"weight_{k}"] = draw.normal(widths[k + 1], columns) * (2.0 / columns) ** 0.5
            inputs |= {} if skip is None else {f"bias_{k}": torch.zeros(widths[k + 1])}
        return OpCase(op, f"{n:,} points, {'-'.join(map(str, widths))}", inputs, tuple(inputs), tolerance=5e-3)

    n = 65536 // draw.small
    yield network("fused_mlp", n, (32, 64, 16))
    yield network("fused_mlp", n, (32, 64, 64, 3))
    yield network("wide_mlp", n // 4, (63, 256, 256, 256, 256), skip=2)


def _of_ngp(draw: MoreDraw) -> Iterator[OpCase]:
    n, n_rays, learned = 65536 // draw.small, 4096 // draw.small, tuple(WEIGHTS)
    rays = {"rays": draw.sorted_rays(n_rays, n), "directions": draw.normal(n_rays, 16)}
    points, size = {"positions": draw.uniform(n, 3)}, f"{n:,} points, 16 levels, 2^17 entries"
    field = points | draw.ngp()
    # At a scale of 2048 a position's rounding is 1e-4 of a cell, and a slope belongs to the cell chosen.
    both = ("positions", "table")
    yield OpCase("hash_encode", size + ", to positions too", field, both, tolerance=2e-3, outliers=1e-2)

    regions = field | {"positions": draw.uniform(6, n, 3).transpose(0, 1), "footprints": draw.uniform(n, 6) * 0.02}
    yield OpCase("encode_regions", size + ", 6 each", regions, ("table",), tolerance=2e-3)
    encoded = {"encoding": draw.normal(32, n).t()}
    yield OpCase("ngp_field", f"{n:,} points", encoded | rays | field, ("encoding", *learned), tolerance=5e-3)
    yield OpCase("ngp_density_logits", size, field, tolerance=5e-3)
    yield OpCase("ngp_logits", size, rays | field, tolerance=5e-3)

    flat = field | {"table": 0.1 * field["table"]}  # densities that stay within fp32's digits of each other
    seen = flat | {"directions": draw.normal(n, 16)}
    yield OpCase("ngp_densities", size, flat, tolerance=5e-3)
    yield OpCase("ngp_query", size, seen, ("table", *learned), tolerance=5e-3)

    samples, n, n_rays = draw.samples(4096, 65536)
    inward, dense = draw.units(n_rays), field | {"density_out": 2.0 * field["density_out"]}
    marched = samples | {"origins": -1.4 * inward, "directions": inward} | draw.phases(n_rays)
    size = f"{n:,} samples, {n_rays:,} rays, flags and thinning"
    yield OpCase("ngp_visibility", size, marched | dense, outliers=2e-3)


def _of_voxels(draw: MoreDraw) -> Iterator[OpCase]:
    n, n_rays = 65536 // draw.small, 4096 // draw.small
    x, y, z = split_nodes(torch.arange((RESOLUTION + 1) ** 3), RESOLUTION)
    stored = ((torch.stack([x, y, z]) - RESOLUTION / 2).norm(dim=0) / RESOLUTION - 0.3).abs() < 0.06
    structure = build_structure(node_keys(x[stored], y[stored], z[stored], RESOLUTION), RESOLUTION)
    index, n_nodes = structure.index(EMPTY), structure.nodes.shape[0]
    grid = {"density": draw.normal(n_nodes), "color": draw.normal(n_nodes, color_width(N_BASIS))}
    grid |= {"blocks": index.blocks, "rows": index.rows}
    points = {"positions": draw.uniform(n, 3), "basis": draw.normal(n_rays, N_BASIS)}
    points |= {"rays": draw.sorted_rays(n_rays, n)}
    size, both = f"{n:,} points, {n_nodes:,} nodes", ("density", "color")
    yield OpCase("voxel_lookup", size, points | grid, both, tolerance=1e-3)
    yield OpCase("voxel_density", size, points | grid)


def _of_pixels(draw: MoreDraw) -> Iterator[OpCase]:
    side, n_images, n = 100, 20, 65536 // draw.small
    n_pixels, like = n_images * side**2, {"like": torch.zeros(n)}
    flags = draw.uniform(n_pixels) < 0.7
    pool = like | {
        "pool_colors": draw.integers(0, 256, n_pixels, 4).byte(),
        "pool_offsets": torch.arange(n_images + 1) * side**2,
        "pool_widths": torch.full((n_images,), side),
        "pool_poses": draw.normal(n_images, 3, 4),
        "pool_intrinsics": torch.tensor([[120.0, 120.0, 50.0, 50.0]]).repeat(n_images, 1),
        "words": pack_words(flags),
    }
    yield OpCase("random", f"{n:,} x 3", like, tolerance=0.0)
    yield OpCase("random_bits", f"{n:,} x 4 words", like, tolerance=0.0)
    yield OpCase("draw_pixels", f"{n:,} of {n_pixels:,} pixels", pool)
    chosen = {"chosen": draw.integers(0, n_pixels, n)}
    yield OpCase("read_pixels", f"{n:,} of {n_pixels:,} pixels", pool | chosen, tolerance=0.0)
    yield OpCase("choose_pixels", f"{n:,} of {int(flags.sum()):,} pixels", pool, tolerance=0.0)

    pixels = torch.zeros(400 // draw.small, 400)
    size = f"{pixels.shape[1]} x {pixels.shape[0]} pixels"
    camera = torch.cat([torch.eye(3, 4).flatten(), torch.tensor([500.0, 500.0, 200.0, pixels.shape[0] / 2.0])])
    camera[11] = 3.0  # before the box, looking at it
    frame = {"camera": camera, "pixels": pixels, "bits": pack_bits(draw.uniform(RESOLUTION**3) < 0.05)}
    yield OpCase("camera_rays", size, frame)
    # A cell at whose border a step lies is decided by rounding.
    yield OpCase("frame", f"{size}, {ROUNDS} rounds", frame, outliers=1e-2)


def _of_steps(draw: MoreDraw) -> Iterator[OpCase]:
    n = (1 << 22) // draw.small
    moments = {name: draw.normal(n) for name in ("params", "grad", "first")} | {"second": draw.uniform(n)}
    yield OpCase("adam", f"{n:,} parameters", moments)
    yield OpCase("check_gradients", f"{n:,} numbers", {"grad": moments["grad"]})
    numbers = {"step": torch.tensor(7), "flag": torch.tensor(1.0), "scale": torch.tensor(1024.0)}
    yield OpCase("finish_step", "four numbers", numbers | {"good": torch.tensor(3).int()}, tolerance=0.0)
    seen = {"floats": torch.tensor([0.1, 0.01, 0.0, 1024.0]), "counts": torch.tensor([1000, 200_000, 900_000]).int()}
    yield OpCase("record_step", f"{len(COLUMNS)} numbers", seen, tolerance=1e-6)
