"""nerfturbo as a method of nerfstudio:

    ns-train nerfturbo --data FOLDER
    ns-train nerfturbo --pipeline.model.bounded True blender-data --data FOLDER

nerfstudio reads the data, owns the optimizer and the viewer; samples, field, grid and loss are nerfturbo's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.configs.base_config import ViewerConfig
from nerfstudio.data.datamanagers.base_datamanager import VanillaDataManagerConfig
from nerfstudio.data.dataparsers.nerfstudio_dataparser import NerfstudioDataParserConfig
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackAttributes, TrainingCallbackLocation
from nerfstudio.engine.optimizers import AdamOptimizerConfig
from nerfstudio.engine.schedulers import ExponentialDecaySchedulerConfig
from nerfstudio.engine.trainer import TrainerConfig
from nerfstudio.model_components.renderers import RGBRenderer
from nerfstudio.models.base_model import Model, ModelConfig
from nerfstudio.pipelines.base_pipeline import VanillaPipelineConfig
from nerfstudio.plugins.types import MethodSpecification
from nerfstudio.utils import colormaps
from torch import Tensor
from torchmetrics.functional.image import structural_similarity_index_measure

from nerfturbo import Aabb, Rays, preset
from nerfturbo.data.batches import PixelBatch
from nerfturbo.data.cameras import PIXEL_RADIUS
from nerfturbo.data.images import composite_over
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.training.loss import StepResult, compute_loss, draw_background, update_grid

STEPS, RAYS = 20_000, 8192


@dataclass
class NerfturboModelConfig(ModelConfig):
    """What can be set as --pipeline.model.NAME."""

    _target: type = field(default_factory=lambda: NerfturboModel)
    preset: str = "auto"
    """A preset of nerfturbo; auto: proposal networks, or Instant-NGP where the scene is bounded."""
    bounded: bool = False
    """Whether everything lies inside the scene box: an object, without surroundings."""
    near_plane: float = 0.02
    """Distance at which rays begin."""
    levels: int = 7
    """Doublings of the scene box that an unbounded scene reaches."""
    enable_collider: bool = False


class NerfturboModel(Model):
    config: NerfturboModelConfig

    def populate_modules(self) -> None:
        super().populate_modules()
        own, device = self.config, "cuda" if torch.cuda.is_available() else "cpu"
        usual = ("ngp" if own.bounded else "proposal") + ("" if device == "cuda" else "-cpu")
        config = preset(usual if own.preset == "auto" else own.preset, device)
        low, high = self.scene_box.aabb.tolist()
        box = Aabb((low[0], low[1], low[2]), (high[0], high[1], high[2]))
        if not own.bounded:
            config = replace(config, grid=replace(config.grid, levels=own.levels, contraction="cube"))
        reach = 1.0 if own.bounded else 2.0 ** (own.levels - 1)
        self.nerf = NerfModel(config, SceneBounds(box, own.near_plane, 2.0 * reach * box.diagonal))
        self.renderer_rgb = RGBRenderer(background_color="white")  # what nerfstudio's exports ask for
        self.step = 0

    def get_param_groups(self) -> dict[str, list[torch.nn.Parameter]]:
        return {"fields": [value for value in self.nerf.parameters() if value.requires_grad]}

    def get_training_callbacks(
        self, training_callback_attributes: TrainingCallbackAttributes
    ) -> list[TrainingCallback]:
        def begin(step: int) -> None:
            self.step = step
            if step % self.nerf.grid.config.update_every == 0:
                with torch.no_grad():
                    update_grid(self.nerf, step)

        return [TrainingCallback([TrainingCallbackLocation.BEFORE_TRAIN_ITERATION], begin, update_every_num_iters=1)]

    def get_outputs(self, ray_bundle: RayBundle) -> dict[str, Any]:  # type: ignore[override]
        given = ray_bundle.flatten()
        rays = Rays(
            given.origins.contiguous(),
            torch.nn.functional.normalize(given.directions, dim=-1),
            times=None if given.times is None else given.times[:, 0],
            pixel_radii=given.pixel_area[:, 0].sqrt() * PIXEL_RADIUS,
        )
        if self.training:  # samples depend on what the pixels show: see `_compared`
            return {"rays": rays}
        out = self.nerf.render_rays(rays, torch.ones(3, device=rays.origins.device))
        return {"rgb": out.rgb.float(), "accumulation": out.opacity[:, None], "depth": out.depth[:, None]}

    def _compared(self, outputs: dict[str, Any], batch: dict[str, Tensor]) -> StepResult:
        """What the chain of nerfturbo's own trainers makes of the batch, once."""
        if "compared" not in outputs:
            pixels = PixelBatch(outputs["rays"], batch["image"].to(self.device).float())
            background = draw_background(self.nerf.config, self.step, len(pixels.rays), self.device)
            if self.config.bounded and pixels.rgba.shape[1] == 3:  # an object that was put over white
                background = torch.ones_like(background)
            outputs["compared"] = compute_loss(self.nerf, pixels, background, step=self.step)
        return outputs["compared"]

    def get_metrics_dict(self, outputs: dict[str, Any], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if "rays" not in outputs:
            return {"psnr": _psnr((outputs["rgb"] - self._over_white(batch)).square().mean())}
        found = self._compared(outputs, batch)
        return {"psnr": _psnr(found.mse), "num_samples_per_batch": found.n_samples}

    def get_loss_dict(
        self, outputs: dict[str, Any], batch: dict[str, Tensor], metrics_dict: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        if "rays" not in outputs:
            return {"rgb_loss": (outputs["rgb"] - self._over_white(batch)).square().mean()}
        return {"loss": self._compared(outputs, batch).loss}

    def _over_white(self, batch: dict[str, Tensor]) -> Tensor:
        image = batch["image"].to(self.device).float()
        return composite_over(image, torch.ones(3, device=self.device))

    def get_image_metrics_and_images(
        self, outputs: dict[str, Tensor], batch: dict[str, Tensor]
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        truth, found = self._over_white(batch), outputs["rgb"]
        first, second = (image.movedim(-1, 0)[None] for image in (found, truth))
        scores = {"psnr": float(_psnr((found - truth).square().mean()))}
        scores["ssim"] = float(structural_similarity_index_measure(first, second, data_range=1.0))
        shown = {"img": torch.cat([truth, found], dim=1)}
        shown["accumulation"] = colormaps.apply_colormap(outputs["accumulation"])
        shown["depth"] = colormaps.apply_depth_colormap(outputs["depth"], accumulation=outputs["accumulation"])
        return scores, shown


def _psnr(mse: Tensor) -> Tensor:
    return -10.0 * torch.log10(mse.clamp(min=1e-12))


METHOD = MethodSpecification(
    TrainerConfig(
        method_name="nerfturbo",
        steps_per_eval_batch=500,
        steps_per_save=2000,
        max_num_iterations=STEPS,
        mixed_precision=True,
        pipeline=VanillaPipelineConfig(
            datamanager=VanillaDataManagerConfig(
                dataparser=NerfstudioDataParserConfig(), train_num_rays_per_batch=RAYS, eval_num_rays_per_batch=RAYS
            ),
            model=NerfturboModelConfig(eval_num_rays_per_chunk=1 << 14),
        ),
        optimizers={
            "fields": {
                "optimizer": AdamOptimizerConfig(lr=1e-2, eps=1e-15),
                "scheduler": ExponentialDecaySchedulerConfig(lr_final=1e-3, max_steps=STEPS),
            }
        },
        viewer=ViewerConfig(num_rays_per_chunk=1 << 14),
        vis="viewer",
    ),
    description="nerfturbo: proposal networks or Instant-NGP; nothing is compiled at install",
)
