"""WebAssembly objects to one module: the linker of wasm plans.

After object code, before the plan. The module imports its memory and nothing else; every object's
functions are in it, and their constants, put into memory when it is instantiated. What would need
more (functions or globals from outside, thread-local data) is refused.

The format of modules is the WebAssembly core specification, section 5; that of objects is the tool
conventions' "Linking.md" (sections linking and reloc.*).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tinyedge.errors import UnsupportedError

# section numbers
CUSTOM, TYPE, IMPORT, FUNCTION, TABLE, MEMORY, GLOBAL, EXPORT = range(8)
ELEMENT, CODE, DATA, DATA_COUNT = 9, 10, 11, 12
FUNCTION_KIND, TABLE_KIND, MEMORY_KIND, GLOBAL_KIND = range(4)
I32, FUNCREF, FUNC_TYPE = 0x7F, 0x70, 0x60
# symbols: kinds and flags
SYMBOL_FUNCTION, SYMBOL_DATA, SYMBOL_GLOBAL, SYMBOL_SECTION, SYMBOL_TABLE = 0, 1, 2, 3, 5
LOCAL, UNDEFINED, EXPLICIT_NAME = 0x2, 0x10, 0x40
SYMBOLS = 8
"""The subsection of "linking" that holds the symbol table."""

# relocations: kind -> whether an addend follows
FUNCTION_INDEX_LEB, TABLE_INDEX_SLEB, TABLE_INDEX_I32, MEMORY_ADDR_LEB, MEMORY_ADDR_SLEB, \
    MEMORY_ADDR_I32, TYPE_INDEX_LEB, GLOBAL_INDEX_LEB = range(8)
TABLE_NUMBER_LEB = 20
ADDENDS = {MEMORY_ADDR_LEB, MEMORY_ADDR_SLEB, MEMORY_ADDR_I32}
KNOWN = {*range(8), TABLE_NUMBER_LEB}

PAGE = 65536
STACK_POINTER, TABLE_NAME = "__stack_pointer", "__indirect_function_table"


@dataclass(frozen=True)
class Module:
    """code: the module. flag: offset in it of the byte that declares the memory: 1, or 3 for one
    that threads share. end: the first address behind its constants and stacks. stacks: where the
    first stack begins."""

    code: bytes
    flag: int
    stacks: int
    end: int


@dataclass
class _Symbol:
    name: str
    kind: int
    flags: int
    index: int = -1
    offset: int = 0

    @property
    def defined(self) -> bool:
        return not self.flags & UNDEFINED


@dataclass
class _Relocation:
    kind: int
    offset: int
    symbol: int
    addend: int


@dataclass
class _Segment:
    """Constants: bytes, alignment, relocations by offset in them, address once it is settled."""

    data: bytearray
    align: int = 1
    relocations: list[_Relocation] = field(default_factory=list)
    address: int = -1


@dataclass
class _Function:
    """A body without its size, its type, relocations by offset in the body."""

    body: bytearray
    type: bytes
    relocations: list[_Relocation] = field(default_factory=list)
    index: int = -1


class _Reader:
    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def number(self) -> int:
        """LEB128, unsigned."""
        out = shift = 0
        while True:
            b = self.byte()
            out |= (b & 0x7F) << shift
            shift += 7
            if b < 0x80:
                return out

    def signed(self) -> int:
        out = shift = 0
        while True:
            b = self.byte()
            out |= (b & 0x7F) << shift
            shift += 7
            if b < 0x80:
                return out - (1 << shift) if b & 0x40 else out

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise UnsupportedError("WebAssembly object code is cut short")
        self.at += count
        return self.data[self.at - count:self.at]

    def name(self) -> str:
        return self.take(self.number()).decode()

    def limits(self) -> None:
        flags = self.byte()
        self.number()
        if flags & 1:
            self.number()


class _Object:
    def __init__(self, data: bytes) -> None:
        if data[:8] != b"\0asm\1\0\0\0":
            raise UnsupportedError("object code is not WebAssembly, version 1")
        self.types: list[bytes] = []
        self.imported: list[str] = []
        """Names of functions from outside, which come first in numbering."""
        self.functions: list[_Function] = []
        self.segments: list[_Segment] = []
        self.symbols: list[_Symbol] = []
        declared: list[int] = []
        relocations: dict[int, list[_Relocation]] = {}
        starts: list[int] = []  # of the bodies, in the code section
        places: list[int] = []  # of the segments' bytes, in the data section
        sections: list[int] = []
        r = _Reader(data, 8)
        while r.at < len(data):
            kind = r.byte()
            s = _Reader(r.take(r.number()))
            sections.append(kind)
            if kind == TYPE:
                self.types = [self._type(s) for _ in range(s.number())]
            elif kind == IMPORT:
                for _ in range(s.number()):
                    self._import(s)
            elif kind == FUNCTION:
                declared = [s.number() for _ in range(s.number())]
            elif kind == CODE:
                for t in (declared[i] for i in range(s.number())):
                    size = s.number()
                    starts.append(s.at)
                    self.functions.append(_Function(bytearray(s.take(size)), self.types[t]))
            elif kind == DATA:
                for _ in range(s.number()):
                    if s.number() != 0 or s.byte() != 0x41:
                        raise UnsupportedError("a data segment of an object has no plain address")
                    s.signed()
                    s.byte()
                    size = s.number()
                    places.append(s.at)
                    self.segments.append(_Segment(bytearray(s.take(size))))
            elif kind == CUSTOM:
                name = s.name()
                if name == "linking":
                    self._linking(s)
                elif name.startswith("reloc."):
                    target = s.number()
                    relocations[sections[target]] = self._relocations(s)
            elif kind not in (DATA_COUNT, TABLE, ELEMENT):
                raise UnsupportedError(f"an object has section {kind}, which can't be linked")
        for kind, parts in ((CODE, starts), (DATA, places)):
            owners: Sequence[_Function | _Segment] = \
                self.functions if kind == CODE else self.segments
            for x in relocations.get(kind, []):
                n = max(i for i, at in enumerate(parts) if at <= x.offset)
                owners[n].relocations.append(
                    _Relocation(x.kind, x.offset - parts[n], x.symbol, x.addend))

    @staticmethod
    def _type(s: _Reader) -> bytes:
        start = s.at
        if s.byte() != FUNC_TYPE:
            raise UnsupportedError("an object has a type that is no function's")
        for _ in range(2):
            s.take(s.number())
        return s.data[start:s.at]

    def _import(self, s: _Reader) -> None:
        s.name()
        name, kind = s.name(), s.byte()
        if kind == FUNCTION_KIND:
            s.number()
            self.imported.append(name)
        elif kind == TABLE_KIND and name == TABLE_NAME:
            s.byte()
            s.limits()
        elif kind == MEMORY_KIND:
            s.limits()
        elif kind == GLOBAL_KIND and name == STACK_POINTER:
            s.take(2)
        else:
            raise UnsupportedError(f"an object needs {name} from outside; plans have nothing there")

    def _linking(self, s: _Reader) -> None:
        if s.number() != 2:
            raise UnsupportedError("an object's linking section is of another version than 2")
        while s.at < len(s.data):
            kind = s.byte()
            p = _Reader(s.take(s.number()))
            if kind == SYMBOLS:
                self.symbols = [self._symbol(p) for _ in range(p.number())]
            elif kind == 5:  # segments: name, alignment as a power of two, flags
                for i in range(p.number()):
                    p.name()
                    self.segments[i].align = 1 << p.number()
                    p.number()

    def _symbol(self, s: _Reader) -> _Symbol:
        kind, flags = s.byte(), s.number()
        out = _Symbol("", kind, flags)
        if kind in (SYMBOL_FUNCTION, SYMBOL_GLOBAL, SYMBOL_TABLE):
            out.index = s.number()
            if out.defined or flags & EXPLICIT_NAME:
                out.name = s.name()
            elif kind == SYMBOL_FUNCTION:
                out.name = self.imported[out.index]
        elif kind == SYMBOL_DATA:
            out.name = s.name()
            if out.defined:
                out.index, out.offset = s.number(), s.number()
                s.number()
        elif kind == SYMBOL_SECTION:
            s.number()
        else:
            raise UnsupportedError(f"an object has a symbol of kind {kind}")
        return out

    @staticmethod
    def _relocations(s: _Reader) -> list[_Relocation]:
        out = []
        for _ in range(s.number()):
            kind = s.byte()
            if kind not in KNOWN:
                raise UnsupportedError(f"an object has a relocation of kind {kind}")
            offset, symbol = s.number(), s.number()
            out.append(_Relocation(kind, offset, symbol, s.signed() if kind in ADDENDS else 0))
        return out


def number(value: int) -> bytes:
    """LEB128, unsigned."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def signed(value: int) -> bytes:
    """LEB128, signed."""
    out = bytearray()
    while not -64 <= value < 64:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value & 0x7F])


def _padded(value: int) -> bytes:
    """Five bytes of LEB128, the room that a relocation has; right for either sign."""
    return bytes([*((value >> 7 * i) & 0x7F | 0x80 for i in range(4)), (value >> 28) & 0x7F])


def _section(kind: int, *items: bytes) -> bytes:
    body = number(len(items)) + b"".join(items)
    return bytes([kind]) + number(len(body)) + body


def _name(text: str) -> bytes:
    return number(len(text.encode())) + text.encode()


def link(objects: Sequence[bytes], exports: Sequence[str], base: int, stack: int, stacks: int = 1
         ) -> Module:
    """One module of objects, whose constants begin at address `base`.

    exports: names of functions that can be called from outside. stack: bytes of each of `stacks`
    stacks, which lie behind the constants; the module begins with the first. UnsupportedError for
    what it can't link.
    """
    parsed = [_Object(o) for o in objects]
    functions: list[_Function] = []
    by_name: dict[str, _Function] = {}
    data: dict[str, tuple[_Segment, int]] = {}
    address = base
    for o in parsed:
        for f in o.functions:
            f.index = len(functions)
            functions.append(f)
        for segment in o.segments:
            address = -(-address // segment.align) * segment.align
            segment.address, address = address, address + len(segment.data)
        for s in o.symbols:
            if s.defined and not s.flags & LOCAL:
                if s.kind == SYMBOL_FUNCTION:
                    if s.name in by_name:
                        raise UnsupportedError(f"two objects define {s.name}")
                    by_name[s.name] = o.functions[s.index - len(o.imported)]
                elif s.kind == SYMBOL_DATA:
                    data[s.name] = o.segments[s.index], s.offset
    types = list(dict.fromkeys(f.type for f in functions))
    called: list[_Function] = []  # through the table, whose entry 0 stays empty

    def function(o: _Object, s: _Symbol) -> _Function:
        if s.defined:
            return o.functions[s.index - len(o.imported)]
        if s.name not in by_name:
            raise UnsupportedError(f"an object needs the function {s.name}, which is in none")
        return by_name[s.name]

    def slot(f: _Function) -> int:
        if f not in called:
            called.append(f)
        return called.index(f) + 1

    def value(o: _Object, r: _Relocation) -> int:
        if r.kind == TYPE_INDEX_LEB:
            if o.types[r.symbol] not in types:
                types.append(o.types[r.symbol])
            return types.index(o.types[r.symbol])
        s = o.symbols[r.symbol]
        if r.kind == FUNCTION_INDEX_LEB:
            return function(o, s).index
        if r.kind in (TABLE_INDEX_SLEB, TABLE_INDEX_I32):
            return slot(function(o, s))
        if r.kind in ADDENDS:
            if not s.defined and s.name not in data:
                raise UnsupportedError(f"an object needs the data {s.name}, which is in none")
            segment, offset = (o.segments[s.index], s.offset) if s.defined else data[s.name]
            return segment.address + offset + r.addend
        if r.kind == GLOBAL_INDEX_LEB and s.kind == SYMBOL_GLOBAL and not s.defined:
            return 0
        return 0  # the one table

    for o in parsed:
        patches = [(f.body, f.relocations) for f in o.functions]
        patches += [(d.data, d.relocations) for d in o.segments]
        for content, relocations in patches:
            for r in relocations:
                v = value(o, r)
                room = v.to_bytes(4, "little") if r.kind in (TABLE_INDEX_I32, MEMORY_ADDR_I32) \
                    else _padded(v)
                content[r.offset:r.offset + len(room)] = room
    first = -(-address // 16) * 16
    end = -(-(first + stack * stacks) // PAGE) * PAGE
    first = end - stack * stacks  # to the end of the memory
    memory = _name("env") + _name("memory") + bytes([MEMORY_KIND])
    limits = bytes([1]) + number(end // PAGE) * 2
    imports = _section(IMPORT, memory + limits)
    out = bytearray(b"\0asm\1\0\0\0") + _section(TYPE, *types)
    out += imports
    flag = len(out) - len(limits)
    out += _section(FUNCTION, *(number(types.index(f.type)) for f in functions))
    # code may call through the table where no launch is large enough to be put into it
    out += _section(TABLE, bytes([FUNCREF, 0]) + number(len(called) + 1))
    out += _section(GLOBAL, bytes([I32, 1, 0x41]) + signed(first + stack) + b"\x0b")
    out += _section(EXPORT, *(
        _name(n) + bytes([FUNCTION_KIND]) + number(by_name[n].index) for n in exports),
        _name("stack_pointer") + bytes([GLOBAL_KIND, 0]))
    if called:
        out += _section(ELEMENT, b"\0\x41\x01\x0b" + number(len(called)) + b"".join(
            number(f.index) for f in called))
    out += _section(CODE, *(number(len(f.body)) + f.body for f in functions))
    constants = bytearray(address - base)
    for o in parsed:
        for d in o.segments:
            constants[d.address - base:d.address - base + len(d.data)] = d.data
    if constants:
        out += _section(DATA, b"\0\x41" + signed(base) + b"\x0b" + number(len(constants))
                        + constants)
    return Module(bytes(out), flag, first, end)


__all__ = ["Module", "link"]
