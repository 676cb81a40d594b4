"""WebAssembly plans under wasmtime: operators, networks, control flow, and the linker."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wasmtime

import tinyedge
from tests import test_onnx_nodes as nodes
from tests.cases import Case, cases
from tests.compiled import check, difference
from tests.models import MODELS, inputs, model
from tests.test_chain import attention, feeds
from tests.test_codegen import normal
from tests.test_compiled_cases import run
from tests.test_cpu_driver import bits, given, network
from tinyedge import graph as g
from tinyedge import planfile
from tinyedge.codegen.link.wasm import link
from tinyedge.codegen.llvm_target import WASM, compile_ir, parse_target
from tinyedge.compiler import compile_graph
from tinyedge.drivers import wasm
from tinyedge.dtype import FLOAT16, FLOAT32, INT64
from tinyedge.errors import DeviceError, DeviceTimeout, InputError, PlanError, UnsupportedError
from tinyedge.graph import Graph
from tinyedge.onnx import load
from tinyedge.shape import symbol

TARGETS = [f"wasm:{name}" for name in WASM]
SHARE = 12
"""Of onnx's node tests, every how manyth runs here: each is a module to link and to compile."""
SMALL = ("efficientnet-lite0", "silero-vad", "ppocr-cls", "magika", "squeezenet", "shufflenet")
"""The networks that run with both sets of instructions; the others with the better one."""


@pytest.mark.parametrize("number, case", list(enumerate(cases())),
                         ids=lambda c: getattr(c, "name", ""))
def test_case(number: int, case: Case) -> None:
    graph = load(case.model)
    try:
        got = run(graph, case.inputs, TARGETS[number % len(TARGETS)])
    except UnsupportedError as error:
        assert "no arithmetic of float16" in str(error)
    else:
        case.compare(got)


def test_float16_arithmetic_is_refused() -> None:
    x = g.placeholder("x", (4,), FLOAT16)
    with pytest.raises(UnsupportedError, match="WebAssembly has no arithmetic of float16"):
        compile_graph(Graph({"x": x}, {"y": g.add(x, x)}), "wasm")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(4))
def test_node_tests(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TARGETS[part % len(TARGETS)]
    monkeypatch.setattr(nodes, "interpret", lambda graph, given: run(graph, given, target))
    count: Counter[str] = Counter()
    wrong = []
    for test in nodes.node_tests()[part::4 * SHARE]:
        try:
            count[nodes.outcome(test)] += 1
        except AssertionError as error:
            wrong.append(f"{test.name}: {' '.join(str(error).split())[:200]}")
    assert not wrong, "\n".join(wrong)
    assert count["equal"] >= 0.9 * nodes.LEAST / (4 * SHARE), count


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_networks(name: str, tmp_path: Path) -> None:
    """Equal to the processor's plan; bit-equal when run again and when loaded from a file."""
    x = inputs(name, 1)
    plan = tinyedge.compile(model(name), "wasm", shapes=MODELS[name].shapes)
    plan.save(tmp_path / "plan.pkl")
    with tinyedge.load(tinyedge.compile(model(name), shapes=MODELS[name].shapes)) as there:
        wanted = there(x)
    for one in (plan, *plan.variants) if name in SMALL else (plan,):
        with tinyedge.load(replace(one, variants=())) as here:
            got, again = here(x), here(x)
        for k, want in wanted.items():
            assert difference(got[k], want) < 1e-4, (one.target, k)
            assert got[k].tobytes() == again[k].tobytes()
    with tinyedge.load(tmp_path / "plan.pkl") as here:
        assert all(here(x)[k].tobytes() == v.tobytes() for k, v in here(x).items())


def test_a_branch_a_loop_and_a_state() -> None:
    graph = network()
    calls = [given(seed) for seed in range(4)]
    with tinyedge.load(compile_graph(graph, "wasm")) as here, \
            tinyedge.load(compile_graph(graph)) as there:
        for i in range(8):
            got, want = here(calls[i % 4]), there(calls[i % 4])
            assert all(difference(got[k], v) < 1e-5 for k, v in want.items())
        assert difference(here.states["total"], there.states["total"]) < 1e-5
        here.states.reset()
        assert not here.states["total"].any()
        first = bits(here(calls[0]))
        here.states["total"] = np.zeros_like(here.states["total"])
        assert bits(here(calls[0])) == first


def test_open_dimensions() -> None:
    n = symbol("n", 1, 40)
    x = g.placeholder("x", (n, 12), FLOAT32)
    y = g.div(g.exp(x), g.expand(g.reduce("sum", g.exp(x), [1]), x.shape))
    graph = Graph({"x": x}, {"y": y, "total": g.reduce("sum", x, [0])})
    for target in TARGETS:
        for rows in (1, 7, 40):
            check(graph, {"x": normal(rows, 12)}, 1e-5, target)


@pytest.mark.parametrize("target", TARGETS)
def test_attention_has_its_rows_on_the_stack(target: str) -> None:
    graph = attention(4, 64, 96, 32)
    plan = check(graph, feeds(graph), 3e-6, target)
    assert any(k.name.startswith("chain") for k in plan.kernels)


def test_float16_weights() -> None:
    path = model("efficientnet-lite0")
    x = inputs("efficientnet-lite0", 0)
    plan = tinyedge.compile(path, "wasm", float16=True)
    assert plan.arenas[0] < 0.6 * tinyedge.compile(path, "wasm").arenas[0]
    with tinyedge.load(plan) as here, tinyedge.load(tinyedge.compile(path, float16=True)) as there:
        assert difference(here(x)["logits"], there(x)["logits"]) < 1e-4


# ---- modules


FIRST = """
@table = internal constant [4 x i32] [i32 10, i32 20, i32 30, i32 40]
@pointers = internal constant [2 x ptr] [ptr @twice, ptr getelementptr (i32, ptr @table, i32 2)]
declare i32 @other(i32)
define internal i32 @twice(i32 %x) {
  %r = mul i32 %x, 2
  ret i32 %r
}
define i32 @entry(i32 %i) {
  %p = getelementptr i32, ptr @table, i32 %i
  %v = load i32, ptr %p
  %f = load ptr, ptr @pointers
  %w = call i32 %f(i32 %v)
  %r = call i32 @other(i32 %w)
  ret i32 %r
}
"""
SECOND = """
@table = internal constant [2 x i64] [i64 7, i64 1000]
define i32 @other(i32 %x) {
  %room = alloca [64 x i32], align 16
  store volatile i32 %x, ptr %room
  %y = load volatile i32, ptr %room
  %i = and i32 %y, 1
  %p = getelementptr i64, ptr @table, i32 %i
  %v = load i64, ptr %p
  %t = trunc i64 %v to i32
  %r = add i32 %y, %t
  ret i32 %r
}
"""


def objects(*texts: str) -> list[bytes]:
    return [compile_ir(t, parse_target("wasm:simd128")) for t in texts]


def test_a_module_of_two_objects() -> None:
    made = link(objects(FIRST, SECOND), ["entry"], 1 << 16, 1 << 12, 3)
    assert made.end % 65536 == 0 and made.stacks == made.end - 3 * (1 << 12)
    for shared in (False, True):
        config = wasmtime.Config()
        config.wasm_threads = True
        engine = wasmtime.Engine(config)
        code = bytearray(made.code)
        assert code[made.flag] == 1
        code[made.flag] = 3 if shared else 1
        module = wasmtime.Module(engine, bytes(code))
        [need] = module.imports
        assert (need.module, need.name) == ("env", "memory")
        assert {e.name for e in module.exports} == {"entry", "stack_pointer"}
        if shared:
            continue  # memory that threads share is for browsers and Node
        store = wasmtime.Store(engine)
        pages = made.end >> 16
        memory = wasmtime.Memory(store, wasmtime.MemoryType(wasmtime.Limits(pages, pages)))
        exports: Any = wasmtime.Instance(store, module, [memory]).exports(store)
        assert [exports["entry"](store, i) for i in range(4)] == [27, 47, 67, 87]
        assert exports["stack_pointer"].value(store) == made.stacks + (1 << 12)


def test_what_can_not_be_linked() -> None:
    with pytest.raises(UnsupportedError, match="needs the function other, which is in none"):
        link(objects(FIRST), ["entry"], 4096, 4096)
    with pytest.raises(UnsupportedError, match="two objects define other"):
        link(objects(FIRST, SECOND, SECOND), ["entry"], 4096, 4096)
    with pytest.raises(UnsupportedError, match="needs the data there, which is in none"):
        link(objects("@there = external global i32\ndefine i32 @entry() {\n"
                     "  %v = load i32, ptr @there\n  ret i32 %v\n}"), ["entry"], 4096, 4096)
    with pytest.raises(UnsupportedError, match="not WebAssembly"):
        link([b"\x7fELF"], [], 0, 0)
    [whole] = objects(SECOND)
    for end in range(9, len(whole), 7):
        with pytest.raises((UnsupportedError, IndexError)):
            link([whole[:end]], ["other"], 4096, 4096)


# ---- the driver


def small() -> Any:
    x = g.placeholder("x", (4,), FLOAT32)
    return compile_graph(Graph({"x": x}, {"y": g.add(x, x)}), "wasm")


def test_targets_and_errors() -> None:
    plan = small()
    assert plan.target == "wasm:relaxed" and [v.target for v in plan.variants] == ["wasm:simd128"]
    with pytest.raises(InputError, match="use wasm, or one of wasm:relaxed and wasm:simd128"):
        compile_graph(Graph({}, {}), "wasm:mvp")
    with pytest.raises(InputError, match="use --device wasm"):
        tinyedge.load(plan, device="cpu")
    with pytest.raises(PlanError, match="no entry constants"):
        tinyedge.load(replace(plan, variants=(), entries={"pages": 2}))
    with pytest.raises(PlanError, match="no module that wasmtime takes"):
        tinyedge.load(replace(plan, variants=(), code=bytes(plan.code[:-9])))
    with pytest.raises(PlanError, match="bytes at"):
        tinyedge.load(replace(plan, variants=(), entries={**plan.entries, "input0": 1 << 40}))
    with tinyedge.load(plan) as run, pytest.raises(UnsupportedError, match="one by one"):
        run.profile(x=np.zeros(4, np.float32))
    run = tinyedge.load(plan)
    run.close()
    run.close()
    with pytest.raises(InputError, match="closed"):
        run(x=np.zeros(4, np.float32))
    assert any(f.name == "wasm" and f.usable for f in wasm.probe())


def test_a_run_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wasm, "RUN_SECONDS", 1)
    n = g.placeholder("n", (), INT64)
    turn = g.placeholder("turn", (), INT64)
    kept = g.placeholder("kept", (64, 64), FLOAT32)
    body = Graph({"turn": turn, "kept": kept},
                 {"going": g.const(np.array(True)), "kept": g.tanh(g.exp(kept))})
    x = g.placeholder("x", (64, 64), FLOAT32)
    last, = g.loop(n, g.const(np.array(True)), [x], [], body, 1 << 40)
    plan = compile_graph(Graph({"n": n, "x": x}, {"y": last}), "wasm")
    run = tinyedge.load(plan)
    with pytest.raises(DeviceTimeout, match="did not end in 1 seconds"):
        run(n=np.array(1 << 39), x=np.zeros((64, 64), np.float32))
    with pytest.raises((DeviceError, DeviceTimeout)):
        run(n=np.array(1), x=np.zeros((64, 64), np.float32))


def test_engines_are_given_back() -> None:
    import threading

    before = threading.active_count()
    for _ in range(3):
        with tinyedge.load(small()) as run:
            run(x=np.zeros(4, np.float32))
    del run
    gc.collect()
    for t in threading.enumerate():
        if t.name.startswith("Thread-") and t.daemon:
            t.join(3)
    assert threading.active_count() <= before


def test_files_hold_both(tmp_path: Path) -> None:
    plan = small()
    plan.save(tmp_path / "p.pkl")
    back = planfile.read(tmp_path / "p.pkl")
    assert bytes(back.code) == bytes(plan.code) and back.entries == plan.entries
    assert [bytes(v.code) for v in back.variants] == [bytes(v.code) for v in plan.variants]
