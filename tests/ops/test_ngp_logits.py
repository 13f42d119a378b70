"""Instant-NGP from positions: every backend, both arrangements of the kernels, against encoding and networks apart."""

from __future__ import annotations

import pytest
import torch

from nerfturbo.errors import InputError
from nerfturbo.ops import HashLayout, use_backend
from nerfturbo.ops.ngp import NgpGrid, NgpWeights, ngp_query

from .cases import SMALL_LAYOUT, Target, assert_close, compare, generator, make_positions, make_table, require

LAYOUTS = {
    "4x2": SMALL_LAYOUT,
    "8x4": HashLayout(n_levels=8, n_features=4, log2_entries=8, base_resolution=4, max_resolution=64),
    "3x1": HashLayout(n_levels=3, n_features=1, log2_entries=8, base_resolution=4, max_resolution=16),
}


def make_weights(inputs: int, directions: int = 9, features: int = 16, hidden: int = 32) -> NgpWeights:
    shapes = ((hidden, inputs), (features, hidden), (hidden, directions + features), (hidden, hidden), (3, hidden))
    draw = generator(4)
    return NgpWeights(*(torch.randn(shape, generator=draw) / shape[1] ** 0.5 for shape in shapes))


def make_inputs(n: int, layout: HashLayout, n_rays: int = 5) -> dict[str, torch.Tensor]:
    weights = make_weights(layout.n_outputs)
    rays = torch.randint(0, n_rays, (n,), generator=generator(2)).int()
    directions = torch.randn(n_rays, 9, generator=generator(3))
    inputs = {"positions": make_positions(n), "directions": directions, "rays": rays, "table": make_table(layout)}
    return inputs | weights._asdict()


def call(layout: HashLayout, n_used: int | None = None):
    def function(positions, directions, rays, table, **weights):
        count = None if n_used is None else torch.tensor(n_used, dtype=torch.int32, device=positions.device)
        options = {"n_used": count, "logits": True}
        with torch.no_grad():
            rgb, density = ngp_query(
                positions, directions, rays, NgpGrid(table, layout), NgpWeights(**weights), **options
            )
        out = torch.cat([rgb, density[:, None]], dim=-1)
        return out if n_used is None else out[:n_used].clone()

    return function


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("n", [0, 1, 63, 300])
def test_matches_reference(target: Target, name: str, n: int, poisoned_empty: None):
    require(target)
    compare(target, call(LAYOUTS[name]), make_inputs(n, LAYOUTS[name]), tolerance=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("n_used", [0, 1, 70, 150, 1000])
def test_rows_past_the_count_do_not_matter(target: Target, n_used: int, dtype: torch.dtype):
    require(target)
    inputs = make_inputs(150, SMALL_LAYOUT)
    inputs["table"] = inputs["table"].to(dtype)
    inputs["positions"][n_used:] = float("nan")
    inputs["rays"][n_used:] = 1 << 30
    compare(target, call(SMALL_LAYOUT, n_used), inputs, tolerance=2e-3 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_half_tables(target: Target, name: str):
    require(target)
    inputs = make_inputs(target.pick(5000, 100), LAYOUTS[name])
    inputs["table"] = inputs["table"].half()
    compare(target, call(LAYOUTS[name]), inputs, tolerance=2e-2)


def test_needs_no_gradient_and_names_what_is_wrong(target: Target):
    require(target)
    inputs = {name: value.to(target.device).requires_grad_(value.is_floating_point()) for name, value in
              make_inputs(20, SMALL_LAYOUT).items()}  # fmt: skip
    with use_backend(target.backend):  # type: ignore[arg-type]
        out = call(SMALL_LAYOUT)(**inputs)
        assert not out.requires_grad
        assert_close("again", call(SMALL_LAYOUT)(**inputs), out, 0.0)
        with pytest.raises(InputError, match=r"ray_indices: expected torch.int32, got torch.int64"):
            call(SMALL_LAYOUT)(**inputs | {"rays": inputs["rays"].long()})
        with pytest.raises(InputError, match=r"colour_mid: expected shape \(32, 32\), got \(16, 32\)"):
            call(SMALL_LAYOUT)(**inputs | {"colour_mid": inputs["colour_mid"][:16]})
