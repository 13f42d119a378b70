"""The field as an ONNX graph for other inference engines: positions and directions in, colours and densities out. The
graph is traced from plain torch, and is compared with the field itself before it is kept."""

import contextlib
import copy
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..errors import InputError
from ..fields.field import connect, offers
from ..files import replacing
from ..ops import use_backend
from ..rendering.model import NerfModel
from . import check_ending, require_package

OPSET = 18  # the first with bitwise operations on integers, which the hash needs
CHECKED_POINTS = 4096
# Of colours; of densities relative to their size. A field that is read in half precision differs by its rounding.
TOLERANCE = {"fp32": 1e-3, "half": 5e-2}


@dataclass(frozen=True)
class OnnxCheck:
    """How far onnxruntime's answers are from torch's: the largest of all points."""

    color_error: float
    density_error: float  # relative


def check_onnx_path(path: Path) -> None:
    """Refuse what could not be written or checked, before any work is done."""
    check_ending(path, ".onnx")
    for module in ("onnx", "onnxscript", "onnxruntime"):
        require_package(module, module, "ONNX", "onnx")


def write_onnx(path: Path, model: NerfModel) -> OnnxCheck:
    """Write the field with its weights in one file, and compare it with torch; whole and right, or not at all. Inputs
    `positions` (n, 3), in the coordinates of training, and unit `directions` (n, 3); outputs `rgb` (n, 3) and `density`
    (n,). A field, or a part of it, whose operations do not suit tracing offers `for_export()`: a module of plain torch
    that computes the same."""
    with replacing(path) as temporary:
        try:
            _export(temporary, model.field)
            check = compare(temporary, model)
        finally:
            temporary.with_name(temporary.name + ".data").unlink(missing_ok=True)
        limit = TOLERANCE["fp32" if model.device.type == "cpu" else "half"]
        if not check.color_error < limit or not check.density_error < limit:
            got = f"colours off by {check.color_error:.2g}, densities by {100 * check.density_error:.2g}%"
            raise InputError(str(path), "an ONNX graph that agrees with torch", got, "please report this")
    return check


def _export(path: Path, field: nn.Module) -> None:
    positions, directions = torch.zeros(64, 3), torch.tensor([0.0, 0.0, 1.0]).expand(64, 3).contiguous()
    rows = torch.export.Dim("n", min=1)
    with _quiet(), use_backend("reference"), torch.no_grad():
        own = getattr(field, "module", field)  # a field of somebody else's, without what adapts it to rendering
        twin = _plain_copy(own).eval()
        twin(positions, directions)  # what a field itself refuses is said as it says it
        try:
            names = {"input_names": ["positions", "directions"], "output_names": ["rgb", "density"]}
            how = {"dynamic_shapes": ({0: rows}, {0: rows}), "opset_version": OPSET, "dynamo": True}
            how |= {"external_data": False, "verbose": False}
            torch.onnx.export(twin, (positions, directions), str(path), **names, **how)
        except Exception as error:  # of torch's exporter, which raises what its parts do
            hint = "its method for_export may give a module of plain torch that computes the same"
            expected, name = "operations that ONNX knows", type(own).__name__
            raise InputError(f"field {name}", expected, _unknown_operation(error), hint) from error


def _plain_copy(field: nn.Module) -> nn.Module:
    """In fp32 on the CPU, without half copies, and with what the field or its parts offer for tracing."""
    twin = copy.deepcopy(field)
    for name, part in field.named_modules():  # the field itself comes first
        if offers(part, "for_export"):
            plain = part.for_export()  # type: ignore[operator]
            if name == "":
                return plain
            twin.set_submodule(name, plain)
    connect(twin, None)
    return twin.float().cpu()


def _unknown_operation(error: BaseException) -> str:
    """The operation that the exporter names, else the first line of the first cause."""
    texts, cause = [], error
    while cause is not None:
        texts.append(str(cause).strip() or type(cause).__name__)
        cause = cause.__cause__ or cause.__context__
    named = re.search(r"op='([\w.:]+)'", "\n".join(texts))
    return named.group(1) if named else texts[-1].splitlines()[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of packages that are not there and of its own deprecations."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


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
    answers = model.field(positions.to(model.device), directions.to(model.device))
    true_rgb, true_density = (value.float().cpu() for value in answers)
    densities = ((torch.as_tensor(density) - true_density).abs() / (true_density.abs() + 1.0)).max()
    return OnnxCheck(float((torch.as_tensor(rgb) - true_rgb).abs().max()), float(densities))
