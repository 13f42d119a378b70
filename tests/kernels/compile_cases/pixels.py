"""Specialisations of the kernels of `ops/pixels`."""

from __future__ import annotations

from nerfturbo.ops.pixels import triton as kernels

from . import CompileCase


def _cases() -> list[CompileCase]:
    types = "*i64 p_words p_before p_offsets p_widths p_step p_pixels p_indices p_images, "
    types += "i32 step stream seed_low seed_high first"
    draw, bytes_ = {"CHANNELS": 4, "SEARCH_STEPS": 8, "BLOCK": kernels.BLOCK}, f"{types}, *u8 p_pixels"
    return [
        CompileCase(kernels._masked_kernel, types, {"STEPS": 22, "BLOCK": kernels.BLOCK}, 4),
        CompileCase(kernels._uniform_kernel, types, {"BLOCK": kernels.BLOCK}, 4),
        CompileCase(kernels._draw_kernel, bytes_, draw | {"p_indices": None}, 4, name="drawn"),
        CompileCase(kernels._draw_kernel, bytes_, draw, 4, name="chosen"),
        CompileCase(
            kernels._read_kernel,
            "*i32 p_pixels, *i64 p_indices",
            {"CHANNELS": 4, "BLOCK": kernels.BLOCK},
            4,
            name="words",
        ),
        CompileCase(
            kernels._read_kernel,
            "*u8 p_pixels, *i64 p_indices",
            {"CHANNELS": 3, "BLOCK": kernels.BLOCK},
            4,
            name="bytes",
        ),
        CompileCase(kernels._rays_kernel, "i32 width", {"BLOCK": kernels.RAYS_BLOCK}, 4),
    ]


COMPILE_CASES = _cases()
