"""What the benchmark measures: times of two runtimes in turn, and what fresh processes report.

A process's own figures (import, load, memory) come from children: `python -m bench.measure compile
| load | run ...` prints one line of JSON. Nothing heavy is imported before it is measured.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    from tinyedge.plan import Plan, Step

    Array = npt.NDArray[Any]

MB = 1e6
SETTLE = 0.03
"""Seconds of rest before a block of runs: by then the other runtime's threads have stopped
spinning."""
BLOCK = 0.05
"""Seconds that a block of runs lasts at least, so that waking up does not weigh."""


# ---- times


@dataclass(frozen=True)
class Times:
    """Of one call, in milliseconds."""

    median: float
    least: float
    runs: int


def race(
    ours: Callable[[], object], theirs: Callable[[], object], runs: int, blocks: int = 7
) -> tuple[Times, Times, float]:
    """Times two callables in turn, block by block; the median over blocks of the ratio of their
    medians. Each has at least `runs` runs; each block is warmed up."""
    samples: tuple[list[float], list[float]] = ([], [])
    ratios = []
    counts = []
    for call in (ours, theirs):
        call()
        once = min(timed(call, 2))
        counts.append(max(-(-runs // blocks), min(200, int(BLOCK * 1e3 / once) + 1)))
    for turn in range(blocks):
        middle = [0.0, 0.0]
        # who comes first changes, so that neither gains by it
        for i in (0, 1) if turn % 2 else (1, 0):
            time.sleep(SETTLE)
            timed((ours, theirs)[i], 2)
            block = timed((ours, theirs)[i], counts[i])
            samples[i].extend(block)
            middle[i] = statistics.median(block)
        ratios.append(middle[0] / middle[1])
    first, second = (Times(statistics.median(s), min(s), len(s)) for s in samples)
    return first, second, statistics.median(ratios)


def timed(call: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each of `count` calls."""
    out = []
    for _ in range(count):
        start = time.perf_counter_ns()
        call()
        out.append((time.perf_counter_ns() - start) / 1e6)
    return out


@contextmanager
def processors(count: int) -> Iterator[None]:
    """Keeps this process, and threads made from now on, on its first `count` processors."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def session(model: Path, threads: int) -> Any:
    """An onnxruntime session with all its optimisations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(
        str(model), options, providers=["CPUExecutionProvider"])


def flops(plan: Plan) -> int:
    """Floating-point operations of a run: of an If its larger branch, of a Loop one turn."""
    from tinyedge.plan import If, Launch, Loop

    def total(steps: Sequence[Step]) -> int:
        count = 0
        for step in steps:
            if isinstance(step, Launch):
                count += plan.kernels[step.kernel].flops
            elif isinstance(step, If):
                count += max(total(step.then), total(step.other))
            elif isinstance(step, Loop):
                count += total(step.body)
        return count

    return total(plan.steps)


def error(got: Mapping[str, Array], want: Mapping[str, Array]) -> float:
    """Largest absolute difference of any output, relative to that output's largest value; inf
    where shapes, types, or places of nan and inf differ."""
    import numpy as np

    worst = 0.0
    for name, b in want.items():
        a = got[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return np.inf
        if b.dtype.kind != "f":
            worst = max(worst, 0.0 if np.array_equal(a, b) else np.inf)
            continue
        usual = np.isfinite(b)
        if not np.array_equal(usual, np.isfinite(a)) or not np.array_equal(
                a[~usual], b[~usual], equal_nan=True):
            return np.inf
        if usual.any():
            gap = np.abs(a[usual].astype(np.float64) - b[usual]).max()
            worst = max(worst, float(gap / max(np.abs(b[usual]).max(), 1e-30)))
    return worst


# ---- fresh processes


def fresh(*command: str | Path, cache: Path | None = None) -> dict[str, Any]:
    """What a child of this module prints, and as "seconds" how long its whole process took."""
    environment = dict(os.environ)
    if cache is not None:
        environment["TINYEDGE_CACHE"] = str(cache)
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "bench.measure", *map(str, command)], env=environment,
        cwd=Path(__file__).resolve().parent.parent, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RuntimeError(f"{command[0]} in a fresh process failed: {reason}")
    out: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**out, "seconds": seconds}


def resident(field: str) -> float:
    """A field of this process's status, in MB: VmRSS now, VmHWM at most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024 / MB
    raise RuntimeError(f"the kernel does not report {field}")


def peak_of(call: Callable[[], object]) -> float:
    """MB that a call adds to this process's memory at its peak."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    except OSError:
        pass  # then the peak so far counts too where it was higher
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def _compile(model: str, plan: str, options: str) -> dict[str, Any]:
    start = time.perf_counter()
    import tinyedge

    imported = time.perf_counter()
    chosen = json.loads(options)
    made = tinyedge.compile(
        model, target="cpu", shapes=chosen["shapes"], states=chosen["states"])
    compiled = time.perf_counter()
    saving = peak_of(lambda: made.save(plan))
    return {"import": imported - start, "compile": compiled - imported,
            "save": time.perf_counter() - compiled, "save peak": saving,
            "peak": resident("VmHWM"), "kernels": len(made.kernels), "steps": len(made.steps)}


def _load(plan: str) -> dict[str, Any]:
    import numpy

    numpy.zeros(1)
    start = time.perf_counter()
    from tinyedge import load

    imported = time.perf_counter()
    kept: list[object] = []
    peak = peak_of(lambda: kept.append(load(plan)))
    loaded = time.perf_counter()
    heavy = sorted({name.split(".")[0] for name in sys.modules} & {"onnx", "llvmlite", "rich"})
    return {"import": (imported - start) * 1e3, "load": (loaded - imported) * 1e3,
            "load peak": peak, "heavy": heavy}


def _run(runtime: str, file: str, inputs: str, threads: str) -> dict[str, Any]:
    import numpy as np

    with np.load(inputs) as arrays:
        feeds = {name: arrays[name] for name in arrays.files}
    if runtime == "onnxruntime":
        theirs = session(Path(file), int(threads))
        for _ in range(3):
            theirs.run(None, feeds)
    else:
        from tinyedge import load

        ours = load(file, threads=int(threads))
        visible = {name: feeds[name] for name in ours.inputs}
        for _ in range(3):
            ours(visible)
    return {"peak": resident("VmHWM")}


# ---- the machine


def machine() -> dict[str, str]:
    """What the figures depend on, in words."""
    from importlib.metadata import version

    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    vectors = [name for name in ("avx2", "avx512f", "asimd") if name in
               facts.get("flags", facts.get("Features", "")).split()]
    caches = []
    for cache in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (
            (cache / name).read_text().strip() for name in ("level", "type", "size"))
        caches.append(f"L{level}{kind[0].lower() if kind != 'Unified' else ''} {size}")
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        system = platform.system()
    packages = ("tinyedge", "onnxruntime", "numpy", "llvmlite")
    return {
        "processor": f"{facts.get('model name', platform.machine())} ({', '.join(vectors)})"
                     + (", virtual" if "hypervisor" in facts.get("flags", "") else ""),
        "cores": str(len(os.sched_getaffinity(0))),
        "caches": ", ".join(caches),
        "system": f"{system}, Linux {platform.release()}",
        "versions": ", ".join([f"Python {platform.python_version()}",
                               *(f"{name} {version(name)}" for name in packages)]),
        "date": time.strftime("%Y-%m-%d"),
    }


CHILDREN: dict[str, Callable[..., dict[str, Any]]] = {
    "compile": _compile, "load": _load, "run": _run,
}

if __name__ == "__main__":
    print(json.dumps(CHILDREN[sys.argv[1]](*sys.argv[2:])))
