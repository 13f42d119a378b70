"""Gradients of what is close to the cameras, made as small as their share of the pictures.

Space right before a camera is crowded with samples of that one camera: they get its whole gradient at every step, while
surfaces further away share theirs among few. So floaters grow there first. Scaling gradients, not values, by
min(1, (t / distance)^2) undoes the crowding.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import InputError
from .losses import weigh_gradient
from .render import RgbSigmaFn


def near_weights(t_starts: Tensor, t_ends: Tensor, distance: float) -> Tensor:
    """(n,) min(1, (t / distance)^2) at the samples' middles.

    >>> import torch
    >>> near_weights(torch.tensor([0.0, 0.5, 3.0]), torch.tensor([0.0, 0.5, 3.0]), 1.0).tolist()
    [0.0, 0.25, 1.0]
    """
    if not distance > 0.0:
        raise InputError("distance", "a length > 0", str(distance))
    return ((t_starts + t_ends) * (0.5 / distance)).square().clamp(max=1.0)


def scale_near_gradients(rgb_sigma_fn: RgbSigmaFn, distance: float) -> RgbSigmaFn:
    """The same function of samples; gradients to it shrink nearer than `distance`. For `volume_rendering`."""

    def scaled(t_starts: Tensor, t_ends: Tensor, ray_indices: Tensor) -> tuple[Tensor, Tensor]:
        rgb, density = rgb_sigma_fn(t_starts, t_ends, ray_indices)
        weights = near_weights(t_starts, t_ends, distance)
        return weigh_gradient(rgb, weights), weigh_gradient(density[:, None], weights)[:, 0]

    return scaled
