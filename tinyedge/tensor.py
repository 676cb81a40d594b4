"""Tensor: a numpy-like array whose operations are recorded in a graph and compiled when a value is
asked for. One of the two beginnings of the pipeline; `tinyedge.onnx` is the other.

A tensor is a node of the tensor IR, whose leaves are constants and arrays. `numpy()`, `item()`,
`tolist()` and whatever else needs numbers compile the operations behind it and run them; a tensor
that has its value forgets how it came about. Arrays are the compiled plan's inputs, so the same
operations on other arrays of these shapes and types run without compiling again; Python scalars
are part of the plan. `tinyedge.jit` gives a function a plan of its own, with the closure's arrays
inside.

Element types are numpy's, so are the results' types (``int32 + float32`` is float64, ``int32 / 2``
too, sums of small integers are int64), and Python scalars are weak: ``float32 + 1.5`` is float32.
Tensors can't be changed; integer division by zero gives an unspecified value; positions in integer
tensors (not in lists or arrays) that lie outside are clamped.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import log, prod
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

import numpy as np

from . import compose
from . import graph as g
from .dtype import BOOL, INT64, UINT64, DType, dtype_of
from .errors import InputError, ShapeError, UnsupportedError
from .graph import Graph, Node
from .shape import broadcast, show, static

if TYPE_CHECKING:
    from .runtime import Model

Array = np.ndarray[Any, np.dtype[Any]]
Axes = int | Sequence[int] | None
Operand = Any
"""A Tensor, a Python scalar, or what numpy makes an array of."""

MAX_MODELS = 64
"""Compiled computations that are kept for tensors outside of `jit`."""

_arrays: WeakKeyDictionary[Node, Array] = WeakKeyDictionary()
"""The values of leaves. An input without one stands for an argument of a `jit` capture."""

_models: OrderedDict[tuple[Node, ...], Model] = OrderedDict()
_lock = Lock()
_serial = 0


class Tensor:
    """A lazy array.

    data: an array (copied), a scalar, a nested list, or another tensor. dtype: what to convert it
    to. InputError for what numpy makes no array of numbers of, UnsupportedError for an element type
    that the tensor IR lacks.
    """

    __slots__ = ("_node", "_value", "__weakref__")
    _node: Node | None
    _value: Array | None

    def __init__(self, data: Operand, dtype: Any = None) -> None:
        self._node = self._value = None
        if isinstance(data, Tensor):
            self._node, self._value = data._node, data._value
            if dtype is not None and data.dtype != np.dtype(dtype):
                self._node, self._value = data.astype(dtype).node, None
        else:
            self._value = _snapshot(data, dtype)

    # what it is

    @property
    def node(self) -> Node:
        """Its place in the graph."""
        if self._node is None:
            assert self._value is not None
            self._node = _leaf(self._value)
        return self._node

    @property
    def shape(self) -> tuple[int, ...]:
        return self._value.shape if self._value is not None else static(self.node.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._value.dtype if self._value is not None else self.node.dtype.numpy

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def T(self) -> Tensor:
        return self.transpose()

    def __repr__(self) -> str:
        kind = "value" if self._value is not None else "lazy"
        return f"<Tensor {self.dtype.name}{show(self.shape)} {kind}>"

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    __hash__ = object.__hash__

    # its value

    def realize(self) -> Tensor:
        """Computes the value now; returns the tensor."""
        realize([self])
        return self

    def numpy(self) -> Array:
        """The value, as an array that can't be written to (copy it to change it)."""
        realize([self])
        assert self._value is not None
        return self._value

    def item(self) -> bool | int | float:
        """The only element, as a Python scalar."""
        if self.size != 1:
            raise ShapeError(f"item() of a tensor with {self.size} elements; it needs exactly one")
        scalar: bool | int | float = self.numpy().item()
        return scalar

    def tolist(self) -> Any:
        """The value as nested lists of Python scalars."""
        return self.numpy().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        value = self.numpy()
        if dtype is not None and np.dtype(dtype) != value.dtype:
            return value.astype(dtype)
        return value.copy() if copy else value

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        made = UFUNCS.get(ufunc)
        if made is None or method != "__call__" or options:
            raise UnsupportedError(f"numpy.{ufunc.__name__} has no counterpart for tensors in this "
                                   "form; use a method of Tensor, or pass x.numpy()")
        return made(*(x if isinstance(x, Tensor) else _tensor(x) for x in inputs[:1]), *inputs[1:])

    def __bool__(self) -> bool:
        return bool(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __index__(self) -> int:
        if self.dtype.kind not in "iu":
            raise InputError(f"a tensor of {self.dtype} can't be an index; convert it to an int")
        return int(self.item())

    # making tensors

    @staticmethod
    def full(shape: int | Sequence[int], value: bool | int | float, dtype: Any = None) -> Tensor:
        """One value everywhere, stored once; the type defaults to the value's."""
        kind = dtype_of(np.asarray(value) if dtype is None else np.dtype(dtype))
        return _of(g.full(_sizes(shape), value, kind))

    @staticmethod
    def zeros(shape: int | Sequence[int], dtype: Any = np.float64) -> Tensor:
        return Tensor.full(shape, 0, dtype)

    @staticmethod
    def ones(shape: int | Sequence[int], dtype: Any = np.float64) -> Tensor:
        return Tensor.full(shape, 1, dtype)

    @staticmethod
    def arange(start: float, stop: float | None = None, step: float = 1,
               dtype: Any = None) -> Tensor:
        """numpy's arange."""
        first, last = (0, start) if stop is None else (start, stop)
        if not step:
            raise InputError("arange: step is 0")
        made: Callable[..., Array] = np.arange
        return Tensor(made(first, last, step, dtype))

    @staticmethod
    def eye(rows: int, columns: int | None = None, dtype: Any = np.float64) -> Tensor:
        """Ones on the diagonal, zeros elsewhere."""
        shape = (rows, rows if columns is None else columns)
        return _of(g.cast(g.eq(g.iota(shape, 0), g.iota(shape, 1)), dtype_of(dtype)))

    @staticmethod
    def where(condition: Operand, a: Operand, b: Operand) -> Tensor:
        """a where the condition holds, else b."""
        return _of(g.where(_tensor(condition).astype(np.bool_).node, *_operands(a, b)))

    @staticmethod
    def concat(tensors: Sequence[Operand], axis: int = 0) -> Tensor:
        """Tensors joined along an axis that they have."""
        if not tensors:
            raise InputError("concat: there are no tensors")
        return _of(g.concat(_operands(*tensors), axis))

    @staticmethod
    def stack(tensors: Sequence[Operand], axis: int = 0) -> Tensor:
        """Tensors of one shape joined along a new axis."""
        if not tensors:
            raise InputError("stack: there are no tensors")
        xs = [_of(x) for x in _operands(*tensors)]
        return Tensor.concat([x.unsqueeze(axis) for x in xs], axis)

    @staticmethod
    def einsum(subscripts: str, *tensors: Operand) -> Tensor:
        """numpy's einsum, without an ellipsis."""
        return _of(compose.einsum(subscripts, *_operands(*tensors)))

    # arithmetic

    def __add__(self, other: Operand) -> Tensor:
        return _binary(g.add, self, other, boolean=g.or_)

    def __radd__(self, other: Operand) -> Tensor:
        return _binary(g.add, other, self, boolean=g.or_)

    def __sub__(self, other: Operand) -> Tensor:
        return _binary(g.sub, self, other)

    def __rsub__(self, other: Operand) -> Tensor:
        return _binary(g.sub, other, self)

    def __mul__(self, other: Operand) -> Tensor:
        return _binary(g.mul, self, other, boolean=g.and_)

    def __rmul__(self, other: Operand) -> Tensor:
        return _binary(g.mul, other, self, boolean=g.and_)

    def __truediv__(self, other: Operand) -> Tensor:
        return _binary(g.div, self, other, least=np.float64)

    def __rtruediv__(self, other: Operand) -> Tensor:
        return _binary(g.div, other, self, least=np.float64)

    def __floordiv__(self, other: Operand) -> Tensor:
        return _binary(compose.floor_div, self, other)

    def __rfloordiv__(self, other: Operand) -> Tensor:
        return _binary(compose.floor_div, other, self)

    def __mod__(self, other: Operand) -> Tensor:
        return _binary(g.mod, self, other)

    def __rmod__(self, other: Operand) -> Tensor:
        return _binary(g.mod, other, self)

    def __pow__(self, other: Operand) -> Tensor:
        if isinstance(other, (int, float)) and not isinstance(other, bool):
            if self.dtype.kind == "f" and other == 0.5:
                return self.sqrt()
            whole = int(other) if abs(other) <= 4 and int(other) == other else None
            if self.dtype.kind == "f" and whole is not None:
                out = _of(compose.power(self.node, abs(whole)))
                return 1 / out if whole < 0 else out
            if self.dtype.kind in "iu" and isinstance(other, int):
                if other < 0:
                    raise InputError("integers to negative powers are no integers; use astype")
                return _of(compose.power(self.node, other))
        return _power(self, other)

    def __rpow__(self, other: Operand) -> Tensor:
        return _power(other, self)

    def __matmul__(self, other: Operand) -> Tensor:
        return self.matmul(other)

    def __rmatmul__(self, other: Operand) -> Tensor:
        return _of(compose.matmul(*_operands(other, self)))

    def matmul(self, other: Operand) -> Tensor:
        """numpy's matmul."""
        return _of(compose.matmul(*_operands(self, other)))

    def __neg__(self) -> Tensor:
        if self.dtype == np.bool_:
            raise UnsupportedError("a boolean tensor has no negative; use ~")
        return _of(g.neg(self.node))

    def __pos__(self) -> Tensor:
        return self

    def __abs__(self) -> Tensor:
        return self if self.dtype.kind in "bu" else _of(g.abs_(self.node))

    abs = __abs__

    # comparisons and bits

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return _binary(g.eq, self, other)

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return _binary(g.ne, self, other)

    def __lt__(self, other: Operand) -> Tensor:
        return _binary(g.lt, self, other)

    def __le__(self, other: Operand) -> Tensor:
        return _binary(g.le, self, other)

    def __gt__(self, other: Operand) -> Tensor:
        return _binary(g.lt, other, self)

    def __ge__(self, other: Operand) -> Tensor:
        return _binary(g.le, other, self)

    def __and__(self, other: Operand) -> Tensor:
        return _binary(g.and_, self, other)

    def __or__(self, other: Operand) -> Tensor:
        return _binary(g.or_, self, other)

    def __xor__(self, other: Operand) -> Tensor:
        return _binary(g.xor, self, other)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __invert__(self) -> Tensor:
        return _of(g.not_(self.node))

    def __lshift__(self, other: Operand) -> Tensor:
        return _binary(g.shl, self, other)

    def __rshift__(self, other: Operand) -> Tensor:
        return _binary(g.shr, self, other)

    def __rlshift__(self, other: Operand) -> Tensor:
        return _binary(g.shl, other, self)

    def __rrshift__(self, other: Operand) -> Tensor:
        return _binary(g.shr, other, self)

    def maximum(self, other: Operand) -> Tensor:
        return _binary(g.maximum, self, other, boolean=g.or_)

    def minimum(self, other: Operand) -> Tensor:
        return _binary(g.minimum, self, other, boolean=g.and_)

    def clip(self, low: Operand = None, high: Operand = None) -> Tensor:
        """Elements below `low` become low, those above `high` high."""
        out = self if low is None else self.maximum(low)
        return out if high is None else out.minimum(high)

    # functions of one element; integers become floats where numpy makes them that

    def exp(self) -> Tensor:
        return _of(g.exp(_float(self)))

    def exp2(self) -> Tensor:
        x = _float(self)
        return _of(g.exp(g.mul(x, g.like(x, log(2)))))

    def log(self) -> Tensor:
        return _of(g.log(_float(self)))

    def log2(self) -> Tensor:
        x = _float(self)
        return _of(g.mul(g.log(x), g.like(x, 1 / log(2))))

    def log10(self) -> Tensor:
        x = _float(self)
        return _of(g.mul(g.log(x), g.like(x, 1 / log(10))))

    def sqrt(self) -> Tensor:
        return _of(g.sqrt(_float(self)))

    def rsqrt(self) -> Tensor:
        """1 / sqrt(x)"""
        x = _float(self)
        return _of(g.div(g.like(x, 1), g.sqrt(x)))

    def reciprocal(self) -> Tensor:
        """1 / x, in floating point."""
        x = _float(self)
        return _of(g.div(g.like(x, 1), x))

    def square(self) -> Tensor:
        return self * self

    def sin(self) -> Tensor:
        return _of(g.sin(_float(self)))

    def cos(self) -> Tensor:
        return _of(g.cos(_float(self)))

    def tan(self) -> Tensor:
        x = _float(self)
        return _of(g.div(g.sin(x), g.cos(x)))

    def tanh(self) -> Tensor:
        return _of(g.tanh(_float(self)))

    def erf(self) -> Tensor:
        return _of(g.erf(_float(self)))

    def floor(self) -> Tensor:
        return self._rounded(g.floor)

    def ceil(self) -> Tensor:
        return self._rounded(g.ceil)

    def trunc(self) -> Tensor:
        return self._rounded(g.trunc)

    def round(self) -> Tensor:
        """To the nearest integer, halves to the even one."""
        return self._rounded(g.round_)

    def _rounded(self, f: Callable[[Node], Node]) -> Tensor:
        return _of(f(self.node)) if self.dtype.kind == "f" else self

    def sign(self) -> Tensor:
        return _of(compose.sign(self.node))

    def isnan(self) -> Tensor:
        if self.dtype.kind != "f":
            return Tensor.full(self.shape, False)
        return _of(g.isnan(self.node))

    def isinf(self) -> Tensor:
        return abs(self) == np.inf if self.dtype.kind == "f" else Tensor.full(self.shape, False)

    def isfinite(self) -> Tensor:
        return abs(self) < np.inf if self.dtype.kind == "f" else Tensor.full(self.shape, True)

    def logical_not(self) -> Tensor:
        return ~self.astype(np.bool_)

    def relu(self) -> Tensor:
        return _of(compose.relu(self.node))

    def leaky_relu(self, slope: float = 0.01) -> Tensor:
        x = _float(self)
        return _of(g.where(g.lt(x, g.like(x, 0)), g.mul(x, g.like(x, slope)), x))

    def sigmoid(self) -> Tensor:
        return _of(compose.sigmoid(_float(self)))

    def silu(self) -> Tensor:
        """x * sigmoid(x)"""
        x = _float(self)
        return _of(g.mul(x, compose.sigmoid(x)))

    def gelu(self, approximate: bool = False) -> Tensor:
        """x times the normal distribution's cumulative probability (`approximate`: by tanh)."""
        return _of(compose.gelu(_float(self), approximate))

    def softplus(self) -> Tensor:
        """log(1 + exp(x))"""
        return _of(compose.softplus(_float(self)))

    def astype(self, dtype: Any) -> Tensor:
        """The elements in another type; floats are cut off towards zero to become integers."""
        kind = dtype_of(dtype)
        return self if kind.numpy == self.dtype else _of(g.cast(self.node, kind))

    cast = astype

    # reductions; axis: None for all, one axis, or several

    def sum(self, axis: Axes = None, keepdims: bool = False, dtype: Any = None) -> Tensor:
        return self._total("sum", axis, keepdims, dtype)

    def prod(self, axis: Axes = None, keepdims: bool = False, dtype: Any = None) -> Tensor:
        return self._total("prod", axis, keepdims, dtype)

    def _total(self, kind: str, axis: Axes, keep: bool, dtype: Any) -> Tensor:
        x = self.node
        if dtype is not None:
            x = g.cast(x, dtype_of(dtype))
        elif not x.dtype.is_float:
            x = g.cast(x, UINT64 if x.dtype.kind == "u" else INT64)
        axes = self._axes(axis)
        out = g.reduce(kind, x, axes, keep)
        if any(self.shape[a] == 0 for a in axes):
            return _of(g.full(out.shape, 0 if kind == "sum" else 1, out.dtype))
        return _of(out)

    def max(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        return self._extreme("max", axis, keepdims)

    def min(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        return self._extreme("min", axis, keepdims)

    def any(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        return _of(g.reduce("max", self.astype(np.bool_).node, self._axes(axis), keepdims))

    def all(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        return _of(g.reduce("min", self.astype(np.bool_).node, self._axes(axis), keepdims))

    def _extreme(self, kind: str, axis: Axes, keep: bool) -> Tensor:
        axes = self._axes(axis)
        if any(self.shape[a] == 0 for a in axes):
            raise ShapeError(f"{kind}: there is nothing to choose from in shape {show(self.shape)}")
        return _of(g.reduce(kind, self.node, axes, keep))

    def mean(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        return self._wide(lambda x: compose.mean(x, self._axes(axis), keepdims))

    def var(self, axis: Axes = None, keepdims: bool = False, ddof: int = 0) -> Tensor:
        """The mean square deviation; `ddof` is taken from the count."""
        return self._wide(lambda x: compose.variance(x, self._axes(axis), keepdims, ddof))

    def std(self, axis: Axes = None, keepdims: bool = False, ddof: int = 0) -> Tensor:
        """The square root of `var`."""
        return self.var(axis, keepdims, ddof).sqrt()

    def _wide(self, f: Callable[[Node], Node]) -> Tensor:
        """f made in float32 for float16, in float64 for integers."""
        if self.dtype.kind != "f":
            return _of(f(self.astype(np.float64).node))
        if self.dtype == np.float16:
            return _of(f(self.astype(np.float32).node)).astype(np.float16)
        return _of(f(self.node))

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """int64 position of the first largest element (or nan); of the flattened tensor if axis is
        None."""
        return self._best("max", axis, keepdims)

    def argmin(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        return self._best("min", axis, keepdims)

    def _best(self, kind: str, axis: int | None, keep: bool) -> Tensor:
        x = self.flatten() if axis is None else self
        (at,) = x._axes(0 if axis is None else axis)
        if not x.shape[at]:
            raise ShapeError(f"arg{kind}: there is nothing to choose from in {show(self.shape)}")
        out = _of(compose.argbest(x.node, at, kind))
        if axis is None:
            return out.reshape((1,) * self.ndim if keep else ())
        return out if keep else out.squeeze(at)

    def cumsum(self, axis: int | None = None) -> Tensor:
        """Running sums along an axis; of the flattened tensor if it is None."""
        x = self.flatten() if axis is None else self
        n = x.node
        if not n.dtype.is_float:
            n = g.cast(n, UINT64 if n.dtype.kind == "u" else INT64)
        return _of(compose.cumsum(n, x._axes(0 if axis is None else axis)[0]))

    def softmax(self, axis: int = -1) -> Tensor:
        return _of(compose.softmax(_float(self), self._axes(axis)[0]))

    def log_softmax(self, axis: int = -1) -> Tensor:
        return _of(compose.log_softmax(_float(self), self._axes(axis)[0]))

    def layernorm(self, weight: Operand = None, bias: Operand = None, axis: Axes = -1,
                  epsilon: float = 1e-5) -> Tensor:
        """Mean 0 and variance 1 along the axes, then times weight plus bias (which broadcast)."""
        out = _of(compose.layernorm(_float(self), self._axes(axis), epsilon))
        out = out if weight is None else out * weight
        return out if bias is None else out + bias

    def _axes(self, axis: Axes) -> tuple[int, ...]:
        if axis is None:
            return tuple(range(self.ndim))
        chosen = axis if isinstance(axis, Sequence) else (axis,)
        out = tuple(g.normal_axis(operator.index(a), self.ndim) for a in chosen)
        if len(set(out)) != len(out):
            raise ShapeError(f"axis {axis} names a dimension twice")
        return out if self.ndim else ()

    # images: [N, C, H, W]

    def conv2d(self, weight: Operand, bias: Operand = None, stride: Axes = 1, padding: Any = 0,
               dilation: Axes = 1, groups: int = 1) -> Tensor:
        """The cross-correlation with weight [M, C/groups, kh, kw], plus bias [M].

        padding: zeros at every edge, one number a dimension, or (before, after) for each.
        """
        x, w = _operands(self._image("conv2d"), weight)
        if w.rank != 4:
            raise ShapeError(f"conv2d: weights must have 4 dimensions, not {show(w.shape)}")
        x = compose.pad_image(x, _padding(padding))
        out = _of(compose.conv(x, w, _pair(stride), _pair(dilation), groups))
        return out if bias is None else out + _tensor(bias).reshape(-1, 1, 1)

    def max_pool2d(self, kernel: Axes, stride: Axes = None, padding: Any = 0,
                   dilation: Axes = 1) -> Tensor:
        """Largest elements of windows; the stride defaults to the kernel."""
        x = self._image("max_pool2d").node
        least = -np.inf if x.dtype.is_float else x.dtype.limits[0]
        step = _pair(kernel if stride is None else stride)
        x = compose.pad_image(x, _padding(padding), least)
        return _of(compose.max_pool(x, _pair(kernel), step, _pair(dilation)))

    def avg_pool2d(self, kernel: Axes, stride: Axes = None, padding: Any = 0,
                   count_include_pad: bool = True) -> Tensor:
        """Means of windows; the stride defaults to the kernel."""
        x = _float(self._image("avg_pool2d"))
        step = _pair(kernel if stride is None else stride)
        return _of(compose.average_pool(x, _pair(kernel), step, _padding(padding),
                                        count_include_pad))

    def _image(self, what: str) -> Tensor:
        if self.ndim != 4:
            raise ShapeError(f"{what}: an image has 4 dimensions [N,C,H,W], not {show(self.shape)}")
        return self

    # views

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements in another shape, in which one size may be -1."""
        sizes = list(_sizes(shape[0] if len(shape) == 1 else shape, open_=True))
        if sizes.count(-1) == 1:
            known = prod(d for d in sizes if d != -1)
            if not known or self.size % known:
                raise ShapeError(f"reshape: {show(self.shape)} does not divide into {show(sizes)}")
            sizes[sizes.index(-1)] = self.size // known
        if min(sizes, default=0) < 0:
            raise ShapeError(f"reshape: {show(sizes)} is not a shape")
        return _of(g.reshape(self.node, sizes))

    def permute(self, *order: Any) -> Tensor:
        """Dimension i of the result is dimension order[i]."""
        return _of(g.permute(self.node, _sizes(order[0] if len(order) == 1 else order, open_=True)))

    def transpose(self, *order: Any) -> Tensor:
        """`permute`; without an order the dimensions are reversed."""
        if not order or order == (None,):
            return _of(g.permute(self.node, range(self.ndim)[::-1]))
        return self.permute(*order)

    def swapaxes(self, a: int, b: int) -> Tensor:
        order = list(range(self.ndim))
        (i,), (j,) = self._axes(a), self._axes(b)
        order[i], order[j] = order[j], order[i]
        return _of(g.permute(self.node, order))

    def moveaxis(self, source: int, target: int) -> Tensor:
        (i,), (j,) = self._axes(source), self._axes(target)
        order = [k for k in range(self.ndim) if k != i]
        order.insert(j, i)
        return _of(g.permute(self.node, order))

    def broadcast_to(self, *shape: Any) -> Tensor:
        """numpy's broadcast_to."""
        return _of(g.expand(self.node, _sizes(shape[0] if len(shape) == 1 else shape)))

    def expand(self, *shape: Any) -> Tensor:
        """`broadcast_to` in which -1 keeps a size."""
        sizes = _sizes(shape[0] if len(shape) == 1 else shape, open_=True)
        have = (1,) * (len(sizes) - self.ndim) + self.shape
        return self.broadcast_to([h if d == -1 else d for d, h in zip(sizes, have)])

    def squeeze(self, axis: Axes = None) -> Tensor:
        """Without the given dimensions of size 1, or all of them."""
        axes = self._axes(axis) if axis is not None else \
            tuple(i for i, d in enumerate(self.shape) if d == 1)
        if any(self.shape[a] != 1 for a in axes):
            raise ShapeError(f"squeeze: axis {axis} of {show(self.shape)} is not of size 1")
        return self.reshape([d for i, d in enumerate(self.shape) if i not in axes])

    def unsqueeze(self, axis: int) -> Tensor:
        """With a new dimension of size 1 there."""
        at = g.normal_axis(axis, self.ndim + 1)
        return self.reshape([*self.shape[:at], 1, *self.shape[at:]])

    def flatten(self, start: int = 0, end: int = -1) -> Tensor:
        """Dimensions start..end joined to one."""
        if not self.ndim:
            return self.reshape(1)
        (a,), (b,) = self._axes(start), self._axes(end)
        return self.reshape([*self.shape[:a], prod(self.shape[a:b + 1]), *self.shape[b + 1:]])

    def ravel(self) -> Tensor:
        return self.reshape(-1) if self.size else self.reshape(0)

    def flip(self, axis: Axes = None) -> Tensor:
        """In reverse order along the axes."""
        axes = self._axes(axis)
        return self[tuple(slice(None, None, -1 if i in axes else 1) for i in range(self.ndim))]

    def roll(self, shift: int | Sequence[int], axis: Axes = None) -> Tensor:
        """Moved along the axes, what leaves at one end coming in at the other."""
        if axis is None:
            return self.flatten().roll(shift, 0).reshape(self.shape)
        axes = self._axes(axis)
        shifts = shift if isinstance(shift, Sequence) else [shift] * len(axes)
        if len(shifts) != len(axes):
            raise ShapeError(f"roll: {len(shifts)} shifts for {len(axes)} axes")
        x = self.node
        for s, a in zip(shifts, axes):
            size = self.shape[a]
            first = -s % size if size else 0
            if first:
                parts = [g.narrow(x, a, first, size - first), g.narrow(x, a, 0, first)]
                x = g.concat(parts, a)
        return _of(x)

    def pad(self, widths: Any, value: bool | int | float = 0, mode: str = "constant") -> Tensor:
        """numpy's pad: widths are one number, (before, after), or a pair a dimension.

        mode: "constant" (with `value`), "edge", "reflect", "symmetric" or "wrap".
        """
        try:
            pairs = np.broadcast_to(np.asarray(widths, np.int64), (self.ndim, 2)).tolist()
        except ValueError:
            raise ShapeError(f"pad: widths {widths} do not fit {self.ndim} dimensions") from None
        if min((p for pair in pairs for p in pair), default=0) < 0:
            raise InputError(f"pad: widths {widths} are negative; slice instead")
        if mode == "constant":
            return _of(g.pad(self.node, [a for a, _ in pairs], [b for _, b in pairs], value))
        if mode not in ("edge", "reflect", "symmetric", "wrap"):
            raise InputError(f"pad: mode '{mode}' is not known; use constant, edge, reflect, "
                             "symmetric or wrap")
        x = self.node
        for axis, (pair, size) in enumerate(zip(pairs, self.shape)):
            if any(pair):
                places: Any = np.pad(np.arange(size), pair, mode=mode)  # type: ignore[call-overload]
                x = g.gather(x, [g.const(places)], axis)
        return _of(x)

    def repeat(self, count: int, axis: int | None = None) -> Tensor:
        """Every element `count` times in a row."""
        x = self.flatten() if axis is None else self
        (at,) = x._axes(0 if axis is None else axis)
        wide = [*x.shape[:at + 1], count, *x.shape[at + 1:]]
        out = x.unsqueeze(at + 1).broadcast_to(wide)
        return out.reshape([*x.shape[:at], x.shape[at] * count, *x.shape[at + 1:]])

    def tile(self, repeats: int | Sequence[int]) -> Tensor:
        """The whole tensor several times along each dimension."""
        reps = list(_sizes(repeats))
        shape = (1,) * (len(reps) - self.ndim) + self.shape
        reps = [1] * (len(shape) - len(reps)) + reps
        paired = [v for r, d in zip(reps, shape) for v in (r, d)]
        out = self.reshape([v for d in shape for v in (1, d)]).broadcast_to(paired)
        return out.reshape([r * d for r, d in zip(reps, shape)])

    def split(self, sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
        """numpy's split: that many equal parts, or cut at these positions."""
        (at,) = self._axes(axis)
        size = self.shape[at]
        if isinstance(sections, int):
            if sections < 1 or size % sections:
                raise ShapeError(f"split: {size} does not divide into {sections} equal parts")
            cuts = list(range(0, size + 1, max(size // sections, 1)))
            cuts = cuts if size else [0] * (sections + 1)
        else:
            cuts = [0, *(slice(c).indices(size)[1] for c in sections), size]
        return [_of(g.narrow(self.node, at, a, max(b - a, 0))) for a, b in zip(cuts, cuts[1:])]

    # places

    def __getitem__(self, key: Any) -> Tensor:
        """numpy's indexing by integers, slices, None, ``...`` and integer arrays."""
        items = list(key) if isinstance(key, tuple) else [key]
        arrays = [i for i, k in enumerate(items) if _is_array(k)]
        taken = sum(k is not None and k is not Ellipsis for k in items)
        if sum(k is Ellipsis for k in items) > 1 or taken > self.ndim:
            raise ShapeError(f"index {key} does not fit {self.ndim} dimensions")
        if not any(k is Ellipsis for k in items):
            items.append(Ellipsis)
        dots = next(i for i, k in enumerate(items) if k is Ellipsis)
        items[dots:dots + 1] = [slice(None)] * (self.ndim - taken)
        begin, step, count, shape = [], [], [], []
        places: list[tuple[int, Any]] = []  # dimension of the view, index array
        apart = False
        axis = 0
        for item in items:
            if item is None:
                shape.append(1)
                continue
            size = self.shape[axis]
            if isinstance(item, slice):
                first, s, n = _range(item, size)
                shape.append(n)
            elif _is_array(item) or arrays:
                # beside index arrays a number is one of them, the same everywhere
                apart |= bool(places) and places[-1][0] != len(shape) - 1
                places.append((len(shape), item))
                first, s, n = 0, 1, size
                shape.append(n)
            else:
                first, s, n = _position(item, size, axis), 1, 1
            begin.append(first)
            step.append(s)
            count.append(n)
            axis += 1
        x = g.reshape(g.slice_(self.node, begin, step, count), shape)
        return self._gathered(x, places, apart) if places else _of(x)

    def _gathered(self, x: Node, places: list[tuple[int, Any]], apart: bool) -> Tensor:
        """x indexed by arrays; their dimensions come first if they don't stand together."""
        nodes = [_places(k, static(x.shape)[axis], axis) for axis, k in places]
        axes = [axis for axis, _ in places]
        first = axes[0]
        if apart:
            x = g.permute(x, [*axes, *(i for i in range(x.rank) if i not in axes)])
            first = 0
        shape = broadcast(*(n.shape for n in nodes))
        return _of(g.gather(x, [g.expand(n, shape) for n in nodes], first))

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise InputError("a tensor can't be changed in place; use Tensor.where, or change a numpy "
                         "array and make a tensor of it")

    def take(self, indices: Operand, axis: int | None = None) -> Tensor:
        """The slices at these positions along an axis (of the flattened tensor if it is None)."""
        if axis is None:
            return self.flatten().take(indices, 0)
        at = _places(indices, self.shape[self._axes(axis)[0]], self._axes(axis)[0])
        return _of(g.gather(self.node, [at], self._axes(axis)[0]))

    def take_along_axis(self, indices: Operand, axis: int) -> Tensor:
        """numpy's take_along_axis."""
        (a,) = self._axes(axis)
        at = _places(indices, self.shape[a], a)
        shape = broadcast(*(tuple(1 if i == a else d for i, d in enumerate(static(s)))
                            for s in (self.node.shape, at.shape)))
        full = [at.shape[a] if i == a else d for i, d in enumerate(shape)]
        whole = [self.shape[a] if i == a else d for i, d in enumerate(shape)]
        return _of(compose.take_along(g.expand(self.node, whole), g.expand(at, full), a))

    # order

    def argsort(self, axis: int = -1, descending: bool = False) -> Tensor:
        """int64 positions that sort the tensor; equal elements keep their order."""
        return _of(g.sort(self.node, self._axes(axis)[0], descending))

    def sort(self, axis: int = -1, descending: bool = False) -> Tensor:
        (a,) = self._axes(axis)
        return _of(compose.take_along(self.node, g.sort(self.node, a, descending), a))

    def topk(self, count: int, axis: int = -1, largest: bool = True) -> tuple[Tensor, Tensor]:
        """The largest (or smallest) elements in order, and their int64 positions."""
        (a,) = self._axes(axis)
        if not 0 <= count <= self.shape[a]:
            raise ShapeError(f"topk: {count} of {self.shape[a]} elements")
        at = g.narrow(g.sort(self.node, a, largest), a, 0, count)
        return _of(compose.take_along(self.node, at, a)), _of(at)

    def tril(self, diagonal: int = 0) -> Tensor:
        """Zeros above the diagonal of the last two dimensions."""
        return self._triangle(lambda row, column: g.le(column, row), diagonal)

    def triu(self, diagonal: int = 0) -> Tensor:
        """Zeros below the diagonal of the last two dimensions."""
        return self._triangle(lambda row, column: g.le(row, column), diagonal)

    def _triangle(self, keeps: Callable[[Node, Node], Node], diagonal: int) -> Tensor:
        if self.ndim < 2:
            raise ShapeError(f"a triangle needs 2 dimensions, not {show(self.shape)}")
        square = self.shape[-2:]
        row, column = g.iota(square, 0), g.iota(square, 1)
        return Tensor.where(_of(keeps(g.add(row, g.const(np.int64(diagonal))), column)), self,
                            Tensor.full((), 0, self.dtype))


# from values to nodes

def _of(n: Node) -> Tensor:
    x = Tensor.__new__(Tensor)
    x._node, x._value = n, None
    return x


def _tensor(x: Operand) -> Tensor:
    return x if isinstance(x, Tensor) else Tensor(x)


def _snapshot(data: Operand, dtype: Any) -> Array:
    """A read-only copy as an array in native byte order and C order."""
    if isinstance(data, np.ma.MaskedArray):
        raise InputError("a masked array can't be a tensor; fill it first (data.filled(...))")
    try:
        array = np.asarray(data) if dtype is None else np.asarray(data, dtype)
    except (TypeError, ValueError) as error:
        raise InputError(f"{type(data).__name__} can't be a tensor: {error}") from None
    array = np.array(array, dtype_of(array).numpy, order="C", copy=True)
    array.flags.writeable = False
    return array


def wrap(array: Array) -> Tensor:
    """A tensor of an array that nobody else will change."""
    array.flags.writeable = False
    x = Tensor.__new__(Tensor)
    x._node, x._value = None, array
    return x


def _leaf(array: Array) -> Node:
    global _serial
    if not array.ndim:
        return g.const(array)
    with _lock:
        _serial += 1
        name = f"array{_serial}"
    n = g.node("input", (), array.shape, dtype_of(array), name=name)
    _arrays[n] = array
    return n


def _weak(x: Operand) -> bool:
    return isinstance(x, (bool, int, float)) and not isinstance(x, np.generic)


def _operands(*xs: Operand, least: Any = None) -> list[Node]:
    """Nodes of one element type, by numpy's promotion; `least` is the least type of integers."""
    strong = [x if _weak(x) else _tensor(x) for x in xs]
    try:
        kind = np.result_type(*(x.dtype if isinstance(x, Tensor) else x for x in strong))
        if least is not None and kind.kind != "f":
            kind = np.result_type(kind, least)
        t = dtype_of(kind)
        return [g.cast(x.node, t) if isinstance(x, Tensor) else g.const(np.array(x, t.numpy))
                for x in strong]
    except OverflowError:
        large = [x for x in strong if isinstance(x, int)]
        raise InputError(f"a number of {large} does not fit {kind.name}; convert the tensor first "
                         "(astype)") from None


def _binary(
    f: Callable[[Node, Node], Node], a: Operand, b: Operand, least: Any = None,
    boolean: Callable[[Node, Node], Node] | None = None,
) -> Tensor:
    x, y = _operands(a, b, least=least)
    if x.dtype is BOOL and boolean is not None:
        f = boolean
    elif x.dtype is BOOL and f in (g.sub, g.mod, compose.floor_div):
        raise UnsupportedError("boolean tensors have no difference or quotient; use ^, or astype")
    return _of(f(x, y))


def _power(a: Operand, b: Operand) -> Tensor:
    x, y = _operands(a, b)
    if not x.dtype.is_float:
        raise UnsupportedError("an integer tensor has powers of constant Python ints only; convert "
                               "it to a float type (astype)")
    return _of(g.pow_(x, y))


def _float(x: Tensor) -> Node:
    """x in the float type that numpy gives functions of it."""
    return g.cast(x.node, dtype_of(np.result_type(x.dtype, np.float16)))


def _sizes(shape: Any, open_: bool = False) -> tuple[int, ...]:
    """A shape as ints; `open_` allows negative ones."""
    try:
        out = tuple(operator.index(d) for d in (
            shape if isinstance(shape, (Sequence, np.ndarray)) else (shape,)))
    except TypeError:
        raise InputError(f"{shape!r} is not a shape; use ints") from None
    if not open_ and min(out, default=0) < 0:
        raise ShapeError(f"{show(out)} is not a shape; sizes are not negative")
    return out


def _pair(x: Axes) -> tuple[int, int]:
    out = (x, x) if isinstance(x, int) else tuple(x or ())
    if len(out) != 2:
        raise ShapeError(f"{x} is not one number or two, for height and width")
    return out


def _padding(x: Any) -> list[tuple[int, int]]:
    pairs = [(p, p) if isinstance(p, int) else tuple(p) for p in ([x, x] if isinstance(x, int)
                                                                  else x)]
    if len(pairs) != 2 or any(len(p) != 2 for p in pairs):
        raise ShapeError(f"padding {x} is not one number, two, or (before, after) for both")
    return pairs


# indices

def _is_array(k: Any) -> bool:
    return isinstance(k, (list, np.ndarray)) or isinstance(k, Tensor)


def _position(k: Any, size: int, axis: int) -> int:
    if isinstance(k, (bool, np.bool_)):
        raise UnsupportedError("a boolean can't be an index; the result's shape would depend on it")
    try:
        at = operator.index(k)
    except TypeError:
        raise InputError(f"{k!r} is not an index; use ints, slices, None, ... or integer "
                         "arrays") from None
    if not -size <= at < size:
        raise InputError(f"index {at} is out of range for dimension {axis} of size {size}")
    return at % size


def _range(k: slice, size: int) -> tuple[int, int, int]:
    """(first, step, count) of a slice."""
    if any(isinstance(v, Tensor) and traced([v.node]) for v in (k.start, k.stop, k.step)):
        raise UnsupportedError("a slice's bounds must be numbers; a traced tensor's are not known")
    try:
        indices = range(*k.indices(size))
    except (TypeError, ValueError) as error:
        raise InputError(f"{k} is not a usable slice: {error}") from None
    return (indices[0], k.indices(size)[2], len(indices)) if indices else (0, 1, 0)


def _places(k: Any, size: int, axis: int) -> Node:
    """An index array as int64; positions that are known must be inside."""
    if not isinstance(k, Tensor):
        array = np.asarray(k)
        if not array.size:
            array = array.astype(np.int64)
        if array.dtype.kind in "iu" and array.size and not \
                -size <= array.min() <= array.max() < size:
            raise InputError(f"an index in {array.min()}..{array.max()} is out of range for "
                             f"dimension {axis} of size {size}")
        k = Tensor(array)
    if k.dtype == np.bool_:
        raise UnsupportedError("boolean masks can't be indices, as the result's shape would depend "
                               "on their values; use Tensor.where")
    if k.dtype.kind not in "iu":
        raise InputError(f"indices are {k.dtype}; they must be integers")
    node: Node = g.cast(k.node, INT64)
    return node


UFUNCS: Mapping[Any, Callable[..., Tensor]] = {
    np.add: operator.add, np.subtract: operator.sub, np.multiply: operator.mul,
    np.divide: operator.truediv, np.floor_divide: operator.floordiv, np.mod: operator.mod,
    np.power: operator.pow, np.matmul: operator.matmul, np.negative: operator.neg,
    np.absolute: operator.abs, np.equal: operator.eq, np.not_equal: operator.ne,
    np.less: operator.lt, np.less_equal: operator.le, np.greater: operator.gt,
    np.greater_equal: operator.ge, np.bitwise_and: operator.and_, np.bitwise_or: operator.or_,
    np.bitwise_xor: operator.xor, np.invert: operator.invert, np.left_shift: operator.lshift,
    np.right_shift: operator.rshift, np.maximum: Tensor.maximum, np.minimum: Tensor.minimum,
    np.exp: Tensor.exp, np.exp2: Tensor.exp2, np.log: Tensor.log, np.log2: Tensor.log2,
    np.log10: Tensor.log10, np.sqrt: Tensor.sqrt, np.square: Tensor.square, np.sin: Tensor.sin,
    np.cos: Tensor.cos, np.tan: Tensor.tan, np.tanh: Tensor.tanh, np.floor: Tensor.floor,
    np.ceil: Tensor.ceil, np.trunc: Tensor.trunc, np.rint: Tensor.round, np.sign: Tensor.sign,
    np.isnan: Tensor.isnan, np.isinf: Tensor.isinf, np.isfinite: Tensor.isfinite,
    np.logical_not: Tensor.logical_not,
}
"""numpy's functions that tensors answer to, so that ``np.exp(x)`` stays lazy."""


# from nodes to values

def traced(roots: Sequence[Node], known: Collection[Node] = ()) -> Node | None:
    """An argument of a `jit` capture, not one of `known`, on which the nodes depend, if any."""
    return next((n for n in g.walk(roots)
                 if n.op == "input" and n not in _arrays and n not in known), None)


def values(roots: Sequence[Node]) -> dict[Node, Array]:
    """The arrays that the nodes depend on."""
    return {n: _arrays[n] for n in g.walk(roots) if n.op == "input" and n in _arrays}


def substitute(roots: Sequence[Node], new: Mapping[Node, Node]) -> list[Node]:
    """The nodes with some leaves replaced by others of the same shape and type."""
    memo = dict(new)
    for n in g.walk(roots):
        if n not in memo:
            inputs = [memo[i] for i in n.inputs]
            same = all(a is b for a, b in zip(inputs, n.inputs))
            memo[n] = n if same else g.node(n.op, inputs, n.shape, n.dtype, n.source,
                                            **dict(n.attrs))
    return [memo[r] for r in roots]


def realize(tensors: Sequence[Tensor]) -> None:
    """Computes several tensors together."""
    todo = [x for x in tensors if x._value is None]
    for x in todo:
        if x.node.op == "const":
            x._value = x.node.value
        elif x.node in _arrays:
            x._value = _arrays[x.node]
    todo = [x for x in todo if x._value is None]
    if not todo:
        return
    roots = [x.node for x in todo]
    argument = traced(roots)
    if argument is not None:
        raise UnsupportedError(
            f"the value of a tensor is needed while jit captures a function, but it depends on the "
            f"argument '{argument['name']}'; use Tensor.where instead of if, and make arguments "
            "that decide what is computed Python scalars")
    for x, value in zip(todo, _computed(roots)):
        x._value = value
        x._node = None


def _computed(roots: Sequence[Node]) -> list[Array]:
    arrays = values(roots)
    inputs = {f"x{i}": n for i, n in enumerate(arrays)}
    new = {n: g.placeholder(name, n.shape, n.dtype) for name, n in inputs.items()}
    key = tuple(substitute(roots, new))
    with _lock:
        model = _models.get(key)
        if model is not None:
            _models.move_to_end(key)
    if model is None:
        model = model_of(Graph({k: new[n] for k, n in inputs.items()},
                               {f"y{i}": n for i, n in enumerate(key)}), threads=1)
        with _lock:
            _models[key] = model
            while len(_models) > MAX_MODELS:
                _models.popitem(last=False)
    outputs = model({k: arrays[n] for k, n in inputs.items()})
    out = list(outputs.values())
    for a in out:
        a.flags.writeable = False
    return out


def model_of(graph: Graph, threads: int | None = None) -> Model:
    """The graph compiled for this machine and loaded."""
    from .compiler import compile_graph
    from .runtime import load

    return load(compile_graph(graph), threads=threads)


__all__ = ["DType", "Tensor", "model_of", "realize", "substitute", "traced", "values", "wrap"]
