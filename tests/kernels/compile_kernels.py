"""Compile every kernel for several GPU generations, without a GPU; a script, since interpreted kernels cannot compile.

    python tests/kernels/compile_kernels.py                  all kernels, all generations
    python tests/kernels/compile_kernels.py march/80,90      one file, compute capabilities 8.0 and 9.0

prints one JSON line per file and generation: its cases with registers, bytes spilled per thread and bytes of shared
memory, or an error. Triton's cache makes the second run quick.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

REPOSITORY = Path(__file__).resolve().parents[2]
# 2080, A100, 4090, H100, B200 and their kin, with the bytes of shared memory a program may use; a 3090 has the 4090's.
SHARED = {75: 64 * 1024, 80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def kernel_files() -> list[str]:
    """Ops, and parts of exports, with Triton kernels, slowest first."""
    files = (REPOSITORY / "nerfturbo").glob("*/*/triton.py")
    return [path.parent.name for path in sorted(files, key=lambda path: -path.stat().st_size)]


def capabilities(module: str) -> list[int]:
    """The generations that a file is compiled for: on Blackwell only products differ from Hopper."""
    return [capability for capability in SHARED if capability < 100 or module in ("mlp", "ngp")]


def compile_case(case, capability: int):
    """What Triton makes of a case: its PTX, its machine code and how much shared memory it takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    # Launches pass pointers from the allocator, which are aligned: without this hint loads would not vectorise.
    aligned = [["tt.divisibility", 16]]
    attributes = {(i,): aligned for i, name in enumerate(names) if str(signature[name]).startswith("*")}
    source = ASTSource(case.kernel, signature, case.constexprs, attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def assemble(ptx: str, capability: int) -> bytes:
    """The machine code of PTX for another generation than it was made for; a fifth of the time."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    backend = make_backend(GPUTarget("cuda", capability, 32))
    return backend.make_cubin(retarget(ptx, capability), {}, backend.parse_options({}), capability)


def retarget(ptx: str, capability: int) -> str:
    return re.sub(r"\.target sm_\d+", f".target sm_{capability}", ptx)


def resource_usage(cubin: bytes, cuobjdump: Path) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(cuobjdump), "-res-usage", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = {"REG": 0, "STACK": 0, "LOCAL": 0}
    for function in re.findall(r"REG:.*", listing):
        for name in usage:
            found = re.search(rf"{name}:(\d+)", function)
            usage[name] += int(found[1]) if found else 0
    return usage


@contextmanager
def running_on(capability: int) -> Iterator[None]:
    """Fused networks choose tiles and instructions as on a GPU of this generation."""
    import torch

    from nerfturbo.ops.mlp import triton as mlp

    found = SimpleNamespace(major=capability // 10, shared_memory_per_block_optin=SHARED[capability])
    with patch("torch.cuda.get_device_properties", lambda _: found), patch.dict(os.environ):
        limits = mlp._capability.__wrapped__(torch.device("cuda"))
        with patch.object(mlp, "_capability", lambda _: limits):
            yield


def compile_file(job: str) -> list[dict[str, object]]:
    """A file for some generations. If Triton makes the same PTX for 8.0 and 8.9 of the last case, it does of all."""
    module, capabilities = job.split("/")
    listed = importlib.import_module(f"tests.kernels.compile_cases.{module}")
    compiled: dict[int, list[tuple[Any, Any]]] = {}  # cases, each with what Triton made of it itself
    lines = []
    for capability in map(int, capabilities.split(",")):
        with running_on(capability):
            compiled[capability], results = compile_generation(listed, capability, compiled.get(80, []))
        lines.append({"job": f"{module}/{capability}", "cases": results})
    return lines


def compile_generation(listed: Any, capability: int, ampere: list[tuple[Any, Any]]) -> tuple[list, list]:
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    # Turing does not launch products: torch's own run there instead. On Blackwell they are what differs from Hopper.
    cases = list(listed.COMPILE_CASES) if capability < 100 else []
    cases += listed.wide_cases() if 80 <= capability < 100 and hasattr(listed, "wide_cases") else []
    cases += getattr(listed, "TENSOR_CORE_CASES", []) if capability >= 80 else []
    earlier = ampere if capability == 89 else []
    if earlier and earlier[-1][1]:
        last = compile_case(cases[-1], capability).asm["ptx"]
        earlier = earlier if last == retarget(earlier[-1][1].asm["ptx"], capability) else []
    compiled, results = [], []
    for case in cases:
        result: dict[str, object] = {"case": f"{case.kernel.__name__} {case.name}".strip()}
        kernel, known = None, next((made for other, made in earlier if other == case), None)
        try:
            if known:
                shared, cubin = known.metadata.shared, assemble(known.asm["ptx"], capability)
            else:
                kernel = compile_case(case, capability)
                shared, cubin = kernel.metadata.shared, kernel.asm["cubin"]
            usage = resource_usage(cubin, cuobjdump)
            spills = usage["STACK"] + usage["LOCAL"]
            result |= {"registers": usage["REG"], "spills": spills, "max_spills": case.max_spills, "shared": shared}
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"[-1500:]
        compiled.append((case, kernel))
        results.append(result)
    return compiled, results


def main(jobs: list[str]) -> None:
    jobs = jobs or [f"{module}/{','.join(map(str, capabilities(module)))}" for module in kernel_files()]
    workers = min(len(jobs), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for lines in pool.map(compile_file, jobs):
            for line in lines:
                print(json.dumps(line), flush=True)


sys.path.insert(0, str(REPOSITORY))
if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["OMP_NUM_THREADS"] = "1"  # the workers of one machine must not fight
    main(sys.argv[1:])
