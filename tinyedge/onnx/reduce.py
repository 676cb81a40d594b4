"""Reductions, softmax, and what orders elements along an axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import graph as g
from ..dtype import FLOAT16, FLOAT32, DType
from ..graph import Node
from ..shape import Dim, is_static, same, size
from .registry import Context, extent, op

AXES = (1, 11, 13, 18)


def lowest(kind: DType, largest: bool = False) -> Any:
    """The value that loses every comparison (with `largest`, wins)."""
    if kind.is_float:
        return np.inf if largest else -np.inf
    return kind.limits[largest]


def count(x: Node, axes: Sequence[int]) -> Node:
    """The number of elements over axes, as a scalar of x's type."""
    n = size(x.shape[a] for a in axes)
    return g.like(x, n) if isinstance(n, int) else g.cast(extent(n), x.dtype)


def mean(x: Node, axes: Sequence[int], keep: bool = True) -> Node:
    axes = [g.normal_axis(a, x.rank) for a in axes]
    if x.dtype is FLOAT16:  # a sum of many halves overflows
        return g.cast(mean(g.cast(x, FLOAT32), axes, keep), FLOAT16)
    total = g.reduce("sum", x, axes, keep)
    n = count(x, axes)
    if x.dtype.is_float and n.op == "const" and n.value:
        return g.mul(total, g.like(x, 1 / float(n.value)))
    return g.div(total, n)


def logsumexp(x: Node, axes: Sequence[int], keep: bool = True) -> Node:
    top = g.reduce("max", x, axes)
    infinite = g.eq(g.abs_(top), g.like(top, np.inf))
    top = g.where(infinite, g.like(top, 0), top)
    total = g.log(g.reduce("sum", g.exp(g.sub(x, top)), axes))
    out = g.add(total, top)
    return out if keep else g.reshape(out, [d for i, d in enumerate(x.shape) if i not in axes])


Fold = Callable[[Node, Sequence[int], bool], Node]


def _fold(kind: str, before: Callable[[Node], Node] | None = None,
          after: Callable[[Node], Node] | None = None) -> Fold:
    def fold(x: Node, axes: Sequence[int], keep: bool) -> Node:
        out = g.reduce(kind, before(x) if before else x, axes, keep)
        return after(out) if after else out
    return fold


def square(x: Node) -> Node:
    return g.mul(x, x)


def as_float(f: Callable[[Node], Node]) -> Callable[[Node], Node]:
    """f made in float32 for integers, as the operators' definitions have it."""
    return lambda x: f(x) if x.dtype.is_float else g.cast(f(g.cast(x, FLOAT32)), x.dtype)


def wide(fold: Fold) -> Fold:
    """A fold whose parts leave float16's range, made in float32."""
    def apply(x: Node, axes: Sequence[int], keep: bool) -> Node:
        if x.dtype is not FLOAT16:
            return fold(x, axes, keep)
        return g.cast(fold(g.cast(x, FLOAT32), axes, keep), FLOAT16)
    return apply


def register(name: str, versions: Sequence[int], fold: Fold) -> None:
    since = 13 if name == "ReduceSum" else 18

    @op(name, *versions)
    def apply(c: Context, x: Node, axes: Node | None = None) -> Node:
        given = c.axes(axes, 1) if c.version < since or axes is not None else None
        keep = bool(c.attr("keepdims"))
        if c.version >= since and c.attr("noop_with_empty_axes") and not given:
            return fold(x, [], True)
        over = sorted({g.normal_axis(a, x.rank) for a in given or range(x.rank)})
        return fold(x, over, keep)


for _name, _versions, _f in (
    ("ReduceSum", (1, 11, 13), _fold("sum")), ("ReduceProd", AXES, _fold("prod")),
    ("ReduceMean", AXES, mean), ("ReduceMax", (1, 11, 12, 13, 18, 20), _fold("max")),
    ("ReduceMin", (1, 11, 12, 13, 18, 20), _fold("min")),
    ("ReduceL1", AXES, _fold("sum", g.abs_)),
    ("ReduceL2", AXES, wide(_fold("sum", square, as_float(g.sqrt)))),
    ("ReduceLogSum", (*AXES, 28), _fold("sum", None, as_float(g.log))),
    ("ReduceLogSumExp", (*AXES, 28), lambda x, axes, keep: as_float(
        lambda y: logsumexp(y, axes, keep))(x)),
    ("ReduceSumSquare", AXES, _fold("sum", square)),
):
    register(_name, _versions, _f)


def _softmax_axes(c: Context, x: Node) -> list[int]:
    """One axis from opset 13 on; all from it on before, when the input was seen as a matrix."""
    axis = g.normal_axis(c.attr("axis"), x.rank)
    return [axis] if c.version >= 13 else list(range(axis, x.rank))


def softmax(x: Node, axes: Sequence[int]) -> Node:
    raised = g.exp(g.sub(x, g.reduce("max", x, axes)))
    return g.div(raised, g.reduce("sum", raised, axes))


@op("Softmax", 1, 11, 13)
def _softmax(c: Context, x: Node) -> Node:
    return softmax(x, _softmax_axes(c, x))


@op("LogSoftmax", 1, 11, 13)
def log_softmax(c: Context, x: Node) -> Node:
    axes = _softmax_axes(c, x)
    less = g.sub(x, g.reduce("max", x, axes))
    return g.sub(less, g.log(g.reduce("sum", g.exp(less), axes)))


def argbest(x: Node, axis: int, largest: bool, last: bool = False) -> Node:
    """int64 position, with axis kept, of the first (or last) extreme element."""
    best = g.reduce("max" if largest else "min", x, [axis])
    lost = g.lt(x, best) if largest else g.lt(best, x)
    if x.dtype.is_float:  # where one is nan, the best is nan, and numbers lose to it
        lost = g.or_(lost, g.and_(g.isnan(best), g.not_(g.isnan(x))))
    n = x.shape[axis]
    shape = [n if i == axis else 1 for i in range(x.rank)]
    place = g.iota(shape, axis)
    if last:
        return g.reduce("max", g.where(lost, g.like(place, -1), place), [axis])
    return g.reduce("min", g.where(lost, g.like(place, np.iinfo(np.int64).max), place), [axis])


def argreduce(largest: bool) -> Callable[..., Node]:
    def apply(c: Context, x: Node) -> Node:
        axis = g.normal_axis(c.attr("axis"), x.rank)
        if same(x.shape[axis], 0):
            c.misfit(f"axis {axis} of the input {x.shape} is empty, so there is no such element")
        out = argbest(x, axis, largest, bool(c.attr("select_last_index", 0)))
        if c.attr("keepdims"):
            return out
        return g.reshape(out, [d for i, d in enumerate(x.shape) if i != axis])
    return apply


op("ArgMax", 1, 11, 12, 13)(argreduce(True))
op("ArgMin", 1, 11, 12, 13)(argreduce(False))


@op("Hardmax", 1, 11, 13)
def hardmax(c: Context, x: Node) -> Node:
    axes = _softmax_axes(c, x)
    flat = x
    if len(axes) > 1:
        flat = g.reshape(x, (*x.shape[:axes[0]], size(x.shape[axes[0]:])))
    axis = axes[0]
    place = g.iota([d if i == axis else 1 for i, d in enumerate(flat.shape)], axis)
    hot = g.cast(g.eq(place, argbest(flat, axis, True)), x.dtype)
    return g.reshape(hot, x.shape)


def take_along(x: Node, index: Node, axis: int) -> Node:
    """Elements of x at positions `index` along an axis; index has x's rank."""
    places = [
        index if i == axis else g.expand(
            g.iota([d if j == i else 1 for j in range(x.rank)], i), index.shape)
        for i, d in enumerate(index.shape)
    ]
    return g.gather(x, places, 0)


@op("TopK", 1, 10, 11, 24)
def top_k(c: Context, x: Node, k: Node | None = None) -> list[Node]:
    axis = g.normal_axis(c.attr("axis"), x.rank)
    largest = bool(c.attr("largest", 1))
    c.ignore("sorted")
    n: Dim = c.attr("k") if k is None else c.dims(k, "input 1 (K)")[0]
    order = g.narrow(g.sort(x, axis, descending=largest), axis, 0, n)
    return [take_along(x, order, axis), order]


def scan_axis(c: Context, x: Node, axis: Node, f: Callable[[Node, Node], Node], unit: int) -> Node:
    """Running sum or product by doubling: log2(n) steps of shift and combine."""
    a = g.normal_axis(c.ints(axis, "input 1 (axis)")[0], x.rank)
    n = x.shape[a]
    if not is_static((n,)):
        c.refuse(f"dimension {a} of the input is symbolic; bind it")
    assert isinstance(n, int)
    backward = bool(c.attr("reverse"))

    def shifted(y: Node, by: int) -> Node:
        amount = [by if i == a else 0 for i in range(x.rank)]
        less = [-by if i == a else 0 for i in range(x.rank)]
        return g.pad(y, *((less, amount) if backward else (amount, less)), unit)

    if c.attr("exclusive") and n:
        x = shifted(x, 1)
    step = 1
    while step < n:
        x = f(x, shifted(x, step))
        step *= 2
    return x


@op("CumSum", 11, 14)
def cum_sum(c: Context, x: Node, axis: Node) -> Node:
    return scan_axis(c, x, axis, g.add, 0)


@op("CumProd", 26)
def cum_prod(c: Context, x: Node, axis: Node) -> Node:
    return scan_axis(c, x, axis, g.mul, 1)
