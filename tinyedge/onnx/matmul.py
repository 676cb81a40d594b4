"""Matrix products and Einsum, each one contraction."""

from __future__ import annotations

from collections.abc import Sequence

from .. import graph as g
from ..errors import ShapeError
from ..graph import Form, Node
from ..shape import Dim, same, show
from .conv import shifted
from .elementwise import scaled
from .registry import Context, op

Letter = str | int


def einsum(a: Node, b: Node, left: Sequence[Letter], right: Sequence[Letter],
           out: Sequence[Letter]) -> Node:
    """The product of two tensors whose dimensions carry letters, summed over those not in `out`.

    A dimension of size 1 is broadcast. ShapeError where sizes differ otherwise.
    """
    sizes: dict[Letter, Dim] = {}
    for x, letters in ((a, left), (b, right)):
        for d, letter in zip(x.shape, letters):
            if letter not in sizes or same(sizes[letter], 1):
                sizes[letter] = d
            elif not same(d, 1) and not same(d, sizes[letter]):
                raise ShapeError(f"shapes {show(a.shape)} and {show(b.shape)} can't be multiplied")
    over = [v for v in dict.fromkeys((*left, *right)) if v not in out]
    number = {letter: i for i, letter in enumerate((*out, *over))}

    def form(d: Dim, letter: Letter) -> Form:
        lone = same(d, 1) and not same(sizes[letter], 1)
        return (0, ()) if lone else (0, ((number[letter], 1),))

    maps = tuple(
        tuple(form(d, v) for d, v in zip(x.shape, letters))
        for x, letters in ((a, left), (b, right))
    )
    return g.contract(a, b, [sizes[v] for v in out], [sizes[v] for v in over], maps)


def matmul(c: Context, a: Node, b: Node, flip_a: bool = False, flip_b: bool = False) -> Node:
    """Numpy's matmul; `flip` swaps an operand's last two dimensions."""
    row, inner, column = "row", "inner", "column"
    batch = list(range(max(a.rank, b.rank) - 2))
    left: list[Letter] = [*batch[len(batch) - a.rank + 2:], row, inner] if a.rank > 1 else [inner]
    right: list[Letter] = [*batch[len(batch) - b.rank + 2:], inner, column] if b.rank > 1 else \
        [inner]
    if flip_a:
        left[-2:] = inner, row
    if flip_b:
        right[-2:] = column, inner
    if not a.rank or not b.rank or \
            not same(a.shape[left.index(inner)], b.shape[right.index(inner)]):
        c.misfit(f"shapes {show(a.shape)} and {show(b.shape)} can't be multiplied")
    out: list[Letter] = [*batch, *([row] if a.rank > 1 else []), *([column] if b.rank > 1 else [])]
    return einsum(a, b, left, right, out)


@op("MatMul", 1, 9, 13)
def _matmul(c: Context, a: Node, b: Node) -> Node:
    return matmul(c, a, b)


@op("FusedMatMul", 1, domain="com.microsoft")
def fused_matmul(c: Context, a: Node, b: Node) -> Node:
    if c.attr("transBatchA", 0) or c.attr("transBatchB", 0):
        c.refuse("attributes 'transBatchA' and 'transBatchB' are not supported")
    out = matmul(c, a, b, bool(c.attr("transA", 0)), bool(c.attr("transB", 0)))
    alpha = c.attr("alpha", 1.0)
    return out if alpha == 1 else scaled(out, alpha)


@op("MatMulInteger", 10)
def matmul_integer(
    c: Context, a: Node, b: Node, a_zero: Node | None = None, b_zero: Node | None = None
) -> Node:
    return matmul(c, shifted(a, a_zero, a.rank - 2), shifted(b, b_zero, b.rank - 1))


@op("Gemm", 1, 6, 7, 9, 11, 13)
def gemm(c: Context, a: Node, b: Node, bias: Node | None = None) -> Node:
    alpha, beta = c.attr("alpha"), c.attr("beta")
    c.ignore("broadcast")
    if a.rank != 2 or b.rank != 2:
        c.misfit(f"shapes {a.shape} and {b.shape} are not matrices")
    out = matmul(c, a, b, bool(c.attr("transA")), bool(c.attr("transB")))
    if alpha != 1:
        out = scaled(out, alpha)
    if bias is None or beta == 0:
        return out
    return g.add(out, bias if beta == 1 else scaled(bias, beta))


@op("Einsum", 12, 28)
def _einsum(c: Context, *xs: Node) -> Node:
    equation = c.attr("equation").replace(" ", "")
    source, arrow, target = equation.partition("->")
    terms = [_letters(t) for t in source.split(",")]
    if len(terms) != len(xs):
        c.refuse(f"attribute 'equation' is '{equation}', but there are {len(xs)} inputs")
    # dimensions under an ellipsis get numbers, counted from the end
    rests = [x.rank - sum(v != "..." for v in t) for x, t in zip(xs, terms)]
    most = max([r for r, t in zip(rests, terms) if "..." in t], default=0)
    named = [_spell(t, r, most) for t, r in zip(terms, rests)]
    if any(len(t) != x.rank for t, x in zip(named, xs)):
        c.misfit(f"attribute 'equation' is '{equation}', which does not fit the inputs' ranks")
    if arrow:
        out = _spell(_letters(target), most, most)
    else:
        every = [v for t in named for v in t]
        out = [*range(most), *sorted(v for v in set(every) if isinstance(v, str)
                                     and every.count(v) == 1)]
    if len(xs) == 1:
        return einsum(xs[0], g.like(xs[0], 1), named[0], [], out)
    total, letters = xs[0], named[0]
    for i, (x, t) in enumerate(zip(xs[1:], named[1:]), 2):
        later = {v for rest in named[i:] for v in rest} | set(out)
        kept = out if i == len(xs) else [v for v in dict.fromkeys((*letters, *t)) if v in later]
        total, letters = einsum(total, x, letters, t, kept), list(kept)
    return total


def _letters(term: str) -> list[str]:
    head, dots, tail = term.partition("...")
    return [*head, *([dots] if dots else []), *tail]


def _spell(term: Sequence[str], rest: int, most: int) -> list[Letter]:
    out: list[Letter] = []
    for v in term:
        out.extend(range(most - rest, most) if v == "..." else [v])
    return out
