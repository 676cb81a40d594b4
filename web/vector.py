"""The test vector that travels with a bundle: inputs from a formula, outputs of a reference.

The inputs cost no bytes, because both sides compute them: `made` here and in runtime/loader.js.
Of large outputs every n-th element is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tinyedge.plan import Plan, Port, evaluate

Array = np.ndarray[Any, np.dtype[Any]]

USUAL = 16
"""What an open dimension is in the test, where its bounds allow it."""

MOST = 512
"""Elements of an output that are kept."""

TOLERANCES = {"float32": 1e-4, "float16": 2e-2}
"""Largest difference, relative to an output's largest value, by the type that kernels compute in
(a kernel in float16 adds in float32, and each of its results has 11 bits)."""


def symbols_of(plan: Plan) -> dict[str, int]:
    """Sizes of open dimensions in the test."""
    return {name: min(max(USUAL, low), high) for name, (low, high) in plan.symbols.items()}


def made(port: Port, shape: tuple[int, ...], seed: int) -> Array:
    """Numbers from a 32-bit hash (by Chris Wellons) of their place: floats from -1 to 1 in steps of
    1/128, which every float type holds; integers 0..9; booleans."""
    x = np.arange(np.prod(shape, dtype=np.int64)).astype(np.uint32)
    x += np.uint32(seed * 0x9E3779B9 & 0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> np.uint32(shift)) * np.uint32(factor)
    x = (x ^ x >> np.uint32(16)) >> np.uint32(24)
    kind = np.dtype(port.dtype)
    if kind.kind == "f":
        values: Array = (x.astype(np.float32) - 128) / 128
    else:
        values = x & 1 if kind.kind == "b" else x % 10
    return values.astype(kind).reshape(shape)


def inputs(plan: Plan) -> dict[str, Array]:
    """The test's inputs."""
    symbols = symbols_of(plan)
    return {port.name: made(port, tuple(evaluate(d, symbols) for d in port.shape), i)
            for i, port in enumerate(plan.inputs)}


def outputs(plan: Plan) -> dict[str, Array]:
    """What a plan gives for the test's inputs, run by its own driver; DeviceError, PlanError."""
    from tinyedge.runtime import load

    with load(plan) as model:
        return dict(model(inputs(plan)))


def difference(a: Mapping[str, Array], b: Mapping[str, Array]) -> float:
    """The largest difference between outputs, relative to an output's largest finite value."""
    worst = 0.0
    for name, x in a.items():
        x, y = x.astype(np.float64), b[name].astype(np.float64)
        with np.errstate(invalid="ignore"):
            off = np.abs(x - y)[np.isfinite(y)]
        largest = np.abs(y[np.isfinite(y)]).max(initial=1e-30)
        worst = max(worst, float(off.max(initial=0) / largest))
    return worst


def to_json(plan: Plan, expected: Mapping[str, Array]) -> dict[str, Any]:
    """The content of test.json."""
    kept = []
    for port in plan.outputs:
        flat = expected[port.name].ravel()
        stride = max(1, -(-flat.size // MOST))
        values = [_number(v) for v in flat[::stride].tolist()]
        kept.append({"stride": stride, "values": values})
    return {"symbols": symbols_of(plan), "outputs": kept}


def _number(value: Any) -> Any:
    """Nine digits tell every float32 apart; None for what is not finite."""
    if not isinstance(value, float):
        return int(value)
    return float(f"{value:.9g}") if np.isfinite(value) else None
