"""Where the scenes of `nerfturbo batch` are trained when it is not here: SLURM through submitit, or a Ray cluster.

Every scene is one task of the engine, and a task does what a local worker does: it starts what is left to do of one
scene as a process, with a log beside the run folder. So a task that is killed, preempted or sent again goes on from the
last checkpoint. The package and the folders must be visible under the same path wherever tasks run.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import BackendError, InputError

if TYPE_CHECKING:
    from .batch import Job

EngineName = Literal["local", "submitit", "ray"]
POLL_SECONDS = 0.5
LOCAL_CLUSTERS = ("local", "debug")  # of submitit: processes on this machine


class SceneTask:
    """Train what is left of one scene; returns the exit code. submitit calls `checkpoint` to take it away."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._process: subprocess.Popen[bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"job": self.job, "_process": None}  # a process does not travel

    def __call__(self) -> int:
        command = self.job.command()
        if command is None:
            return 0
        self.job.run.parent.mkdir(parents=True, exist_ok=True)
        with (self.job.run.parent / f"{self.job.name}.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                with _passed_on(self._process):
                    return self._process.wait()
            except BaseException:  # Ray cancels by an interrupt
                self._save()
                raise

    def checkpoint(self) -> Any:
        """Let the training save, and go on in the task that takes this one's place."""
        self._save()
        return importlib.import_module("submitit.helpers").DelayedSubmission(self)

    def _save(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """SIGTERM to this process, which is how an engine cancels, lets the training save too."""
    try:
        before = signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
    except ValueError:  # not the main thread: the engine has its own way
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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


def work_off_elsewhere(
    jobs: Sequence[Job], engine: EngineName, options: dict[str, Any], *, workers: int, folder: Path
) -> bool:
    """Send the jobs to an engine, wait for all of them and report each; whether it was interrupted."""
    run = {"submitit": _with_submitit, "ray": _with_ray}[engine]
    left = [job for job in jobs if job.command() is not None]
    for job in jobs:
        if job not in left:
            _say(f"{job.name}: finished before")
    return bool(left) and run(left, options, workers, folder)


def _with_submitit(jobs: Sequence[Job], options: dict[str, Any], workers: int, folder: Path) -> bool:
    """A job array of SLURM with `workers` at a time, or with cluster=local processes of this machine."""
    submitit = importlib.import_module("submitit")
    cluster = options.pop("cluster", None)
    executor = submitit.AutoExecutor(folder=folder.absolute() / "submitit", cluster=cluster)
    here = executor.cluster in LOCAL_CLUSTERS
    named = {"name": "nerfturbo"} | ({} if here else {"slurm_array_parallelism": workers})
    try:
        executor.update_parameters(**({"timeout_min": 24 * 60} | named | options))
    except (NameError, TypeError, ValueError) as error:  # submitit's word for an unknown name
        raise InputError("--engine-options", "parameters of submitit's executor", str(error).splitlines()[0]) from None

    def send(job: Job) -> Any:
        return executor.submit(SceneTask(job))

    if here:
        return _watched(jobs, workers, send, _submitit_ended, lambda task: task.cancel())
    with executor.batch():
        tasks = {job.name: send(job) for job in jobs}
    return _watched(jobs, len(jobs), lambda job: tasks[job.name], _submitit_ended, lambda task: task.cancel())


def _submitit_ended(task: Any) -> str | None:
    """None while it runs or waits, else how it ended."""
    if not task.done():
        return None
    error = task.exception()
    if error is not None:
        return f"ended with {str(error).strip().splitlines()[-1]}; see {task.paths.stderr}"
    return _told(task.result())


def _with_ray(jobs: Sequence[Job], options: dict[str, Any], workers: int, folder: Path) -> bool:
    """Tasks of a Ray cluster (address=auto for one that runs); a GPU each where it has any."""
    ray = importlib.import_module("ray")
    needs = {name: options.pop(name) for name in ("num_gpus", "num_cpus") if name in options}
    try:
        ray.init(**({"ignore_reinit_error": True, "log_to_driver": False} | options))
    except Exception as error:  # it has no type of its own for what can be wrong with a cluster or an option
        raise BackendError(f"Ray did not start: {str(error).strip().splitlines()[0]}") from error
    needs = {"num_cpus": 1, "num_gpus": 1 if ray.cluster_resources().get("GPU", 0) else 0} | needs
    remote = ray.remote(**needs, max_retries=3)(_run_task)

    def ended(task: Any) -> str | None:
        if not ray.wait([task], timeout=0)[0]:
            return None
        try:
            return _told(ray.get(task))
        except ray.exceptions.RayError as error:
            return f"ended with {str(error).strip().splitlines()[-1]}"

    try:
        return _watched(jobs, workers, lambda job: remote.remote(SceneTask(job)), ended, ray.cancel)
    finally:
        ray.shutdown()


def _run_task(task: SceneTask) -> int:
    return task()


def _told(code: int) -> str:
    return "done" if code == 0 else f"ended with {code}"


def _watched(
    jobs: Sequence[Job],
    at_once: int,
    send: Callable[..., Any],
    ended: Callable[[Any], str | None],
    cancel: Callable[[Any], None],
) -> bool:
    """Keep `at_once` tasks under way and say how each ends; an interrupt cancels those that run."""
    waiting, running = list(jobs), {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running[job.name] = send(job)
                _say(f"{job.name}: sent")
            for name, task in list(running.items()):
                how = ended(task)
                if how is not None:
                    _say(f"{name}: {how}")
                    del running[name]
            if running:
                time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        for task in running.values():
            cancel(task)
        return True
    return False


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
