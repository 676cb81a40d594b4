"""tinyedge: a compact tensor compiler and runtime.

The public API. Names are imported when they are first used, so that loading and running a plan
imports neither the compiler nor the ONNX package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors as errors
    from .compiler import compile as compile
    from .jit import jit as jit
    from .onnx.importer import check as check
    from .runtime import load as load
    from .tensor import Tensor as Tensor
    from .web import export as export

__version__ = "0.1.0"

_HOME = {
    "Tensor": "tensor", "check": "onnx", "compile": "compiler", "errors": "",
    "export": "web", "jit": "jit",
    "load": "runtime",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'tinyedge' has no attribute {name!r}")
    if not home:
        return import_module(f".{name}", __name__)
    value = globals()[name] = getattr(import_module(f".{home}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
