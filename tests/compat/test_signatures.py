"""The names, parameters and defaults of nerfacc 0.5.3, of what 0.3 and 0.4 alone had, and of tiny-cuda-nn's modules."""

from __future__ import annotations

import importlib
import inspect
import math
import subprocess
import sys

import pytest

import nerfturbo.compat.nerfacc as nerfacc
import nerfturbo.compat.tinycudann as tcnn
from nerfturbo.compat.nerfacc import cameras
from nerfturbo.compat.nerfacc.estimators.prop_net import get_proposal_requires_grad_fn
from nerfturbo.compat.nerfacc.volrend import accumulate_along_rays_

NO = inspect.Parameter.empty
WHERE = {"packed_info": None, "ray_indices": None, "n_rays": None}
SHOTS = {"t_starts": NO, "t_ends": NO, "sigmas": NO}
THRESHOLDS = {"early_stop_eps": 1e-4, "alpha_thre": 0.0, "prefix_trans": None}
SCAN = {"inputs": NO, "packed_info": None, "indices": None}
LEARN = {"step": NO, "occ_eval_fn": NO, "occ_thre": 1e-2, "ema_decay": 0.95, "warmup_steps": 256}
LENS = {"uv": NO, "params": NO, "eps": 1e-6, "iters": 10}

SIGNATURES = {
    nerfacc.inclusive_sum: SCAN,
    nerfacc.exclusive_sum: SCAN,
    nerfacc.inclusive_prod: SCAN,
    nerfacc.exclusive_prod: SCAN,
    nerfacc.pack_info: {"ray_indices": NO, "n_rays": None},
    nerfacc.render_transmittance_from_alpha: {"alphas": NO, **WHERE, "prefix_trans": None},
    nerfacc.render_transmittance_from_density: {**SHOTS, **WHERE, "prefix_trans": None},
    nerfacc.render_weight_from_alpha: {"alphas": NO, **WHERE, "prefix_trans": None},
    nerfacc.render_weight_from_density: {**SHOTS, **WHERE, "prefix_trans": None},
    nerfacc.render_visibility_from_alpha: {"alphas": NO, **WHERE, **THRESHOLDS},
    nerfacc.render_visibility_from_density: {**SHOTS, **WHERE, **THRESHOLDS},
    nerfacc.accumulate_along_rays: {"weights": NO, "values": None, "ray_indices": None, "n_rays": None},
    accumulate_along_rays_: {"weights": NO, "values": None, "ray_indices": None, "outputs": None},
    nerfacc.rendering: {
        "t_starts": NO, "t_ends": NO, "ray_indices": None, "n_rays": None,
        "rgb_sigma_fn": None, "rgb_alpha_fn": None, "render_bkgd": None,
    },
    nerfacc.render_visibility: {"alphas": NO, **WHERE, **THRESHOLDS},
    nerfacc.pack_data: {"data": NO, "mask": NO},
    nerfacc.unpack_data: {"packed_info": NO, "data": NO, "n_samples": None, "pad_value": 0.0},
    nerfacc.ray_resampling: {"packed_info": NO, "t_starts": NO, "t_ends": NO, "weights": NO, "n_samples": NO},
    nerfacc.query_grid: {"samples": NO, "grid_roi": NO, "grid_values": NO, "grid_type": NO},
    nerfacc.contract: {"x": NO, "roi": NO, "type": nerfacc.ContractionType.AABB},
    nerfacc.OccupancyGrid: {  # whose `levels` are 1 in 0.4; here None, which is 0.3's
        "roi_aabb": NO, "resolution": 128, "contraction_type": nerfacc.ContractionType.AABB, "levels": None,
    },
    nerfacc.OccupancyGrid.every_n_step: {"self": NO, **LEARN, "n": 16},
    nerfacc.ray_marching: {
        "rays_o": NO, "rays_d": NO, "t_min": None, "t_max": None, "scene_aabb": None, "grid": None, "sigma_fn": None,
        "alpha_fn": None, "early_stop_eps": 1e-4, "alpha_thre": 0.0, "near_plane": None, "far_plane": None,
        "render_step_size": 1e-3, "stratified": False, "cone_angle": 0.0,
    },
    nerfacc.distortion: {"weights": NO, "t_starts": NO, "t_ends": NO, "ray_indices": NO, "n_rays": NO},
    nerfacc.searchsorted: {"sorted_sequence": NO, "values": NO},
    nerfacc.importance_sampling: {"intervals": NO, "cdfs": NO, "n_intervals_per_ray": NO, "stratified": False},
    nerfacc.RayIntervals: {
        "vals": NO, "packed_info": None, "ray_indices": None, "is_left": None, "is_right": None,
    },
    nerfacc.RaySamples: {"vals": NO, "packed_info": None, "ray_indices": None, "is_valid": None},
    nerfacc.ray_aabb_intersect: {
        "rays_o": NO, "rays_d": NO, "aabbs": NO,
        "near_plane": -math.inf, "far_plane": math.inf, "miss_value": math.inf,
    },
    nerfacc.traverse_grids: {
        "rays_o": NO, "rays_d": NO, "binaries": NO, "aabbs": NO, "near_planes": None, "far_planes": None,
        "step_size": 1e-3, "cone_angle": 0.0, "traverse_steps_limit": None, "over_allocate": False,
        "rays_mask": None, "t_sorted": None, "t_indices": None, "hits": None,
    },
    nerfacc.OccGridEstimator: {"roi_aabb": NO, "resolution": 128, "levels": 1, "kwargs": NO},
    nerfacc.OccGridEstimator.sampling: {
        "self": NO, "rays_o": NO, "rays_d": NO, "sigma_fn": None, "alpha_fn": None, "near_plane": 0.0,
        "far_plane": 1e10, "t_min": None, "t_max": None, "render_step_size": 1e-3, "early_stop_eps": 1e-4,
        "alpha_thre": 0.0, "stratified": False, "cone_angle": 0.0,
    },
    nerfacc.OccGridEstimator.update_every_n_steps: {"self": NO, **LEARN, "n": 16},
    nerfacc.OccGridEstimator.mark_invisible_cells: {
        "self": NO, "K": NO, "c2w": NO, "width": NO, "height": NO, "near_plane": 0.0, "chunk": 32**3,
    },
    nerfacc.PropNetEstimator: {"optimizer": None, "scheduler": None},
    nerfacc.PropNetEstimator.sampling: {
        "self": NO, "prop_sigma_fns": NO, "prop_samples": NO, "num_samples": NO, "n_rays": NO, "near_plane": NO,
        "far_plane": NO, "sampling_type": "lindisp", "stratified": False, "requires_grad": False,
    },
    nerfacc.PropNetEstimator.compute_loss: {"self": NO, "trans": NO, "loss_scaler": 1.0},
    nerfacc.PropNetEstimator.update_every_n_steps: {
        "self": NO, "trans": NO, "requires_grad": False, "loss_scaler": 1.0,
    },
    get_proposal_requires_grad_fn: {"target": 5.0, "num_steps": 1000},
    cameras.opencv_lens_undistortion: LENS,
    cameras.opencv_lens_undistortion_fisheye: LENS,
    tcnn.Encoding: {"n_input_dims": NO, "encoding_config": NO, "seed": 1337, "dtype": None},
    tcnn.Network: {"n_input_dims": NO, "n_output_dims": NO, "network_config": NO, "seed": 1337},
    tcnn.NetworkWithInputEncoding: {
        "n_input_dims": NO, "n_output_dims": NO, "encoding_config": NO, "network_config": NO, "seed": 1337,
    },
}  # fmt: skip


@pytest.mark.parametrize("thing", SIGNATURES, ids=lambda thing: thing.__qualname__)
def test_parameters_and_defaults_are_the_originals(thing) -> None:
    parameters = inspect.signature(thing).parameters.values()
    assert [(p.name, p.default) for p in parameters] == list(SIGNATURES[thing].items())
    keyword_only = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert not keyword_only, "the original takes them by position"


def test_every_name_of_all_exists() -> None:
    for module in (nerfacc.volrend, nerfacc.grid, nerfacc.pdf, tcnn):
        assert all(hasattr(module, name) for name in module.__all__)


MODULES = {
    "cdf": ["ray_resampling"],
    "contraction": ["ContractionType", "contract", "contract_inv"],
    "intersection": ["ray_aabb_intersect"],
    "vol_rendering": ["accumulate_along_rays", "render_visibility", "render_weight_from_density", "rendering"],
    "cameras": ["opencv_lens_undistortion"],
    "cuda": ["is_cub_available", "ContractionTypeGetter", "ray_marching"],
    "data_specs": ["RayIntervals", "RaySamples"],
    "estimators.base": ["AbstractEstimator"],
    "estimators.n3tree": ["N3TreeEstimator"],
    "estimators.occ_grid": ["OccGridEstimator"],
    "estimators.prop_net": ["PropNetEstimator", "get_proposal_requires_grad_fn", "_pdf_loss", "_lossfun_outer"],
    "estimators.vdb": ["VDBEstimator", "traverse_vdbs", "fVDB_ENABLED"],
    "grid": [
        "Grid",
        "OccupancyGrid",
        "query_grid",
        "ray_aabb_intersect",
        "traverse_grids",
        "_enlarge_aabb",
        "_query",
        "_ray_aabb_intersect",
    ],
    "losses": ["distortion"],
    "pack": ["pack_data", "pack_info", "unpack_data", "unpack_info", "unpack_to_ray_indices"],
    "pdf": ["importance_sampling", "searchsorted", "_sample_from_weighted"],
    "proposal": ["get_proposal_requires_grad_fn"],
    "scan": ["inclusive_sum", "exclusive_sum", "inclusive_prod", "exclusive_prod"],
    "version": ["__version__"],
    "volrend": ["rendering", "accumulate_along_rays_"],
}

IMPORTS = """
import importlib, sys
for path in sys.argv[1:]:
    for name in [name for name in sys.modules if name.startswith("nerfturbo.compat")]:
        del sys.modules[name]
    module = importlib.import_module(path)  # the first import of anything in the package
    exec(f"import {path}; assert {path} is module; assert module.__name__ == path")
"""


def test_nerfaccs_modules_are_importable_without_install() -> None:
    for name, members in MODULES.items():
        module = importlib.import_module(f"nerfturbo.compat.nerfacc.{name}")
        assert all(hasattr(module, member) for member in members), name
        assert not name.startswith("cuda") or module.is_cub_available()
    from nerfturbo.compat.nerfacc.ray_marching import ray_marching

    assert ray_marching is nerfacc.ray_marching  # the function, as in nerfacc: it has its module's name
    paths = [f"nerfturbo.compat.nerfacc.{name}" for name in MODULES] + ["nerfturbo.compat.tinycudann.modules"]
    run = subprocess.run([sys.executable, "-c", IMPORTS, *paths], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_names_that_cannot_be_had_say_what_to_use() -> None:
    from nerfturbo.compat.nerfacc import cuda, proposal
    from nerfturbo.compat.nerfacc.ray_marching import unpack_to_ray_indices

    with pytest.raises(AttributeError, match=r"call the public one, nerfacc\.ray_marching"):
        cuda.ray_marching()
    with pytest.raises(AttributeError, match="PropNetEstimator"):
        _ = proposal.rendering
    assert unpack_to_ray_indices is nerfacc.unpack_info  # where 0.2 had it
    for kind in nerfacc.ContractionType:
        assert kind.to_cpp_version() == cuda.ContractionTypeGetter(kind.value)
