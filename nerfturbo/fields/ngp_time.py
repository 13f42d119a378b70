"""Instant-NGP for scenes that move: three more hash grids, over (x, y, t), (y, z, t) and (x, z, t).

What these grids hold goes to the density and colour networks beside the scene's own features. They learn at a tenth of
its speed, or they would be noise, and a prior holds them still where nothing moves.

A grid over (x, y, t) is an ordinary three-dimensional hash grid; time is scaled such that its finest level has
`TIME_RESOLUTION` cells along it: few, so that neighbouring pictures teach each other.
"""

import torch
from torch import Tensor, nn

from ..config import DynamicNgpConfig
from ..ops.hash_encode import HashLayout
from ..ops.ngp import ngp_field
from ..ops.positions import sample_positions
from ..ops.random import Stream, random_uniform
from ..ops.spherical_harmonics import spherical_harmonics
from ..types import Aabb, PackedSamples, Rays
from .ngp import SH_DEGREE, NgpNetworks
from .parts import BASE_RESOLUTION, HashGrid, activated, truncated_exp
from .vanilla import times_of

TIME_RESOLUTION = 25  # cells along time at the finest level; coarser ones have fewer in proportion
MOTION_FEATURES, COARSEST = 2, 8  # features per entry of a grid over time, and its cells at the coarsest level
PRIOR_POINTS = 4096
TRIPLES = ((0, 1, 3), (1, 2, 3), (0, 2, 3))  # of (x, y, z, t)


class DynamicNGP(NgpNetworks):
    """[hash(x), motion(x, t)] -> density and colour as in Instant-NGP.

    >>> field = DynamicNGP(Aabb.cube(1.0), DynamicNgpConfig(log2_entries=10, motion_log2_entries=8))
    >>> field.density(torch.zeros(5, 3), torch.linspace(0.0, 1.0, 5)).shape
    torch.Size([5])
    """

    bytes_per_sample = 1024  # of rendering, an estimate
    captures_ahead = True
    stillness = 1e-3  # weight of the prior
    speed = 0.1  # of what moves, over that of the scene: how fast its features learn

    def __init__(self, aabb: Aabb, config: DynamicNgpConfig | None = None, *, seed: int = 0) -> None:
        super().__init__()
        config = config or DynamicNgpConfig()
        generator = torch.Generator().manual_seed(seed)
        self.aabb, self.config, self.seed = aabb, config, seed
        sizes = (config.n_levels, config.n_features, config.log2_entries, BASE_RESOLUTION, config.max_resolution)
        n_levels = (config.motion_resolution // COARSEST).bit_length()
        self.finest = max(COARSEST, config.motion_resolution, TIME_RESOLUTION)
        coarsest = COARSEST if n_levels > 1 else self.finest
        over_time = HashLayout(n_levels, MOTION_FEATURES, config.motion_log2_entries, coarsest, self.finest)
        self.encoding = HashGrid(HashLayout(*sizes), generator=generator)
        self.motion_grids = nn.ModuleList(HashGrid(over_time, generator=generator) for _ in TRIPLES)
        inputs = config.n_levels * config.n_features + len(TRIPLES) * over_time.n_outputs
        self._make_networks(inputs, config.width, generator)

    def _over_time(self, unit: Tensor, times: Tensor, n_used: Tensor | None) -> Tensor:
        """(n, motion features) of places (n, 3) in [0, 1]^3 at times (n,)."""
        share = self.config.motion_resolution / self.finest
        place = unit if share >= 1.0 else unit * share
        along = torch.cat([place.t(), (times * (TIME_RESOLUTION / self.finest))[None]])  # (4, n)
        grids = zip(self.motion_grids, TRIPLES, strict=True)
        parts = [grid(torch.stack([along[axis] for axis in axes]).t(), n_used) for grid, axes in grids]
        return self.speed * _joined(parts)

    def _encode(self, unit: Tensor, times: Tensor, n_used: Tensor | None = None) -> Tensor:
        """(n, features): what the density network sees."""
        return _joined([self.encoding(unit, n_used), self._over_time(unit, times, n_used)])

    def regularization(self, step: int | Tensor) -> Tensor:
        """() the prior that things stand still: how much the features of random places differ between two times."""
        table = self.encoding.table
        options = {"seed": self.seed, "stream": Stream.TIMES, "step": step, "device": table.device}
        unit = random_uniform(PRIOR_POINTS, columns=3, **options).to(table.dtype)
        times = random_uniform(PRIOR_POINTS, columns=2, first=PRIOR_POINTS, **options).to(table.dtype)
        first, second = (self._over_time(unit, times[:, k], None) for k in range(2))
        return self.stillness * (first - second).float().abs().mean()

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        encoded = self._encode(self.aabb.normalize(positions), times_of(positions, times))
        return truncated_exp(self.density_net(encoded)[:, 0])

    def forward(
        self, positions: Tensor, directions: Tensor, times: Tensor | None = None, camera_indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        encoded = self._encode(self.aabb.normalize(positions), times_of(positions, times))
        angular = spherical_harmonics(directions, SH_DEGREE).to(encoded.dtype)
        return activated(ngp_field(encoded, angular, None, self.weights, sink=self.weight_sink))

    def _encode_samples(self, rays: Rays, samples: PackedSamples) -> Tensor:
        unit = sample_positions(rays.origins, rays.directions, samples, aabb=self.aabb)
        return self._encode(unit, times_of(rays.origins, rays.times)[samples.ray_indices.long()], samples.n_samples)

    @torch.no_grad()
    def sample_density(self, rays: Rays, samples: PackedSamples) -> Tensor:
        return truncated_exp(self.density_net(self._encode_samples(rays, samples), samples.n_samples)[:, 0])

    def sample_logits(self, rays: Rays, samples: PackedSamples) -> Tensor:
        encoded = self._encode_samples(rays, samples)
        angular = spherical_harmonics(rays.directions, SH_DEGREE).to(encoded.dtype)
        options = {"sink": self.weight_sink, "n_used": samples.n_samples}
        return ngp_field(encoded, angular, samples.ray_indices, self.weights, **options)


def _joined(parts: list[Tensor]) -> Tensor:
    """Columns side by side, feature-major in memory as the encoder writes them and the networks read them."""
    return torch.cat([part.t() for part in parts]).t()
