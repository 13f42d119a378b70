"""More inputs on which ops are checked and timed: what draws pixels, frames, intervals, voxels, wide networks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..fields.voxels import build_structure, node_keys, split_nodes
from ..ops.adam import COLUMNS, RayBudget, StepState, check_gradients, finish_step, record_step
from ..ops.composite import Thinning, composite_pixels, thin_codes
from ..ops.composite_loss import RayLossRule, ray_losses
from ..ops.frame import absorb_samples, finish_rays, next_samples, start_rays
from ..ops.hash_encode import HashLayout, fade_levels
from ..ops.intervals import Space, Spacing, interval_weights, place_intervals
from ..ops.march import OccupancyBits, StepRule, pack_bits
from ..ops.mlp import wide_mlp
from ..ops.ngp import NgpDensity, NgpWeights, ngp_densities, ngp_logits, ngp_query, ngp_visibility, skips_unused
from ..ops.pixels import PixelMask, PixelPool, camera_rays, choose_pixels, draw_pixels, pack_words
from ..ops.positions import sample_positions
from ..ops.random import Stream, random_bits
from ..ops.voxels import VoxelIndex, VoxelTables, color_width, voxel_density, voxel_lookup, voxel_variation
from .op_case import BOX, OpCase, packed_samples, some_samples, unit_vectors

RESOLUTION, N_BASIS, ROUNDS = 64, 9, 6


def pixels(draw: torch.Generator, small: int) -> Iterator[OpCase]:
    side, n_images, n = 100, 20, 65536 // small
    inputs = {
        "colors": torch.randint(0, 256, (n_images * side**2, 4), dtype=torch.uint8, generator=draw),
        "offsets": torch.arange(n_images + 1) * side**2,
        "widths": torch.full((n_images,), side),
        "poses": torch.randn(n_images, 3, 4, generator=draw),
        "intrinsics": torch.tensor([[120.0, 120.0, 50.0, 50.0]]).repeat(n_images, 1),
    }

    def drawn(colors: Tensor, offsets: Tensor, widths: Tensor, poses: Tensor, intrinsics: Tensor) -> tuple[Tensor, ...]:
        return draw_pixels(PixelPool(colors, offsets, widths, poses, intrinsics), n, seed=1, step=2)

    yield OpCase("draw_pixels", f"{n:,} of {n_images * side**2:,} pixels", drawn, inputs)

    def chosen(offsets: Tensor, widths: Tensor, words: Tensor) -> Tensor:
        return choose_pixels(offsets, widths, n, mask=PixelMask.of_words(words), seed=1, step=2).indices

    flags = torch.rand(n_images * side**2, generator=draw) < 0.7
    masked = {"offsets": inputs["offsets"], "widths": inputs["widths"], "words": pack_words(flags)}
    yield OpCase("choose_pixels", f"{n:,} of {int(flags.sum()):,} pixels", chosen, masked, tolerance=0.0)

    def words(like: Tensor) -> Tensor:
        return random_bits(n, seed=1, stream=Stream.USER, step=2, device=like.device)

    yield OpCase("random_bits", f"{n:,} x 4 words", words, {"like": torch.zeros(1)}, tolerance=0.0)


def frames(draw: torch.Generator, small: int) -> Iterator[OpCase]:
    width, height = 400, 400 // small
    camera = torch.cat([torch.eye(3, 4).flatten(), torch.tensor([500.0, 500.0, 200.0, height / 2.0])])
    camera[11] = 3.0  # before the box, looking at it
    size = f"{width} x {height} pixels"
    yield OpCase(
        "camera_rays", size, lambda camera: camera_rays(camera, width=width, height=height), {"camera": camera}
    )
    bits = pack_bits(torch.rand(RESOLUTION**3, generator=draw) < 0.05)

    def frame(camera: Tensor, bits: Tensor) -> tuple[Tensor, ...]:
        """A few rounds through fog whose colour is the place."""
        origins, directions = camera_rays(camera, width=width, height=height)
        live = start_rays(origins, directions, OccupancyBits(bits, BOX, RESOLUTION), StepRule(0.01))
        for _ in range(ROUNDS):
            samples = next_samples(live, rows=16 * width * height, aabb=BOX)
            unit = samples.positions.nan_to_num(0.0).clamp(0.0, 1.0)
            live = absorb_samples(live, samples, 20.0 * unit[:, 0], unit, early_stop_eps=1e-4)
        return finish_rays(live)

    # A cell at whose border a step lies is decided by rounding.
    yield OpCase("frame", f"{size}, {ROUNDS} rounds", frame, {"camera": camera, "bits": bits}, outliers=1e-2)


def samples(draw: torch.Generator, small: int) -> Iterator[OpCase]:
    packed = some_samples(draw, 8192 // small, 131072 // small)
    n, n_rays = packed["t_starts"].shape[0], packed["offsets"].shape[0] - 1
    rays = {"origins": torch.randn(n_rays, 3, generator=draw), "directions": unit_vectors(draw, n_rays)}
    size = f"{n:,} samples, {n_rays:,} rays"

    def positions(contraction: str) -> Callable[..., Tensor]:
        def function(origins: Tensor, directions: Tensor, **inputs: Tensor) -> Tensor:
            space = {"aabb": BOX, "contraction": contraction}
            return sample_positions(origins, directions, packed_samples(inputs), **space)  # type: ignore[arg-type]

        return function

    yield OpCase("sample_positions", size, positions("none"), packed | rays, ("origins", "directions"), 1e-3)
    yield OpCase("sample_positions", size + ", contracted", positions("cube"), packed | rays)

    def losses(raw: Tensor, **inputs: Tensor) -> Tensor:
        rule = RayLossRule(distortion=0.01, opacity=0.001, sparsity=1e-4)
        return ray_losses(raw, packed_samples(inputs), rule)

    def pixels(density: Tensor, rgb: Tensor, background: Tensor, **inputs: Tensor) -> tuple[Tensor, ...]:
        return composite_pixels(density, rgb, packed_samples(inputs), background)

    field = {"density": 60.0 * torch.rand(n, generator=draw) ** 4, "rgb": torch.rand(n, 3, generator=draw)}
    shown = packed | field | {"background": torch.rand(3, generator=draw)}
    yield OpCase("composite_pixels", size, pixels, shown, ("density", "rgb"), tolerance=1e-3)

    raw = {"raw": torch.randn(4, n, generator=draw).t() * 2.0}
    yield OpCase("ray_losses", size, losses, packed | raw, ("raw",), tolerance=1e-3)

    layout = HashLayout(log2_entries=17)
    encoding = {"encoding": torch.randn(32, n, generator=draw).t(), "footprints": torch.rand(n, generator=draw) * 0.02}
    yield OpCase(
        "fade_levels",
        f"{n:,} points, 16 levels",
        lambda encoding, footprints: fade_levels(encoding, footprints, layout),
        encoding,
        ("encoding",),
    )


def intervals(draw: torch.Generator, small: int) -> Iterator[OpCase]:
    n_rays, n = 8192 // small, 96
    places = torch.sort(torch.rand(n_rays, n + 1, generator=draw), dim=-1).values
    rays = {"origins": torch.randn(n_rays, 3, generator=draw), "directions": unit_vectors(draw, n_rays)}
    limits = {"near": torch.full((n_rays, 1), 0.05), "far": torch.full((n_rays, 1), 50.0)}
    size = f"{n_rays:,} rays, {n} intervals"

    def place(**inputs: Tensor) -> tuple[Tensor, ...]:
        return place_intervals(**inputs, spacing=Spacing("mixed"), space=Space(BOX, "cube"))

    # Far away the distance is the inverse of a difference: few digits are left of it.
    yield OpCase("place_intervals", size, place, {"places": places, **rays, **limits}, tolerance=1e-3)
    weights = {"density": 20.0 * torch.rand(n_rays, n, generator=draw) ** 4, "distances": 8.0 * places}
    yield OpCase("interval_weights", size, interval_weights, weights, ("density",))


def fields(draw: torch.Generator, small: int) -> Iterator[OpCase]:
    packed = some_samples(draw, 4096 // small, 65536 // small)
    n, n_rays, layout = packed["t_starts"].shape[0], packed["offsets"].shape[0] - 1, HashLayout(log2_entries=17)
    shapes = ((64, 32), (16, 64), (64, 32), (64, 64), (3, 64))
    weights = {
        name: torch.randn(shape, generator=draw) / shape[1] ** 0.5
        for name, shape in zip(NgpWeights._fields, shapes, strict=True)
    }
    table = {"table": torch.randn(layout.n_entries, layout.n_features, generator=draw)}
    points = {"positions": torch.rand(n, 3, generator=draw), "ray_indices": packed["ray_indices"]}
    encoded = {"directions": torch.randn(n_rays, 16, generator=draw)}

    def logits(positions: Tensor, ray_indices: Tensor, directions: Tensor, table: Tensor, **w: Tensor) -> Tensor:
        own = NgpWeights(**w)
        skips_unused(table, own)
        return ngp_logits(positions, directions, ray_indices, table=table, layout=layout, weights=own)

    yield OpCase("ngp_logits", f"{n:,} points", logits, points | encoded | table | weights, tolerance=5e-3)

    def query(positions: Tensor, directions: Tensor, table: Tensor, **w: Tensor) -> tuple[Tensor, Tensor]:
        return ngp_query(positions, directions, table, layout, NgpWeights(**w))

    place, learned = {"positions": points["positions"]}, ("table", *NgpWeights._fields)
    seen = {"directions": torch.randn(n, 16, generator=draw)}
    small_table = {"table": 0.1 * table["table"]}  # densities that stay within fp32's digits of each other
    yield OpCase("ngp_query", f"{n:,} points", query, place | seen | small_table | weights, learned, tolerance=5e-3)

    def densities(positions: Tensor, table: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return ngp_densities(positions, table, layout, (first, second))

    network = {"first": weights["density_in"], "second": weights["density_out"]}
    yield OpCase("ngp_densities", f"{n:,} points", densities, place | small_table | network, tolerance=5e-3)

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
        found = [
            ngp_visibility(origins, directions, where, field, early_stop_eps=1e-3, alpha_thre=1e-3, thinning=thinning)
            for thinning in (None, Thinning(0.05, phases))
        ]
        return found[0].float(), (found[1] != 0).float()

    rays = {
        "origins": -1.4 * unit_vectors(draw, n_rays),
        "phases": torch.randint(-(1 << 31), 1 << 31, (n_rays,), generator=draw),
    }
    rays |= {"directions": -rays["origins"] / 1.4, "phases": rays["phases"].int()}
    network["second"] = 2.0 * network["second"]
    size = f"{n:,} samples, {n_rays:,} rays, flags and thinning"
    yield OpCase("ngp_visibility", size, visible, packed | rays | table | network, outliers=2e-3)


def thinning(draw: torch.Generator, small: int) -> Iterator[OpCase]:
    packed = some_samples(draw, 4096 // small, 65536 // small)
    n, n_rays = packed["t_starts"].shape[0], packed["offsets"].shape[0] - 1

    def thinned(optical: Tensor, phases: Tensor, **inputs: Tensor) -> Tensor:
        return thin_codes(optical, packed_samples(inputs), Thinning(0.05, phases)).float()

    fog = {"optical": torch.rand(n, generator=draw) ** 8}
    fog["phases"] = torch.randint(-(1 << 31), 1 << 31, (n_rays,), generator=draw).int()
    yield OpCase("thin_codes", f"{n:,} samples, {n_rays:,} rays", thinned, packed | fog, outliers=2e-3)


def voxels(draw: torch.Generator, small: int) -> Iterator[OpCase]:
    n, n_rays, empty = 65536 // small, 4096 // small, -3.0
    places = torch.arange((RESOLUTION + 1) ** 3)
    x, y, z = split_nodes(places, RESOLUTION)
    stored = ((torch.stack([x, y, z]) - RESOLUTION / 2).norm(dim=0) / RESOLUTION - 0.3).abs() < 0.06
    structure = build_structure(node_keys(x[stored], y[stored], z[stored], RESOLUTION), RESOLUTION)
    index, rows = structure.index(empty), structure.nodes.shape[0]
    tables = {
        "density": torch.randn(rows, generator=draw),
        "color": torch.randn(rows, color_width(N_BASIS), generator=draw),
    }
    where = {"blocks": index.blocks, "rows": index.rows}
    points = {
        "positions": torch.rand(n, 3, generator=draw),
        "basis": torch.randn(n_rays, N_BASIS, generator=draw),
        "rays": torch.sort(torch.randint(0, n_rays, (n,), generator=draw)).values.int(),
    }
    size = f"{n:,} points, {rows:,} nodes"

    def look_up(
        positions: Tensor, basis: Tensor, rays: Tensor, density: Tensor, color: Tensor, blocks: Tensor, rows: Tensor
    ) -> Tensor:
        own = VoxelIndex(blocks, rows, RESOLUTION, empty)
        return voxel_lookup(positions, basis, rays, VoxelTables(density, color), own)

    yield OpCase("voxel_lookup", size, look_up, points | tables | where, ("density", "color"), tolerance=1e-3)

    def look_ahead(positions: Tensor, density: Tensor, blocks: Tensor, rows: Tensor) -> Tensor:
        return voxel_density(positions, density, VoxelIndex(blocks, rows, RESOLUTION, empty))

    ahead = {"positions": points["positions"], "density": tables["density"], **where}
    yield OpCase("voxel_density", size, look_ahead, ahead)

    def variation(
        density: Tensor, color: Tensor, blocks: Tensor, rows: Tensor, nodes: Tensor, chosen: Tensor
    ) -> Tensor:
        own = VoxelIndex(blocks, rows, RESOLUTION, empty)
        return voxel_variation(VoxelTables(density, color), own, nodes, chosen, n_basis=N_BASIS)

    some = torch.randint(0, rows, (rows // 4,), generator=draw)
    taken = tables | where | {"nodes": structure.nodes, "chosen": some}
    yield OpCase("voxel_variation", f"{rows // 4:,} of {rows:,} nodes", variation, taken, ("density", "color"), 1e-3)


def wide_networks(draw: torch.Generator, small: int) -> Iterator[OpCase]:
    n, widths, skip = 16384 // small, (63, 256, 256, 256, 256), 2
    inputs = {"inputs": torch.randn(n, widths[0], generator=draw)}
    for k in range(len(widths) - 1):
        columns = widths[k] + (widths[0] if k == skip else 0)
        inputs[f"weight_{k}"] = torch.randn(widths[k + 1], columns, generator=draw) * (2.0 / columns) ** 0.5
        inputs[f"bias_{k}"] = torch.zeros(widths[k + 1])

    def function(inputs: Tensor, **layers: Tensor) -> Tensor:
        weights, biases = ([layers[f"{kind}_{k}"] for k in range(len(widths) - 1)] for kind in ("weight", "bias"))
        return wide_mlp(inputs, weights, biases, skip=skip, relu_last=True)

    shape = "-".join(str(width) for width in widths)
    yield OpCase("wide_mlp", f"{n:,} points, {shape}", function, inputs, tuple(inputs), tolerance=5e-3)


def counters(draw: torch.Generator, small: int) -> Iterator[OpCase]:
    n = (1 << 22) // small

    def norm(grad: Tensor) -> tuple[Tensor, Tensor]:
        flag = torch.zeros((), device=grad.device)
        return check_gradients([grad], flag), flag

    yield OpCase("check_gradients", f"{n:,} numbers", norm, {"grad": torch.randn(n, generator=draw)})

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


MAKERS = (pixels, frames, samples, intervals, fields, thinning, voxels, wide_networks, counters)
