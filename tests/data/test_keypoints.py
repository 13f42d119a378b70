"""Depth from COLMAP: features of the pictures become rays that meet their points, and training makes use of them."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nerfturbo.config import CameraConfig, LossConfig
from nerfturbo.data.formats.colmap import read_cloud
from nerfturbo.data.keypoints import load_keypoints
from nerfturbo.data.scene import Scene, load_scene
from nerfturbo.errors import InputError
from nerfturbo.training.loss import depth_loss, place_samples
from nerfturbo.training.trainer import Trainer
from tests.data import folders
from tests.tiny import ball_scene, tiny_config


def features() -> list[list[tuple[float, float, int]]]:
    """Of each view: where its picture shows the points of the cloud, and a feature of no point."""
    cloud, result = folders.points(), []
    for pose in folders.poses():
        local = (cloud - pose[:, 3]) @ pose[:, :3]
        x = folders.FOCAL * local[:, 0] / -local[:, 2] + folders.WIDTH / 2
        y = folders.FOCAL * -local[:, 1] / -local[:, 2] + folders.HEIGHT / 2
        inside = (local[:, 2] < 0) & (x > 0) & (x < folders.WIDTH) & (y > 0) & (y < folders.HEIGHT)
        rows = [(float(x[i]), float(y[i]), int(i)) for i in inside.nonzero()[:, 0].tolist()]
        result.append([*rows, (3.0, 4.0, -1)])
    return result


def write_scene(folder: Path, *, text: bool) -> Path:
    folders.write_colmap(folder, text=text)
    sparse = folder / "sparse" / "0"
    if text:
        lines = (sparse / "images.txt").read_text().split("\n")
        for index, rows in enumerate(features()):
            lines[2 + 2 * index] = " ".join(f"{x!r} {y!r} {point}" for x, y, point in rows)
        (sparse / "images.txt").write_text("\n".join(lines))
        return folder
    names = sorted(path.name for path in (folder / "images").iterdir())
    data = struct.pack("<Q", len(names))
    for index, (name, (q, t), rows) in enumerate(zip(names, folders.quaternions(), features(), strict=True)):
        data += struct.pack("<i7di", index + 1, *q, *t, 7) + name.encode() + b"\0" + struct.pack("<Q", len(rows))
        data += b"".join(struct.pack("<ddq", *row) for row in rows)
    (sparse / "images.bin").write_bytes(data)
    return folder


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return load_scene(write_scene(tmp_path / "scene", text=False), downscale=2)


@pytest.mark.parametrize("text", [False, True])
def test_rays_through_features_meet_their_points(tmp_path: Path, text: bool) -> None:
    scene = load_scene(write_scene(tmp_path / "scene", text=text), downscale=2)
    found = load_keypoints(scene)
    expected = [len(rows) - 1 for index, rows in enumerate(features()) if index % 8]  # every 8th view is a test view
    assert scene.to_original is not None and 0.9 * sum(expected) < len(found) <= sum(expected)
    assert torch.allclose(found.weights, torch.tensor(math.exp(-1.0)))  # all points have the mean error
    points = found.rays.origins + found.rays.directions * found.distances[:, None]
    original = points.double() @ scene.to_original[:3, :3].T + scene.to_original[:3, 3]
    assert torch.cdist(original, folders.points()).amin(-1).max() < 1e-4


def test_draws_depend_on_seed_step_and_number_alone(scene: Scene) -> None:
    found = load_keypoints(scene)
    whole = found.draw(20, seed=1, step=5)
    part = found.draw(10, seed=1, step=torch.tensor(5), first=10)
    assert torch.equal(whole.distances[10:], part.distances)
    assert not torch.equal(whole.distances, found.draw(20, seed=1, step=6).distances)


def test_training_pulls_the_ends_of_rays_to_the_points(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nerfturbo.training.loss.DEPTH_RAYS", 128)
    config = replace(tiny_config(steps=60), loss=LossConfig(depth=1.0), cameras=CameraConfig(refine=True))
    trainer = Trainer(config, scene)

    def error() -> float:
        values = [depth_loss(trainer.model, step=s, fixed=False, first=0, place=place_samples) for s in (500, 501)]
        return float(sum(value.detach() for value in values))

    before = error()
    trainer.fit()
    assert math.isfinite(before) and error() < 0.5 * before


def test_fixed_shapes_give_the_same_loss(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nerfturbo.training.loss.DEPTH_RAYS", 16)
    config = replace(tiny_config(), loss=LossConfig(depth=1.0))
    config = replace(config, train=replace(config.train, batch_samples=1 << 15))
    model = Trainer(config, scene).model
    losses = [depth_loss(model, step=3, fixed=fixed, first=0, place=place_samples) for fixed in (False, True)]
    assert torch.allclose(losses[0], losses[1], rtol=1e-5)


def test_scenes_that_know_no_points_say_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"COLMAP reconstruction.*leave loss\.depth at 0"):
        load_keypoints(ball_scene())
    folder = write_scene(tmp_path / "scene", text=False)
    (folder / "sparse" / "0" / "points3D.bin").unlink()
    with pytest.raises(InputError, match=r"points3D\.bin or points3D\.txt"):
        load_keypoints(load_scene(folder))


def test_a_scene_may_bring_depths_of_its_own(scene: Scene) -> None:
    known = load_keypoints(scene)
    assert known.rays.camera_indices is not None and scene.keypoints is None
    ball = replace(ball_scene(n_views=len(scene)), keypoints=known)
    assert load_keypoints(ball) is known
    trainer = Trainer(replace(tiny_config(), loss=LossConfig(depth=1.0)), ball)
    assert trainer.model.keypoints is not None and torch.equal(trainer.model.keypoints.distances, known.distances)
    chosen = ball.select([3, 1]).keypoints
    assert chosen is not None and chosen.rays.camera_indices is not None
    for new, old in enumerate((3, 1)):
        own, before = chosen.rays.camera_indices == new, known.rays.camera_indices == old
        assert own.any() and torch.equal(chosen.distances[own], known.distances[before])
        assert torch.equal(chosen.rays.directions[own], known.rays.directions[before])
    assert len(chosen) == sum(int((known.rays.camera_indices == old).sum()) for old in (3, 1))
    first = known[known.rays.camera_indices == 0]
    assert replace(ball, keypoints=first).select([1]).keypoints is None


def test_a_damaged_file_is_named(scene: Scene) -> None:
    images = Path(scene.source) / "sparse" / "0" / "images.bin"
    images.write_bytes(images.read_bytes()[:-7])
    with pytest.raises(InputError, match=r"images\.bin: byte \d+.*the file is damaged"):
        load_keypoints(scene)


def test_points_that_too_few_photos_show_are_left_out(scene: Scene) -> None:
    everything, trained = load_keypoints(scene), load_keypoints(scene, min_photos=9)
    assert everything.points is not None and trained.points is not None
    photos = torch.bincount(everything.points)
    assert 0 < len(trained) < len(everything) and int(photos[trained.points].min()) >= 9
    assert len(trained) == int((photos[everything.points] >= 9).sum())
    with pytest.raises(InputError, match="at least one feature that shows a point"):
        load_keypoints(scene.select([0]), min_photos=2)


def test_real_features_meet_their_points(scene_dir: Callable[[str], Path]) -> None:
    """Lens, placement, shrunken pictures, distances: a point is where its ray ends, and seen where its feature is."""
    scene = load_scene(scene_dir("colmap/beer"), downscale=8)
    found = load_keypoints(scene)
    assert len(found) > 20_000 and 0.2 < float(found.weights.mean()) < 0.9
    assert scene.near < float(found.distances.min()) and float(found.distances.max()) < scene.far
    assert scene.to_original is not None and found.points is not None and found.rays.camera_indices is not None
    cloud = read_cloud(scene_dir("colmap/beer") / "sparse" / "0" / "points3D.bin")
    forward = torch.linalg.inv(scene.to_original)
    points = (cloud.positions[found.points] @ forward[:3, :3].T + forward[:3, 3]).float()
    ends = found.rays.origins + found.rays.directions * found.distances[:, None]
    missed = (ends - points).norm(dim=-1) / found.distances
    assert float(missed.median()) < 1e-3 and float(missed.max()) < 1e-2  # a pixel of 1280 is 9e-4 wide here
    shown, _ = scene.cameras.project(found.rays.camera_indices, points)
    through, _ = scene.cameras.project(found.rays.camera_indices, ends)
    off = (shown - through).norm(dim=-1) * 8.0  # pixels of the photo
    errors = cloud.errors[found.points].float()
    assert float(off.median()) < 1.0 and float(off.mean() / errors.mean()) == pytest.approx(1.0, abs=0.2)
