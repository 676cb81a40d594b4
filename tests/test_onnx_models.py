"""The real networks, imported and interpreted, against onnxruntime."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

from tests.models import MODELS, inputs, model
from tinyedge.interpreter import interpret
from tinyedge.onnx import check, load

SOME = ("efficientnet-lite0", "silero-vad", "ppocr-det", "ppocr-rec", "ppocr-cls", "basic-pitch",
        "magika", "squeezenet", "resnet50", "shufflenet", "densenet121", "inception-v1",
        "inception-v2")


def test_every_network_is_tried() -> None:
    assert set(SOME) == set(MODELS)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.filterwarnings("ignore:.*one branch can't run")
def test_network_equals_onnxruntime(name: str) -> None:
    spec, path = MODELS[name], model(name)
    graph = load(path, shapes=spec.shapes, states=spec.states)
    feeds = inputs(name, 1)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    got = interpret(graph, feeds)
    for key, want in zip(names, session.run(None, feeds)):
        assert got[key].shape == want.shape and got[key].dtype == want.dtype
        assert np.abs(got[key] - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("name", ("silero-vad", "squeezenet"))
@pytest.mark.filterwarnings("ignore:.*one branch can't run")
def test_check_finds_no_problem(name: str) -> None:
    assert check(model(name), shapes=MODELS[name].shapes) == []
