"""Loop IR: the expressions and statements inside one kernel.

Stands between the tensor IR (`tinyedge.graph`), which says what is computed, and the renderers
(`tinyedge.codegen.render`), which write it in a target's language.

Grammar
=======

Expressions are immutable and hash-consed: two equal expressions are one object, so equality is
identity and common subexpressions are found for free. Every expression has a dtype; integer ones
also know inclusive bounds ``lo..hi``.

::

    expr  := const value                 a literal
           | var name lo hi              a loop variable, or a run-time symbol (a named dimension)
           | affine c0 + c1*e1 + ...     64-bit index arithmetic, always in normal form
           | floordiv e k | mod e k      index arithmetic, rounded towards minus infinity; k > 0
           | mul e e                     a product of two non-constant index expressions
           | ge0 e                       e >= 0, the one form of an index condition
           | load buffer index [guard]   an element; where guard is false nothing is read, value 0
           | reg name                    the present value of a register
           | OP e ...                    an elementwise operation of the tensor IR, same name
           | cast e                      to the node's dtype; bitcast e likewise, same bits
           | where c a b                 both sides are evaluated; guards live in loads
           | reduce OP vars body         only before scheduling: folds body over vars
           | hreduce OP e                only after scheduling: folds the lanes of e
          | together OP reg             only after scheduling: folds what a team's registers hold
          | prefetch buffer index       0; asks for memory, which may lie behind the buffer's end

    stmt  := for var extent body         extent >= 0 iterations, var counts from 0
           | set reg e                   registers hold a scalar, or a vector if e depends on lane
           | store buffer index e [guard]

    kernel := name, buffers, grid extent, body

Evaluation
==========

A kernel's body is evaluated once for each value of its grid variable, in any order and on any
thread; no two of those evaluations store to one place, unless with the same value. Inside,
statements are evaluated in order. An expression is pure, so a renderer may evaluate it anywhere
after its variables and registers have their values, once or many times. Where a kernel has a
team, each of its invocations evaluates the piece with its own ``team``, and ``together`` gives all
of them the fold of what they hold. The variable named
``lane`` is not a loop: an expression that depends on it denotes all its values at once (a vector),
and a store that depends on it stores them all. A guarded load or store touches memory only where
the guard holds. Floating point is evaluated as written, except that ``a*b + c`` may be contracted
into a fused multiply-add.

The integer normal form lives in `tinyedge.codegen.symbolic`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakValueDictionary
from zlib import crc32

from tinyedge.dtype import BOOL, FLOAT64, INT64, DType

Key = tuple[Any, ...]
_table: WeakValueDictionary[Key, Expr] = WeakValueDictionary()


class Expr:
    """One node of an expression; made by `make` and the constructors of `symbolic` only.

    op, args, attr, dtype: see the grammar. lo, hi: inclusive bounds (ints of Python's size; for
    other than integers and booleans they are 0). vars: every `var` and `reg` below. serial: a
    checksum of the structure, for an order of terms that is the same in every process.
    """

    __slots__ = ("op", "args", "attr", "dtype", "lo", "hi", "vars", "serial", "__weakref__")
    op: str
    args: tuple[Expr, ...]
    attr: Any
    dtype: DType
    lo: int
    hi: int
    vars: frozenset[Expr]
    serial: int

    def __repr__(self) -> str:
        return show(self)

    def __add__(self, other: Any) -> Expr:
        return symbolic.add(self, other)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Expr:
        return symbolic.mul(self, other)

    __rmul__ = __mul__

    def __neg__(self) -> Expr:
        return symbolic.mul(self, -1)

    def __sub__(self, other: Any) -> Expr:
        return symbolic.add(self, symbolic.mul(other, -1))

    def __rsub__(self, other: Any) -> Expr:
        return symbolic.add(other, symbolic.mul(self, -1))

    def __floordiv__(self, other: Any) -> Expr:
        return symbolic.floordiv(self, other)

    def __mod__(self, other: Any) -> Expr:
        return symbolic.mod(self, other)


def make(
    op: str, args: tuple[Expr, ...], attr: Any, dtype: DType, lo: int = 0, hi: int = 0
) -> Expr:
    """The one expression with these parts (no simplification)."""
    key = (op, args, attr, dtype)
    found = _table.get(key)
    if found is not None:
        return found
    e = Expr.__new__(Expr)
    e.op, e.args, e.attr, e.dtype, e.lo, e.hi = op, args, attr, dtype, lo, hi
    if op in ("var", "reg"):
        e.vars = frozenset((e,))
    elif not args:
        e.vars = frozenset()
    elif len(args) == 1:
        e.vars = args[0].vars
    else:
        e.vars = args[0].vars.union(*(a.vars for a in args[1:]))
    if op == "reduce":
        e.vars = e.vars - set(attr[1])
    e.serial = crc32(f"{op} {attr} {[a.serial for a in args]}".encode())
    _table[key] = e
    return e


def const(value: int | float | bool, dtype: DType = INT64) -> Expr:
    """A literal. Floats are keyed by their bits, so that 0.0 and -0.0 differ and nan is one."""
    if dtype.is_float:
        # the hex form tells zeros apart and is the same for every nan
        return make("const", (), float(value).hex(), dtype)
    v = int(value)
    return make("const", (), v, dtype, v, v)


def value_of(e: Expr) -> int | float:
    """The Python value of a `const`."""
    return float.fromhex(e.attr) if e.dtype.is_float else int(e.attr)


def var(name: str, lo: int, hi: int) -> Expr:
    """A loop variable or symbol with inclusive bounds."""
    return make("var", (), (name, lo, hi), INT64, lo, hi)


LANE = "lane"
TEAM = "team"
"""The variable that numbers the invocations which share a piece."""


def lane(width: int) -> Expr:
    """The vector variable of `width` lanes."""
    return var(LANE, 0, width - 1)


def reg(name: str, dtype: DType, over: Iterable[Expr] = ()) -> Expr:
    """Reads a register. `over`: (lane,) if it holds a vector."""
    return make("reg", tuple(over), name, dtype, *(dtype.limits if not dtype.is_float else (0, 0)))


def load(buffer: int, index: Expr, dtype: DType, guard: Expr | None = None) -> Expr:
    """An element of a kernel's buffer number `buffer` at `index` (in elements)."""
    args = (index,) if guard is None else (index, guard)
    return make("load", args, buffer, dtype, *(dtype.limits if not dtype.is_float else (0, 0)))


COMPARISONS = frozenset(("eq", "ne", "lt", "le"))
INFINITE = (-(1 << 63), (1 << 63) - 1)


def op(name: str, *args: Expr, dtype: DType | None = None) -> Expr:
    """An elementwise operation; comparisons give BOOL, all others the last argument's dtype."""
    t = dtype or (BOOL if name in COMPARISONS or name == "isnan" else args[-1].dtype)
    if t.is_float:
        return make(name, args, None, t)
    lo, hi = t.limits
    a = args
    if name == "where":
        lo, hi = min(a[1].lo, a[2].lo), max(a[1].hi, a[2].hi)
    elif name == "min" and not a[0].dtype.is_float:
        lo, hi = min(a[0].lo, a[1].lo), min(a[0].hi, a[1].hi)
    elif name == "max" and not a[0].dtype.is_float:
        lo, hi = max(a[0].lo, a[1].lo), max(a[0].hi, a[1].hi)
    elif name == "cast" and not a[0].dtype.is_float and lo <= a[0].lo and a[0].hi <= hi:
        lo, hi = a[0].lo, a[0].hi
    return make(name, args, None, t, lo, hi)


def reduce(name: str, over: Iterable[Expr], body: Expr) -> Expr:
    """Fold `body` over every value of the variables `over` by sum, prod, max or min."""
    lims = body.dtype.limits if not body.dtype.is_float else (0, 0)
    return make("reduce", (body,), (name, tuple(over)), body.dtype, *lims)


@dataclass(frozen=True)
class For:
    """A serial loop."""

    var: Expr
    extent: Expr
    body: tuple[Stmt, ...]


@dataclass(frozen=True)
class Set:
    """Gives a register a value."""

    reg: Expr
    value: Expr


@dataclass(frozen=True)
class Store:
    """Writes an element, or a vector if index depends on the lane."""

    buffer: int
    index: Expr
    value: Expr
    guard: Expr | None = None


Stmt = For | Set | Store


@dataclass(frozen=True)
class Kernel:
    """A scheduled kernel, ready to render.

    buffers: (dtype, written) of each argument. symbols: names of the run-time symbols, in the
    order of the scalar arguments. grid: how many independent pieces; `grid_var` numbers them.
    lanes: width of the vector variable. local: number of a buffer -> elements, for those that are
    no arguments (the last ones): memory of a piece, whose contents are gone after it. team:
    invocations that share each piece, numbered by the variable ``team``. whole: of each buffer,
    whether its memory ends with a whole group of four elements.
    shares: the buffers that are written, or may share an object with one that is. flops, bytes:
    estimates for reports.
    """

    name: str
    buffers: tuple[tuple[DType, bool], ...]
    symbols: tuple[str, ...]
    grid_var: Expr
    grid: Expr
    body: tuple[Stmt, ...]
    lanes: int = 1
    local: Mapping[int, int] = field(default_factory=dict)
    team: int = 1
    whole: tuple[bool, ...] = ()
    shares: tuple[int, ...] = ()
    flops: int = 0
    bytes: int = 0
    notes: tuple[str, ...] = field(default=())


def show(e: Expr, names: Mapping[Expr, str] | None = None) -> str:
    """One-line text of an expression; `names` stand for parts of it."""
    if names and e in names:
        return names[e]
    if e.op == "const":
        return f"{value_of(e):g}" if e.dtype.is_float else str(e.attr)
    if e.op == "var":
        return str(e.attr[0])
    if e.op == "reg":
        return f"%{e.attr}"
    if e.op == "affine":
        c0, coefs = e.attr
        terms = [("" if c == 1 else f"{c}*") + show(a, names) for c, a in zip(coefs, e.args)]
        if c0:
            terms.append(str(c0))
        return "(" + " + ".join(terms) + ")"
    args = ", ".join(show(a, names) for a in e.args)
    if e.op in ("load", "word", "prefetch"):
        return f"b{e.attr}[{args}{'' if e.op == 'load' else ':' + e.op}]"
    if e.op in ("cast", "bitcast"):
        return f"{e.op}.{e.dtype.name}({args})"
    if e.op == "reduce":
        over = " ".join(f"{v.attr[0]}<{v.hi + 1}" for v in e.attr[1])
        return f"{e.attr[0]}[{over}]({args})"
    if e.op == "hreduce":
        return f"lanes.{e.attr}({args})"
    return f"{e.op}({args})"


def dump(roots: Iterable[Expr]) -> str:
    """Text that is equal for equal expressions and for no others, linear in their size."""
    number: dict[Expr, int] = {}
    out: list[str] = []
    ends = list(roots)
    stack = [(e, False) for e in reversed(ends)]
    while stack:
        e, ready = stack.pop()
        if e in number:
            continue
        if ready:
            number[e] = len(number)
            args = " ".join(str(number[a]) for a in e.args)
            out.append(f"{e.op} {e.attr} {e.dtype.name} {args}")
        else:
            stack.append((e, True))
            stack.extend((a, False) for a in reversed(e.args))
    out.append(" ".join(str(number[e]) for e in ends))
    return "\n".join(out)


def repeated(roots: Iterable[Expr]) -> list[Expr]:
    """What stands in the expressions more than once, operands first; indices of loads apart."""
    times: dict[Expr, int] = {}
    order: list[Expr] = []

    def visit(e: Expr) -> None:
        if e.op in ("const", "var", "reg"):
            return
        times[e] = times.get(e, 0) + 1
        if times[e] == 1:
            for a in () if e.op == "load" else e.args:
                visit(a)
            order.append(e)

    for e in roots:
        visit(e)
    return [e for e in order if times[e] > 1 and e.op != "affine"]


def show_kernel(k: Kernel) -> str:
    """The text of a whole kernel, one statement a line; before it what it uses more than once."""
    number = count()
    out = [f"kernel {k.name} grid {k.grid_var} < {show(k.grid)} lanes {k.lanes}"]

    def walk(body: tuple[Stmt, ...], depth: int) -> None:
        pad = "  " * depth
        for s in body:
            if isinstance(s, For):
                out.append(f"{pad}for {show(s.var)} < {show(s.extent)}:")
                walk(s.body, depth + 1)
                continue
            names: dict[Expr, str] = {}
            for e in repeated([s.value]):
                text = show(e, names)
                names[e] = f"%t{next(number)}"
                out.append(f"{pad}{names[e]} = {text}")
            if isinstance(s, Set):
                out.append(f"{pad}{show(s.reg)} = {show(s.value, names)}")
            else:
                guard = f" if {show(s.guard)}" if s.guard is not None else ""
                out.append(f"{pad}b{s.buffer}[{show(s.index)}] = {show(s.value, names)}{guard}")

    walk(k.body, 1)
    return "\n".join(out)


def substitute(e: Expr, env: dict[Expr, Expr], memo: dict[Expr, Expr] | None = None) -> Expr:
    """`e` with variables (or any subexpression) replaced, brought to normal form again.

    One `memo` may be shared by calls with the same env.
    """
    memo = {} if memo is None else memo

    def go(x: Expr) -> Expr:
        if x in env:
            return env[x]
        if not x.args or (x.vars.isdisjoint(env) and not deep):
            return x
        done = memo.get(x)
        if done is None:
            args = tuple(go(a) for a in x.args)
            done = x if args == x.args else rebuild(x, args)
            memo[x] = done
        return done

    deep = any(k.op not in ("var", "reg") for k in env)
    return go(e)


def runs(index: Expr, lane: Expr, lanes: int) -> list[tuple[int, list[int]]] | None:
    """(distance from lane 0's element, lanes) of what the lanes read side by side; None where that
    varies or the pieces are too many. Interleaved channels are read so."""
    first = substitute(index, {lane: const(0)})
    places: list[tuple[int, int]] = []
    for k in range(lanes):
        away = substitute(index, {lane: const(k)}) - first
        if away.op != "const":
            return None
        places.append((int(away.attr), k))
    out: list[tuple[int, list[int]]] = []
    for place, k in sorted(places):
        if out and place == out[-1][0] + len(out[-1][1]):
            out[-1][1].append(k)
        else:
            out.append((place, [k]))
    return out if 2 * len(out) <= lanes else None


def rebuild(x: Expr, args: tuple[Expr, ...]) -> Expr:
    """The node `x` with other arguments, simplified as its constructor would."""
    if x.op == "affine":
        c0, coefs = x.attr
        return symbolic.linear_sum(zip(coefs, args), c0)
    if x.op == "floordiv":
        return symbolic.floordiv(*args)
    if x.op == "mod" and x.attr == "index":
        return symbolic.mod(*args)
    if x.op == "mul" and x.attr == "index":
        return symbolic.mul(*args)
    if x.op == "ge0":
        return symbolic.ge0(args[0])
    if x.op == "load":
        if len(args) == 2 and args[1].op == "const":
            return load(x.attr, args[0], x.dtype) if args[1].attr else const(0, x.dtype)
        return load(x.attr, args[0], x.dtype, args[1] if len(args) == 2 else None)
    if x.op == "where" and args[0].op == "const":
        return args[1] if args[0].attr else args[2]
    if x.op == "and":
        return symbolic.both(*args) if x.dtype is BOOL else op("and", *args)
    if x.op in ("reduce", "reg", "hreduce", "together", "const", "word", "dot", "prefetch"):
        return make(x.op, args, x.attr, x.dtype, x.lo, x.hi)
    return op(x.op, *args, dtype=x.dtype)


from . import symbolic  # noqa: E402  (the two modules are one grammar; symbolic needs make)

__all__ = [
    "BOOL", "FLOAT64", "INT64", "Expr", "For", "Kernel", "Set", "Stmt", "Store", "const", "lane",
    "load", "make", "op", "reduce", "reg", "runs", "show", "show_kernel", "substitute", "value_of",
    "var",
]
