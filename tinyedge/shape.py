"""Shapes: tuples of dimensions, each an int or a bounded symbolic expression."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .codegen.ir import Expr
from .codegen.symbolic import evaluate, lift, mul, symbol
from .errors import ShapeError

Dim = int | Expr
Shape = tuple[Dim, ...]

__all__ = ["Dim", "Expr", "Shape", "broadcast", "dim", "evaluate", "is_static", "show", "size",
           "static", "strides", "symbol", "upper"]


def dim(d: Dim) -> Dim:
    """A dimension in its simplest form: an int if it is constant."""
    return int(d.attr) if isinstance(d, Expr) and d.op == "const" else d


def size(shape: Iterable[Dim]) -> Dim:
    """The number of elements."""
    n: Dim = 1
    for d in shape:
        n = n * d if isinstance(n, int) and isinstance(d, int) else dim(mul(n, d))
    return n


def strides(shape: Sequence[Dim]) -> Shape:
    """Row-major strides in elements."""
    return tuple(size(shape[i + 1:]) for i in range(len(shape)))


def is_static(shape: Iterable[Dim]) -> bool:
    return all(isinstance(d, int) for d in shape)


def static(shape: Iterable[Dim], what: str = "shape") -> tuple[int, ...]:
    """The shape as ints; ShapeError naming the first symbolic dimension otherwise."""
    out = []
    for d in shape:
        if not isinstance(d, int):
            raise ShapeError(f"{what}: dimension {d} is not bound; bind it by --dim or --shape")
        out.append(d)
    return tuple(out)


def upper(d: Dim) -> int:
    """The largest value a dimension can take."""
    return d if isinstance(d, int) else d.hi


def same(a: Dim, b: Dim) -> bool:
    return a is b if isinstance(a, Expr) and isinstance(b, Expr) else \
        isinstance(a, int) and isinstance(b, int) and a == b


def broadcast(*shapes: Shape) -> Shape:
    """Numpy's broadcasting of shapes; ShapeError where they don't fit."""
    rank = max((len(s) for s in shapes), default=0)
    out: list[Dim] = [1] * rank
    for s in shapes:
        for i, d in enumerate(s, rank - len(s)):
            if same(out[i], 1):
                out[i] = d
            elif not same(d, 1) and not same(d, out[i]):
                text = ", ".join(show(s) for s in shapes)
                raise ShapeError(f"shapes {text} can't be broadcast together")
    return tuple(out)


def show(shape: Iterable[Dim]) -> str:
    return "[" + ",".join(str(d) for d in shape) + "]"


def lifted(shape: Iterable[Dim]) -> tuple[Expr, ...]:
    """The dimensions as expressions."""
    return tuple(lift(d) for d in shape)
