"""Measured search: what is tried, what is kept, and that results stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinyedge
from tests.test_codegen import conv, matmul, normal, relu, weights, x_of
from tinyedge.codegen.schedule import search
from tinyedge.codegen.schedule.cpu import Choice
from tinyedge.compiler import compile_graph
from tinyedge.errors import InputError
from tinyedge.graph import Graph
from tinyedge.plan import Plan

rng = np.random.default_rng(1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYEDGE_CACHE", str(tmp_path / "cache"))


def network() -> Graph:
    x = x_of(1, 24, 20, 20)
    return Graph({"x": x}, {"y": relu(conv(relu(conv(x, weights(24, 24, 1, 1))),
                                           weights(40, 24, 3, 3), 2))})


def outputs(plan: Plan, feeds: dict[str, Any]) -> dict[str, Any]:
    with tinyedge.load(plan, threads=1) as run:
        return run(feeds)


def test_any_choice_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    graph, feeds = network(), {"x": normal(1, 24, 20, 20)}
    want = outputs(compile_graph(graph, cache=False), feeds)
    texts = set()
    for turn in range(4):
        # the choice that comes at this turn seems the fastest
        seen = iter(range(10**6))
        monkeypatch.setattr(search, "measure",
                            lambda *_, at=turn, n=seen: 0.5 if next(n) % 5 == at else 1.0)
        plan = compile_graph(graph, cache=False, tune=1)
        texts.add("".join(k.source for k in plan.kernels))
        assert outputs(plan, feeds)["y"].tobytes() == want["y"].tobytes()
    assert len(texts) > 1


def test_what_is_found_stays_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = network()
    plain = [k.name for k in compile_graph(graph, cache=False).kernels]
    times = iter(0.9 ** np.arange(500))  # the last one tried seems the fastest
    monkeypatch.setattr(search, "measure", lambda *_: next(times))
    tuned = [k.name for k in compile_graph(graph, tune=5).kernels]
    assert tuned != plain
    monkeypatch.setattr(search, "measure", lambda *_: pytest.fail("nothing is to be measured"))
    assert [k.name for k in compile_graph(graph).kernels] == tuned
    assert [k.name for k in compile_graph(graph, tune=5).kernels] == tuned
    assert [k.name for k in compile_graph(graph, cache=False).kernels] == plain


def test_a_real_search_ends_in_time() -> None:
    feeds = {"x": normal(64, 300)}
    x = x_of(64, 300)
    graph = Graph({"x": x}, {"y": matmul(x, weights(300, 200))})
    want = outputs(compile_graph(graph, cache=False), feeds)["y"]
    got = outputs(compile_graph(graph, tune=0.3), feeds)["y"]
    assert got.tobytes() == want.tobytes()


def test_choices_fit_the_registers() -> None:
    made: list[Choice] = []

    class Watch(search.Tuner):
        def best(self, choices: Any, flops: int, make: Any, sizes: Any) -> Any:
            made.extend(choices)
            assert flops > 0
            code = make(choices[0])
            assert all(s > 0 for s in sizes())
            return code

    import tinyedge.compiler as compiler

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "Tuner", Watch)
        compile_graph(network(), cache=False, tune=1)
    assert len(made) > 4
    assert all(c.pixels * c.vectors + c.vectors + 1 <= 32 for c in made)


def test_only_for_this_machine() -> None:
    with pytest.raises(InputError, match="--tune measures on this machine"):
        compile_graph(network(), "cpu:aarch64", tune=1)
