"""The interpreter against numpy written out by hand, one property of the grammar a test."""

from __future__ import annotations

import numpy as np
import pytest

from tinyedge import graph as g
from tinyedge.dtype import BOOL, FLOAT16, FLOAT32, INT32, INT64
from tinyedge.errors import InputError
from tinyedge.graph import Graph, Node
from tinyedge.interpreter import Array, evaluate_constant, interpret
from tinyedge.shape import symbol

RNG = np.random.default_rng(0)


def value(n: Node) -> Array:
    return evaluate_constant(n)


def random(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def close(a: Array, b: Array) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_matmul_as_contract() -> None:
    a, b = random(3, 4, 5), random(3, 5, 6)
    maps = (
        ((0, ((0, 1),)), (0, ((1, 1),)), (0, ((3, 1),))),
        ((0, ((0, 1),)), (0, ((3, 1),)), (0, ((2, 1),))),
    )
    close(value(g.contract(g.const(a), g.const(b), (3, 4, 6), (5,), maps)), a @ b)


def test_convolution_as_contract_with_stride_dilation_and_flip() -> None:
    x, w = random(2, 3, 11), random(4, 3, 3)
    # out[n, k, i] = sum over c, j of x[n, c, 2*i + 2*j] * w[k, c, 2 - j]
    maps = (
        ((0, ((0, 1),)), (0, ((3, 1),)), (0, ((2, 2), (4, 2)))),
        ((0, ((1, 1),)), (0, ((3, 1),)), (2, ((4, -1),))),
    )
    out = value(g.contract(g.const(x), g.const(w), (2, 4, 4), (3, 3), maps))
    want = np.zeros((2, 4, 4), np.float32)
    for i in range(4):
        for j in range(3):
            want[:, :, i] += x[:, :, 2 * i + 2 * j] @ w[:, :, 2 - j].T
    close(out, want)


def test_contract_sums_over_an_index_that_no_operand_has() -> None:
    a, b = random(2), random(2)
    maps = (((0, ((0, 1),)),), ((0, ((0, 1),)),))
    close(value(g.contract(g.const(a), g.const(b), (2, 3), (4,), maps)),
          np.repeat((4 * a * b)[:, None], 3, 1))


def test_contract_accumulates_float16_in_float32() -> None:
    ones = np.ones((1, 4096), np.float16)
    maps = (((0, ((0, 1),)), (0, ((1, 1),))),) * 2
    out = value(g.contract(g.const(ones), g.const(ones), (1,), (4096,), maps))
    assert out.dtype == np.float16 and out[0] == 4096


def test_large_contractions_are_done_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyedge.interpreter.LARGEST", 7)
    test_matmul_as_contract()
    test_convolution_as_contract_with_stride_dilation_and_flip()


def test_division_truncates_and_mod_has_the_divisors_sign() -> None:
    a = np.array([7, -7, 7, -7, 0, -1], np.int32)
    b = np.array([2, 2, -2, -2, 5, 4], np.int32)
    assert value(g.div(g.const(a), g.const(b))).tolist() == [3, -3, -3, 3, 0, 0]
    assert value(g.mod(g.const(a), g.const(b))).tolist() == [1, 1, -1, -1, 0, 3]
    x = np.array([-1.5], np.float32)
    assert value(g.mod(g.const(x), g.like(g.const(x), 1))).tolist() == [0.5]


def test_maximum_and_reductions_give_nan() -> None:
    x = g.const(np.array([1, np.nan, 2], np.float32))
    assert np.isnan(value(g.maximum(x, g.like(x, 5)))).tolist() == [False, True, False]
    assert np.isnan(value(g.reduce("min", x, [0]))).all()


def test_rounding_and_conversions() -> None:
    x = g.const(np.array([0.5, 1.5, -2.5, -1.7], np.float32))
    assert value(g.round_(x)).tolist() == [0, 2, -2, -2]
    assert value(g.cast(x, INT32)).tolist() == [0, 1, -2, -1]
    assert value(g.cast(x, BOOL)).all()
    assert value(g.bitcast(g.like(x, 1), INT32)) == 0x3F800000


def test_views() -> None:
    x = random(2, 3, 4)
    n = g.const(x)
    close(value(g.permute(n, (2, 0, 1))), x.transpose(2, 0, 1))
    close(value(g.slice_(n, (1, 2, 3), (1, -1, -2), (1, 3, 2))), x[1:, ::-1, 3::-2])
    close(value(g.pad(n, (0, 1, 0), (1, 0, 2), -1.0)),
          np.pad(x, ((0, 1), (1, 0), (0, 2)), constant_values=-1))
    close(value(g.expand(g.reshape(n, (2, 1, 12)), (2, 2, 12))),
          np.repeat(x.reshape(2, 1, 12), 2, 1))
    assert value(g.iota((2, 3), 1)).tolist() == [[0, 1, 2], [0, 1, 2]]


def test_gather_and_scatter_clamp_and_count_from_the_end() -> None:
    x = random(3, 4, 5)
    rows, columns = g.const(np.array([0, -1, 9])), g.const(np.array([1, 2, -9]))
    close(value(g.gather(g.const(x), [rows, columns])), x[[0, 2, 2], [1, 2, 0]])
    close(value(g.gather(g.const(x), [columns], 1)), x[:, [1, 2, 0]])
    ones = g.const(np.ones((3, 2, 5), np.float32))
    twice = g.const(np.array([1, 1]))
    want = x.copy()
    want[:, 1] += 2
    close(value(g.scatter(g.const(x), ones, [twice], 1, "sum")), want)
    want[:, 1] = 1
    close(value(g.scatter(g.const(x), ones, [twice], 1)), want)


def test_sort_is_stable_in_both_directions() -> None:
    x = g.const(np.array([2, 1, 2, 3, 1], np.float32))
    assert value(g.sort(x, 0)).tolist() == [1, 4, 0, 2, 3]
    assert value(g.sort(x, 0, descending=True)).tolist() == [3, 0, 2, 1, 4]


def test_if_and_loop() -> None:
    x = g.placeholder("x", (2,), FLOAT32)
    then, other = Graph({"x": x}, {"y": g.neg(x)}), Graph({"x": x}, {"y": g.exp(x)})
    c = g.placeholder("c", (), BOOL)
    graph = Graph({"c": c, "x": x}, {"y": g.if_(c, then, other, [x])[0]})
    data = random(2)
    close(interpret(graph, {"c": np.array(True), "x": data})["y"], -data)
    close(interpret(graph, {"c": np.array(False), "x": data})["y"], np.exp(data))

    i, total, step = (g.placeholder(k, s, t) for k, s, t in
                      (("i", (), INT64), ("total", (2,), FLOAT32), ("step", (2,), FLOAT32)))
    more = g.add(total, step)
    body = Graph({"i": i, "total": total, "step": step},
                 {"cond": g.lt(i, g.like(i, 2)), "total": more, "seen": more})
    kept, seen = g.loop(g.const(np.array(9)), g.const(np.array(True)), [x], [x], body, 5)
    out = interpret(Graph({"x": x}, {"kept": kept, "seen": seen}), {"x": data})
    close(out["kept"], 4 * data)
    close(out["seen"], np.stack([2 * data, 3 * data, 4 * data, 0 * data, 0 * data]))


def test_symbolic_dimensions_come_from_the_inputs() -> None:
    n = symbol("n", 1, 8)
    x = g.placeholder("x", (n, 2), FLOAT16)
    graph = Graph({"x": x}, {"y": g.reshape(g.add(x, x), (n * 2,)), "i": g.iota((n,), 0)})
    out = interpret(graph, {"x": np.ones((3, 2), np.float16)})
    assert out["y"].tolist() == [2] * 6 and out["i"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("inputs, words", [
    ({}, "'x' is missing"),
    ({"x": np.zeros((2, 2), np.float32), "y": 1}, "'y' is unknown"),
    ({"x": np.zeros((2, 2))}, "type float64 is not float32"),
    ({"x": np.zeros((2, 3), np.float32)}, "shape"),
    ({"x": np.zeros((9, 2), np.float32)}, "n = 9 is not within 1..8"),
])
def test_wrong_inputs_are_refused(inputs: dict[str, Array], words: str) -> None:
    x = g.placeholder("x", (symbol("n", 1, 8), 2), FLOAT32)
    with pytest.raises(InputError, match=words):
        interpret(Graph({"x": x}, {"x": x}), inputs)
