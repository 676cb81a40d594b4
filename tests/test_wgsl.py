"""WGSL that the renderer writes: judged by Tint, Chromium's compiler, and run on SwiftShader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tinyedge
from tests.adapters import SWIFTSHADER, loader, swiftshader
from tests.compiled import difference
from tests.models import MODELS, model
from tests.test_codegen import conv, relu
from tinyedge import graph as g
from tinyedge.codegen import ir, symbolic
from tinyedge.codegen.ir import Kernel, Store, const, load, make, reg, var
from tinyedge.codegen.llvm_target import WEBGPU, parse_target
from tinyedge.codegen.render.wgsl import render
from tinyedge.compiler import compile_graph
from tinyedge.dtype import FLOAT32, FLOAT64, INT32, UINT8
from tinyedge.errors import InputError, UnsupportedError
from tinyedge.graph import Graph, validate
from tinyedge.interpreter import interpret
from tinyedge.plan import Launch, Plan, flat

__all__ = ["swiftshader"]
rng = np.random.default_rng(11)
TARGET = parse_target("webgpu")


@pytest.fixture(scope="session")
def tint() -> Any:
    """A Dawn device: what its compiler refuses raises."""
    wgpu = pytest.importorskip("wgpudawn")
    with loader(SWIFTSHADER):
        adapter = wgpu.gpu.request_adapter_sync(power_preference="high-performance")
    return adapter.request_device_sync()


def judged(tint: Any, plan: Plan) -> None:
    for k in plan.kernels:
        tint.create_shader_module(code=k.source, label=k.name)


def test_tint_refuses_what_is_wrong(tint: Any) -> None:
    with pytest.raises(Exception, match="unresolved"):
        tint.create_shader_module(code="@compute @workgroup_size(1) fn main() { nothing(); }")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_of_the_networks(name: str, tint: Any) -> None:
    spec = MODELS[name]
    plan = tinyedge.compile(model(name), "webgpu", shapes=spec.shapes, states=spec.states)
    judged(tint, plan)
    launches = [s for s in flat(plan.steps) if isinstance(s, Launch)]
    assert launches and max(len(s.buffers) for s in launches) <= WEBGPU.buffers
    assert all(r.offset % WEBGPU.alignment == 0 for s in launches for r in s.buffers)
    sources = [k.source for k in plan.kernels]
    assert len(set(sources)) == len(sources)
    for s in launches:
        k = plan.kernels[s.kernel]
        written = {s.buffers[i].arena for i in k.writes}
        # one object is never bound both ways, and what is written overlaps nothing
        assert all(i in k.writes for i, r in enumerate(s.buffers) if r.arena in written)
        spans = sorted((r.arena, r.offset, r.offset + r.size) for r in s.buffers
                       if isinstance(r.size, int))
        assert all(a[0] != b[0] or a[2] <= b[1] for a, b in zip(spans, spans[1:]))


def run(graph: Graph, feeds: dict[str, Any], device: str, tolerance: float = 1e-5) -> Plan:
    want = interpret(validate(graph), feeds)
    plan = compile_graph(graph, "webgpu")
    with tinyedge.load(plan, device=device) as m:
        got = m(feeds)
    for name, value in want.items():
        assert difference(got[name], value) <= tolerance, name
    return plan


def test_a_product_on_swiftshader(swiftshader: str) -> None:
    x = g.placeholder("x", (1, 12, 9, 9), FLOAT32)
    w = g.const(rng.standard_normal((20, 12, 3, 3)).astype(np.float32))
    run(Graph({"x": x}, {"y": g.elementwise("tanh", conv(x, w, 1, 1))}),
        {"x": rng.standard_normal((1, 12, 9, 9)).astype(np.float32)}, swiftshader, 1e-5)


def test_a_team_folds_together(swiftshader: str) -> None:
    x = g.placeholder("x", (2, 5000), FLOAT32)
    plan = run(Graph({"x": x}, {
        "sum": g.reduce("sum", x, (1,)), "max": g.reduce("max", x, (1,))}),
        {"x": rng.standard_normal((2, 5000)).astype(np.float32)}, swiftshader, 1e-5)
    assert any("workgroupBarrier" in k.source for k in plan.kernels)


def test_bytes_that_share_a_word(swiftshader: str) -> None:
    x = g.placeholder("x", (37,), UINT8)
    y = g.placeholder("y", (37,), UINT8)
    feeds = {n: rng.integers(0, 256, 37).astype(np.uint8) for n in "xy"}
    outs = {"sum": g.elementwise("add", x, y), "less": g.elementwise("lt", x, y)}
    run(Graph({"x": x, "y": y}, outs), feeds, swiftshader, 0)


def test_nan_and_infinity(swiftshader: str) -> None:
    x = g.placeholder("x", (8,), FLOAT32)
    values = np.array([np.nan, np.inf, -np.inf, 0, 1, -1, 3e38, 1e-38], np.float32)
    run(Graph({"x": x}, {"nan": g.elementwise("isnan", x), "relu": relu(x)}),
        {"x": values}, swiftshader, 0)


def test_text_of_a_kernel() -> None:
    """One binding a buffer, a uniform for symbols, a test for invocations that have no piece."""
    n = var("n", 1, 100)
    at = var("g", 0, 399)
    k = Kernel("k", ((FLOAT32, True), (FLOAT32, False)), ("n",), at, n * 4,
               (Store(0, at, ir.op("mul", load(1, at, FLOAT32), const(2.0, FLOAT32))),),
               whole=(True, True), shares=(0,))
    text = render(k, TARGET)
    assert "@binding(0) var<storage, read_write> b0: array<f32>" in text
    assert "@binding(1) var<storage, read> b1" in text
    assert "@binding(2) var<uniform> symbols: Symbols" in text
    assert "count.x" in text and "return;" in text


def test_types_that_are_refused() -> None:
    x = g.placeholder("x", (4,), FLOAT64)
    with pytest.raises(UnsupportedError, match="float64"):
        compile_graph(Graph({"x": x}, {"y": g.elementwise("add", x, x)}), "webgpu")
    with pytest.raises(InputError, match="webgpu:f16"):
        parse_target("webgpu:subgroups")


def test_integers_found_by_rounding() -> None:
    """Adding a large constant is done in integers: nothing can be reassociated."""
    x = load(1, var("g", 0, 3), FLOAT32)
    t = ir.op("add", x, const(1.5 * 2**23, FLOAT32))
    back = ir.op("sub", t, const(1.5 * 2**23, FLOAT32))
    k = Kernel("k", ((FLOAT32, True), (FLOAT32, False)), (), var("g", 0, 3), const(4),
               (Store(0, var("g", 0, 3), back),), whole=(False, False), shares=(0,))
    text = render(k, TARGET)
    assert "round(" in text and "12582912.0f" not in text and "bitcast<i32>" in text


def test_registers_of_a_team(tint: Any) -> None:
    team = var(ir.TEAM, 0, 63)
    acc = reg("acc", INT32)
    g_ = var("g", 0, 1)
    k = Kernel("k", ((INT32, True), (INT32, False)), (), g_, const(2), (
        ir.Set(acc, load(1, g_ * 64 + team, INT32)),
        ir.Set(acc, make("together", (acc,), "max", INT32, *INT32.limits)),
        Store(0, g_, acc, symbolic.ge0(-team))),
        team=64, whole=(False, False), shares=(0,))
    tint.create_shader_module(code=render(k, TARGET))
