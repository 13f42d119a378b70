"""`nerfturbo batch scenes.txt`: many scenes, a few at a time, each in a process of its own; resumable.

A line of the file is a scene and, behind it, flags of `train` for it alone; # begins a comment. What is finished is
left alone, what has a checkpoint goes on from it, so that the same command simply goes on after an interrupt.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Annotated, Any

import tyro

from ..errors import InputError
from .batch_engines import EngineName, check_engine, work_off_elsewhere
from .parse import parse
from .settings import check_positive

SUMMARY = ("summary.json", "summary.md")


@dataclass(frozen=True)
class BatchArgs:
    """Train every scene of a list into a folder of its own and write one summary. Behind -- stand flags of `train`."""

    scenes: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """One scene per line, flags of `train` for it alone behind; # begins a comment."""
    output: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("runs/batch")
    """Run folders go below it, named after the scenes, and the summary."""
    workers: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Scenes trained at a time; GPUs are dealt out among them."""
    shard: Annotated[str, tyro.conf.arg(metavar="I/N")] = "0/1"
    """Only every N-th scene, beginning with the I-th: for the tasks of a job array over one list."""
    engine: EngineName = "local"
    """Where scenes are trained: processes here, tasks on SLURM (submitit; cluster=local: here too), or on Ray."""
    engine_options: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """Of submitit's executor (slurm_partition=gpu gpus_per_node=1 timeout_min=60) or of ray.init (address=auto)."""
    json: bool = False
    """Print the summary as one JSON object on stdout."""


# `train --resume` refuses these
KEPT_BY_RUNS = ("--downscale", "--seed", "--preset", "--config", "--bounds", "--ndc")
KEPT_BY_RUNS += ("--init-from", "--init-parts", "--init-keep")


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


@dataclass(frozen=True)
class Outcome:
    """How one scene ended."""

    name: str
    scene: str
    run: str
    status: str  # done, failed, left
    psnr: float | None = None
    ssim: float | None = None
    steps: int | None = None
    train_seconds: float | None = None
    error: str = ""


def main(argv: Sequence[str]) -> int:
    """Read the list, work it off, write the summary."""
    words, shared = _split(list(argv))
    args = parse(BatchArgs, words, "batch")
    check_positive({"--workers": args.workers})
    options = check_engine(args.engine, args.engine_options)
    jobs = _shard(read_jobs(args.scenes, args.output, shared), args.shard)
    from ..evaluation.run_folder import check_writable

    check_writable(args.output)
    args.output.mkdir(parents=True, exist_ok=True)
    if args.engine == "local":
        stopped = work_off(jobs, args.workers)
    else:
        stopped = work_off_elsewhere(jobs, args.engine, options, workers=args.workers, folder=args.output)
    outcomes = [outcome_of(job) for job in read_jobs(args.scenes, args.output, shared)]
    write_summary(args.output, outcomes)
    if args.json:
        print(json.dumps({"output": str(args.output), "scenes": [asdict(outcome) for outcome in outcomes]}))
    else:
        print((args.output / "summary.md").read_text(), end="")
    if stopped:
        print(f"interrupted; go on with: nerfturbo batch {shlex.join(argv)}", file=sys.stderr)
        return 130
    mine = {job.name for job in jobs}
    return 1 if any(outcome.status != "done" for outcome in outcomes if outcome.name in mine) else 0


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]


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
        raise InputError(str(path), "a text file with one scene per line", str(error)) from None
    jobs: list[Job] = []
    taken: set[str] = set()
    for number, line in enumerate(lines, 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise InputError(f"{path}:{number}", "a scene and flags", repr(line), str(error)) from None
        if not words:
            continue
        scene, *flags = words
        if scene.startswith("-"):
            raise InputError(f"{path}:{number}", "a scene before its flags", repr(scene))
        flags = [*shared, *flags]
        for flag in ("--output", "--resume", "--overwrite"):
            if flag in flags:
                raise InputError(f"{path}:{number}", "flags other than " + flag, flag, "batch names the folders")
        base = Path(scene).name.removeprefix("builtin:") or "scene"
        name = next(n for n in (base, *(f"{base}-{k}" for k in range(2, 10_000))) if n not in taken)
        taken.add(name)
        jobs.append(Job(name, scene, tuple(flags), output / name))
    if not jobs:
        raise InputError(str(path), "at least one scene", "none")
    return jobs


def _shard(jobs: list[Job], text: str) -> list[Job]:
    first, _, count = text.partition("/")
    if not (first.isdigit() and count.isdigit() and int(first) < int(count)):
        raise InputError("--shard", "I/N with I from 0 to below N", repr(text))
    return jobs[int(first) :: int(count)]


def work_off(jobs: Sequence[Job], workers: int) -> bool:
    """Run what is left of the jobs, a few at a time; whether it was interrupted."""
    queue: SimpleQueue[Job] = SimpleQueue()
    for job in jobs:
        queue.put(job)
    running: dict[int, subprocess.Popen[bytes]] = {}
    stop = threading.Event()
    gpus = _gpus()

    def work(slot: int) -> None:
        while not stop.is_set():
            try:
                job = queue.get_nowait()
            except Empty:
                return
            command = job.command()
            if command is None:
                _say(f"{job.name}: finished before")
                continue
            _say(f"{job.name}: {'goes on' if '--resume' in command else 'begins'}")
            environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {})
            job.run.parent.mkdir(parents=True, exist_ok=True)
            with (job.run.parent / f"{job.name}.log").open("ab") as log:
                running[slot] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
                code = running[slot].wait()
            _say(f"{job.name}: {'done' if code == 0 else f'ended with {code}; see {log.name}'}")

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(min(workers, len(jobs)))]
    with _passing_on(stop, running):
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
    return stop.is_set()


@contextlib.contextmanager
def _passing_on(stop: threading.Event, running: dict[int, subprocess.Popen[bytes]]) -> Iterator[None]:
    """An interrupt lets the scenes in hand save, and begins no other."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()
        for process in running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _gpus() -> list[str]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    return [str(number) for number in range(64) if Path(f"/dev/nvidia{number}").exists()]


def outcome_of(job: Job) -> Outcome:
    """What a run folder says of its scene."""
    name, scene, run = job.name, job.scene, str(job.run)
    metrics = job.run / "metrics.json"
    if metrics.is_file():
        values: dict[str, Any] = json.loads(metrics.read_text())
        psnr, ssim, steps, seconds = (values.get(key) for key in ("psnr", "ssim", "steps", "train_seconds"))
        return Outcome(name, scene, run, "done", psnr, ssim, steps, seconds)
    log = job.run.parent / f"{job.name}.log"
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    errors = [line for line in lines if line.startswith("error: ")]
    return Outcome(name, scene, run, "failed" if errors else "left", error=errors[-1] if errors else "")


def write_summary(output: Path, outcomes: Sequence[Outcome]) -> None:
    """summary.json, and summary.md with the means of what is done."""
    from ..files import write_atomically

    rows = ["| scene | PSNR | SSIM | steps | seconds | |", "|---|---|---|---|---|---|"]
    for outcome in outcomes:
        cells = [_number(outcome.psnr, 2), _number(outcome.ssim, 4), _number(outcome.steps, 0)]
        cells += [_number(outcome.train_seconds, 1), outcome.error or outcome.status]
        rows.append(f"| {outcome.name} | " + " | ".join(cells) + " |")
    done = [outcome for outcome in outcomes if outcome.status == "done"]
    scores = [outcome.psnr for outcome in done if outcome.psnr is not None]
    mean = f", mean PSNR {sum(scores) / len(scores):.2f} dB" if scores else ""
    rows += ["", f"{len(done)} of {len(outcomes)} scenes done{mean}", ""]
    write_atomically(output / "summary.md", "\n".join(rows))
    document = {"written": time.strftime("%Y-%m-%dT%H:%M:%S"), "scenes": [asdict(outcome) for outcome in outcomes]}
    write_atomically(output / "summary.json", json.dumps(document, indent=1) + "\n")


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
