"""What changes with what training rays see: shapes of fields that refine themselves, and cells that no image shows. A
change has four parts, the same on every rank and in every trainer: rays of the training cameras say where in space
anything contributes to a pixel; the field keeps that and subdivides it; the optimizer's moments are carried over by the
same interpolation as the values; what was recorded is recorded anew. All of it counts as training time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..data.batches import PixelSampler
from ..data.cameras import Cameras
from ..fields.field import Carry, field_part, is_adaptive
from ..ops.composite import composite, visibility
from ..ops.march import pack_bits, unpack_bits
from ..ops.positions import sample_positions
from ..ops.random import Stream, random_uniform
from ..rendering.model import NerfModel
from ..rendering.render import field_functions, ray_marching
from ..sampling.geometry import cells_with_points, dilate
from ..types import PackedSamples, Rays
from .distributed import Team, split_evenly

RAYS_AT_ONCE = 1 << 14
REHEARSED = {"cpu": 8, "cuda": 512}  # rays
MARKED = {"cpu": 1 << 16, "cuda": 1 << 21}  # rays of the training cameras that are looked along before a field changes


def is_due(model: NerfModel, progress: float, step: int) -> bool:
    """Whether the model's field is to change after `step` steps and this share of the run."""
    return is_adaptive(model.field) and model.field.refinement_due(progress, step)


@torch.no_grad()
def refine_field(model: NerfModel, cameras: Cameras, *, step: int, team: Team | None = None) -> Carry:
    """Let the field change; the result carries what belongs to its parameters over to the new shapes."""
    field, team = model.field, team or Team()
    marks = field.new_marks()
    if marks.numel() == 0:  # nothing of it depends on what is seen
        return field.refine(marks)
    cameras = cameras.to(model.device)
    share = split_evenly(step, team.rank, team.world, MARKED.get(model.device.type, MARKED["cpu"]))
    for first in range(share.first, share.first + share.count, RAYS_AT_ONCE):
        mark_rays(model, cameras, marks, step=step, first=first, n=min(RAYS_AT_ONCE, share.first + share.count - first))
    team.max_reduce(marks)
    return field.refine(marks)


def _march(model: NerfModel, rays: Rays) -> PackedSamples:
    """Along these rays, as training and rendering march the model's grid."""
    planes, cone = model.bounds, getattr(model.config.sampler, "cone_angle", 0.0)
    return ray_marching(rays, model.grid, near_plane=planes.near, far_plane=planes.far, cone_angle=cone)


def mark_rays(model: NerfModel, cameras: Cameras, marks: Tensor, *, step: int, first: int, n: int) -> None:
    """Raise the marks by the weights of samples along `n` random rays of the cameras."""
    field, cameras = model.field, cameras.to(model.device)
    options = {"seed": model.config.train.seed, "stream": Stream.REFINEMENT, "step": step, "first": first}
    draw = random_uniform(n, columns=3, device=model.device, **options)
    index = (draw[:, 0] * len(cameras)).long().clamp(max=len(cameras) - 1)
    pixels = draw[:, 1:] * cameras.size[index]
    rays = cameras.rays(index, pixels[:, 0], pixels[:, 1])
    samples = _march(model, rays)
    positions = sample_positions(rays.origins, rays.directions, samples)
    density = field.density(positions)
    field.mark(marks, positions, composite(density, density.new_zeros(density.shape[0], 1), samples).weights)


def match_shapes(model: torch.nn.Module, tensors: Mapping[str, Tensor], prefix: str = "model.") -> bool:
    """Give an adaptive field the shapes of a saved state; whether anything changed."""
    field: Any = getattr(model, "field", None)
    return is_adaptive(field) and field.match_shapes(field_part(tensors, f"{prefix}field."))


def share_shapes(model: NerfModel, team: Team) -> bool:
    """Every rank takes the shapes of rank 0, which alone may have read a checkpoint; whether anything changed here."""
    field = model.field
    if not is_adaptive(field) or team.alone:
        return False
    names = sorted(like := field.state_dict())
    table = torch.full((len(names), 4), -1, dtype=torch.int64, device=model.device)
    for row, name in enumerate(names):
        table[row, : like[name].dim()] = torch.tensor(like[name].shape, dtype=torch.int64)
    team.copy_from_first([table])
    shapes = [[side for side in row if side >= 0] for row in table.tolist()]
    state = {n: torch.empty(s, dtype=like[n].dtype, device="meta") for n, s in zip(names, shapes, strict=True)}
    return field.match_shapes(state)


# --- what no image shows ----------------------------------------------------------------------------------------------
# A field is free to put anything where no training pixel can tell, and a new view shows it. So random training pixels
# are marched once more: cells where no ray with light meets anything, nor next to it, become empty. What the grid has
# learned stays in `thickness`: a resumed run begins from it.

LIGHT = 0.1  # of a ray's light must still be there where it shows a cell
ALPHA = 0.01  # and the sample at least so opaque, or half as much as the mean of a grid that is all thin
CULL_RAYS = {"cpu": 1 << 17, "cuda": 1 << 21}
CULL_RAYS_AT_ONCE, CULL_SAMPLES = 1 << 13, 8  # at least so many rays, or one for each so many samples of a batch
CULL_REHEARSED = 256  # rays through a grid that is still full
PROBED = 1 << 10  # rays that say how many samples all of them would march
FIRST_DRAW = 1 << 30  # draws of pixels that no training step makes


@torch.no_grad()
def shown_cells(model: NerfModel, pixels: PixelSampler, *, n_rays: int, at_once: int) -> Tensor:
    """(levels, resolution, resolution, resolution) bool: cells that some of `n_rays` random training pixels show."""
    grid = model.grid
    limits = {"early_stop_eps": LIGHT, "alpha_thre": grid.alpha_threshold(ALPHA)}
    levels, r = grid.config.levels, grid.config.resolution
    shown = torch.zeros(levels, r, r, r, dtype=torch.bool, device=model.device)
    for draw in range(-(-n_rays // at_once)):
        rays = pixels.draw(FIRST_DRAW + draw, at_once).rays
        rays = rays if model.photos is None else model.photos.rays(rays)
        samples = _march(model, rays)
        sigma_fn, _ = field_functions(model.field, rays)
        density = sigma_fn(samples.t_starts, samples.t_ends, samples.ray_indices)
        keep = visibility(density, samples, **limits)[: int(samples.n_samples)]
        ray, middle = (value[: keep.shape[0]][keep] for value in (samples.ray_indices.long(), samples.midpoints()))
        shown |= cells_with_points(rays.origins[ray] + rays.directions[ray] * middle[:, None], grid.aabb, r, levels)
    return shown


def culls(model: NerfModel) -> bool:
    """Whether the config asks for it, and a grid decides what is rendered."""
    return model.config.grid.cull_unseen and model.config.grid.enabled and model.marches


@torch.no_grad()
def cull_unseen(model: NerfModel, pixels: PixelSampler, steps: int | None = None) -> float:
    """Empty the cells of the grid that no training picture shows; returns their share of the occupied ones. None
    after so few `steps` that looking would take longer than they did."""
    grid, n_pixels = model.grid, int(pixels.scene.cameras.size.long().prod(-1).sum())
    n_rays = min(CULL_RAYS.get(model.device.type, CULL_RAYS["cpu"]), 2 * n_pixels)
    if steps is not None:  # a short run, whose grid is still full, would go on for minutes to hide little
        probe = min(PROBED, n_rays)
        marched = int(_march(model, pixels.draw(FIRST_DRAW, probe).rays).n_samples)
        if marched * n_rays > probe * steps * model.config.train.batch_samples:
            return 0.0
    at_once = max(CULL_RAYS_AT_ONCE, model.config.train.batch_samples // CULL_SAMPLES)
    shown = shown_cells(model, pixels, n_rays=n_rays, at_once=min(at_once, n_rays))
    shown, occupied = dilate(shown, 1).reshape(-1), unpack_bits(grid.bits).bool()
    grid.bits.copy_(pack_bits(occupied & shown))
    return 1.0 - float((occupied & shown).sum() / occupied.sum().clamp(min=1))


def recall_culled(model: NerfModel, step: int) -> None:
    """Training that is taken up again goes on with all that was learned, whatever an earlier end has emptied."""
    grid = model.grid
    if culls(model) and step > 0:
        grid.recall(guard=step <= grid.warmup_steps + grid.config.update_every)


@contextmanager
def unseen_culled(model: NerfModel, pixels: PixelSampler, steps: int) -> Iterator[None]:
    """Inside, the grid is as it would be if training ended here."""
    before = model.grid.bits.clone()
    if culls(model):
        cull_unseen(model, pixels, steps)
    try:
        yield
    finally:
        model.grid.bits.copy_(before)


@torch.no_grad()
def rehearse(model: NerfModel, pixels: PixelSampler) -> None:
    """Compile what a change and the end of training run, before the clock starts: nothing is changed."""
    if is_due(model, 1.0, 1 << 40) and (marks := model.field.new_marks()).numel():
        mark_rays(model, pixels.scene.cameras, marks, step=0, first=0, n=REHEARSED.get(model.device.type, 8))
    if culls(model) and model.device.type != "cpu":
        shown_cells(model, pixels, n_rays=CULL_REHEARSED, at_once=CULL_REHEARSED)
