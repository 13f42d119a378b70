"""The shared fixtures do what kernel and data tests rely on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.mark.usefixtures("poisoned_empty")
def test_poisoned_floats_are_nan() -> None:
    like = torch.zeros(3, dtype=torch.float16)
    made = [torch.empty(2, 3), torch.empty_like(like), torch.empty_strided((2, 2), (1, 2)), like.new_empty(4)]
    assert all(tensor.isnan().all() for tensor in made)
    assert made[1].dtype == torch.float16
    assert made[2].stride() == (1, 2)


@pytest.mark.usefixtures("poisoned_empty")
def test_poisoned_integers_are_garbage() -> None:
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        assert (torch.empty(5, dtype=dtype) > 80).all()
    assert torch.empty(3, dtype=torch.bool).all()


@pytest.mark.usefixtures("poisoned_empty")
def test_poison_spares_gradients_and_empty_tensors() -> None:
    assert torch.empty(2, requires_grad=True).requires_grad
    assert torch.empty(0, 3).shape == (0, 3)
    assert torch.empty((2, 3), device="meta").is_meta


def test_poison_ends_with_the_test() -> None:
    assert torch.empty.__module__ != __name__
    assert isinstance(torch.empty, type(torch.zeros))


def test_kernels_run_where_there_is_no_gpu(kernel_device: torch.device) -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def double(p_values, n: tl.constexpr):
        i_value = tl.arange(0, n)
        tl.store(p_values + i_value, 2.0 * tl.load(p_values + i_value))

    values = torch.arange(4.0, device=kernel_device)
    double[(1,)](values, n=4)
    assert values.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_scene_dir_finds_scenes(scene_dir, data_dir: Path) -> None:
    assert scene_dir("blender/lego") == data_dir / "blender" / "lego"
