"""chen: segments of a chain, recomputed one at a time (Chen et al. 2016).

Part of the room memory. A Graph and its RecomputeCosts come in, the Ops to recompute go out. Both
methods cut the chain (forward_chain.py) into segments and keep what is handed from one to the next;
the rest of every segment is computed again, but for that of the last, which the backward begins
with.

    chen_root    segments of about the root of the chain's length
    chen_greedy  a new segment whenever the bytes of one exceed a share; of several shares around
                 the root of boundaries times largest segment, as the paper has it, the quickest
                 that fits a limit, or the one with the lowest peak
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from apportion.graph import Graph
from apportion.memory.choose_recompute import Simulate
from apportion.memory.forward_chain import ChainLink, forward_chain
from apportion.memory.recompute_costs import RecomputeCosts

SHARES = 12  # that are tried


def chen_root(graph: Graph, costs: RecomputeCosts) -> frozenset[int]:
    """The Ops of segments of equal lengths, the root of that of the chain."""
    links = forward_chain(graph, costs)
    length = max(round(math.sqrt(len(links))), 1)
    return _recomputed([links[k : k + length] for k in range(0, len(links), length)])


def chen_greedy(graph: Graph, costs: RecomputeCosts, run: Simulate) -> frozenset[int]:
    """The Ops of segments of about equal bytes, of the best of several numbers of bytes; `run`
    says what a set holds and takes."""
    links = forward_chain(graph, costs)
    trial = _segments(links, sum(link.kept for link in links) / max(math.sqrt(len(links)), 1.0))
    boundaries = sum(row[-1].output for row in trial)
    largest = max(sum(link.kept for link in row) for row in trial)
    middle = math.sqrt(boundaries * largest)
    shares = [middle * 2 ** (k / SHARES - 0.5) for k in range(SHARES + 1)]
    sets = {_recomputed(_segments(links, share)) for share in shares}
    return min(sets, key=_ranking(run))


def _ranking(run: Simulate) -> Callable[[frozenset[int]], tuple[tuple[bool, float], list[int]]]:
    return lambda ops: (run(ops).rank, sorted(ops))


def _segments(links: Sequence[ChainLink], most: float) -> list[list[ChainLink]]:
    found: list[list[ChainLink]] = [[]]
    held = 0
    for link in links:
        found[-1].append(link)
        held += link.kept
        if held > most:
            found.append([])
            held = 0
    return [row for row in found if row]


def _recomputed(segments: Sequence[Sequence[ChainLink]]) -> frozenset[int]:
    """All Ops but those that make what is handed on, and those of the last segment."""
    ops: set[int] = set()
    for row in segments[:-1]:
        for link in row[:-1]:
            ops.update(link.ops)
        ops.update(row[-1].inner)
    return frozenset(ops)
