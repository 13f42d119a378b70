"""Run folders written by version 0.1, one per field and sampler: they open, score the same and resume bit for bit.

`runs_0_1/expected.json` has what version 0.1 itself scored on view 0 after 8 steps, and after 4 more of a resumed run.
"""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nerfturbo.data.scene import Scene, load_scene
from nerfturbo.evaluation.run_folder import open_run
from nerfturbo.rendering.model import NerfModel
from nerfturbo.training.checkpoint import latest_checkpoint
from nerfturbo.training.trainer import Trainer, load_model

RUNS = Path(__file__).parent / "runs_0_1"
EXPECTED = json.loads((RUNS / "expected.json").read_text())


@functools.cache
def scene(source: str, split: str, downscale: int) -> Scene:
    return load_scene(source, split, downscale=downscale)


def psnr(model: NerfModel, test: Scene) -> float:
    image = test.images.image(0)
    truth = image[..., :3] * image[..., 3:] + (1.0 - image[..., 3:])
    return -10.0 * float((model.render_image(test.cameras, 0).rgb.double() - truth).square().mean().log10())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_run_of_version_0_1_opens_and_resumes(name: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(RUNS / name, tmp_path / name))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    config = open_run(str(folder)).read_config()
    checkpoint, data = latest_checkpoint(folder), config.data
    train, test = (scene(data.source, split, data.downscale) for split in ("train", "test"))
    assert psnr(load_model(checkpoint), test) == pytest.approx(EXPECTED[name]["psnr_at_8"], abs=1e-3)

    trainer = Trainer(replace(config, train=replace(config.train, steps=12)), train)
    trainer.resume(checkpoint)
    trainer.fit()
    with trainer.as_finished(), torch.no_grad():
        assert psnr(trainer.model, test) == pytest.approx(EXPECTED[name]["psnr_at_12"], abs=1e-3)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
