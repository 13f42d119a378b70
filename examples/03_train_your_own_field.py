"""Train your own field: a plain torch module, a plain torch loop, and two calls that make it fast.

The module below knows nothing of nerfturbo. `ray_marching` skips what is empty or hidden, `volume_rendering` is
differentiable, and everything else (optimizer, loss, schedule) stays yours.
"""

import argparse
import math
import time

import torch
from torch import nn

import nerfturbo as nt
from nerfturbo.config import GridConfig
from nerfturbo.data.batches import PixelSampler
from nerfturbo.data.builtin import builtin_scene


class MyField(nn.Module):
    """Sines of the position into a small network: five outputs, colour and density."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frequencies = nn.Parameter(torch.randn(3, 48) * 3.0, requires_grad=False)
        self.net = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions @ self.frequencies
        out = self.net(torch.cat([angles.sin(), angles.cos()], dim=-1))
        return torch.sigmoid(out[:, :3]), nn.functional.softplus(out[:, 3] + 0.5) * 5.0


def main(steps: int) -> tuple[float, float]:
    scene = builtin_scene("toybox", "train", resolution=64, n_views=24)
    sampler = PixelSampler(scene)
    grid = nt.OccupancyGrid(scene.aabb, GridConfig(resolution=32), step_size=scene.aabb.diagonal / 128)
    field = MyField()
    optimizer = torch.optim.Adam(field.net.parameters(), lr=5e-3)
    first = last = 0.0
    started = time.perf_counter()

    for step in range(steps):
        if step % 16 == 0:
            grid.update(step, lambda positions: field(positions)[1])
        batch = sampler.draw(step, 512)
        rays, alpha = batch.rays, batch.rgba[:, 3:]
        target = batch.rgba[:, :3] * alpha + (1.0 - alpha)  # over white

        def positions(
            t_starts: torch.Tensor, t_ends: torch.Tensor, ray_indices: torch.Tensor, rays: nt.Rays = rays
        ) -> torch.Tensor:
            index = ray_indices.long()
            return rays.origins[index] + rays.directions[index] * ((t_starts + t_ends) / 2)[:, None]

        samples = nt.ray_marching(rays, grid, sigma_fn=lambda *t: field(positions(*t))[1], stratified=True, step=step)
        out = nt.volume_rendering(lambda *t: field(positions(*t)), samples, background=torch.ones(3))

        loss = nn.functional.mse_loss(out.rgb, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        last = -10.0 * math.log10(loss.item())
        first = first or last
        if step % 50 == 0 or step == steps - 1:
            seconds = time.perf_counter() - started
            print(f"step {step:4d}  {last:5.2f} dB  {samples.capacity:6d} samples  {seconds:5.1f} s")
    return first, last


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
