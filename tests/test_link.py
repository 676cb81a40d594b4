"""The linker of CPU plans: layout as pyelftools sees it, code that runs, what is refused."""

from __future__ import annotations

import io
import json
import random
import struct
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection

from tests import aarch64
from tinyedge.codegen.link.elf import Image, link
from tinyedge.codegen.llvm_target import compile_ir, host_arch, parse_target
from tinyedge.drivers.cpu import features
from tinyedge.errors import UnsupportedError

TARGETS = ["cpu:x86-64-v2", "cpu:x86-64-v3", "cpu:aarch64"]
PAGES = {"cpu:aarch64": 65536}
targets = pytest.mark.parametrize("target", TARGETS)

# references of every kind that kernels make: to constants of all sizes, whole and by index, to
# functions of this object and of another
FIRST = """
@table = internal constant [4 x i32] [i32 10, i32 20, i32 30, i32 40]
@wide = internal constant <4 x i64> <i64 1, i64 2, i64 3, i64 4>, align 32
@byte = internal constant i8 5
@half = internal constant i16 700
@word = internal constant i32 90000
@long = internal constant i64 123456789012345

declare i64 @second(i64)

define i64 @first(i64 %i) {
  %j = and i64 %i, 3
  %p = getelementptr i32, ptr @table, i64 %j
  %v = load i32, ptr %p
  %w = zext i32 %v to i64
  %r = call i64 @second(i64 %w)
  %q = getelementptr i64, ptr @wide, i64 %j
  %u = load i64, ptr %q
  %s = add i64 %r, %u
  ret i64 %s
}

define i64 @all(i64 %x) {
  %b = load volatile i8, ptr @byte
  %h = load volatile i16, ptr @half
  %w = load volatile i32, ptr @word
  %l = load volatile i64, ptr @long
  %v = load volatile <4 x i64>, ptr @wide
  %last = extractelement <4 x i64> %v, i32 3
  %b1 = zext i8 %b to i64
  %h1 = zext i16 %h to i64
  %w1 = zext i32 %w to i64
  %s1 = add i64 %b1, %h1
  %s2 = add i64 %w1, %l
  %s3 = add i64 %s1, %s2
  %s4 = add i64 %s3, %last
  ret i64 %s4
}

define i64 @bits(i64 %x) {
  %f = uitofp i64 %x to double
  %d = fmul double %f, 0x3FF8123456789ABC
  %r = bitcast double %d to i64
  ret i64 %r
}
"""
SECOND = """
@bias = internal constant i64 1000
declare i64 @all(i64)
define i64 @second(i64 %x) {
  %b = load volatile i64, ptr @bias
  %y = add i64 %x, %b
  ret i64 %y
}
define i64 @away(i64 %x) {
  %y = tail call i64 @all(i64 %x)
  ret i64 %y
}
"""
CALLS = [("first", 0), ("first", 3), ("second", 5), ("all", 0), ("away", 0), ("bits", 3)]
LOADS = 5 + 700 + 90000 + 123456789012345 + 4
RESULTS = [1011, 1044, 1005, LOADS, LOADS,
           struct.unpack("<q", struct.pack("<d", 3 * float.fromhex("0x1.8123456789abcp0")))[0]]

# maps an image for execution and calls functions of it
CALL = """
import ctypes, json, mmap, os, sys
code, calls = sys.argv[1], json.loads(sys.argv[2])
with open(code, "rb") as f:
    image = mmap.mmap(f.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
import numpy
base = numpy.frombuffer(image, numpy.uint8).ctypes.data
function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
print(json.dumps([function(base + entry)(x) for entry, x in calls]))
"""


@cache
def compiled(text: str, target: str) -> bytes:
    return compile_ir(text, parse_target(target))


def pair(target: str) -> list[bytes]:
    return [compiled(FIRST, target), compiled(SECOND, target)]


def call(image: Image, calls: Sequence[tuple[str, int]], target: str, folder: Path) -> list[int]:
    """Results of functions of an image, run on this machine or under QEMU."""
    path = folder / "image"
    path.write_bytes(image.code)
    arguments = [str(path), json.dumps([(image.entries[name], x) for name, x in calls])]
    arch = target.removeprefix("cpu:")
    if not features.missing(arch):
        # in a process of its own: wrong code may end it
        printed = subprocess.run([sys.executable, "-c", CALL, *arguments], check=True, text=True,
                                 capture_output=True, timeout=60).stdout
    elif arch == "aarch64":
        try:
            printed = aarch64.run(CALL, *arguments)
        except aarch64.Unavailable as error:
            pytest.skip(f"no aarch64 rig: {error}")
    else:
        pytest.skip(f"this machine does not run {arch}")
    results: list[int] = json.loads(printed)
    return results


@targets
def test_linked_code_runs(target: str, tmp_path: Path) -> None:
    for objects in (pair(target), pair(target)[::-1]):
        image = link(objects, PAGES.get(target, 4096))
        assert set(image.entries) == {"first", "all", "bits", "second", "away"}
        assert call(image, CALLS, target, tmp_path) == RESULTS
    assert link(pair(target)) == link(pair(target))


@pytest.mark.parametrize("target", ["cpu:x86-64-v2", "cpu:aarch64"])
def test_a_hundred_objects_in_a_chain(target: str, tmp_path: Path) -> None:
    count = 100
    objects = []
    for i in range(count):
        after = (f"%r = call i64 @f{i + 1}(i64 %y)" if i + 1 < count else "%r = add i64 %y, 0")
        outer = f"declare i64 @f{i + 1}(i64)" if i + 1 < count else ""
        objects.append(compiled(f"""
            @c = internal constant i64 {i}
            {outer}
            define i64 @f{i}(i64 %x) {{
              %c = load volatile i64, ptr @c
              %y = add i64 %x, %c
              {after}
              ret i64 %r
            }}""", target))
    image = link(objects, PAGES.get(target, 4096))
    want = [7 + sum(range(count)), 7 + sum(range(50, count)), 7 + count - 1]
    assert call(image, [("f0", 7), ("f50", 7), (f"f{count - 1}", 7)], target, tmp_path) == want


@targets
def test_layout_follows_the_objects(target: str) -> None:
    """Against pyelftools: code first, constants on a page of their own, all aligned and whole."""
    page = PAGES.get(target, 4096)
    image = link(pair(target), page)
    elves: list[Any] = [ELFFile(io.BytesIO(o)) for o in pair(target)]
    code_end, places = 0, list[tuple[int, int]]()
    for code in (True, False):
        for elf in elves:
            for index, s in enumerate(elf.iter_sections()):
                kept = s["sh_flags"] & 2 and s["sh_size"] and not s.name.startswith(".eh_frame")
                if not kept or bool(s["sh_flags"] & 4) != code:
                    continue
                symbols = [y for y in elf.get_section_by_name(".symtab").iter_symbols()
                           if y["st_shndx"] == index and y["st_info"]["bind"] == "STB_GLOBAL"]
                data, changed = bytearray(s.data()), set()
                for r in relocations(elf, index):
                    changed |= set(range(r["r_offset"], r["r_offset"] + 4))
                if symbols:
                    place, = {image.entries[y.name] - y["st_value"] for y in symbols}
                else:
                    place = image.code.index(data, code_end)
                assert place % s["sh_addralign"] == 0
                assert place % page == 0 or places
                got = image.code[place:place + len(data)]
                assert all(a == b or i in changed for i, (a, b) in enumerate(zip(got, data)))
                places.append((place, place + len(data)))
                code_end = max(code_end, place + len(data)) if code else code_end
    constants = [start for start, _ in places if start >= code_end]
    assert constants and min(constants) % page == 0
    places.sort()
    assert all(a[1] <= b[0] for a, b in zip(places, places[1:]))
    assert places[-1][1] == len(image.code)


def relocations(elf: Any, section: int) -> list[Any]:
    return [r for s in elf.iter_sections() if isinstance(s, RelocationSection)
            and s["sh_info"] == section for r in s.iter_relocations()]


def test_nothing_links_to_nothing() -> None:
    assert link([]) == Image(b"", {})


# ---- refusals


VOLATILE = "define i64 @f() { %v = load volatile i64, ptr @x\n ret i64 %v }"
GET = "define i64 @f() { %v = load i64, ptr @x\n ret i64 %v }"
TEXTS = {
    "function": ("declare i64 @lost()\ndefine i64 @f() { %r = call i64 @lost()\n ret i64 %r }",
                 "needs lost, which no object"),
    "data": (f"@x = external global i64\n{GET}", "needs x, which no object"),
    "writable": (f"@x = global i64 5\n{GET}", "is writable; plans hold code and constants only"),
    "zeroed": (f"@x = global i64 0\n{GET}", "needs zeroed memory"),
    "thread": (f"@x = thread_local global i64 5\n{GET}", "is writable"),
    "pointers": ("@x = constant ptr @f\ndefine ptr @f() { ret ptr @x }", "is writable"),
    "start": ("@llvm.global_ctors = appending global [1 x { i32, ptr, ptr }] "
              "[{ i32, ptr, ptr } { i32 1, ptr @f, ptr null }]\ndefine void @f() { ret void }",
              "is writable"),
}


@pytest.mark.parametrize("target", ["cpu:x86-64-v2", "cpu:aarch64"])
@pytest.mark.parametrize("text", TEXTS)
def test_what_a_plan_can_not_hold(text: str, target: str) -> None:
    source, match = TEXTS[text]
    with pytest.raises(UnsupportedError, match=match):
        link([compiled("define void @other() { ret void }", target), compiled(source, target)])


def object_for(triple: str, text: str, reloc: str) -> bytes:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(reloc=reloc)
    module = llvm.parse_assembly(text)
    module.triple, module.data_layout = triple, str(machine.target_data)
    code: bytes = machine.emit_object(module)
    return code


@pytest.mark.parametrize("triple", ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"])
def test_absolute_addresses(triple: str) -> None:
    absolute = object_for(triple, TEXTS["pointers"][0], "static")
    with pytest.raises(UnsupportedError, match="relocation .* is not position independent"):
        link([absolute])


def test_addresses_by_way_of_a_table(target: str = "cpu:x86-64-v2") -> None:
    constant = compiled("@x = constant i64 5", target)
    with pytest.raises(UnsupportedError, match="against x is not position independent"):
        link([compiled(f"@x = external constant i64\n{GET}", target), constant])


def test_two_definitions() -> None:
    with pytest.raises(UnsupportedError, match="symbol first is defined by two objects"):
        link([compiled(FIRST, TARGETS[0]), *pair(TARGETS[0])])


def test_foreign_objects() -> None:
    x86, arm = (compiled("define void @f() { ret void }", t) for t in TARGETS[1:])
    with pytest.raises(UnsupportedError, match="several architectures"):
        link([x86, arm])
    riscv = object_for("riscv64-unknown-linux-gnu", "define void @f() { ret void }", "pic")
    with pytest.raises(UnsupportedError, match="machine 243; only relocatable code"):
        link([riscv])
    wasm = object_for("wasm32-unknown-unknown", "define void @f() { ret void }", "pic")
    for data in (wasm, b"", b"\x7fELF", b"\x7fELF\x01\x01" + bytes(200)):
        with pytest.raises(UnsupportedError, match="is not a little-endian 64-bit ELF|can't be li"):
            link([data])
    with pytest.raises(UnsupportedError, match="ELF type"):
        link([Path(sys.executable).read_bytes()])


def test_alignment_above_a_page() -> None:
    big = compiled(f"@x = internal constant i64 5, align 65536\n{VOLATILE}", TARGETS[0])
    with pytest.raises(UnsupportedError, match="aligned to 65536 bytes; an image is aligned to"):
        link([big])
    assert link([big], 65536).code[65536:] == struct.pack("<q", 5)


@pytest.mark.parametrize("target", ["cpu:x86-64-v2", "cpu:aarch64"])
@pytest.mark.parametrize("addend", [1 << 40, -1 << 62, (1 << 63) - 1])
def test_distances_that_do_not_fit(target: str, addend: int) -> None:
    data = bytearray(compiled(FIRST, target))
    elf: Any = ELFFile(io.BytesIO(bytes(data)))
    section = elf.get_section_by_name(".rela.text")
    struct.pack_into("<q", data, section["sh_offset"] + 16, addend)
    with pytest.raises(UnsupportedError, match="object 0 can't be linked"):
        link([bytes(data), compiled(SECOND, target)])


# ---- damage


@pytest.mark.parametrize("target", ["cpu:x86-64-v2", "cpu:aarch64"])
def test_truncated_objects(target: str) -> None:
    whole, second = pair(target)
    for size in [*range(80), *range(80, len(whole), 7)]:
        with pytest.raises(UnsupportedError):
            link([whole[:size], second])


@pytest.mark.parametrize("target", ["cpu:x86-64-v2", "cpu:aarch64"])
def test_damaged_objects(target: str) -> None:
    """Links or is refused; LLVM's objects have no checksums, so a changed instruction is taken."""
    whole, second = pair(target)
    chance = random.Random(4)
    outcomes = {"linked": 0, "refused": 0}
    for _ in range(1500):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 3, 20))):
            at = chance.randrange(6, len(data))
            data[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, data[at] ^ 1 << chance.randrange(8)))
        try:
            image = link([bytes(data), second])
        except UnsupportedError as error:
            outcomes["refused"] += 1
            assert "\n" not in str(error)
        else:
            outcomes["linked"] += 1
            assert len(image.code) < 1 << 20
            assert all(0 <= e <= len(image.code) for e in image.entries.values())
    assert min(outcomes.values()) > 100, outcomes


def test_host_is_among_the_targets() -> None:
    """So that at least one target's code has run on a processor, not under an emulator."""
    assert host_arch() == "aarch64" or host_arch() >= "x86-64-v2"
