"""What a radiance field is here: an nn.Module with two methods. Nothing must be subclassed.

| optional | what it is for |
|---|---|
| `sample_density(rays, samples)` | of packed samples, whole and fused: (capacity,) density, without gradient |
| `sample_visibility(rays, samples, *, early_stop_eps, alpha_thre, thinning)` | `ops.visible_codes` of that density |
| `sample_logits(rays, samples)` | (capacity, 4): rgb = sigmoid of the first three, density = truncated exp of the 4th |
| `evaluator(rays, half=False)` | fused evaluation in rendering; see `nerfturbo.rendering.image` |
| `connect(buffers)` | half copies and gradient buffers (`Buffers`); without it torch.autocast is used |
| `bytes_per_sample` | memory of rendering, for planning; `few_launches` where a round is few kernels |
| `checkpointing` | set by `train.checkpointing`: `forward` keeps its inputs alone (`parts.recomputed`) |
| `captures_ahead` | its kernels can be compiled before the first step, with their launches left out |
| `regularization(step)` | a prior of its own, added to the loss |
| `refinement_due(progress, step)` | whether to change the parameters' shapes now; with it the next four |
| `new_marks()`, `mark(marks, positions, weights)` | zeros, and noting in them the weights of samples in a pixel |
| `refine(marks)` | change the parameters; gives the `Carry` that does the same to what belongs to them |
| `match_shapes(state)` | take the shapes of a state of this field, not its values; whether anything changed |
| `learning_rates` | peak learning rates of some parameters, by name |
| `level_weights`, `read_rays` | fading of levels and vectors per photo, for `cameras.coarse` and `photo.appearance` |
| `set_footprint(radius)` | a pixel's typical radius, told before training |
| `for_export()` | a module of plain torch operations that computes the same, for ONNX; of a part of the field, too |
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from ..ops import GradientSink
from ..ops._sink import Held

MIN_STEPS = 200  # that a stage lasts at least, in the mean: what has not been trained yet says nothing


@runtime_checkable
class Field(Protocol):
    """Positions are in world coordinates; directions have unit length; density is per unit of world length."""

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        """(n,) >= 0 for positions (n, 3)."""
        ...

    def __call__(
        self, positions: Tensor, directions: Tensor, times: Tensor | None = None, camera_indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """rgb (n, channels) in [0, 1] and density (n,) >= 0."""
        ...


# (name of a parameter in its field, a tensor of its old shape) -> the same in its new shape. Moments and running means
# have `.first`, `.second` or `.average` behind the name.
Carry = Callable[[str, Tensor], Tensor]


def offers(owner: Any, *names: str) -> bool:
    """Whether an object has these optional methods."""
    return all(callable(getattr(owner, name, None)) for name in names)


def is_adaptive(candidate: Any) -> bool:
    return offers(candidate, "refinement_due", "new_marks", "mark", "refine", "match_shapes")


def field_part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Buffers:
    """What a trainer hands to the modules of a model that have `connect`: the type of matrix products and, by
    parameter, half copies to read and buffers that take gradients in place of autograd."""

    dtype: torch.dtype | None = None  # of products; None: fp32
    halves: Mapping[Tensor, Tensor] = field(default_factory=dict)
    grads: Mapping[Tensor, Tensor] = field(default_factory=dict)
    found_inf: Tensor | None = None
    thin: float = 0.0  # see `GradientSink`
    held: Held | None = None

    def half(self, parameter: Tensor) -> Tensor | None:
        return self.halves.get(parameter)

    def sink(self, *parameters: Tensor) -> GradientSink | None:
        """The buffers of these parameters; None where one has none, and autograd keeps its gradient."""
        if not all(parameter in self.grads for parameter in parameters):
            return None
        return GradientSink(tuple(self.grads[own] for own in parameters), self.found_inf, self.thin, self.held)


class Connected(nn.Module):
    """A module with `connect`, which names in `taken` what it keeps of the buffers."""

    taken: tuple[str, ...] = ()

    def _replicate_for_data_parallel(self) -> Self:
        """For `nn.DataParallel`: what was taken is on the device of the original."""
        replica = super()._replicate_for_data_parallel()
        vars(replica).update(dict.fromkeys(self.taken))
        return replica


class Staged(nn.Module):
    """A field whose parameters change their shapes at `shares` of the run, each stage of `MIN_STEPS` steps or more."""

    history: Tensor  # (stages,) int64, a number of each stage so far
    shares: tuple[float, ...]
    reshaped: dict[str, slice]  # parameters and buffers that change their shapes, and the sides that never do

    @property
    def stage(self) -> int:
        return self.history.shape[0] - 1

    def refinement_due(self, progress: float, step: int) -> bool:
        stage, shares = self.stage, self.shares
        return stage < len(shares) and progress >= shares[stage] and step >= (stage + 1) * MIN_STEPS

    def match_shapes(self, state: Mapping[str, Tensor]) -> bool:
        own = {name: self.state_dict()[name] for name in self.reshaped}
        pairs = [(state[name].shape, own[name].shape, fixed) for name, fixed in self.reshaped.items() if name in state]
        fits = len(pairs) == len(own) and all(len(a) == len(b) and a[fixed] == b[fixed] for a, b, fixed in pairs)
        if not fits or all(a == b for a, b, _ in pairs):
            return False
        for name, value in own.items():
            empty = torch.zeros(state[name].shape, dtype=value.dtype, device=value.device)
            setattr(self, name, empty if name in self._buffers else nn.Parameter(empty))
        vars(self).update(dict.fromkeys(getattr(self, "taken", ())))  # what belongs to the old ones
        return True

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.match_shapes(field_part(state_dict, prefix))
        super()._load_from_state_dict(state_dict, prefix, *rest)


def connect(model: nn.Module, buffers: Buffers | None) -> None:
    """Hand buffers to every part of a model that takes them; None takes them away again."""
    for module in model.modules():
        if offers(module, "connect"):
            module.connect(buffers or Buffers())  # type: ignore[operator]


def table_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Tables of features, which mixed precision reads as half copies: of modules that name them."""
    return [table for module in model.modules() for table in getattr(module, "tables", ())]


def read_halves(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Let a model that is not trained compute in this precision, as it was trained."""
    tables = [] if dtype is None else table_parameters(model)
    connect(model, Buffers(dtype, {table: table.detach().to(dtype) for table in tables}))
