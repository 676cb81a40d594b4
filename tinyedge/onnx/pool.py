"""Pooling: maxima over shifted views, sums by contraction with a window of weights."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from .. import graph as g
from ..dtype import INT64
from ..graph import Form, Node
from ..shape import Dim, is_static, static
from .conv import Window, pad_last, window
from .elementwise import power
from .reduce import lowest, mean
from .registry import Context, in_float32, op


def sum_windows(x: Node, win: Window, weight: float = 1) -> Node:
    """weight * the sum over each window of x [N, C, ...], already padded."""
    n = len(win.kernel)
    taps = range(2 + n, 2 + 2 * n)
    maps: tuple[tuple[Form, ...], ...] = (
        ((0, ((0, 1),)), (0, ((1, 1),)), *(win.form(i, 2 + i, t) for i, t in enumerate(taps))),
        tuple((0, ((t, 1),)) for t in taps),
    )
    w = g.const(np.full(win.kernel, weight, x.dtype.numpy))
    return g.contract(x, w, (*x.shape[:2], *win.out), win.kernel, maps)


def views(x: Node, win: Window, axis: int) -> list[Node]:
    """For each place in the window along one spatial axis, the elements that it meets."""
    d, k, s, e = win.out[axis], win.kernel[axis], win.stride[axis], win.dilation[axis]
    return [g.narrow(x, 2 + axis, e * t, d, s) for t in range(k)]


def tree(xs: Sequence[Node]) -> Node:
    """The maximum of several tensors, pairwise."""
    while len(xs) > 1:
        xs = [g.maximum(*xs[i:i + 2]) if i + 1 < len(xs) else xs[i] for i in range(0, len(xs), 2)]
    return xs[0]


@op("MaxPool", 1, 8, 10, 11, 12, 22)
def max_pool(c: Context, x: Node) -> list[Node]:
    column_major = bool(c.attr("storage_order", 0))
    win = window(c, x.shape[2:], c.attr("kernel_shape"), bool(c.attr("ceil_mode", 0)))
    least = lowest(x.dtype)
    if c.wants(1):
        return _with_indices(c, x, win, column_major)
    if all(d == 1 for d in win.out) and list(win.kernel) == list(x.shape[2:]) and \
            not any(map(any, win.pads)):
        return [g.reduce("max", x, range(2, x.rank))]
    out = pad_last(x, *win.pads, least)
    for axis in range(len(win.kernel)):
        out = tree(views(out, win, axis))
    return [out]


def _with_indices(c: Context, x: Node, win: Window, column_major: bool) -> list[Node]:
    """The maxima and their places in the flattened input, the first of equals."""
    shape = static(x.shape, str(c))
    order = (*shape[:2], *(shape[:1:-1] if column_major else shape[2:]))
    place = g.const(np.arange(prod(shape), dtype=np.int64).reshape(order))
    if column_major:
        place = g.permute(place, [0, 1, *range(x.rank - 1, 1, -1)])
    values = [pad_last(x, *win.pads, lowest(x.dtype))]
    places = [pad_last(place, *win.pads, np.iinfo(np.int64).max)]
    for axis in range(len(win.kernel)):
        values = [v for y in values for v in views(y, win, axis)]
        places = [v for y in places for v in views(y, win, axis)]
    best, at = values[0], places[0]
    for v, p in zip(values[1:], places[1:]):
        # padding ties with real elements of the least value
        wins = g.or_(g.lt(best, v), g.and_(g.eq(best, v), g.lt(p, at)))
        best, at = g.where(wins, v, best), g.where(wins, p, at)
    return [best, at]


@op("AveragePool", 1, 7, 10, 11, 19, 22)
def average_pool(c: Context, x: Node) -> Node:
    win = window(c, x.shape[2:], c.attr("kernel_shape"), bool(c.attr("ceil_mode", 0)))
    whole = bool(c.attr("count_include_pad", 0))
    padded = pad_last(x, *win.pads)
    outside = win.extra if whole else tuple(map(sum, zip(*win.pads)))
    if not any(outside):
        if all(d == 1 for d in win.out) and list(win.kernel) == list(padded.shape[2:]):
            return mean(padded, range(2, x.rank))
        return sum_windows(padded, win, 1 / prod(win.kernel))
    return g.div(sum_windows(padded, win), _counts(x, win, whole))


def _counts(x: Node, win: Window, whole: bool) -> Node:
    """How many elements each window averages over: padding counts if `whole`."""
    low, high = (win.low, win.high) if whole else ((0,) * len(win.low),) * 2
    rest = [b - a for a, b in zip(low, win.low)], [b - a for a, b in zip(high, win.pads[1])]
    sizes: list[Dim] = [1, 1, *(a + d + b for a, d, b in zip(low, x.shape[2:], high))]
    if not is_static(sizes):
        return sum_windows(pad_last(g.full(tuple(sizes), 1, x.dtype), *rest), win)
    outs = static(win.out)
    total = np.ones((1, 1, *outs), np.int64)
    windows = zip(win.kernel, win.stride, win.dilation, outs, static(sizes[2:]))
    for i, (k, s, e, out, size) in enumerate(windows):
        at = np.arange(out)[:, None] * s + np.arange(k) * e - rest[0][i]
        inside = ((at >= 0) & (at < size)).sum(1)
        total *= inside.reshape((-1,) + (1,) * (len(win.kernel) - 1 - i))
    return g.const(np.maximum(total, 1).astype(x.dtype.numpy))


@op("LpPool", 1, 2, 11, 18, 22)
@in_float32
def lp_pool(c: Context, x: Node) -> Node:
    p = c.attr("p", 2)
    win = window(c, x.shape[2:], c.attr("kernel_shape"), bool(c.attr("ceil_mode", 0)))
    total = sum_windows(power(g.abs_(pad_last(x, *win.pads)), p), win)
    return power(total, 1 / p)


@op("GlobalAveragePool", 1, 22)
def global_average_pool(c: Context, x: Node) -> Node:
    return mean(x, range(2, x.rank))


@op("GlobalMaxPool", 1, 22)
def global_max_pool(c: Context, x: Node) -> Node:
    return g.reduce("max", x, range(2, x.rank))


@op("GlobalLpPool", 1, 2, 22)
@in_float32
def global_lp_pool(c: Context, x: Node) -> Node:
    p = c.attr("p", 2)
    return power(g.reduce("sum", power(g.abs_(x), p), range(2, x.rank)), 1 / p)


@op("MaxUnpool", 9, 11, 22)
def max_unpool(c: Context, x: Node, places: Node, shape: Node | None = None) -> Node:
    kernel = c.attr("kernel_shape")
    n = len(kernel)
    stride, pads = c.attr("strides") or [1] * n, c.attr("pads") or [0] * 2 * n
    sizes = [(d - 1) * s + k - pads[i] - pads[n + i]
             for i, (d, s, k) in enumerate(zip(static(x.shape[2:], str(c)), stride, kernel))]
    inner = (*static(x.shape[:2], str(c)), *sizes)
    out = inner if shape is None else tuple(c.ints(shape, "input 2 (output_shape)"))
    if out != inner:
        # the places count in the shape that the window gives; put each into the larger one
        parts = []
        rest = places
        for d in reversed(inner):
            parts.append(g.mod(rest, g.like(rest, d)))
            rest = g.div(rest, g.like(rest, d))
        places = g.like(places, 0)
        for part, d in zip(reversed(parts), out):
            places = g.add(g.mul(places, g.like(places, d)), part)
    flat = g.full((prod(out),), 0, x.dtype)
    places = g.cast(g.reshape(places, (prod(static(x.shape)),)), INT64)
    return g.reshape(g.scatter(flat, g.reshape(x, places.shape), [places]), out)


@op("LRN", 1, 13)
@in_float32
def lrn(c: Context, x: Node) -> Node:
    size, bias = c.attr("size"), c.attr("bias")
    alpha, beta = c.attr("alpha"), c.attr("beta")
    low = (size - 1) // 2
    square = g.mul(x, x)
    edge = [0] * (x.rank - 2)
    padded = g.pad(square, [0, low, *edge], [0, size - 1 - low, *edge])
    index: list[Form] = [(0, ((i, 1),)) for i in range(x.rank)]
    index[1] = (0, ((1, 1), (x.rank, 1)))
    w = g.const(np.full(size, alpha / size, x.dtype.numpy))
    total = g.contract(padded, w, x.shape, (size,), (tuple(index), ((0, ((x.rank, 1),)),)))
    return g.mul(x, power(g.add(total, g.like(total, bias)), -beta))
