"""Names what is in a photograph, with a plan file: all that runs where a model is deployed.

    python -m examples.classify PLAN PHOTOGRAPH CLASSES

CLASSES is a text file with the name of one class a line.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

import tinyedge

IMAGE_SIZE = 224
CROP_PADDING = 32  # the evaluation crop leaves 32 of 224 + 32 pixels outside
WARM_UP, RUNS = 5, 50


def preprocess(path: Path) -> npt.NDArray[np.float32]:
    """The photograph at `path` as EfficientNet-Lite0 wants it: float32 [1, 3, 224, 224], RGB.

    The central square inside a border of 32 / 256 is scaled by bicubic interpolation, as in the
    network's own evaluation; the values are (x - 127) / 128.
    """
    from PIL import Image

    with Image.open(path) as file:
        photo = file.convert("RGB")
    side = round(min(photo.size) * IMAGE_SIZE / (IMAGE_SIZE + CROP_PADDING))
    left, top = (photo.width - side) // 2, (photo.height - side) // 2
    box = (left, top, left + side, top + side)
    square = photo.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC, box)
    pixels = (np.asarray(square, np.float32) - 127) / 128
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None])


def main() -> None:
    parser = argparse.ArgumentParser(description="Names what is in a photograph.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("photograph", type=Path)
    parser.add_argument("classes", type=Path)
    arguments = parser.parse_args()
    image = preprocess(arguments.photograph)
    names = arguments.classes.read_text(encoding="utf-8").splitlines()

    start = time.perf_counter()
    run = tinyedge.load(arguments.plan)
    loaded = time.perf_counter() - start
    logits = run(image=image)["logits"][0]
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    for index in np.argsort(-probabilities)[:5]:
        print(f"{probabilities[index]:8.1%}  {names[index]}")

    times = []
    for _ in range(WARM_UP + RUNS):
        start = time.perf_counter()
        run(image=image)
        times.append(time.perf_counter() - start)
    median = statistics.median(times[WARM_UP:])
    print(f"loaded in {loaded * 1e3:.1f} ms; {median * 1e3:.2f} ms a run (median of {RUNS})")


if __name__ == "__main__":
    main()
