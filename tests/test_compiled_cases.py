"""The importer's case table and onnx's node tests once more, through compiled code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

import tinyedge
from tests import test_onnx_nodes as nodes
from tests.cases import Case, cases
from tests.test_codegen import TARGETS
from tinyedge.compiler import compile_graph
from tinyedge.graph import Graph
from tinyedge.onnx import load

PARTS = 16
"""Into how many tests the node tests are split, for the processors to share."""


def run(graph: Graph, inputs: Mapping[str, nodes.Array], target: str = "cpu",
        threads: int = 2) -> dict[str, nodes.Array]:
    """Compiled outputs, the states' next values left out."""
    with tinyedge.load(compile_graph(graph, target), threads=threads) as model:
        return model(inputs)


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_case(case: Case) -> None:
    graph = load(case.model)
    for target in (TARGETS[0], TARGETS[-1]):
        case.compare(run(graph, case.inputs, target))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_node_tests(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "interpret", run)
    count: Counter[str] = Counter()
    wrong = []
    for test in nodes.node_tests()[part::PARTS]:
        try:
            count[nodes.outcome(test)] += 1
        except AssertionError as error:
            wrong.append(f"{test.name}: {' '.join(str(error).split())[:200]}")
    assert not wrong, "\n".join(wrong)
    assert count["equal"] >= 0.9 * nodes.LEAST / PARTS, count
