"""Render a sphere: the two functions that plug any field in.

Nothing is trained here. A field is a density and a colour at points in space; `ray_marching` decides where to look,
`volume_rendering` turns what was seen into pixels.
"""

import argparse
from pathlib import Path

import torch

import nerfturbo as nt
from nerfturbo.data.images import save_image


def density(positions: torch.Tensor) -> torch.Tensor:
    """Opaque inside a ball of radius 0.7, empty outside."""
    return torch.where(positions.norm(dim=-1) < 0.7, 80.0, 0.0)


def colour(positions: torch.Tensor) -> torch.Tensor:
    """The direction from the centre, as a colour."""
    return positions / 1.4 + 0.5


def main(output: Path, size: int) -> float:
    box = nt.Aabb.cube(1.0)
    grid = nt.OccupancyGrid(box, step_size=box.diagonal / 512)
    camera = torch.tensor([[[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 3.0]]])
    cameras = nt.Cameras.pinhole(camera, width=size, height=size, field_of_view_x=0.7)
    rays = cameras.image_rays(0)

    def positions(t_starts: torch.Tensor, t_ends: torch.Tensor, ray_indices: torch.Tensor) -> torch.Tensor:
        index = ray_indices.long()
        return rays.origins[index] + rays.directions[index] * ((t_starts + t_ends) / 2)[:, None]

    def sigma_fn(t_starts: torch.Tensor, t_ends: torch.Tensor, ray_indices: torch.Tensor) -> torch.Tensor:
        return density(positions(t_starts, t_ends, ray_indices))

    def rgb_sigma_fn(
        t_starts: torch.Tensor, t_ends: torch.Tensor, ray_indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        points = positions(t_starts, t_ends, ray_indices)
        return colour(points), density(points)

    samples = nt.ray_marching(rays, grid, sigma_fn=sigma_fn, early_stop_eps=1e-4)
    out = nt.volume_rendering(rgb_sigma_fn, samples, background=torch.ones(3))
    save_image(output, out.rgb.reshape(size, size, 3))

    covered = (out.opacity > 0.5).float().mean().item()
    print(f"{samples.capacity} samples on {len(rays)} rays; the ball covers {covered:.1%} of the picture: {output}")
    return covered


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("sphere.png"))
    parser.add_argument("--size", type=int, default=200)
    arguments = parser.parse_args()
    main(arguments.output, arguments.size)
