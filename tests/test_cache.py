"""The compile cache and the object code that it spares: hits, damage, refusals, two at once."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyedge import compiler
from tinyedge import graph as g
from tinyedge.codegen import objects
from tinyedge.codegen.cache import Cache, folder
from tinyedge.codegen.llvm_target import compile_ir, parse_target
from tinyedge.compiler import compile_graph
from tinyedge.dtype import FLOAT32
from tinyedge.graph import Graph
from tinyedge.plan import Plan

TARGET = parse_target("cpu")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for every test."""
    monkeypatch.setenv("TINYEDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def graph() -> Graph:
    """A few kernels."""
    x = g.placeholder("x", (5, 24), FLOAT32)
    outs = {"exp": g.exp(x), "sum": g.reduce("sum", x, [1]), "order": g.sort(x, 1)}
    return Graph({"x": x}, outs)


def entries(home: Path) -> list[Path]:
    return sorted(p for p in home.rglob("*") if p.is_file())


def compiled(cache: bool = True) -> bytes:
    return bytes(compile_graph(graph(), cache=cache).code)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are compiled, and the kernels that are built, in this process."""
    done: list[str] = []

    def compile_text(text: str, target: Any) -> bytes:
        done.append(text)
        return compile_ir(text, target)

    build = compiler.build_kernel

    def build_kernel(*args: Any, **named: Any) -> Any:
        done.append("kernel")
        return build(*args, **named)

    monkeypatch.setattr(objects, "compile_ir", compile_text)
    monkeypatch.setattr(compiler, "build_kernel", build_kernel)
    return done


# ---- the store


def test_what_is_stored_is_found(home: Path) -> None:
    cache = Cache()
    values = {"a": b"1", "b": b"", "": b"\0" * 100, "ключ\n": bytes(range(256)) * 300}
    for key, value in values.items():
        assert cache.get(key) is None
        cache.put(key, value)
    for reader in (cache, Cache(), Cache(home)):
        assert {k: reader.get(k) for k in values} == values
    cache.put("a", b"2")
    assert Cache().get("a") == b"2"
    assert len(entries(home)) == len(values)
    assert Cache(home / "other").get("a") is None


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path) -> None:
    assert folder() == home
    monkeypatch.setenv("TINYEDGE_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert folder() == tmp_path / "xdg" / "tinyedge"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder() == tmp_path / ".cache" / "tinyedge"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "x").touch()


DAMAGE: list[Callable[[Path], object]] = [
    truncate, flip, lengthen, lambda p: p.write_bytes(b""), lambda p: p.write_bytes(b"short"),
    lambda p: p.write_bytes(bytes(1000)), to_folder,
]


@pytest.mark.parametrize("damage", range(len(DAMAGE)))
def test_damaged_entries_are_made_again(damage: int, home: Path, work: list[str]) -> None:
    want = compiled()
    made = len(work)
    for path in entries(home):
        DAMAGE[damage](path)
    assert compiled() == want and len(work) > made
    if DAMAGE[damage] is to_folder:
        return  # nothing can be stored there, and nothing is lost by it
    made = len(work)
    assert compiled() == want
    assert not any(w != "kernel" for w in work[made:])


def test_an_entry_under_the_name_of_another(home: Path) -> None:
    want = compiled()
    paths = entries(home)
    contents = [p.read_bytes() for p in paths]
    for path, data in zip(paths, contents[1:] + contents[:1]):
        path.write_bytes(data)
    assert compiled() == want


def test_the_oldest_entries_go_first(home: Path) -> None:
    cache = Cache()
    for i in range(10):
        cache.put(str(i), bytes(1000))
        for path in entries(home):
            if path.stat().st_mtime > 1e9:
                os.utime(path, (i, i))
    cache.prune(3 * 1016 + 1)
    assert [i for i in range(10) if cache.get(str(i)) is not None] == [7, 8, 9]
    cache.prune()
    assert len(entries(home)) == 3
    cache.prune(0)
    assert not entries(home)
    Cache(home / "missing").prune(0)


def test_the_size_is_looked_at_now_and_then(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Path] = []
    monkeypatch.setattr(Cache, "prune", lambda self: looks.append(self.where))
    for i in range(1000):
        # a compilation stores some dozens, so the count can't be kept in an object
        Cache().put(str(i), b"x")
    assert 1 <= len(looks) <= 12


@pytest.mark.parametrize("name", ["mkstemp", "replace", "fdopen"])
def test_a_full_disk(name: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **named: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        module = "tempfile" if name == "mkstemp" else "os"
        patch.setattr(f"tinyedge.codegen.cache.{module}.{name}", full)
        Cache().put("a", b"1")
        assert not entries(home)
    Cache().put("a", b"1")
    assert Cache().get("a") == b"1"


def test_a_damaged_entry_that_can_not_be_removed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    want = compiled()
    for path in entries(home):
        flip(path)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert Cache().get("absent") is None
    assert compiled() == want


@pytest.mark.parametrize("place", ["file", "below a file", "kernel's", "read-only"])
def test_a_folder_that_can_not_be_written(
    place: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = compiled(cache=False)
    home.parent.mkdir(exist_ok=True)
    if place == "read-only":
        home.mkdir()
        home.chmod(0o500)
    elif place == "kernel's":
        monkeypatch.setenv("TINYEDGE_CACHE", "/proc/tinyedge")
    else:
        home.write_text("not a folder")
        if place == "below a file":
            monkeypatch.setenv("TINYEDGE_CACHE", str(home / "x"))
    for _ in range(2):
        assert compiled() == want
    if place == "file":
        assert home.read_text() == "not a folder"


# ---- compilations


def test_a_second_compilation_compiles_nothing(work: list[str], home: Path) -> None:
    first = compiled()
    assert work
    stored, made = entries(home), len(work)
    assert compiled() == first
    assert len(work) == made + work[made:].count("kernel") and entries(home) == stored
    assert compiled(cache=False) == first
    assert any(w != "kernel" for w in work[made:])


def test_targets_do_not_share_code() -> None:
    codes = [bytes(compile_graph(graph(), t).code)
             for t in ("cpu:x86-64-v2", "cpu:x86-64-v3", "cpu:aarch64") * 2]
    assert codes[:3] == codes[3:] and len(set(codes)) == 3


BOTH = """
import sys
from hashlib import sha256
from tests.test_cache import graph
from tinyedge.compiler import compile_graph
print("ready", flush=True)
sys.stdin.read(1)
print(sha256(compile_graph(graph()).code).hexdigest())
"""

CHURN = """
import sys
from pathlib import Path
from tinyedge.codegen.cache import Cache
cache, own = Cache(), int(sys.argv[1])
print("ready", flush=True)
sys.stdin.read(1)
for turn in range(3):
    for i in range(150):
        value = str(i).encode() * (i * 40)
        found = cache.get(str(i))
        assert found in (None, value), i
        cache.put(str(i), value)
    if own == 0:
        cache.prune(100_000)
print("done")
"""


def together(script: str, count: int = 2) -> list[str]:
    """What processes print that start at the same moment."""
    processes = [subprocess.Popen([sys.executable, "-c", script, str(i)], text=True,
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE,
                                  cwd=Path(__file__).parent.parent) for i in range(count)]
    for p in processes:
        assert p.stdout is not None and p.stdout.readline() == "ready\n"
    for p in processes:
        assert p.stdin is not None
        p.stdin.write("x")
        p.stdin.flush()
    outs = [p.communicate(timeout=60) for p in processes]
    assert [p.returncode for p in processes] == [0] * count, [err[-2000:] for _, err in outs]
    return [out.strip() for out, _ in outs]


def test_two_compilations_at_once(work: list[str]) -> None:
    from hashlib import sha256

    first, second = together(BOTH)
    assert first == second
    assert sha256(compiled()).hexdigest() == first
    assert not any(w != "kernel" for w in work)


def test_readers_see_all_or_nothing(home: Path) -> None:
    assert together(CHURN, 3) == ["done"] * 3
    for i in range(150):
        assert Cache().get(str(i)) in (None, str(i).encode() * (i * 40))
    assert all(len(p.name) == 38 for p in entries(home)), "no part of an entry is left behind"


# ---- object code in two processes


def texts(count: int) -> list[str]:
    return [f"define i64 @f{i}(i64 %x) {{ %y = add i64 %x, {i}\n ret i64 %y }}"
            for i in range(count)]


@pytest.fixture
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


@pytest.mark.usefixtures("two_processors")
def test_a_second_process_makes_the_same_code(work: list[str]) -> None:
    given = texts(30)
    seen: list[tuple[str, int, int]] = []
    got = objects.compile_all(given, TARGET, progress=lambda *a: seen.append(a))
    assert len(work) == 15, "the other half was compiled elsewhere"
    assert got == [compile_ir(t, TARGET) for t in given]
    assert seen == [("object code", i + 1, 30) for i in range(30)]
    assert objects.compile_all(given, TARGET) == got and len(work) == 15


@pytest.mark.usefixtures("two_processors")
@pytest.mark.parametrize("executable", ["/nonexistent/python", "", "/bin/false", "/bin/cat"])
def test_a_second_process_that_fails(
    executable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    given = texts(12)
    assert objects.compile_all(given, TARGET, False) == [compile_ir(t, TARGET) for t in given]


@pytest.mark.usefixtures("two_processors")
def test_a_text_that_is_not_valid_ends_the_second_process() -> None:
    children = children_of_this_process()
    with pytest.raises(AssertionError, match="not valid LLVM IR"):
        objects.compile_all([*texts(12), "define nonsense" + " " * 100], TARGET, False)
    assert children_of_this_process() == children


def children_of_this_process() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_the_second_process_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "trap"
    trap.mkdir()
    for name in ("struct", "llvmlite", "tempfile"):
        (trap / f"{name}.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')")
    monkeypatch.chdir(trap)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    process = objects._start([0], texts(1), TARGET)
    assert objects._results(process, 1) == [compile_ir(texts(1)[0], TARGET)]
    assert not (tmp_path / "sprung").exists()


@pytest.mark.usefixtures("two_processors")
def test_more_code_than_a_pipe_holds() -> None:
    data = ", ".join(f"i64 {i}" for i in range(4000))
    given = [f"@t = internal constant [4000 x i64] [{data}]\ndefine i64 @f{i}(i64 %x) {{\n"
             "%p = getelementptr i64, ptr @t, i64 %x\n%y = load i64, ptr %p\nret i64 %y }"
             for i in range(16)]
    got = objects.compile_all(given, TARGET, False)
    assert sum(map(len, got)) > 400_000
    assert got[1::5] == [compile_ir(t, TARGET) for t in given[1::5]]


def test_plans_are_equal_with_any_cache() -> None:
    def plan(cache: bool) -> Plan:
        return compile_graph(graph(), cache=cache)

    cold, warm, none = plan(True), plan(True), plan(False)
    for other in (warm, none):
        assert (other.code, other.entries, other.steps) == (cold.code, cold.entries, cold.steps)
        assert np.array_equal(np.frombuffer(other.constants, "u1"),
                              np.frombuffer(cold.constants, "u1"))
