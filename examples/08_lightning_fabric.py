"""Several processes, devices and precisions: a loop of your own under Lightning Fabric

    python examples/08_lightning_fabric.py --devices 2      # two processes, on GPUs where there are some

Each process draws the same batch and renders its part; DDP takes the mean of the gradients. So k processes do what one
does, and their grids stay equal, for their weights are. The trainer itself goes over torchrun: docs/distributed.md.

You see `fabric.png`: a view that training did not see, ground truth on the left, and the same losses for any --devices.
"""

import argparse
from pathlib import Path

import torch
from lightning.fabric import Fabric
from PIL import Image
from torch import Tensor, nn

import nerfturbo as nt


class Model(nn.Module):
    """Field and grid as one module, so that calling it goes through Fabric's wrapper (DDP, autocast)."""

    def __init__(self, aabb: nt.Aabb) -> None:
        super().__init__()
        config = nt.preset("ngp-cpu")
        self.field = nt.InstantNGP(aabb, config.field)
        self.grid = nt.OccupancyGrid(aabb, config.grid, step_size=0.03)

    def forward(self, rays: nt.Rays) -> Tensor:
        return nt.render_rays(self.field, rays, self.grid, background=torch.ones(3, device=rays.device)).rgb


def on_white(rgba: Tensor) -> Tensor:
    return rgba[..., :3] * rgba[..., 3:] + 1.0 - rgba[..., 3:]


def main(steps: int, output: Path, devices: int = 1, precision: str = "32-true", n_rays: int = 1024) -> list[float]:
    """The loss of each step, over all processes."""
    fabric = Fabric(devices=devices, precision=precision, strategy="ddp" if devices > 1 else "auto")
    fabric.launch()
    train, test = (nt.load_scene("toybox", split, downscale=3).to(fabric.device) for split in ("train", "test"))
    images = torch.stack([on_white(train.images.image(index)) for index in range(len(train))])
    torch.manual_seed(0)
    module = Model(train.aabb)
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters(), lr=1e-2))
    generator, losses = torch.Generator().manual_seed(0), []
    for step in range(steps):
        if step % 16 == 0:
            module.grid.update(step, module.field.density)
        drawn = (torch.randint(n, (n_rays,), generator=generator) for n in images.shape[:3])
        view, y, x = (part[fabric.global_rank :: fabric.world_size].to(fabric.device) for part in drawn)
        loss = nn.functional.mse_loss(model(train.cameras.rays(view, x + 0.5, y + 0.5)).float(), images[view, y, x])
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        losses.append(float(fabric.all_reduce(loss.detach())))
        if step % 20 == 19:
            fabric.print(f"step {step + 1:4d}  loss {losses[-1]:.6f} over {fabric.world_size} processes")

    if fabric.is_global_zero:
        truth, rays = on_white(test.images.image(0)), test.cameras.image_rays(0)
        with torch.no_grad():
            image = module(rays).view_as(truth)
        Image.fromarray((torch.cat([truth, image], 1).clamp(0, 1) * 255).byte().cpu().numpy()).save(output)
        print(f"{-10.0 * (image - truth).square().mean().log10():.1f} dB on an unseen view: {output}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path("fabric.png"))
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    main(**vars(parser.parse_args()))
