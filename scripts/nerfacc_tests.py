"""Run nerfacc's own tests, of a checkout of nerfacc, with `import nerfacc` meaning `nerfturbo.compat.nerfacc`.

    python scripts/nerfacc_tests.py CHECKOUT [--device cpu] [--package nerfacc_packed] [-k EXPRESSION]

The files tests/test_*.py are copied to a temporary folder and run there by pytest in a child process, so that the
checkout's own package is out of reach. nerfacc's tests ask for the device "cuda:0". On the CPU, and nowhere else, the
quoted names "cuda" and "cuda:0" in the copies are replaced by "cpu"; nothing else is changed. Their mark `skipif(not
torch.cuda.is_available, ...)` lacks the call and never skips.

Prints what became of each test. The exit status is 1 where a test failed that NOT_MEANT does not explain.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
CONFTEST = "import nerfturbo.compat\n\nnerfturbo.compat.install('nerfacc', package={package!r})\n"
UNRELEASED = "a name that was in no release"
NOT_MEANT = {  # in the error -> why it is not meant to work
    "is a compiled function": "calls nerfacc's compiled functions by themselves; the public ones stand for them",
    "(1, 128, 128, 128)": "0.4's shape of a grid that is made without levels, which has that of 0.3",
    "chunks that follow each other": "packed_info that leaves samples without a ray is refused",
    "crow_indices": UNRELEASED,
    "MultiScaleGrid": UNRELEASED,
    "RaySegments": UNRELEASED,
    "volumetric_marching": "an interface from before 0.2",
}


class Outcome(NamedTuple):
    test: str
    result: str  # passed, failed, skipped or not meant
    reason: str


def copy_tests(checkout: Path, folder: Path, device: str, package: str) -> None:
    """Put the tests into `folder`, for the device, with a conftest that installs our package as nerfacc."""
    files = sorted((checkout / "tests").glob("test_*.py"))
    if not files:
        raise SystemExit(f"{checkout}: expected a checkout of nerfacc with tests/test_*.py, got none")
    for file in files:
        text = file.read_text(encoding="utf-8")
        text = re.sub(r"""(["'])cuda(:0)?\1""", '"cpu"', text) if device == "cpu" else text
        (folder / file.name).write_text(text, encoding="utf-8")
    (folder / "conftest.py").write_text(CONFTEST.format(package=package), encoding="utf-8")


def run(folder: Path, options: list[str]) -> list[Outcome]:
    """The outcome of every test in `folder`; a file that cannot be imported counts as one test."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", "-c", os.devnull]
    command += ["--continue-on-collection-errors", f"--junitxml={report}", *options, "."]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    child = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if not report.exists():
        raise SystemExit(f"pytest wrote no report:\n{child.stdout}{child.stderr}")
    return [outcome(case) for case in ElementTree.parse(report).iter("testcase")]


def outcome(case: ElementTree.Element) -> Outcome:
    test = "::".join(part for part in (case.get("classname", "").replace(".", "/"), case.get("name", "")) if part)
    problem = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
    if problem is None:
        return Outcome(test, "passed", "")
    message = " ".join(problem.get("message", "").split())
    if problem.tag == "skipped":
        return Outcome(test, "skipped", message)
    whole = f"{message} {problem.text or ''}"
    for fragment, reason in NOT_MEANT.items():
        if fragment in whole:
            return Outcome(test, "not meant", reason)
    lines = re.findall(r"^E\s+(.+)$", problem.text or "", re.MULTILINE)
    return Outcome(test, "failed", (lines[-1] if lines and message.startswith("collection") else message)[:200])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run nerfacc's own tests over nerfturbo.compat.nerfacc.")
    parser.add_argument("checkout", type=Path, help="a checkout of nerfacc")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default, help="default: cuda where there is one")
    parser.add_argument("--package", default="", help='"nerfacc_packed" for tests that look into 0.2\'s packed_info')
    parser.add_argument("-k", default="", help="pytest's -k")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        copy_tests(options.checkout, Path(folder), options.device, options.package)
        found = run(Path(folder), ["-k", options.k] if options.k else [])
    print("| test | result | reason |\n| --- | --- | --- |")
    for one in found:
        print(f"| {one.test} | {one.result} | {one.reason.replace('|', '/')} |")
    counts = Counter(one.result for one in found)
    print(f"\non {options.device}: " + ", ".join(f"{number} {result}" for result, number in sorted(counts.items())))
    return 1 if counts["failed"] or not found else 0


if __name__ == "__main__":
    raise SystemExit(main())
