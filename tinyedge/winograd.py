"""Minimal filtering F(m, r) by Winograd: m outputs of an r-tap filter by m + r - 1 products.

Used by the pass that rewrites convolutions (`tinyedge.passes.winograd`), by the interpreter and by
the kernels of the two transforms. The products are taken at the points 0, +-p for each p of
`POINTS` as far as needed, and infinity (Toom and Cook's construction); m + r is odd, so that
the points come in pairs, whose sums and differences the transforms share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np

POINTS = (1.0, 2.0, 0.5)
"""In the order of use; small powers of two keep the transforms exact in most places."""

T = TypeVar("T")
Scale = Callable[[float, T], T]
Add = Callable[[T, T], T]


def products(m: int, r: int) -> int:
    """The number of products of F(m, r)."""
    return m + r - 1


def possible(m: int, r: int) -> bool:
    return products(m, r) % 2 == 0 and 4 <= products(m, r) <= 2 + 2 * len(POINTS)


def _pairs(n: int) -> tuple[float, ...]:
    return POINTS[:(n - 2) // 2]


def _even(points: Sequence[float]) -> list[float]:
    """Coefficients, lowest first, of the product of all (x - p^2)."""
    out = [1.0]
    for p in points:
        out = [a - p * p * b for a, b in zip([0.0, *out], [*out, 0.0])]
    return out


def spread(d: Sequence[T], add: Add[T], sub: Add[T], scale: Scale[T]) -> list[T]:
    """The input transform of m + r - 1 neighbours: their values at every point."""
    n = len(d)
    pairs = _pairs(n)

    def total(coefficients: Sequence[float], values: Sequence[T]) -> T:
        terms = [v if c == 1 else scale(c, v) for c, v in zip(coefficients, values) if c]
        out = terms[-1]
        for t in reversed(terms[:-1]):
            out = add(out, t)
        return out

    out = [total(_even(pairs), d[0::2])]
    for p in pairs:
        others = _even([q for q in pairs if q != p])
        u, v = total(others, d[2::2]), total(others, d[1::2])
        v = v if p == 1 else scale(p, v)
        out += [add(u, v), sub(u, v)]
    return [*out, total(_even(pairs), d[1::2])]


def collect(v: Sequence[T], m: int, add: Add[T], sub: Add[T], scale: Scale[T]) -> list[T]:
    """The output transform of the products at every point: m neighbours."""
    pairs = _pairs(len(v))
    sums = [add(v[1 + 2 * i], v[2 + 2 * i]) for i in range(len(pairs))]
    gaps = [sub(v[1 + 2 * i], v[2 + 2 * i]) for i in range(len(pairs))]
    out = []
    for k in range(m):
        parts = gaps if k % 2 else sums
        terms = [x if p ** k == 1 else scale(p ** k, x) for p, x in zip(pairs, parts)]
        if k == 0:
            terms.insert(0, v[0])
        if k == m - 1:
            terms.append(v[-1])
        y = terms[0]
        for t in terms[1:]:
            y = add(y, t)
        out.append(y)
    return out


@cache
def filter_matrix(m: int, r: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[m + r - 1, r]: the transform of a filter."""
    pairs = _pairs(products(m, r))
    finite = [0.0, *(s * p for p in pairs for s in (1, -1))]
    rows = [[p ** k / np.prod([p - q for q in finite if q != p]) for k in range(r)] for p in finite]
    return np.array([*rows, [0.0] * (r - 1) + [1.0]])


@cache
def filter_transform(m: int, taps: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[products, taps]: the transform along all axes with more than one tap."""
    out = np.ones((1, 1))
    for r in taps:
        if r > 1:
            out = np.kron(out, filter_matrix(m, r))
    return out


def _numeric(axis: int, f: Callable[..., Any], x: np.ndarray[Any, Any], *more: Any
             ) -> np.ndarray[Any, Any]:
    """A transform along one axis of an array."""
    parts = [np.take(x, i, axis) for i in range(x.shape[axis])]
    out = f(parts, *more, np.add, np.subtract, lambda c, v: v * v.dtype.type(c))
    return np.stack(out, axis)


def spread_array(x: np.ndarray[Any, Any], m: int, taps: Sequence[int]) -> np.ndarray[Any, Any]:
    """[N, C, *S] -> [products, N, C, *tiles]; along an axis with one tap each place is a tile."""
    axes = [i for i, r in enumerate(taps) if r > 1]
    windows = x
    for i in axes:
        windows = np.lib.stride_tricks.sliding_window_view(windows, products(m, taps[i]), 2 + i)
        windows = windows[(slice(None),) * (2 + i) + (slice(None, None, m),)]
    # the windows' own axes stand last, in the order of `axes`
    for k in range(len(axes)):
        windows = _numeric(x.ndim + k, spread, windows)
    flat = windows.reshape(*windows.shape[:x.ndim], -1)
    return np.ascontiguousarray(np.moveaxis(flat, -1, 0))


def collect_array(v: np.ndarray[Any, Any], m: int, taps: Sequence[int], sizes: Sequence[int]
                  ) -> np.ndarray[Any, Any]:
    """[products, N, K, *tiles] -> [N, K, *sizes]"""
    axes = [i for i, r in enumerate(taps) if r > 1]
    x = v.reshape(*(products(m, taps[i]) for i in axes), *v.shape[1:])
    for k in range(len(axes)):
        x = _numeric(k, collect, x, m)
    # each tile's own axes behind the axis that it is along
    for k, i in reversed(list(enumerate(axes))):
        at = k + 1 + 2 + i
        x = np.moveaxis(x, k, at)
        x = x.reshape(*x.shape[:at - 1], x.shape[at - 1] * m, *x.shape[at + 1:])
    return np.ascontiguousarray(x[(slice(None), slice(None), *(slice(0, s) for s in sizes))])


__all__ = ["collect", "collect_array", "filter_matrix", "filter_transform", "possible",
           "products", "spread", "spread_array"]
