"""Resize and what else samples between pixels: per axis, sums of gathered elements with weights.

All positions and weights are worked out here, while importing, as numpy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import graph as g
from ..dtype import FLOAT32, INT64
from ..graph import Node
from ..shape import Dim, dim, static
from .elementwise import plus, scaled
from .registry import Context, op

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MODES = frozenset(
    "half_pixel half_pixel_symmetric pytorch_half_pixel align_corners asymmetric "
    "tf_half_pixel_for_nn tf_crop_and_resize".split()
)


def positions(
    mode: str, out: int, size: int, scale: float, roi: tuple[float, float] | None = None
) -> Floats:
    """Where each output pixel lies among the input's, by the coordinate transformation."""
    # in float32, as everybody does it, so that positions midway between pixels round alike
    x = np.arange(out, dtype=np.float32)
    return np.asarray(_positions(mode, x, out, size, np.float32(scale), roi), np.float64)


def _positions(
    mode: str, x: Any, out: int, size: int, scale: Any, roi: tuple[float, float] | None
) -> Any:
    if mode == "align_corners":
        # the resized length is the exact one, before it is cut down to whole pixels
        length = float(scale) * size
        length = out if abs(length - out) < 1e-4 else length
        return x * np.float32(size - 1) / np.float32(length - 1) if out > 1 else np.zeros(out)
    if mode == "asymmetric":
        return x / scale
    if mode == "tf_half_pixel_for_nn":
        return (x + 0.5) / scale
    if mode == "pytorch_half_pixel" and out == 1:
        return np.zeros(1)
    if mode == "tf_crop_and_resize":
        low, high = roi or (0.0, 1.0)
        if out == 1:
            return np.full(1, 0.5 * (low + high) * (size - 1))
        return low * (size - 1) + x * (high - low) * (size - 1) / (out - 1)
    centre = 0.0
    if mode == "half_pixel_symmetric":
        # the exact length may be fractional; keep the middle in the middle
        centre = size / 2 * (1 - out / (scale * size))
    return centre + (x + 0.5) / scale - 0.5


def nearest(x: Floats, rounding: str) -> Ints:
    if rounding == "floor":
        y = np.floor(x)
    elif rounding == "ceil":
        y = np.ceil(x)
    elif rounding == "round_prefer_ceil":
        y = np.floor(x + 0.5)
    else:
        y = np.ceil(x - 0.5)
    return y.astype(np.int64)


def cubic(distance: Floats, a: float) -> Floats:
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0.0))


def kernel(
    x: Floats, size: int, mode: str, scale: float, a: float, antialias: bool, exclude: bool
) -> tuple[Ints, Floats]:
    """Positions (clamped) and weights [out, taps] of linear or cubic interpolation at x."""
    stretch = min(scale, 1.0) if antialias else 1.0
    reach = (1 if mode == "linear" else 2) / stretch
    first = np.floor(x - reach).astype(np.int64) + 1
    taps = int(np.ceil(2 * reach)) if antialias else (2 if mode == "linear" else 4)
    at = first[:, None] + np.arange(taps)
    distance = (at - x[:, None]) * stretch
    w = np.maximum(1 - np.abs(distance), 0) if mode == "linear" else cubic(distance, a)
    if exclude:
        w = np.where((at >= 0) & (at < size), w, 0)
    if exclude or antialias:
        w = w / w.sum(1, keepdims=True)
    return np.clip(at, 0, size - 1), w


def interpolate(x: Node, axis: int, at: Ints, w: Floats) -> Node:
    """The sum over taps of elements `at` [out, taps] along an axis, times `w`."""
    size = x.shape[axis]
    assert isinstance(size, int)
    if at.shape[1] <= 4:
        shape = [-1 if i == axis else 1 for i in range(x.rank)]
        total: Node | None = None
        for t in range(at.shape[1]):
            part = g.mul(select(x, axis, at[:, t]),
                         g.const(w[:, t].reshape(shape).astype(x.dtype.numpy)))
            total = part if total is None else g.add(total, part)
        assert total is not None
        return total
    matrix = np.zeros((len(at), size))
    np.add.at(matrix, (np.arange(len(at))[:, None], at), w)
    n = x.rank
    forms = [(0, ((n if i == axis else i, 1),)) for i in range(n)]
    out = [len(at) if i == axis else d for i, d in enumerate(x.shape)]
    return g.contract(
        x, g.const(matrix.astype(x.dtype.numpy)), out, [size],
        (tuple(forms), ((0, ((axis, 1),)), (0, ((n, 1),)))),
    )


def select(x: Node, axis: int, at: Ints) -> Node:
    """Elements `at` along an axis: as a view where the positions are regular."""
    size, n = x.shape[axis], len(at)
    if isinstance(size, int) and n % size == 0 and np.array_equal(at, np.arange(n) // (n // size)):
        return enlarge(x, axis, n // size)
    steps = np.diff(at)
    if n == 1 or n > 1 and np.all(steps == steps[0]) and steps[0] != 0:
        return g.narrow(x, axis, int(at[0]), n, int(steps[0]) if n > 1 else 1)
    return g.gather(x, [g.const(at)], axis)


def enlarge(x: Node, axis: int, times: int) -> Node:
    """Each element `times` times in a row."""
    shape = x.shape
    y = g.reshape(x, (*shape[:axis + 1], 1, *shape[axis + 1:]))
    y = g.expand(y, (*shape[:axis + 1], times, *shape[axis + 1:]))
    return g.reshape(y, (*shape[:axis], dim(shape[axis] * times), *shape[axis + 1:]))


@op("Upsample", 1)
def upsample_attributes(c: Context, x: Node) -> Node:
    scales = [1.0, 1.0, c.attr("height_scale"), c.attr("width_scale")]
    return resize(c, x, scales, None, "asymmetric", "floor")


@op("Upsample", 7)
def upsample_scales(c: Context, x: Node) -> Node:
    if len(c.attr("scales") or ()) != x.rank:
        c.refuse(f"attribute 'scales' must have {x.rank} entries")
    return resize(c, x, c.attr("scales"), None, "asymmetric", "floor")


@op("Upsample", 9, 10)
@op("Resize", 10)
def upsample(c: Context, x: Node, scales: Node) -> Node:
    values = c.need(scales, "input 1 (scales)").ravel()
    return resize(c, x, [float(v) for v in values], None, "asymmetric", "floor")


@op("Resize", 11, 13, 18, 19)
def _resize(
    c: Context, x: Node, roi: Node | None = None, scales: Node | None = None,
    sizes: Node | None = None,
) -> Node:
    transform = c.attr("coordinate_transformation_mode")
    rounding = c.attr("nearest_mode")
    axes = [g.normal_axis(a, x.rank) for a in c.attr("axes") or range(x.rank)]
    factors: list[float] | None = None
    wanted: list[Dim] | None = None
    if scales is not None:
        given = c.need(scales, "input 2 (scales)").ravel()
        if given.size:
            factors = [1.0] * x.rank
            for a, v in zip(axes, given):
                factors[a] = float(v)
    if factors is None and sizes is not None:
        dims = c.dims(sizes, "input 3 (sizes)")
        wanted = list(x.shape)
        for a, d in zip(axes, dims):
            wanted[a] = d
        policy = c.attr("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            best = min if policy == "not_larger" else max
            factor = best(s / d for s, d in zip(
                static(dims, str(c)), static([x.shape[a] for a in axes], str(c))))
            factors = [1.0] * x.rank
            for a in axes:
                factors[a] = factor
                wanted[a] = int(np.floor(factor * int(x.shape[a]) + 0.5))  # type: ignore[arg-type]
    if factors is None and wanted is None:
        c.refuse("neither scales nor sizes are given")
    c.ignore("keep_aspect_ratio_policy")
    regions: list[tuple[float, float]] | None = None
    if transform == "tf_crop_and_resize":
        if roi is None:
            c.refuse("coordinate_transformation_mode is tf_crop_and_resize, but there is no roi")
        corners = c.need(roi, "input 1 (roi)").ravel()
        regions = [(0.0, 1.0)] * x.rank
        for i, a in enumerate(axes):
            regions[a] = float(corners[i]), float(corners[len(axes) + i])
    return resize(c, x, factors, wanted, transform, rounding, regions)


def resize(
    c: Context, x: Node, scales: Sequence[float] | None, sizes: Sequence[Dim] | None,
    transform: str, rounding: str, regions: Sequence[tuple[float, float]] | None = None,
) -> Node:
    mode = c.attr("mode")
    mode = {"bilinear": "linear", "trilinear": "linear"}.get(mode, mode)
    if mode not in ("nearest", "linear", "cubic"):
        c.refuse(f"attribute 'mode' is '{mode}', which is not a known kind")
    if transform not in MODES:
        c.refuse(f"attribute 'coordinate_transformation_mode' is '{transform}', which is unknown")
    a, exclude = c.attr("cubic_coeff_a", -0.75), bool(c.attr("exclude_outside", 0))
    antialias = bool(c.attr("antialias", 0)) and mode != "nearest"
    outside = c.attr("extrapolation_value", 0.0)
    kind = x.dtype
    out = x if kind.is_float or mode == "nearest" else g.cast(x, FLOAT32)
    lost: list[tuple[int, npt.NDArray[np.bool_]]] = []
    for axis in range(x.rank):
        size = out.shape[axis]
        if scales is not None and scales[axis] == 1 and regions is None:
            continue
        if sizes is not None and sizes[axis] is size and regions is None:
            continue
        if not isinstance(size, int):
            times = scales[axis] if scales is not None else 0.0
            if mode == "nearest" and times == int(times) > 0 and \
                    (transform, rounding) == ("asymmetric", "floor"):
                out = enlarge(out, axis, int(times))
                continue
            c.refuse(f"dimension {axis} of the input is symbolic; bind it to a size")
        if sizes is not None:
            (n,) = static((sizes[axis],), str(c))
            scale = scales[axis] if scales is not None else n / size
        else:
            assert scales is not None
            scale = scales[axis]
            n = int(np.floor(size * scale))
        if n == size and scale == 1 and regions is None:
            continue
        at = positions(transform, n, size, scale, regions[axis] if regions else None)
        if transform == "tf_crop_and_resize":
            beyond = (at < 0) | (at > size - 1)
            if beyond.any():
                lost.append((axis, beyond))
        if mode == "nearest":
            out = select(out, axis, np.clip(nearest(at, rounding), 0, size - 1))
        else:
            out = interpolate(out, axis, *kernel(at, size, mode, scale, a, antialias, exclude))
    if out.dtype is not kind:
        if kind.is_int:
            low, high = kind.limits
            out = g.maximum(g.minimum(g.round_(out), g.like(out, high)), g.like(out, low))
        out = g.cast(out, kind)
    for axis, beyond in lost:
        mask = beyond.reshape([-1 if i == axis else 1 for i in range(x.rank)])
        out = g.where(g.const(mask), g.like(out, outside), out)
    return out


# sampling at computed places

@op("GridSample", 16, 20, 22)
def grid_sample(c: Context, x: Node, grid: Node) -> Node:
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(c.attr("mode"), c.attr("mode"))
    padding, aligned = c.attr("padding_mode"), bool(c.attr("align_corners"))
    n = x.rank - 2
    if mode not in ("nearest", "linear", "cubic") or mode == "cubic" and n != 2:
        c.refuse(f"attribute 'mode' is '{mode}', which is not supported for {n} dimensions")
    if padding not in ("zeros", "border", "reflection"):
        c.refuse(f"attribute 'padding_mode' is '{padding}', which is not a known kind")
    sizes = static(x.shape[2:], str(c))
    at = []
    for i, d in enumerate(sizes):
        v = g.reshape(g.narrow(grid, grid.rank - 1, n - 1 - i, 1), grid.shape[:-1])
        at.append(scaled(plus(v, 1), (d - 1) / 2) if aligned else
                  plus(scaled(plus(v, 1), d / 2), -0.5))
    taps: list[list[tuple[Node, Node | None]]] = []  # an axis: (position, weight)
    for v, d in zip(at, sizes):
        if mode != "cubic":
            v = _inside(v, d, padding, aligned)
        if mode == "nearest":
            taps.append([(g.round_(v), None)])
        elif mode == "linear":
            low = g.floor(v)
            part = g.sub(v, low)
            taps.append([(low, g.sub(g.like(part, 1), part)), (plus(low, 1), part)])
        else:
            low = g.floor(v)
            part = g.sub(v, low)
            taps.append([
                (_inside(plus(low, k - 1), d, padding, aligned), _cubic(plus(part, 1 - k), -0.75))
                for k in range(4)
            ])
    # channels last, so that the gathered dimensions are adjacent
    data = g.permute(x, [0, *range(2, x.rank), 1])
    shape = grid.shape[:-1]
    batch = g.expand(g.iota([d if i == 0 else 1 for i, d in enumerate(shape)], 0), shape)
    combined: list[tuple[list[Node], Node | None, Node | None]] = [([], None, None)]
    for axis_taps, d in zip(taps, sizes):
        combined = [
            ([*places, g.cast(p, INT64)], _times(weight, w), _both(valid, _valid(p, d, padding)))
            for places, weight, valid in combined for p, w in axis_taps
        ]
    total: Node | None = None
    for places, weight, valid in combined:
        found = g.gather(data, [batch, *places], 0)
        if valid is not None:
            found = g.where(g.reshape(valid, (*shape, 1)), found, g.like(found, 0))
        if weight is not None:
            found = g.mul(found, g.reshape(weight, (*shape, 1)))
        total = found if total is None else g.add(total, found)
    assert total is not None
    return g.permute(total, [0, total.rank - 1, *range(1, total.rank - 1)])


def _inside(v: Node, size: int, padding: str, aligned: bool) -> Node:
    """A position brought into range, for the kinds of padding that do."""
    if padding == "border":
        return g.minimum(g.maximum(v, g.like(v, 0)), g.like(v, size - 1))
    if padding == "zeros":
        return v
    low, span = (0.0, size - 1.0) if aligned else (-0.5, float(size))
    if not span:
        return g.like(v, 0)
    rest = g.mod(plus(v, -low), g.like(v, 2 * span))
    back = g.minimum(rest, g.sub(g.like(rest, 2 * span), rest))
    out = plus(back, low)
    return g.minimum(g.maximum(out, g.like(v, 0)), g.like(v, size - 1))


def _valid(p: Node, size: int, padding: str) -> Node | None:
    if padding != "zeros":
        return None
    return g.and_(g.le(g.like(p, 0), p), g.le(p, g.like(p, size - 1)))


def _times(a: Node | None, b: Node | None) -> Node | None:
    return b if a is None else a if b is None else g.mul(a, b)


def _both(a: Node | None, b: Node | None) -> Node | None:
    return b if a is None else a if b is None else g.and_(a, b)


def _cubic(distance: Node, a: float) -> Node:
    d = g.abs_(distance)
    near = plus(g.mul(g.mul(plus(scaled(d, a + 2), -(a + 3)), d), d), 1)
    far = plus(g.mul(plus(g.mul(plus(scaled(d, a), -5 * a), d), 8 * a), d), -4 * a)
    return g.where(g.le(d, g.like(d, 1)), near, far)


@op("RoiAlign", 10, 16, 22)
def roi_align(c: Context, x: Node, rois: Node, batch: Node) -> Node:
    """Means (or maxima) of bilinear samples on a regular grid in each cell of each region."""
    height, width = c.attr("output_height"), c.attr("output_width")
    samples, mode = c.attr("sampling_ratio"), c.attr("mode")
    half = c.version >= 16 and c.attr("coordinate_transformation_mode") == "half_pixel"
    if samples == 0:
        c.refuse("attribute 'sampling_ratio' is 0: the number of samples depends on the data")
    if mode not in ("avg", "max"):
        c.refuse(f"attribute 'mode' is '{mode}', which is not a known kind")
    n = rois.shape[0]
    sizes = static(x.shape[2:], str(c))
    scale = c.attr("spatial_scale")
    box = plus(scaled(rois, scale), -0.5 if half else 0.0)
    sides = [g.reshape(g.narrow(box, 1, i, 1), (n,)) for i in range(4)]
    at = []
    for low, high, cells in ((sides[1], sides[3], height), (sides[0], sides[2], width)):
        length = g.sub(high, low)
        if not half:
            length = g.maximum(length, g.like(length, 1))
        place = (np.arange(cells * samples) + 0.5) / samples
        steps = g.const(place.astype(x.dtype.numpy)[None] / cells)
        at.append(g.add(g.reshape(low, (n, 1)), g.mul(g.reshape(length, (n, 1)), steps)))
    rows, columns = height * samples, width * samples
    y = g.expand(g.reshape(at[0], (n, rows, 1)), (n, rows, columns))
    z = g.expand(g.reshape(at[1], (n, 1, columns)), (n, rows, columns))
    valid: Node | None = None
    taps = []
    for v, d in ((y, sizes[0]), (z, sizes[1])):
        inside = g.and_(g.le(g.like(v, -1), v), g.le(v, g.like(v, d)))
        valid = _both(valid, inside)
        v = g.minimum(g.maximum(v, g.like(v, 0)), g.like(v, d - 1))
        low = g.floor(v)
        part = g.sub(v, low)
        upper = g.minimum(plus(low, 1), g.like(v, d - 1))
        taps.append([(low, g.sub(g.like(part, 1), part)), (upper, part)])
    assert valid is not None
    which = g.expand(g.reshape(g.cast(batch, INT64), (n, 1, 1)), (n, rows, columns))
    data = g.permute(x, (0, 2, 3, 1))
    parts = []
    for p, wp in taps[0]:
        for q, wq in taps[1]:
            weight = g.where(valid, g.mul(wp, wq), g.like(wp, 0))
            found = g.gather(data, [which, g.cast(p, INT64), g.cast(q, INT64)], 0)
            parts.append(g.mul(found, g.reshape(weight, (n, rows, columns, 1))))
    total = parts[0]
    for part in parts[1:]:
        total = (g.maximum if mode == "max" else g.add)(total, part)
    ch = x.shape[1]
    cells = g.reshape(total, (n, height, samples, width, samples, ch))
    out = g.reduce("sum" if mode == "avg" else "max", cells, [2, 4], keep=False)
    if mode == "avg":
        out = scaled(out, 1 / samples ** 2)
    return g.permute(out, (0, 3, 1, 2))
