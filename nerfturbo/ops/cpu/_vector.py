"""Short vectors of float32 inside numba kernels: the features of one table row move and blend as one value.

numba has no such type, and its compiler rarely finds the vectors in scalar code that gathers. Each function here emits
one or two LLVM instructions; with them a look-up is one load instead of one per feature. The length is the length
of a tuple, `lanes`, which is known when the kernel is compiled; its values are not used.

    v = load(table, row, lanes)         table[row, :] of a C-contiguous (rows, len(lanes)) array
    lerp(a, b, f)                       a + f * (b - a)
    scale(v, f)                         v * f
    dot(a, b)                           a scalar
    add_to(table, row, v)               table[row, :] += v
    load_column(x, i, lanes)            x[:, i] of a (len(lanes), n) array
    store_column(x, i, v)               x[:, i] = v
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.extending import models, register_model

# A kernel calls an intrinsic without its first parameter; type checkers do not know that.
intrinsic: Any = extending.intrinsic

_FLOAT, _INT32 = ir.FloatType(), ir.IntType(32)
_FLAGS = ("contract",)


class Vector(types.Type):
    """numba's name for a vector of `length` float32."""

    def __init__(self, length: int) -> None:
        self.length = length
        super().__init__(name=f"Float32x{length}")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector) -> None:
        super().__init__(manager, vector, ir.VectorType(_FLOAT, vector.length))


def _row_pointer(context, builder, signature, args, length):
    """Pointer to row args[1] of array args[0]; rows are never negative."""
    rows = context.make_array(signature.args[0])(context, builder, args[0])
    row = context.cast(builder, args[1], signature.args[1], types.intp)
    element = builder.gep(rows.data, [builder.mul(row, context.get_constant(types.intp, length))])
    return builder.bitcast(element, ir.VectorType(_FLOAT, length).as_pointer())


def _column_pointers(context, builder, signature, args, length):
    """Pointers to the elements of column args[1] of array args[0]."""
    columns = context.make_array(signature.args[0])(context, builder, args[0])
    stride, step = cgutils.unpack_tuple(builder, columns.strides, 2)
    column = context.cast(builder, args[1], signature.args[1], types.intp)
    address = builder.add(builder.ptrtoint(columns.data, stride.type), builder.mul(column, step))
    pointers = []
    for _ in range(length):
        pointers.append(builder.inttoptr(address, _FLOAT.as_pointer()))
        address = builder.add(address, stride)
    return pointers


def _splat(builder, scalar, length):
    kind = ir.VectorType(_FLOAT, length)
    undefined = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(_INT32, length), [0] * length))


@intrinsic
def load(typing_context, rows, row, lanes):
    def generate(context, builder, signature, args):
        return builder.load(_row_pointer(context, builder, signature, args, len(lanes)), align=4)

    return Vector(len(lanes))(rows, row, lanes), generate


@intrinsic
def add_to(typing_context, rows, row, vector):
    def generate(context, builder, signature, args):
        pointer = _row_pointer(context, builder, signature, args, vector.length)
        builder.store(builder.fadd(builder.load(pointer, align=4), args[2], flags=_FLAGS), pointer, align=4)
        return context.get_dummy_value()

    return types.void(rows, row, vector), generate


@intrinsic
def load_column(typing_context, columns, column, lanes):
    def generate(context, builder, signature, args):
        vector = ir.Constant(ir.VectorType(_FLOAT, len(lanes)), ir.Undefined)
        for i, pointer in enumerate(_column_pointers(context, builder, signature, args, len(lanes))):
            vector = builder.insert_element(vector, builder.load(pointer, align=4), ir.Constant(_INT32, i))
        return vector

    return Vector(len(lanes))(columns, column, lanes), generate


@intrinsic
def store_column(typing_context, columns, column, vector):
    def generate(context, builder, signature, args):
        for i, pointer in enumerate(_column_pointers(context, builder, signature, args, vector.length)):
            builder.store(builder.extract_element(args[2], ir.Constant(_INT32, i)), pointer, align=4)
        return context.get_dummy_value()

    return types.void(columns, column, vector), generate


@intrinsic
def lerp(typing_context, a, b, fraction):
    def generate(context, builder, signature, args):
        rise = builder.fsub(args[1], args[0], flags=_FLAGS)
        step = builder.fmul(_splat(builder, args[2], a.length), rise, flags=_FLAGS)
        return builder.fadd(args[0], step, flags=_FLAGS)

    return a(a, b, types.float32), generate


@intrinsic
def scale(typing_context, vector, factor):
    def generate(context, builder, signature, args):
        return builder.fmul(args[0], _splat(builder, args[1], vector.length), flags=_FLAGS)

    return vector(vector, types.float32), generate


@intrinsic
def dot(typing_context, a, b):
    def generate(context, builder, signature, args):
        product = builder.fmul(args[0], args[1], flags=_FLAGS)
        total = builder.extract_element(product, ir.Constant(_INT32, 0))
        for i in range(1, a.length):
            total = builder.fadd(total, builder.extract_element(product, ir.Constant(_INT32, i)), flags=_FLAGS)
        return total

    return types.float32(a, b), generate
