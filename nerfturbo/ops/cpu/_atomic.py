"""The one operation on memory that several threads of a kernel may do at a time."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types

intrinsic: Any = extending.intrinsic  # a kernel calls it without the first parameter


@intrinsic
def atomic_max(typing_context, array, index, value):
    """array[index] = max(array[index], value) for an int32 array, as one step.

    Floats >= 0 may be viewed as int32: their bits are ordered as they are.
    """

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.gep(data, [context.cast(builder, args[1], signature.args[1], types.intp)])
        number = context.cast(builder, args[2], signature.args[2], types.int32)
        builder.atomic_rmw("max", builder.bitcast(place, ir.IntType(32).as_pointer()), number, "monotonic")
        return context.get_dummy_value()

    return types.void(array, index, value), generate
