"""Instant-NGP: a hash grid, a small density network and a small colour network."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..config import FieldConfig
from ..errors import InputError
from ..ops import GradientSink
from ..ops.composite import Thinning, visible_codes
from ..ops.hash_encode import PRIMES, HashLayout, hash_encode
from ..ops.mlp import fused_mlp
from ..ops.ngp import NgpDensity, NgpWeights, ngp_densities, ngp_density, ngp_field, ngp_query, ngp_visibility
from ..ops.positions import Contraction, fold, sample_positions, unit_positions
from ..ops.spherical_harmonics import spherical_harmonics
from ..types import Aabb, PackedSamples, Rays
from .activations import MAX_EXPONENT, activated, truncated_exp
from .hash_grid import HashGrid
from .mlp import FusedMlp


class InstantNGP(nn.Module):
    """hash(x) -> density network -> density = exp(h_0), features h; [sh(d), h] -> colour network -> sigmoid -> rgb.

    For mixed precision a trainer hands in `half_table`, a half copy of the hash table that is read in its place, and
    `table_sink` and `weight_sink`, buffers that take the gradients; see `nerfturbo.training.optim`. Levels of the grid
    may be faded by `level_weights`, and the colour network may read more of each ray than its direction (`read_rays`):
    see `nerfturbo.rendering.photos`.

    >>> field = InstantNGP(Aabb.cube(1.0), FieldConfig(log2_entries=10))
    >>> rgb, density = field(torch.zeros(5, 3), torch.tensor([[0.0, 0.0, 1.0]]).repeat(5, 1))
    >>> rgb.shape, density.shape, torch.equal(field.density(torch.zeros(5, 3)) > 0.0, density > 0.0)
    (torch.Size([5, 3]), torch.Size([5]), True)
    """

    contraction: Contraction = "none"  # of the space outside the box
    half_table: Tensor | None = None
    table_sink: GradientSink | None = None
    weight_sink: GradientSink | None = None
    level_weights: Callable[[], Tensor] | None = None  # (n_levels,), what the features of each level are multiplied by
    ray_vectors: Callable[[Tensor | None, int], Tensor] | None = None  # (photos of rays, n_rays) -> (n_rays, size)

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
        if config.initial_density != 1.0:
            _begin_at(config.initial_density, self.encoding, self.density_net)

    def read_rays(self, size: int, vectors: Callable[[Tensor | None, int], Tensor], *, seed: int = 0) -> None:
        """Let the colour network read `size` numbers more per ray, which `vectors` gives; before training."""
        config, generator = self.config, torch.Generator().manual_seed(seed)
        inputs = config.sh_degree**2 + size + config.geo_features
        self.color_net = FusedMlp(inputs, 3, width=config.width, depth=config.color_depth, generator=generator)
        self.ray_vectors = vectors

    def ray_features(self, directions: Tensor, camera_indices: Tensor | None = None) -> Tensor:
        """(n_rays, ...): what the colour network reads of each ray."""
        angular = spherical_harmonics(directions, self.config.sh_degree)
        if self.ray_vectors is None:
            return angular
        return torch.cat([angular, self.ray_vectors(camera_indices, directions.shape[0]).to(angular.dtype)], dim=-1)

    def _replicate_for_data_parallel(self) -> InstantNGP:
        """For `nn.DataParallel`: half copies and gradient buffers are on the device of the original."""
        replica = super()._replicate_for_data_parallel()
        replica.half_table = replica.table_sink = replica.weight_sink = None
        return replica

    @property
    def weights(self) -> NgpWeights:
        """The five matrices of both networks."""
        return NgpWeights(*self.density_net.matrices, *self.color_net.matrices)

    @property
    def faded_weights(self) -> NgpWeights:
        """For reading the encoding as it is: what fades its levels is in the first matrix. Without gradient to it."""
        if self.level_weights is None:
            return self.weights
        faded = self.density_net.weights[0].detach() * self._feature_weights()
        return self.weights._replace(density_in=faded)

    def _feature_weights(self) -> Tensor:
        assert self.level_weights is not None
        return self.level_weights()[:, None].expand(-1, self.config.n_features).reshape(-1)

    def _encode(self, unit_positions: Tensor, n_used: Tensor | None = None) -> Tensor:
        encoding = self._encode_all(unit_positions, n_used)
        return encoding if self.level_weights is None else encoding * self._feature_weights().to(encoding.dtype)

    def _encode_all(self, unit_positions: Tensor, n_used: Tensor | None = None) -> Tensor:
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
        return ngp_density(unit_positions, table, self.encoding.layout, self.faded_weights[:2], n_used=n_used)

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        unit = unit_positions(positions, self.aabb, self.contraction)
        if not torch.is_grad_enabled() and unit.dtype != torch.float64:
            table = self.encoding.table if self.half_table is None else self.half_table
            return ngp_densities(unit, table, self.encoding.layout, self.faded_weights[:2])
        return truncated_exp(fused_mlp(self._encode(unit), self.density_net.matrices)[:, 0])

    def forward(
        self,
        positions: Tensor,
        directions: Tensor,
        times: Tensor | None = None,
        camera_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        unit = unit_positions(positions, self.aabb, self.contraction)
        angular = self.ray_features(directions, camera_indices)
        if self.level_weights is None and self.table_sink is None and self.weight_sink is None:
            grid = self.encoding
            return ngp_query(unit, angular, grid.table, grid.layout, self.weights, half=self.half_table)
        encoding = self._encode(unit)
        logits = ngp_field(encoding, angular, None, self.weights, sink=self.weight_sink)
        return activated(logits)

    def _sample_positions(self, rays: Rays, samples: PackedSamples) -> Tensor:
        space = {"aabb": self.aabb, "contraction": self.contraction}
        return sample_positions(rays.origins, rays.directions, samples, **space)

    @torch.no_grad()
    def sample_density(self, rays: Rays, samples: PackedSamples) -> Tensor:
        positions = self._sample_positions(rays, samples)
        return truncated_exp(self._density_logits(positions, samples.n_samples))

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
        if self.contraction != "none":
            return visible_codes(self.sample_density(rays, samples), samples, **options)
        table = self.encoding.table if self.half_table is None else self.half_table
        field = NgpDensity(self.aabb, table, self.encoding.layout, self.faded_weights[:2])
        return ngp_visibility(rays.origins, rays.directions, samples, field, **options)

    def _sample_encoding(self, rays: Rays, samples: PackedSamples) -> Tensor:
        return self._encode(self._sample_positions(rays, samples), samples.n_samples)

    def sample_logits(self, rays: Rays, samples: PackedSamples) -> Tensor:
        encoding = self._sample_encoding(rays, samples)
        angular = self.ray_features(rays.directions, rays.camera_indices)
        if not angular.requires_grad:  # gradients are summed over a ray's samples: too much for half precision
            angular = angular.to(encoding.dtype)
        return ngp_field(
            encoding, angular, samples.ray_indices, self.weights, sink=self.weight_sink, n_used=samples.n_samples
        )

    def for_export(self) -> nn.Module:
        """A module of plain torch, in fp32 on the CPU, that computes the same: for tracing."""
        return _PlainNgp(self)


@torch.no_grad()
def _begin_at(density: float, grid: HashGrid, net: FusedMlp) -> None:
    """Let a new field have this density everywhere. A network without biases gives exp(0) = 1 for a table near zero. So
    one feature of the coarsest level begins as 1; one neuron alone reads it, and it alone; and of the outputs only the
    density's logit reads that neuron. All of it goes on learning, and no kernel needs to know. A decay of the table
    keeps off that level: where no picture pulls the other way it would bring the fog back."""
    if not 0.0 < density < math.inf:
        raise InputError("field.initial_density", "a finite number > 0", str(density))
    grid.table[: grid.layout.levels[0].size, 0] = 1.0
    grid.kept_levels = 1
    inner, outer = net.weights
    inner[0], inner[:, 0], outer[:, 0] = 0.0, 0.0, 0.0
    inner[0, 0], outer[0, 0] = 1.0, math.log(density)


class _PlainNgp(nn.Module):
    """Instant-NGP without kernels, for tracing: all levels and corners of the hash grid at once, so that the graph
    stays small."""

    def __init__(self, field: InstantNGP) -> None:
        super().__init__()
        low, high = field.aabb.tensor("cpu")
        self.contraction: Contraction = field.contraction
        levels, self.degree = field.encoding.layout.levels, field.config.sh_degree
        corners = torch.tensor([[c & 1, (c >> 1) & 1, c >> 2] for c in range(8)])
        constants = {
            "low": low.clone(),
            "size": (high - low).clone(),
            "table": field.encoding.table.detach().float().cpu().clone(),
            "corners": corners,  # (8, 3)
            "scales": torch.tensor([level.scale for level in levels])[:, None],  # (levels, 1)
            "nodes": torch.tensor([level.nodes for level in levels])[:, None],
            "offsets": torch.tensor([level.offset for level in levels])[:, None],
            "masks": torch.tensor([level.size - 1 for level in levels])[:, None],
            "hashed": torch.tensor([level.hashed for level in levels])[:, None],
        }
        if field.ray_vectors is not None:  # the look of new views
            with torch.no_grad():
                constants["look"] = field.ray_vectors(None, 1).float().cpu().clone()
        for name, value in constants.items():
            self.register_buffer(name, value)
        self.weights = nn.ParameterList(weight.detach().float().cpu().clone() for weight in field.faded_weights)

    def forward(self, positions: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(self.named_buffers())
        unit = fold((positions - named["low"]) / named["size"], self.contraction).clamp(0.0, 1.0)
        density_in, density_out, color_in, color_mid, color_out = self.weights
        features = torch.relu(self._encode(unit, named) @ density_in.T) @ density_out.T
        rays = [spherical_harmonics(directions, self.degree)]
        if "look" in named:
            rays.append(named["look"].expand(positions.shape[0], -1))
        inputs = torch.cat([*rays, features], dim=-1)
        hidden = torch.relu(torch.relu(inputs @ color_in.T) @ color_mid.T)
        return torch.sigmoid(hidden @ color_out.T), torch.exp(features[:, 0].clamp(max=MAX_EXPONENT))

    def _encode(self, unit: Tensor, named: dict[str, Tensor]) -> Tensor:
        """What `ops.hash_encode` computes; (n, levels * features)."""
        place = unit[:, None, :] * named["scales"] + 0.5  # (n, levels, 3)
        cell = place.floor()
        fraction = (place - cell)[:, :, None, :]
        nodes = cell.long()[:, :, None, :] + named["corners"]  # (n, levels, 8, 3)
        x, y, z = nodes.unbind(-1)
        mixed = (x * PRIMES[0]) ^ (y * PRIMES[1]) ^ (z * PRIMES[2])
        dense = x + named["nodes"] * (y + named["nodes"] * z)
        rows = named["offsets"] + torch.where(named["hashed"], mixed & named["masks"], dense)
        weight = torch.where(named["corners"].bool(), fraction, 1.0 - fraction).prod(-1)  # (n, levels, 8)
        return (weight[..., None] * named["table"][rows]).sum(2).flatten(1)
