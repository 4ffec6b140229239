"""LoopPlan: everything that the ranks of a loop need in order to run one pass over its elements.

Part of the room loops. The driver makes it from the analysis and from what it knows of the arrays,
and sends it to all ranks; it is plain data.

While a loop runs, an array is

    resident   its parts are cut like space, and each stays with the process that has that part
    rotating   its parts are cut like time, and go from process to process
    boxed      it stays where it lies; before a tile a process fetches the box of elements that the
               tile may touch, and afterwards it sends back what was written
    keyed      the same, for single rows whose numbers a slice of the body finds out beforehand
    tabled     its rows are in a table of servers/, and may be stale
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apportion.loops.array_layout import ArrayLayout
from apportion.loops.kernel_arrays import KernelArray
from apportion.loops.kernel_text import KernelText
from apportion.loops.loop_body import HelperSource
from apportion.loops.tile_boxes import TileBoxes
from apportion.loops.tile_schedule import TileSchedule
from apportion.servers import StoreSettings

RESIDENT, ROTATING, BOXED, KEYED, TABLED = "resident", "rotating", "boxed", "keyed", "tabled"
READ, WRITTEN, ADDED, UPDATED = "read", "written", "added", "updated"
"""What a tile does to a copy of an array: nothing; what it wrote takes the place of what was there;
what it added is added, though others have added too (a buffer); or a function of the user's makes a
new element of the old one and of what was added up."""


@dataclass(frozen=True)
class ArrayUse:
    """One array of a loop: its number, where it is while the loop runs, and how the kernel sees it.
    A resident array has one part for each process, a rotating one a part for each part of time.

    change  READ, WRITTEN, ADDED or UPDATED
    boxes   of a boxed array
    apply   the function that makes a new element of an UPDATED array
    state   numbers of the arrays that it keeps beside it
    is_volatile  the elements change during a pass though this use only reads them
    settings  of the table of a tabled array; `is_kept`: the table of the last pass still holds
    """

    number: int
    placement: str
    kernel: KernelArray
    layout: ArrayLayout
    change: str
    boxes: TileBoxes | None = None
    state: tuple[int, ...] = ()
    apply: HelperSource | None = None
    is_volatile: bool = False
    settings: StoreSettings | None = None
    is_kept: bool = False


@dataclass(frozen=True)
class LoopPlan:
    """One pass: the elements' array by its number, the kernel, its arrays and its scalars. A tile
    is run in `chunks`; what is fetched is fetched anew for each. `slice` is the text of the
    function that finds the rows of keyed arrays; with `repeated` they are the same in every
    pass."""

    over: int
    text: KernelText
    schedule: TileSchedule
    uses: tuple[ArrayUse, ...]
    scalars: tuple[tuple[str, Any], ...]
    seed: int = 0
    interpreted: bool = False
    chunks: int = 1
    slice: KernelText | None = None
    repeated: bool = False
