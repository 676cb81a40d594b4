"""Every case of the table: imported and interpreted, against an independent implementation."""

from __future__ import annotations

import pytest

from tests.cases import Case, cases
from tinyedge.interpreter import interpret
from tinyedge.onnx import load


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_case(case: Case) -> None:
    case.compare(interpret(load(case.model), case.inputs))
