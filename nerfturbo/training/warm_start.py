"""Begin from a trained field instead of from random numbers: the whole of it, or some of its parts, with its grid. A
source is a run folder, one of its checkpoints, one safetensors file with `field.*` (and perhaps `grid.*`) tensors, or
an entry of the zoo that comes with the package, as zoo:NAME. Optimizer, schedule and step begin anew: only what the
field knows is taken over. `keep` scales the features of its hash tables: scaled down, everything is thinner and paler
in its place, and what differs in the new scene is learned in fewer steps (shrink and perturb, Ash and Adams 2020)."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, InputError, refuse
from ..fields.field import table_parameters
from ..rendering.model import NerfModel
from ..sampling.grid import OccupancyGrid
from .checkpoint import latest_checkpoint, read_state, read_tensors

LOG = logging.getLogger("nerfturbo")
GRID = "grid"
KEEP = 0.6  # of the features, for a scene that is not quite the same: docs/checkpoints.md has the measurements
ZOO, ZOO_PREFIX = Path(__file__).parents[1] / "zoo", "zoo:"


@dataclass(frozen=True)
class WarmStart:
    """What was taken over from where."""

    source: Path
    parts: tuple[str, ...]
    n_parameters: int
    grid: bool


def zoo_names() -> list[str]:
    """The pretrained fields that come with the package."""
    return sorted(path.stem for path in ZOO.glob("*.safetensors"))


def part_names(model: NerfModel) -> list[str]:
    """The parts a model can begin from: those of its field (encoding, density_net, color_net, ...), and the grid."""
    return [*dict(model.field.named_children()), GRID]


def warm_start(model: NerfModel, source: Path | str, parts: tuple[str, ...] = (), *, keep: float = 1.0) -> WarmStart:
    """Copy parts of a trained model in place, all of them unless named; nothing is changed where one does not fit.
    `keep`, in (0, 1], is what the features of hash tables are multiplied by: 1 takes them as they are. Call it before
    an optimizer gathers the parameters, or call the optimizer's `refresh_halves` afterwards."""
    if not 0.0 < keep <= 1.0:
        raise InputError("keep", "a number above 0, at most 1", f"{keep:g}", "1 takes the features as they are")
    path, tensors = _read(_located(str(source)))
    known = part_names(model)
    for name in parts:
        refuse(name not in known, "parts", "some of " + ", ".join(known), repr(name))
    chosen = parts or tuple(known)
    fields = [name for name in chosen if name != GRID]
    own = {f"field.{name}": value for name, value in model.field.state_dict().items() if name.split(".")[0] in fields}
    for name, value in own.items():
        _check_fit(path, name, tensors.get(name), value, whole=not parts)
    learned = model.sampler.state_dict() if isinstance(model.sampler, torch.nn.Module) and not parts else {}
    placing = {f"sampler.{name}": value for name, value in learned.items()}
    if all(name in tensors and tensors[name].shape == value.shape for name, value in placing.items()):
        own |= placing  # what places the samples, where the source has all of it; else it is learned anew
    grid = _fitting_grid(path, model.grid, tensors, demanded=GRID in parts) if GRID in chosen else None
    _say_bounds(path, model)
    with torch.no_grad():
        shared = set(table_parameters(model.field))
        tables = {f"field.{name}" for name, value in model.field.named_parameters() if value in shared}
        for name, value in own.items():
            value.copy_(tensors[name] * keep if name in tables else tensors[name])
        if grid is not None:  # cells that no camera sees here stay given up, those that none saw there start occupied
            saved, thickness = grid.to(model.grid.thickness), model.grid.thickness
            start = torch.where(saved < 0.0, 2.0 * model.grid.threshold, saved)
            thickness.copy_(torch.where(thickness < 0.0, thickness, start))
            model.grid.recall()
    n_parameters = sum(value.numel() for value in own.values())
    return WarmStart(path, tuple(fields) + ((GRID,) if grid is not None else ()), n_parameters, grid is not None)


def check_source(source: Path | str) -> None:
    """Raise what `warm_start` would where there is no such source, or no field in it."""
    _read(_located(str(source)))


def save_field(model: NerfModel, path: Path, *, about: dict[str, str] | None = None) -> Path:
    """One safetensors file with field and grid, in half precision where that is enough: what a model zoo holds. `about`
    is kept beside the tensors: the preset under "preset", say, which is named where another one does not fit."""
    from safetensors.torch import save_file

    tensors = {f"field.{name}": value.half() for name, value in model.field.state_dict().items()}
    tensors["grid.thickness"] = model.grid.thickness.half()
    save_file({name: value.detach().contiguous().cpu() for name, value in tensors.items()}, path, metadata=about)
    return path


def _located(source: str) -> Path:
    if not source.startswith(ZOO_PREFIX):
        return Path(source).expanduser()
    name = source.removeprefix(ZOO_PREFIX)
    refuse(name not in zoo_names(), source, "an entry of the zoo: " + ", ".join(zoo_names()), repr(name))
    return ZOO / f"{name}.safetensors"


def _read(path: Path) -> tuple[Path, dict[str, Tensor]]:
    """The file, and its tensors by the names a model has."""
    if path.is_dir():
        path = latest_checkpoint(path) / "tensors.safetensors"
    elif not path.exists():
        hint = "name what `nerfturbo train` wrote"
        raise InputError(str(path), "a run folder, a checkpoint or a safetensors file", "no such file", hint)
    tensors = read_tensors(path)
    found = {name.removeprefix("model."): value for name, value in tensors.items()}
    if not any(name.startswith("field.") for name in found):
        got = ", ".join(sorted(tensors)[:3]) or "nothing"
        raise InputError(str(path), "tensors of a field (field.* or model.field.*)", got)
    return path, found


def _check_fit(path: Path, name: str, saved: Tensor | None, own: Tensor, *, whole: bool) -> None:
    if saved is not None and saved.shape == own.shape:
        return
    from safetensors import safe_open

    found = "no such tensor" if saved is None else f"shape {tuple(saved.shape)}"
    with safe_open(path, "pt") as file:
        preset = (file.metadata() or {}).get("preset")
    hint = f"train with --preset {preset}" if preset else "train with the preset and the --field values of that run"
    if whole:
        hint += ", or take over only the parts that fit: --init-parts"
    raise CheckpointError(f"{path}: {name}: expected shape {tuple(own.shape)}, found {found}; {hint}")


def _fitting_grid(path: Path, grid: OccupancyGrid, tensors: dict[str, Tensor], *, demanded: bool) -> Tensor | None:
    """The saved thickness where it fits; a grid of another size is learned anew, unless it was asked for by name."""
    if (saved := tensors.get("grid.thickness")) is not None and saved.shape == grid.thickness.shape:
        return saved
    wrong = f"expected {grid.n_cells} cells, found {'none' if saved is None else f'{saved.numel()} cells'}"
    if demanded:
        raise CheckpointError(f"{path}: grid: {wrong}; keep the run's --grid values")
    LOG.info("%s: the grid is not taken over: %s", path, wrong)
    return None


def _say_bounds(path: Path, model: NerfModel) -> None:
    """A field lives in its scene's box: another box means another place and size of everything."""
    if not (path.parent / "state.json").is_file():
        return
    there, box = read_state(path.parent).bounds, model.bounds.to_dict()
    sides: list[Any] = [values.get(side) for values in (there, box) for side in ("low", "high")]
    if None not in sides and sides[:2] != sides[2:]:
        text = "the field was trained in the box %s to %s and is stretched to this scene's, %s to %s"
        LOG.info(text, *([round(x, 3) for x in side] for side in sides))
