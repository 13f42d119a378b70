"""Files and folders that appear whole or not at all: written beside their place, then renamed. And where caches lie."""

import contextlib
import itertools
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

_NUMBERS = itertools.count()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write text (UTF-8) or bytes; whoever reads the file sees the old content or the new one."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path`, with the same ending, for a file or a folder that takes its place when the block succeeds.
    Folders above are made. When the block fails, nothing of it stays and `path` is as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}-{next(_NUMBERS)}.tmp{path.suffix}")
    try:
        yield temporary
        if temporary.is_dir() and path.is_dir():
            shutil.rmtree(path)
        os.replace(temporary, path)
    except OSError as error:  # named as whoever asked for the file knows it
        if error.errno and (error.filename is None or Path(os.fsdecode(error.filename)).name == temporary.name):
            error.filename = str(path)
        raise
    finally:
        remove(temporary)


def remove_abandoned(folder: Path) -> None:
    """What a process left half written, in this folder or below, if it is gone: killed, perhaps with this one's number.
    For the start of a process, which has begun no file itself."""
    for path in folder.rglob(".*.tmp*"):
        found = re.fullmatch(r"\..*\.(\d+)(-\d+)?\.tmp(\..*)?", path.name)
        if found is None or (int(found[1]) != os.getpid() and _is_running(int(found[1]))):
            continue
        with contextlib.suppress(OSError):
            remove(path)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:  # another one: it is there and belongs to someone else
        return not isinstance(error, ProcessLookupError)
    return True


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there; of a link, the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_entry(path: str, *names: str) -> str | None:
    """The first value by one of these names in a file of Linux that tells `name: value`; None where there is none."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in names:
                return value.strip()
    return None


def cache_folder() -> Path:
    """Where nerfturbo keeps what it can make again: NERFTURBO_CACHE, else the platform's place for caches."""
    if chosen := os.environ.get("NERFTURBO_CACHE"):
        return Path(chosen).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "nerfturbo"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "nerfturbo"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "nerfturbo" / "cache"
    return Path.home() / ".cache" / "nerfturbo"
