"""Radiance fields: positions, directions (and time) to density and colour."""

from collections.abc import Callable
from typing import Any

from torch import nn

from .. import config as configs
from ..errors import InputError
from ..ops.positions import Contraction
from ..types import Aabb
from .custom import CustomField, make_object, plug_in
from .factor import FactorField
from .field import Field
from .ngp import AntiAliasedNGP, InstantNGP
from .ngp_time import DynamicNGP
from .parts import HashDensity
from .vanilla import DeformedNeRF, TimeNeRF, VanillaNeRF
from .voxels import VoxelGrid

__all__ = ["AntiAliasedNGP", "CustomField", "DeformedNeRF", "DynamicNGP", "FactorField", "Field", "HashDensity"]
__all__ += ["InstantNGP", "TimeNeRF", "VanillaNeRF", "VoxelGrid", "build_field"]

MOTIONS = {"none": VanillaNeRF, "time": TimeNeRF, "deform": DeformedNeRF}
# A new method: its file, its config, and a line here. Each takes (aabb, config, seed=...).
BUILDERS: dict[type[Any], Callable[..., nn.Module]] = {
    configs.NgpConfig: lambda aabb, own, seed: (AntiAliasedNGP if own.anti_alias else InstantNGP)(aabb, own, seed=seed),
    configs.DynamicNgpConfig: DynamicNGP,
    configs.VanillaConfig: lambda aabb, own, seed: MOTIONS[own.motion](aabb, own, seed=seed),
    configs.VoxelConfig: VoxelGrid,
    configs.FactorConfig: FactorField,
    configs.CustomFieldConfig: lambda aabb, own, seed: plug_in(make_object(own.source, aabb, seed=seed), aabb),
}


def build_field(config: configs.FieldConfig, aabb: Aabb, *, seed: int = 0, contraction: Contraction = "none") -> Any:
    """A config's field, over a box or, contracted about it, all of space. A custom one takes world positions."""
    field = BUILDERS[type(config)](aabb, config, seed=seed)
    if contraction != "none" and not isinstance(field, CustomField):
        if not hasattr(field, "contraction"):
            hint = "--grid.contraction none, or another field"
            raise InputError("grid.contraction", f"none for this field ({type(field).__name__})", contraction, hint)
        setattr(field, "contraction", contraction)  # noqa: B010 - of those that have one
    return field
