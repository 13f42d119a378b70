"""Proposal networks and mixed precision for a field of your own: a ball under an open sky, which no box holds

The field is a plain torch module over contracted space. Two `HashDensity` say where its few samples go; one line more
in the loss trains them. `MixedPrecision` runs the networks in half on a GPU (fp32 on a CPU unless told otherwise).

You see `sky.png`: what a camera sees, ground truth on the left. The sky has a colour for every direction.
"""

import math
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

import nerfturbo as nt
from nerfturbo.sampling import Draw


class MyField(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(32, 3) * 2.0)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        contracted = nt.contract(positions, norm="max")
        angles = (contracted[:, None] * self.frequencies).sum(-1)  # no product of matrices: stays fp32
        out = self.net(torch.cat([angles.sin(), angles.cos()], dim=-1)).float()
        return torch.sigmoid(out[:, :3]), nn.functional.softplus(out[:, 3]) * 3.0


def truth(rays: nt.Rays) -> Tensor:
    hits = torch.linalg.cross(rays.origins, rays.directions).norm(dim=-1) < 0.3  # distance of the line to the centre
    return torch.where(hits[:, None], torch.tensor([0.9, 0.2, 0.1]), 0.5 + 0.4 * torch.sin(rays.directions * 3.0))


def rays_around(n: int) -> nt.Rays:
    turn = torch.rand(n) * 2.0 * math.pi
    eyes = torch.stack([turn.cos(), turn.sin(), 0.3 * torch.ones(n)], dim=-1)
    return nt.Rays(eyes, nn.functional.normalize(torch.randn(n, 3) * 0.35 - eyes, dim=-1))


def main(steps: int, output: Path, precision: str = "auto", n_rays: int = 256, size: int = 120) -> float:
    torch.manual_seed(0)
    layout = nt.ops.HashLayout(n_levels=4, n_features=2, log2_entries=12, max_resolution=64)
    proposals = [nt.HashDensity(nt.Aabb.cube(1.0), layout, contraction="cube", seed=seed) for seed in (1, 2)]
    span = nt.RaySpan(near=0.05, far=1000.0, warp="mixed")
    estimator = nt.ProposalEstimator(proposals, n_samples=16, coarse_samples=(32, 24), span=span, anneal_steps=50)
    field = MyField()
    optimizer = torch.optim.Adam([*field.parameters(), *estimator.parameters()], lr=5e-3)
    amp = nt.MixedPrecision(field, optimizer, precision=precision, clip_norm=10.0)

    def look(rays: nt.Rays, draw: Draw | None = None):
        samples = estimator.sample(rays, draw=draw)
        return samples, nt.volume_rendering(lambda *_: field(samples.positions(rays)), samples)

    for step in range(steps):
        rays = rays_around(n_rays)
        with amp.autocast():
            samples, out = look(rays, Draw(stratified=True, step=step))
            error = nn.functional.mse_loss(out.rgb, truth(rays))
            loss = error + estimator.loss(samples, out.weights)  # the proposals learn from the field's weights
        report = amp.step(loss)  # scale, backward, unscale, check, clip, step, zero
        if report.skipped or step % 50 == 49:
            print(f"step {step + 1:4d}  {-10.0 * math.log10(error.item()):5.2f} dB, {amp.steps_skipped} steps skipped")

    pose = torch.tensor([[0.0, -0.29, 0.96, 1.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.96, 0.29, 0.3]])[None]
    rays = nt.Cameras.pinhole(pose, width=size, height=size, field_of_view_x=0.9).image_rays(0)
    with torch.no_grad():
        image, exact = look(rays)[1].rgb, truth(rays)
    both = torch.stack([exact, image]).view(2, size, size, 3).transpose(0, 1).reshape(size, 2 * size, 3)
    Image.fromarray((both.clamp(0, 1) * 255).byte().numpy()).save(output)
    psnr = -10.0 * (image - exact).square().mean().log10().item()
    print(f"{psnr:.1f} dB in {amp.precision}: {output}")
    return psnr


if __name__ == "__main__":
    main(steps=200, output=Path("sky.png"))
