"""C source: it compiles without a warning by two compilers, and computes what the graph says."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tinyedge
from examples.files import CACHE
from tests.cases import Case, cases
from tests.models import MODELS
from tinyedge.cli import main
from tinyedge.compiler import compile_graph
from tinyedge.csource import identifier, sources, unique
from tinyedge.errors import InputError, UnsupportedError
from tinyedge.onnx import load
from tinyedge.plan import Plan, evaluate
from tinyedge.runtime import _solvers

Array = np.ndarray[Any, np.dtype[Any]]

STRICT = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")
COMPILERS = tuple(c for c in ("gcc", "clang") if shutil.which(c))
EVERY = 20
"""One case of so many is compiled in each run; which one goes round by the case's number."""

needs_compiler = pytest.mark.skipif(not COMPILERS, reason="neither gcc nor clang is installed")


class Compiled:
    """A plan for C as a shared library."""

    def __init__(self, plan: Plan, folder: Path, compiler: str, *flags: str) -> None:
        self.plan = plan
        source, header = sources(plan, "model")
        (folder / "model.c").write_text(source)
        (folder / "model.h").write_text(header)
        library = folder / f"{compiler}.so"
        done = subprocess.run(
            [compiler, *STRICT, *flags, "-o", library, folder / "model.c", "-lm"],
            capture_output=True, text=True, timeout=300, check=False)
        assert not done.returncode, done.stderr[:2000]
        self.library = ctypes.CDLL(str(library))

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        plan = self.plan
        symbols = {}
        for s in _solvers(plan):
            size = inputs[plan.inputs[s.port].name].shape[s.axis]
            symbols[s.symbol] = (size - s.offset) // s.factor
        given = [np.ascontiguousarray(inputs[p.name]) for p in plan.inputs]
        outputs = [np.zeros([evaluate(d, symbols) for d in p.shape], p.dtype)
                   for p in plan.outputs]
        for array, p in zip(given, plan.inputs):
            assert array.dtype == p.dtype
        status = self.library.model(
            *(a.ctypes.data_as(ctypes.c_void_p) for a in (*given, *outputs)),
            *(ctypes.c_int64(symbols[s]) for s in plan.symbols))
        assert status == 0
        return {p.name: array for p, array in zip(plan.outputs, outputs)}


def _sample() -> tuple[Case, ...]:
    every = int(os.environ.get("TINYEDGE_C_EVERY", EVERY))
    return cases()[::every]


@needs_compiler
@pytest.mark.parametrize("case", _sample(), ids=lambda c: c.name)
def test_case(case: Case, tmp_path: Path) -> None:
    try:
        plan = compile_graph(load(case.model), "c")
    except UnsupportedError as error:
        assert "float16" in str(error)  # arithmetic that C11 has not
        pytest.skip(str(error))
    run = Compiled(plan, tmp_path, COMPILERS[-1], "-O1")
    case.compare(run(case.inputs))


@pytest.mark.skipif(len(COMPILERS) < 2, reason="gcc or clang is not installed")
@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("name", ["silero-vad", "efficientnet-lite0"])
@pytest.mark.filterwarnings("ignore")
def test_network(name: str, compiler: str, tmp_path: Path) -> None:
    spec = MODELS[name]
    path = spec.obtain(CACHE)
    options: dict[str, Any] = {"shapes": spec.shapes, "states": spec.states}
    inputs = spec.make(np.random.default_rng(1))
    run = Compiled(tinyedge.compile(path, "c", **options), tmp_path, compiler, "-O2")
    with tinyedge.load(tinyedge.compile(path, **options)) as model:
        feeds = {n: inputs[n] for n in model.inputs}
        for _ in range(3):  # a state goes on
            for key, expected in model(feeds).items():
                got = run(feeds)[key]
                assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_names() -> None:
    assert identifier("serving_default:0") == "serving_default_0"
    assert identifier("0 int") == "_0_int" and identifier("int") == "int_"
    assert unique(["a.b", "a_b", "A b"]) == ["a_b", "a_b_2", "a_b_3"]


def test_what_it_can_not() -> None:
    path = MODELS["silero-vad"].obtain(CACHE)
    with pytest.raises(InputError, match="leave it out"):
        tinyedge.compile(path, "c", tune=1.0, shapes=MODELS["silero-vad"].shapes)


@needs_compiler
def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = helper.make_graph(
        [helper.make_node("Add", ["a.x", "h"], ["int"])], "sum",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 3]) for n in ("a.x",)]
        + [helper.make_tensor_value_info("h", TensorProto.FLOAT, [1, 3])],
        [helper.make_tensor_value_info("int", TensorProto.FLOAT, ["n", 3])])
    path, out = tmp_path / "sum.onnx", tmp_path / "out"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    words = ["export", str(path), "-t", "c", "--dim", "n=1..4", "-o", str(out)]
    assert main(words) == 0
    assert {p.name for p in out.iterdir()} == {"sum.c", "sum.h", "report.json"}
    assert "sum.c" in capsys.readouterr().out
    (tmp_path / "main.c").write_text("""
#include "sum.h"
#include <stdio.h>
int main(void)
{
    const float x[6] = {1, 2, 3, 4, 5, 6}, h[3] = {10, 20, 30};
    float y[6];
    if (sum(x, h, y, 5) != -1 || sum(x, h, y, 2) != 0)
        return 1;
    for (int i = 0; i < 6; i++)
        printf("%g ", (double)y[i]);
    return 0;
}
""")
    flags = [f for f in STRICT if f not in ("-fPIC", "-shared")]
    subprocess.run([COMPILERS[0], *flags, "-I", out, "-o", tmp_path / "main", tmp_path / "main.c",
                    out / "sum.c", "-lm"], check=True)
    done = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["11", "22", "33", "14", "25", "36"]
    assert main([*words, "--weights", "int8"]) == 2
    assert "--float16" in capsys.readouterr().err
