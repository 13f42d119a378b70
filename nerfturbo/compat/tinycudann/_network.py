"""The small networks: matrices without biases, padded to tiny-cuda-nn's widths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ...errors import InputError
from ...ops import fused_mlp
from ._encodings import Config

FUSED_LAYERS, FUSED_WIDTH = 4, 128  # what the fused kernels take

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "leakyrelu": lambda x: functional.leaky_relu(x, 0.01),
    "exponential": torch.exp,
    "sine": torch.sin,
    "sigmoid": torch.sigmoid,
    "squareplus": lambda x: 0.5 * (x + torch.sqrt(x * x + 4.0)),
    "softplus": functional.softplus,
    "tanh": torch.tanh,
}


class Mlp:
    """inputs -> n_neurons (n_hidden_layers times) -> outputs."""

    def __init__(self, config: Config, n_inputs: int, n_outputs: int) -> None:
        kind = config.kind("MLP")
        fused = kind in ("fullyfusedmlp", "megakernelmlp")
        if not fused and kind not in ("cutlassmlp", "mlp"):
            raise InputError(f"{config.where}.otype", "FullyFusedMLP or CutlassMLP", repr(config.values.get("otype")))
        if config.values.get("feedback_alignment", False):
            raise InputError(f"{config.where}.feedback_alignment", "false", "true", "gradients here are exact")
        width, depth = config.integer("n_neurons", 128), config.integer("n_hidden_layers", 5, 0)
        if fused and width not in (16, 32, 64, 128):
            raise InputError(f"{config.where}.n_neurons", "16, 32, 64 or 128", str(width), "use CutlassMLP")
        if depth == 0 and fused:
            raise InputError(f"{config.where}.n_hidden_layers", "at least 1", "0", "use CutlassMLP")
        self.activation = config.choice("activation", "ReLU", ACTIVATIONS)
        self.output_activation = config.choice("output_activation", "None", ACTIVATIONS)
        self.alignment = 16 if fused else 8
        self.n_inputs, self.n_outputs = n_inputs, n_outputs
        self.padded_inputs, self.padded_outputs = self._padded(n_inputs), self._padded(n_outputs)
        sizes = [self.padded_inputs, *[width] * depth, self.padded_outputs]
        self.shapes = [(rows, columns) for columns, rows in itertools.pairwise(sizes)]
        self.n_params = sum(rows * columns for rows, columns in self.shapes)
        small = len(self.shapes) <= FUSED_LAYERS and max(sizes) <= FUSED_WIDTH
        self.in_one_kernel = small and self.activation == "relu" and depth > 0

    def _padded(self, width: int) -> int:
        return -(-width // self.alignment) * self.alignment

    def initial(self, generator: torch.Generator) -> Tensor:
        parts = []
        for rows, columns in self.shapes:
            bound = math.sqrt(6.0 / (rows + columns))
            parts.append(torch.empty(rows * columns).uniform_(-bound, bound, generator=generator))
        return torch.cat(parts)

    def __call__(self, x: Tensor, params: Tensor, pad_value: float) -> Tensor:
        """(n, outputs). Columns that pad the inputs hold `pad_value`; where it is 0 they need not exist."""
        own = params.split([rows * columns for rows, columns in self.shapes])
        weights = [part.view(shape) for part, shape in zip(own, self.shapes, strict=True)]
        missing = self.padded_inputs - x.shape[1]
        if missing and pad_value != 0.0:
            x = functional.pad(x, (0, missing), value=pad_value)
        elif missing:
            weights[0] = weights[0][:, : x.shape[1]]
        weights[-1] = weights[-1][: self.n_outputs]
        if self.in_one_kernel:
            result = fused_mlp(x, weights)
        else:
            result = x
            for index, weight in enumerate(weights):
                result = functional.linear(result, weight.to(result.dtype))
                if index + 1 < len(weights):
                    result = ACTIVATIONS[self.activation](result)
        return ACTIVATIONS[self.output_activation](result)
