"""Compile the kernels of one file for one GPU generation, without a GPU, in a process that does not interpret them.

    python tests/kernels/compile_kernels.py march 90

prints one JSON line per case: name, registers, bytes spilled per thread, bytes of shared memory, or an error.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

REPOSITORY = Path(__file__).resolve().parents[2]
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compile_case(case, capability: int) -> dict[str, object]:
    kernel = case.kernel
    signature = {name: case.signature.get(name, "constexpr") for name in kernel.arg_names}
    # Launches pass pointers from the allocator, which are aligned: without this hint loads would not vectorise.
    aligned = [["tt.divisibility", 16]]
    attributes = {(i,): aligned for i, name in enumerate(kernel.arg_names) if str(signature[name]).startswith("*")}
    source = ASTSource(kernel, signature, case.constexprs, attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = resource_usage(compiled.asm["cubin"])
    return {
        "registers": usage["REG"],
        "spills": usage["STACK"] + usage["LOCAL"],
        "max_spills": case.max_spills,
        "shared": compiled.metadata.shared,
    }


def resource_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = {"REG": 0, "STACK": 0, "LOCAL": 0}
    for function in re.findall(r"REG:.*", listing):
        for name in usage:
            usage[name] += int(re.search(rf"{name}:(\d+)", function)[1])
    return usage


def main(module: str, capability: int) -> None:
    cases = importlib.import_module(f"nerfturbo.ops.kernels.{module}").COMPILE_CASES
    for case in cases:
        result: dict[str, object] = {"case": f"{case.kernel.__name__} {case.name}".strip(), "capability": capability}
        try:
            result |= compile_case(case, capability)
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"[-2000:]
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path.insert(0, str(REPOSITORY))
    main(sys.argv[1], int(sys.argv[2]))
