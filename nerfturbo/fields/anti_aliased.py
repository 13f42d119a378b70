"""Instant-NGP that knows how wide a pixel is: hash levels finer than a sample's footprint fade out.

A pixel's cone is `pixel_radii * t` wide at distance t. The standard deviation of a disc is half its radius; over the
size of the box it is the footprint that `fade_levels` takes. Pictures from further away, or of fewer pixels,
then see a smoother field instead of samples of a sharp one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import FieldConfig
from ..ops.composite import Thinning, visible_codes
from ..ops.frame import NextSamples
from ..ops.hash_encode import fade_levels, hash_encode, level_weights
from ..ops.mlp import fused_mlp
from ..ops.ngp import NgpWeights, ngp_field
from ..types import Aabb, PackedSamples, Rays
from .activations import activated, truncated_exp
from .ngp import InstantNGP


class AntiAliasedNGP(InstantNGP):
    """`footprint`, a buffer, is what counts where no camera looks: for the grid, for meshes, for rays without
    `pixel_radii`. Set it to a typical one of the training rays (`set_footprint`).

    >>> field = AntiAliasedNGP(Aabb.cube(1.0), FieldConfig(log2_entries=10))
    >>> field.set_footprint(0.01)  # a pixel's radius at its typical distance, in the scene's unit
    >>> round(field.footprint.item(), 4)  # half of it, over the side of the box
    0.0025
    """

    footprint: Tensor  # () fp32

    def __init__(self, aabb: Aabb, config: FieldConfig | None = None, *, seed: int = 0) -> None:
        super().__init__(aabb, config, seed=seed)
        self.register_buffer("footprint", torch.zeros(()))

    @property
    def unit(self) -> float:
        """What a footprint of 1 is long: the mean side of the box."""
        return sum(self.aabb.size) / 3.0

    def set_footprint(self, radius: float) -> None:
        """The footprint where no camera looks, from a cone's radius in the unit of the scene."""
        self.footprint.fill_(0.5 * radius / self.unit)

    @property
    def faded_weights(self) -> NgpWeights:
        """For reading the encoding as it is, where no camera looks: the typical footprint is in the first matrix."""
        weights, levels = super().faded_weights, level_weights(self.footprint[None], self.encoding.layout)[0]
        faded = weights.density_in.detach() * levels.repeat_interleave(self.config.n_features)
        return weights._replace(density_in=faded)

    def footprints(self, rays: Rays, ray_indices: Tensor, t_starts: Tensor, t_ends: Tensor) -> Tensor:
        """(n,) of samples of these rays; `ray_indices` (n,) must be valid ones."""
        if rays.pixel_radii is None:
            return self.footprint.expand(t_starts.shape[0])
        middle = (t_starts + t_ends) * (0.25 / self.unit)
        return rays.pixel_radii[ray_indices.long()] * middle.abs()

    def _faded(self, unit_positions: Tensor, footprints: Tensor, n_used: Tensor | None = None) -> Tensor:
        encoding = self._encode(unit_positions, n_used)
        return fade_levels(encoding, footprints, self.encoding.layout, n_used=n_used)

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        if not torch.is_grad_enabled() and positions.dtype != torch.float64:
            return super().density(positions, times)
        unit = self.aabb.normalize(positions)
        faded = self._faded(unit, self.footprint.expand(unit.shape[0]))
        return truncated_exp(fused_mlp(faded, list(self.density_net.weights))[:, 0])

    def forward(
        self,
        positions: Tensor,
        directions: Tensor,
        times: Tensor | None = None,
        camera_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        faded = self._faded(self.aabb.normalize(positions), self.footprint.expand(positions.shape[0]))
        angular = self.ray_features(directions, camera_indices).to(faded.dtype)
        logits = ngp_field(faded, angular, None, self.weights, sink=self.weight_sink)
        return activated(logits)

    def _sample_encoding(self, rays: Rays, samples: PackedSamples) -> Tensor:
        positions = self._sample_positions(rays, samples)
        footprints = self.footprints(rays, samples.ray_indices, samples.t_starts, samples.t_ends)
        return self._faded(positions, footprints, samples.n_samples)

    @torch.no_grad()
    def sample_density(self, rays: Rays, samples: PackedSamples) -> Tensor:
        weights = [self.density_net.weights[0], self.density_net.weights[1][:1]]
        return truncated_exp(fused_mlp(self._sample_encoding(rays, samples), weights)[:, 0].float())

    @torch.no_grad()
    def sample_visibility(
        self,
        rays: Rays,
        samples: PackedSamples,
        *,
        early_stop_eps: float,
        alpha_thre: float | Tensor,
        thinning: Thinning | None = None,
    ) -> Tensor:
        options = {"early_stop_eps": early_stop_eps, "alpha_thre": alpha_thre, "thinning": thinning}
        return visible_codes(self.sample_density(rays, samples), samples, **options)

    @torch.no_grad()
    def logits_at(self, samples: NextSamples, rays: Rays, angular: Tensor, table: Tensor) -> Tensor:
        """(n, 4) logits of a round of rendering, whose rows from `n_used` on may hold anything at all."""
        used = torch.arange(samples.positions.shape[0], device=table.device) < samples.n_used
        n_used, ray_indices = used.sum(dtype=torch.int32), torch.where(used, samples.ray_indices, 0)
        encoding = hash_encode(samples.positions, table, self.encoding.layout, n_used=n_used)
        footprints = self.footprints(rays, ray_indices, samples.t_starts, samples.t_ends)
        faded = fade_levels(encoding, footprints, self.encoding.layout, n_used=n_used)
        return ngp_field(faded, angular.to(faded.dtype), ray_indices, super().faded_weights, n_used=n_used)
