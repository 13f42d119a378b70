"""What `kernels.py` times: the learned kernels at the shapes of a training step, with variants of their tiles."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from nerfturbo.ops import GradientSink, HashLayout, hash_encode, use_backend  # noqa: E402
from nerfturbo.ops.adam import AdamRule, AdamState, adam_update, check_gradients, finish_step  # noqa: E402
from nerfturbo.ops.adam import triton as adam_kernels  # noqa: E402
from nerfturbo.ops.hash_encode import triton as hash_kernels  # noqa: E402
from nerfturbo.ops.mlp import triton as mlp_kernels  # noqa: E402
from nerfturbo.ops.mlp import wide_mlp  # noqa: E402
from nerfturbo.ops.ngp import NgpDensity, NgpWeights, ngp_field  # noqa: E402
from nerfturbo.ops.ngp import triton as field_kernels  # noqa: E402
from nerfturbo.types import Aabb  # noqa: E402

DEVICE = torch.device("cuda")
CAPACITY, USED, N_RAYS, AHEAD = 1 << 18, 226_000, 8192, 1 << 20
WIDE = 1 << 16
LAYOUTS = {"16x2": HashLayout(n_levels=16, n_features=2), "8x4": HashLayout(n_levels=8, n_features=4)}


@dataclass
class Piece:
    """One thing to time: a function, and module constants to set while it runs."""

    name: str
    run: Callable[[], object]
    module: Any = None
    settings: dict[str, Any] = field(default_factory=dict)
    repeats: int = 10

    @contextmanager
    def in_force(self) -> Any:
        before = {key: getattr(self.module, key) for key in self.settings}
        for key, value in self.settings.items():
            setattr(self.module, key, value)
        try:
            yield
        finally:
            for key, value in before.items():
                setattr(self.module, key, value)


def variants(name: str, run: Callable[[], object], module: Any, options: list[dict[str, Any]]) -> list[Piece]:
    """The shipped settings, marked *, and others; those equal to the shipped ones are dropped."""
    pieces = [Piece(f"{name} *", run)]
    for option in options:
        if any(getattr(module, key) != value for key, value in option.items()):
            label = " ".join(f"{key.lower()}={value}" for key, value in option.items())
            pieces.append(Piece(f"{name} {label}", run, module, option))
    return pieces


def ray_points(n: int, per_ray: float, seed: int = 0) -> torch.Tensor:
    """(n, 3), stored (3, n): samples 1/600 apart on rays that cross a shell inside the unit cube."""
    draw = torch.Generator().manual_seed(seed)
    counts = torch.clamp((torch.rand(int(n / per_ray) + 1, generator=draw) * 2 * per_ray).long(), min=1)
    counts = torch.cat([counts, torch.full((n,), 1)])
    rays = torch.repeat_interleave(torch.arange(counts.shape[0]), counts)[:n]
    place = torch.arange(n) - (torch.cumsum(counts, 0) - counts)[rays]
    n_rays = int(rays.max()) + 1
    surface = torch.nn.functional.normalize(torch.randn(n_rays, 3, generator=draw), dim=-1) * 0.31 + 0.5
    direction = torch.nn.functional.normalize(torch.randn(n_rays, 3, generator=draw), dim=-1)
    points = surface[rays] + direction[rays] * (place[:, None] / 600)
    return points.clamp(0, 1).t().contiguous().to(DEVICE).t()


class Inputs:
    """Everything the pieces read and write, allocated once."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.used = torch.tensor(USED, dtype=torch.int32, device=DEVICE)
        self.positions = ray_points(CAPACITY, 28.0)
        self.pruned = ray_points(CAPACITY, 5.0, seed=1)
        self.ahead = ray_points(AHEAD, 28.0, seed=2)
        self.rays = torch.randint(0, N_RAYS, (CAPACITY,), device=DEVICE).sort().values.int()
        self.directions = torch.randn(N_RAYS, 16, device=DEVICE)
        shapes = [(64, 32), (16, 64), (64, 32), (64, 64), (3, 64)]
        self.weights = NgpWeights(*(torch.randn(s, device=DEVICE) * (2 / s[1]) ** 0.5 for s in shapes))
        self.weight_grads = tuple(torch.zeros_like(w) for w in self.weights)
        self.encoding = torch.randn(32, CAPACITY, device=DEVICE).half().t()
        self.grad_encoding = (torch.randn(32, CAPACITY, device=DEVICE) * 1e-3).half().t()
        self.grad_raw = torch.randn(4, CAPACITY, device=DEVICE).t() * 1e-3
        self.masters = {k: torch.rand(v.n_entries, v.n_features, device=DEVICE) for k, v in LAYOUTS.items()}
        self.halves = {name: table.half() for name, table in self.masters.items()}
        self.flag = torch.zeros((), device=DEVICE)


def add_gradient(buffer: torch.Tensor, *rest: Any) -> None:
    """The whole table's gradient."""
    hash_kernels.table_gradient(buffer, *rest)(0, len(buffer))


def hash_pieces(inputs: Inputs) -> list[Piece]:
    pieces = []
    for name, layout in LAYOUTS.items():
        half = inputs.halves[name]

        def forward(half: torch.Tensor = half, layout: HashLayout = layout) -> None:
            hash_kernels.encode_forward(inputs.positions, half, layout, inputs.used)

        tiles = [{"BLOCK": b, "WARPS": w} for b, w in ((64, 2), (128, 4), (256, 8), (256, 4), (512, 8))]
        pieces += variants(f"hash forward {name}", forward, hash_kernels, tiles)
        for kind in (torch.float32, torch.float16):
            buffer = torch.zeros(half.shape, dtype=kind, device=DEVICE)

            def backward(
                buffer: torch.Tensor = buffer, layout: HashLayout = layout, points: torch.Tensor = inputs.positions
            ) -> None:
                add_gradient(buffer, points, inputs.grad_encoding, layout, inputs.used, inputs.flag)

            label = f"hash backward {name} {str(kind)[6:]}"
            options = [{"RUN_BLOCK": b, "RUN_WARPS": w} for b, w in ((64, 1), (128, 1), (128, 4))]
            options += [{"RUN_SCALE": s} for s in (0.0, 100.0, 250.0, 700.0, 1100.0)]
            options += [{"BLOCK": b, "WARPS": w} for b, w in ((64, 2), (256, 8), (32, 1))]
            pieces += variants(label, backward, hash_kernels, options if kind == torch.float32 else options[:5])
            pieces.append(Piece(f"{label}, 5 samples a ray", lambda run=backward: run(points=inputs.pruned)))
    table = torch.zeros(inputs.halves["16x2"].shape, device=DEVICE)

    def deterministic() -> None:
        torch.use_deterministic_algorithms(True)
        layout = LAYOUTS["16x2"]
        add_gradient(table, inputs.positions, inputs.grad_encoding, layout, inputs.used, None)
        torch.use_deterministic_algorithms(False)

    def to_positions() -> None:
        hash_kernels.positions_gradient(
            inputs.positions, inputs.halves["16x2"], inputs.grad_encoding, LAYOUTS["16x2"], inputs.used
        )

    pieces.append(Piece("hash backward 16x2 deterministic", deterministic, repeats=3))
    return [*pieces, Piece("hash backward 16x2 to positions", to_positions)]


def network_pieces(inputs: Inputs) -> list[Piece]:
    weights, sums = inputs.weights, list(inputs.weight_grads)
    x, used = inputs.encoding, inputs.used
    _, features = field_kernels.forward(x, inputs.directions, inputs.rays, weights, used, True)
    grad_features = torch.zeros_like(features)

    def forward() -> None:
        field_kernels.forward(x, inputs.directions, inputs.rays, weights, used, True)

    def colour() -> None:
        field_kernels.colour_backward(
            x, inputs.directions, inputs.rays, weights, features, inputs.grad_raw, used, sums, None
        )

    def density() -> None:
        mlp_kernels.mlp_backward(x, list(weights[:2]), grad_features, used, needs_x=True, sums=sums[:2])

    tiles = [{"BLOCK": b, "WARPS": w, "STAGES": s} for b, w, s in ((64, 4, 2), (64, 4, 1), (128, 8, 3), (128, 4, 3))]
    more = [{"FORWARD_PROGRAMS": p} for p in (2, 3, 6, 8)]
    pieces = variants("field forward", forward, field_kernels, tiles + more)
    fewer = [{"BACKWARD_PROGRAMS": p} for p in (1, 3)]
    pieces += variants("field colour backward", colour, field_kernels, tiles[:3] + fewer)
    options = [{"BACKWARD_PROGRAMS": p} for p in (1, 3, 4)] + [{"STAGES": s} for s in (1, 2)]
    pieces += variants("field density backward", density, mlp_kernels, options)
    pieces += other_mlp_pieces(inputs)

    def ahead(name: str) -> Callable[[], object]:
        field = NgpDensity(Aabb.cube(1.0), inputs.halves[name], LAYOUTS[name], weights[:2])
        return lambda: field.at(inputs.ahead, logits=True)

    return pieces + [Piece(f"density of 2^20 samples {name}", ahead(name)) for name in ("16x2", "8x4")]


def other_mlp_pieces(inputs: Inputs) -> list[Piece]:
    """Other shapes of the small MLP."""
    pieces = []
    for widths in ((32, 64, 64, 16), (64, 128, 128, 16)):
        weights = [torch.randn(b, a, device=DEVICE) * (2 / a) ** 0.5 for a, b in itertools.pairwise(widths)]
        sums = [torch.zeros_like(w) for w in weights]
        x = torch.randn(widths[0], CAPACITY, device=DEVICE).half().t()
        dy = (torch.randn(widths[-1], CAPACITY, device=DEVICE) * 1e-3).half().t()
        label = "mlp " + "-".join(map(str, widths))
        pieces.append(Piece(f"{label} forward", lambda x=x, w=weights: mlp_kernels.mlp_forward(x, w, inputs.used)))
        pieces.append(
            Piece(
                f"{label} backward",
                lambda x=x, w=weights, dy=dy, s=sums: mlp_kernels.mlp_backward(
                    x, w, dy, inputs.used, needs_x=True, sums=s
                ),
            )
        )
    return pieces


def wide_network(dtype: torch.dtype) -> tuple[Callable[[], object], Callable[[str], Callable[[], object]]]:
    """The forward without a gradient, and by backend the forward with all gradients of the parameters."""
    skip, widths = 4, [63] + [256] * 8
    shapes = [(b, a + (63 if k == skip else 0)) for k, (a, b) in enumerate(itertools.pairwise(widths))]
    weights = [(torch.randn(s, device=DEVICE) * (2 / s[1]) ** 0.5).requires_grad_() for s in shapes]
    biases = [torch.zeros(s[0], device=DEVICE, requires_grad=True) for s in shapes]
    x = torch.randn(WIDE, 63, device=DEVICE).to(dtype)
    grad = (torch.randn(WIDE, 256, device=DEVICE) * 1e-3).to(dtype)

    def train(backend: str) -> Callable[[], object]:
        def run() -> None:
            with use_backend(backend):
                out = wide_mlp(x, weights, biases, skip=skip, relu_last=True)
                torch.autograd.grad(out, [*weights, *biases], grad)

        return run

    def forward() -> None:
        with torch.no_grad():
            wide_mlp(x, weights, biases, skip=skip, relu_last=True)

    return forward, train


def wide_pieces(inputs: Inputs) -> list[Piece]:
    """The trunk of the original NeRF, 8 layers of 256 with a skip, forward and backward; beside torch's own layers."""
    forward, train = wide_network(torch.float16)
    grad = (torch.randn(WIDE, 256, device=DEVICE) * 1e-3).half()
    sums = torch.zeros(256, device=DEVICE)

    def mask() -> None:
        mlp_kernels.mask_and_sum(grad, grad, sums)

    tiles = [{"ROWS": r, "COLS": c, "WARPS": w} for r, c, w in ((16, 256, 4), (32, 256, 8), (64, 128, 4), (16, 128, 4))]
    pieces = variants("wide mask and bias", mask, mlp_kernels, tiles)
    pieces.append(Piece("wide forward, 2^16 samples", forward))
    pieces.append(Piece("wide forward + backward, 2^16 samples", train("triton"), repeats=3))
    return [*pieces, Piece("wide forward + backward, torch's layers", train("reference"), repeats=3)]


def exact_pieces(inputs: Inputs) -> list[Piece]:
    """fp32 without TF32, product by product: which of them is far from what the GPU's fp32 units could do."""
    x = torch.randn(WIDE, 256, device=DEVICE)
    weight, bias = torch.randn(256, 256, device=DEVICE) / 16, torch.zeros(256, device=DEVICE)
    narrow, back = torch.randn(CAPACITY, 32, device=DEVICE), torch.randn(CAPACITY, 64, device=DEVICE)
    whole = {"SLICE": 1 << 30}
    options = [whole, *({"SLICE": s} for s in (512, 2048, 4096))]
    pieces = [
        Piece("fp32 layer, bias and ReLU in the product", lambda: torch._addmm_activation(bias, x, weight.t())),
        Piece("fp32 layer, product alone", lambda: x @ weight.t()),
        Piece("fp32 gradient of the inputs", lambda: x @ weight),
    ]
    for name, a, b in (("256 x 256, 2^16 samples", x, x), ("64 x 32, 2^18 samples", back, narrow)):

        def gradient(a: torch.Tensor = a, b: torch.Tensor = b) -> None:
            mlp_kernels.sum_of_products(a, b)

        pieces += variants(f"fp32 gradient of a weight {name}", gradient, mlp_kernels, options)
    exact = wide_network(torch.float32)[1]("triton")
    pieces.append(Piece("fp32 wide forward + backward, 2^16 samples", exact, repeats=3))
    return [*pieces, Piece("fp32 wide forward + backward, weights whole", exact, mlp_kernels, whole, repeats=3)]


def adam_pieces(inputs: Inputs) -> list[Piece]:
    pieces = []
    master = inputs.masters["16x2"].clone().view(-1)
    half, state, lr = master.half(), AdamState.of(master), torch.tensor(1e-2, device=DEVICE)
    scale = torch.tensor(128.0, device=DEVICE)
    tiles = [{"BLOCK": b, "WARPS": w} for b, w in ((512, 4), (2048, 8), (1024, 4), (4096, 16))]
    for kind in (torch.float32, torch.float16):
        grad = torch.zeros(master.shape, dtype=kind, device=DEVICE)

        def update(grad: torch.Tensor = grad, rule: AdamRule | None = None) -> None:
            adam_update(master, grad, state, lr, rule=rule, half=half, grad_scale=scale, found_inf=inputs.flag)

        name = f"adam 12 M, {str(kind)[6:]} gradient"
        pieces += variants(name, update, adam_kernels, tiles if kind == torch.float32 else tiles[:2])
    small_state = AdamState.of(master, dtype=torch.bfloat16)
    grad = torch.zeros(master.shape, dtype=torch.float16, device=DEVICE)
    pieces.append(
        Piece(
            "adam 12 M, float16 gradient, bf16 moments", lambda: adam_update(master, grad, small_state, lr, half=half)
        )
    )
    # Skipping depends on the gradient, which the update zeroes: time a fresh copy of a real one each time.
    layout, real = LAYOUTS["16x2"], torch.zeros(master.shape, device=DEVICE)
    add_gradient(real.view(-1, 2), inputs.positions, inputs.grad_encoding, layout, inputs.used, None)
    copy, sparse = torch.empty_like(real), AdamRule(skip_untouched=True)

    def skip_update() -> None:
        copy.copy_(real)
        adam_update(master, copy, state, lr, rule=sparse, half=half)

    pieces.append(Piece("copy of a 12 M gradient", lambda: copy.copy_(real)))
    pieces.append(Piece("copy + adam 12 M that skips untouched entries", skip_update))
    dense = torch.randn(master.shape, device=DEVICE)
    pieces.append(Piece("gradient norm of 12 M", lambda: check_gradients([dense], inputs.flag)))
    small = torch.zeros(10_240, device=DEVICE)
    state_small = AdamState.of(small)
    pieces.append(Piece("adam 10 k", lambda: adam_update(small, torch.zeros_like(small), state_small, lr)))
    return [*pieces, Piece("finish step", lambda: finish_step(state.step, inputs.flag))]


def step_pieces(inputs: Inputs) -> list[Piece]:
    """Encode, field, backward and Adam by autograd, as a captured step runs them (without rays and compositing)."""
    pieces = []
    for name, layout in LAYOUTS.items():
        for kind in (torch.float32, torch.float16):
            master = inputs.masters[name].clone().requires_grad_()
            weights = NgpWeights(*(w.clone().requires_grad_() for w in inputs.weights))
            table_grad = torch.zeros(master.shape, dtype=kind, device=DEVICE)
            table_sink = GradientSink((table_grad,), inputs.flag)
            weights_sink = GradientSink(tuple(torch.zeros_like(w) for w in weights))
            half = master.detach().half()
            state, lr = AdamState.of(master.detach()), torch.tensor(1e-4, device=DEVICE)

            def step(
                master: torch.Tensor = master, half: torch.Tensor = half, layout: HashLayout = layout,
                table_sink: GradientSink = table_sink, weights: NgpWeights = weights,
                weights_sink: GradientSink = weights_sink, state: AdamState = state, lr: torch.Tensor = lr,
            ) -> None:  # fmt: skip
                encoding = hash_encode(inputs.positions, master, layout, half=half, sink=table_sink, n_used=inputs.used)
                raw = ngp_field(
                    encoding, inputs.directions, inputs.rays, weights, sink=weights_sink, n_used=inputs.used
                )
                raw.backward(inputs.grad_raw)
                grad = table_sink.buffers[0]
                adam_update(master.detach(), grad, state, lr, half=half, found_inf=inputs.flag)
                finish_step(state.step, inputs.flag)

            pieces.append(Piece(f"step {name} {str(kind)[6:]} gradient", step, repeats=3))
    return pieces


GROUPS = [hash_pieces, network_pieces, wide_pieces, exact_pieces, adam_pieces, step_pieces]
