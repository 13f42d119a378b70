"""A signed distance learned from points of a surface and their normals, as a scanner gives them

The field's own slope is part of the loss: a distance grows by one per unit of length everywhere (the eikonal equation).
Training it differentiates a gradient, through the hash grid and the network: that needs second derivatives.

You see `torus.png`: the surface found, coloured by its normals. The ring is round and its hole is free.
"""

import math
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

import nerfturbo as nt
import nerfturbo.compat.tinycudann as tcnn
from nerfturbo.config import GridConfig

BOX = nt.Aabb.cube(1.0)
ENCODING = {"otype": "HashGrid", "n_levels": 6, "log2_hashmap_size": 14, "base_resolution": 4, "per_level_scale": 1.5}
NETWORK = {"otype": "FullyFusedMLP", "n_neurons": 64, "n_hidden_layers": 2, "activation": "ReLU"}


def surface(n: int) -> tuple[Tensor, Tensor]:
    """Points of a torus of radii 0.55 and 0.22, and its normals there: what training sees."""
    u, v = (torch.rand(n) * 2 * math.pi for _ in range(2))
    normals = torch.stack([v.cos() * u.cos(), v.cos() * u.sin(), v.sin()], dim=-1)
    return 0.22 * normals + 0.55 * torch.stack([u.cos(), u.sin(), 0.0 * u], dim=-1), normals


class Distance(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = tcnn.NetworkWithInputEncoding(3, 1, ENCODING, NETWORK)

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        points = points.requires_grad_()
        value = 0.2 + self.net(BOX.normalize(points))[:, 0].float()  # at first all of space is outside
        return value, torch.autograd.grad(value.sum(), points, create_graph=True)[0]


def main(steps: int, output: Path, n_points: int = 400, size: int = 120) -> float:
    """Mean error of the distance near the surface."""
    torch.manual_seed(0)
    distance = Distance()
    optimizer = torch.optim.Adam(distance.parameters(), lr=5e-3)
    for step in range(steps):
        points, normals = surface(n_points)
        near, around = points + 0.08 * torch.randn_like(points), 1.8 * torch.rand_like(points) - 0.9
        value, slope = distance(torch.cat([points, near, around]))
        eikonal = (slope.norm(dim=-1) - 1.0).square().mean()
        upright = (slope[:n_points] - normals).norm(dim=-1).mean()
        elsewhere = torch.exp(-50.0 * value[2 * n_points :].abs()).mean()  # no other surface
        loss = value[:n_points].abs().mean() + 0.1 * eikonal + 0.1 * upright + 0.05 * elsewhere
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1:4d}  loss {loss.item():.4f}  |slope| - 1: {eikonal.sqrt().item():.3f}")

    grid = nt.OccupancyGrid.from_points(surface(20000)[0], BOX, GridConfig(resolution=32))
    pose = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 0.6, -0.8, -2.4], [0.0, 0.8, 0.6, 1.8]])[None]
    rays = nt.Cameras.pinhole(pose, width=size, height=size, field_of_view_x=0.7).image_rays(0)
    samples = nt.ray_marching(rays, grid, render_step_size=0.01)
    value, slope = (part.detach() for part in distance(samples.positions(rays)))
    rgb = torch.nn.functional.normalize(slope, dim=-1) / 2 + 0.5
    density = 200.0 * torch.sigmoid(-value / 0.005)  # a solid
    image = nt.volume_rendering(lambda *_: (rgb, density), samples, background=torch.ones(3)).rgb
    Image.fromarray((image.clamp(0, 1) * 255).byte().view(size, size, 3).numpy()).save(output)

    probe = surface(2000)[0] + 0.05 * torch.randn(2000, 3)
    truth = torch.stack([probe[:, :2].norm(dim=-1) - 0.55, probe[:, 2]], dim=-1).norm(dim=-1) - 0.22
    error = (distance(probe)[0] - truth).abs().mean().item()
    print(f"the distance near the surface is off by {error:.4f}: {output}")
    return error


if __name__ == "__main__":
    main(steps=60, output=Path("torus.png"))
