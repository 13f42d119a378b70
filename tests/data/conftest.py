"""Built-in scenes for tests are kept in a cache of their own: nothing of the user's is read or written."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def _scene_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _private_cache(_scene_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NERFTURBO_CACHE", str(_scene_cache))
