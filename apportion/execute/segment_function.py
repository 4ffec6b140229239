"""What a compiler makes of a Segment: a function that does what interpreting the segment does.

Part of the room execute. generate.py and others make SegmentFunctions, ladder.py chooses among
them, a Worker calls them.

A SegmentFunction is called with a Rank and a Context. It reads `rank.tensors[slot]` of the
segment's `ins` and `rank.received[message]` (flat uint8 tensors) of its `messages`; when it
returns, `rank.tensors` has the segment's `outs` and no longer its `frees`, and `rank.received` no
longer the messages whose last reader (`executable.readers`) is in the segment. It records no spans.
"""

from __future__ import annotations

from collections.abc import Callable

from apportion.execute.executable import Executable
from apportion.execute.kernels.base import Context
from apportion.execute.rank import Rank
from apportion.execute.rank_steps import Segment

SegmentFunction = Callable[[Rank, Context], None]

SegmentCompiler = Callable[[Executable, Segment, str], SegmentFunction]
"""Makes the function of a segment for torch's device `place`, or raises CannotCompile."""


class CannotCompile(Exception):
    """A segment cannot be compiled this way; the text is the reason, as a clause."""


def interpreted(segment: Segment) -> SegmentFunction:
    """The function that runs a segment task by task."""

    def run(rank: Rank, context: Context) -> None:
        for task in segment.tasks:
            rank.run(task, context)

    return run
