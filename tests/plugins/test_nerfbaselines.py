"""The method of NerfBaselines, through its own types; skipped where it is not installed (it needs numpy 1)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nerfturbo.data.cameras import opengl_to_opencv
from nerfturbo.data.formats.posed import cameras_of

from ..tiny import ball_scene

nb = pytest.importorskip("nerfbaselines", reason="nerfbaselines is not installed: pip install nerfbaselines")
plugin = pytest.importorskip("nerfturbo_plugins.nerfbaselines")
from click import UsageError  # noqa: E402

TINY = {"preset": "ngp-cpu", "train.steps": "40", "train.batch_samples": 2048, "grid.resolution": 16}
BENT = [0.05, -0.02, 0.003, -0.002, 0.01, 0.004, -0.003, 0.002]


def cameras(scene: Any, model: str = "pinhole", distortion: list[float] | None = None) -> Any:
    own = scene.cameras
    n = len(own)
    return nb.new_cameras(
        poses=opengl_to_opencv(own.camera_to_world).numpy(),
        intrinsics=torch.cat([own.focal, own.center], dim=1).numpy(),
        camera_models=np.full(n, nb.camera_model_to_int(model), np.int32),
        image_sizes=own.size.numpy().astype(np.int32),
        distortion_parameters=np.tile(np.array(distortion or [], np.float32), (n, 1)),
    )


def dataset(scene: Any, folder: Path) -> Any:
    images = [scene.images.image_bytes(index).numpy() for index in range(len(scene))]
    metadata = {"id": "blender", "color_space": "srgb", "background_color": np.full(3, 255, np.uint8)}
    files = [str(folder / "none" / f"{index}.png") for index in range(len(scene))]
    options = {"image_paths": files, "image_paths_root": str(folder), "images": images, "metadata": metadata}
    return nb.new_dataset(cameras=cameras(scene), **options)


@pytest.mark.parametrize(
    ("model", "distortion"),
    [("pinhole", []), ("opencv", BENT[:4] + [0.0] * 4), ("full_opencv", BENT), ("opencv_fisheye", BENT)],
)
def test_rays_are_those_of_nerfbaselines(model: str, distortion: list[float]) -> None:
    from nerfbaselines.cameras import get_rays

    scene = ball_scene("train")
    theirs = cameras(scene, model, distortion)
    ours = cameras_of(plugin.views_of(theirs, [Path(str(i)) for i in range(len(scene))]), Path("scene"))
    xy = np.array([[0, 0], [3, 9], [14, 2]])
    origins, directions = get_rays(theirs[1:2].item().apply(lambda v, _: np.repeat(v[None], len(xy), 0)), xy)
    found = ours.rays(torch.ones(len(xy), dtype=torch.int64), *(torch.from_numpy(xy) + 0.5).unbind(-1))
    unit = directions / np.linalg.norm(directions, axis=-1, keepdims=True)
    np.testing.assert_allclose(found.origins.numpy(), origins, atol=1e-5)
    np.testing.assert_allclose(torch.nn.functional.normalize(found.directions, dim=-1).numpy(), unit, atol=2e-4)


def test_trains_saves_loads_renders_and_goes_on(tmp_path: Path) -> None:
    train, test = ball_scene("train"), ball_scene("test", n_views=2)
    data = dataset(train, tmp_path)
    method = plugin.Nerfturbo(train_dataset=data, config_overrides=dict(TINY))
    info = method.get_info()
    assert info["num_iterations"] == 40 and info["hparams"]["train.batch_samples"] == 2048
    camera = cameras(test)[0]
    before = method.render(camera)
    losses = [method.train_iteration(step)["loss"] for step in range(20)]
    method.save(str(tmp_path / "half"))
    losses += [method.train_iteration(step)["loss"] for step in range(20, 40)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    image, truth = method.render(camera), test.images.image(0).numpy()
    white = truth[..., :3] * truth[..., 3:] + 1.0 - truth[..., 3:]
    score, start = (-10.0 * math.log10(np.mean((found["color"] - white) ** 2)) for found in (image, before))
    assert score > start + 2.0 and set(image) == {"color", "depth", "accumulation"}
    method.save(str(tmp_path / "whole"))
    loaded = plugin.Nerfturbo(checkpoint=str(tmp_path / "whole"))
    np.testing.assert_array_equal(loaded.render(camera, options={"outputs": ("color",)})["color"], image["color"])
    loaded.save(str(tmp_path / "again"))
    assert plugin.Nerfturbo(checkpoint=str(tmp_path / "again")).get_info()["loaded_step"] == 40
    resumed = plugin.Nerfturbo(checkpoint=str(tmp_path / "half"), train_dataset=data)
    for step in range(20, 40):
        resumed.train_iteration(step)
    np.testing.assert_array_equal(resumed.render(camera)["color"], image["color"])


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("train.stepz", 3, "the name of a config value"),
        ("train.steps", "ten", "a whole number"),
        ("preset", "x", "one of"),
    ],
)
def test_a_value_that_cannot_be_set_is_named(tmp_path: Path, name: str, value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=rf"^--set: .*{name}: expected {said}"):
        plugin.Nerfturbo(train_dataset=dataset(ball_scene("train"), tmp_path), config_overrides={name: value})
