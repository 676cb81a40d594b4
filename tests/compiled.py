"""Compiles a graph, runs it, and compares it with the interpreter: shared by the tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import tinyedge
from tinyedge.compiler import compile_graph
from tinyedge.graph import Graph, validate
from tinyedge.interpreter import interpret
from tinyedge.plan import Plan

Arrays = Mapping[str, "np.ndarray[Any, Any]"]


def difference(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> float:
    """Largest absolute difference relative to the largest finite expected value; nan must match."""
    assert got.shape == want.shape and got.dtype == want.dtype, (got.shape, want.shape)
    if not got.size:
        return 0.0
    if want.dtype.kind != "f":
        return float(np.count_nonzero(got != want))
    a, b = got.astype(np.float64), want.astype(np.float64)
    assert np.array_equal(np.isnan(a), np.isnan(b)), "nan in different places"
    same = (a == b) | np.isnan(b)
    finite = np.abs(b[np.isfinite(b)])
    scale = float(finite.max()) if finite.size else 1.0
    with np.errstate(invalid="ignore"):
        return float(np.where(same, 0.0, np.abs(a - b)).max()) / max(scale, 1e-30)


def check(
    graph: Graph, inputs: Arrays, tolerance: float = 2e-6, target: str = "cpu",
    threads: int | None = None,
) -> Plan:
    """Asserts that the compiled graph equals the interpreted one; returns its plan."""
    want = interpret(validate(graph), inputs)
    plan = compile_graph(graph, target)
    with tinyedge.load(plan, threads=threads) as run:
        got = run(inputs)
        again = run(inputs)
    for name, value in want.items():
        if name in graph.states:
            continue
        error = difference(got[name], value)
        assert error <= tolerance, f"{name} is off by {error:.3g}"
        assert got[name].tobytes() == again[name].tobytes() or graph.states
    return plan
