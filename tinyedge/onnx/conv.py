"""Convolutions: a `pad` and one `contract`; transposed ones as convolutions that make pixels.

Windows (kernel, stride, dilation, padding) are shared with the pooling operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from .. import graph as g
from ..codegen.symbolic import lift
from ..dtype import INT32
from ..graph import Form, Node
from ..shape import Dim, dim
from .registry import Context, op


@dataclass(frozen=True)
class Window:
    """A sliding window over the last dimensions, one entry for each.

    low, high: elements of padding. extra: how many more a rounded-up size reads at the end. out:
    the number of positions.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    extra: tuple[int, ...]
    out: tuple[Dim, ...]

    @property
    def pads(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Padding before, and after with what rounding up adds."""
        return self.low, tuple(h + e for h, e in zip(self.high, self.extra))

    def form(self, axis: int, position: int, tap: int) -> Form:
        """Where a window reads, as an index form over output index and kernel index numbers."""
        return (0, ((position, self.stride[axis]), (tap, self.dilation[axis])))


def window(c: Context, sizes: Sequence[Dim], kernel: Sequence[int], ceil: bool = False) -> Window:
    """The window that a node's attributes describe, over dimensions of these sizes."""
    n = len(sizes)
    stride = c.attr("strides") or [1] * n
    dilation = c.attr("dilations") or [1] * n
    pads = c.attr("pads") or [0] * 2 * n
    auto = c.attr("auto_pad", "NOTSET")
    if not len(kernel) == len(stride) == len(dilation) == n or len(pads) != 2 * n:
        c.refuse(f"kernel_shape, strides, dilations and pads must be for {n} spatial dimensions")
    lows, highs, extras, outs = [], [], [], []
    for i, (d, k, s, e) in enumerate(zip(sizes, kernel, stride, dilation)):
        reach = (k - 1) * e + 1
        low, high, extra = (pads[i], pads[n + i], 0) if auto == "NOTSET" else (0, 0, 0)
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            if isinstance(d, int):
                total = max((-(-d // s) - 1) * s + reach - d, 0)
            elif s == 1:
                total = reach - 1
            else:
                c.refuse(
                    f"attribute 'auto_pad' is {auto} with stride {s}, and dimension {2 + i} of the "
                    "input is symbolic, so that its padding is not known; bind the dimension"
                )
            low = total // 2 if auto == "SAME_UPPER" else total - total // 2
            high = total - low
        elif auto not in ("NOTSET", "VALID"):
            c.refuse(f"attribute 'auto_pad' is '{auto}', which is not a known kind")
        room = dim(d + (low + high - reach))
        out = dim((room + (s - 1 if ceil else 0)) // s + 1)
        if ceil:
            if not isinstance(out, int) or not isinstance(d, int) or not isinstance(room, int):
                if s > 1:
                    c.refuse(f"attribute 'ceil_mode' is set and dimension {2 + i} is symbolic")
            else:
                # a window that would begin in the padding at the end is left out
                out -= (out - 1) * s >= d + low
                extra = max((out - 1) * s - room, 0)
        if lift(room).lo < 0 and not (ceil and isinstance(out, int) and out >= 0):
            least = "" if isinstance(d, int) else f", which can be {lift(d).lo}"
            c.misfit(f"a window of {reach} does not fit dimension {2 + i} of size {d}{least}")
        lows.append(low)
        highs.append(high)
        extras.append(extra)
        outs.append(out)
    return Window(*map(tuple, (kernel, stride, dilation, lows, highs, extras, outs)))


def pad_last(x: Node, low: Sequence[int], high: Sequence[int], value: float = 0) -> Node:
    """`pad` of the last dimensions."""
    rest = [0] * (x.rank - len(low))
    return g.pad(x, [*rest, *low], [*rest, *high], value)


def convolve(x: Node, w: Node, win: Window, groups: int) -> Node:
    """The contraction of x [N, C, ...], already padded, with w [M, C/groups, ...]."""
    n, m, c = x.shape[0], w.shape[0], w.shape[1]
    spatial = len(win.kernel)
    each = m // groups if groups > 1 and isinstance(m, int) else 1
    grouped = each > 1
    first = 3 if grouped else 2  # index number of the first spatial position
    inner = first + spatial  # ... and of the channel that is summed over
    channel: Form = (0, ((inner, 1),))
    row: Form = (0, ((1, 1),))
    if groups > 1:
        assert isinstance(c, int)
        channel = (0, ((1, c), (inner, 1)))
        row = (0, ((1, each), (2, 1))) if grouped else row
    taps = range(inner + 1, inner + 1 + spatial)
    maps: tuple[tuple[Form, ...], ...] = (
        ((0, ((0, 1),)), channel, *(win.form(i, first + i, t) for i, t in enumerate(taps))),
        (row, (0, ((inner, 1),)), *((0, ((t, 1),)) for t in taps)),
    )
    shape: tuple[Dim, ...] = (n, groups, each, *win.out) if grouped else (n, m, *win.out)
    return g.reshape(g.contract(x, w, shape, (c, *win.kernel), maps), (n, m, *win.out))


def conv(c: Context, x: Node, w: Node) -> Node:
    """A Conv node without its bias."""
    groups = c.attr("group", 1)
    kernel = [k for k in w.shape[2:] if isinstance(k, int)]
    given = c.attr("kernel_shape")
    if len(kernel) != w.rank - 2 or given is not None and list(given) != kernel:
        c.refuse(f"attribute 'kernel_shape' is {given}, the weights have {w.shape}")
    if groups > 1 and not isinstance(w.shape[0], int):
        c.refuse(f"weights {w.shape} in {groups} groups need a known number of outputs")
    if x.rank != w.rank or x.shape[1] != w.shape[1] * groups or (
            groups > 1 and w.shape[0] % groups):
        c.misfit(f"weights {w.shape} in {groups} groups do not fit the input {x.shape}")
    win = window(c, x.shape[2:], kernel)
    return convolve(pad_last(x, *win.pads), w, win, groups)


def channels(b: Node, rank: int) -> Node:
    """A vector over channels, to be broadcast against [N, C, ...]."""
    return g.reshape(b, (*b.shape, *(1,) * (rank - 2)))


@op("Conv", 1, 11, 22)
def _conv(c: Context, x: Node, w: Node, b: Node | None = None) -> Node:
    out = conv(c, x, w)
    return out if b is None else g.add(out, channels(b, out.rank))


def shifted(x: Node, zero: Node | None, axis: int | None = None) -> Node:
    """x minus its zero point, as int32; the zero point may be a vector along `axis`."""
    x = g.cast(x, INT32)
    if zero is None:
        return x
    zero = g.cast(zero, INT32)
    if zero.rank == 1 and zero.shape[0] != 1 and axis is not None:
        zero = g.reshape(zero, (*zero.shape, *(1,) * (x.rank - axis - 1)))
    elif zero.rank == 1:
        zero = g.reshape(zero, ())
    return g.sub(x, zero)


@op("ConvInteger", 10)
def conv_integer(
    c: Context, x: Node, w: Node, x_zero: Node | None = None, w_zero: Node | None = None
) -> Node:
    return conv(c, shifted(x, x_zero), shifted(w, w_zero, 0))


# transposed

@op("ConvTranspose", 1, 11, 22)
def conv_transpose(c: Context, x: Node, w: Node, b: Node | None = None) -> Node:
    """As a convolution with stride 1 that gives each input position's s*s*... output pixels.

    An output position u = s*q + p (before cropping) gets x[q - j] * w[p + s*j] for all j: for each
    phase p a convolution over q with the taps p, p + s, ... in reverse. The phases are made as
    output channels and then put in their places.
    """
    groups = c.attr("group", 1)
    n = x.rank - 2
    stride = c.attr("strides") or [1] * n
    dilation = c.attr("dilations") or [1] * n
    kernel = list(w.shape[2:])
    given = c.attr("kernel_shape")
    if given is not None and list(given) != kernel:
        c.refuse(f"attribute 'kernel_shape' is {given}, the weights have {w.shape}")
    sizes = [d for d in kernel if isinstance(d, int)]
    if x.rank != w.rank or len(sizes) != n or x.shape[1] != w.shape[0]:
        c.misfit(f"weights {w.shape} do not fit the input {x.shape}")
    reach = [(k - 1) * e + 1 for k, e in zip(sizes, dilation)]
    low, high = _transposed_pads(c, x.shape[2:], stride, reach)

    # zeros between the taps of a dilated kernel, and after them up to a multiple of the stride
    taps = [-(-r // s) for r, s in zip(reach, stride)]
    rows, per_group = w.shape[0], w.shape[1]
    for i, (k, e, r, s, j) in enumerate(zip(sizes, dilation, reach, stride, taps), 2):
        if e > 1:
            spread = g.reshape(w, (*w.shape[:i + 1], 1, *w.shape[i + 1:]))
            spread = g.pad(spread, [0] * spread.rank, [0] * (i + 1) + [e - 1] + [0] * (n + 1 - i))
            w = g.reshape(spread, (*w.shape[:i], k * e, *w.shape[i + 1:]))
            w = g.narrow(w, i, 0, r)
        w = g.pad(w, [0] * w.rank, [s * j - r if d == i else 0 for d in range(w.rank)])
    # [C, M/g, s*j, ...] -> [g, C/g, M/g, j, s, ...] -> [g, M/g, s, ..., C/g, j reversed, ...]
    assert isinstance(rows, int) and isinstance(per_group, int)
    split = [v for s, j in zip(stride, taps) for v in (j, s)]
    w = g.reshape(w, (groups, rows // groups, per_group, *split))
    js, phases = list(range(3, 3 + 2 * n, 2)), list(range(4, 4 + 2 * n, 2))
    w = g.permute(w, [0, 2, *phases, 1, *js])
    last = w.rank - n
    w = g.slice_(
        w, [0] * last + [j - 1 for j in taps], [1] * last + [-1] * n, w.shape
    )
    m = per_group * groups
    w = g.reshape(w, (m * prod(stride), rows // groups, *taps))

    # positions q from 0 up to the last that an output needs
    more = [-(-(r - h) // s) - 1 for r, h, s in zip(reach, high, stride)]
    positions = [dim(d + e) for d, e in zip(x.shape[2:], more)]
    x = pad_last(x, [j - 1 for j in taps], more)
    ones = (1,) * n
    win = Window(tuple(taps), ones, ones, (0,) * n, (0,) * n, (0,) * n, tuple(positions))
    out = convolve(x, w, win, groups)
    batch = x.shape[0]
    if prod(stride) > 1:
        out = g.reshape(out, (batch, m, *stride, *positions))
        order = [v for i in range(n) for v in (2 + n + i, 2 + i)]
        out = g.permute(out, [0, 1, *order])
        out = g.reshape(out, (batch, m, *(dim(q * s) for q, s in zip(positions, stride))))
    final = [dim((d - 1) * s + (r - lo - h)) for d, s, r, lo, h in
             zip([dim(q - e) for q, e in zip(positions, more)], stride, reach, low, high)]
    out = _crop(c, out, low, final)
    return out if b is None else g.add(out, channels(b, out.rank))


def _transposed_pads(
    c: Context, sizes: Sequence[Dim], stride: Sequence[int], reach: Sequence[int]
) -> tuple[list[int], list[int]]:
    """How much is cut off before and after; output_padding makes the latter less."""
    n = len(sizes)
    pads = c.attr("pads") or [0] * 2 * n
    extra = c.attr("output_padding") or [0] * n
    wanted = c.attr("output_shape")
    auto = c.attr("auto_pad", "NOTSET")
    if auto not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"):
        c.refuse(f"attribute 'auto_pad' is '{auto}', which is not a known kind")
    low, high = list(pads[:n]), [p - e for p, e in zip(pads[n:], extra)]
    if auto == "VALID":
        low, high = [0] * n, [-e for e in extra]
    if wanted or auto.startswith("SAME"):
        for i, (d, s, r) in enumerate(zip(sizes, stride, reach)):
            if wanted:
                if not isinstance(d, int):
                    c.refuse(f"attribute 'output_shape' is set and dimension {2 + i} is symbolic")
                total = s * (d - 1) + extra[i] + r - wanted[len(wanted) - n + i]
            else:
                total = extra[i] + r - s
            # a negative total makes the output longer than what the kernel reaches
            cut = max(total, 0)
            low[i] = cut // 2 if auto == "SAME_UPPER" else cut - cut // 2
            high[i] = total - low[i] - extra[i]
    return low, high


def _crop(c: Context, x: Node, low: Sequence[int], out: Sequence[Dim]) -> Node:
    for i, (b, d) in enumerate(zip(low, out), 2):
        x = g.narrow(x, i, b, d)
    return x
