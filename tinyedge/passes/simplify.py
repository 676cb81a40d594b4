"""Algebraic simplification: the same values by fewer operations.

Afterwards: constants stand on the right of commutative operations; a chain of one kind of
operation with constants is one operation; subtraction of a constant is an addition; operations
that change nothing are gone; views of views are one view where that can be said; elementwise work
on repeated values is done before they are repeated.

Floating point changes by rounding only (the sign of a zero may change, and sums and products of
constants are made first).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from .. import graph as g
from ..dtype import BOOL, DType
from ..graph import BINARY, ELEMENTWISE, Graph, Node, Rule
from ..interpreter import FUNCTIONS
from ..shape import Dim, Shape, is_static, same, size, static
from .fold import LIMIT, core

Array = np.ndarray[Any, Any]
COMMUTATIVE = frozenset("add mul max min and or xor eq ne".split())
CHAINS = frozenset("add mul max min and or xor".split())
RIGHT_NEUTRAL: dict[str, float] = {
    "add": 0, "sub": 0, "mul": 1, "div": 1, "pow": 1, "or": 0, "xor": 0, "shl": 0, "shr": 0,
}
WHOLE = frozenset("floor ceil round trunc".split())


def array(n: Node) -> Array | None:
    """The values of a constant, with size 1 where it repeats them."""
    c = core(n)
    return None if c is None else c.value


def _uniform(n: Node) -> Any:
    """The one value that a constant has everywhere, as a numpy scalar; None for other nodes."""
    a = array(n)
    return a.reshape(-1)[0] if a is not None and a.size == 1 else None


def filled(array: Array, like: Node) -> Node:
    """A constant of the shape of `like` that repeats `array`."""
    return g.expand(g.const(np.asarray(array, like.dtype.numpy)), like.shape)


# elementwise

def narrowed(n: Node) -> Node | None:
    """op(expand(a), expand(b)) -> expand(op(a, b))."""
    if not all(x.op == "expand" for x in n.inputs):
        return None
    inner = [x.inputs[0] for x in n.inputs]
    shape: Shape = tuple(
        next((x.shape[i] for x in inner if not same(x.shape[i], 1)), 1) for i in range(n.rank)
    )
    if all(map(same, shape, n.shape)):
        return None
    out = g.node(n.op, [g.expand(x, shape) for x in inner], shape, n.dtype, n.source,
                 **dict(n.attrs))
    return g.expand(out, n.shape)


def shrunk(n: Node) -> Node | None:
    """op(x, const with one value) -> op(x, expand(const)), so that the rules below see it."""
    def small(x: Node) -> Node:
        if x.op != "const" or not 1 < x.value.nbytes <= LIMIT or x.value.size < 2:
            return x
        first = x.value.reshape(-1)[:1]
        if x.value.tobytes() != first.tobytes() * x.value.size:
            return x
        return g.expand(g.const(first.reshape((1,) * x.rank)), x.shape)

    inputs = [small(x) for x in n.inputs]
    if tuple(inputs) == n.inputs:
        return None
    return g.node(n.op, inputs, n.shape, n.dtype, n.source, **dict(n.attrs))


def constant_right(n: Node) -> Node | None:
    """op(const, x) -> op(x, const) for commutative operations."""
    a, b = n.inputs
    if n.op in COMMUTATIVE and core(a) is not None and core(b) is None:
        return g.elementwise(n.op, b, a)
    return None


def neutral(n: Node) -> Node | None:
    """x + 0, x * 1, x / 1, x ** 1, x | 0, x ^ 0, x << 0, x & ~0 ... -> x."""
    v = _uniform(n.inputs[1])
    if v is None:
        return None
    if n.op == "and":
        return n.inputs[0] if v == np.invert(v.dtype.type(0)) else None
    if n.op in RIGHT_NEUTRAL and v == RIGHT_NEUTRAL[n.op]:
        return n.inputs[0]
    if n.op in ("max", "min") and n.dtype.is_int and v == n.dtype.limits[n.op == "min"]:
        return n.inputs[0]
    return None


def absorbing(n: Node) -> Node | None:
    """x * 0 and x & 0 for integers, x | ~0, x ** 0 -> the constant."""
    v = _uniform(n.inputs[1])
    if v is None:
        return None
    if n.op == "pow" and v == 0:
        return g.full(n.shape, 1, n.dtype)
    zero = n.op == "and" or n.op == "mul" and not n.dtype.is_float
    if zero and v == 0 or n.op == "or" and v == np.invert(v.dtype.type(0)):
        return n.inputs[1]
    return None


def same_operands(n: Node) -> Node | None:
    """max(x, x), x & x ... -> x; x - x, x ^ x -> 0 and x == x -> true for integers."""
    a, b = n.inputs
    if a is not b:
        return None
    if n.op in ("max", "min", "and", "or"):
        return a
    if a.dtype.is_float:
        return None
    if n.op in ("sub", "xor"):
        return g.full(n.shape, 0, n.dtype)
    if n.op in ("eq", "le", "ne", "lt"):
        return g.full(n.shape, n.op in ("eq", "le"), BOOL)
    return None


def twice(n: Node) -> Node | None:
    """-(-x), not not x -> x; abs(abs x), abs(-x) -> abs x; floor(round x) -> round x."""
    x = n.inputs[0]
    if n.op in ("neg", "not") and x.op == n.op:
        return x.inputs[0]
    if n.op == "abs" and x.op in ("abs", "neg"):
        return g.abs_(x.inputs[0])
    return x if n.op in WHOLE and x.op in WHOLE else None


def signs(n: Node) -> Node | None:
    """x - const -> x + (-const); x * -1 -> -x; x + (-y) -> x - y; x - (-y) -> x + y."""
    a, b = n.inputs
    v = array(b)
    if n.op == "sub" and v is not None and n.dtype is not BOOL:
        return g.add(a, filled(np.negative(v), n))
    if n.op == "mul" and n.dtype.kind in "fi" and _uniform(b) == -1:
        return g.neg(a)
    if b.op == "neg" and n.op in ("add", "sub"):
        return g.elementwise("sub" if n.op == "add" else "add", a, b.inputs[0])
    if a.op == "neg" and n.op == "add":
        return g.sub(b, a.inputs[0])
    return None


def reciprocal(n: Node) -> Node | None:
    """x / const -> x * (1 / const) where the reciprocal is exact: powers of two."""
    v = array(n.inputs[1])
    if v is None or not n.dtype.is_float:
        return None
    with np.errstate(all="ignore"):
        inverse = np.reciprocal(v)
        exact = (np.frexp(v)[0] ** 2 == 0.25) & (np.frexp(inverse)[0] ** 2 == 0.25)
    tiny = np.finfo(v.dtype).tiny
    if not (exact & (np.abs(v) >= tiny) & (np.abs(inverse) >= tiny)).all():
        return None
    return g.mul(n.inputs[0], filled(inverse, n))


def powers(n: Node) -> Node | None:
    """x ** 2, 3, -1, 0.5, -0.5 -> products, quotients and roots (nan for -inf, as numpy has it)."""
    x, v = n.inputs[0], _uniform(n.inputs[1])
    if v is None:
        return None
    if v == 2:
        return g.mul(x, x)
    if v == 3:
        return g.mul(g.mul(x, x), x)
    if v == -1:
        return g.div(g.like(x, 1), x)
    if abs(v) != 0.5:
        return None
    return g.sqrt(x) if v > 0 else g.div(g.like(x, 1), g.sqrt(x))


def chain(n: Node) -> Node | None:
    """(x op const) op const -> x op (const op const)."""
    a, b = n.inputs
    if a.op != n.op or n.op not in CHAINS:
        return None
    u, v = array(a.inputs[1]), array(b)
    if u is None or v is None or core(a.inputs[0]) is not None:
        return None
    with np.errstate(all="ignore"):
        w = FUNCTIONS[n.op](u, v)
    if w.nbytes > max(LIMIT, u.nbytes + v.nbytes):
        return None
    if n.dtype.is_float and n.op == "mul" and not _ordinary(w):
        return None
    # adding a large number and subtracting it again is a way to round, not a waste
    top = 2.0 ** (np.finfo(w.dtype).nmant - 2) if n.dtype.is_float else 0
    if n.dtype.is_float and n.op == "add" and not (np.abs(u) < top).all():
        return None
    return g.elementwise(n.op, a.inputs[0], filled(w, n))


def _ordinary(v: Array) -> bool:
    """Neither inf, nan nor denormal: products with it round as any others do."""
    size = np.abs(v)
    return bool(((size >= np.finfo(v.dtype).tiny) & (size <= np.finfo(v.dtype).max)).all())


def distributed(n: Node) -> Node | None:
    """(x * const + const) * const -> x * const + const."""
    a, b = n.inputs
    if n.op != "mul" or a.op != "add" or a.inputs[0].op != "mul":
        return None
    s, t, v = array(a.inputs[0].inputs[1]), array(a.inputs[1]), array(b)
    if s is None or t is None or v is None or not np.isfinite(v).all():
        return None
    with np.errstate(all="ignore"):
        w = t * v
    if w.nbytes > max(LIMIT, t.nbytes + v.nbytes) or not np.isfinite(w).all():
        return None
    return g.add(g.mul(a.inputs[0], b), filled(w, n))


def clamped(n: Node) -> Node | None:
    """max(min(max(x, a), b), c) -> min(max(x, a), b) if c <= a and c <= b; and with min for max."""
    other = {"max": "min", "min": "max"}.get(n.op)
    inner = n.inputs[0]
    if other is None or inner.op != other or inner.inputs[0].op != n.op:
        return None
    a, b, c = (_uniform(x) for x in (inner.inputs[0].inputs[1], inner.inputs[1], n.inputs[1]))
    if a is None or b is None or c is None:
        return None
    idle = bool(c <= a and c <= b if n.op == "max" else c >= a and c >= b)
    return inner if idle else None


def chosen(n: Node) -> Node | None:
    """where(true, a, b) -> a; where(c, a, a) -> a; where(not c, a, b) -> where(c, b, a)."""
    c, a, b = n.inputs
    v = _uniform(c)
    if v is not None:
        return a if v else b
    if a is b:
        return a
    return g.where(c.inputs[0], b, a) if c.op == "not" else None


def _lossless(a: DType, b: DType) -> bool:
    """Whether every value of a is a value of b."""
    if a is BOOL or a is b:
        return True
    if b is BOOL or a.is_float and not b.is_float:
        return False
    if a.is_float:
        return b.bits >= a.bits
    low, high = a.limits
    if b.is_float:
        exact = {16: 1 << 11, 32: 1 << 24, 64: 1 << 53}[b.bits]
        return -exact <= low and high <= exact
    return b.limits[0] <= low and high <= b.limits[1]


def casts(n: Node) -> Node | None:
    """cast(cast(x)) -> cast(x) where the inner one loses nothing."""
    x = n.inputs[0]
    if n.dtype is x.dtype:
        return x
    if x.op == "cast" and _lossless(x.inputs[0].dtype, x.dtype):
        return g.cast(x.inputs[0], n.dtype)
    return None


def bitcasts(n: Node) -> Node | None:
    """bitcast(bitcast(x)) -> bitcast(x)."""
    x = n.inputs[0]
    if n.dtype is x.dtype:
        return x
    return g.bitcast(x.inputs[0], n.dtype) if x.op == "bitcast" else None


# views

def regroup(kept: Sequence[Dim], a: Shape, b: Shape) -> Shape | None:
    """`kept`, which is `a` with 1 in place of some dimensions, reshaped as `a` is to `b`.

    None where a dimension of b would be made of both kinds.
    """
    out: list[Dim] = []
    i = j = 0
    while i < len(a) or j < len(b):
        if i < len(a) and j < len(b) and same(a[i], b[j]):
            out.append(kept[i])
            i, j = i + 1, j + 1
            continue
        p = q = 1
        first, start = i, j
        while True:
            if i < len(a) and (p <= q and (i == first or p < q) or j == len(b)):
                d, i = a[i], i + 1
                if not isinstance(d, int):
                    return None
                p *= d
            elif j < len(b):
                d, j = b[j], j + 1
                if not isinstance(d, int):
                    return None
                q *= d
            if p == q or i == len(a) and j == len(b):
                break
        if p != q:
            return None
        if all(same(k, d) for k, d in zip(kept[first:i], a[first:i])):
            out += b[start:j]
        elif all(same(k, 1) for k in kept[first:i]):
            out += [1] * (j - start)
        else:
            return None
    return tuple(out)


def view_again(n: Node) -> Node | None:
    """Views are made anew, so that their constructors' own simplifications hold again."""
    x = n.inputs[0]
    if n.op == "reshape":
        new = g.reshape(x, n.shape)
    elif n.op == "permute":
        new = g.permute(x, n["order"])
    elif n.op == "expand":
        new = g.expand(x.inputs[0] if x.op == "expand" else x, n.shape)
    else:
        new = g.slice_(x, n["begin"], n["step"], n.shape)
    return None if new is n else new


def reshape_expand(n: Node) -> Node | None:
    """reshape(expand(x)) -> expand(reshape(x)) where repeated dimensions stay apart."""
    x = n.inputs[0]
    if x.op != "expand":
        return None
    shape = regroup(x.inputs[0].shape, x.shape, n.shape)
    return None if shape is None else g.expand(g.reshape(x.inputs[0], shape), n.shape)


def permute_units(n: Node) -> Node | None:
    """permute -> reshape where only dimensions of size 1 move; permute(expand) -> expand(permute).
    """
    x = n.inputs[0]
    moved = [o for o in n["order"] if not same(x.shape[o], 1)]
    if moved == sorted(moved):
        return g.reshape(x, n.shape)
    if x.op == "expand":
        return g.expand(g.permute(x.inputs[0], n["order"]), n.shape)
    return None


def permute_reshape(n: Node) -> Node | None:
    """permute(reshape(x)) -> reshape(permute(x)) where the reshape only adds or drops ones,
    and x is itself a permute, which then takes the other in."""
    x = n.inputs[0]
    if x.op != "reshape" or x.inputs[0].op != "permute":
        return None
    y = x.inputs[0]
    long = [i for i, d in enumerate(y.shape) if not same(d, 1)]
    wide = [i for i, d in enumerate(x.shape) if not same(d, 1)]
    if len(long) != len(wide) or not all(same(y.shape[i], x.shape[j]) for i, j in zip(long, wide)):
        return None
    order = [long[wide.index(o)] for o in n["order"] if o in wide]
    order += [i for i in range(y.rank) if i not in long]
    return g.reshape(g.permute(y, order), n.shape)


def slice_view(n: Node) -> Node | None:
    """slice of a slice, of an expand, of one part of a concat, of the inside of a pad."""
    x, begin, step = n.inputs[0], n["begin"], n["step"]
    if x.op == "slice":
        y = x.inputs[0]
        starts = [b + s * i for b, s, i in zip(x["begin"], x["step"], begin)]
        return g.slice_(y, starts, [a * b for a, b in zip(x["step"], step)], n.shape)
    if x.op == "expand":
        y = x.inputs[0]
        one = [same(d, 1) and not same(e, 1) for d, e in zip(y.shape, x.shape)]
        inner = g.slice_(y, [0 if o else b for o, b in zip(one, begin)],
                         [1 if o else s for o, s in zip(one, step)],
                         [1 if o else d for o, d in zip(one, n.shape)])
        return g.expand(inner, n.shape)
    if not is_static(n.shape) or 0 in n.shape or not is_static(x.shape):
        return None
    ends = [b + s * (d - 1) for b, s, d in zip(begin, step, static(n.shape))]
    if x.op == "concat":
        axis, at = x["axis"], 0
        for part in x.inputs:
            size = part.shape[axis]
            assert isinstance(size, int)
            if at <= min(begin[axis], ends[axis]) and max(begin[axis], ends[axis]) < at + size:
                moved = [b - at if i == axis else b for i, b in enumerate(begin)]
                return g.slice_(part, moved, step, n.shape)
            at += size
    if x.op == "pad":
        low, y = x["low"], x.inputs[0]
        inside = all(
            p <= min(b, e) and max(b, e) < p + d
            for p, b, e, d in zip(low, begin, ends, static(y.shape))
        )
        if inside:
            return g.slice_(y, [b - p for b, p in zip(begin, low)], step, n.shape)
    return None


def pad_pad(n: Node) -> Node | None:
    """pad(pad(x)) -> pad(x) where both have the same value."""
    x = n.inputs[0]
    if x.op != "pad" or x["value"] != n["value"]:
        return None
    low = [a + b for a, b in zip(x["low"], n["low"])]
    high = [a + b for a, b in zip(x["high"], n["high"])]
    return g.pad(x.inputs[0], low, high, n["value"].array.reshape(-1)[0])


def concat_joined(n: Node) -> Node | None:
    """Adjacent slices of one tensor are joined. A concat in a concat stays: it is a part of it in
    memory, where its elements would be copied once more if they were taken out of it."""
    axis = n["axis"]
    parts: list[Node] = []
    for x in n.inputs:
        if parts and (joined := _join(parts[-1], x, axis)) is not None:
            parts[-1] = joined
        else:
            parts.append(x)
    return None if tuple(parts) == n.inputs else g.concat(parts, axis)


def _join(a: Node, b: Node, axis: int) -> Node | None:
    """The one slice that a and b, slices of one tensor, are two neighbouring parts of."""
    if a.op != "slice" or b.op != "slice" or a.inputs != b.inputs or a["step"] != b["step"]:
        return None
    d, e = a.shape[axis], b.shape[axis]
    if not isinstance(d, int) or not isinstance(e, int):
        return None
    if b["begin"][axis] != a["begin"][axis] + a["step"][axis] * d or any(
        i != axis and x != y for i, (x, y) in enumerate(zip(a["begin"], b["begin"]))
    ):
        return None
    shape = (*a.shape[:axis], d + e, *a.shape[axis + 1:])
    return g.slice_(a.inputs[0], a["begin"], a["step"], shape)


def gather_slice(n: Node) -> Node | None:
    """gather by a constant index, or by constants a fixed step apart -> slice."""
    x, axis = n.inputs[0], n["axis"]
    v = array(n.inputs[1])
    d = x.shape[axis] if axis < x.rank else None
    if len(n.inputs) != 2 or v is None or not isinstance(d, int) or not d or not v.size:
        return None
    if v.size != size(n.inputs[1].shape) or v.size > LIMIT:
        return None
    places = np.clip(np.where(v < 0, v + d, v), 0, d - 1).reshape(-1)
    steps = np.diff(places)
    if v.size > 1 and (v.ndim != 1 or steps[0] == 0 or (steps != steps[0]).any()):
        return None
    out = g.narrow(x, axis, int(places[0]), int(v.size), int(steps[0]) if v.size > 1 else 1)
    return g.reshape(out, n.shape)


# reductions

def reduce_view(n: Node) -> Node | None:
    """Reductions over dimensions of size 1, of a reduction of the same kind, of repeated values."""
    x, kind, axes = n.inputs[0], n["kind"], n["axes"]
    left = [a for a in axes if not same(x.shape[a], 1)]
    if len(left) < len(axes):
        return g.reduce(kind, x, left)
    if x.op == "reduce" and x["kind"] == kind:
        return g.reduce(kind, x.inputs[0], (*axes, *x["axes"]))
    if x.op != "expand":
        return None
    repeated = [a for a in axes if same(x.inputs[0].shape[a], 1)]
    counts = [x.shape[a] for a in repeated]
    if not repeated or not all(isinstance(c, int) and c > 0 for c in counts) or kind == "prod":
        return None
    inner = g.expand(x.inputs[0], tuple(1 if a in repeated else d for a, d in enumerate(x.shape)))
    out = g.reduce(kind, inner, [a for a in axes if a not in repeated])
    if kind == "sum" and n.dtype is not BOOL:
        count = prod(c for c in counts if isinstance(c, int))
        # where the type can't hold the count, repeated addition rounds or wraps as it may
        if count > (2048 if n.dtype.is_float else n.dtype.limits[1]):
            return None
        out = g.mul(out, g.like(out, count))
    return out


_BINARY: list[Rule] = [constant_right, neutral, absorbing, same_operands]
RULES: dict[str, list[Rule]] = {
    **{o: [narrowed, shrunk] for o in ELEMENTWISE},
    **{o: [narrowed, shrunk, *_BINARY] for o in BINARY},
    "reshape": [view_again, reshape_expand],
    "permute": [view_again, permute_units, permute_reshape],
    "expand": [view_again],
    "slice": [view_again, slice_view],
    "pad": [pad_pad],
    "concat": [concat_joined],
    "gather": [gather_slice],
    "reduce": [reduce_view],
}
for _op, _rules in {
    "add": [signs, chain], "sub": [signs], "mul": [signs, chain, distributed],
    "div": [reciprocal], "pow": [powers], "max": [chain, clamped], "min": [chain, clamped],
    "and": [chain], "or": [chain], "xor": [chain], "where": [chosen], "cast": [casts],
    "bitcast": [bitcasts],
    **{o: [twice] for o in ("neg", "not", "abs", *WHOLE)},
}.items():
    RULES[_op] = RULES[_op] + _rules  # type: ignore[operator]


def run(graph: Graph) -> Graph:
    """The graph with the rules above applied."""
    return g.rewrite(graph, RULES)
