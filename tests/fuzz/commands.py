"""Commands on damaged files and with odd flags, by the thousand: `python tests/fuzz/commands.py --cases 1000`.

A case damages one file of a run, a camera path, a config, a list or a zoo file and runs a command that reads it, or
runs a command with one or two flags set to odd values. It may end in success or in exit code 2 with a line that names
the file or flag. It may not show a traceback, crash, take more than a minute, grow beyond its memory, or open files
outside its folders. Each case is a forked process with its own folder, watched by an audit hook; one is repeated by
name and number: `--only tensors.safetensors --first 17 --cases 1`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from tests.data.fuzz import mutated  # noqa: E402 - a script finds the package beside it first
from tests.tiny import TINY_FLAGS  # noqa: E402

SECONDS = 60
PATIENCE = 8  # seconds that a case may train on where it was asked to train for long
MEMORY = 3 << 30  # bytes of address space beyond what the imports take
# Flags that ask for work: with a large value the command runs on until Ctrl-C, which must end it.
AMOUNTS = (
    "steps",
    "time-limit",
    "frames",
    "views",
    "resolution",
    "points",
    "faces",
    "seconds",
    "seed",
    "marks",
    "rays",
)
AMOUNTS += ("workers", "samples", "budget", "memory", "fps", "scale", "levels", "width", "every", "max", "refine")
ODD = ("-1", "0", "1", "2", "99999999", "2147483648", "-9223372036854775809", "1e999", "nan", "-inf", "1e-320", "0.5")
ODD += ("x", "", " ", "é", "None", "true", "[1", "1,2", "{}", "a" * 3000, "9" * 5000, "-", "--", "=", "%s", "cuda:7")
ODD += ("nowhere/at/all", "../nothing", "/dev/null/x", "odd name.json", "C:\\x", "\udcff", "3 3", "0 0 0 1 1 1")
RUN = (
    "eval run",
    "render run --frames 2 --only rgb --output out.gif --scale 0.5",
    "export points run out.ply --points 50",
)
RUN += ("export grid run out.npz", "export cameras run out.json", "inspect run --view 0 --pixel 3,3 --output out.png")
RUN += ("compare run run", "train --resume run --steps 14 --turntable 0", "bench render run --quick")
TINY = " ".join(TINY_FLAGS)
TRAIN = f"train ball {TINY} --steps 3 --output out"
# file below the case's folder -> commands that read it
FILES: dict[str, tuple[str, ...]] = {
    "run/config.json": (*RUN, "train ball --config run/config.json --steps 3 --turntable 0 --output out"),
    "run/metrics.json": ("compare run run", "eval run", "train --resume run --steps 14 --turntable 0"),
    "run/log.jsonl": ("compare run run", "eval run", "train --resume run --steps 14 --turntable 0"),
    "run/checkpoints/step_00000012/state.json": (*RUN, f"{TRAIN} --init-from run"),
    "run/checkpoints/step_00000012/tensors.safetensors": (*RUN, f"{TRAIN} --init-from run"),
    "path.json": ("render run --path path.json --output out.gif --scale 0.5",),
    "list.txt": ("batch list.txt --output out",),
    "zoo.safetensors": (f"{TRAIN} --init-from zoo.safetensors",),
    "ball/transforms_train.json": ("scene info ball", "eval run", TRAIN),
    "ball/train/r_1.png": ("scene info ball", TRAIN),
}
VERBS = {  # verb -> words behind which odd flags go
    "train": TRAIN,
    "eval": "eval run",
    "render": "render run --frames 2 --output out.gif --scale 0.5",
    "inspect": "inspect run --view 0 --pixel 3,3 --output out.png",
    "compare": "compare run run --output out.html",
    "export mesh": "export mesh run out.ply --resolution 12",
    "export points": "export points run out.ply --points 50",
    "export grid": "export grid run out.npz",
    "export cameras": "export cameras run out.json",
    "export onnx": "export onnx run out.onnx",
    "scene info": "scene info ball",
    "scene write": "scene write toybox out --resolution 8 --train-views 1 --test-views 1",
    "batch": "batch list.txt --output out",
    "process": "process ball/train out",
    "profile": f"profile ball {TINY.split(' --backend')[0]} --steps 2 --warm-steps 1 --output out.json",
    "bench render": "bench render run --quick",
    "warmup": "warmup",
    "doctor": "doctor",
    "view": "view run",
}
HEAVY = ("batch", "warmup", "doctor", "view")  # they train, compile or serve until Ctrl-C


@dataclass(frozen=True)
class Case:
    words: tuple[str, ...]
    about: tuple[str, ...]  # one of these must be in the line of a refusal
    long: bool = False  # it asks for more work than there is time for


def flags_of(verb: str) -> list[str]:
    """All flags of a verb, as its help lists them."""
    import contextlib
    import io

    from nerfturbo.cli.main import main

    said = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        main([*verb.split(), "--help-all" if verb in ("train", "profile") else "--help"])
    found = re.findall(r"^\W*(?:-\w, )?(--[a-z][\w.-]*)", said.getvalue(), re.MULTILINE)
    return sorted({flag for flag in found if flag not in ("--help", "--help-all")})


def flag_case(verb: str, number: int, flags: list[str]) -> Case:
    draw = random.Random(f"{verb} {number}")
    chosen = draw.sample(flags, min(len(flags), 1 if draw.random() < 0.8 else 2))
    words, values = VERBS[verb].split(), []
    for flag in chosen:
        value = draw.choice(ODD)
        values.append(value[:40].strip() or "error: .")
        words += [flag, *(value.split() if " " in value.strip() and draw.random() < 0.7 else [value])]
    names = [name for flag in chosen for name in (flag, flag.lstrip("-"), flag.rsplit(".", 1)[-1].lstrip("-"))]
    about = (*names, *(name.replace("-", "_") for name in names), *values, "nrecognized", "memory")
    about += ("ball/train",) if verb == "process" else ()  # too few photos, whatever the flags
    return Case(tuple(words), about, verb in HEAVY or any(part in f for f in chosen for part in AMOUNTS))


def file_case(name: str, number: int, folder: Path) -> Case:
    draw = random.Random(f"{name} {number}")
    file = folder / name
    file.write_bytes(mutated(file.read_bytes(), draw))
    line = draw.choice(FILES[name])
    about = (file.name, file.parent.name, "r_0.png", "list.txt", "--config", "memory")
    if file.name in ("config.json", "state.json", "tensors.safetensors"):
        about += ("step_00000012", "step_00000009", "run", "ball")
    return Case(tuple(line.split()), about, long=True)


def prepare(folder: Path) -> None:
    """What every case begins with: a scene, a run of it, a camera path, a list, a zoo file."""
    from nerfturbo.cli.main import main
    from nerfturbo.data.formats.transforms import write_blender
    from tests.tiny import ball_scene

    write_blender([ball_scene("train"), ball_scene("test", n_views=2)], folder / "ball")
    os.chdir(folder)
    assert main(f"train ball {TINY} --steps 12 --save-every 0.2 --output run".split()) == 0
    assert main(["export", "cameras", "run", "path.json"]) == 0
    Path("list.txt").write_text(f"ball {TINY} --steps 2\nball {TINY} --steps 2 --seed 3  # again\n")
    shutil.copy(next((folder / "run" / "checkpoints").glob("*12/tensors.safetensors")), "zoo.safetensors")


def watch(folder: Path) -> list[str]:
    """Note every file that is opened or changed outside the case's folder, or read outside the program's own."""
    own = [folder, REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), Path(sysconfig.get_paths()["stdlib"])]
    readable = [*own, *map(Path, ("/proc", "/sys", "/dev", "/etc", "/usr", "/lib", "/run", "/var/lib"))]
    readable += [path.resolve() for path in (REPOSITORY / ".venv",) if path.exists()]
    writable = [folder, Path("/dev/null"), Path("/dev/shm")]
    strange: list[str] = []
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def hook(event: str, args: tuple[object, ...]) -> None:
        paths = [args[0]] if event in ("open", "os.remove", "os.mkdir", "os.rmdir", "os.truncate") else []
        paths += list(args[:2]) if event in ("os.rename", "os.symlink", "os.link") else []
        for path in paths:
            if not isinstance(path, str | bytes | os.PathLike):
                continue
            place = Path(os.path.realpath(os.fsdecode(path)))
            flags = args[2] if event == "open" else writing
            changes = isinstance(flags, int) and bool(flags & writing)
            allowed = writable if changes else readable
            cache = "__pycache__" in place.parts or place.name == "_cpu"  # of compiled kernels
            if not cache and not any(place == root or root in place.parents for root in allowed) and place.exists():
                strange.append(f"{event} {place}")

    sys.addaudithook(hook)
    return strange


def child(words: Sequence[str], folder: Path) -> None:
    """In the forked process: run the command with everything it says in files, then leave."""
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(folder / f".{name}", os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.chdir(folder)
    in_use = int(re.findall(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, in_use + MEMORY))
    os.environ |= {"HOME": str(folder), "TMPDIR": str(folder), "NERFTURBO_CACHE": str(folder / "cache")}
    tempfile.tempdir = str(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    strange, code = watch(folder), 99
    try:
        from nerfturbo.cli.main import main

        code = main(list(words))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    (folder / ".strange").write_text("\n".join(strange))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def ended(pid: int, seconds: float) -> int | None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def run_case(case: Case, folder: Path) -> str | None:
    """What is wrong about how a command ended; None if nothing is."""
    scene = {file: file.stat().st_mtime_ns for file in (folder / "ball").rglob("*")}
    if (pid := os.fork()) == 0:
        child(case.words, folder)
    code = ended(pid, PATIENCE if case.long else SECONDS)
    if code is None and case.long:
        os.kill(pid, signal.SIGINT)
        code = ended(pid, SECONDS)
        code = 0 if code in (0, 130) else code
    if code is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return f"not done after {SECONDS} s"
    said = (folder / ".err").read_text(errors="replace")
    if "Traceback" in said:
        return f"exit {code} with a traceback: {said[-1500:]}"
    if code not in ((0, 1, 2) if case.words[0] in ("batch", "doctor", "bench") else (0, 2)):
        return f"exit {code}: {said[-600:]}"
    if code == 2 and not any(name in said for name in case.about):
        return f"not named: {said[-600:]}"
    if (folder / ".strange").is_file() and (strange := (folder / ".strange").read_text()):
        return f"outside its folders: {strange[:600]}"
    if scene != {file: file.stat().st_mtime_ns for file in (folder / "ball").rglob("*")}:
        return "the scene's folder was changed"
    return None


def import_all() -> None:
    """Import what commands import, so that a case does not, and compute nothing: threads do not survive a fork."""
    import torch

    torch.set_num_threads(1)
    for name in ("batch", "evaluate", "export", "finish", "render", "scene", "session", "train"):
        importlib.import_module(f"nerfturbo.cli.{name}")
    for name in ("evaluation.evaluate", "evaluation.report", "training.trainer", "export.points", "export.mesh"):
        importlib.import_module(f"nerfturbo.{name}")


def all_cases(only: Sequence[str] | None) -> dict[str, list[str]]:
    """Name -> flags; no flags for files."""
    named = {**{key: [] for key in FILES}, **{verb: flags_of(verb) for verb in VERBS}}
    return named if only is None else {name: named[name] for name in only}


def run_all(first: int, count: int, only: Sequence[str] | None = None) -> tuple[dict[str, int], list[list[object]]]:
    """Counts by name, and [name, number, command, what was wrong] of each failure. `count` cases are spread evenly."""
    failures: list[list[object]] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        root = Path(temporary).resolve()
        folder, template = root / "case", root / "template"
        folder.mkdir()
        subprocess.run([sys.executable, __file__, "--prepare", folder], check=True, stdout=sys.stderr)
        folder.rename(template)
        import_all()
        names = all_cases(only)
        counts = dict.fromkeys(names, 0)
        for turn in range(count):
            name = list(names)[turn % len(names)]
            number = first + turn // len(names)
            shutil.copytree(template, folder)
            case = flag_case(name, number, names[name]) if name in VERBS else file_case(name, number, folder)
            wrong = run_case(case, folder)
            counts[name] += 1
            if wrong is not None:
                failures.append([name, number, " ".join(case.words)[:400], wrong])
                print(f"{name} {number}: {' '.join(case.words)[:300]}\n    {wrong}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    return counts, failures


def main(words: list[str] | None = None) -> int:
    """Exit code 0 if every case ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="in all")
    parser.add_argument("--first", type=int, default=0, help="number of the first of each name")
    parser.add_argument("--only", choices=[*FILES, *VERBS], nargs="+")
    parser.add_argument("--output", type=Path, help="write counts and failures as JSON")
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.prepare is not None:
        prepare(args.prepare)
        return 0
    output = None if args.output is None else args.output.absolute()
    begun = time.monotonic()
    counts, failures = run_all(args.first, args.cases, args.only)
    record = {"cases": sum(counts.values()), "bad": len(failures), "first": args.first, "by_name": counts}
    record |= {"seconds": round(time.monotonic() - begun), "failures": failures}
    if output is not None:
        output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{record['cases']} cases, {record['bad']} bad, {record['seconds']} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
