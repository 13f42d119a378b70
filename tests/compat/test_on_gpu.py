"""The compatible packages on CUDA tensors: what they give on a CPU, by other kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nerfturbo.compat.nerfacc as nerfacc
import nerfturbo.compat.tinycudann as tcnn

pytestmark = pytest.mark.gpu
BOX = [-1.0, -1.0, -1.0, 1.0, 1.0, 1.0]


def on_both(function) -> tuple[list[Any], list[Any]]:
    """A function of a device, run on the CPU and on the GPU; tensors come back to the CPU."""
    return tuple(  # type: ignore[return-value]
        [value.detach().cpu() if isinstance(value, torch.Tensor) else value for value in function(device)]
        for device in ("cpu", "cuda")
    )


def close(function, tolerance: float = 1e-4) -> None:
    for cpu, gpu in zip(*on_both(function), strict=True):
        torch.testing.assert_close(gpu, cpu, atol=tolerance, rtol=tolerance)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def camera_rays(n: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    origins = torch.nn.functional.normalize(numbers(n, 3, seed=1) - 0.5, dim=-1) * 2.0
    directions = torch.nn.functional.normalize((numbers(n, 3, seed=2) - 0.5) * 0.6 - origins, dim=-1)
    return origins.to(device), directions.to(device)


def test_scans_and_their_gradients() -> None:
    indices = torch.sort((numbers(5000) * 300).long()).values

    def run(device: str):
        for name in ("inclusive_sum", "exclusive_sum", "inclusive_prod", "exclusive_prod"):
            values = (numbers(5000, seed=3) * 0.5 + 0.6).to(device).requires_grad_()
            result = getattr(nerfacc, name)(values, indices=indices.to(device))
            (gradient,) = torch.autograd.grad((result * numbers(5000, seed=4).to(device)).sum(), values)
            yield result
            yield gradient

    close(run, 1e-3)


def test_rendering_and_its_gradients() -> None:
    indices = torch.sort((numbers(3000) * 200).long()).values

    def run(device: str):
        starts = (numbers(3000, seed=1) * 3.0).to(device)
        sigmas = (numbers(3000, seed=2) * 20.0).to(device).requires_grad_()
        rgbs = numbers(3000, 3, seed=3).to(device).requires_grad_()
        out = nerfacc.rendering(
            starts, starts + 0.05, indices.to(device), 201, rgb_sigma_fn=lambda *_: (rgbs, sigmas),
            render_bkgd=torch.ones(3, device=device),
        )  # fmt: skip
        yield from out[:3]
        yield from out[3].values()
        loss = out[0].square().sum() + out[2].sum() + out[3]["trans"].sum()
        yield from torch.autograd.grad(loss, (sigmas, rgbs))
        distortion = nerfacc.distortion(out[3]["weights"], starts, starts + 0.05, indices.to(device), 201)
        yield distortion
        alphas = (sigmas.detach() / 25.0).requires_grad_()
        weights, _ = nerfacc.render_weight_from_alpha(alphas, ray_indices=indices.to(device), n_rays=201)
        yield from torch.autograd.grad((weights * starts).sum(), alphas)

    close(run, 2e-3)


@pytest.mark.parametrize(("levels", "resolution"), [(1, 32), (3, 16), (2, 10)])
def test_traversal(levels: int, resolution: int) -> None:
    binaries = numbers(levels, resolution, resolution, resolution) > 0.6
    boxes = torch.stack([torch.tensor(BOX) * 2.0**level for level in range(levels)])

    def run(device: str):
        origins, directions = camera_rays(200, device)
        intervals, samples, ends = nerfacc.traverse_grids(
            origins, directions, binaries.to(device), boxes.to(device), step_size=0.02,
            near_planes=(numbers(200) * 0.5).to(device),
        )  # fmt: skip
        yield samples.packed_info[:, 1].float()
        yield nerfacc.accumulate_along_rays(samples.vals, None, samples.ray_indices, 200)
        yield intervals.is_left.sum().float() - samples.vals.shape[0]
        yield ends

    cpu, gpu = on_both(run)
    assert (cpu[0] - gpu[0]).abs().max() <= 2 and (cpu[0] - gpu[0]).abs().mean() < 0.05  # midpoints on faces
    torch.testing.assert_close(gpu[1], cpu[1], atol=6.0, rtol=0.01)
    assert gpu[2] == 0.0
    torch.testing.assert_close(gpu[3], cpu[3], atol=1e-4, rtol=1e-4)


def test_resampling() -> None:
    def run(device: str):
        edges = nerfacc.RayIntervals(torch.sort(numbers(50, 20), -1).values.to(device))
        cdfs = torch.sort(numbers(50, 20, seed=1), -1).values.to(device)
        new, centres = nerfacc.importance_sampling(edges, cdfs, 12)
        left, right = nerfacc.searchsorted(edges, new)
        ragged, points = nerfacc.importance_sampling(edges, cdfs, (numbers(50, seed=2) * 9).long().to(device))
        yield from (new.vals, centres.vals, left.float(), right.float(), ragged.vals, points.vals)

    close(run)


def test_the_estimator_learns_and_samples() -> None:
    def run(device: str):
        grid = nerfacc.OccGridEstimator(BOX, 32).to(device)
        for step in range(0, 512, 16):
            grid.update_every_n_steps(step, lambda x: (x.norm(dim=-1) < 0.5).float())
        origins, directions = camera_rays(500, device)
        indices, starts, ends = grid.sampling(
            origins, directions, sigma_fn=lambda s, e, i: torch.full_like(s, 30.0), render_step_size=0.01,
            alpha_thre=1e-3,
        )  # fmt: skip
        rgb, opacity, depth, _ = nerfacc.rendering(
            starts, ends, indices, 500,
            rgb_sigma_fn=lambda s, e, i: (torch.ones(len(s), 3, device=device), torch.full_like(s, 30.0)),
        )  # fmt: skip
        yield from (grid.binaries.float().mean(), opacity.mean(), depth.mean(), rgb.mean())

    close(run, 2e-2)


def test_proposals_sample_without_waiting_for_the_device() -> None:
    estimators = {device: nerfacc.PropNetEstimator().to(device) for device in ("cpu", "cuda")}  # moving one waits

    def run(device: str):
        starts, ends = estimators[device].sampling([lambda s, e: s * e], [32], 16, 100, 1.0, 4.0, "lindisp")
        yield from (starts, ends)

    close(run)
    torch.cuda.set_sync_debug_mode("error")
    try:
        list(run("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_networks_in_half_precision_and_their_gradients() -> None:
    config = {"otype": "HashGrid", "n_levels": 8, "log2_hashmap_size": 12, "base_resolution": 4}
    network = {"otype": "FullyFusedMLP", "n_neurons": 64, "n_hidden_layers": 2}

    def run(device: str):
        module = tcnn.NetworkWithInputEncoding(3, 4, config, network)
        with torch.no_grad():
            module.params[module._n_network :] = numbers(module.params.numel() - module._n_network, seed=5) - 0.5
        module = module.to(device)
        x = (numbers(3000, 3) * 0.98 + 0.01).to(device).requires_grad_()
        y = module(x)
        yield y.float()
        loss = (y.float() * numbers(3000, 4, seed=6).to(device)).mean()
        yield from (gradient.float() * 1e2 for gradient in torch.autograd.grad(loss, (x, module.params)))

    for cpu, gpu in zip(*on_both(run), strict=True):
        assert (cpu - gpu).norm() < 0.03 * cpu.norm()
