"""The real networks that tests and benchmarks run, as ONNX files in a cache folder.

`model(name)` gives the path of a file, `inputs(name, seed)` arrays to feed it, `MODELS[name]` what
is known about it. The files come from published packages (see `examples.files`), or from the `onnx`
package, whose real architectures have constants for weights: these get seeded random weights that
keep the activations in range.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from examples import classify, zoo
from examples.files import CACHE, Package, fetch, locked, write_whole

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Random = np.random.Generator

SILERO_VAD = Package(  # MIT
    "silero-vad==6.2.3",
    {
        "silero_vad/data/silero_vad.onnx":
        "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
    },
)
RAPIDOCR = Package(  # Apache-2.0
    "rapidocr==3.10.0",
    {
        "rapidocr/models/PP-OCRv6_det_small.onnx":
        "090f04abcd9d9a7498bc4ebf677e4cb9bdce1fe4197ddb7e529f1ef44e1ff94f",
        "rapidocr/models/PP-OCRv6_rec_small.onnx":
        "6f327246b50388f3c176ae304bd95767ea6dc0c9ae92153ef8cbe210b3c14884",
        "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx":
        "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
    },
)
BASIC_PITCH = Package(  # Apache-2.0
    "basic-pitch==0.4.0",
    {
        "basic_pitch/saved_models/icassp_2022/nmp.onnx":
        "2c3c1d144bfa61ad236e92e169c13535c880469a12a047d4e73451f2c059a0ec",
    },
)
MAGIKA = Package(  # Apache-2.0
    "magika==1.0.3",
    {
        "magika/models/standard_v3_3/model.onnx":
        "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c",
    },
)


@dataclass(frozen=True)
class Spec:
    """What is known about a network.

    `shapes` binds the inputs that have unbound dimensions (as `--shape` does), `states` ties
    outputs to the inputs that they feed in the next run (as `--state OUT=IN`), `convolutional` says
    that convolutions take most of its time.
    """

    obtain: Callable[[Path], Path]
    make: Callable[[Random], Arrays]
    convolutional: bool = True
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)


# ---- inputs


def _image(name: str, random: Random) -> Arrays:
    """Pixels as after the usual normalisation: smooth areas, as photographs have, and noise."""
    y, x = np.mgrid[0:224, 0:224] / 224
    waves = sum(
        a * np.sin(2 * np.pi * (u * x + v * y) + p)
        for a, u, v, p in zip(random.normal(0, 0.5, 6), *random.uniform(-6, 6, (3, 6)), strict=True)
    )
    pixels = waves * random.uniform(0.5, 1, (3, 1, 1)) + random.normal(0, 0.2, (3, 224, 224))
    return {name: pixels[None].astype(np.float32)}


def _tone(random: Random, count: int, rate: int) -> Array:
    """Speech-like sound: harmonics of a gliding pitch in syllables, over quiet noise."""
    t = np.arange(count) / rate
    phase = 2 * np.pi * np.cumsum(random.uniform(90, 250) + 30 * np.sin(2 * np.pi * 2 * t)) / rate
    voice = sum(np.sin(k * phase + random.uniform(0, 6)) / k for k in range(1, 20))
    syllables = 0.5 - 0.5 * np.cos(2 * np.pi * (4 * t + random.uniform()))
    return np.asarray(0.15 * voice * syllables + random.normal(0, 0.005, count), np.float32)


def _speech(random: Random) -> Arrays:
    return {
        "input": _tone(random, 576, 16000)[None],
        "state": random.normal(0, 0.3, (2, 1, 128)).astype(np.float32),
        "sr": np.array(16000, np.int64),
    }


def _music(random: Random) -> Arrays:
    return {"serving_default_input_2:0": _tone(random, 43844, 22050)[None, :, None]}


def _text(size: tuple[int, int], mean: list[float], std: list[float], random: Random) -> Arrays:
    """Dark words on a light page of `size` (height, width), normalised by channel.

    Contrast is low and noise high: on a clean page the networks are so sure of themselves that
    their last sigmoid or softmax would hide an error.
    """
    from PIL import Image, ImageDraw, ImageFont

    height, width = size
    light, dark = random.integers(200, 256, 3).tolist(), random.integers(0, 80, 3).tolist()
    page = Image.new("RGB", (width, height), tuple(light))
    draw = ImageDraw.Draw(page)
    letters = list("abcdefghijklmnopqrstuvwxyzABCDEFGHKLMNRSTXYZ0123456789")
    for top in range(4, height - 24, 48):
        words = ["".join(random.choice(letters, random.integers(3, 9))) for _ in range(width // 90)]
        left = int(random.integers(2, 20))
        draw.text((left, top), " ".join(words), tuple(dark), ImageFont.load_default(28))
    pixels = (np.asarray(page) / 255 - np.array(mean)) / np.array(std) / 2
    pixels += random.normal(0, 0.5, pixels.shape)
    return {"x": np.ascontiguousarray(pixels.transpose(2, 0, 1)[None], np.float32)}


def _bytes(random: Random) -> Arrays:
    """A file's first and last 1024 bytes, as magika wants them; 256 where the file is shorter."""
    text = np.frombuffer(b"import os\ndef main(x):\n    return x + 1\n", np.uint8)
    data = random.choice(text, 2048).astype(np.int32)
    data[random.integers(600, 1024) : 1024] = 256
    return {"bytes": data[None]}


# ---- files


def _published(package: Package, end: str, cache: Path) -> Path:
    [member] = [member for member in package.members if member.endswith(end)]
    return fetch(package, member, cache)


def _reseeded(name: str, gain: float, variance: float, cache: Path) -> Path:
    """An architecture out of the `onnx` package with random weights, see `reseed`."""
    path = cache / f"{name}.onnx"
    with locked(cache):
        if not path.exists():
            source = Path(onnx.__file__).parent / "backend/test/data/light" / f"light_{name}.onnx"
            write_whole(path, reseed(onnx.load(source), gain, variance).SerializeToString())
    return path


def reseed(model: onnx.ModelProto, gain: float = 1.0, variance: float = 1.0) -> onnx.ModelProto:
    """Gives every float constant of `model`, also fills, the random values that its use asks for.

    Weights are scaled by He's rule, and those of the last layer by `gain` too; variances of batch
    normalisations are near `variance`.
    """
    graph = model.graph
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    uses: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
    for node in graph.node:
        for position, tensor in enumerate(node.input):
            uses[tensor].append((node, position))
    last = next(node for node in reversed(graph.node) if node.op_type in ("Conv", "Gemm"))

    def use(name: str) -> tuple[onnx.NodeProto, int]:
        """The node that computes with a tensor, seen through changes of its shape."""
        node, position = uses[name][0]
        return use(node.output[0]) if node.op_type in ("Unsqueeze", "Reshape") else (node, position)

    def draw(name: str, shape: tuple[int, ...]) -> Array:
        node, position = use(name)
        random = np.random.default_rng(zlib.crc32(name.encode()))
        match node.op_type, position:
            case ("Conv" | "Gemm", 1):
                fan_in = int(np.prod(shape[1:]))
                value = random.normal(0, np.sqrt(2 / fan_in), shape) * (gain if node is last else 1)
            case "BatchNormalization", 4:
                value = random.uniform(0.7, 1.3, shape) * variance
            case ("BatchNormalization" | "Mul", 1):
                value = random.uniform(0.7, 1.3, shape)
            case _:
                value = random.normal(0, 0.1, shape)
        return value.astype(np.float32)

    floats = {name: value.shape for name, value in values.items() if value.dtype == np.float32}
    fills = {
        node.output[0]: tuple(values[node.input[0]].tolist())
        for node in graph.node
        if node.op_type == "ConstantOfShape"
    }
    kept = [node for node in graph.node if node.output[0] not in fills]
    needed = {tensor for node in kept for tensor in node.input}
    initializers = [
        numpy_helper.from_array(draw(name, shape), name)
        for name, shape in (fills | floats).items()
        if name in needed
    ]
    initializers += [t for t in graph.initializer if t.name in needed and t.name not in floats]
    data = [value for value in graph.input if value.name not in values]
    # This version of the format wants every initialiser among the inputs, as the files of its time.
    make = onnx.helper.make_tensor_value_info
    data += [make(t.name, t.data_type, t.dims) for t in initializers]
    del graph.node[:], graph.initializer[:], graph.input[:]
    graph.node.extend(kept)
    graph.initializer.extend(initializers)
    graph.input.extend(data)
    onnx.checker.check_model(model, full_check=True)
    return model


# ---- the table

_IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
_CENTRED = ([0.5] * 3, [0.5] * 3)
_GPU_0 = partial(_image, "gpu_0/data_0")
_DATA_0 = partial(_image, "data_0")

MODELS: dict[str, Spec] = {
    "efficientnet-lite0": Spec(zoo.network, partial(_image, "image")),
    "silero-vad": Spec(
        partial(_published, SILERO_VAD, "silero_vad.onnx"),
        _speech,
        convolutional=False,
        shapes={"input": (1, 576), "state": (2, 1, 128)},
        states={"stateN": "state"},
    ),
    "ppocr-det": Spec(
        partial(_published, RAPIDOCR, "det_small.onnx"),
        partial(_text, (320, 480), *_IMAGENET),
        shapes={"x": (1, 3, 320, 480)},
    ),
    "ppocr-rec": Spec(
        partial(_published, RAPIDOCR, "rec_small.onnx"),
        partial(_text, (48, 320), *_CENTRED),
        shapes={"x": (1, 3, 48, 320)},
    ),
    "ppocr-cls": Spec(
        partial(_published, RAPIDOCR, "cls_mobile.onnx"),
        partial(_text, (48, 192), *_CENTRED),
        shapes={"x": (1, 3, 48, 192)},
    ),
    "basic-pitch": Spec(
        partial(_published, BASIC_PITCH, "nmp.onnx"),
        _music,
        shapes={"serving_default_input_2:0": (1, 43844, 1)},
    ),
    "magika": Spec(
        partial(_published, MAGIKA, "model.onnx"),
        _bytes,
        convolutional=False,
        shapes={"bytes": (1, 2048)},
    ),
    "squeezenet": Spec(partial(_reseeded, "squeezenet", 4.0, 1.0), _DATA_0),
    "resnet50": Spec(partial(_reseeded, "resnet50", 2.0, 2.0), _GPU_0),
    "shufflenet": Spec(partial(_reseeded, "shufflenet", 2.0, 3.0), _GPU_0),
    "densenet121": Spec(partial(_reseeded, "densenet121", 1.0, 1.0), _DATA_0),
    "inception-v1": Spec(partial(_reseeded, "inception_v1", 16.0, 1.0), _DATA_0),
    "inception-v2": Spec(partial(_reseeded, "inception_v2", 1.0, 1.0), _DATA_0),
}


def model(name: str, cache: Path = CACHE) -> Path:
    """Path of the ONNX file of a network of `MODELS`; obtained at the first call, see `fetch`."""
    return MODELS[name].obtain(cache)


def inputs(name: str, seed: int = 0) -> Arrays:
    """Arrays for all inputs of a network, in the shapes that its `Spec` binds; seeded."""
    return MODELS[name].make(np.random.default_rng(seed))


def photograph_input(cache: Path = CACHE) -> Arrays:
    """The demonstration's photograph, for efficientnet-lite0."""
    return {"image": classify.preprocess(zoo.photograph(cache))}
