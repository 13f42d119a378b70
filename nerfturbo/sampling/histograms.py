"""Weights along rays as step functions: the part of a ray that is sampled, what a proposal says of it, how it learns.
Notation: places are numbers in [0, 1] along a ray's `RaySpan`, so that near and far count alike. A histogram has edges
(n_rays, n + 1), places that rise along each ray, and weights (n_rays, n): the light of the ray that ends between."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..ops._sink import Node
from ..ops.intervals import PlacedIntervals, Space, Spacing, place_intervals, spread
from ..ops.packed import packed_cumsum
from ..ops.positions import ray_aabb
from ..types import Aabb, Rays

ANNEAL_SLOPE = 10.0
PADDING = 0.01  # added to every weight before drawing, so that none is given up for ever; with less they are blurred


@dataclass(frozen=True)
class RaySpan:
    """From `near` to `far`, inside the box where there is one; lengths are measured in `unit`s for the warp.

    >>> span = RaySpan(near=0.0, far=4.0)
    >>> rays = Rays(torch.zeros(1, 3), torch.tensor([[0.0, 0.0, 1.0]]))
    >>> span.distances(torch.tensor([[0.0, 0.5, 1.0]]), rays).tolist()
    [[0.0, 2.0, 4.0]]
    """

    near: float = 0.0
    far: float = float("inf")
    warp: Spacing = "uniform"
    unit: float = 1.0
    aabb: Aabb | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.near < self.far or self.unit <= 0.0:
            got = f"{self.near}, {self.far} and {self.unit}"
            raise InputError("near, far and unit", "0 <= near < far, and a positive unit", got)
        if self.far == float("inf") and self.aabb is None:
            raise InputError("far", "a finite distance, or a box", "neither", "far=1000.0 serves a contracted scene")

    def inside(self, box: Aabb) -> "RaySpan":
        """The part in a box, besides the box that there is already."""
        shared = box if self.aabb is None else self.aabb.intersection(box)
        if shared is None:
            raise InputError("box", "one that holds a part of the scene", f"{box.low} to {box.high}")
        return replace(self, aabb=shared)

    @torch.no_grad()
    def limits(self, rays: Rays) -> tuple[Tensor, Tensor]:
        """(n_rays, 1) where each ray begins and ends; both the same for one that misses the box."""
        if self.aabb is None:
            shape = (len(rays), 1)
            return rays.origins.new_full(shape, self.near), rays.origins.new_full(shape, self.far)
        near, far = ray_aabb(rays.origins, rays.directions, self.aabb, near=self.near, far=self.far)
        return near[:, None], far[:, None]

    def distances(self, places: Tensor, rays: Rays, limits: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Distances (n_rays, n) of places (n_rays, n) in [0, 1] along the rays. Not differentiable."""
        near, far = limits or self.limits(rays)
        return spread(places, near / self.unit, far / self.unit, kind=self.warp) * self.unit

    def intervals(
        self, places: Tensor, rays: Rays, limits: tuple[Tensor, Tensor], space: Space | None = None
    ) -> PlacedIntervals:
        """Those distances, and the positions between them, in world coordinates or in a space. Not differentiable."""
        near, far = limits
        options = {"near": near, "far": far, "spacing": self.warp, "unit": self.unit, "space": space or Space()}
        return place_intervals(places, rays.origins, rays.directions, **options)


@dataclass(frozen=True)
class Histogram:
    """What one stage of sampling saw; `color` is that of the ray, without background, where the stage renders one."""

    edges: Tensor  # (n_rays, n + 1) places in [0, 1]
    weights: Tensor  # (n_rays, n), differentiable
    color: Tensor | None = None  # (n_rays, channels)


def annealing(step: int | Tensor, n_steps: int, *, slope: float = ANNEAL_SLOPE) -> Tensor | float:
    """The power that weights are raised to before drawing: from 0 (all alike) to 1 (as they are) over `n_steps` steps,
    b x / ((b - 1) x + 1) with x the share of them that is over and b the slope at the start.

    >>> [round(float(annealing(step, 100)), 3) for step in (0, 10, 50, 100, 1000)]
    [0.0, 0.526, 0.909, 1.0, 1.0]
    """
    if n_steps <= 0:
        return 1.0
    share = step / n_steps
    share = share.clamp(0.0, 1.0) if isinstance(share, Tensor) else min(1.0, max(0.0, share))
    return slope * share / ((slope - 1.0) * share + 1.0)


def outer_weights(edges: Tensor, key_edges: Tensor, key_weights: Tensor) -> Tensor:
    """(n_rays, n): the weight of all intervals of a histogram that each interval between `edges` touches.

    Differentiable to `key_weights`. Nothing lies outside a histogram.

    >>> key = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    >>> outer_weights(torch.tensor([[0.5, 1.5, 2.0]]), key, torch.tensor([[1.0, 2.0, 7.0]])).tolist()
    [[3.0, 2.0]]
    """
    last = key_weights.shape[-1]
    keys, low, high = (value.detach().contiguous() for value in (key_edges, edges[:, :-1], edges[:, 1:]))
    first = (torch.searchsorted(keys, low, right=True) - 1).clamp(0, last)
    return _RangeSums.apply(key_weights, first, torch.searchsorted(keys, high, right=False).clamp(0, last))


class _RangeSums(Node):
    """Sums of values[first_i : end_i] along each ray, where first and end never fall.

    A value belongs to consecutive ranges, so its gradient is a sum over a range as well: no scattering, whose order of
    additions would differ from run to run.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, first: Tensor, end: Tensor) -> Tensor:
        ctx.save_for_backward(first, end)
        ctx.n = values.shape[-1]
        return _range_sums(values, first, end)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, end = ctx.saved_tensors
        places = torch.arange(ctx.n, device=first.device).expand(first.shape[0], -1).contiguous()
        begin = torch.searchsorted(end, places, right=True)  # the first range that ends behind the value
        beyond = torch.searchsorted(first, places, right=True)  # the first that begins behind it
        return (_range_sums(grad, begin, beyond),)


def _range_sums(values: Tensor, first: Tensor, end: Tensor) -> Tensor:
    """(n_rays, m) sums of values (n_rays, n) from first to before end (n_rays, m), in 0 to n; 0 where end < first."""
    running = _running(values)
    return running.gather(-1, torch.maximum(first, end)) - running.gather(-1, first)


def _running(values: Tensor) -> Tensor:
    """(n_rays, n + 1) sums of values (n_rays, n) so far; the same bits in every run: torch's own is not, on GPUs."""
    n_rays, n = values.shape
    offsets = torch.arange(n_rays + 1, dtype=torch.int32, device=values.device) * n
    return torch.nn.functional.pad(packed_cumsum(values.reshape(-1).contiguous(), offsets).view(n_rays, n), (1, 0))


def blurred_weights(edges: Tensor, weights: Tensor, at: Tensor, radius: float) -> Tensor:
    """(n_rays, m): the weight between places `at` (n_rays, m + 1) of a histogram whose density is blurred by a box that
    reaches `radius` to both sides. With F the running weight, the blurred one is (G(x + radius) - G(x - radius)) /
    (2 radius), G the integral of F. Not differentiable.

    >>> edges, weights, at = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0]]), torch.tensor([[-1.0, 0.0, 0.5]])
    >>> blurred_weights(edges, weights, at, 0.5).tolist()
    [[0.125, 0.375]]
    """
    lengths, running = edges[:, 1:] - edges[:, :-1], _running(weights)
    area = _running(lengths * (running[:, 1:] + running[:, :-1]) * 0.5)

    def integral(x: Tensor) -> Tensor:
        inside = torch.minimum(torch.maximum(x, edges[:, :1]), edges[:, -1:])
        index = (torch.searchsorted(edges, inside.contiguous(), right=True) - 1).clamp(0, weights.shape[1] - 1)
        beyond, length = inside - edges.gather(1, index), lengths.gather(1, index)
        share = (beyond / length.clamp(min=1e-12)).clamp(0.0, 1.0)
        within = beyond * (running.gather(1, index) + 0.5 * share * weights.gather(1, index))
        return area.gather(1, index) + within + (x - edges[:, -1:]).clamp(min=0.0) * running[:, -1:]

    blurred = (integral(at + radius) - integral(at - radius)) / (2.0 * radius)
    return (blurred[:, 1:] - blurred[:, :-1]).clamp(min=0.0)


def interlevel_loss(edges: Tensor, weights: Tensor, proposal: Histogram, *, blur: float = 0.0) -> Tensor:
    """(n_rays,): how far a proposal is from an upper bound of the weights (n_rays, n) between `edges`: the mean over
    the intervals of max(0, w - bound)^2 / (w + 1e-7), with `outer_weights` as the bound. With a `blur`, how far it is
    from `blurred_weights`, which also move it smoothly (Zip-NeRF): the sum over its own intervals of
    max(0, blurred - own)^2 / (own + 1e-5).

    Only the proposal learns from it: the weights get no gradient. Zero where the proposal holds at least the weight.

    >>> proposal = Histogram(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5]]))
    >>> round(interlevel_loss(torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0]]), proposal).item(), 3)
    0.25
    >>> round(interlevel_loss(torch.tensor([[0.4, 0.6]]), torch.tensor([[1.0]]), proposal, blur=0.03).item(), 3)
    0.5
    """
    weights = weights.detach()
    if blur > 0.0:
        own = proposal.weights
        wanted = blurred_weights(edges.detach().contiguous(), weights, proposal.edges.detach(), blur)
        return ((wanted - own).clamp(min=0.0).square() / (own + 1e-5)).sum(-1)
    bound = outer_weights(edges, proposal.edges, proposal.weights)
    return ((weights - bound).clamp(min=0.0).square() / (weights + 1e-7)).mean(-1)
