"""What follows training: scores, pictures, turntable, metrics.json, report.html."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config import Config
from ..data.cameras import Cameras
from ..data.images import save_image
from ..data.scene import Scene
from ..evaluation.camera_path import orbit_path, with_times
from ..evaluation.evaluate import Evaluation, ViewScore, choose_views, evaluate
from ..evaluation.images import comparison
from ..evaluation.metrics import Perceptual
from ..evaluation.report import write_report
from ..evaluation.results import describe_machine, evaluation_metrics, measure_baselines, peak_memory, versions
from ..evaluation.run_folder import RunFolder
from ..export.video import WriterPool, can_write_mp4, write_video
from ..rendering.image import RenderedImage
from ..rendering.model import NerfModel
from ..training.callbacks import skipped_fraction
from ..training.trainer import TrainSummary
from .common import print_json
from .progress import Display, duration, quantity, seconds_by_stage, since_command

if TYPE_CHECKING:
    from .session import Session

TURNTABLE_PIXELS = (96, 256)  # of the longer side, at least and at most
TURNTABLE_SECONDS = 15.0
TURNTABLE_FPS = 12
WRITERS = min(8, os.cpu_count() or 1)  # threads that encode pictures


def finish(session: Session, summary: TrainSummary, test_scene: Scene, backend: str) -> int:
    """Score, write everything, say where it is."""
    run, trainer, display, args = session.run, session.trainer, session.display, session.args
    with trainer.optimizer.averaged():
        model = trainer.model.eval()
        scores = score_run(run, model, test_scene, trainer.config, limit=args.eval_views, display=display)
        if args.turntable > 0:
            write_turntable(run, model, test_scene, args.turntable, display)
        spent = max(summary.train_seconds - session.first_seconds, 1e-9)
        metrics = {
            "scene": test_scene.name,
            "steps": summary.steps,
            "train_seconds": summary.train_seconds,
            "total_seconds": since_command(),
            "rays_per_second": summary.rays / spent,
            "samples_per_second": summary.samples / spent,
            "samples_skipped_fraction": None if session.last is None else skipped_fraction(trainer, session.last),
            "stopped_by": summary.stopped_by,
            "device": str(trainer.device),
            "backend": backend,
            **peak_memory(trainer.device),
            "machine": describe_machine(trainer.device),
            "versions": versions(),
            **scores,
            "seconds_by_stage": _stages(spent),
        }
        run.write_metrics(metrics)
        display.phase("writing the report")
        write_report(run)
    display.close()
    print_result(run, metrics, as_json=args.json)
    return 0


def _stages(trained: float) -> dict[str, float]:
    """Seconds of the command's stages; what training stopped its clock for is a stage of its own."""
    found = seconds_by_stage()
    if "training" in found:
        found["previews, checkpoints"] = max(0.0, found["training"] - trained)
        found["training"] = trained
    return found


def score_run(
    run: RunFolder,
    model: NerfModel,
    scene: Scene,
    config: Config,
    *,
    limit: int | None,
    display: Display,
    perceptual: Perceptual | None = None,
) -> dict[str, Any]:
    """Evaluate on test views, write the comparison pictures, and return the part of metrics.json about them."""
    views = choose_views(len(scene), limit)
    display.phase(f"scoring {len(views)} test views")
    run.images.mkdir(exist_ok=True)
    for old in run.images.glob("test_*.png"):
        old.unlink()

    writing = WriterPool(WRITERS, ahead=2 * WRITERS)  # encoding a picture takes longer than a GPU does to render it

    def on_view(done: int, total: int, score: ViewScore, image: RenderedImage, truth: Tensor) -> None:
        picture, path = comparison(image.rgb, truth), run.view_file(score.index)
        writing.submit(lambda: save_image(path, picture))
        display.update(done / total)

    try:
        evaluation: Evaluation = evaluate(model, scene, views=views, perceptual=perceptual, on_view=on_view)
        baselines = measure_baselines(scene, views, model.device)
        writing.finish()
    finally:
        writing.close(drop=True)
    return evaluation_metrics(evaluation, config, scene, baselines)


def write_turntable(run: RunFolder, model: NerfModel, scene: Scene, n_frames: int, display: Display) -> None:
    """One turn about the scene as turntable.gif, and as .mp4 where that can be encoded."""
    display.phase("rendering the turntable")
    cameras = orbit_path(scene.cameras, model.bounds.aabb.center, n_frames)
    if scene.cameras.times is not None:  # time runs while the camera turns
        cameras = with_times(cameras, None)
    cameras = cameras.scaled(_affordable_size(model, cameras) / int(cameras.size.max()))
    frames: list[Tensor] = []
    for index in range(n_frames):
        image = model.render_image(cameras, index)
        frames.append((image.rgb * 255.0 + 0.5).to(torch.uint8).cpu())
        display.update((index + 1) / n_frames)
    write_video(run.turntable_file("gif"), frames, fps=TURNTABLE_FPS)
    if can_write_mp4():
        write_video(run.turntable_file("mp4"), frames, fps=TURNTABLE_FPS)


def _affordable_size(model: NerfModel, cameras: Cameras) -> int:
    """The longer side such that all frames take about `TURNTABLE_SECONDS`, judged by a small one; within bounds."""
    least, most = TURNTABLE_PIXELS
    largest = min(most, int(cameras.size.max()))
    probe = cameras[0].scaled(min(1.0, least / int(cameras.size.max())))
    begun = time.perf_counter()
    model.render_image(probe, 0)
    seconds = max(time.perf_counter() - begun, 1e-6) * len(cameras)
    side = int(probe.size.max())
    return max(side, min(largest, int(side * (TURNTABLE_SECONDS / seconds) ** 0.5)))


def print_result(run: RunFolder, metrics: dict[str, Any], *, as_json: bool) -> None:
    """The result on stdout: one JSON object, or a few lines for people."""
    if as_json:
        print_json({"run": str(run.path), **run.read_metrics()})
        return
    protocol, baselines = metrics["protocol"], metrics["baselines"]
    similarity = "" if metrics["ssim"] is None else f", SSIM {metrics['ssim']:.4f}"
    similarity += "" if metrics.get("lpips") is None else f", LPIPS {metrics['lpips']:.4f}"
    background = "" if protocol["background"] == "as photographed" else f" over {protocol['background']}"
    print(f"PSNR {metrics['psnr']:.2f} dB{similarity} on {protocol['n_views']} {protocol['split']} views{background}")
    constant, blurred = baselines["constant_psnr"], baselines["blurred_psnr"]
    print(f"  to compare: one constant colour {constant:.2f} dB, the truth blurred by 3 pixels {blurred:.2f} dB")
    costs = [f"{metrics['steps']} steps", f"{duration(metrics['train_seconds'])} of training"]
    if "rays_per_second" in metrics:  # an interrupted run that is scored later does not know
        rays, samples = (quantity(metrics[f"{name}_per_second"]) for name in ("rays", "samples"))
        costs += [f"{duration(metrics['total_seconds'])} in all", f"{rays} rays/s, {samples} samples/s"]
        costs += [f"{metrics['backend']} on {metrics['device']}"]
    print(f"  {'; '.join(costs)}")
    files = [path for path in (run.report_file, run.turntable_file("gif"), run.metrics_file) if path.is_file()]
    print("\n".join(f"  {path}" for path in files))
    sys.stdout.flush()
