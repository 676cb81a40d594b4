"""Contractions of quantised values become products of 8-bit integers.

Afterwards: a contraction of `x - zero` or of `(x - zero) * scale`, x of 8 bits, with weights that
are whole multiples of one step for each output, is a contraction of uint8 and int8 with int32 sums;
what the zero point adds to every sum is taken off again, and scales stand behind it. Runs after the
passes that move constants, as those gather the scales in the weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import graph as g
from ..dtype import FLOAT32, INT8, INT32, UINT8
from ..graph import Form, Graph, Node
from ..interpreter import evaluate_constant
from ..shape import is_static, size
from .fold import core

Array = np.ndarray[Any, np.dtype[Any]]


def _one(n: Node) -> float | None:
    """The value of a constant that is one number."""
    c = core(n)
    if c is None or not c.value.size or (c.value != c.value.reshape(-1)[0]).any():
        return None
    return float(c.value.reshape(-1)[0])


def quantised(x: Node) -> tuple[Node, float, float] | None:
    """(q, zero, scale) with x = (q - zero) * scale, q of 8 bits."""
    scale, zero = 1.0, 0.0
    if x.op == "mul" and (s := _one(x.inputs[1])) is not None:
        x, scale = x.inputs[0], s
    if x.op == "cast" and x.inputs[0].dtype in (INT32, FLOAT32) and x.inputs[0].op in (
            "sub", "add"):
        x = x.inputs[0]
    if x.op in ("sub", "add") and (z := _one(x.inputs[1])) is not None:
        x, zero = x.inputs[0], z if x.op == "sub" else -z
    while x.op == "cast" and x.inputs[0].dtype in (INT32, UINT8, INT8):
        x = x.inputs[0]
    if x.dtype not in (UINT8, INT8) or zero != round(zero):
        return None
    return x, zero, scale


def steps(w: Array, axis: int) -> tuple[Array, Array] | None:
    """(int8 weights, step of each output) with w = integers * steps along `axis`."""
    rows = np.moveaxis(w, axis, 0).reshape(w.shape[axis], -1).astype(np.float64)
    top = np.abs(rows).max(1)
    for most in (127, 128, *range(126, 0, -1)):
        step = np.where(top > 0, top / most, 1.0)
        whole = rows / step[:, None]
        near = np.rint(whole)
        if np.abs(whole - near).max() < 1e-3 and near.min() >= -128 and near.max() <= 127:
            q = near.reshape(np.moveaxis(w, axis, 0).shape)
            return np.ascontiguousarray(np.moveaxis(q, 0, axis)).astype(np.int8), step
    return None


def value_of(w: Node) -> Array | None:
    """What a node is that depends on constants only, such as weights of 8 bits times their scale,
    which folding does not write out for their size."""
    if not all(n.op == "const" or n.inputs for n in g.walk([w])) or not is_static(w.shape):
        return None
    return w.value if w.op == "const" else evaluate_constant(w)


def integer(n: Node) -> Node | None:
    """contract((x - z) * s, w) -> (contract(x, q) - z sum(q)) * steps"""
    x = n.inputs[0]
    if n.dtype not in (INT32, FLOAT32) or n.inputs[1].dtype is not n.dtype or \
            not is_static((*n.shape, *n["reduce"], *x.shape)):
        return None
    pad = x if x.op == "pad" and not x["value"].array.any() else None
    found = quantised(x.inputs[0] if pad is not None else x)
    if found is None:
        return None
    q, zero, scale = found
    # the output index that numbers the rows of the weights
    rows = [(d, terms[0][0]) for d, (_, terms) in enumerate(n["maps"][1])
            if len(terms) == 1 and terms[0][0] < n.rank and terms[0][1] == 1]
    if len(rows) != 1 or size(n.inputs[1].shape) == 0:
        return None
    axis, out = rows[0]
    fours = next((i for i in range(len(n["reduce"])) if _steps_by_one(n, i)), -1)
    w = value_of(n.inputs[1]) if fours >= 0 else None
    if w is None:
        return None
    step: Array | None
    if n.dtype is INT32:
        if w.min() < -128 or w.max() > 127:
            return None
        weights, step = w.astype(np.int8), None
    else:
        split = steps(w * np.float32(scale), axis)
        if split is None:
            return None
        weights, step = split
    if q.dtype is INT8:  # the products take one operand without a sign
        q = g.cast(g.add(g.cast(q, INT32), g.like(g.cast(q, INT32), 128)), UINT8)
        zero += 128
    if not 0 <= zero <= 255:
        return None
    low = list(pad["low"]) if pad is not None else [0] * q.rank
    high = list(pad["high"]) if pad is not None else [0] * q.rank
    reduce = list(n["reduce"])
    more = -reduce[fours] % 4
    if more:  # made up to whole fours: weights of zero stand there
        data, held = (_moved_by(forms, n.rank + fours) for forms in n["maps"])
        high[data] = high[data] + more
        weights = np.pad(weights, [(0, more if d == held else 0) for d in range(weights.ndim)])
        reduce[fours] += more
    if any((*low, *high)):
        q = g.pad(q, low, high, zero)
    y = g.contract(q, g.const(weights), n.shape, reduce, n["maps"])
    if zero:
        total = _sums(weights, n, axis, out) * int(zero)
        y = g.sub(y, g.expand(g.const(total.astype(np.int32)), y.shape))
    if step is None:
        return y
    shape = [1] * n.rank
    shape[out] = step.size
    return g.mul(g.cast(y, FLOAT32), g.expand(g.const(step.astype(np.float32).reshape(shape)),
                                              y.shape))


def _moved_by(forms: tuple[Form, ...], index: int) -> int:
    """The one dimension that an index moves, or -1."""
    found = [d for d, (_, terms) in enumerate(forms) if any(i == index for i, _ in terms)]
    return found[0] if len(found) == 1 else -1


def _steps_by_one(n: Node, index: int) -> bool:
    """Whether a reduction index numbers one whole dimension of each operand: there, four places are
    multiplied at once. Elsewhere, and where there are fewer than three, float32 is faster."""
    i, extent = n.rank + index, n["reduce"][index]
    at = [_moved_by(forms, i) for forms in n["maps"]]
    return extent >= 3 and min(at) >= 0 and all(
        forms[d] == (0, ((i, 1),)) and x.shape[d] == extent
        for x, forms, d in zip(n.inputs, n["maps"], at))


def _sums(weights: Array, n: Node, axis: int, out: int) -> Array:
    """The sum of the weights over all reduction indices, for each place along the output index
    `out`, which numbers their `axis`."""
    used = {i for _, terms in n["maps"][1] for i, _ in terms}
    total: Array = np.moveaxis(weights, axis, 0).reshape(
        weights.shape[axis], -1).astype(np.int64).sum(1)
    for k, extent in enumerate(n["reduce"]):
        if n.rank + k not in used:
            total = total * int(extent)
    shape = [1] * n.rank
    shape[out] = total.size
    return total.reshape(shape)


def kept(n: Node) -> Node | None:
    """float(8-bit(x)) -> x, for whole numbers x in that type's range: what is quantised and taken
    back at once stays as it is."""
    narrow = n.inputs[0]
    if not n.dtype.is_float or narrow.op != "cast" or narrow.dtype not in (UINT8, INT8) or \
            narrow.inputs[0].dtype is not n.dtype:
        return None
    low, high = -np.inf, np.inf
    x = narrow.inputs[0]
    while x.op in ("min", "max") and (bound := _one(x.inputs[1])) is not None:
        if x.op == "min":
            high = min(high, bound)
        else:
            low = max(low, bound)
        x = x.inputs[0]
    least, most = narrow.dtype.limits
    if x.op == "add" and (shift := _one(x.inputs[1])) is not None and shift == round(shift):
        x = x.inputs[0]
    return narrow.inputs[0] if x.op == "round" and low >= least and high <= most else None


def rescaled(n: Node) -> Node | None:
    """round(x / s) -> round(x * (1 / s)) behind an integer contraction, whose scales are rounded
    already: a division takes longer than all else that is done there."""
    x = n.inputs[0]
    if x.op != "div" or not x.dtype.is_float or (s := _one(x.inputs[1])) is None or not s:
        return None
    stack, seen = [x.inputs[0]], set[Node]()
    while stack:
        y = stack.pop()
        if y.op == "contract" and y.dtype is INT32:
            return g.round_(g.mul(x.inputs[0], g.like(x, 1 / s)))
        if y not in seen and y.op in g.ELEMENTWISE:
            seen.add(y)
            stack.extend(y.inputs)
    return None


def written_out(n: Node) -> Node | None:
    """contract(x, computed from constants) -> contract(x, const)."""
    w = n.inputs[1]
    value = value_of(w) if w.op not in ("const", "expand", "iota") else None
    if value is None:
        return None
    return g.contract(n.inputs[0], g.const(value), n.shape, n["reduce"], n["maps"])


def run(graph: Graph, dots: bool = True) -> Graph:
    """The graph with the rules above applied; without `dots` no contraction becomes integer."""
    graph = g.rewrite(graph, {"contract": [integer, written_out] if dots else [written_out]})
    # only now: a contraction is known by the conversions before it
    return g.rewrite(graph, {"cast": [kept], "round": [rescaled]})
