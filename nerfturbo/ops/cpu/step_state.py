"""A few scalars: plain torch is fast enough."""

from ..reference.step_state import record_step

__all__ = ["record_step"]
