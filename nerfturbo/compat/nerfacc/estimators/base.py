"""What the estimators share. Those over foreign libraries exist by name only, and say what to use instead."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ....errors import BackendError


class AbstractEstimator(nn.Module):
    """Places samples along rays and learns from the field while it trains."""

    _dummy: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_dummy", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        return self._dummy.device

    def sampling(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def update_every_n_steps(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


class VDBEstimator(AbstractEstimator):
    """Raises when made: there are no fVDB grids here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        traverse_vdbs()


class N3TreeEstimator(AbstractEstimator):
    """Raises when made: there are no octrees here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise BackendError("nerfturbo does not read svox trees: OccGridEstimator with levels covers the same space")


def traverse_vdbs(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises: there are no fVDB grids here."""
    hint = "OccGridEstimator with the same box and resolution gives the same samples"
    raise BackendError(f"nerfturbo does not read fVDB grids: {hint}")
