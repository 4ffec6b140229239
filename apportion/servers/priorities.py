"""Which rows travel first when not all can.

Part of the room servers. Rows with changes that have not been sent come in, with the clock of their
oldest change, how many changes of the table came before it, and two kinds of importance; out go the
rows, the most urgent first.

    fifo       the oldest change first, by its clock and then by what came before it. (Bösen's
               release goes by clock and number of the row, which sends the first rows again and
               again where there is time for more than one round in a clock)
    random     any order
    relative   where the changes were largest in relation to the values: the sum of |delta / value|
               over columns and merged changes, with the value before each; |delta| where it was 0
    absolute   the sum of |delta|

Bösen's relative magnitude adds up what has been merged, so that changes which cancel each other
still count. Its default is random.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from apportion.columns import Floats, Ints

Clocks = npt.NDArray[np.int32]
Order = Callable[[Clocks, Ints, Floats, np.random.Generator], Ints]
"""Of each row the clock of its oldest change, what came before that, and its importance; and a
generator -> order of the rows."""


def fifo(oldest: Clocks, since: Ints, importance: Floats, draw: np.random.Generator) -> Ints:
    """The oldest change first."""
    return np.lexsort((since, oldest))


def random(oldest: Clocks, since: Ints, importance: Floats, draw: np.random.Generator) -> Ints:
    """Any order."""
    return draw.permutation(len(oldest))


def largest(oldest: Clocks, since: Ints, importance: Floats, draw: np.random.Generator) -> Ints:
    """The most important first."""
    return np.argsort(-importance, kind="stable")


PRIORITIES: Mapping[str, Order] = {
    "fifo": fifo,
    "random": random,
    "relative": largest,
    "absolute": largest,
}


def importance_of(
    deltas: npt.NDArray[Any], values: npt.NDArray[Any], priority: str
) -> npt.NDArray[np.float64]:
    """How important changes of rows are; `values` are those before them. Nothing, where the order
    does not ask."""
    if PRIORITIES[priority] is not largest:
        return np.zeros(len(deltas))
    size = np.abs(deltas)
    if priority == "relative":
        below = np.abs(values)
        if size.dtype.kind != "f":
            size = size.astype(np.float64)
        with np.errstate(over="ignore"):
            np.divide(size, below, out=size, where=below > 0)
    found: npt.NDArray[np.float64] = size.sum(axis=1, dtype=np.float64)
    return found
