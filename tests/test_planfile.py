"""Plan files: what is written is read back; what is damaged, hostile or foreign is refused."""

from __future__ import annotations

import errno
import os
import pickle
import stat
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinyedge import planfile
from tinyedge.codegen import symbolic
from tinyedge.codegen.ir import Expr, const, op
from tinyedge.errors import PlanError, ShapeError
from tinyedge.plan import (
    FORMAT,
    Copy,
    If,
    Kernel,
    Launch,
    Loop,
    Plan,
    Port,
    Ref,
    Size,
    State,
    evaluate,
    show_shape,
    show_size,
    size_of_expr,
    symbols_of,
    to_builtin,
)

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.pkl"))
N: Size = ("sym", "n")


def handmade() -> Plan:
    """A plan with something of every kind in it; its code is one return instruction."""
    row = Ref(3, 0, ("mul", 4, ("add", N, 1)))
    return Plan(
        target="cpu:x86-64",
        inputs=(Port("x", (("add", N, 1),), "float32"), Port("go", (), "bool")),
        outputs=(Port("y", (("min", 4, N), ("floordiv", N, 2)), "int64"),),
        states=(State("h", "h.next", (2, 3), "float16", Ref(2, 64, 12)),),
        symbols={"n": (0, 7)},
        arenas=(64, 256, 76),
        kernels=(Kernel("relu", 0, 8, 64, "define void @relu()", "for i < 8:", {"registers": 3},
                       (2,)),
                 Kernel("größe", 0)),
        steps=(
            Launch(0, (row, Ref(0, 0, 64), Ref(1, 64, ("mul", N, 4))), ("n",), N, True, ("a", "b")),
            Copy(Ref(2, 64, 12), Ref(1, 1, 12), sync=False, nodes=("c",)),
            If(Ref(4, 0, 1), (Launch(1, (), (), 1, False),), (), ("if",)),
            Loop("i", Ref(1, 128, 8), Ref(1, 136, 1),
                 (Launch(1, (), ("n", "i"), ("max", ("sym", "i"), ("mod", N, 3))),)),
        ),
        code=b"\xc3",
        constants=bytes(range(64)),
        entries={"submit": 0},
        metadata={"author": "by hand"},
        provenance={"seconds": 1.5, "options": [None, True, -1, 1 << 70, (b"\0", "x" * 300)]},
        name="handmade",
        producer="tinyedge 0.1.0",
    )


def saved(plan: Plan, folder: Path) -> bytes:
    path = folder / "p.pkl"
    planfile.save(plan, path)
    return path.read_bytes()


def wrap(body: bytes, version: int = FORMAT, data: bytes = b"\0" * planfile.PAGE) -> bytes:
    """A file with right checksums around any pickle."""
    size = planfile.HEADER.size
    start = -(-(size + len(body)) // planfile.PAGE) * planfile.PAGE
    rest = body.ljust(start - size, b"\0") + data
    fixed = (planfile.MAGIC, version, b"test 9.9", len(body), start, start + len(data),
             zlib.crc32(rest))
    head = zlib.crc32(planfile.HEADER.pack(*fixed, 0, b"0")[:-5])
    return planfile.HEADER.pack(*fixed, head, b"0") + rest


def refused(data: bytes, match: str = ".") -> str:
    with pytest.raises(PlanError, match=match) as e:
        planfile.parse(memoryview(data), "p.pkl")
    message = str(e.value)
    assert message.startswith("p.pkl: ") and "\n" not in message
    return message


def tree(**changes: Any) -> bytes:
    """The pickle of the handmade plan with other fields."""
    fields = to_builtin(handmade()) | {"code": (0, 1), "constants": (4096, 64)}
    return pickle.dumps(fields | changes, protocol=5)


# Reading back


@pytest.mark.parametrize("size", (0, 1, planfile.PIECE, 9 * planfile.PIECE + 3))
def test_checksums_of_parts_give_the_whole(size: int) -> None:
    data = Random(size).randbytes(size)
    assert planfile.Checksum(memoryview(data)).value() == zlib.crc32(data)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.name)
def test_golden_files_load(path: Path) -> None:
    plan = planfile.read(path)
    assert plan.producer and plan.kernels and plan.format == FORMAT
    if path.name == "format1-handmade.pkl":
        assert plan == handmade()


def test_every_format_has_a_golden_file() -> None:
    for version in range(1, FORMAT + 1):
        assert any(p.name.startswith(f"format{version}-") for p in GOLDEN)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "p.pkl"
    handmade().save(path)
    plan = planfile.read(path)
    assert plan == handmade()
    assert type(plan.symbols["n"]) is tuple
    for part in (plan.code, plan.constants):
        assert isinstance(part, memoryview) and part.readonly
    assert saved(plan, tmp_path) == path.read_bytes()
    assert planfile.read(path) == plan  # the file under the mapping has been replaced


def test_a_file_is_a_pickle_that_shows_what_it_holds(tmp_path: Path) -> None:
    shown = pickle.loads(saved(handmade(), tmp_path))
    assert shown["steps"][1]["type"] == "Copy"
    assert (shown["code"], shown["constants"]) == ((0, 1), (4096, 64))


@pytest.mark.parametrize("target, page", [("cpu:x86-64,avx2", 4096), ("cpu:aarch64", 65536)])
def test_buffers_stand_at_page_boundaries(target: str, page: int, tmp_path: Path) -> None:
    data = saved(replace(handmade(), target=target, code=b"\xc3" * (page + 1)), tmp_path)
    header, _ = planfile.header_of(memoryview(data), "p.pkl")
    assert header.data % page == 0
    assert data[header.data:header.data + page + 2] == b"\xc3" * (page + 1) + b"\0"
    assert data[header.data + 2 * page:] == bytes(range(64))


def test_producer_is_stamped(tmp_path: Path) -> None:
    planfile.save(replace(handmade(), producer=""), tmp_path / "p.pkl")
    assert planfile.read(tmp_path / "p.pkl").producer.startswith("tinyedge ")


def test_empty_plan(tmp_path: Path) -> None:
    plan = Plan("webgpu", (), (), (), {}, (0, 0, 0), (), (), b"", b"", producer="me")
    planfile.save(plan, tmp_path / "p.pkl")
    assert planfile.read(tmp_path / "p.pkl") == plan


text = st.text(st.characters(codec="utf-8"), max_size=12)
sizes = st.recursive(
    st.integers(0, 9) | st.just(N),
    lambda s: st.tuples(st.sampled_from(["add", "mul", "min", "max"]), s, s), max_leaves=5,
)
small = sizes.filter(lambda s: evaluate(s, {"n": 4}) <= 64)
builtin = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 200), 1 << 200)
    | st.floats(allow_nan=False) | text | st.binary(max_size=300),
    lambda s: st.lists(s, max_size=4) | st.lists(s, max_size=4).map(tuple)
    | st.dictionaries(text, s, max_size=4),
    max_leaves=8,
)


def names(count: int) -> st.SearchStrategy[list[str]]:
    return st.lists(text, max_size=count, unique=True)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    size = st.tuples(small).map(tuple)
    dtypes = st.sampled_from(["float32", "int8", "bool", "uint64"])
    kernels = draw(st.lists(text, min_size=1, max_size=4, unique=True))
    code = draw(st.binary(min_size=1, max_size=5000))
    entry = st.integers(0, len(code) - 1)
    refs = st.builds(Ref, st.just(1), st.integers(0, 15).map(lambda i: 64 * i), small)
    byte = st.builds(Ref, st.just(1), st.integers(0, 1000), st.just(1))
    node_names = names(2).map(tuple)
    leaf = st.builds(Launch, st.integers(0, len(kernels) - 1),
                     st.lists(refs, max_size=4).map(tuple), st.sampled_from([(), ("n",)]),
                     sizes, st.booleans(), node_names)
    leaf2 = st.tuples(refs, refs, node_names).map(
        lambda t: Copy(t[0], replace(t[1], size=t[0].size), nodes=t[2]))
    trips = st.just(Ref(1, 512, 8))

    def nest(s: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        body = st.lists(s, max_size=3).map(tuple)
        return st.builds(If, byte, body, body, node_names) | st.builds(
            Loop, st.uuids().map(str), trips, byte, body, node_names)

    constants = draw(st.binary(max_size=5000))
    return Plan(
        target=draw(st.sampled_from(["cpu:x86-64", "cpu:aarch64,neon", "webgpu"])),
        inputs=tuple(Port(n, draw(size), draw(dtypes)) for n in draw(names(3))),
        outputs=tuple(Port(n, draw(size), draw(dtypes)) for n in draw(names(3))),
        states=(),
        symbols={"n": (1, 4)},
        arenas=(len(constants), 4096, 0),
        kernels=tuple(Kernel(k, draw(entry), source=draw(text)) for k in kernels),
        steps=tuple(draw(st.lists(st.recursive(leaf | leaf2, nest, max_leaves=6), max_size=5))),
        code=code,
        constants=constants,
        entries={n: draw(entry) for n in draw(names(3))},
        metadata=draw(st.dictionaries(text, text, max_size=3)),
        provenance=draw(st.dictionaries(text, builtin, max_size=3)),
        name=draw(text),
        producer=draw(st.text("abc 0.1", min_size=1, max_size=73)),
    )


@settings(max_examples=60)
@given(plans())
def test_random_plans_round_trip(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    folder = tmp_path_factory.getbasetemp()
    data = saved(plan, folder)
    assert planfile.parse(memoryview(data)) == plan
    size = planfile.header_of(memoryview(data), "p.pkl")[0].pickle
    assert planfile.decode(data[128:128 + size]) == pickle.loads(data)


@settings(max_examples=200)
@given(builtin)
def test_decode_agrees_with_pickle(value: Any) -> None:
    out = BytesIO()
    pickler = pickle.Pickler(out, protocol=5)
    pickler.fast = True
    pickler.dump(value)
    assert planfile.decode(out.getvalue()) == value
    assert type(planfile.decode(out.getvalue())) is type(value)


@settings(max_examples=300)
@given(st.binary(max_size=200), st.data())
def test_decode_of_nonsense_is_a_fault(noise: bytes, data: st.DataObject) -> None:
    good = tree()
    at = data.draw(st.integers(0, len(good)))
    for body in (noise, good[:at] + noise + good[at + len(noise):]):
        try:
            planfile.decode(body)
        except planfile._Fault:
            pass
        try:
            planfile.parse(memoryview(wrap(body)))
        except PlanError:
            pass


# Damage


def test_any_flipped_byte_is_found(tmp_path: Path) -> None:
    data = saved(handmade(), tmp_path)
    for mask in (0x01, 0xFF):
        for i in range(len(data)):
            damaged = bytearray(data)
            damaged[i] ^= mask
            with pytest.raises(PlanError):
                planfile.parse(memoryview(damaged), "p.pkl")


def test_any_truncation_is_found(tmp_path: Path) -> None:
    data = saved(handmade(), tmp_path)
    for size in range(1, len(data)):
        refused(data[:size], "cut short" if size >= 18 else "cut short|another program|not a tiny")


def test_bytes_behind_the_end_are_found(tmp_path: Path) -> None:
    refused(saved(handmade(), tmp_path) + b"\0", "1 bytes follow")


def test_flips_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p.pkl"
    data = saved(handmade(), tmp_path)
    for i in (20, 200, 3000, 4096, len(data) - 1):
        path.write_bytes(data[:i] + bytes([data[i] ^ 4]) + data[i + 1:])
        with pytest.raises(PlanError, match="damaged"):
            planfile.read(path)


# Other files


@pytest.mark.parametrize("content, match", [
    (b"", "empty"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n", "git lfs pull"),
    (b"\x08\x07\x12\x07pytorch\x1a\x051.9:\x80", "ONNX model.*tinyedge compile"),
    (b"PK\x03\x04" + b"\0" * 100, "zip archive"),
    (b"\x7fELF\x02\x01\x01", "ELF file"),
    (b"\x1f\x8b\x08", "gzip"),
    (b"<!DOCTYPE html><html>", "web page"),
    (pickle.dumps({"a": 1}), "another program"),
    (pickle.dumps({"a": 1}, protocol=5), "another program"),
    (b"\x93NUMPY\x01\0", "numpy array"),
    (b"hello", "not a tinyedge plan"),
    (b"\0" * 5000, "not a tinyedge plan"),
    (planfile.MAGIC[:9], "cut short"),
])
def test_a_file_that_is_no_plan_is_told(content: bytes, match: str, tmp_path: Path) -> None:
    path = tmp_path / "p.pkl"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=match) as e:
        planfile.read(path)
    assert str(e.value).startswith(f"{path}: ")


def test_paths_that_hold_no_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="directory"):
        planfile.read(tmp_path)
    with pytest.raises(PlanError, match="no such file"):
        planfile.read(tmp_path / "none.pkl")
    with pytest.raises(PlanError, match="can't be read"):
        planfile.read("a\0b")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PlanError, match="not a regular file"):
        planfile.read(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    path = tmp_path / "p.pkl"
    path.write_bytes(saved(handmade(), tmp_path))
    path.chmod(0)
    with pytest.raises(PlanError, match="permission denied"):
        planfile.read(path)


# Formats


def test_newer_format_says_who_made_it() -> None:
    message = refused(wrap(b"in the future", FORMAT + 7))
    assert f"format {FORMAT + 7}" in message and "test 9.9" in message
    assert f"up to {FORMAT}" in message


def test_unknown_old_format() -> None:
    refused(wrap(tree(), 0), "format 0, which no tinyedge has written")


def test_an_older_format_is_migrated(monkeypatch: pytest.MonkeyPatch) -> None:
    old = to_builtin(handmade())
    old["title"] = old.pop("name")

    def migrate(t: dict[str, Any]) -> dict[str, Any]:
        t["name"] = t.pop("title")
        return t

    monkeypatch.setattr(planfile, "FORMAT", FORMAT + 1)
    monkeypatch.setitem(planfile.MIGRATIONS, FORMAT, migrate)
    body = pickle_plain(old | {"code": (0, 1), "constants": (4096, 64)})
    data = b"\xc3".ljust(4096, b"\0") + bytes(range(64))
    plan = planfile.parse(memoryview(wrap(body, FORMAT, data)))
    assert replace(plan, producer="tinyedge 0.1.0") == handmade()


# Hostile files


def pickle_plain(value: Any) -> bytes:
    out = BytesIO()
    pickler = pickle.Pickler(out, protocol=5)
    pickler.fast = True
    pickler.dump(value)
    return out.getvalue()


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


class Persistent(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return "everything"


def persistent() -> bytes:
    out = BytesIO()
    Persistent(out, protocol=5).dump(1)
    return out.getvalue()


def laughs() -> bytes:
    """A value of 2**64 items, by references to earlier ones."""
    value: Any = "ha"
    for _ in range(64):
        value = (value, value)
    return pickle.dumps(value, protocol=5)


P5 = b"\x80\x05"
TOUCH = "touch executed"
HOSTILE: dict[str, bytes] = {
    "os.system": pickle.dumps(Calls(os.system, TOUCH), protocol=5),
    "os.system, protocol 0": b"cos\nsystem\n(S'touch executed'\ntR.",
    "eval": pickle.dumps(Calls(eval, "open('executed', 'w')"), protocol=5),
    "nested getattr": pickle.dumps(
        Calls(getattr, Calls(getattr, Calls(__import__, "os"), "path"), "os"), protocol=5),
    "in a field": tree(name=Calls(os.system, TOUCH)),
    "class instance": P5 + b"(cos\nsystem\n\x8c\x0etouch executedo.",
    "INST": P5 + b"(\x8c\x0etouch executedios\nsystem\n.",
    "NEWOBJ": P5 + b"cbuiltins\nobject\n)\x81.",
    "NEWOBJ_EX": P5 + b"cbuiltins\nobject\n)}\x92.",
    "BUILD": P5 + b"}}b.",
    "REDUCE": P5 + b")\x85R.",
    "GLOBAL": P5 + b"cos\nsystem\n.",
    "STACK_GLOBAL": P5 + b"\x8c\x02os\x8c\x06system\x93.",
    "extension": P5 + b"\x82\x01.",
    "extension 4": P5 + b"\x84\x01\x00\x00\x00.",
    "persistent id": persistent(),
    "persistent id, text": P5 + b"Pabc\n.",
    "memo": laughs(),
    "memo get": P5 + b"}\x94h\x00.",
    "memo index": P5 + b"}r\xff\xff\xff\x7f.",
    "self-reference": P5 + b"]\x94h\x00a.",
    "dup": P5 + b"]2a.",
    "out of band": P5 + b"\x97\x98.",
    "bytearray": P5 + b"\x96\xff\xff\xff\xff\xff\xff\xff\x0f.",
    "huge bytes": P5 + b"B\xff\xff\xff\x7fabc.",
    "huge bytes8": P5 + b"\x8e" + struct.pack("<Q", 1 << 60) + b"abc.",
    "huge text": P5 + b"X\xff\xff\xff\xffabc.",
    "huge text8": P5 + b"\x8d" + struct.pack("<Q", 1 << 60) + b"abc.",
    "huge int": P5 + b"\x8b\xff\xff\xff\x7f.",
    "huge frame": P5 + b"\x95" + struct.pack("<Q", 1 << 60) + b"}",
    "text int": P5 + b"I" + b"9" * 100000 + b"\n.",
    "deep lists": P5 + b"]" * 100000 + b"a" * 99999 + b".",
    "deep tuples": P5 + b")" + b"\x85" * 100000 + b".",
    "deep dicts": P5 + b"}" + b"\x8c\x01a}" * 100000 + b"s" * 100000 + b".",
    "deep marks": P5 + b"(" * 100000 + b"t" * 100000 + b".",
    "many values": P5 + b"(" + b"]" * (planfile.MAX_VALUES + 1) + b"t.",
    "colliding keys": pickle_plain({i * ((1 << 61) - 1): 0 for i in range(900)}),
    "unhashable key": P5 + b"}]Ns.",
    "one name twice": P5 + b"}(\x8c\x01aN\x8c\x01aNu.",
    "odd items": P5 + b"}(\x8c\x01au.",
    "set items of a list": P5 + b"](\x8c\x01aNu.",
    "append to a dict": P5 + b"}Na.",
    "a dict inside itself": P5 + b"(\x8c\x01a}u.",
    "underflow": P5 + b"t.",
    "tuple underflow": P5 + b"N\x86.",
    "tuple below a mark": P5 + b"N(N\x86t.",
    "append underflow": P5 + b"a.",
    "items underflow": P5 + b"s.",
    "empty": b"",
    "nothing": P5 + b".",
    "no stop": P5 + b"}",
    "two values": P5 + b"}}.",
    "open mark": P5 + b"}(.",
    "more behind": P5 + b"}.}",
    "bad text": P5 + b"\x8c\x02\xff\xfe.",
    "surrogates": P5 + b"\x8c\x03\xed\xa0\x80.",
    "not a dict": pickle_plain([1]),
    "no fields": pickle_plain({}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = wrap(HOSTILE[name])
    if len(data) > 50000:  # tracing many small objects takes long
        refused(data)
    else:
        tracemalloc.start()
        try:
            refused(data)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name, opcode", [
    ("os.system", "MEMOIZE|STACK_GLOBAL"), ("REDUCE", "REDUCE"), ("BUILD", "BUILD"),
    ("GLOBAL", "GLOBAL"), ("extension", "EXT1"), ("persistent id, text", "PERSID"),
    ("out of band", "NEXT_BUFFER"), ("memo index", "LONG_BINPUT"), ("NEWOBJ", "GLOBAL"),
    ("huge bytes8", "BINBYTES8"),
])
def test_the_refused_opcode_is_named(name: str, opcode: str) -> None:
    assert "may be hostile" in refused(wrap(HOSTILE[name]), f"the opcode ({opcode}),")


LAUNCH = to_builtin(handmade().steps[0])
KERNEL = to_builtin(handmade().kernels[0])


def deep(levels: int) -> Any:
    size: Any = 1
    for _ in range(levels):
        size = ("add", size, 1)
    return size


@pytest.mark.parametrize("field, value, match", [
    ("target", 1, "target is int, not str"),
    ("target", "", "target is not a target"),
    ("inputs", [], "inputs is list, not tuple"),
    ("inputs", ({"name": "x", "shape": (1,)},), r"inputs\[0\] lacks 'dtype'"),
    ("inputs", ({"name": "x", "shape": (1,), "dtype": "O"},), r"inputs\[0\].dtype is 'O'"),
    ("inputs", ({"name": "x", "shape": (1.5,), "dtype": "int8"},), r"shape\[0\] is not a size"),
    ("inputs", ({"name": "x", "shape": (-1,), "dtype": "int8"},), "negative dimension"),
    ("inputs", ({"name": "x", "shape": (1,) * 65, "dtype": "int8"},), "65 dimensions"),
    ("inputs", ({"name": "x", "shape": (1 << 40,) * 2, "dtype": "int8"},), "more than 64 bits"),
    ("inputs", ({"name": "x", "shape": (("sym", "q"),), "dtype": "int8"},), "unknown symbol q"),
    ("inputs", ({"name": "x", "shape": (("pow", 2, 2),), "dtype": "int8"},), "is not a size"),
    ("inputs", ({"name": "x", "shape": (("mod", 2, 0),), "dtype": "int8"},), "divides by zero"),
    ("inputs", ({"name": "x", "shape": (deep(200),), "dtype": "int8"},), "nested"),
    ("inputs", ({"name": "h", "shape": (1,), "dtype": "int8"},), "name 'h' twice"),
    ("outputs", ({"name": "y", "shape": (1,), "dtype": "int8"},) * 2, "name 'y' twice"),
    ("symbols", {"n": (3, 2)}, r"symbols has no value for n: 3\.\.2"),
    ("symbols", {"n": (0, 1 << 60)}, "outside"),
    ("symbols", {"n": (-1, 1)}, "outside"),
    ("symbols", {"n": (1,)}, "1 items instead of 2"),
    ("symbols", {}, "unknown symbol n"),
    ("arenas", (64, 256), "2 items instead of 3"),
    ("arenas", (64, 1 << 60, 76), "outside"),
    ("arenas", (64, True, 76), "is bool, not int"),
    ("arenas", (63, 256, 76), "constants has 64 bytes instead of 63"),
    ("arenas", (64, 128, 76), r"steps\[3\].cond covers bytes 136\.\.137 of arena 1, which has 128"),
    ("arenas", (64, 256, 75), r"states\['h'\].ref covers"),
    ("kernels", (KERNEL | {"entry": 1},), "kernels enters relu at 1"),
    ("kernels", (KERNEL | {"entry": -1},), r"kernels\[0\].entry is -1"),
    ("kernels", (KERNEL, KERNEL), "name 'relu' twice"),
    ("kernels", (KERNEL,), r"steps\[2\].then\[0\].kernel is 1 of 1"),
    ("entries", {"submit": 99}, "enters submit at 99"),
    ("entries", {"submit": "0"}, r"entries\['submit'\] is str"),
    ("steps", ({"type": "Exec"},), r"steps\[0\] is not a step"),
    ("steps", ({"type": ["Launch"]},), r"steps\[0\] is not a step"),
    ("steps", (None,), r"steps\[0\] is not a step"),
    ("steps", (LAUNCH | {"kernel": 2},), r"steps\[0\].kernel is 2 of 2"),
    ("steps", (LAUNCH | {"sync": 1},), r"steps\[0\].sync is int, not bool"),
    ("steps", (LAUNCH | {"extra": 1},), "has more than kernel, buffers"),
    ("steps", (LAUNCH | {"scalars": ("z",)},), "scalars names the unknown symbol z"),
    ("steps", (LAUNCH | {"grid": ("sym", "z")},), "grid names the unknown symbol z"),
    ("steps", (LAUNCH | {"buffers": ((1, 64, 200),)},), r"buffers\[0\] covers bytes 64\.\.264"),
    ("steps", (LAUNCH | {"buffers": ((1, 32, 4),)},), "starts at 32, which 64 does not divide"),
    ("steps", (LAUNCH | {"buffers": ((1, -64, 4),)},), r"buffers\[0\] is -64, outside"),
    ("steps", (LAUNCH | {"buffers": ((1, 0, -4),)},), r"buffers\[0\] covers bytes"),
    ("steps", (LAUNCH | {"buffers": ((6, 0, 4),)},), "names arena 6 of 6"),
    ("steps", (LAUNCH | {"buffers": ((3, 0, 36),)},), "of arena 3, which has 32"),
    ("steps", (LAUNCH | {"buffers": ((1, 0),)},), "is not a place in memory"),
    ("steps", (LAUNCH | {"buffers": ((1, 0, 4),) * 33},), "33 items, more than 32"),
    ("steps", (to_builtin(Copy(Ref(1, 0, 4), Ref(0, 0, 4))),), "writes to arena 0"),
    ("steps", (to_builtin(Copy(Ref(1, 0, 4), Ref(3, 0, 4))),), "writes to arena 3"),
    ("steps", (to_builtin(Copy(Ref(1, 0, 4), Ref(1, 8, 8))),), "copies 4 bytes to 8"),
    ("steps", (to_builtin(If(Ref(1, 0, 2), (), ())),), "cond is not one byte"),
    ("steps", (to_builtin(Loop("i", Ref(1, 0, 4), Ref(1, 8, 1), ())),), "trips is not one int64"),
    ("steps", (to_builtin(Loop("n", Ref(1, 0, 8), Ref(1, 8, 1), ())),), "symbol is n"),
    ("metadata", {"a": 1}, r"metadata\['a'\] is int"),
    ("provenance", (), "provenance is tuple"),
    ("name", None, "name is NoneType"),
    ("metadata", {"long" * 1000: 1}, r"metadata\['longlong.{1,400}long'\] is int"),
    ("format", 1, "has more than target, inputs"),
    ("code", (0, 100000), "code does not lie inside the file"),
    ("code", (1, 1), "code does not lie inside the file"),
    ("code", (-1, 1), r"code\[0\] is -1"),
    ("constants", (0, 64), "constants does not lie inside the file"),
    ("constants", None, "constants is NoneType"),
])
def test_the_schema_names_the_field(field: str, value: Any, match: str) -> None:
    body = pickle_plain(to_builtin(handmade()) | {"code": (0, 1), "constants": (4096, 64)}
                        | {field: value})
    refused(wrap(body, data=bytes(4096 + 64)), match)


def mutated(x: Any, random: Random) -> Any:
    if random.random() < 0.03:
        return random.choice([None, True, -1, 1 << 63, 1.5, "n", (), [], {}, ("sym", "n"), ("sym",),
                              ("mod", 1, 0), ("mul", 1 << 62, 1 << 62), (4, 0, 1 << 62)])
    if type(x) is dict:
        return {k: mutated(v, random) for k, v in x.items() if random.random() > 0.002}
    if type(x) is tuple:
        items = [mutated(v, random) for v in x if random.random() > 0.005]
        return tuple(items + items[:random.random() < 0.03])
    return x


def test_mutated_plans_are_sound_or_refused() -> None:
    random = Random(1)
    good = to_builtin(handmade()) | {"code": (0, 1), "constants": (4096, 64)}
    sound = 0
    for _ in range(3000):
        body = pickle_plain(mutated(good, random))
        try:
            plan = planfile.parse(memoryview(wrap(body, data=bytes(4096 + 64))))
        except PlanError:
            continue
        planfile.check(plan)
        sound += 1
    assert sound < 1000


def test_a_header_that_lies_is_refused() -> None:
    good = wrap(pickle_plain({}))
    fixed = list(planfile.HEADER.unpack_from(good))
    for at, value in ((3, 1 << 60), (4, 1 << 60), (4, 0), (4, 128), (3, 0), (5, len(good) + 1)):
        lying = [*fixed[:at], value, *fixed[at + 1:]]
        lying[7] = zlib.crc32(planfile.HEADER.pack(*lying)[:-5])
        refused(planfile.HEADER.pack(*lying) + good[planfile.HEADER.size:])


# Writing


def test_an_unsound_plan_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "p.pkl"
    path.write_bytes(b"old")
    for plan, match in (
        (replace(handmade(), arenas=(64, 0, 76)), "nothing is written.*arena 1"),
        (replace(handmade(), metadata={"a": object()}), "metadata"),  # type: ignore[dict-item]
        (replace(handmade(), provenance={"a": object()}), r"provenance\['a'\] is object"),
        (replace(handmade(), name="\ud800"), "p.pkl"),
    ):
        with pytest.raises(PlanError, match=match):
            planfile.save(plan, path)
    deep: Any = ()
    for _ in range(3000):
        deep = (deep,)
    with pytest.raises(PlanError, match="nested"):
        planfile.save(replace(handmade(), provenance={"a": deep}), path)
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("where", ["fsync", "replace", "open"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"),
                                   KeyboardInterrupt()])
def test_a_failed_save_changes_nothing(
    where: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.pkl"
    path.write_bytes(b"old")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, where, fail)
        with pytest.raises(PlanError if isinstance(error, OSError) else KeyboardInterrupt) as e:
            planfile.save(handmade(), path)
    if isinstance(error, OSError):
        assert "no space left" in str(e.value)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_where_a_plan_can_not_be_written(tmp_path: Path) -> None:
    for path, match in ((tmp_path, "not a regular file"), (Path("/dev/null"), "not a regular file"),
                        (tmp_path / "none" / "p.pkl", "no such file"), (Path("a\0b"), "can't be")):
        with pytest.raises(PlanError, match=match):
            planfile.save(handmade(), path)
    assert not list(tmp_path.iterdir()) and stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_links_and_permissions_of_a_written_file(tmp_path: Path) -> None:
    (tmp_path / "link.pkl").symlink_to("real.pkl")
    old = os.umask(0o027)
    try:
        planfile.save(handmade(), tmp_path / "link.pkl")
    finally:
        os.umask(old)
    assert (tmp_path / "link.pkl").is_symlink()
    assert stat.S_IMODE((tmp_path / "real.pkl").stat().st_mode) == 0o640
    assert planfile.read(tmp_path / "link.pkl") == handmade()


MEMORY = """
import sys
from dataclasses import replace
from io import BytesIO
from tests.test_planfile import handmade
from tinyedge import planfile

def peak():
    line = next(l for l in open("/proc/self/status") if l.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

size = 48 << 20
if sys.argv[1] == "save":
    plan = replace(handmade(), arenas=(size, 256, 76), constants=b"x" * size)
    before = peak()
    planfile.save(plan, sys.argv[2])
else:
    before = peak()
    plan = planfile.read(sys.argv[2])
print(peak() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_peak_memory(tmp_path: Path) -> None:
    path = tmp_path / "p.pkl"
    grown = {}
    for what in ("save", "load"):
        run = subprocess.run([sys.executable, "-c", MEMORY, what, str(path)], check=True,
                             capture_output=True, text=True,
                             cwd=Path(__file__).resolve().parent.parent)
        grown[what] = int(run.stdout)
    assert grown["save"] < 48 << 20
    assert grown["load"] < path.stat().st_size + (16 << 20)


# Sizes


def test_sizes_of_expressions() -> None:
    n, m = symbolic.symbol("n", 0, 50), symbolic.symbol("m", 1, 9)
    cases: list[Expr | int] = [
        3, n, n * 2 + m * 3 + 5, n - 1, (n + 3) // 4, (n * 3 + m) % 7, n * m, (n + 1) * (m + 2),
        symbolic.minimum(n, m), symbolic.maximum(n, 10), n // m, const(7),
    ]
    for e in cases:
        size = size_of_expr(e)
        assert isinstance(size, int) or symbols_of(size) <= {"n", "m"}
        for i in range(0, 51, 7):
            for j in range(1, 10, 3):
                env = {"n": i, "m": j}
                assert evaluate(size, env) == symbolic.evaluate(e, env)
                assert eval(show_size(size), {}, env) == evaluate(size, env)
    with pytest.raises(ShapeError, match="named dimensions"):
        size_of_expr(op("sqrt", n))


def test_sizes_are_shown_as_written() -> None:
    assert show_size(("add", ("mul", 2, N), 1)) == "2*n + 1"
    assert show_size(("floordiv", ("add", N, 1), 2)) == "(n + 1) // 2"
    assert show_size(("mul", ("mod", N, 2), ("min", N, 3))) == "(n % 2)*min(n, 3)"
    assert show_shape((1, N, ("max", N, 2))) == "[1,n,max(n, 2)]"


# Variants


def fat() -> Plan:
    plan = handmade()
    plan.variants = (replace(handmade(), target="cpu:aarch64", code=b"\xc0\x03\x5f\xd6"),)
    return plan


def test_variants_come_back(tmp_path: Path) -> None:
    path = tmp_path / "p.pkl"
    fat().save(path)
    plan = planfile.read(path)
    assert plan == fat() and "cpu:aarch64" in repr(plan)
    one, other = (memoryview(p.code) for p in (plan, *plan.variants))
    assert one.obj is other.obj  # views of one mapping
    for cut in (1, 100, planfile.WIDE_PAGE):
        refused(path.read_bytes()[:-cut])


@pytest.mark.parametrize("change, says", [
    ({"inputs": ()}, r"variants\[0\].inputs differs"),
    ({"states": ()}, r"variants\[0\].states differ"),
    ({"symbols": {"n": (0, 6)}}, r"variants\[0\].symbols differs"),
    ({"arenas": (64, 8, 76)}, r"variants\[0\].steps"),
    ({"variants": (handmade(),)}, "variants of its own"),
])
def test_variants_that_do_not_fit(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    plan = fat()
    plan.variants = (replace(plan.variants[0], **change),)
    with pytest.raises(PlanError, match=says):
        plan.save(tmp_path / "p.pkl")
    assert not list(tmp_path.iterdir())
