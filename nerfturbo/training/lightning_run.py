"""A native trainer driven by Lightning's loop: what `nerfturbo train --trainer lightning` runs."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

from .trainer import Trainer, TrainSummary


def fit_with_lightning(engine: Trainer) -> TrainSummary:
    """`engine.fit()` under `lightning.Trainer`, with its callbacks; several ranks become Lightning's DDP."""
    from .lightning import NerfData, NerfModule, pl

    team: dict[str, Any] = {"devices": 1}
    if not engine.team.alone:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        team = {"devices": local, "num_nodes": max(1, engine.team.world // local), "strategy": "ddp"}
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.ERROR)  # its advertisements; ours is the display
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = pl.Trainer(
                accelerator="gpu" if engine.device.type == "cuda" else "cpu",
                max_epochs=-1,
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=False,
                limit_val_batches=0,  # the session scores the test views; here it would render every training view
                logger=False,
                **team,
            )
            trainer.fit(NerfModule(engine.config, engine=engine), NerfData(engine.config, (engine.scene, engine.scene)))
    finally:
        log.setLevel(level)
    return engine.end(engine.stop_reason)
