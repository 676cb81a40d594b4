"""Operators that move, repeat, select or make elements, and those that give shapes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from .. import graph as g
from ..codegen import symbolic
from ..codegen.symbolic import lift
from ..dtype import BOOL, INT64
from ..graph import Node
from ..shape import Dim, Shape, dim, same, static
from ..shape import size as count
from .reduce import take_along
from .registry import Context, extent, extents, op

LATER = (13, 14, 19, 21, 23, 24, 25)


# constants and shapes

@op("Constant", 1, 9, 11, 12, *LATER[:1], *LATER[2:])
def constant(c: Context) -> Node:
    for name, kind in (("value_float", np.float32), ("value_floats", np.float32),
                       ("value_int", np.int64), ("value_ints", np.int64)):
        value = c.attr(name)
        if value is not None:
            return g.const(np.array(value, kind))
    if c.has("sparse_value"):
        return g.const(c.importer.dense(c.attr("sparse_value")))
    if c.has("value_string") or c.has("value_strings"):
        c.refuse("strings are not supported")
    return g.const(c.attr("value"))


@op("ConstantOfShape", 9, 20, 21, 23, 24, 25)
def constant_of_shape(c: Context, shape: Node) -> Node:
    value = c.attr("value", np.zeros(1, np.float32))
    return g.expand(g.const(value.reshape(())), c.dims(shape, "input 0 (shape)"))


@op("Shape", 1, 13, 15, 19, 21, 23, 24, 25)
def shape(c: Context, x: Node) -> Node:
    return extents(x.shape[slice(c.attr("start", 0), c.attr("end"))])


@op("Size", 1, 13, 19, 21, 23, 24, 25)
def size(c: Context, x: Node) -> Node:
    return extent(count(x.shape))


@op("Range", 11, 27)
def range_(c: Context, start: Node, limit: Node, delta: Node) -> Node:
    c.ignore("stash_type")
    if start.dtype.is_int and c.constant(limit) is None:
        a, b, s = (c.dims(v, "an input")[0] for v in (start, limit, delta))
        if not isinstance(s, int) or s <= 0:
            c.refuse("input 2 (delta) must be a positive constant where the others are symbolic")
        n = dim(symbolic.maximum(dim(b - a + (s - 1)) // s, 0))
    else:
        values = [c.need(v, "an input") for v in (start, limit, delta)]
        low, high, step = (v.ravel()[0] for v in values)
        n = max(int(np.ceil((float(high) - float(low)) / float(step))), 0)
    place = g.cast(g.iota((n,), 0), start.dtype)
    return g.add(g.mul(place, g.reshape(delta, ())), g.reshape(start, ()))


@op("EyeLike", 9, 22)
def eye_like(c: Context, x: Node) -> Node:
    number = c.attr("dtype")
    kind = x.dtype if number is None else c.type_of(number)
    row, column = g.iota(x.shape, 0), g.iota(x.shape, 1)
    return g.cast(g.eq(column, g.add(row, g.like(row, c.attr("k")))), kind)


@op("OneHot", 9, 11, 28)
def one_hot(c: Context, index: Node, depth: Node, values: Node) -> Node:
    n = c.dims(g.cast(depth, INT64), "input 1 (depth)")[0]
    axis = g.normal_axis(c.attr("axis"), index.rank + 1)
    spread = (*index.shape[:axis], 1, *index.shape[axis:])
    shape = (*index.shape[:axis], n, *index.shape[axis:])
    index = g.reshape(g.cast(index, INT64), spread)
    index = g.where(g.lt(index, g.like(index, 0)), g.add(index, extent(n)), index)
    off, on = (g.reshape(g.narrow(values, 0, i, 1), ()) for i in (0, 1))
    return g.where(g.eq(index, g.iota(shape, axis)), on, off)


@op("Trilu", 14)
def trilu(c: Context, x: Node, k: Node | None = None) -> Node:
    offset = 0 if k is None else c.ints(k, "input 1 (k)")[0]
    row, column = (g.iota(x.shape[-2:], i) for i in (0, 1))
    line = g.add(row, g.like(row, offset))
    keep = g.le(line, column) if c.attr("upper") else g.le(column, line)
    return g.where(keep, x, g.like(x, 0))


# views

@op("Reshape", 1)
def reshape_attribute(c: Context, x: Node) -> Node:
    return g.reshape(x, resolve(c, x, c.attr("shape"), False))


@op("Reshape", 5, *LATER)
def reshape(c: Context, x: Node, shape: Node) -> Node:
    return g.reshape(x, resolve(c, x, c.dims(shape, "input 1 (shape)"), bool(c.attr("allowzero"))))


def resolve(c: Context, x: Node, wanted: Sequence[Dim], zeros: bool) -> Shape:
    """A Reshape's dimensions: 0 keeps the input's (unless `zeros`), -1 is what remains."""
    out = [x.shape[i] if same(d, 0) and not zeros else d for i, d in enumerate(wanted)]
    if any(same(d, -1) for d in out):
        at = next(i for i, d in enumerate(out) if same(d, -1))
        rest = [d for i, d in enumerate(out) if i != at]
        out[at] = 0 if any(same(d, 0) for d in rest) else quotient(x.shape, rest)
    return tuple(out)


def quotient(above: Sequence[Dim], below: Sequence[Dim]) -> Dim:
    """The size of one shape by that of another that divides it."""
    left, over = list(above), []
    for d in below:
        twin = next((i for i, e in enumerate(left) if same(d, e)), None)
        if twin is None:
            over.append(d)
        else:
            del left[twin]
    return dim(symbolic.floordiv(count(left), count(over)))


@op("Flatten", 1, 9, 11, 13, 21, 23, 24, 25)
def flatten(c: Context, x: Node) -> Node:
    axis = c.attr("axis")
    axis = axis + x.rank if axis < 0 else axis
    return g.reshape(x, (count(x.shape[:axis]), count(x.shape[axis:])))


@op("Squeeze", 1, 11, 13, 21, 23, 24, 25)
def squeeze(c: Context, x: Node, axes: Node | None = None) -> Node:
    given = c.axes(axes, 1)
    if given is None:
        given = [i for i, d in enumerate(x.shape) if same(d, 1)]
        for d in x.shape:
            if not isinstance(d, int) and d.lo <= 1 <= d.hi:
                c.refuse(f"without axes it depends on whether dimension {d} is 1; bind it")
    over = {g.normal_axis(a, x.rank) for a in given}
    for a in over:
        if not same(x.shape[a], 1):
            c.misfit(f"dimension {a} has size {x.shape[a]}; only a dimension of size 1 can go")
    return g.reshape(x, [d for i, d in enumerate(x.shape) if i not in over])


@op("Unsqueeze", 1, 11, 13, 21, 23, 24, 25)
def unsqueeze(c: Context, x: Node, axes: Node | None = None) -> Node:
    given = c.axes(axes, 1) or []
    over = {g.normal_axis(a, x.rank + len(given)) for a in given}
    rest = iter(x.shape)
    return g.reshape(x, [1 if i in over else next(rest) for i in range(x.rank + len(given))])


@op("Transpose", 1, 13, 21, 23, 24, 25)
def transpose(c: Context, x: Node) -> Node:
    return g.permute(x, c.attr("perm", list(reversed(range(x.rank)))))


@op("Expand", 8, 13)
def expand(c: Context, x: Node, shape: Node) -> Node:
    wanted = c.dims(shape, "input 1 (shape)")
    rank = max(len(wanted), x.rank)
    mine, theirs = ((1,) * (rank - len(s)) + tuple(s) for s in (x.shape, wanted))
    return g.expand(x, [a if same(b, 1) else b for a, b in zip(mine, theirs)])


@op("Tile", 1)
def tile_axis(c: Context, x: Node, tiles: Node, axis: Node) -> Node:
    times = [1] * x.rank
    times[c.ints(axis, "input 2 (axis)")[0]] = c.ints(tiles, "input 1 (tiles)")[0]
    return repeat(x, times)


@op("Tile", 6, 13)
def tile(c: Context, x: Node, repeats: Node) -> Node:
    return repeat(x, c.dims(repeats, "input 1 (repeats)"))


def repeat(x: Node, times: Sequence[Dim]) -> Node:
    spread = [v for d in x.shape for v in (1, d)]
    wide = [v for t, d in zip(times, x.shape) for v in (t, d)]
    final = [count((t, d)) for t, d in zip(times, x.shape)]
    return g.reshape(g.expand(g.reshape(x, spread), wide), final)


@op("DepthToSpace", 1, 11, 13, 28)
def depth_to_space(c: Context, x: Node) -> Node:
    n, ch, h, w = x.shape
    b = c.attr("blocksize")
    mode = c.attr("mode", "DCR")
    if mode not in ("DCR", "CRD") or not isinstance(ch, int):
        c.refuse(f"attribute 'mode' is '{mode}' or the channels are symbolic")
    if mode == "DCR":
        split, order = (n, b, b, ch // (b * b), h, w), (0, 3, 4, 1, 5, 2)
    else:
        split, order = (n, ch // (b * b), b, b, h, w), (0, 1, 4, 2, 5, 3)
    return g.reshape(
        g.permute(g.reshape(x, split), order), (n, ch // (b * b), dim(h * b), dim(w * b))
    )


@op("SpaceToDepth", 1, 13, 28)
def space_to_depth(c: Context, x: Node) -> Node:
    n, ch, h, w = x.shape
    b = c.attr("blocksize")
    mode = c.attr("mode", "DCR")
    y = g.reshape(x, (n, ch, dim(h // b), b, dim(w // b), b))
    y = g.permute(y, (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4))
    return g.reshape(y, (n, count((ch, b * b)), dim(h // b), dim(w // b)))


# parts

@op("Concat", 1, 4, 11, 13)
def concat(c: Context, *xs: Node) -> Node:
    return g.concat(xs, c.attr("axis", 1))


def parts(x: Node, axis: int, sizes: Sequence[Dim]) -> list[Node]:
    """x cut along an axis into pieces of these sizes."""
    out, begin = [], 0
    for n in sizes:
        out.append(g.narrow(x, axis, begin, n))
        begin += n  # type: ignore[assignment]
    return out


@op("Split", 1, 2, 11, 13, 18)
def split(c: Context, x: Node, sizes: Node | None = None) -> list[Node]:
    axis = g.normal_axis(c.attr("axis", 0), x.rank)
    given = c.ints(sizes, "input 1 (split)") if sizes is not None else c.attr("split")
    if given is None:
        n = c.attr("num_outputs") or len(c.wanted)
        (total,) = static((x.shape[axis],), str(c))
        each = -(-total // n) if c.version >= 18 else total // n
        given = [max(min(each, total - each * i), 0) for i in range(n)]
    if isinstance(x.shape[axis], int) and sum(given) != x.shape[axis]:
        c.misfit(f"parts of sizes {given} do not make up dimension {axis} of size {x.shape[axis]}")
    return parts(x, axis, given)


@op("Slice", 1)
def slice_attributes(c: Context, x: Node) -> Node:
    starts, ends = c.attr("starts"), c.attr("ends")
    axes = c.attr("axes") or range(len(starts))
    return cut(c, x, starts, ends, axes, [1] * len(starts))


@op("Slice", 10, 11, 13)
def slice_(
    c: Context, x: Node, starts: Node, ends: Node, axes: Node | None = None,
    steps: Node | None = None,
) -> Node:
    low, high = c.dims(starts, "input 1 (starts)"), c.dims(ends, "input 2 (ends)")
    over = range(len(low)) if axes is None else c.ints(axes, "input 3 (axes)")
    by = [1] * len(low) if steps is None else c.ints(steps, "input 4 (steps)")
    return cut(c, x, low, high, over, by)


def cut(
    c: Context, x: Node, starts: Sequence[Dim], ends: Sequence[Dim], axes: Sequence[int],
    steps: Sequence[int],
) -> Node:
    """Numpy's slicing, where sizes may be symbolic."""
    for start, end, axis, step in zip(starts, ends, axes, steps):
        axis = g.normal_axis(axis, x.rank)
        n = x.shape[axis]
        if step == 0:
            c.refuse("a step is 0")
        low, high = (0, n) if step > 0 else (-1, dim(n - 1))
        begin, stop = (_limit(c, v, n, low, high) for v in (start, end))
        if step < 0:
            begin, stop, by = dim(0 - begin), dim(0 - stop), -step
        else:
            by = step
        length = dim(symbolic.maximum(dim(stop - begin + (by - 1)) // by, 0))
        if step < 0:
            begin = dim(0 - begin)
        if isinstance(begin, int):
            x = g.narrow(x, axis, begin if length != 0 else 0, length, step)
        else:
            place = g.iota((length,), 0)
            place = g.add(g.mul(place, g.like(place, step)), extent(begin))
            x = g.gather(x, [place], axis)
    return x


def _limit(c: Context, v: Dim, n: Dim, low: Dim, high: Dim) -> Dim:
    """An end of a slice: negative ones count from the end, all are brought into range."""
    if lift(v).hi < 0:
        v = dim(n + v)
    elif lift(v).lo < 0:
        c.refuse(f"a slice begins or ends at {v}, whose sign depends on the shapes")
    return dim(symbolic.minimum(symbolic.maximum(v, low), high))


# padding

@op("Pad", 1, 2)
def pad_attributes(c: Context, x: Node) -> Node:
    pads = c.attr("pads") if c.version > 1 else c.attr("paddings")
    return pad_by(c, x, pads, g.like(x, c.attr("value")), range(x.rank))


@op("Pad", 11, 13, 18, 19, 21, 23, 24, 25)
def pad(
    c: Context, x: Node, pads: Node, value: Node | None = None, axes: Node | None = None
) -> Node:
    over = range(x.rank) if axes is None else c.ints(axes, "input 3 (axes)")
    return pad_by(c, x, c.ints(pads, "input 1 (pads)"), value or g.like(x, 0), over)


def pad_by(
    c: Context, x: Node, pads: Sequence[int], value: Node, axes: Sequence[int]
) -> Node:
    mode = c.attr("mode")
    low, high = [0] * x.rank, [0] * x.rank
    for i, a in enumerate(axes):
        low[a], high[a] = pads[i], pads[len(axes) + i]
    if mode == "constant":
        fill = c.constant(value)
        if fill is not None:
            return g.pad(x, low, high, fill.ravel()[0])
        inside = g.pad(g.full(x.shape, True, BOOL), low, high, 0)
        return g.where(inside, g.pad(x, low, high), g.reshape(value, ()))
    if mode not in ("reflect", "edge", "wrap"):
        c.refuse(f"attribute 'mode' is '{mode}', which is not a known kind")
    for a, (p, q) in enumerate(zip(low, high)):
        if p or q:
            x = _pad_from_inside(c, x, a, p, q, mode)
    return x


def _pad_from_inside(c: Context, x: Node, axis: int, low: int, high: int, mode: str) -> Node:
    n = x.shape[axis]
    crop = [min(p, 0) for p in (low, high)]
    if any(crop):
        before, after = ([v if i == axis else 0 for i in range(x.rank)] for v in crop)
        x = g.pad(x, before, after)
        low, high, n = max(low, 0), max(high, 0), x.shape[axis]
    least = lift(n).lo
    if mode == "edge":
        ends = g.narrow(x, axis, 0, 1), _last(x, axis, 1, 0)
        first, final = (
            [g.expand(e, [p if i == axis else d for i, d in enumerate(x.shape)])] if p else []
            for e, p in zip(ends, (low, high))
        )
        return g.concat([*first, x, *final], axis)
    room = least - 1 if mode == "reflect" else least
    if low <= room and high <= room:
        left = g.narrow(x, axis, low, low, -1) if mode == "reflect" else _last(x, axis, low, 0)
        right = _reversed_end(x, axis, high) if mode == "reflect" else g.narrow(x, axis, 0, high)
        return g.concat([p for p, k in ((left, low), (x, 1), (right, high)) if k], axis)
    (size,) = static((n,), str(c))
    at = np.arange(-low, size + high)
    if mode == "reflect":
        at = np.abs((at + (size - 1)) % max(2 * (size - 1), 1) - (size - 1))
    else:
        at = at % size
    return g.gather(x, [g.const(at.astype(np.int64))], axis)


def _last(x: Node, axis: int, n: int, before: int) -> Node:
    """n elements along an axis, the last of which has `before` behind it."""
    d = x.shape[axis]
    if isinstance(d, int):
        return g.narrow(x, axis, d - before - n, n)
    return g.gather(x, [g.const(np.arange(-n, 0) - before)], axis)


def _reversed_end(x: Node, axis: int, n: int) -> Node:
    """The n elements before the last one, backwards."""
    y = _last(x, axis, n, 1)
    return g.narrow(y, axis, n - 1, n, -1) if n else y


# gather and scatter

@op("Gather", 1, 11, 13)
def gather(c: Context, x: Node, index: Node) -> Node:
    axis = g.normal_axis(c.attr("axis"), x.rank)
    value, n = c.constant(index), x.shape[axis]
    if value is not None and value.size and value.ndim < 2:
        at = value.astype(np.int64).ravel()
        step = int(at[1] - at[0]) if at.size > 1 else 1
        line = bool(np.all(np.diff(at) == step)) and step != 0
        if isinstance(n, int):
            at = np.where(at < 0, at + n, at)
            if at.min() < 0 or at.max() >= n:
                c.misfit(f"input 1 (indices) leaves dimension {axis} of size {n}")
            line = bool(np.all(np.diff(at) == step)) and step != 0
        if line and at.min() >= 0 and at.max() < lift(n).lo:
            y = g.narrow(x, axis, int(at[0]), at.size, step)
            return g.reshape(y, (*x.shape[:axis], *index.shape, *x.shape[axis + 1:]))
    return g.gather(x, [index], axis)


@op("GatherElements", 11, 13)
def gather_elements(c: Context, x: Node, index: Node) -> Node:
    return take_along(x, g.cast(index, INT64), g.normal_axis(c.attr("axis"), x.rank))


def coordinates(index: Node) -> list[Node]:
    """The last dimension's entries as separate tensors."""
    (n,) = static(index.shape[-1:], "indices")
    last = index.rank - 1
    return [g.reshape(g.narrow(index, last, i, 1), index.shape[:-1]) for i in range(n)]


@op("GatherND", 11, 12, 13)
def gather_nd(c: Context, x: Node, index: Node) -> Node:
    batch = c.attr("batch_dims", 0)
    at = coordinates(g.cast(index, INT64))
    if not batch:
        return g.gather(x, at, 0)
    leading = [g.expand(g.iota([d if j == i else 1 for j, d in enumerate(at[0].shape)], i),
                        at[0].shape) for i in range(batch)]
    return g.gather(x, [*leading, *at], 0)


KINDS = {"none": "set", "add": "sum", "mul": "prod", "max": "max", "min": "min"}


def _kind(c: Context) -> str:
    name = c.attr("reduction", "none")
    if name not in KINDS:
        c.refuse(f"attribute 'reduction' is '{name}'; it must be one of {sorted(KINDS)}")
    return KINDS[name]


@op("Scatter", 9, 11)
@op("ScatterElements", 11, 13, 16, 18)
def scatter_elements(c: Context, x: Node, index: Node, updates: Node) -> Node:
    axis = g.normal_axis(c.attr("axis"), x.rank)
    places = [
        g.cast(index, INT64) if i == axis else g.iota(index.shape, i) for i in range(x.rank)
    ]
    return g.scatter(x, updates, places, 0, _kind(c))


@op("ScatterND", 11, 13, 16, 18)
def scatter_nd(c: Context, x: Node, index: Node, updates: Node) -> Node:
    return g.scatter(x, updates, coordinates(g.cast(index, INT64)), 0, _kind(c))


@op("TensorScatter", 24)
def tensor_scatter(c: Context, past: Node, update: Node, start: Node | None = None) -> Node:
    axis = g.normal_axis(c.attr("axis"), past.rank)
    place = g.iota(update.shape, axis)
    if start is not None:
        begin = g.reshape(g.cast(start, INT64), (*start.shape, *(1,) * (past.rank - 1)))
        place = g.add(place, begin)
    if c.attr("mode") == "circular":
        place = g.mod(place, extent(past.shape[axis]))
    places = [place if i == axis else g.iota(update.shape, i) for i in range(past.rank)]
    return g.scatter(past, update, places, 0)


@op("Compress", 9, 11, 28)
def compress(c: Context, x: Node, condition: Node) -> Node:
    axis = c.attr("axis")
    (at,) = np.nonzero(c.need(condition, "input 1 (condition)"))
    if axis is None:
        x, axis = g.reshape(x, (count(x.shape),)), 0
    return g.gather(x, [g.const(at.astype(np.int64))], g.normal_axis(axis, x.rank))


@op("NonZero", 9, 13)
def non_zero(c: Context, x: Node) -> Node:
    value = c.need(x, "the number of elements that are not zero")
    return g.const(np.array(np.nonzero(np.atleast_1d(value)), np.int64))


@op("ReverseSequence", 10, 28)
def reverse_sequence(c: Context, x: Node, lengths: Node) -> Node:
    time, batch = c.attr("time_axis"), c.attr("batch_axis")
    place = g.iota(x.shape[:2], time)
    n = g.reshape(g.cast(lengths, INT64), [1 if i == time else x.shape[i] for i in (0, 1)])
    back = g.sub(g.sub(n, g.like(n, 1)), place)
    place = g.where(g.lt(place, n), back, place)
    other = g.iota(x.shape[:2], batch)
    return g.gather(x, [place, other] if time == 0 else [other, place], 0)


@op("Col2Im", 18)
def col2im(c: Context, x: Node, image: Node, block: Node) -> Node:
    """Each column's elements are added at the places that a sliding window took them from."""
    size, kernel = c.ints(image, "input 1"), c.ints(block, "input 2")
    n = len(size)
    stride, dilation = c.attr("strides") or [1] * n, c.attr("dilations") or [1] * n
    pads = c.attr("pads") or [0] * 2 * n
    full = [d + pads[i] + pads[n + i] for i, d in enumerate(size)]
    taps = [np.arange(k) * e for k, e in zip(kernel, dilation)]
    starts = [np.arange((f - (k - 1) * e - 1) // s + 1) * s
              for f, k, e, s in zip(full, kernel, dilation, stride)]
    at = np.zeros((1, 1), np.int64)
    for t, s, f in zip(taps, starts, full):
        inner = (t[:, None] + s[None, :]).astype(np.int64)
        at = at * f
        at = (at[:, None, :, None] + inner[None, :, None, :]).reshape(
            at.shape[0] * inner.shape[0], -1)
    batch, rows = static(x.shape[:2], str(c))
    ch = rows // prod(kernel)
    columns = g.reshape(x, (batch, ch, prod(kernel), at.shape[1]))
    out = g.scatter(
        g.full((batch, ch, prod(full)), 0, x.dtype), columns, [g.const(at)], 2, "sum"
    )
    out = g.reshape(out, (batch, ch, *full))
    return g.slice_(out, [0, 0, *pads[:n]], [1] * (2 + n), (batch, ch, *size))
