"""The host's part of a training step runs to its end with every launch left out: what compiling ahead leans on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from nerfturbo import use_backend
from nerfturbo.config import (
    Config,
    GridConfig,
    GridSamplerConfig,
    NgpConfig,
    RenderConfig,
    TrainConfig,
    VanillaConfig,
)
from nerfturbo.data.batches import PixelSampler
from nerfturbo.data.builtin import builtin_scene
from nerfturbo.ops._dispatch import compile_only
from nerfturbo.ops._triton import precompile
from nerfturbo.ops._triton.precompile import zeroed_memory
from nerfturbo.ops.adam import RayBudget, StepState
from nerfturbo.rendering.model import NerfModel, SceneBounds
from nerfturbo.training.optim import Optimizer
from nerfturbo.training.step import step_gradients, step_update

NGP = Config(
    grid=GridConfig(resolution=8),
    field=NgpConfig(n_levels=2, n_features=2, log2_entries=8, max_resolution=32, width=16),
    render=RenderConfig(steps_per_diagonal=32),
    train=TrainConfig(batch_samples=512, max_rays=64),
)
VANILLA = replace(NGP, field=VanillaConfig(width=32, depth=3), sampler=GridSamplerConfig(prune=False))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted here: test_graph.py compiles ahead")
@pytest.mark.parametrize("config", [NGP, VANILLA], ids=["ngp", "vanilla"])
def test_a_step_without_launches_ends_and_needs_no_result(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda self, *args, **kwargs: launches.append(self.fn))
    scene = builtin_scene("toybox", "train", resolution=16, n_views=2)
    with use_backend("triton"), zeroed_memory():
        model, sampler = NerfModel(config, SceneBounds.of(scene)), PixelSampler(scene, "cpu", 0)
        optimizer = Optimizer(model, config.optim, half_dtype=torch.float16)
        before = [buffer.values.clone() for buffer in optimizer.buffers]
        state = StepState.create(step=0, n_active=16, length=8, device="cpu")
        for all_cells in (True, False):
            model.grid.update(state.step, model.field.density, all_cells=all_cells)
        budget = RayBudget(512, 1024, 64)
        step_update(step_gradients(model, sampler, optimizer, state, budget), optimizer, state, budget)
    assert len(launches) > 20
    assert all(torch.equal(old, buffer.values) for old, buffer in zip(before, optimizer.buffers, strict=True))


def test_fresh_memory_is_zero_inside_and_as_ever_after() -> None:
    originals = torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty
    with zeroed_memory():
        for fresh in (torch.empty(3), torch.empty_like(torch.ones(3)), torch.ones(1).new_empty(3)):
            assert torch.equal(fresh, torch.zeros(3))
        wanting = torch.empty(3, requires_grad=True)  # as torch's checkpoints ask for it
        assert torch.equal(wanting, torch.zeros(3)) and wanting.requires_grad and wanting.is_leaf
    assert originals == (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)


def test_on_a_cpu_nothing_is_compiled_ahead() -> None:
    with compile_only("cpu") as compiling:
        assert compiling is False and float(torch.ones(2).sum()) == 2.0


def test_blocks_inside_one_another_wait_once() -> None:
    """The inner one changes nothing and ends nothing: what it has begun to compile is waited for by the outer one."""
    launch = JITFunction.run
    with precompile.compile_only():
        left_out = JITFunction.run
        with precompile.compile_only():
            assert JITFunction.run is left_out
        assert JITFunction.run is left_out is not launch and precompile._async_compile.active_mode.get() is not None
        assert torch.equal(torch.empty(3), torch.zeros(3))
    assert JITFunction.run is launch and precompile._async_compile.active_mode.get() is None
