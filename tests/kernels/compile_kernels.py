"""Compile every kernel for several GPU generations, without a GPU; a script, since interpreted kernels cannot compile.

    python tests/kernels/compile_kernels.py                  all kernels, all generations
    python tests/kernels/compile_kernels.py march/90         one file, compute capability 9.0

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
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CAPABILITIES = (75, 80, 89, 90)  # 2080, A100, 4090, H100 and their kin; a 3090 has the limits of the 4090


def kernel_files() -> list[str]:
    """Ops with Triton kernels, slowest first."""
    files = (REPOSITORY / "nerfturbo" / "ops").glob("*/triton.py")
    return [path.parent.name for path in sorted(files, key=lambda path: -path.stat().st_size)]


def compile_case(case, capability: int) -> dict[str, object]:
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
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = resource_usage(compiled.asm["cubin"], Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    return {
        "registers": usage["REG"],
        "spills": usage["STACK"] + usage["LOCAL"],
        "max_spills": case.max_spills,
        "shared": compiled.metadata.shared,
    }


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


def compile_file(job: str) -> dict[str, object]:
    module, capability = job.split("/")
    listed = importlib.import_module(f"tests.kernels.compile_cases.{module}")
    cases = listed.COMPILE_CASES
    if int(capability) >= 80:  # Turing does not launch these: torch's own products run there instead
        cases = cases + getattr(listed, "TENSOR_CORE_CASES", [])
    results = []
    for case in cases:
        result: dict[str, object] = {"case": f"{case.kernel.__name__} {case.name}".strip()}
        try:
            result |= compile_case(case, int(capability))
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"[-1500:]
        results.append(result)
    return {"job": job, "cases": results}


def main(jobs: list[str]) -> None:
    jobs = jobs or [f"{module}/{capability}" for module in kernel_files() for capability in CAPABILITIES]
    workers = min(len(jobs), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for result in pool.map(compile_file, jobs):
            print(json.dumps(result), flush=True)


sys.path.insert(0, str(REPOSITORY))
if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["OMP_NUM_THREADS"] = "1"  # the workers of one machine must not fight
    main(sys.argv[1:])
