"""The field as an ONNX graph for other inference engines: positions and directions in, colours and densities out.

The graph is traced from plain torch, and is compared with the field itself before it is kept.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..fields.activations import MAX_EXPONENT
from ..fields.ngp import InstantNGP
from ..fields.vanilla import VanillaNeRF
from ..files import replacing
from ..ops import use_backend
from ..ops.hash_encode import PRIMES
from ..ops.positions import Contraction, fold
from ..ops.spherical_harmonics.reference import spherical_harmonics
from ..rendering.model import NerfModel
from . import require_package

OPSET = 18  # the first with bitwise operations on integers, which the hash needs
CHECKED_POINTS = 4096
# Of colours; of densities relative to their size. A field that is read in half precision differs by its rounding.
TOLERANCE = {"fp32": 1e-3, "half": 5e-2}


@dataclass(frozen=True)
class OnnxCheck:
    """How far onnxruntime's answers are from torch's: the largest of all points."""

    color_error: float
    density_error: float  # relative


class PlainNgp(nn.Module):
    """Instant-NGP without kernels, for tracing: all levels and corners of the hash grid at once, so that the graph
    stays small."""

    def __init__(self, field: InstantNGP) -> None:
        super().__init__()
        low, high = field.aabb.tensor("cpu")
        self.contraction: Contraction = field.contraction
        levels, self.degree = field.encoding.layout.levels, field.config.sh_degree
        corners = torch.tensor([[c & 1, (c >> 1) & 1, c >> 2] for c in range(8)])
        constants = {
            "low": low.clone(),
            "size": (high - low).clone(),
            "table": field.encoding.table.detach().float().cpu().clone(),
            "corners": corners,  # (8, 3)
            "scales": torch.tensor([level.scale for level in levels])[:, None],  # (levels, 1)
            "nodes": torch.tensor([level.nodes for level in levels])[:, None],
            "offsets": torch.tensor([level.offset for level in levels])[:, None],
            "masks": torch.tensor([level.size - 1 for level in levels])[:, None],
            "hashed": torch.tensor([level.hashed for level in levels])[:, None],
        }
        if field.ray_vectors is not None:  # the look of new views
            with torch.no_grad():
                constants["look"] = field.ray_vectors(None, 1).float().cpu().clone()
        for name, value in constants.items():
            self.register_buffer(name, value)
        self.weights = nn.ParameterList(weight.detach().float().cpu().clone() for weight in field.faded_weights)

    def forward(self, positions: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(self.named_buffers())
        unit = fold((positions - named["low"]) / named["size"], self.contraction).clamp(0.0, 1.0)
        density_in, density_out, color_in, color_mid, color_out = self.weights
        features = torch.relu(self._encode(unit, named) @ density_in.T) @ density_out.T
        rays = [spherical_harmonics(directions, self.degree)]
        if "look" in named:
            rays.append(named["look"].expand(positions.shape[0], -1))
        inputs = torch.cat([*rays, features], dim=-1)
        hidden = torch.relu(torch.relu(inputs @ color_in.T) @ color_mid.T)
        return torch.sigmoid(hidden @ color_out.T), torch.exp(features[:, 0].clamp(max=MAX_EXPONENT))

    def _encode(self, unit: Tensor, named: dict[str, Tensor]) -> Tensor:
        """What ops/hash_encode computes; (n, levels * features)."""
        place = unit[:, None, :] * named["scales"] + 0.5  # (n, levels, 3)
        cell = place.floor()
        fraction = (place - cell)[:, :, None, :]
        nodes = cell.long()[:, :, None, :] + named["corners"]  # (n, levels, 8, 3)
        x, y, z = nodes.unbind(-1)
        mixed = (x * PRIMES[0]) ^ (y * PRIMES[1]) ^ (z * PRIMES[2])
        dense = x + named["nodes"] * (y + named["nodes"] * z)
        rows = named["offsets"] + torch.where(named["hashed"], mixed & named["masks"], dense)
        weight = torch.where(named["corners"].bool(), fraction, 1.0 - fraction).prod(-1)  # (n, levels, 8)
        return (weight[..., None] * named["table"][rows]).sum(2).flatten(1)


def check_onnx_path(path: Path) -> None:
    """Refuse what could not be written or checked, before any work is done."""
    if path.suffix.lower() != ".onnx":
        raise InputError(str(path), "a file ending in .onnx", repr(path.suffix))
    for module in ("onnx", "onnxscript", "onnxruntime"):
        require_package(module, module, "ONNX", "onnx")


def write_onnx(path: Path, model: NerfModel) -> OnnxCheck:
    """Write the field with its weights in one file, and compare it with torch; whole and right, or not at all.

    Inputs `positions` (n, 3), in the coordinates of training, and `directions` (n, 3) of unit length; outputs `rgb`
    (n, 3) and `density` (n,). n is free.
    """
    plain = plain_field(model)
    with replacing(path) as temporary:
        try:
            _export(temporary, plain)
            check = compare(temporary, model)
        finally:
            temporary.with_name(temporary.name + ".data").unlink(missing_ok=True)
        limit = TOLERANCE["fp32" if model.device.type == "cpu" else "half"]
        if not check.color_error < limit or not check.density_error < limit:
            got = f"colours off by {check.color_error:.2g}, densities by {100 * check.density_error:.2g}%"
            raise InputError(str(path), "an ONNX graph that agrees with torch", got, "please report this")
    return check


def plain_field(model: NerfModel) -> nn.Module:
    """The field in plain torch and fp32 on the CPU."""
    field = model.field
    if isinstance(field, InstantNGP):
        return PlainNgp(field).eval()
    if type(field) is VanillaNeRF:
        copy = VanillaNeRF(field.aabb, field.config)
        copy.contraction = field.contraction
        copy.load_state_dict({name: value.detach().float().cpu() for name, value in field.state_dict().items()})
        return copy.eval()
    raise InputError("field", "InstantNGP or VanillaNeRF", type(field).__name__)


def _export(path: Path, plain: nn.Module) -> None:
    positions = torch.zeros(64, 3)
    directions = torch.tensor([0.0, 0.0, 1.0]).expand(64, 3).contiguous()
    rows = torch.export.Dim("n", min=1)
    with _quiet(), use_backend("reference"), torch.no_grad():
        torch.onnx.export(
            plain,
            (positions, directions),
            str(path),
            input_names=["positions", "directions"],
            output_names=["rgb", "density"],
            dynamic_shapes=({0: rows}, {0: rows}),
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of packages that are not there and of its own deprecations."""
    loggers = [logging.getLogger(name) for name in ("onnxscript", "torch.onnx", "torch.export")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@torch.no_grad()
def compare(path: Path, model: NerfModel) -> OnnxCheck:
    """Ask onnxruntime and the field itself the same questions, at points all over the box."""
    import onnxruntime

    generator = torch.Generator().manual_seed(0)
    low, high = model.grid.outer_aabb.tensor("cpu")
    positions = torch.rand(CHECKED_POINTS, 3, generator=generator) * (high - low) + low
    directions = torch.nn.functional.normalize(torch.randn(CHECKED_POINTS, 3, generator=generator), dim=-1)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    rgb, density = session.run(None, {"positions": positions.numpy(), "directions": directions.numpy()})
    true_rgb, true_density = (
        value.float().cpu() for value in model.field(positions.to(model.device), directions.to(model.device))
    )
    colors = (torch.as_tensor(rgb) - true_rgb).abs().max()
    densities = ((torch.as_tensor(density) - true_density).abs() / (true_density.abs() + 1.0)).max()
    return OnnxCheck(float(colors), float(densities))
