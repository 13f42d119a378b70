"""The native step under Lightning Fabric: your own loop, with Fabric's devices, precision and launch.

`RayBatches` draws rays and compares them with the pictures, `FieldAdam` is the fused Adam as a torch optimizer. What
Fabric adds is three lines: `setup`, `backward`, and `launch` where several processes train together.
"""

import argparse
import math
from dataclasses import replace

import torch
from lightning.fabric import Fabric
from torch import nn

from nerfturbo.config import Config
from nerfturbo.data.batches import PixelSampler
from nerfturbo.data.builtin import builtin_scene
from nerfturbo.data.scene import Scene
from nerfturbo.presets import preset
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.training.distributed import ProcessTeam, Team
from nerfturbo.training.optim import FieldAdam, learning_rate
from nerfturbo.training.step import RayBatches, start_totals, totals_of
from nerfturbo.training.trainer import mark_unseen_cells


class Loss(nn.Module):
    """The model and its batches as one module, so that calling it goes through Fabric's wrapper (DDP, autocast)."""

    def __init__(self, config: Config, scene: Scene, device: torch.device, team: Team) -> None:
        super().__init__()
        self.model = NerfModel(config, SceneBounds.of(scene)).to(device)
        self.batches = RayBatches(self.model, PixelSampler(scene, device, config.train.seed), team=team)

    def forward(self, step: int) -> torch.Tensor:
        result, team = self.batches.loss(step), self.batches.team
        self.seen = result
        if team.alone:
            return result.loss
        sums, wait = start_totals(result, team)
        wait()
        self.seen, weight = totals_of(sums, result)
        return result.loss * (weight * team.world).float()  # DDP takes the mean over ranks


def main(config: Config, scene: Scene, *, devices: int = 1, precision: str = "32-true") -> list[float]:
    fabric = Fabric(accelerator="auto", devices=devices, precision=precision)
    fabric.launch()
    team = ProcessTeam(fabric.device) if fabric.world_size > 1 else Team()
    module = Loss(config, scene, fabric.device, team)
    model, batches = module.model, module.batches
    mark_unseen_cells(model, scene)
    compute, optimizer = fabric.setup(module, FieldAdam(model, config.optim))
    losses: list[float] = []

    for step in range(config.train.steps):
        if step % config.grid.update_every == 0:
            batches.stages.update_grid(model, step, team=team)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optim, step, step / config.train.steps)
        fabric.backward(compute(step))
        seen = module.seen
        optimizer.step()
        optimizer.zero_grad()
        batches.adapt(int(seen.n_samples), int(seen.n_marched))
        losses.append(float(seen.loss.detach()))
        if step % 50 == 0:
            psnr = -10.0 * math.log10(max(float(seen.mse), 1e-12))
            fabric.print(f"step {step:4d}  loss {losses[-1]:.4f}  {psnr:5.2f} dB  {int(seen.n_rays)} rays")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    args = parser.parse_args()
    chosen = preset("ngp-cpu")
    chosen = replace(chosen, train=replace(chosen.train, steps=args.steps))
    pictures = builtin_scene("toybox", "train", resolution=64, n_views=24)
    main(chosen, pictures, devices=args.devices, precision=args.precision)
