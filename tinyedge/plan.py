"""Plan: what compilation produces and every driver and exporter reads.

A static list of steps over pre-planned memory, with the machine code inside. Everything here turns
into builtin types by `to_dict`, which is what a plan file holds (`tinyedge.planfile`).

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

from dataclasses import asdict, dataclass, field
from typing import Any

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
    what a target has to report (workgroup size, registers, local memory). flops, bytes: of one
    launch with the symbols at their upper bounds.
    """

    name: str
    entry: int
    flops: int = 0
    bytes: int = 0
    source: str = ""
    loops: str = ""
    resources: dict[str, int] = field(default_factory=dict)


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


@dataclass
class Plan:
    """See the module's page.

    target: "cpu:ARCH,FEATURE,..." with everything that the code needs. code: a flat,
    position-independent image (page-aligned parts: code first, then read-only data), entries
    inside. arenas: sizes in bytes of constants, scratch, states. constants: their bytes.
    symbols: name -> (lowest, highest) of named dimensions. metadata: the model's own key-value
    pairs. provenance: model hash, options, times.
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


def to_builtin(x: Any) -> Any:
    """Steps, refs and ports as dicts with a "type" entry where it is not known from the place."""
    if isinstance(x, Launch | Copy | If | Loop):
        names = x.__dataclass_fields__
        return {"type": type(x).__name__, **{k: to_builtin(getattr(x, k)) for k in names}}
    if isinstance(x, Ref):
        return (x.arena, x.offset, x.size)
    if isinstance(x, Port | State | Kernel):
        return {k: to_builtin(getattr(x, k)) for k in x.__dataclass_fields__}
    if isinstance(x, tuple):
        return tuple(to_builtin(i) for i in x)
    return x


__all__ = [
    "ALIGNMENT", "CONSTANTS", "FIRST_EXTERNAL", "FORMAT", "MAX_BUFFERS", "SCRATCH", "STATES",
    "Copy", "If", "Kernel", "Launch", "Loop", "Plan", "Port", "Ref", "Size", "State", "Step",
    "asdict", "to_builtin",
]
