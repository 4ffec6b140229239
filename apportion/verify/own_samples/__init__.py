"""Samples of our own: calls of operators that training meets and the database does not, or hardly.

The second source of Samples for verify/, beside torch_samples.py. One file per family of operators;
each has `samples()`.
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
from apportion.verify.sample import MissingOperator, Sample

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
    """All our samples, the same at every call."""
    for family in FAMILIES:
        torch.manual_seed(0)
        yield from (s for s in family.samples() if not isinstance(s.target, MissingOperator))
