"""Last pass before kernel formation: what kernels can't express is written in what they can.

Afterwards: no ``sort`` is left; a contraction's constant operand stands second; elementwise work on
a contraction's result stands before any reshape of it, where it is done in registers.
"""

from __future__ import annotations

from .. import graph as g
from ..dtype import BOOL, INT64
from ..graph import Graph, Node, Rule
from ..shape import is_static, size


def constant_second(n: Node) -> Node | None:
    """contract(const, x) -> contract(x, const)."""
    a, b = n.inputs
    if a.op == "const" and b.op != "const":
        return g.contract(b, a, n.shape, n["reduce"], n["maps"][::-1])
    return None


def split_weights(n: Node) -> Node | None:
    """A constant indexed by ``groups*g + k`` gets a dimension for each, to be laid out freely."""
    a, w = n.inputs
    if w.op != "const" or not is_static(n.shape):
        return None
    extents = (*n.shape, *n["reduce"])
    shape: list[int] = []
    forms: list[g.Form] = []
    for d, (c0, terms) in zip(w.value.shape, n["maps"][1]):
        order = sorted(terms, key=lambda t: -t[1])
        run = 1
        for i, c in reversed(order):
            if c != run:
                break
            run *= extents[i]
        if len(terms) > 1 and c0 == 0 and run == d:
            shape += [extents[i] for i, _ in order]
            forms += [(0, ((i, 1),)) for i, _ in order]
        else:
            shape.append(d)
            forms.append((c0, terms))
    if len(shape) == w.rank:
        return None
    split = g.const(w.value.reshape(shape))
    return g.contract(a, split, n.shape, n["reduce"], (n["maps"][0], tuple(forms)))


def _before(a: Node, b: Node, descending: bool) -> Node:
    """Whether a stands strictly before b; nan stands after everything."""
    first = g.lt(b, a) if descending else g.lt(a, b)
    if a.dtype.is_float:
        first = g.or_(first, g.and_(g.isnan(b), g.not_(g.isnan(a))))
    return first


def sort_by_rank(n: Node) -> Node | None:
    """Stable argsort: an element's place is the number of elements before it."""
    x, axis = n.inputs[0], n["axis"]
    if x.dtype is BOOL:
        return g.sort(g.cast(x, INT64), axis, n["descending"])
    shape = x.shape
    mine = g.reshape(x, (*shape[:axis + 1], 1, *shape[axis + 1:]))
    other = g.reshape(x, (*shape[:axis], 1, *shape[axis:]))
    pair = (*shape[:axis], shape[axis], shape[axis], *shape[axis + 1:])
    mine, other = g.expand(mine, pair), g.expand(other, pair)
    earlier = g.lt(g.iota(pair, axis + 1), g.iota(pair, axis))
    tie = g.not_(g.or_(_before(mine, other, n["descending"]),
                       _before(other, mine, n["descending"])))
    first = g.or_(_before(other, mine, n["descending"]), g.and_(tie, earlier))
    rank = g.reduce("sum", g.cast(first, INT64), [axis + 1], keep=False)
    places = [rank if d == axis else g.iota(shape, d) for d in range(x.rank)]
    zeros = g.full(shape, 0, INT64)
    return g.scatter(zeros, g.iota(shape, axis), places, 0)


def below_reshape(n: Node) -> Node | None:
    """f(reshape(contraction), other) -> reshape(f(contraction, reshape(other)))."""
    for x in n.inputs:
        if x.op != "reshape" or not _ends_in_contraction(x.inputs[0]):
            continue
        shape = x.inputs[0].shape
        operands = [
            g.expand(g.reshape(i.inputs[0], ()), shape)
            if i.op == "expand" and size(i.inputs[0].shape) == 1
            else g.reshape(i, shape) for i in n.inputs
        ]
        inner = g.node(n.op, operands, shape, n.dtype, **dict(n.attrs))
        return g.reshape(inner, n.shape)
    return None


def _ends_in_contraction(x: Node) -> bool:
    for _ in range(16):
        if x.op == "contract":
            return True
        if x.op not in g.ELEMENTWISE:
            return False
        x = x.inputs[0]
    return False


RULES: dict[str, list[Rule]] = {
    "contract": [constant_second, split_weights], "sort": [sort_by_rank],
    **{op: [below_reshape] for op in g.ELEMENTWISE},
}


def run(graph: Graph) -> Graph:
    """The graph with the rules above applied."""
    return g.rewrite(graph, RULES)
