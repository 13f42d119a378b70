"""The method of nerfstudio, through its own types; skipped where it is not installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nerfturbo.data.batches import PixelSampler

from ..tiny import ball_scene

pytest.importorskip("nerfstudio", reason="nerfstudio is not installed: pip install nerfstudio")
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.data.scene_box import SceneBox
from nerfstudio.engine.callbacks import TrainingCallbackAttributes

plugin = pytest.importorskip("nerfturbo_plugins.nerfstudio")


def made(**values: Any) -> Any:
    box = SceneBox(torch.tensor([[-1.5] * 3, [1.5] * 3]))
    return plugin.NerfturboModelConfig(**values).setup(scene_box=box, num_train_data=4)


def bundle(rays: Any) -> RayBundle:
    area = torch.full((len(rays), 1), 1e-4)
    return RayBundle(origins=rays.origins, directions=rays.directions, pixel_area=area)


@pytest.mark.parametrize(("bounded", "channels"), [(True, 4), (True, 3), (False, 3)])
def test_it_learns_and_keeps_what_it_learned(bounded: bool, channels: int) -> None:
    model = made(bounded=bounded)
    assert model.nerf.config.preset == ("ngp-cpu" if bounded else "proposal-cpu")
    (begin,) = model.get_training_callbacks(TrainingCallbackAttributes(None, None, None, None))
    optimizer = torch.optim.Adam(model.get_param_groups()["fields"], lr=1e-2, eps=1e-15)
    pixels, losses = PixelSampler(ball_scene("train"), torch.device("cpu"), 0), []
    for step in range(40):
        begin.run_callback(step)
        batch = pixels.draw(step, 256)
        image = batch.rgba if channels == 4 else batch.rgba[:, :3] * batch.rgba[:, 3:] + 1.0 - batch.rgba[:, 3:]
        outputs = model.train()(bundle(batch.rays))
        metrics = model.get_metrics_dict(outputs, {"image": image})
        loss = sum(model.get_loss_dict(outputs, {"image": image}, metrics).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(10.0 ** (-metrics["psnr"] / 10.0)))
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    batch = pixels.draw(99, 64)
    found = model.eval()(bundle(batch.rays))
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        "rgb": (64, 3),
        "accumulation": (64, 1),
        "depth": (64, 1),
    }
    scores = model.get_metrics_dict(found, {"image": image[:64]})
    assert torch.isfinite(scores["psnr"])
    other = made(bounded=bounded)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.eval()(bundle(batch.rays))["rgb"], found["rgb"])


def test_it_is_listed_as_a_method() -> None:
    from nerfstudio.plugins.registry import discover_methods

    methods, descriptions = discover_methods()
    assert methods["nerfturbo"] is plugin.METHOD.config and "nothing is compiled" in descriptions["nerfturbo"]
