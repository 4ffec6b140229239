"""What convolutions of few channels need beside their operands and results: copies of operands.

Part of the room execute. Convolutions that were measured and the signature of another one come in,
the bytes of its workspace go out. A library pads an image of three channels, and puts a gradient in
the order that it wants, so that what such calls need are so many times the bytes of their operands;
how many depends on the algorithm, which calls of about the same arithmetic for each byte share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

import numpy as np

from apportion.machine import KernelMeasurement, cost_fit

ALIKE = 3.0  # times the arithmetic for each byte
FEWEST, OPERANDS = 2, 2
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def thin_convolutions(works: Mapping[str, KernelMeasurement]) -> dict[str, KernelMeasurement]:
    """The convolutions of few channels among measured calls."""
    return {w: x for w, x in works.items() if cost_fit.fit_kind(w).endswith(cost_fit.THIN)}


def copied_operands(
    known: Mapping[str, KernelMeasurement], text: str, flops: float, nbytes: int
) -> int | None:
    """Workspace of a convolution of few channels; None of others, or if too few are like it."""
    kind = cost_fit.fit_kind(text)
    if not kind.endswith(cost_fit.THIN) or not nbytes:
        return None
    density = flops / nbytes
    rows = [
        (_operands(other), work.workspace)
        for other, work in known.items()
        if cost_fit.fit_kind(other) == kind and work.nbytes and work.workspace
        if density <= ALIKE * work.flops / work.nbytes <= ALIKE * ALIKE * density
    ]
    if len(rows) < FEWEST:
        return None
    sizes, needed = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    times = np.linalg.lstsq(sizes, needed, rcond=None)[0]
    if (times < 0).any():
        times = np.full(sizes.shape[1], needed.sum() / sizes.sum())
    return int(np.dot(times, _operands(text)))


def _operands(text: str) -> list[int]:
    """Bytes of the first operands of a call."""
    given = re.findall(r"(\w+)\[([\d,]*)", text.partition("(")[2])[:OPERANDS]
    return [ITEMSIZE.get(name, 4) * prod(int(n) for n in s.split(",") if n) for name, s in given]
