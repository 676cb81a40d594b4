"""Quantised contractions as products of bytes: when, that they are exact, and their kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tinyedge
import tinyedge.onnx
from tests.compiled import check, difference
from tinyedge import graph as g
from tinyedge.compiler import compile_graph
from tinyedge.drivers.cpu import features
from tinyedge.dtype import FLOAT32, INT8, INT32, UINT8, DType
from tinyedge.errors import ShapeError
from tinyedge.graph import Graph, Node, validate
from tinyedge.interpreter import interpret
from tinyedge.passes import optimize

Array = np.ndarray[Any, Any]
rng = np.random.default_rng(6)
VNNI = "cpu:x86-64-v4,avx512vnni"
needs_vnni = pytest.mark.skipif(bool(features.missing("x86-64-v4", ("avx512vnni",))),
                                reason="this processor has no AVX-512 VNNI")


def tensors(*sizes: int, kind: str = "uint8") -> Array:
    limits = np.iinfo(kind)
    return rng.integers(limits.min, limits.max + 1, sizes).astype(kind)


def network(c: int, k: int, taps: int, zero: int, kind: type[np.integer[Any]], stride: int = 1,
            weights_first: bool = False) -> onnx.ModelProto:
    """float x -> quantised -> convolution -> relu -> quantised -> float, as exporters write it."""
    info, node = helper.make_tensor_value_info, helper.make_node
    held = {
        "xs": np.array(0.02, np.float32), "xz": np.array(zero, kind),
        "w": rng.integers(-127, 128, (k, c, taps, taps)).astype(np.int8),
        "ws": rng.uniform(0.001, 0.01, k).astype(np.float32), "wz": np.zeros(k, np.int8),
        "b": rng.standard_normal(k).astype(np.float32),
        "ys": np.array(0.05, np.float32), "yz": np.array(zero // 2, kind),
    }
    held["w"][:, 0, 0, 0] = 127  # as calibration leaves it: the largest weight has all bits
    nodes = [
        node("QuantizeLinear", ["x", "xs", "xz"], ["q"]),
        node("DequantizeLinear", ["q", "xs", "xz"], ["d"]),
        node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=0),
        node("Conv", ["d", "wd", "b"], ["c"], "conv", pads=[taps // 2] * 4, strides=[stride] * 2),
        node("Relu", ["c"], ["r"]),
        node("QuantizeLinear", ["r", "ys", "yz"], ["yq"]),
        node("DequantizeLinear", ["yq", "ys", "yz"], ["y"]),
    ]
    size = -(-13 // stride)
    graph = helper.make_graph(
        nodes, "quantised", [info("x", TensorProto.FLOAT, [1, c, 13, 13])],
        [info("y", TensorProto.FLOAT, [1, k, size, size])],
        [numpy_helper.from_array(v, n) for n, v in held.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def integer_contractions(graph: Graph) -> list[Node]:
    return [n for n in graph.nodes() if n.op == "contract" and n.dtype is INT32]


SHAPES = [(16, 32, 3, 1), (3, 24, 5, 2), (6, 20, 1, 1), (64, 8, 1, 1)]


@pytest.mark.parametrize("kind, zero", [(np.uint8, 0), (np.uint8, 131), (np.int8, -7)])
@pytest.mark.parametrize("c, k, taps, stride", SHAPES)
def test_quantised_convolutions(
    c: int, k: int, taps: int, stride: int, kind: type[np.integer[Any]], zero: int,
) -> None:
    model = network(c, k, taps, zero, kind, stride)
    plain = validate(tinyedge.onnx.load(model))
    whole = optimize(plain, dots=True)
    made = integer_contractions(whole)
    assert len(made) == 1
    assert [i.dtype for i in made[0].inputs] == [UINT8, INT8]
    assert made[0]["reduce"][0] % 4 == 0
    feeds = {"x": rng.standard_normal((1, c, 13, 13)).astype(np.float32)}
    want, got = (interpret(graph, feeds, exact=True)["y"] for graph in (plain, whole))
    off = np.abs(want - got)
    # one step where a value lies between two; nearly everywhere the same
    assert off.max() <= 0.0501 and (off > 1e-6).mean() < 0.01
    assert not integer_contractions(optimize(plain))


@needs_vnni
@pytest.mark.parametrize("kind, zero", [(np.uint8, 131), (np.int8, -7)])
@pytest.mark.parametrize("c, k, taps, stride", SHAPES)
def test_kernels_compute_what_the_graph_says(
    c: int, k: int, taps: int, stride: int, kind: type[np.integer[Any]], zero: int,
) -> None:
    graph = optimize(validate(tinyedge.onnx.load(network(c, k, taps, zero, kind, stride))), True)
    feeds = {"x": rng.standard_normal((1, c, 13, 13)).astype(np.float32)}
    plan = compile_graph(graph, VNNI)
    assert any("dot(" in kernel.loops for kernel in plan.kernels)
    with tinyedge.load(plan, threads=2) as run:
        got = run(feeds)["y"]
    off = np.abs(got - interpret(graph, feeds)["y"])
    assert off.max() <= 0.0501 and (off > 1e-6).mean() < 0.01


@needs_vnni
def test_sums_are_exact() -> None:
    for rows, depth, columns in ((5, 64, 40), (1, 300, 7), (33, 12, 100)):
        x = g.placeholder("x", (rows, depth), UINT8)
        w = g.const(tensors(depth, columns, kind="int8"))
        y = g.contract(x, w, (rows, columns), (depth,), (
            ((0, ((0, 1),)), (0, ((2, 1),))), ((0, ((2, 1),)), (0, ((1, 1),)))))
        feeds = {"x": tensors(rows, depth)}
        want = feeds["x"].astype(np.int32) @ w.value.astype(np.int32)
        for target in (VNNI, "cpu:x86-64-v3"):
            check(Graph({"x": x}, {"y": y}), feeds, 0, target)
        assert (interpret(validate(Graph({"x": x}, {"y": y})), feeds)["y"] == want).all()


def test_the_default_target_asks_for_it_only_where_it_is_used() -> None:
    plain = compile_graph(Graph({"x": (x := g.placeholder("x", (4,), FLOAT32))},
                                {"y": g.add(x, x)}))
    assert "vnni" not in plain.target
    quantised = compile_graph(tinyedge.onnx.load(network(16, 32, 3, 3, np.uint8)))
    assert ("vnni" in quantised.target) == (not features.missing("x86-64-v4", ("avx512vnni",)))
    assert "vnni" not in compile_graph(
        tinyedge.onnx.load(network(16, 32, 3, 3, np.uint8)), "cpu:x86-64-v3").target


def test_values_taken_back_at_once_stay() -> None:
    x = g.placeholder("x", (40,), FLOAT32)

    def quantised(kind: DType, low: float, high: float) -> Node:
        y = g.add(g.round_(g.div(x, g.like(x, 0.1))), g.like(x, 3))
        y = g.minimum(g.maximum(y, g.like(x, low)), g.like(x, high))
        return g.cast(g.cast(y, kind), FLOAT32)

    graph = optimize(validate(Graph({"x": x}, {
        "kept": quantised(UINT8, 0, 255), "wraps": quantised(UINT8, -10, 255)})))
    casts = {name: sum(n.op == "cast" for n in g.walk([y])) for name, y in graph.outputs.items()}
    assert casts == {"kept": 0, "wraps": 2}
    feeds = {"x": np.linspace(-30, 30, 40).astype(np.float32)}
    for target in ("cpu", "cpu:x86-64-v2"):  # what "wraps" gives out of range is left open
        check(Graph(graph.inputs, {"kept": graph.outputs["kept"]}), feeds, 1e-6, target)


def test_mixed_types_that_mean_nothing_are_refused() -> None:
    a, b = g.placeholder("a", (4, 8), INT8), g.placeholder("b", (8, 4), UINT8)
    with pytest.raises(ShapeError, match="different types"):
        g.contract(a, b, (4, 4), (8,), (((0, ((0, 1),)), (0, ((2, 1),))),
                                         ((0, ((2, 1),)), (0, ((1, 1),)))))


def test_against_a_second_runtime() -> None:
    import onnxruntime

    model = network(16, 32, 3, 9, np.uint8)
    feeds = {"x": rng.standard_normal((1, 16, 13, 13)).astype(np.float32)}
    want = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
    with tinyedge.load(compile_graph(tinyedge.onnx.load(model)), threads=1) as run:
        got = run(feeds)["y"]
    assert difference(np.rint(got / 0.05), np.rint(want / 0.05)) <= 1.01 / np.abs(want / 0.05).max()
    assert (np.abs(got - want) > 1e-6).mean() < 0.01


def test_the_same_products_by_avx_vnni() -> None:
    """No such processor here: what LLVM makes of the kernel is looked at instead."""
    import llvmlite.binding as llvm

    from tinyedge.codegen import llvm_target

    target = llvm_target.parse_target("cpu:x86-64-v3,avxvnni")
    plan = compile_graph(tinyedge.onnx.load(network(16, 32, 3, 3, np.uint8)), target.canonical)
    source = next(k.source for k in plan.kernels if "dot(" in k.loops)
    machine = llvm_target._machine(target)
    assert "{vex} vpdpbusd" in machine.emit_assembly(llvm.parse_assembly(source)).lower() or \
        "\tvpdpbusd" in machine.emit_assembly(llvm.parse_assembly(source))
