"""Proposal networks for a field of your own: a ball under an open sky, which no box holds.

The field below is a plain torch module over contracted space. Two `HashDensity` say where its few samples go; one line
more in the loss trains them.
"""

import argparse
import math
import time

import torch
from torch import nn

import nerfturbo as nt
from nerfturbo.sampling import Draw

BALL = 0.3


class MyField(nn.Module):
    """Sines of the contracted position into a small network: colour and density of all of space."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frequencies = nn.Parameter(torch.randn(3, 32) * 2.0, requires_grad=False)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = nt.contract(positions, norm="max") @ self.frequencies
        out = self.net(torch.cat([angles.sin(), angles.cos()], dim=-1))
        return torch.sigmoid(out[:, :3]), nn.functional.softplus(out[:, 3]) * 3.0


def rays_around(n: int, step: int) -> tuple[nt.Rays, torch.Tensor]:
    """Random rays from a ring of eyes towards the ball, and the colours they see."""
    generator = torch.Generator().manual_seed(step)
    turn = torch.rand(n, generator=generator) * 2.0 * math.pi
    eyes = torch.stack([turn.cos(), turn.sin(), 0.3 * torch.ones(n)], dim=-1)
    aim = torch.randn(n, 3, generator=generator) * 0.35
    directions = nn.functional.normalize(aim - eyes, dim=-1)
    along = -(eyes * directions).sum(-1)
    hits = (eyes + directions * along[:, None]).norm(dim=-1) < BALL
    sky = 0.5 + 0.4 * torch.sin(directions * 3.0)
    return nt.Rays(eyes, directions), torch.where(hits[:, None], torch.tensor([0.9, 0.2, 0.1]), sky)


def main(steps: int, n_rays: int = 256) -> tuple[float, float]:
    box = nt.Aabb.cube(1.0)  # of interest; everything outside is contracted
    layout = nt.ops.HashLayout(n_levels=4, n_features=2, log2_entries=12, max_resolution=64)
    proposals = [nt.HashDensity(box, layout, contraction="cube", seed=seed) for seed in (1, 2)]
    span = nt.RaySpan(near=0.05, far=1000.0, warp="mixed")
    estimator = nt.ProposalEstimator(proposals, n_samples=16, coarse_samples=(32, 24), span=span, anneal_steps=50)
    field = MyField()
    optimizer = torch.optim.Adam([*field.net.parameters(), *estimator.parameters()], lr=5e-3)
    first = last = 0.0
    started = time.perf_counter()

    for step in range(steps):
        rays, target = rays_around(n_rays, step)
        samples = estimator.sample(rays, draw=Draw(stratified=True, step=step))
        positions = samples.positions(rays)
        out = nt.volume_rendering(lambda *_, at=positions: field(at), samples)
        loss = nn.functional.mse_loss(out.rgb, target)
        total = loss + estimator.loss(samples, out.weights)  # the proposals learn from the field's weights
        optimizer.zero_grad()
        total.backward()
        optimizer.step()

        last = -10.0 * math.log10(loss.item())
        first = first or last
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:4d}  {last:5.2f} dB  {time.perf_counter() - started:5.1f} s")
    return first, last


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    main(parser.parse_args().steps)
