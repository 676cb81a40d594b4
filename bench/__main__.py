"""tinyedge against onnxruntime and OpenVINO on real networks: `python -m bench`.

The networks of `tests.models` and those of `bench.networks`. Each is compiled, its outputs are
compared with onnxruntime's in the same run, and all runtimes are timed in turn. Exits with 1 if an
output is off by more than `LIMIT`, if a speed-up fell by more than `FALL` of what the results file
has of the same kind of machine (ratios are compared, never times), or if something failed. Without
`--no-write`, and with all networks, the tables of bench/README.md and bench/results.json are
written anew.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

import tinyedge
from bench import measure
from bench.measure import MB, fresh
from bench.networks import NETWORKS, QUANTISED
from examples.files import CACHE, write_whole
from tests.models import MODELS, Array, Spec
from tinyedge.plan import Plan
from tinyedge.profile import flops, processors, race, timed
from tinyedge.verify import largest, onnxruntime_session

LIMIT, QUANTISED_LIMIT = 1e-4, 0.1
"""Largest difference; where everything is rounded to 8 bits, one step more or less goes a long
way."""
FALL = 0.15
FOLDER = Path(__file__).resolve().parent
SHOWCASE = "efficientnet-lite0"
BEGIN, END = "<!-- begin of what `make bench` writes -->", "<!-- end of it -->"

Figures = dict[str, Any]


SPECS: dict[str, Spec] = MODELS | NETWORKS | QUANTISED


def model(name: str) -> Path:
    return SPECS[name].obtain(CACHE)


def inputs(name: str) -> dict[str, Array]:
    return SPECS[name].make(np.random.default_rng(0))


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def compiled(name: str, folder: Path) -> Figures:
    """Compiles a network twice in fresh processes, with an empty cache and with the first one's."""
    spec, plan = SPECS[name], folder / f"{name}.pkl"
    options = json.dumps({"shapes": spec.shapes, "states": spec.states})
    cache = folder / f"{name}-cache"
    cold, warm = (fresh("compile", model(name), plan, options, cache=cache) for _ in range(2))
    size = plan.stat().st_size / MB
    os.sync()  # writing it to disk would go on meanwhile
    loads = [fresh("load", plan) for _ in range(5)]
    feeds = folder / f"{name}.npz"
    np.savez(feeds, allow_pickle=False, **inputs(name))
    if heavy := loads[0]["heavy"]:
        raise RuntimeError(f"loading a plan imports {', '.join(heavy)}")
    return {
        "compile": cold["compile"], "compile warm": warm["compile"],
        "command": cold["seconds"], "command warm": warm["seconds"],
        "kernels": cold["kernels"], "steps": cold["steps"], "size": size,
        "model size": model(name).stat().st_size / MB,
        "load": statistics.median(each["load"] for each in loads),
        "import": statistics.median(each["import"] for each in loads),
        "load peak": max(each["load peak"] for each in loads), "save peak": warm["save peak"],
        "compile peak": cold["peak"],
        "run peak": fresh("run", "tinyedge", plan, feeds, "1")["peak"],
        "onnxruntime peak": fresh("run", "onnxruntime", model(name), feeds, "1")["peak"],
    }


def compared(name: str, plan: Path, threads: int, runs: int) -> Figures:
    """Outputs and times of all runtimes on `threads` processors."""
    spec, feeds = SPECS[name], inputs(name)
    with processors(threads):
        theirs = onnxruntime_session(model(name), threads)
        with tinyedge.load(plan, threads=threads) as ours:
            visible = {key: feeds[key] for key in ours.inputs}
            for state in ours.states:
                ours.states[state] = feeds[state]
            got = dict(ours(visible))
            got |= {output: ours.states[state] for output, state in spec.states.items()}
            names = [output.name for output in theirs.get_outputs()]
            error = largest(got, dict(zip(names, theirs.run(names, feeds))))
            calls: dict[str, Callable[[], object]] = {
                "tinyedge": lambda: ours(visible), "onnxruntime": lambda: theirs.run(None, feeds)}
            if other := measure.openvino_call(model(name), feeds, threads):
                calls["openvino"] = other
            times, ratios = race(calls, runs)
            operations = flops(ours.plan)
    return {
        "error": error, "gflops": operations / times["tinyedge"].median / 1e6,
        "speedup": 1 / max(ratios[peer] for peer in calls if peer != "tinyedge"),
        **{runtime: {"median": t.median, "least": t.least, "runs": t.runs}
           for runtime, t in times.items()},
    }


def overhead(folder: Path) -> Figures:
    """Microseconds of a call with one operation on one element, and of one more step that waits
    for the step before it."""
    x = np.ones(1, np.float32)
    one = chain("Add", 1, x, x, folder / "one.onnx")
    rows, square = np.ones((64, 16), np.float32), np.eye(16, dtype=np.float32)
    lengths = (1, 65)
    chains = [chain("MatMul", n, rows, square, folder / f"{n}.onnx") for n in lengths]
    figures: Figures = {}
    for threads in (1, 2):
        with processors(threads):
            of = f"{threads} thread{'s' * (threads > 1)}"
            run = tinyedge.load(one, threads=threads)
            figures[f"call, {of}"] = usual(partial(run, x=x))
            figures[f"call with out=, {of}"] = usual(
                partial(run, x=x, out={"y": np.empty_like(x)}))
            run.close()
            times = []
            for plan in chains:
                with tinyedge.load(plan, threads=threads) as run:
                    times.append(usual(partial(run, x=rows)))
            steps = [len(plan.steps) for plan in chains]
            figures[f"a dependent step (a product of 64 x 16 by 16 x 16), {of}"] = (
                times[1] - times[0]) / (steps[1] - steps[0])
    theirs = onnxruntime_session(folder / "one.onnx", 1)
    figures["onnxruntime's call"] = usual(partial(theirs.run, None, {"x": x}))
    return figures


def chain(operator: str, length: int, x: Array, other: Array, path: Path) -> Plan:
    """The plan of a model that applies an operator with one constant again and again."""
    names = ["x", *(f"t{i}" for i in range(1, length)), "y"]
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node(operator, [a, "c"], [b]) for a, b in pairwise(names)], "chain",
        [helper.make_tensor_value_info("x", kind, x.shape)],
        [helper.make_tensor_value_info("y", kind, x.shape)],
        [onnx.numpy_helper.from_array(other, "c")])
    onnx.save(helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return tinyedge.compile(path)


def usual(call: Callable[[], object]) -> float:
    """Microseconds of a short call."""
    timed(call, 1000)
    return statistics.median(timed(call, 5000)) * 1e3


# ---- tables


def rows(cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its head."""
    head, *rest = cells
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *rest))


def ms(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def report(results: Figures) -> str:
    """The tables of the README."""
    facts = results["machine"]
    peak = results["peak"]
    speed = [["network", "threads", "tinyedge ms", "least", "onnxruntime ms", "OpenVINO ms",
              "times faster", "GFLOP/s", "of peak", "error"]]
    costs = [["network", "compile s", "again s", "kernels", "plan MB", "model MB", "load ms",
              "load +MB", "peak MB", "onnxruntime peak MB"]]
    for name, figures in results["models"].items():
        for threads, f in figures["threads"].items():
            speed.append([
                name if threads == min(figures["threads"]) else "", threads,
                ms(f["tinyedge"]["median"]), ms(f["tinyedge"]["least"]),
                ms(f["onnxruntime"]["median"]),
                ms(f["openvino"]["median"]) if "openvino" in f else "refuses",
                f"{f['speedup']:.2f}", f"{f['gflops']:.1f}",
                "" if name in QUANTISED else f"{f['gflops'] / peak / int(threads):.0%}",
                f"{f['error']:.1e}"])
        f = figures["process"]
        costs.append([
            name, f"{f['compile']:.1f}", f"{f['compile warm']:.2f}", str(f["kernels"]),
            f"{f['size']:.1f}", f"{f['model size']:.1f}", f"{f['load']:.1f}",
            f"{f['load peak']:.1f}", f"{f['run peak']:.0f}", f"{f['onnxruntime peak']:.0f}"])
    means = [f"{count} thread{'s' * (count != '1')}: {value:.2f}"
             for count, value in results["geometric means"].items()]
    parts = [
        "\n".join(f"- {key}: {value}" for key, value in facts.items())
        + f"\n- a core's peak, measured: {peak:.1f} GFLOP/s",
        rows(speed),
        f"Times faster than the better peer, geometric mean: {', '.join(means)}.",
        "Costs besides a run, each in a fresh process (peaks: of a whole process that runs the "
        "network on one thread, and of loading alone).",
        rows(costs),
    ]
    if "overhead" in results:
        f = results["models"].get(SHOWCASE, {}).get("process")
        lines = [["figure", "value", "goal"]]
        if f:
            lines += [
                [f"{SHOWCASE}: compile, empty cache", f"{f['compile']:.2f} s", "15 s"],
                [f"{SHOWCASE}: compile, warm cache", f"{f['compile warm']:.2f} s", "1 s"],
                [f"{SHOWCASE}: whole process, empty cache", f"{f['command']:.2f} s", ""],
                [f"{SHOWCASE}: whole process, warm cache", f"{f['command warm']:.2f} s", ""],
                [f"{SHOWCASE}: load", f"{f['load']:.1f} ms", "50 ms"],
                ["import of tinyedge, after numpy", f"{f['import']:.1f} ms", ""],
                [f"{SHOWCASE}: plan file", f"{f['size']:.1f} MB", ""],
                [f"{SHOWCASE}: peak memory to load, less the file",
                 f"{f['load peak'] - f['size']:.1f} MB", "16 MB"],
                [f"{SHOWCASE}: peak memory to save", f"{f['save peak']:.1f} MB", ""],
            ]
        lines += [[f"small plans: {key}", f"{value:.1f} µs",
                   "50 µs" if key.startswith("call") else ""]
                  for key, value in results["overhead"].items()]
        parts.append(rows(lines))
    return "\n\n".join(parts)


def known(machine: dict[str, str]) -> dict[tuple[str, str], float]:
    """The speed-ups of the results file, (network, threads) -> times faster; none if they are of
    another kind of machine, where each runtime gains or loses by its own measure."""
    try:
        held = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
        if any(held["machine"][key] != machine[key] for key in ("processor", "cores", "caches")):
            note("bench: the results file is of another machine, no ratio is compared with it")
            return {}
        models = held["models"]
    except (OSError, KeyError):
        return {}
    return {(name, threads): f["speedup"] for name, figures in models.items()
            for threads, f in figures["threads"].items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--models", help="names, separated by commas; all by default")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, by default 1,2")
    parser.add_argument("--runs", type=int, default=35, help="runs of each, at least")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--no-write", action="store_true", help="leave the tables as they are")
    options = parser.parse_args(arguments)
    names = options.models.split(",") if options.models else list(SPECS)
    if unknown := [name for name in names if name not in SPECS]:
        parser.error(f"no network {unknown[0]!r}; there are {', '.join(SPECS)}")
    counts = [int(count) for count in options.threads.split(",")]
    results: Figures = {"machine": measure.machine(), "peak": measure.core_peak(), "models": {}}
    failures = []
    held = known(results["machine"])
    measure.meet_openvino()
    with tempfile.TemporaryDirectory(prefix="tinyedge-bench-") as temporary:
        folder = Path(temporary)
        for name in names:
            start = time.perf_counter()
            try:
                figures: Figures = {"process": compiled(name, folder), "threads": {}}
                for count in counts:
                    found = compared(name, folder / f"{name}.pkl", count, options.runs)
                    figures["threads"][str(count)] = found
                    if not found["error"] <= (QUANTISED_LIMIT if name in QUANTISED else LIMIT):
                        failures.append(f"{name}: off by {found['error']:.1e} on {count} threads")
                    was = held.get((name, str(count)), 0.0)
                    if found["speedup"] < was * (1 - FALL):
                        failures.append(f"{name}: {found['speedup']:.2f} times faster on {count} "
                                        f"threads, was {was:.2f}")
            except Exception as error:  # the other networks are still worth a figure
                traceback.print_exc()
                failures.append(f"{name}: {error}")
                continue
            results["models"][name] = figures
            note(f"{name}: {time.perf_counter() - start:.0f} s, " + ", ".join(
                f"{count} threads {f['tinyedge']['median']:.2f} ms, {f['speedup']:.2f} times faster"
                for count, f in figures["threads"].items()))
        try:
            results["overhead"] = overhead(folder)
        except Exception as error:
            traceback.print_exc()
            failures.append(f"one-operation plan: {error}")
    results["geometric means"] = {
        str(count): math.exp(statistics.fmean(
            math.log(figures["threads"][str(count)]["speedup"])
            for name, figures in results["models"].items() if name not in QUANTISED))
        for count in counts if any(name not in QUANTISED for name in results["models"])}
    text = report(results)
    print(text)
    data = json.dumps(results, indent=1).encode() + b"\n"
    if options.json:
        write_whole(options.json, data)
    if not options.no_write and not failures and names == list(SPECS):
        readme = FOLDER / "README.md"
        before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        write_whole(readme, f"{before}{BEGIN}\n\n{text}\n\n{END}{after}".encode())
        write_whole(FOLDER / "results.json", data)
    for failure in failures:
        note(f"bench: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
