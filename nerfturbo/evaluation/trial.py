"""Bounded or unbounded, where neither images nor cameras nor points say: a few seconds of each, on small images, scored
on training views that are held out. What the cues lean to stays unless the other is clearly better."""

from dataclasses import replace

import torch

from ..config import NO_STEP_LIMIT, Config
from ..data.scene import Decision, Extent, Scene, downscaled, hold_out
from ..data.scene_defaults import fitted_config
from ..training.trainer import Trainer
from .evaluate import choose_views, evaluate

SECONDS, STEPS, CLEAR = 5.0, NO_STEP_LIMIT, 0.5  # of training, each; dB by which the other must be better
SIDE, VIEWS, SCORED = 128, 24, 3  # of the small images, about


def try_bounds(config: Config, scene: Scene, *, auto: Config | None, device: str) -> tuple[Extent, Decision]:
    """The better of the scene's extent and its other one, and the words that say so."""
    extents = (scene.extent, scene.other or scene.extent)
    small = scene.select(choose_views(len(scene), VIEWS))
    small = downscaled(small, max(1, int(small.cameras.size.amin()) // SIDE))
    scores = [_score(config, small.within(extent), auto, device) for extent in extents]
    best = int(scores[1] > scores[0] + CLEAR)
    words = ", ".join(f"{extent.kind} {score:.1f} dB" for extent, score in zip(extents, scores, strict=True))
    words = f"after {SECONDS:g} s of each on held-out views: {words}"
    return extents[best], Decision.of("trial", extents[best].kind, words, f"--bounds {extents[1 - best].kind}")


def _score(config: Config, scene: Scene, auto: Config | None, device: str) -> float:
    fitted, _ = fitted_config(replace(config, train=replace(config.train, time_limit=None)), scene, auto=auto)
    rest, held = hold_out(scene, max(2, -(-len(scene) // SCORED)))
    for steps, limit in ((2, None), (STEPS, SECONDS)):  # first what has to be compiled
        train = replace(fitted.train, steps=steps, time_limit=limit, target_psnr=None)
        trainer = Trainer(replace(fitted, train=train), rest, device=device)
        trainer.fit()
    with trainer.as_finished(), torch.no_grad():
        return evaluate(trainer.model, held, with_ssim=False).psnr
