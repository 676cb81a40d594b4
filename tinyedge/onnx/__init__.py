"""The ONNX importer: `load` makes a tensor graph of a model, `check` lists what can't be one.

`read` reads the file, `importer` walks the nodes, and the other modules hold one function for each
operator, by kind; `registry` says how to add one.
"""

from . import (
    control,
    conv,
    elementwise,
    matmul,
    norm,
    pool,
    quant,
    recurrent,
    reduce,
    resize,
    shape_ops,
    signal,
)
from .importer import Problem, check, load

__all__ = ["Problem", "check", "load"]

MODULES = (
    control, conv, elementwise, matmul, norm, pool, quant, recurrent, reduce, resize, shape_ops,
    signal,
)
"""Importing them has filled the table of operators."""
