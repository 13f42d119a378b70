"""Small networks without biases, run by the fused op."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from ..ops import GradientSink
from ..ops.mlp import fused_mlp


def draw_uniform(*shape: int, bound: float, generator: torch.Generator | None) -> Tensor:
    """Random numbers in [-bound, bound], drawn where the generator is, and put where a device context asks for them."""
    target = torch.empty(0).device
    drawn = torch.empty(shape, device=target if generator is None else generator.device)
    return drawn.uniform_(-bound, bound, generator=generator).to(target)


class FusedMlp(nn.Module):
    """inputs -> width (x depth hidden layers, ReLU) -> outputs, without biases.

    Where a trainer sets `sink`, it takes the weights' gradients.
    """

    sink: GradientSink | None = None

    def __init__(
        self, inputs: int, outputs: int, *, width: int, depth: int, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        sizes = [inputs, *[width] * depth, outputs]
        self.weights = nn.ParameterList()
        for fan_in, fan_out in itertools.pairwise(sizes):
            bound = math.sqrt(6.0 / (fan_in + fan_out))
            self.weights.append(nn.Parameter(draw_uniform(fan_out, fan_in, bound=bound, generator=generator)))

    @property
    def matrices(self) -> list[Tensor]:
        """The weights, without what reading each out of a list of parameters costs."""
        own = self.weights._parameters
        return list(own.values()) if len(own) == len(self.weights) else list(self.weights)  # type: ignore[arg-type]

    def forward(self, inputs: Tensor, n_used: Tensor | None = None) -> Tensor:
        return fused_mlp(inputs, self.matrices, sink=self.sink, n_used=n_used)
