"""EfficientNet-Lite0 as an ONNX file, from its published checkpoint, without torch.

Stands before the pipeline: it makes a model for it, as any exporter would. The checkpoint is a
sequence of pickles followed by raw tensors (torch's format before 1.6); the graph is written node
by node with its batch normalisations left in, because folding them is the compiler's work.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from examples.files import write_whole

IMAGE_SIZE = 224
BATCH_NORM_EPSILON = 1e-3
# Blocks that halve the image; everything else is read from the checkpoint's shapes.
STRIDE_2_BLOCKS = frozenset({1, 3, 5, 11})

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_STORAGES: dict[str, np.dtype[Any]] = {
    "FloatStorage": np.dtype("<f4"),
    "LongStorage": np.dtype("<i8"),
}
_Tensor = tuple[str, int, tuple[int, ...], tuple[int, ...]]  # storage key, offset, shape, strides


class CheckpointError(ValueError):
    """The checkpoint is damaged, or of another format than this reader knows."""


class _Unpickler(pickle.Unpickler):
    """Reads tensors as `_Tensor`; every global that these don't need is refused."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.storages: dict[str, tuple[np.dtype[Any], int]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda key, offset, shape, strides, *_: (key, offset, shape, strides)
        if module == "torch" and name in _STORAGES:
            return name
        raise CheckpointError(f"{module}.{name} is not something that tensors need")

    def persistent_load(self, pid: Any) -> str:
        kind, storage, key, _device, size, _view = pid
        if kind != "storage":
            raise CheckpointError(f"persistent object of unknown kind {kind!r}")
        self.storages[key] = (_STORAGES[storage], size)
        return str(key)


def read_checkpoint(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Tensors of a torch checkpoint in the format of versions before 1.6, by name.

    Raises CheckpointError when the file is not one.
    """
    with path.open("rb") as file:
        try:
            if (_Unpickler(file).load(), _Unpickler(file).load()) != (_MAGIC, _PROTOCOL):
                raise CheckpointError("another magic number or protocol")
            _Unpickler(file).load()  # sizes of C types where it was written: not needed
            reader = _Unpickler(file)
            tensors: Mapping[str, _Tensor] = reader.load()
            keys: list[str] = _Unpickler(file).load()
        except (pickle.UnpicklingError, EOFError, ValueError, KeyError, TypeError) as error:
            message = f"{path}: not a torch checkpoint of the format before 1.6 ({error})"
            raise CheckpointError(message) from error
        data: dict[str, npt.NDArray[Any]] = {}
        for key in keys:
            dtype, size = reader.storages[key]
            count = int.from_bytes(file.read(8), "little")
            body = file.read(size * dtype.itemsize)
            if count != size or len(body) != size * dtype.itemsize:
                raise CheckpointError(f"{path}: storage {key} is cut short or of another size")
            data[key] = np.frombuffer(body, dtype)
    state: dict[str, npt.NDArray[Any]] = {}
    for name, (key, offset, shape, strides) in tensors.items():
        storage = data[key]
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if min(offset, *strides, 0) < 0 or last >= storage.size:
            raise CheckpointError(f"{path}: tensor {name} reaches outside its storage")
        view = np.lib.stride_tricks.as_strided(
            storage[offset:], shape, [s * storage.itemsize for s in strides], writeable=False
        )
        state[name] = np.ascontiguousarray(view).reshape(shape)
    return state


class _Writer:
    """Appends nodes to a graph; each method returns the name of the tensor it made."""

    def __init__(self, state: Mapping[str, npt.NDArray[Any]]) -> None:
        self.state = state
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = [
            numpy_helper.from_array(np.array(0, np.float32), "zero"),
            numpy_helper.from_array(np.array(6, np.float32), "six"),
        ]

    def node(self, op: str, name: str, inputs: list[str], **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def weight(self, name: str) -> str:
        self.initializers.append(numpy_helper.from_array(self.state[name], name))
        return name

    def conv(
        self, x: str, name: str, size: int, stride: int = 1, groups: int = 1
    ) -> tuple[str, int]:
        """A convolution padded as TensorFlow's SAME; also returns the image size behind it."""
        kernel = self.state[f"{name}.weight"].shape[2]
        out = -(-size // stride)
        total = max((out - 1) * stride + kernel - size, 0)
        before, after = total // 2, total - total // 2
        y = self.node(
            "Conv", name, [x, self.weight(f"{name}.weight")], group=groups,
            kernel_shape=[kernel, kernel], strides=[stride, stride],
            pads=[before, before, after, after],
        )
        return y, out

    def norm(self, x: str, name: str) -> str:
        parts = ("weight", "bias", "running_mean", "running_var")
        weights = [self.weight(f"{name}.{part}") for part in parts]
        return self.node("BatchNormalization", name, [x, *weights], epsilon=BATCH_NORM_EPSILON)

    def relu6(self, x: str) -> str:
        return self.node("Clip", f"{x}.relu6", [x, "zero", "six"])


def build(state: Mapping[str, npt.NDArray[Any]]) -> onnx.ModelProto:
    """The network: `image` float32 [1, 3, 224, 224] -> `logits` float32 [1, 1000].

    The image is RGB, normalised as (x - 127) / 128. Raises KeyError for a tensor that is missing.
    """
    w = _Writer(state)
    x, size = w.conv("image", "_conv_stem", IMAGE_SIZE, stride=2)
    x = w.relu6(w.norm(x, "_bn0"))
    blocks = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("_blocks."))
    for index in range(blocks):
        block = f"_blocks.{index}"
        stride = 2 if index in STRIDE_2_BLOCKS else 1
        shortcut = x
        channels = state[f"{block}._depthwise_conv.weight"].shape[0]
        entering = channels
        if f"{block}._expand_conv.weight" in state:
            entering = state[f"{block}._expand_conv.weight"].shape[1]
            x, _ = w.conv(x, f"{block}._expand_conv", size)
            x = w.relu6(w.norm(x, f"{block}._bn0"))
        x, size = w.conv(x, f"{block}._depthwise_conv", size, stride, channels)
        x = w.relu6(w.norm(x, f"{block}._bn1"))
        x, _ = w.conv(x, f"{block}._project_conv", size)
        x = w.norm(x, f"{block}._bn2")
        if stride == 1 and entering == state[f"{block}._project_conv.weight"].shape[0]:
            x = w.node("Add", f"{block}.add", [x, shortcut])
    x, _ = w.conv(x, "_conv_head", size)
    x = w.relu6(w.norm(x, "_bn1"))
    x = w.node("GlobalAveragePool", "pool", [x])
    x = w.node("Flatten", "flatten", [x], axis=1)
    w.node("Gemm", "logits", [x, w.weight("_fc.weight"), w.weight("_fc.bias")], transB=1)
    classes = len(state["_fc.bias"])
    shape = [1, 3, IMAGE_SIZE, IMAGE_SIZE]
    graph = helper.make_graph(
        w.nodes, "efficientnet-lite0",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, classes])],
        w.initializers,
    )
    opset = helper.make_opsetid("", 17)
    model = helper.make_model(graph, opset_imports=[opset], producer_name="tinyedge-examples")
    model.ir_version = 8
    onnx.checker.check_model(model, full_check=True)
    return model


def write_onnx(pth_path: Path, onnx_path: Path) -> None:
    """Converts the checkpoint at `pth_path`; `onnx_path` is written whole or not at all."""
    write_whole(onnx_path, build(read_checkpoint(pth_path)).SerializeToString())
