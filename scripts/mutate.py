"""Plant one bug at a time in the code that decides results, run the tests near it, and list the bugs nobody noticed.

    python scripts/mutate.py --count 300 --jobs 2 --output mutants.json
    python scripts/mutate.py --only sampling/grid.py --count 20
    python scripts/mutate.py --start 180 --count 120 --seconds 500 --output more.json
    python scripts/mutate.py --merge mutants.json more.json --output all.json

A bug is one change of the syntax tree: a sign, an operator, a comparison that is off by one, a dropped term, swapped
arguments, a wrong number, axis or default, a condition turned round, a statement left out. Bugs are drawn from a seed
without repeats and spread evenly over the files. Each is planted in a copy of the tree, one copy for each worker; its
tests run in a forked process that has imported everything but nerfturbo. Tests that fail or skip without a bug, where
a package is missing, are left out; a file without any others is skipped.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import difflib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from parallel import Case, Row, add_flags, run, stay_small

REPOSITORY = Path(__file__).resolve().parents[1]
SECONDS = 60  # that the tests of one bug may take beyond four times their own; a bug that makes them hang is noticed

# file of the package -> tests near it, the quick ones first
NEAR: dict[str, str] = {
    "ops/composite/reference.py": "ops/test_composite.py ops/test_merge_weak_samples.py",
    "ops/composite_loss/reference.py": "ops/test_composite_loss.py ops/test_ray_losses.py",
    "ops/hash_encode/reference.py": "ops/test_hash_encode.py ops/test_encode_regions.py kernels/test_hash_encode.py",
    "ops/intervals/reference.py": "ops/test_intervals.py ops/test_importance.py sampling/test_proposals.py",
    "ops/march/reference.py": "ops/test_march.py ops/test_occupancy.py",
    "ops/mlp/reference.py": "ops/test_fused_mlp.py",
    "ops/ngp/reference.py": "ops/test_ngp_field.py ops/test_ngp_visibility.py ops/test_ngp_query.py",
    "ops/packed/reference.py": "ops/test_packed.py ops/test_gather.py ops/test_merge_weak_samples.py",
    "ops/pixels/reference.py": "ops/test_draw_pixels.py ops/test_choose_pixels.py ops/test_camera_rays.py",
    "ops/positions/reference.py": "ops/test_sample_positions.py ops/test_aabb.py ops/test_cones.py",
    "ops/random/reference.py": "ops/test_random.py",
    "ops/spherical_harmonics/reference.py": "ops/test_spherical_harmonics.py",
    "ops/voxels/reference.py": "ops/test_voxel_lookup.py",
    "ops/frame/reference.py": "ops/test_frame.py",
    "ops/adam/reference.py": "ops/test_step_state.py kernels/test_adam.py training/test_optim.py",
    "sampling/geometry.py": "sampling/test_geometry.py sampling/test_contracted_grid.py",
    "sampling/grid.py": "sampling/test_occupancy_grid.py sampling/test_crop.py sampling/test_moving_grid.py",
    "sampling/contracted.py": "sampling/test_contracted_grid.py",
    "sampling/histograms.py": "sampling/test_proposals.py training/test_proposed.py",
    "sampling/proposals.py": "sampling/test_proposals.py training/test_proposed.py",
    "sampling/uniform.py": "training/test_one_chain.py training/test_matrix.py",
    "rendering/losses.py": "rendering/test_render.py training/test_one_chain.py ops/test_ray_losses.py",
    "rendering/render.py": "rendering/test_render.py rendering/test_image.py",
    "training/loss.py": "training/test_one_chain.py training/test_depth_loss.py training/test_step.py",
    "training/optim.py": "training/test_optim.py training/test_step.py",
    "training/precision.py": "training/test_precision.py",
    "training/stability.py": "training/test_precision.py training/test_step.py training/test_trainer.py",
    "training/checkpoint.py": "training/test_checkpoint.py training/test_restore.py",
    "data/cameras.py": "data/test_cameras.py data/test_ndc.py data/test_distortion.py",
    "data/lenses.py": "data/test_distortion.py data/test_lens_models.py data/test_lens_table.py",
    "data/placement.py": "data/test_placement.py data/test_scene.py",
    "data/formats/colmap.py": "data/test_posed_formats.py data/test_conventions.py data/test_damaged_files.py",
    "data/formats/transforms.py": "data/test_posed_formats.py data/test_blender.py data/test_conventions.py",
    "data/formats/llff.py": "data/test_posed_formats.py data/test_ndc.py data/test_conventions.py",
    "evaluation/metrics.py": "evaluation/test_metrics.py",
}
# Those that take longer.
MORE = {
    "sampling/geometry.py": "data/test_keypoints.py data/test_builtin_geometry.py",
    "sampling/grid.py": "sampling/test_geometry.py viewer/test_panel.py rendering/test_image.py "
    "training/test_cull_unseen.py",
    "sampling/uniform.py": "sampling/test_proposals.py sampling/test_geometry.py training/test_proposed.py",
    "sampling/proposals.py": "rendering/test_memory.py",
    "rendering/losses.py": "training/test_step.py training/test_proposed.py",
    "rendering/render.py": "export/test_frames.py",
    "training/loss.py": "training/test_proposed.py training/test_quality.py "
    "training/test_own_field.py::test_optional_methods_are_found_through_the_plug",
    "training/optim.py": "training/test_precision.py training/test_own_field.py training/test_lightning.py",
    "training/stability.py": "training/test_monitor.py",
    "training/checkpoint.py": "training/test_optim.py training/test_lightning.py cli/test_hostile.py",
    "data/cameras.py": "data/test_posed_formats.py data/test_exported_formats.py export/test_exports.py",
    "data/placement.py": "data/test_decisions.py data/test_conventions.py data/test_ndc.py",
    "data/formats/colmap.py": "data/test_capture_folders.py",
    "data/formats/llff.py": "cli/test_hostile.py::test_pickles_and_boastful_headers_are_refused",
    "data/formats/transforms.py": "data/test_capture_folders.py data/test_exported_formats.py "
    "data/test_hostile_folders.py::test_images_lie_elsewhere_under_other_endings",
    "evaluation/metrics.py": "evaluation/test_baselines.py",
    "ops/mlp/reference.py": "kernels/test_wide_mlp.py fields/test_fields.py",
    "ops/ngp/reference.py": "ops/test_ngp_logits.py",
    "ops/march/reference.py": "sampling/test_occupancy_grid.py",
}
NEAR = {name: f"{tests} {MORE[name]}" if name in MORE else tests for name, tests in NEAR.items()}
# Kernels: numba's have the tests of their reference, Triton's run interpreted where there is no GPU.
NEAR |= {name.replace("reference", "cpu"): tests for name, tests in NEAR.items() if name.startswith("ops/")}
TRITON = ("adam", "composite", "hash_encode", "march", "packed", "mlp")
KERNELS = {
    "mlp": "kernels/test_fused_mlp.py kernels/test_wide_mlp.py ops/test_fused_mlp.py",
    "hash_encode": "kernels/test_hash_encode.py ops/test_hash_encode.py ops/test_encode_regions.py",
    "march": "kernels/test_march.py ops/test_march.py ops/test_occupancy.py",
    "composite": "kernels/test_composite.py ops/test_composite.py ops/test_merge_weak_samples.py",
    "packed": "kernels/test_packed.py ops/test_packed.py ops/test_merge_weak_samples.py",
}
NEAR |= {f"ops/{name}/triton.py": KERNELS.get(name, f"kernels/test_{name}.py ops/test_{name}.py") for name in TRITON}
NEAR["ops/adam/triton.py"] = "kernels/test_adam.py ops/test_step_state.py"
EXAMPLES = "test_doctests.py::test_docstring_examples[nerfturbo.{}]"
for name in NEAR:
    if ">>> " in (REPOSITORY / "nerfturbo" / name).read_text(encoding="utf-8"):
        NEAR[name] += " " + EXAMPLES.format(name.removesuffix(".py").replace("/", "."))

OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
OPERATORS |= {ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Pow: ast.Mult, ast.LShift: ast.RShift}
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
NAMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "clamp_min": "clamp_max", "clamp_max": "clamp_min"}
NAMES |= {"sin": "cos", "cos": "sin", "floor": "ceil", "sum": "mean", "mean": "sum", "exp": "expm1", "any": "all"}
NAMES |= {"minimum": "maximum", "maximum": "minimum", "zeros": "ones", "zeros_like": "ones_like", "cumsum": "cumprod"}


TINY = 1e-5  # what keeps a quotient finite may as well be twice as large
REDUCED = ("amin", "amax", "all", "any", "cumsum", "cumprod", "mean", "norm", "prod", "softmax", "sum")  # along an axis
SYMMETRIC = ("min", "max", "minimum", "maximum", "promote_types")  # in their first two arguments
# What decides no result: how large the pieces of work are, how a kernel is compiled, what is checked besides.
PIECES = re.compile(
    r"AT_ONCE|CHUNK|BLOCK|GRAIN|PART|MAX_KEPT|shared|num_warps|num_stages|strict=|@jit|lru_cache|pin_memory"
)


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(what, the node in its place) for each bug that one node can have."""
    if (
        isinstance(node, ast.BinOp)
        and type(node.op) in OPERATORS
        and not isinstance(node.left, ast.Constant | ast.List)
    ):
        other = OPERATORS[type(node.op)]
        yield f"{type(node.op).__name__} becomes {other.__name__}", _with(node, op=other())
        yield "the right term is dropped", node.left
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        other = COMPARISONS[type(node.ops[0])]
        yield f"{type(node.ops[0]).__name__} becomes {other.__name__}", _with(node, ops=[other(), *node.ops[1:]])
    elif isinstance(node, ast.keyword) and node.arg == "dim" and ast.unparse(node.value) == "-1":
        yield "another axis", _with(node, value=ast.Constant(0))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "the sign is dropped", node.operand
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
        yield "the negation is dropped", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} becomes {not node.value}", _with(node, value=not node.value)
    elif (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and (not node.value or abs(node.value) > TINY)
    ):
        value = node.value + 1 if isinstance(node.value, int) else node.value * 2.0 or 0.5
        yield f"{node.value} becomes {value}", _with(node, value=value)
    elif isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        starred = any(isinstance(arg, ast.Starred) for arg in node.args[:2])
        if len(node.args) >= 2 and not starred and name not in SYMMETRIC:
            yield "two arguments are swapped", _with(node, args=[node.args[1], node.args[0], *node.args[2:]])
        if name in REDUCED and [ast.unparse(arg) for arg in node.args] == ["-1"]:
            yield "another axis", _with(node, args=[ast.Constant(0)])
        if name in NAMES:
            field = "attr" if isinstance(node.func, ast.Attribute) else "id"
            yield f"{name} becomes {NAMES[name]}", _with(node, func=_with(node.func, **{field: NAMES[name]}))
    elif isinstance(node, ast.IfExp):
        yield "the two ways of a condition are swapped", _with(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.AugAssign):
        yield "a statement is left out", ast.copy_location(ast.Pass(), node)


def _with(node: ast.AST, **values: object) -> ast.AST:
    made = copy.copy(node)
    for name, value in values.items():
        setattr(made, name, value)
    return made


def bugs_of(tree: ast.Module) -> list[tuple[int, str, ast.AST, ast.AST]]:
    """(line, what, node, the node in its place), in functions; checks of input, texts and annotations are left."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        passed: list[ast.AST] = [node] if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) else []
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("refuse", "check_shape", "InputError"):
            passed.append(node)
        if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):  # with what its message says
            passed += [node] if len(node.body) == 1 else node.body
        if (
            isinstance(node, ast.keyword)
            and node.arg in ("dim", "strict")
            and ast.unparse(node.value) in ("-1", "True")
        ):
            passed.append(node.value)  # 1 is the same axis as -1 where there are two: see `changes`
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in REDUCED:
            passed += [arg for arg in node.args if ast.unparse(arg) == "-1"]
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and PIECES.search(ast.unparse(node)):
            passed.append(node)
        passed += getattr(node, "decorator_list", [])
        annotations = [getattr(node, name, None) for name in ("annotation", "returns")]
        for root in filter(None, (*passed, *annotations)):
            skipped.update(ast.walk(root))
    found: list[tuple[int, str, ast.AST, ast.AST]] = []
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            if node not in skipped:
                skipped.add(node)  # inner functions are walked twice
                found += [(getattr(node, "lineno", 0), what, node, other) for what, other in changes(node)]
    return found


class Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else super().generic_visit(node)


def planted(source: str, seed: str, number: int | Row) -> tuple[Row, str] | None:
    """What is planted, and the file with it: the bug of that number in the order of a seed, None past the last; or the
    one that changes the same line in the same way as that of an earlier record, if there are several in its place."""
    tree = ast.parse(source)
    bugs = bugs_of(tree)
    if isinstance(number, dict):
        same, wanted = [], [x for x in number["change"] if x[0] in "+-"]
        for at in (at for at, (_, what, *_) in enumerate(bugs) if number["bug"].endswith(f": {what}")):
            found = _plant(ast.parse(source), at)
            if [x for x in found[0]["change"] if x[0] in "+-"] == wanted:
                same.append(found)
        return max(same, key=lambda found: found[0]["change"][1:] == number["change"][1:], default=None)
    order = random.Random(seed).sample(range(len(bugs)), len(bugs))
    return _plant(tree, order[number]) if number < len(bugs) else None


def _plant(tree: ast.Module, number: int) -> tuple[Row, str]:
    line, what, old, new = bugs_of(tree)[number]
    before = ast.unparse(tree)
    text = ast.unparse(ast.fix_missing_locations(Replace(old, new).visit(tree)))
    change = difflib.unified_diff(before.splitlines(), text.splitlines(), n=2, lineterm="")
    return {"bug": f"line {line}: {what}", "change": list(change)[2:]}, text


class Listener:
    """A plugin of pytest: which tests passed, and which did not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._found[report.outcome].append(report.nodeid)

    def pytest_collectreport(self, report) -> None:
        if report.outcome != "passed":
            self._found[report.outcome].append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._found))


def run_tests(words: list[str], folder: Path, log: Path, seconds: float) -> tuple[int | None, dict[str, list[str]]]:
    """Exit code of pytest in a forked process, None if it did not end in time; and which tests passed and did not."""
    listed = log.with_suffix(".json")
    listed.unlink(missing_ok=True)
    if (pid := os.fork()) == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        os.environ |= {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
        os.environ |= {"PYTEST_XDIST_WORKER_COUNT": "4096"}  # one thread for each of several processes
        import pytest

        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--basetemp", str(log.with_suffix(".tmp"))]
        os._exit(int(pytest.main([*options, *words], plugins=[Listener(listed)])))
    until, code = time.monotonic() + seconds, None
    try:
        while time.monotonic() < until:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                code = os.waitstatus_to_exitcode(status)
                break
            time.sleep(0.05)
    finally:
        if code is None:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return code, json.loads(listed.read_text()) if listed.is_file() else {"passed": [], "failed": [], "skipped": []}


def baseline(near: str, folder: Path, log: Path) -> Row:
    """Of tests, those that pass without a bug, as words for pytest, and how long they take."""
    tests = [f"tests/{test}" for test in near.split()]
    begun = time.monotonic()
    code, found = run_tests(tests, folder, log, 1200.0)
    words = [test for test in tests if test not in (*found["failed"], *found["skipped"])]
    words += [word for test in found["failed"] if "::" in test for word in ("--deselect", test)]
    left = {"words": words if found["passed"] else [], "seconds": time.monotonic() - begun}
    return {"name": near, "fate": "ready", "code": code, "failed": found["failed"], **left}


def baselines(wanted: list[str], root: Path, jobs: int, seconds: float) -> dict[str, Row]:
    """Tests -> their baseline. What an earlier run left in the folder `root` is used if it is of the same files."""
    tree, kept = root / "tree", root / "ready.json"
    digest = hashlib.sha256()
    for file in sorted(file for part in ("nerfturbo", "tests") for file in (REPOSITORY / part).rglob("*.py")):
        digest.update(file.read_bytes())
    known = json.loads(kept.read_text()) if kept.is_file() else {}
    if known.get("files") != digest.hexdigest():
        shutil.rmtree(tree, ignore_errors=True)
        left_out = (".git", ".venv", "runs", "site", "*.nbi", "*.nbc", "__pycache__", root.name)
        shutil.copytree(REPOSITORY, tree, ignore=shutil.ignore_patterns(*left_out))
        known = {"files": digest.hexdigest(), "ready": {}}
    missing = [near for near in wanted if near not in known["ready"]]

    def prepare(worker: int) -> Case:
        return lambda number: baseline(missing[number], tree, root / f"log-{worker}")

    flags = {"start": 0, "count": len(missing), "seed": 0, "jobs": jobs, "seconds": seconds}
    rows = run(argparse.Namespace(**flags, merge=None, output=None, brief=False), prepare, ("ready",)).rows.values()
    known["ready"] |= {row["name"]: row for row in rows if row["fate"] == "ready"}
    kept.write_text(json.dumps(known, indent=1))
    return known["ready"]


def plant(bug: tuple[Row, str], file: Path, folder: Path, log: Path, near: Row) -> Row:
    """Whether the tests notice it. What Python and numba have compiled of the file's folder is put back afterwards."""
    about, text = bug
    source, times = file.read_bytes(), file.stat()
    compiled, kept = file.parent / "__pycache__", file.parent / ".kept"
    if compiled.is_dir():
        compiled.rename(kept)
    file.write_text(text)
    try:
        code, found = run_tests(["-x", *near["words"]], folder, log, SECONDS + 4 * near["seconds"])
    finally:
        file.write_bytes(source)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        shutil.rmtree(compiled, ignore_errors=True)
        if kept.is_dir():
            kept.rename(compiled)
    fate = {None: "hung", 0: "survived", 5: "skipped"}.get(code, "noticed")
    return {**about, "fate": fate, "by": (found["failed"] or [f"exit {code}"])[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, 300, "bugs")
    parser.add_argument("--only", nargs="+", choices=list(NEAR), default=list(NEAR), metavar="FILE")
    parser.add_argument("--again", type=Path, metavar="JSON", help="plant what survived in an earlier record once more")
    parser.add_argument("--work", type=Path, help="keep there what the next run needs again: a tree with its kernels")
    args = parser.parse_args()
    stay_small()
    os.environ["TRITON_INTERPRET"] = "1"  # as the tests set it, too late for a triton that is already imported
    import torch

    for name in ("numba", "hypothesis", "triton", "torchmetrics", "pytest"):
        with contextlib.suppress(ImportError):
            __import__(name)
    torch.set_num_threads(1)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        root = (args.work or Path(temporary)).absolute()
        root.mkdir(parents=True, exist_ok=True)
        drawn = [] if args.merge else drawn_files(args.only, args.seed, args.start + args.count)[args.start :]
        if args.again:
            rows = [row for row in json.loads(args.again.read_text())["rows"] if row["fate"] == "survived"]
            drawn = [(row["name"], row) for row in rows][args.start : args.start + args.count]
            args.count = len(drawn)
        wanted = list(dict.fromkeys(NEAR[name] for name, _ in drawn))
        ready = {} if args.merge else baselines(wanted, root, args.jobs, args.seconds)
        print(f"{len(ready)} groups of tests ran without a bug: {time.monotonic() - begun:.0f} s", file=sys.stderr)

        def prepare(worker: int) -> Case:
            folder, log = Path(temporary) / f"tree-{worker}", Path(temporary) / f"log-{worker}"
            shutil.copytree(root / "tree", folder)

            def case(number: int) -> Row:
                name, turn = drawn[number - args.start]
                file, near = folder / "nerfturbo" / name, ready.get(NEAR[name])
                bug = planted(file.read_text(), f"{args.seed} {name}", turn)
                if bug is None or near is None or not near["words"]:
                    return {"name": name, "fate": "skipped", "bug": "none such" if bug is None else "no tests here"}
                return {"name": name, **plant(bug, file, folder, log, near)}

            return case

        args.seconds -= time.monotonic() - begun
        record = run(args, prepare, ("noticed", "hung"))
    fates, left = record.fates, len(record.bad)
    done = sum(fates.values()) - fates["skipped"]
    print(f"{done} bugs planted, {done - left} noticed, {left} survived, {fates['skipped']} skipped")
    return 0


def drawn_files(names: list[str], seed: int, count: int) -> list[tuple[str, int | Row]]:
    """(file, number of its bug) of the first `count` bugs: every file once, in random order, then again."""
    drawn: list[tuple[str, int | Row]] = []
    while len(drawn) < count:
        turn = len(drawn) // len(names)
        drawn += [(name, turn) for name in random.Random(f"{seed} {turn}").sample(names, len(names))]
    return drawn[:count]


if __name__ == "__main__":
    sys.exit(main())
