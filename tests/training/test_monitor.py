"""The GPU monitor against a stand-in for the driver: readings, the hint when the GPU waits, refusals; and what every
process says about its time at the end of a run, in each trainer."""

from __future__ import annotations

import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nerfturbo.data.batches import PixelBatch, PixelSampler
from nerfturbo.ops import use_backend
from nerfturbo.training import callbacks as module
from nerfturbo.training.callbacks import STARVING_SAMPLES, GpuMonitor, open_monitor
from nerfturbo.training.trainer import Trainer, TrainSummary

from ..tiny import ball_scene, tiny_config
from .workers import QUIET


class Refused(Exception):
    pass


def driver(utilisation: float, *, power: bool = True) -> SimpleNamespace:
    def watts(handle: object) -> float:
        if not power:
            raise Refused
        return 312_000.0

    return SimpleNamespace(
        NVMLError=Refused,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=utilisation),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=2_000_000_000),
        nvmlDeviceGetPowerUsage=watts,
    )


def test_there_is_nothing_to_monitor_on_a_cpu() -> None:
    assert open_monitor(torch.device("cpu")) is None


def test_readings_and_what_the_driver_refuses() -> None:
    expected = {"gpu_utilisation": 97.0, "gpu_memory_bytes": 2e9}
    assert GpuMonitor(driver(97.0), None)() == expected | {"gpu_power_watts": 312.0}
    assert GpuMonitor(driver(97.0, power=False), None)() == expected


@pytest.mark.parametrize(("utilisation", "hints"), [(30.0, 1), (95.0, 0)])
def test_a_gpu_that_waits_is_said_once(
    utilisation: float, hints: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "EVERY_SECONDS", 0.0)
    read = GpuMonitor(driver(utilisation), None)
    for _ in range(2 * STARVING_SAMPLES):
        read()
    assert caplog.text.count("it waits for the host") == hints


def run_native(monitor: GpuMonitor | None) -> TrainSummary:
    trainer = Trainer(tiny_config(steps=6), ball_scene())
    trainer.monitor = monitor
    return trainer.fit()


def run_lightning(monitor: GpuMonitor | None, captured: bool) -> TrainSummary:
    pl = pytest.importorskip("lightning.pytorch", reason="lightning is an extra and not installed")
    from nerfturbo.training.lightning import NerfData, NerfModule

    config = tiny_config(steps=6)

    class Watched(NerfModule):
        def on_train_start(self) -> None:
            self._engine.monitor = monitor
            super().on_train_start()

    module = Watched(config, captured=captured)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.Trainer(**QUIET, accelerator="cpu", limit_val_batches=0).fit(module, NerfData(config, (ball_scene(),) * 2))
    assert module.summary is not None
    return module.summary


RUNS: dict[str, Any] = {
    "native": run_native,
    "eager": lambda monitor: run_lightning(monitor, captured=False),
    "captured": lambda monitor: run_lightning(monitor, captured=True),
}


@pytest.mark.parametrize("trainer", RUNS)
def test_a_run_ends_with_what_its_time_went_to(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = PixelSampler.draw

    def slow(self: PixelSampler, *given: Any, **options: Any) -> PixelBatch:
        time.sleep(0.05)
        return draw(self, *given, **options)

    monkeypatch.setattr(module, "EVERY_SECONDS", 0.0)
    with use_backend("reference"):
        (quick,) = RUNS[trainer](None).ranks
        monkeypatch.setattr(PixelSampler, "draw", slow)
        (use,) = RUNS[trainer](GpuMonitor(driver(80.0), None)).ranks
    assert quick["gpu_utilisation"] is None and 0.0 < quick["data_share"] <= 1.0
    assert use["gpu_utilisation"] == 80.0 and use["data_ms"] > 50.0 and use["step_ms"] > 50.0
    assert use["data_share"] == pytest.approx(min(1.0, use["data_ms"] / use["step_ms"]))


def test_an_interrupted_run_says_nothing_of_it() -> None:
    trainer = Trainer(tiny_config(steps=2), ball_scene())
    with use_backend("reference"):
        trainer.begin()
        trainer.advance(1)
        assert trainer.end("interrupted").ranks == () and len(trainer.end().ranks) == 1
