"""The tensor IR in numpy: what `tinyedge.graph`'s page means, and the oracle for all that follows.

Passes and back ends are compared with it; constant folding uses it. Intermediates are freed after
their last use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from . import winograd
from .codegen.ir import Expr
from .errors import InputError
from .graph import Form, Graph, Node, walk
from .shape import Dim, evaluate, show

Array = npt.NDArray[Any]
Symbols = dict[str, int]
LARGEST = 1 << 25
"""Elements that one unfolded operand of a contraction may have; larger ones are done in parts."""


def interpret(
    graph: Graph, inputs: Mapping[str, Array], exact: bool = False
) -> dict[str, Array]:
    """The graph's outputs for `inputs` (arrays of the inputs' shapes and types, by name).

    Symbolic dimensions take their values from the inputs' shapes. `exact` makes contractions
    accumulate float32 in float64. InputError for a wrong name, shape or type.
    """
    wrong = sorted(set(inputs) ^ set(graph.inputs))
    if wrong:
        kind = "missing" if wrong[0] in graph.inputs else "unknown"
        raise InputError(f"input '{wrong[0]}' is {kind}; the inputs are {list(graph.inputs)}")
    symbols: Symbols = {}
    arrays = {k: np.asarray(v) for k, v in inputs.items()}
    for k, x in graph.inputs.items():
        _bind(k, x, arrays[k], symbols)
    for k, x in graph.inputs.items():
        if tuple(evaluate(d, symbols) for d in x.shape) != arrays[k].shape:
            raise InputError(f"input '{k}': shape {arrays[k].shape} is not {show(x.shape)}")
    with np.errstate(all="ignore"):
        return _run(graph, [arrays[k] for k in graph.inputs], symbols, exact)


def evaluate_constant(n: Node) -> Array:
    """The value of a node that depends on constants only, without symbolic dimensions."""
    with np.errstate(all="ignore"):
        return _run(Graph({}, {"": n}), [], {}, False)[""]


def _bind(name: str, x: Node, array: Array, symbols: Symbols) -> None:
    if array.dtype != x.dtype.numpy:
        raise InputError(f"input '{name}': type {array.dtype} is not {x.dtype}")
    if array.ndim != x.rank:
        raise InputError(f"input '{name}': shape {array.shape} is not {show(x.shape)}")
    for d, n in zip(x.shape, array.shape):
        if isinstance(d, Expr) and d.op == "var":
            if not d.lo <= n <= d.hi or symbols.setdefault(d.attr[0], n) != n:
                raise InputError(
                    f"input '{name}': dimension {d.attr[0]} = {n} is not within {d.lo}..{d.hi} "
                    "or differs from another input's"
                )


class _Frame:
    """What one evaluation of a graph knows besides a node's operands."""

    def __init__(self, symbols: Symbols, exact: bool, arguments: dict[Node, Array]) -> None:
        self.symbols, self.exact, self.arguments = symbols, exact, arguments

    def shape(self, dims: tuple[Dim, ...]) -> tuple[int, ...]:
        return tuple(evaluate(d, self.symbols) for d in dims)


def _run(graph: Graph, inputs: list[Array], symbols: Symbols, exact: bool) -> dict[str, Array]:
    frame = _Frame(symbols, exact, dict(zip(graph.inputs.values(), inputs)))
    order = list(walk(graph.outputs.values()))
    uses: dict[Node, int] = {}
    for used in [*graph.outputs.values(), *(i for n in order for i in n.inputs)]:
        uses[used] = uses.get(used, 0) + 1
    values: dict[Node, Any] = {}
    for n in order:
        value = RULES[n.op](frame, n, *(values[i] for i in n.inputs))
        # numpy makes scalars of zero-dimensional arrays; control flow gives lists
        values[n] = value if isinstance(value, list) else np.asarray(value)
        for i in n.inputs:
            uses[i] -= 1
            if not uses[i]:
                del values[i]
    return {k: np.ascontiguousarray(values[v]).reshape(frame.shape(v.shape))
            for k, v in graph.outputs.items()}


Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
"""For each operation: (frame, node, operands...) -> value."""


def rule(op: str) -> Callable[[Rule], Rule]:
    def register(f: Rule) -> Rule:
        RULES[op] = f
        return f
    return register


# leaves

@rule("input")
def _input(f: _Frame, n: Node) -> Array:
    return f.arguments[n]


@rule("const")
def _const(f: _Frame, n: Node) -> Array:
    return n.value


@rule("iota")
def _iota(f: _Frame, n: Node) -> Array:
    shape = f.shape(n.shape)
    count = np.arange(shape[n["axis"]], dtype=np.int64)
    return np.broadcast_to(count.reshape((-1,) + (1,) * (n.rank - 1 - n["axis"])), shape)


# elementwise

def _erf(x: Array) -> Array:
    values = map(math.erf, x.ravel().tolist())
    return np.fromiter(values, np.float64, x.size).reshape(x.shape).astype(x.dtype)


def _div(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return np.divide(a, b)
    quotient = np.floor_divide(a, b)
    if a.dtype.kind == "i":
        quotient += ((a < 0) != (b < 0)) & (quotient * b != a) & (b != 0)
    return quotient


def _lossless(f: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """`f` made in float64, so that float32 results are the nearest there are."""
    def g(x: Array) -> Array:
        return f(x.astype(np.float64)).astype(x.dtype)
    return g


FUNCTIONS: dict[str, Callable[..., Array]] = {
    "neg": np.negative, "abs": np.abs, "floor": np.floor, "ceil": np.ceil, "round": np.rint,
    "trunc": np.trunc, "sqrt": np.sqrt, "not": np.invert, "isnan": np.isnan, "erf": _erf,
    **{k: _lossless(getattr(np, k)) for k in ("exp", "log", "sin", "cos", "tanh")},
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _div, "mod": np.mod,
    "pow": np.power, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "shl": np.left_shift, "shr": np.right_shift,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "where": np.where,
}


def _elementwise(function: Callable[..., Array]) -> Rule:
    return lambda f, n, *xs: function(*xs)


RULES.update({k: _elementwise(v) for k, v in FUNCTIONS.items()})


@rule("cast")
def _cast(f: _Frame, n: Node, x: Array) -> Array:
    return x.astype(n.dtype.numpy)


@rule("bitcast")
def _bitcast(f: _Frame, n: Node, x: Array) -> Array:
    return np.ascontiguousarray(x).reshape(x.shape).view(n.dtype.numpy)


# reductions

@rule("reduce")
def _reduce(f: _Frame, n: Node, x: Array) -> Array:
    ufunc = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[n["kind"]]
    if n["kind"] in ("sum", "prod"):
        wide = np.float64 if n.dtype.is_float else x.dtype
        total = ufunc.reduce(x, axis=n["axes"], keepdims=True, dtype=wide)
        return np.asarray(total).astype(x.dtype)
    least: Any = None
    if n.dtype.is_float:
        least = -np.inf if n["kind"] == "max" else np.inf
    else:
        least = n.dtype.limits[0 if n["kind"] == "max" else 1]
    return np.asarray(ufunc.reduce(x, axis=n["axes"], keepdims=True, initial=least))


def _view(x: Array, forms: tuple[Form, ...], extents: tuple[int, ...]) -> Array:
    """x read at its index forms: one dimension for each index, of size 1 where it has no part."""
    x = np.ascontiguousarray(x).reshape(x.shape)
    offset, steps = 0, [0] * len(extents)
    for stride, (constant, terms) in zip(x.strides, forms):
        offset += constant * stride
        for index, factor in terms:
            steps[index] += factor * stride
    if not x.size or not math.prod(extents):
        return np.zeros(extents, x.dtype)
    used = {i for _, terms in forms for i, _ in terms}
    sizes = [d if i in used else 1 for i, d in enumerate(extents)]
    return np.ndarray(sizes, x.dtype, x, offset, steps)


@rule("contract")
def _contract(f: _Frame, n: Node, a: Array, b: Array) -> Array:
    shape, over = f.shape(n.shape), f.shape(n["reduce"])
    kind = n.dtype.numpy
    if n.dtype.is_float:
        wide = np.float64 if f.exact or kind == np.float64 else np.float32
        a, b = a.astype(wide, copy=False), b.astype(wide, copy=False)
    elif a.dtype != b.dtype:
        a, b = a.astype(kind), b.astype(kind)
    va, vb = (_view(x, forms, shape + over) for x, forms in zip((a, b), n["maps"]))
    out = _product(va, vb, len(shape), shape + over)
    return np.broadcast_to(out, shape).astype(kind)


def _product(a: Array, b: Array, rank: int, extents: tuple[int, ...]) -> Array:
    """The sum of a * b over all dimensions from `rank` on; both have a dimension an index."""
    every = range(len(extents))
    both = [i for i in every if i < rank and a.shape[i] > 1 and b.shape[i] > 1]
    left = [i for i in every if i < rank and a.shape[i] > 1 and b.shape[i] == 1]
    right = [i for i in every if i < rank and a.shape[i] == 1 and b.shape[i] > 1]
    if a.size > LARGEST or b.size > LARGEST:
        free = max((i for i in every if i < rank), key=lambda i: max(a.shape[i], b.shape[i]))
        if max(a.shape[free], b.shape[free]) > 1:
            count = max(a.shape[free], b.shape[free])
            parts = []
            for part in (slice(0, count // 2), slice(count // 2, count)):
                at = (slice(None),) * free + (part,)
                x, y = (v[at] if v.shape[free] > 1 else v for v in (a, b))
                parts.append(_product(x, y, rank, extents))
            return np.concatenate(parts, axis=free)
    # an index that only one operand has is summed there, and one that none has multiplies
    factor = 1
    for i in every[rank:]:
        if a.shape[i] == 1 and b.shape[i] == 1:
            factor *= extents[i]
        elif a.shape[i] == 1:
            b = b.sum(axis=i, keepdims=True, dtype=b.dtype)
        elif b.shape[i] == 1:
            a = a.sum(axis=i, keepdims=True, dtype=a.dtype)
    over = [i for i in every[rank:] if a.shape[i] > 1]

    def matrix(x: Array, rows: list[int], columns: list[int]) -> Array:
        order = [*both, *rows, *columns]
        x = x.transpose([*order, *(i for i in every if i not in order)])
        sizes = [x.shape[: len(both)], x.shape[len(both):][: len(rows)],
                 x.shape[len(both) + len(rows):]]
        return x.reshape([math.prod(s) for s in sizes])

    if 0 in a.shape or 0 in b.shape:
        return np.zeros([max(p, q) if p and q else 0 for p, q in zip(a.shape[:rank], b.shape)],
                        a.dtype)
    out: Array = np.matmul(matrix(a, left, over), matrix(b, over, right))
    order = [*both, *left, *right]
    out = out.reshape([max(a.shape[i], b.shape[i]) for i in order] + [1] * (rank - len(order)))
    order += [i for i in range(rank) if i not in order]
    out = out.transpose([order.index(i) for i in range(rank)])
    return out if factor == 1 else out * np.asarray(factor, out.dtype)


# views

@rule("winograd_in")
def _winograd_in(f: _Frame, n: Node, x: Array) -> Array:
    return winograd.spread_array(x, n["tile"], n["taps"])


@rule("winograd_out")
def _winograd_out(f: _Frame, n: Node, v: Array) -> Array:
    return winograd.collect_array(v, n["tile"], n["taps"], f.shape(n.shape)[2:])


@rule("reshape")
def _reshape(f: _Frame, n: Node, x: Array) -> Array:
    return x.reshape(f.shape(n.shape))


@rule("permute")
def _permute(f: _Frame, n: Node, x: Array) -> Array:
    return x.transpose(n["order"])


@rule("expand")
def _expand(f: _Frame, n: Node, x: Array) -> Array:
    return np.broadcast_to(x, f.shape(n.shape))


@rule("slice")
def _slice(f: _Frame, n: Node, x: Array) -> Array:
    ranges = []
    for b, s, d in zip(n["begin"], n["step"], f.shape(n.shape)):
        end = b + s * d
        ranges.append(slice(b, end if end >= 0 else None, s) if d else slice(0, 0))
    return x[tuple(ranges)]


@rule("pad")
def _pad(f: _Frame, n: Node, x: Array) -> Array:
    out = np.full(f.shape(n.shape), n["value"].array, x.dtype)
    out[tuple(slice(p, p + d) for p, d in zip(n["low"], x.shape))] = x
    return out


# joining, order

@rule("concat")
def _concat(f: _Frame, n: Node, *xs: Array) -> Array:
    return np.concatenate(xs, axis=n["axis"])


def _places(x: Array, axis: int, indices: tuple[Array, ...]) -> tuple[Any, ...]:
    sizes = x.shape[axis:axis + len(indices)]
    found = [np.clip(np.where(i < 0, i + d, i), 0, max(d - 1, 0)) for i, d in zip(indices, sizes)]
    return (slice(None),) * axis + tuple(found)


@rule("gather")
def _gather(f: _Frame, n: Node, x: Array, *indices: Array) -> Array:
    if not x.size:
        return np.zeros(f.shape(n.shape), x.dtype)
    out: Array = x[_places(x, n["axis"], indices)]
    return out


@rule("scatter")
def _scatter(f: _Frame, n: Node, x: Array, updates: Array, *indices: Array) -> Array:
    out = x.copy()
    at = _places(x, n["axis"], indices)
    if n["kind"] == "set":
        out[at] = updates
    else:
        ufunc: Any = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
        ufunc[n["kind"]].at(out, at, updates)
    return out


@rule("sort")
def _sort(f: _Frame, n: Node, x: Array) -> Array:
    axis = n["axis"]
    if not n["descending"]:
        return np.argsort(x, axis=axis, kind="stable")
    if x.dtype.kind == "f":
        return np.argsort(-x, axis=axis, kind="stable")  # nan stays last
    # equal elements keep their order when a reversed ascending order is read backwards
    order: Array = np.argsort(np.flip(x, axis), axis=axis, kind="stable")
    out: Array = x.shape[axis] - 1 - np.flip(order, axis)
    return out


# control flow: a value of these is a list of results

@rule("if")
def _if(f: _Frame, n: Node, cond: Array, *captures: Array) -> list[Array]:
    branch: Graph = n["then"] if cond.reshape(()) else n["else"]
    return list(_run(branch, list(captures), f.symbols, f.exact).values())


@rule("loop")
def _loop(f: _Frame, n: Node, trips: Array, cond: Array, *rest: Array) -> list[Array]:
    body: Graph = n["body"]
    count, limit = n["carried"], f.shape((n["limit"],))[0]
    carried, captures = list(rest[:count]), list(rest[count:])
    stacks = [np.zeros((limit, *f.shape(x.shape)), x.dtype.numpy)
              for x in list(body.outputs.values())[1 + count:]]
    going = bool(cond.reshape(()))
    for i in range(min(int(trips.reshape(())), limit)):
        if not going:
            break
        step = np.array(i, np.int64)
        done = list(_run(body, [step, *carried, *captures], f.symbols, f.exact).values())
        going, carried = bool(done[0].reshape(())), done[1:1 + count]
        for stack, x in zip(stacks, done[1 + count:]):
            stack[i] = x
    return carried + stacks


@rule("result")
def _result(f: _Frame, n: Node, results: list[Array]) -> Array:
    index: int = n["index"]
    return results[index]
