"""The run folder: what training leaves on disk. Nothing else knows where things lie; docs/run_folder.md is its twin."""

import contextlib
import errno
import json
import math
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config import Config, check_code, from_dict, to_dict
from ..errors import CheckpointError, InputError, refuse, require_run
from ..files import remove, remove_abandoned, write_atomically
from ..types import Aabb
from .results import versions

SCHEMA_VERSION = 2
ROOM = 1 << 20  # bytes that must fit where something is to be written
_CLAIMS: dict[Path, int] = {}  # folders that this process trains in, and what keeps others away
_METRICS: dict[str, Any] = dict.fromkeys(("machine", "protocol", "exports"), dict)  # what is compared
_METRICS |= dict.fromkeys(("steps", "train_seconds", "rays_per_second", "psnr", "ssim", "lpips"), (int, float))
_METRICS |= dict.fromkeys(("peak_memory_bytes", "peak_gpu_memory_bytes"), (int, float))
_OWN_FILES = ("config.json", "metrics.json", "log.jsonl", "report.html", "turntable.gif", "turntable.mp4", "crop.json")
_OWN_PATTERNS = {
    "checkpoints": ("step_*", ".step_*.tmp"),
    "images": ("preview.png", "test_*.png", "test_*.jpg"),
    "tensorboard": ("events.out.tfevents.*",),
}


@dataclass
class RunFolder:
    """Paths inside one run folder."""

    path: Path

    def __post_init__(self) -> None:
        self.config_file = self.path / "config.json"
        self.metrics_file = self.path / "metrics.json"
        self.log_file = self.path / "log.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.images = self.path / "images"
        self.preview_file = self.images / "preview.png"
        self.report_file = self.path / "report.html"
        self.crop_file = self.path / "crop.json"

    def view_file(self, index: int) -> Path:
        return self.images / f"test_{index:03d}.png"

    def turntable_file(self, extension: str) -> Path:
        return self.path / f"turntable.{extension}"

    def read_config(self) -> Config:
        """Its config. In runs of version 1, up is the mean of the images' up axes."""
        document = _read_object(self.config_file)
        config = check_code(from_dict(Config, document["config"], str(self.config_file)), self.path)
        return config if document["version"] > 1 else replace(config, data=config.data.placed(up="mean"))

    def write_config(self, config: Config) -> None:
        write_json(self.config_file, config_document(config))

    def read_metrics(self) -> dict[str, Any]:
        """The metrics, or nothing where training has not finished."""
        metrics = _read_object(self.metrics_file) if self.metrics_file.is_file() else {}
        for name, kind in _METRICS.items():
            value = metrics.get(name)
            if value is not None and not (isinstance(value, kind) and (kind is dict or abs(value) < 1e300)):
                raise CheckpointError(f"{self.metrics_file}: {name}: not readable, no number or object")
        return metrics

    def write_metrics(self, metrics: dict[str, Any]) -> None:
        write_json(self.metrics_file, {"version": SCHEMA_VERSION, **metrics})

    def read_crop(self) -> Aabb | None:
        """The box that exports take, where the viewer saved one; in the coordinates of training."""
        if not self.crop_file.is_file():
            return None
        document = _read_object(self.crop_file)
        try:
            low, high = (tuple(map(float, document[name])) for name in ("low", "high"))
            return Aabb(low, high)  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError, OverflowError):
            raise CheckpointError(f"{self.crop_file}: no box; save it again in the viewer, or remove it") from None

    def write_crop(self, box: Aabb | None) -> None:
        """None: exports take the whole scene."""
        if box is None:
            self.crop_file.unlink(missing_ok=True)
        else:
            write_json(self.crop_file, {"version": SCHEMA_VERSION, "low": box.low, "high": box.high})

    def read_log(self) -> list[dict[str, Any]]:
        """All whole lines; a line cut short by a kill, or damaged, is left out."""
        if not self.log_file.is_file():
            return []
        records = []
        for line in self.log_file.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                records.append(json.loads(line))
        return [record for record in records if isinstance(record, dict) and isinstance(record.get("step", 0), int)]

    def trim_log(self, step: int) -> list[dict[str, Any]]:
        """Drop what was logged after `step`: a resumed run does those steps again."""
        kept = [record for record in self.read_log() if record.get("step", 0) <= step]
        write_atomically(self.log_file, "".join(json.dumps(record) + "\n" for record in kept))
        return kept


def config_document(config: Config) -> dict[str, Any]:
    """A config as the content of a file: what a run folder holds and `--config` reads."""
    version = versions().get("nerfturbo", "not installed")
    return {"version": SCHEMA_VERSION, "nerfturbo": version, "config": to_dict(config)}


def read_config_file(path: Path) -> Config:
    """A config that `tune` or a run wrote."""
    hint = "`nerfturbo tune` writes one, and every run has one"
    refuse(not path.is_file(), str(path), "a config file", "no such file", hint)
    document = _read_object(path)
    if not isinstance(document.get("config"), dict):
        raise InputError(str(path), "a config file", "no config in it", "`nerfturbo tune` writes one")
    return from_dict(Config, document["config"], str(path))


def open_run(path: str | Path) -> RunFolder:
    """A run folder that exists."""
    run = RunFolder(require_run(path))
    run.read_config()
    return run


def check_writable(path: Path, room: int = 0) -> Path:
    """Refuse, before any work, a path that cannot be made or has no room for so many bytes; returns what exists."""
    nearest = path
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    if nearest != path and not nearest.is_dir():
        raise InputError(str(path), "a place that can be written", f"{nearest} is a file", "choose another one")
    refuse(not os.access(nearest, os.W_OK), str(path), "a place that can be written", f"{nearest} is read-only to you")
    try:
        with tempfile.TemporaryFile(dir=nearest if nearest.is_dir() else nearest.parent) as file:
            file.write(bytes(1 << 12))
        if (free := shutil.disk_usage(nearest).free) < max(ROOM, room):
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {free / 1e6:.0f} of {room / 1e6:.0f} MB")
    except OSError as error:
        expected, got = "a place that can be written", f"{error.strerror or error} in {nearest}"
        raise InputError(str(path), expected, got, "free some space, or choose another one") from None
    return nearest


def check_result(path: Path) -> None:
    """Refuse, before minutes of work, a JSON file that could not be written, or whose plots would replace it."""
    refuse(path.suffix.lower() != ".json", "--output", "a file ending in .json", path)
    check_writable(path)
    refuse(path.is_dir(), str(path), "a file", "a folder of that name", "choose another name")


def check_output(path: Path, *, overwrite: bool = False, scene: str | None = None) -> None:
    """Refuse, before any work is done, a folder that cannot be written or that holds something, say the `scene`."""
    nearest = check_writable(path)
    same = scene is not None and path.resolve() == Path(scene).resolve()
    refuse(same, "--output", "another folder than the scene's", path)
    refuse(not nearest.is_dir(), str(path), "an output folder", "a file of that name", "choose another one")
    if nearest != path or overwrite or not any(path.iterdir()):
        return
    if (path / "config.json").is_file() and (path / "checkpoints").is_dir():
        hint = f"go on with it by --resume {path}, or replace it by --overwrite"
        raise InputError(str(path), "a new or empty output folder", "a run", hint)
    hint = "choose another one; --overwrite writes into it and leaves what is not a run's alone"
    raise InputError(str(path), "a new or empty output folder", "one that holds other files", hint)


def claim(path: Path) -> None:
    """Refuse a folder, if it is there, that another process trains in; until `release_claims` it is this one's."""
    with contextlib.suppress(ImportError):  # Windows has no such locks
        import fcntl

        if path in _CLAIMS or not path.is_dir():
            return
        _CLAIMS[path] = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(_CLAIMS[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_abandoned(path)
        except BlockingIOError:
            expected, hint = "a run that no other process is training", "wait for it, or choose another --output"
            raise InputError(str(path), expected, "one that is being trained", hint) from None
        except OSError:  # nor have some file systems
            pass


def release_claims() -> None:
    while _CLAIMS:
        os.close(_CLAIMS.popitem()[1])


def create_run(path: Path, config: Config, *, overwrite: bool = False) -> RunFolder:
    """Make the folder and write config.json; what cannot be finished is removed again."""
    check_output(path, overwrite=overwrite)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    run = RunFolder(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if overwrite:
            remove_own_files(run)
        run.images.mkdir(exist_ok=True)
        run.write_config(config)
    except OSError as error:
        if made:
            remove_own_files(run)
        for folder in made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise InputError(str(path), "an output folder that can be written", error.strerror or str(error)) from None
    return run


def remove_own_files(run: RunFolder) -> None:
    """Remove what a run writes, by name; everything else in the folder stays."""
    for name in _OWN_FILES:
        (run.path / name).unlink(missing_ok=True)
    for folder, patterns in _OWN_PATTERNS.items():
        inside = run.path / folder
        for path in [path for pattern in patterns for path in inside.glob(pattern)]:
            remove(path)
        if inside.is_dir() and not inside.is_symlink() and not any(inside.iterdir()):
            inside.rmdir()


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Whole or not at all; numbers that JSON cannot say (NaN, infinity) become null."""
    write_atomically(path, json.dumps(finite(document), indent=1, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """The same plain values with null for numbers that JSON cannot say."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def _read_object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable ({error})") from error
    version = document.get("version") if isinstance(document, dict) else None
    if not isinstance(version, int) or (path.name == "config.json" and "config" not in document):
        raise CheckpointError(f"{path}: not a file of a run folder")
    if version > SCHEMA_VERSION:
        raise CheckpointError(f"{path}: written by a newer nerfturbo (version {version}); upgrade to read it")
    return document
