"""What a plan says of its constants, so that an exporter can store them in fewer bits.

The constants of a plan are bytes in the order that kernels want. This tells which of them are
float32 weights, and which output channel each element belongs to. Made while the plan is, of the
graph after all passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from .shape import upper

if TYPE_CHECKING:
    from .codegen.lower import Layout
    from .graph import Valid
    from .schedule import Buffer

LEAST = 1024
"""Elements from which on narrowing is worth it; smaller constants are biases and tables."""


def record(graph: Valid, places: Mapping[Buffer, int]) -> tuple[Any, ...]:
    """What narrowing needs to know of a plan's constants, for ``plan.provenance["weights"]``.

    places: buffer -> byte offset among the constants. Gives (offset, elements, channels, digits)
    for each large float32 constant: an element's channel is the sum of (number // stride % extent)
    * factor over digits (stride, extent, factor); no digits where nothing tells the channels apart.
    """
    channels: dict[int, tuple[int, ...]] = {}
    for n in graph.nodes():
        if n.op == "contract" and n.inputs[1].op == "const":
            rank = len(n.shape)
            channels[id(n.inputs[1].value)] = tuple(
                d for d, (_, terms) in enumerate(n["maps"][1]) if any(i < rank for i, _ in terms))
        elif n.op == "gather" and n.inputs[0].op == "const":
            channels.setdefault(id(n.inputs[0].value), (n["axis"],))
    out = []
    for b, offset in sorted(places.items(), key=lambda item: item[1]):
        count = b.nbytes.hi // b.dtype.itemsize
        if b.dtype.name == "float32" and count >= LEAST:
            axes = channels.get(id(b.array), ())
            room = [upper(d) for d in b.layout.room]
            digits = _digits(b.layout, room, axes) if axes else ()
            out.append((offset, count, prod(room[d] for d in axes), digits))
    return tuple(out)


def filters(graph: Valid, places: Mapping[Buffer, int]) -> tuple[Any, ...]:
    """Which constants are transformed filters, which an exporter can store as they were, for
    ``plan.provenance["filters"]``.

    Gives (offset, blocks, inner, tile, taps): float32 [blocks, products, inner], where each row of
    products is what `tinyedge.winograd.filter_transform` makes of a row of taps.
    """
    forms = {id(n.inputs[1].value): (n.inputs[0]["tile"], tuple(n.inputs[0]["taps"]))
             for n in graph.nodes() if n.op == "contract" and n.inputs[0].op == "winograd_in"
             and n.inputs[1].op == "const"}
    out = []
    for b, offset in sorted(places.items(), key=lambda item: item[1]):
        found, layout = forms.get(id(b.array)), b.layout
        if found and b.dtype.name == "float32" and not (layout.block and layout.block[0] == 0):
            count, inner, rows = (upper(d) for d in (
                layout.size, layout.strides[0], layout.room[0]))
            out.append((offset, count // (rows * inner), inner, *found))
    return tuple(out)


def _digits(layout: Layout, room: list[int], axes: tuple[int, ...]) -> tuple[Any, ...]:
    """(stride, extent, factor) of each part of the memory's order that belongs to `axes`."""
    # (dimension, extent, what one step is worth in it), innermost first
    parts: list[tuple[int, int, int]] = []
    block, quad = layout.block, layout.quad
    if quad is not None:
        parts.append((*quad, 1))
    if block:
        parts.append((block[0], block[1], 1))
    for d in reversed(layout.order):
        if not block or d != block[0]:
            size = quad[1] if quad is not None and quad[0] == d else 1
            parts.append((d, room[d] // size, size))
    if block:
        parts.append((block[0], room[block[0]] // block[1], block[1]))
    worth = {d: prod(room[e] for e in axes if e > d) for d in axes}
    out, stride = [], 1
    for d, extent, step in parts:
        if d in worth and extent > 1:
            out.append((stride, extent, step * worth[d]))
        stride *= extent
    return tuple(out)


__all__ = ["LEAST", "filters", "record"]
