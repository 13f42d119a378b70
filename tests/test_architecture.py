"""The shape of the code base, held by tests: import arrows, sizes, signatures, import cost, portable files.

docs/architecture.md says why. A failing test here asks for another design, not for another entry in an exception list;
each list says what may be in it.
"""

from __future__ import annotations

import ast
import functools
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "nerfturbo"

# Of the package: a change that deletes more than it adds is the best kind.
MAX_FILES, MAX_LINES = 260, 43_000
MAX_EXAMPLE_LINES = 80
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8

# The way of a ray. Each unit may import itself and what is listed; a unit that is not listed fails the test.
BASE = {"errors", "files", "types", "config", "presets", "ops"}
SAMPLES = BASE | {"data"}
PIXELS = SAMPLES | {"sampling", "fields"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "types": {"errors"},
    "config": {"errors", "types"},
    "presets": {"errors", "types", "config"},
    "ops": {"errors", "types"},
    "data": BASE,
    "sampling": SAMPLES,
    "fields": SAMPLES,
    "rendering": PIXELS,
    "training": PIXELS | {"rendering"},
    "evaluation": PIXELS | {"rendering", "training"},
    "export": PIXELS | {"rendering", "training", "evaluation"},
    "viewer": PIXELS | {"rendering", "training", "evaluation"},
}
# Above everything: they may import all of it, and nothing but them may import them.
TOP = {"bench", "compat", "cli", "__init__", "__main__"}

# What numeric code may lean on besides the standard library.
OPS_THIRD_PARTY = {
    "cpu": {"torch", "numpy", "numba", "llvmlite"},  # llvmlite is the part of numba that emits instructions
    "triton": {"torch", "triton"},
}

# Public functions with more than MAX_PARAMETERS: the marching call mirrors what its users know from elsewhere.
MANY_PARAMETERS = {"ray_marching"}
# Public functions that may take **kwargs: none so far. Only a decorator or a foreign interface would be a reason.
KEYWORD_TUNNELS: set[str] = set()


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


MODULES = python_files(PACKAGE)
EXAMPLES = python_files(REPOSITORY / "examples")
SOURCES = (
    MODULES + EXAMPLES + [path for top in ("tests", "benchmarks", "scripts") for path in python_files(REPOSITORY / top)]
)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@pytest.fixture(scope="module", autouse=True)
def _kept_no_longer() -> Iterator[None]:
    """A million nodes, which each garbage collection of this and of later tests would walk."""
    gc.disable()
    yield
    parsed.cache_clear()
    if "audit_tests" in sys.modules:
        for name in ("tree", "functions", "imports"):
            getattr(sys.modules["audit_tests"], name).cache_clear()
    gc.enable()


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def absolute_base(path: Path, node: ast.ImportFrom) -> str:
    """`..ops` in nerfturbo/data/scene.py -> nerfturbo.ops"""
    if node.level == 0:
        return node.module or ""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    package = package[: len(package) - (node.level - 1)]
    return ".".join(package + ([node.module] if node.module else []))


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of each import, inside functions and TYPE_CHECKING blocks too."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(path, node)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def unit_of(module: str) -> str | None:
    """nerfturbo.ops.march -> ops; a name of the package's own __init__ -> __init__; anything foreign -> None."""
    parts = module.split(".")
    if parts[0] != "nerfturbo":
        return None
    if len(parts) == 1:
        return "__init__"
    known = parts[1] in MAY_IMPORT or parts[1] in TOP
    exists = (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file()
    return parts[1] if known or exists else "__init__"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_follow_the_way_of_a_ray(path: Path) -> None:
    unit = unit_of(module_name(path))
    assert unit is not None
    if unit in TOP:
        return
    assert unit in MAY_IMPORT, (
        f"{name_of(path)} belongs to no unit of docs/architecture.md; give it a place in MAY_IMPORT"
    )
    allowed = MAY_IMPORT[unit] | {unit}
    wrong = [
        f"{name_of(path)}:{line} imports {module}"
        for line, module in imported_modules(path)
        if (target := unit_of(module)) is not None and target not in allowed
    ]
    assert not wrong, f"{unit} may import only {sorted(allowed)}\n" + "\n".join(wrong)


def ops_backend(path: Path) -> str:
    """ops/march/cpu.py and ops/_cpu/vector.py -> cpu; triton likewise; reference and contracts -> nothing."""
    inside = path.relative_to(PACKAGE / "ops").with_suffix("").parts
    return next((name for name in OPS_THIRD_PARTY if inside[-1] == name or inside[0] == f"_{name}"), "")


@pytest.mark.parametrize("path", python_files(PACKAGE / "ops"), ids=name_of)
def test_ops_lean_on_torch_and_their_backend_only(path: Path) -> None:
    backend = ops_backend(path)
    allowed = OPS_THIRD_PARTY.get(backend, {"torch"}) | set(sys.stdlib_module_names) | {"nerfturbo"}
    others = {"cpu", "triton"} - {backend}
    for line, module in imported_modules(path):
        parts = module.split(".")
        assert parts[0] in allowed, f"{name_of(path)}:{line} imports {module}"
        if parts[:2] == ["nerfturbo", "ops"]:
            leans = others & {part.removeprefix("_") for part in parts[2:4]}
            assert not leans, f"{name_of(path)}:{line}: {backend or 'the contract'} leans on {leans}"


def test_the_package_stays_small() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts]
    assert len(files) <= MAX_FILES
    assert sum(len(path.read_text().splitlines()) + 1 for path in files) <= MAX_LINES  # a line more for each file


def test_no_example_is_too_long() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in EXAMPLES}
    too_long = [f"{name_of(path)}: {n} lines" for path, n in lengths.items() if n > MAX_EXAMPLE_LINES]
    assert not too_long, f"over {MAX_EXAMPLE_LINES} lines:\n" + "\n".join(too_long)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_no_function_is_too_long() -> None:
    too_long = [
        f"{name_of(path)}:{node.lineno} {node.name}: {length} lines"
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, Function) and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert not too_long, f"over {MAX_FUNCTION_LINES} lines:\n" + "\n".join(too_long)


def public_functions(path: Path) -> Iterator[tuple[str, Function, bool]]:
    """(name, node, is a method): functions of the module and methods of its classes, constructors included."""
    for node in parsed(path).body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield node.name, node, False
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for inner in node.body:
                if isinstance(inner, Function) and (not inner.name.startswith("_") or inner.name == "__init__"):
                    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in inner.decorator_list)
                    yield f"{node.name}.{inner.name}", inner, not static


def is_public(path: Path) -> bool:
    """Backends are reached through ops/ alone; compat/ mirrors foreign signatures."""
    inside = path.relative_to(PACKAGE)
    foreign = inside.parts[0] == "compat" or (inside.parts[0] == "ops" and ops_backend(path) != "")
    return not foreign and not (inside.name.startswith("_") and inside.name != "__init__.py")


PUBLIC_MODULES = [path for path in MODULES if is_public(path)]


def parameters_of(node: Function, is_method: bool) -> list[str]:
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
    return names[1 if is_method else 0 :] + [argument.arg for argument in node.args.kwonlyargs]


def test_public_functions_have_few_parameters() -> None:
    too_many = [
        f"{name_of(path)}:{node.lineno} {name}: {count} parameters"
        for path in PUBLIC_MODULES
        for name, node, is_method in public_functions(path)
        if (count := len(parameters_of(node, is_method))) > MAX_PARAMETERS and name not in MANY_PARAMETERS
    ]
    assert not too_many, f"over {MAX_PARAMETERS}; group what belongs together into a dataclass:\n" + "\n".join(too_many)


def test_public_functions_have_no_keyword_tunnels() -> None:
    tunnels = [
        f"{name_of(path)}:{node.lineno} {name}(**{node.args.kwarg.arg})"
        for path in PUBLIC_MODULES
        for name, node, _ in public_functions(path)
        if node.args.kwarg is not None and name not in KEYWORD_TUNNELS
    ]
    assert not tunnels, "name the parameters:\n" + "\n".join(tunnels)


IMPORT_PROBE = """
import gc, json, sys, threading, time
import torch
before = set(sys.modules)
gc.collect()
gc.freeze()  # a pass of the collector over torch's own objects, a third of the time, falls in here only by chance
start, worked = time.perf_counter(), time.process_time()
import nerfturbo
for name in nerfturbo.__all__:  # names are loaded when first used: their cost belongs to the import all the same
    getattr(nerfturbo, name)
seconds, worked = time.perf_counter() - start, time.process_time() - worked
heavy = sorted({name.split(".")[0] for name in set(sys.modules) - before} & {"numba", "triton", "lightning", "viser"})
print(json.dumps([seconds, worked, heavy, threading.active_count(), torch.cuda.is_initialized()]))
"""
IMPORT_SECONDS = 0.3


def test_import_is_cheap_and_touches_nothing() -> None:
    best = float("inf")
    for _ in range(6):  # the least of several runs is the cost; one run may wait for a busy machine
        run = subprocess.run([sys.executable, "-c", IMPORT_PROBE], cwd=REPOSITORY, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        seconds, worked, heavy, threads, cuda = json.loads(run.stdout)
        if os.getloadavg()[0] > (os.cpu_count() or 1):  # more at work than there are cores: the clock says little
            seconds = worked
        assert heavy == [], f"import nerfturbo imports {heavy}; import them inside the function that needs them"
        assert threads == 1, "import nerfturbo starts a thread"
        assert not cuda, "import nerfturbo touches the GPU"
        best = min(best, seconds)
        if best < IMPORT_SECONDS:
            return
    pytest.fail(f"import nerfturbo adds {best:.2f} s to import torch, limit {IMPORT_SECONDS} s")


def test_tracked_files_name_no_machine() -> None:
    """Home and work folders of one machine, or the place its packages come from, mean nothing to a reader elsewhere."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("not a git checkout, so nothing says which files are the project's")
    pattern = re.compile(r"(^|[^\w.])/(work|farm|root|home|Users)/|--(extra-)?index[-]url|find[-]links", re.MULTILINE)
    found = []
    for name in filter(None, listing.stdout.split("\0")):
        path = REPOSITORY / name
        content = path.read_bytes() if path.is_file() else b""
        if b"\0" in content[:4096]:
            continue
        text = content.decode("utf-8", errors="replace")
        found += [f"{name}: {match.group()}" for match in pattern.finditer(text)]
    assert not found, "\n".join(found)


def test_every_test_asserts_something(tmp_path: Path) -> None:
    """Followed through helpers; and the script that says so does find one that asserts nothing."""
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    try:
        from audit_tests import silent_tests
    finally:
        sys.path.pop(0)
    assert silent_tests(REPOSITORY / "tests") == []
    (tmp_path / "helpers.py").write_text("def same(a, b):\n    assert a == b\n\ndef idle(a, b):\n    a == b\n")
    text = "from .helpers import idle, same\n\ndef test_good():\n    same(1, 1)\n\ndef test_bad():\n    idle(1, 2)\n"
    (tmp_path / "test_both.py").write_text(text)
    assert silent_tests(tmp_path) == ["test_both.py test_bad"]


def concrete_classes() -> set[str]:
    """Names of the fields and samplers of this package: classes with `density` and `forward`, or with `sample`."""
    found = set()
    for path in python_files(PACKAGE / "fields") + python_files(PACKAGE / "sampling"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and not any("Protocol" in ast.unparse(base) for base in node.bases):
                methods = {inner.name for inner in node.body if isinstance(inner, Function)}
                if methods & {"density", "sample", "unit_density", "_place"} or node.name in (
                    "HashGrid",
                    "OccupancyGrid",
                ):
                    found.add(node.name)
    return found


def test_nobody_asks_for_a_concrete_field_or_sampler_by_its_class() -> None:
    """Any field plugs in: outside fields/ and sampling/ what an object can do is asked, never what it is."""
    classes = concrete_classes()
    assert {"InstantNGP", "VoxelGrid", "OccupancyGrid", "ProposalEstimator", "GridSampler"} <= classes
    asked = [
        f"{name_of(path)}:{node.lineno} {ast.unparse(node)}"
        for path in MODULES
        if path.relative_to(PACKAGE).parts[0] not in ("fields", "sampling")
        for node in ast.walk(parsed(path))
        if (isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance")
        or (isinstance(node, ast.Compare) and "type(" in ast.unparse(node.left))
        if classes & {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    ]
    assert not asked, "\n".join(asked)


def test_the_config_has_few_values() -> None:
    """Each value once, members of the unions included; inherited ones count where they are defined."""
    import dataclasses
    import typing

    from nerfturbo import config

    sections = {kind for kind in vars(config).values() if dataclasses.is_dataclass(kind) and isinstance(kind, type)}
    values = [
        f"{kind.__name__}.{one.name}"
        for kind in sections
        for one in dataclasses.fields(kind)
        if one.name in kind.__annotations__ and one.name not in typing.get_type_hints(config.Config) | config.KINDS
    ]
    assert len(values) + 1 <= 90, f"{len(values) + 1} values; one that nobody changes is a constant\n" + "\n".join(
        values
    )
