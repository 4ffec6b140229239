"""One pass of a loop on one rank: tile by tile, as the schedule says.

Part of the room loops. Parts of time come in and go out (rotation.py), boxes of arrays that lie
elsewhere are fetched and put back (boxed_copies.py), and the kernel runs in between. A rank waits
for nothing else than what it needs next.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba.core.errors import NumbaError, NumbaWarning

from apportion.columns import Ints
from apportion.loops.apply_updates import compile_apply
from apportion.loops.boxed_copies import BoxedCopy
from apportion.loops.compile_kernel import Kernel, compile_kernel, interpreted_kernel
from apportion.loops.kernel_arrays import KERNEL_PREFIX as OWN
from apportion.loops.kernel_text import NEUTRAL, length_name
from apportion.loops.keyed_copies import KeyedCopy
from apportion.loops.loop_plan import BOXED, KEYED, RESIDENT, ROTATING, TABLED, LoopPlan
from apportion.loops.loop_rank import LoopRank
from apportion.loops.rotation import Rotation
from apportion.loops.tabled_copies import TabledCopy

Fault = tuple[int, int, tuple[int, ...]]
"""The code of a reference, the subscript that is out of range, and the key of the element."""


@dataclass(frozen=True)
class PassReport:
    """What a rank tells of a pass: seconds in all, those in which it computed, and bytes sent; what
    is wrong with a subscript, and what the compiler says if it refuses the kernel."""

    seconds: float
    busy_seconds: float
    sent_bytes: int
    fault: Fault | None = None
    refused: str = ""


def run_pass(rank: LoopRank, plan: LoopPlan) -> PassReport:
    """Runs a rank's tiles; all ranks have to call it."""
    return _Pass(rank, plan).run()


class _Pass:
    """A pass under way."""

    def __init__(self, rank: LoopRank, plan: LoopPlan) -> None:
        self.rank, self.plan = rank, plan
        self.dealt = rank.dealt[plan.over]
        self.busy, self.refused = 0.0, ""
        rotating = tuple(use for use in plan.uses if use.placement == ROTATING)
        self.rotation = Rotation(rank.peers, plan.schedule, rotating, rank.arrays)
        self.boxed = [
            BoxedCopy(
                rank.peers,
                use,
                rank.arrays[use.number],
                plan.schedule,
                self.dealt.facts,
                compile_apply(use),
                tuple(rank.arrays[each] for each in use.state),
            )
            for use in plan.uses
            if use.placement == BOXED
        ]
        self.keyed = [
            KeyedCopy(
                rank.peers,
                use,
                rank.arrays[use.number],
                compile_apply(use),
                tuple(rank.arrays[each] for each in use.state),
            )
            for use in plan.uses
            if use.placement == KEYED
        ]
        self.tabled = [
            TabledCopy(rank.peers, use, rank.arrays[use.number], rank.table(use))
            for use in plan.uses
            if use.placement == TABLED
        ]
        by_rows: list[KeyedCopy | TabledCopy] = [*self.keyed, *self.tabled]
        self.finders = [each for each in by_rows if each.use.kernel.keyed]
        self.finders.sort(key=lambda each: plan.uses.index(each.use))  # the order of the slice
        self.copies: list[BoxedCopy | KeyedCopy | TabledCopy] = [*self.boxed, *by_rows]
        self.rows = self._row_finder()
        text = plan.text
        self.kernel: Kernel = interpreted_kernel(text) if plan.interpreted else compile_kernel(text)
        begin = [
            rank.sums[name][1] if name in rank.sums else NEUTRAL[how]
            for name, how in text.accumulators
        ]
        self.sums = np.array(begin, np.float64)
        self.fault: npt.NDArray[np.int64] = np.zeros(3, np.int64)
        self.constant = self._constant_arguments()

    def run(self) -> PassReport:
        began = time.perf_counter()
        fault: Fault | None = None
        for step, row in enumerate(self.plan.schedule.table):
            part = row[self.rank.peers.rank]
            self.rotation.before(step, part)
            for chunk in range(self.plan.chunks):
                for each in self.boxed:
                    each.fetch(step)
                self._fetch_rows(step, part, chunk)
                if part >= 0 and fault is None and not self.refused:
                    fault = self._run_chunk(part, chunk)
                for copy in self.copies:
                    copy.put_back()
                if self.tabled:
                    self.rank.end_clock()
            self.rotation.after(step)
        self.rotation.finish()
        for table in self.tabled:
            table.finish()
        names = self.plan.text.accumulators
        for (name, how), number in zip(names, self.sums.tolist(), strict=True):
            self.rank.sums[name] = (how, number)
        sent = self.rotation.sent_bytes + sum(copy.sent_bytes for copy in self.copies)
        seconds = time.perf_counter() - began
        return PassReport(seconds, self.busy, sent, fault, self.refused)

    def _run_chunk(self, part: int, chunk: int) -> Fault | None:
        """Runs some elements of a tile; returns what is wrong with a subscript."""
        begin, end = self._span(part, chunk)
        if begin == end:
            return None
        arguments = self._arguments(part, begin, end)
        started = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NumbaWarning)  # about speed, and casts
                self.kernel(*arguments)
        except IndexError:
            code, element, index = self.fault.tolist()
            key = tuple(int(column[element]) for column in self.dealt.elements.keys)
            return code, index, key
        except NumbaError as error:
            self.refused = str(error)
        finally:
            self.busy += time.perf_counter() - started
        return None

    def _span(self, part: int, chunk: int) -> tuple[int, int]:
        """The elements of a chunk of a tile."""
        if part < 0:
            return 0, 0
        first, last = (int(each) for each in self.dealt.tile_starts[part : part + 2])
        count, chunks = last - first, self.plan.chunks
        return first + count * chunk // chunks, first + count * (chunk + 1) // chunks

    def _row_finder(self) -> Kernel | None:
        text = self.plan.slice
        if text is None:
            return None
        return interpreted_kernel(text) if self.plan.interpreted else compile_kernel(text)

    def _fetch_rows(self, step: int, part: int, chunk: int) -> None:
        """Has the rows of keyed arrays at hand that a chunk is going to touch."""
        for table in self.tabled:
            if not table.use.kernel.keyed:
                table.fetch_all()
        if not self.finders:
            return
        key = (self.plan.over, self.plan.text.text, step, chunk)
        wanted = self.rank.rows.get(key) if self.plan.repeated else None
        if wanted is None:
            touched = self._touched(*self._span(part, chunk))
            wanted = [copy.want(rows) for copy, rows in zip(self.finders, touched, strict=True)]
            if self.plan.repeated:
                self.rank.rows[key] = wanted
        for copy, rows in zip(self.finders, wanted, strict=True):
            copy.fetch(rows)

    def _touched(self, begin: int, end: int) -> list[Ints]:
        """The rows that some elements touch, of every keyed array: counted, then noted."""
        assert self.rows is not None and self.plan.slice is not None
        counts = np.zeros(len(self.finders), np.int64)
        found = [np.zeros(0, np.int64) for _ in self.finders]
        for _ in range(2):
            known = self.constant | {f"{OWN}begin": begin, f"{OWN}end": end, f"{OWN}counts": counts}
            known |= {f"{OWN}rows{k}": rows for k, rows in enumerate(found)}
            if begin < end:
                self.rows(*(known[name] for name in self.plan.slice.arguments))
            if not (counts > [len(rows) for rows in found]).any():
                break
            found = [np.empty(count, np.int64) for count in counts]
        return found

    def _arguments(self, part: int, begin: int, end: int) -> list[Any]:
        """The kernel's arguments for some elements of the part `part` of time."""
        known = self.constant | {f"{OWN}begin": begin, f"{OWN}end": end}
        for use in self.plan.uses:
            if use.placement in (RESIDENT, ROTATING):
                stored = self.rank.arrays[use.number]
                mine = part if use.placement == ROTATING else self.rank.peers.rank
                known[use.kernel.block] = stored.blocks[mine]
                for dim in use.kernel.origins:
                    known[use.kernel.origin(dim)] = stored.box(mine)[dim][0]
        for copy in self.copies:
            known |= copy.arguments()
        return [known[name] for name in self.plan.text.arguments]

    def _constant_arguments(self) -> dict[str, Any]:
        elements = self.dealt.elements
        return {
            f"{OWN}sums": self.sums,
            f"{OWN}fault": self.fault,
            f"{OWN}starts": elements.starts,
            f"{OWN}numbers": elements.numbers,
            f"{OWN}seed": self.plan.seed,
            f"{OWN}random": np.zeros(1, np.uint64),
            **{f"{OWN}k{dim}": column for dim, column in enumerate(elements.keys)},
            **{f"{OWN}f{k}": column for k, column in enumerate(elements.fields)},
            **{f"{OWN}r{k}": column for k, column in enumerate(elements.ragged)},
            **{length_name(length): length for length in self.plan.text.lengths},
            **dict(self.plan.scalars),
        }
