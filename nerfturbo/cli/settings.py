"""The stages of a config as nested flags (`--grid.resolution 64`), with a preset's values as defaults."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..config import (
    CameraConfig,
    Config,
    FactorConfig,
    FieldConfig,
    GridConfig,
    LossConfig,
    MotionConfig,
    OptimConfig,
    PhotoConfig,
    RenderConfig,
    SamplingConfig,
    TrainConfig,
    VoxelConfig,
)
from ..errors import InputError
from ..presets import preset
from .common import flag_value

MAX_APPEARANCE = 48  # with the 16 of the view direction, what one kernel takes per ray

MAX_PROPOSALS = 3
CHECKPOINTED = ("vanilla", "tnerf", "dnerf")  # fields that can compute their layers again


@dataclass(frozen=True)
class Settings:
    """All stages but the data, which every verb asks for in its own way."""

    grid: GridConfig = dataclasses.field(default_factory=GridConfig)
    field: FieldConfig = dataclasses.field(default_factory=FieldConfig)
    voxels: VoxelConfig = dataclasses.field(default_factory=VoxelConfig)
    factor: FactorConfig = dataclasses.field(default_factory=FactorConfig)
    motion: MotionConfig = dataclasses.field(default_factory=MotionConfig)
    render: RenderConfig = dataclasses.field(default_factory=RenderConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    cameras: CameraConfig = dataclasses.field(default_factory=CameraConfig)
    photo: PhotoConfig = dataclasses.field(default_factory=PhotoConfig)
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)

    @classmethod
    def of(cls, config: Config) -> Settings:
        return cls(**{stage.name: getattr(config, stage.name) for stage in dataclasses.fields(cls)})

    def apply(self, config: Config) -> Config:
        """The config with these stages in it; values that make no sense are named by their flag."""
        self._check()
        return replace(config, **{stage.name: getattr(self, stage.name) for stage in dataclasses.fields(self)})

    def _check(self) -> None:
        train, optim, grid, field, render = self.train, self.optim, self.grid, self.field, self.render
        check_positive(
            {
                "--train.steps": train.steps,
                "--train.time-limit": train.time_limit,
                "--train.batch-samples": train.batch_samples,
                "--train.max-rays": train.max_rays,
                "--train.initial-rays": train.initial_rays,
                "--train.marched-per-trained": train.marched_per_trained,
                "--render.steps-per-diagonal": render.steps_per_diagonal,
                "--render.eval-refine": render.eval_refine,
                "--render.eval-rays": render.eval_rays,
                "--train.rays-per-pixel": train.rays_per_pixel,
                "--grid.update-every": grid.update_every,
                "--field.width": field.width,
                "--field.initial-density": field.initial_density,
                "--field.depth": field.depth,
                "--field.color-depth": field.color_depth,
                "--field.geo-features": field.geo_features,
                "--optim.lr": optim.lr,
                "--optim.eps": optim.eps,
                "--optim.final-lr-fraction": optim.final_lr_fraction,
                "--optim.milestone-factor": optim.milestone_factor,
                "--train.accumulate": train.accumulate,
                "--optim.ema-every": optim.ema_every,
                "--train.coarse-downscale": train.coarse_downscale,
                "--train.target-psnr": train.target_psnr,
                "--cameras.lr": self.cameras.lr,
                "--cameras.first-levels": self.cameras.first_levels,
            }
        )
        check_positive({"--photo.lr": self.photo.lr, "--photo.depth-rays": self.photo.depth_rays})
        _check_sampling(self.sampling)
        _check_motion(self.motion, grid.moments)
        shares = {
            "--grid.decay": grid.decay,
            "--optim.hold-fraction": optim.hold_fraction,
            "--optim.ema-decay": optim.ema_decay,
            "--train.coarse-fraction": train.coarse_fraction,
            "--optim.beta1": optim.beta1,
            "--optim.beta2": optim.beta2,
            "--render.early-stop-eps": render.early_stop_eps,
            "--render.alpha-thre": render.alpha_thre,
            "--cameras.fade-in": self.cameras.fade_in,
            "--render.thin": render.thin,
        }
        for flag, value in shares.items():
            if not 0.0 <= value < 1.0:
                raise InputError(flag, "a number from 0 to below 1", str(value))
        sizes = {"--optim.clip-norm": optim.clip_norm, "--optim.table-decay": optim.table_decay}
        sizes |= {"--train.pixel-spread": train.pixel_spread, "--photo.depth-weight": self.photo.depth_weight}
        sizes |= {f"--loss.{name}": value for name, value in dataclasses.asdict(self.loss).items()}
        for flag, value in sizes.items():
            if not value >= 0.0:
                raise InputError(flag, "a number >= 0", str(value))
        _check_appearance(self.photo.appearance)
        _check_acts(optim, field)
        if not 0 <= train.seed < 1 << 63:
            raise InputError("--seed", "an integer from 0 to below 2^63", str(train.seed))


def _check_acts(optim: OptimConfig, field: FieldConfig) -> None:
    """Refuse values that would have no effect at all."""
    if optim.warmup_steps < 0:
        raise InputError("--optim.warmup-steps", "a number >= 0", str(optim.warmup_steps))
    for share in optim.milestones:
        if not 0.0 < share < 1.0:
            hint = "half of the run is 0.5"
            raise InputError("--optim.milestones", "shares of the run, above 0 and below 1", f"{share:g}", hint)
    if field.checkpointing and field.kind not in CHECKPOINTED:
        fields, hint = ", ".join(CHECKPOINTED), "the others keep little for the backward"
        raise InputError("--field.checkpointing", f"a --field.kind of {fields}", field.kind, hint)


def _check_appearance(numbers: int) -> None:
    if not 0 <= numbers <= MAX_APPEARANCE:
        raise InputError("--photo.appearance", f"0 to {MAX_APPEARANCE} numbers", str(numbers))


def _check_motion(motion: MotionConfig, moments: int) -> None:
    names = ("time_frequencies", "time_resolution", "guide_levels", "max_resolution")
    check_positive({f"--motion.{name.replace('_', '-')}": getattr(motion, name) for name in names})
    if not 0 <= moments <= 4:
        raise InputError("--grid.moments", "0 to 4", str(moments))


def _check_sampling(sampling: SamplingConfig) -> None:
    lists = {
        "--sampling.coarse-samples": sampling.coarse_samples,
        "--sampling.proposal-resolutions": sampling.proposal_resolutions,
    }
    check_positive({flag: min(values, default=0) for flag, values in lists.items()})
    check_positive(
        {
            "--sampling.n-samples": sampling.n_samples,
            "--sampling.far": sampling.far,
            "--sampling.steps": sampling.steps,
            "--sampling.proposal-width": sampling.proposal_width,
        }
    )
    weights = {
        "--sampling.interlevel": sampling.interlevel,
        "--sampling.distortion": sampling.distortion,
        "--sampling.near-gradient": sampling.near_gradient,
        "--sampling.anneal-steps": sampling.anneal_steps,
    }
    for flag, value in weights.items():
        if not value >= 0.0:
            raise InputError(flag, "a number >= 0", str(value))
    if sampling.kind == "proposal" and len(sampling.coarse_samples) > MAX_PROPOSALS:
        got = str(len(sampling.coarse_samples))
        raise InputError("--sampling.coarse-samples", f"1 to {MAX_PROPOSALS} numbers, one per proposal network", got)


def check_positive(values: dict[str, float | int | None]) -> None:
    """Refuse what is not above zero or has no end, by the name of its flag; None is a flag that was not given."""
    for flag, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise InputError(flag, "a finite number > 0" if value == math.inf else "a number > 0", str(value))


def asks_help(argv: Sequence[str]) -> bool:
    return any(word in ("-h", "--help") for word in argv)


def starting_config(argv: Sequence[str]) -> Config:
    """The config whose values the nested flags have as defaults: decided by --config, or --preset and --device."""
    file = flag_value(argv, "--config")
    if file is not None and not asks_help(argv):
        from ..evaluation.run_folder import read_config_file

        if flag_value(argv, "--preset") is not None:
            raise InputError("--preset", "nothing beside --config", repr(flag_value(argv, "--preset")), "choose one")
        return read_config_file(Path(file).expanduser())
    name, device = flag_value(argv, "--preset") or "auto", flag_value(argv, "--device") or "auto"
    if name != "auto" or device != "auto":
        return preset(name, "cpu" if device.startswith("cpu") else "cuda")
    if asks_help(argv):  # torch would take seconds to say whether it can use the GPU
        return preset(name, "cuda" if os.path.exists("/dev/nvidia0") else "cpu")
    return preset(name, resolve_device(device))


def resolve_device(name: str) -> str:
    """A device torch can use here."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError("--device", "auto, cpu, cuda or cuda:N", repr(name)) from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            got = f"{name}, with {count} GPUs usable here"
            raise InputError("--device", "a GPU that torch can use", got, "`nerfturbo doctor` says why")
    elif device.type not in ("cpu", "mps"):
        raise InputError("--device", "auto, cpu, cuda or cuda:N", repr(name))
    return name
