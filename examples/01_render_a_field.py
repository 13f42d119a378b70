"""Render any field: two functions of samples, and a grid that skips empty space

Nothing is trained. `ray_marching` decides where to look, `volume_rendering` turns what was seen into pixels. The
occupancy grid learns where the field is empty; with `sigma_fn` samples behind opaque ones are dropped too.

You see `ring.png`: a ring on white, coloured by position, and how many samples each step saves.
"""

from pathlib import Path

import torch
from PIL import Image

import nerfturbo as nt


def density(positions: torch.Tensor) -> torch.Tensor:
    """A solid ring in the plane z = 0."""
    across = positions[:, :2].norm(dim=-1) - 0.6
    return torch.where(across.square() + positions[:, 2].square() < 0.2**2, 80.0, 0.0)


def color(positions: torch.Tensor) -> torch.Tensor:
    return positions / 1.6 + 0.5


def main(output: Path, size: int = 200) -> dict[str, int]:
    """The number of samples: at every step in the box, in occupied cells, and of those the visible ones."""
    box = nt.Aabb.cube(1.0)
    grid = nt.OccupancyGrid(box, step_size=box.diagonal / 512)
    tilt = torch.tensor(0.9)
    turn = torch.tensor([[1.0, 0.0, 0.0], [0.0, tilt.cos(), -tilt.sin()], [0.0, tilt.sin(), tilt.cos()]])
    pose = torch.cat([turn, 3.0 * turn[:, 2:]], dim=1)  # camera to world: it looks along its own -z
    rays = nt.Cameras.pinhole(pose[None], width=size, height=size, field_of_view_x=0.7).image_rays(0)

    def positions(t_starts: torch.Tensor, t_ends: torch.Tensor, ray_indices: torch.Tensor) -> torch.Tensor:
        index = ray_indices.long()
        return rays.origins[index] + rays.directions[index] * ((t_starts + t_ends) / 2)[:, None]

    def sigma_fn(*samples: torch.Tensor) -> torch.Tensor:
        return density(positions(*samples))

    def rgb_sigma_fn(*samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        points = positions(*samples)
        return color(points), density(points)

    counts = {"at every step in the box": nt.ray_marching(rays, grid).capacity}
    for step in range(8):  # each update looks at another random point of every cell
        grid.update(step, density)
    counts["in occupied cells"] = nt.ray_marching(rays, grid).capacity
    samples = nt.ray_marching(rays, grid, sigma_fn=sigma_fn, early_stop_eps=1e-4)
    counts["and not hidden"] = samples.capacity

    out = nt.volume_rendering(rgb_sigma_fn, samples, background=torch.ones(3))
    Image.fromarray((out.rgb.clamp(0, 1) * 255).byte().view(size, size, 3).numpy()).save(output)
    for name, count in counts.items():
        print(f"{count:9d} samples {name:25s} {1 - count / counts['at every step in the box']:6.1%} skipped")
    print(f"the ring covers {(out.opacity > 0.5).float().mean():.1%} of {output}")
    return counts


if __name__ == "__main__":
    main(output=Path("ring.png"))
