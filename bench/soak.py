"""Plans loaded, called by many threads and dropped, for minutes: `python -m bench.soak`.

Every result has to equal the first one of its network to the last bit, whatever the number of
threads that compute or call. Memory, open files and threads of the process must not grow.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import tinyedge
from bench.measure import resident
from tests.models import MODELS, inputs, model

SMALL = "silero-vad,magika,squeezenet,ppocr-cls,efficientnet-lite0"
GROWTH = 8.0
"""MB by which memory may grow between quarters of a soak: what the allocator keeps depends on how
threads interleave."""

Outputs = dict[str, bytes]


def frozen(outputs: Mapping[str, npt.NDArray[Any]]) -> Outputs:
    return {name: value.tobytes() for name, value in outputs.items()}


def sequence(plan: Path, feeds: Mapping[str, Any], threads: int, steps: int = 3) -> list[Outputs]:
    """What a freshly loaded plan gives in its first runs; a state makes them differ."""
    with tinyedge.load(plan, threads=threads) as run:
        return [frozen(run(feeds)) for _ in range(steps)]


def together(plan: Path, feeds: Mapping[str, Any], threads: int, callers: int, calls: int,
             want: Outputs) -> list[str]:
    """Calls one loaded plan from several threads at once; what went wrong."""
    wrong: list[str] = []

    def work() -> None:
        try:
            for _ in range(calls):
                got = frozen(run(feeds))
                wrong.extend(f"{name} differs" for name in want if got[name] != want[name])
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}")

    run = tinyedge.load(plan, threads=threads)
    workers = [threading.Thread(target=work) for _ in range(callers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    # half of the plans are closed, the others left to the collector
    if calls % 2:
        run.close()
    return wrong


def holdings() -> tuple[float, int, int]:
    """This process's memory in MB, open files and threads."""
    gc.collect()
    return (resident("VmRSS"), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--models", default=SMALL, help="names, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    random = np.random.default_rng(options.seed)
    names: list[str] = options.models.split(",")
    failures: list[str] = []
    samples: list[tuple[float, int, int]] = []
    with tempfile.TemporaryDirectory(prefix="tinyedge-soak-") as temporary:
        plans, feeds, first = {}, {}, {}
        for name in names:
            spec = MODELS[name]
            plans[name] = Path(temporary) / f"{name}.pkl"
            tinyedge.compile(model(name), target="cpu", shapes=spec.shapes,
                             states=spec.states).save(plans[name])
            feeds[name] = {key: value for key, value in inputs(name).items()
                           if key not in spec.states.values()}
            first[name] = sequence(plans[name], feeds[name], 1)
        end = time.monotonic() + 60 * options.minutes
        loads = 0
        while time.monotonic() < end and not failures:
            name = names[random.integers(len(names))]
            threads = int(random.integers(1, 4))
            if MODELS[name].states or random.random() < 0.3:
                if sequence(plans[name], feeds[name], threads) != first[name]:
                    failures.append(f"{name}: a run on {threads} threads differs from the first")
            else:
                callers, calls = (int(n) for n in random.integers(1, 8, 2))
                wrong = together(
                    plans[name], feeds[name], threads, callers, calls, first[name][0])
                failures += [f"{name}, {threads} threads, {callers} callers: {text}"
                             for text in sorted(set(wrong))]
            loads += 1
            samples.append(holdings())
            if loads % 50 == 0:
                memory, files, tasks = samples[-1]
                print(f"{loads} loads, {memory:.1f} MB, {files} files, {tasks} threads",
                      file=sys.stderr, flush=True)
    if failures or len(samples) < 8:
        print("\n".join(failures) or "too few loads to tell; give it more --minutes")
        return 1
    quarter = len(samples) // 4
    # the second quarter is the base: by then every plan has been loaded once
    early, late = (np.median(part, axis=0) for part in (
        samples[quarter:2 * quarter], samples[-quarter:]))
    print(f"{loads} loads; memory {early[0]:.1f} then {late[0]:.1f} MB, open files {early[1]:.0f} "
          f"then {late[1]:.0f}, threads {early[2]:.0f} then {late[2]:.0f}; every result equal")
    if late[0] - early[0] > GROWTH or late[1] > early[1] or late[2] > early[2]:
        print("soak: the process grows")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
