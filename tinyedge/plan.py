"""Plan: what compilation produces and every driver and exporter reads.

A static list of steps over pre-planned memory, with the machine code inside. Everything here turns
into builtin types by `to_builtin`, which is what a plan file holds (`tinyedge.planfile`).

Arenas are numbered. 0 constants (read-only, its bytes are in the plan), 1 scratch (all
intermediates, packed by lifetime), 2 states (persists between runs, zero at first), then one arena
for each input and one for each output, in the plan's order: memory that the caller provides for
every run. A `Ref` is a byte range of an arena.

A symbol is a 64-bit integer known when a run starts (a named dimension) or counted by a `Loop`.
Shapes, byte sizes and grids may be expressions of symbols, written as nested tuples:
``int | ("sym", name) | ("add"|"mul"|"floordiv"|"mod"|"min"|"max", e, e)``. Offsets are ints: every
buffer has room for the largest value that its symbols can take.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from .errors import ShapeError

FORMAT = 1
CONSTANTS, SCRATCH, STATES, FIRST_EXTERNAL = 0, 1, 2, 3
ALIGNMENT = 64
"""Bytes; of every arena but the external ones, and of every Ref inside them: a cache line."""

MAX_BUFFERS = 32
"""Most buffers that one kernel takes; the CPU executor keeps their addresses on its stack."""

Size = int | tuple[Any, ...]
"""An int, or an expression of symbols (see the module's page)."""


@dataclass(frozen=True)
class Ref:
    """Bytes [offset, offset + size) of an arena."""

    arena: int
    offset: int
    size: Size


@dataclass(frozen=True)
class Port:
    """An input or output: C-order memory of this shape and element type (numpy's name)."""

    name: str
    shape: tuple[Size, ...]
    dtype: str


@dataclass(frozen=True)
class State:
    """A buffer that persists between runs, tied output -> input; neither is asked of the caller."""

    name: str
    output: str
    shape: tuple[int, ...]
    dtype: str
    ref: Ref


@dataclass(frozen=True)
class Kernel:
    """Machine code for one kernel.

    entry: byte offset in the plan's code. On the CPU it is a C function ``void (void **buffers,
    const int64_t *scalars, int64_t begin, int64_t end)`` that evaluates pieces begin..end of the
    launch's grid. source: text in the target's language. loops: text of the loop IR. resources:
    what a target has to report (workgroup size, registers, local memory). writes: numbers of the
    buffers that it writes, and may read; it reads the others. flops, bytes: of one
    launch with the symbols at their upper bounds.
    """

    name: str
    entry: int
    flops: int = 0
    bytes: int = 0
    source: str = ""
    loops: str = ""
    resources: dict[str, int] = field(default_factory=dict)
    writes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Launch:
    """Runs a kernel over grid pieces 0..grid; scalars are names of symbols.

    sync: an earlier step writes what this one uses, or uses what it writes, so it must wait for
    all threads; False lets it overlap with what stands before it. nodes: names of the model's
    nodes that it computes.
    """

    kernel: int
    buffers: tuple[Ref, ...]
    scalars: tuple[str, ...]
    grid: Size
    sync: bool = True
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Copy:
    """Copies source's bytes to target as if through a temporary: the ranges may overlap."""

    source: Ref
    target: Ref
    sync: bool = True
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class If:
    """Runs one of two lists of steps, by the byte at `cond`."""

    cond: Ref
    then: tuple[Step, ...]
    other: tuple[Step, ...]
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loop:
    """Runs body with `symbol` = 0, 1, ... while symbol < the int64 at `trips` and, before every
    turn, the byte at `cond` is not 0."""

    symbol: str
    trips: Ref
    cond: Ref
    body: tuple[Step, ...]
    nodes: tuple[str, ...] = ()


Step = Launch | Copy | If | Loop


def flat(steps: Iterable[Step]) -> Iterator[Step]:
    """Every step, depth first: an If before its `then` and its `other`, a Loop before its body."""
    for s in steps:
        yield s
        if isinstance(s, If):
            yield from flat(s.then)
            yield from flat(s.other)
        elif isinstance(s, Loop):
            yield from flat(s.body)


@dataclass
class Plan:
    """See the module's page.

    target: "cpu:ARCH,FEATURE,..." with everything that the code needs. code: a flat,
    position-independent image (page-aligned parts: code first, then read-only data), entries
    inside. arenas: sizes in bytes of constants, scratch, states. constants: their bytes.
    symbols: name -> (lowest, highest) of named dimensions. metadata: the model's own key-value
    pairs. provenance: model hash, options, times. variants: the same model for other targets, best
    first after this plan; who loads it takes the first that the machine can run.
    """

    target: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    states: tuple[State, ...]
    symbols: dict[str, tuple[int, int]]
    arenas: tuple[int, int, int]
    kernels: tuple[Kernel, ...]
    steps: tuple[Step, ...]
    code: bytes | memoryview
    constants: bytes | memoryview
    entries: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    format: int = FORMAT
    producer: str = ""
    variants: tuple[Plan, ...] = ()

    def __repr__(self) -> str:
        targets = ", ".join(p.target for p in (self, *self.variants))
        return (f"<Plan {self.name or 'model'} for {targets}: {len(self.steps)} steps, "
                f"{len(self.kernels)} kernels>")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a plan file, whole or not at all; PlanError."""
        from .planfile import save

        save(self, path)


def to_builtin(x: Any) -> Any:
    """A plan's parts as builtin types.

    Records become dicts of their fields, steps with a "type" entry in front; a Ref becomes a tuple
    (arena, offset, size). A Plan's code, constants and variants are left out, and so are its format
    and producer: a plan file keeps those apart from the rest.
    """
    if isinstance(x, Ref):
        return (x.arena, x.offset, x.size)
    if isinstance(x, Launch | Copy | If | Loop):
        return {"type": type(x).__name__, **_fields(x)}
    if isinstance(x, Port | State | Kernel):
        return _fields(x)
    if isinstance(x, Plan):
        fields = _fields(x)
        for name in ("code", "constants", "format", "producer", "variants"):
            del fields[name]
        return fields
    if isinstance(x, tuple):
        return tuple(to_builtin(i) for i in x)
    return x


def _fields(x: Any) -> dict[str, Any]:
    return {name: to_builtin(getattr(x, name)) for name in x.__dataclass_fields__}


def evaluate(size: Size, symbols: Mapping[str, int]) -> int:
    """The number that a size stands for; KeyError names a symbol without a value."""
    if isinstance(size, int):
        return size
    if size[0] == "sym":
        return symbols[size[1]]
    _, a, b = size
    return OPERATIONS[size[0]](evaluate(a, symbols), evaluate(b, symbols))


def symbols_of(size: Size) -> set[str]:
    """Names of the symbols that a size depends on."""
    if isinstance(size, int):
        return set()
    return {size[1]} if size[0] == "sym" else symbols_of(size[1]) | symbols_of(size[2])


def show_size(size: Size) -> str:
    """One-line text of a size: ``2*n + 1``."""
    if isinstance(size, int):
        return str(size)
    if size[0] == "sym":
        return str(size[1])
    op, a, b = size[0], show_size(size[1]), show_size(size[2])
    if op in ("min", "max"):
        return f"{op}({a}, {b})"
    if op == "add":
        return f"{a} + {b}"
    a, b = (f"({t})" if isinstance(e, tuple) and e[0] not in ("sym", "min", "max") else t
            for t, e in ((a, size[1]), (b, size[2])))
    return f"{a}{ {'mul': '*', 'floordiv': ' // ', 'mod': ' % '}[op] }{b}"


def show_shape(shape: Iterable[Size]) -> str:
    """``[1,3,n,2*n + 1]``"""
    return "[" + ",".join(map(show_size, shape)) + "]"


def size_of_expr(e: Any) -> Size:
    """The size that an index expression of the loop IR (or an int) stands for.

    Told by the expression's `op`, so that a run time needs no compiler. ShapeError if it depends
    on more than symbols, such as data.
    """
    if isinstance(e, int):
        return e
    if e.op == "const":
        return int(e.attr)
    if e.op == "var":
        return ("sym", e.attr[0])
    if e.op == "affine":
        constant, factors = e.attr
        terms = [size_of_expr(a) if k == 1 else ("mul", k, size_of_expr(a))
                 for k, a in zip(factors, e.args)]
        if constant:
            terms.append(constant)
        return reduce(lambda a, b: ("add", a, b), terms)
    if e.op in OPERATIONS and len(e.args) == 2:
        return (e.op, size_of_expr(e.args[0]), size_of_expr(e.args[1]))
    raise ShapeError(f"size {e} depends on more than named dimensions; bind them by --dim")


OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "mul": operator.mul, "floordiv": operator.floordiv, "mod": operator.mod,
    "min": min, "max": max,
}
"""What a size is made of: name -> the operation on ints."""

__all__ = [
    "ALIGNMENT", "CONSTANTS", "FIRST_EXTERNAL", "FORMAT", "MAX_BUFFERS", "OPERATIONS", "SCRATCH",
    "STATES", "Copy", "If", "Kernel", "Launch", "Loop", "Plan", "Port", "Ref", "Size", "State",
    "Step", "evaluate", "flat", "show_shape", "show_size", "size_of_expr", "symbols_of",
    "to_builtin",
]
