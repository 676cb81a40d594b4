"""What is wrong with a model gets one sentence that says what, where, and what to do."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tinyedge
from tests.cases import Const, cases, floats, k, model, row, scalar
from tinyedge.errors import InputError, ModelError, ShapeError, TinyedgeError, UnsupportedError
from tinyedge.graph import walk
from tinyedge.interpreter import interpret
from tinyedge.onnx import check, load

GOOD = row("Conv", floats(1, 3, 8, 8), Const(floats(4, 3, 3, 3)), name="good").model


def tensor(name: str, shape: Any, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def small(nodes: list[onnx.NodeProto], shape: Any = (2, 3), opset: int = 17,
          **extra: Any) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", [tensor("x", shape)], [tensor("y", None)], **extra)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


# files

@pytest.mark.parametrize("content, words", [
    (b"", "is empty"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS pointer"),
    (b"<html>not found</html>", "is not an ONNX model"),
    (np.random.default_rng(0).bytes(4096), "is not an ONNX model"),
    (b"\x89PNG\r\n\x1a\n" + bytes(100), "is not an ONNX model"),
    (GOOD.SerializeToString()[:-40], "is truncated"),
    (GOOD.SerializeToString()[:2], "has no graph"),
])
def test_files_that_are_no_model(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=words) as caught:
        load(path)
    assert "model.onnx" in str(caught.value) and "\n" not in str(caught.value)


def test_every_truncation_is_refused() -> None:
    data = GOOD.SerializeToString()
    for n in range(len(data) - 1):
        with pytest.raises((ModelError, UnsupportedError)):
            load(data[:n])


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="can't be read: No such file"):
        load(tmp_path / "none.onnx")
    with pytest.raises(ModelError, match="can't be read"):
        load(tmp_path)


def external(tmp_path: Path) -> Path:
    weights = floats(4, 3, 3, 3)
    stored = numpy_helper.from_array(weights, "w")
    proto = helper.make_model(helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"])], "g", [tensor("x", [1, 3, 8, 8])],
        [tensor("y", None)], [stored]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "model.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def test_external_data_are_found_beside_the_model(tmp_path: Path) -> None:
    path = external(tmp_path)
    x = floats(1, 3, 8, 8)
    got = interpret(load(path), {"x": x})["y"]
    want = interpret(load(row("Conv", x, Const(floats(4, 3, 3, 3))).model), {"i0": x})["o0"]
    np.testing.assert_array_equal(got, want)


def test_external_data_that_are_missing_cut_off_or_elsewhere(tmp_path: Path) -> None:
    path = external(tmp_path)
    with pytest.raises(ModelError, match="give the model as a path"):
        load(path.read_bytes())
    data = tmp_path / "weights.bin"
    data.write_bytes(data.read_bytes()[:-4])
    with pytest.raises(ModelError, match="needs bytes 0 to 432 of 'weights.bin', which has 428"):
        load(path)
    data.unlink()
    with pytest.raises(ModelError, match="'weights.bin', which is missing"):
        load(path)
    (tmp_path / "inner").mkdir()
    moved = tmp_path / "inner" / "model.onnx"
    content = path.read_bytes().replace(b"weights.bin", b"../weights.")
    moved.write_bytes(content)
    with pytest.raises(ModelError, match="outside the model's folder"):
        load(moved)


def test_external_data_above_2_gb_are_mapped(tmp_path: Path) -> None:
    rows = 1 << 20
    stored = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[rows, 600],
                         data_location=TensorProto.EXTERNAL)
    stored.external_data.add(key="location", value="big.bin")
    graph = helper.make_graph([helper.make_node("Gather", ["w", "x"], ["y"])], "g",
                              [tensor("x", [3], TensorProto.INT64)], [tensor("y", None)], [stored])
    path = tmp_path / "model.onnx"
    path.write_bytes(helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString())
    with open(tmp_path / "big.bin", "wb") as file:
        file.truncate(rows * 2400)  # a hole: it takes no room on disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = interpret(load(path), {"x": np.array([0, 5, rows - 1])})["y"]
    assert out.shape == (3, 600) and not out.any()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


def test_damaged_models_are_loaded_or_refused() -> None:
    random = np.random.default_rng(0)
    models = [c.model.SerializeToString() for c in cases()[::40]]
    for _ in range(500):
        data = bytearray(models[random.integers(len(models))])
        for place in random.integers(len(data), size=random.integers(1, 4)):
            data[place] = random.integers(256)
        with contextlib.suppress(TinyedgeError):
            load(bytes(data))
        with contextlib.suppress(TinyedgeError):
            check(bytes(data))


# versions

def test_a_newer_format_with_known_opsets_is_accepted() -> None:
    proto = onnx.ModelProto.FromString(GOOD.SerializeToString())
    proto.ir_version = onnx.IR_VERSION + 5
    assert load(proto).outputs
    assert load(proto.SerializeToString()).outputs
    assert proto.ir_version == onnx.IR_VERSION + 5


def test_an_unknown_opset_is_refused() -> None:
    proto = onnx.ModelProto.FromString(GOOD.SerializeToString())
    proto.opset_import[0].version = 1000
    with pytest.raises(UnsupportedError, match="opset 1000"):
        load(proto)


def test_the_default_domain_has_two_names() -> None:
    proto = onnx.ModelProto.FromString(GOOD.SerializeToString())
    proto.opset_import[0].domain = "ai.onnx"
    proto.graph.node[0].domain = "ai.onnx"
    assert load(proto).outputs


def test_initializers_that_are_listed_as_inputs_are_constants() -> None:
    proto = onnx.ModelProto.FromString(GOOD.SerializeToString())
    proto.ir_version = 3
    proto.graph.input.append(tensor("i1", [4, 3, 3, 3]))
    assert list(load(proto).inputs) == ["i0"]


# operators

@pytest.mark.parametrize("proto, words", [
    (small([helper.make_node("NonZero", ["x"], ["y"], "count")]),
     r"node 'count' \(NonZero, opset 17\): .* only known at run time"),
    (small([helper.make_node("Bernoulli", ["x"], ["y"], "dice")]),
     r"'RandomUniformLike_0' \(RandomUniformLike, opset"),
    (small([helper.make_node("Multinomial", ["x"], ["y"])]),
     r"node 'Multinomial_0' \(Multinomial, opset 17\): the operator is not supported"),
    (small([helper.make_node("Frobnicate", ["x"], ["y"], "f")]),
     r"node 'f' \(Frobnicate, opset 17\): the operator is not supported"),
    (small([helper.make_node("Resize", ["x", "", "s"], ["y"], "up", mode="lanczos")],
           initializer=[numpy_helper.from_array(np.ones(2, np.float32), "s")]),
     r"node 'up' \(Resize, opset 17\): attribute 'mode' is 'lanczos'"),
    (small([helper.make_node("Cast", ["x"], ["y"], "c", to=TensorProto.BFLOAT16)]),
     r"node 'c' \(Cast, opset 17\): element type bfloat16 is not supported"),
    (row("Attention", floats(2, 3), domain="com.microsoft").model,
     r"node 'the_Attention' \(com.microsoft.Attention, opset 1\): the operator is not supported"),
])
def test_what_is_not_supported_is_named(proto: onnx.ModelProto, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        load(proto)


def test_attributes_that_no_one_reads_are_refused() -> None:
    proto = row("QuickGelu", floats(3), domain="com.microsoft", alpha=1.5, speed=2).model
    with pytest.raises(UnsupportedError, match="attribute 'speed' is not supported"):
        load(proto)


def test_invalid_models_are_refused() -> None:
    with pytest.raises(ModelError, match="is not valid ONNX: .*nothing"):
        load(small([helper.make_node("Relu", ["nothing"], ["y"])]))
    with pytest.raises(ModelError, match="is not valid ONNX: .*alphabet"):
        load(small([helper.make_node("Relu", ["x"], ["y"], alphabet=1)]))


def test_an_empty_axis_has_no_largest_element() -> None:
    graph = helper.make_graph([helper.make_node("ArgMax", ["x"], ["y"], "best", axis=0)], "g",
                              [tensor("x", [0, 3])],
                              [helper.make_tensor_value_info("y", TensorProto.INT64, [1, 3])])
    with pytest.raises(ShapeError, match=r"node 'best' \(ArgMax.* is empty"):
        load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))


def test_models_are_taken_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(GOOD, path)
    plans = [tinyedge.compile(m) for m in (path, str(path), path.read_bytes(), GOOD)]
    assert len({(p.steps, bytes(p.code)) for p in plans}) == 1
    assert all(len(p.provenance["sha256"]) == 64 for p in plans)
    with pytest.raises(InputError, match="a model is a path, bytes or a ModelProto, not dict"):
        tinyedge.compile({})  # type: ignore[arg-type]


def test_shapes_that_do_not_fit_name_the_node() -> None:
    with pytest.raises(ShapeError, match=r"node 'the_MatMul' \(MatMul, opset 17\): shapes"):
        load(small([helper.make_node("MatMul", ["x", "x"], ["y"], "the_MatMul")]))


# dimensions

RELU = [helper.make_node("Relu", ["x"], ["y"])]


@pytest.mark.parametrize("shape, binding, error, words", [
    (("N", 3), {}, ShapeError, "input 'x': dimension 'N' is not bound; use --dim N=N or --shape x"),
    ((None, 3), {}, ShapeError, "input 'x': dimension 0 has no size and no name; use --shape x"),
    ((-1, 3), {}, ShapeError, "input 'x': dimension 0 has no size"),
    (None, {}, ShapeError, "input 'x' has no shape; give it by --shape x"),
    (("N", 3), {"dims": {"M": 2}}, InputError, "no such dimension; there are \\['N'\\]"),
    ((2, 3), {"dims": {"M": 2}}, InputError, "the model has none"),
    (("N", 3), {"shapes": {"z": (2, 3)}}, InputError, "no such input; there are \\['x'\\]"),
    (("N", 3), {"shapes": {"x": (2,)}}, ShapeError, "1 dimensions are given, the input has 2"),
    (("N", 3), {"shapes": {"x": (2, 4)}}, ShapeError, "dimension 1 is 4, but the model fixes it"),
    (("N", "N"), {"shapes": {"x": (2, 4)}}, ShapeError, "'N' is 4 here and 2 elsewhere"),
    (("N", 3), {"dims": {"N": (5, 2)}}, InputError, "5..2 is not a range"),
    (("N", 3), {"states": {"y": "q"}}, InputError, "state y=q: no such"),
])
def test_dimensions_that_are_not_bound_well(
    shape: Any, binding: dict[str, Any], error: type[Exception], words: str
) -> None:
    if "states" in binding:
        binding = {**binding, "dims": {"N": 2}}
    with pytest.raises(error, match=words):
        load(small(RELU, shape), **binding)


@pytest.mark.parametrize("shape, binding", [
    (("N", 3), {"dims": {"N": 2}}), (("N", 3), {"shapes": {"x": (2, 3)}}),
    ((None, 3), {"shapes": {"x": (2, 3)}}), ((-1, 3), {"shapes": {"x": (2, 3)}}),
    (("?", "?"), {"shapes": {"x": (2, 3)}}), (None, {"shapes": {"x": (2, 3)}}),
    (("N", 3), {"dims": {"N": (1, 4)}}), ((None, 3), {"shapes": {"x": ((1, 4), 3)}}),
])
def test_dimensions_that_are_bound(shape: Any, binding: dict[str, Any]) -> None:
    x = floats(2, 3)
    got = interpret(load(small(RELU, shape), **binding), {"x": x})["y"]
    np.testing.assert_array_equal(got, np.maximum(x, 0))


def test_states_become_part_of_the_graph() -> None:
    graph = load(small(RELU), states={"y": "x"})
    assert graph.states == {"y": "x"}
    with pytest.raises(ShapeError, match="state y=x"):
        load(small([helper.make_node("Flatten", ["x"], ["y"], axis=0)]), states={"y": "x"})


# check, and branches

def test_check_goes_on_after_a_problem() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "fine"),
        helper.make_node("Frobnicate", ["a"], ["b"], "first"),
        helper.make_node("Relu", ["b"], ["c"], "after"),
        helper.make_node("Multinomial", ["a"], ["d"], "second", dtype=TensorProto.INT32),
        helper.make_node("Cast", ["d"], ["y"], "last", to=TensorProto.FLOAT),
    ]
    problems = check(small(nodes))
    assert [(p.node, p.operator, p.opset) for p in problems] == [
        ("first", "Frobnicate", 17), ("after", "Relu", 17), ("second", "Multinomial", 17),
    ]
    assert problems[0].dtype == "float32" and problems[0].reason.endswith("is not supported")
    assert problems[1].reason == "not checked: it needs node 'first', which can't be compiled"
    assert check(GOOD) == []


def test_check_looks_into_branches() -> None:
    bad = helper.make_graph([helper.make_node("Frobnicate", ["x"], ["z"], "inner")], "b", [],
                            [tensor("z", [2, 3])])
    good = helper.make_graph([helper.make_node("Relu", ["x"], ["z"])], "b", [],
                             [tensor("z", [2, 3])])
    nodes = [helper.make_node("ReduceMax", ["x"], ["m"], keepdims=0),
             helper.make_node("Cast", ["m"], ["c"], to=TensorProto.BOOL),
             helper.make_node("If", ["c"], ["y"], "if", then_branch=bad, else_branch=good)]
    assert [p.node for p in check(small(nodes))] == ["inner", "if"]


def test_a_branch_that_shapes_rule_out_gives_nan() -> None:
    fits = helper.make_graph([helper.make_node("Relu", ["x"], ["z"])], "b", [],
                             [tensor("z", None)])
    never = helper.make_graph([helper.make_node("MatMul", ["x", "x"], ["z"])], "b", [],
                              [tensor("z", None)])
    proto = small([helper.make_node("If", ["c"], ["y"], then_branch=fits, else_branch=never)])
    proto.graph.input.append(tensor("c", [], TensorProto.BOOL))
    with pytest.warns(UserWarning, match="one branch can't run with these shapes"):
        graph = load(proto)
    x = floats(2, 3)
    assert interpret(graph, {"x": x, "c": np.array(True)})["y"].tolist() == \
        np.maximum(x, 0).tolist()
    assert np.isnan(interpret(graph, {"x": x, "c": np.array(False)})["y"]).all()


# names

def test_nodes_keep_their_source() -> None:
    case = model([helper.make_node("Relu", ["i0"], ["a"], "first"),
                  helper.make_node("Neg", ["a"], ["b"]),
                  helper.make_node("Softmax", ["b"], ["o0"], "last")], [floats(2, 19)], "names")
    names = {n.source for n in walk(load(case.model).outputs.values())}
    assert {"i0", "first", "Neg_1", "last"} <= names


def test_constants_are_worked_out_while_importing() -> None:
    case = row("Slice", floats(4, 6), k(1), k(3), k(0), scalar(1), name="folded")
    assert [n.op for n in load(case.model).nodes()] == ["input", "slice"]


def test_two_outputs_cannot_feed_one_state() -> None:
    proto = row("Add", floats(3), floats(3)).model
    out = proto.graph.output[0].name
    proto.graph.node.append(helper.make_node("Neg", [out], ["other"]))
    proto.graph.output.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, [3]))
    with pytest.raises(InputError, match="two outputs feed that input"):
        load(proto, states={out: "i0", "other": "i0"})


def test_sizes_may_be_any_whole_number() -> None:
    proto = small([helper.make_node("Relu", ["x"], ["y"])])
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    assert load(proto, dims={"N": np.int64(2)}).inputs["x"].shape[0] == 2  # type: ignore[dict-item]
    with pytest.raises(InputError, match="neither a size nor"):
        load(proto, dims={"N": 2.5})  # type: ignore[dict-item]


@pytest.mark.parametrize("operator, attributes", [
    ("LpNormalization", {}), ("MeanVarianceNormalization", {}), ("ReduceL2", {}),
    ("GlobalLpPool", {}), ("LRN", {"size": 3}),
])
def test_float16_is_squared_in_float32(operator: str, attributes: dict[str, Any]) -> None:
    x = (np.random.default_rng(0).standard_normal((2, 3, 4, 4)) * 300).astype(np.float16)
    node = helper.make_node(operator, ["x"], ["y"], **attributes)
    graph = helper.make_graph([node], "g", [tensor("x", x.shape, TensorProto.FLOAT16)],
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    got = interpret(load(proto), {"x": x})["y"]
    wide = helper.make_graph([node], "g", [tensor("x", x.shape)],
                             [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    proto = helper.make_model(wide, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    want = interpret(load(proto), {"x": x.astype(np.float32)})["y"]
    assert got.dtype == np.float16 and np.abs(want).max() > 0
    np.testing.assert_allclose(got, want, rtol=2e-3)
