"""Weights of 16 bits: what is narrowed, that it computes the same, in half the space; and products
of bfloat16 values."""

from __future__ import annotations

import numpy as np
import pytest

import tinyedge
from tests.compiled import check, difference
from tests.test_codegen import conv, matmul, normal, relu, weights, x_of
from tinyedge import graph as g
from tinyedge.compiler import compile_graph
from tinyedge.drivers.cpu import features
from tinyedge.dtype import BFLOAT16, FLOAT16, FLOAT32, DType
from tinyedge.errors import InputError, ShapeError
from tinyedge.graph import Graph, validate
from tinyedge.interpreter import interpret
from tinyedge.passes import narrow, optimize, winograd

rng = np.random.default_rng(4)


def network() -> Graph:
    x = x_of(1, 24, 30, 30)
    y = relu(conv(relu(conv(x, weights(64, 24, 3, 3), 1, 1)), weights(64, 64, 3, 3), 1, 1))
    pooled = g.reshape(g.reduce("max", y, [2, 3]), (1, 64))
    return Graph({"x": x}, {"y": y, "z": matmul(pooled, weights(64, 100))})


@pytest.mark.parametrize("kind", [FLOAT16, BFLOAT16])
@pytest.mark.parametrize("target", ["cpu:x86-64-v4", "cpu:x86-64-v3"])
def test_narrow_weights_compute_what_they_say(target: str, kind: DType) -> None:
    graph = narrow.run(winograd.run(optimize(validate(network()))), kind)
    kinds = [n.dtype for n in graph.nodes() if n.dtype in (FLOAT16, BFLOAT16)]
    # minimal filters are left some more places
    assert len(kinds) == 3 and kinds.count(kind) == (3 if kind is FLOAT16 else 1)
    check(graph, {"x": normal(1, 24, 30, 30)}, 1e-5, target)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_the_space_and_nearly_the_same_numbers(kind: str) -> None:
    feeds = {"x": normal(1, 24, 30, 30)}
    graph = network()
    wide = compile_graph(graph, "cpu:x86-64-v3")
    half = compile_graph(graph, "cpu:x86-64-v3", float16=kind == "float16",
                         bfloat16=kind == "bfloat16")
    assert half.arenas[0] < 0.55 * wide.arenas[0]
    with tinyedge.load(wide, threads=1) as a, tinyedge.load(half, threads=1) as b:
        one, two, again = a(feeds), b(feeds), b(feeds)
    for name, value in one.items():
        assert 1e-7 < difference(two[name], value) < 1e-2
        assert two[name].tobytes() == again[name].tobytes()


def test_what_does_not_fit_stays_wide() -> None:
    x = x_of(4, 64)
    large = normal(64, 64)
    large[3, 5] = 70000
    graph = narrow.run(validate(Graph({"x": x}, {
        "a": matmul(x, g.const(large)), "b": matmul(x, weights(64, 8)),
        "c": matmul(x, weights(64, 64))})))
    kinds = {name: n.inputs[1].dtype for name, n in graph.outputs.items()}
    assert kinds == {"a": FLOAT32, "b": FLOAT32, "c": FLOAT16}
    feeds = {"x": normal(4, 64)}
    assert all(np.isfinite(v).all() for v in interpret(graph, feeds).values())


SHORT = "cpu:x86-64-v4,avx512bf16"
needs_bf16 = pytest.mark.skipif(bool(features.missing("x86-64-v4", ("avx512bf16",))),
                                reason="this processor has no AVX-512 BF16")


def residual(c: int, size: int, taps: int, stride: int = 1) -> Graph:
    """Two convolutions, a residual addition, a pooled product; odd and even sizes of everything."""
    x = x_of(1, c, size, size)
    a = relu(conv(x, weights(40, c, taps, taps), stride, taps // 2))
    b = relu(conv(a, weights(40, 40, 1, 1), 1, 0))
    y = g.add(a, relu(conv(b, weights(40, 40, taps, taps), 1, taps // 2)))
    pooled = g.reshape(g.reduce("max", y, [2, 3]), (1, 40))
    return Graph({"x": x}, {"y": y, "z": matmul(pooled, weights(40, 100)), "b": b})


@needs_bf16
@pytest.mark.parametrize("c, size, taps, stride", [
    (24, 14, 3, 1), (3, 15, 3, 2), (64, 7, 1, 1), (17, 9, 5, 1)])
def test_products_of_bfloat16(c: int, size: int, taps: int, stride: int) -> None:
    graph = narrow.run(optimize(validate(residual(c, size, taps, stride))), BFLOAT16, both=True)
    products = [n for n in graph.nodes() if n.op == "contract" and n.inputs[0].dtype is BFLOAT16]
    assert len(products) == (4 if c % 2 == 0 else 3)
    assert all(n.dtype is FLOAT32 for n in (*products, *graph.outputs.values()))
    feeds = {"x": normal(1, c, size, size)}
    want = interpret(graph, feeds)
    plan = compile_graph(graph, SHORT)
    assert sum("dot(" in k.loops for k in plan.kernels) >= 3
    with tinyedge.load(plan, threads=2) as run:
        got, again = run(feeds), run(feeds)
    for name, value in want.items():
        # a value between two of bfloat16 may go to either
        assert difference(got[name], value) < 4e-3
        assert got[name].tobytes() == again[name].tobytes()


@needs_bf16
def test_bfloat16_when_asked_for() -> None:
    graph, feeds = residual(64, 14, 3), {"x": normal(1, 64, 14, 14)}
    plan = compile_graph(graph, bfloat16=True)
    assert plan.target.endswith("avx512bf16")
    assert "bf16" not in compile_graph(graph).target
    with tinyedge.load(plan) as run:
        got = run(feeds)
    want = interpret(validate(graph), feeds, exact=True)
    assert all(1e-7 < difference(got[k], v) < 2e-2 for k, v in want.items())


def test_minimal_filters_stay_where_they_are_faster() -> None:
    x = x_of(1, 64, 56, 56)
    graph = validate(Graph({"x": x}, {"y": conv(x, weights(64, 64, 3, 3), 1, 1)}))
    kept = winograd.run(narrow.run(graph, BFLOAT16, both=True))
    assert any(n.op == "winograd_in" for n in kept.nodes())


def test_one_type_of_16_bits() -> None:
    with pytest.raises(InputError, match="both float16 and bfloat16"):
        compile_graph(network(), float16=True, bfloat16=True)


def test_only_this_mixture_of_types() -> None:
    with pytest.raises(ShapeError, match="different types"):
        matmul(g.cast(x_of(4, 8), FLOAT16), weights(8, 8))


def test_a_processor_without_conversions_is_refused() -> None:
    with pytest.raises(InputError, match="x86-64-v2 has no instructions for it"):
        compile_graph(network(), "cpu:x86-64-v3+v2", float16=True)
    with pytest.raises(InputError, match="--bfloat16: cpu:x86-64-v2 has no instructions for it"):
        compile_graph(network(), "cpu:x86-64-v2", bfloat16=True)
