"""What places samples along rays. An object with `sample` drives rendering and training; the rest is optional.

| optional | what it is for |
|---|---|
| `samples_per_ray` | the number of samples on every ray, where it is the same: shapes and memory are planned by it |
| `evaluations_per_ray` | samples that are looked at before those |
| `max_rays(batch_samples)` | the most rays of a training step |
| `update(step, density_fn, all_cells=None, team=None)` | learn from the field every `grid.update_every` steps |
| `loss(samples, weights)` | a loss of its own, from the weights that rendering gave its samples |
| `learns(step)`, `rests` | at which steps its parameters are trained; at the others `rests` is True |
| `pruning` | a `Pruning`: train only on what it leaves |
| `mark_invisible(frusta, near)` | before training, give up what no camera sees |
| `cropped(box)`, `refined(factor)` | the same sampler in a box, or with finer steps, for rendering |
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import InputError, refuse
from ..ops.positions import Contraction
from ..ops.random import Stream, random_uniform
from ..types import Aabb, PackedSamples, Rays

SigmaFn = Callable[[Tensor, Tensor, Tensor], Tensor]  # (t_starts, t_ends, ray_indices) -> density (n,)
DensityFn = Callable[..., Tensor]  # positions (n, 3) -> density (n,); of a dynamic scene: positions, times (n,)


@dataclass(frozen=True)
class Draw:
    """Which random numbers a call takes: none without `stratified`; those of (seed, step, ray) with it."""

    stratified: bool = False
    seed: int = 0
    step: int | Tensor | None = None  # also decides the annealing of proposals; None: as they are
    first_ray: int = 0  # index of the first ray in the step's whole batch

    def jitter(self, rays: Rays, columns: int, stream: Stream = Stream.IMPORTANCE) -> list[Tensor | None]:
        """`columns` times (n_rays, 1) in [0, 1)."""
        if not self.stratified:
            return [None] * columns
        key = {"seed": self.seed, "stream": stream, "step": 0 if self.step is None else self.step}
        numbers = random_uniform(len(rays), columns=columns, first=self.first_ray, device=rays.device, **key)
        return list(numbers.split(1, dim=1))


@dataclass(frozen=True)
class Pruning:
    """Which of the placed samples are worth training: those that light reaches and that are not too thin."""

    early_stop_eps: float
    alpha_thre: float
    merge_weak_samples: float = 0.0


@runtime_checkable
class Sampler(Protocol):
    """`sample` gives the samples worth evaluating."""

    def sample(
        self, rays: Rays, *, draw: Draw | None = None, n_active: Tensor | None = None, capacity: int | None = None
    ) -> PackedSamples:
        """Samples of each ray. Rays from `n_active`, a count on the device, on get none; `capacity` fixes the length
        of the arrays of a sampler whose rays differ in length. Both are None outside a captured step."""
        ...


@runtime_checkable
class UnitDensity(Protocol):
    """A density over a space of its own: positions (n, 3) in [0, 1]^3, the box or with a contraction all of space."""

    aabb: Aabb
    contraction: Contraction

    def unit_density(self, positions: Tensor) -> Tensor: ...


@torch.no_grad()
def check_sampler(sampler: Any, aabb: Aabb, device: torch.device) -> None:
    """Refuse a sampler that cannot be trained with, naming what was expected and what came."""
    if not callable(getattr(sampler, "sample", None)):
        raise InputError("sampler", "an object with sample(rays, *, draw=None)", type(sampler).__name__)
    low, high = aabb.tensor(device)
    toward = torch.nn.functional.normalize(high - low, dim=0)
    rays = Rays((low - (high - low)).repeat(4, 1), toward.repeat(4, 1))
    try:
        samples = sampler.sample(rays, draw=Draw(stratified=True, step=0))
    except Exception as error:
        wanted = "sample(rays, *, draw=None, n_active=None, capacity=None)"
        raise InputError("sampler.sample", wanted, f"{type(error).__name__}: {error}") from error
    refuse(not isinstance(samples, PackedSamples), "sampler.sample", "PackedSamples", type(samples).__name__)
    refuse(samples.n_rays != len(rays), "sampler.sample", f"samples of {len(rays)} rays", samples.n_rays)
    if not bool((samples.t_ends >= samples.t_starts).all()):
        raise InputError("sampler.sample", "t_starts <= t_ends", "intervals that end before they start")
