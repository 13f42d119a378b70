"""Front-to-back rounds in plain torch: each marches all that is left of every live ray and takes its beginning."""

import torch
from torch import Tensor

from ...types import Aabb
from ..march import OccupancyBits
from ..march.reference import inverse_lattice, lattice, march
from . import COLOR, DEPTH, STEP, TAKEN, THROUGH, WINDOW, LiveRays, NextSamples, RoundLimits

MAX_EXPONENT = 15.0


def summarize_grid(grid: OccupancyBits) -> None:
    return None


def next_samples(live: LiveRays, *, rows: int, limits: RoundLimits, aabb: Aabb | None) -> NextSamples:
    n_live, device = int(live.n_live), live.state.device
    rays = live.places[live.side, :n_live].long()
    step, beyond = live.state[rays, STEP], torch.full((n_live, 2), float("inf"), device=device)
    beyond[:, 0] = lattice(live.rule, step)
    options = {"jitter": None, "limits": beyond, "capacity": None, "n_active": None}
    rest = march(live.origins[rays], live.directions[rays], live.grid, live.rule, **options)
    k, place = inverse_lattice(live.rule, rest.t_starts).round(), rest.ray_indices.long()
    first = rest.offsets[:-1].long()[place]  # of a round: so many of each ray, within a window of lattice steps
    rank = torch.arange(place.shape[0], device=device) - first
    keep = (rank < limits.of(live.state[rays, TAKEN])[place]) & (k - k[first] < WINDOW)
    counts = torch.zeros(n_live, dtype=torch.int64, device=device).index_add_(0, place, keep.long())
    counts = torch.where(torch.cumsum(counts, 0) <= rows, counts, 0)  # who does not fit waits
    waits = (rest.packed_info[:, 1] > 0) & (counts == 0)
    keep &= ~waits[place]
    n = int(keep.sum())

    last = torch.full((n_live,), -1.0, device=device).scatter_reduce_(0, place[keep], k[keep], "amax")
    live.state[rays, STEP] = torch.where(waits, live.state[rays, STEP], torch.where(counts > 0, last + 1.0, -1.0))
    live.state[rays, TAKEN] += counts
    spans = torch.zeros(2, live.state.shape[0], dtype=torch.int32, device=device)
    spans[0, :n_live], spans[1, :n_live] = torch.cumsum(counts, 0) - counts, counts
    live.counts[2] = n

    owner = rays[place[keep]]
    t_starts, t_ends = rest.t_starts[keep], rest.t_ends[keep]
    positions = live.origins[owner] + live.directions[owner] * ((t_starts + t_ends) * 0.5)[:, None]
    if aabb is not None:
        positions = aabb.normalize(positions)
    return NextSamples(positions, t_starts, t_ends, owner.int(), spans, live.counts[2])


def absorb_samples(live, samples, density, rgb, *, early_stop_eps, alpha_thre, logits) -> None:
    n_live = int(live.n_live)
    rays = live.places[live.side, :n_live].long()
    first, count = samples.spans[:, :n_live].long()
    density, rgb = density.float(), rgb.float()
    if logits:
        density, rgb = torch.exp(density.clamp(max=MAX_EXPONENT)), torch.sigmoid(rgb)
    state = live.state[rays]
    for j in range(int(count.max()) if n_live else 0):
        row = torch.where(j < count, first + j, 0)
        t0, t1 = samples.t_starts[row], samples.t_ends[row]
        decay = torch.expm1(-density[row] * (t1 - t0))  # -alpha
        lit = (j < count) & (-decay >= alpha_thre) & (state[:, THROUGH] >= early_stop_eps)
        decay = torch.where(lit, decay, 0.0)
        weight = -decay * state[:, THROUGH]
        state[:, THROUGH] += decay * state[:, THROUGH]
        state[:, DEPTH] += weight * ((t0 + t1) * 0.5)
        state[:, COLOR : COLOR + live.channels] += weight[:, None] * torch.where(lit[:, None], rgb[row], 0.0)
    live.state[rays] = state
    survivors = rays[(state[:, STEP] >= 0.0) & (state[:, THROUGH] >= early_stop_eps)]
    live.places[1 - live.side, : survivors.shape[0]] = survivors.int()
    live.counts[1 - live.side] = survivors.shape[0]
    live.counts[2] = 0


def finish_rays(live: LiveRays, background: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    through, depth = live.state[:, THROUGH], live.state[:, DEPTH]
    rgb = live.state[:, COLOR : COLOR + live.channels]
    if background is not None:
        rgb = rgb + through[:, None] * background
    opacity = 1.0 - through
    return rgb.clamp(0.0, 1.0), opacity, depth / opacity.clamp(min=1e-6)
