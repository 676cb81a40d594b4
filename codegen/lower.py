"""Tensor IR to loop IR: the value of a node at an index, as one expression.

The first stage inside a kernel. Nodes that have memory of their own are read from it; everything
else between them is inlined by rewriting indices, so views cost nothing and elementwise work
happens in registers. What has no memory and folds many elements into one (the kernel's `heavy`
node) is left to the schedule, which asks for its body and its epilogue separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tinyedge.dtype import BOOL, FLOAT16, FLOAT32, FLOAT64, INT64, DType
from tinyedge.errors import UnsupportedError
from tinyedge.graph import ELEMENTWISE, Node
from tinyedge.shape import Dim, Shape, same

from . import symbolic, transcendental
from .ir import Expr, const, op
from .symbolic import FALSE, TRUE, both, ge0, lift

HEAVY = frozenset(("reduce", "contract", "winograd_out"))
Index = tuple[Expr, ...]
INT_MAX = 1 << 62


@dataclass(frozen=True)
class Layout:
    """Where the elements of a tensor lie: a strided order of its dimensions.

    shape: logical. order: dimensions from outermost to innermost. halo: per dimension, elements
    before and after that hold `fill`, so that a padded read needs no test. room: per dimension,
    the physical extent with halo, and rounded up where whole vectors are wanted. block: (dimension,
    size) splits one dimension into blocks whose number varies slowest (packed weights). origin: a
    part of a larger tensor starts there, and `room` is the larger one's. quad: (dimension,
    count that divides it): so many neighbours along it stand innermost of all, 32 bits together.
    """

    shape: Shape
    order: tuple[int, ...]
    halo: tuple[tuple[int, int], ...]
    room: Shape
    block: tuple[int, int] | None = None
    origin: tuple[Dim, ...] | None = None
    quad: tuple[int, int] | None = None

    @cached_property
    def strides(self) -> tuple[Expr, ...]:
        out = [const(0)] * len(self.shape)
        dimension, count = self.quad or (-1, 1)
        run = const(count)
        if self.block:
            run = run * self.block[1]
        for d in reversed(self.order):
            if self.block and d == self.block[0]:
                continue
            out[d] = run
            n = self.room[d]
            run = run * (n if d != dimension else lift(n) // count)
        if self.block:
            out[self.block[0]] = run  # of a whole block
        return tuple(out)

    @property
    def size(self) -> Expr:
        """Elements in all."""
        run = const(1)
        for d in self.room:
            run = run * d
        return run

    def offset(self, index: Index) -> Expr:
        """The element number of `index`."""
        parts: list[tuple[int, Expr]] = []
        dimension, count = self.quad or (-1, 1)
        for d, (i, s) in enumerate(zip(index, self.strides)):
            i = i + self.halo[d][0]
            if self.origin is not None:
                i = i + self.origin[d]
            if self.block and d == self.block[0]:
                b = self.block[1]
                parts += [(1, (i // b) * s), (count, i % b)]
            elif d == dimension:
                parts += [(1, (i // count) * s), (1, i % count)]
            else:
                parts.append((1, i * s))
        return symbolic.linear_sum(parts)

    def guard(self, index: Index, write: bool = False) -> Expr:
        """Where `index` may be read or written: inside the memory and, to be written, in no halo.

        Elements that only fill up the last vector may be both.
        """
        g = TRUE
        for i, n, (low, high), room in zip(index, self.shape, self.halo, self.room):
            if isinstance(n, int) and i.lo >= 0 and i.hi < n:
                continue
            last = lift(n) - 1
            if write and (low, high) != (0, 0):
                low = 0
            elif self.origin is not None:
                last = last + high
            else:
                last = lift(room) - 1 - low
            g = both(g, both(ge0(i + low), ge0(last - i)))
        return g


def plain(shape: Shape) -> Layout:
    """Row-major, nothing added."""
    return Layout(shape, tuple(range(len(shape))), ((0, 0),) * len(shape), shape)


def accumulator(t: DType) -> DType:
    """The type in which sums of `t` are made."""
    return FLOAT32 if t is FLOAT16 else t


def identity(kind: str, t: DType) -> Expr:
    """What a fold starts from."""
    if kind in ("sum", "prod"):
        return const(0 if kind == "sum" else 1, t)
    if t.is_float:
        return const(float("-inf") if kind == "max" else float("inf"), t)
    return const(t.limits[0 if kind == "max" else 1], t)


COMBINE = {"sum": "add", "prod": "mul", "max": "max", "min": "min"}


def combine(kind: str, a: Expr, b: Expr) -> Expr:
    """One step of a fold."""
    if kind == "sum" and a.dtype is BOOL:
        return op("or", a, b)
    if kind == "prod" and a.dtype is BOOL:
        return op("and", a, b)
    return op(COMBINE[kind], a, b)


class Lower:
    """Lowers nodes for one kernel.

    read(node, index, guard) gives the expression for an element of a node that has memory, or None
    for a node that has none. halo(node) tells the layout of a node with memory, for `pad`. double:
    the target computes in float64.
    """

    def __init__(
        self,
        read: Callable[[Node, Index, Expr], Expr | None],
        layout: Callable[[Node], Layout | None],
        heavy: Node | None = None,
        double: bool = True,
    ) -> None:
        self.read, self.layout, self.heavy, self.double = read, layout, heavy, double
        self.accumulated: Expr | None = None
        self.memo: dict[tuple[Node, Index, Expr], Expr] = {}

    def value(self, n: Node, index: Index, guard: Expr = TRUE) -> Expr:
        """`n` at `index`; what it reads is read only where `guard` holds."""
        key = (n, index, guard)
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self._value(n, index, guard)
        return found

    def _value(self, n: Node, index: Index, guard: Expr) -> Expr:
        if n is self.heavy:
            assert self.accumulated is not None
            return self.accumulated
        if n.op == "const" and n.value.size == 1:
            return const(n.value.reshape(-1)[0].item(), n.dtype)
        found = self.read(n, index, guard)
        if found is not None:
            return found
        if n.op == "cast":
            x = self.value(n.inputs[0], index, guard)
            return op("cast", x, dtype=n.dtype)
        if n.op == "bitcast":
            return op("bitcast", self.value(n.inputs[0], index, guard), dtype=n.dtype)
        if n.op in ELEMENTWISE:
            args = [self.value(i, index, guard) for i in n.inputs]
            return elementwise(n.op, args, self.double)
        how: Callable[[Node, Index, Expr], Expr] = getattr(self, f"_{n.op}", self._refuse)
        return how(n, index, guard)

    def _refuse(self, n: Node, index: Index, guard: Expr) -> Expr:
        raise UnsupportedError(f"node '{n.source}': {n.op} has no place inside a kernel")

    def _iota(self, n: Node, index: Index, guard: Expr) -> Expr:
        axis: int = n["axis"]
        return index[axis]

    def _reshape(self, n: Node, index: Index, guard: Expr) -> Expr:
        return self.value(n.inputs[0], reindex(n.shape, n.inputs[0].shape, index), guard)

    def _permute(self, n: Node, index: Index, guard: Expr) -> Expr:
        out = [const(0)] * n.rank
        for i, o in enumerate(n["order"]):
            out[o] = index[i]
        return self.value(n.inputs[0], tuple(out), guard)

    def _expand(self, n: Node, index: Index, guard: Expr) -> Expr:
        x = n.inputs[0]
        into = tuple(const(0) if d == 1 and isinstance(d, int) else i
                     for i, d in zip(index, x.shape))
        return self.value(x, into, guard)

    def _slice(self, n: Node, index: Index, guard: Expr) -> Expr:
        into = tuple(i * s + b for i, b, s in zip(index, n["begin"], n["step"]))
        return self.value(n.inputs[0], into, guard)

    def _pad(self, n: Node, index: Index, guard: Expr) -> Expr:
        x = n.inputs[0]
        into = tuple(i - a for i, a in zip(index, n["low"]))
        fill = n["value"].array.reshape(-1)[0].item()
        layout = self.layout(x)
        if layout is not None and fill == 0 and layout.guard(into) is TRUE and all(
            a <= h[0] and b <= h[1] for a, b, h in zip(n["low"], n["high"], layout.halo)
        ):
            return self.value(x, into, guard)
        inside = TRUE
        for i, a, b, d in zip(into, n["low"], n["high"], x.shape):
            if a:
                inside = both(inside, ge0(i))
            if b:
                inside = both(inside, ge0(lift(d) - 1 - i))
        if inside is FALSE:
            return const(fill, n.dtype)
        v = self.value(x, into, both(guard, inside))
        if inside is TRUE or fill == 0 and v.op == "load" and len(v.args) == 2:
            return v
        return op("where", inside, v, const(fill, n.dtype))

    def _concat(self, n: Node, index: Index, guard: Expr) -> Expr:
        axis, start = n["axis"], const(0)
        out: Expr | None = None
        parts: list[tuple[Expr, Expr]] = []
        for x in n.inputs:
            i = index[axis] - start
            inside = both(ge0(i), ge0(lift(x.shape[axis]) - 1 - i))
            start = start + x.shape[axis]
            if inside is not FALSE:
                at = (*index[:axis], i, *index[axis + 1:])
                parts.append((inside, self.value(x, at, both(guard, inside))))
        for inside, v in parts:
            out = v if out is None or inside is TRUE else op("where", inside, v, out)
        assert out is not None
        return out

    def _gather(self, n: Node, index: Index, guard: Expr) -> Expr:
        data, axis = n.inputs[0], n["axis"]
        rank = n.inputs[1].rank
        at = index[axis:axis + rank]
        found = []
        for j, x in enumerate(n.inputs[1:]):
            i = self.value(x, at, guard)
            size = lift(data.shape[axis + j])
            if i.lo < 0:
                i = op("where", ge0(i) if abs(i.lo) < INT_MAX else op("le", const(0), i),
                       i, op("add", i, size))
            found.append(clamp(i, size))
        return self.value(data, (*index[:axis], *found, *index[axis + rank:]), guard)

    # the heavy node

    def extents(self) -> Shape:
        """The sizes of the heavy node's reduction indices."""
        h = self.heavy
        assert h is not None
        if h.op == "contract":
            return tuple(h["reduce"])
        if h.op == "winograd_out":
            return ()
        return tuple(h.inputs[0].shape[a] for a in h["axes"])

    def fold(self) -> tuple[str, DType]:
        """(kind, type of the accumulator) of the heavy node."""
        h = self.heavy
        assert h is not None
        return (h["kind"] if h.op == "reduce" else "sum"), accumulator(h.dtype)

    def body(self, index: Index, over: Index) -> Expr:
        """What the heavy node folds, at output `index` and reduction index `over`."""
        h = self.heavy
        assert h is not None
        t = accumulator(h.dtype)
        if h.op == "reduce":
            into = list(index)
            for a, r in zip(h["axes"], over):
                into[a] = r
            return widen(self.value(h.inputs[0], tuple(into)), t)
        if h.op == "winograd_out":  # one of the products that go into it
            tiles = [i // h["tile"] if r > 1 else i for i, r in zip(index[2:], h["taps"])]
            return self.value(h.inputs[0], (const(0), *index[:2], *tiles))
        both_ = (*index, *over)
        sides = []
        for x, forms in zip(h.inputs, h["maps"]):
            at = tuple(symbolic.linear_sum(((c, both_[i]) for i, c in terms), c0)
                       for c0, terms in forms)
            sides.append(widen(self.value(x, at), t))
        return op("mul", *sides)

    def epilogue(self, root: Node, index: Index, total: Expr | None) -> Expr:
        """`root` at `index`, given the heavy node's value there."""
        if total is not None:
            assert self.heavy is not None
            total = widen(total, self.heavy.dtype)
        self.accumulated = total
        self.memo = {}
        v = self.value(root, index)
        self.memo = {}
        return v


def widen(e: Expr, t: DType) -> Expr:
    return e if e.dtype is t else op("cast", e, dtype=t)


def clamp(i: Expr, size: Expr) -> Expr:
    """An index brought into [0, size)."""
    if i.lo < 0:
        i = op("max", i, const(0))
    if i.hi > size.lo - 1:
        i = op("min", i, size - 1)
    return i


def elementwise(name: str, args: Sequence[Expr], double: bool = True) -> Expr:
    """An elementwise operation, transcendental ones taken apart."""
    if name in transcendental.NAMES and args[0].dtype.is_float:
        return transcendental.expand(op(name, *args))
    if name == "mod" and args[0].dtype.is_float:
        return float_mod(args[0], args[1], double)
    if name == "where" and args[0].op == "const":
        return args[1] if args[0].attr else args[2]
    return op(name, *args)


def float_mod(a: Expr, b: Expr, double: bool) -> Expr:
    """a - floor(a / b) * b, and what its limit is where b is infinite.

    Done in float64, in which a quotient of narrower floats keeps all its places but the rarest; on
    targets that have none in float32, where those of a large quotient are lost.
    """
    kind = a.dtype
    if kind is not FLOAT64 and (double or kind is not FLOAT32):
        wide = FLOAT64 if double else FLOAT32
        return op("cast", float_mod(widen(a, wide), widen(b, wide), double), dtype=kind)
    infinite, zero = const(float("inf"), kind), const(0, kind)
    r = op("sub", a, op("mul", op("floor", op("div", a, b)), b))
    # a quotient that was rounded up to a whole number leaves a remainder below zero
    r = op("where", op("lt", op("mul", r, b), zero),
           op("add", r, b), r)
    against = op("and", op("ne", a, zero), op("ne", op("lt", a, zero), op("lt", b, zero)))
    edge = op("and", op("eq", op("abs", b), infinite), op("lt", op("abs", a), infinite))
    return op("where", edge, op("where", against, b, a), r)


def reindex(outer: Shape, inner: Shape, index: Index) -> Index:
    """The index into `inner` of the element that has `index` in `outer` (row-major, same size)."""
    a, b = 0, 0
    while a < min(len(outer), len(inner)) and same(outer[a], inner[a]):
        a += 1
    while b < min(len(outer), len(inner)) - a and same(outer[-1 - b], inner[-1 - b]):
        b += 1
    # equal dimensions in front and at the back keep their index; the rest goes through one number
    linear = const(0)
    for n, i in zip(outer[a:len(outer) - b], index[a:len(outer) - b]):
        linear = linear * n + i
    middle: list[Expr] = []
    for k, n in enumerate(reversed(inner[a:len(inner) - b])):
        if same(n, 1):
            middle.append(const(0))
        elif k == len(inner) - b - a - 1:
            middle.append(linear)
        else:
            middle.append(linear % n)
            linear = linear // n
    return (*index[:a], *reversed(middle), *(index[len(outer) - b:] if b else ()))


__all__ = ["INT64", "Layout", "Lower", "combine", "identity", "plain"]
