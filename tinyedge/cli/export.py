"""``tinyedge export``: a model becomes a folder that a web page loads it from."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING

from ..errors import InputError
from .options import bindings, compilation, is_plan, json_flag, progress

if TYPE_CHECKING:
    from ..web import Report

HELP = "export a model as a web page's module, or as C source"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="MODEL.onnx|PLAN.pkl")
    parser.add_argument("-o", "--output", required=True, metavar="DIR",
                        help="the folder; one that an export wrote is replaced")
    compilation(parser, target="web", targets="webgpu, wasm, or web (the default) "
                "for both; c for C11 source and a header")
    parser.add_argument("--weights", default="float32", choices=("float32", "float16", "int8"),
                        help="how weights are stored: float16 halves, int8 quarters the download")
    parser.add_argument("--labels", metavar="FILE.json", help="names of classes for the demo page: "
                        '["cat", ...], or {"labels": [...], "mean": M, "std": S, "crop": C}')
    json_flag(parser)


def run(a: argparse.Namespace) -> int:
    from ..web import export

    options = bindings(a)
    if a.tune:
        raise InputError("--tune measures on this machine's processor, and a page runs elsewhere")
    if not os.path.isfile(a.file):
        raise InputError(f"{a.file} is not a file; give an ONNX model or a plan")
    if a.bfloat16:
        raise InputError("--bfloat16 is for processors that multiply such values; use --float16")
    if is_plan(a.file):
        for flag in ("dim", "shape", "state", "float16"):
            if getattr(a, flag):
                raise InputError(f"--{flag} is for compiling a model; {a.file} is a plan")
    with progress() as shown:
        report = export(a.file, a.target, a.output, weights=a.weights, labels=a.labels,
                        progress=shown, cache=not a.no_cache, float16=a.float16, **options)
    if a.json:
        print(json.dumps({"folder": report.folder, **report.facts}))
    else:
        show(report)
    return 0


def show(report: Report) -> None:
    """A table of what takes how many bytes, and what a user should know."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=report.folder, title_justify="left", box=None, pad_edge=False)
    table.add_column("part")
    table.add_column("bytes", justify="right")
    table.add_column("gzip", justify="right")
    for part in report.parts:
        table.add_row(part.name, f"{part.raw:,}",
                      "" if part.compressed is None else f"{part.compressed:,}")
    console = Console()
    console.print(table)
    for note in report.notes:
        console.print(note, markup=False, soft_wrap=True)
