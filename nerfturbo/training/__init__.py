"""One step, and what drives it."""

from .checkpoint import latest_checkpoint, list_checkpoints
from .precision import MixedPrecision
from .trainer import Trainer, TrainSummary, load_model

__all__ = ["MixedPrecision", "TrainSummary", "Trainer", "latest_checkpoint", "list_checkpoints", "load_model"]
