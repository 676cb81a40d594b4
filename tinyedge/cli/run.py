"""``tinyedge run``: a plan runs once."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from .options import feeding, inputs_of, json_flag, table, writable, write

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

HELP = "run a plan once, with inputs from files or at random"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="PLAN.pkl")
    feeding(parser)
    parser.add_argument("-o", "--output", metavar="OUT.npz", help="where the outputs are written")
    json_flag(parser)


def run(a: argparse.Namespace) -> int:
    from ..planfile import read
    from ..runtime import load

    if a.output:
        writable(a.output, (".npz",))
    plan = read(a.file)
    inputs = inputs_of(plan, a)
    with load(plan, a.device, a.threads) as model:
        outputs = model(inputs)
    if a.output:
        write(a.output, archive(outputs))
    facts = [summary(name, array) for name, array in outputs.items()]
    if a.json:
        print(json.dumps({"plan": a.file, "outputs": facts}))
    else:
        rows = [[f["name"], f["shape"], f["dtype"], *(_short(f[k]) for k in ("min", "mean", "max")),
                 " ".join(map(_short, f["first"]))] for f in facts]
        print(table(("output", "shape", "dtype", "min", "mean", "max", "first values"), rows,
                    "min,mean,max"))
    return 0


def archive(arrays: dict[str, Array]) -> bytes:
    """The bytes of a .npz file."""
    import io
    import zipfile

    import numpy as np

    out = io.BytesIO()
    # numpy.savez takes names as keywords, and so not every name
    with zipfile.ZipFile(out, "w") as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
    return out.getvalue()


def summary(name: str, array: Array) -> dict[str, Any]:
    """What is said of an output; numbers that are not finite are given as text."""
    import numpy as np

    flat = array.ravel()
    wide = flat.astype(np.float64)
    out: dict[str, Any] = {"name": name, "shape": list(array.shape), "dtype": array.dtype.name}
    for key, f in (("min", np.min), ("mean", np.mean), ("max", np.max)):
        with np.errstate(all="ignore"):
            out[key] = _plain(f(wide if key == "mean" else flat)) if flat.size else None
    out["first"] = [_plain(v) for v in flat[:4]]
    return out


def _plain(value: Any) -> Any:
    number = value.item()
    return str(number) if isinstance(number, float) and number - number != 0 else number


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str("" if value is None else value)
