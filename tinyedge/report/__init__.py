"""What a plan holds, for people and scripts: `facts` as builtin types, `page` as one HTML file.

Reads plans only. What `tinyedge inspect` shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..plan import (
    SCRATCH,
    Copy,
    If,
    Launch,
    Loop,
    Plan,
    Ref,
    Size,
    Step,
    evaluate,
    flat,
    show_shape,
)
from ..profile import StepTime, flops, name_of
from .html import page

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass
class Lifetime:
    """A range of the scratch arena, from the step that writes it to the last that uses it."""

    offset: int
    size: int
    first: int
    last: int
    by: str
    read: bool = False


def lifetimes(plan: Plan) -> list[Lifetime]:
    """What lies in the scratch arena and when, by places in `flat(plan.steps)`.

    Told by the steps alone: a range that is written after it was read is another buffer.
    """
    highest = highest_of(plan)
    open_: dict[int, Lifetime] = {}
    out: list[Lifetime] = []
    ends: list[tuple[int, int]] = []

    def write(at: int, ref: Ref, by: str) -> None:
        size = evaluate(ref.size, highest)
        held = open_.get(ref.offset)
        if held is None or held.read:
            for other in list(open_.values()):  # whose memory is taken
                if other.offset < ref.offset + size and ref.offset < other.offset + other.size:
                    del open_[other.offset]
            out.append(Lifetime(ref.offset, size, at, at, by))
            open_[ref.offset] = out[-1]
        else:
            held.last, held.size = at, max(held.size, size)

    for at, step in enumerate(flat(plan.steps)):
        reads, writes = uses(plan, step)
        for ref in reads:
            if ref.arena == SCRATCH:
                # a copy may read from the middle of a buffer
                for held in open_.values():
                    if held.offset <= ref.offset < held.offset + held.size:
                        held.last, held.read = at, True
        for ref in writes:
            if ref.arena == SCRATCH:
                write(at, ref, ", ".join(step.nodes) or name_of(plan, step))
        if isinstance(step, Loop):
            ends.append((at, at + sum(1 for _ in flat(step.body))))
    for start, end in ends:
        for life in out:
            if life.first < start <= life.last < end:
                life.last = end
    return out


def uses(plan: Plan, step: Step) -> tuple[list[Ref], list[Ref]]:
    """What a step reads and what it writes; of control flow its condition."""
    if isinstance(step, Launch):
        writes = plan.kernels[step.kernel].writes
        return ([b for i, b in enumerate(step.buffers) if i not in writes],
                [b for i, b in enumerate(step.buffers) if i in writes])
    if isinstance(step, Copy):
        return [step.source], [step.target]
    return [step.cond, step.trips] if isinstance(step, Loop) else [step.cond], []


def highest_of(plan: Plan) -> Mapping[str, int]:
    """The largest value of every symbol; of a loop's counter 0."""
    counters = {s.symbol: 0 for s in flat(plan.steps) if isinstance(s, Loop)}
    return counters | {name: high for name, (_, high) in plan.symbols.items()}


def facts(plan: Plan, times: Sequence[StepTime] | None = None) -> dict[str, Any]:
    """Everything that is shown of a plan; kernels by operations, or by time where it is known.

    times: of `tinyedge.profile.step_times`.
    """
    steps = list(flat(plan.steps))
    kernels: list[dict[str, Any]] = [
        {"name": k.name, "launches": 0, "flops": k.flops, "bytes": k.bytes, "us": None,
         "nodes": [], **k.resources}
        for k in plan.kernels]
    for i, step in enumerate(steps):
        if isinstance(step, Launch):
            k = kernels[step.kernel]
            k["launches"] += 1
            k["nodes"] += [n for n in step.nodes if n not in k["nodes"]]
            if times is not None:
                k["us"] = (k["us"] or 0.0) + times[i].us
    kernels.sort(key=lambda k: (-(k["us"] or 0), -k["flops"] * k["launches"], -k["bytes"]))
    lives = lifetimes(plan)
    constants, scratch, states = plan.arenas

    def port(name: str, shape: tuple[Size, ...], dtype: str) -> dict[str, str]:
        return {"name": name, "shape": show_shape(shape), "dtype": dtype}

    return {
        "name": plan.name, "target": plan.target, "producer": plan.producer,
        "format": plan.format, "variants": [v.target for v in plan.variants],
        "inputs": [port(p.name, p.shape, p.dtype) for p in plan.inputs],
        "outputs": [port(p.name, p.shape, p.dtype) for p in plan.outputs],
        "states": [port(s.name, s.shape, s.dtype) for s in plan.states],
        "symbols": dict(plan.symbols), "metadata": dict(plan.metadata),
        "provenance": dict(plan.provenance), "steps": len(steps), "flops": flops(plan),
        "us": None if times is None else sum(
            t.us for t, s in zip(times, steps) if not isinstance(s, If | Loop)),
        "memory": {
            "constants": constants, "scratch": scratch, "states": states, "code": len(plan.code),
            "unpacked": sum(life.size for life in lives),
            "lifetimes": [{"offset": v.offset, "size": v.size, "first": v.first, "last": v.last,
                           "by": v.by} for v in lives],
        },
        "kernels": kernels,
    }


__all__ = ["Lifetime", "facts", "lifetimes", "page"]
