"""Instant-NGP: a hash grid, a small density network and a small colour network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import FieldConfig
from ..errors import InputError
from ..ops import GradientSink
from ..ops.fused_mlp import fused_mlp
from ..ops.hash_encode import HashLayout, hash_encode
from ..ops.ngp_field import NgpWeights, ngp_density, ngp_field
from ..ops.ngp_visibility import NgpDensity, ngp_visibility
from ..ops.sample_positions import sample_positions
from ..ops.spherical_harmonics import spherical_harmonics
from ..types import Aabb, PackedSamples, Rays
from .activations import truncated_exp
from .hash_grid import HashGrid
from .mlp import FusedMlp


class InstantNGP(nn.Module):
    """hash(x) -> density network -> density = exp(h_0), features h; [sh(d), h] -> colour network -> sigmoid -> rgb.

    For mixed precision a trainer hands in `half_table`, a half copy of the hash table that is read in its place, and
    `table_sink` and `weight_sink`, buffers that take the gradients; see `nerfturbo.training.optim`.

    >>> field = InstantNGP(Aabb.cube(1.0), FieldConfig(log2_entries=10))
    >>> rgb, density = field(torch.zeros(5, 3), torch.tensor([[0.0, 0.0, 1.0]]).repeat(5, 1))
    >>> rgb.shape, density.shape, torch.equal(field.density(torch.zeros(5, 3)) > 0.0, density > 0.0)
    (torch.Size([5, 3]), torch.Size([5]), True)
    """

    half_table: Tensor | None = None
    table_sink: GradientSink | None = None
    weight_sink: GradientSink | None = None

    def __init__(self, aabb: Aabb, config: FieldConfig | None = None, *, seed: int = 0) -> None:
        super().__init__()
        config = config or FieldConfig()
        generator = torch.Generator().manual_seed(seed)
        self.aabb, self.config = aabb, config
        if (config.depth, config.color_depth) != (1, 2):
            got = f"{config.depth} and {config.color_depth}"
            raise InputError("field.depth and field.color_depth", "1 and 2, the sizes of Instant-NGP", got)
        layout = HashLayout(
            config.n_levels, config.n_features, config.log2_entries, config.base_resolution, config.max_resolution
        )
        self.encoding = HashGrid(layout, generator=generator)
        self.density_net = FusedMlp(
            layout.n_outputs, config.geo_features, width=config.width, depth=config.depth, generator=generator
        )
        self.color_net = FusedMlp(
            config.sh_degree**2 + config.geo_features,
            3,
            width=config.width,
            depth=config.color_depth,
            generator=generator,
        )

    @property
    def weights(self) -> NgpWeights:
        """The five matrices of both networks."""
        return NgpWeights(*self.density_net.weights, *self.color_net.weights)

    def _encode(self, unit_positions: Tensor, n_used: Tensor | None = None) -> Tensor:
        return hash_encode(
            unit_positions,
            self.encoding.table,
            self.encoding.layout,
            half=self.half_table,
            sink=self.table_sink,
            n_used=n_used,
        )

    def _density_logits(self, unit_positions: Tensor, n_used: Tensor | None = None) -> Tensor:
        table = self.encoding.table if self.half_table is None else self.half_table
        return ngp_density(unit_positions, table, self.encoding.layout, self.weights[:2], n_used=n_used)

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        unit = self.aabb.normalize(positions)
        if not torch.is_grad_enabled() and unit.dtype != torch.float64:
            return truncated_exp(self._density_logits(unit))
        return truncated_exp(fused_mlp(self._encode(unit), list(self.density_net.weights))[:, 0])

    def forward(
        self,
        positions: Tensor,
        directions: Tensor,
        times: Tensor | None = None,
        camera_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        encoding = self._encode(self.aabb.normalize(positions))
        angular = spherical_harmonics(directions, self.config.sh_degree).to(encoding.dtype)
        rows = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
        logits = ngp_field(encoding, angular, rows, self.weights, sink=self.weight_sink)
        return torch.sigmoid(logits[:, :3]), truncated_exp(logits[:, 3])

    @torch.no_grad()
    def sample_density(self, rays: Rays, samples: PackedSamples) -> Tensor:
        positions = sample_positions(rays.origins, rays.directions, samples, aabb=self.aabb)
        return truncated_exp(self._density_logits(positions, samples.n_samples))

    def sample_visibility(
        self, rays: Rays, samples: PackedSamples, *, early_stop_eps: float, alpha_thre: float | Tensor
    ) -> Tensor:
        table = self.encoding.table if self.half_table is None else self.half_table
        field = NgpDensity(self.aabb, table, self.encoding.layout, self.weights[:2])
        return ngp_visibility(
            rays.origins, rays.directions, samples, field, early_stop_eps=early_stop_eps, alpha_thre=alpha_thre
        )

    def sample_logits(self, rays: Rays, samples: PackedSamples) -> Tensor:
        positions = sample_positions(rays.origins, rays.directions, samples, aabb=self.aabb)
        encoding = self._encode(positions, samples.n_samples)
        angular = spherical_harmonics(rays.directions, self.config.sh_degree).to(encoding.dtype)
        return ngp_field(
            encoding, angular, samples.ray_indices, self.weights, sink=self.weight_sink, n_used=samples.n_samples
        )
