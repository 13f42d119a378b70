"""Rendering front to back: live rays take a few samples a round, and leave when they are opaque or through the grid.

    live = start_rays(origins, directions, grid, rule)
    each round:  samples = next_samples(live, rows=...)           a few samples of every live ray
                 density, rgb = field at samples.positions
                 live = absorb_samples(live, samples, density, rgb)
    colours = finish_rays(live)

The result is that of marching everything and compositing it once (`march`, `composite`), but nothing far behind an
opaque surface is ever evaluated: a trained scene needs a third of the samples. All counts stay on the device; the state
and the queues change in place, so that rounds can be recorded as a CUDA graph.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from ...types import Aabb
from .._checks import check_device, check_dtype, check_shape, check_tensor, refuse
from .._dispatch import implementation
from ..march import OccupancyBits, StepRule

THROUGH, STEP, TAKEN, DEPTH, COLOR = range(5)  # columns of the state; the colour's channels come last
WINDOW = 32  # lattice steps that the samples of one round may span, so that one word says which they are
WALKED = 1 << 20  # lattice steps of one ray at most: directions far from unit length must end too


@dataclass(frozen=True)
class RoundLimits:
    """How many samples a ray takes in a round: a share of what it took so far, between two bounds. Few at first, since
    most rays soon meet a surface; more for those that do not, so that rounds stay few."""

    least: int = 4
    most: int = WINDOW
    growth: float = 0.5

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most <= WINDOW:
            raise InputError("limits", f"1 <= least <= most <= {WINDOW}", f"{self.least} and {self.most}")

    def of(self, taken: Tensor) -> Tensor:
        return (taken * self.growth).floor().clamp(self.least, self.most)


@dataclass(frozen=True)
class LiveRays:
    """Rays under way. `places[side]` lists the live ones in any order, `counts[side]` says how many; the other side
    takes those of the next round. `counts[2]` is the number of samples of the current round, `counts[3]` the backend's.

    Columns of `state`: transmittance; next lattice step, -1 when through the grid; samples taken; depth and colour so
    far, both weighted sums; the rest is padding.
    """

    origins: Tensor  # (n_rays, 3) fp32
    directions: Tensor  # (n_rays, 3) fp32, unit length
    grid: OccupancyBits
    rule: StepRule
    summary: Tensor | None  # what the backend knows of the grid beforehand
    state: Tensor  # (n_rays, columns) fp32
    places: Tensor  # (2, n_rays) int32
    counts: Tensor  # (4,) int32
    channels: int
    side: int = 0

    @property
    def n_live(self) -> Tensor:
        """() int32 on the device."""
        return self.counts[self.side]


class NextSamples(NamedTuple):
    """Samples of one round, the rows of a ray together. Rows from `n_used` on hold anything at all; a few before it may
    belong to no ray and hold ray 0. `absorb_samples` ends their life: it clears `n_used`."""

    positions: Tensor  # (rows, 3) fp32, middle of each sample, memory (3, rows)
    t_starts: Tensor  # (rows,) fp32
    t_ends: Tensor  # (rows,) fp32
    ray_indices: Tensor  # (rows,) int32
    spans: Tensor  # (2, n_rays) int32: first row and number of rows of the ray in each place of the queue
    n_used: Tensor  # () int32; may pass `rows` on the device, which then counts as `rows`


class FinishedRays(NamedTuple):
    """Result of `finish_rays`."""

    rgb: Tensor  # (n_rays, channels), over the background and clamped to [0, 1]
    opacity: Tensor  # (n_rays,)
    depth: Tensor  # (n_rays,) expected distance, divided by opacity


def start_rays(
    origins: Tensor,
    directions: Tensor,
    grid: OccupancyBits,
    rule: StepRule,
    *,
    order: Tensor | None = None,
    channels: int = 3,
) -> LiveRays:
    """All rays (n_rays, 3) at their beginning. `order` (n_rays,) int32, a permutation, says in which order they are
    taken: rays that lie side by side should follow each other, since they read the same memory."""
    n_rays, device = origins.shape[0], origins.device
    check_tensor("origins", origins, ("n_rays", 3))
    check_shape("directions", directions, (n_rays, 3))
    check_device(origins=origins, directions=directions, bits=grid.bits, order=order)
    if order is None:
        order = torch.arange(n_rays, dtype=torch.int32, device=device)
    check_tensor("order", order, (n_rays,), torch.int32)
    refuse(channels < 1, "channels", "at least 1", channels)
    state = torch.zeros(n_rays, -(-(COLOR + channels) // 8) * 8, device=device)  # rows of whole 32-byte sectors
    state[:, THROUGH] = 1.0
    places = torch.empty(2, n_rays, dtype=torch.int32, device=device)
    places[0] = order
    counts = torch.zeros(4, dtype=torch.int32, device=device)
    counts[0].fill_(n_rays)
    summary = implementation("frame", "summarize_grid", origins)(grid)
    origins, directions = (value.detach().float().contiguous() for value in (origins, directions))
    return LiveRays(origins, directions, grid, rule, summary, state, places, counts, channels)


def next_samples(
    live: LiveRays, *, rows: int, limits: RoundLimits | None = None, aabb: Aabb | None = None
) -> NextSamples:
    """The next samples of the live rays, at most `rows` in all; rays for which there is no room wait for a later round.
    A ray takes at least one sample if it has any left and there is room, at most what `limits` allow, none left out.
    Positions are mapped so that `aabb` becomes [0, 1]^3, if given. Not differentiable."""
    limits = limits or RoundLimits()
    least = 8 * WINDOW * limits.most
    refuse(rows < least, "rows", f"at least {least}, so that every round makes progress", rows)
    refuse(rows >= 1 << 30, "rows", "less than 2^30", rows)
    return implementation("frame", "next_samples", live.state)(live, rows=rows, limits=limits, aabb=aabb)


def absorb_samples(
    live: LiveRays,
    samples: NextSamples,
    density: Tensor,
    rgb: Tensor,
    *,
    early_stop_eps: float = 0.0,
    alpha_thre: float | Tensor = 0.0,
    logits: bool = False,
) -> LiveRays:
    """Composite the round's samples into their rays by the rules of `composite`, and hand out who lives on. `density`
    (n,) and `rgb` (n, channels) for the first n rows, all those in use; with `logits` their logits: density =
    exp(min(x, 15)), rgb = sigmoid(x). Not differentiable."""
    check_tensor("density", density, ("n",))
    check_tensor("rgb", rgb, (density.shape[0], live.channels))
    check_device(density=density, rgb=rgb, state=live.state)
    options = {"early_stop_eps": early_stop_eps, "alpha_thre": alpha_thre, "logits": logits}
    implementation("frame", "absorb_samples", live.state)(live, samples, density, rgb, **options)
    return LiveRays(**{**vars(live), "side": 1 - live.side})


def finish_rays(live: LiveRays, background: Tensor | None = None) -> FinishedRays:
    """What the rays gathered so far, over the `background` (channels,) or (n_rays, channels); None is black."""
    if background is not None:
        n_rays, channels = live.state.shape[0], live.channels
        check_dtype("background", background)
        check_device(background=background, state=live.state)
        if tuple(background.shape) not in ((channels,), (n_rays, channels)):
            wanted = f"shape ({channels},) or ({n_rays}, {channels})"
            raise InputError("background", wanted, str(tuple(background.shape)))
    return FinishedRays(*implementation("frame", "finish_rays", live.state)(live, background))
