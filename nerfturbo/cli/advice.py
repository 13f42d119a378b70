"""What to say before training: what was chosen, and that pictures as phones take them are scored by a CPU for hours."""

from __future__ import annotations

import torch

from ..config import Config
from ..data.cameras import Cameras
from ..data.scene import Scene
from ..evaluation.evaluate import choose_views

PIXELS_A_SECOND = {"grid": 50_000.0}  # of two cores that render a trained scene: benchmarks/results/cpu/scenes.json
WITHOUT_A_GRID = 7_000.0
PATIENCE = 900.0  # seconds of scoring that nobody is warned of
DOWNSCALES = (2, 4, 8, 16)


def choice_note(config: Config, scene: Scene) -> str:
    """What a scene is trained with, in one line, whoever chose it."""
    low, high = scene.aabb.low, scene.aabb.high
    box = " x ".join(f"{b - a:.3g}" for a, b in zip(low, high, strict=True))
    levels = f"{config.grid.levels} grid level{'s' if config.grid.levels > 1 else ''}"
    behind = {"random": "random colours", "white": "white", "black": "black"}[config.train.background]
    background = f"{behind} behind what is transparent" if scene.has_alpha else "as photographed"
    reach = f"box of {box}, near {scene.near:.3g}, far {scene.far:.3g}"
    return f"preset {config.preset}; {reach}, {levels}; background: {background}"


def scoring_notes(cameras: Cameras, limit: int | None, config: Config, device: str) -> tuple[str, ...]:
    """A warning where scoring these test views takes a CPU long, with the first smaller size that does not."""
    if not device.startswith("cpu"):
        return ()
    sizes = cameras.size[torch.tensor(choose_views(len(cameras), limit))].long()
    rate = PIXELS_A_SECOND.get(config.sampling.kind, WITHOUT_A_GRID)
    seconds = int(sizes.prod(-1).sum()) * config.render.eval_rays**2 / rate
    if seconds <= PATIENCE:
        return ()
    divisor = next((n for n in DOWNSCALES if seconds / n**2 <= PATIENCE), DOWNSCALES[-1])
    width, height = sizes[0].tolist()
    took = f"{seconds / 60:.0f} minutes" if seconds < 5400.0 else f"{seconds / 3600:.0f} hours"
    what = f"{len(sizes)} test views of {width} x {height}"
    return (f"warning: scoring {what} will take a CPU about {took}: --downscale {divisor}, or fewer --eval-views",)
