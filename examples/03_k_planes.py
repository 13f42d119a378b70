"""A field of your own, from training to a file for others: K-Planes, static and dynamic

    nerfturbo train seesaw --field examples/03_k_planes.py:KPlanes --optim.lr 1e-2 --output runs/k_planes
    nerfturbo view runs/k_planes            # then render, export mesh, export web, ... as of any run

A point's features are products of three planes (xy, xz, yz), times three more over time where images have times; two
networks turn them into density and colour. The class knows only the scene's box, and the package knows no such class.

This file runs them with few steps. You see `orbit.gif`, the seesaw while it moves, and `grid.npz`, its cells.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

SPACE, TIME = ((0, 1), (0, 2), (1, 2)), ((0, 3), (1, 3), (2, 3))  # pairs of (x, y, z, t): three planes each
RESOLUTIONS, MOMENTS = (16, 64), 13  # cells along x, y, z, and along time
COMMANDS = (
    "train {scene} --field {file}:KPlanes --optim.lr 1e-2 --steps {n} --downscale {by} --turntable 0 --output {run}",
    "render {run} --path orbit --frames 12 --output {run}/orbit.gif",
    "export grid {run} {run}/grid.npz",
)


class KPlanes(nn.Module):
    def __init__(self, aabb, channels: int = 8, width: int = 64) -> None:
        super().__init__()
        self.register_buffer("box", aabb.tensor().clone())  # (2, 3): low and high corner
        self.space = nn.ParameterList(1.0 + 0.2 * torch.randn(3, channels, n, n) for n in RESOLUTIONS)
        self.time = nn.ParameterList(torch.ones(3, channels, MOMENTS, n) for n in RESOLUTIONS)  # 1 changes nothing
        self.density_net = nn.Sequential(nn.Linear(channels * 2, width), nn.ReLU(), nn.Linear(width, 16))
        self.color_net = nn.Sequential(nn.Linear(16 + 3, width), nn.ReLU(), nn.Linear(width, 3))
        planes = (name for name, _ in self.named_parameters() if name.startswith(("space", "time")))
        self.learning_rates = dict.fromkeys(planes, 4e-2)  # optional: planes learn faster than networks

    def hidden(self, positions: Tensor, times: Tensor | None) -> Tensor:
        place = (positions - self.box[0]) / (self.box[1] - self.box[0]) * 2.0 - 1.0
        if times is not None:
            place = torch.cat([place, times[:, None].to(place) * 2.0 - 1.0], dim=-1)

        def look_up(planes: Tensor, axes: tuple[tuple[int, int], ...]) -> Tensor:
            at = place[:, axes].transpose(0, 1)[:, None]  # (3, 1, n, 2)
            found = nn.functional.grid_sample(planes, at, align_corners=True, padding_mode="border")
            return found.prod(dim=0)[:, 0].t()  # (n, channels)

        features = [look_up(planes, SPACE) for planes in self.space]
        if times is not None:
            features = [one * look_up(planes, TIME) for one, planes in zip(features, self.time, strict=True)]
        hidden = self.density_net(torch.cat(features, dim=-1))
        return torch.cat([(hidden[:, :1] - 4.0).clamp(max=8.0), hidden[:, 1:]], dim=-1)  # thin at first: rays see far

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        return self.hidden(positions, times)[:, 0].exp()

    def forward(self, positions, directions, times=None, camera_indices=None) -> tuple[Tensor, Tensor]:
        hidden = self.hidden(positions, times)
        return torch.sigmoid(self.color_net(torch.cat([hidden, directions], dim=-1))), hidden[:, 0].exp()


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
