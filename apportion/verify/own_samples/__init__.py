"""Own inputs: calls of operators that training meets and the database does not, or hardly.

One file per family; each has `samples()`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from apportion.verify.own_samples import (
    attention,
    core,
    factory,
    index,
    linalg,
    loss,
    matmul,
    norm,
    optimizer,
    pointwise,
    reduction,
    view,
    window,
)
from apportion.verify.torch_samples import Absent, Sample

FAMILIES = (
    attention,
    core,
    factory,
    index,
    linalg,
    loss,
    matmul,
    norm,
    optimizer,
    pointwise,
    reduction,
    view,
    window,
)


def samples() -> Iterator[Sample]:
    """All of them, the same at every call."""
    for family in FAMILIES:
        torch.manual_seed(0)
        yield from (s for s in family.samples() if not isinstance(s.target, Absent))
