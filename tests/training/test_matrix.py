"""Preset x {fp32, mixed} x {native, Lightning} x {1, 2 ranks}, with fields that change their shapes in mid-run.

Ranks start once for all cells. Each cell is a test of its own, so that a failure says which.
"""

from __future__ import annotations

import logging
import math

import pytest
import torch

pytest.importorskip("lightning.pytorch", reason="the matrix crosses both trainers")

from .matrix import RESUMED, STEPS, Outcome, names, run_matrix
from .workers import alone, together

pytestmark = pytest.mark.filterwarnings("ignore")
CELLS = [
    (name, precision, trainer)
    for name in names()
    for precision in ("fp32", "mixed")
    for trainer in ("native", "lightning")
]
Found = dict[tuple[str, str, str], Outcome | str]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Found:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks do: torch's scattered sums on several threads have no order
    try:
        return alone(run_matrix, tmp_path_factory.mktemp("one"))
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    return together(2, run_matrix, tmp_path_factory.mktemp("two"))


def outcome(found: Found, cell: tuple[str, str, str]) -> Outcome:
    result = found[cell]
    assert isinstance(result, Outcome), result
    return result


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_every_cell_trains(one: Found, two: list[Found], cell: tuple[str, str, str]) -> None:
    single, (first, second) = outcome(one, cell), (outcome(found, cell) for found in two)
    for result in (single, first, second):
        assert len(result.losses) == STEPS and all(map(math.isfinite, result.losses))
        assert all(bool(torch.isfinite(v).all()) for v in result.state.values() if v.is_floating_point())
        assert result.stage in (None, 1)  # what changes its shapes has done so
    assert first.losses == second.losses
    for name, value in first.state.items():
        assert torch.equal(value, second.state[name]), f"the ranks part ways: {name}"
    if cell[1] == "fp32":  # two ranks are one process with twice the rays, before and after the shapes change
        assert first.losses == pytest.approx(single.losses, rel=2e-3)
        assert {n: v.shape for n, v in first.state.items()} == {n: v.shape for n, v in single.state.items()}


def test_ranks_take_the_shapes_of_the_one_that_read_a_checkpoint(one: Found, two: list[Found]) -> None:
    for found in (one, *two):
        resumed, whole = outcome(found, RESUMED), outcome(found, ("voxels", "fp32", "native"))
        assert resumed.stage == 1 and resumed.losses == whole.losses[-1:]
        for name, value in whole.state.items():
            assert torch.equal(resumed.state[name], value), name


@pytest.mark.parametrize("name", names())
def test_lightning_is_the_native_trainer(one: Found, name: str) -> None:
    native, lightning = (outcome(one, (name, "fp32", trainer)) for trainer in ("native", "lightning"))
    assert lightning.losses == pytest.approx(native.losses, rel=1e-3)
