"""Cameras that are a little off, put right by their images

Marching does not differentiate, but positions along rays do: with rays that depend on trainable poses, the colour loss
moves the cameras. Here the scene is known, and eight poses that are off by degrees are found again. For captures:
`nerfturbo train captures/fox --cameras.refine`.

You see `cameras.png`, a row for each of four: the image, what is rendered from the wrong pose, and from the one found.
"""

from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

import nerfturbo as nt
from nerfturbo.config import GridConfig

SIZE, N_CAMERAS = 24, 8
BLOBS = torch.tensor([[0.4, 0.0, 0.1], [-0.4, 0.2, 0.0], [0.0, -0.4, 0.3], [0.1, 0.3, -0.4], [0.0, 0.0, 0.0]])
COLORS = torch.tensor([[0.9, 0.2, 0.1], [0.1, 0.8, 0.2], [0.2, 0.3, 0.9], [0.9, 0.8, 0.1], [0.7, 0.2, 0.8]])
GRID = nt.OccupancyGrid(nt.Aabb.cube(0.8), GridConfig(resolution=32), step_size=0.04)


def blobs(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Soft coloured balls: smooth enough for a camera to feel which way to go."""
    weight = torch.exp(-30.0 * (positions[:, None] - BLOBS).square().sum(-1))
    return (weight @ COLORS) / weight.sum(-1, keepdim=True).clamp_min(1e-6), 12.0 * weight.sum(-1)


def moved(cameras: nt.Cameras, twist: Tensor) -> nt.Cameras:
    """Turned about their own centres and shifted by twist (n, 6): a rotation vector, then a translation."""
    x, y, z = twist[:, :3].unbind(-1)
    zero = torch.zeros_like(x)
    skew = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=-1).view(-1, 3, 3)
    rotation, position = cameras.camera_to_world.split([3, 1], dim=-1)
    poses = torch.cat([torch.matrix_exp(skew) @ rotation, position + twist[:, 3:, None]], dim=-1)
    return replace(cameras, camera_to_world=poses)


def render(rays: nt.Rays) -> Tensor:
    samples = nt.ray_marching(nt.Rays(rays.origins.detach(), rays.directions.detach()), GRID)
    return nt.volume_rendering(lambda *_: blobs(samples.positions(rays)), samples, background=torch.ones(3)).rgb


def main(steps: int, output: Path) -> tuple[float, float]:
    """By how many pixels the balls' centres are seen in the wrong place, before and after."""
    torch.manual_seed(0)
    GRID.update(0, lambda positions: blobs(positions)[1])
    poses = nt.load_scene("toybox", downscale=100).cameras.camera_to_world[::8][:N_CAMERAS].clone()
    poses[:, :, 3] *= 2.2 / 4.0  # nearer
    true = nt.Cameras.pinhole(poses, width=SIZE, height=SIZE, field_of_view_x=0.75)
    start = moved(true, 0.06 * torch.randn(N_CAMERAS, 6))
    twist = torch.zeros(N_CAMERAS, 6, requires_grad=True)
    optimizer = torch.optim.Adam([twist], lr=5e-3)

    def error() -> float:
        index, points = torch.arange(N_CAMERAS).repeat_interleave(len(BLOBS)), BLOBS.repeat(N_CAMERAS, 1)
        off = moved(start, twist.detach()).project(index, points)[0] - true.project(index, points)[0]
        return off.norm(dim=-1).mean().item()

    before = error()
    for _ in range(steps):
        camera, x, y = (torch.randint(n, (512,)) for n in (N_CAMERAS, SIZE, SIZE))
        target = render(true.rays(camera, x + 0.5, y + 0.5))
        loss = nt.color_loss(render(moved(start, twist).rays(camera, x + 0.5, y + 0.5)), target, kind="mse")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    columns = [torch.cat([render(c.image_rays(i)) for i in range(4)]) for c in (true, start, moved(start, twist))]
    image = torch.cat([column.detach().view(4 * SIZE, SIZE, 3) for column in columns], dim=1)
    Image.fromarray((image.clamp(0, 1) * 255).byte().numpy()).resize((360, 480), Image.Resampling.NEAREST).save(output)
    print(f"{before:.2f} pixels off, then {error():.3f}: {output}")
    return before, error()


if __name__ == "__main__":
    main(steps=200, output=Path("cameras.png"))
