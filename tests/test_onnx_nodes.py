"""The node tests that come with the onnx package: imported and interpreted, or refused."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import numpy_helper

from tinyedge.errors import ShapeError, UnsupportedError
from tinyedge.interpreter import interpret
from tinyedge.onnx import load

Array = npt.NDArray[Any]

LEAST = 1500
"""Node tests that must pass; fewer means that an operator was lost."""


@cache
def node_tests() -> list[Any]:
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(load_model_tests(kind="node"))


def array(value: Any) -> Array:
    if isinstance(value, onnx.TensorProto):
        try:
            return numpy_helper.to_array(value)
        except Exception:
            raise UnsupportedError("an element type that numpy has not") from None
    if not isinstance(value, (np.ndarray, np.generic)):
        raise UnsupportedError("a sequence or an optional at the border")
    return np.asarray(value)


def run(model: onnx.ModelProto, inputs: list[Array], stored: int) -> dict[str, Array]:
    """stored: 0 no input is a constant, 1 small integer ones are (shapes, axes), 2 all are."""
    model, named = onnx.ModelProto.FromString(model.SerializeToString()), {}
    declared = list(model.graph.input)
    del model.graph.input[:]
    for info, x in zip(declared, inputs):
        if stored == 2 or stored == 1 and x.dtype.kind in "iub" and x.ndim <= 1:
            model.graph.initializer.append(numpy_helper.from_array(x, info.name))
            model.ir_version = max(model.ir_version, 4)
        else:
            model.graph.input.append(info)
            named[info.name] = x
    graph = load(model, shapes={k: v.shape for k, v in named.items()})
    return interpret(graph, named)


def outcome(test: Any) -> str:
    """"equal" or "refused"; AssertionError where the numbers are wrong."""
    for ins, outs in test.data_sets:
        got = None
        try:
            inputs, wants = list(map(array, ins)), list(map(array, outs))
        except UnsupportedError:
            return "refused"
        for stored in range(3):
            try:
                got = run(test.model, inputs, stored)
                break
            except (UnsupportedError, ShapeError) as error:
                if stored == 2:
                    assert isinstance(error, UnsupportedError), error
        if got is None:
            return "refused"
        for info, want in zip(test.model.graph.output, wants):
            value = got[info.name]
            assert value.shape == want.shape and value.dtype == want.dtype, info.name
            if want.dtype.kind != "f":
                np.testing.assert_array_equal(value, want)
                continue
            least = 1e-3 if want.dtype == np.float16 else 1e-6
            np.testing.assert_allclose(value.astype(np.float64), want.astype(np.float64),
                                       max(test.rtol, 1e-3), max(test.atol, least))
    return "equal"


@pytest.mark.filterwarnings("ignore")
def test_no_node_test_gives_wrong_numbers() -> None:
    count: Counter[str] = Counter()
    wrong = []
    for test in node_tests():
        try:
            count[outcome(test)] += 1
        except AssertionError as error:
            wrong.append(f"{test.name}: {' '.join(str(error).split())[:200]}")
    print(dict(count))
    assert not wrong, "\n".join(wrong)
    assert count["equal"] >= LEAST, count
