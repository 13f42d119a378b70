"""A field with its grid and marching settings: all that is needed to render, with or without the pictures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Config
from ..data.cameras import Cameras
from ..data.keypoints import Keypoints
from ..data.scene import Scene
from ..errors import InputError
from ..fields import build_field
from ..sampling.occupancy_grid import OccupancyGrid
from ..sampling.proposals import RayEstimator
from ..types import Aabb, Rays, RenderOutput
from .estimated import build_estimator, render_estimated
from .image import RenderedImage, render_view, supersampled
from .photos import build_photos, lens_numbers
from .render import MarchSettings, render_rays


@dataclass(frozen=True)
class SceneBounds:
    """What a trained model must remember of its scene."""

    aabb: Aabb
    near: float
    far: float
    photos: int = 0  # pictures it was trained on, of which something may have been learned
    lenses: int = 0

    @classmethod
    def of(cls, scene: Scene) -> SceneBounds:
        return cls(scene.aabb, scene.near, scene.far, len(scene), int(lens_numbers(scene.cameras).max()) + 1)

    def to_dict(self) -> dict[str, Any]:
        box = {"low": list(self.aabb.low), "high": list(self.aabb.high), "near": self.near, "far": self.far}
        return box | {"photos": self.photos, "lenses": self.lenses}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SceneBounds:
        try:
            low, high = ((float(x), float(y), float(z)) for x, y, z in (values["low"], values["high"]))
            near, far = float(values["near"]), float(values["far"])
            counts = int(values.get("photos", 0)), int(values.get("lenses", 0))
        except (KeyError, TypeError, ValueError):
            raise InputError("bounds", "low, high, near and far of a saved scene", repr(values)) from None
        return cls(Aabb(low, high), near, far, *counts)


class NerfModel(nn.Module):
    """`field` and `grid` over one scene's box; `proposer` places the samples where the config says another way than the
    grid, which is then kept up to date for exports alone."""

    proposer: RayEstimator | None

    def __init__(self, config: Config, bounds: SceneBounds) -> None:
        super().__init__()
        self.config, self.bounds = config, bounds
        step_size = bounds.aabb.diagonal / config.render.steps_per_diagonal
        contraction, grid = config.sampling.contraction, config.grid
        if config.sampling.kind == "grid" and contraction != "none":  # rays are marched through a contracted one
            grid = replace(grid, resolution=max(4, grid.resolution // 8 * 4))
        self.grid = OccupancyGrid(bounds.aabb, grid, step_size=step_size, seed=config.train.seed)
        space = self.grid.outer_aabb if contraction == "none" else bounds.aabb
        self.field = build_field(
            config.field,
            space,
            seed=config.train.seed,
            voxels=config.voxels,
            factor=config.factor,
            contraction=contraction,
            motion=config.motion,
        )
        self.proposer = build_estimator(config, bounds.aabb, near=bounds.near, far=bounds.far)
        self.keypoints: Keypoints | None = None  # what depth is known of, while training
        self.photos = build_photos(config, bounds.photos, bounds.lenses)
        if self.photos is not None:
            self.photos.attach(self.field)

    @property
    def estimator(self) -> OccupancyGrid | RayEstimator:
        """What places the samples: hand it to whatever renders the field."""
        return self.grid if self.proposer is None else self.proposer

    def set_progress(self, share: float) -> None:
        """Tell what is faded in how much of the run is over; never waits for the device."""
        if self.photos is not None:
            self.photos.progress.fill_(share)

    @property
    def device(self) -> torch.device:
        return self.grid.bits.device

    @property
    def settings(self) -> MarchSettings:
        """How pictures are marched: as in training, or in finer steps."""
        settings, refine = self.training_settings, self.config.render.eval_refine
        if refine == 1:
            return settings
        if refine < 1:
            raise InputError("render.eval_refine", "at least 1", str(refine))
        return replace(
            settings,
            render_step_size=self.grid.step_size / refine,
            cone_angle=settings.cone_angle / refine,
            alpha_thre=settings.alpha_thre / refine,
        )

    @property
    def training_settings(self) -> MarchSettings:
        render = self.config.render
        return MarchSettings(
            near_plane=self.bounds.near,
            far_plane=self.bounds.far,
            cone_angle=render.cone_angle,
            early_stop_eps=render.early_stop_eps,
            alpha_thre=render.alpha_thre,
        )

    def render_rays(self, rays: Rays, background: Tensor | None = None) -> RenderOutput:
        if self.proposer is not None:
            return render_estimated(self.field, rays, self.proposer, background=background)
        return render_rays(self.field, rays, self.grid, settings=self.settings, background=background)

    def render_image(
        self, cameras: Cameras, index: int, background: Tensor | None = None, *, max_memory: int | None = None
    ) -> RenderedImage:
        """Picture `index` of the cameras, over the background (white unless given), within `max_memory` bytes."""
        behind = torch.ones(3, device=self.device) if background is None else background

        def render(shift: tuple[float, float]) -> RenderedImage:
            shifted = cameras if shift == (0.0, 0.0) else cameras.looking_past(shift)
            options = {"settings": self.settings, "background": behind, "max_memory": max_memory}
            return render_view(self.field, self.estimator, shifted, index, **options)

        return supersampled(render, self.config.render.eval_rays)
