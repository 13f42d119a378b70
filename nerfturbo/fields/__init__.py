"""Radiance fields: positions, directions (and time) to density and colour."""

from ..config import FieldConfig, VoxelConfig
from ..types import Aabb
from .field import Field, RayField
from .ngp import InstantNGP
from .vanilla import VanillaNeRF
from .voxels import VoxelGrid

__all__ = ["Field", "InstantNGP", "RayField", "VanillaNeRF", "VoxelGrid", "build_field"]


def build_field(
    config: FieldConfig, aabb: Aabb, *, seed: int = 0, voxels: VoxelConfig | None = None
) -> InstantNGP | VanillaNeRF | VoxelGrid:
    """The field a config describes."""
    if config.kind == "voxels":
        return VoxelGrid(aabb, config, voxels, seed=seed)
    kinds = {"ngp": InstantNGP, "vanilla": VanillaNeRF}
    return kinds[config.kind](aabb, config, seed=seed)
