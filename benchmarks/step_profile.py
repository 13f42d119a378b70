"""The captured step: wall time, kernel time, memory, and what the deterministic mode costs.

    python benchmarks/step_profile.py SCENE OUT.json [--preset ngp] [--values "sampler.alpha-thre=0.01"]
        [--warm 2000] [--steps 1008] [--profiled 256]

Each mode trains `warm` steps, then `steps` replayed ones are timed by the wall clock with one wait at the end, then
`profiled` more run under the PyTorch profiler. Grid updates and the visibility pass are inside.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nerfturbo import Trainer, load_scene, preset
from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.data.scene_defaults import fitted_config
from nerfturbo.training.step import StepRecord
from quality import variant


def run_until(trainer: Trainer, step: int) -> list[StepRecord]:
    records = []
    while trainer.step < step:
        records.append(trainer.advance(step - trainer.step))
    trainer.stepper.finish()
    return records


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scene = load_scene(args.scene, "train")
    config = variant(fitted_config(preset(args.preset, "cuda"), scene)[0], args.values)
    config = replace(config, train=replace(config.train, steps=1 << 30))
    trainer = Trainer(config, scene, device="cuda")
    trainer.begin()
    run_until(trainer, args.warm)
    begun, first = time.perf_counter(), trainer.step
    records = run_until(trainer, first + args.steps)
    torch.cuda.synchronize()
    wall = (time.perf_counter() - begun) / (trainer.step - first)
    late, peak = records[-1], torch.cuda.max_memory_allocated() - before
    first = trainer.step
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run_until(trainer, first + args.profiled)
        torch.cuda.synchronize()
    n = trainer.step - first
    events = sorted(profiled.key_averages(), key=lambda event: -event.device_time_total)
    kernels = sum(event.device_time_total for event in events) / n
    trainer.end("interrupted")
    pool = scene.images.pixels.numel() * scene.images.pixels.element_size()
    return {
        "step_ms_wall": wall * 1e3,
        "kernel_us_per_step": kernels,
        "kernel_over_wall": kernels * 1e-6 / wall,
        "n_rays": late.n_rays,
        "n_samples": late.n_samples,
        "n_marched": late.n_marched,
        "rays_per_second": late.n_rays / wall,
        "peak_bytes": peak,
        "picture_pool_bytes": pool,
        "peak_bytes_without_pool": peak - pool,
        "kernels": [
            {"kernel": e.key[:60], "us_per_step": e.device_time_total / n, "launches_per_step": e.count / n}
            for e in events[:24]
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene")
    parser.add_argument("output", type=Path)
    parser.add_argument("--preset", default="ngp")
    parser.add_argument("--values", default="", help="on top of the preset")
    parser.add_argument("--modes", nargs="+", default=["as configured", "deterministic"])
    parser.add_argument("--warm", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=1008)
    parser.add_argument("--profiled", type=int, default=256)
    args = parser.parse_args()
    values: dict[str, Any] = {}
    for mode in args.modes:
        torch.use_deterministic_algorithms(mode == "deterministic", warn_only=True)
        values[mode] = measure(args)
        print(mode, {name: value for name, value in values[mode].items() if name != "kernels"}, flush=True)
        torch.cuda.empty_cache()
    if len(values) > 1:
        ratio = values["deterministic"]["step_ms_wall"] / values["as configured"]["step_ms_wall"]
        values["deterministic costs"] = ratio - 1.0
    what = f"the captured step of preset {args.preset} {args.values} after {args.warm} steps"
    protocol = (
        f"wall: {args.steps} replays, one wait at the end; kernels: sum of {args.profiled} others under the profiler; "
        "visibility pass and grid updates inside; memory: the process's peak of allocated bytes"
    )
    write_json(args.output, Record(what, protocol, 0, values, machine=machine("cuda")))


if __name__ == "__main__":
    main()
