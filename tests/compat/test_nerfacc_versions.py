"""One name for nerfacc 0.2, 0.3 and 0.5: each call gets the shapes and values of the version it was written for."""

from __future__ import annotations

import math

import pytest
import torch

import nerfturbo.compat.nerfacc as nerfacc
import nerfturbo.compat.nerfacc_packed as packed
from nerfturbo.errors import InputError

COUNTS = [3, 0, 4, 1]
N, N_RAYS = sum(COUNTS), len(COUNTS)
RAYS = torch.repeat_interleave(torch.arange(N_RAYS), torch.tensor(COUNTS))
INFO = torch.tensor([[0, 3], [3, 0], [3, 4], [7, 1]])
BOX = [-1.0, -1.0, -1.0, 1.0, 1.0, 1.0]


def samples(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """t_starts, t_ends, sigmas and rgbs, (n, 1) and (n, 3), some of them dense enough to end a ray."""
    generator = torch.Generator().manual_seed(3)
    starts = torch.arange(N, dtype=dtype)[:, None] * 0.4
    ends = starts + 0.1 + 0.2 * torch.rand(N, 1, generator=generator, dtype=dtype)
    sigmas = 4.0 * torch.rand(N, 1, generator=generator, dtype=dtype)
    sigmas[4] = 200.0
    return starts, ends, sigmas, torch.rand(N, 3, generator=generator, dtype=dtype)


def loop(alphas: list[float], eps: float = 0.0, thin: float = 0.0) -> list[float]:
    """Weights, one sample after the other; those below `thin` absorb nothing, and none come behind `eps`."""
    weights, left, ray = [], 1.0, -1
    for index, alpha in enumerate(alphas):
        if int(RAYS[index]) != ray:
            left, ray = 1.0, int(RAYS[index])
        kept = alpha >= thin and left >= eps
        weights.append(left * alpha if kept else 0.0)
        left *= 1.0 - alpha if kept else 1.0
    return weights


def alphas_of(starts: torch.Tensor, ends: torch.Tensor, sigmas: torch.Tensor) -> list[float]:
    return [1.0 - math.exp(-float(s) * float(e - b)) for b, e, s in zip(starts, ends, sigmas, strict=True)]


@pytest.mark.parametrize(
    "where", [{"ray_indices": RAYS, "n_rays": N_RAYS}, {"ray_indices": RAYS}, {"packed_info": INFO}]
)
def test_columns_come_back_as_one_tensor_of_columns(where):
    starts, ends, sigmas, _ = samples()
    opaque = torch.tensor(alphas_of(starts, ends, sigmas))[:, None]
    expected = torch.tensor(loop(opaque[:, 0].tolist()))[:, None]
    trans = nerfacc.render_transmittance_from_density(starts, ends, sigmas, **where)
    for weights in (
        nerfacc.render_weight_from_density(starts, ends, sigmas, **where),
        nerfacc.render_weight_from_density(t_starts=starts, t_ends=ends, sigmas=sigmas, **where),
        nerfacc.render_weight_from_alpha(opaque, **where),
        trans * opaque,
        nerfacc.render_transmittance_from_alpha(opaque, **where) * opaque,
    ):
        assert weights.shape == (N, 1)
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)
    flat = nerfacc.render_weight_from_density(starts[:, 0], ends[:, 0], sigmas[:, 0], **where)
    assert isinstance(flat, tuple) and [value.shape for value in flat] == [(N,)] * 3
    torch.testing.assert_close(flat[0], expected[:, 0], rtol=1e-4, atol=1e-6)
    keep = nerfacc.render_visibility(opaque, **where, early_stop_eps=0.3, alpha_thre=0.2)
    assert keep.shape == (N,) and keep.dtype == torch.bool
    assert keep.tolist() == ((trans[:, 0] >= 0.3) & (opaque[:, 0] >= 0.2)).tolist()
    batch = nerfacc.render_weight_from_density(starts, ends, sigmas)  # rays of one sample each, in 0.5
    torch.testing.assert_close(batch[0], opaque, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("info", [INFO.int(), INFO], ids=["int32", "int64"])
def test_packed_info_first_gives_the_flat_weights_of_0_2(info: torch.Tensor):
    starts, ends, sigmas, _ = samples()
    alphas = alphas_of(starts, ends, sigmas)
    opaque = torch.tensor(alphas)[:, None]
    for eps, thin in ((1e-4, 0.0), (0.3, 0.0), (0.0, 0.4), (0.3, 0.4)):
        expected = torch.tensor(loop(alphas, eps, thin))
        for weights in (
            nerfacc.render_weight_from_density(info, starts, ends, sigmas, eps, thin),
            nerfacc.render_weight_from_density(info, starts, ends, sigmas, early_stop_eps=eps, alpha_thre=thin),
            nerfacc.render_weight_from_alpha(info, opaque, eps, thin),
        ):
            assert weights.shape == (N,)
            torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)
        keep, kept = nerfacc.render_visibility(info, opaque, eps, thin)
        assert keep.tolist() == [weight > 0.0 for weight in expected.tolist()] and kept.dtype == info.dtype
        assert kept[:, 1].tolist() == torch.bincount(RAYS[keep], minlength=N_RAYS).tolist()
        assert kept[:, 0].tolist() == (torch.cumsum(kept[:, 1], 0) - kept[:, 1]).tolist()


def test_keywords_alone_are_told_apart_by_the_type_of_packed_info():
    starts, ends, sigmas, _ = samples()
    shots = {"t_starts": starts, "t_ends": ends, "sigmas": sigmas}
    assert nerfacc.render_weight_from_density(packed_info=INFO, **shots).shape == (N, 1)
    assert nerfacc.render_weight_from_density(packed_info=INFO.int(), **shots).shape == (N,)
    flat = {name: value[:, 0] for name, value in shots.items()}
    assert len(nerfacc.render_weight_from_density(packed_info=INFO.int(), **flat)) == 3
    assert isinstance(nerfacc.render_visibility(packed_info=INFO.int(), alphas=sigmas / 200.0), tuple)
    assert nerfacc.render_visibility(packed_info=INFO, alphas=sigmas / 200.0).shape == (N,)


@pytest.mark.parametrize("shape", [(N,), (N, 1)])
def test_accumulation_takes_both_orders_and_both_shapes(shape: tuple[int, ...]):
    weights = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    values = torch.rand(N, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    expected, opacity = torch.zeros(N_RAYS, 2, dtype=torch.float64), torch.zeros(N_RAYS, 1, dtype=torch.float64)
    for index in range(N):
        expected[RAYS[index]] += weights.detach().flatten()[index] * values.detach()[index]
        opacity[RAYS[index]] += weights.detach().flatten()[index]
    accumulate = nerfacc.accumulate_along_rays
    for sums in (
        accumulate(weights, RAYS, values, N_RAYS),
        accumulate(weights, RAYS, values=values, n_rays=N_RAYS),
        accumulate(weights, ray_indices=RAYS, values=values, n_rays=N_RAYS),
        accumulate(weights, values, RAYS, N_RAYS),
        accumulate(weights, values, ray_indices=RAYS),
        accumulate(weights, RAYS, values),
    ):
        torch.testing.assert_close(sums, expected)
    for sums in (accumulate(weights, RAYS, None, N_RAYS), accumulate(weights, None, RAYS, N_RAYS)):
        torch.testing.assert_close(sums, opacity)
    assert accumulate(weights, RAYS, n_rays=6).shape == (6, 1)
    with pytest.raises(InputError, match=r"values: expected shape .*, 'channels'\), got"):
        accumulate(weights, RAYS, RAYS, N_RAYS)  # neither order
    assert torch.autograd.gradcheck(lambda w, v: accumulate(w, RAYS, v, N_RAYS), (weights, values))


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_what_is_rendered_may_be_written_to(shape: tuple[int, ...]):
    """As public code does, which clamps opacities in place before it goes on; with indices that know their rays."""
    grid = nerfacc.OccGridEstimator([-1.0, -1, -1, 1, 1, 1], resolution=8)
    grid.binaries.fill_(True)
    origins, directions = torch.tensor([[0.0, 0, -3]]).expand(3, 3), torch.tensor([[0.0, 0, 1]]).expand(3, 3)
    rays, t_starts, t_ends = grid.sampling(origins, directions, render_step_size=0.25)
    t_starts, t_ends = t_starts.view(shape), t_ends.view(shape)
    density = torch.rand(t_starts.shape, requires_grad=True)

    def field(*_):
        return density.reshape(-1, 1) * torch.tensor([0.2, 0.5, 0.9]), density * 2.0

    weights = nerfacc.render_weight_from_density(t_starts, t_ends, density * 2.0, ray_indices=rays, n_rays=3)
    weights = weights if isinstance(weights, torch.Tensor) else weights[0]
    rendered = nerfacc.rendering(t_starts, t_ends, rays, n_rays=3, rgb_sigma_fn=field)
    for result in (*rendered[:3], nerfacc.accumulate_along_rays(weights, ray_indices=rays, n_rays=3)):
        (expected,) = torch.autograd.grad(result.clone().clamp(0.1, 0.8).sum(), density, retain_graph=True)
        (found,) = torch.autograd.grad(result.clamp_(0.1, 0.8).sum(), density, retain_graph=True)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["rgb_sigma_fn", "rgb_alpha_fn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rendering_of_columns_has_three_results_and_an_undivided_depth(kind: str, dtype: torch.dtype):
    starts, ends, sigmas, rgbs = samples(dtype)
    opaque = torch.tensor(alphas_of(starts, ends, sigmas), dtype=dtype)[:, None]
    values, background = sigmas if kind == "rgb_sigma_fn" else opaque, torch.tensor([0.2, 0.4, 0.6], dtype=dtype)

    def field(s, e, i):
        assert s.shape == e.shape == (N, 1) and i.shape == (N,)
        return rgbs, values

    weights = torch.tensor(loop(opaque[:, 0].tolist(), eps=1e-4), dtype=dtype)
    colors, opacities, depths = (torch.zeros(N_RAYS, width, dtype=dtype) for width in (3, 1, 1))
    for index in range(N):
        colors[RAYS[index]] += weights[index] * rgbs[index]
        opacities[RAYS[index]] += weights[index]
        depths[RAYS[index]] += weights[index] * (starts + ends)[index] / 2
    want = colors + background * (1.0 - opacities), opacities, depths
    function, last = {kind: field}, {"render_bkgd": background}
    calls = [
        nerfacc.rendering(starts, ends, RAYS, N_RAYS, **function, **last),
        nerfacc.rendering(INFO, starts, ends, **function, **last),
        nerfacc.rendering(packed_info=INFO.int(), t_starts=starts, t_ends=ends, **function, **last),
    ]
    if kind == "rgb_sigma_fn":
        calls.append(nerfacc.rendering(field, INFO, starts, ends, early_stop_eps=1e-4, **last))
    for got in calls:
        assert len(got) == 3
        for have, expected in zip(got, want, strict=True):
            torch.testing.assert_close(have, expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(calls[1][0], want[0], rtol=1e-4, atol=1e-5)


def test_gradients_of_columns_are_those_of_the_formula():
    starts, ends, sigmas, rgbs = samples(torch.float64)
    sigmas[4] = 3.0
    sigmas, rgbs = sigmas.requires_grad_(), rgbs.requires_grad_()
    for call in (
        lambda s, c: nerfacc.rendering(starts, ends, RAYS, N_RAYS, rgb_sigma_fn=lambda *_: (c, s)),
        lambda s, c: nerfacc.rendering(INFO, starts, ends, rgb_sigma_fn=lambda *_: (c, s)),
        lambda s, c: nerfacc.render_weight_from_density(starts, ends, s, ray_indices=RAYS) * c,
        lambda s, c: nerfacc.render_weight_from_density(INFO, starts, ends, s, 0.0, 0.1)[:, None] * c,
    ):
        assert torch.autograd.gradcheck(call, (sigmas, rgbs))


def test_a_box_alone_gives_two_results():
    origins, directions = torch.tensor([[0.0, 0.0, -3.0], [0.0, 0.0, 0.0], [5.0, 0.0, 0.0]]), torch.eye(3)[[2, 2, 2]]
    for call in (
        nerfacc.ray_aabb_intersect(origins, directions, torch.tensor(BOX)),
        nerfacc.ray_aabb_intersect(origins, directions, aabb=torch.tensor(BOX)),
    ):
        assert [t.tolist() for t in call] == [[2.0, 0.0, 1e10], [4.0, 1.0, 1e10]]
    assert len(nerfacc.ray_aabb_intersect(origins, directions, torch.tensor([BOX]))) == 3


def test_data_is_packed_and_unpacked():
    data = torch.rand(3, 4, 2, dtype=torch.float64)
    mask = torch.tensor([[True, False, True, True], [False] * 4, [True] * 4])
    flat, info = nerfacc.pack_data(data, mask)
    assert info.tolist() == [[0, 3], [3, 0], [3, 4]] and torch.equal(flat, data[mask])
    whole = nerfacc.unpack_data(info, flat.requires_grad_())
    assert whole.shape == (3, 4, 2) and torch.equal(whole[2], data[2]) and not whole[1].any()
    assert torch.equal(whole[0], torch.cat([data[0][mask[0]], torch.zeros(1, 2)]))
    assert torch.autograd.gradcheck(lambda values: nerfacc.unpack_data(info, values, 3), flat)
    assert torch.equal(nerfacc.unpack_info(info), torch.tensor([0] * 3 + [2] * 4))
    assert torch.equal(nerfacc.unpack_to_ray_indices(info.int()), nerfacc.unpack_info(info))


@pytest.mark.parametrize("column", [True, False])
def test_resampling_puts_edges_at_even_shares_of_the_weight(column: bool):
    starts, ends, sigmas, _ = samples(torch.float64)
    weights = torch.tensor(loop(alphas_of(starts, ends, sigmas)), dtype=torch.float64)
    weights[7] = 0.0  # the last ray has none
    n = 5
    info, new_starts, new_ends = nerfacc.ray_resampling(INFO, starts, ends, weights[:, None] if column else weights, n)
    assert info.tolist() == [[0, n], [n, 0], [n, n], [2 * n, n]] and new_starts.shape == new_ends.shape == (3 * n, 1)
    expected = []
    for begin, count in INFO.tolist():
        total = float(weights[begin : begin + count].sum())
        for j in range(n + 1 if count else 0):
            left, index = (j + 0.5) / (n + 1) * (total or 1.0), begin
            while total and left > float(weights[index]):
                left, index = left - float(weights[index]), index + 1
            share = left / (float(weights[index]) if total else 1.0)
            expected.append(float(starts[index] + share * (ends[index] - starts[index])))
    edges = torch.tensor(expected, dtype=torch.float64).view(3, n + 1)
    torch.testing.assert_close(new_starts.view(3, n), edges[:, :-1])
    torch.testing.assert_close(new_ends.view(3, n), edges[:, 1:])


def test_distortion_takes_packed_info_too():
    starts, ends, sigmas, _ = samples(torch.float64)
    weights = sigmas[:, 0] / 300.0
    now = nerfacc.distortion(weights, starts[:, 0], ends[:, 0], RAYS, N_RAYS)
    for old in (nerfacc.loss_distortion(INFO, weights, starts, ends), nerfacc.distortion(INFO, weights, starts, ends)):
        torch.testing.assert_close(old, now[:, 0])


def test_a_grid_is_asked_where_positions_are():
    values = torch.arange(8.0).view(2, 2, 2)
    points, box = torch.tensor([[-0.5, -0.5, 0.5], [0.5, 0.5, 0.5], [3.0, 0.0, 0.0]]), torch.tensor(BOX)
    assert nerfacc.query_grid(points, box, values, nerfacc.ContractionType.AABB).tolist() == [1.0, 7.0, 0.0]
    far = nerfacc.query_grid(points, box, values, nerfacc.ContractionType.UN_BOUNDED_SPHERE)
    assert far.tolist()[:2] == [1.0, 7.0] and far[2] >= 4.0
    grid = nerfacc.OccupancyGrid(BOX, 2)
    grid.every_n_step(0, lambda x: (x[:, :1] > 0).float())
    assert grid.query_occ(points).tolist() == [False, True, False] and grid.binary.sum() == 4


@pytest.mark.parametrize("cells", [8, 6])  # by kernels, and in plain torch
def test_grids_of_0_4_have_levels(cells: int):
    """A shell, half of it in the outer box, is marched as the estimator of 0.5 does with the same cells."""
    torch.manual_seed(0)

    def shell(x: torch.Tensor) -> torch.Tensor:
        return ((x.norm(dim=-1, keepdim=True) - 1.2).abs() < 0.3).float()

    grid, now = nerfacc.OccupancyGrid(BOX, cells, levels=2), nerfacc.OccGridEstimator(BOX, cells, levels=2)
    for step in range(0, 128, 16):
        grid.every_n_step(step, shell)
    now.binaries = grid.binary
    assert grid.binary.shape == (2, cells, cells, cells) and 0.2 < float(grid.binary[1].float().mean()) < 0.9
    points = torch.tensor([[1.2, 0.0, 0.0], [0.0, 0.0, 0.1], [3.0, 0.0, 0.0]])
    assert grid.query_occ(points).tolist() == [True, False, False]
    origins, directions = torch.tensor([[0.05, 0.1, -4.0]] * 2), torch.tensor([[0.0, 0.0, 1.0], [0.3, 0.0, 0.954]])
    indices, starts, ends = nerfacc.ray_marching(origins, directions, grid=grid, render_step_size=0.05)
    rays, t_starts, t_ends = now.sampling(origins, directions, render_step_size=0.05)
    assert len(rays) > 20 and float((origins + directions * ends[-1])[1].abs().max()) > 1.0
    for have, want in ((indices, rays), (starts[:, 0], t_starts), (ends[:, 0], t_ends)):
        torch.testing.assert_close(have, want)
    one = nerfacc.OccupancyGrid(BOX, cells, levels=1)
    assert one.binary.shape == one.binaries.shape == (1, cells, cells, cells)
    assert not one.query_occ(points).any() and one.query_occ(points).shape == (3,)
    for levels, kind in ((2, nerfacc.ContractionType.UN_BOUNDED_SPHERE), (17, nerfacc.ContractionType.AABB)):
        with pytest.raises(InputError, match="levels"):
            nerfacc.OccupancyGrid(BOX, 4, kind, levels)
    data = torch.arange(1.0, N + 1)[:, None]
    assert nerfacc.unpack_data(INFO, data, pad_value=-1.0)[:, :, 0].tolist()[1] == [-1.0] * 4


def test_code_for_0_2_marches_and_renders_under_the_one_name():
    origins = torch.tensor([[0.0, 0.1, -2.0], [0.2, 0.0, -2.0], [5.0, 0.0, -2.0]])
    directions = torch.tensor([[0.0, 0.0, 1.0]]).expand(3, 3)
    grid = nerfacc.OccupancyGrid(BOX, 8)
    grid.every_n_step(0, lambda x: (x.norm(dim=-1, keepdim=True) < 0.7).float())
    how = {"scene_aabb": torch.tensor(BOX), "grid": grid, "render_step_size": 0.05}

    def field(s, e, i):
        return torch.ones(len(s), 3), torch.full_like(s, 2.0)

    info, starts, ends = nerfacc.ray_marching(origins, directions, **how)  # 0.3's ray indices, in fact
    pairs, old_starts, old_ends = packed.ray_marching(origins, directions, **how)
    assert pairs.shape == (3, 2) and pairs.dtype == torch.int32 and torch.equal(starts, old_starts)
    assert torch.equal(nerfacc.unpack_info(info), nerfacc.unpack_info(pairs)) and starts.shape == (len(info), 1)
    sigmas = field(starts, ends, None)[1]
    torch.testing.assert_close(
        nerfacc.render_weight_from_density(info, starts, ends, sigmas),
        packed.render_weight_from_density(pairs, old_starts, old_ends, sigmas),
    )
    for have, want in zip(
        nerfacc.volume_rendering(info, starts, ends, rgb_sigma_fn=field),
        packed.rendering(pairs, old_starts, old_ends, field),
        strict=True,
    ):
        assert have.shape[0] == 3
        torch.testing.assert_close(have, want)
    with pytest.raises(InputError, match="nerfacc_packed"):
        nerfacc.rendering(info.clone(), starts, ends, rgb_sigma_fn=field)
