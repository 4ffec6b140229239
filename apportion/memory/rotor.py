"""rotor: the best segments of a chain under a limit, by dynamic programming (Beaumont et al. 2019).

Part of the room memory. A StepModel and a limit in bytes come in, the Ops to recompute go out. For
the links of the chain from i on (forward_chain.py) and m bytes,

    best(i, m) = min of
      keep link i      kept(i) + beside(i) <= m:     best(i + 1, m - kept(i))
      a checkpoint     for k > i, kept(i .. l) + beside(l) <= m for all l in i .. k - 1:
                       forward(i .. k - 1) + best(k, m - output(k - 1))

are the seconds of forward that are computed again: either link i keeps all it makes, or the links
up to k keep nothing but the output of the last, the rest of the step is done, and they are run
again. `beside` is what is held besides while a link or its backward runs. In full, a segment that
is run again may be divided by checkpoints once more, and then some links are computed three times
and more. A Graph has one copy of an Op at most, so that here a segment that is run again keeps
everything; what is lost are plans for less memory than that allows. Bytes are counted by links and
in steps, rounded up: a step may be over the limit by what some links hand on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from apportion.columns import Floats, Ints
from apportion.graph import BACKWARD
from apportion.memory.forward_chain import ChainLink, forward_chain
from apportion.memory.step_model import StepModel

STEPS = 500  # as in the paper


def rotor(model: StepModel, limit: int) -> frozenset[int] | None:
    """The Ops to recompute so that the step stays within a limit; None if no segments do that."""
    links = forward_chain(model.graph, model.costs)
    unit = max(limit / STEPS, 1.0)
    beside = [math.ceil(one / unit) for one in _beside(model, links)]
    kept = [math.ceil(link.kept / unit) for link in links]
    output = [math.ceil(link.output / unit) for link in links]
    steps = math.floor(limit / unit)
    least, choice = _table(links, kept, beside, output, steps)
    if not math.isfinite(least[0, steps]):
        return None
    ops: set[int] = set()
    first, room = 0, steps
    while first < len(links):
        end = int(choice[first, room])
        if end == first:  # it keeps what it makes
            room, first = room - kept[first], first + 1
            continue
        for link in links[first : end - 1]:
            ops.update(link.ops)
        ops.update(links[end - 1].inner)
        room, first = room - output[end - 1], end
    return frozenset(ops)


def _beside(model: StepModel, links: Sequence[ChainLink]) -> list[int]:
    """For each link what is held while it or its backward runs, beside what it and those before it
    keep."""
    graph, before, found = model.graph, 0, []
    number = {op: k for k, link in enumerate(links) for op in link.ops}
    rows: list[list[int]] = [list(link.ops) for link in links]
    for op, meant in enumerate(graph.ops):
        if meant.phase == BACKWARD and meant.forward in number:
            rows[number[meant.forward]].append(op)
    for link, ops in zip(links, rows, strict=True):
        before += link.kept
        found.append(max(int(model.levels[op]) for op in ops) - before)
    return found


def _table(
    links: Sequence[ChainLink],
    kept: Sequence[int],
    beside: Sequence[int],
    output: Sequence[int],
    steps: int,
) -> tuple[Floats, Ints]:
    """best(i, m) for all i and m, and what it takes: i to keep, or the k of a checkpoint."""
    count = len(links)
    least = np.full((count + 1, steps + 1), math.inf)
    least[count] = 0.0
    choice = np.zeros((count, steps + 1), np.int64)
    rooms = np.arange(steps + 1)
    for i in range(count - 1, -1, -1):
        enough = rooms >= kept[i] + beside[i]
        least[i] = np.where(enough, _shifted(least[i + 1], kept[i]), math.inf)
        choice[i] = i
        held, most, seconds = 0, 0, 0.0
        for k in range(i + 1, count):
            held, seconds = held + kept[k - 1], seconds + links[k - 1].forward
            most = max(most, held + beside[k - 1])
            then = seconds + _shifted(least[k], output[k - 1])
            then = np.where(rooms >= most, then, math.inf)
            better = then < least[i]
            least[i] = np.where(better, then, least[i])
            choice[i][better] = k
    return least, choice


def _shifted(row: Floats, by: int) -> Floats:
    """A row by the room that is left after so many steps are taken."""
    found = np.full(len(row), math.inf)
    if by < len(row):
        found[by:] = row[: len(row) - by]
    return found
