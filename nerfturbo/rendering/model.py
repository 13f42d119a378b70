"""A field with its grid and sampler: all that is needed to render, with or without the images."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import config as configs
from ..config import Config, CustomFieldConfig, CustomSamplerConfig, GridSamplerConfig
from ..data.cameras import Cameras
from ..data.keypoints import Keypoints
from ..data.scene import Scene
from ..errors import InputError
from ..fields import HashDensity, build_field
from ..fields.custom import make_object, plug_in, source_of
from ..fields.field import offers
from ..fields.parts import BASE_RESOLUTION
from ..ops.hash_encode import HashLayout
from ..sampling.contracted import ContractedGrid
from ..sampling.grid import GridSampler, MarchSettings, OccupancyGrid, cropped
from ..sampling.histograms import RaySpan
from ..sampling.proposals import HierarchyEstimator, ProposalEstimator
from ..sampling.sampler import Pruning, check_sampler
from ..sampling.uniform import UniformEstimator
from ..types import Aabb, Rays, RenderOutput
from .image import RenderedImage, render_samples, render_view, supersampled
from .photos import build_photos, lenses_of
from .render import render_rays

FAR = 1000.0  # half boxes: where rays of a contracted scene end
LATTICE = 512  # steps per ray through a contracted grid
PROPOSAL_WIDTH = 16  # neurons of a proposal's hidden layer
PROPOSAL_SEEDS = 7919  # apart from those of the field


@dataclass(frozen=True)
class SceneBounds:
    """What a trained model must remember of its scene."""

    aabb: Aabb
    near: float
    far: float
    photos: int = 0  # images it was trained on, of which something may have been learned
    lenses: int = 0

    @classmethod
    def of(cls, scene: Scene) -> "SceneBounds":
        return cls(scene.aabb, scene.near, scene.far, len(scene), len(lenses_of(scene.cameras)[0]))

    def to_dict(self) -> dict[str, Any]:
        box = {"low": list(self.aabb.low), "high": list(self.aabb.high), "near": self.near, "far": self.far}
        return box | {"photos": self.photos, "lenses": self.lenses}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "SceneBounds":
        try:
            low, high = ((float(x), float(y), float(z)) for x, y, z in (values["low"], values["high"]))
            near, far = float(values["near"]), float(values["far"])
            counts = int(values.get("photos", 0)), int(values.get("lenses", 0))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise InputError("bounds", "low, high, near and far of a saved scene", repr(values)) from None
        return cls(Aabb(low, high), near, far, *counts)


def half_box(aabb: Aabb) -> float:
    """The unit of `loss.near_gradient` and of distances in a contracted scene."""
    return 0.5 * max(aabb.size)


# --- samplers: a new one is its file, its config, and a line in SAMPLERS ----------------------------------------------


def _span(config: Config, bounds: SceneBounds) -> RaySpan:
    """The part of a ray that is sampled: inside the box, or with a contraction far beyond it."""
    unit, hierarchy = half_box(bounds.aabb), isinstance(config.sampler, configs.HierarchySamplerConfig)
    if config.grid.contraction != "none":
        return RaySpan(bounds.near, max(bounds.far, FAR * unit), "mixed", unit)
    return RaySpan(bounds.near, bounds.far, "uniform" if hierarchy else "mixed", unit, _space(config, bounds.aabb))


def _space(config: Config, aabb: Aabb) -> Aabb:
    """The box of a field or proposal: nested boxes have it grow, a contraction leaves it."""
    return aabb if config.grid.contraction != "none" else aabb.scaled(2.0 ** (config.grid.levels - 1))


def _grid_sampler(own: GridSamplerConfig, config: Config, bounds: SceneBounds, grid: OccupancyGrid) -> Any:
    limits = {"early_stop_eps": config.render.early_stop_eps, "alpha_thre": own.alpha_thre}
    pruning = Pruning(**limits, merge_weak_samples=own.merge_weak_samples) if own.prune else None
    if config.grid.contraction != "none":
        span, folded = _span(config, bounds), {"contraction": config.grid.contraction, "seed": config.train.seed}
        return ContractedGrid(bounds.aabb, config.grid, steps=LATTICE, span=span, pruning=pruning, **folded)
    settings = MarchSettings(near_plane=bounds.near, far_plane=bounds.far, cone_angle=own.cone_angle, **limits)
    return GridSampler(grid, settings, pruning=pruning)


def _hierarchy_sampler(own: Any, config: Config, bounds: SceneBounds, grid: OccupancyGrid) -> Any:
    space, contraction = _space(config, bounds.aabb), config.grid.contraction
    coarse = build_field(config.field, space, seed=config.train.seed + PROPOSAL_SEEDS, contraction=contraction)
    sizes = {"n_samples": own.n_samples, "coarse_samples": own.coarse_samples}
    return HierarchyEstimator(coarse, **sizes, span=_span(config, bounds))


def _proposal_sampler(own: Any, config: Config, bounds: SceneBounds, grid: OccupancyGrid) -> Any:
    densities, seed = [], config.train.seed + PROPOSAL_SEEDS
    for index in range(len(own.coarse_samples)):
        # A list that is shorter than the proposals goes on as it ends.
        sizes = (own.levels, own.log2_entries, own.resolutions)
        levels, entries, finest = (values[min(index, len(values) - 1)] for values in sizes)
        layout = HashLayout(levels, 2, entries, min(BASE_RESOLUTION, finest), finest)
        options = {"width": PROPOSAL_WIDTH, "contraction": config.grid.contraction, "seed": seed + index}
        densities.append(HashDensity(_space(config, bounds.aabb), layout, **options))
    named = ("n_samples", "coarse_samples", "anneal_steps", "padding", "blur")
    return ProposalEstimator(densities, **{name: getattr(own, name) for name in named}, span=_span(config, bounds))


SAMPLERS: dict[type[Any], Callable[[Any, Config, SceneBounds, OccupancyGrid], Any]] = {
    GridSamplerConfig: _grid_sampler,
    configs.UniformSamplerConfig: lambda own, config, bounds, _: UniformEstimator(own.n_samples, _span(config, bounds)),
    configs.HierarchySamplerConfig: _hierarchy_sampler,
    configs.ProposalSamplerConfig: _proposal_sampler,
    CustomSamplerConfig: lambda own, config, bounds, _: make_object(
        own.source, bounds.aabb, seed=config.train.seed, what="sampler"
    ),
}


class NerfModel(nn.Module):
    """`field` and `sampler` over one scene's box. The occupancy `grid` is kept up to date for exports where another
    sampler places the samples.

    A `field` or `sampler` of one's own takes the place of the config's, which then records where it comes from.
    """

    def __init__(
        self, config: Config, bounds: SceneBounds, *, field: nn.Module | None = None, sampler: Any = None
    ) -> None:
        super().__init__()
        if field is not None:
            config = replace(config, field=CustomFieldConfig(source_of(getattr(field, "module", field))))
        if sampler is not None:
            config = replace(config, sampler=CustomSamplerConfig(source_of(sampler)))
        self.config, self.bounds = config, bounds
        step_size, grid = bounds.aabb.diagonal / config.render.steps_per_diagonal, config.grid
        if grid.contraction != "none" and isinstance(config.sampler, GridSamplerConfig):  # which has a contracted one
            grid = replace(grid, resolution=max(4, grid.resolution // 8 * 4))
        self.grid = OccupancyGrid(bounds.aabb, grid, step_size=step_size, seed=config.train.seed)
        space, seed, contraction = _space(config, bounds.aabb), config.train.seed, config.grid.contraction
        if field is not None:
            self.field: Any = plug_in(field, space)
        else:
            self.field = build_field(config.field, space, seed=seed, contraction=contraction)
        own, build = config.sampler, SAMPLERS[type(config.sampler)]
        self.sampler: Any = build(own, config, bounds, self.grid) if sampler is None else sampler
        for made in (self.field, getattr(self.sampler, "coarse", self.field)) if config.train.checkpointing else ():
            if not hasattr(made, "checkpointing") or offers(made, "sample_logits"):
                kind = type(getattr(made, "module", made)).__name__
                raise InputError("train.checkpointing", "off for a field of fused kernels", f"on, for {kind}")
            made.checkpointing = True
        if isinstance(config.sampler, CustomSamplerConfig):
            check_sampler(self.sampler, bounds.aabb, torch.device("cpu"))
        self.keypoints: Keypoints | None = None  # what depth is known of, while training
        self.photos = build_photos(config, bounds.photos, bounds.lenses)
        if self.photos is not None:
            self.photos.attach(self.field)

    @property
    def marches(self) -> bool:
        """Whether the occupancy grid itself places the samples."""
        return getattr(self.sampler, "grid", None) is self.grid

    @property
    def estimator(self) -> Any:
        """The sampler to render with: that of training, or with finer steps."""
        refine, refined = self.config.render.eval_refine, getattr(self.sampler, "refined", None)
        return self.sampler if refine == 1 or refined is None else refined(refine)

    @property
    def settings(self) -> MarchSettings:
        """How images are marched through a grid."""
        own = getattr(self.estimator, "settings", None)
        return own or MarchSettings(self.bounds.near, self.bounds.far, early_stop_eps=self.config.render.early_stop_eps)

    def crop(self, box: Aabb, *, what: str = "box") -> None:
        """Render and export only what lies inside the box, from now on; `what` names it in errors."""
        marches = self.marches
        self.sampler = cropped(self.sampler, box, what=what)
        self.grid = self.sampler.grid if marches else self.grid.cropped(box, what=what)

    def set_progress(self, share: float) -> None:
        """Tell what is faded in how much of the run is over; never waits for the device."""
        if self.photos is not None:
            self.photos.progress.fill_(share)

    @property
    def device(self) -> torch.device:
        return self.grid.bits.device

    def render_rays(self, rays: Rays, background: Tensor | None = None) -> RenderOutput:
        if not self.marches:
            return render_samples(self.field, rays, self.estimator, background=background)
        return render_rays(self.field, rays, self.grid, settings=self.settings, background=background)

    def render_image(
        self, cameras: Cameras, index: int, background: Tensor | None = None, *, max_memory: int | None = None
    ) -> RenderedImage:
        """View `index` of the cameras, over the background (white unless given), within `max_memory` bytes."""
        behind = torch.ones(3, device=self.device) if background is None else background

        def render(cameras: Cameras) -> RenderedImage:
            options = {"background": behind, "max_memory": max_memory}
            return render_view(self.field, self.estimator, cameras, index, **options)

        return supersampled(render, cameras, self.config.render.eval_rays)
