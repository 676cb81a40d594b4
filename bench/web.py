"""Bundles against onnxruntime-web in the same page of headless Chromium: `python -m bench.web`.

Every network is exported for the web, then both runtimes are loaded in one page and take turns.
Outputs are compared in the same run. `Load` is the time from a page without any script of either
to the first result, files coming from a server on this machine. Exits with 1 where an output is off
by more than `LIMIT` or something failed. With all networks and without --no-write the tables of
bench/README.md are written anew, for the back ends that were raced.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import tinyedge
from bench import measure
from examples.files import CACHE, write_whole
from tests.models import MODELS
from tinyedge.web import export

NETWORKS = ("efficientnet-lite0", "ppocr-det", "ppocr-rec", "basic-pitch", "magika", "squeezenet",
            "resnet50", "silero-vad")
LIMIT = 1e-4
HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "build" / "bench-web"
BEGIN, END = "<!-- begin of what `make bench-web` writes -->", "<!-- end of that -->"

RACES = (("wasm", 1, 30, 3), ("wasm", 2, 30, 0), ("webgpu", 1, 3, 1))
"""Back end, threads, runs, loads; a software adapter takes seconds for a run."""


def prepare(name: str, target: str) -> dict[str, Any]:
    """Exports a network and writes what the page needs; bytes of the parts."""
    spec, folder = MODELS[name], FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    path = spec.obtain(CACHE)
    shutil.copy(path, folder / "model.onnx")
    report = export(path, target, folder / "bundle", shapes=spec.shapes, states=spec.states)
    feeds = []
    for number, (key, array) in enumerate(spec.make(np.random.default_rng(0)).items()):
        state = key in spec.states.values()
        array = np.zeros_like(array) if state else np.array(array, order="C")
        (folder / f"{number}.bin").write_bytes(array.tobytes())
        feeds.append({"name": key, "dtype": array.dtype.name, "shape": array.shape,
                      "file": f"{number}.bin", "state": state})
    (folder / "feeds.json").write_text(json.dumps(feeds))
    return {part.name: part.compressed for part in report.parts}


def races(names: list[str], backend: str, threads: int, runs: int, loads: int
          ) -> dict[str, dict[str, Any]]:
    """name -> what race.mjs measured."""
    words = ["node", HERE / "browser" / "race.mjs", FOLDER, backend, threads, runs, loads, *names]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
    out = {line["name"]: line for line in lines}
    for name in names:
        out.setdefault(name, {"failure": (done.stderr.strip().splitlines() or ["no answer"])[-1]})
    return out


def row(name: str, threads: int, found: dict[str, Any]) -> tuple[list[str], list[float]]:
    """(cells, [times faster, times sooner])"""
    if "failure" in found:
        return [name, str(threads), found["failure"], "", "", "", "", ""], []
    ours, theirs = (statistics.median(t) for t in found["times"])
    factor = statistics.median(b / a for a, b in zip(*found["times"]))
    cells = [name, str(threads), f"{ours:.2f}", f"{theirs:.2f}", f"{factor:.2f}"]
    factors = [factor]
    if found["loads"][0]:
        a, b = (statistics.median(t) for t in found["loads"])
        cells += [f"{a:.0f}", f"{b:.0f}"]
        factors.append(b / a)
    else:
        cells += ["", ""]
    return [*cells, f"{found['error']:.1e}"], factors


def mean(values: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def main() -> int:
    parser = argparse.ArgumentParser(description="Bundles against onnxruntime-web.")
    parser.add_argument("networks", nargs="*", help=f"of {', '.join(NETWORKS)}; default: all")
    parser.add_argument("--backend", choices=["wasm", "webgpu"], help="one of them only")
    parser.add_argument("--runs", type=int, help="runs of each")
    parser.add_argument("--no-write", action="store_true")
    a = parser.parse_args()
    names = a.networks or list(NETWORKS)
    if not (HERE / "browser" / "node_modules").exists():
        sys.exit("bench.web: onnxruntime-web is missing; use make bench-web")
    chosen = [race for race in RACES if a.backend in (None, race[0])]
    target = a.backend or "web"
    sizes = {name: prepare(name, target) for name in names}
    shutil.copy(HERE.parent / "tests" / "web" / "empty.html", FOLDER)
    failed = False
    text = ["- " + f"{key}: {value}" for key, value in measure.machine().items()
            if key in ("processor", "cores", "system", "date")]
    text += [f"- tinyedge {tinyedge.__version__}, onnxruntime-web {peer()}", ""]
    head = ["network", "threads", "tinyedge ms", "onnxruntime-web ms", "times faster",
            "load ms", "onnxruntime-web load ms", "error"]
    for backend in dict.fromkeys(race[0] for race in chosen):
        title = {"wasm": "WebAssembly", "webgpu": "WebGPU on a software adapter"}[backend]
        text += [f"{title}:", "", f"| {' | '.join(head)} |",
                 "| --- |" + " --: |" * (len(head) - 1)]
        totals: dict[int, list[list[float]]] = {}
        for _, threads, runs, loads in (race for race in chosen if race[0] == backend):
            for name, found in races(names, backend, threads, a.runs or runs, loads).items():
                cells, factors = row(name, threads, found)
                print("  ".join(cells), flush=True)
                text.append(f"| {' | '.join(cells)} |")
                failed |= not factors or found["error"] > LIMIT
                totals.setdefault(threads, []).append(factors)
        for threads, found_ones in totals.items():
            faster = mean([f[0] for f in found_ones if f])
            sooner = mean([f[1] for f in found_ones if len(f) > 1])
            said = f"; to the first result {sooner:.1f} times sooner" if sooner == sooner else ""
            text.append(f"\nGeometric mean with {threads} thread{'s' * (threads > 1)}: "
                        f"{faster:.2f} times faster{said}.")
            print(text[-1].strip())
        text.append("")
    text += sizes_table(sizes)
    if not a.no_write and not a.networks:
        readme = HERE / "README.md"
        before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        tables = "\n".join(text).strip()
        write_whole(readme, f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}".encode())
    return 1 if failed else 0


def sizes_table(sizes: dict[str, dict[str, int]]) -> list[str]:
    """What a visitor downloads, in kB of gzip, without weights."""
    parts = list(dict.fromkeys(part for each in sizes.values() for part in each
                               if not part.startswith("weights")))
    out = ["", "Bytes of a bundle's parts for both back ends, kB after gzip (weights apart):", "",
           f"| network | {' | '.join(parts)} |", "| --- |" + " --: |" * len(parts)]
    for name, each in sizes.items():
        cells = [f"{each[part] / 1e3:.1f}" if part in each else "" for part in parts]
        out.append(f"| {name} | {' | '.join(cells)} |")
    return out


def peer() -> str:
    package = HERE / "browser" / "node_modules" / "onnxruntime-web" / "package.json"
    version: str = json.loads(package.read_text())["version"]
    return version


if __name__ == "__main__":
    sys.exit(main())
