"""Frames of a trained model: first the gate, then the clock, then the memory of a frame that is too large to hold."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ..cli.progress import make_table
from ..data.cameras import Cameras
from ..data.scene import Scene
from ..evaluation.evaluate import WHITE, truth_image
from ..evaluation.metrics import mean_psnr, psnr
from ..rendering.frame import FrameRenderer
from ..rendering.image import RenderedImage
from ..rendering.model import NerfModel
from ..rendering.render import render_rays
from ..types import Rays
from .gate import measure_ms
from .record import Record, machine

CHUNK = 8192  # rays of a plain rendering at a time
NEAR = 0.01  # colours closer than this are the same
STRAY = 1e-3  # share of pixels that may differ: cells decided by another rounding
DECIBELS = 0.1
SIZES = ((800, 800), (1920, 1080))
LARGE = (7680, 4320)
MEMORY = 1 << 28  # bytes in which the large frame is rendered
PROTOCOL = (
    "gate: recorded frames against render_rays on the same rays, at most {stray:.1%} of the pixels more than {near} "
    "apart and scores within {decibels} dB of theirs and, on average, of the evaluation's; what fails is not timed; "
    "then the median over {repeats} frames of a new camera each: the camera goes to the device, the picture of floats "
    "stays there, one count is read back; wall clock beside CUDA events; compilation and recording outside"
)


@dataclass(frozen=True)
class FrameGate:
    """What the frames show, compared with plain rendering of the same rays."""

    views: int
    psnr_frames: float
    psnr_plain: float
    psnr_evaluation: float  # as the config says pictures are scored
    largest_difference: float  # dB, over the views
    stray_pixels: float  # share
    verdict: str  # "passed", or what was wrong


@dataclass(frozen=True)
class FrameTiming:
    """Frames of one size."""

    width: int
    height: int
    way: str  # "frame": FrameRenderer, "image": render_image
    milliseconds: float  # on the device; on a CPU the wall clock
    wall_milliseconds: float
    rounds: int | None  # of the recorded frame


@dataclass(frozen=True)
class LargeFrame:
    """The frame that would not fit as a whole. `extra_bytes` is what it took besides the picture."""

    width: int
    height: int
    seconds: float
    budget_bytes: int
    extra_bytes: int | None  # None on a CPU


@dataclass(frozen=True)
class RenderBenchmark:
    """Result of `run_render_benchmark`."""

    gate: FrameGate
    timings: tuple[FrameTiming, ...]
    large: LargeFrame | None


def run_render_benchmark(
    model: NerfModel,
    scene: Scene,
    *,
    views: Sequence[int] | None = None,
    sizes: Sequence[tuple[int, int]] = SIZES,
    repeats: int = 30,
    large: tuple[int, int] | None = LARGE,
    max_memory: int | None = None,
) -> RenderBenchmark:
    """Gate the `views` (None: all) of a test scene, then time frames of (width, height) `sizes` along its cameras."""
    chosen = list(range(len(scene))) if views is None else list(views)
    gate = check_frames(model, scene, chosen, max_memory)
    if gate.verdict != "passed":
        return RenderBenchmark(gate, (), None)
    timings = []
    for width, height in sizes:
        cameras = [_reshaped(scene.cameras, view, width, height) for view in chosen]
        timings.extend(_time_size(model, cameras, repeats, max_memory))
    whole = None if large is None else _render_large(model, _reshaped(scene.cameras, chosen[0], *large))
    return RenderBenchmark(gate, tuple(timings), whole)


def _look(model: NerfModel) -> dict[str, Any]:
    """Marched in training's steps, over white."""
    return {"settings": model.sampler.settings, "background": torch.tensor(WHITE, device=model.device)}


def frames_of(model: NerfModel, width: int, height: int, max_memory: int | None = None) -> FrameRenderer:
    """The renderer of a model's frames over white."""
    size = {"width": width, "height": height, "max_memory": max_memory}
    return FrameRenderer(model.field, model.grid, **size, **_look(model))


def _frame(frames: FrameRenderer, cameras: Cameras, view: int = 0) -> RenderedImage:
    return frames.render(cameras.camera_to_world[view], cameras.focal[view], cameras.center[view])


@torch.no_grad()
def plain_image(model: NerfModel, rays: Rays) -> Tensor:
    """(n_rays, 3): everything marched in training's steps, then composited, a chunk of rays at a time."""
    chunks = [rays[slice(i, i + CHUNK)] for i in range(0, len(rays), CHUNK)]
    parts = [render_rays(model.field, chunk, model.grid, **_look(model)).rgb for chunk in chunks]
    return torch.cat(parts).clamp(0.0, 1.0)


def check_frames(model: NerfModel, scene: Scene, views: Sequence[int], max_memory: int | None = None) -> FrameGate:
    """Compare each view's frame with plain rendering, by pixels and by score."""
    frames: dict[tuple[int, int], FrameRenderer] = {}
    scores: list[tuple[float, float]] = []
    evaluated: list[float] = []
    stray = total = 0
    for view in views:
        width, height = (int(side) for side in scene.cameras.size[view])
        if (width, height) not in frames:
            frames[width, height] = frames_of(model, width, height, max_memory)
            _frame(frames[width, height], scene.cameras, view)  # recorded here, so that the next one is a replay
        image = _frame(frames[width, height], scene.cameras, view).rgb
        plain = plain_image(model, scene.cameras.to(model.device).image_rays(view)).view_as(image)
        truth = truth_image(scene, view).to(model.device)
        scores.append((psnr(image, truth), psnr(plain, truth)))
        evaluated.append(psnr(model.render_image(scene.cameras, view).rgb.clamp(0.0, 1.0), truth))
        stray += int((~((image - plain).abs().amax(-1) <= NEAR)).sum())  # so that a NaN counts
        total += width * height
    ours, theirs = (mean_psnr([score[i] for score in scores]) for i in (0, 1))
    worst = max(abs(a - b) if a != b else 0.0 for a, b in scores)
    official = mean_psnr(evaluated)
    verdict = "passed"
    if stray > STRAY * total:
        verdict = f"{stray} of {total} pixels differ by more than {NEAR}"
    elif not worst < DECIBELS:
        verdict = f"scores differ by {worst:.3f} dB"
    elif not abs(ours - official) < DECIBELS:
        verdict = f"frames score {ours:.3f} dB, the evaluation {official:.3f} dB"
    return FrameGate(len(scores), ours, theirs, official, worst, stray / total, verdict)


def _reshaped(cameras: Cameras, view: int, width: int, height: int) -> Cameras:
    """The view's camera with square pixels and a picture of another shape; the vertical field of view stays."""
    focal = float(cameras.focal[view, 1]) * height / float(cameras.size[view, 1])
    return Cameras(
        camera_to_world=cameras.camera_to_world[view : view + 1].cpu(),
        focal=torch.full((1, 2), focal),
        center=torch.tensor([[width / 2.0, height / 2.0]]),
        size=torch.tensor([[width, height]]),
    )


def _time_size(model: NerfModel, cameras: Sequence[Cameras], repeats: int, max_memory: int | None) -> list[FrameTiming]:
    width, height = (int(side) for side in cameras[0].size[0])
    frames = frames_of(model, width, height, max_memory)
    ways = {"frame": lambda camera: _frame(frames, camera), "image": lambda camera: model.render_image(camera, 0)}
    result = []
    for way, draw in ways.items():
        for camera in cameras[:3]:
            draw(camera)
        turns = [cameras[i % len(cameras)] for i in range(repeats)]
        pairs = [measure_ms(lambda camera=camera, draw=draw: draw(camera), model.device) for camera in turns]
        device, wall = (statistics.median(column) for column in zip(*pairs, strict=True))
        result.append(FrameTiming(width, height, way, device, wall, frames.rounds if way == "frame" else None))
    return result


def _render_large(model: NerfModel, cameras: Cameras) -> LargeFrame:
    width, height = (int(side) for side in cameras.size[0])
    on_gpu, before = model.device.type == "cuda", 0
    if on_gpu:
        torch.cuda.synchronize(model.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(model.device)
        before = torch.cuda.memory_reserved(model.device)
    begun = time.perf_counter()
    image = _frame(frames_of(model, width, height, MEMORY), cameras)
    extra = None
    if on_gpu:
        torch.cuda.synchronize(model.device)
        picture = sum(4 * value.numel() for value in (image.rgb, image.opacity, image.depth))
        extra = torch.cuda.max_memory_reserved(model.device) - before - picture
    return LargeFrame(width, height, time.perf_counter() - begun, MEMORY, extra)


def render_record(result: RenderBenchmark, model: NerfModel, scene: Scene, *, repeats: int = 30) -> Record:
    """The result as a benchmark file."""
    protocol = PROTOCOL.format(stray=STRAY, near=NEAR, decibels=DECIBELS, repeats=repeats)
    values: dict[str, Any] = asdict(result) | {
        "scene": f"{scene.name}, {scene.split}",
        "preset": model.config.preset,
        "occupied_cells": float(model.grid.occupied_fraction()),
    }
    what = "frames of a trained model: time, score, memory"
    return Record(what, protocol, model.config.train.seed, values, machine=machine(model.device))


def render_table(result: RenderBenchmark) -> Table:
    """One row per size and way."""
    gate, large = result.gate, result.large
    scores = f"{gate.psnr_frames:.3f} dB, plain rendering {gate.psnr_plain:.3f} dB"
    title = f"frames: gate {gate.verdict} ({scores}, {gate.stray_pixels:.3%} pixels differ)"
    table = make_table(title, "size", "way", "ms", "wall ms", "rounds", "MB besides the picture", left=2)
    for t in result.timings:
        numbers = [f"{value:.3f}" for value in (t.milliseconds, t.wall_milliseconds)]
        table.add_row(f"{t.width} x {t.height}", t.way, *numbers, "-" if t.rounds is None else str(t.rounds), "")
    if large is not None:
        extra = None if large.extra_bytes is None else f"{large.extra_bytes / 2**20:.0f} of {large.budget_bytes >> 20}"
        wall = f"{large.seconds * 1e3:.0f}"
        table.add_row(f"{large.width} x {large.height}", "frame, once", "-", wall, "-", extra or "-")
    return table
