"""The scaling of `benchmarks/distributed.py`: what it writes, and what it says where GPUs are missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import distributed


def told(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["distributed.py", "--parts", "scaling", *map(str, words)])
    distributed.main()


@pytest.mark.parametrize(("n_gpus", "ranks"), [(2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8])])
def test_ranks_double_up_to_the_number_of_gpus(
    n_gpus: int, ranks: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    monkeypatch.setitem(distributed.PARTS, "scaling", lambda args: args.ranks)
    monkeypatch.setattr(distributed, "machine", lambda device: {})
    told(monkeypatch, "--device", "cuda", "--output", tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text())["values"]["scaling"] == ranks


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--parts scaling: expected 2 GPUs or more, got 1; --ranks 1 2 lets ranks share a device"),
        (("--ranks", 0), "--ranks: expected numbers >= 1, got [0]"),
    ],
)
def test_what_is_missing_is_named(
    words: tuple[object, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit) as ended:
        told(monkeypatch, "--device", "cuda", *words)
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_that_share_a_device_are_marked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.json"
    told(monkeypatch, "--quick", "--device", "cpu", "--ranks", 2, "--output", output)
    (row,) = json.loads(output.read_text())["values"]["scaling"]
    assert (row["ranks"], row["backend"], row["ranks_share_a_device"], row["efficiency"]) == (2, "gloo", True, 1.0)
    for way in ("beside the backward", "after the backward"):
        assert row[way]["rays_per_s"] == pytest.approx(row[way]["steps_per_s"] * 128, rel=0.5)
        assert 0.0 <= row[way]["exchange_share"] < 1.0
    assert "2 ranks, gloo, sharing a device, exchange beside the backward: " in capsys.readouterr().out
