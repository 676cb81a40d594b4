"""Measured search: which of a kernel's likely schedules is the fastest on this machine.

Beside `cpu`, which orders the choices by its cost model. The compiler keeps what is found here in
the compile cache, under the kernel's own key: it can be moved to a machine of the same kind.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from ..link.elf import link
from ..llvm_target import CpuTarget, compile_ir
from .cpu import Choice

LEAST = 0.01
"""Seconds for which a kernel is run again and again at least; the fastest run counts."""


class Made(Protocol):
    """A choice as code: LLVM IR of a function k, the grid that it runs over."""

    @property
    def text(self) -> str: ...
    @property
    def grid(self) -> Any: ...
    @property
    def symbols(self) -> tuple[str, ...]: ...


T = TypeVar("T", bound=Made)


class Tuner:
    """Shares a number of seconds out among kernels, by their operations of all of `total`."""

    def __init__(self, seconds: float, total: int, target: CpuTarget) -> None:
        self.seconds, self.total, self.target = seconds, max(total, 1), target
        self.tried = self.changed = 0

    def best(self, choices: Sequence[Choice], flops: int, make: Callable[[Choice], T],
             sizes: Callable[[], list[int]]) -> T:
        """What `make` gives for the fastest choice, the first one being the cost model's.

        sizes: bytes of the kernel's buffers, after it was made.
        """
        end = time.perf_counter() + self.seconds * flops / self.total
        found, best, first = make(choices[0]), np.inf, True
        if found.symbols or len(choices) == 1:
            return found
        for choice in choices:
            code = make(choice)
            took = measure(code, sizes(), self.target)
            self.tried += 1
            # a little is noise
            if took < best * (1.0 if first else 0.98):
                self.changed += not first
                found, best = code, took
            first = False
            if time.perf_counter() > end:
                break
        return found


def measure(code: Made, sizes: Sequence[int], target: CpuTarget) -> float:
    """Seconds of one launch on one thread, on zeros."""
    image = link([compile_ir(code.text, target)])
    held = mmap.mmap(-1, len(image.code), prot=mmap.PROT_READ | mmap.PROT_WRITE)
    held.write(image.code)
    at = np.frombuffer(held, np.uint8).ctypes.data
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(len(held)),
                     mmap.PROT_READ | mmap.PROT_EXEC):
        return np.inf
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(
        at + image.entries["k"])
    arrays = [np.zeros(size // 64 + 4, "V64") for size in sizes]
    places = [-(-a.ctypes.data // 64) * 64 for a in arrays]
    pointers = (ctypes.c_void_p * max(len(places), 1))(*places)
    scalars = (ctypes.c_int64 * 1)()
    times: list[float] = []
    stop = time.perf_counter() + LEAST
    while len(times) < 3 or time.perf_counter() < stop:
        start = time.perf_counter()
        run(pointers, scalars, 0, code.grid)
        times.append(time.perf_counter() - start)
    return min(times)


__all__ = ["Tuner", "measure"]
