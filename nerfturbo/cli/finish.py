"""What follows training: scores, pictures, a video, metrics.json, report.html. Within the time that training took."""

import contextlib
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ..config import Config
from ..data.cameras import Cameras
from ..data.images import save_image, to_bytes
from ..data.scene import Scene, downscaled
from ..errors import NerfturboError, counted
from ..evaluation.camera_path import around_object, capture_path, with_times
from ..evaluation.evaluate import Evaluation, ViewScore, choose_views, evaluate
from ..evaluation.images import comparison, save_small
from ..evaluation.metrics import Perceptual
from ..evaluation.report import write_report
from ..evaluation.results import describe_machine, evaluation_metrics, measure_baselines, peak_memory, versions
from ..evaluation.run_folder import RunFolder
from ..export.video import WriterPool, can_write_mp4, video_writer
from ..rendering.image import RenderedImage
from ..rendering.model import NerfModel
from ..training.callbacks import skipped_fraction
from ..training.trainer import TrainSummary
from .common import learned_cameras, print_json
from .progress import Display, command_line, duration, in_words, quantity, seconds_by_stage, since_command

if TYPE_CHECKING:
    from .session import Session

SCORING_SHARE, VIDEO_SHARE = 1 / 3, 2 / 3  # of the training time: what scores and video may take together
LEAST_SECONDS = 15.0  # for each of them, however short training was
LEAST_VIEWS = 2  # before they are made smaller
LEAST_SIDE = 64  # of a view made smaller
PROBE_PIXELS = 96  # of the longer side of the image that measures how long a pixel takes
VIDEO_HEIGHT = (480, 720)  # a smaller image is enlarged
FINER = 1.5  # times the photos' height: of frames twice as high a viewer sees no more, for 1.8 times the work
SMOOTH_HEIGHT = 240  # below, half of the frames in twice the size show more
VIDEO_SECONDS = 3.0
WRITERS = min(8, os.cpu_count() or 1)  # threads that encode pictures


def finish(session: "Session", summary: TrainSummary, test_scene: Scene, backend: str) -> int:
    """Score, write everything, say where it is."""
    run, trainer, display, args = session.run, session.trainer, session.display, session.args
    with trainer.optimizer.averaged(), _training_is_safe(run):
        model = trainer.model.eval()
        spent = max(summary.train_seconds - session.first_seconds, 1e-9)
        scoring, video = seconds_after(spent)
        limits = {"limit": args.eval_views, "seconds": scoring}
        scores = score_run(run, model, test_scene, trainer.config, **limits, display=display)
        shown = write_turntable(run, model, trainer.scene, args.turntable, seconds=video, display=display)
        stages = seconds_by_stage()
        if "training" in stages:  # what it stopped its clock for is a stage of its own
            stages |= {"previews, checkpoints": max(0.0, stages["training"] - spent), "training": spent}
        metrics = {
            "scene": test_scene.name,
            "command": command_line(),
            **{name: getattr(summary, name) for name in ("steps", "train_seconds", "stopped_by", "ranks")},
            "total_seconds": since_command(),
            "rays_per_second": summary.rays / spent,
            "samples_per_second": summary.samples / spent,
            "samples_skipped_fraction": None if session.last is None else skipped_fraction(trainer, session.last),
            "device": str(trainer.device),
            "backend": backend,
            **peak_memory(trainer.device),
            **scores,
        }
        metrics |= {"machine": describe_machine(trainer.device), "versions": versions()}
        metrics |= {"video": shown, "seconds_by_stage": stages}
        run.write_metrics(metrics)
        display.phase("writing the report")
        write_report(run)
    display.close()
    print_result(run, metrics, as_json=args.json)
    return 0


@contextlib.contextmanager
def _training_is_safe(run: RunFolder) -> Iterator[None]:
    """A disk that is full now does not cost what was trained: inside, such an error says how to go on."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        how = f"what was trained is saved: free some space, then nerfturbo eval {shlex.quote(str(run.path))}"
        raise NerfturboError(f"{error.filename or run.path}: {error.strerror or error}; {how}") from error


def seconds_after(training: float) -> tuple[float, float]:
    """What scoring and the video may take at most, after so many seconds of training."""
    return max(LEAST_SECONDS, SCORING_SHARE * training), max(LEAST_SECONDS, VIDEO_SHARE * training)


def score_run(
    run: RunFolder,
    model: NerfModel,
    scene: Scene,
    config: Config,
    *,
    limit: int | None,
    display: Display,
    seconds: float | None = None,
    perceptual: Perceptual | None = None,
) -> dict[str, Any]:
    """Evaluate on test views, write the comparison pictures, and return the part of metrics.json about them. Where
    `seconds` would not do for all views and nobody set a `limit`, fewer are scored, then smaller ones."""
    views, divisor = choose_views(len(scene), limit), 1
    if seconds is not None and limit is None:
        views, divisor = affordable_views(scene.cameras, seconds / seconds_a_pixel(model, scene.cameras))
    less = len(views) < len(scene)
    display.phase(f"scoring {f'{len(views)} of ' if less else ''}{counted(len(scene), 'test view')}")
    for old in [*run.images.glob("test_*.png"), *run.images.glob("test_*.jpg")]:
        old.unlink()
    chosen = scene if divisor == 1 else downscaled(scene.select(views), divisor)
    places, numbers = (views, range(len(scene))) if divisor == 1 else (list(range(len(views))), views)

    def on_view(done: int, total: int, score: ViewScore, image: RenderedImage, truth: Tensor) -> None:
        picture, path = comparison(image.rgb, truth), run.view_file(numbers[score.index])
        writing.submit(lambda: save_image(path, picture))
        writing.submit(lambda: save_small(path.with_suffix(".jpg"), picture))
        display.update(done / total)

    with WriterPool(WRITERS, ahead=2 * WRITERS) as writing:  # encoding takes longer than rendering does on a GPU
        evaluation: Evaluation = evaluate(model, chosen, views=places, perceptual=perceptual, on_view=on_view)
        baselines = measure_baselines(chosen, places, model.device)
    scored = tuple(replace(view, index=numbers[view.index]) for view in evaluation.views)
    found = evaluation_metrics(replace(evaluation, views=scored), config, scene, baselines, divisor=divisor)
    if limit is None and (less or divisor > 1):
        found["protocol"]["limited_by"] = "the training time; `nerfturbo eval RUN` scores all views at full size"
    return found


def affordable_views(cameras: Cameras, pixels: float) -> tuple[list[int], int]:
    """(views, divisor of their sides) that have so many pixels: all of them, else fewer, at last smaller ones."""
    n, each = len(cameras), float(cameras.size.double().prod(-1).mean())
    views = choose_views(n, max(min(LEAST_VIEWS, n), int(pixels / each)))
    divisor = math.ceil((len(views) * each / pixels) ** 0.5)
    return views, max(1, min(divisor, int(cameras.size.min()) // LEAST_SIDE))


def seconds_a_pixel(model: NerfModel, cameras: Cameras) -> float:
    """Measured on a small image, as this machine renders this scene."""
    probe = cameras[0].scaled(min(1.0, PROBE_PIXELS / int(cameras.size[0].max())))
    begun = time.perf_counter()
    model.render_image(probe, 0).rgb.cpu()  # which waits for a GPU
    return max(time.perf_counter() - begun, 1e-6) / int(probe.size.prod())


def write_turntable(
    run: RunFolder, model: NerfModel, scene: Scene, n_frames: int, *, seconds: float, display: Display
) -> dict[str, Any] | None:
    """The path of the capture as turntable.mp4, or .gif where that cannot be encoded, and what was made; in about so
    many seconds: frames that would take longer are rendered smaller and enlarged. None without frames."""
    if n_frames == 0:
        return None
    display.phase("rendering the video")
    cameras, kind = capture_path(learned_cameras(model, scene).cameras, model.bounds.aabb.center, n_frames)
    cameras = around_object(cameras, model, scene)
    if scene.cameras.times is not None:  # time runs while the camera moves
        cameras = with_times(cameras, None)
    width, height = cameras.size[0].tolist()
    shown = min(max(height, VIDEO_HEIGHT[0]), VIDEO_HEIGHT[1])
    pixels = seconds / seconds_a_pixel(model, cameras) / n_frames
    rendered, largest = round((pixels * height / width) ** 0.5), min(shown, round(FINER * height))
    if rendered < min(SMOOTH_HEIGHT, largest) and n_frames > 1:
        cameras, rendered = cameras[torch.arange(0, n_frames, 2)], round(rendered * 2**0.5)
    cameras = cameras.scaled(min(max(rendered, LEAST_SIDE), largest) / height)
    size, file = (shown, round(width * shown / height)), run.turntable_file("mp4" if can_write_mp4() else "gif")
    run.turntable_file("gif").unlink(missing_ok=True)  # of an earlier time
    with video_writer(file, fps=len(cameras) / VIDEO_SECONDS) as add:
        for index in range(len(cameras)):
            add(to_bytes(enlarged(model.render_image(cameras, index).rgb, size)))
            display.update((index + 1) / len(cameras))
    sizes = {"size": [size[1], size[0]], "rendered_size": cameras.size[0].tolist()}
    return {"file": file.name, "path": kind, "frames": len(cameras), **sizes}


def enlarged(image: Tensor, size: tuple[int, int]) -> Tensor:
    """An image (height, width, 3) in another (height, width)."""
    return interpolate(image.permute(2, 0, 1)[None], size, mode="bicubic")[0].permute(1, 2, 0).clamp(0.0, 1.0)


def print_result(run: RunFolder, metrics: dict[str, Any], *, as_json: bool) -> None:
    """The result on stdout: one JSON object, or a few lines for people."""
    if as_json:
        print_json({"run": str(run.path), **run.read_metrics()})
        return
    protocol, baselines = metrics["protocol"], metrics["baselines"]
    similarity = "" if metrics["ssim"] is None else f", SSIM {metrics['ssim']:.4f}"
    similarity += "" if metrics.get("lpips") is None else f", LPIPS {metrics['lpips']:.4f}"
    background = "" if protocol["background"] == "as photographed" else f" over {protocol['background']}"
    views = counted(protocol["n_views"], f"{protocol['split']} view")
    print(f"PSNR {metrics['psnr']:.2f} dB{similarity} on {views}{background}")
    if "limited_by" in protocol:
        print(f"  {protocol['views']}, {in_words(protocol['resolution'])} pixels, within {protocol['limited_by']}")
    constant, blurred = baselines["constant_psnr"], baselines["blurred_psnr"]
    print(f"  to compare: one constant colour {constant:.2f} dB, the truth blurred by 3 pixels {blurred:.2f} dB")
    costs = [counted(metrics["steps"], "step"), f"{duration(metrics['train_seconds'])} of training"]
    spent: list[Any] = [metrics.get(name) for name in ("rays_per_second", "samples_per_second", "total_seconds")]
    if all(isinstance(value, int | float) for value in spent):  # an interrupted run that is scored later does not know
        costs += [f"{duration(spent[2])} in all", f"{quantity(spent[0])} rays/s, {quantity(spent[1])} samples/s"]
        costs += [f"{metrics.get('backend')} on {metrics.get('device')}"]
    print(f"  {'; '.join(costs)}")
    files = [run.turntable_file(ending) for ending in ("mp4", "gif")]
    print("\n".join(f"  {path}" for path in [run.report_file, *files, run.metrics_file] if path.is_file()))
    folder, opener = shlex.quote(str(run.path)), {"darwin": "open", "win32": "start"}.get(sys.platform, "xdg-open")
    print(f"next:\n  {opener} {shlex.quote(str(run.report_file))}\n  nerfturbo view {folder}")
    print(f"  nerfturbo render {folder}")
    print(f"  nerfturbo export mesh {folder} {shlex.quote(str(run.path / 'mesh.glb'))}", flush=True)
