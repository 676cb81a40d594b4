"""The benchmark's own machinery, and the fixed part of the fuzzer that every test run covers."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from itertools import groupby

import numpy as np
import onnx
import pytest

from bench import __main__ as bench
from bench import fuzz, measure
from bench.fuzz import Arrays, Case, Outputs, check, grow, isolated, minimise, reference
from tinyedge.profile import processors, race
from tinyedge.verify import largest


def plain(case: Case, runs: list[Arrays]) -> Outputs:
    """onnxruntime in tinyedge's place."""
    state = {name: np.zeros_like(case.values[name]) for name in case.states.values()}
    for label in ("plan", "again: plan"):
        state = {name: np.zeros_like(value) for name, value in state.items()}
        for feeds in runs:
            out = reference(case.model(), {**feeds, **state})
            state = {name: out[source] for source, name in case.states.items()}
            yield label, out


def broken(case: Case, runs: list[Arrays]) -> Outputs:
    """Takes Tanh for Identity."""
    nodes = []
    for node in case.nodes:
        new = onnx.NodeProto()
        new.CopyFrom(node)
        new.op_type = "Identity" if node.op_type == "Tanh" else node.op_type
        nodes.append(new)
    yield from plain(replace(case, nodes=tuple(nodes)), runs)


def with_operator(name: str) -> Case:
    return next(case for case in map(grow, range(1000)) if len(case.nodes) > 4 and not case.states
                and any(node.op_type == name for node in case.nodes))


def test_case_follows_from_its_number() -> None:
    one, two = grow(7), grow(7)
    assert one.model().SerializeToString() == two.model().SerializeToString()
    assert one.model().SerializeToString() != grow(8).model().SerializeToString()
    onnx.checker.check_model(one.model(), full_check=True)


def test_every_sort_of_node_is_grown() -> None:
    grown = {node.op_type for number in range(400) for node in grow(number).nodes}
    assert {"Conv", "ConvTranspose", "MatMul", "Gemm", "Softmax", "MaxPool", "ReduceMean", "Slice",
            "Concat", "If", "Loop", "LSTM", "Resize", "ScatterND", "Cast", "TopK"} <= grown
    assert any(grow(number).states for number in range(200))


def test_equal_outputs_are_no_finding() -> None:
    assert [check(grow(number), plain) for number in range(25)] == [""] * 25


def test_finding_is_made_small() -> None:
    case = with_operator("Tanh")
    assert check(case, broken).startswith("plan: ")
    small = minimise(case, lambda c: check(c, broken).startswith("plan: "))
    assert [node.op_type for node in small.nodes] == ["Tanh"]
    text = fuzz.script(small, check(small, broken))
    compile(text, "script", "exec")
    assert f"--case {case.number}" in text


def test_crash_and_hang_are_findings() -> None:
    assert isolated(lambda: "text") == "text"
    assert isolated(fall) == "crash: SIGSEGV"
    assert isolated(lambda: str(os.read(os.pipe()[0], 1)), seconds=1).startswith("hang: ")


def fall() -> str:
    os.kill(os.getpid(), signal.SIGSEGV)
    return ""


def read_behind() -> str:
    array = fuzz.fenced(np.arange(7, dtype=np.float32))
    assert array.tolist() == [0, 1, 2, 3, 4, 5, 6]
    longer = np.lib.stride_tricks.as_strided(array, (8,))
    return str(longer.sum())


def test_fence_stops_a_read_behind_the_end() -> None:
    assert isolated(read_behind) == "crash: SIGSEGV"


def test_error_is_relative_and_strict() -> None:
    want = {"y": np.array([1, -4, np.nan], np.float32), "n": np.array([1, 2])}
    assert largest(want, want) == 0
    near = want | {"y": np.array([1, -4.002, np.nan], np.float32)}
    assert largest(near, want) == pytest.approx(5e-4, rel=1e-3)
    for other in ([1, -4, 0], [1, -4, np.inf], [1, -4], [np.nan, -4, np.nan]):
        assert largest(want | {"y": np.array(other, np.float32)}, want) == np.inf
    assert largest(want | {"n": np.array([1, 3])}, want) == np.inf


def test_runtimes_take_turns() -> None:
    calls: list[str] = []

    def take(name: str, seconds: float) -> None:
        calls.append(name)
        time.sleep(seconds)

    times, ratios = race(
        {"a": lambda: take("a", 0.004), "b": lambda: take("b", 0.001)}, runs=20, blocks=4)
    assert times["a"].runs >= 20 and times["b"].runs >= 20
    assert 0 < times["a"].least <= times["a"].median and ratios["b"] > ratios["a"] == 1
    turns = [key for key, _ in groupby(calls)]
    assert len(turns) >= 6


def test_child_reports_its_own_memory() -> None:
    assert 30 < measure.peak_of(lambda: b"x" * 40_000_000) < 60
    before = os.sched_getaffinity(0)
    with processors(1):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before
    with pytest.raises(RuntimeError, match="load in a fresh process failed: .*nowhere"):
        measure.fresh("load", "nowhere.pkl")


def test_report_has_a_row_for_each_figure() -> None:
    times = {"median": 1.5, "least": 1.25, "runs": 35}
    threads = {"tinyedge": times, "onnxruntime": times, "speedup": 1.5, "gflops": 58.5,
               "error": 1e-6}
    process = dict.fromkeys(("compile", "compile warm", "command", "command warm", "kernels",
                             "size", "model size", "load", "import", "load peak", "save peak",
                             "run peak", "onnxruntime peak"), 2.0)
    results = {"machine": measure.machine(), "overhead": {"call, 1 thread": 9.0}, "peak": 117.0,
               "geometric means": {"1": 1.5},
               "models": {bench.SHOWCASE: {"threads": {"1": threads, "2": threads},
                                           "process": process}}}
    text = bench.report(results)
    assert f"| {bench.SHOWCASE} | 1 | 1.50 | 1.25 | 1.50 | refuses | 1.50 | 58.5 | 50% |" in text
    assert "|  | 2 | 1.50 |" in text and "geometric mean: 1 thread: 1.50" in text
    assert "call, 1 thread | 9.0 µs | 50 µs" in text
    readme = (bench.FOLDER / "README.md").read_text(encoding="utf-8")
    assert readme.count(bench.BEGIN) == readme.count(bench.END) == 1


@pytest.mark.parametrize("number", range(24))
def test_random_model(number: int) -> None:
    finding = isolated(lambda: check(grow(number, most=6)))
    if finding.startswith("unsupported: "):
        pytest.skip(finding)
    assert finding == "", f"{finding}\n{fuzz.describe(grow(number, most=6))}"
