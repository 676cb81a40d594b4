"""``tinyedge check``: which nodes of a model can't be compiled, before anything runs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from ..errors import InputError
from .options import bindings, compilation, is_plan, json_flag, table

HELP = "list every node of an ONNX model that can't be compiled, and why"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="MODEL.onnx")
    compilation(parser, states=False)
    json_flag(parser)


def run(a: argparse.Namespace) -> int:
    options = bindings(a)
    if is_plan(a.file):
        raise InputError(f"{a.file} is a plan already; give an ONNX model")
    from ..codegen.llvm_target import parse_targets
    from ..onnx import check

    target = " and ".join(t.canonical for t in parse_targets(a.target))
    problems = check(a.file, **options)
    if a.json:
        print(json.dumps({"model": a.file, "target": target,
                          "problems": [asdict(p) for p in problems]}))
    elif problems:
        rows = [[p.node, f"{p.domain}.{p.operator}" if p.domain else p.operator, p.opset,
                 p.dtype or "?", p.reason] for p in problems]
        print(table(("node", "operator", "opset", "dtype", "reason"), rows, "opset"))
        print(f"{a.file}: {len(problems)} nodes can't be compiled for {target}")
    else:
        print(f"{a.file}: every node can be compiled for {target}")
    return 1 if problems else 0
