"""Pixel choice: the same on every backend, only what the mask leaves, and means that stay unbiased under a guide."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.errors import InputError
from nerfturbo.ops import use_backend
from nerfturbo.ops.pixels import (
    ChosenPixels,
    PixelGuide,
    PixelMask,
    PixelPool,
    choose_pixels,
    count_bits,
    draw_pixels,
    pack_words,
    unpack_words,
)
from nerfturbo.ops.pixels.reference import BITS, scale

from .cases import Target, assert_close, generator, require

SIZES = [(25, 9), (5, 31), (40, 16)]  # width, height; some one more than whole tiles
OFFSETS = torch.tensor([0, *[w * h for w, h in SIZES]]).cumsum(0)
WIDTHS = torch.tensor([w for w, _ in SIZES])
N_PIXELS = int(OFFSETS[-1])
TILE = 8


def flags(seed: int = 0, share: float = 0.4) -> torch.Tensor:
    chosen = torch.rand(N_PIXELS, generator=generator(seed)) < share
    chosen[200:420] = False  # whole words without a pixel
    return chosen


def make_mask(device: str = "cpu") -> PixelMask:
    return PixelMask.of_words(pack_words(flags())).to(device)


def make_guide(device: str = "cpu", mask: PixelMask | None = None) -> PixelGuide:
    tiles = [-(-w // TILE) * -(-h // TILE) for w, h in SIZES]
    shares = torch.randint(1, 1000, (sum(tiles),), generator=generator(3))
    shares[3] = 0  # a tile that is never drawn
    first = torch.tensor([0, *tiles]).cumsum(0)
    drawable = N_PIXELS if mask is None else mask.n_drawable
    return PixelGuide(shares.cumsum(0).to(device), first.to(device), TILE, drawable)


def choose(n: int, **options: object) -> ChosenPixels:
    return choose_pixels(OFFSETS, WIDTHS, n, seed=3, step=7, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("on_device", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", ["uniform", "masked", "guided", "both"])
def test_matches_reference(sized: tuple[Target, int], kind: str, on_device: bool, poisoned_empty: None) -> None:
    target, n = sized
    require(target)
    mask = make_mask(target.device) if kind in ("masked", "both") else None
    guide = make_guide(target.device, mask) if kind in ("guided", "both") else None
    step = torch.tensor(9, device=target.device) if on_device else 9
    offsets, widths = OFFSETS.to(target.device), WIDTHS.to(target.device)
    results = []
    for backend in (target.backend, "reference"):
        with use_backend(backend):  # type: ignore[arg-type]
            results.append(
                choose_pixels(offsets, widths, n, mask=mask, guide=guide, seed=(5 << 33) + 1, step=step, first=11)
            )
    got, want = results
    assert torch.equal(got.indices, want.indices)
    assert (got.weights is None) == (guide is None) == (got.tiles is None)
    if got.weights is not None and got.tiles is not None:
        assert_close("weights", got.weights, want.weights, 1e-5)
        assert torch.equal(got.tiles, want.tiles)


def test_without_mask_and_guide_they_are_the_pixels_of_draw_pixels() -> None:
    numbers, n_images = torch.arange(N_PIXELS), WIDTHS.shape[0]
    colours = torch.stack([numbers % 256, numbers // 256, 0 * numbers], -1).to(torch.uint8)  # each its own number
    pool = PixelPool(colours, OFFSETS, WIDTHS, torch.eye(3, 4).repeat(n_images, 1, 1), torch.ones(n_images, 4))
    rgb = (draw_pixels(pool, 500, seed=3, step=7).rgba * 255.0).round().long()
    assert torch.equal(choose(500).indices, rgb[:, 0] + 256 * rgb[:, 1])


def test_a_draw_is_scaled_by_all_of_its_48_bits() -> None:
    words = torch.randint(0, 1 << BITS, (4096, 2), generator=generator(3))
    words[0], words[1] = (1 << BITS) - 1, 0
    for n in (1, 3, 12_345, 1 << 20, (1 << 30) + 7):
        expected = [((high << BITS) + low) * n >> 2 * BITS for high, low in words.tolist()]
        assert scale(words, n).tolist() == scale(words, torch.tensor(n)).tolist() == expected


def test_masked_draws_are_uniform_over_what_is_left() -> None:
    chosen, draws = flags(), 200_000
    pixels = choose(draws, mask=make_mask()).indices
    counts = torch.bincount(pixels, minlength=N_PIXELS).double()
    assert (counts[~chosen] == 0).all()
    expected, freedom = draws / int(chosen.sum()), int(chosen.sum()) - 1
    chi_squared = float(((counts[chosen] - expected) ** 2 / expected).sum())
    assert abs(chi_squared - freedom) < 5.0 * (2.0 * freedom) ** 0.5


@pytest.mark.parametrize("masked", [False, True])
def test_weighted_means_are_unbiased_however_the_tiles_are_drawn(masked: bool) -> None:
    mask = make_mask() if masked else None
    guide = make_guide(mask=mask)
    ends = torch.diff(guide.ends, prepend=guide.ends.new_zeros(1)).clamp_min(1).cumsum(0)  # no tile is left out
    guide = PixelGuide(ends, guide.first_tiles, TILE, guide.n_drawable)
    values = torch.rand(N_PIXELS, generator=generator(8)).double() ** 4
    draws = 400_000
    drawn = choose(draws, mask=mask, guide=guide)
    assert drawn.weights is not None
    terms = values[drawn.indices] * drawn.weights.double()
    truth = values[flags()].mean() if masked else values.mean()
    assert abs(terms.mean() - truth) < 5.0 * terms.std() / draws**0.5
    assert abs(drawn.weights.double().mean() - 1.0) < 5.0 * drawn.weights.double().std() / draws**0.5
    if masked:
        assert torch.equal(drawn.weights > 0.0, flags()[drawn.indices])


def test_tiles_are_drawn_by_their_share_and_hold_their_pixels() -> None:
    guide, draws = make_guide(), 200_000
    drawn = choose(draws, guide=guide)
    assert drawn.tiles is not None
    shares = torch.diff(guide.ends, prepend=guide.ends.new_zeros(1)).double()
    counts = torch.bincount(drawn.tiles, minlength=shares.shape[0]).double()
    expected = shares / shares.sum() * draws
    assert counts[3] == 0
    kept = expected > 0
    chi_squared = float(((counts - expected) ** 2 / expected.clamp_min(1e-9))[kept].sum())
    assert abs(chi_squared - int(kept.sum())) < 6.0 * (2.0 * int(kept.sum())) ** 0.5
    image = torch.searchsorted(OFFSETS, drawn.indices, right=True) - 1
    local = drawn.indices - OFFSETS[image]
    row, column = local // WIDTHS[image] // TILE, local % WIDTHS[image] // TILE
    assert torch.equal(drawn.tiles, guide.first_tiles[image] + row * ((WIDTHS[image] + TILE - 1) // TILE) + column)


def test_ranks_draw_slices_of_one_batch() -> None:
    mask = make_mask()
    parts = [choose_pixels(OFFSETS, WIDTHS, 5, mask=mask, seed=3, step=7, first=first).indices for first in (0, 5)]
    assert torch.equal(choose(10, mask=mask).indices, torch.cat(parts))


def test_words_hold_the_flags() -> None:
    chosen = flags()
    words = pack_words(chosen)
    assert int(count_bits(words).sum()) == int(chosen.sum()) and words.shape[0] == -(-N_PIXELS // 64)
    assert count_bits(torch.tensor([-1, 0, 1, -(1 << 63)])).tolist() == [64, 0, 1, 1]
    for first, last in ((0, N_PIXELS), (63, 65), (100, 100), (64, 128), (301, 777)):
        assert torch.equal(unpack_words(words, first, last), chosen[first:last])


def test_bad_input_is_named() -> None:
    with pytest.raises(InputError, match="at least one pixel"):
        PixelMask.of_words(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(InputError, match="n_rays"):
        choose(-1)
    with pytest.raises(InputError, match="tile"):
        PixelGuide(torch.ones(1, dtype=torch.int64), torch.tensor([0, 1]), 0, 1)


@pytest.mark.gpu
def test_draws_inside_a_cuda_graph() -> None:
    mask = make_mask("cuda")
    guide = make_guide("cuda", mask)
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    arguments = (OFFSETS.cuda(), WIDTHS.cuda(), 64)
    choose_pixels(*arguments, mask=mask, guide=guide, seed=3, step=step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = choose_pixels(*arguments, mask=mask, guide=guide, seed=3, step=step)
    step.fill_(7)
    graph.replay()
    expected = choose(64, mask=make_mask(), guide=make_guide(mask=make_mask()))
    assert torch.equal(drawn.indices.cpu(), expected.indices)
