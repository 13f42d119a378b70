"""On a CPU a batch is a few thousand pixels: plain torch is fast enough."""

from ..reference.draw_pixels import draw_pixels

__all__ = ["draw_pixels"]
