"""Kernels of the two transforms of a minimal filter: one tile's values in registers at a time.

Beside `cpu`, for nodes that write, or read, many places at once. The vector runs along the
channels. A piece is a row of tiles or less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from tinyedge import winograd
from tinyedge.graph import Node
from tinyedge.shape import upper

from .. import symbolic
from ..ir import LANE, Expr, Kernel, Stmt, Store, const, dump, op, var
from ..lower import Index, Lower
from ..symbolic import TRUE
from .cpu import Nest, ceil_div, coefficient, finish, vector_of

Place = Callable[[Index], tuple[Expr, Expr]]


def _add(a: Expr, b: Expr) -> Expr:
    return op("add", a, b)


def _sub(a: Expr, b: Expr) -> Expr:
    return op("sub", a, b)


def _scale(c: float, x: Expr) -> Expr:
    return op("mul", x, const(c, x.dtype))


def _along(axis: int, counts: list[int], values: dict[tuple[int, ...], Expr],
           transform: Callable[..., list[Expr]], *more: Any) -> dict[tuple[int, ...], Expr]:
    """A transform along one axis of a block of values; `counts`, its sizes, change with it."""
    others = [range(n) for i, n in enumerate(counts) if i != axis]
    out = {}
    for at in product(*others):
        line = [values[(*at[:axis], j, *at[axis:])] for j in range(counts[axis])]
        for j, v in enumerate(transform(line, *more, _add, _sub, _scale)):
            out[(*at[:axis], j, *at[axis:])] = v
    counts[axis] = 1 + max(k[axis] for k in out)
    return out


class Transform:
    """The kernel of `winograd_in`, or of `winograd_out` and what follows it elementwise (`root`).

    lower, store: as for `cpu.Spec`.
    """

    def __init__(self, lower: Lower, root: Node, store: Place, width: int) -> None:
        self.lower, self.root, self.store = lower, root, store
        self.into = root.op == "winograd_in"
        node = root if self.into else lower.heavy
        assert node is not None
        self.node, self.x = node, node.inputs[0]
        self.m: int = node["tile"]
        self.taps: tuple[int, ...] = node["taps"]
        self.axes = [i for i, r in enumerate(self.taps) if r > 1]
        tiles = self.root.shape[3:] if self.into else self.x.shape[3:]
        self.extents = (*(node.shape[1:3] if self.into else node.shape[:2]), *tiles)
        self.tile = tuple(var(f"o{i}", 0, upper(d) - 1) if d != 1 else const(0)
                          for i, d in enumerate(self.extents))
        self.lanes = vector_of(width, root.dtype.bits)
        channel = self.tile[1]
        (offset, _), value = self.where(self.tile, 0), self.loads(self.tile)[0]
        self.exprs = [e for i in (0, 1) for e in self.where(self.tile, i)] + [value]
        if coefficient(offset, channel) != 1 or coefficient(value.args[0], channel) != 1:
            self.lanes = 1

    def where(self, tile: Index, number: int) -> tuple[Expr, Expr]:
        """(offset, guard) of a tile's result `number`."""
        return self.store((const(number), *tile) if self.into else self.place(tile, number))

    def place(self, tile: Index, number: int) -> Index:
        """The index of a tile's output `number`."""
        out = list(tile)
        for i in reversed(self.axes):
            out[2 + i] = tile[2 + i] * self.m + number % self.m
            number //= self.m
        return tuple(out)

    def loads(self, tile: Index) -> list[Expr]:
        """What a tile is made of, in order."""
        counts = [winograd.products(self.m, self.taps[i]) for i in self.axes]
        out = []
        for number, at in enumerate(product(*map(range, counts))):
            if self.into:
                index = list(tile)
                for i, j in zip(self.axes, at):
                    index[2 + i] = tile[2 + i] * self.m + j
                out.append(self.lower.value(self.x, tuple(index)))
            else:
                out.append(self.lower.value(self.x, (const(number), *tile)))
        return out

    def results(self, tile: Index) -> list[Expr]:
        """A tile's results, in order."""
        counts = [winograd.products(self.m, self.taps[i]) for i in self.axes]
        values = dict(zip(product(*map(range, counts)), self.loads(tile)))
        for axis in range(len(counts)):
            values = _along(axis, counts, values, winograd.spread) if self.into else \
                _along(axis, counts, values, winograd.collect, self.m)
        return [values[at] for at in product(*map(range, counts))]

    def key(self) -> str:
        """Text that determines the kernel's code."""
        tail = [] if self.into else [self.lower.epilogue(
            self.root, self.place(self.tile, 0), self.results(self.tile)[0])]
        return f"{self.node.op} {self.lanes} {self.m} {self.taps} {self.extents} " \
            f"{self.root.shape}\n{dump([*self.exprs, *tail])}"

    def kernel(self) -> Kernel:
        """The kernel; its buffers and symbols are filled in by the caller."""
        loops: list[tuple[Expr, Expr]] = []
        tile: list[Expr] = list(self.tile)
        order = [0, *range(2, len(self.extents)), 1]
        for i in order:
            extent = self.extents[i]
            if i == 1:
                n = ceil_div(extent, self.lanes)
                v = var("v", 0, upper(n) - 1) if upper(n) > 1 else const(0)
                lane = var(LANE, 0, self.lanes - 1) if self.lanes > 1 else const(0)
                tile[1] = v * self.lanes + lane
                if v.op == "var":
                    loops.append((v, symbolic.lift(n)))
            elif tile[i].op == "var":
                loops.append((tile[i], symbolic.lift(extent)))
        return finish(Nest(tuple(loops), tuple(self.statements(tuple(tile))), self.lanes))

    def statements(self, tile: Index) -> Sequence[Stmt]:
        out = []
        for number, value in enumerate(self.results(tile)):
            if not self.into:
                value = self.lower.epilogue(self.root, self.place(tile, number), value)
            offset, guard = self.where(tile, number)
            out.append(Store(0, offset, value, None if guard is TRUE else guard))
        return out


__all__ = ["Transform"]
