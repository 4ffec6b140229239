"""Buffer: the permission to send what is added to an array a little later.

Part of the room loops. Where iterations depend on each other through an array in a way that no
scheme keeps, `loops.buffer(array)` as the argument of a loop lets processes work on copies: each
sees what it added itself, and what others added once it has been sent. This is data parallelism, by
permission.

`loops.stale(array, staleness=2)` bounds in clocks how late that may be, and leaves it to the tables
of servers/ what travels when.

With a function the body does not see the array. What it adds is added up, and the process that has
the element calls `apply(element, sum, *state)`, which returns the new element, and the new state if
there is some: AdaGrad, say, whose sum of squares is with the element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from apportion.loops.array import DenseArray
from apportion.loops.loop_body import HelperSource, LoopError, read_helper
from apportion.servers import StoreSettings, settings


@dataclass(frozen=True)
class Buffer:
    """An array whose changes are sent after at most `delay` elements of a process; None: once a
    tile. `apply` makes a new element of what was added, with the elements of `state`. With
    `settings` a table carries the changes."""

    array: DenseArray
    delay: int | None = None
    apply: HelperSource | None = None
    state: tuple[DenseArray, ...] = ()
    settings: StoreSettings | None = None


def buffer(
    array: DenseArray,
    delay: int | None = None,
    apply: Callable[..., Any] | None = None,
    state: Sequence[DenseArray] = (),
) -> Buffer:
    """Lets a loop see changes of an array late: after at most `delay` elements of a process, or
    with None once a tile. With `apply` see the head of this file."""
    if not isinstance(array, DenseArray):
        raise LoopError("loops.buffer takes an array of loops.array")
    if delay is not None and delay < 1:
        raise LoopError(f"a delay of {delay} elements makes no sense; give at least 1")
    for each in state:
        if not isinstance(each, DenseArray) or each.shape != array.shape:
            raise LoopError("the state of a buffer is in arrays of the shape of its own")
    if state and apply is None:
        raise LoopError("a buffer has a state only for the function that applies what was added")
    source = None if apply is None else read_helper(apply)
    return Buffer(array, delay, source, tuple(state))


def stale(
    array: DenseArray,
    staleness: int = 2,
    delay: int | None = None,
    bandwidth: float | str | None = None,
    priority: str = "random",
    **others: Any,
) -> Buffer:
    """Lets a loop see an array that is at most `staleness` clocks old; a clock is `delay` elements
    of a process, or with None a tile. Changes travel early as far as the `bandwidth` of each
    process allows, those first that the `priority` says: fifo, random, relative or absolute
    (docs/loops.md)."""
    plain = buffer(array, delay)
    return replace(plain, settings=settings(staleness, bandwidth, priority, **others))
