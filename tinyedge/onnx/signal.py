"""Fourier transforms as products with constant matrices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .. import graph as g
from ..graph import Node
from ..shape import Dim, same, static
from .matmul import einsum
from .registry import Context, op


def fourier(points: int, rows: int, inverse: bool) -> npt.NDArray[np.float64]:
    """[rows, points, 2, 2]: (re, im) of output row from (re, im) of input point."""
    turn = 2 * np.pi * (np.outer(np.arange(rows), np.arange(points)) % points) / points
    if inverse:
        turn = -turn
    cos, sin = np.cos(turn), np.sin(turn)
    out = np.stack([np.stack([cos, sin], -1), np.stack([-sin, cos], -1)], -2)
    return out / points if inverse else out


def transform(x: Node, axis: int, points: int, rows: int, inverse: bool) -> Node:
    """x [..., real or complex parts] with one dimension replaced by its spectrum."""
    n = x.shape[axis]
    assert isinstance(n, int)
    if n != points:
        x = g.pad(x, [0] * x.rank, [points - n if i == axis else 0 for i in range(x.rank)])
    matrix = fourier(points, rows, inverse)
    if same(x.shape[-1], 1):
        matrix = matrix[:, :, :, :1]
    letters: list[str | int] = list(range(x.rank))
    out = [*letters[:-1], "part"]
    out[axis] = "row"
    return einsum(x, g.const(matrix.astype(x.dtype.numpy)), letters,
                  ["row", axis, "part", x.rank - 1], out)


def dft(c: Context, x: Node, axis: int, length: Node | None) -> Node:
    inverse, half = bool(c.attr("inverse")), bool(c.attr("onesided"))
    (n,) = static((x.shape[axis],), str(c))
    if half and inverse:
        n = 2 * (n - 1)
    points = n if length is None else c.ints(length, "input 1 (dft_length)")[0]
    if half and inverse:
        # the missing half of the spectrum is the conjugate of what is there, read backwards
        (have,) = static((x.shape[axis],), str(c))
        more = [points // 2 + 1 - have if i == axis else 0 for i in range(x.rank)]
        x = g.pad(x, [0] * x.rank, more)
        back = g.narrow(x, axis, (points - 1) // 2, (points - 1) // 2, -1)
        sign = g.const(np.array([1, -1], x.dtype.numpy))
        x = g.concat([x, g.mul(back, sign)], axis)
        out = transform(x, axis, points, points, True)
        return g.narrow(out, out.rank - 1, 0, 1)
    return transform(x, axis, points, points // 2 + 1 if half else points, inverse)


@op("DFT", 17)
def dft_attribute(c: Context, x: Node, length: Node | None = None) -> Node:
    return dft(c, x, g.normal_axis(c.attr("axis"), x.rank), length)


@op("DFT", 20)
def dft_input(c: Context, x: Node, length: Node | None = None, axis: Node | None = None) -> Node:
    at = -2 if axis is None else c.ints(axis, "input 2 (axis)")[0]
    return dft(c, x, g.normal_axis(at, x.rank), length)


@op("STFT", 17)
def stft(
    c: Context, x: Node, step: Node, window: Node | None = None, length: Node | None = None
) -> Node:
    stride = c.ints(step, "input 1 (frame_step)")[0]
    size = c.ints(length, "input 3 (frame_length)")[0] if length is not None else \
        static(window.shape, str(c))[0] if window is not None else 0
    if not size:
        c.refuse("neither a window nor a frame length is given")
    rows = size // 2 + 1 if c.attr("onesided") else size
    if x.rank == 2:
        x = g.reshape(x, (*x.shape, 1))
    batch, (n,) = x.shape[0], static(x.shape[1:2], str(c))
    frames = (n - size) // stride + 1
    matrix = g.const(fourier(size, rows, False).astype(x.dtype.numpy))
    if same(x.shape[2], 1):
        matrix = g.narrow(matrix, 3, 0, 1)
    if window is not None:
        matrix = g.mul(matrix, g.reshape(window, (size, 1, 1)))
    # out[b, f, row, part] = sum over t, q of x[b, f*stride + t, q] * matrix[row, t, part, q]
    shape: tuple[Dim, ...] = (batch, frames, rows, 2)
    maps = (
        ((0, ((0, 1),)), (0, ((1, stride), (4, 1))), (0, ((5, 1),))),
        ((0, ((2, 1),)), (0, ((4, 1),)), (0, ((3, 1),)), (0, ((5, 1),))),
    )
    return g.contract(x, matrix, shape, (size, x.shape[2]), maps)
