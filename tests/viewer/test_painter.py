"""Pictures for a client: coarse first, finer at rest, within a share of the time."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nerfturbo.config import CameraConfig, DynamicNgpConfig
from nerfturbo.data.images import to_bytes
from nerfturbo.data.scene import Scene
from nerfturbo.evaluation.evaluate import truth_image
from nerfturbo.evaluation.images import CHANNELS, error_colors
from nerfturbo.evaluation.run_folder import RunFolder
from nerfturbo.ops import use_backend
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.types import Aabb, PackedSamples
from nerfturbo.viewer.page import LivePage
from nerfturbo.viewer.painter import Painter, TimeShare, View, nearest_photo, pose_of
from nerfturbo.viewer.panel import SceneFacts

from ..tiny import BALL, FIELD_OF_VIEW, ball_scene, tiny_config
from .looker import Looker, until


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
        assert painter.note == ""
        painter.look(replace(VIEW, crop=Aabb.cube(0.2, (50.0, 0.0, 0.0))), moving=False)
        assert bool((painter.paint(model, 0, training=True) == 255).all())
        assert "crop box is empty: what is occupied lies in" in painter.note


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


class Ball(Fog):
    """A solid ball of one colour."""

    def density(self, positions, times=None):
        return 1000.0 * (positions.norm(dim=-1) < BALL)

    def forward(self, positions, directions, times=None, camera_indices=None):
        return torch.full_like(positions, 0.5), self.density(positions)


class Ends:
    """A sampler with nothing but `sample`: equal steps."""

    def __init__(self, steps: int = 16) -> None:
        self.steps = steps

    def sample(self, rays, *, draw=None, n_active=None, capacity=None):
        edges, k = torch.linspace(1.5, 5.5, self.steps + 1, device=rays.device), self.steps
        n, rows = len(rays), torch.arange(len(rays) + 1, dtype=torch.int32, device=rays.device)
        return PackedSamples(edges[:-1].repeat(n), edges[1:].repeat(n), rows[:-1].repeat_interleave(k), rows * k)


@pytest.mark.parametrize("sampler", [None, Ends()])
def test_any_field_and_any_sampler_are_painted(sampler: Ends | None) -> None:
    model = NerfModel(tiny_config(), SceneBounds.of(ball_scene()), field=Fog(), sampler=sampler)
    painter = Painter(largest=24)
    with use_backend("reference"):
        for channel in CHANNELS:
            painter.look(replace(VIEW, channel=channel, time=0.5), moving=False)
            image = painter.paint(model, 0, training=False)
            assert image is not None and image.float().std() > 5.0, channel
        fog = []
        for crop in (None, Aabb.cube(0.3), Aabb.cube(0.3, (9.0, 0.0, 0.0)), Aabb.cube(5.0)):
            painter.look(replace(VIEW, crop=crop), moving=False)
            fog.append(int((painter.paint(model, 0, training=False) < 250).all(-1).sum()))
    assert 0 < fog[1] < 0.4 * fog[0] and fog[2] == 0 and fog[3] == fog[0]


def test_errors_are_those_at_a_photo_and_nothing_elsewhere() -> None:
    """Where a photo was taken its error is that of the test images; from behind, nothing of it is seen."""
    scene = ball_scene(size=24)
    model = NerfModel(tiny_config(), SceneBounds.of(scene), field=Ball(), sampler=Ends(200))
    view = View(scene.cameras.camera_to_world[1], FIELD_OF_VIEW, 1.0, channel="error")
    painter = Painter(photos=(scene, ball_scene("test", n_views=2)))
    with use_backend("reference"):
        shown = painter.render(model, view, (24, 24), 0)
        truth = truth_image(scene, 1)
        rendered = model.render_image(scene.cameras, 1).rgb
        assert "train photo 1" in painter.note
        expected = to_bytes(error_colors(rendered, truth)).cpu()
        same = ((shown.float() - expected.float()).abs().amax(-1) <= 2).float().mean()
        assert same > 0.97 and expected.float().std() > 20.0
        across = scene.select([3])  # the camera on the other side, which sees the ball's other half
        behind = Painter(photos=(across,)).render(model, view, (24, 24), 0)
    middle = behind[8:16, 8:16]
    assert bool((middle == 128).all()), "the far side of the ball is grey: the photo does not show it"


def test_errors_are_against_photos_from_where_training_has_learned_that_they_were_taken() -> None:
    scene = ball_scene(size=24)
    config = replace(tiny_config(), cameras=CameraConfig(refine=True))
    model = NerfModel(config, SceneBounds.of(scene), field=Ball(), sampler=Ends(200))
    model.photos.observe(scene.cameras, scene.aabb)
    with torch.no_grad():
        model.photos.pose.uniform_(-0.2, 0.2, generator=torch.Generator().manual_seed(0))
    learned = model.photos.refined(scene.cameras)
    assert float((learned.camera_to_world - scene.cameras.camera_to_world).abs().max()) > 0.05
    view = View(learned.camera_to_world[1], FIELD_OF_VIEW, 1.0, channel="error")
    with use_backend("reference"):
        expected = to_bytes(error_colors(model.render_image(learned, 1).rgb, truth_image(scene, 1))).cpu().float()
        same = [
            float(((painter.render(model, view, (24, 24), 0).float() - expected).abs().amax(-1) <= 2).float().mean())
            for painter in (Painter(photos=(scene,), trains=True), Painter(photos=(scene,)))
        ]
    assert same[0] > 0.97 and same[1] < 0.9  # those of a saved run are given as they were learned


def test_where_memory_runs_out_pictures_are_smaller_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    painter, asked, room = Painter(largest=256), [], [5000.0]

    def render(model, view, size, step) -> torch.Tensor:
        asked.append(size)
        painter.note = "as rendered."
        if size[0] * size[1] > room[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return torch.zeros(size[1], size[0], 3, dtype=torch.uint8)

    monkeypatch.setattr(painter, "render", render)
    painter.look(VIEW, moving=True)
    while painter.wants(0) and len(asked) < 40:
        picture = painter.paint(None, 0, training=False)
    assert len(asked) < 40 and picture.shape[0] * picture.shape[1] < room[0] < max(w * h for w, h in asked)
    assert painter.note.startswith("as rendered. Out of memory at ")
    room[0] = 1e6
    painter.largest = 128  # another size is asked for: all is tried again
    painter.look(VIEW, moving=False)
    while painter.wants(0) and len(asked) < 80:
        picture = painter.paint(None, 0, training=False)
    assert picture.shape[1] in range(120, 132) and painter.note == "as rendered."
    room[0] = 0.0
    painter.look(VIEW, moving=True)
    assert bool((painter.paint(None, 0, training=False) == 255).all()) and "Out of memory" in painter.note
    assert not painter.wants(0) and painter.wants(1)
    monkeypatch.setattr(painter, "render", lambda *_: (_ for _ in ()).throw(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        painter.paint(None, 1, training=False)


def test_the_nearest_photo_is_near_in_place_and_direction_and_time() -> None:
    train, test = ball_scene().cameras, ball_scene("test", n_views=2).cameras
    for split, cameras in enumerate((train, test)):
        for index in range(len(cameras)):
            assert nearest_photo([train, test], View(cameras.camera_to_world[index], 0.7, 1.0)) == (split, index)
    timed = replace(train, times=torch.linspace(0.0, 1.0, len(train)))
    assert nearest_photo([timed], replace(VIEW, time=1.0)) == (0, 3)


def facts_of(scene: Scene, *, trains: bool = True) -> SceneFacts:
    return SceneFacts("ball", scene, scene, scene.aabb, RunFolder(Path("nowhere")), trains)


def test_a_new_view_does_not_wait_for_what_refining_the_old_one_took(model: NerfModel) -> None:
    page = LivePage(facts_of(ball_scene()))
    try:
        looker, now = Looker(page), time.monotonic()
        client = looker.client
        client.quality.value = 24
        until(lambda: client.fresh, "the first view")
        with use_backend("reference"):
            assert page.tick(model, 0, training=True) and not client.painter.is_new
            page._shares[False].spent(100.0, 0.1, now)  # a fine picture on a slow machine
            assert not page.tick(model, 1, training=True)  # it is not renewed for a long time,
            looker.set(client.channel, "opacity")
            until(lambda: client.fresh, "the other channel")
            page._shares[True] = TimeShare()
            assert page.tick(model, 2, training=True)  # but another view is seen at once;
            client.moved = time.monotonic() + 60.0  # however long the next line takes to begin
            assert not page.tick(model, 3, training=False)  # nothing is refined while the camera moves,
            client.moved = 0.0
            assert page.tick(model, 3, training=False)  # and a paused training gives all its time
        assert page.frames_sent == 3
        looker.close()
    finally:
        page.close()


def test_a_page_that_is_closed_while_a_picture_is_painted_for_it_is_no_warning() -> None:
    page = LivePage(facts_of(ball_scene()))
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
    pages = [LivePage(facts_of(scene, trains=False)) for scene in (still, moving)]
    try:
        panels = [Looker(page).client for page in pages]
        assert panels[0].dress(VIEW).time is None
        pictures = []
        for moment in (0.0, 0.75):
            panels[1].time.value = moment
            painter.look(panels[1].dress(VIEW), moving=False)
            with use_backend("reference"):
                pictures.append(painter.paint(model, 0, training=True))
        assert panels[1].dress(VIEW).time == 0.75
        assert (pictures[0].float() - pictures[1].float()).abs().mean() > 1.0
    finally:
        for page in pages:
            page.close()
