"""Everything that decides a run, as small frozen dataclasses. Their docstrings are the help of the command line, their
annotations the ranges: a value out of range is refused here, in the library and on the command line alike.

`field` and `sampler` are unions: a value exists only where it means something. In JSON their `kind` says which it is.
Run folders of version 0.1 are read through `_migrated`.
"""

import dataclasses
import functools
import importlib.machinery
import math
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from .errors import InputError, refuse

NO_STEP_LIMIT = 1_000_000_000  # train.steps of a run that its time limit alone ends
MAX_APPEARANCE = 48  # with the 16 numbers of the view direction, what one kernel takes per ray
MAX_PROPOSALS = 3
BUILTIN_PREFIX = "builtin:"
BUILTIN_SCENES = ("toybox", "armillary", "seesaw")  # rendered by us; the last is dynamic


class In(NamedTuple):
    """The range of a number, or of each number of a list; "(" and ")" leave that end out."""

    low: float
    high: float = math.inf
    ends: str = "[]"

    def holds(self, value: float) -> bool:
        above = value > self.low if self.ends[0] == "(" else value >= self.low
        below = value < self.high if self.ends[1] == ")" or self.high == math.inf else value <= self.high
        return above and below

    def __str__(self) -> str:
        below = f"{'<' if self.ends[1] == ')' else '<='} {self.high:g}"
        if self.ends[0] == "(":
            return f"> {self.low:g}" if self.high == math.inf else f"> {self.low:g} and {below}"
        if self.high == math.inf:
            return f">= {self.low:g}"
        return f"from {self.low:g} to {'below ' if self.ends[1] == ')' else ''}{self.high:g}"


Share = Annotated[float, In(0.0, 1.0, "[)")]
Weight = Annotated[float, In(0.0)]
Samples = Annotated[int, In(1, 1 << 16)]


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {one.name: hints[one.name] for one in dataclasses.fields(kind)}


def _checked(hint: Any, value: Any, path: str) -> Any:
    """The value where it has the type and the range of the hint; else an error in words."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for option in options:
        inner, limits = typing.get_args(option)[:2] if typing.get_origin(option) is Annotated else (option, None)
        if typing.get_origin(inner) is Literal and value in typing.get_args(inner):
            return value
        if typing.get_origin(inner) is tuple and isinstance(value, list | tuple | int):  # JSON knows lists alone
            items = [value] if isinstance(value, int) else value  # what is a list now was one number in older files
            return tuple(_checked(typing.get_args(inner)[0], item, path) for item in items)
        short = type(value) is int and abs(value) < 1 << 1000  # JSON allows integers of any length
        if inner is float and (short or isinstance(value, float)):
            value = float(value)
        if isinstance(inner, type) and type(value) is inner and (limits is None or limits.holds(value)):
            return value
    raise InputError(path, " or ".join(map(_in_words, options)), repr(value))


def _in_words(option: Any) -> str:
    """
    >>> _in_words(int), _in_words(Share), _in_words(Literal["warn", "stop"]), _in_words(tuple[float, ...])
    ('a whole number', 'a number from 0 to below 1', "'warn' or 'stop'", 'a list, each a number')
    """
    if typing.get_origin(option) is Annotated:
        inner, limits = typing.get_args(option)[:2]
        return f"{_in_words(inner)} {limits}"
    if typing.get_origin(option) is Literal:
        return " or ".join(map(repr, typing.get_args(option)))
    if typing.get_origin(option) is tuple:
        return f"a list, each {_in_words(typing.get_args(option)[0])}"
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", types.NoneType: "null"}
    return names.get(option, getattr(option, "__name__", str(option)))


def _check_stages(sizes: tuple[int, ...], shares: tuple[float, ...], name: str) -> None:
    refuse(not sizes or list(sizes) != sorted(set(sizes)), "field.resolutions", "growing numbers", str(sizes))
    if len(shares) != len(sizes) - 1 or list(shares) != sorted(shares):
        raise InputError(f"field.{name}", f"{len(sizes) - 1} growing shares of the run, one per stage", str(shares))


class Section:
    """Base of every part of a config: checks its values where it is made."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            object.__setattr__(self, name, _checked(hint, getattr(self, name), f"{self.section}.{name}".lstrip(".")))


_BOUNDS, _UPS = ("auto", "bounded", "unbounded", "ndc"), ("auto", "x", "y", "z", "-x", "-y", "-z", "mean")


@dataclass(frozen=True)
class DataConfig(Section):
    """Which images, at what size."""

    section = "data"
    source: str = "builtin:toybox"
    """A dataset folder, a folder of photos, a video, or builtin:NAME."""
    downscale: Annotated[int, In(1, 1 << 10)] = 1
    """Divide the width and height of every image by this."""
    allow_outside: bool = False
    """Allow a scene's files to name images outside its folder."""
    cache: Literal["auto", "memory", "disk"] = "auto"
    """Where decoded images live: memory, or a memory-mapped file that later runs reuse (auto: if memory is short)."""
    pixels: Literal["auto", "device", "host"] = "auto"
    """Where pixels stay while training; host: a GPU reads them through the bus (auto: host if it is too small)."""
    bounds: str = "auto"
    """bounded (object), unbounded (outdoor, 360), or ndc (forward-facing, in normalised device coordinates); auto
    decides from the images, the cameras and the points. " up " and an axis of the file behind it: up, by hand."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = f"one of {', '.join(_BOUNDS)}, and perhaps ' up ' with an axis behind it"
        refuse(self.placing[0] not in _BOUNDS or self.placing[1] not in _UPS, "data.bounds", expected, self.bounds)

    @property
    def placing(self) -> tuple[str, str]:
        """Bounds and up."""
        extent, between, up = self.bounds.partition(" up ")
        return extent, up if between else "auto"

    def placed(self, extent: str | None = None, up: str | None = None) -> "DataConfig":
        """With the bounds and the up that are given."""
        extent, up = extent or self.placing[0], up or self.placing[1]
        return dataclasses.replace(self, bounds=extent if up == "auto" else f"{extent} up {up}")


@dataclass(frozen=True)
class GridConfig(Section):
    """The occupancy grid that skips empty space."""

    section = "grid"
    enabled: bool = True
    """Skip empty cells; disabled, each ray is sampled end to end (slow)."""
    resolution: Annotated[int, In(4, 1024)] = 128
    """Cells per axis and level."""
    levels: Annotated[int, In(1, 8)] = 1
    """Nested boxes, each twice as large as the one before."""
    contraction: Literal["none", "sphere", "cube"] = "none"
    """Contract all space outside the box into a ball or cube: for the field, the grid and the sampler."""
    update_every: Annotated[int, In(1, 1 << 20)] = 16
    """Steps between updates."""
    decay: Share = 0.95
    """How much of its old density a refreshed cell keeps at most."""
    moments: Annotated[int, In(0, 4)] = 0
    """Dynamic scenes: random times at which an update looks at a cell; the densest counts. 0: static."""
    cull_unseen: bool = False
    """At the end of training, empty the cells that no training image sees."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(self.resolution % 4 != 0, "grid.resolution", "a multiple of 4", self.resolution)


@dataclass(frozen=True)
class _HashConfig(Section):
    section = "field"
    n_levels: Annotated[int, In(1, 32)] = 16
    """Hash grid: number of resolutions."""
    n_features: Literal[1, 2, 4, 8] = 2
    """Hash grid: features per entry and level."""
    log2_entries: Annotated[int, In(4, 28)] = 19
    """Hash grid: at most 2^this entries per level."""
    max_resolution: Annotated[int, In(4, 1 << 20)] = 2048
    """Hash grid: cells per axis of the finest level."""
    width: Annotated[int, In(1, 1 << 12)] = 64
    """Neurons per hidden layer."""


@dataclass(frozen=True)
class NgpConfig(_HashConfig):
    """Instant-NGP: a hash grid and two small networks."""

    kind: ClassVar[str] = "ngp"
    initial_density: Annotated[float, In(0.0, 1e6, "(]")] = 1.0
    """Density everywhere at the start, per unit of length. A thin start leaves less fog before the cameras."""
    anti_alias: Literal[0, 1, 6] = 0
    """Points of a pixel's cone whose features count, levels finer than its footprint faded: 6 as Zip-NeRF; 0 is off."""


@dataclass(frozen=True)
class DynamicNgpConfig(_HashConfig):
    """Instant-NGP for dynamic scenes: three more hash grids, over (x, y, t), (y, z, t) and (x, z, t)."""

    kind: ClassVar[str] = "ngp-time"
    motion_log2_entries: Annotated[int, In(4, 28)] = 17
    """Grids over time: at most 2^this entries per level."""
    motion_resolution: Annotated[int, In(8, 1 << 12)] = 128
    """Grids over time: cells per axis of space at the finest level; the coarsest has 8, each level twice as many."""


@dataclass(frozen=True)
class VanillaConfig(Section):
    """The original NeRF: a deep network over frequency-encoded positions."""

    section, kind = "field", "vanilla"
    width: Annotated[int, In(2, 1 << 12)] = 256
    """Neurons per hidden layer."""
    depth: Annotated[int, In(1, 64)] = 8
    """Hidden layers."""
    motion: Literal["none", "time", "deform"] = "none"
    """Dynamic scenes: time as one more input (T-NeRF), or a deformation to time 0 (D-NeRF)."""


@dataclass(frozen=True)
class VoxelConfig(Section):
    """Sparse voxels: density and spherical harmonics at their vertices, pruned and subdivided while training."""

    section, kind = "field", "voxels"
    resolutions: tuple[Annotated[int, In(2, 1023)], ...] = (64, 128, 256, 384)
    """Voxels per axis of the box, stage after stage; the first stage is dense."""
    subdivide_at: tuple[Annotated[float, In(0.0, 1.0, "()")], ...] = (0.02, 0.08, 0.25)
    """Shares of the run after which the next stage begins: unseen voxels are pruned, the others subdivided."""
    max_nodes: Annotated[int, In(8, 1 << 28)] = 1_500_000
    """Vertices that memory is kept for: a stage that would need more is made coarser."""
    sh_degree: Annotated[int, In(1, 4)] = 3
    """Degree of the spherical harmonics of the colour."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_stages(self.resolutions, self.subdivide_at, "subdivide_at")


@dataclass(frozen=True)
class FactorConfig(Section):
    """Planes and lines (TensoRF's vector-matrix factors) and a small colour network."""

    section, kind = "field", "factor"
    resolutions: tuple[Annotated[int, In(2, 1 << 14)], ...] = (128, 300)
    """Nodes per axis of planes and lines, stage after stage."""
    refine_at: tuple[Annotated[float, In(0.0, 1.0, "()")], ...] = (0.15,)
    """Shares of the run after which the next stage begins."""
    components: tuple[Annotated[int, In(1, 1 << 10)], ...] = (8, 16)
    """Products of a plane and a line per axis: of the density, and of the colour."""
    width: Annotated[int, In(1, 1 << 12)] = 64
    """Neurons per hidden layer of the colour network."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_stages(self.resolutions, self.refine_at, "refine_at")
        if len(self.components) != 2:
            raise InputError("field.components", "two numbers: of the density, and of the colour", str(self.components))


@dataclass(frozen=True)
class CustomFieldConfig(Section):
    """A field of your own: an nn.Module with `density` and `forward`."""

    section, kind = "field", "custom"
    source: str = ""
    """Where the class comes from: path/to/file.py:MyField or package.module:MyField."""


@dataclass(frozen=True)
class GridSamplerConfig(Section):
    """Marching the occupancy grid."""

    section, kind = "sampler", "grid"
    cone_angle: Share = 0.0
    """Steps grow with distance by this factor; 0 for objects, 0.004 for unbounded scenes."""
    alpha_thre: Share = 0.0
    """Skip samples less opaque than this (1e-2 for real 360 scenes)."""
    prune: bool = True
    """Evaluate density first and train only on visible samples."""
    merge_weak_samples: Share = 0.0
    """Of up to four neighbours that together add no more than this to their pixel (0.05, say), train one for all."""


@dataclass(frozen=True)
class UniformSamplerConfig(Section):
    """The same number of samples on every ray, evenly spaced."""

    section, kind = "sampler", "uniform"
    n_samples: Samples = 48
    """Samples per ray."""


@dataclass(frozen=True)
class HierarchySamplerConfig(Section):
    """The original NeRF's coarse and fine passes."""

    section, kind = "sampler", "hierarchy"
    n_samples: Samples = 128
    """Fine samples per ray, beside the coarse ones."""
    coarse_samples: Samples = 64
    """Samples per ray of the coarse field."""


@dataclass(frozen=True)
class ProposalSamplerConfig(Section):
    """Proposal networks (density-only hash grids) find the surfaces."""

    section, kind = "sampler", "proposal"
    n_samples: Samples = 48
    """Samples per ray that the field sees."""
    coarse_samples: tuple[Samples, ...] = (256, 96)
    """Samples per ray of each proposal network."""
    anneal_steps: Annotated[int, In(0, 1 << 30)] = 1000
    """Until this step young proposals are trusted less than they say."""
    levels: tuple[Annotated[int, In(1, 32)], ...] = (5,)
    """Hash grid of each proposal: number of resolutions."""
    log2_entries: tuple[Annotated[int, In(4, 28)], ...] = (17,)
    """Hash grid of each proposal: at most 2^this entries per level."""
    resolutions: tuple[Annotated[int, In(4, 1 << 20)], ...] = (128, 256)
    """Hash grid of each proposal: cells per axis of the finest level."""
    padding: Weight = 0.01
    """Added to each proposal weight before drawing; below 0.01 weights are blurred first. Less: nearer to surfaces."""
    blur: Share = 0.0
    """Let proposals learn weights that are blurred so far along the ray, in [0, 1]: Zip-NeRF has 0.03; 0 is off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = f"1 to {MAX_PROPOSALS} numbers, one per proposal network"
        for name in ("coarse_samples", "levels", "log2_entries", "resolutions"):
            given = len(getattr(self, name))
            refuse(not 1 <= given <= MAX_PROPOSALS, f"sampler.{name}", expected, given)


@dataclass(frozen=True)
class CustomSamplerConfig(Section):
    """A sampler of your own: an object with `sample`."""

    section, kind = "sampler", "custom"
    source: str = ""
    """Where the class comes from: path/to/file.py:MySampler or package.module:MySampler."""


@dataclass(frozen=True)
class RenderConfig(Section):
    """How rays are marched and images rendered."""

    section = "render"
    steps_per_diagonal: Annotated[int, In(1, 1 << 16)] = 1024
    """Step size: the diagonal of the box over this."""
    early_stop_eps: Share = 1e-4
    """Stop a ray when its transmittance falls below this."""
    eval_refine: Annotated[int, In(1, 64)] = 1
    """Render images with steps this many times shorter than in training."""
    eval_rays: Annotated[int, In(1, 32)] = 1
    """Render images with this x this rays per pixel."""


@dataclass(frozen=True)
class LossConfig(Section):
    """The colour loss, and what is added to it."""

    section = "loss"
    kind: Literal["huber", "mse"] = "huber"
    """Colour loss; Huber's delta is 0.1."""
    distortion: Weight = 0.0
    """Weight of Mip-NeRF 360's distortion loss (lengths in box diagonals; with proposals, normalised)."""
    opacity: Weight = 0.0
    """Weight of the entropy of each ray's opacity."""
    near_gradient: Weight = 0.0
    """Scale gradients of samples nearer than this many half boxes by (distance / this)^2: against floaters."""
    depth: Weight = 0.0
    """Weight of the depth loss on rays through COLMAP's points, or through depth maps; 0.05, say."""


@dataclass(frozen=True)
class OptimConfig(Section):
    """Adam and its schedule."""

    section = "optim"
    lr: Annotated[float, In(0.0, 1e3, "(]")] = 1e-2
    """Peak learning rate."""
    schedule: Literal["exponential", "inverse", "cosine", "multistep", "constant"] = "exponential"
    """From the peak to the end, after the warm-up; inverse also divides by 1 + steps / 1500: good at any time."""
    final_lr_fraction: Annotated[float, In(0.0, 1.0, "(]")] = 0.03
    """Final learning rate, as a fraction of the peak (exponential, cosine; inverse: of what it would be else)."""
    warmup_steps: Annotated[int, In(0, 1 << 30)] = 20
    """Steps over which the learning rate rises linearly."""
    hold_fraction: Share = 0.3
    """Share of the run before the decay begins."""
    beta2: Share = 0.99
    """Adam's memory of squared gradients."""
    table_decay: Weight = 0.0
    """Weight of the mean square of each hash level in the loss, as in Zip-NeRF (0.1 there)."""
    clip_norm: Weight = 0.0
    """Clip the norm of the gradient to this; 0: no clipping."""
    ema_decay: Share = 0.0
    """Score and render an exponential moving average of the weights (0.999, say); 0: the weights themselves."""


@dataclass(frozen=True)
class TrainConfig(Section):
    """The loop."""

    section = "train"
    steps: Annotated[int, In(1, 1 << 40)] = 20_000
    """Stop after this many steps."""
    time_limit: Annotated[float, In(0.0, 1e9, "(]")] | None = None
    """Stop after this many seconds; the learning rate then follows the clock."""
    batch_samples: Annotated[int, In(1, 1 << 30)] = 1 << 18
    """Samples per step; the number of rays adapts to fill it."""
    max_rays: Annotated[int, In(1, 1 << 26)] = 1 << 16
    """At most this many rays per step."""
    accumulate: Annotated[int, In(1, 1 << 16)] = 1
    """Batches whose gradients are accumulated before each update."""
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """Of hash tables and networks; reductions, positions and compositing stay fp32 (auto: fp16 on a GPU)."""
    on_instability: Literal["warn", "lower-lr", "stop"] = "warn"
    """When the loss scale keeps falling: warn, halve the learning rate, or stop."""
    target_psnr: Annotated[float, In(0.0, 1e3, "(]")] | None = None
    """Stop when a preview of a test view reaches this many dB."""
    checkpointing: bool = False
    """Recompute the field in the backward: less memory, longer steps (fields vanilla, factor and your own)."""
    coarse_fraction: Share = 0.0
    """This share of the run trains on downscaled images, the rest on the full ones."""
    capture: bool = True
    """Capture the GPU step as one CUDA graph."""
    compress_gradients: Literal["none", "bf16", "fp16"] = "none"
    """Distributed: send gradients in this precision."""
    background: Literal["random", "white", "black"] = "random"
    """Behind transparent pixels in training; random teaches the field where it is empty."""
    seed: Annotated[int, In(0, (1 << 63) - 1)] = 0
    """Seeds every random draw, together with the step."""


@dataclass(frozen=True)
class CameraConfig(Section):
    """Corrections of the training cameras, learned with the field."""

    section = "cameras"
    refine: bool = False
    """Refine the pose of every training image."""
    coarse: bool = False
    """Refine from the start, coarse to fine: for poses off by degrees."""
    focal: bool = False
    """Refine both focal lengths of every lens."""
    distortion: bool = False
    """Refine the radial distortion of every lens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coarse and not self.refine:
            raise InputError("cameras.coarse", "cameras.refine beside it", "cameras.refine off", "add --cameras.refine")

    @property
    def learns_lenses(self) -> bool:
        return self.focal or self.distortion

    @property
    def learns(self) -> bool:
        return self.refine or self.learns_lenses


@dataclass(frozen=True)
class PhotoConfig(Section):
    """What is particular to each photo."""

    section = "photo"
    exposure: bool = False
    """Learn the exposure and white balance of every photo; new views get the mean."""
    appearance: Annotated[int, In(0, MAX_APPEARANCE)] = 0
    """Numbers learned per photo that its colours may depend on (8, say); new views get the mean, or a photo's."""


FieldConfig = NgpConfig | DynamicNgpConfig | VanillaConfig | VoxelConfig | FactorConfig | CustomFieldConfig
SamplerConfig = (
    GridSamplerConfig | UniformSamplerConfig | HierarchySamplerConfig | ProposalSamplerConfig | CustomSamplerConfig
)


@dataclass(frozen=True)
class Config(Section):
    """Everything that decides a run."""

    preset: str = "custom"
    """Where the values came from."""
    data: DataConfig = DataConfig()
    field: FieldConfig = NgpConfig()
    sampler: SamplerConfig = GridSamplerConfig()
    grid: GridConfig = GridConfig()
    render: RenderConfig = RenderConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    cameras: CameraConfig = CameraConfig()
    photo: PhotoConfig = PhotoConfig()

    @property
    def follows_time(self) -> bool:
        """Whether the field sees time; of a custom one that is its own matter."""
        return self.field.kind in ("ngp-time", "custom") or getattr(self.field, "motion", "none") != "none"


KINDS: dict[str, dict[str, type[Any]]] = {
    name: {kind.kind: kind for kind in typing.get_args(union)}
    for name, union in (("field", FieldConfig), ("sampler", SamplerConfig))
}


# Values that went, and what they may have been: such runs open. Draws do not matter to a field that is trained.
_GONE = {"rays_per_pixel": (1,), "follow": ("features",), "sparsity": (0.0,), "draw": ("uniform", "error")}


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain JSON values; members of a union carry their `kind`."""
    values: dict[str, Any] = {}
    for one in dataclasses.fields(config):
        value = getattr(config, one.name)
        values[one.name] = to_dict(value) if dataclasses.is_dataclass(value) else value
    kind = getattr(type(config), "kind", None)
    return {"kind": kind, **values} if isinstance(kind, str) and "kind" not in values else values


def from_dict(kind: type[Any], values: Any, path: str = "config") -> Any:
    """The inverse of `to_dict`, for files of 0.1 too. Unknown and wrong values are named; missing ones get defaults."""
    refuse(not isinstance(values, dict), path, "an object", type(values).__name__)
    if kind is Config and "sampling" in values:
        values = _migrated(values, path)
    hints = _hints(kind)
    values = {name: value for name, value in values.items() if value not in _GONE.get(name, ())}
    if unknown := sorted(set(values) - set(hints)):
        raise InputError(f"{path}.{unknown[0]}", "one of " + ", ".join(sorted(hints)), repr(unknown[0]))
    arguments = {}
    for name, value in values.items():
        where = f"{path}.{name}"
        if name in KINDS and kind is Config:
            tag: Any = value.get("kind") if isinstance(value, dict) else None
            refuse(tag not in KINDS[name], f"{where}.kind", "one of " + ", ".join(KINDS[name]), repr(tag))
            value = {leaf: item for leaf, item in value.items() if leaf != "kind"}
            arguments[name] = from_dict(KINDS[name][tag], value, where)
        elif dataclasses.is_dataclass(hints[name]):
            arguments[name] = from_dict(typing.cast(type, hints[name]), value, where)
        else:
            arguments[name] = _checked(hints[name], value, where)
    return kind(**arguments)


# --- files of version 0.1 ---------------------------------------------------------------------------------------------

# Values of 0.1 that are constants now, by the fields whose tensors depend on them: a run with others cannot be opened.
_FIXED = (
    ("field", "base_resolution", 16, ("ngp", "ngp-time")),
    ("field", "geo_features", 16, ("ngp", "ngp-time")),
    ("field", "sh_degree", 4, ("ngp", "ngp-time", "factor")),
    ("field", "color_depth", 2, ("factor",)),
    ("motion", "time_frequencies", 6, ("tnerf", "dnerf")),
    ("motion", "time_resolution", 25, ("ngp-time",)),
    ("motion", "follow", "features", ("ngp-time",)),
    ("sampling", "proposal_width", 16, ("proposal",)),
)


# Values that stood elsewhere, or had another name.
_PLACES = {f"sampler.{name}": f"render.{name}" for name in ("cone_angle", "alpha_thre", "prune")}
_PLACES |= {f"sampler.{name}": f"sampling.proposal_{name}" for name in ("levels", "log2_entries", "resolutions")}
_PLACES |= {f"sampler.{name}": f"sampling.{name}" for name in ("n_samples", "coarse_samples", "anneal_steps")}
_PLACES |= {"sampler.merge_weak_samples": "render.thin"}
_PLACES |= {"field.motion_log2_entries": "motion.log2_entries", "field.motion_resolution": "motion.max_resolution"}
_PLACES |= {"grid.contraction": "sampling.contraction", "grid.cull_unseen": "grid.hide_unseen"}
_PLACES |= {"loss.kind": "train.loss", "loss.near_gradient": "sampling.near_gradient"}
_PLACES |= {"loss.depth": "photo.depth_weight", "train.checkpointing": "field.checkpointing"}


def _migrated(values: dict[str, Any], path: str) -> dict[str, Any]:
    """A config of version 0.1, where every field and sampler shared one set of values."""
    sections = {section: leaves for section, leaves in values.items() if isinstance(leaves, dict)}
    old = {f"{section}.{leaf}": value for section, leaves in sections.items() for leaf, value in leaves.items()}
    kind, way = old.get("field.kind", "ngp"), old.get("sampling.kind", "grid")
    for section, name, fixed, kinds in _FIXED:
        found = old.get(f"{section}.{name}", fixed)
        if found != fixed and (kind in kinds or way in kinds):
            hint = "open this run with nerfturbo 0.1"
            raise InputError(f"{path}.{section}.{name}", f"{fixed}, which is fixed now", str(found), hint)
    if kind in ("voxels", "factor"):  # which had sections of their own
        old |= {f"field.{leaf}": value for leaf, value in sections.get(kind, {}).items()}
    old["field.components"] = [old.get("factor.density_components", 8), old.get("factor.color_components", 16)]
    old["field.motion"] = {"tnerf": "time", "dnerf": "deform"}.get(kind, "none")
    if way == "hierarchy":
        old["sampling.coarse_samples"] = old.get("sampling.coarse_samples", [64])[0]
    elif way == "proposal":
        old["loss.distortion"] = old.get("sampling.distortion", 0.002)
    if old.get("data.ndc"):
        old["data.bounds"] = "ndc"
    tags, found = {"field": kind if kind in KINDS["field"] else "vanilla", "sampler": way}, {}
    for section, hint in _hints(Config).items():
        kept = KINDS[section].get(tags[section], Section) if section in tags else hint
        leaves = _hints(kept) if dataclasses.is_dataclass(kept) else ()
        places = {leaf: _PLACES.get(f"{section}.{leaf}", f"{section}.{leaf}") for leaf in leaves}
        found[section] = {leaf: old[place] for leaf, place in places.items() if place in old}
        found[section] |= {"kind": tags[section]} if section in tags else {}
    return found | {"preset": values.get("preset", "custom")}


def check_code(config: Config, run: Path | None) -> Config:
    """Refuse code that a run brings along, for it may come from anywhere: ours name theirs by full paths outside."""
    for part in (config.field, config.sampler):
        file = Path(where := getattr(part, "source", "").rpartition(":")[0]).expanduser()
        inside = run is not None and (not file.is_absolute() or run.resolve() in file.resolve().parents)
        if run is not None and where and file.suffix != ".py":  # a package: found where Python looks, here perhaps
            found = importlib.machinery.PathFinder.find_spec(where.split(".")[0])
            places = () if found is None else (*(found.submodule_search_locations or ()), found.origin or "/")
            inside = any(Path(place).resolve().is_relative_to(run.resolve()) for place in places)
        hint = "look at it, move it out of the run, and hand it over: load_model(run, field=...)"
        refuse(bool(where) and inside, f"{part.section}.source", "code that is no part of the run", file, hint)
    return config
