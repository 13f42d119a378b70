"""Fine-tuning: the baked values and the deferred network learn to give what the field gives, ray by ray. Values are
rounded to bytes on the way (straight through in the backward), so that what is learned is what is stored."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...config import GridConfig
from ...ops._dispatch import resolve
from ...ops.adam import AdamRule, AdamState, adam_update
from ...ops.composite import composite, visibility
from ...ops.march import StepRule, march
from ...ops.packed import compact
from ...sampling.grid import OccupancyGrid
from .. import Progress, paced, quiet
from .baked import DENSITY, LAST_LIGHT, N_BASE, STEP, DeferredNetwork, decode_density, meant_features, shade
from .lattice import SparseBlocks
from .teacher import RayPool

REPORT_EVERY = 20  # steps
NETWORK_RULE = AdamRule(eps=1e-8)
FINEST_GRID = 256  # cells per axis; of a scene without an end half of it


@dataclass(frozen=True)
class TuneSettings:
    """How long, and how much at a time."""

    steps: int
    rays: int
    seconds: float
    lr: float = 1e-2
    network_lr: float = 5e-3
    final_lr_fraction: float = 0.05
    seed: int = 0


def _kernels(tensor: Tensor) -> Any:
    """Those of numba, where they are to be used."""
    if resolve(tensor) != "cpu":
        return None
    from . import cpu

    return cpu


def gather(blocks: SparseBlocks, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(n, 8) vertices around positions and their weights, by the fastest way there is."""
    kernels = _kernels(positions)
    return blocks.gather(positions) if kernels is None else kernels.gather(blocks, positions)


class Trilinear(torch.autograd.Function):
    """sum_k weights[i, k] * byte(values[ids[i, k]]) for i of many: (n, channels). The gradient, that of values which
    are not rounded, is added to `sink`, a tensor like the values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ids: Tensor, weights: Tensor, sink: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(ids, weights)
        ctx.sink = sink
        if (kernels := _kernels(values)) is not None:
            return kernels.forward(values, ids, weights)
        out = values.new_zeros(ids.shape[0], values.shape[1])
        for k in range(ids.shape[1]):
            rows = values.index_select(0, ids[:, k]).clamp_(0.0, 1.0).mul_(255.0).add_(0.5).floor_().mul_(1.0 / 255.0)
            out.addcmul_(rows, weights[:, k : k + 1])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:  # type: ignore[override]
        ids, weights = ctx.saved_tensors
        if (kernels := _kernels(grad)) is not None:
            kernels.backward(grad, ids, weights, ctx.sink)
        else:
            for k in range(ids.shape[1]):
                ctx.sink.index_add_(0, ids[:, k], grad * weights[:, k : k + 1])
        return None, None, None, None  # values (in the sink), ids, weights, sink


def marching_grid(blocks: SparseBlocks) -> OccupancyGrid:
    """An occupancy grid over the vertices, finer than blocks, so that samples fall only where something is. Its cells
    are no smaller than the lattice's, so that one more all around covers every cell with a kept vertex."""
    lattice = blocks.lattice
    resolution = max(4, min(FINEST_GRID >> (lattice.levels > 1), *lattice.cells) // 4 * 4)
    config = GridConfig(resolution=resolution, levels=lattice.levels)
    positions = lattice.vertex_positions(blocks.vertices)
    return OccupancyGrid.from_points(positions, lattice.box, config, step_size=lattice.voxel * STEP, margin=1)


def tune(
    blocks: SparseBlocks, values: Tensor, pool: RayPool, settings: TuneSettings, *, progress: Progress = quiet
) -> tuple[DeferredNetwork | None, int, tuple[float, ...]]:
    """Improve `values` in place. Returns the network that goes with them, None without features; the number of steps;
    and some of their losses, at even distances."""
    generator = torch.Generator().manual_seed(settings.seed)
    network = DeferredNetwork(generator).to(values.device) if values.shape[1] > N_BASE else None
    learner = _Learner(blocks, values, network, pool)
    step, losses = 0, []
    for step, share in enumerate(paced(settings.seconds, settings.steps, progress), 1):
        loss = learner.step(settings, generator, min(1.0, step / 10) * math.pow(settings.final_lr_fraction, share))
        if step % REPORT_EVERY == 1:
            losses.append(loss.item())
    values.clamp_(0.0, 1.0)
    return network, step, tuple(losses)


class _Learner:
    """What stays from step to step."""

    def __init__(self, blocks: SparseBlocks, values: Tensor, network: DeferredNetwork | None, pool: RayPool) -> None:
        self.blocks, self.values, self.network, self.pool = blocks, values, network, pool
        lattice = blocks.lattice
        # Steps that grow with distance about as the cells of coarser levels do.
        cone_angle = 0.0 if lattice.levels == 1 else lattice.voxel / max(lattice.half)
        self.grid = marching_grid(blocks)
        away = float((pool.cameras.positions - values.new_tensor(lattice.center)).norm(dim=-1).max())
        far = away + lattice.box.diagonal * 2.0 ** (lattice.levels - 1)
        self.rule = StepRule(lattice.voxel * STEP, 0.0, far, cone_angle)
        self.sink = torch.zeros_like(values)
        self.state, self.lr = AdamState.of(values), torch.zeros((), device=values.device)
        self.adam = AdamRule(betas=(0.9, 0.99), eps=1e-12, skip_untouched=True)
        weights = [] if network is None else network.weights
        self.network_states = [(weight, AdamState.of(weight, self.state.step)) for weight in weights]

    def step(self, settings: TuneSettings, generator: torch.Generator, fade: float) -> Tensor:
        """One batch of rays; `fade` is what is left of the learning rates."""
        device = self.values.device
        chosen = torch.randint(len(self.pool), (settings.rays,), generator=generator).to(device)
        drawn = torch.rand(settings.rays, 4, generator=generator).to(device)
        loss = self.loss(chosen, drawn[:, 3].contiguous(), drawn[:, :3])
        loss.backward()
        self.sink[-1].zero_()  # the empty vertex
        self.lr.fill_(settings.lr * fade)
        adam_update(self.values, self.sink, self.state, self.lr, rule=self.adam)
        self.lr.fill_(settings.network_lr * fade)
        for weight, state in self.network_states:
            assert weight.grad is not None
            adam_update(weight, weight.grad, state, self.lr, rule=NETWORK_RULE)
        self.state.step.add_(1)
        return loss.detach()

    def loss(self, chosen: Tensor, jitter: Tensor, behind: Tensor) -> Tensor:
        """Mean squared error over rays of the pool, over a background of their own."""
        rays, network = self.pool.rays(chosen), self.network
        samples = march(rays.origins, rays.directions, self.grid.occupancy, self.rule, jitter=jitter)
        positions = samples.positions(rays)
        ids, weights = gather(self.blocks, positions)
        size = self.blocks.lattice.cell_size(positions)
        code = Trilinear.apply(self.values[:, DENSITY : DENSITY + 1].contiguous(), ids, weights, self.sink)[:, 0]
        seen = visibility(decode_density(code, size), samples, early_stop_eps=LAST_LIGHT, alpha_thre=1e-4)
        samples, ids, weights = compact(samples, seen), ids[seen], weights[seen]
        found = Trilinear.apply(self.values.detach().requires_grad_(True), ids, weights, self.sink)
        density = decode_density(found[:, DENSITY], size[seen] if isinstance(size, Tensor) else size)
        carried = found[:, :3]
        if network is not None:
            carried = torch.cat([carried, meant_features(found[:, N_BASE:])], dim=1)
        out = composite(density, carried, samples)
        color = shade(out.rgb, out.opacity, rays.directions, network) + (1.0 - out.opacity)[:, None] * behind
        truth = self.pool.colors[chosen].float()
        return torch.nn.functional.mse_loss(color, truth[:, :3] + (1.0 - truth[:, 3:]) * behind)
