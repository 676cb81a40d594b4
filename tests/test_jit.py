"""Captured functions: structures, captures and replays, constants, plan files, refusals."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinyedge
from tinyedge import Tensor, errors

W = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
X = np.random.default_rng(2).normal(size=(2, 4)).astype(np.float32)
Point = namedtuple("Point", "x y")


def test_capture_equals_replay_and_numpy() -> None:
    calls = []

    @tinyedge.jit
    def step(x: Any) -> Any:
        """doc"""
        calls.append(x.shape)
        return (x @ W).relu().softmax()

    first, second = step(X), step(X.copy())
    assert isinstance(first, Tensor) and "value" in repr(first)
    assert first.numpy().tobytes() == second.numpy().tobytes()
    e = np.exp(np.maximum(X @ W, 0))
    np.testing.assert_allclose(first.numpy(), e / e.sum(-1, keepdims=True), rtol=1e-5)
    assert calls == [(2, 4)]
    step(np.ones((3, 4), np.float32))
    step(np.ones((3, 4)))
    step(Tensor(np.ones((3, 4))) * 2)
    assert calls == [(2, 4), (3, 4), (3, 4)]
    assert step.name == "step" and step.__doc__ == "doc" and "(x: " in repr(step)


def test_structures() -> None:
    @tinyedge.jit
    def mixed(a: Any, items: Any, *more: Any, scale: float = 2.0, **named: Any) -> Any:
        point = Point(a + items[0], named["z"])
        return {"sum": items[1]["k"] + more[0] * scale, "point": point, "rest": [scale, None],
                "pair": (a, "text")}

    one = np.float32(1)
    out = mixed(X, [one, {"k": X}], X * 2, scale=3.0, z=X)
    np.testing.assert_allclose(out["sum"].numpy(), X + X * 2 * 3, rtol=1e-6)
    assert isinstance(out["point"], Point)
    np.testing.assert_array_equal(out["point"].x.numpy(), X + 1)
    np.testing.assert_array_equal(out["point"].y.numpy(), X)
    np.testing.assert_array_equal(out["pair"][0].numpy(), X)
    assert out["rest"] == [3.0, None] and out["pair"][1] == "text"


def test_scalars_are_part_of_the_capture() -> None:
    seen = []

    @tinyedge.jit
    def f(x: Any, n: Any) -> Any:
        seen.append(n)
        return x if n is None else x * n

    for n in (1, 1.0, True, 0.0, -0.0, None, 1, 1.0, True, -0.0):
        f(X, n)
    assert [repr(n) for n in seen] == ["1", "1.0", "True", "0.0", "-0.0", "None"]
    assert np.signbit(f(np.ones(2, np.float32), -0.0).numpy()).all()


def test_closure_is_constant() -> None:
    w = Tensor(W)
    lazy = w * 2

    @tinyedge.jit
    def f(x: Any) -> Any:
        return x @ lazy + np.float32(1)

    np.testing.assert_allclose(f(X).numpy(), X @ (W * 2) + 1, rtol=1e-5)
    assert [p.name for p in f._captures.popitem()[1].model.plan.inputs] == ["x"]  # type: ignore[union-attr]


def test_nested_captures_and_methods() -> None:
    class Layer:
        def __init__(self, w: Any) -> None:
            self.w = w

        @tinyedge.jit
        def __call__(self, x: Any) -> Any:
            return x @ self.w

        @tinyedge.jit
        def twice(self, x: Any) -> Any:
            return self(x) + self(x)

    a, b = Layer(W), Layer(W * 2)
    np.testing.assert_allclose(a(X).numpy() * 2, b(X).numpy(), rtol=1e-5)
    np.testing.assert_allclose(a.twice(X).numpy(), b(X).numpy(), rtol=1e-5)


def test_arguments_and_constants_as_results() -> None:
    @tinyedge.jit
    def f(x: Any, unused: Any) -> Any:
        return x, x, Tensor.arange(3), np.ones(2, np.int8), x.T

    same, again, count, ones, turned = f(X, X)
    np.testing.assert_array_equal(same.numpy(), X)
    np.testing.assert_array_equal(again.numpy(), X)
    np.testing.assert_array_equal(turned.numpy(), X.T)
    assert count.tolist() == [0, 1, 2] and ones.dtype == np.int8


def test_threads_give_equal_bits() -> None:
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)

    def f(x: Any) -> Any:
        return (x @ W).softmax()

    one, two = (tinyedge.jit(threads=n)(f)(x).numpy().tobytes() for n in (1, 2))
    assert one == two


def test_save(tmp_path: Path) -> None:
    path = tmp_path / "step.pkl"

    @tinyedge.jit
    def step(x: Any, state: Any, scale: float = 2.0) -> Any:
        return {"y": x @ W * scale + state["h"][0], "next": [x.sum()]}

    state = {"h": [np.full(3, 5, np.float32)]}
    with pytest.raises(errors.InputError, match="captured for 0 kinds of arguments"):
        step.save(path)
    want = step(X, state)
    step.save(path)
    model = tinyedge.load(path)
    assert list(model.inputs) == ["x", "state.h.0"] and list(model.outputs) == ["y", "next.0"]
    got = model({"x": X, "state.h.0": state["h"][0]})
    assert got["y"].tobytes() == want["y"].numpy().tobytes()
    assert got["next.0"].tobytes() == want["next"][0].numpy().tobytes()
    assert model.plan.provenance["function"].endswith("step")

    step(X[:1], state)
    with pytest.raises(errors.InputError, match="2 kinds of arguments; pass examples"):
        step.save(path)
    before = path.read_bytes()
    step.save(path, X, state)
    assert tinyedge.load(path)({"x": X, "state.h.0": state["h"][0]})["y"].tobytes() == \
        got["y"].tobytes()
    with pytest.raises(errors.InputError, match="missing a required argument"):
        step.save(path, X)
    with pytest.raises(errors.PlanError, match="can't be written"):
        step.save(tmp_path / "none" / "step.pkl", X, state)
    assert len(path.read_bytes()) == len(before)
    step.save(tmp_path / "arm.pkl", X, state, target="cpu:aarch64")
    assert (tmp_path / "arm.pkl").stat().st_size


def test_function_without_parameters(tmp_path: Path) -> None:
    @tinyedge.jit
    def table() -> Any:
        return (Tensor.arange(5) * 2).astype(np.float32)

    assert table().tolist() == [0, 2, 4, 6, 8]
    table.save(tmp_path / "t.pkl")
    assert tinyedge.load(tmp_path / "t.pkl")()["output"].tolist() == [0, 2, 4, 6, 8]


def test_control_flow_on_values_is_refused() -> None:
    def branch(x: Any) -> Any:
        return x if x.sum() > 0 else -x

    def look(x: Any) -> Any:
        return x * x.numpy()

    def count(x: Any) -> Any:
        return [1, 2, 3][x[0, 0].astype(np.int32)]

    def number(x: Any) -> Any:
        return float(x[0, 0])

    for f in (branch, look, count, number):
        with pytest.raises(errors.UnsupportedError, match=r"depends on the argument 'x'; use "
                                                          r"Tensor.where"):
            tinyedge.jit(f)(X)
    # and nothing is left behind
    good = tinyedge.jit(lambda x: Tensor.where(x.sum() > 0, x, -x))
    np.testing.assert_array_equal(good(X).numpy(), X if X.sum() > 0 else -X)


def test_a_tensor_left_behind_is_refused() -> None:
    kept = []

    @tinyedge.jit
    def leak(x: Any) -> Any:
        kept.append(x)
        return x + 1

    leak(X)
    with pytest.raises(errors.UnsupportedError, match="depends on the argument 'x'"):
        kept[0].numpy()

    @tinyedge.jit
    def use(x: Any) -> Any:
        return x + kept[0]

    with pytest.raises(errors.UnsupportedError, match="a tensor of another capture"):
        use(X)


def test_bad_arguments() -> None:
    @tinyedge.jit
    def f(x: Any, y: Any = None) -> Any:
        return x

    for args, kwargs, kind, text in (
        ((), {}, errors.InputError, "f: missing a required argument: 'x'"),
        ((X, 1, 2), {}, errors.InputError, "f: too many positional arguments"),
        ((X,), {"z": 1}, errors.InputError, "unexpected keyword argument 'z'"),
        ((X, {1, 2}), {}, errors.InputError, "argument 'y' is a set"),
        ((1.0,), {}, errors.InputError, "returns no tensor"),
        ((np.array(["a"]),), {}, errors.UnsupportedError, "is not supported"),
        ((np.ones(2, complex),), {}, errors.UnsupportedError, "complex128 is not supported"),
        ((np.ma.array([1.0]),), {}, errors.InputError, "masked array"),
        ((X, {"a.0": X, "a": [X]}), {}, errors.InputError, "both named 'y.a.0'"),
    ):
        with pytest.raises(kind, match=text):
            f(*args, **kwargs)
    with pytest.raises(errors.InputError, match="returns a set"):
        tinyedge.jit(lambda x: {x.shape})(X)
    with pytest.raises(errors.InputError, match="jit is for functions"):
        tinyedge.jit(3)  # type: ignore[call-overload]


def test_errors_of_the_function_pass_through() -> None:
    @tinyedge.jit
    def f(x: Any) -> Any:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        f(X)
    with pytest.raises(errors.ShapeError, match="broadcast"):
        tinyedge.jit(lambda x: x + np.ones((3, 3)))(X)


def test_many_captures_are_refused() -> None:
    f = tinyedge.jit(lambda x, n: x * n)
    f._captures = dict.fromkeys(range(256))  # type: ignore[assignment]
    with pytest.raises(errors.InputError, match="256 kinds of arguments; pass numbers"):
        f(X, 1)


def test_threads_of_python() -> None:
    f = tinyedge.jit(lambda x: (x @ W).tanh())
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(f(X).numpy().tobytes()))
               for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 8 and len(set(results)) == 1 and len(f._captures) == 1


@pytest.mark.parametrize("code,without", [
    ("import tinyedge", "numpy onnx llvmlite rich tinyedge.graph"),
    ("import tinyedge; tinyedge.load", "onnx llvmlite rich tinyedge.compiler"),
    ("import tinyedge; tinyedge.Tensor; tinyedge.jit; tinyedge.errors", "onnx llvmlite rich"),
    ("import tinyedge.cli", "numpy onnx llvmlite rich"),
])
def test_imports_are_lazy(code: str, without: str) -> None:
    script = f"import sys; {code}; print(*(m for m in {without.split()} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
                          check=True)
    assert done.stdout.strip() == ""


def test_the_module_does_not_hide_the_function() -> None:
    script = "from tinyedge.jit import Jit; import tinyedge; print(type(tinyedge.jit(lambda x: x)))"
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
                          check=True)
    assert done.stdout.strip() == "<class 'tinyedge.jit.Jit'>"


def test_public_names() -> None:
    assert {"load", "compile", "check", "jit", "Tensor", "errors"} <= set(dir(tinyedge))
    assert all(getattr(tinyedge, name) is not None for name in tinyedge._HOME)
    assert callable(tinyedge.jit) and callable(tinyedge.compile)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tinyedge.nothing  # noqa: B018
