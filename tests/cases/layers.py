"""Convolutions, pools, normalisations, products, quantised layers, resizing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from . import Case, Const, floats, ints, k, row, scalar


def rows() -> Iterator[Case]:
    yield from convolutions()
    yield from transposed()
    yield from pools()
    yield from norms()
    yield from products()
    yield from quantised()
    yield from resizes()
    yield from samplers()


def convolutions() -> Iterator[Case]:
    def conv(
        name: str, x: tuple[int, ...], w: tuple[int, ...], bias: bool = False, opset: int = 11,
        **a: Any,
    ) -> Case:
        b = Const(floats(w[0])) if bias else None
        inputs: list[Any] = [floats(*x), Const(floats(*w)), *([b] if b else [])]
        return row("Conv", *inputs, name=name, opset=opset, **a)

    yield conv("plain", (2, 3, 9, 8), (4, 3, 3, 3), bias=True)
    yield conv("pointwise", (1, 8, 5, 5), (16, 8, 1, 1), bias=True, kernel_shape=[1, 1])
    yield conv("padded_stride", (1, 3, 10, 11), (4, 3, 3, 3), pads=[1, 1, 1, 1], strides=[2, 2])
    yield conv("asymmetric", (1, 3, 10, 10), (4, 3, 3, 3), pads=[0, 0, 1, 1], strides=[2, 2])
    yield conv("one_axis_stride", (1, 3, 10, 10), (4, 3, 3, 3), pads=[1, 1, 1, 1], strides=[2, 1])
    yield conv("dilated", (1, 2, 12, 12), (3, 2, 3, 3), dilations=[2, 3], pads=[2, 3, 2, 3])
    yield conv("depthwise", (1, 6, 9, 9), (6, 1, 3, 3), bias=True, group=6, pads=[1, 1, 1, 1])
    yield conv("multiplier", (1, 3, 9, 9), (6, 1, 3, 3), group=3, strides=[2, 2])
    yield conv("grouped", (2, 8, 7, 7), (12, 4, 3, 3), bias=True, group=2, pads=[1, 1, 1, 1])
    yield conv("grouped_pointwise", (1, 9, 5, 5), (6, 3, 1, 1), group=3)
    yield conv("rows", (1, 4, 6, 9), (4, 1, 1, 7), group=4, pads=[0, 3, 0, 3])
    yield conv("1d", (2, 3, 20), (4, 3, 5), bias=True, strides=[2], pads=[2, 1])
    yield conv("3d", (1, 2, 5, 6, 7), (3, 2, 3, 2, 3), strides=[1, 2, 1], pads=[1, 0, 1, 1, 1, 0])
    for auto in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        yield conv(auto, (1, 2, 7, 8), (3, 2, 3, 2), auto_pad=auto)
        yield conv(f"{auto}_stride", (1, 2, 8, 9), (3, 2, 3, 4), auto_pad=auto, strides=[2, 3])
    # onnxruntime refuses this one
    yield row("Conv", floats(1, 2, 13, 11), Const(floats(3, 2, 3, 3)), name="same_dilated",
              reference="onnx", auto_pad="SAME_UPPER", dilations=[2, 2], strides=[2, 2])
    yield row("Conv", floats(1, 2, 6, 6), floats(3, 2, 3, 3), floats(3), name="runtime_weights")
    yield row("Conv", floats(1, 3, 6, 6, kind=np.float16), Const(floats(4, 3, 3, 3,
              kind=np.float16)), name="half")
    yield row("Conv", floats(1, 3, 6, 6), Const(floats(4, 3, 3, 3)), name="newest", opset=22)


def transposed() -> Iterator[Case]:
    def up(
        name: str, x: tuple[int, ...], w: tuple[int, ...], bias: bool = False, **a: Any
    ) -> Case:
        group = int(str(a.get("group", 1)))
        inputs: list[Any] = [floats(*x), Const(floats(*w))]
        if bias:
            inputs.append(Const(floats(w[1] * group)))
        return row("ConvTranspose", *inputs, name=name, opset=11, **a)

    yield up("plain", (1, 2, 4, 5), (2, 3, 3, 3), bias=True)
    yield up("stride2_kernel2", (1, 4, 5, 6), (4, 3, 2, 2), bias=True, strides=[2, 2])
    yield up("stride2_kernel3", (2, 3, 4, 5), (3, 2, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1])
    yield up("output_padding", (1, 3, 4, 5), (3, 2, 3, 3), strides=[2, 2], pads=[1, 1, 1, 1],
             output_padding=[1, 1])
    yield up("kernel4", (1, 3, 5, 5), (3, 2, 4, 4), strides=[2, 2], pads=[1, 1, 1, 1])
    yield up("uneven", (1, 2, 5, 4), (2, 3, 3, 5), strides=[3, 2], pads=[0, 1, 2, 1])
    yield up("dilated", (1, 2, 5, 5), (2, 3, 3, 2), strides=[2, 1], dilations=[2, 3])
    yield up("stride_above_kernel", (1, 2, 3, 3), (2, 2, 2, 2), strides=[3, 3])
    yield up("grouped", (1, 4, 4, 4), (4, 3, 3, 3), bias=True, group=2, strides=[2, 2])
    yield up("depthwise", (1, 3, 4, 4), (3, 1, 3, 3), group=3, strides=[2, 2])
    yield up("1d", (1, 3, 7), (3, 2, 4), strides=[2])
    yield up("3d", (1, 2, 3, 2, 3), (2, 2, 2, 3, 2), strides=[2, 1, 2])
    yield up("output_shape", (1, 2, 4, 5), (2, 3, 3, 3), strides=[2, 2], output_shape=[9, 10])
    yield up("output_shape_less", (1, 2, 4, 5), (2, 3, 3, 3), strides=[2, 2], output_shape=[8, 10])
    yield up("output_shape_same", (1, 2, 4, 5), (2, 3, 3, 3), strides=[2, 2], output_shape=[8, 10],
             auto_pad="SAME_UPPER")
    for auto in ("SAME_UPPER", "SAME_LOWER", "VALID"):
        yield up(auto, (1, 2, 4, 5), (2, 3, 3, 3), strides=[2, 2], auto_pad=auto)


def pools() -> Iterator[Case]:
    x = floats(2, 3, 9, 10)
    for op in ("MaxPool", "AveragePool"):
        yield row(op, x, opset=11, kernel_shape=[2, 2], strides=[2, 2])
        yield row(op, x, name="padded", opset=11, kernel_shape=[3, 3], strides=[2, 2],
                  pads=[1, 1, 1, 1])
        yield row(op, x, name="asymmetric", opset=11, kernel_shape=[3, 3], strides=[2, 2],
                  pads=[0, 0, 1, 1])
        yield row(op, x, name="ceil", opset=11, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
        yield row(op, x, name="ceil_padded", opset=11, kernel_shape=[3, 2], strides=[3, 3],
                  pads=[1, 1, 1, 0], ceil_mode=1)
        # a window that would lie in the padding alone is left out
        yield row(op, floats(1, 1, 6, 6), name="ceil_out", opset=11, kernel_shape=[2, 2],
                  strides=[3, 3], pads=[1, 1, 1, 1], ceil_mode=1)
        for auto in ("SAME_UPPER", "SAME_LOWER", "VALID"):
            yield row(op, x, name=auto, opset=11, kernel_shape=[2, 3], strides=[2, 1],
                      auto_pad=auto)
        yield row(op, floats(1, 2, 12), name="1d", opset=11, kernel_shape=[4], strides=[3])
        yield row(op, floats(1, 2, 5, 6, 7), name="3d", opset=11, kernel_shape=[2, 3, 2],
                  strides=[1, 2, 2])
        yield row(op, x, name="whole", opset=11, kernel_shape=[9, 10])
        yield row(f"Global{op}", x)
    yield row("AveragePool", x, name="count_pads", opset=11, kernel_shape=[3, 3], strides=[2, 2],
              pads=[1, 1, 1, 1], count_include_pad=1)
    yield row("AveragePool", x, name="count_pads_ceil", opset=19, kernel_shape=[3, 3],
              strides=[2, 2], pads=[1, 1, 1, 1], count_include_pad=1, ceil_mode=1,
              reference="onnx")
    yield row("AveragePool", floats(1, 2, 4, 4), name="wide_pads", opset=11, kernel_shape=[3, 3],
              pads=[2, 2, 2, 2])
    yield row("AveragePool", x, name="dilated", opset=19, kernel_shape=[2, 2], dilations=[2, 2])
    yield row("MaxPool", x, name="dilated", opset=12, kernel_shape=[2, 3], dilations=[2, 2])
    yield row("MaxPool", x - 20, name="negative", opset=12, kernel_shape=[3, 3],
              pads=[1, 1, 1, 1])
    yield row("MaxPool", ints(1, 2, 6, 6, kind=np.int8), name="int8", opset=12,
              kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    for order in (0, 1):
        yield row("MaxPool", x, name=f"indices{order}", opset=12, outputs=2, kernel_shape=[3, 3],
                  strides=[2, 2], pads=[1, 0, 1, 0], storage_order=order)
    for p in (1, 2, 3):
        yield row("LpPool", x, name=str(p), opset=11, kernel_shape=[3, 2], strides=[2, 2], p=p)
    yield row("GlobalLpPool", x, opset=11)
    yield row("LRN", floats(1, 7, 4, 4), size=3)
    # the reference takes as many channels as there are images
    yield row("LRN", floats(7, 7, 2, 2), name="even", size=4, alpha=0.1, beta=0.5, bias=2.0,
              reference="onnx")
    places = np.array([[[[5, 7], [13, 15]]]], np.int64)
    yield row("MaxUnpool", floats(1, 1, 2, 2), Const(places), kernel_shape=[2, 2], strides=[2, 2])


def norms() -> Iterator[Case]:
    x = floats(2, 6, 4, 5)
    stats = [Const(floats(6)), Const(floats(6) * 2), Const(floats(6) * 3), Const(abs(floats(6)))]
    for opset in (7, 9, 14, 15):
        yield row("BatchNormalization", x, *stats, opset=opset, epsilon=1e-3)
    yield row("BatchNormalization", floats(3, 6), *stats, name="rank2", opset=15)
    yield row("InstanceNormalization", x, Const(floats(6)), Const(floats(6)))
    yield row("LayerNormalization", x, Const(floats(5)), Const(floats(5)))
    yield row("LayerNormalization", x, Const(floats(4, 5)), name="axis", axis=-2, epsilon=1e-2)
    yield row("LayerNormalization", floats(2, 3, 8, kind=np.float16),
              Const(floats(8, kind=np.float16)), name="half", wanted=[0], outputs=1)
    yield row("GroupNormalization", x, Const(floats(6)), Const(floats(6)), opset=21, num_groups=3,
              reference="onnx")
    yield row("RMSNormalization", floats(2, 3, 8), Const(floats(8)), opset=23, reference="onnx")
    yield row("MeanVarianceNormalization", x, opset=13)
    for p in (1, 2):
        yield row("LpNormalization", floats(3, 4), name=str(p), opset=13, p=p, axis=1)


def products() -> Iterator[Case]:
    for a, b in (((3, 4), (4, 5)), ((4,), (4, 5)), ((3, 4), (4,)), ((4,), (4,)),
                 ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (5, 4, 6)), ((2, 3, 4), (4, 5)),
                 ((3, 4), (2, 4, 5)), ((1, 3, 4), (1, 4, 1))):
        yield row("MatMul", floats(*a), floats(*b), name="x".join(map(str, (*a, "by", *b))))
    yield row("MatMul", floats(3, 64), Const(floats(64, 33)), name="weights")
    yield row("MatMul", ints(3, 4, kind=np.int32), ints(4, 5, kind=np.int32), name="int32")
    yield row("Gemm", floats(3, 4), Const(floats(5, 4)), Const(floats(5)), transB=1)
    yield row("Gemm", floats(4, 3), floats(4, 5), floats(3, 1), name="scaled", transA=1, alpha=0.5,
              beta=2.0)
    yield row("Gemm", floats(3, 4), floats(4, 5), name="no_bias")
    yield row("Gemm", floats(3, 4), floats(4, 5), scalar(2, np.float32), name="scalar_bias")
    for equation, shapes in (
        ("ij,jk->ik", ((2, 3), (3, 4))), ("bij,bkj->bik", ((2, 3, 4), (2, 5, 4))),
        ("ii->i", ((4, 4),)), ("ij->", ((3, 4),)), ("ij->ji", ((3, 4),)),
        ("ij,jk", ((2, 3), (3, 4))),
        ("...ij,...jk->...ik", ((2, 3, 4), (2, 4, 5))), ("i,j->ij", ((3,), (4,))),
        ("bhwc,hkc->bhwk", ((2, 3, 4, 5), (3, 6, 5))), ("ij,jk,kl->il", ((2, 3), (3, 4), (4, 5))),
        ("bij,bij->b", ((2, 3, 4), (2, 3, 4))),
    ):
        yield row("Einsum", *(floats(*s) for s in shapes), name=equation.replace(" ", ""), opset=12,
                  equation=equation)


def quantised() -> Iterator[Case]:
    x = floats(2, 3, 4) * 3
    for kind in (np.uint8, np.int8):
        zero = scalar(10 if kind is np.uint8 else -5, kind)
        scale = scalar(0.05, np.float32)
        yield row("QuantizeLinear", x, scale, zero, name=kind.__name__, opset=13)
        yield row("DequantizeLinear", ints(2, 3, low=0, high=100, kind=kind), scale, zero,
                  name=kind.__name__, opset=13)
    yield row("QuantizeLinear", x, k(0.1, 0.2, 0.03, kind=np.float32), k(1, 2, 3, kind=np.uint8),
              name="channels", opset=13, axis=1)
    yield row("DequantizeLinear", ints(2, 3, 4, kind=np.int8), k(0.1, 0.2, 0.03, kind=np.float32),
              k(1, 2, 3, kind=np.int8), name="channels", opset=13, axis=1)
    yield row("DequantizeLinear", ints(6, kind=np.int32), scalar(0.1, np.float32), name="int32",
              opset=13)
    yield row("DequantizeLinear", ints(2, 6, kind=np.int8), Const(floats(2, 2, low=0.1)), None,
              name="blocks", opset=21, axis=1, block_size=3)
    yield row("QuantizeLinear", x, scalar(0.01, np.float32), scalar(0, np.uint16), name="uint16",
              opset=21)
    yield row("DynamicQuantizeLinear", floats(3, 5), opset=11, outputs=3)
    a, b = ints(2, 3, low=0, high=200, kind=np.uint8), ints(3, 4, low=-50, high=50, kind=np.int8)
    yield row("MatMulInteger", a, Const(b), scalar(12, np.uint8), scalar(3, np.int8), opset=10)
    yield row("ConvInteger", ints(1, 2, 5, 5, low=0, high=200, kind=np.uint8),
              Const(ints(3, 2, 3, 3, low=0, high=200, kind=np.uint8)), scalar(7, np.uint8),
              opset=10, pads=[1, 1, 1, 1], reference="onnx")
    one = [scalar(0.02, np.float32), scalar(100, np.uint8)]
    yield row("QLinearMatMul", a, *one, Const(ints(3, 4, low=0, high=200, kind=np.uint8)), *one,
              scalar(0.3, np.float32), scalar(90, np.uint8), opset=10)
    yield row("QLinearConv", ints(1, 2, 6, 6, low=0, high=200, kind=np.uint8), *one,
              Const(ints(3, 2, 3, 3, low=-50, high=50, kind=np.int8)),
              Const(floats(3, low=0.01, high=0.05)), Const(np.zeros(3, np.int8)),
              scalar(0.5, np.float32), scalar(128, np.uint8), Const(ints(3, kind=np.int32)),
              opset=10, pads=[1, 1, 1, 1])


def resizes() -> Iterator[Case]:
    x = floats(1, 2, 5, 6)
    none = k(kind=np.float32)
    modes = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric",
             "half_pixel_symmetric", "tf_half_pixel_for_nn")
    for transform in modes:
        opset = 13 if transform == "tf_half_pixel_for_nn" else 19
        if transform != "tf_half_pixel_for_nn":
            for mode in ("nearest", "linear", "cubic"):
                for sizes in ((1, 2, 8, 9), (1, 2, 3, 4), (1, 2, 10, 12), (1, 2, 1, 1)):
                    yield row("Resize", x, none, none, k(*sizes), opset=opset, mode=mode,
                              name=f"{mode}_{transform}_{sizes[2]}",
                              coordinate_transformation_mode=transform)
        else:
            yield row("Resize", x, none, none, k(1, 2, 8, 9), name=transform, opset=11,
                      mode="nearest", coordinate_transformation_mode=transform)
    for rounding in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"):
        yield row("Resize", x, none, k(1, 1, 1.6, 0.7, kind=np.float32), name=rounding, opset=13,
                  mode="nearest", nearest_mode=rounding)
        yield row("Resize", x, none, k(1, 1, 2, 3, kind=np.float32), name=f"{rounding}_whole",
                  opset=13, mode="nearest", nearest_mode=rounding,
                  coordinate_transformation_mode="asymmetric")
    yield row("Resize", x, none, k(1, 1, 2, 2, kind=np.float32), name="scales", opset=11,
              mode="linear", coordinate_transformation_mode="pytorch_half_pixel")
    yield row("Resize", x, k(1, 1, 2, 2, kind=np.float32), name="v10", opset=10)
    yield row("Resize", x, none, none, k(8, 4), name="axes", opset=18, mode="linear", axes=[2, 3],
              reference="onnx")
    yield row("Resize", x, none, none, k(1, 2, 3, 3), name="antialias", opset=18, mode="linear",
              antialias=1)
    yield row("Resize", x, none, none, k(1, 2, 3, 3), name="antialias_cubic", opset=18,
              mode="cubic", antialias=1, reference="onnx")
    yield row("Resize", x, none, none, k(1, 2, 8, 9), name="exclude_outside", opset=13,
              mode="cubic", exclude_outside=1)
    yield row("Resize", x, k(0, 0, 0.2, 0.1, 1, 1, 0.9, 1.3, kind=np.float32), none, k(1, 2, 4, 4),
              name="crop", opset=13, mode="linear", extrapolation_value=7.0,
              coordinate_transformation_mode="tf_crop_and_resize")
    yield row("Upsample", x, k(1, 1, 2, 3, kind=np.float32), opset=9)
    yield row("Upsample", x, k(1, 1, 2, 2, kind=np.float32), name="linear", opset=9, mode="linear")
    yield row("Upsample", x, name="attribute", opset=7, scales=[1.0, 1.0, 2.0, 2.0])


def samplers() -> Iterator[Case]:
    x, grid = floats(1, 2, 4, 5), floats(1, 3, 3, 2, low=-1.3, high=1.3)
    for padding in ("zeros", "border", "reflection"):
        for aligned in (0, 1):
            yield row("GridSample", x, grid, name=f"bilinear_{padding}{aligned}", opset=16,
                      mode="bilinear", padding_mode=padding, align_corners=aligned)
        yield row("GridSample", x, grid, name=f"nearest_{padding}", opset=16, mode="nearest",
                  padding_mode=padding)
    yield row("GridSample", x, grid, name="bicubic", opset=16, mode="bicubic")
    rois = np.array([[0.5, 0.5, 3.5, 3], [1, 0, 4, 2]], np.float32)
    for mode in ("avg",):
        yield row("RoiAlign", x, Const(rois), k(0, 0), name=mode, opset=16, output_height=2,
                  output_width=3, sampling_ratio=2, mode=mode)
    yield row("DepthToSpace", floats(1, 8, 2, 3), opset=13, blocksize=2)
    yield row("DepthToSpace", floats(1, 8, 2, 3), name="CRD", opset=13, blocksize=2, mode="CRD")
    yield row("SpaceToDepth", floats(1, 2, 4, 6), opset=13, blocksize=2)
    yield row("Col2Im", floats(1, 2 * 4, 9), k(4, 4), k(2, 2), opset=18, reference="onnx")
