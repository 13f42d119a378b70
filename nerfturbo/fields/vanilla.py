"""The original NeRF: a deep network over frequency-encoded positions and directions. For dynamic scenes with time as
one more input (T-NeRF), or with a deformation before it (D-NeRF)."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..config import VanillaConfig
from ..ops.mlp import wide_mlp
from ..ops.positions import Contraction, unit_positions
from ..types import Aabb
from .field import Buffers
from .parts import LARGEST_PIECE, cut, draw_uniform, frequency_encode, recomputed, widen

POSITION_FREQUENCIES = 10
DIRECTION_FREQUENCIES = 4
TIME_FREQUENCIES = 6
STARTING = 10.0  # a deformation has its full strength from time 1 / this on
SMALL = 1e-3  # weights that give the first displacements
DEFORM_FREQUENCIES = 4  # of position: finer sines let neighbours part, and training does not hold


class VanillaNeRF(nn.Module):
    """`depth` layers of `width` with the input fed in again half-way, a density head, and one colour layer. Positions
    are scaled so that the box becomes [-1, 1]^3. Density is softplus(h - 1), which starts non-empty. In mixed precision
    the layers multiply in `compute_dtype`, and everything else stays fp32.

    >>> field = VanillaNeRF(Aabb.cube(1.0), VanillaConfig(width=16, depth=4))
    >>> rgb, density = field(torch.zeros(5, 3), torch.tensor([[0.0, 0.0, 1.0]]).repeat(5, 1))
    >>> rgb.shape, density.shape
    (torch.Size([5, 3]), torch.Size([5]))
    """

    captures_ahead = True
    checkpointing = False
    compute_dtype: torch.dtype | None = None
    contraction: Contraction = "none"  # of the space outside the box

    def __init__(self, aabb: Aabb, config: VanillaConfig | None = None, *, seed: int = 0, n_more: int = 0) -> None:
        """`n_more`: inputs beside the encoded position, for fields made of this one; they override `_encode`."""
        super().__init__()
        config = config or VanillaConfig()
        self.aabb, self.config = aabb, config
        n_position = 3 * (2 * POSITION_FREQUENCIES + 1) + n_more
        n_direction = 3 * (2 * DIRECTION_FREQUENCIES + 1)
        width = config.width
        self.skip = config.depth // 2 if config.depth > 4 else None
        self.trunk = self._make_trunk(n_position)
        self.density_head = nn.Linear(width, 1)
        self.feature_head = nn.Linear(width, width)
        self.color_hidden = nn.Linear(width + n_direction, width // 2)
        self.color_head = nn.Linear(width // 2, 3)
        self._initialise(torch.Generator().manual_seed(seed))

    def connect(self, buffers: Buffers) -> None:
        self.compute_dtype = buffers.dtype

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

    def _make_trunk(self, n_inputs: int) -> nn.ModuleList:
        widths = [n_inputs] + [self.config.width] * (self.config.depth - 1)
        if self.skip is not None:
            widths[self.skip] += n_inputs
        return nn.ModuleList(nn.Linear(n, self.config.width) for n in widths)

    def _place(self, positions: Tensor) -> Tensor:
        """(n, 3) in [-1, 1]^3."""
        return unit_positions(positions, self.aabb, self.contraction) * 2.0 - 1.0

    def _encode(self, positions: Tensor, times: Tensor | None) -> Tensor:
        return frequency_encode(self._place(positions), POSITION_FREQUENCIES)

    def _trunk(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        return self._layers(self._encode(positions, times), self.trunk, trunk=True)

    def _layers(self, inputs: Tensor, layers: Iterable[nn.Module], *, trunk: bool = False) -> Tensor:
        """One layer after the other; a `trunk` has the skip, and a ReLU at its end."""
        inputs = inputs if self.compute_dtype is None else inputs.to(self.compute_dtype)
        linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        weights, biases = [layer.weight for layer in linear], [layer.bias for layer in linear]
        return wide_mlp(inputs, weights, biases, skip=self.skip if trunk else None, relu_last=trunk)

    def _density(self, hidden: Tensor) -> Tensor:
        logits = self._layers(hidden, [self.density_head])[:, 0]
        return torch.nn.functional.softplus(widen(logits) - 1.0)

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled():
            return self._density(self._trunk(positions, times))
        # The grid asks for hundreds of thousands of points at once: their layers would outweigh a training step's.
        pieces = cut(-(-positions.shape[0] // LARGEST_PIECE), positions, times)
        return torch.cat([self._density(self._trunk(*piece)) for piece in pieces])

    def forward(
        self, positions: Tensor, directions: Tensor, times: Tensor | None = None, camera_indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return recomputed(self._evaluate, positions, directions, times, on=self.checkpointing)

    def _evaluate(self, positions: Tensor, directions: Tensor, times: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden = self._trunk(positions, times)
        features = self._layers(hidden, [self.feature_head])
        encoded = frequency_encode(directions, DIRECTION_FREQUENCIES).to(features.dtype)
        logits = self._layers(torch.cat([features, encoded], dim=-1), [self.color_hidden, self.color_head])
        return torch.sigmoid(widen(logits)), self._density(hidden)


def times_of(positions: Tensor, times: Tensor | None) -> Tensor:
    """(n,) the times of positions (n, 3); without any, the beginning: time 0."""
    return positions.new_zeros(positions.shape[0]) if times is None else times.to(positions.dtype)


def from_the_start(times: Tensor) -> Tensor:
    """(n,): 0 at time 0, where every point is at its own place, and 1 from a tenth on.

    >>> from_the_start(torch.tensor([0.0, 0.05, 0.5, 1.0])).tolist()
    [0.0, 0.5, 1.0, 1.0]
    """
    return (times * STARTING).clamp(0.0, 1.0)


class TimeNeRF(VanillaNeRF):
    """T-NeRF: the original NeRF whose first layer and skip also see sines of time.

    >>> field = TimeNeRF(Aabb.cube(1.0), VanillaConfig(width=16, depth=4))
    >>> at = [field.density(torch.zeros(1, 3), torch.tensor([t])).item() for t in (0.0, 0.5)]
    >>> at[0] != at[1]
    True
    """

    def __init__(self, aabb: Aabb, config: VanillaConfig | None = None, *, seed: int = 0) -> None:
        super().__init__(aabb, config, seed=seed, n_more=2 * TIME_FREQUENCIES + 1)

    def _encode(self, positions: Tensor, times: Tensor | None) -> Tensor:
        encoded = frequency_encode(times_of(positions, times)[:, None] * 2.0 - 1.0, TIME_FREQUENCIES)
        return torch.cat([super()._encode(positions, times), encoded], dim=-1)


class DeformedNeRF(VanillaNeRF):
    """D-NeRF: a network moves each point to where it was at time 0, and the original NeRF shows what is there. The
    deformation is a network as deep and wide as the scene's; at time 0 it is the identity.

    >>> field = DeformedNeRF(Aabb.cube(1.0), VanillaConfig(width=16, depth=4))
    >>> field.displacement(torch.rand(2, 3), torch.zeros(2)).abs().max().item()
    0.0
    """

    def __init__(self, aabb: Aabb, config: VanillaConfig | None = None, *, seed: int = 0) -> None:
        config = config or VanillaConfig()
        super().__init__(aabb, config, seed=seed)
        self.deform_trunk = self._make_trunk(3 * (2 * DEFORM_FREQUENCIES + 1) + 2 * TIME_FREQUENCIES + 1)
        self.deform_head = nn.Linear(config.width, 3)
        self._initialise(torch.Generator().manual_seed(seed))
        with torch.no_grad():
            self.deform_head.weight.mul_(SMALL)

    def displacement(self, places: Tensor, times: Tensor) -> Tensor:
        """(n, 3) from places (n, 3) in [-1, 1]^3 at `times` (n,) to those of time 0."""
        encoded = [frequency_encode(places, DEFORM_FREQUENCIES)]
        encoded.append(frequency_encode(times[:, None] * 2.0 - 1.0, TIME_FREQUENCIES))
        hidden = self._layers(torch.cat(encoded, dim=-1), self.deform_trunk, trunk=True)
        # Half precision would move points by steps that the finest sines see: the last product stays in full.
        with torch.autocast(places.device.type, enabled=False):
            moved = nn.functional.linear(hidden.to(places.dtype), self.deform_head.weight, self.deform_head.bias)
        return moved * from_the_start(times)[:, None]

    def _encode(self, positions: Tensor, times: Tensor | None) -> Tensor:
        places = self._place(positions)
        moved = places + self.displacement(places, times_of(places, times))
        coarse = frequency_encode(moved, DEFORM_FREQUENCIES)
        # Finer sines turn several times within a displacement: their slope says nothing about where to go.
        fine = frequency_encode(moved.detach(), POSITION_FREQUENCIES)
        near, far = 3 * DEFORM_FREQUENCIES, 3 * POSITION_FREQUENCIES
        sines = [coarse[:, 3 : 3 + near], fine[:, 3 + near : 3 + far]]
        cosines = [coarse[:, 3 + near :], fine[:, 3 + far + near :]]
        return torch.cat([coarse[:, :3], *sines, *cosines], dim=-1)
