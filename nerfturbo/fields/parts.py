"""What fields are made of: activations that stay finite, encodings, networks, the hash grid, and a density of these."""

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..ops import GradientSink
from ..ops._dispatch import autocast
from ..ops.hash_encode import PRIMES, HashLayout, hash_encode
from ..ops.mlp import fused_mlp
from ..ops.ngp import MAX_LOGIT as MAX_EXPONENT
from ..ops.ngp import NgpDensity, activate
from ..ops.packed.reference import widen
from ..ops.positions import Contraction, unit_positions
from ..types import Aabb
from .field import Buffers, Connected

BASE_RESOLUTION = 16  # cells per axis of a hash grid's coarsest level
CHUNK = 1 << 20  # numbers drawn by one thread: torch draws 11 million of them, a table, in a tenth of a second
PIECES, SMALLEST_PIECE = 8, 2048  # of a batch that is computed again in the backward
DENSITY_BIAS = -1.0  # a young proposal is thin, so that all of a ray is looked at
LARGEST_PIECE = 1 << 15  # points, where a piece is all that memory has to hold: enough to keep a GPU busy


def cut(n_pieces: int, *tensors: Tensor | None) -> list[tuple[Any, ...]]:
    """All tensors cut into as many pieces (at least one), which go together; None stays None."""
    n_pieces = max(1, n_pieces)
    return list(zip(*([None] * n_pieces if t is None else t.tensor_split(n_pieces) for t in tensors), strict=True))


def recomputed(
    evaluate: Callable[..., tuple[Tensor, Tensor]], *tensors: Tensor | None, on: bool, random: bool = False
) -> tuple[Tensor, Tensor]:
    """rgb and density; where `on`, piece by piece and keeping the inputs alone: the backward computes a piece once
    more, and only one at a time. `random` where torch's random numbers matter, which a CUDA graph cannot draw twice."""
    if not on or not torch.is_grad_enabled() or tensors[0] is None:
        return evaluate(*tensors)
    n = tensors[0].shape[0]
    pieces = cut(max(-(-n // LARGEST_PIECE), min(PIECES, n // SMALLEST_PIECE)), *tensors)
    done = [checkpoint(evaluate, *piece, use_reentrant=False, preserve_rng_state=random) for piece in pieces]
    return torch.cat([rgb for rgb, _ in done]), torch.cat([density for _, density in done])


class _TruncatedExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return torch.exp(logits.clamp(max=MAX_EXPONENT))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (logits,) = ctx.saved_tensors
        # The true gradient is zero past the clamp; the clamped exponential lets a saturated density come back down.
        return grad * torch.exp(logits.clamp(max=MAX_EXPONENT))


def activated(logits: Tensor) -> tuple[Tensor, Tensor]:
    """rgb (n, 3) = sigmoid and density (n,) = `truncated_exp` of logits (n, 4), one node where it can."""
    if logits.dtype in (torch.float32, torch.float64) and torch.is_grad_enabled():
        return activate(logits)
    return torch.sigmoid(logits[:, :3]), truncated_exp(logits[:, 3])


def truncated_exp(logits: Tensor) -> Tensor:
    """exp(min(x, 15)) in fp32 at least, with the same clamp in the backward instead of a zero gradient.

    >>> [f"{value:.4g}" for value in truncated_exp(torch.tensor([0.0, 100.0])).tolist()]  # exp(0), exp(15)
    ['1', '3.269e+06']
    """
    wide = widen(logits)
    if not torch.is_grad_enabled():
        return torch.exp(wide.clamp(max=MAX_EXPONENT))
    return _TruncatedExp.apply(wide)  # type: ignore[no-any-return]


def frequency_encode(values: Tensor, n_frequencies: int) -> Tensor:
    """(n, d * (2 * n_frequencies + 1)): the values, and sin and cos of 2^k * pi * them, k = 0 ... n_frequencies - 1.
    Arguments stay in fp32: half precision loses the phase at high frequencies.

    >>> frequency_encode(torch.tensor([[0.5]]), 1).round(decimals=3).tolist()
    [[0.5, 1.0, -0.0]]
    """
    wide = widen(values)
    scales = torch.pow(2.0, torch.arange(n_frequencies, device=values.device, dtype=wide.dtype)) * math.pi
    angles = (wide[:, None, :] * scales[:, None]).flatten(1)
    return torch.cat([wide, angles.sin(), angles.cos()], dim=-1)


def draw_uniform(*shape: int, bound: float, generator: torch.Generator | None) -> Tensor:
    """Random numbers in [-bound, bound], drawn where the generator is, and put where a device context asks for them."""
    target = torch.empty(0).device
    drawn = torch.empty(shape, device=target if generator is None else generator.device)
    if drawn.numel() <= CHUNK or drawn.device.type != "cpu" or drawn.dtype != torch.float32:
        return drawn.uniform_(-bound, bound, generator=generator).to(target)
    seed, flat = int(torch.randint(1 << 62, (), generator=generator)), drawn.view(-1)

    def fill(first: int) -> None:  # a generator for each part: the numbers do not depend on the threads
        source = np.random.Generator(np.random.SFC64([seed, first]))
        source.random(dtype=np.float32, out=flat[first : first + CHUNK].numpy())

    with ThreadPoolExecutor() as threads:
        list(threads.map(fill, range(0, drawn.numel(), CHUNK)))
    return drawn.mul_(2.0 * bound).sub_(bound).to(target)


class FusedMlp(Connected):
    """inputs -> width (x depth hidden layers, ReLU) -> outputs, no biases. A `sink` takes the weights' gradients."""

    taken = ("sink",)
    sink: GradientSink | None = None

    def __init__(
        self, inputs: int, outputs: int, *, width: int, depth: int, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList()
        for fan_in, fan_out in itertools.pairwise([inputs, *[width] * depth, outputs]):
            bound = math.sqrt(6.0 / (fan_in + fan_out))
            self.weights.append(nn.Parameter(draw_uniform(fan_out, fan_in, bound=bound, generator=generator)))

    @property
    def matrices(self) -> list[Tensor]:
        """The weights, without what reading each out of a list of parameters costs."""
        own = self.weights._parameters
        return list(own.values()) if len(own) == len(self.weights) else list(self.weights)  # type: ignore[arg-type]

    def connect(self, buffers: Buffers) -> None:
        self.sink = buffers.sink(*self.matrices)

    def forward(self, inputs: Tensor, n_used: Tensor | None = None) -> Tensor:
        return fused_mlp(inputs, self.matrices, sink=self.sink, n_used=n_used)


class HashGrid(Connected):
    """A table of features per level; see `nerfturbo.ops.hash_encode` for the formula. `half` is a half copy that is
    read in place of the table and `sink` takes its gradient, where a trainer connects them. The `kept_levels` coarsest
    levels hold what the field begins as: a decay of the table leaves them alone."""

    taken = ("half", "sink")
    half: Tensor | None = None
    sink: GradientSink | None = None
    kept_levels: int = 0

    def __init__(self, layout: HashLayout, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.layout = layout
        self.table = nn.Parameter(draw_uniform(layout.n_entries, layout.n_features, bound=1e-4, generator=generator))

    @property
    def tables(self) -> tuple[nn.Parameter, ...]:
        return (self.table,)

    @property
    def level_sizes(self) -> list[int]:
        """Values of each level, in the order of the table."""
        return [level.size * self.layout.n_features for level in self.layout.levels]

    @property
    def values(self) -> Tensor:
        """The table in the precision in which it is read: the half copy's, else autocast's inside of that."""
        return autocast(self.table) if self.half is None else self.half

    @property
    def read(self) -> Tensor | None:
        """What is read in place of the table, without gradient; None where that is itself."""
        values = self.values
        return None if values is self.table else values.detach()

    def connect(self, buffers: Buffers) -> None:
        self.half, self.sink = buffers.half(self.table), buffers.sink(self.table)

    def forward(self, positions: Tensor, n_used: Tensor | None = None, *, footprints: Tensor | None = None) -> Tensor:
        """(n, n_levels * n_features) for positions (n, 3) in [0, 1]^3, or for regions (`hash_encode`)."""
        options = {"half": self.read, "sink": self.sink, "n_used": n_used}
        return hash_encode(positions, self.table, self.layout, footprints=footprints, **options)

    def for_export(self) -> nn.Module:
        """A module of plain torch, in fp32 on the CPU, that computes the same: for tracing."""
        return _PlainHashGrid(self)


class _PlainHashGrid(nn.Module):
    """A hash grid without kernels: all levels and corners at once, so that traced graphs stay small."""

    def __init__(self, grid: HashGrid) -> None:
        super().__init__()
        self.layout = grid.layout
        rows = [(level.scale, level.nodes, level.offset, level.size - 1, level.hashed) for level in grid.layout.levels]
        columns = (torch.tensor(column)[:, None] for column in zip(*rows, strict=True))  # (levels, 1) each
        self.scales, self.nodes, self.offsets, self.masks, self.hashed = columns
        self.corners = torch.tensor([[k & 1, (k >> 1) & 1, k >> 2] for k in range(8)])
        self.table = grid.table.detach().float().cpu().clone()

    def forward(self, positions: Tensor, n_used: Tensor | None = None) -> Tensor:
        place = positions.clamp(0.0, 1.0)[:, None, :] * self.scales + 0.5  # (n, levels, 3)
        cell = place.floor()
        fraction = (place - cell)[:, :, None, :]
        x, y, z = (cell.long()[:, :, None, :] + self.corners).unbind(-1)  # (n, levels, 8) each
        mixed = (x * PRIMES[0]) ^ (y * PRIMES[1]) ^ (z * PRIMES[2])
        dense = x + self.nodes * (y + self.nodes * z)
        entries = self.offsets + torch.where(self.hashed, mixed & self.masks, dense)
        weight = torch.where(self.corners.bool(), fraction, 1.0 - fraction).prod(-1)
        return (weight[..., None] * self.table[entries]).sum(2).flatten(1)


class HashDensity(nn.Module):
    """hash(x) -> one hidden layer -> density = exp(h - 1), over a box or, with a contraction about it, all of space.

    >>> density = HashDensity(Aabb.cube(1.0), HashLayout(n_levels=2, log2_entries=8, max_resolution=32))
    >>> density(torch.zeros(5, 3)).shape
    torch.Size([5])
    """

    def __init__(
        self,
        aabb: Aabb,
        layout: HashLayout | None = None,
        *,
        width: int = 16,
        contraction: Contraction = "none",
        seed: int = 0,
    ) -> None:
        super().__init__()
        layout = layout or HashLayout(n_levels=5, n_features=2, log2_entries=17, max_resolution=128)
        generator = torch.Generator().manual_seed(seed)
        self.aabb = aabb
        self.contraction: Contraction = contraction
        self.encoding = HashGrid(layout, generator=generator)
        self.density_net = FusedMlp(layout.n_outputs, 1, width=width, depth=1, generator=generator)

    @property
    def bytes_per_sample(self) -> int:
        """Of rendering, an estimate: a place, a position and the density on its way to a weight; on a GPU the encoding,
        which a CPU never holds whole."""
        values = self.encoding.values
        return 40 + self.encoding.layout.n_outputs * values.element_size() * values.is_cuda

    def forward(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        """(n,) >= 0 for world positions (n, 3)."""
        return self.unit_density(unit_positions(positions, self.aabb, self.contraction))

    def unit_density(self, positions: Tensor) -> Tensor:
        """(n,) >= 0 for positions (n, 3) in [0, 1]^3: the box, or with a contraction all of space."""
        if not torch.is_grad_enabled() and positions.dtype != torch.float64:
            inner, outer = self.density_net.matrices
            ahead = NgpDensity(self.aabb, self.encoding.values, self.encoding.layout, (inner, outer))
            return ahead.at(positions) * math.exp(DENSITY_BIAS)
        logits = self.density_net(self.encoding(positions))[:, 0]
        return truncated_exp(widen(logits) + DENSITY_BIAS)

    density = forward
