"""Weights stored as float16, when that is asked for: half the file and half the memory traffic.

Afterwards: the constant operand of a large float32 contraction is float16, unless a weight is too
large for it; the sums are made in float32 as before. Runs last.
"""

from __future__ import annotations

import numpy as np

from .. import graph as g
from ..dtype import FLOAT32
from ..graph import Node, Valid

LEAST = 1024
"""Elements from which on it is worth it."""


def halved(n: Node) -> Node | None:
    """contract(x, float32 constant) -> contract(x, float16 constant)"""
    x, w = n.inputs
    if w.op != "const" or w.dtype is not FLOAT32 or w.value.size < LEAST:
        return None
    with np.errstate(over="ignore"):
        narrow = w.value.astype(np.float16)
    if not np.isfinite(narrow).all():
        return None
    return g.contract(x, g.const(narrow), n.shape, n["reduce"], n["maps"])


def run(graph: Valid) -> Valid:
    """The graph with the rule above applied."""
    return Valid(g.rewrite(graph, {"contract": [halved]}))
