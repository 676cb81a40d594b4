"""Random small ONNX models, compiled, run and compared: `python -m bench.fuzz --seconds N`.

Every case follows from its number. A model is grown node by node; onnxruntime evaluates each node
alone as it is added, which gives its value (the reference), drops candidates that are not valid or
leave the range in which float32 says anything, and lets a failing model be cut anywhere: a value
that is no longer computed becomes an input. Each case runs in a process of its own, with its input
and output arrays against a page that can't be touched, so that a crash is a finding too.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import faulthandler
import gc
import mmap
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import helper, numpy_helper

import tinyedge
from tinyedge.errors import UnsupportedError

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
TOLERANCE = 1e-4
"""Relative to an output's largest value; `allowance` adds what noise in the inputs moves."""
LARGEST = 1e4
MOST_ELEMENTS = 24_000


# ---- a case


@dataclass(frozen=True)
class Case:
    """A model with the values of all its tensors.

    states: output -> input that it feeds in the next run; a state begins as zeros.
    opened: (input, axis) pairs that are one named dimension, N, in place of their size here.
    exact: tensors whose float32 values any correct evaluation gives to the last bit.
    """

    number: int
    opset: int
    nodes: tuple[onnx.NodeProto, ...]
    values: Arrays
    constants: frozenset[str]
    exact: frozenset[str]
    outputs: tuple[str, ...]
    states: dict[str, str] = field(default_factory=dict)
    opened: frozenset[tuple[str, int]] = frozenset()

    @property
    def inputs(self) -> list[str]:
        made = {name for node in self.nodes for name in node.output}
        used = dict.fromkeys(name for node in self.nodes for name in uses(node))
        return [name for name in used if name not in made | self.constants]

    def feeds(self) -> Arrays:
        return {name: self.values[name] for name in self.inputs}

    def model(self) -> onnx.ModelProto:
        used = {name for node in self.nodes for name in uses(node)}
        graph = helper.make_graph(
            self.nodes,
            f"case{self.number}",
            [_info(name, self.values[name], [axis for owner, axis in self.opened if owner == name])
             for name in self.inputs],
            [_info(name, self.values[name], range(9) if self.opened else ())
             for name in self.outputs],
            [numpy_helper.from_array(self.values[name], name)
             for name in sorted(self.constants & used)],
        )
        return _model(graph, self.opset)


def uses(node: onnx.NodeProto) -> list[str]:
    """Names of the tensors that a node reads, from inside its subgraphs too."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            graph = attribute.g
            own = {value.name for value in (*graph.input, *graph.initializer)}
            for inner in graph.node:
                names += [name for name in uses(inner) if name not in own]
                own.update(inner.output)
            names += [value.name for value in graph.output if value.name not in own]
    return list(dict.fromkeys(names))


def _info(name: str, value: Array, opened: Collection[int] = ()) -> onnx.ValueInfoProto:
    kind = helper.np_dtype_to_tensor_dtype(value.dtype)
    unknown = None if len(opened) == 9 else "N"
    return helper.make_tensor_value_info(
        name, kind, [unknown if axis in opened else d for axis, d in enumerate(value.shape)])


def _model(graph: onnx.GraphProto, opset: int) -> onnx.ModelProto:
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10,
        producer_name="tinyedge-fuzz")


def reference(model: onnx.ModelProto, feeds: Arrays) -> Arrays:
    """onnxruntime's outputs, without its rewrites of the graph."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, map(np.asarray, session.run(names, feeds))))


# ---- growing one

SAFE_IN_ANY_ORDER = frozenset(
    "Identity Relu Neg Abs Max Min Where Clip Floor Ceil Round Sign Add Sub Cast Reshape Flatten "
    "Transpose Squeeze Unsqueeze Expand Tile Slice Pad Concat Split Gather GatherElements GatherND "
    "ScatterElements ScatterND DepthToSpace SpaceToDepth Trilu MaxPool GlobalMaxPool ReduceMax "
    "ReduceMin".split()
)
"""Operators that keep exact values exact."""


class Grower:
    """A case under construction."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.random = np.random.default_rng(number)
        self.opset = int(self.random.choice([11, 13, 17, 17, 18, 21]))
        self.nodes: list[onnx.NodeProto] = []
        self.values: Arrays = {}
        self.constants: set[str] = set()
        self.exact: set[str] = set()
        self.states: dict[str, str] = {}
        self.dropped: list[str] = []

    # choices

    def whole(self, low: int, high: int) -> int:
        """A whole number in low..high."""
        return int(self.random.integers(low, high + 1))

    def often(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def one(self, choices: Sequence[Any]) -> Any:
        return choices[self.whole(0, len(choices) - 1)]

    def shape(self, rank: int) -> tuple[int, ...]:
        """Odd and even sizes, with ones; not too many elements."""
        while True:
            sizes = tuple(self.one([1, self.whole(1, 9), self.whole(1, 40)]) for _ in range(rank))
            if prod(sizes) <= 6000:
                return sizes

    # values

    def name(self) -> str:
        return f"t{len(self.values)}"

    def leaf(
        self, shape: Sequence[int], kind: str = "float32", constant: bool | None = None,
        exact: bool = False,
    ) -> str:
        """A new input or constant with random values."""
        size = tuple(shape)
        value: Array
        if kind == "bool":
            value = self.random.random(size) < 0.5
        elif kind.startswith("float"):
            value = self.random.normal(0, 1, size)
            if exact:
                value = np.round(4 * value) / 4
        else:
            value = self.random.integers(0 if kind.startswith("u") else -9, 10, size)
        return self.put(np.asarray(value, kind), self.often(0.3) if constant is None else constant,
                        exact or not kind.startswith("float"))

    def put(self, value: Array, constant: bool = True, exact: bool = True) -> str:
        name = self.name()
        self.values[name] = value
        if constant:
            self.constants.add(name)
        if exact:
            self.exact.add(name)
        return name

    def ints(self, *values: int) -> str:
        return self.put(np.array(values, np.int64))

    def pick(
        self, kind: str = "float32", ranks: Sequence[int] = range(6), exact: bool = False,
        fits: Callable[[Array], bool] = lambda value: True,
        make: Callable[[], tuple[int, ...]] | None = None,
    ) -> str:
        """A tensor there is, rather a late one, or a new leaf."""
        names = [
            name for name, value in self.values.items()
            if value.dtype == kind and value.ndim in ranks and fits(value) and value.size
            and (not exact or name in self.exact)
            and (name not in self.constants or value.size > 1)
        ]
        if names and self.often(0.85):
            return names[-1 - min(int(self.random.geometric(0.5)) - 1, len(names) - 1)]
        size = make() if make else self.shape(self.one(list(ranks)))
        return self.leaf(size, kind, None if names else False, exact)

    def add(self, operator: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> str:
        """Adds a node if it is valid; the name of its (first) output, "" if it was dropped."""
        node = helper.make_node(
            operator, inputs, [f"t{len(self.values) + i}" for i in range(outputs)],
            f"{operator.lower()}{len(self.nodes)}", **attributes)
        read = uses(node)
        graph = helper.make_graph(
            [node], "one", [_info(name, self.values[name]) for name in read],
            [onnx.ValueInfoProto(name=name) for name in node.output])
        try:
            found = reference(_model(graph, self.opset), {name: self.values[name] for name in read})
        except Exception as error:  # whatever onnxruntime raises: the candidate isn't valid for it
            self.dropped.append(f"{operator}: {error}")
            return ""
        for value in found.values():
            if value.dtype.name not in KINDS or value.size > MOST_ELEMENTS or value.ndim > 7:
                return ""
            if value.dtype.kind in "fi" and value.size:
                with np.errstate(invalid="ignore"):
                    if not np.abs(value.astype(np.float64)).max() < LARGEST:
                        return ""
        self.nodes.append(node)
        self.values |= found
        keeps = operator in SAFE_IN_ANY_ORDER and self.exact.issuperset(read)
        self.exact |= {name for name, value in found.items() if keeps or value.dtype.kind != "f"}
        return str(node.output[0])

    def case(self) -> Case:
        made = [name for node in self.nodes for name in node.output if name in self.values]
        used = {name for node in self.nodes for name in uses(node)}
        outputs = [name for name in made if name not in used or self.often(0.08)]
        outputs += [name for name in self.states if name not in outputs]
        return Case(
            self.number, self.opset, tuple(self.nodes), self.values, frozenset(self.constants),
            frozenset(self.exact), tuple(outputs), self.states)


KINDS = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split())

Maker = Callable[[Grower], object]
MAKERS: list[tuple[float, Maker]] = []


def maker(weight: float) -> Callable[[Maker], Maker]:
    """Registers a function that adds nodes of one sort; it is called in proportion to `weight`."""

    def register(make: Maker) -> Maker:
        MAKERS.append((weight, make))
        return make

    return register


@maker(5)
def _unary(b: Grower) -> object:
    names = (
        "Relu LeakyRelu Sigmoid Tanh Exp Neg Abs Erf Sin Cos HardSigmoid HardSwish Elu Selu Celu "
        "Softplus Softsign Reciprocal Sqrt Log Identity Mish Gelu Relu Sigmoid Tanh Relu"
    ).split()
    name = b.one(names)
    attributes: dict[str, Any] = {}
    if name in ("LeakyRelu", "Elu", "Celu") and b.often(0.7):
        attributes["alpha"] = float(np.float32(b.random.uniform(0.1, 2)))
    if name == "HardSigmoid" and b.often(0.5):
        attributes |= {"alpha": 0.15, "beta": 0.45}
    x = b.pick()
    if name in ("Sqrt", "Log"):
        x = b.add("Abs", [x])
        x = x and b.add("Add", [x, b.put(np.array(0.25, np.float32))])
    return x and b.add(name, [x], **attributes)


@maker(1)
def _steps(b: Grower) -> object:
    return b.add(b.one(["Floor", "Ceil", "Round", "Sign"]), [b.pick(exact=True)])


def _mate(b: Grower, x: str, exact: bool = False) -> str:
    """An operand that broadcasts with x."""
    value = b.values[x]
    same = [name for name, v in b.values.items()
            if v.dtype == value.dtype and v.shape == value.shape and v.size > 1
            and (not exact or name in b.exact)]
    if same and b.often(0.5):
        return str(b.one(same))
    size = [1 if b.often(0.3) else d for d in value.shape][b.whole(0, value.ndim):]
    if b.often(0.1):
        size = [b.whole(1, 3), *([1] * (value.ndim - len(size))), *size]
    return b.leaf(size, value.dtype.name, None, exact)


@maker(5)
def _binary(b: Grower) -> object:
    name = b.one(["Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Add", "Mul", "Sum", "Mean"])
    x = b.pick()
    y = _mate(b, x)
    if name == "Pow":
        y = b.put(np.array(b.one([2, 3, 0.5, -1, 1.7]), np.float32)) if b.often(0.6) else y
        x = b.add("Abs", [x])
        x = x and b.add("Add", [x, b.put(np.array(0.5, np.float32))])
        return x and b.add(name, [x, y])
    if name == "Div":
        y = b.add("Abs", [y])
        y = y and b.add("Add", [y, b.put(np.array(0.5, np.float32))])
        return y and b.add(name, [x, y])
    pair = [x, y] if b.often(0.5) else [y, x]
    if name in ("Max", "Min", "Sum", "Mean") and b.often(0.4):
        pair.append(_mate(b, x))
    return b.add(name, pair)


@maker(2)
def _choose(b: Grower) -> object:
    x = b.pick(exact=True)
    y = _mate(b, x, exact=True)
    c = b.add(b.one(["Less", "Greater", "Equal", "LessOrEqual", "GreaterOrEqual"]), [x, y])
    if c and b.often(0.3):
        c = b.add(b.one(["And", "Or", "Xor"]), [c, _mate(b, c)])
    if c and b.often(0.2):
        c = b.add("Not", [c])
    if not c or b.often(0.2):
        return c
    size = b.values[c].shape
    a, d = (b.pick(fits=lambda v: v.shape == size, make=lambda: size) for _ in range(2))
    return b.add("Where", [c, a, b.put(np.array(0.5, np.float32)) if b.often(0.3) else d])


@maker(1.5)
def _clip(b: Grower) -> object:
    x = b.pick()
    low, high = (b.put(np.array(v, np.float32)) for v in (-0.75, 0.5))
    return b.add("Clip", b.one([[x, low, high], [x, low], [x, "", high]]))


@maker(1)
def _prelu(b: Grower) -> object:
    x = b.pick(ranks=(2, 3, 4))
    channels = b.values[x].shape[1]
    return b.add("PRelu", [x, b.leaf((channels, *[1] * (b.values[x].ndim - 2)), constant=True)])


@maker(2.5)
def _integers(b: Grower) -> object:
    kind = b.one(["int64", "int64", "int32"])
    x = b.pick(kind)
    name = b.one(["Add", "Sub", "Mul", "Div", "Mod", "Neg", "Abs", "Max", "Min", "Less", "Equal"])
    if name in ("Neg", "Abs"):
        return b.add(name, [x])
    y = _mate(b, x)
    if name in ("Div", "Mod"):
        y = b.put(np.array(b.one([2, 3, 7, -3] if name == "Mod" else [2, 3, 7]), kind))
    out = b.add(name, [x, y])
    return out and kind != "bool" and b.values[out].dtype != bool and b.often(0.3) and b.add(
        "Mod", [out, b.put(np.array(11, kind))])


@maker(2)
def _cast(b: Grower) -> object:
    kind = b.one(["float32", "float32", "int64", "int32", "bool", "uint8", "float64"])
    x = b.pick(kind, exact=True)
    to = b.one(["float32", "float32", "int64", "int32", "bool", "float16", "float64", "int8"])
    if kind != "uint8" and to.startswith("u"):
        return ""
    out = b.add("Cast", [x], to=helper.np_dtype_to_tensor_dtype(np.dtype(to)))
    if out and to == "float16":
        out = b.add("Cast", [out], to=onnx.TensorProto.FLOAT)
    return out


@maker(0.7)
def _doubles(b: Grower) -> object:
    x = b.pick("float64")
    if b.often(0.5):
        return b.add(b.one(["Relu", "Sigmoid", "Tanh", "Exp", "Neg", "Abs", "Sqrt"]), [x])
    if b.often(0.3) and b.values[x].ndim >= 2:
        return b.add("MatMul", [x, b.leaf((b.values[x].shape[-1], b.whole(1, 20)), "float64")])
    return b.add(b.one(["Add", "Mul", "Sub"]), [x, _mate(b, x)])


# contractions


def _image(b: Grower, space: int) -> str:
    """A tensor [N, C, space...]."""

    def size() -> tuple[int, ...]:
        top = {1: 40, 2: 24, 3: 9}[space]
        return (b.one([1, 1, 1, 2, 3]), b.one([b.whole(1, 9), b.whole(1, 40), 16, 32]),
                *(b.whole(1, top) for _ in range(space)))

    return b.pick(ranks=(space + 2,), make=size)


def _window(b: Grower, size: Sequence[int], dilate: bool = True) -> dict[str, Any]:
    """Attributes kernel_shape, strides, dilations, pads that fit a spatial size."""
    space = len(size)
    kernel = [b.one([1, 2, 3, 3, 5, b.whole(1, 7)]) for _ in size]
    if b.often(0.4):
        kernel = [kernel[0]] * space
    strides = [b.one([1, 1, 2, 3]) for _ in size] if b.often(0.5) else [b.one([1, 1, 2])] * space
    dilations = [b.one([1, 2, 3]) for _ in size] if dilate and b.often(0.25) else [1] * space
    automatic = b.one(["SAME_UPPER", "SAME_LOWER", "VALID"]) if b.often(0.15) else ""
    low, high = ([0 if automatic else b.whole(0, (k - 1) * d if b.often(0.5) else k // 2)
                  for k, d in zip(kernel, dilations)] for _ in range(2))
    for i, n in enumerate(size):
        while (kernel[i] - 1) * dilations[i] + 1 > n + low[i] + high[i]:
            kernel[i] = max(1, kernel[i] - 1)
        low[i], high[i] = (min(p, max(kernel[i] - 1, 0) * dilations[i]) for p in (low[i], high[i]))
    out: dict[str, Any] = {"kernel_shape": kernel}
    if strides != [1] * space or b.often(0.5):
        out["strides"] = strides
    if dilations != [1] * space:
        out["dilations"] = dilations
    if automatic and "dilations" not in out:
        out["auto_pad"] = automatic
    elif any(low + high):
        out["pads"] = low + high
    return out


@maker(7)
def _conv(b: Grower) -> object:
    space = b.one([1, 2, 2, 2, 2, 2, 3])
    x = _image(b, space)
    _, channels, *size = b.values[x].shape
    groups = b.one([1, 1, 1, channels, b.one([d for d in range(1, channels + 1)
                                             if channels % d == 0])])
    each = b.one([1, 1, 2, 3]) if groups == channels and b.often(0.8) else b.whole(
        1, max(1, 40 // groups))
    attributes = _window(b, size)
    fan = channels // groups * prod(attributes["kernel_shape"])
    w = b.leaf((groups * each, channels // groups, *attributes["kernel_shape"]),
               constant=b.often(0.92))
    b.values[w] = (b.values[w] / np.sqrt(fan)).astype(np.float32)
    if groups > 1:
        attributes["group"] = groups
    inputs = [x, w]
    if b.often(0.6):
        inputs.append(b.leaf((groups * each,), constant=b.often(0.95)))
    if b.often(0.12):
        attributes.pop("auto_pad", None)
        attributes.pop("dilations", None)
        w = b.leaf((channels, each, *attributes["kernel_shape"]), constant=True)
        return b.add("ConvTranspose", [x, w, *([b.leaf((groups * each,))] if b.often(0.5) else [])],
                     **attributes)
    out = b.add("Conv", inputs, **attributes)
    if out and b.often(0.25):
        out = b.add("BatchNormalization", [out, *(
            b.put(np.asarray(v, np.float32)) for v in (
                b.random.uniform(0.5, 2, groups * each), b.random.normal(0, 1, groups * each),
                b.random.normal(0, 1, groups * each), b.random.uniform(0.5, 2, groups * each)))])
    if out and b.often(0.5):
        out = b.add(b.one(["Relu", "Sigmoid", "HardSwish", "LeakyRelu", "Tanh"]), [out]) or out
    if out and b.values[out].shape == b.values[x].shape and b.often(0.7):
        out = b.add("Add", [out, x])
    return out


@maker(4)
def _matmul(b: Grower) -> object:
    if b.often(0.35):
        x = b.pick(ranks=(2,))
        rows, columns = b.values[x].shape
        turn_a, turn_b = b.often(0.3), b.often(0.5)
        inner, count = (rows if turn_a else columns), b.whole(1, 40)
        w = b.leaf((count, inner) if turn_b else (inner, count), constant=b.often(0.8))
        b.values[w] = (b.values[w] / np.sqrt(inner)).astype(np.float32)
        bias = [b.leaf(b.one([(count,), (1, count), (1,), ()]))] if b.often(0.7) else []
        extra: dict[str, Any] = {"alpha": 0.5, "beta": 2.0} if b.often(0.2) else {}
        return b.add("Gemm", [x, w, *bias], transA=int(turn_a), transB=int(turn_b), **extra)
    x = b.pick(ranks=(1, 2, 2, 3, 3, 4), make=lambda: (
        *(b.whole(1, 4) for _ in range(b.whole(0, 2))), b.one([1, 1, b.whole(1, 40)]),
        b.whole(1, 40)))
    size = b.values[x].shape
    count = b.one([1, b.whole(1, 9), b.whole(1, 40), 16, 32])
    batch = b.one([(), (), size[:-2], tuple(1 for _ in size[:-2])])
    y = b.leaf(b.one([(size[-1],), *[(*batch, size[-1], count)] * 6]), constant=b.often(0.6))
    b.values[y] = (b.values[y] / np.sqrt(size[-1])).astype(np.float32)
    if b.often(0.2) and len(size) >= 2:
        order = [*range(len(size) - 2), len(size) - 1, len(size) - 2]
        y = b.add("Transpose", [x], perm=order)
        if not y:
            return ""
    out = b.add("MatMul", [x, y])
    if out and b.often(0.4):
        out = b.add("Add", [out, b.leaf(b.values[out].shape[-1:], constant=True)])
    return out


@maker(0.7)
def _einsum(b: Grower) -> object:
    equation, sizes = b.one([
        ("ij,jk->ik", ("ij", "jk")), ("bij,bkj->bik", ("bij", "bkj")), ("ij->ji", ("ij",)),
        ("bhid,bhjd->bhij", ("bhid", "bhjd")), ("ij,ij->i", ("ij", "ij")), ("ij,j", ("ij", "j")),
        ("abc,cd->abd", ("abc", "cd")), ("ij->", ("ij",)), ("i,j->ij", ("i", "j")),
    ])
    extent = {letter: b.whole(1, 12) for letter in "abcdhijk"}
    return b.add("Einsum", [b.leaf([extent[i] for i in s]) for s in sizes], equation=equation)


# pools, reductions, normalisations


@maker(3)
def _pool(b: Grower) -> object:
    space = b.one([1, 2, 2, 2, 3])
    x = _image(b, space)
    name = b.one(["MaxPool", "AveragePool", "MaxPool", "AveragePool", "GlobalAveragePool",
                  "GlobalMaxPool"])
    if name.startswith("Global"):
        return b.add(name, [x])
    attributes = _window(b, b.values[x].shape[2:], dilate=name == "MaxPool")
    if b.often(0.3) and "auto_pad" not in attributes:
        attributes["ceil_mode"] = 1
    if name == "AveragePool" and b.often(0.5):
        attributes["count_include_pad"] = 1
    if "pads" in attributes:
        kernel = attributes["kernel_shape"]
        attributes["pads"] = [min(p, k - 1) for p, k in zip(attributes["pads"], kernel * 2)]
    return b.add(name, [x], **attributes)


@maker(4)
def _reduce(b: Grower) -> object:
    name = b.one(["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSumExp", "Sum",
                  "Mean", "Max"])
    kind = "float32" if b.often(0.9) else b.one(["int64", "int32"])
    if name == "LogSumExp":
        kind = "float32"  # whole numbers hang on the last bit
    x = b.pick(kind, ranks=range(1, 6))
    rank = b.values[x].ndim
    axes = sorted({b.whole(0, rank - 1) for _ in range(b.whole(1, rank))})
    axes = [a - rank if b.often(0.3) else a for a in axes]
    attributes: dict[str, Any] = {"keepdims": b.whole(0, 1)} if b.often(0.8) else {}
    if b.often(0.1):
        return b.add(f"Reduce{name}", [x], **attributes)
    if b.opset >= 18 or b.opset >= 13 and name == "Sum":
        return b.add(f"Reduce{name}", [x, b.ints(*axes)], **attributes)
    return b.add(f"Reduce{name}", [x], axes=axes, **attributes)


@maker(1)
def _arg(b: Grower) -> object:
    x = b.pick(ranks=range(1, 5), exact=True)
    rank = b.values[x].ndim
    attributes = {"axis": b.whole(-rank, rank - 1), "keepdims": b.whole(0, 1)}
    if b.often(0.3):
        attributes["select_last_index"] = 1
    return b.add(b.one(["ArgMax", "ArgMin"]), [x], **attributes)


@maker(0.8)
def _order(b: Grower) -> object:
    x = b.pick(ranks=range(1, 5), exact=True)
    axis = b.whole(-b.values[x].ndim, b.values[x].ndim - 1)
    if b.often(0.4):
        return b.add("CumSum", [x, b.put(np.array(axis, np.int64))], exclusive=b.whole(0, 1),
                     reverse=b.whole(0, 1))
    count = b.whole(1, b.values[x].shape[axis])
    return b.add("TopK", [x, b.ints(count)], 2, axis=axis, largest=b.whole(0, 1))


@maker(2.5)
def _softmax(b: Grower) -> object:
    x = b.pick(ranks=range(1, 5))
    axis = {"axis": b.whole(-b.values[x].ndim, b.values[x].ndim - 1)} if b.often(0.8) else {}
    return b.add(b.one(["Softmax", "Softmax", "LogSoftmax"]), [x], **axis)


@maker(1.5)
def _normalise(b: Grower) -> object:
    name = b.one(["LayerNormalization", "InstanceNormalization", "LRN", "LpNormalization"])
    x = _image(b, 2) if name in ("InstanceNormalization", "LRN") else b.pick(ranks=range(2, 5))
    shape = b.values[x].shape
    if name == "LRN":
        return b.add(name, [x], size=b.one([1, 3, 5, 4]), alpha=0.01, beta=0.75, bias=1.5)
    if name == "LpNormalization":
        return b.add(name, [x], axis=b.whole(0, len(shape) - 1), p=b.whole(1, 2))
    if name == "InstanceNormalization":
        return b.add(name, [x, *(b.leaf(shape[1:2], constant=True) for _ in "sb")])
    axis = b.whole(1, len(shape) - 1)
    return b.add(name, [x, b.leaf(shape[axis:], constant=True), *(
        [b.leaf(shape[axis:], constant=True)] if b.often(0.7) else [])], axis=axis)


# views and moves

MOVED = ("float32", "float32", "float32", "int64", "bool", "int32")


@maker(2.5)
def _reshape(b: Grower) -> object:
    x = b.pick(b.one(MOVED))
    size = b.values[x].shape
    n, parts = prod(size), []
    for _ in range(b.whole(0, 4)):
        d = b.one([d for d in range(1, min(n, 40) + 1) if n % d == 0])
        parts.append(d)
        n //= d
    parts.append(n)
    b.random.shuffle(parts)
    if b.often(0.3):
        parts[b.whole(0, len(parts) - 1)] = -1
    if b.often(0.15) and size and -1 not in parts:
        parts = [0, -1]
    return b.add("Reshape", [x, b.ints(*parts)])


@maker(3)
def _transpose(b: Grower) -> object:
    x = b.pick(b.one(MOVED), ranks=range(1, 6))
    order = b.random.permutation(b.values[x].ndim).tolist()
    return b.add("Transpose", [x], **({} if b.often(0.15) else {"perm": order}))


@maker(1.5)
def _squeeze(b: Grower) -> object:
    name = b.one(["Squeeze", "Unsqueeze", "Flatten"])
    x = b.pick(b.one(MOVED), ranks=range(0 if name == "Unsqueeze" else 1, 5))
    value = b.values[x]
    if name == "Flatten":
        return b.add(name, [x], axis=b.whole(-value.ndim, value.ndim))
    if name == "Squeeze":
        axes = [i for i, d in enumerate(value.shape) if d == 1]
        if not axes or b.often(0.2):
            return b.add(name, [x])
        axes = [b.one(axes)]
    else:
        axes = sorted({b.whole(0, value.ndim) for _ in range(b.whole(1, 2))})
    if b.opset >= 13:
        return b.add(name, [x, b.ints(*axes)])
    return b.add(name, [x], axes=axes)


@maker(1.5)
def _repeat(b: Grower) -> object:
    x = b.pick(b.one(MOVED), ranks=range(5))
    size = b.values[x].shape
    if b.often(0.5) and size:
        return b.add("Tile", [x, b.ints(*(b.one([1, 1, 2, 3]) for _ in size))])
    new = [b.whole(1, 9) if d == 1 else b.one([1, d]) for d in size]
    return b.add("Expand", [x, b.ints(*([b.whole(1, 3)] if b.often(0.3) else []), *new)])


@maker(3)
def _slice(b: Grower) -> object:
    x = b.pick(b.one(MOVED), ranks=range(1, 6))
    size = b.values[x].shape
    axes = sorted({b.whole(0, len(size) - 1) for _ in range(b.whole(1, 3))})
    begin, end, step = [], [], []
    for a in axes:
        s = b.one([1, 1, 1, 2, 3, -1, -2])
        i, j = sorted((b.whole(0, size[a]), b.whole(0, size[a])))
        if s < 0:
            i, j = j, (i - 1 if i else -size[a] - 1)
        elif b.often(0.3):
            j = b.one([1 << 40, j - size[a] if j < size[a] else j])
        begin.append(i)
        end.append(j)
        step.append(s)
    extra = [b.ints(*step)] if step != [1] * len(axes) else []
    return b.add("Slice", [x, b.ints(*begin), b.ints(*end), b.ints(*axes), *extra])


@maker(2)
def _pad(b: Grower) -> object:
    x = b.pick(b.one(["float32", "float32", "int64"]), ranks=range(1, 5))
    size = b.values[x].shape
    mode = b.one(["constant", "constant", "constant", "reflect", "edge"])
    low = -1 if mode == "constant" and b.often(0.3) else 0
    amounts = [b.whole(low, 3) if b.often(0.6) else 0 for _ in (*size, *size)]
    if mode == "reflect":
        amounts = [min(p, d - 1) for p, d in zip(amounts, size * 2)]
    value = [b.put(np.array(b.one([0, 1.5, -2]), b.values[x].dtype))] if mode == "constant" else []
    return b.add("Pad", [x, b.ints(*amounts), *value[:b.whole(0, 1)]], mode=mode)


@maker(3)
def _concat(b: Grower) -> object:
    x = b.pick(b.one(MOVED), ranks=range(1, 6))
    value = b.values[x]
    axis = b.whole(0, value.ndim - 1)
    others = value.shape[:axis] + value.shape[axis + 1:]
    fitting = [name for name, v in b.values.items() if v.dtype == value.dtype and v.size
               and v.ndim == value.ndim and v.shape[:axis] + v.shape[axis + 1:] == others]
    parts = [x]
    for _ in range(b.whole(1, 3)):
        new = [b.whole(1, 9) if i == axis else d for i, d in enumerate(value.shape)]
        parts.append(b.one(fitting) if b.often(0.6) else b.leaf(new, value.dtype.name))
    b.random.shuffle(parts)
    return b.add("Concat", parts, axis=axis - value.ndim if b.often(0.3) else axis)


@maker(1.5)
def _split(b: Grower) -> object:
    x = b.pick(b.one(MOVED), ranks=range(1, 5), fits=lambda v: max(v.shape) >= 2,
               make=lambda: (b.whole(1, 3), b.whole(2, 30)))
    size = b.values[x].shape
    axis = b.one([i for i, d in enumerate(size) if d >= 2])
    first = b.whole(1, size[axis] - 1)
    parts = [first, size[axis] - first]
    if b.opset >= 13:
        return b.add("Split", [x, b.ints(*parts)], 2, axis=axis)
    return b.add("Split", [x], 2, axis=axis, split=parts)


@maker(2.5)
def _gather(b: Grower) -> object:
    x = b.pick(b.one(MOVED), ranks=range(1, 5))
    value = b.values[x]
    axis = b.whole(0, value.ndim - 1)
    name = b.one(["Gather", "Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"])
    constant = b.often(0.5)

    def index(size: Sequence[int], top: int) -> str:
        low = -top if b.often(0.4) else 0
        return b.put(b.random.integers(low, top, size).astype(np.int64), constant)

    if name == "Gather":
        size = b.one([(), (b.whole(1, 9),), (b.whole(1, 4), b.whole(1, 4))])
        return b.add(name, [x, index(size, value.shape[axis])], axis=axis)
    if name == "GatherElements":
        size = [b.whole(1, d) for d in value.shape]
        return b.add(name, [x, index(size, value.shape[axis])], axis=axis)
    if name == "ScatterElements":
        size = [b.whole(1, d) for d in value.shape]
        # places are different, so that the order of the updates doesn't matter
        order = np.argsort(b.random.random(value.shape), axis)[tuple(slice(0, d) for d in size)]
        at = b.put(np.ascontiguousarray(order, np.int64), constant)
        return b.add(name, [x, at, b.leaf(size, value.dtype.name)], axis=axis)
    depth = b.whole(1, value.ndim)
    if name == "GatherND":
        size = b.one([(b.whole(1, 5),), (b.whole(1, 4), b.whole(1, 4))])
        places = np.stack([b.random.integers(0, d, size) for d in value.shape[:depth]], -1)
        return b.add(name, [x, b.put(places.astype(np.int64), constant)])
    rows = prod(value.shape[:depth])
    chosen = b.random.permutation(rows)[:b.whole(1, min(rows, 9))]
    places = np.stack(np.unravel_index(chosen, value.shape[:depth]), -1)
    return b.add(name, [x, b.put(places.astype(np.int64), constant),
                        b.leaf((len(chosen), *value.shape[depth:]), value.dtype.name)])


@maker(1.5)
def _space(b: Grower) -> object:
    x = _image(b, 2)
    size = b.values[x].shape
    name = b.one(["DepthToSpace", "SpaceToDepth", "Resize", "Resize", "Resize"])
    if name == "Resize":
        mode = b.one(["nearest", "linear", "nearest"])
        turn = b.one(["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"])
        rounding = b.one(["floor", "round_prefer_floor"])
        extra = {"nearest_mode": rounding} if mode == "nearest" else {}
        region = b.put(np.zeros(0, np.float32)) if b.opset < 13 else ""
        if b.often(0.5):
            # of a size that is cut down to whole pixels, onnxruntime and the standard differ in
            # what align_corners means
            some = [2, 1, 3] if turn == "align_corners" else [2, 2, 1, 3, 0.5, 1.5]
            factors = [1, 1, *(b.one(some) for _ in "hw")]
            return b.add(name, [x, region, b.put(np.array(factors, np.float32))], mode=mode,
                         coordinate_transformation_mode=turn, **extra)
        sizes = [*size[:2], *(b.whole(1, 40) for _ in "hw")]
        scales = b.put(np.zeros(0, np.float32)) if b.opset < 13 else ""
        return b.add(name, [x, region, scales, b.ints(*sizes)], mode=mode,
                     coordinate_transformation_mode=turn, **extra)
    if name == "DepthToSpace":
        x = b.leaf((1, 4 * b.whole(1, 9), b.whole(1, 9), b.whole(1, 9)), constant=False)
        return b.add(name, [x], blocksize=2, mode=b.one(["DCR", "CRD"]))
    x = b.leaf((1, b.whole(1, 9), 2 * b.whole(1, 6), 2 * b.whole(1, 6)), constant=False)
    return b.add(name, [x], blocksize=2)


@maker(0.8)
def _trilu(b: Grower) -> object:
    x = b.pick(ranks=(2, 3))
    return b.add("Trilu", [x, b.put(np.array(b.whole(-3, 3), np.int64))], upper=b.whole(0, 1))


@maker(0.6)
def _shape_of(b: Grower) -> object:
    x = b.pick(ranks=range(1, 5))
    out = b.add("Shape", [x])
    return out and b.add("Add", [out, b.leaf((b.values[x].ndim,), "int64")])


# control flow, recurrence, state


@maker(0.8)
def _if(b: Grower) -> object:
    x = b.pick(ranks=range(5))
    y = _mate(b, x)
    if np.broadcast_shapes(b.values[x].shape, b.values[y].shape) != b.values[x].shape:
        y = x
    c = b.put(np.array(b.often(0.5)), constant=b.often(0.1))

    def branch() -> onnx.GraphProto:
        operators = [(name, 1) for name in ("Tanh", "Relu", "Neg", "Identity", "Sigmoid")] + [
            (name, 2) for name in ("Add", "Mul", "Sub")]
        nodes, last = [], x
        for i in range(b.whole(1, 3)):
            operator, count = b.one(operators)
            name = f"inner{len(b.values)}_{b.whole(0, 10**9)}_{i}"
            nodes.append(helper.make_node(operator, [last, y][:count], [name]))
            last = name
        return helper.make_graph(
            nodes, "branch", [], [_info(last, b.values[x])])

    return b.add("If", [c], then_branch=branch(), else_branch=branch())


@maker(0.6)
def _loop(b: Grower) -> object:
    x = b.pick(ranks=range(4), fits=lambda v: v.size <= 400)
    y = b.leaf(b.values[x].shape)
    trips = b.put(np.array(b.whole(1, 5), np.int64), constant=b.often(0.7))
    tag = f"l{len(b.values)}"
    i, keep, carry, on, new, extra = (f"{tag}{k}" for k in ("i", "k", "c", "o", "n", "e"))
    nodes = [
        helper.make_node("Identity", [keep], [on]),
        helper.make_node(b.one(["Mul", "Add", "Sub"]), [carry, y], [tag + "a"]),
        helper.make_node(b.one(["Tanh", "Sigmoid", "Relu"]), [tag + "a"], [new]),
        helper.make_node("Neg", [new], [extra]),
    ]
    value = b.values[x]
    stacked = b.often(0.5)
    body = helper.make_graph(
        nodes, "body",
        [_info(i, np.zeros((), np.int64)), _info(keep, np.zeros((), bool)), _info(carry, value)],
        [_info(on, np.zeros((), bool)), _info(new, value), *([_info(extra, value)] * stacked)])
    return b.add("Loop", [trips, b.put(np.array(True)), x], 1 + stacked, body=body)


@maker(0.8)
def _recurrent(b: Grower) -> object:
    name, gates = b.one([("LSTM", 4), ("LSTM", 4), ("GRU", 3), ("RNN", 1)])
    steps, batch, width, hidden = (b.whole(1, n) for n in (6, 3, 12, 12))
    turn = b.one(["forward", "forward", "reverse", "bidirectional"])
    count = 2 if turn == "bidirectional" else 1
    x = b.leaf((steps, batch, width), constant=False)
    inputs = [x, b.leaf((count, gates * hidden, width), constant=True),
              b.leaf((count, gates * hidden, hidden), constant=True)]
    if b.often(0.7):
        inputs.append(b.leaf((count, 2 * gates * hidden), constant=True))
        if b.often(0.5):
            inputs += ["", b.leaf((count, batch, hidden), constant=False)]
            if name == "LSTM":
                inputs.append(b.leaf((count, batch, hidden), constant=False))
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": turn}
    if name == "GRU" and b.often(0.5):
        attributes["linear_before_reset"] = 1
    return b.add(name, inputs, 3 if name == "LSTM" else 2, **attributes)


@maker(0.8)
def _state(b: Grower) -> object:
    """A queue that is shifted by a row, or a running value."""
    if b.states:
        return ""
    if b.often(0.6):
        rows, size = b.whole(2, 9), b.shape(b.whole(0, 2))
        state = b.put(np.zeros((rows, *size), np.float32), constant=False, exact=False)
        late = b.add("Slice", [state, b.ints(1), b.ints(1 << 40), b.ints(0)])
        out = late and b.add("Concat", [late, b.leaf((1, *size), constant=False)], axis=0)
    else:
        x = b.pick(ranks=range(1, 4))
        state = b.put(np.zeros(b.values[x].shape, np.float32), constant=False, exact=False)
        out = b.add("Add", [state, x])
        out = out and b.add("Tanh", [out])
    if out:
        b.states[out] = state
    return out


def grow(number: int, most: int = 9) -> Case:
    """The case of this number: a model of 1 to about `most` nodes."""
    b = Grower(number)
    weights = np.array([weight for weight, _ in MAKERS])
    count = b.whole(1, most)
    for _ in range(4 * count):
        if len(b.nodes) >= count:
            break
        MAKERS[b.random.choice(len(MAKERS), p=weights / weights.sum())][1](b)
    if not b.nodes:
        return grow(number + 1_000_003, most)
    case = b.case()
    return opened(case, b.random) if b.often(0.15) and not b.states else case


def opened(case: Case, random: np.random.Generator) -> Case:
    """The case with one size of its inputs left open, if the model means something without it."""
    sizes = sorted({d for value in case.feeds().values() for d in value.shape if d > 1})
    if not sizes:
        return case
    size = random.choice(sizes)
    new = replace(case, opened=frozenset(
        (name, axis) for name, value in case.feeds().items()
        for axis, d in enumerate(value.shape) if d == size))
    try:
        for feeds in resized(new):
            reference(new.model(), feeds)
    except Exception:  # whatever onnxruntime raises
        return case
    return new


def resized(case: Case) -> list[Arrays]:
    """A case's inputs, also with other sizes of the dimension that is open."""
    feeds = case.feeds()
    if not case.opened:
        return [feeds]
    size = next(case.values[name].shape[axis] for name, axis in case.opened)
    out = []
    for other in (size, size + 3, size - 1):
        new = dict(feeds)
        for name, axis in case.opened & {(n, a) for n in feeds for a in range(new[n].ndim)}:
            new[name] = np.take(new[name], np.arange(other) % size, axis)
        out.append(new)
    return out


def bounds(case: Case) -> dict[str, tuple[int, int]]:
    """What the compiler is told about the open dimension."""
    sizes = [case.values[name].shape[axis] for name, axis in case.opened]
    return {"N": (sizes[0] - 1, sizes[0] + 3)} if sizes else {}


# ---- comparing


def allowance(case: Case, feeds: Arrays, expected: Arrays) -> dict[str, Array | float]:
    """How far each output may be off: a share of its largest value, and what noise in the inputs
    moves."""
    random = np.random.default_rng(0)
    shaken = {
        name: np.asarray(value * (1 + 1e-6 * random.normal(0, 1, value.shape)), value.dtype)
        if value.dtype.kind == "f" and name not in case.exact else value
        for name, value in feeds.items()
    }
    moved = reference(case.model(), shaken)
    out: dict[str, Array | float] = {}
    for name, value in expected.items():
        if value.dtype.kind != "f":
            out[name] = 0.0
            continue
        span = float(np.abs(value).max(initial=0))
        size = float(np.abs(value - moved[name]).max(initial=0))
        out[name] = (5e-3 if value.dtype == np.float16 else TOLERANCE) * span + 30 * size + 1e-30
    return out


def difference(
    got: Arrays, expected: Arrays, allowed: dict[str, Array | float], exact: bool = False
) -> str:
    """"" where the outputs agree, or what differs first."""
    if list(got) != list(expected):
        return f"outputs {list(got)} instead of {list(expected)}"
    for name, want in expected.items():
        have = got[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            return f"{name}: {have.dtype}{have.shape} instead of {want.dtype}{want.shape}"
        if exact:
            wrong = np.frombuffer(have.tobytes(), np.uint8) != np.frombuffer(
                want.tobytes(), np.uint8)
            if wrong.any():
                places = np.unique(np.flatnonzero(wrong) // want.itemsize)
                return f"{name}: {len(places)} of {want.size} elements differ, first {places[0]}"
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.abs(have.astype(np.float64) - want.astype(np.float64))
        bad = ~(gap <= allowed[name]) & ~(np.isnan(have) & np.isnan(want)) & (have != want)
        if bad.any():
            first = np.unravel_index(int(np.argmax(bad)), bad.shape)
            return (f"{name}: {int(bad.sum())} of {bad.size} elements are wrong, first at "
                    f"{[int(i) for i in first]}: {have[first]} instead of {want[first]}")
    return ""


def fenced(value: Array) -> Array:
    """A copy that ends where the next page can't be read or written."""
    page = mmap.PAGESIZE
    room = -(-max(value.nbytes, 1) // page) * page
    memory = mmap.mmap(-1, room + page)
    view = ctypes.c_char.from_buffer(memory)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(ctypes.addressof(view) + room), page, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    out = np.frombuffer(memory, value.dtype, value.size, room - value.nbytes).reshape(value.shape)
    out[...] = value
    return out


Outputs = Iterator[tuple[str, Arrays]]
Subject = Callable[[Case, list[Arrays]], Outputs]
"""(case, feeds of each run in turn) -> for each evaluation its name and, run after run, outputs.

An evaluation's name is "interpreter" or "plan", or begins with "again": then it has to equal the
one before to the last bit. Its outputs come as one dict a run.
"""


def product(case: Case, runs: list[Arrays]) -> Outputs:
    """tinyedge: its importer and interpreter, then a plan, on one and two threads."""
    from tinyedge import onnx as importer
    from tinyedge.graph import validate
    from tinyedge.interpreter import interpret
    from tinyedge.passes import optimize, winograd

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.onnx"
        path.write_bytes(case.model().SerializeToString())
        graph = importer.load(path, dims=bounds(case))
        state = {name: np.zeros_like(case.values[name]) for name in case.states.values()}
        shapes = []
        for feeds in runs:
            out = interpret(graph, {**feeds, **state})
            state = {name: out[source] for source, name in case.states.items()}
            shapes.append({name: out[name].shape for name in case.outputs})
            yield "interpreter", {name: out[name] for name in case.outputs}
        plan = tinyedge.compile(path, target="cpu", dims=bounds(case), states=case.states)
        plan.save(Path(folder) / "case.pkl")
        visible = [name for name in case.outputs if name not in case.states]
        poison = {name: np.full_like(value, np.nan) if value.dtype.kind == "f" else value
                  for name, value in runs[0].items()}
        for label, threads in (("plan", 1), ("again: plan on two threads", 2)):
            run = tinyedge.load(Path(folder) / "case.pkl", threads=threads)
            if not case.states:  # a stateful plan would remember it
                run(poison)
            for feeds, shape in zip(runs, shapes):
                given = {name: fenced(value) for name, value in feeds.items()}
                into = {name: fenced(np.zeros(shape[name], case.values[name].dtype))
                        for name in visible}
                out = run(given, out=into)
                for name, value in given.items():
                    if value.tobytes() != feeds[name].tobytes():
                        raise AssertionError(f"the run wrote to its input {name}")
                yield label, {name: np.array(out[name]) for name in visible}
            # minimal filters make nan of all outputs of a tile with an infinite value
            filtered = any(n.op == "winograd_in" for n in winograd.run(
                optimize(validate(graph))).nodes())
            if not filtered and (feeds := extreme(case, runs[0])):
                want = interpret(graph, feeds)
                out = {name: np.array(value) for name, value in run(feeds).items()}
                spans = {name: 1e-3 * np.abs(value, where=np.isfinite(value), out=np.zeros(
                    value.shape)).max(initial=0) + 1e-6 for name, value in want.items()}
                if wrong := difference(out, want, spans):
                    raise Extreme(wrong)


class Extreme(Exception):
    """A plan and the interpreter differ about nan and inf."""


def extreme(case: Case, feeds: Arrays) -> Arrays:
    """Inputs with some nan, inf and large numbers; none where their meaning is left open."""
    left_open = {"Cast", "TopK", "ArgMax", "ArgMin", "If", "Loop"}
    if case.states or left_open & {node.op_type for node in case.nodes}:
        return {}
    random = np.random.default_rng(case.number + 1)
    out = {}
    for name, value in feeds.items():
        out[name] = value
        if value.dtype.kind == "f" and random.random() < 0.6:
            some = random.choice([np.nan, np.inf, -np.inf, 1e4, -0.0], value.shape)
            out[name] = np.where(random.random(value.shape) < 0.05, some, value).astype(value.dtype)
    return out


def check(case: Case, subject: Subject = product) -> str:
    """"" or what is wrong, as "kind: text"."""
    runs = resized(case)
    first = runs[0] = {name: value for name, value in runs[0].items()
                       if name not in case.states.values()}
    random = np.random.default_rng(case.number)
    for _ in range(2 if case.states else 0):
        runs.append({
            name: np.asarray(random.normal(0, 1, value.shape), value.dtype)
            if value.dtype.kind == "f" and name not in case.exact else value
            for name, value in first.items()
        })
    state = {name: np.zeros_like(case.values[name]) for name in case.states.values()}
    expected: list[Arrays] = []
    allowed: list[dict[str, Array | float]] = []
    for feeds in runs:
        given = {**feeds, **state}
        out = reference(case.model(), given)
        expected.append({name: out[name] for name in case.outputs})
        allowed.append(allowance(case, given, expected[-1]))
        state = {name: out[source] for source, name in case.states.items()}
    count, before = 0, [Arrays()] * len(runs)
    try:
        for label, out in subject(case, runs):
            i = count % len(runs)
            count += 1
            kind, _, text = label.partition(":")
            want = {name: expected[i][name] for name in out}
            wrong = difference(out, before[i], allowed[i], True) if kind == "again" else \
                difference(out, want, allowed[i])
            if wrong:
                return f"{label.removeprefix('again: ')}: {wrong}"
            before[i] = out
    except UnsupportedError as error:
        # what an importer refuses names the operator; other stages have no business to refuse
        named = re.match(r"node '\S+' \((\w+), opset \d+\)(.*)", str(error))
        return f"unsupported: {named[1]}{named[2]}" if named else f"refused: {error}"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return (f"{type(error).__name__} in {Path(frame.filename).name}:{frame.name}:{frame.lineno}"
                f": {error}")
    return ""


def isolated(task: Callable[[], str], seconds: int = 120) -> str:
    """What `task` returns, run in a forked process; a crash or a hang is a result too."""
    read, write = os.pipe()
    # garbage of this process, such as a session that would wait for its threads, is not the
    # child's to collect
    gc.collect()
    gc.freeze()
    child = os.fork()
    if child:
        gc.unfreeze()
    else:
        status = 1
        try:
            os.close(read)
            faulthandler.disable()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            with os.fdopen(write, "w") as pipe:
                pipe.write(task())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return f"hang: no end in {seconds} s" if name == "SIGALRM" else f"crash: {name}"
    return text if not os.WEXITSTATUS(status) else "failed: nothing can be said about it"


# ---- making it small


def minimise(case: Case, fails: Callable[[Case], bool]) -> Case:
    """A part of a failing case that still fails: one output if that is enough, then fewer nodes."""
    for output in case.outputs if len(case.outputs) > 1 and not case.states else ():
        smaller = pruned(replace(case, outputs=(output,)))
        if fails(smaller):
            case = smaller
            break
    again = True
    while again:
        again = False
        for i in range(len(case.nodes)):
            nodes = case.nodes[:i] + case.nodes[i + 1:]
            gone = set(case.nodes[i].output)
            if not nodes or gone & (set(case.states) | set(case.states.values())):
                continue
            kept = tuple(name for name in case.outputs if name not in gone)
            ends = [name for name in uses(case.nodes[i])
                    if any(name in node.output for node in nodes) and name not in kept]
            # without its last node a model shows what that node read
            for outputs in {kept or tuple(ends), kept + tuple(ends)}:
                smaller = pruned(replace(case, nodes=nodes, outputs=outputs))
                if outputs and smaller.nodes and fails(smaller):
                    case, again = smaller, True
                    break
            if again:
                break
    return case


def pruned(case: Case) -> Case:
    """Without nodes that no output needs."""
    needed, nodes = set(case.outputs), []
    for node in reversed(case.nodes):
        if needed & set(node.output):
            needed |= set(uses(node))
            nodes.append(node)
    made = {name for node in nodes for name in node.output}
    new = replace(case, nodes=tuple(reversed(nodes)),
                  outputs=tuple(name for name in case.outputs if name in made))
    return replace(new, opened=frozenset(p for p in case.opened if p[0] in new.inputs))


def kind_of(finding: str) -> str:
    """What two findings share that have one cause, as far as their text tells."""
    return finding.split(":")[0] if ".py" not in finding else ":".join(finding.split(":")[:2])


def describe(case: Case) -> str:
    """The nodes of a case, one a line, with the types and shapes of what they read."""
    def show(name: str) -> str:
        if not name:
            return "_"
        value = case.values[name]
        mark = "const " if name in case.constants else ""
        small = f" = {value.tolist()}" if name in case.constants and value.size <= 8 else ""
        return f"{mark}{value.dtype.name}{list(value.shape)} {name}{small}"

    lines = []
    for node in case.nodes:
        attributes = ", ".join(
            f"{a.name}={'graph' if a.type == a.GRAPH else helper.get_attribute_value(a)}"
            for a in node.attribute)
        lines.append(f"{', '.join(o for o in node.output)} = {node.op_type}({attributes})")
        lines += [f"    {show(name)}" for name in node.input]
    shown = ", ".join(show(name) for name in case.outputs)
    states = f"; states {case.states}" if case.states else ""
    free = f"; N = {bounds(case)['N']} is {sorted(case.opened)}" if case.opened else ""
    return "\n".join([*lines, f"-> {shown}{states}{free} (opset {case.opset})"])


SCRIPT = '''"""{finding}

Found by `python -m bench.fuzz --case {number}`:

{text}
"""

import base64, io, sys, tempfile, zlib
from pathlib import Path

import numpy as np

import tinyedge
import tinyedge.onnx
from tinyedge.interpreter import interpret

MODEL = zlib.decompress(base64.b85decode("""{model}"""))
FEEDS = np.load(io.BytesIO(zlib.decompress(base64.b85decode("""{feeds}"""))))
STATES = {states}

folder = Path(tempfile.mkdtemp())
path = folder / "case.onnx"
path.write_bytes(MODEL)
feeds = {{name: FEEDS[name] for name in FEEDS.files}}
import onnxruntime
names = [o.name for o in onnxruntime.InferenceSession(MODEL).get_outputs()]
want = dict(zip(names, onnxruntime.InferenceSession(MODEL).run(names, feeds)))
graph = tinyedge.onnx.load(path, dims={dims})
mine = interpret(graph, feeds)
tinyedge.compile(path, target="cpu", dims={dims}, states=STATES).save(folder / "case.pkl")
given = {{name: value for name, value in feeds.items() if name not in STATES.values()}}
got = tinyedge.load(folder / "case.pkl", threads=1)(**given)
for name, value in want.items():
    def gap(x):
        x, y = np.asarray(x, np.float64), np.asarray(value, np.float64)
        return np.abs(x - y).max() / max(np.abs(y).max(), 1e-30)
    print(name, value.dtype, value.shape, "interpreter", gap(mine[name]), "plan",
          gap(got[name]) if name in got else "-")
'''


def script(case: Case, finding: str) -> str:
    """A Python program that shows a finding."""
    from io import BytesIO

    file = BytesIO()
    np.savez(file, allow_pickle=False, **case.feeds())

    def pack(data: bytes) -> str:
        return base64.b85encode(zlib.compress(data, 9)).decode()

    return SCRIPT.format(
        finding=finding.replace("\\", "/").replace('"""', "'''"), number=case.number,
        text=describe(case).replace("\\", "/").replace('"""', "'''"),
        model=pack(case.model().SerializeToString()).replace("\\", "\\\\"),
        feeds=pack(file.getvalue()), states=case.states, dims=bounds(case))


def tried(case: Case) -> str:
    """`check` in a process of its own."""
    return isolated(lambda: check(case))


def same_kind(kind: str) -> Callable[[Case], bool]:
    return lambda case: kind_of(tried(case)) == kind


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0, help="the first case's number")
    parser.add_argument("--case", type=int, help="check this case only")
    parser.add_argument("--nodes", type=int, default=9, help="most nodes of a model")
    parser.add_argument("--keep", type=Path, help="folder for a script that shows each finding")
    parser.add_argument("--each", type=int, default=5, help="findings of one kind to make small")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    found: Counter[str] = Counter()
    unsupported: Counter[str] = Counter()
    shown: set[str] = set()
    number, count = options.seed if options.case is None else options.case, 0
    with tempfile.TemporaryDirectory(prefix="tinyedge-fuzz-") as cache:
        os.environ["TINYEDGE_CACHE"] = cache
        while count == 0 or options.case is None and time.monotonic() < end:
            case = grow(number, options.nodes)
            finding = tried(case)
            count += 1
            number += 1
            if finding.startswith("unsupported"):
                unsupported[finding] += 1
                if options.case is not None:
                    print(f"{describe(case)}\n{finding}")
                continue
            if not finding:
                continue
            kind = kind_of(finding)
            found[kind] += 1
            if found[kind] > options.each:
                continue
            small = minimise(case, same_kind(kind))
            finding = tried(small) or finding
            sort = f"{kind}: {sorted({node.op_type for node in small.nodes})}"
            if sort in shown:
                continue
            shown.add(sort)
            print(f"case {case.number}: {finding}\n{describe(small)}\n", flush=True)
            if options.keep:
                options.keep.mkdir(parents=True, exist_ok=True)
                (options.keep / f"case{case.number}.py").write_text(script(small, finding))
    print(f"{count} models, {sum(unsupported.values())} with something that isn't supported, "
          f"{found.total()} failures")
    for text, times in unsupported.most_common():
        print(f"  {times} x {text}")
    for text, times in found.most_common():
        print(f"  {times} x {text}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
