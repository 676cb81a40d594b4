"""Normalisations, in their inference form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import graph as g
from ..dtype import DTYPES, FLOAT32
from ..graph import Node
from ..shape import Dim
from .conv import channels
from .elementwise import plus, power
from .reduce import mean
from .registry import Context, in_float32, op


def inverse_deviation(variance: Node, epsilon: float) -> Node:
    return g.div(g.like(variance, 1), g.sqrt(plus(variance, epsilon)))


def standardize(x: Node, axes: Sequence[int], epsilon: float) -> tuple[Node, Node, Node]:
    """(x - mean) / deviation over axes, the mean, and the inverse deviation."""
    centre = mean(x, axes)
    centred = g.sub(x, centre)
    inverse = inverse_deviation(mean(g.mul(centred, centred), axes), epsilon)
    return g.mul(centred, inverse), centre, inverse


@op("BatchNormalization", 1, 6, 7, 9, 14, 15)
def batch_normalization(
    c: Context, x: Node, scale: Node, bias: Node, centre: Node, variance: Node
) -> Any:
    c.ignore("momentum")
    if c.attr("training_mode", 0) or c.version < 7 and not c.attr("is_test", 0) and c.wants(1):
        c.refuse("attribute 'training_mode' is set; export the model for inference")
    if c.attr("spatial", 1) != 1:
        c.refuse("attribute 'spatial' is 0, which is not supported")
    scale, bias, centre, variance = (g.cast(v, x.dtype) for v in (scale, bias, centre, variance))
    factor = g.mul(scale, inverse_deviation(variance, c.attr("epsilon")))
    shift = g.sub(bias, g.mul(centre, factor))
    if x.rank > 1:
        factor, shift = channels(factor, x.rank), channels(shift, x.rank)
    return g.add(g.mul(x, factor), shift)


@op("InstanceNormalization", 1, 6, 22)
@in_float32
def instance_normalization(c: Context, x: Node, scale: Node, bias: Node) -> Node:
    out, _, _ = standardize(x, range(2, x.rank), c.attr("epsilon"))
    return g.add(g.mul(out, channels(scale, x.rank)), channels(bias, x.rank))


@op("LayerNormalization", 17)
def layer_normalization(c: Context, x: Node, scale: Node, bias: Node | None = None) -> list[Node]:
    axis, kind = g.normal_axis(c.attr("axis"), x.rank), c.type_of(c.attr("stash_type"))
    wide = g.cast(x, kind)
    out, centre, inverse = standardize(wide, range(axis, x.rank), c.attr("epsilon"))
    out = g.mul(g.cast(out, x.dtype), scale)
    return [out if bias is None else g.add(out, bias), centre, inverse]


@op("RMSNormalization", 23)
def rms_normalization(c: Context, x: Node, scale: Node) -> Node:
    axis, kind = g.normal_axis(c.attr("axis"), x.rank), c.type_of(c.attr("stash_type"))
    wide = g.cast(x, kind)
    power_mean = mean(g.mul(wide, wide), range(axis, x.rank))
    out = g.mul(wide, inverse_deviation(power_mean, c.attr("epsilon")))
    return g.mul(g.cast(out, scale.dtype), scale)


@op("GroupNormalization", 18, 21)
@in_float32
def group_normalization(c: Context, x: Node, scale: Node, bias: Node) -> Node:
    groups, n = c.attr("num_groups"), x.shape[1]
    if not isinstance(n, int) or n % groups:
        c.refuse(f"attribute 'num_groups' is {groups}, which does not divide {n} channels")
    kind = c.type_of(c.attr("stash_type", 1)) if c.version >= 21 else x.dtype
    split: tuple[Dim, ...] = (x.shape[0], groups, n // groups, *x.shape[2:])
    out, _, _ = standardize(
        g.reshape(g.cast(x, kind), split), range(2, len(split)), c.attr("epsilon")
    )
    out = g.cast(out, x.dtype)
    if c.version < 21:  # one scale a group
        tail = (1,) * (len(split) - 2)
        scale, bias = (g.reshape(v, (1, groups, *tail)) for v in (scale, bias))
        return g.reshape(g.add(g.mul(out, scale), bias), x.shape)
    out = g.reshape(out, x.shape)
    return g.add(g.mul(out, channels(scale, x.rank)), channels(bias, x.rank))


@op("MeanVarianceNormalization", 9, 13)
@in_float32
def mean_variance_normalization(c: Context, x: Node) -> Node:
    axes = c.attr("axes") or [0, 2, 3]
    centred = g.sub(x, mean(x, axes))
    deviation = g.sqrt(mean(g.mul(centred, centred), axes))
    return g.div(centred, plus(deviation, 1e-9))


@op("LpNormalization", 1, 22)
@in_float32
def lp_normalization(c: Context, x: Node) -> Node:
    p, axis = c.attr("p"), c.attr("axis")
    total = power(g.reduce("sum", power(g.abs_(x), p), [axis]), 1 / p)
    return g.where(g.eq(total, g.like(total, 0)), g.like(x, 0), g.div(x, total))


@op("SkipLayerNormalization", 1, domain="com.microsoft")
def skip_layer_normalization(
    c: Context, x: Node, skip: Node, scale: Node, bias: Node | None = None, more: Node | None = None
) -> list[Node]:
    total = g.add(x, skip)
    if more is not None:
        total = g.add(total, more)
    wide = g.cast(total, FLOAT32) if total.dtype is DTYPES["float16"] else total
    out, centre, inverse = standardize(wide, [-1 % x.rank], c.attr("epsilon", 1e-12))
    out = g.mul(g.cast(out, x.dtype), scale)
    return [out if bias is None else g.add(out, bias), centre, inverse, total]
