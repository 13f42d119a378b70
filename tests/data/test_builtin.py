"""Built-in scenes: what the issue of a test scene is, measured on the pictures themselves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from nerfturbo.config import BUILTIN_SCENES
from nerfturbo.data.builtin import (
    DEFAULT_RESOLUTION,
    DEFAULT_SCENE,
    DEFAULT_VIEWS,
    _render,
    builtin_scene,
    view_poses,
)
from nerfturbo.data.builtin.scenes import MOVING
from nerfturbo.data.cameras import Cameras, look_at
from nerfturbo.data.images import composite_over
from nerfturbo.data.scene import SPLITS, Scene, load_scene
from nerfturbo.errors import InputError
from nerfturbo.evaluation.metrics import blur_baseline_psnr, constant_baseline_psnr
from scene_distance import signed_distance


def render_poses(name: str, cameras: Cameras) -> torch.Tensor:
    return torch.from_numpy(_render(name, cameras))


@pytest.fixture(scope="module")
def scenes() -> Callable[[str], Scene]:
    made: dict[str, Scene] = {}

    def get(name: str) -> Scene:
        if name not in made:
            made[name] = builtin_scene(name, "test", n_views=6)
        return made[name]

    return get


def test_there_are_three_and_a_default() -> None:
    assert len(BUILTIN_SCENES) >= 3 and BUILTIN_SCENES[0] == DEFAULT_SCENE
    assert DEFAULT_RESOLUTION == 200 and DEFAULT_VIEWS["train"] == 60 and DEFAULT_VIEWS["test"] == 20


@pytest.mark.parametrize("name", BUILTIN_SCENES)
def test_pictures_are_worth_learning(name: str, scenes: Callable[[str], Scene]) -> None:
    scene = scenes(name)
    assert scene.has_alpha and scene.images.channels == 4
    alpha = torch.stack([scene.images.image(i)[..., 3] for i in range(len(scene))])
    assert alpha.mean() >= 0.30
    assert ((alpha > 0.02) & (alpha < 0.98)).float().mean() > 0.005  # edges are covered in part, not in steps
    assert constant_baseline_psnr(scene) < 14.0
    assert blur_baseline_psnr(scene) < 25.0
    colors = torch.stack([scene.images.image(i)[..., :3] for i in range(len(scene))])[alpha > 0.98]
    assert colors.std(0).min() > 0.1 and (colors == 1.0).all(-1).float().mean() < 0.02  # colourful, not burnt out


def test_the_hard_scene_is_harder(scenes: Callable[[str], Scene]) -> None:
    assert blur_baseline_psnr(scenes("armillary")) < blur_baseline_psnr(scenes(DEFAULT_SCENE)) - 2.0


@pytest.mark.parametrize("name", BUILTIN_SCENES)
def test_everything_is_inside_the_box(name: str) -> None:
    """No surface outside [-1.4, 1.4]^3, and the pictures show nothing outside of the box's outline."""
    points = torch.rand(200_000, 3) * 3.6 - 1.8
    outside = points.abs().amax(-1) > 1.4
    for time in (0.0, 0.5, 1.0) if name in MOVING else (0.0,):
        assert (signed_distance(name, points[outside], time=time) > 0).all()
    assert (signed_distance(name, points[~outside]) < 0).any()


@pytest.mark.parametrize("name", BUILTIN_SCENES)
def test_pictures_agree_with_the_distance(name: str, scenes: Callable[[str], Scene]) -> None:
    """Trace rays through the signed distance in float64: covered pixels hit, empty ones miss."""
    scene = scenes(name)
    chosen = torch.randperm(DEFAULT_RESOLUTION**2, generator=torch.Generator().manual_seed(0))[:3000]
    rays = scene.cameras.image_rays(1)[chosen]
    alpha = scene.images.image(1)[..., 3].reshape(-1)[chosen]
    origins, directions = rays.origins.double(), rays.directions.double()
    t = torch.full((len(rays),), 1.5, dtype=torch.float64)
    time = 0.0 if rays.times is None else float(rays.times[0])
    nearest = torch.full_like(t, 9.0)
    for _ in range(120):
        distance = signed_distance(name, origins + t[:, None] * directions, time=time)
        nearest = torch.minimum(nearest, distance)
        t = t + distance.clamp_min(0.0)
    assert (nearest[alpha == 1.0] < 2e-3).all()
    assert (nearest[alpha == 0.0] > 1e-4).all()


def test_what_moves_is_seen_at_its_time() -> None:
    """Each view has a moment of its own, other splits see others, and the moment decides the picture."""
    train, test = (builtin_scene("seesaw", split, resolution=40, n_views=8) for split in ("train", "test"))
    assert train.cameras.times is not None and test.cameras.times is not None
    assert sorted(train.cameras.times.tolist()) == pytest.approx([k / 7 for k in range(8)])
    assert not set(train.cameras.times.tolist()) & set(test.cameras.times.tolist())
    one = train.cameras[torch.zeros(3, dtype=torch.int64)]
    pictures = render_poses("seesaw", replace(one, times=torch.tensor([0.0, 0.0, 0.7]))).float()
    assert torch.equal(pictures[0], pictures[1]) and (pictures[0] - pictures[2]).abs().mean() > 5.0
    assert torch.equal(pictures[0], render_poses("seesaw", replace(one, times=None))[0].float())
    assert load_scene("toybox", "test", downscale=8).cameras.times is None


def test_the_highlight_depends_on_the_view() -> None:
    """The same point of the glossy ball, seen by two cameras that both see it well, has two colours."""
    center, radius = torch.tensor([0.02, -0.50, -0.01]), 0.33
    normal = torch.nn.functional.normalize(torch.tensor([0.42, -0.85, 0.60]), dim=0)
    point = center + radius * normal
    sideways = torch.linalg.cross(normal, torch.tensor([0.0, 0.0, 1.0]))
    eyes = torch.stack(
        [point + 4.0 * torch.nn.functional.normalize(normal + k * sideways, dim=0) for k in (-0.6, 0.0, 0.6)]
    )
    cameras = Cameras.pinhole(look_at(eyes, point), width=201, height=201, field_of_view_x=0.1)
    pictures = render_poses(DEFAULT_SCENE, cameras)
    seen = pictures[:, 100, 100].float() / 255.0
    assert (seen[:, 3] == 1.0).all() and (seen[:, 0] > seen[:, 2]).all()  # all three show the red ball
    assert (seen[0, :3] - seen[1, :3]).abs().max() > 0.05 or (seen[2, :3] - seen[1, :3]).abs().max() > 0.05


def test_matt_surfaces_look_the_same_from_everywhere() -> None:
    """The mat in full light: only its faint highlight changes with the view, shadows and pattern do not."""
    point = torch.tensor([0.10, -0.93, -0.34])
    eyes = torch.tensor([[0.5, -3.0, 2.5], [-1.0, -3.0, 2.5]])
    cameras = Cameras.pinhole(look_at(eyes, point), width=51, height=51, field_of_view_x=0.02)
    seen = render_poses(DEFAULT_SCENE, cameras)[:, 25, 25].float() / 255.0
    assert (seen[:, 3] == 1.0).all() and (seen[0] - seen[1]).abs().max() < 0.06


def test_resolutions_agree() -> None:
    """A picture is the mean of a finer one, in premultiplied colours."""
    fine = builtin_scene(DEFAULT_SCENE, "test", resolution=400, n_views=1).images.image(0)
    coarse = builtin_scene(DEFAULT_SCENE, "test", resolution=200, n_views=1).images.image(0)
    mean = composite_over(fine, 0.5).reshape(200, 2, 200, 2, 3).mean((1, 3))
    error = ((composite_over(coarse, 0.5) - mean) ** 2).mean()
    assert -10.0 * torch.log10(error) > 38.0
    small = load_scene(DEFAULT_SCENE, "test", downscale=8)
    assert small.images.sizes.tolist() == [[25, 25]] * 20


def test_rendering_is_deterministic(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    one = builtin_scene(DEFAULT_SCENE, "val", resolution=60, n_views=2)
    monkeypatch.setenv("NERFTURBO_CACHE", str(tmp_path))  # an empty cache: rendered anew
    two = builtin_scene(DEFAULT_SCENE, "val", resolution=60, n_views=2)
    assert torch.equal(one.images.pixels, two.images.pixels)
    assert torch.equal(one.cameras.camera_to_world, two.cameras.camera_to_world)


@pytest.mark.parametrize("seed", range(20))
def test_no_view_is_in_two_splits(seed: int) -> None:
    directions = {split: view_poses(split, DEFAULT_VIEWS[split], seed=seed)[:, :, 2] for split in SPLITS}
    for a, b in (("train", "test"), ("train", "val"), ("val", "test")):
        angle = torch.rad2deg(torch.acos((directions[a] @ directions[b].T).clamp(-1, 1).max()))
        assert angle > 0.2
    for poses in directions.values():
        assert (poses[:, 2] > 0.05).all()  # the upper hemisphere
        assert len(torch.unique(poses, dim=0)) == len(poses)


def test_seeds_and_splits_give_other_views() -> None:
    assert torch.equal(view_poses("train", 9), view_poses("train", 9))
    assert not torch.allclose(view_poses("train", 9), view_poses("train", 9, seed=1))
    assert not torch.allclose(view_poses("train", 9), view_poses("test", 9))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "nothing"}, "scene: expected one of the built-in scenes: toybox"),
        ({"split": "all"}, "split"),
        ({"resolution": 0}, "resolution"),
        ({"resolution": 20.5}, "resolution"),
        ({"n_views": 0}, "n_views"),
        ({"n_views": -3}, "n_views"),
    ],
)
def test_bad_arguments(arguments: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        builtin_scene(**arguments)


def test_importing_does_not_import_numba() -> None:
    modules = "nerfturbo.data.builtin, nerfturbo.data.formats.transforms"
    code = f"import sys, {modules}; print('numba' in sys.modules, 'PIL' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def test_all_around_looks_from_below_too() -> None:
    heights = view_poses("train", 60, all_around=True)[:, 2, 3]
    assert heights.min() < -3.0 < 3.0 < heights.max() and view_poses("train", 60)[:, 2, 3].min() > 0.0
    train, test = (view_poses(split, 20, all_around=True)[:, :, 3] for split in ("train", "test"))
    assert torch.cdist(train, test).min() > 0.01
