"""Split, Part, Pad: what a cut makes of an Op. The nouns that derive.py makes in split/.

A Split has one Part for each combination of the parts of all axes, the last axis fastest.
"""

from __future__ import annotations

from dataclasses import dataclass

from apportion.describe import Box
from apportion.graph import Arg


@dataclass(frozen=True, slots=True)
class Pad:
    """Elements equal to `value` that a part's `input` gets before and after along `dim`."""

    input: int
    dim: int
    before: int
    after: int
    value: float


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a split Op.

    inputs   region of each input
    zeros    inputs that are blocks of zeros in this part instead
    outputs  region of each output
    terms    for each output which of its partial values this is; 0 where it is not partial
    args     arguments of the local call
    scales   for each output the factor that its local result is multiplied with
    pads     what the kernel gets around the regions
    """

    inputs: tuple[Box, ...]
    zeros: tuple[int, ...]
    outputs: tuple[Box, ...]
    terms: tuple[int, ...]
    args: tuple[Arg, ...]
    scales: tuple[float, ...]
    flops: float
    pads: tuple[Pad, ...] = ()


@dataclass(frozen=True, slots=True)
class Split:
    """All parts, and per output its reducer (None: not partial) and number of partial values."""

    parts: tuple[Part, ...]
    reducers: tuple[str | None, ...]
    terms: tuple[int, ...]
