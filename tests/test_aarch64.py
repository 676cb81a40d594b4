"""Plans for aarch64, compiled here and run by Python for aarch64 under QEMU's user mode.

Expected values come from onnxruntime and onnx's reference on this machine.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import tinyedge
from tests import aarch64
from tests.cases import Case, cases
from tests.models import MODELS, inputs, model, photograph_input
from tests.test_integer import network, rng
from tests.test_models import TOLERANCE
from tinyedge import graph as g
from tinyedge.compiler import compile_graph
from tinyedge.dtype import FLOAT16, FLOAT32
from tinyedge.graph import Graph
from tinyedge.onnx import load
from tinyedge.plan import Plan
from tinyedge.shape import symbol

Array = np.ndarray[Any, np.dtype[Any]]
TARGET = "cpu:aarch64"
SHARE = 4
"""Every how manyth case of the table runs here: QEMU takes its time."""

# runs every plan named in the given file on its list of inputs, with 1 and 2 threads
RUN = """
import pickle
from tinyedge.drivers.cpu import features
features.flags = lambda: frozenset(["i8mm"])  # QEMU has it, but shows the host's /proc/cpuinfo
from pathlib import Path
folder = Path(sys.argv[1])
work = pickle.loads((folder / "work").read_bytes())
results = {}
for name, calls in work.items():
    seen = []
    for threads in (1, 2):
        with tinyedge.load(folder / f"{name}.pkl", threads=threads) as run:
            seen.append([run(x) for x in calls])
    for one, two in zip(*seen):
        for k in one:
            assert one[k].tobytes() == two[k].tobytes(), f"{name}: {k} depends on the threads"
    results[name] = seen[0]
(folder / "results").write_bytes(pickle.dumps(results))
assert not {"onnx", "llvmlite"} & set(sys.modules)
"""


@pytest.fixture(scope="module", autouse=True)
def rig() -> None:
    try:
        aarch64.root()
    except aarch64.Unavailable as error:
        pytest.skip(f"no aarch64 rig: {error}")


def run(
    plans: Mapping[str, Plan], calls: Mapping[str, Sequence[Mapping[str, Array]]], folder: Path
) -> dict[str, list[dict[str, Array]]]:
    """What each plan gives for its calls, one after the other; equal with 1 and 2 threads."""
    for name, plan in plans.items():
        assert plan.target.startswith(TARGET)
        plan.save(folder / f"{name}.pkl")
    (folder / "work").write_bytes(pickle.dumps({k: list(map(dict, v)) for k, v in calls.items()}))
    aarch64.run(RUN, folder)
    results: dict[str, list[dict[str, Array]]] = pickle.loads((folder / "results").read_bytes())
    return results


def test_efficientnet_agrees_with_onnxruntime(tmp_path: Path) -> None:
    name = "efficientnet-lite0"
    given = [photograph_input(), inputs(name, 1)]
    session = onnxruntime.InferenceSession(str(model(name)), providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    results = run({name: tinyedge.compile(model(name), TARGET)}, {name: given}, tmp_path)[name]
    for x, got in zip(given, results):
        want = dict(zip(names, session.run(None, x)))
        assert list(got) == names
        for k in names:
            assert got[k].shape == want[k].shape and got[k].dtype == want[k].dtype
            assert np.abs(got[k] - want[k]).max() <= TOLERANCE * np.abs(want[k]).max(), k
            np.testing.assert_array_equal(got[k].argmax(-1), want[k].argmax(-1))


def shared_cases() -> dict[str, Case]:
    """Half of what has control flow or recurrence, and a share of the rest of the table."""
    special = {"If", "Loop", "Scan", "LSTM", "GRU", "RNN"}
    whole = [c for c in cases() if special & {n.op_type for n in c.model.graph.node}]
    rest = [c for c in cases() if c not in whole]
    return {f"case{i}": c for i, c in enumerate(whole[::2] + rest[::SHARE])}


@pytest.mark.filterwarnings("ignore")
def test_cases_agree_with_their_references(tmp_path: Path) -> None:
    table = shared_cases()
    plans = {k: compile_graph(load(c.model), TARGET) for k, c in table.items()}
    results = run(plans, {k: [c.inputs] for k, c in table.items()}, tmp_path)
    for k, c in table.items():
        c.compare(results[k][0])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_silero_streams_with_its_state(tmp_path: Path) -> None:
    """An If around an LSTM, chunk after chunk; the state stays in the plan's own memory."""
    name = "silero-vad"
    session = onnxruntime.InferenceSession(str(model(name)), providers=["CPUExecutionProvider"])
    plan = tinyedge.compile(model(name), TARGET, shapes=MODELS[name].shapes,
                            states=MODELS[name].states)
    given = [inputs(name, seed) for seed in range(4)]
    results = run({name: plan}, {name: [{k: v for k, v in x.items() if k != "state"}
                                        for x in given]}, tmp_path)[name]
    state = np.zeros((2, 1, 128), np.float32)
    for x, got in zip(given, results):
        want, state = session.run(None, {**x, "state": state})
        np.testing.assert_allclose(got["output"], want, rtol=1e-4, atol=1e-5)


def test_open_dimension_and_float16_equal_numpy(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    w = random.normal(size=(20, 24)).astype(np.float32)
    n = symbol("N", 1, 50)
    x = g.placeholder("x", (n, 20), FLOAT32)
    first, second = ((0, ((0, 1),)), (0, ((2, 1),))), ((0, ((2, 1),)), (0, ((1, 1),)))
    product = g.contract(x, g.const(w), (n, 24), (20,), (first, second))
    half = g.placeholder("x", (6, 370), FLOAT16)
    plans = {
        "open": compile_graph(Graph({"x": x}, {"y": product}), TARGET),
        "half": compile_graph(Graph({"x": half}, {"y": g.reduce("sum", half, [1]),
                                                  "z": g.mul(half, half)}), TARGET),
    }
    rows = [random.normal(size=(count, 20)).astype(np.float32) for count in (1, 7, 50)]
    halves = random.normal(size=(6, 370)).astype(np.float16)
    results = run(plans, {"open": [{"x": r} for r in rows], "half": [{"x": halves}]}, tmp_path)
    for r, got in zip(rows, results["open"]):
        np.testing.assert_allclose(got["y"], r @ w, rtol=1e-5, atol=1e-5)
    got = results["half"][0]
    np.testing.assert_array_equal(got["z"], halves * halves)
    wide = halves.astype(np.float32).sum(1, keepdims=True)
    np.testing.assert_allclose(got["y"].reshape(6, 1), wide, rtol=2e-3, atol=2e-2)


def test_a_plan_of_this_machine_is_refused(tmp_path: Path) -> None:
    x = g.placeholder("x", (4,), FLOAT32)
    plan = compile_graph(Graph({"x": x}, {"y": g.add(x, x)}), "cpu:x86-64-v3")
    plan.save(tmp_path / "x86.pkl")
    said = aarch64.run("""
try:
    tinyedge.load(sys.argv[1])
except tinyedge.errors.PlanError as error:
    print(error)
""", tmp_path / "x86.pkl")
    assert "cpu:x86-64-v3" in said and "aarch64 machine" in said


def test_products_of_bytes(tmp_path: Path) -> None:
    """FEAT_I8MM's usdot."""
    plans, calls, wanted = {}, {}, {}
    for name, (c, k, taps, signed) in {
            "a": (16, 32, 3, False), "b": (12, 7, 1, True), "c": (64, 20, 3, False)}.items():
        model = network(c, k, taps, 5, np.int8 if signed else np.uint8)
        feeds = {"x": rng.standard_normal((1, c, 13, 13)).astype(np.float32)}
        plans[name] = compile_graph(load(model), f"{TARGET},i8mm")
        assert any("dot(" in kernel.loops for kernel in plans[name].kernels)
        calls[name] = [feeds]
        session = onnxruntime.InferenceSession(model.SerializeToString())
        wanted[name] = session.run(None, feeds)[0]
    got = run(plans, calls, tmp_path)
    for name, value in wanted.items():
        off = np.abs(got[name][0]["y"] - value)  # steps of 0.05
        assert off.max() <= 0.0501 and (off > 1e-6).mean() < 0.01
