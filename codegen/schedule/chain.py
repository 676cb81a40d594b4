"""Several kernels as one, where each piece needs only what the same piece has made before.

Beside `cpu`, which schedules each of the kernels by itself, with the places along one dimension
(the feature) kept together. Rows of a softmax or a normalisation, of an attention, of a depthwise
convolution and the product behind it then go through one after the other while they are in the
cache, and threads need not meet in between.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from math import prod

from .. import symbolic
from ..ir import Expr, For, Kernel, Set, Stmt, Store, const, make, rebuild, substitute, var
from .cpu import PIECES, Nest, pieces, replaced

CACHED_BYTES, LOCAL_BYTES = 1 << 13, 1 << 16
"""Bytes of a piece's own memory that leave the first-level cache room for everything else, and the
most, since it lies on the stack."""


def rewritten(nest: Nest, index: Callable[[int, Expr], Expr], numbers: Mapping[int, int]) -> Nest:
    """The nest with other places in its buffers, and with other numbers of these."""
    memo: dict[Expr, Expr] = {}

    def expr(e: Expr) -> Expr:
        if not e.args or e.op == "reg":
            return e
        found = memo.get(e)
        if found is None:
            args = tuple(map(expr, e.args))
            if e.op in ("load", "word", "prefetch"):
                found = make(e.op, (index(e.attr, args[0]), *args[1:]),
                             numbers.get(e.attr, e.attr), e.dtype, e.lo, e.hi)
            else:
                found = e if args == e.args else rebuild(e, args)
            memo[e] = found
        return found

    def stmt(s: Stmt) -> Stmt:
        if isinstance(s, For):
            return For(s.var, s.extent, tuple(map(stmt, s.body)))
        if isinstance(s, Set):
            return Set(s.reg, expr(s.value))
        return Store(numbers.get(s.buffer, s.buffer), index(s.buffer, expr(s.index)),
                     expr(s.value), s.guard)

    return Nest(nest.loops, tuple(map(stmt, nest.body)), nest.lanes)


def renumbered(nest: Nest, numbers: Mapping[int, int]) -> Nest:
    """The nest with its buffers numbered anew."""
    return rewritten(nest, lambda buffer, e: e, numbers)


def grids(nest: Nest) -> dict[int, tuple[int, int]]:
    """Numbers of pieces that the nest can be cut into -> (whole outer loops, parts of the next)."""
    out = {1: (0, 1)}
    done = 1
    for n, (_, extent) in enumerate(nest.loops):
        if extent.op != "const":
            break
        e = int(extent.attr)
        for parts in range(2, e + 1):
            if e % parts == 0:
                out.setdefault(done * parts, (n, parts))
        done *= e
    return out


def cut(nest: Nest, taken: int, parts: int) -> tuple[Nest, int]:
    """The nest with loop number `taken` split, so that `parts` of it are a loop of their own, and
    the number of loops that are a piece's then."""
    if parts == 1:
        return nest, taken
    v, extent = nest.loops[taken]
    size = extent.hi // parts
    if size == 1:
        return nest, taken + 1
    outer, inner = var(f"{v.attr[0]}a", 0, parts - 1), var(f"{v.attr[0]}b", 0, size - 1)
    env = {v: outer * size + inner}
    loops = (*nest.loops[:taken], (outer, const(parts)), (inner, const(size)),
             *nest.loops[taken + 1:])
    memo: dict[Expr, Expr] = {}
    return Nest(loops, tuple(replaced(s, env, memo) for s in nest.body), nest.lanes), taken + 1


def places(nest: Nest, buffer: int) -> Iterator[Expr]:
    """The indices at which the nest reads or writes a buffer."""
    seen: set[Expr] = set()

    def expr(e: Expr) -> Iterator[Expr]:
        if e in seen:
            return
        seen.add(e)
        if e.op in ("load", "word") and e.attr == buffer:
            yield e.args[0]
        for a in e.args:
            yield from expr(a)

    def stmts(body: Sequence[Stmt]) -> Iterator[Expr]:
        for s in body:
            if isinstance(s, For):
                yield from stmts(s.body)
                continue
            yield from expr(s.value)
            if isinstance(s, Store):
                yield from expr(s.index)
                if s.buffer == buffer:
                    yield s.index

    return stmts(nest.body)


def stride(nest: Nest, taken: int, buffer: int) -> int | None:
    """How far apart the parts of a buffer lie that pieces of the nest use; None where they are not
    apart or not at equal distances."""
    loops = [(v, e.hi) for v, e in nest.loops[:taken] if e.hi > 1]
    after = [prod(e for _, e in loops[n + 1:]) for n in range(len(loops))]
    outer = {v: const(0) for v, _ in loops}
    found: int | None = None
    for index in places(nest, buffer):
        terms, _ = symbolic.linear(index)
        steps = {terms.get(v, 0) // a if terms.get(v, 0) % a == 0 else 0
                 for (v, _), a in zip(loops, after)}
        if len(steps) != 1 or (found is not None and steps != {found}):
            return None
        [found] = steps
        rest = substitute(index, outer)
        if any(t not in outer and not t.vars.isdisjoint(outer) for t in terms) or \
                not 0 <= rest.lo <= rest.hi < found:
            return None
    return found


def apart(parts: Sequence[tuple[Nest, int]], shared: Sequence[int]) -> dict[int, int] | None:
    """How many elements of each shared buffer are a piece's own; None where others need them."""
    out = {}
    for buffer in shared:
        strides = {stride(n, taken, buffer) for n, taken in parts if any(places(n, buffer))}
        step = strides.pop() if len(strides) == 1 else None
        if step is None:
            return None
        out[buffer] = step
    return out


def chain(nests: Sequence[Nest], shared: Sequence[int], local: Mapping[int, int]) -> Kernel | None:
    """One kernel that does each piece of the nests in turn, or None where a piece of one needs what
    other pieces of those before it make.

    shared: numbers of the buffers that one nest writes and later ones read. local: those of them
    that nothing else reads, with the bytes of an element: a piece has its part of them to itself.
    """
    ways = [grids(n) for n in nests]
    counts = sorted(set.intersection(*(set(w) for w in ways)))
    # the fewest pieces of those that are enough, else as many as there can be
    first = [c for c in counts if c >= PIECES]
    parts, steps, own, count = None, {}, float("inf"), 1
    for c in (*first, *reversed(counts[:len(counts) - len(first)])):
        if parts is not None and (own <= CACHED_BYTES or c < PIECES):
            break
        made = [cut(n, *w[c]) for n, w in zip(nests, ways)]
        found = apart(made, shared) if c > 1 else {}
        if found is None:
            continue
        size = sum(found[b] * size for b, size in local.items()) if c > 1 else own
        if parts is None or size < own:
            parts, steps, own, count = made, found, size, c
    if parts is None:
        return None
    if own > LOCAL_BYTES:
        local = {}
    g = var("g", 0, count - 1)
    body: list[Stmt] = []
    for n, taken in parts:
        body += pieces(inside(n, taken, set(local)), taken, g)
    return Kernel("k", (), (), g, const(count), tuple(body), max(n.lanes for n in nests),
                  {b: steps[b] for b in local})


def inside(nest: Nest, taken: int, local: Container[int]) -> Nest:
    """The nest with its places in local buffers counted from where its piece begins."""
    outer = {v: const(0) for v, _ in nest.loops[:taken]}

    def index(buffer: int, e: Expr) -> Expr:
        return substitute(e, outer) if buffer in local else e

    return rewritten(nest, index, {})


__all__ = ["chain", "renumbered"]
