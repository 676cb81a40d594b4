"""Kernel formation: which values get memory, which nodes share a kernel, how memory is laid out.

Stands between the passes and code generation. Afterwards every node that the outputs need is either
a buffer's value (written by exactly one item, or by several that each write a part of it) or is
inlined where it is used.

A kernel holds at most one heavy node (reduce, contract), and with it every elementwise node that
follows at the same index: its epilogue. Views are inlined as index arithmetic. A concat is written
in place by its parts. Buffers of feature maps are channels-last, rounded up to whole vectors, with
a halo of zeros where a consumer pads: convolutions then read whole vectors and test nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from . import graph as g
from .codegen import symbolic
from .codegen.ir import Expr, const, load, var
from .codegen.lower import HEAVY, Index, Layout, Lower, accumulator, plain, reindex
from .codegen.symbolic import TRUE, both, lift
from .dtype import BFLOAT16, BOOL, INT64, UINT8, DType
from .graph import ELEMENTWISE, VIEWS, Graph, Node, Valid
from .shape import Dim, Shape, same, size, upper

MOST_LEAVES = 20
"""Values with memory that one kernel may read; devices bind a limited number."""

DEEPEST = 150
"""Operations in a row that one kernel does, some of them many; a longer chain is cut by memory."""

EXPENSIVE = frozenset("exp log sin cos tanh erf pow div mod sqrt".split())
LEAVES = frozenset(("input", "const", "result", "scatter"))


@dataclass(eq=False)
class Buffer:
    """Memory of one value.

    kind: "const", "scratch", "state", "input", "output". port: the input's, output's or state's
    number. parent: the buffer that this one is a part of. array: a const's contents, already laid
    out. readers of `layout` must go through `Layout.offset`.
    """

    name: str
    dtype: DType
    layout: Layout
    kind: str = "scratch"
    port: int = 0
    parent: Buffer | None = None
    array: object = None

    @property
    def root(self) -> Buffer:
        return self.parent.root if self.parent is not None else self

    @property
    def nbytes(self) -> Expr:
        return self.root.layout.size * self.root.dtype.itemsize


@dataclass(eq=False)
class KernelItem:
    """Computes `node` (through `views`, if it is stored under another shape) into `target`.

    shift: added to the stored index's first dimension (a loop's stacked output).
    """

    node: Node
    heavy: Node | None
    views: tuple[Node, ...]
    target: Buffer
    where: Mapping[Node, Buffer]
    nodes: tuple[str, ...]
    shift: Expr | None = None


@dataclass(eq=False)
class ChainItem:
    """Items that one kernel computes, piece by piece."""

    items: tuple[KernelItem, ...]


@dataclass(eq=False)
class ScatterItem:
    """Puts a scatter's updates into `target`, which holds a copy of its data already."""

    node: Node
    target: Buffer
    where: Mapping[Node, Buffer]


@dataclass(eq=False)
class FillItem:
    """Writes zeros to the halo of a buffer."""

    target: Buffer


@dataclass(eq=False)
class CopyItem:
    """Copies all of one buffer to another of the same layout."""

    source: Buffer
    target: Buffer
    nodes: tuple[str, ...] = ()


@dataclass(eq=False)
class IfItem:
    cond: Buffer
    then: list[Item]
    other: list[Item]
    nodes: tuple[str, ...] = ()


@dataclass(eq=False)
class LoopItem:
    symbol: str
    trips: Buffer
    cond: Buffer
    body: list[Item]
    nodes: tuple[str, ...] = ()


Item = KernelItem | ChainItem | ScatterItem | FillItem | CopyItem | IfItem | LoopItem


@dataclass
class Program:
    """A formed graph: buffers and what fills them, in order."""

    items: list[Item] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    symbols: dict[str, tuple[int, int]] = field(default_factory=dict)


def form(graph: Valid, vector: int, leaves: int = MOST_LEAVES) -> Program:
    """Forms `graph` for vectors of `vector` bytes and kernels that read up to `leaves` values."""
    program = Program()
    where: dict[Node, Buffer] = {}
    inputs = [n for n in graph.inputs if n not in graph.states.values()]
    for name, n in graph.inputs.items():
        state = name not in inputs
        b = Buffer(name, n.dtype, plain(n.shape), "state" if state else "input",
                   list(graph.states.values()).index(name) if state else inputs.index(name))
        where[n] = b
        program.buffers.append(b)
        for d in n.shape:
            if isinstance(d, Expr):
                program.symbols.update({v.attr[0]: (v.lo, v.hi) for v in d.vars})
    targets: list[tuple[Node, Buffer]] = []
    copies: list[Item] = []
    ports = 0
    for name, n in graph.outputs.items():
        if name in graph.states:
            b = Buffer(name, n.dtype, plain(n.shape))
            copies.append(CopyItem(b, where[graph.inputs[graph.states[name]]]))
        else:
            b = Buffer(name, n.dtype, plain(n.shape), "output", ports)
            ports += 1
        program.buffers.append(b)
        targets.append((n, b))
    former = _Former(program, graph, where, targets, vector, leaves)
    program.items += former.run()
    program.items += copies
    return program


class _Former:
    """Forms one graph: the whole, or a branch or loop body."""

    def __init__(
        self, program: Program, graph: Graph, where: dict[Node, Buffer],
        targets: Sequence[tuple[Node, Buffer]], vector: int, most: int,
        consts: dict[Node, Buffer] | None = None,
    ) -> None:
        self.program, self.graph, self.vector, self.most = program, graph, vector, most
        self.where = where
        self.targets = list(targets)
        self.consts = {} if consts is None else consts
        self.items: list[Item] = []
        self.nodes = list(g.walk([n for n, _ in targets]))
        self.users: dict[Node, list[Node]] = {n: [] for n in self.nodes}
        for n in self.nodes:
            for i in dict.fromkeys(n.inputs):
                self.users[i].append(n)

    def run(self) -> list[Item]:
        self.settle_targets()
        self.choose_chains()
        self.choose_memory()
        self.choose_slots()
        self.choose_layouts()
        self.emit()
        return self.items

    # what has memory

    def settle_targets(self) -> None:
        """Each target gets a node of its own or becomes a copy of another buffer."""
        self.direct: dict[Node, Buffer] = {}
        self.copied: list[tuple[Node, Buffer]] = []
        for n, b in self.targets:
            if n.op in LEAVES or n in self.direct or n in self.where:
                self.copied.append((n, b))
            else:
                self.direct[n] = b
        self.memory: set[Node] = set(self.direct)
        self.memory |= {n for n in self.nodes if n.op in LEAVES and not _scalar_const(n)}
        for n in self.nodes:
            if n.op in g.CONTROL:
                self.memory |= set(n.inputs)
        self.memory |= {n for n, _ in self.copied}

    def choose_chains(self) -> None:
        """For every heavy node, the last node of its epilogue (which gets memory instead of it)."""
        self.dominator = self._dominators()
        self.tip: dict[Node, Node] = {}
        claimed: set[Node] = set()
        for h in reversed(self.nodes):
            if h.op not in HEAVY:
                continue
            cur = h
            while cur not in self.memory:
                nxt = self.dominator.get(cur)
                if nxt is None:
                    break
                region = self._between(cur, nxt)
                if region is None or region & claimed or not all(
                    n.op in ELEMENTWISE and n.rank == h.rank and all(map(same, n.shape, h.shape))
                    for n in region
                ) or any(n in self.memory for n in region - {nxt}):
                    break
                if self._leaves_of(nxt, h) + self._leaves_of(h) > self.most:
                    break
                claimed |= region
                cur = nxt
            self.tip[h] = cur
            self.memory.add(cur)
        self.heavy_of = {t: h for h, t in self.tip.items()}
        self.chained = claimed | set(self.tip)

    def _leaves_of(self, root: Node, heavy: Node | None = None) -> int:
        """What the kernel of `root` reads: without `heavy`, or, if root is heavy, for it alone."""
        seen: set[Node] = set()
        stack, leaves = [root] if heavy is not None else list(root.inputs), 0
        while stack:
            n = stack.pop()
            if n in seen or n is heavy:
                continue
            seen.add(n)
            if _scalar_const(n):
                continue
            if n in self.memory or n.op in HEAVY:
                leaves += 1
            else:
                stack.extend(n.inputs)
        return leaves

    def _dominators(self) -> dict[Node, Node | None]:
        """Of each node, the next node that everything computed from it passes through."""
        order = {n: i for i, n in enumerate(self.nodes)}
        out: dict[Node, Node | None] = {}
        for n in reversed(self.nodes):
            if n in self.memory or not self.users[n]:
                out[n] = None
                continue
            meet: Node | None = self.users[n][0]
            for u in self.users[n][1:]:
                v: Node | None = u
                while meet is not v:
                    if meet is None or v is None:
                        meet = None
                        break
                    if order[meet] < order[v]:
                        meet = out[meet]
                    else:
                        v = out[v]
                if meet is None:
                    break
            out[n] = meet
        return out

    def _between(self, a: Node, b: Node) -> set[Node] | None:
        """The nodes on the ways from a (without it) to b (with it)."""
        seen: set[Node] = set()
        stack = list(self.users[a])
        while stack:
            n = stack.pop()
            if n in seen:
                continue
            seen.add(n)
            if len(seen) > 64:
                return None
            if n is not b:
                stack.extend(self.users[n])
        return seen

    def choose_memory(self) -> None:
        """Adds to `memory` what would be computed too often or reads too much when inlined."""
        # operands of contractions are read many times: no arithmetic is inlined there
        self.halo: dict[Node, list[tuple[int, int]]] = {}
        for n in self.nodes:
            if n.op == "contract":
                for x in n.inputs:
                    self._plain_operand(x)
            elif n.op == "winograd_in":
                self.memory.add(n)
                self._plain_operand(n.inputs[0])
            elif n.op == "concat" and n not in self.memory:
                total = upper(size(n.shape))
                if total >= 1024 and any(self._root_below(i) in self.memory for i in n.inputs):
                    self.memory.add(n)
        cost: dict[Node, int] = {}
        depth: dict[Node, int] = {}
        leaves: dict[Node, frozenset[Node]] = {}
        for n in self.nodes:
            inner = [i for i in n.inputs if i not in self.memory]
            depth[n] = max((depth[i] for i in inner), default=0) + (12 if n.op in EXPENSIVE else 1)
            if depth[n] > DEEPEST and n.op in ELEMENTWISE:
                self.memory.add(n)
            def weigh(n: Node) -> None:
                cost[n] = sum(cost[i] for i in dict.fromkeys(n.inputs) if i not in self.memory)
                cost[n] += 8 if n.op in EXPENSIVE else 0 if n.op in VIEWS else 1
                below = [leaves[i] if i not in self.memory else frozenset((i,)) for i in n.inputs
                         if not _scalar_const(i)]
                leaves[n] = frozenset().union(*below)
            weigh(n)
            if n.op == "concat" and len(leaves[n]) > self.most:
                self.memory.add(n)  # its parts write it one by one
            while len(leaves[n]) > self.most and n.op != "concat":
                widest = max((i for i in n.inputs if i not in self.memory and
                              i not in self.chained), key=lambda i: len(leaves[i]), default=None)
                if widest is None or len(leaves[widest]) < 2:
                    break
                self.memory.add(widest)
                weigh(n)
            if n in self.memory or n.op in LEAVES or len(leaves[n]) == 0 and n.op != "contract":
                continue
            if len(self.users[n]) > 1 and cost[n] * (len(self.users[n]) - 1) >= 4 and \
                    not self._reconverges(n) and n.op not in VIEWS:
                self.memory.add(n)

    def _reconverges(self, n: Node) -> bool:
        """Whether all uses of n end in one elementwise node at the same index."""
        end = self.dominator.get(n)
        region = self._between(n, end) if end is not None else None
        return region is not None and not any(
            m in self.memory and m is not end or m.op not in ELEMENTWISE for m in region)

    def _root_below(self, n: Node) -> Node:
        while n.op in VIEWS and n not in self.memory:
            n = n.inputs[0]
        return n

    def _plain_operand(self, x: Node) -> None:
        """Gives memory to what stands below the views of a contraction's operand."""
        path = []
        while x.op in VIEWS and x not in self.memory:
            path.append(x)
            x = x.inputs[0]
        if x not in self.memory and not _scalar_const(x):
            self.memory.add(x)
        for i, p in enumerate(path):
            if p.op != "pad":
                continue
            direct = i == len(path) - 1 and p["value"].array.reshape(-1)[0] == 0 and (
                x.op not in LEAVES and x not in self.direct and x.rank >= 3)
            if direct:
                have = self.halo.setdefault(x, [(0, 0)] * x.rank)
                self.halo[x] = [(max(a, c), max(b, d)) for (a, b), c, d in
                                zip(have, p["low"], p["high"])]
            else:
                self.memory.add(p)

    # where it lies

    def choose_slots(self) -> None:
        """Parts of a concat that can be written in place: node -> (concat, offset)."""
        self.slot: dict[Node, tuple[Node, Dim]] = {}
        for n in reversed(self.nodes):
            if n.op != "concat" or n not in self.memory:
                continue
            start: Dim = 0
            for x in n.inputs:
                usable = x.op not in LEAVES and x not in self.direct and x not in self.slot and \
                    x not in self.where and n.inputs.count(x) == 1 and \
                    not any(h != (0, 0) for h in self.halo.get(x, ())[n["axis"]:n["axis"] + 1])
                usable = usable and not (n in self.direct and x in self.halo)
                if usable and (x in self.memory or len(self.users[x]) == 1):
                    self.memory.add(x)
                    self.slot[x] = (n, start)
                start = start + x.shape[n["axis"]] if isinstance(start, int) else \
                    symbolic.add(start, x.shape[n["axis"]])
        # a halo is the whole tensor's
        for x in self.nodes:
            if x in self.slot and x in self.halo:
                n = self.slot[x][0]
                have = self.halo.setdefault(n, [(0, 0)] * n.rank)
                self.halo[n] = [(max(a, c), max(b, d))
                                for (a, b), (c, d) in zip(have, self.halo[x])]

    def choose_layouts(self) -> None:
        wish = self._wishes()
        prefers: dict[Node, tuple[tuple[int, ...], bool]] = {}

        def preference(n: Node) -> tuple[tuple[int, ...], bool]:
            """(order of dimensions, whether to round the innermost up)."""
            natural = tuple(range(n.rank))
            if n in wish:
                return _inner_last(n.rank, wish[n]), False
            if n in self.heavy_of and self.heavy_of[n].op == "contract":
                lane = contract_lane(self.heavy_of[n])
                if lane is not None:
                    return _inner_last(n.rank, lane), lane != n.rank - 1 or n.rank > 2
            # the dimension that moves along the innermost one of what is read
            weight = [0] * n.rank
            whole = False
            for m, index, variables in self._read_by(n):
                order, rounded = prefers.get(m, (tuple(range(m.rank)), False))
                if not order or n.op == "concat" and m.op in LEAVES:
                    continue
                for d, v in enumerate(variables):
                    if v in index[order[-1]].vars and upper(n.shape[d]) >= 4:
                        weight[d] += upper(size(m.shape))
                        whole = whole or rounded
            if not any(weight):
                return natural, False
            inner = max(range(n.rank), key=lambda d: (weight[d], d))
            return _inner_last(n.rank, inner), whole and inner != n.rank - 1

        for n in self.nodes:
            if n in self.memory and n not in self.where and n.op not in ("const", "result"):
                prefers[n] = preference(n) if n not in self.direct else (
                    tuple(range(n.rank)), False)
        made: dict[Node, Buffer] = {}

        def make(n: Node) -> Buffer:
            if n in made:
                return made[n]
            name = n.source or n.op
            if n in self.direct:
                b = self.direct[n]
            elif n in self.slot:
                parent_node, start = self.slot[n]
                parent = make(parent_node)
                lay = parent.layout
                axis = parent_node["axis"]
                origin = tuple(
                    symbolic.add(o, start) if d == axis else o
                    for d, o in enumerate(lay.origin or (0,) * n.rank))
                b = Buffer(name, n.dtype, Layout(
                    n.shape, lay.order, lay.halo, lay.room, None, origin), parent=parent)
            else:
                order, whole = prefers[n]
                b = Buffer(name, n.dtype, self._layout(n, order, whole))
            made[n] = b
            if b not in self.program.buffers:
                self.program.buffers.append(b)
            return b

        for n in prefers:
            self.where[n] = make(n)

    def _layout(self, n: Node, order: tuple[int, ...], whole: bool) -> Layout:
        halo = tuple(self.halo.get(n, [(0, 0)] * n.rank))
        room: list[Dim] = [d if a + b == 0 else d + a + b for d, (a, b) in zip(n.shape, halo)]
        inner = order[-1] if order else 0
        if whole and isinstance(n.shape[inner], int) and halo[inner] == (0, 0):
            full = max(1, self.vector // max(n.dtype.itemsize, 4))
            d = n.shape[inner]
            assert isinstance(d, int)
            step = min(full, 1 << max(0, (d - 1).bit_length()))
            r = -(-d // step) * step
            # rows a multiple of 2 KiB apart would share a few sets of the first-level cache
            pixels = upper(size(n.shape)) // max(d, 1)
            if r * n.dtype.itemsize % 2048 == 0 and pixels >= 8:
                r += step
            room[inner] = r
        return Layout(n.shape, order, halo, tuple(room))

    def _wishes(self) -> dict[Node, int]:
        """The dimension that a contraction wants innermost in an operand that is not constant."""
        out: dict[Node, int] = {}
        for n in self.nodes:
            if n.op != "contract":
                continue
            lane = contract_lane(n)
            if lane is None:
                continue
            pairs = [(x, forms, lane) for x, forms in zip(n.inputs, n["maps"])]
            if n.inputs[0].dtype in (UINT8, BFLOAT16):
                # read by 32 bits along the index that is summed over
                count = 32 // n.inputs[0].dtype.bits
                pairs += [(n.inputs[0], n["maps"][0], n.rank + i) for i, d in enumerate(n["reduce"])
                          if isinstance(d, int) and d % count == 0 and
                          (0, ((n.rank + i, 1),)) in n["maps"][1]]
            for x, forms, index in pairs:
                if not any(i == index for _, terms in forms for i, _ in terms):
                    continue
                where = [var(f"w{i}", 0, max(upper(d) - 1, 1))
                         for i, d in enumerate((*n.shape, *n["reduce"]))]
                v = where[index]
                at: tuple[Expr, ...] = tuple(symbolic.linear_sum(
                    ((c, where[i]) for i, c in terms), c0) for c0, terms in forms)
                for m, i in self._reached(x, at):
                    moved = [d for d, e in enumerate(i) if v in e.vars]
                    if len(moved) == 1 and m.op not in LEAVES and m not in self.direct and \
                            i[moved[0]] is v:
                        out.setdefault(m, moved[0])
        return out

    def _read_by(self, n: Node) -> Iterator[tuple[Node, Index, Index]]:
        """What the kernel of `n` reads: (node, index, the variables of n's dimensions)."""
        heavy = self.heavy_of.get(n)
        variables = tuple(var(f"o{i}", 0, max(upper(d) - 1, 0)) for i, d in enumerate(n.shape))
        found: list[tuple[Node, Index]] = []

        def read(m: Node, index: Index, guard: Expr) -> Expr | None:
            if m is n or m not in self.memory:
                return None
            found.append((m, index))
            return load(0, const(0), m.dtype)

        lower = Lower(read, lambda m: None, heavy)
        if heavy is not None and heavy.rank == n.rank:
            over = tuple(var(f"r{i}", 0, max(upper(d) - 1, 0))
                         for i, d in enumerate(lower.extents()))
            lower.body(variables, over)
            lower.epilogue(n, variables, const(0, accumulator(heavy.dtype)))
        elif n.op == "winograd_in":  # one of the values that go into it
            places = [i * n["tile"] if r > 1 else i for i, r in zip(variables[3:], n["taps"])]
            lower.value(n.inputs[0], (*variables[1:3], *places))
        elif heavy is None and n.op != "scatter":
            lower.value(n, variables)
        for m, index in found:
            yield m, index, variables

    def _reached(self, x: Node, at: Index) -> list[tuple[Node, Index]]:
        """What is read for x at an index: nodes with memory, and where."""
        found: list[tuple[Node, Index]] = []

        def read(n: Node, index: Index, guard: Expr) -> Expr | None:
            if n not in self.memory:
                return None
            found.append((n, index))
            return load(0, const(0), n.dtype)

        Lower(read, lambda n: None).value(x, at)
        return found

    # items

    def emit(self) -> None:
        done: set[Node] = set()
        for n in self.nodes:
            if n in done or n not in self.memory:
                continue
            if n.op in ("input", "const", "result"):
                if n.op == "const" and n not in self.where:
                    self.where[n] = self._const(n)
                if n.op == "result":
                    self._control(n.inputs[0], done)
                continue
            if n.op in g.CONTROL or n in self.skipped():
                continue
            self._compute(n)
        for n, b in self.copied:
            self._into(n, b)

    def skipped(self) -> set[Node]:
        """Nodes that a view above them stores in their stead."""
        if not hasattr(self, "_skipped"):
            self._skipped: set[Node] = set()
            self.through: dict[Node, tuple[Node, tuple[Node, ...]]] = {}
            for n in self.nodes:
                if n not in self.memory or n.op not in ("reshape", "permute"):
                    continue
                views = [n]
                x = n.inputs[0]
                while x.op in ("reshape", "permute") and x not in self.memory and \
                        len(self.users[x]) == 1:
                    views.append(x)
                    x = x.inputs[0]
                if x in self.heavy_of and len(self.users[x]) == 1 and x not in self.direct and \
                        x not in self.slot and not any(x is c for c, _ in self.copied):
                    self._skipped.add(x)
                    self.through[n] = (x, tuple(reversed(views)))
        return self._skipped

    def _const(self, n: Node) -> Buffer:
        if n not in self.consts:
            # whole vectors may be read to the end
            inner = next((i for i, d in enumerate(n.shape) if d == n.value.size), n.rank - 1)
            room = list(n.shape)
            if n.rank and isinstance(room[inner], int):
                full = max(1, self.vector // max(n.dtype.itemsize, 4))
                d = n.value.shape[inner]
                step = min(full, 1 << max(0, (d - 1).bit_length()))
                if n.value.size == d or d >= full:
                    room[inner] = -(-d // step) * step
            layout = Layout(n.shape, tuple(range(n.rank)), ((0, 0),) * n.rank, tuple(room))
            b = Buffer(n.source or "const", n.dtype, layout, "const", array=n.value)
            self.program.buffers.append(b)
            self.consts[n] = b
        return self.consts[n]

    def _sources(self, root: Node, heavy: Node | None) -> tuple[str, ...]:
        """Names of the model's nodes computed with `root`."""
        names: dict[str, None] = {}
        seen: set[Node] = set()
        stack = [root]
        while stack:
            n = stack.pop()
            if n in seen or n.op in LEAVES or n is not root and n in self.memory:
                continue
            seen.add(n)
            if n.source:
                names[n.source] = None
            stack.extend(n.inputs)
        return tuple(reversed(names))

    def _compute(self, n: Node) -> None:
        target = self.where[n]
        if any(h != (0, 0) for h in target.layout.halo) and target.parent is None:
            self.items.append(FillItem(target))
        if n.op == "concat":
            rest = [(x, i) for i, x in enumerate(n.inputs)
                    if self.slot.get(x, (None, 0))[0] is not n]
            for x, i in rest:
                start: Dim = 0
                for y in n.inputs[:i]:
                    start = symbolic.add(start, y.shape[n["axis"]])
                lay = target.layout
                origin = tuple(
                    symbolic.add(o, start) if d == n["axis"] else o
                    for d, o in enumerate(lay.origin or (0,) * n.rank))
                part = Buffer(target.name, n.dtype, Layout(
                    x.shape, lay.order, lay.halo, lay.room, None, origin), parent=target)
                self._into(x, part)
            return
        if n.op == "scatter":
            self._into(n.inputs[0], target)
            self.items.append(ScatterItem(n, target, self.where))
            return
        self.skipped()
        root, views = self.through.get(n, (n, ()))
        if root is not n:
            del self.where[root]  # it has no memory: the view has it
        heavy = self.heavy_of.get(root)
        self.items.append(KernelItem(
            root, heavy, views, target, self.where, self._sources(root, heavy)))

    def _into(self, n: Node, b: Buffer, shift: Expr | None = None) -> None:
        """Writes the value of `n`, which may have memory elsewhere, into b."""
        self.items.append(KernelItem(
            n, None, (), b, self.where, (n.source,) if n.source else (), shift))

    def _control(self, n: Node, done: set[Node]) -> None:
        if n in done:
            return
        done.add(n)
        results = {m["index"]: m for m in self.nodes if m.op == "result" and m.inputs[0] is n}
        names = (n.source,) if n.source else ()
        if n.op == "if":
            sides = []
            for m in results.values():
                self._fresh(m)
            for branch in (n["then"], n["else"]):
                outs = list(branch.outputs.values())
                sides.append(self._inner(
                    branch, n.inputs[1:], [(outs[i], self.where[m]) for i, m in results.items()]))
            self.items.append(IfItem(self.where[n.inputs[0]], sides[0], sides[1], names))
            return
        self._loop(n, results, names)

    def _fresh(self, m: Node) -> Buffer:
        b = Buffer(m.source or m.op, m.dtype, plain(m.shape))
        self.program.buffers.append(b)
        self.where[m] = b
        return b

    def _inner(
        self, body: Graph, arguments: Sequence[Node | Buffer], targets: list[tuple[Node, Buffer]]
    ) -> list[Item]:
        where = {}
        for p, a in zip(body.inputs.values(), arguments):
            where[p] = a if isinstance(a, Buffer) else self.where[a]
        return _Former(self.program, body, where, targets, self.vector, self.most,
                       self.consts).run()

    def _loop(self, n: Node, results: dict[int, Node], names: tuple[str, ...]) -> None:
        body, carried = n["body"], n["carried"]
        trips, cond, *rest = n.inputs
        symbol = f"turn{len(self.program.symbols)}"
        limit = upper(n["limit"])
        self.program.symbols[symbol] = (0, max(limit - 1, 0))
        turn = symbolic.symbol(symbol, 0, max(limit - 1, 0))
        outs = list(body.outputs.values())
        kept: list[Buffer] = []
        for i in range(carried):
            m = results.get(i)
            if m is None:
                m = g.result(n, i, rest[i].shape, rest[i].dtype)
            kept.append(self._fresh(m))
            self._into(rest[i], kept[i])
        ongoing = Buffer(f"{n.source}.cond", BOOL, plain(()))
        counter = Buffer(f"{n.source}.turn", INT64, plain(()))
        self.program.buffers += [ongoing, counter]
        self._into(cond, ongoing)
        count = iota_of(turn)
        first: list[Item] = [KernelItem(count, None, (), counter, {count: SymbolBuffer(turn)}, ())]
        fresh: list[tuple[Node, Buffer]] = []
        late: list[Item] = []
        for i in range(carried):
            t = Buffer(f"{n.source}.next", outs[1 + i].dtype, plain(outs[1 + i].shape))
            self.program.buffers.append(t)
            fresh.append((outs[1 + i], t))
            late.append(CopyItem(t, kept[i]))
        fresh.append((outs[0], ongoing))
        for i in range(carried, len(outs) - 1):
            if i in results:
                m = results[i]
                whole = self._fresh(m)
                # zeros where the loop ends early
                self._into(g.full(m.shape, 0, m.dtype), whole)
                lay = whole.layout
                origin: tuple[Dim, ...] = (turn, *(0,) * (m.rank - 1))
                part = Buffer(whole.name, m.dtype, Layout(
                    (1, *m.shape[1:]), lay.order, lay.halo, lay.room, None, origin), parent=whole)
                fresh.append((g.reshape(outs[1 + i], (1, *outs[1 + i].shape)), part))
        inner = self._inner(body, [counter, *kept, *rest[carried:]], fresh)
        self.items.append(LoopItem(
            symbol, self.where[trips], ongoing, first + inner + late, names))


class SymbolBuffer(Buffer):
    """Stands for a symbol's value where a buffer is expected."""

    def __init__(self, value: Expr) -> None:
        super().__init__("symbol", INT64, plain(()), "symbol")
        self.value = value


def iota_of(turn: Expr) -> Node:
    """A node of its own for a loop's counter."""
    return g.placeholder(turn.attr[0], (), INT64)


def _scalar_const(n: Node) -> bool:
    return n.op == "const" and n.value.size == 1


def _inner_last(rank: int, inner: int) -> tuple[int, ...]:
    return (*(d for d in range(rank) if d != inner), inner)


def contract_lane(h: Node) -> int | None:
    """The output index that runs along the vector: of the second operand only, else of both."""
    a, b = ({i for _, terms in forms for i, _ in terms if i < h.rank} for forms in h["maps"])
    for indices in (b - a, a & b, a | b):
        large = [i for i in indices if upper(h.shape[i]) >= 4]
        if large:
            last: int = max(large)
            return last if indices != b - a else max(large, key=lambda i: upper(h.shape[i]))
    return None


__all__ = [
    "Buffer", "ChainItem", "CopyItem", "FillItem", "IfItem", "Item", "KernelItem", "LoopItem",
    "Program", "ScatterItem", "both", "form", "lift", "reindex", "Shape", "TRUE",
]
