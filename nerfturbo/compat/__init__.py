"""The public names of nerfacc and tiny-cuda-nn over this package's kernels, so that their users switch by one line.

    import nerfturbo.compat.nerfacc as nerfacc          # in place of: import nerfacc
    import nerfturbo.compat.tinycudann as tcnn          # in place of: import tinycudann as tcnn

For code that cannot be edited, `install()` before its first import does the same. docs/migration/ says what differs.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from ..errors import InputError

__all__ = ["install", "uninstall"]

ORIGINALS = ("nerfacc", "tinycudann")
# nerfacc 0.2 and 0.3 had these modules; here one file has all their names.
OLD_MODULES = ("contraction", "grid", "intersection", "pack", "ray_marching", "vol_rendering")


def _modules(package: ModuleType) -> dict[str, ModuleType]:
    """{"": package, ".pack": module, ...}: the package and its modules whose names are not private."""
    if not hasattr(package, "__path__"):
        return {"": package} | {f".{name}": package for name in OLD_MODULES}
    inside = {name.removeprefix(package.__name__): module for name, module in sys.modules.items() if module}
    return {"": package} | {name: module for name, module in inside.items() if name[:1] == "." and "._" not in name}


def install(*names: str, package: str = "") -> None:
    """Make `import nerfacc` and `import tinycudann` (or only the given names) resolve to this package.

    It must run before the original is imported; a second call changes nothing. `package` names another module of
    `nerfturbo.compat` to stand under the one given name, "nerfacc_packed" (nerfacc 0.2) or "nerfacc_indexed" (0.3).
    """
    chosen = names or ORIGINALS
    if package and len(chosen) != 1:
        raise InputError("package", "one name to install it under", ", ".join(chosen))
    for name in chosen:
        if name not in ORIGINALS:
            raise InputError("name", " or ".join(ORIGINALS), repr(name))
        try:
            ours = importlib.import_module(f"{__name__}.{package or name}")
        except ModuleNotFoundError as error:
            raise InputError("package", "a module of nerfturbo.compat", repr(package)) from error
        present = sys.modules.get(name)
        if present is ours:
            continue
        if present is not None and not present.__name__.startswith(f"{__name__}."):
            raise InputError(name, "not imported yet", repr(present), "call install() before the first import of it")
        uninstall(name)
        sys.modules.update({name + inside: module for inside, module in _modules(ours).items()})


def uninstall(*names: str) -> None:
    """Take the names back; the originals, where installed, can be imported again."""
    for name in names or ORIGINALS:
        for key in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            if sys.modules[key].__name__.startswith(f"{__name__}."):
                del sys.modules[key]
