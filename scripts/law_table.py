"""The law as a table: what every value of the config does in every trainer, alone and with two processes.

    python scripts/law_table.py            # Markdown; minutes on two cores
    python scripts/law_table.py native     # some of native, eager, captured, two

A cell says that the value changes the run, that it is refused by name, or SILENT, which tests/training/test_law.py
does not allow. "-": one process sends no gradients. Values that change no numbers stand below, with their reasons.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.training import test_law as law


def tables(asked: list[str], folder: Path) -> dict[str, dict[str, str]]:
    """By column."""
    scenes = law.write_scenes(folder / "scenes")
    found = {name: law.walk_alone(name, scenes) for name in law.ALONE if name in asked}
    if "two" in asked:
        first, second = law.walk_in_two(scenes, folder / "two")
        for name in first:
            same = {value: word if word == second[name][value] else "SILENT" for value, word in first[name].items()}
            found[f"{name}, 2 ranks"] = same
    return found


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = tables(sys.argv[1:] or [*law.ALONE, "two"], Path(folder))
    print("| value | " + " | ".join(found) + " |\n|---" + "|---" * len(found) + "|")
    for value in law.CHANGES:
        print(f"| `{value}` | " + " | ".join(column.get(value, "-") for column in found.values()) + " |")
    print("\n" + "\n".join(f"- `{value}`: {reason}" for value, reason in law.EXCEPTIONS.items()))
    return 1 if any(law.silent(column) for column in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
