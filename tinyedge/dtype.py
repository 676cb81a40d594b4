"""Element types, shared by every stage from the tensor IR to the plan file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import UnsupportedError


@dataclass(frozen=True)
class DType:
    """One element type.

    name: numpy's name for it ("float32", "bool", ...), also used in plan files.
    kind: "b" boolean, "i" signed, "u" unsigned, "f" floating point.
    bits: width in memory (bool: 8, holding 0 or 1).
    """

    name: str
    kind: str
    bits: int

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return self.bits // 8

    @property
    def numpy(self) -> np.dtype[Any]:
        if self.name == "bfloat16":
            import ml_dtypes  # comes with onnx; where plans run no array has this type

            short: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
            return short
        return np.dtype(self.name)

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_int(self) -> bool:
        return self.kind in "iu"

    @property
    def limits(self) -> tuple[int, int]:
        """Smallest and largest value of an integer or boolean type."""
        if self.kind == "b":
            return 0, 1
        if self.kind == "u":
            return 0, (1 << self.bits) - 1
        return -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1

    def __repr__(self) -> str:
        return self.name


BOOL = DType("bool", "b", 8)
INT8, INT16, INT32, INT64 = (DType(f"int{b}", "i", b) for b in (8, 16, 32, 64))
UINT8, UINT16, UINT32, UINT64 = (DType(f"uint{b}", "u", b) for b in (8, 16, 32, 64))
FLOAT16, FLOAT32, FLOAT64 = (DType(f"float{b}", "f", b) for b in (16, 32, 64))
BFLOAT16 = DType("bfloat16", "f", 16)
"""float32 without its lower half; only inside a graph, never of an input or output."""

DTYPES = {
    t.name: t
    for t in (
        BOOL, INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64, FLOAT16, FLOAT32, FLOAT64,
    )
}


def dtype_of(value: Any) -> DType:
    """The DType of a numpy array, dtype, scalar type or name; UnsupportedError for any other."""
    if isinstance(value, DType):
        return value
    if isinstance(value, np.ndarray):
        value = value.dtype
    try:
        name = np.dtype(value).name
    except TypeError:
        name = str(value)
    if name not in DTYPES:
        raise UnsupportedError(f"element type {name} is not supported; use one of {list(DTYPES)}")
    return DTYPES[name]
