"""Sparse voxels (and the factorised field) on one scene: quality over time, memory, voxels of each stage, pictures.

    python benchmarks/voxels.py SCENE OUT.json [--device cuda] [--seconds 60] [--run LABEL[:KEY=VALUE,...]] ...

SCENE is a Blender folder, or a folder that has one at blender/lego or lego. Each --run trains once: its label is a
preset, or PRESET/NAME, and what follows the colon changes its config (numbers of a tuple with ; between them):

    --run voxels --run "voxels/degree 2:field.sh_degree=2,voxels.resolutions=64;128;256;512,voxels.max_nodes=3500000"

Without --run it is `voxels` alone. Marks are read with the clock stopped; pruning, subdivision and recording the step
anew are inside the time, loading and compiling are not. Memory is that of training, pictures included. Beside OUT.json
comes OUT.png: truth, render and error of one test view, a row for each run.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.config import Config, from_dict, to_dict
from nerfturbo.data.images import save_image
from nerfturbo.data.scene import Scene, load_scene
from nerfturbo.evaluation.evaluate import choose_views, evaluate, truth_image
from nerfturbo.fields import VoxelGrid
from nerfturbo.fields.voxels import split_nodes
from nerfturbo.ops.voxels.reference import corners
from nerfturbo.presets import preset
from nerfturbo.training.step import StepRecord
from nerfturbo.training.trainer import Trainer

MARKS = (0.05, 0.1, 0.25, 0.5, 1.0)  # shares of the time


def n_voxels(grid: VoxelGrid) -> int:
    """Voxels whose eight corners are all stored."""
    place = torch.stack(split_nodes(grid.nodes, grid.resolution), dim=-1)
    middle = (place[(place < grid.resolution).all(-1)] + 0.5) / grid.resolution
    whole = torch.ones(middle.shape[0], dtype=torch.bool, device=middle.device)
    for _, row in corners(middle, grid.index, middle.dtype):
        whole &= row >= 0
    return int(whole.sum())


def parsed(text: str) -> tuple[str, Config]:
    """Label and config of a --run."""
    label, _, changes = text.partition(":")
    values = to_dict(preset(label.split("/")[0]))
    for change in filter(None, changes.split(",")):
        path, _, value = change.partition("=")
        stage, name = path.split(".")
        old = values[stage][name]
        parts = [json.loads(part) if part[:1] in "-.0123456789tfn" else part for part in value.split(";")]
        values[stage][name] = parts if isinstance(old, list | tuple) else parts[0]
    return label, from_dict(Config, values)


@dataclass
class Watch:
    """What happens on the way: scores at marks, stages, memory of training alone."""

    test: Scene
    marks: list[float]
    views: list[int]
    scores: list[dict[str, float]] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    peak: int = 0

    def __call__(self, trainer: Trainer, record: StepRecord) -> None:
        grid = trainer.model.field
        if isinstance(grid, VoxelGrid) and len(self.stages) <= grid.stage:
            seen = {"resolution": grid.resolution, "nodes": grid.n_nodes, "voxels": n_voxels(grid)}
            self.stages.append(seen | {"step": trainer.step, "seconds": round(trainer.train_seconds, 3)})
            self.stages[-1]["field_megabytes"] = round(grid.memory_bytes / 1e6, 1)
        if len(self.scores) < len(self.marks) and trainer.train_seconds >= self.marks[len(self.scores)]:
            self.score(trainer)

    def score(self, trainer: Trainer) -> None:
        with trainer.clock_stopped(), trainer.as_finished():
            self.read_memory()
            psnr = evaluate(trainer.model, self.test, views=self.views, with_ssim=False).psnr
            self.scores.append({"seconds": round(trainer.train_seconds, 3), "step": trainer.step, "psnr": psnr})
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
        print(f"  {self.scores[-1]['seconds']:.1f} s, step {trainer.step}: {psnr:.2f} dB", flush=True)

    def read_memory(self) -> None:
        if torch.cuda.is_available():
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())


def one_run(
    label: str, config: Config, scenes: tuple[Scene, Scene], args: argparse.Namespace
) -> tuple[dict[str, Any], Tensor]:
    train_scene, test_scene = scenes
    config = replace(config, train=replace(config.train, time_limit=args.seconds, steps=1 << 40))
    watch = Watch(test_scene, [share * args.seconds for share in MARKS[:-1]], choose_views(len(test_scene), args.views))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if args.device == "cpu":  # kernels compile when they first run
        Trainer(replace(config, train=replace(config.train, steps=2)), train_scene).fit()
    begun = time.perf_counter()
    trainer = Trainer(config, train_scene, device=args.device, callbacks=[watch])
    summary = trainer.fit()
    watch.read_memory()
    with trainer.optimizer.averaged():
        final = evaluate(trainer.model, test_scene, views=None if args.all_views else watch.views)
        strip = frames(trainer, test_scene)
    row = {
        "run": label,
        "psnr": final.psnr,
        "ssim": final.ssim,
        "views": len(final.views),
        "marks": watch.scores,
        "stages": watch.stages,
        "steps": summary.steps,
        "train_seconds": summary.train_seconds,
        "milliseconds_a_step": 1e3 * summary.train_seconds / max(summary.steps, 1),
        "rays_per_second": summary.rays / summary.train_seconds,
        "frame_milliseconds": 1e3 * min(view.seconds for view in final.views),
        "peak_gpu_gigabytes": watch.peak / 1e9 or None,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "wall_seconds": time.perf_counter() - begun,
        "config": to_dict(config),
    }
    print(f"{label}: {final.psnr:.2f} dB, {summary.steps} steps, {watch.peak / 1e9:.2f} GB", flush=True)
    return row, strip


def frames(trainer: Trainer, scene: Scene) -> Tensor:
    """Truth, render and error (x 4) of the middle view beside each other, at most 400 rows."""
    index = len(scene) // 2
    truth = truth_image(scene, index).cpu()
    render = trainer.model.render_image(scene.cameras, index).rgb.clamp(0.0, 1.0).cpu()
    strip = torch.cat([truth, render, ((render - truth).abs() * 4.0).clamp(max=1.0)], dim=1)
    shrink = max(1, strip.shape[0] // 400)
    return torch.nn.functional.avg_pool2d(strip.permute(2, 0, 1), shrink).permute(1, 2, 0)


def scene_folder(path: Path) -> str:
    for inside in ("blender/lego", "lego"):
        if (path / inside).is_dir():
            return str(path / inside)
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--downscale", type=int, default=1)
    parser.add_argument("--views", type=int, default=10, help="test views scored at the marks")
    parser.add_argument("--all-views", action="store_true", help="score all test views at the end")
    parser.add_argument("--run", action="append", help="LABEL[:KEY=VALUE,...]; may be given several times")
    args = parser.parse_args()
    source = str(args.data) if str(args.data).startswith("builtin:") else scene_folder(args.data)
    train, test = (load_scene(source, split, downscale=args.downscale) for split in ("train", "test"))
    rows: list[dict[str, Any]] = []
    strips: list[Tensor] = []
    protocol = (
        f"{args.seconds:g} s of training, decay ending with it; PSNR of test views on white, at marks of {args.views} "
        "views with the clock stopped; pruning and subdivision inside the time; memory: most that torch held meanwhile"
    )
    for label, config in map(parsed, args.run or ["voxels"]):
        row, strip = one_run(label, config, (train, test), args)
        rows.append(row)
        strips.append(strip)
        save_image(args.output.with_suffix(".png"), torch.cat(strips))
        record = Record(f"{test.name}: explicit grids", protocol, 0, rows, machine=machine(args.device))
        write_json(args.output, record)


if __name__ == "__main__":
    main()
