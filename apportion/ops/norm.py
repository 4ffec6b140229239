"""Normalisations over trailing dimensions: opaque there, so that they stay one kernel."""

from __future__ import annotations

from typing import Any

from apportion.formula import Undescribed
from apportion.tdl import Output, axes, describe, f, opaque, reduce


@describe("aten.native_layer_norm")
def layer_norm(x: Any, shape: Any, weight: Any, bias: Any) -> Any:
    whole = (slice(None),) * len(shape)
    lead = x.ndim - len(shape)
    parameters = [p[whole] for p in (weight, bias) if p is not None]
    i = axes("i", x.ndim)
    rows, columns = i[:lead], i[lead:]
    source = x[(*rows, *whole)]
    statistic = Output.of((*rows, *axes("one", len(shape))), opaque(source))
    return Output.of(i, opaque(source, *parameters)[columns]), statistic, statistic


@describe("aten.native_layer_norm_backward")
def layer_norm_backward(
    grad: Any, x: Any, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, mask: Any
) -> Any:
    lead = x.ndim - len(shape)
    if x.shape[lead:] != shape:
        raise Undescribed("the kernel is told the whole normalised shape")
    i = axes("i", x.ndim)
    rows, columns = i[:lead], i[lead:]
    whole = (slice(None),) * len(shape)
    ones = (0,) * len(shape)
    statistics = (mean[(*rows, *ones)], rstd[(*rows, *ones)])
    scale = () if weight is None else (weight[whole],)
    slices = (grad[(*rows, *whole)], x[(*rows, *whole)], *statistics, *scale)
    here = grad[(*rows, *columns)]
    normalised = f("normalise", x[(*rows, *columns)], *statistics)
    found = (
        Output.of(i, opaque(*slices)[columns]),
        Output.of(columns, reduce("sum", rows, here * normalised)),
        Output.of(columns, reduce("sum", rows, here)),
    )
    return tuple(output if keep else None for output, keep in zip(found, mask, strict=True))
