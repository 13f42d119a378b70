"""Commands on damaged files and with odd flags: `python tests/fuzz/commands.py --count 1000 --jobs 2`.

A case damages one file of a scene, a run, a camera path, a config, a list or a zoo file and runs a command that reads
it, or runs a command with one or two flags set to odd values. It may end in success or in exit code 2 with a line that
names the file or flag. It may not show a traceback, crash, take more than a minute, take twice the memory of the file
as it was, or open files outside its folders. Each case is a forked process with its own folder, watched by an audit
hook; one is repeated by its name and turn: `--only tensors.safetensors --start 17 --count 1`. Commands that need a
package which is not installed are counted as skipped.
"""

from __future__ import annotations

import argparse
import getpass
import hashlib
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))

from scripts import parallel  # noqa: E402 - a script finds the package beside it first

if __name__ == "__main__":
    parallel.stay_small()

from tests.data import folders, fuzz  # noqa: E402
from tests.data.fuzz import mutated  # noqa: E402
from tests.tiny import TINY_FLAGS  # noqa: E402

# Where Python, numba and torch keep what they compile, if the environment says so.
CACHES = [Path(path) for path in (sys.pycache_prefix, os.environ.get("NUMBA_CACHE_DIR")) if path]
CACHES += [Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"]
SECONDS = 60
PATIENCE = 8  # seconds that a case may train on where it was asked to train for long
MEMORY = 3 << 30  # bytes of address space beyond what the imports take
SMALL = 64 << 20  # bytes that a damaged file may cost beyond twice what the file as it was costs
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
    "render run --frames 2 --output out.gif --scale 0.5",
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
    "run/crop.json": ("export points run out.ply --points 50", "export grid run out.npz"),
    "frames/frames.json": ("render run --frames 2 --output frames --scale 0.5",),
    "frames/frame_0000.png": ("render run --frames 2 --output frames --scale 0.5",),
    "bench.json": ("bench compare bench.json bench.json",),
    "path.json": ("render run --path path.json --output out.gif --scale 0.5",),
    "list.txt": ("batch list.txt --output out",),
    "zoo.safetensors": (f"{TRAIN} --init-from zoo.safetensors",),
    "ball/transforms_train.json": ("scene info ball", "eval run", TRAIN),
    "ball/train/r_1.png": ("scene info ball", TRAIN),
}


def _with_masks(folder: Path) -> Path:
    """Masks and depth maps beside the images."""
    folders.write_transforms(folder)
    document = json.loads((folder / "transforms.json").read_text())
    for index, frame in enumerate(document["frames"]):
        frame |= {"mask_path": f"masks/{index}.png", "depth_file_path": f"depths/{index}.png"}
        for name, mode, value in (("masks", "L", 255), ("depths", "I;16", 3000)):
            (folder / name).mkdir(exist_ok=True)
            Image.new(mode, (folders.WIDTH, folders.HEIGHT), value).save(folder / name / f"{index}.png")
    (folder / "transforms.json").write_text(json.dumps(document))
    return folder


def _exr(folder: Path) -> Path:
    """A picture in a format that is not read."""
    folders.write_transforms(folder)
    (folder / "images/view_01.png").write_bytes(b"v/1\x01\x02\0\0\0channels\0chlist\0" + bytes(range(256)) * 8)
    return folder


def _jpeg(folder: Path, ending: str) -> Path:
    folders.write_transforms(folder)
    for file in (folder / "images").iterdir():
        Image.open(file).save(file.with_suffix(ending))
        file.unlink()
    text = (folder / "transforms.json").read_text()
    (folder / "transforms.json").write_text(text.replace(".png", ending))
    return folder


# name -> (who writes the scene, which file of it is damaged)
SCENES: dict[str, tuple[Callable[[Path], Path], str]] = {
    **{name.replace(" ", "_"): made for name, made in fuzz.FILES.items()},
    "mask.png": (_with_masks, "masks/2.png"),
    "depth.png": (_with_masks, "depths/2.png"),
    "picture.exr": (_exr, "images/view_01.png"),
    **{
        f"picture{ending}": (lambda folder, ending=ending: _jpeg(folder, ending), f"images/view_01{ending}")
        for ending in (".tiff", ".bmp", ".jpeg", ".JPG")
    },
}
READS = ("scene info {}", f"train {{}} {TINY} --steps 3 --output out")
READS += (f"train {{}} {TINY} --loss.depth 0.1 --steps 3 --output out",)
for scene, (_, damaged) in SCENES.items():
    FILES[f"scenes/{scene}/{damaged}"] = tuple(line.format(f"scenes/{scene}") for line in READS)
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
    "export splats": "export splats run out.ply --splats 50 --tune-seconds 0",
    "export nerfstudio": "export nerfstudio run out",
    "export web": "export web run out.html --tune-seconds 0",
    "scene info": "scene info ball",
    "scene check": "scene check ball",
    "scene write": "scene write toybox out --resolution 8 --train-views 1 --test-views 1",
    "batch": "batch list.txt --output out",
    "process": "process ball/train out",
    "profile": f"profile ball {TINY.split(' --backend')[0]} --steps 2 --warm-steps 1 --output out.json",
    "tune": f"tune ball {TINY.split(' --backend')[0]} --output out.json",
    "bench render": "bench render run --quick",
    "bench step": f"bench step ball {TINY.split(' --backend')[0]} --quick --output out.json",
    "bench scene": f"bench scene ball {TINY.split(' --backend')[0]} --marks 1 --output out.json",
    "bench compare": "bench compare bench.json bench.json",
    "warmup": "warmup",
    "doctor": "doctor",
    "view": "view run",
}
# They train, compile or serve until Ctrl-C.
HEAVY = ("batch", "tune", "bench step", "bench scene", "warmup", "doctor", "view")


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
        main([*verb.split(), "--help-all" if " --grid." in VERBS[verb] else "--help"])
    found = re.findall(r"^\W*(?:-\w, )?(--[a-z][\w.-]*)", said.getvalue(), re.MULTILINE)
    return sorted({flag for flag in found if flag not in ("--help", "--help-all")})


def flag_case(verb: str, number: int, flags: list[str], seed: int = 0) -> Case:
    draw = random.Random(f"{seed} {verb} {number}")
    chosen = draw.sample(flags, min(len(flags), 1 if draw.random() < 0.8 else 2))
    words, values = VERBS[verb].split(), []
    for flag in chosen:
        value = draw.choice(ODD)
        given = value.split() if " " in value.strip() and draw.random() < 0.7 else [value]
        values += [value[:40].strip() or "error: .", *given[1:]]  # a flag of one word leaves the others to positions
        words += [flag, *given]
    names = [name for flag in chosen for name in (flag, flag.lstrip("-"), flag.rsplit(".", 1)[-1].lstrip("-"))]
    about = (*names, *(name.replace("-", "_") for name in names), *values, "nrecognized", "memory")
    about += ("ball/train",) if verb == "process" else ()  # too few photos, whatever the flags
    return Case(tuple(words), about, verb in HEAVY or any(part in f for f in chosen for part in AMOUNTS))


def file_case(name: str, number: int, folder: Path, seed: int = 0) -> Case:
    draw = random.Random(f"{seed} {name} {number}")
    file = folder / name
    file.write_bytes(mutated(file.read_bytes(), draw))
    line = draw.choice(FILES[name])
    about = (file.name, file.parent.name, "r_0.png", "list.txt", "--config", "memory")
    if file.name in ("config.json", "state.json", "tensors.safetensors"):
        about += ("step_00000012", "step_00000009", "run", "ball")
    if name.startswith("scenes/"):
        about += (name.split("/")[1], "view_", ".png", ".jpg")  # the picture that no longer fits a damaged file
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
    assert main(FILES["frames/frames.json"][0].split()) == 0
    assert main(["bench", "render", "run", "--quick", "--output", "bench.json"]) in (0, 1)
    Path("run/crop.json").write_text('{"version": 2, "low": [-1, -1, -1], "high": [1, 1, 1]}')
    Path("list.txt").write_text(f"ball {TINY} --steps 2\nball {TINY} --steps 2 --seed 3  # again\n")
    shutil.copy(next((folder / "run" / "checkpoints").glob("*12/tensors.safetensors")), "zoo.safetensors")
    for name, (write, _) in SCENES.items():
        write(folder / "scenes" / name)
    shutil.copytree(folder, warm := folder.with_name("warm"))
    os.chdir(warm)
    main(["warmup"])
    for line in RUN:  # compiles what these need
        main(line.split())
    os.chdir(folder)
    shutil.rmtree(warm)
    folder.with_name("modules.txt").write_text("\n".join(sys.modules))


def watch(folder: Path) -> list[str]:
    """Note every file that is opened or changed outside the case's folder, or read outside the program's own."""
    own = [folder, REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), Path(sysconfig.get_paths()["stdlib"])]
    readable = [*own, *CACHES, *map(Path, ("/proc", "/sys", "/dev", "/etc", "/usr", "/lib", "/run", "/var/lib"))]
    readable += [path.resolve() for path in (REPOSITORY / ".venv",) if path.exists()]
    writable = [folder, Path("/dev/null"), Path("/dev/shm"), *CACHES]
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
    strange, code, before = watch(folder), 99, _peak()
    try:
        from nerfturbo.cli.main import main

        code = main(list(words))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    (folder / ".strange").write_text("\n".join(strange))
    (folder / ".grown").write_text(str(_peak() - before))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _peak() -> int:
    return int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10


def ended(pid: int, seconds: float) -> int | None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def run_case(case: Case, folder: Path, memory: int | None = None) -> str | None:
    """What is wrong about how a command ended; None if nothing is. `memory` is what the honest input takes."""
    scene = {file: file.stat().st_mtime_ns for name in ("ball", "scenes") for file in (folder / name).rglob("*")}
    if (pid := os.fork()) == 0:
        child(case.words, folder)
    code = None
    try:
        code = ended(pid, PATIENCE if case.long else SECONDS)
        if code is None and case.long:
            os.kill(pid, signal.SIGINT)
            code = ended(pid, SECONDS)
            code = 0 if code in (0, 130) else code
    finally:
        if code is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if code is None:
        return f"not done after {SECONDS} s"
    said = (folder / ".err").read_text(errors="replace")
    if "Traceback" in said:
        return f"exit {code} with a traceback: {said[-1500:]}"
    if code not in ((0, 1, 2) if case.words[0] in ("batch", "doctor", "bench") else (0, 2)):
        return f"exit {code}: {said[-600:]}"
    if code == 2 and not any(name in said for name in case.about):
        return f"needs a package: {said[-200:]}" if "pip install" in said else f"not named: {said[-600:]}"
    strange = (folder / ".strange").read_text() if (folder / ".strange").is_file() else ""
    if strange and "../nothing" not in case.words:  # which asks for a file outside
        return f"outside its folders: {strange[:600]}"
    if scene != {file: file.stat().st_mtime_ns for name in ("ball", "scenes") for file in (folder / name).rglob("*")}:
        return "the scene's folder was changed"
    grown = int((folder / ".grown").read_text()) if (folder / ".grown").is_file() else 0
    if memory is not None and grown > 2 * memory + SMALL:
        return f"took {grown >> 20} MiB, and {memory >> 20} before the file was damaged"
    return None


def all_cases(only: Sequence[str] | None) -> dict[str, list[str]]:
    """Name -> flags; no flags for files."""
    named = {**{key: [] for key in FILES}, **{verb: flags_of(verb) for verb in VERBS}}
    return named if only is None else {name: named[name] for name in only}


def copy_template(template: Path, folder: Path, name: str) -> None:
    """What a case of that name needs: the scene whose file it damages, and no other."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder, ignore=lambda at, _: ["scenes"] if at == str(template) else [])
    if name.startswith("scenes/"):
        scene = "/".join(name.split("/")[:2])
        shutil.copytree(template / scene, folder / scene)


def worker(template: Path, root: Path, names: dict[str, list[str]], seed: int) -> parallel.Case:
    """The function that runs a numbered case: every name once, in random order, then again."""
    honest = root.with_name("honest")  # the memory that a command takes when nothing is damaged, for all workers
    honest.mkdir(exist_ok=True)
    own = Path(shutil.copytree(template, root / "template"))
    for file in (*(own / "run").rglob("*.json"), *(own / "run").rglob("*.jsonl")):  # it knows where its scene is
        file.write_text(file.read_text().replace(str(template), str(root / "case")))

    def case(number: int) -> parallel.Row:
        turn, at = divmod(number, len(names))
        name = random.Random(f"{seed} {turn}").sample(list(names), len(names))[at]
        folder, memory = root / "case", None
        copy_template(own, folder, name)
        if name in VERBS:
            made = flag_case(name, turn, names[name], seed)
        else:
            made = file_case(name, turn, folder, seed)
            known = honest / hashlib.sha256(" ".join(made.words).encode()).hexdigest()
            if not known.is_file():
                copy_template(own, root / "honest", name)
                run_case(Case(made.words, ("",), made.long), root / "honest")
                grown = root / "honest" / ".grown"
                known.write_text(grown.read_text() if grown.is_file() else str(MEMORY))
            memory = int(known.read_text() or MEMORY)
        wrong = run_case(made, folder, memory)
        fate = "well" if wrong is None else "skipped" if wrong.startswith("needs a package") else "bad"
        return {"name": name, "turn": turn, "fate": fate} | (
            {} if wrong is None else {"command": " ".join(made.words)[:600], "wrong": wrong}
        )

    return case


def run_all(args: argparse.Namespace) -> parallel.Record:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        root = Path(temporary).resolve()
        names: dict[str, list[str]] = {}
        if not args.merge:
            (root / "template").mkdir()
            subprocess.run([sys.executable, __file__, "--prepare", root / "template"], check=True, stdout=sys.stderr)
            parallel.import_modules((root / "modules.txt").read_text())
            names = all_cases(args.only)

        def prepare_worker(index: int) -> parallel.Case:
            (root / str(index)).mkdir()
            return worker(root / "template", root / str(index), names, args.seed)

        return parallel.run(args, prepare_worker, ("well",))


def main(words: list[str] | None = None) -> int:
    """Exit code 0 if every case ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parallel.add_flags(parser, 1000, "cases")
    parser.add_argument("--only", nargs="+", help="files or verbs; the end of a file's path is enough", metavar="NAME")
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.prepare is not None:
        prepare(args.prepare)
        return 0
    if args.only is not None:
        args.only = [name for name in (*FILES, *VERBS) for end in args.only if name == end or name.endswith(f"/{end}")]
    record = run_all(args)
    fates = record.fates
    print(f"{sum(fates.values())} cases, {len(record.bad)} bad, {fates['skipped']} skipped, {record.seconds:.0f} s")
    return 1 if record.bad else 0


if __name__ == "__main__":
    sys.exit(main())
