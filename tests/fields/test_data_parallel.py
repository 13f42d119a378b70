"""`nn.DataParallel` over a field: its replicas answer as the field does, trained or not."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import replicate

from nerfturbo.config import VanillaConfig
from nerfturbo.fields import InstantNGP, VanillaNeRF
from nerfturbo.training import Trainer
from nerfturbo.types import Aabb

from ..tiny import ball_scene, tiny_config

replicating = sys.modules[replicate.__module__]


def points(device: str = "cpu") -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    positions, directions = (torch.rand(64, 3, generator=draw) * 2.0 - 1.0 for _ in range(2))
    return positions.to(device), nn.functional.normalize(directions, dim=-1).to(device)


@pytest.fixture
def copies_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch broadcasts parameters between GPUs only; everything else of `replicate` runs as it is."""

    def broadcast(tensors: list[Tensor], devices: list[int], detach: bool = False) -> list[list[Tensor]]:
        return [[tensor.detach().clone() for tensor in tensors] for _ in devices]

    monkeypatch.setattr(replicating, "_broadcast_coalesced_reshape", broadcast)
    monkeypatch.setattr(replicating, "_get_device_index", lambda device, optional: device)


@pytest.mark.usefixtures("copies_on_the_cpu")
def test_replicas_of_a_trained_field_read_their_own_parameters() -> None:
    trainer = Trainer(tiny_config(steps=2), ball_scene())
    trainer.fit()
    field = trainer.model.field
    assert isinstance(field, InstantNGP)
    field.encoding.half = torch.full_like(field.encoding.table, torch.nan)  # on another device, say
    one, other = replicate(field, [0, 1])
    with torch.no_grad():
        found = [replica(*points()) for replica in (one, other)]
        field.encoding.half = None
        for rgb, density in found:
            assert torch.equal(rgb, field(*points())[0]) and torch.equal(density, field(*points())[1])
        other.encoding.table.zero_()
        assert not torch.equal(other(*points())[1], found[0][1]) and torch.equal(one(*points())[1], found[0][1])


@pytest.mark.usefixtures("copies_on_the_cpu")
def test_replicas_of_the_original_nerf() -> None:
    field = VanillaNeRF(Aabb.cube(1.5), VanillaConfig(width=16, depth=6))
    with torch.no_grad():
        for replica in replicate(field, [0, 1]):
            assert torch.equal(replica(*points())[0], field(*points())[0])


@pytest.mark.gpu
def test_data_parallel_on_a_gpu() -> None:
    trainer = Trainer(tiny_config(steps=2), ball_scene(), device="cuda")
    trainer.fit()
    field = trainer.model.field
    parallel = nn.DataParallel(field, device_ids=[0])
    (replica,) = replicate(field, [0])
    with torch.no_grad():
        rgb = parallel(*points("cuda"))[0]
        assert torch.equal(rgb, field(*points("cuda"))[0])
        assert (replica(*points("cuda"))[0] - rgb).abs().max() < 0.02  # fp32 beside the half copy
