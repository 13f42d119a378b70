"""Putting the compatible packages under the names of the originals."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from types import ModuleType

from ..errors import InputError

ORIGINALS = ("nerfacc", "tinycudann")
# nerfacc 0.2 and 0.3 had these modules; here one file has all their names.
OLD_MODULES = ("contraction", "grid", "intersection", "pack", "ray_marching", "vol_rendering")


def _modules(package: ModuleType) -> Iterator[tuple[str, ModuleType]]:
    """("", package), then (".pack", module), ... for every module of the package whose name is not private."""
    yield "", package
    if not hasattr(package, "__path__"):
        yield from ((f".{name}", package) for name in OLD_MODULES)
        return
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        inside = found.name[len(package.__name__) :]
        if not any(part.startswith("_") for part in inside.split(".")[1:]):
            yield inside, importlib.import_module(found.name)


def install(*names: str, package: str = "") -> None:
    """Make `import nerfacc` and `import tinycudann` (or only the given names) resolve to this package.

    It must run before the original is imported; a second call changes nothing. `package` names another module of
    `nerfturbo.compat` to stand under the one given name: `install("nerfacc", package="nerfacc_packed")` serves code
    that was written for nerfacc 0.2.
    """
    chosen = names or ORIGINALS
    if package and len(chosen) != 1:
        raise InputError("package", "one name to install it under", ", ".join(chosen))
    for name in chosen:
        if name not in ORIGINALS:
            raise InputError("name", " or ".join(ORIGINALS), repr(name))
        try:
            ours = importlib.import_module(f"{__package__}.{package or name}")
        except ModuleNotFoundError as error:
            raise InputError("package", "a module of nerfturbo.compat", repr(package)) from error
        present = sys.modules.get(name)
        if present is ours:
            continue
        if present is not None and not present.__name__.startswith(f"{__package__}."):
            raise InputError(name, "not imported yet", repr(present), "call install() before the first import of it")
        uninstall(name)
        for inside, module in _modules(ours):
            sys.modules[name + inside] = module


def uninstall(*names: str) -> None:
    """Take the names back; the originals, where installed, can be imported again."""
    for name in names or ORIGINALS:
        for key in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            if sys.modules[key].__name__.startswith(f"{__package__}."):
                del sys.modules[key]
