"""From a graph to a plan: the driver of the pipeline, for CPU targets.

passes -> kernel formation -> loop IR -> schedule -> LLVM -> object code -> one image -> Plan.
Kernels with the same code are one kernel; object code is cached by the content of its text.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b, sha256
from importlib import import_module
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import graph as g
from .codegen import ir, symbolic
from .codegen.ir import Expr, For, Kernel, Set, Stmt, Store, const, load, var
from .codegen.lower import Index, Layout, Lower, combine, plain, reindex
from .codegen.schedule import cpu as cpu_schedule
from .codegen.schedule import gpu as gpu_schedule
from .codegen.schedule.chain import chain, renumbered
from .codegen.schedule.search import Tuner
from .codegen.schedule.winograd import Transform
from .codegen.symbolic import TRUE, both, ge0
from .dtype import BFLOAT16, FLOAT16, INT8, UINT8
from .errors import InputError, UnsupportedError
from .graph import Graph, Node, Valid
from .memory import Access, Hazards, Timeline, pack
from .plan import (
    ALIGNMENT,
    CONSTANTS,
    FIRST_EXTERNAL,
    MAX_BUFFERS,
    SCRATCH,
    STATES,
    Copy,
    If,
    Launch,
    Loop,
    Plan,
    Port,
    Ref,
    State,
    Step,
    size_of_expr,
)
from .plan import Kernel as PlanKernel
from .schedule import (
    Buffer,
    ChainItem,
    CopyItem,
    FillItem,
    IfItem,
    Item,
    KernelItem,
    LoopItem,
    Program,
    ScatterItem,
    SymbolBuffer,
    contract_lane,
    form,
)
from .shape import upper
from .storage import filters, record

if TYPE_CHECKING:
    from onnx import ModelProto

    from .codegen.llvm_target import CpuTarget

Progress = Callable[[str, int, int], None]
"""progress(stage, done, of)"""


@dataclass(frozen=True)
class Code:
    """What the plan needs to know of a kernel: everything that the cache keeps of it.

    text: LLVM IR of a function named k. loops: text of the loop IR. grid: pieces, as a `Size`.
    inplace: numbers of buffers that are read only where the result is written. weights: of each
    item that it computes, the layout chosen for constant weights: (order, room, block, quad) or ().
    writes: numbers of buffers that it writes. buffers: how many it is given. shares: on a
    GPU, the buffers that it writes or that may be parts of one object with those.
    """

    text: str
    loops: str
    grid: Any
    symbols: tuple[str, ...]
    lanes: int
    inplace: tuple[int, ...]
    weights: tuple[Any, ...] = ()
    writes: tuple[int, ...] = ()
    buffers: int = 0
    shares: tuple[int, ...] = ()

    def to_json(self) -> str:
        return json.dumps([self.text, self.loops, self.grid, self.symbols, self.lanes,
                           self.inplace, self.weights, self.writes, self.buffers,
                           self.shares])

    @staticmethod
    def from_json(text: str) -> Code:
        return Code(*_tuples(json.loads(text)))


NOTHING = Code("", "", 0, (), 1, ())
"""Stands in the cache for items that are no chain."""


def _tuples(x: Any) -> Any:
    return tuple(_tuples(i) for i in x) if isinstance(x, list) else x


@dataclass
class Built:
    """A kernel with its arguments; or, without code, a plain copy of bytes.

    move: (first byte in buffers[1], first byte in buffers[0], bytes) of a copy.
    """

    code: Code | None
    buffers: list[Buffer]
    nodes: tuple[str, ...] = ()
    flops: int = 0
    bytes: int = 0
    move: tuple[int, int, int] = (0, 0, 0)


@dataclass
class _Arguments:
    """The buffers of a kernel under construction, numbered in order of first use.

    Parts of one buffer are numbered apart: a kernel that reads one part and writes another then
    knows that they are different memory. whole: they are numbered as one, since no place may be
    bound twice where it is written.
    """

    buffers: list[Buffer] = field(default_factory=list)
    whole: bool = False

    def number(self, b: Buffer) -> int:
        if self.whole:
            for i, x in enumerate(self.buffers):
                if x.root is b.root:
                    return i
        if b not in self.buffers:
            self.buffers.append(b)
        return self.buffers.index(b)


class _Packs:
    """Constants laid out for particular kernels; equal requests share one buffer."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.made: dict[tuple[Node, Layout], Buffer] = {}

    def get(self, n: Node, layout: Layout) -> Buffer:
        key = (n, layout)
        if key not in self.made:
            b = Buffer(n.source or "weights", n.dtype, layout, "const", array=n.value)
            self.program.buffers.append(b)
            self.made[key] = b
        return self.made[key]


class _Work:
    """One item on its way to a kernel: its buffers, and how its expressions are made.

    weights: a contraction's constant operand, whose memory the schedule lays out.
    """

    def __init__(self, item: KernelItem, target: CpuTarget, packs: _Packs) -> None:
        self.item, self.target, self.packs = item, target, packs
        self.args = _Arguments(whole=target.gpu is not None)
        self.args.number(item.target)
        self.weights: Node | None = None
        h = item.heavy
        if h is not None and h.op == "contract" and h.inputs[1].op == "const" and \
                h.inputs[1].value.size > 1 and h.inputs[0].op != "const":
            self.weights = h.inputs[1]
            self.args.buffers.append(
                Buffer("weights", self.weights.dtype, plain(self.weights.shape), "const"))
        self.lower = Lower(self.read, self.layout, h, target.gpu is None)
        self.transform = item.node.op == "winograd_in" or \
            h is not None and h.op == "winograd_out"

    def read(self, n: Node, index: Index, guard: Expr) -> Expr | None:
        if n is self.weights:
            w = self.args.buffers[1]
            return load(1, w.layout.offset(index), n.dtype, _optional(
                both(guard, w.layout.guard(index))))
        b = self.item.where.get(n)
        if b is None or b is self.item.target and n is self.item.node:
            return None
        if isinstance(b, SymbolBuffer):
            return b.value
        g_ = both(guard, b.layout.guard(index))
        return load(self.args.number(b), b.layout.offset(index), n.dtype, _optional(g_))

    def layout(self, n: Node) -> Layout | None:
        item = self.item
        b = item.where.get(n)
        return b.layout if b is not None and not (b is item.target and n is item.node) else None

    def store(self, index: Index) -> tuple[Expr, Expr]:
        item = self.item
        shape = item.node.shape
        inside: Expr = TRUE
        if item.views:
            # what overhangs a dimension would come back as the next row's after a reshape
            for i, d in zip(index, shape):
                inside = both(inside, ge0(symbolic.lift(d) - 1 - i))
        for v in item.views:
            if v.op == "reshape":
                index = reindex(shape, v.shape, index)
            else:
                index = tuple(index[o] for o in v["order"])
            shape = v.shape
        lay = item.target.layout
        return lay.offset(index), both(inside, lay.guard(index, write=True))

    def copy(self) -> Built | None:
        """The item as a copy, if that is all it does."""
        if self.item.heavy is not None or self.transform or self.target.gpu is not None:
            return None  # WebGPU copies only between different objects
        copy = as_copy(self.item, self.lower, self.store, self.args)
        if copy is None:
            del self.args.buffers[1:]
        return copy

    def scheduled(self, choice: cpu_schedule.Choice | None = None, feature: int | None = None
                  ) -> cpu_schedule.Scheduler | Transform:
        if self.transform:
            return Transform(self.lower, self.item.node, self.store, self.target.vector_bytes)
        spec = cpu_schedule.Spec(
            self.lower, self.item.node, self.item.node.shape, _loop_order(self.item), self.store,
            self.pack if self.weights is not None else None)
        if self.target.gpu is not None:
            return gpu_schedule.Scheduler(spec, self.target)
        return cpu_schedule.Scheduler(spec, self.target, choice, feature)

    def pack(self, layout: Layout) -> None:
        assert self.weights is not None
        self.args.buffers[1] = self.packs.get(self.weights, layout)

    def packed(self) -> tuple[Any, ...]:
        """The layout of the weights as the cache keeps it; () without."""
        if self.weights is None:
            return ()
        lay = self.args.buffers[1].layout
        return lay.order, lay.room, lay.block, lay.quad

    def unpack(self, packed: tuple[Any, ...]) -> None:
        """Lays the weights out as `packed` has said."""
        if self.weights is not None and packed:
            order, room, block, quad = packed
            self.pack(Layout(self.weights.shape, order, ((0, 0),) * self.weights.rank, room,
                             block, quad=quad))

    def key(self, scheduler: cpu_schedule.Scheduler | Transform) -> str:
        """Text that determines the kernel's code.

        The room round each tensor decides what an overhanging vector may touch.
        """
        rooms = [(b.layout.shape, b.layout.halo, b.layout.room, b.layout.origin)
                 for b in self.args.buffers]
        views = [(v.op, v.shape, v.attrs) for v in self.item.views]
        kinds = [b.root.kind for b in self.args.buffers] if self.target.gpu is not None else ""
        return f"{self.target} {rooms} {views} {kinds}\n{scheduler.key()}"


def build_kernel(
    item: KernelItem, target: CpuTarget, packs: _Packs, memory: _Memory,
) -> Built | None:
    """One item's kernel; None where there is nothing to compute."""
    if any(d == 0 for d in item.node.shape if isinstance(d, int)):
        return None
    work = _Work(item, target, packs)
    if (copy := work.copy()) is not None:
        return copy
    buffers = work.args.buffers
    scheduler = work.scheduled()

    def make(choice: cpu_schedule.Choice | None = None) -> Code:
        code = describe((scheduler if choice is None else work.scheduled(choice)).kernel(), buffers,
                        target)
        return replace(code, weights=(work.packed(),))

    def tuned(tuner: Tuner) -> Code | None:
        other = work.scheduled()
        choices = other.choices() if isinstance(other, cpu_schedule.Scheduler) else []
        return tuner.best(choices, estimate(item, buffers)[0], make,
                          lambda: [b.nbytes.hi for b in buffers]) if choices else None

    code = memory.code(work.key(scheduler), make, tuned)
    work.unpack(code.weights[0])
    return Built(code, buffers, item.nodes, *estimate(item, buffers))


class _Link:
    """An item that may be done piece by piece with others, and what that depends on.

    kind: "rows" (elementwise, or folds along one dimension), "product" (both operands computed),
    "depthwise" or "dense" (constant weights); "": it may not. feature: the dimension whose places
    stay together; None: any.
    """

    def __init__(self, item: KernelItem, reads: set[Buffer]) -> None:
        h, n = item.heavy, item.node
        self.item, self.reads = item, reads
        self.kind = ""
        self.feature: int | None = None
        self.weights = 0
        if item.shift is not None or not all(isinstance(d, int) and d for d in n.shape) or \
                n.op in ("winograd_in", "scatter"):
            return
        if h is None:
            self.kind = "rows"
        elif h.op == "reduce" and len(h["axes"]) == 1 and h.rank == n.rank:
            self.kind, self.feature = "rows", h["axes"][0]
        elif h.op == "contract" and (lane := contract_lane(h)) is not None:
            self.feature = lane
            both_use = all(any(i == lane for _, terms in forms for i, _ in terms)
                           for forms in h["maps"])
            self.kind = "product" if h.inputs[1].op != "const" else \
                "depthwise" if both_use else "dense"
            self.weights = h.inputs[1].value.nbytes if h.inputs[1].op == "const" else 0

    def follows(self, run: Sequence[_Link]) -> bool:
        """Whether it is worth trying to do this one with those before it."""
        if not self.kind or self.kind == "depthwise" or \
                self.item.node.rank != run[0].item.node.rank or \
                self.reads.isdisjoint(x.item.target for x in run) or \
                len({x.feature for x in (*run, self)} - {None}) > 1:
            return False
        if self.kind != "dense":
            return run[0].kind in ("rows", "product")
        # weights are read anew for every piece: few, and for the sake of much
        return all(x.weights <= CHAINED_WEIGHTS for x in (*run, self)) and any(
            x.item.target in self.reads and x.item.target.nbytes.hi >= CHAINED_BYTES for x in run)


def reading(item: Item) -> set[Buffer]:
    """The buffers that an item reads, those inside of control flow too."""
    if isinstance(item, CopyItem):
        return {item.source}
    if isinstance(item, FillItem):
        return {item.target}
    if isinstance(item, IfItem | LoopItem):
        parts = [*item.then, *item.other] if isinstance(item, IfItem) else item.body
        more = {item.cond} if isinstance(item, IfItem) else {item.cond, item.trips}
        return more.union(*map(reading, parts))
    if isinstance(item, ChainItem):
        return set().union(*map(reading, item.items))
    out: set[Buffer] = set()
    seen: set[Node] = set()
    stack = list(item.node.inputs) if item.where.get(item.node) is item.target else [item.node]
    while stack:
        n = stack.pop()
        if n not in seen:
            seen.add(n)
            if (found := item.where.get(n)) is not None:
                out.add(found)
            else:
                stack.extend(n.inputs)
    return out


CHAINED_WEIGHTS, CHAINED_BYTES = 1 << 17, 1 << 20
"""Most bytes of weights, and least of what lies between, for which convolutions are done piece by
piece: the second-level cache holds the first and not the second."""
LEAST_PIECES, LITTLE = 8, 200_000
"""Pieces that a chain has at least, unless all its operations and bytes are that few."""
PASSED = 4
"""Items between two links of a chain that may be done before it."""


def build_chain(
    links: Sequence[_Link], dead: set[Buffer], target: CpuTarget, packs: _Packs, memory: _Memory,
) -> Built | None:
    """The items as one kernel; None where that can't be. dead: buffers that no other item reads."""
    feature = next((x.feature for x in links if x.feature is not None), None)
    works = [_Work(x.item, target, packs) for x in links]
    if feature is None or any(w.copy() is not None for w in works):
        return None
    schedulers = [w.scheduled(feature=feature) for w in works]
    union: list[Buffer] = []
    for w in works:
        union += [b for b in w.args.buffers if b not in union]
    # the result first, as in other kernels, and last what may be a piece's own
    union.sort(key=lambda b: (b is not works[-1].args.buffers[0], b in dead))
    numbers = [{i: union.index(b) for i, b in enumerate(w.args.buffers)} for w in works]
    written = [w.args.buffers[0] for w in works]
    shared = [b for k, b in enumerate(written) if any(b in w.args.buffers for w in works[k + 1:])]
    if any(a is not b and a.root is b.root for a in written for b in union):
        return None
    flops = sum(estimate(x.item, [])[0] for x in links)
    moved = sum(b.nbytes.hi for b in union if b not in shared)

    def make() -> Code:
        nests = []
        for s, n in zip(schedulers, numbers):
            assert isinstance(s, cpu_schedule.Scheduler)
            nests.append(renumbered(s.nest(), n))
        k = chain(nests, [union.index(b) for b in shared],
                  {i: b.dtype.itemsize for i, b in enumerate(union) if b in dead})
        if k is None or k.grid.hi < LEAST_PIECES and flops + moved > LITTLE:
            return NOTHING
        for w, n in zip(works, numbers):  # weights have been laid out
            for i, b in enumerate(w.args.buffers):
                union[n[i]] = b
        return replace(describe(k, union, target), inplace=(),
                       weights=tuple(w.packed() for w in works))


    keys = "\n".join(f"{n} {w.key(s)}" for n, w, s in zip(numbers, works, schedulers))
    code = memory.code(f"chain {feature} {len(dead)}\n{keys}", make)
    if not code.text:
        return None
    for w, packed, n in zip(works, code.weights, numbers):
        w.unpack(packed)
        for i, b in enumerate(w.args.buffers):
            union[n[i]] = b
    nodes = tuple(dict.fromkeys(n for x in links for n in x.item.nodes))
    return Built(code, union[:code.buffers], nodes, flops, moved)


class _Memory:
    """Kernels that were made before: in this compilation, and on disk."""

    def __init__(self, cache: bool, tuner: Tuner | None = None) -> None:
        from .codegen.cache import Cache

        self.made: dict[str, Code] = {}
        self.tuner = tuner
        self.store = Cache() if cache else None
        # what made a kernel is part of its name: a changed code generator finds nothing old
        digest = blake2b(digest_size=16)
        here = Path(__file__)
        for path in (here, *sorted(Path(cpu_schedule.__file__).parents[1].rglob("*.py"))):
            digest.update(path.read_bytes())
        self.generator = digest.hexdigest()

    def code(self, key: str, make: Callable[[], Code],
             tuned: Callable[[Tuner], Code | None] | None = None) -> Code:
        """The code for `key`: what a search has found before, or finds now (`tuned`, where it is
        asked for), else what was made before or is made now."""
        if key in self.made:
            return self.made[key]
        stored = f"{self.generator}\n{key}"
        code = self._stored(f"tuned {stored}")
        if code is None and self.tuner is not None and tuned is not None:
            code = tuned(self.tuner)
            self._store(f"tuned {stored}", code)
        if code is None and (code := self._stored(stored)) is None:
            code = make()
            self._store(stored, code)
        self.made[key] = code
        return code

    def _stored(self, key: str) -> Code | None:
        found = self.store.get(key) if self.store is not None else None
        return None if found is None else Code.from_json(found.decode())

    def _store(self, key: str, code: Code | None) -> None:
        if self.store is not None and code is not None:
            self.store.put(key, code.to_json().encode())


def as_copy(
    item: KernelItem, lower: Lower, store: Callable[[Index], tuple[Expr, Expr]], args: _Arguments
) -> Built | None:
    """The item as a copy of one range of bytes, if that is all it does."""
    if not all(isinstance(d, int) and d for d in item.node.shape):
        return None
    vs = tuple(var(f"o{i}", 0, upper(d) - 1) if d != 1 else const(0)
               for i, d in enumerate(item.node.shape))
    value = lower.epilogue(item.node, vs, None)
    offset, guard = store(vs)
    if value.op != "load" or len(value.args) != 1 or guard is not TRUE:
        return None
    (there, first), (here, second) = symbolic.linear(value.args[0]), symbolic.linear(offset)
    run = 1
    for v, c in sorted(here.items(), key=lambda t: t[1]):
        if c != run or v not in vs:
            return None
        run *= v.hi + 1
    if there != here or set(here) != {v for v in vs if v.op == "var"}:
        return None
    size = item.node.dtype.itemsize
    return Built(None, [args.buffers[0], args.buffers[value.attr]], item.nodes,
                 move=(first * size, second * size, run * size))


def _optional(guard: Expr) -> Expr | None:
    return None if guard is TRUE else guard


def _loop_order(item: KernelItem) -> tuple[int, ...]:
    """The domain's dimensions in the order of the target's memory."""
    if not item.views:
        return item.target.layout.order
    n = item.node
    vs = [var(f"q{i}", 0, upper(d) - 1) if upper(d) > 1 else const(0)
          for i, d in enumerate(n.shape)]
    index: Index = tuple(vs)
    shape = n.shape
    for v in item.views:
        index = reindex(shape, v.shape, index) if v.op == "reshape" else \
            tuple(index[o] for o in v["order"])
        shape = v.shape
    terms, _ = symbolic.linear(item.target.layout.offset(index))
    reach = {v: terms.get(v, 0) for v in vs}
    return tuple(sorted(range(n.rank), key=lambda i: -reach[vs[i]]))


def describe(k: Kernel, buffers: Sequence[Buffer], target: CpuTarget) -> Code:
    """Completes a kernel's buffer and symbol tables and renders it in the target's language."""
    render: Callable[[Kernel, CpuTarget], str] = import_module(
        f"tinyedge.codegen.render.{target.language}").render
    most = target.gpu.buffers if target.gpu is not None else MAX_BUFFERS
    if len(buffers) > most:
        raise UnsupportedError(f"a kernel of {len(buffers)} buffers is over the {most} "
                               "that a launch may bind; report the model")
    symbols: dict[str, None] = {}
    written: set[int] = set()
    bound: set[Expr] = {k.grid_var}

    def visit(body: tuple[Stmt, ...]) -> None:
        for s in body:
            parts: list[Expr | None]
            if isinstance(s, For):
                bound.add(s.var)
                parts = [s.extent]
            elif isinstance(s, Set):
                parts = [s.value]
            else:
                written.add(s.buffer)
                parts = [s.index, s.value, s.guard]
            for e in parts:
                for v in sorted(e.vars, key=lambda v: v.serial) if e is not None else ():
                    if v.op == "var" and v not in bound and \
                            v.attr[0] not in (ir.LANE, ir.TEAM):
                        symbols[v.attr[0]] = None
            if isinstance(s, For):
                visit(s.body)

    visit(k.body)
    table = tuple((b.dtype, i in written) for i, b in enumerate(buffers))
    count = k.grid
    if target.gpu is not None:
        count = gpu_schedule.workgroups(k, target.gpu.workgroup)
        for v in sorted(k.grid.vars, key=lambda v: v.serial):
            symbols[v.attr[0]] = None
        places = {buffers[i].root.kind for i in written} & {"scratch", "state"}
        k = replace(k, whole=tuple(_padded(b) for b in buffers), shares=tuple(
            i for i, b in enumerate(buffers) if i in written or b.root.kind in places))
    k = replace(k, buffers=table, symbols=tuple(symbols))
    return Code(render(k, target), ir.show_kernel(k), size_of_expr(count), k.symbols, k.lanes,
                () if target.gpu is not None else inplace(k),
                writes=tuple(sorted(written - set(k.local))),
                buffers=len(buffers) - len(k.local), shares=k.shares)


def _padded(b: Buffer) -> bool:
    """Whether a buffer's memory ends with a whole group of 16 bytes: all but a caller's does."""
    n = b.root.nbytes
    return b.root.kind not in ("input", "output") or n.op == "const" and n.hi % 16 == 0


def inplace(k: Kernel) -> tuple[int, ...]:
    """Numbers of the operands that are read only where, and just before, the result is written."""
    bad: set[int] = set()
    good: set[int] = set()

    def loads(e: Expr, at: Expr | None) -> None:
        stack, seen = [e], set[Expr]()
        while stack:
            x = stack.pop()
            if x in seen:
                continue
            seen.add(x)
            if x.op == "load":
                (good if at is not None and x.args[0] is at else bad).add(x.attr)
            stack.extend(x.args)

    def shifted(e: Expr) -> bool:
        """Whether tiles may overlap, so that a place is written twice."""
        return e.op == "min" or any(shifted(a) for a in e.args)

    def walk(body: tuple[Stmt, ...]) -> None:
        for s in body:
            if isinstance(s, For):
                loads(s.extent, None)
                walk(s.body)
            elif isinstance(s, Set):
                loads(s.value, None)
            else:
                loads(s.index, None)
                loads(s.value, None if shifted(s.index) else s.index)
                if s.guard is not None:
                    loads(s.guard, None)

    walk(k.body)
    return tuple(n for n in sorted(good - bad) if n > 0 and
                 k.buffers[n][0].itemsize == k.buffers[0][0].itemsize)


def estimate(item: KernelItem, buffers: Sequence[Buffer]) -> tuple[int, int]:
    """(floating-point operations, bytes moved at least) of one launch."""
    n, h = item.node, item.heavy
    each = 0
    seen: set[Node] = set()
    stack = [n]
    while stack:
        x = stack.pop()
        if x in seen or x is h or x is not n and x in item.where:
            continue
        seen.add(x)
        each += x.op in g.ELEMENTWISE
        stack.extend(x.inputs)
    count = prod(upper(d) for d in n.shape)
    flops = each * count
    if h is not None:
        over = h["reduce"] if h.op == "contract" else [
            h.inputs[0].shape[a] for a in h["axes"]] if h.op == "reduce" else []
        flops += prod(upper(d) for d in (*h.shape, *over)) * (2 if h.op == "contract" else 1)
    moved = sum(b.nbytes.hi for b in buffers)
    return flops, moved


def build_scatter(item: ScatterItem, target: CpuTarget) -> Built:
    """One serial piece that puts the updates in order."""
    n = item.node
    data, updates, *indices = n.inputs
    args = _Arguments(whole=target.gpu is not None)
    args.number(item.target)
    axis, rank = n["axis"], indices[0].rank

    def read(m: Node, index: Index, guard: Expr) -> Expr | None:
        b = item.where.get(m)
        if b is None or b is item.target:
            return None
        if isinstance(b, SymbolBuffer):
            return b.value
        g_ = both(guard, b.layout.guard(index))
        return load(args.number(b), b.layout.offset(index), m.dtype, _optional(g_))

    lower = Lower(read, lambda m: None, None, target.gpu is None)
    loops = [(var(f"i{i}", 0, max(upper(d) - 1, 0)), symbolic.lift(d))
             for i, d in enumerate(updates.shape)]
    at = tuple(v for v, _ in loops)
    where = [lower.value(x, at[axis:axis + rank]) for x in indices]
    inside: Expr = TRUE
    place: list[Expr] = []
    for j, w in enumerate(where):
        size = symbolic.lift(data.shape[axis + j])
        w = ir.op("where", ir.op("lt", w, const(0)), ir.op("add", w, size), w)
        inside = both(inside, both(ge0(w), ge0(size - 1 - w)))
        place.append(ir.op("min", ir.op("max", w, const(0)), size - 1))
    index = (*at[:axis], *place, *at[axis + rank:])
    value = lower.value(updates, at)
    offset = item.target.layout.offset(index)
    if n["kind"] != "set":
        value = combine(n["kind"], load(0, offset, n.dtype), value)
    body: tuple[Stmt, ...] = (Store(0, offset, value, _optional(inside)),)
    # only what moves an indexed dimension may meet another update's place
    free = [p for i, p in enumerate(loops) if target.gpu is not None and
            not axis <= i < axis + rank and p[1].hi > 1]
    for v, extent in reversed([p for p in loops if p not in free]):
        body = (For(v, extent, body),)
    if any(d == 0 for d in updates.shape):
        body, free = (), []
    k = gpu_schedule.grid(cpu_schedule.Nest(tuple(free), body))
    return Built(describe(k, args.buffers, target), args.buffers, (n.source,) if n.source else ())


def build_fill(item: FillItem, target: CpuTarget, memory: _Memory) -> Built:
    """Zeros for the halo of a buffer."""
    b = item.target
    key = f"halo {target} {b.dtype} {b.layout}"
    code = memory.code(
        key, lambda: describe(halo_kernel(b, target.vector_bytes), [b], target))
    inside = prod(upper(r) - low - high for r, (low, high) in zip(b.layout.room, b.layout.halo))
    return Built(code, [b], bytes=b.nbytes.hi - inside * b.dtype.itemsize)


def halo_kernel(b: Buffer, width: int) -> Kernel:
    """Slabs before and after the inside, dimension by dimension.

    A piece is a row of the outermost dimension, as with the kernels that fill the inside: so the
    thread that zeroes memory is mostly the one that has it in its cache.
    """
    lay = b.layout
    outer = next((d for d in lay.order[:-1] if upper(lay.room[d]) > 1), -1)
    rows = symbolic.lift(lay.room[outer]) if outer >= 0 else const(1)
    row = var("g", 0, max(rows.hi - 1, 0))
    lanes = cpu_schedule.vector_of(width, b.dtype.bits)
    inner = lay.order[-1]
    body: list[Stmt] = []
    strides = lay.strides
    zero = const(0, b.dtype)
    lane = ir.lane(lanes)
    for axis in lay.order:
        low, high = lay.halo[axis]
        for start, count in ((0, low), (symbolic.lift(lay.room[axis]) - high, high)):
            if not count:
                continue
            at = const(0)
            loops: list[tuple[Expr, Expr]] = []
            guard: Expr = TRUE
            for d in lay.order:
                extent = symbolic.lift(count if d == axis else lay.room[d])
                begin = symbolic.lift(start if d == axis else 0)
                if d == outer:
                    begin, i = const(0), row
                    if d == axis:  # once, if this row is one of the slab's
                        after = symbolic.minimum(symbolic.maximum(row - start + 1, 0), 1)
                        before = symbolic.minimum(symbolic.maximum(start + count - row, 0), 1)
                        loops.append((var("once", 0, 0), symbolic.mul(after, before)))
                elif d == inner:
                    n = (extent + (lanes - 1)) // lanes
                    v = var(f"f{d}", 0, max(n.hi - 1, 0))
                    loops.append((v, n))
                    i = v * lanes + lane
                    guard = both(guard, ge0(extent - 1 - i))
                else:
                    v = var(f"f{d}", 0, max(extent.hi - 1, 0))
                    loops.append((v, extent))
                    i = v
                at = at + symbolic.mul(begin + i, strides[d])
            stmts: tuple[Stmt, ...] = (Store(0, at, zero, _optional(guard)),)
            for v, extent in reversed(loops):
                stmts = (For(v, extent, stmts),)
            body += stmts
    return Kernel("k", (), (), row, rows, tuple(body), lanes)


def physical(b: Buffer) -> np.ndarray[Any, Any]:
    """A const's elements as they lie in memory (zeros in the room between)."""
    array = np.asarray(b.array)
    lay = b.layout
    room = [int(d) if isinstance(d, int) else upper(d) for d in lay.room]
    out = np.zeros(room, array.dtype)
    out[tuple(slice(0, n) for n in array.shape)] = array
    # what a dimension is split into, each part with its axis; innermost last
    parts, shape = [[d] for d in range(len(room))], list(room)
    for d, size in [*([lay.block] if lay.block else []),
                    *([lay.quad] if lay.quad else [])]:
        at = parts[d][0]
        shape[at:at + 1] = [shape[at] // size, size]
        parts = [[a + (a > at) for a in p] for p in parts]
        parts[d] = [at, at + 1]
    out = out.reshape(shape)
    blocks = [parts[lay.block[0]][0]] if lay.block else []
    middle = [parts[d][0] for d in lay.order if not lay.block or d != lay.block[0]]
    inner = [parts[lay.block[0]][1]] if lay.block else []
    quad = [parts[lay.quad[0]][1]] if lay.quad else []
    return np.ascontiguousarray(out.transpose([*blocks, *middle, *inner, *quad]))


def flat(items: list[Item]) -> list[KernelItem | ChainItem | ScatterItem | FillItem | CopyItem]:
    """What computes something, inside of control flow too."""
    return [i for i in every(items) if not isinstance(i, IfItem | LoopItem)]


def every(items: Sequence[Item]) -> Iterator[Item]:
    """All items, those inside of control flow too."""
    for i in items:
        yield i
        yield from every([*i.then, *i.other] if isinstance(i, IfItem) else
                         i.body if isinstance(i, LoopItem) else [])


def no_half(graph: Graph) -> None:
    """UnsupportedError for arithmetic of float16, which WebAssembly has none of, and which LLVM
    does not come to an end with there; as a type of memory it may occur."""
    for n in graph.nodes():
        for inner in g.subgraphs(n):
            no_half(inner)
        if n.op in g.ELEMENTWISE - {"cast"} | {"reduce", "contract"} and (
                n.dtype is FLOAT16 or n.inputs[0].dtype is FLOAT16):
            raise UnsupportedError(f"node '{n.source}': WebAssembly has no arithmetic of float16; "
                                   "convert the model to float32, and store weights by --float16")


def _computable(graph: Graph) -> None:
    """UnsupportedError for types that no GPU computes in."""
    for n in graph.nodes():
        if n.dtype.name in ("float64", "bfloat16") and n.op != "const":
            raise UnsupportedError(f"node '{n.source or n.op}' computes in {n.dtype}, which WebGPU "
                                   "can't; use another target, or make the model's float32")
        for body in (v for _, v in n.attrs if isinstance(v, Graph)):
            _computable(body)


def _copied(items: list[Item]) -> list[Item]:
    """The items with copies of buffers as kernels."""
    out: list[Item] = []
    for i in items:
        if isinstance(i, IfItem):
            i.then, i.other = _copied(i.then), _copied(i.other)
        elif isinstance(i, LoopItem):
            i.body = _copied(i.body)
        elif isinstance(i, CopyItem):
            n = g.placeholder(i.source.name, i.target.layout.shape, i.target.dtype)
            i = KernelItem(n, None, (), i.target, {n: i.source}, i.nodes)
        out.append(i)
    return out


BYTES, SHORT = (UINT8, INT8), (BFLOAT16, BFLOAT16)
"""Types of operands that some targets multiply and add at once."""


def quantised(graph: Valid) -> bool:
    """Whether a contraction's operand was made of 8-bit values."""
    for n in graph.nodes():
        if n.op != "contract":
            continue
        x = n.inputs[0]
        for _ in range(8):
            if x.op == "cast" and x.inputs[0].dtype in (UINT8, INT8):
                return True
            if not x.inputs:
                break
            x = x.inputs[0]
    return False


class _Compiler:
    def __init__(
        self, graph: Valid, target: CpuTarget, progress: Progress | None, cache: bool,
        tune: float = 0,
    ) -> None:
        self.graph, self.target, self.cache = graph, target, cache
        self.progress = progress or (lambda stage, done, of: None)
        self.gpu = target.gpu
        if self.gpu is not None:
            _computable(graph)
        self.alignment = ALIGNMENT if self.gpu is None else self.gpu.alignment
        if self.gpu is None:
            self.program = form(graph, target.vector_bytes)
        else:
            self.program = form(graph, target.vector_bytes, self.gpu.buffers - 1)
            self.program.items = _copied(self.program.items)
        self.packs = _Packs(self.program)
        self.memory = _Memory(cache, self.tuner(tune) if tune else None)
        self.unique: dict[str, int] = {}
        self.texts: list[str] = []
        self.kernels: list[PlanKernel] = []
        self.timeline = Timeline()
        self.built: dict[Item, list[Built]] = {}

    def tuner(self, seconds: float) -> Tuner:
        """A search for this many seconds, on this machine."""
        from .drivers.cpu import features

        _, _, arch = self.target.canonical.partition(":")
        arch, *extra = arch.split(",")
        if lack := features.missing(arch, tuple(extra)):
            raise InputError(f"--tune measures on this machine, which lacks {', '.join(lack)} for "
                             f"{self.target.canonical}; tune on a machine that has it, and move "
                             "the cache")
        kernels = [i for i in flat(self.program.items) if isinstance(i, KernelItem)]
        total = sum(estimate(i, [])[0] for i in kernels
                    if i.heavy is not None and i.heavy.op == "contract")
        return Tuner(seconds, total, self.target)

    def link(self, items: list[Item]) -> list[Item]:
        """The items with those joined that can be done piece by piece."""
        out: list[Item] = []
        left = list(items)
        while left:
            first = left.pop(0)
            if isinstance(first, IfItem):
                first.then, first.other = self.link(first.then), self.link(first.other)
            elif isinstance(first, LoopItem):
                first.body = self.link(first.body)
            elif isinstance(first, KernelItem):
                chained = self.chain(_Link(first, self.reads[first]), left)
                if chained is not None:
                    made, built, before = chained
                    self.built[made] = [built]
                    out += before
                    left = [x for x in left if x not in before and x not in made.items]
                    first = made
            out.append(first)
        return out

    def chain(self, first: _Link, items: Sequence[Item]
              ) -> tuple[ChainItem, Built, list[Item]] | None:
        """The longest chain that begins with a link, and which of the items behind that are to be
        done before it; None where there is none."""
        if not first.kind:
            return None
        run, best = [first], None
        passed: list[Item] = []
        for item in items:
            if sum(not isinstance(x, FillItem) for x in passed) > PASSED or \
                    isinstance(item, IfItem | LoopItem):
                break
            link = _Link(item, self.reads[item]) if isinstance(item, KernelItem) else None
            if link is None or not link.follows(run):
                if not self.reads[item].isdisjoint(x.item.target for x in run):
                    break
                passed.append(item)
                continue
            together = [*run, link]
            among = {x.item for x in together}
            dead = {b for b in (x.item.target for x in run) if b.kind == "scratch"
                    and b.parent is None and not any(
                        b in reads for i, reads in self.reads.items() if i not in among)
                    and not any(x.parent is b for x in self.program.buffers)}
            if link.kind == "dense" and not dead.issuperset(
                    link.reads & {x.item.target for x in run}):
                break  # nothing is saved but one reading
            built = build_chain(together, dead, self.target, self.packs, self.memory)
            if built is None:
                break
            run = together
            best = ChainItem(tuple(x.item for x in run)), built, list(passed)
        return best

    def build_all(self) -> None:
        """Makes every kernel's code and the timeline of accesses."""
        self.reads = {i: reading(i) for i in every(self.program.items)}
        if self.gpu is None:
            self.program.items = self.link(self.program.items)
        items = flat(self.program.items)
        for done, i in enumerate(items):
            self.progress("kernels", done, len(items))
            b: Built | None = None
            if isinstance(i, ChainItem):
                [b] = self.built[i]
            elif isinstance(i, KernelItem):
                b = build_kernel(i, self.target, self.packs, self.memory)
            elif isinstance(i, ScatterItem):
                b = build_scatter(i, self.target)
            elif isinstance(i, FillItem) and self.gpu is None:
                b = build_fill(i, self.target, self.memory)
            self.built[i] = [b] if b is not None else []
            if b is not None and b.code is not None:
                self.add(b.code, b, i)
        self.progress("kernels", len(items), len(items))
        self.visit(self.program.items)

    def add(self, code: Code, b: Built, item: Item) -> None:
        if code.text not in self.unique:
            self.unique[code.text] = len(self.texts)
            name = self.name(code.text, item)
            text = re.sub(r"@k\b", f"@{name}", code.text)
            self.texts.append(text)
            self.kernels.append(PlanKernel(
                name, 0, b.flops, b.bytes, text,
                re.sub(r"^kernel k\b", f"kernel {name}", code.loops),
                {"lanes": code.lanes} if self.gpu is None else {"workgroup": self.gpu.workgroup},
                code.shares or code.writes))

    def name(self, text: str, item: Item) -> str:
        """op_dtype_shape_digest: the same for the same code in every plan."""
        if isinstance(item, ChainItem):
            last = item.items[-1].node
            kinds = {x.heavy.op for x in item.items if x.heavy is not None}
            shape = "x".join(str(upper(d)) for d in last.shape)
            stem = f"{'chain' if 'contract' in kinds else 'rows'}_{last.dtype.name}_{shape}"
        elif isinstance(item, KernelItem):
            h = item.heavy
            if h is None:
                what = item.node.op if item.node.op == "winograd_in" else "map"
            elif h.op == "contract":
                what = "conv" if len(h["reduce"]) > 1 else "matmul"
            else:
                what = h["kind"] if h.op == "reduce" else h.op
            shape = "x".join(str(upper(d)) for d in item.node.shape)
            stem = "_".join(filter(None, (what, item.node.dtype.name, shape)))
        else:
            stem = {"ScatterItem": "scatter", "FillItem": "halo"}.get(type(item).__name__, "step")
        return f"{stem}_{blake2b(text.encode(), digest_size=4).hexdigest()}"

    def visit(self, items: list[Item]) -> None:
        """Appends the accesses of items, in the order in which steps are numbered."""
        for i in items:
            if isinstance(i, IfItem):
                self.timeline.accesses.append(Access((i.cond.root,), ()))
                self.visit(i.then)
                self.visit(i.other)
            elif isinstance(i, LoopItem):
                start = len(self.timeline.accesses)
                self.timeline.accesses.append(Access((i.cond.root, i.trips.root), ()))
                self.visit(i.body)
                self.timeline.accesses.append(Access((i.cond.root, i.trips.root), ()))
                self.timeline.loops.append((start, len(self.timeline.accesses) - 1))
            else:
                self.timeline.accesses.append(self.access(i))

    def access(self, i: Item) -> Access:
        if isinstance(i, CopyItem):
            return Access((i.source.root,), (i.target.root,), moves=True)
        if not self.built[i]:
            return Access((), ())
        b = self.built[i][0]
        target = b.buffers[0]
        written = b.code.writes if b.code is not None else (0,)
        writes = tuple(b.buffers[n].root for n in written)
        reads = tuple(x.root for n, x in enumerate(b.buffers) if n not in written)
        if isinstance(i, ScatterItem):
            reads = (target.root, *reads)
        if b.code is None:
            return Access(reads, writes, moves=True)
        whole = target.parent is None
        return Access(reads, writes, tuple(
            b.buffers[n] for n in b.code.inplace if whole and b.buffers[n].parent is None))

    def alias_states(self) -> None:
        """Gives a state's next value the state's own memory where no old value is needed after.

        A copy step may move a range over itself, so a shifted history is updated in place.
        """
        self.alias: dict[Buffer, Buffer] = {}
        for i in self.program.items:
            if not isinstance(i, CopyItem) or i.target.kind != "state" or \
                    i.source in self.alias or i.source.kind != "scratch":
                continue
            a, b = i.source, i.target
            if b in self.alias.values() or \
                    a.layout.offset(_plain_index(a)) is not b.layout.offset(_plain_index(b)):
                continue
            steps = self.timeline.accesses
            first = next((n for n, x in enumerate(steps) if a in x.writes), None)
            reads = [n for n, x in enumerate(steps) if b in x.reads]
            if first is None or self.timeline.loops or any(
                isinstance(x, IfItem | LoopItem) for x in self.program.items
            ):
                continue
            last = max(reads, default=-1)
            x = steps[first]
            if last < first or last == first and (b in x.inplace or x.moves):
                self.alias[a] = b

    # the plan

    def plan(self, provenance: Mapping[str, Any], metadata: Mapping[str, str]) -> Plan:
        self.build_all()
        self.alias_states()
        offsets, scratch = pack(self.timeline, set(self.alias), self.alignment, self.gpu is None)
        states: list[State] = []
        at = 0
        place: dict[Buffer, tuple[int, int, int]] = {}
        inputs = [b for b in self.program.buffers if b.kind == "input"]
        outputs = [b for b in self.program.buffers if b.kind == "output"]
        blobs: list[tuple[int, bytes]] = []
        constants = 0
        used: set[Buffer] = {x for a in self.timeline.accesses for x in (*a.reads, *a.writes)}
        for b in self.program.buffers:
            n = b.nbytes.hi
            if b.parent is not None:
                continue
            if b.kind == "scratch":
                if b in offsets:
                    place[b] = (SCRATCH, offsets[b], offsets[b] + n)
            elif b.kind == "input":
                place[b] = (FIRST_EXTERNAL + b.port, 0, n)
            elif b.kind == "output":
                place[b] = (FIRST_EXTERNAL + len(inputs) + b.port, 0, n)
            elif b.kind == "state":
                place[b] = (STATES, at, at + n)
                out = next(o for o, i in self.graph.states.items() if i == b.name)
                shape = tuple(upper(d) for d in b.layout.shape)
                states.append(State(b.name, out, shape, b.dtype.name, Ref(STATES, at, n)))
                at += -(-n // self.alignment) * self.alignment
            elif b.kind == "const" and b in used:
                place[b] = (CONSTANTS, constants, constants + n)
                blobs.append((constants, physical(b).tobytes()))
                constants += -(-n // self.alignment) * self.alignment
        place.update({a: place[b] for a, b in self.alias.items()})
        data = bytearray(constants)
        for o, blob in blobs:
            data[o:o + len(blob)] = blob
        self.place = place
        if self.target.family != "cpu":  # an exporter may narrow what it stores
            where = {b: at for b, (arena, at, _) in place.items() if arena == CONSTANTS}
            provenance = {**provenance, "weights": record(self.graph, where),
                          "filters": filters(self.graph, where)}
        self.hazards = Hazards(place)
        steps = self.steps(self.program.items)
        return self.assembled(Plan(
            target=self.target.canonical,
            inputs=tuple(Port(b.name, _sizes(b), b.dtype.name)
                         for b in sorted(inputs, key=lambda b: b.port)),
            outputs=tuple(Port(b.name, _sizes(b), b.dtype.name)
                          for b in sorted(outputs, key=lambda b: b.port)),
            states=tuple(states), symbols={
                k: v for k, v in self.program.symbols.items() if not k.startswith("turn")},
            arenas=(constants, scratch, at), kernels=tuple(self.kernels), steps=steps, code=b"",
            constants=bytes(data), metadata=dict(metadata), provenance=dict(provenance),
            name=self.graph.name, producer=_producer(),
        ))

    def ref(self, b: Buffer) -> Ref:
        arena, lo, hi = self.place[b.root]
        if self.gpu is not None and arena < FIRST_EXTERNAL:
            # vectors of four may be read to the end
            return Ref(arena, lo, -(-(hi - lo) // 16) * 16)
        return self.exact(b)

    def exact(self, b: Buffer) -> Ref:
        arena, lo, _ = self.place[b.root]
        return Ref(arena, lo, size_of_expr(b.nbytes))

    def steps(self, items: list[Item]) -> tuple[Step, ...]:
        out: list[Step] = []
        for i in items:
            if isinstance(i, IfItem):
                self.hazards.flush()
                self.hazards.read.add(i.cond.root)
                then = self.steps(i.then)
                self.hazards.flush()
                self.hazards.read.add(i.cond.root)
                other = self.steps(i.other)
                # after either branch nothing is known of what it touched
                out.append(If(self.exact(i.cond), then, other, i.nodes))
                self.unknown = True
            elif isinstance(i, LoopItem):
                self.hazards.flush()
                self.hazards.read |= {i.cond.root, i.trips.root}
                body = self.steps(i.body)
                out.append(Loop(i.symbol, self.exact(i.trips), self.exact(i.cond), body, i.nodes))
                self.unknown = True
            elif isinstance(i, CopyItem):
                if self.alias.get(i.source) is not i.target:
                    wait = self.wait(self.access(i))
                    out.append(Copy(self.ref(i.source), self.ref(i.target), wait))
            elif self.built[i]:
                b = self.built[i][0]
                if b.code is None:
                    (at, lo, _), (to, start, _) = (
                        self.place[x.root] for x in (b.buffers[1], b.buffers[0]))
                    first, second, count = b.move
                    out.append(Copy(Ref(at, lo + first, count), Ref(to, start + second, count),
                                    self.wait(self.access(i)), b.nodes))
                    continue
                out.append(Launch(
                    self.unique[b.code.text], tuple(self.ref(x) for x in b.buffers),
                    b.code.symbols, b.code.grid, self.wait(self.access(i)), b.nodes))
        return tuple(out)

    unknown = True

    def wait(self, access: Access) -> bool:
        """Whether the next step waits; always after control flow and at the start."""
        conflict = self.hazards.must_wait(access)
        wait = conflict or self.unknown
        self.unknown = False
        return wait

    def assembled(self, plan: Plan) -> Plan:
        """The plan with the code of its kernels and of what runs them, linked into one."""
        from .codegen.llvm_target import support_ir
        from .codegen.objects import compile_all

        if self.target.language != "llvm":
            return plan
        if self.target.family == "wasm":
            from .codegen.link import wasm
            from .drivers.wasm import executor

            where = executor.layout(plan)
            run = executor.executor_ir(plan, where)
        else:
            from .codegen.link.elf import link
            from .drivers.cpu.executor import executor_ir

            run = executor_ir(self.target.arch)
        texts = [*self.texts, run, *support_ir(self.target)]
        objects = compile_all(texts, self.target, self.cache, self.progress)
        if self.target.family == "wasm":
            module = wasm.link(objects, executor.exports(plan), where.end, executor.STACK,
                               executor.STACKS)
            return replace(plan, code=module.code, entries=executor.entries(plan, where, module))
        image = link(objects, page=65536 if self.target.arch == "aarch64" else 4096)
        kernels = tuple(replace(k, entry=image.entries[k.name]) for k in plan.kernels)
        names = {k.name for k in kernels}
        return replace(plan, code=image.code, kernels=kernels, entries={
            k: v for k, v in image.entries.items() if k not in names})


def _plain_index(b: Buffer) -> Index:
    return tuple(var(f"o{i}", 0, max(upper(d) - 1, 0)) for i, d in enumerate(b.layout.shape))


def _sizes(b: Buffer) -> tuple[Any, ...]:
    return tuple(size_of_expr(d) for d in b.layout.shape)


def _producer() -> str:
    from . import __version__

    return f"tinyedge {__version__}"


def compile_graph(
    graph: Graph, target: str = "cpu", *, progress: Progress | None = None, cache: bool = True,
    provenance: Mapping[str, Any] | None = None, metadata: Mapping[str, str] | None = None,
    tune: float = 0, float16: bool = False, bfloat16: bool = False,
) -> Plan:
    """Compiles a graph for a CPU target, or several (``cpu:x86-64-v3+v4``) into one plan.

    tune: seconds for which schedules are measured on this machine; what is found stays in the
    cache, also for later compilations that ask for no search. progress(stage, done, of) is called
    as work goes on. float16, bfloat16: weights are stored in that type, sums made in float32; on a
    target with avx512bf16 (this machine, where it has it) products are of bfloat16 values too.
    Raises UnsupportedError (with the node's name) for what the target can't do,
    ShapeError for dimensions that don't fit, InputError for a search on another kind of machine.
    """
    from .codegen.llvm_target import DOTS, extras, parse_target, parse_targets
    from .drivers.cpu import features
    from .passes import narrow, optimize, winograd

    start = time.perf_counter()
    if float16 and bfloat16:
        raise InputError("weights can't be both float16 and bfloat16; leave one of them out")
    family = target.partition(":")[0]
    if family in ("c", "webgpu") and (tune or bfloat16):
        where = "source in C runs" if family == "c" else "shaders run"
        raise InputError(f"--{'tune' if tune else 'bfloat16'} is for this machine's processor, and "
                         f"{where} elsewhere; leave it out")
    targets = parse_targets(target)
    checked = g.validate(graph)
    plans = []
    for cpu in targets:
        valid = optimize(checked, BYTES in cpu.dots)
        if target == "cpu":  # this machine, with what is asked for only where it is used
            wanted = (BYTES,) * quantised(valid) + (SHORT,) * bfloat16
            for f, (operands, _) in DOTS.items():
                if operands in wanted and operands not in cpu.dots and \
                        f in extras(cpu.arch) and not features.missing(cpu.cpu, (f,)):
                    cpu = parse_target(f"{cpu.canonical},{f}")
            valid = optimize(checked, BYTES in cpu.dots)
        if bfloat16 and SHORT in cpu.dots:
            valid = narrow.run(valid, BFLOAT16, both=True)
        if cpu.family not in ("c", "webgpu"):
            valid = winograd.run(valid)
        if (float16 or bfloat16) and cpu.cpu == "x86-64-v2":
            raise InputError(f"--{'b' * bfloat16}float16: {cpu.canonical} has no instructions for "
                             "it; leave one of them out")
        if float16 or bfloat16 or cpu.canonical == "webgpu:f16":
            valid = narrow.run(valid, BFLOAT16 if bfloat16 else FLOAT16)
        if cpu.family == "wasm":
            no_half(valid)
        plans.append(_Compiler(valid, cpu, progress, cache, tune).plan(
            provenance or {}, metadata or {}))
    plans[0].variants = tuple(plans[1:])
    plans[0].provenance.setdefault("compile seconds", round(time.perf_counter() - start, 3))
    return plans[0]


def compile(
    model: str | os.PathLike[str] | bytes | ModelProto | Graph, target: str = "cpu", *,
    dims: Mapping[str, int | tuple[int, int]] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    states: Mapping[str, str] | None = None,
    progress: Progress | None = None, cache: bool = True, tune: float = 0, float16: bool = False,
    bfloat16: bool = False,
) -> Plan:
    """Compiles an ONNX model to a plan; `plan.save(path)` writes it.

    model: a file's path, a file's bytes, a ModelProto, or a Graph. dims: named dimension -> size,
    or (lowest, highest) to keep it open. shapes: input -> all its dimensions. states: output -> the
    input that receives it on the next run. tune, float16, bfloat16: see
    `compile_graph`. Raises ModelError,
    UnsupportedError and ShapeError as the importer and `compile_graph` do, InputError for what is
    no model.
    """
    if isinstance(model, Graph):
        return compile_graph(model, target, progress=progress, cache=cache, tune=tune,
                             float16=float16, bfloat16=bfloat16)
    from . import onnx

    loaded = onnx.load(model, dims=dims or {}, shapes=shapes or {}, states=states or {})
    if isinstance(model, str | os.PathLike):
        name, data = Path(model).name, Path(model).read_bytes()
    else:
        name, data = loaded.name, model if isinstance(model, bytes) else model.SerializeToString()
    provenance = {
        "model": name,
        "sha256": sha256(data).hexdigest(),
        "options": {
            "target": target, "dims": {k: str(v) for k, v in (dims or {}).items()},
            "shapes": {k: tuple(v) for k, v in (shapes or {}).items()},
            "states": dict(states or {}), "float16": float16, "bfloat16": bfloat16,
        },
    }
    return compile_graph(loaded, target, progress=progress, cache=cache, provenance=provenance,
                         metadata=loaded.metadata, tune=tune, float16=float16,
                         bfloat16=bfloat16)


__all__ = ["compile", "compile_graph"]
