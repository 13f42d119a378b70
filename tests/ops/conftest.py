"""Every op test runs on each backend that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .cases import SIZED, TARGETS, Target


@pytest.fixture(params=TARGETS, ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    return request.param


@pytest.fixture(params=SIZED, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def sized(request: pytest.FixtureRequest) -> tuple[Target, int]:
    """A target and a size: 1, an odd one, one that is no power of two."""
    return request.param


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)
