"""Pictures for a client: coarse first, finer at rest, within a share of the time."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from nerfturbo.config import DynamicNgpConfig
from nerfturbo.evaluation.images import CHANNELS
from nerfturbo.ops import use_backend
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.types import Aabb, PackedSamples
from nerfturbo.viewer.painter import Painter, TimeShare, View, pose_of

from ..tiny import ball_scene, tiny_config


@pytest.fixture(scope="module")
def model() -> NerfModel:
    return NerfModel(tiny_config(), SceneBounds.of(ball_scene()))


VIEW = View(ball_scene().cameras.camera_to_world[0], 0.7, 1.5)


def test_pictures_get_finer_until_the_finest_and_then_rest(model: NerfModel) -> None:
    painter, sizes = Painter(largest=64), []
    assert not painter.wants(0)
    painter.look(VIEW, moving=True)
    with use_backend("reference"):
        while painter.wants(0) and len(sizes) < 12:
            picture = painter.paint(model, 0, training=False)
            assert picture is not None and picture.dtype == torch.uint8
            sizes.append(picture.shape[0] * picture.shape[1])
    assert sizes == sorted(sizes) and len(sizes) < 12
    assert picture.shape[1] <= 66 and picture.shape[1] / picture.shape[0] == pytest.approx(1.5, rel=0.1)
    assert painter.wants(1)  # the scene has changed


def test_every_channel_and_a_crop(model: NerfModel) -> None:
    painter = Painter(largest=32)
    with use_backend("reference"):
        for channel in CHANNELS:
            painter.look(replace(VIEW, channel=channel), moving=False)
            assert painter.paint(model, 0, training=True) is not None
        painter.look(replace(VIEW, crop=Aabb.cube(0.2)), moving=False)
        assert painter.paint(model, 0, training=True) is not None
        painter.look(replace(VIEW, crop=Aabb.cube(0.2, (50.0, 0.0, 0.0))), moving=False)
        assert painter.paint(model, 0, training=True) is None


class Fog(torch.nn.Module):
    """A field with nothing but what a field must have, brighter as time goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = torch.nn.Parameter(torch.tensor(5.0))

    def density(self, positions, times=None):
        return self.strength * (positions.norm(dim=-1) < 0.8)

    def forward(self, positions, directions, times=None, camera_indices=None):
        shade = torch.zeros_like(positions) if times is None else times.reshape(-1, 1).expand_as(positions)
        return shade, self.density(positions)


class Ends:
    """A sampler with nothing but `sample`: sixteen equal steps."""

    def sample(self, rays, *, draw=None, n_active=None, capacity=None):
        edges = torch.linspace(1.5, 5.5, 17, device=rays.device)
        n, rows = len(rays), torch.arange(len(rays) + 1, dtype=torch.int32, device=rays.device)
        return PackedSamples(edges[:-1].repeat(n), edges[1:].repeat(n), rows[:-1].repeat_interleave(16), rows * 16)


@pytest.mark.parametrize("sampler", [None, Ends()])
def test_any_field_and_any_sampler_are_painted(sampler: Ends | None) -> None:
    model = NerfModel(tiny_config(), SceneBounds.of(ball_scene()), field=Fog(), sampler=sampler)
    painter = Painter(largest=24)
    with use_backend("reference"):
        for channel in CHANNELS:
            painter.look(replace(VIEW, channel=channel, time=0.5), moving=False)
            image = painter.paint(model, 0, training=False)
            assert image is not None and image.float().std() > 5.0, channel
        painter.look(replace(VIEW, crop=Aabb.cube(0.3)), moving=False)
        assert (painter.paint(model, 0, training=False) is None) == (sampler is not None)  # it cannot be cropped


def test_a_new_view_does_not_wait_for_what_refining_the_old_one_took(model: NerfModel) -> None:
    from nerfturbo.viewer.page import LivePage, _Client
    from nerfturbo.viewer.panel import SceneFacts

    scene, now = ball_scene(), time.monotonic()
    page = LivePage(SceneFacts("ball", scene, scene, scene.aabb, Path("paths"), True))
    client = _Client(MagicMock(), Painter(largest=24), view=VIEW, fresh=True, moving=True)
    page._clients = {0: client}
    try:
        with use_backend("reference"):
            assert page.tick(model, 0, training=True) and not client.painter.is_new
            page._shares[False].spent(100.0, 0.1, now)  # a fine picture on a slow machine
            assert not page.tick(model, 1, training=True)  # it is not renewed for a long time,
            client.view, client.fresh = replace(VIEW, channel="opacity"), True
            page._shares[True] = TimeShare()
            assert page.tick(model, 2, training=True)  # but another view is seen at once;
            client.moved = time.monotonic() + 60.0  # however long the next line takes to begin
            assert not page.tick(model, 3, training=False)  # nothing is refined while the camera moves,
            client.moved = 0.0
            assert page.tick(model, 3, training=False)  # and a paused training gives all its time
        assert page.frames_sent == 3
    finally:
        page.close()


def test_a_page_that_is_closed_while_a_picture_is_painted_for_it_is_no_warning() -> None:
    from nerfturbo.viewer.page import LivePage
    from nerfturbo.viewer.panel import SceneFacts

    scene = ball_scene()
    page = LivePage(SceneFacts("ball", scene, scene, scene.aabb, Path("paths"), True))
    try:
        page._server._websock_server._broadcast_buffer.set_done()
        with warnings.catch_warnings(record=True) as seen:
            page._server.scene.set_background_image(np.zeros((2, 2, 3), np.uint8))
        assert not seen
    finally:
        page.close()


@pytest.mark.parametrize(("least", "part"), [(0.0, 0.2), (0.5, 0.2), (2.7, 0.1)])
def test_work_takes_its_share_of_the_time(least: float, part: float) -> None:
    share, now, worked = TimeShare(), 0.0, 0.0
    while now < 100.0:
        if share.ready(now):
            now, worked = now + 0.3, worked + 0.3
            share.spent(0.3, 0.2, now, least=least)
        else:
            now += 0.01
    assert worked / now == pytest.approx(part, abs=0.01)


def test_poses_have_our_axes_and_nonsense_is_none() -> None:
    pose = pose_of(np.array([2.0, 0.0, 0.0, 0.0]), np.array([1.0, 2.0, 3.0]))
    assert pose is not None and pose.tolist() == [[1, 0, 0, 1], [0, -1, 0, 2], [0, 0, -1, 3]]
    for wxyz, position in (([0, 0, 0, 0], [0, 0, 0]), ([np.nan, 0, 0, 1], [0, 0, 0]), ([1, 0, 0, 0], [1e9, 0, 0])):
        assert pose_of(np.array(wxyz, dtype=float), np.array(position, dtype=float)) is None


def test_a_view_has_a_time() -> None:
    """The page's slider decides the moment a client sees, where the pictures have times, and only there."""
    from nerfturbo.viewer.page import LivePage
    from nerfturbo.viewer.panel import SceneFacts

    still = ball_scene()
    moving = replace(still, cameras=replace(still.cameras, times=torch.linspace(0.0, 1.0, len(still))))
    config = tiny_config()
    dynamic = DynamicNgpConfig(n_levels=2, log2_entries=8, max_resolution=32, width=16)
    config = replace(config, field=dynamic, grid=replace(config.grid, moments=1))
    model, painter = NerfModel(config, SceneBounds.of(still)), Painter(largest=24)  # one size, however slow
    with torch.no_grad():
        for grid in filter(lambda part: hasattr(part, "table"), model.field.modules()):
            grid.table.uniform_(-1.0, 1.0, generator=torch.Generator().manual_seed(0))
        for grid in model.field.motion_grids:  # features of time count a tenth of those of place: let them be seen
            grid.table *= 20.0
    pages = [LivePage(SceneFacts("ball", one, one, one.aabb, Path("paths"), False), port=0) for one in (still, moving)]
    try:
        assert pages[0]._panel.dress(VIEW).time is None
        pictures = []
        for moment in (0.0, 0.75):
            pages[1]._panel._time.value = moment
            painter.look(pages[1]._panel.dress(VIEW), moving=False)
            with use_backend("reference"):
                pictures.append(painter.paint(model, 0, training=True))
        assert pages[1]._panel.dress(VIEW).time == 0.75
        assert (pictures[0].float() - pictures[1].float()).abs().mean() > 1.0
    finally:
        for page in pages:
            page.close()
