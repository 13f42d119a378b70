"""Specialisations of the kernels of `ops/composite`."""

from __future__ import annotations

from nerfturbo.ops.composite import triton as kernels

from . import CompileCase


def _cases(rays: int, steps: int) -> list[CompileCase]:
    types = "*fp16 p_density p_rgb, *i32 p_offsets, i32 ray_programs"
    tile, name = {"RAYS": rays, "STEPS": steps, "TAIL": kernels.TAIL_BLOCK}, f"{rays}x{steps}"
    forward = {"CHANNELS": kernels.CHANNELS, "MEAN": True, **tile}
    return [
        CompileCase(kernels._forward_kernel, f"{types}, i32x4 strides", forward, name=name),
        CompileCase(
            kernels._backward_kernel,
            f"{types}, *fp16 p_out_density p_out_rgb, i32x11 strides",
            {"N_CHANNELS": 3, **tile},
            name=name,
        ),
        CompileCase(kernels._visibility_kernel, f"{types}, *u8 p_out", tile, name=name),
    ]


COMPILE_CASES = [
    *_cases(4, 8),
    *_cases(1, 32),
    CompileCase(kernels._merge_kernel, "*i32 p_offsets p_phases, *u8 p_codes", {"RAYS": 32}),
]
