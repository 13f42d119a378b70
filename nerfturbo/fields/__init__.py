"""Radiance fields: positions, directions (and time) to density and colour."""

from ..config import FactorConfig, FieldConfig, MotionConfig, VoxelConfig
from ..errors import InputError
from ..ops.positions import Contraction
from ..types import Aabb
from .anti_aliased import AntiAliasedNGP
from .density import HashDensity
from .dynamic import DeformedNeRF, TimeNeRF
from .factor import FactorField
from .field import Field, RayField
from .ngp import InstantNGP
from .ngp_time import DynamicNGP
from .vanilla import VanillaNeRF
from .voxels import VoxelGrid

__all__ = [
    "AntiAliasedNGP",
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

BuiltField = InstantNGP | VanillaNeRF | VoxelGrid | FactorField | DynamicNGP
_MOVING = {"tnerf": TimeNeRF, "dnerf": DeformedNeRF, "ngp-time": DynamicNGP}


def build_field(
    config: FieldConfig,
    aabb: Aabb,
    *,
    seed: int = 0,
    voxels: VoxelConfig | None = None,
    factor: FactorConfig | None = None,
    contraction: Contraction = "none",
    motion: MotionConfig | None = None,
) -> BuiltField:
    """The field a config describes, over a box or, with a contraction about it, all of space; `motion` is for those
    that follow a scene that moves."""
    if config.kind in _MOVING:
        field = _MOVING[config.kind](aabb, config, motion, seed=seed)
    else:
        field = _build(config, aabb, seed, voxels, factor)
    if contraction != "none":
        if not hasattr(field, "contraction") or isinstance(field, AntiAliasedNGP):
            hint = "--sampling.contraction none, or another field"
            raise InputError("sampling.contraction", f"none for the field {config.kind}", contraction, hint)
        setattr(field, "contraction", contraction)  # noqa: B010 - of those that have one
    return field


def _build(
    config: FieldConfig, aabb: Aabb, seed: int, voxels: VoxelConfig | None, factor: FactorConfig | None
) -> InstantNGP | VanillaNeRF | VoxelGrid | FactorField:
    if config.anti_alias and config.kind != "ngp":
        raise InputError("field.anti_alias", "a field of kind ngp", config.kind)
    if config.kind == "voxels":
        return VoxelGrid(aabb, config, voxels, seed=seed)
    if config.kind == "factor":
        return FactorField(aabb, config, factor, seed=seed)
    kinds = {"ngp": InstantNGP, "vanilla": VanillaNeRF}
    if config.anti_alias:
        return AntiAliasedNGP(aabb, config, seed=seed)
    return kinds[config.kind](aabb, config, seed=seed)
