"""One step, and what drives it."""

from .checkpoint import latest_checkpoint, list_checkpoints
from .trainer import Trainer, TrainSummary, load_model

__all__ = ["TrainSummary", "Trainer", "latest_checkpoint", "list_checkpoints", "load_model"]
