"""Compiled kernels against the interpreter: every form a schedule takes, for each vector width."""

from __future__ import annotations

import operator
import re
from typing import Any

import numpy as np
import pytest

import tinyedge
from tests.compiled import check
from tinyedge import graph as g
from tinyedge.compiler import compile_graph
from tinyedge.dtype import BOOL, FLOAT16, FLOAT32, FLOAT64, INT32, INT64, UINT8, DType
from tinyedge.graph import Graph, Node
from tinyedge.plan import Copy

rng = np.random.default_rng(7)
TARGETS = ["cpu", "cpu:x86-64-v3", "cpu:x86-64-v2"]
widths = pytest.mark.parametrize("target", TARGETS)


def normal(*shape: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    return rng.normal(size=shape).astype(dtype)


def weights(*shape: int) -> Node:
    return g.const(normal(*shape))


def x_of(*shape: int, dtype: DType = FLOAT32) -> Node:
    return g.placeholder("x", shape, dtype)


def conv(x: Node, w: Node, stride: int = 1, padding: int = 0, groups: int = 1) -> Node:
    n, _, h, wide = (int(str(d)) for d in x.shape)
    k, c, kh, kw = w.value.shape
    x = g.pad(x, (0, 0, padding, padding), (0, 0, padding, padding))
    oh, ow = ((d + 2 * padding - f) // stride + 1 for d, f in ((h, kh), (wide, kw)))
    channel: g.Form = (0, ((1, 1), (4, 1))) if groups > 1 else (0, ((4, 1),))
    maps: tuple[tuple[g.Form, ...], ...] = (
        ((0, ((0, 1),)), channel, (0, ((2, stride), (5, 1))), (0, ((3, stride), (6, 1)))),
        ((0, ((1, 1),)), (0, ((4, 1),)), (0, ((5, 1),)), (0, ((6, 1),))),
    )
    return g.contract(x, w, (n, k, oh, ow), (c, kh, kw), maps)


def matmul(a: Node, b: Node) -> Node:
    """[..., m, r] @ [..., r, n] with equal batch dimensions."""
    batch = tuple((0, ((i, 1),)) for i in range(a.rank - 2))
    rank = a.rank
    maps: tuple[tuple[g.Form, ...], ...] = (
        (*batch, (0, ((rank - 2, 1),)), (0, ((rank, 1),))),
        (*batch[:b.rank - 2], (0, ((rank, 1),)), (0, ((rank - 1, 1),))),
    )
    return g.contract(a, b, (*a.shape[:-1], b.shape[-1]), (a.shape[-1],), maps)


def relu(x: Node) -> Node:
    return g.maximum(x, g.like(x, 0))


@widths
@pytest.mark.parametrize("shape", [(), (1,), (5,), (4, 37), (3, 64), (2, 3, 129), (1, 4099)])
def test_elementwise(shape: tuple[int, ...], target: str) -> None:
    x = x_of(*shape)
    y = g.add(g.mul(x, g.like(x, 2)), weights(*shape[-1:]))
    check(Graph({"x": x}, {"y": y}), {"x": normal(*shape)}, target=target)


@widths
def test_reductions(target: str) -> None:
    x = x_of(4, 37, 18)
    outs = {
        f"{kind}{''.join(map(str, axes))}": g.reduce(kind, x, axes)
        for kind in ("sum", "prod", "max", "min")
        for axes in ([0], [1], [2], [0, 2], [0, 1, 2])
    }
    check(Graph({"x": x}, outs), {"x": normal(4, 37, 18) + np.float32(0.5)}, 1e-5, target)


@widths
def test_nan_and_infinity_pass_through(target: str) -> None:
    x = x_of(3, 40)
    data = normal(3, 40)
    data[0, 3], data[1, 17], data[2, 39] = np.nan, np.inf, -np.inf
    outs = {"relu": relu(x), "most": g.reduce("max", x, [1]), "sum": g.reduce("sum", x, [1]),
            "pair": g.maximum(x, g.mul(x, g.like(x, 2))), "low": g.minimum(x, g.like(x, 1))}
    check(Graph({"x": x}, outs), {"x": data}, 1e-6, target)


@widths
@pytest.mark.parametrize("m,r,n", [(1, 37, 50), (4, 37, 50), (33, 64, 16), (5, 1, 7), (3, 200, 1),
                                   (29, 17, 100), (1, 300, 1)])
def test_matmul(m: int, r: int, n: int, target: str) -> None:
    x = x_of(m, r)
    y = relu(g.add(matmul(x, weights(r, n)), weights(n)))
    check(Graph({"x": x}, {"y": y}), {"x": normal(m, r)}, target=target)


@widths
def test_feature_maps(target: str) -> None:
    """Padding, strides, depthwise, residual, concat at a place that no vector divides."""
    x = x_of(1, 3, 20, 22)
    a = relu(g.add(conv(x, weights(24, 3, 3, 3), 2, 1), weights(24, 1, 1)))
    b = relu(g.add(conv(a, weights(24, 1, 3, 3), 1, 1, 24), weights(24, 1, 1)))
    c = conv(b, weights(40, 24, 1, 1))
    d = g.add(conv(c, weights(40, 40, 3, 3), 1, 1), c)
    e = g.concat([d, conv(d, weights(17, 40, 1, 1))], 1)
    f = conv(e, weights(32, 57, 1, 1))
    check(Graph({"x": x}, {"mean": g.reduce("sum", f, [2, 3]), "joined": e}),
          {"x": normal(1, 3, 20, 22)}, 5e-6, target)


@widths
def test_pooling(target: str) -> None:
    x = x_of(1, 10, 13, 15)
    y = conv(x, weights(24, 10, 1, 1))
    padded = g.pad(y, (0, 0, 1, 1), (0, 0, 1, 1), -np.inf)
    rows = [g.slice_(padded, (0, 0, 0, d), (1, 1, 1, 2), (1, 24, 15, 8)) for d in range(3)]
    across = g.maximum(g.maximum(rows[0], rows[1]), rows[2])
    cols = [g.slice_(across, (0, 0, d, 0), (1, 1, 2, 1), (1, 24, 7, 8)) for d in range(3)]
    check(Graph({"x": x}, {"y": g.maximum(g.maximum(cols[0], cols[1]), cols[2])}),
          {"x": normal(1, 10, 13, 15)}, target=target)


@widths
def test_attention(target: str) -> None:
    x = x_of(2, 9, 64)

    def heads(t: Node) -> Node:
        return g.permute(g.reshape(t, (2, 9, 4, 16)), (0, 2, 1, 3))

    q, k, v = (heads(matmul(x, weights(64, 64))) for _ in range(3))
    scores = g.mul(matmul(q, g.permute(k, (0, 1, 3, 2))), g.like(x, 0.01))
    e = g.exp(g.sub(scores, g.reduce("max", scores, [3])))
    p = g.div(e, g.reduce("sum", e, [3]))
    y = g.reshape(g.permute(matmul(p, v), (0, 2, 1, 3)), (2, 9, 64))
    check(Graph({"x": x}, {"y": y}), {"x": normal(2, 9, 64)}, 5e-6, target)


@widths
def test_views(target: str) -> None:
    x = x_of(4, 6, 10)
    outs = {
        "turned": g.permute(x, (2, 0, 1)),
        "back": g.slice_(x, (3, 0, 9), (-1, 2, -3), (4, 3, 4)),
        "flat": g.reshape(g.permute(x, (1, 0, 2)), (24, 10)),
        "padded": g.pad(x, (1, 0, 2), (0, 3, 1), 2.5),
        "wide": g.expand(g.narrow(x, 1, 2, 1), (4, 6, 10)),
        "joined": g.concat([x, g.narrow(x, 2, 3, 5), x], 2),
    }
    check(Graph({"x": x}, outs), {"x": normal(4, 6, 10)}, target=target)


def test_gather_clamps_and_counts_from_the_end() -> None:
    x, i = x_of(3, 20), g.placeholder("i", (5,), INT64)
    check(Graph({"x": x, "i": i}, {"a": g.gather(x, [i], 1), "b": g.gather(x, [i], 0)}),
          {"x": normal(3, 20), "i": np.array([0, 2, -1, -3, 1])})


@pytest.mark.parametrize("kind", ["set", "sum", "max"])
def test_scatter(kind: str) -> None:
    x, u = x_of(3, 20), g.placeholder("u", (3, 5), FLOAT32)
    i = g.placeholder("i", (5,), INT64)
    check(Graph({"x": x, "u": u, "i": i}, {"y": g.scatter(x, u, [i], 1, kind)}),
          {"x": normal(3, 20), "u": normal(3, 5), "i": np.array([0, 2, -1, 2, 1])})


def test_sort_is_stable_and_puts_nan_last() -> None:
    x = x_of(3, 20)
    data = np.round(normal(3, 20))
    data[1, 4] = np.nan
    check(Graph({"x": x}, {"up": g.sort(x, 1), "down": g.sort(x, 1, True)}), {"x": data})


@pytest.mark.parametrize("value", [True, False])
def test_if(value: bool) -> None:
    x, c = x_of(3, 20), g.placeholder("c", (), BOOL)
    p = g.placeholder("p", (3, 20), FLOAT32)
    then = Graph({"p": p}, {"a": g.mul(p, g.like(p, 2)), "b": p})
    other = Graph({"p": p}, {"a": g.add(p, g.like(p, 2)), "b": g.neg(p)})
    a, b = g.if_(c, then, other, [x])
    check(Graph({"x": x, "c": c}, {"y": g.add(a, b)}),
          {"x": normal(3, 20), "c": np.array(value)})


@pytest.mark.parametrize("stop", [7, 3])
def test_loop(stop: int) -> None:
    turn, s = g.placeholder("turn", (), INT64), g.placeholder("s", (20,), FLOAT32)
    rows = g.placeholder("rows", (7, 20), FLOAT32)
    after = g.add(g.mul(s, g.like(s, 0.5)), g.gather(rows, [turn], 0))
    go_on = g.lt(turn, g.like(turn, stop - 1))
    body = Graph({"turn": turn, "s": s, "rows": rows},
                 {"go": go_on, "s": after, "o": g.mul(after, g.like(s, 2))})
    q, s0 = g.placeholder("q", (7, 20), FLOAT32), g.placeholder("s0", (20,), FLOAT32)
    last, each = g.loop(g.const(np.array(7)), g.const(np.array(True)), [s0], [q], body, 7)
    check(Graph({"q": q, "s0": s0}, {"last": last, "each": each}),
          {"q": normal(7, 20), "s0": normal(20)})


def test_integers_follow_the_grammar() -> None:
    x, y = x_of(6, 7, dtype=INT64), g.placeholder("y", (6, 7), INT64)
    outs = {
        "div": g.div(x, y), "mod": g.mod(x, y), "less": g.lt(x, y), "float": g.cast(x, FLOAT32),
        "small": g.cast(g.cast(x, FLOAT64), INT32), "byte": g.cast(x, UINT8),
        "low": g.reduce("min", x, [1]), "any": g.reduce("max", g.lt(x, y), [0]),
        "all": g.reduce("min", g.lt(x, y), [0]), "pick": g.where(g.lt(x, y), x, g.iota((6, 7), 1)),
        "bits": g.xor(g.and_(x, y), g.shl(g.or_(x, y), g.like(x, 2))), "not": g.not_(x),
    }
    y_data = rng.integers(1, 9, (6, 7)) * np.where(rng.random((6, 7)) < 0.5, -1, 1)
    check(Graph({"x": x, "y": y}, outs), {"x": rng.integers(-99, 99, (6, 7)), "y": y_data})


def test_division_by_zero_does_not_trap() -> None:
    from tinyedge import load
    from tinyedge.compiler import compile_graph

    x, y = x_of(8, dtype=INT32), g.placeholder("y", (8,), INT32)
    plan = compile_graph(Graph({"x": x, "y": y}, {"q": g.div(x, y), "r": g.mod(x, y)}))
    low = np.iinfo(np.int32).min
    with load(plan) as run:
        out = run(x=np.full(8, low, np.int32), y=np.array([0, -1, 1, 2, 0, -1, 3, -3], np.int32))
    assert out["q"].shape == (8,)


@widths
def test_float16_accumulates_in_float32(target: str) -> None:
    x = x_of(6, 370, dtype=FLOAT16)
    outs = {"sum": g.reduce("sum", x, [1]), "square": g.mul(x, x)}
    check(Graph({"x": x}, outs), {"x": normal(6, 370, dtype="float16")}, 2e-3, target)


def test_a_shifted_history_is_updated_in_place() -> None:
    from tinyedge import load
    from tinyedge.compiler import compile_graph

    q, new = g.placeholder("q", (6, 33), FLOAT32), g.placeholder("new", (1, 33), FLOAT32)
    after = g.concat([g.narrow(q, 0, 1, 5), new], 0)
    plan = compile_graph(Graph({"q": q, "new": new}, {"sum": g.reduce("sum", after, [0]),
                                                      "next": after}, {"next": "q"}))
    assert plan.arenas[1] == 0 and sum(isinstance(s, Copy) for s in plan.steps) == 2
    history = np.zeros((6, 33), np.float32)
    with load(plan) as run:
        for _ in range(9):
            row = normal(1, 33)
            history = np.concatenate([history[1:], row])
            np.testing.assert_allclose(run(new=row)["sum"], history.sum(0, keepdims=True),
                                       rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(run.states["q"], history)


@pytest.mark.parametrize("rows", [1, 7, 50])
def test_symbolic_dimension(rows: int) -> None:
    from tinyedge.shape import symbol

    n = symbol("N", 1, 50)
    x = g.placeholder("x", (n, 20), FLOAT32)
    y = relu(g.add(matmul(x, weights(20, 24)), weights(24)))
    outs = {"y": y, "twice": g.mul(x, g.like(x, 2)), "sum": g.reduce("sum", x, [0, 1])}
    check(Graph({"x": x}, outs), {"x": normal(rows, 20)}, 1e-5)


@widths
def test_float64_becomes_float16_in_one_rounding(target: str) -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    between = (halves[1:] + halves[:-1]) / 2
    beside = [np.nextafter(between, to) for to in (0, np.inf)]
    x = np.concatenate([halves, between, *beside, [65520, 1e300, np.inf, np.nan, 1e-300]])
    x = np.concatenate([x, -x])
    node = g.placeholder("x", x.shape, FLOAT64)
    check(Graph({"x": node}, {"y": g.cast(node, FLOAT16)}), {"x": x}, 0, target)


def test_one_constant_of_higher_rank_after_a_contraction() -> None:
    x = x_of(6, 5)
    y = g.add(g.reshape(matmul(x, weights(5, 8)), (6, 8, 1)), g.const(normal(1, 1, 1, 1)))
    check(Graph({"x": x}, {"y": y}), {"x": normal(6, 5)})


def test_a_static_mean_over_an_open_dimension_is_not_folded() -> None:
    from tinyedge.shape import symbol

    x = g.placeholder("x", (symbol("N", 1, 9), 4), FLOAT32)
    ones = g.add(g.full(x.shape, 1, FLOAT32), g.full(x.shape, 2, FLOAT32))
    y = g.reduce("sum", ones, [0])
    check(Graph({"x": x}, {"y": y}), {"x": normal(3, 4)})


@pytest.mark.parametrize("length", [400, 2500])
def test_long_chains_are_cut(length: int) -> None:
    x = x_of(7)
    y = x
    for i in range(length):
        y = (g.sin, relu, g.tanh)[i % 3](y)
    plan = check(Graph({"x": x}, {"y": y}), {"x": normal(7)}, 1e-3)
    assert len(plan.kernels) < length / 10


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_remainders_of_large_quotients(kind: str) -> None:
    from tinyedge.dtype import dtype_of

    a = np.array([300, 1e4, 6e4, -6e4, 7, -7, 5.5, 1, -1, 3e4], kind)
    b = np.array([0.948, 3, 0.7, 0.3, -3, 3, -2.2, np.inf, np.inf, 0.0625], kind)
    if kind != "float16":
        a, b = np.append(a, [1e10, -1e9]).astype(kind), np.append(b, [3, 0.7]).astype(kind)
    x, y = (g.placeholder(n, a.shape, dtype_of(kind)) for n in "ab")
    with tinyedge.load(compile_graph(Graph({"a": x, "b": y}, {"r": g.mod(x, y)}))) as run:
        got = run(a=a, b=b)["r"].astype(np.float64)
    want = np.mod(a.astype(np.longdouble), b.astype(np.longdouble)).astype(np.float64)
    np.testing.assert_allclose(got, want, atol=2e-3 if kind == "float16" else 1e-5)


def test_products_of_nothing_are_scaled() -> None:
    x = x_of(0, 4)
    outs = {"wide": g.mul(matmul(x, weights(4, 3)), weights(1, 3)),
            "none": g.mul(matmul(x, g.const(np.zeros((4, 0), np.float32))),
                          g.const(np.zeros((1, 0), np.float32)))}
    check(Graph({"x": x}, outs), {"x": np.zeros((0, 4), np.float32)})


@pytest.mark.parametrize("rows", [1, 24, 48, 100])
def test_large_weights_are_fetched_early(rows: int) -> None:
    """The tiles that use a panel ask for every line of the next one, and hardly for more."""
    width, deep = 512, 512
    x = x_of(rows, deep)
    plan = check(Graph({"x": x}, {"y": matmul(x, weights(deep, width))}),
                 {"x": normal(rows, deep)}, 2e-5, "cpu:x86-64-v3")
    loops = plan.kernels[0].loops
    pieces = int(re.findall(r"grid g < (\d+)", loops)[0])
    tiles = int(re.findall(r"floordiv\(g, (\d+)\)", loops)[0]) if rows > 1 else 1
    panel = int(re.findall(r"= b1\[\(\d+\*r0 \+ (\d+)\*(?:g|floordiv)", loops)[0]) // 16
    indices = [compile(i, "index", "eval") for i in re.findall(r"= b1\[(.*):prefetch\]", loops)]
    names = {"floordiv": operator.floordiv, "mod": operator.mod}
    for number in range(pieces // tiles):
        asked = {eval(i, {**names, "g": g, "r0": r}) // 16 for i in indices
                 for g in range(number * tiles, (number + 1) * tiles) for r in range(deep)}
        first = (number + 1) * panel if tiles > 1 else number * panel + 64
        assert set(range(first, first + panel)) <= asked
        assert len(asked) <= panel + len(indices) * deep


@pytest.mark.parametrize("target", ["wasm", "c"])
def test_nothing_is_fetched_early_where_a_target_cannot(target: str) -> None:
    x = x_of(24, 512)
    graph = Graph({"x": x}, {"y": matmul(x, weights(512, 512))})
    assert "prefetch" not in compile_graph(graph, target).kernels[0].loops
