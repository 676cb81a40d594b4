"""The commands as a user types them: exit codes, one-sentence errors, JSON, files."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tinyedge
from tinyedge.cli import COMMANDS, main

WEIGHTS = np.random.default_rng(3).standard_normal((3, 4)).astype(np.float32)


def network(path: Path, rows: int | str = 2, operator: str = "Relu") -> Path:
    """y = operator(x @ w), h.next = h + 1"""
    kind = TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["t"], "product"),
         helper.make_node(operator, ["t"], ["y"], "last"),
         helper.make_node("Add", ["h", "one"], ["h.next"], "count")],
        "tiny",
        [helper.make_tensor_value_info("x", kind, [rows, 3]),
         helper.make_tensor_value_info("h", kind, [1])],
        [helper.make_tensor_value_info("y", kind, [rows, 4]),
         helper.make_tensor_value_info("h.next", kind, [1])],
        [numpy_helper.from_array(WEIGHTS, "w"),
         numpy_helper.from_array(np.ones(1, np.float32), "one")])
    domain = "" if operator != "Mystery" else "house"
    graph.node[1].domain = domain
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("house", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


@dataclass
class Said:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Tell = Callable[..., Said]


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Tell:
    """Runs a command line in this process."""
    def run(*words: str | Path) -> Said:
        capsys.readouterr()
        code = main([str(w) for w in words])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)
    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return network(tmp_path / "m.onnx")


@pytest.fixture
def plan(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "m.pkl"
    tinyedge.compile(model, states={"h.next": "h"}).save(path)
    return path


def test_compile_run_and_read_the_outputs(tell: Tell, model: Path, tmp_path: Path) -> None:
    plan, out = tmp_path / "p.pkl", tmp_path / "o.npz"
    said = tell("compile", model, "-t", "cpu", "-o", plan, "--state", "h.next=h")
    assert (said.code, said.err) == (0, "") and str(plan) in said.out
    x = np.arange(6, dtype=np.float32).reshape(2, 3) - 2
    np.save(tmp_path / "x.npy", x)
    said = tell("run", plan, "-i", f"x={tmp_path / 'x.npy'}", "-o", out)
    assert said.code == 0 and "float32" in said.out
    with np.load(out) as arrays:
        assert arrays.files == ["y"]
        np.testing.assert_allclose(arrays["y"], np.maximum(x @ WEIGHTS, 0), rtol=1e-5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "o.npz", "p.pkl", "x.npy"]


def test_open_dimensions(tell: Tell, tmp_path: Path) -> None:
    model, plan = network(tmp_path / "m.onnx", "N"), tmp_path / "p.pkl"
    said = tell("compile", model, "-o", plan)
    assert said.code == 2 and "--dim N=" in said.err
    assert tell("compile", model, "-o", plan, "--dim", "N=1..5").code == 0
    for size, rows in ((None, 5), ("3", 3)):
        said = tell("run", plan, "--json", *(["--size", f"N={size}"] if size else []))
        assert said.json["outputs"][0]["shape"] == [rows, 4]
    assert "N=9" in tell("run", plan, "--size", "N=9").err or tell(
        "run", plan, "--size", "N=9").code == 2


def test_the_same_seed_gives_the_same_numbers(tell: Tell, plan: Path) -> None:
    first, second, other = (tell("run", plan, "--json", "-i", f"x=random:{s}").json
                            for s in (1, 1, 2))
    assert first == second != other


def test_check_names_what_cannot_be_compiled(tell: Tell, tmp_path: Path, model: Path) -> None:
    assert tell("check", model, "-t", "cpu").code == 0
    odd = network(tmp_path / "odd.onnx", operator="Mystery")
    said = tell("check", odd)
    assert said.code == 1 and "house.Mystery" in said.out and "last" in said.out
    problem, = tell("check", odd, "--json").json["problems"]
    assert problem["node"] == "last" and problem["operator"] == "Mystery"
    said = tell("compile", odd, "-o", tmp_path / "p.pkl")
    assert said.code == 1 and "Mystery" in said.err and not (tmp_path / "p.pkl").exists()


def test_verify_agrees_and_disagrees(tell: Tell, model: Path, plan: Path, tmp_path: Path) -> None:
    for against in ("onnxruntime", "reference"):
        said = tell("verify", model, "--against", against, "--json")
        assert said.code == 0 and said.json["passed"], said
    assert tell("verify", plan).code == 0
    assert tell("verify", plan, "--model", model).code == 0
    from dataclasses import replace

    from tinyedge import planfile
    from tinyedge.plan import to_builtin

    good = planfile.read(plan)
    weights = np.frombuffer(good.constants, np.uint8).copy()
    assert to_builtin(good)["arenas"][0] == weights.size
    changed = weights.view(np.float32)
    changed[np.argmax(np.abs(changed))] *= 1.01
    bad = tmp_path / "bad.pkl"
    replace(good, constants=weights.tobytes()).save(bad)
    said = tell("verify", bad, "--model", model, "-i", "x=1")
    assert said.code == 1 and "OFF" in said.out
    said = tell("verify", bad, "--model", model, "--json", "-i", "x=1")
    assert said.code == 1 and not said.json["passed"]
    other = network(tmp_path / "other.onnx", operator="Tanh")
    said = tell("verify", plan, "--model", other)
    assert said.code == 2 and "not the file" in said.err


def test_bench(tell: Tell, model: Path, plan: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    said = tell("bench", model, "--against", "onnxruntime", "--runs", "7", "--steps", "2",
                "--threads", "1", "--json", file)
    assert said.code == 0 and "onnxruntime" in said.out and "ratio" in said.out
    figures = json.loads(file.read_text())
    assert set(figures["times"]) == {"tinyedge", "onnxruntime"}
    assert figures["times"]["tinyedge"]["runs"] >= 7 and figures["steps"]
    assert tell("bench", plan, "--runs", "3").code == 0
    assert tell("bench", plan, "--against", "onnxruntime").code == 2


def test_inspect(tell: Tell, plan: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    said = tell("inspect", plan, "--html", page, "--profile")
    assert said.code == 0 and "scratch" in said.out and "x: float32[2,3]" in said.out
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "src=" not in text and "href=" not in text
    facts = tell("inspect", plan, "--json").json
    assert facts["states"][0]["name"] == "h" and facts["kernels"]
    name = facts["kernels"][0]["name"]
    said = tell("inspect", plan, "--source", name)
    assert f"void @{name}(" in said.out and f"kernel {name}" in said.out
    assert name in tell("inspect", plan, "--commands").out
    assert tell("inspect", plan, "--source", "nothing").code == 2


def test_devices(tell: Tell) -> None:
    found = tell("devices", "--json").json
    assert found[0]["name"] == "cpu" and found[0]["usable"]
    assert "cpu" in tell("devices").out


@pytest.mark.parametrize("words, says", [
    (["compile", "M", "-o", "nowhere/p.pkl"], "folder nowhere is not there"),
    (["compile", "M", "-o", "M"], "is the model itself"),
    (["compile", "M", "-o", "."], "this is a directory"),
    (["compile", "M"], "required: -o/--output"),
    (["compile", "P", "-o", "x.pkl"], "is a plan already"),
    (["compile", "missing.onnx", "-o", "x.pkl"], "missing.onnx"),
    (["compile", "M", "-o", "x.pkl", "-t", "toaster"], "toaster"),
    (["compile", "M", "-o", "x.pkl", "--dim", "N"], "NAME=VALUE"),
    (["compile", "M", "-o", "x.pkl", "--dim", "N=5..2"], "lowest size is above"),
    (["compile", "M", "-o", "x.pkl", "--dim", "N=-1"], "'-1' is not a size"),
    (["compile", "M", "-o", "x.pkl", "--shape", "z=1,2"], "z"),
    (["compile", "M", "-o", "x.pkl", "--state", "y=h"], "h"),
    (["run", "M"], "not a plan"),
    (["run", "P", "-i", "z=1"], "no such input"),
    (["run", "P", "-i", "x=nothing.npy"], "nothing.npy"),
    (["run", "P", "-i", "x=some"], "neither a .npy file"),
    (["run", "P", "-i", "x=1", "-i", "x=2"], "given twice"),
    (["run", "P", "-o", "out.txt"], "must end with .npz"),
    (["run", "P", "--size", "N=2"], "no such dimension"),
    (["run", "P", "--threads", "0"], "whole number from 1"),
    (["run", "P", "--device", "toaster"], "toaster"),
    (["verify", "P", "--bisect"], "needs the model"),
    (["verify", "P", "--dim", "N=2"], "P is a plan"),
    (["bench", "P", "--runs", "many"], "whole number"),
    (["launch", "P"], "launch"),
    (["compile", "M", "-o", "x.pkl", "--int8"], "--int8"),
])
def test_a_wrong_command_line(
    tell: Tell, model: Path, plan: Path, words: list[str], says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(model.parent)
    model.rename("M")
    plan.rename("P")
    before = {p.name: p.read_bytes() for p in Path().iterdir()}
    said = tell(*words)
    assert said.code == 2, said
    assert says in said.err and said.err.startswith("tinyedge: ") and said.out == ""
    assert said.err.count("\n") == 1 and "Traceback" not in said.err
    assert {p.name: p.read_bytes() for p in Path().iterdir()} == before


def test_a_wrong_file_is_one_sentence(tell: Tell, tmp_path: Path, model: Path, plan: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    data = plan.read_bytes()
    files = {
        "empty.onnx": b"", "cut.onnx": model.read_bytes()[:-40], "text.onnx": b"hello, world",
        "lfs.onnx": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "empty.pkl": b"", "cut.pkl": data[:-1], "hostile.pkl": pickle.dumps(Hostile()),
        "flipped.pkl": data[:100] + bytes([data[100] ^ 4]) + data[101:],
    }
    for name, content in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        words = ["check", path] if name.endswith(".onnx") else ["run", path]
        said = tell(*words)
        assert said.code == 2 and name in said.err and said.err.count("\n") == 1, (name, said)
    assert not (tmp_path / "executed").exists()


def test_debug_shows_the_traceback(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tell("run", "nothing.pkl", "--debug")
    assert said.code == 2 and "Traceback" in said.err
    assert said.err.splitlines()[-1].startswith("tinyedge: nothing.pkl")
    monkeypatch.setenv("TINYEDGE_DEBUG", "1")
    assert "Traceback" in tell("run", "nothing.pkl").err


def test_help_and_version(tell: Tell) -> None:
    assert tell("--version").out.strip() == f"tinyedge {tinyedge.__version__}"
    text = tell("--help").out
    for command in COMMANDS:
        assert command in text
        assert tell(command, "--help").code == 0


def test_as_processes(plan: Path) -> None:
    command = [sys.executable, "-m", "tinyedge.cli"]
    done = subprocess.run([*command, "run", plan, "--json"], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0 and json.loads(done.stdout)["outputs"][0]["name"] == "y"
    done = subprocess.run([*command, "run", "nothing.pkl"], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    # running a plan needs neither the compiler nor what it is made with
    code = ("import sys; from tinyedge.cli import main; main(['run', sys.argv[1]]); "
            "sys.exit(bool({'onnx', 'llvmlite', 'rich', 'elftools'} & sys.modules.keys()))")
    assert subprocess.run([sys.executable, "-c", code, plan], capture_output=True,
                          check=False).returncode == 0


def test_a_picture_as_an_input(tell: Tell, tmp_path: Path) -> None:
    from PIL import Image

    kind = TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Identity", ["image"], ["same"])], "g",
        [helper.make_tensor_value_info("image", kind, [1, 3, 4, 6])],
        [helper.make_tensor_value_info("same", kind, [1, 3, 4, 6])])
    model, plan = tmp_path / "m.onnx", tmp_path / "p.pkl"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
              model)
    tinyedge.compile(model).save(plan)
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "i.png")
    out = tmp_path / "o.npz"
    assert tell("run", plan, "-i", f"image={tmp_path / 'i.png'}", "-o", out).code == 0
    with np.load(out) as arrays:
        np.testing.assert_allclose(arrays["same"][0], pixels.transpose(2, 0, 1) / 255, atol=1e-6)
    (tmp_path / "bad.png").write_bytes(b"no picture")
    assert tell("run", plan, "-i", f"image={tmp_path / 'bad.png'}").code == 2
