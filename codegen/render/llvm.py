"""Loop IR to LLVM IR text: CPU now; the same text suits LLVM's other targets.

The last stage before machine code. The kernel becomes one C function (see `tinyedge.plan.Kernel`)
in SSA form. Every expression is emitted once, in the outermost loop where all its variables are
known, so LLVM needs no loop-invariant code motion. Addresses are sums built up loop by loop, with
the constant part left to the addressing mode.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from tinyedge.dtype import BFLOAT16, BOOL, FLOAT16, FLOAT32, FLOAT64, INT32, DType

from .. import symbolic
from ..ir import LANE, Expr, For, Kernel, Set, Stmt, Store, const, runs, substitute, value_of, var
from ..llvm_target import CpuTarget

TYPES = {"bool": "i1", "float16": "half", "bfloat16": "bfloat", "float32": "float",
         "float64": "double"}
FLOAT_OPS = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}
INT_OPS = {"add": "add", "sub": "sub", "mul": "mul", "and": "and", "or": "or", "xor": "xor",
           "shl": "shl"}
INTRINSICS = {"sqrt": "sqrt", "floor": "floor", "ceil": "ceil", "round": "roundeven",
              "trunc": "trunc", "abs": "fabs"}
FLOAT_TESTS = {"eq": "oeq", "ne": "une", "lt": "olt", "le": "ole"}
DOTS = {
    "vpdpbusd": ("i32", 1, "llvm.x86.avx512.vpdpbusd.{bits}"),  # AVX-512 VNNI, AVX-VNNI
    "usdot": ("i8", 4, "llvm.aarch64.neon.usdot.v4i32.v16i8"),  # Arm FEAT_I8MM
    "dpbf16ps": ("bfloat", 2, "llvm.x86.avx512bf16.dpbf16ps.{bits}"),  # AVX-512 BF16
}
"""The instruction of a `dot` -> what LLVM takes 32 bits of its operands as, and its name there."""
INT_TESTS = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le"}


def scalar_type(t: DType) -> str:
    return TYPES.get(t.name) or f"i{t.bits}"


def memory_type(t: DType) -> str:
    return "i8" if t is BOOL else scalar_type(t)


def literal(v: int | float, t: DType) -> str:
    """A constant; floats by their bits, so that nothing is lost in decimal."""
    if not t.is_float:
        return ("true" if v else "false") if t is BOOL else str(int(v))
    if t.name == "float16":
        return f"0xH{struct.unpack('<H', struct.pack('<e', v))[0]:04X}"
    if t.name == "bfloat16":
        return f"0xR{struct.unpack('<I', struct.pack('<f', v))[0] >> 16:04X}"
    if t.name == "float32":
        try:
            v = struct.unpack("<f", struct.pack("<f", v))[0]
        except OverflowError:
            v = float("inf") if v > 0 else float("-inf")
    return f"0x{struct.unpack('<Q', struct.pack('<d', v))[0]:016X}"


@dataclass
class Scope:
    """The code of one loop level while it is being written."""

    label: str
    lines: list[str] = field(default_factory=list)
    memo: dict[object, str] = field(default_factory=dict)


class Renderer:
    """Writes one kernel; use `render`."""

    def __init__(self, kernel: Kernel, madd: str = "") -> None:
        self.kernel, self.madd = kernel, madd
        self.lanes = kernel.lanes
        self.scopes = [Scope("entry")]
        self.depth_of: dict[Expr, int] = {}
        self.regs: dict[Expr, str] = {}
        self.volatile: dict[object, str] = {}
        self.pins: dict[Expr, bool] = {}
        self.declared: set[str] = set()
        self.count = 0
        self.written = {i for i, (_, w) in enumerate(kernel.buffers) if w}

    # names and text

    def fresh(self, stem: str = "v") -> str:
        self.count += 1
        return f"%{stem}{self.count}"

    def type_of(self, t: DType, vector: bool) -> str:
        return f"<{self.lanes} x {scalar_type(t)}>" if vector else scalar_type(t)

    def line(self, text: str, depth: int) -> str:
        name = self.fresh()
        self.scopes[depth].lines.append(f"  {name} = {text}")
        return name

    def intrinsic(self, name: str, result: str, arguments: str) -> str:
        kinds = ", ".join(a.strip().split(" %")[0] for a in self._split(arguments))
        self.declared.add(f"declare {result} @{name}({kinds})")
        return f"call contract {result} @{name}({arguments})" if "f" in result.split("x ")[-1][:1] \
            or "double" in result or "half" in result else f"call {result} @{name}({arguments})"

    @staticmethod
    def _split(arguments: str) -> list[str]:
        out, deep, start = [], 0, 0
        for i, c in enumerate(arguments):
            deep += c in "<("
            deep -= c in ">)"
            if c == "," and not deep:
                out.append(arguments[start:i])
                start = i + 1
        # a type is what stands before the value; constants are written after a space
        parts = [*out, arguments[start:]]
        return [" ".join(p.split()[:-1]) if "<" not in p else p[:p.index(">") + 1] for p in parts]

    # expressions

    def is_vector(self, e: Expr) -> bool:
        return self.lanes > 1 and e.op != "hreduce" and any(
            v.attr[0] == LANE if v.op == "var" else bool(v.args) for v in e.vars
        )

    def depth(self, e: Expr) -> int:
        """The outermost scope in which `e` can be evaluated; -1: where we stand (registers, and
        memory that this kernel writes)."""
        if self.read_write and self.pinned(e):
            return -1
        d = 0
        for v in e.vars:
            if v.op == "reg":
                return -1
            d = max(d, self.depth_of.get(v, 0))
        return d

    def pinned(self, e: Expr) -> bool:
        """Whether `e` reads memory that this kernel writes."""
        if not e.args:
            return False
        if (found := self.pins.get(e)) is None:
            found = self.pins[e] = e.op == "load" and e.attr in self.written or \
                any(map(self.pinned, e.args))
        return found

    def emit(self, e: Expr, vector: bool | None = None) -> str:
        """The SSA name of `e`; scalars are splat when `vector` asks for it."""
        if vector and not self.is_vector(e):
            return self.splat(self.emit(e), e)
        if e.op == "const":
            return literal(value_of(e), e.dtype)
        if e.op == "reg":
            return self.regs[e]
        d = self.depth(e)
        if d < 0:
            memo, d = self.volatile, len(self.scopes) - 1
        else:
            memo = self.scopes[d].memo
        found = memo.get(e)
        if found is None:
            found = memo[e] = self.compute(e, d)
        return found

    def splat(self, name: str, e: Expr) -> str:
        d = self.depth(e)
        memo = self.scopes[d].memo if d >= 0 else self.volatile
        d = d if d >= 0 else len(self.scopes) - 1
        t = scalar_type(e.dtype)
        if e.op == "const":
            return f"splat ({t} {name})"
        if (found := memo.get(("splat", name, self.lanes))) is None:
            v = f"<{self.lanes} x {t}>"
            one = self.line(f"insertelement {v} poison, {t} {name}, i32 0", d)
            zeros = f"<{self.lanes} x i32> zeroinitializer"
            found = self.line(f"shufflevector {v} {one}, {v} poison, {zeros}", d)
            memo[("splat", name, self.lanes)] = found
        return found

    def steps(self) -> str:
        """<0, 1, 2, ...>."""
        return "<" + ", ".join(f"i64 {i}" for i in range(self.lanes)) + ">"

    def compute(self, e: Expr, d: int) -> str:
        vec = self.is_vector(e)
        t = self.type_of(e.dtype, vec)
        if e.op == "word":  # neighbours that fill 32 bits
            base, step = self.lane_form(e.args[0])
            assert step == (32 // self.kernel.buffers[e.attr][0].bits if vec else 0)
            return self.line(f"load {t}, ptr {self.address(e.attr, base, d)}, align 1", d)
        if e.op == "prefetch":  # into the second level; what does not exist is not asked for
            self.declared.add("declare void @llvm.prefetch.p0(ptr, i32 immarg, i32 immarg, "
                              "i32 immarg)")
            at = f"ptr %b{e.attr}, i64 {self.emit(e.args[0])}"  # may lie behind the buffer
            there = self.line(
                f"getelementptr {memory_type(self.kernel.buffers[e.attr][0])}, {at}", d)
            self.scopes[d].lines.append(
                f"  call void @llvm.prefetch.p0(ptr {there}, i32 0, i32 2, i32 1)")
            return "0"
        if e.op == "dot":
            kind, count, name = DOTS[e.attr]
            words, parts = f"<{self.lanes} x i32>", f"<{self.lanes * count} x {kind}>"
            sides = [self.emit(a, True) for a in e.args]
            if parts != words:
                sides[1:] = [self.line(f"bitcast {words} {v} to {parts}", d) for v in sides[1:]]
            name = name.format(bits=32 * self.lanes)
            self.declared.add(f"declare {t} @{name}({t}, {parts}, {parts})")
            return self.line(
                f"call {t} @{name}({t} {sides[0]}, {parts} {sides[1]}, {parts} {sides[2]})", d)
        if e.op == "var":
            assert e.attr[0] == LANE, f"variable {e} has no value in {self.kernel.name}"
            return self.steps() if vec else "0"
        if e.op == "affine":
            return self.affine(e, d, vec, t)
        if e.op == "load":
            return self.load(e, d, vec)
        if e.op == "hreduce":
            return self.horizontal(e, d)
        if self.madd and vec and e.op == "add" and e.dtype is FLOAT32 and self.lanes == 4 and \
                (m := next((x for x in reversed(e.args) if x.op == "mul"), None)) is not None:
            other = e.args[1] if m is e.args[0] else e.args[0]
            operands = ", ".join(f"{t} {self.emit(x, True)}" for x in (*m.args, other))
            return self.line(self.intrinsic(f"{self.madd}.v4f32", t, operands), d)
        a = [self.emit(x, vec) for x in e.args]
        x = e.args[0]
        s = self.type_of(x.dtype, vec)
        if e.op == "floordiv" or e.op == "mod" and e.attr == "index":
            whole = e.op == "floordiv"
            if x.lo >= 0:
                return self.line(f"{'udiv' if whole else 'urem'} {t} {a[0]}, {a[1]}", d)
            r = self.line(f"srem {t} {a[0]}, {a[1]}", d)
            low = self.line(f"icmp slt {t} {r}, {self.zero(t)}", d)
            i1 = self.type_of(BOOL, vec)
            if not whole:
                more = self.line(f"add {t} {r}, {a[1]}", d)
                return self.line(f"select {i1} {low}, {t} {more}, {t} {r}", d)
            q = self.line(f"sdiv {t} {a[0]}, {a[1]}", d)
            return self.line(f"add {t} {q}, {self.line(f'sext {i1} {low} to {t}', d)}", d)
        if e.op == "ge0":
            return self.line(f"icmp sge {s} {a[0]}, {self.zero(s)}", d)
        if e.op == "where":
            c = self.type_of(BOOL, vec)
            if vec and not self.is_vector(x):
                c, a[0] = "i1", self.emit(x)
            return self.line(f"select {c} {a[0]}, {t} {a[1]}, {t} {a[2]}", d)
        if e.op == "cast":
            if x.dtype.is_float and e.dtype.is_int and e.dtype.bits < 32 and _within(x, e.dtype):
                # in range already: through int32, which every processor converts to in one step
                one = self.type_of(INT32, vec)
                a[0] = self.line(f"fptosi {self.type_of(x.dtype, vec)} {a[0]} to {one}", d)
                return self.line(f"trunc {one} {a[0]} to {t}", d)
            return self.cast(a[0], x.dtype, e.dtype, d, vec)
        if e.op == "bitcast":
            if BOOL in (x.dtype, e.dtype):  # one bit in a register, eight in memory
                return self.cast(a[0], x.dtype, e.dtype, d, vec)
            return self.line(f"bitcast {s} {a[0]} to {t}", d)
        return self.arithmetic(e, a, s, t, d, vec)

    @staticmethod
    def zero(t: str) -> str:
        return "zeroinitializer" if t[0] == "<" else "0"

    def arithmetic(self, e: Expr, a: list[str], s: str, t: str, d: int, vec: bool) -> str:
        o, kind = e.op, e.args[0].dtype
        if kind.is_float:
            suffix = ("v" + str(self.lanes) if vec else "") + f"f{kind.bits}"
            if o in FLOAT_OPS:
                return self.line(f"{FLOAT_OPS[o]} contract {t} {a[0]}, {a[1]}", d)
            if o == "neg":
                return self.line(f"fneg {t} {a[0]}", d)
            if o in INTRINSICS:
                return self.line(
                    self.intrinsic(f"llvm.{INTRINSICS[o]}.{suffix}", t, f"{t} {a[0]}"), d)
            if o in ("max", "min"):
                # with a constant, which is not nan, one select keeps a nan in the other operand
                for i in (0, 1):
                    if e.args[i].op == "const" and value_of(e.args[i]) == value_of(e.args[i]):
                        test = "ogt" if o == "max" else "olt"
                        c = self.line(f"fcmp {test} {s} {a[i]}, {a[1 - i]}", d)
                        b = self.type_of(BOOL, vec)
                        return self.line(f"select {b} {c}, {t} {a[i]}, {t} {a[1 - i]}", d)
                name = f"llvm.{'maximum' if o == 'max' else 'minimum'}.{suffix}"
                return self.line(self.intrinsic(name, t, f"{t} {a[0]}, {t} {a[1]}"), d)
            if o in FLOAT_TESTS:
                return self.line(f"fcmp {FLOAT_TESTS[o]} {s} {a[0]}, {a[1]}", d)
            if o == "isnan":
                return self.line(f"fcmp uno {s} {a[0]}, {a[0]}", d)
            raise AssertionError(f"no rendering of {o} for {kind}")
        signed = kind.kind == "i"
        sign = "s" if signed else "u"
        if o in INT_OPS:
            return self.line(f"{INT_OPS[o]} {t} {a[0]}, {a[1]}", d)
        if o == "shr":
            return self.line(f"{'ashr' if signed else 'lshr'} {t} {a[0]}, {a[1]}", d)
        if o == "not":
            ones = "true" if kind is BOOL else "-1"
            ones = f"splat ({scalar_type(kind)} {ones})" if vec else ones
            return self.line(f"xor {t} {a[0]}, {ones}", d)
        if o == "neg":
            return self.line(f"sub {t} {self.zero(t)}, {a[0]}", d)
        if o == "abs":
            if not signed:
                return a[0]
            n = self.line(f"sub {t} {self.zero(t)}, {a[0]}", d)
            c = self.line(f"icmp slt {t} {a[0]}, {self.zero(t)}", d)
            return self.line(f"select {self.type_of(BOOL, vec)} {c}, {t} {n}, {t} {a[0]}", d)
        if o in INT_TESTS:
            test = o if o in ("eq", "ne") else sign + INT_TESTS[o]
            return self.line(f"icmp {test} {s} {a[0]}, {a[1]}", d)
        if o in ("max", "min"):
            if kind is BOOL:
                return self.line(f"{'or' if o == 'max' else 'and'} {t} {a[0]}, {a[1]}", d)
            c = self.line(f"icmp {sign}{'gt' if o == 'max' else 'lt'} {t} {a[0]}, {a[1]}", d)
            return self.line(f"select {self.type_of(BOOL, vec)} {c}, {t} {a[0]}, {t} {a[1]}", d)
        if o in ("div", "mod"):
            # division by zero and the one overflow would trap: divide by 1 there instead
            one = f"splat ({scalar_type(kind)} 1)" if vec else "1"
            b1 = self.type_of(BOOL, vec)
            bad = self.line(f"icmp eq {t} {a[1]}, {self.zero(t)}", d)
            by = self.line(f"select {b1} {bad}, {t} {one}, {t} {a[1]}", d)
            if not signed:
                return self.line(f"{'udiv' if o == 'div' else 'urem'} {t} {a[0]}, {by}", d)
            ones = f"splat ({scalar_type(kind)} -1)" if vec else "-1"
            minus = self.line(f"icmp eq {t} {by}, {ones}", d)
            by = self.line(f"select {b1} {minus}, {t} {one}, {t} {by}", d)
            if o == "div":
                q = self.line(f"sdiv {t} {a[0]}, {by}", d)
                n = self.line(f"sub {t} {self.zero(t)}, {a[0]}", d)
                return self.line(f"select {b1} {minus}, {t} {n}, {t} {q}", d)
            r = self.line(f"srem {t} {a[0]}, {by}", d)
            # srem has the dividend's sign, mod the divisor's
            mixed = self.line(f"xor {t} {r}, {by}", d)
            c1 = self.line(f"icmp slt {t} {mixed}, {self.zero(t)}", d)
            c2 = self.line(f"icmp ne {t} {r}, {self.zero(t)}", d)
            c = self.line(f"and {b1} {c1}, {c2}", d)
            fixed = self.line(f"add {t} {r}, {by}", d)
            return self.line(f"select {b1} {c}, {t} {fixed}, {t} {r}", d)
        raise AssertionError(f"no rendering of {o} for {kind}")

    def cast(self, a: str, src: DType, dst: DType, d: int, vec: bool) -> str:
        s, t = self.type_of(src, vec), self.type_of(dst, vec)
        if src is dst:
            return a
        if dst is BOOL:
            return self.line(f"fcmp une {s} {a}, {self.fzero(s)}" if src.is_float
                             else f"icmp ne {s} {a}, {self.zero(s)}", d)
        if src.is_float and dst.is_float:
            if (src.bits, dst) == (64, FLOAT16):
                a, s = self.round_to_odd(a, d, vec), self.type_of(FLOAT32, vec)
            return self.line(f"{'fpext' if dst.bits > src.bits else 'fptrunc'} {s} {a} to {t}", d)
        if src.is_float:
            # out-of-range values saturate: the plain conversion would be undefined
            name = "llvm.fpto%si.sat" % ("u" if dst.kind == "u" else "s")
            n = f"v{self.lanes}" if vec else ""
            return self.line(
                self.intrinsic(f"{name}.{n}i{dst.bits}.{n}f{src.bits}", t, f"{s} {a}"), d)
        if dst.is_float:
            return self.line(f"{'si' if src.kind == 'i' else 'ui'}tofp {s} {a} to {t}", d)
        width = 1 if src is BOOL else src.bits
        if dst.bits < width:
            return self.line(f"trunc {s} {a} to {t}", d)
        if dst.bits == width:
            return a
        return self.line(f"{'sext' if src.kind == 'i' else 'zext'} {s} {a} to {t}", d)

    def round_to_odd(self, a: str, d: int, vec: bool) -> str:
        """float64 -> float32, inexact values to the odd one of their neighbours: rounding again,
        to float16, gives what rounding once would (x86-64 has no such conversion)."""
        double, single = self.type_of(FLOAT64, vec), self.type_of(FLOAT32, vec)
        bits, flag = self.type_of(INT32, vec), self.type_of(BOOL, vec)
        suffix = f".v{self.lanes}f64" if vec else ".f64"
        f = self.line(f"fptrunc {double} {a} to {single}", d)
        back = self.line(f"fpext {single} {f} to {double}", d)
        sizes = [self.line(self.intrinsic(f"llvm.fabs{suffix}", double, f"{double} {x}"), d)
                 for x in (back, a)]
        above = self.line(f"fcmp ogt {double} {sizes[0]}, {sizes[1]}", d)
        inexact = self.line(f"fcmp one {double} {back}, {a}", d)
        b = self.line(f"bitcast {single} {f} to {bits}", d)
        step = self.line(f"zext {flag} {above} to {bits}", d)
        b = self.line(f"sub {bits} {b}, {step}", d)
        odd = self.line(f"zext {flag} {inexact} to {bits}", d)
        b = self.line(f"or {bits} {b}, {odd}", d)
        return self.line(f"bitcast {bits} {b} to {single}", d)

    @staticmethod
    def fzero(t: str) -> str:
        return "zeroinitializer" if t[0] == "<" else literal(0.0, _by_llvm[t])

    def affine(self, e: Expr, d: int, vec: bool, t: str) -> str:
        c0, coefs = e.attr
        total = ""
        # terms of outer scopes first: their partial sums are shared
        order = sorted(zip(coefs, e.args), key=lambda p: (self.depth(p[1]) % 99, p[1].serial))
        for c, x in order:
            name = self.emit(x, vec)
            if c != 1:
                k = f"splat (i64 {c})" if vec else str(c)
                name = self.line(f"mul {t} {name}, {k}", d)
            total = self.line(f"add {t} {total}, {name}", d) if total else name
        if c0:
            k = f"splat (i64 {c0})" if vec else str(c0)
            total = self.line(f"add {t} {total}, {k}", d)
        return total

    # memory

    def pointer(self, buffer: int, index: Expr) -> tuple[str, int]:
        """(SSA pointer of buffer + the variable part of index, constant part in elements)."""
        terms, c0 = symbolic.linear(index)
        t = memory_type(self.kernel.buffers[buffer][0])
        levels: dict[int, dict[Expr, int]] = {}
        for x, c in terms.items():
            levels.setdefault(self.depth(x), {})[x] = c
        name, key = f"%b{buffer}", f"b{buffer}"
        for d in sorted(levels, key=lambda d: d % 1000):
            part = symbolic.linear_sum((c, x) for x, c in levels[d].items())
            at = d if d >= 0 else len(self.scopes) - 1
            memo = self.scopes[at].memo if d >= 0 else self.volatile
            key = f"{key}+{part.serial}"
            if (found := memo.get(("ptr", key))) is None:
                i = self.emit(part)
                found = self.line(f"getelementptr inbounds {t}, ptr {name}, i64 {i}", at)
                memo[("ptr", key)] = found
            name = found
        return name, c0

    def address(self, buffer: int, index: Expr, d: int) -> str:
        name, c0 = self.pointer(buffer, index)
        if c0:
            t = memory_type(self.kernel.buffers[buffer][0])
            name = self.line(f"getelementptr inbounds {t}, ptr {name}, i64 {c0}", d)
        return name

    def lane_form(self, index: Expr) -> tuple[Expr, int | None]:
        """(index at lane 0, its step from lane to lane; None where that is not constant)."""
        lane = self.lane
        if lane not in index.vars:
            return index, 0
        terms, _ = symbolic.linear(index)
        step = terms.get(lane, 0)
        base = index - lane * step
        return (base, step) if lane not in base.vars else (index, None)

    def load(self, e: Expr, d: int, vec: bool) -> str:
        t = self.kernel.buffers[e.attr][0]
        index = e.args[0]
        guard = e.args[1] if len(e.args) > 1 else None
        if not vec:
            return self.scalar_load(e.attr, t, index, guard, d)
        base, step = self.lane_form(index)
        guard_varies = guard is not None and self.is_vector(guard)
        m = f"<{self.lanes} x {memory_type(t)}>"
        if step == 1:
            p = self.address(e.attr, base, d)
            if guard is None:
                v = self.line(f"load {m}, ptr {p}, align {t.itemsize}", d)
            else:
                g = self.emit(guard, True)
                mask = f"<{self.lanes} x i1> {g}"
                name = f"llvm.masked.load.v{self.lanes}{_mangled(memory_type(t))}.p0"
                self.declared.add(
                    f"declare {m} @{name}(ptr, i32 immarg, <{self.lanes} x i1>, {m})")
                v = self.line(f"call {m} @{name}(ptr {p}, i32 {t.itemsize}, {mask}, "
                              f"{m} zeroinitializer)", d)
        elif step == 0 and not guard_varies:
            v = self.line(f"insertelement {m} poison, {memory_type(t)} "
                          f"{self.raw_scalar(e.attr, t, base, guard, d)}, i32 0", d)
            v = self.line(f"shufflevector {m} {v}, {m} poison, "
                          f"<{self.lanes} x i32> zeroinitializer", d)
        elif not guard_varies and (pieces := runs(index, self.lane, self.lanes)) is not None:
            v = self.joined(e.attr, t, substitute(index, {self.lane: const(0)}),
                            pieces, None if guard is None else self.emit(guard), d)
        else:
            v = "poison"
            for k in range(self.lanes):
                env = {self.lane: const(k)}
                holds = substitute(guard, env) if guard is not None else None
                one = self.raw_scalar(e.attr, t, substitute(index, env), holds, d)
                v = self.line(f"insertelement {m} {v}, {memory_type(t)} {one}, i32 {k}", d)
        if t is BOOL:
            v = self.line(f"icmp ne {m} {v}, zeroinitializer", d)
        return v

    def joined(self, buffer: int, t: DType, first: Expr, pieces: list[tuple[int, list[int]]],
               guard: str | None, d: int) -> str:
        """The vector whose lanes are read in contiguous runs; zeros where the guard is false."""
        m = memory_type(t)
        whole = f"<{self.lanes} x {m}>"
        v, filled = "", [-1] * self.lanes
        for place, lanes in pieces:
            n = len(lanes)
            p = self.address(buffer, first + place, d)
            if guard is not None:  # as many elements as a run has are there
                p = self.line(f"select i1 {guard}, ptr {p}, ptr %b{buffer}", d)
            part = self.line(f"load <{n} x {m}>, ptr {p}, align {t.itemsize}", d)
            wide = ", ".join(f"i32 {i}" if i < n else "i32 poison" for i in range(self.lanes))
            part = self.line(f"shufflevector <{n} x {m}> {part}, <{n} x {m}> poison, "
                             f"<{self.lanes} x i32> <{wide}>", d)
            for i, k in enumerate(lanes):
                filled[k] = self.lanes + i
            mask = ", ".join(
                "i32 poison" if f < 0 else f"i32 {f if k in lanes else k}"
                for k, f in enumerate(filled))
            v = self.line(f"shufflevector {whole} {v or 'poison'}, {whole} {part}, "
                          f"<{self.lanes} x i32> <{mask}>", d)
        return v if guard is None else self.line(
            f"select i1 {guard}, {whole} {v}, {whole} zeroinitializer", d)

    def raw_scalar(self, buffer: int, t: DType, index: Expr, guard: Expr | None, d: int) -> str:
        """One element as it stands in memory; 0 where the guard does not hold."""
        m = memory_type(t)
        if guard is symbolic.FALSE:
            return literal(0, t) if t.is_float else "0"
        if guard is not None and guard is not symbolic.TRUE:
            g = self.emit(guard)
            p = self.address(buffer, index, d)
            # element 0 exists, so reading it in place of the wrong one is safe
            p = self.line(f"select i1 {g}, ptr {p}, ptr %b{buffer}", d)
            v = self.line(f"load {m}, ptr {p}, align {t.itemsize}", d)
            return self.line(f"select i1 {g}, {m} {v}, {m} {literal(0, t) if t.is_float else 0}", d)
        p = self.address(buffer, index, d)
        return self.line(f"load {m}, ptr {p}, align {t.itemsize}", d)

    def scalar_load(self, b: int, t: DType, index: Expr, guard: Expr | None, d: int) -> str:
        v = self.raw_scalar(b, t, index, guard, d)
        return self.line(f"icmp ne i8 {v}, 0", d) if t is BOOL else v

    def store(self, s: Store, value: str) -> None:
        t = self.kernel.buffers[s.buffer][0]
        d = len(self.scopes) - 1
        lines = self.scopes[d].lines
        vec = self.lane in s.index.vars or self.is_vector(s.value)
        m = memory_type(t)
        if vec:
            if t is BOOL:
                value = self.line(f"zext <{self.lanes} x i1> {value} to <{self.lanes} x i8>", d)
            m = f"<{self.lanes} x {m}>"
            base, step = self.lane_form(s.index)
            if step == 1 and s.guard is None:
                lines.append(f"  store {m} {value}, ptr {self.address(s.buffer, base, d)}, "
                             f"align {t.itemsize}")
                return
            if step == 1:
                assert s.guard is not None
                p = self.address(s.buffer, base, d)
                name = f"llvm.masked.store.v{self.lanes}{_mangled(memory_type(t))}.p0"
                self.declared.add(
                    f"declare void @{name}({m}, ptr, i32 immarg, <{self.lanes} x i1>)")
                g = self.emit(s.guard, True)
                lines.append(f"  call void @{name}({m} {value}, ptr {p}, i32 {t.itemsize}, "
                             f"<{self.lanes} x i1> {g})")
                return
            for k in range(self.lanes):
                env = {self.lane: const(k)}
                guard = substitute(s.guard, env) if s.guard is not None else None
                if guard is symbolic.FALSE:
                    continue
                one = self.line(f"extractelement {m} {value}, i32 {k}", d)
                self.scalar_store(s.buffer, t, substitute(s.index, env), one, guard)
            return
        if t is BOOL:
            value = self.line(f"zext i1 {value} to i8", d)
        self.scalar_store(s.buffer, t, s.index, value, s.guard)

    def scalar_store(self, b: int, t: DType, index: Expr, value: str, guard: Expr | None) -> None:
        d = len(self.scopes) - 1
        m = memory_type(t)
        p = self.address(b, index, d)
        if guard is None or guard is symbolic.TRUE:
            self.scopes[d].lines.append(f"  store {m} {value}, ptr {p}, align {t.itemsize}")
            return
        # a guarded scalar store is a masked store of one lane
        g = self.emit(guard)
        name = f"llvm.masked.store.v1{_mangled(m)}.p0"
        self.declared.add(f"declare void @{name}(<1 x {m}>, ptr, i32 immarg, <1 x i1>)")
        v = self.line(f"insertelement <1 x {m}> poison, {m} {value}, i32 0", d)
        k = self.line(f"insertelement <1 x i1> poison, i1 {g}, i32 0", d)
        self.scopes[d].lines.append(
            f"  call void @{name}(<1 x {m}> {v}, ptr {p}, i32 {t.itemsize}, <1 x i1> {k})")

    def horizontal(self, e: Expr, d: int) -> str:
        """Folds lanes pairwise, in a fixed order."""
        x = e.args[0]
        v, n, t = self.emit(x, True), self.lanes, scalar_type(x.dtype)
        while n > 1:
            h = n // 2
            one = f"<{n} x {t}>"
            halves = []
            for start in (0, h):
                mask = ", ".join(f"i32 {start + i}" for i in range(h))
                halves.append(self.line(
                    f"shufflevector {one} {v}, {one} poison, <{h} x i32> <{mask}>", d))
            v, n = self.combine(e.attr, halves, h, x.dtype, d), h
        return self.line(f"extractelement <1 x {t}> {v}, i32 0", d)

    def combine(self, kind: str, halves: list[str], n: int, t: DType, d: int) -> str:
        s = f"<{n} x {scalar_type(t)}>"
        a, b = halves
        if kind in ("sum", "prod"):
            o = {"sum": "add", "prod": "mul"}[kind]
            return self.line(f"{FLOAT_OPS[o] if t.is_float else o} {s} {a}, {b}", d)
        if t.is_float:
            name = f"llvm.{kind}imum.v{n}f{t.bits}"
            return self.line(self.intrinsic(name, s, f"{s} {a}, {s} {b}"), d)
        if t is BOOL:
            return self.line(f"{'or' if kind == 'max' else 'and'} {s} {a}, {b}", d)
        test = ("s" if t.kind == "i" else "u") + ("gt" if kind == "max" else "lt")
        c = self.line(f"icmp {test} {s} {a}, {b}", d)
        return self.line(f"select <{n} x i1> {c}, {s} {a}, {s} {b}", d)

    # statements

    def block(self, body: tuple[Stmt, ...]) -> None:
        i = 0
        while i < len(body):
            s = body[i]
            if isinstance(s, Store):
                # values first, then stores: nothing has to wait for a store that it can't alias
                run = [s]
                while i + len(run) < len(body) and isinstance(body[i + len(run)], Store) and \
                        not self.read_write:
                    run.append(body[i + len(run)])  # type: ignore[arg-type]
                values = [self.emit(x.value, self.lane in x.index.vars) for x in run]
                for x, v in zip(run, values):
                    self.store(x, v)
                if self.read_write:
                    self.volatile.clear()
                i += len(run)
                continue
            if isinstance(s, Set):
                self.regs[s.reg] = self.emit(s.value, bool(s.reg.args))
                self.volatile.clear()
            else:
                self.loop(s)
            i += 1

    def loop(self, s: For) -> None:
        extent = self.emit(s.extent)
        outer = self.scopes[-1]
        self.count += 1
        head, done = f"loop{self.count}", f"done{self.count}"
        regs = sorted(_assigned(s.body) & set(self.regs), key=lambda r: r.serial)
        before = {r: self.regs[r] for r in regs}
        inner = Scope(head)
        self.scopes.append(inner)
        self.depth_of[s.var] = len(self.scopes) - 1
        counter = self.fresh("i")
        inner.memo[s.var] = counter
        phis = {r: self.fresh("a") for r in regs}
        self.regs.update(phis)
        self.volatile.clear()
        self.block(s.body)
        after = {r: self.regs[r] for r in regs}
        step = self.fresh("i")
        test = self.fresh("t")
        self.scopes.pop()
        del self.depth_of[s.var]
        lines = outer.lines
        at_least_one = s.extent.lo >= 1
        entry = outer.label
        if not at_least_one:
            any_ = self.fresh("t")
            lines.append(f"  {any_} = icmp sgt i64 {extent}, 0")
            lines.append(f"  br i1 {any_}, label %{head}, label %{done}")
        else:
            lines.append(f"  br label %{head}")
        lines.append(f"{head}:")
        lines.append(f"  {counter} = phi i64 [ 0, %{entry} ], [ {step}, %{inner.label} ]")
        for r in regs:
            t = self.type_of(r.dtype, bool(r.args))
            lines.append(f"  {phis[r]} = phi {t} [ {before[r]}, %{entry} ], "
                         f"[ {after[r]}, %{inner.label} ]")
        lines += inner.lines
        lines.append(f"  {step} = add nuw nsw i64 {counter}, 1")
        lines.append(f"  {test} = icmp slt i64 {step}, {extent}")
        lines.append(f"  br i1 {test}, label %{head}, label %{done}")
        lines.append(f"{done}:")
        outer.label = done
        for r in regs:
            if at_least_one:
                self.regs[r] = after[r]
            else:
                t = self.type_of(r.dtype, bool(r.args))
                name = self.fresh("a")
                lines.append(f"  {name} = phi {t} [ {before[r]}, %{entry} ], "
                             f"[ {after[r]}, %{inner.label} ]")
                self.regs[r] = name
        self.volatile.clear()

    def function(self) -> str:
        k = self.kernel
        self.lane: Expr = var(LANE, 0, k.lanes - 1) if k.lanes > 1 else const(0)
        loads = set[int]()
        _loaded(k.body, loads, set())
        self.read_write = bool(loads & self.written)
        entry = self.scopes[0].lines
        for i, (t, _) in enumerate(k.buffers):
            if i in k.local:  # whole vectors may be read at its end
                entry.append(f"  %b{i} = alloca [{k.local[i] + 64} x {memory_type(t)}], align 64")
                continue
            entry.append(f"  %q{i} = getelementptr ptr, ptr %buffers, i64 {i}")
            entry.append(f"  %b{i} = load ptr, ptr %q{i}, align 8")
        symbols = _symbols(k)
        for i, name in enumerate(k.symbols):
            entry.append(f"  %y{i} = getelementptr i64, ptr %scalars, i64 {i}")
            entry.append(f"  %s{i} = load i64, ptr %y{i}, align 8")
            if name in symbols:
                self.scopes[0].memo[symbols[name]] = f"%s{i}"
        entry.append("  %some = icmp slt i64 %begin, %end")
        entry.append("  br i1 %some, label %pieces, label %exit")
        # constants hoisted out of the loop over pieces belong before the branch
        branch = entry[-2:]
        del entry[-2:]
        inner = Scope("pieces")
        self.scopes.append(inner)
        self.depth_of[k.grid_var] = 1
        inner.memo[k.grid_var] = "%g"
        start = 0
        for n, s in enumerate(k.body):  # kernels in a row may have vectors of different widths
            if (lane := _lane(s)) not in (None, self.lane):
                self.block(k.body[start:n])
                self.lane, self.lanes, start = lane, lane.hi + 1, n
        self.block(k.body[start:])
        self.scopes.pop()
        text = [
            f"define dso_local void @{k.name}(ptr nocapture readonly %buffers, "
            "ptr nocapture readonly %scalars, i64 %begin, i64 %end) nounwind alignstack(64) {",
            "entry:", *entry, *branch, "pieces:",
            f"  %g = phi i64 [ %begin, %entry ], [ %next, %{inner.label} ]",
            *inner.lines,
            "  %next = add nuw nsw i64 %g, 1", "  %more = icmp slt i64 %next, %end",
            "  br i1 %more, label %pieces, label %exit", "exit:", "  ret void", "}",
        ]
        return "\n".join([*sorted(self.declared), *text]) + "\n"


_by_llvm = {scalar_type(t): t for t in (BFLOAT16, FLOAT16, FLOAT32, FLOAT64)}


def _mangled(t: str) -> str:
    return {"float": "f32", "double": "f64", "half": "f16", "bfloat": "bf16"}.get(t, t)


def _assigned(body: tuple[Stmt, ...]) -> set[Expr]:
    out: set[Expr] = set()
    for s in body:
        if isinstance(s, Set):
            out.add(s.reg)
        elif isinstance(s, For):
            out |= _assigned(s.body)
    return out


def _within(x: Expr, kind: DType) -> bool:
    """Whether constant bounds keep a value in the range of an integer type."""
    low, high = float("-inf"), float("inf")
    while x.op in ("min", "max"):
        bound = next((a for a in x.args if a.op == "const"), None)
        if bound is None:
            return False
        if x.op == "min":
            high = min(high, value_of(bound))
        else:
            low = max(low, value_of(bound))
        x = next(a for a in x.args if a is not bound)
    return low >= kind.limits[0] and high <= kind.limits[1]


def _loaded(body: tuple[Stmt, ...], out: set[int], seen: set[Expr]) -> None:
    """Collects the numbers of the buffers that the statements read."""

    def walk(e: Expr) -> None:
        if e not in seen:
            seen.add(e)
            if e.op == "load":
                out.add(e.attr)
            for a in e.args:
                walk(a)

    for s in body:
        if isinstance(s, For):
            walk(s.extent)
            _loaded(s.body, out, seen)
        else:
            walk(s.value)
            if isinstance(s, Store):
                walk(s.index)
                if s.guard is not None:
                    walk(s.guard)


def _lane(s: Stmt) -> Expr | None:
    """The vector variable of a statement; None where nothing in it is a vector."""
    if isinstance(s, For):
        return next((found for b in s.body if (found := _lane(b)) is not None), None)
    parts = [s.value] if isinstance(s, Set) else [s.index, s.value]
    for v in {v for e in parts for v in e.vars}:
        for lane in (v, *v.args):
            if lane.op == "var" and lane.attr[0] == LANE:
                return lane
    return None


def _symbols(k: Kernel) -> dict[str, Expr]:
    """The symbol variables that occur in a kernel, by name."""
    found: dict[str, Expr] = {}

    def of(body: tuple[Stmt, ...]) -> None:
        for s in body:
            exprs = [s.extent] if isinstance(s, For) else [s.value]
            if isinstance(s, Store):
                exprs += [s.index] + ([s.guard] if s.guard is not None else [])
            for e in exprs:
                for v in e.vars:
                    if v.op == "var" and v.attr[0] in k.symbols:
                        found[v.attr[0]] = v
            if isinstance(s, For):
                of(s.body)

    of(k.body)
    return found


def render(kernel: Kernel, target: CpuTarget) -> str:
    """LLVM IR text of one kernel: a function of the kernel's name."""
    return Renderer(kernel, target.madd).function()
