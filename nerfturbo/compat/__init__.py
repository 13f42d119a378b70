"""The public names of nerfacc and tiny-cuda-nn over this package's kernels, so that their users switch by one line.

    import nerfturbo.compat.nerfacc as nerfacc          # in place of: import nerfacc
    import nerfturbo.compat.tinycudann as tcnn          # in place of: import tinycudann as tcnn

For code that cannot be edited, `install()` before its first import does the same. docs/migration/ says what differs.
"""

import importlib
import sys
from types import ModuleType

from ..errors import refuse

__all__ = ["install", "uninstall"]

ORIGINALS = ("nerfacc", "tinycudann")


def _modules(package: ModuleType) -> dict[str, ModuleType]:
    """{"": package, ".pack": module, ...}: the package and its modules whose names are not private."""
    whole = package.__name__.partition("_")[0]  # nerfacc_packed has the modules of nerfacc, but marches by itself
    inside = {name.removeprefix(whole): module for name, module in sys.modules.items() if name.startswith(f"{whole}.")}
    own = {"": package} if whole == package.__name__ else {"": package, ".ray_marching": package}
    return {name: module for name, module in inside.items() if "._" not in name} | own


def install(*names: str, package: str = "") -> None:
    """Make `import nerfacc` and `import tinycudann` (or only the given names) resolve to this package. It must run
    before the original is imported; a second call changes nothing. `package` is another module to stand under the one
    name: "nerfacc_packed" for code that looks into 0.2's `packed_info`, "nerfacc_indexed" for 0.3."""
    chosen = names or ORIGINALS
    refuse(package not in ("", "nerfacc_packed", "nerfacc_indexed"), "package", "a name of nerfturbo.compat", package)
    refuse(package != "" and len(chosen) != 1, "package", "one name to install it under", ", ".join(chosen))
    for name in chosen:
        refuse(name not in ORIGINALS, "name", " or ".join(ORIGINALS), repr(name))
        ours = importlib.import_module(f"{__name__}.{package or name}")
        present = sys.modules.get(name)
        if present is ours:
            continue
        foreign = present is not None and not present.__name__.startswith(f"{__name__}.")
        refuse(foreign, name, "not imported yet", repr(present), "call install() before the first import of it")
        uninstall(name)
        sys.modules.update({name + inside: module for inside, module in _modules(ours).items()})


def uninstall(*names: str) -> None:
    """Take the names back; the originals, where installed, can be imported again."""
    for name in names or ORIGINALS:
        for key in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
            if sys.modules[key].__name__.startswith(f"{__name__}."):
                del sys.modules[key]
