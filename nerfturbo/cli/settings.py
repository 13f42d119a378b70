"""The sections of a config as nested flags (`--grid.resolution 64`), with a preset's values as defaults. The flags are
those of the chosen field and sampler alone: `--preset`, `--field` and `--sampler` decide which they are."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from tyro.conf import arg

from ..config import BUILTIN_PREFIX, BUILTIN_SCENES, KINDS, Config, CustomFieldConfig, CustomSamplerConfig
from ..errors import InputError, did_you_mean, refuse
from ..presets import preset
from .flags import Device, Kind, asks_help, flag_value, parse, print_help

T = TypeVar("T")
GROUPS = {  # what --help shows of verbs over a config; --help-all shows the rest
    "scene": "DATA downscale bounds up",
    "training": "preset field sampler config steps warm-steps time-limit marks quick seed seeds init-from resume",
    "results": "output overwrite eval-views turntable save-every log viewer json",
    "machine": "device backend memory max-batch",
}
_CUSTOM = {"field": CustomFieldConfig, "sampler": CustomSamplerConfig}


@dataclass(frozen=True)
class Settings:
    """All sections but the data, which every verb asks for in its own way; made by `of` with the types of a config."""

    @staticmethod
    def of(config: Config) -> "Settings":
        sections = [one.name for one in dataclasses.fields(Config) if one.name not in ("preset", "data")]
        values = {name: getattr(config, name) for name in sections}
        made = [(name, type(value), dataclasses.field(default=value)) for name, value in values.items()]
        return dataclasses.make_dataclass("Settings", made, bases=(Settings,), frozen=True)()

    def apply(self, config: Config) -> Config:
        """The config with these sections in it."""
        return replace(config, **{one.name: getattr(self, one.name) for one in dataclasses.fields(self)})


@dataclass(frozen=True, kw_only=True)
class ConfigArgs:
    """What every verb over a config asks for."""

    preset: Annotated[str, arg(metavar="NAME")] = "auto"
    """Named starting point: ngp (objects, fast), quality (finer, slower), proposal (unbounded), proposal-large (from
    100 photos), vanilla (the first NeRF), hierarchy (coarse and fine networks), voxels (no network), factor (planes and
    lines), dynamic (motion, fast), tnerf, dnerf (motion by networks). Most also as NAME-cpu."""
    field: Kind = None  # Field: ngp, ngp-time, vanilla, voxels, factor, or your own: path/to/file.py:MyField.
    sampler: Kind = None  # Sampler: grid, uniform, hierarchy, proposal, or your own: path/to/file.py:MySampler.
    device: Device = "auto"
    settings: Annotated[Settings, arg(name="")] = dataclasses.field(default_factory=Settings)


def parse_settings(kind: type[T], argv: Sequence[str], prog: str) -> tuple[T, Config]:
    """`parse` for a verb with nested flags, which `--help-all` alone lists; and the config of their defaults."""
    check_source(next(iter(argv), "-"))
    start = starting_config(argv)
    if "--help-all" in argv or not asks_help(argv):
        words = ["--help"] if asks_help(argv) else argv
        args = parse(kind, words, prog, default=cast(Any, kind)(settings=Settings.of(start)))
        check_source(cast(Any, args).scene or "-")
        return args, start
    print_help(kind, prog, GROUPS)
    print(f"\n--help-all lists every value of preset {start.preset}")
    sys.exit(0)


def check_source(source: str, wanted: tuple[str, str] = ("a folder with a scene", "no such folder")) -> None:
    """Refuse a scene that is not there, before anything is imported that takes seconds; flags are no scenes."""
    name = source.removeprefix(BUILTIN_PREFIX)
    if name.startswith("-") or name in BUILTIN_SCENES or (name == source and Path(name).expanduser().exists()):
        return
    beside = [one.name for one in Path(name).expanduser().parent.glob("*")] if name == source else []
    hint = did_you_mean(Path(name).name, [*BUILTIN_SCENES, *beside])
    hint = hint or f"give a scene folder, photos, a video, or a built-in scene: {', '.join(BUILTIN_SCENES)}"
    expected, got = wanted if name == source else ("a built-in scene", repr(name))
    raise InputError(source, expected, got, hint)


def starting_config(argv: Sequence[str]) -> Config:
    """The defaults of nested flags: by --resume, --config, or --preset and --device; then by --field and --sampler."""
    if (resume := flag_value(argv, "--resume")) is not None and not asks_help(argv):
        from ..evaluation.run_folder import open_run

        return open_run(resume).read_config()
    return plugged(_preset_config(argv), flag_value(argv, "--field"), flag_value(argv, "--sampler"))


def plugged(config: Config, field: str | None, sampler: str | None) -> Config:
    """The config with another field or sampler: one of ours by its kind, or one's own by where it comes from."""
    for section, chosen in (("field", field), ("sampler", sampler)):
        if chosen is None:
            continue
        kinds: dict[str, Any] = {name: kind for name, kind in KINDS[section].items() if name != "custom"}
        if ":" in chosen:
            from ..fields.custom import absolute_source

            own: Any = _CUSTOM[section](absolute_source(chosen, f"--{section}"))
        elif chosen in kinds:
            own = getattr(config, section) if getattr(config, section).kind == chosen else kinds[chosen]()
        else:
            expected = f"one of {', '.join(kinds)}, or your own: path/to/file.py:ClassName"
            raise InputError(f"--{section}", expected, repr(chosen))
        config = replace(config, **{section: own})
    return config


def _preset_config(argv: Sequence[str]) -> Config:
    if (file := flag_value(argv, "--config")) is not None and not asks_help(argv):
        from ..evaluation.run_folder import read_config_file

        if flag_value(argv, "--preset") is not None:
            raise InputError("--preset", "nothing beside --config", repr(flag_value(argv, "--preset")), "choose one")
        return read_config_file(Path(file).expanduser())
    name, device = flag_value(argv, "--preset") or "auto", flag_value(argv, "--device") or "auto"
    if name != "auto" or device != "auto":
        return preset(name, "cpu" if device.startswith("cpu") else "cuda")
    if asks_help(argv) or not has_gpu():  # torch would take seconds to say whether it can use one
        return preset(name, "cuda" if has_gpu() else "cpu")
    return preset(name, resolve_device(device))


def has_gpu() -> bool:
    """Whether a driver of a GPU may be here; torch knows better, and takes seconds."""
    drivers = ("nvidiactl", "nvidia0", "nvmap", "dxg", "kfd")  # of NVIDIA, of its boards, of Windows below, of AMD
    return sys.platform != "linux" or any(os.path.exists(f"/dev/{name}") for name in drivers)


def resolve_device(name: str) -> str:
    """A device torch can use here."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    device = None
    with contextlib.suppress(RuntimeError):
        device = torch.device(name)
    if device is None or device.type not in ("cpu", "mps", "cuda"):
        raise InputError("--device", "auto, cpu, cuda or cuda:N", repr(name))
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        got = f"{name}, with {count} GPUs usable here"
        refuse((device.index or 0) >= count, "--device", "a GPU that torch can use", got, "`nerfturbo doctor` says why")
    return name
