"""The ways in which each kernel is launched, a file per op: compiled for every supported GPU without owning one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class CompileCase:
    """One specialisation of a kernel, compiled by the tests for every supported GPU without owning one.

    `types` names what an argument's name does not tell, as "*i32 p_offsets p_rays, i32x4 strides, i32+fp32 pair".
    By name, p_... is "*fp32", n, n_... and stride... are "i32", all else is "fp32". Arguments in `constexprs`, None for
    an absent tensor included, have no type; those that the kernel does not have are left out.
    """

    kernel: Any  # a triton.jit function
    types: str = ""
    constexprs: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 1
    num_stages: int = 1
    max_spills: int = 0  # bytes of local memory per thread
    name: str = ""  # tells two cases of one kernel apart

    def __post_init__(self) -> None:
        own = {name: value for name, value in self.constexprs.items() if name in self.kernel.arg_names}
        object.__setattr__(self, "constexprs", own)

    @property
    def signature(self) -> dict[str, str | tuple[str, ...]]:
        """A Triton type for each argument that is not a constexpr."""
        groups = [group.split() for group in self.types.split(",")]
        special = {name: group[0] for group in groups for name in group[1:]}
        result: dict[str, str | tuple[str, ...]] = {}
        for name in self.kernel.arg_names:
            if name not in self.constexprs:
                kind, _, count = special.get(name, _usual_type(name)).partition("x")
                result[name] = (kind,) * int(count) if count else tuple(kind.split("+")) if "+" in kind else kind
        return result


def _usual_type(name: str) -> str:
    if name.startswith("p_"):
        return "*fp32"
    return "i32" if name == "n" or name.startswith(("n_", "stride")) else "fp32"
