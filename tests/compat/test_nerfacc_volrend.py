"""nerfacc's rendering functions: closed forms, one result in every form of samples, gradients of any order."""

from __future__ import annotations

import math

import pytest
import torch

import nerfturbo.compat.nerfacc as nerfacc
from nerfturbo.compat.nerfacc.volrend import accumulate_along_rays_
from nerfturbo.errors import InputError

COUNTS = [3, 0, 5, 1, 0]
N = sum(COUNTS)
RAYS = torch.repeat_interleave(torch.arange(len(COUNTS)), torch.tensor(COUNTS))


def flat_samples(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    starts = torch.arange(N, dtype=dtype) * 0.3
    ends = starts + 0.1 + 0.2 * torch.rand(N, generator=generator, dtype=dtype)
    return starts, ends, 3.0 * torch.rand(N, generator=generator, dtype=dtype)


def by_hand(starts: torch.Tensor, ends: torch.Tensor, sigmas: torch.Tensor) -> list[list[float]]:
    """weights, transmittance and alphas, one sample after the other in Python numbers."""
    weights, trans, alphas, left, ray = [], [], [], 1.0, -1
    for index in range(N):
        if int(RAYS[index]) != ray:
            left, ray = 1.0, int(RAYS[index])
        alpha = 1.0 - math.exp(-float(sigmas[index]) * float(ends[index] - starts[index]))
        weights.append(left * alpha)
        trans.append(left)
        alphas.append(alpha)
        left *= 1.0 - alpha
    return [weights, trans, alphas]


@pytest.mark.parametrize("form", ["indexed", "packed"])
def test_weights_are_those_of_the_formula(form: str):
    starts, ends, sigmas = flat_samples()
    where = {"ray_indices": RAYS, "n_rays": 5} if form == "indexed" else {"packed_info": nerfacc.pack_info(RAYS, 5)}
    expected = [torch.tensor(values) for values in by_hand(starts, ends, sigmas)]
    got = nerfacc.render_weight_from_density(starts, ends, sigmas, **where)
    for have, want in zip(got, expected, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-6)
    weights, trans = nerfacc.render_weight_from_alpha(expected[2], **where)
    torch.testing.assert_close(weights, expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(trans, expected[1], rtol=1e-5, atol=1e-6)
    prefix = torch.full((N,), 0.5)
    scaled = nerfacc.render_transmittance_from_alpha(expected[2], **where, prefix_trans=prefix)
    torch.testing.assert_close(scaled, 0.5 * trans)


def test_batched_rays_give_what_their_flattened_samples_give():
    sigmas = torch.rand(4, 6)
    edges = torch.sort(torch.rand(4, 7), -1).values
    starts, ends = edges[:, :-1], edges[:, 1:]
    indices = torch.arange(4).repeat_interleave(6)
    batched = nerfacc.render_weight_from_density(starts, ends, sigmas)
    flat = nerfacc.render_weight_from_density(
        starts.reshape(-1), ends.reshape(-1), sigmas.reshape(-1), ray_indices=indices, n_rays=4
    )
    for one, other in zip(batched, flat, strict=True):
        torch.testing.assert_close(one.reshape(-1), other)
    alphas = torch.rand(4, 6)
    for function in (nerfacc.inclusive_sum, nerfacc.exclusive_sum, nerfacc.inclusive_prod, nerfacc.exclusive_prod):
        torch.testing.assert_close(function(alphas).reshape(-1), function(alphas.reshape(-1), indices=indices))


@pytest.mark.parametrize("name", ["inclusive_sum", "exclusive_sum", "inclusive_prod", "exclusive_prod"])
def test_scans_have_exact_gradients_of_both_orders(name: str):
    scan = getattr(nerfacc, name)
    values = torch.rand(N, dtype=torch.float64)
    values[1] = 0.0  # a product's gradient must not divide by it
    values.requires_grad_()
    info = nerfacc.pack_info(RAYS, 5)
    assert torch.autograd.gradcheck(lambda x: scan(x, packed_info=info), values)
    assert torch.autograd.gradgradcheck(lambda x: scan(x * x, packed_info=info), values)


def test_an_opaque_sample_passes_its_gradient_on():
    alphas = torch.tensor([0.5, 1.0, 0.5], requires_grad=True)
    trans = nerfacc.render_transmittance_from_alpha(alphas, ray_indices=torch.zeros(3, dtype=torch.long), n_rays=1)
    (gradient,) = torch.autograd.grad(trans[2], alphas)
    torch.testing.assert_close(gradient, torch.tensor([0.0, -0.5, 0.0]))


@pytest.mark.parametrize("source", ["density", "alpha"])
def test_rendering_has_the_gradients_of_the_formula(source: str):
    starts, ends, sigmas = flat_samples(torch.float64)
    rgbs = torch.rand(N, 4, dtype=torch.float64).requires_grad_()
    values = (sigmas if source == "density" else sigmas / 3.5).requires_grad_()
    name = "rgb_sigma_fn" if source == "density" else "rgb_alpha_fn"

    def pixels(rgbs: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return nerfacc.rendering(
            starts, ends, RAYS, 5, **{name: lambda *_: (rgbs, values)}, render_bkgd=torch.ones(4, dtype=torch.float64)
        )[:3]

    assert torch.autograd.gradcheck(pixels, (rgbs, values))


def test_the_kernel_renders_what_the_plain_formulas_render():
    starts, ends, sigmas = flat_samples()
    rgbs, background = torch.rand(N, 3), torch.tensor([0.2, 0.4, 0.6])
    results = []
    for dtype in (torch.float32, torch.float64):  # 64 bits take the plain way
        parts = [value.to(dtype, copy=True).requires_grad_() for value in (sigmas, rgbs)]
        out = nerfacc.rendering(
            starts.to(dtype), ends.to(dtype), RAYS, 5, rgb_sigma_fn=lambda *_: (parts[1], parts[0]),  # noqa: B023
            render_bkgd=background.to(dtype),
        )  # fmt: skip
        (out[0].square().sum() + out[2].sum() + out[3]["weights"].square().sum()).backward()
        assert [tuple(value.shape) for value in out[:3]] == [(5, 3), (5, 1), (5, 1)]
        assert list(out[3]) == ["weights", "alphas", "trans", "sigmas", "rgbs"]
        assert all(value.shape[0] == N for value in dict(out[3]).values())
        results.append([*out[:3], *out[3].values(), *[part.grad for part in parts]])
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused.double(), plain, rtol=2e-5, atol=2e-6)


def test_extras_are_differentiable_when_they_are_read():
    starts, ends, sigmas = flat_samples()
    sigmas.requires_grad_()
    extras = nerfacc.rendering(starts, ends, RAYS, 5, rgb_sigma_fn=lambda *_: (torch.rand(N, 3), sigmas))[3]
    (gradient,) = torch.autograd.grad(extras["trans"].sum() + extras.get("alphas").sum(), sigmas)
    assert gradient.abs().sum() > 0.0 and extras["trans"] is extras.pop("trans") and "trans" not in extras


def test_half_precision_fields_render_in_full_precision():
    starts, ends, sigmas = flat_samples()
    out = nerfacc.rendering(starts, ends, RAYS, 5, rgb_sigma_fn=lambda *_: (torch.rand(N, 3).half(), sigmas.half()))
    exact = nerfacc.render_weight_from_density(starts, ends, sigmas.half().float(), ray_indices=RAYS, n_rays=5)[0]
    assert out[0].dtype == torch.float32
    torch.testing.assert_close(out[3]["weights"], exact)


def test_an_opaque_background_is_an_infinite_density():
    """How nerfacc's proposal example closes its rays."""
    starts = torch.linspace(1.0, 2.0, 7)[:-1].expand(4, 6).contiguous()
    results = []
    for dtype in (torch.float32, torch.float64):
        raw = torch.linspace(0.1, 3.0, 24, dtype=dtype).view(4, 6).requires_grad_()
        rgb = torch.linspace(0.0, 1.0, 72, dtype=dtype).view(4, 6, 3)

        def field(*_, raw=raw, rgb=rgb):
            sigmas = raw * 1.0
            sigmas[:, -1] = torch.inf
            return rgb, sigmas

        t = starts.to(dtype)
        colors, opacities, depths, extras = nerfacc.rendering(t, t + 1.0 / 6.0, rgb_sigma_fn=field)
        torch.testing.assert_close(opacities, torch.ones_like(opacities))
        (colors.square().sum() + depths.sum() + extras["trans"].sum()).backward()
        results.append([colors, depths, raw.grad])
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused.double(), plain, rtol=1e-4, atol=1e-5)


def test_nothing_to_render_is_background():
    nothing = torch.zeros(0)
    out = nerfacc.rendering(
        nothing, nothing, nothing.long(), 3, rgb_sigma_fn=lambda *_: 1 / 0, render_bkgd=torch.ones(3)
    )
    assert out[0].tolist() == [[1.0] * 3] * 3 and out[1].tolist() == [[0.0]] * 3
    assert nerfacc.inclusive_prod(nothing, indices=nothing.long()).shape == (0,)
    assert nerfacc.pack_info(nothing.long(), 2).tolist() == [[0, 0], [0, 0]]


def test_strided_samples_are_read_where_they_are():
    starts, ends, sigmas = (torch.stack([value, value], -1)[:, 0] for value in flat_samples())
    assert not sigmas.is_contiguous()
    indices = torch.stack([RAYS, RAYS], -1)[:, 0]
    out = nerfacc.rendering(starts, ends, indices, 5, rgb_sigma_fn=lambda *_: (torch.ones(3, N).T, sigmas))
    torch.testing.assert_close(out[3]["weights"], torch.tensor(by_hand(starts, ends, sigmas)[0]), rtol=1e-5, atol=1e-6)


def test_visibility_is_transmittance_and_opacity_above_the_thresholds():
    starts, ends, sigmas = flat_samples()
    _, trans, alphas = (torch.tensor(values) for values in by_hand(starts, ends, sigmas))
    for eps, thin in ((0.5, 0.0), (0.0, 0.3), (0.6, 0.2)):
        expected = (trans >= eps) & (alphas >= thin)
        where = {"ray_indices": RAYS, "n_rays": 5, "early_stop_eps": eps, "alpha_thre": thin}
        assert nerfacc.render_visibility_from_density(starts, ends, sigmas, **where).tolist() == expected.tolist()
        assert nerfacc.render_visibility_from_alpha(alphas, **where).tolist() == expected.tolist()


def test_accumulation_takes_rays_in_any_order_and_any_channels():
    order = torch.randperm(N)
    weights, values = torch.rand(N), torch.rand(N, 7)
    sums = nerfacc.accumulate_along_rays(weights, values, RAYS, 5)
    torch.testing.assert_close(sums, nerfacc.accumulate_along_rays(weights[order], values[order], RAYS[order], 5))
    into = torch.ones(5, 7)
    accumulate_along_rays_(weights, values, RAYS, into)
    torch.testing.assert_close(into, sums + 1.0)


def test_distortion_is_the_double_sum_of_the_paper():
    starts, ends, sigmas = flat_samples(torch.float64)
    weights = (sigmas / sigmas.sum()).requires_grad_()
    loss = nerfacc.distortion(weights, starts, ends, RAYS, 5)
    middle, expected = (starts + ends) / 2, torch.zeros(5, dtype=torch.float64)
    for i in range(N):
        expected[RAYS[i]] += weights[i].item() ** 2 * (ends - starts)[i] / 3
        for j in range(N):
            if RAYS[i] == RAYS[j]:
                expected[RAYS[i]] += weights[i].item() * weights[j].item() * (middle[i] - middle[j]).abs()
    torch.testing.assert_close(loss[:, 0].detach(), expected)
    assert torch.autograd.gradcheck(lambda w: nerfacc.distortion(w, starts, ends, RAYS, 5), weights)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: nerfacc.rendering(torch.ones(2), torch.ones(2), torch.tensor([0, 0]), 1), "rgb_sigma_fn"),
        (lambda: nerfacc.rendering(torch.ones(2), torch.ones(2), torch.tensor([0]), 1), "ray_indices"),
        (
            lambda: nerfacc.rendering(
                torch.ones(2), torch.ones(2), torch.tensor([0, 0]), 1,
                rgb_sigma_fn=lambda *_: (torch.ones(2, 3), torch.ones(2, 1)),
            ),
            "squeeze",
        ),
        (lambda: nerfacc.inclusive_sum(torch.ones(3), indices=torch.tensor([1, 0, 0])), "ascending"),
        (lambda: nerfacc.inclusive_sum(torch.ones(3), packed_info=torch.tensor([[0, 1], [2, 1]])), "follow"),
        (lambda: nerfacc.inclusive_sum(torch.ones(1), torch.tensor([[0, 1]]), torch.tensor([0])), "only one"),
        (lambda: nerfacc.accumulate_along_rays(torch.ones(2), None, torch.tensor([0, 1, 1]), 2), "weights"),
    ],
)  # fmt: skip
def test_wrong_input_is_named(call, word: str):
    with pytest.raises(InputError, match=word):
        call()
