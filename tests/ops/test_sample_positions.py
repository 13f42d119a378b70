"""Sample positions: midpoints on their rays, in world or box coordinates, with gradients to the rays."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.errors import InputError
from nerfturbo.ops import use_backend
from nerfturbo.ops.positions import sample_positions
from nerfturbo.types import Aabb, PackedSamples

from .cases import Target, assert_close, compare, generator, require

BOX = Aabb((-1.0, -2.0, -1.5), (1.0, 2.0, 1.0))


def make_samples(n_rays: int, device: str, tail: int = 5) -> PackedSamples:
    draw = generator(3)
    counts = torch.randint(0, 6, (n_rays,), generator=draw)
    n = int(counts.sum())
    starts = torch.rand(n, generator=draw) * 4.0
    tight = PackedSamples.from_counts(counts, starts, starts + 0.1)
    pad = torch.zeros(tail)
    return PackedSamples(
        torch.cat([tight.t_starts, pad]).to(device),
        torch.cat([tight.t_ends, pad]).to(device),
        torch.cat([tight.ray_indices, pad.int()]).to(device),
        tight.offsets.to(device),
    )


@pytest.mark.parametrize("aabb", [None, BOX], ids=["world", "box"])
def test_matches_reference(sized: tuple[Target, int], aabb: Aabb | None, poisoned_empty: None):
    target, n = sized
    require(target)
    samples = make_samples(n, target.device)
    inputs = {
        "origins": torch.randn(n, 3, generator=generator(1)),
        "directions": torch.randn(n, 3, generator=generator(2)),
    }

    def positions(origins: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
        # The tail's rows are ray 0's origin; no op sends a gradient there.
        return sample_positions(origins, directions, samples, aabb=aabb) * samples.used[:, None]

    compare(target, positions, inputs, ["origins", "directions"])


@pytest.mark.parametrize("contraction", ["sphere", "cube"])
@pytest.mark.parametrize("differentiable", [False, True])
def test_contracts_as_the_reference(target: Target, contraction: str, differentiable: bool):
    require(target)
    samples = make_samples(63, target.device)
    inputs = {name: torch.randn(63, 3, generator=generator(i)) for i, name in enumerate(("origins", "directions"))}

    def positions(origins: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
        options = {"aabb": BOX, "contraction": contraction}
        return sample_positions(origins, directions, samples, **options) * samples.used[:, None]

    compare(target, positions, inputs, ["origins", "directions"] if differentiable else [])
    with pytest.raises(InputError, match="aabb"):
        sample_positions(inputs["origins"], inputs["directions"], make_samples(63, "cpu"), contraction="cube")


def test_gradcheck():
    samples = make_samples(4, "cpu")
    origins, directions = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda o, d: sample_positions(o, d, samples, aabb=BOX), (origins, directions))


def test_box_corners_map_to_unit_cube(target: Target):
    require(target)
    samples = PackedSamples.from_counts(torch.ones(2, dtype=torch.int64), torch.zeros(2), torch.zeros(2))
    samples = PackedSamples(
        *(t.to(target.device) for t in (samples.t_starts, samples.t_ends, samples.ray_indices, samples.offsets))
    )
    corners = torch.tensor([BOX.low, BOX.high], device=target.device)
    with use_backend(target.backend):  # type: ignore[arg-type]
        unit = sample_positions(corners, torch.ones_like(corners), samples, aabb=BOX)
    assert_close("corners", unit, torch.tensor([[0.0] * 3, [1.0] * 3], device=target.device))


def test_no_rays(target: Target):
    require(target)
    samples = PackedSamples(
        torch.zeros(5), torch.zeros(5), torch.zeros(5, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    )
    samples = PackedSamples(
        *(t.to(target.device) for t in (samples.t_starts, samples.t_ends, samples.ray_indices, samples.offsets))
    )
    empty = torch.zeros(0, 3, device=target.device)
    for backend in (target.backend, "reference"):
        with use_backend(backend):  # type: ignore[arg-type]
            assert torch.equal(sample_positions(empty, empty, samples), torch.zeros(5, 3, device=target.device))


def test_wrong_number_of_rays_is_named():
    with pytest.raises(InputError, match="origins: expected shape"):
        sample_positions(torch.zeros(3, 3), torch.zeros(3, 3), make_samples(4, "cpu"))
