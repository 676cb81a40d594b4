"""Graph: the tensor IR, between the importers (ONNX, `Tensor`) and the passes.

Grammar
=======

A graph is a set of named inputs and named outputs over immutable, hash-consed nodes. A node has an
operation, input nodes, attributes, a shape, an element type, and ``source``: the name of the
model's node that it comes from, which survives to kernel names and error messages and is not part
of the node's identity. A dimension is an int or a symbolic expression with bounds.

::

    leaves       input name | const array | iota axis        iota: the index along an axis, int64
    elementwise  neg abs exp log sin cos tanh erf sqrt floor ceil round trunc not isnan
                 add sub mul div mod pow max min and or xor shl shr eq ne lt le where
                 cast bitcast
    reductions   reduce kind axes                            sum prod max min; axes stay, size 1
                 contract reduce maps                        see below
                 winograd_in tile taps | winograd_out tile taps
    views        reshape | permute order | expand | slice begin step | pad low high value
    joining      concat axis | gather axis | scatter axis kind
    order        sort axis descending                        stable, nan last; gives positions
    control      if then else | loop body carried limit | result index

Evaluation
==========

Nodes have no effects; the order of evaluation is free. Every operand of an elementwise node has the
node's shape: broadcasting is written out as reshape and expand. Operands have one element type
(``where``: a bool first; ``eq ne lt le isnan`` give bool), which is the result's; conversions are
written as ``cast``: float to integer truncates towards zero, out-of-range values wrap in an
unspecified way, to bool means ``!= 0``. ``div`` of integers truncates towards zero; ``mod`` takes
the divisor's sign, for floats too; ``round`` rounds halves to even; ``and or xor not`` are bitwise
on integers. ``max`` and ``min`` give nan if either operand is nan, as reductions do. Integers wrap.

``expand`` repeats dimensions of size 1. ``slice`` takes ``begin + step*i``, step may be negative.
``pad`` adds ``low`` and ``high`` elements of ``value`` around each dimension, never negative.

``contract(a, b)``: with output indices ``o`` (one a dimension of the shape) and reduction indices
``r`` (one an entry of ``reduce``, their sizes), the element at ``o`` is the sum over all ``r`` of
``a[A(o, r)] * b[B(o, r)]``. ``maps = (A, B)``; each is a tuple with one affine form for every
dimension of its operand: ``(constant, ((index, coefficient), ...))``, where indices number
``o`` first and then ``r``. Every access is in bounds; padding is written as ``pad``. Sums are made
in the accumulation type, float32 for float16, else the node's own. ``b`` may be float16 or bfloat16
where ``a`` and the result are float32; bfloat16 with itself gives float32, uint8 with int8 int32.

``winograd_in(x)`` and ``winograd_out(v)`` are the linear transforms of a minimal filter F(tile,
taps) before and after its products (`tinyedge.winograd`): x [N, C, *S] -> [products, N, C, *tiles],
where a tile begins every ``tile`` places along the axes with more than one tap; v [products, N, K,
*tiles] -> [N, K, *sizes].

``gather(data, i0, ..., ik)`` indexes k+1 adjacent dimensions from ``axis`` on by integer tensors of
one shape I: the result has ``data.shape[:axis] + I + data.shape[axis+k+1:]``. Negative indices
count from the end; out-of-range indices are clamped. ``scatter(data, updates, i0, ...)`` is a copy
of data in which those places are set (kind "set", the last one wins) or combined ("sum", "max",
"min", "prod").

``if(cond, captures...)`` evaluates one of two graphs whose inputs are the captures. ``loop(trips,
cond, carried..., captures...)`` runs ``body(i, carried..., captures...) -> (cond, carried...,
stacked...)`` while ``i < trips`` and cond holds; ``limit`` bounds the trips. Its results are the
carried values, then each stacked output with a new first dimension of size ``limit`` (zeros where
the loop ended early). ``result index`` takes one result of an ``if`` or ``loop``.

The numpy interpreter of this page is `tinyedge.interpreter`. `validate` checks a graph against it
and returns a `Valid`, which later stages ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import prod
from typing import Any, NewType
from weakref import WeakValueDictionary

import numpy as np

from . import shape as shapes
from . import winograd
from .dtype import (
    BFLOAT16,
    BOOL,
    DTYPES,
    FLOAT16,
    FLOAT32,
    INT8,
    INT32,
    INT64,
    UINT8,
    DType,
    dtype_of,
)
from .errors import ShapeError, UnsupportedError
from .shape import Dim, Shape, dim, same

UNARY = frozenset(
    "neg abs exp log sin cos tanh erf sqrt floor ceil round trunc not isnan cast bitcast".split()
)
BINARY = frozenset("add sub mul div mod pow max min and or xor shl shr eq ne lt le".split())
ELEMENTWISE = UNARY | BINARY | {"where"}
VIEWS = frozenset(("reshape", "permute", "expand", "slice", "pad"))
CONTROL = frozenset(("if", "loop"))
TO_BOOL = frozenset(("eq", "ne", "lt", "le", "isnan"))
FLOAT_ONLY = frozenset("exp log sin cos tanh erf sqrt floor ceil round trunc pow isnan".split())
INT_ONLY = frozenset("and or xor not shl shr".split())
REDUCTIONS = frozenset(("sum", "prod", "max", "min"))
OPS = ELEMENTWISE | VIEWS | CONTROL | frozenset(
    "input const iota reduce contract winograd_in winograd_out concat gather scatter sort result"
    .split()
)

Form = tuple[int, tuple[tuple[int, int], ...]]
"""An affine form: (constant, ((index number, coefficient), ...))."""


class Node:
    """One value (see the grammar); made by `node` and the constructors below only."""

    __slots__ = ("op", "inputs", "attrs", "shape", "dtype", "source", "__weakref__")
    op: str
    inputs: tuple[Node, ...]
    attrs: tuple[tuple[str, Any], ...]
    shape: Shape
    dtype: DType
    source: str

    def __getitem__(self, attribute: str) -> Any:
        for k, v in self.attrs:
            if k == attribute:
                return v
        raise KeyError(attribute)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def value(self) -> np.ndarray[Any, Any]:
        """A const's array (read-only)."""
        array: np.ndarray[Any, Any] = self["value"].array
        return array

    def __repr__(self) -> str:
        return f"<{self.op} {self.dtype.name}{shapes.show(self.shape)} {self.source}>"


class _Held:
    """A const's array, hashed by content where that is cheap and by identity where it is not."""

    __slots__ = ("array", "key")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        small = array.nbytes <= 1 << 16
        digest = blake2b(array.tobytes(), digest_size=16).digest() if small else id(array)
        self.key = (array.shape, array.dtype.str, digest)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.key == other.key


_table: WeakValueDictionary[Any, Node] = WeakValueDictionary()


def node(
    op: str, inputs: Sequence[Node], shape: Shape, dtype: DType, source: str = "", **attrs: Any
) -> Node:
    """The one node with these parts; ``source`` defaults to the first input's that has one."""
    items = tuple(sorted(attrs.items()))
    key = (op, tuple(inputs), items, shape, dtype)
    found = _table.get(key)
    if found is not None:
        return found
    n = Node.__new__(Node)
    n.op, n.inputs, n.attrs, n.shape, n.dtype = op, tuple(inputs), items, shape, dtype
    n.source = source or _source or next((i.source for i in inputs if i.source), "")
    _table[key] = n
    return n


_source = ""


class naming:
    """``with naming("conv1"):`` gives the nodes made inside that source name."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __enter__(self) -> None:
        global _source
        self.before, _source = _source, self.source

    def __exit__(self, *_: object) -> None:
        global _source
        _source = self.before


def _fail(n: str, text: str) -> ShapeError:
    where = f"node '{_source}': " if _source else ""
    return ShapeError(f"{where}{n}: {text}")


# leaves

def placeholder(name: str, shape: Sequence[Dim], dtype: DType) -> Node:
    """A graph's input."""
    return node("input", (), tuple(dim(d) for d in shape), dtype, name, name=name)


def const(value: Any, dtype: DType | None = None) -> Node:
    """A constant from a numpy array, scalar or nested list."""
    array = np.asarray(value, dtype=None if dtype is None else dtype.numpy)
    kind = BFLOAT16 if dtype is BFLOAT16 else dtype_of(array)
    if array.flags.writeable or not array.flags.c_contiguous:
        array = np.array(array, order="C", copy=True)
        array.flags.writeable = False
    return node("const", (), array.shape, kind, value=_Held(array))


def full(shape: Shape, value: Any, dtype: DType) -> Node:
    """A tensor with one value everywhere, stored once."""
    return expand(const(np.array(value, dtype.numpy)), shape)


def iota(shape: Sequence[Dim], axis: int) -> Node:
    """int64 tensor whose elements are their index along `axis`."""
    return node("iota", (), tuple(shape), INT64, axis=axis)


# elementwise

def elementwise(op: str, *xs: Node) -> Node:
    """An elementwise node; operands are broadcast (types must already agree)."""
    where = op == "where"
    kinds = {x.dtype for x in (xs[1:] if where else xs)}
    if len(kinds) != 1 or where and xs[0].dtype is not BOOL:
        raise _fail(op, f"operands have different types {[x.dtype.name for x in xs]}")
    t = kinds.pop()
    if op in FLOAT_ONLY and not t.is_float or op in INT_ONLY and t.is_float:
        raise UnsupportedError(f"{op} is not defined for {t.name} (node '{_source}')")
    try:
        shape = shapes.broadcast(*(x.shape for x in xs))
    except ShapeError as error:
        raise _fail(op, str(error)) from None
    return node(op, [expand(x, shape) for x in xs], shape, BOOL if op in TO_BOOL else t)


def _unary(op: str) -> Callable[[Node], Node]:
    return lambda x: elementwise(op, x)


def _binary(op: str) -> Callable[[Node, Node], Node]:
    return lambda a, b: elementwise(op, a, b)


neg, abs_, exp, log, sin, cos, tanh, erf, sqrt, floor, ceil, round_, trunc, not_, isnan = (
    _unary(o) for o in
    "neg abs exp log sin cos tanh erf sqrt floor ceil round trunc not isnan".split()
)
add, sub, mul, div, mod, pow_, maximum, minimum, and_, or_, xor, shl, shr, eq, ne, lt, le = (
    _binary(o) for o in
    "add sub mul div mod pow max min and or xor shl shr eq ne lt le".split()
)


def where(c: Node, a: Node, b: Node) -> Node:
    """a where c holds, else b."""
    return elementwise("where", c, a, b)


def cast(x: Node, dtype: DType) -> Node:
    return x if x.dtype is dtype else node("cast", (x,), x.shape, dtype)


def bitcast(x: Node, dtype: DType) -> Node:
    """The same bits under another type of the same width."""
    if x.dtype.bits != dtype.bits:
        raise _fail("bitcast", f"{x.dtype} and {dtype} differ in width")
    return x if x.dtype is dtype else node("bitcast", (x,), x.shape, dtype)


def like(x: Node, value: float | int | bool) -> Node:
    """A scalar constant of x's type, to be broadcast against x."""
    return const(np.array(value, x.dtype.numpy))


# reductions

def normal_axis(axis: int, rank: int) -> int:
    """`axis` counted from the front; ShapeError when out of range."""
    if not -rank <= axis < max(rank, 1):
        raise _fail("axis", f"{axis} is out of range for rank {rank}")
    return axis % rank if rank else 0


def reduce(kind: str, x: Node, axes: Iterable[int], keep: bool = True) -> Node:
    """Fold `axes` by sum, prod, max or min; `keep` leaves them with size 1."""
    axes = tuple(sorted({normal_axis(a, x.rank) for a in axes}))
    if not axes or x.rank == 0:
        return x
    shape = tuple(1 if i in axes else d for i, d in enumerate(x.shape))
    out = node("reduce", (x,), shape, x.dtype, kind=kind, axes=axes)
    if keep:
        return out
    return reshape(out, tuple(d for i, d in enumerate(x.shape) if i not in axes))


MIXTURES = {
    (UINT8, INT8): INT32, (FLOAT32, FLOAT16): FLOAT32, (FLOAT32, BFLOAT16): FLOAT32,
    (BFLOAT16, BFLOAT16): FLOAT32,
}
"""Types of a contraction's operands -> of its sums, where these are not all the same."""


def contract(
    a: Node, b: Node, shape: Sequence[Dim], reduce: Sequence[Dim],
    maps: tuple[tuple[Form, ...], ...],
) -> Node:
    """The sum over reduction indices of a[..] * b[..]; see the module's page for `maps`."""
    kind = MIXTURES.get((a.dtype, b.dtype)) or a.dtype
    if a.dtype is not b.dtype and (a.dtype, b.dtype) not in MIXTURES:
        raise _fail("contract", f"operands have different types {a.dtype} and {b.dtype}")
    shape, reduce = tuple(dim(d) for d in shape), tuple(dim(d) for d in reduce)
    extents = shape + reduce
    for x, forms in zip((a, b), maps):
        if len(forms) != x.rank:
            raise _fail("contract", f"{len(forms)} index forms for an operand of rank {x.rank}")
        for d, (c0, terms) in zip(x.shape, forms):
            top = c0 + sum(c * (shapes.upper(extents[i]) - 1) for i, c in terms if c > 0)
            low = c0 + sum(c * (shapes.upper(extents[i]) - 1) for i, c in terms if c < 0)
            if (low < 0 or top >= shapes.upper(d)) and shapes.upper(shapes.size(extents)):
                raise _fail("contract", f"index range {low}..{top} leaves a dimension of size {d}")
    return node("contract", (a, b), shape, kind, reduce=reduce, maps=maps)


# views

def reshape(x: Node, shape: Sequence[Dim]) -> Node:
    """The same elements in row-major order under another shape (no -1, no 0 meanings)."""
    shape = tuple(dim(d) for d in shape)
    if len(shape) == len(x.shape) and all(same(a, b) for a, b in zip(shape, x.shape)):
        return x
    if not same(shapes.size(shape), shapes.size(x.shape)):
        raise _fail("reshape", f"{shapes.show(x.shape)} and {shapes.show(shape)} differ in size")
    if x.op == "reshape":
        return reshape(x.inputs[0], shape)
    return node("reshape", (x,), shape, x.dtype)


def permute(x: Node, order: Sequence[int]) -> Node:
    """Dimension i of the result is dimension order[i] of x."""
    order = tuple(normal_axis(o, x.rank) for o in order)
    if sorted(order) != list(range(x.rank)):
        raise _fail("permute", f"{order} is not a permutation of {x.rank} dimensions")
    if order == tuple(range(x.rank)):
        return x
    if x.op == "permute":
        return permute(x.inputs[0], [x.inputs[0].rank and x["order"][o] for o in order])
    return node("permute", (x,), tuple(x.shape[o] for o in order), x.dtype, order=order)


def expand(x: Node, shape: Sequence[Dim]) -> Node:
    """Numpy's broadcast of x to `shape` (leading dimensions are added)."""
    shape = tuple(dim(d) for d in shape)
    if len(x.shape) < len(shape):
        x = reshape(x, (1,) * (len(shape) - len(x.shape)) + x.shape)
    if len(x.shape) == len(shape) and all(same(a, b) for a, b in zip(x.shape, shape)):
        return x
    if len(x.shape) > len(shape) or not all(
        same(a, 1) or same(a, b) for a, b in zip(x.shape, shape)
    ):
        raise _fail("expand", f"{shapes.show(x.shape)} does not broadcast to {shapes.show(shape)}")
    return node("expand", (x,), shape, x.dtype)


def slice_(x: Node, begin: Sequence[int], step: Sequence[int], shape: Sequence[Dim]) -> Node:
    """Elements begin + step*i, i below the result's `shape`, of each dimension."""
    begin, step, shape = tuple(begin), tuple(step), tuple(dim(d) for d in shape)
    for b, s, d, n in zip(begin, step, shape, x.shape):
        if isinstance(d, int) and isinstance(n, int) and d:
            if not (0 <= b < n and 0 <= b + s * (d - 1) < n):
                raise _fail("slice", f"{b}+{s}*i leaves a dimension of size {n}")
    if not any(begin) and all(s == 1 for s in step) and \
            all(same(a, b) for a, b in zip(shape, x.shape)):
        return x
    return node("slice", (x,), shape, x.dtype, begin=begin, step=step)


def narrow(x: Node, axis: int, begin: int, count: Dim, step: int = 1) -> Node:
    """`slice_` along one axis."""
    axis = normal_axis(axis, x.rank)
    return slice_(
        x,
        [begin if i == axis else 0 for i in range(x.rank)],
        [step if i == axis else 1 for i in range(x.rank)],
        [count if i == axis else d for i, d in enumerate(x.shape)],
    )


def pad(x: Node, low: Sequence[int], high: Sequence[int], value: float | int = 0) -> Node:
    """Adds constant elements around each dimension; negative amounts crop."""
    if any(p < 0 for p in (*low, *high)):
        crop = [max(0, -p) for p in low]
        kept = [d - c - max(0, -h) for d, c, h in zip(x.shape, crop, high)]
        x = slice_(x, crop, [1] * x.rank, kept)
        low, high = [max(0, p) for p in low], [max(0, p) for p in high]
    if not any(low) and not any(high):
        return x
    shape = tuple(dim(a + d + b) for a, d, b in zip(low, x.shape, high))
    v = const(np.array(value, x.dtype.numpy), x.dtype)["value"]
    return node("pad", (x,), shape, x.dtype, low=tuple(low), high=tuple(high), value=v)


# joining, order

def concat(xs: Sequence[Node], axis: int) -> Node:
    axis = normal_axis(axis, xs[0].rank)
    for x in xs[1:]:
        if x.dtype is not xs[0].dtype or x.rank != xs[0].rank or not all(
            i == axis or same(a, b) for i, (a, b) in enumerate(zip(x.shape, xs[0].shape))
        ):
            raise _fail("concat", f"{x} does not fit {xs[0]} along axis {axis}")
    xs = [x for x in xs if not same(x.shape[axis], 0)] or [xs[0]]
    if len(xs) == 1:
        return xs[0]
    total: Dim = 0
    for x in xs:
        total = dim(total + x.shape[axis])
    shape = (*xs[0].shape[:axis], total, *xs[0].shape[axis + 1:])
    return node("concat", xs, shape, xs[0].dtype, axis=axis)


def winograd_in(x: Node, tile: int, taps: Sequence[int]) -> Node:
    """The input transform of F(tile, taps) of x [N, C, *S], which whole tiles must fill."""
    tiles = [dim((s - (r - 1)) // tile) if r > 1 else s for s, r in zip(x.shape[2:], taps)]
    places = prod(winograd.products(tile, r) for r in taps if r > 1)
    if x.rank != 2 + len(taps) or not all(
            r == 1 or winograd.possible(tile, r) and same(t * tile, s - (r - 1))
            for s, t, r in zip(x.shape[2:], tiles, taps)):
        raise _fail("winograd_in", f"{x} is not made of tiles of {tile} for taps {list(taps)}")
    return node("winograd_in", (x,), (places, *x.shape[:2], *tiles), x.dtype,
                tile=tile, taps=tuple(taps))


def winograd_out(v: Node, tile: int, taps: Sequence[int], sizes: Sequence[int]) -> Node:
    """The output transform of F(tile, taps) of products v [products, N, K, *tiles]."""
    places = prod(winograd.products(tile, r) for r in taps if r > 1)
    if v.rank != 3 + len(taps) or v.shape[0] != places or not all(
            same(t, -(-s // tile) if r > 1 else s) for s, t, r in zip(sizes, v.shape[3:], taps)):
        raise _fail("winograd_out", f"{v} does not give {list(sizes)} by tiles of {tile}")
    return node("winograd_out", (v,), (*v.shape[1:3], *sizes), v.dtype, tile=tile, taps=tuple(taps))


def gather(data: Node, indices: Sequence[Node], axis: int = 0) -> Node:
    """Indexes len(indices) adjacent dimensions of data from `axis` on; see the module's page."""
    k = len(indices)
    ints = [cast(i, INT64) for i in indices]
    shape = data.shape[:axis] + ints[0].shape + data.shape[axis + k:]
    return node("gather", (data, *ints), shape, data.dtype, axis=axis)


def scatter(
    data: Node, updates: Node, indices: Sequence[Node], axis: int = 0, kind: str = "set"
) -> Node:
    """A copy of data with the places that `gather` would read set to, or combined with, updates."""
    ints = [cast(i, INT64) for i in indices]
    return node("scatter", (data, updates, *ints), data.shape, data.dtype, axis=axis, kind=kind)


def sort(x: Node, axis: int, descending: bool = False) -> Node:
    """Stable argsort: int64 positions along `axis`."""
    return node("sort", (x,), x.shape, INT64, axis=normal_axis(axis, x.rank), descending=descending)


# control flow

def result(n: Node, index: int, shape: Shape, dtype: DType) -> Node:
    return node("result", (n,), shape, dtype, index=index)


def if_(cond: Node, then: Graph, other: Graph, captures: Sequence[Node]) -> list[Node]:
    """The outputs of one of two graphs, both with the captures as inputs, in order."""
    outs = list(zip(then.outputs.values(), other.outputs.values()))
    for a, b in outs:
        if a.dtype is not b.dtype or a.rank != b.rank or not all(map(same, a.shape, b.shape)):
            raise _fail("if", f"the branches give {a} and {b}; both must have one shape and type")
    branches: dict[str, Any] = {"then": then, "else": other}
    n = node("if", (cond, *captures), (), BOOL, **branches)
    return [result(n, i, a.shape, a.dtype) for i, (a, _) in enumerate(outs)]


def loop(
    trips: Node, cond: Node, carried: Sequence[Node], captures: Sequence[Node], body: Graph,
    limit: Dim,
) -> list[Node]:
    """Runs `body` up to `trips` times; see the module's page."""
    n = node(
        "loop", (trips, cond, *carried, *captures), (), BOOL,
        body=body, carried=len(carried), limit=limit,
    )
    outs = list(body.outputs.values())[1:]
    kept = [result(n, i, x.shape, x.dtype) for i, x in enumerate(carried)]
    for i, x in enumerate(outs[len(carried):], len(carried)):
        kept.append(result(n, i, (limit, *x.shape), x.dtype))
    return kept


# graphs

@dataclass(frozen=True, eq=False)
class Graph:
    """Inputs and outputs by name, in order.

    states: output name -> the input name that receives it on the next run. metadata: the model's
    own key-value pairs.
    """

    inputs: Mapping[str, Node]
    outputs: Mapping[str, Node]
    states: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)

    def nodes(self) -> list[Node]:
        """Every node that the outputs need, operands before their users."""
        return list(walk(self.outputs.values()))


Valid = NewType("Valid", Graph)
"""A graph that `validate` has accepted."""


def walk(roots: Iterable[Node], done: Container[Node] = ()) -> Iterator[Node]:
    """Every node below `roots`, operands first, without recursion; nothing at or below `done`."""
    seen: set[Node] = set()
    stack = [(r, False) for r in reversed(list(roots))]
    while stack:
        n, ready = stack.pop()
        if ready:
            yield n
        elif n not in seen and n not in done:
            seen.add(n)
            stack.append((n, True))
            stack.extend((i, False) for i in reversed(n.inputs) if i not in seen)


def subgraphs(n: Node) -> list[Graph]:
    """The graphs inside a control-flow node."""
    return [v for _, v in n.attrs if isinstance(v, Graph)]


Rule = Callable[[Node], Node | None]


def rewrite(graph: Graph, rules: Mapping[str, Sequence[Rule]]) -> Graph:
    """Applies rules (by operation; "*" for all) bottom-up until none changes a node.

    A rule gets a node whose operands are already rewritten and returns its replacement or None.
    """
    memo: dict[Node, Node] = {}

    def settle(n: Node) -> Node:
        for _ in range(100):
            for rule in (*rules.get(n.op, ()), *rules.get("*", ())):
                with naming(n.source):
                    new = rule(n)
                if new is not None and new is not n:
                    break
            else:
                return n
            # what a rule builds may itself hold nodes that no rule has seen
            n = fixed(new)
        raise AssertionError(f"rewriting {n} does not end")

    def fixed(root: Node) -> Node:
        for n in walk((root,), memo):
            if n not in memo:
                memo[n] = n  # guards against a cycle of rules
                inputs = tuple(memo[i] for i in n.inputs)
                graphs = {k: rewrite(v, rules) for k, v in n.attrs if isinstance(v, Graph)}
                attrs = dict(n.attrs)
                if inputs != n.inputs or any(attrs[k] is not v for k, v in graphs.items()):
                    m = node(n.op, inputs, n.shape, n.dtype, n.source, **{**attrs, **graphs})
                else:
                    m = n
                memo[n] = memo[m] = settle(m)
        return memo[root]

    outputs = {k: fixed(v) for k, v in graph.outputs.items()}
    if all(outputs[k] is v for k, v in graph.outputs.items()):
        return graph
    return Graph(graph.inputs, outputs, graph.states, graph.name, graph.metadata)


def validate(graph: Graph) -> Valid:
    """Checks every node against the grammar; the error names the first bad one."""
    known = set(graph.inputs.values())
    for n in graph.nodes():
        with naming(n.source):
            _check(n)
            if n.op == "input" and n not in known:
                raise _fail("input", f"'{n['name']}' is not an input of the graph")
            for g in subgraphs(n):
                validate(g)
    for out, into in graph.states.items():
        a, b = graph.outputs.get(out), graph.inputs.get(into)
        if a is None or b is None:
            raise ShapeError(f"state {out}={into}: no such {'output' if a is None else 'input'}")
        if a.dtype is not b.dtype or a.rank != b.rank or not all(map(same, a.shape, b.shape)):
            raise ShapeError(f"state {out}={into}: {a} and {b} differ in shape or type")
    return Valid(graph)


def _check(n: Node) -> None:
    if n.op not in OPS:
        raise UnsupportedError(f"node '{n.source}': {n.op} is not an operation of the tensor IR")
    if n.dtype.name not in DTYPES and n.dtype is not BFLOAT16:
        raise UnsupportedError(f"node '{n.source}': element type {n.dtype} is unknown")
    if n.op in ELEMENTWISE:
        count = 3 if n.op == "where" else 2 if n.op in BINARY else 1
        if len(n.inputs) != count:
            raise _fail(n.op, f"{len(n.inputs)} operands instead of {count}")
        for i in n.inputs:
            if i.rank != n.rank or not all(map(same, i.shape, n.shape)):
                raise _fail(n.op, f"operand {i} has not the node's shape {shapes.show(n.shape)}")
    elif n.op == "reduce":
        if n["kind"] not in REDUCTIONS or any(not same(n.shape[a], 1) for a in n["axes"]):
            raise _fail(n.op, f"bad kind or axes {n.attrs}")
    elif n.op == "reshape":
        if not same(shapes.size(n.shape), shapes.size(n.inputs[0].shape)):
            raise _fail(n.op, f"{n.inputs[0]} and {n} differ in size")
    elif n.op in ("gather", "scatter"):
        first = 1 if n.op == "gather" else 2
        ints = n.inputs[first:]
        if not ints or any(i.dtype is not INT64 or i.shape != ints[0].shape for i in ints):
            raise _fail(n.op, "indices must be int64 tensors of one shape")
        if n["axis"] + len(ints) > n.inputs[0].rank:
            raise _fail(n.op, "more indices than dimensions")
    elif n.op == "loop":
        if len(n["body"].outputs) < 1 + n["carried"]:
            raise _fail(n.op, "the body has fewer outputs than carried values")
        _check_body(n, n["body"], [None, *n.inputs[2:]])
    elif n.op == "if":
        for branch in (n["then"], n["else"]):
            _check_body(n, branch, n.inputs[1:])


def _check_body(n: Node, body: Graph, given: Sequence[Node | None]) -> None:
    """The body's inputs must take what control flow gives them (None: the number of the turn)."""
    takes = list(body.inputs.values())
    if len(takes) != len(given):
        raise _fail(n.op, f"a body takes {len(takes)} inputs and is given {len(given)}")
    for x, y in zip(takes, given):
        kind, shape = (INT64, ()) if y is None else (y.dtype, y.shape)
        if x.dtype is not kind or len(x.shape) != len(shape) or not all(map(same, x.shape, shape)):
            raise _fail(n.op, f"input {x} of a body is given {y or 'the number of the turn'}")
