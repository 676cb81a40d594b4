"""Plans of every format and executor that was ever released still load, and compute the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import tinyedge
from tests.compiled import difference
from tests.golden.__main__ import FOLDER, expected, network, runs

FILES = sorted(FOLDER.glob("*-network-x86-64-v2.pkl"))


def test_there_is_one() -> None:
    assert FILES


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_network(path: Path, threads: int, tmp_path: Path) -> None:
    onnx.save(network(), tmp_path / "golden.onnx")
    with tinyedge.load(path, threads=threads) as run:
        for feeds, want in zip(runs(), expected(tmp_path / "golden.onnx")):
            got = run(feeds)
            assert got.keys() == want.keys()
            assert difference(got["classes"], want["classes"]) < 1e-5
            np.testing.assert_allclose(got["short"], want["short"], rtol=2e-3)
            np.testing.assert_array_equal(got["small"], want["small"])
