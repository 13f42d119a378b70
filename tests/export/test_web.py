"""Baking for the web: the lattice, the bytes, the shader's maths in torch, and the way from a model to a page."""

from __future__ import annotations

import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nerfturbo.export.web.bake as bake_module
from nerfturbo.config import UniformSamplerConfig
from nerfturbo.errors import InputError
from nerfturbo.evaluation.evaluate import SCORED_PIXELS, views_to_score
from nerfturbo.evaluation.metrics import psnr
from nerfturbo.export.web.bake import BakeSettings, bake, score
from nerfturbo.export.web.baked import Baked, Chunk, decode_density, encode_density, pack
from nerfturbo.export.web.lattice import BLOCK, TEXELS, Lattice, SparseBlocks
from nerfturbo.export.web.page import PageFacts, bundle, write_page
from nerfturbo.export.web.reference import render_page, trace
from nerfturbo.export.web.teacher import (
    LEAST_RAYS,
    NEIGHBOURS,
    VisibleCells,
    _holes,
    as_covered,
    ask_field,
    close_holes,
    coverage,
)
from nerfturbo.export.web.tune import Trilinear, gather, marching_grid
from nerfturbo.ops import use_backend
from nerfturbo.ops.march import StepRule, march
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.types import Aabb

from ..tiny import ball_scene, tiny_config
from .test_exports import Toybox, make_model
from .web_scene import RADIUS, density, make_baked, make_cameras


class Shiny(Toybox):
    """A ball with a bright spot that moves with the eye."""

    def distance(self, positions: torch.Tensor) -> torch.Tensor:
        return positions.norm(dim=-1) - RADIUS

    def forward(self, positions, directions, times=None, camera_indices=None):
        normal = torch.nn.functional.normalize(positions, dim=-1)
        spot = (-(normal * directions).sum(-1, keepdim=True)).clamp_min(0.0) ** 2
        base = torch.tensor([[0.6, 0.2, 0.1]]) + 0.2 * normal
        return (base + 0.3 * spot).clamp(0.0, 1.0), self.density(positions)


@pytest.fixture(scope="module")
def model() -> NerfModel:
    return make_model(Shiny())


def test_codes_of_density_are_exact_to_four_percent_and_zero_stays_zero() -> None:
    values = torch.tensor([0.0, 0.1, 1.0, 30.0, 500.0])
    code = (encode_density(values, 0.02) * 255.0).round() / 255.0
    back = decode_density(code, 0.02)
    assert float(back[0]) == 0.0 and torch.allclose(back[2:], values[2:], rtol=0.04)
    assert float(decode_density(encode_density(values[1:2], 0.02), 0.02)) == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("levels", [1, 3])
def test_vertices_are_stored_once_and_found_again(levels: int) -> None:
    lattice = Lattice((0.1, 0.0, -0.2), 0.1, (2, 3, 2), levels)
    generator = torch.Generator().manual_seed(0)
    low, high = lattice.box.scaled(2.0 ** (levels - 1)).tensor()
    points = low + torch.rand(400, 3, generator=generator) * (high - low)
    cells = lattice.cell_keys(points).unique()
    blocks = SparseBlocks.of_cells(lattice, cells, torch.rand(cells.shape[0], generator=generator))
    assert blocks.vertices.unique().shape[0] == blocks.n_vertices
    assert bool((blocks.owners[1:] > blocks.owners[:-1]).all())  # in the order of loading
    # A linear function of the place, stored at the vertices, is found again everywhere.
    values = torch.cat([lattice.vertex_positions(blocks.vertices), torch.full((1, 3), 99.0)])
    for backend in ("reference", "cpu"):
        with use_backend(backend):
            ids, weights = gather(blocks, points)
        assert bool((ids < blocks.n_vertices).all())
        found = (values[ids.long()] * weights[..., None]).sum(1)
        assert torch.allclose(found, points, atol=1e-4)
    outside = torch.tensor([[50.0, 0.0, 0.0]])
    with use_backend("cpu"):
        assert bool((gather(blocks, outside)[0] == blocks.n_vertices).all())


def test_holes_in_a_sheet_are_closed_and_nothing_else_grows() -> None:
    lattice = Lattice((0.0, 0.0, 0.0), 0.1, (3, 3, 3), levels=2)
    x, y, z = torch.meshgrid(torch.arange(2, 19), torch.arange(2, 19), torch.tensor([5, 6]), indexing="ij")
    sheet = (((21 + z) * 21 + y) * 21 + x).view(-1).sort().values  # of level 1, whose cells are 21 along each axis
    inner = (sheet % 21 > 4) & (sheet % 21 < 16) & (sheet // 21 % 21 > 4) & (sheet // 21 % 21 < 16)
    hole = inner & (torch.rand(sheet.shape[0], generator=torch.Generator().manual_seed(0)) < 0.25)
    kept = sheet[~hole]
    closed = close_holes(VisibleCells(kept, torch.ones(kept.shape[0]), torch.zeros(kept.shape[0])), lattice)
    assert bool(torch.isin(kept, closed.keys).all()) and int(hole.sum()) > 40
    assert float(torch.isin(sheet[hole], closed.keys).float().mean()) > 0.9
    assert int((~torch.isin(closed.keys, sheet)).sum()) == 0 and bool((closed.keys.diff() > 0).all())
    assert float(closed.light.sum()) == kept.shape[0]


def test_holes_are_found_by_tiles_as_in_all_cells_at_once() -> None:
    lattice = Lattice((0.0, 0.0, 0.0), 0.1, (3, 2, 4), levels=3)
    x, y, z = lattice.cells
    full = torch.rand(3 * z, y, x, generator=torch.Generator().manual_seed(0)) < 0.42
    counts = torch.nn.functional.conv3d(full[None, None].float(), torch.ones(1, 1, 3, 3, 3), padding=1)[0, 0]
    holes = (counts > NEIGHBOURS - 0.5) & ~full
    assert int(holes.sum()) > 1000 and bool(holes[:, 0].any()) and bool(holes[:, :, 8].any())  # at borders of tiles too
    assert torch.equal(_holes(full.view(-1).nonzero()[:, 0], lattice).sort().values, holes.view(-1).nonzero()[:, 0])
    assert _holes(torch.tensor([5, 9000]), lattice).shape == (0,)


def test_some_blocks_say_what_all_take() -> None:
    lattice = Lattice.around(Aabb.cube(1.2), 0.05)
    cells = torch.arange(lattice.cells[0] ** 3)
    cells = cells[(lattice.cell_centers(cells).norm(dim=-1) - RADIUS).abs() < 0.1]
    blocks = SparseBlocks.of_cells(lattice, cells)
    some = blocks.every(8, cells)
    assert some.n_blocks == -(-blocks.n_blocks // 8) and 0.08 < some.n_vertices / blocks.n_vertices < 0.25
    assert bool(torch.isin(some.vertices, blocks.vertices).all())


def test_large_views_are_shrunk_before_a_cpu_scores_them() -> None:
    scene = ball_scene("test", n_views=3, size=700)
    small, views = views_to_score(scene, torch.device("cpu"))
    assert small.cameras.size.prod(-1).max() <= 1.2 * SCORED_PIXELS and views == 2
    assert views_to_score(scene, torch.device("cuda")) == (scene, 10)


def test_skips_never_leap_over_a_block() -> None:
    blocks = make_baked(2).blocks
    skips = blocks.skips
    for level in range(2):
        full = (blocks.slots[level] >= 0).nonzero()
        for place in (skips[level] > 0).nonzero()[::7]:
            nearest = int((full - place).abs().amax(-1).min()) if full.shape[0] else 255
            assert int(skips[level][tuple(place)]) == nearest
    assert int(skips.min()) == 0


def test_look_ups_and_their_gradients_are_those_of_torch() -> None:
    baked = make_baked(2)
    values = torch.rand(baked.blocks.n_vertices + 1, 8, generator=torch.Generator().manual_seed(0))
    values[-1] = 0.0
    points = torch.rand(500, 3, generator=torch.Generator().manual_seed(1)) * 5.0 - 3.0
    found, sinks = [], []
    for backend in ("reference", "cpu"):
        with use_backend(backend):
            ids, weights = gather(baked.blocks, points)
            sink = torch.zeros_like(values)
            out = Trilinear.apply(values.clone().requires_grad_(True), ids, weights, sink)
            (out * torch.arange(1.0, 9.0)).sum().backward()
        found.append(out.detach())
        sinks.append(sink)
    assert torch.allclose(found[0], found[1], atol=1e-5) and torch.allclose(sinks[0][:-1], sinks[1][:-1], atol=1e-4)
    assert float(sinks[0].abs().sum()) > 0.0


def unpacked(chunks: list[Chunk], n_features: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places, kept bits and texels of all blocks, unpacked one texel after the other as the page does it."""
    raw = zlib.decompress(chunks[0].content)
    n = chunks[0].last
    places = np.frombuffer(raw[: n * 8], "<u2").reshape(n, 4).astype(int)
    kept = np.unpackbits(np.frombuffer(raw[n * 8 :], np.uint8).reshape(n, 64), axis=1, bitorder="little")
    texels = np.zeros((n, TEXELS, 4 + n_features), np.uint8)
    for channels, kind in ((slice(0, 4), "base"), (slice(4, None), "features")):
        known: dict[tuple[int, ...], np.ndarray] = {}
        for chunk in (one for one in chunks if one.kind == kind):
            planes = np.frombuffer(zlib.decompress(chunk.content), np.uint8).reshape(4, -1).T.astype(int)
            rows = iter(planes)
            for slot in range(chunk.first, chunk.last):
                for texel in np.flatnonzero(kept[slot]):
                    local = np.array([texel % 8, texel // 8 % 8, texel // 64])
                    vertex = (*(places[slot, :3] * 7 + local), places[slot, 3])
                    if vertex not in known:
                        before = [
                            texels[slot, texel - BLOCK**axis, channels].astype(int)
                            for axis in range(3)
                            if local[axis] > 0 and kept[slot, texel - BLOCK**axis]
                        ]
                        predicted = sum(before) // len(before) if before else 0
                        p, q, r, s = next(rows)
                        left = np.array([q + r, q, q + s, p] if kind == "base" else [p, q, r, s])
                        known[vertex] = ((predicted + left) % 256).astype(np.uint8)
                    texels[slot, texel, channels] = known[vertex]
            assert next(rows, None) is None
    return places, kept, texels


@pytest.mark.parametrize("features", [True, False])
def test_bytes_unpack_to_what_was_packed(features: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nerfturbo.export.web.baked.BLOCKS_PER_CHUNK", 7)
    baked = make_baked(2, features=features)
    chunks = pack(baked)
    places, kept, texels = unpacked(chunks, baked.n_features)
    assert np.array_equal(places, baked.blocks.blocks.numpy())
    assert np.array_equal(texels, baked.atlas.numpy().reshape(texels.shape))
    assert kept.sum() > 0 and {chunk.kind for chunk in chunks} == {"blocks", "base"} | (
        {"features"} if features else set()
    )


def test_values_that_were_learned_take_less_than_where_repeats_are_looked_for() -> None:
    baked, draw = make_baked(2, voxel=0.03), torch.Generator().manual_seed(0)
    assert sum(len(chunk.content) for chunk in pack(baked)) < 0.2 * baked.values.numel()  # what repeats itself
    noise = 4.0 * torch.randn(baked.values.shape, generator=draw)
    _, *chunks = pack(replace(baked, values=(baked.values + noise).clamp(0.0, 255.0).to(torch.uint8)))
    usual = [len(zlib.compress(zlib.decompress(chunk.content), 9)) for chunk in chunks]
    assert sum(len(chunk.content) for chunk in chunks) < 0.98 * sum(usual)


def test_the_reference_walks_as_a_march_through_all_cells_does() -> None:
    """Leaps over empty blocks change nothing: a plain march with the same step gives the same opacity and depth."""
    baked, cameras = replace(make_baked(2), near=0.0), make_cameras(24)
    grid = marching_grid(baked.blocks)
    for view in range(3):
        rays = cameras.image_rays(view)
        rgb, opacity, _, steps, fetches = trace(baked, rays.origins, rays.directions, torch.ones(3))
        lattice = baked.blocks.lattice
        with use_backend("reference"):
            samples = march(rays.origins, rays.directions, grid.occupancy, StepRule(lattice.voxel * 0.25, 0.0, 12.0))
            ids, weights = gather(baked.blocks, samples.positions(rays))
        values = torch.cat([baked.values.float() / 255.0, torch.zeros(1, 8)])
        code = (values[:, 3][ids] * weights).sum(1)
        size = lattice.voxel * torch.pow(2.0, lattice.level_of(samples.positions(rays)).clamp(max=1).float())
        thickness = decode_density(code, size) * (samples.t_ends - samples.t_starts)
        total = torch.zeros(len(rays)).index_add_(0, samples.ray_indices.long(), thickness)
        assert float((opacity - (1.0 - torch.exp(-total))).abs().mean()) < 0.01
        assert bool((fetches >= steps).all()) and int(steps.max()) < 400
        assert float(rgb.min()) >= 0.0 and float(rgb.max()) <= 1.0
    ball = trace(baked, torch.tensor([[3.0, 0.0, 0.0]]), torch.tensor([[-1.0, 0.0, 0.0]]), torch.ones(3))
    assert float(ball[1]) > 0.99 and float(ball[2]) == pytest.approx(3.0 - RADIUS, abs=0.1)


def test_a_bake_keeps_its_budget_and_comes_close_to_the_field(model: NerfModel, tmp_path: Path) -> None:
    scene, test = ball_scene(n_views=8, size=40), ball_scene("test", n_views=2, size=40)
    settings = BakeSettings(
        budget_bytes=400_000, bytes_per_byte=4 / 3, tune_seconds=600.0, n_rays=1 << 13, tune_steps=41
    )
    said: list[str] = []
    shares: dict[str, list[float]] = {}
    with use_backend("cpu"):
        told = lambda share: shares.setdefault(said[-1].split()[0], []).append(share)  # noqa: E731
        result = bake(model, scene.cameras, settings, say=said.append, progress=told)
        found = score(model, result.baked, test)
        small = bake(model, scene.cameras, replace(settings, budget_bytes=4_500, tune_seconds=0.01))
    assert result.data_bytes * 4 / 3 <= 400_000 and result.baked.n_features == 4 and result.tune_steps == 41
    assert found.against_field > 27.0 and found.views == 2 and result.losses[-1] < 0.5 * result.losses[0]
    assert found.fetches_per_pixel > found.steps_per_pixel > 1.0
    assert small.data_bytes * 4 / 3 <= 4_500 and small.baked.n_features == 0
    assert [words.split()[0] for words in said] == ["looking", "choosing", "asking", "fine-tuning", "packing"]
    for stage, least in {"looking": 1, "choosing": 1, "asking": 2, "fine-tuning": 41}.items():
        told = shares[stage]
        assert len(told) >= least and told == sorted(told) and told[0] >= 0.0 and told[-1] <= 1.0, (stage, told)
    facts = PageFacts("a <b> & </script>", found, 1.0)
    size = write_page(tmp_path / "a.html", result, scene.cameras, facts)
    text = (tmp_path / "a.html").read_text("utf-8")
    assert size == len(text.encode()) and f'"bytes": {size}' in text
    assert "<title>a &lt;b&gt; &amp; &lt;/script&gt;</title>" in text and "a <b>" not in text
    assert "http:" not in text and "https:" not in text
    assert not [line for line in bundle().splitlines() if line.startswith(("import ", "export "))]


def test_a_busy_machine_bakes_the_same_page(
    model: NerfModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a number of steps no clock decides how many rays look, and so how fine the cells are, nor anything else."""
    caplog.set_level("INFO", "nerfturbo")
    cameras, settings = ball_scene(n_views=16, size=64).cameras, BakeSettings(4e5, n_rays=1 << 16, tune_steps=3)
    with use_backend("cpu"):
        quiet = bake(model, cameras, settings)
        true, begun = time.perf_counter, time.perf_counter()
        monkeypatch.setattr(time, "perf_counter", lambda: begun + 1000.0 * (true() - begun))  # all takes far longer
        busy = bake(model, cameras, settings)
    assert sum(busy.seconds.values()) > 50.0 * sum(quiet.seconds.values())
    assert busy.baked.blocks.lattice == quiet.baked.blocks.lattice and busy.tune_steps == quiet.tune_steps == 3
    assert not any("baking takes" in text for text in caplog.messages)
    assert [chunk.content for chunk in busy.chunks] == [chunk.content for chunk in quiet.chunks]


def test_a_slow_machine_says_how_long_and_asks_less(
    model: NerfModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cameras, settings = ball_scene(n_views=40, size=64).cameras, BakeSettings(4e5, tune_seconds=0.0)
    caplog.set_level("INFO", "nerfturbo")
    pools: list[int] = []
    look = bake_module.ask_field

    def looked(*args: Any, **options: Any) -> Any:
        pools.append(args[3])
        return look(*args, **options)

    monkeypatch.setattr(bake_module, "ask_field", looked)
    with use_backend("cpu"):
        bake(model, cameras, settings)
        true, begun = time.perf_counter, time.perf_counter()
        monkeypatch.setattr(time, "perf_counter", lambda: begun + 1e5 * (true() - begun))
        bake(model, cameras, settings)
    fast, slow = (text for text in caplog.messages if text.startswith("baking takes up to"))
    assert pools == [40 * 64 * 64, LEAST_RAYS]
    assert f"for {pools[0]} rays" in fast and f"for {pools[1]} rays" in slow
    assert float(slow.split()[4]) > 100 * float(fast.split()[4])


def test_rays_with_many_samples_end_the_look_early(model: NerfModel) -> None:
    cameras, lattice = ball_scene(n_views=16, size=64).cameras, Lattice.around(Aabb.cube(1.2), 0.05, 1)
    with use_backend("cpu"):
        whole, _ = ask_field(model, cameras, lattice, 1 << 16)
        cut, _ = ask_field(model, cameras, lattice, 1 << 16, max_samples=1)
        again, _ = ask_field(model, cameras, lattice, 1 << 16, max_samples=1)
    assert len(whole) == 1 << 16 and len(cut) == len(again) == LEAST_RAYS
    assert torch.equal(cut.colors, whole.colors[:LEAST_RAYS]) and torch.equal(cut.colors, again.colors)


class Garden(Shiny):
    """The ball, and round about, far outside the box, a wall coloured by where it is."""

    def distance(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.minimum(positions.norm(dim=-1) - RADIUS, 7.0 - positions.norm(dim=-1))


def test_a_contracted_scene_is_baked_to_its_end() -> None:
    config = tiny_config()
    folded = replace(config.grid, contraction="cube")
    config = replace(config, sampler=UniformSamplerConfig(n_samples=128), grid=folded)
    garden = NerfModel(config, SceneBounds(Aabb.cube(1.2), 0.05, 8.0))
    garden.field = Garden()
    scene, test = ball_scene(n_views=8, size=32), ball_scene("test", n_views=1, size=32)
    with use_backend("cpu"):
        settings = BakeSettings(2_000_000, tune_seconds=600.0, n_rays=1 << 12, tune_steps=12)
        result = bake(garden, scene.cameras, settings)
        found = score(garden, result.baked, test)
        page = render_page(result.baked, test.cameras, 0)
    lattice = result.baked.blocks.lattice
    assert 3 <= lattice.levels <= 5  # to the wall, not to the end of space
    assert float(page.opacity.min()) > 0.9 and 8.0 < float(page.depth[0, 0]) < 12.0  # the wall behind the ball
    assert found.against_field > 24.0


def test_cells_are_as_fine_as_the_rays_that_looked_allow() -> None:
    lattice = Lattice((0.0, 0.0, 0.0), 0.01, (20, 20, 20), levels=4)
    draw = torch.Generator().manual_seed(0)

    def looked(n: int) -> tuple[Lattice, float]:
        points = torch.rand(n, 3, generator=draw) * torch.tensor([1.0, 1.0, 0.01]) - 0.5  # a sheet in level 0
        keys, where = lattice.cell_keys(points).unique(return_inverse=True)
        light, even = torch.zeros(2, keys.shape[0])
        light.index_add_(0, where, torch.ones(n))
        even.index_add_(0, where, (torch.arange(n) % 2 == 0).float())
        found, seen = as_covered(VisibleCells(keys, light, even), lattice)
        assert float(seen.light.sum()) == pytest.approx(n)
        return found, coverage(seen, found)

    (few, sparse), (many, dense) = looked(3000), looked(300_000)
    assert many == replace(lattice, levels=1) and few.levels == 1  # the outer levels hold nothing
    assert few.voxel > 1.9 * lattice.voxel and min(sparse, dense) > 0.9


def test_an_empty_field_is_refused(model: NerfModel) -> None:
    empty = make_model(Shiny())
    empty.field.density = lambda positions, times=None: torch.zeros_like(positions[:, 0])  # type: ignore[assignment]
    with pytest.raises(InputError, match="nothing opaque"):
        bake(empty, ball_scene().cameras, BakeSettings(1e6, n_rays=512))
    empty.grid.bits.zero_()
    with pytest.raises(InputError, match="an occupancy grid that is empty"):
        bake(empty, ball_scene().cameras, BakeSettings(1e6, n_rays=512))


def test_nested_levels_show_what_is_far_away() -> None:
    baked = make_baked(3)
    image = render_page(baked, make_cameras(), 1)  # towards the wall
    positions = torch.tensor([[-2.0, 0.0, 0.0]])
    assert float(density(positions)) > 40.0 and float(image.opacity.mean()) > 0.9
    assert 0.5 < float(image.depth.median()) < 1.1
    coarse = render_page(make_baked(3, voxel=0.12), make_cameras(), 1)
    assert psnr(image.rgb, coarse.rgb) > 20.0
    assert Aabb.cube(1.2).size == (2.4, 2.4, 2.4) and isinstance(baked, Baked)


def test_more_vertices_than_fit_the_memory_are_refused(model: NerfModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nerfturbo.data.pool_file.available_memory", lambda: 5_000)
    with use_backend("reference"), pytest.raises(InputError, match="--budget-mb: expected what fits the 0 MB of free"):
        bake(model, ball_scene().cameras, BakeSettings(1e6, n_rays=512, tune_steps=1))
