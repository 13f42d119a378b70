"""A frame has far fewer rays than samples: torch is fast enough."""

from ..reference.camera_rays import camera_rays

__all__ = ["camera_rays"]
