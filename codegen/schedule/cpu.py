"""Schedules for CPUs: which loop is the vector, what is held in registers, what is a piece.

Every kernel has the same form. One index is the vector (`lane`): of the output where its memory is
contiguous, else of the reduction, whose lanes are folded at the end. A register tile of pixels x
vectors is carried through the whole reduction, so that each weight vector is used for every pixel
and each input element for every vector. The loops outside are, from the outside: pieces (what the
threads share), then serial loops. Sizes that the tile does not divide shift the last tile back to
end at the edge (the overlap is computed twice, alike) or mask its vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from tinyedge.dtype import INT32
from tinyedge.graph import Node
from tinyedge.shape import Dim, Shape, dim, upper

from .. import symbolic
from ..ir import (
    LANE,
    Expr,
    For,
    Kernel,
    Set,
    Stmt,
    Store,
    const,
    dump,
    make,
    op,
    reg,
    runs,
    substitute,
    var,
)
from ..llvm_target import CpuTarget
from ..lower import Index, Layout, Lower, combine, identity
from ..symbolic import TRUE, ge0, lift

UNROLL_REDUCTION = 50
"""Most multiply-adds per output element for which a reduction is written out in full."""

SUM_BLOCK = 128
"""Most terms that a sum adds one after the other before it starts a new partial sum."""


HALF_VECTOR = 0.6
"""What an operation on half a 512-bit vector costs of one on a whole: where a processor does 512
bits in two steps it is half, elsewhere nearly as much. A guess between; a search measures."""

PIECES = 48
"""Pieces of a kernel that are enough to balance a few threads."""

TRIED = 6
"""Tiles that a search tries for each width of the vector."""

LARGE_WEIGHTS = 1 << 19
"""Bytes of weights that will not be in the second-level cache when they are needed again."""
FEW_TILES = 32
"""Tiles of pixels that use a panel of weights, up to which it pays to fetch the next one early."""
CACHE_LINE = 64
AHEAD = 4096
"""Bytes by which weights that are used once are fetched ahead: what a memory's delay brings."""


@dataclass
class Spec:
    """What the schedule is asked for.

    lower: makes expressions. root: the node that is stored, of shape `domain`. order: the domain's
    dimensions from outermost to innermost as the target's memory has them. store: index -> (element
    offset in buffer 0, guard). pack: called with a layout for the weights if the heavy node is a
    contraction whose second operand is a constant; `constant` is that operand's index form.
    """

    lower: Lower
    root: Node
    domain: Shape
    order: tuple[int, ...]
    store: Callable[[Index], tuple[Expr, Expr]]
    pack: Callable[[Layout], None] | None = None


@dataclass(frozen=True)
class Choice:
    """What a search may set: lanes of the vector, and the register tile of pixels x vectors."""

    lanes: int
    pixels: int
    vectors: int


@dataclass
class Axis:
    """One loop of the output: a dimension of the domain, or several that memory allows to join.

    var: runs over `extent`. dims: the dimensions, outermost first.
    """

    var: Expr
    extent: Dim
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Nest:
    """A scheduled kernel whose outer loops have not become the grid yet.

    loops: (variable, extent), outermost first. body: what they enclose. lanes: as in a `Kernel`.
    """

    loops: tuple[tuple[Expr, Expr], ...]
    body: tuple[Stmt, ...]
    lanes: int = 1


def vector_of(width: int, bits: int) -> int:
    return max(1, width * 8 // max(bits, 32))


def _loads(e: Expr, seen: dict[Expr, None]) -> dict[Expr, None]:
    stack, known = [e], set[Expr]()
    while stack:
        x = stack.pop()
        if x in known:
            continue
        known.add(x)
        if x.op == "load":
            seen[x] = None
        stack.extend(x.args)
    return seen


def coefficient(index: Expr, v: Expr) -> int | None:
    """How far `index` moves when v grows by one; None where that is not constant."""
    if v not in index.vars:
        return 0
    terms, _ = symbolic.linear(index)
    rest = [t for t in terms if t is not v and v in t.vars]
    return None if rest else terms.get(v, 0)


def interleaved(index: Expr, v: Expr, lanes: int) -> int:
    """In how many contiguous pieces a vector along v reads what `index` says; 0: it does not."""
    lane = var(LANE, 0, lanes - 1)
    whole = var("whole", 0, max(v.hi // lanes, 0))
    found = runs(substitute(index, {v: whole * lanes + lane}), lane, lanes)
    return len(found) if found else 0


class Scheduler:
    """Schedules one kernel for a target; see the module's page.

    feature: a dimension whose places are to stay together in a piece (see `chain`): only it may be
    the vector, and tiles do not overlap.
    """

    def __init__(self, spec: Spec, target: CpuTarget, choice: Choice | None = None,
                 feature: int | None = None) -> None:
        self.spec, self.target, self.choice = spec, target, choice
        self.width, self.dots = target.vector_bytes, target.dots
        self.feature = feature
        self.quad, self.count, self.dot = -1, 1, ""
        self.lower = spec.lower
        self.heavy = spec.lower.heavy
        self.bits = max(spec.root.dtype.bits, *(
            [spec.lower.fold()[1].bits] if self.heavy is not None else [8]))

        self.axes = list(self.spec.order)
        self.panel, self.lanes = 0, 1
        self.outer: list[tuple[Expr, Expr]] = []  # (variable, extent), outermost first
        over = self.lower.extents() if self.heavy is not None else ()
        self.over_extents = over
        # plain variables first, to see how memory moves with each
        self.plain = tuple(
            var(f"o{i}", 0, upper(d) - 1) if d != 1 else const(0)
            for i, d in enumerate(self.spec.domain)
        )
        self.plain_over = tuple(
            var(f"r{i}", 0, upper(d) - 1) if d != 1 else const(0) for i, d in enumerate(over)
        )
        exprs = []
        total = None
        if self.heavy is not None:
            kind, t = self.lower.fold()
            exprs.append(self.lower.body(self.plain, self.plain_over))
            total = reg("acc", t)
        exprs.append(self.lower.epilogue(self.spec.root, self.plain, total))
        store, guard = self.spec.store(self.plain)
        self.body_loads = list(_loads(exprs[0], {})) if self.heavy is not None else []
        self.tail_loads = list(_loads(exprs[-1], {}))
        self.store_index = store
        self.exprs = [*exprs, store, guard]

    def key(self) -> str:
        """Text that determines the schedule and the kernel's code."""
        h, pack = self.heavy, self.spec.pack is not None
        fold = (*self.lower.fold(), self.over_extents) if h is not None else ()
        weights = (h.inputs[1].shape, h["maps"][1]) if h is not None and pack else ()
        return f"{self.spec.domain} {self.axes} {fold} {weights}\n" \
            f"{dump(self.exprs)}"

    def kernel(self) -> Kernel:
        """The scheduled kernel; its buffers and symbols are filled in by the caller."""
        return finish(self.nest())

    def nest(self) -> Nest:
        """The scheduled kernel before it has a grid."""
        self.choose_lane()
        if self.heavy is not None:
            self.join_axes()
            self.quad = self.find_quad()
        return self.build()

    def find_quad(self) -> int:
        """The reduction index, if any, of which neighbours that fill 32 bits are multiplied and
        added at once: neighbours in memory in the first operand, and to be packed so in the
        second."""
        h = self.heavy
        if h is None or h.op != "contract" or self.spec.pack is None or self.lane_axis < 0 or \
                (kinds := (h.inputs[0].dtype, h.inputs[1].dtype)) not in self.dots:
            return -1
        self.dot, self.count = self.dots[kinds], 32 // kinds[0].bits
        rank = len(self.spec.domain)
        single = {terms[0][0] for _, terms in h["maps"][1] if len(terms) == 1}
        data = [x for x in self.body_loads if x.attr != self.constant_operand()]
        if len(data) != 1 or len(data[0].args) != 1 or self.lane_axis not in single or \
                self.plain[self.lane_axis] in data[0].args[0].vars:
            return -1
        return next((i for i, (v, n) in enumerate(zip(self.plain_over, self.over_extents))
                     if v.op == "var" and isinstance(n, int) and n % self.count == 0 and
                     rank + i in single and coefficient(data[0].args[0], v) == 1), -1)

    def choices(self) -> list[Choice]:
        """Schedules that are worth a measurement, the cost model's own first; instead of `kernel`.

        Half a vector is half the work on some processors, and wastes less of a row's end.
        """
        if self.heavy is None or self.heavy.op != "contract":
            return []
        self.choose_lane()
        if self.lane_axis < 0:
            return []
        self.join_axes()
        out = []
        full = self.lanes
        for lanes in (full, full // 2) if full > 4 else (full,):
            self.lanes = lanes
            out += [Choice(lanes, pt, kt) for _, kt, pt in self.tiles()[1][:TRIED]]
        self.lanes = full
        return out

    def join_axes(self) -> None:
        """Joins neighbouring axes, not the lane's, where every access stays a straight line."""
        self.joined = [Axis(self.plain[i], self.spec.domain[i], (i,)) for i in self.axes
                       if self.plain[i].op == "var"]
        i = 0 if self.feature is None else len(self.joined)
        while i + 1 < len(self.joined):
            a, b = self.joined[i], self.joined[i + 1]
            dims = a.dims + b.dims
            if self.lane_axis in dims or not all(
                isinstance(x.extent, int) for x in (a, b)
            ) or (both_ := self.try_join(dims)) is None:
                i += 1
                continue
            self.joined[i:i + 2] = [both_]

    def try_join(self, dims: tuple[int, ...]) -> Axis | None:
        size = prod(upper(self.spec.domain[d]) for d in dims)
        m = var("m" + "_".join(map(str, dims)), 0, size - 1)
        index = list(self.plain)
        self.spread(m, dims, index)
        where = tuple(index)
        kind, t = self.lower.fold()
        exprs = [self.lower.body(where, self.plain_over),
                 self.lower.epilogue(self.spec.root, where, reg("acc", t))]
        store, guard = self.spec.store(where)
        loads = [x for e in exprs for x in _loads(e, {})]
        if not all(_even(e, m) for e in (*exprs, store, guard)) or \
                any(coefficient(x.args[0], m) is None for x in loads) or \
                coefficient(store, m) is None:
            return None
        self.plain = where
        self.body_loads = list(_loads(exprs[0], {}))
        self.tail_loads = list(_loads(exprs[1], {}))
        return Axis(m, size, dims)

    def spread(self, m: Expr, dims: tuple[int, ...], index: list[Expr]) -> None:
        """Sets the indices of joined dimensions from their joint variable."""
        rest = m
        for d in reversed(dims):
            n = self.spec.domain[d]
            if self.plain[d].op == "const":
                index[d] = const(0)
            else:
                index[d] = rest % n if d != dims[0] else rest
                rest = rest // n

    # choosing

    def choose_lane(self) -> None:
        """Sets lane_axis (of the domain), or lane_over (of the reduction), and lanes."""
        full = vector_of(self.width, self.bits)
        constant = self.constant_operand()

        def cost(v: Expr, loads: Sequence[Expr], lanes: int) -> float:
            c = 0.0
            for x in loads:
                if constant is not None and x.attr == constant:
                    c += 1.0
                    continue
                k = coefficient(x.args[0], v)
                if k is None and (pieces := interleaved(x.args[0], v, lanes)):
                    c += 2.0 * pieces
                else:
                    c += {0: 0.5, 1: 1.0}.get(k if k is not None else -1, 2.0 * full)
            return c

        best: tuple[float, str, int, int] | None = None
        options: list[tuple[str, int, Expr, Dim]] = [
            ("axis", i, v, self.spec.domain[i]) for i, v in enumerate(self.plain) if v.op == "var"
        ]
        options += [
            ("over", i, v, self.over_extents[i])
            for i, v in enumerate(self.plain_over) if v.op == "var"
        ]
        if self.feature is not None:
            options = [o for o in options if o[0] == "over" or o[1] == self.feature]
        widths = (full, full // 2) if self.width == 64 and self.heavy is not None and \
            self.heavy.op == "contract" else (full,)
        for (kind, i, v, extent), wide in product(options, widths):
            n = upper(extent)
            lanes = min(wide, 1 << max(0, (n - 1).bit_length()))
            if self.choice is not None:
                lanes = min(lanes, self.choice.lanes)
            if lanes < 2 or n < 1:
                continue
            useful = n / (-(-n // lanes) * lanes) * lanes
            work = cost(v, self.body_loads, lanes)
            if kind == "axis":
                k = coefficient(self.store_index, v)
                tail = cost(v, self.tail_loads, lanes) + {1: 1.0}.get(k if k is not None else -1,
                                                               2.0 * full)
                each = upper(symbolic_size(self.over_extents)) if self.heavy is not None else 0
                total = (work * max(each, 1) + tail if each else tail) / useful
            else:
                each = upper(symbolic_size(self.over_extents))
                total = (work * each + 8.0 * lanes) / useful * 1.05
            if wide < full:
                total *= HALF_VECTOR
            if best is None or total < best[0]:
                best = (total, kind, i, lanes)
        self.lane_axis = self.lane_over = -1
        self.lanes = 1
        scalar = 1.0 * (len(self.body_loads) * max(
            upper(symbolic_size(self.over_extents)), 1) + len(self.tail_loads) + 1)
        if best is not None and best[0] < scalar:
            self.lanes = best[3]
            if best[1] == "axis":
                self.lane_axis = best[2]
            else:
                self.lane_over = best[2]

    def constant_operand(self) -> int | None:
        """Buffer number of weights that may be laid out freely."""
        return 1 if self.spec.pack is not None else None

    def tile(self) -> tuple[int, int, int]:
        """(number of the pixel axis in `joined` or -1, pixels, vectors) held in registers."""
        if self.heavy is None:
            return -1, 1, 1
        axis, found = self.tiles()
        if self.choice is not None:
            return axis, self.choice.pixels, self.choice.vectors
        return axis, found[0][2], found[0][1]

    def tiles(self) -> tuple[int, list[tuple[float, int, int]]]:
        """(number of the pixel axis or -1, (cost, vectors, pixels) of every tile, best first)."""
        assert self.heavy is not None
        # a register for each accumulator, each vector of weights and one pixel: one more would be
        # spilled in the innermost loop
        limit = self.target.registers
        if self.heavy.op == "reduce":
            limit //= 2  # partial sums have registers of their own
        lane_extent = upper(self.spec.domain[self.lane_axis]) if self.lane_axis >= 0 else 1
        n = -(-lane_extent // self.lanes)
        lane = self.plain[self.lane_axis] if self.lane_axis >= 0 else None
        # pixels: the innermost other axis that shares something (a load that it does not move)
        best_axis, best_share = -1, -1.0
        for j, axis in enumerate(self.joined):
            if self.lane_axis in axis.dims or not isinstance(axis.extent, int):
                continue
            shared = sum(axis.var not in x.args[0].vars for x in self.body_loads)
            share = shared + 0.01 * (j == len(self.joined) - 1)
            score = (share + 0.5) * min(axis.extent, 8)
            if score >= best_share:
                best_axis, best_share = j, score
        pixels = upper(self.joined[best_axis].extent) if best_axis >= 0 else 1
        # loads that move with the lane only (weights) and with the pixel only (inputs)
        pixel = self.joined[best_axis].var if best_axis >= 0 else None

        def uses(x: Expr, v: Expr | None) -> bool:
            return v is not None and v in x.args[0].vars
        out: list[tuple[float, int, int]] = []
        weigh_both = sum(uses(x, lane) and uses(x, pixel) for x in self.body_loads)
        weigh_lane = sum(uses(x, lane) and not uses(x, pixel) for x in self.body_loads)
        weigh_pixel = sum(uses(x, pixel) and not uses(x, lane) for x in self.body_loads)
        # a window that slides along the pixels is loaded once for its neighbours too
        for kt, pt in product(range(1, 9), range(1, 29)):
            if kt * pt + kt + 1 > limit or kt > n or pt > pixels:
                continue
            if weigh_both and (kt > 1 or pt > 8) or self.feature is not None and pixels % pt:
                continue
            tiles = -(-n // kt) * -(-pixels // pt)
            loads = kt * weigh_lane + pt * weigh_pixel + kt * pt * weigh_both * 0.5
            # few accumulators leave the multiply-add's latency in the open
            latency = 8.0 / (kt * pt) if kt * pt < 8 else 1.0
            each = max(kt * pt * latency, 0.7 * loads) + 0.3 * loads + 1.5
            out.append((tiles * each, kt, pt))
        return best_axis, sorted(out, key=lambda t: round(t[0], 3))

    # building

    def build(self) -> Nest:
        lane = var(LANE, 0, self.lanes - 1) if self.lanes > 1 else const(0)
        domain = self.spec.domain
        merged = self.merge() if self.heavy is None and self.feature is None else None
        if merged is not None:
            return self.flat(merged, lane)
        if self.heavy is None:
            self.joined = [Axis(self.plain[i], domain[i], (i,)) for i in self.axes
                           if self.plain[i].op == "var"]
        pixel_axis, pt, kt = self.tile()
        if self.spec.pack is not None and self.heavy is not None:
            self.pack(kt)
        index: list[Expr] = [const(0)] * len(domain)
        loops = self.outer
        tp = var("tp", 0, pt - 1) if pt > 1 else const(0)
        tk = var("tk", 0, kt - 1) if kt > 1 else const(0)
        for j, axis in enumerate(self.joined):
            extent, name = axis.extent, "_".join(map(str, axis.dims))
            if self.lane_axis in axis.dims:
                step = self.lanes * kt
                v = self.vectors(f"v{name}", extent, step, loops)
                at = v * step + tk * self.lanes + lane
            elif j == pixel_axis and pt > 1:
                assert isinstance(extent, int)
                v = self.loop(f"p{name}", -(-extent // pt), loops)
                at = v * pt
                if extent % pt:
                    at = symbolic.minimum(at, extent - pt)
                at = at + tp
            else:
                at = self.loop(f"o{name}", extent, loops)
            self.spread(at, axis.dims, index)
        if self.feature is not None:
            # the same order in all kernels of a chain: by dimension, the feature innermost
            by_name = {f"{kind}{d}": d for d in range(len(domain)) for kind in "vpo"}
            loops.sort(key=lambda p: ((d := by_name[p[0].attr[0]]) == self.feature, d))
        elif self.heavy is not None and self.spec.pack is not None and self.lane_axis >= 0:
            # weights outermost: a panel of them stays in the cache for all the pixels
            loops.sort(key=lambda p: p[0].op != "var" or p[0].attr[0] != f"v{self.lane_axis}")
        where = tuple(index)
        tiles = [(p, k) for p in range(pt) for k in range(kt)]
        envs = [{v: const(c) for v, c in ((tp, p), (tk, k)) if v.op == "var"} for p, k in tiles]
        body: list[Stmt] = []
        total: Expr | None = None
        if self.heavy is not None:
            total = self.reduction(where, lane, envs, body)
        value = self.lower.epilogue(self.spec.root, where, total)
        offset, guard = self.spec.store(where)
        memo: list[dict[Expr, Expr]] = [{} for _ in envs]
        for j, env in enumerate(envs):
            full = dict(env)
            if total is not None:
                full[total] = self.totals[j]
            body.append(Store(
                0, substitute(offset, env), substitute(value, full, memo[j]),
                None if guard is TRUE else _known(substitute(guard, env)),
            ))
        return Nest(tuple(loops), tuple(body), self.lanes)

    def vectors(
        self, name: str, extent: Dim, step: int, loops: list[tuple[Expr, Expr]]
    ) -> Expr:
        """The number of the tile along the lane's axis."""
        return self.loop(name, ceil_div(extent, step), loops)

    def panel_width(self, extent: int, step: int) -> int:
        """How many neighbours along the lane's axis stand together in packed weights."""
        return step

    def fetches(self, base: Expr, tiles: Sequence[tuple[Expr, Expr]],
                turns: Sequence[tuple[Expr, Expr]]) -> list[Expr]:
        """What to fetch into the second-level cache in each turn of the reduction's loops.

        Weights that no cache holds come from memory while their panel's first tile is computed,
        which then takes longer than all others together where these are few. So the next panel is
        fetched meanwhile, a part by every tile. A panel with one tile is fetched a little ahead.
        base: where the panel begins. tiles: the loops over the tiles that use it.
        """
        h = self.heavy
        assert h is not None
        count = prod(e.hi for _, e in tiles)
        if count > FEW_TILES or not self.target.prefetches or \
                h.inputs[1].value.nbytes < LARGE_WEIGHTS or \
                any(e.op != "const" for _, e in (*tiles, *turns)):
            return []
        line = CACHE_LINE // h.inputs[1].dtype.itemsize
        steps = prod(e.hi for _, e in turns)
        each = -(-self.panel // (line * count * steps))
        tile = turn = const(0)
        for v, extent in tiles:
            tile = tile * extent + v
        for v, extent in turns:
            turn = turn * extent + v
        # later tiles than the panel has parts ask for the last part again
        at = symbolic.minimum(tile, (self.panel - 1) // (line * each * steps)) * steps + turn
        ahead = self.panel if count > 1 else AHEAD // CACHE_LINE * line
        return [make("prefetch", (base + ahead + (at * each + i) * line,), 1, INT32)
                for i in range(each)]

    def loop(self, name: str, extent: Dim | Expr, loops: list[tuple[Expr, Expr]]) -> Expr:
        e = lift(extent)
        if e.op == "const" and e.attr == 1:
            return const(0)
        v = var(name, 0, e.hi - 1)
        loops.append((v, e))
        return v

    def reduction(
        self, where: Index, lane: Expr, envs: list[dict[Expr, Expr]], body: list[Stmt]
    ) -> Expr:
        """Adds the statements of the fold; returns the register that stands for its value."""
        kind, t = self.lower.fold()
        along = self.lane_over >= 0
        vector = (lane,) if lane.op == "var" and (along or self.lane_axis >= 0) else ()
        accs = [reg(f"acc{j}", t, vector) for j in range(len(envs))]
        start = identity(kind, t)
        for a in accs:
            body.append(Set(a, start))
        extents = list(self.over_extents)
        if self.quad >= 0:
            extents[self.quad] = upper(extents[self.quad]) // self.count
        sequence = self.reduction_order()
        unrolled: list[int] = []
        if not along and all(isinstance(d, int) for d in extents):
            # innermost loops written out while the code stays small
            size = 1
            # an engine for WebAssembly keeps less of long code in registers, and it is downloaded
            short = len(envs) <= 8 and self.target.family != "wasm"
            room = UNROLL_REDUCTION if short else max(1, 64 // len(envs))
            for i in reversed(sequence):
                if size * upper(extents[i]) * len(envs) > room * 8 or \
                        size * upper(extents[i]) > UNROLL_REDUCTION:
                    break
                size *= upper(extents[i])
                unrolled.append(i)

        def emit(over: list[Expr], into: list[Expr]) -> list[Stmt]:
            if self.quad >= 0:
                over = [o * self.count if i == self.quad else o for i, o in enumerate(over)]
            e = self.lower.body(where, tuple(over))
            if self.quad >= 0:
                x, w = sorted(_loads(e, {}), key=lambda n: n.attr == self.constant_operand())
                words = [make("word", o.args, o.attr, INT32) for o in (x, w)]
                e = make("dot", (reg("sum", t, vector), *words), self.dot, t)
            if along:
                r = over[self.lane_over]
                inside = ge0(lift(extents[self.lane_over]) - 1 - r)
                if inside is not TRUE:
                    e = op("where", inside, e, start)
            out: list[Stmt] = []
            names = [v for o in over for v in o.vars if v.op == "var" and
                     v.attr[0].startswith("u")]
            combos = list(product(*(range(v.hi + 1) for v in names)))
            for number, combo in enumerate(combos):
                inner = {v: const(c) for v, c in zip(names, combo)}
                out += [Set(reg("ahead", INT32), f) for i, f in enumerate(fetches)
                        if i * len(combos) // len(fetches) == number]
                for a, env in zip(into, envs):
                    one = substitute(e, {**env, **inner})
                    out.append(Set(a, combine(kind, a, one) if self.quad < 0 else
                                   make("dot", (a, *one.args[1:]), self.dot, t)))
            return out

        over: list[Expr] = [const(0)] * len(extents)
        loops: list[tuple[Expr, Expr]] = []
        for i in sequence:
            if i in unrolled:
                over[i] = var(f"u{i}", 0, upper(extents[i]) - 1) if extents[i] != 1 else const(0)
            elif i != self.lane_over:
                over[i] = self.loop(f"r{i}", extents[i], loops)
        rest: list[Stmt] = []
        fetches: list[Expr] = []
        if self.panel and self.lane_axis >= 0:
            first = self.lower.body(where, tuple(const(0) for _ in extents))
            base = next(x.args[0] for x in _loads(first, {}) if x.attr == self.constant_operand())
            base = substitute(base, {v: const(0) for v in (*envs[0], lane)})
            ends = [i + 1 for i, (v, _) in enumerate(self.outer) if v in base.vars]
            fetches = self.fetches(base, self.outer[max(ends, default=0):], loops)
        if along:
            n = extents[self.lane_over]
            whole = lift(n) // self.lanes
            v = self.loop("rv", whole, loops) if whole.hi > 0 else const(0)
            if not isinstance(n, int) or n % self.lanes:
                # what is left of the last vector, once for every turn of the other loops
                over[self.lane_over] = whole * self.lanes + lane
                rest = emit(over, accs)
                for v2, extent in reversed([p for p in loops if p[0] is not v]):
                    rest = [For(v2, extent, tuple(rest))]
            over[self.lane_over] = v * self.lanes + lane
        assert self.heavy is not None
        long = kind == "sum" and t.is_float and self.heavy.op == "reduce" and \
            prod(e.hi for _, e in loops) > SUM_BLOCK
        if along and whole.hi == 0:
            body += rest
        elif not long:
            stmts = emit(over, accs)
            for v2, extent in reversed(loops):
                stmts = [For(v2, extent, tuple(stmts))]
            body += stmts + rest
        else:
            # long sums are made of short ones: rounding errors grow with the longest chain
            parts = [reg(f"part{j}", t, vector) for j in range(len(envs))]
            env2: dict[Expr, Expr] = {}
            v2, extent = loops.pop()
            if extent.hi > 2 * SUM_BLOCK:
                blocks = (extent + (SUM_BLOCK - 1)) // SUM_BLOCK
                outer, v3 = var("rb", 0, blocks.hi - 1), var("rs", 0, SUM_BLOCK - 1)
                env2[v2] = outer * SUM_BLOCK + v3
                loops.append((outer, blocks))
                v2, extent = v3, symbolic.minimum(const(SUM_BLOCK), extent - outer * SUM_BLOCK)
            memo: dict[Expr, Expr] = {}
            inner_stmts = tuple(replaced(s, env2, memo) for s in emit(over, parts))
            stmts = [*(Set(q, start) for q in parts), For(v2, extent, inner_stmts),
                     *(Set(a, combine(kind, a, q)) for a, q in zip(accs, parts))]
            for v4, extent in reversed(loops):
                stmts = [For(v4, extent, tuple(stmts))]
            body += stmts + rest
        self.totals: list[Expr] = list(accs)
        if along:
            self.totals = []
            for j, a in enumerate(accs):
                lims = t.limits if not t.is_float else (0, 0)
                folded = make("hreduce", (a,), kind, t, *lims)
                one = reg(f"sum{j}", t)
                body.append(Set(one, folded))
                self.totals.append(one)
        return reg("total", t, vector if not along else ())

    def reduction_order(self) -> list[int]:
        """Reduction indices, outermost first: the one that moves least in memory innermost."""
        def reach(i: int) -> tuple[int, int]:
            v = self.plain_over[i]
            if v.op != "var":
                return (0, i)
            steps = [abs(c) for x in self.body_loads
                     if (c := coefficient(x.args[0], v)) is not None and c
                     and x.attr != self.constant_operand()]
            return (max(steps, default=0), -i)
        return sorted(range(len(self.over_extents)), key=reach, reverse=True)

    def pack(self, kt: int) -> None:
        """Lays the weights out in the order in which the tile reads them."""
        h = self.heavy
        assert h is not None and self.spec.pack is not None
        w, forms = h.inputs[1], h["maps"][1]
        rank = len(self.spec.domain)
        where = {terms[0][0]: d for d, (_, terms) in enumerate(forms) if len(terms) == 1}
        sequence = [where[rank + i] for i in self.reduction_order() if rank + i in where]
        lane_dim = where.get(self.lane_axis) if self.lane_axis >= 0 else \
            where.get(rank + self.lane_over)
        self.panel = prod(upper(w.shape[d]) for d in sequence) * self.lanes * kt
        others = [d for d in range(w.rank) if d not in sequence and d != lane_dim]
        order = [*others, *(d for d in sequence if d != lane_dim)]
        room = list(w.shape)
        block = None
        if lane_dim is not None:
            step = self.lanes * (kt if self.lane_axis >= 0 else 1)
            size = w.shape[lane_dim]
            assert isinstance(size, int)
            if self.lane_axis >= 0:
                step = self.panel_width(size, step)
            whole = room[lane_dim] = -(-size // step) * step
            order.append(lane_dim)
            if self.lane_axis >= 0 and whole > step:
                block = (lane_dim, step)
        self.spec.pack(Layout(
            w.shape, tuple(order), ((0, 0),) * w.rank, tuple(room), block,
            quad=(where[rank + self.quad], self.count) if self.quad >= 0 else None))

    # elementwise kernels

    def merge(self) -> tuple[list[int], Expr] | None:
        """All axes as one where memory allows: (axes, their joint variable)."""
        axes = [i for i in self.axes if self.plain[i].op == "var"]
        if not axes or self.lane_axis != axes[-1] or self.lanes < 2 or \
                not all(isinstance(self.spec.domain[i], int) for i in axes):
            return None
        for first in range(len(axes)):
            joint = axes[first:]
            size = prod(upper(self.spec.domain[i]) for i in joint)
            m = var("m", 0, size - 1)
            index = list(self.plain)
            rest = m
            for i in reversed(joint):
                n = self.spec.domain[i]
                index[i] = rest % n if i != joint[0] else rest
                rest = rest // n
            value = self.lower.epilogue(self.spec.root, tuple(index), None)
            offset, guard = self.spec.store(tuple(index))
            if guard is TRUE and coefficient(offset, m) == 1 and _straight(value, m):
                return joint, m
        return None

    def flat(self, merged: tuple[list[int], Expr], lane: Expr) -> Nest:
        """One long loop over joined axes, then what is left of the last vector."""
        joint, m = merged
        loops: list[tuple[Expr, Expr]] = []
        index: list[Expr] = [const(0)] * len(self.spec.domain)
        for i in self.axes:
            if i not in joint and self.plain[i].op == "var":
                index[i] = self.loop(f"o{i}", self.spec.domain[i], loops)
        size = m.hi + 1
        whole = size // self.lanes
        unroll = 4 if whole >= 4 else 1

        def stores(start: Expr, vectors: int, masked: bool) -> list[Stmt]:
            out: list[Stmt] = []
            for u in range(vectors):
                at = start + u * self.lanes + lane
                rest = at
                into = list(index)
                for i in reversed(joint):
                    n = self.spec.domain[i]
                    into[i] = rest % n if i != joint[0] else rest
                    rest = rest // n
                value = self.lower.epilogue(self.spec.root, tuple(into), None)
                offset, _ = self.spec.store(tuple(into))
                guard = ge0(const(size - 1) - at) if masked else TRUE
                out.append(Store(0, offset, value, None if guard is TRUE else guard))
            return out

        chunk = 64
        vectors = whole // unroll
        outer = max(1, -(-vectors // chunk))
        body: list[Stmt] = []
        c = self.loop("c", outer, loops)
        left = symbolic.minimum(const(chunk), const(vectors) - c * chunk)
        v = var("w", 0, chunk - 1)
        if vectors:
            # built with a variable of exact bounds, so that nothing looks out of range
            exact = var("x", 0, vectors - 1)
            env = {exact: c * chunk + v if outer > 1 else v}
            memo: dict[Expr, Expr] = {}
            main = stores(exact * (unroll * self.lanes), unroll, False)
            body.append(For(v, left, tuple(replaced(s, env, memo) for s in main)))
        done = vectors * unroll
        tail: list[Stmt] = []
        for k in range(done, whole):
            tail += stores(const(k * self.lanes), 1, False)
        if size % self.lanes:
            tail += stores(const(whole * self.lanes), 1, True)
        if tail:
            # with the first chunk; written as a loop that runs once there and never elsewhere
            once = var("once", 0, 0)
            if c.op == "const":
                body += tail
            else:
                body.append(For(once, symbolic.maximum(const(1) - c, const(0)), tuple(tail)))
        return Nest(tuple(loops), tuple(body), self.lanes)


def finish(nest: Nest) -> Kernel:
    """The kernel whose grid is the outer loops."""
    grid = const(1)
    taken = 0
    for _, extent in nest.loops:
        # enough pieces to balance a few threads, no more: each costs its own set-up
        if grid.hi >= PIECES:
            break
        grid = grid * extent
        taken += 1
    g = var("g", 0, max(grid.hi - 1, 0))
    return Kernel("k", (), (), g, grid, pieces(nest, taken, g), nest.lanes)


def pieces(nest: Nest, taken: int, g: Expr) -> tuple[Stmt, ...]:
    """The statements of piece number g, the outermost `taken` loops being numbered by it."""
    outer, stmts = nest.loops[:taken], nest.body
    for v, extent in reversed(nest.loops[taken:]):
        stmts = (For(v, extent, stmts),)
    env: dict[Expr, Expr] = {}
    for n, (v, extent) in enumerate(reversed(outer)):
        last = n == len(outer) - 1
        env[v] = g if last else g % extent
        g = g if last else g // extent
    if env:
        memo: dict[Expr, Expr] = {}
        stmts = tuple(replaced(s, env, memo) for s in stmts)
    return stmts


def _straight(value: Expr, m: Expr) -> bool:
    """Whether every access is to neighbouring places for neighbouring m, and m is used evenly."""
    return _even(value, m) and all(
        coefficient(x.args[0], m) in (0, 1) for x in _loads(value, {}))


def _even(value: Expr, m: Expr) -> bool:
    """Whether no quotient, remainder or condition of m occurs."""
    stack, seen = [value], set[Expr]()
    while stack:
        x = stack.pop()
        if x in seen or m not in x.vars:
            continue
        seen.add(x)
        if x.op in ("floordiv", "mod", "ge0"):
            return False
        stack.extend(x.args)
    return True


def _known(guard: Expr) -> Expr | None:
    return None if guard is TRUE else guard


def replaced(s: Stmt, env: dict[Expr, Expr], memo: dict[Expr, Expr]) -> Stmt:
    """A statement with variables replaced; calls with one env share a memo."""
    if isinstance(s, For):
        return For(s.var, substitute(s.extent, env, memo),
                   tuple(replaced(b, env, memo) for b in s.body))
    if isinstance(s, Set):
        return Set(s.reg, substitute(s.value, env, memo))
    guard = None if s.guard is None else _known(substitute(s.guard, env, memo))
    return Store(s.buffer, substitute(s.index, env, memo), substitute(s.value, env, memo), guard)


def ceil_div(a: Dim, b: int) -> Dim:
    return -(-a // b) if isinstance(a, int) else dim((a + (b - 1)) // b)


def symbolic_size(extents: Shape) -> Dim:
    out = const(1)
    for d in extents:
        out = out * d
    return dim(out)


__all__ = ["Scheduler", "Spec", "vector_of"]
