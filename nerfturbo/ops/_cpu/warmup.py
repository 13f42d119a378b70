"""Compile the kernels of a training step before it starts, saying which: a first start should not seem to hang. numba
compiles a kernel at its first call and keeps it on disk: beside this file where that folder can be written, else in the
user's cache folder, or in NUMBA_CACHE_DIR. Later starts load it in milliseconds."""

import contextlib
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from ...types import Aabb, PackedSamples
from .._dispatch import use_backend
from .._sink import GradientSink
from ..adam import AdamState, adam_update
from ..composite_loss import composite_loss
from ..frame import absorb_samples, next_samples, start_rays
from ..hash_encode import HashLayout, hash_encode
from ..march import OccupancyBits, StepRule, march
from ..ngp import NgpDensity, NgpWeights, ngp_field
from ..packed import compact
from ..pixels import PixelPool, draw_pixels
from ..positions import sample_positions
from ..random import random_uniform
from ..spherical_harmonics import spherical_harmonics

FEATURES = 4  # a level of the hash grid, which the encoder's kernels are specialised on
# Kernels that a training step calls, by op.
_STEP_KERNELS = {
    "adam": ("_update",),
    "composite_loss": ("_forward",),
    "frame": ("_find_all", "_fit", "_write", "_absorb"),
    "hash_encode": ("_prepare", "_encode", "_scatter"),
    "march": ("_count", "_write"),
    "ngp": ("_forward", "_backward", "_density", "_place", "_advance"),
    "packed": ("_count_kept", "_move_kept"),
    "pixels": ("_look_up",),
    "positions": ("_place",),
    "spherical_harmonics": ("_evaluate",),
}
# The slower half, which a second process compiles.
_HELPED = ("networks and loss", "hash_encode", "adam", "rendering")
# What it can do on top when it starts while the scene is still being read or rendered.
HELPED_EARLY = (*_HELPED, "visibility", "draw_pixels", "compact")


def warmup(report: Callable[[str], None], *, helper: "CompileHelper | None" = None) -> None:
    """Run each op of a training step once on tiny inputs, `report`ing its name first. Compiles what is not cached.
    numba compiles on one core; where there are more, a second process compiles a part of the kernels into the same
    cache: `helper`, if one was started before, as it can be while a scene is read."""
    cached = is_cached()
    with contextlib.ExitStack() as stack, use_backend("cpu"):
        steps = dict(_steps())
        if helper is None and not cached:
            helper = stack.enter_context(CompileHelper())
        helped = () if helper is None or cached else helper.names
        for name in [name for name in steps if name not in helped]:
            report(name)
            steps[name]()
        if helped and helper is not None:
            report(", ".join(helped))
            helper.wait()
            for name in helped:  # from the cache; or, had the helper failed, compiled here after all
                steps[name]()


class CompileHelper:
    """A second process, where there is a core for it, that compiles the slower kernels; nothing is lost if it fails."""

    def __init__(self, names: tuple[str, ...] = _HELPED) -> None:
        self.names, self._process = names, None
        if torch.get_num_threads() < 2:
            self.names = ()
            return
        code = f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as w; w.compile_part({names!r})"
        nothing = subprocess.DEVNULL
        with contextlib.suppress(OSError):
            command = [sys.executable, "-c", code]
            self._process = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing)

    def wait(self, timeout: float = 60.0) -> None:
        """Until it is done, or the time is over."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=timeout)

    def __enter__(self) -> "CompileHelper":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def compile_part(names: Sequence[str]) -> None:
    """What the second process does."""
    with use_backend("cpu"):
        steps = dict(_steps())
        for name in names:
            steps[name]()


def is_cached() -> bool:
    """Whether the kernels of a training step lie on disk, compiled: a guess that costs a few milliseconds."""
    modules = {op: importlib.import_module(f"..{op}.cpu", __package__) for op in _STEP_KERNELS}
    caches = [getattr(modules[op], name)._cache for op, names in _STEP_KERNELS.items() for name in names]
    try:  # there is no file where there is no place for a cache
        return all(cache._cache_file._load_index() for cache in caches if hasattr(cache, "_cache_file"))
    except (AttributeError, OSError):
        return False


def _steps() -> Iterator[tuple[str, Callable[[], object]]]:
    """Name and call of each op, in the order of a training step."""
    origins, directions, box = torch.tensor([[0.0, 0.0, -3.0]]), torch.tensor([[0.0, 0.0, 1.0]]), Aabb.cube(1.0)
    grid, rule = OccupancyBits(torch.full((2,), -1, dtype=torch.int32), box, 4), StepRule(0.5)
    camera = (torch.eye(3, 4)[None], torch.ones(1, 4))
    pool = PixelPool(torch.zeros(1, 4, dtype=torch.uint8), torch.tensor([0, 1]), torch.tensor([1]), *camera)
    yield "draw_pixels", lambda: draw_pixels(pool, 1, seed=0, step=0)
    yield "random", lambda: random_uniform(1, columns=3, seed=0, stream=0, step=0, device="cpu")
    yield "march", lambda: march(origins, directions, grid, rule, jitter=torch.zeros(1))

    layout = HashLayout(n_levels=1, n_features=FEATURES, log2_entries=6, base_resolution=2, max_resolution=2)
    table = torch.zeros(layout.n_entries, FEATURES, requires_grad=True)
    sizes = ((4, layout.n_outputs), (16, 4), (4, 32), (4, 4), (3, 4))
    weights = NgpWeights(*(torch.zeros(size, requires_grad=True) for size in sizes))
    samples = PackedSamples.from_counts(torch.tensor([1]), torch.ones(1), torch.ones(1) * 2)
    field = NgpDensity(box, table, layout, weights[:2])
    yield "visibility", lambda: field.visibility(origins, directions, samples, early_stop_eps=1e-4)
    yield "compact", lambda: compact(samples, torch.ones(1, dtype=torch.bool))

    sink = GradientSink((torch.zeros_like(table),))
    weight_sink = GradientSink(tuple(torch.zeros_like(weight) for weight in weights))
    positions = sample_positions(origins, directions, samples, aabb=box)
    yield "hash_encode", lambda: hash_encode(positions, table, layout, sink=sink).sum().backward()
    yield "spherical_harmonics", lambda: spherical_harmonics(directions)

    def network() -> None:
        encoding, angular = hash_encode(positions, table, layout, sink=sink), spherical_harmonics(directions)
        raw = ngp_field(encoding, angular, samples.ray_indices, weights, sink=weight_sink)
        composite_loss(raw, samples, torch.zeros(1, 3), torch.zeros(1, 4)).loss.backward()

    yield "networks and loss", network
    buffer = torch.zeros(4)
    yield "adam", lambda: adam_update(buffer, torch.ones(4), AdamState.of(buffer), torch.ones(()))

    def rendering() -> None:
        live = start_rays(origins, directions, grid, rule)
        found = next_samples(live, rows=8 * 32 * 32, aabb=box)
        n = int(found.n_used)
        hash_encode(found.positions[:n], table.detach(), layout)
        absorb_samples(live, found, torch.ones(n), torch.zeros(n, 3), early_stop_eps=1e-4, logits=True)

    yield "rendering", rendering
