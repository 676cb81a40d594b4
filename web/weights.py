"""What a bundle stores of a plan's constants, and in how many bits.

A weights file is a row of sections, each at a multiple of 4 bytes: plain bytes, float16 numbers
that become float32 at load, or int8 numbers with a scale for each channel before them. Transformed
filters are several times as large as the filters themselves: these are stored, behind where the
others begin, and transformed in place after they are loaded. The run time's half of this is
`weights` in runtime/loader.js, and `filter` in a module for WebAssembly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tinyedge.drivers.wasm.executor import MOST_TAPS
from tinyedge.plan import Plan
from tinyedge.winograd import filter_transform

Array = np.ndarray[Any, np.dtype[Any]]
Section = tuple[Any, ...]
"""(kind, byte offset among the constants, count, digits): see runtime/loader.js."""

KINDS = ("float32", "float16", "int8")
RAW, HALF, SCALES, QUANTISED = range(4)

EXACT = 2e-6
"""Largest difference that storing a filter before its transform may make, relative to the largest
of its values: that of their rounding."""

LEAST_CHANNEL = 8
"""Elements that a channel has at least: with fewer its scale takes what int8 saves."""


@dataclass(frozen=True)
class Stored:
    """Constants as they are stored. values: the bytes that the kernels will see. filters: (byte
    offset among the constants, blocks, inner, matrix) of those that are transformed at load, by the
    matrix of that number among `matrices`, float32 [places, taps]."""

    sections: tuple[Section, ...]
    data: bytes
    values: bytes
    filters: tuple[tuple[int, int, int, int], ...] = ()
    matrices: tuple[Array, ...] = ()


@dataclass(frozen=True)
class _Filters:
    """Filters that were transformed: before [blocks, taps, inner], by matrix [places, taps]."""

    before: Array
    matrix: Array

    @staticmethod
    def of(after: Array, blocks: int, inner: int, tile: int, taps: tuple[int, ...]
           ) -> _Filters | None:
        """None for what is no transform, or not of a form that the run time takes."""
        exact = filter_transform(tile, taps)
        places, count = exact.shape
        if inner % 4 or count > MOST_TAPS:
            return None
        after = after.reshape(blocks, places, inner)
        made = _Filters((np.linalg.pinv(exact) @ after).astype(np.float32),
                        exact.astype(np.float32))
        largest = np.abs(after).max(initial=0)
        off = np.abs(made.after(made.before) - after).max(initial=0)
        return made if off <= EXACT * largest else None

    def after(self, before: Array) -> Array:
        """What the run time makes of such filters, to the bit."""
        before = before.reshape(self.before.shape)
        out = np.zeros((before.shape[0], self.matrix.shape[0], before.shape[2]), np.float32)
        for k in range(before.shape[1]):
            out += self.matrix[:, k, None] * before[:, None, k]
        return out

    def channels(self, channels: int, digits: Iterable[tuple[int, int, int]]
                 ) -> tuple[int, tuple[tuple[int, int, int], ...]]:
        """Which channel an element belongs to, before instead of after: each place was one of its
        own, and all taps have the same."""
        inner, (places, taps) = self.before.shape[2], self.matrix.shape
        return channels // places, tuple(
            (stride if stride < inner else stride // places * taps, extent, factor)
            for stride, extent, factor in digits if stride != inner)


def store(plan: Plan, kind: str) -> Stored:
    """A plan's constants with weights narrowed to `kind`."""
    constants = bytes(plan.constants)
    constants += bytes(-len(constants) % 4)
    if not constants:
        return Stored((), b"", b"")
    known = {offset: form for offset, *form in plan.provenance.get("filters", ())}
    sections: list[Section] = []
    data, values = bytearray(), bytearray(constants)
    filters: list[tuple[int, int, int, int]] = []
    matrices: list[Array] = []
    at = 0

    def raw(end: int) -> None:
        nonlocal at
        if end > at:
            sections.append((RAW, at, end - at))
            data.extend(constants[at:end])
            at = end

    for offset, count, channels, digits in plan.provenance.get("weights", ()):
        end = offset + 4 * count
        whole = np.frombuffer(constants, np.float32, count, offset)
        form = _Filters.of(whole, *known[offset]) if offset in known else None
        if form:
            whole = form.before.reshape(-1)
            channels, digits = form.channels(channels, digits)
        narrowed = _narrowed(kind, end - 4 * whole.size, whole, channels, digits)
        if narrowed is None and form is None:
            continue
        raw(offset)
        made, stored, back = narrowed or (
            [(RAW, end - 4 * whole.size, 4 * whole.size)], whole.tobytes(), whole)
        sections += made
        data += stored + bytes(-len(stored) % 4)
        if form:
            index = next((i for i, m in enumerate(matrices) if np.array_equal(m, form.matrix)),
                         len(matrices))
            matrices += [form.matrix] * (index == len(matrices))
            filters.append((offset, form.before.shape[0], form.before.shape[2], index))
            back = form.after(back)
        values[offset:end] = back.tobytes()
        at = end
    raw(len(constants))
    return Stored(tuple(sections), bytes(data), bytes(values), tuple(filters), tuple(matrices))


def _narrowed(kind: str, at: int, whole: Array, channels: int, digits: Any
              ) -> tuple[list[Section], bytes, Array] | None:
    """(sections, what is stored, the values that it stands for); None where it stays float32."""
    if kind == "float32":
        return None
    if kind == "int8" and digits and (found := _quantised(whole, channels, digits)):
        scales, codes, back = found
        return ([(SCALES, 0, channels), (QUANTISED, at, whole.size, digits)],
                scales.tobytes() + codes.tobytes(), back)
    with np.errstate(over="ignore"):
        half = whole.astype(np.float16)
    if not np.isfinite(half).all():
        return None
    return [(HALF, at, whole.size)], half.tobytes(), half.astype(np.float32)


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
