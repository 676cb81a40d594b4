"""Weights of 16 bits, when that is asked for, and the sums of products of such where a target makes
them at once.

Afterwards: the constant operand of a large float32 contraction is float16 or bfloat16 (of minimal
filters always float16), unless a weight is too large for it; the sums are made in float32 as
before. With `both`, the other operand
is bfloat16 too where neighbours in memory are summed over, and so are the values that it is made
of, wherever else they are used. Runs last, but `both` before the minimal filters, which would lose
too many places.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import graph as g
from ..dtype import BFLOAT16, FLOAT16, FLOAT32, DType
from ..graph import VIEWS, Graph, Node, Valid
from ..shape import is_static
from .winograd import Convolution

LEAST = 1024
"""Elements from which on it is worth it."""


def narrowed(w: Node, kind: DType) -> Node | None:
    """Weights as `kind`; None where one is too large."""
    if w.op != "const" or w.dtype is not FLOAT32 or w.value.size < LEAST:
        return None
    with np.errstate(over="ignore"):
        narrow = w.value.astype(kind.numpy)
    if not np.isfinite(narrow.astype(np.float32)).all():
        return None
    return g.const(narrow, kind)


def paired(n: Node) -> bool:
    """Whether a contraction sums over an index along which its first operand may lie in memory, and
    whose size is even; and no minimal filter does it in less than half the time."""
    if n.op != "contract" or n.inputs[1].op != "const" or n.inputs[0].dtype is not FLOAT32 or \
            not is_static((*n.inputs[0].shape, *n["reduce"])):
        return False
    filtered = Convolution.of(n)
    if filtered is not None and filtered.cost(filtered.best()) < filtered.cost(0) / 2:
        return False
    return any(isinstance(d, int) and d % 2 == 0 and all(
        (0, ((n.rank + i, 1),)) in forms for forms in n["maps"]) for i, d in enumerate(n["reduce"]))


def bottom(x: Node) -> Node:
    """What stands below the views of a value."""
    while x.op in VIEWS and (x.op != "pad" or not x["value"].array.any()):
        x = x.inputs[0]
    return x


def short(x: Node) -> Node:
    """A float32 value as bfloat16, narrowed below its views."""
    if x.op == "cast" and x.inputs[0].dtype is BFLOAT16:
        return x.inputs[0]
    if x is bottom(x):
        return g.cast(x, BFLOAT16)
    attrs: dict[str, Any] = dict(x.attrs)
    if x.op == "pad":
        return g.pad(short(x.inputs[0]), x["low"], x["high"])
    return g.node(x.op, (short(x.inputs[0]),), x.shape, BFLOAT16, x.source, **attrs)


def run(graph: Valid, kind: DType = FLOAT16, both: bool = False) -> Valid:
    """The graph with weights of `kind`; see the module's page."""
    if not both:
        def rule(n: Node) -> Node | None:
            # the transforms of minimal filters would make errors of 2^-9 several times larger
            w = narrowed(n.inputs[1], FLOAT16 if n.inputs[0].op == "winograd_in" else kind)
            return g.contract(n.inputs[0], w, n.shape, n["reduce"], n["maps"]) if w else None

        return Valid(g.rewrite(graph, {"contract": [rule]}))
    weights = {n: w for n in graph.nodes() if paired(n) and (w := narrowed(n.inputs[1], kind))}
    used = {bottom(n.inputs[0]) for n in weights}
    plain: dict[Node, Node] = {}  # as it was, of operands that have been narrowed
    seen: dict[Node, Node] = {}  # as others see it
    for n in graph.nodes():
        inputs = tuple(seen[i] for i in n.inputs)
        if n in weights:
            new = g.contract(short(inputs[0]), weights[n], n.shape, n["reduce"], n["maps"])
        elif inputs == n.inputs:
            new = n
        else:
            new = g.node(n.op, inputs, n.shape, n.dtype, n.source, **dict(n.attrs))
        plain[n] = new
        seen[n] = g.cast(g.cast(new, BFLOAT16), FLOAT32) if n in used and n.dtype is FLOAT32 \
            else new
    return Valid(Graph(graph.inputs, {k: plain[n] for k, n in graph.outputs.items()},
                       graph.states, graph.name, graph.metadata))
