"""The examples in docstrings print what they say.

Only modules that have one are imported, and the reference computes, so that no kernel is compiled for it: that the
backends agree is tested elsewhere.
"""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

from nerfturbo.ops import use_backend

PACKAGE = Path(__file__).resolve().parents[1] / "nerfturbo"
KERNELS = (PACKAGE / "ops" / "cpu", PACKAGE / "ops" / "kernels")  # reached, and shown, through the public op

WITH_EXAMPLES = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not any(folder in path.parents for folder in KERNELS) and ">>> " in path.read_text(encoding="utf-8")
]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("name", [module_name(path) for path in WITH_EXAMPLES])
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    examples = 0
    for case in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        examples += len(case.examples)
        with use_backend("reference"):
            runner.run(case, out=report.append)
    assert examples > 0, f"{name} has a >>> outside a docstring"
    assert runner.failures == 0, "".join(report)
