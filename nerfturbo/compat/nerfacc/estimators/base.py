"""What the estimators share. Those over foreign libraries exist by name only, and say what to use instead."""

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

    update_every_n_steps = sampling


def traverse_vdbs(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises: there are no fVDB grids and no svox trees here."""
    hint = "OccGridEstimator, with levels for a large box, covers the same space"
    raise BackendError(f"nerfturbo reads neither fVDB grids nor svox trees: {hint}")


class VDBEstimator(AbstractEstimator):
    """Raises when made: there are no fVDB grids here."""

    __init__ = traverse_vdbs


class N3TreeEstimator(AbstractEstimator):
    """Raises when made: there are no svox trees here."""

    __init__ = traverse_vdbs
