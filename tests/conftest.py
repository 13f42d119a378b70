"""What every test may use: the shared scenes, a poisoned `torch.empty`, and the device that Triton kernels run on."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# Where Python may keep no byte code, each of the hundred programs that tests start would compile all of torch, for
# seconds. A folder that git ignores holds it instead; this stands before the first large import.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(REPOSITORY / "__pycache__"))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

gc.disable()  # while a million objects are imported, until `pytest_collection_finish`: a second

import torch  # noqa: E402

from . import interpreter  # noqa: E402

HAS_CUDA = torch.cuda.is_available()
IN_CI = os.environ.get("CI") == "true"

# Triton decides when a kernel is decorated whether to interpret it, so this must stand before the first import of a
# kernel. For the whole process that is safe: on a CPU `auto` never picks Triton, and an explicit "triton" could not
# run at all. A test of that very error deletes the variable first (`monkeypatch.delenv("TRITON_INTERPRET")`).
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"


# What takes longest begins first, so that no process is left with minutes of work when the others have none.
LONGEST = (
    "training/test_distributed.py",  # plain torch, while the other process compiles the numba kernels once for both
    "test_examples.py",
    "training/test_law.py",
    "training/test_matrix.py",
    "data/test_decisions.py",
    "cli/test_documented_commands.py",
    "cli/test_torchrun.py",
    "viewer/test_browser.py",
    "cli/test_export_web.py",  # these have few tests, and would come last
    "bench/test_continued.py",
    "training/test_cameras.py",
    "viewer/test_notebook.py",
    "fuzz/test_commands.py",
    "training/test_kill.py",
    "cli/test_slurm.py",
    "bench/test_precision.py",
    "training/test_dynamic.py",
    "training/test_proposed.py",
    "test_site.py",
    "kernels/test_compile.py",
    "cli/test_tune_profile.py",
    "cli/test_dynamic.py",
    "cli/test_interrupt.py",
    "cli/test_photos.py",
    "data/test_process.py",
    "compat/test_public_code.py",
    "training/test_presets.py",
    "evaluation/test_right_halves.py",
    "cli/test_batch.py",
    "bench/test_ablation.py",
    "bench/test_trainers.py",
)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pytest_configure(config: pytest.Config) -> None:
    # The tensors of tests are small: more threads only wait, and each of several processes has its own.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    n_threads = max(1, min(4, _usable_cores() // workers))
    torch.set_num_threads(n_threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(n_threads))  # of the programs that tests start
    config.option.loadscopereorder = False  # the number of tests in a file says little: see LONGEST
    # A shell starts what runs in its background deaf to Ctrl-C, and so would be all programs that tests start.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if importlib.util.find_spec("hypothesis"):  # GPU machines may have nothing but torch, triton and pytest
        from hypothesis import settings

        # No deadline: the first example may compile a kernel. In CI the same examples every time.
        settings.register_profile("nerfturbo", deadline=None, derandomize=IN_CI)
        settings.load_profile("nerfturbo")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several processes, which take files in this order
        counts = Counter(item.path for item in items)
        ranks = {REPOSITORY / "tests" / name: rank for rank, name in enumerate(LONGEST)}
        items.sort(key=lambda item: (ranks.get(item.path, len(ranks)), -counts[item.path]))
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What was imported lives to the end: each `gc.collect()` of a trial or a trainer would take a second to see so."""
    if not HAS_CUDA and importlib.util.find_spec("triton"):
        interpreter.hasten()
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A test draws the same numbers whatever ran before it in its process."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """Where Triton kernels run here: the GPU, else the CPU under Triton's interpreter (keep the shapes tiny)."""
    pytest.importorskip("triton", reason="triton is not installed; it has no build for this platform")
    return torch.device("cuda" if HAS_CUDA else "cpu")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real scenes: NERFTURBO_TEST_DATA, else shared/data beside the checkout."""
    chosen = os.environ.get("NERFTURBO_TEST_DATA")
    folder = Path(chosen) if chosen else REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        _missing(folder)
    return folder


@pytest.fixture(scope="session")
def scene_dir(data_dir: Path) -> Callable[[str], Path]:
    """`scene_dir("blender/lego")`: the folder (or file) of one real scene."""

    def find(name: str) -> Path:
        path = data_dir / name
        if not path.exists():
            _missing(path)
        return path

    return find


def _missing(path: Path) -> None:
    """Skip; but where CI has the folder of shared files, a missing scene is a broken checkout."""
    if IN_CI and (REPOSITORY.parent / "shared").is_dir():
        pytest.fail(f"{path} is missing although this is CI with a folder of shared files")
    pytest.skip(f"no test data at {path}; point NERFTURBO_TEST_DATA at a folder with blender/lego and others")


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN (floats) or large garbage (integers): who reads before writing is found out."""

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args, **kwargs) -> torch.Tensor:
            with torch.no_grad():
                result = allocate(*args, **kwargs)
                return result if result.is_meta else result.fill_(_poison(result.dtype))

        return wrapper

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype == torch.bool:
        return True
    return int.from_bytes(b"\x5a" * dtype.itemsize, "big")  # every byte 0x5a: positive in each integer type
