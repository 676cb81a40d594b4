"""Convolutions with stride 1 become products at the points of a minimal filter, where that is less
work and exact enough.

Afterwards: such a contraction is `winograd_out(contract(winograd_in(x), weights))`; its weights are
transformed, the padding before it reaches to the end of the last tile, and everything else is as it
was. Runs after the other passes, since nothing else is gained by looking into it.

What the form gives up: where one value of a tile is infinite or nan, all outputs of that tile are
nan, and numbers within a few binary orders of the largest float may overflow on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
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

TILES = (2, 4)
LEAST_CHANNELS = 16
TOLERANCE = 2e-5
"""Largest error, relative to the largest output, that the form may have on random data."""

# What a processor core of the kind that we measure on does in a nanosecond (`bench/README.md`).
FLOPS, BYTES, WEIGHT_BYTES = 110.0, 50.0, 14.0
GAIN = 0.85
"""Of the time of a form with fewer weights that one with more may take at most: they cost memory,
and a wrong guess costs little then."""


@dataclass(frozen=True)
class Convolution:
    """A contraction over channels and a window that moves by 1: x [N, C, *S], weights [K, C, *taps]
    -> [N, K, *out], S = out + taps - 1."""

    node: Node
    taps: tuple[int, ...]

    @staticmethod
    def of(n: Node) -> Convolution | None:
        if n.op != "contract" or n.inputs[1].op != "const" or n.dtype is not FLOAT32:
            return None
        x, weights = n.inputs
        rank = n.rank
        if rank < 3 or x.rank != rank or weights.rank != rank or len(n["reduce"]) != rank - 1 or \
                x.op == "const" or not is_static((*x.shape, *n.shape, *n["reduce"])):
            return None
        one = tuple((0, ((i, 1),)) for i in range(2 * rank - 1))
        window = tuple((0, ((i, 1), (rank - 1 + i, 1))) for i in range(2, rank))
        if n["maps"] != ((one[0], one[rank], *window), (one[1], one[rank], *one[rank + 1:])):
            return None
        return Convolution(n, static(n["reduce"])[1:])

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
        if min(k, c) < LEAST_CHANNELS or not any(r > 1 for r in self.taps):
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
        for i, r in enumerate(self.taps):
            if r > 1:
                u = np.moveaxis(np.tensordot(w.filter_matrix(m, r), u, (1, 2 + i)), 0, 2 + i)
        k, c = u.shape[:2]
        return np.ascontiguousarray(u.reshape(k, c, -1).transpose(2, 1, 0).astype(np.float32))

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
        n, x, taps = self.node, self.node.inputs[0], self.taps
        out = static(n.shape)[2:]
        more = [0, 0, *((-s) % m if r > 1 else 0 for s, r in zip(out, taps))]
        if any(more):
            if x.op == "pad" and x["value"].array.reshape(-1)[0] == 0:
                x, low, high = x.inputs[0], x["low"], x["high"]
            else:
                low = high = (0,) * x.rank
            x = g.pad(x, low, [a + b for a, b in zip(high, more)])
        v = g.winograd_in(x, m, taps)
        u = g.const(self.weights(m))
        rank = v.rank
        one = tuple((0, ((i, 1),)) for i in range(rank + 1))
        shape = (v.shape[0], v.shape[1], u.shape[2], *v.shape[3:])
        products = g.contract(v, u, shape, (u.shape[1],), (
            (one[0], one[1], one[rank], *one[3:rank]), (one[0], one[rank], one[2])))
        return g.winograd_out(products, m, taps, out)


def together(compute: float, memory: float) -> float:
    """The time of two things that go on at once, as far as they can (a fit to measurements)."""
    return max(compute, memory) + 0.35 * min(compute, memory)


def filtered(n: Node) -> Node | None:
    """A convolution -> its minimal filter."""
    found = Convolution.of(n)
    m = found.best() if found is not None else 0
    return found.by(m) if found is not None and m else None


def run(graph: Valid) -> Valid:
    """The graph with the rule above applied."""
    return Valid(g.rewrite(graph, {"contract": [filtered]}))
