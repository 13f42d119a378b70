"""A NeRF in plain PyTorch, in forty lines

Sines of positions, a network, every ray sampled from end to end. The next example changes five of these lines.
"""

import argparse
import time

import torch
from torch import nn

from nerfturbo.data.batches import PixelSampler
from nerfturbo.data.builtin import builtin_scene


class Field(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        inner = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.net = nn.Sequential(nn.Linear(36, width), nn.ReLU(), *inner, nn.Linear(width, 4))

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (positions[..., None] * 2.0 ** torch.arange(6, device=positions.device)).flatten(-2)
        out = self.net(torch.cat([angles.sin(), angles.cos()], dim=-1))
        return torch.sigmoid(out[..., :3]), nn.functional.softplus(out[..., 3] + 0.5) * 5.0


def render(field: Field, rays, n_samples: int = 96) -> torch.Tensor:
    edges = torch.linspace(1.8, 6.2, n_samples + 1, device=rays.device).expand(len(rays), -1)
    middle = (edges[:, 1:] + edges[:, :-1] + (torch.rand_like(edges[:, 1:]) - 0.5) * edges.diff()) / 2
    rgb, density = field(rays.origins[:, None] + rays.directions[:, None] * middle[..., None])
    optical = density * edges.diff()
    before = torch.cumsum(torch.cat([torch.zeros_like(optical[:, :1]), optical[:, :-1]], dim=-1), dim=-1)
    weights = torch.exp(-before) * -torch.expm1(-optical)
    return (weights[..., None] * rgb).sum(1) + 1.0 - weights.sum(1, keepdim=True)


def main(steps: int, device: str = "cpu", target: float = 99.0, n_rays: int = 1024) -> list[tuple[float, float]]:
    """Train until `target` dB on unseen pixels; (seconds of training, dB) every twenty steps."""
    scenes = [builtin_scene("toybox", split, resolution=100, n_views=n) for split, n in (("train", 40), ("test", 8))]
    train, test = (PixelSampler(scene, device) for scene in scenes)
    field = Field().to(device)
    optimizer = torch.optim.Adam(field.parameters(), lr=5e-3)
    seconds, curve = 0.0, []
    for step in range(steps):
        started, batch = time.perf_counter(), train.draw(step, n_rays)
        rgb = render(field, batch.rays)
        loss = nn.functional.mse_loss(rgb, batch.rgba[:, :3] * batch.rgba[:, 3:] + 1.0 - batch.rgba[:, 3:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds += (loss.item() >= 0.0) * (time.perf_counter() - started)  # reading the loss waits for a GPU
        if step % 20 == 19:
            unseen = test.draw(0, 2048)
            with torch.no_grad():
                rgb = render(field, unseen.rays)
            error = rgb - unseen.rgba[:, :3] * unseen.rgba[:, 3:] - 1.0 + unseen.rgba[:, 3:]
            curve.append((seconds, -10.0 * error.square().mean().log10().item()))
            print(f"step {step + 1:4d}  {curve[-1][1]:5.2f} dB on unseen pixels after {seconds:6.2f} s of training")
            if curve[-1][1] >= target:
                break
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--device", default="cpu")
    main(**vars(parser.parse_args()))
