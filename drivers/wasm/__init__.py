"""WebAssembly as a device, outside of a browser: a plan's module under wasmtime, on one thread.

What a bundle does in a page is done here in Python, so that the same module can be run, verified
and measured. Inputs are copied into the module's memory and outputs out of it. wasmtime is imported
when a plan is opened, not before.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from threading import Event, Lock, Thread
from typing import Any

from tinyedge.dtype import DTYPES
from tinyedge.errors import DeviceError, DeviceTimeout, PlanError, UnsupportedError
from tinyedge.plan import CONSTANTS, STATES, Plan, Port, evaluate

from ..device import Executable, Found
from . import executor

RUN_SECONDS = 60
"""Seconds after which a run is given up."""


def _wasmtime() -> Any:
    """The module wasmtime; DeviceError where it is not installed."""
    try:
        import wasmtime
    except ImportError:
        raise DeviceError("import wasmtime", "it is not installed; use "
                          "pip install 'tinyedge[wasm]'") from None
    return wasmtime


def open(target: str, device: str | None = None) -> WasmDevice:
    """The engine for plans of `target`; PlanError for instructions that it does not know."""
    if target not in ("wasm:relaxed", "wasm:simd128"):
        raise PlanError(f"the plan was built for {target}, which this version's driver does not "
                        "know; build it again")
    return WasmDevice()


def probe() -> list[Found]:
    try:
        return [Found("wasm", f"wasmtime {version('wasmtime')}, 1 thread", True)]
    except PackageNotFoundError:
        return [Found("wasm", "wasmtime", False,
                      "it is not installed; use pip install 'tinyedge[wasm]'")]


class WasmDevice:
    """An engine that compiles modules; holds nothing, so any number may be open."""

    name = "wasm"

    def __init__(self) -> None:
        self.wasmtime = _wasmtime()
        config = self.wasmtime.Config()
        config.wasm_relaxed_simd = True
        config.wasm_threads = True
        config.epoch_interruption = True
        self.engine = self.wasmtime.Engine(config)

    def bind(self, plan: Plan, threads: int | None = None) -> Executable:
        """See `tinyedge.drivers.device.Device`; there is one thread, whatever is asked for."""
        return WasmExecutable(self.wasmtime, self.engine, plan)

    def close(self) -> None:
        """Nothing to give back."""


class WasmExecutable:
    """See `tinyedge.drivers.device.Executable`."""

    def __init__(self, wasmtime: Any, engine: Any, plan: Plan) -> None:
        self.plan, self.engine = plan, engine
        self.trap, self.error = wasmtime.Trap, wasmtime.WasmtimeError
        e = plan.entries
        ports = [*(f"input{i}" for i in range(len(plan.inputs))),
                 *(f"output{i}" for i in range(len(plan.outputs)))]
        for name in ("pages", "constants", "states", "symbols", *ports):
            if name not in e:
                raise PlanError(f"the plan has no entry {name}, which this version of tinyedge "
                                "needs; compile the model again")
        self.store = wasmtime.Store(engine)
        self.store.set_epoch_deadline(RUN_SECONDS)
        try:
            module = wasmtime.Module(engine, bytes(plan.code))
            limits = wasmtime.Limits(e["pages"], e["pages"])
            self.memory = wasmtime.Memory(self.store, wasmtime.MemoryType(limits))
            instance = wasmtime.Instance(self.store, module, [self.memory])
            self.run = instance.exports(self.store)[executor.RUN]
        except (wasmtime.WasmtimeError, KeyError, TypeError) as error:
            raise PlanError("the plan's code is no module that wasmtime takes: "
                            f"{str(error).splitlines()[0]}; compile the model again") from None
        self.base = ctypes.addressof(self.memory.data_ptr(self.store).contents)
        size = self.memory.data_len(self.store)
        self.places = [e[name] for name in ports]
        self.ports: list[Port] = [*plan.inputs, *plan.outputs]
        highest = {name: high for name, (_, high) in plan.symbols.items()}
        for at, count in ((e["constants"], plan.arenas[CONSTANTS]),
                          (e["states"], plan.arenas[STATES]),
                          (e["symbols"], 8 * len(plan.symbols)),
                          *zip(self.places, (_bytes(p, highest) for p in self.ports))):
            if at + count > size:
                raise PlanError(f"the plan puts {count} bytes at {at} of a memory of {size}; "
                                "compile the model again")
        constants = (ctypes.c_char * len(plan.constants)).from_buffer_copy(plan.constants)
        ctypes.memmove(self.base + e["constants"], constants, len(plan.constants))
        self.symbols = (ctypes.c_int64 * max(len(plan.symbols), 1)).from_address(
            self.base + e["symbols"])
        self.lock, self.closed = Lock(), False
        self.ended = Event()
        Thread(target=_tick, args=(engine, self.ended), daemon=True).start()

    def __call__(self, addresses: Sequence[int], symbols: Sequence[int]) -> None:
        """See `tinyedge.drivers.device.Executable`."""
        with self.lock:
            self._open()
            env = dict(zip(self.plan.symbols, symbols))
            for i, value in enumerate(symbols):
                self.symbols[i] = value
            inputs = len(self.plan.inputs)
            sizes = [_bytes(p, env) for p in self.ports]
            for at, address, size in list(zip(self.places, addresses, sizes))[:inputs]:
                ctypes.memmove(self.base + at, address, size)
            self.store.set_epoch_deadline(RUN_SECONDS)
            try:
                late = self.run(self.store, 1)
            except (self.trap, self.error) as error:
                self.closed = True
                if "interrupt" in str(error):
                    raise DeviceTimeout("run", f"the plan did not end in {RUN_SECONDS} seconds; "
                                        "load it again") from None
                raise DeviceError("run", f"the module failed: {str(error).splitlines()[0]}; load "
                                  "the plan again") from None
            if late:
                self.closed = True
                raise DeviceTimeout("run", "a thread of the plan did not finish its part; load "
                                    "the plan again")
            for at, address, size in list(zip(self.places, addresses, sizes))[inputs:]:
                ctypes.memmove(address, self.base + at, size)

    def profile(self, addresses: Sequence[int], symbols: Sequence[int]) -> list[int]:
        """UnsupportedError: a module has no clock."""
        raise UnsupportedError("the steps of a plan for wasm can't be timed one by one; measure "
                               "whole runs, or compile the model for this machine's processor")

    def states(self) -> memoryview:
        """See `tinyedge.drivers.device.Executable`."""
        self._open()
        size = self.plan.arenas[STATES]
        at = self.base + self.plan.entries["states"]
        return memoryview((ctypes.c_uint8 * size).from_address(at)).cast("B")

    def close(self) -> None:
        """Frees the memory, after a run that is under way; may be repeated."""
        with self.lock:
            self.closed = True
            self.ended.set()

    def __del__(self) -> None:
        if hasattr(self, "ended"):
            self.ended.set()

    def _open(self) -> None:
        if self.closed:
            raise DeviceError("run", "the model has been closed")


def _bytes(port: Port, symbols: dict[str, int]) -> int:
    return math.prod(evaluate(d, symbols) for d in port.shape) * DTYPES[port.dtype].itemsize


def _tick(engine: Any, ended: Event) -> None:
    """An epoch a second, by which runs are given up that take too long."""
    while not ended.wait(1):
        engine.increment_epoch()


__all__ = ["RUN_SECONDS", "WasmDevice", "WasmExecutable", "open", "probe"]
