"""One step of training with proposal networks, against the formulas written out ray by ray in 64 bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import nerfturbo.compat.nerfacc as nerfacc
from nerfturbo.compat.nerfacc.estimators.prop_net import get_proposal_requires_grad_fn

RAYS, NEAR, FAR, SCALE = 6, 2.0, 6.0, 1024.0
COUNTS, FINAL = [13, 9], 7


def log_density(t: Tensor, params: Tensor) -> Tensor:
    """Bumps along each ray (RAYS, 3, 3): as smooth in its parameters as a network's answer."""
    centre, width, height = (params[:, None, :, i].to(t) for i in range(3))
    return (height * torch.exp(-((t[..., None] - centre) ** 2) / width)).sum(-1) - 1.0


def parameters(seed: int) -> Tensor:
    numbers = torch.rand(RAYS, 3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers * torch.tensor([3.0, 0.5, 4.0]) + torch.tensor([2.5, 0.2, 0.5])


def to_t(s: np.ndarray, kind: str) -> np.ndarray:
    return NEAR + s * (FAR - NEAR) if kind == "uniform" else 1.0 / ((1.0 - s) / NEAR + s / FAR)


def resampled(edges: np.ndarray, cdf: np.ndarray, n: int) -> np.ndarray:
    """n + 1 edges around the n centres where the distribution reaches (i + 1/2) / n of its range."""
    wanted = cdf[0] + (np.arange(n) + 0.5) / n * (cdf[-1] - cdf[0])
    centres = np.interp(wanted, cdf, edges)
    middles = (centres[1:] + centres[:-1]) / 2
    ends = [max(2 * centres[0] - middles[0], edges[0]), min(2 * centres[-1] - middles[-1], edges[-1])]
    return np.concatenate([ends[:1], middles, ends[1:]])


def transmittance(t: Tensor, sigmas: Tensor) -> Tensor:
    """Before each interval of one ray."""
    passed, result = t.new_ones(()), []
    for i in range(len(sigmas)):
        result.append(passed)
        passed = passed * torch.exp(-sigmas[i] * (t[i + 1] - t[i]))
    return torch.stack(result)


def written_out(proposals: list[Tensor], field: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The edges of the final samples (RAYS, FINAL + 1) and the loss, whose gradient goes to the proposals."""
    edges_of_all, total = [], torch.zeros((), dtype=torch.float64)
    for ray in range(RAYS):
        edges, cdf, levels = np.array([0.0, 1.0]), torch.tensor([0.0, 1.0], dtype=torch.float64), []
        for params, n in zip(proposals, COUNTS, strict=True):
            edges = resampled(edges, cdf.detach().numpy(), n)
            t = torch.from_numpy(to_t(edges, kind))
            sigmas = log_density((t[1:] + t[:-1])[None] / 2, params[ray : ray + 1])[0].exp()
            cdf = torch.cat([1.0 - transmittance(t, sigmas), torch.ones(1, dtype=torch.float64)])
            levels.append((edges, cdf))
        edges = resampled(edges, cdf.detach().numpy(), FINAL)
        t = torch.from_numpy(to_t(edges, kind))
        edges_of_all.append(t)
        sigmas = log_density((t[1:] + t[:-1])[None] / 2, field[ray : ray + 1])[0].exp()
        final = torch.cat([1.0 - transmittance(t, sigmas), torch.ones(1, dtype=torch.float64)]).detach()
        for old, old_cdf in levels:
            for i in range(FINAL):
                weight, around = final[i + 1] - final[i], torch.zeros((), dtype=torch.float64)
                for j in range(len(old) - 1):  # all that an interval of the proposal shares with this one
                    first, last = j == 0, j == len(old) - 2
                    if (old[j] <= edges[i + 1] or first) and (old[j + 1] > edges[i] or last):
                        around = around + old_cdf[j + 1] - old_cdf[j]
                total = total + (weight - around).clamp_min(0.0) ** 2 / (weight + 1e-7)
    return torch.stack(edges_of_all), total / (RAYS * FINAL) * SCALE


@pytest.mark.parametrize("kind", ["uniform", "lindisp"])
def test_samples_loss_and_gradients_are_the_formulas(kind) -> None:
    proposals, field = [parameters(1), parameters(2)], parameters(3)
    for params in proposals:
        params.requires_grad_()
    edges, loss = written_out(proposals, field, kind)
    expected = torch.autograd.grad(loss, proposals)
    ours = [params.detach().float().requires_grad_() for params in proposals]
    colour = field.detach().float().requires_grad_()
    estimator = nerfacc.PropNetEstimator(torch.optim.SGD(ours, lr=1.0))

    def density(params: Tensor):
        return lambda starts, ends: log_density((starts + ends) / 2, params).exp()

    starts, ends = estimator.sampling(
        [density(params) for params in ours], COUNTS, FINAL, RAYS, NEAR, FAR, kind, requires_grad=True
    )
    torch.testing.assert_close(starts, edges[:, :-1].float(), atol=2e-5, rtol=0.0)
    torch.testing.assert_close(ends, edges[:, 1:].float(), atol=2e-5, rtol=0.0)
    _, _, _, extras = nerfacc.rendering(
        starts, ends, rgb_sigma_fn=lambda s, e, _: (torch.ones(*s.shape, 3), density(colour)(s, e))
    )
    before = [params.detach().clone() for params in ours]
    found = estimator.update_every_n_steps(extras["trans"], requires_grad=True, loss_scaler=SCALE)
    assert found == pytest.approx(loss.item(), rel=2e-4) and found > 1.0
    for params, old, gradient in zip(ours, before, expected, strict=True):
        torch.testing.assert_close(old - params, gradient.float(), atol=2e-4 * float(gradient.abs().max()), rtol=1e-3)
    assert colour.grad is None, "the field is not trained by the proposals' loss"


def test_proposals_are_trained_at_every_step_at_first_and_at_every_sixth_later() -> None:
    due = get_proposal_requires_grad_fn(target=5.0, num_steps=1000)
    steps = [step for step in range(1300) if due(step)]
    gaps = np.diff(steps)
    assert steps[0] == 1 and set(gaps[:100]) == {1} and set(gaps[-20:]) == {6}


class Calls(TorchDispatchMode):
    """Counts what torch is asked to compute."""

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Names the calls that move numbers from the host to a device, or back."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        device = str((kwargs or {}).get("device") or "cpu")
        if func in (torch.tensor, torch.as_tensor) and device != "cpu":
            self.found.append(func.__name__)
        if func in (Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__float__, Tensor.__int__):
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_sampling_asks_for_few_kernels_however_many_rays() -> None:
    """A search that halves its range in torch costs seven calls for each doubling of the number of edges."""

    def calls(n_rays: int) -> int:
        with Calls() as counted:
            nerfacc.PropNetEstimator().sampling(
                [lambda s, e: torch.ones_like(s)], [16], 8, n_rays, NEAR, FAR, "uniform", stratified=True
            )
        return counted.n

    assert calls(2) == calls(2000) < 150


@pytest.mark.parametrize("kind", ["uniform", "lindisp"])
def test_sampling_copies_no_numbers_to_the_device_which_would_wait_for_it(kind) -> None:
    with Copies() as copies:
        starts, _ = (
            nerfacc.PropNetEstimator()
            .to("meta")  # any device that is not the host
            .sampling([lambda s, e: torch.ones_like(s)], [16], 8, 5, NEAR, FAR, kind, stratified=True)
        )
    assert starts.device.type == "meta" and copies.found == []


def test_planes_may_be_tensors_one_for_each_ray() -> None:
    near = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    starts, ends = nerfacc.PropNetEstimator().sampling([], [], 2, 2, near, 3.0, "uniform")  # type: ignore[arg-type]
    assert starts.tolist() == [[1.0, 2.0], [2.0, 2.5]] and ends.tolist() == [[2.0, 3.0], [2.5, 3.0]]


def test_no_rays_give_no_samples() -> None:
    starts, ends = nerfacc.PropNetEstimator().sampling(
        [lambda s, e: torch.ones_like(s)], [16], 8, 0, NEAR, FAR, "uniform"
    )
    assert starts.shape == ends.shape == (0, 8)
