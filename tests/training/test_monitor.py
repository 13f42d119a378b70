"""The GPU monitor against a stand-in for the driver: readings, the hint when the GPU waits, refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nerfturbo.training import callbacks as module
from nerfturbo.training.callbacks import STARVING_SAMPLES, GpuMonitor, open_monitor


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
