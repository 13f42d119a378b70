"""The errors a user can cause, each with one format: what, expected, got, hint."""

from collections.abc import Iterable
from pathlib import Path


class NerfturboError(Exception):
    """Base of every error raised on purpose. The command line prints it in one line and exits with 2."""


class InputError(NerfturboError, ValueError):
    """An argument, file or folder is not what it must be.

    >>> print(InputError("density", "shape (4,)", "(4, 1)", "squeeze the last dimension"))
    density: expected shape (4,), got (4, 1); squeeze the last dimension
    """

    def __init__(self, what: str, expected: str, got: str, hint: str = "") -> None:
        self.what, self.expected, self.got, self.hint = what, expected, got, hint
        super().__init__(f"{what}: expected {expected}, got {got}" + (f"; {hint}" if hint else ""))

    def __reduce__(self) -> "tuple[type[InputError], tuple[str, str, str, str]]":
        return type(self), (self.what, self.expected, self.got, self.hint)


def refuse(bad: bool, what: str, expected: str, got: object, hint: str = "") -> None:
    """Raise InputError where `bad`."""
    if bad:
        raise InputError(what, expected, str(got), hint)


class BackendError(NerfturboError, RuntimeError):
    """The backend that was asked for cannot run here."""


class CheckpointError(NerfturboError, RuntimeError):
    """A checkpoint is missing, broken, or belongs to another model."""


class DistributedError(NerfturboError, RuntimeError):
    """The processes of one training job lost each other, or never met."""


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """
    >>> did_you_mean("trian", ["train", "eval"]), did_you_mean("x", ["train"]), did_you_mean("mehs", {"mesh": "a mesh"})
    ('did you mean train?', '', 'did you mean a mesh?')
    """
    import difflib

    near = difflib.get_close_matches(word, list(options), 1)
    return f"did you mean {options[near[0]] if isinstance(options, dict) else near[0]}?" if near else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: Python's, a GPU's, or the machine's, each of which says so in its own words."""
    said = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(s in str(error) for s in said))


def require_run(path: str | Path) -> Path:
    """The path of a run folder, of which there must be one."""
    place, hint = Path(path).expanduser(), "a run folder is what `nerfturbo train` writes"
    if not place.is_dir():
        others = place.parent.iterdir() if place.parent.is_dir() else ()
        runs = [one for one in others if (one / "config.json").is_file()]
        newest = max((one for one in runs if one.name.startswith(f"{place.name}-")), default=None)  # named without time
        near = did_you_mean(place.name, [one.name for one in runs]) if newest is None else f"the newest one is {newest}"
        raise InputError(str(place), "a run folder", "a file" if place.exists() else "no such folder", near or hint)
    refuse(not (place / "config.json").is_file(), str(place), "a run folder with config.json", "none in it", hint)
    return place


def counted(n: int, noun: str) -> str:
    """
    >>> counted(1, "test view"), counted(2, "test view")
    ('1 test view', '2 test views')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
