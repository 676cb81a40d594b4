"""Loop IR to C11, for embedded users and for reading: one function for each kernel.

The last stage where a target has no code generator of ours. Vectors are loops over lanes with a
constant number of turns, which C compilers unroll and put into vector registers where there are
some. Memory is bytes: elements are read and written by memcpy, which is one instruction, so that no
rule about types of objects is broken by arenas that many tensors share. Integers wrap around: they
are computed as unsigned ones. Nothing but <math.h>, <stdbool.h>, <stdint.h> and <string.h> is used.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from tinyedge.dtype import BOOL, FLOAT16, DType
from tinyedge.errors import UnsupportedError

from ..ir import LANE, Expr, For, Kernel, Set, Stmt, Store, value_of
from ..llvm_target import CpuTarget
from .llvm import _lane, _loaded, _within

TYPES = {"bool": "bool", "float32": "float", "float64": "double", "float16": "uint16_t"}
FLOAT_OPS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
INT_OPS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "shl": "<<"}
TESTS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<="}
FUNCTIONS = {"sqrt": "sqrt", "floor": "floor", "ceil": "ceil", "round": "nearbyint",
             "trunc": "trunc", "abs": "fabs"}
"""nearbyint: to the nearest even, as the default rounding mode has it."""

LOAD = """static inline {c} load_{t}(const unsigned char *p, int64_t i)
{{
    {c} v;
    memcpy(&v, p + i * (int64_t)sizeof v, sizeof v);
    return v;
}}
"""
STORE = """static inline void store_{t}(unsigned char *p, int64_t i, {c} v)
{{
    memcpy(p + i * (int64_t)sizeof v, &v, sizeof v);
}}
"""
BITS = """static inline {c} bits_{s}_{t}({d} x)
{{
    {c} v;
    memcpy(&v, &x, sizeof v);
    return v;
}}
"""
EXTREME = """static inline {c} {name}_{t}({c} a, {c} b)
{{
    if (isnan(a) || isnan(b))
        return a + b;
    if (a == b)
        return signbit(a) ? {same};
    return a {test} b ? a : b;
}}
"""
SATURATE = """static inline {c} {t}_from_{s}({d} x)
{{
    if (isnan(x))
        return 0;
    if (x <= {low})
        return {least};
    return x >= {high} ? {most} : ({c})x;
}}
"""
DIVIDE = """static inline {c} div_{t}({c} a, {c} b)
{{
    if (b == 0)
        return a;
    return {minus}({c})(a / b);
}}
"""
MODULO = """static inline {c} mod_{t}({c} a, {c} b)
{{
    if (b == 0{minus})
        return 0;
    {c} r = ({c})(a % b);
    return {fix}r;
}}
"""
FLOOR = """static inline int64_t floordiv(int64_t a, int64_t b)
{
    return a / b - (a % b < 0);
}
"""
FLOORMOD = """static inline int64_t floormod(int64_t a, int64_t b)
{
    return a % b + (a % b < 0 ? b : 0);
}
"""
WIDEN = """static inline float widen(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu, bits;
    float v;
    if (rest >= 0x7c00u)
        bits = sign | 0x7f800000u | (rest & 0x3ffu) << 13;
    else if (rest >= 0x400u)
        bits = sign | ((rest << 13) + 0x38000000u);
    else {
        v = (float)rest * 0x1p-24f;
        return sign ? -v : v;
    }
    memcpy(&v, &bits, sizeof v);
    return v;
}
"""


PAD = 64
"""Bytes behind memory that a vector may be read whole at the end of."""

SEPARATOR = "\f"
"""Between the definitions that a kernel's source needs, and itself."""


def c_type(t: DType) -> str:
    """The type of a value of `t` in C; float16 is its bits, which only casts look into."""
    return TYPES.get(t.name) or f"{t.name}_t"


def literal(v: int | float, t: DType) -> str:
    """A constant of type `t`."""
    if not t.is_float:
        if t is BOOL:
            return "true" if v else "false"
        if v == t.limits[0] and t.kind == "i":
            return f"{t.name.upper()}_MIN"
        wide = {"int64": f"INT64_C({v})", "uint64": f"UINT64_C({v})", "uint32": f"{v}u"}
        return wide.get(t.name, str(int(v)))
    if t is FLOAT16:
        return f"0x{struct.unpack('<H', struct.pack('<e', v))[0]:04x}u"
    if v != v:
        return "NAN"
    suffix = "f" if t.bits == 32 else ""
    if t.bits == 32 and abs(v) != math.inf:
        try:
            v = struct.unpack("<f", struct.pack("<f", v))[0]
        except OverflowError:
            v = math.copysign(math.inf, v)
    if abs(v) == math.inf:
        return "INFINITY" if v > 0 else "-INFINITY"
    return f"{float(v).hex()}{suffix}"


@dataclass
class Scope:
    """A block while it is being written: declarations, and what has a name there."""

    pad: str
    lines: list[str] = field(default_factory=list)
    memo: dict[Expr, str] = field(default_factory=dict)


class Renderer:
    """Writes one kernel; use `render`."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.lanes = kernel, kernel.lanes
        self.helpers: dict[str, str] = {}
        self.names: dict[Expr, str] = {}
        self.regs: dict[Expr, str] = {}
        self.scopes = [Scope("    ")]
        self.inner: Scope | None = None
        self.passing: dict[Expr, str] = {}
        self.count = 0
        self.written = {i for i, (_, w) in enumerate(kernel.buffers) if w}
        loads = set[int]()
        _loaded(kernel.body, loads, set())
        self.read_write = bool(loads & self.written)

    # names

    def fresh(self, stem: str = "v") -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def helper(self, name: str, text: str) -> str:
        self.helpers[name] = text
        return name

    def is_vector(self, e: Expr) -> bool:
        return self.lanes > 1 and e.op != "hreduce" and any(
            v.attr[0] == LANE if v.op == "var" else bool(v.args) for v in e.vars)

    def lasting(self, e: Expr) -> bool:
        """Whether the value stays the same as long as its variables do."""
        return all(v.op != "reg" for v in e.vars) and not (self.read_write and self.reads(e))

    def reads(self, e: Expr) -> bool:
        return e.op == "load" and e.attr in self.written or any(map(self.reads, e.args))

    # expressions

    def emit(self, e: Expr) -> str:
        """The name of a value, or a literal; in the loop over lanes where it depends on them."""
        if e.op == "const":
            return literal(value_of(e), e.dtype)
        if e.op == "var":
            return "0" if e.attr[0] == LANE and self.lanes == 1 else self.names[e]
        if e.op == "reg":
            return self.regs[e] + ("[lane]" if e.args and self.lanes > 1 else "")
        vector = self.is_vector(e)
        for scope in reversed([*self.scopes, *([self.inner] if self.inner else [])]):
            if e in scope.memo:
                return scope.memo[e]
        if e in self.passing:
            return self.passing[e]
        text = self.horizontal(e) if e.op == "hreduce" else self.compute(e)
        scope = self.inner if vector and self.inner is not None else self.scopes[-1]
        name = self.fresh()
        scope.lines.append(f"{scope.pad}const {c_type(e.dtype)} {name} = {text};")
        memo = scope.memo if self.lasting(e) or scope is self.inner else self.passing
        memo[e] = name
        return name

    def compute(self, e: Expr) -> str:
        if e.op == "affine":
            return self.affine(e)
        if e.op == "load":
            return self.load(e)
        a = [self.emit(x) for x in e.args]
        x = e.args[0]
        t = e.dtype
        if e.op == "floordiv" or e.op == "mod" and e.attr == "index":
            whole = e.op == "floordiv"
            if x.lo >= 0:
                return f"{a[0]} {'/' if whole else '%'} {a[1]}"
            name = self.helper("floordiv", FLOOR) if whole else self.helper("floormod", FLOORMOD)
            return f"{name}({a[0]}, {a[1]})"
        if e.op == "mul" and e.attr == "index":
            return f"{a[0]} * {a[1]}"
        if e.op == "ge0":
            return f"{a[0]} >= 0"
        if e.op == "where":
            return f"{a[0]} ? {a[1]} : {a[2]}"
        if e.op == "cast":
            return self.cast(a[0], x, t)
        if e.op == "bitcast":
            if BOOL in (x.dtype, t) or not (x.dtype.is_float or t.is_float):
                return self.cast(a[0], x, t)
            if FLOAT16 in (x.dtype, t):  # its bits already
                return f"({c_type(t)}){a[0]}"
            name = f"bits_{x.dtype.name}_{t.name}"
            return self.helper(name, BITS.format(c=c_type(t), d=c_type(x.dtype), s=x.dtype.name,
                                                 t=t.name)) + f"({a[0]})"
        if x.dtype is FLOAT16:
            raise UnsupportedError(f"{self.kernel.name} computes {e.op} in float16, which C11 has "
                                   "not; compile the model in float32")
        return self.floating(e, a) if x.dtype.is_float else self.integer(e, a)

    def floating(self, e: Expr, a: list[str]) -> str:
        o, t = e.op, e.args[0].dtype
        suffix = "f" if t.bits == 32 else ""
        if o in FLOAT_OPS:
            return f"{a[0]} {FLOAT_OPS[o]} {a[1]}"
        if o == "neg":
            return f"-{a[0]}"
        if o in FUNCTIONS:
            return f"{FUNCTIONS[o]}{suffix}({a[0]})"
        if o in ("max", "min"):
            return self.extreme(o, t, a, e.args)
        if o in TESTS:
            return f"{a[0]} {TESTS[o]} {a[1]}"
        if o == "isnan":
            return f"isnan({a[0]})"
        raise AssertionError(f"no rendering of {o} for {t}")

    def extreme(self, o: str, t: DType, a: list[str], args: tuple[Expr, ...] = ()) -> str:
        """The larger or smaller one; a nan stays."""
        test = ">" if o == "max" else "<"
        for i, x in enumerate(args):
            if x.op == "const" and value_of(x) == value_of(x):
                return f"{a[i]} {test} {a[1 - i]} ? {a[i]} : {a[1 - i]}"
        same = "b : a" if o == "max" else "a : b"
        name = f"{o}_{t.name}"
        text = EXTREME.format(c=c_type(t), t=t.name, name=o, same=same, test=test)
        return f"{self.helper(name, text)}({a[0]}, {a[1]})"

    def integer(self, e: Expr, a: list[str]) -> str:
        o, t = e.op, e.args[0].dtype
        c, wide = c_type(t), "uint64_t" if t.bits == 64 else "uint32_t"
        if t is BOOL:
            logic = {"and": "&&", "or": "||", "max": "||", "min": "&&", "add": "||", "mul": "&&",
                     "xor": "!=", "eq": "==", "ne": "!="}
            if o == "not":
                return f"!{a[0]}"
            if o in ("lt", "le"):
                return f"!{a[0]} && {a[1]}" if o == "lt" else f"!{a[0]} || {a[1]}"
            return f"{a[0]} {logic[o]} {a[1]}"
        if o in INT_OPS:
            return f"({c})(({wide}){a[0]} {INT_OPS[o]} ({wide}){a[1]})"
        if o == "shr":
            return f"({c})({a[0]} >> {a[1]})"
        if o == "not":
            return f"({c})~({wide}){a[0]}"
        if o == "neg":
            return f"({c})(0u - ({wide}){a[0]})"
        if o == "abs":
            return a[0] if t.kind == "u" else f"{a[0]} < 0 ? ({c})(0u - ({wide}){a[0]}) : {a[0]}"
        if o in TESTS:
            return f"{a[0]} {TESTS[o]} {a[1]}"
        if o in ("max", "min"):
            return f"{a[0]} {'>' if o == 'max' else '<'} {a[1]} ? {a[0]} : {a[1]}"
        if o in ("div", "mod"):
            # a division by zero, and the one that overflows, must not trap
            signed = t.kind == "i"
            if o == "div":
                minus = f"b == -1 ? ({c})(0u - ({wide})a) : " if signed else ""
                text = DIVIDE.format(c=c, t=t.name, minus=minus)
            else:
                fix = f"r != 0 && (r < 0) != (b < 0) ? ({c})(r + b) : " if signed else ""
                text = MODULO.format(c=c, t=t.name, fix=fix, minus=" || b == -1" * signed)
            return f"{self.helper(f'{o}_{t.name}', text)}({a[0]}, {a[1]})"
        raise AssertionError(f"no rendering of {o} for {t}")

    def cast(self, a: str, x: Expr, t: DType) -> str:
        s, c = x.dtype, c_type(t)
        if s is t:
            return a
        if s is FLOAT16:
            one = f"{self.helper('widen', WIDEN)}({a})"
            if t.is_float:
                return one if t.bits == 32 else f"({c}){one}"
        if FLOAT16 in (s, t):
            raise UnsupportedError(f"{self.kernel.name} makes {t.name} of {s.name}, which C11 "
                                   "can't; compile the model in float32")
        if t is BOOL:
            return f"{a} != 0"
        if s.is_float and t.is_int and not _within(x, t):
            low, high = t.limits
            text = SATURATE.format(
                c=c, t=t.name, s=s.name, d=c_type(s), low=literal(float(low), s),
                high=literal(float(high + 1), s), least=literal(low, t), most=literal(high, t))
            return f"{self.helper(f'{t.name}_from_{s.name}', text)}({a})"
        return f"({c}){a}"

    def affine(self, e: Expr) -> str:
        c0, factors = e.attr
        terms = [self.emit(x) if k == 1 else f"{k} * {self.emit(x)}"
                 for k, x in zip(factors, e.args)]
        return " + ".join([*terms, *([str(c0)] if c0 else [])])

    def load(self, e: Expr) -> str:
        t = self.kernel.buffers[e.attr][0]
        index = self.emit(e.args[0])
        if t is BOOL:
            text = f"b{e.attr}[{index}] != 0"
        else:
            name = f"load_{t.name}"
            text = f"{self.helper(name, LOAD.format(c=c_type(t), t=t.name))}(b{e.attr}, {index})"
        if len(e.args) == 1:
            return text
        guard = self.emit(e.args[1])
        return f"{guard} ? {text if t is not BOOL else f'({text})'} : {literal(0, t)}"

    def horizontal(self, e: Expr) -> str:
        """Folds lanes pairwise, in a fixed order."""
        x = e.args[0]
        if self.lanes == 1:
            return self.emit(x)
        name, scope = self.fresh("h"), self.scopes[-1]
        scope.lines.append(f"{scope.pad}{c_type(x.dtype)} {name}[{self.lanes}];")
        self.over_lanes(lambda: f"{name}[lane] = {self.emit(x)};")
        parts = [f"{name}[{i}]" for i in range(self.lanes)]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [self.fold(e.attr, x.dtype, a, b) for a, b in zip(parts[:half], parts[half:])]
        return parts[0]

    def fold(self, kind: str, t: DType, a: str, b: str) -> str:
        if kind in ("sum", "prod"):
            sign = "+" if kind == "sum" else "*"
            if t.is_float:
                return f"({a} {sign} {b})"
            wide = "uint64_t" if t.bits == 64 else "uint32_t"
            return f"({a} {'||' if kind == 'sum' else '&&'} {b})" if t is BOOL else \
                f"({c_type(t)})(({wide}){a} {sign} ({wide}){b})"
        if t.is_float:
            return self.extreme(kind, t, [a, b])
        if t is BOOL:
            return f"({a} {'||' if kind == 'max' else '&&'} {b})"
        return f"({a} {'>' if kind == 'max' else '<'} {b} ? {a} : {b})"

    # statements

    def over_lanes(self, last: Callable[[], str]) -> None:
        """A loop over lanes that ends with the statement that last() makes."""
        outer, scope = self.inner, self.scopes[-1]
        self.inner = Scope(scope.pad + "    ")
        statement = last()
        lines = self.inner.lines
        self.inner = outer
        scope.lines += [
            f"{scope.pad}for (int64_t lane = 0; lane < {self.lanes}; lane++) {{", *lines,
            f"{scope.pad}    {statement}", f"{scope.pad}}}"]

    def block(self, body: tuple[Stmt, ...]) -> None:
        for s in body:
            if isinstance(s, For):
                self.loop(s)
            elif isinstance(s, Set):
                self.set(s)
            else:
                self.store(s)
            self.passing.clear()  # registers and memory may have other values now

    def set(self, s: Set) -> None:
        name = self.regs[s.reg]
        if s.reg.args:  # a constant alone does not tell how wide it is
            self.lanes = s.reg.args[0].hi + 1
        if s.reg.args and self.lanes > 1:
            self.over_lanes(lambda: f"{name}[lane] = {self.emit(s.value)};")
        else:
            value = self.emit(s.value)
            self.scopes[-1].lines.append(f"{self.scopes[-1].pad}{name} = {value};")

    def store(self, s: Store) -> None:
        parts = [s.index, s.value, *([s.guard] if s.guard is not None else [])]

        def statement() -> str:
            index, value, *guard = map(self.emit, parts)
            t = self.kernel.buffers[s.buffer][0]
            text = f"b{s.buffer}[{index}] = {value};" if t is BOOL else \
                self.helper(f"store_{t.name}", STORE.format(c=c_type(t), t=t.name)) \
                + f"(b{s.buffer}, {index}, {value});"
            return f"if ({guard[0]}) {text}" if guard else text

        if any(map(self.is_vector, parts)):
            self.over_lanes(statement)
        else:
            text = statement()
            self.scopes[-1].lines.append(self.scopes[-1].pad + text)

    def loop(self, s: For) -> None:
        extent, outer = self.emit(s.extent), self.scopes[-1]
        name = self.names[s.var] = self.fresh("i")
        inner = Scope(outer.pad + "    ")
        self.passing.clear()
        self.scopes.append(inner)
        self.block(s.body)
        self.scopes.pop()
        outer.lines += [f"{outer.pad}for (int64_t {name} = 0; {name} < {extent}; {name}++) {{",
                        *inner.lines, f"{outer.pad}}}"]

    def function(self) -> str:
        k = self.kernel
        for e in _variables(k.body):
            if e.attr[0] == LANE:
                self.names[e] = "lane"
            elif e.attr[0] in k.symbols:
                self.names[e] = f"s{k.symbols.index(e.attr[0])}"
        self.names[k.grid_var] = "g"
        outer, inner = self.scopes[0], Scope("        ")
        self.scopes.append(inner)
        for r in _registers(k.body):
            self.regs[r] = self.fresh("r")
            width = r.args[0].hi + 1 if r.args else 1
            size = f"[{width}]" if width > 1 else ""
            zero = "{0}" if size else "0"
            inner.lines.append(f"{inner.pad}{c_type(r.dtype)} {self.regs[r]}{size} = {zero};")
        for i, count in k.local.items():
            inner.lines.append(f"{inner.pad}static _Alignas(64) unsigned char "
                               f"b{i}[{count * k.buffers[i][0].itemsize + PAD}];")
        for s in k.body:  # kernels in a row may have vectors of different widths
            lane = _lane(s)
            self.lanes = self.lanes if lane is None else lane.hi + 1
            self.block((s,))
        lines = [*outer.lines, f"{outer.pad}for (int64_t g = 0; g < grid; g++) {{", *inner.lines,
                 f"{outer.pad}}}"]
        parameters = [f"{'' if i in self.written else 'const '}unsigned char *b{i}"
                      for i in range(len(k.buffers) - len(k.local))]
        parameters += [f"int64_t s{i}" for i in range(len(k.symbols))]
        text = "\n".join(lines)
        unused = [f"    (void){p};" for p in ("g", *(x.split()[-1].lstrip("*") for x in parameters))
                  if p != "g" and not _uses(text, p)]
        return "\n".join([f"static void @{k.name}({', '.join([*parameters, 'int64_t grid'])})", "{",
                          *unused, text, "}", ""])


def _uses(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


def _variables(body: tuple[Stmt, ...]) -> set[Expr]:
    """Every variable that statements read."""
    out: set[Expr] = set()
    for s in body:
        parts = [s.extent] if isinstance(s, For) else [s.value] if isinstance(s, Set) else \
            [s.index, s.value, *([s.guard] if s.guard is not None else [])]
        out |= {v for e in parts for v in e.vars if v.op == "var"}
        for e in parts:
            stack = [e]
            while stack:  # a vector register depends on the lane
                x = stack.pop()
                if x.op == "var":
                    out.add(x)
                stack.extend(x.args if x.op == "reg" else ())
        if isinstance(s, Set):
            out |= set(s.reg.args)
        if isinstance(s, For):
            out |= _variables(s.body)
    return out


def _registers(body: tuple[Stmt, ...]) -> list[Expr]:
    """Every register that statements set, in order."""
    out: dict[Expr, None] = {}
    for s in body:
        if isinstance(s, Set):
            out[s.reg] = None
        elif isinstance(s, For):
            out |= dict.fromkeys(_registers(s.body))
    return list(out)


def render(kernel: Kernel, target: CpuTarget) -> str:
    """The definitions that a function needs, and the function, named @ and the kernel's name."""
    renderer = Renderer(kernel)
    text = renderer.function()
    return SEPARATOR.join([*renderer.helpers.values(), text])


__all__ = ["SEPARATOR", "c_type", "render"]
