"""The names of nerfacc's sparse-voxel estimator, which needs a compiled library that is not used here."""

from __future__ import annotations

from typing import Any, NoReturn

from ....errors import BackendError
from .base import AbstractEstimator

fVDB_ENABLED = False


def _unavailable(name: str) -> NoReturn:
    raise BackendError(
        f"{name} marches through fVDB grids, which nerfturbo does not read; "
        "OccGridEstimator with the same box and resolution gives the same samples"
    )


def traverse_vdbs(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises: there are no fVDB grids here."""
    _unavailable("traverse_vdbs")


class VDBEstimator(AbstractEstimator):
    """Raises when made: there are no fVDB grids here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _unavailable("VDBEstimator")
