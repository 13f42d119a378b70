"""A scene on disk, a finished run over it, and the command line as a function."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from nerfturbo.cli.main import main
from nerfturbo.data.formats.transforms import write_blender

from ..tiny import TINY_FLAGS, ball_scene


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        return json.loads(self.out)


Nerfturbo = Callable[..., Outcome]


def outcome(capsys: pytest.CaptureFixture[str], command: Callable[[], int]) -> Outcome:
    capsys.readouterr()
    try:
        code = command()
    except SystemExit as end:  # tyro's own way to refuse flags and to show help
        code = end.code if isinstance(end.code, int) else 1
    out, err = capsys.readouterr()
    return Outcome(code, out, err)


@pytest.fixture
def nerfturbo(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nerfturbo:
    """`nerfturbo("train", ...)` in this process, in an empty working directory."""
    (tmp_path / "cwd").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "cwd")

    return lambda *words: outcome(capsys, lambda: main([str(word) for word in words]))


@pytest.fixture(scope="session")
def scene_on_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes") / "ball"
    return write_blender([ball_scene("train"), ball_scene("test", n_views=2)], folder)


@pytest.fixture
def scene(scene_on_disk: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(scene_on_disk, tmp_path / "ball")


@pytest.fixture(scope="session")
def trained(scene_on_disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "trained"
    flags = [*TINY_FLAGS, "--turntable", "2", "--steps", "12", "--save-every", "0.2", "--output", str(folder)]
    assert main(["train", str(scene_on_disk), *flags]) == 0
    return folder


@pytest.fixture
def run_folder(trained: Path, tmp_path: Path) -> Path:
    """A finished run that a test may change."""
    return shutil.copytree(trained, tmp_path / "run")
