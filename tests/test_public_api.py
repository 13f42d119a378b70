"""The public surface: what `nerfturbo.__all__` names, each thing documented and typed.

Adding or removing a public name is a decision: make it in nerfturbo/__init__.py, in SURFACE below and in CHANGELOG.md.
"""

from __future__ import annotations

import inspect
import operator
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nerfturbo

SURFACE = [
    "Aabb",
    "Cameras",
    "Config",
    "HashDensity",
    "InputError",
    "InstantNGP",
    "MixedPrecision",
    "NerfturboError",
    "OccupancyGrid",
    "PackedSamples",
    "ProposalEstimator",
    "RaySpan",
    "Rays",
    "RenderOutput",
    "Scene",
    "Trainer",
    "VanillaNeRF",
    "color_loss",
    "contract",
    "distortion_loss",
    "load_model",
    "load_scene",
    "ops",
    "preset",
    "ray_marching",
    "render_image",
    "render_rays",
    "show",
    "uncontract",
    "use_backend",
    "volume_rendering",
]

# The operations that are public, as nerfturbo.ops.NAME; what else is in there serves the package.
OPS = [
    "HashLayout",
    "composite",
    "fused_mlp",
    "hash_encode",
    "importance_sample",
    "march",
    "packed_cumsum",
    "packed_sum",
    "ray_aabb",
    "spherical_harmonics",
]

MAX_NAMES = 32
MAX_POSITIONAL = 3

# Functions whose fourth argument is not an option but what the function is about.
MANY_POSITIONAL = {"ops.march"}  # rays (two tensors), a grid, a step rule


NAMES = [*(name for name in nerfturbo.__all__ if name != "ops"), *(f"ops.{name}" for name in OPS)]


def find(name: str) -> Any:
    return operator.attrgetter(name)(nerfturbo)


def test_surface_is_what_was_decided() -> None:
    missing, extra = sorted(set(SURFACE) - set(nerfturbo.__all__)), sorted(set(nerfturbo.__all__) - set(SURFACE))
    assert not missing, f"public names that are gone: {missing}"
    assert not extra, f"new public names, not in SURFACE: {extra}"


def test_surface_is_sorted_and_small() -> None:
    assert list(nerfturbo.__all__) == sorted(set(nerfturbo.__all__))
    assert len(nerfturbo.__all__) <= MAX_NAMES


@pytest.mark.parametrize("name", NAMES)
def test_name_exists_and_is_documented(name: str) -> None:
    thing = find(name)
    if inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing):
        doc = (thing.__doc__ or "").strip()
        generated = inspect.isclass(thing) and doc.startswith(f"{thing.__name__}(")  # what @dataclass writes by itself
        assert doc, f"{name} has no docstring"
        assert not generated, f"{name} has no docstring"


# What needs pictures or a trained run, has no behaviour of its own, or is a container of results.
WITHOUT_EXAMPLE = {"Config", "NerfturboError", "RenderOutput", "Scene", "Trainer"}
WITHOUT_EXAMPLE |= {"load_model", "load_scene", "render_image", "render_rays"}


@pytest.mark.parametrize("name", sorted(set(NAMES) - WITHOUT_EXAMPLE))
def test_name_has_an_example_that_runs(name: str) -> None:
    thing = find(name)
    docs = [thing.__doc__, *(member.__doc__ for member in vars(thing).values() if inspect.isclass(thing))]
    assert any(">>> " in doc for doc in docs if isinstance(doc, str)), f"{name}: no example in its docstring"


def test_a_renamed_name_lives_on_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nerfturbo._RENAMED, "march_rays", "ray_marching")
    with pytest.warns(DeprecationWarning, match=r"nerfturbo\.ray_marching"):
        assert nerfturbo.march_rays is nerfturbo.ray_marching


@pytest.mark.parametrize("name", OPS)
def test_operations_lived_here_before(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"nerfturbo\.ops\.{name}"):
        assert getattr(nerfturbo, name) is getattr(nerfturbo.ops, name)


def callables_of(name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """A public function; or the constructor and the public methods that a class itself defines."""
    thing = find(name)
    if inspect.isfunction(thing):
        yield name, thing
    elif inspect.isclass(thing):
        for key, member in vars(thing).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if inspect.isfunction(function) and (not key.startswith("_") or key == "__init__"):
                yield f"{name}.{key}", function


@pytest.mark.parametrize("name", NAMES)
def test_name_is_fully_typed(name: str) -> None:
    for label, function in callables_of(name):
        signature = inspect.signature(function)
        bare = [
            parameter.name
            for parameter in signature.parameters.values()
            if parameter.annotation is inspect.Parameter.empty and parameter.name not in ("self", "cls")
        ]
        assert not bare, f"{label}: parameters without a type: {bare}"
        assert signature.return_annotation is not inspect.Signature.empty, f"{label}: no return type"


@pytest.mark.parametrize("name", [n for n in NAMES if inspect.isfunction(find(n))])
def test_parameters_past_the_third_are_keyword_only(name: str) -> None:
    kinds = [parameter.kind for parameter in inspect.signature(find(name)).parameters.values()]
    positional = sum(kind is not inspect.Parameter.KEYWORD_ONLY for kind in kinds)
    assert positional <= MAX_POSITIONAL or name in MANY_POSITIONAL, f"{name} takes {positional} by position"


def test_version_is_the_one_released() -> None:
    pyproject = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert nerfturbo.__version__ == pyproject["project"]["version"]
