"""Symbolic dimensions: what is imported once must be right at every size, or be refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from tests.cases import Case, Const, cases, floats, k, model, row, scalar
from tests.models import MODELS, inputs
from tests.models import model as network
from tinyedge.errors import ModelError, ShapeError, UnsupportedError
from tinyedge.interpreter import interpret
from tinyedge.onnx import load

Array = npt.NDArray[Any]


def named(proto: onnx.ModelProto, axes: dict[int, str], name: str = "i0") -> onnx.ModelProto:
    """The model with names for some of an input's dimensions, and nothing known of its outputs."""
    out: onnx.ModelProto = onnx.ModelProto.FromString(proto.SerializeToString())
    info = next(i for i in out.graph.input if i.name == name)
    for axis, label in axes.items():
        info.type.tensor_type.shape.dim[axis].dim_param = label
    for o in out.graph.output:
        o.type.tensor_type.ClearField("shape")
    return out


def test_the_table_with_each_dimension_symbolic() -> None:
    """Every case with one dimension of its first input as a range is refused or still right."""
    right = refused = 0
    for case in cases():
        if not case.inputs:
            continue
        name, x = next(iter(case.inputs.items()))
        for axis, n in enumerate(x.shape):
            proto = named(case.model, {axis: "N"}, name)
            try:
                graph = load(proto, dims={"N": (max(n - 1, 0), n + 2)})
            except (ModelError, ShapeError, UnsupportedError):
                refused += 1
                continue
            case.compare(interpret(graph, case.inputs))
            right += 1
    print(right, "right,", refused, "refused")
    assert right > 500


def against_onnxruntime(
    proto: onnx.ModelProto, dims: dict[str, tuple[int, int]], feeds: list[dict[str, Array]]
) -> None:
    graph = load(proto, dims=dims)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options,
                                           ["CPUExecutionProvider"])
    for feed in feeds:
        got = interpret(graph, feed)
        for o, want in zip(session.get_outputs(), session.run(None, feed)):
            assert got[o.name].shape == want.shape
            np.testing.assert_allclose(got[o.name], want, 1e-4, 1e-5)


n = helper.make_node
CHAINS: list[tuple[Case, dict[int, str]]] = [
    (row("Conv", floats(1, 3, 9, 9), Const(floats(4, 3, 3, 3)), pads=[1, 1, 1, 1],
         strides=[2, 2]), {0: "N", 2: "H", 3: "W"}),
    (row("Conv", floats(1, 3, 9, 9), Const(floats(4, 3, 2, 3)), auto_pad="SAME_UPPER"),
     {2: "H", 3: "W"}),
    (row("ConvTranspose", floats(1, 3, 5, 6), Const(floats(3, 2, 3, 3)), strides=[2, 2],
         pads=[1, 1, 1, 1], output_padding=[1, 1]), {0: "N", 2: "H", 3: "W"}),
    (row("MaxPool", floats(1, 3, 9, 9), kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
     {2: "H", 3: "W"}),
    (row("AveragePool", floats(1, 3, 9, 9), kernel_shape=[3, 3], pads=[1, 1, 1, 1],
         strides=[2, 2]), {2: "H", 3: "W"}),
    (row("Resize", floats(1, 3, 9, 9), k(kind=np.float32), k(1, 1, 2, 3, kind=np.float32),
         mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"),
     {2: "H", 3: "W"}),
    (row("Slice", floats(6, 7), k(-2), k(2**62), k(0)), {0: "N"}),
    (row("Slice", floats(6, 7), k(2**62), k(-(2**62)), k(0), k(-1)), {0: "N"}),
    (row("Slice", floats(6, 7), k(1), k(-1), k(0), k(2)), {0: "N"}),
    (row("Gather", floats(6, 7), scalar(-1), axis=0), {0: "N"}),
    (row("Pad", floats(6, 7), k(1, 2, 2, 3), mode="reflect", opset=13), {0: "N"}),
    (row("Pad", floats(6, 7), k(1, 2, 2, 3), mode="edge", opset=13), {0: "N", 1: "W"}),
    (row("LSTM", floats(5, 2, 3), Const(floats(1, 16, 3)), Const(floats(1, 16, 4)), opset=14,
         outputs=3, hidden_size=4), {0: "N"}),
    (model([n("Shape", ["i0"], ["s"]), n("Gather", ["s", "i1"], ["b"]),
            n("Unsqueeze", ["b", "i1"], ["u"]), n("Concat", ["u", "i2"], ["t"], axis=0),
            n("Reshape", ["i0", "t"], ["r"]), n("Softmax", ["r"], ["o0"])],
           [floats(2, 3, 4), scalar(0), k(-1)], "flatten"), {0: "N", 2: "W"}),
    (model([n("Shape", ["i0"], ["s"]), n("Cast", ["s"], ["f"], to=TensorProto.FLOAT),
            n("Mul", ["f", "i1"], ["g"]), n("Cast", ["g"], ["t"], to=TensorProto.INT64),
            n("ConstantOfShape", ["t"], ["z"]), n("Concat", ["i0", "z"], ["o0"], axis=0)],
           [floats(2, 3), scalar(1.0, np.float32)], "zeros"), {0: "N"}),
    (model([n("Shape", ["i0"], ["s"]), n("Size", ["i0"], ["c"]),
            n("Range", ["i1", "c", "i2"], ["r"]), n("Reshape", ["r", "s"], ["q"]),
            n("Cast", ["q"], ["f"], to=TensorProto.FLOAT), n("Add", ["f", "i0"], ["o0"])],
           [floats(2, 3), scalar(0), scalar(1)], "range"), {0: "N", 1: "W"}),
    (model([n("ReduceMean", ["i0"], ["m"], axes=[0, 1]), n("Sub", ["i0", "m"], ["o0"])],
           [floats(4, 5)], "mean"), {0: "N", 1: "W"}),
    (model([n("Transpose", ["i0"], ["t"], perm=[0, 2, 1]), n("MatMul", ["i0", "t"], ["a"]),
            n("Softmax", ["a"], ["p"]), n("MatMul", ["p", "i0"], ["o0"])],
           [floats(2, 5, 8)], "attention"), {0: "N", 1: "W"}),
]


@pytest.mark.parametrize("case, axes", CHAINS, ids=lambda v: getattr(v, "name", ""))
@pytest.mark.parametrize("change", [-1, 0, 4])
def test_other_sizes(case: Case, axes: dict[int, str], change: int) -> None:
    x = case.inputs["i0"]
    shape = [d + change if i in axes else d for i, d in enumerate(x.shape)]
    shape = [max(d, 1) for d in shape]
    proto = named(case.model, axes)
    dims = {v: (max(x.shape[i] - 3, 1), x.shape[i] + 9) for i, v in axes.items()}
    against_onnxruntime(proto, dims, [{"i0": floats(*shape)}])


def test_a_network_at_several_sizes() -> None:
    graph = load(network("ppocr-rec"), shapes={"x": ((1, 3), 3, 48, (32, 640))})
    assert MODELS["ppocr-rec"].shapes["x"] == (1, 3, 48, 320)
    session = onnxruntime.InferenceSession(str(network("ppocr-rec")),
                                           providers=["CPUExecutionProvider"])
    x = inputs("ppocr-rec", 0)["x"]
    for feed in (x[..., :64], np.concatenate([x, x[..., ::-1]])[..., :200]):
        (want,) = session.run(None, {"x": np.ascontiguousarray(feed)})
        (got,) = interpret(graph, {"x": feed}).values()
        assert got.shape == want.shape and np.abs(got - want).max() <= 1e-4 * want.max()


def test_what_a_range_can_not_do_is_refused() -> None:
    proto = named(row("MaxPool", floats(1, 1, 9, 9), kernel_shape=[4, 4]).model, {2: "H"})
    with pytest.raises(ShapeError, match="a window of 4 does not fit .*which can be 2"):
        load(proto, dims={"H": (2, 9)})
    proto = named(row("Conv", floats(1, 1, 9, 9), Const(floats(1, 1, 3, 3)), strides=[2, 2],
                      auto_pad="SAME_UPPER").model, {2: "H"})
    with pytest.raises(UnsupportedError, match="'auto_pad' is SAME_UPPER with stride 2"):
        load(proto, dims={"H": (4, 9)})
