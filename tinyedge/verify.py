"""Does a plan compute what its model says? Compared with a second runtime, and with itself.

Beside the pipeline: it drives every stage and none depends on it. `verify` is the command of that
name; `bisect` finds the first node of a model at which values part.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import InputError, ModelError, TinyedgeError
from .plan import Plan

if TYPE_CHECKING:
    import onnx as onnx_package

    from .runtime import Array, Model

TOLERANCE = {"float16": 1e-2, "float32": 1e-4, "float64": 1e-8}
"""Largest difference that a dtype may show, relative to the output's largest value; 0 for others.
Sums of a few thousand products reach a tenth of it."""

Reference = Callable[["onnx_package.ModelProto | Path", Mapping[str, "Array"]], dict[str, "Array"]]


def difference(got: Array, want: Array) -> float:
    """Largest absolute difference relative to the largest finite value of `want`; inf where shape,
    type, or places of nan and inf differ, or integers at all."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return np.inf
    if want.dtype.kind != "f":
        return 0.0 if np.array_equal(got, want) else np.inf
    usual = np.isfinite(want)
    if not np.array_equal(usual, np.isfinite(got)) or not np.array_equal(
            got[~usual], want[~usual], equal_nan=True):
        return np.inf
    if not usual.any():
        return 0.0
    gap = np.abs(got[usual].astype(np.float64) - want[usual]).max()
    return float(gap / max(np.abs(want[usual]).max(), 1e-30))


def largest(got: Mapping[str, Array], want: Mapping[str, Array]) -> float:
    """The largest `difference` of any output."""
    return max((difference(got[name], value) for name, value in want.items()), default=0.0)


# references

def onnxruntime_session(model: str | Path | bytes, threads: int = 0) -> Any:
    """An onnxruntime session with all its optimisations, on `threads` threads (0: all)."""
    try:
        import onnxruntime
    except ImportError:
        raise InputError("onnxruntime is not installed; install it, or compare with --against "
                         "reference") from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    source = model if isinstance(model, bytes) else str(model)
    try:
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions share no base of their own
        raise ModelError(f"onnxruntime refuses the model: {_first_line(error)}; compare with "
                         "--against reference") from None


def _onnxruntime(model: onnx_package.ModelProto | Path, feeds: Mapping[str, Array]
                 ) -> dict[str, Array]:
    session = onnxruntime_session(model if isinstance(model, Path) else model.SerializeToString())
    names = [o.name for o in session.get_outputs()]
    try:
        return dict(zip(names, session.run(names, dict(feeds))))
    except Exception as error:
        raise ModelError(f"onnxruntime fails on the model: {_first_line(error)}; give inputs that "
                         "it takes by -i, or compare with --against reference") from None


def _reference(model: onnx_package.ModelProto | Path, feeds: Mapping[str, Array]
               ) -> dict[str, Array]:
    from onnx.reference import ReferenceEvaluator

    try:
        evaluator = ReferenceEvaluator(str(model) if isinstance(model, Path) else model)
        names = list(evaluator.output_names)
        with np.errstate(all="ignore"):
            return dict(zip(names, map(np.asarray, evaluator.run(names, dict(feeds)))))
    except Exception as error:
        raise ModelError(f"onnx's reference fails on the model: {_first_line(error)}; compare with "
                         "--against onnxruntime") from None


REFERENCES: dict[str, Reference] = {"onnxruntime": _onnxruntime, "reference": _reference}
"""What `verify` compares with: onnxruntime, or the reference that the onnx package has."""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# checks

@dataclass(frozen=True)
class Check:
    """One finding: `error` is a `difference`, and may be `tolerance` at most."""

    what: str
    error: float
    tolerance: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance


def run_once(model: Model, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs of one run, the next states among them, from `feeds` for inputs and states."""
    for state in model.plan.states:
        model.states[state.name] = feeds[state.name]
    out = dict(model({name: feeds[name] for name in model.inputs}))
    return out | {s.output: model.states[s.name] for s in model.plan.states}


def verify(plan: Plan, feeds: Mapping[str, Array], want: Mapping[str, Array] | None = None,
           device: str | None = None, tolerance: float | None = None) -> list[Check]:
    """Runs a plan and checks its numbers.

    feeds: an array for every input and every state. want: outputs of a reference for them, or None
    to check only that the plan agrees with itself: two runs, and one thread against all.
    tolerance: for every float output, instead of `TOLERANCE`.
    """
    from .runtime import load

    with load(plan, device) as model:
        first, second = run_once(model, feeds), run_once(model, feeds)
    with load(plan, device, threads=1) as model:
        alone = run_once(model, feeds)
    checks = []
    for name, value in (want or {}).items():
        got = first.get(name)
        if got is None:
            raise InputError(f"the plan has no output {name!r}; it is not a plan of this model")
        limit = TOLERANCE.get(value.dtype.name, 0.0)
        if tolerance is not None and value.dtype.kind == "f":
            limit = tolerance
        checks.append(Check(name, difference(got, value), limit, _note(got, value)))
    for what, other in (("two runs", second), ("1 thread and all", alone)):
        same = all(first[k].tobytes() == other[k].tobytes() for k in first)
        checks.append(Check(what, 0.0 if same else np.inf, 0.0, "" if same else "not bit-equal"))
    return checks


def _note(got: Array, want: Array) -> str:
    """What else is to be said of an output."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}"
    if want.dtype.kind != "f":
        wrong = int(np.count_nonzero(got != want))
        return f"{wrong} of {want.size} differ" if wrong else ""
    for kind, test in (("nan", np.isnan), ("inf", np.isinf)):
        more = int(np.count_nonzero(test(got) & ~test(want)))
        less = int(np.count_nonzero(test(want) & ~test(got)))
        if more or less:
            return f"{more or less} {kind} {'that the reference has not' if more else 'too few'}"
    return ""


# bisection

@dataclass(frozen=True)
class Parting:
    """The first value of a model that is off.

    stage: "importer" if the imported graph, evaluated as it is, is off already; otherwise
    "compiler". node, operator: what computes the value. alone: its error when only its
    node is compiled, fed with the reference's values, or None where that can't be had.
    """

    stage: str
    value: str
    node: str
    operator: str
    error: float
    alone: float | None = None


def bisect(
    path: str | os.PathLike[str], feeds: Mapping[str, Array], target: str = "cpu",
    against: str = "onnxruntime", tolerance: float | None = None, device: str | None = None,
    report: Callable[[str, int, int], None] | None = None,
) -> Parting | None:
    """The first node's value at which a compiled model parts from the reference, None if none does.

    Every float value that a node of the model's top level computes is asked of the reference and of
    the imported graph; then the model is compiled up to one value at a time, halving what is left.
    """
    from . import onnx
    from .compiler import compile_graph
    from .graph import Graph
    from .interpreter import interpret
    from .runtime import load

    limit = TOLERANCE["float32"] if tolerance is None else tolerance
    proto, makers, ends = _observed(Path(path))
    want = REFERENCES[against](proto, feeds)
    names = [n for n in makers if n in want and want[n].dtype.kind == "f"]
    graph = onnx.load(proto, shapes={k: v.shape for k, v in feeds.items()})
    mine = interpret(graph, feeds)

    def found(stage: str, name: str, error: float, alone: float | None = None) -> Parting:
        node = makers[name]
        return Parting(stage, name, node.name or name, node.op_type, error, alone)

    def compiled(outputs: Sequence[str]) -> dict[str, float]:
        part = Graph(graph.inputs, {n: graph.outputs[n] for n in outputs})
        with load(compile_graph(part, target), device) as model:
            got = model(feeds)
        return {n: difference(got[n], want[n]) for n in outputs}

    if any(difference(mine[n], want[n]) > limit for n in ends):
        for name in names:
            error = difference(mine[name], want[name])
            if error > limit:
                return found("importer", name, error)
    whole = compiled([n for n in ends if n in names])
    end = next((n for n, e in whole.items() if e > limit), None)
    if end is None:
        return None
    names = _before(end, makers, names)
    low, high, error = -1, len(names) - 1, whole[end]
    total = max(1, high.bit_length())
    while high - low > 1:
        if report is not None:
            report("compile a part", total - (high - low - 1).bit_length(), total)
        middle = (low + high) // 2
        e = compiled([names[middle]])[names[middle]]
        if e > limit:
            high, error = middle, e
        else:
            low = middle
    return found("compiler", names[high], error, _alone(
        proto, makers[names[high]], {**feeds, **want}, want, target, device))


def _before(end: str, makers: Mapping[str, onnx_package.NodeProto], names: Sequence[str]
            ) -> list[str]:
    """Those of the names, in order, on which the value `end` depends; itself the last."""
    needed, stack = set(), [end]
    while stack:
        name = stack.pop()
        if name in makers and name not in needed:
            needed.add(name)
            stack.extend(makers[name].input)
    return [n for n in names if n in needed]


def _alone(proto: onnx_package.ModelProto, node: onnx_package.NodeProto,
           values: Mapping[str, Array], want: Mapping[str, Array], target: str,
           device: str | None) -> float | None:
    """The error of one node compiled by itself, fed with the reference's values."""
    from onnx import helper

    from . import onnx
    from .compiler import compile_graph
    from .runtime import load

    held = {t.name: t for t in proto.graph.initializer}
    used = list(dict.fromkeys(n for n in node.input if n))
    fed = [n for n in used if n not in held]
    if any(n not in values for n in fed):
        return None

    def info(name: str, a: Array) -> onnx_package.ValueInfoProto:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype),
                                             a.shape)

    outputs = [n for n in node.output if n in want]
    part = helper.make_model(
        helper.make_graph([node], "one", [info(n, values[n]) for n in fed],
                          [info(n, want[n]) for n in outputs],
                          [held[n] for n in used if n in held]),
        opset_imports=proto.opset_import, ir_version=proto.ir_version, functions=proto.functions)
    try:
        with load(compile_graph(onnx.load(part), target), device) as model:
            return largest(model({n: np.ascontiguousarray(values[n]) for n in model.inputs}),
                           {n: want[n] for n in outputs})
    except TinyedgeError:
        return None


def _observed(path: Path) -> tuple[
        onnx_package.ModelProto, dict[str, onnx_package.NodeProto], list[str]]:
    """The model with every value of its top level as an output; value -> the node that makes it;
    the model's own outputs."""
    import onnx as package

    from .onnx.read import read

    read(path)  # says what may be wrong with the file
    model = package.load(path)
    known = {v.name: v for v in package.shape_inference.infer_shapes(model).graph.value_info}
    own = [o.name for o in model.graph.output]
    makers = {name: node for node in model.graph.node for name in node.output
              if name in known or name in own}
    model.graph.output.extend(known[name] for name in makers if name not in own)
    return model, makers, own


__all__ = ["REFERENCES", "TOLERANCE", "Check", "Parting", "bisect", "difference", "largest",
           "onnxruntime_session", "run_once", "verify"]
