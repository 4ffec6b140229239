"""torch's product of groups of rows for what torch has no kernel for: fake tensors and float64.

A mixture of experts calls aten._grouped_mm. Its kernel takes no float64, in which steps are
compared, and its fake kernel nothing but bfloat16. record.py records it by `fake_grouped_mm`, and
the eager reference (random_rules.py) runs it by `grouped_mm`; execute/ has a kernel of its own.
"""

from __future__ import annotations

from typing import Any

import torch

GROUPED_MM = torch.ops.aten._grouped_mm.default


def fake_grouped_mm(
    a: torch.Tensor, b: torch.Tensor, ends: Any = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """An empty tensor of the result's shape and dtype."""
    if a.dim() == b.dim() == 2:
        rows: tuple[int, ...] = (ends.shape[0], a.shape[0])
    elif a.dim() == 3 and b.dim() == 2:
        rows = (a.shape[1],)
    else:
        rows = tuple(a.shape[:-1])
    return a.new_empty((*rows, b.shape[-1]), dtype=out_dtype or a.dtype)


def grouped_mm(
    a: torch.Tensor, b: torch.Tensor, ends: Any = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """The product by torch's kernel, or, in float64, group by group; rows of no group give 0."""
    if a.dtype != torch.float64 or ends is None or a.dim() != 2:
        result: torch.Tensor = GROUPED_MM(a, b, ends, bias, out_dtype)
        return result
    out = torch.zeros_like(fake_grouped_mm(a, b, ends, bias, out_dtype))
    start = 0
    for number, end in enumerate(ends.tolist()):
        if b.dim() == 3:
            out[start:end] = a[start:end] @ b[number]
        else:
            out[number] = a[:, start:end] @ b[start:end]
        start = end
    return out
