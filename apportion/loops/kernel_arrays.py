"""KernelArray, KernelLayout: how the arrays of a loop lie where its kernel runs.

Part of the room loops. What kernel_text.py writes subscripts for, and what a rank passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

KERNEL_PREFIX = "_ap_"


@dataclass(frozen=True)
class KernelArray:
    """`shape` is that of the whole array; a block has its dims in `order`, and begins at an origin
    in the dims `origins`. `masked`: what is written is noted in an array of the block's shape. An
    array that `is_absent` is asked for its shape only. Of an array with `keyed` dims the block has
    some rows, by the numbers that these dims give them; a table of open addresses says where.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...]
    origins: tuple[int, ...] = ()
    masked: bool = False
    keyed: tuple[int, ...] = ()
    is_absent: bool = False

    @property
    def block(self) -> str:
        return f"{KERNEL_PREFIX}b_{self.name}"

    def origin(self, dim: int) -> str:
        """The name of the argument with the origin of a dim."""
        return f"{KERNEL_PREFIX}o{dim}_{self.name}"

    def arguments(self) -> list[str]:
        """The names of the kernel's arguments for this array."""
        if self.is_absent:
            return []
        masks = [mask_name(self.name)] if self.masked else []
        slots = self.slots if self.keyed else ()
        return [self.block, *map(self.origin, self.origins), *slots, *masks]

    @property
    def slots(self) -> tuple[str, str]:
        """The names of the arguments with the table of a keyed array's rows."""
        return f"{KERNEL_PREFIX}s_{self.name}", f"{KERNEL_PREFIX}p_{self.name}"

    @property
    def rows(self) -> int:
        """How many rows a keyed array has in all."""
        return math.prod(self.shape[dim] for dim in self.keyed)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a row of a keyed array."""
        return tuple(self.shape[dim] for dim in self.order if dim not in self.keyed)


def mask_name(array: str) -> str:
    """The argument in which a kernel notes what it writes of an array."""
    return f"{KERNEL_PREFIX}m_{array}"


@dataclass(frozen=True)
class KernelLayout:
    """What a kernel is written for: the loop's dims, how many values elements have (`fields` single
    ones, `ragged` arrays), the arrays, the parameters that are `numbers`, whether those are in
    single precision, and whether statements on vectors are turned into loops
    (vector_statements.py)."""

    dims: int
    fields: int
    ragged: int
    arrays: Mapping[str, KernelArray] = field(default_factory=dict)
    numbers: frozenset[str] = frozenset()
    single: bool = False
    turned: bool = True
