"""Every backend has every op, under the reference's name and parameters; and each says what it cannot do."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import nerfturbo.ops
from nerfturbo.errors import BackendError, InputError
from nerfturbo.ops import _dispatch, composite, current_backend, hash_encode, packed_sum, ray_aabb, use_backend
from nerfturbo.types import Aabb

from .cases import SMALL_LAYOUT, TARGETS, Target, make_samples, make_table, require

FOLDER = Path(nerfturbo.ops.__file__).parent
DISPATCHED = sorted(
    {
        match
        for path in FOLDER.glob("*/__init__.py")
        for match in re.findall(r'implementation\(\s*"(\w+)",\s*"(\w+)"', path.read_text())
    }
)


def test_ops_are_found():
    assert ("hash_encode", "hash_encode") in DISPATCHED
    assert ("packed", "compact") in DISPATCHED


@pytest.mark.parametrize(("op", "function"), DISPATCHED, ids=lambda name: name)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_same_name_and_parameters_as_the_reference(target: Target, op: str, function: str):
    require(target)
    reference = getattr(importlib.import_module(f"nerfturbo.ops.{op}.reference"), function)
    own = _dispatch._load(target.backend, op, function)
    wanted = list(inspect.signature(reference).parameters)
    parameters = inspect.signature(own).parameters
    assert list(parameters)[: len(wanted)] == wanted
    for name in list(parameters)[len(wanted) :]:  # a backend may take more, but must not ask for it
        assert parameters[name].default is not inspect.Parameter.empty, name


def test_cpu_leaves_float64_to_the_reference():
    samples, wide = make_samples(3), torch.zeros(2, 3, dtype=torch.float64)
    calls = {
        "origins": lambda: ray_aabb(wide, wide, Aabb.cube(1.0)),
        "positions": lambda: hash_encode(wide, make_table(SMALL_LAYOUT), SMALL_LAYOUT),
        "values": lambda: packed_sum(wide, torch.tensor([0, 2], dtype=torch.int32)),
        "density": lambda: composite(
            torch.zeros(samples.capacity, dtype=torch.float64), torch.zeros(samples.capacity, 3), samples
        ),
    }
    for name, call in calls.items():
        with (
            use_backend("cpu"),
            pytest.raises(InputError, match=rf"{name}: expected float16, .*use_backend\('reference'\)"),
        ):
            call()
    assert ray_aabb(wide, wide, Aabb.cube(1.0))[0].dtype == torch.float64  # auto chooses the reference


def test_explicit_choice_is_obeyed_or_raises(monkeypatch: pytest.MonkeyPatch):
    expected = "backend: expected one of auto, reference, cpu, triton"
    with pytest.raises(InputError, match=expected), use_backend("fast"):  # type: ignore[arg-type]
        pass
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with use_backend("triton"), pytest.raises(BackendError, match="needs CUDA tensors"):
        ray_aabb(torch.zeros(1, 3), torch.ones(1, 3), Aabb.cube(1.0))
    monkeypatch.setenv("NERFTURBO_BACKEND", "reference")
    assert current_backend() == "reference"
    with use_backend("cpu"):
        assert current_backend() == "cpu"
    monkeypatch.setenv("NERFTURBO_BACKEND", "nonsense")
    with pytest.raises(InputError, match="NERFTURBO_BACKEND: expected one of"):
        ray_aabb(torch.zeros(1, 3), torch.ones(1, 3), Aabb.cube(1.0))
