"""Samples and a field to pixels."""

from .image import RenderedImage, render_image
from .losses import color_loss
from .model import NerfModel, SceneBounds
from .render import MarchSettings, field_functions, ray_marching, render_rays, volume_rendering

__all__ = [
    "MarchSettings",
    "NerfModel",
    "RenderedImage",
    "SceneBounds",
    "color_loss",
    "field_functions",
    "ray_marching",
    "render_image",
    "render_rays",
    "volume_rendering",
]
