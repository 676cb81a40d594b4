"""What several commands share: options of compilation, inputs, progress, tables."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import InputError, PlanError

if TYPE_CHECKING:
    import numpy as np

    from ..plan import Plan, Port

    Array = np.ndarray[Any, np.dtype[Any]]

Progress = Callable[[str, int, int], None]
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


# options of compilation

TARGETS = ("cpu[:ARCH[,FEATURE...]] with ARCH aarch64, x86-64-v2, x86-64-v3 or x86-64-v4; several "
           "joined by +, such as cpu:x86-64-v3+v4, give one file for all; default: this machine")


def compilation(parser: argparse.ArgumentParser, states: bool = True, target: str = "cpu",
                targets: str = TARGETS) -> None:
    """Adds the options that say what is compiled, and for what (`target` if nothing is said)."""
    parser.add_argument("-t", "--target", default=target, help=targets)
    parser.add_argument("--dim", action="append", default=[], metavar="NAME=VALUE|LO..HI",
                        help="size of a named dimension, or its bounds; may be repeated")
    parser.add_argument("--shape", action="append", default=[], metavar="INPUT=D,D,...",
                        help="all dimensions of an input, unnamed ones too; may be repeated")
    if states:
        parser.add_argument("--state", action="append", default=[], metavar="OUT=IN",
                            help="feed an output back as an input of the next run; may be repeated")
        parser.add_argument("--float16", action="store_true",
                            help="store weights as float16; sums are made in float32 all the same")
        parser.add_argument("--bfloat16", action="store_true",
                            help="store weights as bfloat16, and multiply such values where the "
                            "processor has AVX-512 BF16: faster, to about two decimal places")
        parser.add_argument("--tune", type=fraction, default=0.0, metavar="SECONDS",
                            help="measure schedules on this machine for so long; what is found "
                            "stays in the cache")
        parser.add_argument("--no-cache", action="store_true", help="compile everything anew")


def bindings(a: argparse.Namespace) -> dict[str, Any]:
    """The options as arguments of `tinyedge.onnx.check`; with states those of `load`."""
    out: dict[str, Any] = {
        "dims": {k: _dimension(v, f"--dim {k}") for k, v in _pairs(a.dim, "--dim NAME=VALUE")},
        "shapes": {k: tuple(_number(d, f"--shape {k}") for d in v.split(",") if v)
                   for k, v in _pairs(a.shape, "--shape INPUT=D,D,...")},
    }
    if hasattr(a, "state"):
        out["states"] = dict(_pairs(a.state, "--state OUT=IN"))
    return out


def _pairs(given: Sequence[str], form: str) -> list[tuple[str, str]]:
    """NAME=VALUE; the last = divides, as names of tensors may have others."""
    flag = form.split()[0]
    out: dict[str, str] = {}
    for text in given:
        name, equals, value = text.rpartition("=")
        if not (name and equals):
            raise InputError(f"{flag} {text}: this is not of the form {form}")
        if name in out:
            raise InputError(f"{flag} {name} is given twice; leave one out")
        out[name] = value
    return list(out.items())


def _dimension(text: str, flag: str) -> int | tuple[int, int]:
    low, dots, high = text.partition("..")
    if not dots:
        return _number(text, flag)
    bounds = _number(low, flag), _number(high, flag)
    if bounds[0] > bounds[1]:
        raise InputError(f"{flag}={text}: the lowest size is above the highest")
    return bounds


def _number(text: str, flag: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise InputError(f"{flag}: '{text}' is not a size; use a whole number")
    return int(text)


def positive(text: str) -> int:
    """An argument type: a whole number from 1 on."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 on")
    return int(text)


def fraction(text: str) -> float:
    """An argument type: a number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 on")
    return value


def json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for scripts")


# plans

def is_plan(path: str) -> bool:
    """Whether a file is a plan (or named like one), not a model."""
    from ..planfile import MAGIC

    try:
        with open(path, "rb") as file:
            start = file.read(len(MAGIC))
    except OSError:
        start = b""
    return start == MAGIC or start != MAGIC and path.endswith(".pkl")


def plan_of(a: argparse.Namespace) -> Plan:
    """The plan in the file `a.file`, or compiled from the model there."""
    if is_plan(a.file):
        from ..planfile import read

        for flag in ("dim", "shape", "state"):
            if getattr(a, flag, None):
                raise InputError(f"--{flag} is for compiling a model; {a.file} is a plan")
        return read(a.file)
    from ..compiler import compile

    with progress() as report:
        return compile(a.file, a.target, **bindings(a), progress=report, cache=not a.no_cache,
                       tune=a.tune, float16=a.float16, bfloat16=a.bfloat16)


# inputs

def feeding(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say what a plan runs on."""
    parser.add_argument("-i", "--input", action="append", default=[],
                        metavar="NAME=FILE|random[:SEED]|NUMBER",
                        help="an input from a .npy file or an image, at random (what is left out "
                        "is random too), or one number everywhere; may be repeated")
    parser.add_argument("--size", action="append", default=[], metavar="NAME=VALUE",
                        help="size of a dimension that the plan leaves open; default: its largest")
    parser.add_argument("--device", help="the device to run on; default: the target's first")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads; default: all")


def sizes_of(plan: Plan, a: argparse.Namespace) -> dict[str, int]:
    """Sizes of open dimensions that the command line gives."""
    sizes = {k: _number(v, f"--size {k}") for k, v in _pairs(a.size, "--size NAME=VALUE")}
    for name in sizes:
        if name not in plan.symbols:
            there = ", ".join(plan.symbols) or "there is none"
            raise InputError(f"--size {name}: the plan leaves no such dimension open ({there})")
    return sizes


def inputs_of(plan: Plan, a: argparse.Namespace) -> dict[str, Array]:
    """An array for every input of the plan, as the command line says; else random, with seeds
    0, 1, ..."""
    from ..plan import evaluate

    given = dict(_pairs(a.input, "-i NAME=FILE"))
    ports = {p.name: p for p in plan.inputs}
    for name in given:
        if name not in ports:
            raise InputError(f"-i {name}: there is no such input; the inputs are "
                             f"{', '.join(ports) or 'none'}")
    known = sizes_of(plan, a)
    arrays: dict[str, Array] = {}
    for name, text in given.items():
        if text.lower().endswith(".npy"):
            arrays[name] = _stored(text, name)
            for d, n in zip(ports[name].shape, arrays[name].shape):
                if isinstance(d, tuple) and d[0] == "sym":
                    known.setdefault(d[1], n)
    symbols = {k: high for k, (_, high) in plan.symbols.items()} | known
    for i, (name, port) in enumerate(ports.items()):
        if name in arrays:
            continue
        shape = tuple(evaluate(d, symbols) for d in port.shape)
        text = given.get(name, "random")
        if text.lower().endswith(IMAGES):
            arrays[name] = _image(text, port, shape)
        elif text == "random" or text.startswith("random:"):
            seed = _number(text[7:], f"-i {name}=random:SEED") if text[6:] else i
            arrays[name] = random_array(shape, port.dtype, seed)
        else:
            arrays[name] = _constant(text, port, shape)
    return arrays


def states_of(plan: Plan, seed: int = 1000) -> dict[str, Array]:
    """A random array for every state of the plan."""
    return {s.name: random_array(s.shape, s.dtype, seed + i) for i, s in enumerate(plan.states)}


def random_array(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    """Floats from the standard normal distribution, integers from 0..9, booleans evenly."""
    import numpy as np

    random = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    values: Array = random.standard_normal(shape) if kind.kind == "f" else \
        random.integers(0, 2 if kind.kind == "b" else 10, shape)
    return np.asarray(values).astype(kind)


def _stored(path: str, name: str) -> Array:
    import numpy as np

    try:
        array = np.load(path, allow_pickle=False)
    except OSError as error:
        raise InputError(f"-i {name}: {path} can't be read: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        raise InputError(f"-i {name}: {path} is not a plain array file: "
                         f"{str(error).splitlines()[0]}") from None
    if not isinstance(array, np.ndarray):
        raise InputError(f"-i {name}: {path} is an archive; give a .npy file with one array")
    return array


def _constant(text: str, port: Port, shape: tuple[int, ...]) -> Array:
    import numpy as np

    kind = np.dtype(port.dtype)
    try:
        value = float(text) if kind.kind == "f" else int(text)
        return np.full(shape, value, kind)
    except (ValueError, OverflowError):
        raise InputError(f"-i {port.name}={text}: this is neither a .npy file, an image "
                         f"({', '.join(IMAGES)}), random[:SEED] nor a {port.dtype}") from None


def _image(path: str, port: Port, shape: tuple[int, ...]) -> Array:
    """A picture scaled to [N,C,H,W] or [N,H,W,C] with 1 or 3 channels; floats from 0 to 1."""
    import numpy as np

    try:
        from PIL import Image
    except ImportError:
        raise InputError(f"-i {port.name}: pictures need the package pillow; install it, or give a "
                         ".npy file") from None
    first = len(shape) in (3, 4) and shape[-3] in (1, 3)
    last = len(shape) in (3, 4) and shape[-1] in (1, 3)
    kind = np.dtype(port.dtype)
    if not (first or last) or any(d != 1 for d in shape[:-3]) or kind.name not in (
            "float16", "float32", "float64", "uint8"):
        raise InputError(f"-i {port.name}: {path} is a picture, and the input {port.dtype}"
                         f"{list(shape)} is not one; give a .npy file")
    rows, columns = shape[-2:] if first else shape[-3:-1]
    channels = shape[-3] if first else shape[-1]
    try:
        with Image.open(path) as file:
            picture = file.convert("RGB" if channels == 3 else "L").resize((columns, rows))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"-i {port.name}: {path} can't be read as a picture: {error}") from None
    pixels = np.asarray(picture).reshape(rows, columns, channels)
    pixels = (pixels.transpose(2, 0, 1) if first else pixels).reshape(shape)
    return np.ascontiguousarray(pixels / 255 if kind.kind == "f" else pixels, kind)


# what is shown and written

@contextmanager
def progress() -> Iterator[Progress | None]:
    """A function that shows how far long work is; None where nobody looks at stderr."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, of: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=of)
            bars.update(tasks[stage], completed=done, total=of)

        yield report


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], right: str = "") -> str:
    """Text in columns; those whose names are in `right` (comma-separated) stand to the right."""
    cells = [list(map(str, head)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    flush = [h in right.split(",") for h in head]
    lines = ["  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, flush))
             for row in cells]
    return "\n".join(line.rstrip() for line in lines)


def clip(text: str, width: int) -> str:
    """Text cut to a width."""
    return text if len(text) <= width else text[:width - 1] + "…"


def write(path: str, data: bytes) -> None:
    """Writes a file, whole or not at all; InputError."""
    from ..planfile import write_whole

    try:
        write_whole(path, [data])
    except PlanError as error:
        raise InputError(str(error)) from None


def writable(path: str, endings: tuple[str, ...] = ()) -> str:
    """The path, after a look at what would make writing it fail; before long work."""
    if endings and not path.lower().endswith(endings):
        raise InputError(f"{path}: the name must end with {' or '.join(endings)}")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise InputError(f"{path}: the folder {folder} is not there; make it first")
    if os.path.isdir(path):
        raise InputError(f"{path}: this is a directory; give a file's name")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{path}: the folder {folder} can't be written to")
    return path
