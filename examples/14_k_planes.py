"""K-Planes as a field of one's own: the whole machine from two methods

    nerfturbo train toybox --field examples/14_k_planes.py:KPlanes --time-limit 60
    nerfturbo view runs/toybox-...      # and render, eval, export mesh, ...

Features of a point are products of three planes (xy, xz, yz), at three resolutions; of a dynamic scene of six, three of
which run over time. Two small networks turn them into density and colour. Nothing here comes from the package but the
scene's box, and nothing in the package knows this class.
"""

import argparse
import itertools

import torch
from torch import Tensor, nn

RESOLUTIONS = (32, 64, 128)
MOMENTS = 25  # along time
PLANES = tuple(itertools.combinations(range(4), 2))  # of (x, y, z, t)


class KPlanes(nn.Module):
    def __init__(self, aabb, channels: int = 16, width: int = 64) -> None:
        super().__init__()
        low, high = aabb.tensor()
        self.register_buffer("low", low.clone())
        self.register_buffer("size", (high - low).clone())
        self.planes = nn.ModuleList(
            nn.ParameterList(self._plane(r, channels, axes) for axes in PLANES) for r in RESOLUTIONS
        )
        inputs = channels * len(RESOLUTIONS)
        self.density_net = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 16))
        self.color_net = nn.Sequential(nn.Linear(16 + 3, width), nn.ReLU(), nn.Linear(width, 3))
        planes = {name: 2e-2 for name, _ in self.named_parameters() if name.startswith("planes")}
        self.learning_rates = planes  # optional: planes learn faster than networks

    @staticmethod
    def _plane(resolution: int, channels: int, axes: tuple[int, int]) -> Tensor:
        """(1, channels, rows, columns): planes of space begin at random, those of time at 1, which changes nothing."""
        rows, columns = (MOMENTS if axis == 3 else resolution for axis in reversed(axes))
        if 3 in axes:
            return torch.ones(1, channels, rows, columns)
        return 0.1 + 0.4 * torch.rand(1, channels, rows, columns)

    def features(self, positions: Tensor, times: Tensor | None) -> Tensor:
        """(n, channels * resolutions)."""
        unit = (positions - self.low) / self.size * 2.0 - 1.0
        moment = torch.zeros_like(unit[:, :1]) if times is None else times[:, None] * 2.0 - 1.0
        place = torch.cat([unit, moment.to(unit.dtype)], dim=-1)
        found = []
        for planes in self.planes:
            product: Tensor | float = 1.0
            for axes, plane in zip(PLANES, planes, strict=True):
                if times is None and 3 in axes:
                    continue
                at = torch.stack([place[:, axis] for axis in axes], dim=-1)[None, None]
                product = product * nn.functional.grid_sample(plane, at, align_corners=True, padding_mode="border")
            found.append(product[0, :, 0].t())
        return torch.cat(found, dim=-1)

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        return nn.functional.softplus(self.density_net(self.features(positions, times))[:, 0])

    def forward(self, positions, directions, times=None, camera_indices=None) -> tuple[Tensor, Tensor]:
        hidden = self.density_net(self.features(positions, times))
        rgb = torch.sigmoid(self.color_net(torch.cat([hidden, directions], dim=-1)))
        return rgb, nn.functional.softplus(hidden[:, 0])


def main(steps: int, downscale: int = 4) -> tuple[float, float]:
    """PSNR of a view that training never saw, before and after: the same as the command above, from Python."""
    from dataclasses import replace

    import nerfturbo as nt

    scene, unseen = (nt.load_scene("toybox", split, downscale=downscale) for split in ("train", "test"))
    config = nt.preset("ngp-cpu")  # its grid, batch and schedule; the field is ours
    config = replace(config, optim=replace(config.optim, lr=5e-3), train=replace(config.train, steps=steps))
    trainer = nt.Trainer(config, scene, field=KPlanes(scene.aabb))

    def psnr() -> float:
        image = unseen.images.image(0)
        truth = image[..., :3] * image[..., 3:] + 1.0 - image[..., 3:]
        return -10.0 * float((trainer.model.render_image(unseen.cameras, 0).rgb - truth).square().mean().log10())

    before = psnr()
    trainer.fit()
    print(f"{before:.1f} dB -> {psnr():.1f} dB after {steps} steps, {trainer.train_seconds:.0f} s")
    return before, psnr()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
