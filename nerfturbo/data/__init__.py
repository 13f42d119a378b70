"""Pictures and cameras to rays: conventions, cameras, images, scenes and their loaders, batches of pixels."""

from .batches import PixelBatch, PixelSampler
from .cameras import Cameras
from .images import ImagePool, composite_over, decode_image
from .options import LoadOptions
from .scene import Scene, hold_out, load_scene

__all__ = ["Cameras", "ImagePool", "LoadOptions", "PixelBatch", "PixelSampler", "Scene", "composite_over"]
__all__ += ["decode_image", "hold_out", "load_scene"]
