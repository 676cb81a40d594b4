"""The table of small ONNX models that the importer, the compiler and the bench share.

``cases()`` gives every `Case`: a model of one or a few nodes, inputs, and what an independent
implementation (onnxruntime, or onnx's reference where that one lacks the operator) makes of them.
To cover an operator, add a row to one of the modules listed in `cases`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

Array = npt.NDArray[Any]

TOLERANCE = {"float16": 4e-3, "float32": 1e-5, "float64": 1e-10}
"""By output type, relative to the output's largest value; other types must be equal."""


@dataclass(frozen=True)
class Const:
    """An input that is stored in the model."""

    value: Array


@dataclass(frozen=True)
class Case:
    """One model. reference: "onnxruntime" or "onnx". tolerance: see `TOLERANCE`."""

    name: str
    model: onnx.ModelProto
    inputs: Mapping[str, Array]
    tolerance: float
    reference: str

    @cached_property
    def expected(self) -> dict[str, Array]:
        """The outputs by name."""
        names = [o.name for o in self.model.graph.output]
        data = self.model.SerializeToString()
        if self.reference == "onnx":
            values = ReferenceEvaluator(self.model).run(None, dict(self.inputs))
        else:
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            session = onnxruntime.InferenceSession(data, options, ["CPUExecutionProvider"])
            values = session.run(None, dict(self.inputs))
        return {k: np.asarray(v) for k, v in zip(names, values)}

    def compare(self, outputs: Mapping[str, Array]) -> None:
        """AssertionError where outputs differ from what is expected."""
        for name, want in self.expected.items():
            got = outputs[name]
            assert got.shape == want.shape, (name, got.shape, want.shape)
            assert got.dtype == want.dtype, (name, got.dtype, want.dtype)
            if want.dtype.kind != "f":
                np.testing.assert_array_equal(got, want, name)
                continue
            finite = np.abs(want[np.isfinite(want)]).astype(np.float64)
            least = self.tolerance * max(finite.max(initial=0.0), 1e-30)
            np.testing.assert_allclose(
                got.astype(np.float64), want.astype(np.float64), 0, least, err_msg=name
            )


def floats(
    *shape: int, kind: Any = np.float32, low: float | None = None, high: float = 1.0
) -> Array:
    """Normal values, or even ones between low and high; the same for the same arguments."""
    rng = np.random.default_rng([*shape, 1])
    if low is None:
        return rng.standard_normal(shape).astype(kind)
    return rng.uniform(low, high, shape).astype(kind)


def ints(*shape: int, low: int = -5, high: int = 6, kind: Any = np.int64) -> Array:
    return np.random.default_rng([*shape, 2]).integers(low, high, shape).astype(kind)


def bools(*shape: int) -> Array:
    return np.random.default_rng([*shape, 3]).integers(0, 2, shape).astype(bool)


def k(*values: Any, kind: Any = np.int64) -> Const:
    """A stored vector."""
    return Const(np.array(values, kind))


def scalar(value: Any, kind: Any = np.int64) -> Const:
    return Const(np.array(value, kind))


def row(
    op: str, *inputs: Array | Const | None, name: str = "", opset: int = 17, outputs: int = 1,
    wanted: Sequence[int] | None = None, tolerance: float | None = None,
    reference: str = "onnxruntime", domain: str = "", **attributes: Any,
) -> Case:
    """A case of one node. wanted: which outputs are used (default: all `outputs`)."""
    node = helper.make_node(
        op,
        [f"i{n}" if x is not None else "" for n, x in enumerate(inputs)],
        [f"o{n}" if wanted is None or n in wanted else "" for n in range(outputs)],
        f"the_{op}", domain=domain, **attributes,
    )
    return model([node], inputs, name=f"{op}_{name}" if name else op, opset=opset,
                 tolerance=tolerance, reference=reference, domain=domain)


def model(
    nodes: Sequence[onnx.NodeProto], inputs: Sequence[Array | Const | None], name: str,
    opset: int = 17, tolerance: float | None = None, reference: str = "onnxruntime",
    outputs: Sequence[str] = (), domain: str = "",
) -> Case:
    """A case of several nodes over inputs i0, i1, ...; outputs: default those of the last node."""
    feeds = {f"i{n}": x for n, x in enumerate(inputs) if isinstance(x, np.ndarray)}
    stored = [numpy_helper.from_array(x.value, f"i{n}")
              for n, x in enumerate(inputs) if isinstance(x, Const)]
    declared = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in feeds.items()
    ]
    last = list(outputs or [o for o in nodes[-1].output if o])
    # outputs without types: they are inferred
    results = [onnx.ValueInfoProto(name=o) for o in last]
    graph = helper.make_graph(list(nodes), name, declared, results, stored)
    imports = [helper.make_opsetid("", opset)]
    if domain:
        imports.append(helper.make_opsetid(domain, 1))
    version = 3 if opset < 9 and not stored else 8 if opset < 21 else 10
    proto = helper.make_model(graph, opset_imports=imports, ir_version=version)
    kinds = _output_types(proto, nodes, feeds)
    for r in results:
        if r.name in kinds:
            r.CopyFrom(kinds[r.name])
    del proto.graph.output[:]
    proto.graph.output.extend(results)
    first = next(iter(feeds.values()), np.zeros(0, np.float32))
    if tolerance is None:
        tolerance = TOLERANCE.get(first.dtype.name, TOLERANCE["float32"])
    return Case(f"{name}_v{opset}", proto, feeds, tolerance, reference)


def _output_types(
    proto: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], feeds: Mapping[str, Array]
) -> dict[str, onnx.ValueInfoProto]:
    """What shape inference finds; elsewhere a float output of unknown shape."""
    wanted = [o.name for o in proto.graph.output]
    bare = onnx.ModelProto()
    bare.CopyFrom(proto)
    found = {o.name: o for o in onnx.shape_inference.infer_shapes(bare).graph.output}
    out = {}
    for name in wanted:
        info = found[name]
        if not info.type.tensor_type.elem_type:
            first = next(iter(feeds.values())).dtype
            info = helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(first), None)
        out[name] = info
    return out


@cache
def cases() -> tuple[Case, ...]:
    """Every case of the table."""
    from . import elementwise, layers, moving, sequences

    rows = [c for m in (elementwise, layers, moving, sequences) for c in m.rows()]
    names = [c.name for c in rows]
    assert len(set(names)) == len(names), sorted(n for n in set(names) if names.count(n) > 1)
    return tuple(rows)

