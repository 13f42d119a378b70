"""What hangs on the loop: functions of (trainer, record), combined by `every`, `every_seconds` and `seldom`.

`MetricsLog` makes log entries, dictionaries with `kind`, `step`, `seconds` and numbers, and hands each to its loggers.
A logger of your own is any function of one entry:

    log = MetricsLog(loggers=[jsonl_logger(Path("log.jsonl")), lambda entry: queue.put(entry)])

TensorBoard, Weights & Biases and NVML are imported when they are asked for, never before.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..data.images import composite_over
from ..data.scene import Scene
from ..errors import CheckpointError, InputError
from ..ops.positions import ray_aabb
from ..rendering.model import NerfModel
from .checkpoint import KEEP
from .step import StepRecord

if TYPE_CHECKING:
    from .trainer import Callback, Trainer

LOG = logging.getLogger("nerfturbo")
Logger = Callable[[dict[str, Any]], None]
EVERY_SECONDS = 1.0  # between two looks at the GPU
STARVING_PERCENT = 60.0
STARVING_SAMPLES = 8  # readings in a row before the hint
DRAWS = 8  # batches drawn to see what that takes
Score = Callable[["Trainer"], float | None]
SELDOM = 10.0  # seconds of training for each second of a callback that is run seldom


def every(n_steps: int, callback: Callback) -> Callback:
    """Run a callback after every n-th step (or soon after, where several steps run at once)."""
    due = n_steps

    def run(trainer: Trainer, record: StepRecord) -> None:
        nonlocal due
        if record.step >= due:
            callback(trainer, record)
            due = (record.step // n_steps + 1) * n_steps

    return run


def every_seconds(seconds: float, callback: Callback, *, pause: float = 0.0) -> Callback:
    """Run a callback when this much wall-clock time has passed since its last run, and `pause` times what that took."""
    due = time.monotonic() + seconds

    def run(trainer: Trainer, record: StepRecord) -> None:
        nonlocal due
        if (begun := time.monotonic()) >= due:
            callback(trainer, record)
            now = time.monotonic()
            due = now + max(seconds, pause * (now - begun))

    return run


def seldom(callback: Callback) -> Callback:
    """Run a callback as often as a tenth of the training time allows; of several processes, in the first alone."""
    due = 0.0

    def run(trainer: Trainer, record: StepRecord) -> None:
        nonlocal due
        if trainer.train_seconds >= due and not trainer.should_stop and trainer.team.rank == 0:
            begun = time.perf_counter()
            callback(trainer, record)
            due = trainer.train_seconds + SELDOM * (time.perf_counter() - begun)

    return run


def save_checkpoints(folder: Path, *, keep: int = KEEP, score: Score | None = None) -> Callback:
    """Save; the newest `keep` stay, and the best by `score`. A save that fails is said, and training goes on."""

    def run(trainer: Trainer, record: StepRecord) -> None:
        with trainer.clock_stopped():
            value = None if score is None else score(trainer)
            try:
                trainer.save(folder, score=value, keep=keep)
            except CheckpointError as error:
                LOG.warning("%s; training goes on", error)

    return run


@torch.no_grad()
def view_psnr(model: NerfModel, scene: Scene, index: int) -> float:
    """Of one view over white."""
    truth = composite_over(scene.images.image(index).to(model.device), 1.0)
    error = float((model.render_image(scene.cameras, index).rgb - truth).square().mean())
    return -10.0 * math.log10(max(error, 1e-12))


def stop_at_psnr(target: float, score: Score) -> Callback:
    """End training once `score` reaches a PSNR; usually inside `every` or `seldom`."""

    def run(trainer: Trainer, record: StepRecord) -> None:
        with trainer.clock_stopped(), trainer.optimizer.averaged():
            value = score(trainer)
        if value is not None and value >= target:
            LOG.info("step %d: %.2f dB, the target is %g", trainer.step, value, target)
            trainer.stop("target psnr")

    return run


class MetricsLog:
    """Turns step results into records: one JSON line each, kept in memory for the display and the report."""

    def __init__(self, path: Path | None = None, *, every_steps: int = 20, loggers: Sequence[Logger] = ()) -> None:
        self.every_steps = every_steps
        self.monitor: Callable[[], dict[str, float]] | None = None  # of the GPU; its numbers go into every step's entry
        self.loggers = [*([] if path is None else [jsonl_logger(path)]), *loggers]
        self.records: list[dict[str, Any]] = []
        self._last: tuple[float, int, int] = (0.0, 0, 0)
        self._mse: float | None = None
        self._due = 1

    def start(self, trainer: Trainer) -> None:
        """Count rates from here on: for a run that was resumed."""
        self._last = (trainer.train_seconds, trainer.rays, trainer.samples)

    def __call__(self, trainer: Trainer, record: StepRecord) -> None:
        self._mse = record.mse if self._mse is None else 0.95 * self._mse + 0.05 * record.mse
        if record.step < self._due:
            return
        self._due = (record.step // self.every_steps + 1) * self.every_steps
        now, (seconds, rays, samples) = trainer.train_seconds, self._last  # read once, for what follows may wait
        elapsed = max(now - seconds, 1e-9)
        values = {
            "seconds": round(now, 4),
            **{name: getattr(record, name) for name in ("loss", "n_rays", "n_samples", "loss_scale")},
            "psnr": round(-10.0 * math.log10(max(self._mse, 1e-12)), 3),
            "rays_per_second": round((trainer.rays - rays) / elapsed),
            "samples_per_second": round((trainer.samples - samples) / elapsed),
            "occupied_fraction": round(float(trainer.model.grid.occupied_fraction()), 5),
            "learning_rate": trainer.optimizer.learning_rate,
            "gradient_norm": float(trainer.optimizer.gradient_norm) / record.loss_scale,
            "skipped": trainer.skipped,
        } | ({} if self.monitor is None else self.monitor())
        self._last = (now, trainer.rays, trainer.samples)
        self._write("step", trainer, values)

    def add_preview(self, trainer: Trainer, psnr: float, image: Path | None = None) -> None:
        """Record the score of a test view that was rendered on the way, and where its picture lies."""
        self._write("preview", trainer, {"psnr": round(psnr, 3)} | ({} if image is None else {"image": str(image)}))

    def add_event(self, trainer: Trainer, text: str) -> None:
        """Record something that happened once, in words."""
        self._write("event", trainer, {"text": text})

    def _write(self, kind: str, trainer: Trainer, values: dict[str, Any]) -> None:
        entry = {"kind": kind, "step": trainer.step, "seconds": round(trainer.train_seconds, 4)} | values
        self.records.append(entry)
        for logger in self.loggers:
            logger(entry)


def skipped_fraction(trainer: Trainer, record: StepRecord) -> float | None:
    """Share of the uniform lattice inside the box that the last step did not have to train on; None where there is no
    lattice, because the sampler places a fixed number of samples."""
    model, sampler = trainer.model, trainer.model.sampler
    if not model.marches:
        if getattr(sampler, "samples_per_ray", None) is not None or not getattr(sampler, "evaluations_per_ray", 0):
            return None
        return max(0.0, 1.0 - record.n_samples / max(1, record.n_rays * sampler.evaluations_per_ray))
    batch = trainer.pixels.draw(trainer.step - 1, max(1, record.n_rays))
    limits = {"near": model.bounds.near, "far": model.bounds.far}
    t_min, t_max = ray_aabb(batch.rays.origins, batch.rays.directions, model.grid.outer_aabb, **limits)
    return max(0.0, 1.0 - record.n_samples / max(float((t_max - t_min).sum()) / model.grid.step_size, 1.0))


def jsonl_logger(path: Path) -> Logger:
    """One JSON line per entry. A full disk is said once and does not end training: the entries stay in memory."""
    failed = False

    def write(entry: dict[str, Any]) -> None:
        nonlocal failed
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, default=str) + "\n")
        except OSError as error:
            if not failed:
                LOG.warning("%s: cannot be written (%s); training goes on", path, error.strerror or error)
            failed = True

    return write


def tensorboard_logger(folder: Path) -> Logger:
    """Curves and pictures for `tensorboard --logdir FOLDER`; a resumed run goes on in the same curves."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise _missing("tensorboard", "tensorboard", error) from None
    writer = SummaryWriter(str(folder), flush_secs=10)

    def write(entry: dict[str, Any]) -> None:
        for name, value in _scalars(entry).items():
            writer.add_scalar(f"{entry['kind']}/{name}", value, entry["step"])
        if (picture := _picture(entry)) is not None:
            writer.add_image(entry["kind"], picture, entry["step"], dataformats="HWC")
        writer.flush()

    return write


def wandb_logger(name: str, config: dict[str, Any] | None = None, project: str = "nerfturbo") -> Logger:
    """Curves and pictures in a Weights & Biases run, in the mode its environment variables ask for."""
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _missing("wandb", "wandb", error) from None
    run = wandb.init(project=project, name=name, config=config)

    def write(entry: dict[str, Any]) -> None:
        values: dict[str, Any] = {f"{entry['kind']}/{key}": value for key, value in _scalars(entry).items()}
        if (picture := _picture(entry)) is not None:
            values[entry["kind"]] = wandb.Image(picture)
        run.log(values, step=entry["step"])

    return write


def _scalars(entry: dict[str, Any]) -> dict[str, float]:
    numbers = {name: value for name, value in entry.items() if isinstance(value, int | float) and name != "step"}
    return {name: value for name, value in numbers.items() if not isinstance(value, bool)}


def _picture(entry: dict[str, Any]) -> Any:
    """(height, width, 3) uint8 of the picture an entry names, or None."""
    if (path := entry.get("image")) is None or not Path(path).is_file():
        return None
    import numpy
    from PIL import Image

    with Image.open(path) as image:
        return numpy.asarray(image.convert("RGB"))


def _missing(logger: str, package: str, error: ImportError) -> InputError:
    return InputError(f"logger {logger}", f"the package {package}", str(error), f"pip install {package}")


class GpuMonitor:
    """Reads a GPU about once a second, when it is called; `hint` is said once, when the GPU starves."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._last, self._values = 0.0, {}
        self.seen: list[float] = []  # every reading of the utilisation
        self._hinted = False

    def __call__(self) -> dict[str, float]:
        """gpu_utilisation (percent), gpu_memory_bytes and gpu_power_watts; the last reading where it is fresh."""
        now = time.monotonic()
        if now - self._last < EVERY_SECONDS and self._values:
            return dict(self._values)
        self._last = now
        with contextlib.suppress(self._nvml.NVMLError):
            self._values["gpu_utilisation"] = float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
            self.seen.append(self._values["gpu_utilisation"])
            self._values["gpu_memory_bytes"] = float(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
            self._values["gpu_power_watts"] = self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000.0
        recent = self.seen[-STARVING_SAMPLES:]
        mean = sum(recent) / max(len(recent), 1)
        if not self._hinted and len(recent) == STARVING_SAMPLES and mean < STARVING_PERCENT:
            self._hinted = True
            LOG.warning(hint(mean))
        return dict(self._values)


def rank_usage(trainer: Trainer, step_ms: float) -> tuple[dict[str, float | None], ...]:
    """A row for every rank: milliseconds of a step, and of drawing its pixels by itself (data loading), the share that
    makes, and the mean utilisation of its GPU in percent; None without a reading."""
    team, seen = trainer.team, [] if trainer.monitor is None else trainer.monitor.seen
    n_rays = max(1, trainer.stepper.n_rays // team.world)

    def draw(n_steps: int) -> float:
        begun = time.perf_counter()
        drawn = [trainer.pixels.draw(trainer.step + number, n_rays).rgba for number in range(n_steps)]
        return float(drawn[-1].sum()) * 0.0 + 1e3 * (time.perf_counter() - begun)  # the sum waits for a GPU

    draw(1)  # may compile
    drawing, busy = draw(DRAWS) / DRAWS * trainer.config.train.accumulate, sum(seen) / len(seen) if seen else -1.0
    rows = torch.zeros(team.world, 4, dtype=torch.float64, device=trainer.device if team.in_graph else "cpu")
    rows[team.rank] = torch.tensor([step_ms, drawing, min(1.0, drawing / max(step_ms, 1e-9)), busy])
    team.start_sum(rows)()
    names = ("step_ms", "data_ms", "data_share", "gpu_utilisation")
    return tuple(dict(zip(names, (*row[:3], row[3] if row[3] >= 0 else None), strict=True)) for row in rows.tolist())


def hint(utilisation: float) -> str:
    """What a GPU that waits for work is waiting for, most likely."""
    return (
        f"the GPU is busy {utilisation:.0f}% of the time: it waits for the host; larger batches "
        "(--train.batch-samples), --train.capture, pixels on the GPU (--pixels device) or fewer previews and saves "
        "help; `nerfturbo profile` shows where the time goes"
    )


def open_monitor(device: torch.device) -> GpuMonitor | None:
    """A monitor of an NVIDIA GPU; None on other devices, without nvidia-ml-py, or where the driver refuses."""
    if device.type != "cuda":
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        LOG.info("GPU utilisation and power are not shown: pip install nvidia-ml-py")
        return None
    try:
        nvml.nvmlInit()
        uuid = "GPU-" + str(torch.cuda.get_device_properties(device).uuid)
        return GpuMonitor(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        LOG.info("GPU utilisation and power are not shown: %s", error)
        return None
