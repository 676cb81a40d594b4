"""Times of a bound model: of its runs, against another callable's, and of each step.

After the run time. Nothing here changes what runs; figures are medians, warm-up apart.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .plan import Copy, If, Kernel, Launch, Loop, Plan, Step, flat

if TYPE_CHECKING:
    from .runtime import Array, Model

Call = Callable[[], object]

SETTLE = 0.03
"""Seconds of rest before a block of runs: by then another runtime's threads have stopped
spinning."""
BLOCK = 0.05
"""Seconds that a block of runs lasts at least, so that waking up does not weigh."""


@dataclass(frozen=True)
class Times:
    """Of one call, in milliseconds."""

    median: float
    least: float
    runs: int


def timed(call: Call, count: int) -> list[float]:
    """Milliseconds of each of `count` calls."""
    out = []
    for _ in range(count):
        start = time.perf_counter_ns()
        call()
        out.append((time.perf_counter_ns() - start) / 1e6)
    return out


def race(calls: Mapping[str, Call], runs: int, blocks: int = 7
         ) -> tuple[dict[str, Times], dict[str, float]]:
    """Times callables in turn, block by block, each with at least `runs` runs after a warm-up.

    Returns the times, and for each the median over blocks of the ratio of the first one's median
    to its own: 1 for the first, below 1 where the first is faster.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    ratios: dict[str, list[float]] = {name: [] for name in calls}
    counts = {}
    for name, call in calls.items():
        call()
        once = max(min(timed(call, 2)), 1e-6)
        counts[name] = max(-(-runs // blocks), min(200, int(BLOCK * 1e3 / once) + 1))
    order = list(calls)
    for turn in range(blocks):
        middle = {}
        # who comes first changes, so that nobody gains by it
        for name in order[turn % len(order):] + order[:turn % len(order)]:
            time.sleep(SETTLE)
            timed(calls[name], 2)
            block = timed(calls[name], counts[name])
            samples[name].extend(block)
            middle[name] = statistics.median(block)
        for name in order:
            ratios[name].append(middle[order[0]] / middle[name])
    return ({name: Times(statistics.median(s), min(s), len(s)) for name, s in samples.items()},
            {name: statistics.median(r) for name, r in ratios.items()})


@contextmanager
def processors(count: int) -> Iterator[None]:
    """Keeps this process, and threads made from now on, on its first `count` processors."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def flops(plan: Plan) -> int:
    """Floating-point operations of a run: of an If its larger branch, of a Loop one turn."""
    def of(step: Step) -> int:
        if isinstance(step, Launch):
            return plan.kernels[step.kernel].flops
        if isinstance(step, If):
            return max(sum(map(of, step.then)), sum(map(of, step.other)))
        return sum(map(of, step.body)) if isinstance(step, Loop) else 0

    return sum(map(of, plan.steps))


@dataclass(frozen=True)
class StepTime:
    """One step's share of a run.

    number: its place in `flat(plan.steps)`. name: of its kernel, or "copy", "if", "loop".
    nodes: the model's nodes that it computes. us: microseconds, the median of the runs.
    """

    number: int
    name: str
    nodes: tuple[str, ...]
    us: float
    flops: int
    bytes: int

    @property
    def gflops(self) -> float:
        """10^9 floating-point operations a second."""
        return self.flops / self.us / 1e3 if self.us else 0.0

    @property
    def gbytes(self) -> float:
        """10^9 bytes read and written a second."""
        return self.bytes / self.us / 1e3 if self.us else 0.0


def name_of(plan: Plan, step: Step) -> str:
    """A step's kernel's name, or what kind of step it is."""
    return plan.kernels[step.kernel].name if isinstance(step, Launch) else \
        type(step).__name__.lower()


def step_times(model: Model, inputs: Mapping[str, Array], runs: int = 20) -> list[StepTime]:
    """Every step's time, in the plan's order; the states change as `runs` + 2 runs change them."""
    for _ in range(2):
        model(inputs)
    columns = zip(*(model.profile(inputs)[1] for _ in range(runs)))
    none = Kernel("", 0)
    out = []
    for i, (step, ns) in enumerate(zip(flat(model.plan.steps), columns)):
        kernel = model.plan.kernels[step.kernel] if isinstance(step, Launch) else none
        moved = step.source.size if isinstance(step, Copy) else 0
        out.append(StepTime(
            i, name_of(model.plan, step), step.nodes, statistics.median(ns) / 1e3, kernel.flops,
            kernel.bytes or (2 * moved if isinstance(moved, int) else 0)))
    return out


def as_dict(t: StepTime) -> dict[str, Any]:
    """For JSON."""
    return {"step": t.number, "kernel": t.name, "nodes": list(t.nodes), "us": round(t.us, 3),
            "flops": t.flops, "bytes": t.bytes}


__all__ = ["StepTime", "Times", "flops", "name_of", "processors", "race", "step_times", "timed"]
