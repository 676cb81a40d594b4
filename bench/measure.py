"""What the benchmark measures: times of two runtimes in turn, and what fresh processes report.

A process's own figures (import, load, memory) come from children: `python -m bench.measure compile
| load | run ...` prints one line of JSON. Nothing heavy is imported before it is measured.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

MB = 1e6


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
        from tinyedge.verify import onnxruntime_session

        theirs = onnxruntime_session(file, int(threads))
        for _ in range(3):
            theirs.run(None, feeds)
    else:
        from tinyedge import load

        ours = load(file, threads=int(threads))
        visible = {name: feeds[name] for name in ours.inputs}
        for _ in range(3):
            ours(visible)
    return {"peak": resident("VmHWM")}


# ---- peers and limits


def meet_openvino() -> None:
    """Lets OpenVINO count the processors, which it does once: before a measurement is kept on some
    of them, or it would use one thread ever after."""
    import openvino

    openvino.Core().get_property("CPU", "FULL_DEVICE_NAME")


def openvino_call(model: Path, feeds: Mapping[str, Array], threads: int
                  ) -> Callable[[], Mapping[Any, Array]] | None:
    """A run of OpenVINO in float32, shapes fixed to the feeds'; None where it refuses the model."""
    import openvino

    core = openvino.Core()
    try:
        network = core.read_model(model)
        network.reshape({name: value.shape for name, value in feeds.items()})
        request = core.compile_model(network, "CPU", {
            "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
        given = dict(feeds)
        request.infer(given)
    except RuntimeError:
        return None
    return lambda: request.infer(given)


PEAK = """
define dso_local double @peak(i64 %turns) {{
entry:
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i1, %loop ]
{phis}
{steps}
  %i1 = add i64 %i, 1
  %more = icmp ult i64 %i1, %turns
  br i1 %more, label %loop, label %out
out:
{sums}
  %one = extractelement {vector} {last}, i32 0
  %wide = fpext float %one to double
  ret double %wide
}}
declare {vector} @llvm.fma.{short}({vector}, {vector}, {vector})
"""


def core_peak() -> float:
    """10^9 float32 operations a second that one core does at most: independent multiply-adds in
    registers, nothing else; the best of several tries."""
    import ctypes
    import mmap

    import numpy as np

    from tinyedge.codegen.link.elf import link
    from tinyedge.codegen.llvm_target import compile_ir, parse_target

    target = parse_target("cpu")
    lanes, chains, turns = target.vector_bytes // 4, 12, 2_000_000
    vector, short = f"<{lanes} x float>", f"v{lanes}f32"
    factor = f"{vector} splat (float 5.000000e-01)"
    text = PEAK.format(
        vector=vector, short=short, last=f"%s{chains - 1}",
        phis="\n".join(f"  %a{i} = phi {vector} [ splat (float {i}.0), %entry ], [ %b{i}, %loop ]"
                       for i in range(chains)),
        steps="\n".join(f"  %b{i} = call {vector} @llvm.fma.{short}({vector} %a{i}, {factor}, "
                        f"{vector} splat (float {i}.5))" for i in range(chains)),
        sums="\n".join(f"  %s{i} = fadd {vector} {f'%s{i - 1}' if i else 'zeroinitializer'}, %b{i}"
                       for i in range(chains)))
    image = link([compile_ir(text, target)])
    code = mmap.mmap(-1, len(image.code), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(image.code)
    at = np.frombuffer(code, np.uint8).ctypes.data + image.entries["peak"]
    run = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int64)(at)
    best = 0.0
    for _ in range(7):
        start = time.perf_counter()
        run(turns)
        best = max(best, 2 * lanes * chains * turns / (time.perf_counter() - start) / 1e9)
    return best


# ---- the machine


def machine() -> dict[str, str]:
    """What the figures depend on, in words."""
    from importlib.metadata import distributions

    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    vectors = [name for name in ("avx2", "avx512f", "asimd") if name in
               facts.get("flags", facts.get("Features", "")).split()]
    family = "".join(f", {key.removeprefix('cpu ')} {facts[key]}"
                     for key in ("cpu family", "model") if key in facts)
    caches = []
    for cache in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (
            (cache / name).read_text().strip() for name in ("level", "type", "size"))
        caches.append(f"L{level}{kind[0].lower() if kind != 'Unified' else ''} {size}")
    try:
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        system = platform.system()
    packages = ("tinyedge", "onnxruntime", "openvino", "numpy", "llvmlite")
    installed = {d.name: d.version for d in distributions()}
    return {
        "processor": f"{facts.get('model name', platform.machine())}{family} ({', '.join(vectors)})"
                     + (", virtual" if "hypervisor" in facts.get("flags", "") else ""),
        "cores": str(len(os.sched_getaffinity(0))),
        "caches": ", ".join(caches),
        "system": f"{system}, Linux {platform.release()}",
        "versions": ", ".join([f"Python {platform.python_version()}",
                               *(f"{name} {installed[name]}" for name in packages
                                 if name in installed)]),
        "date": time.strftime("%Y-%m-%d"),
    }


CHILDREN: dict[str, Callable[..., dict[str, Any]]] = {
    "compile": _compile, "load": _load, "run": _run,
}

if __name__ == "__main__":
    print(json.dumps(CHILDREN[sys.argv[1]](*sys.argv[2:])))
