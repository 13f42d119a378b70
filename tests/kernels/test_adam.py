"""Adam against torch's own and, for what torch does not offer, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nerfturbo.errors import InputError
from nerfturbo.ops import use_backend
from nerfturbo.ops.adam import AdamRule, AdamState, ScaleRule, adam_update, check_gradients, finish_step

from ..ops.cases import assert_close, generator

RULES = {
    "plain": AdamRule(),
    "decay": AdamRule(weight_decay=0.1),
    "decoupled": AdamRule(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, decoupled=True),
    "sparse": AdamRule(skip_untouched=True),
    "momentum-free": AdamRule(betas=(0.0, 0.99)),
}


def device_of(backend: str, kernel_device: torch.device) -> torch.device:
    return kernel_device if backend == "triton" else torch.device("cpu")


def train(backend: str, rule: AdamRule, device: torch.device, n: int, grad_dtype: torch.dtype) -> dict[str, Tensor]:
    """Five steps under a loss scale of 8; the fourth has a NaN and must leave no trace."""
    draw = generator(1)
    params = torch.randn(n, generator=draw).to(device)
    half = params.half()
    step = torch.zeros((), dtype=torch.int64, device=device)
    state, lr = AdamState.of(params, step), torch.tensor(0.01, device=device)
    scale, flag = torch.tensor(8.0, device=device), torch.zeros((), device=device)
    for index in range(5):
        grad = torch.randn(n, generator=draw) * (torch.rand(n, generator=draw) > 0.5)
        if index == 3:
            grad[n // 2] = float("nan")
        grad = (8 * grad).to(device, grad_dtype)
        with use_backend(backend):  # type: ignore[arg-type]
            check_gradients([grad], flag)
            adam_update(params, grad, state, lr, rule=rule, half=half, grad_scale=scale, found_inf=flag)
            finish_step(step, flag)
        assert (grad == 0).all(), "the gradient must be zeroed, also on a skipped step"
    assert step.item() == 4
    assert flag.item() == 0
    return {"params": params, "first": state.first, "second": state.second, "half": half}


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("name", list(RULES))
@pytest.mark.parametrize("n", [1, 1032, 2051])
def test_matches_reference(kernel_device: torch.device, backend: str, name: str, n: int) -> None:
    device = device_of(backend, kernel_device)
    got = train(backend, RULES[name], device, n, torch.float32)
    want = train("reference", RULES[name], device, n, torch.float32)
    for key, value in want.items():
        assert_close(key, got[key], value, 1e-5 if value.dtype == torch.float32 else None)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_half_gradients(kernel_device: torch.device, backend: str) -> None:
    device = device_of(backend, kernel_device)
    got = train(backend, AdamRule(), device, 515, torch.float16)
    want = train("reference", AdamRule(), device, 515, torch.float16)
    assert_close("params", got["params"], want["params"], 1e-5)


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("cuts", [(32, 1064, 2304), (1, 1063, 2051)])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float16, torch.bfloat16)])
def test_parts_with_a_decay_of_their_own(
    kernel_device: torch.device, backend: str, decoupled: bool, cuts: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """One update of a flat buffer is that of its parts, one by one; sums that overflowed count as the largest."""
    device, n = device_of(backend, kernel_device), cuts[-1]
    decays = tuple(zip((0, *cuts), cuts, (0.0, 0.5, 0.01), strict=False))
    results = []
    for way in ("whole", "parts"):
        draw = generator(4)
        params = torch.randn(n, generator=draw).to(device)
        half, flag, lr = params.half(), torch.zeros((), device=device), torch.tensor(0.01, device=device)
        state = AdamState.of(params, dtype=dtypes[1])
        for _ in range(3):
            grad = torch.randn(n, generator=draw) * (torch.rand(n, generator=draw) > 0.5)
            if dtypes[0] == torch.float16:
                grad[7], grad[1500] = (float("inf"), float("nan")) if way == "whole" else (65504.0, 0.0)
            grad, rule = grad.to(device, dtypes[0]), AdamRule(skip_untouched=True, decoupled=decoupled)
            if way == "whole":
                with use_backend(backend):  # type: ignore[arg-type]
                    adam_update(params, grad, state, lr, rule=replace(rule, decays=decays), half=half, found_inf=flag)
            else:
                for first, last, decay in decays:
                    part, own = [tensor[first:last] for tensor in state[:2]], replace(rule, weight_decay=decay)
                    with use_backend("reference"):
                        adam_update(
                            params[first:last], grad[first:last], AdamState(*part, state.step), lr, rule=own,
                            half=half[first:last],
                        )  # fmt: skip
            assert (grad == 0).all()
        results.append({"params": params, "first": state.first.float(), "second": state.second.float(), "half": half})
    assert torch.isfinite(results[0]["params"]).all()
    for name, want in results[1].items():
        # the interpreter cuts bf16 off where others round
        assert_close(name, results[0][name], want, 3e-2 if dtypes[1] == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("name", ["plain", "decay", "decoupled"])
def test_matches_torch(kernel_device: torch.device, backend: str, name: str) -> None:
    rule, device = RULES[name], device_of(backend, kernel_device)
    params = torch.randn(300, generator=generator(2)).to(device)
    theirs = torch.nn.Parameter(params.clone())
    kind = torch.optim.AdamW if rule.decoupled else torch.optim.Adam
    optimizer = kind([theirs], lr=0.02, betas=rule.betas, eps=rule.eps, weight_decay=rule.weight_decay)
    state, lr, flag = AdamState.of(params), torch.tensor(0.02, device=device), torch.zeros((), device=device)
    for seed in range(3):
        grad = torch.randn(300, generator=generator(10 + seed)).to(device)
        theirs.grad = grad.clone()
        optimizer.step()
        with use_backend(backend):  # type: ignore[arg-type]
            adam_update(params, grad, state, lr, rule=rule)
            finish_step(state.step, flag)
    assert_close("params", params, theirs.detach(), 1e-5)


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_gradient_norm_and_flag(kernel_device: torch.device, backend: str) -> None:
    device = device_of(backend, kernel_device)
    grads = [torch.randn(s, generator=generator(3)).to(device) for s in ((5000,), (7, 3), (0,))]
    flag = torch.zeros((), device=device)
    with use_backend(backend):  # type: ignore[arg-type]
        norm = check_gradients(grads, flag)
        assert flag.item() == 0
        assert_close("norm", norm, torch.cat([g.flatten() for g in grads]).norm(), 1e-5)
        for bad in (float("inf"), float("-inf"), float("nan")):
            flag.zero_()
            grads[1][2, 1] = bad
            check_gradients(grads, flag)
            assert flag.item() == 1


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_loss_scale_moves(kernel_device: torch.device, backend: str) -> None:
    device = device_of(backend, kernel_device)
    rule = ScaleRule(growth_interval=2, lowest=128.0, highest=1024.0)
    step, skipped = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
    scale, good = torch.tensor(256.0, device=device), torch.zeros((), dtype=torch.int32, device=device)
    flag = torch.zeros((), device=device)
    history = []
    with use_backend(backend):  # type: ignore[arg-type]
        for bad in (0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0):
            flag.fill_(bad)
            finish_step(step, flag, scale=scale, good_steps=good, skipped=skipped, rule=rule)
            history.append(scale.item())
    # doubled every second good step up to the top, halved on a bad one down to the floor
    assert history == [256, 512, 512, 256, 128, 128, 128, 256, 256, 512, 512, 1024, 1024, 1024]
    assert (step.item(), skipped.item(), flag.item()) == (11, 3, 0)


def test_wrong_arguments_are_named(kernel_device: torch.device) -> None:
    params, lr = torch.zeros(4, device=kernel_device), torch.tensor(0.1, device=kernel_device)
    with pytest.raises(InputError, match="grad"):
        adam_update(params, params[:3].clone(), AdamState.of(params), lr)
    with pytest.raises(InputError, match="params"):
        adam_update(params.half(), params.clone(), AdamState.of(params), lr)
    with pytest.raises(InputError, match="betas"):
        AdamRule(betas=(0.9, 1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "sparse"])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float16])
def test_real_shapes(name: str, grad_dtype: torch.dtype) -> None:
    device, n = torch.device("cuda"), 12_196_240
    got = train("triton", RULES[name], device, n, grad_dtype)
    want = train("reference", RULES[name], device, n, grad_dtype)
    for key, value in want.items():
        assert_close(key, got[key], value, 1e-5 if value.dtype == torch.float32 else None)
