"""Test views scored on their right halves, in the exposure and look that their left halves have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nerfturbo.config import PhotoConfig
from nerfturbo.data.images import ImagePool, pack_flags
from nerfturbo.data.scene import Scene
from nerfturbo.errors import InputError
from nerfturbo.evaluation import align
from nerfturbo.evaluation.align import right_halves
from nerfturbo.evaluation.evaluate import evaluate
from nerfturbo.ops.pixels import PixelMask
from nerfturbo.rendering import photos
from nerfturbo.rendering.model import NerfModel
from nerfturbo.rendering.photos import exposed_color
from nerfturbo.training.trainer import Trainer

from ..tiny import ball_scene, tiny_config

GAINS = torch.tensor([0.8, -0.6, 0.7])


def exposed(scene: Scene, signs: list[float], *, columns: slice = slice(None)) -> Scene:
    pictures = torch.stack([scene.images.image(index) for index in range(len(scene))])
    for picture, sign in zip(pictures, signs, strict=True):
        picture[:, columns, :3] = exposed_color(picture[:, columns, :3], sign * GAINS)
    return replace(scene, images=ImagePool.from_images((pictures * 255.0 + 0.5).to(torch.uint8)))


@pytest.fixture(scope="module", params=["exposure", "appearance"])
def model(request: pytest.FixtureRequest) -> NerfModel:
    """It has seen the ball in two exposures."""
    photo = PhotoConfig(exposure=True) if request.param == "exposure" else PhotoConfig(appearance=2)
    config = tiny_config(steps=300)
    config = replace(config, photo=photo, field=replace(config.field, n_levels=3, log2_entries=14, max_resolution=48))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(photos, "PHOTO_LR", 5e-2)
        trainer = Trainer(config, exposed(ball_scene(n_views=12), [1.0, -1.0] * 6))
        trainer.fit()
    return trainer.model.eval()


def test_a_view_is_scored_in_the_look_of_its_other_half(model: NerfModel) -> None:
    scene = exposed(ball_scene(), [1.0, -1.0, -1.0, 1.0])
    plain, fitted = evaluate(model, scene), right_halves(model, scene, steps=40, n_rays=48)
    assert [view.index for view in fitted.views] == [
        0,
        1,
        2,
        3,
    ] and fitted.ssim is None  # 8 columns are less than a window
    assert all(own.psnr > whole.psnr + 2.0 for own, whole in zip(fitted.views, plain.views, strict=True))
    assert model.photos is not None and model.photos.guest is None
    assert evaluate(model, scene).psnr == plain.psnr  # nothing of the model changed
    assert all(parameter.requires_grad for parameter in model.photos.parameters())


def test_the_right_half_says_nothing_of_its_look(model: NerfModel) -> None:
    """Where the right half alone is exposed otherwise, the look of the left one is what it is compared in."""
    given = ball_scene().select([0])
    told, untold = (exposed(given, [1.0], columns=slice(*columns)) for columns in ((0, 8), (8, 16)))
    both = exposed(given, [1.0])
    scores = [right_halves(model, scene, steps=40, n_rays=48).psnr for scene in (both, told, untold)]
    assert scores[0] > scores[1] + 2.0 and scores[0] > scores[2] + 2.0, scores


def test_without_a_left_half_the_look_is_the_mean(model: NerfModel) -> None:
    scene = exposed(ball_scene().select([0]), [1.0])
    mask = torch.arange(16).expand(16, 16) >= 8
    masked = replace(scene, images=replace(scene.images, mask=PixelMask.of_words(pack_flags([mask.numpy()]))))
    assert right_halves(model, masked, steps=0, n_rays=48).psnr == pytest.approx(
        right_halves(model, scene, steps=0, n_rays=48).psnr
    )
    assert right_halves(model, masked, steps=9, n_rays=48).psnr == pytest.approx(
        right_halves(model, scene, steps=0, n_rays=48).psnr
    )


def test_a_model_that_learned_no_look_is_refused() -> None:
    trainer = Trainer(tiny_config(steps=1), ball_scene())
    with pytest.raises(InputError, match=r"photo\.exposure or photo\.appearance, got one that learned neither"):
        right_halves(trainer.model, ball_scene("test"))


def test_values_go_where_torchs_adam_takes_them() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(8, 5, dtype=torch.float64, generator=generator)

    def start() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(5, dtype=torch.float64).requires_grad_(), torch.ones(3, dtype=torch.float64).requires_grad_()

    def loss(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (matrix @ one - 1.0).square().mean() + other.pow(4).sum()

    own, theirs = start(), start()
    descend, adam = align._adam([*own], 2e-2, 30), torch.optim.Adam(theirs, lr=2e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 30, eta_min=1e-3)
    for step in range(30):
        descend(loss(*own), step)
        adam.zero_grad()
        loss(*theirs).backward()
        adam.step()
        schedule.step()
    assert float(own[0].detach().sub(1.0).abs().max()) > 0.1
    for one, other in zip(own, theirs, strict=True):
        assert torch.allclose(one, other, rtol=0.0, atol=1e-12)
