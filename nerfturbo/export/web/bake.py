"""From a trained model to a baked scene that fits a budget: look, choose a resolution, ask the field, tune, score."""

import logging
import math
import time as clock
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...data.cameras import Cameras
from ...data.placement import require_plain
from ...data.pool_file import check_memory
from ...data.scene import Scene
from ...evaluation.evaluate import Comparison, compare
from ...rendering.model import FAR, NerfModel, half_box
from .. import Progress, quiet
from ..mesh import export_box
from . import teacher
from .baked import N_BASE, N_FEATURES, Baked, Chunk, pack
from .lattice import Lattice, SparseBlocks
from .reference import render_page
from .teacher import VisibleCells, ask_field
from .tune import TuneSettings, tune

PIXELS_PER_CELL = 0.75  # a cell of the finest lattice that pays: this much of a training pixel
PROBES = 4096  # rays that find how far surfaces are
MAX_CELLS = 1 << 11  # per axis; of a scene without an end half of it
LEAST_CELLS = 14
MAX_LEVELS = 9
PLAIN_BELOW = 0.5  # of the finest resolution: below that, view-dependent features cost more than they bring
LEAST_BYTES = {True: 4.0, False: 2.0}  # of a vertex, with and without features: more vertices make a page slow
VERTEX_BYTES = 16 * (N_BASE + N_FEATURES)  # of fine-tuning: value, gradient, and two means of it
SLACK = 0.94  # of the budget that first values may take: fine-tuning makes them a little less regular
SAMPLED = 1 << 18  # vertices; of more, every SAMPLED_BLOCKS-th block says what a vertex takes before all are asked
SAMPLED_BLOCKS = 8
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BakeSettings:
    """What a page may cost, in bytes of its file and in seconds or steps of fine-tuning; None: what suits the device.
    With `tune_steps` alone no clock decides anything: the same run gives the same page, on a busy machine too."""

    budget_bytes: float
    bytes_per_byte: float = 1.0  # of the file, for one of data: 4 / 3 in base64
    tune_seconds: float | None = None
    tune_steps: int | None = None
    n_rays: int | None = None
    time: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Score(Comparison):
    """And what a pixel of the page takes, in the mean."""

    steps_per_pixel: float
    fetches_per_pixel: float


@dataclass(frozen=True)
class BakeResult:
    """A scene ready for its page."""

    baked: Baked
    chunks: tuple[Chunk, ...]
    seconds: dict[str, float]  # by part of the work
    tune_steps: int
    losses: tuple[float, ...] = ()  # of fine-tuning
    first_bytes: float = 0.0  # what the values before it took

    @property
    def data_bytes(self) -> int:
        return sum(len(chunk.content) for chunk in self.chunks)


@dataclass(frozen=True)
class _Pace:
    """What suits a device."""

    n_rays: int
    look_samples: int
    tune_rays: int
    tune_steps: int
    tune_seconds: float
    look_seconds: float = math.inf  # where a clock may decide: without a number of steps
    ask_seconds: float = math.inf


_PACES = {
    "cpu": _Pace(1 << 19, 1 << 24, 4096, 600, 22.0, 50.0, 40.0),
    "cuda": _Pace(1 << 24, 1 << 31, 1 << 15, 6000, 30.0),
}


@dataclass(frozen=True)
class _Plan:
    """What is done, so that it takes no longer than it should on this machine."""

    settings: BakeSettings
    finest: Lattice
    n_rays: int
    n_directions: int
    tune_seconds: float


def bake(
    model: NerfModel,
    cameras: Cameras,
    settings: BakeSettings,
    *,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress = quiet,
) -> BakeResult:
    """Bake the scene as the training cameras see it."""
    require_plain(cameras.ndc, "export web")
    pace = _PACES.get(model.device.type, _PACES["cuda"])
    seconds: dict[str, float] = {}

    def lap(name: str) -> None:
        _wait(model.device)
        seconds[name] = clock.perf_counter() - start - sum(seconds.values())

    start = clock.perf_counter()
    say("looking at the scene from its training cameras")
    plan = _plan(model, cameras, settings, pace)
    options = {"time": settings.time, "seed": settings.seed, "max_samples": pace.look_samples}
    pool, cells = ask_field(model, cameras, plan.finest, plan.n_rays, **options, progress=progress)
    say("choosing the size of the cells")
    finest, cells = teacher.as_covered(cells, plan.finest, progress)
    plan = replace(plan, finest=finest)
    lap("look")
    blocks, values, first_bytes = _within_budget(model, cameras, plan, cells, say, progress)
    lap("ask")
    say(f"fine-tuning {blocks.n_vertices} vertices in {blocks.n_blocks} blocks")
    chosen = TuneSettings(settings.tune_steps or pace.tune_steps, pace.tune_rays, plan.tune_seconds, seed=settings.seed)
    network, done, losses = tune(blocks, values, pool, chosen, progress=progress)
    lap("tune")
    say("packing")
    baked, chunks = _packed(Baked.of(blocks, values, network, model.bounds.near), settings)
    lap("pack")
    return BakeResult(baked, tuple(chunks), seconds, done, losses, first_bytes)


@torch.no_grad()
def _plan(model: NerfModel, cameras: Cameras, settings: BakeSettings, pace: _Pace) -> _Plan:
    """A lattice over what is occupied, with cells a little smaller than the pixels of the training pictures; and how
    often the field is asked, by how fast it answers. No clock decides where `tune_steps` does."""
    levels = _levels(model)
    box = export_box(model, None) if levels == 1 else model.grid.aabb
    device, moved = model.device, cameras.to(model.device)
    generator = torch.Generator(device).manual_seed(settings.seed)
    rays = teacher.pixel_rays(moved, *teacher.draw_pixels(moved, PROBES, generator), settings.time)
    model.render_rays(rays[: PROBES // 8])  # compiles
    started = clock.perf_counter()
    out = model.render_rays(rays)
    points = rays.origins + rays.directions * out.depth[:, None]
    _wait(device)
    rendered = clock.perf_counter()
    model.field(points, rays.directions, rays.times, None)
    _wait(device)
    asked = clock.perf_counter()
    low, high = box.tensor(device)
    solid = (out.opacity > 0.5) & ((points >= low) & (points <= high)).all(-1)
    where = points[solid] if bool(solid.any()) else torch.tensor([box.center], device=device)
    where = where[:: max(1, where.shape[0] // 4096)]
    away = (where[:, None, :] - moved.positions[None]).norm(dim=-1)
    voxel = PIXELS_PER_CELL * float((away / moved.focal.mean(-1)).median())  # the median width of a pixel there
    longest = max(box.size)
    most = MAX_CELLS if levels == 1 else MAX_CELLS // 2
    finest = Lattice.around(box, min(max(voxel, longest / most), longest / LEAST_CELLS), levels)
    n_rays, n_directions = settings.n_rays or min(pace.n_rays, int(cameras.size.prod(-1).sum())), teacher.N_DIRECTIONS
    if settings.tune_steps is not None:
        seconds = math.inf if settings.tune_seconds is None else settings.tune_seconds
        return _Plan(settings, finest, n_rays, n_directions, seconds)
    tune_seconds = pace.tune_seconds if settings.tune_seconds is None else settings.tune_seconds
    ray_seconds, answer_seconds = (rendered - started) / PROBES, (asked - rendered) / PROBES
    if settings.n_rays is None and device.type == "cpu":
        n_rays = max(teacher.LEAST_RAYS, min(n_rays, int(pace.look_seconds / ray_seconds)))
    answers = settings.budget_bytes / settings.bytes_per_byte / LEAST_BYTES[tune_seconds > 0.0]
    n_directions = int(max(2.0, min(n_directions, pace.ask_seconds / (answers * answer_seconds))))
    look, ask = n_rays * ray_seconds, answers * n_directions * answer_seconds
    parts = f"{look:.0f} s for {n_rays} rays, up to {ask:.0f} s for vertices, {tune_seconds:.0f} s to fine-tune"
    _log.info(f"baking takes up to {look + ask + tune_seconds:.0f} s on this {device.type.upper()}: {parts}")
    return _Plan(settings, finest, n_rays, n_directions, tune_seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _levels(model: NerfModel) -> int:
    """Those of the occupancy grid; under a contraction, as many as reach as far as rays do."""
    if model.config.grid.contraction == "none" or model.grid.aabb != model.bounds.aabb:  # a crop has an end
        return model.grid.config.levels
    reach = max(model.bounds.far, FAR * half_box(model.bounds.aabb))
    return min(MAX_LEVELS, 1 + max(0, math.ceil(math.log2(reach / (0.5 * min(model.bounds.aabb.size))))))


def _within_budget(
    model: NerfModel, cameras: Cameras, plan: _Plan, cells: VisibleCells, say: Callable[[str], None], progress: Progress
) -> tuple[SparseBlocks, Tensor, float]:
    """The finest blocks whose first values fit, and their size; without features where the budget is too small."""
    settings, finest, features = plan.settings, plan.finest, plan.tune_seconds > 0.0
    lattice, seen = finest, cells

    def first(blocks: SparseBlocks, done: float, after: float) -> tuple[Tensor, float]:
        check_memory("--budget-mb", VERTEX_BYTES * blocks.n_vertices, "use a smaller one", model.device)
        options = {"time": settings.time, "n_directions": plan.n_directions}
        options["progress"] = lambda share: progress(done + share * (after - done))
        values = teacher.first_values(model.field, cameras, blocks, features=features, **options)
        return values, _file_bytes(pack(Baked.of(blocks, values, None, 0.0)), settings)

    while True:
        # The field is asked only where the outcome is open: a fine lattice over a wide scene has millions of vertices.
        allowed = math.inf if max(lattice.cells) <= LEAST_CELLS else SLACK * settings.budget_bytes
        size = seen.keys.shape[0] * LEAST_BYTES[features] * settings.bytes_per_byte
        if size <= allowed:
            say(f"asking the field: {seen.keys.shape[0]} cells")
            closed = teacher.close_holes(seen, lattice)
            progress(0.2)
            blocks = SparseBlocks.of_cells(lattice, closed.keys, closed.light)
            size = blocks.n_vertices * LEAST_BYTES[features] * settings.bytes_per_byte
        if size <= allowed and blocks.n_vertices > SAMPLED:
            some = blocks.every(SAMPLED_BLOCKS, closed.keys)
            size = first(some, 0.4, 0.5)[1] * blocks.n_vertices / some.n_vertices
        if size <= allowed:
            values, size = first(blocks, 0.5, 0.95)
            if size <= allowed:
                return blocks, values, size / settings.bytes_per_byte
        shrink = math.sqrt(0.97 * SLACK * settings.budget_bytes / size)
        if features and finest.voxel / lattice.voxel * shrink < PLAIN_BELOW:
            features, lattice, seen = False, finest, cells
            continue
        lattice = Lattice.around(finest.box, lattice.voxel / shrink, finest.levels)
        seen = teacher.on_coarser(cells, finest, lattice)


def _file_bytes(chunks: list[Chunk], settings: BakeSettings) -> float:
    return sum(len(chunk.content) for chunk in chunks) * settings.bytes_per_byte


def _packed(baked: Baked, settings: BakeSettings) -> tuple[Baked, list[Chunk]]:
    """Pack; where that is too large after all, features and then colours lose their lowest bits."""
    chunks = pack(baked)
    features, colors = slice(N_BASE, None), slice(0, 3)
    for channels, bits in ((features, 7), (features, 6), (features, 5), (colors, 7), (features, 4), (colors, 6)):
        if _file_bytes(chunks, settings) <= settings.budget_bytes:
            break
        values, unit = baked.values.clone(), 1 << (8 - bits)
        rounded = (values[:, channels].int() + unit // 2) // unit * unit
        values[:, channels] = rounded.clamp(max=256 - unit).to(torch.uint8)
        baked = replace(baked, values=values)
        chunks = pack(baked)
    return baked, chunks


@torch.no_grad()
def score(
    model: NerfModel,
    baked: Baked,
    scene: Scene,
    *,
    views: int = 10,
    time: float | None = None,
    photos: bool = True,
    progress: Progress = quiet,
) -> Score:
    """How close the page's pictures of test views come to the field's own and to the photos, and what they cost."""
    costs = []

    def draw(cameras: Cameras, index: int) -> tuple[Tensor, None]:
        page = render_page(baked, cameras, index)
        costs.append(torch.stack([page.steps.float().mean(), page.fetches.float().mean()]))
        return page.rgb, None

    found = compare(model, scene, draw, views=views, time=time, photos=photos, progress=progress)
    steps, fetches = torch.stack(costs).mean(0).tolist()
    return Score(**vars(found), steps_per_pixel=steps, fetches_per_pixel=fetches)
