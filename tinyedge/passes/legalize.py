"""Last pass before kernel formation: what kernels can't express is written in what they can.

Afterwards: no ``sort`` is left; a contraction's constant operand stands second; the operands of a
contraction are not narrower than what it is summed in where that costs nothing.
"""

from __future__ import annotations

from .. import graph as g
from ..dtype import BOOL, INT64
from ..graph import Graph, Node


def constant_second(n: Node) -> Node | None:
    """contract(const, x) -> contract(x, const)."""
    a, b = n.inputs
    if a.op == "const" and b.op != "const":
        return g.contract(b, a, n.shape, n["reduce"], n["maps"][::-1])
    return None


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


RULES = {"contract": [constant_second], "sort": [sort_by_rank]}


def run(graph: Graph) -> Graph:
    """The graph with the rules above applied."""
    return g.rewrite(graph, RULES)
