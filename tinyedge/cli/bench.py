"""``tinyedge bench``: how long a run takes, alone or in turn with onnxruntime's."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .options import (
    clip,
    compilation,
    feeding,
    inputs_of,
    is_plan,
    plan_of,
    positive,
    states_of,
    table,
    writable,
    write,
)

if TYPE_CHECKING:
    from ..profile import StepTime

HELP = "measure the time of a run, also against onnxruntime"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="PLAN.pkl|MODEL.onnx")
    parser.add_argument("--against", choices=["onnxruntime"], help="take turns with it")
    parser.add_argument("--model", metavar="MODEL.onnx", help="the model of a plan, for --against")
    parser.add_argument("--runs", type=positive, default=50, metavar="N",
                        help="runs to measure, at least; default: 50")
    parser.add_argument("--steps", type=positive, metavar="N", help="also the N longest steps")
    compilation(parser)
    feeding(parser)
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file as well")


def run(a: argparse.Namespace) -> int:
    from .. import profile
    from ..runtime import load
    from ..verify import onnxruntime_session

    if a.json:
        writable(a.json)
    model = a.model or (None if is_plan(a.file) else a.file)
    if a.against and model is None:
        raise InputError(f"--against {a.against} needs the model of {a.file}; give it by --model")
    plan = plan_of(a)
    inputs = inputs_of(plan, a)
    with profile.processors(a.threads) if a.threads else nullcontext():
        with load(plan, a.device, a.threads) as ours:
            calls: dict[str, Callable[[], object]] = {"tinyedge": lambda: ours(inputs)}
            if a.against and model:
                theirs = onnxruntime_session(Path(model), a.threads or 0)
                feeds = {**inputs, **states_of(plan)}
                calls[a.against] = lambda: theirs.run(None, feeds)
            times, ratios = profile.race(calls, a.runs)
            steps = profile.step_times(ours, inputs) if a.steps else []
    operations = profile.flops(plan)
    facts: dict[str, Any] = {
        "file": a.file, "target": plan.target, "threads": a.threads or "all",
        "flops": operations,
        "times": {name: {"median ms": t.median, "least ms": t.least, "runs": t.runs,
                         "ratio": ratios[name]} for name, t in times.items()},
    }
    if steps:
        facts["steps"] = [profile.as_dict(s) for s in steps]
    if a.json:
        write(a.json, json.dumps(facts, indent=1).encode() + b"\n")
    rows = [[name, f"{t.median:.3f}", f"{t.least:.3f}", t.runs,
             f"{operations / t.median / 1e6:.1f}", f"{ratios[name]:.2f}"]
            for name, t in times.items()]
    head = ["runtime", "median ms", "least ms", "runs", "GFLOP/s", "ratio"]
    if len(rows) == 1:
        head, rows = head[:-1], [row[:-1] for row in rows]
    print(table(head, rows, ",".join(head[1:])))
    if len(rows) > 1:
        print(f"ratio: the time of tinyedge by the time of {a.against}, the median of blocks in "
              "turn; below 1 tinyedge is faster")
    if steps:
        print(longest(steps, a.steps))
    return 0


def longest(steps: list[StepTime], count: int) -> str:
    """A table of the steps that take longest."""
    total = sum(s.us for s in steps) or 1.0
    rows = [[s.number, f"{s.us:.1f}", f"{s.us / total:.1%}", f"{s.gflops:.1f}", f"{s.gbytes:.1f}",
             s.name, clip(", ".join(s.nodes), 60)]
            for s in sorted(steps, key=lambda s: -s.us)[:count]]
    return table(("step", "us", "share", "GFLOP/s", "GB/s", "kernel", "nodes"), rows,
                 "step,us,share,GFLOP/s,GB/s")
