"""List the tests that assert nothing: neither by themselves nor by a function they call.

    python scripts/audit_tests.py

A test asserts by `assert`, `raise`, `pytest.raises` and its kin, a child process with check=True, torch's error on
waiting, or by calling something that asserts: a checker of torch or numpy, or a helper of the test suite, which is
followed through its file and its imports. A test from which none is reached passes whatever the code does.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

CHECKERS = {"gradcheck", "gradgradcheck", "assert_close", "assert_allclose", "assert_array_equal"}
CHECKERS |= {"raises", "warns", "fail", "deprecated_call", "set_sync_debug_mode"}


class Function(NamedTuple):
    """A function of the test suite."""

    file: Path
    name: str


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def functions(file: Path) -> dict[str, list[ast.AST]]:
    """The functions of a file by name; methods and inner functions too."""
    found: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree(file)) if file.is_file() else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.setdefault(node.name, []).append(node)
    return found


@cache
def imports(file: Path) -> dict[str, Function]:
    """What a file takes from other files of the suite, by the name it has here."""
    found = {}
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom) and node.level:
            source = file.parents[node.level - 1].joinpath(*(node.module or "").split(".")).with_suffix(".py")
            found |= {alias.asname or alias.name: Function(source, alias.name) for alias in node.names}
    return found


def called(node: ast.AST) -> set[str]:
    """Names of everything that is called, or handed to something that is, below a node."""
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    return {name for call in calls for part in (call.func, *call.args) if (name := _name(part))}


def _name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _asserts_itself(node: ast.AST) -> bool:
    parts = list(ast.walk(node))
    checked = any(isinstance(part, ast.keyword) and part.arg == "check" and _true(part.value) for part in parts)
    return checked or any(isinstance(part, ast.Assert | ast.Raise) for part in parts) or bool(called(node) & CHECKERS)


def _true(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


@cache
def asserts(function: Function, above: frozenset[Function] = frozenset()) -> bool:
    """Whether an assertion is reached from a function."""
    nodes = functions(function.file).get(function.name, [])
    if any(_asserts_itself(node) for node in nodes):
        return True
    names = {name for node in nodes for name in called(node)}
    own = {Function(function.file, name) for name in names if name in functions(function.file)}
    taken = {imports(function.file)[name] for name in names if nodes and name in imports(function.file)}
    further = (own | taken) - above - {function}
    return any(asserts(other, above | {function}) for other in further)


def silent_tests(folder: Path) -> list[str]:
    """FILE NAME of each test from which no assertion is reached."""
    files = sorted(folder.rglob("test_*.py"))
    tests = [Function(file, name) for file in files for name in functions(file) if name.startswith("test")]
    return [f"{test.file.relative_to(folder)} {test.name}" for test in tests if not asserts(test)]


if __name__ == "__main__":
    found = silent_tests(Path(__file__).resolve().parents[1] / "tests")
    print("\n".join(found) or "every test asserts something")
    sys.exit(1 if found else 0)
