"""Loggers are functions of one entry: files, TensorBoard, the console; saves and stops are callbacks of the loop."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from nerfturbo.data.images import save_image
from nerfturbo.errors import InputError
from nerfturbo.ops import use_backend
from nerfturbo.training import Trainer
from nerfturbo.training.callbacks import (
    MetricsLog,
    every,
    jsonl_logger,
    save_checkpoints,
    stop_at_psnr,
    tensorboard_logger,
    wandb_logger,
)

from ..tiny import ball_scene, tiny_config


@pytest.fixture(autouse=True)
def _reference() -> object:
    with use_backend("reference"):
        yield


def test_one_log_feeds_every_logger(tmp_path: Path) -> None:
    entries: list[dict] = []
    loggers = [jsonl_logger(tmp_path / "log.jsonl"), entries.append]
    log = MetricsLog(every_steps=2, loggers=loggers)
    Trainer(tiny_config(steps=4), ball_scene(), callbacks=[log]).fit()
    assert [entry["step"] for entry in entries] == [1, 2, 4]
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == entries
    assert {"gradient_norm", "loss_scale", "skipped"} <= set(entries[0]) and entries[0]["gradient_norm"] > 0.0


def test_a_log_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write = jsonl_logger(tmp_path / "missing" / "log.jsonl")
    for _ in range(3):
        write({"kind": "step", "step": 1})
    assert caplog.text.count("cannot be written") == 1


def test_tensorboard_gets_curves_and_pictures(tmp_path: Path) -> None:
    event_file = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    save_image(tmp_path / "preview.png", torch.rand(8, 12, 3))
    log = MetricsLog(every_steps=2, loggers=[tensorboard_logger(tmp_path / "board")])
    trainer = Trainer(tiny_config(steps=4), ball_scene(), callbacks=[log])
    trainer.fit()
    log.add_preview(trainer, 21.5, tmp_path / "preview.png")
    log.add_event(trainer, "words are no curve")
    events = event_file.EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert {"step/loss", "step/psnr", "preview/psnr"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("step/loss")] == [1, 2, 4]
    picture = events.Images("preview")[0]
    assert (picture.width, picture.height) == (12, 8)


def test_a_logger_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r"logger wandb: expected the package wandb.*pip install wandb"):
        wandb_logger("run")


def test_training_stops_at_a_psnr(tmp_path: Path) -> None:
    scores = iter([10.0, 19.9, 20.0, 30.0])
    trainer = Trainer(tiny_config(steps=20), ball_scene())
    trainer.callbacks.append(every(2, stop_at_psnr(20.0, lambda _: next(scores))))
    summary = trainer.fit()
    assert (summary.stopped_by, summary.steps) == ("target psnr", 6)


def test_a_save_that_fails_does_not_end_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    saving = every(1, save_checkpoints(tmp_path / "checkpoints"))
    trainer = Trainer(tiny_config(steps=2), ball_scene(), callbacks=[saving])
    assert trainer.fit().stopped_by == "steps"
    assert "could not be saved" in caplog.text and "training goes on" in caplog.text
