"""The name of nerfacc's octree estimator, which needs a compiled library that is not used here."""

from __future__ import annotations

from typing import Any

from ....errors import BackendError
from .base import AbstractEstimator


class N3TreeEstimator(AbstractEstimator):
    """Raises when made: there are no octrees here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise BackendError(
            "N3TreeEstimator marches through svox trees, which nerfturbo does not read; "
            "OccGridEstimator with levels covers the same space"
        )
