"""From an ONNX model to the tensor IR: names, scopes, constants, dimensions, subgraphs.

What an operator means is in the modules beside this one; how they are found is in `registry`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import onnx

from .. import graph as g
from ..dtype import DType
from ..errors import InputError, ModelError, ShapeError, TinyedgeError, UnsupportedError
from ..graph import Graph, Node
from ..interpreter import Array, evaluate_constant
from ..shape import Dim, is_static, same, static, symbol
from .known import Known, know
from .read import Source, array, read
from .registry import TABLE, Context, Value, element_type

Bound = int | tuple[int, int]
NEWEST = 1 << 30
"""An opset above all there will be."""
DEEPEST = 30
"""Functions that may call each other."""
FOLDED = 1 << 16
"""Elements of a constant that is worked out while importing; larger ones are left to the passes."""


@dataclass(frozen=True)
class Problem:
    """One node of a model that can't be compiled.

    dtype: the first input's element type, "" where unknown. reason: a sentence.
    """

    node: str
    operator: str
    domain: str
    opset: int
    dtype: str
    reason: str


class Missing:
    """The value of a name whose node could not be imported (`check` goes on after it)."""

    def __init__(self, node: str) -> None:
        self.node = node


class Scope:
    """Names visible in one graph or function.

    parent: the surrounding graph's scope. opsets: domain -> version. attributes: a function's
    actual parameters, for attributes that refer to them.
    """

    def __init__(
        self, parent: Scope | None, opsets: Mapping[str, int],
        attributes: Mapping[str, onnx.AttributeProto] | None = None,
    ) -> None:
        self.parent, self.opsets = parent, opsets
        self.attributes: Mapping[str, onnx.AttributeProto] = {}
        if attributes is not None:
            self.attributes = attributes
        elif parent is not None:
            self.attributes = parent.attributes
        self.values: dict[str, Value | Missing | None] = {}
        self.stored: dict[str, onnx.TensorProto] = {}

    def chain(self) -> Iterable[Scope]:
        s: Scope | None = self
        while s is not None:
            yield s
            s = s.parent


Result = Value | Missing | None


def domain_of(name: str) -> str:
    return "" if name == "ai.onnx" else name


def opsets_of(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    return {domain_of(o.domain): o.version for o in imports}


class Importer:
    """State of one import. `problems`: None to raise the first error, else where to collect."""

    def __init__(
        self, model: onnx.ModelProto, base: Any, problems: list[Problem] | None = None
    ) -> None:
        self.model, self.base, self.problems = model, base, problems
        self.functions = {(domain_of(f.domain), f.name): f for f in model.functions}
        self.constants: dict[Node, bool] = {}
        self.folded: dict[Node, Array] = {}
        self.knowledge: dict[Node, Known | None] = {}
        self.serial = 0
        self.symbolic = False
        self.depth = 0

    # values

    def array(self, tensor: onnx.TensorProto) -> Array:
        element_type(tensor.data_type, f"constant '{tensor.name}'")
        return array(tensor, self.base)

    def is_constant(self, n: Node) -> bool:
        """Whether n depends on constants only."""
        stack = [n]
        while stack:
            x = stack[-1]
            todo = [i for i in x.inputs if i not in self.constants]
            if not todo or x in self.constants:
                stack.pop()
                self.constants[x] = x.op != "input" and is_static(x.shape) and \
                    all(self.constants[i] for i in x.inputs)
            stack.extend(todo)
        return self.constants[n]

    def constant(self, n: Node) -> Array | None:
        """n's value if it is constant."""
        if n.op == "const":
            return n.value
        if n not in self.folded:
            if not self.is_constant(n):
                known = know(n, self.knowledge)
                if known is None or not all(isinstance(v, (int, bool)) for v in known.flat):
                    return None
                self.folded[n] = known.astype(n.dtype.numpy)
            else:
                self.folded[n] = evaluate_constant(n)
        return self.folded[n]

    def known(self, n: Node) -> Known | None:
        """n's value if it follows from constants and shapes; elements may be symbolic."""
        value = self.constant(n)
        return value.astype(object) if value is not None else know(n, self.knowledge)

    def fold(self, n: Node) -> Node:
        """n, as a const if it is a small constant."""
        if n.op in ("const", "expand") and not n.dtype.is_int:
            return n
        if not is_static(n.shape) or prod(static(n.shape)) > FOLDED:
            return n
        value = self.constant(n)
        return n if value is None else g.const(value)

    def lookup(self, name: str, scope: Scope) -> Value | Missing | None:
        if not name:
            return None
        for s in scope.chain():
            if name in s.values:
                return s.values[name]
            if name in s.stored:
                with g.naming(name):
                    s.values[name] = value = g.const(self.array(s.stored[name]))
                return value
        raise ModelError(f"value '{name}' is used but nothing gives it; the model is not valid")

    def fresh(self, name: str, shape: Sequence[Dim], dtype: DType) -> Node:
        """A new input for a graph inside the graph."""
        self.serial += 1
        return g.placeholder(f"{name}#{self.serial}", shape, dtype)

    # graphs

    def load(
        self, dims: Mapping[str, Bound], shapes: Mapping[str, Sequence[Bound]],
        states: Mapping[str, str],
    ) -> Graph:
        """The whole model."""
        graph = self.model.graph
        scope = Scope(None, opsets_of(self.model.opset_import))
        self.store(graph, scope)
        inputs = bind(graph, set(scope.stored), dims, shapes)
        scope.values.update(inputs)
        self.symbolic = not all(is_static(x.shape) for x in inputs.values())
        self.run(graph.node, scope)
        outputs: dict[str, Node] = {}
        for o in graph.output:
            value = self.lookup(o.name, scope)
            if isinstance(value, Node):
                outputs[o.name] = value
            elif not isinstance(value, Missing):
                raise UnsupportedError(f"output '{o.name}' is a sequence; only tensors are given")
        twice = [v for v in states.values() if list(states.values()).count(v) > 1]
        if twice:
            raise InputError(f"state ...={twice[0]}: two outputs feed that input; leave one out")
        missing = [k for k, v in states.items() if k not in outputs or v not in inputs]
        if missing:
            raise InputError(
                f"state {missing[0]}={states[missing[0]]}: no such output or input; there are "
                f"outputs {list(outputs)} and inputs {list(inputs)}"
            )
        return Graph(inputs, outputs, dict(states), graph.name)

    def store(self, graph: onnx.GraphProto, scope: Scope) -> None:
        scope.stored = {t.name: t for t in graph.initializer}
        for t in graph.sparse_initializer:
            scope.values[t.values.name] = g.const(self.dense(t))

    def dense(self, tensor: onnx.SparseTensorProto) -> Array:
        import numpy as np

        values, places = self.array(tensor.values), self.array(tensor.indices)
        out = np.zeros(tuple(tensor.dims), values.dtype)
        if places.ndim == 1:
            out.ravel()[places] = values
        else:
            out[tuple(places.T)] = values
        return out

    def subgraph(
        self, graph: onnx.GraphProto, scope: Scope, arguments: Sequence[Value]
    ) -> list[Node]:
        """A graph's outputs for given inputs, in terms of the surrounding graph's nodes."""
        inner = Scope(scope, scope.opsets)
        self.store(graph, inner)
        inner.values.update({i.name: a for i, a in zip(graph.input, arguments)})
        self.run(graph.node, inner)
        outputs = []
        for o in graph.output:
            value = self.lookup(o.name, inner)
            if isinstance(value, Missing):
                raise UnsupportedError(f"it needs node '{value.node}', which can't be compiled")
            if not isinstance(value, Node):
                raise UnsupportedError(f"output '{o.name}' of an inner graph is not a tensor")
            outputs.append(value)
        return outputs

    def branch(self, graph: onnx.GraphProto, scope: Scope) -> list[Node] | ShapeError:
        """A conditional graph's outputs, or why it can't run with the inputs' shapes."""
        problems, self.problems = self.problems, None
        try:
            return self.subgraph(graph, scope, [])
        except ShapeError as error:
            if not self.symbolic:
                return error
            if problems is None:
                raise
        except TinyedgeError:
            if problems is None:
                raise
        finally:
            self.problems = problems
        return self.subgraph(graph, scope, [])

    def run(self, nodes: Sequence[onnx.NodeProto], scope: Scope) -> None:
        """Imports nodes in order; their outputs become names of the scope."""
        for index, proto in enumerate(nodes):
            name = proto.name or f"{proto.op_type}_{index}"
            inputs: list[Any] = []
            try:
                inputs = [self.lookup(i, scope) for i in proto.input]
                lost = next((i for i in inputs if isinstance(i, Missing)), None)
                if lost is not None:
                    self.definition(proto, name, scope)
                    raise UnsupportedError(
                        f"not checked: it needs node '{lost.node}', which can't be compiled"
                    )
                with g.naming(name):
                    values: list[Result] = self.node(proto, name, inputs, scope)
            except TinyedgeError as error:
                if self.problems is None:
                    raise
                self.report(proto, name, inputs, scope, str(error))
                values = self.stand_ins(proto, name, inputs, scope, error)
            for o, v in zip(proto.output, values):
                if o:
                    scope.values[o] = v

    def definition(
        self, proto: onnx.NodeProto, name: str, scope: Scope, known: bool = True
    ) -> tuple[Any, int, Any]:
        """(function or None, version, schema or None) of a node's operator.

        UnsupportedError if there is neither a function nor a definition by other operators, unless
        `known` is false.
        """
        domain = domain_of(proto.domain)
        opset = scope.opsets.get(domain, 0)
        shown = f"{domain}.{proto.op_type}" if domain else proto.op_type
        where = f"node '{name}' ({shown}, opset {opset})"
        if (domain, proto.op_type) in self.functions:
            return None, 0, None
        try:
            schema: Any = onnx.defs.get_schema(proto.op_type, min(max(opset, 1), NEWEST), domain)
        except onnx.defs.SchemaError:
            schema = None
        versions = TABLE.get((domain, proto.op_type), {})
        if schema is not None:
            version = schema.since_version
            if version in versions:
                return versions[version], version, schema
            if schema.has_function or schema.has_context_dependent_function:
                return None, version, schema
        elif versions and domain:
            version = max(versions)
            return versions[version], version, None
        if not known:
            return None, 0, schema
        if versions and schema is not None:
            raise UnsupportedError(
                f"{where}: the operator's definition of opset {schema.since_version} is not "
                f"supported; those of opsets {sorted(versions)} are"
            )
        raise UnsupportedError(f"{where}: the operator is not supported")

    def node(
        self, proto: onnx.NodeProto, name: str, inputs: list[Value | None], scope: Scope
    ) -> list[Result]:
        """One node's outputs."""
        domain = domain_of(proto.domain)
        function, version, schema = self.definition(proto, name, scope)
        attributes = {}
        for a in proto.attribute:
            if not a.ref_attr_name:
                attributes[a.name] = a
            elif a.ref_attr_name in scope.attributes:
                attributes[a.name] = scope.attributes[a.ref_attr_name]
        opset = scope.opsets.get(domain, version)
        if function is None:
            body = self.functions.get((domain, proto.op_type)) or \
                body_of(schema, proto, attributes, inputs, opset)
            return self.call(body, schema, attributes, inputs, proto.output, scope)
        defaults = {} if schema is None else {
            k: a.default_value for k, a in schema.attributes.items() if a.default_value.type
        }
        c = Context(self, scope, proto, name, version, opset, attributes, defaults)
        try:
            out = function(c, *inputs)
        except TinyedgeError as error:
            text = str(error).removeprefix(f"node '{name}': ")
            raise type(error)(text if str(c) in text else f"{c}: {text}") from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            text = " ".join(str(error).split())
            raise ModelError(f"{c}: its inputs or attributes don't fit it: {text}") from error
        except MemoryError:
            raise UnsupportedError(f"{c}: it asks for more memory than there is") from None
        c.refuse_unread()
        outs: list[Any] = list(out) if isinstance(out, list) else [out]
        if len(outs) < max((i + 1 for i, w in enumerate(c.wanted) if w), default=0):
            c.refuse(f"only its first {len(outs)} outputs are supported")
        return [self.fold(o) if isinstance(o, Node) else o for o in outs]

    def call(
        self, body: onnx.FunctionProto, schema: Any,
        attributes: Mapping[str, onnx.AttributeProto], inputs: list[Value | None],
        wanted: Sequence[str], scope: Scope,
    ) -> list[Result]:
        """The outputs of a function made of other operators."""
        actual = {a.name: a for a in body.attribute_proto}
        if schema is not None:
            actual.update({
                k: a.default_value for k, a in schema.attributes.items() if a.default_value.type
            })
        actual.update(attributes)
        inner = Scope(None, {**scope.opsets, **opsets_of(body.opset_import)}, actual)
        self.depth += 1
        if self.depth > DEEPEST:
            raise ModelError(f"function '{body.name}' calls itself; the model is not valid")
        padded = [*inputs, *[None] * (len(body.input) - len(inputs))]
        inner.values.update(zip(body.input, padded))
        self.run(body.node, inner)
        self.depth -= 1
        return [
            self.lookup(o, inner) if w else None for o, w in zip(body.output, wanted)
        ]

    # going on after a problem

    def report(
        self, proto: onnx.NodeProto, name: str, inputs: list[Any], scope: Scope, reason: str
    ) -> None:
        assert self.problems is not None
        domain = domain_of(proto.domain)
        kind = next((i.dtype.name for i in inputs if isinstance(i, Node)), "")
        opset = scope.opsets.get(domain, 0)
        self.problems.append(Problem(name, proto.op_type, domain, opset, kind, reason))

    def stand_ins(
        self, proto: onnx.NodeProto, name: str, inputs: list[Any], scope: Scope, error: Exception
    ) -> list[Result]:
        """Placeholders of the types that an unsupported node's outputs have, where they follow."""
        types = {v.name: v.type for v in (*self.model.graph.value_info, *self.model.graph.output)}
        # of a node that is not valid, inference may make nonsense
        if isinstance(error, UnsupportedError) and all(isinstance(i, Node) for i in inputs):
            try:
                schema = self.definition(proto, name, scope, known=False)[2]
                kinds = {i: type_of(x) for i, x in zip(proto.input, inputs)}
                data = {i: onnx.numpy_helper.from_array(x.value, i)
                        for i, x in zip(proto.input, inputs) if x.op == "const"}
                types |= onnx.shape_inference.infer_node_outputs(schema, proto, kinds, data)
            except Exception:  # the node has been reported; this only helps to go on
                pass
        return [self.stand_in(types.get(o), name) for o in proto.output]

    def stand_in(self, kind: onnx.TypeProto | None, node: str) -> Node | Missing:
        if kind is None or not kind.tensor_type.HasField("shape"):
            return Missing(node)
        shape = [d.dim_value if d.HasField("dim_value") else -1
                 for d in kind.tensor_type.shape.dim]
        try:
            dtype = element_type(kind.tensor_type.elem_type, "")
        except UnsupportedError:
            return Missing(node)
        return self.fresh(name=node, shape=shape, dtype=dtype) if min(shape, default=0) >= 0 else \
            Missing(node)


def type_of(x: Node) -> onnx.TypeProto:
    dims = [d if isinstance(d, int) else str(d) for d in x.shape]
    number = onnx.helper.np_dtype_to_tensor_dtype(x.dtype.numpy)
    kind: onnx.TypeProto = onnx.helper.make_tensor_type_proto(number, dims)
    return kind


def body_of(
    schema: Any, proto: onnx.NodeProto, attributes: Mapping[str, onnx.AttributeProto],
    inputs: list[Value | None], opset: int,
) -> onnx.FunctionProto:
    """The function that an operator's definition consists of."""
    if not schema.has_context_dependent_function:
        versions = [v for v in schema.function_opset_versions if v <= opset]
        body = schema.get_function_with_opset_version(max(versions)) if versions else \
            schema.function_body.SerializeToString()
    else:
        types = [(type_of(x) if isinstance(x, Node) else onnx.TypeProto()).SerializeToString()
                 for x in inputs]
        plain = onnx.NodeProto()
        plain.CopyFrom(proto)
        del plain.attribute[:]
        plain.attribute.extend(attributes.values())
        versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
        body = schema.get_context_dependent_function_with_opset_version(
            max(versions or schema.context_dependent_function_opset_versions),
            plain.SerializeToString(), types,
        )
    out = onnx.FunctionProto()
    out.ParseFromString(body)
    return out


# dimensions of inputs

def bind(
    graph: onnx.GraphProto, stored: set[str], dims: Mapping[str, Bound],
    shapes: Mapping[str, Sequence[Bound]],
) -> dict[str, Node]:
    """The graph's inputs with every dimension an int or a bounded symbol."""
    given = {i.name: i for i in graph.input if i.name not in stored}
    unknown = [k for k in shapes if k not in given]
    if unknown:
        raise InputError(f"--shape {unknown[0]}=...: no such input; there are {list(given)}")
    names = {_name(d) for i in given.values() for d in _dims(i) or ()} - {""}
    unknown = [k for k in dims if k not in names]
    if unknown:
        there = f"there are {sorted(names)}" if names else "the model has none"
        raise InputError(f"--dim {unknown[0]}=...: no such dimension; {there}")
    bound = {k: _dimension(k, v, f"--dim {k}") for k, v in dims.items()}
    for name, wanted in shapes.items():
        declared = _dims(given[name])
        if declared is None:
            continue
        if len(declared) != len(wanted):
            raise ShapeError(
                f"--shape {name}: {len(wanted)} dimensions are given, the input has {len(declared)}"
            )
        for axis, (d, v) in enumerate(zip(declared, wanted)):
            label = _name(d)
            if label:
                new = _dimension(label, v, f"--shape {name}")
                if not same(bound.setdefault(label, new), new):
                    raise ShapeError(
                        f"--shape {name}: dimension '{label}' is {new} here and {bound[label]} "
                        "elsewhere"
                    )
            elif d.HasField("dim_value") and d.dim_value >= 0 and d.dim_value != v:
                raise ShapeError(
                    f"--shape {name}: dimension {axis} is {v}, but the model fixes it to "
                    f"{d.dim_value}"
                )
    return {k: _input(i, bound, shapes.get(k)) for k, i in given.items()}


def _name(d: Any) -> str:
    """A dimension's name; "?" is what some exporters write for none."""
    return "" if d.dim_param == "?" else str(d.dim_param)


def _dims(i: onnx.ValueInfoProto) -> Sequence[Any] | None:
    kind = i.type.tensor_type
    return kind.shape.dim if kind.HasField("shape") else None


def _dimension(name: str, value: Bound, flag: str) -> Dim:
    given = value if isinstance(value, tuple) else (value, value)
    try:
        low, high = map(operator.index, given)
    except (TypeError, ValueError):
        raise InputError(f"{flag}: {value!r} is neither a size nor (lowest, highest)") from None
    if low < 0 or high < low:
        raise InputError(f"{flag}: {low}..{high} is not a range of sizes")
    return low if low == high else symbol(name, low, high)


def _input(
    i: onnx.ValueInfoProto, bound: Mapping[str, Dim], wanted: Sequence[Bound] | None
) -> Node:
    if not i.type.HasField("tensor_type"):
        raise UnsupportedError(f"input '{i.name}' is not a tensor")
    kind = element_type(i.type.tensor_type.elem_type, f"input '{i.name}'")
    declared = _dims(i)
    if declared is None:
        if wanted is None:
            raise ShapeError(f"input '{i.name}' has no shape; give it by --shape {i.name}=...")
        declared = [onnx.TensorShapeProto.Dimension() for _ in wanted]
    shape: list[Dim] = []
    for axis, d in enumerate(declared):
        if _name(d) in bound:
            shape.append(bound[_name(d)])
        elif not d.dim_param and d.HasField("dim_value") and d.dim_value >= 0:
            shape.append(d.dim_value)
        elif wanted is not None:
            shape.append(_dimension(f"{i.name}.{axis}", wanted[axis], f"--shape {i.name}"))
        elif _name(d):
            raise ShapeError(
                f"input '{i.name}': dimension '{_name(d)}' is not bound; use --dim {_name(d)}=N "
                f"or --shape {i.name}=..."
            )
        else:
            raise ShapeError(
                f"input '{i.name}': dimension {axis} has no size and no name; use "
                f"--shape {i.name}=..."
            )
    return g.placeholder(i.name, shape, kind)


# the module's two entry points

def load(
    source: Source, dims: Mapping[str, Bound] | None = None,
    shapes: Mapping[str, Sequence[Bound]] | None = None,
    states: Mapping[str, str] | None = None,
) -> Graph:
    """A model as a tensor graph.

    source: a path, a file's bytes or a ModelProto. dims: named dimension -> size or (low, high).
    shapes: input -> its dimensions. states: output -> the input that it feeds in the next run.
    ModelError: not a valid model; UnsupportedError: an operator or attribute; ShapeError: an
    unbound dimension or shapes that don't fit; InputError: dims, shapes or states name what the
    model has not.
    """
    model, base = read(source)
    graph = Importer(model, base).load(dims or {}, shapes or {}, states or {})
    return g.validate(graph)


def check(
    source: Source, dims: Mapping[str, Bound] | None = None,
    shapes: Mapping[str, Sequence[Bound]] | None = None,
) -> list[Problem]:
    """Every node that can't be imported. Errors of the file and of its inputs are raised."""
    model, base = read(source)
    problems: list[Problem] = []
    Importer(model, base, problems).load(dims or {}, shapes or {}, {})
    return problems
