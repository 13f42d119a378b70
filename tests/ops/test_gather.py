"""Sums into rows come out the same in every run, however many threads add them up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nerfturbo.config import FactorConfig, VanillaConfig, VoxelConfig
from nerfturbo.ops import use_backend
from nerfturbo.ops._dispatch import Backend
from nerfturbo.ops.packed import take_rows
from nerfturbo.training.trainer import Trainer

from ..tiny import ball_scene, tiny_config


@pytest.mark.parametrize("shape", [(700,), (700, 3), (700, 48)], ids=str)
def test_values_and_gradients_are_those_of_indexing(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    rows = torch.randint(0, 700, (5000,), generator=generator)
    weights = torch.randn(5000, *shape[1:], generator=generator, dtype=torch.float64)
    own, truth = take_rows(values, rows), values[rows]
    assert torch.equal(own, truth)
    (own_grad,) = torch.autograd.grad((own * weights).sum(), values)
    (grad,) = torch.autograd.grad((truth * weights).sum(), values)
    assert torch.allclose(own_grad, grad, rtol=1e-12, atol=1e-12)


def test_a_gradient_is_the_same_in_every_run(four_threads: None) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, 48, generator=generator, requires_grad=True)
    rows = torch.randint(0, 64, (4096,), generator=generator)  # enough that torch calls its threads
    weights = torch.randn(4096, 48, generator=generator)
    grads = [torch.autograd.grad((take_rows(values, rows) * weights).sum(), values)[0] for _ in range(20)]
    assert all(torch.equal(grad, grads[0]) for grad in grads)


class Unordered(TorchDispatchMode):
    """Counts what adds into rows in the order in which threads come: `index_put` that accumulates."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "index_put" in func.name() and True in (*args[3:4], (kwargs or {}).get("accumulate")):
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_the_count_sees_the_gradient_of_an_indexed_read() -> None:
    values = torch.ones(3, requires_grad=True)
    with Unordered() as seen:
        values[torch.tensor([1, 1])].sum().backward()
    assert seen.count == 1


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", ["ngp", "vanilla", "factor", "voxels"])
def test_nothing_in_a_step_adds_in_the_order_of_threads(kind: str, backend: Backend) -> None:
    config = tiny_config(steps=1)
    field = {
        "ngp": config.field,
        "vanilla": VanillaConfig(width=16, depth=3),
        "factor": FactorConfig(width=16),
        "voxels": VoxelConfig(resolutions=(16,), subdivide_at=()),
    }[kind]
    config = replace(config, field=field, cameras=replace(config.cameras, refine=True))
    with use_backend(backend), Unordered() as seen:
        Trainer(config, ball_scene()).fit()
    assert seen.count == 0
