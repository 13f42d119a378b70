"""`nerfturbo batch scenes.txt`: many scenes, a few at a time, each in a process of its own; the same command goes on
after an interrupt. Scenes are trained here, on SLURM through submitit, or on a Ray cluster, where every scene is one
task; the package and the folders must be visible under the same path wherever tasks run."""

import contextlib
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from ..errors import BackendError, InputError, refuse
from .common import print_json
from .flags import Number, check_positive, parse

EngineName = Literal["local", "submitit", "ray"]
POLL_SECONDS = 0.2
LOCAL_CLUSTERS = ("local", "debug")  # of submitit: processes on this machine
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
    engine: EngineName = "local"  # Where scenes train: here, on SLURM (submitit; cluster=local: here too), or on Ray.
    engine_options: Annotated[tuple[str, ...], arg(metavar="KEY=VALUE")] = ()
    """Of submitit's executor (slurm_partition=gpu gpus_per_node=1 timeout_min=60) or of ray.init (address=auto)."""
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

    def start(self, gpu: str | None = None) -> subprocess.Popen[bytes] | None:
        """Do what is left to do, in a process with a log; None where the run is finished."""
        command = self.command()
        if command is None:
            return None
        environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def main(argv: Sequence[str]) -> int:
    place = argv.index("--") if "--" in argv else len(argv)
    args, shared = parse(BatchArgs, argv[:place], "batch"), argv[place + 1 :]
    check_positive({"--workers": args.workers})
    options = check_engine(args.engine, args.engine_options)
    everything = read_jobs(args.scenes, args.output, shared)
    jobs = _shard(everything, args.shard)
    from ..evaluation.run_folder import check_writable

    check_writable(args.output)
    args.output.mkdir(parents=True, exist_ok=True)
    stopped = run_jobs(jobs, args.engine, options, workers=args.workers, folder=args.output)
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
        raise InputError(str(path), "a text file with one scene per line", str(error)) from None
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
        if scene.startswith("-"):
            raise InputError(f"{path}:{number}", "a scene before its flags", repr(scene))
        flags = [*shared, *flags]
        for flag in ("--output", "--resume", "--overwrite"):
            if flag in flags:
                raise InputError(f"{path}:{number}", "flags other than " + flag, flag, "batch names the folders")
        base = Path(scene).name.removeprefix("builtin:") or "scene"
        taken = {job.name for job in jobs}
        name = next(n for n in (base, *(f"{base}-{k}" for k in range(2, 10_000))) if n not in taken)
        jobs.append(Job(name, scene, tuple(flags), output / name))
    if not jobs:
        raise InputError(str(path), "at least one scene", "none")
    return jobs


def _shard(jobs: list[Job], text: str) -> list[Job]:
    first, _, count = text.partition("/")
    if not (first.isdigit() and count.isdigit() and int(first) < int(count)):
        raise InputError("--shard", "I/N with I from 0 to below N", repr(text))
    return jobs[int(first) :: int(count)]


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE words; whole numbers become int, true and false become bool.

    >>> parse_options(["slurm_partition=gpu", "timeout_min=60", "include_dashboard=false"])
    {'slurm_partition': 'gpu', 'timeout_min': 60, 'include_dashboard': False}
    """
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise InputError("--engine-options", "KEY=VALUE ...", repr(word))
        options[name] = int(value) if value.isdigit() else {"true": True, "false": False}.get(value, value)
    return options


def check_engine(engine: EngineName, options: Sequence[str]) -> dict[str, Any]:
    """The options of an engine that is there, before anything is written."""
    found = parse_options(options)
    if engine == "local" and found:
        raise InputError("--engine-options", "--engine submitit or ray beside it", "the local engine")
    if engine != "local":
        try:
            importlib.import_module(engine)
        except ImportError as error:
            raise InputError("--engine", f"the package {engine}", f"none ({error})", f"pip install {engine}") from None
    return found


def run_jobs(jobs: Sequence[Job], engine: EngineName, options: dict[str, Any], *, workers: int, folder: Path) -> bool:
    """Run what is left of the jobs, `workers` at a time, and report each; whether it was interrupted."""
    left = [job for job in jobs if job.command() is not None]
    for job in jobs:
        if job not in left:
            _say(f"{job.name}: finished before")
    run = {"local": _with_processes, "submitit": _with_submitit, "ray": _with_ray}[engine]
    return bool(left) and run(left, options, workers, folder)


def _watch(
    jobs: Sequence[Job],
    at_once: int,
    send: Callable[[Job], Any],
    ended: Callable[[Job, Any], str | None],
    cancel: Callable[[Any], Callable[[], object] | None],
) -> bool:
    """Keep `at_once` tasks under way and say how each ends; an interrupt cancels those that run and begins no other."""
    waiting: list[Job] = list(jobs)
    running: list[tuple[Job, Any]] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running.append((job, send(job)))
            for job, task in list(running):
                if (how := ended(job, task)) is not None:
                    _say(f"{job.name}: {how}")
                    running.remove((job, task))
            if running:
                time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        waits = [cancel(task) for _, task in running]
        for wait in filter(callable, waits):  # until all have saved
            wait()
        return True
    return False


def _with_processes(jobs: Sequence[Job], options: dict[str, Any], workers: int, folder: Path) -> bool:
    """Processes of this machine; GPUs are dealt out among those that run together."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = [str(number) for number in range(64) if Path(f"/dev/nvidia{number}").exists()]
    gpus = present if given is None else [name for name in given.split(",") if name]
    free = list(range(workers))

    def send(job: Job) -> tuple[int, subprocess.Popen[bytes] | None]:
        _say(f"{job.name}: {'goes on' if '--resume' in (job.command() or ()) else 'begins'}")
        slot = free.pop(0)
        return slot, job.start(gpus[slot % len(gpus)] if gpus else None)

    def ended(job: Job, task: tuple[int, subprocess.Popen[bytes] | None]) -> str | None:
        slot, process = task
        code = 0 if process is None else process.poll()
        if code is not None:
            free.append(slot)
        return None if code is None else _told(code, job)

    return _watch(jobs, workers, send, ended, lambda task: _terminate(task[1]))


def _terminate(process: subprocess.Popen[bytes] | None) -> Callable[[], object]:
    """Tell a training to save and end; returns what waits for it."""
    if process is None:
        return lambda: None
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    return process.wait


class SceneTask:
    """Train what is left of one scene; returns the exit code. submitit calls `checkpoint` to take it away."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._process: subprocess.Popen[bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"job": self.job, "_process": None}  # a process does not travel

    def __call__(self) -> int:
        self._process = self.job.start()
        if self._process is None:
            return 0
        before = None
        with contextlib.suppress(ValueError):  # not the main thread: the engine has its own way to cancel
            before = signal.signal(signal.SIGTERM, lambda *_: _terminate(self._process))
        try:
            return self._process.wait()
        except BaseException:  # Ray cancels by an interrupt
            _terminate(self._process)()
            raise
        finally:
            if before is not None:
                signal.signal(signal.SIGTERM, before)

    def checkpoint(self) -> Any:
        """Let the training save, and go on in the task that takes this one's place."""
        _terminate(self._process)()
        return importlib.import_module("submitit.helpers").DelayedSubmission(self)


def _with_submitit(jobs: Sequence[Job], options: dict[str, Any], workers: int, folder: Path) -> bool:
    """A job array of SLURM with `workers` at a time, or with cluster=local processes of this machine."""
    submitit = importlib.import_module("submitit")
    executor = submitit.AutoExecutor(folder=folder.absolute() / "submitit", cluster=options.pop("cluster", None))
    here = executor.cluster in LOCAL_CLUSTERS
    named = {"name": "nerfturbo"} | ({} if here else {"slurm_array_parallelism": workers})
    try:
        executor.update_parameters(**({"timeout_min": 24 * 60} | named | options))
    except (NameError, TypeError, ValueError) as error:  # submitit's word for an unknown name
        raise InputError("--engine-options", "parameters of submitit's executor", str(error).splitlines()[0]) from None

    def send(job: Job) -> Any:
        _say(f"{job.name}: sent")
        return executor.submit(SceneTask(job))

    def ended(job: Job, task: Any) -> str | None:
        if not task.done():
            return None
        error = task.exception()
        if error is not None:
            return f"ended with {str(error).strip().splitlines()[-1]}; see {task.paths.stderr}"
        return _told(task.result(), job)

    if here:
        return _watch(jobs, workers, send, ended, lambda task: task.cancel())
    with executor.batch():
        tasks = {job.name: send(job) for job in jobs}
    return _watch(jobs, len(jobs), lambda job: tasks[job.name], ended, lambda task: task.cancel())


def _with_ray(jobs: Sequence[Job], options: dict[str, Any], workers: int, folder: Path) -> bool:
    """Tasks of a Ray cluster (address=auto for one that runs); a GPU each where it has any."""
    ray = importlib.import_module("ray")
    needs = {name: options.pop(name) for name in ("num_gpus", "num_cpus") if name in options}
    try:
        ray.init(**({"ignore_reinit_error": True, "log_to_driver": False} | options))
    except Exception as error:  # it has no type of its own for what can be wrong with a cluster or an option
        raise BackendError(f"Ray did not start: {str(error).strip().splitlines()[0]}") from error
    needs = {"num_cpus": 1, "num_gpus": 1 if ray.cluster_resources().get("GPU", 0) else 0} | needs
    remote = ray.remote(**needs, max_retries=3)(lambda task: task())

    def send(job: Job) -> Any:
        _say(f"{job.name}: sent")
        return remote.remote(SceneTask(job))

    def ended(job: Job, task: Any) -> str | None:
        if not ray.wait([task], timeout=0)[0]:
            return None
        try:
            return _told(ray.get(task), job)
        except ray.exceptions.RayError as error:
            return f"ended with {str(error).strip().splitlines()[-1]}"

    try:
        return _watch(jobs, workers, send, ended, ray.cancel)
    finally:
        ray.shutdown()


def _told(code: int, job: Job) -> str:
    return "done" if code == 0 else f"ended with {code}; see {job.log}"


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
