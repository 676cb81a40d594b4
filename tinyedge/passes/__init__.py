"""Graph to graph: each module is a list of small named rules.

`optimize` runs them in order. `fold`, `simplify` and `absorb` feed each other and are repeated
until none finds anything; `integer` finds products of 8-bit values in what they leave; `legalize`
comes last and makes what kernels can express.
"""

from __future__ import annotations

from .. import graph as g
from ..graph import Graph, Rule, Valid
from . import absorb, fold, integer, legalize, simplify

ROUNDS = 10
"""More than any model has needed; what is left after them is correct, only not as simple."""


def _together(*tables: dict[str, list[Rule]]) -> dict[str, list[Rule]]:
    out: dict[str, list[Rule]] = {}
    for table in tables:
        for op, rules in table.items():
            out.setdefault(op, []).extend(rules)
    return out


RULES = _together(fold.RULES, simplify.RULES)


def reduced(graph: Graph) -> Graph:
    """The graph after folding and simplification, repeated until nothing changes."""
    for _ in range(ROUNDS):
        before = graph
        graph = absorb.run(g.rewrite(graph, RULES))
        if graph is before:
            break
    return graph


def optimize(graph: Valid, dots: bool = False) -> Valid:
    """The same outputs, up to rounding, by fewer and simpler operations; names stay the same.

    dots: the target multiplies and adds bytes in fours, so that quantised contractions are done so.
    """
    simple = reduced(graph)
    whole = integer.run(simple, dots)
    return Valid(legalize.run(whole if whole is simple else reduced(whole)))


__all__ = ["RULES", "optimize", "reduced"]
