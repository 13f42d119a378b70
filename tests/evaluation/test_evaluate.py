"""Scoring a test set: which views, over what background, against which truth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nerfturbo.evaluation.evaluate import PREVIEW_WIDTH, Preview, choose_views, evaluate, truth_image
from nerfturbo.evaluation.metrics import psnr
from nerfturbo.evaluation.results import evaluation_metrics, measure_baselines
from nerfturbo.ops import use_backend
from nerfturbo.rendering.model import NerfModel, SceneBounds

from ..tiny import ball_scene, tiny_config


@pytest.fixture(autouse=True)
def _reference() -> object:
    with use_backend("reference"):
        yield


@pytest.fixture
def empty_model() -> NerfModel:
    """Renders the background and nothing else, so that scores have a closed form."""
    model = NerfModel(tiny_config(), SceneBounds.of(ball_scene("test")))
    model.grid.set_occupied(torch.zeros(1, 8, 8, 8, dtype=torch.bool))
    return model


def test_choose_views() -> None:
    assert choose_views(5) == [0, 1, 2, 3, 4]
    assert choose_views(5, 9) == [0, 1, 2, 3, 4]
    assert choose_views(200, 10) == list(range(0, 200, 20))


def test_truth_is_over_white_unless_said() -> None:
    scene = ball_scene("test")
    assert torch.equal(truth_image(scene, 0)[0, 0], torch.ones(3))  # a corner is transparent
    assert torch.equal(truth_image(scene, 0, (0.0, 0.5, 1.0))[0, 0], torch.tensor([0.0, 0.5, 1.0]))


def test_scores_of_a_known_render(empty_model: NerfModel) -> None:
    scene = ball_scene("test", n_views=3)
    seen: list[tuple[int, int]] = []
    result = evaluate(empty_model, scene, on_view=lambda done, total, *rest: seen.append((done, total)))
    expected = [psnr(torch.ones(16, 16, 3), truth_image(scene, index)) for index in range(3)]
    assert [view.psnr for view in result.views] == pytest.approx(expected, abs=1e-4)
    assert result.psnr == pytest.approx(sum(expected) / 3, abs=1e-4)
    assert result.ssim is not None and 0.0 < result.ssim < 1.0
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_the_background_is_behind_both_pictures(empty_model: NerfModel) -> None:
    scene = ball_scene("test", n_views=1)
    black = evaluate(empty_model, scene, background=(0.0, 0.0, 0.0), with_ssim=False)
    truth = truth_image(scene, 0, (0.0, 0.0, 0.0))
    assert black.psnr == pytest.approx(psnr(torch.zeros(16, 16, 3), truth), abs=1e-4)
    assert black.ssim is None


def test_metrics_name_the_protocol(empty_model: NerfModel) -> None:
    scene = ball_scene("test", n_views=4)
    views = choose_views(4, 2)
    result = evaluate(empty_model, scene, views=views)
    config = tiny_config(seed=3)
    config = replace(config, data=replace(config.data, source="builtin:ball"))
    metrics = evaluation_metrics(result, config, scene, measure_baselines(scene, views))
    protocol = metrics["protocol"]
    assert protocol["split"] == "test" and protocol["n_views"] == 2 and protocol["views"] == "2 of 4, evenly spaced"
    assert protocol["background"] == "white" and protocol["resolution"] == [16, 16] and protocol["seeds"] == [3]
    assert "none" in protocol["rounding"] and "evaluation" in protocol["time_includes"]
    assert [view["index"] for view in metrics["per_view"]] == [0, 2]
    # The best constant colour can only beat plain white.
    assert metrics["baselines"]["constant_psnr"] >= metrics["psnr"] - 1e-4


def test_small_pictures_have_no_ssim(empty_model: NerfModel) -> None:
    assert evaluate(empty_model, ball_scene("test", n_views=1, size=8)).ssim is None


def test_preview_scores_the_pixels_it_renders(empty_model: NerfModel, tmp_path: Path) -> None:
    from PIL import Image

    scene = ball_scene("test", n_views=1)
    path = tmp_path / "preview.png"
    value = Preview(scene).render(empty_model, path)
    assert value == pytest.approx(psnr(torch.ones(16, 16, 3), truth_image(scene, 0)), abs=1e-4)
    assert Image.open(path).size == (32, 16)
    assert [file.name for file in tmp_path.iterdir()] == ["preview.png"]


def test_a_preview_of_a_large_photo_fits_a_screen(empty_model: NerfModel, tmp_path: Path) -> None:
    from PIL import Image

    scene = ball_scene("test", n_views=1, size=2000)
    Preview(scene).render(empty_model, tmp_path / "preview.png")
    width, height = Image.open(tmp_path / "preview.png").size
    assert 1000 < width <= PREVIEW_WIDTH and width == 2 * height


def test_a_preview_looks_through_the_lens_at_its_own_pixels_alone(tmp_path: Path) -> None:
    from nerfturbo.data.cameras import Cameras

    scene = ball_scene("test", n_views=2, size=128)  # 16384 pixels, of which a first preview looks at every fourth
    lens = torch.tensor([[-0.3, 0.02, 0.01, 0.0, 0.0, 0.0, 0.0, 0.0]]).expand(2, 8)
    plain = scene.cameras
    cameras = Cameras(
        plain.camera_to_world, plain.focal, plain.center, plain.size, model="opencv", distortion=lens.contiguous()
    )
    scene = replace(scene, cameras=cameras)
    model = NerfModel(tiny_config(), SceneBounds.of(scene))
    with torch.no_grad():  # dense enough that what is seen differs from pixel to pixel
        model.field.encoding.table.uniform_(-3.0, 3.0, generator=torch.Generator().manual_seed(0))  # type: ignore[union-attr, operator]
    inverted = 0
    rays = Cameras.rays

    def counted(cameras: Cameras, index: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> object:
        nonlocal inverted
        inverted += x.shape[0]
        return rays(cameras, index, x, y)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cameras, "rays", counted)
        value = Preview(scene, 1).render(model, tmp_path / "preview.png")
    assert inverted == 64 * 64
    image = model.render_image(cameras, 1).rgb[1::2, 1::2]
    truth = truth_image(scene, 1)[1::2, 1::2]
    assert float(image.std()) > 0.01 and value == pytest.approx(psnr(image, truth), abs=1e-3)
