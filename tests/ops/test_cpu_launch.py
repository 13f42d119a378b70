"""How numba kernels run: every item once, from any thread, after a fork, with errors that reach the caller; and how
they are kept on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numba
import numpy as np
import pytest
import torch

from nerfturbo.ops import use_backend
from nerfturbo.ops._cpu import _Job, jit, launch, scratch
from nerfturbo.ops._cpu.warmup import is_cached, warmup
from nerfturbo.ops.hash_encode import hash_encode

from .cases import SMALL_LAYOUT, make_positions, make_table


@jit()
def _count(first, last, counts):
    for i in range(first, last):
        counts[i] += 1


def test_a_helper_that_comes_late_holds_no_memory():
    """It may still have the job when Python ends: to free a tensor then takes Python's lock inside of C++ that must
    not be left, and the process aborts after all its work."""
    values = torch.zeros(4)
    freed = weakref.ref(values)
    job = _Job(lambda first, last, array: array.add_(1), 4, 1, (values,))
    job.run()
    del values
    assert freed() is None
    job.help()  # too late: does nothing


@pytest.mark.parametrize("n_threads", [1, 2, 5])
@pytest.mark.parametrize(("n", "grain"), [(0, 4), (1, 4), (4, 4), (1001, 7), (3, 1)])
def test_every_item_once(n: int, grain: int, n_threads: int):
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        counts = np.zeros(n, np.int64)
        for _ in range(20):
            launch(_count, n, grain, counts)
    finally:
        torch.set_num_threads(before)
    assert (counts == 20).all()


def test_many_threads_may_launch_at_a_time():
    """A viewer renders while training runs."""
    positions, table = make_positions(40_000), make_table(SMALL_LAYOUT)
    with use_backend("cpu"):
        want = hash_encode(positions, table, SMALL_LAYOUT)
    results: list[bool] = []

    def work() -> None:
        with use_backend("cpu"):
            for _ in range(5):
                results.append(torch.equal(hash_encode(positions, table, SMALL_LAYOUT), want))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == [True] * 20


def test_an_error_in_a_helper_reaches_the_caller():
    def fail(first: int, last: int) -> None:
        raise ValueError(f"chunk {first}")

    with pytest.raises(ValueError, match="chunk"):
        launch(fail, 100, 1)
    counts = np.zeros(50, np.int64)
    launch(_count, 50, 1, counts)  # the helpers live on
    assert (counts == 1).all()


def test_scratch_is_reused_and_belongs_to_its_thread():
    first = scratch("test", 100)
    assert scratch("test", 50).data_ptr() == first.data_ptr()
    assert scratch("other", 50).data_ptr() != first.data_ptr()
    others: list[int] = []
    thread = threading.Thread(target=lambda: others.append(scratch("test", 100).data_ptr()))
    thread.start()
    thread.join()
    assert others != [first.data_ptr()]


FORK = """
import os, signal, sys, torch
from nerfturbo.ops import random_uniform
torch.set_num_threads(2)
draw = lambda: random_uniform(100_000, seed=1, stream=0, step=0, device="cpu")
want = draw()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if torch.equal(draw(), want) else 1)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status) != 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_kernels_run_in_a_forked_child():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120)


CACHE = """
import sys
from nerfturbo.ops import _cpu as _launch
from nerfturbo.ops.random import cpu as random
from nerfturbo.ops._cpu.warmup import is_cached
import torch
random.draw(torch.empty(3, 1, dtype=torch.int32), seed=0, stream=0, step=0, first=0)
assert not is_cached(), "the kernels of a step are not there"
print(random._words._cache.cache_path)
"""


def _cache_folder(environment: dict[str, str]) -> Path:
    result = subprocess.run(
        [sys.executable, "-c", CACHE], check=True, timeout=120, capture_output=True, text=True, env=environment
    )
    return Path(result.stdout.strip())


def test_cache_goes_where_it_is_told(tmp_path: Path):
    folder = _cache_folder(os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)})
    assert folder.is_relative_to(tmp_path)
    assert list(folder.glob("*.nbi"))


def test_without_a_place_for_the_cache_kernels_run_all_the_same(monkeypatch: pytest.MonkeyPatch):
    compiler = numba.njit

    def refuse(*, cache: bool, **options):
        if cache:
            raise RuntimeError("cannot cache function 'f': no locator available")
        return compiler(cache=False, **options)

    monkeypatch.setattr(numba, "njit", refuse)
    with pytest.warns(RuntimeWarning, match="set NUMBA_CACHE_DIR"):
        kernel = jit()(_count.py_func)
    counts = np.zeros(3, np.int64)
    launch(kernel, 3, 1, counts)
    assert (counts == 1).all()


def test_warm_up_names_what_it_compiles_and_fills_the_cache():
    names: list[str] = []
    warmup(names.append)
    assert {"march", "visibility"} <= set(names)
    assert len(set(names)) == len(names)
    assert is_cached()


WARM = """
import importlib
from nerfturbo.ops._cpu.warmup import _STEP_KERNELS, warmup
warmup(print)
for op, names in _STEP_KERNELS.items():
    module = importlib.import_module(f"nerfturbo.ops.{op}.cpu")
    for name in names:
        assert getattr(module, name).signatures, f"{op}: nobody called {name}"
"""


def test_warm_up_calls_every_kernel_of_a_step():
    subprocess.run([sys.executable, "-c", WARM], check=True, timeout=300)
