"""The native part of the CPU driver: LLVM IR text for the command walker and its threads.

Compiled with a plan's kernels and stored in the plan, so that the machine that runs it needs no
compiler. All threads walk the same command array in step. A launch's pieces are shared out in
contiguous runs, or done by the first thread alone where SOLO is set; pieces do not depend on each
other, so the results do not depend on the number of threads. The barrier is a counter and a
generation; a thread that waits long yields its processor.

The layouts below are shared with `tinyedge.drivers.cpu`.
"""

from __future__ import annotations

from tinyedge.plan import MAX_BUFFERS

# The context: byte offsets. What threads write stands on cache lines of its own.
BASES, SYMBOLS, COMMANDS, THREADS, SYMBOL_COUNT = 0, 8, 16, 24, 32
SYSCALL, CLOCK, TIMES, SPIN, STOP = 40, 48, 56, 64, 72
GENERATION, DONE, ARRIVED, TURN, SLEEPERS = 128, 192, 256, 320, 384
CONTEXT_BYTES = 448

# A command: twelve 64-bit words.
OP, TARGET, FUNCTION, BUFFERS, BUFFER_COUNT, SCALARS, SCALAR_COUNT, AMOUNT, WAIT, SOLO = range(10)
COMMAND_WORDS = 12

# OP. AMOUNT is the grid (LAUNCH), bytes (COPY, MOVE) or a symbol's number (the loop's).
END, LAUNCH, COPY, JUMP, BRANCH_IF_ZERO, SET_ZERO, INCREMENT, BRANCH_IF_DONE, MOVE = range(9)

MAX_SYMBOLS = 64
MAX_SCALARS = 16
YIELD_AFTER = 20000
"""Turns of a waiting loop (about a millisecond) before it gives the processor away."""

# Linux system call numbers (arch/x86/entry/syscalls/syscall_64.tbl; include/uapi/asm-generic/
# unistd.h) and <linux/futex.h>
CALLS = {"x86-64": {"futex": 202, "yield": 24}, "aarch64": {"futex": 98, "yield": 124}}
FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 128, 129

PAUSE = {
    "x86-64": ("declare void @llvm.x86.sse2.pause()", "call void @llvm.x86.sse2.pause()"),
    "aarch64": ("declare void @llvm.aarch64.hint(i32)", "call void @llvm.aarch64.hint(i32 1)"),
}


def _field(name: str, offset: int, kind: str = "i64") -> str:
    return (f"  %{name}.p = getelementptr i8, ptr %ctx, i64 {offset}\n"
            f"  %{name} = load {kind}, ptr %{name}.p, align 8\n")


def _word(name: str, word: int, kind: str = "i64") -> str:
    return (f"  %{name}.p = getelementptr i64, ptr %cmd, i64 {word}\n"
            f"  %{name} = load {kind}, ptr %{name}.p, align 8\n")


def executor_ir(arch: str) -> str:
    """LLVM IR text of tinyedge_submit(ctx) and tinyedge_worker({ctx, number})."""
    declare, pause = PAUSE[arch]
    calls = CALLS[arch]
    return f"""
{declare}

define internal void @give_way(ptr %ctx, i64 %turns) nounwind {{
  {pause}
  %long = icmp ugt i64 %turns, {YIELD_AFTER}
  br i1 %long, label %yield, label %done
yield:
{_field("call", SYSCALL, "ptr")}
  %r = call i64 (i64, ...) %call(i64 {calls["yield"]})
  br label %done
done:
  ret void
}}

define internal void @barrier(ptr %ctx) nounwind noinline {{
entry:
{_field("threads", THREADS)}
  %alone = icmp eq i64 %threads, 1
  br i1 %alone, label %out, label %meet
meet:
  %turn.p = getelementptr i8, ptr %ctx, i64 {TURN}
  %arrived.p = getelementptr i8, ptr %ctx, i64 {ARRIVED}
  %mine = load atomic i64, ptr %turn.p monotonic, align 8
  %before = atomicrmw add ptr %arrived.p, i64 1 acq_rel
  %now = add i64 %before, 1
  %last = icmp eq i64 %now, %threads
  br i1 %last, label %open, label %wait
open:
  store atomic i64 0, ptr %arrived.p monotonic, align 8
  %next = add i64 %mine, 1
  store atomic i64 %next, ptr %turn.p release, align 8
  br label %out
wait:
  %n = phi i64 [ 0, %meet ], [ %n1, %again ]
  %seen = load atomic i64, ptr %turn.p acquire, align 8
  %moved = icmp ne i64 %seen, %mine
  br i1 %moved, label %out, label %again
again:
  %n1 = add i64 %n, 1
  call void @give_way(ptr %ctx, i64 %n)
  br label %wait
out:
  ret void
}}

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

define internal ptr @place(ptr %ctx, ptr %refs, i64 %i) alwaysinline nounwind {{
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

define internal void @run(ptr %ctx, i64 %thread) nounwind noinline {{
entry:
  %buffers = alloca [{MAX_BUFFERS} x ptr], align 16
  %scalars = alloca [{MAX_SCALARS} x i64], align 16
  %symbols = alloca [{MAX_SYMBOLS} x i64], align 16
{_field("commands", COMMANDS, "ptr")}
{_field("threads", THREADS)}
{_field("count", SYMBOL_COUNT)}
{_field("given", SYMBOLS, "ptr")}
{_field("times", TIMES, "ptr")}
  %profiled = icmp ne ptr %times, null
  %first = icmp eq i64 %thread, 0
  %timed = and i1 %profiled, %first
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
  %pc = phi i64 [ 0, %start ], [ 0, %begin ], [ %pc1, %step ], [ %target, %jump ]
  %since = phi i64 [ 0, %start ], [ %t0, %begin ], [ %t2, %step ], [ %t2, %jump ]
  %at = mul i64 %pc, {COMMAND_WORDS}
  %cmd = getelementptr i64, ptr %commands, i64 %at
{_word("wait", WAIT)}
  %waits = icmp ne i64 %wait, 0
  br i1 %waits, label %meet, label %do
meet:
  call void @barrier(ptr %ctx)
  br label %do
do:
{_word("op", OP)}
{_word("target", TARGET)}
{_word("fn", FUNCTION, "ptr")}
{_word("refs", BUFFERS, "ptr")}
{_word("nrefs", BUFFER_COUNT)}
{_word("names", SCALARS, "ptr")}
{_word("nnames", SCALAR_COUNT)}
{_word("amount", AMOUNT)}
  switch i64 %op, label %out [
    i64 {LAUNCH}, label %launch
    i64 {COPY}, label %share
    i64 {MOVE}, label %move
    i64 {JUMP}, label %taken
    i64 {BRANCH_IF_ZERO}, label %zero
    i64 {SET_ZERO}, label %reset
    i64 {INCREMENT}, label %count.up
    i64 {BRANCH_IF_DONE}, label %finished
  ]
launch:
  %round = sub i64 %threads, 1
  %lo0 = mul i64 %amount, %thread
  %hi0 = add i64 %lo0, %amount
  %lo1 = add i64 %lo0, %round
  %hi1 = add i64 %hi0, %round
  %lo2 = udiv i64 %lo1, %threads
  %hi2 = udiv i64 %hi1, %threads
{_word("solo", SOLO)}
  %alone = icmp ne i64 %solo, 0
  %all = select i1 %first, i64 %amount, i64 0
  %lo = select i1 %alone, i64 0, i64 %lo2
  %hi = select i1 %alone, i64 %all, i64 %hi2
  %some = icmp ult i64 %lo, %hi
  br i1 %some, label %bind, label %after
bind:
  %i = phi i64 [ 0, %launch ], [ %i1, %bound ]
  %i.more = icmp ult i64 %i, %nrefs
  br i1 %i.more, label %bound, label %name
bound:
  %addr = call ptr @place(ptr %ctx, ptr %refs, i64 %i)
  %slot = getelementptr ptr, ptr %buffers, i64 %i
  store ptr %addr, ptr %slot, align 8
  %i1 = add i64 %i, 1
  br label %bind
name:
  %k = phi i64 [ 0, %bind ], [ %k1, %named ]
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
  call void %fn(ptr %buffers, ptr %scalars, i64 %lo, i64 %hi)
  br label %after
share:
  %c.to = call ptr @place(ptr %ctx, ptr %refs, i64 0)
  %c.from = call ptr @place(ptr %ctx, ptr %refs, i64 1)
  %lines0 = add i64 %amount, 63
  %lines = lshr i64 %lines0, 6
  %cl0 = mul i64 %lines, %thread
  %ch0 = add i64 %cl0, %lines
  %cl1 = udiv i64 %cl0, %threads
  %ch1 = udiv i64 %ch0, %threads
  %cl = shl i64 %cl1, 6
  %ch2 = shl i64 %ch1, 6
  %over = icmp ugt i64 %ch2, %amount
  %ch = select i1 %over, i64 %amount, i64 %ch2
  %cn = sub i64 %ch, %cl
  %c.t = getelementptr i8, ptr %c.to, i64 %cl
  %c.f = getelementptr i8, ptr %c.from, i64 %cl
  call void @forward(ptr %c.t, ptr %c.f, i64 %cn)
  br label %after
move:
  br i1 %first, label %moving, label %after
moving:
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
taken:
  br label %ahead
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
after:
  br i1 %timed, label %clock.step, label %step.plain
clock.step:
  %t1 = call i64 @now(ptr %ctx)
  %tp = getelementptr i64, ptr %times, i64 %pc
  %told = load i64, ptr %tp, align 8
  %took = sub i64 %t1, %since
  %tnew = add i64 %told, %took
  store i64 %tnew, ptr %tp, align 8
  br label %step.plain
step.plain:
  %t2 = phi i64 [ 0, %after ], [ %t1, %clock.step ], [ %since, %ahead ]
  %goes = phi i1 [ false, %after ], [ false, %clock.step ], [ true, %ahead ]
  br i1 %goes, label %jump, label %step
ahead:
  br label %step.plain
step:
  %pc1 = add i64 %pc, 1
  br label %next
jump:
  br label %next
out:
  ret void
}}

define ptr @tinyedge_worker(ptr %arg) nounwind {{
entry:
  %ctx = load ptr, ptr %arg, align 8
  %n.p = getelementptr i64, ptr %arg, i64 1
  %number = load i64, ptr %n.p, align 8
  %gen.p = getelementptr i8, ptr %ctx, i64 {GENERATION}
  %done.p = getelementptr i8, ptr %ctx, i64 {DONE}
  %sleep.p = getelementptr i8, ptr %ctx, i64 {SLEEPERS}
  %seen.p = getelementptr i64, ptr %arg, i64 2
  %seen0 = load i64, ptr %seen.p, align 8
{_field("spin", SPIN)}
{_field("call", SYSCALL, "ptr")}
  br label %idle
idle:
  %seen = phi i64 [ %seen0, %entry ], [ %gen, %work ], [ %seen, %nap ]
  br label %look
look:
  %n = phi i64 [ 0, %idle ], [ %n1, %again ]
  %gen = load atomic i64, ptr %gen.p acquire, align 8
  %new = icmp ne i64 %gen, %seen
  br i1 %new, label %woken, label %again
again:
  {pause}
  %n1 = add i64 %n, 1
  %tired = icmp ugt i64 %n1, %spin
  br i1 %tired, label %nap, label %look
nap:
  %a = atomicrmw add ptr %sleep.p, i64 1 seq_cst
  %low = trunc i64 %seen to i32
  %r = call i64 (i64, ...) %call(i64 {calls["futex"]}, ptr %gen.p, i32 {FUTEX_WAIT_PRIVATE},
    i32 %low, ptr null, ptr null, i32 0)
  %b = atomicrmw sub ptr %sleep.p, i64 1 seq_cst
  br label %idle
woken:
  %stop.p = getelementptr i8, ptr %ctx, i64 {STOP}
  %stop = load atomic i64, ptr %stop.p acquire, align 8
  %end = icmp ne i64 %stop, 0
  br i1 %end, label %leave, label %work
work:
  call void @run(ptr %ctx, i64 %number)
  %d = atomicrmw add ptr %done.p, i64 1 release
  br label %idle
leave:
  ret ptr null
}}

define internal void @wake(ptr %ctx) nounwind {{
  %done.p = getelementptr i8, ptr %ctx, i64 {DONE}
  store atomic i64 0, ptr %done.p monotonic, align 8
  %gen.p = getelementptr i8, ptr %ctx, i64 {GENERATION}
  %g = atomicrmw add ptr %gen.p, i64 1 seq_cst
  %sleep.p = getelementptr i8, ptr %ctx, i64 {SLEEPERS}
  %n = load atomic i64, ptr %sleep.p seq_cst, align 8
  %some = icmp ne i64 %n, 0
  br i1 %some, label %call.out, label %done
call.out:
{_field("call", SYSCALL, "ptr")}
  %r = call i64 (i64, ...) %call(i64 {calls["futex"]}, ptr %gen.p, i32 {FUTEX_WAKE_PRIVATE},
    i32 2147483647, ptr null, ptr null, i32 0)
  br label %done
done:
  ret void
}}

define internal void @gather_in(ptr %ctx, i64 %others) nounwind {{
entry:
  %done.p = getelementptr i8, ptr %ctx, i64 {DONE}
  br label %look
look:
  %n = phi i64 [ 0, %entry ], [ %n1, %again ]
  %d = load atomic i64, ptr %done.p acquire, align 8
  %all = icmp uge i64 %d, %others
  br i1 %all, label %out, label %again
again:
  call void @give_way(ptr %ctx, i64 %n)
  %n1 = add i64 %n, 1
  br label %look
out:
  ret void
}}

define void @tinyedge_submit(ptr %ctx) nounwind {{
entry:
{_field("threads", THREADS)}
  %others = sub i64 %threads, 1
  %alone = icmp eq i64 %others, 0
  br i1 %alone, label %solo, label %team
solo:
  call void @run(ptr %ctx, i64 0)
  ret void
team:
  call void @wake(ptr %ctx)
  call void @run(ptr %ctx, i64 0)
  call void @gather_in(ptr %ctx, i64 %others)
  ret void
}}

define void @tinyedge_stop(ptr %ctx) nounwind {{
  %stop.p = getelementptr i8, ptr %ctx, i64 {STOP}
  store atomic i64 1, ptr %stop.p seq_cst, align 8
  call void @wake(ptr %ctx)
  ret void
}}
"""
