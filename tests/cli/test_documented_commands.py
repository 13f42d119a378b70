"""Every `nerfturbo` command in the blocks of the readme and the docs has flags that exist and values that parse."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nerfturbo.cli import main as command
from nerfturbo.cli.flags import parse

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS_A_FILE = ("--resume", "--config", ".py:")  # read before the flags are


class ParsedError(Exception):
    """The flags were read: nothing else is to happen."""


def commands() -> dict[str, str]:
    """Each command once, and the page that has it; of those that differ in values alone, the first."""
    found: dict[str, str] = {}
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            for part in (part.strip() for line in lines for part in line.split("  #")[0].split("&&")):
                if part.startswith("nerfturbo ") and not any(flag in part for flag in NEEDS_A_FILE):
                    found.setdefault(part, page.name)
    kinds = {" ".join(re.findall(r"^nerfturbo \w+(?: \w+)?|--[\w.-]+", text)): text for text in reversed(found)}
    return {text: found[text] for text in kinds.values()}


def test_documented_commands_parse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def parse_only(kind: type, argv: Sequence[str], prog: str, *, default: Any = None) -> None:
        parse(kind, argv, prog, default=default)
        raise ParsedError

    monkeypatch.setattr("nerfturbo.cli.settings.parse", parse_only)
    for module, _, _ in command.VERBS.values():
        monkeypatch.setattr(importlib.import_module(f"nerfturbo.cli.{module}"), "parse", parse_only, raising=False)
    wrong, n_parsed = [], 0
    for text, page in commands().items():
        words = shlex.split(text)[1:]
        verb = next(verb for verb in sorted(command.VERBS, key=len, reverse=True) if text[10:].startswith(verb))
        module, function, _ = command.VERBS[verb]
        try:
            getattr(importlib.import_module(f"nerfturbo.cli.{module}"), function)(words[len(verb.split()) :])
        except ParsedError:
            n_parsed += 1
        except SystemExit:
            wrong.append(f"{page}: {text}\n{capsys.readouterr().err[-600:]}")
    assert not wrong, "\n".join(wrong)
    assert n_parsed > 40
