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
    relu(v): NaN stays                  gated(v, x): v where x > 0, else 0
    multiply_add_lane(sum, a, w, k)     sum + a * w[k], k a literal

Indices are never negative: they are not checked and do not wrap.
"""

import inspect
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.extending import models, register_model

intrinsic: Any = extending.intrinsic  # a kernel calls it without the first parameter


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


def _on_values(result):
    """For kernels, what `emit(builder, ...)` writes from values alone; `result` makes the signature of their types."""

    def decorate(emit):
        def define(typing_context, *kinds):
            return result(*kinds), lambda context, builder, signature, args: emit(builder, *args)

        define.__name__, define.__signature__ = emit.__name__, inspect.signature(emit)  # numba counts the parameters
        return intrinsic(define)

    return decorate


@_on_values(lambda lanes: Vector(len(lanes))(lanes))
def zeros(builder, lanes):
    return _zeros(lanes.type.count)


@_on_values(lambda sums, a, b: sums(sums, a, b if isinstance(b, Vector) else types.float32))
def multiply_add(builder, sums, a, b):
    return _multiply_add(builder, sums, a, b if b.type == sums.type else _splat(builder, b, sums.type.count))


@intrinsic(prefer_literal=True)
def multiply_add_lane(typing_context, sums, a, weights, lane):
    def generate(context, builder, signature, args):
        return _multiply_add(builder, args[0], args[1], _pick(builder, args[2], [lane.literal_value] * sums.length))

    return sums(sums, a, weights, lane), generate


@_on_values(lambda vector: vector(vector))
def relu(builder, vector):
    zero = _zeros(vector.type.count)
    return builder.select(builder.fcmp_ordered("<", vector, zero), zero, vector)


@_on_values(lambda vector, gate: vector(vector, gate))
def gated(builder, vector, gate):
    zero = _zeros(vector.type.count)
    return builder.select(builder.fcmp_ordered(">", gate, zero), vector, zero)


@_on_values(lambda vector: types.float32(vector))
def total(builder, vector):
    length = vector.type.count
    while length > 1:  # halves onto each other: pairwise, so that no digits are lost in a long chain
        length //= 2
        low, high = (_pick(builder, vector, list(range(first, first + length))) for first in (0, length))
        vector = builder.fadd(low, high, flags=_FLAGS)
    return builder.extract_element(vector, ir.Constant(_INT32, 0))


@_on_values(lambda a, b, fraction: a(a, b, types.float32))
def lerp(builder, a, b, fraction):
    rise = builder.fsub(b, a, flags=_FLAGS)
    step = builder.fmul(_splat(builder, fraction, a.type.count), rise, flags=_FLAGS)
    return builder.fadd(a, step, flags=_FLAGS)


@_on_values(lambda vector, factor: vector(vector, types.float32))
def scale(builder, vector, factor):
    return builder.fmul(vector, _splat(builder, factor, vector.type.count), flags=_FLAGS)


@_on_values(lambda a, b: types.float32(a, b))
def dot(builder, a, b):
    product = builder.fmul(a, b, flags=_FLAGS)
    total = builder.extract_element(product, ir.Constant(_INT32, 0))
    for i in range(1, a.type.count):
        total = builder.fadd(total, builder.extract_element(product, ir.Constant(_INT32, i)), flags=_FLAGS)
    return total
