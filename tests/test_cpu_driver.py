"""The CPU driver: its threads under stress, forks, closing, and what it refuses."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import platform
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinyedge
from tests.test_codegen import matmul, relu
from tinyedge import graph as g
from tinyedge.compiler import compile_graph
from tinyedge.drivers import cpu
from tinyedge.drivers.cpu import executor as x
from tinyedge.drivers.cpu import features
from tinyedge.drivers.device import open_device, probe
from tinyedge.dtype import BOOL, FLOAT32, INT64
from tinyedge.errors import DeviceError, DeviceTimeout, InputError, PlanError
from tinyedge.graph import Graph, Node
from tinyedge.plan import ALIGNMENT, Launch, Plan, flat

Array = np.ndarray[Any, np.dtype[Any]]
ROWS, WIDTH, TURNS = 64, 96, 3


def network(seed: int = 5) -> Graph:
    """Every kind of step: launches that threads share and ones that they don't, copies, a branch, a
    loop with a carried value, a state."""
    random = np.random.default_rng(seed)

    def weights(*shape: int) -> Node:
        return g.const((random.normal(size=shape) / np.sqrt(WIDTH)).astype(np.float32))

    def rows(name: str) -> Node:
        return g.placeholder(name, (ROWS, WIDTH), FLOAT32)

    def branch(activation: Callable[[Node], Node]) -> Graph:
        a = rows("a")
        return Graph({"a": a}, {"o": activation(matmul(a, weights(WIDTH, WIDTH)))})

    x, total, up = rows("x"), rows("total"), g.placeholder("up", (), BOOL)
    y = relu(g.add(matmul(x, weights(WIDTH, WIDTH)), weights(WIDTH)))
    y, = g.if_(up, branch(g.tanh), branch(relu), [y])
    turn, kept, given = g.placeholder("turn", (), INT64), rows("kept"), rows("given")
    after = g.tanh(g.add(matmul(kept, weights(WIDTH, WIDTH)), given))
    body = Graph({"turn": turn, "kept": kept, "given": given},
                 {"going": g.lt(turn, g.like(turn, TURNS - 1)), "kept": after,
                  "each": g.reduce("sum", after, [1])})
    last, each = g.loop(g.const(np.array(TURNS + 2)), g.const(np.array(True)), [y], [x], body,
                        TURNS + 2)
    total1 = g.add(total, last)
    return Graph({"x": x, "up": up, "total": total},
                 {"last": last, "each": each, "sum": g.reduce("sum", total1, [0]), "new": total1},
                 {"new": "total"})


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compile_graph(network())


def given(seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {"x": random.normal(size=(ROWS, WIDTH)).astype(np.float32),
            "up": np.array(seed % 2 == 0)}


def bits(outputs: dict[str, Array]) -> dict[str, bytes]:
    return {k: v.tobytes() for k, v in outputs.items()}


def history(plan: Plan, threads: int, runs: int) -> list[dict[str, bytes]]:
    """The outputs of every run, over four inputs in turn; they depend on the state."""
    calls = [given(seed) for seed in range(4)]
    with tinyedge.load(plan, threads=threads) as run:
        return [bits(run(calls[i % 4])) for i in range(runs)]


# ---- threads


@pytest.mark.parametrize("threads", [2, 4])
def test_thousands_of_launches_are_equal_with_any_threads(plan: Plan, threads: int) -> None:
    runs = 1000
    assert sum(isinstance(s, Launch) for s in flat(plan.steps)) * runs > 8000
    assert history(plan, threads, runs) == history(plan, 1, runs)


def test_several_models_at_once(plan: Plan) -> None:
    plans = [plan, compile_graph(network(6))]
    want = [history(p, 1, 60) for p in plans]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda i: history(plans[i % 2], 1 + i % 3, 60), range(6)))
    for i, seen in enumerate(got):
        assert seen == want[i % 2]


def test_one_model_from_several_threads() -> None:
    x = g.placeholder("x", (ROWS, WIDTH), FLOAT32)
    same = matmul(x, g.const(np.eye(WIDTH, dtype=np.float32)))
    plan = compile_graph(Graph({"x": x}, {"y": relu(same)}))

    def call(seed: int) -> None:
        x = given(seed)["x"]
        np.testing.assert_array_equal(run(x=x)["y"], np.maximum(x, 0))

    with tinyedge.load(plan, threads=2) as run, ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(300)))


def test_idle_threads_sleep(plan: Plan) -> None:
    with tinyedge.load(plan, threads=4) as run:
        run(given(0))
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.1
        assert bits(run(given(1)))  # and wake up again


def threads_of_process() -> int:
    """How many there are; one that has been joined may be listed for a moment longer."""
    counts = []
    for _ in range(5):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    return min(counts)


def test_closing_ends_threads_and_frees_memory(plan: Plan) -> None:
    big = replace(plan, arenas=(plan.arenas[0], 256 << 20, plan.arenas[2]))
    before, maps = threads_of_process(), mapped()
    run = tinyedge.load(big, threads=3)
    run(given(0))
    assert threads_of_process() == before + 2 and mapped() > maps + (200 << 20)
    run.close()
    assert threads_of_process() == before and mapped() < maps + (100 << 20)
    run.close()
    with pytest.raises(InputError, match="closed"):
        run(given(0))


def mapped() -> int:
    """Bytes of address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")


def until_closed(run: Any, started: threading.Event, ends: list[str]) -> None:
    try:
        while True:
            run(given(0))
            started.set()
    except InputError as error:
        ends.append(str(error))


def test_closing_while_another_thread_runs(plan: Plan) -> None:
    for _ in range(20):
        run = tinyedge.load(plan, threads=2)
        started, ends = threading.Event(), list[str]()
        caller = threading.Thread(target=until_closed, args=(run, started, ends))
        caller.start()
        started.wait(10)
        run.close()
        caller.join(10)
        assert not caller.is_alive() and len(ends) == 1 and "closed" in ends[0]


def test_models_that_are_dropped(plan: Plan) -> None:
    before = threads_of_process()
    for i in range(30):
        run = tinyedge.load(plan, threads=2)
        run(given(i))
        cycle: list[Any] = [run]
        cycle.append(cycle)
    del run, cycle
    gc.collect()
    assert threads_of_process() == before


def bound(plan: Plan, threads: int) -> tuple[Any, list[int], list[Array]]:
    """An executable without a model around it, addresses for it, and the arrays behind these."""
    x = given(0)
    arrays = [x["x"], x["up"], *(np.empty([int(d) for d in p.shape], p.dtype)  # type: ignore
                                 for p in plan.outputs)]
    return (open_device(plan.target).bind(plan, threads), [a.ctypes.data for a in arrays], arrays)


def test_an_executable_that_is_dropped_ends_its_threads(plan: Plan) -> None:
    before = threads_of_process()
    for _ in range(30):
        executable, addresses, _ = bound(plan, 2)
        executable(addresses, ())
        del executable
    assert threads_of_process() == before


def test_a_closed_executable(plan: Plan) -> None:
    executable, addresses, _ = bound(plan, 2)
    executable(addresses, ())
    executable.close()
    executable.close()
    for call in (lambda: executable(addresses, ()), executable.states,
                 lambda: executable.profile(addresses, ())):
        with pytest.raises(DeviceError, match="closed"):
            call()


class Library:
    """The C library with another answer from one function."""

    def __init__(self, name: str, answer: int) -> None:
        self.library, self.name, self.answer = cpu._libc, name, answer

    def __getattr__(self, name: str) -> Any:
        return (lambda *a: self.answer) if name == self.name else getattr(self.library, name)


def test_closing_does_not_wait_for_ever(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CLOSE_SECONDS", 0.05)
    executable, addresses, _ = bound(plan, 2)
    executable(addresses, ())
    with executable.lock, pytest.raises(DeviceTimeout, match="a run of the plan did not end"):
        executable.close()
    executable(addresses, ())  # it was not closed
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "_libc", Library("pthread_timedjoin_np", errno.ETIMEDOUT))
        with pytest.raises(DeviceTimeout, match="a thread of the plan did not end"):
            executable.close()
    with pytest.raises(DeviceError, match="closed"):
        executable(addresses, ())
    executable.close()
    assert cpu._lost.pop() is executable and cpu._lost.pop() is executable
    executable._stop()


def test_a_thread_that_does_not_finish(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PATIENCE", 20)
    executable, addresses, arrays = bound(plan, 2)
    executable(addresses, ())
    # as if the other thread still held a piece of one more launch
    head = ctypes.c_int64.from_address(executable.at + x.HEAD).value + 1
    slot = x.SLOTS + head % x.RING * x.SLOT_BYTES
    executable._set(slot + x.UNITS, 2)
    executable._set(slot + x.DONE, 1)
    executable._set(x.HEAD, head)
    with pytest.raises(DeviceTimeout, match="did not finish its part; load the plan again"):
        executable(addresses, ())
    with pytest.raises(DeviceError, match="closed"):
        executable(addresses, ())
    executable.close()
    assert cpu._lost.pop() is executable
    executable._stop()
    again, addresses, arrays = bound(plan, 2)
    again(addresses, ())
    again.close()


LEAVE = """
import sys, threading, time, numpy as np, tinyedge
run = tinyedge.load(sys.argv[1], threads=2)
x = {p.name: np.ones(p.shape, p.dtype) for p in run.inputs.values()}
def call():
    try:
        while True: run(x)
    except BaseException: pass
run(x)
threading.Thread(target=call, daemon=True).start()
time.sleep(0.1)
"""


def test_a_process_may_end_while_a_daemon_thread_runs(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "p.pkl")
    done = subprocess.run([sys.executable, "-c", LEAVE, tmp_path / "p.pkl"], timeout=20,
                          capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


# ---- forks


OUTCOMES = {0: "true", 1: "false", 2: "refused"}


def in_child(work: Callable[[], bool], seconds: float = 10) -> str:
    """What became of `work` in a forked child; it is "hung" after some seconds."""
    child = os.fork()
    if not child:
        status = 3
        try:
            status = 0 if work() else 1
        except tinyedge.errors.TinyedgeError:
            status = 2
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return OUTCOMES.get(os.waitstatus_to_exitcode(status), "died")
        time.sleep(0.002)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "hung"


def test_a_child_process_has_threads_and_memory_of_its_own(plan: Plan) -> None:
    want = history(plan, 1, 8)
    with tinyedge.load(plan, threads=2) as run:
        seen = [bits(run(given(i))) for i in range(2)]

        def rest() -> bool:
            ok = [bits(run(given(i % 4))) for i in range(2, 8)] == want[2:]
            run.close()
            return ok

        assert in_child(rest) == "true"
        seen += [bits(run(given(i % 4))) for i in range(2, 8)]
        assert seen == want


def test_a_model_may_be_loaded_first_and_run_in_children_only(plan: Plan) -> None:
    want = history(plan, 1, 4)
    with tinyedge.load(plan, threads=2) as run:
        for _ in range(3):
            assert in_child(lambda: [bits(run(given(i))) for i in range(4)] == want) == "true"


def test_a_fork_while_another_thread_runs(plan: Plan) -> None:
    executable, addresses, arrays = bound(plan, 2)
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            executable(addresses, ())

    def work() -> bool:
        for _ in range(3):
            executable(addresses, ())
        executable.close()
        return bool(np.isfinite(arrays[2]).all())

    caller = threading.Thread(target=call)
    caller.start()
    try:
        assert [in_child(work) for _ in range(10)] == ["true"] * 10
    finally:
        stop.set()
        caller.join()
    executable.close()


def test_a_fork_while_another_thread_calls_the_model(plan: Plan) -> None:
    with tinyedge.load(plan, threads=2) as run:
        started, ends = threading.Event(), list[str]()
        caller = threading.Thread(target=until_closed, args=(run, started, ends))
        caller.start()
        started.wait(10)
        outcomes = [in_child(lambda: bool(run(given(1))), seconds=1) for _ in range(3)]
        run.close()
        caller.join(10)
    assert outcomes == ["true"] * 3


# ---- what is refused, and what is taken as it comes


def refusal(target: str, plan: Plan) -> str:
    with pytest.raises(PlanError) as caught:
        tinyedge.load(replace(plan, target=target))
    text = str(caught.value)
    assert "\n" not in text and target in text
    return text


def test_features_that_the_machine_lacks(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    have = frozenset({*features.V3, "avx512_vnni"} - {"fma", "bmi2"})
    monkeypatch.setattr(features, "flags", lambda: have)
    assert "lacks bmi2, fma;" in refusal("cpu:x86-64-v3", plan)
    assert "lacks gfni;" in refusal("cpu:x86-64-v2,avx512vnni,gfni", plan)
    assert "avx512f" in refusal("cpu:x86-64-v4", plan)
    assert "x86-64 machine lacks aarch64" in refusal("cpu:aarch64", plan)
    for target in ("cpu:z80", "cpu:", "cpu:X86-64-V3", "cpu"):
        assert "does not know" in refusal(target, plan)
    assert "drivers for cpu" in refusal("gpu:any", plan)
    monkeypatch.setattr(features, "flags", frozenset)
    assert "popcnt" in refusal("cpu:x86-64-v2", plan)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert "aarch64 machine lacks x86-64-v2" in refusal("cpu:x86-64-v2", plan)
    monkeypatch.setattr(features, "flags", lambda: frozenset({"asimddp"}))
    assert features.missing("aarch64", ("dotprod", "bf16")) == ["bf16"]


def test_probe_names_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [f for f in probe() if f.name == "cpu"]
    assert len(found) == 1 and found[0].usable
    assert f"{cpu.default_threads()} thread" in found[0].description
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    lost, = cpu.probe()
    assert not lost.usable and "riscv64" in lost.reason
    with pytest.raises(InputError, match="device gpu can't run"):
        open_device("cpu:x86-64-v2", "gpu")


def test_default_threads_follow_the_affinity(plan: Plan) -> None:
    allowed = os.sched_getaffinity(0)
    want = history(plan, 1, 2)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert cpu.default_threads() == 1
        assert "1 thread" in cpu.probe()[0].description
        before = threads_of_process()
        with tinyedge.load(plan) as run:
            assert bits(run(given(0))) == want[0]
            assert threads_of_process() == before
        # more threads than processors: slower, and equal
        assert history(plan, 3, 2) == want
    finally:
        os.sched_setaffinity(0, allowed)


def test_threads_that_the_system_refuses(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_libc", Library("pthread_create", errno.EAGAIN))
    assert history(plan, 4, 4) == history(plan, 1, 4)


def test_constants_that_are_not_aligned(plan: Plan) -> None:
    room = np.zeros(len(plan.constants) + 2 * ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT + 4
    part = room[start:start + len(plan.constants)]
    part[:] = np.frombuffer(plan.constants, np.uint8)
    moved = replace(plan, constants=part.data)
    assert history(moved, 2, 4) == history(plan, 2, 4)


def test_memory_that_the_system_refuses(plan: Plan) -> None:
    with pytest.raises(DeviceError, match="mmap: .* bytes of memory can't be had"):
        tinyedge.load(replace(plan, arenas=(plan.arenas[0], 1 << 60, plan.arenas[2])))


def test_files_that_the_system_refuses(plan: Plan) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for refuse, match in ((lambda: tinyedge.load(plan), "features can't be read"),
                          (lambda: cpu.CpuExecutable(plan, 1), "code can't be mapped")):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            with pytest.raises(DeviceError, match=match) as caught:
                refuse()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert caught.value.errno == errno.EMFILE
    assert history(plan, 1, 1)


def test_no_file_stays_open(plan: Plan) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        history(plan, 2, 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_more_than_the_driver_takes(plan: Plan) -> None:
    device = open_device(plan.target)
    many = {f"s{i}": (1, 2) for i in range(100)}
    with pytest.raises(PlanError, match="plan has 101 symbols; the CPU driver takes"):
        device.bind(replace(plan, symbols=many), 1)
    launch = next(s for s in plan.steps if isinstance(s, Launch))
    with pytest.raises(PlanError, match="a launch binds 40 buffers; the CPU driver takes"):
        device.bind(replace(plan, steps=(replace(launch, buffers=launch.buffers[:1] * 40),)), 1)
    named = replace(launch, scalars=("s0",) * 20)
    with pytest.raises(PlanError, match="a launch takes 20 scalars; the CPU driver gives"):
        device.bind(replace(plan, steps=(named,), symbols={"s0": (1, 2)}), 1)


def test_a_plan_without_an_executor(plan: Plan) -> None:
    with pytest.raises(PlanError, match="has no entry tinyedge_"):
        tinyedge.load(replace(plan, entries={}))


# ---- profiles and states


@pytest.mark.parametrize("threads", [1, 2])
def test_a_profile_covers_the_run(plan: Plan, threads: int) -> None:
    steps = list(flat(plan.steps))
    with tinyedge.load(plan, threads=threads) as run:
        plain = bits(run(given(0)))
        run.states.reset()
        start = time.perf_counter_ns()
        outputs, times = run.profile(given(0))
        took = time.perf_counter_ns() - start
        assert bits(outputs) == plain
    assert len(times) == len(steps) and min(times) >= 0
    assert 0 < sum(times) <= took
    heavy = [t for s, t in zip(steps, times)
             if isinstance(s, Launch) and plan.kernels[s.kernel].flops > 1_000_000]
    # one branch of two is not taken
    assert sum(t > 0 for t in heavy) == len(heavy) - 1
    assert sum(heavy) > sum(times) / 3


def test_states_persist_and_are_set(plan: Plan) -> None:
    with tinyedge.load(plan, threads=2) as run:
        first, second = run(given(0)), run(given(0))
        np.testing.assert_array_equal(run.states["total"], 2 * first["last"])
        run.states["total"] = first["last"]
        assert bits(run(given(0))) == bits(second)
        run.states.reset()
        assert bits(run(given(0))) == bits(first)
    with tinyedge.load(plan, threads=2) as other:
        assert not other.states["total"].any()
