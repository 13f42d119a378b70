"""The original NeRF for scenes that move: time as one more input (T-NeRF), or a deformation before it (D-NeRF)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import FieldConfig, MotionConfig
from ..types import Aabb
from .encodings import frequency_encode
from .vanilla import POSITION_FREQUENCIES, VanillaNeRF

STARTING = 10.0  # a deformation has its full strength from time 1 / this on
SMALL = 1e-3  # weights that give the first displacements
DEFORM_FREQUENCIES = 4  # of position: finer sines let neighbours part, and training does not hold


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

    >>> field = TimeNeRF(Aabb.cube(1.0), FieldConfig(kind="tnerf", width=16, depth=4))
    >>> at = [field.density(torch.zeros(1, 3), torch.tensor([t])).item() for t in (0.0, 0.5)]
    >>> at[0] != at[1]
    True
    """

    def __init__(
        self, aabb: Aabb, config: FieldConfig | None = None, motion: MotionConfig | None = None, *, seed: int = 0
    ) -> None:
        self.motion = motion or MotionConfig()
        config = config or FieldConfig(kind="tnerf", width=256, depth=8)
        super().__init__(aabb, config, seed=seed, n_more=2 * self.motion.time_frequencies + 1)

    def _encode(self, positions: Tensor, times: Tensor | None) -> Tensor:
        moments = times_of(positions, times)[:, None] * 2.0 - 1.0
        encoded = frequency_encode(moments, self.motion.time_frequencies)
        return torch.cat([super()._encode(positions, times), encoded], dim=-1)


class DeformedNeRF(VanillaNeRF):
    """D-NeRF: a network moves each point to where it was at time 0, and the original NeRF shows what is there.

    The deformation is a network as deep and wide as the scene's; at time 0 it is the identity.

    >>> field = DeformedNeRF(Aabb.cube(1.0), FieldConfig(kind="dnerf", width=16, depth=4))
    >>> field.displacement(torch.rand(2, 3), torch.zeros(2)).abs().max().item()
    0.0
    """

    def __init__(
        self, aabb: Aabb, config: FieldConfig | None = None, motion: MotionConfig | None = None, *, seed: int = 0
    ) -> None:
        config = config or FieldConfig(kind="dnerf", width=256, depth=8)
        super().__init__(aabb, config, seed=seed)
        self.motion = motion or MotionConfig()
        n_inputs = 3 * (2 * DEFORM_FREQUENCIES + 1) + 2 * self.motion.time_frequencies + 1
        inputs = [n_inputs] + [config.width] * (config.depth - 1)
        if self.skip > 0:
            inputs[self.skip] += n_inputs
        self.deform_trunk = nn.ModuleList(nn.Linear(n, config.width) for n in inputs)
        self.deform_head = nn.Linear(config.width, 3)
        self._initialise(torch.Generator().manual_seed(seed))
        with torch.no_grad():
            self.deform_head.weight.mul_(SMALL)

    def displacement(self, places: Tensor, times: Tensor) -> Tensor:
        """(n, 3) from places (n, 3) in [-1, 1]^3 at `times` (n,) to those of time 0."""
        encoded = [frequency_encode(places, DEFORM_FREQUENCIES)]
        encoded.append(frequency_encode(times[:, None] * 2.0 - 1.0, self.motion.time_frequencies))
        trunk = [layer for layer in self.deform_trunk if isinstance(layer, nn.Linear)]
        skip = self.skip if self.skip > 0 else None
        hidden = self._layers(torch.cat(encoded, dim=-1), trunk, skip=skip, relu_last=True)
        # Half precision would move points by steps that the finest sines see: the last product stays in full.
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
