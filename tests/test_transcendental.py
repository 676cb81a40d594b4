"""Accuracy and special cases of the transcendental functions, against numpy in a wider type."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinyedge.codegen.ir import Expr, op, value_of, var
from tinyedge.codegen.transcendental import NAMES, expand
from tinyedge.dtype import FLOAT16, FLOAT32, FLOAT64, DType

Array = np.ndarray[Any, Any]
CALLS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "min": np.minimum,
    "max": np.maximum, "abs": np.abs, "neg": np.negative, "trunc": np.trunc, "isnan": np.isnan,
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "where": np.where, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "shl": np.left_shift,
    "shr": np.right_shift,
}


def evaluate(e: Expr, env: dict[Expr, Array], fused: bool) -> Array:
    """`e` on whole arrays; `fused` contracts float32 products into sums as a target may."""
    memo: dict[Expr, Array] = dict(env)

    def product(x: Expr) -> Array:
        a, b = (go(i).astype(np.float64) for i in x.args)
        out: Array = a * b
        return out

    def go(x: Expr) -> Array:
        if x in memo:
            return memo[x]
        t = x.dtype.numpy
        out: Array
        if x.op == "const":
            out = np.array(value_of(x), t)
        elif x.op == "cast":
            out = go(x.args[0]).astype(t)
        elif x.op == "bitcast":
            out = go(x.args[0]).view(t)
        elif fused and x.dtype is FLOAT32 and x.op in ("add", "sub") and \
                "mul" in (x.args[0].op, x.args[1].op):
            # the product of two float32 is exact in float64, so only the sum is rounded
            i = 1 if x.args[1].op == "mul" else 0
            pair = [go(a).astype(np.float64) for a in x.args]
            pair[i] = product(x.args[i])
            out = CALLS[x.op](*pair).astype(np.float32)
        else:
            out = np.asarray(CALLS[x.op](*(go(a) for a in x.args)))
        assert out.dtype == t, x
        memo[x] = out
        return out

    with np.errstate(all="ignore"):
        return go(e)


def call(name: str, *args: Array, fused: bool = False, dtype: DType = FLOAT32) -> Array:
    """The expanded function on arrays."""
    names = [op("cast", var(f"x{i}", 0, 9), dtype=dtype) for i in range(len(args))]
    e = expand(op(name, *names))
    return evaluate(e, dict(zip(names, args)), fused)


def ulps(got: Array, want: Array) -> Array:
    """Distance in units in the last place of `got`'s type; `want` is wider, both without nan."""
    t = got.dtype.type
    with np.errstate(all="ignore"):
        nearest = want.astype(t)
        unit = np.spacing(np.abs(np.where(np.isinf(nearest), np.finfo(t).max, nearest)))
        distance = np.abs(got.astype(want.dtype) - want) / unit.astype(want.dtype)
    # a result that overflows in the narrow type must do so here
    distance[np.isinf(nearest) & (got == nearest)] = 0
    out: Array = distance
    return out


SPECIAL = [
    0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1e-45, -1e-45, 1.1754942e-38,
    1.1754944e-38, -1.1754944e-38, 3.4028235e38, -3.4028235e38, 88.72283, 88.72284, 88.8, -87.33654,
    -87.4, -103.27893, -103.97207, -103.97208, -104.0, 9.01, 9.02, 9.03, 3.92, 3.93, 3.94,
    0.99999994, 1.0000001, math.pi, math.pi / 2, 2 * math.pi, 1e5, -1e5, 16777216.0, 8388607.5,
]


def samples(step: int = 1021) -> Array:
    """Every `step`-th float32 bit pattern, and the special ones."""
    bits = np.arange(0, 1 << 32, step, dtype=np.int64).astype(np.uint32).view(np.float32)
    return np.concatenate([bits, np.array(SPECIAL, np.float32)])


def wide_erf(x: Array) -> Array:
    return np.array([math.erf(v) for v in x])


WIDE: dict[str, Callable[[Array], Array]] = {
    "exp": np.exp, "log": np.log, "sin": np.sin, "cos": np.cos, "tanh": np.tanh, "erf": wide_erf,
}
LIMIT = {"exp": 2.0, "log": 1.0, "sin": 3.0, "cos": 3.0, "tanh": 3.0, "erf": 3.0, "pow": 3.0}


def reference(name: str, *xs: Array) -> Array:
    """The function in float64 (for float32 operands: exact enough to measure ulps)."""
    with np.errstate(all="ignore"):
        wide = [x.astype(np.float64) for x in xs]
        return np.asarray(np.power(*wide) if name == "pow" else WIDE[name](wide[0]))


def compare(name: str, got: Array, *xs: Array) -> None:
    """`got` has nan where the reference has, and is within the function's stated limit."""
    want = reference(name, *xs)
    here = tuple(x[np.isnan(got) != np.isnan(want)][:5] for x in xs)
    assert not here[0].size, f"nan differs at {here}"
    ok = ~np.isnan(want)
    off = ulps(got[ok], want[ok])
    worst = int(off.argmax())
    assert off[worst] <= LIMIT[name], f"{off[worst]} ulp at {[float(x[ok][worst]) for x in xs]}"


def focused(name: str) -> Array:
    """Values where the function does most of its work, closer together."""
    low, high = {"exp": (-104, 89), "log": (0.5, 2), "sin": (-1e5, 1e5), "cos": (-1e5, 1e5),
                 "tanh": (-9.2, 9.2), "erf": (-4, 4)}[name]
    near = np.linspace(-7, 7, 30_001) if name in ("sin", "cos") else np.empty(0)
    # multiples of a quarter turn are where an argument's reduction loses most
    turns = np.arange(-63_660, 63_660, 7) * (math.pi / 2) if name in ("sin", "cos") else near
    return np.concatenate([np.linspace(low, high, 100_001), near, turns]).astype(np.float32)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("name", sorted(WIDE))
def test_float32(name: str, fused: bool) -> None:
    # the reference of erf is not vectorised
    x = np.concatenate([samples(16_381 if name == "erf" else 4_093), focused(name)])
    if name in ("sin", "cos"):
        got = call(name, x, fused=fused)
        assert (np.abs(got[np.isfinite(x)]) <= 1).all() and np.isnan(got[~np.isfinite(x)]).all()
        x = x[np.abs(x) <= 1e5]
    got = call(name, x, fused=fused)
    compare(name, got, x)
    if name in ("tanh", "erf"):
        assert np.nanmax(np.abs(got)) == 1


def pairs() -> tuple[Array, Array]:
    """Bases and exponents: everyday ones, near one, far out, and all pairs of special ones."""
    rng = np.random.default_rng(0)
    n = 60_000
    everyday = rng.uniform(0, 20, n), rng.uniform(-20, 20, n)
    near_one = 1 + rng.uniform(-1e-3, 1e-3, n), rng.uniform(-9e4, 9e4, n)
    far = 2.0 ** rng.uniform(-149, 128, n), rng.uniform(-4, 4, n)
    whole = -rng.uniform(0, 20, n), rng.integers(-12, 13, n).astype(np.float64)
    special = np.array([0, -0.0, 1, -1, math.inf, -math.inf, math.nan, 0.5, -0.5, 2, -2, 3, -3,
                        1e-45, -1e-45, 1e-40, 3.4e38, -3.4e38, 1e-30, 16777215, -16777215, 16777216,
                        0.1])
    x, y = np.meshgrid(special, special)
    xs = np.concatenate([everyday[0], near_one[0], far[0], whole[0], x.ravel()])
    ys = np.concatenate([everyday[1], near_one[1], far[1], whole[1], y.ravel()])
    return xs.astype(np.float32), ys.astype(np.float32)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_pow_float32(fused: bool) -> None:
    x, y = pairs()
    got = call("pow", x, y, fused=fused)
    compare("pow", got, x, y)
    want = np.asarray(reference("pow", x, y))
    # zeros and infinities carry the sign that C99 gives them
    edge = (want == 0) | np.isinf(want)
    assert np.array_equal(np.signbit(got[edge]), np.signbit(want[edge]))


def test_float64() -> None:
    x = np.concatenate([np.linspace(-40, 40, 20_001), np.geomspace(1e-300, 1e300, 5_001),
                        [0.0, -0.0, 5e-324, 709.7, 709.8, -745.1, -746, math.inf, -math.inf,
                         math.nan]])
    with np.errstate(all="ignore"):
        for name, function in WIDE.items():
            a = x[(np.abs(x) <= 1e7) | ~np.isfinite(x)] if name in ("sin", "cos") else x
            got = call(name, a, dtype=FLOAT64)
            want = function(np.where(np.isinf(a), math.nan, a)) if name in ("sin", "cos") \
                else function(a)
            np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-13 if name in ("sin", "cos")
                                       else 5e-324, err_msg=name)
        base, exponent = np.meshgrid(np.concatenate([np.abs(x[::97]), x[-10:]]),
                                     [0.0, 1.0, -1.0, 2.5, -7.0, 0.1, 300.0, math.inf, -math.inf,
                                      math.nan])
        got = call("pow", base, exponent, dtype=FLOAT64)
        np.testing.assert_allclose(got, np.power(base, exponent), rtol=1e-13, atol=5e-324)


def test_float16_is_exact_to_one_place() -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    for name, function in WIDE.items():
        got = call(name, x, dtype=FLOAT16)
        with np.errstate(all="ignore"):
            a = x.astype(np.float64)
            want = function(np.where(np.isinf(a), math.nan, a)) if name in ("sin", "cos") \
                else function(a)
        assert np.array_equal(np.isnan(got), np.isnan(want))
        ok = ~np.isnan(want)
        assert ulps(got[ok], want[ok]).max() <= 0.501, name


def test_only_basic_operations_are_left() -> None:
    for name in NAMES:
        for t in (FLOAT16, FLOAT32, FLOAT64):
            x = op("cast", var("x", 0, 9), dtype=t)
            seen = set()
            stack = [expand(op(name, *[x] * (2 if name == "pow" else 1)))]
            while stack:
                e = stack.pop()
                seen.add(e.op)
                stack.extend(e.args)
            assert seen <= {*CALLS, "cast", "bitcast", "const", "var"}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_compiled(name: str) -> None:
    import tinyedge
    from tinyedge import graph as g
    from tinyedge.compiler import compile_graph

    xs = pairs() if name == "pow" else (np.concatenate([samples(65_521), focused(name)[::9]]),)
    if name in ("sin", "cos"):
        xs = (xs[0][np.abs(xs[0]) <= 1e5],)
    inputs = {f"x{i}": g.placeholder(f"x{i}", x.shape, FLOAT32) for i, x in enumerate(xs)}
    graph = g.Graph(inputs, {"y": g.elementwise(name, *inputs.values())})
    with tinyedge.load(compile_graph(graph)) as run:
        got = run({f"x{i}": x for i, x in enumerate(xs)})["y"]
    compare(name, got, *xs)
