"""What the flags of all verbs are made of: the parser, flags that several verbs have, and checks of their values."""

import contextlib
import dataclasses
import io
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro.conf import Positional, arg

from ..errors import InputError, NerfturboError, did_you_mean, refuse, require_run

T = TypeVar("T")
BackendName = Literal["auto", "reference", "cpu", "triton"]
BoundsName = Literal["auto", "bounded", "unbounded"]
UpName = Literal["auto", "x", "y", "z", "-x", "-y", "-z"]
Box = Annotated[tuple[float, float, float, float, float, float] | None, arg(metavar="X Y Z X Y Z")]
Number = Annotated[int, arg(metavar="N")]
Count = Annotated[int | None, arg(metavar="N")]

OTHERS = {"-o": "--output", "--out": "--output", "--iters": "--steps", "--iterations": "--steps", "--gpu": "--device"}
OTHERS |= {"--max-steps": "--steps", "--lr": "--optim.lr", "--batch-size": "--train.batch-samples"}  # of other tools

HELP_WIDTH = 114  # columns

# Flags that several verbs have, with their help.
_BACKEND = "Kernel backend: cpu (numba), triton or reference (plain torch); auto takes the fastest."
_EVAL_VIEWS = "Score only this many test views, evenly spaced; all of them unless given."
RunPath = Annotated[Positional[str], arg(metavar="RUN", help="A run folder.")]
SceneSource = Annotated[Positional[str], arg(metavar="DATA", help="A scene folder, or a built-in scene by name.")]
Device = Annotated[str, arg(help="cpu, cuda, cuda:1, ...; auto takes a GPU where there is one.")]
Backend = Annotated[BackendName, arg(metavar="NAME", help=_BACKEND)]
Kind = Annotated[str | None, arg(metavar="KIND|FILE:CLASS")]
EvalViews = Annotated[int | None, arg(metavar="N", help=_EVAL_VIEWS)]


def parse(kind: type[T], argv: Sequence[str], prog: str, *, default: T | None = None) -> T:
    """The flags of one verb, from a dataclass whose fields' comments are the help; wrong ones exit with 2."""
    if default is None and asks_help(argv):
        print_help(kind, prog)
        sys.exit(0)
    _check_names(kind if default is None else default, argv, prog)
    if argv and argv[0][:1] != "-" and "run" in getattr(kind, "__dataclass_fields__", ()):
        require_run(argv[0])  # in half of the time that the parser takes to get there
    given: dict[str, Any] = {} if default is None else {"default": default}
    # --json without a --no-json; where a preset's values are the defaults, both, for some are on
    config, said = (tyro.conf.FlagCreatePairsOff,) if default is None else (), io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            name = prog if prog.startswith("python ") else f"nerfturbo {prog}"
            return tyro.cli(kind, prog=name, args=list(argv), config=config, **given)
    except SystemExit as end:
        cause = end.__context__
        while cause is not None and not isinstance(cause, InputError):
            cause = cause.__context__
        if not end.code:
            raise
        raise cause or _in_one_line(said.getvalue(), name) from None


def _in_one_line(box: str, prog: str) -> NerfturboError:
    """What tyro said in a box, in the words of all other errors where it is one of these."""
    rows = (line.strip("│| ") for line in box.splitlines()[1:-1])  # without its title
    text, hint = " ".join(row for row in rows if row.strip("─-")), f"`{prog} --help` lists all"
    if found := re.search(rf"Missing from {prog}: (\S+) (.+?)\.? \(required\)", text):
        return InputError(found[1], found[2][:1].lower() + found[2][1:], "nothing", hint)
    if found := re.search(r"Missing value for argument '(\S+)'", text):
        return InputError(found[1], "a value", "nothing", hint)
    if found := re.search(r"invalid choice '(.*?)' for argument '(\S+)'\. Expected one of \((.+?)\)\.", text):
        options = re.findall(r"'(.*?)'", found[3])
        return InputError(found[2], "one of " + ", ".join(options), found[1], did_you_mean(found[1], options))
    got = re.search(r"(?:from \[|arguments: \[|base 10: |to float: )(.+?)(?:\]|(?<=') )", text)
    if got and (found := re.search(r"Error parsing (\S+):.* helptext: \S+ (.+?) [A-Z][a-z]", text)):
        kinds = {"class 'int'": "a whole number", "int()": "a whole number", "float": "a number"}
        kind = next((kinds[k] for k in kinds if k in text and "," not in got[1]), found[2])
        return InputError(found[1], kind, got[1], hint)
    return NerfturboError(text.partition(" For full")[0] + f"; {hint}")


def print_help(kind: type, prog: str, groups: dict[str, str] | None = None) -> None:
    """All flags with their whole texts; or those of groups, a line each: what stands before a long one's semicolon."""
    width = max(60, min(HELP_WIDTH, shutil.get_terminal_size((HELP_WIDTH, 0)).columns))
    columns, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), "1000"
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        tyro.cli(kind, prog=f"nerfturbo {prog}", args=["--help"], config=(tyro.conf.FlagCreatePairsOff,))
    os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    told = re.sub(r"^  -h,.*| +$", "", said.getvalue(), flags=re.MULTILINE)
    head, listed = re.split(r"\n\n (?=positional arg|options)", told, maxsplit=1)
    entry = re.compile(r"^  ((?:--)?(\S+).*?)(?:  +|\n   +)(.*(?:\n   .*)*)", re.MULTILINE)
    found = {name: (flag.replace("{None}|", ""), " ".join(text.split())) for flag, name, text in entry.findall(listed)}
    print("\n\n".join(textwrap.fill(part, width) for part in head.split("\n\n")))
    for title, names in (groups or {"": " ".join(found)}).items():
        print(f"\n{title}:" if title else "")
        for flag, text in (found[name] for name in names.split() if name in found):
            text, _, default = text.removesuffix(" (required)").removesuffix(")").partition(" (default: ")
            default = "" if default in ("None", "False", "True", "''", "") else f" (default: {default})"
            short = text if not groups or len(text + default) <= HELP_WIDTH - 28 else text.partition(";")[0]
            lines = textwrap.indent(textwrap.fill(f"{short.removesuffix('.')}{default}", width - 29), " " * 29)
            print(f"  {flag:25}  {lines.strip()}" if len(flag) <= 25 else f"  {flag}\n{lines}")


def _check_names(values: Any, argv: Sequence[str], prog: str) -> None:
    """Refuse flags that are not there, in a tenth of the time that the parser takes to say so."""
    names = {"--help", *_flag_names(values)}
    for word in (word.partition("=")[0] for word in argv):
        if word.replace("_", "-") not in names and (word in OTHERS or (word[:2] == "--" and word[2:3].isalpha())):
            meant = OTHERS.get(word, "")
            hint = f"did you mean {meant}?" if meant in names else did_you_mean(word, names)
            every = "--help" if isinstance(values, type) else "--help-all"
            listed = f"`nerfturbo {prog} {every}` lists all"
            raise NerfturboError(f"unrecognized flag {word}: {hint}{' ' if hint else ''}{listed}")


def _flag_names(values: Any, prefix: str = "--") -> Iterator[str]:
    """The flags of a dataclass, or of one with values, whose sections are flags with their name before."""
    for one in dataclasses.fields(values):
        made = one.default_factory() if one.default_factory is not dataclasses.MISSING else None
        value, name = getattr(values, one.name, made), one.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            yield from _flag_names(value, prefix if name == "settings" else f"{prefix}{name}.")
        else:
            yield from (f"{prefix}{name}", f"{prefix}no-{name}")


def flag_value(argv: Sequence[str], flag: str) -> str | None:
    """What a flag will be, before the real parser runs: some flags decide the defaults of others.

    >>> flag_value(["--preset", "ngp"], "--preset"), flag_value(["--preset=ngp"], "--preset"), flag_value([], "--x")
    ('ngp', 'ngp', None)
    """
    found = None
    for position, word in enumerate(argv):
        if word == flag and position + 1 < len(argv):
            found = argv[position + 1]
        elif word.startswith(flag + "="):
            found = word[len(flag) + 1 :]
    return found


def check_positive(values: dict[str, float | int | None]) -> None:
    """Refuse what is not above zero or has no end, by the name of its flag; None is a flag that was not given."""
    for flag, value in values.items():
        if value is not None and not 0 < value < math.inf:
            raise InputError(flag, "a finite number > 0" if value == math.inf else "a number > 0", str(value))


def check_within(flag: str, value: float | None, low: float, high: float = math.inf, *, what: str = "") -> None:
    """Refuse what is not from `low` to `high`; None is a flag that was not given."""
    expected = what or (f"a number >= {low}" if high == math.inf else f"{low} to {high}")
    refuse(value is not None and not low <= value <= high, flag, expected, value)


def asks_help(argv: Sequence[str]) -> bool:
    return any(word in ("-h", "--help", "--help-all") for word in argv)
