"""`torch.autocast` around a bare field, in a loop of one's own: every field computes as if it were set to that type."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nerfturbo import config as configs
from nerfturbo.fields import HashDensity, build_field
from nerfturbo.fields.field import read_halves
from nerfturbo.ops import use_backend
from nerfturbo.ops.hash_encode import HashLayout
from nerfturbo.types import Aabb

BOX = Aabb.cube(1.0)
NGP = configs.NgpConfig(4, 2, 10, 64, 16)
VANILLA = configs.VanillaConfig(width=32, depth=6)
FIELDS: dict[str, Any] = {
    "ngp": NGP,
    "ngp anti-aliased": replace(NGP, anti_alias=6),
    "ngp-time": configs.DynamicNgpConfig(4, 2, 10, 64, 16, motion_log2_entries=8, motion_resolution=8),
    "vanilla": VANILLA,
    "vanilla checkpointed": VANILLA,
    "tnerf": replace(VANILLA, motion="time"),
    "dnerf": replace(VANILLA, motion="deform"),
    "voxels": configs.VoxelConfig((8, 16), (0.5,)),
    "factor": configs.FactorConfig((8, 16), (0.5,)),
}


def made(name: str, device: str = "cpu") -> torch.nn.Module:
    """A field with something in it: tables near zero would round to nothing."""
    field = build_field(FIELDS[name], BOX)
    if "checkpointed" in name:
        field.checkpointing = True
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in field.parameters():
            if name != "dnerf" and (parameter.abs().max() < 1e-2 or name == "voxels"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return field.to(device)


def asked(field: Any, points: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Values and gradients of both methods."""
    positions, directions, times = points
    field.zero_grad()
    rgb, density = field(positions, directions, times)
    found = {"rgb": rgb, "density": density, "density alone": field.density(positions, times)}
    return {name: value.detach() for name, value in found.items()} | {"loss": (rgb.float().sum() + density.sum())}


def everything(field: Any, points: tuple[Tensor, ...], autocast: torch.dtype | None) -> dict[str, Tensor]:
    kind = points[0].device.type
    with torch.autocast(kind, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        found = asked(field, points)
        with torch.no_grad():
            quiet = asked(field, points)
    found.pop("loss").backward()
    quiet.pop("loss")
    gradients = {name: value.grad.clone() for name, value in field.named_parameters() if value.grad is not None}
    return found | {f"{name} without gradient": value for name, value in quiet.items()} | gradients


def points_on(device: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    positions = torch.rand(64, 3, generator=generator) * 2.0 - 1.0
    directions = torch.nn.functional.normalize(torch.randn(64, 3, generator=generator), dim=-1)
    return tuple(value.to(device) for value in (positions, directions, torch.rand(64, generator=generator)))


def check(name: str, device: str, dtype: torch.dtype) -> None:
    field, points = made(name, device), points_on(device)
    full, cast = everything(field, points, None), everything(field, points, dtype)
    read_halves(field, dtype)
    half = everything(field, points, None)
    assert cast.keys() == full.keys() == half.keys()
    for key, value in half.items():
        assert cast[key].dtype == value.dtype and torch.isfinite(cast[key]).all(), key
        limit = 1e-6 if device == "cpu" else 2e-2 * float(value.abs().max())  # atomic sums in any order on a GPU
        assert torch.allclose(cast[key], value, rtol=1e-5, atol=limit), key
    assert not torch.equal(cast["rgb"], full["rgb"])
    assert torch.allclose(cast["rgb"].float(), full["rgb"].float(), atol=0.05)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", FIELDS)
def test_autocast_is_the_field_set_to_half_precision(name: str, backend: Any) -> None:
    with use_backend(backend):
        check(name, "cpu", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FIELDS)
def test_autocast_on_a_gpu_too(name: str, dtype: torch.dtype) -> None:
    with use_backend("triton"):
        check(name, "cuda", dtype)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_density_of_proposals_follows_too(backend: Any) -> None:
    torch.manual_seed(0)
    field, points = HashDensity(BOX, HashLayout(2, 2, 8, 16, 32), width=16), points_on("cpu")[0]
    with torch.no_grad(), use_backend(backend):
        field.encoding.table.normal_()
        full = field.density(points)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = field.density(points)
        read_halves(field, torch.bfloat16)
        assert torch.equal(cast, field.density(points)) and not torch.equal(cast, full)
