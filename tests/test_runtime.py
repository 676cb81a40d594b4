"""The run time: what a call checks, what it returns, states, threads. The device is a toy."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyedge import planfile
from tinyedge.drivers import device as drivers
from tinyedge.errors import DeviceError, InputError, PlanError
from tinyedge.plan import Copy, If, Kernel, Launch, Loop, Plan, Port, Ref, Size, State, evaluate
from tinyedge.runtime import Model, load

N: Size = ("sym", "n")
Array = np.ndarray[Any, np.dtype[Any]]


def fma(x: Array, scale: Array, bias: Array, y: Array, n: int) -> None:
    """y = x * scale + bias, rows of four."""
    value = x.view("f4").reshape(n, 4) * scale.view("f4")[0] + bias.view("f4")[:4]
    y.view("f4").reshape(n, 4)[:] = value


def accumulate(x: Array, total: Array, n: int) -> None:
    total.view("f4")[:4] += x.view("f4").reshape(n, 4).sum(0)


KERNELS: dict[str, Callable[..., None]] = {"fma": fma, "accumulate": accumulate}


class ToyExecutable:
    """Runs a plan's steps by the functions above, over real addresses."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.arenas = [np.frombuffer(plan.constants, np.uint8),
                       *(np.zeros(size, np.uint8) for size in plan.arenas[1:])]
        self.closed = self.busy = False
        self.fails: Exception | None = None

    def __call__(self, addresses: Sequence[int], symbols: Sequence[int]) -> None:
        assert not self.busy, "two calls at once"
        self.busy = True
        try:
            if self.fails:
                raise self.fails
            env = dict(zip(self.plan.symbols, symbols))
            self.addresses = list(addresses)
            self.run(self.plan.steps, env)
        finally:
            self.busy = False

    def at(self, ref: Ref, env: dict[str, int]) -> Array:
        size = evaluate(ref.size, env)
        if ref.arena < 3:
            return self.arenas[ref.arena][ref.offset:ref.offset + size]
        buffer = (ctypes.c_char * size).from_address(self.addresses[ref.arena - 3] + ref.offset)
        return np.frombuffer(memoryview(buffer).cast("B"), np.uint8)

    def run(self, steps: Sequence[Any], env: dict[str, int]) -> None:
        for step in steps:
            if isinstance(step, Launch):
                kernel = KERNELS[self.plan.kernels[step.kernel].name]
                kernel(*(self.at(r, env) for r in step.buffers), *(env[s] for s in step.scalars))
            elif isinstance(step, Copy):
                self.at(step.target, env)[:] = self.at(step.source, env).copy()
            elif isinstance(step, If):
                self.run(step.then if self.at(step.cond, env)[0] else step.other, env)
            elif isinstance(step, Loop):
                i = 0
                while i < self.at(step.trips, env).view("i8")[0] and self.at(step.cond, env)[0]:
                    self.run(step.body, env | {step.symbol: i})
                    i += 1

    def profile(self, addresses: Sequence[int], symbols: Sequence[int]) -> list[int]:
        self(addresses, symbols)
        return [7] * len(self.plan.steps)

    def states(self) -> memoryview:
        return self.arenas[2].data

    def close(self) -> None:
        self.closed = True


class ToyDevice:
    def __init__(self) -> None:
        self.closed = False
        self.threads: int | None = None
        self.fails: Exception | None = None
        self.executable: ToyExecutable | None = None

    def bind(self, plan: Plan, threads: int | None = None) -> ToyExecutable:
        if self.fails:
            raise self.fails
        self.threads = threads
        self.executable = ToyExecutable(plan)
        return self.executable

    def close(self) -> None:
        self.closed = True

    def is_closed(self) -> bool:
        return self.closed


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ToyDevice:
    """What `load` opens in the test."""
    toy = ToyDevice()
    monkeypatch.setattr(drivers, "open_device", lambda target, device: toy)
    return toy


ROWS = Ref(3, 0, ("mul", 16, N))
PLAN = Plan(
    target="toy",
    inputs=(Port("x", (N, 4), "float32"), Port("scale", (), "float32")),
    outputs=(Port("y", (N, 4), "float32"), Port("sum", (4,), "float32")),
    states=(State("total", "total.next", (2, 2), "float32", Ref(2, 64, 16)),),
    symbols={"n": (0, 64)},
    arenas=(16, 0, 80),
    kernels=(Kernel("fma", 0), Kernel("accumulate", 0)),
    steps=(
        Launch(0, (ROWS, Ref(4, 0, 4), Ref(0, 0, 16), Ref(5, 0, ("mul", 16, N))), ("n",), 1),
        Launch(1, (ROWS, Ref(2, 64, 16)), ("n",), 1),
        Copy(Ref(2, 64, 16), Ref(6, 0, 16)),
    ),
    code=b"",
    constants=np.array([1, 2, 3, 4], "f4").tobytes(),
    metadata={"author": "me"},
    name="toy",
)
STATIC = replace(
    PLAN, inputs=(Port("x", (3, 4), "float32"), Port("scale", (), "float32")),
    outputs=(Port("y", (3, 4), "float32"), Port("sum", (4,), "float32")), symbols={},
    steps=(Copy(Ref(3, 0, 48), Ref(5, 0, 48)),),
)
X = np.arange(12, dtype="f4").reshape(3, 4)
TWO = np.array(2, "f4")
BIAS = np.array([1, 2, 3, 4], "f4")


@pytest.fixture
def model(device: ToyDevice) -> Model:
    return load(PLAN)


def test_a_call(model: Model) -> None:
    out = model(x=X, scale=TWO)
    assert list(out) == ["y", "sum"]
    np.testing.assert_array_equal(out["y"], X * 2 + BIAS)
    np.testing.assert_array_equal(out["sum"], X.sum(0))
    again = model({"x": X[:2]}, scale=TWO)
    np.testing.assert_array_equal(again["y"], X[:2] * 2 + BIAS)
    np.testing.assert_array_equal(out["y"], X * 2 + BIAS)  # not written again
    assert model({"x": X, "scale": TWO})["y"].flags.owndata


def test_a_profiled_call(model: Model) -> None:
    y = np.empty((3, 4), "f4")
    out, times = model.profile({"x": X}, scale=TWO, out={"y": y})
    np.testing.assert_array_equal(y, X * 2 + BIAS)
    assert out["y"] is y and times == [7, 7, 7]
    with pytest.raises(InputError, match="missing"):
        model.profile(x=X)


def test_what_a_model_says_of_itself(model: Model) -> None:
    assert model.inputs["x"] == Port("x", (N, 4), "float32")
    assert list(model.outputs) == ["y", "sum"]
    assert model.metadata == {"author": "me"} and model.plan is PLAN
    assert repr(model) == ("<Model toy (x: float32[n,4], scale: float32[]) -> "
                           "(y: float32[n,4], sum: float32[4])>")


def test_a_model_from_a_file(device: ToyDevice, tmp_path: Path) -> None:
    planfile.save(PLAN, tmp_path / "p.pkl")
    for path in (tmp_path / "p.pkl", str(tmp_path / "p.pkl")):
        np.testing.assert_array_equal(load(path)(x=X, scale=TWO)["y"], X * 2 + BIAS)


def test_nan_and_infinity_pass(model: Model) -> None:
    x = np.array([[np.nan, np.inf, -np.inf, -0.0]], "f4")
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(model(x=x, scale=TWO)["y"], x * 2 + BIAS)


def test_no_rows(model: Model) -> None:
    assert model(x=X[:0], scale=TWO)["y"].shape == (0, 4)


@pytest.mark.parametrize("x", [
    np.asfortranarray(X), np.repeat(X, 2, 0)[::2], X[::-1][::-1], X[:, ::-1][:, ::-1],
    np.frombuffer(b"\0" + X.tobytes(), np.uint8)[1:].view("f4").reshape(3, 4),
    np.frombuffer(X.tobytes(), "f4").reshape(3, 4), X.view(np.recarray),
    X.astype(np.dtype("f4").newbyteorder("=")),
], ids=["Fortran", "strided", "view", "view2", "misaligned", "read-only", "subclass", "="])
def test_memory_in_any_order(model: Model, x: Array) -> None:
    out = model(x=x, scale=np.float32(2))["y"]
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, X * 2 + BIAS)


def test_other_libraries_arrays(model: Model) -> None:
    class Tensor:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
            return X

    np.testing.assert_array_equal(model(x=Tensor(), scale=TWO)["y"], X * 2 + BIAS)


@pytest.mark.parametrize("arguments, match", [
    ({}, r"input 'x' is missing; pass an array of float32 with shape \[n,4\]"),
    ({"x": X}, r"input 'scale' is missing; pass an array of float32 with shape \[\]"),
    ({"x": X, "scal": TWO}, "there is no input 'scal'; did you mean 'scale'?"),
    ({"x": X, "scale": TWO, "q": X}, "there is no input 'q'; the names are x, scale"),
    ({"x": X, "scale": TWO, "total": X}, r"'total' is a state, .* model.states\['total'\] = "),
    ({"x": X[0], "scale": TWO}, r"input 'x' has 1 dimensions \[4\] but must have \[n,4\]"),
    ({"x": X[:, :3], "scale": TWO}, r"has shape \[3,3\] but must have \[n,4\] with n = 3"),
    ({"x": np.zeros((65, 4), "f4"), "scale": TWO}, r"\[65,4\] but must have .* n in 0\.\.64"),
    ({"x": X, "scale": np.ones(1, "f4")}, r"'scale' has 1 dimensions \[1\] but must have \[\]"),
    ({"x": X.astype("f8"), "scale": TWO}, r"input 'x' is float64 but must be float32.*astype"),
    ({"x": X.astype("i4"), "scale": TWO}, "input 'x' is int32"),
    ({"x": X.astype("f2"), "scale": TWO}, "input 'x' is float16"),
    ({"x": X.astype(object), "scale": TWO}, "input 'x' is object"),
    ({"x": X, "scale": np.float64(2)}, "input 'scale' is float64"),
    ({"x": X.astype(">f4"), "scale": TWO}, r"byte order of another machine \(>f4\)"),
    ({"x": X.tolist(), "scale": TWO}, "input 'x' is list but must be a numpy array; pass np.as"),
    ({"x": X, "scale": 2.0}, "input 'scale' is float but must be"),
    ({"x": None, "scale": TWO}, "input 'x' is NoneType"),
    ({"x": np.ma.masked_array(X, X > 3), "scale": TWO}, "masked"),
])
def test_wrong_inputs(model: Model, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        model(arguments)
    with pytest.raises(InputError, match=match):
        model(**arguments)
    assert not model.states["total"].any()  # nothing has run
    assert model(x=X, scale=TWO)


def test_wrong_ways_to_give_inputs(model: Model) -> None:
    with pytest.raises(InputError, match="input 'x' is given twice"):
        model({"x": X, "scale": TWO}, x=X)
    with pytest.raises(InputError, match="inputs is ndarray but must be a mapping"):
        model(X)  # type: ignore[arg-type]


def test_out(model: Model) -> None:
    y = np.empty((3, 4), "f4")
    out = model(x=X, scale=TWO, out={"y": y})
    assert out["y"] is y and out["sum"].shape == (4,)
    np.testing.assert_array_equal(y, X * 2 + BIAS)
    # parts of one buffer that do not overlap
    both = np.empty(16, "f4")
    out = model(x=X, scale=TWO, out={"y": both[:12].reshape(3, 4), "sum": both[12:]})
    np.testing.assert_array_equal(both[:12].reshape(3, 4), X * 2 + BIAS)


LOCKED = np.empty((3, 4), "f4")
LOCKED.flags.writeable = False
SHARED = np.empty(16, "f4")
MINE = X.copy()


@pytest.mark.parametrize("out, match", [
    ({"z": X}, "there is no output 'z'; the names are y, sum"),
    ({"yy": X}, "did you mean 'y'"),
    ({"y": [1]}, r"out\['y'\] is list but must be a numpy array"),
    ({"y": np.empty((3, 4), "f8")}, r"out\['y'\] is float64\[3,4\] but must be float32\[3,4\]"),
    ({"y": np.empty((2, 4), "f4")}, r"out\['y'\] is float32\[2,4\] but must be float32\[3,4\]"),
    ({"y": np.empty((3, 4), ">f4")}, r"out\['y'\] is >f4"),
    ({"y": np.empty((4, 3), "f4").T}, "in C order"),
    ({"y": np.empty((3, 8), "f4")[:, ::2]}, "in C order"),
    ({"y": LOCKED}, "must be writable"),
    ({"y": MINE}, r"out\['y'\] shares memory with input 'x'"),
    ({"sum": MINE[1]}, r"out\['sum'\] shares memory with input 'x'"),
    ({"y": SHARED[:12].reshape(3, 4), "sum": SHARED[8:12]}, r"out\['sum'\] shares memory with out"),
    ([X], "out is list but must be a mapping"),
])
def test_wrong_out(model: Model, out: Any, match: str) -> None:
    before = MINE.copy()
    with pytest.raises(InputError, match=match):
        model(x=MINE, scale=TWO, out=out)
    np.testing.assert_array_equal(MINE, before)
    assert not model.states["total"].any()


def test_static_shapes(device: ToyDevice) -> None:
    model = load(STATIC)
    np.testing.assert_array_equal(model(x=X, scale=TWO)["y"], X)
    with pytest.raises(InputError, match=r"has shape \[2,4\] but must have \[3,4\]$"):
        model(x=X[:2], scale=TWO)


def ports(*shapes: tuple[Size, ...], out: Size = 1, **symbols: tuple[int, int]) -> Plan:
    """A plan that computes nothing, with inputs a, b, ... of bytes."""
    return Plan("toy", tuple(Port(chr(97 + i), s, "uint8") for i, s in enumerate(shapes)),
                (Port("out", (out,), "uint8"),), (), symbols, (0, 0, 0), (), (), b"", b"")


def zeros(*shapes: tuple[int, ...]) -> dict[str, Array]:
    return {chr(97 + i): np.zeros(s, "u1") for i, s in enumerate(shapes)}


def test_symbols_are_told_by_shapes(device: ToyDevice) -> None:
    m: Size = ("sym", "m")
    odd: Size = ("add", ("mul", 2, N), 1)
    model = load(ports((odd, 3), (m, N), (("add", N, m),), out=("mul", N, m), n=(0, 9), m=(1, 9)))
    assert model(zeros((5, 3), (4, 2), (6,)))["out"].shape == (8,)
    assert model(zeros((1, 3), (4, 0), (4,)))["out"].shape == (0,)
    with pytest.raises(InputError, match=r"'a' has shape \[7,3\] but must have "
                                         r"\[2\*n \+ 1,3\] with n = 2 by input 'b'$"):
        model(zeros((7, 3), (4, 2), (6,)))
    with pytest.raises(InputError, match=r"'c' has shape \[7\] but must have \[n \+ m\] with "
                                         r"m = 4 by input 'b', n = 2 by input 'b'$"):
        model(zeros((5, 3), (4, 2), (7,)))
    with pytest.raises(InputError, match=r"'b' has shape \[0,2\] .* m in 1\.\.9, n in 0\.\.9$"):
        model(zeros((5, 3), (0, 2), (2,)))
    model = load(ports((odd,), n=(1, 9)))
    assert model(zeros((7,)))
    for size in (1, 6, 21):
        with pytest.raises(InputError, match=r"with n in 1\.\.9$"):
            model(zeros((size,)))
    model = load(ports((("add", 9, ("mul", -1, N)),), out=N, n=(1, 9)))
    assert model(zeros((2,)))["out"].shape == (7,)


def test_an_output_of_negative_size(device: ToyDevice) -> None:
    model = load(ports((N,), out=("add", N, -2), n=(1, 9)))
    with pytest.raises(InputError, match=r"output 'out' would have shape \[-1\]"):
        model(zeros((1,)))


def test_many_shapes_are_not_all_kept(device: ToyDevice) -> None:
    model = load(ports((N,), out=N, n=(0, 1000)))
    for i in range(1000):
        assert model(zeros((i,)))["out"].shape == (i,)
    assert len(model._shapes) <= 256


@pytest.mark.parametrize("shape", [(3,), (("floordiv", N, 2),), (("mul", N, N),), (("mul", 0, N),)])
def test_a_symbol_that_no_shape_tells(device: ToyDevice, shape: tuple[Size, ...]) -> None:
    with pytest.raises(PlanError, match="dimension n can't be told .* --dim n=VALUE"):
        load(ports(shape, n=(1, 9)))


def test_states(model: Model) -> None:
    states = model.states
    assert list(states) == ["total"] and len(states) == 1 and "x" not in states
    model(x=X, scale=TWO)
    out = model(x=X, scale=TWO)
    np.testing.assert_array_equal(out["sum"], 2 * X.sum(0))
    copy = states["total"]
    np.testing.assert_array_equal(copy.reshape(4), out["sum"])
    copy[:] = 7
    np.testing.assert_array_equal(states["total"].reshape(4), out["sum"])
    states["total"] = np.ones((2, 2), "f4")
    np.testing.assert_array_equal(model(x=X, scale=TWO)["sum"], X.sum(0) + 1)
    states.reset()
    assert not states["total"].any()
    np.testing.assert_array_equal(model(x=X, scale=TWO)["sum"], X.sum(0))


def test_wrong_states(model: Model) -> None:
    for name, value, match in (
        ("totl", X, "there is no state 'totl'; did you mean 'total'"),
        ("total", X, r"state 'total' has shape \[3,4\] but must have \[2,2\]"),
        ("total", np.ones((2, 2)), "state 'total' is float64"),
        ("total", 1, "state 'total' is int"),
    ):
        with pytest.raises(InputError, match=match):
            model.states[name] = value
    with pytest.raises(KeyError):
        model.states["x"]


def test_calls_from_many_threads(model: Model) -> None:
    def call(i: int) -> None:
        rows = 1 + i % 5
        x = np.full((rows, 4), i, "f4")
        np.testing.assert_array_equal(model(x=x, scale=TWO)["y"], x * 2 + BIAS)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(400)))


def test_closing(device: ToyDevice) -> None:
    with load(PLAN, threads=3) as model:
        assert device.threads == 3
        assert model(x=X, scale=TWO)
        assert not device.closed
    assert device.executable is not None and device.executable.closed
    assert device.is_closed()
    model.close()
    states = model.states
    with pytest.raises(InputError, match="closed; load it again"):
        model(x=X, scale=TWO)
    with pytest.raises(InputError, match="closed; load it again"):
        states["total"]
    del model
    with pytest.raises(InputError, match="model is gone"):
        states.reset()


def test_a_model_that_is_dropped_gives_its_device_back(device: ToyDevice) -> None:
    model = load(PLAN)
    gone = weakref.ref(model)
    del model
    assert gone() is None and device.closed  # at once: nothing in it is a cycle


def test_a_device_that_refuses_is_given_back(device: ToyDevice) -> None:
    device.fails = DeviceError("mmap", "out of memory", 12)
    with pytest.raises(DeviceError):
        load(PLAN)
    assert device.closed


def test_a_failed_run_leaves_the_model_usable(model: Model, device: ToyDevice) -> None:
    assert device.executable is not None
    device.executable.fails = DeviceError("submit", "timed out")
    with pytest.raises(DeviceError):
        model(x=X, scale=TWO)
    device.executable.fails = None
    assert model(x=X, scale=TWO)


def test_wrong_ways_to_load(device: ToyDevice, tmp_path: Path) -> None:
    for threads in (0, -1, 1.5, True):
        with pytest.raises(InputError, match="threads is"):
            load(PLAN, threads=threads)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no such file"):
        load(tmp_path / "p.pkl")
    with pytest.raises(PlanError, match="constants has 16 bytes instead of 17"):
        load(replace(PLAN, arenas=(17, 0, 80)))


IMPORTS = """
import sys
import numpy
before = set(sys.modules)
from tinyedge.errors import TinyedgeError
from tinyedge.runtime import load
try:
    load(sys.argv[1])
except TinyedgeError:
    assert "tinyedge.drivers.cpu" in sys.modules  # this plan has no executor, or no such host
print(*sorted(set(sys.modules) - before))
"""


def test_loading_imports_nothing_heavy() -> None:
    golden = Path(__file__).parent / "golden" / "format1-handmade.pkl"
    run = subprocess.run([sys.executable, "-c", IMPORTS, str(golden)], check=True, text=True,
                         capture_output=True, cwd=golden.parents[2])
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert loaded & {"tinyedge"} and loaded <= {"tinyedge", *sys.stdlib_module_names}
    ours = {name for name in run.stdout.split() if name.startswith("tinyedge.")}
    assert not any(name.startswith(("tinyedge.codegen", "tinyedge.onnx", "tinyedge.graph"))
                   for name in ours)
