"""`nerfturbo batch scenes.txt`: many scenes, a few at a time, each in its own process; given again, it goes on."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from ..errors import InputError, refuse
from .common import print_json
from .flags import Number, check_positive, parse

POLL_SECONDS = 0.2
# `train --resume` refuses these
KEPT_BY_RUNS = ("--downscale", "--seed", "--preset", "--config", "--bounds", "--ndc")
KEPT_BY_RUNS += ("--init-from", "--init-parts", "--init-keep")


@dataclass(frozen=True)
class BatchArgs:
    """Train every scene of a list into a folder of its own and write one summary. Behind -- stand flags of `train`."""

    scenes: Annotated[Positional[Path], arg(metavar="FILE")]
    """One scene per line, flags of `train` for it alone behind; # begins a comment."""
    output: Annotated[Path, arg(metavar="FOLDER")] = Path("runs/batch")  # Run folders go below it, and the summary.
    workers: Number = 1  # Scenes trained at a time; GPUs are dealt out among them.
    shard: Annotated[str, arg(metavar="I/N")] = "0/1"  # Every N-th scene from the I-th on: for a task of a job array.
    json: bool = False  # Print the summary as one JSON object on stdout.


@dataclass(frozen=True)
class Job:
    """One line of the list."""

    name: str
    scene: str
    flags: tuple[str, ...]
    run: Path

    def command(self) -> list[str] | None:
        """What is left to do; None where the run is finished."""
        if (self.run / "metrics.json").is_file():
            return None
        from ..training.checkpoint import list_checkpoints

        base = [sys.executable, "-m", "nerfturbo", "train"]
        if list_checkpoints(self.run / "checkpoints"):
            return [*base, "--resume", str(self.run), *_without(self.flags, KEPT_BY_RUNS)]
        return [*base, self.scene, *self.flags, "--output", str(self.run), "--overwrite"]

    @property
    def log(self) -> Path:
        return self.run.parent / f"{self.name}.log"


def main(argv: Sequence[str]) -> int:
    place = argv.index("--") if "--" in argv else len(argv)
    args, shared = parse(BatchArgs, argv[:place], "batch"), argv[place + 1 :]
    check_positive({"--workers": args.workers})
    everything = read_jobs(args.scenes, args.output, shared)
    first, _, count = args.shard.partition("/")
    if not (first.isdigit() and count.isdigit() and int(first) < int(count)):
        raise InputError("--shard", "I/N with I from 0 to below N", repr(args.shard))
    jobs = everything[int(first) :: int(count)]
    from ..evaluation.run_folder import check_writable

    check_writable(args.output)
    args.output.mkdir(parents=True, exist_ok=True)
    stopped = run_jobs(jobs, args.workers)
    outcomes = [outcome_of(job) for job in everything]
    write_summary(args.output, outcomes)
    if args.json:
        print_json({"output": str(args.output), "scenes": outcomes})
    else:
        print((args.output / "summary.md").read_text(), end="")
    if stopped:
        print(f"interrupted; go on with: nerfturbo batch {shlex.join(argv)}", file=sys.stderr)
        return 130
    mine = {job.name for job in jobs}
    return 1 if any(outcome["status"] != "done" for outcome in outcomes if outcome["name"] in mine) else 0


def _without(flags: Sequence[str], names: tuple[str, ...]) -> list[str]:
    """Flags a resumed run keeps for itself are left out, with their values: all words up to the next flag."""
    kept, skip = [], False
    for word in flags:
        if word.startswith("--"):
            skip = word.split("=")[0].replace("_", "-") in names
        if not skip:
            kept.append(word)
    return kept


def read_jobs(path: Path, output: Path, shared: Sequence[str] = ()) -> list[Job]:
    """The lines of a list; two scenes of one name get numbers behind it."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        got = getattr(error, "strerror", None) or str(error)
        raise InputError(str(path), "a text file with one scene per line", got) from None
    jobs: list[Job] = []
    for number, line in enumerate(lines, 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise InputError(f"{path}:{number}", "a scene and flags", repr(line), str(error)) from None
        if not words:
            continue
        refuse("\0" in line, f"{path}:{number}", "a scene and flags", repr(line))
        scene, *flags = words
        refuse(scene.startswith("-"), f"{path}:{number}", "a scene before its flags", repr(scene))
        flags = [*shared, *flags]
        for flag in ("--output", "--resume", "--overwrite"):
            refuse(flag in flags, f"{path}:{number}", "flags other than " + flag, flag, "batch names the folders")
        base = Path(scene).name.removeprefix("builtin:") or "scene"
        taken = {job.name for job in jobs}
        name = next(n for n in (base, *(f"{base}-{k}" for k in range(2, 10_000))) if n not in taken)
        jobs.append(Job(name, scene, tuple(flags), output / name))
    refuse(not jobs, str(path), "at least one scene", "none")
    return jobs


def run_jobs(jobs: Sequence[Job], workers: int) -> bool:
    """Run what is left of the jobs, `workers` at a time, GPUs dealt out among them, and report each; whether it was
    interrupted: then those that run save and end, and no other begins."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = [str(number) for number in range(64) if Path(f"/dev/nvidia{number}").exists()]
    gpus = present if given is None else [name for name in given.split(",") if name]
    waiting = list(jobs)
    running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}  # by slot
    try:
        while waiting or running:
            for slot in range(workers):
                while waiting and slot not in running:
                    job = waiting.pop(0)
                    if (command := job.command()) is None:
                        _say(f"{job.name}: finished before")
                        continue
                    _say(f"{job.name}: {'goes on' if '--resume' in command else 'begins'}")
                    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {})
                    with job.log.open("ab") as log:
                        running[slot] = job, subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            for slot, (job, process) in list(running.items()):
                if (code := process.poll()) is not None:
                    _say(f"{job.name}: " + ("done" if code == 0 else f"ended with {code}; see {job.log}"))
                    del running[slot]
            if running:
                time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():  # until all have saved
            process.wait()
        return True
    return False


def outcome_of(job: Job) -> dict[str, Any]:
    """How a scene ended, or how far it is, by its run folder and its log: done, failed or left."""
    metrics = job.run / "metrics.json"
    done = metrics.is_file()
    values: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, RecursionError):  # damaged: it is done, and nothing more is known
        values = json.loads(metrics.read_text()) if done else {}
    values = values if isinstance(values, dict) else {}
    lines = job.log.read_text(errors="replace").splitlines() if job.log.is_file() and not done else []
    errors = [line for line in lines if line.startswith("error: ")]
    status = "done" if done else "failed" if errors else "left"
    found = {"name": job.name, "scene": job.scene, "run": str(job.run), "status": status}
    found |= {key: values.get(key) for key in ("psnr", "ssim", "steps", "train_seconds")}
    return found | {"error": errors[-1] if errors else ""}


def write_summary(output: Path, outcomes: Sequence[dict[str, Any]]) -> None:
    """summary.json, and summary.md with the means of what is done."""
    from ..evaluation.run_folder import write_json
    from ..files import write_atomically

    rows = ["| scene | PSNR | SSIM | steps | seconds | |", "|---|---|---|---|---|---|"]
    for outcome in outcomes:
        digits = {"psnr": 2, "ssim": 4, "steps": 0, "train_seconds": 1}
        cells = ["" if outcome[key] is None else f"{outcome[key]:.{places}f}" for key, places in digits.items()]
        rows.append(" | ".join([f"| {outcome['name']}", *cells, f"{outcome['error'] or outcome['status']} |"]))
    done = [outcome for outcome in outcomes if outcome["status"] == "done"]
    scores = [outcome["psnr"] for outcome in done if outcome["psnr"] is not None]
    mean = f", mean PSNR {sum(scores) / len(scores):.2f} dB" if scores else ""
    rows += ["", f"{len(done)} of {len(outcomes)} scenes done{mean}", ""]
    write_atomically(output / "summary.md", "\n".join(rows))
    write_json(output / "summary.json", {"written": time.strftime("%Y-%m-%dT%H:%M:%S"), "scenes": list(outcomes)})


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
