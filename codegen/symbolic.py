"""Integer expressions in normal form, with bounds: index arithmetic and symbolic dimensions.

The normal form of a sum is one `affine` node: a constant and sorted terms, none of which is
itself a sum or a constant. Quotients and remainders are taken apart as far as the bounds allow,
which is what turns a blocked layout's ``(16*o + i) // 16`` back into ``o``.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

from tinyedge.dtype import BOOL, INT64

from .ir import Expr, const, make, op, var

TRUE, FALSE = const(1, BOOL), const(0, BOOL)
Index = Expr | int


def lift(e: Index) -> Expr:
    """A Python int as an expression."""
    return e if isinstance(e, Expr) else const(int(e))


def symbol(name: str, lo: int, hi: int) -> Expr:
    """A run-time dimension with inclusive bounds."""
    return var(name, lo, hi)


def linear(e: Expr) -> tuple[dict[Expr, int], int]:
    """The terms and the constant of `e` seen as a sum."""
    if e.op == "const":
        return {}, int(e.attr)
    if e.op == "affine":
        return dict(zip(e.args, e.attr[1])), e.attr[0]
    return {e: 1}, 0


def linear_sum(parts: Iterable[tuple[int, Expr]], constant: int = 0) -> Expr:
    """constant + sum of coefficient * expression, in normal form."""
    terms: dict[Expr, int] = {}
    for c, e in parts:
        if e.op == "affine":
            constant += c * e.attr[0]
            for a, k in zip(e.args, e.attr[1]):
                terms[a] = terms.get(a, 0) + c * k
        elif e.op == "const":
            constant += c * int(e.attr)
        else:
            terms[e] = terms.get(e, 0) + c
    return _from_terms(terms, constant)


def _from_terms(terms: dict[Expr, int], constant: int) -> Expr:
    # (x // k) * k + x % k  ->  x
    for t in [t for t in terms if t.op == "mod" and t.attr == "index"]:
        x, k = t.args
        c = terms.get(t, 0)
        q = make("floordiv", (x, k), None, INT64, *_div_bounds(x, k)) if c else None
        if q is not None and k.op == "const" and terms.get(q, 0) == c * k.attr:
            del terms[t], terms[q]
            return linear_sum([*((v, e) for e, v in terms.items()), (c, x)], constant)
    left = sorted(((e, c) for e, c in terms.items() if c), key=lambda p: p[0].serial)
    if not left:
        return const(constant)
    if len(left) == 1 and constant == 0 and left[0][1] == 1:
        return left[0][0]
    lo = hi = constant
    for e, c in left:
        lo += c * (e.lo if c > 0 else e.hi)
        hi += c * (e.hi if c > 0 else e.lo)
    args, coefs = tuple(e for e, _ in left), tuple(c for _, c in left)
    return make("affine", args, (constant, coefs), INT64, lo, hi)


def add(a: Index, b: Index) -> Expr:
    return linear_sum(((1, lift(a)), (1, lift(b))))


def mul(a: Index, b: Index) -> Expr:
    """A product; distributes over sums, so that a later division can undo it."""
    x, y = lift(a), lift(b)
    if x.op == "const":
        x, y = y, x
    if y.op == "const":
        return linear_sum(((int(y.attr), x),))
    if x.op == "affine" or y.op == "affine":
        (tx, cx), (ty, cy) = linear(x), linear(y)
        parts = [(p * q, mul(e, f)) for e, p in tx.items() for f, q in ty.items()]
        parts += [(p * cy, e) for e, p in tx.items()] + [(q * cx, f) for f, q in ty.items()]
        return linear_sum(parts, cx * cy)
    # a product of several factors is a left-leaning chain, sorted
    factors = sorted(_factors(x) + _factors(y), key=lambda e: e.serial)
    out = factors[0]
    for f in factors[1:]:
        ends = [out.lo * f.lo, out.lo * f.hi, out.hi * f.lo, out.hi * f.hi]
        out = make("mul", (out, f), "index", INT64, min(ends), max(ends))
    return out


def _factors(e: Expr) -> list[Expr]:
    if e.op == "mul" and e.attr == "index":
        return _factors(e.args[0]) + [e.args[1]]
    return [e]


def _div_bounds(e: Expr, k: Expr) -> tuple[int, int]:
    low, high = max(k.lo, 1), max(k.hi, 1)
    ends = [e.lo // low, e.lo // high, e.hi // low, e.hi // high]
    return min(ends), max(ends)


def _without(e: Expr, k: Expr) -> Expr | None:
    """e / k where e is a product with k among its factors."""
    factors = _factors(e)
    if k not in factors:
        return None
    factors.remove(k)
    out = const(1)
    for f in factors:
        out = mul(out, f)
    return out


def _split(e: Expr, k: Expr) -> tuple[Expr, Expr]:
    """(q, r) with e == q*k + r, taking into q every term that k divides."""
    terms, c0 = linear(e)
    quotient: list[tuple[int, Expr]] = []
    rest: dict[Expr, int] = {}
    if k.op == "const":
        n = int(k.attr)
        for t, c in terms.items():
            if c // n:
                quotient.append((c // n, t))
            if c % n:
                rest[t] = c % n
        return linear_sum(quotient, c0 // n), _from_terms(rest, c0 % n)
    for t, c in terms.items():
        q = _without(t, k)
        if q is None:
            rest[t] = c
        else:
            quotient.append((c, q))
    return linear_sum(quotient), _from_terms(rest, c0)


def _whole_split(e: Expr, k: Expr) -> tuple[Expr, Expr]:
    """Like `_split`, but only with terms whose coefficient is a multiple of k."""
    if k.op != "const":
        return _split(e, k)
    terms, c0 = linear(e)
    n = int(k.attr)
    quotient = [(c // n, t) for t, c in terms.items() if c % n == 0]
    rest = {t: c for t, c in terms.items() if c % n}
    # keep the remainder's constant where it makes the rest fit into [0, k) if it can
    whole = _from_terms(dict(rest), c0)
    shift = whole.lo // n
    return linear_sum(quotient, shift), _from_terms(rest, c0 - shift * n)


def floordiv(a: Index, b: Index) -> Expr:
    """a // b rounded down, b > 0."""
    e, k = lift(a), lift(b)
    if k.op == "const" and k.attr == 1:
        return e
    if e.op == "const" and k.op == "const":
        return const(int(e.attr) // int(k.attr))
    if e is k:
        return const(1)
    q, r = _whole_split(e, k)
    if r.lo >= 0 and r.hi < k.lo:
        return q
    if q.op != "const" or q.attr:
        return q + floordiv(r, k)
    if k.op == "const":
        n = int(k.attr)
        terms, c0 = linear(r)
        g = n
        for c in terms.values():
            g = gcd(g, c)
        if g > 1:
            reduced = _from_terms({t: c // g for t, c in terms.items()}, c0 // g)
            return floordiv(reduced, n // g)
        if r.op == "floordiv" and r.args[1].op == "const":
            return floordiv(r.args[0], n * int(r.args[1].attr))
    return make("floordiv", (r, k), None, INT64, *_div_bounds(r, k))


def mod(a: Index, b: Index) -> Expr:
    """a - b * (a // b), b > 0."""
    e, k = lift(a), lift(b)
    if e.op == "const" and k.op == "const":
        return const(int(e.attr) % int(k.attr))
    if k.op == "const" and k.attr == 1 or e is k:
        return const(0)
    _, r = _whole_split(e, k)
    if r.lo >= 0 and r.hi < k.lo:
        return r
    if k.op == "const":
        n = int(k.attr)
        terms, c0 = linear(r)
        g = n
        for c in terms.values():
            g = gcd(g, c)
        if g > 1:
            reduced = _from_terms({t: c // g for t, c in terms.items()}, c0 // g)
            return mod(reduced, n // g) * g + c0 % g
        if r.op == "mod" and r.attr == "index" and r.args[1].op == "const":
            if int(r.args[1].attr) % n == 0:
                return mod(r.args[0], n)
    return make("mod", (r, k), "index", INT64, 0, k.hi - 1)


def ge0(e: Expr) -> Expr:
    """The condition e >= 0, decided where the bounds allow."""
    if e.lo >= 0:
        return TRUE
    if e.hi < 0:
        return FALSE
    return make("ge0", (e,), None, BOOL, 0, 1)


def lt(a: Index, b: Index) -> Expr:
    """The condition a < b."""
    return ge0(lift(b) - lift(a) - 1)


def both(a: Expr, b: Expr) -> Expr:
    """a and b."""
    if FALSE in (a, b):
        return FALSE
    if a is TRUE or a is b:
        return b
    if b is TRUE:
        return a
    return op("and", a, b)


def minimum(a: Index, b: Index) -> Expr:
    x, y = lift(a), lift(b)
    if (y - x).lo >= 0:
        return x
    return y if (x - y).lo >= 0 else op("min", x, y)


def maximum(a: Index, b: Index) -> Expr:
    x, y = lift(a), lift(b)
    if (y - x).lo >= 0:
        return y
    return x if (x - y).lo >= 0 else op("max", x, y)


def evaluate(e: Index, env: dict[str, int]) -> int:
    """The number that `e` stands for, given the symbols' values."""
    if isinstance(e, int):
        return e
    if e.op == "const":
        return int(e.attr)
    if e.op == "var":
        return int(env[e.attr[0]])
    a = [evaluate(x, env) for x in e.args]
    if e.op == "affine":
        return int(e.attr[0]) + sum(int(c) * x for c, x in zip(e.attr[1], a))
    if e.op == "mul":
        return a[0] * a[1]
    if e.op == "floordiv" or e.op == "mod" and e.attr == "index":
        return a[0] // a[1] if e.op == "floordiv" else a[0] % a[1]
    if e.op in ("min", "max"):
        return min(a) if e.op == "min" else max(a)
    raise AssertionError(f"not an index expression: {e}")
