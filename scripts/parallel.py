"""Numbered cases in several processes, for tools that run for hours: stopped in time, continued later, and merged.

Each worker takes the next number, so what was done is a range, but for what was under way at the end. The record is
written every few seconds and holds a row for each case; records of several runs merge by number.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Case = Callable[[int], Row]

THREADS = ("OMP", "MKL", "OPENBLAS", "NUMBA")


def stay_small() -> None:
    """One thread for each worker, and no GPU. Call it before torch or numba are imported."""
    os.environ |= {f"{name}_NUM_THREADS": "1" for name in THREADS} | {"CUDA_VISIBLE_DEVICES": ""}


def import_modules(names: str) -> None:
    """Import what another process had imported (its `sys.modules`, in lines), so that forked cases need not."""
    for name in names.split():
        with contextlib.suppress(Exception):  # parts that their package makes by itself
            importlib.import_module(name)


def add_flags(parser: argparse.ArgumentParser, count: int, what: str) -> None:
    parser.add_argument("--count", type=int, default=count, help=f"{what} in all")
    parser.add_argument("--start", type=int, default=0, help="number of the first; `next` in the record of a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="so many at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then; what was done is in the record")
    parser.add_argument("--output", type=Path, help="record as JSON")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="JSON", help="only join the records of earlier runs")
    parser.add_argument("--brief", action="store_true", help="leave the rows of cases that went well out of the record")


def run(args: argparse.Namespace, prepare: Callable[[int], Case], good: tuple[str, ...]) -> Record:
    """All cases of `args`, or its records merged. `prepare(worker)` is called in each worker and gives the function
    that runs a case; its row holds `fate`, one of `good` where all went well, and `name`, which counts are kept by."""
    record = Record(args.seed, good, args.output and args.output.absolute(), args.brief)
    for path in args.merge or ():
        record.read(path)
    if not args.merge:
        _run(args, prepare, record)
    record.write()
    return record


class Record:
    def __init__(self, seed: int, good: tuple[str, ...], path: Path | None, brief: bool) -> None:
        self.rows: dict[int, Row] = {}
        self.seconds = 0.0
        self._seed, self._good, self._path, self._brief = seed, good, path, brief

    def read(self, path: Path) -> None:
        found = json.loads(path.read_text())
        if self.rows and found["seed"] != self._seed:
            raise SystemExit(f"{path} is of seed {found['seed']}, the others of {self._seed}")
        self._seed = found["seed"]
        self.rows |= {row["number"]: row for row in found["rows"]}
        self.seconds += found["seconds"]

    @property
    def bad(self) -> list[Row]:
        return [row for _, row in sorted(self.rows.items()) if row["fate"] not in (*self._good, "skipped")]

    @property
    def fates(self) -> Counter[str]:
        return Counter(row["fate"] for row in self.rows.values())

    def write(self) -> None:
        if self._path is None:
            return
        numbers = sorted(self.rows)
        gaps = (number for number in range(numbers[0], numbers[-1] + 2) if number not in self.rows) if numbers else ()
        names = sorted({row["name"] for row in self.rows.values()})
        counts = {name: Counter(row["fate"] for row in self.rows.values() if row["name"] == name) for name in names}
        record = {"seed": self._seed, "first": numbers[0] if numbers else 0, "next": next(iter(gaps), 0)}
        record |= {"cases": len(numbers), "bad": len(self.bad), "seconds": round(self.seconds), "fates": self.fates}
        head = json.dumps(record | {"by_name": counts}, indent=1).removesuffix("\n}")
        rows = self.bad if self._brief else [self.rows[number] for number in numbers]
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        temporary.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')
        temporary.replace(self._path)


def _run(args: argparse.Namespace, prepare: Callable[[int], Case], record: Record) -> None:
    begun = time.monotonic()
    until = begun + args.seconds
    fork = multiprocessing.get_context("fork")
    counter = fork.Value("q", args.start)
    workers, pipes = [], []
    for index in range(args.jobs):
        ours, theirs = fork.Pipe(duplex=False)
        words = (index, prepare, counter, args.start + args.count, until, theirs)
        workers.append(fork.Process(target=_work, args=words))
        workers[-1].start()
        theirs.close()
        pipes.append(ours)
    written, told = time.monotonic(), False
    while pipes:
        for pipe in multiprocessing.connection.wait(pipes, timeout=1.0):
            try:
                row = pipe.recv()
            except EOFError:
                pipes.remove(pipe)
                continue
            record.rows[row["number"]] = row
            if row["fate"] not in record._good:
                print(json.dumps(row)[:1000], flush=True)
        if not told and time.monotonic() > until:
            told = True
            for worker in workers:
                worker.terminate()
        if told and time.monotonic() > until + 20.0:
            for worker in workers:
                worker.kill()
        record.seconds = time.monotonic() - begun
        if time.monotonic() - written > 10.0:
            written = time.monotonic()
            record.write()
            print(
                f"{len(record.rows)} cases, {dict(record.fates)}, {record.seconds:.0f} s", file=sys.stderr, flush=True
            )
    for worker in workers:
        worker.join()


def _work(index: int, prepare: Callable[[int], Case], counter: Any, end: int, until: float, pipe: Any) -> None:
    def stop(number: int, frame: object) -> None:
        raise SystemExit(0)  # what a case has started ends in its `finally`

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    case = prepare(index)
    while time.monotonic() < until:
        with counter.get_lock():
            number = counter.value
            counter.value += 1
        if number >= end:
            return
        begun = time.monotonic()
        try:
            row = case(number)
        except Exception:
            row = {"name": "tool", "fate": "broken", "wrong": traceback.format_exc()}
        pipe.send({"number": number, **row, "seconds": round(time.monotonic() - begun, 1)})
