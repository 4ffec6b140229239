"""Parts of time that go from process to process while others are worked on.

Part of the room loops: what one rank does about the rotating arrays of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from apportion.loops.array_layout import Block, box_shape
from apportion.loops.loop_plan import ArrayUse
from apportion.loops.peers import FIRST_FREE_TAG, MessageInFlight, Peers
from apportion.loops.stored_array import StoredArray
from apportion.loops.tile_schedule import Handover, TileSchedule


@dataclass
class Rotation:
    """The rotating arrays of a rank during a pass. Receives are posted one round ahead."""

    peers: Peers
    schedule: TileSchedule
    uses: tuple[ArrayUse, ...]
    arrays: dict[int, StoredArray]
    sent_bytes: int = 0
    posted: int = 0
    expected: list[Handover] = field(default_factory=list)
    incoming: dict[tuple[int, int], list[tuple[MessageInFlight, int, Block]]] = field(
        default_factory=dict
    )
    outgoing: list[tuple[MessageInFlight, int, Block]] = field(default_factory=list)
    spare: dict[int, list[Block]] = field(default_factory=dict)
    leaving: dict[int, list[Handover]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        me = self.peers.rank
        handovers = self.schedule.handovers if self.uses else ()
        mine = [each for each in handovers if each.receiver == me]
        self.expected = sorted(mine, key=lambda each: each.before)
        for each in handovers:
            if each.sender == me:
                self.leaving.setdefault(each.after, []).append(each)

    def before(self, step: int, part: int) -> None:
        """Has the part of time at hand that a step works on; part -1 is none."""
        ahead = max(1, self.schedule.time_parts // self.schedule.processes)
        while (
            self.posted < len(self.expected) and self.expected[self.posted].before <= step + ahead
        ):
            self._post(self.expected[self.posted])
            self.posted += 1
        for message, number, block in self.incoming.pop((part, step), []):
            message.wait()
            self.arrays[number].blocks[part] = block

    def after(self, step: int) -> None:
        """Hands over what others work on next."""
        for each in self.leaving.get(step, []):
            for at, use in enumerate(self.uses):
                block = self.arrays[use.number].blocks.pop(each.time)
                if block.size:
                    message = self.peers.send(block, each.receiver, self._tag(each.time, at))
                    self.outgoing.append((message, use.number, block))
                    self.sent_bytes += block.nbytes

    def finish(self) -> None:
        """Has all parts at hand that begin the next pass here."""
        for each in self.expected[self.posted :]:
            self._post(each)
        for (part, _), messages in self.incoming.items():
            for message, number, block in messages:
                message.wait()
                self.arrays[number].blocks[part] = block
        for message, _, _ in self.outgoing:
            message.wait()

    def _post(self, each: Handover) -> None:
        found = self.incoming.setdefault((each.time, each.before), [])
        for at, use in enumerate(self.uses):
            block = self._buffer(use, each.time)
            if block.size:
                message = self.peers.receive(block, each.sender, self._tag(each.time, at))
                found.append((message, use.number, block))
            else:
                self.arrays[use.number].blocks[each.time] = block

    def _tag(self, part: int, use: int) -> int:
        return FIRST_FREE_TAG + part * len(self.uses) + use

    def _buffer(self, use: ArrayUse, part: int) -> Block:
        """Memory for a part: that of one which has been sent, if there is."""
        left = []
        for message, number, block in self.outgoing:
            if message.is_completed():
                message.wait()
                self.spare.setdefault(number, []).append(block)
            else:
                left.append((message, number, block))
        self.outgoing = left
        stored = self.arrays[use.number]
        shape = box_shape(stored.box(part), use.layout.order)
        size = int(np.prod(shape, dtype=np.int64))
        spare = self.spare.get(use.number, [])
        fitting = next((k for k, block in enumerate(spare) if block.size == size), None)
        if fitting is not None:
            return spare.pop(fitting).reshape(shape)
        return np.empty(shape, stored.array.dtype)
