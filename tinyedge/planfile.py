"""Plan files: a `Plan` on disk, between the compiler, which writes it, and the run time.

A plan file is a pickle (protocol 5) of builtin types, and behind it the large buffers::

    0     header, 128 bytes    magic, format, producer, sizes, two checksums
    128   the pickle           one dict: a Plan's fields; code and constants as (offset, size)
    data  code, constants      each at a page boundary, zeros between; mapped, never read

The header is itself a piece of the pickle (a bytes object that is dropped again), so that
``pickle.load`` shows what a plan holds where tinyedge is not installed. tinyedge uses no unpickler:
`decode` knows just the opcodes that builtin data is made of. None of them names a class, calls
anything, looks at an earlier value (so there are no cycles and no sharing) or asks for more memory
than the file has bytes for; every other one is refused.

One CRC-32 stands for the header and one for everything behind it, so every flipped byte is found
before a plan is given out. They are no signature: a plan holds machine code, so run only plans that
come from where you would run a program from.

The first 128 bytes mean the same in every format, so each version of tinyedge can say what a newer
file needs. Older formats are brought up to date by `MIGRATIONS`.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import stat
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from io import BytesIO
from threading import Thread
from typing import Any, NamedTuple

from .dtype import DTYPES
from .errors import PlanError
from .plan import (
    ALIGNMENT,
    CONSTANTS,
    FIRST_EXTERNAL,
    FORMAT,
    MAX_BUFFERS,
    OPERATIONS,
    SCRATCH,
    STATES,
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
    Step,
    evaluate,
    show_size,
    symbols_of,
    to_builtin,
)

HEADER = struct.Struct("<18sI73sQQQIIc")
"""magic, format, producer, bytes of the pickle, offset of the data, bytes of the file, checksum of
everything behind the header, checksum of the header up to here, and the opcode that drops it."""

MAGIC = b"\x80\x05C\x7btinyedge plan\n"  # PROTO 5, then a bytes object of 123 bytes
DROP = pickle.POP
PAGE = 4096
WIDE_PAGE = 65536  # aarch64 kernels exist with pages of 4, 16 and 64 KiB
PIECE = 1 << 21
"""Bytes of a checksum that a thread takes at a time."""
MAX_VALUES = 1 << 21
MAX_DEPTH = 100
MAX_RANK = 64  # numpy's
INT64_MAX = (1 << 63) - 1
TOO_LARGE = "is a number of more than 64 bits"

MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""format -> what turns its dict into the next format's."""


class Header(NamedTuple):
    """Where a plan file's parts are; offsets and sizes in bytes."""

    format: int
    producer: str
    pickle: int
    data: int
    total: int


def read(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file, whose code and constants stay mapped from it (read-only).

    A file must not be overwritten in place while a plan of it is in use; `save` never does that.
    PlanError says what is wrong with the file.
    """
    where = os.fspath(path)
    return parse(_mapped(where), where)


class Checksum:
    """The CRC-32 of a large buffer, begun by other threads while this one has something else to do.

    Checksums of two parts give that of both: the first one's is multiplied by x^(8 n), n the bytes
    of the second, modulo the polynomial (ISO/IEC 3309, its lowest power in the top bit), and added.
    """

    def __init__(self, data: memoryview) -> None:
        self.parts = [data[i:i + PIECE] for i in range(0, len(data), PIECE)]
        self.sums = [0] * len(self.parts)
        self.left = iter(range(len(self.parts)))  # gives every number to one thread only
        others = min((os.cpu_count() or 1) - 1, 3, len(self.parts) // 2)
        self.threads = [Thread(target=self._work, daemon=True) for _ in range(others)]
        for t in self.threads:
            t.start()

    def _work(self) -> None:
        for i in self.left:
            self.sums[i] = zlib.crc32(self.parts[i])

    def value(self) -> int:
        """The checksum of all of it; this thread helps."""
        self._work()
        for t in self.threads:
            t.join()
        out = 0
        for part, crc in zip(self.parts, self.sums):
            out = _times(out, _power(len(part))) ^ crc
        return out


@cache
def _power(count: int) -> int:
    """x^(8 count) modulo the polynomial of CRC-32."""
    out, power = 0x8000_0000, 0x0080_0000  # 1, x^8
    while count:
        if count & 1:
            out = _times(out, power)
        power, count = _times(power, power), count >> 1
    return out


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo that of CRC-32."""
    out = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            out ^= b
        b = b >> 1 ^ (0xEDB8_8320 if b & 1 else 0)
    return out


def header_of(data: memoryview, where: str) -> tuple[Header, int]:
    """(the header of a plan file's bytes, the checksum that all behind it should have);
    PlanError."""
    if data[: len(MAGIC)] != MAGIC:
        raise PlanError(f"{where}: {_what_is(bytes(data[:512]))}")
    if len(data) < HEADER.size:
        raise PlanError(f"{where}: the plan is cut short at {len(data)} bytes; copy it again")
    _, version, name, size, start, total, body, head, end = HEADER.unpack_from(data)
    if zlib.crc32(data[: HEADER.size - 5]) != head or end != DROP:
        raise PlanError(f"{where}: the plan's header is damaged; copy or compile it again")
    producer = "".join(c for c in name.rstrip(b"\0").decode("ascii", "replace") if c.isprintable())
    if len(data) < total:
        raise PlanError(f"{where}: the plan is cut short at {len(data)} of {total} bytes; "
                        "copy it again")
    if len(data) > total:
        raise PlanError(f"{where}: {len(data) - total} bytes follow the plan's end; copy it again")
    return Header(version, producer, size, start, total), body


def _check_header(header: Header, where: str) -> None:
    version = header.format
    if version > FORMAT:
        raise PlanError(f"{where}: the plan has format {version}, made by {header.producer}, and "
                        f"this tinyedge reads formats up to {FORMAT}; use that version or a newer "
                        "one, or compile the model with this one")
    if version != FORMAT and version not in MIGRATIONS:
        raise PlanError(f"{where}: the plan has format {version}, which no tinyedge has written")
    if not HEADER.size + header.pickle <= header.data <= header.total or header.data % PAGE:
        raise PlanError(f"{where}: the plan's header is inconsistent; compile the model again")


def parse(data: memoryview, where: str = "plan") -> Plan:
    """The plan that a file's bytes hold; its code and constants are views of them. PlanError.

    Every byte is checked before anything is given out; what is parsed meanwhile may be damaged,
    which `decode` is made for, and then that is what is said.
    """
    header, body = header_of(data, where)
    check = Checksum(data[HEADER.size:])
    try:
        _check_header(header, where)
        plan = _parsed(data, header, where)
    except PlanError as error:
        fault: PlanError | None = error
    else:
        fault = None
    if check.value() != body:
        raise PlanError(f"{where}: the plan is damaged (its checksum differs); "
                        "copy or compile it again")
    if fault is not None:
        raise fault
    return plan


def _parsed(data: memoryview, header: Header, where: str) -> Plan:
    with _naming(f"{where}: the plan"):
        tree = decode(bytes(data[HEADER.size:HEADER.size + header.pickle]))
        if type(tree) is not dict:
            raise _Fault(f"is a {type(tree).__name__}, not a dict")
        for version in range(header.format, FORMAT):
            tree = MIGRATIONS[version](tree)
        end = 0

        def plan_of(tree: Any) -> Plan:
            nonlocal end
            if type(tree) is not dict:
                raise _Fault(f"is a {type(tree).__name__}, not a dict")
            parts = {}
            for name in ("code", "constants"):
                with _Fault.at(name):
                    offset, size = _BUFFER(tree.pop(name, None))
                    if offset < end or offset % PAGE or header.data + offset + size > header.total:
                        raise _Fault("does not lie inside the file")
                end = offset + size
                parts[name] = data[header.data + offset:header.data + end]
            plan = _plan(tree, parts["code"], parts["constants"])
            plan.producer = header.producer
            return plan

        variants = tree.pop("variants", ())
        plan = plan_of(tree)
        with _Fault.at("variants"):
            plan.variants = _each(plan_of)(variants)
        _check(plan)
    return plan


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan's file, whole or not at all.

    PlanError if the plan isn't sound (nothing is written that `read` would refuse) or the file
    can't be written, in which case one that was there before is left as it was.
    """
    plans = (plan, *plan.variants)
    page = PAGE if all("x86" in p.target for p in plans) else WIDE_PAGE
    trees, buffers, end = [], list[bytes | memoryview](), 0
    out = BytesIO()
    with _naming(f"{os.fspath(path)}: nothing is written, the plan"):
        for p in plans:
            tree = to_builtin(p)
            _check_depth(tree)
            _plan(tree, p.code, p.constants)
            for name in ("code", "constants"):
                data = memoryview(getattr(p, name)).cast("B")
                at = -(-end // page) * page
                buffers += [bytes(at - end), data]
                tree[name], end = (at, len(data)), at + len(data)
            trees.append(tree)
        _check(plan)
        pickler = pickle.Pickler(out, protocol=5)
        pickler.fast = True  # no memo: what is written has no references
        pickler.dump(trees[0] | {"variants": tuple(trees[1:])})
        decode(out.getvalue())
    size = len(out.getbuffer())
    start = -(-(HEADER.size + size) // page) * page
    parts = [out.getbuffer(), bytes(start - HEADER.size - size), *buffers]
    body = 0
    for part in parts:
        body = zlib.crc32(part, body)
    producer = (plan.producer or f"tinyedge {_version()}").encode("ascii", "replace")[:73]
    fixed = (MAGIC, FORMAT, producer, size, start, start + end, body)
    head = zlib.crc32(HEADER.pack(*fixed, 0, DROP)[:-5])
    write_whole(path, [HEADER.pack(*fixed, head, DROP), *parts])


def write_whole(path: str | os.PathLike[str], parts: Iterable[bytes | memoryview]) -> None:
    """Writes a file, or leaves things as they were: PlanError. A symbolic link stays one."""
    where = os.fspath(path)
    try:
        target = os.path.realpath(where)
        if os.path.lexists(target) and not os.path.isfile(target):
            raise PlanError(f"{where}: this is not a regular file; choose another name")
        temporary = os.path.join(os.path.dirname(target), f".tinyedge-{os.urandom(8).hex()}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with open(fd, "wb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(fd)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
        with suppress(OSError):  # not every file system can; the file itself is safe by now
            fd = os.open(os.path.dirname(target), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    except (OSError, ValueError) as e:
        raise PlanError(f"{where}: can't be written: {_reason(e)}") from e


def _mapped(where: str) -> memoryview:
    try:
        # NONBLOCK: a pipe in the file's place must not make us wait for a writer
        fd = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            about = os.fstat(fd)
            if stat.S_ISDIR(about.st_mode):
                raise PlanError(f"{where}: this is a directory, not a plan")
            if not stat.S_ISREG(about.st_mode):
                raise PlanError(f"{where}: this is not a regular file, so not a plan")
            if about.st_size == 0:
                raise PlanError(f"{where}: the file is empty; compile the model again")
            return memoryview(mmap.mmap(fd, about.st_size, access=mmap.ACCESS_READ))
        finally:
            os.close(fd)
    except (OSError, ValueError) as e:
        raise PlanError(f"{where}: can't be read: {_reason(e)}") from e


def _reason(e: OSError | ValueError) -> str:
    return (e.strerror if isinstance(e, OSError) and e.strerror else str(e)).lower()


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tinyedge")
    except PackageNotFoundError:
        return "of unknown version"


SIGNS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "is a git-lfs pointer, not the plan itself; run git lfs pull"),
    (b"PK\x03\x04", "is a zip archive, not a plan"),
    (b"\x7fELF", "is an ELF file, not a plan"),
    (b"\x1f\x8b", "is compressed by gzip; unpack it"),
    (b"<", "is a web page or XML text, not a plan"),
    (b"\x93NUMPY", "is a numpy array, not a plan"),
    (b"\x80\x05", "is a pickle of another program, not a plan"),
    (b"\x80\x04", "is a pickle of another program, not a plan"),
    (b"\x80\x03", "is a pickle of another program, not a plan"),
    (b"\x80\x02", "is a pickle of another program, not a plan"),
)


def _what_is(start: bytes) -> str:
    """What a file is that is no plan, by its first bytes."""
    if start and MAGIC.startswith(start):
        return f"the plan is cut short at {len(start)} bytes; copy it again"
    for sign, what in SIGNS:
        if start.startswith(sign):
            return f"this {what}"
    # an ONNX file opens with the fields ir_version (a small number) and producer_name
    if len(start) > 3 and start[0] == 0x08 and start[1] < 0x20 and start[2] in (0x12, 0x3A, 0x42):
        return "this looks like an ONNX model, not a plan; compile it first (tinyedge compile)"
    return "this is not a tinyedge plan"


# What the pickle may be made of.

(PROTO, FRAME, STOP, NONE, NEWTRUE, NEWFALSE, MARK, BININT, BININT1, BININT2, LONG1, BINFLOAT,
 SHORT_BINUNICODE, BINUNICODE, SHORT_BINBYTES, BINBYTES, EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3, TUPLE,
 EMPTY_LIST, APPEND, APPENDS, EMPTY_DICT, SETITEM, SETITEMS) = (
    op[0] for op in (
        pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE,
        pickle.MARK, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT,
        pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.SHORT_BINBYTES, pickle.BINBYTES,
        pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE,
        pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM,
        pickle.SETITEMS,
    )
)
_LENGTH = {SHORT_BINUNICODE: 1, BINUNICODE: 4, SHORT_BINBYTES: 1, BINBYTES: 4, LONG1: 1}
_TUPLES = {TUPLE1: 1, TUPLE2: 2, TUPLE3: 3}


class _Fault(Exception):
    """What is wrong with a part of a plan; `at` adds where it is, from the inside out."""

    def __init__(self, what: str) -> None:
        self.what, self.place = what, ""

    @staticmethod
    @contextmanager
    def at(place: str) -> Iterator[None]:
        try:
            yield
        except _Fault as e:
            raise e.inside(place) from None

    def inside(self, place: str) -> _Fault:
        dot = "." if self.place and not self.place.startswith("[") else ""
        self.place = f"{place}{dot}{self.place}"
        return self


@contextmanager
def _naming(whose: str) -> Iterator[None]:
    try:
        yield
    except _Fault as e:
        field = f"'s field {_short(e.place)}" if e.place else ""
        raise PlanError(f"{whose}{field} {_short(e.what)}; compile the model again") from None


def _short(text: str) -> str:
    """Names come from the file and may be of any length."""
    return text if len(text) <= 300 else f"{text[:200]}...{text[-100:]}"


def decode(data: bytes) -> Any:
    """The value of a pickle of builtin types; _Fault for anything that is not just that.

    Takes time and memory in proportion to len(data), whatever it claims.
    """
    stack: list[Any] = []
    marks: list[int] = []
    at = 0
    try:
        for _ in range(MAX_VALUES):
            op = data[at]
            at += 1
            if op in _LENGTH:
                width = _LENGTH[op]
                start = at + width
                at = start + int.from_bytes(data[at:start], "little")
                if at > len(data):
                    raise _Fault("holds a value that is longer than the file")
                part = data[start:at]
                if op == SHORT_BINUNICODE or op == BINUNICODE:
                    stack.append(part.decode())
                elif op == LONG1:
                    stack.append(int.from_bytes(part, "little", signed=True))
                else:
                    stack.append(part)
            elif op == BININT1:
                stack.append(data[at])
                at += 1
            elif op in _TUPLES:
                mark = len(stack) - _TUPLES[op]
                if mark < (marks[-1] if marks else 0):
                    raise IndexError
                stack[mark:] = [tuple(stack[mark:])]
            elif op == BININT2:
                stack.append(data[at] | data[at + 1] << 8)
                at += 2
            elif op == BININT:
                stack.append(_int32(data, at)[0])
                at += 4
            elif op == MARK:
                marks.append(len(stack))
            elif op == TUPLE:
                mark = marks.pop()
                stack[mark:] = [tuple(stack[mark:])]
            elif op == SETITEMS or op == SETITEM:
                mark = marks.pop() if op == SETITEMS else len(stack) - 2
                if mark < 1:
                    raise IndexError
                items, target = stack[mark:], stack[mark - 1]
                keys = items[::2]
                # strings only: ints can be chosen so that they all fall on one place of the table
                if type(target) is not dict or len(items) % 2 or set(map(type, keys)) - {str}:
                    raise _Fault("holds a dict that isn't one of names")
                before = len(target)
                target.update(zip(keys, items[1::2]))
                if len(target) != before + len(keys):
                    raise _Fault("holds a dict with one name twice")
                del stack[mark:]
            elif op == NEWTRUE or op == NEWFALSE:
                stack.append(op == NEWTRUE)
            elif op == EMPTY_TUPLE:
                stack.append(())
            elif op == EMPTY_DICT:
                stack.append({})
            elif op == NONE:
                stack.append(None)
            elif op == BINFLOAT:
                stack.append(_float(data, at)[0])
                at += 8
            elif op == EMPTY_LIST:
                stack.append([])
            elif op == APPENDS or op == APPEND:
                mark = marks.pop() if op == APPENDS else len(stack) - 1
                if mark < 1 or type(stack[mark - 1]) is not list:
                    raise _Fault("appends to what is no list")
                stack[mark - 1].extend(stack[mark:])
                del stack[mark:]
            elif op == PROTO:
                at += 1
            elif op == FRAME:
                at += 8
            elif op == STOP:
                if len(stack) != 1 or marks or at != len(data):
                    raise _Fault("has a pickle that does not end where it should")
                _check_depth(stack[0])
                return stack[0]
            else:
                raise _Fault(f"is not plain data: its pickle holds {_opcode(op)}, which a plan "
                             "never does, so it may be hostile")
    except (IndexError, struct.error, UnicodeDecodeError):
        raise _Fault("has a pickle that can't be read") from None
    raise _Fault(f"has more than {MAX_VALUES} values")


_int32 = struct.Struct("<i").unpack_from
_float = struct.Struct(">d").unpack_from


def _opcode(op: int) -> str:
    import pickletools

    names = {known.code: known.name for known in pickletools.opcodes}
    return f"the opcode {names.get(chr(op), hex(op))}"


def _check_depth(tree: Any) -> None:
    """What walks a plan may do so by recursion."""
    level = [tree]
    for _ in range(MAX_DEPTH):
        level = [y for x in level if type(x) in (dict, tuple, list)
                 for y in (x.values() if type(x) is dict else x) if type(y) in (dict, tuple, list)]
        if not level:
            return
    raise _Fault(f"has values nested more than {MAX_DEPTH} deep")


# The schema: a function for each kind of value, which returns it or raises _Fault.

Take = Callable[[Any], Any]


def _a(kind: type) -> Take:
    def take(x: Any) -> Any:
        if type(x) is not kind:
            raise _Fault(f"is {type(x).__name__}, not {kind.__name__}")
        return x

    return take


def _int(low: int = 0, high: int = INT64_MAX) -> Take:
    def take(x: Any) -> Any:
        if type(x) is not int:
            raise _Fault(f"is {type(x).__name__}, not int")
        if not low <= x <= high:
            raise _Fault(f"is {x}, outside {low}..{high}")
        return x

    return take


def _each(take_item: Take, count: int | None = None) -> Take:
    def take(x: Any) -> Any:
        if type(x) is not tuple:
            raise _Fault(f"is {type(x).__name__}, not tuple")
        if count is not None and len(x) != count:
            raise _Fault(f"has {len(x)} items instead of {count}")
        out: list[Any] = []
        try:
            for item in x:
                out.append(take_item(item))
        except _Fault as e:
            raise e.inside(f"[{len(out)}]") from None
        return tuple(out)

    return take


def _named(take_item: Take) -> Take:
    def take(x: Any) -> Any:
        if type(x) is not dict:
            raise _Fault(f"is {type(x).__name__}, not dict")
        out = {}
        for key, item in x.items():
            try:
                out[_text(key)] = take_item(item)
            except _Fault as e:
                raise e.inside(f"[{key!r}]") from None
        return out

    return take


def _record(make: Callable[..., Any], **takes: Take) -> Take:
    def take(x: Any) -> Any:
        if type(x) is not dict:
            raise _Fault(f"is {type(x).__name__}, not dict")
        if x.keys() != takes.keys():
            names = ", ".join(map(repr, takes.keys() - x.keys()))
            raise _Fault(f"lacks {names}" if names else f"has more than {', '.join(takes)}")
        out = {}
        name = ""
        try:
            for name, take_field in takes.items():
                out[name] = take_field(x[name])
        except _Fault as e:
            raise e.inside(name) from None
        return make(**out)

    return take


def _shape(take_dim: Take) -> Take:
    take_dims = _each(take_dim)

    def take(x: Any) -> Any:
        if type(x) is tuple and len(x) > MAX_RANK:
            raise _Fault(f"has {len(x)} dimensions, more than {MAX_RANK}")
        return take_dims(x)

    return take


def _size(x: Any) -> Size:
    if type(x) is int:
        if abs(x) > INT64_MAX:
            raise _Fault(TOO_LARGE)
        return x
    if type(x) is tuple:
        if len(x) == 2 and x[0] == "sym" and type(x[1]) is str:
            return x
        if len(x) == 3 and type(x[0]) is str and x[0] in OPERATIONS:
            return x[0], _size(x[1]), _size(x[2])
    raise _Fault("is not a size (an int or an expression of symbols)")


def _ref(x: Any) -> Ref:
    if type(x) is not tuple or len(x) != 3:
        raise _Fault("is not a place in memory (arena, offset, size)")
    return Ref(_arena(x[0]), _offset(x[1]), _size(x[2]))


def _step(x: Any) -> Step:
    kind = x.get("type") if type(x) is dict else None
    if type(kind) is not str or kind not in _STEPS:
        raise _Fault(f"is not a step: its type is none of {', '.join(_STEPS)}")
    step: Step = _STEPS[kind]({k: v for k, v in x.items() if k != "type"})
    return step


def _dtype(x: Any) -> Any:
    if type(x) is not str or x not in DTYPES:
        raise _Fault(f"is {x!r}, which is no element type")
    return x


def _anything(x: Any) -> Any:
    """Builtin data; copied where it could be changed."""
    if type(x) is dict:
        return _named(_anything)(x)
    if type(x) is tuple:
        return _each(_anything)(x)
    if type(x) is list:
        return list(_each(_anything)(tuple(x)))
    if x is None or type(x) in (bool, int, float, str, bytes):
        return x
    raise _Fault(f"is {type(x).__name__}, which is no builtin type")


_text, _bool, _offset, _arena = _a(str), _a(bool), _int(), _int(0, 1 << 16)
_names, _refs = _each(_text), _each(_ref)
_BUFFER = _each(_offset, 2)
_PORT = _record(Port, name=_text, shape=_shape(_size), dtype=_dtype)
_STATE = _record(State, name=_text, output=_text, shape=_shape(_offset), dtype=_dtype, ref=_ref)
_KERNEL = _record(Kernel, name=_text, entry=_offset, flops=_offset, bytes=_offset, source=_text,
                  loops=_text, resources=_named(_int(-INT64_MAX)), writes=_each(_offset))
_BODY = _each(_step)
_STEPS: dict[str, Take] = {
    "Launch": _record(Launch, kernel=_offset, buffers=_refs, scalars=_names, grid=_size,
                      sync=_bool, nodes=_names),
    "Copy": _record(Copy, source=_ref, target=_ref, sync=_bool, nodes=_names),
    "If": _record(If, cond=_ref, then=_BODY, other=_BODY, nodes=_names),
    "Loop": _record(Loop, symbol=_text, trips=_ref, cond=_ref, body=_BODY, nodes=_names),
}
_PLAN: dict[str, Take] = {
    "target": _text, "inputs": _each(_PORT), "outputs": _each(_PORT), "states": _each(_STATE),
    "symbols": _named(_each(_int(0, 1 << 48), 2)), "arenas": _each(_int(0, 1 << 48), 3),
    "kernels": _each(_KERNEL), "steps": _BODY, "entries": _named(_offset),
    "metadata": _named(_text), "provenance": _named(_anything), "name": _text,
}


def _plan(tree: Any, code: bytes | memoryview, constants: bytes | memoryview) -> Plan:
    """The plan of a dict as `to_builtin` makes it; _Fault."""
    plan: Plan = _record(lambda **k: Plan(**k, code=code, constants=constants), **_PLAN)(tree)
    return plan


def check(plan: Plan, whose: str = "the plan") -> None:
    """PlanError unless everything that a plan's parts say of each other is true.

    References lie in their arenas, kernels and entries exist, symbols are known, names are
    unique, and memory that is read-only is not written. A buffer whose size is symbolic is
    checked with every symbol at its highest value. whose: how the message begins.
    """
    with _naming(whose):
        _check(plan)


def _check(plan: Plan) -> None:
    for i, v in enumerate(plan.variants):
        with _Fault.at(f"variants[{i}]"):
            if v.variants:
                raise _Fault("has variants of its own")
            for name in ("inputs", "outputs", "symbols"):
                if getattr(v, name) != getattr(plan, name):
                    raise _Fault("differs from the plan's").inside(name)
            if [(s.name, s.output, s.shape, s.dtype) for s in v.states] != [
                    (s.name, s.output, s.shape, s.dtype) for s in plan.states]:
                raise _Fault("differ from the plan's").inside("states")
            _check(v)
    if not plan.target.partition(":")[0].isidentifier():
        raise _Fault("is not a target such as cpu:x86-64").inside("target")
    with _Fault.at("symbols"):
        for name, (low, high) in plan.symbols.items():
            if low > high:
                raise _Fault(f"has no value for {name}: {low}..{high}")
    if len(plan.constants) != plan.arenas[CONSTANTS]:
        raise _Fault(f"has {len(plan.constants)} bytes instead of {plan.arenas[CONSTANTS]}"
                    ).inside("constants")
    highest = {name: high for name, (_, high) in plan.symbols.items()}
    for field, names in (
        ("inputs", [*(p.name for p in plan.inputs), *(s.name for s in plan.states)]),
        ("outputs", [p.name for p in plan.outputs]),
        ("kernels", [k.name for k in plan.kernels]),
    ):
        if len(set(names)) != len(names):
            twice = next(n for i, n in enumerate(names) if n in names[:i])
            raise _Fault(f"has the name {twice!r} twice").inside(field)
    for field, entries in (("entries", plan.entries.items()),
                           ("kernels", ((k.name, k.entry) for k in plan.kernels))):
        for name, entry in entries:
            # a target without machine code has nothing to enter; entries of wasm are addresses
            if entry >= max(len(plan.code), 1) and not plan.target.startswith("wasm"):
                raise _Fault(f"enters {name} at {entry}, behind the code's end").inside(field)
    sizes = list(plan.arenas)
    for field, ports in (("inputs", plan.inputs), ("outputs", plan.outputs)):
        for port in ports:
            with _Fault.at(f"{field}[{port.name!r}].shape"):
                shape = [_highest(d, highest) for d in port.shape]
                if min(shape, default=0) < 0:
                    raise _Fault("has a negative dimension")
                sizes.append(math.prod(shape) * DTYPES[port.dtype].itemsize)
                if sizes[-1] > INT64_MAX:
                    raise _Fault(TOO_LARGE)
    for state in plan.states:
        place = f"states[{state.name!r}].ref"
        if state.ref.arena != STATES:
            raise _Fault("is not in the arena of states").inside(place)
        if state.ref.size != math.prod(state.shape) * DTYPES[state.dtype].itemsize:
            raise _Fault("has another size than the shape").inside(place)
        _check_ref(place, state.ref, sizes, highest, aligned=True)
    with _Fault.at("steps"):
        _check_steps(plan, plan.steps, sizes, highest, set())


def _check_steps(plan: Plan, steps: tuple[Step, ...], sizes: list[int],
                 highest: Mapping[str, int], counters: set[str]) -> None:
    for i, step in enumerate(steps):
        try:
            if isinstance(step, Launch):
                _check_launch(plan, step, sizes, highest, counters)
            elif isinstance(step, Copy):
                source = _check_ref("source", step.source, sizes, highest)
                target = _check_ref("target", step.target, sizes, highest)
                if source != target:
                    raise _Fault(f"copies {source} bytes to {target}")
                if not _writable(plan, step.target.arena):
                    raise _Fault(f"writes to arena {step.target.arena}, which is read-only")
            else:
                if _check_ref("cond", step.cond, sizes, highest) != 1:
                    raise _Fault("is not one byte").inside("cond")
                if isinstance(step, If):
                    bodies = {"then": step.then, "other": step.other}
                    inner = counters
                else:
                    if _check_ref("trips", step.trips, sizes, highest) != 8:
                        raise _Fault("is not one int64").inside("trips")
                    if step.symbol in plan.symbols or step.symbol in counters:
                        raise _Fault(f"is {step.symbol}, which has a meaning here").inside("symbol")
                    bodies = {"body": step.body}
                    inner = counters | {step.symbol}
                for name, body in bodies.items():
                    with _Fault.at(name):
                        _check_steps(plan, body, sizes, highest, inner)
        except _Fault as e:
            raise e.inside(f"[{i}]") from None


def _writable(plan: Plan, arena: int) -> bool:
    return arena in (SCRATCH, STATES) or arena >= FIRST_EXTERNAL + len(plan.inputs)


def _check_launch(plan: Plan, step: Launch, sizes: list[int], highest: Mapping[str, int],
                  counters: set[str]) -> None:
    if step.kernel >= len(plan.kernels):
        raise _Fault(f"is {step.kernel} of {len(plan.kernels)}").inside("kernel")
    if len(step.buffers) > MAX_BUFFERS:
        raise _Fault(f"has {len(step.buffers)} items, more than {MAX_BUFFERS}").inside("buffers")
    for i, ref in enumerate(step.buffers):
        _check_ref(f"buffers[{i}]", ref, sizes, highest, aligned=True)
    for i in plan.kernels[step.kernel].writes:
        if i >= len(step.buffers):
            raise _Fault(f"has {len(step.buffers)} items, and its kernel writes to number {i}"
                         ).inside("buffers")
        if not _writable(plan, step.buffers[i].arena):
            raise _Fault(f"is in arena {step.buffers[i].arena}, which is read-only, and its kernel "
                         "writes to it").inside(f"buffers[{i}]")
    known = highest.keys() | counters
    if unknown := set(step.scalars) - known:
        raise _Fault(f"names the unknown symbol {min(unknown)}").inside("scalars")
    if unknown := symbols_of(step.grid) - known:
        raise _Fault(f"names the unknown symbol {min(unknown)}").inside("grid")


def _check_ref(place: str, ref: Ref, sizes: list[int], highest: Mapping[str, int],
               aligned: bool = False) -> int:
    """The size in bytes, at most."""
    try:
        if ref.arena >= len(sizes):
            raise _Fault(f"names arena {ref.arena} of {len(sizes)}")
        size = _highest(ref.size, highest)
        if size < 0 or ref.offset + size > sizes[ref.arena]:
            raise _Fault(f"covers bytes {ref.offset}..{ref.offset + size} of arena {ref.arena}, "
                         f"which has {sizes[ref.arena]}")
        if aligned and ref.offset % ALIGNMENT and ref.arena < FIRST_EXTERNAL:
            raise _Fault(f"starts at {ref.offset}, which {ALIGNMENT} does not divide")
        return size
    except _Fault as e:
        raise e.inside(place) from None


def _highest(size: Size, highest: Mapping[str, int]) -> int:
    if isinstance(size, int):
        return size
    try:
        value = evaluate(size, highest)
        if abs(value) > INT64_MAX:
            raise _Fault(TOO_LARGE)
        return value
    except KeyError as e:
        raise _Fault(f"names the unknown symbol {e.args[0]}") from None
    except ZeroDivisionError:
        raise _Fault(f"divides by zero: {show_size(size)}") from None
