"""Plans for WebGPU run by the desktop driver on lavapipe, against the interpreter and CPU plans."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import tinyedge
from tests.adapters import lavapipe
from tests.cases import Case, cases
from tests.compiled import difference
from tests.models import MODELS, inputs, model
from tests.test_codegen import conv, relu
from tinyedge import graph as g
from tinyedge.compiler import compile_graph
from tinyedge.dtype import BOOL, FLOAT16, FLOAT32, INT8, INT16, INT32, INT64, UINT8, DType
from tinyedge.errors import DeviceError, InputError, PlanError, UnsupportedError
from tinyedge.graph import Graph, validate
from tinyedge.interpreter import interpret
from tinyedge.onnx import load
from tinyedge.plan import Launch, Plan, evaluate, flat

__all__ = ["lavapipe"]
rng = np.random.default_rng(5)
TOLERANCE = 1e-4
HALF_TOLERANCE = 1e-2
"""Of weights with 11 bits through a network, relative to the largest output."""

NETWORKS = ["silero-vad", "magika", "squeezenet", "shufflenet", "efficientnet-lite0", "ppocr-cls"]
"""Those that lavapipe compiles and runs in seconds; the kernels of all are judged by Tint."""

EVERY = 7
"""One in so many of the case table is run here: each is a shader to compile."""


def run(graph: Graph, feeds: dict[str, Any], device: str, tolerance: float = 2e-6,
        target: str = "webgpu") -> Plan:
    """Asserts that the compiled graph equals the interpreted one, twice."""
    want = interpret(validate(graph), feeds)
    plan = compile_graph(graph, target)
    with tinyedge.load(plan, device=device) as m:
        got, again = m(feeds), m(feeds)
    for name, value in want.items():
        assert difference(got[name], value) <= tolerance, name
        assert got[name].tobytes() == again[name].tobytes()
    return plan


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str, lavapipe: str) -> None:
    spec, given = MODELS[name], inputs(name)
    with tinyedge.load(tinyedge.compile(model(name), shapes=spec.shapes)) as m:
        want = m(given)
    plan = tinyedge.compile(model(name), "webgpu", shapes=spec.shapes)
    with tinyedge.load(plan, device=lavapipe) as m:
        got = m(given)
    for k, value in want.items():
        assert difference(got[k], value) <= TOLERANCE, k


@pytest.mark.parametrize("name", ["magika", "squeezenet"])
def test_networks_with_half_weights(name: str, lavapipe: str) -> None:
    given, shapes = inputs(name), MODELS[name].shapes
    with tinyedge.load(tinyedge.compile(model(name), shapes=shapes)) as m:
        want = m(given)
    plan = tinyedge.compile(model(name), "webgpu:f16", shapes=shapes)
    assert plan.target == "webgpu:f16" and all("enable f16;" in k.source for k in plan.kernels)
    with tinyedge.load(plan, device=lavapipe) as m:
        got = m(given)
    for k, value in want.items():
        assert difference(got[k], value) <= HALF_TOLERANCE, k


@pytest.mark.parametrize("case", cases()[::EVERY], ids=lambda c: c.name)
def test_case(case: Case, lavapipe: str) -> None:
    graph = load(case.model)
    try:
        plan = compile_graph(graph, "webgpu")
    except UnsupportedError as error:
        assert "float64" in str(error)
        return
    with tinyedge.load(plan, device=lavapipe) as m:
        case.compare(m(case.inputs))


def numbers(shape: tuple[int, ...], t: DType) -> np.ndarray[Any, Any]:
    if t.is_float:
        return rng.standard_normal(shape).astype(t.numpy)
    low, high = t.limits
    return rng.integers(low, high, shape, endpoint=True, dtype=np.int64).astype(t.numpy)


def test_three_wide_kernel_with_129_channels(lavapipe: str) -> None:
    """onnxruntime-web is wrong here."""
    x = g.placeholder("x", (1, 129, 1, 40), FLOAT32)
    w = g.const(numbers((128, 129, 1, 3), FLOAT32))
    run(Graph({"x": x}, {"y": conv(x, w)}), {"x": numbers((1, 129, 1, 40), FLOAT32)}, lavapipe,
        1e-5)


def test_more_than_65535_workgroups(lavapipe: str) -> None:
    count = 64 * 4 * 65535 + 4444
    x = g.placeholder("x", (count,), FLOAT32)
    plan = run(Graph({"x": x}, {"y": g.elementwise("mul", x, x)}),
               {"x": rng.standard_normal(count).astype(np.float32)}, lavapipe, 0)
    [launch] = [s for s in plan.steps if isinstance(s, Launch)]
    assert evaluate(launch.grid, {}) > 65535


def test_no_kernel_binds_more_than_eight_buffers(lavapipe: str) -> None:
    many = [g.placeholder(f"x{i}", (6, 5), FLOAT32) for i in range(23)]
    total = many[0]
    for x in many[1:]:
        total = g.elementwise("add", total, x)
    joined = g.concat(many, 0)
    feeds = {f"x{i}": numbers((6, 5), FLOAT32) for i in range(23)}
    plan = run(Graph({f"x{i}": x for i, x in enumerate(many)},
                     {"sum": total, "all": joined, "max": g.reduce("max", total, (0,))}),
               feeds, lavapipe, 1e-5)
    assert max(len(s.buffers) for s in flat(plan.steps) if isinstance(s, Launch)) <= 8


@pytest.mark.parametrize("t", [INT64, INT32, INT16, INT8, UINT8, BOOL], ids=str)
def test_integers(t: DType, lavapipe: str) -> None:
    x, y = (g.placeholder(n, (5, 7), t) for n in "xy")
    names = "and or xor eq lt".split() + ([] if t is BOOL else "add sub mul max min".split())
    outs = {n: g.elementwise(n, x, y) for n in names}
    outs["float"] = g.cast(x, FLOAT32)
    if t is not BOOL:
        outs["sum"] = g.reduce("sum", x, (1,))
        outs["div"] = g.elementwise("div", x, y)
        outs["mod"] = g.elementwise("mod", x, y)
    feeds = {n: numbers((5, 7), t) for n in "xy"}
    if t is not BOOL:
        feeds["y"][feeds["y"] == 0] = 3
    run(Graph({"x": x, "y": y}, outs), feeds, lavapipe, 1e-7)


def test_wide_indices_are_clamped(lavapipe: str) -> None:
    """What is outside of 32 bits is not cut to something inside of the table."""
    table = g.placeholder("t", (10, 3), FLOAT32)
    i = g.placeholder("i", (4,), INT64)
    index = np.array([1, -1, 2**32 + 5, -(2**40)], np.int64)
    run(Graph({"t": table, "i": i}, {"y": g.gather(table, [i], 0)}),
        {"t": numbers((10, 3), FLOAT32), "i": index}, lavapipe, 0)


def test_float16_with_and_without_its_feature(lavapipe: str) -> None:
    x = g.placeholder("x", (3, 10), FLOAT16)
    y = g.elementwise("add", g.elementwise("mul", x, x), x)
    feeds = {"x": numbers((3, 10), FLOAT16)}
    for target in ("webgpu", "webgpu:f16"):
        run(Graph({"x": x}, {"y": y}), feeds, lavapipe, 2e-3, target)


def test_padded_buffers_of_two_types(lavapipe: str) -> None:
    """Halos are zero for good: elements of another width may not be written over them."""
    def weights(t: DType) -> Any:
        return g.const((rng.standard_normal((8, 8, 3, 3)) / 9).astype(t.numpy))

    x = g.placeholder("x", (1, 8, 9, 9), FLOAT32)
    y = x
    for _ in range(3):
        y = relu(conv(y, weights(FLOAT32), 1, 1))
    y = g.cast(y, FLOAT16)
    for _ in range(3):
        y = relu(conv(y, weights(FLOAT16), 1, 1))
    run(Graph({"x": x}, {"y": y}), {"x": numbers((1, 8, 9, 9), FLOAT32)}, lavapipe, 2e-3)


def test_comparisons_of_comparisons(lavapipe: str) -> None:
    """What is written into an expression keeps its parentheses."""
    x, y = (g.placeholder(n, (3, 4), BOOL) for n in "xy")
    row = g.placeholder("row", (4,), BOOL)
    outs = {n: g.elementwise(n, x, g.expand(row, (3, 4))) for n in ("ne", "eq", "xor")}
    outs["both"] = g.elementwise("ne", g.elementwise("eq", x, y), g.elementwise("xor", x, y))
    run(Graph({"x": x, "y": y, "row": row}, outs),
        {"x": numbers((3, 4), BOOL), "y": numbers((3, 4), BOOL), "row": numbers((4,), BOOL)},
        lavapipe, 0)


def test_symbolic_dimensions(lavapipe: str) -> None:
    n = tinyedge.codegen.symbolic.symbol("n", 1, 9)
    x = g.placeholder("x", (n, 33), FLOAT32)
    y = g.elementwise("exp", g.elementwise("sub", x, g.expand(g.reduce("max", x, (1,)), x.shape)))
    graph = Graph({"x": x}, {"y": y, "total": g.reduce("sum", y, (0,))})
    plan = compile_graph(graph, "webgpu")
    with tinyedge.load(plan, device=lavapipe) as m:
        for rows in (1, 9, 4):
            feeds = {"x": numbers((rows, 33), FLOAT32)}
            want = interpret(validate(graph), feeds)
            for k, v in m(feeds).items():
                assert difference(v, want[k]) <= 2e-6


def test_states_persist_and_can_be_set(lavapipe: str) -> None:
    x, h = g.placeholder("x", (5,), FLOAT32), g.placeholder("h", (5,), FLOAT32)
    nxt = g.elementwise("add", x, h)
    graph = Graph({"x": x, "h": h}, {"y": g.elementwise("mul", nxt, nxt), "h.next": nxt},
                  {"h.next": "h"})
    one = np.ones(5, np.float32)
    with tinyedge.load(compile_graph(graph, "webgpu"), device=lavapipe) as m:
        assert m(x=one)["y"][0] == 1 and m(x=one)["y"][0] == 4
        assert m.states["h"].tolist() == [2] * 5
        m.states["h"] = 5 * one
        assert m(x=one)["y"][0] == 36
        m.states.reset()
        assert m(x=one)["y"][0] == 1


def test_profile_times_every_step(lavapipe: str) -> None:
    x = g.placeholder("x", (64, 64), FLOAT32)
    graph = Graph({"x": x}, {"y": g.elementwise("exp", g.reduce("sum", x, (1,)))})
    feeds = {"x": numbers((64, 64), FLOAT32)}
    with tinyedge.load(compile_graph(graph, "webgpu"), device=lavapipe) as m:
        out, times = m.profile(feeds)
        assert len(times) == len(list(flat(m.plan.steps))) and sum(times) > 0
        assert out["y"].tobytes() == m(feeds)["y"].tobytes()


def test_devices_and_refusals(lavapipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = g.placeholder("x", (4,), FLOAT32)
    plan = compile_graph(Graph({"x": x}, {"y": g.elementwise("neg", x)}), "webgpu")
    with pytest.raises(InputError, match="no WebGPU adapter"):
        tinyedge.load(plan, device="webgpu:toaster")
    m = tinyedge.load(plan, device=lavapipe)
    m.close()
    with pytest.raises(InputError, match="closed"):
        m(x=np.zeros(4, np.float32))
    from tinyedge.drivers import webgpu

    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(webgpu, "import_module", absent)
    assert "pip install" in webgpu.probe()[0].reason
    with pytest.raises(PlanError, match="pip install"):
        tinyedge.load(plan)


def test_a_refused_shader_is_an_error_of_the_device(lavapipe: str) -> None:
    from dataclasses import replace

    x = g.placeholder("x", (4,), FLOAT32)
    plan = compile_graph(Graph({"x": x}, {"y": g.elementwise("neg", x)}), "webgpu")
    plan.kernels = tuple(replace(k, source="nonsense") for k in plan.kernels)
    with pytest.raises(DeviceError, match="bind"):
        tinyedge.load(plan, device=lavapipe)


def test_a_device_that_does_not_answer(lavapipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinyedge.drivers import webgpu
    from tinyedge.errors import DeviceTimeout

    x = g.placeholder("x", (4,), FLOAT32)
    plan = compile_graph(Graph({"x": x}, {"y": g.elementwise("neg", x)}), "webgpu")
    m = tinyedge.load(plan, device=lavapipe)

    class Hung:
        """A thread that never gets anywhere."""

        def __init__(self, **_: Any) -> None: ...
        def start(self) -> None: ...

    monkeypatch.setattr(webgpu, "DEADLINE", 0.05)
    monkeypatch.setattr(webgpu, "Thread", Hung)
    with pytest.raises(DeviceTimeout, match="did not answer"):
        m(x=np.zeros(4, np.float32))
    monkeypatch.undo()
    with tinyedge.load(plan, device=lavapipe) as again:
        assert again(x=np.ones(4, np.float32))["y"].tolist() == [-1] * 4


def test_networks_are_few_kernels() -> None:
    plan = tinyedge.compile(model("efficientnet-lite0"), "webgpu")
    launches = [s for s in plan.steps if isinstance(s, Launch)]
    assert len(launches) <= 62 and len(plan.kernels) <= 52
    assert all(math.prod(k.resources.values()) >= 64 for k in plan.kernels)
