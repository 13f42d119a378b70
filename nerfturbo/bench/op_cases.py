"""The inputs on which every op is checked and timed: the sizes of a training step, drawn anew for each seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..fields.voxels import build_structure, node_keys, split_nodes
from ..ops.adam import COLUMNS, AdamState, RayBudget, StepState, adam_update, check_gradients, finish_step, record_step
from ..ops.composite import Thinning, composite, composite_pixels, merge_weak_samples, visibility
from ..ops.composite_loss import RayLossRule, composite_loss, ray_losses
from ..ops.frame import absorb_samples, finish_rays, next_samples, start_rays
from ..ops.hash_encode import HashLayout, fade_levels, hash_encode
from ..ops.intervals import Space, importance_sample, interval_weights, place_intervals
from ..ops.march import OccupancyBits, StepRule, decay_and_max, march, pack_bits, threshold_bits
from ..ops.mlp import fused_mlp, wide_mlp
from ..ops.ngp import (
    NgpDensity,
    NgpWeights,
    ngp_densities,
    ngp_density_logits,
    ngp_field,
    ngp_logits,
    ngp_query,
    ngp_visibility,
    skips_unused,
)
from ..ops.packed import compact, packed_cumsum, packed_sum
from ..ops.pixels import PixelMask, PixelPool, camera_rays, choose_pixels, draw_pixels, pack_words
from ..ops.positions import ray_aabb, sample_positions
from ..ops.random import Stream, random_bits, random_uniform
from ..ops.spherical_harmonics import spherical_harmonics
from ..ops.voxels import VoxelIndex, VoxelTables, color_width, voxel_density, voxel_lookup, voxel_variation
from ..types import Aabb, PackedSamples

BOX = Aabb.cube(1.0)
RESOLUTION, N_BASIS, ROUNDS = 64, 9, 6
WEIGHTS = dict(zip(NgpWeights._fields, ((64, 32), (16, 64), (64, 32), (64, 64), (3, 64)), strict=True))  # their shapes


@dataclass(frozen=True)
class OpCase:
    """One call to check and to time. `inputs` are the tensors; those in `wanted` also get gradients."""

    op: str
    size: str  # in words
    function: Callable[..., Any]  # called with inputs by name
    inputs: dict[str, Tensor]
    wanted: tuple[str, ...] = ()
    tolerance: float = 1e-4  # of the largest value, for values and gradients
    outliers: float = 0.0  # share of values that may differ: those that rounding moves across a border


class Draw:
    """Random inputs of one seed, of sizes divided by `small`."""

    def __init__(self, seed: int, small: int) -> None:
        self._generator, self.small = torch.Generator().manual_seed(seed), small

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator)

    def units(self, n: int) -> Tensor:
        return torch.nn.functional.normalize(self.normal(n, 3), dim=-1)

    def samples(self, n_rays: int, n: int) -> tuple[dict[str, Tensor], int, int]:
        """About n samples on n_rays rays, then how many of each there are."""
        n_rays, n = n_rays // self.small, n // self.small
        counts = self.integers(0, 2 * n // n_rays + 1, n_rays)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        rays = torch.repeat_interleave(torch.arange(n_rays), counts)
        starts = (torch.arange(rays.shape[0]) - offsets[rays]).float() * 0.01
        found = {"t_starts": starts, "t_ends": starts + 0.01, "ray_indices": rays.int(), "offsets": offsets.int()}
        return found, rays.shape[0], n_rays

    def ngp_weights(self) -> dict[str, Tensor]:
        return {name: self.normal(*shape) / shape[1] ** 0.5 for name, shape in WEIGHTS.items()}


def packed_samples(inputs: dict[str, Tensor]) -> PackedSamples:
    return PackedSamples(inputs["t_starts"], inputs["t_ends"], inputs["ray_indices"], inputs["offsets"])


def op_cases(device: torch.device, *, seed: int, quick: bool) -> Iterator[OpCase]:
    """Every op at its size in a training step; a sixteenth of it for a quick look."""
    draw = Draw(seed, 16 if quick else 1)
    for make in MAKERS:
        for case in make(draw):
            yield replace(case, inputs={name: value.to(device) for name, value in case.inputs.items()})


def _random(draw: Draw) -> Iterator[OpCase]:
    n, like = 65536 // draw.small, {"like": torch.zeros(1)}
    key = {"seed": 1, "stream": Stream.USER, "step": 2}

    def numbers(like: Tensor) -> Tensor:
        return random_uniform(n, columns=3, device=like.device, **key)

    def words(like: Tensor) -> Tensor:
        return random_bits(n, device=like.device, **key)

    yield OpCase("random", f"{n:,} x 3", numbers, like, tolerance=0.0)
    yield OpCase("random_bits", f"{n:,} x 4 words", words, like, tolerance=0.0)


def _rays(draw: Draw) -> Iterator[OpCase]:
    n, resolution = 4096 // draw.small, 128
    origins = 3.0 * draw.units(n)
    directions = torch.nn.functional.normalize(0.7 * draw.normal(n, 3) - origins, dim=-1)
    rays = {"origins": origins, "directions": directions}
    yield OpCase("aabb", f"{n:,} rays", lambda origins, directions: ray_aabb(origins, directions, BOX), rays)

    axis = (torch.arange(resolution) + 0.5) / resolution * 2.0 - 1.0
    x, y, z = torch.meshgrid(axis, axis, axis, indexing="ij")
    shell = ((x**2 + y**2 + z**2).sqrt() - 0.6).abs() < 0.05
    cells = (shell | (draw.uniform(*shell.shape) < 0.002)).flatten()

    def function(origins: Tensor, directions: Tensor, bits: Tensor, jitter: Tensor) -> tuple[Tensor, ...]:
        grid, rule = OccupancyBits(bits, BOX, resolution), StepRule(step_size=3.0**0.5 * 2 / 1024)
        out = march(origins, directions, grid, rule, jitter=jitter)
        return out.offsets.float(), out.t_starts.sum(), out.t_ends.sum()

    rays |= {"bits": pack_bits(cells), "jitter": draw.uniform(n)}
    size = f"{n:,} rays, {resolution}^3 cells, {cells.float().mean().item():.1%} occupied"
    yield OpCase("march", size, function, rays)


def _packed(draw: Draw) -> Iterator[OpCase]:
    samples, n, n_rays = draw.samples(8192, 131072)
    values = {"values": draw.normal(n), "offsets": samples["offsets"]}
    size = f"{n:,} samples, {n_rays:,} rays"
    yield OpCase("packed_sum", size, packed_sum, values, ("values",))
    yield OpCase("packed_cumsum", size, packed_cumsum, values, ("values",))

    def function(keep: Tensor, **inputs: Tensor) -> tuple[Tensor, ...]:
        out = compact(packed_samples(inputs), keep)
        return out.t_starts, out.t_ends, out.ray_indices, out.offsets

    yield OpCase("compact", size, function, samples | {"keep": draw.uniform(n) < 0.3}, tolerance=0.0)


def _compositing(draw: Draw) -> Iterator[OpCase]:
    samples, n, n_rays = draw.samples(8192, 131072)
    size = f"{n:,} samples, {n_rays:,} rays"

    def function(density: Tensor, rgb: Tensor, **inputs: Tensor) -> tuple[Tensor, ...]:
        return composite(density, rgb, packed_samples(inputs), early_stop_eps=1e-4)

    def pixels(density: Tensor, rgb: Tensor, background: Tensor, **inputs: Tensor) -> tuple[Tensor, ...]:
        return composite_pixels(density, rgb, packed_samples(inputs), background)

    density = {"density": 60.0 * draw.uniform(n) ** 4}
    field = samples | density | {"rgb": draw.uniform(n, 3)}
    yield OpCase("composite", size, function, field, ("density", "rgb"))
    shown = field | {"background": draw.uniform(3)}
    yield OpCase("composite_pixels", size, pixels, shown, ("density", "rgb"), tolerance=1e-3)

    def look(density: Tensor, **inputs: Tensor) -> Tensor:
        return visibility(density, packed_samples(inputs), early_stop_eps=1e-3).float()

    yield OpCase("visibility", size, look, samples | density, outliers=1e-4)

    def loss(raw: Tensor, background: Tensor, target: Tensor, **inputs: Tensor) -> Tensor:
        return composite_loss(raw, packed_samples(inputs), background, target).loss

    def losses(raw: Tensor, **inputs: Tensor) -> Tensor:
        rule = RayLossRule(distortion=0.01, opacity=0.001, sparsity=1e-4)
        return ray_losses(raw, packed_samples(inputs), rule)

    pictures = {"background": draw.uniform(n_rays, 3), "target": draw.uniform(n_rays, 4)}
    raw = {"raw": draw.normal(4, n).t() * 2.0}
    yield OpCase("composite_loss", size, loss, samples | pictures | raw, ("raw",))
    yield OpCase("ray_losses", size, losses, samples | raw, ("raw",), tolerance=1e-3)

    def thinned(optical: Tensor, phases: Tensor, **inputs: Tensor) -> Tensor:
        return merge_weak_samples(optical, packed_samples(inputs), Thinning(0.05, phases)).float()

    samples, n, n_rays = draw.samples(4096, 65536)
    fog = {"optical": draw.uniform(n) ** 8, "phases": draw.integers(-(1 << 31), 1 << 31, n_rays).int()}
    yield OpCase("merge_weak_samples", f"{n:,} samples, {n_rays:,} rays", thinned, samples | fog, outliers=2e-3)


def _positions(draw: Draw) -> Iterator[OpCase]:
    samples, n, n_rays = draw.samples(8192, 131072)
    rays = {"origins": draw.normal(n_rays, 3), "directions": draw.units(n_rays)}
    size = f"{n:,} samples, {n_rays:,} rays"

    def positions(contraction: str) -> Callable[..., Tensor]:
        def function(origins: Tensor, directions: Tensor, **inputs: Tensor) -> Tensor:
            space = {"aabb": BOX, "contraction": contraction}
            return sample_positions(origins, directions, packed_samples(inputs), **space)  # type: ignore[arg-type]

        return function

    yield OpCase("sample_positions", size, positions("none"), samples | rays, ("origins", "directions"), 1e-3)
    yield OpCase("sample_positions", size + ", contracted", positions("cube"), samples | rays)


def _intervals(draw: Draw) -> Iterator[OpCase]:
    n_rays, bins = 4096 // draw.small, 64
    edges, weights = draw.uniform(n_rays, bins + 1).cumsum(-1), draw.uniform(n_rays, bins) ** 3

    def function(edges: Tensor, weights: Tensor) -> Tensor:
        return importance_sample(edges, weights, 64)

    histogram = {"edges": edges, "weights": weights}
    yield OpCase("importance", f"{n_rays:,} rays, {bins} bins to 64", function, histogram, outliers=1e-4)

    n_rays, n = 8192 // draw.small, 96
    places = torch.sort(draw.uniform(n_rays, n + 1), dim=-1).values
    rays = {"origins": draw.normal(n_rays, 3), "directions": draw.units(n_rays)}
    rays |= {"near": torch.full((n_rays, 1), 0.05), "far": torch.full((n_rays, 1), 50.0)}
    size = f"{n_rays:,} rays, {n} intervals"

    def place(**inputs: Tensor) -> tuple[Tensor, ...]:
        return place_intervals(**inputs, spacing="mixed", space=Space(BOX, "cube"))

    # Far away the distance is the inverse of a difference: few digits are left of it.
    yield OpCase("place_intervals", size, place, {"places": places, **rays}, tolerance=1e-3)
    weights = {"density": 20.0 * draw.uniform(n_rays, n) ** 4, "distances": 8.0 * places}
    yield OpCase("interval_weights", size, interval_weights, weights, ("density",))


def _encoding(draw: Draw) -> Iterator[OpCase]:
    n, layout = 65536 // draw.small, HashLayout(log2_entries=17)
    inputs = {"positions": draw.uniform(n, 3), "table": draw.normal(layout.n_entries, layout.n_features)}
    size = f"{n:,} points, 16 levels, 2^17 entries"

    def encode(positions: Tensor, table: Tensor) -> Tensor:
        return hash_encode(positions, table, layout)

    # At a scale of 2048 a position's rounding is 1e-4 of a cell, and a slope belongs to the cell chosen.
    yield OpCase("hash_encode", size, encode, inputs, ("table",), tolerance=1e-3)
    size, wanted = size + ", to positions too", ("positions", "table")
    yield OpCase("hash_encode", size, encode, inputs, wanted, tolerance=2e-3, outliers=1e-2)

    def fade(encoding: Tensor, footprints: Tensor) -> Tensor:
        return fade_levels(encoding, footprints, layout)

    encoding = {"encoding": draw.normal(32, n).t(), "footprints": draw.uniform(n) * 0.02}
    yield OpCase("fade_levels", f"{n:,} points, 16 levels", fade, encoding, ("encoding",))
    directions = {"directions": draw.units(n)}
    yield OpCase("spherical_harmonics", f"{n:,} directions", spherical_harmonics, directions, ("directions",))


def _networks(draw: Draw) -> Iterator[OpCase]:
    n = 65536 // draw.small
    for widths in ((32, 64, 16), (32, 64, 64, 3)):
        inputs = {"inputs": draw.normal(n, widths[0])}
        for k in range(len(widths) - 1):
            inputs[f"weight_{k}"] = draw.normal(widths[k + 1], widths[k]) / widths[k] ** 0.5

        def narrow(inputs: Tensor, **weights: Tensor) -> Tensor:
            return fused_mlp(inputs, list(weights.values()))

        shape = "-".join(str(width) for width in widths)
        yield OpCase("fused_mlp", f"{n:,} points, {shape}", narrow, inputs, tuple(inputs), tolerance=5e-3)

    n, widths, skip = 16384 // draw.small, (63, 256, 256, 256, 256), 2
    inputs = {"inputs": draw.normal(n, widths[0])}
    for k in range(len(widths) - 1):
        columns = widths[k] + (widths[0] if k == skip else 0)
        inputs[f"weight_{k}"] = draw.normal(widths[k + 1], columns) * (2.0 / columns) ** 0.5
        inputs[f"bias_{k}"] = torch.zeros(widths[k + 1])

    def wide(inputs: Tensor, **layers: Tensor) -> Tensor:
        weights, biases = ([layers[f"{kind}_{k}"] for k in range(len(widths) - 1)] for kind in ("weight", "bias"))
        return wide_mlp(inputs, weights, biases, skip=skip, relu_last=True)

    shape = "-".join(str(width) for width in widths)
    yield OpCase("wide_mlp", f"{n:,} points, {shape}", wide, inputs, tuple(inputs), tolerance=5e-3)


def _ngp(draw: Draw) -> Iterator[OpCase]:
    n, n_rays, layout = 65536 // draw.small, 4096 // draw.small, HashLayout(log2_entries=17)
    weights, table = draw.ngp_weights(), {"table": draw.normal(layout.n_entries, layout.n_features)}
    small_table = {"table": 0.1 * table["table"]}  # densities that stay within fp32's digits of each other
    rays = {"rays": torch.sort(draw.integers(0, n_rays, n)).values.int()}
    directions, points = {"directions": draw.normal(n_rays, 16)}, {"positions": draw.uniform(n, 3)}
    layers = {"first": weights["density_in"], "second": weights["density_out"]}
    size, learned = f"{n:,} points, width 64", tuple(WEIGHTS)

    def network(encoding: Tensor, directions: Tensor, rays: Tensor, **weights: Tensor) -> Tensor:
        return ngp_field(encoding, directions, rays, NgpWeights(**weights))

    encoded = {"encoding": draw.normal(32, n).t()} | directions | rays
    yield OpCase("ngp_field", size, network, encoded | weights, ("encoding", *learned), tolerance=5e-3)

    def density(positions: Tensor, table: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return ngp_density_logits(positions, table, layout, (first, second))

    def densities(positions: Tensor, table: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return ngp_densities(positions, table, layout, (first, second))

    size += ", 2^17 entries"
    yield OpCase("ngp_density_logits", size, density, points | table | layers, tolerance=5e-3)
    yield OpCase("ngp_densities", size, densities, points | small_table | layers, tolerance=5e-3)

    def logits(positions: Tensor, rays: Tensor, directions: Tensor, table: Tensor, **weights: Tensor) -> Tensor:
        own = NgpWeights(**weights)
        skips_unused(table, own)
        return ngp_logits(positions, directions, rays, table=table, layout=layout, weights=own)

    yield OpCase("ngp_logits", size, logits, points | rays | directions | table | weights, tolerance=5e-3)

    def query(positions: Tensor, directions: Tensor, table: Tensor, **weights: Tensor) -> tuple[Tensor, Tensor]:
        return ngp_query(positions, directions, table, layout, NgpWeights(**weights))

    seen = points | {"directions": draw.normal(n, 16)}
    yield OpCase("ngp_query", size, query, seen | small_table | weights, ("table", *learned), tolerance=5e-3)


def _ngp_visibility(draw: Draw) -> Iterator[OpCase]:
    (samples, n, n_rays), layout, weights = draw.samples(4096, 65536), HashLayout(log2_entries=17), draw.ngp_weights()

    def visible(
        origins: Tensor,
        directions: Tensor,
        phases: Tensor,
        table: Tensor,
        first: Tensor,
        second: Tensor,
        **inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        field, where = NgpDensity(BOX, table, layout, (first, second)), packed_samples(inputs)
        limits = {"early_stop_eps": 1e-3, "alpha_thre": 1e-3}
        flags = ngp_visibility(origins, directions, where, field, **limits)
        codes = ngp_visibility(origins, directions, where, field, thinning=Thinning(0.05, phases), **limits)
        return flags.float(), (codes != 0).float()

    inward = draw.units(n_rays)
    inputs = samples | {
        "origins": -1.4 * inward,
        "directions": inward,
        "phases": draw.integers(-(1 << 31), 1 << 31, n_rays).int(),
        "table": draw.normal(layout.n_entries, layout.n_features),
        "first": weights["density_in"],
        "second": 2.0 * weights["density_out"],
    }
    size = f"{n:,} samples, {n_rays:,} rays, flags and thinning"
    yield OpCase("ngp_visibility", size, visible, inputs, outliers=2e-3)


def _voxels(draw: Draw) -> Iterator[OpCase]:
    n, n_rays, empty = 65536 // draw.small, 4096 // draw.small, -3.0
    x, y, z = split_nodes(torch.arange((RESOLUTION + 1) ** 3), RESOLUTION)
    stored = ((torch.stack([x, y, z]) - RESOLUTION / 2).norm(dim=0) / RESOLUTION - 0.3).abs() < 0.06
    structure = build_structure(node_keys(x[stored], y[stored], z[stored], RESOLUTION), RESOLUTION)
    index, n_nodes = structure.index(empty), structure.nodes.shape[0]
    tables = {"density": draw.normal(n_nodes), "color": draw.normal(n_nodes, color_width(N_BASIS))}
    where = {"blocks": index.blocks, "rows": index.rows}
    points = {"positions": draw.uniform(n, 3)}
    seen = {"basis": draw.normal(n_rays, N_BASIS), "rays": torch.sort(draw.integers(0, n_rays, n)).values.int()}
    size = f"{n:,} points, {n_nodes:,} nodes"

    def indexed(inputs: dict[str, Tensor]) -> VoxelIndex:
        return VoxelIndex(inputs["blocks"], inputs["rows"], RESOLUTION, empty)

    def look_up(
        positions: Tensor, basis: Tensor, rays: Tensor, density: Tensor, color: Tensor, **own: Tensor
    ) -> Tensor:
        return voxel_lookup(positions, basis, rays, VoxelTables(density, color), indexed(own))

    inputs, both = points | seen | tables | where, ("density", "color")
    yield OpCase("voxel_lookup", size, look_up, inputs, both, tolerance=1e-3)

    def look_ahead(positions: Tensor, density: Tensor, **own: Tensor) -> Tensor:
        return voxel_density(positions, density, indexed(own))

    yield OpCase("voxel_density", size, look_ahead, points | where | {"density": tables["density"]})

    def variation(density: Tensor, color: Tensor, nodes: Tensor, chosen: Tensor, **own: Tensor) -> Tensor:
        return voxel_variation(VoxelTables(density, color), indexed(own), nodes, chosen, n_basis=N_BASIS)

    some = {"nodes": structure.nodes, "chosen": draw.integers(0, n_nodes, n_nodes // 4)}
    size = f"{n_nodes // 4:,} of {n_nodes:,} nodes"
    yield OpCase("voxel_variation", size, variation, tables | where | some, both, tolerance=1e-3)


def _pixels(draw: Draw) -> Iterator[OpCase]:
    side, n_images, n = 100, 20, 65536 // draw.small
    n_pixels = n_images * side**2
    pool = {"offsets": torch.arange(n_images + 1) * side**2, "widths": torch.full((n_images,), side)}
    inputs = pool | {
        "colors": draw.integers(0, 256, n_pixels, 4).byte(),
        "poses": draw.normal(n_images, 3, 4),
        "intrinsics": torch.tensor([[120.0, 120.0, 50.0, 50.0]]).repeat(n_images, 1),
    }

    def drawn(colors: Tensor, offsets: Tensor, widths: Tensor, poses: Tensor, intrinsics: Tensor) -> tuple[Tensor, ...]:
        return draw_pixels(PixelPool(colors, offsets, widths, poses, intrinsics), n, seed=1, step=2)

    yield OpCase("draw_pixels", f"{n:,} of {n_pixels:,} pixels", drawn, inputs)

    def chosen(offsets: Tensor, widths: Tensor, words: Tensor) -> Tensor:
        return choose_pixels(offsets, widths, n, mask=PixelMask.of_words(words), seed=1, step=2).indices

    flags = draw.uniform(n_pixels) < 0.7
    masked = pool | {"words": pack_words(flags)}
    yield OpCase("choose_pixels", f"{n:,} of {int(flags.sum()):,} pixels", chosen, masked, tolerance=0.0)


def _frames(draw: Draw) -> Iterator[OpCase]:
    width, height = 400, 400 // draw.small
    camera = torch.cat([torch.eye(3, 4).flatten(), torch.tensor([500.0, 500.0, 200.0, height / 2.0])])
    camera[11] = 3.0  # before the box, looking at it
    size, bits = f"{width} x {height} pixels", pack_bits(draw.uniform(RESOLUTION**3) < 0.05)

    def rays(camera: Tensor) -> tuple[Tensor, Tensor]:
        return camera_rays(camera, width=width, height=height)

    yield OpCase("camera_rays", size, rays, {"camera": camera})

    def frame(camera: Tensor, bits: Tensor) -> tuple[Tensor, ...]:
        """A few rounds through fog whose colour is the place."""
        live = start_rays(*rays(camera), OccupancyBits(bits, BOX, RESOLUTION), StepRule(0.01))
        for _ in range(ROUNDS):
            samples = next_samples(live, rows=16 * width * height, aabb=BOX)
            unit = samples.positions.nan_to_num(0.0).clamp(0.0, 1.0)
            live = absorb_samples(live, samples, 20.0 * unit[:, 0], unit, early_stop_eps=1e-4)
        return finish_rays(live)

    # A cell at whose border a step lies is decided by rounding.
    yield OpCase("frame", f"{size}, {ROUNDS} rounds", frame, {"camera": camera, "bits": bits}, outliers=1e-2)


def _grid(draw: Draw) -> Iterator[OpCase]:
    n = 128**3 // draw.small
    density, cells = draw.uniform(n), draw.integers(0, n, n // 2)

    def update(density: Tensor, cells: Tensor, fresh: Tensor) -> Tensor:
        density = density.clone()
        decay_and_max(density, cells, fresh, 0.95)
        return density

    inputs = {"density": density, "cells": cells, "fresh": draw.uniform(n // 2)}
    yield OpCase("decay_and_max", f"{n // 2:,} of {n:,} cells", update, inputs)

    def threshold(density: Tensor) -> tuple[Tensor, Tensor]:
        bits = torch.empty(density.shape[0] // 32, dtype=torch.int32, device=density.device)
        mean = threshold_bits(density, bits, 0.01)
        return mean, bits

    yield OpCase("threshold_bits", f"{n:,} cells", threshold, {"density": density})


def _optimizer(draw: Draw) -> Iterator[OpCase]:
    n = (1 << 22) // draw.small

    def update(params: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        """On the same tensors again and again: the first call, from which the gate compares, changes them."""
        step = torch.zeros((), dtype=torch.int64, device=params.device)
        adam_update(params, grad, AdamState(first, second, step), torch.tensor(0.01, device=params.device))
        return params, first, second

    inputs = {name: draw.normal(n) for name in ("params", "grad", "first")}
    yield OpCase("adam", f"{n:,} parameters", update, inputs | {"second": draw.uniform(n)})

    def norm(grad: Tensor) -> tuple[Tensor, Tensor]:
        flag = torch.zeros((), device=grad.device)
        return check_gradients([grad], flag), flag

    yield OpCase("check_gradients", f"{n:,} numbers", norm, {"grad": inputs["grad"]})

    def finish(step: Tensor, flag: Tensor, scale: Tensor, good: Tensor) -> tuple[Tensor, ...]:
        mine = [value.clone() for value in (step, flag, scale, good)]
        finish_step(mine[0], mine[1], scale=mine[2], good_steps=mine[3])
        return tuple(mine)

    numbers = {"step": torch.tensor(7), "flag": torch.tensor(1.0), "scale": torch.tensor(1024.0)}
    numbers["good"] = torch.tensor(3, dtype=torch.int32)
    yield OpCase("finish_step", "four numbers", finish, numbers, tolerance=0.0)

    def record(values: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        state = StepState.create(step=5, n_active=1000, length=8, device=values.device)
        names = ("loss", "mse", "found_inf", "loss_scale", "n_rays", "n_samples", "n_marched")
        record_step(state, dict(zip(names, (*values, *counts), strict=True)), RayBudget(1 << 18, 1 << 20, 1 << 16))
        return state.ring, state.n_active, state.totals

    seen = {"values": torch.tensor([0.1, 0.01, 0.0, 1024.0])}
    seen["counts"] = torch.tensor([1000, 200_000, 900_000], dtype=torch.int32)
    yield OpCase("record_step", f"{len(COLUMNS)} numbers", record, seen, tolerance=1e-6)


MAKERS = (
    *(_random, _rays, _packed, _compositing, _positions, _intervals, _encoding, _networks, _ngp, _ngp_visibility),
    *(_voxels, _pixels, _frames, _grid, _optimizer),
)
