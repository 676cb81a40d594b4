"""What a bundle stores of a plan's constants, and in how many bits.

A weights file is a row of sections, each at a multiple of 4 bytes: plain bytes, float16 numbers
that become float32 at load, or int8 numbers with a scale for each channel before them. The run
time's half of this is `weights` in runtime/loader.js.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tinyedge.plan import Plan

Array = np.ndarray[Any, np.dtype[Any]]
Section = tuple[Any, ...]
"""(kind, byte offset among the constants, count, digits): see runtime/loader.js."""

KINDS = ("float32", "float16", "int8")
RAW, HALF, SCALES, QUANTISED = range(4)

LEAST_CHANNEL = 8
"""Elements that a channel has at least: with fewer its scale takes what int8 saves."""


@dataclass(frozen=True)
class Stored:
    """Constants as they are stored. values: the bytes that the kernels will see."""

    sections: tuple[Section, ...]
    data: bytes
    values: bytes


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
    return replace(plan, constants=stored.values[:len(plan.constants)], variants=())


__all__ = ["KINDS", "Section", "Stored", "rounded", "store"]
