"""The host's processor as a device: maps a plan's code, keeps its threads, submits runs.

Nothing here compiles: the code, the command walker and the thread loop come with the plan
(`tinyedge.drivers.cpu.executor` says how they work). Threads are POSIX threads that run native code
only, made when a plan with more than one thread first runs and asleep between runs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

import numpy as np

from tinyedge.errors import DeviceError, DeviceTimeout, PlanError
from tinyedge.plan import (
    ALIGNMENT,
    CONSTANTS,
    FIRST_EXTERNAL,
    MAX_BUFFERS,
    Copy,
    If,
    Launch,
    Loop,
    Plan,
    Ref,
    Size,
    Step,
    evaluate,
)

from ..device import Executable, Found
from . import executor as x
from . import features

SPINS = 10000
"""Turns for which an idle thread looks for work before it sleeps: some 200 microseconds."""

PATIENCE = 10_000
"""Naps of 2 milliseconds without any headway after which a run gives another thread up."""

SMALL = 30000
"""Operations and bytes of a launch that one thread does sooner (in a microsecond) than several
could meet for it."""

CLOSE_SECONDS = 5.0
"""How long `close` waits for the threads before it gives up on them."""

_libc = ctypes.CDLL(None, use_errno=True)


def open(target: str, device: str | None = None) -> CpuDevice:
    """The CPU for plans of `target`; PlanError when it lacks what they need."""
    features.check(target)
    return CpuDevice()


def probe() -> list[Found]:
    arch = next((a for a in ("x86-64-v4", "x86-64-v3", "x86-64-v2", "aarch64")
                 if not features.missing(a)), "")
    count = default_threads()
    text = f"{arch or features.machine()}, {count} thread{'s' if count > 1 else ''}"
    if not arch:
        return [Found("cpu", text, False, f"no code is made for {platform.machine()}")]
    return [Found("cpu", text, True)]


def default_threads() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


class CpuDevice:
    """The host's processor; holds nothing, so any number may be open."""

    name = "cpu"

    def bind(self, plan: Plan, threads: int | None = None) -> Executable:
        """See `tinyedge.drivers.device.Device`."""
        features.check(plan.target)
        return CpuExecutable(plan, threads or default_threads())

    def close(self) -> None:
        """Nothing to give back."""


def _address(buffer: Any) -> int:
    """Where a buffer lies; the buffer must be kept."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data) if len(buffer) else 0


def _map_code(code: bytes | memoryview) -> mmap.mmap:
    """The image, mapped to be read and executed and never written.

    A file in memory is written first and mapped then: no page is ever writable and executable, and
    the kernel makes the instruction cache coherent when it maps a page for execution (arm64
    ``__sync_icache_dcache``), so no cache instruction is needed here.
    """
    try:
        with os.fdopen(os.memfd_create("tinyedge", os.MFD_CLOEXEC), "wb") as f:
            f.write(code)
            f.flush()
            return mmap.mmap(f.fileno(), len(code), mmap.MAP_PRIVATE,
                             mmap.PROT_READ | mmap.PROT_EXEC)
    except OSError as error:
        raise DeviceError("mmap", "code can't be mapped for execution", error.errno or 0) from None


class _Arena:
    """Zeroed memory on a page boundary."""

    def __init__(self, size: int) -> None:
        self.size = size
        try:
            # a vector may be read whole at the end of a buffer; private: a forked child has its own
            self.map = mmap.mmap(-1, max(size, 1) + 2 * ALIGNMENT,
                                 mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise DeviceError("mmap", f"{size} bytes of memory can't be had",
                              getattr(error, "errno", 0)) from None
        self.address = _address(self.map)

    def view(self) -> memoryview:
        return memoryview(self.map)[:self.size]


class CpuExecutable:
    """See `tinyedge.drivers.device.Executable`."""

    def __init__(self, plan: Plan, threads: int) -> None:
        for name in (x.SUBMIT, x.WORKER, x.STOP_ENTRY):
            if name not in plan.entries:
                raise PlanError(f"the plan has no entry {name}, which this version of tinyedge "
                                "starts it by; compile the model again")
        self.plan, self.threads = plan, threads
        code, constants, scratch = _map_code(plan.code), plan.constants, _Arena(plan.arenas[1])
        self.memory: list[Any] = [code, constants, scratch]
        self.state = _Arena(plan.arenas[2])
        self.base = _address(code)
        count = FIRST_EXTERNAL + len(plan.inputs) + len(plan.outputs)
        self.bases = (ctypes.c_uint64 * count)()
        self.bases[CONSTANTS] = _address(constants)
        if self.bases[CONSTANTS] % ALIGNMENT:
            # of a plan that did not come from a file
            aligned = _Arena(len(constants))
            aligned.view()[:] = constants
            self.bases[CONSTANTS] = aligned.address
            self.memory.append(aligned)
        self.bases[1], self.bases[2] = scratch.address, self.state.address
        self.names = [*plan.symbols, *loop_symbols(plan.steps)]
        if len(self.names) > x.MAX_SYMBOLS:
            raise PlanError(f"the plan has {len(self.names)} symbols; the CPU driver takes "
                            f"{x.MAX_SYMBOLS}")
        self.symbols = (ctypes.c_int64 * max(len(self.names), 1))()
        self.kept: list[Any] = []
        self.amounts: list[tuple[int, Size]] = []
        self.numbers: list[int] = []
        self.commands = self._commands(plan.steps)
        self.context = (ctypes.c_uint8 * (x.CONTEXT_BYTES + ALIGNMENT))()
        self.at = -(-ctypes.addressof(self.context) // ALIGNMENT) * ALIGNMENT
        self.times = (ctypes.c_int64 * (len(self.commands) // x.COMMAND_WORDS))()
        for offset, value in (
            (x.BASES, ctypes.addressof(self.bases)), (x.SYMBOLS, ctypes.addressof(self.symbols)),
            (x.COMMANDS, ctypes.addressof(self.commands)), (x.SYMBOL_COUNT, len(self.names)),
            (x.SYSCALL, _function("syscall")), (x.CLOCK, _function("clock_gettime")),
            (x.SPIN, SPINS), (x.PATIENCE, PATIENCE),
        ):
            self._set(offset, value)
        self.submit = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(
            self.base + plan.entries[x.SUBMIT])
        self.process = 0
        self.workers: list[tuple[ctypes.c_void_p, Any]] = []
        self.lock = Lock()
        self.closed = False

    def _set(self, offset: int, value: int) -> None:
        ctypes.c_uint64.from_address(self.at + offset).value = value

    # commands

    def _commands(self, steps: Sequence[Step]) -> Any:
        rows: list[list[int]] = []
        self._emit(steps, rows)
        rows.append([x.END] + [0] * (x.COMMAND_WORDS - 1))
        flat = [w for row in rows for w in row]
        return (ctypes.c_int64 * len(flat))(*flat)

    def _refs(self, refs: Sequence[Ref]) -> tuple[int, int]:
        if len(refs) > MAX_BUFFERS:
            raise PlanError(f"a launch binds {len(refs)} buffers; the CPU driver takes "
                            f"{MAX_BUFFERS}")
        table = (ctypes.c_int64 * max(2 * len(refs), 1))(
            *(w for r in refs for w in (r.arena, r.offset)))
        self.kept.append(table)
        return ctypes.addressof(table), len(refs)

    def _row(
        self, rows: list[list[int]], op: int, refs: Sequence[Ref] = (), amount: Size = 0,
        wait: bool = True, function: int = 0, scalars: Sequence[str] = (),
    ) -> list[int]:
        place, count = self._refs(refs)
        names = (ctypes.c_int64 * max(len(scalars), 1))(*(self.names.index(s) for s in scalars))
        self.kept.append(names)
        if len(scalars) > x.MAX_SCALARS:
            raise PlanError(f"a launch takes {len(scalars)} scalars; the CPU driver gives "
                            f"{x.MAX_SCALARS}")
        if not isinstance(amount, int):
            self.amounts.append((len(rows) * x.COMMAND_WORDS + x.AMOUNT, amount))
            amount = 0
        row = [op, 0, function, place, count, ctypes.addressof(names), len(scalars), amount,
               int(wait), 0, 0, 0]
        rows.append(row)
        return row

    def _emit(self, steps: Sequence[Step], rows: list[list[int]]) -> None:
        for s in steps:
            if isinstance(s, Launch):
                kernel = self.plan.kernels[s.kernel]
                self.numbers.append(len(rows))
                self._row(rows, x.LAUNCH, s.buffers, s.grid, s.sync, self.base + kernel.entry,
                          s.scalars)[x.SOLO] = int(
                              s.grid == 1 or kernel.flops + kernel.bytes < SMALL)
            elif isinstance(s, Copy):
                self.numbers.append(len(rows))
                self._row(rows, x.MOVE if _overlap(s) else x.COPY, (s.target, s.source),
                          s.source.size, s.sync)
            elif isinstance(s, If):
                self.numbers.append(len(rows))
                test = self._row(rows, x.BRANCH_IF_ZERO, (s.cond,))
                self._emit(s.then, rows)
                over = self._row(rows, x.JUMP, wait=False)
                test[x.TARGET] = len(rows)
                self._emit(s.other, rows)
                over[x.TARGET] = len(rows)
            else:
                symbol = self.names.index(s.symbol)
                self._row(rows, x.SET_ZERO, amount=symbol, wait=False)
                self.numbers.append(len(rows))
                first = self._row(rows, x.BRANCH_IF_DONE, (s.trips,), symbol)
                second = self._row(rows, x.BRANCH_IF_ZERO, (s.cond,), wait=False)
                start = len(rows) - 2
                self._emit(s.body, rows)
                self._row(rows, x.INCREMENT, amount=symbol, wait=False)
                self._row(rows, x.JUMP, wait=False)[x.TARGET] = start
                first[x.TARGET] = second[x.TARGET] = len(rows)

    # running

    def __call__(self, addresses: Sequence[int], symbols: Sequence[int]) -> None:
        """See `tinyedge.drivers.device.Executable`."""
        if self.process != os.getpid():
            self._start()
        with self.lock:
            self._open()
            self.bases[FIRST_EXTERNAL:] = list(addresses)
            if symbols:
                self.symbols[:len(symbols)] = list(symbols)
                env = dict(zip(self.names, symbols))
                for word, size in self.amounts:
                    self.commands[word] = evaluate(size, env)
            if self.submit(self.at):
                # what the thread may still write to has to stay
                self.closed = True
                _lost.append(self)
                raise DeviceTimeout("run", "a thread of the plan did not finish its part; load "
                                    "the plan again")

    def profile(self, addresses: Sequence[int], symbols: Sequence[int]) -> list[int]:
        """See `tinyedge.drivers.device.Executable`."""
        ctypes.memset(self.times, 0, ctypes.sizeof(self.times))
        self._set(x.TIMES, ctypes.addressof(self.times))
        try:
            self(addresses, symbols)
        finally:
            self._set(x.TIMES, 0)
        return [int(self.times[n]) for n in self.numbers]

    def states(self) -> memoryview:
        """See `tinyedge.drivers.device.Executable`."""
        self._open()
        return self.state.view()

    def _open(self) -> None:
        if self.closed:
            raise DeviceError("run", "the model has been closed")

    # threads

    def _start(self) -> None:
        """Starts the other threads, at the first run of a process.

        A child process has none of its parent's, and a lock that one of them may have held.
        """
        self._open()
        self.process, self.lock, self.workers = os.getpid(), Lock(), []
        for offset in (x.CLAIM, x.HEAD, x.TAIL, x.SLEEPERS, x.STOP, x.WAITING):
            self._set(offset, 0)
        self._set(x.THREADS, self.threads)
        for number in range(1, self.threads):
            argument = ctypes.c_uint64(self.at)
            handle = ctypes.c_void_p()
            failed = _libc.pthread_create(
                ctypes.byref(handle), None,
                ctypes.c_void_p(self.base + self.plan.entries[x.WORKER]), ctypes.byref(argument))
            if failed:
                # run with those that there are: the results are the same
                self.threads = number
                self._set(x.THREADS, number)
                break
            self.workers.append((handle, argument))

    def close(self) -> None:
        """Ends the threads and frees the memory, after a run that is under way; may be repeated."""
        if self.closed:
            return
        if self.process == os.getpid():
            if not self.lock.acquire(timeout=CLOSE_SECONDS):
                _lost.append(self)
                raise DeviceTimeout("close", "a run of the plan did not end")
            try:
                self._stop()
            finally:
                self.closed = True
                self.lock.release()
        self.closed = True
        self.memory.clear()
        self.state = _Arena(0)

    def _stop(self) -> None:
        if not self.workers:
            return
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
            self.base + self.plan.entries[x.STOP_ENTRY])(self.at)
        seconds = time.time() + CLOSE_SECONDS
        deadline = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))
        for handle, _ in self.workers:
            # a thread that is still in the code keeps it mapped: joined, not detached
            if _libc.pthread_timedjoin_np(handle, None, deadline):
                _lost.append(self)
                raise DeviceTimeout("close", "a thread of the plan did not end")

    def __del__(self) -> None:
        # threads must not outlive their code
        if not getattr(self, "closed", True):
            self.close()


_lost: list[CpuExecutable] = []
"""Executables whose threads may still run: their code must stay mapped."""


def loop_symbols(steps: Sequence[Step]) -> Iterator[str]:
    """The counters of all loops, outer ones first."""
    for s in steps:
        if isinstance(s, Loop):
            yield s.symbol
            yield from loop_symbols(s.body)
        elif isinstance(s, If):
            yield from loop_symbols(s.then)
            yield from loop_symbols(s.other)


def _overlap(s: Copy) -> bool:
    """Whether the two ranges may share bytes."""
    a, b = s.source, s.target
    if a.arena != b.arena:
        return a.arena >= FIRST_EXTERNAL and b.arena >= FIRST_EXTERNAL
    if not isinstance(a.size, int) or not isinstance(b.size, int):
        return True
    return a.offset < b.offset + b.size and b.offset < a.offset + a.size


def _function(name: str) -> int:
    """Address of a function of the C library."""
    return ctypes.cast(getattr(_libc, name), ctypes.c_void_p).value or 0
