"""Products of groups of rows, each with a matrix of its own: the experts of a mixture.

Rows lie in order of their group, and two small tensors tell where every group starts and ends.
Parts know where their rows begin: they are cut along rows, groups and both widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from apportion.describe.descriptions import PartLocation, describe
from apportion.describe.language import Output, axis, f, reduce

Shapes = Sequence[tuple[int, ...]]


def _from_row(args: tuple[Any, ...], local: PartLocation) -> tuple[Any, ...]:
    """The last argument is where axis `s` begins."""
    return (*args[:-1], args[-1] + local.first("s"))


def _mm_flops(inputs: Shapes, outputs: Shapes) -> float:
    (rows, inward), (_, outward) = inputs[0], outputs[0]
    return 2.0 * rows * inward * outward


def _outer_flops(inputs: Shapes, outputs: Shapes) -> float:
    (inward, rows), (_, outward) = inputs[0], inputs[1]
    return 2.0 * rows * inward * outward


@describe("apportion.grouped_mm", local=_from_row, flops=_mm_flops)
def grouped_mm(a: Any, b: Any, starts: Any, ends: Any, first: Any) -> Any:
    """Row s times the matrix of its group; a row of no group gives 0."""
    s, n, g, k = (axis(name) for name in "sngk")
    inside = f("in_group", s + first, starts[g], ends[g])
    return Output.of((s, n), reduce("sum", [g, k], inside * a[s, k] * b[g, k, n]))


@describe("apportion.grouped_outer", local=_from_row, flops=_outer_flops)
def grouped_outer(a: Any, b: Any, starts: Any, ends: Any, first: Any) -> Any:
    """For every group the sum over its rows of a column of `a` times a row of `b`."""
    s, n, g, k = (axis(name) for name in "sngk")
    inside = f("in_group", s + first, starts[g], ends[g])
    return Output.of((g, k, n), reduce("sum", [s], inside * a[k, s] * b[s, n]))
