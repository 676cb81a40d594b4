"""tinyedge: a compact tensor compiler and runtime.

The public API. Names are imported when they are first used, so that loading and running a plan
imports neither the compiler nor the ONNX package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compiler import compile as compile
    from .runtime import load as load

__version__ = "0.1.0"

_HOME = {"load": "runtime", "compile": "compiler"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module 'tinyedge' has no attribute {name!r}")
