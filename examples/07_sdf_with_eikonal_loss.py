"""A signed distance learned from points of a surface alone

The field's own slope is part of the loss: a distance grows by one per unit of length everywhere (the eikonal equation).
Training it differentiates a gradient, through the hash grid and the network: that needs second derivatives.
"""

import argparse
import math

import torch

import nerfturbo as nt
import nerfturbo.compat.tinycudann as tcnn
from nerfturbo.config import GridConfig

BOX = nt.Aabb.cube(1.0)
ENCODING = {"otype": "HashGrid", "n_levels": 6, "log2_hashmap_size": 14, "base_resolution": 4, "per_level_scale": 1.5}
NETWORK = {"otype": "FullyFusedMLP", "n_neurons": 64, "n_hidden_layers": 2, "activation": "ReLU"}


def torus(points: torch.Tensor) -> torch.Tensor:
    """The exact distance to a torus of radii 0.55 and 0.22: what is to be found."""
    ring = points[:, :2].norm(dim=-1) - 0.55
    return torch.stack([ring, points[:, 2]], dim=-1).norm(dim=-1) - 0.22


def surface(n: int, generator: torch.Generator) -> torch.Tensor:
    """Points of the torus: what training sees."""
    u, v = (torch.rand(n, generator=generator) * 2 * math.pi for _ in range(2))
    ring = 0.55 + 0.22 * v.cos()
    return torch.stack([ring * u.cos(), ring * u.sin(), 0.22 * v.sin()], dim=-1)


class Distance(torch.nn.Module):
    """A sphere's distance plus what is learned: outside is positive from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tcnn.NetworkWithInputEncoding(3, 1, ENCODING, NETWORK)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return points.norm(dim=-1) - 0.6 + self.net(BOX.normalize(points))[:, 0].float()


def slope(distance: Distance, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    points = points.requires_grad_()
    value = distance(points)
    (gradient,) = torch.autograd.grad(value.sum(), points, create_graph=True)
    return value, gradient


def main(steps: int, n_points: int = 1024) -> tuple[float, float]:
    """Mean error of the distance near the surface, before and after."""
    generator = torch.Generator().manual_seed(0)
    distance = Distance()
    optimizer = torch.optim.Adam(distance.parameters(), lr=5e-3)
    probe = surface(2000, generator) + 0.05 * torch.randn(2000, 3, generator=generator)

    def error() -> float:
        with torch.no_grad():
            return (distance(probe) - torus(probe)).abs().mean().item()

    before = error()
    for step in range(steps):
        on_it = surface(n_points, generator)
        around = torch.rand(n_points, 3, generator=generator) * 1.8 - 0.9
        near = on_it + 0.08 * torch.randn(n_points, 3, generator=generator)
        value, _ = slope(distance, on_it)
        away, gradient = slope(distance, torch.cat([around, near]))
        eikonal = (gradient.norm(dim=-1) - 1.0).square().mean()
        elsewhere = torch.exp(-50.0 * away[:n_points].abs()).mean()  # no other surface
        loss = value.abs().mean() + 0.1 * eikonal + 0.05 * elsewhere
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1:4d}  error {error():.4f}  |slope| - 1: {eikonal.sqrt().item():.3f}")

    grid = nt.OccupancyGrid.from_points(surface(20000, generator), BOX, GridConfig(resolution=32))
    rays = nt.Rays(torch.tensor([[0.55, 0.0, -1.0]]), torch.tensor([[0.0, 0.0, 1.0]]))

    def sigma_fn(t_starts: torch.Tensor, t_ends: torch.Tensor, ray_indices: torch.Tensor) -> torch.Tensor:
        middle = ((t_starts + t_ends) / 2)[:, None]
        return 200.0 * torch.sigmoid(-distance(rays.origins + rays.directions * middle) / 0.005)

    with torch.no_grad():
        samples = nt.ray_marching(rays, grid, render_step_size=0.005)
        seen = nt.volume_rendering(lambda *s: (torch.ones(len(s[0]), 1), sigma_fn(*s)), samples)
    print(f"rendered as a solid, a ray through the ring meets it at {seen.depth.item():.3f} (0.780 is right)")
    return before, error()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
