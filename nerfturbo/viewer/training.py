"""The live page as a callback of training."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from ..errors import CheckpointError
from ..training.callbacks import MetricsLog
from ..training.step import StepRecord
from ..training.trainer import Trainer
from .page import LivePage

LOG = logging.getLogger("nerfturbo")


class ViewedTraining:
    """Paints between steps, pauses and saves. Nothing that goes wrong with the page ends training."""

    def __init__(self, page: LivePage, log: MetricsLog, checkpoints: Path) -> None:
        self.page, self._log, self._checkpoints = page, log, checkpoints
        self._broken = False

    def __call__(self, trainer: Trainer, record: StepRecord) -> None:
        if self._broken:
            return
        try:
            self._tick(trainer, training=True)
            if self.page.wishes.paused:
                self._wait(trainer)
        except CheckpointError as error:
            LOG.warning("%s; training goes on", error)
        except Exception as error:
            self._broken = True
            LOG.warning("the live page stopped (%s: %s); training goes on", type(error).__name__, error)

    def _tick(self, trainer: Trainer, *, training: bool) -> bool:
        if self.page.wishes.take_save():
            with trainer.clock_stopped():
                path = trainer.save(self._checkpoints)
            LOG.info("saved %s, as the live page asked", path)
        return self.page.tick(trainer.model, trainer.step, training=training, records=self._log.records)

    def _wait(self, trainer: Trainer) -> None:
        """Until the page says to go on, or Ctrl-C; the clock of training stands still."""
        LOG.info("paused by the live page at step %d", trainer.step)
        with trainer.clock_stopped():
            while self.page.wishes.paused and not trainer.should_stop:
                if not self._tick(trainer, training=False):
                    time.sleep(0.01)
        LOG.info("training goes on")
