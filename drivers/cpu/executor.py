"""The native part of the CPU driver: LLVM IR text for the command walker and its threads.

Compiled with a plan's kernels and stored in the plan, so that the machine that runs it needs no
compiler. The calling thread walks the commands alone. A launch that is worth sharing is put on a
board: a word with what is left to claim of it, and a slot with its function and arguments. The
caller takes pieces from the front, the other threads from the back, fewer the fewer are left, so a
thread that is late or that the system has put aside costs the others at most the pieces that it
holds. Pieces do not depend on each other, so the results do not depend on the number of threads.

The layouts below are shared with `tinyedge.drivers.cpu`. Plan files hold this code, so a layout
once released stays readable: a change needs a new `VERSION`, whose number the entries' names end
with, and the driver keeps the older ones.
"""

from __future__ import annotations

from tinyedge.plan import MAX_BUFFERS

VERSION = 1
SUBMIT, WORKER, STOP_ENTRY = (f"tinyedge_{name}_{VERSION}" for name in ("submit", "worker", "stop"))

# The context: byte offsets. What threads write stands on cache lines of its own.
BASES, SYMBOLS, COMMANDS, THREADS, SYMBOL_COUNT = 0, 8, 16, 24, 32
SYSCALL, CLOCK, TIMES, SPIN, PATIENCE = 40, 48, 56, 64, 72
STOP, CLAIM, SLEEPERS, GENERATION, HEAD, TAIL, WAITING = 128, 192, 256, 320, 384, 392, 448
SLOTS = 512

# A slot: byte offsets. Slot RING is the caller's own, for launches that it does not share.
DONE, SLOT_FUNCTION, UNITS, PIECES, SLOT_SCALARS, SLOT_BUFFERS = 0, 64, 72, 80, 128, 256
MAX_SCALARS = 16
SLOT_BYTES = SLOT_BUFFERS + 8 * MAX_BUFFERS
RING = 8
CONTEXT_BYTES = SLOTS + (RING + 1) * SLOT_BYTES

# The claim word: launch << 40 | first unclaimed unit << 20 | end of the unclaimed units.
LAUNCH_SHIFT, FIRST_SHIFT, UNIT_MASK = 40, 20, (1 << 20) - 1
UNITS_PER_THREAD = 32
"""Units that a launch is divided into, for each thread; a claim takes one or more."""

# A command: twelve 64-bit words.
OP, TARGET, FUNCTION, BUFFERS, BUFFER_COUNT, SCALARS, SCALAR_COUNT, AMOUNT, WAIT, SOLO = range(10)
COMMAND_WORDS = 12

# OP. AMOUNT is the grid (LAUNCH), bytes (COPY, MOVE) or a symbol's number (the loop's).
END, LAUNCH, COPY, JUMP, BRANCH_IF_ZERO, SET_ZERO, INCREMENT, BRANCH_IF_DONE, MOVE = range(9)

MAX_SYMBOLS = 64
COPY_PIECE = 16384
"""Bytes of a copy that one thread moves at a time."""
AWAKE = 2000
"""Turns (about 50 microseconds) for which the caller looks whether the others are done before it
sleeps."""
NAP_NS = 2_000_000
"""Nanoseconds that it sleeps at most at a time."""

# Linux system call numbers (arch/x86/entry/syscalls/syscall_64.tbl; include/uapi/asm-generic/
# unistd.h) and <linux/futex.h>
CALLS = {"x86-64": {"futex": 202}, "aarch64": {"futex": 98}}
FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 128, 129

PAUSE = {
    "x86-64": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "aarch64": ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
}


def _field(name: str, offset: int, kind: str = "i64", base: str = "ctx") -> str:
    return (f"  %{name}.p = getelementptr i8, ptr %{base}, i64 {offset}\n"
            f"  %{name} = load {kind}, ptr %{name}.p, align 8\n")


def _at(name: str, offset: int, base: str = "ctx") -> str:
    return f"  %{name} = getelementptr i8, ptr %{base}, i64 {offset}\n"


def _word(name: str, word: int, kind: str = "i64") -> str:
    return _field(name, 8 * word, kind, "cmd")


def executor_ir(arch: str) -> str:
    """LLVM IR text of submit(ctx) -> 0, or 1 where a thread did not answer in time; worker({ctx});
    stop(ctx); under the names in SUBMIT, WORKER and STOP_ENTRY."""
    declare, pause = PAUSE[arch]
    calls = CALLS[arch]
    return f"""
{declare}

define internal void @forward(ptr %to, ptr %from, i64 %bytes) nounwind {{
entry:
  %whole = and i64 %bytes, -64
  %any = icmp ugt i64 %whole, 0
  br i1 %any, label %wide, label %rest
wide:
  %i = phi i64 [ 0, %entry ], [ %i1, %wide ]
  %f = getelementptr i8, ptr %from, i64 %i
  %t = getelementptr i8, ptr %to, i64 %i
  %v = load <16 x i32>, ptr %f, align 1
  store <16 x i32> %v, ptr %t, align 1
  %i1 = add i64 %i, 64
  %more = icmp ult i64 %i1, %whole
  br i1 %more, label %wide, label %rest
rest:
  %j = phi i64 [ %whole, %entry ], [ %whole, %wide ], [ %j1, %one ]
  %left = icmp ult i64 %j, %bytes
  br i1 %left, label %one, label %done
one:
  %jf = getelementptr i8, ptr %from, i64 %j
  %jt = getelementptr i8, ptr %to, i64 %j
  %b = load i8, ptr %jf, align 1
  store i8 %b, ptr %jt, align 1
  %j1 = add i64 %j, 1
  br label %rest
done:
  ret void
}}

define internal void @backward(ptr %to, ptr %from, i64 %bytes) nounwind {{
entry:
  br label %wide
wide:
  %i = phi i64 [ %bytes, %entry ], [ %i1, %move ]
  %room = icmp uge i64 %i, 64
  br i1 %room, label %move, label %rest
move:
  %i1 = sub i64 %i, 64
  %f = getelementptr i8, ptr %from, i64 %i1
  %t = getelementptr i8, ptr %to, i64 %i1
  %v = load <16 x i32>, ptr %f, align 1
  store <16 x i32> %v, ptr %t, align 1
  br label %wide
rest:
  %j = phi i64 [ %i, %wide ], [ %j1, %one ]
  %left = icmp ugt i64 %j, 0
  br i1 %left, label %one, label %done
one:
  %j1 = sub i64 %j, 1
  %jf = getelementptr i8, ptr %from, i64 %j1
  %jt = getelementptr i8, ptr %to, i64 %j1
  %b = load i8, ptr %jf, align 1
  store i8 %b, ptr %jt, align 1
  br label %rest
done:
  ret void
}}

define internal i64 @now(ptr %ctx) nounwind {{
  %ts = alloca [2 x i64], align 8
{_field("clock", CLOCK, "ptr")}
  %r = call i32 %clock(i32 1, ptr %ts)
  %s = load i64, ptr %ts, align 8
  %ns.p = getelementptr i64, ptr %ts, i64 1
  %ns = load i64, ptr %ns.p, align 8
  %big = mul i64 %s, 1000000000
  %all = add i64 %big, %ns
  ret i64 %all
}}

define internal ptr @place(ptr %ctx, ptr %refs, i64 %i) nounwind {{
{_field("bases", BASES, "ptr")}
  %two = shl i64 %i, 1
  %a.p = getelementptr i64, ptr %refs, i64 %two
  %arena = load i64, ptr %a.p, align 8
  %o.p = getelementptr i64, ptr %a.p, i64 1
  %offset = load i64, ptr %o.p, align 8
  %base.p = getelementptr ptr, ptr %bases, i64 %arena
  %base = load ptr, ptr %base.p, align 8
  %at = getelementptr i8, ptr %base, i64 %offset
  ret ptr %at
}}

; the board

define internal ptr @slot(ptr %ctx, i64 %number) nounwind {{
  %o = mul i64 %number, {SLOT_BYTES}
  %at = add i64 %o, {SLOTS}
  %slot = getelementptr i8, ptr %ctx, i64 %at
  ret ptr %slot
}}

define internal void @pieces(ptr %slot, i64 %first, i64 %end) nounwind {{
{_field("fn", SLOT_FUNCTION, "ptr", "slot")}{_at("buffers", SLOT_BUFFERS, "slot")}
{_at("scalars", SLOT_SCALARS, "slot")}
  call void %fn(ptr %buffers, ptr %scalars, i64 %first, i64 %end)
  ret void
}}

; claims units of the launch on the board and does them; false if there are none
define internal i1 @take(ptr %ctx, i1 %front) nounwind noinline {{
entry:
{_at("claim.p", CLAIM)}{_field("threads", THREADS)}
  %share = shl i64 %threads, 1
  %w0 = load atomic i64, ptr %claim.p acquire, align 8
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
  %part = udiv i64 %left, %share
  %zero = icmp eq i64 %part, 0
  %count = select i1 %zero, i64 1, i64 %part
  %up = shl i64 %count, {FIRST_SHIFT}
  %ahead = add i64 %w, %up
  %back = sub i64 %w, %count
  %new = select i1 %front, i64 %ahead, i64 %back
  %pair = cmpxchg ptr %claim.p, i64 %w, i64 %new acq_rel acquire
  %w1 = extractvalue {{ i64, i1 }} %pair, 0
  %won = extractvalue {{ i64, i1 }} %pair, 1
  br i1 %won, label %do, label %look
do:
  %last = sub i64 %hi, %count
  %first = select i1 %front, i64 %lo, i64 %last
  %end = add i64 %first, %count
  %launch = lshr i64 %w, {LAUNCH_SHIFT}
  %number = urem i64 %launch, {RING}
  %slot = call ptr @slot(ptr %ctx, i64 %number)
{_field("units", UNITS, base="slot")}{_field("all", PIECES, base="slot")}
  %p0 = mul i64 %first, %all
  %p1 = mul i64 %end, %all
  %begin = udiv i64 %p0, %units
  %stop = udiv i64 %p1, %units
  call void @pieces(ptr %slot, i64 %begin, i64 %stop)
  %old = atomicrmw add ptr %slot, i64 %count seq_cst
{_at("waiting.p", WAITING)}
  %waits = load atomic i64, ptr %waiting.p seq_cst, align 8
  %asleep = icmp ne i64 %waits, 0
  br i1 %asleep, label %wake, label %took
wake:
{_field("call", SYSCALL, "ptr")}
  %r = call i64 (i64, ...) %call(i64 {calls["futex"]}, ptr %slot, i32 {FUTEX_WAKE_PRIVATE},
    i32 1, ptr null, ptr null, i32 0)
  br label %took
took:
  ret i1 true
none:
  ret i1 false
}}

; waits until every launch is done, awake for a while and then asleep, so that a thread that the
; system has put aside gets this one's processor; true if a thread makes no headway for too long
define internal i1 @settle(ptr %ctx) nounwind noinline {{
entry:
  %timeout = alloca [2 x i64], align 8
{_field("head", HEAD)}{_field("tail", TAIL)}{_field("patience", PATIENCE)}
{_field("call", SYSCALL, "ptr")}{_at("waiting", WAITING)}
  store i64 0, ptr %timeout, align 8
  %ns = getelementptr i64, ptr %timeout, i64 1
  store i64 {NAP_NS}, ptr %ns, align 8
  br label %next
next:
  %t = phi i64 [ %tail, %entry ], [ %t1, %done ]
  %behind = icmp ult i64 %t, %head
  br i1 %behind, label %open, label %out
open:
  %t1 = add i64 %t, 1
  %number = urem i64 %t1, {RING}
  %slot = call ptr @slot(ptr %ctx, i64 %number)
{_field("units", UNITS, base="slot")}
  br label %look
look:
  %n = phi i64 [ 0, %open ], [ %n1, %awake ]
  %d = load atomic i64, ptr %slot acquire, align 8
  %all = icmp eq i64 %d, %units
  br i1 %all, label %done, label %awake
awake:
  {pause}
  %n1 = add i64 %n, 1
  %tired = icmp ugt i64 %n1, {AWAKE}
  br i1 %tired, label %nap, label %look
nap:
  %naps = phi i64 [ 0, %awake ], [ %naps2, %slept ]
  %before = phi i64 [ %d, %awake ], [ %seen, %slept ]
  store atomic i64 1, ptr %waiting seq_cst, align 8
  %seen = load atomic i64, ptr %slot seq_cst, align 8
  %ready = icmp eq i64 %seen, %units
  br i1 %ready, label %up, label %sleep
sleep:
  %low = trunc i64 %seen to i32
  %r = call i64 (i64, ...) %call(i64 {calls["futex"]}, ptr %slot, i32 {FUTEX_WAIT_PRIVATE},
    i32 %low, ptr %timeout, ptr null, i32 0)
  %moved = icmp ne i64 %seen, %before
  %naps1 = add i64 %naps, 1
  %naps2 = select i1 %moved, i64 0, i64 %naps1
  %late = icmp ugt i64 %naps2, %patience
  br i1 %late, label %lost, label %slept
slept:
  br label %nap
up:
  store atomic i64 0, ptr %waiting monotonic, align 8
  br label %done
done:
  br label %next
out:
  store i64 %head, ptr %tail.p, align 8
  ret i1 false
lost:
  ret i1 true
}}

define internal void @wake(ptr %ctx) nounwind {{
{_at("gen.p", GENERATION)}{_field("call", SYSCALL, "ptr")}
  %g = atomicrmw add ptr %gen.p, i64 1 seq_cst
  %r = call i64 (i64, ...) %call(i64 {calls["futex"]}, ptr %gen.p, i32 {FUTEX_WAKE_PRIVATE},
    i32 2147483647, ptr null, ptr null, i32 0)
  ret void
}}

; puts a slot that is filled in on the board and works on it until all of it is claimed
define internal void @share(ptr %ctx, ptr %slot, i64 %head) nounwind {{
entry:
{_field("threads", THREADS)}{_field("all", PIECES, base="slot")}
  %most = mul i64 %threads, {UNITS_PER_THREAD}
  %few = icmp ult i64 %all, %most
  %units = select i1 %few, i64 %all, i64 %most
{_at("units.p", UNITS, "slot")}
  store i64 %units, ptr %units.p, align 8
  store atomic i64 0, ptr %slot monotonic, align 8
{_at("head.p", HEAD)}
  store i64 %head, ptr %head.p, align 8
  %tag = shl i64 %head, {LAUNCH_SHIFT}
  %word = or i64 %tag, %units
{_at("claim.p", CLAIM)}
  store atomic i64 %word, ptr %claim.p seq_cst, align 8
{_at("sleep.p", SLEEPERS)}
  %asleep = load atomic i64, ptr %sleep.p seq_cst, align 8
  %some = icmp ne i64 %asleep, 0
  br i1 %some, label %call.out, label %work
call.out:
  %was = atomicrmw xchg ptr %sleep.p, i64 0 seq_cst
  call void @wake(ptr %ctx)
  br label %work
work:
  %more = call i1 @take(ptr %ctx, i1 true)
  br i1 %more, label %work, label %out
out:
  ret void
}}

define internal void @copy(ptr %buffers, ptr %scalars, i64 %first, i64 %end) nounwind {{
  %to = load ptr, ptr %buffers, align 8
  %from.p = getelementptr ptr, ptr %buffers, i64 1
  %from = load ptr, ptr %from.p, align 8
  %bytes = load i64, ptr %scalars, align 8
  %lo = mul i64 %first, {COPY_PIECE}
  %hi0 = mul i64 %end, {COPY_PIECE}
  %over = icmp ugt i64 %hi0, %bytes
  %hi = select i1 %over, i64 %bytes, i64 %hi0
  %n = sub i64 %hi, %lo
  %t = getelementptr i8, ptr %to, i64 %lo
  %f = getelementptr i8, ptr %from, i64 %lo
  call void @forward(ptr %t, ptr %f, i64 %n)
  ret void
}}

define internal i64 @run(ptr %ctx) nounwind noinline {{
entry:
  %symbols = alloca [{MAX_SYMBOLS} x i64], align 16
{_field("commands", COMMANDS, "ptr")}{_field("threads", THREADS)}{_field("count", SYMBOL_COUNT)}
{_field("given", SYMBOLS, "ptr")}{_field("times", TIMES, "ptr")}
  %timed = icmp ne ptr %times, null
  %one = icmp eq i64 %threads, 1
  br label %copy
copy:
  %c = phi i64 [ 0, %entry ], [ %c1, %copied ]
  %c.more = icmp ult i64 %c, %count
  br i1 %c.more, label %copied, label %start
copied:
  %g.p = getelementptr i64, ptr %given, i64 %c
  %g = load i64, ptr %g.p, align 8
  %s.p = getelementptr i64, ptr %symbols, i64 %c
  store i64 %g, ptr %s.p, align 8
  %c1 = add i64 %c, 1
  br label %copy
start:
  br i1 %timed, label %begin, label %next
begin:
  %t0 = call i64 @now(ptr %ctx)
  br label %next
next:
  %pc = phi i64 [ 0, %start ], [ 0, %begin ], [ %pc.next, %step ]
  %since = phi i64 [ 0, %start ], [ %t0, %begin ], [ %t2, %step ]
  %at = mul i64 %pc, {COMMAND_WORDS}
  %cmd = getelementptr i64, ptr %commands, i64 %at
  %pc1 = add i64 %pc, 1
{_word("wait", WAIT)}
  %waits = icmp ne i64 %wait, 0
  br i1 %waits, label %meet, label %do
meet:
  %late = call i1 @settle(ptr %ctx)
  br i1 %late, label %lost, label %do
do:
{_word("op", OP)}{_word("target", TARGET)}{_word("refs", BUFFERS, "ptr")}
{_word("amount", AMOUNT)}
  switch i64 %op, label %end [
    i64 {LAUNCH}, label %launch
    i64 {COPY}, label %launch
    i64 {MOVE}, label %move
    i64 {JUMP}, label %ahead
    i64 {BRANCH_IF_ZERO}, label %zero
    i64 {SET_ZERO}, label %reset
    i64 {INCREMENT}, label %count.up
    i64 {BRANCH_IF_DONE}, label %finished
  ]
launch:
  %some = icmp ne i64 %amount, 0
  br i1 %some, label %choose, label %after
choose:
{_word("solo", SOLO)}
  %small = icmp ne i64 %solo, 0
  %alone = or i1 %small, %one
{_field("head", HEAD)}{_field("tail", TAIL)}
  %head1 = add i64 %head, 1
  %ring = urem i64 %head1, {RING}
  %number = select i1 %alone, i64 {RING}, i64 %ring
  %slot = call ptr @slot(ptr %ctx, i64 %number)
  %used = sub i64 %head1, %tail
  %full0 = icmp ugt i64 %used, {RING}
  %other = xor i1 %alone, true
  %full = and i1 %full0, %other
  br i1 %full, label %make.room, label %bind
make.room:
  %late2 = call i1 @settle(ptr %ctx)
  br i1 %late2, label %lost, label %bind
bind:
{_word("fn", FUNCTION, "ptr")}{_word("nrefs", BUFFER_COUNT)}{_word("names", SCALARS, "ptr")}
{_word("nnames", SCALAR_COUNT)}
{_at("scalars", SLOT_SCALARS, "slot")}{_at("buffers", SLOT_BUFFERS, "slot")}
{_at("fn.slot", SLOT_FUNCTION, "slot")}{_at("pieces.slot", PIECES, "slot")}
  %copies = icmp eq i64 %op, {COPY}
  %c0 = add i64 %amount, {COPY_PIECE - 1}
  %c2 = udiv i64 %c0, {COPY_PIECE}
  %all = select i1 %copies, i64 %c2, i64 %amount
  %what = select i1 %copies, ptr @copy, ptr %fn
  store ptr %what, ptr %fn.slot, align 8
  store i64 %all, ptr %pieces.slot, align 8
  store i64 %amount, ptr %scalars, align 8
  br label %bound
bound:
  %i = phi i64 [ 0, %bind ], [ %i1, %put ]
  %i.more = icmp ult i64 %i, %nrefs
  br i1 %i.more, label %put, label %name
put:
  %addr = call ptr @place(ptr %ctx, ptr %refs, i64 %i)
  %b.p = getelementptr ptr, ptr %buffers, i64 %i
  store ptr %addr, ptr %b.p, align 8
  %i1 = add i64 %i, 1
  br label %bound
name:
  %k = phi i64 [ 0, %bound ], [ %k1, %named ]
  %k.more = icmp ult i64 %k, %nnames
  br i1 %k.more, label %named, label %call
named:
  %n.p = getelementptr i64, ptr %names, i64 %k
  %which = load i64, ptr %n.p, align 8
  %w.p = getelementptr i64, ptr %symbols, i64 %which
  %w = load i64, ptr %w.p, align 8
  %k.p = getelementptr i64, ptr %scalars, i64 %k
  store i64 %w, ptr %k.p, align 8
  %k1 = add i64 %k, 1
  br label %name
call:
  br i1 %alone, label %by.myself, label %together
by.myself:
  call void @pieces(ptr %slot, i64 0, i64 %all)
  br label %after
together:
  call void @share(ptr %ctx, ptr %slot, i64 %head1)
  br i1 %timed, label %see.end, label %after
see.end:
  %late3 = call i1 @settle(ptr %ctx)
  br i1 %late3, label %lost, label %after
move:
  %m.to = call ptr @place(ptr %ctx, ptr %refs, i64 0)
  %m.from = call ptr @place(ptr %ctx, ptr %refs, i64 1)
  %below = icmp ule ptr %m.to, %m.from
  br i1 %below, label %up, label %down
up:
  call void @forward(ptr %m.to, ptr %m.from, i64 %amount)
  br label %after
down:
  call void @backward(ptr %m.to, ptr %m.from, i64 %amount)
  br label %after
zero:
  %z.p = call ptr @place(ptr %ctx, ptr %refs, i64 0)
  %z = load i8, ptr %z.p, align 1
  %z.is = icmp eq i8 %z, 0
  br i1 %z.is, label %ahead, label %after
reset:
  %r.p = getelementptr i64, ptr %symbols, i64 %amount
  store i64 0, ptr %r.p, align 8
  br label %after
count.up:
  %u.p = getelementptr i64, ptr %symbols, i64 %amount
  %u = load i64, ptr %u.p, align 8
  %u1 = add i64 %u, 1
  store i64 %u1, ptr %u.p, align 8
  br label %after
finished:
  %f.p = call ptr @place(ptr %ctx, ptr %refs, i64 0)
  %limit = load i64, ptr %f.p, align 8
  %y.p = getelementptr i64, ptr %symbols, i64 %amount
  %y = load i64, ptr %y.p, align 8
  %y.done = icmp sge i64 %y, %limit
  br i1 %y.done, label %ahead, label %after
ahead:
  br label %after
after:
  %pc.next = phi i64 [ %target, %ahead ], [ %pc1, %launch ], [ %pc1, %by.myself ],
    [ %pc1, %together ], [ %pc1, %see.end ], [ %pc1, %up ], [ %pc1, %down ], [ %pc1, %zero ],
    [ %pc1, %reset ], [ %pc1, %count.up ], [ %pc1, %finished ]
  br i1 %timed, label %clock, label %step
clock:
  %t1 = call i64 @now(ptr %ctx)
  %tp = getelementptr i64, ptr %times, i64 %pc
  %told = load i64, ptr %tp, align 8
  %took = sub i64 %t1, %since
  %tnew = add i64 %told, %took
  store i64 %tnew, ptr %tp, align 8
  br label %step
step:
  %t2 = phi i64 [ 0, %after ], [ %t1, %clock ]
  br label %next
end:
  %late4 = call i1 @settle(ptr %ctx)
  br i1 %late4, label %lost, label %out
out:
  ret i64 0
lost:
  ret i64 1
}}

define i64 @{SUBMIT}(ptr %ctx) nounwind {{
  %r = call i64 @run(ptr %ctx)
  ret i64 %r
}}

define ptr @{WORKER}(ptr %arg) nounwind {{
entry:
  %ctx = load ptr, ptr %arg, align 8
{_at("stop.p", STOP)}{_at("claim.p", CLAIM)}{_at("gen.p", GENERATION)}{_at("sleep.p", SLEEPERS)}
{_field("spin", SPIN)}{_field("call", SYSCALL, "ptr")}
  br label %idle
idle:
  br label %look
look:
  %n = phi i64 [ 0, %idle ], [ %n1, %again ]
  %stop = load atomic i64, ptr %stop.p acquire, align 8
  %end = icmp ne i64 %stop, 0
  br i1 %end, label %leave, label %try
try:
  %did = call i1 @take(ptr %ctx, i1 false)
  br i1 %did, label %idle, label %again
again:
  {pause}
  %n1 = add i64 %n, 1
  %tired = icmp ugt i64 %n1, %spin
  br i1 %tired, label %drowsy, label %look
drowsy:
  %gen = load atomic i64, ptr %gen.p seq_cst, align 8
  %old = atomicrmw xchg ptr %sleep.p, i64 1 seq_cst
  %stop2 = load atomic i64, ptr %stop.p seq_cst, align 8
  %end2 = icmp ne i64 %stop2, 0
  br i1 %end2, label %leave, label %last.look
last.look:
  %w = load atomic i64, ptr %claim.p seq_cst, align 8
  %hi = and i64 %w, {UNIT_MASK}
  %lo0 = lshr i64 %w, {FIRST_SHIFT}
  %lo = and i64 %lo0, {UNIT_MASK}
  %some = icmp ult i64 %lo, %hi
  br i1 %some, label %idle, label %nap
nap:
  %low = trunc i64 %gen to i32
  %r = call i64 (i64, ...) %call(i64 {calls["futex"]}, ptr %gen.p, i32 {FUTEX_WAIT_PRIVATE},
    i32 %low, ptr null, ptr null, i32 0)
  br label %idle
leave:
  ret ptr null
}}

define void @{STOP_ENTRY}(ptr %ctx) nounwind {{
{_at("stop.p", STOP)}
  store atomic i64 1, ptr %stop.p seq_cst, align 8
  call void @wake(ptr %ctx)
  ret void
}}
"""
