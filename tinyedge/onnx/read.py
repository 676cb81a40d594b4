"""Reading a model file: what can be wrong with one, and tensors whose data lie outside of it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import numpy_helper

from ..errors import InputError, ModelError, UnsupportedError

Source = str | os.PathLike[str] | bytes | onnx.ModelProto
Array = npt.NDArray[Any]

LFS = b"version https://git-lfs.github.com/spec/"


def read(source: Source) -> tuple[onnx.ModelProto, Path | None]:
    """The model, checked, and the folder that its external data lie in (None: no folder)."""
    if isinstance(source, onnx.ModelProto):
        _check(source, "the model")
        return source, None
    if not isinstance(source, bytes | str | os.PathLike):
        raise InputError(f"a model is a path, bytes or a ModelProto, not {type(source).__name__}")
    if isinstance(source, bytes):
        what, data, path = "the model", source, None
    else:
        path = Path(source)
        what = f"'{path}'"
        try:
            data = path.read_bytes()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ModelError(f"{what} can't be read: {reason}; check the path") from None
    if not data:
        raise ModelError(f"{what} is empty; get the file again")
    if data.startswith(LFS):
        raise ModelError(
            f"{what} is a Git LFS pointer, not the model itself; fetch it with 'git lfs pull'"
        )
    model = onnx.ModelProto()
    end, needed = _extent(data)
    if needed > len(data) and end:
        raise ModelError(
            f"{what} is truncated: it has {len(data)} bytes, but a part that begins at byte {end} "
            f"needs {needed}; get the file again"
        )
    try:
        model.ParseFromString(data)
    except DecodeError:
        raise ModelError(f"{what} is not an ONNX model; give the path of an .onnx file") from None
    if not model.ir_version and not model.HasField("graph"):
        raise ModelError(f"{what} is not an ONNX model; give the path of an .onnx file")
    if not model.HasField("graph"):
        raise ModelError(f"{what} has no graph; the file is cut off or was written wrongly")
    _check(model, what, data)
    return model, path.parent if path else None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
    return value, len(data) + 1


def _extent(data: bytes) -> tuple[int, int]:
    """Where the last top-level field begins and should end; (0, 0) if not a ModelProto."""
    fields = {f.number: f.message_type is None for f in onnx.ModelProto.DESCRIPTOR.fields}
    at = start = 0
    while at < len(data):
        start = at
        tag, at = _varint(data, at)
        if tag >> 3 not in fields:
            return 0, 0
        if tag & 7 == 0:
            _, at = _varint(data, at)
        elif tag & 7 == 2:
            length, at = _varint(data, at)
            at += length
        else:
            return 0, 0
    return start, at


def _check(model: onnx.ModelProto, what: str, data: bytes | None = None) -> None:
    """Structure, opsets, and every node against its operator's definition. `data`: the file."""
    if not model.opset_import:
        raise ModelError(f"{what} imports no opset; it was written wrongly")
    for entry in model.opset_import:
        newest = onnx.defs.onnx_opset_version()
        if entry.domain in ("", "ai.onnx") and entry.version > newest:
            raise UnsupportedError(
                f"{what} uses opset {entry.version}, and the newest that is known is {newest}; "
                "export it with an older opset or update the onnx package"
            )
    for graph in graphs(model):
        for n in graph.node:
            if not all(isinstance(t, str) for t in (n.op_type, n.domain, n.name, *n.input)):
                raise ModelError(f"{what} has a name that is not text; the file is damaged")
    if any(map(is_external, tensors(model))):
        return  # the checker would look for the files in its own way; `array` checks them
    version = model.ir_version
    if version > onnx.IR_VERSION:
        # a newer format is fine as long as its operators are known
        model.ir_version, data = onnx.IR_VERSION, None
    # a border without a shape: an output's is inferred, an input's is asked for by the importer
    bare = [v.type.tensor_type for graph in graphs(model) for v in (*graph.input, *graph.output)
            if v.type.HasField("tensor_type") and not v.type.tensor_type.HasField("shape")]
    for kind in bare:
        kind.shape.SetInParent()
        data = None
    try:
        onnx.checker.check_model(data if data is not None else model)
    except onnx.checker.ValidationError as error:
        text = str(error).split("\n\n==>")[0].strip().splitlines()
        if re.search("No Op registered|deprecated", str(error)):
            return  # the importer names the node
        raise ModelError(f"{what} is not valid ONNX: {' '.join(text)}") from None
    except ValueError:
        return  # above 2 GB, which the checker can't take
    finally:
        model.ir_version = version
        for kind in bare:
            kind.ClearField("shape")


def is_external(tensor: onnx.TensorProto) -> bool:
    return tensor.data_location == onnx.TensorProto.EXTERNAL


def graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The model's graph and the graphs inside it."""
    todo = [model.graph]
    while todo:
        graph = todo.pop()
        yield graph
        todo.extend(a.g for n in graph.node for a in n.attribute if a.HasField("g"))


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor stored in the model's graphs."""
    for graph in graphs(model):
        yield from graph.initializer
        yield from (a.t for n in graph.node for a in n.attribute if a.HasField("t"))


def array(tensor: onnx.TensorProto, base: Path | None) -> Array:
    """A stored tensor's values, read-only; external data are mapped rather than read."""
    name = f"tensor '{tensor.name}'" if tensor.name else "a constant"
    try:
        kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    except KeyError:
        raise ModelError(f"{name} has the unknown element type {tensor.data_type}") from None
    if is_external(tensor):
        return _external(tensor, kind, base, name)
    try:
        values = numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        raise ModelError(f"{name} does not fit its shape {list(tensor.dims)}: {error}") from None
    values.flags.writeable = False
    return values


def _external(
    tensor: onnx.TensorProto, kind: np.dtype[Any], base: Path | None, name: str
) -> Array:
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")
    if base is None:
        raise ModelError(
            f"{name} lies in the external file '{location}'; give the model as a path, so that "
            "it can be found"
        )
    folder = base.resolve()
    path = (folder / location).resolve()
    if not location or not path.is_relative_to(folder):
        raise ModelError(f"{name}: external file '{location}' is outside the model's folder")
    if not path.is_file():
        raise ModelError(
            f"{name} lies in the external file '{location}', which is missing; put it beside the "
            "model"
        )
    shape = tuple(tensor.dims)
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", math.prod(shape) * kind.itemsize))
    except ValueError:
        raise ModelError(f"{name}: the external offset or length is not a number") from None
    if length != math.prod(shape) * kind.itemsize or offset < 0:
        raise ModelError(f"{name}: {length} external bytes don't fit {kind}{list(shape)}")
    size = path.stat().st_size
    if offset + length > size:
        raise ModelError(
            f"{name} needs bytes {offset} to {offset + length} of '{location}', which has {size}; "
            "get the file again"
        )
    if not length:
        return np.zeros(shape, kind)
    mapped = np.memmap(path, kind, "r", offset, shape)
    return mapped.view(np.ndarray)
