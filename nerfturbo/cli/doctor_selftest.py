"""Each backend against the reference on tiny inputs: values and gradients."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import composite, hash_encode, importance_sample, march, spherical_harmonics, use_backend
from ..ops._dispatch import Backend, available
from ..ops.hash_encode import HashLayout
from ..ops.march import OccupancyBits, StepRule
from ..types import Aabb

TOLERANCE = 2e-3  # of the largest value: far above rounding, far below a wrong formula

Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class SelfTest:
    """One op under one backend."""

    backend: str
    device: str
    op: str
    error: float | None  # the largest difference over the largest value; None when it did not run
    problem: str | None


def backends_here() -> list[tuple[Backend, str]]:
    """(backend, device) pairs that can run on this machine."""
    found: list[tuple[Backend, str]] = [("reference", "cpu")]
    if available("numba"):
        found.append(("cpu", "cpu"))
    if torch.cuda.is_available():
        found.append(("reference", "cuda"))
        if available("triton"):
            found.append(("triton", "cuda"))
    elif available("triton") and os.environ.get("TRITON_INTERPRET") == "1":
        found.append(("triton", "cpu"))
    return found


def run_self_tests() -> list[SelfTest]:
    """Every op under every backend, against the reference on the CPU."""
    results = []
    for name, case in CASES.items():
        with use_backend("reference"):
            truth = case("cpu")
        for backend, device in backends_here():
            results.append(_compare(name, case, truth, backend, device))
    return results


def _compare(name: str, case: Callable[[str], Outputs], truth: Outputs, backend: Backend, device: str) -> SelfTest:
    try:
        with use_backend(backend):
            found = case(device)
    except Exception as error:  # a compiler may raise anything, and whatever it is must not end the examination
        return SelfTest(backend, device, name, None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    worst, where = 0.0, ""
    for key, result in truth.items():
        value, expected = found[key].detach().cpu().double(), result.detach().double()
        if value.shape != expected.shape or not bool(torch.isfinite(value).all()):
            return SelfTest(backend, device, name, None, f"{key}: wrong shape or not finite")
        scale = float(expected.abs().max().clamp(min=1e-6))
        difference = float((value - expected).abs().max()) / scale if value.numel() else 0.0
        worst, where = max((worst, where), (difference, key))
    problem = None if worst <= TOLERANCE else f"{where} differs by {worst:.2g}"
    return SelfTest(backend, device, name, worst, problem)


def _uniform(*shape: int, seed: int, device: str) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _rays(device: str) -> tuple[Tensor, Tensor]:
    origins = torch.nn.functional.normalize(_uniform(33, 3, seed=0, device="cpu") - 0.5, dim=-1) * 3.0
    targets = (_uniform(33, 3, seed=1, device="cpu") - 0.5) * 0.8
    return origins.to(device), torch.nn.functional.normalize(targets - origins, dim=-1).to(device)


def _march(device: str) -> Outputs:
    bits = torch.full((8**3 // 32,), -1, dtype=torch.int32, device=device)
    bits[::3] = 0
    origins, directions = _rays(device)
    # A lattice far coarser than the cells' borders are apart from it, so that rounding decides no sample.
    samples = march(origins, directions, OccupancyBits(bits, Aabb.cube(1.0), 8), StepRule(0.0437, near=0.1, far=6.0))
    return {"offsets": samples.offsets, "t_starts": samples.t_starts, "t_ends": samples.t_ends}


def _composite(device: str) -> Outputs:
    bits = torch.full((4**3 // 32,), -1, dtype=torch.int32, device=device)
    origins, directions = _rays(device)
    with use_backend("reference"):
        samples = march(origins, directions, OccupancyBits(bits, Aabb.cube(1.0), 4), StepRule(0.1))
    density = (_uniform(samples.capacity, seed=2, device=device) * 4.0).requires_grad_()
    rgb = _uniform(samples.capacity, 3, seed=3, device=device).requires_grad_()
    out = composite(density, rgb, samples)
    (out.rgb.square().sum() + out.opacity.sum() + 0.1 * out.depth.sum()).backward()
    assert density.grad is not None and rgb.grad is not None
    gradients = {"gradient of density": density.grad, "gradient of rgb": rgb.grad}
    return {"rgb": out.rgb, "opacity": out.opacity, "depth": out.depth, **gradients}


def _hash_encode(device: str) -> Outputs:
    layout = HashLayout(n_levels=4, n_features=2, log2_entries=8, base_resolution=4, max_resolution=32)
    positions = _uniform(65, 3, seed=4, device=device).requires_grad_()
    table = (_uniform(layout.n_entries, 2, seed=5, device=device) - 0.5).requires_grad_()
    features = hash_encode(positions, table, layout)
    (features * _uniform(65, layout.n_outputs, seed=6, device=device)).sum().backward()
    assert positions.grad is not None and table.grad is not None
    return {"features": features, "gradient of table": table.grad, "gradient of positions": positions.grad}


def _spherical_harmonics(device: str) -> Outputs:
    return {"values": spherical_harmonics(_rays(device)[1], 4)}


def _importance(device: str) -> Outputs:
    edges = _uniform(17, 9, seed=7, device=device).cumsum(-1)
    return {"edges": importance_sample(edges, _uniform(17, 8, seed=8, device=device), 12)}


CASES: dict[str, Callable[[str], Outputs]] = {
    "march": _march,
    "composite": _composite,
    "hash_encode": _hash_encode,
    "spherical_harmonics": _spherical_harmonics,
    "importance_sample": _importance,
}
