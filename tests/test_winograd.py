"""Minimal filters: the arithmetic, the graph's operations, the kernels, and when they are used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.compiled import check, difference
from tinyedge import graph as g
from tinyedge import winograd
from tinyedge.dtype import FLOAT32
from tinyedge.errors import ShapeError
from tinyedge.graph import Form, Graph, Node, validate
from tinyedge.interpreter import interpret
from tinyedge.passes.winograd import Convolution, run
from tinyedge.shape import static

Array = np.ndarray[Any, Any]
rng = np.random.default_rng(3)

FILTERS = [(2, (3, 3)), (4, (3, 3)), (4, (5,)), (2, (5, 5)), (4, (1, 3)), (2, (7, 1)), (4, (3,)),
           (6, (3, 3)), (2, (3, 3, 3))]


def normal(*shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def conv(x: Node, w: Array, padding: int = 0) -> Node:
    rank = x.rank
    x = g.pad(x, [0, 0] + [padding] * (rank - 2), [0, 0] + [padding] * (rank - 2))
    sizes = [int(str(d)) - r + 1 for d, r in zip(x.shape[2:], w.shape[2:])]
    one: list[Form] = [(0, ((i, 1),)) for i in range(2 * rank)]
    window: list[Form] = [(0, ((i, 1), (rank - 1 + i, 1))) for i in range(2, rank)]
    maps = ((one[0], one[rank], *window), (one[1], one[rank], *one[rank + 1:2 * rank - 1]))
    return g.contract(x, g.const(w), (x.shape[0], w.shape[0], *sizes), w.shape[1:], maps)


@pytest.mark.parametrize("m, taps", FILTERS)
def test_transforms_give_the_filter(m: int, taps: tuple[int, ...]) -> None:
    sizes = [2 * m + 1 if r > 1 else 3 for r in taps]
    x = g.placeholder("x", (2, 5, *(s + r - 1 for s, r in zip(sizes, taps))), FLOAT32)
    y = conv(x, normal(4, 5, *taps))
    found = Convolution.of(y)
    assert found is not None and found.taps == taps
    feeds = {"x": normal(*static(x.shape))}
    by = validate(Graph({"x": x}, {"y": found.by(m)}))
    want = interpret(Graph({"x": x}, {"y": y}), feeds, exact=True)["y"]
    assert difference(interpret(by, feeds, exact=True)["y"], want) < 1e-5


@pytest.mark.parametrize("target", ["cpu", "cpu:x86-64-v3", "cpu:x86-64-v2"])
@pytest.mark.parametrize("m, taps", FILTERS[:-1])
@pytest.mark.parametrize("channels", [(16, 32), (17, 5)])
def test_kernels(m: int, taps: tuple[int, ...], channels: tuple[int, int], target: str) -> None:
    c, k = channels
    x = g.placeholder("x", (1, c, *((9, 14)[:len(taps)])), FLOAT32)
    # what is made in the graph has a layout, and a halo where the filter pads it
    y = conv(g.maximum(x, g.like(x, 0)), normal(k, c, *taps), 1 if min(taps) > 2 else 0)
    found = Convolution.of(y)
    assert found is not None
    z = found.by(m)
    other = g.placeholder("other", z.shape, FLOAT32)
    z = g.maximum(g.add(g.add(z, g.expand(g.const(normal(1, k, *[1] * len(taps))), z.shape)),
                        other), g.like(z, 0))
    outs = {"y": z, "pooled": g.reduce("max", z, range(2, z.rank))}
    check(Graph({"x": x, "other": other}, outs),
          {"x": normal(*static(x.shape)), "other": normal(*static(z.shape))}, 2e-5, target)


def chosen(c: int, k: int, size: int, taps: tuple[int, ...] = (3, 3), padding: int = 1,
           weights: Array | None = None) -> Graph:
    x = g.placeholder("x", (1, c, *[size] * len(taps)), FLOAT32)
    w = normal(k, c, *taps) if weights is None else weights
    return run(validate(Graph({"x": x}, {"y": conv(x, w, padding)})))


def tile(graph: Graph) -> int:
    """The tile that was chosen; 0: none."""
    n = graph.outputs["y"]
    return int(n["tile"]) if n.op == "winograd_out" else 0


def test_where_it_is_used() -> None:
    assert tile(chosen(64, 64, 56)) == 4
    assert tile(chosen(256, 256, 14)) in (2, 4)
    assert tile(chosen(8, 8, 56)) == 0  # too few channels
    assert tile(chosen(64, 64, 56, (1, 1), 0)) == 0
    assert tile(chosen(64, 64, 2)) == 0


def test_padding_reaches_to_the_last_tile() -> None:
    graph = chosen(32, 32, 30)
    assert tile(graph)
    feeds = {"x": normal(1, 32, 30, 30)}
    pads = [n for n in graph.nodes() if n.op == "pad"]
    assert len(pads) == 1 and tuple(pads[0]["low"]) == (0, 0, 1, 1)
    assert interpret(graph, feeds)["y"].shape == (1, 32, 30, 30)


def strided(c: int, k: int, size: tuple[int, ...], taps: tuple[int, ...], strides: tuple[int, ...]
            ) -> tuple[Graph, dict[str, Array]]:
    rank = 2 + len(taps)
    x = g.placeholder("x", (1, c, *size), FLOAT32)
    low = [0, 0, *(r // 2 for r in taps)]
    p = g.pad(g.maximum(x, g.like(x, 0)), low, low)
    out = [(int(str(d)) - r) // s + 1 for d, r, s in zip(p.shape[2:], taps, strides)]
    one: list[Form] = [(0, ((i, 1),)) for i in range(2 * rank)]
    window: list[Form] = [(0, ((i, s), (rank - 1 + i, 1))) for i, s in enumerate(strides, 2)]
    y = g.contract(p, g.const(normal(k, c, *taps)), (1, k, *out), (c, *taps), (
        (one[0], one[rank], *window), (one[1], one[rank], *one[rank + 1:2 * rank - 1])))
    graph = Graph({"x": x}, {"y": g.maximum(y, g.like(y, 0))})
    return graph, {"x": normal(*static(x.shape))}


@pytest.mark.parametrize("target", ["cpu", "cpu:x86-64-v3"])
@pytest.mark.parametrize("size, taps, strides", [
    ((56, 56), (3, 3), (2, 2)), ((29, 57), (3, 3), (2, 2)), ((40, 40), (5, 3), (2, 1)),
    ((40, 33), (3, 3), (1, 2)), ((300,), (4,), (2,)), ((60, 60), (3, 3), (3, 3)),
    ((41, 40), (1, 3), (2, 2))])
def test_strided_convolutions(size: tuple[int, ...], taps: tuple[int, ...],
                              strides: tuple[int, ...], target: str) -> None:
    graph, given = strided(64, 64, size, taps, strides)
    check(graph, given, 2e-5, target)


def test_where_strided_convolutions_are_taken_apart() -> None:
    def transforms(*a: Any) -> int:
        return sum(n.op == "winograd_in" for n in run(validate(strided(*a)[0])).nodes())

    assert transforms(128, 128, (56, 56), (3, 3), (2, 2)) == 3
    assert transforms(128, 128, (56, 56), (1, 1), (2, 2)) == 0
    assert transforms(512, 512, (14, 14), (3, 3), (2, 2)) == 0  # weights from memory would hold it
    # every part reads the one padded input
    pads = [n for n in run(validate(strided(128, 128, (56, 56), (3, 3), (2, 2))[0])).nodes()
            if n.op == "pad"]
    assert pads and all(tuple(n["low"]) == (0, 0, 1, 1) for n in pads)


def test_inexact_weights_stay_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tile(chosen(64, 64, 56)) == 4
    monkeypatch.setattr(Convolution, "error", lambda self, m: 1e-6 if m == 2 else 1e-3)
    assert tile(chosen(64, 64, 56)) == 2
    monkeypatch.setattr(Convolution, "error", lambda self, m: 1e-3)
    assert tile(chosen(64, 64, 56)) == 0


def test_misfits_are_refused() -> None:
    x = g.placeholder("x", (1, 4, 9, 9), FLOAT32)
    with pytest.raises(ShapeError, match="tiles of 4"):
        g.winograd_in(x, 4, (3, 3))
    with pytest.raises(ShapeError, match="tiles of 2"):
        g.winograd_out(x, 2, (3, 3), (4, 4))
    assert not winograd.possible(3, 3) and not winograd.possible(8, 3)
