"""``tinyedge inspect``: what is in a plan."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..report.html import amount
from .options import clip, inputs_of, json_flag, table, writable, write

if TYPE_CHECKING:
    from ..plan import Plan, Ref, Step

HELP = "show memory, kernels and steps of a plan"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="PLAN.pkl")
    parser.add_argument("--html", metavar="FILE", help="write a page with the memory and kernels")
    parser.add_argument("--profile", action="store_true",
                        help="also time the steps on random inputs, for --html and the table")
    parser.add_argument("--commands", action="store_true", help="list every step")
    parser.add_argument("--source", metavar="KERNEL", help="print a kernel's loops and code")
    json_flag(parser)


def run(a: argparse.Namespace) -> int:
    from ..planfile import read
    from ..report import facts, page

    if a.html:
        writable(a.html, (".html", ".htm"))
    plan = read(a.file)
    if a.source:
        kernel = next((k for k in plan.kernels if k.name == a.source), None)
        if kernel is None:
            raise InputError(f"--source {a.source}: there is no such kernel; tinyedge inspect "
                             f"{a.file} lists the names")
        print(f"{kernel.loops.rstrip()}\n\n{kernel.source.rstrip()}")
        return 0
    times = None
    if a.profile:
        from ..profile import step_times
        from ..runtime import load

        with load(plan) as model:
            times = step_times(model, inputs_of(plan, argparse.Namespace(input=[], size=[])))
    known = facts(plan, times)
    if a.html:
        write(a.html, page(known).encode())
    if a.json:
        print(json.dumps(known))
    elif a.commands:
        print("\n".join(_commands(plan)))
    else:
        print(_text(a.file, known))
    return 0


def _text(file: str, known: dict[str, Any]) -> str:
    lines = [f"{file}: {known['name'] or 'a model'} for {known['target']}, by {known['producer']}"]
    lines += [f"  also for {target}; the figures below are for the first" for target in
              known["variants"]]
    for kind in ("inputs", "outputs", "states"):
        lines += [f"  {kind[:-1]:<6} {p['name']}: {p['dtype']}{p['shape']}" for p in known[kind]]
    lines += [f"  {name} in {low}..{high}" for name, (low, high) in known["symbols"].items()]
    memory = known["memory"]
    lines.append(f"  memory: {amount(memory['constants'])} constants, {amount(memory['scratch'])} "
                 f"scratch ({amount(memory['unpacked'])} unpacked), {amount(memory['states'])} "
                 f"states, {amount(memory['code'])} code")
    kernels = known["kernels"]
    lines.append(f"  {len(kernels)} kernels in {known['steps']} steps, "
                 f"{known['flops'] / 1e9:.3g} GFLOP a run")
    rows = []
    for k in kernels[:25]:
        time = f"{k['us']:.1f}" if k["us"] is not None else ""
        rows.append([k["name"], k["launches"], f"{k['flops'] / 1e6:.3g}", amount(k["bytes"]), time,
                     clip(", ".join(k["nodes"]), 50)])
    head = ["kernel", "launches", "MFLOP", "bytes", "us", "nodes"]
    if all(k["us"] is None for k in kernels):
        head.remove("us")
        rows = [row[:4] + row[5:] for row in rows]
    lines.append(table(head, rows, "launches,MFLOP,bytes,us"))
    if len(kernels) > 25:
        lines.append(f"... and {len(kernels) - 25} smaller ones; --json lists all")
    return "\n".join(lines)


def _commands(plan: Plan) -> list[str]:
    from ..plan import Copy, If, Launch, show_size

    arenas = ["constants", "scratch", "states", *(p.name for p in plan.inputs),
              *(p.name for p in plan.outputs)]
    lines: list[str] = []

    def ref(r: Ref) -> str:
        return f"{arenas[r.arena]}[{r.offset}:+{show_size(r.size)}]"

    def show(steps: tuple[Step, ...], indent: str) -> None:
        for s in steps:
            names = f"   # {', '.join(s.nodes)}" if s.nodes else ""
            if isinstance(s, Launch):
                kernel = plan.kernels[s.kernel]
                buffers = ", ".join(("*" if i in kernel.writes else "") + ref(b)
                                    for i, b in enumerate(s.buffers))
                scalars = f"; {', '.join(s.scalars)}" if s.scalars else ""
                wait = "wait " if s.sync else ""
                lines.append(f"{indent}{wait}{kernel.name}<{show_size(s.grid)}>({buffers}{scalars})"
                             f"{names}")
            elif isinstance(s, Copy):
                lines.append(f"{indent}{'wait ' if s.sync else ''}copy *{ref(s.target)} = "
                             f"{ref(s.source)}{names}")
            elif isinstance(s, If):
                lines.append(f"{indent}if {ref(s.cond)}:{names}")
                show(s.then, indent + "    ")
                lines.append(f"{indent}else:")
                show(s.other, indent + "    ")
            else:
                lines.append(f"{indent}for {s.symbol} < {ref(s.trips)} while {ref(s.cond)}:{names}")
                show(s.body, indent + "    ")

    show(plan.steps, "")
    return lines
