"""Every case of the table: imported and interpreted, against an independent implementation."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from tests.cases import Case, cases, floats, row
from tinyedge.interpreter import interpret
from tinyedge.onnx import load


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_case(case: Case) -> None:
    case.compare(interpret(load(case.model), case.inputs))


def test_broadcasting_of_the_oldest_opsets() -> None:
    """Before opset 7 an attribute said where the second operand belongs; no runtime has it yet."""
    x, y = floats(2, 3, 4), floats(3)
    proto = row("Add", x, y, opset=7).model
    proto.opset_import[0].version = 6
    proto.graph.node[0].attribute.extend(
        [helper.make_attribute("broadcast", 1), helper.make_attribute("axis", 1)])
    (got,) = interpret(load(proto), {"i0": x, "i1": y}).values()
    np.testing.assert_array_equal(got, x + y[:, None])
