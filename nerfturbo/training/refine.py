"""Fields that change their shapes while they train: when, by what they see, and what must follow.

A change has four parts, the same on every rank and in every trainer: rays of the training cameras say where in space
anything contributes to a pixel; the field keeps that and subdivides it; the optimizer's moments are carried over by the
same interpolation as the values; what was recorded is recorded anew. All of it counts as training time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..data.cameras import Cameras
from ..fields.field import AdaptiveField, Carry, field_part
from ..ops.composite import composite
from ..ops.positions import sample_positions
from ..ops.random import Stream, random_uniform
from ..rendering.model import NerfModel
from ..rendering.render import ray_marching
from .distributed import Team, split_evenly

RAYS_AT_ONCE = 1 << 14
REHEARSED = {"cpu": 8, "cuda": 512}  # rays


def is_due(model: NerfModel, progress: float, step: int) -> bool:
    """Whether the model's field is to change after `step` steps and this share of the run."""
    return isinstance(model.field, AdaptiveField) and model.field.refinement_due(progress, step)


@torch.no_grad()
def refine_field(model: NerfModel, cameras: Cameras, *, step: int, team: Team | None = None) -> Carry:
    """Let the field change; the result carries what belongs to its parameters over to the new shapes."""
    field, team = model.field, team or Team()
    assert isinstance(field, AdaptiveField)
    marks = field.new_marks()
    if marks.numel() == 0:  # nothing of it depends on what is seen
        return field.refine(marks)
    cameras = cameras.to(model.device)
    share = split_evenly(step, team.rank, team.world, model.config.voxels.prune_rays)
    for first in range(share.first, share.first + share.count, RAYS_AT_ONCE):
        mark_rays(model, cameras, marks, step=step, first=first, n=min(RAYS_AT_ONCE, share.first + share.count - first))
    team.max_reduce(marks)
    return field.refine(marks)


def rehearse(model: NerfModel, cameras: Cameras) -> None:
    """Compile what a change runs, before the clock starts: nothing is changed."""
    if not is_due(model, 1.0, 1 << 40) or not isinstance(model.field, AdaptiveField):
        return
    marks = model.field.new_marks()
    if marks.numel():
        with torch.no_grad():
            mark_rays(model, cameras, marks, step=0, first=0, n=REHEARSED.get(model.device.type, 8))


def mark_rays(model: NerfModel, cameras: Cameras, marks: Tensor, *, step: int, first: int, n: int) -> None:
    """Raise the marks by the weights of samples along `n` random rays of the cameras."""
    field, settings, seed = model.field, model.settings, model.config.train.seed
    assert isinstance(field, AdaptiveField)
    draw = random_uniform(
        n, columns=3, seed=seed, stream=Stream.REFINEMENT, step=step, first=first, device=model.device
    )
    cameras = cameras.to(model.device)
    index = (draw[:, 0] * len(cameras)).long().clamp(max=len(cameras) - 1)
    pixels = draw[:, 1:] * cameras.size[index]
    rays = cameras.rays(index, pixels[:, 0], pixels[:, 1])
    samples = ray_marching(
        rays,
        model.grid,
        near_plane=settings.near_plane,
        far_plane=settings.far_plane,
        cone_angle=settings.cone_angle,
    )
    positions = sample_positions(rays.origins, rays.directions, samples)
    density = field.density(positions)
    weights = composite(density, density.new_zeros(density.shape[0], 1), samples).weights
    field.mark(marks, positions, weights)


def match_shapes(model: torch.nn.Module, tensors: Mapping[str, Tensor], prefix: str = "model.") -> bool:
    """Give an adaptive field the shapes of a saved state; whether anything changed."""
    field = getattr(model, "field", None)
    if not isinstance(field, AdaptiveField):
        return False
    return field.match_shapes(field_part(tensors, f"{prefix}field."))


def share_shapes(model: NerfModel, team: Team) -> bool:
    """Every rank takes the shapes of rank 0, which alone may have read a checkpoint; whether anything changed here."""
    field = model.field
    if not isinstance(field, AdaptiveField) or team.alone:
        return False
    names = sorted(field.state_dict())
    table = torch.full((len(names), 4), -1, dtype=torch.int64, device=model.device)
    for row, name in enumerate(names):
        shape = field.state_dict()[name].shape
        table[row, : len(shape)] = torch.tensor(shape, dtype=torch.int64)
    team.copy_from_first([table])
    shapes = [[side for side in row if side >= 0] for row in table.tolist()]
    like = field.state_dict()
    state = {n: torch.empty(s, dtype=like[n].dtype, device="meta") for n, s in zip(names, shapes, strict=True)}
    return field.match_shapes(state)
