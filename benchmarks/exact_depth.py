"""Depths of the built-in scenes, whose surfaces are known exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from nerfturbo.data.keypoints import Keypoints
from nerfturbo.data.scene import Scene
from nerfturbo.types import Rays
from scene_distance import signed_distance

HIT, FAR, MAX_STEPS = 1e-4, 12.0, 256  # a ray is there; beyond everything; rays that graze something take many steps


def ray_distance(name: str, rays: Rays) -> Tensor:
    """(n,) how far along each ray the surface of a built-in scene begins; inf where the ray passes everything.

    Sphere tracing: nothing is nearer than the distance, so a ray may go on that far.
    """
    origins, directions = rays.origins.double(), rays.directions.double()
    travelled, found = origins.new_zeros(len(rays)), origins.new_full((len(rays),), torch.inf)
    going = torch.arange(len(rays))
    for _ in range(MAX_STEPS):
        step = signed_distance(name, origins[going] + travelled[going, None] * directions[going])
        travelled[going] += step
        there = step < HIT
        found[going[there]] = travelled[going[there]]
        going = going[~there & (travelled[going] < FAR)]
        if len(going) == 0:
            break
    return found.to(rays.origins.dtype)


def exact_keypoints(scene: Scene, n: int, *, seed: int) -> Keypoints:
    """Of a built-in scene, whose surface is known: `n` random places of each picture, less those that show nothing."""
    photo = torch.arange(len(scene)).repeat_interleave(n)
    place = torch.rand(len(photo), 2, generator=torch.Generator().manual_seed(seed)) * scene.cameras.size[photo]
    rays = scene.cameras.rays(photo, place[:, 0], place[:, 1])
    distances = ray_distance(scene.name, rays)
    hits = distances.isfinite()
    return Keypoints(rays[hits], distances[hits], torch.ones(int(hits.sum())))
