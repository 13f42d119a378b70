"""Samples and a field to pixels."""

from .frame import FrameRenderer
from .image import RenderedImage, render_image, render_view
from .losses import color_loss, distortion_loss
from .model import NerfModel, SceneBounds
from .render import MarchSettings, field_functions, ray_marching, render_rays, volume_rendering

__all__ = ["FrameRenderer", "MarchSettings", "NerfModel", "RenderedImage", "SceneBounds", "color_loss"]
__all__ += ["distortion_loss", "field_functions", "ray_marching", "render_image", "render_rays", "render_view"]
__all__ += ["volume_rendering"]
