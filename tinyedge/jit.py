"""jit: a Python function over tensors becomes a graph, then a plan.

The function runs once for each combination of its arguments' structure, shapes and types, with
tensors that stand for the arrays; what it computes is compiled, and that plan answers this call and
all later ones of its kind, so a capture equals a replay bit for bit. Arrays are inputs. Everything
else (Python scalars, strings, None, objects) is part of the capture, and so are arrays of the
closure, with the values that they had then.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from threading import RLock
from types import ModuleType
from typing import Any, overload

import numpy as np

from . import graph as g
from .dtype import dtype_of
from .errors import InputError, UnsupportedError
from .graph import Graph, Node
from .runtime import Model, load
from .tensor import Array, Tensor, substitute, traced, values, wrap

Function = Callable[..., Any]
MAX_CAPTURES = 256
"""Captures that one function may make before calls with further arguments are refused."""


@dataclass(frozen=True)
class _Place:
    """Where an array stands in a structure of arguments or results."""

    number: int


@dataclass
class _Capture:
    """graph: its inputs have the arguments' names. result: the function's, with `_Place` for each
    tensor."""

    graph: Graph
    result: Any
    model: Model | None = None


class Jit:
    """A captured function; made by `jit`.

    Calls take and give nested lists, tuples and dicts. Arrays and tensors may stand anywhere in
    them; results are tensors that have their values (``.numpy()`` gives a read-only array). A
    function that calls another captured one contains it.
    """

    def __init__(self, function: Function, threads: int | None = None) -> None:
        functools.update_wrapper(self, function)
        self.function, self.threads = function, threads
        try:
            self.signature = inspect.signature(function)
        except (TypeError, ValueError):
            raise InputError(f"jit: {function!r} doesn't tell its parameters; wrap it in a Python "
                             "function") from None
        self.name = getattr(function, "__name__", "function")
        self._captures: dict[Hashable, _Capture] = {}
        self._lock = RLock()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A method: the instance is part of the capture, with what it holds at that time."""
        if instance is None:
            return self
        method: Any = functools.partial(self, instance)
        method.save = lambda path, *args, **kwargs: self.save(path, instance, *args, **kwargs)
        return method

    def __repr__(self) -> str:
        return f"<jit {self.name}{self.signature}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function: its plan where there is one for such arguments, else a capture.

        InputError for arguments that don't fit the function or can't be captured,
        UnsupportedError where the function needs a value that depends on an argument.
        """
        arguments, arrays, tree, key = self._arguments(args, kwargs)
        if any(isinstance(a, Tensor) for a in arrays.values()):
            # inside another capture: part of it
            return self.function(*args, **kwargs)
        with self._lock:
            capture = self._capture(arguments, arrays, tree, key)
            if capture.model is None:
                from .compiler import compile_graph

                plan = compile_graph(capture.graph, provenance=self._provenance())
                capture.model = load(plan, threads=self.threads)
        outputs = list(capture.model({k: arrays[k] for k in capture.graph.inputs}).values())
        return _filled(capture.result, [wrap(a) for a in outputs])

    def save(self, path: str | os.PathLike[str], *args: Any, target: str = "cpu",
             **kwargs: Any) -> None:
        """Writes the plan for such arguments as a file that `tinyedge.load` takes.

        Without arguments: for those of the one kind that the function has been called with. An
        input is named like the parameter, inside of structures ``x.0.key``; the output is "output",
        in a structure "0", "1" or its key. Errors as of a call, and PlanError if the file can't be
        written.
        """
        from .compiler import compile_graph

        with self._lock:
            if args or kwargs or not self.signature.parameters:
                capture = self._capture(*self._arguments(args, kwargs))
            elif len(self._captures) == 1:
                (capture,) = self._captures.values()
            else:
                raise InputError(f"{self.name}.save: the function has been captured for "
                                 f"{len(self._captures)} kinds of arguments; pass examples of the "
                                 "arguments that the plan is for")
        compile_graph(capture.graph, target, provenance=self._provenance()).save(path)

    def _provenance(self) -> dict[str, Any]:
        return {"function": getattr(self.function, "__qualname__", self.name)}

    def _arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[inspect.BoundArguments, dict[str, Any], Any, Hashable]:
        """(arguments, arrays by name, arguments with places for arrays, what a capture is for).

        An array that is a Tensor depends on an argument of a capture that goes on outside.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(f"{self.name}: {error}") from None
        bound.apply_defaults()
        arrays: dict[str, Any] = {}
        key: list[Hashable] = []
        tree = {k: self._taken(v, k, arrays, key) for k, v in bound.arguments.items()}
        return bound, arrays, tree, tuple(key)

    def _taken(self, x: Any, name: str, arrays: dict[str, Any], key: list[Hashable]) -> Any:
        """x with places for its arrays, which are put in `arrays`; what else it is goes to key."""
        if isinstance(x, (Tensor, np.ndarray, np.generic)):
            array = _value(x, name)
            key.append((array.shape, array.dtype.str))
            if name in arrays:
                raise InputError(f"{self.name}: two arguments are both named '{name}'; rename a "
                                 "key")
            arrays[name] = array
            return _Place(len(arrays) - 1)
        if isinstance(x, (list, tuple)):
            key.append((type(x), len(x)))
            return _sequence(x, [self._taken(v, f"{name}.{i}", arrays, key)
                                 for i, v in enumerate(x)])
        if isinstance(x, dict):
            key.append((dict, tuple((type(k), k) for k in x)))
            return {k: self._taken(v, f"{name}.{k}", arrays, key) for k, v in x.items()}
        try:
            hash(x)
        except TypeError:
            raise InputError(
                f"{self.name}: argument '{name}' is a {type(x).__name__}, which can't be part of a "
                "capture; pass arrays, scalars, and lists, tuples or dicts of them") from None
        # 1, 1.0 and True are equal, and so are 0.0 and -0.0
        key.append((type(x), x.hex() if isinstance(x, float) else x))
        return x

    def _capture(
        self, bound: inspect.BoundArguments, arrays: Mapping[str, Any], tree: Any, key: Hashable
    ) -> _Capture:
        found = self._captures.get(key)
        if found is not None:
            return found
        if len(self._captures) >= MAX_CAPTURES:
            raise InputError(f"{self.name} has been captured for {MAX_CAPTURES} kinds of arguments;"
                             " pass numbers that change as arrays (numpy.float32(x))")
        inputs = {k: g.placeholder(k, a.shape, dtype_of(a.dtype)) for k, a in arrays.items()}
        # nodes of this capture only: a tensor that another one has left behind must not pass
        own = [g.node("input", (), n.shape, n.dtype, k, name=k, capture=object())
               for k, n in inputs.items()]
        stand_ins = [_stand_in(n) for n in own]
        bound.arguments = {k: _filled(v, stand_ins) for k, v in tree.items()}
        with g.naming(self.name):
            result = self.function(*bound.args, **bound.kwargs)
        outputs: dict[str, Node] = {}
        result = self._given(result, "", outputs)
        if not outputs:
            raise InputError(f"{self.name} returns no tensor, so there is nothing to compute")
        roots = list(outputs.values())
        constants = {n: g.const(a) for n, a in values(roots).items()}
        roots = substitute(roots, dict(zip(own, inputs.values())) | constants)
        foreign = traced(roots, inputs.values())
        if foreign is not None:
            raise UnsupportedError(f"{self.name} uses a tensor of another capture, made from its "
                                   f"argument '{foreign['name']}'; pass it as an argument")
        capture = _Capture(Graph(inputs, dict(zip(outputs, roots)), name=self.name), result)
        g.validate(capture.graph)
        self._captures[key] = capture
        return capture

    def _given(self, x: Any, name: str, outputs: dict[str, Node]) -> Any:
        """A result with places for its tensors."""
        if isinstance(x, (np.ndarray, np.generic)):
            x = Tensor(x)
        if isinstance(x, Tensor):
            name = name or "output"
            if name in outputs:
                raise InputError(f"{self.name} returns two tensors named '{name}'; rename a key")
            outputs[name] = x.node
            return _Place(len(outputs) - 1)
        inner = f"{name}." if name else ""
        if isinstance(x, (list, tuple)):
            return _sequence(x, [self._given(v, f"{inner}{i}", outputs) for i, v in enumerate(x)])
        if isinstance(x, dict):
            return {k: self._given(v, f"{inner}{k}", outputs) for k, v in x.items()}
        if x is None or isinstance(x, (bool, int, float, str)):
            return x
        raise InputError(f"{self.name} returns a {type(x).__name__}; return tensors, scalars, and "
                         "lists, tuples or dicts of them")


def _sequence(like: Any, items: list[Any]) -> Any:
    """A list, tuple or named tuple of these items."""
    if hasattr(like, "_fields"):
        return type(like)(*items)
    return items if isinstance(like, list) else tuple(items)


def _filled(tree: Any, tensors: list[Tensor]) -> Any:
    """The structure with tensors in their places."""
    if isinstance(tree, _Place):
        return tensors[tree.number]
    if isinstance(tree, (list, tuple)):
        return _sequence(tree, [_filled(x, tensors) for x in tree])
    if isinstance(tree, dict):
        return {k: _filled(x, tensors) for k, x in tree.items()}
    return tree


def _stand_in(n: Node) -> Tensor:
    x = Tensor.__new__(Tensor)
    x._node, x._value = n, None
    return x


def _value(x: Tensor | Array | np.generic, name: str) -> Tensor | Array:
    """The argument's array; the tensor itself if that is not known yet."""
    if isinstance(x, Tensor):
        if x._value is None and traced([x.node]) is not None:
            return x
        return x.numpy()
    if isinstance(x, np.ma.MaskedArray):
        raise InputError(f"argument '{name}' is a masked array; fill it first (x.filled(...))")
    return np.asarray(x, dtype_of(np.asarray(x)).numpy)


@overload
def jit(function: Function, /) -> Jit: ...


@overload
def jit(*, threads: int | None = None) -> Callable[[Function], Jit]: ...


def jit(function: Function | None = None, /, *, threads: int | None = None) -> Any:
    """Captures a Python function over tensors; see `Jit`.

    ::

        @tinyedge.jit
        def step(x):
            return (x @ w).relu()

        y = step(x)                  # captured, compiled, run
        step.save("step.pkl")        # a plan file for tinyedge.load

    threads: how many CPU threads compute, by default one for each processor; the results do not
    depend on it.
    """
    if function is None:
        return lambda f: Jit(f, threads)
    if not callable(function):
        raise InputError(f"jit is for functions, not for a {type(function).__name__}")
    return Jit(function, threads)


class _Module(ModuleType):
    """Importing this module puts it where the package has the function: it acts as that too."""

    __call__ = staticmethod(jit)


sys.modules[__name__].__class__ = _Module

__all__ = ["Jit", "jit"]
