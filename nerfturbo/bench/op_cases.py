"""The inputs on which every op is checked and timed: the sizes of a training step, drawn anew for each seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..ops.adam import AdamState, adam_update
from ..ops.composite import composite, visibility
from ..ops.composite_loss import composite_loss
from ..ops.hash_encode import HashLayout, hash_encode
from ..ops.intervals import importance_sample
from ..ops.march import OccupancyBits, StepRule, decay_and_max, march, pack_bits, threshold_bits
from ..ops.mlp import fused_mlp
from ..ops.ngp import NgpWeights, ngp_density, ngp_field
from ..ops.packed import compact, packed_cumsum, packed_sum
from ..ops.positions import ray_aabb
from ..ops.random import Stream, random_uniform
from ..ops.spherical_harmonics import spherical_harmonics
from .op_case import BOX, OpCase, packed_samples, some_samples, unit_vectors
from .op_cases_methods import MAKERS

_WEIGHTS = NgpWeights._fields


def op_cases(device: torch.device, *, seed: int, quick: bool) -> Iterator[OpCase]:
    """Every op at its size in a training step; a sixteenth of it for a quick look."""
    draw = torch.Generator().manual_seed(seed)
    small = 16 if quick else 1
    own = (_randomness, _rays, _packed, _compositing, _encoding, _networks, _field, _grid, _optimizer)
    for make in (*own, *MAKERS):
        for case in make(draw, small):
            inputs = {name: value.to(device) for name, value in case.inputs.items()}
            yield replace(case, inputs=inputs)


def _randomness(draw: torch.Generator, small: int) -> Iterator[OpCase]:
    n = 65536 // small

    def function(like: Tensor) -> Tensor:
        return random_uniform(n, columns=3, seed=1, stream=Stream.USER, step=2, device=like.device)

    yield OpCase("random", f"{n:,} x 3", function, {"like": torch.zeros(1)}, tolerance=0.0)


def _rays(draw: torch.Generator, small: int) -> Iterator[OpCase]:
    n, resolution = 4096 // small, 128
    origins = 3.0 * unit_vectors(draw, n)
    directions = torch.nn.functional.normalize(0.7 * torch.randn(n, 3, generator=draw) - origins, dim=-1)
    rays = {"origins": origins, "directions": directions}
    yield OpCase("aabb", f"{n:,} rays", lambda origins, directions: ray_aabb(origins, directions, BOX), rays)

    axis = (torch.arange(resolution) + 0.5) / resolution * 2.0 - 1.0
    x, y, z = torch.meshgrid(axis, axis, axis, indexing="ij")
    shell = ((x**2 + y**2 + z**2).sqrt() - 0.6).abs() < 0.05
    noise = torch.rand(shell.shape, generator=draw) < 0.002
    bits, occupied = pack_bits((shell | noise).flatten()), (shell | noise).float().mean().item()

    def function(origins: Tensor, directions: Tensor, bits: Tensor, jitter: Tensor) -> tuple[Tensor, ...]:
        grid, rule = OccupancyBits(bits, BOX, resolution), StepRule(step_size=3.0**0.5 * 2 / 1024)
        out = march(origins, directions, grid, rule, jitter=jitter)
        return out.offsets.float(), out.t_starts.sum(), out.t_ends.sum()

    rays |= {"bits": bits, "jitter": torch.rand(n, generator=draw)}
    yield OpCase("march", f"{n:,} rays, {resolution}^3 cells, {occupied:.1%} occupied", function, rays)


def _packed(draw: torch.Generator, small: int) -> Iterator[OpCase]:
    n_rays, n = 8192 // small, 131072 // small
    samples = some_samples(draw, n_rays, n)
    values = {"values": torch.randn(samples["t_starts"].shape[0], generator=draw), "offsets": samples["offsets"]}
    size = f"{samples['t_starts'].shape[0]:,} samples, {n_rays:,} rays"
    yield OpCase("packed_sum", size, packed_sum, values, ("values",))
    yield OpCase("packed_cumsum", size, packed_cumsum, values, ("values",))

    def function(keep: Tensor, **inputs: Tensor) -> tuple[Tensor, ...]:
        out = compact(packed_samples(inputs), keep)
        return out.t_starts, out.t_ends, out.ray_indices, out.offsets

    keep = torch.rand(samples["t_starts"].shape[0], generator=draw) < 0.3
    yield OpCase("compact", size, function, samples | {"keep": keep}, tolerance=0.0)


def _compositing(draw: torch.Generator, small: int) -> Iterator[OpCase]:
    n_rays, n = 8192 // small, 131072 // small
    samples = some_samples(draw, n_rays, n)
    n = samples["t_starts"].shape[0]
    size = f"{n:,} samples, {n_rays:,} rays"

    def function(density: Tensor, rgb: Tensor, **inputs: Tensor) -> tuple[Tensor, ...]:
        return composite(density, rgb, packed_samples(inputs), early_stop_eps=1e-4)

    density, rgb = 60.0 * torch.rand(n, generator=draw) ** 4, torch.rand(n, 3, generator=draw)
    yield OpCase("composite", size, function, samples | {"density": density, "rgb": rgb}, ("density", "rgb"))

    def look(density: Tensor, **inputs: Tensor) -> Tensor:
        return visibility(density, packed_samples(inputs), early_stop_eps=1e-3).float()

    yield OpCase("visibility", size, look, samples | {"density": density}, outliers=1e-4)

    bins, rays = 64, 4096 // small
    edges = torch.rand(rays, bins + 1, generator=draw).cumsum(-1)
    histogram = {"edges": edges, "weights": torch.rand(rays, bins, generator=draw) ** 3}
    yield OpCase(
        "importance",
        f"{rays:,} rays, {bins} bins to 64",
        lambda edges, weights: importance_sample(edges, weights, 64),
        histogram,
        outliers=1e-4,
    )


def _encoding(draw: torch.Generator, small: int) -> Iterator[OpCase]:
    n, layout = 65536 // small, HashLayout(log2_entries=17)
    inputs = {
        "positions": torch.rand(n, 3, generator=draw),
        "table": torch.randn(layout.n_entries, layout.n_features, generator=draw),
    }
    size = f"{n:,} points, 16 levels, 2^17 entries"
    encode = {"function": lambda positions, table: hash_encode(positions, table, layout), "inputs": inputs}
    # At a scale of 2048 a position's rounding is 1e-4 of a cell, and a slope belongs to the cell chosen.
    yield OpCase("hash_encode", size, wanted=("table",), tolerance=1e-3, **encode)
    yield OpCase(
        "hash_encode",
        size + ", to positions too",
        wanted=("positions", "table"),
        tolerance=2e-3,
        outliers=1e-2,
        **encode,
    )
    directions = {"directions": unit_vectors(draw, n)}
    yield OpCase("spherical_harmonics", f"{n:,} directions", spherical_harmonics, directions, ("directions",))


def _networks(draw: torch.Generator, small: int) -> Iterator[OpCase]:
    n = 65536 // small
    for widths in ((32, 64, 16), (32, 64, 64, 3)):
        inputs = {"inputs": torch.randn(n, widths[0], generator=draw)}
        for index in range(len(widths) - 1):
            weight = torch.randn(widths[index + 1], widths[index], generator=draw)
            inputs[f"weight_{index}"] = weight / widths[index] ** 0.5

        def function(inputs: Tensor, **weights: Tensor) -> Tensor:
            return fused_mlp(inputs, list(weights.values()))

        shape = "-".join(str(width) for width in widths)
        yield OpCase("fused_mlp", f"{n:,} points, {shape}", function, inputs, tuple(inputs), tolerance=5e-3)


def _field(draw: torch.Generator, small: int) -> Iterator[OpCase]:
    n, n_rays, layout = 65536 // small, 4096 // small, HashLayout(log2_entries=17)
    sizes = ((64, 32), (16, 64), (64, 32), (64, 64), (3, 64))
    weights = {
        name: torch.randn(size, generator=draw) / size[1] ** 0.5 for name, size in zip(_WEIGHTS, sizes, strict=True)
    }
    rays = torch.sort(torch.randint(0, n_rays, (n,), generator=draw)).values.int()
    inputs = {
        "encoding": torch.randn(32, n, generator=draw).t(),
        "directions": torch.randn(n_rays, 16, generator=draw),
        "rays": rays,
    }

    def network(encoding: Tensor, directions: Tensor, rays: Tensor, **weights: Tensor) -> Tensor:
        return ngp_field(encoding, directions, rays, NgpWeights(**weights))

    wanted = ("encoding", *_WEIGHTS)
    yield OpCase("ngp_field", f"{n:,} points, width 64", network, inputs | weights, wanted, tolerance=5e-3)

    def density(positions: Tensor, table: Tensor, density_in: Tensor, density_out: Tensor) -> Tensor:
        return ngp_density(positions, table, layout, (density_in, density_out))

    inputs = {
        "positions": torch.rand(n, 3, generator=draw),
        "table": torch.randn(layout.n_entries, layout.n_features, generator=draw),
        "density_in": weights["density_in"],
        "density_out": weights["density_out"],
    }
    yield OpCase("ngp_density", f"{n:,} points, 2^17 entries, width 64", density, inputs, tolerance=5e-3)

    samples = some_samples(draw, 8192 // small, 131072 // small)
    n, n_rays = samples["t_starts"].shape[0], samples["offsets"].shape[0] - 1

    def loss(raw: Tensor, background: Tensor, target: Tensor, **inputs: Tensor) -> Tensor:
        return composite_loss(raw, packed_samples(inputs), background, target).loss

    pictures = {"background": torch.rand(n_rays, 3, generator=draw), "target": torch.rand(n_rays, 4, generator=draw)}
    raw = {"raw": torch.randn(4, n, generator=draw).t() * 2.0}
    size = f"{n:,} samples, {n_rays:,} rays"
    yield OpCase("composite_loss", size, loss, samples | pictures | raw, ("raw",))


def _optimizer(draw: torch.Generator, small: int) -> Iterator[OpCase]:
    n = (1 << 22) // small
    inputs = {name: torch.randn(n, generator=draw) for name in ("params", "grad", "first")}
    inputs["second"] = torch.rand(n, generator=draw)

    def update(params: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        """On the same tensors again and again: the first call, from which the gate compares, changes them."""
        step = torch.zeros((), dtype=torch.int64, device=params.device)
        adam_update(params, grad, AdamState(first, second, step), torch.tensor(0.01, device=params.device))
        return params, first, second

    yield OpCase("adam", f"{n:,} parameters", update, inputs)


def _grid(draw: torch.Generator, small: int) -> Iterator[OpCase]:
    n = 128**3 // small
    density = torch.rand(n, generator=draw)
    cells = torch.randint(0, n, (n // 2,), generator=draw)
    inputs = {"density": density, "cells": cells, "fresh": torch.rand(n // 2, generator=draw)}

    def update(density: Tensor, cells: Tensor, fresh: Tensor) -> Tensor:
        density = density.clone()
        decay_and_max(density, cells, fresh, 0.95)
        return density

    yield OpCase("decay_and_max", f"{n // 2:,} of {n:,} cells", update, inputs)

    def threshold(density: Tensor) -> tuple[Tensor, Tensor]:
        bits = torch.empty(density.shape[0] // 32, dtype=torch.int32, device=density.device)
        mean = threshold_bits(density, bits, 0.01)
        return mean, bits

    yield OpCase("threshold_bits", f"{n:,} cells", threshold, {"density": density})
