"""nerfacc's estimators, cameras and older interfaces; a training loop written for nerfacc; `import nerfacc`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import nerfturbo.compat.nerfacc as nerfacc
import nerfturbo.compat.nerfacc_indexed as indexed
import nerfturbo.compat.nerfacc_packed as packed
from nerfturbo.compat.nerfacc import cameras
from nerfturbo.compat.nerfacc.estimators.prop_net import get_proposal_requires_grad_fn
from nerfturbo.errors import BackendError, InputError

BOX = [-1.0, -1.0, -1.0, 1.0, 1.0, 1.0]


def sphere(x: torch.Tensor) -> torch.Tensor:
    return 20.0 * (x.norm(dim=-1) < 0.5)


def camera_rays(n: int = 200, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    origins = nn.functional.normalize(torch.randn(n, 3, generator=generator), dim=-1) * 2.0
    targets = torch.randn(n, 3, generator=generator) * 0.3
    return origins, nn.functional.normalize(targets - origins, dim=-1)


def learned_grid(resolution: int | list[int] = 16, levels: int = 1) -> nerfacc.OccGridEstimator:
    torch.manual_seed(0)
    grid = nerfacc.OccGridEstimator(BOX, resolution, levels)
    for step in range(0, 64, 16):
        grid.update_every_n_steps(step, lambda x: sphere(x)[:, None] * 0.01, occ_thre=0.01)
    return grid


@pytest.mark.parametrize(("resolution", "levels"), [(16, 1), (16, 2), ([10, 16, 12], 1)])
def test_the_grid_finds_the_sphere_and_samples_only_there(resolution, levels: int):
    grid = learned_grid(resolution, levels)
    origins, directions = camera_rays()
    indices, starts, ends = grid.sampling(origins, directions, render_step_size=0.02)
    assert indices.dtype == torch.int64 and starts.shape == ends.shape == indices.shape
    radius = (origins[indices] + directions[indices] * ((starts + ends) / 2)[:, None]).norm(dim=-1)
    assert radius.max() < 0.5 + 2.0 * 2.0 * 3**0.5 / 10
    closest = (origins - directions * (origins * directions).sum(-1, keepdim=True)).norm(dim=-1)
    assert torch.isin(torch.nonzero(closest < 0.4)[:, 0], indices).all()


def test_what_no_light_reaches_is_left_out_and_the_picture_stays():
    grid = learned_grid()
    origins, directions = camera_rays()

    def sigma_fn(t_starts, t_ends, ray_indices):
        return sphere(origins[ray_indices] + directions[ray_indices] * ((t_starts + t_ends) / 2)[:, None])

    def render(**how) -> tuple[torch.Tensor, int]:
        indices, starts, ends = grid.sampling(origins, directions, render_step_size=0.02, **how)
        rgb, *_ = nerfacc.rendering(
            starts, ends, indices, 200, rgb_sigma_fn=lambda *s: (torch.rand(len(s[0]), 3) * 0 + 0.5, sigma_fn(*s))
        )
        return rgb, indices.shape[0]

    everything, n_all = render()
    visible, n_visible = render(sigma_fn=sigma_fn, early_stop_eps=1e-3, alpha_thre=1e-3)
    by_alpha, n_alpha = render(
        alpha_fn=lambda s, e, i: 1.0 - torch.exp(-sigma_fn(s, e, i) * (e - s)), early_stop_eps=1e-3, alpha_thre=1e-3
    )
    assert n_visible < 0.75 * n_all and abs(n_alpha - n_visible) <= 2
    torch.testing.assert_close(visible, everything, atol=2e-3, rtol=0.0)
    torch.testing.assert_close(by_alpha, everything, atol=2e-3, rtol=0.0)


def test_planes_per_ray_and_jitter_move_the_samples():
    grid = learned_grid()
    grid.binaries = torch.ones_like(grid.binaries)
    origins, directions = camera_rays(50)
    t_min, t_max = torch.rand(50) + 1.0, torch.rand(50) + 2.0
    indices, starts, ends = grid.sampling(origins, directions, t_min=t_min, t_max=t_max, render_step_size=0.05)
    assert (starts >= t_min[indices] - 0.026).all() and (ends <= t_max[indices] + 0.026).all()
    torch.manual_seed(1)
    one = grid.sampling(origins, directions, render_step_size=0.05, stratified=True)[1]
    two = grid.sampling(origins, directions, render_step_size=0.05, stratified=True)[1]
    assert one.shape != two.shape or not torch.equal(one, two)


def test_the_state_has_nerfaccs_names_and_comes_back():
    grid = learned_grid(levels=2)
    state = grid.state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "resolution": (3,), "aabbs": (2, 6), "occs": (2 * 16**3,), "binaries": (2, 16, 16, 16),
    }  # fmt: skip
    other = nerfacc.OccGridEstimator(BOX, 16, 2)
    origins, directions = camera_rays(20)
    assert other.sampling(origins, directions)[0].numel() == 0  # a fresh grid is empty
    other.load_state_dict(state)
    for one, two in zip(grid.sampling(origins, directions), other.eval().sampling(origins, directions), strict=True):
        assert torch.equal(one, two)
    with pytest.raises(RuntimeError, match="training"):
        other.update_every_n_steps(0, sphere)


def test_a_grid_written_to_in_place_is_marched_as_it_is_now():
    grid = learned_grid()
    origins, directions = camera_rays(20)
    before = grid.sampling(origins, directions)[0].numel()
    grid.binaries[:] = False
    assert before > 0 and grid.sampling(origins, directions)[0].numel() == 0


def test_cells_that_no_camera_sees_are_given_up_for_good():
    grid = nerfacc.OccGridEstimator(BOX, 16)
    camera = torch.tensor([[[50.0, 0.0, 50.0], [0.0, 50.0, 50.0], [0.0, 0.0, 1.0]]])
    pose = torch.tensor([[[-1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, -1.0, 1.1]]])  # looks down -z
    grid.mark_invisible_cells(camera, pose, 100, 100, near_plane=0.2)
    hidden = grid.occs == -1.0
    assert 0.3 < hidden.float().mean() < 0.9
    for step in (0, 1000):
        grid.update_every_n_steps(step - step % 16, lambda x: torch.ones(len(x)))
    assert (grid.occs[hidden] == -1.0).all() and not grid.binaries.flatten()[hidden].any()


def test_repeated_cells_keep_their_largest_value():
    grid = nerfacc.OccGridEstimator(BOX, 4)
    grid._sample_uniform_and_occupied_cells = lambda n: [torch.tensor([5, 5, 5, 7])]  # type: ignore[method-assign]
    values = iter([torch.tensor([0.1, 0.9, 0.3, 0.2])])
    grid._update(1000, lambda x: next(values))
    torch.testing.assert_close(grid.occs[torch.tensor([5, 7, 6])], torch.tensor([0.9, 0.2, 0.0]))


class TinyField(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, outputs))
        self.register_buffer("frequencies", torch.randn(3, 12) * 3.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = x @ self.frequencies  # type: ignore[operator]
        out = self.net(torch.cat([angles.sin(), angles.cos()], -1))
        return torch.sigmoid(out[..., 1:]), nn.functional.softplus(out[..., 0]) * 4.0


def test_a_loop_written_for_nerfacc_trains():
    torch.manual_seed(0)
    field, grid = TinyField(4), nerfacc.OccGridEstimator(BOX, 16)
    optimizer = torch.optim.Adam(field.parameters(), lr=1e-2)
    truth, losses = learned_grid(), []
    for step in range(40):
        origins, directions = camera_rays(128, step)

        def at(s, e, i, o=origins, d=directions):
            return o[i] + d[i] * ((s + e) / 2)[:, None]

        indices, starts, ends = truth.sampling(origins, directions, render_step_size=0.05)
        target = nerfacc.rendering(
            starts,
            ends,
            indices,
            128,
            rgb_sigma_fn=lambda *s: (at(*s) + 0.5, sphere(at(*s))),
            render_bkgd=torch.ones(3),
        )[0]
        grid.update_every_n_steps(step, lambda x: field(x)[1] * 0.05)
        indices, starts, ends = grid.sampling(
            origins, directions, sigma_fn=lambda *s: field(at(*s))[1], render_step_size=0.05, stratified=True
        )
        rgb, _, _, _ = nerfacc.rendering(
            starts, ends, indices, 128, rgb_sigma_fn=lambda *s: field(at(*s)), render_bkgd=torch.ones(3)
        )
        loss = nn.functional.smooth_l1_loss(rgb, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


def test_proposals_learn_where_the_surface_is():
    torch.manual_seed(0)
    proposal = TinyField(1)
    estimator = nerfacc.PropNetEstimator(torch.optim.Adam(proposal.parameters(), lr=1e-2))
    origins, directions = torch.tensor([[0.0, 0.0, -2.0]]).repeat(32, 1), torch.tensor([[0.0, 0.0, 1.0]]).repeat(32, 1)

    def at(s, e):
        return origins[:, None] + directions[:, None] * ((s + e) / 2)[..., None]

    needed, spans = get_proposal_requires_grad_fn(), []
    for step in range(80):
        wanted = needed(step)
        starts, ends = estimator.sampling(
            [lambda s, e: proposal(at(s, e))[1]], [24], 12, 32, 0.5, 4.0, "uniform", stratified=True,
            requires_grad=wanted,
        )  # fmt: skip
        assert starts.shape == ends.shape == (32, 12) and (ends >= starts).all() and not starts.requires_grad
        trans, _ = nerfacc.render_transmittance_from_density(starts, ends, 10.0 * sphere(at(starts, ends)))
        loss = estimator.update_every_n_steps(trans, wanted)
        assert loss >= 0.0
        spans.append(((starts + ends) / 2 - 1.6).abs().mean().item())
    assert sum(spans[-10:]) < 0.6 * sum(spans[:10])
    with pytest.raises(InputError, match="sampling_type"):
        estimator.sampling([], [], 4, 2, 0.5, 4.0, "elsewhere")  # type: ignore[arg-type]


def test_lenses_are_undone():
    torch.manual_seed(0)
    points = torch.rand(2, 50, 2) - 0.5
    for n in (0, 1, 2, 4, 8):
        params = torch.randn(n) * 0.05
        there = cameras._opencv_lens_distortion(points, params)
        torch.testing.assert_close(cameras.opencv_lens_undistortion(there, params), points, atol=1e-5, rtol=1e-4)
    params = torch.randn(2, 50, 4) * 0.02
    there = cameras._opencv_lens_distortion_fisheye(points, params)
    torch.testing.assert_close(cameras.opencv_lens_undistortion_fisheye(there, params), points, atol=1e-5, rtol=1e-4)
    with pytest.raises(InputError, match="coefficients"):
        cameras.opencv_lens_undistortion(points, torch.zeros(3))


@pytest.mark.parametrize("contraction", list(packed.ContractionType))
def test_the_older_interfaces_render_the_same_picture(contraction: packed.ContractionType):
    torch.manual_seed(0)
    grid = packed.OccupancyGrid(BOX, 16, contraction)
    for step in range(0, 48, 16):
        grid.every_n_step(step, lambda x: sphere(x)[:, None] * 0.02)
    origins, directions = camera_rays(60)

    def sigma_fn(s, e, i):
        return sphere(origins[i] + directions[i] * (s + e) / 2)[:, None]

    how = {"scene_aabb": torch.tensor(BOX), "grid": grid, "sigma_fn": sigma_fn, "render_step_size": 0.02}
    info, starts, ends = packed.ray_marching(origins, directions, **how)
    indices, other_starts, _ = indexed.ray_marching(origins, directions, **how)
    assert info.shape == (60, 2) and starts.shape == ends.shape == (int(info[:, 1].sum()), 1)
    assert torch.equal(packed.unpack_info(info), indices) and torch.equal(starts, other_starts)
    color = torch.tensor([0.2, 0.5, 0.8])

    def field(s, e, i):
        return color.expand(len(s), 3), sigma_fn(s, e, i)

    rgb, opacity, depth = packed.rendering(info, starts, ends, rgb_sigma_fn=field, render_bkgd=torch.ones(3))
    again = indexed.rendering(starts, ends, indices, 60, rgb_sigma_fn=field, render_bkgd=torch.ones(3))
    torch.testing.assert_close(rgb, again[0], atol=1e-3, rtol=0.0)
    closest = (origins - directions * (origins * directions).sum(-1, keepdim=True)).norm(dim=-1)
    assert (opacity[closest < 0.35] > 0.98).all() and (opacity[closest > 0.55] == 0.0).all()
    torch.testing.assert_close(rgb[closest < 0.35], color.expand(int((closest < 0.35).sum()), 3), atol=0.02, rtol=0.0)
    assert ((depth - opacity * 1.7).abs() < 0.6)[closest < 0.35].all()
    keep, kept = packed.render_visibility(info, 1.0 - torch.exp(-field(starts, ends, indices)[1] * 0.02), 0.5)
    assert int(kept[:, 1].sum()) == int(keep.sum()) < keep.shape[0]


def test_contractions_have_inverses():
    points, box = torch.randn(200, 3) * 2.0, torch.tensor([-1.0, -2.0, -1.0, 1.0, 1.0, 2.0])
    for kind in packed.ContractionType:
        unit = packed.contract(points, box, kind)
        if kind is not packed.ContractionType.AABB:
            assert (unit > 0.0).all() and (unit < 1.0).all()
        torch.testing.assert_close(packed.contract_inv(unit, box, kind), points, atol=2e-3, rtol=2e-3)


def test_unbounded_rays_need_an_end():
    with pytest.raises(InputError, match="far_plane"):
        packed.ray_marching(*camera_rays(3))
    info, starts, _ = packed.ray_marching(*camera_rays(3), near_plane=0.5, far_plane=1.5, render_step_size=0.1)
    assert info[:, 1].tolist() == [10, 10, 10] and starts.min() == pytest.approx(0.5)


def test_sparse_voxels_say_why_they_are_not_there():
    for call in (nerfacc.VDBEstimator, nerfacc.traverse_vdbs):
        with pytest.raises(BackendError, match="OccGridEstimator"):
            call(None)


PROGRAM = """
import nerfturbo.compat
nerfturbo.compat.install("nerfacc")
import nerfacc
from nerfacc import OccGridEstimator, rendering
from nerfacc.cameras import opencv_lens_undistortion
from nerfacc.cuda import is_cub_available
from nerfacc.data_specs import RayIntervals
from nerfacc.estimators.occ_grid import OccGridEstimator as Same
from nerfacc.estimators.prop_net import _lossfun_outer, _pdf_loss
from nerfacc.estimators.vdb import VDBEstimator
from nerfacc.grid import _enlarge_aabb, _query, _ray_aabb_intersect
from nerfacc.losses import distortion
from nerfacc.pack import pack_info
from nerfacc.pdf import _sample_from_weighted
from nerfacc.scan import inclusive_sum
from nerfacc.volrend import accumulate_along_rays_
assert OccGridEstimator is Same and nerfacc.__version__ == "0.5.3"
import nerfacc.ray_marching, nerfacc.vol_rendering
from nerfacc.cdf import ray_resampling
from nerfacc.contraction import ContractionType, contract, contract_inv
from nerfacc.grid import Grid, OccupancyGrid, query_grid, traverse_grids
from nerfacc.intersection import ray_aabb_intersect
from nerfacc.pack import pack_data, unpack_data, unpack_info
from nerfacc.ray_marching import ray_marching
assert callable(nerfacc.ray_marching) and nerfacc.vol_rendering.rendering is rendering
nerfturbo.compat.install("nerfacc")
nerfturbo.compat.install("nerfacc", package="nerfacc_packed")
import nerfacc
assert nerfacc.unpack_info and nerfacc.OccGridEstimator and nerfacc.__version__ == "0.2.4"
from nerfacc.contraction import ContractionType, contract_inv
from nerfacc.grid import Grid, OccupancyGrid
from nerfacc.ray_marching import ray_marching
from nerfacc.vol_rendering import rendering
assert OccupancyGrid is nerfacc.OccupancyGrid and ray_marching is nerfacc.ray_marching and callable(ray_marching)
nerfturbo.compat.uninstall("nerfacc")
import sys
assert not any(name.split(".")[0] == "nerfacc" for name in sys.modules)
sys.modules["nerfacc"] = sys
try:
    nerfturbo.compat.install("nerfacc")
except nerfturbo.InputError as error:
    print(error)
"""


def test_import_nerfacc_resolves_to_us():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "before the first import" in run.stdout
