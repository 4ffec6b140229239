"""doppler_graph: the text graphs of DOPPLER (xinyuyao/Doppler, compute_graph/*.txt).

In: the text of a file. Out: an ImportedGraph.

    112                          nodes, with inputs
    0, 1, 2,                     inputs, which are no part of the graph; all others count from 0
    0, 1, 2, 3                   sources of edges
    4, 4, 5, 5                   their targets
    1000000000000,4000000000000  of each node: what it computes, and what sending its output takes;
    ...                          a third word is the kind of operator

Times are divided by 1e10, as in DOPPLER's simulator, whose devices take nodes first come, first
served, and whose outputs travel without waiting for each other. The files say nothing of memory or
of the number of devices, which is 4 unless told.

An edge that is there twice counts once. Three of the published files without kinds have one target
that differs from their twins with kinds: 6 for 16 in chain_mm_112nodes.txt (and another critical
path), 7 for 18 in transformer_block_215nodes.txt, 38 for 97 in full_transformer_layer_261nodes.txt.
It is the one target without a space before it. Such targets are taken literally, with a note.
"""

from __future__ import annotations

import re

from apportion.graph import ImportedCosts
from apportion.place.imports.imported_graph import (
    ACCELERATOR,
    ImportedGraph,
    ImportedNode,
    build_graph,
    checked_time,
)

DOPPLER = "doppler"
TIMES_ARE_OF = 1e10
USUAL_DEVICES = 4


def read_doppler(text: str, name: str) -> ImportedGraph:
    """The graph in a text; ValueError, in one sentence, if there is none."""
    lines = text.splitlines()
    if len(lines) < 4:
        raise ValueError(f"the file has {len(lines)} lines; the graph begins on line 5")
    (total, *more) = _numbers(lines[0], 1) or [-1]
    if more or total < 0:
        raise ValueError("line 1 is not the number of nodes")
    inputs = _numbers(lines[1], 2)
    sources, targets = _numbers(lines[2], 3), _numbers(lines[3], 4)
    if len(sources) != len(targets):
        raise ValueError(f"line 3 has {len(sources)} sources and line 4 {len(targets)} targets")
    rows = [(number, line) for number, line in enumerate(lines[4:], start=5) if line.strip()]
    if len(set(inputs)) != len(inputs):
        raise ValueError("line 2 has an input twice")
    if len(rows) != total - len(inputs):
        raise ValueError(
            f"line 1 says {total} nodes, line 2 that {len(inputs)} of them are inputs, and there "
            f"are costs of {len(rows)}"
        )
    if not rows:
        raise ValueError("the graph has no nodes")
    readers: list[dict[int, None]] = [{} for _ in rows]
    for source, target in zip(sources, targets, strict=True):
        for end in (source, target):
            if end >= len(rows):
                raise ValueError(f"the edge from {source} to {target} names node {end}, which is "
                                 "not there")  # fmt: skip
        readers[source][target] = None
    nodes = [
        _node(index, number, line, tuple(readers[index]))
        for index, (number, line) in enumerate(rows)
    ]
    notes = _damage(lines[3], sources, targets)
    return ImportedGraph(
        name, DOPPLER, build_graph(nodes), "1e10", USUAL_DEVICES, free_links=True, notes=notes
    )


def _node(index: int, line_number: int, line: str, readers: tuple[int, ...]) -> ImportedNode:
    compute, *rest = (word.strip() for word in line.split(","))
    if len(rest) not in (1, 2):
        raise ValueError(f"line {line_number} is not the costs of a node: {line.strip()[:40]!r}")
    times = []
    for word, what in ((compute, "computation"), (rest[0], "transfer")):
        try:
            number = float(word)
        except ValueError:
            raise ValueError(
                f"the {what} of node {index} (line {line_number}) is {word[:40]!r}, not a number"
            ) from None
        times.append(checked_time(number / TIMES_ARE_OF, f"the {what} of node {index}"))
    kind = rest[1] if len(rest) == 2 else "imported"
    costs = ImportedCosts(((ACCELERATOR, times[0]),), times[1])
    return ImportedNode(str(index), kind, costs, [(0, readers)])


def _numbers(line: str, line_number: int) -> list[int]:
    words = [word.strip() for word in line.split(",") if word.strip()]
    for word in words:
        if not re.fullmatch(r"\d{1,9}", word, re.ASCII):
            raise ValueError(f"line {line_number} has {word[:40]!r} instead of a node's number")
    return [int(word) for word in words]


def _damage(line: str, sources: list[int], targets: list[int]) -> tuple[str, ...]:
    """Notes on targets that have no space before them, in a line in which the others do."""
    gaps = re.findall(r",(\s*)(?=\d)", line)
    tight = [at for at, gap in enumerate(gaps, start=1) if not gap]
    if not tight or len(tight) * 2 > len(gaps):
        return ()
    return tuple(
        f"the target of the edge from {sources[at]} to {targets[at]} is written unlike the others "
        "(no space before it) and may be damaged; it is taken as it is"
        for at in tight
    )
