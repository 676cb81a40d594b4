"""Schedules for GPUs: which invocation computes what, and what it holds in registers.

Beside `cpu`, whose parts it is made of: which index is the vector (of four), which neighbouring
axes join, how weights are laid out. What differs is what a piece is. Every invocation has one: a
register tile of pixels x vectors for contractions, one vector for elementwise kernels, so that the
whole output is the grid. Neighbouring invocations take neighbouring vectors, so that what they read
of weights and write is contiguous. The input of a contraction is read by groups of four along the
reduction. Where outputs are too few to keep a device busy and reductions are long, a workgroup (a
team) shares each piece and folds its parts in a tree.

All limits are data (`tinyedge.codegen.llvm_target.Gpu`): nothing here knows a device.
"""

from __future__ import annotations

from itertools import product

from tinyedge.shape import Dim, upper

from .. import symbolic
from ..ir import TEAM, Expr, For, Kernel, Set, Stmt, Store, const, make, op, reg, substitute, var
from ..llvm_target import CpuTarget
from ..lower import Index, combine, identity
from ..symbolic import TRUE, both, ge0, lift
from . import cpu
from .cpu import Nest, Spec, coefficient, pieces, symbolic_size

UNROLLED = 16
"""Most steps of a reduction that are written out, and most multiply-adds of vectors in one turn is
four times that: longer code gains little, and is what a page has to load."""

GROUP = 4
"""Neighbours along a reduction that are read as one vector."""

PANEL = 64
"""Output channels whose weights stand together: 256 bytes, two cache lines of most devices."""

TEAM_LENGTH, TEAM_SHARE = 128, 4
"""Steps of a reduction from which on a team shares it, and how many times as many as outputs they
have to be: otherwise there are invocations enough, and barriers and trees are not free."""


class Scheduler(cpu.Scheduler):
    """Schedules one kernel for a GPU; see the module's page."""

    def __init__(self, spec: Spec, target: CpuTarget) -> None:
        super().__init__(spec, target)
        assert target.gpu is not None
        self.gpu = target.gpu
        self.team: Expr | None = None
        self.quad = -1

    def key(self) -> str:
        return f"gpu\n{super().key()}"

    def kernel(self) -> Kernel:
        """The scheduled kernel; its buffers and symbols are filled in by the caller."""
        self.choose_lane()
        if any(_wide(e) for e in self.exprs):
            self.lanes, self.lane_axis, self.lane_over = 1, -1, -1
        if self.heavy is not None:
            self.join_axes()
            if self.shared() > 1:
                self.choice = cpu.Choice(self.lanes, 1, 1)
        return grid(self.build(), self.gpu.workgroup if self.team is not None else 1)

    def flat(self, merged: tuple[list[int], Expr], lane: Expr) -> Nest:
        """One vector for each invocation; the last one masked where the size asks for it."""
        joint, m = merged
        loops: list[tuple[Expr, Expr]] = []
        index: list[Expr] = [const(0)] * len(self.spec.domain)
        for i in self.axes:
            if i not in joint and self.plain[i].op == "var":
                index[i] = self.loop(f"o{i}", self.spec.domain[i], loops)
        size = m.hi + 1
        at = self.loop("m", -(-size // self.lanes), loops) * self.lanes + lane
        rest = at
        for i in reversed(joint):
            n = self.spec.domain[i]
            index[i] = rest % n if i != joint[0] else rest
            rest = rest // n
        value = self.lower.epilogue(self.spec.root, tuple(index), None)
        offset, guard = self.spec.store(tuple(index))
        guard = both(guard, ge0(const(size - 1) - at))
        return Nest(tuple(loops), (Store(0, offset, value, cpu._known(guard)),), self.lanes)

    def tiles(self) -> tuple[int, list[tuple[float, int, int]]]:
        """(number of the pixel axis or -1, (cost, vectors, pixels) of every tile, best first).

        An invocation loads a vector of weights for each vector, and an element of input for each
        pixel (four of them at once where they are neighbours). Tiles are the larger the less is
        loaded, and no larger than leaves the device enough invocations.
        """
        assert self.heavy is not None
        lane_extent = upper(self.spec.domain[self.lane_axis]) if self.lane_axis >= 0 else 1
        n = -(-lane_extent // self.lanes)
        lane = self.plain[self.lane_axis] if self.lane_axis >= 0 else None
        best_axis, best_score = -1, 0.0
        for j, axis in enumerate(self.joined):
            if self.lane_axis in axis.dims or not isinstance(axis.extent, int):
                continue
            shared = sum(axis.var not in x.args[0].vars for x in self.body_loads)
            slides = sum(axis.var in x.args[0].vars and not self.even(x.args[0], axis.var)
                         for x in self.body_loads)
            score = (shared + 0.5 * slides + 0.01 * (j == len(self.joined) - 1)) * \
                min(axis.extent, 8)
            if score >= best_score and score:
                best_axis, best_score = j, score
        pixels = upper(self.joined[best_axis].extent) if best_axis >= 0 else 1
        pixel = self.joined[best_axis].var if best_axis >= 0 else None

        def uses(x: Expr, v: Expr | None) -> bool:
            return v is not None and v in x.args[0].vars

        both_ = sum(uses(x, lane) and uses(x, pixel) for x in self.body_loads)
        lanes = sum(uses(x, lane) and not uses(x, pixel) for x in self.body_loads)
        others = sum(uses(x, pixel) and not uses(x, lane) for x in self.body_loads)
        rest = upper(symbolic_size(tuple(a.extent for j, a in enumerate(self.joined)
                                         if j != best_axis and self.lane_axis not in a.dims)))
        out: list[tuple[float, int, int]] = []
        for kt, pt in product((1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8)):
            if kt * pt > self.gpu.registers or kt > n or pt > pixels:
                continue
            if both_ and (kt > 1 or pt > 4):
                continue
            tiles = -(-n // kt) * -(-pixels // pt)
            # what one step of the reduction costs: a vector load is some four multiply-adds
            loads = kt * lanes + 0.5 * pt * others + kt * pt * both_ * 0.6
            each = kt * pt + 4.0 * loads + 1.0
            idle = max(1.0, self.gpu.occupancy / (tiles * rest))
            out.append((tiles * each * min(idle, 4.0) ** 0.7, kt, pt))
        return best_axis, sorted(out, key=lambda t: round(t[0], 3))

    def even(self, index: Expr, v: Expr) -> bool:
        """Whether no reduction index moves along with v, as taps of a window do."""
        k = coefficient(index, v)
        return k is None or not any(
            r.op == "var" and (c := coefficient(index, r)) and k % c == 0 and upper(n) * c > k
            for r, n in zip(self.plain_over, self.over_extents))

    def build(self) -> Nest:
        nest = super().build()
        loops = list(nest.loops)
        if self.heavy is not None and self.lane_axis >= 0:
            # neighbouring invocations take neighbouring vectors
            loops.sort(key=lambda p: p[0].attr[0] in (f"v{self.lane_axis}", f"v{self.lane_axis}w"))
        body = nest.body
        if self.team is not None:
            first = ge0(-self.team)
            body = tuple(Store(s.buffer, s.index, s.value,
                               both(s.guard or TRUE, first)) if isinstance(s, Store) else s
                         for s in body)
        return Nest(tuple(loops), body, nest.lanes)

    def reduction(
        self, where: Index, lane: Expr, envs: list[dict[Expr, Expr]], body: list[Stmt]
    ) -> Expr:
        """Adds the statements of the fold; returns the register that stands for its value."""
        kind, t = self.lower.fold()
        along = self.lane_over >= 0
        vector = (lane,) if lane.op == "var" and (along or self.lane_axis >= 0) else ()
        accs = [reg(f"acc{j}", t, vector) for j in range(len(envs))]
        start = identity(kind, t)
        body += [Set(a, start) for a in accs]
        extents = list(self.over_extents)
        over: list[Expr] = [const(0)] * len(extents)
        loops: list[tuple[Expr, Expr]] = []
        written: list[Expr] = []  # variables that are written out
        size = 1
        share = self.shared()
        dealt: dict[Expr, Expr] = {}
        sequence = self.reduction_order()
        for i in reversed(sequence):
            n = extents[i]
            if along and i == self.lane_over:
                count = (lift(n) + (self.lanes - 1)) // self.lanes
                v = self.loop("rv", count, loops)
                over[i] = v * self.lanes + lane
                continue
            if n == 1:
                continue
            fits = isinstance(n, int) and size * n <= UNROLLED and \
                size * n * len(envs) <= 4 * UNROLLED and not (share > 1 and n > GROUP)
            if fits:
                over[i] = var(f"u{i}", 0, upper(n) - 1)
                written.append(over[i])
                size *= upper(n)
            elif isinstance(n, int) and n % GROUP == 0 and size * GROUP * len(envs) <= \
                    4 * UNROLLED and self.grouped(i):
                u = var(f"u{i}", 0, GROUP - 1)
                written.append(u)
                size *= GROUP
                over[i] = self.loop(f"r{i}", n // GROUP, loops) * GROUP + u
            else:
                over[i] = self.loop(f"r{i}", n, loops)
        if share > 1 and loops:
            # the longest loop is dealt out to the team
            self.team = var(TEAM, 0, share - 1)
            j = max(range(len(loops)), key=lambda j: loops[j][1].hi)
            v, extent = loops[j]
            turns = (extent - self.team + (share - 1)) // share
            inner = var(f"{v.attr[0]}t", 0, max((extent.hi + share - 1) // share - 1, 0))
            loops[j] = (inner, turns)
            dealt = {v: inner * share + self.team}
        e = self.lower.body(where, tuple(over))
        if along:
            inside = ge0(lift(extents[self.lane_over]) - 1 - over[self.lane_over])
            if inside is not TRUE:
                e = op("where", inside, e, start)
        out: list[Stmt] = []
        for combo in product(*(range(v.hi + 1) for v in written)):
            # dealt variables are replaced last: with exact bounds nothing looks out of range
            turn = {**dealt, **{v: const(c) for v, c in zip(written, combo)}}
            for a, env in zip(accs, envs):
                out.append(Set(a, combine(kind, a, substitute(e, {**env, **turn}))))
        for v, extent in loops:
            out = [For(v, extent, tuple(out))]
        body += out
        lims = t.limits if not t.is_float else (0, 0)
        self.totals = list(accs)
        if along:
            self.totals = []
            for j, a in enumerate(accs):
                one = reg(f"sum{j}", t)
                body.append(Set(one, make("hreduce", (a,), kind, t, *lims)))
                self.totals.append(one)
        if self.team is not None:
            body += [Set(a, make("together", (a,), kind, t, *lims)) for a in self.totals]
        return reg("total", t, vector if not along else ())

    def panel_width(self, extent: int, step: int) -> int:
        """Some PANEL channels: neighbouring invocations read them as one piece of memory, and what
        they read next lies behind it. As few are added at the end as can be."""
        return min((step * m for m in range(1, max(PANEL // step, 1) + 1)),
                   key=lambda w: (-(-extent // w) * w, -w))

    def vectors(
        self, name: str, extent: Dim, step: int, loops: list[tuple[Expr, Expr]]
    ) -> Expr:
        if self.spec.pack is None or not isinstance(extent, int):
            return super().vectors(name, extent, step, loops)
        width = self.panel_width(extent, step)
        panel = self.loop(name, -(-extent // width), loops)
        return panel * (width // step) + self.loop(f"{name}w", min(width, extent + step - 1)
                                                   // step, loops)

    def grouped(self, i: int) -> bool:
        """Whether some operand is read by neighbours along reduction index i."""
        v = self.plain_over[i]
        return any(coefficient(x.args[0], v) == 1 for x in self.body_loads)

    def shared(self) -> int:
        """How many invocations share a piece."""
        length = upper(symbolic_size(self.over_extents)) // (
            self.lanes if self.lane_over >= 0 else 1)
        vectors = upper(symbolic_size(self.spec.domain)) // (
            self.lanes if self.lane_axis >= 0 else 1)
        size = self.gpu.workgroup
        return size if length >= TEAM_LENGTH and vectors * TEAM_SHARE <= length else 1


def _wide(e: Expr) -> bool:
    """Whether 64-bit integers from memory occur: those are computed one at a time."""
    stack, seen = [e], set[Expr]()
    while stack:
        x = stack.pop()
        if x in seen:
            continue
        seen.add(x)
        if x.dtype.bits == 64 and (x.op == "load" or not (-(1 << 31) <= x.lo and x.hi < 1 << 31)):
            return True
        stack.extend(x.args)
    return False


def grid(nest: Nest, team: int = 1) -> Kernel:
    """The kernel whose grid is all outer loops."""
    count = const(1)
    for _, extent in nest.loops:
        count = count * extent
    g = var("g", 0, max(count.hi - 1, 0))
    return Kernel("k", (), (), g, count, pieces(nest, len(nest.loops), g), nest.lanes, team=team)


def workgroups(k: Kernel, gpu_workgroup: int) -> Expr:
    """How many workgroups evaluate a kernel."""
    if k.team > 1:
        return k.grid
    return symbolic.floordiv(k.grid + (gpu_workgroup - 1), gpu_workgroup)


__all__ = ["Scheduler", "grid", "workgroups"]
