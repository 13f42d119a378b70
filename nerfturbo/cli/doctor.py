"""`nerfturbo doctor`: what works on this machine, and what to do about what does not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

from .doctor_causes import Finding, diagnose
from .doctor_facts import Facts, Probes, gather
from .parse import parse

_MARKS = {
    "ok": ("ok", "green"),
    "info": ("-", "dim"),
    "warning": ("warning", "yellow"),
    "broken": ("BROKEN", "bold red"),
}


@dataclass(frozen=True)
class DoctorArgs:
    """Check this machine: torch, GPU, driver, Triton, numba, each backend against the reference, cache folders.

    Exit code 0 when it can train, 1 when something it needs is broken.
    """

    json: bool = False
    """Print everything as one JSON object."""


def main(argv: Sequence[str]) -> int:
    """Examine, print, decide."""
    args = parse(DoctorArgs, argv, "doctor")
    facts, findings = examine()
    broken = any(finding.level == "broken" for finding in findings)
    if args.json:
        listed = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"usable": not broken, "findings": listed, "facts": dataclasses.asdict(facts)}))
    else:
        _show(findings, usable=not broken)
    return 1 if broken else 0


def examine(probes: Probes | None = None) -> tuple[Facts, list[Finding]]:
    """Facts and findings, self-tests included where torch works."""
    facts = gather(probes)
    findings = diagnose(facts)
    if not any(finding.level == "broken" and finding.what in ("python", "torch") for finding in findings):
        findings += _self_test_findings()
    return facts, findings


def _self_test_findings() -> list[Finding]:
    from .doctor_selftest import SelfTest, run_self_tests

    groups: dict[str, list[SelfTest]] = {}
    for result in run_self_tests():
        groups.setdefault(f"{result.backend} on {result.device}", []).append(result)
    findings = []
    for name, results in groups.items():
        failed = [result for result in results if result.problem is not None]
        if failed:
            detail = "; ".join(f"{result.op}: {result.problem}" for result in failed)
            fix = "pip install --force-reinstall nerfturbo, clear the caches above; until then use --backend reference"
            findings.append(Finding("broken", name, detail, "self-test failed", fix))
        else:
            worst = max(result.error or 0.0 for result in results)
            agreed = "runs" if worst == 0.0 else f"agrees with the reference to {worst:.0e}"
            findings.append(Finding("ok", name, f"{agreed} in {', '.join(result.op for result in results)}"))
    return findings


def _show(findings: list[Finding], *, usable: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        mark, style = _MARKS[finding.level]
        detail = Text(finding.detail)
        if finding.fix:
            detail.append(f"\n-> {finding.fix}", style="bold")
        table.add_row(Text(mark, style=style), Text(finding.what), detail)
    console.print(table)
    console.print("This machine can train." if usable else "Something nerfturbo needs is broken: see above.")
