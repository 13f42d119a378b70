"""Notebooks: stills with sliders, a bar below the cell, and the example that leads from photos to a mesh."""

from __future__ import annotations

import base64
import html
import importlib.util
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import nerfturbo
from nerfturbo.errors import InputError
from nerfturbo.evaluation.camera_path import capture_path
from nerfturbo.ops import use_backend
from nerfturbo.rendering.model import NerfModel
from nerfturbo.viewer.notebook import _raised, _ring, open_bar

from ..export.test_exports import HollowBall, make_model
from ..tiny import ball_scene, tiny_config

NOTEBOOK = Path(__file__).parents[2] / "examples" / "photos_to_mesh.ipynb"


@pytest.fixture(scope="module")
def model() -> NerfModel:
    return make_model(HollowBall())


def test_stills_are_renders_of_the_path_in_a_page_of_its_own(model: NerfModel) -> None:
    scene = ball_scene(n_views=8, size=24)
    with use_backend("reference"):
        shown = nerfturbo.show(model, cameras=scene.cameras, frames=4, width=24)
        path, _ = capture_path(scene.cameras, model.bounds.aabb.center, 4)
        render = model.render_image(path, 1).rgb
    stills = json.loads(re.findall(r"const s=(\[\[.*\]\])", shown.page)[0])
    assert [len(row) for row in stills] == [4, 4, 4] and shown.size == (24, 24)
    found = np.asarray(Image.open(io.BytesIO(base64.b64decode(stills[1][1]))), dtype=float) / 255.0
    assert np.abs(found - render.numpy()).mean() < 0.05 and len({still for row in stills for still in row}) > 8
    frame = shown._repr_html_()
    assert html.unescape(re.findall(r'srcdoc="([^"]*)"', frame)[0]) == shown.page
    assert "http" not in frame  # nothing is fetched


def test_a_model_alone_is_looked_at_from_around_its_box(model: NerfModel) -> None:
    with use_backend("reference"):
        page = nerfturbo.show(model, frames=2, width=32).page
    stills = json.loads(re.findall(r"const s=(\[\[.*\]\])", page)[0])
    assert len({still for row in stills for still in row}) == 6
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(stills[1][0]))), dtype=float)
    assert np.abs(pixels[16, 16] - pixels[1, 1]).max() > 30.0  # the ball, and what is beside it
    ring, half = _ring(model), model.bounds.aabb.size[0] / 2
    assert float(ring.positions.norm(dim=-1).min()) * math.sin(0.4) > half  # its box from side to side
    config = tiny_config()
    open_model = NerfModel(replace(config, grid=replace(config.grid, levels=3)), model.bounds)
    assert float(_ring(open_model).positions.abs().max()) < half  # from inside: there is more beyond


def test_raised_cameras_stand_higher_and_look_at_the_same_point() -> None:
    path, _ = capture_path(ball_scene(n_views=8).cameras, (0.0, 0.0, 0.0), 5)
    high = _raised(path, 15.0, (0.0, 0.0, 0.0))
    assert bool((high.positions[:, 2] > path.positions[:, 2] + 0.3).all())
    assert torch.allclose(high.positions.norm(dim=-1), path.positions.norm(dim=-1), rtol=1e-3)
    to_center = -torch.nn.functional.normalize(high.positions, dim=-1)
    assert float((high.forward * to_center).sum(-1).min()) > 0.999
    assert _raised(path, 0.0, (0.0, 0.0, 0.0)) is path


def test_what_cannot_be_shown_is_refused(model: NerfModel) -> None:
    with pytest.raises(InputError, match="source: expected a run folder, a Trainer or a model, got Scene"):
        nerfturbo.show(ball_scene())
    with pytest.raises(InputError, match="frames: expected 2 to 240, got 1"):
        nerfturbo.show(model, frames=1)
    with pytest.raises(InputError, match="width: expected 16 to 4096 pixels"):
        nerfturbo.show(model, width=0)
    with pytest.raises(InputError, match="nowhere: expected a run folder"):
        nerfturbo.show("nowhere")


def test_there_is_no_bar_outside_notebooks() -> None:
    assert open_bar() is None


def test_the_notebook_is_short_and_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert 5 < len(cells) <= 15 and not any(cell.get("outputs") for cell in cells)


@pytest.mark.slow
def test_the_notebook_leads_from_a_scene_to_a_mesh(tmp_path: Path) -> None:
    for name in ("nbclient", "ipykernel", "trimesh"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'nerfturbo[test]'")
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(NOTEBOOK, as_version=4)
    short = {"--time-limit {SECONDS}": "--steps 60 --downscale 4 --eval-views 2 --turntable 0"}
    short |= {
        "FACES = 100000": "FACES = 1000",
        "RESOLUTION = 256": "RESOLUTION = 24",
        "--texture": "--texture --density 1 --texture-size 128",
    }
    short |= {"show(RUN)": "show(RUN, frames=3, width=64)"}
    assert all(any(old in cell.source for cell in book.cells) for old in short)
    for cell in book.cells:
        for old, new in short.items():
            cell.source = cell.source.replace(old, new)
    bar = "from nerfturbo.viewer.notebook import open_bar\n\nopen_bar()(0.25, 'a quarter')"
    book.cells.append(nbformat.v4.new_code_cell(bar))
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = json.dumps([cell.get("outputs") for cell in book.cells])
    assert "<progress value=0.250></progress> a quarter" in said and "<iframe srcdoc=" in said
    assert "dB against" in said and re.search(r"PSNR \d+\.\d+ dB on \d+ test views", said)
    assert "% occupied" not in said  # the bar replaces lines of progress
    made = tmp_path / "runs" / "notebook"
    assert all((made / f"mesh.{ending}").stat().st_size > 1000 for ending in ("glb", "obj", "png"))
