"""verify finds what is wrong, and bisect where; times and the report tell what a plan does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tinyedge
from tinyedge import compiler, profile, report, verify
from tinyedge import graph as g
from tinyedge.graph import Graph, Node
from tinyedge.onnx.registry import TABLE
from tinyedge.plan import Plan, flat

Array = np.ndarray[Any, Any]
rng = np.random.default_rng(5)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Ten layers x = tanh(x @ w + b) with names, and a second output after the fourth."""
    nodes, weights, x = [], [], "x"
    for i in range(10):
        w = rng.standard_normal((8, 8)).astype(np.float32) / 2
        weights += [numpy_helper.from_array(w, f"w{i}"),
                    numpy_helper.from_array(w[0], f"b{i}")]
        nodes += [helper.make_node("MatMul", [x, f"w{i}"], [f"m{i}"], f"product{i}"),
                  helper.make_node("Add", [f"m{i}", f"b{i}"], [f"a{i}"], f"bias{i}"),
                  helper.make_node("Tanh", [f"a{i}"], [f"t{i}"], f"layer{i}")]
        x = f"t{i}"
    kind = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes, "layers", [helper.make_tensor_value_info("x", kind, [4, 8])],
        [helper.make_tensor_value_info(n, kind, [4, 8]) for n in ("t3", "t9")], weights)
    path = tmp_path / "layers.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
              path)
    return path


@pytest.fixture
def feeds() -> dict[str, Array]:
    return {"x": rng.standard_normal((4, 8)).astype(np.float32)}


def test_difference() -> None:
    a = np.array([1, -4, np.nan, np.inf], np.float32)
    assert verify.difference(a, a) == 0
    off = a + np.array([0, 0.002, 0, 0], np.float32)
    assert verify.difference(off, a) == pytest.approx(5e-4, rel=1e-3)
    for other in (np.abs(a), a[:3], a.astype(np.float64), np.nan_to_num(a), -a):
        assert verify.difference(other, a) > 0.9
    assert verify.difference(np.array([1, 2]), np.array([1, 2])) == 0
    assert verify.difference(np.array([1, 3]), np.array([1, 2])) == np.inf
    assert verify.difference(np.zeros(0), np.zeros(0)) == 0


@pytest.mark.parametrize("against", verify.REFERENCES)
def test_a_right_plan_passes(model: Path, feeds: dict[str, Array], against: str) -> None:
    want = verify.REFERENCES[against](model, feeds)
    checks = verify.verify(tinyedge.compile(model), feeds, want)
    assert [c.what for c in checks] == ["t3", "t9", "two runs", "1 thread and all"]
    assert all(c.passed for c in checks)
    assert verify.bisect(model, feeds, against=against) is None


def test_wrong_numbers_are_found(model: Path, feeds: dict[str, Array]) -> None:
    want = verify.REFERENCES["onnxruntime"](model, feeds)
    plan = tinyedge.compile(model)
    off = {"t3": want["t3"] * np.float32(1.001), "t9": want["t9"]}
    checks = {c.what: c for c in verify.verify(plan, feeds, off)}
    assert not checks["t3"].passed and checks["t9"].passed
    off = {"t3": np.where(want["t3"] > 0, np.inf, want["t3"]).astype(np.float32)}
    check = verify.verify(plan, feeds, off)[0]
    assert not check.passed and "inf too few" in check.note


def test_bisect_finds_what_the_compiler_breaks(
    model: Path, feeds: dict[str, Array], monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = compiler.compile_graph

    def broken(graph: Graph, *arguments: Any, **options: Any) -> Plan:
        def tanh(n: Node) -> Node | None:
            # wrong from the sixth layer on
            return g.mul(n, g.like(n, 1.01)) if n.source == "layer6" else None

        memo: dict[Node, Node] = {}
        for n in graph.nodes():
            new = g.node(n.op, tuple(memo[i] for i in n.inputs), n.shape, n.dtype, n.source,
                         **dict(n.attrs)) if n.inputs else n
            memo[n] = tanh(new) or new
        return real(Graph(graph.inputs, {k: memo[v] for k, v in graph.outputs.items()}),
                    *arguments, **options)

    monkeypatch.setattr(compiler, "compile_graph", broken)
    seen: list[tuple[int, int]] = []
    found = verify.bisect(model, feeds, report=lambda _, done, of: seen.append((done, of)))
    assert found is not None
    assert (found.stage, found.node, found.value) == ("compiler", "layer6", "t6")
    assert found.error == pytest.approx(0.01, rel=0.2)
    assert len(seen) <= 6 and all(done < of for done, of in seen)


def test_bisect_finds_what_the_importer_breaks(
    model: Path, feeds: dict[str, Array], monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = TABLE["", "Tanh"][13]
    monkeypatch.setitem(TABLE["", "Tanh"], 13, lambda c, x: g.mul(real(c, x), g.like(x, 1.01)))
    found = verify.bisect(model, feeds)
    assert found is not None and (found.stage, found.node) == ("importer", "layer0")


def test_step_times_cover_a_run(model: Path, feeds: dict[str, Array]) -> None:
    with tinyedge.load(tinyedge.compile(model), threads=1) as run:
        steps = profile.step_times(run, feeds, runs=5)
        assert len(steps) == len(list(flat(run.plan.steps)))
        assert sum(s.us for s in steps) > 0
        assert sum(s.flops for s in steps) == profile.flops(run.plan) >= 10 * 2 * 4 * 8 * 8
        assert any("layer6" in s.nodes for s in steps)


def test_facts_agree_with_the_plan(model: Path) -> None:
    plan = tinyedge.compile(model)
    facts = report.facts(plan)
    assert facts["memory"]["scratch"] == plan.arenas[1]
    assert sum(k["launches"] for k in facts["kernels"]) <= facts["steps"]
    lives = report.lifetimes(plan)
    assert lives and all(v.offset + v.size <= plan.arenas[1] for v in lives)
    for a in lives:  # no two that are alive at once overlap
        for b in lives:
            together = a.first < b.last and b.first < a.last
            assert a is b or not together or \
                a.offset + a.size <= b.offset or b.offset + b.size <= a.offset
    text = report.page(facts)
    assert text.count("<rect") == len(lives)
    hostile = report.page(report.facts(replace(plan, name="<script>alert(1)</script>")))
    assert "<script>" not in hostile
