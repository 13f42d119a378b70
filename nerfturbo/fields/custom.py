"""A field of one's own: where it comes from, what is checked of it, and how it computes in half precision."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, refuse
from ..types import Aabb
from .field import Buffers, Carry, field_part
from .parts import recomputed

WANTED = "path/to/file.py:ClassName or package.module:ClassName"
SIGNATURES = {
    "density": "density(positions, times=None)",
    "forward": "forward(positions, directions, times=None, camera_indices=None)",
}
CHECKED = 1024  # points that a new field is tried with: where a density is negative, some of them are
# Optional methods that the trainer and renderer look for; see `nerfturbo.fields.field`.
_OPTIONAL = {
    *("sample_logits", "sample_density", "sample_visibility", "evaluator", "bytes_per_sample", "few_launches"),
    *("captures_ahead", "regularization", "refinement_due", "new_marks", "mark", "refine", "match_shapes"),
    *("level_weights", "read_rays", "set_footprint", "for_export", "aabb"),
}


class CustomField(nn.Module):
    """Any module with `density` and `forward` as a field of this package. In mixed precision it runs under
    torch.autocast and gives fp32, unless it has a `connect` of its own. Points that are none are not asked for: not
    every module takes them. Its optional methods are found here too."""

    checkpointing = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.compute_dtype: torch.dtype | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in _OPTIONAL:
                raise
            own = getattr(super().__getattr__("module"), name)
            if name == "match_shapes":
                return lambda state: own(field_part(state, "module."))
            return (lambda marks: _inside(own(marks))) if name == "refine" else own

    def connect(self, buffers: Buffers) -> None:
        self.compute_dtype = None if callable(getattr(self.module, "connect", None)) else buffers.dtype

    def _autocast(self, positions: Tensor) -> torch.autocast:
        on = self.compute_dtype is not None
        return torch.autocast(positions.device.type, dtype=self.compute_dtype, enabled=on, cache_enabled=False)

    def density(self, positions: Tensor, times: Tensor | None = None) -> Tensor:
        if positions.shape[0] == 0:
            return positions.new_zeros(0)
        with self._autocast(positions):
            return self.module.density(positions, times).to(positions.dtype)  # type: ignore[operator]

    def forward(
        self, positions: Tensor, directions: Tensor, times: Tensor | None = None, camera_indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if positions.shape[0] == 0:
            return positions.new_zeros(0, 3), positions.new_zeros(0)
        random = any("Dropout" in type(part).__name__ for part in self.module.modules())
        options = {"on": self.checkpointing, "random": random}
        with self._autocast(positions):
            rgb, density = recomputed(self.module, positions, directions, times, camera_indices, **options)
        return rgb.to(positions.dtype), density.to(positions.dtype)


def _inside(carry: Carry) -> Carry:
    return lambda name, tensor: carry(name.removeprefix("module."), tensor)


def load_object(source: str, what: str = "field") -> Any:
    """What `path/to/file.py:Name` or `package.module:Name` names. The file is run, as an import runs it."""
    where, _, name = source.rpartition(":")
    refuse(not where or not name.isidentifier(), what, WANTED, repr(source))
    module = _module_of(where, name, what)
    classes = [key for key, value in vars(module).items() if inspect.isclass(value) and not key.startswith("_")]
    refuse(not hasattr(module, name), f"{what} {source}", "one of " + (", ".join(classes) or "no class at all"), name)
    return getattr(module, name)


def _module_of(where: str, name: str, what: str) -> ModuleType:
    path = Path(where).expanduser()
    try:
        if path.suffix != ".py":
            return importlib.import_module(where)
        path = path.resolve()
        hint = f"put the file with the class {name} back, or hand the field over: load_model(run, field=...)"
        refuse(not path.is_file(), what, f"the file {path}", "no such file", hint)
        program = sys.modules["__main__"]
        if path == Path(getattr(program, "__file__", None) or "").resolve() and hasattr(program, name):
            return program  # the script that runs: not once more
        key = f"nerfturbo_custom_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
        stamp = path.stat().st_mtime_ns
        if key in sys.modules and getattr(sys.modules[key], "__stamp__", None) == stamp:
            return sys.modules[key]
        spec = importlib.util.spec_from_file_location(key, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        module.__stamp__ = stamp  # type: ignore[attr-defined]
        sys.modules[key] = module
        if str(path.parent) not in sys.path:  # files beside it can be imported, as for a script
            sys.path.append(str(path.parent))
        spec.loader.exec_module(module)
        return module
    except InputError:
        raise
    except Exception as error:
        kind = f"a {'file' if path.suffix == '.py' else 'module'} that can be imported: {where}"
        raise InputError(what, kind, f"{type(error).__name__}: {error}") from error


def absolute_source(source: str, what: str = "field") -> str:
    """The same source with the file's full path, as a run folder records it."""
    where, colon, name = source.rpartition(":")
    refuse(not colon or not where or not name.isidentifier(), what, WANTED, repr(source))
    if not where.endswith(".py"):
        return source
    file = Path(where).expanduser().resolve()
    refuse(not file.is_file(), what, "a Python file", f"{file}, which is not there")
    return f"{file}:{name}"


def source_of(owner: object) -> str:
    """Where the class of an object comes from, as `load_object` takes it."""
    kind = type(owner)
    try:
        file = Path(inspect.getfile(kind)).resolve()
    except (TypeError, OSError):  # typed at a prompt
        return f"{kind.__module__}:{kind.__name__}"
    module = sys.modules.get(kind.__module__)
    packaged = kind.__module__ != "__main__" and not kind.__module__.startswith("nerfturbo_custom_")
    if packaged and module is not None and module.__spec__ is not None and "." in kind.__module__:
        return f"{kind.__module__}:{kind.__name__}"
    return f"{file}:{kind.__name__}"


def make_object(source: str, aabb: Aabb, *, seed: int = 0, what: str = "field") -> Any:
    """An instance of the class (or of what the function returns) that a source names. It is called without arguments,
    or with `aabb`, the scene's box, where it has a parameter of that name."""
    made: Callable[..., Any] = load_object(source, what)
    try:
        parameters = inspect.signature(made).parameters.values()
    except (TypeError, ValueError):
        raise InputError(f"{what} {source}", "a class, or a function that makes one", type(made).__name__) from None
    required = [one for one in parameters if one.default is one.empty and one.name != "aabb"]
    needed = [one.name for one in required if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    hint = "give it a default, or wrap the class in a function"
    refuse(bool(needed), f"{what} {source}", "no required argument but `aabb`", ", ".join(needed), hint)
    method, module = "sample" if what == "sampler" else "density", source.rpartition(":")[0]
    own = module.endswith(".py") or callable(getattr(made, method, None))  # a run may name any function installed here
    refuse(not own, f"{what} {source}", f"a class with `{method}`", type(made).__name__, "functions: in a file.py")
    options = {"aabb": aabb} if any(one.name == "aabb" for one in parameters) else {}
    with torch.random.fork_rng(devices=[]):  # the same start for the same seed, and nobody else's numbers are touched
        torch.manual_seed(seed)
        try:
            return made(**options)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"{what} {source}", "a class that can be made", _told(error)) from error


def plug_in(module: object, aabb: Aabb, device: torch.device | str = "cpu") -> CustomField:
    """A module of one's own as a field, after `check_field`."""
    field = module if isinstance(module, CustomField) else CustomField(check_module(module))
    check_field(field.to(device), aabb, torch.device(device))
    return field


def check_module(module: object) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise InputError("field", "a torch.nn.Module", type(module).__name__)
    if isinstance(module, nn.DataParallel):
        raise InputError("field", "a module of one device", "DataParallel", "several GPUs: a process each, by torchrun")
    kind = type(module).__name__
    if not callable(getattr(module, "density", None)):
        raise InputError(f"field {kind}", f"a method {SIGNATURES['density']}", "none of that name")
    if type(module).forward is nn.Module.forward:
        raise InputError(f"field {kind}", f"a method {SIGNATURES['forward']}", "none of that name")
    trained = [(name, value) for name, value in module.named_parameters() if value.requires_grad]
    refuse(not trained, f"field {kind}", "parameters that require a gradient", "none")
    hint = "keep it in fp32, mixed precision rounds where it pays"
    for name, value in trained:
        got = "no values (device meta)" if value.is_meta else value.dtype
        refuse(got != torch.float32, f"field {kind}: parameter {name}", "torch.float32", got, hint)
    hint = "checkpoints hold tensors alone: nothing is ever unpickled"
    for name, value in module.state_dict().items():
        what = f"field {kind}: state_dict()[{name!r}]"
        refuse(not isinstance(value, Tensor), what, "a tensor", type(value).__name__, hint)
    return module


@torch.no_grad()
def check_field(field: CustomField, aabb: Aabb, device: torch.device) -> None:
    """Ask both methods for a few points in the box; what is wrong is named by method, expected and found."""
    kind = type(field.module).__name__
    low, high = aabb.tensor(device)
    share = torch.rand(CHECKED, 3, generator=torch.Generator().manual_seed(0)).to(device)
    positions, directions = low + share * (high - low), torch.zeros(CHECKED, 3, device=device)
    directions[:, 2] = 1.0
    times, cameras = torch.zeros(CHECKED, device=device), torch.zeros(CHECKED, dtype=torch.int64, device=device)
    _check_values(f"{kind}.density", _asked(field, "density", positions, times), (CHECKED,), positions, low=0.0)
    seen = _asked(field, "forward", positions, directions, times, cameras)
    if not isinstance(seen, tuple) or len(seen) != 2:
        raise InputError(f"{kind}.forward", "a tuple (rgb, density)", type(seen).__name__)
    _check_values(f"{kind}.forward: rgb", seen[0], (CHECKED, 3), positions, low=0.0, high=1.0)
    _check_values(f"{kind}.forward: density", seen[1], (CHECKED,), positions, low=0.0)


def _asked(field: CustomField, method: str, *points: Tensor) -> Any:
    kind, module = type(field.module).__name__, field.module
    function = module.density if method == "density" else module
    signature = inspect.signature(getattr(module, method))
    try:
        signature.bind(*points)
    except TypeError as error:
        raise InputError(f"{kind}.{method}", SIGNATURES[method], f"{method}{signature}") from error
    try:
        return function(*points)  # type: ignore[operator]
    except Exception as error:
        hint = "register tensors as parameters or buffers, so that they move along" if "device" in str(error) else ""
        raise InputError(f"{kind}.{method}", f"to take points on {points[0].device}", _told(error), hint) from error


def _told(error: Exception) -> str:
    """The first line of an error in somebody's own code."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _check_values(
    what: str, value: Any, shape: tuple[int, ...], like: Tensor, *, low: float, high: float = torch.inf
) -> None:
    got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    hint = "squeeze the last dimension" if got == (*shape, 1) else ""
    refuse(got != shape, what, f"shape {shape} for {like.shape[0]} points", got, hint)
    wrong = value.device != like.device or not value.is_floating_point()
    refuse(wrong, what, f"floating numbers on {like.device}", f"{value.dtype} on {value.device}")
    refuse(not bool(torch.isfinite(value).all()), what, "finite numbers", "NaN or infinity")
    if float(value.min()) < low or float(value.max()) > high + 1e-4:
        hint = "end in a softplus or exp" if high == torch.inf else "end in a sigmoid"
        expected = f"numbers >= {low:g}" if high == torch.inf else f"numbers from {low:g} to {high:g}"
        raise InputError(what, expected, f"{float(value.min()):.4g} to {float(value.max()):.4g}", hint)
