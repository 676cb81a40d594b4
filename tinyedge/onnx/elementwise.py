"""Operators that work on each element by itself: arithmetic, comparisons, activations, casts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from .. import graph as g
from ..dtype import BOOL, FLOAT64, dtype_of
from ..graph import Node
from .registry import Context, op

Unary = Callable[[Node], Node]
Binary = Callable[[Node, Node], Node]


def legacy(c: Context, a: Node, b: Node) -> Node:
    """b, placed where opsets before 7 broadcast it: at `axis`, or at a's last dimensions."""
    if c.version >= 7:
        return b
    axis = c.attr("axis")
    if not c.attr("broadcast", 0) or axis is None or b.rank == 0:
        return b
    axis = g.normal_axis(axis, a.rank)
    return g.reshape(b, b.shape + (1,) * (a.rank - axis - b.rank))


# arithmetic

def register_binary(name: str, versions: Sequence[int], f: Binary) -> None:
    @op(name, *versions)
    def apply(c: Context, a: Node, b: Node) -> Node:
        return f(a, legacy(c, a, b))


def flipped(f: Binary) -> Binary:
    return lambda a, b: f(b, a)


BINARIES: tuple[tuple[str, tuple[int, ...], Binary], ...] = (
    ("Add", (1, 6, 7, 13, 14), g.add), ("Sub", (1, 6, 7, 13, 14), g.sub),
    ("Mul", (1, 6, 7, 13, 14), g.mul), ("Div", (1, 6, 7, 13, 14), g.div),
    ("And", (1, 7), g.and_), ("Or", (1, 7), g.or_), ("Xor", (1, 7), g.xor),
    ("BitwiseAnd", (18,), g.and_), ("BitwiseOr", (18,), g.or_), ("BitwiseXor", (18,), g.xor),
    ("Equal", (1, 7, 11, 13, 19), g.eq), ("Less", (1, 7, 9, 13), g.lt),
    ("LessOrEqual", (12, 16), g.le), ("Greater", (1, 7, 9, 13), flipped(g.lt)),
    ("GreaterOrEqual", (12, 16), flipped(g.le)),
)
for _name, _versions, _f in BINARIES:
    register_binary(_name, _versions, _f)


def power(x: Node, exponent: float) -> Node:
    """x to a constant power, by multiplications and square roots where few of them do it."""
    whole, quarter = divmod(exponent, 1)
    if exponent < 0 and x.dtype.is_float and abs(exponent) <= 4:
        return g.div(g.like(x, 1), power(x, -exponent))
    if 0 < exponent <= 4 and quarter in (0, 0.25, 0.5, 0.75) and (x.dtype.is_float or not quarter):
        root = g.sqrt(x) if quarter else x
        parts = [x] * int(whole)
        parts += [root] if quarter in (0.5, 0.75) else []
        parts += [g.sqrt(root)] if quarter in (0.25, 0.75) else []
        return reduce(g.mul, parts)
    if x.dtype.is_float:
        return g.pow_(x, g.like(x, exponent))
    wide = g.cast(x, FLOAT64)
    return g.cast(g.pow_(wide, g.like(wide, exponent)), x.dtype)


@op("Pow", 1, 7, 12, 13, 15)
def pow_(c: Context, a: Node, b: Node) -> Node:
    b = legacy(c, a, b)
    value = c.constant(b)
    if value is not None and value.size == 1:
        exponent = value.ravel()[0].item()
        if 0 != exponent and abs(exponent) <= 4:
            rank = max(a.rank, b.rank)
            return power(g.reshape(a, (1,) * (rank - a.rank) + a.shape), exponent)
    kind = a.dtype if a.dtype.is_float else FLOAT64
    return g.cast(g.pow_(g.cast(a, kind), g.cast(b, kind)), a.dtype)


@op("Mod", 10, 13, 28)
def mod(c: Context, a: Node, b: Node) -> Node:
    fmod = c.attr("fmod")
    if not fmod or a.dtype.kind == "u":
        return g.mod(a, b)
    # C's fmod has the dividend's sign
    rest = g.mod(g.abs_(a), g.abs_(b))
    return g.where(g.lt(a, g.like(a, 0)), g.neg(rest), rest)


@op("BitShift", 11, 28)
def bit_shift(c: Context, a: Node, b: Node) -> Node:
    direction = c.attr("direction")
    if direction not in ("LEFT", "RIGHT"):
        c.refuse(f"attribute 'direction' is '{direction}'; it must be LEFT or RIGHT")
    return (g.shl if direction == "LEFT" else g.shr)(a, b)


def register_variadic(name: str, versions: Sequence[int], f: Binary) -> None:
    @op(name, *versions)
    def apply(c: Context, *xs: Node) -> Node:
        return reduce(f, xs)


VARIADICS: tuple[tuple[str, tuple[int, ...], Binary], ...] = (
    ("Max", (1, 6, 8, 12, 13), g.maximum), ("Min", (1, 6, 8, 12, 13), g.minimum),
    ("Sum", (1, 6, 8, 13), g.add),
)
for _name, _versions, _f in VARIADICS:
    register_variadic(_name, _versions, _f)


@op("Mean", 1, 6, 8, 13)
def mean(c: Context, *xs: Node) -> Node:
    total = reduce(g.add, xs)
    return g.div(total, g.like(total, len(xs)))


# functions of one value

def scaled(x: Node, factor: float) -> Node:
    return g.mul(x, g.like(x, factor))


def plus(x: Node, term: float) -> Node:
    return g.add(x, g.like(x, term))


def relu(x: Node) -> Node:
    return g.maximum(x, g.like(x, 0))


def sigmoid(x: Node) -> Node:
    return g.div(g.like(x, 1), plus(g.exp(g.neg(x)), 1))


def softplus(x: Node) -> Node:
    """log(1 + exp(x)) without overflow."""
    return g.add(relu(x), g.log(plus(g.exp(g.neg(g.abs_(x))), 1)))


def negative(x: Node) -> Node:
    return g.lt(x, g.like(x, 0))


def sign(x: Node) -> Node:
    if x.dtype.kind == "u":
        return g.minimum(x, g.like(x, 1))
    return g.where(negative(x), g.like(x, -1), g.minimum(x, g.like(x, 1)) if x.dtype.is_int else
                   g.where(g.lt(g.like(x, 0), x), g.like(x, 1), x))


def atan(x: Node) -> Node:
    """By the identities that bring the argument below tan(pi/8), then by its power series."""
    one = g.like(x, 1)
    size = g.abs_(x)
    large = g.lt(one, size)
    t = g.where(large, g.div(one, size), size)
    upper = g.lt(g.like(x, math.tan(math.pi / 8)), t)
    t = g.where(upper, g.div(g.sub(t, one), g.add(t, one)), t)
    square = g.mul(t, t)
    terms = {16: 5, 32: 9, 64: 20}[x.dtype.bits]
    series = g.like(x, 0)
    for k in reversed(range(terms)):
        series = plus(g.mul(series, square), (-1) ** k / (2 * k + 1))
    angle = g.mul(series, t)
    angle = g.where(upper, plus(angle, math.pi / 4), angle)
    angle = g.where(large, g.sub(g.like(x, math.pi / 2), angle), angle)
    return g.where(negative(x), g.neg(angle), angle)


def asin(x: Node) -> Node:
    one = g.like(x, 1)
    return atan(g.div(x, g.sqrt(g.mul(g.sub(one, x), g.add(one, x)))))


def acos(x: Node) -> Node:
    one = g.like(x, 1)
    return scaled(atan(g.sqrt(g.div(g.sub(one, x), g.add(one, x)))), 2)


def sinh(x: Node) -> Node:
    """From exp, and by its power series near 0, where exp(x) - exp(-x) cancels."""
    square = g.mul(x, x)
    series = g.mul(x, plus(g.mul(square, plus(g.mul(square, plus(
        scaled(square, 1 / 5040), 1 / 120)), 1 / 6)), 1))
    whole = scaled(g.sub(g.exp(x), g.exp(g.neg(x))), 0.5)
    return g.where(g.lt(g.abs_(x), g.like(x, 0.5)), series, whole)


def cosh(x: Node) -> Node:
    return scaled(g.add(g.exp(x), g.exp(g.neg(x))), 0.5)


LARGE = 1e8
"""From here on a square hides the 1 beside it, in float64 too."""


def asinh(x: Node) -> Node:
    size = g.abs_(x)
    # log1p(y) as log(u) * y / (u - 1), u = 1 + y, which has no cancellation
    square = g.mul(size, size)
    y = g.add(size, g.div(square, plus(g.sqrt(plus(square, 1)), 1)))
    out = g.where(g.lt(g.like(x, LARGE), size), plus(g.log(size), math.log(2)), log1p(y))
    return g.where(negative(x), g.neg(out), out)


def acosh(x: Node) -> Node:
    out = g.log(g.add(x, g.sqrt(g.mul(plus(x, -1), plus(x, 1)))))
    out = g.where(g.lt(g.like(x, LARGE), x), plus(g.log(x), math.log(2)), out)
    return g.where(g.lt(x, g.like(x, 1)), g.like(x, math.nan), out)


def wide(f: Unary) -> Unary:
    """f in float64, for functions whose parts leave the range of a narrower type."""
    return lambda x: g.cast(f(g.cast(x, FLOAT64)), x.dtype)


def atanh(x: Node) -> Node:
    size = g.abs_(x)
    out = scaled(log1p(g.div(scaled(size, 2), g.sub(g.like(x, 1), size))), 0.5)
    return g.where(negative(x), g.neg(out), out)


def log1p(y: Node) -> Node:
    u = plus(y, 1)
    small = g.eq(u, g.like(u, 1))
    exact = g.mul(g.log(u), g.div(y, g.where(small, g.like(u, 1), plus(u, -1))))
    infinite = g.eq(u, g.like(u, math.inf))
    return g.where(small, y, g.where(infinite, u, exact))


UNARIES: tuple[tuple[str, tuple[int, ...], Unary], ...] = (
    ("Abs", (1, 6, 13), g.abs_), ("Neg", (1, 6, 13), g.neg), ("Exp", (1, 6, 13), g.exp),
    ("Log", (1, 6, 13), g.log), ("Sqrt", (1, 6, 13), g.sqrt), ("Sin", (7, 22), g.sin),
    ("Cos", (7, 22), g.cos), ("Tan", (7, 22), lambda x: g.div(g.sin(x), g.cos(x))),
    ("Asin", (7, 22), asin), ("Acos", (7, 22), acos), ("Atan", (7, 22), atan),
    ("Sinh", (9, 22), wide(sinh)), ("Cosh", (9, 22), wide(cosh)), ("Tanh", (1, 6, 13), g.tanh),
    ("Asinh", (9, 22), wide(asinh)), ("Acosh", (9, 22), wide(acosh)),
    ("Atanh", (9, 22), wide(atanh)),
    ("Erf", (9, 13), g.erf), ("Floor", (1, 6, 13), g.floor), ("Ceil", (1, 6, 13), g.ceil),
    ("Round", (11, 22), g.round_), ("Sign", (9, 13), sign), ("Not", (1,), g.not_),
    ("BitwiseNot", (18,), g.not_), ("IsNaN", (9, 13, 20), g.isnan),
    ("Reciprocal", (1, 6, 13), lambda x: g.div(g.like(x, 1), x)),
    ("Relu", (1, 6, 13, 14), relu), ("Sigmoid", (1, 6, 13), sigmoid),
    ("Softplus", (1, 22), softplus),
    ("Softsign", (1, 22), lambda x: g.div(x, plus(g.abs_(x), 1))),
    ("HardSwish", (14, 22), lambda x: g.mul(x, hard_sigmoid(x, 1 / 6, 0.5))),
    ("Mish", (18, 22), lambda x: g.mul(x, g.tanh(softplus(x)))),
    ("Identity", (1, 13, 14, 16, 19, 21, 23, 24, 25), lambda x: x),
)


def register_unary(name: str, versions: Sequence[int], f: Unary) -> None:
    @op(name, *versions)
    def apply(c: Context, x: Node) -> Node:
        return f(x)


for _name, _versions, _unary in UNARIES:
    register_unary(_name, _versions, _unary)


@op("IsInf", 10, 20)
def is_inf(c: Context, x: Node) -> Node:
    above = g.eq(x, g.like(x, math.inf)) if c.attr("detect_positive") else None
    below = g.eq(x, g.like(x, -math.inf)) if c.attr("detect_negative") else None
    if above is not None and below is not None:
        return g.or_(above, below)
    return above or below or g.full(x.shape, False, BOOL)


# activations with parameters

def hard_sigmoid(x: Node, alpha: float, beta: float) -> Node:
    return g.minimum(relu(plus(scaled(x, alpha), beta)), g.like(x, 1))


def leaky_relu(x: Node, alpha: float) -> Node:
    return g.where(negative(x), scaled(x, alpha), x)


def elu(x: Node, alpha: float, gamma: float = 1.0) -> Node:
    grown = scaled(plus(g.exp(g.minimum(x, g.like(x, 0))), -1), alpha * gamma)
    return g.where(negative(x), grown, scaled(x, gamma) if gamma != 1 else x)


def thresholded(x: Node, alpha: float) -> Node:
    return g.where(g.lt(g.like(x, alpha), x), x, g.like(x, 0))


def gelu(x: Node, approximate: str) -> Node:
    if approximate == "tanh":
        cube = g.mul(g.mul(x, x), x)
        inner = scaled(g.add(x, scaled(cube, 0.044715)), math.sqrt(2 / math.pi))
        return g.mul(scaled(x, 0.5), plus(g.tanh(inner), 1))
    return g.mul(scaled(x, 0.5), plus(g.erf(scaled(x, math.sqrt(0.5))), 1))


@op("LeakyRelu", 1, 6, 16)
def _leaky(c: Context, x: Node) -> Node:
    return leaky_relu(x, c.attr("alpha"))


@op("PRelu", 1, 6, 7, 9, 16)
def prelu(c: Context, x: Node, slope: Node) -> Node:
    if c.version < 7 and slope.rank == 1 and x.rank > 1:
        slope = g.reshape(slope, slope.shape + (1,) * (x.rank - 2))
    return g.where(negative(x), g.mul(x, slope), x)


@op("Elu", 1, 6, 22)
def _elu(c: Context, x: Node) -> Node:
    return elu(x, c.attr("alpha"))


@op("Selu", 1, 6, 22)
def selu(c: Context, x: Node) -> Node:
    return elu(x, c.attr("alpha"), c.attr("gamma"))


@op("Celu", 12, 28)
def celu(c: Context, x: Node) -> Node:
    alpha = c.attr("alpha")
    grown = scaled(plus(g.exp(scaled(g.minimum(x, g.like(x, 0)), 1 / alpha)), -1), alpha)
    return g.where(negative(x), grown, x)


@op("HardSigmoid", 1, 6, 22)
def _hard_sigmoid(c: Context, x: Node) -> Node:
    return hard_sigmoid(x, c.attr("alpha"), c.attr("beta"))


@op("ThresholdedRelu", 10, 22)
def thresholded_relu(c: Context, x: Node) -> Node:
    return thresholded(x, c.attr("alpha"))


@op("Gelu", 20)
@op("Gelu", 1, domain="com.microsoft")
def _gelu(c: Context, x: Node) -> Node:
    return gelu(x, c.attr("approximate", "none"))


@op("QuickGelu", 1, domain="com.microsoft")
def quick_gelu(c: Context, x: Node) -> Node:
    return g.mul(x, sigmoid(scaled(x, c.attr("alpha", 1.702))))


@op("Swish", 24)
def swish(c: Context, x: Node) -> Node:
    alpha = c.attr("alpha")
    return g.mul(x, sigmoid(x if alpha == 1 else scaled(x, alpha)))


@op("Shrink", 9)
def shrink(c: Context, x: Node) -> Node:
    bias, limit = c.attr("bias"), c.attr("lambd")
    below = g.lt(x, g.like(x, -limit))
    above = g.lt(g.like(x, limit), x)
    return g.where(below, plus(x, bias), g.where(above, plus(x, -bias), g.like(x, 0)))


@op("Clip", 1, 6)
def clip_attributes(c: Context, x: Node) -> Node:
    low, high = c.attr("min"), c.attr("max")
    if low is not None and low > np.finfo(np.float32).min:
        x = g.maximum(x, g.like(x, low))
    if high is not None and high < np.finfo(np.float32).max:
        x = g.minimum(x, g.like(x, high))
    return x


@op("Clip", 11, 12, 13)
def clip(c: Context, x: Node, low: Node | None = None, high: Node | None = None) -> Node:
    if low is not None:
        x = g.maximum(x, g.reshape(low, ()))
    return x if high is None else g.minimum(x, g.reshape(high, ()))


# types and selection

@op("Cast", 1, 6, 9, 13, 19, 21, 23, 24, 25, 28)
def cast(c: Context, x: Node) -> Node:
    c.ignore("saturate", "round_mode")  # about float8 types
    to = c.attr("to")
    return g.cast(x, dtype_of(to.lower()) if isinstance(to, str) else c.type_of(to))


@op("CastLike", 15, 19, 21, 23, 24, 25)
def cast_like(c: Context, x: Node, target: Node) -> Node:
    c.ignore("saturate", "round_mode")
    return g.cast(x, target.dtype)


@op("BitCast", 26)
def bit_cast(c: Context, x: Node) -> Node:
    kind = c.type_of(c.attr("to"))
    if kind.bits != x.dtype.bits:
        c.refuse(f"attribute 'to': {x.dtype} and {kind} differ in width")
    return g.bitcast(x, kind)


@op("Where", 9, 16)
def where(c: Context, condition: Node, a: Node, b: Node) -> Node:
    return g.where(condition, a, b)


@op("Dropout", 1, 6, 7, 10, 12, 13, 22)
def dropout(c: Context, x: Node, ratio: Node | None = None, training: Node | None = None) -> Any:
    c.ignore("is_test", "ratio", "seed")
    if training is not None:
        value, amount = c.constant(training), c.constant(ratio)
        if value is None or value.any() and (amount is None or amount.any()):
            c.refuse("training mode is not supported; export the model for inference")
    kept = BOOL if c.version >= 10 else x.dtype
    return [x, g.full(x.shape, True, kept)]
