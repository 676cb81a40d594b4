"""Recurrent layers and control flow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper

from . import Case, Const, floats, k, model, row, scalar

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def rows() -> Iterator[Case]:
    yield from recurrent()
    yield from conditions()
    yield from loops()
    yield from signals()


def recurrent() -> Iterator[Case]:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}
    batch, size, hidden = 2, 3, 4
    for op, n in gates.items():
        outputs = 3 if op == "LSTM" else 2

        def weights(d: int, n: int = n) -> list[Const]:
            return [Const(floats(d, n * hidden, size)), Const(floats(d, n * hidden, hidden) / 2),
                    Const(floats(d, 2 * n * hidden))]

        for steps in (1, 4, 20):  # unrolled and as a loop
            for direction in ("forward", "reverse", "bidirectional"):
                d = 2 if direction == "bidirectional" else 1
                yield row(op, floats(steps, batch, size), *weights(d), name=f"{direction}{steps}",
                          opset=14, outputs=outputs, hidden_size=hidden, direction=direction)
        state = [floats(1, batch, hidden)] * (2 if op == "LSTM" else 1)
        yield row(op, floats(3, batch, size), *weights(1), None, *state, name="state", opset=14,
                  outputs=outputs, hidden_size=hidden)
        yield row(op, floats(9, batch, size), *weights(1)[:2], name="no_bias", opset=14,
                  outputs=outputs, wanted=[1], hidden_size=hidden)
        for steps in (4, 12):
            yield row(op, floats(steps, batch, size), *weights(2), k(steps, 2, kind=np.int32),
                      name=f"lengths{steps}", opset=14, outputs=outputs, hidden_size=hidden,
                      direction="bidirectional")
        yield row(op, floats(3, batch, size), *weights(1), name="clip", opset=14, outputs=outputs,
                  hidden_size=hidden, clip=0.5)
    yield row("GRU", floats(3, batch, size), *weights_of(3, hidden, size), name="linear_before",
              opset=14, outputs=2, hidden_size=hidden, linear_before_reset=1)
    yield row("GRU", floats(12, batch, size), *weights_of(3, hidden, size), name="linear_before12",
              opset=14, outputs=2, hidden_size=hidden, linear_before_reset=1)
    yield row("LSTM", floats(3, batch, size), *weights_of(4, hidden, size), None, None, None,
              Const(floats(1, 3 * hidden)), name="peepholes", opset=14, outputs=3,
              hidden_size=hidden)
    yield row("LSTM", floats(3, batch, size), *weights_of(4, hidden, size), name="activations",
              opset=14, outputs=3, hidden_size=hidden,
              activations=["HardSigmoid", "Relu", "Softsign"], activation_alpha=[0.3],
              activation_beta=[0.4])
    yield row("RNN", floats(3, batch, size), *weights_of(1, hidden, size), name="relu", opset=14,
              outputs=2, hidden_size=hidden, activations=["Relu"])


def weights_of(n: int, hidden: int, size: int) -> list[Const]:
    return [Const(floats(1, n * hidden, size)), Const(floats(1, n * hidden, hidden) / 2),
            Const(floats(1, 2 * n * hidden))]


def graph(name: str, nodes: list[NodeProto], inputs: dict[str, Any],
          outputs: dict[str, Any]) -> GraphProto:
    return helper.make_graph(
        nodes, name, [helper.make_tensor_value_info(n, *v) for n, v in inputs.items()],
        [helper.make_tensor_value_info(n, *v) for n, v in outputs.items()],
    )


def conditions() -> Iterator[Case]:
    n = helper.make_node
    then = graph("then", [n("Mul", ["x", "w"], ["a"]), n("Exp", ["a"], ["y"])], {},
                 {"y": (FLOAT, [2, 3])})
    other = graph("else", [n("Neg", ["i1"], ["y2"])], {}, {"y2": (FLOAT, [2, 3])})
    nodes = [n("Abs", ["i1"], ["x"]), n("Sqrt", ["x"], ["w"]),
             n("If", ["i0"], ["o0"], then_branch=then, else_branch=other)]
    for value in (True, False):
        yield model(nodes, [np.array(value), floats(2, 3)], f"If_{value}")
    nested = graph("nested", [n("If", ["i1"], ["z"], then_branch=then, else_branch=other)], {},
                   {"z": (FLOAT, [2, 3])})
    renamed = [n("Abs", ["i2"], ["x"]), n("Sqrt", ["x"], ["w"])]
    flat = graph("flat", [n("Add", ["x", "w"], ["q"])], {}, {"q": (FLOAT, [2, 3])})
    inner_other = graph("else", [n("Neg", ["i2"], ["y2"])], {}, {"y2": (FLOAT, [2, 3])})
    del nested.node[0].attribute[:]
    nested.node[0].attribute.extend([
        helper.make_attribute("then_branch", then),
        helper.make_attribute("else_branch", inner_other),
    ])
    for a in (True, False):
        for b in (True, False):
            yield model(
                [*renamed, n("If", ["i0"], ["o0"], then_branch=nested, else_branch=flat)],
                [np.array(a), np.array(b), floats(2, 3)], f"If_nested_{a}_{b}",
            )


def loops() -> Iterator[Case]:
    n = helper.make_node
    header = {"i": (INT64, []), "c": (BOOL, []), "s": (FLOAT, [3])}
    add = [n("Add", ["s", "i2"], ["t"]), n("Identity", ["c"], ["c2"])]
    body = graph("body", add, header, {"c2": (BOOL, []), "t": (FLOAT, [3])})
    stacked = graph("stacked", [*add, n("Mul", ["t", "t"], ["u"])], header,
                    {"c2": (BOOL, []), "t": (FLOAT, [3]), "u": (FLOAT, [3])})
    yield model([n("Loop", ["i0", "", "i1"], ["o0"], body=body)],
                [scalar(5), floats(3), floats(3) * 2], "Loop")
    yield model([n("Loop", ["i0", "", "i1"], ["o0"], body=body)],
                [np.array(4), floats(3), floats(3) * 2], "Loop_runtime_trips")
    yield model([n("Loop", ["i0", "", "i1"], ["o0", "o1"], body=stacked)],
                [scalar(4), floats(3), floats(3) * 2], "Loop_stacked")
    # while the sum is small
    until = graph(
        "until", [n("Add", ["s", "i2"], ["t"]), n("ReduceSum", ["t"], ["total"], keepdims=0),
                  n("Less", ["total", "i3"], ["c2"])],
        header, {"c2": (BOOL, []), "t": (FLOAT, [3])})
    yield model([n("Loop", ["i0", "", "i1"], ["o0"], body=until)],
                [scalar(100), np.ones(3, np.float32), np.ones(3, np.float32),
                 scalar(20, np.float32)], "Loop_until")
    yield model([n("Loop", ["", "i0", "i1"], ["o0"], body=until)],
                [np.array(True), np.ones(3, np.float32), np.ones(3, np.float32),
                 scalar(20, np.float32)], "Loop_while")
    grow = graph("grow", [n("Concat", ["s", "i2"], ["t"], axis=0), n("Identity", ["c"], ["c2"])],
                 {"i": (INT64, []), "c": (BOOL, []), "s": (FLOAT, ["n"])},
                 {"c2": (BOOL, []), "t": (FLOAT, None)})
    yield model([n("Loop", ["i0", "", "i1"], ["o0"], body=grow)],
                [scalar(3), floats(2), floats(3)], "Loop_growing")
    scan = graph("scan", [n("Add", ["s", "x"], ["t"]), n("Mul", ["t", "i2"], ["y"])],
                 {"s": (FLOAT, [2]), "x": (FLOAT, [2])}, {"t": (FLOAT, [2]), "y": (FLOAT, [2])})
    inputs = [floats(2), floats(5, 2), floats(2)]
    yield model([n("Scan", ["i0", "i1"], ["o0", "o1"], body=scan, num_scan_inputs=1)], inputs,
                "Scan")
    yield model([n("Scan", ["i0", "i1"], ["o0", "o1"], body=scan, num_scan_inputs=1,
                   scan_input_directions=[1], scan_output_directions=[1])], inputs, "Scan_reverse")
    yield model([n("Scan", ["i0", "i1"], ["o0", "o1"], body=scan, num_scan_inputs=1,
                   scan_input_axes=[1], scan_output_axes=[1])],
                [floats(2), floats(2, 5), floats(2)], "Scan_axes")


def signals() -> Iterator[Case]:
    x = floats(1, 16, 1)
    yield row("DFT", x, scalar(16), opset=17, axis=1, reference="onnx")
    yield row("DFT", x, scalar(16), name="onesided", opset=17, axis=1, onesided=1)
    yield row("DFT", floats(1, 8, 2), scalar(8), name="inverse", opset=17, axis=1, inverse=1)
    yield row("STFT", floats(1, 32, 1), scalar(4), Const(floats(8, low=0.1)), scalar(8), opset=17)
