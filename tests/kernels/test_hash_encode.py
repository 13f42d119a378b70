"""What the hash encoding's kernels add to the op: half copies, gradient buffers, unused rows, a deterministic mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nerfturbo.ops import GradientSink, HashLayout, hash_encode, use_backend
from nerfturbo.ops._sink import Held
from nerfturbo.ops.hash_encode.reference import thin_out

from ..ops.cases import assert_close, generator

SMALL = {"log2_entries": 8, "base_resolution": 4, "max_resolution": 900}  # coarse, dense levels and fine, hashed ones


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def ray_points(n: int, device: torch.device, per_ray: int = 11, seed: int = 0) -> Tensor:
    """(n, 3): consecutive samples of rays through the unit cube, some of them leaving it."""
    draw = generator(seed)
    n_rays = -(-n // per_ray)
    start = torch.rand(n_rays, 1, 3, generator=draw)
    step = torch.nn.functional.normalize(torch.randn(n_rays, 1, 3, generator=draw), dim=-1) / 600
    points = start + step * torch.arange(per_ray)[None, :, None]
    return points.reshape(-1, 3)[:n].to(device)


def table_gradient(
    backend: str, positions: Tensor, table: Tensor, layout: HashLayout, grad: Tensor, **options: object
) -> tuple[Tensor, Tensor]:
    """The encoding and the gradient of the fp32 table under `grad`."""
    leaf = table.detach().clone().requires_grad_()
    with use_backend(backend):  # type: ignore[arg-type]
        out = hash_encode(positions, leaf, layout, **options)  # type: ignore[arg-type]
        out.backward(grad.to(out.dtype))
    return out.detach(), leaf.grad


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("features", [2, 4])
def test_unused_rows_are_zero_and_give_no_gradient(kernel_device: torch.device, features: int) -> None:
    layout = HashLayout(n_levels=3, n_features=features, **SMALL)
    n, used = 45, 37
    positions = ray_points(n, kernel_device)
    positions[used:] = float("nan")
    table = torch.randn(layout.n_entries, features, generator=generator(1)).to(kernel_device)
    grad = torch.randn(n, layout.n_outputs, generator=generator(2)).to(kernel_device)
    grad[used:] = float("nan")
    count = torch.tensor(used, dtype=torch.int32, device=kernel_device)
    got, got_grad = table_gradient("triton", positions, table, layout, grad, n_used=count)
    want, want_grad = table_gradient("reference", positions, table, layout, grad, n_used=count)
    assert (got[used:] == 0).all()
    assert_close("encoding", got, want)
    assert_close("gradient to table", got_grad, want_grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sink_takes_the_gradient_of_the_master(kernel_device: torch.device, dtype: torch.dtype) -> None:
    layout = HashLayout(n_levels=3, n_features=2, **SMALL)
    positions = ray_points(33, kernel_device).t().contiguous().t()  # feature-major, as marching leaves them
    master = torch.randn(layout.n_entries, 2, generator=generator(1)).to(kernel_device).requires_grad_()
    grad = torch.randn(33, layout.n_outputs, generator=generator(2)).to(kernel_device).half()
    buffer = torch.ones(master.shape, dtype=dtype, device=kernel_device)
    flag = torch.zeros((), device=kernel_device)
    with use_backend("triton"):
        out = hash_encode(positions, master, layout, half=master.detach().half(), sink=GradientSink((buffer,), flag))
        out.backward(grad)
    assert out.dtype == torch.float16
    assert master.grad is None
    assert flag.item() == 0
    want, want_grad = table_gradient("reference", positions, master.detach().half().float(), layout, grad.float())
    assert_close("encoding", out.detach().float(), want, 2e-3)
    assert_close("buffer", buffer.float() - 1, want_grad, 2e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("mode", ["free", "deterministic"])
@pytest.mark.parametrize("backend", ["triton", "cpu", "reference"])
def test_a_held_table_gets_the_gradient_of_the_levels_that_are_asked_for(
    kernel_device: torch.device, backend: str, mode: str, request: pytest.FixtureRequest
) -> None:
    """Slices of the gradient of the whole, whatever the order: of both kinds of levels in one part, and thinned."""
    if mode == "deterministic":
        request.getfixturevalue("deterministic")
    device = kernel_device if backend == "triton" else torch.device("cpu")
    layout = HashLayout(n_levels=5, n_features=2, log2_entries=8, base_resolution=4, max_resolution=4000)
    assert [level.scale <= 450 for level in layout.levels] == [True] * 3 + [False] * 2
    positions, table = ray_points(150, device), torch.randn(layout.n_entries, 2, generator=generator(1)).to(device)
    grad = torch.randn(150, layout.n_outputs, generator=generator(2)).to(device)
    whole, parts, held = torch.ones_like(table), torch.ones_like(table), Held()
    table_gradient(backend, positions, table, layout, grad, sink=GradientSink((whole,), thin=0.5, held=held))
    assert not held.waiting and not torch.equal(whole, parts)
    held.on, flag = True, torch.zeros((), device=device)
    table_gradient(backend, positions, table, layout, grad, sink=GradientSink((parts,), flag, thin=0.5, held=held))
    assert (parts == 1).all(), "not yet"
    ((buffer, add),) = held.release()
    assert buffer is parts and not held.on and not held.waiting
    cuts = [0, layout.levels[2].offset, layout.levels[4].offset, layout.n_entries]
    for first, last in [(cuts[2], cuts[3]), (cuts[0], cuts[1]), (cuts[1], cuts[2])]:
        before = parts.clone()
        add(first, last)
        inside = slice(first, last)
        if mode == "deterministic" or device.type == "cpu":
            assert torch.equal(parts[inside], whole[inside])
        else:
            assert_close("levels", parts[inside], whole[inside], 1e-5)
        before[inside] = parts[inside]
        assert torch.equal(parts, before), "no other rows"
    assert flag.item() == 0


@pytest.mark.parametrize("backend", ["triton", "cpu", "reference"])
def test_a_held_gradient_that_is_not_finite_is_reported_with_its_level(
    kernel_device: torch.device, backend: str
) -> None:
    device = kernel_device if backend == "triton" else torch.device("cpu")
    layout, held, flag = HashLayout(n_levels=3, n_features=2, **SMALL), Held(on=True), torch.zeros((), device=device)
    table, grad = torch.zeros(layout.n_entries, 2, device=device), torch.ones(7, layout.n_outputs, device=device)
    grad[3, 0] = float("inf")
    sink = GradientSink((torch.zeros_like(table),), flag, held=held)
    table_gradient(backend, ray_points(7, device), table, layout, grad, sink=sink)
    ((_, add),) = held.release()
    add(layout.levels[1].offset, layout.n_entries)
    assert flag.item() == float(backend == "reference"), "the bad one is of the first level"
    add(0, layout.levels[1].offset)
    assert flag.item() == 1


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_sink_that_thins_leaves_small_gradients_out(kernel_device: torch.device, dtype: torch.dtype) -> None:
    """As the reference says, in the same places, over two groups and a part of one; coarse levels keep all."""
    layout = HashLayout(n_levels=3, n_features=2, log2_entries=8, base_resolution=600, max_resolution=4000)
    n, used = 300, 290
    positions = torch.rand(n, 3, generator=generator(4)).to(kernel_device)
    grad = torch.randn(n, layout.n_outputs, generator=generator(2)).to(kernel_device).pow(3).half()
    grad[used:] = float("nan")
    count = torch.tensor(used, dtype=torch.int32, device=kernel_device)
    table = torch.randn(layout.n_entries, 2, generator=generator(1)).to(kernel_device)
    buffer = torch.zeros(table.shape, dtype=dtype, device=kernel_device)
    sink = GradientSink((buffer,), torch.zeros((), device=kernel_device), thin=1.5)
    table_gradient("triton", positions, table, layout, grad, sink=sink, n_used=count)
    thinned = thin_out(grad[:used].float(), positions[:used], layout, 1.5)
    left_out = (thinned == 0).float().mean().item()
    assert 0.2 < left_out < 0.8, "some go, some stay"
    _, want = table_gradient("reference", positions[:used], table, layout, thinned)
    assert_close("buffer", buffer.float(), want, 2e-5 if dtype == torch.float32 else 5e-3)

    coarse = HashLayout(n_levels=2, n_features=2, log2_entries=8, base_resolution=4, max_resolution=400)
    buffer = torch.zeros(coarse.n_entries, 2, device=kernel_device)
    grad = grad[:40, :4].float()
    options = {"sink": GradientSink((buffer,), thin=1.5)}
    table = torch.zeros(coarse.n_entries, 2, device=kernel_device)
    table_gradient("triton", positions[:40], table, coarse, grad, **options)
    _, want = table_gradient("reference", positions[:40], table, coarse, grad)
    assert_close("coarse levels", buffer, want)


def test_thinned_gradients_are_right_in_the_mean() -> None:
    """The mean over positions is the gradient itself; large ones stay as they are, and zero stays zero."""
    layout, thin = HashLayout(n_levels=2, n_features=2, **SMALL), 2.0
    grad = torch.randn(130, 4, generator=generator(3)).pow(3)
    grad[5] = 0.0
    drawn = [thin_out(grad, torch.rand(130, 3, generator=generator(10 + i)), layout, thin) for i in range(2000)]
    size = grad.view(130, 2, 2).abs().amax(-1)
    least = thin * torch.cat([size[:128].mean(0).expand(128, 2), size[128:].sum(0).expand(2, 2) / 128])
    large = (size >= least).repeat_interleave(2, 1)
    assert large.any() and not large.all()
    assert all(torch.equal(one[large], grad[large]) for one in drawn[:20])
    assert all((one[5] == 0).all() for one in drawn)
    spread = (size * (least - size).clamp(min=0)).sqrt().repeat_interleave(2, 1)  # of one draw: sqrt(p (1 - p)) t
    off = (torch.stack(drawn).mean(0) - grad).abs()
    assert (off <= 5.0 * spread / 2000**0.5 + 1e-5).all()


def test_a_sink_reports_a_gradient_that_is_not_finite(kernel_device: torch.device) -> None:
    layout = HashLayout(n_levels=2, n_features=2, **SMALL)
    table = torch.zeros(layout.n_entries, 2, device=kernel_device, requires_grad=True)
    for bad in (float("inf"), float("nan")):
        flag = torch.zeros(1, device=kernel_device)
        grad = torch.ones(5, layout.n_outputs, device=kernel_device)
        grad[3, 2] = bad
        with use_backend("triton"):
            sink = GradientSink((torch.zeros_like(table),), flag)
            hash_encode(ray_points(5, kernel_device), table, layout, sink=sink).backward(grad)
        assert flag.item() == 1


def test_gpus_without_vector_atomics_give_the_same(
    kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nerfturbo.ops.hash_encode import triton as _hash_backward

    layout = HashLayout(n_levels=2, n_features=2, **SMALL)
    positions = ray_points(40, kernel_device)
    table = torch.randn(layout.n_entries, 2, generator=generator(1)).to(kernel_device)
    grad = torch.randn(40, layout.n_outputs, generator=generator(2)).to(kernel_device)
    _, vectors = table_gradient("triton", positions, table, layout, grad)
    monkeypatch.setattr(_hash_backward, "_vector_atomics", lambda device: False)
    _, scalars = table_gradient("triton", positions, table, layout, grad)
    assert_close("gradient to table", scalars, vectors)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_gradient_is_accurate_over_a_wide_range(kernel_device: torch.device) -> None:
    """Fixed-point sums take their scale from the largest gradient; small ones must survive beside it."""
    layout = HashLayout(n_levels=2, n_features=2, **SMALL)
    positions = ray_points(40, kernel_device)
    table = torch.randn(layout.n_entries, 2, generator=generator(1)).to(kernel_device)
    grad = torch.randn(40, layout.n_outputs, generator=generator(2)).to(kernel_device)
    grad = grad * torch.logspace(-4, 4, 40, device=kernel_device)[:, None]
    _, got = table_gradient("triton", positions, table, layout, grad)
    _, want = table_gradient("reference", positions, table, layout, grad)
    close = (got - want).abs() <= 1e-5 * want.abs() + 1e-6
    assert close.all(), f"{(~close).sum().item()} values are off"


@pytest.mark.usefixtures("deterministic")
def test_deterministic_gradient_shows_what_is_not_finite(kernel_device: torch.device) -> None:
    layout = HashLayout(n_levels=1, n_features=2, **SMALL)
    table = torch.zeros(layout.n_entries, 2, device=kernel_device)
    grad = torch.full((3, layout.n_outputs), float("inf"), device=kernel_device)
    _, got = table_gradient("triton", ray_points(3, kernel_device), table, layout, grad)
    assert got.isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize(("levels", "features"), [(16, 2), (8, 4), (16, 1), (4, 8)])
@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.float16])
def test_real_shapes(levels: int, features: int, buffer_dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    layout = HashLayout(n_levels=levels, n_features=features)
    n, used = 1 << 17, 100_003
    positions = ray_points(n, device, per_ray=29)
    table = torch.randn(layout.n_entries, features, device=device)
    grad = (torch.randn(n, layout.n_outputs, device=device) * 1e-2).half()
    count = torch.tensor(used, dtype=torch.int32, device=device)
    buffer = torch.zeros(table.shape, dtype=buffer_dtype, device=device)
    half = table.half()
    options = {"half": half, "n_used": count}
    got, _ = table_gradient("triton", positions, table, layout, grad, sink=GradientSink((buffer,)), **options)
    want, want_grad = table_gradient("reference", positions, half.float(), layout, grad.float(), n_used=count)
    assert_close("encoding", got.float(), want, 2e-3)
    error = (buffer.float() - want_grad).norm() / want_grad.norm()
    assert error < (1e-4 if buffer_dtype == torch.float32 else 1e-2), f"table gradient is off by {error.item():.2g}"


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
def test_deterministic_gradient_is_bit_equal() -> None:
    device = torch.device("cuda")
    layout = HashLayout()
    positions = ray_points(1 << 17, device, per_ray=29)
    table = torch.randn(layout.n_entries, 2, device=device)
    grad = torch.randn(1 << 17, layout.n_outputs, device=device)
    runs = [table_gradient("triton", positions, table, layout, grad)[1] for _ in range(3)]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
    _, want = table_gradient("reference", positions, table, layout, grad)
    assert_close("gradient to table", runs[0], want, 1e-4)


def test_gpus_since_hopper_add_several_numbers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = pytest.importorskip("nerfturbo.ops.hash_encode.triton")
    for hip, generation in ((None, 8), (None, 9), ("6.2", 9)):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=generation: (found, 0))
        assert encoder._vector_atomics.__wrapped__(torch.device("cuda")) == (hip is None and generation == 9)
