"""The frame benchmark refuses to time wrong pictures, names its protocol, and says what a large frame took."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from nerfturbo.bench import render as module
from nerfturbo.bench.render import check_frames, render_record, render_table, run_render_benchmark
from nerfturbo.rendering.frame import FrameRenderer
from nerfturbo.rendering.image import RenderedImage
from nerfturbo.rendering.model import NerfModel, SceneBounds

from ..tiny import ball_scene, tiny_config

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_model(device: str = "cpu") -> NerfModel:
    scene = ball_scene("test")
    model = NerfModel(tiny_config(), SceneBounds.of(scene)).to(device)
    with torch.no_grad():
        model.field.encoding.table.normal_(generator=torch.Generator(device).manual_seed(0))
    if device == "cuda":
        model.field.half_table = model.field.encoding.table.detach().half()
    return model


@pytest.mark.parametrize("device", DEVICES)
def test_gates_then_times(device: str):
    model, scene = make_model(device), ball_scene("test")
    result = run_render_benchmark(model, scene, sizes=((16, 16), (20, 12)), repeats=2, large=(40, 24))
    assert result.gate.verdict == "passed" and result.gate.views == len(scene)
    assert [(t.width, t.height, t.way) for t in result.timings] == [
        (16, 16, "frame"), (16, 16, "image"), (20, 12, "frame"), (20, 12, "image"),
    ]  # fmt: skip
    assert all(t.milliseconds > 0.0 for t in result.timings)
    assert result.large is not None and (result.large.extra_bytes is None) == (device == "cpu")
    document = json.loads(json.dumps(asdict(render_record(result, model, scene, repeats=2))))
    assert set(document) == {"what", "command", "commit", "machine", "protocol", "seed", "values"}
    assert "median over 2 frames" in document["protocol"]
    assert render_table(result).row_count == 5


def test_wrong_pictures_are_not_timed(monkeypatch: pytest.MonkeyPatch):
    honest = FrameRenderer.render

    def dimmed(self: FrameRenderer, *args: object, **options: object) -> RenderedImage:
        image = honest(self, *args, **options)  # type: ignore[arg-type]
        return replace(image, rgb=image.rgb * 0.97)

    monkeypatch.setattr(FrameRenderer, "render", dimmed)
    result = run_render_benchmark(make_model(), ball_scene("test"), views=[1], repeats=1)
    assert "pixels differ" in result.gate.verdict
    assert result.timings == () and result.large is None
    assert "pixels differ" in str(render_table(result).title)


def test_a_score_off_by_a_tenth_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "NEAR", 1.0)  # let all pixels pass
    honest = module.plain_image
    monkeypatch.setattr(module, "plain_image", lambda model, rays: honest(model, rays) * 0.9)
    assert "scores differ by" in check_frames(make_model(), ball_scene("test"), [0]).verdict
