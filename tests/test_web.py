"""Bundles: what an export writes, and how it behaves in Node and in headless Chromium.

The JavaScript sides are in tests/web/: node.mjs and page.mjs run all of their checks in one process
each and print what came out, line by line; the tests here judge it. Needs node 20 or newer, the
packages of tests/web/package.json and Chromium, all installed by `make test`.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wasmtime
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

import tinyedge
from examples import classify, zoo
from examples.files import CACHE
from tests import web_plans
from tests.models import MODELS
from tinyedge import storage
from tinyedge.cli import main
from tinyedge.codegen.lower import Layout
from tinyedge.compiler import physical
from tinyedge.drivers.wasm import WasmDevice
from tinyedge.dtype import DTYPES, INT64
from tinyedge.errors import InputError, PlanError
from tinyedge.plan import Port
from tinyedge.schedule import Buffer
from tinyedge.web import bundle, export, script, types, vector, weights

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "tests" / "web"
NODE, CHROMIUM = shutil.which("node"), shutil.which(os.environ.get("CHROMIUM", "chromium"))
SECONDS = 240
PIXELS = {"mean": 127, "std": 128, "crop": 0.875}
"""How EfficientNet-Lite0 wants a picture: `examples.classify.preprocess`."""


def _node_version() -> int:
    if NODE is None:
        return 0
    text = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True).stdout
    return int(text.lstrip("v").partition(".")[0])


needs_node = pytest.mark.skipif(_node_version() < 20, reason="node 20 or newer is not installed")
needs_page = pytest.mark.skipif(
    CHROMIUM is None or _node_version() < 20 or not (HERE / "node_modules").exists(),
    reason="chromium, node 20 or newer or the packages of tests/web/package.json are missing")


@cache
def folder() -> Path:
    """A folder of bundles that all tests of a run share; made by whichever comes first."""
    root = Path(os.environ["TINYEDGE_CACHE"]) / "web"
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "empty.html").exists():
            _make(root)
    return root


def _make(root: Path) -> None:
    export(web_plans.recurrent(), "webgpu", root / "hand")
    export(web_plans.recurrent(), "webgpu", root / "hand8", weights="int8")
    export(web_plans.branching(), "webgpu", root / "open")
    export(web_plans.threaded(), "wasm", root / "threaded")
    export(web_plans.colours(), "webgpu", root / "colours", labels=["red", "green", "blue"])
    half, whole = web_plans.recurrent(), web_plans.recurrent()
    half.target, half.variants = "webgpu:f16", (whole,)
    export(half, "webgpu", root / "half")
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "x"], ["squares"]),
         helper.make_node("ReduceSum", ["squares", "axis"], ["sum"], keepdims=1),
         helper.make_node("Sub", ["squares", "sum"], ["y"])], "rows",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor("axis", TensorProto.INT64, [1], [0])])
    rows = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    export(rows, "wasm", root / "rows", dims={"n": (1, 8)})
    lite, voice = MODELS["efficientnet-lite0"], MODELS["silero-vad"]
    labels = {"labels": zoo.class_names(), **PIXELS}
    for name, kind in (("lite", "float32"), ("lite8", "int8"), ("lite16", "float16")):
        export(lite.obtain(CACHE), "wasm", root / name, weights=kind, labels=labels)
    for kind in weights.KINDS:
        export(filtered(), "wasm", root / f"filters-{kind}", weights=kind)
    export(voice.obtain(CACHE), "wasm", root / "voice", shapes=voice.shapes, states=voice.states)
    shutil.copy(zoo.photograph(), root / "cat.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "CHUNK", 4096)
        patch.setattr(bundle, "SHARD", 3 << 15)
        export(web_plans.recurrent(), "webgpu", root / "many", weights="float16")
    Image.new("RGB", (300, 200), (220, 30, 20)).save(root / "red.png")
    Image.new("RGB", (200, 300), (20, 30, 220)).save(root / "blue.png")
    shutil.copy(HERE / "empty.html", root / "empty.html")


def filtered() -> Any:
    """A model with convolutions of 3 x 3 and 1 x 3 that become minimal filters."""
    rng = np.random.default_rng(0)
    shapes = {"a": (48, 32, 3, 3), "b": (40, 48, 1, 3), "c": (32, 40, 3, 3)}
    graph = helper.make_graph(
        [helper.make_node("Conv", [x, w], [y], pads=[0, 1, 0, 1] if w == "b" else [1] * 4)
         for x, w, y in (("x", "a", "s"), ("s", "b", "t"), ("t", "c", "y"))], "filtered",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 32, 40, 40])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 32, 40, 40])],
        [numpy_helper.from_array(
            (rng.standard_normal(s) / 16).astype(np.float32), w) for w, s in shapes.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def results(name: str) -> dict[str, Any]:
    """What a script of tests/web printed: check -> {"value": ...} or {"error": ...}."""
    root = folder()
    kept = root / f"{name}.json"
    with (root / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            assert NODE is not None
            done = subprocess.run([NODE, HERE / name, root], capture_output=True, text=True,
                                  timeout=SECONDS, check=False, env={**os.environ, **(
                                      {"CHROMIUM": CHROMIUM} if CHROMIUM else {})})
            lines = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
            kept.write_text(json.dumps({"stderr": done.stderr, "code": done.returncode,
                                        "checks": {line["name"]: line for line in lines}}))
    out: dict[str, Any] = json.loads(kept.read_text())
    return out


def value(name: str, check: str) -> Any:
    found = results(name)
    assert check in found["checks"], f"{check} did not run: {found['stderr']}"
    line = found["checks"][check]
    assert "error" not in line, line["error"]
    return line["value"]


# ---- the folder


def test_files(tmp_path: Path) -> None:
    report = export(web_plans.recurrent(), "webgpu", tmp_path / "out")
    written = {p.name for p in (tmp_path / "out").iterdir()}
    assert written - {"test.json"} == {  # that where this machine runs such plans
        "index.js", "index.d.ts", "remote.js", "remote.d.ts", "worker.js", "weights-0.bin",
        "package.json", "report.json", "index.html", "demo.js", "demo.css", "settings.js"}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    facts = json.loads((tmp_path / "out" / "report.json").read_text())
    assert facts == json.loads(json.dumps(report.facts))
    assert set(facts["files"]) == written - {"report.json"}
    sizes = {part.name: part for part in report.parts}
    assert sizes["loader"].compressed is not None and sizes["loader"].compressed < 8000
    assert sizes["index.js"].raw == (tmp_path / "out" / "index.js").stat().st_size
    package = json.loads((tmp_path / "out" / "package.json").read_text())
    assert all((tmp_path / "out" / path).exists() for entry in package["exports"].values()
               for path in ([entry] if isinstance(entry, str) else entry.values()))


def test_its_own_folder_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(web_plans.recurrent(), "webgpu", out)
    export(web_plans.branching(), "webgpu", out)
    assert not (out / "weights-0.bin").exists()
    (out / "mine.txt").write_text("notes")
    with pytest.raises(InputError, match=r"mine\.txt there is not the exporter's"):
        export(web_plans.recurrent(), "webgpu", out)
    assert (out / "mine.txt").read_text() == "notes"


@pytest.mark.parametrize("make, message", [
    (lambda p: p.mkdir() or (p / "a").write_text(""), "no export wrote it"),
    (lambda p: p.write_text("text"), "not a folder"),
    (lambda p: p.symlink_to(p.parent), "not a folder"),
])
def test_other_folders_are_left_alone(make: Any, message: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out)
    with pytest.raises(InputError, match=message):
        export(web_plans.recurrent(), "webgpu", out)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_failed_write_leaves_what_was_there(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    export(web_plans.recurrent(), "webgpu", out)
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    real = os.rename

    def broken(a: Any, b: Any) -> None:
        if str(b) == str(out) and not str(a).endswith("-old"):
            raise OSError(28, "No space left on device")
        real(a, b)

    monkeypatch.setattr(os, "rename", broken)
    with pytest.raises(PlanError, match="No space left"):
        export(web_plans.branching(), "webgpu", out)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("change, message", [
    ({"target": "cuda"}, "target cuda"), ({"weights": "int4"}, "weights int4"),
    ({"target": "wasm"}, "needs one for wasm"), ({"labels": {"a": "b"}}, "names of classes"),
    ({"labels": {"labels": [], "gamma": 2}}, "no setting gamma"),
    ({"labels": {"labels": [], "crop": 0}}, "crop is"),
    ({"labels": {"labels": [], "std": [1, 2]}}, "std is a number"),
    ({"labels": {"labels": [], "std": 0}}, "std is a number"),
])
def test_wrong_arguments(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((InputError, PlanError), match=message):
        export(web_plans.recurrent(), **{"target": "webgpu", "out": tmp_path / "out", **change})
    assert not list(tmp_path.iterdir())


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "colours.pkl"
    web_plans.colours().save(plan)
    out = tmp_path / "out"
    labels = tmp_path / "labels.json"
    labels.write_text('{"labels": {"0": "r", "1": "g", "2": "b"}, "mean": 127, "std": 128}')
    words = ["export", str(plan), "-t", "webgpu", "-o", str(out)]
    assert main([*words, "--labels", str(labels)]) == 0
    shown = capsys.readouterr().out
    assert "index.js" in shown and "gzip" in shown
    assert '"mean":[127,127,127]' in (out / "settings.js").read_text()
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "tinyedge bundle"
    for extra, message in ((["--tune", "1"], "--tune"), (["--dim", "n=1"], "--dim"),
                           (["--float16"], "--float16")):
        assert main([*words, *extra]) == 2
        assert message in capsys.readouterr().err
    assert main(["export", str(tmp_path / "none.onnx"), "-o", str(out)]) == 2


# ---- parts of an export


def test_strip() -> None:
    text = """\
// a comment
const a = 'it // is /* not */ one'; /* gone */
  const b = `two ${a + `three // ${"}"}`}
   lines`;  // gone
const c = /[/*]"'`/.test(a) ? a / b / c : '\\'';

  return a
    / b; /* over
  lines */ next()
"""
    assert script.strip(text) == (
        "const a = 'it // is /* not */ one';\n"
        "const b = `two ${a + `three // ${\"}\"}`}\n   lines`;\n"
        "const c = /[/*]\"'`/.test(a) ? a / b / c : '\\'';\n"
        "return a\n/ b;\nnext()\n")
    assert script.joined(["export const a = 1;\n", "import {a} from './a.js';\nexport {a};\n"]) == \
        "const a = 1;\nexport {a};\n"
    assert script.strip_wgsl("  a; // b\n\n/* c\nd */ e;\n") == "a;\ne;\n"


@pytest.mark.parametrize("kind", weights.KINDS)
def test_stored_weights(kind: str) -> None:
    plan = web_plans.recurrent()
    stored = weights.store(plan, kind)
    values = np.frombuffer(stored.values, np.float32)
    off = np.abs(values - web_plans.WEIGHTS).max() / np.abs(web_plans.WEIGHTS).max()
    assert off <= {"float32": 0, "float16": 2 ** -11, "int8": 0.5 / 127 + 1e-7}[kind]
    size = {"float32": 4, "float16": 2, "int8": 1}[kind] * web_plans.COUNT
    assert len(stored.data) == size + 12 * (kind == "int8")
    assert bytes(weights.rounded(plan, stored).constants) == stored.values


@pytest.mark.parametrize("kind", weights.KINDS)
def test_filters_are_stored_before_their_transform(kind: str) -> None:
    plan = tinyedge.compile(filtered(), "wasm")
    known = plan.provenance["filters"]
    assert len(known) >= 2 and len({tuple(taps) for *_, taps in known}) == 2
    stored = weights.store(plan, kind)
    assert [f[0] for f in stored.filters] == [f[0] for f in known]
    elements = sum(blocks * inner * prod(taps) for _, blocks, inner, _, taps in known)
    size = {"float32": 4, "float16": 2, "int8": 1}[kind]
    assert len(stored.data) < size * elements + 4096 < len(plan.constants) / 2
    before, after = (np.frombuffer(c, np.float32) for c in (plan.constants, stored.values))
    off = np.abs(before - after).max() / np.abs(before).max()
    assert off <= {"float32": 1e-6, "float16": 1e-3, "int8": 2e-2}[kind]
    # the module's own transform, from where the run time puts the filters
    store = wasmtime.Store(WasmDevice().engine)
    store.set_epoch_deadline(60)
    e = plan.entries
    memory = wasmtime.Memory(store, wasmtime.MemoryType(wasmtime.Limits(e["pages"], e["pages"])))
    module = wasmtime.Module(store.engine, bytes(plan.code))
    transform: Any = wasmtime.Instance(store, module, [memory]).exports(store)["filter"]
    constants = bytearray(stored.values)
    for offset, blocks, inner, number in stored.filters:
        matrix = stored.matrices[number]
        places, taps = matrix.shape
        end, count = offset + 4 * blocks * inner * places, blocks * inner * taps
        made = weights._Filters.of(
            before[offset // 4:end // 4], *next(f[1:] for f in known if f[0] == offset))
        assert made is not None
        if kind != "float32":
            continue
        constants[offset:end] = bytes(end - offset)
        constants[end - 4 * count:end] = made.before.tobytes()
        memory.write(store, matrix.tobytes(), e["stacks"])
        memory.write(store, constants[offset:end], e["constants"] + offset)
        for block in range(blocks):
            transform(store, e["constants"] + offset, blocks, block, inner, places, taps,
                      e["stacks"])
        got = memory.read(store, e["constants"] + offset, e["constants"] + end)
        assert bytes(got) == stored.values[offset:end]


@pytest.mark.parametrize("shape, order, block, quad, axes", [
    ((8, 3, 5, 2), (0, 1, 2, 3), None, None, (0,)),
    ((8, 3, 5, 2), (1, 2, 3, 0), (0, 4), None, (0,)),
    ((6, 16, 12), (0, 1, 2), (1, 8), None, (0, 1)),
    ((8, 16, 3), (0, 2, 1), (0, 4), (1, 4), (0,)),
    ((4, 8), (1, 0), None, None, (1,)),
    ((1, 8), (0, 1), None, None, (0,)),
])
def test_channels_in_the_order_of_the_memory(
        shape: tuple[int, ...], order: tuple[int, ...], block: tuple[int, int] | None,
        quad: tuple[int, int] | None, axes: tuple[int, ...]) -> None:
    layout = Layout(shape, order, ((0, 0),) * len(shape), shape, block, quad=quad)
    number = np.zeros(shape, np.int64)
    for axis in axes:
        index = np.arange(shape[axis]).reshape([-1 if d == axis else 1 for d in range(len(shape))])
        number = number * shape[axis] + index
    expected = physical(Buffer("w", INT64, layout, "const", array=number)).ravel()
    element = np.arange(expected.size)
    got = sum(element // stride % extent * factor
              for stride, extent, factor in storage._digits(layout, list(shape), axes))
    assert np.array_equal(got + 0 * element, expected)


def test_made_inputs_are_exact_and_varied() -> None:
    for dtype in DTYPES:
        array = vector.made(Port("x", (5, 200), dtype), (5, 200), 3)
        assert array.dtype == DTYPES[dtype].numpy if hasattr(DTYPES[dtype], "numpy") else True
        assert len(np.unique(array)) == (2 if dtype == "bool" else 10 if array.dtype.kind != "f"
                                         else len(np.unique(array)))
        if array.dtype.kind == "f":
            assert len(np.unique(array)) > 200
            assert np.array_equal(array * 128, np.rint(array * 128))


def test_declarations_know_every_type() -> None:
    assert set(types.ARRAYS) == set(DTYPES)


# ---- in Node


@needs_node
def test_second_run_makes_no_objects() -> None:
    got = value("node.mjs", "objects of a second run")
    made = ("buffer", "bind group", "pipeline", "module", "bind group layout", "pipeline layout")
    for key in made:
        assert got["first"][key] == got["second"][key] > 0
        assert got["between"][key] == got["after"][key]
    assert got["second"]["command encoder"] == got["second"]["pass"] == got["second"]["submit"] == 1
    assert got["before"]["pass"] == 2
    assert got["same"] and got["kept"] and got["disposed"]["code"] == "disposed"


@needs_node
def test_open_dimensions() -> None:
    got = value("node.mjs", "control flow and symbols")
    assert got["shapes"] == [[1, 2], [5, 2], [7, 2]]
    assert "n must be in 1..8" in got["out"]["message"]
    assert "pass {data, shape}" in got["plain"]["message"]
    assert "has shape [4] but must have [n,2]" in got["rank"]["message"]


@needs_node
def test_open_dimensions_on_webassembly() -> None:
    got = value("node.mjs", "open dimensions on WebAssembly")
    for run in got["runs"]:
        x = np.array(run["x"]).reshape(run["shape"])
        np.testing.assert_allclose(np.array(run["y"]).reshape(run["shape"]),
                                   x * x - (x * x).sum(0))
    assert got["test"]["passed"] and got["warm"] == "nothing"
    assert "n must be in 1..8" in got["out"]["message"]


@needs_node
def test_half_precision_where_the_adapter_has_it() -> None:
    assert value("node.mjs", "half precision") == {"": "webgpu", "shader-f16": "webgpu:f16"}


@needs_node
def test_limits() -> None:
    got = value("node.mjs", "limits")
    assert got["tight"]["code"] == got["none"]["code"] == "unsupported"
    assert "maxStorageBufferBindingSize of 786432, and the adapter has 4096" in \
        got["tight"]["message"]
    assert "no WebGPU adapter" in got["none"]["message"]
    assert "no back end wasm" in got["absent"]["message"]


@needs_node
def test_a_lost_device_is_told() -> None:
    got = value("node.mjs", "a device that is lost")
    for when in ("during", "after"):
        assert got[when]["code"] == "lost"
        assert "the driver was reset" in got[when]["message"]
    assert got["again"] == web_plans.COUNT


@needs_node
def test_threads_in_node() -> None:
    got = value("node.mjs", "threads")
    one, three = got["1"], got["3"]
    assert one["values"] == three["values"] and one["values"][0] == one["values"][2]
    expected = np.sin(np.arange(web_plans.COUNT)).astype(np.float32) * web_plans.WEIGHTS
    for run, factor in zip(one["values"], (1, 2, 1)):
        np.testing.assert_allclose(run, factor * expected[np.arange(64) * 3001], rtol=1e-5,
                                   atol=1e-6)
    stacks = {web_plans.STACKS + web_plans.STACK * n for n in (2, 3)}
    assert one["marks"][1:] == [0, 0, 0]
    assert set(three["marks"][1:3]) == stacks and three["marks"][3] == 0
    assert (one["info"]["threads"], three["info"]["threads"]) == (1, 3)
    loaded = [event["loaded"] for event in three["events"]]
    assert loaded == sorted(loaded) and loaded[-1] == three["info"]["bytes"]
    assert one["gpu"]["code"] == "unsupported" and three["disposed"]["code"] == "disposed"
    assert one["test"] == "nothing"  # rejected: wasmtime has made a test vector, and it agrees
    assert "threads is 0" in got["none"]["message"]


# ---- in Chromium


@needs_page
@pytest.mark.parametrize("modes", ["plain", "chunked", "gzip", "gzip+chunked"])
def test_progress(modes: str) -> None:
    got = value("page.mjs", "progress")[modes]
    loaded = [event["loaded"] for event in got["events"]]
    totals = {event["total"] for event in got["events"]}
    assert loaded == sorted(loaded) and loaded[0] == 0 and len(loaded) > 4
    assert totals == {loaded[-1]} == {2 * web_plans.COUNT}
    assert set(got["fetched"]) == {1} and len(got["fetched"]) == 5  # index.js and four shards


@needs_page
@pytest.mark.parametrize("name, kind", [
    ("hand", "float32"), ("hand8", "int8"), ("many", "float16")])
def test_states_and_concurrent_runs(name: str, kind: str) -> None:
    got = value("page.mjs", "recurrent")[name]
    stored = weights.store(web_plans.recurrent(), kind)
    held = np.frombuffer(stored.values, np.float32)
    x = np.sin(np.arange(web_plans.COUNT)).astype(np.float32)
    picked = np.arange(64) * 3001
    for run, factor in zip(got["runs"], (1, 2, 3, 1)):
        np.testing.assert_allclose(run, factor * (x * held)[picked], rtol=1e-5, atol=1e-6)
    assert got["info"]["device"] == "webgpu" and got["info"]["verified"]


@needs_page
def test_branches_and_loops() -> None:
    for run in value("page.mjs", "branching"):
        n, x = run["shape"][0], np.array(run["x"])
        expected = n + 6 * x if x[0] > 0 else np.full_like(x, n)
        np.testing.assert_allclose(run["y"], expected)


@needs_page
@pytest.mark.parametrize("case, code, message", [
    ("damaged", "integrity", "another SHA-256"), ("damaged+gzip", "integrity", "another SHA-256"),
    ("short", "integrity", "ends after 786431 of 786432 bytes"),
    ("absent", "network", "answered 404"), ("unreachable", "network", "can't be read from"),
])
def test_broken_downloads(case: str, code: str, message: str) -> None:
    got = value("page.mjs", "broken")[case]
    assert got["code"] == code
    assert got["message"].startswith("weights-0.bin") and message in got["message"]


@needs_page
def test_abort_in_the_middle_of_a_download() -> None:
    got = value("page.mjs", "abort")
    assert got["stopped"]["name"] == got["before"]["name"] == "AbortError"
    assert 0 < got["share"] < 0.9
    assert got["again"] == web_plans.COUNT


@needs_page
def test_device_lost_in_the_middle_of_a_run() -> None:
    got = value("page.mjs", "lost")
    assert got["during"]["code"] == got["after"]["code"] == "lost"
    assert "load the model again" in got["during"]["message"]
    assert got["whole"] == got["again"] != 0


@needs_page
def test_second_visit_without_a_network() -> None:
    got = value("page.mjs", "cached")
    assert got["online"] == got["offline"]["value"] == got["spoiled"]["again"] != 0
    assert got["offline"]["without"]["code"] == "network"
    assert "cached copy is removed" in got["spoiled"]["first"]["message"]
    assert got["spoiled"]["kept"] == 1
    assert got["fetched"] == 1  # after the spoiled copy, and never else


@needs_page
def test_wrong_inputs() -> None:
    said = [case["message"] for case in value("page.mjs", "wrong")]
    for got, expected in zip(said, [
        "there is no input y; the inputs are x", "input x is missing", "input x is object; pass a "
        "Float32Array of shape [196608]", "input x is Float64Array",
        "input x has 5 elements but must have 196608", "input h is a state",
        "input x has shape [1,196608]", "input x is object", "run() takes an object",
        "input x is number", "outputs must be 'cpu', 'gpu'", "there is no output z",
        "output y must be a GPUBuffer", "no back end tpu",
    ], strict=True):
        assert expected in got


@needs_page
def test_gpu_buffers_without_a_copy() -> None:
    got = value("page.mjs", "buffers")
    assert got["cpu"] == got["own"] == got["theirs"] == got["alive"] != 0
    assert got["isTo"] and not got["problems"]
    assert "one of its own" in got["same"]["message"]
    assert "must have the usages" in got["usages"]["message"]


@needs_page
def test_worker() -> None:
    got = value("page.mjs", "worker")
    one, two, again = got["values"]
    assert one == again != 0 and two == pytest.approx(2 * one)
    loaded = [event["loaded"] for event in got["events"]]
    assert loaded == sorted(loaded) and loaded[-1] == got["info"]["bytes"]
    assert got["wasm"] == one
    assert got["wrong"]["code"] == "input" and got["kept"] == web_plans.COUNT
    assert got["stopped"]["name"] == "AbortError"
    assert "worker.js is missing" in got["absent"]["message"]


@needs_page
@pytest.mark.parametrize("modes, threads", [("csp", 1), ("csp+isolated", 2)])
def test_threads_in_isolated_pages(modes: str, threads: int) -> None:
    got = value("page.mjs", "threads")[modes]
    assert got["info"]["threads"] == threads and got["info"]["target"] == "wasm:relaxed"
    assert got["marks"][0] == 1  # the code with relaxed SIMD
    assert [mark != 0 for mark in got["marks"][1:]] == [threads > 1, False, False]
    assert got["y"] == value("node.mjs", "threads")["1"]["values"][0]
    assert got["aborted"]["name"] == "AbortError" and not got["problems"]


@needs_page
@pytest.mark.parametrize("bundler", ["vite", "webpack"])
def test_bundlers_without_a_plugin(bundler: str) -> None:
    got = value("page.mjs", "bundlers")[bundler]
    once = value("page.mjs", "lost")["whole"]
    assert got["title"] == f"{once} {once} 2"
    assert not got["problems"]


@needs_page
def test_types() -> None:
    root = folder()
    shutil.copy(HERE / "example.ts", root / "example.ts")
    assert NODE is not None
    done = subprocess.run(
        [NODE, HERE / "node_modules/typescript/bin/tsc", "--noEmit", "--strict",
         "--noUncheckedIndexedAccess", "--module", "esnext", "--moduleResolution", "bundler",
         "--target", "es2022", "--lib", "es2022,dom", "example.ts"],
        cwd=root, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert not done.returncode, done.stdout


@needs_page
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_picture_page(scheme: str) -> None:
    got = value("page.mjs", "picture")[scheme]
    assert [name for name, _ in got["chosen"]["top"]] == ["red", "green", "blue"]
    assert [name for name, _ in got["dropped"]["top"]] == ["blue", "green", "red"]
    scores = np.array([220, 30, 20]) / 255 * 5
    shares = np.exp(scores) / np.exp(scores).sum()
    np.testing.assert_allclose(got["chosen"]["bars"], shares, rtol=1e-3)
    assert got["chosen"]["device"].startswith("WebGPU") and "ms" in got["chosen"]["latency"]
    assert got["focus"][:2] == ["file", "camera"] and got["camera"] == "true"
    assert got["paper"] == {"light": "rgb(246, 245, 242)", "dark": "rgb(20, 21, 24)"}[scheme]
    assert not got["problems"]  # of the content security policy, among others


@needs_page
@pytest.mark.parametrize("scheme, threads", [("light", "1 thread"), ("dark", "2 threads")])
def test_photograph(scheme: str, threads: str) -> None:
    got = value("page.mjs", "photograph")[scheme]
    # the page scales the photograph a little differently from pillow, the first names stay
    run = vector_of_photograph()
    shares = np.exp(run - run.max()) / np.exp(run - run.max()).sum()
    names = zoo.class_names()
    best = [names[i] for i in np.argsort(-shares)[:5]]
    assert got["top"][0][0] == best[0]
    assert {name for name, _ in got["top"][:3]} <= set(best)
    np.testing.assert_allclose(got["bars"][0], shares.max(), atol=0.1)
    assert got["device"] == f"WebAssembly, {threads}" and not got["problems"]
    with Image.open(folder() / f"demo-{scheme}.png") as picture:
        assert picture.size[0] == 760 and len(picture.convert("RGB").getcolors(1 << 20) or ()) > 500


@cache
def vector_of_photograph() -> Any:
    """The CPU's logits of the photograph."""
    with tinyedge.load(tinyedge.compile(zoo.network())) as run:
        return run(image=classify.preprocess(zoo.photograph()))["logits"][0]


@needs_page
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", [
    "lite", "lite8", "lite16", "voice", *(f"filters-{kind}" for kind in weights.KINDS)])
def test_self_tests(name: str, threads: int) -> None:
    tests = value("page.mjs", "selfTests")
    got = tests[f"{name} {threads}"]
    assert got["passed"] and got["threads"] == threads and got["target"] == "wasm:relaxed"
    assert got["error"] == tests[f"{name} 1"]["error"]  # the same results
    if name in ("lite", "voice", "filters-float32"):
        assert got["error"] <= got["tolerance"] == 1e-4


def test_sizes() -> None:
    report = json.loads((folder() / "lite" / "report.json").read_text())
    sizes = {part["name"]: part["gzip"] for part in report["parts"]}
    assert sizes["loader"] < 8000
    assert sizes["index.js"] + sizes["model-relaxed.wasm"] < 45000
    stored = {name: json.loads((folder() / name / "report.json").read_text())["files"]
              ["weights-0.bin"]["bytes"] for name in ("lite", "lite16", "lite8")}
    assert stored["lite16"] < 0.52 * stored["lite"] and stored["lite8"] < 0.3 * stored["lite"]


@needs_page
def test_form_page() -> None:
    got = value("page.mjs", "form")
    assert "float32 [n,2]" in got["inputs"] and "float32 [8, 2] = " in got["outputs"]
    assert "can't be read" in got["failed"] and not got["problems"]


@needs_page
def test_insecure_page() -> None:
    got = value("page.mjs", "insecure")
    assert got["secure"] is False and "no WebGPU adapter" in got["gpu"]["message"]
    assert got["info"]["verified"] is False and got["info"]["threads"] == 1
    assert got["y"] == value("page.mjs", "lost")["whole"]


def screenshots() -> None:
    """Takes the screenshots of the documents anew: python -m tests.test_web"""
    with tempfile.TemporaryDirectory() as cache_folder:
        os.environ["TINYEDGE_CACHE"] = cache_folder
        value("page.mjs", "photograph")
        for scheme in ("light", "dark"):
            with Image.open(folder() / f"demo-{scheme}.png") as picture:
                few = picture.convert("RGB").crop((0, 0, 760, 890)).quantize(256)
                few.save(ROOT / "docs" / f"demo-{scheme}.png", optimize=True)


if __name__ == "__main__":
    screenshots()
