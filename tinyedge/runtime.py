"""Run time: a plan bound to a device, called with numpy arrays. The pipeline ends here.

Imports numpy and nothing heavier, so a plan's file is all that a machine needs besides it. What can
be worked out before a call is: shapes that have been seen are looked up, not checked again.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from . import planfile
from .errors import DeviceTimeout, InputError, PlanError
from .plan import Plan, Port, Size, State, evaluate, show_shape, symbols_of

if TYPE_CHECKING:
    from .drivers.device import Device, Executable

Array = np.ndarray[Any, np.dtype[Any]]

C_CONTIGUOUS, ALIGNED, WRITEABLE = 0x1, 0x100, 0x400
BEHAVED = C_CONTIGUOUS | ALIGNED
"""Bits of numpy's ``flags.num``: memory that kernels can read as it is."""

CLOSED = "the model is closed; load it again"

MAX_SHAPES = 256
"""Most combinations of input shapes that a model remembers."""


def load(
    source: str | os.PathLike[str] | Plan, device: str | None = None, threads: int | None = None
) -> Model:
    """A model ready to run, from a plan file's path or a plan.

    device: which device of the plan's target family, by default its first. threads: how many CPU
    threads compute, by default one for each processor that this process may use; results do not
    depend on it. PlanError if the plan can't be read or doesn't fit the device, DeviceError if
    the device refuses.
    """
    if threads is not None and (type(threads) is not int or threads < 1):
        raise InputError(f"threads is {threads!r} but must be a positive int")
    if isinstance(source, Plan):
        planfile.check(source)
        plan = source
    else:
        plan = planfile.read(source)
    solvers = _solvers(plan)
    plan, opened = _fitting(plan, device)
    try:
        return Model(plan, opened, opened.bind(plan, threads=threads), solvers)
    except BaseException:
        opened.close()
        raise


def _fitting(plan: Plan, device: str | None) -> tuple[Plan, Device]:
    """The first of a plan and its variants that can run here, and the device; PlanError."""
    from .drivers.device import open_device

    refused: PlanError | None = None
    for p in (plan, *plan.variants):
        try:
            return p, open_device(p.target, device)
        except PlanError as error:
            refused = refused or error
    assert refused is not None
    raise refused


class Model:
    """A plan on a device: a callable from named arrays to named arrays; made by `load`.

    Safe to call from several threads: calls take turns. Holds the device until `close`, the end of
    a ``with`` block or the collection of the object.

    plan: what runs. inputs, outputs: name -> Port (shape, dtype). states: see `States`.
    metadata: the source model's own key-value pairs.
    """

    def __init__(self, plan: Plan, device: Device, executable: Executable,
                 solvers: Sequence[_Solver]) -> None:
        self.plan = plan
        self.inputs: dict[str, Port] = {p.name: p for p in plan.inputs}
        self.outputs: dict[str, Port] = {p.name: p for p in plan.outputs}
        self.metadata = plan.metadata
        self._executable = executable
        self._solvers = solvers
        self._names = tuple(self.inputs)
        self._dtypes = tuple(np.dtype(p.dtype) for p in plan.inputs)
        self._out_names = tuple(self.outputs)
        self._out_dtypes = tuple(np.dtype(p.dtype) for p in plan.outputs)
        self._shapes: dict[Any, tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = {}
        self._lock = Lock()
        _models.add(self)
        self._close = weakref.finalize(self, _release, executable, device)
        self.states = States(self)

    def __call__(
        self,
        inputs: Mapping[str, Any] | None = None,
        /,
        out: Mapping[str, Array] | None = None,
        **named: Any,
    ) -> dict[str, Array]:
        """Runs the model once.

        inputs, named: an array for every name in `inputs`, of exactly its dtype and shape; both
        ways can be mixed. out: arrays that some outputs are written to (C order, not overlapping
        any other array of this call); the other outputs are new arrays. Returns every output by
        name. InputError says which argument is wrong; nothing has run then.
        """
        arrays, outputs, addresses, symbols = self._arguments(inputs, named, out)
        self._submit(self._executable, arrays, outputs, addresses, symbols)
        return dict(zip(self._out_names, outputs))

    def profile(
        self,
        inputs: Mapping[str, Any] | None = None,
        /,
        out: Mapping[str, Array] | None = None,
        **named: Any,
    ) -> tuple[dict[str, Array], list[int]]:
        """Like a call; also nanoseconds spent in each step.

        The steps are counted depth first in the order in which the plan lists them
        (`tinyedge.drivers.device.Executable.profile`).
        """
        arrays, outputs, addresses, symbols = self._arguments(inputs, named, out)
        times = self._submit(self._executable.profile, arrays, outputs, addresses, symbols)
        return dict(zip(self._out_names, outputs)), times

    def _submit(self, run: Callable[..., Any], arrays: list[Array], outputs: list[Array],
                addresses: list[int], symbols: tuple[int, ...]) -> Any:
        with self._lock:
            if not self._close.alive:
                raise InputError(CLOSED)
            try:
                return run(addresses, symbols)
            except DeviceTimeout:
                _late.append((arrays, outputs))
                raise

    def _arguments(
        self, inputs: Mapping[str, Any] | None, named: dict[str, Any],
        out: Mapping[str, Array] | None,
    ) -> tuple[list[Array], list[Array], list[int], tuple[int, ...]]:
        """A run's input arrays (to be kept until it ends), outputs, addresses of both, symbols."""
        if inputs is not None:
            named = self._merged(inputs, named)
        # the usual case first, in one pass; _prepared finds out what is wrong
        try:
            arrays = [named[name] for name in self._names]
        except KeyError:
            raise self._name_error(named) from None
        if len(named) != len(arrays):
            raise self._name_error(named)
        for i, dtype in enumerate(self._dtypes):
            a = arrays[i]
            if (type(a) is not np.ndarray or a.dtype is not dtype
                    or a.flags.num & BEHAVED != BEHAVED):
                arrays[i] = _prepared(a, dtype, f"input {self._names[i]!r}")
        key = tuple([a.shape for a in arrays])
        known = self._shapes.get(key)
        if known is None:
            known = self._solve(key)
        symbols, shapes = known
        if out is None:
            outputs = [np.empty(s, t) for s, t in zip(shapes, self._out_dtypes)]
            addresses = [a.__array_interface__["data"][0] for a in arrays + outputs]
        else:
            outputs = self._given(out, shapes)
            addresses = [a.__array_interface__["data"][0] for a in arrays + outputs]
            self._check_overlap(arrays, outputs, addresses)
        return arrays, outputs, addresses, symbols

    def close(self) -> None:
        """Gives the device back; a call that is under way ends first. May be repeated."""
        with self._lock:
            self._close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        ports = [", ".join(f"{p.name}: {p.dtype}{show_shape(p.shape)}" for p in side.values())
                 for side in (self.inputs, self.outputs)]
        return f"<Model {self.plan.name or 'unnamed'} ({ports[0]}) -> ({ports[1]})>"

    def _merged(self, inputs: Mapping[str, Any], named: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(inputs, Mapping):
            raise InputError(f"inputs is {type(inputs).__name__} but must be a mapping of names to "
                             f"arrays; the names are {', '.join(self._names)}")
        if twice := inputs.keys() & named.keys():
            raise InputError(f"input {min(twice)!r} is given twice; leave one out")
        return {**inputs, **named}

    def _name_error(self, named: Mapping[str, Any]) -> InputError:
        for name in named:
            if name not in self.inputs:
                if any(name == s.name for s in self.plan.states):
                    return InputError(f"input {name!r} is a state, which the model keeps; "
                                      f"set it by model.states[{name!r}] = ...")
                return InputError(f"there is no input {name!r}; {_instead(name, self._names)}")
        missing = [name for name in self._names if name not in named]
        port = self.inputs[missing[0]]
        return InputError(f"input {port.name!r} is missing; pass an array of {port.dtype} with "
                          f"shape {show_shape(port.shape)}")

    def _solve(self, key: tuple[tuple[int, ...], ...]
               ) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Symbols and shapes of outputs, from shapes of inputs; InputError where they don't fit."""
        for port, shape in zip(self.inputs.values(), key):
            if len(shape) != len(port.shape):
                raise InputError(f"input {port.name!r} has {len(shape)} dimensions "
                                 f"{show_shape(shape)} but must have {self._expected(port)}")
        symbols: dict[str, int] = {}
        for solver in self._solvers:
            port = self.plan.inputs[solver.port]
            value, rest = divmod(key[solver.port][solver.axis] - solver.offset, solver.factor)
            low, high = self.plan.symbols[solver.symbol]
            if rest or not low <= value <= high:
                raise InputError(f"input {port.name!r} has shape {show_shape(key[solver.port])} "
                                 f"but must have {self._expected(port)}")
            symbols[solver.symbol] = value
        for port, shape in zip(self.inputs.values(), key):
            if shape != tuple(evaluate(d, symbols) for d in port.shape):
                raise InputError(f"input {port.name!r} has shape {show_shape(shape)} but must have "
                                 f"{self._expected(port, symbols)}")
        shapes = []
        for port in self.outputs.values():
            shape = tuple(evaluate(d, symbols) for d in port.shape)
            if min(shape, default=0) < 0:
                raise InputError(f"output {port.name!r} would have shape {show_shape(shape)}; "
                                 "pass a larger input")
            shapes.append(shape)
        if len(self._shapes) >= MAX_SHAPES:
            self._shapes = {}
        found = tuple(symbols[name] for name in self.plan.symbols), tuple(shapes)
        self._shapes[key] = found
        return found

    def _expected(self, port: Port, known: Mapping[str, int] | None = None) -> str:
        """A port's shape, with the values or bounds of its symbols."""
        names = sorted(set().union(*map(symbols_of, port.shape)))
        notes = []
        for name in names:
            if known:
                first = next(s for s in self._solvers if s.symbol == name)
                source = self.plan.inputs[first.port].name
                notes.append(f"{name} = {known[name]}" + (f" by input {source!r}" if source
                             != port.name else ""))
            else:
                low, high = self.plan.symbols[name]
                notes.append(f"{name} in {low}..{high}")
        return f"{show_shape(port.shape)}" + (f" with {', '.join(notes)}" if notes else "")

    def _given(self, out: Mapping[str, Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        """The arrays to write to, new ones where none is given."""
        if not isinstance(out, Mapping):
            raise InputError(f"out is {type(out).__name__} but must be a mapping of names to arrays"
                             f"; the names are {', '.join(self._out_names)}")
        for name in out:
            if name not in self.outputs:
                raise InputError(f"there is no output {name!r}; {_instead(name, self._out_names)}")
        outputs: list[Array] = []
        for name, shape, dtype in zip(self._out_names, shapes, self._out_dtypes):
            a = out.get(name)
            if a is None:
                a = np.empty(shape, dtype)
            elif not isinstance(a, np.ndarray):
                raise InputError(f"out[{name!r}] is {type(a).__name__} but must be a numpy array")
            elif a.dtype != dtype or a.shape != shape:
                raise InputError(f"out[{name!r}] is {a.dtype}{show_shape(a.shape)} but must be "
                                 f"{dtype}{show_shape(shape)}")
            elif a.flags.num & (BEHAVED | WRITEABLE) != BEHAVED | WRITEABLE:
                raise InputError(f"out[{name!r}] must be writable, aligned and in C order; pass an "
                                 "array made by np.empty")
            outputs.append(a)
        return outputs

    def _check_overlap(self, inputs: Sequence[Array], outputs: Sequence[Array],
                       addresses: Sequence[int]) -> None:
        labels = [f"input {n!r}" for n in self._names] + [f"out[{n!r}]" for n in self._out_names]
        sizes = [a.nbytes for a in (*inputs, *outputs)]
        for j in range(len(inputs), len(addresses)):
            for i in range(j):
                if (addresses[i] < addresses[j] + sizes[j] and sizes[i]
                        and addresses[j] < addresses[i] + sizes[i] and sizes[j]):
                    raise InputError(f"{labels[j]} shares memory with {labels[i]}; pass an array "
                                     "of its own")


_late: list[object] = []
"""Arrays of runs that were given up: the device may still use them."""

_models: weakref.WeakSet[Model] = weakref.WeakSet()


def _in_child() -> None:
    """A forked child has none of the threads that may have held a lock."""
    for model in _models:
        model._lock = Lock()


os.register_at_fork(after_in_child=_in_child)


class States(Mapping[str, Array]):
    """The buffers that persist between a model's runs: name -> array, zero at first.

    Reading gives a copy; ``states[name] = array`` sets one, with the same checks as an input.
    """

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        self._states = {s.name: s for s in model.plan.states}

    def __getitem__(self, name: str) -> Array:
        state = self._states[name]
        model = self._alive()
        with model._lock:
            return self._view(model, state).copy()

    def __setitem__(self, name: str, value: Any) -> None:
        state = self._states.get(name)
        if state is None:
            raise InputError(f"there is no state {name!r}; {_instead(name, tuple(self._states))}")
        array = _prepared(value, np.dtype(state.dtype), f"state {name!r}")
        if array.shape != state.shape:
            raise InputError(f"state {name!r} has shape {show_shape(array.shape)} but must have "
                             f"{show_shape(state.shape)}")
        model = self._alive()
        with model._lock:
            self._view(model, state)[...] = array

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __repr__(self) -> str:
        return f"<States {', '.join(self)}>" if self._states else "<States: none>"

    def reset(self) -> None:
        """Sets every state to zero, as after loading."""
        model = self._alive()
        with model._lock:
            for state in self._states.values():
                self._view(model, state)[...] = 0

    def _alive(self) -> Model:
        model = self._model()
        if model is None:
            raise InputError("the states' model is gone; keep a reference to it")
        return model

    def _view(self, model: Model, state: State) -> Array:
        """The state's memory; the model's lock is held."""
        if not model._close.alive:
            raise InputError(CLOSED)
        arena = np.frombuffer(model._executable.states(), np.uint8)
        assert isinstance(state.ref.size, int)  # planfile.check
        part = arena[state.ref.offset:state.ref.offset + state.ref.size]
        return part.view(state.dtype).reshape(state.shape)


class _Solver:
    """symbol = (dimension `axis` of input `port` - offset) / factor"""

    __slots__ = ("symbol", "port", "axis", "factor", "offset")

    def __init__(self, symbol: str, port: int, axis: int, factor: int, offset: int) -> None:
        self.symbol, self.port, self.axis = symbol, port, axis
        self.factor, self.offset = factor, offset


def _solvers(plan: Plan) -> list[_Solver]:
    """For every symbol a dimension of an input that tells its value; PlanError if there is none."""
    found: dict[str, _Solver] = {}
    for plain in (True, False):
        for i, port in enumerate(plan.inputs):
            for axis, d in enumerate(port.shape):
                line = _line(d)
                if line is not None and line[1] and (not plain or line[1:] == (1, 0)):
                    found.setdefault(line[0], _Solver(line[0], i, axis, line[1], line[2]))
    for name in plan.symbols:
        if name not in found:
            raise PlanError(f"the plan's dimension {name} can't be told from the shapes of its "
                            f"inputs; compile the model again with --dim {name}=VALUE")
    return [found[name] for name in plan.symbols]


def _line(size: Size) -> tuple[str, int, int] | None:
    """(symbol, factor, offset) of a size of the form factor * symbol + offset."""
    if isinstance(size, int):
        return "", 0, size
    if size[0] == "sym":
        return size[1], 1, 0
    if size[0] not in ("add", "mul"):
        return None
    a, b = _line(size[1]), _line(size[2])
    if a is None or b is None or (a[0] and b[0] and a[0] != b[0]):
        return None
    if size[0] == "add":
        return a[0] or b[0], a[1] + b[1], a[2] + b[2]
    if a[1] and b[1]:
        return None
    return a[0] or b[0], a[1] * b[2] + b[1] * a[2], a[2] * b[2]


def _prepared(a: Any, dtype: np.dtype[Any], what: str) -> Array:
    """`a` as an array that kernels can read, copied only if its memory is not in order."""
    if not isinstance(a, np.ndarray):
        if not (isinstance(a, np.generic) or hasattr(a, "__array__")):
            raise InputError(f"{what} is {type(a).__name__} but must be a numpy array; pass "
                             f"np.asarray(..., dtype={dtype.name!r})")
        a = np.asarray(a)
    if hasattr(a, "mask"):
        raise InputError(f"{what} is a masked array, whose mask would be ignored; pass "
                         "array.filled(...)")
    if a.dtype != dtype:
        if a.dtype.newbyteorder() == dtype:
            raise InputError(f"{what} has the byte order of another machine ({a.dtype.str}); pass "
                             f"array.astype({dtype.name!r})")
        raise InputError(f"{what} is {a.dtype} but must be {dtype.name}; pass "
                         f"array.astype({dtype.name!r}) if that is what you mean")
    if a.flags.num & BEHAVED != BEHAVED:
        a = np.array(a, order="C", copy=True, subok=False)
    return np.asarray(a)


def _instead(name: object, names: Sequence[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(str(name), names, 1)
    return f"did you mean {close[0]!r}?" if close else \
        f"the names are {', '.join(names)}" if names else "there are none"


def _release(executable: Executable, device: Device) -> None:
    try:
        executable.close()
    finally:
        device.close()


__all__ = ["Model", "States", "load"]
