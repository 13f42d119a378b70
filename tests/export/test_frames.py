"""Frames of a path in every channel, and sequences that go on where they broke."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from nerfturbo.data.lenses import LENS_MODELS
from nerfturbo.data.options import LoadOptions
from nerfturbo.data.scene import load_scene
from nerfturbo.errors import InputError
from nerfturbo.evaluation.images import CHANNELS
from nerfturbo.export.frames import FrameMaker, FrameSequence, Look, digest, recorded_size
from nerfturbo.ops import use_backend
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.rendering.render import REACH, surface_normals
from nerfturbo.types import Aabb

from ..data.test_ndc import write_facing
from ..tiny import BALL, ball_scene, tiny_config


class BallField(torch.nn.Module):
    """A ball of one colour, dense inside, with a soft rim."""

    def density(self, positions: torch.Tensor, times: torch.Tensor | None = None) -> torch.Tensor:
        return 40.0 * torch.sigmoid((BALL - positions.norm(dim=-1)) * 40.0)

    def forward(self, positions, directions, times=None, camera_indices=None):
        return torch.full_like(positions, 0.5), self.density(positions, times)


@pytest.fixture(scope="module")
def model() -> NerfModel:
    made = NerfModel(tiny_config(), SceneBounds.of(ball_scene()))
    made.field = BallField()
    made.grid.step_size = 0.05
    return made


def test_every_channel_shows_what_it_says(model: NerfModel) -> None:
    cameras = ball_scene(size=33).cameras
    with use_backend("reference"):
        maker = FrameMaker(model, cameras, Look(channels=CHANNELS, background=(0.0, 0.0, 0.0)))
        frame, image = maker.frame(0), maker.image(0)
    assert list(frame) == list(CHANNELS) and all(picture.shape == (33, 33, 3) for picture in frame.values())
    assert frame["color"][16, 16].tolist() == pytest.approx([128] * 3, abs=2) and int(frame["color"][0, 0].sum()) == 0
    assert frame["opacity"][16, 16].tolist() == [255] * 3 and int(frame["opacity"][0, 0].sum()) == 0
    near = float(cameras.positions[0].norm()) - BALL
    assert float(image.depth[16, 16]) == pytest.approx(near, abs=0.06)
    low, high = maker.depths
    assert near - 0.1 < low < high < near + 2.0 * BALL
    toward = torch.nn.functional.normalize(cameras.positions[0], dim=0)
    shown = frame["normal"][16, 16].float() / 255.0 * 2.0 - 1.0
    assert float(shown @ toward) > 0.99


def test_normals_of_a_ball_point_outwards(model: NerfModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nerfturbo.rendering.render.NORMALS_AT_ONCE", 30)
    points = torch.nn.functional.normalize(torch.randn(200, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    normals = surface_normals(model.field, model.grid, points * BALL)
    assert normals.shape == points.shape and float((normals * points).sum(-1).min()) > 0.99
    assert surface_normals(model.field, model.grid, torch.zeros(0, 3)).shape == (0, 3)
    assert float(surface_normals(model.field, model.grid, torch.full((1, 3), 50.0)).norm()) == 0.0


def test_normals_weigh_opacity_not_density(model: NerfModel) -> None:
    """Two half spaces, one three times as dense: on a sphere about a point of both borders their quarters are as opaque
    as a way of its radius through them."""
    reach, taus = REACH * model.grid.step_size, torch.tensor([1.2, 0.4])

    class Halves:
        def density(self, positions: torch.Tensor, times: None) -> torch.Tensor:
            return ((positions[:, :2] > 0.0) * taus).sum(-1) / reach

    normal = surface_normals(Halves(), model.grid, torch.zeros(1, 3))[0]  # type: ignore[arg-type]
    both, x, y = (1.0 - math.exp(-tau) for tau in (1.6, 1.2, 0.4))
    wanted = -torch.nn.functional.normalize(torch.tensor([both + x - y, both + y - x, 0.0]), dim=0)
    torch.testing.assert_close(normal, wanted, atol=0.1, rtol=0.0)


def test_a_crop_cuts_the_ball_in_half(model: NerfModel) -> None:
    cameras = ball_scene(size=33).cameras
    right = torch.linalg.cross(cameras.forward[0], torch.tensor([0.0, 0.0, 1.0]))
    axis = int(right.abs().argmax())
    low = [-1.5, -1.5, -1.5]
    low[axis] = 0.0
    with use_backend("reference"):
        whole = FrameMaker(model, cameras, Look()).image(0).opacity
        half = FrameMaker(model, cameras, Look(crop=Aabb(tuple(low), (1.5, 1.5, 1.5)))).image(0).opacity
    assert 0.3 < float(half.sum() / whole.sum()) < 0.8


def test_only_plain_pinhole_cameras_of_one_size_are_recorded(tmp_path: Path) -> None:
    cameras = ball_scene(size=33).cameras
    assert recorded_size(cameras) == (33, 33)
    assert (
        recorded_size(load_scene(write_facing(tmp_path / "facing"), options=LoadOptions(bounds="ndc")).cameras) is None
    )  # rays are bent
    lens = torch.zeros(len(cameras), LENS_MODELS["opencv"].n_coefficients)
    assert recorded_size(replace(cameras, model="opencv", distortion=lens)) is None
    sizes = cameras.size.clone()
    sizes[0] += 1
    assert recorded_size(replace(cameras, size=sizes)) is None


def test_a_sequence_goes_on_and_refuses_another(tmp_path: Path) -> None:
    cameras, frame = ball_scene().cameras, torch.zeros(4, 4, 3, dtype=torch.uint8)
    key = digest("step 1", cameras, Look())
    with FrameSequence(tmp_path / "s", key) as sequence:
        sequence.save("color", 0, frame + 7)
    with FrameSequence(tmp_path / "s", key) as again:
        assert again.has(("color",), 0) and not again.has(("color",), 1) and not again.has(("color", "depth"), 0)
        assert torch.equal(again.load("color", 0), frame + 7)
    changed = [digest("step 2", cameras, Look()), digest("step 1", cameras[:2], Look())]
    changed.append(digest("step 1", cameras, Look(crop=Aabb.cube(1.0))))
    assert len({key, *changed}) == 4
    with pytest.raises(InputError, match="--overwrite"):
        FrameSequence(tmp_path / "s", changed[0])
    with FrameSequence(tmp_path / "s", changed[0], overwrite=True) as replaced:
        assert not replaced.has(("color",), 0)
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["frames.json"]


@pytest.mark.parametrize("damage", ["EPS", "a chunk of no name", "cut off"])
def test_damaged_frames_are_named(tmp_path: Path, damage: str) -> None:
    sequence, file = FrameSequence(tmp_path, "k"), tmp_path / "frame_0000.png"
    picture = Image.effect_noise((64, 64), 50.0)
    picture.save(file, "EPS" if damage == "EPS" else "PNG")
    if damage != "EPS":
        content = file.read_bytes()
        at = content.find(b"IDAT") - 4
        content = content[:at] + b"\0\0\0\5" + content[at + 4 :] if damage == "a chunk of no name" else content[:900]
        file.write_bytes(content)
    with pytest.raises(InputError, match=r"frame_0000\.png"):
        sequence.load("color", 0)


def test_a_damaged_note_is_that_of_another_sequence(tmp_path: Path) -> None:
    (tmp_path / "frame_0000.png").touch()
    (tmp_path / "frames.json").write_text("[" * 200_000)
    with pytest.raises(InputError, match="--overwrite"):
        FrameSequence(tmp_path, "k")


def test_a_disk_error_is_told_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    sequence = FrameSequence(tmp_path / "s", "k")
    with pytest.raises(OSError), sequence:
        (tmp_path / "s" / "frame_0000.png").mkdir()
        sequence.save("color", 0, torch.zeros(4, 4, 3, dtype=torch.uint8))
    assert not list((tmp_path / "s").glob(".*"))
