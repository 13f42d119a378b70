"""Pictures are encoded behind the scores: all of them are there at the end, and what goes wrong is not lost."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from nerfturbo.cli import finish
from nerfturbo.cli.progress import Display
from nerfturbo.evaluation.evaluate import evaluate, truth_image
from nerfturbo.evaluation.images import comparison
from nerfturbo.evaluation.run_folder import RunFolder, create_run
from nerfturbo.ops import use_backend
from nerfturbo.rendering.model import NerfModel, SceneBounds

from ..tiny import ball_scene, tiny_config

N_VIEWS = 5


@pytest.fixture(autouse=True)
def _reference() -> object:
    with use_backend("reference"):
        yield


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "run", tiny_config())


@pytest.fixture
def model() -> NerfModel:
    return NerfModel(tiny_config(), SceneBounds.of(ball_scene("test")))


def score(run: RunFolder, model: NerfModel) -> dict[str, object]:
    scene = ball_scene("test", n_views=N_VIEWS)
    return finish.score_run(run, model, scene, tiny_config(), limit=None, display=Display())


def test_every_picture_is_written_as_it_was_scored(run: RunFolder, model: NerfModel) -> None:
    (run.images / "test_099.png").write_bytes(b"of an earlier score")
    metrics, scene = score(run, model), ball_scene("test", n_views=N_VIEWS)
    names = [f"test_{index:03d}.{ending}" for index in range(N_VIEWS) for ending in ("jpg", "png")]
    assert sorted(path.name for path in run.images.iterdir()) == names
    for index in range(N_VIEWS):
        expected = comparison(model.render_image(scene.cameras, index).rgb, truth_image(scene, index))
        assert expected.shape == (16, 48, 3) and expected.dtype == torch.uint8
        assert np.array_equal(np.asarray(Image.open(run.view_file(index))), expected.numpy())
    assert metrics["psnr"] == evaluate(model, scene).psnr


def test_threads_write_while_the_next_view_renders(
    run: RunFolder, model: NerfModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers, rendered = set(), threading.Event()

    def slow(path: Path, image: Tensor) -> None:
        writers.add(threading.get_ident())
        assert rendered.wait(30.0)  # the last view is rendered before the first picture is written

    render = model.render_image

    def counted(cameras: object, index: int, *rest: object) -> object:
        if index == N_VIEWS - 1:
            rendered.set()
        return render(cameras, index, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(finish, "WRITERS", N_VIEWS)
    monkeypatch.setattr(finish, "save_image", slow)
    monkeypatch.setattr(model, "render_image", counted)
    score(run, model)
    assert writers and threading.get_ident() not in writers


def test_a_full_disk_is_not_lost_in_a_thread(run: RunFolder, model: NerfModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, image: Tensor) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(finish, "save_image", full)
    with pytest.raises(OSError, match="No space left"):
        score(run, model)


@pytest.mark.parametrize(("seconds", "rendered", "frames"), [(60.0, 24, 4), (0.0, 24, 2)])
def test_the_video_is_tall_enough_to_show(
    run: RunFolder, model: NerfModel, seconds: float, rendered: int, frames: int
) -> None:
    """However small the photos are, and however little time there is."""
    made = finish.write_turntable(run, model, ball_scene(), 4, seconds=seconds, display=Display())
    assert made is not None and made["size"] == [480, 480] and made["rendered_size"] == [rendered, rendered]
    assert made["path"] == "orbit" and made["frames"] == frames and (run.path / made["file"]).is_file()
    assert finish.write_turntable(run, model, ball_scene(), 0, seconds=seconds, display=Display()) is None


def test_an_interrupt_ends_the_threads(run: RunFolder, model: NerfModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    before = threading.active_count()
    monkeypatch.setattr(finish, "measure_baselines", interrupted)
    with pytest.raises(KeyboardInterrupt):
        score(run, model)
    assert threading.active_count() == before
