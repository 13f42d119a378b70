"""Radiance fields: positions, directions (and time) to density and colour."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ..config import (
    CustomFieldConfig,
    DynamicNgpConfig,
    FactorConfig,
    FieldConfig,
    NgpConfig,
    VanillaConfig,
    VoxelConfig,
)
from ..errors import InputError
from ..ops.positions import Contraction
from ..types import Aabb
from .custom import CustomField, make_object, plug_in
from .density import HashDensity
from .factor import FactorField
from .field import Field, RayField
from .ngp import AntiAliasedNGP, InstantNGP
from .ngp_time import DynamicNGP
from .vanilla import DeformedNeRF, TimeNeRF, VanillaNeRF
from .voxels import VoxelGrid

__all__ = [
    "AntiAliasedNGP",
    "CustomField",
    "DeformedNeRF",
    "DynamicNGP",
    "FactorField",
    "Field",
    "HashDensity",
    "InstantNGP",
    "RayField",
    "TimeNeRF",
    "VanillaNeRF",
    "VoxelGrid",
    "build_field",
]

# A new method: its file, its config, and a line here. Each takes (aabb, config, seed=...).
BUILDERS: dict[type[Any], Callable[..., nn.Module]] = {
    NgpConfig: lambda aabb, config, seed: (AntiAliasedNGP if config.anti_alias else InstantNGP)(
        aabb, config, seed=seed
    ),
    DynamicNgpConfig: DynamicNGP,
    VanillaConfig: lambda aabb, config, seed: {"none": VanillaNeRF, "time": TimeNeRF, "deform": DeformedNeRF}[
        config.motion
    ](aabb, config, seed=seed),
    VoxelConfig: VoxelGrid,
    FactorConfig: FactorField,
    CustomFieldConfig: lambda aabb, config, seed: plug_in(make_object(config.source, aabb, seed=seed), aabb),
}


def build_field(config: FieldConfig, aabb: Aabb, *, seed: int = 0, contraction: Contraction = "none") -> Any:
    """The field a config describes, over a box or, with a contraction about it, all of space. A custom field is given
    world positions either way."""
    field = BUILDERS[type(config)](aabb, config, seed=seed)
    if contraction != "none" and not isinstance(field, CustomField):
        if not hasattr(field, "contraction"):
            hint = "--grid.contraction none, or another field"
            raise InputError("grid.contraction", f"none for this field ({type(field).__name__})", contraction, hint)
        setattr(field, "contraction", contraction)  # noqa: B010 - of those that have one
    return field
