"""What is known of integer tensors while importing: numbers, and symbolic dimensions.

Models compute shapes by tensor operations (Shape, Gather, Concat, ...). Where the result follows
from the shapes alone it is worked out here, from the tensor IR itself, so that no operator needs to
know about it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ..codegen import symbolic
from ..codegen.symbolic import lift
from ..dtype import DType
from ..graph import Node
from ..shape import Dim, Expr, dim, is_static, size, static

Known = npt.NDArray[np.object_]
"""Elements: int, bool or Expr."""
LARGEST = 1024


class Unknown(Exception):
    """The value depends on data, or has no closed form."""


def know(n: Node, memo: dict[Node, Known | None]) -> Known | None:
    """The value of an integer or boolean tensor of few elements, or None."""
    stack = [n]
    while stack:  # not by recursion: a model's chains may be long
        x = stack[-1]
        waiting = [i for i in x.inputs if i not in memo and _small(i)] \
            if x not in memo and _small(x) else []
        if waiting:
            stack += waiting
            continue
        stack.pop()
        if x not in memo:
            memo[x] = _value(x, memo)
    return memo[n]


def _small(n: Node) -> bool:
    return n.op in RULES and is_static(n.shape) and prod(static(n.shape)) <= LARGEST


def _value(n: Node, memo: dict[Node, Known | None]) -> Known | None:
    if not _small(n):
        return None
    try:
        found = RULES[n.op](n, lambda x: _operand(x, memo))
        return np.asarray(found, object).reshape(static(n.shape))
    except Unknown:
        return None


def _operand(x: Node, memo: dict[Node, Known | None]) -> Known:
    value = know(x, memo)
    if value is None:
        raise Unknown
    return value


Operand = Callable[[Node], Known]


def _const(n: Node, of: Operand) -> Known:
    whole = n.value
    if n.dtype.is_float:
        # scales of shapes are floats with whole values now and then
        if not np.all(np.isfinite(whole)) or np.any(whole != np.rint(whole)):
            raise Unknown
        whole = whole.astype(np.int64)
    return whole.astype(object)


def _reduce(n: Node, of: Operand) -> Any:
    x = n.inputs[0]
    if n["kind"] == "sum" and x.op == "expand" and len(n["axes"]) == x.rank:
        # as many ones as a dimension has elements: `registry.extent`
        ones = of(x.inputs[0])
        if ones.size == 1 and ones.ravel()[0] == 1:
            return np.array(size(x.shape), object)
    fold = {"sum": _add, "prod": _mul, "max": _max, "min": _min}[n["kind"]]
    return np.frompyfunc(fold, 2, 1).reduce(of(x), axis=n["axes"], keepdims=True)


def _add(a: Dim, b: Dim) -> Dim:
    return dim(a + b)


def _mul(a: Dim, b: Dim) -> Dim:
    return dim(a * b)


def _max(a: Dim, b: Dim) -> Dim:
    return dim(symbolic.maximum(a, b))


def _min(a: Dim, b: Dim) -> Dim:
    return dim(symbolic.minimum(a, b))


def _quotient(kind: DType) -> Callable[[Dim, Dim], Dim]:
    def divide(a: Dim, b: Dim) -> Dim:
        if isinstance(a, int) and isinstance(b, int) and b:
            if kind.is_float and a % b:
                raise Unknown
            return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        if lift(a).lo < 0 or lift(b).lo <= 0:
            raise Unknown
        if kind.is_float and dim(symbolic.mod(a, b)) != 0:
            raise Unknown
        return dim(symbolic.floordiv(a, b))
    return divide


def _remainder(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int) and b:
        return a % b
    if lift(b).lo <= 0:
        raise Unknown
    return dim(symbolic.mod(a, b))


def _decide(low: bool, difference: Dim) -> bool:
    """Whether a difference is 0 (or, with `low`, at most 0), where its bounds tell."""
    e = lift(difference)
    if low:
        if e.hi <= 0 or e.lo > 0:
            return e.hi <= 0
    elif e.lo > 0 or e.hi < 0 or e.lo == e.hi == 0:
        return e.lo == e.hi == 0
    raise Unknown


def _binary(n: Node, of: Operand) -> Any:
    f: dict[str, Callable[[Any, Any], Any]] = {
        "add": _add, "sub": lambda a, b: dim(a - b), "mul": _mul, "max": _max, "min": _min,
        "div": _quotient(n.dtype), "mod": _remainder,
        "eq": lambda a, b: _decide(False, a - b), "ne": lambda a, b: not _decide(False, a - b),
        "le": lambda a, b: _decide(True, a - b), "lt": lambda a, b: not _decide(True, b - a),
        "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    }
    a, b = map(of, n.inputs)
    if n.op in ("and", "or", "xor") and any(isinstance(v, Expr) for v in (*a.flat, *b.flat)):
        raise Unknown
    return np.frompyfunc(f[n.op], 2, 1)(a, b)


def _where(n: Node, of: Operand) -> Any:
    c, a, b = map(of, n.inputs)
    return np.where(c.astype(bool), a, b)


def _cast(n: Node, of: Operand) -> Any:
    x = of(n.inputs[0])
    if n.dtype.kind == "b":
        return np.frompyfunc(lambda v: not _decide(False, v), 1, 1)(x)
    low, high = n.dtype.limits if n.dtype.is_int else (-1 << 63, 1 << 63)
    v: Any
    for v in x.flat:
        if not isinstance(v, bool) and (lift(v).lo < low or lift(v).hi > high):
            raise Unknown
    return np.frompyfunc(lambda v: int(v) if isinstance(v, bool) else v, 1, 1)(x)


def _slice(n: Node, of: Operand) -> Any:
    x = of(n.inputs[0])
    for axis, (b, s, d) in enumerate(zip(n["begin"], n["step"], static(n.shape))):
        x = x.take([b + s * i for i in range(d)], axis)
    return x


def _gather(n: Node, of: Operand) -> Any:
    x, axis = of(n.inputs[0]), n["axis"]
    places: list[Any] = [slice(None)] * axis
    for k, i in enumerate(n.inputs[1:]):
        index = of(i)
        if any(isinstance(v, Expr) for v in index.flat):
            raise Unknown
        d = x.shape[axis + k]
        places.append(np.clip(np.where(index < 0, index + d, index).astype(np.int64), 0, d - 1))
    return x[tuple(places)]


def _not(n: Node, of: Operand) -> Any:
    if n.dtype.kind != "b":
        raise Unknown
    return np.frompyfunc(lambda v: not v, 1, 1)(of(n.inputs[0]))


def _same(n: Node, of: Operand) -> Any:
    return of(n.inputs[0])


RULES: dict[str, Callable[[Node, Operand], Any]] = {
    "const": _const, "reduce": _reduce, "where": _where, "cast": _cast, "slice": _slice,
    "gather": _gather, "not": _not, "floor": _same, "ceil": _same, "round": _same, "trunc": _same,
    "reshape": _same,
    "iota": lambda n, of: np.indices(static(n.shape))[n["axis"]].astype(object),
    "permute": lambda n, of: of(n.inputs[0]).transpose(n["order"]),
    "expand": lambda n, of: np.broadcast_to(of(n.inputs[0]), static(n.shape)),
    "concat": lambda n, of: np.concatenate([of(i) for i in n.inputs], n["axis"]),
    "neg": lambda n, of: np.frompyfunc(lambda v: dim(0 - v), 1, 1)(of(n.inputs[0])),
    **dict.fromkeys("add sub mul max min div mod eq ne le lt and or xor".split(), _binary),
}
