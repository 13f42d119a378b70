"""tiny-cuda-nn's three modules. Each holds one flat fp32 parameter, `params`: the network's, then the encoding's. On a
GPU they compute in half precision over fp32 parameters, as tiny-cuda-nn does; on a CPU in fp32. Gradients of any order
work, to inputs and parameters: the first by the kernels, higher ones in plain torch."""

import gc
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import refuse
from ...ops import fused_mlp, use_backend
from ...ops._checks import check_device, check_shape
from ._encodings import Config, EncodingPart, encoding_part

Function = Callable[[Tensor, Tensor], Tensor]
Options = Mapping[str, Any]
FUSED_LAYERS, FUSED_WIDTH = 4, 128  # what the fused kernels take

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    **{name: getattr(torch, name) for name in ("relu", "sigmoid", "tanh")},
    "leakyrelu": lambda x: functional.leaky_relu(x, 0.01),
    "exponential": torch.exp,
    "sine": torch.sin,
    "squareplus": lambda x: 0.5 * (x + torch.sqrt(x * x + 4.0)),
    "softplus": functional.softplus,
}


class Mlp:
    """inputs -> n_neurons (n_hidden_layers times) -> outputs: matrices without biases, of tiny-cuda-nn's widths."""

    def __init__(self, config: Config, n_inputs: int, n_outputs: int) -> None:
        kind = config.kind("MLP")
        fused = kind in ("fullyfusedmlp", "megakernelmlp")
        unknown = not fused and kind not in ("cutlassmlp", "mlp")
        config.refuse(unknown, "otype", "FullyFusedMLP or CutlassMLP", repr(config.values.get("otype")))
        feedback = config.values.get("feedback_alignment", False)
        config.refuse(feedback, "feedback_alignment", "false", "true", "gradients here are exact")
        width, depth = config.integer("n_neurons", 128), config.integer("n_hidden_layers", 5, 0)
        wrong = fused and width not in (16, 32, 64, 128)
        config.refuse(wrong, "n_neurons", "16, 32, 64 or 128", width, "use CutlassMLP")
        config.refuse(fused and depth == 0, "n_hidden_layers", "at least 1", "0", "use CutlassMLP")
        self.activation = config.choice("activation", "ReLU", ACTIVATIONS)
        self.output_activation = config.choice("output_activation", "None", ACTIVATIONS)
        self.n_inputs, self.n_outputs = n_inputs, n_outputs
        self.padded_inputs, padded_outputs = (n + -n % (16 if fused else 8) for n in (n_inputs, n_outputs))
        sizes = [self.padded_inputs, *[width] * depth, padded_outputs]
        self.shapes = [(rows, columns) for columns, rows in itertools.pairwise(sizes)]
        self.n_params = sum(rows * columns for rows, columns in self.shapes)
        small = len(self.shapes) <= FUSED_LAYERS and max(sizes) <= FUSED_WIDTH
        self.in_one_kernel = small and self.activation == "relu" and depth > 0

    def initial(self, generator: torch.Generator) -> Tensor:
        parts = []
        for rows, columns in self.shapes:
            bound = math.sqrt(6.0 / (rows + columns))
            parts.append(torch.empty(rows * columns).uniform_(-bound, bound, generator=generator))
        return torch.cat(parts)

    def __call__(self, x: Tensor, params: Tensor, pad_value: float) -> Tensor:
        """(n, outputs). Columns that pad the inputs hold `pad_value`; where it is 0 they need not exist."""
        own = params.split([rows * columns for rows, columns in self.shapes])
        weights = [part.view(shape) for part, shape in zip(own, self.shapes, strict=True)]
        missing = self.padded_inputs - x.shape[1]
        if missing and pad_value != 0.0:
            x = functional.pad(x, (0, missing), value=pad_value)
        elif missing:
            weights[0] = weights[0][:, : x.shape[1]]
        weights[-1] = weights[-1][: self.n_outputs]
        if self.in_one_kernel:
            result = fused_mlp(x, weights)
        else:
            result = x
            for index, weight in enumerate(weights):
                result = functional.linear(result, weight.to(result.dtype))
                if index + 1 < len(weights):
                    result = ACTIVATIONS[self.activation](result)
        return ACTIVATIONS[self.output_activation](result)


def supports_jit_fusion(device: Any = None) -> bool:
    """False: there is nothing to switch on; kernels are fused as they are."""
    return False


def free_temporary_memory() -> None:
    """Give cached GPU memory back."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class _Twice(torch.autograd.Function):
    """`fast(x, params)`: its own first-order gradients, computed times `scale`; `plain`'s for higher orders."""

    @staticmethod
    def forward(ctx: Any, fast: Function, plain: Function, scale: float, x: Tensor, params: Tensor) -> Tensor:
        wanted = ctx.needs_input_grad[3:]
        with torch.enable_grad():
            inner = [value.detach().requires_grad_(want) for value, want in zip((x, params), wanted, strict=True)]
            result = fast(*inner)
        ctx.save_for_backward(x, params)
        ctx.plain, ctx.scale, ctx.inner, ctx.result = plain, scale, inner, result
        return result.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[3:]
        twice = torch.is_grad_enabled()  # the gradient itself will be differentiated: build it from what can be
        values, scale = (ctx.saved_tensors, 1.0) if twice else (ctx.inner, ctx.scale)
        sources = [value for value, want in zip(values, wanted, strict=True) if want]
        result = ctx.plain(*values) if twice else ctx.result
        scaled = (grad if scale == 1.0 else grad * scale).to(result.dtype)  # out of half precision's smallest numbers
        options = {"create_graph": twice, "retain_graph": True, "allow_unused": True, "materialize_grads": twice}
        found = torch.autograd.grad(result, sources, scaled, **options)
        left = iter(value if value is None or scale == 1.0 else value / scale for value in found)
        return None, None, None, *(next(left) if want else None for want in wanted)  # fast, plain, scale, x, params


class Module(nn.Module):
    """What the three modules share: parameters, precision, and the way through encoding and network."""

    jit_fusion: bool = False  # accepted; see `supports_jit_fusion`

    def __init__(
        self, encoding: EncodingPart, network: Mlp | None, seed: int, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.n_input_dims = encoding.n_inputs
        self.n_output_dims = encoding.n_outputs if network is None else network.n_outputs
        self._encoding, self._network, self.seed, self._chosen = encoding, network, seed, dtype
        self._n_network = 0 if network is None else network.n_params
        generator = torch.Generator().manual_seed(seed)
        parts = [] if network is None else [network.initial(generator)]
        self.params = nn.Parameter(torch.cat([*parts, encoding.initial(generator)]))
        self.loss_scale = 128.0 if torch.cuda.is_available() and dtype != torch.float32 else 1.0

    @property
    def dtype(self) -> torch.dtype:
        """The precision of results: half on a GPU unless chosen otherwise, that of the parameters elsewhere."""
        if self._chosen is not None:
            return self._chosen
        return torch.float16 if self.params.is_cuda and self.params.dtype == torch.float32 else self.params.dtype

    def forward(self, x: Tensor) -> Tensor:
        """(n, n_output_dims) in `dtype`, for x (n, n_input_dims)."""
        check_shape("x", x, ("n", self.n_input_dims))
        check_device(x=x, params=self.params)
        params = self.params
        if params.dtype == torch.float64:
            return self._plain(x.double(), params)
        x, half = x.float(), None
        if self.dtype != torch.float32:
            # Anew every time, for microseconds: fused optimizers change parameters without a trace in their version.
            half = params.detach().to(self.dtype)
        trainable = params.requires_grad and params.numel() > 0
        if not torch.is_grad_enabled() or not (x.requires_grad or trainable):
            return self._evaluate(x, params, half)
        scale = 1.0 if half is None else float(self.loss_scale)
        return _Twice.apply(lambda x, params: self._evaluate(x, params, half), self._plain, scale, x, params)  # type: ignore

    def _evaluate(self, x: Tensor, params: Tensor, half: Tensor | None) -> Tensor:
        n = self._n_network
        network, table = params.split([n, params.shape[0] - n])
        encoded = self._encoding(x, table, None if half is None else half[n:])
        return encoded if self._network is None else self._network(encoded, network, self._encoding.pad_value)

    def _plain(self, x: Tensor, params: Tensor) -> Tensor:
        """The same in plain torch and full precision, differentiable as often as wanted."""
        with use_backend("reference"):
            return self._evaluate(x, params, None).to(self.dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        given = state_dict.get(prefix + "params")
        original = self._n_network + self._encoding.n_original_params
        if given is not None and given.shape != self.params.shape and given.numel() == original:
            network, table = given.detach().reshape(-1).float().split([self._n_network, original - self._n_network])
            state_dict[prefix + "params"] = torch.cat([network, self._encoding.from_original(table)])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        shown = ("n_input_dims", "n_output_dims", "seed", "dtype")
        return ", ".join(f"{name}={getattr(self, name)}" for name in shown) + f", n_params={self.params.shape[0]}"


class NetworkWithInputEncoding(Module):
    """An encoding followed by a network: (n, n_input_dims) -> (n, n_output_dims)."""

    def __init__(
        self, n_input_dims: int, n_output_dims: int, encoding_config: Options, network_config: Options, seed: int = 1337
    ) -> None:
        encoding = encoding_part(Config(encoding_config, "encoding_config"), n_input_dims)
        network = Mlp(Config(network_config, "network_config"), encoding.n_outputs, n_output_dims)
        super().__init__(encoding, network, seed)
        self.encoding_config, self.network_config = encoding_config, network_config


class Network(NetworkWithInputEncoding):
    """A network alone: (n, n_input_dims) -> (n, n_output_dims). Inputs are padded with ones, which act as a bias."""

    def __init__(self, n_input_dims: int, n_output_dims: int, network_config: Options, seed: int = 1337) -> None:
        super().__init__(n_input_dims, n_output_dims, {"otype": "Identity"}, network_config, seed)


class Encoding(Module):
    """An encoding alone: (n, n_input_dims) -> (n, n_output_dims), whose width follows from the configuration."""

    def __init__(
        self, n_input_dims: int, encoding_config: Options, seed: int = 1337, dtype: torch.dtype | None = None
    ) -> None:
        refuse(dtype not in (None, torch.float32, torch.float16), "dtype", "torch.float32 or torch.float16", str(dtype))
        super().__init__(encoding_part(Config(encoding_config, "encoding_config"), n_input_dims), None, seed, dtype)
        self.encoding_config = encoding_config
