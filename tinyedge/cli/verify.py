"""``tinyedge verify``: whether a plan computes what its model says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .options import (
    compilation,
    feeding,
    fraction,
    inputs_of,
    is_plan,
    json_flag,
    plan_of,
    progress,
    states_of,
    table,
)

if TYPE_CHECKING:
    from ..plan import Plan

HELP = "compare outputs with a second runtime's, and a plan with itself"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="MODEL.onnx|PLAN.pkl")
    parser.add_argument("--against", choices=["onnxruntime", "reference"],
                        help="what is right: onnxruntime (the default where it is installed) or "
                        "the reference of the onnx package")
    parser.add_argument("--model", metavar="MODEL.onnx", help="the model of a plan; without it a "
                        "plan is only compared with itself")
    parser.add_argument("--tolerance", type=fraction, metavar="X", help="largest difference of a "
                        "float output, relative to its largest value; default: 1e-4 for float32")
    parser.add_argument("--bisect", action="store_true",
                        help="where an output is off, find the first node that is")
    compilation(parser)
    feeding(parser)
    json_flag(parser)


def run(a: argparse.Namespace) -> int:
    from .. import verify

    model = a.model or (None if is_plan(a.file) else a.file)
    if model is None and (a.against or a.bisect):
        flag = "--bisect" if a.bisect else "--against"
        raise InputError(f"{flag} needs the model of {a.file}; give it by --model")
    plan = plan_of(a)
    if a.model and is_plan(a.file):
        _same(plan, a.model)
    feeds = {**inputs_of(plan, a), **states_of(plan)}
    against = a.against or _installed()
    want = verify.REFERENCES[against](Path(model), feeds) if model else None
    checks = verify.verify(plan, feeds, want, a.device, a.tolerance)
    failed = [c for c in checks if not c.passed]
    parting = None
    if a.bisect and model and any(c.tolerance for c in failed):
        with progress() as report:
            parting = verify.bisect(model, feeds, plan.target, against, a.tolerance, a.device,
                                    report)
    if a.json:
        print(json.dumps({
            "file": a.file, "target": plan.target, "against": against if model else None,
            "passed": not failed, "checks": [
                {"what": c.what, "error": _finite(c.error), "tolerance": c.tolerance,
                 "passed": c.passed, "note": c.note} for c in checks],
            "first": None if parting is None else {
                "stage": parting.stage, "value": parting.value, "node": parting.node,
                "operator": parting.operator, "error": _finite(parting.error)}}))
        return 1 if failed else 0
    rows = [[c.what, f"{c.error:.1e}", f"{c.tolerance:.0e}" if c.tolerance else "0",
             "ok" if c.passed else "OFF", c.note] for c in checks]
    print(table(("compared", "difference", "allowed", "", ""), rows, "difference,allowed"))
    if parting is not None:
        print(_sentence(parting))
    elif a.bisect and failed:
        print("no value of a node at the model's top level is off by itself")
    print(f"{a.file}: {len(failed)} of {len(checks)} comparisons are off" if failed else
          f"{a.file}: {len(checks)} comparisons, none off"
          + (f"; {against} is the reference" if model else "; compared with itself only"))
    return 1 if failed else 0


def _sentence(p: Any) -> str:
    tail = ""
    if p.alone is not None:
        tail = (f"; compiled by itself that node is off by {p.alone:.1e}" if p.alone else
                "; compiled by itself that node is right")
    return (f"first off: node {p.node} ({p.operator}), value {p.value}, by {p.error:.1e}; the "
            f"{p.stage} is at fault{tail}")


def _finite(x: float) -> float | str:
    return x if x < float("inf") else "inf"


def _installed() -> str:
    from importlib.util import find_spec

    return "onnxruntime" if find_spec("onnxruntime") else "reference"


def _same(plan: Plan, model: str) -> None:
    """InputError unless the plan was compiled from this very file."""
    from hashlib import sha256

    try:
        data = Path(model).read_bytes()
    except OSError as error:
        raise InputError(f"--model {model} can't be read: {error.strerror or error}") from None
    known = plan.provenance.get("sha256")
    if known and known != sha256(data).hexdigest():
        raise InputError(f"--model {model} is not the file that the plan was compiled from; give "
                         f"that one ({plan.provenance.get('model')})")
