"""Train in a loop of your own: a NeRF in plain PyTorch, and five lines that make it fast

`Plain` is the textbook: sines of positions, a network, every ray sampled from end to end. The lines marked 1 to 5 take
its place: a hash grid, samples only where an occupancy grid has something, compositing by one kernel.

You see `nerf.png`: a view that training did not see, ground truth on the left. `--plain` trains the textbook.
"""

import argparse
import time
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

import nerfturbo as nt  # 1


class Plain(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        inner = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.net = nn.Sequential(nn.Linear(36, width), nn.ReLU(), *inner, nn.Linear(width, 4))

    def render(self, rays, n_samples: int = 96) -> Tensor:
        edges = torch.linspace(1.8, 6.2, n_samples + 1, device=rays.device).expand(len(rays), -1)
        middle = (edges[:, 1:] + edges[:, :-1] + (torch.rand_like(edges[:, 1:]) - 0.5) * edges.diff()) / 2
        positions = rays.origins[:, None] + rays.directions[:, None] * middle[..., None]
        angles = (positions[..., None] * 2.0 ** torch.arange(6, device=rays.device)).flatten(-2)
        out = self.net(torch.cat([angles.sin(), angles.cos()], dim=-1))
        optical = nn.functional.softplus(out[..., 3] + 0.5) * 5.0 * edges.diff()
        before = torch.cumsum(torch.cat([torch.zeros_like(optical[:, :1]), optical[:, :-1]], dim=-1), dim=-1)
        weights = torch.exp(-before) * -torch.expm1(-optical)
        return (weights[..., None] * torch.sigmoid(out[..., :3])).sum(1) + 1.0 - weights.sum(1, keepdim=True)


def on_white(scene: nt.Scene) -> Tensor:
    rgba = torch.stack([scene.images.image(index) for index in range(len(scene))])
    return rgba[..., :3] * rgba[..., 3:] + 1.0 - rgba[..., 3:]


def main(steps: int, output: Path, device="cpu", *, plain=False, target=99.0, n_rays=1024) -> list[tuple[float, float]]:
    """Train until `target` dB on an unseen view; (seconds of training, dB) every twenty steps."""
    train, test = (nt.load_scene("toybox", split, downscale=2).to(device) for split in ("train", "test"))
    images, truth, unseen = on_white(train), on_white(test)[0], test.cameras.image_rays(0)
    if plain:
        render = (field := Plain().to(device)).render
    else:
        field = nt.InstantNGP(train.aabb, nt.preset("auto", device).field).to(device)  # 2
        grid = nt.OccupancyGrid(train.aabb, nt.preset("auto", device).grid, step_size=0.015).to(device)  # 3
        render = lambda rays: nt.render_rays(field, rays, grid, background=truth.new_ones(3)).rgb  # 4  # noqa: E731
    optimizer = torch.optim.Adam(field.parameters(), lr=5e-3)
    seconds, curve, image = 0.0, [], torch.ones_like(truth)
    for step in range(steps):
        started = time.perf_counter()
        if not plain and step % 16 == 0:
            grid.update(step, field.density)  # 5
        view, y, x = (torch.randint(n, (n_rays,), device=device) for n in images.shape[:3])
        loss = nn.functional.mse_loss(render(train.cameras.rays(view, x + 0.5, y + 0.5)), images[view, y, x])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds += (loss.item() >= 0.0) * (time.perf_counter() - started)  # reading the loss waits for a GPU
        if step % 20 == 19:
            with torch.no_grad():
                image = torch.cat([render(unseen[i : i + 2500]) for i in range(0, 10000, 2500)]).view_as(truth)
            curve.append((seconds, -10.0 * (image - truth).square().mean().log10().item()))
            print(f"step {step + 1:4d}  {curve[-1][1]:5.2f} dB on an unseen view after {seconds:6.2f} s of training")
        if curve and curve[-1][1] >= target:
            break
    Image.fromarray((torch.cat([truth, image], 1).clamp(0, 1) * 255).byte().cpu().numpy()).save(output)
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plain", action="store_true")
    main(output=Path("nerf.png"), **vars(parser.parse_args()))
