"""What the estimators share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


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
