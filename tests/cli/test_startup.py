"""What the command line does beside its work: imports in a thread while the device trains."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from nerfturbo.cli.startup import import_meanwhile

CUDA = torch.device("cuda")  # names it; nothing is placed there


def test_what_is_needed_later_is_imported_when_the_block_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "imported_meanwhile"
    package.mkdir()
    (package / "__init__.py").write_text("import time\ntime.sleep(0.2)\n")
    (package / "part.py").write_text("import sys\nSWITCH = sys.getswitchinterval()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = sys.getswitchinterval()
    with import_meanwhile(CUDA, "imported_meanwhile.part"):
        assert "imported_meanwhile.part" not in sys.modules
    assert 0.1 * before > sys.modules["imported_meanwhile.part"].SWITCH  # the loop did not wait for it
    assert sys.getswitchinterval() == before


def test_a_failing_import_is_left_to_who_needs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fails_meanwhile.py").write_text("raise OSError('no')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = sys.getswitchinterval()
    with import_meanwhile(CUDA, "fails_meanwhile"):
        pass
    assert sys.getswitchinterval() == before
    with pytest.raises(OSError, match="no"):
        __import__("fails_meanwhile")


def test_nothing_is_imported_on_a_cpu_or_where_it_is_missing() -> None:
    with import_meanwhile(torch.device("cpu"), "wsgiref.headers"):
        pass
    assert "wsgiref.headers" not in sys.modules
    with import_meanwhile(CUDA, "no_such_package.anything"):
        pass
