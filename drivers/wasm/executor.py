"""The entries of a wasm plan: LLVM IR text of its steps, and of the threads that share them.

Compiled and linked with the plan's kernels. All memory is at addresses that are known here, so a
step is a call with constant arguments. With more than one thread a launch that is worth it is put
on a board, one at a time: a word with what is left to claim of it, its function and arguments. The
caller claims pieces from the front, the others from the back, fewer the fewer are left. Pieces do
not depend on each other, so the results do not depend on the number of threads.

The caller may be a page's main thread, which must not sleep: it looks until the others are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tinyedge.codegen.link.wasm import PAGE, Module
from tinyedge.dtype import DTYPES
from tinyedge.plan import (
    FIRST_EXTERNAL,
    Copy,
    If,
    Launch,
    Loop,
    Plan,
    Ref,
    Size,
    Step,
    evaluate,
    flat,
)

RUN, WORK, STOP, WARM, FILTER = "run", "work", "stop", "warm", "filter"
STACK, STACKS = 1 << 18, 8
"""Bytes of a thread's stack, and how many there are room for."""

# The board: byte offsets from `BOARD`. What threads write stands on cache lines of its own.
BOARD = 1024
CLAIM, DONE, GENERATION, SLEEPERS, STOPPED, JOB = 0, 64, 128, 192, 256, 320
FUNCTION, BUFFERS, SCALARS, UNITS, PIECES = (JOB + 8 * i for i in range(5))
SYMBOLS = BOARD + 384
"""Where symbols, and behind them the counters of loops, stand, eight bytes each."""
MOST_SYMBOLS = 64
FIRST = SYMBOLS + 8 * MOST_SYMBOLS
"""The first address behind all of this."""

# The claim word: launch << 40 | first unclaimed unit << 20 | end of the unclaimed units.
LAUNCH_SHIFT, FIRST_SHIFT, UNIT_MASK = 40, 20, (1 << 20) - 1
UNITS_PER_THREAD = 32
"""Units that a launch is divided into, for each thread; a claim takes one or more."""
PARTS = 16
"""Calls that a launch is divided into where there is one thread."""
SMALL = 30000
"""Operations and bytes of a launch that one thread does sooner than several could meet for it."""
SPINS = 500_000
"""Turns for which an idle thread looks for work before it sleeps: about two milliseconds, longer
than any step that one thread does alone. To be woken takes 50 microseconds and more."""
TURNS = 1 << 33
"""Turns without headway after which a run gives another thread up: some ten seconds."""
NAP = 1_000_000_000
"""Nanoseconds that an idle thread sleeps at most at a time."""


@dataclass(frozen=True)
class Layout:
    """Addresses in the linear memory: of each arena and port, in the order of a plan's arenas, and
    the first one behind them."""

    arenas: tuple[int, ...]
    end: int


def layout(plan: Plan) -> Layout:
    """Where a plan's arenas and ports lie; ports have room for their largest size."""
    highest = {name: high for name, (_, high) in plan.symbols.items()}
    sizes = list(plan.arenas)
    for port in (*plan.inputs, *plan.outputs):
        count = 1
        for d in port.shape:
            count *= evaluate(d, highest)
        sizes.append(count * DTYPES[port.dtype].itemsize)
    places, at = [], FIRST
    for size in sizes:
        at = -(-at // 64) * 64
        places.append(at)
        at += size + 64  # a vector may be read whole at the end of a buffer
    return Layout(tuple(places), -(-at // 64) * 64)


def entries(plan: Plan, where: Layout, module: Module) -> dict[str, int]:
    """What who loads the module has to know: addresses, and the place of the memory's flag."""
    ports = where.arenas[FIRST_EXTERNAL:]
    out = {"memory_flag": module.flag, "pages": module.end // PAGE, "symbols": SYMBOLS,
           "stacks": module.stacks, "stack_size": STACK, "warmers": len(_warmers(plan))}
    out |= dict(zip(("constants", "scratch", "states"), where.arenas))
    out |= {f"input{i}": at for i, at in enumerate(ports[:len(plan.inputs)])}
    return out | {f"output{i}": at for i, at in enumerate(ports[len(plan.inputs):])}


def exports(plan: Plan) -> tuple[str, ...]:
    """Names of the functions that a plan's module has for those who load it."""
    return (RUN, WORK, STOP, WARM, *[FILTER] * bool(plan.provenance.get("filters")))


class _Writer:
    """Writes the body of `run`."""

    def __init__(self, plan: Plan, where: Layout, names: Sequence[str]) -> None:
        self.plan, self.where, self.names = plan, where, names
        self.lines: list[str] = []
        self.tables: dict[tuple[int, ...], str] = {}
        self.count = 0

    def line(self, text: str) -> str:
        self.count += 1
        self.lines.append(f"  %v{self.count} = {text}")
        return f"%v{self.count}"

    def label(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def address(self, ref: Ref) -> int:
        return self.where.arenas[ref.arena] + ref.offset

    def symbol(self, name: str) -> str:
        at = SYMBOLS + 8 * self.names.index(name)
        return self.line(f"load i64, ptr inttoptr (i32 {at} to ptr), align 8")

    def size(self, size: Size) -> str:
        """The i64 value of a size."""
        if isinstance(size, int):
            return str(size)
        if size[0] == "sym":
            return self.symbol(size[1])
        a, b = self.size(size[1]), self.size(size[2])
        if size[0] in ("min", "max"):
            less = self.line(f"icmp {'slt' if size[0] == 'min' else 'sgt'} i64 {a}, {b}")
            return self.line(f"select i1 {less}, i64 {a}, i64 {b}")
        # sizes and their parts are never negative
        name = {"add": "add", "mul": "mul", "floordiv": "sdiv", "mod": "srem"}[size[0]]
        return self.line(f"{name} i64 {a}, {b}")

    def table(self, addresses: tuple[int, ...]) -> str:
        if addresses not in self.tables:
            self.tables[addresses] = f"@buffers{len(self.tables)}"
        return self.tables[addresses]

    def steps(self, steps: Sequence[Step]) -> None:
        for s in steps:
            if isinstance(s, Launch):
                self.launch(s)
            elif isinstance(s, Copy):
                count = self.size(s.source.size)
                self.lines.append(
                    f"  call void @llvm.memmove.p0.p0.i64(ptr inttoptr (i32 "
                    f"{self.address(s.target)} to ptr), ptr inttoptr (i32 "
                    f"{self.address(s.source)} to ptr), i64 {count}, i1 false)")
            elif isinstance(s, If):
                then, other, after = self.label("then"), self.label("else"), self.label("after")
                self.branch(s.cond, then, other)
                for name, body in ((then, s.then), (other, s.other)):
                    self.lines.append(f"{name}:")
                    self.steps(body)
                    self.lines.append(f"  br label %{after}")
                self.lines.append(f"{after}:")
            else:
                self.loop(s)

    def branch(self, cond: Ref, then: str, other: str) -> None:
        byte = self.line(f"load i8, ptr inttoptr (i32 {self.address(cond)} to ptr), align 1")
        test = self.line(f"icmp ne i8 {byte}, 0")
        self.lines.append(f"  br i1 {test}, label %{then}, label %{other}")

    def loop(self, s: Loop) -> None:
        head, go, body, after = (self.label(n) for n in ("head", "go", "body", "after"))
        at = f"ptr inttoptr (i32 {SYMBOLS + 8 * self.names.index(s.symbol)} to ptr), align 8"
        self.lines += [f"  store i64 0, {at}", f"  br label %{head}", f"{head}:"]
        turn = self.line(f"load i64, {at}")
        trips = self.line(f"load i64, ptr inttoptr (i32 {self.address(s.trips)} to ptr), align 8")
        more = self.line(f"icmp slt i64 {turn}, {trips}")
        self.lines += [f"  br i1 {more}, label %{go}, label %{after}", f"{go}:"]
        self.branch(s.cond, body, after)
        self.lines.append(f"{body}:")
        self.steps(s.body)
        old = self.line(f"load i64, {at}")
        new = self.line(f"add i64 {old}, 1")
        self.lines += [f"  store i64 {new}, {at}", f"  br label %{head}", f"{after}:"]

    def launch(self, s: Launch) -> None:
        kernel = self.plan.kernels[s.kernel]
        table = self.table(tuple(self.address(r) for r in s.buffers))
        grid = self.size(s.grid)
        scalars = "null"
        if s.scalars:
            scalars = f"inttoptr (i32 {SYMBOLS} to ptr)"
            if list(s.scalars) != list(self.names[:len(s.scalars)]):
                scalars = self.line(f"alloca [{len(s.scalars)} x i64], align 8")
                for i, name in enumerate(s.scalars):
                    v = self.symbol(name)
                    p = self.line(f"getelementptr i64, ptr {scalars}, i32 {i}")
                    self.lines.append(f"  store i64 {v}, ptr {p}, align 8")
        if s.grid == 1 or kernel.flops + kernel.bytes < SMALL:
            self.lines.append(
                f"  call void @{kernel.name}(ptr {table}, ptr {scalars}, i64 0, i64 {grid})")
            return
        late = self.line(f"call i32 @share(i32 %threads, ptr @{kernel.name}, ptr {table}, "
                         f"ptr {scalars}, i64 {grid})")
        bad, on = self.line(f"icmp ne i32 {late}, 0"), self.label("on")
        self.lines += [f"  br i1 {bad}, label %lost, label %{on}", f"{on}:"]


def _warmers(plan: Plan) -> list[Launch]:
    """The first launch of each kernel, of those that need no symbols."""
    found: dict[int, Launch] = {}
    for s in flat(plan.steps):
        if isinstance(s, Launch) and not s.scalars and isinstance(s.grid, int):
            found.setdefault(s.kernel, s)
    return list(found.values())


def loop_symbols(steps: Sequence[Step]) -> Iterator[str]:
    """The counters of all loops, outer ones first."""
    for s in steps:
        if isinstance(s, Loop):
            yield s.symbol
            yield from loop_symbols(s.body)
        elif isinstance(s, If):
            yield from loop_symbols(s.then)
            yield from loop_symbols(s.other)


def _at(offset: int) -> str:
    return f"ptr inttoptr (i32 {BOARD + offset} to ptr)"


MOST_TAPS = 64
"""Taps of a filter that `filter` transforms."""

FILTER_IR = f"""
; transforms block `number` of `blocks` blocks of filters, float32 [taps, inner], which stand packed
; at the end of the room of all blocks of [places, inner], `at`; inner is a multiple of four. A
; column of taps is read before its places are written: these cover no other column, and no block
; that is yet to come. matrix: float32 [places, taps].
define void @{FILTER}(ptr %at, i32 %blocks, i32 %number, i32 %inner, i32 %places, i32 %taps,
    ptr %matrix) nounwind {{
entry:
  %held = alloca [{MOST_TAPS} x <4 x float>], align 16
  %left = sub i32 %blocks, %number
  %more = sub i32 %places, %taps
  %ahead = mul i32 %left, %more
  %rows = mul i32 %number, %places
  %start = mul i32 %rows, %inner
  %to = getelementptr float, ptr %at, i32 %start
  %skip = mul i32 %ahead, %inner
  %from = getelementptr float, ptr %to, i32 %skip
  br label %column
column:
  %j = phi i32 [ 0, %entry ], [ %j1, %end ]
  %some = icmp ult i32 %j, %inner
  br i1 %some, label %load, label %out
load:
  %t = phi i32 [ 0, %column ], [ %t1, %load ]
  %tn = mul i32 %t, %inner
  %tj = add i32 %tn, %j
  %source = getelementptr float, ptr %from, i32 %tj
  %v = load <4 x float>, ptr %source, align 4
  %slot = getelementptr <4 x float>, ptr %held, i32 %t
  store <4 x float> %v, ptr %slot, align 16
  %t1 = add i32 %t, 1
  %moret = icmp ult i32 %t1, %taps
  br i1 %moret, label %load, label %place
place:
  %p = phi i32 [ 0, %load ], [ %p1, %store ]
  %pt = mul i32 %p, %taps
  br label %term
term:
  %k = phi i32 [ 0, %place ], [ %k1, %term ]
  %sum = phi <4 x float> [ zeroinitializer, %place ], [ %sum1, %term ]
  %ptk = add i32 %pt, %k
  %factor = getelementptr float, ptr %matrix, i32 %ptk
  %f = load float, ptr %factor, align 4
  %f0 = insertelement <4 x float> poison, float %f, i32 0
  %f4 = shufflevector <4 x float> %f0, <4 x float> poison, <4 x i32> zeroinitializer
  %kept = getelementptr <4 x float>, ptr %held, i32 %k
  %w = load <4 x float>, ptr %kept, align 16
  %term1 = fmul <4 x float> %f4, %w
  %sum1 = fadd <4 x float> %sum, %term1
  %k1 = add i32 %k, 1
  %morek = icmp ult i32 %k1, %taps
  br i1 %morek, label %term, label %store
store:
  %pn = mul i32 %p, %inner
  %pj = add i32 %pn, %j
  %target = getelementptr float, ptr %to, i32 %pj
  store <4 x float> %sum1, ptr %target, align 4
  %p1 = add i32 %p, 1
  %morep = icmp ult i32 %p1, %places
  br i1 %morep, label %place, label %end
end:
  %j1 = add i32 %j, 4
  br label %column
out:
  ret void
}}
"""


def executor_ir(plan: Plan, where: Layout) -> str:
    """LLVM IR text of run(threads) -> 0, or 1 where a thread did not answer in time; of work(),
    the loop of another thread; of stop(), which ends those loops; and of warm(number), which calls
    a kernel for nothing but that the engine compiles it well. It may be called while the constants
    are on their way: kernels keep to their buffers whatever stands in them."""
    names = [*plan.symbols, *loop_symbols(plan.steps)]
    w = _Writer(plan, where, names)
    w.steps(plan.steps)
    launches = _warmers(plan)
    warmers = ", ".join(
        f"{{ptr, ptr, i32}} {{ptr @{plan.kernels[s.kernel].name}, "
        f"ptr {w.table(tuple(w.address(r) for r in s.buffers))}, i32 {s.grid}}}"
        for s in launches)
    tables = "\n".join(
        f"{name} = internal constant [{max(len(a), 1)} x i32] "
        f"[{', '.join(f'i32 {x}' for x in a) or 'i32 0'}], align 4" for a, name in w.tables.items())
    kernels = "\n".join(f"declare void @{k.name}(ptr, ptr, i64, i64)" for k in plan.kernels)
    body = "\n".join(w.lines)
    more = FILTER_IR if FILTER in exports(plan) else ""
    return f"""{more}
{tables}
{kernels}
declare void @llvm.memmove.p0.p0.i64(ptr, ptr, i64, i1)
declare i32 @llvm.wasm.memory.atomic.wait32(ptr, i32, i64)
declare i32 @llvm.wasm.memory.atomic.notify(ptr, i32)

define i32 @{RUN}(i32 %threads) nounwind {{
entry:
{body}
  ret i32 0
lost:
  ret i32 1
}}

; claims units of the launch on the board and does them; false if there are none
define internal i1 @take(i32 %threads, i1 %front) nounwind noinline {{
entry:
  %share = mul i32 %threads, 2
  %share.w = zext i32 %share to i64
  %w0 = load atomic i64, {_at(CLAIM)} seq_cst, align 8
  br label %look
look:
  %w = phi i64 [ %w0, %entry ], [ %w1, %try ]
  %hi = and i64 %w, {UNIT_MASK}
  %lo0 = lshr i64 %w, {FIRST_SHIFT}
  %lo = and i64 %lo0, {UNIT_MASK}
  %left = sub i64 %hi, %lo
  %some = icmp ult i64 %lo, %hi
  br i1 %some, label %try, label %none
try:
  %part = udiv i64 %left, %share.w
  %zero = icmp eq i64 %part, 0
  %count = select i1 %zero, i64 1, i64 %part
  %up = shl i64 %count, {FIRST_SHIFT}
  %ahead = add i64 %w, %up
  %back = sub i64 %w, %count
  %new = select i1 %front, i64 %ahead, i64 %back
  %pair = cmpxchg {_at(CLAIM)}, i64 %w, i64 %new seq_cst seq_cst
  %w1 = extractvalue {{ i64, i1 }} %pair, 0
  %won = extractvalue {{ i64, i1 }} %pair, 1
  br i1 %won, label %do, label %look
do:
  %last = sub i64 %hi, %count
  %first = select i1 %front, i64 %lo, i64 %last
  %end = add i64 %first, %count
  %units = load i64, {_at(UNITS)}, align 8
  %all = load i64, {_at(PIECES)}, align 8
  %p0 = mul i64 %first, %all
  %p1 = mul i64 %end, %all
  %begin = udiv i64 %p0, %units
  %stop = udiv i64 %p1, %units
  %fn = load ptr, {_at(FUNCTION)}, align 4
  %buffers = load ptr, {_at(BUFFERS)}, align 4
  %scalars = load ptr, {_at(SCALARS)}, align 4
  call void %fn(ptr %buffers, ptr %scalars, i64 %begin, i64 %stop)
  %old = atomicrmw add {_at(DONE)}, i64 %count seq_cst
  ret i1 true
none:
  ret i1 false
}}

; does a launch with the other threads; 1 where one of them does not finish its part
define internal i32 @share(i32 %threads, ptr %fn, ptr %buffers, ptr %scalars, i64 %grid)
    nounwind noinline {{
entry:
  %alone = icmp ult i32 %threads, 2
  br i1 %alone, label %single, label %several
single:
  ; in parts, since an engine that has compiled a kernel better meanwhile calls it from then on
  %part = phi i64 [ 0, %entry ], [ %part1, %single ]
  %part1 = add i64 %part, 1
  %part.b = mul i64 %part, %grid
  %part.e = mul i64 %part1, %grid
  %part.begin = udiv i64 %part.b, {PARTS}
  %part.end = udiv i64 %part.e, {PARTS}
  call void %fn(ptr %buffers, ptr %scalars, i64 %part.begin, i64 %part.end)
  %parts = icmp ult i64 %part1, {PARTS}
  br i1 %parts, label %single, label %finished
finished:
  ret i32 0
several:
  %threads.w = zext i32 %threads to i64
  %most = mul i64 %threads.w, {UNITS_PER_THREAD}
  %few = icmp ult i64 %grid, %most
  %units = select i1 %few, i64 %grid, i64 %most
  store ptr %fn, {_at(FUNCTION)}, align 4
  store ptr %buffers, {_at(BUFFERS)}, align 4
  store ptr %scalars, {_at(SCALARS)}, align 4
  store i64 %units, {_at(UNITS)}, align 8
  store i64 %grid, {_at(PIECES)}, align 8
  store atomic i64 0, {_at(DONE)} seq_cst, align 8
  %before = load atomic i64, {_at(CLAIM)} seq_cst, align 8
  %number = lshr i64 %before, {LAUNCH_SHIFT}
  %next = add i64 %number, 1
  %tag = shl i64 %next, {LAUNCH_SHIFT}
  %word = or i64 %tag, %units
  store atomic i64 %word, {_at(CLAIM)} seq_cst, align 8
  %asleep = load atomic i32, {_at(SLEEPERS)} seq_cst, align 4
  %some = icmp ne i32 %asleep, 0
  br i1 %some, label %wake, label %work
wake:
  %g = atomicrmw add {_at(GENERATION)}, i32 1 seq_cst
  %woken = call i32 @llvm.wasm.memory.atomic.notify({_at(GENERATION)}, i32 -1)
  br label %work
work:
  %more = call i1 @take(i32 %threads, i1 true)
  br i1 %more, label %work, label %wait
wait:
  %turn = phi i64 [ 0, %work ], [ %turn1, %again ]
  %done = load atomic i64, {_at(DONE)} seq_cst, align 8
  %ready = icmp eq i64 %done, %units
  br i1 %ready, label %out, label %again
again:
  %turn1 = add i64 %turn, 1
  %late = icmp ugt i64 %turn1, {TURNS}
  br i1 %late, label %lost, label %wait
out:
  ret i32 0
lost:
  ret i32 1
}}

define void @{WORK}(i32 %threads) nounwind {{
entry:
  br label %idle
idle:
  %n = phi i32 [ 0, %entry ], [ 0, %busy ], [ %n1, %looked ], [ 0, %slept ]
  %stopped = load atomic i32, {_at(STOPPED)} seq_cst, align 4
  %end = icmp ne i32 %stopped, 0
  br i1 %end, label %out, label %look
look:
  %took = call i1 @take(i32 %threads, i1 false)
  br i1 %took, label %busy, label %looked
busy:
  br label %idle
looked:
  %n1 = add i32 %n, 1
  %tired = icmp ugt i32 %n1, {SPINS}
  br i1 %tired, label %sleep, label %idle
sleep:
  ; what is put on the board from here on sees a sleeper, or is seen before sleeping
  %g = load atomic i32, {_at(GENERATION)} seq_cst, align 4
  %s0 = atomicrmw add {_at(SLEEPERS)}, i32 1 seq_cst
  %last = call i1 @take(i32 %threads, i1 false)
  br i1 %last, label %slept, label %nap
nap:
  %r = call i32 @llvm.wasm.memory.atomic.wait32({_at(GENERATION)}, i32 %g, i64 {NAP})
  br label %slept
slept:
  %s1 = atomicrmw sub {_at(SLEEPERS)}, i32 1 seq_cst
  br label %idle
out:
  ret void
}}

@warmers = internal constant [{len(launches)} x {{ptr, ptr, i32}}] [{warmers}], align 4

define void @{WARM}(i32 %number) nounwind {{
  %entry = getelementptr [{len(launches)} x {{ptr, ptr, i32}}], ptr @warmers, i32 0, i32 %number
  %p1 = getelementptr i8, ptr %entry, i32 4
  %p2 = getelementptr i8, ptr %entry, i32 8
  %fn = load ptr, ptr %entry, align 4
  %buffers = load ptr, ptr %p1, align 4
  %grid = load i32, ptr %p2, align 4
  %grid.w = zext i32 %grid to i64
  %late = call i32 @share(i32 1, ptr %fn, ptr %buffers, ptr null, i64 %grid.w)
  ret void
}}

define void @{STOP}() nounwind {{
  store atomic i32 1, {_at(STOPPED)} seq_cst, align 4
  %g = atomicrmw add {_at(GENERATION)}, i32 1 seq_cst
  %woken = call i32 @llvm.wasm.memory.atomic.notify({_at(GENERATION)}, i32 -1)
  ret void
}}
"""


__all__ = ["FILTER", "RUN", "STACK", "STACKS", "STOP", "WARM", "WORK", "Layout", "entries",
           "executor_ir", "exports", "layout"]
