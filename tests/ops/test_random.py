"""Counter-based random numbers: known answers, the same bits everywhere, no overlap between streams."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.errors import InputError
from nerfturbo.ops import Stream, random_bits, random_uniform, use_backend

from .cases import Target, require

# Known-answer vectors published with Philox-4x32-10: (counter, key, result).
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >= 1 << (bits - 1) else value


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter, key, result):
    first = _signed(counter[0] | counter[1] << 32, 64)
    got = random_bits(
        1, columns=4, seed=key[0] | key[1] << 32, stream=counter[3], step=counter[2], first=first, device="cpu"
    )
    assert got.tolist() == [[_signed(word, 32) for word in result]]


@pytest.mark.parametrize("columns", [1, 2, 3, 4])
def test_same_bits_as_reference(sized: tuple[Target, int], columns: int):
    target, n = sized
    require(target)
    for draw in (random_bits, random_uniform):
        for seed, first, step in ((0, 0, 0), (2**63 + 12345, 2**32 - 5, 2**31 + 7), (-1, 2**40, 2**32 + 3)):
            results = []
            for backend in (target.backend, "reference"):
                with use_backend(backend):
                    results.append(
                        draw(n, columns=columns, seed=seed, stream=1024, step=step, first=first, device=target.device)
                    )
            assert results[0].dtype == results[1].dtype
            assert torch.equal(*results), f"{draw.__name__} with seed {seed}"


def test_step_as_tensor_draws_the_same(target: Target):
    require(target)
    with use_backend(target.backend):
        step = torch.tensor(12345, dtype=torch.int64, device=target.device)
        a = random_uniform(50, columns=3, seed=3, stream=Stream.JITTER, step=step, device=target.device)
        b = random_uniform(50, columns=3, seed=3, stream=Stream.JITTER, step=12345, device=target.device)
    assert torch.equal(a, b)


def test_zero_numbers(target: Target):
    require(target)
    with use_backend(target.backend):
        got = random_uniform(0, columns=2, seed=3, stream=0, step=0, device=target.device)
    assert got.shape == (0, 2)


def test_parts_equal_the_whole():
    whole = random_bits(100, seed=5, stream=2, step=9, device="cpu")
    parts = [random_bits(40, seed=5, stream=2, step=9, first=first, device="cpu") for first in (0, 40, 80)]
    assert torch.equal(torch.cat(parts)[:100], whole)


def test_streams_steps_and_seeds_are_independent():
    base = {"seed": 1, "stream": 0, "step": 0}
    draws = [random_uniform(4000, **(base | change), device="cpu").flatten() for change in (
        {}, {"seed": 2}, {"stream": 1}, {"step": 1}, {"seed": 1 + 2**32}
    )]  # fmt: skip
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(len(draws))
    assert correlation.abs().max() < 0.06


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_numbers_past_their_words_wrap(backend: str):
    """Step and stream are words of 32 bits, the seed is one of 64."""
    with use_backend(backend):
        options = {"seed": 5, "stream": 7, "step": 9}
        expected = random_bits(3, columns=4, device="cpu", **options)
        for name, bits in (("seed", 64), ("stream", 32), ("step", 32)):
            for turns in (1, -1):
                turned = options | {name: options[name] + turns * (1 << bits)}
                assert torch.equal(random_bits(3, columns=4, device="cpu", **turned), expected), name
        minus_one = random_uniform(1, seed=-1, stream=-1, step=-1, first=-1, columns=4, device="cpu")
        known = torch.tensor([[word >> 8 for word in KNOWN[1][2]]]) * 2.0**-24
        assert torch.equal(minus_one, known)


def test_uniform_is_uniform():
    draws = random_uniform(100_000, columns=4, seed=11, stream=0, step=0, device="cpu").flatten()
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts = torch.histc(draws, bins=64, min=0.0, max=1.0)
    expected = draws.numel() / 64
    assert ((counts - expected) ** 2 / expected).sum() < 110.0  # chi-squared, 63 degrees of freedom: about 2e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [({"columns": 5}, "columns"), ({"n": -1}, "n: expected"), ({"step": torch.zeros(2, dtype=torch.int64)}, "step")],
)
def test_errors_name_the_argument(change, message):
    arguments = {"n": 3, "columns": 1, "seed": 0, "stream": 0, "step": 0, "device": "cpu"} | change
    with pytest.raises(InputError, match=message):
        random_bits(arguments.pop("n"), **arguments)
