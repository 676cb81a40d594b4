"""Arithmetic, comparisons, activations, conversions, reductions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import TensorProto, helper

from . import Case, Const, bools, floats, ints, k, model, row, scalar

SPECIAL = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-30, 0.5, -1.5], np.float32)


def rows() -> Iterator[Case]:
    yield from arithmetic()
    yield from functions()
    yield from conversions()
    yield from reductions()


def arithmetic() -> Iterator[Case]:
    x, y = floats(2, 3, 4), floats(3, 1)
    for op in ("Add", "Sub", "Mul", "Div"):
        for opset in (7, 13, 14):
            yield row(op, x, y, opset=opset)
        yield row(op, ints(3, 4), ints(4, low=1), name="int64")
        yield row(op, floats(3, 4, kind=np.float16), floats(3, 4, kind=np.float16), name="half")
    yield row("Add", x, floats(4), name="trailing")
    yield row("Div", ints(20, low=-9, high=9, kind=np.int32), ints(20, low=1, kind=np.int32),
              name="truncates")
    for op in ("Max", "Min", "Sum", "Mean"):
        yield row(op, floats(2, 3), floats(3), floats(1), opset=13)
        yield row(op, floats(2, 3), name="single", opset=8)
    yield row("Max", SPECIAL, floats(10), name="special")
    yield row("Max", ints(5), ints(1), name="int64")
    for exponent in (2.0, 0.5, 3.0, -1.0, 1.0, 0.0, 0.75, 1.7, -0.5, 5.0):
        yield row("Pow", floats(2, 5, low=0.1, high=3), scalar(exponent, np.float32),
                  name=str(exponent))
    yield row("Pow", floats(4, low=0.1), floats(3, 1, low=-2, high=2), name="tensor")
    yield row("Pow", floats(4), scalar(3, np.int64), name="int_exponent")
    yield row("Pow", ints(4, low=0), scalar(2, np.int64), name="ints")
    yield row("Mod", ints(12), ints(12, low=1), opset=13)
    yield row("Mod", ints(12), k(-3), name="negative", opset=13)
    yield row("Mod", floats(12), floats(1, low=0.3), name="fmod", opset=13, fmod=1)
    yield row("Mod", ints(12), k(-3), name="fmod_int", opset=13, fmod=1)
    for direction in ("LEFT", "RIGHT"):
        yield row("BitShift", ints(6, low=0, high=200, kind=np.uint8), ints(6, low=0, high=8,
                  kind=np.uint8), name=direction, opset=11, direction=direction)
    for op in ("And", "Or", "Xor"):
        yield row(op, bools(3, 4), bools(4))
        yield row(f"Bitwise{op}", ints(3, 4, kind=np.int32), ints(4, kind=np.int32), opset=18)
    yield row("Not", bools(5))
    yield row("BitwiseNot", ints(5, kind=np.int16), opset=18, reference="onnx")
    for op in ("Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"):
        yield row(op, ints(4, 3), ints(3), name="int", opset=16)
        yield row(op, SPECIAL, SPECIAL[::-1].copy(), opset=16)
    yield row("Where", bools(3, 1), floats(3, 4), floats(4))
    yield row("Clip", floats(9), opset=6, min=-0.5, max=0.75)
    yield row("Clip", floats(9), scalar(-0.5, np.float32), None, name="low", opset=13)
    yield row("Clip", ints(9, kind=np.int32), scalar(-2, np.int32), scalar(3, np.int32),
              name="int", opset=13)
    yield row("Clip", floats(9), np.array(-1, np.float32), np.array(1, np.float32),
              name="runtime", opset=13)


def functions() -> Iterator[Case]:
    x = np.concatenate([floats(30) * 3, SPECIAL]).astype(np.float32)
    for op in ("Abs", "Neg", "Exp", "Sigmoid", "Tanh", "Relu", "Sign", "Floor", "Ceil", "Softsign",
               "LeakyRelu", "Elu", "Selu", "HardSigmoid", "IsNaN", "IsInf", "Reciprocal",
               "Identity"):
        yield row(op, x if op not in ("Softsign",) else floats(30) * 3)
    yield row("Round", np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.49999997], np.float32))
    yield row("Erf", np.linspace(-4, 4, 41, dtype=np.float32))
    for op in ("Log", "Sqrt"):
        yield row(op, floats(20, low=1e-3, high=9))
    for op in ("Sin", "Cos", "Tan", "Atan", "Sinh", "Cosh", "Asinh", "Softplus"):
        yield row(op, np.linspace(-3, 3, 31, dtype=np.float32))
    for op in ("Asin", "Acos", "Atanh"):
        yield row(op, np.linspace(-0.99, 0.99, 31, dtype=np.float32))
    yield row("Asin", np.array([-1, 0, 1], np.float32), name="ends")
    yield row("Atan", np.array([-np.inf, -1e6, 1e-6, 0.4142, 1, 2.5, np.inf], np.float32),
              name="ends")
    yield row("Acosh", floats(9, low=1, high=5))
    yield row("Atan", floats(20, kind=np.float64) * 4, name="double", reference="onnx")
    yield row("IsInf", x, name="positive", detect_negative=0)
    yield row("LeakyRelu", x, name="alpha", alpha=0.3)
    yield row("Elu", x, name="alpha", alpha=0.5)
    yield row("Celu", floats(20), alpha=2.0, opset=12)
    yield row("HardSigmoid", floats(20) * 4, name="paddle", alpha=0.1666667, beta=0.5)
    yield row("HardSwish", floats(20) * 4, opset=14)
    yield row("Mish", floats(20) * 4, opset=18)
    yield row("Gelu", floats(20) * 2, opset=20)
    yield row("Gelu", floats(20) * 2, name="tanh", opset=20, approximate="tanh")
    yield row("Gelu", floats(20) * 2, name="microsoft", domain="com.microsoft")
    yield row("QuickGelu", floats(20) * 2, domain="com.microsoft")
    yield row("ThresholdedRelu", floats(20), alpha=0.4)
    yield row("Shrink", floats(20), lambd=0.4, bias=0.2)
    yield row("Swish", floats(20), opset=24, reference="onnx")
    for shape in ((3, 1, 1), (1,), (3, 4, 4)):
        name = "x".join(map(str, shape))
        yield row("PRelu", floats(2, 3, 4, 4), Const(floats(*shape)), name=name)
    yield row("Dropout", floats(9), opset=10)
    yield row("Dropout", floats(9), name="mask", outputs=2)


def conversions() -> Iterator[Case]:
    for to in ("FLOAT16", "DOUBLE", "INT8", "UINT8", "INT32", "INT64", "BOOL"):
        yield row("Cast", floats(20, low=0, high=100), name=to.lower(),
                  to=_number(to))
    yield row("Cast", bools(6), name="from_bool", to=_number("FLOAT"))
    yield row("Cast", floats(9) * 3, name="negative", to=_number("INT32"))
    yield row("CastLike", ints(9), floats(1), opset=15)


def _number(name: str) -> int:
    return int(TensorProto.DataType.Value(name))


def reductions() -> Iterator[Case]:
    x = floats(2, 3, 4)
    for op in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSumExp", "SumSquare"):
        name = f"Reduce{op}"
        yield row(name, x, name="axes_attribute", opset=11, axes=[1, -1])
        yield row(name, x, name="all", opset=11, keepdims=0)
        if op != "Sum":
            yield row(name, x, k(0, 2), name="axes_input", opset=18, keepdims=0)
            yield row(name, x, None, name="noop", opset=18, noop_with_empty_axes=1) \
                if op not in ("L1", "L2", "LogSumExp", "SumSquare") else \
                row(name, x, k(-2), name="negative", opset=18)
    yield row("ReduceLogSum", floats(2, 3, low=0.1), opset=13, axes=[1])
    yield row("ReduceSum", x, k(0, 2), name="axes_input", opset=13, keepdims=0)
    yield row("ReduceSum", x, None, name="noop", opset=13, noop_with_empty_axes=1)
    yield row("ReduceSum", x, k(-1), name="negative", opset=13)
    yield row("ReduceMean", ints(3, 4, kind=np.int32), name="int", opset=13, axes=[1])
    yield row("ReduceMax", ints(3, 4, kind=np.int32), name="int", opset=13, axes=[1])
    yield row("ReduceLogSumExp", floats(2, 3) * 100, name="large", opset=13, axes=[1])
    yield row("ReduceMean", floats(2, 3000, kind=np.float16, low=20, high=60), name="half",
              opset=13, axes=[1])
    for opset in (11, 13):
        for op in ("Softmax", "LogSoftmax", "Hardmax"):
            yield row(op, x, opset=opset)
            yield row(op, x, name="axis0", opset=opset, axis=0)
    yield row("Softmax", floats(1, 8, 1, 1), name="flattened", opset=9)
    yield row("Softmax", np.array([[1e4, -1e4, 0], [np.finfo(np.float32).min] * 3], np.float32),
              name="extreme", opset=13)
    tied = np.array([[1, 3, 3, 2], [5, 5, 5, 5]], np.float32)
    for op in ("ArgMax", "ArgMin"):
        yield row(op, x, opset=11, axis=1, keepdims=0)
        yield row(op, tied, name="ties", opset=13, axis=-1)
        yield row(op, tied, name="last", opset=13, axis=-1, select_last_index=1)
    for largest in (0, 1):
        yield row("TopK", floats(3, 7), k(3), name=f"largest{largest}", opset=11, outputs=2,
                  largest=largest)
    yield row("TopK", floats(3, 7), k(2), name="axis0", opset=11, outputs=2, axis=0)
    yield row("TopK", tied, k(3), name="ties", opset=11, outputs=2)
    yield row("TopK", floats(3, 7), name="attribute", opset=9, outputs=2, k=2)
    for exclusive in (0, 1):
        for reverse in (0, 1):
            yield row("CumSum", floats(3, 5), scalar(1), name=f"{exclusive}{reverse}", opset=14,
                      exclusive=exclusive, reverse=reverse)
    nodes = [helper.make_node("Greater", ["i0", "i1"], ["c"]),
             helper.make_node("Cast", ["c"], ["f"], to=_number("FLOAT")),
             helper.make_node("Mul", ["i0", "f"], ["o0"])]
    yield model(nodes, [floats(3, 4), floats(4)], "mask")
