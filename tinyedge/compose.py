"""Compositions: what neural networks compute, in the operations of the tensor IR.

Between whatever makes a graph (`tinyedge.tensor`) and `tinyedge.graph`. Everything takes and gives
nodes whose types already fit; shapes follow numpy, images are [N, C, spatial...].
"""

from __future__ import annotations

from collections.abc import Sequence
from math import pi, prod, sqrt

import numpy as np

from . import graph as g
from .dtype import INT64
from .errors import ShapeError
from .graph import Form, Node
from .shape import Dim, broadcast, same, show, static

Forms = tuple[Form, ...]


# elementwise

def relu(x: Node) -> Node:
    return g.maximum(x, g.like(x, 0))


def sigmoid(x: Node) -> Node:
    return g.div(g.like(x, 1), g.add(g.like(x, 1), g.exp(g.neg(x))))


def softplus(x: Node) -> Node:
    """log(1 + exp(x)), without overflow."""
    rest = g.log(g.add(g.like(x, 1), g.exp(g.neg(g.abs_(x)))))
    return g.add(relu(x), rest)


def gelu(x: Node, approximate: bool = False) -> Node:
    """x times the normal distribution's cumulative probability; `approximate` takes tanh for it."""
    if approximate:
        cube = g.mul(x, g.mul(x, x))
        inner = g.mul(g.like(x, sqrt(2 / pi)), g.add(x, g.mul(g.like(x, 0.044715), cube)))
        bell = g.tanh(inner)
    else:
        bell = g.erf(g.mul(x, g.like(x, sqrt(0.5))))
    return g.mul(g.mul(x, g.like(x, 0.5)), g.add(bell, g.like(x, 1)))


def sign(x: Node) -> Node:
    """-1, 0 or 1 in x's type; nan stays."""
    zero = g.like(x, 0)
    up = g.cast(g.lt(zero, x), x.dtype)
    if x.dtype.kind == "u":
        return up
    out = g.sub(up, g.cast(g.lt(x, zero), x.dtype))
    return g.where(g.isnan(x), x, out) if x.dtype.is_float else out


def floor_div(a: Node, b: Node) -> Node:
    """The quotient rounded down."""
    if a.dtype.is_float:
        return g.floor(g.div(a, b))
    out = g.div(a, b)
    if a.dtype.kind == "u":
        return out
    zero = g.like(a, 0)
    apart = g.xor(g.lt(a, zero), g.lt(b, zero))
    inexact = g.ne(g.mul(out, b), a)
    return g.sub(out, g.cast(g.and_(apart, inexact), a.dtype))


def power(x: Node, exponent: int) -> Node:
    """x multiplied by itself; the exponent is not negative."""
    out: Node | None = None
    while exponent:
        if exponent & 1:
            out = x if out is None else g.mul(out, x)
        exponent >>= 1
        x = g.mul(x, x)
    return g.expand(g.like(x, 1), x.shape) if out is None else out


# reductions

def mean(x: Node, axes: Sequence[int], keep: bool = True) -> Node:
    count = prod(static(x.shape[a] for a in axes))
    return g.div(g.reduce("sum", x, axes, keep), g.like(x, count))


def variance(x: Node, axes: Sequence[int], keep: bool = True, less: int = 0) -> Node:
    """The mean of squared deviations; `less` is taken from their number."""
    off = g.sub(x, mean(x, axes))
    total = g.reduce("sum", g.mul(off, off), axes, keep)
    return g.div(total, g.like(x, prod(static(x.shape[a] for a in axes)) - less))


def softmax(x: Node, axis: int) -> Node:
    e = g.exp(g.sub(x, g.reduce("max", x, [axis])))
    return g.div(e, g.reduce("sum", e, [axis]))


def log_softmax(x: Node, axis: int) -> Node:
    off = g.sub(x, g.reduce("max", x, [axis]))
    return g.sub(off, g.log(g.reduce("sum", g.exp(off), [axis])))


def layernorm(x: Node, axes: Sequence[int], epsilon: float) -> Node:
    off = g.sub(x, mean(x, axes))
    scale = g.sqrt(g.add(mean(g.mul(off, off), axes), g.like(x, epsilon)))
    return g.div(off, scale)


def argbest(x: Node, axis: int, kind: str) -> Node:
    """int64 position of the first maximum or minimum (`kind`), or of the first nan; axis stays."""
    hit = g.eq(x, g.reduce(kind, x, [axis]))
    if x.dtype.is_float:
        hit = g.or_(hit, g.isnan(x))
    size = static(x.shape)[axis]
    place = g.where(hit, g.iota(x.shape, axis), g.const(np.int64(size - 1)))
    return g.reduce("min", place, [axis])


def cumsum(x: Node, axis: int) -> Node:
    """Running sums, by doubling: as many additions as the size has bits."""
    size, step = static(x.shape)[axis], 1
    while step < size:
        low = [step if i == axis else 0 for i in range(x.rank)]
        moved = g.pad(g.narrow(x, axis, 0, size - step), low, [0] * x.rank)
        x, step = g.add(x, moved), 2 * step
    return x


# contractions

def _form(index: int | None, factor: int = 1) -> Form:
    return (0, () if index is None else ((index, factor),))


def matmul(a: Node, b: Node) -> Node:
    """numpy's matmul, with its vectors and its broadcast of leading dimensions."""
    if not a.rank or not b.rank:
        raise ShapeError("matmul: an operand is a scalar; use * instead")
    row, column = a.rank == 1, b.rank == 1
    if row:
        a = g.reshape(a, (1, *a.shape))
    if column:
        b = g.reshape(b, (*b.shape, 1))
    inner = a.shape[-1]
    if not same(inner, b.shape[-2]):
        raise ShapeError(f"matmul: {show(a.shape)} and {show(b.shape)} differ in the dimension "
                         "that is summed over")
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    n = len(batch)

    def leading(shape: Sequence[Dim]) -> Forms:
        first = n - len(shape)
        return tuple(_form(None if same(d, 1) else first + i) for i, d in enumerate(shape))

    maps = (
        (*leading(a.shape[:-2]), _form(n), _form(n + 2)),
        (*leading(b.shape[:-2]), _form(n + 2), _form(n + 1)),
    )
    shape = (*batch, a.shape[-2], b.shape[-1])
    out = g.contract(a, b, shape, (inner,), maps)
    kept = (*batch, *(() if row else shape[-2:-1]), *(() if column else shape[-1:]))
    return g.reshape(out, kept)


def einsum(subscripts: str, *xs: Node) -> Node:
    """Einstein's summation, operands joined from left to right; without an ellipsis."""
    terms, arrow, out = subscripts.replace(" ", "").partition("->")
    labels = terms.split(",")
    if not arrow:
        out = "".join(sorted(c for c in set(terms) if c != "," and terms.count(c) == 1))
    wrong = [c for c in terms + out if not (c.isalpha() or c == ",")]
    if wrong or not set(out) <= set(terms) - {","} or len(set(out)) != len(out):
        raise ShapeError(f"einsum: '{subscripts}' is not of the form 'ij,jk->ik'")
    if len(labels) != len(xs) or any(len(s) != x.rank for s, x in zip(labels, xs)):
        raise ShapeError(f"einsum: '{subscripts}' does not fit operands of shapes "
                         f"{', '.join(show(x.shape) for x in xs)}")
    left, have = xs[0], labels[0]
    if len(xs) == 1:
        return _sum_products(left, have, g.like(left, 1), "", out)
    for i, (x, own) in enumerate(zip(xs[1:], labels[1:]), 1):
        needed = out if i == len(xs) - 1 else "".join(
            c for c in dict.fromkeys(have + own) if c in out or c in "".join(labels[i + 1:]))
        left, have = _sum_products(left, have, x, own, needed), needed
    return left


def _sum_products(a: Node, of_a: str, b: Node, of_b: str, out: str) -> Node:
    sizes: dict[str, Dim] = {}
    for x, labels in ((a, of_a), (b, of_b)):
        for c, d in zip(labels, x.shape):
            if same(sizes.setdefault(c, d), 1):
                sizes[c] = d
            elif not same(d, 1) and not same(d, sizes[c]):
                raise ShapeError(f"einsum: index {c} has sizes {sizes[c]} and {d}")
    over = [c for c in sizes if c not in out]
    number = {c: i for i, c in enumerate([*out, *over])}
    maps = tuple(tuple(_form(None if same(d, 1) else number[c]) for c, d in zip(labels, x.shape))
                 for x, labels in ((a, of_a), (b, of_b)))
    return g.contract(a, b, [sizes[c] for c in out], [sizes[c] for c in over], maps)


# windows over images

def positions(
    sizes: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """How many windows fit each padded spatial dimension."""
    out = tuple((d - (k - 1) * e - 1) // s + 1
                for d, k, s, e in zip(sizes, kernel, stride, dilation))
    if any(n < 1 for n in out):
        raise ShapeError(f"a window of {tuple(kernel)} does not fit an image of {tuple(sizes)}")
    return out


def pad_image(x: Node, padding: Sequence[tuple[int, int]], value: float | int = 0) -> Node:
    """`pad` of the spatial dimensions."""
    before = [0] * (x.rank - len(padding))
    return g.pad(x, before + [a for a, _ in padding], before + [b for _, b in padding], value)


def _taps(first: int, tap: int, stride: Sequence[int], dilation: Sequence[int]) -> Forms:
    """Where windows read: output indices from `first`, kernel indices from `tap` on."""
    return tuple((0, ((first + i, s), (tap + i, e)))
                 for i, (s, e) in enumerate(zip(stride, dilation)))


def conv(
    x: Node, w: Node, stride: Sequence[int], dilation: Sequence[int], groups: int = 1
) -> Node:
    """x [N, C, spatial...], already padded, with w [M, C/groups, kernel...]."""
    n, m, c = x.shape[0], *static(w.shape[:2])
    if w.rank != x.rank or x.rank < 3 or x.shape[1] != c * groups or m % groups:
        raise ShapeError(f"conv: weights {show(w.shape)} in {groups} groups do not fit the input "
                         f"{show(x.shape)}")
    kernel = static(w.shape[2:])
    out = positions(static(x.shape[2:]), kernel, stride, dilation)
    spatial, each = len(kernel), m // groups
    # depthwise weights have a row a group; other groups have an index of their own
    split = groups > 1 and each > 1
    first = 3 if split else 2
    inner = first + spatial
    channel: Form = (0, ((1, c), (inner, 1))) if groups > 1 else _form(inner)
    row: Form = (0, ((1, each), (2, 1))) if split else _form(1)
    maps = (
        (_form(0), channel, *_taps(first, inner + 1, stride, dilation)),
        (row, _form(inner), *(_form(inner + 1 + i) for i in range(spatial))),
    )
    shape = (n, groups, each, *out) if split else (n, m, *out)
    return g.reshape(g.contract(x, w, shape, (c, *kernel), maps), (n, m, *out))


def max_pool(
    x: Node, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Node:
    """Largest elements of windows over x [N, C, spatial...], already padded; axis by axis."""
    first = x.rank - len(kernel)
    out = positions(static(x.shape[first:]), kernel, stride, dilation)
    for axis, (k, s, e, n) in enumerate(zip(kernel, stride, dilation, out), first):
        parts = [g.narrow(x, axis, e * t, n, s) for t in range(k)]
        while len(parts) > 1:
            pairs = [g.maximum(a, b) for a, b in zip(parts[::2], parts[1::2])]
            parts = pairs + parts[2 * len(pairs):]
        x = parts[0]
    return x


def sum_pool(x: Node, kernel: Sequence[int], stride: Sequence[int], factor: float = 1) -> Node:
    """`factor` times the sums of windows over x [N, C, spatial...], already padded."""
    n = len(kernel)
    first = x.rank - n
    ones = [1] * n
    out = positions(static(x.shape[first:]), kernel, stride, ones)
    maps = (
        (*(_form(i) for i in range(first)), *_taps(first, x.rank, stride, ones)),
        tuple(_form(x.rank + i) for i in range(n)),
    )
    w = g.const(np.full(tuple(kernel), factor, x.dtype.numpy))
    return g.contract(x, w, (*x.shape[:first], *out), kernel, maps)


def average_pool(
    x: Node, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[tuple[int, int]],
    count_padding: bool,
) -> Node:
    """Means of windows over x [N, C, spatial...]; padding counts as zeros or not at all."""
    padded = pad_image(x, padding)
    if count_padding or not any(map(any, padding)):
        return sum_pool(padded, kernel, stride, 1 / prod(kernel))
    spatial = static(x.shape[x.rank - len(kernel):])
    counts = np.ones((), np.int64)
    for d, k, s, (a, b) in zip(spatial, kernel, stride, padding):
        at = np.arange(0, d + a + b - k + 1, s)[:, None] + np.arange(k) - a
        counts = np.multiply.outer(counts, ((at >= 0) & (at < d)).sum(1))
    weights = g.const((1 / np.maximum(counts, 1)).astype(x.dtype.numpy))
    return g.mul(sum_pool(padded, kernel, stride), weights)


# order and places

def take_along(x: Node, index: Node, axis: int) -> Node:
    """The elements at positions `index` (int64, x's shape but for `axis`) along `axis`."""
    places = [g.cast(index, INT64) if i == axis else g.iota(index.shape, i)
              for i in range(x.rank)]
    return g.gather(x, places)


__all__ = [
    "argbest", "average_pool", "conv", "cumsum", "einsum", "floor_div", "gelu", "layernorm",
    "log_softmax", "matmul", "max_pool", "mean", "pad_image", "positions", "power", "relu",
    "sigmoid", "sign", "softmax", "softplus", "sum_pool", "take_along", "variance",
]
