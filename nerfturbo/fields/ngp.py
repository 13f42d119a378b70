"""Instant-NGP: a hash grid, a small density network and a small colour network."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..config import NgpConfig
from ..ops import GradientSink
from ..ops.composite import Thinning, visible_codes
from ..ops.frame import NextSamples
from ..ops.hash_encode import HashLayout, hash_encode, level_weights
from ..ops.mlp import fused_mlp
from ..ops.ngp import NgpDensity, NgpGrid, NgpWeights, ngp_field, ngp_query, skips_unused
from ..ops.positions import CONE_WIDTH, Contraction, cone_positions, fold, sample_positions, unit_positions
from ..ops.spherical_harmonics import spherical_harmonics
from ..types import Aabb, PackedSamples, Rays
from .field import Buffers, Connected
from .parts import BASE_RESOLUTION, FusedMlp, HashGrid, activated, truncated_exp

SH_DEGREE, GEO_FEATURES = 4, 16  # of the view direction; outputs of the density network, the first is the density
COLOR_DEPTH = 2  # hidden layers of the colour network; the density network has one


class NgpNetworks(Connected):
    """Instant-NGP's density and colour networks, which run as one and take one buffer for their gradients."""

    taken = ("weight_sink",)
    weight_sink: GradientSink | None = None

    def _make_networks(self, inputs: int, width: int, generator: torch.Generator) -> None:
        """Behind an encoding of so many inputs."""
        color = SH_DEGREE**2 + GEO_FEATURES
        self.density_net = FusedMlp(inputs, GEO_FEATURES, width=width, depth=1, generator=generator)
        self.color_net = FusedMlp(color, 3, width=width, depth=COLOR_DEPTH, generator=generator)

    @property
    def weights(self) -> NgpWeights:
        """The five matrices of both networks."""
        return NgpWeights(*self.density_net.matrices, *self.color_net.matrices)

    def connect(self, buffers: Buffers) -> None:
        """What else the field is made of takes its own."""
        self.weight_sink = buffers.sink(*self.weights)


class InstantNGP(NgpNetworks):
    """hash(x) -> density network -> density = exp(h_0), features h; [sh(d), h] -> colour network -> sigmoid -> rgb.
    Levels of the grid may be faded by `level_weights`, and the colour network may read more of each ray than its
    direction (`read_rays`): see `nerfturbo.rendering.photos`.

    >>> field = InstantNGP(Aabb.cube(1.0), NgpConfig(log2_entries=10))
    >>> rgb, density = field(torch.zeros(5, 3), torch.tensor([[0.0, 0.0, 1.0]]).repeat(5, 1))
    >>> rgb.shape, density.shape, torch.equal(field.density(torch.zeros(5, 3)) > 0.0, density > 0.0)
    (torch.Size([5, 3]), torch.Size([5]), True)
    """

    few_launches = captures_ahead = True
    contraction: Contraction = "none"  # of the space outside the box
    fades_by_sample = False  # whether the encoding depends on more of a sample than its position
    level_weights: Callable[[], Tensor] | None = None  # (n_levels,), what the features of each level are multiplied by
    ray_vectors: Callable[[Tensor | None, int], Tensor] | None = None  # (photos of rays, n_rays) -> (n_rays, size)

    def __init__(self, aabb: Aabb, config: NgpConfig | None = None, *, seed: int = 0) -> None:
        super().__init__()
        config = config or NgpConfig()
        generator = torch.Generator().manual_seed(seed)
        self.aabb, self.config = aabb, config
        sizes = (config.n_levels, config.n_features, config.log2_entries)
        layout = HashLayout(*sizes, BASE_RESOLUTION, config.max_resolution)
        self.encoding = HashGrid(layout, generator=generator)
        self._make_networks(layout.n_outputs, config.width, generator)
        if config.initial_density != 1.0:
            _begin_at(config.initial_density, self.encoding, self.density_net)

    def read_rays(self, size: int, vectors: Callable[[Tensor | None, int], Tensor], *, seed: int = 0) -> None:
        """Let the colour network read `size` numbers more per ray, which `vectors` gives; before training."""
        inputs, generator = SH_DEGREE**2 + size + GEO_FEATURES, torch.Generator().manual_seed(seed)
        self.color_net = FusedMlp(inputs, 3, width=self.config.width, depth=COLOR_DEPTH, generator=generator)
        self.ray_vectors = vectors

    def ray_features(self, directions: Tensor, camera_indices: Tensor | None = None) -> Tensor:
        """(n_rays, ...): what the colour network reads of each ray."""
        angular = spherical_harmonics(directions, SH_DEGREE)
        if self.ray_vectors is None:
            return angular
        return torch.cat([angular, self.ray_vectors(camera_indices, directions.shape[0]).to(angular)], dim=-1)

    @property
    def bytes_per_sample(self) -> int:
        """Of rendering, an estimate: encoding and logits, or a few layers where they are not fused."""
        row = self.encoding.values[:1]
        return 64 + self.encoding.layout.n_outputs * row.element_size() if skips_unused(row, self.weights) else 1024

    @property
    def faded_weights(self) -> NgpWeights:
        """For reading the encoding as it is: what fades its levels is in the first matrix. Without gradient to it."""
        if self.level_weights is None:
            return self.weights
        return self.weights._replace(density_in=self.density_net.weights[0].detach() * self._feature_weights())

    def _feature_weights(self) -> Tensor:
        assert self.level_weights is not None
        return self.level_weights()[:, None].expand(-1, self.config.n_features).reshape(-1)

    def _encode(self, unit_positions: Tensor, n_used: Tensor | None = None) -> Tensor:
        encoding = self.encoding(unit_positions, n_used)
        return encoding if self.level_weights is None else encoding * self._feature_weights().to(encoding)

    @property
    def _ahead(self) -> NgpDensity:
        return NgpDensity(self.aabb, self.encoding.values, self.encoding.layout, self.faded_weights[:2])

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        unit = unit_positions(positions, self.aabb, self.contraction)
        if not torch.is_grad_enabled() and unit.dtype != torch.float64:
            return self._ahead.at(unit)
        return truncated_exp(fused_mlp(self._encode(unit), self.density_net.matrices)[:, 0])

    def forward(
        self, positions: Tensor, directions: Tensor, times: Tensor | None = None, camera_indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        unit = unit_positions(positions, self.aabb, self.contraction)
        angular = self.ray_features(directions, camera_indices)
        grid, plain = self.encoding, self.level_weights is None and not self.fades_by_sample
        if plain and isinstance(grid, HashGrid) and grid.sink is None and self.weight_sink is None:
            return ngp_query(unit, angular, None, NgpGrid(grid.table, grid.layout, grid.read), self.weights)
        return activated(ngp_field(self._encode(unit), angular, None, self.weights, sink=self.weight_sink))

    def _sample_positions(self, rays: Rays, samples: PackedSamples) -> Tensor:
        space = {"aabb": self.aabb, "contraction": self.contraction}
        return sample_positions(rays.origins, rays.directions, samples, **space)

    @torch.no_grad()
    def sample_density(self, rays: Rays, samples: PackedSamples) -> Tensor:
        return self._ahead.at(self._sample_positions(rays, samples), n_used=samples.n_samples)

    def sample_visibility(
        self,
        rays: Rays,
        samples: PackedSamples,
        *,
        early_stop_eps: float,
        alpha_thre: float | Tensor,
        thinning: Thinning | None = None,
    ) -> Tensor:
        limits = {"early_stop_eps": early_stop_eps, "alpha_thre": alpha_thre, "thinning": thinning}
        if self.contraction != "none" or self.fades_by_sample:
            return visible_codes(self.sample_density(rays, samples), samples, **limits)
        return self._ahead.visibility(rays.origins, rays.directions, samples, **limits)

    def _sample_encoding(self, rays: Rays, samples: PackedSamples) -> Tensor:
        return self._encode(self._sample_positions(rays, samples), samples.n_samples)

    def sample_logits(self, rays: Rays, samples: PackedSamples) -> Tensor:
        encoding = self._sample_encoding(rays, samples)
        angular = self.ray_features(rays.directions, rays.camera_indices)
        if not angular.requires_grad:  # gradients are summed over a ray's samples: too much for half precision
            angular = angular.to(encoding.dtype)
        options = {"sink": self.weight_sink, "n_used": samples.n_samples}
        return ngp_field(encoding, angular, samples.ray_indices, self.weights, **options)

    def evaluator(self, rays: Rays, *, half: bool = False) -> "NgpEvaluator | None":
        """How rendering asks this field over rays, the table as it is or in `half`; None where it cannot be fused."""
        made = NgpEvaluator(self, rays, half=half)
        return made if skips_unused(made.table, self.weights) else None


class NgpEvaluator:
    """Instant-NGP in rendering: directions are encoded once per ray, and nothing is read back."""

    logits, channels, recordable = True, 3, True

    def __init__(self, field: InstantNGP, rays: Rays, *, half: bool = False) -> None:
        self.field, self.rays, self.aabb = field, rays, field.aabb
        table = field.encoding.values
        self.table = table.half() if half and table.dtype == torch.float32 else table
        self.weights, self.layout = field.faded_weights, field.encoding.layout
        self.angular = field.ray_features(rays.directions)

    @torch.no_grad()
    def __call__(self, samples: NextSamples) -> tuple[Tensor, Tensor]:
        """Density (n,) and colour (n, 3) logits of a round of rendering."""
        unit = fold(samples.positions, self.field.contraction)  # scaled to the box already
        grid, options = NgpGrid(self.table, self.layout), {"n_used": samples.n_used, "logits": True}
        rgb, density = ngp_query(unit, self.angular, samples.ray_indices, grid, self.weights, **options)
        return density, rgb


class AntiAliasedNGP(InstantNGP):
    """Instant-NGP that knows how wide a pixel is: features are those of a part of its cone, of radius `pixel_radii * t`
    at distance t (`ops.cone_positions`), and hash levels finer than that fade out. Images from further away, or of
    fewer pixels, then see a smoother field instead of samples of a sharp one. `footprint`, a buffer, is what counts
    where no camera looks: for the grid, for meshes, for rays without `pixel_radii`. Set it to a typical one of the
    training rays (`set_footprint`).

    >>> field = AntiAliasedNGP(Aabb.cube(1.0), NgpConfig(log2_entries=10, anti_alias=6))
    >>> field.set_footprint(0.01)  # a pixel's radius at its typical distance, in the scene's unit
    >>> round(field.footprint.item(), 4)  # half of it, over the side of the box
    0.0025
    """

    fades_by_sample = True
    footprint: Tensor  # () fp32

    def __init__(self, aabb: Aabb, config: NgpConfig | None = None, *, seed: int = 0) -> None:
        super().__init__(aabb, config or NgpConfig(anti_alias=1), seed=seed)
        self.points = int(self.config.anti_alias)
        self.register_buffer("footprint", torch.zeros(()))

    def set_footprint(self, radius: float) -> None:
        """The footprint where no camera looks, from a cone's radius in the unit of the scene."""
        size = sum(self.aabb.size) / 3.0 * (1.0 if self.contraction == "none" else 2.0)
        self.footprint.fill_(CONE_WIDTH[1] * radius / size)

    def _typical(self, values: Tensor) -> Tensor:
        """Values (n, n_levels * n_features) as they count where no camera looks."""
        levels = level_weights(self.footprint[None], self.encoding.layout)[0]
        return values * levels.repeat_interleave(self.config.n_features).to(values)

    @property
    def faded_weights(self) -> NgpWeights:
        """For reading the encoding as it is, where no camera looks: the typical footprint is in the first matrix."""
        weights = super().faded_weights
        return weights._replace(density_in=self._typical(weights.density_in.detach()))

    @property
    def bytes_per_sample(self) -> int:
        return super().bytes_per_sample + 32 * self.points

    def regions(self, rays: Rays, samples: PackedSamples) -> tuple[Tensor, Tensor]:
        """Positions (n, points, 3) and footprints (n, points) of samples. Gradients to rays are those of the middle."""
        radii, middle = rays.pixel_radii, None
        if radii is None or rays.origins.requires_grad or rays.directions.requires_grad:
            middle = self._sample_positions(rays, samples)[:, None]
        if radii is None:
            assert middle is not None
            return middle, self.footprint.expand(middle.shape[:2])
        space = {"points": self.points, "aabb": self.aabb, "contraction": self.contraction}
        positions, footprints = cone_positions(rays.origins, rays.directions, radii, samples, **space)
        return positions if middle is None else positions + (middle - middle.detach()), footprints

    def _encode(self, unit_positions: Tensor, n_used: Tensor | None = None) -> Tensor:
        """Where no camera looks."""
        return self._typical(super()._encode(unit_positions, n_used))

    def _sample_encoding(self, rays: Rays, samples: PackedSamples) -> Tensor:
        positions, footprints = self.regions(rays, samples)
        encoding = self.encoding(positions, samples.n_samples, footprints=footprints)
        return encoding if self.level_weights is None else encoding * self._feature_weights().to(encoding)

    @torch.no_grad()
    def sample_density(self, rays: Rays, samples: PackedSamples) -> Tensor:
        weights = [self.density_net.weights[0], self.density_net.weights[1][:1]]
        return truncated_exp(fused_mlp(self._sample_encoding(rays, samples), weights)[:, 0].float())

    def evaluator(self, rays: Rays, *, half: bool = False) -> NgpEvaluator:
        return FadedEvaluator(self, rays, half=half)


class FadedEvaluator(NgpEvaluator):
    """The same for the parts of pixels' cones."""

    field: AntiAliasedNGP

    @torch.no_grad()
    def __call__(self, samples: NextSamples) -> tuple[Tensor, Tensor]:
        # Rows from `n_used` on may hold anything at all.
        field, used = self.field, torch.arange(samples.positions.shape[0], device=self.table.device) < samples.n_used
        n_used, ray_indices = used.sum(dtype=torch.int32), torch.where(used, samples.ray_indices, 0)
        starts, ends = (torch.where(used, t, 0.0) for t in (samples.t_starts, samples.t_ends))
        packed = PackedSamples(starts, ends, ray_indices, used.new_zeros(len(self.rays) + 1, dtype=torch.int32))
        positions, footprints = field.regions(self.rays, packed)
        encoding = hash_encode(positions, self.table, self.layout, footprints=footprints, n_used=n_used)
        weights = InstantNGP.faded_weights.fget(field)  # type: ignore[attr-defined]
        logits = ngp_field(encoding, self.angular.to(encoding.dtype), ray_indices, weights, n_used=n_used)
        return logits[:, 3], logits[:, :3]


@torch.no_grad()
def _begin_at(density: float, grid: HashGrid, net: FusedMlp) -> None:
    """Let a new field have this density everywhere. A network without biases gives exp(0) = 1 for a table near zero. So
    one feature of the coarsest level begins as 1; one neuron alone reads it, and it alone; and of the outputs only the
    density's logit reads that neuron. All of it goes on learning, and no kernel needs to know. A decay of the table
    keeps off that level: where no picture pulls the other way it would bring the fog back."""
    grid.table[: grid.layout.levels[0].size, 0] = 1.0
    grid.kept_levels = 1
    inner, outer = net.weights
    inner[0], inner[:, 0], outer[:, 0] = 0.0, 0.0, 0.0
    inner[0, 0], outer[0, 0] = 1.0, math.log(density)
