"""Train a scene for a few seconds on a GPU, then check and time its frames.

    python benchmarks/render.py DATA --seconds 10 --out benchmarks/results/h200/render.json

DATA is a scene folder with a test split. Frames are first compared with plain rendering, by pixels and by score; what
fails is not timed. With it come the rounds of a frame with the samples each evaluates, the kernels of a recorded frame,
variants of the settings (the shipped ones marked *), and, last, the times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from nerfturbo import Trainer, load_scene, preset
from nerfturbo.bench.gate import measure_ms
from nerfturbo.bench.record import write_json
from nerfturbo.bench.render import RenderBenchmark, frames_of, render_record, run_render_benchmark
from nerfturbo.data.cameras import Cameras
from nerfturbo.ops import frame
from nerfturbo.ops.frame import RoundLimits
from nerfturbo.ops.ngp import triton as kernels
from nerfturbo.rendering import image as rounds
from nerfturbo.rendering.model import NerfModel

SIZE = (800, 800)


def train(folder: Path, seconds: float) -> NerfModel:
    config = preset("ngp", "cuda")
    config = replace(config, train=replace(config.train, steps=1 << 30, time_limit=seconds))
    trainer = Trainer(config, load_scene(folder, "train"), device="cuda")
    begun = time.perf_counter()
    summary = trainer.fit()
    print(f"trained {summary.steps} steps in {summary.train_seconds:.1f} s, {time.perf_counter() - begun:.1f} s in all")
    return trainer.model


def camera_of(cameras: Cameras, view: int, width: int = SIZE[0], height: int = SIZE[1]) -> Cameras:
    return cameras[view].resized(torch.tensor([[width, height]]))


def show_rounds(model: NerfModel, camera: Cameras) -> None:
    """Live rays and evaluated samples of each round, rendered without a graph."""
    counts: list[list[int]] = []
    original = frame.next_samples

    def spy(*args, **kwargs):
        samples = original(*args, **kwargs)
        counts.append([int(args[0].n_live), int(samples.n_used)])
        return samples

    frame.next_samples = spy
    try:
        model.render_image(camera, 0)
    finally:
        frame.next_samples = original
    used = [pair for pair in counts if pair[0]]
    print("rounds (live rays / samples):", ", ".join(f"{live}/{samples}" for live, samples in used))
    print(f"  {sum(samples for _, samples in used)} samples evaluated, {len(used)} rounds")


def frame_ms(model: NerfModel, cameras: list[Cameras], repeats: int = 20, max_memory: int | None = None):
    """Median milliseconds of a replayed frame, and its rounds."""
    frames = frames_of(model, *SIZE, max_memory)

    def draw(camera: Cameras) -> None:
        frames.render(camera.camera_to_world[0], camera.focal[0], camera.center[0])

    for camera in cameras[:4]:
        draw(camera)
    turns = [cameras[i % len(cameras)] for i in range(repeats)]
    times = [measure_ms(lambda camera=camera: draw(camera), model.device)[0] for camera in turns]
    return statistics.median(times), frames.rounds


@contextmanager
def changed(module: object, **values: object) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def try_variant(
    name: str, model: NerfModel, cameras: list[Cameras], module: object = None, memory: int | None = None, **values
) -> None:
    """One line: the frame's time with these values in place of the module's, or why it has none."""
    shipped = module is not None and all(getattr(module, key) == value for key, value in values.items())
    try:
        with changed(module, **values):
            milliseconds, n_rounds = frame_ms(model, cameras, max_memory=memory)
        result = f"{milliseconds:.3f} ms, {n_rounds} rounds"
    except Exception as error:
        result = f"{type(error).__name__}: {error}"[:100]
    print(f"  {'*' if shipped else ' '} {name}: {result}", flush=True)


def try_variants(model: NerfModel, cameras: list[Cameras]) -> None:
    for least, growth in ((4, 0.5), (4, 1.0), (2, 0.5), (6, 0.5), (8, 0.5), (8, 1.0), (12, 1.0), (16, 1.0)):
        limits = {**rounds.LIMITS, "cuda": RoundLimits(least, 32, growth)}
        try_variant(f"samples from {least}, growth {growth}", model, cameras, rounds, LIMITS=limits)
    for memory in (1 << 27, 1 << 28, 1 << 29, 1 << 30):
        try_variant(f"{memory >> 20} MiB", model, cameras, memory=memory)
    for n in (8, 10, 12, 16, 24):
        try_variant(f"encoding, {n} programs per multiprocessor", model, cameras, kernels, ENCODE_PROGRAMS=n)
    for block, warps, programs in ((64, 4, 2), (64, 4, 4), (128, 8, 2)):
        name = f"networks, {block} rows, {warps} warps, {programs} programs"
        try_variant(name, model, cameras, kernels, BLOCK=block, WARPS=warps, FORWARD_PROGRAMS=programs)


def show_kernels(model: NerfModel, camera: Cameras, n_frames: int = 10) -> None:
    from torch.profiler import ProfilerActivity, profile

    frames = frames_of(model, *SIZE)
    arguments = (camera.camera_to_world[0], camera.focal[0], camera.center[0])
    for _ in range(3):
        frames.render(*arguments)
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(n_frames):
            frames.render(*arguments)
        torch.cuda.synchronize()
    events = sorted(prof.key_averages(), key=lambda event: -event.device_time_total)
    for event in events[:14]:
        print(f"  {event.device_time_total / n_frames:8.1f} us  x{event.count / n_frames:5.1f}  {event.key[:80]}")
    print(f"  {sum(event.device_time_total for event in events) / n_frames:8.1f} us in all kernels of a frame")


def show(result: RenderBenchmark) -> None:
    gate = result.gate
    print(
        f"gate: {gate.verdict}; {gate.views} views, frames {gate.psnr_frames:.3f} dB, plain {gate.psnr_plain:.3f} dB,"
        f" evaluation {gate.psnr_evaluation:.3f} dB,"
    )
    print(f"      at most {gate.largest_difference:.4f} dB apart, {gate.stray_pixels:.4%} of the pixels differ")
    for t in result.timings:
        where = f"{t.width:4d} x {t.height:<4d} {t.way}"
        print(f"{where}: {t.milliseconds:7.3f} ms, wall {t.wall_milliseconds:7.3f} ms, rounds {t.rounds}")
    if result.large is not None and result.large.extra_bytes is not None:
        big = result.large
        memory = f"{big.extra_bytes / 2**20:.0f} MiB besides the picture, budget {big.budget_bytes / 2**20:.0f} MiB"
        print(f"{big.width} x {big.height} frame, once: {big.seconds:.2f} s with compilation and recording, {memory}")


def guarded(name: str, action: Callable[[], None]) -> None:
    """One section that fails must not take the others with it."""
    print(f"-- {name}", flush=True)
    try:
        action()
    except Exception as error:
        print(f"  {type(error).__name__}: {error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--variants", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    model, scene = train(args.data, args.seconds), load_scene(args.data, "test")
    print(f"{float(model.grid.occupied_fraction()):.2%} of the cells are occupied")
    cameras = [camera_of(scene.cameras, view) for view in range(len(scene))]
    guarded("rounds", lambda: show_rounds(model, cameras[0]))
    result = run_render_benchmark(model, scene)
    if args.out is not None:
        write_json(args.out, render_record(result, model, scene))
    guarded("kernels", lambda: show_kernels(model, cameras[0]))
    if args.variants:
        guarded("variants", lambda: try_variants(model, cameras))
    show(result)


if __name__ == "__main__":
    main()
