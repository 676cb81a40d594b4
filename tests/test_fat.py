"""Plans for several feature levels in one file: what is chosen, and that all compute the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tinyedge
from tests.test_codegen import conv, normal, relu, weights, x_of
from tinyedge.compiler import compile_graph
from tinyedge.drivers.cpu import features
from tinyedge.errors import InputError, PlanError
from tinyedge.graph import Graph

rng = np.random.default_rng(2)


def network() -> Graph:
    x = x_of(1, 8, 12, 12)
    return Graph({"x": x}, {"y": relu(conv(x, weights(20, 8, 3, 3), 1, 1))})


def test_the_best_that_runs_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, feeds = tmp_path / "fat.pkl", {"x": normal(1, 8, 12, 12)}
    compile_graph(network(), "cpu:x86-64-v2+v3+v4").save(path)
    have, seen = features.flags(), {}
    for level, lacks in (("v4", ""), ("v3", "avx512f"), ("v2", "avx2")):
        monkeypatch.setattr(features, "flags", lambda lacks=lacks: have - {lacks})
        if features.missing(f"x86-64-{level}"):
            continue  # this machine can't show it
        with tinyedge.load(path) as run:
            assert run.plan.target == f"cpu:x86-64-{level}"
            seen[level] = run(feeds)["y"]
    assert len(seen) >= 2
    first, *rest = seen.values()
    for other in rest:
        np.testing.assert_allclose(other, first, rtol=1e-5, atol=1e-5)


def test_none_that_runs_is_refused() -> None:
    plan = compile_graph(network(), "cpu:aarch64")
    plan.target = "cpu:x86-64-v4,sha,gfni,avxifma"
    plan.variants = (compile_graph(network(), "cpu:aarch64"),)
    with pytest.raises(PlanError, match="lacks"):
        tinyedge.load(plan)


def test_both_processors_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "both.pkl"
    compile_graph(network(), "cpu:aarch64+x86-64-v2").save(path)
    with tinyedge.load(path) as run:
        assert run.plan.target == "cpu:x86-64-v2"


def test_wrong_lists_of_targets() -> None:
    for text in ("cpu:x86-64-v3+v3", "cpu:x86-64-v3+", "cpu:x86-64-v3+toaster"):
        with pytest.raises(InputError, match="target cpu"):
            compile_graph(network(), text)
