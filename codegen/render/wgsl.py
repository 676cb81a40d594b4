"""Loop IR to WGSL: one compute shader for each kernel, with one entry point named main.

The last stage before a plan for WebGPU. One invocation evaluates one piece of the grid; where a
kernel has a team, one workgroup does, its invocations sharing the piece's reduction. Workgroups
are numbered ``workgroup_id.x + workgroup_id.y * num_workgroups.x``, since no dimension of a
dispatch may be larger than 65535.

Every expression is emitted once, in the outermost block where all its variables are known. Four
lanes are a vec4, and a buffer whose accesses all stay inside aligned groups of four elements is an
array of vec4. No access relies on the bounds checks that implementations add: a guard chooses
element 0 where it does not hold.

In memory a buffer is as on every other target. What WGSL has no type for is read by 32-bit words:
bool and 8- and 16-bit integers (and float16 without the feature for it) by shifts, 64-bit integers
as two words. Two invocations may write to one word, so parts of words are written by atomic
operations, and words alone by plain ones. A 64-bit integer is an i32 where its bounds allow, and a
pair of u32 elsewhere. Values of narrow types are computed in 32 bits and wrapped.

WGSL compilers may assume that no nan or infinity occurs and may reassociate sums. So nan is told
by its bits, infinities are made of bits at run time, and the nearest integer is found by `round`
instead of by adding a large number.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

import numpy as np

from tinyedge.dtype import BOOL, FLOAT16, FLOAT32, DType
from tinyedge.errors import UnsupportedError

from .. import symbolic
from ..ir import (
    LANE,
    TEAM,
    Expr,
    For,
    Kernel,
    Set,
    Stmt,
    Store,
    const,
    make,
    substitute,
    value_of,
    var,
)
from ..llvm_target import CpuTarget

FLOAT_OPS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
INT_OPS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}
TESTS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<="}
FUNCTIONS = {"sqrt": "sqrt", "floor": "floor", "ceil": "ceil", "round": "round",
             "trunc": "trunc", "abs": "abs"}
SHIFTING = 1 << 23, 1 << 24
"""Between these the last place of a float32 is 1: adding one leaves an integer in the low bits."""

HELPERS = {
    "float_of": "fn float_of(x: u32) -> f32 { return bitcast<f32>(x); }",
    # 64-bit integers as (low, high) words
    "add64": "fn add64(a: vec2u, b: vec2u) -> vec2u { let l = a.x + b.x; "
             "return vec2u(l, a.y + b.y + u32(l < a.x)); }",
    "neg64": "fn neg64(a: vec2u) -> vec2u { return vec2u(~a.x + 1u, ~a.y + u32(a.x == 0u)); }",
    "mul32": "fn mul32(a: u32, b: u32) -> vec2u { let p = a & 65535u; let q = a >> 16u; "
             "let r = b & 65535u; let s = b >> 16u; let m = q * r + ((p * r) >> 16u); "
             "let n = p * s + (m & 65535u); "
             "return vec2u(a * b, q * s + (m >> 16u) + (n >> 16u)); }",
    "mul64": "fn mul64(a: vec2u, b: vec2u) -> vec2u { let l = mul32(a.x, b.x); "
             "return vec2u(l.x, l.y + a.x * b.y + a.y * b.x); }",
    "lt64": "fn lt64(a: vec2u, b: vec2u) -> bool { let h = bitcast<vec2i>(vec2u(a.y, b.y)); "
            "return h.x < h.y || (h.x == h.y && a.x < b.x); }",
    "ltu64": "fn ltu64(a: vec2u, b: vec2u) -> bool { "
             "return a.y < b.y || (a.y == b.y && a.x < b.x); }",
    "shl64": "fn shl64(a: vec2u, n: u32) -> vec2u { if (n == 0u) { return a; } "
             "if (n >= 32u) { return vec2u(0u, a.x << (n - 32u)); } "
             "return vec2u(a.x << n, (a.y << n) | (a.x >> (32u - n))); }",
    "shr64": "fn shr64(a: vec2u, n: u32) -> vec2u { if (n == 0u) { return a; } "
             "if (n >= 32u) { return vec2u(a.y >> (n - 32u), 0u); } "
             "return vec2u((a.x >> n) | (a.y << (32u - n)), a.y >> n); }",
    "sar64": "fn sar64(a: vec2u, n: u32) -> vec2u { let h = bitcast<i32>(a.y); "
             "if (n == 0u) { return a; } "
             "if (n >= 32u) { return vec2u(bitcast<u32>(h >> (n - 32u)), "
             "bitcast<u32>(h >> 31u)); } "
             "return vec2u((a.x >> n) | (a.y << (32u - n)), bitcast<u32>(h >> n)); }",
    # quotient and remainder by long division; what a division by zero gives is not specified
    "divmod64": "fn divmod64(a: vec2u, b: vec2u) -> vec4u { var q = vec2u(0u); var r = vec2u(0u); "
                "for (var i = 63u; i < 64u; i--) { r = shl64(r, 1u); "
                "r.x |= shr64(a, i).x & 1u; q = shl64(q, 1u); "
                "if (!ltu64(r, b)) { r = add64(r, neg64(b)); q.x |= 1u; } } "
                "return vec4u(q, r); }",
    "abs64": "fn abs64(a: vec2u) -> vec2u { "
             "if ((a.y >> 31u) == 1u) { return neg64(a); } return a; }",
    "div64": "fn div64(a: vec2u, b: vec2u) -> vec2u { if (all(b == vec2u(0u))) { return a; } "
             "let q = divmod64(abs64(a), abs64(b)).xy; "
             "if (((a.y ^ b.y) >> 31u) == 1u) { return neg64(q); } return q; }",
    "mod64": "fn mod64(a: vec2u, b: vec2u) -> vec2u { "
             "if (all(b == vec2u(0u))) { return vec2u(0u); } "
             "var r = divmod64(abs64(a), abs64(b)).zw; "
             "if ((a.y >> 31u) == 1u) { r = neg64(r); } "
             "if (any(r != vec2u(0u)) && ((a.y ^ b.y) >> 31u) == 1u) { r = add64(r, b); } "
             "return r; }",
    "divu64": "fn divu64(a: vec2u, b: vec2u) -> vec2u { if (all(b == vec2u(0u))) { return a; } "
              "return divmod64(a, b).xy; }",
    "modu64": "fn modu64(a: vec2u, b: vec2u) -> vec2u { "
              "if (all(b == vec2u(0u))) { return vec2u(0u); } return divmod64(a, b).zw; }",
    "wide_f": "fn wide_f(x: f32) -> vec2u { let a = min(abs(x), 9223371487098961920.0f); "
              "let h = floor(a * 0x1p-32f); let r = vec2u(u32(a - h * 4294967296.0f), u32(h)); "
              "if (x < 0.0f) { return neg64(r); } return r; }",
    "f_wide": "fn f_wide(a: vec2u) -> f32 { let m = abs64(a); "
              "let v = f32(m.y) * 4294967296.0f + f32(m.x); "
              "return select(v, -v, (a.y >> 31u) == 1u); }",
    "f_wideu": "fn f_wideu(a: vec2u) -> f32 { return f32(a.y) * 4294967296.0f + f32(a.x); }",
}
NEEDS = {
    "mul64": ["mul32"], "divmod64": ["shl64", "shr64", "ltu64", "neg64", "add64"],
    "abs64": ["neg64"], "div64": ["divmod64", "abs64"], "mod64": ["divmod64", "abs64"],
    "divu64": ["divmod64"], "modu64": ["divmod64"], "wide_f": ["neg64"], "f_wide": ["abs64"],
}


def fits(e: Expr) -> bool:
    """Whether an i32 holds every value of a 64-bit integer."""
    return -(1 << 31) <= e.lo and e.hi < 1 << 31


def wide(e: Expr) -> bool:
    """Whether a value takes two words."""
    return e.dtype.bits == 64 and not fits(e)


def kind_of(e: Expr) -> str:
    """The WGSL type of one lane of a value (float16 without its feature is an f32)."""
    t = e.dtype
    if t is BOOL:
        return "bool"
    if t in (FLOAT32, FLOAT16):
        return "f32" if t is FLOAT32 else "f16"
    if t.is_float:
        raise UnsupportedError(f"{t.name} is not a type that WebGPU computes in; compile the "
                               "model in float32")
    if t.bits == 64:
        return "i32" if fits(e) else "vec2u"
    return "i32" if t.kind == "i" else "u32"


def f32_text(v: float) -> str:
    """A float32 literal, or an expression for what has none."""
    f = np.float32(v)
    if not np.isfinite(f):
        bits = struct.unpack("<I", struct.pack("<f", f))[0] if f == f else 0x7FC00000
        return f"float_of({bits}u)"
    return f"{f!s}f"


def _shift(e: Expr) -> int | None:
    """Which operand of a sum or difference is a constant as of SHIFTING."""
    if e.op not in ("add", "sub") or e.dtype is not FLOAT32:
        return None
    return next((i for i, c in enumerate(e.args) if c.op == "const" and
                 SHIFTING[0] <= value_of(c) < SHIFTING[1]), None)


def _bits(c: Expr) -> int:
    """The bits of a float32 constant."""
    bits: int = struct.unpack("<i", struct.pack("<f", value_of(c)))[0]
    return bits


@dataclass
class Scope:
    """A block while it is being written."""

    lines: list[str] = field(default_factory=list)
    memo: dict[object, str] = field(default_factory=dict)


class Renderer:
    """Writes one kernel; use `render`."""

    def __init__(self, kernel: Kernel, target: CpuTarget) -> None:
        assert target.gpu is not None
        self.kernel, self.gpu, self.lanes = kernel, target.gpu, kernel.lanes
        self.f16 = "f16" in target.canonical
        self.lane: Expr = var(LANE, 0, self.lanes - 1) if self.lanes > 1 else const(0)
        self.written = {i for i, (_, w) in enumerate(kernel.buffers) if w}
        self.helpers: dict[str, str] = {}
        self.shared: list[str] = []
        self.regs: dict[Expr, str] = {}
        self.scopes = [Scope()]
        self.depth_of: dict[Expr, int] = {}
        self.passing: dict[object, str] = {}
        self.count = 0
        accesses = list(_accesses(kernel.body))
        loaded = {b for b, _, _, write in accesses if not write}
        self.read_write = bool(loaded & self.written)
        self.quads = {i for i in range(len(kernel.buffers)) if self.quad(i, accesses)}
        self.atomic = {i for i in self.written if self.packed(i) and any(
            not self.whole_word(i, index, guard)
            for b, index, guard, write in accesses if b == i and write)}

    # types

    def packed(self, b: int) -> bool:
        """Whether several elements of a buffer share a word."""
        t = self.kernel.buffers[b][0]
        return t.bits < 32 and not (t is FLOAT16 and self.f16)

    def kind(self, e: Expr) -> str:
        k = kind_of(e)
        return "f32" if k == "f16" and not self.f16 else k

    def type_of(self, e: Expr, vector: bool) -> str:
        k = self.kind(e)
        if vector and k == "vec2u":
            raise AssertionError("a vector of 64-bit integers")
        return f"vec{self.lanes}<{k}>" if vector else k

    def element(self, b: int) -> str:
        """What a buffer is an array of."""
        t = self.kernel.buffers[b][0]
        if b in self.atomic:
            return "atomic<u32>"
        if self.packed(b):
            return "u32"
        if t.bits == 64:
            if t.is_float:
                raise UnsupportedError("float64 is not a type that WebGPU computes in; compile "
                                       "the model in float32")
            return "vec2u"
        one = {"float16": "f16", "float32": "f32"}.get(t.name, "i32" if t.kind == "i" else "u32")
        return f"vec4<{one}>" if b in self.quads else one

    def quad(self, b: int, accesses: list[tuple[int, Expr, Expr | None, bool]]) -> bool:
        """Whether a buffer can be an array of vec4: no access crosses a group of four, and what is
        written is written in whole groups."""
        t = self.kernel.buffers[b][0]
        if self.packed(b) or t.bits > 32 or not self.kernel.whole[b]:
            return False
        some = False
        for at, index, guard, write in accesses:
            if at != b:
                continue
            base, step = self.lane_form(index)
            residue = _residue(base)
            if residue is None:
                return False
            vector = step == 1 and self.lanes == 4
            if not vector and self.lane in index.vars:
                return False
            if vector and (residue or guard is not None and self.lane in guard.vars):
                return False
            if write and not vector:
                return False
            some = True
        return some

    def whole_word(self, b: int, index: Expr, guard: Expr | None) -> bool:
        """Whether a store of packed elements writes whole words."""
        t = self.kernel.buffers[b][0]
        base, step = self.lane_form(index)
        count = 32 // t.bits
        return step == 1 and self.lanes % count == 0 and _multiple(base, count) and (
            guard is None or self.lane not in guard.vars)

    # text

    def fresh(self, stem: str = "v") -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def helper(self, name: str) -> str:
        if name not in self.helpers:
            for n in NEEDS.get(name, ()):
                self.helper(n)
            self.helpers[name] = HELPERS[name]
        return name

    def line(self, text: str, depth: int) -> str:
        name = self.fresh()
        self.scopes[depth].lines.append(f"let {name} = {text};")
        return name

    def do(self, text: str) -> None:
        self.scopes[-1].lines.append(text)

    # expressions

    def is_vector(self, e: Expr) -> bool:
        return self.lanes > 1 and e.op != "hreduce" and any(
            v.attr[0] == LANE if v.op == "var" else bool(v.args) for v in e.vars)

    def depth(self, e: Expr) -> int:
        """The outermost scope in which `e` can be evaluated; -1: where we stand (registers)."""
        d = 0
        for v in e.vars:
            if v.op == "reg":
                return -1
            d = max(d, self.depth_of.get(v, 0))
        return d

    def pinned(self, e: Expr) -> bool:
        """Whether `e` reads memory that this kernel writes."""
        if e.op in ("var", "const", "affine"):
            return False
        return e.op == "load" and e.attr in self.written or any(map(self.pinned, e.args))

    def place(self, e: Expr) -> tuple[dict[object, str], int]:
        """(names known, scope) for the value of an expression."""
        d = self.depth(e)
        if d < 0 or self.read_write and self.pinned(e):
            return self.passing, len(self.scopes) - 1
        return self.scopes[d].memo, d

    def emit(self, e: Expr, vector: bool | None = None) -> str:
        """The name of a value, or a literal; a scalar is made a vector if `vector` asks for it."""
        if vector and not self.is_vector(e):
            one = self.emit(e)
            return f"vec{self.lanes}<{self.kind(e)}>({one})"
        if e.op == "const":
            return self.literal(e)
        if e.op == "reg":
            return self.regs[e]
        if e.op == "var" and e.attr[0] == LANE:
            return f"vec{self.lanes}i({', '.join(map(str, range(self.lanes)))})"
        memo, d = self.place(e)
        found = memo.get(e)
        if found is None:
            found = memo[e] = self.line(self.compute(e, d), d)
        return found

    def literal(self, e: Expr) -> str:
        v, t = value_of(e), e.dtype
        if t is BOOL:
            return "true" if v else "false"
        if t.is_float:
            text = f32_text(v)
            if t is FLOAT16 and self.f16:
                h = np.float16(v)
                return f"{h!s}h" if np.isfinite(h) else f"f16({self.inf(text)})"
            return self.inf(text if t is not FLOAT16 else f32_text(float(np.float16(v))))
        if wide(e):
            n = int(v) & (1 << 64) - 1
            return f"vec2u({n & 0xFFFFFFFF}u, {n >> 32}u)"
        if self.kind(e) == "u32":
            return f"{int(v)}u"
        return f"{int(v)}i" if v >= 0 else f"i32({int(v)})"

    def inf(self, text: str) -> str:
        if text.startswith("float_of"):
            self.helper("float_of")
        return text

    def words(self, e: Expr) -> str:
        """A 64-bit integer as two words, whatever it is held in."""
        if wide(e):
            return self.emit(e)
        if e.op == "const":
            n = int(e.attr) & (1 << 64) - 1
            return f"vec2u({n & 0xFFFFFFFF}u, {n >> 32}u)"
        return self.widened(self.emit(e), e)

    def widened(self, a: str, e: Expr) -> str:
        """Two words of a value held in one."""
        k = self.kind(e)
        if k == "bool":
            return f"vec2u(u32({a}), 0u)"
        if k == "u32" or e.lo >= 0:
            return f"vec2u(u32({a}), 0u)"
        return f"vec2u(bitcast<u32>({a}), bitcast<u32>({a} >> 31u))"

    def compute(self, e: Expr, d: int) -> str:
        vec = self.is_vector(e)
        t = self.type_of(e, vec)
        if e.op == "load":
            return self.load(e, d, vec)
        if e.op == "hreduce":
            return self.horizontal(e)
        if any(wide(a) for a in e.args) or wide(e):
            return self.compute_wide(e)
        if e.op == "affine":
            return self.affine(e, vec)
        x = e.args[0]
        # operators of floats take a scalar beside a vector
        mixed = vec and e.op in FLOAT_OPS and x.dtype.is_float and _shift(e) is None
        a = [self.emit(y, vec and not mixed) for y in e.args]
        if e.op == "floordiv" or e.op == "mod" and e.attr == "index":
            return self.divide(e, a, vec)
        if e.op == "mul" and e.attr == "index":
            return f"{a[0]} * {a[1]}"
        if e.op == "ge0":
            return f"{a[0]} >= {self.zero(x, vec)}"
        if e.op == "where":
            return f"select({a[2]}, {a[1]}, {a[0]})"
        if e.op == "cast":
            return self.cast(a[0], x, e, vec)
        if e.op == "bitcast":
            if x.dtype is BOOL or e.dtype is BOOL or x.dtype is e.dtype:
                return self.cast(a[0], x, e, vec)
            if x.dtype.bits != 32:
                return self.rebits(a[0], x, e, vec)
            return f"bitcast<{t}>({a[0]})"
        if x.dtype.is_float:
            text = self.floating(e, a, vec)
            if e.dtype is FLOAT16 and not self.f16 and e.op in (*FLOAT_OPS, "sqrt"):
                return f"quantizeToF16({text})"
            return text
        return self.integer(e, a, t, vec)

    def rebits(self, a: str, x: Expr, e: Expr, vec: bool) -> str:
        """The bits of a narrow type as another of the same width."""
        if vec and FLOAT16 in (x.dtype, e.dtype):
            raise UnsupportedError("vectors of float16 are not made of bits for WebGPU; report "
                                   "the model")
        if x.dtype is FLOAT16:
            bits = f"(pack2x16float(vec2f(f32({a}), 0.0f)) & 65535u)"
            return bits if e.dtype.kind == "u" else f"extractBits(bitcast<i32>({bits}), 0u, 16u)"
        if e.dtype is FLOAT16:
            return f"{self.kind(e)}(unpack2x16float(u32({a}) & 65535u).x)"
        return self.wrap(f"{self.type_of(e, vec)}({a})", e, vec)

    def zero(self, e: Expr, vec: bool) -> str:
        text = {"f32": "0.0f", "f16": "0.0h", "i32": "0", "u32": "0u", "bool": "false",
                "vec2u": "vec2u(0u)"}[self.kind(e)]
        return f"vec{self.lanes}<{self.kind(e)}>({text})" if vec else text

    def divide(self, e: Expr, a: list[str], vec: bool) -> str:
        """A quotient or remainder rounded towards minus infinity, of index arithmetic."""
        x, k = e.args
        whole = e.op == "floordiv"
        if k.op == "const" and not int(k.attr) & int(k.attr) - 1:
            n = int(k.attr)
            amount, mask = f"{n.bit_length() - 1}u", str(n - 1)
            if vec:
                amount = f"vec{self.lanes}<u32>({amount})"
                mask = f"vec{self.lanes}<i32>({mask})"
            return f"{a[0]} >> {amount}" if whole else f"{a[0]} & {mask}"
        if x.lo >= 0:
            u = f"vec{self.lanes}<u32>" if vec else "u32"
            i = f"vec{self.lanes}<i32>" if vec else "i32"
            by = f"{int(k.attr)}u" if k.op == "const" else f"u32({self.emit(k)})"
            by = f"{u}({by})" if vec and k.op == "const" else f"{u}({a[1]})" if vec else by
            return f"{i}({u}({a[0]}) {'/' if whole else '%'} {by})"
        one = f"vec{self.lanes}<i32>(1)" if vec else "1"
        nil = f"vec{self.lanes}<i32>(0)" if vec else "0"
        if whole:
            return f"{a[0]} / {a[1]} - select({nil}, {one}, {a[0]} % {a[1]} < {nil})"
        return f"{a[0]} % {a[1]} + select({nil}, {a[1]}, {a[0]} % {a[1]} < {nil})"

    def floating(self, e: Expr, a: list[str], vec: bool) -> str:
        o, x = e.op, e.args[0]
        n = f"vec{self.lanes}<i32>" if vec else "i32"
        if o == "add" and (i := _shift(e)) is not None:
            t = self.type_of(e, vec)
            return f"bitcast<{t}>({n}(round({a[1 - i]})) + {n}({_bits(e.args[i])}))"
        if o == "sub" and _shift(x) is not None and _shift(e) == 1:
            return f"{self.type_of(e, vec)}(bitcast<{n}>({a[0]}) - {n}({_bits(e.args[1])}))"
        if o in FLOAT_OPS:
            return f"{a[0]} {FLOAT_OPS[o]} {a[1]}"
        if o == "neg":
            return f"-{a[0]}"
        if o in FUNCTIONS:
            return f"{FUNCTIONS[o]}({a[0]})"
        if o in ("max", "min"):
            return self.extreme(o, x, a, e.args, vec)
        if o in TESTS:
            return f"{a[0]} {TESTS[o]} {a[1]}"
        if o == "isnan":
            return self.nan(a[0], x, vec)
        raise AssertionError(f"no rendering of {o} for {x.dtype}")

    def nan(self, a: str, x: Expr, vec: bool) -> str:
        """Whether a float is nan, by its bits."""
        u, f = (f"vec{self.lanes}<{k}>" if vec else k for k in ("u32", "f32"))
        if self.kind(x) == "f16":
            a = f"{f}({a})"
        return f"(bitcast<{u}>({a}) & {u}(0x7fffffffu)) > {u}(0x7f800000u)"

    def extreme(self, o: str, x: Expr, a: list[str], args: tuple[Expr, ...], vec: bool) -> str:
        """The larger or smaller one; a nan stays."""
        test = ">" if o == "max" else "<"
        for i, y in enumerate(args):
            if y.op == "const" and value_of(y) == value_of(y):
                return f"select({a[1 - i]}, {a[i]}, {a[i]} {test} {a[1 - i]})"
        either = "|" if vec else "||"
        return f"select({a[1]}, {a[0]}, ({a[0]} {test} {a[1]}) {either} ({self.nan(a[0], x, vec)}))"

    def integer(self, e: Expr, a: list[str], t: str, vec: bool) -> str:
        o, x = e.op, e.args[0]
        if x.dtype is BOOL:
            logic = {"and": "&", "or": "|", "max": "|", "min": "&", "add": "|", "mul": "&",
                     "xor": "!=", "eq": "==", "ne": "!="}
            if o == "not":
                return f"!{a[0]}"
            if o in ("lt", "le"):
                return f"!{a[0]} & {a[1]}" if o == "lt" else f"!{a[0]} | {a[1]}"
            return f"{a[0]} {logic[o]} {a[1]}"
        if o in TESTS:
            return f"{a[0]} {TESTS[o]} {a[1]}"
        if o in ("max", "min"):
            return f"{o}({a[0]}, {a[1]})"
        if o in INT_OPS:
            return self.wrap(f"{a[0]} {INT_OPS[o]} {a[1]}", e, vec, o in "and or xor".split())
        if o in ("shl", "shr"):
            u = f"vec{self.lanes}<u32>" if vec else "u32"
            by = f"{int(e.args[1].attr) & 31}u" if e.args[1].op == "const" else f"{u}({a[1]})"
            by = f"{u}({by})" if vec and e.args[1].op == "const" else by
            return self.wrap(f"{a[0]} {'<<' if o == 'shl' else '>>'} {by}", e, vec, o == "shr")
        if o == "not":
            return self.wrap(f"~{a[0]}", e, vec)
        if o == "neg":
            return self.wrap(f"{self.zero(x, vec)} - {a[0]}", e, vec)
        if o == "abs":
            return a[0] if x.dtype.kind == "u" else self.wrap(f"abs({a[0]})", e, vec)
        if o == "div":
            return self.wrap(f"{a[0]} / {a[1]}", e, vec)
        if o == "mod":
            zero = self.zero(x, vec)
            if x.dtype.kind == "u" or x.lo >= 0 and e.args[1].lo >= 0:
                return f"select({a[0]} % {a[1]}, {zero}, {a[1]} == {zero})"
            r = self.line(f"select({a[0]} % {a[1]}, {zero}, {a[1]} == {zero})",
                          len(self.scopes) - 1 if self.depth(e) < 0 else self.place(e)[1])
            both = "&" if vec else "&&"
            return f"{r} + select({zero}, {a[1]}, ({r} != {zero}) {both} " \
                f"(({r} ^ {a[1]}) < {zero}))"
        raise AssertionError(f"no rendering of {o} for {x.dtype}")

    def wrap(self, text: str, e: Expr, vec: bool, within: bool = False) -> str:
        """A value of 32 bits brought into the range of a narrower type."""
        if e.dtype.bits >= 32 or within:
            return text
        if e.dtype.kind == "i":
            return f"extractBits({text}, 0u, {e.dtype.bits}u)"
        mask = f"{(1 << e.dtype.bits) - 1}u"
        return f"({text}) & " + (f"vec{self.lanes}<u32>({mask})" if vec else mask)

    def cast(self, a: str, x: Expr, e: Expr, vec: bool) -> str:
        s, t = x.dtype, e.dtype
        to = self.type_of(e, vec)
        if s is t:
            return a
        if t is BOOL:
            return f"{a} != {self.zero(x, vec)}"
        if t is FLOAT16 and not self.f16:
            one = a if s.is_float else f"{to}({a})"
            return f"quantizeToF16({one})"
        if s.is_float and t.is_float:
            return f"{to}({a})"
        if s.is_float and t.bits < 32:
            low, high = t.limits
            f = f"vec{self.lanes}<{self.kind(x)}>" if vec else self.kind(x)
            return f"{to}(clamp({a}, {f}({low}), {f}({high})))"
        if t.is_float or t.is_int and s is BOOL or s.is_float:
            return f"{to}({a})"
        text = a if self.type_of(x, vec) == to else f"{to}({a})"
        if t.limits[0] <= x.lo and x.hi <= t.limits[1]:
            return text
        return self.wrap(text, e, vec)

    def compute_wide(self, e: Expr) -> str:
        """An operation on 64-bit integers of which some take two words."""
        text, held = self.wide_text(e)
        if held and not wide(e) and e.dtype.bits == 64:
            return f"bitcast<i32>({text}.x)"
        return text

    def wide_text(self, e: Expr) -> tuple[str, bool]:
        """(text, whether it is of two words)"""
        o, args = e.op, e.args
        if o == "affine":
            c0, factors = e.attr
            total = ""
            for k, x in zip(factors, args):
                term = self.words(x)
                if k != 1:
                    n = k & (1 << 64) - 1
                    term = f"{self.helper('mul64')}({term}, vec2u({n & 0xFFFFFFFF}u, {n >> 32}u))"
                total = f"{self.helper('add64')}({total}, {term})" if total else term
            if c0:
                n = c0 & (1 << 64) - 1
                total = f"{self.helper('add64')}({total}, vec2u({n & 0xFFFFFFFF}u, {n >> 32}u))"
            return total, True
        x = args[0]
        signed = x.dtype.kind != "u"
        if o == "where":
            return f"select({self.words(args[2])}, {self.words(args[1])}, {self.emit(x)})", True
        if o == "cast":
            return self.wide_cast(e, x)
        if o == "bitcast":
            if e.dtype.is_float or x.dtype.is_float:
                raise UnsupportedError("float64 is not a type that WebGPU computes in; compile "
                                       "the model in float32")
            return self.words(x), True
        if o == "ge0":
            return f"({self.words(x)}.y >> 31u) == 0u", False
        if o in ("shl", "shr"):
            by = f"u32({self.emit(args[1])}{'.x' if wide(args[1]) else ''})"
            name = "shl64" if o == "shl" else "sar64" if signed else "shr64"
            return f"{self.helper(name)}({self.words(x)}, {by} & 63u)", True
        a = [self.words(y) for y in args]
        less = self.helper("lt64" if signed else "ltu64") if o in ("lt", "le", "max", "min") else ""
        if o == "eq":
            return f"all({a[0]} == {a[1]})", False
        if o == "ne":
            return f"any({a[0]} != {a[1]})", False
        if o == "lt":
            return f"{less}({a[0]}, {a[1]})", False
        if o == "le":
            return f"!{less}({a[1]}, {a[0]})", False
        if o in ("max", "min"):
            p, q = (1, 0) if o == "max" else (0, 1)
            return f"select({a[q]}, {a[p]}, {less}({a[0]}, {a[1]}))", True
        if o == "add":
            return f"{self.helper('add64')}({a[0]}, {a[1]})", True
        if o == "sub":
            return f"{self.helper('add64')}({a[0]}, {self.helper('neg64')}({a[1]}))", True
        if o == "mul":
            return f"{self.helper('mul64')}({a[0]}, {a[1]})", True
        if o in ("and", "or", "xor"):
            return f"{a[0]} {INT_OPS[o]} {a[1]}", True
        if o == "not":
            return f"~{a[0]}", True
        if o in ("neg", "abs"):
            return (a[0] if o == "abs" and not signed else
                    f"{self.helper(o + '64')}({a[0]})"), True
        if o in ("div", "floordiv", "mod"):
            name = {"div": "div", "floordiv": "div", "mod": "mod"}[o] + ("" if signed else "u")
            return f"{self.helper(name + '64')}({a[0]}, {a[1]})", True
        raise AssertionError(f"no rendering of {o} for {x.dtype}")

    def wide_cast(self, e: Expr, x: Expr) -> tuple[str, bool]:
        s, t = x.dtype, e.dtype
        if wide(e):
            if s.is_float:
                return f"{self.helper('wide_f')}(f32({self.emit(x)}))", True
            return self.words(x) if s.bits == 64 else self.widened(self.emit(x), x), True
        a = self.emit(x)
        if t is BOOL:
            return f"any({a} != vec2u(0u))", False
        if t.is_float:
            one = f"{self.helper('f_wide' if s.kind == 'i' else 'f_wideu')}({a})"
            if t is FLOAT16:
                return f"f16({one})" if self.f16 else f"quantizeToF16({one})", False
            return one, False
        low = f"{a}.x" if self.kind(e) == "u32" else f"bitcast<i32>({a}.x)"
        return self.wrap(low, e, False), False

    def affine(self, e: Expr, vec: bool) -> str:
        c0, factors = e.attr
        if c0 and (len(factors) > 1 or factors[0] != 1):
            # what differs by a constant shares the rest
            base = self.emit(symbolic.linear_sum(zip(factors, e.args)), vec)
            return f"{base} + " + (f"vec{self.lanes}<i32>({c0})" if vec else
                                   f"({c0})" if c0 < 0 else str(c0))
        # terms of outer blocks first: their partial sums are shared
        levels: dict[int, list[tuple[int, Expr]]] = {}
        for c, x in zip(factors, e.args):
            levels.setdefault(self.depth(x) % 99, []).append((c, x))
        if len(levels) > 1:
            parts = [symbolic.linear_sum(levels[k]) for k in sorted(levels)]
            inner = parts.pop()
            outer = symbolic.linear_sum(((1, p) for p in parts), c0)
            return f"{self.emit(outer, vec)} + {self.emit(inner, vec)}"
        terms = []
        for c, x in zip(factors, e.args):
            name = self.emit(x, vec)
            terms.append(name if c == 1 else f"{name} * {c if c >= 0 else f'({c})'}")
        text = " + ".join(terms)
        if c0:
            k = f"vec{self.lanes}<i32>({c0})" if vec else f"({c0})" if c0 < 0 else str(c0)
            text += f" + {k}"
        return text

    # memory

    def lane_form(self, index: Expr) -> tuple[Expr, int | None]:
        """(index at lane 0, its step from lane to lane; None where that is not constant)."""
        lane = self.lane
        if lane.op != "var" or lane not in index.vars:
            return index, 0
        terms, _ = symbolic.linear(index)
        step = terms.get(lane, 0)
        base = index - lane * step
        return (base, step) if lane not in base.vars else (index, None)

    def at(self, index: Expr) -> str:
        """An index as text of type i32."""
        if wide(index):
            return f"bitcast<i32>({self.emit(index)}.x)"
        return self.emit(index)

    def load(self, e: Expr, d: int, vec: bool) -> str:
        b, index = e.attr, e.args[0]
        guard = e.args[1] if len(e.args) > 1 else None
        if not vec:
            return self.one(e, b, index, guard, d)
        base, step = self.lane_form(index)
        varies = guard is not None and self.is_vector(guard)
        t = self.type_of(e, True)
        if step == 1 and not varies:
            if b in self.quads:
                v = f"b{b}[{self.safe(symbolic.floordiv(base, 4), guard)}]"
                return self.kept(v, guard, e)
            if self.packed(b) and _multiple(base, self.lanes) and \
                    self.lanes * e.dtype.bits <= 32:
                v = self.unpacked(b, base, guard, e)
                return self.kept(v, guard, e)
        if step == 0 and not varies:
            return f"{t}({self.one(e, b, base, guard, d)})"
        parts = []
        for k in range(self.lanes):
            env = {self.lane: const(k)}
            holds = substitute(guard, env) if guard is not None else None
            one = symbolic_load(e, substitute(index, env), holds)
            parts.append(self.emit(one))
        return f"{t}({', '.join(parts)})"

    def safe(self, index: Expr, guard: Expr | None) -> str:
        """An index, or 0 where the guard does not hold."""
        i = self.at(index)
        return i if guard is None else f"select(0, {i}, {self.emit(guard)})"

    def kept(self, v: str, guard: Expr | None, e: Expr) -> str:
        """A value, or 0 where the guard does not hold."""
        vec = self.is_vector(e)
        if guard is None:
            return v
        return f"select({self.zero(e, vec)}, {v}, {self.emit(guard)})"

    def word(self, b: int, i: str) -> str:
        """A 32-bit word of a buffer."""
        return f"atomicLoad(&b{b}[{i}])" if b in self.atomic else f"b{b}[{i}]"

    def unpacked(self, b: int, base: Expr, guard: Expr | None, e: Expr) -> str:
        """As many neighbours as there are lanes, out of one word."""
        bits, n = e.dtype.bits, self.lanes
        shift = 0 if _multiple(base, 32 // bits) else None
        w = self.word(b, self.safe(symbolic.floordiv(base, 32 // bits), guard))
        first = "0u" if shift == 0 else \
            f"u32({self.at(symbolic.mod(base, 32 // bits))}) * {bits}u"
        if e.dtype is FLOAT16:
            return f"vec{n}<{self.kind(e)}>(unpack2x16float({w}))"
        lanes = ", ".join(f"{k * bits}u" for k in range(n))
        u = f"(vec{n}<u32>({w}) >> (vec{n}<u32>({lanes}) + vec{n}<u32>({first})))"
        if e.dtype.kind == "i":
            return f"extractBits(bitcast<vec{n}<i32>>{u}, 0u, {bits}u)"
        text = f"{u} & vec{n}<u32>({(1 << bits) - 1}u)"
        return f"({text}) != vec{n}<u32>(0u)" if e.dtype is BOOL else text

    def one(self, e: Expr, b: int, index: Expr, guard: Expr | None, d: int) -> str:
        """One element; 0 where the guard does not hold."""
        if guard is symbolic.FALSE:
            return self.zero(e, False)
        if guard is symbolic.TRUE:
            guard = None
        t, kind = e.dtype, self.kind(e)
        if b in self.quads:
            base, residue = _grouped(index)
            group = make("quad", (base,) if guard is None else (base, guard), b, t)
            memo, at = self.place(group)
            name = memo.get(group)
            if name is None:
                v = f"b{b}[{self.safe(base, guard)}]"
                name = memo[group] = self.line(
                    v if guard is None else f"select(vec4<{kind}>(), {v}, {self.emit(guard)})", at)
            return f"{name}.{'xyzw'[residue]}"
        if not self.packed(b):
            v = f"b{b}[{self.safe(index, guard)}]"
            if t.bits == 64 and kind == "i32":
                v = f"bitcast<i32>({v}.x)"
            return v if guard is None else f"select({self.zero(e, False)}, {v}, {self.emit(guard)})"
        count = 32 // t.bits
        place = symbolic.floordiv(index, count)
        w = self.word(b, self.safe(place, guard))
        within = symbolic.mod(index, count)
        shift = f"{int(within.attr) * t.bits}u" if within.op == "const" else \
            f"u32({self.at(within)}) * {t.bits}u"
        if t is FLOAT16:
            v = f"{kind}(unpack2x16float({w} >> ({shift})).x)"
        elif t.kind == "i":
            v = f"extractBits(bitcast<i32>({w}), {shift}, {t.bits}u)"
        else:
            v = f"extractBits({w}, {shift}, {t.bits}u)"
        if t is BOOL:
            v = f"{v} != 0u"
        return v if guard is None else f"select({self.zero(e, False)}, {v}, {self.emit(guard)})"

    def horizontal(self, e: Expr) -> str:
        """Folds lanes pairwise, in a fixed order."""
        x = e.args[0]
        v = self.emit(x, True)
        parts = [f"{v}.{'xyzw'[i]}" for i in range(self.lanes)]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [self.line(self.fold(e.attr, x, a, b, False), len(self.scopes) - 1)
                     for a, b in zip(parts[:half], parts[half:])]
        return parts[0]

    def fold(self, kind: str, x: Expr, a: str, b: str, vec: bool) -> str:
        """One step of a fold of values like x."""
        t = x.dtype
        if wide(x):
            if kind in ("sum", "prod"):
                return f"{self.helper('add64' if kind == 'sum' else 'mul64')}({a}, {b})"
            less = self.helper("lt64" if t.kind == "i" else "ltu64")
            p, q = (b, a) if kind == "max" else (a, b)
            return f"select({q}, {p}, {less}({a}, {b}))"
        if t is BOOL:
            return f"{a} {'|' if kind in ('sum', 'max') else '&'} {b}"
        if kind in ("sum", "prod"):
            return self.wrap(f"{a} {'+' if kind == 'sum' else '*'} {b}", x, vec) \
                if t.is_int else f"{a} {'+' if kind == 'sum' else '*'} {b}"
        if t.is_float:
            return self.extreme(kind, x, [a, b], (), vec)
        return f"{kind}({a}, {b})"

    # statements

    def block(self, body: tuple[Stmt, ...]) -> None:
        i = 0
        while i < len(body):
            s = body[i]
            if isinstance(s, For):
                self.loop(s)
                self.passing.clear()
            elif isinstance(s, Set) and s.value.op == "together":
                run = [s]
                while i + len(run) < len(body) and isinstance(n := body[i + len(run)], Set) and \
                        n.value.op == "together":
                    run.append(n)
                self.together(run)
                i += len(run) - 1
                self.passing.clear()
            elif isinstance(s, Set):
                value = self.emit(s.value, bool(s.reg.args) and self.lanes > 1)
                if wide(s.reg) and not wide(s.value):
                    value = self.words(s.value)
                self.do(f"{self.regs[s.reg]} = {value};")
                self.forget(s.reg)
            else:
                self.store(s)
                if self.read_write:
                    self.passing.clear()
            i += 1

    def forget(self, r: Expr) -> None:
        """A register has another value now."""
        for e in [e for e in self.passing if isinstance(e, Expr) and r in e.vars]:
            del self.passing[e]

    def together(self, sets: list[Set]) -> None:
        """Folds registers of all invocations of a workgroup: a tree, whose order is fixed."""
        n = self.kernel.team
        names = []
        for s in sets:
            x = s.value.args[0]
            name = self.fresh("w")
            t = self.type_of(x, self.is_vector(x))
            t = "u32" if t == "bool" else t
            self.shared.append(f"var<workgroup> {name}: array<{t}, {n}>;")
            names.append((name, x, self.type_of(x, self.is_vector(x)) == "bool"))
            value = self.emit(x)
            self.do(f"{name}[team] = {f'u32({value})' if names[-1][2] else value};")
        self.do("workgroupBarrier();")
        self.do(f"for (var step = {n // 2}; step > 0; step >>= 1u) {{ if (team < step) {{")
        for (name, x, flag), s in zip(names, sets):
            a, b = f"{name}[team]", f"{name}[team + step]"
            if flag:
                text = f"{a} {'|' if s.value.attr in ('sum', 'max') else '&'} {b}"
            else:
                text = self.fold(s.value.attr, x, a, b, self.is_vector(x))
            self.do(f"{name}[team] = {text};")
        self.do("} workgroupBarrier(); }")
        for (name, _, flag), s in zip(names, sets):
            self.do(f"{self.regs[s.reg]} = {name}[0]{' != 0u' if flag else ''};")

    def loop(self, s: For) -> None:
        extent, outer = self.emit(s.extent), self.scopes[-1]
        if wide(s.extent):
            extent = f"bitcast<i32>({extent}.x)"
        name = self.fresh("i")
        inner = Scope()
        inner.memo[s.var] = self.counted(name, s.var, inner)
        self.passing.clear()
        self.scopes.append(inner)
        self.depth_of[s.var] = len(self.scopes) - 1
        self.block(s.body)
        self.scopes.pop()
        del self.depth_of[s.var]
        outer.lines += [f"for (var {name} = 0; {name} < {extent}; {name}++) {{", *inner.lines, "}"]

    def counted(self, name: str, v: Expr, scope: Scope) -> str:
        """A variable that is an i32, as a value of its bounds."""
        if not wide(v):
            return name
        value = self.fresh()
        scope.lines.append(f"let {value} = vec2u(bitcast<u32>({name}), "
                           f"bitcast<u32>({name} >> 31u));")
        return value

    def store(self, s: Store) -> None:
        b, t = s.buffer, self.kernel.buffers[s.buffer][0]
        vec = self.lanes > 1 and (self.lane in s.index.vars or self.is_vector(s.value))
        if not vec:
            value = self.emit(s.value)
            self.put(b, t, s.index, self.stored(value, s.value, t), s.guard)
            return
        base, step = self.lane_form(s.index)
        value = self.emit(s.value, True)
        varies = s.guard is not None and self.is_vector(s.guard)
        if b in self.quads:
            text = f"b{b}[{self.at(symbolic.floordiv(base, 4))}] = {value};"
            self.guarded(text, s.guard)
            return
        if self.packed(b) and step == 1 and not varies and b not in self.atomic:
            place = self.at(symbolic.floordiv(base, 32 // t.bits))
            words = self.packed_words(value, t)
            for i, w in enumerate(words):
                self.guarded(f"b{b}[{place}{f' + {i}' if i else ''}] = {w};", s.guard)
            return
        if not value.isidentifier():
            value = self.line(value, len(self.scopes) - 1)
        for k in range(self.lanes):
            env = {self.lane: const(k)}
            guard = substitute(s.guard, env) if s.guard is not None else None
            if guard is symbolic.FALSE:
                continue
            one = self.stored(f"{value}.{'xyzw'[k]}", s.value, t)
            self.put(b, t, substitute(s.index, env), one, None if guard is symbolic.TRUE else guard)

    def packed_words(self, value: str, t: DType) -> list[str]:
        """The lanes of a vector as words."""
        if t is FLOAT16:
            if self.lanes == 2:
                return [f"pack2x16float({value})"]
            return [f"pack2x16float({value}.{p})" for p in ("xy", "zw")]
        u = f"vec{self.lanes}<u32>"
        mask = (1 << t.bits) - 1
        v = self.line(f"{u}({value})" if t is BOOL or t.kind == "u" else
                      f"bitcast<{u}>({value}) & {u}({mask}u)", len(self.scopes) - 1)
        count = 32 // t.bits
        return [" | ".join(
            f"({v}.{'xyzw'[k]} << {(k % count) * t.bits}u)" if k % count else f"{v}.{'xyzw'[k]}"
            for k in range(start, start + count)) for start in range(0, self.lanes, count)]

    def stored(self, value: str, e: Expr, t: DType) -> str:
        """A value as it is stored: the low bits of a word for packed types."""
        if t.bits == 64:
            return value if wide(e) else self.widened(value, e)
        if t is FLOAT16 and not self.f16:
            return f"pack2x16float(vec2f({value}, 0.0f))"
        if t.bits < 32 and not t.is_float:
            if t is BOOL or t.kind == "u":
                return f"u32({value})"
            return f"bitcast<u32>({value}) & {(1 << t.bits) - 1}u"
        return value

    def put(self, b: int, t: DType, index: Expr, value: str, guard: Expr | None) -> None:
        """Stores one element."""
        if not self.packed(b):
            self.guarded(f"b{b}[{self.at(index)}] = {value};", guard)
            return
        count = 32 // t.bits
        place = self.at(symbolic.floordiv(index, count))
        within = symbolic.mod(index, count)
        shift = f"{int(within.attr) * t.bits}u" if within.op == "const" else \
            f"(u32({self.at(within)}) * {t.bits}u)"
        mask = (1 << t.bits) - 1
        self.guarded(f"atomicAnd(&b{b}[{place}], ~({mask}u << {shift})); "
                     f"atomicOr(&b{b}[{place}], ({value}) << {shift});", guard)

    def guarded(self, text: str, guard: Expr | None) -> None:
        if guard is None or guard is symbolic.TRUE:
            self.do(text)
        elif guard is not symbolic.FALSE:
            self.do(f"if ({self.emit(guard)}) {{ {text} }}")

    def function(self) -> str:
        k = self.kernel
        top = self.scopes[0]
        team = k.team > 1
        size = k.team if team else self.gpu.workgroup
        for i, name in enumerate(k.symbols):
            top.lines.append(f"let s{i} = symbols.s{i};")
            for v in _symbols(k):
                if v.attr[0] == name:
                    top.memo[v] = self.counted(f"s{i}", v, top)
        top.lines.append("let group = id.x + id.y * count.x;")
        if team:
            top.lines.append("let g = i32(group);")
            top.lines.append("let team = i32(local);")
            for v in _variables(k.body):
                if v.attr[0] == TEAM:
                    top.memo[v] = "team"
        else:
            top.lines.append(f"let g = i32(group * {size}u + local);")
        top.memo[k.grid_var] = "g"
        limit = self.emit(k.grid)
        top.lines.append(f"if (g >= {limit}) {{ return; }}")
        body = list(k.body)
        for r in _registers(k.body):
            name = self.regs[r] = self.fresh("r")
            vec = bool(r.args) and self.lanes > 1
            start = self.zero(r, vec)
            first = body[0] if body else None
            if isinstance(first, Set) and first.reg is r and first.value.op == "const":
                start = self.words(first.value) if wide(r) else self.emit(first.value, vec)
                del body[0]
            top.lines.append(f"var {name} = {start};")
        self.block(tuple(body))
        head = []
        if self.f16:
            head.append("enable f16;")
        for i in range(len(k.buffers)):
            access = "read_write" if i in k.shares else "read"
            head.append(f"@group(0) @binding({i}) var<storage, {access}> b{i}: "
                        f"array<{self.element(i)}>;")
        if k.symbols:
            fields = ", ".join(f"s{i}: i32" for i in range(len(k.symbols)))
            head += [f"struct Symbols {{ {fields} }}",
                     f"@group(0) @binding({len(k.buffers)}) var<uniform> symbols: Symbols;"]
        return "\n".join([
            *head, *self.shared, *self.helpers.values(),
            f"@compute @workgroup_size({size})",
            "fn main(@builtin(workgroup_id) id: vec3u, @builtin(num_workgroups) count: vec3u, "
            "@builtin(local_invocation_index) local: u32) {",
            *_inlined(top.lines), "}", ""])


LONGEST = 300
"""Characters of an expression up to which others are written into it."""


def _inlined(lines: list[str]) -> list[str]:
    """The lines with values that are used once written where they are used.

    Not into another block, which may be evaluated more often, and not past a change of what a value
    reads: registers and memory that is written.
    """
    uses: dict[str, list[int]] = {}
    for n, line in enumerate(lines):
        for name in NAME.findall(line):
            uses.setdefault(name, []).append(n)
    out: list[str | None] = list(lines)
    for n in range(len(lines)):
        found = LET.fullmatch(out[n] or "")
        if found is None:
            continue
        name, text = found.groups()
        if len(uses[name]) != 2 or len(text) > LONGEST or CALL.search(text):
            continue
        at = uses[name][1]
        between = lines[n + 1:at]
        if any(x.startswith(("for ", "}")) or "{" in x for x in between) or \
                lines[at].startswith("for ") or not len(out[at] or "") < 2 * LONGEST:
            continue
        reads = set(REGISTER.findall(text))
        if "b" in {r[0] for r in reads} and any(STORED.search(x) for x in between) or any(
                (m := REGISTER.match(x)) and m.group() in reads for x in between):
            continue
        # nothing binds more strongly beside it; a comparison does
        alone = rf"((?<![!=<>])= |\[){name}[;\]]"
        if not SIMPLE.fullmatch(text) and not re.search(alone, out[at] or ""):
            text = f"({text})"
        out[at] = re.sub(rf"\b{name}\b", lambda _, t=text: t, out[at] or "")  # type: ignore[misc]
        out[n] = None
    return [_accumulated(x) for x in out if x is not None]


def _accumulated(line: str) -> str:
    """``r = r + x;`` as ``r += x;``, where x is one term."""
    found = ACCUMULATE.fullmatch(line)
    if found is None:
        return line
    rest = found[2]
    if rest[0] == "(" and _closes(rest) == len(rest) - 1:
        return f"{found[1]} += {rest[1:-1]};"
    return f"{found[1]} += {rest};" if SIMPLE.fullmatch(rest) else line


def _closes(text: str) -> int:
    """Where the parenthesis that a text begins with ends."""
    depth = 0
    for n, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if not depth:
            return n
    return -1


NAME = re.compile(r"\bv\d+\b")
LET = re.compile(r"let (v\d+) = (.*);")
REGISTER = re.compile(r"\b[rb]\d+\b")
STORED = re.compile(r"^b\d+\[|atomic|^if ")
CALL = re.compile(r"atomic")
SIMPLE = re.compile(r"[\w.]+|[\w<>]+\([^()]*\)|b\d+\[[^\[\]]*\]")
ACCUMULATE = re.compile(r"(r\d+) = \1 \+ (.+);")


def symbolic_load(e: Expr, index: Expr, guard: Expr | None) -> Expr:
    """The load of one lane."""
    if guard is symbolic.FALSE:
        return const(0, e.dtype)
    args = (index,) if guard is None or guard is symbolic.TRUE else (index, guard)
    return make("load", args, e.attr, e.dtype, e.lo, e.hi)


def _multiple(e: Expr, n: int) -> bool:
    """Whether an index is known to be a multiple of n."""
    terms, c0 = symbolic.linear(e)
    return c0 % n == 0 and all(c % n == 0 or _factor(x, c, n) for x, c in terms.items())


def _factor(x: Expr, c: int, n: int) -> bool:
    return x.op == "mul" and x.attr == "index" and any(
        a.op == "const" and int(a.attr) * c % n == 0 for a in x.args)


def _residue(e: Expr) -> int | None:
    """The index modulo 4 where that is known."""
    terms, c0 = symbolic.linear(e)
    return c0 % 4 if all(c % 4 == 0 for c in terms.values()) else None


def _grouped(index: Expr) -> tuple[Expr, int]:
    """(number of the group of four, place in it) of an index whose residue is known."""
    residue = _residue(index)
    assert residue is not None
    return symbolic.floordiv(index - residue, 4), residue


def _parts(s: Stmt) -> list[Expr]:
    if isinstance(s, For):
        return [s.extent]
    if isinstance(s, Set):
        return [s.value]
    return [s.index, s.value, *([s.guard] if s.guard is not None else [])]


def _accesses(body: tuple[Stmt, ...]) -> list[tuple[int, Expr, Expr | None, bool]]:
    """(buffer, index, guard, whether it is written) of every access."""
    out: list[tuple[int, Expr, Expr | None, bool]] = []
    seen: set[Expr] = set()

    def walk(e: Expr) -> None:
        stack = [e]
        while stack:
            x = stack.pop()
            if x in seen:
                continue
            seen.add(x)
            if x.op == "load":
                out.append((x.attr, x.args[0], x.args[1] if len(x.args) > 1 else None, False))
            stack.extend(x.args)

    def visit(body: tuple[Stmt, ...]) -> None:
        for s in body:
            for e in _parts(s):
                walk(e)
            if isinstance(s, Store):
                out.append((s.buffer, s.index, s.guard, True))
            elif isinstance(s, For):
                visit(s.body)

    visit(body)
    return out


def _variables(body: tuple[Stmt, ...]) -> set[Expr]:
    out: set[Expr] = set()
    for s in body:
        out |= {v for e in _parts(s) for v in e.vars if v.op == "var"}
        if isinstance(s, For):
            out |= _variables(s.body)
    return out


def _symbols(k: Kernel) -> list[Expr]:
    """The variables that stand for the kernel's scalars."""
    return [v for v in {*_variables(k.body), *k.grid.vars} if v.attr[0] in k.symbols]


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
    """The shader's text. UnsupportedError for a type that WGSL can't compute in."""
    return Renderer(kernel, target).function()


__all__ = ["render", "wide"]
