"""Skip empty space: teach an occupancy grid a field and count what it saves.

The grid asks the field for its density cell by cell; from then on `ray_marching` returns samples in occupied cells
only. With `sigma_fn` it also drops what hides behind opaque samples.
"""

import argparse

import torch

import nerfturbo as nt


def density(positions: torch.Tensor) -> torch.Tensor:
    """A ring in the plane z = 0."""
    across = positions[:, :2].norm(dim=-1) - 0.6
    return torch.where(across.square() + positions[:, 2].square() < 0.15**2, 200.0, 0.0)


def main(n_rays: int) -> dict[str, int]:
    box = nt.Aabb.cube(1.0)
    grid = nt.OccupancyGrid(box, step_size=box.diagonal / 512)
    generator = torch.Generator().manual_seed(0)
    origins = torch.nn.functional.normalize(torch.randn(n_rays, 3, generator=generator), dim=-1) * 3.0
    targets = (torch.rand(n_rays, 3, generator=generator) - 0.5) * 1.5
    rays = nt.Rays(origins, torch.nn.functional.normalize(targets - origins, dim=-1))

    def sigma_fn(t_starts: torch.Tensor, t_ends: torch.Tensor, ray_indices: torch.Tensor) -> torch.Tensor:
        index = ray_indices.long()
        return density(rays.origins[index] + rays.directions[index] * ((t_starts + t_ends) / 2)[:, None])

    counts = {"every step in the box": nt.ray_marching(rays, grid).capacity}
    for step in range(8):  # each update looks at another random point of every cell
        grid.update(step, density)
    counts["in occupied cells"] = nt.ray_marching(rays, grid).capacity
    counts["and not hidden"] = nt.ray_marching(rays, grid, sigma_fn=sigma_fn).capacity

    whole = counts["every step in the box"]
    print(f"{grid.occupied_fraction().item():.1%} of the cells are occupied")
    for name, count in counts.items():
        print(f"{count:9d} samples {name:22s} {1 - count / whole:6.1%} skipped")
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rays", type=int, default=5000)
    main(parser.parse_args().rays)
