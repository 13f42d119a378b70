"""Scenes without an end, one way of sampling after the other, the same time each: PSNR on held-out views, pictures.

    python benchmarks/unbounded.py --scene fox=DATA/ngp/fox:2 --scene fern=DATA/llff/fern --out unbounded.json

A scene is NAME=FOLDER[:DOWNSCALE]; every 8th view is held out where it has no test split. The methods:

    bounded     the proposal preset's field and schedule, but one grid level over the box of the cameras
    nested      the same with nested grids, as `--preset ngp` fits them
    contracted  the same with a contracted grid
    proposal    the proposal preset as it is

and any of them with values of its own: `proposal:sampling.contraction=sphere,sampling.n_samples=32`. Beside the JSON
lies, for each scene, a sheet of held-out views (truth, then the methods) with frames of a flight through the cameras
below, by the last method. `--profile` prints the kernels of a frame by their time.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nerfturbo import Trainer, preset
from nerfturbo.bench.gate import measure_ms
from nerfturbo.bench.record import Record, machine, write_json
from nerfturbo.config import Config, from_dict, to_dict
from nerfturbo.data.images import save_image
from nerfturbo.data.options import LoadOptions
from nerfturbo.data.scene import Scene, farthest_distance, open_scenes
from nerfturbo.data.scene_defaults import fitted_config
from nerfturbo.evaluation.camera_path import interpolated_path
from nerfturbo.evaluation.evaluate import choose_views, evaluate, truth_image
from nerfturbo.evaluation.metrics import constant_baseline_psnr
from nerfturbo.rendering.model import NerfModel
from nerfturbo.sampling.geometry import box_around

METHODS = ("bounded", "nested", "contracted", "proposal")
SHEET_HEIGHT = 360  # pixels of one picture of a sheet
FRAMES = 12
REPEATS = 10  # frames whose median is the frame's time


def camera_box(scene: Scene) -> Scene:
    """The scene cut to one box that holds the cameras."""
    positions = scene.cameras.positions.cpu()
    box = box_around(positions, margin=0.1)
    return replace(scene, aabb=box, grid_levels=1, far=farthest_distance(positions, box))


def with_values(config: Config, text: str) -> Config:
    """The config with `stage.name=value,...` changed."""
    values = to_dict(config)
    for part in filter(None, text.split(",")):
        path, _, value = part.partition("=")
        stage, _, name = path.partition(".")
        try:
            values[stage][name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            values[stage][name] = value
    return from_dict(Config, values)


def method_config(method: str, scene: Scene, base: str) -> tuple[Config, Scene]:
    """The config of a method over a scene, and the scene as that method sees it."""
    name, _, changes = method.partition(":")
    config = preset(base)
    if name != "proposal":
        grid = preset("ngp-cpu" if base.endswith("cpu") else "ngp")
        config = replace(grid, field=config.field, optim=config.optim)
    if name == "contracted":
        config = replace(config, grid=replace(config.grid, contraction="cube"))
    if name == "bounded":
        scene = camera_box(scene)
    return with_values(fitted_config(with_values(config, changes), scene)[0], changes), scene


def rendered_sheet(model: NerfModel, test: Scene, views: list[int]) -> torch.Tensor:
    """Rows of views, the truth on the left."""
    pairs = [(truth_image(test, view).cpu(), model.render_image(test.cameras, view).rgb.cpu()) for view in views]
    return torch.cat([torch.cat([small(truth), small(found)], dim=1) for truth, found in pairs])


def path_sheet(model: NerfModel, scene: Scene, n_frames: int) -> torch.Tensor:
    """Frames of a flight through the training cameras, in rows of six, or one row of fewer."""
    path = interpolated_path(scene.cameras, n_frames)
    scale = min(1.0, SHEET_HEIGHT / int(path.size[0, 1]))
    path = path.scaled(scale)
    frames = [model.render_image(path, index).rgb.cpu() for index in range(n_frames)]
    blank = [torch.ones_like(frames[0])] * (-n_frames % 6)
    return torch.cat([torch.cat([*frames, *blank][i : i + 6], dim=1) for i in range(0, n_frames, 6)])


def small(picture: torch.Tensor) -> torch.Tensor:
    step = max(1, picture.shape[0] // SHEET_HEIGHT)
    height, width = picture.shape[0] // step * step, picture.shape[1] // step * step
    planes = picture[:height, :width].permute(2, 0, 1)[None]
    return torch.nn.functional.avg_pool2d(planes, step)[0].permute(1, 2, 0)


def frame_milliseconds(model: NerfModel, test: Scene, views: list[int]) -> float:
    """The median wall clock of held-out views at full size, each seen once before."""
    for view in views[:3]:
        model.render_image(test.cameras, view)
    times = [
        measure_ms(lambda view=view: model.render_image(test.cameras, view), model.device)[1]
        for view in (views[i % min(3, len(views))] for i in range(REPEATS if model.device.type == "cuda" else 1))
    ]
    return statistics.median(times)


def show_kernels(model: NerfModel, test: Scene, view: int) -> None:
    """Which kernels a frame spends its time in, and how often it launches them."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = model.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as prof:
        model.render_image(test.cameras, view)
        if on_gpu:
            torch.cuda.synchronize()
    spent = (lambda event: event.device_time_total) if on_gpu else (lambda event: event.self_cpu_time_total)
    events = sorted(prof.key_averages(), key=lambda event: -spent(event))
    total, launches = sum(spent(event) for event in events), sum(event.count for event in events)
    print(f"    {total / 1e3:.2f} ms in {launches} launches of a frame:", flush=True)
    for event in events[:16]:
        print(f"    {spent(event) / 1e3:9.3f} ms  x{event.count:5d}  {event.key[:90]}", flush=True)


def stacked(above: torch.Tensor, below: torch.Tensor | None) -> torch.Tensor:
    """Two sheets, one under the other, white beside the narrower one."""
    sheets = [above] if below is None else [above, below]
    width = max(sheet.shape[1] for sheet in sheets)
    pad = torch.nn.functional.pad
    return torch.cat([pad(sheet, (0, 0, 0, width - sheet.shape[1]), value=1.0) for sheet in sheets])


def run_method(
    method: str, scenes: tuple[Scene, Scene], args: argparse.Namespace, *, last: bool
) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor | None]:
    """Train and score; with the row come the sheet of views and, of the last method, the frames of a path."""
    config, train = method_config(method, scenes[0], args.preset)
    limits = {"steps": args.steps or 1_000_000_000, "time_limit": args.seconds, "seed": args.seed}
    config = replace(config, train=replace(config.train, **limits))
    begun = time.perf_counter()
    trainer = Trainer(config, train, device=args.device)
    summary = trainer.fit()
    wall = time.perf_counter() - begun
    views = choose_views(len(scenes[1]), args.views)
    with trainer.optimizer.averaged():
        found = evaluate(trainer.model, scenes[1], views=views)
        model = trainer.model.eval()
        sheet = rendered_sheet(model, scenes[1], views[: args.sheet_views])
        frames = path_sheet(model, scenes[0], args.frames) if last and args.frames else None
        milliseconds = frame_milliseconds(model, scenes[1], views)
        if args.profile:
            show_kernels(model, scenes[1], views[0])
    row = {
        "method": method,
        "psnr": found.psnr,
        "ssim": found.ssim,
        "views": [view.psnr for view in found.views],
        "steps": summary.steps,
        "train_seconds": summary.train_seconds,
        "seconds_with_compilation": wall,
        "rays_per_second": summary.rays / max(summary.train_seconds, 1e-9),
        "milliseconds_per_step": 1e3 * summary.train_seconds / max(summary.steps, 1),
        "frame_seconds": sum(view.seconds for view in found.views) / len(found.views),
        "frame_milliseconds": milliseconds,
        "skipped": trainer.skipped,
    }
    return row, sheet, frames


def run_scene(text: str, args: argparse.Namespace) -> dict[str, Any]:
    name, _, place = text.partition("=")
    folder, _, downscale = place.partition(":")
    scenes = open_scenes(folder, LoadOptions(int(downscale or 1)))
    width, height = scenes[1].cameras.size[0].tolist()
    constant = constant_baseline_psnr(scenes[1])
    print(f"{name}: {len(scenes[0])} views, {len(scenes[1])} held out, {width} x {height}, constant {constant:.2f} dB")
    rows, sheets, frames = [], [], None
    for method in args.methods:
        row, sheet, frames = run_method(method, scenes, args, last=method == args.methods[-1])
        sheets.append(sheet if not sheets else sheet[:, sheet.shape[1] // 2 :])
        rows.append(row)
        keep = ("psnr", "ssim", "steps", "train_seconds", "milliseconds_per_step", "frame_milliseconds")
        print(f"  {method}: " + ", ".join(f"{key} {row[key]:.3f}" for key in keep if row[key] is not None), flush=True)
    save_image(args.out.with_name(f"{args.out.stem}_{name}.jpg"), stacked(torch.cat(sheets, dim=1), frames))
    return {"scene": name, "size": [width, height], "held_out": len(scenes[1]), "constant_psnr": constant, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scene", action="append", required=True, metavar="NAME=FOLDER[:DOWNSCALE]")
    parser.add_argument("--methods", nargs="+", default=["bounded", "nested", "proposal"])
    parser.add_argument("--preset", default="proposal", help="the preset whose field, batch and schedule all take")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--views", type=int, help="score only so many held-out views")
    parser.add_argument("--sheet-views", type=int, default=2)
    parser.add_argument("--frames", type=int, default=FRAMES)
    parser.add_argument("--profile", action="store_true", help="print the kernels of a frame")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("unbounded.json"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for scene in args.scene:
        found.append(run_scene(scene, args))
        protocol = (
            f"{args.seconds:g} s of training each, compilation and evaluation not counted; PSNR in sRGB on unrounded "
            "values, the mean over held-out views; frame_seconds is a held-out view at full size as the evaluation met "
            "it, compilation included, frame_milliseconds the median of views seen once before"
        )
        record = Record("unbounded scenes by method", protocol, args.seed, found, machine=machine(args.device))
        write_json(args.out, record)


if __name__ == "__main__":
    main()
