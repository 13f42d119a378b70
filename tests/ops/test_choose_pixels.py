"""Pixel choice: the same on every backend, and only what the mask leaves."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.errors import InputError
from nerfturbo.ops import use_backend
from nerfturbo.ops.pixels import (
    PixelMask,
    PixelPool,
    choose_pixels,
    count_bits,
    draw_pixels,
    pack_words,
    unpack_words,
)
from nerfturbo.ops.pixels.reference import BITS, scale

from .cases import Target, generator, require

SIZES = [(25, 9), (5, 31), (40, 16)]  # width, height; some one more than whole tiles
OFFSETS = torch.tensor([0, *[w * h for w, h in SIZES]]).cumsum(0)
WIDTHS = torch.tensor([w for w, _ in SIZES])
N_PIXELS = int(OFFSETS[-1])


def flags(seed: int = 0, share: float = 0.4) -> torch.Tensor:
    chosen = torch.rand(N_PIXELS, generator=generator(seed)) < share
    chosen[200:420] = False  # whole words without a pixel
    return chosen


def make_mask(device: str = "cpu") -> PixelMask:
    return PixelMask.of_words(pack_words(flags())).to(device)


def choose(n: int, **options: object) -> torch.Tensor:
    return choose_pixels(OFFSETS, n, seed=3, step=7, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("on_device", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("kind", ["uniform", "masked"])
def test_matches_reference(sized: tuple[Target, int], kind: str, on_device: bool, poisoned_empty: None) -> None:
    target, n = sized
    require(target)
    mask = make_mask(target.device) if kind == "masked" else None
    step = torch.tensor(9, device=target.device) if on_device else 9
    offsets, results = OFFSETS.to(target.device), []
    for backend in (target.backend, "reference"):
        with use_backend(backend):  # type: ignore[arg-type]
            results.append(choose_pixels(offsets, n, mask=mask, seed=(5 << 33) + 1, step=step, first=11))
    assert torch.equal(*results)


def test_without_mask_they_are_the_pixels_of_draw_pixels() -> None:
    numbers, n_images = torch.arange(N_PIXELS), WIDTHS.shape[0]
    colours = torch.stack([numbers % 256, numbers // 256, 0 * numbers], -1).to(torch.uint8)  # each its own number
    pool = PixelPool(colours, OFFSETS, WIDTHS, torch.eye(3, 4).repeat(n_images, 1, 1), torch.ones(n_images, 4))
    rgb = (draw_pixels(pool, 500, seed=3, step=7).rgba * 255.0).round().long()
    assert torch.equal(choose(500), rgb[:, 0] + 256 * rgb[:, 1])


def test_a_draw_is_scaled_by_all_of_its_48_bits() -> None:
    words = torch.randint(0, 1 << BITS, (4096, 2), generator=generator(3))
    words[0], words[1] = (1 << BITS) - 1, 0
    for n in (1, 3, 12_345, 1 << 20, (1 << 30) + 7):
        expected = [((high << BITS) + low) * n >> 2 * BITS for high, low in words.tolist()]
        assert scale(words, n).tolist() == scale(words, torch.tensor(n)).tolist() == expected


def test_masked_draws_are_uniform_over_what_is_left() -> None:
    chosen, draws = flags(), 200_000
    pixels = choose(draws, mask=make_mask())
    counts = torch.bincount(pixels, minlength=N_PIXELS).double()
    assert (counts[~chosen] == 0).all()
    expected, freedom = draws / int(chosen.sum()), int(chosen.sum()) - 1
    chi_squared = float(((counts[chosen] - expected) ** 2 / expected).sum())
    assert abs(chi_squared - freedom) < 5.0 * (2.0 * freedom) ** 0.5


def test_ranks_draw_slices_of_one_batch() -> None:
    mask = make_mask()
    parts = [choose_pixels(OFFSETS, 5, mask=mask, seed=3, step=7, first=first) for first in (0, 5)]
    assert torch.equal(choose(10, mask=mask), torch.cat(parts))


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


@pytest.mark.gpu
def test_draws_inside_a_cuda_graph() -> None:
    mask = make_mask("cuda")
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    offsets = OFFSETS.cuda()
    choose_pixels(offsets, 64, mask=mask, seed=3, step=step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = choose_pixels(offsets, 64, mask=mask, seed=3, step=step)
    step.fill_(7)
    graph.replay()
    assert torch.equal(drawn.cpu(), choose(64, mask=make_mask()))
