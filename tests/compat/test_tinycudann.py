"""tiny-cuda-nn's modules: widths, parameter counts, the encodings' formulas, checkpoints, gradients of both orders."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

import nerfturbo.compat.tinycudann as tcnn
from nerfturbo.compat.tinycudann._encodings import Grid, GridSpec
from nerfturbo.errors import InputError
from nerfturbo.ops import spherical_harmonics, use_backend
from nerfturbo.ops.spherical_harmonics import reference

HASH = {
    "otype": "HashGrid",
    "n_levels": 4,
    "n_features_per_level": 2,
    "log2_hashmap_size": 8,
    "base_resolution": 3,
    "per_level_scale": 1.7,
}
MLP = {
    "otype": "FullyFusedMLP",
    "activation": "ReLU",
    "output_activation": "None",
    "n_neurons": 16,
    "n_hidden_layers": 2,
}
POINTS = torch.rand(40, 3, generator=torch.Generator().manual_seed(0))


def loud(module: tcnn.Module) -> tcnn.Module:
    """Features of order one, so that gradients through the grid are worth comparing."""
    with torch.no_grad():
        module.params[module._n_network :].uniform_(-1.0, 1.0, generator=torch.Generator().manual_seed(1))
    return module


def test_parameter_counts_are_tiny_cuda_nns():
    """instant-ngp prints these for its default NeRF configuration and for a scene four times as large."""
    counts = [GridSpec("hash", 3, 16, 2, 19, 16, growth, "linear").original_rows * 2 for growth in (1.38191, 1.51572)]
    assert counts == [12196240, 13074912]
    config = {"otype": "FullyFusedMLP", "n_neurons": 64, "n_hidden_layers": 1}
    density, color = tcnn.Network(32, 16, config), tcnn.Network(32, 3, {**config, "n_hidden_layers": 2})
    assert density.params.numel() + color.params.numel() == 10240  # three outputs are padded to sixteen


@pytest.mark.parametrize(
    ("config", "inputs", "outputs"),
    [
        (HASH, 3, 8),
        ({"otype": "DenseGrid", "n_levels": 2, "base_resolution": 4}, 3, 4),
        ({"otype": "TiledGrid", "n_levels": 3, "base_resolution": 4}, 2, 6),
        (
            {"otype": "grid", "type": "Hash", "n_features": 8, "interpolation": "Smoothstep", "log2_hashmap_size": 6},
            4,
            8,
        ),
        ({"otype": "Frequency", "n_frequencies": 5}, 3, 30),
        ({"otype": "TriangleWave", "n_frequencies": 5}, 3, 15),
        ({"otype": "SphericalHarmonics", "degree": 4}, 3, 16),
        ({"otype": "SphericalHarmonics", "degree": 6}, 3, 36),
        ({"otype": "OneBlob", "n_bins": 8}, 2, 16),
        ({"otype": "Identity"}, 5, 5),
        ({"otype": "Composite", "nested": [{"otype": "Identity", "n_dims_to_encode": 1}, HASH]}, 4, 10),
    ],
)
def test_encodings_have_their_widths_and_gradients(config, inputs: int, outputs: int):
    module = loud(tcnn.Encoding(inputs, config))
    assert module.n_output_dims == outputs and module.dtype == torch.float32
    x = torch.rand(7, inputs) * 0.9 + 0.05
    assert module(x).shape == (7, outputs) and module(x[:0]).shape == (0, outputs)
    exact = copy.deepcopy(module).double()
    torch.testing.assert_close(module(x).double(), exact(x.double()), atol=2e-5, rtol=1e-4)
    if config.get("interpolation") != "Nearest":
        fewer = x[:2].double().requires_grad_()
        assert torch.autograd.gradcheck(exact, fewer, eps=1e-7)


def test_an_encoding_without_parameters_makes_no_graph():
    assert not tcnn.Encoding(3, {"otype": "Frequency"})(POINTS).requires_grad


def test_frequencies_triangles_and_blobs_are_those_of_the_formulas():
    x = torch.tensor([[0.3, 0.6]])
    freq = tcnn.Encoding(2, {"otype": "Frequency", "n_frequencies": 2})(x)[0].tolist()
    expected = [f(2**k * math.pi * v) for v in (0.3, 0.6) for k in (0, 1) for f in (math.sin, math.cos)]
    assert freq == pytest.approx(expected, abs=1e-6)
    wave = tcnn.Encoding(1, {"otype": "TriangleWave", "n_frequencies": 2})(torch.tensor([[0.0], [1.0], [0.5]]))
    assert wave.tolist() == [[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]
    blobs = tcnn.Encoding(1, {"otype": "OneBlob", "n_bins": 8})(torch.rand(20, 1))
    torch.testing.assert_close(blobs.sum(-1), torch.ones(20))  # a bump has weight one, also across the border
    centre = tcnn.Encoding(1, {"otype": "OneBlob", "n_bins": 4})(torch.tensor([[0.375]]))[0].tolist()
    assert max(centre) == centre[1] and centre[0] == pytest.approx(centre[2])


def test_spherical_harmonics_of_any_degree_are_orthonormal():
    directions = nn.functional.normalize(torch.randn(60000, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    basis = reference.spherical_harmonics(directions, 6)
    torch.testing.assert_close(basis.T @ basis / 60000 * 4 * math.pi, torch.eye(36), atol=0.06, rtol=0.0)
    torch.testing.assert_close(basis[:100, :16], spherical_harmonics(directions[:100], 4), atol=1e-5, rtol=1e-4)


def original_row(spec: GridSpec, level: int, node: tuple[int, ...]) -> int:
    """tiny-cuda-nn's indexing, in Python numbers."""
    size, nodes, stride, index = spec.rows(level), spec.nodes(level), 1, 0
    for axis in range(spec.dims):
        if stride > size:
            break
        index, stride = index + node[axis] * stride, stride * nodes
    if spec.kind == "hash" and size < stride:
        index = 0
        for value, prime in zip(node, (1, 2654435761, 805459861, 3674653429), strict=False):
            index ^= value * prime % 2**32
    return index % size


@pytest.mark.parametrize("kind", ["hash", "dense"])
def test_a_checkpoint_of_tiny_cuda_nn_loads_into_the_same_function(kind: str):
    spec = GridSpec(kind, 3, 3, 2, 7, 4, 1.6, "linear")
    grid = Grid(spec)
    assert grid.layout is not None and grid.n_params != grid.n_original_params
    module = tcnn.NetworkWithInputEncoding(3, 2, {
        "otype": "Grid", "type": kind, "n_levels": 3, "log2_hashmap_size": 7, "base_resolution": 4,
        "per_level_scale": 1.6,
    }, MLP)  # fmt: skip
    saved = torch.randn(module._n_network + grid.n_original_params, generator=torch.Generator().manual_seed(2))
    module.load_state_dict({"params": saved.half()})
    assert torch.equal(module.params[: module._n_network], saved.half().float()[: module._n_network])
    table = saved.half().float()[module._n_network :].view(-1, 2)
    x = torch.cat([POINTS[:5], torch.tensor([[0.0, 1.0, 0.5], [1.0, 1.0, 1.0]])])
    encoded = grid(x, module.params[module._n_network :].detach(), None)
    for row, point in enumerate(x.tolist()):
        expected, offset = [], 0
        for level in range(3):
            places = [value * spec.scale(level) + 0.5 for value in point]
            value = torch.zeros(2)
            for corner in range(8):
                bits = [(corner >> axis) & 1 for axis in range(3)]
                node = tuple(math.floor(place) + bit for place, bit in zip(places, bits, strict=True))
                weight = math.prod(
                    (place % 1.0) if bit else 1.0 - place % 1.0 for place, bit in zip(places, bits, strict=True)
                )
                value = value + weight * table[offset + original_row(spec, level, node)]
            expected.append(value)
            offset += spec.rows(level)
        torch.testing.assert_close(encoded[row], torch.cat(expected), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("blend", ["Linear", "Smoothstep", "Nearest"])
@pytest.mark.parametrize(
    ("kind", "dims"), [("tiled", 2), ("tiled", 3), ("hash", 1), ("hash", 4), ("dense", 2), ("hash", 3)]
)
def test_grids_are_the_formula_over_a_saved_table(kind: str, dims: int, blend: str):
    """In every dimension and blending, from the flat vector that tiny-cuda-nn saves."""
    spec = GridSpec(kind, dims, 2, 2, 6, 4, 1.7, blend.lower())
    module = tcnn.Encoding(dims, {
        "otype": f"{kind}Grid", "n_levels": 2, "log2_hashmap_size": 6, "base_resolution": 4, "per_level_scale": 1.7,
        "interpolation": blend, "hash": "CoherentPrime",
    })  # fmt: skip
    saved = torch.randn(spec.original_rows * 2, generator=torch.Generator().manual_seed(3))
    module.load_state_dict({"params": saved})
    x = torch.rand(6, dims, generator=torch.Generator().manual_seed(4))
    table, found = saved.view(-1, 2), module(x)
    for row, point in enumerate(x.tolist()):
        expected, offset = [], 0
        for level in range(2):
            places = [value * spec.scale(level) + 0.5 for value in point]
            shares = [place % 1.0 for place in places]
            if blend == "Smoothstep":
                shares = [share * share * (3.0 - 2.0 * share) for share in shares]
            shares = [0.0] * dims if blend == "Nearest" else shares
            value = torch.zeros(2)
            for bits in itertools.product((0, 1), repeat=dims):
                node = tuple(math.floor(place) + bit for place, bit in zip(places, bits, strict=True))
                weight = math.prod(share if bit else 1.0 - share for share, bit in zip(shares, bits, strict=True))
                value = value + weight * table[offset + original_row(spec, level, node)]
            expected.append(value)
            offset += spec.rows(level)
        torch.testing.assert_close(found[row], torch.cat(expected), atol=2e-4, rtol=1e-3)


def test_blobs_are_integrals_of_a_quartic_bump():
    """15/16 (1 - u^2)^2 of one bin's radius around x, wrapped around, summed over each bin."""
    bins, x = 4, torch.tensor([0.03, 0.37, 0.5, 0.99])
    places = (torch.arange(-20000, 40000, dtype=torch.float64) + 0.5) / 20000
    u = (places - x[:, None]) * bins
    bump = torch.where(u.abs() < 1.0, 15.0 / 16.0 * (1.0 - u.square()).square() * bins, 0.0) / 20000
    inside = torch.stack([bump[:, (places % 1.0 * bins).long() == index].sum(-1) for index in range(bins)], -1)
    found = tcnn.Encoding(1, {"otype": "OneBlob", "n_bins": bins})(x[:, None])
    torch.testing.assert_close(found.double(), inside, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["OneBlobFrequency", "nrc"])
def test_neural_radiance_caching_is_waves_blobs_and_the_rest(name: str):
    x = torch.rand(5, 10)
    found = tcnn.Encoding(10, {"otype": name, "n_frequencies": 3})(x)
    parts = [({"otype": "TriangleWave", "n_frequencies": 3}, 0, 3), ({"otype": "OneBlob", "n_bins": 4}, 3, 8)]
    expected = [tcnn.Encoding(end - begin, config)(x[:, begin:end]) for config, begin, end in parts]
    torch.testing.assert_close(found, torch.cat([*expected, x[:, 8:]], -1))


@pytest.mark.parametrize(("inputs", "outputs"), [(5, 3), (16, 16)])
@pytest.mark.parametrize(
    "config",
    [
        MLP,
        {**MLP, "output_activation": "Sigmoid"},
        {"otype": "CutlassMLP", "n_neurons": 24, "n_hidden_layers": 4, "activation": "Softplus"},
        {"otype": "CutlassMLP", "n_neurons": 8, "n_hidden_layers": 0, "output_activation": "Exponential"},
    ],
)
def test_networks_are_chains_of_matrices_with_ones_in_the_padding(config, inputs: int, outputs: int):
    module = tcnn.Network(inputs, outputs, config)
    step = 16 if config["otype"] == "FullyFusedMLP" else 8
    padded, width = -(-inputs // step) * step, config["n_neurons"]
    sizes = [padded, *[width] * config["n_hidden_layers"], -(-outputs // step) * step]
    x = torch.randn(9, inputs)
    hidden, offset = torch.cat([x, torch.ones(9, padded - inputs)], -1), 0
    hidden_activation = {"ReLU": torch.relu, "Softplus": nn.functional.softplus}[config.get("activation", "ReLU")]
    for index in range(len(sizes) - 1):
        weight = module.params[offset : offset + sizes[index] * sizes[index + 1]].view(sizes[index + 1], sizes[index])
        hidden, offset = hidden @ weight.T, offset + weight.numel()
        if index + 2 < len(sizes):
            hidden = hidden_activation(hidden)
    last = {"Sigmoid": torch.sigmoid, "Exponential": torch.exp}.get(config.get("output_activation", ""), lambda v: v)
    assert offset == module.params.numel()
    torch.testing.assert_close(module(x), last(hidden)[:, :outputs], atol=1e-5, rtol=1e-4)


def test_second_derivatives_are_exact_in_64_bits():
    module = loud(tcnn.NetworkWithInputEncoding(3, 2, {**HASH, "n_levels": 2}, {**MLP, "n_hidden_layers": 1})).double()
    x = POINTS[:2].double().requires_grad_()
    start = module.params.detach().clone()
    chosen = torch.arange(0, start.numel(), 97)  # all of them would take minutes

    def function(x: torch.Tensor, some: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, {"params": start.index_put((chosen,), some)}, (x,))

    some = start[chosen].clone().requires_grad_()
    assert torch.autograd.gradcheck(function, (x, some), eps=1e-7)
    assert torch.autograd.gradgradcheck(function, (x, some), eps=1e-7, atol=1e-4)


def eikonal(module: tcnn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of a loss on the output and on its slope, as signed-distance training has it."""
    x = x.clone().requires_grad_()
    y = module(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    loss = y.square().mean() + (slope.norm(dim=-1) - 1.0).square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, (x, module.params))]


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_second_derivatives_through_the_kernels_are_the_references(backend: str, kernel_device: torch.device):
    if backend == "cpu" and kernel_device.type == "cuda":
        kernel_device = torch.device("cpu")
    module = loud(tcnn.NetworkWithInputEncoding(3, 1, {**HASH, "n_levels": 2}, {**MLP, "n_hidden_layers": 1}))
    exact = eikonal(copy.deepcopy(module).double(), POINTS[:6].double())
    with use_backend(backend):  # type: ignore[arg-type]
        got = eikonal(module.to(kernel_device), POINTS[:6].to(kernel_device))
    tolerance = 5e-2 if kernel_device.type == "cuda" else 1e-3
    for have, want in zip(got, exact, strict=True):
        torch.testing.assert_close(have.double().cpu(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
def test_on_a_gpu_results_are_half_and_close():
    module = loud(tcnn.NetworkWithInputEncoding(3, 4, HASH, MLP))
    exact = copy.deepcopy(module)(POINTS)
    module = module.cuda()
    result = module(POINTS.cuda())
    assert result.dtype == module.dtype == torch.float16
    torch.testing.assert_close(result.float().cpu(), exact, atol=2e-2, rtol=2e-2)
    result.float().sum().backward()
    assert module.params.grad is not None and module.params.grad.dtype == torch.float32
    fp32 = tcnn.Encoding(3, HASH, dtype=torch.float32).cuda()
    assert fp32(POINTS.cuda()).dtype == torch.float32


def test_the_loss_scale_does_not_change_gradients():
    module = loud(tcnn.Encoding(3, HASH, dtype=torch.float16))
    grads = []
    for scale in (1.0, 128.0):
        module.loss_scale = scale
        (grad,) = torch.autograd.grad(module(POINTS).float().square().sum(), module.params)
        grads.append(grad)
    torch.testing.assert_close(grads[0], grads[1], atol=1e-3, rtol=1e-2)


def test_modules_train_save_copy_and_say_what_they_are():
    torch.manual_seed(0)
    module = tcnn.NetworkWithInputEncoding(3, 1, HASH, MLP)
    module.jit_fusion = tcnn.supports_jit_fusion()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    target = POINTS[:, :1] * 2.0 - POINTS[:, 1:2]
    losses = []
    for _ in range(60):
        loss = nn.functional.mse_loss(module(POINTS), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(POINTS), module(POINTS))
    fresh = tcnn.NetworkWithInputEncoding(3, 1, HASH, MLP, seed=5)
    assert not torch.equal(fresh(POINTS), module(POINTS))
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh(POINTS), module(POINTS)) and list(module.state_dict()) == ["params"]
    assert "n_input_dims=3" in repr(module)
    tcnn.free_temporary_memory()


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: tcnn.Encoding(3, {"otype": "Magic"}), "encoding_config.otype"),
        (lambda: tcnn.Encoding(3, {**HASH, "n_features_per_level": 3}), "features per level"),
        (lambda: tcnn.Encoding(3, {**HASH, "n_levels": "16"}), "encoding_config.n_levels: expected a number, got '16'"),
        (lambda: tcnn.Encoding(3, {**HASH, "n_levels": None}), "encoding_config.n_levels: expected a number"),
        (lambda: tcnn.Encoding(3, {**HASH, "n_levels": 2.5}), "n_levels: expected a whole number, at least 1, got 2.5"),
        (lambda: tcnn.Encoding(3, {**HASH, "per_level_scale": "x"}), "encoding_config.per_level_scale"),
        (lambda: tcnn.Encoding(3, {"otype": "Identity", "scale": math.nan}), "encoding_config.scale"),
        (lambda: tcnn.Encoding(3, {**HASH, "interpolation": "Cubic"}), "interpolation"),
        (lambda: tcnn.Encoding(3, {**HASH, "hash": "Rng"}), "encoding_config.hash"),
        (lambda: tcnn.Encoding(2, {"otype": "SphericalHarmonics"}), "three inputs"),
        (lambda: tcnn.Encoding(2, {"otype": "Composite"}), "nested"),
        (lambda: tcnn.Encoding(3, {"otype": "DenseGrid", "n_levels": 12}), "coarser"),
        (lambda: tcnn.Encoding(3, HASH, dtype=torch.float64), "float32"),
        (lambda: tcnn.Network(3, 3, {**MLP, "n_neurons": 48}), "CutlassMLP"),
        (lambda: tcnn.Network(3, 3, {**MLP, "activation": "Swish"}), "activation"),
        (lambda: tcnn.Network(3, 3, {"otype": "ResNet"}), "network_config.otype"),
        (lambda: tcnn.Network(3, 3, MLP)(torch.rand(4, 2)), "x: expected shape"),
    ],
)
def test_wrong_configurations_are_named(call, word: str):
    with pytest.raises(InputError, match=word):
        call()


def test_import_tinycudann_resolves_to_us():
    program = (
        "import nerfturbo.compat\nnerfturbo.compat.install()\nimport tinycudann as tcnn, nerfacc\n"
        "from tinycudann.modules import Encoding\nassert tcnn.Encoding is Encoding and nerfacc.rendering"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_half_results_follow_a_fused_optimizer():
    """It writes to parameters without counting up their version, so that nothing may be kept by that."""
    module = tcnn.Encoding(3, HASH, dtype=torch.float16)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1, fused=True)
    before = module(POINTS)
    before.float().sum().backward()
    optimizer.step()
    assert (module(POINTS) - before).abs().mean() > 0.05
