"""nerfacc's example training loop over `nerfturbo.compat`, eager, without capture: milliseconds a step.

    python benchmarks/compat_step.py --device cuda --out benchmarks/results/h200/compat_step.json
    python benchmarks/compat_step.py --field tcnn --phases --profile        # where a step's time goes

The loop is that of nerfacc's occupancy-grid example: sample with a density function, render, smooth L1, Adam, two
chained schedules, and as many rays as keep `--samples` samples after pruning. Fields: `ours`, nerfturbo's InstantNGP;
`tcnn`, the same networks out of `compat.tinycudann`. A run that has not learned the scene is not timed. `--phases`
times the parts of a step twice: what the host needs to hand them to the device, and with the device's work behind it.
Kernels that Triton compiles are counted by block and named; a block that holds one is reported apart from the others.
`--one-thread` tells what handing the backward to a thread of autograd's own, one per GPU, costs a step.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nerfturbo.compat.nerfacc as nerfacc
import nerfturbo.compat.tinycudann as tcnn
from nerfturbo import InstantNGP, load_scene, preset
from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.data.batches import PixelSampler
from nerfturbo.data.builtin import builtin_scene
from nerfturbo.data.scene import Scene
from nerfturbo.fields.parts import truncated_exp
from nerfturbo.ops._dispatch import available
from nerfturbo.types import Aabb

STEP_SIZE, GRID = 5e-3, 128
LEAST_DB = 15.0  # on the batch, a few hundred steps in: the loop learns


class Ours(nn.Module):
    """InstantNGP as the preset for GPUs has it, in half precision over fp32 masters; the copy is made once per step."""

    def __init__(self, aabb: Aabb, half: bool) -> None:
        super().__init__()
        self.field, self.half = InstantNGP(aabb, preset("ngp").field), half
        self.after_step()

    def after_step(self) -> None:
        if self.half:
            self.field.encoding.half = self.field.encoding.table.detach().half()

    def query_density(self, x: Tensor) -> Tensor:
        return self.field.density(x)

    def forward(self, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        return self.field(x, d)


class Tcnn(nn.Module):
    """The same networks as tiny-cuda-nn's users write them."""

    def __init__(self, aabb: Aabb) -> None:
        super().__init__()
        self.aabb = aabb
        mlp = {"otype": "FullyFusedMLP", "activation": "ReLU", "output_activation": "None", "n_neurons": 64}
        grid = {"otype": "HashGrid", "n_levels": 16, "log2_hashmap_size": 19, "per_level_scale": 1.4472692}
        self.base = tcnn.NetworkWithInputEncoding(3, 16, grid, {**mlp, "n_hidden_layers": 1})
        self.angles = tcnn.Encoding(3, {"otype": "SphericalHarmonics", "degree": 4})
        self.head = tcnn.Network(32, 3, {**mlp, "n_hidden_layers": 2})

    def after_step(self) -> None:
        pass

    def query_density(self, x: Tensor) -> Tensor:
        return truncated_exp(self.base(self.aabb.normalize(x))[:, 0])

    def forward(self, x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        features = self.base(self.aabb.normalize(x))
        rgb = self.head(torch.cat([self.angles((d + 1.0) * 0.5), features], dim=-1))
        return torch.sigmoid(rgb.float()), truncated_exp(features[:, 0])


PHASES = ("draw", "grid", "sample", "render", "backward", "optimize")


class Loop:
    """One training run; `step` is what is timed. `mark` is told the name of each phase as it ends."""

    mark: Callable[[str], None] = staticmethod(lambda name: None)

    def __init__(self, scene: Scene, field: nn.Module, device: str, samples: int, max_steps: int) -> None:
        self.sampler, self.device, self.samples = PixelSampler(scene, device), device, samples
        self.field = field.to(device)
        low, high = scene.aabb.low, scene.aabb.high
        self.estimator = nerfacc.OccGridEstimator([*low, *high], resolution=GRID).to(device)
        fused = device == "cuda"
        parameters = [p for p in field.parameters() if p.numel()]
        self.optimizer = torch.optim.Adam(parameters, lr=1e-2, eps=1e-15, weight_decay=1e-6, fused=fused)
        rates = torch.optim.lr_scheduler
        warm = rates.LinearLR(self.optimizer, start_factor=0.01, total_iters=100)
        marks = [max_steps // 2, max_steps * 3 // 4, max_steps * 9 // 10]
        self.scheduler = rates.ChainedScheduler([warm, rates.MultiStepLR(self.optimizer, marks, gamma=0.33)])
        self.scale = 2.0**10 if fused else 1.0
        self.n_rays, self.index, self.n_samples, self.rgb, self.pixels = 1024, 0, 0, None, None

    def step(self) -> None:
        field, batch = self.field, self.sampler.draw(self.index, self.n_rays)
        origins, directions = batch.rays.origins, batch.rays.directions
        background = torch.rand(3, device=self.device)
        alpha = batch.rgba[:, 3:] if batch.rgba.shape[1] == 4 else torch.ones_like(batch.rgba[:, :1])
        pixels = batch.rgba[:, :3] * alpha + background * (1.0 - alpha)
        self.mark("draw")
        self.estimator.update_every_n_steps(self.index, lambda x: field.query_density(x) * STEP_SIZE, occ_thre=1e-2)
        self.mark("grid")

        def positions(t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor) -> tuple[Tensor, Tensor]:
            d = directions[ray_indices]
            return origins[ray_indices] + d * ((t_starts + t_ends) * 0.5)[:, None], d

        ray_indices, t_starts, t_ends = self.estimator.sampling(
            origins,
            directions,
            sigma_fn=lambda *samples: field.query_density(positions(*samples)[0]),
            render_step_size=STEP_SIZE,
            stratified=True,
        )
        self.mark("sample")
        rgb, _, _, _ = nerfacc.rendering(
            t_starts,
            t_ends,
            ray_indices,
            n_rays=self.n_rays,
            rgb_sigma_fn=lambda *samples: field(*positions(*samples)),
            render_bkgd=background,
        )
        loss = nn.functional.smooth_l1_loss(rgb, pixels)
        self.mark("render")
        self.optimizer.zero_grad()
        (loss * self.scale).backward()
        self.mark("backward")
        self.optimizer.step()
        self.scheduler.step()
        field.after_step()
        self.mark("optimize")
        self.n_samples, self.rgb, self.pixels, self.index = t_starts.shape[0], rgb.detach(), pixels, self.index + 1
        self.n_rays = max(64, min(1 << 18, int(self.n_rays * self.samples / max(self.n_samples, 1))))

    def psnr(self) -> float:
        assert self.rgb is not None and self.pixels is not None
        return -10.0 * math.log10(max(nn.functional.mse_loss(self.rgb, self.pixels).item(), 1e-12))


class Compilations:
    """Names of the kernels that Triton made ready while this was on, whether compiled or read from its cache."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __enter__(self) -> Compilations:
        if available("triton"):
            from triton import knobs

            self._knobs, self._before = knobs.runtime, knobs.runtime.jit_post_compile_hook
            self._knobs.jit_post_compile_hook = self._note
        return self

    def __exit__(self, *_: object) -> None:
        if available("triton"):
            self._knobs.jit_post_compile_hook = self._before

    def _note(self, *, fn: Any, **_: Any) -> None:
        self.names.append(f"{fn.module.rsplit('.', 1)[-1]}.{fn.name.rsplit('.', 1)[-1]}")


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(loop: Loop, warm: int, timed: int) -> dict[str, Any]:
    """Milliseconds a step over blocks of 16, so that each block holds one update of the grid.

    `worst` is that of the blocks in which nothing was compiled; those with compilations stand under `compiling`.
    """
    with Compilations() as before:
        for _ in range(warm):
            loop.step()
        synchronize(loop.device)
    if loop.psnr() < LEAST_DB:
        raise SystemExit(f"the loop has not learned: {loop.psnr():.1f} dB after {warm} steps")
    blocks, samples, compiling = [], [], []
    for block in range(max(1, timed // 16)):
        with Compilations() as during:
            begun = time.perf_counter()
            for _ in range(16):
                loop.step()
                samples.append(loop.n_samples)
            synchronize(loop.device)
            blocks.append((time.perf_counter() - begun) / 16 * 1e3)
        if during.names:
            compiling.append({"block": block, "ms_per_step": blocks[-1], "kernels": sorted(during.names)})
    held = {one["block"] for one in compiling}
    steady = [ms for block, ms in enumerate(blocks) if block not in held]
    return {
        "ms_per_step_median": statistics.median(blocks),
        "ms_per_step_best": min(blocks),
        "ms_per_step_worst": max(steady) if steady else None,
        "compiled_before": len(before.names),
        "compiled_during": sum(len(one["kernels"]) for one in compiling),
        "compiling": compiling,
        "blocks_ms": [round(ms, 3) for ms in blocks],
        "samples_mean": statistics.mean(samples),
        "rays": loop.n_rays,
        "batch_psnr": loop.psnr(),
        "steps": loop.index,
    }


def measure_phases(loop: Loop, steps: int = 64) -> dict[str, Any]:
    """Milliseconds a step of each phase: until its calls return, and until the device is done with them.

    The sampling phase reads counts back, so that it waits for the device in both.
    """
    result: dict[str, Any] = {}
    for name, wait in (("host_ms", False), ("synchronized_ms", True)):
        spent, last = dict.fromkeys(PHASES, 0.0), 0.0

        def mark(phase: str, wait: bool = wait, spent: dict[str, float] = spent) -> None:
            nonlocal last
            if wait:
                synchronize(loop.device)
            now = time.perf_counter()
            spent[phase] += now - last
            last = now

        loop.mark = mark
        for _ in range(steps):
            synchronize(loop.device)  # so that waiting for earlier work is nobody's time
            last = time.perf_counter()
            loop.step()
        result[name] = {phase: round(seconds / steps * 1e3, 4) for phase, seconds in spent.items()}
        result[name]["step"] = round(sum(spent.values()) / steps * 1e3, 4)
    del loop.mark
    return result


def profile(loop: Loop) -> str:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if loop.device == "cuda" else [])
    with record(activities=activities) as result:
        for _ in range(16):
            loop.step()
        synchronize(loop.device)
    order = "cuda_time_total" if loop.device == "cuda" else "cpu_time_total"
    averages = result.key_averages()
    return averages.table(sort_by=order, row_limit=45) + averages.table(sort_by="self_cpu_time_total", row_limit=45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a scene folder; without it the built-in toybox")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--field", choices=("ours", "tcnn", "both"), default="both")
    parser.add_argument("--samples", type=int, default=1 << 18)
    parser.add_argument("--warm", type=int, default=512)
    parser.add_argument("--timed", type=int, default=256)
    parser.add_argument("--resolution", type=int, default=400, help="of the built-in scene")
    parser.add_argument("--phases", action="store_true", help="also time the parts of a step")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--one-thread", action="store_true", help="backward on the calling thread, not on autograd's")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.autograd.set_multithreading_enabled(not options.one_thread)
    scene = load_scene(options.data, "train") if options.data else builtin_scene(resolution=options.resolution)
    makers: dict[str, Callable[[], nn.Module]] = {
        "ours": lambda: Ours(scene.aabb, half=False).to(options.device),
        "tcnn": lambda: Tcnn(scene.aabb),
    }
    values: dict[str, dict[str, Any]] = {}
    for name in makers if options.field == "both" else [options.field]:
        torch.manual_seed(0)
        field = makers[name]()
        if isinstance(field, Ours) and options.device == "cuda":
            field.half = True
            field.after_step()
        loop = Loop(scene, field, options.device, options.samples, options.warm + options.timed)
        values[name] = measure(loop, options.warm, options.timed)
        print(name, {key: round(v, 3) if isinstance(v, float) else v for key, v in values[name].items()})
        if options.phases:
            with Compilations() as during:
                values[name]["phases"] = measure_phases(loop)
            values[name]["phases"]["compiled"] = sorted(during.names)
            print(values[name]["phases"])
        if options.profile:
            print(profile(loop))
    if options.out:
        record = Record(
            what="a step of nerfacc's example loop over nerfturbo.compat, eager",
            protocol=f"{options.warm} steps to learn and warm up, then blocks of 16 steps, each with one grid update; "
            "wall time with one synchronisation per block; rays adapt to the sample budget",
            seed=0,
            values={"target_samples": options.samples, "scene": scene.name, **values},
            machine=machine(options.device),
        )
        print(write_json(options.out, record))


if __name__ == "__main__":
    main()
