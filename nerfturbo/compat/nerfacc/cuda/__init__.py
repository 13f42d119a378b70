"""nerfacc's compiled entry points. There are none here: kernels are chosen by `nerfturbo.ops`."""

from __future__ import annotations

from typing import Any


def is_cub_available() -> bool:
    """True: scans over ray indices run without a detour over `packed_info`."""
    return True


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"nerfacc.cuda.{name} is a compiled function of the original; call the public one of that name, nerfacc.{name}"
    )
