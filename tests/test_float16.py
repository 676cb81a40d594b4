"""Weights stored as float16: what is narrowed, that it computes the same, in half the space."""

from __future__ import annotations

import numpy as np
import pytest

import tinyedge
from tests.compiled import check, difference
from tests.test_codegen import conv, matmul, normal, relu, weights, x_of
from tinyedge import graph as g
from tinyedge.compiler import compile_graph
from tinyedge.dtype import FLOAT16, FLOAT32
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


@pytest.mark.parametrize("target", ["cpu:x86-64-v4", "cpu:x86-64-v3"])
def test_narrow_weights_compute_what_they_say(target: str) -> None:
    graph = narrow.run(winograd.run(optimize(validate(network()))))
    assert sum(n.dtype is FLOAT16 for n in graph.nodes()) == 3
    check(graph, {"x": normal(1, 24, 30, 30)}, 1e-5, target)


def test_half_the_space_and_nearly_the_same_numbers() -> None:
    feeds = {"x": normal(1, 24, 30, 30)}
    graph = network()
    wide, half = (compile_graph(graph, "cpu:x86-64-v3", float16=f) for f in (False, True))
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


def test_only_this_mixture_of_types() -> None:
    with pytest.raises(ShapeError, match="different types"):
        matmul(g.cast(x_of(4, 8), FLOAT16), weights(8, 8))


def test_a_processor_without_conversions_is_refused() -> None:
    with pytest.raises(InputError, match="x86-64-v2 has no instructions for it"):
        compile_graph(network(), "cpu:x86-64-v3+v2", float16=True)
