"""The few types that travel between packages. All frozen; the invariants are in the docstrings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .errors import InputError, refuse


@dataclass(frozen=True)
class Rays:
    """A batch of rays: point(t) = origins + t * directions, with directions of unit length.

    `pixel_radii` is the radius of a pixel's cone at t = 1, for scale-aware features; `times` is in [0, 1];
    `camera_indices` says which picture a ray came from. Indexing gives rays again.

    >>> rays = Rays(torch.zeros(4, 3), torch.tensor([[0.0, 0.0, 1.0]]).repeat(4, 1))
    >>> len(rays), len(rays[:2])
    (4, 2)
    """

    origins: Tensor  # (n_rays, 3)
    directions: Tensor  # (n_rays, 3), unit length
    times: Tensor | None = None  # (n_rays,)
    camera_indices: Tensor | None = None  # (n_rays,) int64
    pixel_radii: Tensor | None = None  # (n_rays,)

    def __post_init__(self) -> None:
        for name in ("origins", "directions"):
            value = getattr(self, name)
            refuse(value.dim() != 2 or value.shape[1] != 3, name, "shape (n_rays, 3)", tuple(value.shape))
        n_rays = self.origins.shape[0]
        for name in ("directions", "times", "camera_indices", "pixel_radii"):
            value = getattr(self, name)
            if value is not None and value.shape[0] != n_rays:
                raise InputError(name, f"{n_rays} rows, one per ray", str(tuple(value.shape)))

    def __len__(self) -> int:
        return self.origins.shape[0]

    @property
    def device(self) -> torch.device:
        return self.origins.device

    def __getitem__(self, index: slice | Tensor) -> Rays:
        return self._map(lambda value: value[index])

    def to(self, device: torch.device | str) -> Rays:
        return self._map(lambda value: value.to(device))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Rays:
        return replace(self, **{name: function(value) for name, value in vars(self).items() if value is not None})


@dataclass(frozen=True)
class PackedSamples:
    """Samples of many rays, stored ray after ray. Ray i owns samples offsets[i]:offsets[i+1].

    The arrays may be longer than offsets[-1]: the tail is unused capacity that every op ignores; it always holds
    t = 0 and ray index 0, never stale values, so that a user's field may evaluate it. That is what lets a whole
    training step have fixed shapes and be captured as one CUDA graph.

    When a fixed capacity overflows, rays are kept whole from the first on; `n_rays_kept` counts them on the device
    (None: all). Rays from there on have no samples and must not be trained on.

    >>> samples = PackedSamples.from_counts(torch.tensor([2, 0, 1]), torch.zeros(3), torch.ones(3))
    >>> samples.offsets.tolist(), samples.ray_indices.tolist(), samples.packed_info.tolist()
    ([0, 2, 2, 3], [0, 0, 2], [[0, 2], [2, 0], [2, 1]])
    """

    t_starts: Tensor  # (capacity,)
    t_ends: Tensor  # (capacity,)
    ray_indices: Tensor  # (capacity,) int32, non-decreasing over the used part
    offsets: Tensor  # (n_rays + 1,) int32, offsets[0] == 0, offsets[-1] = samples in use, <= capacity
    n_rays_kept: Tensor | None = None  # () int32

    @classmethod
    def from_counts(cls, counts: Tensor, t_starts: Tensor, t_ends: Tensor) -> PackedSamples:
        """Build from the number of samples of each ray; the arrays are used whole."""
        offsets = torch.zeros(counts.shape[0] + 1, dtype=torch.int32, device=counts.device)
        offsets[1:] = torch.cumsum(counts, 0)
        rays = torch.arange(counts.shape[0], dtype=torch.int32, device=counts.device)
        return cls(t_starts, t_ends, torch.repeat_interleave(rays, counts), offsets)

    @property
    def n_rays(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def capacity(self) -> int:
        return self.t_starts.shape[0]

    @property
    def n_samples(self) -> Tensor:
        """Samples in use, on the device: reading it as a number waits for the device."""
        return self.offsets[-1]

    @property
    def packed_info(self) -> Tensor:
        """(n_rays, 2) int32: first sample and number of samples of each ray."""
        return torch.stack([self.offsets[:-1], self.offsets[1:] - self.offsets[:-1]], dim=-1)

    @property
    def used(self) -> Tensor:
        """(capacity,) bool: True for samples in use, False for the tail."""
        return torch.arange(self.capacity, device=self.offsets.device) < self.offsets[-1]

    def midpoints(self) -> Tensor:
        return (self.t_starts + self.t_ends) * 0.5

    def positions(self, rays: Rays) -> Tensor:
        """(capacity, 3): the point at the middle of each sample; differentiable to the rays."""
        index = self.ray_indices.long()
        return rays.origins[index] + rays.directions[index] * self.midpoints()[:, None]


@dataclass(frozen=True)
class RenderOutput:
    """What volume rendering gives for each ray; `weights` is per sample."""

    rgb: Tensor  # (n_rays, channels), background included
    opacity: Tensor  # (n_rays,) in [0, 1]
    depth: Tensor  # (n_rays,) expected distance, divided by opacity
    weights: Tensor  # (capacity,)
    samples: PackedSamples | None = None


@dataclass(frozen=True)
class Aabb:
    """An axis-aligned box with positive volume.

    >>> box = Aabb.cube(1.5)
    >>> box.size, box.scaled(2.0).high, box.normalize(torch.zeros(1, 3)).tolist()
    ((3.0, 3.0, 3.0), (3.0, 3.0, 3.0), [[0.5, 0.5, 0.5]])
    """

    low: tuple[float, float, float]
    high: tuple[float, float, float]

    def __post_init__(self) -> None:
        if len(self.size) != 3 or not all(0.0 < size < float("inf") for size in self.size):
            raise InputError("aabb", "low < high on three finite axes", f"low={self.low}, high={self.high}")

    @classmethod
    def cube(cls, half_extent: float, center: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> Aabb:
        return cls(tuple(c - half_extent for c in center), tuple(c + half_extent for c in center))  # type: ignore[arg-type]

    @property
    def size(self) -> tuple[float, float, float]:
        return tuple(b - a for a, b in zip(self.low, self.high, strict=True))  # type: ignore[return-value]

    @property
    def center(self) -> tuple[float, float, float]:
        return tuple((a + b) * 0.5 for a, b in zip(self.low, self.high, strict=True))  # type: ignore[return-value]

    @property
    def diagonal(self) -> float:
        return sum(size * size for size in self.size) ** 0.5

    def scaled(self, factor: float) -> Aabb:
        """The box grown about its centre."""
        low = tuple(c - 0.5 * factor * s for c, s in zip(self.center, self.size, strict=True))
        high = tuple(c + 0.5 * factor * s for c, s in zip(self.center, self.size, strict=True))
        return replace(self, low=low, high=high)

    def intersection(self, other: Aabb) -> Aabb | None:
        """What two boxes share; None where that has no volume."""
        low_x, low_y, low_z = map(max, self.low, other.low)
        high_x, high_y, high_z = map(min, self.high, other.high)
        if low_x >= high_x or low_y >= high_y or low_z >= high_z:
            return None
        return Aabb((low_x, low_y, low_z), (high_x, high_y, high_z))

    def tensor(self, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """(2, 3): low and high. Shared: copy it before changing it."""
        return _box(self, torch.device(device or "cpu"), dtype)[0]

    def normalize(self, positions: Tensor) -> Tensor:
        """Map the box to [0, 1]^3."""
        _, low, size = _box(self, positions.device, positions.dtype)
        return (positions - low) / size


@functools.lru_cache(maxsize=256)
def _box(aabb: Aabb, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(2, 3) both corners, the low one, and the size. Kept, because copying numbers to a device is not possible while a
    CUDA graph is recorded; of use to autograd also where the first to ask was not training."""
    with torch.inference_mode(False):
        low, high = both = torch.tensor([aabb.low, aabb.high], dtype=dtype)
        return both.to(device), low.to(device), (high - low).to(device)
