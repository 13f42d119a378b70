"""Code written for nerfacc and tiny-cuda-nn, run as it is

Everything below the two lines of `install` imports the originals' names and knows nothing of nerfturbo; it also runs on
a CPU, which the originals do not.
"""

import argparse

import torch

import nerfturbo.compat

nerfturbo.compat.install()

import nerfacc  # noqa: E402
import tinycudann as tcnn  # noqa: E402

AABB = torch.tensor([-1.0, -1.0, -1.0, 1.0, 1.0, 1.0])


class Field(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        grid = {
            "otype": "HashGrid",
            "n_levels": 6,
            "log2_hashmap_size": 12,
            "base_resolution": 4,
            "per_level_scale": 1.6,
        }
        network = {"otype": "FullyFusedMLP", "n_neurons": 32, "n_hidden_layers": 1, "activation": "ReLU"}
        self.net = tcnn.NetworkWithInputEncoding(3, 4, grid, network)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.net((x - AABB[:3]) / (AABB[3:] - AABB[:3])).float()
        return torch.sigmoid(out[:, :3]), torch.nn.functional.softplus(out[:, 3]) * 5.0


def checkered_ball(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is to be learned."""
    dark = ((x * 4.0).floor().sum(-1) % 2)[:, None]
    return torch.cat([1.0 - 0.8 * dark, 0.3 + 0.2 * dark, 0.2 + 0.7 * dark], dim=-1), 40.0 * (x.norm(dim=-1) < 0.6)


def rays(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    origins = torch.nn.functional.normalize(torch.randn(n, 3, generator=generator), dim=-1) * 2.5
    targets = torch.randn(n, 3, generator=generator) * 0.35
    return origins, torch.nn.functional.normalize(targets - origins, dim=-1)


def render(estimator, field, rays_o, rays_d, training: bool) -> tuple[torch.Tensor, int]:
    def positions(t_starts, t_ends, ray_indices):
        return rays_o[ray_indices] + rays_d[ray_indices] * ((t_starts + t_ends) / 2.0)[:, None]

    ray_indices, t_starts, t_ends = estimator.sampling(
        rays_o,
        rays_d,
        sigma_fn=lambda *samples: field(positions(*samples))[1],
        render_step_size=0.03,
        stratified=training,
    )
    rgb, _opacity, _depth, _extras = nerfacc.rendering(
        t_starts,
        t_ends,
        ray_indices,
        n_rays=len(rays_o),
        rgb_sigma_fn=lambda *samples: field(positions(*samples)),
        render_bkgd=torch.ones(3),
    )
    return rgb, len(t_starts)


def main(steps: int) -> tuple[float, float]:
    """PSNR of a batch of unseen rays, before and after."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    truth, learned = nerfacc.OccGridEstimator(AABB, 32), nerfacc.OccGridEstimator(AABB, 32)
    truth.update_every_n_steps(0, lambda x: checkered_ball(x)[1] * 0.03)
    field = Field()
    optimizer = torch.optim.Adam(field.parameters(), lr=1e-2)
    unseen = rays(1000, torch.Generator().manual_seed(1))

    @torch.no_grad()
    def psnr() -> float:
        target, _ = render(truth, checkered_ball, *unseen, False)
        return -10.0 * (render(learned, field, *unseen, False)[0] - target).square().mean().log10().item()

    learned.update_every_n_steps(0, lambda x: field(x)[1] * 0.03)
    before = psnr()
    for step in range(steps):
        learned.update_every_n_steps(step, lambda x: field(x)[1] * 0.03)
        rays_o, rays_d = rays(512, generator)
        with torch.no_grad():
            target, _ = render(truth, checkered_ball, rays_o, rays_d, False)
        rgb, n_samples = render(learned, field, rays_o, rays_d, True)
        loss = torch.nn.functional.smooth_l1_loss(rgb, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"step {step + 1:4d}  {psnr():5.2f} dB  {n_samples} samples")
    return before, psnr()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
