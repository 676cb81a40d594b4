"""``tinyedge compile``: an ONNX model becomes a plan file."""

from __future__ import annotations

import argparse
import json
import os

from ..errors import InputError
from ..report.html import amount
from .options import (
    bindings,
    compilation,
    is_plan,
    json_flag,
    plan_of,
    writable,
)

HELP = "compile an ONNX model to a plan file"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="MODEL.onnx")
    parser.add_argument("-o", "--output", required=True, metavar="OUT.pkl", help="the plan file")
    compilation(parser)
    json_flag(parser)


def run(a: argparse.Namespace) -> int:
    bindings(a)
    if is_plan(a.file):
        raise InputError(f"{a.file} is a plan already; give an ONNX model")
    writable(a.output)
    if os.path.exists(a.output) and os.path.exists(a.file) and os.path.samefile(a.output, a.file):
        raise InputError(f"{a.output} is the model itself; choose another name for the plan")
    plan = plan_of(a)
    plan.save(a.output)
    constants, scratch, states = plan.arenas
    facts = {
        "plan": a.output, "bytes": os.path.getsize(a.output),
        "target": " and ".join(p.target for p in (plan, *plan.variants)),
        "kernels": len(plan.kernels), "steps": len(plan.steps), "code": len(plan.code),
        "constants": constants, "scratch": scratch, "states": states,
        "seconds": plan.provenance.get("compile seconds"),
    }
    if a.json:
        print(json.dumps(facts))
    else:
        print(f"{a.output}: {amount(facts['bytes'])} for {plan.target}, {len(plan.kernels)} "
              f"kernels in {len(plan.steps)} steps, {amount(constants)} constants, "
              f"{amount(scratch)} scratch memory; compiled in {facts['seconds']:.2f} s")
    return 0
