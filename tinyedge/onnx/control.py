"""If, Loop and Scan, and sequences of tensors whose length is known while importing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import graph as g
from ..dtype import BOOL, INT64
from ..errors import ShapeError, UnsupportedError
from ..graph import Graph, Node
from ..shape import Dim, same, static
from .registry import Context, Value, extent, op
from .shape_ops import parts

if TYPE_CHECKING:
    from .importer import Importer

ENDLESS = np.iinfo(np.int64).max
STRAIGHT = 256
"""Rounds that a loop may have to be written out where it has no form as a loop."""


def close(
    params: Sequence[Node], results: Sequence[Sequence[Node]], importer: Importer,
    outside: Callable[[Node], bool] | None = None,
) -> tuple[list[Graph], list[Node]]:
    """Graphs with these outputs, and the nodes that they need from around them.

    The graphs' inputs are the params, then one for each such node. `outside` tells the nodes that
    are around; by default those that don't depend on the params.
    """
    inner: dict[Node, bool] = {}
    bound: dict[Node, bool] = {}
    for n in g.walk([r for rs in results for r in rs]):
        inner[n] = n in params or any(inner[i] for i in n.inputs)
        bound[n] = n.op == "input" or any(bound[i] for i in n.inputs)
    around = outside or (lambda n: not inner[n])
    captures: dict[Node, Node] = {}
    memo: dict[Node, Node] = {p: p for p in params}

    def visit(root: Node) -> Node:
        stack = [root]
        while stack:
            n = stack[-1]
            if n in memo:
                stack.pop()
            elif bound[n] and (around(n) or n.op == "input"):
                memo[n] = captures[n] = importer.fresh("captured", n.shape, n.dtype)
            elif todo := [i for i in n.inputs if i not in memo]:
                stack.extend(todo)
            else:
                inputs = [memo[i] for i in n.inputs]
                memo[n] = n if all(a is b for a, b in zip(inputs, n.inputs)) else \
                    g.node(n.op, inputs, n.shape, n.dtype, n.source, **dict(n.attrs))
        return memo[root]

    outputs = [{f"out{i}": visit(r) for i, r in enumerate(rs)} for rs in results]
    inputs = {p["name"]: p for p in (*params, *captures.values())}
    return [Graph(inputs, o) for o in outputs], list(captures)


VERSIONS = (1, 11, 13, 16, 19, 21, 23, 24, 25)


@op("If", *VERSIONS)
def if_(c: Context, condition: Node) -> list[Node]:
    then, other = c.attr("then_branch"), c.attr("else_branch")
    value = c.constant(condition)
    if value is not None:
        return c.importer.subgraph(then if value.any() else other, c.scope, [])
    around = {
        n for s in c.scope.chain() for v in s.values.values()
        for n in (v if isinstance(v, tuple) else (v,)) if isinstance(n, Node)
    }
    results = [c.importer.branch(b, c.scope) for b in (then, other)]
    first, second = (r if isinstance(r, list) else _never(c, r, other)
                     for r, other in zip(results, reversed(results)))
    graphs, captures = close((), (first, second), c.importer, around.__contains__)
    return g.if_(g.reshape(condition, ()), graphs[0], graphs[1], captures)


def _never(c: Context, error: ShapeError, other: list[Node] | ShapeError) -> list[Node]:
    """What a branch gives that can't run with the inputs' shapes: nan, like the other's outputs."""
    if not isinstance(other, list) or not all(n.dtype.is_float for n in other):
        raise error
    warnings.warn(f"{c}: one branch can't run with these shapes and gives nan: {error}",
                  stacklevel=2)
    return [g.full(n.shape, np.nan, n.dtype) for n in other]


@op("Loop", *VERSIONS)
def loop(c: Context, trips: Node | None, condition: Node | None, *carried: Value) -> list[Any]:
    body = c.attr("body")
    going = g.const(True, BOOL) if condition is None else g.reshape(condition, ())
    count = None if trips is None else c.importer.known(trips)
    limit: Dim | None = None if count is None else count.ravel()[0]
    if c.constant(going) is not None and not c.constant(going):
        limit = 0
    try:
        if not all(isinstance(v, Node) for v in carried):
            c.refuse("a carried value is a sequence, and the number of rounds is not known")
        return _as_loop(c, body, trips, going, carried, limit)  # type: ignore[arg-type]
    except (ShapeError, UnsupportedError):
        # a carried value changes its shape, or a result has as many parts as there are rounds
        if not isinstance(limit, int) or limit > STRAIGHT:
            raise
        return _straight(c, body, going, list(carried), limit)


def _as_loop(
    c: Context, body: Any, trips: Node | None, going: Node, carried: Sequence[Node],
    limit: Dim | None,
) -> list[Node]:
    i = c.importer.fresh("round", (), INT64)
    inner = [c.importer.fresh("carried", v.shape, v.dtype) for v in carried]
    outs = c.importer.subgraph(body, c.scope, [i, g.const(True, BOOL), *inner])
    outs[0] = g.reshape(outs[0], ())
    for before, after in zip(inner, outs[1:]):
        if before.dtype is not after.dtype or before.rank != after.rank or \
                not all(map(same, before.shape, after.shape)):
            c.refuse(f"a carried value begins as {before} and becomes {after}")
    stacked = len(outs) > 1 + len(carried)
    always = c.constant(outs[0]) is not None and c.constant(going) is not None
    if stacked and (limit is None or not always):
        c.refuse("how many parts its stacked outputs have is only known at run time")
    graphs, captures = close([i, *inner], [outs], c.importer)
    bound = extent(ENDLESS) if trips is None else g.reshape(g.cast(trips, INT64), ())
    if limit is not None:
        bound = extent(limit)
    return g.loop(bound, going, list(carried), captures, graphs[0],
                  ENDLESS if limit is None else limit)


def _straight(c: Context, body: Any, going: Node, carried: list[Value], limit: int) -> list[Any]:
    """The rounds one after another; the condition must be known."""
    count = len(carried)
    stacks: list[list[Node]] = []
    for i in range(limit):
        more = c.constant(going)
        if more is None:
            c.refuse("its condition is only known at run time, and a carried value changes shape")
        if not more:
            break
        outs = c.importer.subgraph(body, c.scope, [g.const(i, INT64), going, *carried])
        going, carried = outs[0], list(outs[1:1 + count])
        for k, v in enumerate(outs[1 + count:]):
            if k == len(stacks):
                stacks.append([])
            stacks[k].append(g.reshape(v, (1, *v.shape)))
    if not stacks and len(body.output) > 1 + count:
        c.refuse("it makes no round, so that its stacked outputs have no shape")
    return [*carried, *(g.concat(s, 0) for s in stacks)]


@op("Scan", 8)
def scan_batched(c: Context, lengths: Node | None, *xs: Node) -> list[Node]:
    """Opset 8: every input has a batch dimension first; the batch is written out."""
    if lengths is not None:
        c.refuse("input 0 (sequence_lens) is not supported")
    (batch,) = static(xs[0].shape[:1], str(c))
    flips = c.attr("directions") or [0] * c.attr("num_scan_inputs")
    rows = []
    for b in range(batch):
        row = [g.reshape(g.narrow(x, 0, b, 1), x.shape[1:]) for x in xs]
        rows.append(_scan(c, row, [0] * len(flips), flips, [], []))
    return [g.concat([g.reshape(v, (1, *v.shape)) for v in vs], 0) for vs in zip(*rows)]


@op("Scan", 9, 11, *VERSIONS[3:])
def scan(c: Context, *xs: Node) -> list[Node]:
    n = c.attr("num_scan_inputs")
    axes = c.attr("scan_input_axes") or [0] * n
    flips = c.attr("scan_input_directions") or [0] * n
    return _scan(c, xs, axes, flips, c.attr("scan_output_axes") or [],
                 c.attr("scan_output_directions") or [])


def _scan(
    c: Context, xs: Sequence[Node], axes: Sequence[int], flips: Sequence[int],
    out_axes: Sequence[int], out_flips: Sequence[int],
) -> list[Node]:
    n = c.attr("num_scan_inputs")
    states, sequences = list(xs[:len(xs) - n]), []
    for x, axis in zip(xs[len(xs) - n:], axes):
        axis = g.normal_axis(axis, x.rank)
        sequences.append(g.permute(x, [axis, *(a for a in range(x.rank) if a != axis)]))
    total = sequences[0].shape[0]
    i = c.importer.fresh("round", (), INT64)
    inner = [c.importer.fresh("state", v.shape, v.dtype) for v in states]
    back = g.sub(extent(total), g.add(i, g.like(i, 1)))
    now = [g.gather(x, [back if f else i], 0) for x, f in zip(sequences, flips)]
    outs = c.importer.subgraph(c.attr("body"), c.scope, [*inner, *now])
    graphs, captures = close([i, *inner], [[g.const(True, BOOL), *outs]], c.importer)
    results = g.loop(extent(total), g.const(True, BOOL), states, captures, graphs[0], total)
    for k in range(len(states), len(results)):
        v, j = results[k], k - len(states)
        if j < len(out_flips) and out_flips[j]:
            (size,) = static((total,), str(c))
            v = g.narrow(v, 0, size - 1, size, -1)
        axis = g.normal_axis(out_axes[j], v.rank) if j < len(out_axes) else 0
        order = list(range(1, v.rank))
        order.insert(axis, 0)
        results[k] = g.permute(v, order)
    return results


# sequences: tuples of tensors

@op("SequenceConstruct", 11)
def sequence_construct(c: Context, *xs: Node) -> tuple[Node, ...]:
    return xs


@op("SequenceEmpty", 11)
def sequence_empty(c: Context) -> tuple[Node, ...]:
    c.ignore("dtype")
    return ()


def position(c: Context, at: Node | None, default: int) -> int:
    return default if at is None else c.ints(at, "the position")[0]


@op("SequenceInsert", 11)
def sequence_insert(
    c: Context, xs: tuple[Node, ...], x: Node, at: Node | None = None
) -> tuple[Node, ...]:
    i = position(c, at, len(xs))
    return (*xs[:i], x, *xs[i:])


@op("SequenceErase", 11)
def sequence_erase(
    c: Context, xs: tuple[Node, ...], at: Node | None = None
) -> tuple[Node, ...]:
    i = position(c, at, -1) % len(xs)
    return (*xs[:i], *xs[i + 1:])


@op("SequenceAt", 11)
def sequence_at(c: Context, xs: tuple[Node, ...], at: Node) -> Node:
    return xs[position(c, at, 0)]


@op("SequenceLength", 11)
def sequence_length(c: Context, xs: tuple[Node, ...]) -> Node:
    return extent(len(xs))


@op("SplitToSequence", 11, 24)
def split_to_sequence(c: Context, x: Node, sizes: Node | None = None) -> tuple[Node, ...]:
    axis, keep = g.normal_axis(c.attr("axis"), x.rank), bool(c.attr("keepdims"))
    (total,) = static((x.shape[axis],), str(c))
    given = np.array(1) if sizes is None else c.need(sizes, "input 1 (split)")
    if given.ndim == 0:
        step = int(given)
        given = np.array([min(step, total - i) for i in range(0, total, step)])
    out = parts(x, axis, [int(v) for v in given])
    if sizes is None and not keep:
        out = [g.reshape(p, [d for i, d in enumerate(p.shape) if i != axis]) for p in out]
    return tuple(out)


@op("ConcatFromSequence", 11)
def concat_from_sequence(c: Context, xs: tuple[Node, ...]) -> Node:
    axis = c.attr("axis")
    if c.attr("new_axis"):
        axis = g.normal_axis(axis, xs[0].rank + 1)
        xs = tuple(g.reshape(x, (*x.shape[:axis], 1, *x.shape[axis:])) for x in xs)
    return g.concat(xs, axis)


@op("Optional", 15, 28)
@op("OptionalGetElement", 15, 18, 28)
def optional(c: Context, x: Value | None = None) -> Value | None:
    c.ignore("type")
    return x


@op("OptionalHasElement", 15, 18, 28)
def optional_has_element(c: Context, x: Value | None = None) -> Node:
    return g.const(x is not None, BOOL)


