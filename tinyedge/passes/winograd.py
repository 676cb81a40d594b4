"""Convolutions become products at the points of a minimal filter, where that is less work and exact
enough.

Afterwards: such a contraction is `winograd_out(contract(winograd_in(x), weights))`; its weights are
transformed, the padding before it reaches to the end of the last tile, and everything else is as it
was. One whose window moves by 2 is first taken apart: even and odd places of the input meet even
and odd taps only, so it is a sum of convolutions with stride 1 and fewer taps. Runs after the
other passes, since nothing else is gained by looking into it.

What the form gives up: where one value of a tile is infinite or nan, all outputs of that tile are
nan, and numbers within a few binary orders of the largest float may overflow on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from math import prod
from typing import Any

import numpy as np

from .. import graph as g
from .. import winograd as w
from ..dtype import FLOAT32
from ..graph import Node, Valid
from ..shape import is_static, static

Array = np.ndarray[Any, np.dtype[np.float32]]

TILES = (2, 3, 4, 5)
LEAST_CHANNELS = 16
TOLERANCE = 2e-5
"""Largest error, relative to the largest output, that the form may have on random data."""

# What a processor core of the kind that we measure on does in a nanosecond (`bench/README.md`).
FLOPS, BYTES, WEIGHT_BYTES = 110.0, 50.0, 28.0
GAIN = 0.85
"""Of the time of a form with fewer weights that one with more may take at most: they cost memory,
and a wrong guess costs little then."""


@dataclass(frozen=True)
class Convolution:
    """A contraction over channels and a window that moves by `strides`: x [N, C, *S], weights
    [K, C, *taps] -> [N, K, *out], S at least (out - 1) * strides + taps."""

    node: Node
    taps: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(n: Node) -> Convolution | None:
        if n.op != "contract" or n.inputs[1].op != "const" or \
                any(i.dtype is not FLOAT32 for i in n.inputs):
            return None
        x, weights = n.inputs
        rank = n.rank
        if rank < 3 or x.rank != rank or weights.rank != rank or len(n["reduce"]) != rank - 1 or \
                x.op == "const" or not is_static((*x.shape, *n.shape, *n["reduce"])):
            return None
        one = tuple((0, ((i, 1),)) for i in range(2 * rank - 1))
        data, filters = n["maps"]
        strides = tuple(form[1][0][1] if form[1] else 0 for form in data[2:])
        window = tuple((0, ((i, s), (rank - 1 + i, 1))) for i, s in enumerate(strides, 2))
        if data != (one[0], one[rank], *window) or filters != (one[1], one[rank], *one[rank + 1:]):
            return None
        return Convolution(n, static(n["reduce"])[1:], strides)

    def cost(self, m: int) -> float:
        """Nanoseconds on one core, roughly, by tiles of m outputs; 0: by the direct form."""
        n, k, *out = static(self.node.shape)
        c = self.node.inputs[0].shape[1]
        assert isinstance(c, int)
        if not m:
            taps = prod(self.taps)
            return together(2 * n * k * c * prod(out) * taps / FLOPS,
                            4 * taps * k * c / WEIGHT_BYTES)
        places = prod(w.products(m, r) for r in self.taps if r > 1)
        tiles = n * prod(-(-s // m) if r > 1 else s for s, r in zip(out, self.taps))
        # a product of few rows waits for its weights
        short = max(1.0, 12 / tiles)
        moved = 4 * (2 * places * tiles * (c + k) + n * prod(out) * (c + k))
        return moved / BYTES + together(2 * places * tiles * k * c * short / FLOPS,
                                        4 * places * k * c / WEIGHT_BYTES)

    def best(self) -> int:
        """The tile, or 0 where the direct form is best."""
        k, c = static(self.node.inputs[1].shape)[:2]
        if min(k, c) < LEAST_CHANNELS or not any(r > 1 for r in self.taps) or \
                any(s != 1 for s in self.strides):
            return 0
        best = 0
        for m in TILES:
            if all(r == 1 or w.possible(m, r) for r in self.taps) and \
                    self.cost(m) < GAIN * self.cost(best) and self.error(m) < TOLERANCE:
                best = m
        return best

    def weights(self, m: int) -> Array:
        """[products, C, K], computed in float64."""
        u = self.node.inputs[1].value.astype(np.float64)
        u = u.reshape(*u.shape[:2], -1) @ w.filter_transform(m, self.taps).T
        return np.ascontiguousarray(u.transpose(2, 1, 0).astype(np.float32))

    def error(self, m: int) -> float:
        """Largest error, relative to the largest output, with these weights and one random tile."""
        direct = self.node.inputs[1].value.astype(np.float64)
        c = direct.shape[1]
        out = [m if r > 1 else 1 for r in self.taps]
        x = np.random.default_rng(0).standard_normal(
            (1, c, *(o + r - 1 for o, r in zip(out, self.taps)))).astype(np.float32)
        want = np.zeros((1, direct.shape[0], *out))
        for tap in product(*map(range, self.taps)):
            here: Any = (..., *tap)
            part: Any = (..., *(slice(t, t + o) for t, o in zip(tap, out)))
            want += np.einsum("nc...,kc->nk...", x[part], direct[here])
        v = w.spread_array(x, m, self.taps)
        products = np.einsum("pnc...,pck->pnk...", v, self.weights(m))
        got = w.collect_array(products, m, self.taps, out)
        return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-30))

    def by(self, m: int) -> Node:
        """The convolution by tiles of m outputs."""
        n, taps = self.node, self.taps
        out = static(n.shape)[2:]
        x = grown(n.inputs[0], [-(-s // m) * m + r - 1 if r > 1 else s for s, r in zip(out, taps)])
        v = g.winograd_in(x, m, taps)
        u = g.const(self.weights(m))
        rank = v.rank
        one = tuple((0, ((i, 1),)) for i in range(rank + 1))
        shape = (v.shape[0], v.shape[1], u.shape[2], *v.shape[3:])
        products = g.contract(v, u, shape, (u.shape[1],), (
            (one[0], one[1], one[rank], *one[3:rank]), (one[0], one[rank], one[2])))
        return g.winograd_out(products, m, taps, out)

    def apart(self) -> Node | None:
        """A convolution with strides as a sum of such without, by minimal filters where these are
        best; None where that is no gain."""
        n, (x, weights) = self.node, self.node.inputs
        rank = n.rank
        one = tuple((0, ((i, 1),)) for i in range(2 * rank - 1))
        window = tuple((0, ((i, 1), (rank - 1 + i, 1))) for i in range(2, rank))
        maps = ((one[0], one[rank], *window), (one[1], one[rank], *one[rank + 1:]))
        parts = []
        for phase in product(*(range(min(s, r)) for s, r in zip(self.strides, self.taps))):
            taps = tuple(slice(p, None, s) for p, s in zip(phase, self.strides))
            u = g.const(np.ascontiguousarray(weights.value[(slice(None), slice(None), *taps)]))
            places = [o + r - 1 for o, r in zip(static(n.shape)[2:], static(u.shape)[2:])]
            view = g.slice_(x, (0, 0, *phase), (1, 1, *self.strides), (*x.shape[:2], *places))
            part = Convolution.of(g.contract(
                view, u, n.shape, (x.shape[1], *u.shape[2:]), maps))
            assert part is not None
            parts.append((part, part.best()))
        sums = (len(parts) - 1) * 8 * prod(static(n.shape)) / BYTES
        if not any(m for _, m in parts) or \
                sum(p.cost(m) for p, m in parts) + sums > GAIN * self.cost(0):
            return None
        return reduce(g.add, [part.by(m) if m else part.node for part, m in parts])


def grown(x: Node, sizes: Sequence[int]) -> Node:
    """x [N, C, *S] with zeros behind it, where S is below `sizes`; in the same step as the padding
    that it, or what it is a slice of, ends with."""
    more = [0, 0, *(max(0, n - d) for n, d in zip(sizes, static(x.shape)[2:]))]
    if not any(more):
        return x
    if x.op == "slice":
        begin, step = x["begin"], x["step"]
        shape = [d + a for d, a in zip(static(x.shape), more)]
        whole = grown(x.inputs[0], [b + (d - 1) * s + 1
                                    for b, d, s in zip(begin[2:], shape[2:], step[2:])])
        return g.slice_(whole, begin, step, shape)
    if x.op == "pad" and x["value"].array.reshape(-1)[0] == 0:
        return g.pad(x.inputs[0], x["low"], [a + b for a, b in zip(x["high"], more)])
    return g.pad(x, (0,) * x.rank, more)


def together(compute: float, memory: float) -> float:
    """The time of two things that go on at once, as far as they can (a fit to measurements)."""
    return max(compute, memory) + 0.35 * min(compute, memory)


def filtered(n: Node) -> Node | None:
    """A convolution -> its minimal filter."""
    found = Convolution.of(n)
    if found is None:
        return None
    if any(s > 1 for s in found.strides):
        return found.apart()
    m = found.best()
    return found.by(m) if m else None


def run(graph: Valid) -> Valid:
    """The graph with the rule above applied."""
    return Valid(g.rewrite(graph, {"contract": [filtered]}))
