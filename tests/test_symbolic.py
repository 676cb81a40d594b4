"""Index arithmetic: what the normal form says must be what Python's integers say."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from tinyedge.codegen import symbolic
from tinyedge.codegen.ir import Expr, const, substitute, var
from tinyedge.codegen.symbolic import FALSE, TRUE, both, evaluate, ge0, lt

VARIABLES = [var("a", 0, 3), var("b", 0, 7), var("c", -2, 2), var("n", 1, 5)]
Plain = tuple[str, "Plain | int | str", "Plain | int | str"] | int | str

leaves = st.one_of(st.sampled_from(["a", "b", "c", "n"]), st.integers(-20, 40))
nodes = st.recursive(leaves, lambda inner: st.one_of(
    st.tuples(st.sampled_from(["add", "sub", "min", "max"]), inner, inner),
    # divisors and most factors are constants, as in layouts
    st.tuples(st.sampled_from(["div", "mod"]), inner,
              st.one_of(st.sampled_from([1, 2, 3, 4, 6, 8, 16]), st.just("n"))),
    st.tuples(st.just("mul"), inner, st.one_of(st.sampled_from([-3, 0, 1, 2, 4, 8]), inner)),
), max_leaves=10)


def built(p: Plain) -> Expr:
    """The expression in normal form."""
    if isinstance(p, int):
        return const(p)
    if isinstance(p, str):
        return next(v for v in VARIABLES if v.attr[0] == p)
    op, x, y = p[0], built(p[1]), built(p[2])
    return {"add": lambda: x + y, "sub": lambda: x - y, "mul": lambda: x * y,
            "div": lambda: x // y, "mod": lambda: x % y,
            "min": lambda: symbolic.minimum(x, y), "max": lambda: symbolic.maximum(x, y)}[op]()


def plain(p: Plain, env: dict[str, int]) -> int:
    """The same in Python's integers."""
    if isinstance(p, int):
        return p
    if isinstance(p, str):
        return env[p]
    x, y = plain(p[1], env), plain(p[2], env)
    return {"add": lambda: x + y, "sub": lambda: x - y, "mul": lambda: x * y,
            "div": lambda: x // y, "mod": lambda: x % y,
            "min": lambda: min(x, y), "max": lambda: max(x, y)}[p[0]]()


def environments() -> list[dict[str, int]]:
    names = [v.attr[0] for v in VARIABLES]
    return [dict(zip(names, values))
            for values in product(*(range(v.lo, v.hi + 1) for v in VARIABLES))]


EVERY = environments()


@settings(max_examples=400)
@given(nodes)
def test_value_and_bounds(p: Plain) -> None:
    e = built(p)
    for env in EVERY[::7]:
        want = plain(p, env)
        assert evaluate(e, env) == want, (e, env)
        assert e.lo <= want <= e.hi, (e, e.lo, e.hi, env)


@settings(max_examples=200)
@given(nodes, nodes)
def test_conditions(p: Plain, q: Plain) -> None:
    x, y = built(p), built(q)
    below = lt(x, y)
    if below in (TRUE, FALSE):
        assert all((plain(p, env) < plain(q, env)) is (below is TRUE) for env in EVERY[::5])
    else:
        assert below.op == "ge0"
        for env in EVERY[::11]:
            assert (evaluate(below.args[0], env) >= 0) == (plain(p, env) < plain(q, env))


@settings(max_examples=200)
@given(nodes, nodes)
def test_substitution(p: Plain, q: Plain) -> None:
    """Replacing a variable by an expression within its bounds."""
    a = VARIABLES[0]
    inner = symbolic.minimum(symbolic.maximum(built(q), a.lo), a.hi)
    e = substitute(built(p), {a: inner})
    for env in EVERY[::11]:
        there = {**env, "a": min(max(plain(q, env), a.lo), a.hi)}
        assert evaluate(e, env) == plain(p, there)
        assert e.lo <= evaluate(e, env) <= e.hi


@given(nodes, nodes)
def test_equal_sums_are_one_object(p: Plain, q: Plain) -> None:
    x, y = built(p), built(q)
    assert x + y is y + x
    assert (x + y) - y is x
    assert (x + 3) * 4 is x * 4 + 12


def test_blocked_layouts_come_apart() -> None:
    o, i, t = var("o", 0, 99), var("i", 0, 15), var("t", 0, 2)
    assert (16 * o + i) // 16 is o and (16 * o + i) % 16 is i
    assert (16 * o + i + 16 * t) // 16 is o + t
    # a row-major number taken apart into its dimensions, and put together again
    x, y, z = var("x", 0, 4), var("y", 0, 6), var("z", 0, 8)
    number = (x * 7 + y) * 9 + z
    assert number // 63 is x and number // 9 % 7 is y and number % 9 is z
    assert (number // 9) * 9 + number % 9 is number
    assert number // 9 // 7 is number // 63
    assert (4 * o + 2) // 2 is 2 * o + 1 and (4 * o + 2) % 2 is const(0)


def test_symbols_divide_out() -> None:
    n, i, j = var("rows", 1, 1000), var("i", 0, 999), var("j", 0, 0)
    assert (n * i) // n is i and (n * i) % n is const(0)
    assert (n * i + j) // n is i
    assert (n * 6) // 2 is n * 3


def test_conditions_are_decided_by_bounds() -> None:
    i = var("i", 0, 9)
    assert ge0(i) is TRUE and lt(i, 10) is TRUE and lt(i, 0) is FALSE
    assert both(TRUE, lt(i, 5)) is lt(i, 5) and both(lt(i, 5), FALSE) is FALSE
    assert symbolic.minimum(i, 20) is i and symbolic.maximum(i, 9).attr == 9
