"""LSTM, GRU and RNN: one projection of all inputs, then a loop (or its unrolled steps)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .. import graph as g
from ..dtype import BOOL, INT64
from ..graph import Node
from ..shape import Dim
from .control import close
from .elementwise import (
    elu,
    hard_sigmoid,
    leaky_relu,
    plus,
    relu,
    scaled,
    sigmoid,
    softplus,
    thresholded,
)
from .matmul import einsum
from .registry import Context, extent, op

UNROLLED = 8
"""Sequences up to this length become straight code."""

Activation = Callable[[Node], Node]
Step = Callable[[Node, list[Node]], list[Node]]
"""(projected input of one moment, state) -> state; the first state is the output."""


def activations(c: Context, default: Sequence[str], directions: int) -> list[list[Activation]]:
    """For each direction its functions, with their parameters bound."""
    names = c.attr("activations") if c.has("activations") else list(default) * directions
    alphas = iter(c.attr("activation_alpha") or [])
    betas = iter(c.attr("activation_beta") or [])

    def make(name: str) -> Activation:
        kind = name.lower()
        if kind in ("tanh", "sigmoid", "relu", "softplus", "softsign"):
            return {"tanh": g.tanh, "sigmoid": sigmoid, "relu": relu, "softplus": softplus,
                    "softsign": lambda x: g.div(x, plus(g.abs_(x), 1))}[kind]
        if kind in ("leakyrelu", "thresholdedrelu", "elu"):
            alpha = next(alphas, {"leakyrelu": 0.01, "thresholdedrelu": 1.0, "elu": 1.0}[kind])
            f = {"leakyrelu": leaky_relu, "thresholdedrelu": thresholded, "elu": elu}[kind]
            return lambda x: f(x, alpha)
        if kind == "hardsigmoid":
            alpha, beta = next(alphas, 0.2), next(betas, 0.5)
            return lambda x: hard_sigmoid(x, alpha, beta)
        if kind in ("affine", "scaledtanh"):
            alpha, beta = next(alphas, 1.0), next(betas, 0.0 if kind == "affine" else 1.0)
            if kind == "affine":
                return lambda x: plus(scaled(x, alpha), beta)
            return lambda x: scaled(g.tanh(scaled(x, beta)), alpha)
        c.refuse(f"attribute 'activations' has '{name}', which is not supported")

    functions = [make(n) for n in names]
    each = len(default)
    if len(functions) != each * directions:
        c.refuse(f"attribute 'activations' has {len(functions)} entries, not {each * directions}")
    return [functions[i * each:(i + 1) * each] for i in range(directions)]


def clipped(c: Context, f: Activation) -> Activation:
    limit = c.attr("clip")
    if limit is None:
        return f
    return lambda x: f(g.minimum(g.maximum(x, g.like(x, -limit)), g.like(x, limit)))


def project(x: Node, w: Node) -> Node:
    """x [..., k] times w [m, k], transposed."""
    letters = list(range(x.rank - 1))
    return einsum(x, w, [*letters, "k"], ["m", "k"], [*letters, "m"])


def pick(x: Node, index: int) -> Node:
    """x[index]."""
    return g.reshape(g.narrow(x, 0, index, 1), x.shape[1:])


def gates(x: Node, count: int) -> list[Node]:
    """x [..., count*h] in `count` parts."""
    last = x.shape[-1]
    assert isinstance(last, int)
    h = last // count
    return [g.narrow(x, x.rank - 1, i * h, h) for i in range(count)]


def unroll(
    c: Context, x: Node, state: list[Node], step: Step, lengths: Node | None, reverse: bool
) -> tuple[Node, list[Node]]:
    """Runs `step` over x [T, B, ...]: all outputs [T, B, h] and the last state."""
    total = x.shape[0]

    def advance(i: Node | int, now: Node, old: list[Node]) -> tuple[Node, list[Node]]:
        new = step(now, old)
        if lengths is None:
            return new[0], new
        moment = g.const(i, INT64) if isinstance(i, int) else i
        limit = g.reshape(g.cast(lengths, INT64), (*lengths.shape, 1))
        alive = g.lt(moment, limit)
        kept = [g.where(alive, a, b) for a, b in zip(new, old)]
        return g.where(alive, new[0], g.like(new[0], 0)), kept

    if isinstance(total, int) and total <= UNROLLED:
        outputs: list[Node] = []
        order = range(total - 1, -1, -1) if reverse else range(total)
        for t in order:
            y, state = advance(t, pick(x, t), state)
            outputs.append(g.reshape(y, (1, *y.shape)))
        return g.concat(outputs[::-1] if reverse else outputs, 0), state
    i = c.importer.fresh("step", (), INT64)
    inner = [c.importer.fresh("state", s.shape, s.dtype) for s in state]
    at = g.sub(extent(total), g.add(i, g.like(i, 1))) if reverse else i
    y, after = advance(at, g.gather(x, [at], 0), inner)
    outputs = [g.const(True, BOOL), *after, y]
    body, captures = close([i, *inner], [outputs], c.importer)
    results = g.loop(extent(total), g.const(True, BOOL), state, captures, body[0], total)
    stacked = results[len(state)]
    return g.slice_(stacked, [_last(c, total)] + [0] * 2, [-1, 1, 1], stacked.shape) \
        if reverse else stacked, results[:len(state)]


def _last(c: Context, total: Dim) -> int:
    if not isinstance(total, int):
        c.refuse("a reverse direction over a sequence of symbolic length; bind the dimension")
    return total - 1


Cell = Callable[[int, list[Activation], Node, Node | None], tuple[Node | None, Step]]


def recurrent(
    c: Context, x: Node, w: Node, r: Node, b: Node | None, lengths: Node | None,
    initial: list[Node | None], default: Sequence[str], cell: Cell,
) -> list[Node]:
    """What the three operators share. `cell(direction, functions, recurrent weights, recurrent
    bias)` gives an input bias to add beforehand (or None) and the step."""
    direction = c.attr("direction", "forward")
    if direction not in ("forward", "reverse", "bidirectional"):
        c.refuse(f"attribute 'direction' is '{direction}', which is not a known kind")
    c.ignore("hidden_size", "output_sequence")
    batch_first = bool(c.attr("layout", 0))
    if batch_first:
        x = g.permute(x, (1, 0, 2))
        initial = [None if s is None else g.permute(s, (1, 0, 2)) for s in initial]
    n, hidden, batch = w.shape[0], r.shape[2], x.shape[1]
    assert isinstance(n, int) and isinstance(hidden, int)
    if n != (2 if direction == "bidirectional" else 1):
        c.refuse(f"attribute 'direction' is '{direction}', the weights have {n} directions")
    if lengths is not None:
        value = c.constant(lengths)
        if value is not None and isinstance(x.shape[0], int) and (value == x.shape[0]).all():
            lengths = None
    functions = activations(c, default, n)
    outputs, finals = [], []
    for d in range(n):
        reverse = direction == "reverse" or d == 1
        wb = rb = None
        if b is not None:
            wb, rb = gates(pick(b, d), 2)
        extra, step = cell(d, functions[d], pick(r, d), rb)
        projected = project(x, pick(w, d))
        if wb is not None:
            projected = g.add(projected, wb)
        if extra is not None:
            projected = g.add(projected, extra)
        state = [g.full((batch, hidden), 0, x.dtype) if s is None else pick(s, d) for s in initial]
        y, last = unroll(c, projected, state, step, lengths, reverse)
        outputs.append(g.reshape(y, (y.shape[0], 1, *y.shape[1:])))
        finals.append([g.reshape(s, (1, *s.shape)) for s in last])
    out = [g.concat(outputs, 1), *(g.concat(list(s), 0) for s in zip(*finals))]
    if batch_first:
        out = [g.permute(out[0], (2, 0, 1, 3)), *(g.permute(s, (1, 0, 2)) for s in out[1:])]
    return out


@op("LSTM", 1, 7, 14, 22)
def lstm(
    c: Context, x: Node, w: Node, r: Node, b: Node | None = None, lengths: Node | None = None,
    h: Node | None = None, s: Node | None = None, p: Node | None = None,
) -> list[Node]:
    coupled = bool(c.attr("input_forget"))

    def cell(
        d: int, f: list[Activation], rd: Node, rb: Node | None
    ) -> tuple[Node | None, Step]:
        f0, f1 = clipped(c, f[0]), clipped(c, f[1])
        pi, po, pf = gates(pick(p, d), 3) if p is not None else (None, None, None)

        def peep(gate: Node, weight: Node | None, memory: Node) -> Node:
            return gate if weight is None else g.add(gate, g.mul(weight, memory))

        def step(now: Node, state: list[Node]) -> list[Node]:
            hidden, memory = state
            i, o, forget, new = gates(g.add(now, project(hidden, rd)), 4)
            i = f0(peep(i, pi, memory))
            forget = g.sub(g.like(i, 1), i) if coupled else f0(peep(forget, pf, memory))
            memory = g.add(g.mul(forget, memory), g.mul(i, f1(new)))
            return [g.mul(f0(peep(o, po, memory)), f[2](memory)), memory]
        return rb, step

    default = ("Sigmoid", "Tanh", "Tanh")
    return recurrent(c, x, w, r, b, lengths, [h, s], default, cell)


@op("GRU", 1, 3, 7, 14, 22)
def gru(
    c: Context, x: Node, w: Node, r: Node, b: Node | None = None, lengths: Node | None = None,
    h: Node | None = None,
) -> list[Node]:
    before = bool(c.attr("linear_before_reset", 0))

    def cell(
        d: int, f: list[Activation], rd: Node, rb: Node | None
    ) -> tuple[Node | None, Step]:
        f0, f1 = clipped(c, f[0]), clipped(c, f[1])
        size = rd.shape[1]
        assert isinstance(size, int)
        two, one = g.narrow(rd, 0, 0, 2 * size), g.narrow(rd, 0, 2 * size, size)
        rest = g.narrow(rb, 0, 2 * size, size) if rb is not None and before else None
        early = rb
        if rb is not None and before:
            early = g.pad(g.narrow(rb, 0, 0, 2 * size), [0], [size])

        def step(now: Node, state: list[Node]) -> list[Node]:
            (hidden,) = state
            z, reset, new = gates(now, 3)
            rz, rr = gates(project(hidden, two), 2)
            z, reset = f0(g.add(z, rz)), f0(g.add(reset, rr))
            if before:
                own = project(hidden, one)
                own = g.mul(reset, own if rest is None else g.add(own, rest))
            else:
                own = project(g.mul(reset, hidden), one)
            new = f1(g.add(new, own))
            return [g.add(g.mul(g.sub(g.like(z, 1), z), new), g.mul(z, hidden))]
        return early, step

    return recurrent(c, x, w, r, b, lengths, [h], ("Sigmoid", "Tanh"), cell)


@op("RNN", 1, 7, 14, 22)
def rnn(
    c: Context, x: Node, w: Node, r: Node, b: Node | None = None, lengths: Node | None = None,
    h: Node | None = None,
) -> list[Node]:
    def cell(
        d: int, f: list[Activation], rd: Node, rb: Node | None
    ) -> tuple[Node | None, Step]:
        f0 = clipped(c, f[0])

        def step(now: Node, state: list[Node]) -> list[Node]:
            return [f0(g.add(now, project(state[0], rd)))]
        return rb, step

    return recurrent(c, x, w, r, b, lengths, [h], ("Tanh",), cell)
