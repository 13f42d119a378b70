"""`nerfturbo inspect`: the numbers are those of the renderer."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from nerfturbo.evaluation.inspect import RayReport, draw_report, inspect_ray
from nerfturbo.ops import use_backend
from nerfturbo.rendering.model import NerfModel, SceneBounds

from ..tiny import ball_scene, tiny_config
from .conftest import Nerfturbo

REFERENCE = ["--backend", "reference"]


def test_the_ray_is_the_pixel_that_the_renderer_gives() -> None:
    scene = ball_scene()
    model = NerfModel(tiny_config(), SceneBounds.of(scene))
    with torch.no_grad():
        model.field.encoding.table.uniform_(-2.0, 2.0, generator=torch.Generator().manual_seed(0))
    model.grid.bits[::3] = 0
    with use_backend("reference"):
        image = model.render_image(scene.cameras, 1, torch.zeros(3))
        for column, row in ((8, 8), (3, 11)):
            report = inspect_ray(model, scene.cameras, 1, column, row)
            assert report.opacity == pytest.approx(float(image.opacity[row, column]), abs=1e-4)
            assert report.color == pytest.approx(image.rgb[row, column].tolist(), abs=1e-4)
            assert report.depth == pytest.approx(float(image.depth[row, column]), abs=1e-3)
            assert 0 < sum(report.occupied) < len(report.t) and report.missed_opacity >= 0.0


def test_a_picture_and_a_file(nerfturbo: Nerfturbo, run_folder: Path) -> None:
    from PIL import Image

    result = nerfturbo("inspect", run_folder, "--view", 1, "--pixel", "7,8", "--output", "a.png", *REFERENCE)
    assert result.code == 0 and "a.json" in result.out
    document = json.loads(Path("a.json").read_text())
    assert document["pixel"] == [7, 8] and len(document["t"]) == len(document["weight"]) > 5
    assert Image.open("a.png").size[0] == 900


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--view", "9"], "--view: expected 0 to 1"),
        (["--pixel", "99,0"], "--pixel: expected 0,0 to 15,15"),
        (["--pixel", "a"], "X,Y"),
        (["--output", "a.jpg"], ".png"),
    ],
)
def test_bad_flags(nerfturbo: Nerfturbo, run_folder: Path, flags: list[str], says: str) -> None:
    result = nerfturbo("inspect", run_folder, *flags, *REFERENCE)
    assert result.code == 2 and says in result.err and not list(Path(".").iterdir())


def test_a_surface_is_seen_before_a_hundred_times_denser_inside(tmp_path: Path) -> None:
    from PIL import Image

    n = 100
    density = [0.0] * 40 + [50.0] * 20 + [5000.0] * 39 + [math.nan]
    report = RayReport(
        [0.0] * 3, [0.0, 0.0, 1.0], [float(i) for i in range(n)], [1.0] * n, density, [i >= 40 for i in range(n)],
        [40 <= i < 60 for i in range(n)], [1.0] * n, [0.0] * n, [[0.0] * 3] * n, [0.0] * 3, 1.0, 45.0, 0.0,
    )  # fmt: skip
    draw_report(report, tmp_path / "ray.png", "a ray")
    picture = np.asarray(Image.open(tmp_path / "ray.png").convert("RGB")).astype(int)
    blue = (picture[64:214, :, 2] - picture[64:214, :, 0]) > 100  # the curve, in the panel of densities
    heights = [150 - int(np.flatnonzero(blue[:, x])[0]) for x in (70 + 810 * 50 // 99, 70 + 810 * 80 // 99)]
    assert 0.55 * 150 < heights[0] < 0.8 * 150 and heights[1] > 0.95 * 150, heights
