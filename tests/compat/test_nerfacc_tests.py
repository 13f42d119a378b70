"""scripts/nerfacc_tests.py: a checkout's tests run over our package, each with its result and reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "nerfacc_tests.py"
TESTS = """
import pytest
import torch

import nerfacc
from nerfacc.cuda import ray_pdf_query
from nerfacc.pack import pack_info

device = "cuda:0"


def test_passes():
    indices = torch.tensor([0, 0, 1], device=device)
    assert pack_info(indices, 2).tolist() == [[0, 2], [2, 1]]
    assert nerfacc.__name__.startswith("nerfturbo.")


def test_fails():
    assert pack_info(torch.tensor([0], device='cuda')).tolist() == [[7, 7]]


def test_compiled():
    ray_pdf_query()


@pytest.mark.skip(reason="no scene")
def test_skipped():
    pass
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nerfacc_tests_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_test_has_its_result(script, tmp_path: Path, capsys) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "nerfacc.py").write_text("raise RuntimeError('the checkout, not ours')")
    (tmp_path / "tests" / "test_tiny.py").write_text(TESTS)
    (tmp_path / "tests" / "test_broken.py").write_text("import no_such_module")
    assert script.main([str(tmp_path), "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    lines = dict(line.strip("| ").split(" | ", 1) for line in out.splitlines() if line.startswith("| test_"))
    assert lines["test_tiny::test_passes"] == "passed"
    assert lines["test_tiny::test_fails"].startswith("failed | ") and "[[7, 7]]" in lines["test_tiny::test_fails"]
    assert lines["test_tiny::test_compiled"].startswith("not meant | calls nerfacc's compiled functions")
    assert lines["test_tiny::test_skipped"] == "skipped | no scene"
    assert "No module named 'no_such_module'" in lines["test_broken"]
    assert out.endswith("on cpu: 2 failed, 1 not meant, 1 passed, 1 skipped\n")


def test_what_is_not_meant_to_work_is_no_failure(script, tmp_path: Path, monkeypatch) -> None:
    found = [script.Outcome("a", "passed", ""), script.Outcome("b", "not meant", "why")]
    monkeypatch.setattr(script, "copy_tests", lambda *_: None)
    monkeypatch.setattr(script, "run", lambda *_: found)
    assert script.main([str(tmp_path)]) == 0
    found.clear()
    assert script.main([str(tmp_path)]) == 1  # nothing ran


def test_a_folder_without_tests_is_refused(script, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"tests/test_\*\.py"):
        script.main([str(tmp_path)])
