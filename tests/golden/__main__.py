"""Writes a small network with something of every kind, for two processors, and what it computes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import tinyedge

Array = np.ndarray[Any, np.dtype[Any]]
FOLDER = Path(__file__).parent
ROWS, STEPS = 3, 5


def network() -> onnx.ModelProto:
    """A convolution over N images, a history that is shifted, a branch, a loop, float16, int8."""
    rng = np.random.default_rng(11)
    kind = TensorProto.FLOAT

    def info(name: str, shape: list[int | str], dtype: int = kind) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, dtype, shape)

    def held(name: str, a: Array) -> onnx.TensorProto:
        return numpy_helper.from_array(a, name)

    then = helper.make_graph([helper.make_node("Exp", ["mean"], ["a"])], "then", [],
                             [info("a", ["N", 8])])
    other = helper.make_graph([helper.make_node("Neg", ["mean"], ["b"])], "other", [],
                              [info("b", ["N", 8])])
    body = helper.make_graph(
        [helper.make_node("Mul", ["v", "half"], ["w"]),
         helper.make_node("Add", ["w", "one"], ["v.next"]),
         helper.make_node("Identity", ["go"], ["go.next"])], "body",
        [info("i", [], TensorProto.INT64), info("go", [], TensorProto.BOOL), info("v", [4])],
        [info("go.next", [], TensorProto.BOOL), info("v.next", [4])])
    nodes = [
        helper.make_node("Conv", ["image", "weights", "bias"], ["c"], "conv", pads=[1, 1, 1, 1],
                         strides=[2, 2]),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
        helper.make_node("Reshape", ["p", "flat"], ["mean"], "flatten"),
        helper.make_node("If", ["flag"], ["chosen"], "branch", then_branch=then, else_branch=other),
        helper.make_node("MatMul", ["chosen", "matrix"], ["m"], "product"),
        helper.make_node("Softmax", ["m"], ["classes"], "softmax"),
        helper.make_node("Slice", ["history", "from1", "end", "axis0"], ["kept"], "kept"),
        helper.make_node("Concat", ["kept", "frame"], ["history.next"], "shift", axis=0),
        helper.make_node("ReduceSum", ["history.next", "axis0"], ["recent"], "recent", keepdims=0),
        helper.make_node("Loop", ["trips", "", "recent"], ["damped"], "loop", body=body),
        helper.make_node("Cast", ["damped"], ["short"], "half", to=TensorProto.FLOAT16),
        helper.make_node("QuantizeLinear", ["damped", "scale", "zero"], ["small"], "quantize"),
    ]
    graph = helper.make_graph(
        nodes, "golden",
        [info("image", ["N", 3, 9, 7]), info("flag", [], TensorProto.BOOL),
         info("frame", [1, 4]), info("history", [6, 4])],
        [info("classes", ["N", 5]), info("short", [4], TensorProto.FLOAT16),
         info("small", [4], TensorProto.INT8), info("history.next", [6, 4])],
        [held("weights", rng.standard_normal((8, 3, 3, 3)).astype(np.float32)),
         held("bias", rng.standard_normal(8).astype(np.float32)),
         held("matrix", rng.standard_normal((8, 5)).astype(np.float32)),
         held("flat", np.array([-1, 8])), held("from1", np.array([1])), held("end", np.array([6])),
         held("axis0", np.array([0])), held("trips", np.array(STEPS)),
         held("half", np.full(1, 0.5, np.float32)), held("one", np.ones(1, np.float32)),
         held("scale", np.array(0.125, np.float32)), held("zero", np.array(3, np.int8))])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def runs() -> list[dict[str, Array]]:
    """The inputs of three runs in order."""
    rng = np.random.default_rng(12)
    return [{"image": rng.standard_normal((n, 3, 9, 7)).astype(np.float32),
             "flag": np.array(n % 2 == 0), "frame": rng.standard_normal((1, 4)).astype(np.float32)}
            for n in (2, 1, 4)]


def expected(path: Path) -> list[dict[str, Array]]:
    """What onnxruntime computes for `runs`, the history fed back."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    history, out = np.zeros((6, 4), np.float32), []
    for feeds in runs():
        got = dict(zip(names, session.run(names, {**feeds, "history": history})))
        history = got.pop("history.next")
        out.append(got)
    return out


def main(version: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "golden.onnx"
        onnx.save(network(), path)
        for arch in ("x86-64-v2", "aarch64"):
            plan = tinyedge.compile(path, f"cpu:{arch}", dims={"N": (1, 4)},
                                    states={"history.next": "history"})
            file = FOLDER / f"format{version}-network-{arch}.pkl"
            assert not file.exists(), f"{file} is there already, and stays"
            plan.save(file)


if __name__ == "__main__":
    main(sys.argv[1])
