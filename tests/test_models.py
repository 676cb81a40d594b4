"""Real networks from file to saved plan: equal to onnxruntime, bit-equal in every repetition."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import tinyedge
from tests.models import MODELS, inputs, model

TOLERANCE = 1e-4
"""Relative to the output's largest value: float32 sums of some thousand terms in another order."""

REPLAY = """
import sys, numpy as np, tinyedge
plan, given, out, threads = sys.argv[1:]
with np.load(given) as f: x = dict(f)
with tinyedge.load(plan, threads=int(threads)) as run:
    np.savez(out, **{f"o{i}": v for i, v in enumerate(run(x).values())})
assert not {"onnx", "llvmlite"} & set(sys.modules)
"""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_compile_save_load_run(name: str, tmp_path: Path) -> None:
    given = inputs(name, 0)
    session = onnxruntime.InferenceSession(str(model(name)), providers=["CPUExecutionProvider"])
    wanted = dict(zip([o.name for o in session.get_outputs()], session.run(None, given)))
    plan = tinyedge.compile(model(name), shapes=MODELS[name].shapes)
    path = tmp_path / f"{name}.pkl"
    plan.save(path)
    np.savez(tmp_path / "in.npz", allow_pickle=False, **given)
    with tinyedge.load(plan, threads=1) as run:
        first, second = run(given), run(given)
    names = list(first)
    assert names == list(wanted)
    for k, want in wanted.items():
        assert first[k].shape == want.shape and first[k].dtype == want.dtype
        largest = float(np.abs(want).max())
        assert float(np.abs(first[k] - want).max()) <= TOLERANCE * largest, k
        assert first[k].tobytes() == second[k].tobytes()
    for threads in (1, 2):
        out = tmp_path / f"out{threads}.npz"
        subprocess.run([sys.executable, "-c", REPLAY, path, tmp_path / "in.npz", out,
                        str(threads)], check=True, timeout=120)
        with np.load(out) as f:
            for i, k in enumerate(names):
                assert f[f"o{i}"].tobytes() == first[k].tobytes(), (k, threads)


def test_silero_streams_with_its_state() -> None:
    """Chunk after chunk with the state kept in the plan, against onnxruntime handing it over."""
    name = "silero-vad"
    spec, path = MODELS[name], model(name)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    plan = tinyedge.compile(path, shapes=spec.shapes, states={"stateN": "state"})
    state = np.zeros((2, 1, 128), np.float32)
    with tinyedge.load(plan) as run:
        for seed in range(12):
            given = inputs(name, seed)
            want, state = session.run(None, {**given, "state": state})
            got = run({k: v for k, v in given.items() if k != "state"})
            np.testing.assert_allclose(got["output"], want, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(run.states["state"], state, rtol=1e-4, atol=1e-5)
