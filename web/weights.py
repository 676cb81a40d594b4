"""What a bundle stores of a plan's constants, and in how many bits.

A weights file is a row of sections, each at a multiple of 4 bytes: plain bytes, float16 numbers
that become float32 at load, or int8 numbers with a scale for each channel before them. The run
time's half of this is `weights` in runtime/loader.js.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from tinyedge.plan import Plan

if TYPE_CHECKING:
    from tinyedge.graph import Node, Valid
    from tinyedge.schedule import Buffer

Array = np.ndarray[Any, np.dtype[Any]]
Section = tuple[Any, ...]
"""(kind, byte offset among the constants, count, digits): see runtime/loader.js."""

KINDS = ("float32", "float16", "int8")
RAW, HALF, SCALES, QUANTISED = range(4)

LEAST = 1024
"""Elements from which on narrowing is worth it; smaller constants are biases and tables."""

LEAST_CHANNEL = 8
"""Elements that a channel has at least: with fewer its scale takes what int8 saves."""


@dataclass(frozen=True)
class Stored:
    """Constants as they are stored. values: the bytes that the kernels will see."""

    sections: tuple[Section, ...]
    data: bytes
    values: bytes


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
            room = [int(d) for d in b.layout.room]
            digits = _digits(b.layout, room, axes) if axes else ()
            out.append((offset, count, prod(room[d] for d in axes), digits))
    return tuple(out)


def _digits(layout: Any, room: list[int], axes: tuple[int, ...]) -> tuple[Any, ...]:
    """(stride, extent, factor) of each part of the memory's order that belongs to `axes`."""
    # (dimension, extent, what one step is worth in it), innermost first
    parts: list[tuple[int, int, int]] = []
    block, quad = layout.block, layout.quad
    if quad is not None:
        parts.append((quad, 4, 1))
    if block:
        parts.append((block[0], block[1], 1))
    for d in reversed(layout.order):
        if not block or d != block[0]:
            parts.append((d, room[d] // 4, 4) if d == quad else (d, room[d], 1))
    if block:
        parts.append((block[0], room[block[0]] // block[1], block[1]))
    worth = {d: prod(room[e] for e in axes if e > d) for d in axes}
    out, stride = [], 1
    for d, extent, step in parts:
        if d in worth and extent > 1:
            out.append((stride, extent, step * worth[d]))
        stride *= extent
    return tuple(out)


def store(plan: Plan, kind: str) -> Stored:
    """A plan's constants with weights narrowed to `kind`."""
    constants = bytes(plan.constants)
    constants += bytes(-len(constants) % 4)
    if not constants:
        return Stored((), b"", b"")
    if kind == "float32":
        return Stored(((RAW, 0, len(constants)),), constants, constants)
    sections: list[Section] = []
    data, values = bytearray(), bytearray(constants)
    at = 0

    def raw(end: int) -> None:
        nonlocal at
        if end > at:
            sections.append((RAW, at, end - at))
            data.extend(constants[at:end])
            at = end

    for offset, count, channels, digits in plan.provenance.get("weights", ()):
        whole = np.frombuffer(constants, np.float32, count, offset)
        narrowed = _quantised(whole, channels, digits) if kind == "int8" and digits else None
        if narrowed is not None:
            scales, codes, back = narrowed
            raw(offset)
            sections += [(SCALES, 0, channels), (QUANTISED, offset, count, digits)]
            data += scales.tobytes() + codes.tobytes()
        else:
            with np.errstate(over="ignore"):
                half = whole.astype(np.float16)
            if not np.isfinite(half).all():
                continue
            raw(offset)
            sections.append((HALF, offset, count))
            data += half.tobytes()
            back = half.astype(np.float32)
        data += bytes(-len(data) % 4)
        values[offset:offset + 4 * count] = back.tobytes()
        at = offset + 4 * count
    raw(len(constants))
    return Stored(tuple(sections), bytes(data), bytes(values))


def _quantised(whole: Array, channels: int, digits: Iterable[tuple[int, int, int]]
               ) -> tuple[Array, Array, Array] | None:
    """(scales, codes, the values that they stand for), symmetric; None where it does not pay."""
    if whole.size < LEAST_CHANNEL * channels or not np.isfinite(whole).all():
        return None
    number = np.arange(whole.size)
    channel = sum(((number // stride % extent) * factor for stride, extent, factor in digits),
                  np.zeros(whole.size, np.int64))
    largest = np.zeros(channels, np.float32)
    np.maximum.at(largest, channel, np.abs(whole))
    scales = np.where(largest > 0, largest / np.float32(127), np.float32(1)).astype(np.float32)
    codes = np.clip(np.rint(whole / scales[channel]), -127, 127).astype(np.int8)
    return scales, codes, codes.astype(np.float32) * scales[channel]


def rounded(plan: Plan, stored: Stored) -> Plan:
    """The plan with the constants that a bundle's kernels will see."""
    from dataclasses import replace

    return replace(plan, constants=stored.values[:len(plan.constants)], variants=())


__all__ = ["KINDS", "Section", "Stored", "record", "rounded", "store"]
