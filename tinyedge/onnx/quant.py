"""Quantised tensors: conversions with scales and zero points, and integer products."""

from __future__ import annotations

import numpy as np

from .. import graph as g
from ..dtype import FLOAT32, INT32, UINT8, DType
from ..graph import Node
from ..shape import same, static
from .conv import conv, shifted
from .matmul import matmul
from .registry import Context, op

VERSIONS = (19, 21, 23, 24, 25, 28)


def along(c: Context, v: Node, x: Node, axis: int, block: int) -> Node:
    """A scale or zero point, shaped to be broadcast against x: for all, an axis, or blocks."""
    if block:
        shape = v.shape
        wide = g.expand(g.reshape(v, (*shape[:axis + 1], 1, *shape[axis + 1:])),
                        (*shape[:axis + 1], block, *shape[axis + 1:]))
        whole = list(shape)
        whole[axis] = static((shape[axis],), str(c))[0] * block
        wide = g.reshape(wide, whole)
        return g.narrow(wide, axis, 0, x.shape[axis])
    if v.rank == 0 or v.rank == 1 and same(v.shape[0], 1) and x.rank != 1:
        return g.reshape(v, ())
    if v.rank != 1:
        c.refuse(f"a scale or zero point of shape {v.shape} without 'block_size'")
    return g.reshape(v, (*v.shape, *(1,) * (x.rank - axis - 1)))


def saturate(x: Node, kind: DType) -> Node:
    """A float's nearest value of an integer type, halves to even."""
    low, high = kind.limits
    x = g.round_(x)
    # the largest value of a wide type rounds up as a float
    top = np.nextafter(np.float32(high), np.float32(0)) if kind.bits > 16 else high
    return g.cast(g.minimum(g.maximum(x, g.like(x, low)), g.like(x, top)), kind)


def quantize(x: Node, scale: Node, zero: Node | None, kind: DType) -> Node:
    y = g.round_(g.div(x, g.cast(scale, x.dtype)))
    if zero is not None:
        y = g.add(y, g.cast(zero, y.dtype))
    return saturate(y, kind)


@op("QuantizeLinear", 10, 13, *VERSIONS)
def quantize_linear(c: Context, x: Node, scale: Node, zero: Node | None = None) -> Node:
    c.ignore("saturate")
    number, precision = c.attr("output_dtype", 0), c.attr("precision", 0)
    kind = zero.dtype if zero is not None else c.type_of(number) if number else UINT8
    if not kind.is_int:
        c.refuse(f"the output's type {kind} is not supported")
    axis = g.normal_axis(c.attr("axis", 1), max(x.rank, 1)) if scale.rank else 0
    block = c.attr("block_size", 0)
    scale = along(c, scale, x, axis, block)
    zero = None if zero is None else along(c, zero, x, axis, block)
    if x.dtype is INT32:
        x = g.cast(x, FLOAT32)
    if precision:
        x = g.cast(x, c.type_of(precision))
    return quantize(x, scale, zero, kind)


@op("DequantizeLinear", 10, 13, *VERSIONS)
def dequantize_linear(c: Context, x: Node, scale: Node, zero: Node | None = None) -> Node:
    axis = g.normal_axis(c.attr("axis", 1), max(x.rank, 1)) if scale.rank else 0
    block, number = c.attr("block_size", 0), c.attr("output_dtype", 0)
    kind = c.type_of(number) if number else scale.dtype
    scale = along(c, scale, x, axis, block)
    if zero is not None:
        x = g.sub(g.cast(x, INT32), g.cast(along(c, zero, x, axis, block), INT32))
    return g.cast(g.mul(g.cast(x, scale.dtype), scale), kind)


@op("DynamicQuantizeLinear", 11)
def dynamic_quantize_linear(c: Context, x: Node) -> list[Node]:
    every = range(x.rank)
    low = g.reshape(g.reduce("min", x, every), ())
    high = g.reshape(g.reduce("max", x, every), ())
    low, high = g.minimum(low, g.like(x, 0)), g.maximum(high, g.like(x, 0))
    scale = g.div(g.sub(high, low), g.like(x, 255))
    zero = saturate(g.div(g.neg(low), scale), UINT8)
    return [quantize(x, scale, zero, UINT8), scale, zero]


def requantize(c: Context, x: Node, factor: Node, zero: Node | None, kind: DType) -> Node:
    y = g.round_(g.mul(g.cast(x, FLOAT32), factor))
    if zero is not None:
        y = g.add(y, g.cast(g.reshape(zero, ()), FLOAT32))
    return saturate(y, kind)


@op("QLinearMatMul", 10, 21)
def qlinear_matmul(
    c: Context, a: Node, a_scale: Node, a_zero: Node, b: Node, b_scale: Node, b_zero: Node,
    y_scale: Node, y_zero: Node,
) -> Node:
    out = matmul(c, shifted(a, a_zero, a.rank - 2), shifted(b, b_zero, b.rank - 1))
    a_scale, b_scale, y_scale = (g.cast(s, FLOAT32) for s in (a_scale, b_scale, y_scale))
    rows = g.reshape(a_scale, (*a_scale.shape, 1)) if a_scale.rank == 1 and \
        not same(a_scale.shape[0], 1) else g.reshape(a_scale, ()) if a_scale.rank == 1 else a_scale
    factor = g.div(g.mul(rows, b_scale), y_scale)
    zero = y_zero if y_zero.rank == 0 or same(y_zero.shape[0], 1) else None
    if zero is None:
        c.refuse("a zero point of the output for each row is not supported")
    return requantize(c, out, factor, zero, y_zero.dtype)


@op("QLinearConv", 10)
def qlinear_conv(
    c: Context, x: Node, x_scale: Node, x_zero: Node, w: Node, w_scale: Node, w_zero: Node,
    y_scale: Node, y_zero: Node, b: Node | None = None,
) -> Node:
    out = conv(c, shifted(x, x_zero), shifted(w, w_zero, 0))
    tail = (1,) * (x.rank - 2)
    if b is not None:
        out = g.add(out, g.reshape(b, (*b.shape, *tail)))
    x_scale, y_scale = (g.reshape(s, ()) for s in (x_scale, y_scale))
    w_scale = g.reshape(w_scale, (*w_scale.shape, *tail)) if w_scale.rank else w_scale
    factor = g.div(g.mul(x_scale, w_scale), y_scale)
    return requantize(c, out, factor, y_zero, y_zero.dtype)
