"""Tensors against numpy: values, shapes and element types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tinyedge import Tensor, errors
from tinyedge.tensor import realize

Array = np.ndarray[Any, np.dtype[Any]]
Case = tuple[Callable[..., Any], Callable[..., Any]]

RANDOM = np.random.default_rng(7)
F = RANDOM.normal(size=(3, 4, 5)).astype(np.float32)
G = RANDOM.normal(size=(4, 1)).astype(np.float32)
D = RANDOM.normal(size=(3, 4, 5))
H = RANDOM.normal(size=(4, 5)).astype(np.float16)
POSITIVE = (np.abs(F) + 0.25).astype(np.float32)
I32 = RANDOM.integers(-50, 50, (3, 4, 5)).astype(np.int32)
NONZERO = np.where(I32 == 0, 7, I32).astype(np.int32)
I8 = RANDOM.integers(-128, 128, (4, 5)).astype(np.int8)
U8 = RANDOM.integers(0, 256, (4, 5)).astype(np.uint8)
BITS = RANDOM.integers(0, 2, (4, 5)).astype(bool)
SPECIAL = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1.5, -2.5, 3e38], np.float32)
IMAGE = RANDOM.normal(size=(2, 4, 9, 8)).astype(np.float32)


def compare(cases: Mapping[str, Case], *arrays: Array, tolerance: float = 2e-6) -> None:
    """All cases in one plan; each must equal numpy's result."""
    with np.errstate(all="ignore"):
        want = {k: np.asarray(expected(*arrays)) for k, (_, expected) in cases.items()}
        got = {k: function(*map(Tensor, arrays)) for k, (function, _) in cases.items()}
    realize(list(got.values()))
    for name, value in want.items():
        result = got[name]
        assert result.dtype == value.dtype, f"{name}: {result.dtype} is not {value.dtype}"
        assert result.shape == value.shape, f"{name}: {result.shape} is not {value.shape}"
        error = 2e-3 if value.dtype == np.float16 else tolerance
        if value.dtype.kind == "f":
            scale = np.abs(value[np.isfinite(value)]).max(initial=0)
            np.testing.assert_allclose(result.numpy(), value, error, error * scale, err_msg=name)
        else:
            np.testing.assert_array_equal(result.numpy(), value, err_msg=name)


def both(**functions: Callable[..., Any]) -> dict[str, Case]:
    """Cases whose code is the same for tensors and for arrays."""
    return {k: (f, f) for k, f in functions.items()}


ARITHMETIC = both(
    add=lambda x, y: x + y, sub=lambda x, y: x - y, mul=lambda x, y: x * y,
    div=lambda x, y: x / y, floor_div=lambda x, y: x // y, mod=lambda x, y: x % y,
    eq=lambda x, y: x == y, ne=lambda x, y: x != y, lt=lambda x, y: x < y,
    le=lambda x, y: x <= y, gt=lambda x, y: x > y, ge=lambda x, y: x >= y,
    scalar=lambda x, y: 2 - x * 3 + 1.5, int_scalar=lambda x, y: (x + 1) * 2,
    right=lambda x, y: (7 // y, 1 / y, 5 % y)[1], negative=lambda x, y: -x, same=lambda x, y: +x,
    absolute=lambda x, y: abs(x), maximum=lambda x, y: np.maximum(x, y),
    minimum=lambda x, y: np.minimum(x, y), square=lambda x, y: x ** 2,
    weak=lambda x, y: x * True,
)


@pytest.mark.parametrize("x,y", [(F, G), (D, F), (H, H + np.float16(1)), (I32, NONZERO), (F, I32),
                                 (I8, NONZERO), (I8, H)],
                         ids=["f32", "f64,f32", "f16", "i32", "f32,i32", "i8,i32", "i8,f16"])
def test_arithmetic(x: Array, y: Array) -> None:
    # the remainder of a quotient that float16 can't hold is lost
    cases = {k: v for k, v in ARITHMETIC.items() if k != "mod" or x.dtype != I8.dtype}
    compare(cases, x, np.where(y == 0, np.ones((), y.dtype), y))


def test_unsigned_and_wrapping_integers() -> None:
    compare(both(
        add=lambda x: x + x, sub=lambda x: x - 200, div=lambda x: x // 7, mod=lambda x: x % 7,
        shift=lambda x: x << 3, right=lambda x: x >> 2, mask=lambda x: x & 15, put=lambda x: x | 8,
        flip=lambda x: ~x, odd=lambda x: x ^ 1, power=lambda x: x ** 3, zeroth=lambda x: x ** 0,
        sign=np.sign, root=np.sqrt, absolute=abs,
    ), U8)
    compare(both(add=lambda x: x + x, mul=lambda x: x * x, shift=lambda x: x >> 2,
                 left=lambda x: 3 << (x & 3), sign=np.sign, log=lambda x: np.exp(x / 64)), I8)


def test_booleans() -> None:
    other = RANDOM.integers(0, 2, (4, 5)).astype(bool)
    compare(both(
        add=lambda x, y: x + y, mul=lambda x, y: x * y, and_=lambda x, y: x & y,
        or_=lambda x, y: x | y, xor=lambda x, y: x ^ y, not_=lambda x, y: ~x,
        maximum=lambda x, y: np.maximum(x, y), number=lambda x, y: x + 1, real=lambda x, y: x * 2.5,
        eq=lambda x, y: x == y, any=lambda x, y: x.any(axis=0), all=lambda x, y: x.all(axis=(0, 1)),
        total=lambda x, y: x.sum(), most=lambda x, y: x.max(axis=1), mean=lambda x, y: x.mean(),
        less=lambda x, y: x < y,
    ), BITS, other)


FUNCTIONS = both(exp=np.exp, exp2=np.exp2, sin=np.sin, cos=np.cos, tan=np.tan, tanh=np.tanh,
                 floor=np.floor, ceil=np.ceil, trunc=np.trunc, rint=np.rint, sign=np.sign,
                 square=np.square, cube=lambda x: x ** 3, inverse=lambda x: (x + 9) ** -1)
LOGS = both(log=np.log, log2=np.log2, log10=np.log10, sqrt=np.sqrt, power=lambda x: x ** 2.5,
            half=lambda x: x ** 0.5, base=lambda x: 2.0 ** x, tower=lambda x: x ** x)


@pytest.mark.parametrize("x", [F, D, H, I32 % 5], ids=["f32", "f64", "f16", "i32"])
def test_functions(x: Array) -> None:
    cases = FUNCTIONS
    if x.dtype.kind == "i":
        cases = {k: v for k, v in cases.items() if k not in ("inverse", "rint")}
    compare(cases, x, tolerance=4e-6)


@pytest.mark.parametrize("x", [POSITIVE, POSITIVE.astype(np.float64)], ids=["f32", "f64"])
def test_logarithms_and_powers(x: Array) -> None:
    compare(LOGS, x, tolerance=4e-6)


def test_special_values() -> None:
    compare(both(
        isnan=np.isnan, isinf=np.isinf, isfinite=np.isfinite, sign=np.sign, sqrt=np.sqrt,
        negative=lambda x: -x, most=lambda x: x.max(), least=lambda x: x.min(),
        total=lambda x: x.sum(), best=lambda x: x.argmax(), worst=lambda x: x.argmin(),
        order=lambda x: x.argsort(), compare=lambda x: x == x, clipped=lambda x: x.clip(-1, 1),
        kept=lambda x: x[5:].argmax(),
    ), SPECIAL)


def test_activations() -> None:
    erf = np.vectorize(__import__("math").erf, otypes=[np.float32])
    sigmoid: Callable[[Array], Array] = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    shifted: Callable[[Array], Array] = lambda x: np.exp(x - x.max(-1, keepdims=True))  # noqa: E731
    inner: Callable[[Array], Array] = lambda x: np.tanh(  # noqa: E731
        np.float32(0.7978845608) * (x + np.float32(0.044715) * x ** 3))
    compare({
        "relu": (Tensor.relu, lambda x: np.maximum(x, 0)),
        "leaky": (Tensor.leaky_relu, lambda x: np.where(x < 0, x * np.float32(0.01), x)),
        "sigmoid": (Tensor.sigmoid, sigmoid),
        "silu": (Tensor.silu, lambda x: x * sigmoid(x)),
        "gelu": (Tensor.gelu, lambda x: x * np.float32(0.5) * (1 + erf(x / np.float32(2) ** 0.5))),
        "gelu tanh": (lambda x: x.gelu(True), lambda x: x * np.float32(0.5) * (1 + inner(x))),
        "softplus": (Tensor.softplus, lambda x: np.log1p(np.exp(x))),
        "rsqrt": (lambda x: (x * x).rsqrt(), lambda x: 1 / np.sqrt(x * x)),
        "reciprocal": (Tensor.reciprocal, lambda x: 1 / x),
        "erf": (Tensor.erf, erf),
        "softmax": (Tensor.softmax, lambda x: shifted(x) / shifted(x).sum(-1, keepdims=True)),
        "log_softmax": (Tensor.log_softmax, lambda x: np.log(
            shifted(x) / shifted(x).sum(-1, keepdims=True))),
        "layernorm": (Tensor.layernorm, lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(
            x.var(-1, keepdims=True) + np.float32(1e-5))),
    }, F, tolerance=5e-6)
    weight, bias = F[0, 0], F[0, 1]
    np.testing.assert_allclose(
        Tensor(F).layernorm(weight, bias, axis=(2,)).numpy(),
        Tensor(F).layernorm().numpy() * weight + bias, rtol=1e-5, atol=1e-6)


REDUCTIONS = both(
    **{f"{kind}{'' if axis is None else axis}{keep}":
       (lambda x, k=kind, a=axis, b=keep: getattr(x, k)(axis=a, keepdims=b))
       for kind in ("sum", "mean", "max", "min", "prod", "var", "std")
       for axis in (None, 1, -1, (0, 2)) for keep in (False, True)},
    argmax=lambda x: x.argmax(), argmin=lambda x: x.argmin(axis=1), ddof=lambda x: x.var(ddof=1),
    best=lambda x: x.argmax(axis=-1, keepdims=True), running=lambda x: x.cumsum(axis=1),
    flat=lambda x: x.cumsum(), typed=lambda x: x.sum(axis=0, dtype=np.float64),
    numpys=lambda x: np.sum(x, axis=0) if isinstance(x, np.ndarray) else x.sum(axis=0),
)


@pytest.mark.parametrize("x", [F, D, I32, U8[:, :, None]], ids=["f32", "f64", "i32", "u8"])
def test_reductions(x: Array) -> None:
    cases = REDUCTIONS
    if x.dtype.kind != "f":
        cases = {k: v for k, v in cases.items() if not k.startswith("prod")}
    compare(cases, x, tolerance=1e-5)


def test_reductions_of_nothing() -> None:
    empty = np.zeros((0, 3), np.float32)
    compare(both(total=lambda x: x.sum(axis=0), count=lambda x: x.prod(axis=0),
                 rows=lambda x: x.max(axis=1)), empty)
    with pytest.raises(errors.ShapeError, match="nothing to choose from"):
        Tensor(empty).max()
    with pytest.raises(errors.ShapeError, match="nothing to choose from"):
        Tensor(empty).argmin(axis=0)


VIEWS: dict[str, Case] = {
    **both(
        reshape=lambda x: x.reshape(4, -1), tuple_=lambda x: x.reshape((5, 12)),
        T=lambda x: x.T, transpose=lambda x: x.transpose(1, 0, 2),
        order=lambda x: x.transpose((2, 0, 1)), swap=lambda x: x.swapaxes(0, -1),
        flat=lambda x: x.ravel(), squeeze=lambda x: x[:1].squeeze(), one=lambda x: x[:1].squeeze(0),
        repeat=lambda x: x.repeat(3, axis=1), all_repeat=lambda x: x.repeat(2),
        taken=lambda x: x.take([1, 0, -1], axis=1), anywhere=lambda x: x.take([[3, -1], [59, 0]]),
    ),
    "flatten": (lambda x: x.flatten(1), lambda x: x.reshape(3, 20)),
    "permute": (lambda x: x.permute(2, 0, 1), lambda x: x.transpose(2, 0, 1)),
    "moveaxis": (lambda x: x.moveaxis(0, -1), lambda x: np.moveaxis(x, 0, -1)),
    "unsqueeze": (lambda x: x.unsqueeze(-1), lambda x: x[..., None]),
    "broadcast": (lambda x: x.broadcast_to(2, 3, 4, 5), lambda x: np.broadcast_to(x, (2, 3, 4, 5))),
    "expand": (lambda x: x[:, :1].expand(-1, 4, -1), lambda x: np.broadcast_to(x[:, :1], x.shape)),
    "flip": (lambda x: x.flip(), np.flip),
    "flip axes": (lambda x: x.flip((0, 2)), lambda x: np.flip(x, (0, 2))),
    "roll": (lambda x: x.roll(2), lambda x: np.roll(x, 2)),
    "roll axes": (lambda x: x.roll((1, -2), (0, 2)), lambda x: np.roll(x, (1, -2), (0, 2))),
    "tile": (lambda x: x.tile((2, 1, 3)), lambda x: np.tile(x, (2, 1, 3))),
    "tile more": (lambda x: x.tile((2, 1, 1, 2)), lambda x: np.tile(x, (2, 1, 1, 2))),
    "tile less": (lambda x: x.tile(2), lambda x: np.tile(x, 2)),
    "pad": (lambda x: x.pad(2, 7), lambda x: np.pad(x, 2, constant_values=7)),
    "pad pairs": (lambda x: x.pad(((0, 1), (2, 0), (1, 1))),
                  lambda x: np.pad(x, ((0, 1), (2, 0), (1, 1)))),
    **{f"pad {mode}": (lambda x, m=mode: x.pad((1, 3), mode=m),
                       lambda x, m=mode: np.pad(x, (1, 3), mode=m))
       for mode in ("edge", "reflect", "symmetric", "wrap")},
    "tril": (lambda x: x.tril(), lambda x: np.tril(x)),
    "triu": (lambda x: x.triu(1), lambda x: np.triu(x, 1)),
    "concat": (lambda x: Tensor.concat([x, x[:, :2]], axis=1),
               lambda x: np.concatenate([x, x[:, :2]], axis=1)),
    "stack": (lambda x: Tensor.stack([x, x * 2], axis=-1), lambda x: np.stack([x, x * 2], axis=-1)),
    "split": (lambda x: x.split(2, axis=1)[1], lambda x: np.split(x, 2, axis=1)[1]),
    "split at": (lambda x: x.split([1, -1], axis=2)[1], lambda x: np.split(x, [1, -1], axis=2)[1]),
    "split empty": (lambda x: x.split([2, 1], axis=2)[1], lambda x: np.split(x, [2, 1], axis=2)[1]),
}


def test_views() -> None:
    compare(VIEWS, F, tolerance=0)


KEYS: dict[str, Any] = {
    "number": 1, "negative": -1, "numbers": (0, -1, 2), "slice": slice(1, 3),
    "steps": (slice(None, None, 2), slice(None, None, -1), slice(-1, 0, -2)),
    "beyond": (slice(1, 99), slice(-99, 2)), "nothing": slice(2, 1), "dots": (..., 1),
    "new": (None, 1, ..., None), "dots between": (0, ..., slice(1, 4)), "all dots": ...,
    "none": None, "list": [2, 0, -1], "lists": ([2, 0], [1, -1]), "grid": ([[2], [0]], [[1, -1]]),
    "last list": (slice(None), slice(None), [0, 4, 4, -2]), "middle": (slice(None), [3, 1]),
    "list and slice": ([0, 2], slice(None, None, -2)), "apart": ([2, 0], slice(None), [1, 4]),
    "number apart": (1, slice(None), [1, 4]), "number beside": (slice(None), 1, [1, 4]),
    "new between": ([2, 0], None, [1, 3]), "new before": (None, [2, 0]),
    "dots and list": (..., [4, 0]), "matrix": np.array([[0, 1], [2, 0]]),
    "empty list": np.zeros(0, np.int64), "number of numpy": np.int32(2),
    "number, new and list": (0, None, [1, 2]),
    "small indices": (slice(None), np.array([1, 0], np.int8)),
}


def test_indexing() -> None:
    compare(both(**{k: (lambda x, key=key: x[key]) for k, key in KEYS.items()}), F, tolerance=0)


def test_indexing_by_tensors() -> None:
    rows, columns = np.array([2, 0, 1]), np.array([[3], [-1]], np.int32)
    got = Tensor(F)[Tensor(rows), Tensor(columns)]
    np.testing.assert_array_equal(got.numpy(), F[rows, columns])
    at = np.argsort(F, axis=1)
    compare({"along": (lambda x, i: x.take_along_axis(i, 1),
                       lambda x, i: np.take_along_axis(x, i, 1)),
             "some": (lambda x, i: x.take_along_axis(i[:, :2, :1], 1),
                      lambda x, i: np.take_along_axis(x, i[:, :2, :1], 1))}, F, at, tolerance=0)


def test_index_errors() -> None:
    x = Tensor(F)
    for key, kind, text in (
        (3, errors.InputError, "index 3 is out of range for dimension 0 of size 3"),
        ((0, 0, 0, 0), errors.ShapeError, "does not fit 3 dimensions"),
        ((..., ...), errors.ShapeError, "does not fit 3 dimensions"),
        ([0, 3], errors.InputError, "out of range for dimension 0 of size 3"),
        (F > 0, errors.UnsupportedError, "boolean masks can't be indices"),
        (x > 0, errors.UnsupportedError, "boolean masks can't be indices"),
        (True, errors.UnsupportedError, "a boolean can't be an index"),
        (1.0, errors.InputError, "1.0 is not an index"),
        ([0.5], errors.InputError, "indices are float64"),
        (slice(None, None, 0), errors.InputError, "is not a usable slice"),
        ("a", errors.InputError, "'a' is not an index"),
    ):
        with pytest.raises(kind, match=text):
            x[key]
    with pytest.raises(errors.InputError, match="can't be changed in place"):
        x[0] = 1


def test_order() -> None:
    x = np.array([[3, 1, 2, 3, 1], [0, 0, 5, -1, 5]], np.float32)
    compare({
        "sort": (lambda x: x.sort(), lambda x: np.sort(x)),
        "down": (lambda x: x.sort(axis=0, descending=True), lambda x: np.sort(x, axis=0)[::-1]),
        "argsort": (lambda x: x.argsort(), lambda x: np.argsort(x, kind="stable")),
        "stable down": (lambda x: x.argsort(descending=True),
                        lambda x: np.argsort(-x, kind="stable")),
        "top": (lambda x: x.topk(2)[0], lambda x: -np.sort(-x)[:, :2]),
        "top places": (lambda x: x.topk(2)[1], lambda x: np.argsort(-x, kind="stable")[:, :2]),
        "bottom": (lambda x: x.topk(1, axis=0, largest=False)[0],
                   lambda x: x.min(0, keepdims=True)),
    }, x, tolerance=0)


@pytest.mark.parametrize("a,b", [
    ((3, 4), (4, 5)), ((4,), (4,)), ((4,), (2, 4, 3)), ((2, 3, 4), (4,)),
    ((2, 1, 3, 4), (5, 4, 2)), ((1, 4), (3, 4, 1)), ((0, 4), (4, 2)),
], ids=str)
def test_matmul(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    x, y = RANDOM.normal(size=a).astype(np.float32), RANDOM.normal(size=b).astype(np.float32)
    compare(both(product=lambda x, y: x @ y), x, y, tolerance=1e-5)


def test_products_of_integers_and_arrays() -> None:
    a, b = I32[0], I32[1].T
    np.testing.assert_array_equal((Tensor(a) @ b).numpy(), a @ b)
    np.testing.assert_array_equal((a @ Tensor(b)).numpy(), a @ b)
    with pytest.raises(errors.ShapeError, match="differ in the dimension"):
        Tensor(F) @ F
    with pytest.raises(errors.ShapeError, match="an operand is a scalar"):
        Tensor(F) @ 2


@pytest.mark.parametrize("text,shapes", [
    ("ij,jk->ik", [(3, 4), (4, 5)]), ("ij,jk", [(3, 4), (4, 5)]), ("ii->i", [(4, 4)]),
    ("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 6, 5)]), ("ii", [(4, 4)]), ("ij->ji", [(3, 4)]),
    ("i,j->ij", [(3,), (4,)]), ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
    ("ij,ij->", [(3, 4)] * 2), ("ijk->j", [(2, 3, 4)]), ("a,ab,b->", [(3,), (3, 4), (4,)]),
], ids=str)
def test_einsum(text: str, shapes: list[tuple[int, ...]]) -> None:
    xs = [RANDOM.normal(size=s) for s in shapes]
    got = Tensor.einsum(text, *xs).numpy()
    np.testing.assert_allclose(got, np.einsum(text, *xs), rtol=1e-12, atol=1e-12)


def test_einsum_errors() -> None:
    for text in ("ij->kk", "ij->ijk", "i.->i", "ij,jk->ik", "ijk->i"):
        with pytest.raises(errors.ShapeError, match="einsum"):
            Tensor.einsum(text, F[0])
    with pytest.raises(errors.ShapeError, match="index j has sizes 5 and 4"):
        Tensor.einsum("ij,jk->ik", F[0], F[0])


def windows(x: Array, kernel: tuple[int, int], stride: int, dilation: int = 1) -> Array:
    """[N, C, rows, columns, kh, kw]"""
    reach = tuple((k - 1) * dilation + 1 for k in kernel)
    view = np.lib.stride_tricks.sliding_window_view(x, reach, (2, 3))
    out: Array = view[:, :, ::stride, ::stride, ::dilation, ::dilation]
    return out


@pytest.mark.parametrize("groups,stride,padding,dilation", [
    (1, 1, 0, 1), (1, 2, 1, 1), (2, 1, (1, 2), 2), (4, 2, ((0, 1), (1, 0)), 1)])
def test_conv2d(groups: int, stride: int, padding: Any, dilation: int) -> None:
    w = RANDOM.normal(size=(8, 4 // groups, 3, 2)).astype(np.float32)
    b = RANDOM.normal(size=8).astype(np.float32)
    sides = np.array(padding)[:, None] if np.ndim(padding) == 1 else padding
    pairs = np.broadcast_to(sides, (2, 2))
    x = np.pad(IMAGE, ((0, 0), (0, 0), *pairs.tolist()))
    view = windows(x, (3, 2), stride, dilation)
    parts = [np.einsum("ncijhw,mchw->nmij", view[:, p * (4 // groups):(p + 1) * (4 // groups)],
                       w[p * (8 // groups):(p + 1) * (8 // groups)]) for p in range(groups)]
    want = np.concatenate(parts, axis=1) + b[:, None, None]
    got = Tensor(IMAGE).conv2d(w, b, stride, padding, dilation, groups).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_pooling() -> None:
    infinite = np.pad(IMAGE, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    zero = np.pad(IMAGE, ((0, 0), (0, 0), (1, 1), (1, 1)))
    count = windows(np.pad(np.ones_like(IMAGE), ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), 2)
    last = (-2, -1)
    compare({
        "max": (lambda x: x.max_pool2d(2), lambda x: windows(x, (2, 2), 2).max(last)),
        "max padded": (lambda x: x.max_pool2d(3, 2, 1),
                       lambda x: windows(infinite, (3, 3), 2).max(last)),
        "max dilated": (lambda x: x.max_pool2d(2, 1, dilation=2),
                        lambda x: windows(x, (2, 2), 1, 2).max(last)),
        "average": (lambda x: x.avg_pool2d((3, 2), 1), lambda x: windows(x, (3, 2), 1).mean(last)),
        "average padded": (lambda x: x.avg_pool2d(3, 2, 1),
                           lambda x: windows(zero, (3, 3), 2).mean(last)),
        "average inside": (lambda x: x.avg_pool2d(3, 2, 1, count_include_pad=False),
                           lambda x: windows(zero, (3, 3), 2).sum(last) / count.sum(last)),
    }, IMAGE)
    with pytest.raises(errors.ShapeError, match="does not fit an image"):
        Tensor(IMAGE).max_pool2d(10)
    with pytest.raises(errors.ShapeError, match=r"an image has 4 dimensions"):
        Tensor(F).max_pool2d(2)
    with pytest.raises(errors.ShapeError, match="do not fit the input"):
        Tensor(IMAGE).conv2d(np.zeros((2, 3, 1, 1), np.float32))


def test_where_and_making() -> None:
    compare({
        "where": (lambda x: Tensor.where(x > 0, x, 0), lambda x: np.where(x > 0, x, np.float32(0))),
        "broadcast": (lambda x: Tensor.where(x[0] > 0, x, x * 2),
                      lambda x: np.where(x[0] > 0, x, x * 2)),
        "zeros": (lambda x: Tensor.zeros((2, 3)), lambda x: np.zeros((2, 3))),
        "ones": (lambda x: Tensor.ones(3, np.int8), lambda x: np.ones(3, np.int8)),
        "full": (lambda x: Tensor.full((2,), 2.5, np.float32) + x[0, :2, 0],
                 lambda x: np.float32(2.5) + x[0, :2, 0]),
        "arange": (lambda x: Tensor.arange(2, 11, 3), lambda x: np.arange(2, 11, 3)),
        "arange float": (lambda x: Tensor.arange(5, dtype=np.float32),
                         lambda x: np.arange(5, dtype=np.float32)),
        "eye": (lambda x: Tensor.eye(3, 4, np.float32), lambda x: np.eye(3, 4, dtype=np.float32)),
        "cast": (lambda x: (x * 10).astype("int16"), lambda x: (x * 10).astype("int16")),
        "truth": (lambda x: x.floor().astype(bool), lambda x: np.floor(x).astype(bool)),
        "scalar": (lambda x: x[0, 0, 0] * 2, lambda x: x[0, 0, 0] * 2),
        "scalar and array": (lambda x: x * np.float64(2), lambda x: x * np.float64(2)),
        "array first": (lambda x: F + x, lambda x: F + x),
        "list": (lambda x: x[0, 0] + [1, 2, 3, 4, 5], lambda x: x[0, 0] + [1, 2, 3, 4, 5]),
    }, F)


def test_values() -> None:
    x = Tensor([[1, 2], [3, 4]])
    assert repr(x) == "<Tensor int64[2,2] value>" and repr(x + 1) == "<Tensor int64[2,2] lazy>"
    assert x.tolist() == [[1, 2], [3, 4]] and x.sum().item() == 10 and len(x) == 2
    assert [row.tolist() for row in x] == [[1, 2], [3, 4]]
    assert (x.ndim, x.size, x.nbytes) == (2, 4, 32)
    assert float(x[0, 1]) == 2.0 and int(x[1, 1]) == 4 and bool(x[0, 0] == 1)
    assert [10, 20, 30][x[0, 0]] == 20
    assert np.asarray(x * 2).tolist() == [[2, 4], [6, 8]]
    assert np.asarray(x, np.float32).dtype == np.float32
    assert Tensor(x).tolist() == x.tolist() and Tensor(x, np.float32).dtype == np.float32
    assert not x.numpy().flags.writeable
    assert hash(x) != hash(x + 0)


def test_arrays_are_copied() -> None:
    a = np.ones(3, np.float32)
    x = Tensor(a)
    a[:] = 5
    assert (x + 1).tolist() == [2, 2, 2]
    big_endian = np.arange(3, dtype=">f4")
    assert (Tensor(big_endian) + 1).tolist() == [1, 2, 3]
    assert (Tensor(np.arange(6.0).reshape(2, 3).T) * 1).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_computed_once() -> None:
    x = Tensor(F) * 3
    assert "lazy" in repr(x)
    first = x.numpy()
    assert "value" in repr(x) and x.numpy() is first
    np.testing.assert_array_equal((x + x).numpy(), first + first)


def test_bad_values() -> None:
    for data in ("text", [[1], [1, 2]], object(), {"a": 1}, [1, None]):
        with pytest.raises(errors.TinyedgeError):
            Tensor(data)
    with pytest.raises(errors.UnsupportedError, match="complex128 is not supported"):
        Tensor(1j)
    with pytest.raises(errors.UnsupportedError, match="datetime64"):
        Tensor(np.array(["2020-01-01"], "datetime64[D]"))
    with pytest.raises(errors.InputError, match="a masked array"):
        Tensor(np.ma.array([1, 2]))


def test_bad_operations() -> None:
    x = Tensor(F)
    for act, text in (
        (lambda: x + F[:2], "can't be broadcast"), (lambda: x.reshape(7, -1), "does not divide"),
        (lambda: x.reshape(7), "differ in size"), (lambda: x.reshape(-1, -1), "is not a shape"),
        (lambda: x.permute(0, 0, 1), "not a permutation"), (lambda: x.sum(axis=3), "out of range"),
        (lambda: x.sum(axis=(0, 0)), "twice"), (lambda: x.squeeze(0), "is not of size 1"),
        (lambda: x.item(), "60 elements"), (lambda: Tensor(1.0).__len__(), "no length"),
        (lambda: x.broadcast_to(4, 4), "does not broadcast"), (lambda: x.split(2), "equal parts"),
        (lambda: x.pad((1, 2, 3)), "do not fit"), (lambda: x.pad(-1), "negative"),
        (lambda: x.pad(1, mode="odd"), "is not known"), (lambda: x.topk(6), "of 5 elements"),
        (lambda: x & x, "not defined for float32"), (lambda: ~x, "not defined for float32"),
        (lambda: Tensor(I8) + 1000, "does not fit"), (lambda: Tensor(I8) ** -1, "negative powers"),
        (lambda: Tensor(I8) ** Tensor(I8), "constant Python ints"),
        (lambda: -Tensor(BITS), "no negative"), (lambda: Tensor(BITS) - BITS, "no difference"),
        (lambda: Tensor.concat([x, x[0]]), "does not fit"),
        (lambda: Tensor.concat([]), "no tensors"),
        (lambda: Tensor.stack([]), "no tensors"), (lambda: Tensor.zeros((-1, 2)), "not negative"),
        (lambda: Tensor.arange(0, 1, 0), "step is 0"), (lambda: np.arctan2(x, x), "no counterpart"),
        (lambda: np.add(x, x, out=np.empty(1)), "no counterpart"),
        (lambda: np.add.reduce(x), "no counterpart"), (lambda: x.reshape(1.5), "use ints"),
        (lambda: [1][x[0, 0, 0]], "can't be an index"),
    ):
        with pytest.raises(errors.TinyedgeError, match=text):
            act()
