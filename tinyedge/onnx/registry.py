"""The table of ONNX operators, and what an operator's function is given.

An operator is one function in one of this folder's modules::

    @op("Relu", 1, 6, 13, 14)
    def relu(c: Context, x: Node) -> Node:
        return g.maximum(x, g.like(x, 0))

The numbers are the opsets in which the operator's definition changed and which the function covers;
a model's opset selects the definition in force. A function gets the context and the node's inputs
(None where an optional one is absent) and returns a tensor, or one for each output. An attribute
that is present but that the function did not read is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import onnx

from .. import graph as g
from ..dtype import FLOAT16, FLOAT32, INT64, DType, dtype_of
from ..errors import ShapeError, UnsupportedError
from ..graph import Node
from ..shape import Dim, Shape

if TYPE_CHECKING:
    from .importer import Importer, Scope

Array = npt.NDArray[Any]
Value = Node | tuple[Node, ...]
"""What a name stands for: a tensor, or a sequence of tensors."""
Operator = Callable[..., Any]
Key = tuple[str, str]

TABLE: dict[Key, dict[int, Operator]] = {}
"""(domain, operator) -> version -> function."""


def op(name: str, *versions: int, domain: str = "") -> Callable[[Operator], Operator]:
    """Registers a function for an operator's definitions of these opsets."""
    def register(function: Operator) -> Operator:
        for version in versions:
            assert version not in TABLE.setdefault((domain, name), {}), (name, version)
            TABLE[domain, name][version] = function
        return function
    return register


def in_float32(function: Operator) -> Operator:
    """The function with float16 operands widened, for what squares or sums on its way; the result
    is float16 again."""
    @wraps(function)
    def apply(c: Context, x: Node, *more: Any) -> Node:
        if x.dtype is not FLOAT16:
            result: Node = function(c, x, *more)
            return result
        wide = [g.cast(n, FLOAT32) if isinstance(n, Node) and n.dtype is FLOAT16 else n
                for n in (x, *more)]
        return g.cast(function(c, *wide), FLOAT16)
    return apply


def element_type(number: int, where: str) -> DType:
    """The element type with ONNX's number; UnsupportedError beginning with `where` for others."""
    try:
        return dtype_of(onnx.helper.tensor_dtype_to_np_dtype(number))
    except (KeyError, UnsupportedError):
        names = {v: k.lower() for k, v in onnx.TensorProto.DataType.items()}
        kind = names.get(number, str(number))
        raise UnsupportedError(f"{where}: element type {kind} is not supported") from None


class Context:
    """One node of the model on its way in.

    name, op, domain, opset: for messages; `version` is the definition in force. attributes: by
    name, as protos. wanted: for each output whether anything can refer to it.
    """

    def __init__(
        self, importer: Importer, scope: Scope, proto: onnx.NodeProto, name: str, version: int,
        opset: int, attributes: Mapping[str, onnx.AttributeProto],
        defaults: Mapping[str, onnx.AttributeProto],
    ) -> None:
        self.importer, self.scope, self.proto, self.name = importer, scope, proto, name
        self.op, self.domain = proto.op_type, proto.domain
        self.version, self.opset = version, opset
        self.attributes, self.defaults = attributes, defaults
        self.read: set[str] = {"consumed_inputs"}  # a hint of the oldest opsets
        self.wanted = [bool(o) for o in proto.output]

    def __str__(self) -> str:
        kind = f"{self.domain}.{self.op}" if self.domain else self.op
        return f"node '{self.name}' ({kind}, opset {self.opset})"

    def refuse(self, reason: str) -> NoReturn:
        """Raises UnsupportedError for this node."""
        raise UnsupportedError(f"{self}: {reason}")

    def misfit(self, reason: str) -> NoReturn:
        """Raises ShapeError for this node."""
        raise ShapeError(f"{self}: {reason}")

    # attributes

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute's value (int, float, str, list, array, GraphProto), else its default."""
        self.read.add(name)
        found = self.attributes.get(name) or self.defaults.get(name)
        if found is None:
            return default
        value = onnx.helper.get_attribute_value(found)
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        if isinstance(value, onnx.TensorProto):
            return self.importer.array(value)
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in value]
        return value

    def has(self, name: str) -> bool:
        return name in self.attributes

    def ignore(self, *names: str) -> None:
        """Declares attributes that don't matter for inference."""
        self.read.update(names)

    def refuse_unread(self) -> None:
        for name in self.attributes:
            if name not in self.read:
                self.refuse(f"attribute '{name}' is not supported here")

    def wants(self, index: int) -> bool:
        return index < len(self.wanted) and self.wanted[index]

    # values known while importing

    def constant(self, x: Node | None) -> Array | None:
        """x's value if it depends on constants only."""
        return None if x is None else self.importer.constant(x)

    def need(self, x: Node, what: str) -> Array:
        """x's value; UnsupportedError if it is only known at run time."""
        value = self.importer.constant(x)
        if value is None:
            self.refuse(f"{what} is only known at run time; it must be a constant")
        return value

    def ints(self, x: Node, what: str) -> list[int]:
        return [int(v) for v in self.need(x, what).ravel()]

    def dims(self, x: Node, what: str) -> Shape:
        """The dimensions in an integer tensor, which may be symbolic."""
        value = self.importer.known(x)
        if value is None:
            self.refuse(f"{what} is only known at run time; it must follow from the shapes")
        return tuple(value.ravel().tolist())

    def axes(self, x: Node | None, position: int, name: str = "axes") -> list[int] | None:
        """Axes given by an attribute in older opsets and by an input in newer ones."""
        if x is not None:
            return self.ints(x, f"input {position} ({name})")
        given: list[int] | None = self.attr(name)
        return given

    def type_of(self, number: int) -> DType:
        return element_type(number, str(self))


def extent(d: Dim) -> Node:
    """A dimension as an int64 scalar. (A symbol's value is the sum of as many ones.)"""
    if isinstance(d, int):
        return g.const(np.array(d, np.int64))
    return g.reduce("sum", g.full((d,), 1, INT64), [0], keep=False)


def extents(dims: Sequence[Dim]) -> Node:
    """Dimensions as an int64 vector."""
    if all(isinstance(d, int) for d in dims):
        return g.const(np.array(dims, np.int64).reshape(len(dims)))
    return g.concat([g.reshape(extent(d), (1,)) for d in dims], 0)
