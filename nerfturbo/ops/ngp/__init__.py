"""Instant-NGP behind its hash grid: density and colour networks as one op.

    y   = W_2 relu(W_1 encoding)                        density network; y_0 is the density logit
    c   = W_5 relu(W_4 relu(W_3 [direction, y]))        colour network on the direction's encoding and all of y
    raw = (c_0, c_1, c_2, y_0)                          logits: rgb = sigmoid(c), density = exp(min(y_0, 15))

Three ways to ask: `ngp_field` from an encoding to logits; `ngp_query` from positions to rgb and density, for rendering
and for loops that ask a field point by point; `NgpDensity` looks ahead, without gradient.

Fused because the networks are so small that moving their hidden layers through memory would cost more than computing
them. The gradient of a saturated density is that of the exponential, not zero.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from ...types import Aabb, PackedSamples
from .._checks import check_device, check_shape, check_tensor
from .._dispatch import implementation
from .._sink import GradientSink, check_count, check_sink
from ..composite import Thinning
from ..hash_encode import HashLayout

MAX_LOGIT = 15.0  # density = exp(min(y_0, 15)), so that it stays finite


class NgpWeights(NamedTuple):
    """The five matrices, each (outputs, inputs) as in torch.nn.Linear; fp32 masters or halves."""

    density_in: Tensor  # (hidden, encoding)
    density_out: Tensor  # (features, hidden); row 0 gives the density logit
    colour_in: Tensor  # (hidden, directions + features): first the direction's columns
    colour_mid: Tensor  # (hidden, hidden)
    colour_out: Tensor  # (3, hidden)


def ngp_field(
    encoding: Tensor,
    directions: Tensor,
    ray_indices: Tensor | None,
    weights: NgpWeights,
    *,
    sink: GradientSink | None = None,
    n_used: Tensor | None = None,
) -> Tensor:
    """(n, 4) fp32 logits: three of colour, one of density. `encoding` (n, encoding) of the samples' positions, fp16 or
    bf16 for speed; `directions` (n_rays, directions), the encoded view directions, one row per ray; `ray_indices` (n,)
    int32 says which row is a sample's (None: every sample has its own). Differentiable to encoding, directions and
    weights. A `sink` with five buffers takes the weights' gradients in place of autograd. `n_used`, a count on the
    device, says how many rows count: the others come out as zero and receive no gradient; their ray index must be a
    valid one.

    >>> weights = NgpWeights(*(torch.ones(s) for s in ((2, 3), (2, 2), (2, 4), (2, 2), (3, 2))))
    >>> ngp_field(torch.ones(1, 3), torch.ones(1, 2), torch.zeros(1, dtype=torch.int32), weights).tolist()
    [[56.0, 56.0, 56.0, 6.0]]
    """
    check_tensor("encoding", encoding, ("n", "encoding"))
    weights = NgpWeights(*weights)
    _check_directions(directions, ray_indices, encoding.shape[0])
    check_count(n_used, encoding.device)
    check_weights(weights, encoding.shape[1], directions.shape[1])
    check_device(encoding=encoding, directions=directions, ray_indices=ray_indices, **weights._asdict())
    check_sink(sink, NgpWeights._fields, weights)
    field = implementation("ngp", "ngp_field", encoding)
    return field(encoding, directions, ray_indices, weights, sink=sink, n_used=n_used)


def _check_directions(directions: Tensor, ray_indices: Tensor | None, n: int) -> None:
    """One row per ray, of which each of n samples points at one; without `ray_indices` one per sample."""
    check_tensor("directions", directions, ("n_rays", "directions") if ray_indices is not None else (n, "directions"))
    if ray_indices is not None:
        check_tensor("ray_indices", ray_indices, (n,), torch.int32)
        if directions.shape[0] == 0 and n > 0:
            raise InputError("directions", "at least one row for the samples to point at", "(0, ...)")


def check_weights(weights: NgpWeights, encoding: int, directions: int) -> None:
    """That the matrices fit each other, an encoding and directions of these widths."""
    check_shape("density_in", weights.density_in, ("hidden", encoding))
    hidden = weights.density_in.shape[0]
    check_shape("density_out", weights.density_out, ("features", hidden))
    check_shape("colour_in", weights.colour_in, (hidden, directions + weights.density_out.shape[0]))
    check_shape("colour_mid", weights.colour_mid, (hidden, hidden))
    check_shape("colour_out", weights.colour_out, (3, hidden))


def skips_unused(table: Tensor, weights: NgpWeights) -> bool:
    """Whether unused rows cost `ngp_query` nothing here, so that it may be called with many more than are in use.
    Otherwise (fp32 on a GPU without TF32, networks too large to fuse) all rows are computed."""
    return implementation("ngp", "skips_unused", table)(table, weights)


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        rgb, density = torch.sigmoid(logits[:, :3]), torch.exp(logits[:, 3].clamp(max=MAX_LOGIT))
        ctx.save_for_backward(rgb, density)
        ctx.by_column = logits.stride(0) == 1
        return rgb, density

    @staticmethod
    def backward(ctx: Any, grad_rgb: Tensor, grad_density: Tensor) -> Tensor:  # type: ignore[override]
        rgb, density = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives are wanted
            return torch.cat([grad_rgb * rgb * (1.0 - rgb), (grad_density * density)[:, None]], dim=-1)
        n = rgb.shape[0]
        grad = torch.empty((4, n) if ctx.by_column else (n, 4), dtype=rgb.dtype, device=rgb.device)
        grad = grad.t() if ctx.by_column else grad  # as the logits lie in memory
        torch.ops.aten.sigmoid_backward.grad_input(grad_rgb, rgb, grad_input=grad[:, :3])
        torch.mul(grad_density, density, out=grad[:, 3])
        return grad


def activate(logits: Tensor) -> tuple[Tensor, Tensor]:
    """rgb (n, 3) and density (n,) of fp32 or fp64 logits (n, 4), as one node of autograd.

    >>> rgb, density = activate(torch.zeros(1, 4))
    >>> rgb.tolist(), density.tolist()
    ([[0.5, 0.5, 0.5]], [1.0])
    """
    return _Activate.apply(logits)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class NgpGrid:
    """The hash grid in front of the networks."""

    table: Tensor  # (n_entries, n_features), what gradients go to
    layout: HashLayout
    half: Tensor | None = None  # a half copy of the table, which is read in its place and sets the precision

    def __post_init__(self) -> None:
        for name, value in (("table", self.table), ("half", self.half)):
            if value is not None:
                check_tensor(name, value, (self.layout.n_entries, self.layout.n_features))


def ngp_query(
    positions: Tensor,
    directions: Tensor,
    ray_indices: Tensor | None,
    grid: NgpGrid,
    weights: NgpWeights,
    *,
    n_used: Tensor | None = None,
    logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """rgb (n, 3) and density (n,), fp32, at `positions` (n, 3) in [0, 1], or their `logits`; directions as in
    `ngp_field`, which this is of `hash_encode`.

    Differentiable to positions, directions, table and weights. Rows from the device count `n_used` on, whatever they
    hold, come out as anything at all; without gradients they cost nothing.

    >>> grid = NgpGrid(torch.ones(4312, 2), HashLayout(2, 2, log2_entries=12, base_resolution=4, max_resolution=64))
    >>> weights = NgpWeights(*(torch.zeros(s) for s in ((2, 4), (2, 2), (2, 4), (2, 2), (3, 2))))
    >>> rgb, density = ngp_query(torch.rand(5, 3), torch.ones(5, 2), None, grid, weights)
    >>> rgb.mean().item(), density.tolist()
    (0.5, [1.0, 1.0, 1.0, 1.0, 1.0])
    """
    check_tensor("positions", positions, ("n", 3))
    weights = NgpWeights(*weights)
    _check_directions(directions, ray_indices, positions.shape[0])
    check_count(n_used, positions.device)
    check_weights(weights, grid.layout.n_outputs, directions.shape[1])
    tensors = {"positions": positions, "directions": directions, "ray_indices": ray_indices, **weights._asdict()}
    check_device(**tensors, table=grid.table, half=grid.half)
    query = implementation("ngp", "ngp_query", positions)
    return query(positions, directions, ray_indices, grid, weights, n_used=n_used, logits=logits)


@dataclass(frozen=True)
class NgpDensity:
    """Everything that decides Instant-NGP's density at a point of the box, for looking ahead: no gradient.

    >>> layout = HashLayout(n_levels=2, n_features=2, log2_entries=12, base_resolution=4, max_resolution=64)
    >>> table, weights = torch.full((layout.n_entries, 2), 0.5), (torch.ones(3, 4), torch.ones(2, 3))
    >>> field = NgpDensity(Aabb.cube(1.0), table, layout, weights)
    >>> field.at(torch.rand(1, 3), logits=True).round().tolist()
    [6.0]
    >>> samples = PackedSamples.from_counts(torch.tensor([3]), torch.arange(3) / 10, torch.arange(1, 4) / 10)
    >>> origins, directions = torch.zeros(1, 3), torch.tensor([[0.0, 0.0, 1.0]])
    >>> field.visibility(origins, directions, samples, early_stop_eps=1e-4).tolist()  # density exp(6), length 0.1
    [True, False, False]
    """

    aabb: Aabb
    table: Tensor  # (n_entries, n_features); its dtype sets the precision: pass the half copy where there is one
    layout: HashLayout
    weights: tuple[Tensor, Tensor]  # density_in (hidden, n_outputs), density_out (features, hidden)

    def __post_init__(self) -> None:
        check_tensor("table", self.table, (self.layout.n_entries, self.layout.n_features))
        density_in, density_out = self.weights
        check_shape("weights[0]", density_in, ("hidden", self.layout.n_outputs))
        check_shape("weights[1]", density_out, ("features", density_in.shape[0]))
        check_device(table=self.table, density_in=density_in, density_out=density_out)

    def at(self, positions: Tensor, *, n_used: Tensor | None = None, logits: bool = False) -> Tensor:
        """(n,) fp32 densities exp(min(y_0, 15)), or their `logits`, at `positions` (n, 3) with the box at [0, 1]; rows
        past the device count `n_used` come out as any finite number."""
        check_tensor("positions", positions, ("n", 3))
        check_device(positions=positions, table=self.table)
        check_count(n_used, positions.device)
        with torch.no_grad():
            return implementation("ngp", "density_at", positions)(self, positions, n_used=n_used, logits=logits)

    def visibility(
        self,
        origins: Tensor,
        directions: Tensor,
        samples: PackedSamples,
        *,
        early_stop_eps: float = 0.0,
        alpha_thre: float | Tensor = 0.0,
        thinning: Thinning | None = None,
    ) -> Tensor:
        """(capacity,) bool: `visibility` of the samples of rays (n_rays, 3), False in the tail. Each ray is followed
        from its first sample and left once it is opaque: nothing behind a surface is computed.

        `alpha_thre` may be a () tensor on the device. With `thinning` the result is its codes, (capacity,) uint8:
        samples that add little are kept by chance.
        """
        check_tensor("origins", origins, (samples.n_rays, 3))
        check_tensor("directions", directions, (samples.n_rays, 3))
        phases = None if thinning is None else thinning.phases
        if phases is not None:
            check_shape("thinning.phases", phases, (samples.n_rays,))
        rays = {"origins": origins, "directions": directions, "t_starts": samples.t_starts, "phases": phases}
        check_device(**rays, table=self.table)
        options = {"early_stop_eps": float(early_stop_eps), "alpha_thre": alpha_thre, "thinning": thinning}
        with torch.no_grad():
            return implementation("ngp", "visibility", origins)(self, origins, directions, samples, **options)
