"""Constant folding: what depends on constants only is computed now.

Afterwards: no node whose operands are all constant is left, unless its value would take much more
memory than they do (an `expand` is never written out); no `if` on a constant and no loop of
constant zero or one trips is left; control flow captures no constant and nothing that it
does not use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import graph as g
from ..dtype import INT64
from ..graph import Graph, Node, Rule
from ..interpreter import evaluate_constant
from ..shape import is_static, size, upper

LIMIT = 1 << 16
"""Bytes that a folded value may take even if its operands take less."""
TURNS = 256
"""Trips of a loop that is run while compiling."""

LEAVES = frozenset(("input", "const", "iota", "expand", "if", "loop"))


def core(n: Node) -> Node | None:
    """The const that n is, or repeats along dimensions of size 1; None for any other node."""
    if n.op == "expand":
        n = n.inputs[0]
    return n if n.op == "const" else None


def _known(n: Node) -> bool:
    return (core(n) is not None or n.op == "iota") and is_static(n.shape)


def constant(n: Node) -> Node | None:
    """An operation on constants -> its value."""
    if n.op in LEAVES or not is_static(n.shape):
        return None
    operands = n.inputs
    if n.op == "result":
        operands = n.inputs[0].inputs
        if n.inputs[0].op == "loop" and upper(n.inputs[0]["limit"]) > TURNS:
            return None
    if not operands or not all(map(_known, operands)):
        return None
    held = [x for x in map(core, operands) if x is not None]
    total = size(n.shape)
    assert isinstance(total, int)
    if total * n.dtype.itemsize > max(LIMIT, sum(x.value.nbytes for x in held)):
        return None
    return g.const(_frozen(evaluate_constant(n)))


def _frozen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`array`, owned by nobody else, marked so that a const takes it without a copy."""
    if array.base is None:
        array.flags.writeable = False
    return array


def written_out(n: Node) -> Node | None:
    """contract(x, expand(const)) -> contract(x, const), so that weights are always a const."""
    def whole(x: Node) -> Node:
        if x.op != "expand" or core(x) is None or not is_static(x.shape):
            return x
        total = size(x.shape)
        assert isinstance(total, int)
        if total * x.dtype.itemsize > LIMIT:
            return x
        return g.const(_frozen(np.array(evaluate_constant(x))))

    a, b = map(whole, n.inputs)
    return None if (a, b) == n.inputs else g.contract(a, b, n.shape, n["reduce"], n["maps"])


def inline(graph: Graph, arguments: Sequence[Node]) -> list[Node]:
    """The graph's outputs with the arguments in place of its inputs."""
    memo = dict(zip(graph.inputs.values(), arguments))
    for n in graph.nodes():
        if n not in memo:
            inputs = tuple(memo[i] for i in n.inputs)
            memo[n] = n if inputs == n.inputs else \
                g.node(n.op, inputs, n.shape, n.dtype, n.source, **dict(n.attrs))
    return [memo[n] for n in graph.outputs.values()]


def _scalar(n: Node) -> int | None:
    c = core(n)
    return None if c is None or not c.value.size else int(c.value.reshape(-1)[0])


def decided(n: Node) -> Node | None:
    """A result of an `if` on a constant -> the branch's; of a loop without trips or of one trip."""
    flow, index = n.inputs[0], int(n["index"])
    if flow.op == "if":
        cond = _scalar(flow.inputs[0])
        if cond is None:
            return None
        return inline(flow["then" if cond else "else"], flow.inputs[1:])[index]
    body, count = flow["body"], flow["carried"]
    trips, going = _scalar(flow.inputs[0]), _scalar(flow.inputs[1])
    if trips is not None and trips <= 0 or going == 0:
        if index < count:
            return flow.inputs[2 + index]
        return g.full(n.shape, 0, n.dtype)
    if trips != 1 or going is None:
        return None
    out = inline(body, [g.const(0, INT64), *flow.inputs[2:]])[1 + index]
    if index < count:
        return out
    out = g.reshape(out, (1, *out.shape))
    if not isinstance(n.shape[0], int):
        return None
    return g.pad(out, [0] * n.rank, [n.shape[0] - 1] + [0] * (n.rank - 1))


def unchanging(n: Node) -> Node | None:
    """A carried value that every trip hands on as it is -> its first value."""
    flow = n.inputs[0]
    index = int(n["index"])
    if flow.op != "loop" or index >= flow["carried"]:
        return None
    body: Graph = flow["body"]
    name = list(body.inputs.values())[1 + index]
    same = list(body.outputs.values())[1 + index] is name
    return flow.inputs[2 + index] if same else None


def captures(n: Node) -> Node | None:
    """Constants move into the graphs of control flow; what these don't use isn't captured."""
    loop = n.op == "loop"
    graphs: list[Graph] = g.subgraphs(n)
    first = 2 + n["carried"] if loop else 1  # of the captures among the operands
    skip = 1 + n["carried"] if loop else 0  # of the captures among a graph's inputs
    used = [set(x.nodes()) for x in graphs]
    names = [list(x.inputs.items()) for x in graphs]
    operands = n.inputs[first:]
    held = {i for i, x in enumerate(operands) if core(x) is not None}
    idle = {i for i in range(len(operands))
            if not any(names[j][skip + i][1] in u for j, u in enumerate(used))}
    gone = held | idle
    if not gone:
        return None

    def without(x: Graph) -> Graph:
        inputs = list(x.inputs.items())
        arguments = [operands[i - skip] if i - skip in held else v
                     for i, (_, v) in enumerate(inputs)]
        outputs = dict(zip(x.outputs, inline(x, arguments)))
        kept = {k: v for i, (k, v) in enumerate(inputs) if i - skip not in gone}
        return replace(x, inputs=kept, outputs=outputs)

    attrs = {k: without(v) if isinstance(v, Graph) else v for k, v in n.attrs}
    inputs = [*n.inputs[:first], *(x for i, x in enumerate(operands) if i not in gone)]
    return g.node(n.op, inputs, n.shape, n.dtype, n.source, **attrs)


RULES: dict[str, list[Rule]] = {
    "*": [constant],
    "contract": [written_out],
    "result": [decided, unchanging],
    "if": [captures],
    "loop": [captures],
}


def run(graph: Graph) -> Graph:
    """The graph with the rules above applied."""
    return g.rewrite(graph, RULES)
