"""Attention kernels, one Op each: cut along batch and heads, and along queries where nothing
depends on their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apportion.tdl import Output, axis, describe, opaque

Shapes = Sequence[tuple[int, ...]]


def _flops(inputs: Shapes, outputs: Shapes) -> float:
    batch, heads, queries, width = inputs[0]
    return 4.0 * batch * heads * queries * inputs[1][2] * width


def _backward_flops(inputs: Shapes, outputs: Shapes) -> float:
    return 2.5 * _flops(inputs[1:], outputs)


def _mask(mask: Any, b: Any, h: Any) -> tuple[Any, ...]:
    if mask is None:
        return ()
    lead = (slice(None),) * 2 if mask.ndim == 2 else None
    if lead is not None:
        return (mask[lead],)
    place = [0 if n == 1 else a for n, a in zip(mask.shape[:2], (b, h), strict=True)]
    return (mask[(*place, slice(None), slice(None))],)


@describe("apportion.sdpa", flops=_flops)
def sdpa(q: Any, k: Any, v: Any, dropout: Any, causal: Any, mask: Any) -> Any:
    b, h, i, d = (axis(name) for name in "bhid")
    keys = (k[b, h, :, :], v[b, h, :, :])
    if causal or mask is not None:
        slices = (q[b, h, :, :], *keys, *_mask(mask, b, h))
        return Output.of((b, h, i, d), opaque(*slices)[i, d]), Output.of(
            (b, h, i), opaque(*slices)[i]
        )
    slices = (q[b, h, i, :], *keys)
    return Output.of((b, h, i, d), opaque(*slices)[d]), Output.of((b, h, i), opaque(*slices))


@describe("apportion.sdpa_backward", flops=_backward_flops)
def sdpa_backward(
    grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dropout: Any, causal: Any, mask: Any
) -> Any:
    b, h, i, j, d = (axis(name) for name in "bhijd")
    whole = (slice(None), slice(None))
    slices = [x[(b, h, *whole)] for x in (grad, q, k, v, out)]
    slices += [lse[b, h, :], *_mask(mask, b, h)]
    for_query = Output.of((b, h, i, d), opaque(*slices)[i, d])
    for_key = Output.of((b, h, j, d), opaque(*slices)[j, d])
    return for_query, for_key, for_key
