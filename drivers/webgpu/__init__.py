"""WebGPU on the desktop, through PyPI's ``wgpu``: the same plans and shaders as in a page.

A plan is bound once: a buffer for each arena and port, a pipeline for each kernel, a bind group for
each launch, a uniform buffer for each list of symbols. A run writes the inputs, encodes one command
buffer with one compute pass (another one begins after a condition has been read back), and maps
one staging buffer with all outputs. ``webgpu`` is the best adapter, ``webgpu:NAME`` the first one
whose description contains NAME, and ``webgpu:dawn`` is Dawn, the implementation that Chromium has
(PyPI ``wgpudawn``).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from math import prod
from threading import Event, Lock, Thread
from typing import Any

import numpy as np

from tinyedge.errors import DeviceError, DeviceLost, DeviceTimeout, InputError, PlanError
from tinyedge.plan import (
    CONSTANTS,
    FIRST_EXTERNAL,
    SCRATCH,
    STATES,
    Copy,
    If,
    Launch,
    Loop,
    Plan,
    Ref,
    Step,
    evaluate,
    flat,
)

from ..device import Executable, Found

DEADLINE = 300.0
"""Seconds that a device may take for what is waited for; software adapters are slow."""

MOST_GROUPS = 65535
"""Workgroups in one dimension of a dispatch (WebGPU, maxComputeWorkgroupsPerDimension)."""

STORAGE, COPY_SRC, COPY_DST, UNIFORM, MAP_READ = 0x80, 4, 8, 0x40, 1  # GPUBufferUsage
COMPUTE = 4  # GPUShaderStage
READ = 1  # GPUMapMode

BEST = ("DiscreteGPU", "IntegratedGPU", "VirtualGPU", "CPU", "Unknown")
"""Kinds of adapters, the best ones first."""


def _module(device: str | None) -> Any:
    """The library that serves a device; PlanError if it is not installed."""
    name = "wgpudawn" if (device or "").startswith("webgpu:dawn") else "wgpu"
    try:
        return import_module(name)
    except ImportError:
        extra = "'tinyedge[webgpu]'" if name == "wgpu" else name
        raise PlanError(f"plans for webgpu run through the package {name}, which is missing; "
                        f"pip install {extra}") from None


def _adapters(wgpu: Any) -> list[Any]:
    """All adapters, the best ones first; none of OpenGL, which lack much."""
    found = [a for a in wgpu.gpu.enumerate_adapters_sync()
             if a.info["backend_type"] not in ("OpenGL", "OpenGLES", "Null")]
    return sorted(found, key=lambda a: BEST.index(a.info["adapter_type"])
                  if a.info["adapter_type"] in BEST else len(BEST))


def _described(adapter: Any) -> str:
    info = adapter.info
    parts = [info["device"], info["description"], info["backend_type"]]
    return ", ".join(dict.fromkeys(p for p in parts if p))


def open(target: str, device: str | None = None) -> WebGpuDevice:
    """The adapter for plans of `target`; PlanError where there is none that can run them,
    InputError where `device` names none."""
    wgpu = _module(device)
    with _mapped("open"):
        adapters = _adapters(wgpu)
    wanted = (device or "").partition(":")[2]
    if wanted.startswith("dawn"):
        wanted = wanted.partition(":")[2]
    if wanted:
        adapters = [a for a in adapters if wanted.lower() in _described(a).lower()]
        if not adapters:
            raise InputError(f"there is no WebGPU adapter {wanted!r}; see tinyedge devices")
    if not adapters:
        raise PlanError("there is no WebGPU adapter; install a graphics driver with Vulkan, Metal "
                        "or Direct3D 12, or mesa-vulkan-drivers for one in software")
    if target.endswith(":f16"):
        adapters = [a for a in adapters if "shader-f16" in a.features]
        if not adapters:
            raise PlanError(f"the plan is for {target}, and the WebGPU adapter has no shader-f16; "
                            "compile the model for webgpu")
    return WebGpuDevice(adapters[0])


def probe() -> list[Found]:
    try:
        wgpu = _module(None)
        adapters = _adapters(wgpu)
    except PlanError as error:
        return [Found("webgpu", "WebGPU", False, str(error))]
    except Exception as error:  # whatever a driver's loader comes up with
        return [Found("webgpu", "WebGPU", False, f"the adapters can't be listed: {error}")]
    if not adapters:
        return [Found("webgpu", "WebGPU", False, "there is no adapter; install a graphics driver "
                      "with Vulkan, Metal or Direct3D 12, or mesa-vulkan-drivers")]
    return [Found("webgpu" if i == 0 else f"webgpu:{a.info['device']}", _described(a) + (
        ", f16" if "shader-f16" in a.features else ""), True) for i, a in enumerate(adapters)]


@contextmanager
def _mapped(step: str) -> Iterator[None]:
    """Errors of the library as tinyedge's."""
    try:
        yield
    except (DeviceError, PlanError, InputError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:400] or type(error).__name__
        if "lost" in text.lower():
            raise DeviceLost(step, f"{text}; load the plan again") from None
        raise DeviceError(step, text) from None


def _waited(step: str, work: Callable[[], Any]) -> Any:
    """What work() gives; DeviceTimeout if it does not end in time (its thread is left behind)."""
    done, result, failure = Event(), [], []

    def run() -> None:
        try:
            result.append(work())
        except Exception as error:
            failure.append(error)
        done.set()

    Thread(target=run, daemon=True, name="tinyedge-webgpu").start()
    if not done.wait(DEADLINE):
        raise DeviceTimeout(step, f"the GPU did not answer within {DEADLINE:.0f} s; load the plan "
                            "again")
    if failure:
        raise failure[0]
    return result[0]


class WebGpuDevice:
    """An adapter; a device of its own is made for each plan, with the limits that it needs."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self.name = "webgpu"

    def bind(self, plan: Plan, threads: int | None = None) -> Executable:
        """See `tinyedge.drivers.device.Device`."""
        return WebGpuExecutable(plan, self.adapter)

    def close(self) -> None:
        """Nothing to give back: every executable has its own device."""


def _padded(n: int) -> int:
    return max(-(-n // 16) * 16, 16)


class WebGpuExecutable:
    """See `tinyedge.drivers.device.Executable`."""

    def __init__(self, plan: Plan, adapter: Any) -> None:
        self.plan = plan
        self.lock = Lock()
        self.closed = False
        self.highest = {name: high for name, (_, high) in plan.symbols.items()}
        ports = [self._bytes(p.shape, p.dtype, self.highest) for p in (*plan.inputs, *plan.outputs)]
        self.sizes = [_padded(n) for n in (*plan.arenas, *ports)]
        launches = [s for s in flat(plan.steps) if isinstance(s, Launch)]
        needed = {
            "max-buffer-size": max(*self.sizes, sum(map(_padded, ports)), 256),
            "max-storage-buffer-binding-size": max(
                (self._most(r) for s in launches for r in s.buffers), default=0),
            "max-storage-buffers-per-shader-stage": max(
                (len(s.buffers) for s in launches), default=0),
        }
        for name, need in needed.items():
            if need > adapter.limits[name]:
                raise PlanError(f"the plan needs {name} of {need}, and the WebGPU adapter has "
                                f"{adapter.limits[name]}; use another device")
        features = ["shader-f16"] if plan.target.endswith(":f16") else []
        self.timed = "timestamp-query" in adapter.features
        with _mapped("bind"):
            self.device = adapter.request_device_sync(
                required_features=features + ["timestamp-query"] * self.timed,
                required_limits={k: v for k, v in needed.items() if v})
            self.queue = self.device.queue
            self.buffers = [self._buffer(n, STORAGE | COPY_SRC | COPY_DST) for n in self.sizes]
            if len(plan.constants):
                self.queue.write_buffer(self.buffers[CONSTANTS], 0, _words(plan.constants))
            self.places: list[int] = []
            at = 0
            for n in ports[len(plan.inputs):]:
                self.places.append(at)
                at += _padded(n)
            self.staging = self._buffer(max(at, self.sizes[STATES]), MAP_READ | COPY_DST)
            self.uniforms: dict[tuple[str, ...], Any] = {}
            self.values: dict[tuple[str, ...], tuple[int, ...]] = {}
            self.layouts: dict[tuple[str, ...], Any] = {}
            self.groups: dict[int, Any] = {}
            self.pipelines: dict[int, Any] = {}
            for s in launches:
                self._prepare(s)
        self.steps = {id(s): i for i, s in enumerate(flat(plan.steps))}
        self.mirror = bytearray(plan.arenas[STATES])
        self.fresh, self.dirty = True, False  # the mirror is what the device has; must be written
        self.encoder: Any = None
        self.compute: Any = None
        self.times: list[int] | None = None

    def _bytes(self, shape: Sequence[Any], dtype: str, symbols: dict[str, int]) -> int:
        return prod(evaluate(d, symbols) for d in shape) * np.dtype(dtype).itemsize

    def _most(self, ref: Ref) -> int:
        """Bytes that a launch binds, with all symbols at their highest."""
        return -(-max(evaluate(ref.size, self.highest), 4) // 4) * 4

    def _buffer(self, size: int, usage: int) -> Any:
        return self.device.create_buffer(size=size, usage=usage)

    def _prepare(self, s: Launch) -> None:
        """Makes a launch's bind group and pipeline."""
        kernel = self.plan.kernels[s.kernel]
        types = ["storage" if i in kernel.writes else "read-only-storage"
                 for i in range(len(s.buffers))] + ["uniform"] * bool(s.scalars)
        key = tuple(types)
        if key not in self.layouts:
            self.layouts[key] = self.device.create_bind_group_layout(entries=[
                {"binding": i, "visibility": COMPUTE, "buffer": {"type": t}}
                for i, t in enumerate(types)])
        layout = self.layouts[key]
        entries = [{"binding": i, "resource": {
            "buffer": self.buffers[r.arena], "offset": r.offset, "size": self._most(r)}}
            for i, r in enumerate(s.buffers)]
        if s.scalars:
            size = _padded(4 * len(s.scalars))
            if s.scalars not in self.uniforms:
                self.uniforms[s.scalars] = self._buffer(size, UNIFORM | COPY_DST)
            entries.append({"binding": len(entries), "resource": {
                "buffer": self.uniforms[s.scalars], "offset": 0, "size": size}})
        self.groups[id(s)] = self.device.create_bind_group(layout=layout, entries=entries)
        if s.kernel not in self.pipelines:
            module = self.device.create_shader_module(code=kernel.source, label=kernel.name)
            self.pipelines[s.kernel] = self.device.create_compute_pipeline(
                layout=self.device.create_pipeline_layout(bind_group_layouts=[layout]),
                compute={"module": module, "entry_point": "main"}, label=kernel.name)

    # running

    def __call__(self, addresses: Sequence[int], symbols: Sequence[int]) -> None:
        """See `tinyedge.drivers.device.Executable`."""
        with self.lock, _mapped("run"):
            self._open()
            env = dict(zip(self.plan.symbols, symbols))
            try:
                self._run(addresses, env)
            except DeviceTimeout:
                self.closed = True  # what is still under way has to stay
                _lost.append(self)
                raise
            finally:
                self.encoder = self.compute = None

    def _run(self, addresses: Sequence[int], env: dict[str, int]) -> None:
        plan = self.plan
        if self.dirty:
            self.queue.write_buffer(self.buffers[STATES], 0, _words(self.mirror))
            self.dirty = False
        for i, p in enumerate(plan.inputs):
            n = self._bytes(p.shape, p.dtype, env)
            if n:
                self.queue.write_buffer(self.buffers[FIRST_EXTERNAL + i], 0,
                                        _words(_memory(addresses[i], n)))
        self._set(env)
        self._execute(plan.steps, env)
        first = FIRST_EXTERNAL + len(plan.inputs)
        sizes = [self._bytes(p.shape, p.dtype, env) for p in plan.outputs]
        for i, n in enumerate(sizes):
            if n:
                self._commands().copy_buffer_to_buffer(
                    self.buffers[first + i], 0, self.staging, self.places[i], -(-n // 4) * 4)
        self.fresh = not plan.arenas[STATES]

        def take(view: memoryview) -> None:
            for i, n in enumerate(sizes):
                if n:
                    at = self.places[i]
                    _memory(addresses[len(plan.inputs) + i], n)[:] = view[at:at + n]

        self._read(self.staging.size, take)

    def _set(self, env: dict[str, int]) -> None:
        """Writes the symbols' values where they differ from the last ones."""
        for names, buffer in self.uniforms.items():
            values = tuple(env.get(n, 0) for n in names)
            if self.values.get(names) != values:
                self.values[names] = values
                self.queue.write_buffer(buffer, 0, np.array(values, np.int32))

    def _commands(self) -> Any:
        """The encoder, outside of a pass."""
        if self.compute is not None:
            self.compute.end()
            self.compute = None
        if self.encoder is None:
            self.encoder = self.device.create_command_encoder()
        return self.encoder

    def _submit(self) -> None:
        self.queue.submit([self._commands().finish()])
        self.encoder = None

    def _read(self, size: int, take: Callable[[memoryview], Any]) -> Any:
        """Submits, waits, and gives take() the first bytes of the staging buffer."""
        self._submit()
        size = -(-size // 8) * 8
        _waited("run", self.staging.map_async(READ, 0, size).sync_wait)
        try:
            return take(memoryview(self.staging.read_mapped(0, size, copy=False)).cast("B"))
        finally:
            self.staging.unmap()

    def _number(self, ref: Ref, dtype: str) -> int:
        """A value that steps depend on."""
        n = np.dtype(dtype).itemsize
        self._commands().copy_buffer_to_buffer(
            self.buffers[ref.arena], ref.offset, self.staging, 0, max(n, 4))
        return int(self._read(8, lambda view: np.frombuffer(view[:n], dtype)[0].item()))

    def _execute(self, steps: Sequence[Step], env: dict[str, int]) -> None:
        for s in steps:
            if isinstance(s, Launch):
                self._launch(s, env)
            elif isinstance(s, Copy):
                n = evaluate(s.source.size, env)
                if n:
                    self._commands().copy_buffer_to_buffer(
                        self.buffers[s.source.arena], s.source.offset,
                        self.buffers[s.target.arena], s.target.offset, -(-n // 4) * 4)
            elif isinstance(s, If):
                self._execute(s.then if self._number(s.cond, "uint8") else s.other, env)
            else:
                self._loop(s, env)

    def _loop(self, s: Loop, env: dict[str, int]) -> None:
        trips = self._number(s.trips, "int64")
        turn = 0
        while turn < trips and self._number(s.cond, "uint8"):
            inner = {**env, s.symbol: turn}
            self._set(inner)
            self._execute(s.body, inner)
            turn += 1

    def _launch(self, s: Launch, env: dict[str, int]) -> None:
        count = evaluate(s.grid, env)
        if count <= 0:
            return
        if self.times is not None:
            self._timed_launch(s, count)
            return
        if self.compute is None:
            self.compute = self._commands().begin_compute_pass()
        self._dispatch(self.compute, s, count)

    def _dispatch(self, compute: Any, s: Launch, count: int) -> None:
        compute.set_pipeline(self.pipelines[s.kernel])
        compute.set_bind_group(0, self.groups[id(s)])
        compute.dispatch_workgroups(min(count, MOST_GROUPS), -(-count // MOST_GROUPS), 1)

    # measuring

    def profile(self, addresses: Sequence[int], symbols: Sequence[int]) -> list[int]:
        """See `tinyedge.drivers.device.Executable`: by timestamps where the adapter has them, else
        by waiting for every step."""
        self.times = [0] * len(self.steps)
        try:
            self(addresses, symbols)
            return self.times
        finally:
            self.times = None

    def _timed_launch(self, s: Launch, count: int) -> None:
        assert self.times is not None
        encoder = self._commands()
        start = time.perf_counter_ns()
        if not self.timed:
            compute = encoder.begin_compute_pass()
            self._dispatch(compute, s, count)
            compute.end()
            encoder.copy_buffer_to_buffer(self.buffers[SCRATCH], 0, self.staging, 0, 8)
            self._read(8, lambda view: None)
            self.times[self.steps[id(s)]] += time.perf_counter_ns() - start
            return
        if not hasattr(self, "queries"):
            self.queries = self.device.create_query_set(type="timestamp", count=2)
            self.resolved = self._buffer(16, 0x200 | COPY_SRC)  # QUERY_RESOLVE
        compute = encoder.begin_compute_pass(timestamp_writes={
            "query_set": self.queries, "beginning_of_pass_write_index": 0,
            "end_of_pass_write_index": 1})
        self._dispatch(compute, s, count)
        compute.end()
        encoder.resolve_query_set(self.queries, 0, 2, self.resolved, 0)
        encoder.copy_buffer_to_buffer(self.resolved, 0, self.staging, 0, 16)
        begin, end = self._read(16, lambda view: np.frombuffer(view[:16], np.uint64).tolist())
        self.times[self.steps[id(s)]] += max(end - begin, 0)

    # states

    def states(self) -> memoryview:
        """See `tinyedge.drivers.device.Executable`; what is written there reaches the device with
        the next run."""
        self._open()
        size = len(self.mirror)
        if not self.fresh and size:
            with self.lock, _mapped("states"):
                self._commands().copy_buffer_to_buffer(
                    self.buffers[STATES], 0, self.staging, 0, -(-size // 4) * 4)

                def take(view: memoryview) -> None:
                    self.mirror[:] = view[:size]

                self._read(size, take)
            self.fresh = True
        self.dirty = bool(size)
        return memoryview(self.mirror)

    def _open(self) -> None:
        if self.closed:
            raise DeviceError("run", "the model has been closed")

    def close(self) -> None:
        """Frees the device's memory; may be repeated."""
        if self.closed:
            return
        self.closed = True
        with _mapped("close"):
            for b in (*self.buffers, self.staging, *self.uniforms.values()):
                b.destroy()
            self.device.destroy()


_lost: list[WebGpuExecutable] = []
"""Executables whose device may still be at work."""


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")


def _words(data: Any) -> Any:
    """Bytes as a queue takes them: a multiple of four."""
    view = memoryview(data).cast("B")
    if view.nbytes % 4 == 0:
        return np.frombuffer(view, np.uint8)
    return np.frombuffer(bytes(view) + bytes(-view.nbytes % 4), np.uint8)
