"""Radiance fields: positions, directions (and time) to density and colour."""

from ..config import FieldConfig
from ..types import Aabb
from .field import Field, RayField
from .ngp import InstantNGP
from .vanilla import VanillaNeRF

__all__ = ["Field", "InstantNGP", "RayField", "VanillaNeRF", "build_field"]


def build_field(config: FieldConfig, aabb: Aabb, *, seed: int = 0) -> InstantNGP | VanillaNeRF:
    """The field a config describes."""
    kinds = {"ngp": InstantNGP, "vanilla": VanillaNeRF}
    return kinds[config.kind](aabb, config, seed=seed)
