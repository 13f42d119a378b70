"""Cameras that are a little off, put right by the pictures

Marching does not differentiate, but positions along rays do: with rays that depend on trainable poses, the colour loss
moves the cameras. Here the scene is known, and eight poses that are off by degrees are found again.
"""

import argparse

import torch

import nerfturbo as nt
from nerfturbo.config import GridConfig

SIZE, FOCAL = 24, 30.0
BLOBS = torch.tensor([[0.4, 0.0, 0.1], [-0.4, 0.2, 0.0], [0.0, -0.4, 0.3], [0.1, 0.3, -0.4], [0.0, 0.0, 0.0]])
COLORS = torch.tensor([[0.9, 0.2, 0.1], [0.1, 0.8, 0.2], [0.2, 0.3, 0.9], [0.9, 0.8, 0.1], [0.7, 0.2, 0.8]])


def blobs(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Soft coloured balls: smooth enough for a camera to feel which way to go."""
    weight = torch.exp(-30.0 * (positions[:, None] - BLOBS).square().sum(-1))
    return (weight @ COLORS) / weight.sum(-1, keepdim=True).clamp_min(1e-6), 12.0 * weight.sum(-1)


def true_poses(n: int) -> torch.Tensor:
    """(n, 3, 4): on a circle, looking at the middle along -z, y up."""
    angles = torch.arange(n) * (2 * torch.pi / n)
    backward = torch.nn.functional.normalize(
        torch.stack([angles.cos(), torch.full((n,), 0.4), angles.sin()], dim=-1), dim=-1
    )
    right = torch.nn.functional.normalize(torch.linalg.cross(torch.tensor([[0.0, 1.0, 0.0]]), backward), dim=-1)
    up = torch.linalg.cross(backward, right)
    return torch.cat([torch.stack([right, up, backward], dim=-1), 2.2 * backward[..., None]], dim=-1)


def moved(poses: torch.Tensor, twist: torch.Tensor) -> torch.Tensor:
    """Poses turned about their own centres and shifted by twist (n, 6): a rotation vector, then a translation."""
    x, y, z = twist[:, :3].unbind(-1)
    zero = torch.zeros_like(x)
    skew = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], dim=-1).view(-1, 3, 3)
    return torch.cat([torch.matrix_exp(skew) @ poses[..., :3], poses[..., 3:] + twist[:, 3:, None]], dim=-1)


def rays_of(poses: torch.Tensor, camera: torch.Tensor, pixel: torch.Tensor) -> nt.Rays:
    """Rays that are functions of the poses."""
    u = (pixel % SIZE + 0.5 - SIZE / 2) / FOCAL
    v = (pixel // SIZE + 0.5 - SIZE / 2) / FOCAL
    local = torch.nn.functional.normalize(torch.stack([u, -v, -torch.ones_like(u)], dim=-1), dim=-1)
    return nt.Rays(poses[camera, :, 3], (poses[camera, :, :3] @ local[..., None])[..., 0])


def pixels_of(poses: torch.Tensor) -> torch.Tensor:
    """(n, blobs, 2): where each camera sees the balls' centres."""
    local = torch.einsum("nji,nbj->nbi", poses[..., :3], BLOBS - poses[:, None, :, 3])
    return FOCAL * local[..., :2] / -local[..., 2:]


def render(rays: nt.Rays, grid: nt.OccupancyGrid) -> torch.Tensor:
    samples = nt.ray_marching(nt.Rays(rays.origins.detach(), rays.directions.detach()), grid)
    out = nt.volume_rendering(lambda *_: blobs(samples.positions(rays)), samples, background=torch.ones(3))
    return out.rgb


def main(steps: int, n_cameras: int = 8) -> tuple[float, float]:
    """By how many pixels the balls' centres are seen in the wrong place, before and after."""
    torch.manual_seed(0)
    grid = nt.OccupancyGrid(nt.Aabb.cube(0.8), GridConfig(resolution=32), step_size=0.04)
    grid.update(0, lambda positions: blobs(positions)[1])
    truth = true_poses(n_cameras)
    start = moved(truth, 0.06 * torch.randn(n_cameras, 6))
    twist = torch.zeros(n_cameras, 6, requires_grad=True)
    optimizer = torch.optim.Adam([twist], lr=5e-3)

    def error() -> float:
        return (pixels_of(moved(start, twist.detach())) - pixels_of(truth)).norm(dim=-1).mean().item()

    before = error()
    for step in range(steps):
        camera, pixel = torch.randint(n_cameras, (512,)), torch.randint(SIZE * SIZE, (512,))
        with torch.no_grad():
            target = render(rays_of(truth, camera, pixel), grid)
        loss = nt.color_loss(render(rays_of(moved(start, twist), camera, pixel), grid), target, kind="mse")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1:4d}  loss {loss.item():.5f}  {error():.3f} pixels off")
    return before, error()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
