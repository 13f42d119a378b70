"""`doctor`: each known cause is named from faked facts; on this machine it passes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nerfturbo.bench import gate
from nerfturbo.bench.gate import CALLS, Draw, basic_cases
from nerfturbo.cli import doctor
from nerfturbo.cli.doctor import Cache, Facts, Finding, Gpu, Probes, diagnose, gather, writing_problem

from .conftest import Nerfturbo

SELF_TESTS = list(basic_cases(Draw(seed=0, small=16)))
HEALTHY = Facts(
    python=(3, 11, 0),
    system="Linux x86_64",
    processor="a processor",
    cores=8,
    memory_bytes=1 << 34,
    cpu_bf16=False,
    torch="2.11.0",
    torch_error=None,
    torch_cuda="12.8",
    torch_hip=None,
    gpu_error=None,
    gpus=(Gpu("A GPU", (9, 0), 1 << 36),),
    nvidia_present=True,
    driver_cuda=(12, 8),
    visible_devices=None,
    foreign_cuda=(),
    triton="3.6.0",
    numba="0.61",
    video=True,
    caches=(Cache("numba", "/cache", "NUMBA_CACHE_DIR", None),),
)
NO_GPU = replace(HEALTHY, gpus=())


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted Triton kernels have their own tests, and take their time."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def problems(facts: Facts) -> list[Finding]:
    return [finding for finding in diagnose(facts) if finding.level in ("warning", "broken")]


def test_a_healthy_machine_has_no_problems() -> None:
    assert problems(HEALTHY) == []
    text = " ".join(finding.detail for finding in diagnose(HEALTHY))
    assert "compute capability 9.0" in text and "bf16" in text and "CUDA 12.8" in text


def test_a_machine_without_a_gpu_is_healthy_too() -> None:
    assert problems(replace(NO_GPU, nvidia_present=False, driver_cuda=None, torch_cuda=None, triton=None)) == []


@pytest.mark.parametrize(
    ("facts", "level", "cause", "fix"),
    [
        (replace(NO_GPU, torch_cuda=None), "warning", "cpu-only torch", "CUDA build"),
        (replace(NO_GPU, torch_cuda="13.0"), "warning", "driver too old", "CUDA 12.8 or older"),
        (replace(NO_GPU, torch_cuda="12.9"), "warning", "driver too old", "update the NVIDIA driver"),
        (replace(NO_GPU, driver_cuda=None), "warning", "no driver", "--gpus all"),
        (replace(NO_GPU, visible_devices=""), "warning", "gpu hidden", "unset CUDA_VISIBLE_DEVICES"),
        (replace(NO_GPU, visible_devices="-1"), "warning", "gpu hidden", "unset CUDA_VISIBLE_DEVICES"),
        (replace(NO_GPU, foreign_cuda=("/x/libcudart.so.11",)), "warning", "foreign cuda libraries", "LD_LIBRARY_PATH"),
        (replace(HEALTHY, foreign_cuda=("/x/libcudnn.so.8",)), "warning", "foreign cuda libraries", "LD_LIBRARY_PATH"),
        (NO_GPU, "warning", "gpu unusable", "nvidia-smi"),
        (replace(HEALTHY, triton=None), "broken", "triton missing", "pip install triton"),
        (replace(HEALTHY, gpus=(Gpu("old", (6, 1), 1 << 33),)), "warning", "gpu too old", "--backend reference"),
        (replace(HEALTHY, numba=None), "warning", "numba missing", "pip install numba"),
        (replace(HEALTHY, python=(3, 10, 0)), "broken", "python too old", "3.11"),
        (replace(HEALTHY, torch="2.9.1"), "broken", "torch too old", "torch>=2.11"),
        (replace(NO_GPU, torch=None, torch_cuda=None), "broken", "torch missing", "pip install torch"),
        (
            replace(NO_GPU, torch=None, torch_error="undefined symbol", foreign_cuda=("/x/libcublas.so.12",)),
            "broken",
            "foreign cuda libraries",
            "unset LD_LIBRARY_PATH",
        ),
        (
            replace(HEALTHY, caches=(Cache("triton", "/c", "TRITON_CACHE_DIR", "Read-only file system"),)),
            "warning",
            "cache not writable",
            "TRITON_CACHE_DIR",
        ),
    ],
)
def test_causes(facts: Facts, level: str, cause: str, fix: str) -> None:
    found = problems(facts)
    assert [(finding.level, finding.cause) for finding in found] == [(level, cause)], found
    assert fix in found[0].fix


def test_what_torch_said_is_passed_on() -> None:
    (found,) = problems(replace(NO_GPU, gpu_error="CUDA unknown\nerror 999"))
    assert "CUDA unknown error 999" in found.detail


@pytest.mark.parametrize(
    ("capability", "units"),
    [((6, 1), "no tensor cores"), ((7, 5), "fp16"), ((8, 0), "bf16"), ((8, 9), "fp8"), ((9, 0), "fp8")],
)
def test_units_follow_the_compute_capability(capability: tuple[int, int], units: str) -> None:
    assert units in Gpu("", capability, 1).units
    assert ("bf16" in Gpu("", capability, 1).units) == (capability >= (8, 0))


def fake_torch(cuda: str | None, available: bool = False) -> Any:
    properties = SimpleNamespace(name="A GPU", major=8, minor=6, total_memory=1 << 33)
    gpu = SimpleNamespace(
        is_available=lambda: available, device_count=lambda: 1, get_device_properties=lambda index: properties
    )
    return SimpleNamespace(__version__="2.11.0", version=SimpleNamespace(cuda=cuda, hip=None), cuda=gpu)


def test_probes_feed_the_facts(tmp_path: Path) -> None:
    (tmp_path / "libcudart.so.11.0").touch()
    (tmp_path / "libsomething.so").touch()
    probes = Probes(
        environ={"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}", "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0"},
        exists=lambda path: path == "/dev/nvidia0",
        run=lambda command: None,
        driver_version=lambda: 12040,
        import_torch=lambda: fake_torch("12.8"),
        installed={"numba": "0.61"}.get,
    )
    facts = gather(probes)
    assert facts.nvidia_present and facts.driver_cuda == (12, 4) and facts.torch_cuda == "12.8"
    assert facts.foreign_cuda == (f"{tmp_path}/libcudart.so.11.0",)
    assert (facts.triton, facts.numba, facts.visible_devices) == (None, "0.61", "0")
    assert [finding.cause for finding in problems(facts)] == ["driver too old"]


def test_nvidia_smi_also_shows_a_gpu() -> None:
    probes = Probes(exists=lambda path: False, run=lambda command: "GPU 0", import_torch=lambda: fake_torch(None))
    assert [f.cause for f in problems(gather(probes)) if f.what == "gpu"] == ["cpu-only torch"]


def test_gpus_are_listed() -> None:
    facts = gather(Probes(import_torch=lambda: fake_torch("12.8", available=True)))
    assert facts.gpus == (Gpu("A GPU", (8, 6), 1 << 33),)


def test_a_torch_that_does_not_import_is_a_finding_not_a_crash() -> None:
    def broken() -> Any:
        raise ImportError("libtorch_cpu.so: undefined symbol")

    facts, findings = doctor.examine(Probes(import_torch=broken))
    assert facts.torch is None
    assert [(f.level, f.what) for f in findings if f.level == "broken"] == [("broken", "torch")]


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert writing_problem(tmp_path / "new" / "folder") is None
    assert "not a folder" in str(writing_problem(tmp_path / "file" / "cache"))


def test_this_machine(nerfturbo: Nerfturbo) -> None:
    result = nerfturbo("doctor", "--json")
    assert result.code == 0 and result.json["usable"] is True
    backends = {finding["what"]: finding for finding in result.json["findings"] if " on " in finding["what"]}
    assert "reference on cpu" in backends
    assert all(finding["level"] == "ok" for finding in backends.values()), backends
    shown = nerfturbo("doctor")
    assert shown.code == 0 and "This machine can train." in shown.out


def test_a_wrong_kernel_is_found(nerfturbo: Nerfturbo, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in SELF_TESTS if case.op == "spherical_harmonics")
    calls, right = list[int](), CALLS[case.op]

    def wrong(inputs: SimpleNamespace) -> torch.Tensor:
        calls.append(1)
        return right(inputs) * (1.0 if len(calls) % 2 else 1.1)

    monkeypatch.setitem(CALLS, case.op, wrong)
    monkeypatch.setattr(gate, "basic_cases", lambda draw: [case])
    result = nerfturbo("doctor", "--json")
    assert result.code == 1 and result.json["usable"] is False
    causes = {finding["cause"] for finding in result.json["findings"] if finding["level"] == "broken"}
    assert causes == {"self-test failed"}


def test_a_kernel_that_raises_is_found(nerfturbo: Nerfturbo, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(inputs: SimpleNamespace) -> torch.Tensor:
        raise RuntimeError("device kernel image is invalid")

    case = SELF_TESTS[0]
    monkeypatch.setitem(CALLS, case.op, raises)
    monkeypatch.setattr(gate, "basic_cases", lambda draw: [case])
    result = nerfturbo("doctor", "--json")
    broken = [finding["detail"] for finding in result.json["findings"] if finding["level"] == "broken"]
    assert result.code == 1 and all("RuntimeError: device kernel image is invalid" in detail for detail in broken)


def test_json_is_one_object(nerfturbo: Nerfturbo) -> None:
    document = json.loads(nerfturbo("doctor", "--json").out)
    assert {"usable", "findings", "facts"} == set(document)
