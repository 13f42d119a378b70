"""Short vectors of float32 inside numba kernels.

numba has no such type, and its compiler rarely finds the vectors in scalar code that gathers or that multiplies small
matrices. Each function here emits one or two LLVM instructions, for any processor. The length is the length of a
tuple, `lanes`, which is known when the kernel is compiled; its values are not used.

    load(rows, i, lanes)                rows[i, :] of a C-contiguous (n, len(lanes)) array
    add_to(rows, i, v)                  rows[i, :] += v
    load_column(x, j, lanes)            x[:, j] of a (len(lanes), n) array
    store_column(x, j, v)               x[:, j] = v
    load_at(x, i, lanes)                x[i : i + len(lanes)] of a contiguous array
    load_span(x, i, j, lanes)           x[i, j : j + len(lanes)] of an array whose rows are contiguous
    store_span(x, i, j, v)              x[i, j : j + len(v)] = v

    zeros(lanes)                        lerp(a, b, f) = a + f * (b - a)         scale(v, f) = v * f
    dot(a, b), total(v): scalars        multiply_add(sum, a, b) = sum + a * b, with b a vector or a scalar
    relu(v): NaN stays                  where_positive(v, x): v where x > 0, else 0
    multiply_add_lane(sum, a, w, k)     sum + a * w[k], k a literal

Indices are never negative: they are not checked and do not wrap.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.extending import models, register_model

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


def _span_pointer(context, builder, signature, args, length):
    """Pointer to element args[1], args[2] of array args[0], as a vector."""
    array = context.make_array(signature.args[0])(context, builder, args[0])
    stride = cgutils.unpack_tuple(builder, array.strides, 2)[0]
    row, column = (context.cast(builder, args[k], signature.args[k], types.intp) for k in (1, 2))
    address = builder.add(builder.ptrtoint(array.data, stride.type), builder.mul(row, stride))
    element = builder.gep(builder.inttoptr(address, _FLOAT.as_pointer()), [column])
    return builder.bitcast(element, ir.VectorType(_FLOAT, length).as_pointer())


def _pick(builder, vector, lanes):
    """The given lanes of a vector, as a vector."""
    undefined = ir.Constant(vector.type, ir.Undefined)
    return builder.shuffle_vector(vector, undefined, ir.Constant(ir.VectorType(_INT32, len(lanes)), lanes))


def _splat(builder, scalar, length):
    undefined = ir.Constant(ir.VectorType(_FLOAT, length), ir.Undefined)
    return _pick(builder, builder.insert_element(undefined, scalar, ir.Constant(_INT32, 0)), [0] * length)


def _multiply_add(builder, total, a, b):
    return builder.fadd(total, builder.fmul(a, b, flags=_FLAGS), flags=_FLAGS)


def _zeros(length):
    return ir.Constant(ir.VectorType(_FLOAT, length), [0.0] * length)


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
def load_at(typing_context, array, index, lanes):
    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        element = builder.gep(data, [context.cast(builder, args[1], signature.args[1], types.intp)])
        return builder.load(builder.bitcast(element, ir.VectorType(_FLOAT, len(lanes)).as_pointer()), align=4)

    return Vector(len(lanes))(array, index, lanes), generate


@intrinsic
def load_span(typing_context, array, row, column, lanes):
    def generate(context, builder, signature, args):
        return builder.load(_span_pointer(context, builder, signature, args, len(lanes)), align=4)

    return Vector(len(lanes))(array, row, column, lanes), generate


@intrinsic
def store_span(typing_context, array, row, column, vector):
    def generate(context, builder, signature, args):
        builder.store(args[3], _span_pointer(context, builder, signature, args, vector.length), align=4)
        return context.get_dummy_value()

    return types.void(array, row, column, vector), generate


@intrinsic
def zeros(typing_context, lanes):
    def generate(context, builder, signature, args):
        return _zeros(len(lanes))

    return Vector(len(lanes))(lanes), generate


@intrinsic
def multiply_add(typing_context, sums, a, b):
    def generate(context, builder, signature, args):
        factor = args[2] if isinstance(b, Vector) else _splat(builder, args[2], sums.length)
        return _multiply_add(builder, args[0], args[1], factor)

    return sums(sums, a, b if isinstance(b, Vector) else types.float32), generate


@extending.intrinsic(prefer_literal=True)
def _multiply_add_lane(typing_context, sums, a, weights, lane):
    def generate(context, builder, signature, args):
        return _multiply_add(builder, args[0], args[1], _pick(builder, args[2], [lane.literal_value] * sums.length))

    return sums(sums, a, weights, lane), generate


multiply_add_lane: Any = _multiply_add_lane


@intrinsic
def relu(typing_context, vector):
    def generate(context, builder, signature, args):
        negative = builder.fcmp_ordered("<", args[0], _zeros(vector.length))
        return builder.select(negative, _zeros(vector.length), args[0])

    return vector(vector), generate


@intrinsic
def where_positive(typing_context, vector, gate):
    def generate(context, builder, signature, args):
        positive = builder.fcmp_ordered(">", args[1], _zeros(vector.length))
        return builder.select(positive, args[0], _zeros(vector.length))

    return vector(vector, gate), generate


@intrinsic
def total(typing_context, vector):
    def generate(context, builder, signature, args):
        rest, length = args[0], vector.length
        while length > 1:  # halves onto each other: pairwise, so that no digits are lost in a long chain
            length //= 2
            low, high = _pick(builder, rest, list(range(length))), _pick(builder, rest, list(range(length, 2 * length)))
            rest = builder.fadd(low, high, flags=_FLAGS)
        return builder.extract_element(rest, ir.Constant(_INT32, 0))

    return types.float32(vector), generate


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
