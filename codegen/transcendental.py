"""Transcendental functions as expressions of basic operations.

Used while a kernel is lowered, so that every target that has add, multiply, divide and integer
shifts computes the same thing: no tables, no branches (both sides of a select are evaluated), no
library. Every function takes any input: nan gives nan, and infinities, zeros and denormals are
treated as IEEE 754 and C99 ask (but sin and tanh of -0 may be +0).

Largest error in ulp (units in the last place of the true result); the tests hold it, with and
without contraction of ``a*b + c`` into fused multiply-adds:

========  =======  ===============================================================================
function  float32  remarks
========  =======  ===============================================================================
exp       2        denormal results included
log       1        denormal arguments included
sin, cos  3        for abs(x) <= 1e5; beyond, what they are at 0
tanh      3        never outside [-1, 1]
erf       3        never outside [-1, 1]
pow       3        every base and exponent, denormal results included
========  =======  ===============================================================================

float64 is good to a relative error of 1e-13 (sin and cos: an absolute one, for abs(x) <= 1e7).
float16 is computed in float32 and rounded once more.

How: arguments are reduced by subtracting multiples of a constant held in several pieces (Cody and
Waite), short enough that the products are exact without a fused multiply-add. Integers are found by
adding a number so large that the last place of the sum is 1, which leaves the integer in the low
bits too; a target whose compiler reassociates floating point must be told not to. Polynomials and
quotients are minimax fits by reweighted least squares on Chebyshev nodes, weighted for relative
error of the function, in extended precision; coefficients are rounded to the target type one
after another, lowest power first, and the rest fitted again each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

from tinyedge.dtype import FLOAT16, FLOAT32, FLOAT64, INT32, INT64, DType

from .ir import Expr, const, op

PI = Fraction(31415926535897932384626433832795028841971693993751, 10**49)
LN2 = Fraction(69314718055994530941723212145817656807550013436026, 10**50)


@dataclass(frozen=True)
class Format:
    """What differs between the float types.

    digits: bits of the significand after the point. exp: p with e^r = 1 + r + r^2 p(r) for
    abs(r) <= ln 2; exp_near: the same for abs(r) <= ln(2)/2, relative to e^r - 1. sin: p with
    sin r = r + r^3 p(r^2) for abs(r) <= pi/2. atanh: p with 2 atanh s = 2s + s w p(w), w = s^2,
    for abs(s) <= 0.172. smallest: logarithm of half the least denormal, and largest: of the first
    overflow, rounded outwards.
    """

    dtype: DType
    integer: DType
    digits: int
    exp: tuple[float, ...]
    exp_near: tuple[float, ...]
    sin: tuple[float, ...]
    atanh: tuple[float, ...]
    smallest: float
    largest: float

    @property
    def bias(self) -> int:
        return (1 << (self.dtype.bits - self.digits - 2)) - 1

    @property
    def magic(self) -> float:
        """Added to a number below 2^(digits - 1), leaves its nearest integer in the low bits."""
        return 1.5 * 2.0**self.digits


SINGLE = Format(
    FLOAT32, INT32, 23,
    exp=(0.500000358, 0.166666165, 0.0416611992, 0.00833596662, 0.00141054473, 0.000196302062),
    exp_near=(0.49999997, 0.166665465, 0.0416674353, 0.00836627185, 0.00138706958),
    sin=(-0.166666597, 0.00833306927, -0.000198097688, 2.60605384e-06),
    atanh=(0.666667759, 0.399775743, 0.298712373),
    smallest=-104.0, largest=89.0,
)
EXP = (0.4999999999999993, 0.16666666666666938, 0.04166666666670217, 0.008333333333269717,
       0.0013888888883565468, 0.00019841269892917595, 2.4801590836039868e-05,
       2.7557300608273122e-06, 2.7556156666164986e-07, 2.5055039162040272e-08,
       2.1062443477985375e-09, 1.5935324182886292e-10)
DOUBLE = Format(
    FLOAT64, INT64, 52,
    exp=EXP, exp_near=EXP,
    sin=(-0.1666666666666618, 0.00833333333328499, -0.00019841269824898887, 2.755731658008778e-06,
         -2.50518789369661e-08, 1.6048052660715515e-10, -7.372812417595207e-13),
    atanh=(0.6666666666666735, 0.3999999999941001, 0.28571428743416, 0.2222219846701633,
           0.1818356994340753, 0.15313903130563503, 0.147974695777855),
    smallest=-746.0, largest=710.0,
)

# float32: erfc x = e^(-x p(x)) for 0 <= x <= 3.95
ERF = (1.12837923, 0.636615396, 0.102825724, -0.0193644539, 0.00027972582, 0.00118846889,
       -0.000355164375, 3.67113571e-05)
# float64: erf x = x p(x^2) for abs(x) <= 1; erfc x = e^(-x^2) t p(t), t = 1/(1 + x/2), above
ERF_LOW = (1.1283791670955121, -0.37612638903173246, 0.11283791670547867, -0.02686617058271746,
           0.005223977131086245, -0.0008548304051039276, 0.00012054663889993345,
           -1.4913053875690412e-05, 1.6308299818306805e-06, -1.517876386684190e-07,
           9.409824602762853e-09)
ERF_HIGH = (0.28205978740495896, 0.2827602476454706, 0.24133283221637977, 0.20178541017885582,
            0.014089001348133682, 0.0956363604121781, -0.06379936476624903, -0.3006226753481896,
            0.4261502463305601, -0.22336212668790179, 0.04397332410340288)


def _do(name: str, *args: Expr | float) -> Expr:
    """An operation; Python numbers take the type of the expression beside them."""
    t = next(a.dtype for a in args if isinstance(a, Expr) and a.dtype.name != "bool")
    return op(name, *(a if isinstance(a, Expr) else const(a, t) for a in args))


def _clamp(x: Expr, low: float, high: float) -> Expr:
    return _do("min", _do("max", x, low), high)


def _polynomial(x: Expr, coefficients: Sequence[float]) -> Expr:
    """c0 + c1*x + c2*x^2 + ... by Horner's rule."""
    out: Expr | float = coefficients[-1]
    for c in coefficients[-2::-1]:
        out = _do("add", _do("mul", out, x), c)
    assert isinstance(out, Expr)
    return out


def _bits(x: Expr, t: DType) -> Expr:
    return op("bitcast", x, dtype=t)


def _pieces(value: Fraction, bits: int, count: int) -> list[float]:
    """`value` as a sum of `count` floats of `bits` significant bits and a full one."""
    out = []
    for _ in range(count):
        scale = Fraction(2) ** (bits - 1)
        while abs(value * scale) >= 2**bits:
            scale /= 2
        while abs(value * scale) < 2 ** (bits - 1):
            scale *= 2
        piece = Fraction(round(value * scale)) / scale
        out.append(float(piece))
        value -= piece
    return [*out, float(value)]


def _subtract(x: Expr, n: Expr, pieces: Sequence[float]) -> Expr:
    """x - n * (sum of pieces)."""
    for p in pieces:
        x = _do("sub", x, _do("mul", n, p))
    return x


def _top(x: Expr, f: Format) -> Expr:
    """x cut to the upper half of its significand, so that products of two such are exact."""
    mask = -1 << (f.digits // 2 + 1)
    return _bits(op("and", _bits(x, f.integer), const(mask, f.integer)), f.dtype)


def _reduce(x: Expr, f: Format, step: int) -> tuple[Expr, Expr]:
    """(2^n, r) with x = step * n * ln 2 + r, abs(r) <= step * ln(2)/2."""
    # with the bias added, the low bits of the sum are the power's exponent field
    offset = f.magic + f.bias
    t = _do("add", _do("mul", x, float(1 / (step * LN2))), offset)
    n = _do("sub", t, offset)
    bits = f.digits - (7 if f is SINGLE else 11)
    return _power_of_two(t, f), _subtract(x, n, _pieces(step * LN2, bits, 1))


def _power_of_two(t: Expr, f: Format) -> Expr:
    """2^n, given n + magic + bias."""
    return _bits(op("shl", _bits(t, f.integer), const(f.digits, f.integer)), f.dtype)


def _exp(x: Expr, f: Format) -> Expr:
    # an even power of two is split between two factors: neither overflows, and where the result
    # is denormal there is one rounding
    s, r = _reduce(_clamp(x, f.smallest, f.largest), f, 2)
    return _do("mul", _do("mul", _polynomial(r, (1.0, 1.0, *f.exp)), s), s)


def _exp_minus_1(x: Expr, f: Format) -> Expr:
    """e^x - 1 to full relative accuracy, for x that need no clamp: abs(x) <= 80."""
    s, r = _reduce(x, f, 1)
    q = _do("add", _do("mul", _do("mul", r, r), _polynomial(r, f.exp_near)), r)
    return _do("add", _do("mul", s, q), _do("sub", s, 1.0))


def _split(x: Expr, f: Format) -> tuple[Expr, Expr]:
    """(k, m) with x = 2^k m, sqrt(1/2) <= m < sqrt(2), for positive finite x."""
    up = float(f.digits + 1)
    small = _do("lt", x, 2.0 ** (1 - f.bias))
    i = _bits(op("where", small, _do("mul", x, 2.0**up), x), f.integer)
    root = _root_half(f)
    i = _do("sub", i, root)
    k = op("cast", _do("shr", i, f.digits), dtype=f.dtype)
    k = op("where", small, _do("sub", k, up), k)
    m = _do("add", op("and", i, const((1 << f.digits) - 1, f.integer)), root)
    return k, _bits(m, f.dtype)


def _root_half(f: Format) -> int:
    """The bits of sqrt(1/2)."""
    fraction = isqrt(1 << (2 * f.digits + 1)) - (1 << f.digits)
    return ((f.bias - 1) << f.digits) + fraction


def _log(x: Expr, f: Format) -> Expr:
    k, m = _split(x, f)
    g = _do("sub", m, 1.0)
    s = _do("div", g, _do("add", m, 1.0))
    w = _do("mul", s, s)
    tail = _do("mul", w, _polynomial(w, f.atanh))
    # 2s = g - s g, so this is log m with the exact g as its leading term
    high, low = _pieces(LN2, f.digits - 10, 1)
    rest = _do("sub", _do("mul", k, low), _do("mul", s, _do("sub", g, tail)))
    out = _do("add", _do("mul", k, high), _do("add", g, rest))
    out = op("where", _do("lt", x, float("inf")), out, x)
    edge = op("where", _do("eq", x, 0.0), const(float("-inf"), f.dtype),
              const(float("nan"), f.dtype))
    return op("where", _do("lt", 0.0, x), out, edge)


def _sine(x: Expr, f: Format, shift: float) -> Expr:
    """sin(x + shift * pi), shift 0 or 1/2."""
    limit, pieces = (1e5, _pieces(PI, 8, 4)) if f is SINGLE else (1e7, _pieces(PI, 30, 3))
    # 0 in place of what is too large, nan in place of infinity
    x = op("where", _do("le", _do("abs", x), limit), x, _do("mul", x, 0.0))
    # with n + magic (odd where shift is 1/2, so that its parity counts the half turn) ...
    offset = f.magic + 2 * shift
    t = _do("mul", x, float(1 / PI))
    t = _do("add", _do("sub", t, shift) if shift else t, offset)
    n = _do("sub", t, offset)
    # ... what is left after n half turns, and a quarter for the cosine, is within pi/2
    n = _do("add", n, shift) if shift else n
    r = _subtract(x, n, pieces[:2])
    small: Expr | None = None
    for p in pieces[2:-1]:
        # unlike those before, these differences are rounded: keep what is lost
        before, r = r, _subtract(r, n, [p])
        lost = _subtract(_do("sub", before, r), n, [p])
        small = _do("add", small, lost) if small else lost
    assert small is not None
    small = _subtract(small, n, pieces[-1:])
    # sin(r + small), to first order in small
    z = _do("mul", r, r)
    slope = _do("add", _do("mul", z, -0.5), 1.0)
    out = _do("add", _do("mul", small, slope),
              _do("mul", _do("mul", r, z), _polynomial(z, f.sin)))
    out = _clamp(_do("add", out, r), -1.0, 1.0)
    sign = _do("shl", _bits(t, f.integer), f.dtype.bits - 1)
    return _bits(op("xor", _bits(out, f.integer), sign), f.dtype)


def _sin(x: Expr, f: Format) -> Expr:
    return _sine(x, f, 0.0)


def _cos(x: Expr, f: Format) -> Expr:
    return _sine(x, f, 0.5)


def _with_sign(a: Expr, x: Expr, f: Format) -> Expr:
    """`a`, which is not negative, with the sign of x."""
    sign = op("and", _bits(x, f.integer), const(f.integer.limits[0], f.integer))
    return _bits(op("or", _bits(a, f.integer), sign), f.dtype)


def _tanh(x: Expr, f: Format) -> Expr:
    limit = 9.1 if f is SINGLE else 19.1
    x = _clamp(x, -limit, limit)
    e = _exp_minus_1(_do("add", x, x), f)
    return _do("div", e, _do("add", e, 2.0))


def _erf(x: Expr, f: Format) -> Expr:
    if f is SINGLE:
        a = _do("min", _do("abs", x), 3.95)
        e = _exp_minus_1(_do("neg", _do("mul", a, _polynomial(a, ERF))), f)
        return _with_sign(_do("abs", e), x, f)
    a = _do("min", _do("abs", x), 6.0)
    z = _do("mul", a, a)
    low = _do("mul", a, _polynomial(z, ERF_LOW))
    t = _do("div", 1.0, _do("add", _do("mul", a, 0.5), 1.0))
    c = _do("mul", _exp(_do("neg", z), f), _do("mul", t, _polynomial(t, ERF_HIGH)))
    high = _do("sub", 1.0, c)
    return _with_sign(op("where", _do("lt", 1.0, a), high, low), x, f)


def _pow(x: Expr, y: Expr, f: Format) -> Expr:
    """2^(y log2 abs(x)), the logarithm held in two floats, and the cases that C99 lists."""
    a = _do("abs", x)
    k, m = _split(a, f)
    g, d = _do("sub", m, 1.0), _do("add", m, 1.0)
    d1 = _top(d, f)
    d2 = _do("sub", m, _do("sub", d1, 1.0))
    rd = _do("div", 1.0, d)
    s = _do("mul", g, rd)
    s1 = _top(s, f)
    s2 = _do("sub", _do("sub", g, _do("mul", s1, d1)), _do("mul", s1, d2))
    s2 = _do("mul", s2, rd)
    w = _do("mul", s, s)
    tail = _do("mul", s, _do("mul", w, _polynomial(w, f.atanh)))
    c1, c2 = _pieces(2 / LN2, f.digits // 2, 1)
    high = _do("mul", s1, c1)
    low = _do("add", _do("mul", s1, c2), _do("mul", s2, float(2 / LN2)))
    low = _do("add", _do("mul", tail, float(1 / LN2)), low)
    total = _do("add", k, high)
    low = _do("add", low, _do("sub", high, _do("sub", total, k)))
    l1 = _top(_do("add", total, low), f)
    l2 = _do("add", _do("sub", total, l1), low)
    # an exponent of this size takes every base but 1 out of range
    e = _clamp(y, -(2.0 ** (f.digits + 12)), 2.0 ** (f.digits + 12))
    e1 = _top(e, f)
    e2 = _do("sub", e, e1)
    z1 = _do("mul", e1, l1)
    z2 = _do("add", _do("mul", e, l2), _do("mul", e2, l1))
    z = _clamp(_do("add", z1, z2), f.smallest / float(LN2) - 2, f.largest / float(LN2) + 2)
    offset = f.magic + f.bias
    t = _do("add", _do("mul", z, 0.5), offset)
    n = _do("sub", t, offset)
    r = _do("add", _do("sub", z1, _do("mul", n, 2.0)), z2)
    p2 = _power_of_two(t, f)
    r = _do("mul", _clamp(r, -1.1, 1.1), float(LN2))
    out = _do("mul", _do("mul", _polynomial(r, (1.0, 1.0, *f.exp)), p2), p2)
    inf = float("inf")
    ends = op("or", _do("eq", a, 0.0), _do("eq", a, inf))
    out = op("where", ends, op("where", _do("lt", 0.0, y), a, _do("div", 1.0, a)), out)
    whole = _do("eq", y, _do("trunc", y))
    half = _do("mul", y, 0.5)
    odd = op("and", whole, op("not", _do("eq", half, _do("trunc", half))))
    minus = op("and", _bits(x, f.integer), const(f.integer.limits[0], f.integer))
    minus = op("where", odd, minus, const(0, f.integer))
    out = _bits(op("xor", _bits(out, f.integer), minus), f.dtype)
    undefined = op("and", op("and", _do("lt", x, 0.0), _do("lt", -inf, x)), op("not", whole))
    undefined = op("or", undefined, op("or", op("isnan", x), op("isnan", y)))
    out = op("where", undefined, const(float("nan"), f.dtype), out)
    one = op("or", _do("eq", y, 0.0), _do("eq", x, 1.0))
    return op("where", one, const(1.0, f.dtype), out)


_UNARY: dict[str, Callable[[Expr, Format], Expr]] = {
    "exp": _exp, "log": _log, "sin": _sin, "cos": _cos, "tanh": _tanh, "erf": _erf,
}
NAMES = frozenset((*_UNARY, "pow"))
"""The operations that `expand` takes apart."""


def expand(e: Expr) -> Expr:
    """The same value as `e`, an operation of `NAMES` on floats, by basic operations.

    These are add sub mul div min max abs neg trunc, comparisons, isnan, where, bitcast and cast,
    and add sub and or xor not shl shr on integers of the float's width.
    """
    t = e.dtype
    if t is FLOAT16:
        wide = [op("cast", a, dtype=FLOAT32) for a in e.args]
        return op("cast", expand(op(e.op, *wide)), dtype=FLOAT16)
    f = {FLOAT32: SINGLE, FLOAT64: DOUBLE}[t]
    if e.op == "pow":
        return _pow(e.args[0], e.args[1], f)
    return _UNARY[e.op](e.args[0], f)
