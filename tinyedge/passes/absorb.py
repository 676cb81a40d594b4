"""Per-channel factors and offsets go into the constant operand of the contraction beside them.

Afterwards: no constant factor stands before or after a contraction with a constant operand where
it could be multiplied into that operand, views and additions between them or not; of offsets, one
addition after the contraction is left. This is how batch normalisation is folded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from .. import graph as g
from ..dtype import BOOL
from ..graph import Form, Graph, Node
from ..interpreter import evaluate_constant
from ..shape import Dim, Shape, is_static, size, static
from .fold import LIMIT, core
from .simplify import Array, array, filled, regroup


def _factors(values: Array, forms: Sequence[Form], n: Node, side: int) -> Array | None:
    """What to multiply the contraction's operand `side` by, to multiply each of its products.

    The product at indices i is to be multiplied by values[forms(i)]; a dimension of `values` of
    size 1 repeats. None where that is not a function of the place in the operand.
    """
    w, extents = n.inputs[side], n.shape + tuple(n["reduce"])
    mine: tuple[Form, ...] = n["maps"][side]
    wanted = {i for d, (_, terms) in zip(values.shape, forms) if d > 1 for i, _ in terms}
    if any(d > 1 and not terms for d, (_, terms) in zip(values.shape, forms)):
        return None
    # every index that shares a dimension of w with one that is wanted
    dims: list[int] = []
    while True:
        found = [j for j, (_, terms) in enumerate(mine) if wanted & {i for i, _ in terms}]
        if found == dims:
            break
        dims = found
        wanted |= {i for j in dims for i, _ in mine[j][1]}
    if not wanted <= {i for j in dims for i, _ in mine[j][1]}:
        return None
    order = sorted(wanted)
    sizes = [extents[i] for i in order]
    if not is_static(sizes) or not is_static(w.shape):
        return None
    grid = dict(zip(order, np.indices(static(sizes))))

    def place(form: Form) -> Any:
        return form[0] + sum(c * grid[i] for i, c in form[1])

    at = tuple(place(f) if d > 1 else 0 for d, f in zip(values.shape, forms))
    into = tuple(place(mine[j]) for j in dims)
    shape = tuple(w.value.shape[j] if j in dims else 1 for j in range(w.rank))
    out = np.ones([w.value.shape[j] for j in dims], values.dtype)
    hits = np.zeros(out.shape, np.int64)
    if dims:
        np.add.at(hits, into, 1)
        if (hits > 1).any():
            return None
        out[into] = np.broadcast_to(values[at], hits[into].shape)
    else:
        out = np.asarray(values.reshape(-1)[0])
    return out.reshape(shape)


def _constant_side(n: Node) -> int | None:
    """Which operand of a contraction is constant, if exactly one is."""
    held = [i for i in (0, 1) if n.inputs[i].op == "const"]
    return held[0] if len(held) == 1 else None


def _contract(w: Node, x: Node, side: int, n: Node) -> Node:
    """The contraction n with w in place of its operand `side`, and x of the other."""
    a, b = (w, x) if side == 0 else (x, w)
    with g.naming(n.source):
        return g.contract(a, b, n.shape, n["reduce"], n["maps"])


def _multiplied(n: Node, side: int, factors: Array, other: Node | None = None) -> Node | None:
    """The contraction with its constant operand multiplied, and perhaps another operand."""
    w = n.inputs[side].value
    if n.dtype.is_float:
        with np.errstate(all="ignore"):
            v = (w.astype(np.float64) * factors).astype(w.dtype)
        if not np.isfinite(v).all() or not np.isfinite(factors).all():
            return None
    else:
        v = w * factors.astype(w.dtype)
    v.flags.writeable = False
    return _contract(g.const(v), n.inputs[1 - side] if other is None else other, side, n)


def _scale_of(n: Node) -> tuple[Node, Array] | None:
    """(x, s) for x * s, x / s and -x with constant s; floats as float64, to be rounded once."""
    if n.op == "neg" and n.dtype.kind in "fi":
        return n.inputs[0], np.full((1,) * n.rank, -1, np.float64 if n.dtype.is_float else np.int64)
    if n.op not in ("mul", "div") or n.dtype is BOOL:
        return None
    v = array(n.inputs[1])
    if v is None or core(n.inputs[0]) is not None:
        return None
    if not n.dtype.is_float:
        return (n.inputs[0], v) if n.op == "mul" else None
    wide = v.astype(np.float64)
    if not np.isfinite(wide).all() or n.op == "div" and not wide.all():
        return None
    return n.inputs[0], 1 / wide if n.op == "div" else wide


class _Absorb:
    """One bottom-up run over a graph; `single` holds rewritten nodes that one node uses."""

    def __init__(self) -> None:
        self.single: set[Node] = set()

    def scaled(self, y: Node, s: Array) -> Node | None:
        """y * s without a multiplication, where y comes from a contraction that nothing else needs.
        """
        if y not in self.single or 0 in y.shape or 0 in s.shape:
            return None
        if y.op == "reshape":
            shape = regroup(_kept(s, y.shape), y.shape, y.inputs[0].shape)
            if shape is None or not is_static(shape):
                return None
            x = self.scaled(y.inputs[0], s.reshape(static(shape)))
            return None if x is None else self.made(g.reshape(x, y.shape))
        if y.op == "permute":
            x = self.scaled(y.inputs[0], s.transpose(np.argsort(y["order"])))
            return None if x is None else self.made(g.permute(x, y["order"]))
        if y.op == "add":
            b = array(y.inputs[1])
            if b is None or not _small(b, s):
                return None
            x = self.scaled(y.inputs[0], s)
            with np.errstate(all="ignore"):
                shift = (b * s).astype(b.dtype)
            if x is None or not np.isfinite(shift).all() and y.dtype.is_float:
                return None
            return self.made(g.add(x, filled(shift, y)))
        side = _constant_side(y) if y.op == "contract" else None
        if side is None:
            return None
        factors = _factors(s, [(0, ((i, 1),)) for i in range(y.rank)], y, side)
        out = None if factors is None else _multiplied(y, side, factors)
        return None if out is None else self.made(out)

    def made(self, n: Node) -> Node:
        self.single.add(n)
        return n

    def after(self, n: Node) -> Node | None:
        """contract(x, w) * s -> contract(x, w * s), views and an addition between them or not."""
        found = _scale_of(n)
        return None if found is None else self.scaled(*found)

    def before(self, n: Node) -> Node | None:
        """contract(x * s, w) -> contract(x, w * s); contract(x + t, w) -> contract(x, w) + c."""
        side = _constant_side(n) if n.op == "contract" else None
        if side is None:
            return None
        x, forms = n.inputs[1 - side], n["maps"][1 - side]
        pad = x if x.op == "pad" and not x["value"].array.any() else None
        inner = x.inputs[0] if pad is not None else x
        found = _scale_of(inner)
        if found is not None:
            y, s = found
            if pad is not None:
                if any((a or b) and d > 1 for a, b, d in zip(x["low"], x["high"], s.shape)):
                    return None
                y = g.pad(y, x["low"], x["high"], x["value"].array.reshape(-1)[0])
            factors = _factors(s, forms, n, side)
            return None if factors is None else _multiplied(n, side, factors, y)
        if pad is not None or x.op != "add":
            return None
        t = core(x.inputs[1])
        if t is None or core(x.inputs[0]) is not None or not _small(t.value):
            return None
        flat = tuple(f if d > 1 else (0, ()) for d, f in zip(t.value.shape, forms))
        maps = [flat, flat]
        maps[side] = n["maps"][side]
        used = {i for m in maps for _, terms in m for i, _ in terms}
        shape = tuple(d if i in used else 1 for i, d in enumerate(n.shape))
        total = size(shape)
        if not is_static((*shape, *n["reduce"])) or not isinstance(total, int) or \
                total * n.dtype.itemsize > LIMIT:
            return None
        w = n.inputs[side]
        a, b = (w, t) if side == 0 else (t, w)
        shift = evaluate_constant(g.contract(a, b, shape, n["reduce"], (maps[0], maps[1])))
        if n.dtype.is_float and not np.isfinite(shift).all():
            return None
        return g.add(_contract(w, x.inputs[0], side, n), filled(shift, n))

    def run(self, graph: Graph) -> Graph:
        order = graph.nodes()
        uses = Counter(i for n in order for i in n.inputs)
        uses.update(graph.outputs.values())
        memo: dict[Node, Node] = {}
        made: set[Node] = set()
        for n in order:
            inputs = tuple(memo[i] for i in n.inputs)
            inner = {k: run(v) for k, v in n.attrs if isinstance(v, Graph)}
            new = n
            if inputs != n.inputs or any(inner[k] is not n[k] for k in inner):
                attrs = {**dict(n.attrs), **inner}
                new = g.node(n.op, inputs, n.shape, n.dtype, n.source, **attrs)
            with g.naming(n.source):
                for rule in (self.before, self.after):
                    while (better := rule(new)) is not None:
                        new = better
            memo[n] = new
            if uses[n] == 1 and new not in made:
                self.single.add(new)
            else:
                self.single.discard(new)
            made.add(new)
        outputs = {k: memo[v] for k, v in graph.outputs.items()}
        if all(outputs[k] is v for k, v in graph.outputs.items()):
            return graph
        return replace(graph, outputs=outputs)


def _kept(s: Array, shape: Shape) -> list[Dim]:
    return [d if k > 1 else 1 for k, d in zip(s.shape, shape)]


def _small(*arrays: Array) -> bool:
    """Whether the arrays' common shape is small enough for a constant."""
    sizes: list[int] = [max(d) for d in zip(*(a.shape for a in arrays))]
    return prod(sizes) * 8 <= LIMIT


def run(graph: Graph) -> Graph:
    """Puts factors and offsets before and after contractions into their constant operands.

    Batch normalisation after a convolution is folded into its weights by this; an offset stays as
    an addition, which is done in the contraction's registers later.
    """
    return _Absorb().run(graph)
