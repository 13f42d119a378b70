"""Scenes that move: the fast preset's quality, T-NeRF's step, a short run of D-NeRF; or variants to choose between.

    python benchmarks/dynamic.py DATA OUT.json [--seconds 60] [--seeds 0 1 2] [--parts fast tnerf-step tnerf dnerf]
    python benchmarks/dynamic.py DATA OUT.json --tune "name: field.width=32 optim.lr=0.005" ... [--seconds 10]

DATA is a scene in D-NeRF's format. Scores are of its val split (D-NeRF lego's test split does not belong to its
training pictures); with --tune, of every 8th training view, held out. Beside OUT.json comes OUT.png with three views of
each run: truth, render and error. A table is printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.config import Config, from_dict, to_dict
from nerfturbo.data.images import save_image
from nerfturbo.data.scene import Scene, hold_out, load_scene
from nerfturbo.evaluation.evaluate import choose_views, evaluate
from nerfturbo.evaluation.images import error_colors
from nerfturbo.presets import preset
from nerfturbo.training.step import StepRecord
from nerfturbo.training.trainer import Trainer

PARTS = ["fast", "tnerf-step", "tnerf", "dnerf"]
WARM_STEPS, TIMED_STEPS = 1504, 320  # as the step of the original NeRF is timed


@dataclass(frozen=True)
class Run:
    """One training, scored."""

    name: str
    seed: int
    seconds: float
    steps: int
    psnr: float
    ssim: float | None
    marks: list[dict[str, float]]  # scores on the way, the clock stopped
    samples: int  # of the last step
    rays: int
    skipped: int
    gpu_bytes: int | None  # at most, without the pictures


@dataclass(frozen=True)
class Sheet:
    """Truth, render and error of some views, at half their size, one below the other."""

    rows: list[torch.Tensor] = field(default_factory=list)

    def save(self, path: Path) -> None:
        if self.rows:
            save_image(path, torch.cat(self.rows))


def changed(config: Config, words: list[str]) -> Config:
    """The config with values such as "field.width=32"; numbers and booleans are read as such."""
    values = to_dict(config)
    for word in words:
        path, _, text = word.partition("=")
        stage, name = path.split(".")
        readable = {"true": True, "false": False, "none": None}
        value: Any = readable.get(text.lower(), text)
        for kind in (float, int):
            try:
                value = kind(text)
            except ValueError:
                continue
        values[stage][name] = value
    return from_dict(Config, values)


def train(
    name: str, config: Config, scenes: tuple[Scene, Scene], args: argparse.Namespace, marks: list[float], sheet: Sheet
) -> Run:
    """Train for the last of `marks` seconds (or for --steps) and score at all of them."""
    limit = {"time_limit": marks[-1], "steps": 1 << 40} if args.steps is None else {"steps": args.steps}
    config = replace(config, train=replace(config.train, **limit))
    views = choose_views(len(scenes[1]), args.views)
    taken: list[dict[str, float]] = []
    last: list[StepRecord] = []

    def look(trainer: Trainer, record: StepRecord) -> None:
        last[:] = [record]
        if len(taken) < len(marks) - 1 and trainer.train_seconds >= marks[len(taken)]:
            seconds = trainer.train_seconds
            with trainer.clock_stopped(), trainer.as_finished():
                score = evaluate(trainer.model, scenes[1], views=views, with_ssim=False)
            taken.append({"seconds": seconds, "step": trainer.step, "psnr": score.psnr})

    if args.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(config, scenes[0], device=args.device, callbacks=[look])
    summary = trainer.fit()
    peak = None if args.device == "cpu" else torch.cuda.max_memory_allocated() - pool_bytes(scenes[0])
    shown = {views[len(views) * k // 4] for k in (1, 2, 3)}

    def keep(done: int, total: int, score: Any, image: Any, truth: torch.Tensor) -> None:
        if score.index in shown:
            sheet.rows.append(torch.cat([truth, image.rgb, error_colors(image.rgb, truth)], dim=1)[::2, ::2].cpu())

    with trainer.optimizer.averaged():
        found = evaluate(trainer.model, scenes[1], views=views, on_view=keep)
    record = last[-1]
    run = Run(
        name=name,
        seed=config.train.seed,
        seconds=summary.train_seconds,
        steps=summary.steps,
        psnr=found.psnr,
        ssim=found.ssim,
        marks=taken,
        samples=record.n_samples,
        rays=record.n_rays,
        skipped=trainer.skipped,
        gpu_bytes=peak,
    )
    print(f"{name:24} seed {run.seed}: {run.psnr:6.2f} dB in {run.seconds:5.1f} s, {run.steps} steps", flush=True)
    return run


def pool_bytes(scene: Scene) -> int:
    return scene.images.n_pixels * scene.images.channels


def time_step(config: Config, scene: Scene, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a recorded step, grid updates inside, after the grid has found the scene."""
    config = replace(config, train=replace(config.train, steps=args.warm_steps, time_limit=None))
    if args.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    trainer = Trainer(config, scene, device=args.device)
    trainer.fit()
    step, samples, last = trainer.step, 0, trainer.step + args.timed_steps
    trainer.stepper.finish()
    begun = time.perf_counter()
    while step < last:
        record = trainer.stepper.advance(step, last - step)
        step, samples = record.step, samples + record.total_samples
    trainer.stepper.finish()
    milliseconds = 1e3 * (time.perf_counter() - begun) / args.timed_steps
    peak = None if args.device == "cpu" else torch.cuda.max_memory_allocated() - pool_bytes(scene)
    print(f"{config.preset} step: {milliseconds:.3f} ms at {record.n_samples} samples, {peak or 0:,} bytes", flush=True)
    return {"preset": config.preset, "ms": milliseconds, "samples": record.n_samples, "gpu_bytes": peak}


def table(runs: list[Run]) -> str:
    lines = ["| run | median PSNR | SSIM | seconds | steps | GB |", "|---|---|---|---|---|---|"]
    for name in dict.fromkeys(run.name for run in runs):
        own = sorted((run for run in runs if run.name == name), key=lambda run: run.psnr)
        middle = own[len(own) // 2]
        memory = "-" if middle.gpu_bytes is None else f"{middle.gpu_bytes / 1e9:.2f}"
        similarity = "-" if middle.ssim is None else f"{middle.ssim:.4f}"
        psnr = statistics.median(run.psnr for run in own)
        lines.append(f"| {name} | {psnr:.2f} dB | {similarity} | {middle.seconds:.0f} | {middle.steps} | {memory} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("output", type=Path)
    parser.add_argument("--parts", nargs="*", help="of fast, tnerf-step, tnerf, dnerf; all, or none beside --tune")
    parser.add_argument("--tune", nargs="+", default=[], help='"name: stage.value=x ..." each')
    parser.add_argument("--on-val", action="store_true", help="score --tune on the val split")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the fast preset, or of each variant")
    parser.add_argument("--steps", type=int, help="train so many steps instead: fair on a busy machine")
    parser.add_argument("--deep-seconds", type=float, default=60.0, help="of T-NeRF and of D-NeRF")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--downscale", type=int, default=1)
    parser.add_argument("--views", type=int, help="score only this many views")
    parser.add_argument("--preset", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--set", nargs="*", default=[], help="stage.value=x for every run")
    parser.add_argument("--warm-steps", type=int, default=WARM_STEPS)
    parser.add_argument("--timed-steps", type=int, default=TIMED_STEPS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    scene = load_scene(args.data, "train", downscale=args.downscale)
    fast = "dynamic-cpu" if args.device == "cpu" else "dynamic"
    start = changed(preset(fast if args.preset == "auto" else args.preset), args.set)
    runs, steps, sheet = [], [], Sheet()
    on_val = not args.tune or args.on_val
    scenes = (scene, load_scene(args.data, "val", downscale=args.downscale)) if on_val else hold_out(scene, 8)

    def seeded(config: Config, seed: int) -> Config:
        return replace(config, train=replace(config.train, seed=seed))

    for variant in args.tune:
        name, _, words = variant.partition(":")
        config = changed(start, words.split())
        runs += [train(name, seeded(config, seed), scenes, args, [args.seconds], sheet) for seed in args.seeds]
    for part in ([] if args.tune else PARTS) if args.parts is None else args.parts:
        if part == "fast":
            marks = [args.seconds / 6.0, args.seconds / 2.0, args.seconds]
            runs += [train(start.preset, seeded(start, seed), scenes, args, marks, sheet) for seed in args.seeds]
        elif part == "tnerf-step":
            steps.append(time_step(changed(preset("tnerf"), args.set), scene, args))
        else:
            deep = changed(preset(part), args.set)
            runs.append(train(part, deep, scenes, args, [args.deep_seconds], sheet))
    split = scenes[1].split if on_val else "held-out train"
    protocol = (
        f"scores: mean PSNR over {split} views on white, in floats; seconds of training, without loading, compiling, "
        f"recording and scoring; a step: wall clock over {args.timed_steps} replayed ones after {args.warm_steps}, "
        "grid updates inside; bytes: the allocator's peak without the pictures"
    )
    values = {"scene": scene.name, "preset": start.preset, "config": to_dict(start), "variants": args.tune}
    values |= {"runs": [asdict(run) for run in runs], "steps": steps}
    sheet.save(args.output.with_suffix(".png"))
    write_json(args.output, Record("scenes that move", protocol, args.seeds[0], values, machine=machine(args.device)))
    print(table(runs))
    print(args.output)


if __name__ == "__main__":
    main()
