"""The original NeRF: a deep network over frequency-encoded positions and directions."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import FieldConfig
from ..ops.mlp import wide_mlp
from ..ops.positions import Contraction, unit_positions
from ..types import Aabb
from .encodings import frequency_encode
from .mlp import draw_uniform

POSITION_FREQUENCIES = 10
DIRECTION_FREQUENCIES = 4
PIECES, SMALLEST_PIECE = 8, 2048  # of a batch that is computed again in the backward
LARGEST_PIECE = 1 << 15  # points, where a piece is all that memory has to hold: enough to keep a GPU busy


class VanillaNeRF(nn.Module):
    """`depth` layers of `width` with the input fed in again half-way, a density head, and one colour layer.

    Positions are scaled so that the box becomes [-1, 1]^3. Density is softplus(h - 1), which starts non-empty.
    A trainer sets `compute_dtype` for mixed precision: the layers then multiply in it, and everything else stays fp32.

    >>> field = VanillaNeRF(Aabb.cube(1.0), FieldConfig(kind="vanilla", width=16, depth=4))
    >>> rgb, density = field(torch.zeros(5, 3), torch.tensor([[0.0, 0.0, 1.0]]).repeat(5, 1))
    >>> rgb.shape, density.shape
    (torch.Size([5, 3]), torch.Size([5]))
    """

    compute_dtype: torch.dtype | None = None
    contraction: Contraction = "none"  # of the space outside the box

    def __init__(self, aabb: Aabb, config: FieldConfig | None = None, *, seed: int = 0, n_more: int = 0) -> None:
        """`n_more`: inputs beside the encoded position, for fields made of this one; they override `_encode`."""
        super().__init__()
        config = config or FieldConfig(kind="vanilla", width=256, depth=8)
        self.aabb, self.config = aabb, config
        n_position = 3 * (2 * POSITION_FREQUENCIES + 1) + n_more
        n_direction = 3 * (2 * DIRECTION_FREQUENCIES + 1)
        width = config.width
        self.skip = config.depth // 2 if config.depth > 4 else -1
        inputs = [n_position] + [width] * (config.depth - 1)
        if self.skip > 0:
            inputs[self.skip] += n_position
        self.trunk = nn.ModuleList(nn.Linear(n, width) for n in inputs)
        self.density_head = nn.Linear(width, 1)
        self.feature_head = nn.Linear(width, width)
        self.color_hidden = nn.Linear(width + n_direction, width // 2)
        self.color_head = nn.Linear(width // 2, 3)
        self._initialise(torch.Generator().manual_seed(seed))

    @property
    def bytes_per_sample(self) -> int:
        """Of rendering, an estimate: a layer's inputs and outputs with the skip, and the encoded position in fp32."""
        return 768 + 5 * self.config.width * (4 if self.compute_dtype is None else 2)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                bound = (6.0 / (module.in_features + module.out_features)) ** 0.5
                module.weight.copy_(draw_uniform(*module.weight.shape, bound=bound, generator=generator))
                module.bias.zero_()

    def _place(self, positions: Tensor) -> Tensor:
        """(n, 3) in [-1, 1]^3."""
        return unit_positions(positions, self.aabb, self.contraction) * 2.0 - 1.0

    def _encode(self, positions: Tensor, times: Tensor | None) -> Tensor:
        return frequency_encode(self._place(positions), POSITION_FREQUENCIES)

    def _trunk(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        skip = self.skip if self.skip > 0 else None
        layers = [layer for layer in self.trunk if isinstance(layer, nn.Linear)]
        return self._layers(self._encode(positions, times), layers, skip=skip, relu_last=True)

    def _layers(
        self, inputs: Tensor, layers: list[nn.Linear], *, skip: int | None = None, relu_last: bool = False
    ) -> Tensor:
        inputs = inputs if self.compute_dtype is None else inputs.to(self.compute_dtype)
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        return wide_mlp(inputs, weights, biases, skip=skip, relu_last=relu_last)

    def _density(self, hidden: Tensor) -> Tensor:
        logits = self._layers(hidden, [self.density_head])[:, 0]
        return torch.nn.functional.softplus((logits if logits.dtype == torch.float64 else logits.float()) - 1.0)

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled():
            return self._density(self._trunk(positions, times))
        # The grid asks for hundreds of thousands of points at once: their layers would outweigh a training step's.
        pieces = _pieces(-(-positions.shape[0] // LARGEST_PIECE), positions, times)
        return torch.cat([self._density(self._trunk(*piece)) for piece in pieces])

    def forward(
        self,
        positions: Tensor,
        directions: Tensor,
        times: Tensor | None = None,
        camera_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if not self.config.checkpointing or not torch.is_grad_enabled():
            return self._evaluate(positions, directions, times)
        # Piece by piece, keeping the inputs alone: the backward computes a piece once more, and only one at a time.
        n = positions.shape[0]
        pieces = _pieces(max(-(-n // LARGEST_PIECE), min(PIECES, n // SMALLEST_PIECE)), positions, directions, times)
        done = [checkpoint(self._evaluate, *p, use_reentrant=False, preserve_rng_state=False) for p in pieces]
        rgb, density = zip(*done, strict=True)
        return torch.cat(rgb), torch.cat(density)

    def _evaluate(self, positions: Tensor, directions: Tensor, times: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = self._trunk(positions, times)
        logits = self._color_logits(hidden, directions)
        return torch.sigmoid(logits if logits.dtype == torch.float64 else logits.float()), self._density(hidden)

    def _color_logits(self, hidden: Tensor, directions: Tensor) -> Tensor:
        features = self._layers(hidden, [self.feature_head])
        encoded = frequency_encode(directions, DIRECTION_FREQUENCIES).to(features.dtype)
        return self._layers(torch.cat([features, encoded], dim=-1), [self.color_hidden, self.color_head])

    def for_export(self) -> nn.Module:
        """A copy in fp32 on the CPU that computes the same: for tracing."""
        twin = copy.deepcopy(self).float().cpu()
        twin.compute_dtype = None
        return twin


def _pieces(n_pieces: int, *tensors: Tensor | None) -> list[tuple[Any, ...]]:
    """All tensors cut into as many pieces (at least one), which go together; None stays None."""
    n_pieces = max(1, n_pieces)
    return list(zip(*([None] * n_pieces if t is None else t.tensor_split(n_pieces) for t in tensors), strict=True))
