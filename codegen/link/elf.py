"""ELF objects to one flat, position-independent image: the linker of CPU plans.

After object code, before the plan. The image is every object's code, then every object's constants;
all references inside it are relative, so the run time maps it anywhere and runs it. What would need
work at load time (absolute addresses, writable data, symbols from outside) is refused.

Objects are read with `struct`: a plan links a hundred small ones, where pyelftools' general parser
takes a second.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinyedge.errors import UnsupportedError

# ELF-64 (System V gABI): e_type, sh_type, sh_flags
RELOCATABLE, NO_BITS, SYMTAB, RELA, REL = 1, 8, 2, 4, 9
ALLOC, WRITE, EXEC, TLS = 0x2, 0x1, 0x4, 0x400
MACHINES = {62: "x86-64", 183: "aarch64"}
DROPPED = (".eh_frame", ".note", ".comment")
"""Sections that nothing at run time reads."""


@dataclass(frozen=True)
class Image:
    """code: the flat image. entries: offset of every global function."""

    code: bytes
    entries: dict[str, int]


@dataclass
class _Section:
    name: str
    kind: int
    flags: int
    data: bytes
    link: int
    info: int
    align: int
    place: int = -1


@dataclass
class _Symbol:
    name: str
    section: int
    value: int
    is_global: bool


class _Object:
    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise UnsupportedError("object code is not a little-endian 64-bit ELF file")
        kind, machine = struct.unpack_from("<HH", data, 16)
        if kind != RELOCATABLE or machine not in MACHINES:
            raise UnsupportedError(f"object code is of ELF type {kind} for machine {machine}; only "
                                   f"relocatable code for {' and '.join(MACHINES.values())} can be "
                                   "linked")
        self.machine = MACHINES[machine]
        table, = struct.unpack_from("<Q", data, 40)
        count, names = struct.unpack_from("<HH", data, 60)
        heads = [struct.unpack_from("<IIQQQQIIQQ", data, table + 64 * i) for i in range(count)]
        base = heads[names][4]
        self.sections = []
        for n, kind, flags, _, offset, size, link, info, align, _ in heads:
            end = data.index(b"\0", base + n)
            raw = b"" if kind == NO_BITS else data[offset:offset + size]
            if len(raw) != size and (kind != NO_BITS or flags & ALLOC):
                raise ValueError("a section lies outside the file" if kind != NO_BITS else
                                 "it needs zeroed memory; plans hold code and constants only")
            self.sections.append(_Section(
                data[base + n:end].decode(), kind, flags, raw, link, info, max(align, 1)))
        self.symbols: list[_Symbol] = []
        for s in self.sections:
            if s.kind == SYMTAB:
                text = self.sections[s.link].data
                for at in range(0, len(s.data), 24):
                    n, info, _, index, value, _ = struct.unpack_from("<IBBHQQ", s.data, at)
                    name = text[n:text.index(b"\0", n)].decode()
                    self.symbols.append(_Symbol(name, index, value, info >> 4 != 0))

    def kept(self, code: bool) -> list[_Section]:
        return [s for s in self.sections if s.flags & ALLOC and len(s.data) and
                bool(s.flags & EXEC) == code and not s.name.startswith(DROPPED)]


def link(objects: Sequence[bytes], page: int = 4096) -> Image:
    """One image of `objects`, its constants on a `page` boundary of their own.

    page: bytes, a multiple of every page size that the image is mapped with. UnsupportedError
    names the object and what of it can't be placed or resolved, or says that it is damaged.
    """
    parsed: list[_Object] = []
    number = 0
    try:
        for data in objects:
            number = len(parsed)
            parsed.append(_Object(data))
        image, entries = _place(parsed, page)
        for number, o in enumerate(parsed):
            for s in o.sections:
                if s.kind in (RELA, REL) and o.sections[s.info].place >= 0:
                    _relocate(image, o, number, s, entries)
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise UnsupportedError(f"object {number} can't be linked: {error}") from None
    return Image(bytes(image), entries)


def _place(parsed: Sequence[_Object], page: int) -> tuple[bytearray, dict[str, int]]:
    """The image before relocation, and its global symbols."""
    image = bytearray()
    if len({o.machine for o in parsed}) > 1:
        raise UnsupportedError("objects for several architectures can't be linked together")
    for code in (True, False):
        if not code:
            image += bytes(-len(image) % page)
        for o in parsed:
            for s in o.kept(code):
                if s.flags & (WRITE | TLS):
                    raise UnsupportedError(f"section {s.name} of an object is writable; "
                                           "plans hold code and constants only")
                if page % s.align:
                    raise UnsupportedError(f"section {s.name} of an object is aligned to {s.align} "
                                           f"bytes; an image is aligned to {page}")
                image += bytes(-len(image) % s.align)
                s.place = len(image)
                image += s.data
    entries: dict[str, int] = {}
    for o in parsed:
        for y in o.symbols:
            if 0 < y.section < 0xFF00 and o.sections[y.section].place >= 0:
                if y.value > len(o.sections[y.section].data):
                    raise UnsupportedError(f"symbol {y.name} lies outside its section")
                if not y.is_global:
                    continue
                if y.name in entries:
                    raise UnsupportedError(f"symbol {y.name} is defined by two objects")
                entries[y.name] = o.sections[y.section].place + y.value
    return image, entries


def _relocate(
    image: bytearray, o: _Object, number: int, s: _Section, entries: dict[str, int]
) -> None:
    target = o.sections[s.info]
    if s.kind == REL:
        raise ValueError("its relocations have no addends")
    for at in range(0, len(s.data), 24):
        offset, info, addend = struct.unpack_from("<QQq", s.data, at)
        y, kind = o.symbols[info >> 32], info & 0xFFFFFFFF
        where = target.place + offset
        if offset + 4 > len(target.data):
            raise ValueError(f"a relocation lies outside {target.name}")
        if 0 < y.section < 0xFF00 and o.sections[y.section].place >= 0:
            value = o.sections[y.section].place + y.value + addend
        elif y.name in entries:
            value = entries[y.name] + addend
        else:
            raise UnsupportedError(f"object {number} ({target.name}) needs {y.name or 'a section'}"
                                   ", which no object of the plan defines")
        apply = X86 if o.machine == "x86-64" else ARM
        if kind not in apply:
            raise UnsupportedError(f"object {number}: relocation {kind} of {o.machine} against "
                                   f"{y.name or target.name} is not position independent")
        apply[kind](image, where, value)


_Apply = Callable[[bytearray, int, int], None]


def _relative32(image: bytearray, where: int, value: int) -> None:
    struct.pack_into("<i", image, where, value - where)


def _patch(image: bytearray, where: int, mask: int, bits: int) -> None:
    word, = struct.unpack_from("<I", image, where)
    struct.pack_into("<I", image, where, word & ~mask | bits & mask)


def _field(value: int, bits: int, shift: int) -> int:
    """A signed distance in units of 1 << shift."""
    if value & ((1 << shift) - 1) or not -1 << bits - 1 <= value >> shift < 1 << bits - 1:
        raise ValueError(f"a distance of {value} bytes does not fit an instruction")
    return value >> shift


def _branch26(image: bytearray, where: int, value: int) -> None:
    _patch(image, where, 0x03FFFFFF, _field(value - where, 26, 2))


def _page21(image: bytearray, where: int, value: int) -> None:
    pages = _field((value & ~0xFFF) - (where & ~0xFFF), 21, 12)
    _patch(image, where, 0x60FFFFE0, (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5)


def _low12(shift: int) -> _Apply:
    def apply(image: bytearray, where: int, value: int) -> None:
        _patch(image, where, 0xFFF << 10, _field(value & 0xFFF, 13, shift) << 10)
    return apply


# x86-64 psABI, table 4.9: PC32, PLT32 (to a function in the image the same)
X86: dict[int, _Apply] = {2: _relative32, 4: _relative32}
# ELF for the Arm 64-bit Architecture, tables 5.7.5 to 5.7.10: PREL32, ADR_PREL_PG_HI21,
# ADD_ABS_LO12_NC, LDST8/16/32/64/128_ABS_LO12_NC, JUMP26, CALL26
ARM: dict[int, _Apply] = {
    261: _relative32, 275: _page21, 277: _low12(0), 278: _low12(0), 284: _low12(1),
    285: _low12(2), 286: _low12(3), 299: _low12(4), 282: _branch26, 283: _branch26,
}
