"""OpRecords: what compiled lowering is told about Ops and how they are cut. A part of lower/.

In: a Graph, and the Splits and devices of Choices. Out: one array of integers, with a record for
every Op, Split and cut; op_tasks.py reads them. Equal records are written once, so two Ops whose
records and Flows are the same have the same tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.describe import find_description
from apportion.graph import Graph
from apportion.split import Split

# Fields of the record of an Op; then come the stages of its distinct inputs, and for every argument
# which of these it is
OPERATOR, ALIAS, ITEMSIZE, INPUTS, RESULTS, ARGUMENTS, STAGES = range(7)
# Fields of the record of a Split; then come the flops of every part (their bits), and part x
# argument: whether it is a block of zeros, none if no argument is
COUNT, ZEROS, FLOPS = range(3)
# Fields of the record of a cut; then comes the device of every part of every replica
SPLIT, PARTS, DEVICES = range(3)

ROOM = 1024


class OpRecords:
    """Records of the Ops of a Graph, and of the cuts that are asked for, in one array."""

    def __init__(
        self, graph: Graph, feeds: Sequence[Sequence[tuple[int, int]]], ending: Sequence[int]
    ) -> None:
        """`feeds` are the distinct inputs of every Op with the stages at which it reads them,
        `ending` are the stages at which the end of the step reads Values."""
        self.flat, self.used = np.zeros(ROOM, np.int64), 0
        self.operators = tuple(dict.fromkeys(op.kind for op in graph.ops))
        self.of_op = self._add_ops(graph, feeds, ending)
        self.uncut = self._add((0, 0))
        self._splits: dict[int, int] = {}

    def _add(self, record: Sequence[int]) -> int:
        """Adds a record; where it is."""
        at, end = self.used, self.used + len(record)
        if end > len(self.flat):
            self.flat = np.concatenate([self.flat, np.zeros(end, np.int64)])
        self.flat[at:end], self.used = record, end
        return at

    def _add_ops(
        self, graph: Graph, feeds: Sequence[Sequence[tuple[int, int]]], ending: Sequence[int]
    ) -> list[int]:
        """The records of all Ops, and last that of the end of the step."""
        numbers = {kind: number for number, kind in enumerate(self.operators)}
        known: dict[tuple[int, ...], int] = {}
        found = []
        for op, fed in zip(graph.ops, feeds, strict=True):
            order = {value: j for j, (value, _) in enumerate(fed)}
            description = find_description(op.kind)
            alias = description is not None and description.alias
            itemsize = graph.values[op.outputs[0]].itemsize if op.outputs else 4
            record = (
                numbers[op.kind], int(alias), itemsize, len(fed), len(op.outputs), len(op.inputs),
                *(stage for _, stage in fed), *(order[value] for value in op.inputs),
            )  # fmt: skip
            if record not in known:
                known[record] = self._add(record)
            found.append(known[record])
        return [*found, self._add((len(numbers), 0, 1, len(ending), 0, 0, *ending))]

    def add_cut(self, split: Split, devices: Sequence[int]) -> int:
        """Adds the record of a Split whose parts are on these devices; where it is."""
        at = self._splits.get(id(split))
        if at is None:
            flops = np.array([part.flops for part in split.parts], np.float64)
            zeros = [k in part.zeros for part in split.parts for k in range(len(part.inputs))]
            given = zeros if any(zeros) else []
            at = self._add([len(flops), len(given), *flops.view(np.int64).tolist(), *given])
            self._splits[id(split)] = at
        return self._add((at, len(devices), *devices))
