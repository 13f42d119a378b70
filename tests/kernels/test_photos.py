"""Everything that is learned per photo through the kernels of a captured step: fixed shapes, gradients to the rays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nerfturbo.config import CameraConfig, GridSamplerConfig, PhotoConfig
from nerfturbo.data.batches import PixelSampler
from nerfturbo.ops import use_backend
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.training.loss import Capacity, compute_loss, draw_background

from ..tiny import ball_scene, tiny_config

pytest.importorskip("triton", reason="triton has no build for this platform")
N_RAYS = 24


def gradients(device: torch.device, progress: float) -> dict[str, Tensor]:
    config, scene = tiny_config(), ball_scene()
    config = replace(config, cameras=CameraConfig(refine=True, coarse=True, focal=True, distortion=True))
    config = replace(config, photo=PhotoConfig(exposure=True, appearance=3))
    config = replace(
        config, render=replace(config.render, steps_per_diagonal=12), sampler=GridSamplerConfig(prune=False)
    )
    model, draws = NerfModel(config, SceneBounds.of(scene)), torch.Generator().manual_seed(0)
    assert model.photos is not None
    model.photos.observe(scene.cameras, scene.aabb)
    with torch.no_grad():
        for parameter in model.photos.parameters():
            parameter.normal_(std=0.05, generator=draws)
        model.field.encoding.table.uniform_(-0.5, 0.5, generator=draws)  # type: ignore[union-attr]
    model.to(device).set_progress(progress)
    capacity = Capacity(512, 512, torch.tensor(N_RAYS, dtype=torch.int32, device=device))
    batch, background = PixelSampler(scene, device).draw(0, N_RAYS), draw_background(config, 0, N_RAYS, device)
    compute_loss(model, batch, background, step=0, capacity=capacity).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("progress", [0.2, 0.5], ids=["levels-fade-in", "focal-learns"])
def test_kernels_give_the_gradients_of_the_reference(kernel_device: torch.device, progress: float) -> None:
    with use_backend("reference"):
        truth = gradients(kernel_device, progress)
    with use_backend("triton"):
        found = gradients(kernel_device, progress)
    assert (
        {"photos.pose", "photos.focal", "photos.radial", "photos.exposure", "photos.appearance"}
        <= truth.keys()
        == found.keys()
    )
    for name, value in truth.items():
        assert (float(value.norm()) > 0.0) == (name not in ("photos.focal", "photos.radial") or progress > 0.4), name
        assert float((found[name] - value).norm()) <= 1e-2 * float(value.norm()), name
