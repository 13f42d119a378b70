"""Give a virtual environment what a wheel depends on, and nothing else, by links to what is installed here.

    python scripts/borrow.py WHEEL SITE_PACKAGES

Downloading and unpacking torch once more takes minutes. A package that the wheel does not depend on stays unseen, so
that an import of one fails as it would elsewhere. A dependency that is missing here, or too old, is an error.
"""

from __future__ import annotations

import importlib.metadata
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement


def needed(requirements: list[str], extras: set[str], found: dict[str, importlib.metadata.Distribution]) -> None:
    """Add what the requirements ask for, and what that asks for."""
    for requirement in map(Requirement, requirements):
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            continue
        distribution = importlib.metadata.distribution(requirement.name)
        if not requirement.specifier.contains(distribution.version, prereleases=True):
            sys.exit(f"expected {requirement}, found {distribution.version}; install it into {sys.prefix}")
        key = f"{requirement.name.lower()} {sorted(requirement.extras)}"
        if key not in found:
            found[key] = distribution
            needed(distribution.requires or [], requirement.extras, found)


def main(wheel: Path, site_packages: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        requirements = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    found: dict[str, importlib.metadata.Distribution] = {}
    needed(requirements, set(), found)
    for distribution in found.values():
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            link = site_packages / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))).resolve())
    print("borrowed", *sorted({distribution.name for distribution in found.values()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
