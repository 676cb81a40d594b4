"""Memory planning: every buffer's place in an arena, and which steps must wait for which.

After kernel formation. Buffers whose lifetimes do not meet share memory; a kernel's result may take
the place of an operand that dies there and that it reads only at the index it writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .codegen.lower import Layout
from .plan import ALIGNMENT
from .schedule import Buffer


@dataclass
class Access:
    """What one step touches, in order of execution.

    reads, writes: root buffers. inplace: operands whose memory the written buffer may take.
    """

    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    inplace: tuple[Buffer, ...] = ()
    moves: bool = False


@dataclass
class Timeline:
    """Steps in order; a loop's body stands between its first and last position."""

    accesses: list[Access] = field(default_factory=list)
    loops: list[tuple[int, int]] = field(default_factory=list)

    def lifetimes(self) -> dict[Buffer, tuple[int, int]]:
        """First and last position of every scratch buffer."""
        life: dict[Buffer, tuple[int, int]] = {}
        for at, access in enumerate(self.accesses):
            for b in (*access.writes, *access.reads):
                if b.kind == "scratch":
                    first, _ = life.get(b, (at, at))
                    life[b] = (first, at)
        # what is older than a loop and used in it must outlive every turn
        changed = True
        while changed:
            changed = False
            for b, (first, last) in life.items():
                for start, end in self.loops:
                    if first < start <= last < end:
                        life[b] = (first, end)
                        last, changed = end, True
        return life


def pack(
    timeline: Timeline, elsewhere: set[Buffer], alignment: int = ALIGNMENT, halos: bool = True,
) -> tuple[dict[Buffer, int], int]:
    """(offset of each scratch buffer, size of the arena); large buffers first, lowest fit.

    elsewhere: buffers that have a place already. alignment: of each place, in bytes. halos: whether
    those are written in every run; if not, a buffer that has one shares its place only with buffers
    of the same layout and width of elements, whose halo stays as it was at first: zero.
    """
    life = {b: span for b, span in timeline.lifetimes().items() if b not in elsewhere}
    sizes = {b: -(-max(b.nbytes.hi, 1) // alignment) * alignment for b in life}
    # buffers that may share one place because one is computed over the other
    shared: dict[Buffer, Buffer] = {}
    for at, access in enumerate(timeline.accesses):
        if len(access.writes) != 1 or access.writes[0].kind != "scratch":
            continue
        target = access.writes[0]
        for b in access.inplace if target in life else ():
            if b in life and life[b][1] == at and life[target][0] == at and \
                    sizes[b] == sizes[target] and b not in shared.values():
                shared[target] = shared.get(b, b)
                break
    groups: dict[Buffer, list[Buffer]] = {}
    for b in life:
        groups.setdefault(_top(shared, b), []).append(b)
    placed: list[tuple[int, int, int, int]] = []  # first, last, offset, end
    offsets: dict[Buffer, int] = {}
    total = 0
    spans = {r: (min(life[b][0] for b in bs), max(life[b][1] for b in bs), sizes[r])
             for r, bs in groups.items()}
    order = sorted(groups, key=lambda r: (-spans[r][2], spans[r][0]))
    apart = [] if halos else [r for r in order if any(h != (0, 0) for h in r.layout.halo)]
    for r in (r for r in order if r not in apart):
        first, last, size = spans[r]
        offset = 0
        for f, t, o, e in sorted(placed, key=lambda p: p[2]):
            if f <= last and first <= t and o < offset + size:
                offset = max(offset, e)
        placed.append((first, last, offset, offset + size))
        for b in groups[r]:
            offsets[b] = offset
        total = max(total, offset + size)
    # (layout, bits of an element), offset -> spans
    taken: dict[tuple[tuple[Layout, int], int], list[tuple[int, int]]] = {}
    for r in apart:
        first, last, size = spans[r]
        like = r.layout, r.dtype.bits
        place = next((p for other, p in taken if other == like and not any(
            f <= last and first <= t for f, t in taken[other, p])), total)
        taken.setdefault((like, place), []).append((first, last))
        total = max(total, place + size)
        offsets.update(dict.fromkeys(groups[r], place))
    return offsets, total


def _top(shared: dict[Buffer, Buffer], b: Buffer) -> Buffer:
    while b in shared:
        b = shared[b]
    return b


class Hazards:
    """Decides, step by step, whether a step must wait for those before it.

    place(buffer) gives (arena, first byte, end). Parts of one buffer written by several steps are
    disjoint, so writers of one buffer need not wait for each other.
    """

    def __init__(self, place: dict[Buffer, tuple[int, int, int]]) -> None:
        self.place = place
        self.written: set[Buffer] = set()
        self.read: set[Buffer] = set()

    def must_wait(self, access: Access) -> bool:
        """Whether `access` conflicts with a step since the last wait; records it."""
        conflict = self._meets(access.reads, self.written, same=True) or \
            self._meets(access.writes, self.read, same=True) or \
            self._meets(access.writes, self.written, same=False)
        if conflict:
            self.flush()
        self.written |= set(access.writes)
        self.read |= set(access.reads)
        return conflict

    def flush(self) -> None:
        """All threads have met."""
        self.written.clear()
        self.read.clear()

    def _meets(self, mine: Iterable[Buffer], theirs: set[Buffer], same: bool) -> bool:
        for a in mine:
            arena, lo, hi = self.place[a]
            for b in theirs:
                if a is b:
                    if same:
                        return True
                    continue
                other, l2, h2 = self.place[b]
                if arena == other and lo < h2 and l2 < hi:
                    return True
        return False
