"""Plant one bug at a time in the code that decides results, run the tests near it, and list the bugs nobody noticed.

    python scripts/mutate.py --bugs 300 --output mutants.json
    python scripts/mutate.py --only sampling/grid.py --bugs 20

A bug is one change of the syntax tree: a sign, an operator, a comparison that is off by one, a dropped term, swapped
arguments, a wrong number, axis or default, a condition turned round, a statement left out. Bugs are drawn from a seed
and spread evenly over the files. Each is planted in a copy of the tree; its tests run in a forked process that has
imported everything but nerfturbo.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SECONDS = 240  # that the tests of one bug may take; a bug that makes them hang is noticed

# file of the package -> tests near it, the quick ones first
NEAR: dict[str, str] = {
    "ops/composite/reference.py": "ops/test_composite.py ops/test_merge_weak_samples.py",
    "ops/composite_loss/reference.py": "ops/test_composite_loss.py ops/test_ray_losses.py",
    "ops/hash_encode/reference.py": "ops/test_hash_encode.py ops/test_fade_levels.py",
    "ops/intervals/reference.py": "ops/test_intervals.py ops/test_importance.py sampling/test_proposals.py",
    "ops/march/reference.py": "ops/test_march.py ops/test_occupancy.py",
    "ops/mlp/reference.py": "ops/test_fused_mlp.py",
    "ops/ngp/reference.py": "ops/test_ngp_field.py ops/test_ngp_visibility.py ops/test_ngp_query.py",
    "ops/packed/reference.py": "ops/test_packed.py ops/test_gather.py",
    "ops/pixels/reference.py": "ops/test_draw_pixels.py ops/test_choose_pixels.py ops/test_camera_rays.py",
    "ops/positions/reference.py": "ops/test_sample_positions.py ops/test_aabb.py",
    "ops/random/reference.py": "ops/test_random.py",
    "ops/spherical_harmonics/reference.py": "ops/test_spherical_harmonics.py",
    "ops/voxels/reference.py": "ops/test_voxel_lookup.py ops/test_voxel_variation.py",
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
    "training/precision.py": "training/test_precision.py training/test_step.py",
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

OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
OPERATORS |= {ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Pow: ast.Mult, ast.LShift: ast.RShift}
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
NAMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "clamp_min": "clamp_max", "clamp_max": "clamp_min"}
NAMES |= {"sin": "cos", "cos": "sin", "floor": "ceil", "sum": "mean", "mean": "sum", "exp": "expm1", "any": "all"}
NAMES |= {"minimum": "maximum", "maximum": "minimum", "zeros": "ones", "zeros_like": "ones_like", "cumsum": "cumprod"}


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
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "the sign is dropped", node.operand
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
        yield "the negation is dropped", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} becomes {not node.value}", _with(node, value=not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        value = node.value + 1 if isinstance(node.value, int) else node.value * 2.0 or 0.5
        yield f"{node.value} becomes {value}", _with(node, value=value)
    elif isinstance(node, ast.Call):
        if len(node.args) >= 2 and not any(isinstance(arg, ast.Starred) for arg in node.args[:2]):
            yield "two arguments are swapped", _with(node, args=[node.args[1], node.args[0], *node.args[2:]])
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
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
        if isinstance(node, ast.If) and all(isinstance(part, ast.Raise) for part in node.body):
            passed.append(node)
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


def planted(source: str, choose: Callable[[int], int]) -> tuple[str, str, str] | None:
    """(what, the line as it was, the file with the bug), for the bug that `choose` picks of so many."""
    tree = ast.parse(source)
    bugs = bugs_of(tree)
    if not bugs:
        return None
    line, what, old, new = bugs[choose(len(bugs))]
    text = ast.unparse(ast.fix_missing_locations(Replace(old, new).visit(tree)))
    return f"line {line}: {what}", source.splitlines()[line - 1].strip(), text


def noticed(tests: list[str], folder: Path, log: Path) -> str:
    """`noticed`, `hung`, or `survived`: how the tests of a tree end, in a forked process."""
    if (pid := os.fork()) == 0:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.setsid()
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = str(folder)
        import pytest

        os._exit(int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests])))
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "noticed"
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bugs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(NEAR), default=list(NEAR))
    parser.add_argument("--output", type=Path, help="every bug and its fate as JSON; what is in it is not repeated")
    args = parser.parse_args()
    for name in ("numba", "hypothesis", "triton", "torchmetrics", "pytest"):
        __import__(name)
    import torch

    torch.set_num_threads(1)
    done = json.loads(args.output.read_text())["bugs"] if args.output and args.output.is_file() else []
    known = {(bug["file"], bug["number"], bug["seed"]) for bug in done}
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder = Path(temporary) / "tree"
        shutil.copytree(REPOSITORY, folder, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "site", "*.nbi"))
        for turn in range(args.bugs):
            name, number = args.only[turn % len(args.only)], turn // len(args.only)
            if (name, number, args.seed) in known:
                continue
            draw = random.Random(f"{args.seed} {name} {number}")
            file = folder / "nerfturbo" / name
            source = file.read_text()
            bug = planted(source, draw.randrange)
            if bug is None:
                continue
            file.write_text(bug[2])
            try:
                tests = [f"tests/{test}" for test in NEAR[name].split()]
                fate = noticed(tests, folder, Path(temporary) / "log")
            finally:
                file.write_text(source)
            values = {"file": name, "number": number, "seed": args.seed, "bug": bug[0], "code": bug[1], "fate": fate}
            done.append(values)
            print(f"{len(done):4d} {fate:9s} {name} {bug[0]}: {bug[1][:90]}", flush=True)
            if args.output is not None:
                left = [entry for entry in done if entry["fate"] == "survived"]
                record = {"planted": len(done), "noticed": len(done) - len(left), "bugs": done}
                args.output.write_text(json.dumps(record, indent=1) + "\n")
    left = sum(entry["fate"] == "survived" for entry in done)
    print(f"{len(done)} bugs planted, {len(done) - left} noticed, {left} survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
