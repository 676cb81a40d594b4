"""What moves, selects, repeats or makes elements; chains that compute shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from . import Case, Const, bools, floats, ints, k, model, row, scalar

LAST = np.iinfo(np.int64).max


def rows() -> Iterator[Case]:
    yield from views()
    yield from parts()
    yield from indexing()
    yield from makers()
    yield from chains()


def views() -> Iterator[Case]:
    x = floats(2, 3, 4)
    yield row("Reshape", x, k(4, 6))
    yield row("Reshape", x, k(0, -1), name="keep_infer")
    yield row("Reshape", x, k(-1), name="flat")
    yield row("Reshape", floats(0, 3), k(3, 0), name="allowzero", allowzero=1)
    for axis in (0, 1, 2, -1):
        yield row("Flatten", x, name=str(axis), opset=13, axis=axis)
    yield row("Squeeze", floats(1, 3, 1), opset=11, axes=[0, -1])
    yield row("Squeeze", floats(1, 3, 1), k(-1), name="input")
    yield row("Squeeze", floats(1, 3, 1), name="all")
    yield row("Unsqueeze", x, opset=11, axes=[0, 4])
    yield row("Unsqueeze", x, k(-1, 1), name="input")
    yield row("Transpose", x)
    yield row("Transpose", x, name="perm", perm=[1, 2, 0])
    yield row("Expand", floats(3, 1), k(2, 1, 4))
    yield row("Expand", floats(3, 4), k(1), name="smaller")
    yield row("Tile", floats(2, 3), k(2, 3))
    yield row("Trilu", floats(2, 4, 5))
    yield row("Trilu", floats(4, 5), scalar(-1), name="lower", upper=0)


def parts() -> Iterator[Case]:
    x = floats(4, 6)
    yield row("Concat", x, floats(4, 2), x, axis=1)
    yield row("Concat", floats(1, 3), floats(2, 3), name="negative", axis=-2)
    yield row("Concat", floats(0, 3), floats(2, 3), name="empty", axis=0)
    yield row("Split", x, name="equal", opset=11, outputs=3, axis=1)
    yield row("Split", x, name="sizes", opset=11, outputs=2, axis=0, split=[1, 3])
    yield row("Split", x, k(1, 5), name="input", opset=13, outputs=2, axis=-1)
    yield row("Split", floats(7, 2), name="uneven", opset=18, outputs=3, num_outputs=3)
    yield row("Slice", x, opset=9, starts=[1, -3], ends=[LAST, -1], axes=[0, 1])
    for name, values in {
        "plain": ([1], [3]), "axes": ([1, 0], [LAST, -2], [1, 0]),
        "steps": ([0, 1], [LAST, 5], [0, 1], [2, 3]),
        "backwards": ([-1], [-LAST], [1], [-1]), "backwards_part": ([4], [0], [1], [-2]),
        "beyond": ([-10], [100], [0], [1]), "nothing": ([3], [1], [0], [1]),
    }.items():
        yield row("Slice", x, *(k(*v) for v in values), name=name, opset=13)
    yield row("Pad", x, k(1, 0, 2, 3), name="constant", opset=13)
    yield row("Pad", x, k(1, 0, 2, 3), scalar(7, np.float32), name="value", opset=13)
    yield row("Pad", x, k(-1, 0, 0, -2), name="crop", opset=13)
    yield row("Pad", x, k(-1, 2, 1, -2), name="crop_and_add", opset=13)
    yield row("Pad", x, name="attribute", opset=2, pads=[0, 1, 2, 0], value=1.5, mode="constant")
    yield row("Pad", x, k(1, 2), None, k(1), name="axes", opset=18)
    for mode in ("reflect", "edge"):
        yield row("Pad", x, k(1, 2, 2, 3), name=mode, opset=13, mode=mode)
        yield row("Pad", x, k(0, 0, 0, 5), name=f"{mode}_end", opset=13, mode=mode)
    yield row("Pad", x, k(1, 2, 2, 3), name="wrap", opset=19, mode="wrap")


def indexing() -> Iterator[Case]:
    x = floats(4, 5, 6)
    yield row("Gather", x, k(0, 2, 3, 1))
    yield row("Gather", x, scalar(-1), name="scalar", axis=1)
    yield row("Gather", x, k(1, 3), name="regular", axis=2)
    yield row("Gather", x, k([0, 3], [1, 1]), name="matrix", axis=1)
    yield row("Gather", floats(10, 4), ints(3, low=0, high=10), name="runtime")
    yield row("Gather", floats(10, 4), ints(3, low=-10, high=0, kind=np.int32), name="negative")
    yield row("GatherElements", x, ints(4, 5, 2, low=-6, high=6), axis=2)
    yield row("GatherElements", floats(4, 5), ints(2, 5, low=0, high=4), name="axis0", axis=0)
    yield row("GatherND", x, ints(3, 2, low=0, high=4))
    yield row("GatherND", x, ints(4, 2, 1, low=0, high=5), name="batch", batch_dims=1)
    unique = Const(np.array([[2, 0], [1, 3]], np.int64))
    yield row("ScatterElements", floats(4, 2), unique, floats(2, 2), opset=16, axis=0)
    for reduction in ("add", "mul"):
        yield row("ScatterElements", floats(4, 2), k([1, 1], [1, 0]), floats(2, 2), opset=16,
                  name=reduction, reduction=reduction)
    for reduction in ("max", "min"):
        yield row("ScatterElements", floats(4, 2), k([1, 1], [1, 0]), floats(2, 2), opset=18,
                  name=reduction, reduction=reduction)
    yield row("ScatterND", x, k([1], [3]), floats(2, 5, 6), opset=16)
    yield row("ScatterND", x, k([1, 2], [3, 0]), floats(2, 6), name="two", opset=16)
    yield row("ScatterND", x, k([1], [1]), floats(2, 5, 6), name="add", opset=16, reduction="add")
    yield row("Compress", x, Const(np.array([True, False, True])), opset=11, axis=1)
    yield row("ReverseSequence", floats(5, 3, 2), k(5, 2, 3), opset=10)
    yield row("ReverseSequence", floats(3, 5), k(1, 5, 4), name="batch_first", opset=10,
              time_axis=1, batch_axis=0)


def makers() -> Iterator[Case]:
    yield row("OneHot", ints(2, 3, low=-3, high=5), scalar(5), k(0, 2, kind=np.float32), opset=11)
    yield row("OneHot", ints(4, low=0, high=5), scalar(5), k(-1, 3, kind=np.float32), name="axis0",
              opset=11, axis=0)
    yield row("EyeLike", floats(3, 4), opset=9, k=1)
    yield row("EyeLike", floats(3, 3), name="type", opset=9, dtype=TensorProto.INT32)
    add = helper.make_node("Add", ["i0", "r"], ["o0"])
    yield model([helper.make_node("Range", ["i1", "i2", "i3"], ["r"]), add],
                [floats(5), scalar(1, np.float32), scalar(6, np.float32), scalar(1, np.float32)],
                "Range")
    fill = helper.make_tensor("value", TensorProto.FLOAT, [1], [2.5])
    yield model([helper.make_node("ConstantOfShape", ["i1"], ["r"], value=fill), add],
                [floats(2, 3), k(2, 3)], "ConstantOfShape")
    values: dict[str, Any] = {"value_float": 1.5, "value_floats": [1.0, 2.0, 3.0]}
    for name, value in values.items():
        yield model([helper.make_node("Constant", [], ["r"], **{name: value}), add],
                    [floats(2, 3)], f"Constant_{name}")
    yield row("Where", bools(2, 3), floats(2, 3), scalar(0, np.float32), name="constant")


def chains() -> Iterator[Case]:
    """Shapes computed by the model itself."""
    n = helper.make_node
    x = floats(2, 3, 4, 5)
    yield model([
        n("Shape", ["i0"], ["s"]), n("Gather", ["s", "i1"], ["batch"], axis=0),
        n("Unsqueeze", ["batch", "i2"], ["b1"]), n("Concat", ["b1", "i3"], ["target"], axis=0),
        n("Reshape", ["i0", "target"], ["o0"]),
    ], [x, scalar(0), k(0), k(-1)], "flatten_by_shape")
    yield model([
        n("Shape", ["i0"], ["s"], start=-2), n("Cast", ["s"], ["f"], to=TensorProto.FLOAT),
        n("Mul", ["f", "i1"], ["g"]), n("Floor", ["g"], ["h"]),
        n("Cast", ["h"], ["hw"], to=TensorProto.INT64), n("Shape", ["i0"], ["nc"], end=2),
        n("Concat", ["nc", "hw"], ["sizes"], axis=0),
        n("Resize", ["i0", "", "", "sizes"], ["o0"], mode="nearest"),
    ], [x, scalar(2.0, np.float32)], "resize_by_shape")
    yield model([
        n("Shape", ["i0"], ["s"]), n("Slice", ["s", "i1", "i2"], ["tail"]),
        n("ConstantOfShape", ["tail"], ["zeros"]), n("Add", ["i0", "zeros"], ["o0"]),
    ], [x, k(1), k(4)], "zeros_by_shape")
    yield model([
        n("Shape", ["i0"], ["s"]), n("Equal", ["i1", "i2"], ["e"]),
        n("Where", ["e", "s", "i1"], ["t"]),
        n("Expand", ["i3", "t"], ["w"]), n("Mul", ["i0", "w"], ["o0"]),
    ], [x, k(2, -1, 4, 5), k(-1, -1, -1, -1), Const(floats(1, 5))], "expand_as")
    yield model([
        n("Shape", ["i0"], ["s"]), n("Gather", ["s", "i1"], ["w"]), n("Sub", ["w", "i2"], ["e"]),
        n("Unsqueeze", ["e", "i3"], ["ends"]), n("Slice", ["i0", "i3", "ends", "i4"], ["o0"]),
    ], [x, scalar(3), scalar(2), k(0), k(3)], "slice_by_shape")
