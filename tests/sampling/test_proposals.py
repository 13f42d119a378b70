"""Sampling by histograms: spans, interlevel loss, annealing, and the estimators that any field plugs into."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import nerfturbo as nt
from nerfturbo.config import VanillaConfig
from nerfturbo.errors import InputError
from nerfturbo.ops import HashLayout, use_backend
from nerfturbo.ops.intervals import importance_sample, interval_weights, spread, unwarp, warp
from nerfturbo.sampling import (
    Draw,
    HierarchyEstimator,
    Histogram,
    RaySpan,
    UniformEstimator,
    annealing,
    interlevel_loss,
    proposals,
)
from nerfturbo.sampling.histograms import blurred_weights, outer_weights
from nerfturbo.sampling.uniform import even_edges
from nerfturbo.types import Aabb, Rays


def rays_along_z(n: int = 3) -> Rays:
    origins = torch.stack([torch.linspace(-0.2, 0.2, n), torch.zeros(n), torch.zeros(n)], dim=-1)
    return Rays(origins, torch.tensor([[0.0, 0.0, 1.0]]).repeat(n, 1))


class Wall(nn.Module):
    """Dense from z = `at` on, by a logit that can be learned."""

    def __init__(self, at: float = 2.0, logit: float = 5.0) -> None:
        super().__init__()
        self.at, self.logit = at, nn.Parameter(torch.tensor(logit))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.exp(self.logit) * (positions[:, 2] > self.at)


@pytest.mark.parametrize("kind", ["uniform", "disparity", "mixed"])
def test_places_rise_from_near_to_far_and_have_an_inverse(kind):
    near, far = torch.tensor(0.1, dtype=torch.float64), torch.tensor(50.0, dtype=torch.float64)
    places = torch.linspace(0.0, 1.0, 33, dtype=torch.float64)
    t = spread(places, near, far, kind=kind)
    assert bool((t.diff() > 0.0).all())
    torch.testing.assert_close(t[[0, -1]], torch.stack([near, far]))
    torch.testing.assert_close(unwarp(warp(t, kind), kind), t)
    torch.testing.assert_close((warp(t, kind) - warp(near, kind)) / (warp(far, kind) - warp(near, kind)), places)


def test_a_span_ends_at_its_box_and_misses_are_empty():
    rays = Rays(torch.tensor([[0.0, 0.0, -3.0], [5.0, 0.0, -3.0]]), torch.tensor([[0.0, 0.0, 1.0]]).repeat(2, 1))
    span = RaySpan(near=0.0, aabb=Aabb.cube(1.0))
    t = span.distances(torch.tensor([[0.0, 0.5, 1.0]]).repeat(2, 1), rays)
    assert t[0].tolist() == [2.0, 3.0, 4.0] and float(t[1].diff().abs().max()) == 0.0
    cropped = span.inside(Aabb((-1.0, -1.0, 0.0), (1.0, 1.0, 1.0)))
    assert cropped.distances(torch.tensor([[0.0, 1.0]]).repeat(2, 1), rays)[0].tolist() == [3.0, 4.0]
    for unit in (1.0, 2.0):  # what distances are counted in moves what lies between, not the ends
        t = RaySpan(near=0.5, far=8.0, unit=unit, warp="mixed").distances(torch.tensor([[0.0, 0.5, 1.0]]), rays[:1])[0]
        torch.testing.assert_close(t[[0, 2]], torch.tensor([0.5, 8.0]))
    with pytest.raises(InputError, match="box"):
        span.inside(Aabb.cube(1.0, (9.0, 0.0, 0.0)))
    with pytest.raises(InputError, match="far"):
        RaySpan(near=0.0)


def test_weights_are_those_of_compositing():
    density = torch.rand(2, 5, dtype=torch.float64) * 3.0
    distances = torch.rand(2, 6, dtype=torch.float64).cumsum(-1)
    found = interval_weights(density, distances)
    for ray in range(2):
        through = 1.0
        for i in range(5):
            alpha = 1.0 - math.exp(-float(density[ray, i] * (distances[ray, i + 1] - distances[ray, i])))
            assert float(found[ray, i]) == pytest.approx(through * alpha, abs=1e-12)
            through *= 1.0 - alpha
    assert torch.autograd.gradcheck(lambda d: interval_weights(d, distances), density.requires_grad_())


def plain_interlevel(edges, weights, key_edges, key_weights) -> list[float]:
    """The paper's formula by loops: a proposal's interval counts in full where it overlaps at all."""
    losses = []
    for ray in range(edges.shape[0]):
        total = 0.0
        for i in range(weights.shape[1]):
            low, high = float(edges[ray, i]), float(edges[ray, i + 1])
            bound = sum(
                float(key_weights[ray, k])
                for k in range(key_weights.shape[1])
                if float(key_edges[ray, k]) < high and float(key_edges[ray, k + 1]) > low
            )
            weight = float(weights[ray, i])
            total += max(0.0, weight - bound) ** 2 / (weight + 1e-7)
        losses.append(total / weights.shape[1])
    return losses


def test_the_interlevel_loss_is_the_formula():
    generator = torch.Generator().manual_seed(1)
    edges, key_edges = (torch.rand(4, n, generator=generator, dtype=torch.float64).sort(-1).values for n in (9, 6))
    weights, key = (torch.rand(4, n, generator=generator, dtype=torch.float64) * 0.3 for n in (8, 5))
    found = interlevel_loss(edges, weights, Histogram(key_edges, key))
    assert found.tolist() == pytest.approx(plain_interlevel(edges, weights, key_edges, key), rel=1e-9)
    assert float(found.max()) > 0.0
    learned = weights.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda k: interlevel_loss(edges, weights, Histogram(key_edges, k)), key.requires_grad_()
    )
    interlevel_loss(edges, learned, Histogram(key_edges, key)).sum().backward()
    assert learned.grad is None  # the field does not bend towards its proposals


def blurred_interlevel(edges, weights, key_edges, key_weights, radius: float) -> list[float]:
    """Zip-NeRF's loss by loops: how much of each bin's weight lands in an interval when a box blurs its place."""

    def ramp(x: float) -> float:  # integral of the box's running sum
        return min(max(x + radius, 0.0), 2.0 * radius) ** 2 / (4.0 * radius) + max(x - radius, 0.0)

    def below(place: float, low: float, high: float) -> float:
        return (ramp(place - low) - ramp(place - high)) / (high - low)

    losses = []
    for own_edges, own, keys, held in zip(
        edges.tolist(), weights.tolist(), key_edges.tolist(), key_weights.tolist(), strict=True
    ):
        total = 0.0
        for (left, right), has in zip(itertools.pairwise(keys), held, strict=True):
            bins = zip(itertools.pairwise(own_edges), own, strict=True)
            wanted = sum(weight * (below(right, *bin_) - below(left, *bin_)) for bin_, weight in bins)
            total += max(0.0, wanted - has) ** 2 / (has + 1e-5)
        losses.append(total)
    return losses


@pytest.mark.parametrize("radius", [0.003, 0.03, 0.6])
def test_the_interlevel_loss_of_blurred_weights_is_the_formula(radius: float):
    generator = torch.Generator().manual_seed(1)
    edges, key_edges = (torch.rand(4, n, generator=generator, dtype=torch.float64).sort(-1).values for n in (9, 6))
    weights, key = (torch.rand(4, n, generator=generator, dtype=torch.float64) * top for n, top in ((8, 0.3), (5, 0.2)))
    found = interlevel_loss(edges, weights, Histogram(key_edges, key), blur=radius)
    assert found.tolist() == pytest.approx(blurred_interlevel(edges, weights, key_edges, key, radius), rel=1e-9)
    assert float(found.min()) > 0.0
    learned = weights.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda k: interlevel_loss(edges, weights, Histogram(key_edges, k), blur=radius), key.requires_grad_()
    )
    interlevel_loss(edges, learned, Histogram(key_edges, key), blur=radius).sum().backward()
    assert learned.grad is None  # the field does not bend towards its proposals


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_blurred_weights_are_all_there_and_never_negative(backend, kernel_device):
    device = kernel_device if backend == "triton" else torch.device("cpu")
    generator = torch.Generator().manual_seed(2)
    edges = torch.rand(50, 33, generator=generator).sort(-1).values
    edges[:, 5:9] = edges[:, 5:6]  # intervals of no length
    edges[:, 20] = edges[:, 19] + 1e-7  # and of nearly none, with most of the weight
    weights = torch.rand(50, 32, generator=generator) * 0.01
    weights[:, 5:8], weights[:, 19] = 0.0, 0.7
    everywhere = torch.linspace(-0.1, 1.1, 65).expand(50, -1).contiguous()
    with use_backend(backend):
        found = blurred_weights(*(value.to(device) for value in (edges.sort(-1).values, weights, everywhere)), 0.03)
    torch.testing.assert_close(found.sum(-1).cpu(), weights.sum(-1), rtol=1e-4, atol=1e-5)
    assert float(found.min()) >= 0.0


def test_every_later_proposal_learns_a_tenth_of_the_blur(monkeypatch):
    seen = []

    def recorded(*args, blur):
        seen.append(blur)
        return interlevel_loss(*args, blur=blur)

    monkeypatch.setattr(proposals, "interlevel_loss", recorded)
    span = RaySpan(near=0.1, far=8.0)
    sizes = {"n_samples": 16, "coarse_samples": (32, 32)}
    estimator = nt.ProposalEstimator([Wall(), Wall()], **sizes, span=span, blur=0.03)
    samples = estimator.sample(rays_along_z())
    estimator.loss(samples, torch.rand(samples.capacity)).backward()
    assert seen == pytest.approx([0.03, 0.003])
    assert all(wall.logit.grad is not None for wall in estimator.densities)


def test_an_interval_touches_no_neighbour_that_begins_where_it_ends():
    key, weights = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([[1.0, 2.0, 7.0]])
    assert outer_weights(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), key, weights).tolist() == [[1.0, 2.0, 7.0]]
    assert outer_weights(torch.tensor([[1.0, 3.0]]), key, weights).tolist() == [[9.0]]


def test_a_proposal_that_holds_the_weight_has_no_loss():
    edges, key_edges = torch.linspace(0.0, 1.0, 13)[None], torch.linspace(0.0, 1.0, 5)[None]
    weights = torch.rand(1, 12) * 0.08
    key = outer_weights(key_edges, edges, weights)  # every interval holds all that touches it
    assert float(interlevel_loss(edges, weights, Histogram(key_edges, key))) == 0.0


def test_annealing_begins_even_and_ends_exact():
    powers = [annealing(step, 50) for step in range(0, 80, 10)]
    assert powers[0] == 0.0 and powers[-1] == 1.0 and all(b >= a for a, b in itertools.pairwise(powers))
    assert annealing(7, 0) == 1.0
    on_device = annealing(torch.tensor(20), 50)
    assert float(on_device) == pytest.approx(annealing(20, 50))
    sizes = {"n_samples": 64, "coarse_samples": (32,), "span": RaySpan(near=0.1, far=8.0), "anneal_steps": 50}
    thin = nt.ProposalEstimator([lambda positions: 2.0 * Wall()(positions).clamp(max=1.0)], **sizes)
    samples = [thin.sample(rays_along_z(), draw=Draw(step=torch.tensor(step))) for step in (0, 5, 50)]
    torch.testing.assert_close(samples[0].edges.diff(), torch.full((3, 64), 1.0 / 65.0), rtol=1e-4, atol=1e-5)
    inside = [((found.midpoints() - 2.0).abs() < 0.4).float().mean() for found in samples]
    assert inside[0] < inside[1] < inside[2]


def test_without_a_draw_proposals_are_taken_at_their_word():
    sizes = {"n_samples": 16, "coarse_samples": (32,), "span": RaySpan(near=0.1, far=8.0)}
    estimator = nt.ProposalEstimator([Wall(logit=-1.0)], **sizes)
    late = estimator.sample(rays_along_z(), draw=Draw(step=10**6))
    torch.testing.assert_close(estimator.sample(rays_along_z()).edges, late.edges)


@pytest.mark.parametrize(("padding", "blurred"), [(0.01, False), (0.003, True)])
def test_every_stage_has_a_jitter_of_its_own(padding: float, blurred: bool, monkeypatch: pytest.MonkeyPatch):
    given = [torch.full((3, 1), value) for value in (0.1, 0.4, 0.9)]
    monkeypatch.setattr(Draw, "jitter", lambda self, rays, columns, stream=None: given[:columns])
    span = RaySpan(near=0.1, far=8.0)
    sizes = {"n_samples": 4, "coarse_samples": (8, 6), "span": span, "padding": padding}
    samples = nt.ProposalEstimator([Wall(), Wall()], **sizes).sample(rays_along_z(), draw=Draw(stratified=True))
    first, second = samples.stages
    assert torch.equal(first.edges, even_edges(3, 8, given[0], torch.device("cpu")))
    options = {"padding": padding, "blur": blurred}
    for found, stage, n, jitter in ((second.edges, first, 6, given[1]), (samples.edges, second, 4, given[2])):
        want = importance_sample(stage.edges, stage.weights.detach(), n, jitter=jitter, **options)
        torch.testing.assert_close(found, want)


def test_samples_gather_where_proposals_are_dense():
    span = RaySpan(near=0.1, far=8.0)
    estimator = nt.ProposalEstimator([Wall(), Wall()], n_samples=16, coarse_samples=(32, 32), span=span)
    samples = estimator.sample(rays_along_z(), draw=Draw(stratified=True, seed=3, step=10_000))
    assert samples.offsets.tolist() == [0, 16, 32, 48] and samples.n_per_ray == 16
    assert bool((samples.per_ray(samples.t_starts).diff() >= 0.0).all())
    near_wall = ((samples.midpoints() - 2.0).abs() < 0.3).float().mean()
    assert float(near_wall) > 0.7
    assert estimator.evaluations_per_ray == 64
    # Bytes of a ray: its largest stage, coarse or fine, and 12 of every coarse sample for the loss.
    assert estimator.bytes_per_ray(96, 0) == 32 * 96 + 64 * 12 and estimator.bytes_per_ray(1000, 0) == 16_000 + 768


def test_draws_are_those_of_seed_step_and_ray():
    estimator = nt.ProposalEstimator([Wall()], n_samples=4, coarse_samples=(8,), span=RaySpan(near=0.1, far=8.0))
    rays = rays_along_z(4)
    whole = estimator.sample(rays, draw=Draw(stratified=True, seed=1, step=5))
    part = estimator.sample(rays[slice(2, 4)], draw=Draw(stratified=True, seed=1, step=torch.tensor(5), first_ray=2))
    assert torch.equal(whole.t_starts[8:], part.t_starts)
    other = estimator.sample(rays, draw=Draw(stratified=True, seed=1, step=6))
    assert not torch.equal(whole.t_starts, other.t_starts)


def test_inactive_rays_are_the_tail():
    estimator = nt.ProposalEstimator([Wall()], n_samples=4, coarse_samples=(8,), span=RaySpan(near=0.1, far=8.0))
    samples = estimator.sample(rays_along_z(5), n_active=torch.tensor(2, dtype=torch.int32))
    assert samples.offsets.tolist() == [0, 4, 8, 8, 8, 8] and int(samples.n_rays_kept) == 2
    assert float(samples.t_ends[8:].abs().max()) == 0.0 and int(samples.ray_indices[8:].max()) == 0
    weights = torch.zeros(20)
    weights[:8] = 0.2
    own = estimator.sample(rays_along_z(5)[slice(0, 2)])
    assert torch.equal(samples.t_starts[:8], own.t_starts) and torch.equal(samples.t_ends[:8], own.t_ends)
    with torch.no_grad():
        found, alone = estimator.loss(samples, weights), estimator.loss(own, weights[:8])
    assert float(found) == pytest.approx(float(alone), rel=1e-5)


def test_proposals_learn_where_the_field_is():
    """A field of the user's own: a function of samples, whose weights teach the proposal what to look at."""
    torch.manual_seed(0)
    layout = HashLayout(n_levels=4, n_features=2, log2_entries=10, base_resolution=4, max_resolution=32)
    proposal = nt.HashDensity(Aabb.cube(4.0), layout)
    estimator = nt.ProposalEstimator([proposal], n_samples=8, coarse_samples=(24,), span=RaySpan(near=0.1, far=4.0))
    optimizer = torch.optim.Adam(estimator.parameters(), lr=2e-2)
    rays, wall = rays_along_z(16), Wall(at=2.5)

    def field(t_starts, t_ends, ray_indices):
        z = (t_starts + t_ends) * 0.5
        return torch.ones(z.shape[0], 3), wall(torch.stack([z, z, z], dim=-1))

    def weight_seen() -> float:
        with torch.no_grad():
            samples = estimator.sample(rays)
            return float((samples.midpoints() - 2.5).abs().mean())

    before = weight_seen()
    for step in range(60):
        samples = estimator.sample(rays, draw=Draw(stratified=True, step=step))
        loss = estimator.loss(samples, nt.volume_rendering(field, samples).weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert weight_seen() < 0.6 * before
    assert all(parameter.grad is not None for parameter in proposal.parameters())
    assert wall.logit.grad is None


def test_a_hierarchy_adds_fine_samples_to_the_coarse_ones():
    coarse = nt.VanillaNeRF(Aabb.cube(4.0), VanillaConfig(width=8, depth=2))
    estimator = HierarchyEstimator(coarse, n_samples=6, coarse_samples=8, span=RaySpan(near=0.1, far=4.0))
    samples = estimator.sample(rays_along_z(), draw=Draw(stratified=True, step=1))
    assert samples.n_per_ray == 14 == estimator.samples_per_ray
    coarse_edges = samples.stages[0].edges
    assert bool((samples.edges[:, :, None] == coarse_edges[:, None, :]).any(1).all())  # all of them are in it
    color = samples.stages[0].color
    assert color is not None and color.shape == (3, 3)
    rays, t = rays_along_z(), estimator.span.distances(coarse_edges, rays_along_z())
    at = rays.origins[:, None] + rays.directions[:, None] * ((t[:, 1:] + t[:, :-1]) * 0.5)[..., None]
    rgb, _ = coarse(at.reshape(-1, 3), rays.directions.repeat_interleave(8, 0))
    wanted = (samples.stages[0].weights[..., None] * rgb.view(3, 8, 3)).sum(1)
    torch.testing.assert_close(color, wanted, atol=1e-5, rtol=1e-4)
    assert estimator.bytes_per_ray(10, 3) == 14 * 10 + 8 * 3
    color.sum().backward()
    assert coarse.color_head.weight.grad is not None
    with torch.no_grad():
        assert estimator.sample(rays_along_z()).stages[0].color is None


def test_what_does_not_fit_is_named():
    span = RaySpan(near=0.0, far=1.0)
    with pytest.raises(InputError, match="coarse_samples"):
        nt.ProposalEstimator([Wall()], n_samples=4, coarse_samples=(8, 8), span=span)
    with pytest.raises(InputError, match="n_samples"):
        UniformEstimator(0, span)
    wrong = nt.ProposalEstimator([lambda p: p], n_samples=4, coarse_samples=(8,), span=span)
    with pytest.raises(InputError, match="density"):
        wrong.sample(rays_along_z())
    with pytest.raises(InputError, match="spacing"):
        warp(torch.ones(1), "cubic")  # type: ignore[arg-type]
