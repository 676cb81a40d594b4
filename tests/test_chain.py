"""Kernels that do several nodes piece by piece: when they are made, and that they give the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tinyedge
from tests.compiled import check, difference
from tests.test_winograd import conv, normal
from tinyedge import graph as g
from tinyedge.codegen.ir import Set, Store, const, load, reg, var
from tinyedge.codegen.schedule.chain import grids, stride
from tinyedge.codegen.schedule.cpu import Nest
from tinyedge.compiler import compile_graph
from tinyedge.dtype import FLOAT32
from tinyedge.graph import Form, Graph, Node
from tinyedge.plan import Launch, Plan
from tinyedge.shape import static

Array = np.ndarray[Any, Any]
TARGETS = ["cpu", "cpu:x86-64-v3", "cpu:x86-64-v2"]


def softmax(x: Node, axis: int) -> Node:
    e = g.exp(g.sub(x, g.expand(g.reduce("max", x, [axis]), x.shape)))
    return g.div(e, g.expand(g.reduce("sum", e, [axis]), x.shape))


def normalised(x: Node, axis: int) -> Node:
    n = static(x.shape)[axis]
    mean = g.div(g.reduce("sum", x, [axis]), g.like(g.reduce("sum", x, [axis]), n))
    d = g.sub(x, g.expand(mean, x.shape))
    v = g.reduce("sum", g.mul(d, d), [axis])
    s = g.sqrt(g.add(g.div(v, g.like(v, n)), g.like(v, 1e-5)))
    return g.div(d, g.expand(s, x.shape))


def product(a: Node, b: Node) -> Node:
    """[..., M, K] x [..., K, N] in the last two of equal leading dimensions."""
    rank = a.rank
    one: list[Form] = [(0, ((i, 1),)) for i in range(rank + 1)]
    shape = (*a.shape[:-1], b.shape[-1])
    lead = one[:rank - 2]
    return g.contract(a, b, shape, (a.shape[-1],), (
        (*lead, one[rank - 2], one[rank]), (*lead, one[rank], one[rank - 1])))


def attention(heads: int, rows: int, keys: int, width: int) -> Graph:
    q, k, v = (g.placeholder(n, (1, heads, s, width), FLOAT32)
               for n, s in (("q", rows), ("k", keys), ("v", keys)))
    # values that are made in the graph, as projections are
    q, k, v = (g.mul(x, g.like(x, c)) for x, c in ((q, 0.3), (k, 2.0), (v, 0.5)))
    scores = softmax(product(q, g.permute(k, (0, 1, 3, 2))), 3)
    y = g.reshape(g.permute(product(scores, v), (0, 2, 1, 3)), (1, rows, heads * width))
    return Graph({x.inputs[0]["name"]: x.inputs[0] for x in (q, k, v)}, {"y": y})


def kernels(plan: Plan) -> list[str]:
    return [plan.kernels[s.kernel].name for s in plan.steps if isinstance(s, Launch)]


def feeds(graph: Graph) -> dict[str, Array]:
    return {n: normal(*static(x.shape)) for n, x in graph.inputs.items()}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sizes", [(4, 32, 48, 16), (3, 28, 28, 24), (2, 40, 17, 5), (1, 7, 9, 8)])
def test_attention(sizes: tuple[int, int, int, int], target: str) -> None:
    graph = attention(*sizes)
    check(graph, feeds(graph), 3e-6, target)


def test_attention_is_one_kernel_without_a_matrix_of_scores() -> None:
    graph = attention(12, 512, 512, 32)
    plan = check(graph, feeds(graph), 3e-6, threads=2)
    names = kernels(plan)
    assert sum(n.startswith("chain") for n in names) == 1
    assert not any(n.startswith(("max", "sum", "matmul")) for n in names)
    assert plan.arenas[1] < 12 * 512 * 512  # the scores alone are four times that


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape, axis", [
    ((64, 384), 1), ((2, 3, 50, 100), 3), ((1, 48, 9, 10), 1), ((5, 1), 1), ((33, 7), 0)])
def test_rows(shape: tuple[int, ...], axis: int, target: str) -> None:
    x = g.placeholder("x", shape, FLOAT32)
    graph = Graph({"x": x}, {"s": softmax(x, axis), "n": normalised(x, axis)})
    check(graph, feeds(graph), 5e-6, target)


def test_a_normalisation_is_one_launch() -> None:
    x = g.placeholder("x", (128, 384), FLOAT32)
    for y in (softmax(x, 1), normalised(x, 1)):
        names = kernels(compile_graph(Graph({"x": x}, {"y": y})))
        assert len(names) == 1 and names[0].startswith("rows"), names


def test_what_is_read_elsewhere_has_memory() -> None:
    x = g.placeholder("x", (96, 256), FLOAT32)
    e = g.exp(x)
    y = g.div(e, g.expand(g.reduce("sum", e, [1]), e.shape))
    graph = Graph({"x": x}, {"y": y, "e": e})
    check(graph, feeds(graph), threads=2)


def test_other_pieces_are_waited_for() -> None:
    """Every row of the second fold needs all rows of the first: no chain."""
    x = g.placeholder("x", (64, 512), FLOAT32)
    a = g.sub(x, g.expand(g.reduce("max", x, [1]), x.shape))
    b = g.sub(a, g.expand(g.reduce("max", a, [0]), a.shape))
    graph = Graph({"x": x}, {"y": b})
    plan = check(graph, feeds(graph), threads=2)
    assert len(kernels(plan)) > 1


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("k", [16, 24, 72])
def test_depthwise_and_the_product_behind_it(k: int, target: str) -> None:
    x = g.placeholder("x", (1, 16, 112, 112), FLOAT32)
    p = g.pad(conv(x, normal(32, 16, 1, 1)), (0, 0, 1, 1), (0, 0, 1, 1))
    one: list[Form] = [(0, ((i, 1),)) for i in range(6)]
    window: list[Form] = [(0, ((i, 1), (2 + i, 1))) for i in (2, 3)]
    d = g.contract(p, g.const(normal(32, 3, 3)), (1, 32, 112, 112), (3, 3), (
        (one[0], one[1], *window), (one[1], one[4], one[5])))
    d = g.maximum(d, g.like(d, 0))
    y = conv(d, normal(k, 32, 1, 1))
    graph = Graph({"x": x}, {"y": g.maximum(y, g.like(y, 0))})
    plan = check(graph, feeds(graph), 3e-6, target, threads=2)
    assert sum(n.startswith("chain") for n in kernels(plan)) == 1


def test_threads_do_not_matter() -> None:
    graph = attention(6, 128, 128, 32)
    plan, given = compile_graph(graph), feeds(graph)
    results = []
    for threads in (1, 2):
        with tinyedge.load(plan, threads=threads) as run:
            results.append(run(given)["y"])
    assert results[0].tobytes() == results[1].tobytes()
    assert difference(results[0], results[1]) == 0


def nest(extents: tuple[int, ...], steps: tuple[int, ...], inner: int = 4, extra: int = 0) -> Nest:
    """Loops of which each moves by its step, and one element after the other in the last."""
    loops = [var(f"o{i}", 0, e - 1) for i, e in enumerate(extents)]
    index = var("x", 0, inner - 1) + extra
    for v, s in zip(loops, steps):
        index = index + v * s
    r = reg("acc", FLOAT32)
    body = (Set(r, load(1, index, FLOAT32)), Store(0, index, r))
    return Nest(tuple((v, const(e)) for v, e in zip(loops, extents)), body)


def test_pieces_that_lie_apart() -> None:
    assert stride(nest((6, 5), (20, 4)), 2, 1) == 4
    assert stride(nest((6, 5), (20, 4)), 1, 0) == 20
    assert stride(nest((6, 5), (4, 24)), 2, 1) is None  # in another order
    assert stride(nest((6, 5), (15, 3)), 2, 1) is None  # overlapping
    assert stride(nest((6, 5), (20, 4), extra=1), 2, 1) is None  # into the next one's
    assert stride(nest((6,), (0,)), 1, 1) is None  # the same for all
    assert sorted(grids(nest((6, 4), (16, 4)))) == [1, 2, 3, 6, 12, 24]
