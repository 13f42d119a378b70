"""A scene that moves: time is one more input of the field

A ball swings from left to right. Rays carry the time of their picture; the field sees position and time; the grid keeps
a cell for as long as anything was in it at any time.
"""

import argparse
import math

import torch
from torch import nn

import nerfturbo as nt
from nerfturbo.config import GridConfig

BOX = nt.Aabb.cube(1.0)


def swinging_ball(positions: torch.Tensor, times: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is to be learned: a ball that changes colour on its way."""
    center = torch.stack([1.2 * times - 0.6, 0.3 * (times * math.pi).sin(), torch.zeros_like(times)], dim=-1)
    rgb = torch.stack([times, 0.4 + 0.0 * times, 1.0 - times], dim=-1)
    return rgb, 30.0 * torch.sigmoid(((positions - center).norm(dim=-1) - 0.3) * -40.0)


class Field(nn.Module):
    """Sines of position and time into a network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, positions: torch.Tensor, times: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.cat([positions, 2.0 * times[:, None] - 1.0], dim=-1)
        angles = (inputs[..., None] * (math.pi / 2 * 2.0 ** torch.arange(4))).flatten(1)
        out = self.net(torch.cat([angles.sin(), angles.cos()], dim=-1))
        return torch.sigmoid(out[:, :3]), nn.functional.softplus(out[:, 3]) * 6.0


def random_rays(n: int, generator: torch.Generator) -> nt.Rays:
    origins = nn.functional.normalize(torch.randn(n, 3, generator=generator), dim=-1) * 3.0
    targets = (torch.rand(n, 3, generator=generator) - 0.5) * torch.tensor([1.6, 1.0, 0.6])
    times = torch.rand(n, generator=generator)
    return nt.Rays(origins, nn.functional.normalize(targets - origins, dim=-1), times)


def render(field, rays: nt.Rays, grid: nt.OccupancyGrid, step: int) -> torch.Tensor:
    assert rays.times is not None
    times = rays.times

    def at(samples: nt.PackedSamples) -> tuple[torch.Tensor, torch.Tensor]:
        return samples.positions(rays), times[samples.ray_indices.long()]

    samples = nt.ray_marching(rays, grid, stratified=True, step=step)
    return nt.volume_rendering(lambda *_: field(*at(samples)), samples, background=torch.ones(3)).rgb


def over_time(field, step: int):
    """The largest density of a position over a few moments, other ones in every update."""
    moments = (torch.arange(4) + (step * 0.618) % 1.0) / 4

    def density(positions: torch.Tensor) -> torch.Tensor:
        return torch.stack([field(positions, moment.expand(len(positions)))[1] for moment in moments]).amax(0)

    return density


def main(steps: int, n_rays: int = 512) -> tuple[float, float]:
    """PSNR of unseen rays at unseen times, before and after."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    truth, learned = (nt.OccupancyGrid(BOX, GridConfig(resolution=16), step_size=0.06) for _ in range(2))
    for step in range(8):
        truth.update(step, over_time(swinging_ball, step), all_cells=True)
    field = Field()
    optimizer = torch.optim.Adam(field.parameters(), lr=1e-2)
    unseen = random_rays(1000, torch.Generator().manual_seed(1))

    @torch.no_grad()
    def psnr() -> float:
        error = render(field, unseen, learned, 0) - render(swinging_ball, unseen, truth, 0)
        return -10.0 * error.square().mean().log10().item()

    before = psnr()
    for step in range(steps):
        if step % 16 == 0:
            learned.update(step, over_time(field, step))
        rays = random_rays(n_rays, generator)
        with torch.no_grad():
            target = render(swinging_ball, rays, truth, step)
        loss = nt.color_loss(render(field, rays, learned, step), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1:4d}  {psnr():5.2f} dB at times that training did not see")
    return before, psnr()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
