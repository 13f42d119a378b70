"""How many binaries a loop of one's own asks Triton for, over steps with any numbers of samples and rays.

A script, since interpreted kernels have no binaries. Launches are left out; what each would be compiled for is noted.
Prints a JSON object: for each kernel, per variant that other arguments than numbers ask for, the list of numbers.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import nerfturbo.compat.nerfacc as nerfacc
import nerfturbo.compat.tinycudann as tcnn
from nerfturbo import InstantNGP, preset
from nerfturbo.ops import _dispatch
from nerfturbo.ops._triton import launch as _launch
from nerfturbo.ops._triton.precompile import zeroed_memory
from nerfturbo.ops.composite import visibility
from nerfturbo.ops.packed import compact
from nerfturbo.types import Aabb, PackedSamples
from tests.kernels.launch_kernels import Driver

# samples, rays: odd, divisible by 4, 16 and 64, alone; the same number of lanes a ray in all of them
STEPS = [(1601, 160), (1602, 161), (1604, 163), (1600, 160), (1616, 176), (1664, 170), (3201, 301), (1, 1)]
asked: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
samples_of_step = 0


def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    names = {p.name for p in self.params}
    _, specialization, _ = self.device_caches[0][-1](*args, **kwargs)
    options = sorted((key, str(value)) for key, value in kwargs.items() if key not in names)
    kernel = asked[f"{self.fn.__module__.split('.')[-2]}.{self.__name__}"]
    kernel[f"{specialization} {options}"].append(samples_of_step)


class Networks(torch.nn.Module):
    """A field as tiny-cuda-nn's users write it, with torch's own functions between and behind the networks."""

    def __init__(self) -> None:
        super().__init__()
        mlp = {"otype": "FullyFusedMLP", "activation": "ReLU", "output_activation": "None", "n_neurons": 16}
        grid = {"otype": "HashGrid", "n_levels": 4, "log2_hashmap_size": 8, "per_level_scale": 1.5}
        self.base = tcnn.NetworkWithInputEncoding(3, 16, grid, {**mlp, "n_hidden_layers": 1})
        self.angles = tcnn.Encoding(3, {"otype": "SphericalHarmonics", "degree": 4})
        self.head = tcnn.Network(32, 3, {**mlp, "n_hidden_layers": 2})

    def forward(self, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        features = self.base(x)
        rgb = self.head(torch.cat([self.angles((d + 1.0) * 0.5), features], dim=-1))
        return torch.sigmoid(rgb.float()), torch.exp(features[:, 0].float())


def step(n: int, n_rays: int, fields: list[torch.nn.Module], grid: Any) -> None:
    """What nerfacc's users call in a step, and what they may call instead."""
    rays = (torch.arange(n) * n_rays // n).clamp(max=n_rays - 1)
    t0, t1 = torch.rand(n), torch.rand(n)
    origins, directions = torch.rand(n_rays, 3), torch.rand(n_rays, 3)
    offsets = torch.searchsorted(rays, torch.arange(n_rays + 1)).int()
    samples = PackedSamples(t0, t1, rays.int(), offsets, torch.tensor(n_rays, dtype=torch.int32))
    grid.sampling(origins, directions, stratified=True)
    with torch.no_grad():
        density = fields[0].density(torch.rand(n, 3))  # type: ignore[operator]
        keep = visibility(density, samples, early_stop_eps=1e-4, alpha_thre=1e-2)
        compact(samples, keep, capacity=n)
    for field in fields:
        rgb, opacity, depth, _ = nerfacc.rendering(
            t0, t1, rays, n_rays=n_rays, render_bkgd=torch.rand(3),
            rgb_sigma_fn=lambda a, b, i, field=field: field(origins[i] + directions[i] * a[:, None], directions[i]),
        )  # fmt: skip
        (rgb.square().sum() + opacity.square().sum() + depth.square().sum()).backward()
    sigmas, colours, alphas = (torch.rand(*shape, requires_grad=True) for shape in ((n,), (n, 3), (n,)))
    weights, _, _ = nerfacc.render_weight_from_density(t0, t1, sigmas, ray_indices=rays, n_rays=n_rays)
    nerfacc.accumulate_along_rays(weights, colours, rays, n_rays).square().sum().backward()
    weights, _ = nerfacc.render_weight_from_alpha(alphas, ray_indices=rays, n_rays=n_rays)
    weights.square().sum().backward()
    info = nerfacc.pack_info(rays, n_rays)
    for scan in (nerfacc.inclusive_sum, nerfacc.exclusive_sum, nerfacc.inclusive_prod, nerfacc.exclusive_prod):
        scan(alphas, info).square().sum().backward()
    nerfacc.ray_aabb_intersect(origins, directions, torch.tensor([[-1.0, -1.0, -1.0, 1.0, 1.0, 1.0]]))


if __name__ == "__main__":
    driver.set_active(Driver())
    JITFunction.run = note  # type: ignore[method-assign]
    _launch.check_pointers = lambda *_: None  # these tensors are the CPU's
    _dispatch.resolve = lambda tensor: "triton"
    ours = InstantNGP(Aabb((-1.0,) * 3, (1.0,) * 3), replace(preset("ngp").field, log2_entries=8, width=16))
    ours.encoding.half = ours.encoding.table.detach().half()
    grid = nerfacc.OccGridEstimator([-1, -1, -1, 1, 1, 1], resolution=16)
    with zeroed_memory():
        for samples_of_step, n_rays in STEPS:
            step(samples_of_step, n_rays, [ours, Networks()], grid)
    print(json.dumps({kernel: sorted(variants.values()) for kernel, variants in asked.items()}))
