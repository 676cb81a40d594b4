"""Networks that the benchmark writes itself, after published architectures, with seeded weights.

Batch normalisation is folded, as in a file meant for deployment.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from examples.files import locked, write_whole
from tests.models import Spec

Array = np.ndarray[Any, np.dtype[Any]]


class Builder:
    """Nodes and weights of a network under construction; every method gives a value's name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(zlib.crc32(name.encode()))

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        out = f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [out], out, **attributes))
        return out

    def held(self, value: Array) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(value, name))
        return name

    def normal(self, *shape: int, scale: float = 1.0) -> str:
        return self.held((self.random.standard_normal(shape) * scale).astype(np.float32))

    def conv(self, x: str, c: int, k: int, size: int, stride: int = 1, groups: int = 1,
             act: str = "") -> str:
        """x with c channels -> k channels, padded to keep its size (by the stride)."""
        scale = float(np.sqrt(2 / (c // groups * size * size)))
        y = self.node("Conv", x, self.normal(k, c // groups, size, size, scale=scale),
                      self.normal(k, scale=0.1), group=groups, strides=[stride] * 2,
                      pads=[size // 2] * 4, kernel_shape=[size] * 2)
        return self.act(y, act)

    def act(self, x: str, act: str) -> str:
        if act == "relu6":
            return self.node("Clip", x, self.held(np.zeros((), np.float32)),
                             self.held(np.full((), 6, np.float32)))
        if act == "gelu":  # as exporters of opset 17 write it
            half, one = (self.held(np.full((), v, np.float32)) for v in (0.5, 1))
            root = self.held(np.full((), np.sqrt(2), np.float32))
            erf = self.node("Erf", self.node("Div", x, root))
            return self.node("Mul", self.node("Mul", x, self.node("Add", erf, one)), half)
        return self.node(act.capitalize(), x) if act else x

    def linear(self, x: str, c: int, k: int, gain: float = 1.0) -> str:
        """x [..., c] -> [..., k]"""
        y = self.node("MatMul", x, self.normal(c, k, scale=gain / float(np.sqrt(c))))
        return self.node("Add", y, self.normal(k, scale=0.1))

    def norm(self, x: str, c: int) -> str:
        return self.node("LayerNormalization", x, self.held(
            self.random.uniform(0.7, 1.3, c).astype(np.float32)), self.normal(c, scale=0.1),
            axis=-1)

    def attention(self, x: str, tokens: int, c: int, heads: int) -> str:
        """Self-attention of x [1, tokens, c]."""
        split = self.held(np.array([1, tokens, heads, c // heads]))
        q, k, v = (self.node("Reshape", self.linear(x, c, c), split) for _ in range(3))
        q = self.node("Transpose", q, perm=[0, 2, 1, 3])
        k = self.node("Transpose", k, perm=[0, 2, 3, 1])
        v = self.node("Transpose", v, perm=[0, 2, 1, 3])
        scale = self.held(np.full((), (c // heads) ** -0.5, np.float32))
        p = self.node("Softmax", self.node("Mul", self.node("MatMul", q, k), scale), axis=-1)
        y = self.node("Transpose", self.node("MatMul", p, v), perm=[0, 2, 1, 3])
        return self.linear(self.node("Reshape", y, self.held(np.array([1, tokens, c]))), c, c)

    def block(self, x: str, tokens: int, c: int, heads: int) -> str:
        """A transformer's layer, normalised first."""
        x = self.node("Add", x, self.attention(self.norm(x, c), tokens, c, heads))
        h = self.act(self.linear(self.norm(x, c), c, 4 * c), "gelu")
        return self.node("Add", x, self.linear(h, 4 * c, c))

    def model(self, inputs: dict[str, Sequence[int]], outputs: dict[str, Sequence[int]]
              ) -> onnx.ModelProto:
        """The network; outputs are renamed from the values that carry them."""
        make = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT)
        graph = helper.make_graph(
            self.nodes, self.name, [make(n, shape=s) for n, s in inputs.items()],
            [make(n, shape=s) for n, s in outputs.items()], self.weights)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(made, full_check=True)
        return made


def resnet18() -> onnx.ModelProto:
    """He et al., "Deep residual learning for image recognition", table 1."""
    b = Builder("resnet18")
    x = b.conv("image", 3, 64, 7, 2, act="relu")
    x = b.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    c = 64
    for k in (64, 128, 256, 512):
        for _ in range(2):
            stride = 2 if k != c else 1
            y = b.conv(b.conv(x, c, k, 3, stride, act="relu"), k, k, 3)
            x = b.act(b.node("Add", y, b.conv(x, c, k, 1, stride) if k != c else x), "relu")
            c = k
    y = b.linear(b.node("Flatten", b.node("GlobalAveragePool", x)), 512, 1000)
    return b.model({"image": (1, 3, 224, 224)}, {y: (1, 1000)})


def mobilenetv2() -> onnx.ModelProto:
    """Sandler et al., "MobileNetV2: inverted residuals and linear bottlenecks", table 2."""
    b = Builder("mobilenetv2")
    x, c = b.conv("image", 3, 32, 3, 2, act="relu6"), 32
    for t, k, count, first in ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2),
                               (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)):
        for i in range(count):
            stride = first if i == 0 else 1
            y = b.conv(x, c, c * t, 1, act="relu6") if t > 1 else x
            y = b.conv(y, c * t, c * t, 3, stride, c * t, act="relu6")
            y = b.conv(y, c * t, k, 1)
            x, c = (b.node("Add", x, y) if stride == 1 and c == k else y), k
    x = b.node("GlobalAveragePool", b.conv(x, c, 1280, 1, act="relu6"))
    y = b.linear(b.node("Flatten", x), 1280, 1000)
    return b.model({"image": (1, 3, 224, 224)}, {y: (1, 1000)})


def encoder(tokens: int) -> onnx.ModelProto:
    """Six layers of a transformer, 384 wide, 12 heads (the size of small sentence encoders)."""
    b = Builder(f"encoder-{tokens}")
    x = "tokens"
    for _ in range(6):
        x = b.block(x, tokens, 384, 12)
    y = b.norm(x, 384)
    return b.model({"tokens": (1, tokens, 384)}, {y: (1, tokens, 384)})


def driving() -> onnx.ModelProto:
    """The shape of a driver-assistance vision network: two cameras in 24 channels, four stages of
    depthwise and pointwise layers, two attention blocks, one flat output."""
    b = Builder("driving")
    x = b.node("Concat", "img", "big_img", axis=1)
    x = b.conv(b.conv(x, 24, 32, 3, 2, act="gelu"), 32, 64, 3, 2, act="gelu")
    c, h, w = 64, 32, 64
    for k, count, size in ((64, 2, 3), (128, 2, 7), (256, 4, 7), (512, 2, 3)):
        if k != c:
            x, c, h, w = b.conv(x, c, k, 3, 2), k, h // 2, w // 2
        for _ in range(count):
            y = b.conv(b.conv(x, c, c, size, groups=c), c, 2 * c, 1, act="gelu")
            x = b.node("Add", x, b.conv(y, 2 * c, c, 1))
    t = b.node("Transpose", b.node("Reshape", x, b.held(np.array([1, c, h * w]))), perm=[0, 2, 1])
    for _ in range(2):
        t = b.block(t, h * w, c, 8)
    pooled = b.node("ReduceMean", t, axes=[1], keepdims=0)
    hidden = b.act(b.linear(pooled, c, 512), "relu")
    y = b.node("Concat", hidden, *(b.linear(hidden, 512, n) for n in (55, 264, 384, 32)), axis=1)
    return b.model({"img": (1, 12, 128, 256), "big_img": (1, 12, 128, 256)}, {y: (1, 1247)})


def _written(name: str, make: Callable[[], onnx.ModelProto], cache: Path) -> Path:
    path = cache / f"{name}-{zlib.crc32(Path(__file__).read_bytes()):08x}.onnx"
    with locked(cache):
        if not path.exists():
            write_whole(path, make().SerializeToString())
    return path


def _feeds(shapes: dict[str, Sequence[int]], random: np.random.Generator) -> dict[str, Array]:
    return {name: random.standard_normal(shape).astype(np.float32)
            for name, shape in shapes.items()}


def _spec(name: str, make: Callable[[], onnx.ModelProto], **shapes: Sequence[int]) -> Spec:
    return Spec(partial(_written, name, make), partial(_feeds, shapes))


_IMAGE = (1, 3, 224, 224)
NETWORKS = {
    "resnet18": _spec("resnet18", resnet18, image=_IMAGE),
    "mobilenetv2": _spec("mobilenetv2", mobilenetv2, image=_IMAGE),
    "encoder-32": _spec("encoder-32", partial(encoder, 32), tokens=(1, 32, 384)),
    "encoder-128": _spec("encoder-128", partial(encoder, 128), tokens=(1, 128, 384)),
    "driving": _spec("driving", driving, img=(1, 12, 128, 256), big_img=(1, 12, 128, 256)),
}
"""Like `tests.models.MODELS`: name -> how the file and its inputs are made."""


def _quantised(name: str, kind: str, cache: Path) -> Path:
    """A network quantised by onnxruntime's tool: 8 bits, weights by channel, QDQ form."""
    path = cache / f"{name}-{kind}-{zlib.crc32(Path(__file__).read_bytes()):08x}.onnx"
    source = NETWORKS[name].obtain(cache)
    with locked(cache):
        if not path.exists():
            from onnxruntime.quantization import (
                CalibrationDataReader,
                QuantFormat,
                QuantType,
                quantize_static,
            )

            class Calibration(CalibrationDataReader):  # type: ignore[misc]
                def __init__(self) -> None:
                    self.runs = (NETWORKS[name].make(np.random.default_rng(i)) for i in range(3))

                def get_next(self) -> dict[str, Array] | None:
                    return next(self.runs, None)

            part = path.with_suffix(".part")
            quantize_static(
                str(source), str(part), Calibration(), quant_format=QuantFormat.QDQ,
                activation_type=QuantType[kind], weight_type=QuantType.QInt8, per_channel=True)
            part.rename(path)
    return path


QUANTISED = {
    f"{name} {kind}": Spec(partial(_quantised, name, kind), NETWORKS[name].make)
    for name in ("resnet18", "mobilenetv2") for kind in ("QUInt8", "QInt8")
}
"""The same for quantised forms, by the type of their activations."""
