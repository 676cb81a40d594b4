"""tinyedge's exception types: the only ones that cross a public boundary.

Every message is one sentence: what is wrong, where (node, file, field, register), what to do.
"""

from __future__ import annotations


class TinyedgeError(Exception):
    """Base of every error that tinyedge raises on purpose."""


class ModelError(TinyedgeError):
    """A model file can't be read or is not valid: truncated, not ONNX, missing external data."""


class UnsupportedError(TinyedgeError):
    """A valid model asks for something that a stage or target can't do (operator, dtype, rank)."""


class ShapeError(TinyedgeError):
    """Shapes don't fit each other, or a dimension is left unbound."""


class InputError(TinyedgeError):
    """A call's or a command's argument is wrong: name, shape, dtype, option."""


class PlanError(TinyedgeError):
    """A plan file is damaged, hostile, from a newer format, or for another target."""


class DeviceError(TinyedgeError):
    """A device refused a step: ``DeviceError(step, what, errno)``."""

    def __init__(self, step: str, what: str = "", errno: int = 0) -> None:
        self.step, self.what, self.errno = step, what, errno
        tail = f" (errno {errno})" if errno else ""
        super().__init__(f"{step}: {what}{tail}" if what else f"{step}{tail}")


class DeviceTimeout(DeviceError):
    """A device did not answer before the deadline."""


class DeviceLost(DeviceError):
    """A device is gone; the process goes on and the device can be opened again."""
