"""A field of your own, from training to a file for others: K-Planes, static and dynamic

    nerfturbo train seesaw --field examples/03_k_planes.py:KPlanes --optim.lr 5e-3 --output runs/k_planes
    nerfturbo view runs/k_planes            # then render, export mesh, export web, ... as of any run

A point's features are products of three planes (xy, xz, yz), times three more over time where images have times; two
networks turn them into density and colour. The class knows only the scene's box, and the package knows no such class.

This file runs them with few steps. You see `orbit.gif`, the seesaw while it moves, blurred, and `grid.npz`, its cells.
"""

import argparse
import itertools
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

RESOLUTIONS = (32, 64, 128)
MOMENTS = 25  # along time
PLANES = tuple(itertools.combinations(range(4), 2))  # of (x, y, z, t)
COMMANDS = (
    "train {scene} --field {file}:KPlanes --optim.lr 5e-3 --steps {n} --downscale {by} --turntable 0 --output {run}",
    "render {run} --path orbit --frames 12 --output {run}/orbit.gif",
    "export grid {run} {run}/grid.npz",
)


class KPlanes(nn.Module):
    def __init__(self, aabb, channels: int = 16, width: int = 64) -> None:
        super().__init__()
        self.register_buffer("box", aabb.tensor().clone())  # (2, 3): low and high corner
        self.planes = nn.ParameterDict()
        for resolution, axes in itertools.product(RESOLUTIONS, PLANES):
            rows, columns = (MOMENTS if axis == 3 else resolution for axis in reversed(axes))
            plane = torch.ones(1, channels, rows, columns)  # of time: begins at 1, which changes nothing
            self.planes[f"{resolution}_{axes}"] = plane if 3 in axes else 0.1 + 0.4 * torch.rand_like(plane)
        self.density_net = nn.Sequential(nn.Linear(channels * 3, width), nn.ReLU(), nn.Linear(width, 16))
        self.color_net = nn.Sequential(nn.Linear(16 + 3, width), nn.ReLU(), nn.Linear(width, 3))
        planes = (name for name, _ in self.named_parameters() if name.startswith("planes"))
        self.learning_rates = dict.fromkeys(planes, 2e-2)  # optional: planes learn faster than networks

    def hidden(self, positions: Tensor, times: Tensor | None) -> Tensor:
        unit = (positions - self.box[0]) / (self.box[1] - self.box[0]) * 2.0 - 1.0
        place = unit if times is None else torch.cat([unit, times[:, None].to(unit) * 2.0 - 1.0], dim=-1)
        features = []
        for resolution in RESOLUTIONS:
            product = torch.ones((), device=unit.device)
            for axes in PLANES if times is not None else (axes for axes in PLANES if 3 not in axes):
                at, plane = place[:, list(axes)][None, None], self.planes[f"{resolution}_{axes}"]
                product = product * nn.functional.grid_sample(plane, at, align_corners=True, padding_mode="border")
            features.append(product[0, :, 0].t())
        return self.density_net(torch.cat(features, dim=-1))

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        return nn.functional.softplus(self.hidden(positions, times)[:, 0])

    def forward(self, positions, directions, times=None, camera_indices=None) -> tuple[Tensor, Tensor]:
        hidden = self.hidden(positions, times)
        rgb = torch.sigmoid(self.color_net(torch.cat([hidden, directions], dim=-1)))
        return rgb, nn.functional.softplus(hidden[:, 0])


def main(scene: str, steps: int, downscale: int, run: Path) -> None:
    values = {"scene": scene, "file": __file__, "n": steps, "by": downscale, "run": run}
    for command in COMMANDS:
        words = [word.format(**values) for word in command.split()]
        print("$ nerfturbo", *words, flush=True)
        subprocess.run([sys.executable, "-m", "nerfturbo", *words], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scene", default="seesaw", help="toybox stands still")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--downscale", type=int, default=2)
    parser.add_argument("--run", type=Path, default=Path("runs/k_planes"))
    main(**vars(parser.parse_args()))
