"""Code written for nerfacc and tiny-cuda-nn, run as it is

Below `install` are the originals' names and nothing of nerfturbo; it also runs on a CPU, which they do not.

You see `ball.png`: a checkered ball from where no training ray came from, ground truth on the left.
"""

from pathlib import Path

import torch
from PIL import Image

import nerfturbo.compat

nerfturbo.compat.install()

import nerfacc  # noqa: E402
import tinycudann as tcnn  # noqa: E402

AABB = torch.tensor([-1.0, -1.0, -1.0, 1.0, 1.0, 1.0])
GRID = {"otype": "HashGrid", "n_levels": 6, "log2_hashmap_size": 12, "base_resolution": 4, "per_level_scale": 1.6}
NETWORK = {"otype": "FullyFusedMLP", "n_neurons": 32, "n_hidden_layers": 1, "activation": "ReLU"}


class Field(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = tcnn.NetworkWithInputEncoding(3, 4, GRID, NETWORK)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.net((x - AABB[:3]) / (AABB[3:] - AABB[:3])).float()
        return torch.sigmoid(out[:, :3]), torch.nn.functional.softplus(out[:, 3]) * 5.0


def checkered_ball(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dark = ((x[:, :2] * 4.0).floor().sum(-1) % 2)[:, None]
    return torch.cat([1.0 - 0.8 * dark, 0.3 + 0.2 * dark, 0.2 + 0.7 * dark], dim=-1), 40.0 * (x.norm(dim=-1) < 0.6)


def render(estimator, field, rays_o, rays_d, stratified: bool = False) -> torch.Tensor:
    def rgb_sigma_fn(t_starts, t_ends, ray_indices):
        return field(rays_o[ray_indices] + rays_d[ray_indices] * ((t_starts + t_ends) / 2.0)[:, None])

    options = {"sigma_fn": lambda *samples: rgb_sigma_fn(*samples)[1], "stratified": stratified}
    ray_indices, t_starts, t_ends = estimator.sampling(rays_o, rays_d, render_step_size=0.03, **options)
    options = {"n_rays": len(rays_o), "rgb_sigma_fn": rgb_sigma_fn, "render_bkgd": torch.ones(3)}
    return nerfacc.rendering(t_starts, t_ends, ray_indices, **options)[0]


def main(steps: int, output: Path, size: int = 100) -> float:
    torch.manual_seed(0)
    truth, learned = nerfacc.OccGridEstimator(AABB, 32), nerfacc.OccGridEstimator(AABB, 32)
    truth.update_every_n_steps(0, lambda x: checkered_ball(x)[1] * 0.03)
    field = Field()
    optimizer = torch.optim.Adam(field.parameters(), lr=1e-2)
    for step in range(steps):
        learned.update_every_n_steps(step, lambda x: field(x)[1] * 0.03)
        rays_o = torch.nn.functional.normalize(torch.randn(512, 3), dim=-1) * 2.5
        rays_d = torch.nn.functional.normalize(torch.randn(512, 3) * 0.35 - rays_o, dim=-1)
        target = render(truth, checkered_ball, rays_o, rays_d)
        loss = torch.nn.functional.smooth_l1_loss(render(learned, field, rays_o, rays_d, True), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    y, x = torch.meshgrid(*[torch.linspace(-0.35, 0.35, size)] * 2, indexing="ij")
    ahead = torch.stack([x, -y, -torch.ones_like(x)], dim=-1).view(-1, 3)
    rays = torch.tensor([0.0, 0.0, 2.5]).expand_as(ahead), torch.nn.functional.normalize(ahead, dim=-1)
    with torch.no_grad():
        exact, image = render(truth, checkered_ball, *rays), render(learned, field, *rays)
    both = torch.stack([exact, image]).view(2, size, size, 3).transpose(0, 1).reshape(size, 2 * size, 3)
    Image.fromarray((both.clamp(0, 1) * 255).byte().numpy()).save(output)
    psnr = -10.0 * (image - exact).square().mean().log10().item()
    print(f"{psnr:.1f} dB after {steps} steps: {output}")
    return psnr


if __name__ == "__main__":
    main(steps=200, output=Path("ball.png"))
