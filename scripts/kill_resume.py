"""Kill runs at random moments, resume them, and check that nothing is ever lost.

    python scripts/kill_resume.py --count 200 --jobs 2 --output kills.json
    python scripts/kill_resume.py --data lego --count 10 -- --downscale 4 --device cpu
    python scripts/kill_resume.py --merge kills.json more.json --output all.json

A case is one command that is killed (SIGKILL, SIGTERM or SIGINT) up to five times and started again each time: training
(anywhere, inside a save, or while it scores), an export, or COLMAP's stages where COLMAP is installed. After every kill
of a training run the newest checkpoint must load, be no older than the last one seen, and hold all but the steps since
the last save. In the end its weights, its log and its scores, or the exported file, must be those of a run that was
left alone, to the bit. Flags behind `--` go to `nerfturbo train`; with `--device cuda` in deterministic mode.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))

from parallel import Case, Row, add_flags, import_modules, run, stay_small  # noqa: E402

POLITE = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
MOMENTS = ("anywhere", "anywhere", "in training", "inside a save", "inside a save", "while it scores")
KINDS = ("train", "train", "train", "train", "export", "process")
EXPORTS = ("export points run out.ply --points 2000", "export grid run out.npz", "export cameras run out.json")
EXPORTS += ("render run --frames 6 --output out.gif --scale 0.5", "export mesh run out.ply --resolution 24")
REHEARSE = """import sys
from nerfturbo.cli.main import main
for words in {}:
    main(words)
open("modules.txt", "w").write("\\n".join(sys.modules))
"""  # compiles what the commands need, and names what they import
KILLS = 5  # of one case
STEPS, SAVE_EVERY = 60, 4
WINDOW = 16  # steps of one captured graph on a GPU, between which nothing is saved
LOG_EVERY = 10  # steps between the lines of log.jsonl
PATIENCE = 60.0  # seconds that a polite end may take
LATE = 240.0  # seconds after which a run that shows no progress is given up


class Lost(Exception):
    """What a kill did that it must not."""


@dataclass(frozen=True)
class Base:
    """What all cases share: a scene, a run that was left alone, and the flags both were started with."""

    root: Path
    data: str
    flags: list[str]
    seconds: float  # the run that was left alone took
    steps: int

    @property
    def save_every(self) -> int:
        return WINDOW if "cuda" in self.flags else SAVE_EVERY

    @property
    def train(self) -> list[str]:
        common = ["--turntable", "0", "--save-every", f"{self.save_every}steps"]
        return ["train", self.data, *self.flags, *common, "--steps", str(self.steps)]

    @property
    def backend(self) -> list[str]:
        """What is no part of a run's config."""
        given = [flag for flag in ("--backend", "--device") if flag in self.flags]
        return [word for flag in given for word in (flag, dict(zip(self.flags, self.flags[1:], strict=False))[flag])]

    @property
    def resume(self) -> list[str]:
        return [*self.backend, "--turntable", "0", "--save-every", f"{self.save_every}steps"]


def start(words: list[str], folder: Path) -> BaseProcess:
    """The command in a forked process, which has imported everything: a kill lands in its work, a polite one waits
    until the work has begun. CUDA does not survive a fork of a fork: there the process is a new one."""
    how = multiprocessing.get_context("spawn" if "cuda" in words else "fork")
    process = how.Process(target=_command, args=(words, folder))
    (folder / "said.txt").touch()
    signal.pthread_sigmask(signal.SIG_BLOCK, POLITE)
    process.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, POLITE)
    return process


def _command(words: list[str], folder: Path) -> None:
    import torch

    from nerfturbo.cli.main import main

    if "cuda" in words:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "cuda" not in words:
        atexit._clear()  # what the tool itself does at its end
    os.setsid()
    file = os.open(folder / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    os.chdir(folder)
    code: object = 1
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, POLITE)
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
        signal.pthread_sigmask(signal.SIG_BLOCK, POLITE)
    except KeyboardInterrupt:
        code = 130  # before the command has begun, or after its end
    finally:
        if "cuda" not in words:  # a forked process ends without
            atexit._run_exitfuncs()
    sys.exit(code)


def ended(process: BaseProcess, seconds: float) -> int | None:
    """Its exit code, negative after a signal; None if it is still there."""
    process.join(seconds)
    return process.exitcode


def finished(words: list[str], folder: Path) -> float:
    """Seconds that a command takes which is left alone."""
    begun, process = time.monotonic(), start(words, folder)
    try:
        code = ended(process, LATE)
    finally:
        _end(process)
    if code != 0:
        raise Lost(f"exit {code} of {' '.join(words)}: {(folder / 'said.txt').read_text(errors='replace')[-1500:]}")
    return time.monotonic() - begun


def _end(process: BaseProcess) -> None:
    """The command with all it started."""
    if process.exitcode is None and process.pid is not None:
        _send(process, signal.SIGKILL)
    process.join()


def _send(process: BaseProcess, number: signal.Signals) -> None:
    """SIGKILL to all that it started too; a process that has only just been forked has no group yet."""
    assert process.pid is not None
    try:
        (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)
    except ProcessLookupError:
        if process.exitcode is None:
            os.kill(process.pid, number)


def wait_for(moment: str, process: BaseProcess, killed: Path, draw: random.Random, base: Base) -> bool:
    """Wait for the moment; False where the command ended before."""
    from nerfturbo.training.checkpoint import list_checkpoints

    checkpoints = killed / "checkpoints"

    def newest() -> int:
        found = list_checkpoints(checkpoints)
        return int(found[-1].name.split("_")[1]) if found else -1

    goal = newest() + draw.randint(1, 3) * base.save_every if moment != "while it scores" else base.steps
    until = time.monotonic() + (draw.random() * base.seconds if moment == "anywhere" else LATE)
    reached = False
    while process.exitcode is None and time.monotonic() < until:
        reached = reached or (moment != "anywhere" and newest() >= min(goal, base.steps))
        if reached and (moment != "inside a save" or any(checkpoints.glob(".step_*.tmp"))):
            time.sleep(draw.random() * (0.004 if moment == "inside a save" else 0.5))
            break
        time.sleep(0.0005 if reached else 0.005)
    if moment != "anywhere" and time.monotonic() >= until:
        raise Lost(f"no progress for {LATE:.0f} s")
    return process.exitcode is None


def kill(process: BaseProcess, number: signal.Signals, folder: Path) -> Row:
    """Send it, and see how the command ends."""
    begun = time.monotonic()
    _send(process, number)
    if (code := ended(process, PATIENCE)) is None:
        raise Lost(f"still there {PATIENCE:.0f} s after {number.name}")
    said = (folder / "said.txt").read_text(errors="replace")
    if number != signal.SIGKILL and code not in (0, 130, -number):
        raise Lost(f"exit {code} after {number.name}: {said[-1500:]}")
    if "Traceback" in said:
        raise Lost(f"a traceback after {number.name}: {said[-1500:]}")
    return {"signal": number.name, "exit": code, "seconds": round(time.monotonic() - begun, 2)}


def check_run(killed: Path, last: int, saves: int) -> int:
    """What the kill left: loadable, not older, and nothing lost but what came after the last save. The step saved."""
    from safetensors.torch import load_file

    from nerfturbo.training.checkpoint import list_checkpoints, read_state

    found = list_checkpoints(killed / "checkpoints")
    step = read_state(found[-1]).step if found else -1
    if found:
        load_file(found[-1] / "tensors.safetensors")
    lost = max(logged(killed), default=0) - max(step, 0)
    if step < last:
        raise Lost(f"the newest checkpoint is of step {step}, it was of step {last} before")
    if lost > saves + LOG_EVERY:
        raise Lost(f"{lost} steps were lost, saves come every {saves}")
    return step


def logged(killed: Path) -> dict[int, float]:
    """Step -> loss in the log, but for a line that was cut off."""
    found: dict[int, float] = {}
    for line in (killed / "log.jsonl").read_text().splitlines() if (killed / "log.jsonl").is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row.get("kind") == "step":
            found[row["step"]] = row.get("loss", 0.0)
    return found


def same_end(whole: Path, killed: Path, losses: bool) -> None:
    """The same weights, log and scores. On a GPU a line of the log tells the loss of the steps before those it counts,
    but for the first one after a start: there `losses` are not compared, only that no line is missing."""
    from safetensors.torch import load_file

    from nerfturbo.training.checkpoint import latest_checkpoint

    one, two = (load_file(latest_checkpoint(folder) / "tensors.safetensors") for folder in (whole, killed))
    differing = [name for name in one if name not in two or not bool((one[name] == two[name]).all())]
    if differing or one.keys() != two.keys():
        raise Lost(f"other bits in {differing or sorted(one.keys() ^ two.keys())}")
    one, two = (logged(folder) if losses else dict.fromkeys(logged(folder)) for folder in (whole, killed))
    if missing := one.items() - two.items():  # an interrupt logs its own step besides
        raise Lost(f"another log: without {sorted(missing)[:6]}")
    scores = [json.loads((folder / "metrics.json").read_text())["psnr"] for folder in (whole, killed)]
    if scores[0] != scores[1]:
        raise Lost(f"another score: {scores}")
    if left := [path.name for path in killed.rglob(".*.tmp*")]:
        raise Lost(f"left behind: {left}")


def train_case(base: Base, folder: Path, draw: random.Random) -> Row:
    kills, killed, last, most = [], folder / "killed", -1, draw.randint(1, KILLS)
    while True:
        words = [*base.train, "--output", "killed", "--overwrite"]
        if last >= 0:
            words = ["train", "--resume", str(killed), *base.resume]
        if last == base.steps:  # trained to the end, and killed while it scored
            words = ["eval", str(killed), *base.backend]
        process = start(words, folder)
        try:
            moment = draw.choice(MOMENTS)
            waited = len(kills) < most and wait_for(moment, process, killed, draw, base)
            if not waited:
                code = ended(process, LATE)
                break
            if any((killed / "checkpoints").glob(".step_*.tmp")):
                moment = "inside a save"
            kills.append({"moment": moment} | kill(process, draw.choice(SIGNALS), folder))
        finally:
            _end(process)
        last = check_run(killed, last, base.save_every)
        kills[-1]["saved_step"] = last
    if code != 0:
        raise Lost(f"exit {code} in the end: {(folder / 'said.txt').read_text(errors='replace')[-1500:]}")
    same_end(base.root / "whole", killed, "cuda" not in base.flags)
    return {"kills": kills}


def files_of(path: Path) -> dict[str, str]:
    """Relative path -> digest."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path.parent)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def files_of_run(run: Path) -> dict[str, str]:
    """The same, but for what metrics.json tells of exports, which each of them renews."""
    try:
        metrics = json.loads((run / "metrics.json").read_text())
    except (OSError, ValueError) as error:
        raise Lost(f"metrics.json is not whole: {error}") from None
    metrics.pop("exports", None)
    return files_of(run) | {f"{run.name}/metrics.json": json.dumps(metrics)}


def export_case(base: Base, folder: Path, draw: random.Random) -> Row:
    """An export: its file is absent or whole after every kill, and the run as it was."""
    words = draw.choice(EXPORTS).split()
    shutil.copytree(base.root / "whole", folder / "run")
    try:
        seconds = finished(words, folder)
    except Lost as error:
        if "pip install" in str(error) or "train it longer" in str(error) or "train longer" in str(error):
            return {"fate": "skipped", "wrong": str(error)[-200:], "kills": []}
        raise
    output = next(folder.glob("out.*"))
    whole, run_before, kills = files_of(output), files_of_run(folder / "run"), []
    output.unlink()
    for _ in range(draw.randint(1, KILLS)):
        process = start(words, folder)
        try:
            time.sleep(seconds * (0.4 + 0.6 * draw.random()))
            if process.exitcode is None:
                kills.append({"moment": words[0] + " " + words[1]} | kill(process, draw.choice(SIGNALS), folder))
        finally:
            _end(process)
        if output.exists():
            if files_of(output) != whole:
                raise Lost(f"{output.name} is there and not whole after a kill of {' '.join(words)}")
            output.unlink()
        if files_of_run(folder / "run") != run_before:
            raise Lost(f"{' '.join(words)} changed the run")
    finished(words, folder)
    if files_of(output) != whole:
        raise Lost(f"{output.name} differs after kills of {' '.join(words)}")
    return {"kills": kills}


def process_case(base: Base, folder: Path, draw: random.Random) -> Row:
    """COLMAP's stages: started again, they end with a model, in a folder that opens."""
    if shutil.which("colmap") is None:
        return {"fate": "skipped", "wrong": "colmap is not installed", "kills": []}
    words, kills = ["process", str(base.root.parent / "photos"), str(folder / "scene")], []
    for _ in range(draw.randint(1, KILLS)):
        process = start(words, folder)
        try:
            time.sleep(draw.random() * 12.0)
            if process.exitcode is not None:
                continue
            kills.append({"moment": "process"} | kill(process, draw.choice(SIGNALS), folder))
        finally:
            _end(process)
    finished(words, folder)
    finished(["scene", "info", str(folder / "scene")], folder)
    return {"kills": kills}


def prepare_bases(root: Path, data: str | None, flags: list[str], kinds: list[str]) -> list[Base]:
    """The scene, photos for COLMAP, and a run that is left alone for each set of flags."""
    from nerfturbo.data.formats.transforms import write_blender
    from tests.data.photo_scene import write_photos
    from tests.tiny import TINY_FLAGS, ball_scene

    if data is None:
        data = str(write_blender([ball_scene("train"), ball_scene("test", n_views=2)], root / "ball"))
        tiny = TINY_FLAGS[: TINY_FLAGS.index("--backend")]
        sets = [[*tiny, "--backend", backend, *flags] for backend in ("reference", "cpu")]
    else:
        sets = [flags]
    if "process" in kinds and shutil.which("colmap") is not None:
        write_photos(root / "photos", 7)
    bases = []
    for index, chosen in enumerate(sets):
        folder = root / str(index)
        folder.mkdir()
        steps = STEPS * 4 if "cuda" in chosen else STEPS
        base = Base(folder, data, chosen, 0.0, steps)
        lines = [[*base.train, "--output", "run"], ["eval", "run", *base.backend]]
        lines += map(str.split, EXPORTS if "export" in kinds else ())
        said = subprocess.run([sys.executable, "-c", REHEARSE.format(lines)], cwd=folder, capture_output=True)
        if said.returncode:
            raise SystemExit(f"the run without kills fails: {said.stderr.decode(errors='replace')[-1500:]}")
        import_modules((folder / "modules.txt").read_text())
        bases.append(Base(folder, data, chosen, finished([*base.train, "--output", "whole"], folder), steps))
    return bases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, 200, "commands that are killed up to five times each")
    parser.add_argument("--data", help="a scene; a tiny one unless given")
    parser.add_argument("--kinds", nargs="+", choices=sorted(set(KINDS)), default=list(KINDS))
    words = sys.argv[1:]
    flags = words[words.index("--") + 1 :] if "--" in words else []
    args = parser.parse_args(words[: words.index("--")] if "--" in words else words)
    if "cuda" not in " ".join(flags):
        stay_small()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    kinds = {"train": train_case, "export": export_case, "process": process_case}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as temporary:
        root = Path(temporary)
        bases = [] if args.merge else prepare_bases(root, args.data, flags, args.kinds)

        def prepare(worker: int) -> Case:
            def case(number: int) -> Row:
                draw = random.Random(f"{args.seed} {number}")
                kind, base, folder = draw.choice(args.kinds), draw.choice(bases), root / f"case-{worker}"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                try:
                    return {"name": kind, "fate": "whole", **kinds[kind](base, folder, draw)}
                except Lost as error:
                    return {"name": kind, "fate": "lost", "wrong": str(error), "kills": []}

            return case

        args.seconds -= time.monotonic() - begun
        record = run(args, prepare, ("whole",))
    kills = [one for row in record.rows.values() for one in row.get("kills", ())]
    inside = sum(one["moment"] == "inside a save" for one in kills)
    fates = record.fates
    print(f"{len(kills)} kills, {inside} of them inside a save, in {fates['whole']} commands; {len(record.bad)} lost")
    return 1 if record.bad or not kills else 0


if __name__ == "__main__":
    sys.exit(main())
